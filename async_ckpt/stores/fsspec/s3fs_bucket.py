"""A bucket of s3fs: objects that appear whole.

In: a filesystem of s3fs. Out: the small objects of a storage, and requests. Knows nothing of: archives.
"""

from __future__ import annotations

import errno
import math
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from email.utils import parsedate_to_datetime
from functools import partial
from typing import IO, Any, Final

from ...errors import StorageUnavailableError
from ...plumbing import spec, store_facts
from ..conditions import Conditions, Form
from ..proven.range_reader import Info, NoRangesError, ReplacedError
from .error_advice import CONFLICT, NO_SUCH_CALL, REFUSED, NoBucketError, codes_of, was_repeated
from .setup import OncePerProcess

_CONFLICT_TRIES: Final = 4
_PARTIAL: Final = 206  # the HTTP status of a response with a part of an object
# Parameters of the request for the next page of a listing.
_MARKERS: Final = ("ContinuationToken", "KeyMarker", "UploadIdMarker")
# The limit of S3 for one request.
_MAX_DELETED: Final = 1000
# A body is sent in copies of this size: a join of less than 1 MiB keeps the GIL, so no slice is torn.
_SLICE_BYTES: Final = 256 * spec.KIB


class Body:
    """The body of a request, not copied as a whole: a file for botocore, which hashes it, and slices for aiohttp.

    Abandoned requests may still read the body after its memory was released; after `close`, they read no bytes.
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


class Bucket:
    """Objects of S3, by the requests of s3fs, without its file interface and its cached listings.

    FsspecStorage creates and owns it. Thread-safe.
    """

    in_order = False
    alone = False

    def __init__(self, filesystem: OncePerProcess, root: str, deadline_seconds: float) -> None:
        self._filesystem = filesystem
        self._root = root
        self._deadline_seconds = deadline_seconds
        self._has_bucket = False  # the bucket is known to exist
        self._conditions = Conditions(
            self._put_if,
            lambda name: self.info(name).version,
            self._probe,
            lambda error: bool(codes_of(error) & NO_SUCH_CALL),
        )
        self.creates_exclusively = self._conditions.are_obeyed

    def name(self, path: str) -> str:
        name = f"{self._root}/{path}" if path else self._root
        if len(name.partition("/")[2].encode()) > store_facts.MAX_KEY_BYTES:
            raise StorageUnavailableError(
                f"s3://{name:.200}…: no key may be longer than {store_facts.MAX_KEY_BYTES:,} bytes; shorten it",
                path=f"s3://{name}",
            )
        return name

    def part_segments(self, num_bytes: int, segment_bytes: int) -> int:
        return store_facts.part_segments(num_bytes, segment_bytes)

    def split(self, name: str) -> tuple[str, str]:
        bucket, key, _ = self._filesystem().split_path(name)
        return bucket, key

    def call(self, method: str, name: str, **parameters: Any) -> Any:
        """Make a request, which s3fs repeats if that may help. Parameters that the method does not have are dropped."""
        return self._await(lambda request: request(method), name, **parameters)

    def _await(self, requests: Callable[[Callable[..., Any]], Awaitable[Any]], name: str, **parameters: Any) -> Any:
        """Run a coroutine function that makes requests, on the loop of s3fs, within the deadline."""
        from fsspec.asyn import sync  # type: ignore[import-untyped]

        fs = self._filesystem()
        bucket, key = self.split(name)
        request = partial(fs._call_s3, Bucket=bucket, Key=key, **parameters)
        try:
            return sync(fs.loop, requests, request, timeout=self._deadline_seconds)
        except FileNotFoundError as error:
            if "NoSuchBucket" in codes_of(error):
                raise NoBucketError(errno.ENXIO, f"bucket {bucket} does not exist") from error
            raise

    def info(self, name: str) -> Info:
        try:
            response = self.call("head_object", name)
        except FileNotFoundError:  # the object or the bucket is missing
            self._require_bucket(name)
            raise
        except OSError:  # the response to a HEAD has no body and so no reason; the response to a listing has one
            bucket, key = self.split(name)
            self.call("list_objects_v2", bucket, Prefix=key, MaxKeys=1)
            raise
        return Info(response["ContentLength"], response["ETag"])

    def _require_bucket(self, name: str) -> None:
        if self._has_bucket:
            return
        try:
            self.call("head_bucket", name)
        except FileNotFoundError:
            raise NoBucketError(errno.ENXIO, f"bucket {self.split(name)[0]} does not exist") from None
        except PermissionError:
            pass  # the bucket exists, but access to it is denied
        self._has_bucket = True

    def read(self, name: str) -> tuple[bytes, str]:
        data, version = self._get(name, None)
        return bytes(data), version

    def fetch(self, name: str, offset: int, target: memoryview, version: str) -> None:
        try:
            self._get(name, target, Range=f"bytes={offset}-{offset + len(target) - 1}", IfMatch=version)
        except OSError as error:
            if codes_of(error) & REFUSED:
                raise ReplacedError from error
            raise

    def _get(self, name: str, target: memoryview | None, **conditions: Any) -> tuple[memoryview, str]:
        """Get an object, and receive its body into `target`. s3fs repeats failed requests, but not failed bodies."""
        from fsspec.exceptions import FSTimeoutError  # type: ignore[import-untyped]
        from s3fs.core import S3_RETRYABLE_ERRORS  # type: ignore[import-untyped]

        async def get(request: Callable[..., Any]) -> tuple[memoryview, str]:
            response = await request("get_object")
            is_partial = response["ResponseMetadata"]["HTTPStatusCode"] == _PARTIAL
            if target is not None and not (is_partial and response["ContentLength"] == len(target)):
                response["Body"].close()
                raise NoRangesError
            view = memoryview(bytearray(response["ContentLength"])) if target is None else target
            at = 0
            async with response["Body"] as body:
                while chunk := await body.read(_SLICE_BYTES):
                    view[at : at + len(chunk)] = chunk
                    at += len(chunk)
            return view, response["ETag"]

        for tries_left in reversed(range(self._filesystem().retries)):
            try:
                return self._await(get, name, **conditions)  # type: ignore[no-any-return]
            except S3_RETRYABLE_ERRORS as error:
                if not tries_left or isinstance(error, FSTimeoutError):
                    raise
        raise AssertionError("the last try returns or raises")

    def fetch_whole(self, name: str, version: str, file: IO[bytes]) -> None:
        """Write an object to a file."""

        async def get(request: Callable[..., Any]) -> str:
            response = await request("get_object")
            async with response["Body"] as body:
                while chunk := await body.read(_SLICE_BYTES):
                    file.write(chunk)
            return str(response["ETag"])

        if self._await(get, name) != version:
            raise ReplacedError

    def put(self, name: str, data: bytes, *, create: bool = False, version: str | None = None) -> None:
        condition = {"IfNoneMatch": "*"} if create else {"IfMatch": version} if version else {}
        for tries_left in reversed(range(_CONFLICT_TRIES)):
            try:
                self.call("put_object", name, Body=Body([memoryview(data)]), **condition)
                return
            except OSError as error:
                codes = codes_of(error)
                if tries_left and codes & CONFLICT:  # another conditional put is in progress
                    continue
                is_gone = version is not None and isinstance(error, FileNotFoundError)
                if not (condition and codes & REFUSED) and not is_gone:
                    raise
                if create and was_repeated(error) and self.read(name)[0] == data:
                    return  # the first try has written it, and the response was lost
                raise FileExistsError(errno.EEXIST, f"{name} was written by another writer") from error

    @contextmanager
    def _probe(self) -> Iterator[str]:
        """A small object that exists within the block."""
        probe = self.name(store_facts.probe_name())
        self.put(probe, b"")
        try:
            yield probe
        finally:
            with suppress(OSError):
                self.delete(probe)

    def replace(self, name: str, data: bytes, version: str) -> bool:
        """Replace one version of an object. Returns False if the store does not obey that condition."""
        return self.creates_exclusively() and bool(self._conditions.replace(name, data, version))

    def _put_if(self, name: str, data: bytes, version: str | None, form: Form) -> bool:
        self.put(name, data, create=version is None, version=None if version is None else form(version))
        return True

    def move(self, name: str, to: str) -> None:
        bucket, key = self.split(name)
        self.call("copy_object", to, CopySource={"Bucket": bucket, "Key": key})
        self.delete(name)

    def delete(self, name: str) -> None:
        self.call("delete_object", name)

    def delete_many(self, names: Sequence[str]) -> bool:
        """Delete objects by as few requests as possible. Returns False if the store could not delete some of them."""
        for at in range(0, len(names), _MAX_DELETED):
            keys = [{"Key": self.split(name)[1]} for name in names[at : at + _MAX_DELETED]]
            response = self.call("delete_objects", names[at], Delete={"Objects": keys, "Quiet": True})
            if response.get("Errors"):
                return False
        return True

    def remove_if_empty(self, folder: str) -> bool:  # noqa: ARG002
        return False  # there are no folders

    def names(self, folder: str) -> set[str]:
        key = self.split(folder)[1]
        prefix = key and f"{key}/"
        names: set[str] = set()
        for page in self._pages("list_objects_v2", folder, Prefix=prefix, Delimiter="/"):
            names.update(entry["Key"][len(prefix) :] for entry in page.get("Contents", ()))
            names.update(entry["Prefix"][len(prefix) : -1] for entry in page.get("CommonPrefixes", ()))
        return names - {""}

    def sizes(self, folder: str) -> dict[str, int]:
        key = self.split(folder)[1]
        prefix = key and f"{key}/"
        return {
            entry["Key"][len(prefix) :]: entry["Size"]
            for page in self._pages("list_objects_v2", folder, Prefix=prefix)
            for entry in page.get("Contents", ())
            if entry["Size"]
            or not entry["Key"].endswith("/")  # an empty object whose name ends in a slash marks a folder
        }

    def tree(self, name: str) -> tuple[list[str], list[str]]:
        """See `FileTree.tree`. A store has no folders."""
        return ["", *(f"/{path}" for path in self.sizes(name))], []

    def _pages(self, method: str, name: str, **parameters: Any) -> Iterator[Any]:
        """The pages of a listing. Raises StorageUnavailableError if a page leads back to an earlier one, or to none."""
        marker: dict[str, Any] = {}
        seen: set[tuple[Any, ...]] = {()}
        while True:
            page = self.call(method, name, **parameters, **marker)
            yield page
            if not page.get("IsTruncated"):
                return
            marker = {key: page[f"Next{key}"] for key in _MARKERS if f"Next{key}" in page}
            if (place := tuple(marker.items())) in seen:
                raise store_facts.endless_listing(f"s3://{name}")
            seen.add(place)

    def now(self) -> float:
        """The time of the store's clock, in seconds since the epoch."""
        response = self.call("list_objects_v2", self._root, Prefix=self.split(self._root)[1], MaxKeys=1)
        return parsedate_to_datetime(response["ResponseMetadata"]["HTTPHeaders"]["date"]).timestamp()

    def modified(self, name: str) -> float:
        return float(self.call("head_object", name)["LastModified"].timestamp())

    def abort_uploads(self, bucket: str, prefix: str, before: float = math.inf, *, exact: bool = False) -> list[str]:
        """Abort uploads begun before `before` to keys with this prefix; if `exact`, to this key. Returns their keys."""
        stale = [
            (upload["Key"], upload["UploadId"])
            for page in self._pages("list_multipart_uploads", bucket, Prefix=prefix)
            for upload in page.get("Uploads", ())
            if upload["Key"].startswith(prefix) and upload["Initiated"].timestamp() < before
            if upload["Key"] == prefix or not exact
        ]
        for key, upload_id in stale:
            with suppress(FileNotFoundError):  # it has ended meanwhile
                self.call("abort_multipart_upload", f"{bucket}/{key}", UploadId=upload_id)
        return [key for key, _ in stale]
