"""Retries of requests to a store that is unavailable.

In: a call that fails. Out: its result, or its last error after the deadline. Knows nothing of: any store.

The code that translates a client's error records in `error.transient` whether a retry may help. The waits grow and are
random, so that a thousand ranks that were refused at the same time do not all retry at the same time.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, TypeVar

from ..plumbing import timing

if TYPE_CHECKING:
    from tenacity import RetryCallState

T = TypeVar("T")

_FIRST_WAIT_SECONDS: Final = 0.2
_LONGEST_WAIT_SECONDS: Final = 30.0
# The random waits of tenacity would draw from Python's global generator, and change the random numbers of the training.
_RANDOM: Final = random.SystemRandom()


def is_transient(error: BaseException) -> bool:
    """Whether the same call may succeed later without any change on our side."""
    return bool(getattr(error, "transient", False))


def persist(
    call: Callable[[], T],
    *,
    deadline_seconds: float,
    since: Callable[[], float] | None = None,
    on_retry: Callable[[BaseException], None] = lambda _: None,
    timer: timing.Timekeeper = timing.TIMEKEEPER,
    sleep: Callable[[float], None] | None = None,
) -> T:
    """Repeat `call` until it succeeds, raises a permanent error, or has failed for `deadline_seconds`.

    Raises the last error. The deadline is counted from the start, or from the moment that `since` returns when the
    first call has failed: so a long upload has time left when its first part fails. Before each wait, `on_retry` is
    called with the error. `sleep` makes the wait; by default, it is the `sleep` of the timer.
    """
    try:
        import tenacity
    except ImportError:
        raise ImportError('stores need tenacity; pip install "async_ckpt[s3]"') from None

    begin = timer.now()
    began: list[float] = []

    def is_over(state: RetryCallState) -> bool:
        if not began:
            began.append(since() if since else begin)
        return timer.now() + state.upcoming_sleep - began[0] >= deadline_seconds

    def wait(state: RetryCallState) -> float:
        longest = _FIRST_WAIT_SECONDS * 2.0 ** min(state.attempt_number - 1, 16)
        return _RANDOM.uniform(0.0, min(longest, _LONGEST_WAIT_SECONDS))

    def report_retry(state: RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome else None
        assert error is not None
        on_retry(error)

    return tenacity.Retrying(
        retry=tenacity.retry_if_exception(is_transient),
        wait=wait,
        stop=is_over,
        before_sleep=report_retry,
        sleep=sleep or timer.sleep,
        reraise=True,
    )(call)
