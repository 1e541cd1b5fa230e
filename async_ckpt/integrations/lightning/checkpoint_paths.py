"""The paths of checkpoints: hidden paths beside them, renames when they are complete, links, and a lock.

In: paths. Out: files and folders that have their names only while they are complete. Knows nothing of: their content.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from ...errors import StorageUnavailableError
from ...plumbing import disk, locks, scratches
from ..common.folders import FolderHold

# The file in a folder with everything except the shards, under the name that Lightning gives it.
REST: Final = "meta.pt"
_HIDDEN_SUFFIX: Final = ".async_ckpt-saving"


def is_link(path: Any) -> bool:
    return "://" not in str(path) and os.path.islink(path)


def hidden_beside(path: Any) -> Path:
    """The hidden path beside a checkpoint, before it gets its name and after it has lost it."""
    folder, name = os.path.split(path)
    return Path(folder, f".{name}{_HIDDEN_SUFFIX}")


def forget_listing(path: Any) -> None:
    """Make fsspec, with which Lightning reads, list a URL again: its cached listing lacks our writes."""
    if "://" in str(path):
        from fsspec.core import url_to_fs  # type: ignore[import-untyped]

        filesystem, inner = url_to_fs(str(path))
        filesystem.invalidate_cache(inner)


def rename(hidden: Path, path: Path) -> None:
    """Give a complete file its name, which replaces a link."""
    os.replace(hidden, path)
    disk.sync_folder(path.parent)


def rename_both(hidden: Path, path: Path, twin: Path) -> None:
    """Give a complete file or folder two names. The second one, from which a training resumes, appears first."""
    hidden_twin = hidden_beside(twin)
    _delete(hidden_twin)
    if hidden.is_dir():
        shutil.copytree(hidden, hidden_twin, copy_function=_link_or_copy)
        scratches.sync_all(hidden_twin)
        for written, target in ((hidden_twin, twin), (hidden, path)):
            publish_folder(written, target)
        return
    _link_or_copy(hidden, hidden_twin)
    if twin.is_dir() and not twin.is_symlink():  # left by a training that saved shards
        shutil.rmtree(twin)
    os.replace(hidden_twin, twin)
    disk.sync_folder(twin.parent)
    rename(hidden, path)


def _link_or_copy(source: str | Path, target: str | Path) -> None:
    """Give a file a second name. The file is never changed: each later save to one of the names replaces it."""
    try:
        os.link(source, target)
    except OSError:  # a file system without hard links
        shutil.copyfile(source, target)
        scratches.sync_all(Path(target))


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def publish_shards(hidden: Path, path: Path, world_size: int, twin: Path | None = None) -> None:
    """Give a complete folder its name, replacing an older one, once no rank reads the hidden folder any more.

    With a `twin`, the folder gets two names. Raises StorageUnavailableError if it is incomplete, because it was deleted
    during the save and created again by the commit.
    """
    if not (hidden / REST).exists() or len([*hidden.glob("rank_*.tar")]) < world_size:
        raise StorageUnavailableError(f"{path}: files of it were deleted while it was saved")
    disk.sync_folder(hidden)
    if twin is None:
        publish_folder(hidden, path)
    else:
        rename_both(hidden, path, twin)


def publish_folder(hidden: Path, path: Path) -> None:
    """Give a complete folder its name, replacing an older folder or file."""
    if path.is_symlink() or path.is_file():  # a link of ModelCheckpoint; its target is kept
        path.unlink()
    scratches.publish(hidden, path, replaced=lambda _: True)
    shutil.rmtree(hidden, ignore_errors=True)  # the older folder, which was exchanged for it


def remove(path: str, remove_file: Callable[[str], None]) -> None:
    """Remove a checkpoint. A folder is renamed first, so that a part of it is never taken for the whole."""
    if is_link(path):
        os.unlink(path)
    elif os.path.isdir(path):
        hidden = hidden_beside(path)
        shutil.rmtree(hidden, ignore_errors=True)
        os.rename(path, hidden)
        shutil.rmtree(hidden)
    else:
        remove_file(path)


def move_link(link: str, target: str) -> None:
    """Make a link point to a durable checkpoint. The link always exists, with the old target or the new one."""
    folder, temp = os.path.dirname(link), hidden_beside(link)
    with suppress(FileNotFoundError):
        os.unlink(temp)
    os.symlink(os.path.relpath(target, folder), temp)
    if os.path.isdir(link) and not os.path.islink(link):
        shutil.rmtree(link)
    os.replace(temp, link)
    disk.sync_folder(Path(folder))


@contextmanager
def locked(folder: str) -> Iterator[None]:
    """A block in which this process has a lock on a folder. Leftovers of killed processes are removed first.

    Raises RunTakenError if another trainer has locked it. Without file locks, as in some network file systems, other
    processes are not kept out.
    """
    with FolderHold(Path(folder)):
        _sweep(Path(folder))
        yield


def _sweep(folder: Path) -> None:
    for path in folder.iterdir():
        if path.name.endswith(locks.TEMP_SUFFIX):
            locks.is_dead(path, delete=True)
        elif path.name.startswith(".") and path.name.endswith(_HIDDEN_SUFFIX):
            _delete(path)
