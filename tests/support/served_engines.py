"""An engine in a process of its own, behind the routes of its framework.

Its support module has a function `serve_in`, which calls `serve` with the answers of the engine.
"""

from __future__ import annotations

import http.server
import json
import os
import signal
import threading
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from children import Child, Nursery
from racing import until

_SERVE = """
import sys
from {module} import serve_in
serve_in(sys.argv[1])
"""


class ServedEngine:
    """One engine, which writes its port to `folder`."""

    module: ClassVar[str]

    def __init__(self, nursery: Nursery, folder: Path) -> None:
        folder.mkdir()
        self.folder = folder
        self.child: Child = nursery.start(_SERVE.format(module=self.module), folder)
        until(lambda: (folder / "port").exists())
        self.url = f"http://127.0.0.1:{(folder / 'port').read_text()}"

    def state(self) -> dict[str, Any]:
        with urllib.request.urlopen(urllib.request.Request(f"{self.url}/state", b"{}"), timeout=60) as response:
            return json.loads(response.read())

    def kill(self) -> None:
        self.child.send(signal.SIGKILL)
        self.child.ended()


def serve(folder: str, answer: Callable[[str, dict[str, Any]], tuple[int, Any]]) -> None:
    """Answer by a status and what is sent as JSON to each path and body that is posted, until this process is killed."""

    class Routes(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}")
            status, said = answer(self.path, body or {})
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(said).encode())

        def log_message(self, *_: object) -> None:
            """Nothing is printed."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Routes)
    Path(folder, "port.tmp").write_text(str(server.server_address[1]))
    os.rename(Path(folder, "port.tmp"), Path(folder, "port"))
    threading.Thread(target=server.serve_forever).start()
