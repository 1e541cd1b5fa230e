"""Copies and deletions of the checkpoints that a framework's trainer has written.

In: a folder of a trainer. Out: complete checkpoints elsewhere, and folders without the checkpoints that no rule keeps.
Knows nothing of: command-line arguments, the contents of files.

A checkpoint appears and disappears as a whole. On a disk, an incomplete one has a hidden name. In a store, the file
that marks it as a checkpoint is put last and deleted first.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from ... import Keep, Place
from ...errors import RunTakenError
from ...plumbing import Storage, bulk, file_digests, locks, runs, scratches, timing, urls
from .listing import StepRow, checkpoints_of
from .output import Answer
from .trainer_folders import TRAINER_STATE, checkpoints_in, events_at, is_mark, log_at, sizes_of

# The files that a trainer with a plug-in of this library locks while it may write, and the hidden name of a checkpoint
# that is being deleted.
_LOCKS: Final = ("_async_ckpt.lock", ".async_ckpt.lock")
_RETIRED: Final = ".{}.retired"


def refuse_living_trainer(place: Place, *, unattended: bool) -> None:
    """Refuse to change a folder that a training may write to: it is locked, or its history does not show an end."""
    if place.is_local:
        folder = urls.local_path(place.text)
        held = [folder / name for name in _LOCKS if (folder / name).exists()]
        for path in held:
            fd = locks.hold_if_free(path)
            if fd is None:
                raise RunTakenError(
                    f"{place.shown}: a living trainer writes its checkpoints there; wait until it ends",
                    path=place.shown,
                    host="?",
                    pid=-1,
                    since=0.0,
                )
            locks.forget(fd)
        if held:
            return  # the training has ended: its locks are free
    history = events_at(place)
    if not unattended and not (history and history[-1]["kind"] == "closed"):
        raise Answer(
            f"{place.shown}: its history does not say that the training has ended; make sure, and pass --unattended"
        )


@dataclass(frozen=True, slots=True)
class PruneRow:
    """A step, and whether it is deleted. `num_bytes` is None for a step whose manifest is damaged, and `name` is the
    name of a framework's checkpoint.
    """

    step: int
    num_bytes: int | None
    deleted: bool
    name: str = ""


class ShownCheckpoints:
    """The checkpoints of a trainer as they were shown to the user, and the steps that the rules do not keep.

    The newest, the tracker's and the framework's best checkpoint are kept, and those without a known step.
    """

    def __init__(self, place: Place, keep: Keep) -> None:
        self._place = place
        self.checkpoints = checkpoints_of(place, place.storage().names(""))
        numbered = {row.step: row for row in self.checkpoints if row.step >= 0}
        self.broken: dict[int, str] = {}  # not known without reading all files
        self.commits = runs.Commits(
            {
                step: runs.Manifest.of_folder(step, row.created or 0.0, row.num_bytes or 0, row.record)
                for step, row in numbered.items()
            }
        )
        named = {row.step for row in self.checkpoints if len(row.marks) > 1}
        self.going = {*runs.deletable_steps(keep, self.commits, now=timing.wall_time(), protected=named)}

    def rows(self) -> list[PruneRow]:
        return [PruneRow(row.step, row.num_bytes, row.step in self.going, row.folder) for row in self.checkpoints]

    def delete(self, *, unattended: bool) -> list[int]:
        """Delete the checkpoints that were shown for deletion. Returns their steps."""
        refuse_living_trainer(self._place, unattended=unattended)
        gone = [row for row in self.checkpoints if row.step in self.going]
        for row in gone:
            _delete(self._place, row.folder)
        log = log_at(self._place)
        log.note("retention", self.checkpoints[-1].step, deleted=sorted(self.going))
        log.write()
        return [row.step for row in gone]


def _delete(place: Place, name: str) -> None:
    storage = place.storage()
    if not place.is_local:
        storage.delete_many([f"{name}/{one}" for one in storage.names(name) if is_mark(one)])
        storage.delete_all(name) if storage.names(name) else storage.delete(name)
        return
    path = urls.local_path(place.text) / name
    if path.is_symlink() or not path.is_dir():
        path.unlink()
        return
    hidden = path.with_name(_RETIRED.format(name))
    shutil.rmtree(hidden, ignore_errors=True)
    path.rename(hidden)
    shutil.rmtree(hidden, ignore_errors=True)


def copy_checkpoints(
    source: Place,
    target: Place,
    rows: Sequence[StepRow],
    advance: Callable[[int], None],
    *,
    overwrite: bool,
    is_whole: bool,
) -> dict[str, str]:
    """Copy these checkpoints, the oldest first. Returns the outcomes by their names.

    With `is_whole`, the trackers and the history are copied, too. A checkpoint that differs at the target is replaced
    only with `overwrite`, which also copies equal checkpoints again.
    """
    refuse_living_trainer(target, unattended=True)
    _refuse_unrelated(source, target)
    there, outcomes = target.storage(), {}
    for row in rows:
        have, want = _facts_of(there, row.folder), _facts_of(source.storage(), row.folder)
        if have and have != want and not overwrite:
            raise Answer(f"{target.shown}: {row.folder} has other files there; pass --overwrite to replace it")
        outcomes[row.folder] = "was there" if have == want and not overwrite else "replaced" if have else "copied"
    for row in rows:
        if outcomes[row.folder] != "was there":
            _copy(source, target, row.folder, advance)
    if is_whole:
        for name in source.storage().existing(runs.TRACKERS):
            there.replace(name, source.storage().read(name)[0])
        if not events_at(target):
            log_at(target).copy_from(log_at(source))
    return outcomes


def _refuse_unrelated(source: Place, target: Place) -> None:
    """Refuse to mix the checkpoints of two trainings: the next start would continue from the newest of both.

    If both folders have a history, these must have a save in common. A partial copy has no history; then the target
    must have a checkpoint that the source has or had.
    """
    there = {one.name for one in checkpoints_in(target.storage(), target.storage().names(""))}
    own = {one.name for one in checkpoints_in(source.storage(), source.storage().names(""))}
    saves = [{(one["name"], one["time"]) for one in events_at(at) if one["kind"] == "save"} for at in (source, target)]
    is_one = saves[0] & saves[1] if all(saves) else there & (own | {name for name, _ in saves[0]})
    if there and not is_one:
        raise Answer(
            f"{target.shown} has checkpoints of another training, such as {min(there)}: a training there would go on "
            "from the newest of both. Copy to another folder; nothing was copied"
        )


def _facts_of(storage: Storage, name: str) -> dict[str, int | bytes]:
    """The sizes of the files of a checkpoint, or the contents of small files that differ between two trainings."""
    return {
        path: storage.read(path)[0] if file_digests.is_of_digests(path) or path.endswith(TRAINER_STATE) else size
        for path, size in sizes_of(storage, name).items()
    }


def _copy(source: Place, target: Place, name: str, advance: Callable[[int], None]) -> None:
    storage, sizes = source.storage(), sizes_of(source.storage(), name)

    def count(offset: int, data: memoryview) -> None:  # noqa: ARG001
        advance(len(data))

    def parcels(paths: Sequence[str], to: Callable[[str], str]) -> list[Any]:
        return [bulk.Parcel(partial(storage.open, path), to(path), sizes[path], count) for path in paths]

    if target.is_local and name not in sizes:
        folder = urls.local_path(target.text)
        with scratches.Scratch(folder, name) as scratch:
            written = scratch.folder / name
            bulk.copy(parcels([*sizes], lambda path: path.removeprefix(f"{name}/")), Place(written).storage())
            scratches.publish(written, folder / name, replaced=lambda _: True)
        return
    there = target.storage()
    last = [path for path in sizes if path != name and is_mark(path.removeprefix(f"{name}/"))]
    there.delete_many(last)
    bulk.copy(parcels([path for path in sizes if path not in last], lambda path: path), there)
    bulk.copy(parcels(last, lambda path: path), there)
