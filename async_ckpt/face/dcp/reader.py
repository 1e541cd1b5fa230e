"""`TarStorageReader`: torch.distributed.checkpoint loads any step of this library.

In: a path, and the plans of torch's planners. Out: torch's metadata, and its filled targets.
Knows nothing of: how a step was saved.

For torch, every tensor is one chunk. The archives that contain it, and the bytes to read from them, are found as in any
load. A step stays open between reading its metadata and its bytes; other files are opened twice. The reader checks
that all ranks see the same checkpoint.
"""

from __future__ import annotations

import io
import os
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader

from ...core.garbage import no_collection
from ...core.loading.archives.contents import CPU, Contents, Part
from ...core.loading.archives.find import from_path
from ...core.loading.archives.step_archives import check_from_ranks
from ...core.loading.fill import Plan, Wanted, fill, planned
from ...core.slicing.boxes import Box
from ...core.slicing.sharded import Slicer, is_sharded
from ...core.slicing.slices import Rectangle
from ...core.spec import flag
from ...core.state.capture import pickled, why_not
from ...core.state.names import shown
from ...core.storage.place import Anywhere, place_of
from ...errors import CorruptCheckpointError, StorageUnavailableError
from .entries import (
    SavedItem,
    entries_of,
    identity_of,
    kept_metadata,
    listed_items,
    readers_of_this_rank,
    value_of,
)
from .metadata import metadata_of
from .writer import is_checkpoint_id

T = TypeVar("T")


class TarStorageReader(StorageReader):
    """Read a step for `torch.distributed.checkpoint.load`.

        state = {"model": model.state_dict()}
        torch.distributed.checkpoint.load(state, storage_reader=TarStorageReader("runs/a/step_00000100"))

    It reads steps of `TarStorageWriter`, steps of an AsyncCheckpointer on any number of ranks, and single archives;
    each rank reads only the byte ranges that it needs. Given the root of a run, it reads the newest step. Strided and
    uneven shards are filled by their placements.

    Args:
        path: a path, a URL or a Place. The `checkpoint_id` of a load replaces it, but keeps the options of a Place.
        verify: compare the digest of every block that is read.
        trust: unpickle values that are not plain data. Use it only for files whose writer you trust.
        from_ranks: the rank whose value to take for an entry that was saved per rank, by name, such as {"rng": 0}. In
            a world of the size that has saved the step, each rank gets its own value.

    Raises TypeError and ValueError for invalid arguments. A load raises the errors of `async_ckpt.load`; torch wraps
    those of all ranks in a CheckpointException.
    """

    def __init__(
        self,
        path: Anywhere,
        *,
        verify: bool = True,
        trust: bool = False,
        from_ranks: Mapping[str, int] | None = None,
    ) -> None:
        self._place = place_of(path)
        check_from_ranks(from_ranks)
        self._verify, self._trust = flag("verify", verify), flag("trust", trust)
        self._from_ranks = from_ranks
        self._load_id = os.urandom(8).hex()
        self._identity = ""  # of the checkpoint whose metadata was read
        self._names: set[str] = set()  # of the items in the plan
        # Kept between `read_metadata` and `read_data`: the archives of a step, and their items if these are known.
        self._parts: Sequence[Part] = ()
        self._entries: Mapping[str, SavedItem] | None = None
        self._stack = ExitStack()
        weakref.finalize(self, self._stack.close)  # torch does not report a load that fails on another rank

    # --- torch's protocol, in the order of its calls ----------------------------------------------------------

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a load."""
        if checkpoint_id is not None:
            self._place = replace(self._place, url=checkpoint_id)
        self._load_id = os.urandom(8).hex()

    @no_collection()
    def read_metadata(self, *_: Any) -> Metadata:
        """The metadata of the step in torch's classes. Raises TypeError for a state that is not a dict."""
        # No `**kwargs` here: torch would call this again with them, and on success continue without the other ranks.
        self._stack.close()
        self._names, self._parts, self._entries = set(), (), None

        def use(parts: Sequence[Part]) -> tuple[str, Metadata, object]:
            kept, items = kept_metadata(parts), listed_items(parts)
            entries = None if items else entries_of(parts)
            metadata = metadata_of([one.described for one in entries.values()] if entries else items, kept)
            if parts[0].manifest is not None:
                self._parts, self._entries = parts, entries
            return identity_of(parts), metadata, kept.get("save_id")

        self._identity, metadata, save_id = self._read(use, kept=self._stack)
        metadata.storage_meta = StorageMeta(
            checkpoint_id=self.checkpoint_id,
            save_id=save_id if isinstance(save_id, str) else None,
            load_id=self._load_id,
        )
        return metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing: there is nothing to set up."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return replace(plan, storage_data=(self._identity, _renamed(plan)))

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """On the coordinator, raise StorageUnavailableError unless all ranks see the same checkpoint."""
        identities = [plan.storage_data[0] for plan in plans]
        others = [rank for rank, identity in enumerate(identities) if identity != identities[0]]
        if others:
            raise StorageUnavailableError(
                f"{self._place.shown}: ranks {others[:20]} see another checkpoint there than rank 0; load one step by "
                "its path",
                path=self._place.shown,
            )
        renamed: dict[str, set[str]] = {}
        for plan in plans:
            for name, saved_as in plan.storage_data[1].items():
                renamed.setdefault(name, set()).update(saved_as)
        # Every rank gets the renamed names of all ranks: it may hold a part of a shard that its own plan leaves out.
        return [replace(plan, storage_data=(identities[0], renamed)) for plan in plans]

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> torch.futures.Future[None]:
        """Fill the plan's targets. Returns once they are filled."""
        self._names |= {item.storage_index.fqn for item in plan.items}.union(*plan.storage_data[1].values())
        parts, entries = self._parts, self._entries
        self._parts, self._entries = (), None

        def use(parts: Sequence[Part], entries: Mapping[str, SavedItem] | None = None) -> None:
            if identity_of(parts) != self._identity:
                raise StorageUnavailableError(
                    f"{self._place.shown} was replaced while it was read; load it again", path=self._place.shown
                )
            blobs, renamed = frozenset(kept_metadata(parts).get("blobs", ())), plan.storage_data[1]
            _PlanReader(entries or entries_of(parts), plan.items, planner, blobs, renamed, trust=self._trust).run()

        done: torch.futures.Future[None] = torch.futures.Future()
        done.set_result(None)
        # If the step was replaced, an archive that was not open yet may be missing. The second read then raises the
        # error of `use`.
        with self._stack, suppress(CorruptCheckpointError, StorageUnavailableError):
            if parts:
                use(parts, entries)
                return done
        self._read(use)
        return done

    @property
    def checkpoint_id(self) -> str:
        """The path or URL to read, without credentials."""
        return self._place.shown

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """True if `checkpoint_id` is a path or URL that can be read from."""
        return is_checkpoint_id(checkpoint_id)

    def _read(self, use: Callable[[Sequence[Part]], T], kept: ExitStack | None = None) -> T:
        """The result of `use` for the parts of the step that contain the plan's items, and perhaps others."""
        names = self._names
        readers = readers_of_this_rank(self._from_ranks)._replace(
            wants=lambda paths: [path for path in paths if ".".join(map(str, path)) in names], kept=kept
        )
        return from_path(self._place, use, verify=self._verify, readers=readers)


class _PlanReader:
    """One rank's plan, and the reads that fill it. Created and run once by `TarStorageReader.read_data`."""

    def __init__(
        self,
        entries: Mapping[str, SavedItem],
        items: Iterable[ReadItem],
        planner: LoadPlanner,
        blobs: frozenset[str],
        renamed: Mapping[str, Collection[str]],
        *,
        trust: bool,
    ) -> None:
        self._entries, self._planner, self._blobs, self._trust = entries, planner, blobs, trust
        self._items, self._renamed = list(items), renamed
        self._by_name: dict[str, list[ReadItem]] = {}
        for item in self._items:
            self._by_name.setdefault(item.dest_index.fqn, []).append(item)
        self._wanted: dict[int, tuple[Contents, list[Wanted]]] = {}
        self._after: list[Callable[[], object]] = []  # called once all bytes are read

    def run(self) -> None:
        makers, plan = self._planned()
        fill(plan)
        for action in self._after:
            action()
        for item, make in makers:
            blob = io.BytesIO(make())
            self._planner.load_bytes(item, blob)

    @no_collection()
    def _planned(self) -> tuple[list[tuple[ReadItem, Callable[[], bytes]]], Plan]:
        """The reads of all tensors, and for each other value the function that creates it from the bytes."""
        misplaced = self._misplaced_targets()
        values = []
        for item in self._items:
            name = item.storage_index.fqn
            if item.type == LoadItemType.BYTE_IO:
                values.append(item)
            elif item.dest_index.fqn not in misplaced:
                target = self._planner.resolve_tensor(item)
                self._want(name, target.detach(), tuple(item.storage_offsets), tuple(item.lengths))
                self._after.append(partial(self._planner.commit_tensor, item, target))
        for name, held in misplaced.items():
            for rectangle, part in held:
                self._want(min(self._saved_as(name)), part.detach(), rectangle.global_offsets, rectangle.sizes)
        for file, wanted in self._wanted.values():  # all before the first read: other files may have to be opened
            file.need((read.number, read.box) for read in wanted)
        makers = [(item, self._value(item)) for item in values]
        return makers, planned(self._wanted.values())

    def _misplaced_targets(self) -> dict[str, list[tuple[Rectangle, torch.Tensor]]]:
        """The sharded targets for which torch's plan differs from the slices of this rank, each with these slices.

        torch describes each shard by one rectangle, computed from the left of the mesh. For strided and uneven shards,
        that is the rectangle of another rank.
        """
        live = getattr(self._planner, "state_dict", None)
        slicer, misplaced = Slicer(), {}
        for name, target in live.items() if isinstance(live, Mapping) else ():
            saved_as = self._saved_as(name)
            if not is_sharded(target) or self._entries.keys().isdisjoint(saved_as):
                continue
            slices, parts = slicer.slice(target, name=name)
            if _covers_exactly(self._by_name.get(name, ()), slices.rectangles):
                continue
            if self._is_one(saved_as, target):
                misplaced[name] = list(zip(slices.rectangles, parts, strict=True))
            elif not _matches_torch(target, slices.rectangles):
                raise ValueError(
                    f"{shown((name,))}: the plan fills this shard from {', '.join(sorted(saved_as))}, at offsets that "
                    "torch assigns to this rank, although another rank holds them; load it under the name and with "
                    "the shape that it was saved with"
                )
        return misplaced

    def _saved_as(self, name: str) -> Collection[str]:
        """The names of the step's items that fill a target."""
        own = {item.storage_index.fqn for item in self._by_name.get(name, ())}
        return own or self._renamed.get(name, (name,))

    def _is_one(self, saved_as: Collection[str], target: Any) -> bool:
        """True if the full target corresponds to exactly one saved tensor."""
        entry = self._entries.get(min(saved_as))
        return (
            len(saved_as) == 1 and entry is not None and entry.tensor is not None and entry.shape == tuple(target.shape)
        )

    def _want(self, name: str, target: torch.Tensor, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> None:
        value, file = self._entries[name].value, self._entries[name].file
        if why := why_not(target):
            raise ValueError(f"{shown((name,))} cannot be filled: {why}")
        if tuple(target.shape) != sizes:
            raise ValueError(f"{shown((name,))}: {list(sizes)} items are read into a tensor of {list(target.shape)}")
        number = file.primary(value.number)
        into, dtype = target, file.dtype(number)
        if target.dtype != dtype:  # torch's own reader converts, too
            into = torch.empty(sizes, dtype=dtype, device=CPU)
            self._after.append(partial(target.copy_, into))
        self._wanted.setdefault(id(file), (file, []))[1].append(Wanted(number, into, offsets))

    def _value(self, item: ReadItem) -> Callable[[], bytes]:
        """The function that creates the blob for torch, to be called once its tensors are read."""
        name = item.storage_index.fqn
        entry = self._entries[name]
        wanted, make = value_of(name, entry, trust=self._trust)
        self._wanted.setdefault(id(entry.file), (entry.file, []))[1].extend(wanted)
        return lambda: bytes(make()) if name in self._blobs else pickled(make())


def _renamed(plan: LoadPlan) -> dict[str, set[str]]:
    """The names of the step's items that fill each target, for targets with other names than these."""
    names: dict[str, set[str]] = {}
    for item in plan.items:
        names.setdefault(item.dest_index.fqn, set()).add(item.storage_index.fqn)
    return {name: saved_as for name, saved_as in names.items() if saved_as != {name}}


def _covers_exactly(items: Sequence[ReadItem], rectangles: Sequence[Rectangle]) -> bool:
    """True if a plan fills exactly these rectangles."""
    num_items = 0
    for item in items:
        box = Box(tuple(item.storage_offsets), tuple(item.lengths))
        at = tuple(item.dest_offsets)
        num_items += box.num_elements
        if not any(_is_at(box, at, rectangle, len(rectangles)) for rectangle in rectangles):
            return not box.num_elements and not rectangles
    return num_items == sum(rectangle.num_elements for rectangle in rectangles)


def _matches_torch(target: Any, rectangles: Sequence[Rectangle]) -> bool:
    """True if these rectangles are the chunks that torch's planners see on this rank."""
    described: list[Any] = getattr(target, "__create_chunk_list__", list)()
    chunks = [Box(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in described]
    return [chunk for chunk in chunks if chunk.num_elements] == [held.box for held in rectangles if held.num_elements]


def _is_at(box: Box, at: tuple[int, ...], rectangle: Rectangle, num_rectangles: int) -> bool:
    """True if a box of the tensor is inside a rectangle, and its place in the target is `at`.

    Plans count these offsets from the start of the rectangle, or from the start of all that this rank holds. The two
    differ if the rank holds several rectangles.
    """
    if rectangle.box.common(box) != box:
        return False
    inner = tuple(a - b for a, b in zip(box.offsets, rectangle.global_offsets, strict=True))
    return inner == at or (
        num_rectangles > 1 and tuple(map(sum, zip(inner, rectangle.local_offsets, strict=True))) == at
    )
