"""What a process must not take over from the one that it was forked from.

In: functions that make a module's globals anew. Out: their calls, in each forked child. Knows nothing of: what they forget.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Forget = TypeVar("Forget", bound=Callable[[], None])
K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

_forgetting: list[Callable[[], None]] = []


def in_forked_child(forget: Forget) -> Forget:
    """Have this called in every child that is forked from now on. It takes no lock: nobody there may be left to release it."""
    _forgetting.append(forget)
    return forget


class OnceInProcess(Generic[K, V]):
    """What a process makes once for each key, when it is first asked for. A forked child begins without any of it."""

    def __init__(self, make: Callable[[K], V]) -> None:
        self._make = make
        self._forget()
        in_forked_child(self._forget)

    def __call__(self, key: K) -> V:
        with self._making:
            if key not in self._made:
                self._made[key] = self._make(key)
            return self._made[key]

    def _forget(self) -> None:
        self._made: dict[K, V] = {}
        self._making = threading.Lock()


def _forget_all() -> None:
    for forget in _forgetting:
        forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)
