"""The seek table at the end of a compressed archive, and the boundaries of frames in a stream.

In: sizes of frames, or their bytes. Out: the bytes of the table, and the sizes back. Knows nothing of: the content of
frames.

The format is zstd's seekable format, version 0.1.0 (https://github.com/facebook/zstd/blob/dev/contrib/seekable_format):
ordinary frames, followed by a skippable frame with the table, which `zstd -d` and `tar --zstd` ignore.
"""

from __future__ import annotations

import struct
from collections.abc import Generator, Sequence
from typing import Final, NamedTuple

_MAGIC: Final = b"\x28\xb5\x2f\xfd"
FOOTER_BYTES: Final = 9
_SKIPPABLE: Final = 0x184D2A5E  # the magic number of seek tables, one of 16 for skippable frames
_SEEKABLE: Final = 0x8F92EAB1
_HEADER: Final = struct.Struct("<II")  # magic, bytes that follow
_ENTRY: Final = struct.Struct("<II")  # compressed and uncompressed bytes
_FOOTER: Final = struct.Struct("<IBI")  # number of frames, descriptor, magic
_MAX_FRAMES: Final = 0x8000000
_CHECKSUMS: Final = 0x80
_RESERVED: Final = 0x7C


def begins(data: bytes | bytearray) -> bool:
    """True if these are the first bytes of a frame, which may be skippable."""
    return data[:4] == _MAGIC or _is_skippable(data[:4])


def _is_skippable(magic: bytes | bytearray) -> bool:
    return len(magic) == 4 and int.from_bytes(magic, "little") & ~0xF == _SKIPPABLE & ~0xF


class ZstdFrame(NamedTuple):
    """The sizes of one frame, in bytes."""

    compressed: int
    uncompressed: int


def dump(frames: Sequence[ZstdFrame]) -> bytes:
    """The table as the last frame of a file. Raises ValueError for more frames than the format allows."""
    if len(frames) > _MAX_FRAMES:
        raise ValueError(f"{len(frames):,} frames; a seek table holds {_MAX_FRAMES:,}")
    entries = b"".join(_ENTRY.pack(*frame) for frame in frames)
    footer = _FOOTER.pack(len(frames), 0, _SEEKABLE)
    return _HEADER.pack(_SKIPPABLE, len(entries) + len(footer)) + entries + footer


def table_bytes(footer: bytes) -> int:
    """The length of a table, read from its last 9 bytes. Raises ValueError if these are not the end of a table."""
    if len(footer) != FOOTER_BYTES:
        raise ValueError("too short for a seek table")
    num_frames, descriptor, magic = _FOOTER.unpack(footer)
    if magic != _SEEKABLE or descriptor & _RESERVED or num_frames > _MAX_FRAMES:
        raise ValueError("no seek table at the end")
    return _HEADER.size + int(num_frames) * _entry_bytes(descriptor) + FOOTER_BYTES


def parse(table: bytes, *, data_bytes: int) -> list[ZstdFrame]:
    """The frames in a table. Raises ValueError unless they fill the `data_bytes` before it."""
    if len(table) < _HEADER.size + FOOTER_BYTES or len(table) != table_bytes(table[-FOOTER_BYTES:]):
        raise ValueError("the seek table is cut off")
    if _HEADER.unpack_from(table) != (_SKIPPABLE, len(table) - _HEADER.size):
        raise ValueError("the seek table does not begin where it should")
    step = _entry_bytes(_FOOTER.unpack(table[-FOOTER_BYTES:])[1])
    frames = [ZstdFrame(*_ENTRY.unpack_from(table, at)) for at in range(_HEADER.size, len(table) - FOOTER_BYTES, step)]
    if sum(frame.compressed for frame in frames) != data_bytes:
        raise ValueError("the seek table does not describe the frames in the file")
    return frames


class Follower:
    """Follows a stream from frame to frame (RFC 8878, section 3), to find out whether it ends with a complete frame.

    A decompressor cannot find out: it decompresses a truncated frame as far as it goes, without an error.
    """

    def __init__(self) -> None:
        self._skip = 0  # bytes to skip next
        self._between = True  # True between two frames, where the stream may end
        self._head = b""  # the bytes received so far of the next field
        self._steps = self._follow()
        self._wanted = next(self._steps)

    @property
    def is_whole(self) -> bool:
        """True if the stream may end here."""
        return self._between and not self._skip and not self._head

    def feed(self, data: bytes) -> None:
        """Take the next bytes. Raises ValueError if something other than a frame follows a frame."""
        at = 0
        while at < len(data):
            skipped = min(self._skip, len(data) - at)
            self._skip, at = self._skip - skipped, at + skipped
            more = data[at : at + self._wanted - len(self._head)]
            self._head, at = self._head + more, at + len(more)
            if len(self._head) == self._wanted:
                head, self._head = self._head, b""
                self._wanted = self._steps.send(head)

    def _follow(self) -> Generator[int, bytes, None]:
        """Yield the size of the next field to read, which comes after the `_skip` bytes. Receives its bytes."""
        while True:
            self._between = True
            magic = yield 4
            self._between = False
            if _is_skippable(magic):
                self._skip = int.from_bytes((yield 4), "little")
            elif magic == _MAGIC:
                yield from self._follow_frame()
            else:
                raise ValueError("a frame is followed by bytes that are not a frame")

    def _follow_frame(self) -> Generator[int, bytes, None]:
        descriptor = (yield 1)[0]
        # A frame with a single segment has no window byte, and at least one byte for the size.
        in_one = descriptor >> 5 & 1
        self._skip = (1 - in_one) + (0, 1, 2, 4)[descriptor & 3] + (in_one, 2, 4, 8)[descriptor >> 6]
        last = 0
        while not last:
            head = int.from_bytes((yield 3), "little")
            last, is_one_byte_repeated = head & 1, head >> 1 & 3 == 1
            self._skip = 1 if is_one_byte_repeated else head >> 3
        if descriptor & 4:
            self._skip += 4  # a checksum


def _entry_bytes(descriptor: int) -> int:
    """The size of an entry in bytes. Other writers may add a checksum to each."""
    return _ENTRY.size + (4 if descriptor & _CHECKSUMS else 0)
