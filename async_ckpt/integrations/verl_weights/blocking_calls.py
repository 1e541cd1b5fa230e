"""Blocking calls on threads of this library, while a loop of asyncio continues.

In: a function. Out: its result, in a coroutine of any loop. Knows nothing of: weights, verl.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

from ...plumbing import loops, threads

T = TypeVar("T")


async def off_loop(fn: Callable[[], T]) -> T:
    """Make a blocking call on a thread of this library, and await its result on the running loop."""
    loop, outcome = loops.get_loop(), threads.running_future()
    loop.soon(lambda: loop.callers.submit(partial(threads.resolve, outcome, fn), outcome.set_exception))
    return await loops.awaitable(outcome)
