"""Requests to an engine over HTTP, each with one deadline for all of it.

In: a URL, a path, a JSON body, a deadline. Out: the status and the text of the reply. Knows nothing of: versions.

`http.client` limits each read by itself, so an engine that sends a byte now and then would be waited for without end.
Here, the time that is left is set before every operation of the socket. Proxies of the environment are not used, and
redirects are not followed: an engine is near.
"""

from __future__ import annotations

import io
import json
import socket
from collections.abc import Callable, Mapping
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

from ...plumbing import fields as json_fields
from ...plumbing import timing

# More of a reply than this is not read.
_MAX_REPLY_BYTES: Final = 1 << 20
# The time for a connection that is only to show whether somebody listens.
_KNOCK_SECONDS: Final = 1.0
# So much of a reply is quoted in an error.
_QUOTED: Final = 300


class EngineError(Exception):
    """An engine has not taken a version: it refused, did not answer in time, or says that it has another one."""


class Reply(NamedTuple):
    """The reply to a request: its HTTP status, and its body as text."""

    status: int
    text: str

    @property
    def is_fine(self) -> bool:
        return 200 <= self.status < 300

    def fields(self) -> dict[str, Any]:
        """The body as a JSON object; empty if it is none."""
        try:
            value = json_fields.parsed(self.text)
        except ValueError:
            return {}
        return value if isinstance(value, dict) else {}


class HttpClient:
    """The requests to one engine. `key` is sent as a bearer token, and shown nowhere."""

    def __init__(self, url: str, *, key: str | None = None) -> None:
        if not isinstance(url, str):
            raise TypeError(f"the URL of an engine must be a string, got {url!r:.100}")
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r:.200} is not the URL of an engine; give one such as http://127.0.0.1:30000")
        if parts.username is not None:
            raise ValueError("the URL of an engine must have no user and password; give its key instead")
        if key is not None and not (key.isascii() and key.isprintable()):
            raise ValueError("the key of an engine must be printable ASCII")
        self.url = url.rstrip("/")
        self._is_secure = parts.scheme == "https"
        self.address = parts.hostname, parts.port or (443 if self._is_secure else 80)
        self._path = parts.path.rstrip("/")
        self._query = f"?{parts.query}" if parts.query else ""
        self._headers = {} if key is None else {"Authorization": f"Bearer {key}"}

    def get(self, path: str, *, deadline: float) -> Reply:
        return self._ask("GET", path, None, deadline)

    def post(self, path: str, body: Mapping[str, Any] | None, *, deadline: float) -> Reply:
        return self._ask("POST", path, body, deadline)

    def _ask(self, method: str, path: str, body: Mapping[str, Any] | None, deadline: float) -> Reply:
        """The reply to a request. Raises EngineError if there is none before the deadline."""
        headers = {**self._headers, "Connection": "close"}
        data = b""
        if body is not None:
            headers["Content-Type"], data = "application/json", json.dumps(body).encode()
        kind = _TimedHTTPS if self._is_secure else _TimedHTTP
        connection = kind(*self.address)
        connection.deadline = deadline
        where = f"{self.url}{path}"
        try:
            connection.request(method, f"{self._path}{path}{self._query}" or "/", data, headers)
            with connection.getresponse() as response:
                return Reply(response.status, response.read(_MAX_REPLY_BYTES).decode(errors="replace"))
        except TimeoutError as error:
            raise EngineError(f"{where} has not answered in time") from error
        except (OSError, HTTPException) as error:
            raise EngineError(f"{where} does not answer: {error or type(error).__name__}") from error
        finally:
            connection.close()


def nobody_listens(address: tuple[str, int]) -> bool:
    """Whether the machine at this address is up, and nobody listens there."""
    try:
        socket.create_connection(address, _KNOCK_SECONDS).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return False


def refusal(where: str, reply: Reply, advice: str = "") -> EngineError:
    """The error for a reply that is not a yes."""
    fields = reply.fields()
    reason = (
        fields.get("message") or fields.get("error") or fields.get("detail") or reply.text.strip() or "no reason given"
    )
    quoted = f"{reason}"[:_QUOTED]
    return EngineError(f"{where} answered {reply.status}: {quoted}{f'; {advice}' if advice else ''}")


class _TimedHTTP(HTTPConnection):
    """A connection whose every operation ends at the deadline."""

    deadline = 0.0

    def connect(self) -> None:
        self.timeout = _left(self.deadline)
        super().connect()
        self.sock: Any = _TimedSocket(self.sock, self.deadline)


class _TimedHTTPS(_TimedHTTP, HTTPSConnection):
    """The same over TLS."""


def _left(deadline: float) -> float:
    """The seconds until the deadline. Raises TimeoutError if it has passed."""
    left = deadline - timing.TIMEKEEPER.now()
    if left <= 0:
        raise TimeoutError
    return left


class _TimedSocket:
    """As much of a socket as `http.client` uses, with the time that is left as the limit of each operation."""

    def __init__(self, connected: socket.socket, deadline: float) -> None:
        self._socket, self._deadline = connected, deadline
        self._is_read = False

    def sendall(self, data: bytes) -> None:
        self._socket.settimeout(_left(self._deadline))
        self._socket.sendall(data)

    def makefile(self, mode: str) -> io.BufferedReader:
        assert mode == "rb"
        self._is_read = True
        return io.BufferedReader(_TimedReader(self._receive, self._socket.close))

    def _receive(self, target: memoryview) -> int:
        self._socket.settimeout(_left(self._deadline))
        return self._socket.recv_into(target)

    def close(self) -> None:
        """Close it, unless a reader has it: a last reply is read after the connection was closed."""
        if not self._is_read:
            self._socket.close()


class _TimedReader(io.RawIOBase):
    """The bytes that a socket receives, which is closed with it."""

    def __init__(self, receive: Callable[[memoryview], int], end: Callable[[], None]) -> None:
        self._receive, self._end = receive, end

    def readable(self) -> bool:
        return True

    def readinto(self, target: Any) -> int:
        return self._receive(memoryview(target))

    def close(self) -> None:
        self._end()
        super().close()
