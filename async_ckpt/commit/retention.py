"""Which steps go.

In: the committed steps. Out: those to delete. Knows nothing of: storage.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Retention:
    """Keep the newest `keep_last` steps, and for good every step that `keep_every` divides. None keeps all."""

    keep_last: int | None = None
    keep_every: int | None = None

    def __post_init__(self) -> None:
        if self.keep_last is not None and self.keep_last < 1:
            raise ValueError(f"keep_last must be at least 1, got {self.keep_last}; None keeps every step")
        if self.keep_every is not None and self.keep_every < 1:
            raise ValueError(f"keep_every must be at least 1, got {self.keep_every}")
        if self.keep_every is not None and self.keep_last is None:
            raise ValueError("keep_every needs keep_last: without it every step is kept anyway")

    def doomed(self, steps: Sequence[int], *, protected: Collection[int] = ()) -> list[int]:
        """Steps to delete, oldest first. `steps` are the committed ones, in ascending order."""
        if self.keep_last is None:
            return []
        return [
            step
            for step in steps[: -self.keep_last]
            if step not in protected and not (self.keep_every and step % self.keep_every == 0)
        ]
