"""Entries in the folder of a run that are not its own steps: steps of another naming, and files of other programs.

In: a storage, and a test for the run's own names. Out: the newest step of another naming; descriptions for people.
Knows nothing of: loading.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import chain
from typing import Final, NamedTuple

from ...errors import CorruptCheckpointError, FormatVersionError
from ..format import digests, index, safetensors
from ..storage.interface import Storage
from .manifest import NAME as MANIFEST
from .manifest import Manifest, is_retired_name
from .manifest import parse as parse_manifest
from .marks import is_about_step
from .naming import StepName, advice_to_open, parse_step_name, pattern_of, words_for
from .receipts import attempt_of_all
from .starts import split_starts

# Only this many folders of each naming are read: those of the newest steps.
_LOOKED_INTO: Final = 10
# The file that torch.distributed.checkpoint writes last.
OF_DCP: Final = ".metadata"
# The file that each rank writes last with use_collectives=False.
_OF_ONE_RANK: Final = re.compile(r"__\d+\.metadata")


_FILE_SUFFIXES: Final = (".ckpt", ".pt", ".pth")  # files that torch.save writes


class OtherNaming(NamedTuple):
    """A committed step of another naming."""

    folder: str
    manifest: Manifest
    advice: str  # how to open the run with that naming


def newest_of_other_namings(
    storage: Storage, is_own: Callable[[str], bool], names: Sequence[str] | None = None
) -> OtherNaming | None:
    """The step that was committed last, of all namings but the run's own.

    Steps of two namings are compared by time of commit: under a new naming, a run may count from 0 again.
    """
    names = storage.names("") if names is None else names
    others = list(_by_naming(name for name in names if not is_own(name)))
    paths = {f"{folder}/{MANIFEST}": folder for folders in others for folder in folders}
    committed = {paths[path] for path in storage.existing(list(paths))}
    newest_of_each = []
    for folders in others:
        newest = next((folder for folder in folders if folder in committed), None)
        manifest = None if newest is None else _read(storage, newest)
        if newest is not None and manifest is not None:
            newest_of_each.append(OtherNaming(newest, manifest, advice_to_open(newest, names)))
    return max(newest_of_each, key=lambda other: other.manifest.created, default=None)


def possible_steps(names: Iterable[str]) -> Iterator[tuple[StepName, str]]:
    """The names in a root that may be folders of steps under any naming, each with its parsed form."""
    for name in split_starts(sorted(names))[0]:
        step_name = None if name.startswith(".") or is_about_step(name) else parse_step_name(name)
        if step_name is not None and "/" not in name:
            yield step_name, name


def step_formats(storage: Storage, names: Iterable[str]) -> list[str]:
    """The formats of the committed steps in a root with these names, usually one. Ignores names without a manifest."""
    named = {f"{name}/{MANIFEST}": (step_name, name) for step_name, name in possible_steps(names)}
    return formats_of(named[path] for path in storage.existing([*named]))


def formats_of(steps: Iterable[tuple[StepName, str]]) -> list[str]:
    """The fewest formats that produce all of these folder names."""
    committed = [one for one in steps if pattern_of(one[0].step_format) is not None]
    padded: dict[str, set[str]] = {}
    for step_name, _ in committed:
        if step_name.is_padded:
            padded.setdefault(step_name.rest, set()).add(step_name.step_format)
    formats = {one for of_rest in padded.values() for one in of_rest}
    for step_name, name in committed:  # a number with enough digits also fits a zero-padded format
        if not any(one.format(step_name.step) == name for one in padded.get(step_name.rest, ())):
            formats.add(step_name.step_format)
    return sorted(formats)


def foreign_kind(names: Collection[str]) -> str | None:
    """A description, with advice, of a foreign checkpoint with these files; None for an unknown kind, and for steps."""
    if OF_DCP in names:
        return (
            "a checkpoint of torch.distributed.checkpoint, which has no digests: async_ckpt.load reads it, and "
            "async_ckpt.integrations.dcp.restore fills live objects from it"
        )
    if any(map(_OF_ONE_RANK.fullmatch, names)):
        return (
            "files that torch.distributed.checkpoint has written with use_collectives=False, a checkpoint for "
            "each rank: torch.distributed.checkpoint loads it on the same number of ranks"
        )
    if {index.MEMBER, digests.MEMBER} <= {*names}:
        return (
            "the members of an archive that was extracted: async_ckpt.load reads them, and only the archive "
            "itself can be verified"
        )
    files = [name for name in names if name.endswith(".safetensors")]
    if files and all(map(safetensors.is_of_rank, files)):
        return safetensors.PIECES
    if files:
        return f"safetensors files, which async_ckpt.load reads; load one of them: {', '.join(files[:5])}"
    of_torch = [name for name in names if name.startswith("pytorch_model") and name.endswith(".bin")]
    if of_torch:
        return f"{', '.join(of_torch[:5])}, which torch.load reads"
    if files := [name for name in names if name.endswith(_FILE_SUFFIXES)]:
        return (
            f"{', '.join(sorted(files)[:5])}, not a step of a run: name the file, or load it with the program that "
            "wrote it"
        )
    return None


def foreign_steps(storage: Storage, is_own: Callable[[str], bool], is_library_name: Callable[[str], bool]) -> list[str]:
    """The numbered folders with files of other programs, newest first. In a folder named like a step any file counts;
    in other folders only checkpoint files do.

    `is_library_name` recognizes leftovers of killed processes of this library.
    """
    foreign = []
    for folders in _by_naming(storage.names("")):
        for folder in folders:
            inside = storage.names(folder)
            others = [name for name in inside if not is_library_name(name)]
            counted = others if is_own(folder) or words_for(folder) else _checkpoints_in(others)
            if OF_DCP in inside or counted:
                foreign.append(folder)
    return foreign


def _checkpoints_in(names: Iterable[str]) -> list[str]:
    return [name for name in names if name.endswith((*_FILE_SUFFIXES, ".safetensors", ".bin"))]


def incomplete_steps(storage: Storage, is_own: Callable[[str], bool]) -> list[str]:
    """The newest folders of the run's own steps with the list of all ranks' archives, but no manifest."""
    incomplete = []
    for folder in chain.from_iterable(_by_naming(filter(is_own, storage.names("")))):
        inside = storage.names(folder)
        is_committed = any(name == MANIFEST or is_retired_name(name) for name in inside)
        if not is_committed and any(map(attempt_of_all, inside)):
            incomplete.append(folder)
    return incomplete


def _by_naming(names: Iterable[str]) -> Iterator[list[str]]:
    """For each naming, its newest folders, newest first."""
    folders: dict[str, list[tuple[int, str]]] = {}
    for step_name, name in possible_steps(names):
        folders.setdefault(step_name.rest, []).append((step_name.step, name))
    for rows in folders.values():
        yield [name for _, name in sorted(rows)[: -_LOOKED_INTO - 1 : -1]]


def _read(storage: Storage, folder: str) -> Manifest | None:
    """The manifest in a folder; None if it is missing or damaged, or names another step."""
    path = f"{folder}/{MANIFEST}"
    try:
        manifest = parse_manifest(storage.read(path)[0], path=storage.locate(path))
    except (FileNotFoundError, CorruptCheckpointError, FormatVersionError):
        return None
    step_name = parse_step_name(folder)
    return manifest if step_name is not None and step_name.step == manifest.step else None
