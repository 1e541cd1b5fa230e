"""Places that refuse or never answer: each command ends with one line and a status."""

import os
import shutil
import socket
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import Ended, run_command
from states import open_run

from async_ckpt.core.storage.local import LocalStorage

KEYS = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "secret-of-the-test"}
READERS = [
    ("ls",),
    ("inspect",),
    ("verify",),
    ("diff", "{root}"),
    ("cp", "{tmp}/b"),
    ("convert", "{tmp}/x.pt", "--overwrite"),
    ("repair",),
    ("page", "-o", "{tmp}/x.html", "--overwrite"),
]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    with open_run(tmp_path / "a") as ckpt:
        for step in (1, 2, 3):
            ckpt.save({"w": torch.full((1000,), float(step))}, step).result()
    return tmp_path / "a"


def arguments_of(call: tuple[str, ...], place: Any, root: Path, tmp: Path) -> list[str]:
    word, *others = call
    return [word, str(place), *(other.format(root=root, tmp=tmp) for other in others)]


def assert_is_one_line(ended: Ended, status: int, *said: str) -> None:
    assert (ended.returncode, ended.stdout) == (status, ""), ended.stderr
    assert ended.stderr.startswith("async-ckpt: ")
    assert ended.stderr.count("\n") == 1
    for text in said:
        assert text in ended.stderr


class Refusing(BaseHTTPRequestHandler):
    """A store that answers every request with 403."""

    def answer(self) -> None:
        body = b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"
        self.send_response(403)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = answer  # noqa: N815

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def refusing() -> Iterator[list[str]]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Refusing) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield ["--endpoint", f"http://127.0.0.1:{server.server_port}", "--region", "us-east-1"]
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("call", READERS, ids=lambda call: call[0])
def test_wrong_credentials_are_said_without_the_secret(root, tmp_path, refusing, call):
    ended = run_command(*arguments_of(call, "s3://bucket/a", root, tmp_path), *refusing, "--json", **KEYS)
    assert_is_one_line(ended, 74, "403", "s3://bucket/a")
    assert KEYS["AWS_SECRET_ACCESS_KEY"] not in ended.stderr


@pytest.mark.parametrize("call", [*READERS, ("bench", "--size", "1MB")], ids=lambda call: call[0])
def test_a_store_that_never_answers_is_given_up(root, tmp_path, call):
    with socket.create_server(("127.0.0.1", 0)) as mute:
        store = ["--endpoint", f"http://127.0.0.1:{mute.getsockname()[1]}", "--region", "x", "--deadline", "0.5"]
        ended = run_command(*arguments_of(call, "s3://bucket/a", root, tmp_path), *store, "--json", **KEYS)
    assert_is_one_line(ended, 74, "s3://bucket/a")


@contextmanager
def as_somebody_else() -> Iterator[None]:
    """With the rights of a user who owns nothing here. Root may read everything; other users have no choice."""
    if os.geteuid():
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.mark.parametrize("call", READERS, ids=lambda call: call[0])
def test_a_step_without_permission_is_named(call):
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        root, tmp = Path(folder, "a"), Path(folder, "out")
        tmp.mkdir()
        with open_run(root) as ckpt:
            for step in (1, 2):
                ckpt.save({"w": torch.full((1000,), float(step))}, step).result()
        fine = run_command(*arguments_of(call, root, root, tmp))  # also imports what the other user may not read
        assert fine.returncode == 0, fine.stderr
        os.chmod(root / "step_00000002", 0)
        with as_somebody_else():
            ended = run_command(*arguments_of(call, root, root, tmp), "--json")
        os.chmod(root / "step_00000002", 0o755)
    assert_is_one_line(ended, 74, "step_00000002", "Permission denied", "this user may read")


@pytest.mark.parametrize(("method", "file"), [("read", "manifest.json"), ("open", ".tar")])
@pytest.mark.parametrize("step", [2, 3])
@pytest.mark.parametrize("call", READERS[:3] + READERS[4:5], ids=lambda call: call[0])
def test_of_a_run_whose_step_vanishes_while_it_is_read_the_others_are_read(
    root, tmp_path, monkeypatch, call, step, method, file
):
    folder, real = f"step_{step:08d}", getattr(LocalStorage, method)

    def vanishing(self: LocalStorage, path: str, *arguments: Any, **options: Any) -> Any:
        if path.startswith(folder) and path.endswith(file) and (root / folder).exists():
            shutil.rmtree(root / folder)
            for name in ("latest", "checkpoints.jsonl"):  # as retention leaves them, without that step
                (root / name).unlink(missing_ok=True)
        return real(self, path, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(LocalStorage, method, vanishing)
        ended = run_command(*arguments_of(call, root, root, tmp_path))
    if call[0] == "verify":  # which may also say that the tracker is missing
        assert ended.returncode == 0 or "async-ckpt repair" in ended.stdout
    else:
        assert ended.returncode == 0, ended.stderr
    if call[0] == "cp":
        assert run_command("verify", tmp_path / "b").returncode == 0


@pytest.mark.parametrize("option", [("--endpoint", "http://127.0.0.1:9"), ("--region", "x"), ("--anonymous",)])
def test_options_of_a_store_are_refused_for_a_path(root, option):
    ended = run_command("ls", root, *option)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert (
        ended.stderr
        == f"async-ckpt: {root}: --endpoint, --region, --profile and --anonymous are for URLs; leave them out\n"
    )
