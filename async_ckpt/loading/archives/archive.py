"""One archive, opened: its index, its digests, and what its names stand for.

In: a reader. Out: bytes of tensors and objects, compared with their digests. Knows nothing of: runs, live objects.
"""

from __future__ import annotations

import io
import pickle
import re
from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from types import MappingProxyType
from typing import Any, Final

import torch

from ...errors import CorruptCheckpointError, FormatVersionError, UntrustedObjectError
from ...format import digests, index, safetensors, tar
from ...format.index import Member
from ...pickles import saved_objects
from ...spec import BLOCK_BYTES, KIB, Extent, align_up, with_article
from ...state.names import shown
from ...state.tree import StoredLeaf
from ...storage.interface import Reader
from .contents import Contents

# Around the headers of a member: several small members at once, and little of a large one.
_NEAR_BYTES: Final = 64 * KIB
# Of an archive that is not verified: most indices are in it.
_BEGIN_BYTES: Final = 256 * KIB


class OpenArchive(Contents):
    """One archive, its index read and, with `verify`, checked; tensors by number on request. Not thread-safe.

    Raises CorruptCheckpointError for anything that is not, or no longer, an archive of this library, and
    FormatVersionError for one from a newer version. `begin` is its first block, where it is known already; of the blocks
    `made_up`, some bytes are not those that were saved, so they are not compared. The members `lacking` are not there, and
    whoever wants one gets its error.
    """

    def __init__(
        self,
        reader: Reader,
        *,
        path: str,
        verify: bool,
        begin: memoryview | None = None,
        made_up: Collection[int] = (),
        lacking: Mapping[str, CorruptCheckpointError] = MappingProxyType({}),
    ) -> None:
        super().__init__(reader, path=path)
        self._lacking = lacking
        self._digests: bytes | None = None
        self._made_up = made_up
        # The first blocks, with the index in them; often the first headers too.
        self._begin = begin or first_bytes(reader, path=path, at_most=BLOCK_BYTES if verify else _BEGIN_BYTES)
        # What was read last: headers lie together, and a store is far.
        self._kept = Extent(0, 0), memoryview(b"")
        self._verified = self._kept  # likewise, of blocks: small pieces lie together too
        head = self._read_head()
        self._head_bytes = tar.BLOCK + len(head)
        try:
            self.index = index.parse(head, path=path)
        except FormatVersionError:  # or is it a damaged byte that says so?
            self._compare(Extent(0, self._head_bytes))
            raise
        if self.index.file_bytes != reader.num_bytes:
            raise self.corrupt(
                f"it has {reader.num_bytes:,} bytes and should have {self.index.file_bytes:,}: truncated"
            )
        if verify:
            self._digests = self._read_digests()
            self.read(Extent(0, self._head_bytes))
        self._headers: dict[int, Extent] = {}  # of the members that were checked, from the tar header on
        self.num_begun = len(self._begin)
        """How many bytes were read so far: whole blocks, or all of it. With `verify` they are compared too."""

    @property
    def digest(self) -> str:
        """The archive's own digest, as its manifest records it."""
        return digests.self_digest(bytes(self._tail[: self.index.digests.data.length]))

    def keep_little(self) -> None:
        """Forget what was read beside the index, for one archive of many."""
        self._begin = memoryview(bytes(self._begin[: self._head_bytes]))
        self._verified = self._kept

    def read_into(self, offset: int, target: memoryview) -> None:
        """As far as they were not read already."""
        here = self._begin[offset : offset + len(target)]
        target[: len(here)] = here
        if len(here) < len(target):
            super().read_into(offset + len(here), target[len(here) :])

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

    @property
    def is_verified(self) -> bool:
        return self._digests is not None

    def verify(self, offset: int, data: memoryview) -> None:
        """Compare whole blocks that begin at `offset` with their digests. Bytes behind the covered part are ignored."""
        blocks = self.damaged(offset, data)
        if blocks:
            raise self.damage(blocks)

    def damaged(self, offset: int, data: memoryview) -> list[int]:
        """The numbers of those blocks that do not match their digests; the arguments are as for `verify`."""
        if self._digests is None:
            return []
        blocks = _differing(offset, data[: self.index.digests.data.offset - offset], self._digests)
        return [number for number in blocks if number not in self._made_up]

    def damage(self, blocks: Sequence[int]) -> CorruptCheckpointError:
        """The error for blocks, ascending, that do not match their digests: it names the tensors that lie in them."""
        begins = [number * BLOCK_BYTES for number in blocks]
        if len(blocks) == 1:
            what = f"block {blocks[0]} (from byte {begins[0]:,}) does not match its digest"
        else:
            what = f"{len(blocks):,} blocks (the first from byte {begins[0]:,}) do not match their digests"
        if begins[0] < self._head_bytes:  # what the index says of names is not to be believed then
            return self.corrupt(f"{what}; the index is in it")
        inside = [member.name for member in self.index.members if _touches(member.data, blocks)]
        tensors = tuple(
            shown(told.path)
            for told in self.index.tensors
            if any(_touches(piece.extent, blocks) for piece in told.slices)
        )
        among = ", ".join(tensors[:5]) + (f" and {len(tensors) - 5:,} more" if len(tensors) > 5 else "")
        error = self.corrupt(f"{what}; damaged: {', '.join(inside)}{among and f' with {among}'}")
        error.tensors = tensors
        return error

    def _compare(self, extent: Extent) -> None:
        """Compare the blocks of an extent with their digests, in an archive that is not verified as well.

        For what is about to be refused: only sound bytes may be refused as something else than corrupt. The digests are
        found without the index, which may be what is damaged.
        """
        covered, told = self._find_digests()
        wide = _widened(extent, BLOCK_BYTES, covered)
        if blocks := _differing(wide.offset, self._read_plain(wide), told):
            raise self.corrupt(f"block {blocks[0]} does not match its digest")

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
        self.read_into(extent.offset, data)
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
            raise self.corrupt("truncated inside its index")
        if end > len(self._begin):
            begun = len(self._begin)
            limit = min(align_up(end, BLOCK_BYTES), self._reader.num_bytes)
            rest = self._read_plain(Extent(begun, limit - begun))
            self._begin = memoryview(b"".join((self._begin, rest)))
        return bytes(self._begin[tar.BLOCK : end])

    def _not_ours(self, head: bytes) -> CorruptCheckpointError:
        if self.path.endswith(".distcp"):
            return CorruptCheckpointError(
                f"{self.path}: not an async_ckpt archive: this is a piece of a checkpoint of torch.distributed.checkpoint; "
                "load its folder with that",
                path=self.path,
            )
        for magic, what in (
            (b"PK\x03\x04", "a zip file, as torch.save writes; use torch.load"),
            (b"\x1f\x8b", "gzip"),
            (b"\x28\xb5\x2f\xfd", "zstd"),
        ):
            if head.startswith(magic):
                return CorruptCheckpointError(
                    f"{self.path}: not an async_ckpt archive: this is {what}", path=self.path
                )
        if head[257:262] == b"ustar" and not head.startswith(b"index.json"):
            return CorruptCheckpointError(
                f"{self.path}: not an async_ckpt archive, but another tar; use unpack() or extract()",
                path=self.path,
            )
        what = "not an async_ckpt archive" if head else "the file is empty"
        return CorruptCheckpointError(f"{self.path}: {what}, or its first bytes are damaged", path=self.path)

    @cached_property
    def _tail(self) -> memoryview:
        """The text of the digests, and the padding behind it."""
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
        """Each member's own headers must tell the same story as the index, before anything is read by either.

        That is all that is asked of them; their own blocks are verified with the data behind them.
        """
        for number in sorted(set(members) - self._headers.keys()):
            data = self._check_tar_header(self.index.members[number])
            length = int.from_bytes(self._read_near(Extent(data.offset, min(8, data.length))), "little")
            fits = length <= safetensors.MAX_HEADER_BYTES and 8 + length <= data.length
            header = Extent(data.offset, 8 + length if fits else min(8, data.length))
            index.check_member_header(self.index, number, self._read_near(header), path=self.path)
            self._headers[number] = Extent(data.offset - tar.BLOCK, tar.BLOCK + header.length)

    def headers(self, members: Iterable[int]) -> list[Extent]:
        """Where the headers of these members lie, to be verified with what is read of them."""
        return [
            self._headers[member] for member in sorted(members) if member in self._headers and self._digests
        ]

    def _check_tar_header(self, member: Member) -> Extent:
        """Where the member's data lies, as its tar header says too."""
        if member.name in self._lacking:
            raise self._lacking[member.name]
        try:
            told = tar.parse_header(self._read_near(Extent(member.data.offset - tar.BLOCK, tar.BLOCK)))
        except ValueError as error:
            raise self.corrupt(f"{member.name} is not where the index says ({error})") from error
        if told != (member.name, member.data.length):
            raise self.corrupt(f"index and tar disagree about {member.name}")
        return member.data

    def objects(self, stored: Iterable[StoredLeaf], *, trust: bool) -> list[Any]:
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
                loaded = saved_objects.load(data)
        except pickle.UnpicklingError as error:
            names = [shown(s.path) for s in wanted]
            among = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
            kind = re.search(r"GLOBAL ([\w.]+)", str(error))
            raise UntrustedObjectError(
                f"{self.path}: {among}: {with_article(kind[1]) if kind else 'an object'} is a Python object, not plain data; if you "
                "trust whoever wrote this file, load it with trust=True, or leave it out with select=",
                path=self.path,
            ) from error
        except Exception as error:
            raise self.corrupt(f"{index.OBJECTS} cannot be loaded: {error!r}") from error
        if not isinstance(loaded, list) or max(s.number for s in wanted) >= len(loaded):
            raise self.corrupt(f"{index.OBJECTS} lacks an object")
        return loaded


def first_bytes(reader: Reader, *, path: str, at_most: int = BLOCK_BYTES) -> memoryview:
    """The first block of a file, or all of it. Raises CorruptCheckpointError where it ends too early."""
    data = memoryview(bytearray(min(reader.num_bytes, at_most)))
    try:
        reader.read_into(0, data)
    except EOFError as error:
        raise CorruptCheckpointError(f"{path}: truncated: {error}", path=path) from error
    return data


def _widened(extent: Extent, granule: int, limit: int) -> Extent:
    begin = extent.offset // granule * granule
    return Extent(begin, max(extent.end, min(align_up(extent.end, granule), limit)) - begin)


def _differing(offset: int, data: memoryview, told: bytes) -> list[int]:
    """The numbers of the blocks, of those that begin at `offset`, whose digests are not the told ones. Releases the GIL."""
    found = []
    for begin in range(0, len(data), BLOCK_BYTES):
        number = (offset + begin) // BLOCK_BYTES
        digest = told[number * digests.DIGEST_BYTES :][: digests.DIGEST_BYTES]
        if digests.block_digest(data[begin : begin + BLOCK_BYTES]) != digest:
            found.append(number)
    return found


def _touches(extent: Extent, blocks: Sequence[int]) -> bool:
    """Whether some byte of an extent lies in one of these blocks, given in ascending order."""
    at = bisect_left(blocks, extent.offset // BLOCK_BYTES)
    return extent.length > 0 and at < len(blocks) and blocks[at] * BLOCK_BYTES < extent.end
