"""Folders of this machine, served to processes on other machines.

In: storages of this process, and a key that all processes of a training share. Out: the same storages in other
processes. Knows nothing of: ranks, steps.

Before the first request, both sides of a connection prove that they know the key, by an HMAC challenge and response
(RFC 2104). The bytes of files are not encrypted; nor are those that torch.distributed sends between the same machines.
One thread serves each connection, which carries one request at a time.
"""

from __future__ import annotations

import base64
import hmac
import json
import os
import secrets
import socket
import struct
import threading
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any, Final

from ...errors import (
    CheckpointError,
    CorruptCheckpointError,
    StorageFullError,
    StorageUnavailableError,
)
from ..host.process import in_forked_child
from ..host.threads import start_thread
from ..host.waits import SMALL_SECONDS
from .interface import Reader, Storage

_CONNECT_SECONDS: Final = 10.0
_LENGTH: Final = struct.Struct("<I")
_NONCE_BYTES: Final = 32
# More bytes than any request or answer has: a layout of thousands of ranks has some megabytes.
_MAX_BYTES: Final = 1 << 30
# The methods of a folder that other processes may call.
_QUESTIONS: Final = frozenset(
    [
        "names",
        "exists",
        "existing",
        "sizes",
        "read",
        "put_new",
        "replace",
        "delete_many",
        "delete_all",
        "move",
        "remove_if_empty",
        "sweep",
        "settle",
        "is_held",
        "where",
        "size",
        "free_bytes",
        "bytes",
        "send",
    ]
)
_ERRORS: Final[Mapping[str, type[Exception]]] = {
    kind.__name__: kind
    for kind in (
        FileNotFoundError,
        FileExistsError,
        IsADirectoryError,
        CorruptCheckpointError,
        StorageFullError,
        StorageUnavailableError,
    )
}


class SilentPeerError(StorageUnavailableError):
    """The other process did not answer. Errors that it reports are raised as they are."""


class NodeServer:
    """A server for the folders of this process. It runs from its creation until `close`."""

    def __init__(self, key: bytes, folders: Mapping[str, Any]) -> None:
        """`folders` are keyed by the names that other processes use for them."""
        self._key, self._folders = key, folders
        has_both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if has_both else socket.AF_INET
        self._socket = socket.create_server(("", 0), family=family, backlog=128, dualstack_ipv6=has_both)
        self._connections: set[socket.socket] = set()
        self._is_closed = False
        self._lock = threading.Lock()  # guards _connections and _is_closed
        self.port: int = self._socket.getsockname()[1]
        _servers.add(self)
        start_thread("peers", self._accept, daemon=True)

    def close(self) -> None:
        _servers.discard(self)
        with self._lock:
            self._is_closed, connections = True, tuple(self._connections)
        for one in (self._socket, *connections):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:  # it was closed
                return
            start_thread("peer", partial(self._answer_all, connection), daemon=True)

    def _answer_all(self, connection: socket.socket) -> None:
        with self._lock:
            if self._is_closed:
                connection.close()
                return
            self._connections.add(connection)
        try:
            with suppress(OSError, EOFError, ValueError), connection:
                connection.settimeout(SMALL_SECONDS)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                _prove(connection, self._key, is_first=True)
                connection.settimeout(None)  # the next request may come late; `close` ends the wait
                while True:
                    self._answer(connection, _receive(connection))
        finally:
            with self._lock:
                self._connections.discard(connection)

    def _answer(self, connection: socket.socket, question: Mapping[str, Any]) -> None:
        try:
            folder, method = self._folders[question["folder"]], question["what"]
            if method not in _QUESTIONS:
                raise StorageUnavailableError(f"{method!r:.100} is not a request", path="")
            arguments, options = _unpacked(question["arguments"]), _unpacked(question["options"])
            _refuse_paths_outside([arguments, options])
            if method == "bytes":
                _send_bytes(connection, folder, *arguments)
                return
            answer: Any = getattr(folder, method)(*arguments, **options)
        except EOFError:  # in the middle of the bytes of a file, no error can be reported
            raise
        except Exception as error:
            kind, text = type(error).__name__, str(error)
            if kind not in _ERRORS:
                kind, text = "StorageUnavailableError", text if isinstance(error, CheckpointError) else repr(error)
            _send(connection, {"error": kind, "text": text})
        else:
            _send(connection, {"answer": _packed(answer)})


class Peer:
    """A folder of another process. Thread-safe."""

    def __init__(self, hosts: list[str], port: int, folder: str, key: bytes, shown: str) -> None:
        """`hosts` are names of the machine, the most likely first; `shown` names the process in messages."""
        self._hosts, self._port, self._folder, self._key, self.shown = hosts, port, folder, key, shown
        self._idle: list[socket.socket] = []  # pop and append are atomic
        self._pid = os.getpid()

    def ask(self, method: str, *arguments: Any, **options: Any) -> Any:
        """Call a method of the folder in the other process. Raises its errors, and StorageUnavailableError."""
        return _answer_of(self._talk(self._question(method, *arguments, **options)))

    def read_into(self, path: str, offset: int, target: memoryview) -> None:
        """Fill `target` with bytes of a file in that folder. Raises EOFError if the file ends too early."""
        num_bytes = _answer_of(self._talk(self._question("bytes", path, offset, len(target)), target))
        if num_bytes != len(target):
            raise EOFError(f"{path} ends at byte {offset + num_bytes}")

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()

    def _question(self, method: str, *arguments: Any, **options: Any) -> Mapping[str, Any]:
        packed = {"arguments": _packed(arguments), "options": _packed(options)}
        return {"folder": self._folder, "what": method, **packed}

    def _talk(self, question: Mapping[str, Any], target: memoryview | None = None) -> Mapping[str, Any]:
        """The answer to a request. With `target`, it is followed by bytes of a file if the file has all of them."""
        if os.getpid() != self._pid:  # the connections are the parent's
            self._idle, self._pid = [], os.getpid()
        try:
            connection = self._idle.pop() if self._idle else self._connected()
            try:
                _send(connection, question)
                answer = _receive(connection)
                if target is not None and answer.get("answer") == len(target):
                    _receive_into(connection, target)
            except BaseException:
                connection.close()
                raise
        except (OSError, EOFError, ValueError) as error:
            self.close()  # the other idle connections may be broken, too
            raise SilentPeerError(f"{self.shown} does not answer: {error}", path=self.shown) from error
        self._idle.append(connection)
        return answer

    def _connected(self) -> socket.socket:
        failure: Exception | None = None
        for host in self._hosts:
            try:
                connection = socket.create_connection((host, self._port), _CONNECT_SECONDS)
            except OSError as error:
                failure = failure or error
                continue
            try:
                connection.settimeout(SMALL_SECONDS)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                _prove(connection, self._key, is_first=False)
            except (OSError, EOFError, ValueError) as error:  # the name may belong to another machine here
                connection.close()
                failure = failure or error
                continue
            return connection
        raise failure or OSError("it has no address")


class PeerReader(Reader):
    """One file of another process's folder."""

    def __init__(self, peer: Peer, path: str, num_bytes: int) -> None:
        self._peer, self._path, self.num_bytes = peer, path, num_bytes

    def read_into(self, offset: int, target: memoryview) -> None:
        self._peer.read_into(self._path, offset, target.cast("B"))

    def close(self) -> None: ...


def own_hosts(towards: tuple[str, int] | None) -> list[str]:
    """Names by which other machines may reach this one: its address on the route to a host, and its host name."""
    hosts = []
    if towards is not None:
        with suppress(OSError):
            family, kind, protocol, _, address = socket.getaddrinfo(*towards, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(address)  # nothing is sent
                hosts.append(str(probe.getsockname()[0]))
    return [*hosts, socket.gethostname()] if hosts else [socket.gethostname(), "localhost"]


# --- messages on a connection -------------------------------------------------------------------------------------


def _prove(connection: socket.socket, key: bytes, *, is_first: bool) -> None:
    """Make both sides prove that they know the key. Raises ValueError if the other side does not."""
    nonce, mine, theirs = secrets.token_bytes(_NONCE_BYTES), *((b"1", b"2") if is_first else (b"2", b"1"))
    connection.sendall(nonce)
    other = _received(connection, _NONCE_BYTES)
    connection.sendall(hmac.digest(key, mine + other, "sha256"))
    if not hmac.compare_digest(_received(connection, 32), hmac.digest(key, theirs + nonce, "sha256")):
        raise ValueError("the keys differ: another training is listening there")


def _send(connection: socket.socket, message: Mapping[str, Any]) -> None:
    data = json.dumps(message).encode()
    connection.sendall(_LENGTH.pack(len(data)) + data)


def _receive(connection: socket.socket) -> Mapping[str, Any]:
    (length,) = _LENGTH.unpack(_received(connection, _LENGTH.size))
    if length > _MAX_BYTES:
        raise ValueError("the message is not valid")
    message = json.loads(_received(connection, length))
    if not isinstance(message, dict):
        raise ValueError("the message is not valid")
    return message


def _received(connection: socket.socket, num_bytes: int) -> bytearray:
    data = bytearray(num_bytes)
    _receive_into(connection, memoryview(data))
    return data


def _receive_into(connection: socket.socket, target: memoryview) -> None:
    while target:
        num_bytes = connection.recv_into(target)
        if not num_bytes:
            raise EOFError("the connection was closed")
        target = target[num_bytes:]


def _send_bytes(connection: socket.socket, folder: Storage, path: str, offset: int, num_bytes: int) -> None:
    """Send how many of these bytes the file has; then send the bytes, if the file has all of them."""
    with open(folder.locate(path), "rb") as file:
        there = max(0, min(os.fstat(file.fileno()).st_size - offset, num_bytes))
        _send(connection, {"answer": there})
        if there == num_bytes:
            while num_bytes:
                try:
                    sent = os.sendfile(connection.fileno(), file.fileno(), offset, num_bytes)
                except OSError as error:  # a report of it would be read as the missing bytes
                    raise EOFError(str(error)) from error
                if not sent:
                    raise EOFError(f"{path} was cut while it was read")
                offset, num_bytes = offset + sent, num_bytes - sent


def _refuse_paths_outside(value: Any) -> None:
    """Raise StorageUnavailableError if any text in a request is a path that leads out of the folder."""
    if isinstance(value, str) and (value.startswith("/") or ".." in value.split("/")):
        raise StorageUnavailableError("the path leads out of the folder", path="")
    for one in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _refuse_paths_outside(one)


def _answer_of(answer: Mapping[str, Any]) -> Any:
    if "error" in answer:
        kind, text = _ERRORS.get(str(answer["error"]), StorageUnavailableError), str(answer.get("text"))
        raise kind(text, path=text) if issubclass(kind, CheckpointError) else kind(text)
    return _unpacked(answer.get("answer"))


def _packed(value: Any) -> Any:
    """A value in a form for JSON: bytes as base64, dicts as lists of pairs, and all other collections as lists."""
    if isinstance(value, bytes | bytearray):
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, dict):
        return {"table": [[_packed(name), _packed(one)] for name, one in value.items()]}
    if isinstance(value, list | tuple | set | frozenset):
        return [_packed(one) for one in value]
    return value


def _unpacked(value: Any) -> Any:
    if isinstance(value, dict):
        if "bytes" in value:
            return base64.b64decode(value["bytes"])
        return {name: _unpacked(one) for name, one in value["table"]}
    return [_unpacked(one) for one in value] if isinstance(value, list) else value


_servers: set[NodeServer] = set()


@in_forked_child
def _forget() -> None:
    """In a forked child, close the inherited sockets, since only the parent answers."""
    for server in _servers:
        for inherited in (server._socket, *server._connections):
            inherited.close()
    _servers.clear()
