"""Files and folders of a filesystem of fsspec.

In: a filesystem. Out: the small objects of a storage, and drafts of large ones. Knows nothing of: archives.
"""

from __future__ import annotations

import errno
import inspect
import os
import shutil
from collections.abc import Sequence
from contextlib import suppress
from io import UnsupportedOperation
from pathlib import Path, PurePosixPath
from typing import IO, Any, Final

import xxhash

from ...plumbing import disk, locks, spec, store_facts, timing, waits
from ..proven.client_facts import ClientFacts
from ..proven.range_reader import Info, NoRangesError, ReplacedError
from .setup import OncePerProcess

# How long the creation of a folder is retried.
_MAKING_SECONDS: Final = 3.0
_FIRST_PAUSE_SECONDS: Final = 0.05
# Filesystems where a file appears only when it is complete, and folders are only parts of names.
_OBJECTS: Final = frozenset(
    ["memory", "gs", "gcs", "az", "abfs", "abfss", "adl", "hf", "oci", "ocilake", "oss", "tos", "tosfs"]
)
# Filesystems whose `rmdir` refuses a folder that is not empty. On other filesystems (Arrow), it deletes the content.
_KEEPS_FULL_FOLDERS: Final = frozenset({"file", "local", "sftp", "ssh", "ftp", "smb"})
_LISTING_TRIES: Final = 5
_COPIED_BYTES: Final = 4 * spec.MIB
# Fields that differ between versions of a file, the most reliable first.
_STAMPS: Final = (
    "ETag", "etag", "generation", "md5Hash", "content_md5", "mtime", "LastModified", "last_modified", "created",
)  # fmt: skip


class FileTree:
    """The files below one folder of any filesystem of fsspec. FsspecStorage creates and owns it. Thread-safe."""

    in_order = True

    def __init__(self, filesystem: OncePerProcess, root: str, protocol: str, shown: str, known: ClientFacts) -> None:
        self._filesystem = filesystem
        self._root = root
        self.objects = protocol in _OBJECTS
        self.alone = protocol == "memory"  # no other process can write to it
        self.local = protocol in ("file", "local")
        self._keeps_full_folders = protocol in _KEEPS_FULL_FOLDERS
        self._protocol, self._shown, self._known = protocol, shown, known
        # Whether `cat_file` can read a part of a file; None if not known yet.
        self._takes_ranges: bool | None = None

    def name(self, path: str) -> str:
        return f"{self._root}/{path}" if path else self._root

    def part_segments(self, num_bytes: int, segment_bytes: int) -> int:  # noqa: ARG002
        return 1

    def info(self, name: str) -> Info:
        fs = self._filesystem()
        for listed in (name, fs._parent(name)):  # a user's filesystem may cache listings
            fs.invalidate_cache(listed)
        entry = fs.info(name)
        if entry["type"] == "directory":
            raise (FileNotFoundError if self.objects else IsADirectoryError)(errno.EISDIR, "a folder", name)
        return Info(entry["size"], str(next((entry[key] for key in _STAMPS if entry.get(key)), "")))

    def read(self, name: str) -> tuple[bytes, str]:
        data = self._filesystem().cat_file(name)
        return data, xxhash.xxh3_128_hexdigest(data)

    def fetch(self, name: str, offset: int, target: memoryview, version: str) -> None:
        """Fill `target`. Raises NoRangesError if only whole files can be read, and ReplacedError."""
        data = self._read_part(name, offset, len(target))
        if self.info(name).version != version or len(data) != len(target):
            raise ReplacedError
        target[:] = data

    def _read_part(self, name: str, offset: int, num_bytes: int) -> bytes:
        """A part of a file, by `cat_file` or by a file that can seek: some filesystems (sshfs) support only one."""
        fs = self._filesystem()
        if self._takes_ranges is None and self._protocol in ("http", "https"):
            # If the server has no ranges, `cat_file` would read the whole file into memory, and a file raises an error.
            data = self._seek_and_read(name, offset, num_bytes)
            self._takes_ranges = True
            return data
        if self._takes_ranges is not False:
            with suppress(TypeError, NotImplementedError):
                part: bytes = fs.cat_file(name, start=offset, end=offset + num_bytes)
                if len(part) <= num_bytes:
                    return part
            self._takes_ranges = False
        return self._seek_and_read(name, offset, num_bytes)

    def _seek_and_read(self, name: str, offset: int, num_bytes: int) -> bytes:
        try:
            with self._filesystem().open(name, "rb") as file:
                file.seek(offset)
                data: bytes = file.read(num_bytes)
        except (ValueError, NotImplementedError, UnsupportedOperation) as error:
            raise NoRangesError from error
        if len(data) > num_bytes:
            raise NoRangesError
        return data

    def fetch_whole(self, name: str, version: str, file: IO[bytes]) -> None:
        """Write an object to a file."""
        fs = self._filesystem()
        try:
            with fs.open(name, "rb") as source:
                shutil.copyfileobj(source, file, _COPIED_BYTES)
        except (ValueError, NotImplementedError):  # the file cannot be read in parts
            file.seek(0)
            file.truncate()
            fs.get_file(name, file)
        if self.info(name).version != version:
            raise ReplacedError

    def draft(self, name: str) -> Draft:
        return Draft(self, self._filesystem(), name)

    def put(self, name: str, data: bytes, *, create: bool = False) -> None:
        if self.objects:
            self._filesystem().pipe_file(name, data, **({"mode": "create"} if create else {}))
            return
        draft = self.draft(name)
        try:
            draft.file.write(data)
            draft.commit(create=create)
        except BaseException:
            draft.discard()
            raise

    def creates_exclusively(self) -> bool:
        """Whether `put` can refuse to replace: by a link, or by a `pipe_file` of its own that has a mode."""
        fs = self._filesystem()
        if not self.objects:
            return hasattr(fs, "link")
        method = getattr(type(fs), "_pipe_file" if fs.async_impl else "pipe_file")
        own = not method.__module__.startswith(("fsspec.spec", "fsspec.asyn"))
        return own and not self.alone and "mode" in inspect.signature(method).parameters

    def replace(self, name: str, data: bytes, version: str) -> bool:  # noqa: ARG002
        return False  # no filesystem supports this

    def move(self, name: str, to: str) -> None:
        """Rename a file, and replace a file that has the new name."""
        try:
            self._rename(name, to)
        except FileNotFoundError:
            raise
        except Exception:
            if not self._is_there(name):
                raise FileNotFoundError(errno.ENOENT, "no such file", name) from None
            if not self._is_there(to):
                raise
            self._rename_aside(to, name)
        self.settle(to)

    def _rename(self, name: str, to: str) -> None:
        from fsspec import AbstractFileSystem  # type: ignore[import-untyped]

        fs = self._filesystem()
        if self._protocol in ("webdav", "dav"):  # its `mv` copies, and refuses to replace
            fs.client.move(name, to, overwrite=True)
        elif type(fs).mv is AbstractFileSystem.mv and "mv" not in vars(fs):  # which would treat `?` and `[` as patterns
            fs.cp_file(name, to)
            fs.rm_file(name)
        else:
            fs.mv(name, to)

    def _rename_aside(self, to: str, name: str) -> None:
        """Replace a file on a filesystem that refuses to rename onto an existing name."""
        aside = _temp_name(to)
        self._rename(to, aside)
        self._known.log_once(
            self._shown,
            "no file can be renamed to a name that exists, so the old file is renamed first; if the process is killed "
            "between the two, a file that was being replaced, such as a tracker or a manifest, is missing",
        )
        try:
            self._rename(name, to)
        except BaseException:
            with suppress(Exception):
                self._rename(aside, to)
            raise
        with suppress(Exception):  # if this fails, it is swept as a temp file
            self._filesystem().rm_file(aside)

    def _is_there(self, name: str) -> bool:
        try:
            self.info(name)
        except FileNotFoundError:
            return False
        return True

    def settle(self, name: str) -> None:
        """On a local disk, make the name durable, and the names of folders that may be new."""
        for folder in PurePosixPath(name).parents if self.local else ():
            disk.sync_folder(Path(folder))
            if len(str(folder)) < len(self._root):
                return

    def delete(self, name: str) -> None:
        with suppress(FileNotFoundError):
            self._filesystem().rm_file(name)
        self._remove_empty_parents(name)

    def delete_many(self, names: Sequence[str]) -> bool:  # noqa: ARG002
        """Return False: filesystems differ in what `rm` of a list does if one file is missing."""
        return False

    def _remove_empty_parents(self, name: str) -> None:
        """Remove the empty folders above a deleted name."""
        folder = name.rpartition("/")[0]
        while len(folder) > len(self._root) and self.remove_if_empty(folder):
            folder = folder.rpartition("/")[0]

    def remove_if_empty(self, folder: str) -> bool:
        if not self._keeps_full_folders:
            return False
        from fsspec import AbstractFileSystem

        fs = self._filesystem()
        has_own = type(fs).rmdir is not AbstractFileSystem.rmdir or "rmdir" in vars(fs)
        try:
            if has_own:
                fs.rmdir(folder)
            elif hasattr(fs, "_rmdir"):  # sshfs, whose `rmdir` does nothing
                from fsspec.asyn import sync  # type: ignore[import-untyped]

                sync(fs.loop, fs._rmdir, folder)
            else:
                return False
        except Exception:  # usually since the folder is not empty, or already removed
            return False
        return True

    def names(self, folder: str) -> set[str]:
        fs = self._filesystem()
        fs.invalidate_cache(folder)
        try:
            names = [entry.rstrip("/") for entry in self._listed(folder, detail=False)]
        except (FileNotFoundError, NotADirectoryError):
            return set()
        return {entry.rpartition("/")[2] for entry in names if entry != folder}

    def sizes(self, folder: str) -> dict[str, int]:
        fs = self._filesystem()
        sizes: dict[str, int] = {}
        folders = [(folder, "")]
        while folders:
            inner, prefix = folders.pop()
            fs.invalidate_cache(inner)
            try:
                entries = self._listed(inner, detail=True)
            except (FileNotFoundError, NotADirectoryError):
                continue
            for entry in entries:
                name = entry["name"].rstrip("/")
                path = prefix + name.rpartition("/")[2]
                if name == inner or path.endswith(locks.TEMP_SUFFIX):
                    continue
                if entry["type"] == "directory":
                    folders.append((name, f"{path}/"))
                else:
                    sizes[path] = entry["size"]
        return sizes

    def _listed(self, folder: str, *, detail: bool) -> list[Any]:
        """The result of `ls`, with retries: if a file is deleted meanwhile, rclone's WebDAV server sends broken XML."""
        for _ in range(_LISTING_TRIES):
            try:
                return self._filesystem().ls(folder or "/", detail=detail)  # type: ignore[no-any-return]
            except SyntaxError as error:  # raised by parsers of XML
                broken = error
        raise OSError(errno.EIO, f"its listing cannot be understood ({broken})") from broken

    def tree(self, name: str) -> tuple[list[str], list[str]]:
        """The files and folders of a tree, outer folders first, each without `name` at its beginning.

        Every link counts as a file.
        """
        if self.objects:
            return ["", *(f"/{path}" for path in self.sizes(name))], []
        fs = self._filesystem()
        fs.invalidate_cache(fs._parent(name))
        with suppress(FileNotFoundError):  # raised for broken links, too
            if _is_folder(fs.info(name)):
                return self._tree_of_folder(name)
        return [""], []

    def _tree_of_folder(self, name: str) -> tuple[list[str], list[str]]:
        fs = self._filesystem()
        files: list[str] = []
        folders = [""]
        for folder in folders:  # the loop appends to this list
            fs.invalidate_cache(name + folder)
            for entry in fs.ls(name + folder, detail=True):
                path = f"{folder}/{entry['name'].rstrip('/').rpartition('/')[2]}"
                (folders if _is_folder(entry) else files).append(path)
        return files, folders

    def now(self) -> float:
        """The time of the filesystem's clock, in seconds since the epoch."""
        probe = self.name(store_facts.probe_name())
        self.put(probe, b"now")
        try:
            return self.modified(probe)
        finally:
            self.delete(probe)

    def modified(self, name: str) -> float:
        return float(self._filesystem().modified(name).timestamp())


class Draft:
    """A file that is being written: under a temp name, or hidden by the filesystem until `commit`.

    `FileTree.draft` makes it. One thread at a time.
    """

    def __init__(self, files: FileTree, fs: Any, name: str) -> None:
        self._files = files
        self._fs = fs
        self._name = name
        self._temp: str | None = None
        if files.objects:
            self.file = _open_uncommitted(fs, name)
            return
        folder = name.rpartition("/")[0]
        self._temp = _temp_name(name)
        for tries_left in (1, 0):
            self._make(folder or "/")
            try:
                self.file = fs.open(self._temp, "wb")
                return
            except FileNotFoundError:  # another writer has removed the folder, which was empty
                if not tries_left:
                    raise

    def _make(self, folder: str) -> None:
        """Make a folder and its parents, with retries: rclone's WebDAV locks folders that other writers are making."""
        deadline = timing.TIMEKEEPER.now() + _MAKING_SECONDS
        for seconds in waits.growing_pauses(_FIRST_PAUSE_SECONDS, _MAKING_SECONDS):
            try:
                self._fs.makedirs(folder, exist_ok=True)
                return
            except Exception as error:
                if self._fs.isdir(folder):
                    return
                is_final = isinstance(error, PermissionError) or self._fs.isfile(folder)
                if is_final or timing.TIMEKEEPER.now() + seconds > deadline:
                    raise NotADirectoryError(errno.ENOTDIR, f"no folder could be made: {error}", folder) from error
            timing.TIMEKEEPER.sleep(seconds)

    def commit(self, *, create: bool = False) -> None:
        if self._temp is None:
            self.file.close()
            self.file.commit()
            return
        if self._files.local:
            self.file.flush()
            os.fsync(self.file.fileno())
        self.file.close()
        if create:
            self._fs.link(self._temp, self._name)
            self._fs.rm_file(self._temp)
            self._files.settle(self._name)
        else:
            self._files.move(self._temp, self._name)

    def discard(self) -> None:
        if self._temp is None:
            with suppress(Exception):
                self.file.discard()
            with suppress(AttributeError):
                self.file.closed = True  # or it would upload its content when it is garbage-collected
            return
        with suppress(Exception):
            self.file.close()
        with suppress(Exception):
            self._files.delete(self._temp)


def _temp_name(name: str) -> str:
    """A new name in the same folder, for a file that is being written or is about to be deleted."""
    folder, _, last = name.rpartition("/")
    return f"{folder}/{locks.temp_stem(last)}{os.urandom(4).hex()}{locks.TEMP_SUFFIX}"


def _is_folder(entry: dict[str, Any]) -> bool:
    """Whether an entry is a folder, and not a link to one."""
    return entry["type"] == "directory" and not entry.get("islink")


def _open_uncommitted(fs: Any, name: str) -> Any:
    """A file that appears only when its `commit` is called."""
    from fsspec.implementations.memory import MemoryFile, MemoryFileSystem  # type: ignore[import-untyped]

    if isinstance(fs, MemoryFileSystem):  # its `open` would make the file appear at once
        return MemoryFile(fs, name)
    return fs._open(name, "wb", autocommit=False)  # `open` would also add it to a transaction
