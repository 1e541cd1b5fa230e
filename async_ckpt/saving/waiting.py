"""Signs of life: whoever waits for saves is told for which, and how far they are.

In: waits, the saves that they are about. Out: a line after two seconds, and another every thirty. Knows nothing of: how
a save is made, why somebody waits for it.

While the program runs, a line goes to the logger `async_ckpt` as a warning, which is seen where nobody has configured
logging; at the interpreter's exit it goes to stderr, like all else that is said there. No thread is needed for that: a
wait wakes up five times a second, and looks at the clock.
"""

from __future__ import annotations

import logging
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from ..host.pool import LIVENESS_SECONDS
from ..spans import TIMEKEEPER

if TYPE_CHECKING:
    from .handle import SaveHandle
    from .worker import Pending

_FIRST_SECONDS: Final = 2.0
_AGAIN_SECONDS: Final = 30.0

# What Ctrl-C does to a wait.
GIVES_UP: Final = "Ctrl-C gives up what is not committed"
ENDS_THE_WAIT: Final = "Ctrl-C ends the wait, not the save"

_log = logging.getLogger("async_ckpt")


class Wait:
    """One wait, of one thread, from now on; `where` and `ctrl_c` are for people to read."""

    def __init__(self, where: str, ctrl_c: str, *, say: Callable[[str], None] = _log.warning) -> None:
        self._where, self._ctrl_c, self._say = where, ctrl_c, say
        self._begin = TIMEKEEPER.now()
        self._next = self._begin + _FIRST_SECONDS

    def goes_on(self, saves: Callable[[], Sequence[SaveHandle]]) -> None:
        """To be called whenever it wakes up: tell, if it is time to, which saves it is for."""
        now = TIMEKEEPER.now()
        if now < self._next:
            return
        self._next = now + _AGAIN_SECONDS
        line = f"async_ckpt has waited {now - self._begin:.0f} s {self._where} for {_what(saves())}"
        self._say(f"{line}; {self._ctrl_c}" if _ctrl_c_raises() else line)


def wait_for(
    future: Future[Any], timeout: float | None = None, goes_on: Callable[[], None] = lambda: None
) -> bool:
    """Wait for an end, not for its outcome; `goes_on` is called whenever the wait wakes up.

    False when `timeout` seconds have passed without an end.
    """
    deadline = None if timeout is None else TIMEKEEPER.now() + timeout
    while True:
        left = LIVENESS_SECONDS if deadline is None else deadline - TIMEKEEPER.now()
        try:
            # Not a handle's own: nobody has looked at it by this.
            Future.exception(future, max(0.0, min(left, LIVENESS_SECONDS)))
            return True
        except TimeoutError:
            if left <= 0:
                return False
        goes_on()


def wait_for_saves(pending: Sequence[Pending], wait: Wait, timeout: float | None = None) -> None:
    """Wait until all of these have finished. Raises TimeoutError when `timeout` seconds have passed without."""

    def goes_on() -> None:
        wait.goes_on(lambda: [save.handle for save in pending if not save.finished.done()])

    deadline = None if timeout is None else TIMEKEEPER.now() + timeout
    for save in pending:
        left = None if deadline is None else max(0.0, deadline - TIMEKEEPER.now())
        if not wait_for(save.finished, left, goes_on):
            raise TimeoutError(f"{save.handle!r} is still under way after {timeout} s")


def name_of(handle: SaveHandle) -> str:
    """What a save is called where people read of it."""
    return handle.path if handle.step is None else f"step {handle.step} ({handle.path})"


def say_on_stderr(line: str) -> None:
    """Where there is one."""
    with suppress(OSError, ValueError):  # closed, or nobody reads it any more
        if sys.stderr is not None:
            print(line, file=sys.stderr, flush=True)


def _what(saves: Sequence[SaveHandle]) -> str:
    """The oldest of them, and how far it is."""
    if not saves:  # another thread plans one, or they have ended just now
        return "another save"
    first = saves[0]
    others = f" and {len(saves) - 1} more" if len(saves) > 1 else ""
    if not first.done():
        return f"{name_of(first)}{others}: {first.progress}"
    ended = "committed" if Future.exception(first) is None else "failed"
    return f"{name_of(first)}{others}: {ended}, and cleaning up"


def _ctrl_c_raises() -> bool:
    """Whether it ends the wait of this thread."""
    on_main = threading.current_thread() is threading.main_thread()
    return on_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler
