"""Any other filesystem, through fsspec; and S3 through s3fs, for those whose set-up lives there.

In: segments at offsets, options of fsspec (for S3 those of obstore too). Out: objects that are there whole or not at
all. Knows nothing of: what is in the objects.

Two kinds of place. A bucket of s3fs takes multipart parts, straight from the segments, and puts with a condition. Any
other filesystem takes a file written from front to back; what else it can do is looked up on its class.
"""

from __future__ import annotations

import errno
import hashlib
import inspect
import logging
import os
import re
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from email.utils import parsedate_to_datetime
from functools import partial
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import Any, Final, NamedTuple, Protocol, Self
from urllib.parse import unquote, urlsplit

import xxhash

from ..errors import CheckpointError, StorageFullError, StorageUnavailableError
from ..snapshot.crew import Crew
from ..spec import KIB, MIB
from .base import Held
from .local import TEMP_SUFFIX, _temp_stem, sync_folder
from .url import scheme_of, shown

# Older than this by the store's clock, and of a step that is decided: then nobody is still writing it.
ORPHAN_SECONDS: Final = 86_400
# No single request takes longer, its retries included: aiohttp by itself waits for ever to *send* a body.
DEADLINE_SECONDS: Final = 900.0
# What S3 demands of a multipart upload.
_MIN_PART_BYTES: Final = 5 * MIB
_MAX_PARTS: Final = 10_000
_MAX_KEY_BYTES: Final = 1024
# A body goes to the socket in copies of this size: one join below 1 MiB keeps the GIL, so no slice is torn.
_SLICE_BYTES: Final = 256 * KIB
_CONFLICT_TRIES: Final = 4
_NUM_LOOKERS: Final = 16

# Filesystems where a file appears when it is complete, and where folders are only a way of listing.
_OBJECTS: Final = frozenset(
    ["memory", "gs", "gcs", "az", "abfs", "abfss", "adl", "hf", "oci", "ocilake", "oss", "tos", "tosfs"]
)
# Filesystems whose `rmdir` refuses a folder that is not empty; others (Arrow's) delete all that is in it.
_KEEPS_FULL_FOLDERS: Final = frozenset({"file", "local", "sftp", "ssh", "ftp", "smb"})
# Filesystems with one connection, on which a thread would take the answers meant for others (paramiko drops them).
_ONE_AT_A_TIME: Final = frozenset({"sftp", "ssh", "ftp"})
# What tells one version of a file from the next, the best first.
_STAMPS: Final = (
    "ETag", "etag", "generation", "md5Hash", "content_md5", "mtime", "LastModified", "last_modified", "created",
)  # fmt: skip

_OURS: Final = frozenset({"deadline_seconds", "client_options", "retry_config", "credential_provider"})
_S3_NAMES: Final = {
    "access_key_id": "key",
    "secret_access_key": "secret",
    "session_token": "token",
    "endpoint": "endpoint_url",
    "default_region": "region",
    "region_name": "region",
    "skip_signature": "anon",
}
# Of obstore's options, those that s3fs has no use for.
_OBSTORE_ONLY: Final = frozenset(
    {
        "allow_http",
        "unsigned_payload",
        "conditional_put",
        "copy_if_not_exists",
        "disable_tagging",
        "checksum_algorithm",
    }
)

_log = logging.getLogger("async_ckpt")

Translated = Callable[..., AbstractContextManager[None]]


class Moment(Protocol):
    """A `datetime`; its module is a clock, and clocks are not imported here."""

    def timestamp(self) -> float: ...


class FsspecStorage:
    """A folder or bucket prefix of a filesystem of fsspec, which is made when it is first needed.

    With `fs`, that filesystem as it is set up; `url` is then a path on it, and `options` but the deadline are not used.
    """

    remote = True

    def __init__(self, url: str, options: Mapping[str, Any] | None = None, *, fs: Any = None) -> None:
        options = dict(options or {})
        if fs is None:
            scheme = scheme_of(url)
            if scheme is None:
                raise ValueError(
                    f"{shown(url)!r} is no URL such as memory://run or sftp://host/run; a chain of filesystems or a "
                    "path on one is taken with fs="
                )
            kind, make = _class_and_maker(scheme, url, options)
        else:
            if getattr(fs, "asynchronous", False):
                raise ValueError("fs= must be made with asynchronous=False: it is called from threads")
            kind, make = type(fs), lambda: fs
            scheme = fs.protocol if isinstance(fs.protocol, str) else fs.protocol[0]
        root = (kind if fs is None else fs)._strip_protocol(url).rstrip("/")
        self._url = shown(url if scheme_of(url) else f"{scheme}://{root}")
        self._secrets = _secrets_in(url, options, getattr(fs, "storage_options", {}))
        filesystem = self._filesystem = _OncePerProcess(make, one_at_a_time=scheme in _ONE_AT_A_TIME)
        self._place: _Bucket | _Files
        if hasattr(kind, "call_s3"):
            if not root or root.startswith("/"):
                raise ValueError(f"{shown(url)} names no bucket; write s3://bucket/prefix")
            self._place = _Bucket(
                filesystem, root, float(options.get("deadline_seconds") or DEADLINE_SECONDS)
            )
        else:
            self._place = _Files(filesystem, root, scheme)
        self.in_order = self._place.in_order
        self._said: set[str] = set()

    def __repr__(self) -> str:
        return f"<FsspecStorage {self._url}>"

    def locate(self, path: str) -> str:
        return f"{self._url}{'' if self._url.endswith('/') else '/'}{path}" if path else self._url

    def part_segments(self, num_bytes: int, segment_bytes: int) -> int:
        return self._place.part_segments(num_bytes, segment_bytes)

    def create(
        self,
        path: str,
        *,
        num_bytes: int,
        segment_bytes: int,
        max_segments: int | None = None,  # noqa: ARG002
    ) -> MultipartSink | AppendingSink:
        name, translated = self._place.name(path), partial(self._translated, path, num_bytes=num_bytes)
        if isinstance(self._place, _Bucket):
            return MultipartSink(self._place, name, num_bytes, segment_bytes, self.locate(path), translated)
        return AppendingSink(self._place, name, num_bytes, self.locate(path), translated)

    def open(self, path: str) -> FsspecReader:
        with self._translated(path, passing=(FileNotFoundError,)):
            return FsspecReader(
                self._place, self._place.name(path), self.locate(path), partial(self._translated, path)
            )

    def read(self, path: str) -> tuple[bytes, str]:
        with self._translated(path, passing=(FileNotFoundError,)):
            return self._place.read(self._place.name(path))

    def put_new(self, path: str, data: bytes) -> None:
        name = self._place.name(path)
        with self._translated(path, passing=(FileExistsError,)):
            if self._place.creates_exclusively():
                self._place.put(name, data, create=True)
                return
            self._say_once("create-only puts, so two writers could commit the same step")
            with _turn(self._url):
                if self.exists(path):
                    raise FileExistsError(f"{self.locate(path)} exists already")
                self._place.put(name, data)

    def replace(self, path: str, data: bytes, *, version: str | None = None) -> None:
        name = self._place.name(path)
        with self._translated(path, passing=(FileExistsError,)):
            if version is None or self._place.replaces_by_version():
                self._place.put(name, data, version=version)
                return
            self._say_once("puts that replace one version only, so two writers could overwrite each other")
            with _turn(self._url):
                try:
                    found = self._place.read(name)[1]
                except FileNotFoundError:
                    found = None
                if found != version:
                    raise FileExistsError(f"{self.locate(path)} was replaced by another writer")
                self._place.put(name, data)

    def move(self, path: str, to: str) -> None:
        with self._translated(path, passing=(FileNotFoundError,)):
            self._place.move(self._place.name(path), self._place.name(to))

    def delete(self, path: str) -> None:
        with self._translated(path):
            self._place.delete(self._place.name(path))

    def names(self, folder: str) -> list[str]:
        with self._translated(folder):
            return sorted(self._place.names(self._place.name(folder)))

    def exists(self, path: str) -> bool:
        with self._translated(path):
            try:
                self._place.info(self._place.name(path))
            except (FileNotFoundError, NotADirectoryError):
                return False
            except IsADirectoryError:
                return True
            return True

    def existing(self, paths: Sequence[str]) -> list[str]:
        if len(paths) < 2:
            return [path for path in paths if self.exists(path)]
        found: set[str] = set()

        def look(path: str) -> None:
            if self.exists(path):
                found.add(path)

        crew = Crew("look", min(_NUM_LOOKERS, len(paths)))
        try:
            crew.run_all(partial(look, path) for path in paths)
        finally:
            crew.stop()
        return [path for path in paths if path in found]

    def sweep(
        self, folder: str, names: list[str], *, delete: bool = False, decided: bool = False
    ) -> list[str]:
        if not decided or not names:
            return []
        paths = {name: f"{folder}/{name}" if folder else name for name in names}
        try:
            with self._translated(folder):
                now = self._place.now().timestamp()
                dead = [name for name in names if now - self._modified(paths[name], now) > ORPHAN_SECONDS]
        except StorageUnavailableError as error:  # without the store's clock nothing is proved
            _log.debug("nothing was swept: %s", error)
            return []
        if delete:
            for name in dead:
                self.delete(paths[name])
        return dead

    def _modified(self, path: str, otherwise: float) -> float:
        try:
            return self._place.modified(self._place.name(path)).timestamp()
        except FileNotFoundError:  # somebody else has swept it
            return otherwise

    def sweep_uploads(self) -> list[str]:
        if not isinstance(self._place, _Bucket):
            return []
        try:
            with self._translated(""):
                bucket, prefix = self._place.where(self._place.name(""))
                before = self._place.now().timestamp() - ORPHAN_SECONDS
                return self._place.abort_uploads(bucket, prefix and f"{prefix}/", before)
        except StorageUnavailableError as error:
            self._say_once(
                "a way to find unfinished uploads, so give the bucket a lifecycle rule that aborts them "
                f"(AbortIncompleteMultipartUpload): {error}"
            )
            return []

    def _say_once(self, what: str) -> None:
        if what not in self._said and not self._place.alone:
            self._said.add(what)
            _log.warning("%s has no %s", self._url, what)

    @contextmanager
    def _translated(
        self, path: str, *, num_bytes: int = 0, passing: tuple[type[Exception], ...] = ()
    ) -> Iterator[None]:
        """All foreign calls are made in here. Foreign errors become ours; only what the caller handles itself passes."""
        try:
            with self._filesystem.turn():
                yield
        except Exception as error:
            if isinstance(error, (*passing, CheckpointError)):
                raise
            where, reason = self.locate(path), self._scrubbed(error)
            clean = not any(secret in str(e) for e in _chain(error) for secret in self._secrets)
            cause = error if clean else OSError(f"{type(error).__name__}: {reason}")
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise StorageFullError(
                    f"{where}: {num_bytes:,} bytes needed, less free; delete old steps or lower keep_last, then save again",
                    path=where,
                    needed_bytes=num_bytes,
                    free_bytes=None,
                ) from cause
            raise StorageUnavailableError(f"{where}: {reason}; {_advice(error)}", path=where) from cause

    def _scrubbed(self, error: BaseException) -> str:
        text = (isinstance(error, OSError) and error.strerror) or str(error) or type(error).__name__
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return text.strip().rstrip(".")[:300]


def abort_stale_uploads(
    bucket: str, prefix: str, *, older_than: Moment, options: Mapping[str, Any] | None
) -> list[str]:
    """Abort the unfinished multipart uploads of keys that begin with `prefix`, begun before `older_than`; their keys."""
    storage = FsspecStorage(f"s3://{bucket}", options)
    with storage._translated(prefix):
        assert isinstance(storage._place, _Bucket)
        return storage._place.abort_uploads(bucket, prefix, older_than.timestamp())


# --- the write side -------------------------------------------------------------------------------------------


class _HoldingSink:
    """What both sinks share: segments that came and are not sent yet, and the one error that ends it all."""

    num_retries = 0
    retryable = False  # what was sent is not kept

    def __init__(self, num_bytes: int, shown_as: str, translated: Translated) -> None:
        self._num_bytes = num_bytes
        self._shown_as = shown_as
        self._translated = translated
        self._lock = threading.Lock()
        self._held: dict[int, tuple[memoryview, Held]] = {}  # by offset; under _lock, like all below
        self._error: BaseException | None = None
        self._finished = False

    def _hold(self, offset: int, data: memoryview, lease: Held) -> None:
        lease.retain()
        with self._lock:
            error = self._error
            if error is None:
                self._held[offset] = data, lease
        if error is not None:
            lease.release()
            raise error

    def _give_up(self, error: BaseException) -> None:
        """Nothing more is taken, and nothing is held."""
        with self._lock:
            self._error = self._error or error
            held, self._held = self._held, {}
        for _, lease in held.values():
            lease.release()

    def _check_size(self, num_bytes: int | None) -> None:
        if num_bytes != self._num_bytes:
            raise OSError(
                errno.EIO, f"acknowledged and lost: {num_bytes} bytes are there of {self._num_bytes}"
            )

    def _discard(self) -> None:
        raise NotImplementedError

    def abort(self) -> None:
        self._give_up(StorageUnavailableError(f"{self._shown_as} was given up", path=self._shown_as))
        if not self._finished:
            with suppress(CheckpointError), self._translated():  # what cannot be undone now is swept later
                self._discard()

    def close(self) -> None:
        self._give_up(StorageUnavailableError(f"{self._shown_as} is closed", path=self._shown_as))

    def relieve(self) -> bool:
        return False


class MultipartSink(_HoldingSink):
    """One object of a bucket, in parts that whoever brings a part's last segment uploads at once, from its memory."""

    def __init__(
        self,
        bucket: _Bucket,
        name: str,
        num_bytes: int,
        segment_bytes: int,
        shown_as: str,
        translated: Translated,
    ) -> None:
        super().__init__(num_bytes, shown_as, translated)
        self._bucket = bucket
        self._name = name
        self._segment_bytes = segment_bytes
        self._part_bytes = bucket.part_segments(num_bytes, segment_bytes) * segment_bytes
        self._num_parts = -(-num_bytes // self._part_bytes)
        self._parts: dict[int, dict[str, Any]] = {}  # what the store said of each part; under _lock
        self._upload: str | None = None  # under _beginning, which is held while the store is asked for it
        self._told_again: tuple[str, ...] = ()  # of what it says of a part, what it wants to hear at the end
        self._beginning = threading.Lock()

    def write(self, offset: int, data: memoryview, lease: Held) -> None:
        self._hold(offset, data, lease)
        number = offset // self._part_bytes
        if self._num_parts == 1:
            return  # one put would make it visible: `finish` does that
        segments = self._take(number)
        if segments:
            self._send(number, segments)

    def _take(self, number: int) -> list[tuple[memoryview, Held]]:
        """The segments of a part in order, when all are there."""
        begin = number * self._part_bytes
        offsets = range(begin, min(begin + self._part_bytes, self._num_bytes), self._segment_bytes)
        with self._lock:
            if not all(offset in self._held for offset in offsets):
                return []
            return [self._held.pop(offset) for offset in offsets]

    def _send(self, number: int, segments: list[tuple[memoryview, Held]]) -> None:
        body = _Body([view for view, _ in segments])
        try:
            with self._translated():
                said = self._bucket.call(
                    "upload_part", self._name, UploadId=self._begun(), PartNumber=number + 1, Body=body
                )
            part = {key: said[key] for key in self._told_again if key in said}
            with self._lock:
                self._parts[number] = {"PartNumber": number + 1, **part}
                self.num_retries += said["ResponseMetadata"].get("RetryAttempts", 0)
        except BaseException as error:
            self._give_up(error)
            raise
        finally:
            body.close()
            for _, lease in segments:
                lease.release()

    def _begun(self) -> str:
        with self._beginning:
            if self._upload is None:
                begun = self._bucket.call("create_multipart_upload", self._name)
                self._upload = str(begun["UploadId"])
                # A checksum of each part belongs to the end only where the upload was begun with that kind.
                self._told_again = ("ETag", f"Checksum{begun.get('ChecksumAlgorithm')}")
            return self._upload

    def finish(self) -> None:
        with self._translated():
            if self._num_parts == 1:
                self._put_whole()
            else:
                self._complete()
            try:
                found = self._bucket.info(self._name)
            except FileNotFoundError:
                found = Info(0, "")
            # An e-tag would say more, but not all stores (rclone) tell the same one twice.
            self._check_size(found.num_bytes)
        self._finished = True

    def _put_whole(self) -> None:
        segments = self._take(0)
        body = _Body([view for view, _ in segments])
        try:
            if not segments:
                raise OSError(errno.EIO, f"not all of {self._num_bytes} bytes arrived")
            self._bucket.call("put_object", self._name, Body=body)
        except BaseException as error:
            self._give_up(error)
            raise
        finally:
            body.close()
            for _, lease in segments:
                lease.release()

    def _complete(self) -> None:
        parts = [self._parts[number] for number in sorted(self._parts)]
        if len(parts) != self._num_parts:
            raise OSError(errno.EIO, f"{len(parts)} parts arrived of {self._num_parts}")
        try:
            self._bucket.call(
                "complete_multipart_upload",
                self._name,
                UploadId=self._upload,
                MultipartUpload={"Parts": parts},
            )
        except FileNotFoundError as error:
            # A first answer may have been lost on its way: then it is complete, and its e-tag follows from its parts'.
            if "NoSuchUpload" not in _words(error) or self._bucket.info(self._name).version != _etag_of(
                parts
            ):
                raise

    def _discard(self) -> None:
        if self._upload is not None:
            self._bucket.call("abort_multipart_upload", self._name, UploadId=self._upload)

    def __repr__(self) -> str:
        sent = f"{len(self._parts)} of {self._num_parts} parts"
        return f"<MultipartSink {self._shown_as} {sent}{', finished' if self._finished else ''}>"


def _etag_of(parts: list[dict[str, Any]]) -> str:
    """The e-tag of an object of these parts, where the store's are MD5."""
    digests = bytes.fromhex("".join(part["ETag"].strip('"') for part in parts))
    return f'"{hashlib.md5(digests, usedforsecurity=False).hexdigest()}-{len(parts)}"'


class AppendingSink(_HoldingSink):
    """One file, written from front to back by one thread at a time; what comes early is held.

    Whoever brings a segment while another thread is writing leaves it to that one, so nobody waits for a segment.
    """

    def __init__(
        self, files: _Files, name: str, num_bytes: int, shown_as: str, translated: Translated
    ) -> None:
        super().__init__(num_bytes, shown_as, translated)
        self._files = files
        self._name = name
        self._draft: _Draft | None = None  # the writing thread's
        self._writing = False  # under _lock
        self._next = 0  # offset; under _lock

    def write(self, offset: int, data: memoryview, lease: Held) -> None:
        self._hold(offset, data, lease)
        with self._lock:
            if self._writing:
                return
            self._writing = True
        while (segment := self._take()) is not None:
            view, held = segment
            try:
                with self._translated():
                    self._draft = self._draft or self._files.draft(self._name)
                    self._draft.file.write(view)
            except BaseException as error:
                self._give_up(error)
                raise
            finally:
                held.release()

    def _take(self) -> tuple[memoryview, Held] | None:
        with self._lock:
            segment = self._held.pop(self._next, None)
            self._writing = segment is not None
            if segment is not None:
                self._next += len(segment[0])
            return segment

    def finish(self) -> None:
        with self._translated():
            if self._draft is None or self._next != self._num_bytes:
                raise OSError(errno.EIO, f"{self._next} bytes arrived of {self._num_bytes}")
            self._draft.commit()
            self._check_size(self._files.info(self._name).num_bytes)
        self._finished = True

    def _discard(self) -> None:
        if self._draft is not None:
            self._draft.discard()

    def __repr__(self) -> str:
        done = ", finished" if self._finished else ""
        return f"<AppendingSink {self._shown_as} {self._next:,} of {self._num_bytes:,} bytes{done}>"


class _Body:
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


# --- the read side --------------------------------------------------------------------------------------------


class Info(NamedTuple):
    """What a store says of an object."""

    num_bytes: int
    version: str


class _ReplacedError(Exception):
    pass


class FsspecReader:
    """One object, read by ranges, as long as it is the one that was opened."""

    def __init__(self, place: _Bucket | _Files, name: str, shown_as: str, translated: Translated) -> None:
        self._place = place
        self._name = name
        self._shown_as = shown_as
        self._translated = translated
        self._info = place.info(name)
        self.num_bytes = self._info.num_bytes

    def read_into(self, offset: int, target: memoryview) -> None:
        wanted = target[: max(0, self.num_bytes - offset)]
        try:
            if wanted:
                with self._translated(passing=(_ReplacedError, FileNotFoundError)):
                    self._place.fetch(self._name, offset, wanted, self._info.version)
        except (_ReplacedError, FileNotFoundError) as error:
            raise StorageUnavailableError(
                f"{self._shown_as} was replaced or deleted while it was being read; load it again",
                path=self._shown_as,
            ) from error
        if len(wanted) < len(target):
            raise EOFError(f"{self._shown_as} ends at byte {self.num_bytes}")

    def close(self) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


# --- the places: full names, and foreign errors ---------------------------------------------------------------


class _Bucket:
    """Objects of S3, by s3fs's requests: no listing, guess or copy of its file interface is in between."""

    in_order = False
    alone = False

    def __init__(self, filesystem: _OncePerProcess, root: str, deadline_seconds: float) -> None:
        self._filesystem = filesystem
        self._root = root
        self._deadline_seconds = deadline_seconds
        self._seen = False  # that there is such a bucket
        self._conditional: bool | None = None  # whether it heeds conditions on a put

    def name(self, path: str) -> str:
        name = f"{self._root}/{path}" if path else self._root
        if len(name.partition("/")[2].encode()) > _MAX_KEY_BYTES:
            raise StorageUnavailableError(
                f"s3://{name:.200}…: no key may be longer than {_MAX_KEY_BYTES:,} bytes; shorten it",
                path=name,
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
            if "NoSuchBucket" in _words(error):
                raise _NoBucketError(errno.ENXIO, f"bucket {bucket} does not exist") from error
            raise

    def info(self, name: str) -> Info:
        try:
            said = self.call("head_object", name)
        except FileNotFoundError:  # which does not say what is missing
            self._require_bucket(name)
            raise
        return Info(said["ContentLength"], said["ETag"])

    def _require_bucket(self, name: str) -> None:
        if self._seen:
            return
        try:
            self.call("head_bucket", name)
        except FileNotFoundError:
            raise _NoBucketError(errno.ENXIO, f"bucket {self.where(name)[0]} does not exist") from None
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
            if _words(error) & _REFUSED:
                raise _ReplacedError from error
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
                self.call("put_object", name, Body=_Body([memoryview(data)]), **condition)
                return
            except OSError as error:
                words = _words(error)
                if tries_left and words & _CONFLICT:  # another conditional put is being decided
                    continue
                gone = version is not None and isinstance(error, FileNotFoundError)
                if not (condition and words & _REFUSED) and not gone:
                    raise
                if create and _was_repeated(error) and self.read(name)[0] == data:
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

    replaces_by_version = creates_exclusively

    def _refuses(self, probe: str, **condition: Any) -> bool:
        try:
            self.put(probe, b"", **condition)
        except FileExistsError:
            return True
        except OSError as error:
            if not _words(error) & _NO_SUCH_CALL:
                raise
        return False

    def move(self, name: str, to: str) -> None:
        bucket, key = self.where(name)
        self.call("copy_object", to, CopySource={"Bucket": bucket, "Key": key})
        self.delete(name)

    def delete(self, name: str) -> None:
        self.call("delete_object", name)

    def names(self, folder: str) -> set[str]:
        key = self.where(folder)[1]
        prefix = key and f"{key}/"
        found: set[str] = set()
        for page in self._pages("list_objects_v2", folder, Prefix=prefix, Delimiter="/"):
            found.update(entry["Key"][len(prefix) :] for entry in page.get("Contents", ()))
            found.update(entry["Prefix"][len(prefix) : -1] for entry in page.get("CommonPrefixes", ()))
        return found - {""}

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

    def abort_uploads(self, bucket: str, prefix: str, before: float) -> list[str]:
        """Abort uploads of keys that begin so, begun before this time of the store; their keys."""
        stale = [
            (upload["Key"], upload["UploadId"])
            for page in self._pages("list_multipart_uploads", bucket, Prefix=prefix)
            for upload in page.get("Uploads", ())
            if upload["Key"].startswith(prefix) and upload["Initiated"].timestamp() < before
        ]
        for key, upload_id in stale:
            with suppress(FileNotFoundError):  # it has ended by itself
                self.call("abort_multipart_upload", f"{bucket}/{key}", UploadId=upload_id)
        return [key for key, _ in stale]


class _Files:
    """Files of any filesystem of fsspec."""

    in_order = True

    def __init__(self, filesystem: _OncePerProcess, root: str, protocol: str) -> None:
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
            raise _ReplacedError
        target[:] = data

    def draft(self, name: str) -> _Draft:
        return _Draft(self, self._filesystem(), name)

    def put(self, name: str, data: bytes, *, create: bool = False, version: str | None = None) -> None:
        assert version is None, "only a bucket compares versions"
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

    def replaces_by_version(self) -> bool:
        return False

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
        """Remove the folder of a name that is no longer there, if it is empty."""
        folder = name.rpartition("/")[0]
        if self._keeps_full_folders and folder != self._root:
            with suppress(Exception):  # not empty, which is the usual case, or already gone
                self._filesystem().rmdir(folder)

    def names(self, folder: str) -> set[str]:
        fs = self._filesystem()
        fs.invalidate_cache(folder)
        try:
            found = [entry.rstrip("/") for entry in fs.ls(folder or "/", detail=False)]
        except (FileNotFoundError, NotADirectoryError):
            return set()
        return {entry.rpartition("/")[2] for entry in found if entry != folder}

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


class _Draft:
    """A file that is being written: under a temp name, or out of sight where the filesystem does that itself."""

    def __init__(self, files: _Files, fs: Any, name: str) -> None:
        self._files = files
        self._fs = fs
        self._name = name
        self._temp: str | None = None
        if files.objects:
            self.file = _uncommitted(fs, name)
            return
        folder, _, last = name.rpartition("/")
        self._temp = f"{folder}/{_temp_stem(last)}{os.urandom(4).hex()}{TEMP_SUFFIX}"
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


# --- set-up ---------------------------------------------------------------------------------------------------


class _OncePerProcess:
    """A filesystem that is made when it is first called for; a forked child makes its own."""

    def __init__(self, make: Callable[[], Any], *, one_at_a_time: bool) -> None:
        self._make = make
        self._one_at_a_time = one_at_a_time
        self._begin()

    def _begin(self) -> None:
        self._pid, self._made = os.getpid(), None
        # Both are held over calls: whoever waits needs what is being made, or the connection that is in use.
        self._making, self._using = threading.Lock(), threading.RLock()

    def __call__(self) -> Any:
        if os.getpid() != self._pid:  # connections and event loop are the parent's
            self._begin()
        with self._making:
            self._made = self._made or self._make()
            return self._made

    def turn(self) -> AbstractContextManager[Any]:
        """To be held while it is used."""
        if os.getpid() != self._pid:
            self._begin()
        return self._using if self._one_at_a_time else nullcontext()


def _class_and_maker(scheme: str, url: str, options: Mapping[str, Any]) -> tuple[Any, Callable[[], Any]]:
    """The class for a scheme, and what makes its filesystem: not shared with others, and without kept listings."""
    kind = _class_of(scheme)
    if hasattr(kind, "call_s3"):
        given = _for_s3fs(options, known=set(inspect.signature(kind.__init__).parameters))
    else:
        given = {key: value for key, value in options.items() if key not in _OURS}
        given = {**kind._get_kwargs_from_urls(url), **given}

    def make() -> Any:
        provider = options.get("credential_provider") if hasattr(kind, "call_s3") else None
        fs = kind(**given, **(_credentials(provider) if provider else {}), skip_instance_cache=True)
        fs.dircache.use_listings_cache = False  # an option of most constructors, and an error for others
        return fs

    return kind, make


def _class_of(scheme: str) -> Any:
    try:
        from fsspec import available_protocols, get_filesystem_class
    except ImportError as error:
        raise ImportError(f'{scheme}:// needs fsspec: pip install "async_ckpt[fsspec]"') from error
    try:
        return get_filesystem_class(scheme)
    except ValueError:
        known = ", ".join(sorted(available_protocols()))
        raise ValueError(
            f"{scheme}:// is no place that is known; there are local paths and, each by its own package, {known}"
        ) from None
    except ImportError as error:
        missing = next((e.name for e in _chain(error) if isinstance(e, ImportError) and e.name), "")
        package = '"async_ckpt[fsspec]"' if scheme in ("s3", "s3a") else missing.partition(".")[0]
        raise ImportError(
            f"{scheme}:// needs a package that is missing ({error}): pip install {package}"
        ) from error


def _for_s3fs(options: Mapping[str, Any], known: set[str]) -> dict[str, Any]:
    """Options by s3fs's names, from those or obstore's. Raises ValueError for what neither knows."""
    given: dict[str, Any] = {}
    for name, value in options.items():
        name = name.lower().removeprefix("aws_")
        name = _S3_NAMES.get(name, name)
        if name == "region":
            name, value = "client_kwargs", {"region_name": value}
        elif name == "virtual_hosted_style_request":
            name, value = (
                "config_kwargs",
                {"s3": {"addressing_style": "virtual" if _is_true(value) else "path"}},
            )
        if name in ("client_kwargs", "config_kwargs"):
            given[name] = {**given.get(name, {}), **value}
        elif name == "anon":
            given["anon"] = _is_true(value)
        elif name in known or name == "profile":
            given[name] = value
        elif name not in _OURS | _OBSTORE_ONLY:
            raise ValueError(f"storage_options has {name!r}, which is no option of s3fs or obstore")
    return given


def _is_true(value: object) -> bool:
    return str(value).lower() in ("true", "1", "yes", "on")


def _credentials(provider: Callable[[], Any]) -> dict[str, Any]:
    """What a credential provider of obstore says now. s3fs is told once: for keys that expire give it a `session`."""
    from fsspec.asyn import get_loop, sync

    said = provider()
    if inspect.isawaitable(said):
        awaited = said

        async def wait() -> Any:
            return await awaited

        said = sync(get_loop(), wait)
    return {"key": said["access_key_id"], "secret": said["secret_access_key"], "token": said.get("token")}


_turns: dict[tuple[int, str], threading.Lock] = {}


def _turn(url: str) -> threading.Lock:
    """For places without conditional writes: at least this process's writers of a root take turns.

    Held over the write, which is what the others wait for; a hung place holds up nobody but its own writers.
    """
    return _turns.setdefault((os.getpid(), url), threading.Lock())


# --- errors ---------------------------------------------------------------------------------------------------


class _NoBucketError(OSError):
    pass


_REFUSED: Final = frozenset({"PreconditionFailed", "412"})
_CONFLICT: Final = frozenset({"ConditionalRequestConflict", "OperationAborted", "409"})
_NO_SUCH_CALL: Final = frozenset({"NotImplemented", "501", "InvalidArgument", "InvalidRequest", "400", "405"})

# By what an error or one of its causes is called, in S3's codes and in Python's classes: what to do about it.
_ADVICE: Final = {
    "_NoBucketError": "create it, or correct the URL",
    "NoCredentialsError PartialCredentialsError CredentialRetrievalError ProfileNotFound": (
        "give AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, a profile or storage_options; for a public bucket "
        'storage_options={"skip_signature": True}'
    ),
    "ExpiredToken ExpiredTokenException TokenRefreshRequired": "the credentials have expired; renew them",
    "InvalidAccessKeyId SignatureDoesNotMatch InvalidToken AuthenticationException": "correct the credentials",
    "RequestTimeTooSkewed": "this machine's clock is wrong; set it (NTP)",
    "PermanentRedirect 301 AuthorizationHeaderMalformed IllegalLocationConstraintException": (
        'the bucket is in another region; give it in storage_options={"region": ...}'
    ),
    "PermissionError AccessDenied 403": "make sure that one may read, write, list and delete there",
    "EndpointConnectionError ConnectTimeoutError ReadTimeoutError HTTPClientError ClientConnectionError "
    "ConnectionError ConnectionRefusedError ConnectionResetError FSTimeoutError TimeoutError NoValidConnectionsError gaierror": (
        "make sure that the endpoint is right and the network is up"
    ),
}


def _advice(error: BaseException) -> str:
    words = _words(error)
    otherwise = "make sure that the place is there, may be written to and is healthy"
    return next((advice for names, advice in _ADVICE.items() if words & set(names.split())), otherwise)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    for _ in range(10):
        if error is None:
            return
        yield error
        error = error.__cause__ or error.__context__


def _words(error: BaseException) -> set[str]:
    """What an error and its causes are called: their classes, and the codes that a store gave."""
    found = set()
    for one in _chain(error):
        found.add(type(one).__name__)
        found.add(str(_answer(one).get("Error", {}).get("Code")))
    return found


def _was_repeated(error: BaseException) -> bool:
    return any(_answer(one).get("ResponseMetadata", {}).get("RetryAttempts") for one in _chain(error))


def _answer(error: BaseException) -> Mapping[str, Any]:
    answer = getattr(error, "response", None)
    return answer if isinstance(answer, Mapping) else {}


def _secrets_in(url: str, *options: Mapping[str, Any]) -> tuple[str, ...]:
    """Texts that nobody may read in a message, the longest first."""
    found = {os.environ.get(name, "") for name in _SECRET_VARIABLES}
    password = urlsplit(url).password
    found |= {password or "", unquote(password or "")}
    todo = list(options)
    while todo:
        for name, value in todo.pop().items():
            if isinstance(value, Mapping):
                todo.append(value)
            elif isinstance(value, str) and _SECRET_NAME.search(name):
                found.add(value)
    return tuple(sorted(found - {""}, key=len, reverse=True))


_SECRET_VARIABLES: Final = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
_SECRET_NAME: Final = re.compile(
    r"key|secret|token|pass|credential|sas|signature|connection_string", re.IGNORECASE
)
