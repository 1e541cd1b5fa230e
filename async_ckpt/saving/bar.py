"""A bar for each save: `progress=True`.

In: handles. Out: lines on stderr, or in a notebook, drawn by tqdm. Knows nothing of: how a save is made.

A task on the worker's loop follows the save; what is drawn is drawn on a helper thread, for a terminal may hold up who
writes to it. Whatever goes wrong with that costs the bar, and not the save.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any, Final

from ..host.loop import OffLoop
from .handle import SaveHandle

_DRAW_SECONDS: Final = 0.2
# Where what is drawn is kept, in a log file, and each drawing is a line of it.
_LOG_SECONDS: Final = 30.0

_log = logging.getLogger("async_ckpt")


class Bars:
    """Draws them. Raises ImportError where tqdm is not installed."""

    def __init__(self) -> None:
        try:
            from tqdm.auto import tqdm  # type: ignore[import-untyped]
        except ImportError as error:
            raise ImportError(
                'progress=True needs tqdm to draw with: pip install "async_ckpt[progress]"'
            ) from error

        class Bar(tqdm):  # type: ignore[misc]
            monitor_interval = 0  # no thread of tqdm's own: we draw often enough

        self._bar = Bar
        self._is_widget = any(base.__module__ == "tqdm.notebook" for base in tqdm.__mro__)

    async def follow(self, handle: SaveHandle, off_loop: OffLoop) -> None:
        """Draw until the save has ended."""
        ended = asyncio.Event()
        Future.add_done_callback(handle, lambda _: ended.set())  # it is resolved on this very loop
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
            leave=None,  # below a bar of the user's, only that one stays
        )


class LenientFile:
    """A file that may be closed, or that nobody reads any more.

    What it raised would leave tqdm's lock held, and with it every bar of the training would wait for ever.
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
        """`tqdm.write` clears the bars that are drawn on the same file."""
        return bool(self._file == getattr(other, "_file", other))

    def __hash__(self) -> int:
        return hash(self._file)


def _draw(bar: Any, handle: SaveHandle) -> None:
    if handle.done() and Future.exception(handle) is not None:
        bar.set_postfix_str("failed", refresh=False)
    bar.update(max(0, handle.progress.written_bytes - bar.n))
