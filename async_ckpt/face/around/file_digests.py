"""The digests of a framework's files, in one small file beside them, so that any flipped bit is found.

In: a folder of files. Out: a file with the digest of each other file, or an error for files that have changed. Knows
nothing of: the content of the files.

The background thread that has written the files reads them once more, while they are in the page cache. Reading and
hashing release the GIL. Archives of this library are left out: they contain digests.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

import xxhash

from ...core.host.threads import run_together
from ...core.spec import MIB
from ...core.storage.disk import translated
from ...core.storage.interface import Storage
from ...core.storage.local import LocalStorage
from ...errors import CorruptCheckpointError

# Files whose names begin with "_" are not uploaded to the hub.
DIGESTS: Final = "_async_ckpt.digests"
_FILES: Final = re.compile(r"(.*/)?_async_ckpt\.digests(\.\d+)?\.json")
_ARCHIVE: Final = ".tar"
_PIECE_BYTES: Final = 4 * MIB
_MAX_READERS: Final = 8


def note_digests(folder: str | os.PathLike[str], *, rank: int | None = None, but: str = "") -> None:
    """Write the digests of all files below a folder into it, durably.

    `rank` is for ranks that fill one folder together. `but` is the name of a file to leave out.
    """
    root = Path(folder)
    storage = LocalStorage(root)
    with translated(root):
        names = [name for name in storage.sizes("") if _is_noted(name, but)]
    files = {name: _digest_of(storage, name)[0] for name in names}
    if files:
        text = json.dumps({"algorithm": "xxh3_128", "files": files}, indent=0)
        storage.replace(f"{DIGESTS}{'' if rank is None else f'.{rank}'}.json", text.encode())


def _is_noted(path: str, but: str) -> bool:
    parts = path.split("/")
    return (
        parts[-1] != but
        and not any(part.startswith(".async_ckpt") or part.endswith(_ARCHIVE) for part in parts)
        and not parts[-1].startswith(DIGESTS)
    )


def is_of_digests(path: str) -> bool:
    """True if a file contains this module's digests of the files beside it."""
    return _FILES.fullmatch(path) is not None


def noted_in(storage: Storage, path: str) -> dict[str, str]:
    """The digests in a file, by the paths of the files in the storage. Raises CorruptCheckpointError."""
    try:
        kept = json.loads(storage.read(path)[0])
        if not isinstance(kept, dict) or kept.keys() != {"algorithm", "files"} or kept["algorithm"] != "xxh3_128":
            raise ValueError("it has other entries than algorithm and files")
        if not isinstance(kept["files"], dict) or not all(isinstance(digest, str) for digest in kept["files"].values()):
            raise ValueError("files must be names with digests")
    except (ValueError, RecursionError) as error:
        raise _damaged(storage, path, f"it is not a list of digests: {error}") from error
    folder = path[: path.rfind("/") + 1]
    return {f"{folder}{name}": digest for name, digest in kept["files"].items()}


def compare_file(storage: Storage, path: str, digest: str, on_bytes: Callable[[int], object] = lambda _: None) -> int:
    """Compare a file with its digest. Returns its size. Raises CorruptCheckpointError; `on_bytes` gets read sizes."""
    try:
        found, num_bytes = _digest_of(storage, path, on_bytes)
    except FileNotFoundError as error:
        raise _damaged(storage, path, "it is missing") from error
    if found != digest:
        raise _damaged(
            storage, path, "its bytes are not those of the save; it is damaged, or another program has written it anew"
        )
    return num_bytes


def compare_folder(folder: str | os.PathLike[str], *, share: int = 0, num_shares: int = 1) -> None:
    """Compare the files of a folder with the digests beside them, if there are any. Raises CorruptCheckpointError.

    Ranks that read the same folder each compare a share of the files.
    """
    storage = LocalStorage(Path(folder))
    paths = [path for path in storage.sizes("") if is_of_digests(path)]
    digests = {path: digest for noted in paths for path, digest in noted_in(storage, noted).items()}
    tasks = [partial(_compare, storage, *one) for one in [*digests.items()][share::num_shares]]
    run_together("digests", tasks, max_threads=_MAX_READERS)


def _compare(storage: Storage, path: str, digest: str) -> None:
    compare_file(storage, path, digest)


def _digest_of(storage: Storage, path: str, on_bytes: Callable[[int], object] = lambda _: None) -> tuple[str, int]:
    """The digest of a file, and its size."""
    digest, piece = xxhash.xxh3_128(), memoryview(bytearray(_PIECE_BYTES))
    with storage.open(path) as reader:
        for offset in range(0, reader.num_bytes, _PIECE_BYTES):
            part = piece[: reader.num_bytes - offset]
            reader.read_into(offset, part)
            digest.update(part)
            on_bytes(len(part))
        return digest.hexdigest(), reader.num_bytes


def _damaged(storage: Storage, path: str, why: str) -> CorruptCheckpointError:
    shown = storage.locate(path)
    return CorruptCheckpointError(f"{shown}: {why}", path=shown)
