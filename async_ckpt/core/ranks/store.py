"""The connection of this process to the store of its ranks, and messages of ranks by keys there.

In: a store of torch.distributed. Out: answers to short requests. Knows nothing of: the meaning of messages.

One thread of the library makes all calls, through its own connection if the store is a TCPStore: a store that does not
answer may block a call for any time, which must delay neither the training's own calls nor a save. No call waits in the
store for a key, since such a call can neither be cancelled nor run beside others.
"""

from __future__ import annotations

import os
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

# The pause between looks at the store grows from the first value to the second.
_FIRST_LOOK_SECONDS: Final = 0.005
_LOOK_SECONDS: Final = 0.2
_CONNECT_SECONDS: Final = 10.0


class Connection:
    """The connection to one store, owned by a start of the ranks. Any thread may ask; one thread calls the store."""

    def __init__(self, store: Any) -> None:
        """`store` is not kept alive, or its server would outlive a destroyed process group. Its users keep it."""
        self._given, self.address = weakref.ref(store), _address_of(store)
        # Older versions of torch cannot clone a client, so their calls may have to wait for a call of the training.
        self._copies = self.address is not None and hasattr(store, "clone")
        self._own: Any = None  # used by the thread that calls the store
        self._crew, self._pid = Crew("store", 1), os.getpid()
        self.answered_at = 0.0  # when the store last answered

    @property
    def has_server(self) -> bool:
        """True for a TCPStore, which answers many requests a second and frees deleted keys."""
        return self.address is not None

    def silence_since(self, begun: float) -> str:
        """A message if the store has been silent for SILENCE_SECONDS since `begun`, though asked; otherwise empty."""
        silent = monotonic() - max(begun, self.answered_at)
        return f"the store of the ranks has not answered for {silent:.0f} s" if silent > SILENCE_SECONDS else ""

    @property
    def is_over(self) -> bool:
        """True once the store has no users any more, since its process group was destroyed."""
        return self._given() is None

    def ask(self, call: Ask[T], *, given: bool = False) -> Future[T]:
        """Call `call` with the store, after all calls that were requested before. Does not wait.

        `given`: use the store as the user or the process group has it, whose keys may have a prefix. The future gets a
        RuntimeError if the store is gone, or the interpreter exits. Raises ClosedError in a forked child.
        """
        if os.getpid() != self._pid:
            raise forked_error()
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
    """Host and port of a TCPStore, also within PrefixStores; None for any other store."""
    import torch.distributed as dist

    while isinstance(store, dist.PrefixStore):  # type: ignore[attr-defined]
        store = store.underlying_store
    return (store.host, store.port) if isinstance(store, dist.TCPStore) else None  # type: ignore[attr-defined]


def _connected(address: tuple[str, int], given: Any = None) -> Any:
    """A separate client at this address. With `given`, it is a clone of that store, with the same prefixes."""
    import torch.distributed as dist

    try:  # without a server, torch would print messages
        socket.create_connection(address, _CONNECT_SECONDS).close()
    except OSError as error:
        raise RuntimeError(f"there is no store at {address}") from error
    if given is not None:
        store = given.clone()
        store.set_timeout(duration(_CONNECT_SECONDS))
        return store
    connect: Any = dist.TCPStore  # type: ignore[attr-defined]
    return connect(*address, is_master=False, timeout=duration(_CONNECT_SECONDS))


def forked_error() -> ClosedError:
    """The error of a forked child that calls as if it were a rank."""
    return ClosedError(
        "this process was forked from a rank, and is no rank itself; call from its parent, or restore a step by its "
        "number"
    )


class Messages:
    """Messages of ranks by keys with one prefix. `forget` and `begin_later` do not wait. All other methods block, and
    raise PeerFailedError if the store is gone, or does not answer for SILENCE_SECONDS. None may be called on the loop.
    """

    def __init__(self, connection: Connection, prefix: str) -> None:
        self._connection, self._prefix = connection, prefix

    def send(self, key: str, text: str) -> None:
        self._answer(lambda store: store.set(f"{self._prefix}/{key}", text))

    def receive(self, keys: Sequence[str], wait: Callable[[float], None]) -> list[str]:
        """The messages with these keys, once all are there. `wait` gets the seconds between looks, and may raise."""
        full = [f"{self._prefix}/{key}" for key in keys]

        def look(store: Any) -> list[str] | None:
            return [text.decode() for text in store.multi_get(full)] if store.check(full) else None

        pauses = growing_pauses(_FIRST_LOOK_SECONDS, _LOOK_SECONDS)
        while (texts := self._answer(look, lambda: wait(0.0))) is None:
            wait(next(pauses))
        return texts

    def forget(self, key: str) -> None:
        """Delete a message that no rank reads any more. Deleting a missing key is no error."""
        self._connection.ask(lambda store: store.delete_key(f"{self._prefix}/{key}"))

    def begin_later(self, topic: str, first: int) -> None:
        """Delete the numbered message before `first` on a topic, and note at `topic/first` where the topic begins."""
        self._connection.ask(lambda store: store.set(f"{self._prefix}/{topic}/first", str(first)))
        self.forget(f"{topic}/{first - 1}")

    def sent(self, key: str) -> str | None:
        """The message with this key, if it is there already."""
        return self.each_sent([key])[0]

    def each_sent(self, keys: Sequence[str]) -> list[str | None]:
        """The message with each key, or None if it is not there yet."""
        full = [f"{self._prefix}/{key}" for key in keys]
        return self._answer(
            lambda store: [store.multi_get([key])[0].decode() if store.check([key]) else None for key in full]
        )

    def missing(self, keys: Sequence[str]) -> list[str]:
        """The given keys that are not there yet."""
        return self._answer(lambda store: [key for key in keys if not store.check([f"{self._prefix}/{key}"])])

    def _answer(self, call: Ask[T], goes_on: Callable[[], None] = lambda: None) -> T:
        future = self._connection.ask(call)
        if not wait_for(future, SILENCE_SECONDS, goes_on):
            raise PeerFailedError(f"the store of the ranks has not answered for {SILENCE_SECONDS:.0f} s", rank=0)
        try:
            return future.result()
        except RuntimeError as error:
            raise PeerFailedError(f"the store of the ranks is gone: {error}", rank=0) from error


def count_of(store: Any, key: str) -> int:
    """The number counted up at a key. It is read by `get`, since adding 0 would let a FileStore grow."""
    return int(store.get(key)) if store.check([key]) else 0


def quietly(call: Callable[[], T]) -> T | None:
    """The result of a call to a store; None if the store is gone, which deadlines report."""
    with suppress(PeerFailedError):
        return call()
    return None
