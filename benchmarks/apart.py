"""A function in a new process, in which torch has been imported and nothing else has happened.

In: a function of a module, arguments. Out: the objects that it sends. Knows nothing of: what is measured.

Importing torch and its compiler takes seconds, and there are dozens of such processes. So a fork server without threads
imports them once, and the processes are its forks. A CUDA build of torch is imported by each process instead: after a
fork, a process cannot use a device that was looked for before the fork.
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
    """The process raised an error, ended without an answer, or took too long, as the text says."""


class Apart:
    """The process, as its parent sees it."""

    def __init__(self, process: multiprocessing.process.BaseProcess, channel: Connection) -> None:
        self._process, self._channel = process, channel

    def send(self, word: Any) -> None:
        with suppress(OSError):  # it has ended; `receive` will raise an error
            self._channel.send(word)

    def receive(self) -> Any:
        """The next object that it sends. Raises `NoAnswerError`."""
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
    """Run `fn(channel, *arguments)` in a process during the block.

    `channel.receive()` returns the parent's objects, and `channel.send` sends objects to the parent.
    """
    ours, theirs = _CONTEXT.Pipe()
    process = _CONTEXT.Process(target=_run, args=(theirs, fn, arguments))
    with ours:
        with theirs:
            process.start()
        try:
            yield Apart(process, ours)
            ours.close()  # if the process still waits for an object, it gets an error
            process.join(_GRACE_SECONDS)  # it may have to end its own child processes
        finally:
            process.kill()
            process.join()


def result_of(fn: Callable[..., Any], *arguments: Any) -> Any:
    """The result of `fn(*arguments)` in such a process."""
    with begun(_answer, fn, arguments) as process:
        return process.receive()


class Channel:
    """The channel to the parent, as the process sees it."""

    def __init__(self, channel: Connection) -> None:
        self._channel = channel

    def send(self, told: Any) -> None:
        self._channel.send((told, None))

    def receive(self) -> Any:
        return self._channel.recv()


def _answer(channel: Channel, fn: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    channel.send(fn(*arguments))


def _run(connection: Connection, fn: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    # The measured code, and the processes that it starts, may print a lot.
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    os.dup2(silence, 2)
    warnings.simplefilter("ignore")
    try:
        fn(Channel(connection), *arguments)
    except BaseException:
        connection.send((None, traceback.format_exc()))
        raise
