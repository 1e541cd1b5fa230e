"""HTTP requests to an engine, each with one deadline for connection, request and reply.

In: a URL, a path, a JSON body, a deadline. Out: the status and the text of the reply. Knows nothing of: versions.

The timeout of `http.client` applies to each read separately, so an engine that sends a byte now and then would block
forever. Therefore a thread shuts the socket down at the deadline. Proxies of the environment are not used, and
redirects are not followed, since an engine is near.
"""

from __future__ import annotations

import json
import re
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
# The time for a connection that only tests whether a process listens.
_CONNECT_SECONDS: Final = 1.0
# The timeout of a request whose deadline has already passed.
_LEAST_SECONDS: Final = 0.001
# The characters of a URL that can be sent as they are.
_SENDABLE: Final = re.compile(r"[!-~]+")
# The number of characters of a reply that an error quotes.
_QUOTED: Final = 300


class EngineError(Exception):
    """An engine has not loaded a version: it refused, did not answer in time, or reports another version."""


class Reply(NamedTuple):
    """The reply to a request: its HTTP status, and its body as text."""

    status: int
    text: str

    @property
    def is_fine(self) -> bool:
        return 200 <= self.status < 300

    def fields(self) -> dict[str, Any]:
        """The body as a JSON object; empty if it is not one."""
        try:
            value = json_fields.parsed(self.text)
        except ValueError:
            return {}
        return value if isinstance(value, dict) else {}


class HttpClient:
    """Sends requests to one engine. `key` is sent as a bearer token, and never shown."""

    def __init__(self, url: str, *, key: str | None = None) -> None:
        if not isinstance(url, str):
            raise TypeError(f"the URL of an engine must be a string, got {url!r:.100}")
        host, port = "", None
        with suppress(ValueError):  # of an invalid port, or an invalid IPv6 address
            parts = urlsplit(url)
            host, port = parts.hostname or "", parts.port
        if not host or port == 0 or parts.scheme not in ("http", "https") or not _SENDABLE.fullmatch(url):
            raise ValueError(f"{url!r:.200} is not the URL of an engine; give one such as http://127.0.0.1:30000")
        if parts.username is not None:
            raise ValueError("the URL of an engine must have no user and password; give its key instead")
        if key is not None and not (isinstance(key, str) and key.isascii() and key.isprintable()):
            raise ValueError("the key of an engine must be printable ASCII")
        self.url = url.rstrip("/")
        self._is_secure = parts.scheme == "https"
        self.address = host, port or (443 if self._is_secure else 80)
        self._path = parts.path.rstrip("/")
        self._query = f"?{parts.query}" if parts.query else ""
        self._headers = {} if key is None else {"Authorization": f"Bearer {key}"}

    def get(self, path: str, *, deadline: float) -> Reply:
        return self._request("GET", path, None, deadline)

    def post(self, path: str, body: Mapping[str, Any] | None, *, deadline: float) -> Reply:
        return self._request("POST", path, body, deadline)

    def _request(self, method: str, path: str, body: Mapping[str, Any] | None, deadline: float) -> Reply:
        """The reply to a request. Raises EngineError if it does not arrive before the deadline."""
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
        except (OSError, HTTPException, UnicodeError, RuntimeError) as error:
            # UnicodeError: no host can have this name. RuntimeError: no thread can be started.
            failed = error
        finally:
            connection.close()
        if timing.TIMEKEEPER.now() >= deadline:
            raise EngineError(f"{where} has not answered in time") from failed
        if reply is None:
            raise EngineError(f"{where} does not answer: {failed or type(failed).__name__}") from failed
        return reply


def nobody_listens(address: tuple[str, int]) -> bool:
    """Whether the machine at this address is up, and refuses connections to the port."""
    try:
        socket.create_connection(address, _CONNECT_SECONDS).close()
    except ConnectionRefusedError:
        return True
    except (OSError, UnicodeError):
        return False
    return False


def refusal(where: str, reply: Reply, advice: str = "") -> EngineError:
    """The error for a reply with any status but 2xx, or one that reports a failure."""
    fields = reply.fields()
    reason = (
        fields.get("message") or fields.get("error") or fields.get("detail") or reply.text.strip() or "no reason given"
    )
    quoted = f"{reason}"[:_QUOTED]
    return EngineError(f"{where} answered {reply.status}: {quoted}{f'; {advice}' if advice else ''}")


@contextmanager
def _shut_down_at(deadline: float, connected: socket.socket) -> Iterator[None]:
    """A block in which every operation of a socket ends at the deadline, whatever the other side sends."""
    is_over = threading.Event()

    def watch() -> None:
        if not is_over.wait(deadline - timing.TIMEKEEPER.now()):
            with suppress(OSError):
                socket.socket.shutdown(connected, socket.SHUT_RDWR)  # not SSLSocket's, which breaks a running read

    threads.start_thread("deadline", watch, daemon=True)
    try:
        yield
    finally:
        is_over.set()
