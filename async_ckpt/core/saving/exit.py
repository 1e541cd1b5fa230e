"""The end of the process: wait for every save under way, or give it up, before the interpreter joins its threads.

In: the saves that are under way. Out: all of them ended, a line on stderr for each lost save, and the exit status.
Knows nothing of: how a save is carried out.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from contextlib import suppress
from math import inf
from typing import Any, Final, NoReturn

from ..host import waits
from ..host.loop import Loop, last_loop
from ..host.operations import flush_all
from ..host.waits import GIVES_UP, LIVENESS_SECONDS, Wait, wait_for, wait_for_all
from ..ranks.start import answer_the_last
from ..timing import monotonic
from .handle import SaveHandle, name_of, progress_of
from .ledger import abandon, all_saves
from .save import Save, SaveState
from .tiers import all_tiers

# EX_TEMPFAIL of sysexits.h: a temporary failure, which may not recur when the job is started again.
EXIT_STATUS_SAVE_FAILED: Final = 75
EXIT_STATUS_INTERRUPTED: Final = 130


def drain_at_exit() -> None:
    """Wait for every save under way, give up those that exceed `exit_timeout`, and report lost saves on stderr."""
    loop = last_loop()
    if loop is None:
        flush_all(waits.LISTENERS_SECONDS)
        return
    loop.hurry()
    status = _wait_for_all(loop)
    for tiers in all_tiers():
        with suppress(KeyboardInterrupt):  # Ctrl-C ends the wait
            for left in tiers.finish(0.0 if status else tiers.exit_timeout, log=log_to_stderr):
                log_to_stderr(f"async_ckpt: {left}")
        status = status or (EXIT_STATUS_SAVE_FAILED if tiers.has_lost else 0)
    with suppress(KeyboardInterrupt):
        answer_the_last()
    saves = all_saves()
    wait_for_all([save.handle for save in saves if save.finished.done()], waits.LEAST_ABANDON_SECONDS)
    stuck = [save for save in saves if not save.finished.done()]
    lost = [save.handle for save in saves if save.is_unseen]
    for handle in lost:
        error = handle.exception()
        notes = getattr(error, "__notes__", [])
        _report_lost(handle, "; ".join([f"{type(error).__name__}: {error}", *notes]))
    for save in stuck:
        if not (save.handle.done() or save.life.now is SaveState.COMMITTED):
            _report_lost(save.handle, "it was given up, but a call to its storage has not returned")
            status = status or EXIT_STATUS_SAVE_FAILED
    is_hanging = bool(stuck) or not _is_quiet(loop)
    flush_all(waits.LISTENERS_SECONDS)
    if status or lost or is_hanging:
        _exit_with(status or (EXIT_STATUS_SAVE_FAILED if lost else 0), at_once=is_hanging)
    loop.stop()


def _wait_for_all(loop: Loop) -> int:
    """Wait for all saves. Returns 0, or the exit status for an interrupted wait."""
    begin = monotonic()
    wait = Wait("at exit", GIVES_UP, log=log_to_stderr)
    given_up: list[Save] = []

    def waiting() -> list[Save]:
        return [save for save in all_saves() if not save.finished.done() and save not in given_up]

    try:
        loop.sync()
        while (saves := waiting()) and loop.is_alive:
            seconds = monotonic() - begin
            limit = min((s.exit_timeout for s in saves if s.exit_timeout is not None), default=inf)
            if seconds > limit:
                overdue = [save for save in saves if save.exit_timeout == limit]
                abandon(overdue, f"the interpreter exits, and exit_timeout={limit} s have passed")
                given_up.extend(overdue)
            elif not wait_for(saves[0].finished, min(LIVENESS_SECONDS, limit - seconds)):
                wait.goes_on(lambda: progress_of([save.handle for save in waiting()]))
    except KeyboardInterrupt:
        abandon(waiting(), "interrupted while the interpreter waited for it")
        return EXIT_STATUS_INTERRUPTED
    return 0


def _is_quiet(loop: Loop) -> bool:
    try:
        return loop.is_quiet(waits.LEAST_ABANDON_SECONDS)
    except KeyboardInterrupt:
        return False


def _report_lost(handle: SaveHandle, why: str) -> None:
    log_to_stderr(f"async_ckpt: {name_of(handle)} was not saved: {why}")


def log_to_stderr(line: str) -> None:
    """Print a line on stderr, if there is a stderr."""
    with suppress(OSError, ValueError):  # closed, or a pipe without a reader
        if sys.stderr is not None:
            print(line, file=sys.stderr, flush=True)


_exit_code: Any = None


def note_exit_status() -> None:
    """Record the argument of `sys.exit`: Python does not pass it to exit hooks, and the user's status must stand."""
    if getattr(sys.exit, "_notes_status", False):
        return
    really_exit = sys.exit

    def noting_exit(status: Any = None, /) -> NoReturn:
        global _exit_code
        if threading.current_thread() is threading.main_thread():  # on other threads it does not end the process
            _exit_code = status
        really_exit(status)

    noting_exit._notes_status = True  # type: ignore[attr-defined]
    sys.exit = noting_exit


def _exit_with(status: int, *, at_once: bool) -> None:
    """Make the process end with this status, unless it is about to end with another non-zero status."""
    failed = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None) or _exit_code not in (None, 0)
    if failed and not at_once:
        return
    if failed:
        status = _exit_code & 0xFF if isinstance(_exit_code, int) and _exit_code else 1

    def last() -> None:
        # Registered last, so called first: run all other hooks, then exit with our status.
        atexit.unregister(last)
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError, AttributeError):  # closed, broken or None: nowhere to report to
                stream.flush()
        os._exit(status)

    if at_once:  # a thread is stuck in a call that does not return: joining it would hang
        last()
    atexit.register(last)


# Runs before the interpreter joins its threads, and before the crews are stopped: their hook was registered earlier.
threading._register_atexit(drain_at_exit)  # type: ignore[attr-defined]
