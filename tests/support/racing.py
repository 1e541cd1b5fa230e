"""Threads of a test: calls that wait, gates where they wait, and what is waited for instead of sleeping."""

import faulthandler
import re
import tempfile
import threading
from collections.abc import Callable
from typing import Any

from async_ckpt.core.host.threads import Crew
from async_ckpt.core.timing import Timekeeper, monotonic

# Long enough for any machine; reached only when a test fails.
PATIENCE = 60.0


class Thrown(Exception):
    """What a test throws, and recognises again."""


class Skipping(Timekeeper):
    """A timer that does not wait: its clock goes on by what it was asked to wait for."""

    def __init__(self) -> None:
        self.skipped = 0.0
        self._lock = threading.Lock()

    def now(self) -> float:
        return super().now() + self.skipped

    def sleep(self, seconds: float) -> None:
        with self._lock:
            self.skipped += seconds

    def wait_for(self, changed: threading.Condition, happened: Callable[[], bool], seconds: float) -> bool:
        self.sleep(seconds)
        return super().wait_for(changed, happened, 0.0)


class Gate:
    """A point in a function where it waits for the test."""

    def __init__(self) -> None:
        self._reached, self._go = threading.Event(), threading.Event()

    def passed(self) -> None:
        self._reached.set()
        assert self._go.wait(PATIENCE), "the test has left a function waiting"

    def wait_reached(self) -> None:
        assert self._reached.wait(PATIENCE), "nobody came"

    def open(self) -> None:
        self._go.set()


class Call(threading.Thread):
    """A call on another thread; `outcome()` waits for it, and raises what it raised."""

    def __init__(self, fn: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self._fn = fn
        self._value: Any = None
        self._error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self._value = self._fn()
        except BaseException as error:
            self._error = error

    def outcome(self) -> Any:
        self.join(PATIENCE)
        assert not self.is_alive(), "the call does not return"
        if self._error is not None:
            raise self._error
        return self._value

    def wait_until_inside(self, *functions: str) -> None:
        """Return when the thread is inside of a function of one of these names, or when its call has ended."""
        until(lambda: not self.is_alive() or not _functions_of(self.ident).isdisjoint(functions))

    def wait_until_inside_all(self, *functions: str) -> None:
        """Return when the thread is inside of functions of all of these names, or when its call has ended."""
        until(lambda: not self.is_alive() or _functions_of(self.ident).issuperset(functions))


def _functions_of(ident: int | None) -> set[str]:
    """The functions that a thread is in.

    Not by sys._current_frames: a collection of garbage inside of it waits for ever for a lock that it holds itself.
    """
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)  # of 100 threads at most, the newest ones first
        file.seek(0)
        told = file.read()
    names: set[str] = set()
    for part in re.split(r"^(?:Current thread|Thread) ", told, flags=re.MULTILINE):
        if part and int(part.split()[0], 16) == ident:
            names.update(re.findall(r"^  File .* in (\S+)$", part, flags=re.MULTILINE))
    return names


def until(condition: Callable[[], bool]) -> None:
    """Wait for something that no event tells of."""
    pause, deadline = threading.Event(), monotonic() + PATIENCE
    while monotonic() < deadline:
        if condition():
            return
        pause.wait(0.002)
    raise AssertionError("what was waited for did not come")


def appenders() -> int:
    return sum("append" in thread.name for thread in threading.enumerate())


class HeldCrew(Crew):
    """Keeps what is to be copied later until the test lets it go."""

    def __init__(self, crew: Crew) -> None:
        super().__init__("held", 1)
        self._crew = crew
        self._held: list[Callable[[], None]] = []

    def submit(self, task: Callable[[], None], refused: Any = None) -> None:
        if task.__name__ == "_fill_later":
            self._held.append(task)
        else:
            self._crew.submit(task, refused)

    def release(self) -> None:
        held, self._held = self._held, []
        for task in held:
            self._crew.submit(task)
