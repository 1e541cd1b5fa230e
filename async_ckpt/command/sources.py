"""Checkpoints of any format, as named items that are read piece by piece, or as a state.

In: a place with an archive, a step, a run, weights in safetensors, a checkpoint of torch.distributed.checkpoint, or a
file of torch.save. Out: items, or the state, of which no more than a few pieces are in memory at a time.
Knows nothing of: what is done with them.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import pickle
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, Final, TypeVar

import torch

from ..errors import CorruptCheckpointError, UntrustedObjectError
from ..loading.archives.contents import Contents, Part
from ..loading.archives.find import from_path, opened_as_file
from ..loading.archives.step_archives import Readers, selected_by
from ..loading.inspected import walked
from ..loading.load import LoadOptions, check_lent, check_select, state_of
from ..loading.ranges import Range, read_ranges
from ..spec import align_up
from ..state.names import Select, Selector, dotted, selector, shown
from ..state.per_rank import PerRank
from ..state.tree import StoredLeaf
from ..storage.interface import Reader
from ..storage.local import LocalReader
from ..storage.place import Place
from .screen import Answer

T = TypeVar("T")

# What is in memory at once of a tensor.
CHUNK_BYTES: Final = 32 << 20
# Tensors up to this size are read several at a time.
_SMALL_BYTES: Final = 1 << 20
# The memory of tensors that are read together.
_TOGETHER_BYTES: Final = 16 << 20
# Where the items of any dtype may begin.
_ALIGNMENT_BYTES: Final = 16
_ZIP: Final = b"PK\x03\x04"
_PICKLE: Final = b"\x80"

Chunks = Callable[[], Iterator[torch.Tensor]]


@dataclass(frozen=True, slots=True)
class NamedItem:
    """One name of a checkpoint. A tensor, an array or bytes has `dtype`, `shape` and `chunks`; any other, `value`.

    `chunks` reads the items as flat tensors of `dtype`, in their order. They may share one memory: each is gone when
    the next one is asked for. An object that was not unpickled has itself as `value`: a `StoredLeaf`.
    """

    path: tuple[Any, ...]
    dtype: torch.dtype | None = None
    shape: tuple[int, ...] = ()
    chunks: Chunks | None = None
    value: Any = None

    @property
    def name(self) -> str:
        return dotted(self.path)

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize if self.dtype is not None else 0


def with_items(
    place: Place,
    use: Callable[[Sequence[NamedItem]], T],
    *,
    select: Select = None,
    trust: bool = False,
    from_ranks: Mapping[str, int] | None = None,
) -> T:
    """The result of `use` for the items of a checkpoint, in its order. Of an archive, nothing is unpickled.

    `from_ranks` are the ranks whose values to take, by name, where each rank has its own.

    Raises:
        UntrustedObjectError: a file of torch.save has more than weights, and `trust` was not given.
        CorruptCheckpointError: something is damaged.
        NotCommittedError: there is no checkpoint.
        KeyError: `select` selects nothing.
    """
    with _torch_state(place, trust=trust) as state:
        if state is not None:
            return use(_chosen(list(_items_of_state(state[0], ())), select, place))
    readers = Readers(None, from_ranks, wants=selected_by(select))
    return from_path(place, lambda parts: use(_items_of_parts(parts, select)), verify=True, readers=readers)


def with_state(
    place: Place,
    use: Callable[[Any], T],
    *,
    scratch: Path,
    select: Select = None,
    trust: bool = False,
    from_ranks: Mapping[str, int] | None = None,
) -> T:
    """The result of `use` for a checkpoint as one state, as `load` returns it.

    Tensors of a local file are views of it. Others are first written to files in the folder `scratch`, as large as
    they are, and are views of these. Raises as `with_items` does, and UntrustedObjectError for objects in an archive.
    """
    with _torch_state(place, trust=trust) as state:
        if state is not None:
            if select is not None:
                raise Answer(
                    f"{place.shown}: --select takes names out of an archive or step, not out of a file of torch"
                )
            return use(state[0])

    def load(parts: Sequence[Part]) -> T:
        options = LoadOptions(select=select, trust=trust)
        if all(part.archive.is_local_file for part in parts):
            return use(state_of(parts, options._replace(mmap=True)))
        with tempfile.TemporaryFile(dir=scratch) as file:
            memory = partial(_memory_in, file.fileno())
            state = state_of(parts, options, memory=memory)
            if name := _name_by_rank(state, ()):
                raise Answer(f"{place.shown}: each rank has its own {name}; pass --from-rank {name}=0, or another rank")
            return use(state)

    return from_path(place, load, verify=True, readers=Readers(None, from_ranks, wants=selected_by(select)))


def _name_by_rank(state: Any, path: tuple[Any, ...]) -> str | None:
    """The first name of which each rank has its own value."""
    if isinstance(state, PerRank):
        return dotted(path)
    if isinstance(state, dict):
        names = (_name_by_rank(inner, (*path, key)) for key, inner in state.items())
        return next(filter(None, names), None)
    return None


def _memory_in(fd: int, num_bytes: int) -> torch.Tensor:
    """New bytes at the end of a file, mapped."""
    begin = -(-os.fstat(fd).st_size // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
    if not num_bytes:
        return torch.empty(0, dtype=torch.uint8)
    os.ftruncate(fd, begin + num_bytes)
    return torch.frombuffer(mmap.mmap(fd, num_bytes, offset=begin), dtype=torch.uint8)


# --- files of torch.save ------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _torch_state(place: Place, *, trust: bool) -> Iterator[tuple[Any] | None]:
    """The content of a file of torch.save, mapped if torch can do that; None for anything else."""
    opened = opened_as_file(place)
    if opened is None:
        yield None
        return
    reader, path = opened
    with reader:
        head = bytearray(min(4, reader.num_bytes))
        reader.read_into(0, memoryview(head))
        if not head.startswith((_ZIP, _PICKLE)):
            yield None
            return
        with _as_local_file(reader, path) as local:
            yield (_torch_load(local, path, trust=trust, is_zip=head.startswith(_ZIP)),)


@contextlib.contextmanager
def _as_local_file(reader: Reader, path: str) -> Iterator[str]:
    if isinstance(reader, LocalReader):
        yield path
        return
    with tempfile.NamedTemporaryFile(suffix=".pt") as file:
        memory = memoryview(bytearray(CHUNK_BYTES))
        for begin in range(0, reader.num_bytes, CHUNK_BYTES):
            piece = memory[: min(CHUNK_BYTES, reader.num_bytes - begin)]
            reader.read_into(begin, piece)
            file.write(piece)
        file.flush()
        yield file.name


def _torch_load(local: str, path: str, *, trust: bool, is_zip: bool) -> Any:
    try:
        # Weights only, unless --trust is given.
        return torch.load(local, map_location="cpu", weights_only=not trust, mmap=is_zip)  # nosec B614
    except pickle.UnpicklingError as error:
        if trust:
            raise CorruptCheckpointError(f"{path}: torch.load cannot read it ({error!s:.200})", path=path) from error
        why = str(error).partition("\n")[0]
        raise UntrustedObjectError(
            f"{path} has more than weights, so that reading it runs code from the file; pass --trust if you know where "
            f"it comes from ({why:.200})",
            path=path,
        ) from error
    except (RuntimeError, EOFError, OSError, ValueError, KeyError) as error:
        why = str(error).partition("\n")[0]
        raise CorruptCheckpointError(f"{path}: torch.load cannot read it ({why:.200})", path=path) from error


def _items_of_state(value: Any, path: tuple[Any, ...]) -> Iterator[NamedItem]:
    if isinstance(value, torch.Tensor) and not value.is_sparse and value.layout == torch.strided:
        yield NamedItem(path, value.dtype, tuple(value.shape), lambda: _chunks_of(value.detach()))
    elif isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _items_of_state(inner, (*path, key))
    elif isinstance(value, list | tuple) and _has_tensor(value):
        for number, inner in enumerate(value):
            yield from _items_of_state(inner, (*path, number))
    elif not isinstance(value, dict):
        yield NamedItem(path, value=value)


def _has_tensor(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_has_tensor, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_has_tensor, value))
    return isinstance(value, torch.Tensor)


def _chunks_of(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    flat = tensor.contiguous().view(-1)
    yield from flat.split(max(1, CHUNK_BYTES // tensor.dtype.itemsize)) if flat.numel() else ()


def _chosen(items: list[NamedItem], select: Select, place: Place) -> list[NamedItem]:
    chosen: Selector | None = selector(select)
    kept = [item for item in items if chosen is None or chosen(item.path)]
    if not kept:
        raise KeyError(f"select={select!r} matches nothing in {place.shown}")
    return kept


# --- archives and folders -----------------------------------------------------------------------------------------


def _items_of_parts(parts: Sequence[Part], select: Select) -> list[NamedItem]:
    check_lent(parts, select)
    check_select(parts, select)
    return [item for part in parts for item in _items_of_part(part, select)]


def _items_of_part(part: Part, select: Select) -> Iterator[NamedItem]:
    archive = part.archive
    archive.learn_names()
    try:
        tree, stored = archive.tree(select=select, groups=part.groups)
    except KeyError:  # what is selected is in another part
        return
    numbers = [leaf.number for leaf in stored if leaf.kind != "object"]
    archive.need((number, None) for number in numbers)
    reader = TensorReader(archive, numbers)
    for path, leaf in walked(tree, ()):
        if isinstance(leaf, StoredLeaf) and leaf.kind != "object":
            number = archive.primary(leaf.number)
            tensor = archive.index.tensors[leaf.number]
            yield NamedItem(path, archive.dtype(number), tuple(tensor.shape), partial(reader.chunks, number))
        else:
            yield NamedItem(path, value=leaf)


class TensorReader:
    """The tensors of an archive with these numbers, read one after the other. Its caller creates it; from one thread.

    Small ones that are asked for in the order of `numbers` are read with those that follow: each read compares whole
    blocks of 4 MiB with their digests.
    """

    def __init__(self, archive: Contents, numbers: Sequence[int]) -> None:
        self._archive = archive
        self._numbers = [*dict.fromkeys(map(archive.primary, numbers))]
        self._position = {number: position for position, number in enumerate(self._numbers)}
        self._last = -1  # the position of the one that was asked for last
        self._together: dict[int, torch.Tensor] = {}  # the bytes of small ones that were read by one call

    def chunks(self, number: int) -> Iterator[torch.Tensor]:
        """The items of a tensor, flat, in pieces of 32 MiB of one memory."""
        dtype, total = self._archive.dtype(number), self._num_bytes(number)
        is_next = self._position[number] == self._last + 1
        self._last = self._position[number]
        if number not in self._together and is_next and 0 < total <= _SMALL_BYTES:
            self._read_together(number)
        if number in self._together:
            yield self._together[number].view(dtype)
            return
        step = CHUNK_BYTES // dtype.itemsize * dtype.itemsize
        memory = torch.empty(min(step, total), dtype=torch.uint8)
        for begin in range(0, total, step):
            length = min(step, total - begin)
            read_ranges([Range(self._archive, number, begin, length, 0)], memory)
            yield memory[:length].view(dtype)

    def _read_together(self, first: int) -> None:
        """Read a small tensor, and the small ones that follow it, as many as have room."""
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


def shown_value(value: Any) -> str:
    """A value that is no tensor, in few words."""
    if isinstance(value, StoredLeaf):
        return "an object that is not unpickled"
    return repr(value)[:200]


def shown_name(item: NamedItem) -> str:
    return shown(item.path)
