"""Torch's own checksums in a checkpoint of torch.distributed.checkpoint.

In: a file, and the place of an item in it, or pieces of a record as they are read. Out: the damage, if there is any.
Knows nothing of: tensors.

Each item is the output of torch.save: a zip of uncompressed records, each with a CRC-32. zipfile reads whole items in
pieces; nothing is unpickled. A record with the bytes of a tensor is read in any order by several threads, and its
CRC-32 is computed from those of the pieces.
"""

from __future__ import annotations

import functools
import io
import struct
import threading
import zipfile
import zlib
from typing import Final, NamedTuple

from ...core.pickles.saved_objects import ignore_missing_checksums
from ...core.spec import MIB, Extent
from ...core.storage.interface import Reader
from .dcp_metadata import Blob, ZipRecord
from .virtual_files import JoinedFile, RangeFile, ReadInto

_PIECE_BYTES: Final = MIB
_NOT_A_ZIP: Final = (
    zipfile.BadZipFile, EOFError, NotImplementedError, OverflowError, RuntimeError, ValueError, struct.error, zlib.error
)  # fmt: skip


class ItemCheck(NamedTuple):
    """True if an item has checksums, and a text about its damage, or None if all records match their checksums."""

    has_checksums: bool
    damage: str | None


def check_item(read_into: ReadInto, blob: Blob) -> ItemCheck:
    """Compare an item with its checksums."""
    file = RangeFile(read_into, blob.length, begin=blob.offset)
    try:
        with zipfile.ZipFile(io.BufferedReader(file, _PIECE_BYTES)) as records:
            infos = records.infolist()
            sizes = sum(info.file_size for info in infos)
            if sizes > blob.length or any(info.compress_type != zipfile.ZIP_STORED for info in infos):
                return ItemCheck(True, "it is not what torch.save writes")
            has_checksums = not ignore_missing_checksums(infos)
            name = next((info.filename for info in infos if not _is_sound(records, info)), None)
            return ItemCheck(has_checksums, None if name is None else f"record {name!a} does not match its checksum")
    except _NOT_A_ZIP as error:
        return ItemCheck(True, f"it is not what torch.save writes ({error})")


def damage_in(item: bytes) -> str | None:
    """The damage to an item in memory; None if it matches its checksums, or has none because it is not a zip."""
    return check_item(JoinedFile((item,)).read_into, Blob("", 0, len(item))).damage if item.startswith(b"PK") else None


def check_zip(reader: Reader) -> ItemCheck:
    """Compare all members of a zip of any program with their checksums."""
    file = RangeFile(reader.read_into, reader.num_bytes)
    try:
        with zipfile.ZipFile(io.BufferedReader(file, _PIECE_BYTES)) as members:
            infos = members.infolist()
            has_checksums = not ignore_missing_checksums(infos)
            wrong = [info.filename for info in infos if not _is_sound(members, info)]
    except _NOT_A_ZIP as error:
        return ItemCheck(True, f"it is cut off, or its list of members is damaged ({error})")
    if not wrong:
        return ItemCheck(has_checksums, None)
    more = f" and {len(wrong) - 1} more do not match their checksums" if wrong[1:] else " does not match its checksum"
    return ItemCheck(has_checksums, f"{wrong[0]!a:.200}{more}")


def _is_sound(records: zipfile.ZipFile, info: zipfile.ZipInfo) -> bool:
    try:
        with records.open(info) as record:
            while record.read(_PIECE_BYTES):
                pass
    except (zipfile.BadZipFile, zlib.error, EOFError):
        return False
    return True


class RecordCheck:
    """The comparison of one record that is read in pieces. Created when the record is located; used by any thread.

    Failed reads may have left pieces of other lengths, but each of these pieces is correct.
    """

    def __init__(self, name: str, record: ZipRecord) -> None:
        """`name` is the name of the tensor in the record."""
        self.name, self.record = name, record
        self.extent = Extent(record.begin, record.num_bytes)
        self.is_done = False  # the whole record was read once, and matched
        self._lock = threading.Lock()
        self._pieces: dict[int, tuple[int, int]] = {}  # ends and checksums by begins, under _lock
        self._num_bytes = 0  # of the pieces, under _lock

    def matches(self, offset: int, data: memoryview) -> bool:
        """Take the bytes of the file that belong to the record. Returns False if they complete the record
        and it does not match its checksum.
        """
        begin, end = max(offset, self.extent.offset), min(offset + len(data), self.extent.end)
        crc = zlib.crc32(data[begin - offset : end - offset])
        with self._lock:
            before, _ = self._pieces.get(begin, (begin, 0))
            self._pieces[begin] = end, crc
            self._num_bytes += end - before
            if self._num_bytes < self.extent.length or (whole := self._whole()) is None:
                return True
            self._pieces, self._num_bytes = {}, 0
        self.is_done = functools.reduce(lambda crc, piece: combined(crc, *piece), whole, 0) == self.record.crc
        return self.is_done

    def _whole(self) -> list[tuple[int, int]] | None:
        """The checksums and lengths of pieces that make up the record; None while pieces are missing. Under _lock."""
        pieces, at = [], self.extent.offset
        while at < self.extent.end:
            if at not in self._pieces:
                return None
            end, crc = self._pieces[at]
            pieces.append((crc, end - at))
            at = end
        return pieces


# The polynomial of zip's CRC-32. The highest bit stands for x^0, the lowest for x^31.
_POLYNOMIAL: Final = 0xEDB88320
_ONE: Final = 1 << 31
_X8: Final = 1 << 23


def combined(crc: int, next_crc: int, num_bytes: int) -> int:
    """The CRC-32 of two byte strings joined, from the CRC-32 of each and the length of the second."""
    return _product(crc, _power_of_x(num_bytes)) ^ next_crc


@functools.lru_cache(maxsize=64)  # nearly all pieces have the same length
def _power_of_x(num_bytes: int) -> int:
    """x^(8 * num_bytes), modulo the polynomial."""
    power, square = _ONE, _X8
    while num_bytes:
        if num_bytes & 1:
            power = _product(power, square)
        square = _product(square, square)
        num_bytes >>= 1
    return power


def _product(a: int, b: int) -> int:
    """The product of two polynomials, modulo that of CRC-32."""
    product = 0
    while a:
        if a & _ONE:
            product ^= b
        a = a << 1 & 0xFFFFFFFF
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return product
