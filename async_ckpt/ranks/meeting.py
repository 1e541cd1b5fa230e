"""The rendezvous of ranks: rank 0 says a word once, and the others wait for it until a deadline.

In: the words of a process group's store. Out: words that all ranks have. Knows nothing of: the things that they name.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Final

from ..errors import PeerFailedError
from ..spans import TIMEKEEPER, monotonic
from .world import Words, World

# How long a rank waits for the first save, export or publication of another rank.
MEETING_SECONDS: Final = 600.0
# Seconds between two calls of `look_around`.
_LOOK_AROUND_SECONDS: Final = 5.0


def hear(
    words: Words,
    keys: Sequence[str],
    check: Callable[[], None],
    late: Callable[[], PeerFailedError],
    look_around: Callable[[], bool] = lambda: False,
) -> list[str]:
    """Return the words of these keys once all of them are said. Raises the error that `late` makes, after MEETING_SECONDS.

    `check` is called between looks and may raise. `look_around` is called every few seconds, and the deadline begins anew
    when it returns True.
    """
    begin = looked = monotonic()

    def go_on(seconds: float) -> None:
        nonlocal begin, looked
        check()
        if monotonic() - begin > MEETING_SECONDS:
            raise late()
        if monotonic() - looked > _LOOK_AROUND_SECONDS:
            looked = monotonic()
            if look_around():
                begin = looked
        TIMEKEEPER.sleep(seconds)

    return words.hear(keys, go_on)


class RankZeroWord:
    """A random word of rank 0 that names something for all ranks. Each rank creates its own for the same key.

    A process without a store has a word of its own. Words are opened only where there is a store.
    """

    def __init__(self, world: World, words: Callable[[], Words], key: str, *, num_bytes: int) -> None:
        self._words, self._key = words, key
        self._word: str | None = None
        if world.rank == 0 or world.store is None:
            self._word = os.urandom(num_bytes).hex()
            if world.store is not None:
                words().say(key, self._word)

    def hear(self, check: Callable[[], None], whom: str) -> str:
        """Return the word, and wait for it if need be. Raises PeerFailedError: "waited 600 s for" `whom`."""
        if self._word is None:
            (self._word,) = hear(
                self._words(),
                [self._key],
                check,
                lambda: PeerFailedError(
                    f"waited {MEETING_SECONDS:.0f} s for {whom}", rank=0, undecided=False
                ),
            )
        return self._word
