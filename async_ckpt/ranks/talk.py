"""The words of ranks to each other about one restore.

In: words, by what they are about. Out: the words of other ranks. Knows nothing of: what is restored.

A rank that hears nothing for long takes the other for dead. So whoever has to wait for something of its own before it can
say a word says meanwhile that this takes time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Protocol

from ..spans import monotonic
from .world import Words

# From one such sign to the next: much less than a rank waits for a word.
SIGN_SECONDS: Final = 60.0


class Hear(Protocol):
    """Waits for the words of these keys: what they are, where it is waited, and whether there was a sign since the last call."""

    def __call__(
        self, keys: Sequence[str], what: str, where: str, takes_time: Callable[[], bool]
    ) -> list[str]: ...


class Talk:
    """The words of one restore, which all ranks call in the same order. From the thread that restores."""

    def __init__(self, rank: int, size: int, words: Callable[[], Words], hear: Hear, prefix: str) -> None:
        self.rank, self.size = rank, size
        self._words, self._hear, self._prefix = words, hear, prefix
        self._signed = monotonic()  # when this rank has last said that it takes time
        self._num_signs = 0  # that this rank has given, or heard

    def say(self, key: str, word: str) -> None:
        """To all ranks; each key once."""
        self._words().say(f"{self._prefix}/{key}", word)

    def hear(self, keys: Sequence[str], what: str) -> list[str]:
        """The words of these keys, once they are said. Raises PeerFailedError if that takes too long."""
        return self._hear([f"{self._prefix}/{key}" for key in keys], what, "restore()", self._has_signed)

    def take_time(self) -> None:
        """On rank 0, now and then: the others are to wait longer for its next word."""
        if monotonic() - self._signed > SIGN_SECONDS:
            self._signed = monotonic()
            self.say(self._sign(), "")
            self._num_signs += 1

    def _has_signed(self) -> bool:
        """True if rank 0 has said once more that it takes time."""
        is_said = self.rank != 0 and self._words().is_said(f"{self._prefix}/{self._sign()}")
        self._num_signs += is_said
        return is_said

    def _sign(self) -> str:
        return f"takes time/{self._num_signs}"
