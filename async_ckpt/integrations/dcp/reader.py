"""`TarStorageReader`: torch.distributed.checkpoint loads a step, whoever has saved it.

In: a path, and the plans that torch's planners make. Out: torch's metadata, and its targets filled. Knows nothing of: how
a step was saved.

To torch, every tensor is one chunk; which archives it is in, and which of their bytes overlap what is wanted, is found out
as for any load. A step is opened once for the metadata, and once more for the bytes: all ranks must have seen the same.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch.distributed.checkpoint.metadata import (
    Metadata,
    StorageMeta,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader

from ...errors import StorageUnavailableError
from ...loading.archives.contents import CPU, Contents, Part
from ...loading.archives.find import from_path
from ...loading.archives.step_archives import check_from_ranks
from ...loading.fill import Wanted, fill, planned
from ...slicing.cover import Box
from ...slicing.sharded import Slicer, is_sharded
from ...slicing.slices import Rectangle
from ...spec import flag
from ...state.capture import why_not
from ...state.names import shown
from ...storage.place import Anywhere, place_of
from .entries import (
    SavedItem,
    entries_of,
    identity_of,
    kept_in,
    metadata_of,
    saved,
    this_rank,
    value_of,
)
from .writer import is_place

T = TypeVar("T")


class TarStorageReader(StorageReader):
    """Read a step for `torch.distributed.checkpoint.load`.

        state = {"model": model.state_dict()}
        torch.distributed.checkpoint.load(state, storage_reader=TarStorageReader("runs/a/step_00000100"))

    It reads what `TarStorageWriter` has written, what an AsyncCheckpointer has saved, by however many ranks, and single
    archives; only the byte ranges that a rank wants. Given the root of a run, it reads the newest step. Strided and uneven
    shards are filled with what is theirs.

    Args:
        path: a path, a URL or a Place. `checkpoint_id` of a load replaces it; the options of a Place stay.
        verify: compare the digest of every block that is read.
        trust: unpickle values that are not plain data. Use it only for files whose writer you trust.
        from_ranks: whose value to take where each rank has its own, by name, such as {"rng": 0}. A rank of as many as have
            saved gets its own.

    Raises TypeError and ValueError for arguments that are not valid. A load raises what `async_ckpt.load` raises; torch wraps
    the errors of all ranks in a CheckpointException.
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
        self._seen = ""  # what the metadata was read from

    # --- torch's protocol, in the order of its calls ----------------------------------------------------------

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """A load begins."""
        if checkpoint_id is not None:
            self._place = replace(self._place, url=checkpoint_id)
        self._load_id = os.urandom(8).hex()

    def read_metadata(self, *_: Any) -> Metadata:
        """The metadata of the step in torch's own terms. Raises TypeError for a state that is not a dict."""
        # Without `**kwargs`: torch would try once more, and if that went well go on without the other ranks.

        def use(parts: Sequence[Part]) -> tuple[str, Metadata, object]:
            kept = kept_in(parts)
            return identity_of(parts), metadata_of(entries_of(parts), kept), kept.get("save_id")

        self._seen, metadata, save_id = self._read(use)
        metadata.storage_meta = StorageMeta(
            checkpoint_id=self.checkpoint_id,
            save_id=save_id if isinstance(save_id, str) else None,
            load_id=self._load_id,
        )
        return metadata

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """There is nothing to set up."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return replace(plan, storage_data=(self._seen, _renamed(plan)))

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """On the coordinator. Raises StorageUnavailableError where ranks have seen different steps."""
        seen = [plan.storage_data[0] for plan in plans]
        others = [rank for rank, one in enumerate(seen) if one != seen[0]]
        if others:
            raise StorageUnavailableError(
                f"{self._place.shown}: ranks {others[:20]} see another checkpoint there than rank 0; load one step by its path",
                path=self._place.shown,
            )
        renamed: dict[str, set[str]] = {}
        for plan in plans:
            for name, saved_as in plan.storage_data[1].items():
                renamed.setdefault(name, set()).update(saved_as)
        # A rank whose own plan says nothing of a shard may hold some of it all the same.
        return [replace(plan, storage_data=(seen[0], renamed)) for plan in plans]

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> torch.futures.Future[None]:
        """Fill what the plan names. Returns once it is filled."""

        def use(parts: Sequence[Part]) -> None:
            if identity_of(parts) != self._seen:
                raise StorageUnavailableError(
                    f"{self._place.shown} was replaced while it was read; load it again",
                    path=self._place.shown,
                )
            blobs = frozenset(kept_in(parts).get("blobs", ()))
            renamed = plan.storage_data[1]
            _Load(entries_of(parts), plan.items, planner, blobs, renamed, trust=self._trust).run()

        self._read(use)
        done: torch.futures.Future[None] = torch.futures.Future()
        done.set_result(None)
        return done

    @property
    def checkpoint_id(self) -> str:
        """Where it reads, without credentials."""
        return self._place.shown

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it is a path or URL that can be read from."""
        return is_place(checkpoint_id)

    def _read(self, use: Callable[[Sequence[Part]], T]) -> T:
        return from_path(self._place, use, verify=self._verify, readers=this_rank(self._from_ranks))


class _Load:
    """One read of all that one rank wants."""

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
        self._after: list[Callable[[], None]] = []  # once all is filled

    def run(self) -> None:
        elsewhere = self._placed_otherwise()
        values = []
        for item in self._items:
            name = item.storage_index.fqn
            if item.type == LoadItemType.BYTE_IO:
                values.append(item)
            elif item.dest_index.fqn not in elsewhere:
                target = self._planner.resolve_tensor(item)
                self._want(name, target.detach(), tuple(item.storage_offsets), tuple(item.lengths))
                self._after.append(lambda item=item, target=target: self._planner.commit_tensor(item, target))  # type: ignore[misc]
        for name, held in elsewhere.items():
            for rectangle, part in held:
                self._want(
                    min(self._saved_as(name)), part.detach(), rectangle.global_offsets, rectangle.sizes
                )
        self._need()
        made = [(item, self._value(item)) for item in values]
        fill(planned(self._wanted.values()))
        for action in self._after:
            action()
        for item, give in made:
            blob = io.BytesIO(give())
            self._planner.load_bytes(item, blob)

    def _placed_otherwise(self) -> dict[str, list[tuple[Rectangle, torch.Tensor]]]:
        """The sharded targets of which torch's plan does not name just what is here, with what is.

        torch describes each by one rectangle, reckoned from the left of the mesh: for strided and for uneven shards that is
        another rank's.
        """
        live = getattr(self._planner, "state_dict", None)
        slicer, found = Slicer(), {}
        for name, target in live.items() if isinstance(live, Mapping) else ():
            saved_as = self._saved_as(name)
            if not is_sharded(target) or self._entries.keys().isdisjoint(saved_as):
                continue
            slices, parts, _ = slicer.slice(target, name=name)
            if _names_just(self._by_name.get(name, ()), slices.rectangles):
                continue
            if self._is_one(saved_as, target):
                found[name] = list(zip(slices.rectangles, parts, strict=True))
            elif not _is_as_torch_says(target, slices.rectangles):
                raise ValueError(
                    f"{shown((name,))}: the plan fills this shard from {', '.join(sorted(saved_as))}, at places that torch takes "
                    "for this rank's, but that are another's; load it by the name and in the shape that it was saved with"
                )
        return found

    def _saved_as(self, name: str) -> Collection[str]:
        """The names in the step of what is read into a target."""
        own = {item.storage_index.fqn for item in self._by_name.get(name, ())}
        return own or self._renamed.get(name, (name,))

    def _is_one(self, saved_as: Collection[str], target: Any) -> bool:
        """Whether the whole target is the whole of one saved tensor."""
        entry = self._entries.get(min(saved_as))
        return (
            len(saved_as) == 1
            and entry is not None
            and entry.tensor is not None
            and entry.shape == tuple(target.shape)
        )

    def _need(self) -> None:
        """All that is wanted, said before any of it is read: other files may have to be opened for it."""
        for file, wanted in self._wanted.values():
            file.need((one.number, _box(one)) for one in wanted)

    def _want(
        self, name: str, target: torch.Tensor, offsets: tuple[int, ...], sizes: tuple[int, ...]
    ) -> None:
        value, file = self._entries[name].value, self._entries[name].file
        if why := why_not(target):
            raise ValueError(f"{shown((name,))} cannot be filled: {why}")
        if tuple(target.shape) != sizes:
            raise ValueError(
                f"{shown((name,))}: {list(sizes)} items are read into a tensor of {list(target.shape)}"
            )
        number = file.primary(value.number)
        into, dtype = target, file.dtype(number)
        if target.dtype != dtype:  # as torch's own reader does it
            into = torch.empty(sizes, dtype=dtype, device=CPU)
            self._after.append(partial(_cast, target, into))
        self._wanted.setdefault(id(file), (file, []))[1].append(Wanted(number, into, offsets))

    def _value(self, item: ReadItem) -> Callable[[], bytes]:
        """The function that makes the blob that torch is to open, once its tensors are filled."""
        name = item.storage_index.fqn
        entry = self._entries[name]
        wanted, make = value_of(name, entry, trust=self._trust)
        self._wanted.setdefault(id(entry.file), (entry.file, []))[1].extend(wanted)
        return lambda: bytes(make()) if name in self._blobs else saved(make())


def _renamed(plan: LoadPlan) -> dict[str, set[str]]:
    """The names in the step of what goes into each target; only of those that have another name there."""
    found: dict[str, set[str]] = {}
    for item in plan.items:
        found.setdefault(item.dest_index.fqn, set()).add(item.storage_index.fqn)
    return {name: saved_as for name, saved_as in found.items() if saved_as != {name}}


def _box(wanted: Wanted) -> Box:
    shape = tuple(wanted.into.shape)
    return Box(wanted.offsets or (0,) * len(shape), shape)


def _cast(target: torch.Tensor, made: torch.Tensor) -> None:
    target.copy_(made)


def _names_just(items: Sequence[ReadItem], rectangles: Sequence[Rectangle]) -> bool:
    """Whether a plan fills all of these, and nothing else."""
    num_items = 0
    for item in items:
        box = Box(tuple(item.storage_offsets), tuple(item.lengths))
        at = tuple(item.dest_offsets)
        num_items += box.num_elements
        if not any(_is_at(box, at, one, len(rectangles)) for one in rectangles):
            return not box.num_elements and not rectangles
    return num_items == sum(one.num_elements for one in rectangles)


def _is_as_torch_says(target: Any, rectangles: Sequence[Rectangle]) -> bool:
    """Whether these are what torch's planners take for this rank's."""
    described: list[Any] = getattr(target, "__create_chunk_list__", list)()
    told = [Box(tuple(one.offsets), tuple(one.sizes)) for one in described]
    return [one for one in told if one.num_elements] == [
        Box(one.global_offsets, one.sizes) for one in rectangles if one.num_elements
    ]


def _is_at(box: Box, at: tuple[int, ...], one: Rectangle, num_rectangles: int) -> bool:
    """Whether a box of the tensor lies in a rectangle, and where it is to go: counted from that, or from the whole of what
    is held, which is the same where it is one.
    """
    if Box(one.global_offsets, one.sizes).common(box) != box:
        return False
    inner = tuple(a - b for a, b in zip(box.offsets, one.global_offsets, strict=True))
    return inner == at or (
        num_rectangles > 1 and tuple(map(sum, zip(inner, one.local_offsets, strict=True))) == at
    )
