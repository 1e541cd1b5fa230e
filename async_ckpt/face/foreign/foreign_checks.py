"""Verification of other programs' files, by the checksums and sizes in their formats.

In: a reader of a file of a known kind, or a folder. Out: sentences about what was compared, or an error. Knows nothing
of: archives of this library. Nothing is unpickled or extracted.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Final

from ...core.format import tar, zstd
from ...core.host.threads import run_together
from ...core.loading.archives.contents import Contents
from ...core.storage.interface import Reader, Storage
from ...errors import CorruptCheckpointError, ForeignFileError
from .dcp_checksums import check_item, check_zip
from .dcp_folder import OpenDcp
from .dcp_metadata import Blob
from .foreign_files import NEEDED_BYTES, foreign_file, is_tar_header
from .read_ahead import ReadAhead
from .tar_stream import BUFFER_BYTES, damage_translated, decompressed, members_of

_ZIP: Final = b"PK"
_GZIP: Final = b"\x1f\x8b"
_MAX_READERS: Final = 8


def compare_foreign(reader: Reader, path: str, on_bytes: Callable[[int], None]) -> str:
    """Compare a file of another program with the checksums in its format. Returns a sentence about what was compared.

    A zip, such as torch.save writes, has a CRC-32 of each member, gzip has one of all bytes, and zstd usually has a
    checksum of each frame. A tar has checksums only of its headers. Raises CorruptCheckpointError, and ForeignFileError
    for a format without checksums.
    """
    head = memoryview(bytearray(min(NEEDED_BYTES, reader.num_bytes)))
    reader.read_into(0, head)
    kind, magic = foreign_file(head, path=path), bytes(head[:4])
    name = "" if kind is None else kind.kind
    counted = _Counted(reader, on_bytes)
    if magic.startswith(_ZIP):
        return _compare_zip(counted, path, name)
    if magic.startswith(_GZIP):
        return _compare_tar(counted, path, "the CRC-32 of gzip")
    if zstd.begins(magic):
        return _compare_tar(counted, path, "the checksums of zstd, where its frames have them")
    if name == "tar":
        return _compare_tar(counted, path, None)
    raise _no_checksums(path, name, f"this is {kind}")


def compare_dcp(storage: Storage, on_bytes: Callable[[int], None]) -> tuple[set[str], int, list[str]]:
    """Compare a checkpoint of torch.distributed.checkpoint with the checksums of its items. Returns its files, the
    number of compared bytes, and notes about the comparison.

    Raises CorruptCheckpointError, which names the damaged tensors and values, and ValueError if no item has a checksum.
    """
    damaged: dict[str, str] = {}
    unchecked: list[str] = []  # a name for each item

    def compare(name: str, file: Contents, blob: Blob) -> None:
        has_checksums, damage = check_item(file.read_into, blob)
        if damage is not None:
            damaged.setdefault(name, f"{file.path}: at byte {blob.offset:,}: {damage}")
        if not has_checksums:
            unchecked.append(name)
        on_bytes(blob.length)

    path = storage.locate("")
    with contextlib.ExitStack() as stack:
        items = [*OpenDcp(storage, stack, verify=False).items()]
        run_together("verify", [partial(compare, *item) for item in items], max_threads=_MAX_READERS)
    if damaged:
        names = tuple(sorted(damaged))
        first = damaged[names[0]]
        raise CorruptCheckpointError(
            f"{path}: {len(names)} of its entries are damaged, such as {names[0]}: {first}; fetch it again",
            path=path,
            tensors=names,
        )
    if unchecked and len(unchecked) == len(items):
        raise ValueError(
            f"{path} was saved without checksums (torch.serialization.set_crc32_options(False)), so there is nothing "
            "to compare its bytes with"
        )
    notes = ["torch.distributed.checkpoint wrote it: its bytes were compared with the CRC-32 of torch.save"]
    if unchecked:
        notes.append(f"{len({*unchecked})} of its entries have no checksums, such as {min(unchecked)}")
    return {file.path for _, file, _ in items}, sum(blob.length for _, _, blob in items), notes


def _no_checksums(path: str, kind: str, why: str) -> ForeignFileError:
    return ForeignFileError(
        f"{path}: this file was not written by async_ckpt, and has no checksums to verify: {why}",
        path=path,
        kind=kind,
    )


def _compare_zip(reader: Reader, path: str, kind: str) -> str:
    check = check_zip(reader)
    if check.damage is not None:
        raise CorruptCheckpointError(f"{path}: {check.damage}; fetch or save it again", path=path)
    if not check.has_checksums:
        raise _no_checksums(path, kind, "torch.serialization.set_crc32_options(False) was set when it was saved")
    by = "torch.save" if kind == "torch" else "another program"
    return f"a file of {by} was checked by the CRC-32 of each of its records"


def _compare_tar(reader: Reader, path: str, checksums: str | None) -> str:
    """Read a file that is compressed, or a tar, or both. `checksums` is a text about those of the compression."""
    with ReadAhead(reader) as raw, damage_translated(path, "it is damaged"):
        content = decompressed(raw, path)
        is_tar = checksums is None or is_tar_header(content.peek(tar.BLOCK)[: tar.BLOCK])
        if is_tar:
            for _ in members_of(content, path):
                pass
        else:
            while content.read(BUFFER_BYTES):
                pass
    if not is_tar:
        return f"a file of another program: its bytes were compared with {checksums}"
    data = f"the data with {checksums}" if checksums else "but not the data, since a tar has no checksums of its data"
    return f"a tar without digests: the headers of its members were compared with their checksums, {data}"


class _Counted(Reader):
    """A reader that reports how much is read. It does not close the reader that it wraps."""

    def __init__(self, reader: Reader, on_bytes: Callable[[int], None]) -> None:
        self._reader, self._on_bytes, self.num_bytes = reader, on_bytes, reader.num_bytes

    def read_into(self, offset: int, target: memoryview) -> None:
        self._reader.read_into(offset, target)
        self._on_bytes(len(target))
