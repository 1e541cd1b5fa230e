"""`TarStorageReader`: torch.distributed.checkpoint loads a step, whoever has saved it.

In: a path, and the plans that torch's planners make. Out: torch's metadata, and its targets filled. Knows nothing of: how
a step was saved.

To torch, every tensor is one chunk; which archives it is in, and which of their bytes overlap what is wanted, is found out
as for any load. A step is opened once for the metadata, and once more for the bytes: all ranks must have seen the same.
"""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader

from ...errors import StorageUnavailableError
from ...host.ranks import world_of
from ...loading.contents import CPU, Contents, Part
from ...loading.fill import Wanted, fill, planned
from ...loading.find import Readers, from_path
from ...loading.open import OpenArchive
from ...spec import with_article
from ...state.capture import why_not
from ...state.cover import Box
from ...state.names import Path, shown
from ...state.sharded import Slicer, is_sharded
from ...state.slices import Rectangle
from ...state.tree import SavedApart, Stored, leaves, replaced
from ...storage.place import Anywhere, place_of
from .names import KEPT, flattened, planner_data_of
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

    A load raises what `async_ckpt.load` raises; torch wraps the errors of all ranks in a CheckpointException.
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
        self._verify, self._trust = verify, trust
        self._readers = Readers(from_ranks=from_ranks)
        self._load_id = os.urandom(8).hex()
        self._seen = ""  # what the metadata was read from

    # --- torch's protocol, in the order of its calls ----------------------------------------------------------

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """A load begins."""
        if checkpoint_id is not None:
            self._place = replace(self._place, url=checkpoint_id)
        self._load_id = os.urandom(8).hex()

    def read_metadata(self, *_: Any) -> Metadata:
        """What is in the step, as torch says it. Raises TypeError for a state that is not a dict."""
        # Without `**kwargs`: torch would try once more, and if that went well go on without the other ranks.

        def use(parts: Sequence[Part]) -> tuple[str, Metadata]:
            return _identity(parts), _metadata(_entries(parts), _kept(parts))

        self._seen, metadata = self._read(use)
        metadata.storage_meta = StorageMeta(checkpoint_id=self.checkpoint_id, load_id=self._load_id)
        return metadata

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """There is nothing to set up."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return replace(plan, storage_data=self._seen)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """On the coordinator. Raises StorageUnavailableError where ranks have seen different steps."""
        others = [rank for rank, plan in enumerate(plans) if plan.storage_data != plans[0].storage_data]
        if others:
            raise StorageUnavailableError(
                f"{self._place.shown}: ranks {others[:20]} see another checkpoint there than rank 0; load one step by its path",
                path=self._place.shown,
            )
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> torch.futures.Future[None]:
        """Fill what the plan names. Returns once it is filled."""

        def use(parts: Sequence[Part]) -> None:
            if _identity(parts) != self._seen:
                raise StorageUnavailableError(
                    f"{self._place.shown} was replaced while it was read; load it again",
                    path=self._place.shown,
                )
            blobs = frozenset(_kept(parts).get("blobs", ()))
            _Load(_entries(parts), plan.items, planner, blobs, trust=self._trust).run()

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
        return from_path(self._place, use, verify=self._verify, readers=self._readers)


class _Entry(NamedTuple):
    """What torch has a name for, where in the state it is, and in which file."""

    path: Path
    value: Any
    file: Contents


def _kept(parts: Sequence[Part]) -> Mapping[str, Any]:
    """What the writer has kept beside the state."""
    kept = parts[0].record.get(KEPT)
    return kept if isinstance(kept, dict) else {}


def _identity(parts: Sequence[Part]) -> str:
    """A text that is the same for the same files."""
    found = hashlib.blake2b(digest_size=16)
    for file in (file for part in parts for file in part.archive.files):
        told = file.digest if isinstance(file, OpenArchive) else str(file.index.file_bytes)
        found.update(f"{file.path.rpartition('/')[2]} {told}\n".encode())
    return found.hexdigest()


def _entries(parts: Sequence[Part]) -> dict[str, _Entry]:
    found: dict[str, _Entry] = {}
    for part in parts:
        tree, _ = part.archive.tree(groups=part.groups)
        if not isinstance(tree, dict):
            raise TypeError(
                f"{part.archive.path}: torch.distributed.checkpoint loads dicts, and this is {with_article(type(tree).__name__)}; "
                "load it by async_ckpt.load"
            )
        own = replaced(tree, _as_it_is, partial(_own, part.archive))
        for name, (path, value) in flattened(own).items():
            found[name] = _Entry(path, value, part.archive)
    return found


def _own(file: Contents, apart: SavedApart) -> Any:
    """This rank's value, in a world of the size that has saved it."""
    world = world_of(None, None)
    is_same = world.size == len(file.files) and world.rank in apart.values
    return replaced(apart.values[world.rank], _as_it_is) if is_same else apart


def _as_it_is(leaf: Stored) -> Stored:
    return leaf


def _metadata(entries: Mapping[str, _Entry], kept: Mapping[str, Any]) -> Metadata:
    told: dict[str, Any] = {}
    for name, (_, value, file) in entries.items():
        if not _is_tensor(value):
            told[name] = BytesStorageMetadata()
            continue
        size = torch.Size(file.index.tensors[value.number].shape)
        whole = ChunkStorageMetadata(torch.Size([0] * len(size)), size)
        told[name] = TensorStorageMetadata(TensorProperties(dtype=file.dtype(value.number)), size, [whole])
    paths = {name: (one.path, None) for name, one in entries.items()}
    return Metadata(told, planner_data=planner_data_of(kept, paths))


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Stored) and value.kind == "tensor"


class _Load:
    """One read of all that one rank wants."""

    def __init__(
        self,
        entries: Mapping[str, _Entry],
        items: Iterable[ReadItem],
        planner: LoadPlanner,
        blobs: frozenset[str],
        *,
        trust: bool,
    ) -> None:
        self._entries, self._planner, self._blobs, self._trust = entries, planner, blobs, trust
        self._items = list(items)
        self._wanted: dict[int, tuple[Contents, list[Wanted]]] = {}
        self._after: list[Callable[[], None]] = []  # once all is filled

    def run(self) -> None:
        elsewhere = self._placed_otherwise()
        values = []
        for item in self._items:
            name = item.storage_index.fqn
            if item.type == LoadItemType.BYTE_IO:
                values.append(item)
            elif name not in elsewhere:
                target = self._planner.resolve_tensor(item)
                self._want(name, target.detach(), tuple(item.storage_offsets), tuple(item.lengths))
                self._after.append(lambda item=item, target=target: self._planner.commit_tensor(item, target))  # type: ignore[misc]
        for name, held in elsewhere.items():
            for rectangle, part in held:
                self._want(name, part.detach(), rectangle.global_offsets, rectangle.sizes)
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
        by_name: dict[str, list[ReadItem]] = {}
        for item in self._items:
            by_name.setdefault(item.dest_index.fqn, []).append(item)
        for name, target in live.items() if isinstance(live, Mapping) else ():
            if name in self._entries and is_sharded(target):
                slices, parts, _ = slicer.slice(target, name=name)
                if not _names_just(by_name.get(name, ()), slices.rectangles):
                    found[name] = list(zip(slices.rectangles, parts, strict=True))
        return found

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
        """What makes the blob that torch is to open, once its tensors are filled."""
        name = item.storage_index.fqn
        _, value, file = self._entries[name]
        inside = list(leaves(value))
        for apart in inside:
            if isinstance(apart, SavedApart):
                raise ValueError(
                    f"{shown(apart.path)} was saved by each rank for itself, and this rank, in a world of this size, has none; "
                    f"say whose it is to get, such as from_ranks={{{shown(apart.path)!r}: {min(apart.values)}}}"
                )
        stored = [leaf for leaf in inside if isinstance(leaf, Stored)]
        objects = file.objects(stored, trust=self._trust)
        tensors = {
            n: file.empty(n, CPU) for n in {file.primary(s.number) for s in stored if s.kind != "object"}
        }
        wanted = self._wanted.setdefault(id(file), (file, []))[1]
        wanted += [Wanted(number, tensor) for number, tensor in tensors.items()]

        def give(leaf: Stored) -> Any:
            if leaf.kind == "object":
                return objects[leaf.number]
            return file.leaf(leaf, tensors[file.primary(leaf.number)], CPU)

        def blob() -> bytes:
            made = replaced(value, give)
            if name in self._blobs:
                return bytes(made)
            buffer = io.BytesIO()
            torch.save(made, buffer)
            return buffer.getvalue()

        return blob


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
