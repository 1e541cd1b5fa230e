"""A hub on this machine: as much of its protocol as pushes take."""

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Hub:
    """What was pushed to the one repository: the commits, each with its message and its files by name."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self.commits: list[tuple[str, dict[str, bytes]]] = []

    def answer(self, path: str, body: bytes) -> dict[str, Any]:
        if path.endswith("/repos/create"):
            return {"url": f"{self.endpoint}/nobody/nothing", "id": "nobody/nothing"}
        if "/preupload/" in path:
            names = [file["path"] for file in json.loads(body)["files"]]
            return {"files": [{"path": name, "uploadMode": "regular", "shouldIgnore": False} for name in names]}
        if "/commit/" in path:
            lines = [json.loads(line) for line in body.splitlines()]
            message = next(line["value"]["summary"] for line in lines if line["key"] == "header")
            files = [line["value"] for line in lines if line["key"] == "file"]
            self.commits.append((message, {file["path"]: base64.b64decode(file["content"]) for file in files}))
            oid = f"{len(self.commits):040}"
            return {"commitUrl": f"{self.endpoint}/nobody/nothing/commit/{oid}", "commitOid": oid}
        return {"id": "nobody/nothing", "sha": "0" * 40, "siblings": []}  # what the repository has


@contextmanager
def local_hub() -> Iterator[Hub]:
    """A hub that is there until the end of the `with` block."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            told = json.dumps(hub.answer(self.path.partition("?")[0], body)).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(told)))
            self.end_headers()
            self.wfile.write(told)

        do_GET = do_POST  # noqa: N815

        def log_message(self, *_: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        hub = Hub(f"http://127.0.0.1:{server.server_port}")
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()
