"""Archives and manifests, taken apart, changed and put together."""

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from async_ckpt.core.format import digests, index, tar
from async_ckpt.core.runs import manifest
from async_ckpt.core.spec import BLOCK_BYTES, MIB, PAGE_BYTES, align_up


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


def forge_manifest(path: Path, lie: Callable[[dict[str, Any]], Any] | None = None, **changes: Any) -> None:
    """Rewrite a manifest so that it lies, with its digest made anew: only sense can tell that it is wrong."""
    raw = json.loads(path.read_bytes())
    del raw["digest"]
    if lie is not None:
        lie(raw)
    path.write_bytes(manifest.seal(raw | changes))
