"""A training as a process of its own, so that a kill is a kill.

In: a command. Out: the events that it tells. Knows nothing of: what they mean to whom.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from examples.trace import Event


@contextmanager
def running(command: list[str], *, quiet: bool = False) -> Iterator[subprocess.Popen[str]]:
    """Its lines are to be read by `events`. It does not outlive the block. `quiet`: it fails, and need not say so."""
    errors = subprocess.DEVNULL if quiet else None
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as process:
        try:
            yield process
        except BaseException:  # a Ctrl-C here must not leave a training behind
            process.kill()
            raise


def command_line() -> str:
    """The words by which a reader calls the command here: of an environment that is not active, its Python."""
    return "async-ckpt" if shutil.which("async-ckpt") else f"{os.path.relpath(sys.executable)} -m async_ckpt"


def events(process: subprocess.Popen[str]) -> Iterator[Event]:
    """All of them, until it has closed its output."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.endswith("\n"):  # a kill may cut the last one
            yield json.loads(line)
