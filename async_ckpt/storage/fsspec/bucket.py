"""A bucket, as fsspec sees one: objects that appear whole.

In: an fsspec filesystem of objects. Out: what a storage asks of it. Knows nothing of: archives.
"""

from __future__ import annotations

import errno
import math
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from email.utils import parsedate_to_datetime
from functools import partial
from typing import Any, Final

from ...errors import StorageUnavailableError
from ...spec import KIB
from .. import stores
from ..conditions import Conditions, Form
from .info import Info, Moment, ReplacedError, probe_name
from .refusals import CONFLICT, NO_SUCH_CALL, REFUSED, NoBucketError, codes_of, was_repeated
from .setup import OncePerProcess

_CONFLICT_TRIES: Final = 4
# S3 takes no more in one request.
_MAX_DELETED: Final = 1000
# A body goes to the socket in copies of this size: one join below 1 MiB keeps the GIL, so no slice is torn.
_SLICE_BYTES: Final = 256 * KIB


class Body:
    """The body of a request, without a copy of the whole: a file for botocore, which hashes it, and slices for aiohttp.

    Requests that were given up may still read it after its memory was released; `close` leaves them nothing.
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
    """Objects of S3, by s3fs's requests: no listing, guess or copy of its file interface is in between."""

    in_order = False
    alone = False

    def __init__(self, filesystem: OncePerProcess, root: str, deadline_seconds: float) -> None:
        self._filesystem = filesystem
        self._root = root
        self._deadline_seconds = deadline_seconds
        self._has_bucket = False  # that there is such a bucket
        self._obeys_conditions: bool | None = None  # whether it heeds conditions on a put
        self._conditions = Conditions()

    def name(self, path: str) -> str:
        name = f"{self._root}/{path}" if path else self._root
        if len(name.partition("/")[2].encode()) > stores.MAX_KEY_BYTES:
            raise StorageUnavailableError(
                f"s3://{name:.200}…: no key may be longer than {stores.MAX_KEY_BYTES:,} bytes; shorten it",
                path=f"s3://{name}",
            )
        return name

    def part_segments(self, num_bytes: int, segment_bytes: int) -> int:
        num_segments = -(-num_bytes // segment_bytes)
        needed = max(-(-stores.MIN_PART_BYTES // segment_bytes), -(-num_segments // stores.MAX_PARTS))
        return min(needed, num_segments)

    def split(self, name: str) -> tuple[str, str]:
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
        bucket, key = self.split(name)
        request = partial(fs._call_s3, Bucket=bucket, Key=key, **parameters)
        try:
            return sync(fs.loop, talk, request, timeout=self._deadline_seconds)
        except FileNotFoundError as error:
            if "NoSuchBucket" in codes_of(error):
                raise NoBucketError(errno.ENXIO, f"bucket {bucket} does not exist") from error
            raise

    def info(self, name: str) -> Info:
        try:
            response = self.call("head_object", name)
        except FileNotFoundError:  # which does not say what is missing
            self._require_bucket(name)
            raise
        except OSError:  # the answer to a HEAD has no body and so no reason; the answer to a listing has
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
            pass  # it is there, and not to be looked at
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
        """A get and its body, which goes straight into place. s3fs repeats the request, but not a body that breaks."""
        from fsspec.exceptions import FSTimeoutError  # type: ignore[import-untyped]
        from s3fs.core import S3_RETRYABLE_ERRORS  # type: ignore[import-untyped]

        async def get(request: Callable[..., Any]) -> tuple[memoryview, str]:
            response = await request("get_object")
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

    def put(self, name: str, data: bytes, *, create: bool = False, version: str | None = None) -> None:
        condition = {"IfNoneMatch": "*"} if create else {"IfMatch": version} if version else {}
        for tries_left in reversed(range(_CONFLICT_TRIES)):
            try:
                self.call("put_object", name, Body=Body([memoryview(data)]), **condition)
                return
            except OSError as error:
                codes = codes_of(error)
                if tries_left and codes & CONFLICT:  # another conditional put is being decided
                    continue
                is_gone = version is not None and isinstance(error, FileNotFoundError)
                if not (condition and codes & REFUSED) and not is_gone:
                    raise
                if create and was_repeated(error) and self.read(name)[0] == data:
                    return  # it is our own: the answer to the first try was lost
                raise FileExistsError(errno.EEXIST, f"{name} was written by another writer") from error

    def creates_exclusively(self) -> bool:
        """Whether a condition on a put is heeded: some stores take it and write all the same. Tried once."""
        if self._obeys_conditions is None:
            probe = self.name(probe_name())
            self.put(probe, b"")
            try:
                self._obeys_conditions = self._refuses(probe, create=True) and self._refuses(
                    probe, version=f'"{"0" * 32}"'
                )
            finally:
                with suppress(OSError):
                    self.delete(probe)
        return self._obeys_conditions

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
        probe = self.name(probe_name())
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
            if not codes_of(error) & NO_SUCH_CALL:
                raise
        return False

    def move(self, name: str, to: str) -> None:
        bucket, key = self.split(name)
        self.call("copy_object", to, CopySource={"Bucket": bucket, "Key": key})
        self.delete(name)

    def delete(self, name: str) -> None:
        self.call("delete_object", name)

    def delete_many(self, names: Sequence[str]) -> bool:
        """By as few requests as there are; False where the bucket does not know them."""
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
            if entry["Size"] or not entry["Key"].endswith("/")  # else it only shows a folder
        }

    def tree(self, name: str) -> tuple[list[str], list[str]]:
        """See FileTree; a store has no folders."""
        return ["", *(f"/{path}" for path in self.sizes(name))], []

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
        response = self.call("list_objects_v2", self._root, Prefix=self.split(self._root)[1], MaxKeys=1)
        return parsedate_to_datetime(response["ResponseMetadata"]["HTTPHeaders"]["date"])

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
