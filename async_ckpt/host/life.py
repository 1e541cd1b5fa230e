"""The life of an object, as a table of its states.

In: which state may follow which. Out: the state that it is in. Knows nothing of: what the states mean, locks.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Generic, TypeVar

S = TypeVar("S")


class Life(Generic[S]):
    """Begins in the first state of the table. Whoever owns the object locks this as all its state."""

    __slots__ = ("_goes", "now")

    def __init__(self, goes: Mapping[S, Collection[S]]) -> None:
        self._goes = goes
        self.now = next(iter(goes))

    def go(self, state: S) -> bool:
        """Go over to a state, if it may follow the present one: False when it may not."""
        if state not in self._goes[self.now]:
            return False
        self.now = state
        return True
