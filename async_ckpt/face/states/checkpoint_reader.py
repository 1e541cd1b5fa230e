"""Checkpoints of any format, as named items that are read piece by piece, or as a state.

In: a place with an archive, a step, a run, weights in safetensors, a checkpoint of torch.distributed.checkpoint, or a
file of torch.save. Out: items, or the state, with only a few pieces in memory at a time.
Knows nothing of: the use of the items.
"""

from __future__ import annotations

import itertools
import mmap
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, Final, TypeVar

import torch

from ...core.loading.archives.contents import Contents, Part
from ...core.loading.archives.find import from_path
from ...core.loading.archives.step_archives import Readers, selected_by
from ...core.loading.load import LoadOptions, check_lent, check_select, state_of
from ...core.spec import align_up
from ...core.state.names import Select, Selector, dotted, selector
from ...core.state.per_rank import PerRank
from ...core.state.tree import StoredLeaf
from ...core.storage.place import Place
from ...errors import UsageError
from ..around.ranges import Range, chunks_of, read_ranges
from ..foreign.tensor_files import MissingShard, OpenSafetensors
from .named_items import Items, ItemWalk, NamedItem, PathForm, Unread, described
from .torch_files import TorchFile, torch_file

T = TypeVar("T")

# Tensors up to this size are read several at a time.
_SMALL_BYTES: Final = 1 << 20
# The memory of tensors that are read together.
_TOGETHER_BYTES: Final = 16 << 20
# An alignment that is enough for items of any dtype.
_ALIGNMENT_BYTES: Final = 16


def with_items(
    place: Place,
    use: Callable[[Items], T],
    *,
    select: Select = None,
    trust: bool = False,
    from_ranks: Mapping[str, int] | None = None,
) -> T:
    """The result of `use` for the items of a checkpoint, in its order. Without `trust`, nothing is unpickled.

    `from_ranks` maps the name of each entry that was saved per rank to the rank whose value to take.

    Raises:
        UntrustedObjectError: a file of torch.save contains more than weights, and `trust` was not given.
        CorruptCheckpointError: the checkpoint is damaged.
        NotCommittedError: there is no checkpoint.
        KeyError: `select` matches nothing.
        ImportError: the package or class of an object is missing.
    """
    with torch_file(place, trust=trust) as file:
        if file is not None:
            return use(_chosen(_items_of_torch(file), select, place))
    readers = Readers(None, from_ranks, wants=selected_by(select))
    return from_path(place, lambda parts: use(_items_of_parts(parts, select, trust)), verify=True, readers=readers)


def with_state(
    place: Place,
    use: Callable[[Any], T],
    *,
    scratch: Path,
    select: Select = None,
    trust: bool = False,
    from_ranks: Mapping[str, int] | None = None,
    types: Iterable[type] | None = (),
) -> T:
    """The result of `use` for a checkpoint as one state, as `load` returns it, or as `tree.decode` with these types.

    Tensors of a local file are views of it. Other tensors are first written to files of the same size in the folder
    `scratch`, and are views of these. Raises as `with_items` does, and UntrustedObjectError for objects in an archive.
    """
    with torch_file(place, trust=trust, as_state=True) as of_torch:
        if of_torch is not None:
            if select is not None:
                raise UsageError(
                    f"{place.shown}: --select takes names out of an archive or step, not out of a file of torch"
                )
            return use(of_torch.state)

    def load(parts: Sequence[Part]) -> T:
        options = LoadOptions(select=select, trust=trust, types=types)
        if all(part.archive.is_local_file for part in parts):
            return use(state_of(parts, options._replace(mmap=True)))
        with tempfile.TemporaryFile(dir=scratch) as file:
            memory = partial(_memory_in, file.fileno())
            state = state_of(parts, options, memory=memory)
            if name := _name_by_rank(state, ()):
                raise UsageError(
                    f"{place.shown}: each rank has its own {name}; pass --from-rank {name}=0, or another rank"
                )
            return use(state)

    return from_path(place, load, verify=True, readers=Readers(None, from_ranks, wants=selected_by(select)))


def _name_by_rank(state: Any, path: tuple[Any, ...]) -> str | None:
    """The first name that was saved per rank."""
    if isinstance(state, PerRank):
        return dotted(path)
    if isinstance(state, dict):
        names = (_name_by_rank(inner, (*path, key)) for key, inner in state.items())
        return next(filter(None, names), None)
    return None


def _memory_in(fd: int, num_bytes: int) -> torch.Tensor:
    """`num_bytes` new bytes at the end of a file, mapped to memory."""
    begin = -(-os.fstat(fd).st_size // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
    if not num_bytes:
        return torch.empty(0, dtype=torch.uint8)
    os.ftruncate(fd, begin + num_bytes)
    return torch.frombuffer(mmap.mmap(fd, num_bytes, offset=begin), dtype=torch.uint8)


# --- files of torch.save ------------------------------------------------------------------------------------------


def _items_of_torch(file: TorchFile) -> Items:
    if file.program is not None:
        return Items(file.program, ())
    walk = ItemWalk()
    walk.add(file.state)
    return Items(walk.leaves, walk.containers)


def _chosen(items: Items, select: Select, place: Place) -> Items:
    chosen: Selector | None = selector(select)
    if chosen is None:
        return items
    leaves = [item for item in items.leaves if chosen(item.path)]
    if not leaves:
        raise KeyError(f"select={select!r} matches nothing in {place.shown}")
    return items._replace(leaves=leaves, containers=[one for one in items.containers if chosen(one.path)])


# --- archives and folders -----------------------------------------------------------------------------------------


def _items_of_parts(parts: Sequence[Part], select: Select, trust: bool) -> Items:
    check_lent(parts, select)
    check_select(parts, select)
    walks = [_walk_over(part, select, trust) for part in parts]
    is_flat = any(isinstance(part.archive, OpenSafetensors | MissingShard) for part in parts)
    keeps_empty = not is_flat and all(part.keeps_empty for part in parts)
    return Items(
        [item for walk in walks for item in walk.leaves],
        [*{one.path: one for walk in walks for one in walk.containers}.values()],
        PathForm.FLAT if is_flat else PathForm.EXACT if keeps_empty else PathForm.TEXT,
        keeps_empty,
    )


def _walk_over(part: Part, select: Select, trust: bool) -> ItemWalk:
    archive = part.archive
    try:
        tree, stored = archive.tree(select=select, groups=part.groups, types=None)
    except KeyError:  # the selection is in another part
        return ItemWalk()
    numbers = [leaf.number for leaf in stored if leaf.kind != "object"]
    archive.need((number, None) for number in numbers)
    reader = TensorReader(archive, numbers)
    objects = archive.objects(stored, trust=True) if trust else archive.object_digests(stored)

    def add(walk: ItemWalk, leaf: StoredLeaf, path: tuple[Any, ...]) -> None:
        if leaf.kind != "object":
            walk.leaves.append(_stored_item(archive, reader, leaf, path))
        elif trust:
            walk.add(objects[leaf.number], path)
        else:
            walk.leaves.append(NamedItem(path, "object", value=Unread(objects[leaf.number])))

    walk = ItemWalk(add)
    walk.add(tree)
    return walk


def _stored_item(archive: Contents, reader: TensorReader, leaf: StoredLeaf, path: tuple[Any, ...]) -> NamedItem:
    number = archive.primary(leaf.number)
    tensor = archive.index.tensors[leaf.number]
    kind = {"ndarray": "array"}.get(leaf.kind, leaf.kind)
    facts = None if leaf.descr is None else described(leaf.descr, leaf.shape)
    return NamedItem(
        path, kind, archive.dtype(number), tuple(tensor.shape), partial(reader.chunks, number), facts=facts
    )


class TensorReader:
    """Reads the tensors of an archive with these numbers, one after the other. Used by one thread.

    Small tensors that are requested in the order of `numbers` are read together, since each read compares whole blocks
    of 4 MiB with their digests.
    """

    def __init__(self, archive: Contents, numbers: Sequence[int]) -> None:
        self._archive = archive
        self._numbers = [*dict.fromkeys(map(archive.primary, numbers))]
        self._position = {number: position for position, number in enumerate(self._numbers)}
        self._last = -1  # the position of the tensor that was requested last
        self._together: dict[int, torch.Tensor] = {}  # the bytes of small tensors from the last joint read

    def chunks(self, number: int) -> Iterator[torch.Tensor]:
        """The items of a tensor, flat, in pieces of 32 MiB that reuse one buffer."""
        is_next = self._position[number] == self._last + 1
        self._last = self._position[number]
        if number not in self._together and is_next and 0 < self._num_bytes(number) <= _SMALL_BYTES:
            self._read_together(number)
        if number in self._together:
            yield self._together[number].view(self._archive.dtype(number))
        else:
            yield from chunks_of(self._archive, number)

    def _read_together(self, first: int) -> None:
        """Read a small tensor, and as many of the following small ones as fit into 16 MiB."""
        memory, end = torch.empty(_TOGETHER_BYTES, dtype=torch.uint8), 0
        ranges: list[Range] = []
        for number in itertools.islice(self._numbers, self._position[first], None):
            total, begin = self._num_bytes(number), align_up(end, _ALIGNMENT_BYTES)
            if not 0 < total <= _SMALL_BYTES:
                continue
            if begin + total > _TOGETHER_BYTES:
                break
            ranges.append(Range(self._archive, number, 0, total, begin))
            end = begin + total
        read_ranges(ranges, memory)
        self._together = {one.number: memory[one.target : one.target + one.length] for one in ranges}

    def _num_bytes(self, number: int) -> int:
        return prod(self._archive.index.tensors[number].shape) * self._archive.dtype(number).itemsize
