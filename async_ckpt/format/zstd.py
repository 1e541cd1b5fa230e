"""The table at the end of a compressed archive that says where each frame begins.

In: sizes of frames. Out: the bytes of the table, and the sizes back. Knows nothing of: what is in the frames.

The zstd seekable format, version 0.1.0 (https://github.com/facebook/zstd/blob/dev/contrib/seekable_format): ordinary
frames, and a skippable one behind them, so `zstd -d` and `tar --zstd` read the file as if the table were not there.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final, NamedTuple

MAGIC: Final = b"\x28\xb5\x2f\xfd"  # of a frame, and so of a file
FOOTER_BYTES: Final = 9
_SKIPPABLE: Final = 0x184D2A5E
_SEEKABLE: Final = 0x8F92EAB1
_HEADER: Final = struct.Struct("<II")  # magic, bytes that follow
_ENTRY: Final = struct.Struct("<II")  # compressed, uncompressed
_FOOTER: Final = struct.Struct("<IBI")  # frames, descriptor, magic
_MAX_FRAMES: Final = 0x8000000
_CHECKSUMS: Final = 0x80
_RESERVED: Final = 0x7C


class Frame(NamedTuple):
    """The sizes of one frame in bytes."""

    compressed: int
    uncompressed: int


def dump(frames: Sequence[Frame]) -> bytes:
    """The table, as the last frame of a file. Raises ValueError for more frames than the format can tell."""
    if len(frames) > _MAX_FRAMES:
        raise ValueError(f"{len(frames):,} frames; a seek table holds {_MAX_FRAMES:,}")
    entries = b"".join(_ENTRY.pack(*frame) for frame in frames)
    footer = _FOOTER.pack(len(frames), 0, _SEEKABLE)
    return _HEADER.pack(_SKIPPABLE, len(entries) + len(footer)) + entries + footer


def table_bytes(footer: bytes) -> int:
    """How long the table is whose last 9 bytes these are. Raises ValueError when there is none."""
    if len(footer) != FOOTER_BYTES:
        raise ValueError("too short for a seek table")
    num_frames, descriptor, magic = _FOOTER.unpack(footer)
    if magic != _SEEKABLE or descriptor & _RESERVED or num_frames > _MAX_FRAMES:
        raise ValueError("no seek table at the end")
    return _HEADER.size + int(num_frames) * _entry_bytes(descriptor) + FOOTER_BYTES


def parse(table: bytes, *, data_bytes: int) -> list[Frame]:
    """The frames that a table tells of, which must fill the `data_bytes` before it. Raises ValueError."""
    if len(table) < _HEADER.size + FOOTER_BYTES or len(table) != table_bytes(table[-FOOTER_BYTES:]):
        raise ValueError("the seek table is cut off")
    if _HEADER.unpack_from(table) != (_SKIPPABLE, len(table) - _HEADER.size):
        raise ValueError("the seek table does not begin where it should")
    step = _entry_bytes(_FOOTER.unpack(table[-FOOTER_BYTES:])[1])
    frames = [
        Frame(*_ENTRY.unpack_from(table, at)) for at in range(_HEADER.size, len(table) - FOOTER_BYTES, step)
    ]
    if sum(frame.compressed for frame in frames) != data_bytes:
        raise ValueError("the seek table tells of other frames than there are")
    return frames


def _entry_bytes(descriptor: int) -> int:
    """Other writers may add a checksum to each entry."""
    return _ENTRY.size + (4 if descriptor & _CHECKSUMS else 0)
