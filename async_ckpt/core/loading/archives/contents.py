"""The content of a file by name, given its index.

In: a consistent index, and a reader. Out: the tree of names, tensors and leaves for it, bytes as they are stored.
Knows nothing of: the origin of the index, digests, runs of bytes, live objects.
"""

from __future__ import annotations

import math
import mmap as mmap_module
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import Any, ClassVar, Final, NamedTuple, TypeVar

import torch

from ....errors import CorruptCheckpointError, FormatVersionError
from ...backends import is_at, is_host
from ...format.index import VERSION, Index, IndexedTensor, Slice
from ...host.memory import advise_huge_pages
from ...runs.manifest import Manifest
from ...runs.record import DCP_RECORD
from ...slicing.boxes import Box, Cover, cover, strided_copies
from ...spec import BLOCK_BYTES, DTYPES, Extent
from ...state.names import Path, Select, Selector, dtype_named, selector, shown
from ...state.tree import InnerTensors, decode, top_keys
from ...state.tree import StoredLeaf as StoredLeaf
from ...state.tree import replaced as replaced
from ...state.wrapped import check_indices
from ...storage.interface import Reader
from ...storage.local import LocalReader

P = TypeVar("P")
T = TypeVar("T")
Groups = Collection[str] | None
CPU: Final = torch.device("cpu")  # passed explicitly, because the caller may have set another default device


class Source(NamedTuple):
    """The location of a part of a tensor: `box` is read from this piece of this file."""

    file: Contents
    piece: Slice
    box: Box


class Contents:
    """A file with an index, whose tensors are read by number. Subclasses verify its bytes.

    The code that opens the file creates it, and closes its reader. It belongs to the thread that loads, except for
    `read_into`, which any thread may call.
    """

    index: Index
    lender_of: Callable[[str, str], Contents] | None = None
    """Opens an archive of an earlier step by its folder and name; None if this file is stored outside of its run."""
    of_some: Mapping[Path, Collection[int]] = MappingProxyType({})
    """The paths of entries that only some of the saving ranks had, each with these ranks."""
    # The advice in an error about damage.
    _advice: ClassVar[str] = "load an earlier checkpoint"

    def __init__(self, reader: Reader | None, *, path: str) -> None:
        """`reader` is None if all bytes are in other files."""
        self.path = path
        self._reader: Any = reader

    def corrupt(self, why: str) -> CorruptCheckpointError:
        return CorruptCheckpointError(f"{self.path}: {why}; {self._advice}", path=self.path)

    # --- for subclasses ---------------------------------------------------------------------------------------

    keeps_empty: ClassVar[bool] = True
    """False if the file was saved through torch.distributed.checkpoint, which leaves out empty dicts."""

    @property
    def is_verified(self) -> bool:
        """True if the data is compared with digests; it is then read in whole blocks."""
        return False

    def verify(self, offset: int, data: memoryview) -> None:
        """Compare whole blocks that begin at `offset` with their digests. Raises CorruptCheckpointError."""

    def headers(self, members: Iterable[int]) -> list[Extent]:  # noqa: ARG002
        """The extents to read with the data of these members, so that they can be verified, such as headers."""
        return []

    def check_members(self, members: Iterable[int]) -> None:
        """Compare the headers of these members with the index. Raises CorruptCheckpointError."""

    def check_headers(self) -> None:
        """Compare the headers of all members of all files with their indices. Raises CorruptCheckpointError."""
        for file in self.files:
            file.check_members({piece.member for tensor in file.index.tensors for piece in tensor.slices})

    @property
    def files(self) -> Sequence[Contents]:
        """The files that hold the content."""
        return (self, *(self._lender(number) for number in range(len(self.index.lenders))))

    def pieces(self, number: int) -> list[tuple[Contents, Slice]]:
        """The slices of a tensor in this file, and the slices of it that archives of earlier steps have.

        Raises CorruptCheckpointError if an earlier archive lacks such a slice: memory is only allocated for saved data.
        """
        tensor = self.index.tensors[number]
        pieces: list[tuple[Contents, Slice]] = [(self, piece) for piece in tensor.slices]
        if not tensor.lent:
            return pieces
        path = self.index.tensors[self.primary(number)].path
        for lent in tensor.lent:
            file = self._lender(lent.lender)
            found = file._by_path.get(path)
            same = found is not None and (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
            slices = [piece for piece in found.slices if piece.box == lent.box] if found and same else []
            if not slices:
                raise self.corrupt(f"{shown(tensor.path)} should be in {file.path}, and is not")
            pieces.append((file, slices[0]))
        return pieces

    @cached_property
    def _by_path(self) -> dict[Path, IndexedTensor]:
        return {tensor.path: tensor for tensor in self.index.tensors if tensor.alias_of is None}

    def _lender(self, number: int) -> Contents:
        folder, name = self.index.lenders[number]
        if self.lender_of is None:
            raise self.corrupt(f"it refers to {folder}/{name} of its run; load the folder of its step")
        return self.lender_of(folder, name)

    def is_of_others(self, path: Path) -> bool:  # noqa: ARG002
        """True if other ranks had such an entry and this rank did not."""
        return False

    def is_of_each(self, number: int) -> bool:  # noqa: ARG002
        """True for a tensor of which each rank has its own value."""
        return False

    def objects(self, stored: Iterable[StoredLeaf], *, trust: bool) -> list[Any]:  # noqa: ARG002
        """The pickled leaves; nothing is unpickled unless one of them is wanted."""
        return []

    def object_digests(self, stored: Iterable[StoredLeaf]) -> dict[int, str]:  # noqa: ARG002
        """A digest of each pickled leaf, by number, computed from its pickle's operations; nothing is unpickled."""
        return {}

    def need(self, wanted: Iterable[tuple[int, Box | None]]) -> None:
        """Announce the parts of tensors to read, so that they are located together; None for a whole tensor."""

    @property
    def has_all_names(self) -> bool:
        """True if every name of the checkpoint is known, so that a name that is not found does not exist."""
        return True

    def learn_names(self) -> bool:
        """Open archives until all names are known. Returns True if there may be new names.

        A rank that restores opens only its own archive until a name is missing there. If the result is True, trees and
        numbers obtained before are invalid.
        """
        return False

    # --- bytes ------------------------------------------------------------------------------------------------

    def read(self, extent: Extent) -> bytes:
        """The bytes of a small extent, compared with their digests if the file is verified."""
        data = bytearray(extent.length)
        self.read_into(extent.offset, memoryview(data))
        return bytes(data)

    def read_into(self, offset: int, target: memoryview) -> None:
        """Fill `target`, without verification, on any thread.

        Raises CorruptCheckpointError if the file ends too early, or has been deleted.
        """
        try:
            self._reader.read_into(offset, target)
        except EOFError as error:
            raise self.corrupt(f"truncated: {error}") from error
        except FileNotFoundError as error:  # in a store; a deleted file on a disk can be read to its end
            raise self.corrupt("it was deleted while it was read") from error

    def share(self) -> None:
        """Keep the bytes read from a local file in the page cache, since other processes are about to read them."""
        if isinstance(self._reader, LocalReader):
            self._reader.share()

    @property
    def is_shared(self) -> bool:
        """True if the bytes that are read are kept in the page cache."""
        return isinstance(self._reader, LocalReader) and self._reader.is_shared

    def sources(self, number: int, within: Box | None = None) -> Sequence[Source]:  # noqa: ARG002
        """The places to read a tensor from, each element once; only the box `within` will be read, None for all.

        Raises ValueError if this is the file of one rank with only a part of the tensor.
        """
        tensor = self.index.tensors[number]
        ranks = self.index.ranks
        sources, missing = sources_in(self.pieces(number), tensor.shape)
        if missing:
            savers = "one rank" if ranks is None else f"rank {ranks.rank} of {ranks.world_size} ranks"
            raise ValueError(
                f"{self.path}: it has only what {savers} saved, and not all of {shown(tensor.path)}; load the "
                f"folder of the step, {self.path.rpartition('/')[0] or '.'}, or select= the names that are whole in "
                "this file"
            )
        return sources

    def writers(self, number: int) -> Collection[int]:  # noqa: ARG002
        """The ranks that wrote parts of a tensor, ascending; empty if this is not the file of a rank."""
        return () if self.index.ranks is None else (self.index.ranks.rank,)

    def content(self, number: int) -> bytes:
        """The bytes of a small tensor, compared with their digests if its files are verified."""
        tensor = self.index.tensors[number]
        sources = self.sources(number)  # before any memory is allocated
        item_bytes = DTYPES[tensor.dtype][0]
        content = bytearray(math.prod(tensor.shape) * item_bytes)
        for file, piece, box in sources:
            file.check_members([piece.member])
            for strided in strided_copies(box, piece.box, Box.whole(tensor.shape), item_bytes):
                for run in strided.apart():
                    data = file.read(Extent(piece.extent.offset + run.source, run.length))
                    content[run.target : run.target + run.length] = data
        return bytes(content)

    @property
    def is_local_file(self) -> bool:
        """Whether `map` works: the file is on this machine, and not compressed."""
        return isinstance(self._reader, LocalReader)

    def map(self) -> mmap_module.mmap:
        """A map of the opened file, even if its path now refers to another file. Writes are private to this process."""
        if not isinstance(self._reader, LocalReader):
            raise ValueError(
                f"mmap=True maps a local file as it is, but {self.path} is remote, compressed or extracted; "
                "leave mmap out"
            )
        mapped = mmap_module.mmap(self._reader._fd, 0, access=mmap_module.ACCESS_COPY)
        if len(mapped) != self._reader.num_bytes:
            raise self.corrupt("its size has changed since it was opened")
        return mapped

    # --- the tree ---------------------------------------------------------------------------------------------

    def tree(
        self, *, select: Select = None, types: Iterable[type] | None = (), groups: Groups = None
    ) -> tuple[Any, list[StoredLeaf]]:
        """The saved structure, with a `StoredLeaf` for each leaf outside of the index, and the list of these leaves.

        With `groups`, only these top-level entries are included. If `types` is None, values of classes that are saved
        by name are instances of `OfClass`.
        """
        try:
            value, stored = decode(self.index.skeleton, types=types, keep=_path_filter(groups, selector(select)))
            self._check_stored(stored)
        except ValueError as error:
            raise self._unreadable(error) from error
        if (select is not None or groups is not None) and value is None:
            raise KeyError(f"select={select!r} matches nothing in {self.path}; it holds {self.names()}")
        return value, stored

    def entries(self) -> list[Any] | None:
        """The keys at the top level; None if the state is not a dict."""
        try:
            return top_keys(self.index.skeleton)
        except ValueError as error:
            raise self._unreadable(error) from error

    def names(self) -> str:
        """The names at the top level, as text for a message."""
        keys = self.entries()
        names = {t.path[0] for t in self.index.tensors if t.path} if keys is None else keys
        return ", ".join(sorted(shown((name,)) for name in names)) or "no named tensors"

    def nested_too_deeply(self) -> CorruptCheckpointError:
        return self.corrupt("its structure is nested too deeply")

    def _unreadable(self, error: ValueError) -> CorruptCheckpointError:
        return self.corrupt(f"its skeleton cannot be read ({error})")

    def match(self, chosen: Selector, groups: Groups) -> None:
        """Pass every path of these top-level entries to the selector, which records the patterns that match."""
        try:
            decode(self.index.skeleton, keep=_path_filter(groups, chosen))
        except ValueError as error:
            raise self._unreadable(error) from error

    def _check_stored(self, stored: Iterable[StoredLeaf]) -> None:
        """Raises ValueError unless every leaf has a tensor, and raw bytes belong to a single leaf."""
        leaves = [leaf for leaf in stored if leaf.kind != "object"]
        if any(leaf.number >= len(self.index.tensors) for leaf in leaves):
            raise ValueError("it refers to a tensor that does not exist")
        num_users = Counter(self.primary(leaf.number) for leaf in leaves)
        for leaf in leaves:
            tensor = self.index.tensors[leaf.number]
            # Tied tensors share their memory. Raw bytes are copied for each leaf, so a small file could use any amount.
            if leaf.kind != "tensor" and num_users[self.primary(leaf.number)] > 1:
                raise ValueError(f"{tensor.dotted!r:.200} has several meanings in the checkpoint")
            if (leaf.kind == "bytes" or leaf.descr is not None) and (tensor.dtype, len(tensor.shape)) != ("uint8", 1):
                raise ValueError(f"{tensor.dotted!r:.200} is a tensor, not the bytes of something else")

    def primary(self, number: int) -> int:
        """The number of the tensor that stores the bytes: `number`, or the number of the tensor that it is tied to."""
        alias = self.index.tensors[number].alias_of
        return number if alias is None else alias

    def leaf(self, leaf: StoredLeaf, tensor: torch.Tensor, device: torch.device) -> Any:
        """The value of a stored leaf, given the tensor with its bytes.

        Except for "bytes", the tensor may be filled afterwards.
        """
        if leaf.kind == "tensor":
            return tensor if is_at(tensor, device) else tensor.to(device)
        if leaf.kind == "bytes":
            return bytes(tensor.numpy())
        try:
            return leaf.as_array(tensor)
        except Exception as error:  # the description of the dtype is untrusted
            raise self.corrupt(f"a numpy array in it cannot be built ({error})") from error

    def made(self, saved: InnerTensors, inner: dict[str, Any], *, are_read: bool = True) -> Any:
        """The wrapped tensor built from these inner tensors. Raises ValueError if its class refuses them."""
        if saved.wrapper is None or saved.wrapper.cls is not None:
            return saved.made(inner)
        try:
            tensor = saved.made(inner)
        except ValueError as error:
            raise self.corrupt(str(error)) from error
        if are_read:
            self.check_indices(tensor, saved.path)
        return tensor

    def check_indices(self, tensor: torch.Tensor, path: Path) -> None:
        """Raises CorruptCheckpointError if the indices of a sparse tensor that was read do not fit its size."""
        try:
            check_indices(tensor)
        except RuntimeError as error:
            raise self.corrupt(f"{shown(path)} is not a sparse tensor ({error!s:.200})") from error

    def dtype(self, number: int) -> torch.dtype:
        """The dtype of a tensor. Raises FormatVersionError if this version of torch does not have it."""
        try:
            return dtype_named(self.index.tensors[number].dtype)
        except ValueError as error:
            raise FormatVersionError(f"{self.path}: {error}", path=self.path, version=VERSION) from error

    def empty(self, number: int, device: torch.device) -> torch.Tensor:
        """New memory for a tensor, once all of its elements have been located."""
        self.sources(number)
        indexed = self.index.tensors[number]
        tensor = torch.empty(indexed.shape, dtype=self.dtype(number), device=device)
        if is_host(device) and tensor.nbytes >= BLOCK_BYTES:
            # The kernel would take longer to provide small pages than it takes to fill them.
            advise_huge_pages(tensor.data_ptr(), tensor.nbytes)
        return tensor


def sources_in(
    pieces: Sequence[tuple[Contents, Slice]],
    shape: tuple[int, ...],
    cover_of: Callable[[tuple[int, ...], tuple[Box, ...]], Cover] = cover,
) -> tuple[list[Source], list[Box]]:
    """The places to read a tensor from, each element from the first piece with it, and the boxes that no piece has."""
    if pieces and pieces[0][1].box.sizes == shape:
        return [Source(*pieces[0], Box.whole(shape))], []
    covering = cover_of(shape, tuple(piece.box for _, piece in pieces))
    return [Source(*pieces[i], box) for i, box in covering.taken], covering.missing


class Part(NamedTuple):
    """One file of a state, and the top-level entries to read from it, None for all. `from_committed` creates it."""

    archive: Contents
    groups: Groups = None
    manifest: Manifest | None = None
    """The manifest that names the file; None if there is no manifest."""

    def has_group(self, name: str) -> bool:
        """Whether the top-level entry of this name is read from this file."""
        return name in (self.archive.entries() or ()) if self.groups is None else name in self.groups

    @property
    def keeps_empty(self) -> bool:
        """False if the file was saved through torch.distributed.checkpoint, which leaves out empty dicts."""
        return self.archive.keeps_empty and (self.manifest is None or DCP_RECORD not in self.manifest.record)


def _path_filter(groups: Groups, chosen: Selector | None) -> Callable[[Path], bool] | None:
    """A filter for paths that are selected and in one of these top-level entries."""
    if groups is None:
        return chosen
    return lambda path: bool(path) and path[0] in groups and (chosen is None or chosen(path))


def load_parts(parts: Sequence[Part], load: Callable[[Part], Any]) -> Any:
    """The state of one or several archives: the first has the step's own groups, the others have borrowed groups.

    Raises KeyError if `load` raises KeyError for all archives.
    """
    if len(parts) == 1:
        return load(parts[0])
    return {key: value for loaded in found_in(parts, load) for key, value in loaded.items()}


def found_in(parts: Sequence[P], use: Callable[[P], T]) -> list[T]:
    """The results of `use`, without those of archives in which nothing was selected. KeyError if these are all."""
    found: list[T] = []
    errors: list[KeyError] = []
    for part in parts:
        try:
            found.append(use(part))
        except KeyError as error:
            errors.append(error)
    if not found:
        raise KeyError("; ".join(error.args[0] for error in errors))
    return found
