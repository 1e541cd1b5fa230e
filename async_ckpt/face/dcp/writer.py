"""`TarStorageWriter`: torch.distributed.checkpoint saves one committed step, with an archive for each rank.

In: the plans of torch's planners, and the data to which they resolve. Out: the folder of a step.
Knows nothing of: training.

torch's engine plans which rank writes which item, and carries messages between ranks; its coordinator commits the
manifest once every rank's archive is durable. Planners turn plain values into pickled blobs. The writer unpickles
these, and stores the values in the same form as any archive.
"""

from __future__ import annotations

import io
import itertools
import os
import threading
import weakref
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult

from ...core.ranks.one_off import put_in_place
from ...core.runs import layouts
from ...core.runs.foreign_entries import OF_DCP
from ...core.runs.manifest import NAME as MANIFEST
from ...core.runs.manifest import Archive, Manifest, SaveTimes, archive_name, attempt_of, parse
from ...core.runs.naming import parse_step_name, pattern_of
from ...core.runs.receipts import Table, layout_name
from ...core.runs.record import DCP_RECORD
from ...core.runs.root import Root, replaceable
from ...core.runs.sweep import Sweeper
from ...core.saving import kept_memory
from ...core.saving.file_target import FileTarget
from ...core.saving.request import FileRequest
from ...core.slicing.sharded import LocalShards, Slicer, is_sharded
from ...core.slicing.slices import Rectangle, Slices
from ...core.spec import RankFacts, Spread, flag
from ...core.state.capture import capture
from ...core.state.captured import RankShare
from ...core.state.names import Path, shown
from ...core.state.per_rank import nested
from ...core.storage.interface import Storage
from ...core.storage.place import Anywhere, Place, place_of, written_at
from ...core.timing import wall_time
from ...errors import CheckpointError, StepExistsError, UnsupportedStateError
from .metadata import layout_of, metadata_to_keep, path_of
from .stager import PinnedStager

# The index in the result of a rank that writes no item: torch has no empty names.
_NOTHING: Final = MetadataIndex("")


class WrittenArchive(NamedTuple):
    """A rank's report to the coordinator on each item: the archive that contains it."""

    rank: int
    archive: Archive
    blobs: tuple[str, ...]  # names of items that the planner did not create by torch.save


@dataclass(slots=True)
class _WriterSave:
    """One save. torch may run several saves at once with one writer, each on its own thread, which owns this object."""

    place: Place
    save_id: str
    number: int  # counts the writer's saves, in order
    is_coordinator: bool = False
    world_size: int = 1
    replaces: tuple[Manifest, str] | None = None  # the manifest that the coordinator found, and its version

    @property
    def step(self) -> int:
        numbering = parse_step_name(self.place.text.rstrip("/\\").replace("\\", "/").rpartition("/")[2])
        return numbering.step if numbering else 0


class TarStorageWriter(StorageWriter, PinnedStager):
    """Make `torch.distributed.checkpoint` save one step of tar archives, at any path or URL.

        writer = TarStorageWriter("runs/a/step_00000100")
        torch.distributed.checkpoint.save({"model": model.state_dict()}, storage_writer=writer)
        state = async_ckpt.load("runs/a/step_00000100")

    Each rank writes one archive to the folder, and at the end the coordinator commits them with a manifest; before
    that, there is nothing to load. `async_ckpt.load` and `verify` read the folder, and so does an AsyncCheckpointer if
    the folder is in the root of its run. `TarStorageReader` reads it for `torch.distributed.checkpoint.load`.

    The writer is also a stager, so `torch.distributed.checkpoint.async_save(state, storage_writer=writer)` needs no
    other. With a `guard`, `async_save` returns an AsyncSaveResponse, and the rest of the copy overlaps the training.
    Without a guard, it returns a Future when everything is copied, as with torch's own writer.

    Args:
        path: the folder of the step: a path, a URL or a Place. The `checkpoint_id` of a save replaces it, but keeps the
            options of a Place.
        overwrite: replace an existing checkpoint, which stays loadable until the new one is committed. By default, a
            save to its folder raises StepExistsError.
        guard: as for `PinnedStager`.
        host_bytes: as for `PinnedStager`.

    The number in the folder's name is the number of the step. A save raises the errors of any save, and
    UnsupportedStateError with the tensor's name if torch's plan and the placements of a shard disagree. torch wraps the
    errors of all ranks in a CheckpointException. Raises TypeError and ValueError for an invalid path.
    """

    def __init__(
        self,
        path: Anywhere,
        *,
        overwrite: bool = False,
        guard: Any = None,
        host_bytes: int | None = None,
        **unknown: Any,
    ) -> None:
        if unknown:
            raise TypeError(_refusal(unknown))
        PinnedStager.__init__(self, guard=guard, host_bytes=host_bytes)
        self._place = written_at(path)  # of the last save
        self._overwrite = flag("overwrite", overwrite)
        self._local = threading.local()
        # The archives of this rank that are not known to be committed, each with an object that torch holds until the
        # end of the save.
        self._written: list[tuple[weakref.ref[WriteResult], Storage, str]] = []
        self._numbers = itertools.count()
        # The number of the save, by attempt, for each attempt to commit; used by any thread.
        self._attempts: dict[str, int] = {}

    # --- torch's protocol, in the order of its calls ----------------------------------------------------------

    def stage(self, state_dict: dict[str, Any]) -> Any:
        """A copy of the state dict, so that `async_save` returns a Future; with a `guard`, a future of the copy, so
        that it returns an AsyncSaveResponse.
        """
        staged = super().stage(state_dict)
        return staged.result() if isinstance(staged, Future) and not self._optimizers else staged

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a save."""
        if checkpoint_id is not None:
            self._place = replace(self._place, url=checkpoint_id)
        self._local.save = _WriterSave(self._place, os.urandom(8).hex(), next(self._numbers))

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Raises ValueError for a save without collectives: no rank could commit for all others."""
        if not kwargs.get("use_collectives", True) and torch.distributed.is_initialized():
            raise ValueError(
                "TarStorageWriter commits the archives of all ranks together; leave use_collectives=False out"
            )
        self._save.is_coordinator = is_coordinator

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """On the coordinator, look for a checkpoint in the folder. Raises StepExistsError."""
        self._clean_up()
        save = self._save
        if save.is_coordinator:
            save.replaces = self._existing_manifest(save)
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Give each rank its number. Nothing else is added to plans, since torch may reuse them for the next save."""
        self._save.world_size = len(plans)
        return [replace(plan, storage_data=(rank, len(plans))) for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[list[WriteResult]]:
        """Write this rank's archive. Returns once it is durable."""
        rank, world_size = plan.storage_data
        share, blobs = _share_of_plan(plan, planner, rank, world_size)
        target = _RankTarget(self._save.place.storage(), archive_name(rank, os.urandom(4).hex()))
        report = kept_memory.files_saver().save(FileRequest(share, target)).result()
        assert target.archive is not None
        written = WrittenArchive(rank, target.archive, blobs)
        sizes = {item.index: _num_bytes(item) for item in plan.items} or {_NOTHING: report.num_bytes}
        results = [WriteResult(index, size, written) for index, size in sizes.items()]
        self._written.append((weakref.ref(results[0]), target.storage, target.name))
        done: torch.futures.Future[list[WriteResult]] = torch.futures.Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On the coordinator, commit the step. Raises StepExistsError if another writer has committed before."""
        written = {item.storage_data.rank: item.storage_data for of_rank in results for item in of_rank}
        save = self._save
        missing = sorted(set(range(save.world_size)) - written.keys())
        if missing:
            raise CheckpointError(f"{save.place.shown}: the archives of ranks {missing} were not reported")
        metadata.storage_data = {
            item.index: item.storage_data for of_rank in results for item in of_rank if item.index != _NOTHING
        }
        metadata.storage_meta = self.storage_meta()
        kept = metadata_to_keep(metadata, (name for report in written.values() for name in report.blobs))
        archives = tuple(written[rank].archive for rank in sorted(written))
        layout = None
        if save.world_size > 1 and isinstance(metadata.planner_data, Mapping):  # otherwise, paths are not known
            items = {of_rank[0].storage_data.rank: [item.index for item in of_rank] for of_rank in results}
            division = layout_of(metadata, items)
            layout = layouts.dump(division, Table(division.classes))
        self._commit(save, archives, {DCP_RECORD: {**kept, "save_id": save.save_id}}, layout)

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(checkpoint_id=self.checkpoint_id, save_id=self._save.save_id)

    @property
    def checkpoint_id(self) -> str:
        """The path or URL to write to, without credentials."""
        return self._save.place.shown

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """True if `checkpoint_id` is a path or URL that can be written to."""
        return is_checkpoint_id(checkpoint_id)

    # --- parts ------------------------------------------------------------------------------------------------

    @property
    def _save(self) -> _WriterSave:
        """The save of this thread."""
        if not hasattr(self._local, "save"):
            self.reset()
        save: _WriterSave = self._local.save
        return save

    def _existing_manifest(self, save: _WriterSave) -> tuple[Manifest, str] | None:
        """The manifest to replace, and its version. Raises StepExistsError for a checkpoint without `overwrite`."""
        storage = save.place.storage()
        if storage.exists(OF_DCP):
            raise StepExistsError(
                f"{save.place.shown}: torch.distributed.checkpoint has written a checkpoint there; give another folder",
                step=save.step,
            )
        existing = replaceable(storage, MANIFEST, save.step)
        if existing is not None and not self._overwrite:
            raise StepExistsError(
                f"{save.place.shown}: a checkpoint is committed there; give another folder, or overwrite=True",
                step=save.step,
            )
        return existing

    def _clean_up(self) -> None:
        """Delete this rank's archives of saves that ended without a commit, because another rank failed."""
        for entry in self._written.copy():
            result, storage, name = entry
            if result() is not None:
                continue  # its save is under way, and may still be committed
            self._written.remove(entry)
            try:
                named = parse(storage.read(MANIFEST)[0], path=storage.locate(MANIFEST)).own_names
            except FileNotFoundError:
                named = []
            except CheckpointError:
                continue  # the damaged manifest may name it
            if name not in named:
                storage.delete(name)

    def _commit(
        self, save: _WriterSave, archives: tuple[Archive, ...], record: Mapping[str, Any], layout: bytes | None
    ) -> None:
        """Commit a save. Of several saves of this writer to one folder, the one begun last stays, even if an earlier
        one ends later.

        Raises StepExistsError if another writer has committed.
        """
        storage = save.place.storage()
        storage.prove(for_run=True)
        attempt = attempt_of(archives[0].name)
        if layout is not None:
            storage.replace(layout_name(attempt), layout)
        try:
            self._put_manifest(save, attempt, archives, record)
        except BaseException:
            if layout is not None:
                with suppress(CheckpointError):
                    storage.delete(layout_name(attempt))
            raise

    def _put_manifest(
        self, save: _WriterSave, attempt: str, archives: tuple[Archive, ...], record: Mapping[str, Any]
    ) -> None:
        storage = save.place.storage()
        while True:
            manifest = Manifest(save.step, attempt, save.world_size, wall_time(), archives, record=record)
            self._attempts[attempt] = save.number
            try:
                put_in_place(storage, MANIFEST, manifest, save.replaces)
                break
            except FileExistsError as error:
                save.replaces = self._existing_manifest(save) if self._overwrite else None
                number = self._attempts.get(save.replaces[0].attempt) if save.replaces else None
                if number is None:
                    raise StepExistsError(
                        f"{save.place.shown}: another writer has committed a checkpoint there in the meantime; "
                        "that was kept",
                        step=save.step,
                    ) from error
                if number > save.number:  # a later save was faster, and would have replaced this one
                    storage.delete_many([*(archive.name for archive in archives), layout_name(attempt)])
                    return
        if save.replaces is not None:
            _delete_replaced(save, save.replaces[0])

    def __getstate__(self) -> dict[str, Any]:
        own: dict[str, Any] = {"_written": [], "_attempts": {}, "_local": None, "_numbers": None}
        return {**PinnedStager.__getstate__(self), **own}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        own = {"_local": threading.local(), "_numbers": itertools.count()}
        PinnedStager.__setstate__(self, {**state, **own})


def _delete_replaced(save: _WriterSave, replaced: Manifest) -> None:
    """Delete the layout and the archives of an overwritten step, except archives that later steps of the run borrow."""
    if replaced.attempt:  # a damaged manifest has no attempt
        save.place.storage().delete(layout_name(replaced.attempt))
    root, folder = save.place.inside()
    numbering = parse_step_name(folder)
    if numbering is None or pattern_of(numbering.step_format) is None:  # not a step of a run
        save.place.storage().delete_many(replaced.own_names)
    else:
        Sweeper(Root(root, numbering.step_format)).delete_replaced(numbering.step, replaced)


def is_checkpoint_id(checkpoint_id: object) -> bool:
    """True if a `checkpoint_id` is a path or URL."""
    try:
        place_of(checkpoint_id).storage()  # type: ignore[arg-type]
    except (TypeError, ValueError, ImportError):
        return False
    return True


def _refusal(unknown: Mapping[str, Any]) -> str:
    names = ", ".join(sorted(unknown))
    if "_extensions" in unknown:
        return (
            f"{names}: archives are written as they lie in memory, so nothing can transform them on the way; leave it "
            "out, or compress with async_ckpt.save(…, compression=…)"
        )
    return f"TarStorageWriter has no {names}; it always syncs every file, and writes by several threads"


def _share_of_plan(
    plan: SavePlan, planner: SavePlanner, rank: int, world_size: int
) -> tuple[RankShare, tuple[str, ...]]:
    """The part of the state that this rank writes, and the names of blobs that are stored as blobs."""
    items = _PlannedTensors(getattr(planner, "state_dict", None))
    entries: list[tuple[Path, Any]] = []
    blobs: list[str] = []
    for item in plan.items:
        name, data = item.index.fqn, planner.resolve_data(item)
        if item.type == WriteItemType.BYTE_IO:
            value, is_blob = _value_in_blob(data)
            blobs += [name] if is_blob else []
        elif (value := items.add(item, data)) is None:
            continue  # another piece of a tensor
        entries.append((path_of(name, plan.planner_data), value))
    return items.divided(nested(entries, are_all=world_size == 1), rank, world_size), tuple(blobs)


class _RankTarget(FileTarget):
    """The archive of one rank in the folder of a step. Its save ends before the step is committed."""

    archive: Archive | None = None

    def commit(self, archive: Archive, times: SaveTimes) -> None:  # noqa: ARG002
        """Keep the manifest's entry of the archive, which is durable."""
        self.archive = archive


class _PlannedTensors:
    """The tensors of a plan, each in one or several pieces, and a `Slicer` for `capture` that returns the pieces as
    slices. Created by each `write_data`, on torch's thread.
    """

    def __init__(self, live: Any) -> None:
        """`live` is a mapping of names to the planned tensors, if the planner has them."""
        self._live = live if isinstance(live, Mapping) else {}
        self._slicer = Slicer()
        self._markers: dict[str, torch.Tensor] = {}
        self._pieces: dict[int, tuple[tuple[int, ...], list[tuple[Rectangle, torch.Tensor]]]] = {}

    def add(self, item: WriteItem, data: Any) -> torch.Tensor | None:
        """Add a piece. Returns the marker that stands for its tensor in the state, or None after the first piece.

        Raises UnsupportedStateError if the piece does not match the plan.
        """
        name, planned = item.index.fqn, item.tensor_data
        if not isinstance(data, torch.Tensor) or planned is None:
            raise TypeError(f"{name}: the planner has resolved a tensor to {type(data).__qualname__}")
        data = data.detach()
        offsets, sizes = tuple(planned.chunk.offsets), tuple(planned.chunk.sizes)
        if tuple(data.shape) != sizes:
            raise _unsupported(
                name, f"the planner planned a piece of shape {list(sizes)}, but its tensor has {list(data.shape)}"
            )
        self._compare(name, offsets, sizes)
        piece, marker = (Rectangle(offsets, (0,) * len(offsets), sizes), data), self._markers.get(name)
        if marker is not None:
            self._pieces[id(marker)][1].append(piece)
            return None
        marker = self._markers[name] = torch.empty(0, dtype=data.dtype, device="cpu")
        self._pieces[id(marker)] = tuple(planned.size), [piece]
        return marker

    def _compare(self, name: str, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> None:
        """Raise UnsupportedStateError if a piece belongs to another rank: torch misplaces strided and uneven shards."""
        live = self._live.get(name)
        if live is None or not is_sharded(live):
            return
        rectangles = self._slicer.slice(live, name=name).slices.rectangles
        if torch.Size(sizes).numel() and not any(
            (held.global_offsets, held.sizes) == (offsets, sizes) for held in rectangles
        ):
            raise _unsupported(
                name,
                f"torch's plan puts this rank's shard at {list(offsets)} with {list(sizes)} items, but by its "
                f"placements it is {[(list(held.global_offsets), list(held.sizes)) for held in rectangles]}; save "
                "it with AsyncCheckpointer",
            )

    def slice(self, value: torch.Tensor, *, name: str) -> LocalShards:  # noqa: ARG002
        """The pieces of the tensor that a marker stands for, as slices."""
        if id(value) not in self._pieces:  # a tensor inside a value
            slices = Slices.plain(value.shape)
            return LocalShards(slices, (value,) if slices.rectangles else ())
        shape, pieces = self._pieces[id(value)]
        held = [(rectangle, part) for rectangle, part in pieces if rectangle.num_elements]
        rectangles = tuple(rectangle for rectangle, _ in held)
        is_plain = rectangles in ((), (Rectangle.whole(shape),))
        return LocalShards(Slices(shape, rectangles, cuts=() if is_plain else None), tuple(part for _, part in held))

    def divided(self, state: dict[str, Any], rank: int, world_size: int) -> RankShare:
        slicer: Any = self
        captured = capture(state, slicer=slicer)
        if world_size == 1 and all(slices.cuts is not None for slices in captured.slices):
            plain = [
                spec if spec.of is None else spec._replace(shape=spec.of.shape, of=None) for spec in captured.specs
            ]
            return RankShare(captured._replace(specs=plain), None)
        specs = []
        for spec in captured.specs:
            if spec.of is not None and (slices := captured.slices[spec.of.number]).cuts is None:
                held = tuple(rectangle.box for rectangle in slices.rectangles)
                spec = spec._replace(of=spec.of._replace(spread=Spread(None, 0, held)))
            specs.append(spec)
        return RankShare(captured._replace(specs=specs), RankFacts(rank, world_size))


def _unsupported(name: str, why: str) -> UnsupportedStateError:
    path = shown((name,))
    return UnsupportedStateError(f"{path}: {why}; nothing was written", path=path)


def _value_in_blob(data: Any) -> tuple[Any, bool]:
    """The value in a planner's blob, and False; or the blob itself, and True, if torch.save did not write it."""
    blob = data.getvalue() if isinstance(data, io.BytesIO) else bytes(data)
    if blob.startswith(b"PK\x03\x04"):
        with suppress(Exception):  # it may be another kind of zip file
            # Safe: this process has just pickled its own objects.
            return torch.load(io.BytesIO(blob), weights_only=False), False  # nosec B614
    return blob, True


def _num_bytes(item: WriteItem) -> int:
    planned = item.tensor_data
    return 0 if planned is None else torch.Size(planned.chunk.sizes).numel() * planned.properties.dtype.itemsize
