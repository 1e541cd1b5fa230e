"""`TarStorageWriter`: what torch.distributed.checkpoint saves becomes one committed step, an archive for each rank.

In: the plans that torch's planners make, and what these resolve to. Out: the folder of a step. Knows nothing of: training.

torch's engine has planned, who writes what, and carries what the ranks tell each other; its coordinator commits by the
manifest, once every rank has said that its archive is durable. Nothing is pickled but what is pickled in any archive:
the blobs that a planner makes of plain values are opened again, and the values are stored as such.
"""

from __future__ import annotations

import io
import itertools
import os
import threading
import weakref
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult

from ...errors import CheckpointError, StepExistsError, UnsupportedStateError
from ...runs.manifest import NAME as MANIFEST
from ...runs.manifest import Archive, Manifest, archive_name, parse
from ...runs.naming import parse_step_name, pattern_of
from ...runs.root import Root
from ...runs.sweep import Sweeper
from ...runs.unmanaged import OF_DCP
from ...saving import default
from ...saving.request import FileRequest
from ...saving.targets import FileTarget
from ...slicing.sharded import LocalShards, Slicer, is_sharded
from ...slicing.slices import Rectangle, Slices
from ...spans import wall_time
from ...spec import RankFacts, Spread, TensorSpec, flag
from ...state.capture import capture
from ...state.containers import nested
from ...state.division import RankShare
from ...state.names import Path, shown
from ...storage.interface import Storage
from ...storage.place import Anywhere, Place, place_of, written_at
from .names import KEPT, kept_of, path_of
from .stager import PinnedStager

# The index of what a rank tells that has nothing to write: no name of torch's is empty.
_NOTHING: Final = MetadataIndex("")


class Written(NamedTuple):
    """A rank's report to the coordinator on each item: the archive that it is in."""

    rank: int
    archive: Archive
    blobs: tuple[str, ...]
    """The names of what the planner has not made by torch.save."""


@dataclass(slots=True)
class _WriterSave:
    """One save, as its thread sees it: torch may make several at once, each on a thread of its own, by one writer."""

    place: Place
    save_id: str
    number: int  # among the saves of the writer, in their order
    is_coordinator: bool = False
    world_size: int = 1
    replaces: tuple[Manifest, str] | None = None  # what the coordinator has found

    @property
    def step(self) -> int:
        told = parse_step_name(self.place.text.rstrip("/\\").replace("\\", "/").rpartition("/")[2])
        return told.step if told else 0


class TarStorageWriter(StorageWriter, PinnedStager):
    """Write what `torch.distributed.checkpoint` saves as one step of tar archives, at any path or URL.

        writer = TarStorageWriter("runs/a/step_00000100")
        torch.distributed.checkpoint.save({"model": model.state_dict()}, storage_writer=writer)
        state = async_ckpt.load("runs/a/step_00000100")

    Each rank writes one archive into the folder, and the coordinator commits them by a manifest, last: until then there is
    nothing to load. `async_ckpt.load` and `verify` read the folder; below the root of a run, so does its
    AsyncCheckpointer. `TarStorageReader` reads it for `torch.distributed.checkpoint.load`.

    It stages as well, as `PinnedStager` does: `torch.distributed.checkpoint.async_save(state, storage_writer=writer)`
    needs no other stager.

    Args:
        path: the folder of the step: a path, a URL or a Place. `checkpoint_id` of a save replaces it; the options of a
            Place stay.
        overwrite: replace a checkpoint that is there. It stays loadable until the new one is committed. By default a save
            to such a folder raises StepExistsError.
        guard: as for `PinnedStager`.
        host_bytes: as for `PinnedStager`.

    The number in the folder's name is the step's. A save raises what any save does, and UnsupportedStateError, by name,
    where torch's plan would put a shard elsewhere than its placements do. torch wraps the errors of all ranks in a
    CheckpointException. Raises TypeError and ValueError for a place that is none.
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
        # What this rank has written, which may be in vain; and what torch holds as long as the save goes on.
        self._written: list[tuple[weakref.ref[WriteResult], Storage, str]] = []
        self._numbers = itertools.count()
        # The attempts of this writer, before they are committed, with the numbers of their saves; by any thread.
        self._attempts: dict[str, int] = {}

    # --- torch's protocol, in the order of its calls ----------------------------------------------------------

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """A save begins."""
        if checkpoint_id is not None:
            self._place = replace(self._place, url=checkpoint_id)
        self._local.save = _WriterSave(self._place, os.urandom(8).hex(), next(self._numbers))

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Raises ValueError for a save in which the ranks do not speak to each other: nobody could commit for all."""
        if not kwargs.get("use_collectives", True) and torch.distributed.is_initialized():
            raise ValueError(
                "TarStorageWriter commits the archives of all ranks together; leave use_collectives=False out"
            )
        self._save.is_coordinator = is_coordinator

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """On every rank. The coordinator sees what is there. Raises StepExistsError."""
        self._clean_up()
        save = self._save
        if save.is_coordinator:
            save.replaces = self._found(save)
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """On the coordinator: every rank learns which one it is. Nothing else is told, since torch may keep plans."""
        self._save.world_size = len(plans)
        return [replace(plan, storage_data=(rank, len(plans))) for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[list[WriteResult]]:
        """Write this rank's archive. Returns once it is durable."""
        rank, world_size = plan.storage_data
        told, blobs = _taken(plan, planner, rank, world_size)
        target = _RankTarget(self._save.place.storage(), archive_name(rank, os.urandom(4).hex()))
        report = default.files_saver().save(FileRequest(told, target)).result()
        assert target.archive is not None
        written = Written(rank, target.archive, blobs)
        sizes = {item.index: _num_bytes(item) for item in plan.items} or {_NOTHING: report.num_bytes}
        results = [WriteResult(index, size, written) for index, size in sizes.items()]
        self._written.append((weakref.ref(results[0]), target.storage, target.name))
        done: torch.futures.Future[list[WriteResult]] = torch.futures.Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On the coordinator: commit. Raises StepExistsError where another writer was faster."""
        written = {one.storage_data.rank: one.storage_data for of_rank in results for one in of_rank}
        save = self._save
        missing = sorted(set(range(save.world_size)) - written.keys())
        if missing:
            raise CheckpointError(f"{save.place.shown}: nothing was heard of the archives of ranks {missing}")
        metadata.storage_data = {
            one.index: one.storage_data for of_rank in results for one in of_rank if one.index != _NOTHING
        }
        metadata.storage_meta = self.storage_meta()
        kept = kept_of(metadata, (name for one in written.values() for name in one.blobs))
        archives = tuple(written[rank].archive for rank in sorted(written))
        self._commit(save, archives, {KEPT: {**kept, "save_id": save.save_id}})

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(checkpoint_id=self.checkpoint_id, save_id=self._save.save_id)

    @property
    def checkpoint_id(self) -> str:
        """Where it writes, without credentials."""
        return self._save.place.shown

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it is a path or URL that can be written to."""
        return is_place(checkpoint_id)

    # --- parts ------------------------------------------------------------------------------------------------

    @property
    def _save(self) -> _WriterSave:
        """That of this thread."""
        if not hasattr(self._local, "save"):
            self.reset()
        save: _WriterSave = self._local.save
        return save

    def _found(self, save: _WriterSave) -> tuple[Manifest, str] | None:
        """The manifest that is to be replaced, and its version. Raises StepExistsError where that was not asked for."""
        storage = save.place.storage()
        if storage.exists(OF_DCP):
            raise StepExistsError(
                f"{save.place.shown}: torch.distributed.checkpoint has written a checkpoint there; give another folder",
                step=save.step,
            )
        try:
            data, version = storage.read(MANIFEST)
        except FileNotFoundError:
            return None
        if not self._overwrite:
            raise StepExistsError(
                f"{save.place.shown}: a checkpoint is committed there; give another folder, or overwrite=True",
                step=save.step,
            )
        try:
            return parse(data, path=storage.locate(MANIFEST)), version
        except CheckpointError:  # a damaged one may be overwritten like any other
            return Manifest(save.step, "", 1, 0.0, ()), version

    def _clean_up(self) -> None:
        """Delete what this rank has written in saves that have ended, and that nobody has committed: other ranks had failed."""
        for one in self._written.copy():
            goes_on, storage, name = one
            if goes_on() is not None:
                continue  # it may still be committed
            self._written.remove(one)
            try:
                named = parse(storage.read(MANIFEST)[0], path=storage.locate(MANIFEST)).own_names
            except FileNotFoundError:
                named = []
            except CheckpointError:
                continue  # it might name it
            if name not in named:
                storage.delete(name)

    def _commit(self, save: _WriterSave, archives: tuple[Archive, ...], record: Mapping[str, Any]) -> None:
        """The last of several saves of this writer to one folder stands there, whichever comes first.

        Raises StepExistsError where another writer has committed.
        """
        storage = save.place.storage()
        while True:
            before = save.replaces
            earlier = (before[0].attempt, *before[0].replaces) if before else ()
            attempt = os.urandom(4).hex()
            made = Manifest(
                save.step,
                attempt,
                save.world_size,
                wall_time(),
                archives,
                tuple(filter(None, earlier)),
                record,
            )
            self._attempts[attempt] = save.number
            try:
                if before is None:
                    storage.put_new(MANIFEST, made.dump())
                else:
                    storage.replace(MANIFEST, made.dump(), version=before[1])
                break
            except FileExistsError as error:
                save.replaces = self._found(save) if self._overwrite else None
                number = self._attempts.get(save.replaces[0].attempt) if save.replaces else None
                if number is None:
                    raise StepExistsError(
                        f"{save.place.shown}: another writer has committed a checkpoint there in the meantime; that was kept",
                        step=save.step,
                    ) from error
                if number > save.number:  # as if it had been replaced by that at once
                    storage.delete_many([archive.name for archive in archives])
                    return
        if before is not None:
            _delete_replaced(save, before[0])

    def __getstate__(self) -> dict[str, Any]:
        own: dict[str, Any] = {"_written": [], "_attempts": {}, "_local": None, "_numbers": None}
        return {**PinnedStager.__getstate__(self), **own}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        own = {"_local": threading.local(), "_numbers": itertools.count()}
        PinnedStager.__setstate__(self, {**state, **own})


def _delete_replaced(save: _WriterSave, replaced: Manifest) -> None:
    """Delete what was overwritten, but for archives that later steps of the run have borrowed from."""
    root, folder = save.place.inside()
    told = parse_step_name(folder)
    if told is None or pattern_of(told.step_format) is None:  # no step of a run
        save.place.storage().delete_many(replaced.own_names)
    else:
        Sweeper(Root(root, told.step_format)).delete_replaced(told.step, replaced)


def is_place(where: object) -> bool:
    """Whether a checkpoint_id is a path or URL."""
    try:
        place_of(where).storage()  # type: ignore[arg-type]
    except (TypeError, ValueError, ImportError):
        return False
    return True


def _refusal(unknown: Mapping[str, Any]) -> str:
    names = ", ".join(sorted(unknown))
    if "_extensions" in unknown:
        return (
            f"{names}: archives are written as they lie in memory, so nothing can transform them on the way; leave it out, "
            "or compress by async_ckpt.save(…, compression=…)"
        )
    return f"TarStorageWriter has no {names}; it syncs every file, and writes by several threads, in any case"


def _taken(
    plan: SavePlan, planner: SavePlanner, rank: int, world_size: int
) -> tuple[RankShare, tuple[str, ...]]:
    """The items that this rank is to write, and the names of blobs that stay blobs."""
    items = _Items(getattr(planner, "state_dict", None))
    entries: list[tuple[Path, Any]] = []
    blobs: list[str] = []
    for item in plan.items:
        name, data = item.index.fqn, planner.resolve_data(item)
        if item.type == WriteItemType.BYTE_IO:
            value, is_blob = _opened(data)
            blobs += [name] if is_blob else []
        elif (value := items.add(item, data)) is None:
            continue  # one more piece of a tensor
        entries.append((path_of(name, plan.planner_data), value))
    return items.divided(nested(entries, are_all=world_size == 1), rank, world_size), tuple(blobs)


class _RankTarget(FileTarget):
    """The archive of one rank, in the folder of a step."""

    archive: Archive | None = None

    def commit(self, archives: tuple[Archive, ...], *, late: bool = False) -> None:  # noqa: ARG002
        """The archive is durable; the manifest's entry for it is known."""
        (self.archive,) = archives


class _Items:
    """The tensors of a plan, of which one may be in several pieces; for `capture`, it is what knows of slices."""

    def __init__(self, live: Any) -> None:
        """`live` are the tensors that were planned, by name, where the planner has them."""
        self._live = live if isinstance(live, Mapping) else {}
        self._slicer = Slicer()
        self._markers: dict[str, torch.Tensor] = {}
        self._pieces: dict[int, tuple[tuple[int, ...], list[tuple[Rectangle, torch.Tensor]]]] = {}

    def add(self, item: WriteItem, data: Any) -> torch.Tensor | None:
        """Returns what stands for the tensor in the state, unless another piece of it is there already.

        Raises UnsupportedStateError where the piece is not what was planned.
        """
        name, told = item.index.fqn, item.tensor_data
        if not isinstance(data, torch.Tensor) or told is None:
            raise TypeError(f"{name}: the planner has resolved a tensor to {type(data).__qualname__}")
        data = data.detach()
        offsets, sizes = tuple(told.chunk.offsets), tuple(told.chunk.sizes)
        if tuple(data.shape) != sizes:
            raise _refused(
                name, f"the planner has planned a piece of shape {list(sizes)}, and it has {list(data.shape)}"
            )
        self._compare(name, offsets, sizes)
        marker = self._markers.get(name)
        if marker is not None:
            self._pieces[id(marker)][1].append((_rectangle(offsets, sizes), data))
            return None
        marker = self._markers[name] = torch.empty(0, dtype=data.dtype, device="cpu")
        self._pieces[id(marker)] = tuple(told.size), [(_rectangle(offsets, sizes), data)]
        return marker

    def _compare(self, name: str, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> None:
        """Torch describes each shard by one rectangle, which for strided and uneven ones is another rank's."""
        live = self._live.get(name)
        if live is None or not is_sharded(live):
            return
        rectangles = self._slicer.slice(live, name=name).slices.rectangles
        if torch.Size(sizes).numel() and not any(
            (one.global_offsets, one.sizes) == (offsets, sizes) for one in rectangles
        ):
            raise _refused(
                name,
                f"torch's plan puts this rank's shard at {list(offsets)} with {list(sizes)} items, but by its placements "
                f"it is {[(list(one.global_offsets), list(one.sizes)) for one in rectangles]}; save it with AsyncCheckpointer",
            )

    def slice(self, value: torch.Tensor, *, name: str) -> LocalShards:  # noqa: ARG002
        """The shards, held here, of the tensor that a marker stands for."""
        if id(value) not in self._pieces:  # a value of the state that is a tensor
            slices = Slices.plain(value.shape)
            return LocalShards(slices, (value,) if slices.rectangles else ())
        shape, pieces = self._pieces[id(value)]
        held = [(one, part) for one, part in pieces if one.num_elements]
        rectangles = tuple(one for one, _ in held)
        if rectangles in ((), (Rectangle.whole(shape),)):
            return LocalShards(Slices(shape, rectangles), tuple(part for _, part in held))
        return LocalShards(Slices(shape, rectangles, cuts=None), tuple(part for _, part in held))

    def divided(self, state: dict[str, Any], rank: int, world_size: int) -> RankShare:
        slicer: Any = self
        captured = capture(state, slicer=slicer)
        if world_size == 1 and all(one.cuts is not None for one in captured.slices):
            plain = [spec._replace(shape=_shape(spec), of=None) for spec in captured.specs]
            return RankShare(replace(captured, specs=plain), None)
        specs = []
        for spec in captured.specs:
            slices = None if spec.of is None else captured.slices[spec.of.number]
            if spec.of is not None and slices is not None and slices.cuts is None:
                held = tuple((one.global_offsets, one.sizes) for one in slices.rectangles)
                spec = spec._replace(of=spec.of._replace(spread=Spread(None, 0, held)))
            specs.append(spec)
        return RankShare(replace(captured, specs=specs), RankFacts(rank, world_size))


def _shape(spec: TensorSpec) -> tuple[int, ...]:
    return spec.shape if spec.of is None else spec.of.shape


def _rectangle(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Rectangle:
    return Rectangle(offsets, (0,) * len(offsets), sizes)


def _refused(name: str, why: str) -> UnsupportedStateError:
    where = shown((name,))
    return UnsupportedStateError(f"{where}: {why}; nothing was written", path=where)


def _opened(data: Any) -> tuple[Any, bool]:
    """The value that a planner has made a blob of; and whether it is the blob itself, since torch.save has not made it."""
    blob = data.getvalue() if isinstance(data, io.BytesIO) else bytes(data)
    if blob.startswith(b"PK\x03\x04"):
        with suppress(Exception):  # it may be another zip
            # It was pickled a moment ago, of objects of this very process.
            return torch.load(io.BytesIO(blob), weights_only=False), False
    return blob, True


def _num_bytes(item: WriteItem) -> int:
    told = item.tensor_data
    return 0 if told is None else torch.Size(told.chunk.sizes).numel() * told.properties.dtype.itemsize
