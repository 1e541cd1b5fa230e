"""Handing descriptors to other processes of this host and user, each for as long as it wants.

In: a name, a message with descriptors. Out: the same in another process. Knows nothing of: what is behind descriptors.

The giver listens on a socket that has no place in the file system, so nothing of it is left when the process ends,
however it does. Whoever connects gets the present message at once, and has it on loan until the connection ends. The
giver never waits for a receiver: a message that fits no buffer is dropped with its connection.
"""

from __future__ import annotations

import logging
import os
import selectors
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final, NamedTuple

from ....plumbing import process, shared_memory, threads

_MAX_FDS: Final = 253  # SCM_MAX_FD of the kernel
_MAX_MESSAGE_BYTES: Final = 1024
# More than the receivers of one host; others than these wait in the backlog.
_MAX_CONNECTIONS: Final = 256
_CREDENTIALS: Final = struct.Struct("3i")
# A giver answers within milliseconds, unless it is stopped, or something in it keeps Python's lock.
ANSWER_SECONDS: Final = 5.0

_log: Final = logging.getLogger("async_ckpt")
_sockets: dict[int, socket.socket] = {}  # of this process's givers, by descriptor


@process.in_forked_child
def _hang_up() -> None:
    """In a forked child: close the sockets, or receivers would connect to it once the parent has ended."""
    for fd in list(_sockets):
        with suppress(OSError):
            os.close(fd)
        _sockets.pop(fd).detach()


class Handout(NamedTuple):
    """A message and descriptors. `keeps` stays referenced for as long as anybody has them."""

    message: bytes
    fds: tuple[int, ...]
    keeps: Any


class Giver:
    """Hands the present loan to each process of this user that connects, from a thread of its own.

    Any thread may call its methods. Raises OSError if the name is in use, or nothing of this kind is possible.
    """

    def __init__(self, name: str) -> None:
        self._listener = _new_socket()
        try:
            self._listener.bind(_address(name))
            self._listener.listen(_MAX_CONNECTIONS)
            self._listener.setblocking(False)
            self._waker, self._wakes = socket.socketpair()
        except BaseException:
            self._listener.close()
            raise
        for one in (self._listener, self._waker, self._wakes):
            _sockets[one.fileno()] = one
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._present: Handout | None = None  # under _lock, like the next one
        self._lent: dict[socket.socket, Handout] = {}
        self._is_closed = False
        try:
            threads.start_thread("giver", self._serve, daemon=True)
        except BaseException:
            self._end()
            raise

    def put(self, loan: Handout | None) -> None:
        """Hand out this from now on, or nothing. Earlier loans go on."""
        with self._lock:
            before, self._present = self._present, loan
        del before  # outside of the lock: its memory goes back to a pool

    @property
    def num_loans(self) -> int:
        """The number of different loans that some process has."""
        with self._lock:
            return len({id(loan) for loan in self._lent.values()})

    def close(self) -> None:
        """End it. Those who have a loan keep what they have mapped."""
        if os.getpid() != self._pid:
            return
        self.put(None)
        self._is_closed = True
        with suppress(OSError):
            self._waker.send(b"\0")

    def _serve(self) -> None:
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(self._listener, selectors.EVENT_READ)
                selector.register(self._wakes, selectors.EVENT_READ)
                while not self._is_closed:
                    for key, _ in selector.select():
                        if key.fileobj is self._listener:
                            self._greet(selector)
                        elif key.fileobj is not self._wakes and isinstance(key.fileobj, socket.socket):
                            self._part(key.fileobj, selector)
        finally:
            self._end()

    def _greet(self, selector: selectors.BaseSelector) -> None:
        """Accept one receiver, and give it the present loan."""
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return  # it has gone again, or this process is at its limit of descriptors
        connection.setblocking(False)
        is_welcome = _is_own(connection)
        with self._lock:
            loan = self._present if is_welcome and len(self._lent) < _MAX_CONNECTIONS else None
            if loan is not None:
                self._lent[connection] = loan
        if loan is None:
            connection.close()
            return
        try:
            _sockets[connection.fileno()] = connection
            selector.register(connection, selectors.EVENT_READ)
            socket.send_fds(connection, [loan.message], loan.fds)
        except OSError as error:
            _log.debug("a process that connected gets nothing: %s", error)
            self._part(connection, selector)

    def _part(self, connection: socket.socket, selector: selectors.BaseSelector) -> None:
        """The receiver has ended its loan, or has died."""
        with suppress(KeyError, ValueError):
            selector.unregister(connection)
        with self._lock:
            loan = self._lent.pop(connection, None)
        _close(connection)
        del loan  # outside of the lock: its memory goes back to a pool

    def _end(self) -> None:
        with self._lock:
            lent, self._lent = self._lent, {}
        for one in (self._listener, self._wakes, self._waker, *lent):
            _close(one)


@contextmanager
def received(name: str) -> Iterator[tuple[bytes, list[int]] | None]:
    """The message and the descriptors of a giver, on loan inside the block, and closed after it.

    None if no giver of this name, host and user answers and has a loan.
    """
    connection = None
    fds: list[int] = []
    try:
        try:
            connection = _new_socket()
            connection.settimeout(ANSWER_SECONDS)
            connection.connect(_address(name))
            message = b""
            if _is_own(connection):
                flags = socket.MSG_CMSG_CLOEXEC
                message, fds, _, _ = socket.recv_fds(connection, _MAX_MESSAGE_BYTES, _MAX_FDS, flags)
        except OSError as error:
            _log.debug("nothing is lent as %s: %s", name, error)
            message = b""
        yield (message, fds) if message else None
    finally:
        for fd in fds:
            os.close(fd)
        if connection is not None:
            with suppress(OSError):  # a forked child may have a copy of the descriptor, so closing alone ends nothing
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()


def _new_socket() -> socket.socket:
    if not shared_memory.CAN_SHARE:
        raise OSError("this system cannot hand memory to other processes")
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def _address(name: str) -> bytes:
    """In the abstract namespace: it vanishes with its process, and no other user's file can stand in its place."""
    return b"\0async_ckpt/" + name.encode()


def _is_own(connection: socket.socket) -> bool:
    """Whether a process of the same user is at the other end."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(credentials)
    if user != os.geteuid():
        _log.debug("a process of user %d is refused", user)
    return bool(user == os.geteuid())


def _close(one: socket.socket) -> None:
    _sockets.pop(one.fileno(), None)
    one.close()
