"""Blocking calls, made on threads of this library while a loop of asyncio goes on.

In: a function. Out: its result, in a coroutine of any loop. Knows nothing of: weights, verl.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from ...plumbing import loops, threads

T = TypeVar("T")


async def off_loop(fn: Callable[[], T]) -> T:
    """Make a blocking call on a thread of this library, and wait for it on whichever loop this is."""
    outcome = threads.running_future()

    def call() -> None:
        try:
            outcome.set_result(fn())
        except BaseException as error:
            outcome.set_exception(error)

    loop = loops.get_loop()
    loop.soon(lambda: loop.callers.submit(call, outcome.set_exception))
    result: T = await asyncio.wrap_future(outcome)
    return result
