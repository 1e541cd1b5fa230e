"""Passes descriptors to other processes of this host and user, on loan until they close the connection.

In: a name, a message with descriptors. Out: the same in another process. Knows nothing of: the content of descriptors.

The giver listens on a socket in the abstract namespace, which vanishes with its process, also after a kill. A process
that connects gets the current message at once, and has it on loan until the connection ends. The giver never waits for
a receiver: if a message does not fit the socket's buffer, the connection is closed.
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
# More than the receivers of one host. The backlog of the socket has the same size.
_MAX_CONNECTIONS: Final = 256
_CREDENTIALS: Final = struct.Struct("3i")
# A giver answers within milliseconds, unless its process is stopped, or a thread in it keeps Python's lock.
ANSWER_SECONDS: Final = 5.0

_log: Final = logging.getLogger("async_ckpt")
_sockets: dict[int, socket.socket] = {}  # the sockets of this process's givers, by descriptor


@process.in_forked_child
def _close_in_child() -> None:
    """Close the sockets in a forked child, or receivers would connect to the child after its parent has ended."""
    for fd in list(_sockets):
        with suppress(OSError):
            os.close(fd)
        _sockets.pop(fd).detach()


class Handout(NamedTuple):
    """A message and descriptors. `keeps` stays referenced as long as any receiver has them on loan."""

    message: bytes
    fds: tuple[int, ...]
    keeps: Any


class Giver:
    """Passes the current loan to each process of this user that connects, on a thread of its own.

    Any thread may call its methods. Raises OSError if the name is in use, or if the system has no such sockets.
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
        self._present: Handout | None = None  # under _lock, like `_lent`
        self._lent: dict[socket.socket, Handout] = {}
        self._is_closed = False
        try:
            threads.start_thread("giver", self._serve, daemon=True)
        except BaseException:
            self._end()
            raise

    def put(self, loan: Handout | None) -> None:
        """Pass this loan from now on; None passes nothing. Earlier loans continue."""
        with self._lock:
            before, self._present = self._present, loan
        del before  # outside of the lock, since its memory returns to a pool

    @property
    def num_loans(self) -> int:
        """The number of different loans that other processes have."""
        with self._lock:
            return len({id(loan) for loan in self._lent.values()})

    def close(self) -> None:
        """Stop passing loans. Receivers keep the memory that they have mapped."""
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
                            self._accept(selector)
                        elif key.fileobj is not self._wakes and isinstance(key.fileobj, socket.socket):
                            self._end_loan(key.fileobj, selector)
        finally:
            self._end()

    def _accept(self, selector: selectors.BaseSelector) -> None:
        """Accept one receiver, and send it the current loan."""
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return  # the receiver has closed it, or this process is at its limit of descriptors
        connection.setblocking(False)
        is_own = _is_own(connection)
        with self._lock:
            loan = self._present if is_own and len(self._lent) < _MAX_CONNECTIONS else None
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
            self._end_loan(connection, selector)

    def _end_loan(self, connection: socket.socket, selector: selectors.BaseSelector) -> None:
        """End the loan of a receiver that has closed its connection, or has died."""
        with suppress(KeyError, ValueError):
            selector.unregister(connection)
        with self._lock:
            loan = self._lent.pop(connection, None)
        _close(connection)
        del loan  # outside of the lock, since its memory returns to a pool

    def _end(self) -> None:
        with self._lock:
            lent, self._lent = self._lent, {}
        for one in (self._listener, self._wakes, self._waker, *lent):
            _close(one)


@contextmanager
def received(name: str) -> Iterator[tuple[bytes, list[int]] | None]:
    """The message and the descriptors of a giver, on loan inside the block, and closed after it.

    None if no giver of this name on this host and of this user answers, or if it has no loan.
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
            with suppress(OSError):  # a forked child may have a copy, so closing alone would not end it
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()


def _new_socket() -> socket.socket:
    if not shared_memory.CAN_SHARE:
        raise OSError("this system cannot hand memory to other processes")
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def _address(name: str) -> bytes:
    """An address in the abstract namespace. It vanishes with its process, and other users' files cannot replace it."""
    return b"\0async_ckpt/" + name.encode()


def _is_own(connection: socket.socket) -> bool:
    """Whether the process at the other end belongs to the same user."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(credentials)
    if user != os.geteuid():
        _log.debug("a process of user %d is refused", user)
    return bool(user == os.geteuid())


def _close(one: socket.socket) -> None:
    _sockets.pop(one.fileno(), None)
    one.close()
