"""The ranks' store on the clock of `far_store`: each call takes its measured time, and one server answers in turn.

In: calls of simulated and of real ranks. Out: answers, the traffic of each rank, the busy time of the server. Knows
nothing of: saves.

The times were measured with torch's TCPStore on two cores, with the clients on the same machine; a network would add to
them. A call off the loop is made at one moment, and its time is waited for when its answer is needed, as in
`far_store`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from time import thread_time
from typing import Any, Final, TypeVar

import torch.distributed as dist

from .far_store import FarStorage, Traffic, VirtualLoop

T = TypeVar("T")

SET_SECONDS: Final = 1 / 128_000
CHECK_SECONDS: Final = 1 / 52_000  # also for `add` and `delete_key`
GET_SECONDS: Final = 1 / 25_000
# For each further key of a call with many keys.
_CHECK_MORE_SECONDS: Final = 1 / 180_000
_GET_MORE_SECONDS: Final = 1 / 35_000


class Server:
    """The store. One thread answers all ranks."""

    def __init__(self, loop: VirtualLoop) -> None:
        self.loop, self.busy_seconds = loop, 0.0
        self._values = dist.HashStore()  # type: ignore[attr-defined]
        self._since: dict[str, float] = {}  # when keys become visible, if not at once
        self._free_at = 0.0

    def serve(self, seconds: float, at: float | None = None) -> float:
        """Answer a request that arrives now, or at the moment `at`. Returns the moment of the answer."""
        now = self.loop.time()
        self.busy_seconds += seconds
        done_at = max(self._free_at, now if at is None else at) + seconds
        if at is None or at <= now:
            self._free_at = done_at
        return done_at

    def put(self, key: str, value: str, since: float = 0.0) -> None:
        """Store a value that is visible from the time `since`."""
        self._values.set(key, value)
        if since > self.loop.time():
            self._since[key] = since
        else:
            self._since.pop(key, None)

    def is_there(self, key: str, at: float) -> bool:
        return self._values.check([key]) and self._since.get(key, 0.0) <= at

    def get(self, key: str) -> bytes:
        return self._values.get(key)

    def get_all(self, keys: Sequence[str]) -> list[bytes]:
        return self._values.multi_get(list(keys))

    def add(self, key: str, amount: int) -> int:
        return self._values.add(key, amount)

    def delete(self, key: str) -> bool:
        return self._values.delete_key(key)


class Client:
    """The store as one rank sees it: the methods of torch's stores that the library calls, and its `FarConnection`."""

    def __init__(self, server: Server, storage: FarStorage) -> None:
        self.traffic = Traffic()
        self.connection = FarConnection(server, self, storage)
        self._server = server
        self.taken, self.begun_at = 0.0, 0.0  # of the current call

    def _note(self, seconds: float, *, sent: int = 0, received: int = 0) -> float:
        self.taken += seconds
        self.traffic.note(sent=sent, received=received)
        return self.begun_at + self.taken

    def set(self, key: str, value: str) -> None:
        self._server.put(key, value, self._note(SET_SECONDS, sent=len(key) + len(value)))

    def check(self, keys: Sequence[str]) -> bool:
        at = self._note(CHECK_SECONDS + _CHECK_MORE_SECONDS * max(0, len(keys) - 1), sent=sum(map(len, keys)))
        return all(self._server.is_there(key, at) for key in keys)

    def get(self, key: str) -> bytes:
        value = self._server.get(key)
        self._note(GET_SECONDS, sent=len(key), received=len(value))
        return value

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        values = self._server.get_all(keys)
        self._note(_GET_MORE_SECONDS * len(keys), sent=sum(map(len, keys)), received=sum(map(len, values)))
        return values

    def add(self, key: str, amount: int) -> int:
        self._note(CHECK_SECONDS, sent=len(key) + 8, received=8)
        return self._server.add(key, amount)

    def delete_key(self, key: str) -> bool:
        self._note(CHECK_SECONDS, sent=len(key), received=1)
        return self._server.delete(key)


class _Answer(Future[Any]):
    """The future of an answer. `result` waits until the moment of the answer."""

    def __init__(self, connection: FarConnection) -> None:
        super().__init__()
        self._connection, self.done_at = connection, 0.0
        self.set_running_or_notify_cancel()

    def result(self, timeout: float | None = None) -> Any:
        self._connection.wait_until(self.done_at)
        return super().result(timeout)


class FarConnection:
    """Replaces a `Connection`: the calls of one thread, one after the other."""

    has_server, is_over = True, False

    def __init__(self, server: Server, client: Client, storage: FarStorage) -> None:
        self._server, self._client, self._storage = server, client, storage
        self._free_at = 0.0
        self.answered_at = 0.0

    def now(self) -> float:
        return self._server.loop.time()

    def silence_since(self, begun: float) -> str:  # noqa: ARG002
        return ""

    def ask(self, call: Callable[[Any], T], *, given: bool = False) -> Future[T]:  # noqa: ARG002
        answer, client, loop = _Answer(self), self._client, self._server.loop
        arrives = self._storage.moment if self._storage.is_calling else loop.time()
        client.taken, client.begun_at = 0.0, max(arrives, self._free_at)
        begin = thread_time()
        try:
            found, error = call(client), None
        except Exception as raised:
            found, error = None, raised
        computed = thread_time() - begin
        self._free_at = answer.done_at = self._server.serve(client.taken, client.begun_at) + computed

        def end() -> None:
            self.answered_at = max(self.answered_at, self.now())
            if error is None:
                answer.set_result(found)
            else:
                answer.set_exception(error)

        if loop.is_running() and not self._storage.is_calling:
            loop.call_at(answer.done_at, end)
        else:
            end()
        return answer

    def wait_until(self, moment: float) -> None:
        """Have the caller wait, unless it runs on the loop, which has waited already."""
        if self._storage.is_calling:
            self._storage.take_until(moment)
        elif not self._server.loop.is_running():
            self._server.loop.leap_to(moment)


class LoopOfRanks:
    """Replaces the library's loop, and runs its coroutines on the virtual loop."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop
        self._tasks: set[asyncio.Task[None]] = set()

    def soon(self, fn: Callable[[], None]) -> None:
        self._loop.call_soon(fn)

    def begin(self, coroutine: Coroutine[Any, Any, None]) -> None:
        self._tasks.add(self._loop.create_task(coroutine))

    def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*self._tasks, return_exceptions=True))
