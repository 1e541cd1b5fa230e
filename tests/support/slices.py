"""What takes too long for every run of the tests: a slice of each matrix, and all of it with ASYNC_CKPT_MATRICES=all."""

from __future__ import annotations

import os

ALL = os.environ.get("ASYNC_CKPT_MATRICES") == "all"


def one_in(number: int) -> int:
    """The step of a range of which one in `number` is tried. One that is odd meets every bit of the bytes in turn."""
    return 1 if ALL else number


def examples(number: int) -> int:
    """How many examples hypothesis tries of so many."""
    return number // one_in(3)
