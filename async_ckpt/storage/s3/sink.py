"""One object on its way up to a store, and one on its way back.

In: segments, which are the parts of a multipart upload without a copy. Out: an object that appears whole or not at all.
Knows nothing of: what is in the objects.

What obstore was seen to do, and this file builds on: a put from an iterator asks for the next buffer on the calling
thread, holds no more than the parts in flight and the one being gathered, and lets go of a buffer when its part has
been answered for; a weak reference tells. Where the iterator raises, or a part fails for good, it aborts the upload.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from ...errors import StorageUnavailableError
from ...host.calls import StuckError, WatchedCall
from ...host.life import Life
from ...host.threads import Running, running_future, start_thread
from .. import retry, stores
from ..base import Reader
from .client import Client, GivenUpError

if TYPE_CHECKING:
    from ..base import Lent

# How long the buffers of an upload that was broken off may take to be let go of before its thread ends without them.
_LET_GO_SECONDS: Final = 10.0

_log = logging.getLogger("async_ckpt")


@dataclass(slots=True)
class _Buffer:
    data: memoryview
    lease: Lent
    num_views: int = 0  # how often the upload holds it


class Phase(Enum):
    """The life of an object on its way up. Under its lock."""

    TAKING = "segments come, and are sent"
    WRITTEN = "all have come"
    SENT = "the store has acknowledged all"
    FINISHED = "and whoever wrote it knows"
    FAILED = "its thread has ended without that"
    GIVEN_UP = "nothing more is taken, and its thread ends"


_GOES: Final = {
    Phase.TAKING: (Phase.WRITTEN, Phase.FAILED, Phase.GIVEN_UP),
    Phase.WRITTEN: (Phase.SENT, Phase.FAILED, Phase.GIVEN_UP),
    Phase.SENT: (Phase.FINISHED, Phase.GIVEN_UP),
    Phase.FINISHED: (),
    Phase.FAILED: (Phase.GIVEN_UP,),
    Phase.GIVEN_UP: (),
}


class ObjectSink:
    """One object on its way up: a thread of its own sends the segments in file order, as they come.

    A segment stays on loan until the object is finished, so that all can be sent again if an attempt fails, or until
    it has been sent and its memory is needed elsewhere; never less long than the upload looks at it. Who has asked
    for memory while all was being sent gets that of the next segment that has been, without asking again.
    """

    def __init__(
        self,
        client: Client,
        path: str,
        num_bytes: int,
        segment_bytes: int,
        part_segments: int,
        num_parts: int,
    ) -> None:
        self.num_retries = 0
        self.retryable = True
        self.failed: Future[None] = running_future()
        self._client, self._path, self.num_bytes, self._timer = client, path, num_bytes, client.timer
        self._segment_bytes, self._part_segments, self._num_parts = segment_bytes, part_segments, num_parts
        self._is_multipart = num_bytes > segment_bytes
        self._changed = threading.Condition()
        self._num_segments = -(-num_bytes // segment_bytes)  # or fewer, as `finish` may say; under _changed
        self._pieces: dict[int, _Buffer] = {}  # what is on loan; under _changed, like all below
        self._num_arrived = 0
        self._next = 0  # the first segment that this attempt has not asked for
        self._is_wanted = False  # somebody waits for memory: the next segment that has been sent is let go of
        self._life = Life(_GOES)
        self._error: BaseException | None = None
        self._before: str | None = None  # e-tag of what was there under the name
        self._has_looked = False
        self._e_tag: str | None = None  # of ours, once the store has acknowledged it
        self._moved_at = self._timer.now()
        self._thread: Running | None = None
        self._call = client.watched("part")  # of this attempt; replaced by `_thread` only

    # --- from any thread --------------------------------------------------------------------------------------

    def write(self, offset: int, data: memoryview, lease: Lent) -> None:
        lease.retain()
        with self._changed:
            refused = self._life.now is not Phase.TAKING
            if not refused:
                self._pieces[offset // self._segment_bytes] = _Buffer(data, lease)
                self._num_arrived += 1
                if self._thread is None:
                    self._thread = start_thread("upload", self._run)
                self._changed.notify_all()
        if refused:
            lease.release()
            raise self._failure()

    def relieve(self) -> bool:
        with self._changed:
            idle = [number for number in self._idle() if number < self._next]
            self._is_wanted = not idle
            if not idle:
                return False
            self.retryable = False
            piece = self._pieces.pop(min(idle))
        piece.lease.release()
        return True

    def finish(self, num_bytes: int | None = None) -> None:
        with self._changed:
            if num_bytes is not None:
                self.num_bytes = num_bytes
                self._num_segments = max(1, -(-num_bytes // self._segment_bytes))
            if self._num_arrived == self._num_segments:
                self._life.go(Phase.WRITTEN)
            too_few = self._life.now is Phase.TAKING
            self._changed.notify_all()
        if too_few:
            self.abort()
            raise StorageUnavailableError(
                f"{self._where}: {self._num_arrived} segments arrived of {self._num_segments}",
                path=self._where,
            )
        if self._thread is not None:
            self._thread.join()  # it ends by its deadlines
        with self._changed:
            if self._thread is None:  # there was nothing to send
                self._life.go(Phase.SENT)
            finished = self._life.go(Phase.FINISHED)
        if not finished:
            raise self._failure()

    def give_up(self) -> None:
        with self._changed:
            self._life.go(Phase.GIVEN_UP)
            leases = [self._pieces.pop(number).lease for number in self._idle()]
            self._changed.notify_all()
        for lease in leases:
            lease.release()

    def abort(self) -> None:
        if self._life.now is Phase.FINISHED:
            return
        self.give_up()
        if self._thread is not None:
            self._thread.join()
        e_tag, self._e_tag = self._e_tag, None
        if e_tag is not None:  # it came through after all; what stood there before is gone already
            with suppress(StorageUnavailableError, FileNotFoundError):
                if self._client.head(self._path)["e_tag"] == e_tag:
                    self._client.delete(self._path)

    def close(self) -> None:
        """There is nothing left to close: the thread has ended, and all is given back."""

    def _idle(self) -> list[int]:
        """Segments that the upload is not looking at; under _changed."""
        return [number for number, piece in self._pieces.items() if not piece.num_views]

    def _failure(self) -> BaseException:
        if self._error is None or isinstance(self._error, GivenUpError):
            return StorageUnavailableError(f"{self._where}: the upload was given up", path=self._where)
        return self._error

    @property
    def _where(self) -> str:
        return self._client.locate(self._path)

    def __repr__(self) -> str:
        state = (
            "finished"
            if self._life.now is Phase.FINISHED
            else f"{self._next}/{self._num_segments} segments sent"
        )
        return f"<ObjectSink {self._where} {state}>"

    # --- on the thread of the upload --------------------------------------------------------------------------

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            retry.persist(
                self._attempt,
                deadline_seconds=self._client.deadline_seconds,
                since=lambda: self._moved_at,
                on_retry=self._count_retry,
                timer=self._timer,
                sleep=self._pause,
            )
        except BaseException as failure:
            error = failure
        with self._changed:
            self._error = error
            self._life.go(Phase.SENT if error is None else Phase.FAILED)
            leases = [self._pieces.pop(number).lease for number in self._idle()]
        for lease in leases:
            lease.release()
        if error is not None:
            self.failed.set_exception(self._failure())
        # Also where it could not be made again as a whole, which the cause of the error tells.
        why = () if error is None else (error, error.__cause__ or error)
        broke_off = any(retry.is_transient(reason) or isinstance(reason, StuckError) for reason in why)
        if self._is_multipart and (self.num_retries or broke_off):
            self._client.abort_uploads(self._path)
        with self._changed:  # requests that were broken off let go a moment later, in `_let_go`
            self._changed.wait_for(lambda: not self._pieces, _LET_GO_SECONDS)

    def _attempt(self) -> None:
        if self._life.now is Phase.GIVEN_UP:
            raise GivenUpError
        try:
            if self._is_multipart and not self.num_retries:
                start_thread("look", self._look_before)
            call = self._call = self._client.watched("part")
            result = self._client.ask_once(
                self._path, partial(self._send, call), kind="part", num_bytes=self.num_bytes, call=call
            )
            self._verify(result)
        except FileNotFoundError:
            raise StorageUnavailableError(f"{self._where}: {stores.NO_BUCKET}", path=self._where) from None
        except StorageUnavailableError as error:
            with self._changed:
                self._next, retryable = 0, self.retryable
            if retry.is_transient(error) and not retryable:
                raise StorageUnavailableError(
                    f"{error}; it cannot be sent again as a whole: memory was needed elsewhere",
                    path=self._where,
                ) from error
            raise

    def _send(self, call: WatchedCall, store: Any) -> Any:
        """On the thread of the call, as is the iterator that obstore is given."""
        import obstore

        key, body = self._client.key(self._path), self._segments(call)
        if not self._is_multipart:
            self._wait_for(call, lambda: self._life.now is Phase.WRITTEN)
        return obstore.put(
            store,
            key,
            body if self._is_multipart else self._take(call, 0),
            use_multipart=self._is_multipart,
            chunk_size=self._segment_bytes * self._part_segments,
            max_concurrency=max(
                1, self._num_parts >> self.num_retries
            ),  # a store in trouble is asked for less
        )

    def _segments(self, call: WatchedCall) -> Iterator[memoryview]:
        number = 0
        while self._is_there(call, number):
            yield self._take(call, number)
            number += 1
        # obstore completes the object when this ends.
        self._wait_for(call, lambda: self._life.now is Phase.WRITTEN and self._has_looked)

    def _is_there(self, call: WatchedCall, number: int) -> bool:
        """Wait for a segment. False when the object has ended before it."""
        self._wait_for(call, lambda: number in self._pieces or number >= self._num_segments)
        return number < self._num_segments

    def _look_before(self) -> None:
        """See what is there under the name, while the first parts are on their way; a thread of its own."""
        try:
            with suppress(FileNotFoundError, StorageUnavailableError):
                self._before = self._client.head(self._path)["e_tag"]
        finally:
            with self._changed:
                self._has_looked = True
                self._changed.notify_all()

    def _take(self, call: WatchedCall, number: int) -> memoryview:
        """The segment, once it is there, as a view whose end says that the upload has let go of the memory."""
        with call.lent(), self._changed:
            piece = self._pieces[number]
            piece.num_views += 1
            self._next, self._moved_at = number + 1, self._timer.now()
            view = piece.data[:]
        weakref.finalize(view, self._let_go, number).atexit = False
        return view

    def _let_go(self, number: int) -> None:
        """Called on one of obstore's threads."""
        self._call.moved()
        with self._changed:
            self._moved_at = self._timer.now()
            piece = self._pieces[number]
            piece.num_views -= 1
            wanted = self._is_wanted and number < self._next
            is_over = self._life.now not in (Phase.TAKING, Phase.WRITTEN)
            released = (wanted or is_over) and not piece.num_views
            if released:
                del self._pieces[number]
                if wanted:
                    self.retryable = self._is_wanted = False
            self._changed.notify_all()
        if released:
            piece.lease.release()

    def _wait_for(self, call: WatchedCall, happened: Callable[[], bool]) -> None:
        """Wait for the writers, who end in `finish` or `abort`."""
        with call.ours(), self._changed:
            self._changed.wait_for(lambda: self._life.now is Phase.GIVEN_UP or happened())
            if self._life.now is Phase.GIVEN_UP:
                raise GivenUpError

    def _verify(self, result: Any) -> None:
        """An object that is acknowledged must be there. Some servers have another e-tag for it then, but no old one."""
        self._e_tag = result["e_tag"]
        try:
            found = self._client.head(self._path)
        except FileNotFoundError:
            found = {"size": "nothing", "e_tag": None}
        ours = found["e_tag"] == self._e_tag or (self._is_multipart and found["e_tag"] != self._before)
        if found["size"] != self.num_bytes or not ours:
            raise StorageUnavailableError(
                f"{self._where}: the store acknowledged {self.num_bytes:,} bytes and lost them: {found['size']} with "
                f"e-tag {found['e_tag']} is there; find out what it does with what it is given",
                path=self._where,
                transient=True,
            )
        self._e_tag = found["e_tag"]

    def _count_retry(self, error: BaseException) -> None:
        self.num_retries += 1
        _log.warning("sent again: %s", error)

    def _pause(self, seconds: float) -> None:
        with self._changed:
            self._timer.wait_for(self._changed, lambda: self._life.now is Phase.GIVEN_UP, seconds)


class ObjectReader(Reader):
    """One object as it was when it was opened."""

    def __init__(self, client: Client, path: str) -> None:
        self._client, self._path = client, path
        meta = client.head(path)
        self.num_bytes: int = meta["size"]
        self._e_tag: str | None = meta["e_tag"]

    def read_into(self, offset: int, target: memoryview) -> None:
        where = self._client.locate(self._path)
        if offset + len(target) > self.num_bytes:
            raise EOFError(f"{where} ends at byte {self.num_bytes:,}")
        if not target:
            return
        try:
            whole = self._client.fetch(self._path, offset, target, self._e_tag)
        except FileExistsError:
            whole = False
        if not whole:
            raise StorageUnavailableError(
                f"{where} was replaced while it was being read; load it again", path=where
            )

    def close(self) -> None:
        """Nothing is held between reads."""
