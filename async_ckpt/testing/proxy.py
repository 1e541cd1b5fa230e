"""A proxy between a client and an S3 server that passes everything through, except where the script says otherwise.

In: the endpoint of a server, and faults. Out: an endpoint, a record of every request, and what each fault struck.
Knows nothing of: storages, signatures. It changes no byte that it passes on, the Host header included.

One thread runs one asyncio loop. A client's connection is one task, and each request has a connection of its own to
the server, so that a cut hits exactly one. Bodies stream through: no more is held than a few pieces in each direction.
A cut is a reset on both sides: what was let through may still arrive, and nothing after it.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import socket
import struct
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from types import TracebackType
from typing import Any, Final, Self, TypedDict, Unpack
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

_PIECE_BYTES: Final = 256 * 1024
_PATIENCE_SECONDS: Final = 60.0  # longer than anything here takes; reached only when something is broken
_STEPS_PER_SECOND: Final = 20  # of a throttled body
_ROUNDS: Final = 8  # of the loop; asyncio needs four from an accepted connection to its task
_BODILESS: Final = frozenset({204, 304})

# What S3 answers, by the codes of its documentation.
_STATUS: Final[Mapping[str, int]] = {
    "AccessDenied": 403,
    "AuthorizationHeaderMalformed": 400,
    "ExpiredToken": 400,
    "InternalError": 500,
    "InvalidAccessKeyId": 403,
    "NoSuchBucket": 404,
    "NoSuchKey": 404,
    "NoSuchUpload": 404,
    "NotImplemented": 501,
    "PermanentRedirect": 301,
    "PreconditionFailed": 412,
    "RequestTimeTooSkewed": 403,
    "RequestTimeout": 400,
    "ServiceUnavailable": 503,
    "SignatureDoesNotMatch": 403,
    "SlowDown": 503,
}

# S3's calls: by method, by whether the path names an object, by the first of these parameters that the query has.
_PARAMETERS: Final = ("partNumber", "uploadId", "uploads", "delete")
_KINDS: Final[Mapping[tuple[str, bool, str], str]] = {
    ("POST", True, "uploads"): "create_multipart_upload",
    ("PUT", True, "partNumber"): "upload_part",
    ("POST", True, "uploadId"): "complete_multipart_upload",
    ("DELETE", True, "uploadId"): "abort_multipart_upload",
    ("GET", True, "uploadId"): "list_parts",
    ("GET", False, "uploads"): "list_multipart_uploads",
    ("GET", False, ""): "list_objects",
    ("HEAD", False, ""): "head_bucket",
    ("PUT", False, ""): "create_bucket",
    ("POST", False, "delete"): "delete_objects",
    ("PUT", True, ""): "put_object",
    ("GET", True, ""): "get_object",
    ("HEAD", True, ""): "head_object",
    ("DELETE", True, ""): "delete_object",
}


@dataclass(eq=False)
class Request:
    """One request as it came by. `status` is None until it is answered, and for ever where it never is."""

    method: str
    target: str  # path and query, as they were sent
    headers: Mapping[str, str] = field(repr=False)  # names in lower case; they hold the signature
    status: int | None = None

    @property
    def kind(self) -> str:
        """Which of S3's calls it is, in boto3's words: "upload_part", "put_object", … The bucket is in the path."""
        url = urlsplit(self.target)
        query = parse_qs(url.query, keep_blank_values=True)
        parameter = next((name for name in _PARAMETERS if name in query), "")
        if self.method == "PUT" and "x-amz-copy-source" in self.headers:
            return "copy_object"
        return _KINDS.get((self.method, "/" in url.path.strip("/"), parameter), "other")

    @property
    def num_bytes(self) -> int | None:
        """Bytes of the body; None where only its end tells."""
        return None if "transfer-encoding" in self.headers else int(self.headers.get("content-length", 0))


class Match(TypedDict, total=False):
    """Which requests are meant: those of which everything that is given holds."""

    method: str
    kind: str
    target: str  # a regular expression to be found in path and query: r"partNumber=7\b"
    where: Callable[[Request], bool]


class Fault:
    """What the script does to the requests that match. Made by the methods of `FaultyProxy`."""

    def __init__(self, proxy: FaultyProxy, name: str, act: Act, times: int | None, match: Match) -> None:
        self.name = name
        self.hits = 0  # how often it struck; written by the proxy's thread only
        self._proxy = proxy
        self._act = act
        self._times = times
        self._matches = _predicate(match)
        self._struck = threading.Event()
        self._cleared = asyncio.Event()

    def wait(self, timeout: float = _PATIENCE_SECONDS) -> None:
        """Return when it has struck for the first time."""
        if not self._struck.wait(timeout):
            raise TimeoutError(f"{self!r} met no request")

    def clear(self) -> None:
        """It strikes no more, and what it holds up goes on. Idempotent."""
        self._proxy._in_loop(self._proxy._remove(self))

    def __repr__(self) -> str:
        times = "" if self._times is None else f" of {self._times}"
        return f"<Fault {self.name}: struck {self.hits}{times}>"

    def _takes(self, request: Request) -> bool:
        if self.hits == self._times or not self._matches(request):
            return False
        self.hits += 1
        self._struck.set()
        return True


class FaultyProxy:
    r"""Stands between a client and the server at `upstream`, within a `with` block.

    Give the client `proxy.endpoint`, as in `{**server.options, "endpoint": proxy.endpoint}`. Signatures hold: they
    cover the Host that the client sends, and that is passed on.

    A fault strikes the first `times` requests that match (see `Match`), or all of them. A request meets one fault at
    most: the first of those added that is not used up. Faults may be added and cleared at any time, from any thread;
    when the call returns, the next request meets the new script.

        with moto_server() as server, FaultyProxy(server.endpoint) as proxy:
            fault = proxy.cut_request(100_000, target=r"partNumber=7\b", times=5)
            ...
            assert fault.hits == 5
            assert proxy.count(kind="complete_multipart_upload") == 1
    """

    def __init__(self, upstream: str) -> None:
        url = urlsplit(upstream)
        self._upstream = (url.hostname or "127.0.0.1", url.port or 80)
        # A port that is bound and not listened to refuses connections, and nobody else can take it meanwhile.
        self._bound = _bind(0)
        self._port = int(self._bound.getsockname()[1])
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="faulty-proxy")
        # All below is changed by that thread only.
        self._listener: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self._requests: list[Request] = []
        self._faults: list[Fault] = []
        self._refusals: list[Fault] = []
        self._error: BaseException | None = None

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    @property
    def requests(self) -> list[Request]:
        """All requests so far, in the order in which they came."""
        return list(self._requests)

    def count(self, **match: Unpack[Match]) -> int:
        """How many requests so far match."""
        return sum(map(_predicate(match), self.requests))

    def clear(self) -> None:
        """Clear every fault."""
        for fault in [*self._faults, *self._refusals]:
            fault.clear()

    # --- the faults -------------------------------------------------------------------------------------------

    def refuse(self) -> Fault:
        """As if the server had gone: all connections are reset, and new ones refused, until it is cleared."""
        fault = Fault(self, "refuse", _Exchange.forward, None, {})
        self._in_loop(self._set_refusals([*self._refusals, fault]))
        return fault

    def cut_request(self, after_bytes: int = 0, *, times: int | None = None, **match: Unpack[Match]) -> Fault:
        """Cut once so many bytes of the request's body have gone on; at 0, nothing of the request has.

        Strikes only requests with more bytes than that.
        """

        async def act(exchange: _Exchange) -> bool:
            return await exchange.forward(cut_request=after_bytes)

        meant = _predicate(match)

        def is_long(request: Request) -> bool:
            return meant(request) and (
                not after_bytes or request.num_bytes is None or request.num_bytes > after_bytes
            )

        return self._add(f"cut request after {after_bytes} bytes", act, times, {"where": is_long})

    def cut_response(
        self, after_bytes: int = 0, *, times: int | None = None, **match: Unpack[Match]
    ) -> Fault:
        """Cut once the answer's head and so many bytes of its body have gone back; a shorter one passes."""

        async def act(exchange: _Exchange) -> bool:
            return await exchange.forward(cut_response=after_bytes)

        return self._add(f"cut response after {after_bytes} bytes", act, times, match)

    def lose_response(self, *, times: int | None = None, **match: Unpack[Match]) -> Fault:
        """Let the server do as it is asked, and cut instead of passing its answer on."""

        async def act(exchange: _Exchange) -> bool:
            return await exchange.forward(lose_response=True)

        return self._add("lose response", act, times, match)

    def throttle(self, bytes_per_second: float, *, times: int | None = None, **match: Unpack[Match]) -> Fault:
        """Pass the bodies of a request and of its answer on at this rate, each request for itself."""

        async def act(exchange: _Exchange) -> bool:
            return await exchange.forward(bytes_per_second=bytes_per_second)

        return self._add(f"throttle to {bytes_per_second} bytes/s", act, times, match)

    def delay(self, seconds: float | None, *, times: int | None = None, **match: Unpack[Match]) -> Fault:
        """Pass the request on after so long, or as soon as the fault is cleared; None: only then.

        Until then no more of its body is read than the system's buffers hold.
        """

        async def act(exchange: _Exchange) -> bool:
            with suppress(TimeoutError):
                await asyncio.wait_for(fault._cleared.wait(), seconds)
            return await exchange.forward()

        fault = self._add("hold" if seconds is None else f"delay {seconds} s", act, times, match)
        return fault

    def black_hole(self, *, times: int | None = None, **match: Unpack[Match]) -> Fault:
        """Read the request, pass nothing on, never answer: not even when the fault is cleared."""

        async def act(exchange: _Exchange) -> bool:
            await exchange.swallow()
            await exchange.client.gone()
            return False

        return self._add("black hole", act, times, match)

    def answer(
        self, code: str, *, status: int | None = None, times: int | None = None, **match: Unpack[Match]
    ) -> Fault:
        """Answer with this error of S3 ("SlowDown", "AccessDenied", …), and pass nothing on."""
        number = _STATUS[code] if status is None else status

        async def act(exchange: _Exchange) -> bool:
            if not exchange.waits_to_send:
                await exchange.swallow()
            return await exchange.reply(number, _error_xml(code, exchange.request))

        return self._add(f"answer {number} {code}", act, times, match)

    def lose(self, *, times: int | None = None, **match: Unpack[Match]) -> Fault:
        """Acknowledge with an e-tag, and pass nothing on: what the client takes for stored is lost.

        Fit for put_object, upload_part, complete_multipart_upload and delete_object.
        """

        async def act(exchange: _Exchange) -> bool:
            etag = await exchange.swallow()
            if exchange.request.kind == "complete_multipart_upload":
                return await exchange.reply(200, _completed_xml(exchange.request, f'"{etag}-1"'))
            if exchange.request.method == "DELETE":
                return await exchange.reply(204)
            return await exchange.reply(200, headers={"ETag": f'"{etag}"'})

        return self._add("lose", act, times, match)

    def _add(self, name: str, act: Act, times: int | None, match: Match) -> Fault:
        fault = Fault(self, name, act, times, match)

        async def add() -> None:
            self._faults.append(fault)

        self._in_loop(add())
        return fault

    async def _remove(self, fault: Fault) -> None:
        fault._cleared.set()
        self._faults = [other for other in self._faults if other is not fault]
        if fault in self._refusals:
            await self._set_refusals([other for other in self._refusals if other is not fault])

    async def _set_refusals(self, refusals: list[Fault]) -> None:
        self._refusals = refusals
        if refusals and self._listener is not None:
            await self._stop_listening()
        elif not refusals and self._listener is None:
            await self._listen()

    # --- its life ---------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        self._thread.start()
        self._in_loop(self._listen())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._in_loop(self._stop_listening())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_PATIENCE_SECONDS)
        self._loop.close()
        self._bound.close()
        if error is None and self._error is not None:
            raise self._error  # a predicate of the script has raised

    def __repr__(self) -> str:
        host, port = self._upstream
        return (
            f"<FaultyProxy {self.endpoint} -> {host}:{port}, {len(self._requests)} requests, {self._faults}>"
        )

    def _in_loop(self, call: Coroutine[Any, Any, None]) -> None:
        """Do it in the proxy's thread, and return when it is done."""
        if not self._thread.is_alive():
            call.close()
            raise RuntimeError("a FaultyProxy works within its `with` block")
        asyncio.run_coroutine_threadsafe(call, self._loop).result(_PATIENCE_SECONDS)

    async def _listen(self) -> None:
        self._listener = await asyncio.start_server(self._serve, sock=_bind(self._port), limit=_PIECE_BYTES)

    async def _stop_listening(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        for _ in range(_ROUNDS):  # what was accepted by now becomes tasks, and what they close is closed
            tasks = list(self._connections)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.sleep(0)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection of a client: request after request, until one of the two has had enough."""
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        client = _Stream(reader, writer)
        try:
            while await self._exchange(client):
                pass
            client.close()
        except (_Cut, OSError, EOFError, asyncio.CancelledError):
            # By the script, the client, the server, the end.
            client.reset()
        except BaseException as error:
            client.reset()
            self._error = self._error or error
        finally:
            self._connections.discard(task)

    async def _exchange(self, client: _Stream) -> bool:
        head = await client.head()
        if head is None:
            return False
        (method, target, *_), headers = _parse(head)
        request = Request(method, target, headers)
        self._requests.append(request)
        fault = next((fault for fault in self._faults if fault._takes(request)), None)
        exchange = _Exchange(self._upstream, client, request, head)
        return await (fault._act(exchange) if fault else exchange.forward())


class _Cut(Exception):
    """The script cuts the connection here."""


class _Exchange:
    """One request and its answer on their way through. What handles it says whether the connection can go on."""

    def __init__(self, upstream: tuple[str, int], client: _Stream, request: Request, head: bytes) -> None:
        self.client = client
        self.request = request
        self.waits_to_send = request.headers.get("expect", "").lower() == "100-continue"
        self._upstream = upstream
        self._head = head

    async def forward(
        self,
        *,
        cut_request: int | None = None,
        cut_response: int | None = None,
        lose_response: bool = False,
        bytes_per_second: float | None = None,
    ) -> bool:
        """To the server, and back."""
        if cut_request == 0:
            raise _Cut
        server = _Stream(*await asyncio.open_connection(*self._upstream, limit=_PIECE_BYTES))
        request_body = _limited(self.client.body(self.request.headers), cut_request, bytes_per_second)
        sending = asyncio.create_task(self._send(server, request_body))
        answering = asyncio.create_task(self._answer(server, cut_response, bytes_per_second, lose_response))
        end = server.reset
        try:
            await asyncio.wait({sending, answering}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                goes_on = sending.result()
                goes_on = await answering and goes_on
            elif self.waits_to_send:  # and is answered instead
                answering.result()
                goes_on = False
            else:  # answered early, and the body is still coming
                goes_on = answering.result()
                goes_on = await sending and goes_on
            if goes_on:
                end = server.close
            return goes_on
        finally:
            end()
            sending.cancel()
            answering.cancel()
            await asyncio.gather(sending, answering, return_exceptions=True)

    async def _send(self, server: _Stream, body: AsyncGenerator[bytes]) -> bool:
        await server.send(self._head)
        async for piece in body:
            try:
                await server.send(piece)
            except ConnectionError:  # it reads no more, and may have said why
                return False
        return True

    async def _answer(
        self, server: _Stream, cut_after: int | None, bytes_per_second: float | None, lose: bool
    ) -> bool:
        status = 0
        while status < 200:  # 100 Continue comes before the answer
            head = await server.head()
            if head is None:
                raise ConnectionResetError("the server has closed the connection without an answer")
            (version, code, *_), headers = _parse(head)
            status = int(code)
            if status >= 200 and not lose:
                self.request.status = status  # before the client can know it
            if status < 200 or not lose:
                await self.client.send(head)
        if self.request.method == "HEAD" or status in _BODILESS:
            headers = {**headers, "content-length": "0", "transfer-encoding": ""}
        framed = bool(headers.keys() & {"content-length", "transfer-encoding"})
        async for piece in _limited(
            server.body(headers, until_closed=not framed), cut_after, bytes_per_second
        ):
            if not lose:
                await self.client.send(piece)
        if lose:
            raise _Cut
        return framed and version != "HTTP/1.0" and headers.get("connection", "").lower() != "close"

    async def reply(self, status: int, body: bytes = b"", headers: Mapping[str, str] | None = None) -> bool:
        """Answer in the server's place."""
        fields = {"Server": "AmazonS3", "Content-Length": str(len(body)), **(headers or {})}
        if body:
            fields["Content-Type"] = "application/xml"
        if self.waits_to_send:  # whether the client sends its body now, nobody knows
            fields["Connection"] = "close"
        lines = [f"HTTP/1.1 {status} {HTTPStatus(status).phrase}", *(f"{k}: {v}" for k, v in fields.items())]
        head = "\r\n".join([*lines, "", ""]).encode()
        self.request.status = status
        await self.client.send(head if self.request.method == "HEAD" else head + body)
        return not self.waits_to_send

    async def swallow(self) -> str:
        """Read the request to its end. Returns the MD5 of its body, which is what an e-tag mostly is."""
        if self.waits_to_send:
            await self.client.send(b"HTTP/1.1 100 Continue\r\n\r\n")
            self.waits_to_send = False
        digest = hashlib.md5(usedforsecurity=False)
        async for piece in self.client.body(self.request.headers):
            digest.update(piece)
        return digest.hexdigest()


class _Stream:
    """One side of the proxy: a connection that speaks HTTP/1.1."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        writer.transport.set_write_buffer_limits(0)  # so that `send` returns when the system has it all

    async def head(self) -> bytes | None:
        """The first lines of the next message; None where the other side has closed instead."""
        try:
            return await self._reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError as error:
            if error.partial:
                raise
            return None

    async def body(self, headers: Mapping[str, str], *, until_closed: bool = False) -> AsyncGenerator[bytes]:
        """What follows such a head, as it comes: the lines that frame chunks too."""
        if headers.get("transfer-encoding"):
            num_bytes = 1
            while num_bytes:
                line = await self._reader.readuntil(b"\n")
                yield line
                num_bytes = int(line.partition(b";")[0], 16)
                if num_bytes:
                    async for piece in self._exactly(num_bytes + len(b"\r\n")):
                        yield piece
            while line.strip():  # trailers, up to an empty line
                line = await self._reader.readuntil(b"\n")
                yield line
        elif until_closed:
            while piece := await self._reader.read(_PIECE_BYTES):
                yield piece
        else:
            async for piece in self._exactly(int(headers.get("content-length", 0))):
                yield piece

    async def _exactly(self, num_bytes: int) -> AsyncGenerator[bytes]:
        while num_bytes:
            piece = await self._reader.read(min(num_bytes, _PIECE_BYTES))
            if not piece:
                raise EOFError("the connection was closed in the middle of a body")
            num_bytes -= len(piece)
            yield piece

    async def send(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def gone(self) -> None:
        """Return when the other side has closed."""
        while await self._reader.read(_PIECE_BYTES):
            pass

    def close(self) -> None:
        self._writer.close()

    def reset(self) -> None:
        with suppress(OSError):
            at_once = struct.pack("ii", 1, 0)  # a close that lingers for no time is a reset
            self._writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, at_once)
        self._writer.transport.abort()


Act = Callable[[_Exchange], Awaitable[bool]]


async def _limited(
    body: AsyncGenerator[bytes], cut_after: int | None, bytes_per_second: float | None
) -> AsyncGenerator[bytes]:
    num_passed = 0
    async for piece in body:
        if cut_after is not None and num_passed + len(piece) > cut_after:
            yield piece[: cut_after - num_passed]
            raise _Cut
        num_passed += len(piece)
        if bytes_per_second is None:
            yield piece
            continue
        step = max(1, int(bytes_per_second / _STEPS_PER_SECOND))
        for begin in range(0, len(piece), step):
            yield piece[begin : begin + step]
            await asyncio.sleep(len(piece[begin : begin + step]) / bytes_per_second)


def _predicate(match: Match) -> Callable[[Request], bool]:
    target = re.compile(match.get("target", ""))
    where = match.get("where")

    def matches(request: Request) -> bool:
        return (
            request.method == match.get("method", request.method)
            and request.kind == match.get("kind", request.kind)
            and target.search(request.target) is not None
            and (where is None or where(request))
        )

    return matches


def _parse(head: bytes) -> tuple[list[str], dict[str, str]]:
    """The words of the first line, and the headers."""
    first, *lines = head.decode("latin-1").strip().split("\r\n")
    pairs = (line.partition(":") for line in lines)
    return first.split(" ", 2), {name.strip().lower(): value.strip() for name, _, value in pairs}


def _bind(port: int) -> socket.socket:
    # asyncio wants it all, to set TCP_NODELAY.
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    if hasattr(socket, "SO_REUSEPORT"):  # the socket that holds the port, and the one that listens
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    sock.bind(("127.0.0.1", port))
    return sock


def _error_xml(code: str, request: Request) -> bytes:
    text = f"{code}, as the script of this test wants it."
    resource = escape(unquote(urlsplit(request.target).path))
    return (
        '<?xml version="1.0" encoding="UTF-8"?>\n'
        f"<Error><Code>{code}</Code><Message>{text}</Message><Resource>{resource}</Resource>"
        "<RequestId>LOOPBACK</RequestId></Error>"
    ).encode()


def _completed_xml(request: Request, etag: str) -> bytes:
    bucket, _, key = unquote(urlsplit(request.target).path).lstrip("/").partition("/")
    return (
        '<?xml version="1.0" encoding="UTF-8"?>\n'
        '<CompleteMultipartUploadResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
        f"<Bucket>{escape(bucket)}</Bucket><Key>{escape(key)}</Key><ETag>{escape(etag)}</ETag>"
        "</CompleteMultipartUploadResult>"
    ).encode()
