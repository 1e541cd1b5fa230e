"""The handle of a save, which is a future, and its progress bar: `progress=True`.

In: a save under way. Out: its report or its error, for threads and for event loops; lines on stderr or in a notebook,
drawn by tqdm. Knows nothing of: how a save works.

If a save has a bar, a task on the loop follows it. A helper thread draws, since a terminal may block the thread that
writes to it. An error of the bar ends the bar, but not the save.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any, Final

from ...errors import ClosedError, UsageError
from ..host.loop import get_loop, off_loop
from ..host.threads import is_library_thread, running_future
from ..host.waits import ENDS_THE_WAIT, Wait, wait_for
from ..report import Progress, SaveReport, paragraph
from ..storage.place import Anywhere
from .tiers import Tiers

_DRAW_SECONDS: Final = 0.2
# In a log file, where each drawing adds a line.
_LOG_SECONDS: Final = 30.0

_log = logging.getLogger("async_ckpt")


class SaveHandle(Future[SaveReport]):
    """One save: a `concurrent.futures.Future` that is running from the start and can be awaited.

        handle = ckpt.save(state, step=100)
        report = handle.result()  # or: report = await handle

    It cannot be cancelled, and cancelling an `await` leaves the save alone. Callbacks run on a separate thread, in
    the order in which they were added; exceptions that they raise are logged. Waiting on one of the library's own
    threads raises RuntimeError at once, since that thread would wait for itself.
    """

    def __init__(self, step: int | None, path: str, staging: Future[None], progress: Callable[[], Progress]) -> None:
        super().__init__()
        self.step, self.path = step, path
        self._staging, self._progress = staging, progress
        self._submit = get_loop().callbacks.submit
        self._pid = os.getpid()
        self._callbacks: deque[Callable[[SaveHandle], Any]] = deque()  # each change is one atomic call of C
        self.places: Tiers | None = None  # set if the run has several places
        # resolves when one place has it, or the save has failed; `result` may wait for further places
        self.committed: Future[SaveReport] = running_future()
        self.looked_at = False  # the outcome was retrieved; a race costs at most one superfluous warning
        self.is_reported = False  # a warning has named its error, or the caller raises it; the exit reports it anyway
        self.set_running_or_notify_cancel()
        super().add_done_callback(lambda _: self._end())

    def _end(self) -> None:
        """Replace the progress callback by its last value, so that a kept handle does not keep its save's plan."""
        last = self._progress()
        self._progress = lambda: last
        self._run_callbacks_soon()

    @property
    def staging_completion(self) -> Future[None]:
        """A future that is done when the snapshot is complete in host memory, for which `wait_staged` waits.

        handle.staging_completion.result(timeout=60)  # seconds
        """
        return self._staging

    @property
    def upload_completion(self) -> SaveHandle:
        """This handle, under the name that torch.distributed.checkpoint uses.

        handle.upload_completion.result()
        """
        return self

    def at(self, place: Anywhere) -> Future[int]:
        """A future that resolves when a place of the run holds this step, or a newer one instead; its result is that
        step.

            handle.at("s3://bucket/run").result(timeout=600)  # seconds

        The place must be one of those given to the AsyncCheckpointer. A place that does not answer is retried until the
        checkpointer is closed; then the future raises StorageUnavailableError, and at once if the save was committed
        behind the place. It raises ConflictError if the place has steps of another line, and this save's error if the
        save fails. With several ranks, call it on rank 0, which copies. Raises ValueError for another place, and
        UsageError on another rank.
        """
        if self.places is None or self.step is None:
            raise ValueError(f"{self.path}: this save has only one place; handle.result() waits for it")
        self._refuse_in_child()
        return self.places.at(place, self.step, self.committed)

    @property
    def progress(self) -> Progress:
        """The bytes of the archive that are staged and written so far.

        print(handle.progress)  # 36% written, 4.2 MB of 11.5 MB
        """
        return self._progress()

    def result(self, timeout: float | None = None) -> SaveReport:
        """Wait until the checkpoint is durable and committed, and return its report. Raises the error if the save
        failed.

        report = handle.result(timeout=600)  # seconds; TimeoutError when it has passed
        """
        self._wait("in result()", timeout)
        try:
            return super().result(0.0)
        finally:
            self.looked_at = self.looked_at or self.done()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait as `result` does, and return the error, or None if the save succeeded.

        if (error := handle.exception()) is not None: ...
        """
        self._wait("in exception()", timeout)
        try:
            return super().exception(0.0)
        finally:
            self.looked_at = self.looked_at or self.done()

    def wait_staged(self, timeout: float | None = None) -> None:
        """Wait until the snapshot is complete in host memory. From then on the state may change in any way.

            handle.wait_staged()
            model.eval()  # a schedule-free optimizer's weights change here

        Call it before changes that `guard=` does not cover: an optimizer that steps in the backward pass, graph replay,
        tools that unmap device memory. `timeout` is in seconds. Raises the error if staging failed.
        """
        self._refuse_to_wait_for_itself(self.staging_completion)
        self.staging_completion.result(timeout)

    def add_done_callback(self, fn: Callable[[SaveHandle], Any]) -> None:
        """Call `fn(handle)` on a thread of the library when the save has ended, or at once if it has ended already.

        handle.add_done_callback(lambda done: print(done.exception() or done.result()))
        """
        if not callable(fn):
            raise TypeError(f"add_done_callback takes a function of the handle, got {fn!r:.100}")
        self._callbacks.append(fn)
        if self.done():
            self._run_callbacks_soon()

    def __await__(self) -> Generator[Any, None, SaveReport]:
        loop = asyncio.get_running_loop()
        ended = loop.create_future()

        def resolve() -> None:
            if not ended.done():  # otherwise the await was cancelled
                ended.set_result(None)

        def wake(_: object) -> None:
            with suppress(RuntimeError):  # that loop was closed, and the await with it
                loop.call_soon_threadsafe(resolve)

        super().add_done_callback(wake)
        yield from ended
        return self.result()

    def _run_callbacks_soon(self) -> None:
        if self._callbacks:
            self._submit(self._run_callbacks)

    def _run_callbacks(self) -> None:
        with suppress(IndexError):  # none is left
            while True:
                callback = self._callbacks.popleft()
                try:
                    callback(self)
                except Exception:
                    _log.exception("a callback of %r raised; the save is not affected", self)

    def _wait(self, where: str, timeout: float | None) -> None:
        self._refuse_to_wait_for_itself()
        wait = Wait(where, ENDS_THE_WAIT)
        wait_for(self, timeout, lambda: wait.goes_on(lambda: progress_of([self])))

    def _refuse_to_wait_for_itself(self, future: Future[Any] | None = None) -> None:
        if (future or self).done():
            return
        if is_library_thread():
            raise UsageError("a thread of async_ckpt must not wait for a save: it would wait for itself")
        self._refuse_in_child()

    def _refuse_in_child(self) -> None:
        if os.getpid() != self._pid:
            raise ClosedError("this save runs in the parent process; wait for it there")

    def _repr_html_(self) -> str:
        if self.done() and super().exception() is None:
            self.looked_at = True
            return super().result()._repr_html_()
        error = f": {super().exception()}" if self.done() else ""
        return f"{paragraph(repr(self) + error)}{self.progress._repr_html_()}"

    def __repr__(self) -> str:
        label = self.path if self.step is None else f"step={self.step}"
        if self.done():
            error = super().exception()
            return f"<SaveHandle {label} {'failed: ' + type(error).__name__ if error else 'done'}>"
        return f"<SaveHandle {label} {self.progress.fraction:.0%} written>"


def skipped(step: int | None, path: str) -> SaveHandle:
    """The handle of a save that was skipped because others are under way."""
    handle = SaveHandle(step, path, running_future(), lambda: Progress(0, 0, 0))
    handle.staging_completion.set_result(None)
    handle.committed.set_result(report := SaveReport("skipped", step, path))
    handle.set_result(report)
    return handle


def name_of(handle: SaveHandle) -> str:
    """The name of a save in messages."""
    return named(handle.step, handle.path)


def named(step: int | None, path: str) -> str:
    """The name of a save that has no handle yet."""
    return path if step is None else f"step {step} ({path})"


def progress_of(saves: Sequence[SaveHandle]) -> str:
    """The oldest of these saves and its progress, in words."""
    if not saves:  # another thread is planning a save, or the last one has just ended
        return "another save"
    first = saves[0]
    others = f" and {len(saves) - 1} more" if len(saves) > 1 else ""
    if not first.done():
        waits_for = first.places.awaited() if first.places and first.committed.done() else first.progress
        return f"{name_of(first)}{others}: {waits_for}"
    ended = "committed" if Future.exception(first) is None else "failed"
    return f"{name_of(first)}{others}: {ended}, and cleaning up"


class Bars:
    """The progress bars of the saves of one ledger, which creates it. Raises ImportError if tqdm is not installed."""

    def __init__(self) -> None:
        try:
            from tqdm.auto import tqdm  # type: ignore[import-untyped]
        except ImportError as error:
            raise ImportError('progress=True needs tqdm to draw with: pip install "async_ckpt[progress]"') from error

        class Bar(tqdm):  # type: ignore[misc]
            monitor_interval = 0  # no monitor thread: we draw often enough

        self._bar = Bar
        self._is_widget = any(base.__module__ == "tqdm.notebook" for base in tqdm.__mro__)

    async def follow(self, handle: SaveHandle) -> None:
        """Draw the bar until the save has ended."""
        ended = asyncio.Event()
        Future.add_done_callback(handle, lambda _: ended.set())  # resolved on this very loop
        try:
            bar = await off_loop(partial(self._begin, handle))
            has_ended = False
            while not has_ended:
                with suppress(TimeoutError):
                    await asyncio.wait_for(ended.wait(), _DRAW_SECONDS)
                has_ended = ended.is_set()
                await off_loop(partial(_draw, bar, handle))
            await off_loop(bar.close)
        except Exception:
            _log.debug("the bar of %r cannot be drawn", handle, exc_info=True)

    def _begin(self, handle: SaveHandle) -> Any:
        if sys.stderr is None:
            raise OSError("there is no stderr to draw on")
        is_live = self._is_widget or sys.stderr.isatty()
        return self._bar(
            file=None if self._is_widget else LenientFile(sys.stderr),
            desc=handle.path if handle.step is None else f"step {handle.step}",
            total=handle.progress.total_bytes,
            unit="B",
            unit_scale=True,
            mininterval=_DRAW_SECONDS / 2 if is_live else _LOG_SECONDS,
            miniters=1,
            leave=None,  # below a bar of the user's, only the user's bar stays
        )


class LenientFile:
    """A file that may be closed, or whose reader may be gone; errors of writing are ignored.

    Such an error would leave tqdm's lock held, and every other bar of the training would wait forever.
    """

    def __init__(self, file: Any) -> None:
        self._file = file

    def write(self, text: str) -> None:
        with suppress(OSError, ValueError):
            self._file.write(text)

    def flush(self) -> None:
        with suppress(OSError, ValueError):
            self._file.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __eq__(self, other: object) -> bool:
        """True for the wrapped file, too: `tqdm.write` clears the bars that are drawn on the same file."""
        return bool(self._file == getattr(other, "_file", other))

    def __hash__(self) -> int:
        return hash(self._file)


def _draw(bar: Any, handle: SaveHandle) -> None:
    if handle.done() and Future.exception(handle) is not None:
        bar.set_postfix_str("failed", refresh=False)
    bar.update(max(0, handle.progress.written_bytes - bar.n))
