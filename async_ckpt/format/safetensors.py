"""The header of a safetensors file (https://huggingface.co/docs/safetensors, "Format").

In: names, dtypes, shapes, extents. Out: header bytes, and back. Knows nothing of: tensors, the tar around it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from ..spec import DTYPES

# Readers refuse a header above this (MAX_HEADER_SIZE of the reference implementation).
MAX_HEADER_BYTES: Final = 100_000_000
RESERVED_NAME: Final = "__metadata__"


class Entry(NamedTuple):
    """One tensor of a safetensors file; offsets count from the end of the header."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def stored_as(dtype: str, shape: tuple[int, ...]) -> tuple[str, list[int]]:
    """Safetensors' code and shape for a dtype; one that it does not know becomes U8 with a trailing dimension."""
    item_bytes, code = DTYPES[dtype]
    return (code, list(shape)) if code else ("U8", [*shape, item_bytes])


def header(
    entries: Iterable[Entry], metadata: Mapping[str, str], *, header_bytes_modulo: int, at: int
) -> bytes:
    """Length prefix and JSON, padded with spaces so that data begins on a multiple of `header_bytes_modulo`.

    `at` is the file offset of the first byte returned.
    """
    table: dict[str, object] = {RESERVED_NAME: dict(metadata)}
    for entry in entries:
        code, shape = stored_as(entry.dtype, entry.shape)
        table[entry.name] = {"dtype": code, "shape": shape, "data_offsets": [entry.begin, entry.end]}
    text = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(at + 8 + len(text)) % header_bytes_modulo)
    return len(text).to_bytes(8, "little") + text


def parse_header(data: bytes) -> dict[str, tuple[str, list[int], int, int]]:
    """Name -> (code, shape, begin, end), from the length prefix on. Raises ValueError when it does not hold together."""
    length = int.from_bytes(data[:8], "little")
    if length > MAX_HEADER_BYTES or 8 + length > len(data):
        raise ValueError(f"safetensors header of {length} bytes does not fit")
    try:
        table = json.loads(data[8 : 8 + length])
        del table[RESERVED_NAME]
        parsed = {}
        for name, row in table.items():
            begin, end = row["data_offsets"]
            shape = list(row["shape"])
            if not all(type(n) is int and n >= 0 for n in (begin, end, *shape)):
                raise ValueError(f"safetensors header: {name!r:.200} has a number that is no count")
            parsed[name] = (str(row["dtype"]), shape, begin, end)
        return parsed
    except (KeyError, TypeError, RecursionError, AttributeError) as error:
        raise ValueError(f"safetensors header is malformed: {error!r}") from error
