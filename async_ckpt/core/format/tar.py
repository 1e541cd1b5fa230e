"""Tar members, as GNU tar, bsdtar and Python's `tarfile` read them.

In: names and sizes. Out: header blocks and padding. Knows nothing of: the content of members.
The header is POSIX.1-1988 ustar. A size of 8 GiB or more is written in base-256, a GNU extension that all three readers
know (https://www.gnu.org/software/tar/manual/html_node/Standard.html).
"""

from __future__ import annotations

from typing import Final

BLOCK: Final = 512
# The end of an archive is two zero blocks.
END_BYTES: Final = 2 * BLOCK
MAX_NAME_BYTES: Final = 100
# Eleven octal digits and a terminator fit the size field.
_OCTAL_LIMIT: Final = 8**11


def padding_after(payload_bytes: int) -> int:
    """Zero bytes that a member needs to end on a block boundary."""
    return -payload_bytes % BLOCK


def header(name: str, payload_bytes: int, *, mtime: int, mode: int = 0o644) -> bytes:
    """The 512-byte header of one regular file with owner root; `mtime` in whole seconds.

    Raises ValueError for a name that is not ASCII or is longer than 100 bytes. The layout makes no such names.
    """
    raw_name = name.encode("ascii")
    if len(raw_name) > MAX_NAME_BYTES:
        raise ValueError(f"member name too long for ustar: {name!r}")
    size = b"%011o\x00" % payload_bytes if payload_bytes < _OCTAL_LIMIT else b"\x80" + payload_bytes.to_bytes(11, "big")
    block = bytearray(BLOCK)
    block[0 : len(raw_name)] = raw_name
    block[100:108] = b"%07o\0" % mode
    block[108:116] = b"0000000\0"
    block[116:124] = b"0000000\0"
    block[124:136] = size
    block[136:148] = b"%011o\0" % max(0, mtime)
    block[148:156] = b" " * 8  # the checksum counts itself as spaces
    block[156:157] = b"0"
    block[257:265] = b"ustar\00000"
    block[265:269] = b"root"
    block[297:301] = b"root"
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


def parse_header(block: bytes) -> tuple[str, int]:
    """The name and payload size in a header.

    Raises ValueError unless it is the header of a regular file with a correct checksum.
    """
    if len(block) != BLOCK:
        raise ValueError("a tar header is 512 bytes")
    if block[257:262] != b"ustar":
        raise ValueError("not a tar header")
    if not has_checksum(block):
        raise ValueError("tar header checksum differs")
    if block[156:157] not in (b"0", b"\0"):
        raise ValueError("not a regular file")
    size = block[124:136]
    payload_bytes = int.from_bytes(size[1:], "big") if size[0] == 0x80 else int(size.strip(b" \0"), 8)
    return block[:100].rstrip(b"\0").decode("ascii"), payload_bytes


def has_checksum(block: bytes) -> bool:
    """True if the checksum of a header of any tar format is correct. Raises ValueError if it is not octal."""
    stored = int(block[148:156].strip(b" \0") or b"-1", 8)
    return stored == sum(block) - sum(block[148:156]) + 8 * ord(" ")
