"""Waiting for saves: which they are, and how far, in words; and where to say it at the interpreter's exit.

In: saves under way. Out: their ends, and words for them. Knows nothing of: how a save is made, why somebody waits for it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING

from ..host.pool import LIVENESS_SECONDS
from ..host.waiting import Wait, wait_for, wait_for_all

if TYPE_CHECKING:
    from .handle import SaveHandle
    from .worker import Pending


def wait_for_saves(pending: Sequence[Pending], wait: Wait, timeout: float | None = None) -> None:
    """Wait until all of these have finished. Raises TimeoutError when `timeout` seconds have passed without."""

    def left() -> list[SaveHandle]:
        return [save.handle for save in pending if not save.finished.done()]

    if not wait_for_all(
        [save.finished for save in pending], timeout, lambda: wait.goes_on(lambda: told(left()))
    ):
        raise TimeoutError(f"{(left() or [pending[-1].handle])[0]!r} is still under way after {timeout} s")


def wait_for_decisions(pending: Sequence[Pending], wait: Wait, meanwhile: Callable[[], None]) -> None:
    """Wait until each of these is committed, has failed, or was given up. `meanwhile` is called now and then."""

    def left() -> list[SaveHandle]:
        return [save.handle for save in pending if not save.handle.done()]

    for save in pending:
        while not (save.is_given_up or wait_for(save.handle, LIVENESS_SECONDS)):
            wait.goes_on(lambda: told(left()))
            meanwhile()


def name_of(handle: SaveHandle) -> str:
    """What a save is called where people read of it."""
    return named(handle.step, handle.path)


def named(step: int | None, path: str) -> str:
    """The same of one that has no handle yet."""
    return path if step is None else f"step {step} ({path})"


def told(saves: Sequence[SaveHandle]) -> str:
    """The oldest of them, and how far it is."""
    if not saves:  # another thread plans one, or they have ended just now
        return "another save"
    first = saves[0]
    others = f" and {len(saves) - 1} more" if len(saves) > 1 else ""
    if not first.done():
        return f"{name_of(first)}{others}: {first.progress}"
    ended = "committed" if Future.exception(first) is None else "failed"
    return f"{name_of(first)}{others}: {ended}, and cleaning up"


def say_on_stderr(line: str) -> None:
    """Where there is one."""
    with suppress(OSError, ValueError):  # closed, or nobody reads it any more
        if sys.stderr is not None:
            print(line, file=sys.stderr, flush=True)
