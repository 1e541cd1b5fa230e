"""The life of an object: a table of its states.

In: the states that may follow each state. Out: the present state. Knows nothing of: what the states mean, locks.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Generic, TypeVar

S = TypeVar("S")


class Life(Generic[S]):
    """The present state of one object, at first the first one of the table. The lock of its owner guards it."""

    __slots__ = ("_successors", "now")

    def __init__(self, successors: Mapping[S, Collection[S]]) -> None:
        self._successors = successors
        self.now = next(iter(successors))

    def go(self, state: S) -> bool:
        """Change to a state if it may follow the present one. False if it may not."""
        if state not in self._successors[self.now]:
            return False
        self.now = state
        return True
