"""Engines behind small servers, which answer as SGLang 0.5.23 and vLLM 0.33.0 do, written after their handlers.

They really load the folder that they are told of, tensor by tensor, and keep what they have loaded: a mixture of
versions is found by `assert_whole`. What goes wrong in an engine is set by the test.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import torch
from racing import PATIENCE, until
from safetensors import safe_open

import async_ckpt

NUM_TENSORS = 12


def weights_of(version: int, items: int = 2000) -> dict[str, torch.Tensor]:
    """Weights that show which version they are: each item is its number."""
    return {f"layer.{number}.weight": torch.full((items,), float(version)) for number in range(NUM_TENSORS)}


def publish(publisher: async_ckpt.Publisher, *versions: int, items: int = 2000) -> None:
    for version in versions:
        publisher.publish(weights_of(version, items), version).result()


def versions_in(folder: Path, between: Callable[[], None] = lambda: None) -> set[float]:
    """The numbers of the versions whose weights are in a folder, read as an engine reads them."""
    found: set[float] = set()
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 - it is no dict
                found |= set(file.get_tensor(name).unique().tolist())
                between()
    return found


class EngineServer:
    """An engine behind HTTP. `loaded` are the versions of each load, in order; `asked` the paths and bodies of posts."""

    protocol = "HTTP/1.1"

    def __init__(self, key: str | None = None) -> None:
        self.loaded: list[set[float]] = []
        self.asked: list[tuple[str, Any]] = []
        self.weight_version = "default"
        self.is_paused = False
        self.refuses: int | None = None  # the status of each load
        self.taken: list[int] = []  # the versions that a plain server has answered for, in any order after it hung
        self.takes_silently = False  # it loads, and its version stays what it was
        self.between: Callable[[], None] = lambda: None  # called after each tensor
        self.hangs: threading.Event | None = None  # a load waits for it
        self._key = key
        engine = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = engine.protocol

            def do_GET(self) -> None:
                engine._handle(self, None)

            def do_POST(self) -> None:
                data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                engine._handle(self, json.loads(data) if data else None)

            def log_message(self, *_: object) -> None:
                pass

        self._handler = Handler
        self._loading = threading.Lock()  # engines load one after the other
        self.server: ThreadingHTTPServer | None = None
        self.port = 0
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        ThreadingHTTPServer.daemon_threads = True
        self.server = ThreadingHTTPServer(("127.0.0.1", self.port), self._handler)
        self.port = self.server.server_address[1]
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def stop(self) -> None:
        """It is down: connections are refused, and what it had loaded is gone."""
        if self.server is not None:
            self.server.shutdown()
            self.server.server_close()
            self.server = None
        self.weight_version = "default"

    def __enter__(self) -> EngineServer:
        return self

    def __exit__(self, *_: object) -> None:
        if self.hangs is not None:
            self.hangs.set()
        self.stop()

    def _handle(self, request: BaseHTTPRequestHandler, body: Any) -> None:
        if self._key is not None and request.headers.get("Authorization") != f"Bearer {self._key}":
            status, answer = 401, {"error": "Unauthorized"}
        else:
            if request.command == "POST":
                self.asked.append((request.path, body))
            status, answer = self.answer(request.command, request.path, body)
        data = json.dumps(answer).encode()
        try:
            request.send_response(status)
            request.send_header("Content-Type", "application/json")
            request.send_header("Content-Length", str(len(data)))
            request.send_header("Connection", "close")  # as uvicorn does where it is asked to
            request.end_headers()
            request.wfile.write(data)
        except OSError:
            pass  # whoever asked is gone

    def answer(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        raise NotImplementedError

    def load(self, folder: str) -> None:
        with self._loading:
            if self.hangs is not None:
                self.hangs.wait(PATIENCE)
            self.loaded.append(versions_in(Path(folder), self.between))

    @property
    def versions(self) -> list[int]:
        """The versions that it has loaded. Each load was of one version as a whole."""
        assert all(len(one) == 1 for one in self.loaded), f"a load found a mixture of versions: {self.loaded}"
        return [int(next(iter(one))) for one in self.loaded]

    def wait_for(self, version: int) -> None:
        until(lambda: self.weight_version == str(version))


class SGLangServer(EngineServer):
    def answer(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        if (method, path) == ("GET", "/model_info"):
            return 200, {"model_path": "", "weight_version": self.weight_version, "load_format": "auto"}
        if (method, path) != ("POST", "/update_weights_from_disk"):
            return 404, {"detail": "Not Found"}
        if self.refuses is not None:
            return self.refuses, {"success": False, "message": "Failed to update weights.", "num_paused_requests": 0}
        self.load(body["model_path"])
        message = "Succeeded to update model weights."
        if body["weight_version"] is not None and not self.takes_silently:
            self.weight_version = body["weight_version"]
            message += f" Weight version updated to {body['weight_version']}."
        return 200, {"success": True, "message": message, "num_paused_requests": 0}


class VLLMServer(EngineServer):
    """With VLLM_SERVER_DEV_MODE=1. A load while it is not paused fails the test."""

    def answer(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        parts = urlsplit(path)
        match (method, parts.path):
            case ("GET", "/weight_info"):
                return 200, {"weight_version": self.weight_version}
            case ("POST", "/pause"):
                mode = parse_qs(parts.query).get("mode", ["abort"])[0]
                if mode not in ("abort", "wait", "keep"):
                    return 422, {"detail": "mode"}
                self.is_paused = True
                return 200, {"status": "paused"}
            case ("POST", "/collective_rpc"):
                assert body["method"] == "reload_weights"
                assert self.is_paused
                if self.refuses is not None:
                    return self.refuses, {"error": {"message": "No such file", "type": "Internal Server Error"}}
                self.load(body["kwargs"]["weights_path"])
                return 200, {"results": [None]}
            case ("POST", "/update_weight_version"):
                if not self.takes_silently:
                    self.weight_version = body["new_version"]
                return 200, {"success": True, "new_version": body["new_version"]}
            case ("POST", "/resume"):
                self.is_paused = False
                return 200, {"status": "resumed"}
        return 404, {"detail": "Not Found"}


class PlainServer(EngineServer):
    """A user's own, for `--post`. It does not say which version it has."""

    protocol = "HTTP/1.0"

    def answer(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        if self.refuses is not None:
            return self.refuses, {}
        self.load(body["folder"])
        self.weight_version = str(body["version"])
        self.taken.append(body["version"])
        return 200, {}


class Following(threading.Thread):
    """`follow` on a thread, until the block ends. `events` are what it says."""

    def __init__(self, root: Any, into: Path, engine: Any, **options: Any) -> None:
        super().__init__(daemon=True)
        self._stop_now = threading.Event()
        self._given = (root, into, engine)
        self._options = {"poll_seconds": 0.02, **options, "stop": self._stop_now.is_set}
        self.version: int | None = None
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self.version = async_ckpt.follow(*self._given, **self._options)
        except BaseException as error:
            self.error = error

    def end(self) -> int | None:
        """End it, and return what `follow` returned, or raise what it raised."""
        self._stop_now.set()
        self.join(PATIENCE)
        assert not self.is_alive(), "follow does not end"
        if self.error is not None:
            raise self.error
        return self.version


@contextmanager
def following(root: Any, into: Path, engine: Any, **options: Any) -> Iterator[Following]:
    one = Following(root, into, engine, **options)
    one.start()
    try:
        yield one
    finally:
        one.end()


def status_in(file: Path) -> dict[str, Any]:
    """The status of a sidecar; empty before it has written one."""
    try:
        return dict(json.loads(file.read_text()))
    except FileNotFoundError:
        return {}


def wait_a_moment() -> None:
    """As long as a slow disk takes for one tensor."""
    time.sleep(0.005)
