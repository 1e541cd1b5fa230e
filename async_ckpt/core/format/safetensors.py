"""The header of a safetensors file (https://huggingface.co/docs/safetensors, "Format").

In: names, dtypes, shapes, extents. Out: header bytes, and back. Knows nothing of: tensors, the tar around it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from ..spec import DTYPES, NEW_CODES

# Readers refuse larger headers (MAX_HEADER_SIZE of the reference implementation).
MAX_HEADER_BYTES: Final = 100_000_000
RESERVED_NAME: Final = "__metadata__"
_CODES: Final = {name: code for name, (_, code) in DTYPES.items() if code} | NEW_CODES
_DTYPE_OF: Final = {code: name for name, code in _CODES.items()}
_PACKED: Final = "float4_e2m1fn_x2"  # its shape counts pairs in torch, and single items in safetensors
# The names of the files that DCP's writer makes for each rank, and the metadata key for pieces of tensors in them.
_OF_RANK: Final = r"shard-\d{5}-model-\d{5}-of-\d{5}\.safetensors"
_SHARDING: Final = "DCP_SHARDING_INFO"
_NO_TABLE: Final = "its safetensors header is not a table of tensors, each with dtype, shape and data_offsets"
PIECES: Final = (
    "pieces of tensors, as HuggingFaceStorageWriter(save_distributed=True) of torch.distributed.checkpoint writes "
    "them; load their folder with its HuggingFaceStorageReader, or save with enable_consolidation=True"
)


class Entry(NamedTuple):
    """One tensor of a safetensors file; offsets count from the end of the header."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class Row(NamedTuple):
    """The entry of a header for one tensor, with the dtype as a code of safetensors."""

    code: str
    shape: list[int]
    begin: int
    end: int


def stored_as(dtype: str, shape: tuple[int, ...]) -> tuple[str, list[int]]:
    """The code and shape of a tensor in an archive. Dtypes that few readers know are U8 with one more dimension."""
    item_bytes, code = DTYPES[dtype]
    return (code, list(shape)) if code else ("U8", [*shape, item_bytes])


def held_as(dtype: str, shape: Sequence[int]) -> tuple[str, list[int]] | None:
    """The code and shape of a tensor in a safetensors file outside an archive; None if safetensors cannot hold it."""
    code = _CODES.get(dtype)
    if code is None or (dtype == _PACKED and not shape):  # half a byte
        return None
    return code, [*shape[:-1], 2 * shape[-1]] if dtype == _PACKED else list(shape)


def header(
    entries: Iterable[Entry],
    metadata: Mapping[str, str],
    *,
    header_bytes_modulo: int,
    at: int,
    of_model: bool = False,
) -> bytes:
    """Length prefix and JSON, padded with spaces so that data begins on a multiple of `header_bytes_modulo`.

    `at` is the file offset of the first byte returned. With `of_model`, the file is not part of an archive, and may use
    all codes.
    """
    table: dict[str, object] = {RESERVED_NAME: dict(metadata)}
    for entry in entries:
        code, shape = stored_as(entry.dtype, entry.shape)
        if of_model:
            code, shape = held_as(entry.dtype, entry.shape) or (code, shape)
        table[entry.name] = {"dtype": code, "shape": shape, "data_offsets": [entry.begin, entry.end]}
    text = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(at + 8 + len(text)) % header_bytes_modulo)
    return len(text).to_bytes(8, "little") + text


def loaded_as(code: str, shape: list[int]) -> tuple[str, list[int]]:
    """The dtype and shape for an entry of another program's file. Raises ValueError for an unknown code."""
    dtype = _DTYPE_OF.get(code)
    if dtype is None or (dtype == _PACKED and not (shape and shape[-1] % 2 == 0)):
        raise ValueError(f"the dtype {code!r:.50} is not known")
    return dtype, [*shape[:-1], shape[-1] // 2] if dtype == _PACKED else shape


def is_of_rank(path: str) -> bool:
    """True if this is the name of a file with the shards of one of several ranks."""
    return re.fullmatch(_OF_RANK, path.replace("\\", "/").rpartition("/")[2]) is not None


def has_pieces(path: str, metadata: Mapping[str, str]) -> bool:
    """True if tensors of a file are pieces of larger ones. Raises ValueError or TypeError for malformed metadata."""
    if _SHARDING not in metadata:
        return False
    pieces = json.loads(metadata[_SHARDING])
    return is_of_rank(path) or any(any(dict(piece).get("saved_offsets", ())) for piece in dict(pieces).values())


def begins(data: bytes | memoryview) -> bool:
    """True if these may be the first bytes of a safetensors file."""
    return int.from_bytes(data[:8], "little") <= MAX_HEADER_BYTES and data[8:9] == b"{"


def parse_header(data: bytes) -> tuple[dict[str, Row], dict[str, str]]:
    """The header of any safetensors file, from the length prefix on, and its metadata.

    Raises ValueError if it is malformed, or if a name appears twice.
    """
    table = parse_table(data)
    rows = {name: Row(*table.kinds[kind], begin, end) for name, (kind, begin, end) in table.rows.items()}
    return rows, table.metadata


class HeaderTable(NamedTuple):
    """The entries of a header. A row has the number of a kind (code and shape), and the extent (begin, end)."""

    rows: dict[str, tuple[int, int, int]]
    kinds: list[tuple[str, list[int]]]
    metadata: dict[str, str]


def parse_table(data: bytes) -> HeaderTable:
    """Like `parse_header`, but creates few objects for the garbage collector: for hundreds of thousands of tensors."""
    kinds, length = _Kinds(), int.from_bytes(data[:8], "little")
    if length > MAX_HEADER_BYTES or 8 + length > len(data):
        raise ValueError(f"safetensors header of {length} bytes does not fit")
    try:
        table = json.loads(data[8 : 8 + length], object_pairs_hook=kinds.of)
    except (TypeError, RecursionError) as error:
        raise ValueError(_NO_TABLE) from error
    metadata = table.pop(RESERVED_NAME, {}) if isinstance(table, dict) else None
    if not isinstance(metadata, dict) or not all(type(row) is tuple for row in table.values()):
        raise ValueError(_NO_TABLE)
    return HeaderTable(table, kinds.kinds, metadata)


def parse_file_header(data: bytes, file_bytes: int) -> HeaderTable:
    """Like `parse_table`, for a whole file. Raises ValueError also for gaps, and for names that are not UTF-8."""
    table = parse_table(data)
    _refuse_unwritable((*table.rows, *table.metadata, *table.metadata.values()))
    _refuse_gaps(table, file_bytes - len(data))
    return table


def _refuse_unwritable(texts: Iterable[str]) -> None:
    """Raise ValueError for text that UTF-8 cannot encode, such as a lone surrogate, which JSON can express."""
    try:
        "".join(texts).encode()
    except (TypeError, UnicodeEncodeError) as error:
        raise ValueError("safetensors header: not all of its names and metadata are UTF-8 text") from error


def _refuse_gaps(table: HeaderTable, num_bytes: int) -> None:
    """Raise ValueError unless the tensors fill the bytes after the header without gaps, as the format requires."""
    at = 0
    for begin, end in sorted(row[1:] for row in table.rows.values()):
        if begin != at or end < begin:
            raise ValueError("its tensors overlap, or leave bytes between them")
        at = end
    if at > num_bytes:
        raise ValueError(f"it is cut off: its tensors end at {at:,} of {num_bytes:,} bytes")
    if at < num_bytes:
        raise ValueError(f"it has {num_bytes - at:,} bytes after its last tensor")


class _Kinds:
    """Turns JSON objects into rows while a header is parsed, and collects the kinds of tensors."""

    def __init__(self) -> None:
        self.kinds: list[tuple[str, list[int]]] = []
        self._numbers: dict[tuple[str | int, ...], int] = {}

    def of(self, pairs: list[tuple[str, Any]]) -> Any:
        """The row for the entry of a tensor, or a dict for any other object."""
        entry = dict(pairs)
        if len(entry) != len(pairs):
            raise ValueError("safetensors header: a name appears twice")
        offsets, shape, code = entry.get("data_offsets"), entry.get("shape"), entry.get("dtype")
        if type(offsets) is not list or type(shape) is not list or type(code) is not str:
            return entry  # the header as a whole, or its metadata
        if len(offsets) != 2 or not all(type(n) is int and n >= 0 for n in (*offsets, *shape)):
            raise ValueError("safetensors header: a tensor has a number that is not a count")
        kind = self._numbers.setdefault((code, *shape), len(self.kinds))
        if kind == len(self.kinds):
            self.kinds.append((code, shape))
        return kind, *offsets
