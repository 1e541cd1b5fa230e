"""The command `async-ckpt`, run in this process, in one of its own, or in a terminal."""

import contextlib
import io
import json
import os
import pty
import subprocess
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

import pytest

from async_ckpt.tools.command.main import status_of


def store_options(options: Mapping[str, Any]) -> tuple[tuple[str, ...], dict[str, str]]:
    """What the command needs for a server with these options: its own options, and the keys in the environment."""
    keys = {"AWS_ACCESS_KEY_ID": options["access_key_id"], "AWS_SECRET_ACCESS_KEY": options["secret_access_key"]}
    return ("--endpoint", options["endpoint"], "--region", options.get("region", "us-east-1")), keys


class Ended(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


def run_command(*arguments: Any, **env: str) -> Ended:
    """In this process: a new one would import torch anew for each of these tests."""
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(io.StringIO()) as out,
        contextlib.redirect_stderr(io.StringIO()) as err,
    ):
        for name, value in env.items():
            patch.setenv(name, value)
        status = status_of([*map(str, arguments)])
    return Ended(status, out.getvalue(), err.getvalue())


def in_process(*arguments: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "async_ckpt", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def documented(*arguments: Any, status: int = 0) -> Any:
    ended = run_command(*arguments, "--json")
    assert ended.returncode == status, ended.stderr
    return json.loads(ended.stdout)


def in_terminal(*arguments: Any, columns: int = 80, answer: str | None = None, status: int = 0) -> bytes:
    """What a terminal of so many columns is written; with `answer`, that is typed in reply to a question."""
    ours, theirs = pty.openpty()
    child = subprocess.Popen(
        [sys.executable, "-m", "async_ckpt", *map(str, arguments)],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "COLUMNS": str(columns), "TERM": "xterm"},
    )
    os.close(theirs)
    written = b""
    try:
        while piece := os.read(ours, 65536):
            written += piece
            if answer is not None and b"]:" in written:
                os.write(ours, f"{answer}\n".encode())
                answer = None
    except OSError:
        pass  # the child has closed it
    assert child.wait(60) == status, written
    os.close(ours)
    return written
