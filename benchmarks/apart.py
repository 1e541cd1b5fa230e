"""A function in a process of its own, in which torch has been imported and nothing else has happened.

In: a function of a module, arguments. Out: what it sends back. Knows nothing of: what is measured.

To import torch and its compiler takes seconds, and there are dozens of such processes: a server without threads does it
once, and they are forks of it. A build for CUDA is imported by each of them instead, for what looks for a device before
a fork may not use it after.
"""

from __future__ import annotations

import multiprocessing
import os
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from typing import Any, Final

import torch

_CONTEXT: Final[Any] = multiprocessing.get_context("spawn" if torch.backends.cuda.is_built() else "forkserver")
_CONTEXT.set_forkserver_preload(["torch._dynamo"])
_PATIENCE_SECONDS: Final = 900
_GRACE_SECONDS: Final = 30


class NoAnswerError(Exception):
    """The process raised, ended without an answer, or took too long: the text says which."""


class Apart:
    """The process, seen from outside."""

    def __init__(self, process: multiprocessing.process.BaseProcess, channel: Connection) -> None:
        self._process, self._channel = process, channel

    def send(self, word: Any) -> None:
        with suppress(OSError):  # it has ended, as `receive` will tell
            self._channel.send(word)

    def receive(self) -> Any:
        """What it sends next; raises `NoAnswerError`."""
        if not self._channel.poll(_PATIENCE_SECONDS):
            raise NoAnswerError(f"not done after {_PATIENCE_SECONDS} s")
        try:
            told, failure = self._channel.recv()
        except (EOFError, OSError):
            self._process.join(_GRACE_SECONDS)
            raise NoAnswerError(f"ended with exit status {self._process.exitcode}") from None
        if failure is not None:
            error = NoAnswerError(failure.strip().splitlines()[-1])
            error.add_note(failure)
            raise error
        return told


@contextmanager
def begun(fn: Callable[..., Any], *arguments: Any) -> Iterator[Apart]:
    """Runs `fn(channel, *arguments)`, for as long as the block lasts; `channel.receive()` and `send` are our `send` and
    `receive`.
    """
    ours, theirs = _CONTEXT.Pipe()
    process = _CONTEXT.Process(target=_run, args=(theirs, fn, arguments))
    with ours:
        with theirs:
            process.start()
        try:
            yield Apart(process, ours)
            ours.close()  # whoever waits for a word more is told
            process.join(_GRACE_SECONDS)  # it may have processes of its own to end
        finally:
            process.kill()
            process.join()


def result_of(fn: Callable[..., Any], *arguments: Any) -> Any:
    """What `fn(*arguments)` returns there."""
    with begun(_answer, fn, arguments) as process:
        return process.receive()


class Channel:
    """The way back, seen from inside."""

    def __init__(self, channel: Connection) -> None:
        self._channel = channel

    def send(self, told: Any) -> None:
        self._channel.send((told, None))

    def receive(self) -> Any:
        return self._channel.recv()


def _answer(channel: Channel, fn: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    channel.send(fn(*arguments))


def _run(connection: Connection, fn: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    # What is measured may be talkative, and so may the processes that it starts.
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    os.dup2(silence, 2)
    warnings.simplefilter("ignore")
    try:
        fn(Channel(connection), *arguments)
    except BaseException:
        connection.send((None, traceback.format_exc()))
        raise
