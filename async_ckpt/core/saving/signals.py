"""The signals by which a scheduler asks the process to leave, and the checkpointers that listen for them.

In: signals. Out: a flag for each listener. Knows nothing of: steps, saves.

Python runs a handler on the main thread, between any two of its instructions. Ours takes no lock and only sets flags.
Each signal has one handler for all listeners, which is installed while there are listeners. If another handler was
installed over ours, ours cannot be removed; without listeners it only does what the handler before it did.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import warnings
import weakref
from collections.abc import Iterable
from types import FrameType
from typing import Any, Final

from ...errors import UsageError
from ..host.process import in_forked_child
from ..spec import integer

Signals = bool | Iterable[str | int]

# Kubernetes and spot machines send SIGTERM; Slurm sends the signal given by `--signal=USR1@120`.
_SENT_BY_SCHEDULERS: Final = ("SIGTERM", "SIGUSR1")
# The first two cannot be caught; after the others the process itself cannot continue.
_NOT_DEFERRABLE: Final = ("SIGKILL", "SIGSTOP", "SIGABRT", "SIGBUS", "SIGFPE", "SIGILL", "SIGSEGV")


def signals_of(given: Signals) -> tuple[int, ...]:
    """The numbers of the signals that the user means. For True: those that schedulers send and this system has.

    Raises ValueError for a signal that does not exist or cannot be deferred, and TypeError for other values.
    """
    if isinstance(given, bool):
        numbers = [getattr(signal, name, None) for name in _SENT_BY_SCHEDULERS] if given else []
        return tuple(int(number) for number in numbers if number is not None)
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise TypeError(f'signals must be True or several signals, such as ("SIGTERM", "SIGUSR2"), got {given!r:.100}')
    return tuple(dict.fromkeys(map(_number_of, given)))


def _number_of(given: str | int) -> int:
    try:
        number = signal.Signals.__members__.get(given) if isinstance(given, str) else integer(given)
    except TypeError:
        raise TypeError(f'a signal is a name such as "SIGTERM" or a number, got {given!r:.100}') from None
    if number is None or number not in signal.valid_signals():
        raise ValueError(f'this system has no signal {given!r}; names are such as "SIGTERM"')
    if _name_of(number) in _NOT_DEFERRABLE:
        raise ValueError(f"{_name_of(number)} ends the process at once; name a signal that can be handled")
    return int(number)


class Notice:
    """A flag that is set when a signal asks the process to leave. A checkpointer creates it; any thread reads it."""

    def __init__(self, signals: Signals) -> None:
        self._signums = signals_of(signals)
        self.has_signals = bool(self._signums)  # some signals ask the process to leave
        self._pid = os.getpid()
        self._is_open = False
        self.is_given = False  # set by a handler

    def listen(self) -> None:
        """Install handlers. Ignored signals stay ignored. Raises RuntimeError on any thread but the main one."""
        global _listeners
        if not self._signums:
            return
        if not _is_main_thread():
            raise UsageError(
                "Due(signals=…) installs signal handlers, which Python allows only on the main thread; construct the "
                "checkpointer there (it may be used on any thread), or leave signals= out"
            )
        for signum in self._signums:
            if not _has_listener(signum):
                _deferred.discard(signum)
            _install(signum)
        self._is_open = True
        _listeners = (*(ref for ref in _listeners if ref() is not None), weakref.ref(self))

    def hears(self, signum: int) -> bool:
        """True if this notice listens for a signal. In a forked child, the parent's notices do not."""
        return self._is_open and signum in self._signums and self._pid == os.getpid()

    def close(self) -> None:
        """Restore the earlier handlers of signals without another listener. Idempotent.

        Only the main thread can change handlers. When called on another thread, ours stay, and do what the handlers
        before them did.
        """
        self._is_open = False
        if _is_main_thread():
            for signum in self._signums:
                if not _has_listener(signum):
                    _put_back(signum)


# All of this changes only on the main thread. `_listeners` is replaced as a whole, since a handler may be reading it.
_listeners: tuple[weakref.ref[Notice], ...] = ()
_installed: set[int] = set()  # signals that have had a handler of ours
_deferred: set[int] = set()  # signals that would have ended the process


class _Handler:
    """Our handler of one signal, installed over an earlier one."""

    def __init__(self, before: Any) -> None:
        self.before = before  # a function, or SIG_DFL

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        listening = _listening(signum)
        for notice in listening:
            notice.is_given = True
        if callable(self.before):
            self.before(signum, frame)
        elif listening and signum not in _deferred:
            _deferred.add(signum)
        else:
            signal.signal(signum, signal.SIG_DFL)
            os.kill(os.getpid(), signum)  # so that the exit status names the signal


def _install(signum: int) -> None:
    before = signal.getsignal(signum)
    if isinstance(before, _Handler) or before is signal.SIG_IGN:
        return
    if before is None or (before is signal.SIG_DFL and _is_caught(signum)):
        warnings.warn(
            f"{_name_of(signum)} has a handler that was not installed from Python (by faulthandler, for one). "
            "async_ckpt leaves it in place, so this signal makes no save due; name other signals with Due(signals=…)",
            RuntimeWarning,
            stacklevel=4,
        )
        return
    _installed.add(signum)
    signal.signal(signum, _Handler(before))


def _put_back(signum: int) -> None:
    """Restore the handler before ours, unless another one was installed over ours."""
    handler = signal.getsignal(signum)
    if isinstance(handler, _Handler):
        signal.signal(signum, handler.before)


def _is_caught(signum: int) -> bool:
    """True if the kernel has a handler. Python reports only handlers that were installed from Python."""
    if sys.platform != "linux":
        return False
    with open("/proc/self/status", encoding="ascii", errors="replace") as file:
        caught = next((line for line in file if line.startswith("SigCgt:")), "SigCgt: 0")
    return bool(int(caught.split()[1], 16) >> (signum - 1) & 1)


def _listening(signum: int) -> list[Notice]:
    return [notice for ref in _listeners if (notice := ref()) is not None and notice.hears(signum)]


def _has_listener(signum: int) -> bool:
    return bool(_listening(signum))


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _name_of(signum: int) -> str:
    try:
        return signal.Signals(signum).name
    except ValueError:  # a real-time signal has no name
        return f"signal {signum}"


@in_forked_child
def _forget() -> None:
    """Let these signals end a forked child as they would without us; its only thread is its main thread."""
    global _listeners
    _listeners = ()
    _deferred.clear()
    for signum in _installed:
        _put_back(signum)
