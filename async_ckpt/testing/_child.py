"""The program that runs one server for `servers.py`: `_child.py moto`, or `_child.py rclone <its command line>`, or
`_child.py program <a port, or 0> <a command line, perhaps with {port} in it>`.

In: standard input, which closes when the owner ends for any reason. Out: the endpoint, as a line on standard output
once the server answers. Knows nothing of: async_ckpt, which it must not import.
"""

from __future__ import annotations

import logging
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any


def moto() -> None:
    from moto.moto_server.werkzeug_app import MotoRequestHandler, create_backend_app
    from werkzeug.serving import make_server

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    date_uploads()
    app = Conditional(create_backend_app("s3"))
    server = make_server("127.0.0.1", 0, app, threaded=True, request_handler=MotoRequestHandler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(f"http://127.0.0.1:{server.server_port}", flush=True)
    sys.stdin.buffer.read()
    os._exit(0)  # without waiting for requests


def date_uploads() -> None:
    """Give uploads their real start time. Moto reports 2010 for all, so a sweep would consider new uploads stale."""
    from moto.core.utils import iso_8601_datetime_with_milliseconds as now
    from moto.s3 import models, responses

    upload_type: Any = models.FakeMultipart
    response_type: Any = responses.S3Response
    begin, list_uploads = upload_type.__init__, response_type.list_multipart_uploads
    initiated: dict[str, str] = {}

    def dated_begin(upload: Any, *arguments: Any, **options: Any) -> None:
        begin(upload, *arguments, **options)
        initiated[upload.id] = now()

    def dated_list(response: Any) -> Any:
        status, headers, body = list_uploads(response)
        pattern = r"(<UploadId>(\w+)</UploadId>.*?<Initiated>)[^<]*"
        return status, headers, re.sub(pattern, lambda match: match[1] + initiated[match[2]], body)

    upload_type.__init__ = dated_begin
    response_type.list_multipart_uploads = dated_list


class Conditional:
    """A lock around conditional requests: moto checks the condition and then stores, so two threads could both win."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._lock = threading.Lock()

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        if environ["REQUEST_METHOD"] in ("GET", "HEAD") or not (
            environ.keys() & {"HTTP_IF_MATCH", "HTTP_IF_NONE_MATCH"}
        ):
            return self._app(environ, start_response)  # type: ignore[no-any-return]
        with self._lock:
            return list(self._app(environ, start_response))


def rclone(command: list[str]) -> None:
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE)
    _tend(server, partial(_announce, server))


def program(port: int, command: list[str]) -> None:
    if not port:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
    words = [word.replace("{port}", str(port)) for word in command]
    server = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    _tend(server, partial(_announce_port, server, port))


def _tend(server: subprocess.Popen[bytes], announce: Callable[[], None]) -> None:
    """End the server when the owner ends."""
    try:
        threading.Thread(target=announce, daemon=True).start()
        sys.stdin.buffer.read()
    finally:
        server.kill()
        server.wait()


def _announce_port(server: subprocess.Popen[bytes], port: int) -> None:
    while server.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
        except OSError:
            threading.Event().wait(0.02)
        else:
            print(f"http://127.0.0.1:{port}", flush=True)
            server.wait()
    os._exit(1)  # it has ended by itself


def _announce(server: subprocess.Popen[bytes]) -> None:
    assert server.stderr is not None
    for line in server.stderr:
        match = re.search(rb"Starting s3 server on \[(http://[^\]]*?)/?\]", line)
        if match:
            print(match[1].decode(), flush=True)
        else:
            sys.stderr.buffer.write(line)
            sys.stderr.flush()
    if server.wait():  # rclone has ended by itself
        os._exit(1)


if __name__ == "__main__":
    if sys.argv[1] == "moto":
        moto()
    elif sys.argv[1] == "program":
        program(int(sys.argv[2]), sys.argv[3:])
    else:
        rclone(sys.argv[2:])
