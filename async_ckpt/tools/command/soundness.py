"""The verification of a place: bytes against digests, and trackers and journals against manifests.

In: a place. Out: a report, as text or a document. Knows nothing of: command-line arguments.

A training may write to the run during the check. So trackers and journals are checked before the bytes are read, and
again afterwards. Only faults that were found both times are reported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import typer

from ... import Place
from ...errors import (
    CheckpointError,
    CorruptCheckpointError,
    ForeignFileError,
    FormatVersionError,
    NotCommittedError,
    StorageUnavailableError,
)
from ...plumbing import Reader, Storage, file_digests, reports, runs, spec, timing
from ...plumbing import find as finding
from ...plumbing import verification as checking
from ...weights.publishing.verify_versions import check_versions
from .exit_statuses import for_each
from .listing import checkpoints_of
from .output import NO, USAGE, Answer, print_json, print_text, progress, shown_rate
from .place_arguments import parent_of, place_below
from .place_kinds import EVERYTHING, beside_versions, kind_of, targets_of
from .repair import damages_of
from .run_places import everywhere
from .selection import ChosenRun, refuse_newer, runs_at
from .trainer_folders import TrainerCheckpoint, checkpoints_in, size_of

_SHOWN_NAMES: Final = 3
# The cost of a file in a newer format, and the command that helps.
_NEWER: Final = ("this version of async_ckpt cannot read it", "pip install --upgrade async_ckpt")


@dataclass(frozen=True, slots=True)
class SoundnessFault:
    """One fault. `cost` is the loss that it causes, and `mend` the command or advice against it; each may be empty."""

    subject: str
    text: str
    cost: str = ""
    mend: str = ""
    tensors: tuple[str, ...] = ()


@dataclass(slots=True)
class Soundness:
    """The findings at a place: sound and damaged steps or versions, faults, and notes that are not faults."""

    is_publication: bool = False
    sound: list[int] = field(default_factory=list)
    damaged: list[int] = field(default_factory=list)
    faults: list[SoundnessFault] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    num_archives: int = 0
    num_bytes: int = 0
    seconds: float = 0.0

    @property
    def subject(self) -> str:
        """The checked steps or versions, in words: "3 steps, 100 to 300"."""
        numbers, word = sorted({*self.sound, *self.damaged}), "version" if self.is_publication else "step"
        if not numbers:
            return "one archive"
        if len(numbers) == 1:
            return f"{word} {numbers[0]}"
        return f"{len(numbers)} {word}s, {numbers[0]} to {numbers[-1]}"


def show(places: Sequence[Place], *, all_: bool, base: Path | None, as_json: bool) -> None:
    """Verify each place, and print the reports."""
    targets = everywhere((place for place, _ in targets_of(places, EVERYTHING)), asks_all=all_)
    for_each(partial(verify_place, base=base, as_json=as_json), targets)


def verify_place(place: Place, *, base: Path | None, as_json: bool) -> None:
    """Verify one place, and print the report. Raises typer.Exit if it has a fault."""
    every = soundness_of(place, base=base)
    if as_json:
        print_json("verification", _document(place, every))
    else:
        for found in every:
            _print(place, found)
    if any(found.faults for found in every):
        raise typer.Exit(NO)


def _print(place: Place, found: Soundness) -> None:
    for fault in found.faults:
        print_text(f"{fault.subject}: {fault.text}")
        for word, text in (("costs", fault.cost), ("mend", fault.mend)):
            if text:
                print_text(f"  {word}: {text}")
    for note in found.notes:
        print_text(f"note: {note}")
    print_text(_summary(place, found))


def _summary(place: Place, found: Soundness) -> str:
    if found.damaged:
        verdict = f"{found.subject}, {len(found.damaged)} damaged"
    elif found.faults and not found.sound:
        verdict = f"{found.subject}, damaged"
    else:
        verdict = f"{found.subject}, sound" + ("; but see above" if found.faults else "")
    speed = f" at {shown_rate(found.num_bytes / found.seconds)}" if found.num_bytes and found.seconds else ""
    return f"{place.shown}: {verdict}; {reports.sized(found.num_bytes)} read in {found.seconds:.2f} s{speed}"


def _document(place: Place, every: Sequence[Soundness]) -> dict[str, Any]:
    faults = [fault for found in every for fault in found.faults]
    document: dict[str, Any] = {"place": place.shown, "sound": not faults}
    for found in every:
        document["versions" if found.is_publication else "steps"] = found.sound
        is_beside = found.is_publication and len(every) > 1
        document["damaged_versions" if is_beside else "damaged"] = found.damaged
    document |= {
        "faults": faults,
        "num_archives": sum(found.num_archives for found in every),
        "num_bytes": sum(found.num_bytes for found in every),
        "notes": [note for found in every for note in found.notes],
    }
    if faults:
        document |= {"error": faults[0].text, "tensors": list(faults[0].tensors)}
    return document


def soundness_of(place: Place, *, base: Path | None = None) -> list[Soundness]:
    """Verify an archive, a step, a run, a publication, or checkpoints of torch.distributed.checkpoint or a framework.

    If versions of a publication are stored beside something else, both are verified. `base` is the folder of the
    publication's base model. Raises NotCommittedError if there is nothing to verify, Answer for a file without digests,
    and ValueError for a folder of torch.distributed.checkpoint without checksums.
    """
    file = finding.opened_as_file(place)
    if file is not None:
        return [_of_file(*file)]
    names = place.storage().names("")
    others = beside_versions(names)
    has_versions, kind = len(others) < len(names), kind_of(place, others)
    every: list[Soundness] = []
    if kind == "step":
        every.append(_of_step(place))
    elif runs.OF_DCP in names:
        every.append(_of_dcp(place))
    elif kind in ("trainer", "checkpoint"):
        every.append(_of_checkpoints(place, kind, others))
    elif kind == "run" or not has_versions:
        every.append(_of_run(place))
    if has_versions:
        try:
            every.append(_of_publication(place, base))
        except CheckpointError as error:
            is_missing = isinstance(error, NotCommittedError)
            if not (every and (is_missing or every[0].faults)):
                raise
            every[0].notes.append(str(error))  # keep the findings so far
    return every


class _Reading(NamedTuple):
    """A verification in progress, its findings, and `advance`, which counts bytes that were read without it."""

    found: Soundness
    verification: checking.Verification
    advance: Callable[[int], None]


@contextmanager
def _reading(num_bytes: int) -> Iterator[_Reading]:
    """The context of a verification of `num_bytes` bytes. At its end, the findings get the totals and the seconds."""
    found, begin = Soundness(), timing.monotonic()
    with progress("verify", num_bytes) as advance:
        verification = checking.Verification(advance)
        yield _Reading(found, verification, advance)
    found.num_archives, found.num_bytes = len(verification.errors), verification.num_bytes
    found.seconds = timing.monotonic() - begin


def _of_file(reader: Reader, path: str) -> Soundness:
    """Verify an archive."""
    with reader, _reading(reader.num_bytes) as (found, verification, _):
        try:
            found.notes += verification.compare_file(reader, path)
        except ForeignFileError as error:
            raise Answer(str(error), USAGE) from error
        except CheckpointError as error:
            found.faults.append(_fault_of_file(path, error))
    return found


def _of_dcp(place: Place) -> Soundness:
    """Verify a folder of torch.distributed.checkpoint."""
    storage = place.storage()
    with _reading(sum(storage.sizes("").values())) as (found, verification, _):
        try:
            found.notes += verification.compare_dcp(storage)
        except CorruptCheckpointError as error:
            found.faults.append(_fault_of_file(storage.locate(""), error))
    return found


def _of_checkpoints(place: Place, kind: str, names: Sequence[str]) -> Soundness:
    """Verify the checkpoints of a framework in a folder, or the single one that the place is."""
    root = place
    if kind == "checkpoint":
        root, name = parent_of(place)
        names = [name]
    storage = root.storage()
    checkpoints = checkpoints_in(storage, names) or [TrainerCheckpoint(name, "", None) for name in names]
    steps = {row.folder: row.step for row in checkpoints_of(root, names) if row.step >= 0}
    notes: dict[str, None] = {}
    unchecked: list[str] = []
    with _reading(sum(size_of(storage, checkpoint.name) for checkpoint in checkpoints)) as reading:
        found = reading.found
        for checkpoint in checkpoints:
            faults = []
            for path, call in _checks_of_files(root, checkpoint.name, reading):
                try:
                    notes |= dict.fromkeys(call() or ())
                except (ForeignFileError, EOFError, ValueError):
                    unchecked.append(path)
                except StorageUnavailableError:
                    raise
                except CheckpointError as error:
                    faults.append(_fault_of_file(path, error))
            found.faults += faults
            if checkpoint.name in steps:
                (found.damaged if faults else found.sound).append(steps[checkpoint.name])
    if unchecked:
        notes[f"{len(unchecked):,} files have no checksums, and were not verified, such as {min(unchecked)}"] = None
    found.notes += notes
    if len(checkpoints) > 1:
        _note_newest(found)
    return found


_Check = Callable[[], tuple[str, ...] | None]


def _checks_of_files(root: Place, name: str, reading: _Reading) -> Iterator[tuple[str, _Check]]:
    """The calls that verify a checkpoint, each with its path: of files of digests, files whose digests they have, steps
    and folders of torch.distributed.checkpoint, and all other files. Make each call before asking for the next.
    """
    storage, verification = root.storage(), reading.verification
    paths = [f"{name}/{path}" for path in storage.sizes(name)] or [name]
    digests: dict[str, str] = {}

    def note(path: str) -> None:
        digests.update(file_digests.noted_in(storage, path))

    for path in filter(file_digests.is_of_digests, paths):
        yield storage.locate(path), partial(note, path)
    for path, digest in digests.items():
        yield storage.locate(path), partial(_compare_digest, storage, path, digest, reading)
    folders: list[str] = []
    for path in paths:
        folder, _, last = path.rpartition("/")
        if folder and last == runs.MANIFEST_NAME:
            parent = folder.rpartition("/")[0]
            step = finding.CommittedStep.at(storage, folder, (place_below(root, parent) if parent else root).storage)
            yield storage.locate(folder), partial(verification.compare_step, step)
        elif folder and last == runs.OF_DCP and path not in digests:
            yield storage.locate(folder), partial(verification.compare_dcp, place_below(root, folder).storage())
        else:
            continue
        folders.append(f"{folder}/")
    for path in paths:
        if path not in digests and not file_digests.is_of_digests(path) and not path.startswith(tuple(folders)):
            yield storage.locate(path), partial(_compare_file, storage, path, verification)


def _compare_digest(storage: Storage, path: str, digest: str, reading: _Reading) -> tuple[str, ...]:
    reading.verification.errors[storage.locate(path), ""] = None
    reading.verification.num_bytes += file_digests.compare_file(storage, path, digest, reading.advance)
    return ("files were compared with the digests that were saved beside them",)


def _compare_file(storage: Storage, path: str, verification: checking.Verification) -> tuple[str, ...]:
    with storage.open(path) as reader:
        return verification.compare_file(reader, storage.locate(path))


def _fault_of_file(path: str, error: CheckpointError) -> SoundnessFault:
    text, tensors = str(error).removeprefix(f"{path}: "), getattr(error, "tensors", ())
    if isinstance(error, FormatVersionError):
        return SoundnessFault(path, text, *_NEWER)
    return SoundnessFault(path, text, _among(tensors), "fetch or save the file again", tensors)


# --- steps --------------------------------------------------------------------------------------------------------


def _of_step(place: Place) -> Soundness:
    step = finding.step_at(place.storage(), place)
    assert step is not None
    error = None
    try:
        manifest = step.read()
    except CheckpointError as unread:
        name = runs.parse_step_name(place.text.rstrip("/").rpartition("/")[2])
        number, total, error = name.step if name else 0, 0, unread
    else:
        number, total = manifest.step, manifest.num_bytes
    with _reading(total) as (found, verification, _):
        if error is None:
            try:
                verification.compare_step(step)
            except StorageUnavailableError:
                raise
            except CheckpointError as damage:
                error = damage
    _note_step(found, checking.StepCheck(number, "", error), "ROOT")
    return found


def _of_run(place: Place) -> Soundness:
    storage, chosen = place.storage(), runs_at(place)
    trackers, before = checking.trackers_in(storage), [*_faults_beside(place, chosen)]
    total = sum(made.num_bytes for one in chosen for made in one.run.view().values() if made is not None)
    with _reading(total) as (found, verification, _):
        for check in checking.checks_of_run(storage, verification):
            _note_step(found, check, place.shown)
    _note_newest(found)
    still = {*_faults_beside(place, runs_at(place))} if before else set()
    found.faults += [fault for fault in before if fault in still]
    reported = {fault.subject for fault in found.faults}
    if found.sound or found.damaged:
        steps = sorted({*found.sound, *found.damaged})
        others = {name: text for name, text in trackers.items() if name not in reported}
        found.notes += checking.notes_on(others, steps)
    return found


def _note_newest(found: Soundness) -> None:
    """If the newest step is damaged, add a note of the newest sound step, from which a training can continue."""
    newest = max(found.sound, default=-1)
    if found.damaged and max(found.damaged) > newest:
        found.notes.append("no step is sound" if newest < 0 else f"the newest sound step is {newest}")


def _faults_beside(place: Place, chosen: list[ChosenRun]) -> Iterator[SoundnessFault]:
    """Faults of trackers and journals that contradict the manifests; none if a manifest has a newer format."""
    try:
        for one in chosen:
            refuse_newer(one.run)
    except FormatVersionError:
        return
    for damage in damages_of(chosen, leftovers=False):
        if damage.mend is not None:
            yield SoundnessFault(damage.subject, damage.text, mend=f"async-ckpt repair {place.shown} --apply")


def _note_step(found: Soundness, check: checking.StepCheck, root: str) -> None:
    if check.error is None:
        found.sound.append(check.step)
        return
    found.damaged.append(check.step)
    subject, path = f"step {check.step}", getattr(check.error, "path", "")
    text = "; ".join([str(check.error), *getattr(check.error, "__notes__", ())])
    if isinstance(check.error, FormatVersionError):
        found.faults.append(SoundnessFault(subject, text, *_NEWER))
        return
    tensors = getattr(check.error, "tensors", ())
    cost = _among(tensors) + f" of step {check.step}"
    lies_in = runs.parse_step_name(path.rpartition("/")[0].rpartition("/")[2])
    step = lies_in.step if lies_in else check.step
    if step != check.step:
        cost = f"{cost}, which borrows from step {step}" if tensors else f"perhaps the groups borrowed from step {step}"
    mend = f"async-ckpt cp OTHER_ROOT {root} --steps {step} --overwrite, where another root has the step"
    found.faults.append(SoundnessFault(subject, text, cost, mend, tensors))


def _among(tensors: Sequence[str]) -> str:
    """The first names and the number of the others, or "everything" if no name is known."""
    return spec.some_of(tensors, _SHOWN_NAMES) or "everything"


# --- versions -----------------------------------------------------------------------------------------------------


def _of_publication(place: Place, base: Path | None) -> Soundness:
    with _reading(1) as (found, _, advance):
        checked = check_versions(place, base=base, on_check=lambda check: advance(check.num_bytes))
    checks, found.is_publication = checked.checks, True
    found.sound, found.damaged, found.notes = [*checked.sound], [*checked.damaged], [*checked.notes]
    found.num_archives, found.num_bytes = len(checks), sum(check.num_bytes for check in checks)
    anchors = {check.version for check in checks if check.kind == "anchor"}
    for check in checks:
        if check.error is not None:
            subject = f"version {check.version}" + (f" in {check.folder}" if check.folder else "")
            found.faults.append(
                SoundnessFault(
                    subject,
                    str(check.error),
                    f"version {check.version} cannot be pulled",
                    _remedy(check.version, anchors, found.damaged),
                )
            )
    return found


def _remedy(version: int, anchors: set[int], damaged: Sequence[int]) -> str:
    later = min((number for number in anchors if number > version and number not in damaged), default=None)
    if later is not None:
        return f"pull version {later}, which is an anchor, or a later one"
    return "publish an anchor: a new Publisher's first version is one"
