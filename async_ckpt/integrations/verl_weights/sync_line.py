"""Connections from the sender of weights to the receivers, over which it reports that a version can be read.

In: small messages on rank 0 of the training. Out: the messages at each receiver, or an error when the sender has died.
Knows nothing of: weights, verl.

The sender has one listening socket for all syncs. Receivers connect before weights are sent, and get lines of JSON.
They send nothing, so a receiver that hangs delays nobody. A connection ends when the sender ends, or begins another
sync.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final, NamedTuple

from ...errors import PeerFailedError

# More connections than the rollouts of one training make. The kernel may allow fewer.
_MAX_WAITING: Final = 4096
_READ_BYTES: Final = 65536


class Address(NamedTuple):
    """The address of a sender, and the name of one sync, as plain values that Ray can send."""

    host: str
    port: int
    sync: str


class SentVersion(NamedTuple):
    """The number of a version, and the token of the publisher that has published it."""

    number: int
    token: str


class SenderLine:
    """The sender's end. Any thread may call `send`."""

    def __init__(self, host: str) -> None:
        self._host = host
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=_MAX_WAITING)
        self._listener.setblocking(False)
        self._lock = threading.Lock()
        self._messages: list[bytes] = []  # the messages of this sync; under _lock, like the two fields below
        self._connections: list[socket.socket] = []
        self._sync = ""

    def begin(self) -> Address:
        """Begin a sync. The connections of receivers that still wait for an earlier sync are closed."""
        with self._lock:
            self._accept()
            self._hang_up()
            self._messages, self._sync = [], os.urandom(8).hex()
            return Address(self._host, self._listener.getsockname()[1], self._sync)

    def send(self, address: Address, message: Mapping[str, Any]) -> None:
        """Send a message to all receivers of a sync, unless the next one has begun."""
        with self._lock:
            if address.sync != self._sync:
                return
            self._messages.append(json.dumps({**message, "sync": self._sync}).encode() + b"\n")
            for connection in list(self._connections):
                self._send(connection, self._messages[-1])
            self._accept()

    def close(self) -> None:
        with self._lock:
            self._hang_up()
            self._listener.close()

    def _accept(self) -> None:
        """Accept new connections, and send them all messages of this sync."""
        with suppress(OSError):  # no connection is left to accept, or no descriptor is free
            while True:
                connection, _ = self._listener.accept()
                connection.setblocking(False)
                self._connections.append(connection)
                self._send(connection, b"".join(self._messages))

    def _send(self, connection: socket.socket, data: bytes) -> None:
        try:
            whole = connection.send(data) == len(data) if data else True
        except OSError:
            whole = False
        if not whole:  # the receiver has died, or does not read
            self._connections.remove(connection)
            connection.close()

    def _hang_up(self) -> None:
        for connection in self._connections:
            connection.close()
        self._connections = []


class ReceiverLine:
    """A receiver's end, for one sync. Used by one coroutine at a time.

    Raises PeerFailedError if the sender cannot be reached within `timeout_seconds`.
    """

    def __init__(self, address: Address, timeout_seconds: float) -> None:
        self._address, self._timeout_seconds = Address(*address), timeout_seconds
        self._unread = b""
        self._known: dict[str, Any] = {}
        try:
            self._socket = socket.create_connection(self._address[:2], timeout_seconds)
        except OSError as error:
            raise PeerFailedError(
                f"rank 0 of the training cannot be reached at {self._address.host}:{self._address.port} ({error}); "
                "see whether it is alive, and whether this host may connect to it",
                rank=0,
            ) from error
        self._socket.setblocking(False)

    async def wait_for(self, name: str) -> Any:
        """Wait for a message of the sender. Raises PeerFailedError if the sender fails, dies or takes too long."""
        try:
            async with asyncio.timeout(self._timeout_seconds):
                while name not in self._known:
                    self._learn(await asyncio.get_running_loop().sock_recv(self._socket, _READ_BYTES))
        except TimeoutError:
            raise PeerFailedError(
                f"rank 0 of the training has sent no weights for {self._timeout_seconds:g} s; see what it is doing, "
                "or raise timeout_seconds",
                rank=0,
            ) from None
        except OSError as error:
            raise self._is_gone() from error
        return self._known[name]

    def _learn(self, data: bytes) -> None:
        if not data:
            raise self._is_gone()
        *lines, self._unread = (self._unread + data).split(b"\n")
        for line in lines:
            message = json.loads(line)
            if message["sync"] != self._address.sync:
                raise self._is_gone()
            self._known.update(message)
        if "error" in self._known:
            raise PeerFailedError(f"rank 0 of the training could not send weights: {self._known['error']}", rank=0)

    def _is_gone(self) -> PeerFailedError:
        return PeerFailedError(
            "rank 0 of the training has ended, or has begun another sync, before it had sent these weights; see its "
            "log, and start it again",
            rank=0,
        )

    def close(self) -> None:
        self._socket.close()
