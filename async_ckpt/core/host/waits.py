"""Waits that log their progress: a wait of more than two seconds logs what it waits for.

In: futures, and a description of the progress. Out: a line after two seconds, and another every thirty. Also all
deadlines: the limits, in seconds, of waits for events that may never come. Knows nothing of: saves.

While the program runs, a line goes to the logger `async_ckpt` as a warning, which is visible without any configuration
of logging. At the interpreter's exit it goes to stderr. No thread is needed: a wait wakes up five times a second and
checks the clock.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from math import isnan
from typing import Any, Final

from ..spec import is_number
from ..timing import TIMEKEEPER
from .threads import conclude, is_library_thread

# How long a waiting thread sleeps before it checks again whether its wait can still end.
LIVENESS_SECONDS: Final = 0.2
_FIRST_SECONDS: Final = 2.0
_AGAIN_SECONDS: Final = 30.0

# The effect of Ctrl-C on a wait.
GIVES_UP: Final = "Ctrl-C gives up what is not committed"
ENDS_THE_WAIT: Final = "Ctrl-C ends the wait, not the save"
ENDS_THE_CALL: Final = "Ctrl-C ends the call, without saving"

# --- a store ------------------------------------------------------------------------------------------------------

# How long a store may be away before a save gives up: enough for a reboot of its front end or a new network lease.
OBJECT_SECONDS: Final = 900.0
# How long it may be away for a manifest, a listing or a read, since the user waits for these.
REQUEST_SECONDS: Final = 120.0
# One request for a part. Eight concurrent parts of 32 MiB need 1.5 MB/s to end in time; if they fail, the next attempt
# sends half as many at once.
PART_SECONDS: Final = 180.0
SMALL_SECONDS: Final = 30.0  # any other request
# How long to try to abort the leftovers of a failed upload, and how long an aborted one may take to drop its buffers.
ABORT_SECONDS: Final = 10.0

# --- other ranks --------------------------------------------------------------------------------------------------

# A rank that has sent nothing for this long, while the store of the ranks answers, counts as lost. Raise it for a
# debugger, or for a call that holds the GIL for longer.
SILENCE_SECONDS: Final = float(os.environ.get("ASYNC_CKPT_SILENCE_SECONDS") or 120.0)
# How long to wait for the first save, export or publication of another rank.
PEER_CALL_SECONDS: Final = 600.0
# The time between two keep-alives of a working rank: much less than other ranks wait for its answer.
SIGN_SECONDS: Final = 60.0
# How long to wait for the receipts or parts of other ranks, once rank 0's own archive is durable.
PEER_SECONDS: Final = 1800.0
# How long to wait for the decision of rank 0, which itself waits for receipts.
DECISION_SECONDS: Final = PEER_SECONDS + 600.0
# How long a file that one rank has written to a shared root may be invisible to another: NFS caches for a minute.
SHARED_SECONDS: Final = 120.0

# --- runs at several places, and the end --------------------------------------------------------------------------

# How long to wait for a place that does not even open, once the save has failed.
OPEN_SECONDS: Final = 10.0
# If no write returns at a place for this long, the save fails there, and the next goes to another place.
PROGRESS_SECONDS: Final = 30.0
# How long to wait at the end for a place to which a copy makes no progress.
FINISH_SECONDS: Final = 120.0
# How long to wait at the end for a place that does not answer, if another place that survives a reboot has the step.
ANSWER_SECONDS: Final = 10.0
# How long to wait for calls at a place whose save has failed, if the next save can go elsewhere.
END_SECONDS: Final = 10.0
# How long to wait at most for the last writes of abandoned saves. An exit with a timeout waits a tenth of that timeout,
# but at least as long as a healthy disk may need.
ABANDON_SECONDS: Final = 10.0
LEAST_ABANDON_SECONDS: Final = 1.0
# How long to wait, at the interpreter's exit, for listeners of operations, such as exporters of metrics.
LISTENERS_SECONDS: Final = 5.0

_log = logging.getLogger("async_ckpt")


class Wait:
    """One wait of one thread, from its creation on. `caller` and `ctrl_c` are parts of the logged line."""

    def __init__(self, caller: str, ctrl_c: str, *, log: Callable[[str], None] = _log.warning) -> None:
        self._caller, self._ctrl_c, self._log = caller, ctrl_c, log
        self._begin = TIMEKEEPER.now()
        self._next = self._begin + _FIRST_SECONDS

    def goes_on(self, progress: Callable[[], str]) -> None:
        """Log a line if one is due. The waiting thread calls this at each wake-up, without holding a lock."""
        now = TIMEKEEPER.now()
        if now < self._next or is_library_thread():  # waits of the library's own threads do not concern the user
            return
        self._next = now + _AGAIN_SECONDS
        caller = f" {self._caller}" if self._caller else ""
        line = f"async_ckpt has waited {now - self._begin:.0f} s{caller} for {progress()}"
        self._log(f"{line}; {self._ctrl_c}" if _ctrl_c_raises() else line)


def wait_for(future: Future[Any], timeout: float | None = None, goes_on: Callable[[], None] = lambda: None) -> bool:
    """Wait until a future is done, without retrieving its outcome. `goes_on` is called at each wake-up.

    Returns False if `timeout` seconds pass before that.
    """
    deadline = _deadline(timeout)
    while True:
        seconds_left = LIVENESS_SECONDS if deadline is None else deadline - TIMEKEEPER.now()
        try:
            # Not `future.exception`: a subclass may implement it by this function, or record that the user called it.
            Future.exception(future, max(0.0, min(seconds_left, LIVENESS_SECONDS)))
            return True
        except TimeoutError:
            if seconds_left <= 0:
                return False
        goes_on()


def _deadline(timeout: float | None) -> float | None:
    """The end of a wait of `timeout` seconds, perhaps in the past. Raises TypeError if it is not a number."""
    if timeout is None:
        return None
    if not is_number(timeout) or isnan(timeout):
        raise TypeError(f"timeout must be a number of seconds or None, got {timeout!r:.100}")
    return TIMEKEEPER.now() + timeout


def wait_for_all(
    futures: Sequence[Future[Any]], timeout: float | None = None, goes_on: Callable[[], None] = lambda: None
) -> bool:
    """Like `wait_for`, but until all futures are done. `timeout` is for all of them together."""
    deadline = _deadline(timeout)
    return all(
        wait_for(future, None if deadline is None else max(0.0, deadline - TIMEKEEPER.now()), goes_on)
        for future in futures
    )


def growing_pauses(first_seconds: float, longest_seconds: float) -> Iterator[float]:
    """An endless series of pauses for polling, in seconds: each 1.5 times the last, up to `longest_seconds`."""
    seconds = first_seconds
    while True:
        yield seconds
        seconds = min(1.5 * seconds, longest_seconds)


class Completion(Future[None]):
    """A future that cannot be cancelled. A long wait for it logs lines with the text that `progress` returns."""

    def __init__(self, progress: Callable[[], str]) -> None:
        super().__init__()
        self._progress = progress
        self.set_running_or_notify_cancel()
        self.add_done_callback(_forget_progress)

    def result(self, timeout: float | None = None) -> None:
        self._wait(timeout)
        return super().result(0.0)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._wait(timeout)
        return super().exception(0.0)

    def _wait(self, timeout: float | None) -> None:
        if self.done():  # the usual case under asyncio, which copies the outcome once the future is done
            return
        wait = Wait("", ENDS_THE_WAIT)
        wait_for(self, timeout, lambda: wait.goes_on(self._progress))


def _forget_progress(completion: Any) -> None:
    """Drop the function: its object may refer to the completion, and should not outlive the operation."""
    completion._progress = lambda: "an operation that has just ended"


def all_of(futures: Sequence[Future[None]], progress: Callable[[], str]) -> Future[None]:
    """A future that is done when all of these are. Its error is the first one in the order of the futures."""
    if len(futures) == 1:
        return futures[0]
    whole = Completion(progress)
    lock, num_left = threading.Lock(), [len(futures)]

    def count_down(_: Future[None]) -> None:
        with lock:
            num_left[0] -= 1
            last = num_left[0] == 0
        if last:
            conclude(whole, next((e for future in futures if (e := future.exception()) is not None), None))

    for future in futures:
        future.add_done_callback(count_down)
    return whole


def _ctrl_c_raises() -> bool:
    """True if Ctrl-C ends a wait of this thread."""
    on_main = threading.current_thread() is threading.main_thread()
    return on_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler
