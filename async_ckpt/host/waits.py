"""Signs of life: whoever waits longer than two seconds is told for what, and how far it is.

In: waits, and words for what they are for. Out: a line after two seconds, and another every thirty.
Knows nothing of: saves, why somebody waits.

While the program runs, a line goes to the logger `async_ckpt` as a warning, which is seen where nobody has configured
logging; at the interpreter's exit it goes to stderr, like all else that is said there. No thread is needed for that: a
wait wakes up five times a second, and looks at the clock.
"""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Final

from ..spans import TIMEKEEPER
from .threads import is_library_thread

# How long a waiting thread sleeps before it looks whether what it waits for can still come.
LIVENESS_SECONDS: Final = 0.2
_FIRST_SECONDS: Final = 2.0
_AGAIN_SECONDS: Final = 30.0

# What Ctrl-C does to a wait.
GIVES_UP: Final = "Ctrl-C gives up what is not committed"
ENDS_THE_WAIT: Final = "Ctrl-C ends the wait, not the save"
ENDS_THE_CALL: Final = "Ctrl-C ends the call, without saving"

_log = logging.getLogger("async_ckpt")


class Wait:
    """One wait, of one thread, from now on; `where` and `ctrl_c` are for people to read."""

    def __init__(self, where: str, ctrl_c: str, *, say: Callable[[str], None] = _log.warning) -> None:
        self._where, self._ctrl_c, self._say = where, ctrl_c, say
        self._begin = TIMEKEEPER.now()
        self._next = self._begin + _FIRST_SECONDS

    def goes_on(self, what: Callable[[], str]) -> None:
        """To be called whenever it wakes up, without a lock: say what it is for, if it is time to."""
        now = TIMEKEEPER.now()
        if now < self._next or is_library_thread():  # nobody waits for those
            return
        self._next = now + _AGAIN_SECONDS
        where = f" {self._where}" if self._where else ""
        line = f"async_ckpt has waited {now - self._begin:.0f} s{where} for {what()}"
        self._say(f"{line}; {self._ctrl_c}" if _ctrl_c_raises() else line)


def wait_for(
    future: Future[Any], timeout: float | None = None, goes_on: Callable[[], None] = lambda: None
) -> bool:
    """Wait for an end, not for its outcome; `goes_on` is called whenever the wait wakes up.

    False when `timeout` seconds have passed without an end.
    """
    deadline = _deadline(timeout)
    while True:
        left = LIVENESS_SECONDS if deadline is None else deadline - TIMEKEEPER.now()
        try:
            # Not its own: that may wait by this, and nobody has looked at a handle by this.
            Future.exception(future, max(0.0, min(left, LIVENESS_SECONDS)))
            return True
        except TimeoutError:
            if left <= 0:
                return False
        goes_on()


def _deadline(timeout: float | None) -> float | None:
    """When a wait of so many seconds ends, which may be over already. Raises TypeError for what is not a number."""
    if timeout is None:
        return None
    try:
        return TIMEKEEPER.now() + timeout
    except TypeError:
        raise TypeError(f"timeout must be a number of seconds, or None, got {timeout!r:.100}") from None


def wait_for_all(
    futures: Sequence[Future[Any]],
    timeout: float | None = None,
    goes_on: Callable[[], None] = lambda: None,
) -> bool:
    """The same for the ends of several, in `timeout` seconds for all of them together."""
    deadline = _deadline(timeout)
    return all(
        wait_for(future, None if deadline is None else max(0.0, deadline - TIMEKEEPER.now()), goes_on)
        for future in futures
    )


class Completion(Future[None]):
    """A future that nobody can cancel, and that says to whoever waits for it what for."""

    def __init__(self, told: Callable[[], str]) -> None:
        super().__init__()
        self._told = told
        self.set_running_or_notify_cancel()

    def set_result(self, result: None) -> None:
        super().set_result(result)
        self._told = _ended  # what is told of may hold this, and should not outlive its end

    def set_exception(self, exception: BaseException | None) -> None:
        super().set_exception(exception)
        self._told = _ended

    def result(self, timeout: float | None = None) -> None:
        self._wait(timeout)
        return super().result(0.0)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._wait(timeout)
        return super().exception(0.0)

    def _wait(self, timeout: float | None) -> None:
        if self.done():  # whoever copies how it ended, as asyncio does, waits for nothing
            return
        wait = Wait("", ENDS_THE_WAIT)
        wait_for(self, timeout, lambda: wait.goes_on(self._told))


def _ended() -> str:
    return "what has ended just now"


def all_of(futures: Sequence[Future[None]], told: Callable[[], str]) -> Future[None]:
    """Resolved when all of these are: with the error of the first, in their order, that has one."""
    if len(futures) == 1:
        return futures[0]
    whole = Completion(told)
    lock, left = threading.Lock(), [len(futures)]

    def ended(_: Future[None]) -> None:
        with lock:
            left[0] -= 1
            last = left[0] == 0
        if last:
            error = next((e for future in futures if (e := future.exception()) is not None), None)
            if error is None:
                whole.set_result(None)
            else:
                whole.set_exception(error)

    for future in futures:
        future.add_done_callback(ended)
    return whole


def _ctrl_c_raises() -> bool:
    """Whether it ends the wait of this thread."""
    on_main = threading.current_thread() is threading.main_thread()
    return on_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler
