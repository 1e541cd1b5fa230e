"""The kind of a place, and of the things below it.

In: a place. Out: its kind; the runs, publications, checkpoints and archives below it. Knows nothing of: what
subcommands do with them.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Final, Literal, NamedTuple

from ... import Naming, Place
from ...errors import CheckpointError, StorageUnavailableError
from ...plumbing import Storage, runs, spec, threads
from .output import USAGE, Answer, print_note
from .place_arguments import parent_of, place_below
from .trainer_folders import TrainerCheckpoint, checkpoints_in, framework_of

Kind = Literal["step", "publication", "run", "trainer", "checkpoint", "runs", "nothing"]

_VERSION: Final = re.compile(r"weight_v\d{6,18}|rank_\d{5}_of_\d{5}")
USUAL_FORMATS: Final = sorted({naming.step_format for naming in (Naming(), *runs.NAMINGS.values())})
# The same without the format of the number, as in `StepName.rest`.
USUAL_NAMINGS: Final = {one.partition("{")[0] + "{}" for one in USUAL_FORMATS}
_LOOKED_INTO: Final = 8
_READERS: Final = 32
# The most levels that a walk descends, and the most folders that it visits on a level.
_DEEPEST: Final = 4
_MOST_FOLDERS: Final = 1000
# The endings of names of archives, and of checkpoints that are one file, with their writers.
_FILES: Final = {
    ".tar": "archive",
    ".tar.zst": "archive",
    ".safetensors": "safetensors",
    ".pt": "torch",
    ".pth": "torch",
    ".ckpt": "Lightning",
}
# The first bytes of an archive of this library, unlike another tar.
_BEGINNING: Final = b"index.json\0"


# The kinds of things that a walk finds: kinds with steps, and all kinds.
RUNS: Final = ("run", "trainer")
EVERYTHING: Final = (*RUNS, "publication", "checkpoint", "file")


class Found(NamedTuple):
    """A thing that a walk has found: its name below the place, its kind, and the writer of a checkpoint or file."""

    name: str
    kind: Literal["run", "publication", "trainer", "checkpoint", "file"]
    writer: str = ""


class Walk(NamedTuple):
    """The things below a place, by name, and the folders that were not visited."""

    found: list[Found]
    unseen: list[str]

    def of(self, kinds: Collection[str]) -> list[str]:
        """The names of the things of these kinds, each once. A run and the versions beside it have one name."""
        return [*dict.fromkeys(one.name for one in self.found if one.kind in kinds)]


def kind_of(place: Place, names: Sequence[str] | None = None) -> Kind:
    """The kind of a place, by the names there: "trainer" for a folder with checkpoints of a framework, "checkpoint" for
    one of these, and "runs" for a folder with any of the other things below it.
    """
    names = place.storage().names("") if names is None else names
    kind = own_kind(place, names)
    return "runs" if kind == "nothing" and names and walk(place, is_first_enough=True).found else kind


def own_kind(place: Place, names: Sequence[str]) -> Kind:
    """The kind of a place, regardless of the folders below it."""
    if runs.MANIFEST_NAME in names:
        return "step"
    if any(map(_VERSION.fullmatch, names)):
        return "publication"
    storage = place.storage()
    if _has_steps(storage, names):
        return "run"
    if framework_of(place.text.rstrip("/").rpartition("/")[2], names) is not None:
        return "checkpoint"
    return "trainer" if checkpoints_in(storage, names, most=_LOOKED_INTO) else "nothing"


def beside_versions(names: Collection[str]) -> list[str]:
    """The names at a place that belong neither to versions nor to ranks that publish versions."""
    return [name for name in names if not _VERSION.fullmatch(name)]


def trainer_of(place: Place) -> tuple[Place, str] | None:
    """The folder of a trainer, and the name of the checkpoint if the place is one of its checkpoints; else None."""
    if (kind := kind_of(place)) == "trainer":
        return place, ""
    root, name = parent_of(place)
    is_one = kind in ("checkpoint", "nothing") and name and checkpoints_in(root.storage(), [name])
    return (root, name) if is_one else None


def targets_of(places: Iterable[Place], kinds: Collection[str]) -> list[tuple[Place, str]]:
    """These places, with empty names. A folder of runs is replaced by the things in it, of these kinds, with names."""
    targets: list[tuple[Place, str]] = []
    for place in places:
        if kind_of(place) != "runs":
            targets.append((place, ""))
            continue
        below = walk(place)
        names = below.of(kinds)
        if not names:
            raise Answer(f"{place.shown}: there is no run in it; async-ckpt ls shows its content", USAGE)
        if below.unseen:
            print_note(f"{place.shown}: not looked into: {spec.some_of(below.unseen, 5)}")
        targets += [(place_below(place, name), name) for name in names]
    return targets


def note_trainers(targets: Sequence[tuple[Place, str]]) -> list[tuple[Place, str]]:
    """These places without trainers' folders that a walk has found. Prints a note for each of these.

    If nothing else was found, all places are returned: the error for the first one explains what it is.
    """
    others = []
    for place, name in targets:
        checkpoints = checkpoints_in(place.storage(), place.storage().names(""), most=1) if name else []
        if checkpoints and kind_of(place) == "trainer":
            print_note(f"left out: {described_trainer(place, checkpoints[0])}")
        else:
            others.append((place, name))
    return others or [*targets]


def described_trainer(place: Place, newest: TrainerCheckpoint) -> str:
    """The text for a trainer's folder where a run is needed: what the folder is, and which subcommands accept it."""
    return (
        f"{place.shown} has checkpoints of {newest.framework}, not of a run of async_ckpt: use ls, watch, page, "
        f"verify, cp or prune, or name one of them, such as {place_below(place, newest.name).shown}"
    )


def nothing_at(place: Place) -> Answer:
    """The error for a place without a run, step or publication: what the place is, and the subcommand for it."""
    from ...plumbing import find  # imports torch

    opened = find.opened_as_file(place)
    if opened is not None:
        opened[0].close()
        return Answer(f"{place.shown} is a file, not a run; look into it with async-ckpt inspect", USAGE)
    if checkpoints := checkpoints_in(place.storage(), place.storage().names(""), most=1):
        return Answer(described_trainer(place, checkpoints[0]), USAGE)
    if kind_of(place) == "checkpoint":
        return Answer(f"{place.shown} is one checkpoint: name the folder above it, or use inspect or verify", USAGE)
    if unseen := walk(place).unseen:
        return Answer(
            f"{place.shown}: nothing was found down to {_DEEPEST} levels; name a folder below {unseen[0]}", USAGE
        )
    return Answer(str(find.nothing_committed(place.storage())))


def _has_steps(storage: Storage, names: Sequence[str]) -> bool:
    newest: list[str] = []  # usual namings only: the folder may have thousands of other names
    for naming in USUAL_NAMINGS:
        prefix = naming.removesuffix("{}")
        of_naming = names[bisect_left(names, prefix) : bisect_left(names, f"{prefix}:")]  # a colon follows digits
        newest += of_naming[-_LOOKED_INTO:]
    if storage.existing([f"{name}/{runs.MANIFEST_NAME}" for name in newest]):
        return True
    return bool(storage.existing([f"{name}/{runs.MANIFEST_NAME}" for _, name in runs.possible_steps(names)]))


def walk(place: Place, *, is_first_enough: bool = False) -> Walk:
    """Look for runs, publications, checkpoints and archives below a place. Hidden folders are skipped."""
    found: list[Found] = []
    unseen: list[str] = []
    level, below = [""], list[str]()

    def look(name: str) -> None:
        """Add the things in a folder, and the names to look into next."""
        at = place_below(place, name) if name else place
        try:
            names = at.storage().names("")
            things = _things_at(at, name, names) if names else []
        except StorageUnavailableError:
            if not name or not place.is_local:
                raise
            unseen.append(name)  # a broken link, or a folder that this user may not list
            return
        if not names:
            return  # a file
        found.extend(things)
        files = {thing.name for thing in things if thing.kind == "file"}
        if not name or len(files) == len(things):
            prefix = f"{name}/" if name else ""
            others = (f"{prefix}{one}" for one in beside_versions(names) if not one.startswith("."))
            below.extend([one for one in others if one not in files])

    for _ in range(_DEEPEST):
        threads.run_together("look", [partial(look, name) for name in level], max_threads=_READERS)
        if is_first_enough and found:
            return Walk(found, unseen)
        level, below = sorted(below), []
        unseen += level[_MOST_FOLDERS:]
        del level[_MOST_FOLDERS:]
    unseen += [name for name in level if place.storage().names(name)]
    return Walk(sorted(found), sorted(unseen))


def _things_at(place: Place, name: str, names: Sequence[str]) -> list[Found]:
    """The thing that a folder is, and a run that is beside versions in it. If the folder is none, the archives in it.

    The place at which the walk begins counts as none.
    """
    kind = own_kind(place, names) if name else "nothing"
    if kind == "publication":
        is_run = own_kind(place, beside_versions(names)) == "run"
        return [Found(name, "publication"), *([Found(name, "run")] if is_run else [])]
    if kind == "run":
        return [Found(name, "run")]
    if kind in ("trainer", "checkpoint"):
        checkpoints = checkpoints_in(place.storage(), names, most=1)
        writer = framework_of(name.rpartition("/")[2], names) if kind == "checkpoint" else checkpoints[0].framework
        return [Found(name, kind, writer or "")]
    if kind == "step":  # a step outside of a run, such as a copy of one step
        return [Found(name, "checkpoint", "async_ckpt")]
    prefix = f"{name}/" if name else ""
    files = ((one, _writer_of(place.storage(), one)) for one in names if not one.startswith("."))
    return [Found(f"{prefix}{one}", "file", writer) for one, writer in files if writer]


def _writer_of(storage: Storage, name: str) -> str:
    """The writer of a file by its name; a tar must also begin like an archive. Empty for other files and folders."""
    writer = next((writer for suffix, writer in _FILES.items() if name.endswith(suffix)), "")
    if not writer or runs.is_library_name(name):
        return ""
    with (
        suppress(FileNotFoundError, IsADirectoryError, EOFError, ValueError, CheckpointError),
        storage.open(name) as reader,
    ):
        beginning = bytearray(len(_BEGINNING))
        if name.endswith(".tar"):
            reader.read_into(0, memoryview(beginning))
        return writer if not name.endswith(".tar") or beginning == _BEGINNING else ""
    return ""
