"""The digests of a framework's files, in one small file beside them: the command `verify` finds any flipped bit by it.

In: a folder that has just been filled. Out: a file with a digest of each other file. Knows nothing of: what they hold.

The files are read once more, on the thread in the background that has written them, while they are in the page cache.
Reading and digests release the GIL. Archives of this library are left out: they have digests of their own.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Final

import xxhash

from ...plumbing import LocalStorage, disk, spec

# The command looks for files named so. The hub is not given files whose names begin with "_".
DIGESTS: Final = "_async_ckpt.digests"
_ARCHIVE: Final = ".tar"
_PIECE_BYTES: Final = 4 * spec.MIB


def note_digests(folder: str | os.PathLike[str], *, rank: int | None = None, but: str = "") -> None:
    """Write the digests of all files below a folder into it, durably.

    `rank` is for ranks that fill one folder together, `but` is the name of a file that somebody else writes.
    """
    root = Path(folder)
    with disk.translated(root):
        paths = {path.relative_to(root): path for path in sorted(root.rglob("*")) if path.is_file()}
        files = {
            name.as_posix(): _digest_of(path)
            for name, path in paths.items()
            if name.name != but
            and not any(part.startswith(".async_ckpt") or part.endswith(_ARCHIVE) for part in name.parts)
            and not name.name.startswith(DIGESTS)
        }
    if files:
        text = json.dumps({"algorithm": "xxh3_128", "files": files}, indent=0)
        LocalStorage(root).replace(f"{DIGESTS}{'' if rank is None else f'.{rank}'}.json", text.encode())


def _digest_of(path: Path) -> str:
    digest, piece = xxhash.xxh3_128(), memoryview(bytearray(_PIECE_BYTES))
    with open(path, "rb", buffering=0) as file:
        while num_bytes := file.readinto(piece):
            digest.update(piece[:num_bytes])
    return digest.hexdigest()
