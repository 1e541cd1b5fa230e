"""Requests to an engine over HTTP, each with one deadline for all of it.

In: a URL, a path, a JSON body, a deadline. Out: the status and the text of the reply. Knows nothing of: versions.

`http.client` limits each read by itself, so an engine that sends a byte now and then would be waited for without end:
a thread shuts the socket down at the deadline. Proxies of the environment are not used, and redirects are not followed:
an engine is near.
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

from ...plumbing import fields as json_fields
from ...plumbing import threads, timing

# More of a reply than this is not read.
_MAX_REPLY_BYTES: Final = 1 << 20
# The time for a connection that is only to show whether somebody listens.
_KNOCK_SECONDS: Final = 1.0
# A request whose deadline has passed fails by this limit.
_LEAST_SECONDS: Final = 0.001
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
        kind = HTTPSConnection if self._is_secure else HTTPConnection
        connection = kind(*self.address, timeout=max(_LEAST_SECONDS, deadline - timing.TIMEKEEPER.now()))
        where, reply, failed = f"{self.url}{path}", None, None
        try:
            connection.connect()
            with _shut_down_at(deadline, connection.sock):
                connection.request(method, f"{self._path}{path}{self._query}" or "/", data, headers)
                with connection.getresponse() as response:
                    reply = Reply(response.status, response.read(_MAX_REPLY_BYTES).decode(errors="replace"))
        except (OSError, HTTPException, RuntimeError) as error:  # RuntimeError: there is no thread left
            failed = error
        finally:
            connection.close()
        if timing.TIMEKEEPER.now() >= deadline:
            raise EngineError(f"{where} has not answered in time") from failed
        if reply is None:
            raise EngineError(f"{where} does not answer: {failed or type(failed).__name__}") from failed
        return reply


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


@contextmanager
def _shut_down_at(deadline: float, connected: socket.socket) -> Iterator[None]:
    """A block in which every operation of a socket ends at the deadline, whatever the other side sends until then."""
    is_over = threading.Event()

    def watch() -> None:
        if not is_over.wait(deadline - timing.TIMEKEEPER.now()):
            with suppress(OSError):
                socket.socket.shutdown(connected, socket.SHUT_RDWR)  # not SSLSocket's, which breaks a read under way

    threads.start_thread("deadline", watch, daemon=True)
    try:
        yield
    finally:
        is_over.set()
