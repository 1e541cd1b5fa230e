"""The two kinds of place that fsspec leads to.

In: paths below a root, bytes. Out: what is there, and how it is put there. Knows nothing of: segments.

A bucket of s3fs takes multipart parts and puts with a condition. Any other filesystem takes a file written from front
to back; what else it can do is looked up on its class.
"""

from __future__ import annotations

import errno
import inspect
import math
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import suppress
from email.utils import parsedate_to_datetime
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, Final, NamedTuple, Protocol

import xxhash

from ...errors import StorageUnavailableError
from ...spec import KIB, MIB
from ..conditions import Conditions, Form
from ..local import TEMP_SUFFIX, sync_folder, temp_stem
from .errors import CONFLICT, NO_SUCH_CALL, REFUSED, NoBucketError, was_repeated, words_of
from .setup import OncePerProcess

# What S3 demands of a multipart upload.
_MIN_PART_BYTES: Final = 5 * MIB
_MAX_PARTS: Final = 10_000
_MAX_KEY_BYTES: Final = 1024
# A body goes to the socket in copies of this size: one join below 1 MiB keeps the GIL, so no slice is torn.
_SLICE_BYTES: Final = 256 * KIB
_CONFLICT_TRIES: Final = 4
# Filesystems where a file appears when it is complete, and where folders are only a way of listing.
_OBJECTS: Final = frozenset(
    ["memory", "gs", "gcs", "az", "abfs", "abfss", "adl", "hf", "oci", "ocilake", "oss", "tos", "tosfs"]
)
# Filesystems whose `rmdir` refuses a folder that is not empty; others (Arrow's) delete all that is in it.
_KEEPS_FULL_FOLDERS: Final = frozenset({"file", "local", "sftp", "ssh", "ftp", "smb"})
# What tells one version of a file from the next, the best first.
_STAMPS: Final = (
    "ETag", "etag", "generation", "md5Hash", "content_md5", "mtime", "LastModified", "last_modified", "created",
)  # fmt: skip


class Moment(Protocol):
    """A `datetime`; its module is a clock, and clocks are not imported here."""

    def timestamp(self) -> float: ...


class Body:
    """A part as a file for botocore, which hashes it, and as slices for aiohttp, which sends them: never one copy.

    Requests that are given up may still ask for it after the memory was given back; `close` leaves them nothing.
    """

    def __init__(self, views: list[memoryview]) -> None:
        self._views = views
        self._num_bytes = sum(len(view) for view in views)
        self._at = 0

    def __len__(self) -> int:
        return self._num_bytes

    def _copy(self, begin: int, end: int) -> bytes:
        slices = []
        for view in self._views:
            slices.append(view[max(begin, 0) : max(end, 0)])
            begin, end = begin - len(view), end - len(view)
        return b"".join(slices)

    def read(self, size: int | None = -1) -> bytes:
        begin = self._at
        whole = size is None or size < 0
        self._at = self._num_bytes if whole else min(begin + (size or 0), self._num_bytes)
        return self._copy(begin, self._at)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._num_bytes}[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for begin in range(0, self._num_bytes, _SLICE_BYTES):
            yield self._copy(begin, min(begin + _SLICE_BYTES, self._num_bytes))

    def close(self) -> None:
        self._views = []


class Info(NamedTuple):
    """What a store says of an object."""

    num_bytes: int
    version: str


class ReplacedError(Exception):
    pass


class Bucket:
    """Objects of S3, by s3fs's requests: no listing, guess or copy of its file interface is in between."""

    in_order = False
    alone = False

    def __init__(self, filesystem: OncePerProcess, root: str, deadline_seconds: float) -> None:
        self._filesystem = filesystem
        self._root = root
        self._deadline_seconds = deadline_seconds
        self._seen = False  # that there is such a bucket
        self._conditional: bool | None = None  # whether it heeds conditions on a put
        self._conditions = Conditions()

    def name(self, path: str) -> str:
        name = f"{self._root}/{path}" if path else self._root
        if len(name.partition("/")[2].encode()) > _MAX_KEY_BYTES:
            raise StorageUnavailableError(
                f"s3://{name:.200}…: no key may be longer than {_MAX_KEY_BYTES:,} bytes; shorten it",
                path=f"s3://{name}",
            )
        return name

    def part_segments(self, num_bytes: int, segment_bytes: int) -> int:
        num_segments = -(-num_bytes // segment_bytes)
        needed = max(-(-_MIN_PART_BYTES // segment_bytes), -(-num_segments // _MAX_PARTS))
        return min(needed, num_segments)

    def where(self, name: str) -> tuple[str, str]:
        bucket, key, _ = self._filesystem().split_path(name)
        return bucket, key

    def call(self, method: str, name: str, **parameters: Any) -> Any:
        """One request, repeated by s3fs where that helps; what the method has no use for is left out."""
        return self._await(lambda request: request(method), name, **parameters)

    def _await(
        self, talk: Callable[[Callable[..., Any]], Awaitable[Any]], name: str, **parameters: Any
    ) -> Any:
        """Hold a talk of requests and answers on s3fs's loop, within the deadline."""
        from fsspec.asyn import sync  # type: ignore[import-untyped]

        fs = self._filesystem()
        bucket, key = self.where(name)
        request = partial(fs._call_s3, Bucket=bucket, Key=key, **parameters)
        try:
            return sync(fs.loop, talk, request, timeout=self._deadline_seconds)
        except FileNotFoundError as error:
            if "NoSuchBucket" in words_of(error):
                raise NoBucketError(errno.ENXIO, f"bucket {bucket} does not exist") from error
            raise

    def info(self, name: str) -> Info:
        try:
            said = self.call("head_object", name)
        except FileNotFoundError:  # which does not say what is missing
            self._require_bucket(name)
            raise
        except OSError:  # the answer to a HEAD has no body and so no reason; the answer to a listing has
            bucket, key = self.where(name)
            self.call("list_objects_v2", bucket, Prefix=key, MaxKeys=1)
            raise
        return Info(said["ContentLength"], said["ETag"])

    def _require_bucket(self, name: str) -> None:
        if self._seen:
            return
        try:
            self.call("head_bucket", name)
        except FileNotFoundError:
            raise NoBucketError(errno.ENXIO, f"bucket {self.where(name)[0]} does not exist") from None
        except PermissionError:
            pass  # it is there, and not to be looked at
        self._seen = True

    def read(self, name: str) -> tuple[bytes, str]:
        data, version = self._get(name, None)
        return bytes(data), version

    def fetch(self, name: str, offset: int, target: memoryview, version: str) -> None:
        try:
            self._get(name, target, Range=f"bytes={offset}-{offset + len(target) - 1}", IfMatch=version)
        except OSError as error:
            if words_of(error) & REFUSED:
                raise ReplacedError from error
            raise

    def _get(self, name: str, target: memoryview | None, **conditions: Any) -> tuple[memoryview, str]:
        """A get and its body, which goes straight into place. s3fs repeats the request, but not a body that breaks."""
        from fsspec.exceptions import FSTimeoutError  # type: ignore[import-untyped]
        from s3fs.core import S3_RETRYABLE_ERRORS  # type: ignore[import-untyped]

        async def get(request: Callable[..., Any]) -> tuple[memoryview, str]:
            said = await request("get_object")
            view = memoryview(bytearray(said["ContentLength"])) if target is None else target
            at = 0
            async with said["Body"] as body:
                while chunk := await body.read(_SLICE_BYTES):
                    view[at : at + len(chunk)] = chunk
                    at += len(chunk)
            return view, said["ETag"]

        for tries_left in reversed(range(self._filesystem().retries)):
            try:
                return self._await(get, name, **conditions)  # type: ignore[no-any-return]
            except S3_RETRYABLE_ERRORS as error:
                if not tries_left or isinstance(error, FSTimeoutError):
                    raise
        raise AssertionError("the last try returns or raises")

    def put(self, name: str, data: bytes, *, create: bool = False, version: str | None = None) -> None:
        condition = {"IfNoneMatch": "*"} if create else {"IfMatch": version} if version else {}
        for tries_left in reversed(range(_CONFLICT_TRIES)):
            try:
                self.call("put_object", name, Body=Body([memoryview(data)]), **condition)
                return
            except OSError as error:
                words = words_of(error)
                if tries_left and words & CONFLICT:  # another conditional put is being decided
                    continue
                gone = version is not None and isinstance(error, FileNotFoundError)
                if not (condition and words & REFUSED) and not gone:
                    raise
                if create and was_repeated(error) and self.read(name)[0] == data:
                    return  # it is our own: the answer to the first try was lost
                raise FileExistsError(errno.EEXIST, f"{name} was written by another writer") from error

    def creates_exclusively(self) -> bool:
        """Whether a condition on a put is heeded: some stores take it and write all the same. Tried once."""
        if self._conditional is None:
            probe = self.name(_probe_name())
            self.put(probe, b"")
            try:
                self._conditional = self._refuses(probe, create=True) and self._refuses(
                    probe, version=f'"{"0" * 32}"'
                )
            finally:
                with suppress(OSError):
                    self.delete(probe)
        return self._conditional

    def replace(self, name: str, data: bytes, version: str) -> bool:
        """Put over this version and no other. False when the store does not obey that condition."""

        def put(form: Form) -> bool:
            self.put(name, data, version=form(version))
            return True

        return self.creates_exclusively() and bool(
            self._conditions.replace(
                put, is_there=partial(self._is_there, name, version), accepts=self._accepts
            )
        )

    def _is_there(self, name: str, version: str) -> bool:
        try:
            return self.info(name).version == version
        except FileNotFoundError:
            return False

    def _accepts(self, form: Form) -> bool:
        """Whether a put over a version that is there is obeyed, on an object made for that."""
        probe = self.name(_probe_name())
        self.put(probe, b"")
        try:
            self.put(probe, b"", version=form(self.info(probe).version))
        except FileExistsError:
            return False
        else:
            return True
        finally:
            with suppress(OSError):
                self.delete(probe)

    def _refuses(self, probe: str, **condition: Any) -> bool:
        try:
            self.put(probe, b"", **condition)
        except FileExistsError:
            return True
        except OSError as error:
            if not words_of(error) & NO_SUCH_CALL:
                raise
        return False

    def move(self, name: str, to: str) -> None:
        bucket, key = self.where(name)
        self.call("copy_object", to, CopySource={"Bucket": bucket, "Key": key})
        self.delete(name)

    def delete(self, name: str) -> None:
        self.call("delete_object", name)

    def remove_if_empty(self, folder: str) -> bool:  # noqa: ARG002
        return False  # there are no folders

    def names(self, folder: str) -> set[str]:
        key = self.where(folder)[1]
        prefix = key and f"{key}/"
        found: set[str] = set()
        for page in self._pages("list_objects_v2", folder, Prefix=prefix, Delimiter="/"):
            found.update(entry["Key"][len(prefix) :] for entry in page.get("Contents", ()))
            found.update(entry["Prefix"][len(prefix) : -1] for entry in page.get("CommonPrefixes", ()))
        return found - {""}

    def sizes(self, folder: str) -> dict[str, int]:
        key = self.where(folder)[1]
        prefix = key and f"{key}/"
        return {
            entry["Key"][len(prefix) :]: entry["Size"]
            for page in self._pages("list_objects_v2", folder, Prefix=prefix)
            for entry in page.get("Contents", ())
            if entry["Size"] or not entry["Key"].endswith("/")  # else it only shows a folder
        }

    def _pages(self, method: str, name: str, **parameters: Any) -> Iterator[Any]:
        while True:
            page = self.call(method, name, **parameters)
            yield page
            if not page.get("IsTruncated"):
                return
            for marker in ("ContinuationToken", "KeyMarker", "UploadIdMarker"):
                if f"Next{marker}" in page:
                    parameters[marker] = page[f"Next{marker}"]

    def now(self) -> Moment:
        said = self.call("list_objects_v2", self._root, Prefix=self.where(self._root)[1], MaxKeys=1)
        return parsedate_to_datetime(said["ResponseMetadata"]["HTTPHeaders"]["date"])

    def modified(self, name: str) -> Moment:
        moment: Moment = self.call("head_object", name)["LastModified"]
        return moment

    def abort_uploads(
        self, bucket: str, prefix: str, before: float = math.inf, *, exact: bool = False
    ) -> list[str]:
        """Abort uploads of keys that begin so (or are just that), begun before this time of the store; their keys."""
        stale = [
            (upload["Key"], upload["UploadId"])
            for page in self._pages("list_multipart_uploads", bucket, Prefix=prefix)
            for upload in page.get("Uploads", ())
            if upload["Key"].startswith(prefix) and upload["Initiated"].timestamp() < before
            if upload["Key"] == prefix or not exact
        ]
        for key, upload_id in stale:
            with suppress(FileNotFoundError):  # it has ended by itself
                self.call("abort_multipart_upload", f"{bucket}/{key}", UploadId=upload_id)
        return [key for key, _ in stale]


class Files:
    """Files of any filesystem of fsspec."""

    in_order = True

    def __init__(self, filesystem: OncePerProcess, root: str, protocol: str) -> None:
        self._filesystem = filesystem
        self._root = root
        self.objects = protocol in _OBJECTS
        self.alone = protocol == "memory"  # no other process is there to write to it
        self.local = protocol in ("file", "local")
        self._keeps_full_folders = protocol in _KEEPS_FULL_FOLDERS

    def name(self, path: str) -> str:
        return f"{self._root}/{path}" if path else self._root

    def part_segments(self, num_bytes: int, segment_bytes: int) -> int:  # noqa: ARG002
        return 1

    def info(self, name: str) -> Info:
        fs = self._filesystem()
        for listed in (name, fs._parent(name)):  # a filesystem that was handed to us may keep listings
            fs.invalidate_cache(listed)
        said = fs.info(name)
        if said["type"] == "directory":
            raise (FileNotFoundError if self.objects else IsADirectoryError)(errno.EISDIR, "a folder", name)
        return Info(said["size"], str(next((said[key] for key in _STAMPS if said.get(key)), "")))

    def read(self, name: str) -> tuple[bytes, str]:
        data = self._filesystem().cat_file(name)
        return data, xxhash.xxh3_128_hexdigest(data)

    def fetch(self, name: str, offset: int, target: memoryview, version: str) -> None:
        data = self._filesystem().cat_file(name, start=offset, end=offset + len(target))
        if self.info(name).version != version or len(data) != len(target):
            raise ReplacedError
        target[:] = data

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
        """Whether `put` can create: by an own `pipe_file` with a mode (the inherited one only looks first), or a link."""
        fs = self._filesystem()
        if not self.objects:
            return hasattr(fs, "link")
        method = getattr(type(fs), "_pipe_file" if fs.async_impl else "pipe_file")
        own = not method.__module__.startswith(("fsspec.spec", "fsspec.asyn"))
        return own and not self.alone and "mode" in inspect.signature(method).parameters

    def replace(self, name: str, data: bytes, version: str) -> bool:  # noqa: ARG002
        return False  # none of them can

    def move(self, name: str, to: str) -> None:
        from fsspec import AbstractFileSystem  # type: ignore[import-untyped]

        fs = self._filesystem()
        if type(fs).mv is AbstractFileSystem.mv:  # which takes `?` and `[` in names for patterns
            fs.cp_file(name, to)
            fs.rm_file(name)
        else:
            fs.mv(name, to)
        self.settle(to)

    def settle(self, name: str) -> None:
        """Where the disk is at hand, make the name durable, and those of the folders that may be new."""
        for folder in PurePosixPath(name).parents if self.local else ():
            sync_folder(Path(folder))
            if len(str(folder)) < len(self._root):
                return

    def delete(self, name: str) -> None:
        with suppress(FileNotFoundError):
            self._filesystem().rm_file(name)
        self.leave(name)

    def leave(self, name: str) -> None:
        """Remove the folders above a name that is no longer there, as far as they are empty."""
        folder = name.rpartition("/")[0]
        while len(folder) > len(self._root) and self.remove_if_empty(folder):
            folder = folder.rpartition("/")[0]

    def remove_if_empty(self, folder: str) -> bool:
        if not self._keeps_full_folders:
            return False
        try:
            self._filesystem().rmdir(folder)
        except Exception:  # not empty, which is the usual case, or already gone
            return False
        return True

    def names(self, folder: str) -> set[str]:
        fs = self._filesystem()
        fs.invalidate_cache(folder)
        try:
            found = [entry.rstrip("/") for entry in fs.ls(folder or "/", detail=False)]
        except (FileNotFoundError, NotADirectoryError):
            return set()
        return {entry.rpartition("/")[2] for entry in found if entry != folder}

    def sizes(self, folder: str) -> dict[str, int]:
        fs = self._filesystem()
        found: dict[str, int] = {}
        folders = [(folder, "")]
        while folders:
            inner, prefix = folders.pop()
            fs.invalidate_cache(inner)
            try:
                entries = fs.ls(inner or "/", detail=True)
            except (FileNotFoundError, NotADirectoryError):
                continue
            for entry in entries:
                name = entry["name"].rstrip("/")
                path = prefix + name.rpartition("/")[2]
                if name == inner or path.endswith(TEMP_SUFFIX):
                    continue
                if entry["type"] == "directory":
                    folders.append((name, f"{path}/"))
                else:
                    found[path] = entry["size"]
        return found

    def now(self) -> Moment:
        probe = self.name(_probe_name())
        self.put(probe, b"now")
        try:
            return self.modified(probe)
        finally:
            self.delete(probe)

    def modified(self, name: str) -> Moment:
        moment: Moment = self._filesystem().modified(name)
        return moment


class Draft:
    """A file that is being written: under a temp name, or out of sight where the filesystem does that itself."""

    def __init__(self, files: Files, fs: Any, name: str) -> None:
        self._files = files
        self._fs = fs
        self._name = name
        self._temp: str | None = None
        if files.objects:
            self.file = _uncommitted(fs, name)
            return
        folder, _, last = name.rpartition("/")
        self._temp = f"{folder}/{temp_stem(last)}{os.urandom(4).hex()}{TEMP_SUFFIX}"
        for tries_left in (1, 0):
            self._make(folder or "/")
            try:
                self.file = fs.open(self._temp, "wb")
                return
            except FileNotFoundError:  # another writer has removed the folder that it had emptied
                if not tries_left:
                    raise

    def _make(self, folder: str) -> None:
        try:
            self._fs.makedirs(folder, exist_ok=True)
        except Exception as error:  # not every filesystem bears with others that make it at the same time
            if not self._fs.isdir(folder):
                raise NotADirectoryError(
                    errno.ENOTDIR, f"no folder could be made: {error}", folder
                ) from error

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
                self.file.closed = True  # or it would upload what it has when it is collected
            return
        with suppress(Exception):
            self.file.close()
        with suppress(Exception):
            self._files.delete(self._temp)


def _probe_name() -> str:
    return f".async_ckpt-probe-{os.urandom(4).hex()}"


def _uncommitted(fs: Any, name: str) -> Any:
    """A file that appears with its `commit`."""
    from fsspec.implementations.memory import MemoryFile, MemoryFileSystem  # type: ignore[import-untyped]

    if isinstance(fs, MemoryFileSystem):  # whose own `open` makes it appear at once
        return MemoryFile(fs, name)
    return fs._open(name, "wb", autocommit=False)  # `open` would also keep it for a transaction
