"""The log of rank 0's words to all other ranks.

In: words of rank 0. Out: the same words on each other rank, in order. Knows nothing of: their meaning.

Each word has a topic, and a rank that does not know the topic yet keeps the word for it. The other ranks poll the log
while they wait for something: a call that waits in the store could not be cancelled.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any, Final, Protocol

from ...errors import PeerFailedError
from ..host.loop import awaitable, get_loop
from ..host.waits import growing_pauses
from .store import Connection

# Polls of the store per second by all ranks together, and the first and longest pause of one rank.
_LOOKS_PER_SECOND: Final = 16_000
_FIRST_LOOK_SECONDS: Final = 0.01
_LOOK_SECONDS: Final = 0.5
# A rank that finds no next word checks at every tenth look whether that word was deleted.
_LOOKS_PER_FIRST: Final = 10
# How many words stay in the store: no living rank is that many behind.
_KEPT: Final = 1000
# Not Python's own generator: a save must not take numbers that the training would draw.
_RANDOM: Final = random.SystemRandom()

Word = dict[str, Any]


class Waiting(Protocol):
    """A call that waits for a word."""

    @property
    def attempt(self) -> str:
        """The name of the call, once rank 0 has announced it."""


def longest_pause(num_ranks: int) -> float:
    """The longest pause of each of `num_ranks` ranks between two looks, in seconds."""
    return max(_LOOK_SECONDS, num_ranks / _LOOKS_PER_SECOND)


class WordLog:
    """The log of one start, written by rank 0 and read by the others. What was read belongs to the loop's thread."""

    def __init__(self, connection: Connection, size: int, token: Future[str]) -> None:
        """`token` resolves with the token of the start."""
        self._connection, self._size, self._token = connection, size, token
        self._num_written = 0  # on rank 0, on the thread that calls the store
        self._num_read = self._num_empty = 0  # words read, and empty polls since
        self._subscribers: dict[str, Callable[[Word], None]] = {}
        self._early: dict[str, list[Word]] = {}
        self._waiting: set[Waiting] = set()
        self._reading: asyncio.Task[None] | None = None
        self._wake: asyncio.Event = asyncio.Event()  # set when a new wait begins

    @property
    def _path(self) -> str:
        return f"async_ckpt/{self._token.result()}/log"

    def append(self, topic: str, word: Word) -> Future[None]:
        """On rank 0: write a word for all other ranks. The future ends once the store has it."""
        text = json.dumps([topic, word])

        def put(store: Any) -> None:
            number, log = self._num_written, self._path
            store.set(f"{log}/{number}", text)
            # `set` has no answer, and later messages on other connections must not overtake it
            store.check([f"{log}/{number}"])
            self._num_written = number + 1
            if number >= _KEPT:
                store.set(f"{log}/first", str(number - _KEPT + 1))
                store.delete_key(f"{log}/{number - _KEPT}")

        return self._connection.ask(put)

    def subscribe(self, topic: str, subscriber: Callable[[Word], None]) -> None:
        """Call `subscriber` on the loop's thread with each word about a topic, beginning with words read already."""

        def begin() -> None:
            self._subscribers[topic] = subscriber
            for word in self._early.pop(topic, []):
                subscriber(word)

        get_loop().soon(begin)

    def wait(self, waiting: Waiting) -> None:
        """Read words until `wait_no_more` is called with the same object. On the loop's thread."""
        self._waiting.add(waiting)
        self._wake.set()
        if self._reading is None:
            self._reading = asyncio.create_task(self._read())

    def wait_no_more(self, waiting: Waiting) -> None:
        self._waiting.discard(waiting)

    @property
    def open_calls(self) -> set[str]:
        """The names of this rank's calls whose decisions it does not know. On the loop's thread."""
        return {one.attempt for one in self._waiting if one.attempt}

    async def _read(self) -> None:
        try:
            await awaitable(self._token)
            log, longest = self._path, longest_pause(self._size)
            pauses = growing_pauses(_FIRST_LOOK_SECONDS, longest)
            while self._waiting:
                text = None
                with suppress(RuntimeError):  # the store is gone, at least for now; deadlines report it
                    number, text = await awaitable(self._connection.ask(partial(self._next_word, log)))
                    self._num_read = number + (text is not None)
                if text is not None:
                    self._deliver(*json.loads(text))
                    pauses = growing_pauses(_FIRST_LOOK_SECONDS, longest)
                    continue
                if self._wake.is_set():
                    pauses = growing_pauses(_FIRST_LOOK_SECONDS, longest)
                self._wake.clear()
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._wake.wait(), next(pauses) * _RANDOM.uniform(0.75, 1.25))
        except PeerFailedError:
            pass  # this rank does not belong to this start: waiting calls get the error from the token
        finally:
            self._reading = None

    def _next_word(self, log: str, store: Any) -> tuple[int, str | None]:
        """The number of the first unread word, and the word if it is there. A rank far behind skips deleted words."""
        number = self._num_read
        if not store.check([f"{log}/{number}"]):
            self._num_empty += 1
            if self._num_empty % _LOOKS_PER_FIRST or not store.check([f"{log}/first"]):
                return number, None
            number = max(number, int(store.get(f"{log}/first")))
            if not store.check([f"{log}/{number}"]):
                return number, None
        self._num_empty = 0
        (word,) = store.multi_get([f"{log}/{number}"])  # `get` would send two requests
        return number, word.decode()

    def _deliver(self, topic: str, word: Word) -> None:
        subscriber = self._subscribers.get(topic)
        if subscriber is None:
            self._early.setdefault(topic, []).append(word)
        else:
            subscriber(word)
