"""A loopback server that speaks enough S3 to receive and return objects, at almost no cost.

In: requests. Out: answers like those of S3, to clients without authentication. Knows nothing of: clients.

`python -m benchmarks.store_server KEEP GIGABITS LATENCY GIVES_WAY` runs such a server. It ends when its standard input
closes.

Servers that store and hash their data need seconds of processor time per GB. On a few cores, this hides the costs of
the client. Here the kernel discards large bodies without copying them. With `keep` they are stored in memory, which the
kernel sends without a copy. Small objects, such as a manifest, are always stored. `gigabits` limits the bandwidth of
uploads like a link, and each request is answered `latency` seconds late.
"""

from __future__ import annotations

import itertools
import math
import mmap
import os
import re
import socket
import subprocess
import sys
import threading
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from email.utils import formatdate
from time import monotonic, sleep
from typing import Final
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

MIB: Final = 1024 * 1024  # not from limits.py, which would import torch
_KEPT_BYTES: Final = MIB
_DISCARD_BYTES: Final = 1024 * MIB
_LINE_BYTES: Final = 64 * 1024
_LINK_BYTES: Final = 256 * 1024
_PAGE_NAMES: Final = 1000
_XML: Final = '<?xml version="1.0" encoding="UTF-8"?>\n'
_REASONS: Final = {
    200: "OK",
    204: "No Content",
    206: "Partial Content",
    404: "Not Found",
    412: "Precondition Failed",
}


@contextmanager
def store_server(
    *, keep: bool = False, gigabits: float = math.inf, latency: float = 0.0, gives_way: bool = False
) -> Iterator[str]:
    """The endpoint of such a server, which runs in another process during the block.

    A server that `gives_way` only uses processor time that no other process wants, as if it ran on another machine.
    """
    command = [sys.executable, "-m", __name__, str(int(keep)), str(gigabits), str(latency), str(int(gives_way))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            endpoint = process.stdout.readline().strip()
            if not endpoint:
                raise RuntimeError("the server did not start; see what it printed")
            yield endpoint
        finally:
            process.stdin.close()


def options_for(endpoint: str) -> dict[str, str]:
    """The options of a place at such a server. Requests are signed, as for a real store, with keys that it ignores."""
    return {"endpoint": endpoint, "region": "us-east-1", "access_key_id": "anyone", "secret_access_key": "anything"}


@dataclass(frozen=True, slots=True)
class Body:
    """The body of one request: its size, and its bytes unless they were discarded."""

    num_bytes: int
    data: bytes | None = None
    file: int | None = None

    def send(self, connection: socket.socket, begin: int, end: int) -> None:
        if self.file is not None:
            while begin < end:
                begin += os.sendfile(connection.fileno(), self.file, begin, end - begin)
        else:
            assert self.data is not None, "what was thrown away cannot be read; start the server with keep"
            connection.sendall(memoryview(self.data)[begin:end])

    def __del__(self) -> None:
        if self.file is not None:
            os.close(self.file)


@dataclass(frozen=True, slots=True)
class Object:
    """An object with its e-tag."""

    bodies: list[Body]
    e_tag: str
    modified: str = field(default_factory=lambda: formatdate(usegmt=True))

    @property
    def num_bytes(self) -> int:
        return sum(body.num_bytes for body in self.bodies)

    def send(self, connection: socket.socket, begin: int, end: int) -> None:
        at = 0
        for body in self.bodies:
            first, last = max(begin, at), min(end, at + body.num_bytes)
            if first < last:
                body.send(connection, first - at, last - at)
            at += body.num_bytes


class Link:
    """The link that all connections share."""

    def __init__(self, gigabits: float) -> None:
        self._seconds_per_byte = 8 / (gigabits * 1e9)
        self.piece_bytes = _LINK_BYTES if self._seconds_per_byte else _DISCARD_BYTES
        self._lock = threading.Lock()
        self._free_at = 0.0  # under _lock

    def take(self, num_bytes: int) -> None:
        """Return when this many bytes have passed the link."""
        with self._lock:
            now = monotonic()
            self._free_at = max(now, self._free_at) + num_bytes * self._seconds_per_byte
            seconds = self._free_at - now
        if seconds:
            sleep(seconds)


class Store:
    """The state that all connections share."""

    def __init__(self, *, keep: bool, link: Link, latency: float) -> None:
        self.keep = keep
        self.latency = latency
        self.link = link
        self._lock = threading.Lock()
        self._objects: dict[str, Object] = {}  # under _lock, like all below
        self._paths: list[str] | None = None  # the sorted keys; None after a change
        self._uploads: dict[str, dict[int, Body]] = {}
        self._numbers = itertools.count(1)

    def new_e_tag(self) -> str:
        with self._lock:
            return f'"{next(self._numbers):032x}"'

    def put(self, key: str, bodies: list[Body], headers: Mapping[str, str]) -> Object | None:
        """Store an object and return it, or None if the condition of the request does not hold."""
        new = Object(bodies, self.new_e_tag())
        with self._lock:
            found = self._objects.get(key)
            wanted = headers.get("if-match")
            if (found and headers.get("if-none-match") == "*") or (wanted and not (found and found.e_tag == wanted)):
                return None
            if found is None:
                self._paths = None
            self._objects[key] = new
        return new

    def get(self, key: str) -> Object | None:
        with self._lock:
            return self._objects.get(key)

    def delete(self, key: str) -> None:
        with self._lock:
            self._objects.pop(key, None)
            self._paths = None

    def begin_upload(self) -> str:
        with self._lock:
            name = f"upload-{next(self._numbers)}"
            self._uploads[name] = {}
        return name

    def put_part(self, upload: str, number: int, body: Body) -> None:
        with self._lock:
            self._uploads[upload][number] = body

    def end_upload(self, upload: str) -> list[Body]:
        with self._lock:
            parts = self._uploads.pop(upload, {})
        return [parts[number] for number in sorted(parts)]

    def list(self, bucket: str, prefix: str, delimiter: str, after: str) -> dict[str, Object | None]:
        """A page of the keys below a prefix and after a key: objects, and None for common prefixes up to the delimiter.

        It has one entry more than a page holds if another page follows.
        """
        with self._lock:
            if self._paths is None:
                self._paths = sorted(self._objects)
            objects, paths = self._objects.copy(), self._paths
        page: dict[str, Object | None] = {}
        for path in itertools.islice(paths, bisect_left(paths, f"{bucket}/{max(prefix, after)}"), None):
            key = path.removeprefix(f"{bucket}/")
            if path == key or not key.startswith(prefix):
                break
            item = objects[path]
            folder, mark, _ = key[len(prefix) :].partition(delimiter) if delimiter else ("", "", "")
            name, found = (prefix + folder + mark, None) if mark else (key, item)
            if name > after:
                page[name] = found
            if len(page) > _PAGE_NAMES:
                break
        return page


class Connection:
    """The connection of one client. Requests are answered one after the other, on the connection's own thread."""

    def __init__(self, store: Store, connection: socket.socket, nowhere: mmap.mmap) -> None:
        self._store = store
        self._socket = connection
        self._nowhere = nowhere  # address space that is never written to
        self._ahead = bytearray()  # received, and not parsed yet
        self._method = ""
        self._headers: dict[str, str] = {}

    def serve(self) -> None:
        with self._socket, suppress(ConnectionError):
            while head := self._lines():
                self._method, target, _ = head[0].split(" ", 2)
                pairs = (line.partition(":") for line in head[1:])
                self._headers = {name.lower(): value.strip() for name, _, value in pairs}
                url = urlsplit(target)
                query = {name: values[0] for name, values in parse_qs(url.query, keep_blank_values=True).items()}
                bucket, _, key = unquote(url.path).lstrip("/").partition("/")
                sleep(self._store.latency)
                self._answer(bucket, key, query)

    def _answer(self, bucket: str, key: str, query: dict[str, str]) -> None:
        if self._headers.get("expect", "").lower() == "100-continue":
            self._socket.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        path = f"{bucket}/{key}"
        match self._method:
            case "PUT" if "partNumber" in query:
                self._store.put_part(query["uploadId"], int(query["partNumber"]), self._body())
                self._reply(200, {"ETag": self._store.new_e_tag()})
            case "PUT":
                self._put(path, [self._body()])
            case "POST" if "uploads" in query:
                self._body()
                tags = f"<Bucket>{bucket}</Bucket><Key>{escape(key)}</Key>"
                tags += f"<UploadId>{self._store.begin_upload()}</UploadId>"
                self._reply_xml("InitiateMultipartUploadResult", tags)
            case "POST" if "uploadId" in query:
                self._body()
                self._put(path, self._store.end_upload(query["uploadId"]), completes=True)
            case "POST" if "delete" in query:
                for name in re.findall(r"<Key>(.*?)</Key>", (self._body().data or b"").decode()):
                    self._store.delete(f"{bucket}/{name}")
                self._reply_xml("DeleteResult", "")
            case "DELETE":
                if "uploadId" in query:
                    self._store.end_upload(query["uploadId"])
                else:
                    self._store.delete(path)
                self._reply(204, {})
            case "GET" if not key:
                self._list(bucket, query)
            case "HEAD" if not key:
                self._reply(200, {"Content-Length": "0"})
            case _:
                self._get(path)

    def _put(self, path: str, bodies: list[Body], *, completes: bool = False) -> None:
        new = self._store.put(path, bodies, self._headers)
        if new is None:
            self._refuse(412, "PreconditionFailed")
        elif completes:
            self._reply_xml("CompleteMultipartUploadResult", f"<ETag>{escape(new.e_tag)}</ETag>")
        else:
            self._reply(200, {"ETag": new.e_tag})

    def _get(self, path: str) -> None:
        found = self._store.get(path)
        if found is None:
            self._refuse(404, "NoSuchKey")
            return
        if self._headers.get("if-match", found.e_tag) != found.e_tag:
            self._refuse(412, "PreconditionFailed")
            return
        size = found.num_bytes
        headers = {"ETag": found.e_tag, "Last-Modified": found.modified, "Accept-Ranges": "bytes"}
        begin, end, status = 0, size, 200
        if wanted := re.fullmatch(r"bytes=(\d+)-(\d*)", self._headers.get("range", "")):
            begin, end, status = int(wanted[1]), min(size, int(wanted[2] or size) + 1), 206
            headers["Content-Range"] = f"bytes {begin}-{end - 1}/{size}"
        self._reply(status, headers | {"Content-Length": str(end - begin)})
        if self._method == "GET":
            found.send(self._socket, begin, end)

    def _list(self, bucket: str, query: dict[str, str]) -> None:
        if "location" in query:
            self._reply_xml("LocationConstraint", "")
            return
        if "uploads" in query:  # no upload is older than this server
            self._reply_xml("ListMultipartUploadsResult", "<IsTruncated>false</IsTruncated>")
            return
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        after = query.get("continuation-token", query.get("start-after", ""))
        page = self._store.list(bucket, prefix, delimiter, after)
        is_truncated = len(page) > _PAGE_NAMES
        if is_truncated:
            page.popitem()
        tags = f"<Name>{bucket}</Name><Prefix>{escape(prefix)}</Prefix><MaxKeys>{_PAGE_NAMES}</MaxKeys>"
        tags += f"<KeyCount>{len(page)}</KeyCount><IsTruncated>{str(is_truncated).lower()}</IsTruncated>"
        if is_truncated:
            tags += f"<NextContinuationToken>{escape(next(reversed(page)))}</NextContinuationToken>"
        for key, item in page.items():
            if item is None:
                tags += f"<CommonPrefixes><Prefix>{escape(key)}</Prefix></CommonPrefixes>"
                continue
            tags += (
                f"<Contents><Key>{escape(key)}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified>"
                f"<ETag>{escape(item.e_tag)}</ETag><Size>{item.num_bytes}</Size>"
                "<StorageClass>STANDARD</StorageClass></Contents>"
            )
        self._reply_xml("ListBucketResult", tags)

    # --- answers ----------------------------------------------------------------------------------------------

    def _reply(self, status: int, headers: dict[str, str], body: bytes = b"") -> None:
        if "Content-Length" not in headers and status != 204:
            headers = headers | {"Content-Length": str(len(body))}
        fields = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        head = f"HTTP/1.1 {status} {_REASONS[status]}\r\nServer: AmazonS3\r\n{fields}\r\n".encode()
        self._socket.sendall(head if self._method == "HEAD" else head + body)

    def _reply_xml(self, name: str, tags: str, status: int = 200) -> None:
        text = f'{_XML}<{name} xmlns="http://s3.amazonaws.com/doc/2006-03-01/">{tags}</{name}>'
        self._reply(status, {"Content-Type": "application/xml"}, text.encode())

    def _refuse(self, status: int, code: str) -> None:
        self._reply_xml("Error", f"<Code>{code}</Code><Message>{code}</Message>", status)

    # --- requests ---------------------------------------------------------------------------------------------

    def _lines(self) -> list[str]:
        """The head of the next request; empty if the client has closed the connection."""
        while (end := self._ahead.find(b"\r\n\r\n")) < 0:
            if not self._receive():
                return []
        head = self._ahead[:end].decode("latin-1").split("\r\n")
        del self._ahead[: end + 4]
        return head

    def _body(self) -> Body:
        framed = "aws-chunked" in self._headers.get("content-encoding", "")
        if self._headers.get("transfer-encoding"):
            # Here two framings could be nested, but clients send only one.
            chunks = list(iter(self._chunk, Body(0, b"")))
            while self._line():
                pass  # trailers, up to an empty line
            return self._joined(chunks)
        num_bytes = int(self._headers.get("content-length", 0))
        size = int(self._headers.get("x-amz-decoded-content-length", num_bytes))
        if framed and num_bytes >= _KEPT_BYTES:
            return Body(size) if self._take(num_bytes, keep=False) else Body(0)
        body = self._take(num_bytes, keep=self._store.keep)
        return Body(size, _unframed(body.data or b"")) if framed else body

    def _joined(self, chunks: list[Body]) -> Body:
        if all(chunk.data is not None for chunk in chunks):
            data = b"".join(chunk.data or b"" for chunk in chunks)
            if len(data) < _KEPT_BYTES:
                return Body(len(data), data)
        return Body(sum(chunk.num_bytes for chunk in chunks))

    def _chunk(self) -> Body:
        num_bytes = int(self._line().partition(b";")[0], 16)
        if not num_bytes:
            return Body(0, b"")
        chunk = self._take(num_bytes, keep=False)
        self._line()
        return chunk

    def _take(self, num_bytes: int, *, keep: bool) -> Body:
        if num_bytes < _KEPT_BYTES:
            while len(self._ahead) < num_bytes:
                self._must(self._receive())
            data = bytes(self._ahead[:num_bytes])
            del self._ahead[:num_bytes]
            return Body(num_bytes, data)
        if not keep:
            self._discard(num_bytes)
            return Body(num_bytes)
        file = os.memfd_create("part")
        os.ftruncate(file, num_bytes)
        body = Body(num_bytes, file=file)
        with mmap.mmap(file, num_bytes) as memory, memoryview(memory) as view:
            at = min(num_bytes, len(self._ahead))
            view[:at] = self._ahead[:at]
            del self._ahead[:at]
            while at < num_bytes:
                at += self._must(self._socket.recv_into(view[at:], 0, socket.MSG_WAITALL))
        return body

    def _discard(self, num_bytes: int) -> None:
        ahead = min(num_bytes, len(self._ahead))
        del self._ahead[:ahead]
        num_bytes -= ahead
        while num_bytes:
            # TCP counts what it truncates, and copies nothing; see tcp(7).
            length = min(num_bytes, self._store.link.piece_bytes)
            flags = socket.MSG_TRUNC | socket.MSG_WAITALL
            count = self._must(self._socket.recv_into(self._nowhere, length, flags))
            self._store.link.take(count)
            num_bytes -= count

    def _line(self) -> bytes:
        while (end := self._ahead.find(b"\r\n")) < 0:
            self._must(self._receive())
        line = bytes(self._ahead[:end])
        del self._ahead[: end + 2]
        return line

    def _receive(self) -> int:
        data = self._socket.recv(_LINE_BYTES)
        self._ahead += data
        return len(data)

    def _must(self, count: int) -> int:
        if not count:
            raise ConnectionResetError("the client has closed in the middle of a request")
        return count


def _unframed(data: bytes) -> bytes:
    """The content of an aws-chunked body."""
    at = 0
    parts: list[bytes] = []
    while True:
        end = data.index(b"\r\n", at)
        length = int(data[at:end].partition(b";")[0], 16)
        if not length:
            return b"".join(parts)
        parts.append(data[end + 2 : end + 2 + length])
        at = end + 2 + length + 2


def main(keep: bool, gigabits: float, latency: float, gives_way: bool) -> None:
    if gives_way and sys.platform == "linux":
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))  # threads that begin later inherit it
    store = Store(keep=keep, link=Link(gigabits), latency=latency)
    nowhere = mmap.mmap(-1, _DISCARD_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    listener = socket.create_server(("127.0.0.1", 0), backlog=128)

    def accept() -> None:
        while True:
            connection, _ = listener.accept()
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            client = Connection(store, connection, nowhere)
            threading.Thread(target=client.serve, daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    print(f"http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
    sys.stdin.read()  # until the parent process is gone


if __name__ == "__main__":
    _, _keep, _gigabits, _latency, _gives_way = sys.argv
    main(keep=_keep == "1", gigabits=float(_gigabits), latency=float(_latency), gives_way=_gives_way == "1")
