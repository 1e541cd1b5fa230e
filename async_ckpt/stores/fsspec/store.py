"""The storage on filesystems of fsspec: S3 through s3fs, and any other filesystem.

In: segments at offsets, options of fsspec (for S3 also of obstore). Out: objects that appear whole or not at all.
Knows nothing of: what is in the objects.
"""

from __future__ import annotations

import errno
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from threading import TIMEOUT_MAX
from typing import IO, Any

from ...errors import CheckpointError, StorageFullError, StorageUnavailableError
from ...plumbing import Storage, bulk, store_facts, urls, waits
from ..proven.client_facts import identity_of, known_of, known_to
from ..proven.place_proof import prove
from ..proven.range_reader import NoRangesError, RangeReader, ReplacedError
from .error_advice import advice_on, chain, secrets_in
from .file_tree import FileTree
from .s3fs_bucket import Bucket
from .setup import ONE_AT_A_TIME, OncePerProcess, class_and_maker, maker_of, protocol_of, turn
from .sinks import AppendingSink, MultipartSink

_log = logging.getLogger("async_ckpt")


class FsspecStorage(Storage):
    """A folder or bucket prefix on a filesystem of fsspec, which is made at its first use. Thread-safe.

    With `fs`, that filesystem is used as it is set up: `url` is a path on it, and only the deadline in `options`
    counts.
    """

    remote = True

    def __init__(self, url: str, options: Mapping[str, Any] | None = None, *, fs: Any = None) -> None:
        options = dict(options or {})
        if fs is None:
            scheme = urls.scheme_of(url)
            if scheme is None:
                raise ValueError(
                    f"{urls.shown(url)!r} is not a URL such as memory://run or sftp://host/run; pass a chain of "
                    "filesystems, or a path on one, as Place(path, fs=…)"
                )
            url = scheme + url[len(scheme) :]  # filesystems know their schemes only in lower case
            if scheme in ("s3", "s3a"):
                _, bucket, prefix = urls.split_bucket(url)
                url = "/".join(filter(None, (f"{scheme}://{bucket}", prefix)))  # the keys that obstore uses
            kind, make = class_and_maker(scheme, url, options)
        else:
            if getattr(fs, "asynchronous", False):
                raise ValueError("fs= must be made with asynchronous=False: it is called from threads")
            kind, make, scheme = type(fs), maker_of(fs), protocol_of(fs)
        root = (kind if fs is None else fs)._strip_protocol(url).rstrip("/")
        shown, slashes, path = urls.shown(url if urls.scheme_of(url) else f"{scheme}://{root}").partition("://")
        self._url = f"{shown}{slashes}{path.rstrip('/')}"
        self._secrets = secrets_in(url, options, getattr(fs, "storage_options", {}))
        bucket = root.lstrip("/").partition("/")[0]
        identity = identity_of(kind, bucket, kind._get_kwargs_from_urls(url), options)
        self._known = known_of(identity) if fs is None else known_to(fs)
        filesystem = self._filesystem = OncePerProcess(make, one_at_a_time=scheme in ONE_AT_A_TIME)
        self._place: Bucket | FileTree
        self._deletes_many = True  # until the place refuses
        if hasattr(kind, "call_s3"):
            if not root or root.startswith("/"):
                raise ValueError(f"{urls.shown(url)} names no bucket; write s3://bucket/prefix")
            self._place = Bucket(
                filesystem, root, min(float(options.get("deadline_seconds") or waits.OBJECT_SECONDS), TIMEOUT_MAX)
            )
        else:
            self._place = FileTree(filesystem, root, scheme, self._url, self._known)
        self.in_order = self._place.in_order

    def __repr__(self) -> str:
        return f"<FsspecStorage {self._url}>"

    def locate(self, path: str) -> str:
        path = path.partition("?")[0]  # a query may be a signature
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
        exact: bool = True,  # noqa: ARG002
    ) -> MultipartSink | AppendingSink:
        name, translate = self._place.name(path), partial(self._translate_errors, path, num_bytes=num_bytes)
        if isinstance(self._place, Bucket):
            return MultipartSink(self._place, name, num_bytes, segment_bytes, self.locate(path), translate)
        return AppendingSink(self._place, name, num_bytes, self.locate(path), translate)

    def prove(self, *, for_run: bool = False) -> None:
        if not self._place.alone:
            prove(self, self._known, for_run=for_run)

    def open(self, path: str) -> RangeReader:
        place, name = self._place, self._place.name(path)
        with self._translate_errors(path, passing=(FileNotFoundError, IsADirectoryError)):
            info = place.info(name)

        def fetch(offset: int, target: memoryview) -> None:
            with self._read_opened(path):
                place.fetch(name, offset, target, info.version)

        def fetch_whole(file: IO[bytes]) -> None:
            with self._read_opened(path):
                place.fetch_whole(name, info.version, file)

        return RangeReader(info.num_bytes, self.locate(path), self._known, self._url, fetch, fetch_whole)

    @contextmanager
    def _read_opened(self, path: str) -> Iterator[None]:
        """Translate errors of a block that reads an opened object. Raises ReplacedError if the object is missing."""
        try:
            with self._translate_errors(path, passing=(NoRangesError, ReplacedError, FileNotFoundError)):
                yield
        except FileNotFoundError as error:
            raise ReplacedError from error

    def read(self, path: str) -> tuple[bytes, str]:
        with self._translate_errors(path, passing=(FileNotFoundError,)):
            return self._place.read(self._place.name(path))

    def put_new(self, path: str, data: bytes) -> None:
        name = self._place.name(path)
        with self._translate_errors(path, passing=(FileExistsError,)):
            if self._place.creates_exclusively():
                self._place.put(name, data, create=True)
                return
            self._log_lack("create-only puts, so two writers could commit the same step")
            with turn(self._url):
                if self.exists(path):
                    raise FileExistsError(f"{self.locate(path)} exists already")
                self._place.put(name, data)

    def replace(self, path: str, data: bytes, *, version: str | None = None) -> None:
        name = self._place.name(path)
        with self._translate_errors(path, passing=(FileExistsError,)):
            if version is None:
                self._place.put(name, data)
                return
            try:
                if self._place.replace(name, data, version):
                    return
            except FileExistsError:
                # If the object has this content, the first try has written it, and the response was lost.
                if not self._has_content(name, data):
                    raise
                return
            self._log_lack("puts that replace one version only, so two writers could overwrite each other")
            with turn(self._url):
                try:
                    current = self._place.read(name)[1]
                except FileNotFoundError:
                    current = None
                if current != version:
                    raise FileExistsError(f"{self.locate(path)} was replaced by another writer")
                self._place.put(name, data)

    def _has_content(self, name: str, data: bytes) -> bool:
        try:
            return self._place.read(name)[0] == data
        except FileNotFoundError:
            return False

    def move(self, path: str, to: str) -> None:
        with self._translate_errors(path, passing=(FileNotFoundError,)):
            self._place.move(self._place.name(path), self._place.name(to))

    def delete(self, path: str) -> None:
        with self._translate_errors(path):
            self._place.delete(self._place.name(path))

    def delete_many(self, paths: Sequence[str]) -> None:
        if paths and self._deletes_many:
            try:
                with self._translate_errors(paths[0]):
                    self._deletes_many = self._place.delete_many([self._place.name(path) for path in paths])
            except StorageUnavailableError:
                self._deletes_many = False
        if not self._deletes_many:
            bulk.delete(self, paths)

    def delete_all(self, path: str) -> None:
        with self._translate_errors(path):
            files, folders = self._place.tree(self._place.name(path))
        self.delete_many([path + file for file in files])
        for folder in reversed(folders):  # folders that contained no files still exist
            self.remove_if_empty(path + folder)

    def remove_if_empty(self, folder: str) -> bool:
        with suppress(StorageUnavailableError), self._translate_errors(folder):
            return bool(folder) and self._place.remove_if_empty(self._place.name(folder))
        return False

    def names(self, folder: str) -> list[str]:
        with self._translate_errors(folder):
            return sorted(self._place.names(self._place.name(folder)))

    def sizes(self, folder: str) -> dict[str, int]:
        with self._translate_errors(folder):
            sizes = self._place.sizes(self._place.name(folder))
        for path in sizes:
            if any(part in ("", ".", "..") for part in path.split("/")):
                raise urls.unusable_name(
                    self.locate(folder), f"{path!r:.200} has an empty part, or one that is . or .."
                )
        return dict(sorted(sizes.items()))

    def exists(self, path: str) -> bool:
        with self._translate_errors(path):
            try:
                self._place.info(self._place.name(path))
            except (FileNotFoundError, NotADirectoryError):
                return False
            except IsADirectoryError:
                return True
            return True

    def existing(self, paths: Sequence[str]) -> list[str]:
        return bulk.existing(self, paths)

    def sweep(
        self,
        folder: str,
        names: list[str],
        *,
        delete: bool = False,
        decided: bool = False,
        of_ranks: bool = False,  # noqa: ARG002
    ) -> list[str]:
        if not decided or not names:
            return []
        paths = {name: f"{folder}/{name}" if folder else name for name in names}
        dead = []
        try:
            with self._translate_errors(folder):
                limit = self._place.now() - store_facts.ORPHAN_SECONDS
                for name, path in paths.items():
                    with suppress(FileNotFoundError):  # another process has swept it
                        if self._place.modified(self._place.name(path)) < limit:
                            dead.append(name)
        except StorageUnavailableError as error:  # without the store's clock there is no proof
            _log.debug("no leftovers were deleted: %s", error)
            return []
        for name in dead if delete else ():
            self.delete(paths[name])
        return dead

    def sweep_uploads(self) -> list[str]:
        if not isinstance(self._place, Bucket):
            return []
        try:
            with self._translate_errors(""):
                bucket, prefix = self._place.split(self._place.name(""))
                before = self._place.now() - store_facts.ORPHAN_SECONDS
                return self._place.abort_uploads(bucket, prefix and f"{prefix}/", before)
        except StorageUnavailableError as error:
            self._log_lack(
                "way to find unfinished uploads, so give the bucket a lifecycle rule that aborts them "
                f"(AbortIncompleteMultipartUpload): {error}"
            )
            return []

    def _log_lack(self, lack: str) -> None:
        if not self._place.alone:
            self._known.log_once(self._url, f"it has no {lack}")

    @contextmanager
    def _translate_errors(
        self, path: str, *, num_bytes: int = 0, passing: tuple[type[Exception], ...] = ()
    ) -> Iterator[None]:
        """Translate errors of a block with foreign calls. Errors in `passing` keep their type, but show no secrets."""
        try:
            with self._filesystem.turn():
                yield
        except Exception as error:
            if isinstance(error, CheckpointError):
                raise
            secrets = (*self._secrets, *filter(None, [path.partition("?")[2]]))
            shown_path, reason = self.locate(path), _reason_of(error, secrets)
            clean = all(urls.starred(str(e), secrets) == str(e) for e in chain(error))
            if isinstance(error, passing):
                if clean:
                    raise
                raise next(kind for kind in passing if isinstance(error, kind))(reason) from None
            cause = error if clean else OSError(f"{type(error).__name__}: {reason}")
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise StorageFullError(
                    f"{shown_path}: {num_bytes:,} bytes needed, fewer are free; {store_facts.ROOM}",
                    path=shown_path,
                    needed_bytes=num_bytes,
                    free_bytes=None,
                ) from cause
            raise StorageUnavailableError(f"{shown_path}: {reason}; {advice_on(error)}", path=shown_path) from cause


def _reason_of(error: BaseException, secrets: Sequence[str]) -> str:
    text = (isinstance(error, OSError) and error.strerror) or str(error) or type(error).__name__
    return urls.starred(text, secrets).strip().rstrip(".")[:300]


def abort_stale_uploads(
    bucket: str, prefix: str, *, options: Mapping[str, Any] | None, before: float = math.inf, exact: bool = False
) -> list[str]:
    """Abort unfinished uploads, begun before `before`, to keys that begin with `prefix`; if `exact`, to this key only.

    Returns their keys.
    """
    storage = FsspecStorage(f"s3://{bucket}", options)
    with storage._translate_errors(prefix):
        assert isinstance(storage._place, Bucket)
        return storage._place.abort_uploads(bucket, prefix, before, exact=exact)
