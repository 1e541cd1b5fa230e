"""One opened archive: its index, its digests, and the content of its members.

In: a reader. Out: bytes of tensors and objects, compared with their digests. Knows nothing of: runs, live objects.
"""

from __future__ import annotations

import pickle
import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import cached_property, partial
from typing import Any, Final, TypeVar

from ....errors import CorruptCheckpointError, FormatVersionError, StorageUnavailableError, UntrustedObjectError
from ...format import blocks, digests, index, safetensors, tar
from ...format.index import Member
from ...host.memory import HostBuffer
from ...pickles import saved_objects
from ...pickles.object_digests import object_digests
from ...runs.manifest import Archive
from ...spec import BLOCK_BYTES, KIB, Extent, align_up, some_of, with_article
from ...state.names import shown
from ...state.tree import StoredLeaf, decode
from ...storage.compressed import BlocksInTarReader, DamagedBlocksError, open_sized
from ...storage.interface import Reader
from .contents import Contents
from .copies import Copies

T = TypeVar("T")
# The bytes to read around a header: they include several small members, and only a small part of a large one.
_NEAR_BYTES: Final = 64 * KIB
# The bytes to read first from an archive that is not verified: most indices fit into them.
_BEGIN_BYTES: Final = 256 * KIB


class OpenArchive(Contents):
    """One archive whose index has been read and, with `verify`, compared with its digest.

    The code that opens a file or a step creates it, and closes `reader`. Only `read_into`, `verify` and
    `damaged_blocks` may be called from several threads.

    Args:
        first_block: the first block of the file, if it was already read.
        copies: the same archive at all places that hold it, for blocks that are not sound in this reader's copy.

    Raises CorruptCheckpointError for anything that is not an intact archive of this library, and FormatVersionError for
    an archive of a newer version.
    """

    def __init__(
        self,
        reader: Reader,
        *,
        path: str,
        verify: bool,
        first_block: memoryview | None = None,
        copies: Copies | None = None,
    ) -> None:
        super().__init__(reader, path=path)
        self._copies: Copies | None = None  # set after the index, which is parsed first, has been verified
        self._turned = False  # True if everything is read from `_copies`
        self._digests: bytes | None = None
        # The first blocks, which hold the index and often the first headers.
        self._first_bytes = first_block or first_bytes(
            reader, path=path, at_most=BLOCK_BYTES if verify else _BEGIN_BYTES
        )
        # The last read: headers are close together, and reads from a store have a high latency.
        self._nearby = Extent(0, 0), memoryview(b"")
        self._verified_blocks = self._nearby  # the last read of verified blocks: small tensors are close together, too
        if blocks.begins(self._first_bytes[: blocks.HEAD_BYTES]):  # compressed, but with the size of the archive
            reader = self._reader = BlocksInTarReader(reader, path, bytes(self._first_bytes[: blocks.HEAD_BYTES]))
            self._first_bytes = first_bytes(reader, path=path, at_most=len(self._first_bytes))
        index_text = self._read_head()
        self._head_bytes = tar.BLOCK + len(index_text)
        try:
            self.index = index.parse(index_text, path=path)
        except FormatVersionError:  # a damaged byte may look like a newer version
            self._compare(Extent(0, self._head_bytes))
            raise
        if self.index.file_bytes != reader.num_bytes:
            how = "truncated" if reader.num_bytes < self.index.file_bytes else "something was appended to it"
            raise self.corrupt(f"it has {reader.num_bytes:,} bytes and should have {self.index.file_bytes:,}: {how}")
        if verify:
            self._digests = self._read_digests()
            self.read(Extent(0, self._head_bytes))
        self._headers: dict[int, Extent] = {}  # the headers of checked members, from the tar header on
        self.num_begun = len(self._first_bytes)
        """The number of bytes read while opening: whole blocks, or the whole file. With `verify`, they are verified."""
        self._copies = copies

    @property
    def reader(self) -> Reader:
        """The reader of the archive itself, decompressed."""
        reader: Reader = self._reader
        return reader

    @property
    def digest(self) -> str:
        """The archive's own digest, as its manifest records it."""
        return digests.self_digest(bytes(self._tail[: self.index.digests.data.length]))

    def keep_little(self) -> None:
        """Drop everything except the index from memory, for a reader that opens many archives."""
        self._first_bytes = memoryview(bytes(self._first_bytes[: self._head_bytes]))
        self._verified_blocks = self._nearby

    def read_into(self, offset: int, target: memoryview) -> None:
        """Fill `target`, from memory where opening the archive has read the bytes."""
        self._or_from_copies(partial(self._read_once, offset, target))

    def _read_once(self, offset: int, target: memoryview) -> None:
        here = self._first_bytes[offset : offset + len(target)]
        target[: len(here)] = here
        offset, target = offset + len(here), target[len(here) :]
        if target and self._turned and self._copies is not None:
            self._copies.read_into(offset, target)
        elif target:
            try:
                super().read_into(offset, target)
            except DamagedBlocksError as error:
                if "index" not in vars(self):  # the index is being read, so the tensors are not known
                    raise
                raise self.damage_error(error.blocks) from error

    def _or_from_copies(self, read: Callable[[], T]) -> T:
        """The result of `read`. If this copy fails, `read` is repeated; from then on, reads may use any copy."""
        had_turned = self._turned
        try:
            return read()
        except (CorruptCheckpointError, StorageUnavailableError) as error:
            if self._copies is None or had_turned:
                raise
            self._copies.note(self.path, error)
            self._nearby, self._turned = (Extent(0, 0), memoryview(b"")), True
            if not self.is_verified:
                self._first_bytes = self._first_bytes[:0]
        return read()

    # --- small reads ------------------------------------------------------------------------------------------

    def read(self, extent: Extent) -> bytes:
        if self._digests is None:
            return bytes(self._read_plain(extent))
        wide, data = self._verified_blocks
        if not (wide.offset <= extent.offset and extent.end <= wide.end):
            wide = _aligned(extent, BLOCK_BYTES, self.index.digests.data.offset)
            data = self._read_plain(wide)
            self.verify(wide.offset, data)
            self._verified_blocks = wide, data
        return bytes(data[extent.offset - wide.offset :][: extent.length])

    def _read_near(self, extent: Extent) -> bytes:
        """The bytes of a small extent, not verified. The bytes around it are also read, and kept."""
        wide, data = self._nearby
        if not (wide.offset <= extent.offset and extent.end <= wide.end):
            wide = _aligned(extent, _NEAR_BYTES, self.index.file_bytes)
            data = self._read_plain(wide)
            self._nearby = wide, data
        return bytes(data[extent.offset - wide.offset :][: extent.length])

    @property
    def is_verified(self) -> bool:
        return self._digests is not None

    def verify(self, offset: int, data: memoryview) -> None:
        """Compare whole blocks that begin at `offset` with their digests, and replace damaged ones from other places.

        Bytes after the part covered by digests are ignored.
        """
        blocks = self.damaged_blocks(offset, data)
        if not blocks:
            return
        error = self.damage_error(blocks)
        if self._copies is None:
            raise error
        self._copies.note(self.path, error)
        try:
            for number in blocks:
                begin = number * BLOCK_BYTES - offset
                self._copies.read_into(number * BLOCK_BYTES, data[begin : begin + BLOCK_BYTES])
        except CorruptCheckpointError as nowhere:
            message = f"{error}, and no place has an undamaged copy: {self._copies.troubles}"
            raise CorruptCheckpointError(message, path=self.path, tensors=error.tensors) from nowhere

    def damaged_blocks(self, offset: int, data: memoryview) -> list[int]:
        """The numbers of the blocks that do not match their digests. The arguments are the same as for `verify`."""
        if self._digests is None:
            return []
        return digests.damaged_blocks(offset, data[: self.index.digests.data.offset - offset], self._digests)

    def damage_error(self, blocks: Sequence[int]) -> CorruptCheckpointError:
        """The error for damaged blocks, given in ascending order. It names the tensors in the blocks."""
        begins = [number * BLOCK_BYTES for number in blocks]
        if len(blocks) == 1:
            mismatch = f"block {blocks[0]} (from byte {begins[0]:,}) does not match its digest"
        else:
            mismatch = f"{len(blocks):,} blocks (the first from byte {begins[0]:,}) do not match their digests"
        if begins[0] < self._head_bytes:  # then the names in the index cannot be trusted
            return self.corrupt(f"{mismatch}; the index is in it")
        inside = [member.name for member in self.index.members if _touches(member.data, blocks)]
        tensors = tuple(
            shown(tensor.path)
            for tensor in self.index.tensors
            if any(_touches(piece.extent, blocks) for piece in tensor.slices)
        )
        among = f" with {some_of(tensors, 5)}" if tensors else ""
        error = self.corrupt(f"{mismatch}; damaged: {', '.join(inside)}{among}")
        error.tensors = tensors
        return error

    def _compare(self, extent: Extent) -> None:
        """Compare the blocks of an extent with their digests, even if the archive is not verified.

        An error for another reason may only be raised if the bytes are intact. The digests are located without the
        index, which may itself be damaged.
        """
        covered_bytes, expected = self._find_digests()
        wide = _aligned(extent, BLOCK_BYTES, covered_bytes)
        if blocks := digests.damaged_blocks(wide.offset, self._read_plain(wide), expected):
            raise self.corrupt(f"block {blocks[0]} does not match its digest")

    def _find_digests(self) -> tuple[int, bytes]:
        """The number of bytes that the digests cover, and the digests."""
        num_bytes = self._reader.num_bytes
        extents = [member.data for member in index.places_of_digests(num_bytes)]
        begin = extents[0].offset if extents else num_bytes
        tail = bytes(self._read_plain(Extent(begin, num_bytes - begin)))
        for extent in extents:
            with suppress(ValueError):
                data = tail[extent.offset - begin :][: extent.length]
                return extent.offset, digests.parse(data, covered_bytes=extent.offset)
        raise self.corrupt("its digests are missing: it is damaged or truncated")

    def _read_plain(self, extent: Extent) -> memoryview:
        if extent.end <= len(self._first_bytes):
            return self._first_bytes[extent.offset : extent.end]
        data = memoryview(bytearray(extent.length))
        self.read_into(extent.offset, data)
        return data

    def _read_head(self) -> bytes:
        """The text of the index, not verified yet."""
        header = bytes(self._first_bytes[: tar.BLOCK])
        try:
            name, length = tar.parse_header(header)
        except ValueError as error:
            raise self._no_archive() from error
        if name != index.MEMBER:
            raise self._no_archive()
        end = tar.BLOCK + length
        if end > self._reader.num_bytes:
            raise self.corrupt("truncated inside its index")
        if end > len(self._first_bytes):
            begun = len(self._first_bytes)
            limit = min(align_up(end, BLOCK_BYTES), self._reader.num_bytes)
            rest = self._read_plain(Extent(begun, limit - begun))
            self._first_bytes = memoryview(bytearray().join((self._first_bytes, rest)))
        return bytes(self._first_bytes[tar.BLOCK : end])

    def _no_archive(self) -> CorruptCheckpointError:
        why = "not an async_ckpt archive" if self._first_bytes else "the file is empty"
        return CorruptCheckpointError(f"{self.path}: {why}, or its first bytes are damaged", path=self.path)

    @cached_property
    def _tail(self) -> memoryview:
        """The text of the digests and the padding after it."""
        begin = self.index.digests.data.offset
        return self._read_plain(Extent(begin, self.index.file_bytes - begin))

    def _read_digests(self) -> bytes:
        member = self.index.digests
        if any(self._tail[member.data.length :]):
            raise self.corrupt("the end of the archive is damaged")
        try:
            return digests.parse(bytes(self._tail[: member.data.length]), covered_bytes=member.data.offset)
        except ValueError as error:
            raise self.corrupt(str(error)) from error

    def check_members(self, members: Iterable[int]) -> None:
        """Compare the tar and safetensors headers of these members with the index before their data is read.

        The blocks of the headers are compared with their digests later, together with the data after them.
        """
        for number in sorted(set(members) - self._headers.keys()):
            self._headers[number] = self._or_from_copies(partial(self._check_member, number))

    def _check_member(self, number: int) -> Extent:
        data = self.check_tar_header(self.index.members[number])
        length = int.from_bytes(self._read_near(Extent(data.offset, min(8, data.length))), "little")
        fits = length <= safetensors.MAX_HEADER_BYTES and 8 + length <= data.length
        header = Extent(data.offset, 8 + length if fits else min(8, data.length))
        index.check_member_header(self.index, number, self._read_near(header), path=self.path)
        return Extent(data.offset - tar.BLOCK, tar.BLOCK + header.length)

    def headers(self, members: Iterable[int]) -> list[Extent]:
        return [self._headers[member] for member in sorted(members) if member in self._headers and self._digests]

    def check_tar_header(self, member: Member) -> Extent:
        """The extent of a member's data, which its tar header must confirm."""
        try:
            header = tar.parse_header(self._read_near(Extent(member.data.offset - tar.BLOCK, tar.BLOCK)))
        except ValueError as error:
            raise self.corrupt(f"{member.name} is not where the index says ({error})") from error
        if header != (member.name, member.data.length):
            raise self.corrupt(f"index and tar disagree about {member.name}")
        return member.data

    def objects(self, stored: Iterable[StoredLeaf], *, trust: bool) -> list[Any]:
        wanted = [leaf for leaf in stored if leaf.kind == "object"]
        if not wanted:
            return []
        data = self._pickled_objects()
        try:
            loaded = saved_objects.load(data, trust=trust)
        except pickle.UnpicklingError as error:
            raise self._untrusted_error(wanted, data, str(error)) from error
        except (ImportError, AttributeError) as error:
            if trust:
                raise saved_objects.missing_class(self.path, error) from error
            raise self.corrupt(f"{index.OBJECTS} cannot be loaded: {error!r}") from error
        except Exception as error:
            raise self.corrupt(f"{index.OBJECTS} cannot be loaded: {error!r}") from error
        if not isinstance(loaded, list) or max(leaf.number for leaf in wanted) >= len(loaded):
            raise self.corrupt(f"{index.OBJECTS} lacks an object")
        return loaded

    def _untrusted_error(self, wanted: Sequence[StoredLeaf], data: bytes, refusal: str) -> UntrustedObjectError:
        """The error for pickled leaves, which are all in one pickle. It names the leaves that need trust."""
        refused = saved_objects.needing_trust(data)
        leaves = [leaf for leaf in wanted if not refused or leaf.number in refused]
        beside = ""
        if not leaves:  # only leaves that were not selected need trust
            beside = f"{_listed(wanted)}: in one pickle with "
            leaves = [
                leaf for leaf in decode(self.index.skeleton)[1] if leaf.kind == "object" and leaf.number in refused
            ]
        match = re.search(r"GLOBAL ([\w.]+)", refusal)
        name = refused[leaves[0].number].removeprefix("builtins.") if refused and leaves else match and match[1]
        what = with_article(name) if name else "an object"
        advice = "" if beside else ", or leave it out with select="
        return UntrustedObjectError(
            f"{self.path}: {beside}{_listed(leaves)}: {what} is a Python object, not plain data; "
            f"if you trust whoever wrote this file, load it with trust=True{advice}",
            path=self.path,
        )

    def object_digests(self, stored: Iterable[StoredLeaf]) -> dict[int, str]:
        wanted = [leaf.number for leaf in stored if leaf.kind == "object"]
        if not wanted:
            return {}
        try:
            digest_of = object_digests(self._pickled_objects())
            return {number: digest_of(number) for number in wanted}
        except (ValueError, LookupError) as error:
            raise self.corrupt(f"{index.OBJECTS} cannot be read: {error!r}") from error

    def _pickled_objects(self) -> bytes:
        member = self.index.member(index.OBJECTS)
        if member is None:
            raise self.corrupt(f"{index.OBJECTS} is missing")
        extent = self._or_from_copies(partial(self.check_tar_header, member))
        return self.read(Extent(extent.offset - tar.BLOCK, tar.BLOCK + extent.length))[tar.BLOCK :]


def open_named(
    reader: Reader, entry: Archive, *, path: str, verify: bool = True, copies: Copies | None = None
) -> OpenArchive:
    """Opens the archive of a manifest entry. Raises CorruptCheckpointError if the file is a different archive."""
    reader = open_sized(reader, path, entry.num_bytes)
    if reader.num_bytes != entry.num_bytes:
        raise CorruptCheckpointError(
            f"{path}: {reader.num_bytes:,} bytes, its manifest says {entry.num_bytes:,}; load an earlier checkpoint",
            path=path,
        )
    archive = OpenArchive(reader, path=path, verify=verify, copies=copies)
    if verify and archive.digest != entry.digest:
        raise archive.corrupt("it is not the archive that its manifest names")
    return archive


def _listed(leaves: Sequence[StoredLeaf]) -> str:
    return some_of([shown(leaf.path) for leaf in leaves], 5)


def first_bytes(reader: Reader, *, path: str, at_most: int = BLOCK_BYTES) -> memoryview:
    """The first `at_most` bytes of a file, or all of it. Raises CorruptCheckpointError if it ends too early."""
    num_bytes = min(reader.num_bytes, at_most)
    # Reads that bypass the page cache need whole pages. Such memory takes longer to allocate than a few bytes.
    data = HostBuffer(num_bytes).view if num_bytes >= BLOCK_BYTES else memoryview(bytearray(num_bytes))
    Contents(reader, path=path).read_into(0, data)
    return data


def _aligned(extent: Extent, granule: int, limit: int) -> Extent:
    begin = extent.offset // granule * granule
    return Extent(begin, max(extent.end, min(align_up(extent.end, granule), limit)) - begin)


def _touches(extent: Extent, blocks: Sequence[int]) -> bool:
    """True if a byte of the extent is in one of these blocks, given in ascending order."""
    at = bisect_left(blocks, extent.offset // BLOCK_BYTES)
    return extent.length > 0 and at < len(blocks) and blocks[at] * BLOCK_BYTES < extent.end
