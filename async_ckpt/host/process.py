"""What a process must not take over from the one that it was forked from.

In: functions that make a module's globals anew. Out: their calls, in each forked child. Knows nothing of: what they forget.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TypeVar

Forget = TypeVar("Forget", bound=Callable[[], None])

_forgetting: list[Callable[[], None]] = []


def in_forked_child(forget: Forget) -> Forget:
    """Have this called in every child that is forked from now on. It takes no lock: nobody there may be left to release it."""
    _forgetting.append(forget)
    return forget


def _forget_all() -> None:
    for forget in _forgetting:
        forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)
