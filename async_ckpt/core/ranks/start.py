"""One start of the ranks: how they find each other in a store.

In: a world with a store. Out: the token of the start, which prefixes all later keys. Knows nothing of: saves.

A store may outlive its ranks: torchrun keeps its own, and starts all ranks again. So each rank says hello with a nonce,
and rank 0 answers that nonce with the token of this start; old keys are never read. A hello may be left by a dead
process, so a rank that has the answer writes below the token that it is here. If another nonce of such a rank appears,
the rank was started again alone, and rank 0 refuses it.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any, Final
from weakref import WeakKeyDictionary, WeakSet

from ...errors import PeerFailedError
from ..host.loop import awaitable, get_loop
from ..host.process import in_forked_child, never_end, own_process
from ..host.threads import running_future
from ..host.waits import growing_pauses, wait_for_all
from .heartbeats import Heartbeats
from .store import Connection, count_of, forked_error
from .word_log import WordLog, longest_pause
from .world import World

_FIRST_LOOK_SECONDS: Final = 0.01
_LOOK_SECONDS: Final = 0.5
# Rank 0 also reads the hellos of this many ranks beyond its own number, and refuses them.
_BEYOND: Final = 16
# How long a rank lingers at close or exit: rank 0 for late ranks, another rank to report why it failed.
LINGER_SECONDS: Final = 5.0


class WorldStart:
    """This start of the ranks, as one process knows it. `start_of` creates it; any thread may call it."""

    def __init__(self, world: World) -> None:
        self.rank, self.size = world.rank, world.size
        self.connection = Connection(world.store)
        self.heartbeats = Heartbeats(self.connection, world.rank, world.size, lambda: self.log.open_calls)
        self.openings = itertools.count(1)
        self.nonce = secrets.token_hex(8)
        self.nonces: dict[int, str] = {}  # on rank 0: the nonce of each other rank that was answered last
        self._hello = f"{self.nonce} {world.size} {own_process()}"
        # The name of this start: the same on all ranks, and different for every start. On rank 0 it is known at once.
        # On others, it has PeerFailedError if rank 0 knows another process as this rank.
        self.token: Future[str] = running_future()
        self.all_here: Future[None] = running_future()  # on rank 0: all other ranks have come
        self.leaving: Future[None] | None = None  # on another rank: resolves when its last message is sent
        self.log = WordLog(self.connection, world.size, self.token)
        if world.rank == 0:
            self._begin(secrets.token_hex(8))
            get_loop().begin(self._answer_hellos())
        else:
            get_loop().begin(self._send_hello())

    # --- the token --------------------------------------------------------------------------------------------

    def lost_rank_0(self, since: float) -> str:
        """Why rank 0, or the store, is lost for this rank, which waits since `since`; empty if neither is lost."""
        lost = self.heartbeats.lost([0])
        return f"rank 0 is lost: {lost[0]}" if lost else self.connection.silence_since(since)

    @property
    def prefix(self) -> str:
        """The prefix of all keys of this start. Valid only once the token is known."""
        return f"async_ckpt/{self.token.result()}"

    def send_later(self, key: str, text: str) -> Future[None]:
        """Write a message below the prefix of this start, once rank 0 has given the token.

        The future resolves when that was tried, or when this rank is refused. Does not wait.
        """
        tried: Future[None] = running_future()

        def send(token: Future[str]) -> None:
            if token.exception() is None:
                stored = self.connection.ask(lambda store: store.set(f"{self.prefix}/{key}", text))
                stored.add_done_callback(lambda _: tried.set_result(None))
            else:
                tried.set_result(None)

        self.token.add_done_callback(send)
        return tried

    def _begin(self, token: str) -> None:
        self.token.set_result(token)
        self.heartbeats.begin(self.prefix)

    async def _send_hello(self) -> None:
        """On another rank: say hello until rank 0 has answered."""
        hello, welcome = f"async_ckpt/hello/{self.rank}", f"async_ckpt/welcome/{self.rank}"

        def send(store: Any) -> None:
            store.set(hello, self._hello)
            store.add("async_ckpt/hellos", 1)

        def look(store: Any) -> str:
            if store.get(hello).decode() != self._hello:
                return f"{self.nonce} - another process claims to be rank {self.rank}, too"
            return store.get(welcome).decode() if store.check([welcome]) else "- - -"

        is_sent = False
        for seconds in growing_pauses(_FIRST_LOOK_SECONDS, longest_pause(self.size)):
            with suppress(RuntimeError):  # the store does not answer: ask again
                if not is_sent:
                    await self._ask_given(send)
                    is_sent = True
                nonce, token, text = (await self._ask_given(look)).split(" ", 2)
                if nonce == self.nonce and token == "-":
                    error = PeerFailedError(f"{text}; start all ranks again, together", rank=self.rank)
                    self.token.set_exception(error)
                    return
                if nonce == self.nonce:
                    if not self.token.done():
                        self._begin(token)
                        self.heartbeats.note(0, text)
                    put = self.connection.ask(lambda store: store.set(f"{self.prefix}/here/{self.rank}", self.nonce))
                    await awaitable(put)
                    return
            if self.connection.is_over:
                return
            await asyncio.sleep(seconds)

    async def _answer_hellos(self) -> None:
        """On rank 0, from now on: answer the hello of each rank."""
        answered, here = self.nonces, set[int]()
        num_seen = -1
        pauses = growing_pauses(_FIRST_LOOK_SECONDS, _LOOK_SECONDS)
        while not self.connection.is_over:
            with suppress(RuntimeError):
                num_hellos = await self._ask_given(lambda store: count_of(store, "async_ckpt/hellos"))
                if num_hellos != num_seen:
                    for rank, nonce in (await self._ask_given(partial(self._answer, answered, here))).items():
                        answered[rank] = nonce
                    num_seen = num_hellos
                if len(here) < len(answered):
                    here |= await awaitable(self.connection.ask(partial(self._new_here, answered, here)))
            if len(here) == self.size - 1:
                self.note_all_here()
                await asyncio.sleep(self.heartbeats.interval)
            else:
                await asyncio.sleep(next(pauses))

    def note_all_here(self) -> None:
        """On rank 0: note that all other ranks know the token. On the loop's thread."""
        if not self.all_here.done():
            self.all_here.set_result(None)

    def _answer(self, answered: dict[int, str], here: set[int], store: Any) -> dict[int, str]:
        """Answer each hello that was not answered yet. Returns the nonces that were answered, by rank."""
        news: dict[int, str] = {}
        for rank in range(1, self.size + _BEYOND):  # beyond the size: ranks that count more ranks than there are
            key = f"async_ckpt/hello/{rank}"
            if not store.check([key]):
                continue
            nonce, size, process = store.get(key).decode().split(" ", 2)
            if nonce == answered.get(rank):
                continue
            if rank in here:
                answer = f"- rank 0 knows another process as rank {rank}: this one was started again alone"
            elif int(size) != self.size or rank >= self.size:
                answer = f"- rank 0 counts {self.size} ranks, but rank {rank} counts {size}"
            else:
                answer = f"{self.token.result()} {own_process()}"
                news[rank] = nonce
                self.heartbeats.note(rank, process)
            store.set(f"async_ckpt/welcome/{rank}", f"{nonce} {answer}")
        return news

    def _new_here(self, answered: dict[int, str], here: set[int], store: Any) -> set[int]:
        """The ranks that have come, of those that were answered: each has written the nonce that was answered."""
        keys = {rank: f"{self.prefix}/here/{rank}" for rank in answered if rank not in here}
        there = [rank for rank, key in keys.items() if store.check([key])]
        return {rank for rank in there if store.get(keys[rank]).decode() == answered[rank]}

    async def _ask_given(self, call: Callable[[Any], Any]) -> Any:
        """The answer of the store as the user, or the process group, has it: ranks meet below its prefix."""
        return await awaitable(self.connection.ask(call, given=True))


# By store: a new process group in the same process has another store.
_starts: WeakKeyDictionary[Any, WorldStart] = WeakKeyDictionary()
_of_parent: WeakSet[Any] = WeakSet()  # in a forked child: the stores that the parent uses
_starting = threading.Lock()


@in_forked_child
def _forget_starts() -> None:
    global _starts, _starting
    for store, start in list(_starts.items()):
        _of_parent.add(store)
        never_end(start)
    _starts, _starting = WeakKeyDictionary(), threading.Lock()


def answer_the_last() -> None:
    """As the interpreter exits: let late ranks read rank 0's messages, and send this rank's last message."""
    starts = list(_starts.values())
    last = [start.all_here if start.rank == 0 else start.leaving for start in starts]
    wait_for_all([future for future in last if future is not None], LINGER_SECONDS)


def start_of(world: World) -> WorldStart:
    """This start of a world that has a store. Raises ClosedError in a forked child of a rank."""
    if world.store in _of_parent:
        raise forked_error()
    with _starting:  # does not ask the store
        if world.store not in _starts:
            _starts[world.store] = WorldStart(world)
        return _starts[world.store]
