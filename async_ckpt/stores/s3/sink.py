"""The upload of one object to a store, in parts.

In: segments, which are sent without a copy. Out: an object that appears whole or not at all.
Knows nothing of: what is in the objects.

This module relies on the observed behavior of obstore. A put from an iterator requests the next buffer on the calling
thread. It holds only the parts in flight and the part being gathered, and drops a buffer when its part has been
acknowledged, which a weak reference shows. If the iterator raises, or a part finally fails, obstore aborts the upload.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from ...errors import StorageUnavailableError
from ...plumbing import MemoryLoan, store_facts, threads, waits
from .. import retry
from ..watched_calls import StuckError, WatchedCall
from .client import Client
from .upload_memory import GivenUpError, Phase, SegmentQueue

# More parts do not make one host faster, and each holds a segment.
_MAX_PARTS_IN_FLIGHT: Final = 8

_log = logging.getLogger("async_ckpt")


@dataclass(frozen=True, slots=True)
class UploadPlan:
    """The cut of one object: into segments of `segment_bytes`, and parts of `part_segments` segments."""

    is_multipart: bool
    segment_bytes: int
    part_segments: int
    max_parts_in_flight: int

    @property
    def part_bytes(self) -> int:
        return self.part_segments * self.segment_bytes

    def parts_in_flight(self, num_retries: int) -> int:
        """The number of parts to send at once: fewer with each retry, since the store may be overloaded."""
        return max(1, self.max_parts_in_flight >> num_retries)


def plan_upload(num_bytes: int, segment_bytes: int, *, max_segments: int | None) -> UploadPlan:
    """The plan for an object of at most `num_bytes`, with at most `max_segments` on loan at a time."""
    part_segments = store_facts.part_segments(num_bytes, segment_bytes)
    num_parts = _MAX_PARTS_IN_FLIGHT
    if max_segments is not None:
        num_parts = max(1, min(num_parts, max_segments // part_segments - 1))
    return UploadPlan(num_bytes > segment_bytes, segment_bytes, part_segments, num_parts)


class ObjectSink:
    """The upload of one object. ObjectStorage creates it for one delivery, which owns it.

    The first segment starts a thread that sends the segments in file order, as they come, and sends the object again
    if an attempt fails. Deadlines limit the life of the thread; `finish` and `abort` wait for it.
    """

    def __init__(self, client: Client, path: str, num_bytes: int, plan: UploadPlan) -> None:
        self.num_bytes = num_bytes
        self.num_retries = 0
        self.failed: Future[None] = threads.running_future()
        self._client, self._path, self._plan = client, path, plan
        self._segments = SegmentQueue(num_bytes, plan.segment_bytes, client.timer)
        self._target = _UploadTarget(client, path)
        self._thread: threads.Running | None = None  # under the queue's lock
        self._error: BaseException | None = None  # of the last attempt, once the thread has ended

    @property
    def retryable(self) -> bool:
        return self._segments.retryable

    # --- from any thread --------------------------------------------------------------------------------------

    def write(self, offset: int, data: memoryview, lease: MemoryLoan) -> None:
        lease.retain()
        with self._segments.changed:  # so that `abort` finds the thread
            is_taken = self._segments.put(offset, data, lease)
            if is_taken and self._thread is None:
                self._thread = threads.start_thread("upload", self._run)
        if not is_taken:
            lease.release()
            raise self._failure()

    def relieve(self) -> bool:
        return self._segments.relieve()

    def finish(self, num_bytes: int | None = None) -> None:
        self.num_bytes = self.num_bytes if num_bytes is None else num_bytes
        segments = self._segments
        if not segments.complete(num_bytes):
            self.abort()
            why = f"only {segments.num_arrived} of {segments.num_segments} segments were written"
            raise StorageUnavailableError(f"{self._shown}: {why}", path=self._shown)
        if self._thread is not None:
            self._thread.join()
        with segments.changed:
            if self._thread is None:  # there was nothing to send
                segments.life.go(Phase.SENT)
            is_finished = segments.life.go(Phase.FINISHED)
        if not is_finished:
            raise self._failure()

    def give_up(self) -> None:
        self._segments.end(Phase.GIVEN_UP)

    def abort(self) -> None:
        if self._segments.life.now is Phase.FINISHED:
            return
        self.give_up()
        if self._thread is not None:
            self._thread.join()
        self._target.delete()

    def close(self) -> None:
        """Do nothing, since the thread has ended, and all segments are released."""

    def _failure(self) -> BaseException:
        if self._error is None or isinstance(self._error, GivenUpError):
            return StorageUnavailableError(f"{self._shown}: the upload was abandoned", path=self._shown)
        return self._error

    @property
    def _shown(self) -> str:
        return self._client.locate(self._path)

    def __repr__(self) -> str:
        segments = self._segments
        state = f"{segments.next}/{segments.num_segments} segments sent"
        if segments.life.now is Phase.FINISHED:
            state = "finished"
        return f"<ObjectSink {self._shown} {state}>"

    # --- on the thread of the upload --------------------------------------------------------------------------

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            retry.persist(
                self._attempt,
                deadline_seconds=self._client.settings.deadline_seconds,
                since=lambda: self._segments.moved_at,
                on_retry=self._count_retry,
                timer=self._client.timer,
                sleep=self._segments.pause,
            )
        except BaseException as failure:
            error = self._error = failure
        self._segments.end(Phase.SENT if error is None else Phase.FAILED)
        if error is not None:
            self.failed.set_exception(self._failure())
        # If the object could not be sent again, the cause is the error of the last attempt.
        reasons = () if error is None else (error, error.__cause__ or error)
        broke_off = any(retry.is_transient(reason) or isinstance(reason, StuckError) for reason in reasons)
        if self._plan.is_multipart and (self.num_retries or broke_off):
            self._client.abort_uploads(self._path)
        self._segments.wait_until_released(waits.ABORT_SECONDS)

    def _attempt(self) -> None:
        if self._segments.is_given_up:
            raise GivenUpError
        try:
            if self._plan.is_multipart and not self.num_retries:
                threads.start_thread("look", self._look_before)
            result = self._client.ask_once(self._path, self._send, kind="part", num_bytes=self.num_bytes)
            self._target.verify(result["e_tag"], self.num_bytes, is_multipart=self._plan.is_multipart)
        except FileNotFoundError:
            raise StorageUnavailableError(f"{self._shown}: {store_facts.NO_BUCKET}", path=self._shown) from None
        except StorageUnavailableError as error:
            retryable = self._segments.restart()
            if retry.is_transient(error) and not retryable:
                raise StorageUnavailableError(
                    f"{error}; it cannot be sent again as a whole: another save needed the memory", path=self._shown
                ) from error
            raise

    def _send(self, store: Any, call: WatchedCall) -> Any:
        """Send the object. This method, and the iterator that obstore receives, run on the thread of the call."""
        import obstore

        key, is_multipart, body = self._client.key(self._path), self._plan.is_multipart, self._body(call)
        if not is_multipart:
            self._segments.wait_until(call, self._is_written)
        return obstore.put(
            store,
            key,
            body if is_multipart else self._segments.take(call, 0),
            use_multipart=is_multipart,
            chunk_size=self._plan.part_bytes,
            max_concurrency=self._plan.parts_in_flight(self.num_retries),
        )

    def _body(self, call: WatchedCall) -> Iterator[memoryview]:
        number = 0
        while self._segments.is_there(call, number):
            yield self._segments.take(call, number)
            number += 1
        # obstore completes the object when this iterator ends.
        self._segments.wait_until(call, lambda: self._is_written() and self._target.has_looked)

    def _is_written(self) -> bool:
        return self._segments.life.now is Phase.WRITTEN

    def _look_before(self) -> None:
        """Look at the previous object, on a thread of its own, while the first parts are being sent."""
        try:
            self._target.look()
        finally:
            with self._segments.changed:
                self._segments.changed.notify_all()

    def _count_retry(self, error: BaseException) -> None:
        self.num_retries += 1
        _log.warning("sent again: %s", error)


class _UploadTarget:
    """The object at the path that an ObjectSink writes to: the previous object, and the new one."""

    def __init__(self, client: Client, path: str) -> None:
        self._client, self._path = client, path
        self.has_looked = False
        self._etag_before: str | None = None
        self._etag: str | None = None  # of the new object, once the store has acknowledged it

    def look(self) -> None:
        """Note the e-tag of the previous object."""
        try:
            with suppress(FileNotFoundError, StorageUnavailableError):
                self._etag_before = self._client.head(self._path)["e_tag"]
        finally:
            self.has_looked = True

    def verify(self, etag: str | None, num_bytes: int, *, is_multipart: bool) -> None:
        """Raise StorageUnavailableError unless the store has the object that it has acknowledged.

        Some servers report a different e-tag than in the acknowledgement, but never the e-tag of the previous object.
        """
        self._etag = etag
        try:
            head = self._client.head(self._path)
        except FileNotFoundError:
            head = {"size": "nothing", "e_tag": None}
        is_ours = head["e_tag"] == etag or (is_multipart and head["e_tag"] != self._etag_before)
        if head["size"] != num_bytes or not is_ours:
            shown = self._client.locate(self._path)
            raise StorageUnavailableError(
                f"{shown}: the store acknowledged {num_bytes:,} bytes but does not have them: it has {head['size']} "
                f"with e-tag {head['e_tag']}; check the store",
                path=shown,
                transient=True,
            )
        self._etag = head["e_tag"]

    def delete(self) -> None:
        """Delete the new object if the store has it; the previous object is already gone. Idempotent."""
        etag, self._etag = self._etag, None
        if etag is not None:
            with suppress(StorageUnavailableError, FileNotFoundError):
                if self._client.head(self._path)["e_tag"] == etag:
                    self._client.delete(self._path)
