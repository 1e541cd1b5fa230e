"""One archive, opened: its index, its digests, and what its names stand for.

In: a reader. Out: bytes of tensors and objects, compared with their digests. Knows nothing of: runs, live objects.
"""

from __future__ import annotations

import io
import mmap as mmap_module
import pickle
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from typing import Any, Final, NamedTuple

import torch

from ..backends import cuda
from ..errors import CorruptCheckpointError, FormatVersionError, UntrustedObjectError
from ..format import digests, index, safetensors, tar
from ..format.index import Index, Member
from ..host.pool import advise_huge_pages
from ..spec import BLOCK_BYTES, KIB, Extent, align_up
from ..state import pickled
from ..state.dtypes import dtype_named
from ..state.names import Path, Select, Selector, selector, shown
from ..state.tree import Stored, decode, top_keys
from ..storage.base import Reader
from ..storage.local import LocalReader

Groups = Collection[str] | None
# Around the headers of a member: several small members at once, and little of a large one.
_NEAR_BYTES: Final = 64 * KIB
CPU: Final = torch.device("cpu")  # said everywhere, because a caller may have set another default


class OpenArchive:
    """One archive, its index read and, with `verify`, checked; tensors by number on request. Not thread-safe.

    Raises CorruptCheckpointError for anything that is not, or no longer, an archive of this library, and
    FormatVersionError for one from a newer version.
    """

    def __init__(self, reader: Reader, *, path: str, verify: bool) -> None:
        self.path = path
        self._reader = reader
        self._digests: bytes | None = None
        self._begin = memoryview(b"")  # the first block: the index is in it, often the first headers too
        # What was read last: headers lie together, and a store is far.
        self._kept = Extent(0, 0), memoryview(b"")
        self._verified = self._kept  # likewise, of blocks: small pieces lie together too
        self._begin = self._read_plain(Extent(0, min(reader.num_bytes, BLOCK_BYTES)))
        head = self._read_head()
        try:
            self.index: Index = index.parse(head, path=path)
        except FormatVersionError:  # or is it a damaged byte that says so?
            self._compare(Extent(0, tar.BLOCK + len(head)))
            raise
        if self.index.file_bytes != reader.num_bytes:
            raise self.corrupt(
                f"it has {reader.num_bytes:,} bytes and should have {self.index.file_bytes:,}: truncated"
            )
        if verify:
            self._digests = self._read_digests()
            self.read(Extent(0, tar.BLOCK + len(head)))
        self._headers: dict[int, Extent] = {}  # of the members that were checked, from the tar header on

    def corrupt(self, why: str) -> CorruptCheckpointError:
        return CorruptCheckpointError(f"{self.path}: {why}; load an earlier checkpoint", path=self.path)

    @property
    def digest(self) -> str:
        """The archive's own digest, as its manifest records it."""
        return digests.self_digest(bytes(self._read_plain(self.index.digests.data)))

    # --- small reads ------------------------------------------------------------------------------------------

    def read(self, extent: Extent) -> bytes:
        """A small extent, verified where the archive is."""
        if self._digests is None:
            return bytes(self._read_plain(extent))
        wide, data = self._verified
        if not (wide.offset <= extent.offset and extent.end <= wide.end):
            wide = _widened(extent, BLOCK_BYTES, self.index.digests.data.offset)
            data = self._read_plain(wide)
            self.verify(wide.offset, data)
            self._verified = wide, data
        return bytes(data[extent.offset - wide.offset :][: extent.length])

    def _read_near(self, extent: Extent) -> bytes:
        """A small extent, not verified, and what is around it."""
        wide, data = self._kept
        if not (wide.offset <= extent.offset and extent.end <= wide.end):
            wide = _widened(extent, _NEAR_BYTES, self.index.file_bytes)
            data = self._read_plain(wide)
            self._kept = wide, data
        return bytes(data[extent.offset - wide.offset :][: extent.length])

    def verify(self, offset: int, data: memoryview) -> None:
        """Compare whole blocks that begin at `offset` with their digests. Bytes behind the covered part are ignored."""
        if self._digests is not None:
            self._compare_blocks(offset, data[: self.index.digests.data.offset - offset], self._digests)

    def _compare_blocks(self, offset: int, data: memoryview, told: bytes) -> None:
        for begin in range(0, len(data), BLOCK_BYTES):
            number = (offset + begin) // BLOCK_BYTES
            digest = told[number * digests.DIGEST_BYTES :][: digests.DIGEST_BYTES]
            if digests.block_digest(data[begin : begin + BLOCK_BYTES]) != digest:
                raise self.corrupt(
                    f"block {number} (from byte {number * BLOCK_BYTES:,}) does not match its digest"
                )

    def _compare(self, extent: Extent) -> None:
        """Compare the blocks of an extent with their digests, in an archive that is not verified as well.

        For what is about to be refused: only sound bytes may be refused as something else than corrupt. The digests are
        found without the index, which may be what is damaged.
        """
        covered, told = self._find_digests()
        wide = _widened(extent, BLOCK_BYTES, covered)
        self._compare_blocks(wide.offset, self._read_plain(wide), told)

    def _find_digests(self) -> tuple[int, bytes]:
        """How many bytes the digests cover, and the digests."""
        num_bytes = self._reader.num_bytes
        places = [member.data for member in index.places_of_digests(num_bytes)]
        begin = places[0].offset if places else num_bytes
        tail = bytes(self._read_plain(Extent(begin, num_bytes - begin)))
        for place in places:
            with suppress(ValueError):
                data = tail[place.offset - begin :][: place.length]
                return place.offset, digests.parse(data, covered_bytes=place.offset)
        raise self.corrupt("it has no digests where they should be: it is damaged, or cut short")

    def _read_plain(self, extent: Extent) -> memoryview:
        if extent.end <= len(self._begin):
            return self._begin[extent.offset : extent.end]
        data = memoryview(bytearray(extent.length))
        try:
            self._reader.read_into(extent.offset, data)
        except EOFError as error:
            raise self.corrupt(f"truncated: {error}") from error
        return data

    def _read_head(self) -> bytes:
        """The text of the index, not yet believed."""
        header = bytes(self._begin[: tar.BLOCK])
        try:
            name, length = tar.parse_header(header)
        except ValueError as error:
            raise self._not_ours(header) from error
        if name != index.MEMBER:
            raise self._not_ours(header)
        end = tar.BLOCK + length
        if end > self._reader.num_bytes:
            raise self.corrupt("truncated inside of its index")
        begun = self._begin[tar.BLOCK : end]
        rest = Extent(len(self._begin), max(0, end - len(self._begin)))
        return b"".join((begun, self._read_plain(rest)))

    def _not_ours(self, head: bytes) -> CorruptCheckpointError:
        for magic, what in (
            (b"PK\x03\x04", "a zip file, as torch.save writes; use torch.load"),
            (b"\x1f\x8b", "gzip"),
            (b"\x28\xb5\x2f\xfd", "zstd"),
        ):
            if head.startswith(magic):
                return CorruptCheckpointError(
                    f"{self.path}: not an async_ckpt archive: this is {what}", path=self.path
                )
        if int.from_bytes(head[:8], "little") <= safetensors.MAX_HEADER_BYTES and head[8:9] == b"{":
            return CorruptCheckpointError(
                f"{self.path}: not an async_ckpt archive: this is a safetensors file; use safetensors.torch.load_file",
                path=self.path,
            )
        if head[257:262] == b"ustar" and not head.startswith(b"index.json"):
            return CorruptCheckpointError(
                f"{self.path}: not an async_ckpt archive, but another tar; use unpack() or extract()",
                path=self.path,
            )
        what = "not an async_ckpt archive" if head else "the file is empty"
        return CorruptCheckpointError(f"{self.path}: {what}, or its first bytes are damaged", path=self.path)

    def _read_digests(self) -> bytes:
        member = self.index.digests
        tail = self._read_plain(Extent(member.data.offset, self.index.file_bytes - member.data.offset))
        if any(tail[member.data.length :]):
            raise self.corrupt("the end of the archive is damaged")
        try:
            return digests.parse(bytes(tail[: member.data.length]), covered_bytes=member.data.offset)
        except ValueError as error:
            raise self.corrupt(str(error)) from error

    def map(self) -> mmap_module.mmap:
        """The file that was opened, whatever is at its path by now; writes to it are seen by this process alone."""
        if not isinstance(self._reader, LocalReader):
            raise ValueError(
                f"mmap=True maps a local file as it is, and {self.path} is elsewhere or compressed; leave it out"
            )
        mapped = mmap_module.mmap(self._reader._fd, 0, access=mmap_module.ACCESS_COPY)
        if len(mapped) != self._reader.num_bytes:
            raise self.corrupt("its size has changed since it was opened")
        return mapped

    # --- the tree ---------------------------------------------------------------------------------------------

    def tree(
        self, *, select: Select = None, types: Iterable[type] = (), groups: Groups = None
    ) -> tuple[Any, list[Stored]]:
        """The saved structure with a `Stored` for each leaf that is not in the index itself, and a list of these.

        With `groups`, only of these top-level entries.
        """
        try:
            value, stored = decode(self.index.skeleton, types=types, keep=_within(groups, selector(select)))
            self._check_stored(stored)
        except ValueError as error:
            raise self._unreadable(error) from error
        if (select is not None or groups is not None) and value is None:
            raise KeyError(f"select={select!r} matches nothing in {self.path}; it holds {self.names()}")
        self._check_members(stored)
        return value, stored

    def entries(self) -> list[Any] | None:
        """The keys at the top level; None where the state is not a dict."""
        try:
            return top_keys(self.index.skeleton)
        except ValueError as error:
            raise self._unreadable(error) from error

    def names(self) -> str:
        """What it holds at the top level, for people."""
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

    def _check_stored(self, stored: Iterable[Stored]) -> None:
        """Every leaf has its entry, and one of raw bytes is nothing else. Raises ValueError."""
        leaves = [leaf for leaf in stored if leaf.kind != "object"]
        if any(leaf.number >= len(self.index.tensors) for leaf in leaves):
            raise ValueError("it numbers a tensor that is not there")
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

    def _check_members(self, stored: Iterable[Stored]) -> None:
        """Each member's own headers must tell the same story as the index, before anything is read by either.

        That is all that is asked of them; their own blocks are verified with the data behind them.
        """
        for number in self._members(s.number for s in stored if s.kind != "object"):
            if number in self._headers:
                continue
            data = self._check_tar_header(self.index.members[number])
            length = int.from_bytes(self._read_near(Extent(data.offset, min(8, data.length))), "little")
            fits = length <= safetensors.MAX_HEADER_BYTES and 8 + length <= data.length
            header = Extent(data.offset, 8 + length if fits else min(8, data.length))
            index.check_member_header(self.index, number, self._read_near(header), path=self.path)
            self._headers[number] = Extent(data.offset - tar.BLOCK, tar.BLOCK + header.length)

    def headers(self, numbers: Iterable[int]) -> list[Extent]:
        """Where the headers of the members with these tensors lie, to be verified with them."""
        members = self._members(numbers) if self._digests else ()
        return [self._headers[member] for member in members if member in self._headers]

    def _members(self, numbers: Iterable[int]) -> list[int]:
        """The members that hold something of these tensors."""
        return sorted({piece.member for number in numbers for piece in self.index.tensors[number].slices})

    def _check_tar_header(self, member: Member) -> Extent:
        """Where the member's data lies, as its tar header says too."""
        try:
            told = tar.parse_header(self._read_near(Extent(member.data.offset - tar.BLOCK, tar.BLOCK)))
        except ValueError as error:
            raise self.corrupt(f"{member.name} is not where the index says ({error})") from error
        if told != (member.name, member.data.length):
            raise self.corrupt(f"index and tar disagree about {member.name}")
        return member.data

    def primary(self, number: int) -> int:
        """The tensor whose bytes these are: itself, or the one that it is tied to."""
        alias = self.index.tensors[number].alias_of
        return number if alias is None else alias

    def objects(self, stored: Iterable[Stored], *, trust: bool) -> list[Any]:
        """The pickled leaves; none are opened unless one of them is asked for."""
        wanted = [s for s in stored if s.kind == "object"]
        if not wanted:
            return []
        member = self.index.member(index.OBJECTS)
        if member is None:
            raise self.corrupt(f"{index.OBJECTS} is missing")
        extent = self._check_tar_header(member)
        data = self.read(Extent(extent.offset - tar.BLOCK, tar.BLOCK + extent.length))[tar.BLOCK :]
        try:
            if trust:
                loaded = torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)
            else:
                loaded = pickled.load(data)
        except pickle.UnpicklingError as error:
            names = [shown(s.path) for s in wanted]
            among = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
            kind = re.search(r"GLOBAL ([\w.]+)", str(error))
            raise UntrustedObjectError(
                f"{self.path}: {among}: {f'a {kind[1]}' if kind else 'an object'} is a Python object, not plain data; if you "
                "trust whoever wrote this file, load it with trust=True, or leave it out with select=",
                path=self.path,
            ) from error
        except Exception as error:
            raise self.corrupt(f"{index.OBJECTS} cannot be loaded: {error!r}") from error
        if not isinstance(loaded, list) or max(s.number for s in wanted) >= len(loaded):
            raise self.corrupt(f"{index.OBJECTS} lacks an object")
        return loaded

    def leaf(self, leaf: Stored, tensor: torch.Tensor, device: torch.device) -> Any:
        """What a stored leaf is, given the tensor with its bytes, which may be filled later; for "bytes", not."""
        if leaf.kind == "tensor":
            return tensor if cuda.is_at(tensor, device) else tensor.to(device)
        if leaf.kind == "bytes":
            return bytes(tensor.numpy())
        try:
            return leaf.as_array(tensor)
        except Exception as error:  # the dtype's description may be anybody's
            raise self.corrupt(f"a numpy array in it cannot be made ({error})") from error

    def dtype(self, number: int) -> torch.dtype:
        """Raises FormatVersionError when this torch is too old to have it."""
        try:
            return dtype_named(self.index.tensors[number].dtype)
        except ValueError as error:
            raise FormatVersionError(
                f"{self.path}: {error}", path=self.path, version=index.VERSION
            ) from error

    def empty(self, number: int, device: torch.device) -> torch.Tensor:
        """New memory for a tensor of the archive."""
        told = self.index.tensors[number]
        tensor = torch.empty(told.shape, dtype=self.dtype(number), device=device)
        if cuda.is_host(device):
            _ask_for_huge_pages(tensor)
        return tensor


class Part(NamedTuple):
    """One archive of those that a state is in, and which of its top-level entries count; None: all that it has."""

    archive: OpenArchive
    groups: Groups = None


def _ask_for_huge_pages(tensor: torch.Tensor) -> None:
    """Fresh memory is filled once: with small pages the kernel would spend longer giving it than we filling it."""
    num_bytes = tensor.numel() * tensor.element_size()
    if num_bytes >= BLOCK_BYTES:
        advise_huge_pages(tensor.data_ptr(), num_bytes)


def _widened(extent: Extent, granule: int, limit: int) -> Extent:
    begin = extent.offset // granule * granule
    return Extent(begin, max(extent.end, min(align_up(extent.end, granule), limit)) - begin)


def _within(groups: Groups, chosen: Selector | None) -> Callable[[Path], bool] | None:
    """Whether a path is selected, and in one of these top-level entries."""
    if groups is None:
        return chosen
    return lambda path: bool(path) and path[0] in groups and (chosen is None or chosen(path))
