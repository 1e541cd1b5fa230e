"""Torch's own checksums in a checkpoint of torch.distributed.checkpoint.

In: a file, and the place of an item in its file. Out: whether the bytes are sound. Knows nothing of: tensors.

Each item is the output of torch.save: a zip of records that are not compressed, each with a CRC-32. The records are
read by zipfile in pieces, and nothing is unpickled.
"""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from collections.abc import Callable
from typing import Final, NamedTuple, TypeAlias

from ...format.dcp_metadata import Blob
from ...pickles.zip_records import ignore_missing_checksums
from ...spec import MIB

ReadInto: TypeAlias = Callable[[int, memoryview], None]  # fills memory from an offset of a file

_PIECE_BYTES: Final = MIB
_NOT_A_ZIP: Final = (
    zipfile.BadZipFile, EOFError, NotImplementedError, OverflowError, RuntimeError, ValueError, struct.error, zlib.error
)  # fmt: skip


class ItemCheck(NamedTuple):
    """Whether an item has checksums, and the damage to it, in words; None if all of its records match theirs."""

    has_checksums: bool
    damage: str | None


def check_item(read_into: ReadInto, blob: Blob) -> ItemCheck:
    """Compare an item with its checksums."""
    try:
        with zipfile.ZipFile(io.BufferedReader(_ItemFile(read_into, blob), _PIECE_BYTES)) as records:
            infos = records.infolist()
            sizes = sum(info.file_size for info in infos)
            if sizes > blob.length or any(info.compress_type != zipfile.ZIP_STORED for info in infos):
                return ItemCheck(True, "it is not what torch.save writes")
            has_checksums = not ignore_missing_checksums(infos)
            name = next((info.filename for info in infos if not _is_sound(records, info)), None)
            return ItemCheck(has_checksums, None if name is None else f"record {name!a} does not match its checksum")
    except _NOT_A_ZIP as error:
        return ItemCheck(True, f"it is not what torch.save writes ({error})")


def _is_sound(records: zipfile.ZipFile, info: zipfile.ZipInfo) -> bool:
    try:
        with records.open(info) as record:
            while record.read(_PIECE_BYTES):
                pass
    except zipfile.BadZipFile:
        return False
    return True


class _ItemFile(io.RawIOBase):
    """An item as a file of its own."""

    def __init__(self, read_into: ReadInto, blob: Blob) -> None:
        self._read_into, self._blob, self._at = read_into, blob, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        begin = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._blob.length}[whence]
        if begin + offset < 0:
            raise ValueError(f"byte {begin + offset} lies before its begin")
        self._at = begin + offset
        return self._at

    def readinto(self, target: memoryview) -> int:  # type: ignore[override]
        part = memoryview(target).cast("B")[: max(0, self._blob.length - self._at)]
        if part:
            self._read_into(self._blob.offset + self._at, part)
        self._at += len(part)
        return len(part)
