"""What several test files share: comparing two states bit for bit, and taking archives apart and putting them together."""

from __future__ import annotations

import contextlib
import json
import math
import struct
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from async_ckpt.format import digests, index, tar
from async_ckpt.runs import manifest
from async_ckpt.spec import BLOCK_BYTES, MIB, PAGE_BYTES, align_up


def states_equal(a: Any, b: Any) -> bool:
    """Whether two states are the same in structure, types, order of keys, and every bit of every value."""
    return difference(a, b) is None


def difference(a: Any, b: Any, path: str = "state") -> str | None:
    """Where two states differ first, for a readable failure: `assert difference(a, b) is None`."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return _tensor_difference(a, b, path)
    if type(a) is not type(b):
        return f"{path}: {type(a).__name__} and {type(b).__name__}"
    if isinstance(a, dict):
        return _dict_difference(a, b, path)
    if isinstance(a, list | tuple):
        if len(a) != len(b):
            return f"{path}: {len(a)} and {len(b)} entries"
        found = (difference(x, y, f"{path}[{i}]") for i, (x, y) in enumerate(zip(a, b, strict=True)))
        return next((f for f in found if f), None)
    if isinstance(a, np.ndarray | np.generic):
        same = a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
        return None if same else f"{path}: {a!r} and {b!r}"
    if isinstance(a, float | complex):
        return None if _bits(a) == _bits(b) else f"{path}: {a!r} and {b!r}"
    return None if a == b else f"{path}: {a!r:.200} and {b!r:.200}"


def _tensor_difference(a: torch.Tensor, b: torch.Tensor, path: str) -> str | None:
    if (a.dtype, a.shape, a.device) != (b.dtype, b.shape, b.device):
        return f"{path}: {a.dtype}{list(a.shape)} on {a.device} and {b.dtype}{list(b.shape)} on {b.device}"
    return None if torch.equal(bits_of(a), bits_of(b)) else f"{path}: the values differ"


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor, in order, as a flat uint8 tensor."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    if not plain.numel():
        return torch.empty(0, dtype=torch.uint8)
    # A contiguous tensor with one item may have any stride; a view as bytes wants 1.
    return plain.reshape(-1).as_strided((plain.numel(),), (1,)).view(torch.uint8)


def _dict_difference(a: dict[Any, Any], b: dict[Any, Any], path: str) -> str | None:
    # Keys are compared by position, so a key may be a NaN, and True is not taken for 1.
    found = difference(list(a), list(b), f"{path} keys")
    if found is None and isinstance(a, OrderedDict):
        same = getattr(a, "_metadata", None) == getattr(b, "_metadata", None)
        found = None if same else f"{path}._metadata"
    if found is not None:
        return found
    pairs = zip(a.items(), b.values(), strict=True)
    inner = (difference(x, y, f"{path}[{key!r:.50}]") for (key, x), y in pairs)
    return next((f for f in inner if f), None)


def _bits(value: complex) -> str:
    """Bits of a float or a complex; every NaN with its payload."""
    number = complex(value)
    kind = "f" if isinstance(value, float) else "c"
    if kind == "f" and not math.isnan(value):
        return kind + float(value).hex()
    return kind + struct.pack(">dd", number.real, number.imag).hex()


# --- archives ----------------------------------------------------------------------------------------------------


def read_index(path: Path) -> dict[str, Any]:
    """The JSON of `index.json`, as it stands in the file."""
    data = path.read_bytes()
    _, length = tar.parse_header(data[: tar.BLOCK])
    return json.loads(data[tar.BLOCK : tar.BLOCK + length])


def parsed_index(path: Path) -> index.Index:
    """The index as the library reads it."""
    data = path.read_bytes()
    _, length = tar.parse_header(data[: tar.BLOCK])
    return index.parse(data[tar.BLOCK : tar.BLOCK + length], path=str(path))


def forge(
    path: Path,
    lie: Callable[[dict[str, Any]], Any] | None = None,
    *,
    text: Callable[[str], str] | None = None,
    members: Callable[[bytearray], None] | None = None,
) -> Path:
    """Rewrite an archive so that it lies, with every digest made anew: only sense can tell that it is wrong.

    `lie` changes the parsed index in place (or returns another), `text` its JSON, `members` the bytes between the
    index and the digests.
    """
    data = path.read_bytes()
    honest = parsed_index(path)
    _, length = tar.parse_header(data[: tar.BLOCK])
    raw = json.loads(data[tar.BLOCK : tar.BLOCK + length])
    if lie is not None:
        raw = lie(raw) or raw
    dumped = json.dumps(raw)
    if text is not None:
        dumped = text(dumped)
    between = bytearray(data[tar.BLOCK + length : honest.digests.data.offset - tar.BLOCK])
    if members is not None:
        members(between)
    path.write_bytes(assemble(dumped.encode(), bytes(between)))
    return path


def assemble(index_text: bytes, between: bytes) -> bytes:
    """A whole archive around an index and its members, digests included."""
    padded = index_text + b" " * (-(tar.BLOCK + len(index_text)) % PAGE_BYTES)
    image = tar.header(index.MEMBER, len(padded), mtime=0) + padded + between
    member, num_bytes = index.digests_member(len(image))
    image += tar.header(digests.MEMBER, member.data.length, mtime=0)
    blocks = (image[at : at + BLOCK_BYTES] for at in range(0, len(image), BLOCK_BYTES))
    image += digests.dump(len(image), b"".join(map(digests.block_digest, blocks)))
    return image + bytes(num_bytes - len(image))


def flip(path: Path, offset: int, mask: int = 0xFF) -> None:
    """Damage one byte of a file."""
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ mask]))


@contextlib.contextmanager
def little_memory(headroom_bytes: int = 1024 * MIB) -> Iterator[None]:
    """Any attempt to take more address space than this fails: what lies about sizes must be found out before."""
    statm = Path("/proc/self/statm")
    if not statm.exists():
        pytest.skip("the limit is set from /proc/self/statm")
    import resource  # not on every platform

    used = int(statm.read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (align_up(used + headroom_bytes, PAGE_BYTES), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


# --- manifests ---------------------------------------------------------------------------------------------------


def forge_manifest(path: Path, lie: Callable[[dict[str, Any]], Any] | None = None, **changes: Any) -> None:
    """Rewrite a manifest so that it lies, with its digest made anew: only sense can tell that it is wrong."""
    raw = json.loads(path.read_bytes())
    del raw["digest"]
    if lie is not None:
        lie(raw)
    path.write_bytes(manifest.seal(raw | changes))
