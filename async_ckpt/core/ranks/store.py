"""The connection of this process to the store of its ranks, and messages of ranks by keys there.

In: a store of torch.distributed. Out: answers to short questions. Knows nothing of: what is said.

One thread of the library makes all calls, by a connection of its own where the store is a TCPStore: a call to a store
that does not answer may take as long as it likes, and holds up neither the training's own calls nor a save's clock. No
call waits in the store for a key, since such a call can be neither broken off nor answered beside others.
"""

from __future__ import annotations

import socket
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Final, TypeVar

from ...errors import ClosedError, PeerFailedError
from ..host.loop import get_loop
from ..host.threads import Crew, running_future
from ..host.waits import SILENCE_SECONDS, growing_pauses, wait_for
from ..timing import duration, monotonic

T = TypeVar("T")
Ask = Callable[[Any], T]

# From look to look at the store; it grows to the second.
_FIRST_LOOK_SECONDS: Final = 0.005
_LOOK_SECONDS: Final = 0.2
_CONNECT_SECONDS: Final = 10.0


class Connection:
    """The connection to one store, which a start of the ranks has. Any thread may ask; one thread calls the store."""

    def __init__(self, store: Any) -> None:
        """`store` is not kept: its users do that, or its server would outlive a process group that is destroyed."""
        self._given, self.address = weakref.ref(store), _address_of(store)
        # Older versions of torch cannot copy a client; theirs may have to wait for a call of the training.
        self._copies = self.address is not None and hasattr(store, "clone")
        self._own: Any = None  # of the thread that calls the store
        self._crew = Crew("store", 1)
        self.answered_at = 0.0  # when the store has answered last

    @property
    def has_server(self) -> bool:
        """True for a TCPStore, which answers many questions a second and forgets what is deleted."""
        return self.address is not None

    def silence_since(self, begun: float) -> str:
        """That the store has been silent since that moment for too long, since it is asked all the time; else empty."""
        silent = monotonic() - max(begun, self.answered_at)
        return f"the store of the ranks has not answered for {silent:.0f} s" if silent > SILENCE_SECONDS else ""

    @property
    def is_over(self) -> bool:
        """True once nobody has the store any more, since its process group was destroyed."""
        return self._given() is None

    def ask(self, call: Ask[T], *, given: bool = False) -> Future[T]:
        """Call this with the store, after all calls that were asked for before. Does not wait.

        `given`: with the store as the user or the process group has it, whose keys may have a prefix. The future has
        a RuntimeError where the store is gone, or the interpreter exits.
        """
        outcome: Future[T] = running_future()

        def run() -> None:
            try:
                outcome.set_result(call(self._as_given() if given and not self._copies else self._connected()))
                self.answered_at = monotonic()
            except BaseException as error:
                if isinstance(error, RuntimeError) and (self._copies or not given):
                    self._own = None
                outcome.set_exception(error)

        def begin() -> None:
            loop.note_call(outcome)
            self._crew.submit(run, outcome.set_exception)

        try:
            loop = get_loop()
            loop.soon(begin)
        except ClosedError as error:
            outcome.set_exception(error)
        return outcome

    def _as_given(self) -> Any:
        store = self._given()
        if store is None:
            raise RuntimeError("the process group of the store is gone")
        return store

    def _connected(self) -> Any:
        if self.address is None:
            return self._as_given()
        if self._own is None:
            self._own = _connected(self.address, self._as_given() if self._copies else None)
        return self._own


def _address_of(store: Any) -> tuple[str, int] | None:
    """Host and port of a TCPStore, also below prefixes; None for any other store."""
    import torch.distributed as dist

    while isinstance(store, dist.PrefixStore):  # type: ignore[attr-defined]
        store = store.underlying_store
    return (store.host, store.port) if isinstance(store, dist.TCPStore) else None  # type: ignore[attr-defined]


def _connected(address: tuple[str, int], given: Any = None) -> Any:
    """A client of its own; of a store that is `given`, below the same prefixes."""
    import torch.distributed as dist

    try:  # torch prints lines of its own where there is no server
        socket.create_connection(address, _CONNECT_SECONDS).close()
    except OSError as error:
        raise RuntimeError(f"there is no store at {address}") from error
    if given is not None:
        store = given.clone()
        store.set_timeout(duration(_CONNECT_SECONDS))
        return store
    connect: Any = dist.TCPStore  # type: ignore[attr-defined]
    return connect(*address, is_master=False, timeout=duration(_CONNECT_SECONDS))


class Words:
    """Messages of ranks by keys with one prefix; each key is written once. Blocking calls, but not on the loop.

    All of them raise PeerFailedError if the store is gone, or does not answer for SILENCE_SECONDS.
    """

    def __init__(self, connection: Connection, prefix: str) -> None:
        self._connection, self._prefix = connection, prefix

    def say(self, key: str, word: str) -> None:
        self._answer(lambda store: store.set(f"{self._prefix}/{key}", word))

    def hear(self, keys: Sequence[str], wait: Callable[[float], None]) -> list[str]:
        """The words of these keys, once all are there. `wait` is called with seconds between looks, and may raise."""
        pauses = growing_pauses(_FIRST_LOOK_SECONDS, _LOOK_SECONDS)
        while (words := self._said(keys, wait)) is None:
            wait(next(pauses))
        return words

    def forget(self, key: str) -> None:
        """Delete a word that no rank asks for any more. A key that was never said is no error."""
        self._answer(lambda store: store.delete_key(f"{self._prefix}/{key}"))

    def said(self, key: str) -> str | None:
        """The word of a key, if it is there already."""
        words = self._said([key])
        return None if words is None else words[0]

    def said_of(self, keys: Sequence[str]) -> list[str]:
        """The keys, of these, that are there already."""

        def look(store: Any) -> list[str]:
            return [key for key in keys if store.check([f"{self._prefix}/{key}"])]

        return self._answer(look)

    def _said(self, keys: Sequence[str], wait: Callable[[float], None] = lambda _: None) -> list[str] | None:
        full = [f"{self._prefix}/{key}" for key in keys]

        def look(store: Any) -> list[str] | None:
            return [word.decode() for word in store.multi_get(full)] if store.check(full) else None

        return self._answer(look, lambda: wait(0.0))

    def _answer(self, call: Ask[T], goes_on: Callable[[], None] = lambda: None) -> T:
        future = self._connection.ask(call)
        if not wait_for(future, SILENCE_SECONDS, goes_on):
            raise PeerFailedError(f"the store of the ranks has not answered for {SILENCE_SECONDS:.0f} s", rank=0)
        try:
            return future.result()
        except RuntimeError as error:
            raise PeerFailedError(f"the store of the ranks is gone: {error}", rank=0) from error


def count_of(store: Any, key: str) -> int:
    """The number that was added up at a key, by a question: `add` of nothing would let a FileStore grow."""
    return int(store.get(key)) if store.check([key]) else 0


def quietly(call: Callable[[], T]) -> T | None:
    """The result of a call to a store; None if the store is gone, of which deadlines tell."""
    with suppress(PeerFailedError):
        return call()
    return None
