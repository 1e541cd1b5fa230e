"""Processes that benchmarks begin: what becomes of those that fail."""

import os
import signal
from contextlib import suppress

import pytest

from benchmarks.apart import Channel, NoAnswerError, begun, result_of


def fail(word: str) -> None:
    raise ValueError(f"no {word}\nat all")


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_unheard(channel: Channel) -> None:
    channel.send("ready")
    channel.receive()
    die()


def echo(channel: Channel) -> None:
    channel.send(os.getpid())
    with suppress(EOFError):  # the other end is closed when the block ends
        while True:
            channel.send(channel.receive())


def test_words_go_to_and_fro_and_no_process_outlasts_the_block():
    with begun(echo) as process:
        pid = process.receive()
        process.send("a")
        assert process.receive() == "a"
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_what_a_function_raises_elsewhere_is_told_with_its_traceback():
    with pytest.raises(NoAnswerError, match="at all") as raised:
        result_of(fail, "room")
    assert "ValueError: no room" in raised.value.__notes__[0]


def test_a_process_that_is_killed_has_no_answer():
    with pytest.raises(NoAnswerError, match="status -9"):
        result_of(die)
    with begun(die_unheard) as process:
        assert process.receive() == "ready"
        for _ in range(3):
            process.send("one word more than is ever read")
        with pytest.raises(NoAnswerError, match="status -9"):
            process.receive()
