"""The handling of one request in the proxy.

In: a connection, and scripted faults. Out: the server's response, or a scripted one. Knows nothing of: stores.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import socket
import struct
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Final, TypedDict
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

PIECE_BYTES: Final = 256 * 1024
_STEPS_PER_SECOND: Final = 20  # of a throttled body
_BODILESS: Final = frozenset({204, 304})
# The statuses of S3's error codes, from its documentation.
STATUS: Final[Mapping[str, int]] = {
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
# The calls of S3: by method, by whether the path names an object, and by the first of these parameters in the query.
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
PATIENCE_SECONDS: Final = 60.0  # longer than any request takes; reached only in failures


@dataclass(eq=False)
class Request:
    """One request that the proxy received. `status` is None until it is answered."""

    method: str
    target: str  # path and query, as they were sent
    headers: Mapping[str, str] = field(repr=False)  # names in lower case; they hold the signature
    status: int | None = None

    @property
    def kind(self) -> str:
        """The call of S3 by its name in boto3: "upload_part", "put_object", … The bucket must be in the path."""
        url = urlsplit(self.target)
        query = parse_qs(url.query, keep_blank_values=True)
        parameter = next((name for name in _PARAMETERS if name in query), "")
        if self.method == "PUT" and "x-amz-copy-source" in self.headers:
            return "copy_object"
        return _KINDS.get((self.method, "/" in url.path.strip("/"), parameter), "other")

    @property
    def num_bytes(self) -> int | None:
        """The bytes of the body; None if the request does not state them."""
        return None if "transfer-encoding" in self.headers else int(self.headers.get("content-length", 0))


class RequestMatch(TypedDict, total=False):
    """A filter of requests: a request must match every given field."""

    method: str
    kind: str
    target: str  # a regular expression to search in path and query: r"partNumber=7\b"
    where: Callable[[Request], bool]


class Fault:
    """A scripted action on the requests that match. The methods of FaultyProxy create it. Thread-safe."""

    def __init__(
        self, name: str, act: Act, times: int | None, match: RequestMatch, remove: Callable[[Fault], None]
    ) -> None:
        """`remove` removes the fault from the script, on the proxy's thread."""
        self.name = name
        self.hits = 0  # how often it struck; written by the proxy's thread only
        self._remove = remove
        self._act = act
        self._times = times
        self._matches = predicate(match)
        self._struck = threading.Event()
        self._cleared = asyncio.Event()

    def wait(self, timeout: float = PATIENCE_SECONDS) -> None:
        """Wait until the fault has struck for the first time."""
        if not self._struck.wait(timeout):
            raise TimeoutError(f"{self!r} met no request")

    def clear(self) -> None:
        """End the fault, and forward the requests that it delays. Idempotent."""
        self._remove(self)

    def __repr__(self) -> str:
        times = "" if self._times is None else f" of {self._times}"
        return f"<Fault {self.name}: struck {self.hits}{times}>"

    def _strikes(self, request: Request) -> bool:
        if self.hits == self._times or not self._matches(request):
            return False
        self.hits += 1
        self._struck.set()
        return True


class ScriptedCut(Exception):
    """Raised where the script cuts the connection."""


class ProxiedRequest:
    """One request and its response in the proxy. Methods that handle it return whether the connection can be reused.

    FaultyProxy creates it. Used only on the proxy's thread.
    """

    def __init__(self, upstream: tuple[str, int], client: HttpConnection, request: Request, head: bytes) -> None:
        self.client = client
        self.request = request
        self.waits_to_send = request.headers.get("expect", "").lower() == "100-continue"
        self._upstream = upstream
        self._head = head

    def remove_headers(self, *headers: str) -> None:
        """Forward the request without these headers, named in lower case."""
        lines = self._head.split(b"\r\n")
        names = [line.partition(b":")[0].strip().lower().decode("latin-1") for line in lines]
        self._head = b"\r\n".join(line for line, name in zip(lines, names, strict=True) if name not in headers)

    async def forward(
        self,
        *,
        cut_request: int | None = None,
        cut_response: int | None = None,
        lose_response: bool = False,
        bytes_per_second: float | None = None,
    ) -> bool:
        """Forward the request to the server, and its response to the client."""
        if cut_request == 0:
            raise ScriptedCut
        server = HttpConnection(*await asyncio.open_connection(*self._upstream, limit=PIECE_BYTES))
        request_body = _limit(self.client.body(self.request.headers), cut_request, bytes_per_second)
        sending = asyncio.create_task(self._send(server, request_body))
        answering = asyncio.create_task(self._answer(server, cut_response, bytes_per_second, lose_response))
        end = server.reset
        try:
            await asyncio.wait({sending, answering}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                goes_on = sending.result()
                goes_on = await answering and goes_on
            elif self.waits_to_send:  # the server has answered before the body
                answering.result()
                goes_on = False
            else:  # the server has answered early, and the body is still coming
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

    async def _send(self, server: HttpConnection, body: AsyncGenerator[bytes]) -> bool:
        await server.send(self._head)
        async for piece in body:
            try:
                await server.send(piece)
            except ConnectionError:  # the server reads no more, and may have answered
                return False
        return True

    async def _answer(
        self, server: HttpConnection, cut_after: int | None, bytes_per_second: float | None, lose: bool
    ) -> bool:
        status = 0
        while status < 200:  # 100 Continue comes before the answer
            head = await server.head()
            if head is None:
                raise ConnectionResetError("the server has closed the connection without an answer")
            (version, code, *_), headers = parse(head)
            status = int(code)
            if status >= 200 and not lose:
                self.request.status = status  # before the client can see it
            if status < 200 or not lose:
                await self.client.send(head)
        if self.request.method == "HEAD" or status in _BODILESS:
            headers = {**headers, "content-length": "0", "transfer-encoding": ""}
        framed = bool(headers.keys() & {"content-length", "transfer-encoding"})
        async for piece in _limit(server.body(headers, until_closed=not framed), cut_after, bytes_per_second):
            if not lose:
                await self.client.send(piece)
        if lose:
            raise ScriptedCut
        return framed and version != "HTTP/1.0" and headers.get("connection", "").lower() != "close"

    async def reply(self, status: int, body: bytes = b"", headers: Mapping[str, str] | None = None) -> bool:
        """Answer in the server's place."""
        fields = {"Server": "AmazonS3", "Content-Length": str(len(body)), **(headers or {})}
        if body:
            fields["Content-Type"] = "application/xml"
        if self.waits_to_send:  # the client may or may not send its body
            fields["Connection"] = "close"
        lines = [f"HTTP/1.1 {status} {HTTPStatus(status).phrase}", *(f"{k}: {v}" for k, v in fields.items())]
        head = "\r\n".join([*lines, "", ""]).encode()
        self.request.status = status
        await self.client.send(head if self.request.method == "HEAD" else head + body)
        return not self.waits_to_send

    async def consume(self) -> str:
        """Read the request to its end. Returns the MD5 of its body, which is the usual e-tag."""
        if self.waits_to_send:
            await self.client.send(b"HTTP/1.1 100 Continue\r\n\r\n")
            self.waits_to_send = False
        digest = hashlib.md5(usedforsecurity=False)
        async for piece in self.client.body(self.request.headers):
            digest.update(piece)
        return digest.hexdigest()


class HttpConnection:
    """An HTTP/1.1 connection on one side of the proxy. Used only on the proxy's thread."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        writer.transport.set_write_buffer_limits(0)  # so that `send` returns when the system has all bytes

    async def head(self) -> bytes | None:
        """The head of the next message; None if the other side has closed the connection."""
        try:
            return await self._reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError as error:
            if error.partial:
                raise
            return None

    async def body(self, headers: Mapping[str, str], *, until_closed: bool = False) -> AsyncGenerator[bytes]:
        """The body after a head with these headers, in pieces as they arrive, including the lines that frame chunks."""
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
            while piece := await self._reader.read(PIECE_BYTES):
                yield piece
        else:
            async for piece in self._exactly(int(headers.get("content-length", 0))):
                yield piece

    async def _exactly(self, num_bytes: int) -> AsyncGenerator[bytes]:
        while num_bytes:
            piece = await self._reader.read(min(num_bytes, PIECE_BYTES))
            if not piece:
                raise EOFError("the connection was closed in the middle of a body")
            num_bytes -= len(piece)
            yield piece

    async def send(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def wait_closed(self) -> None:
        """Wait until the other side has closed the connection."""
        while await self._reader.read(PIECE_BYTES):
            pass

    def close(self) -> None:
        self._writer.close()

    def reset(self) -> None:
        with suppress(OSError):
            at_once = struct.pack("ii", 1, 0)  # a close without lingering is a reset
            self._writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, at_once)
        self._writer.transport.abort()


async def _limit(
    body: AsyncGenerator[bytes], cut_after: int | None, bytes_per_second: float | None
) -> AsyncGenerator[bytes]:
    num_passed = 0
    async for piece in body:
        if cut_after is not None and num_passed + len(piece) > cut_after:
            yield piece[: cut_after - num_passed]
            raise ScriptedCut
        num_passed += len(piece)
        if bytes_per_second is None:
            yield piece
            continue
        step = max(1, int(bytes_per_second / _STEPS_PER_SECOND))
        for begin in range(0, len(piece), step):
            yield piece[begin : begin + step]
            await asyncio.sleep(len(piece[begin : begin + step]) / bytes_per_second)


def parse(head: bytes) -> tuple[list[str], dict[str, str]]:
    """The words of the first line, and the headers."""
    first, *lines = head.decode("latin-1").strip().split("\r\n")
    pairs = (line.partition(":") for line in lines)
    return first.split(" ", 2), {name.strip().lower(): value.strip() for name, _, value in pairs}


def error_xml(code: str, request: Request) -> bytes:
    text = f"{code}, by the script of this test."
    resource = escape(unquote(urlsplit(request.target).path))
    return (
        '<?xml version="1.0" encoding="UTF-8"?>\n'
        f"<Error><Code>{code}</Code><Message>{text}</Message><Resource>{resource}</Resource>"
        "<RequestId>LOOPBACK</RequestId></Error>"
    ).encode()


def completed_xml(request: Request, etag: str) -> bytes:
    bucket, _, key = unquote(urlsplit(request.target).path).lstrip("/").partition("/")
    return (
        '<?xml version="1.0" encoding="UTF-8"?>\n'
        '<CompleteMultipartUploadResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
        f"<Bucket>{escape(bucket)}</Bucket><Key>{escape(key)}</Key><ETag>{escape(etag)}</ETag>"
        "</CompleteMultipartUploadResult>"
    ).encode()


def predicate(match: RequestMatch) -> Callable[[Request], bool]:
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


Act = Callable[[ProxiedRequest], Awaitable[bool]]
