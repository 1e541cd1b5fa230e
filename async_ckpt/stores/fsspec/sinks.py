"""Sinks through fsspec: a multipart upload, or one file that is written from front to back.

In: segments at offsets. Out: objects that appear whole or not at all. Knows nothing of: what is in them.
"""

from __future__ import annotations

import errno
import hashlib
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

from ...errors import CheckpointError, StorageUnavailableError
from ...plumbing import MemoryLoan, Sink
from .error_advice import codes_of
from .file_tree import Draft, FileTree
from .s3fs_bucket import Body, Bucket

Translate = Callable[..., AbstractContextManager[None]]


class _HoldingSink(Sink):
    """The common part of both sinks: the segments that are not sent yet, and the first error, which ends the sink.

    FsspecStorage creates a sink for one delivery. Thread-safe.
    """

    num_bytes = num_retries = 0

    def __init__(self, num_bytes: int, shown_as: str, translate: Translate) -> None:
        self.num_bytes = num_bytes
        self._shown_as = shown_as
        self._translate = translate
        self._lock = threading.Lock()
        self._held: dict[int, tuple[memoryview, MemoryLoan]] = {}  # by offset; under _lock, like all below
        self._error: BaseException | None = None
        self._finished = False

    def _hold(self, offset: int, data: memoryview, lease: MemoryLoan) -> None:
        lease.retain()
        with self._lock:
            error = self._error
            if error is None:
                self._held[offset] = data, lease
        if error is not None:
            lease.release()
            raise error

    def _give_up(self, error: BaseException) -> None:
        """Refuse further segments, and release all held segments."""
        with self._lock:
            self._error = self._error or error
            held, self._held = self._held, {}
        for _, lease in held.values():
            lease.release()

    def _check_size(self, num_bytes: int | None) -> None:
        if num_bytes != self.num_bytes:
            raise OSError(errno.EIO, f"the store acknowledged {self.num_bytes} bytes but has {num_bytes}")

    def _discard(self) -> None:
        raise NotImplementedError

    def abort(self) -> None:
        self.give_up()
        if not self._finished:
            with suppress(CheckpointError), self._translate():  # leftovers are swept later
                self._discard()

    def close(self) -> None:
        self._give_up(StorageUnavailableError(f"{self._shown_as} is closed", path=self._shown_as))

    def give_up(self) -> None:
        self._give_up(StorageUnavailableError(f"{self._shown_as}: the upload was abandoned", path=self._shown_as))


class MultipartSink(_HoldingSink):
    """One object of a bucket. The thread that brings the last segment of a part uploads the part, without a copy."""

    def __init__(
        self,
        bucket: Bucket,
        name: str,
        num_bytes: int,
        segment_bytes: int,
        shown_as: str,
        translate: Translate,
    ) -> None:
        super().__init__(num_bytes, shown_as, translate)
        self._bucket = bucket
        self._name = name
        self._segment_bytes = segment_bytes
        self._part_bytes = bucket.part_segments(num_bytes, segment_bytes) * segment_bytes
        self._num_parts = -(-num_bytes // self._part_bytes)
        self._is_small = self._num_parts == 1
        self._parts: dict[int, dict[str, Any]] = {}  # the store's response for each part; under _lock
        self._retried = False  # the upload may have been begun more than once
        self._upload_id: str | None = None  # under _beginning, which is held during the request
        self._kept_fields: tuple[str, ...] = ()  # fields in the response for a part that `_complete` needs
        self._beginning = threading.Lock()

    def write(self, offset: int, data: memoryview, lease: MemoryLoan) -> None:
        self._hold(offset, data, lease)
        number = offset // self._part_bytes
        if self._is_small:
            return  # a put makes the object visible, so `finish` sends it
        segments = self._take(number)
        if segments:
            self._send(number, segments)

    def _take(self, number: int) -> list[tuple[memoryview, MemoryLoan]]:
        """The segments of a part in order; empty unless all have arrived."""
        begin = number * self._part_bytes
        offsets = range(begin, min(begin + self._part_bytes, self.num_bytes), self._segment_bytes)
        with self._lock:
            if not all(offset in self._held for offset in offsets):
                return []
            return [self._held.pop(offset) for offset in offsets]

    def _send(self, number: int, segments: list[tuple[memoryview, MemoryLoan]]) -> None:
        with self._body_of(segments) as body:
            with self._translate():
                response = self._bucket.call(
                    "upload_part", self._name, UploadId=self._begin_upload(), PartNumber=number + 1, Body=body
                )
            part = {key: response[key] for key in self._kept_fields if key in response}
            with self._lock:
                self._parts[number] = {"PartNumber": number + 1, **part}
                self.num_retries += response["ResponseMetadata"].get("RetryAttempts", 0)

    @contextmanager
    def _body_of(self, segments: list[tuple[memoryview, MemoryLoan]]) -> Iterator[Body]:
        """The body of a request. The end of the block releases the segments. An error in the block ends the sink."""
        body = Body([view for view, _ in segments])
        try:
            yield body
        except BaseException as error:
            self._give_up(error)
            raise
        finally:
            body.close()
            for _, lease in segments:
                lease.release()

    def _begin_upload(self) -> str:
        with self._beginning:
            if self._upload_id is None:
                response = self._bucket.call("create_multipart_upload", self._name)
                self._retried = bool(response["ResponseMetadata"].get("RetryAttempts"))
                self._upload_id = str(response["UploadId"])
                # The completion has checksums of parts only if the upload was begun with that kind of checksum.
                self._kept_fields = ("ETag", f"Checksum{response.get('ChecksumAlgorithm')}")
            return self._upload_id

    def finish(self, num_bytes: int | None = None) -> None:
        with self._translate():
            if num_bytes is not None:
                self._end_at(num_bytes)
            if self._is_small:
                self._put_whole()
            else:
                self._complete()
            num_bytes = 0
            with suppress(FileNotFoundError):
                num_bytes = self._bucket.info(self._name).num_bytes
            # The e-tag is not checked, since some stores (rclone) report different e-tags for one object.
            self._check_size(num_bytes)
            # If the upload was begun twice, because the first response was lost, another upload exists.
            if self._retried:
                self._discard_all()
        self._finished = True

    def _end_at(self, num_bytes: int) -> None:
        """Note the size, and send the last part if its segments have arrived."""
        self.num_bytes, self._num_parts = num_bytes, -(-num_bytes // self._part_bytes)
        if not self._is_small and (segments := self._take(self._num_parts - 1)):
            self._send(self._num_parts - 1, segments)

    def _put_whole(self) -> None:
        segments = self._take(0)
        with self._body_of(segments) as body:
            if not segments:
                raise OSError(errno.EIO, f"not all of {self.num_bytes} bytes were written")
            self._bucket.call("put_object", self._name, Body=body)

    def _complete(self) -> None:
        parts = [self._parts[number] for number in sorted(self._parts)]
        if len(parts) != self._num_parts:
            raise OSError(errno.EIO, f"only {len(parts)} of {self._num_parts} parts were uploaded")
        try:
            self._bucket.call(
                "complete_multipart_upload", self._name, UploadId=self._upload_id, MultipartUpload={"Parts": parts}
            )
        except FileNotFoundError as error:
            # The response to a first try may have been lost: then the object has the e-tag of these parts.
            if "NoSuchUpload" not in codes_of(error) or self._bucket.info(self._name).version != _etag_of(parts):
                raise

    def _discard(self) -> None:
        if self._upload_id is not None:
            self._bucket.call("abort_multipart_upload", self._name, UploadId=self._upload_id)
        if self._retried:
            self._discard_all()

    def _discard_all(self) -> None:
        self._bucket.abort_uploads(*self._bucket.split(self._name), exact=True)

    def __repr__(self) -> str:
        sent = f"{len(self._parts)} of {self._num_parts} parts"
        return f"<MultipartSink {self._shown_as} {sent}{', finished' if self._finished else ''}>"


def _etag_of(parts: list[dict[str, Any]]) -> str:
    """The e-tag of an object of these parts, if the store makes MD5 e-tags."""
    digests = bytes.fromhex("".join(part["ETag"].strip('"') for part in parts))
    return f'"{hashlib.md5(digests, usedforsecurity=False).hexdigest()}-{len(parts)}"'


class AppendingSink(_HoldingSink):
    """One file, written from front to back by one thread at a time. Segments that come early are held.

    While one thread is writing, other threads leave their segments to it, so no thread waits.
    """

    def __init__(self, files: FileTree, name: str, num_bytes: int, shown_as: str, translate: Translate) -> None:
        super().__init__(num_bytes, shown_as, translate)
        self._files = files
        self._name = name
        self._draft: Draft | None = None  # only the writing thread uses it
        self._writing = False  # under _lock
        self._next = 0  # offset of the next segment; under _lock

    def write(self, offset: int, data: memoryview, lease: MemoryLoan) -> None:
        self._hold(offset, data, lease)
        with self._lock:
            if self._writing:
                return
            self._writing = True
        while (segment := self._take()) is not None:
            view, held = segment
            try:
                with self._translate():
                    self._draft = self._draft or self._files.draft(self._name)
                    self._draft.file.write(view)
            except BaseException as error:
                self._give_up(error)
                raise
            finally:
                held.release()

    def _take(self) -> tuple[memoryview, MemoryLoan] | None:
        with self._lock:
            segment = self._held.pop(self._next, None)
            self._writing = segment is not None
            if segment is not None:
                self._next += len(segment[0])
            return segment

    def finish(self, num_bytes: int | None = None) -> None:
        self.num_bytes = self.num_bytes if num_bytes is None else num_bytes
        with self._translate():
            if self._draft is None or self._next != self.num_bytes:
                raise OSError(errno.EIO, f"{self._next} bytes were written instead of {self.num_bytes}")
            self._draft.commit()
            self._check_size(self._files.info(self._name).num_bytes)
        self._finished = True

    def _discard(self) -> None:
        if self._draft is not None:
            self._draft.discard()

    def __repr__(self) -> str:
        done = ", finished" if self._finished else ""
        return f"<AppendingSink {self._shown_as} {self._next:,} of {self.num_bytes:,} bytes{done}>"
