"""A server that speaks Google Cloud Storage's two interfaces: fake-gcs-server has the JSON one, this adds the XML one.

In: the command line of fake-gcs-server, without its port. Out: the endpoint, one line on standard output, once it
answers; it ends with standard input. Knows nothing of: async_ckpt.

obstore speaks XML, and gcsfs JSON. Each XML request becomes a JSON one; the parts of an upload wait here.
"""

import http.client
import json
import re
import socket
import subprocess
import sys
import threading
import time
import uuid
from datetime import datetime
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar
from urllib.parse import parse_qs, quote, unquote, urlencode, urlsplit
from xml.sax.saxutils import escape

_PASSED_ON = ("/storage/", "/upload/", "/download/", "/_internal/")


class Translator(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = 1 << 16  # head and body of an answer in one packet
    port = 0  # of fake-gcs-server
    deciding = threading.Lock()  # it looks at a condition and then stores, so two puts could both win
    uploads: ClassVar[dict[str, dict[int, bytes]]] = {}

    def handle_any(self) -> None:
        body = self._body()
        url = urlsplit(self.path)
        if url.path.startswith(_PASSED_ON):
            headers = {k: v for k, v in self.headers.items() if k.lower() not in ("host", "connection")}
            asked = parse_qs(url.query)
            bucket, names = url.path.partition("/b/")[2].partition("/")[0], asked.get("name", ())
            with self.deciding:
                for name, generation in zip(names, asked.get("ifGenerationMatch", ()), strict=False):
                    if not self.admits(bucket, name, generation):
                        return self.refuse(412)
                status, answered, content = self.ask(self.command, self.path, body, headers)
            return self.answer(status, content, {k: v for k, v in answered.items() if k.lower() not in _OF_A_HOP})
        if url.path.startswith("/batch/"):
            return self.delete_many(body)
        bucket, _, key = url.path.lstrip("/").partition("/")
        query = {name: values[0] for name, values in parse_qs(url.query, keep_blank_values=True).items()}
        if not key:
            return self.list(bucket, query)
        if "uploads" in query or "uploadId" in query:
            return self.upload(bucket, unquote(key), query, body)
        return getattr(self, f"object_{self.command.lower()}")(bucket, unquote(key), body)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = do_PATCH = handle_any  # noqa: N815 - as http.server calls them

    def _body(self) -> bytes:
        if "chunked" not in self.headers.get("transfer-encoding", ""):
            return self.rfile.read(int(self.headers.get("content-length", 0)))
        chunks = []
        while size := int(self.rfile.readline().split(b";")[0], 16):
            chunks.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(chunks)

    def ask(
        self, method: str, path: str, body: bytes = b"", headers: dict[str, str] | None = None
    ) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request(method, path, body, headers or {})
            answer = connection.getresponse()
            return answer.status, dict(answer.getheaders()), answer.read()
        finally:
            connection.close()

    def answer(self, status: int, content: bytes = b"", headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        if not any(name.lower() == "content-length" for name in headers or {}):
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def refuse(self, status: int) -> None:
        code = {404: "NoSuchKey", 412: "PreconditionFailed"}.get(status, "InvalidArgument")
        self.answer(status, f"<Error><Code>{code}</Code><Message>no</Message></Error>".encode())

    # --- objects ----------------------------------------------------------------------------------------------

    def look(self, bucket: str, key: str) -> dict[str, str] | None:
        status, _, content = self.ask("GET", f"/storage/v1/b/{bucket}/o/{quote(key, safe='')}")
        return json.loads(content) if status == 200 else None

    def admits(self, bucket: str, key: str, generation: str | None) -> bool:
        """Whether a put on this condition may go on; fake-gcs-server ignores it."""
        if generation is None:
            return True
        meta = self.look(bucket, key)
        return generation == ("0" if meta is None else meta["generation"])

    def object_head(self, bucket: str, key: str, _: bytes) -> None:
        meta = self.look(bucket, key)
        if meta is None:
            self.answer(404)
        else:
            self.answer(200, b"", _headers(meta) | {"Content-Length": meta["size"]})

    def object_get(self, bucket: str, key: str, _: bytes) -> None:
        meta = self.look(bucket, key)
        if meta is None:
            return self.refuse(404)
        if self.headers.get("if-match", _etag(meta)) != _etag(meta):
            return self.refuse(412)
        path = f"/storage/v1/b/{bucket}/o/{quote(key, safe='')}?alt=media&generation={meta['generation']}"
        ranges = {"Range": self.headers["range"]} if "range" in self.headers else {}
        status, answered, content = self.ask("GET", path, headers=ranges)
        if status not in (200, 206):
            return self.refuse(412 if status == 404 else status)
        told = {k: v for k, v in answered.items() if k.lower() == "content-range"}
        return self.answer(status, content, _headers(meta) | told)

    def object_put(self, bucket: str, key: str, body: bytes) -> None:
        source = self.headers.get("x-goog-copy-source")
        if source:
            from_bucket, _, from_key = unquote(source).lstrip("/").partition("/")
            status, _, content = self.ask("GET", f"/storage/v1/b/{from_bucket}/o/{quote(from_key, safe='')}?alt=media")
            if status != 200:
                return self.refuse(404)
            body = content
        return self.put(bucket, key, body, self.headers.get("x-goog-if-generation-match"))

    def put(self, bucket: str, key: str, body: bytes, generation: str | None = None, answer: bytes = b"") -> None:
        query = urlencode({"uploadType": "media", "name": key})
        with self.deciding:
            status, _, content = (
                self.ask("POST", f"/upload/storage/v1/b/{bucket}/o?{query}", body)
                if self.admits(bucket, key, generation)
                else (412, {}, b"")
            )
        if status != 200:
            return self.refuse(status)
        meta = json.loads(content)
        return self.answer(200, answer.replace(b"ETAG", _etag(meta).encode()), _headers(meta))

    def object_delete(self, bucket: str, key: str, _: bytes) -> None:
        self.refuse(404) if self.delete(bucket, key) == 404 else self.answer(204)

    def delete(self, bucket: str, key: str) -> int:
        return self.ask("DELETE", f"/storage/v1/b/{bucket}/o/{quote(key, safe='')}")[0]

    def delete_many(self, body: bytes) -> None:
        """A batch of JSON requests, one in each part of a multipart body."""
        boundary, answers = uuid.uuid4().hex, []
        asked = re.findall(rb"(?i)content-id:\s*([^\r\n]+).*?DELETE (\S+)", body, re.DOTALL)
        for name, target in asked:
            status = self.ask("DELETE", target.decode())[0]
            told = name.decode().replace("<", "<response-", 1) if b"<" in name else f"response-{name.decode()}"
            answers.append(
                f"--{boundary}\r\nContent-Type: application/http\r\nContent-ID: {told}\r\n\r\n"
                f"HTTP/1.1 {status} X\r\nContent-Length: 0\r\n\r\n\r\n"
            )
        content = "".join([*answers, f"--{boundary}--\r\n"]).encode()
        self.answer(200, content, {"Content-Type": f"multipart/mixed; boundary={boundary}"})

    # --- uploads in parts -------------------------------------------------------------------------------------

    def upload(self, bucket: str, key: str, query: dict[str, str], body: bytes) -> None:
        number = query.get("uploadId", "")
        if "uploads" in query:
            number = uuid.uuid4().hex
            self.uploads[number] = {}
            return self.answer(
                200,
                f"<InitiateMultipartUploadResult><Bucket>{bucket}</Bucket><Key>{escape(key)}</Key>"
                f"<UploadId>{number}</UploadId></InitiateMultipartUploadResult>".encode(),
            )
        if number not in self.uploads:
            return self.refuse(404)
        if self.command == "PUT":
            self.uploads[number][int(query["partNumber"])] = body
            return self.answer(200, b"", {"ETag": f'"{query["partNumber"]}"'})
        parts = self.uploads.pop(number)
        if self.command == "DELETE":
            return self.answer(204)
        whole = b"".join(parts[one] for one in sorted(parts))
        told = (
            f"<CompleteMultipartUploadResult><Location>x</Location><Bucket>{bucket}</Bucket><Key>{escape(key)}</Key>"
            "<ETag>ETAG</ETag></CompleteMultipartUploadResult>"
        )
        return self.put(bucket, key, whole, answer=told.encode())

    # --- listings ---------------------------------------------------------------------------------------------

    def list(self, bucket: str, query: dict[str, str]) -> None:
        names = {"prefix": "prefix", "delimiter": "delimiter", "continuation-token": "pageToken",
                 "max-keys": "maxResults"}  # fmt: skip
        asked = {names[name]: value for name, value in query.items() if name in names}
        status, _, content = self.ask("GET", f"/storage/v1/b/{bucket}/o?{urlencode(asked)}")
        if status != 200:
            return self.answer(404, b"<Error><Code>NoSuchBucket</Code><Message>no</Message></Error>")
        page = json.loads(content)
        token = page.get("nextPageToken")
        told = [f"<Name>{bucket}</Name><IsTruncated>{'true' if token else 'false'}</IsTruncated>"]
        told += [f"<NextContinuationToken>{escape(token)}</NextContinuationToken>"] if token else []
        told += [
            f"<Contents><Key>{escape(meta['name'])}</Key><Size>{meta['size']}</Size><ETag>{escape(_etag(meta))}</ETag>"
            f"<LastModified>{meta['updated']}</LastModified></Contents>"
            for meta in page.get("items", ())
        ]
        told += [
            f"<CommonPrefixes><Prefix>{escape(prefix)}</Prefix></CommonPrefixes>" for prefix in page.get("prefixes", ())
        ]
        return self.answer(200, f"<ListBucketResult>{''.join(told)}</ListBucketResult>".encode())

    def log_message(self, *_: object) -> None:
        pass


_OF_A_HOP = ("connection", "transfer-encoding", "content-length", "date", "server")


def _etag(meta: dict[str, str]) -> str:
    return f'"{meta["generation"]}"'


def _headers(meta: dict[str, str]) -> dict[str, str]:
    updated = datetime.fromisoformat(meta["updated"])
    return {
        "ETag": _etag(meta),
        "x-goog-generation": meta["generation"],
        "Last-Modified": format_datetime(updated, usegmt=True),
    }


def main(command: list[str]) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        Translator.port = free.getsockname()[1]
    front = ThreadingHTTPServer(("127.0.0.1", 0), Translator)
    endpoint = f"http://127.0.0.1:{front.server_port}"
    server = subprocess.Popen(
        [*command, "-scheme", "http", "-host", "127.0.0.1", "-port", str(Translator.port), "-backend", "memory",
         "-log-level", "error", "-external-url", endpoint, "-public-host", f"127.0.0.1:{front.server_port}"],
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        while True:
            try:
                socket.create_connection(("127.0.0.1", Translator.port)).close()
                break
            except OSError:
                if server.poll() is not None:
                    sys.exit(f"{command[0]} has ended with status {server.returncode}")
                time.sleep(0.02)
        threading.Thread(target=front.serve_forever, daemon=True).start()
        print(endpoint, flush=True)
        sys.stdin.buffer.read()
    finally:
        server.kill()
        server.wait()


if __name__ == "__main__":
    main(sys.argv[1:])
