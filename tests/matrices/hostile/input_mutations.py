"""Hostile inputs from sound ones: trees of JSON, pickles, tars and words are changed by their parts, and bytes by the byte.

In: an input and a source of chance. Out: another input. Knows nothing of: what reads it.
"""

import json
import pickletools
import random
import struct
from collections.abc import Callable
from typing import Any

from fuzz_versions import ODD, _places, mutated

from .hostile_target import AS_IS, Form

_BYTES = [
    b"\0",
    b"\xff",
    b"\x80",
    b'"',
    b"{",
    b"}",
    b"[",
    b"]",
    b"../",
    b"/",
    b"\n",
    b"-1",
    b"9" * 20,
    b"\xff" * 8,
    b"1e999",
    b"\\ud800",
    b"[" * 2000,
    b'{"a":' * 600,
]
# Numbers at which the library draws a line: of ranks, dimensions, versions, bytes.
_NUMBERS = [
    0,
    1,
    -1,
    63,
    64,
    65,
    2**16,
    2**20,
    2**24 - 1,
    2**24,
    2**31,
    2**40,
    2**62,
    2**63 - 1,
    2**63,
    10**18 - 1,
    10**18,
    10**400,
    0.5,
]
_WORDS = ["--", "-", "--json", "--help", "--all", "--select", "--deadline", "nan", "-1", "", "\0", "é", "\ud800", "a=b", "rng=0", "*", "[", "s3://", "s3://b/k",
          "file:///x", "memory://a::b", "http://[", "gs://u:p@h/x?y#z", "~", "~nobody", "x" * 300, "/", "//", "..", "\\\\h\\s", "%00", "C:\\x", "1" * 400, "{:08d}", "step_{}", "acc:max:3"]  # fmt: skip
_NAMES = [
    b"../x",
    b"/etc/passwd",
    b"a/../../b",
    b"../../../../x",
    b"",
    b".",
    b"..",
    b"x" * 100,
    b"a\\b",
    b"\xff\xfe",
    b"CON",
    b"a//b",
    b"./a",
    b"a/",
    b"link/x",
    b"link",
]
_OPCODES = [b"(", b".", b"0", b"1", b"2", b"N", b"}", b"]", b")", b"\x85", b"\x86", b"\x87", b"t", b"l", b"d", b"s", b"u", b"a", b"e", b"R", b"b", b"Q",
            b"\x81", b"\x88", b"\x89", b"q\0", b"h\0", b"h\1", b"cos\nsystem\n", b"cbuiltins\neval\n", b"c_codecs\nencode\n", b"ccollections\nOrderedDict\n",
            b"X\2\0\0\0hi", b"K\1", b"M\xff\xff", b"J\xff\xff\xff\x7f", b"\x8a\4\0\0\0\x7f", b"c__main__\nx\n", b"ctorch\nSize\n", b"cbuiltins\nset\n", b"cbuiltins\nbytearray\n"]  # fmt: skip


def changed(
    data: bytes, draw: random.Random, form: Form, max_bytes: int, by_byte: Callable[[bytes, int], bytes] | None = None
) -> bytes:
    """Another input. `by_byte` is the changer of bytes that an engine brings, which knows what inputs have met before."""
    raw = data.startswith(AS_IS)
    body = data[1:] if raw else data
    if raw != (draw.random() < (0.02 if not raw else 0.9)):
        raw = not raw
    way = _WAYS.get(form)
    if way is not None and draw.random() < 0.85:
        for _ in range(draw.choice([1, 1, 1, 2, 4])):
            body = way(draw, body)
    elif by_byte is not None:
        body = by_byte(body, max_bytes)
    else:
        body = _bytes(draw, body)
    return ((AS_IS if raw else b"") + body)[:max_bytes]


def _bytes(draw: random.Random, data: bytes) -> bytes:
    at = draw.randrange(len(data) + 1)
    how = draw.randrange(6)
    if how == 0:
        return data[:at] + draw.choice(_BYTES) + data[at:]
    if how == 1:
        return data[:at] + data[at + draw.choice([1, 1, 2, 8, 64]) :]
    if how == 2 and data:
        at = min(at, len(data) - 1)
        return data[:at] + bytes([data[at] ^ 1 << draw.randrange(8)]) + data[at + 1 :]
    if how == 3:
        piece = data[at : at + draw.choice([1, 4, 16, 64])]
        other = draw.randrange(len(data) + 1)
        return data[:other] + piece + data[other:]
    if how == 4:
        number = draw.choice([0, 1, 127, 255, 2**31 - 1, 2**32 - 1, 2**63 - 1, 2**64 - 1]).to_bytes(
            8, draw.choice(["little", "big"])
        )
        return data[:at] + number[: draw.choice([1, 4, 8])] + data[at + 8 :]
    return data[:at]


def _json(draw: random.Random, data: bytes) -> bytes:
    data, mark, rest = data.partition(b"\0\n")
    try:
        told = json.loads(data)
    except (ValueError, RecursionError):
        return _bytes(draw, data) + mark + rest
    if draw.random() < 0.05:
        told = draw.choice(ODD)
    else:
        try:
            if draw.random() < 0.3:
                _number(draw, told)
            else:
                mutated(draw, told)
        except (IndexError, KeyError, RecursionError, ValueError):
            return data + mark + rest
    try:
        return json.dumps(told, indent=draw.choice([None, None, 1])).encode() + mark + rest
    except ValueError:  # a number of more digits than Python writes
        return data + mark + rest


def _number(draw: random.Random, told: Any) -> None:
    """Change one number of a tree of JSON, or of the JSON in one of its texts."""
    places = [(holder, key) for holder, key in _places(told) if isinstance(holder[key], int | float | str)]
    holder, key = draw.choice(places)
    value = holder[key]
    if not isinstance(value, str):
        holder[key] = draw.choice(_NUMBERS)
    elif value[:1] in ("[", "{"):
        holder[key] = _lines(draw, value.encode(errors="surrogatepass")).decode(errors="replace")


def _lines(draw: random.Random, data: bytes) -> bytes:
    lines = data.split(b"\n")
    at = draw.randrange(len(lines))
    how = draw.randrange(4)
    if how == 0:
        lines.insert(at, draw.choice(lines))
    elif how == 1:
        del lines[at]
    else:
        lines[at] = _json(draw, lines[at])
    return b"\n".join(lines)


def _pickle(draw: random.Random, data: bytes) -> bytes:
    parts: list[bytes] = []
    try:
        places = [at for _, _, at in pickletools.genops(data) if at is not None]
    except Exception:
        return _bytes(draw, data)
    parts = [data[begin:end] for begin, end in zip(places, [*places[1:], len(data)], strict=True)]
    at = draw.randrange(len(parts) + 1)
    how = draw.randrange(5)
    if how == 0:
        parts.insert(at, draw.choice(_OPCODES))
    elif how == 1:
        del parts[at : at + draw.choice([1, 1, 2, 5])]
    elif how == 2:
        parts.insert(at, draw.choice(parts) if parts else b".")
    elif how == 3 and at < len(parts):
        parts[at] = draw.choice(_OPCODES)
    elif at < len(parts):
        parts[at] = _bytes(draw, parts[at])
    return b"".join(parts)


def _tar(draw: random.Random, data: bytes) -> bytes:
    blocks = [bytearray(data[at : at + 512]) for at in range(0, len(data), 512)] or [bytearray(512)]
    heads = [block for block in blocks if block[257:262] == b"ustar"] or blocks
    head = draw.choice(heads)
    head.extend(bytes(512 - len(head)))
    how = draw.randrange(8)
    if how in (0, 1):
        where = draw.choice([0, 157, 345])
        name = draw.choice(_NAMES)[:100]
        head[where : where + 100] = name.ljust(100, b"\0")
    elif how == 2:
        head[156:157] = draw.choice(
            [b"0", b"\0", b"1", b"2", b"3", b"4", b"5", b"6", b"7", b"L", b"K", b"x", b"g", b"S", b"V"]
        )
    elif how == 3:
        head[124:136] = draw.choice(
            [
                b"%011o\0" % draw.choice([0, 1, 511, 512, 513, 8**10]),
                b"\x80" + struct.pack(">3xQ", 2**62),
                b"\xff" * 12,
                b"junk        ",
            ]
        )
    elif how == 4:
        at = draw.choice([100, 108, 116, 136, 329, 337])
        head[at : at + 8] = draw.choice([b"7777777\0", b"\xff" * 8, b"        ", b"-1\0\0\0\0\0\0"])
    elif how == 5:
        blocks.insert(draw.randrange(len(blocks) + 1), bytearray(draw.choice(blocks)))
    elif how == 6:
        del blocks[draw.randrange(len(blocks))]
    else:
        body = draw.choice(blocks)
        body[:40] = draw.choice(
            [
                b"20 path=../../escaped\n",
                b"19 linkpath=/etc/x\n",
                b"22 GNU.sparse.major=1\n",
                b"30 size=99999999999999999999\n",
                b"14 path=a\0b\n",
                b"9" * 300 + b" x=y\n",
            ]
        ).ljust(40, b"\0")[:40]
    return b"".join(bytes(block).ljust(512, b"\0")[:512] for block in blocks)


def _words(draw: random.Random, data: bytes) -> bytes:
    words = data.split(b"\0")
    at = draw.randrange(len(words) + 1)
    how = draw.randrange(4)
    word = draw.choice(_WORDS).encode(errors="surrogatepass")
    if how == 0:
        words.insert(at, word)
    elif how == 1 and at < len(words):
        words[at] = word
    elif how == 2 and at < len(words):
        del words[at]
    else:
        at = min(at, len(words) - 1)
        words[at:at] = [_bytes(draw, words[at])]
    return b"\0".join(words)


_WAYS: dict[Form, Callable[[random.Random, bytes], bytes]] = {
    "json": _json,
    "lines": _lines,
    "pickle": _pickle,
    "tar": _tar,
    "words": _words,
}
