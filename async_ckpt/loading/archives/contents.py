"""The content of a file by name, once its index is known.

In: an index that holds together, and a reader. Out: the tree of names, tensors and leaves for it, bytes as they are.
Knows nothing of: how the index was found, digests, runs of bytes, live objects.
"""

from __future__ import annotations

import math
import mmap as mmap_module
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, ClassVar, Final, NamedTuple, TypeAlias

import torch

from ...backends import is_at, is_host
from ...errors import CorruptCheckpointError, FormatVersionError
from ...format.index import VERSION, Index, Slice
from ...host.memory import advise_huge_pages
from ...runs.manifest import Manifest
from ...slicing.cover import Box, Cover, cover, strided_copies
from ...spec import BLOCK_BYTES, DTYPES, Extent
from ...state.dtypes import dtype_named
from ...state.names import Path, Select, Selector, selector, shown
from ...state.tree import StoredLeaf, decode, top_keys
from ...storage.interface import Reader
from ...storage.local import LocalReader

Groups = Collection[str] | None
CPU: Final = torch.device("cpu")  # said everywhere, because a caller may have set another default


class Source(NamedTuple):
    """Where some of a tensor lies: `box` of it is to be read from this piece of this file."""

    file: Contents
    piece: Slice
    box: Box


class Contents:
    """A file with an index; tensors by number on request. What its bytes are compared with is its kind's to say."""

    index: Index
    # What to do about damage.
    _advice: ClassVar[str] = "load an earlier checkpoint"

    def __init__(self, reader: Reader, *, path: str) -> None:
        self.path = path
        self._reader = reader

    def corrupt(self, why: str) -> CorruptCheckpointError:
        return CorruptCheckpointError(f"{self.path}: {why}; {self._advice}", path=self.path)

    # --- what a kind of file may have -------------------------------------------------------------------------

    @property
    def is_verified(self) -> bool:
        """Whether what is read is compared with digests; then it is read in whole blocks."""
        return False

    def verify(self, offset: int, data: memoryview) -> None:
        """Compare whole blocks that begin at `offset` with their digests. Raises CorruptCheckpointError."""

    def headers(self, members: Iterable[int]) -> list[Extent]:  # noqa: ARG002
        """Where the headers of these members lie, to be verified with what is read of them."""
        return []

    def check_members(self, members: Iterable[int]) -> None:
        """Compare everything else that the file says of these members with its index. Raises CorruptCheckpointError."""

    def check_headers(self) -> None:
        """Compare everything that all files say of their members with their indices. Raises CorruptCheckpointError."""
        for file in self.files:
            file.check_members({piece.member for told in file.index.tensors for piece in told.slices})

    @property
    def files(self) -> Sequence[Contents]:
        """The files that it is in."""
        return (self,)

    def is_of_some(self, path: Path) -> bool:  # noqa: ARG002
        """Whether only some of the ranks that have saved it had this entry."""
        return False

    def is_of_each(self, number: int) -> bool:  # noqa: ARG002
        """Whether it is a tensor that each rank has its own of."""
        return False

    def objects(self, stored: Iterable[StoredLeaf], *, trust: bool) -> list[Any]:  # noqa: ARG002
        """The pickled leaves; none are opened unless one of them is asked for."""
        return []

    def need(self, wanted: Iterable[tuple[int, Box | None]]) -> None:
        """Say what of which tensors is wanted, None for all of one, before any of it is asked for: it may have to be looked for."""

    @property
    def has_all_names(self) -> bool:
        """Whether what it has no name for is not in the checkpoint."""
        return True

    def learn_names(self, *, everything: bool = False) -> bool:  # noqa: ARG002
        """Have all names, before one is said to be missing, or because `everything` is wanted. Returns whether there may be new ones: then trees and numbers that were taken
        before mean nothing any more.
        """
        return False

    # --- bytes ------------------------------------------------------------------------------------------------

    def read(self, extent: Extent) -> bytes:
        """A small extent; verified where the file is."""
        data = bytearray(extent.length)
        self.read_into(extent.offset, memoryview(data))
        return bytes(data)

    def read_into(self, offset: int, target: memoryview) -> None:
        """Fill `target`, not verified; from any thread. Raises CorruptCheckpointError where the file ends too early."""
        try:
            self._reader.read_into(offset, target)
        except EOFError as error:
            raise self.corrupt(f"truncated: {error}") from error

    def share(self) -> None:
        """Other processes of this machine are about to read the same: from the disk it is to come once."""
        if isinstance(self._reader, LocalReader):
            self._reader.share()

    def sources(self, number: int, within: Box | None = None) -> Sequence[Source]:  # noqa: ARG002
        """Where a tensor is to be read from, each element once; nobody wants more of it than `within`, None for all.

        Raises ValueError if this file is one rank's, which has only a part of it.
        """
        told = self.index.tensors[number]
        ranks = self.index.ranks
        pieces = [(self, piece) for piece in told.slices]
        found, missing = sources_in(pieces, told.shape)
        if missing:
            of = "one rank" if ranks is None else f"rank {ranks.rank} of {ranks.world_size} ranks"
            raise ValueError(
                f"{self.path}: it is what {of} has saved, and has not all of {shown(told.path)}; load the folder of the step, "
                f"{self.path.rpartition('/')[0] or '.'}, or with select= only what is whole in this file"
            )
        return found

    def content(self, number: int) -> bytes:
        """The bytes of a small tensor, verified where its files are."""
        told = self.index.tensors[number]
        sources = self.sources(number)  # before any memory is taken
        item_bytes = DTYPES[told.dtype][0]
        found = bytearray(math.prod(told.shape) * item_bytes)
        for file, piece, box in sources:
            file.check_members([piece.member])
            held = Box(piece.offsets, piece.sizes)
            for many in strided_copies(box, held, Box.whole(told.shape), item_bytes):
                for run in many.apart():
                    data = file.read(Extent(piece.extent.offset + run.source, run.length))
                    found[run.target : run.target + run.length] = data
        return bytes(found)

    def map(self) -> mmap_module.mmap:
        """The file that was opened, whatever is at its path by now; writes to it are seen by this process alone."""
        if not isinstance(self._reader, LocalReader):
            raise ValueError(
                f"mmap=True maps a local file as it is, but {self.path} is remote, compressed or extracted; leave mmap out"
            )
        mapped = mmap_module.mmap(self._reader._fd, 0, access=mmap_module.ACCESS_COPY)
        if len(mapped) != self._reader.num_bytes:
            raise self.corrupt("its size has changed since it was opened")
        return mapped

    # --- the tree ---------------------------------------------------------------------------------------------

    def tree(
        self, *, select: Select = None, types: Iterable[type] = (), groups: Groups = None
    ) -> tuple[Any, list[StoredLeaf]]:
        """The saved structure with a `StoredLeaf` for each leaf that is not in the index itself, and a list of these.

        With `groups`, only of these top-level entries.
        """
        try:
            value, stored = decode(self.index.skeleton, types=types, keep=_within(groups, selector(select)))
            self._check_stored(stored)
        except ValueError as error:
            raise self._unreadable(error) from error
        if (select is not None or groups is not None) and value is None:
            raise KeyError(f"select={select!r} matches nothing in {self.path}; it holds {self.names()}")
        return value, stored

    def entries(self) -> list[Any] | None:
        """The keys at the top level; None where the state is not a dict."""
        try:
            return top_keys(self.index.skeleton)
        except ValueError as error:
            raise self._unreadable(error) from error

    def names(self) -> str:
        """The content at the top level, for people."""
        keys = self.entries()
        names = {t.path[0] for t in self.index.tensors if t.path} if keys is None else keys
        return ", ".join(sorted(shown((name,)) for name in names)) or "no named tensors"

    def nested_too_deeply(self) -> CorruptCheckpointError:
        return self.corrupt("its structure is nested too deeply")

    def _unreadable(self, error: ValueError) -> CorruptCheckpointError:
        return self.corrupt(f"its skeleton cannot be read ({error})")

    def match(self, chosen: Selector, groups: Groups) -> None:
        """Show the selector every path of these top-level entries."""
        try:
            decode(self.index.skeleton, keep=_within(groups, chosen))
        except ValueError as error:
            raise self._unreadable(error) from error

    def _check_stored(self, stored: Iterable[StoredLeaf]) -> None:
        """Every leaf has its entry, and one of raw bytes is nothing else. Raises ValueError."""
        leaves = [leaf for leaf in stored if leaf.kind != "object"]
        if any(leaf.number >= len(self.index.tensors) for leaf in leaves):
            raise ValueError("it refers to a tensor that does not exist")
        num_users = Counter(self.primary(leaf.number) for leaf in leaves)
        for leaf in leaves:
            told = self.index.tensors[leaf.number]
            # Tied tensors share their memory. Raw bytes are copied for each leaf, so a small file could ask for any amount.
            if leaf.kind != "tensor" and num_users[self.primary(leaf.number)] > 1:
                raise ValueError(f"{told.dotted!r:.200} is several things at once")
            if (leaf.kind == "bytes" or leaf.descr is not None) and (told.dtype, len(told.shape)) != (
                "uint8",
                1,
            ):
                raise ValueError(f"{told.dotted!r:.200} is a tensor, not the bytes of something else")

    def primary(self, number: int) -> int:
        """The tensor whose bytes these are: itself, or the one that it is tied to."""
        alias = self.index.tensors[number].alias_of
        return number if alias is None else alias

    def leaf(self, leaf: StoredLeaf, tensor: torch.Tensor, device: torch.device) -> Any:
        """The value of a stored leaf, given the tensor with its bytes, which may be filled later; for "bytes", not."""
        if leaf.kind == "tensor":
            return tensor if is_at(tensor, device) else tensor.to(device)
        if leaf.kind == "bytes":
            return bytes(tensor.numpy())
        try:
            return leaf.as_array(tensor)
        except Exception as error:  # the dtype's description may be anybody's
            raise self.corrupt(f"a numpy array in it cannot be built ({error})") from error

    def dtype(self, number: int) -> torch.dtype:
        """Raises FormatVersionError when this torch is too old to have it."""
        try:
            return dtype_named(self.index.tensors[number].dtype)
        except ValueError as error:
            raise FormatVersionError(f"{self.path}: {error}", path=self.path, version=VERSION) from error

    def empty(self, number: int, device: torch.device) -> torch.Tensor:
        """New memory for a tensor of the archive, all of which is there."""
        self.sources(number)
        told = self.index.tensors[number]
        tensor = torch.empty(told.shape, dtype=self.dtype(number), device=device)
        if is_host(device):
            _ask_for_huge_pages(tensor)
        return tensor


# By the shape of a tensor and the boxes that it is in: the layers of a model are alike.
Covers: TypeAlias = dict[tuple[tuple[int, ...], tuple[Box, ...]], Cover]


def sources_in(
    pieces: Sequence[tuple[Contents, Slice]], shape: tuple[int, ...], known: Covers | None = None
) -> tuple[list[Source], list[Box]]:
    """Where to read each element of a tensor, from the first of the pieces that has it; and what none of them has."""
    if pieces and pieces[0][1].sizes == shape:
        return [Source(*pieces[0], Box.whole(shape))], []
    boxes = tuple(Box(piece.offsets, piece.sizes) for _, piece in pieces)
    found = None if known is None else known.get((shape, boxes))
    if found is None:
        found = cover(shape, boxes)
        if known is not None:
            known[shape, boxes] = found
    return [Source(*pieces[i], box) for i, box in found.taken], found.missing


class Part(NamedTuple):
    """One file of those that a state is in, and which of its top-level entries count; None: all that it has."""

    archive: Contents
    groups: Groups = None
    made: Manifest | None = None
    """The manifest that names it, if one does."""


def _ask_for_huge_pages(tensor: torch.Tensor) -> None:
    """Fresh memory is filled once: with small pages the kernel would spend longer giving it than we filling it."""
    num_bytes = tensor.numel() * tensor.element_size()
    if num_bytes >= BLOCK_BYTES:
        advise_huge_pages(tensor.data_ptr(), num_bytes)


def _within(groups: Groups, chosen: Selector | None) -> Callable[[Path], bool] | None:
    """Whether a path is selected, and in one of these top-level entries."""
    if groups is None:
        return chosen
    return lambda path: bool(path) and path[0] in groups and (chosen is None or chosen(path))
