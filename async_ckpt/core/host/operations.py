"""The operations of this process, reported to listeners when they have ended: the source of metrics and traces.

In: saves, publications, restores and pulls, as they begin and end; marks, and how a training has spent its time.
Out: calls of listeners. Knows nothing of: the work of an operation, the work of a listener.

Each listener has its own thread, so a listener that raises or never returns affects no save and no other listener. The
thread that ends an operation only puts a value into a queue. It takes no lock, since a signal may interrupt it between
any two lines.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import Context, copy_context
from types import MappingProxyType
from typing import Final, Literal, NamedTuple

from ..report import PullReport, SaveReport
from ..timing import TIMEKEEPER, Interval, Spans, wall_time
from .process import in_forked_child
from .threads import start_thread

Kind = Literal["save", "publish", "restore", "pull", "train", "mark"]
Outcome = Literal["done", "failed", "skipped"]

# The most operations that are queued for a listener. More are dropped, so that a listener that hangs takes little
# memory.
_MAX_QUEUED: Final = 1000
_MAX_ERROR_CHARACTERS: Final = 500

_log: Final = logging.getLogger("async_ckpt")


class Ended(NamedTuple):
    """An operation that has ended. Times are in seconds since the epoch.

    `roots` are the roots of the run or the publication, empty for a one-off save to a path. `step` is the version for a
    publication or pull; None if there is none. `phases` may overlap. `report` is set for a save or pull that has not
    failed. `num_bytes` are the bytes that this process wrote or read. `error` and `error_type` are text, since an
    exception would keep the caller's objects alive. `context` has the context variables of the call.
    """

    kind: Kind
    roots: tuple[str, ...]
    step: int | None
    outcome: Outcome
    begin: float
    end: float
    phases: tuple[Interval, ...]
    report: SaveReport | PullReport | None
    num_bytes: int
    error_type: str
    error: str
    context: Context
    parts: Mapping[str, float] = MappingProxyType({})
    """For "train", which comes about once a minute: the seconds of the training so far, by use. For "mark": the mark.
    """

    @property
    def run(self) -> str:
        """The first root, which stands for the run; empty for a one-off save to a path."""
        return self.roots[0] if self.roots else ""

    @property
    def seconds(self) -> float:
        return self.end - self.begin


class Operation:
    """A save, publication, restore or pull in progress. The code that performs it creates it and calls `end`."""

    def __init__(self, kind: Kind, roots: tuple[str, ...], spans: Spans, context: Context | None = None) -> None:
        """`spans` began with the operation. `context` defaults to a copy of the present context."""
        self.kind, self.roots = kind, _named(roots)
        self.spans, self._context = spans, copy_context() if context is None else context
        self.run = self.roots[0] if self.roots else ""  # empty for a one-off save to a path
        self._epoch = wall_time() - spans.clock()
        _under_way[id(self)] = self

    @property
    def seconds(self) -> float:
        """The duration so far."""
        return self.spans.total()

    def end(
        self,
        step: int | None,
        report: SaveReport | PullReport | None = None,
        error: BaseException | None = None,
        *,
        written_bytes: int | None = None,
    ) -> None:
        """Queue the operation for all listeners, as skipped if its report is. Returns at once.

        `written_bytes` are the bytes that this process wrote, if the report also counts those of other ranks.
        """
        _under_way.pop(id(self), None)
        if not _listening:
            return
        outcome: Outcome = "done" if error is None else "failed"
        if isinstance(report, SaveReport) and report.status == "skipped":
            outcome = "skipped"
        # The same duration as in the report, so that all sources agree.
        seconds = (isinstance(report, SaveReport) and report.total_seconds) or self.spans.total()
        ended = Ended(
            kind=self.kind,
            roots=self.roots,
            step=step,
            outcome=outcome,
            begin=self._epoch + self.spans.begin,
            end=self._epoch + self.spans.begin + seconds,
            phases=tuple(
                Interval(p.name, self._epoch + p.begin, self._epoch + p.end) for p in self.spans.phases.copy().values()
            ),
            report=report,
            num_bytes=(report.num_bytes if report is not None else 0) if written_bytes is None else written_bytes,
            error_type="" if error is None else type(error).__name__,
            error=_text_of(error),
            context=self._context,
        )
        for listening in _listening:
            listening.put(ended)


def notify(kind: Literal["train", "mark"], roots: tuple[str, ...], parts: Mapping[str, float]) -> None:
    """Queue the uses of a training's time so far, or a mark, for the listeners with `hears_all`. Returns at once."""
    named, now, context = _named(roots), wall_time(), copy_context()
    begin = now - sum(parts.values()) if kind == "train" else now
    for listening in (one for one in _listening if one.hears_all):
        listening.put(Ended(kind, named, None, "done", begin, now, (), None, 0, "", "", context, parts))


def _named(roots: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(root.rstrip("/") or "/" for root in roots)


def _text_of(error: BaseException | None) -> str:
    try:
        return "" if error is None else str(error)[:_MAX_ERROR_CHARACTERS]
    except Exception:  # raised by `__str__` of the user's exception class
        return ""


@contextmanager
def observed(kind: Kind, roots: tuple[str, ...]) -> Iterator[Operation]:
    """Observe a call as an operation. The block calls `end` itself; if it raises, the operation ends with the error."""
    operation = Operation(kind, roots, Spans())
    try:
        yield operation
    except BaseException as error:
        operation.end(None, error=error)
        raise


class Listening:
    """A listener and the thread that calls it, in the order in which operations end. `listen` creates it."""

    def __init__(self, listener: Callable[[Ended], None], *, hears_all: bool) -> None:
        self._listener, self.hears_all = listener, hears_all
        self._queue: queue.SimpleQueue[Ended | threading.Event | None] = queue.SimpleQueue()
        self._is_closed = False
        self._has_failed = self._has_dropped = False  # each is logged only once
        start_thread("listener", self._run, daemon=True)

    def put(self, ended: Ended) -> None:
        if self._queue.qsize() < _MAX_QUEUED:
            self._queue.put(ended)
        elif not self._has_dropped:
            self._has_dropped = True
            _log.error("%r does not return; further operations are dropped until it does", self)

    def flush(self, timeout: float) -> bool:
        """Wait until the listener was called with all operations ended so far. False after `timeout` seconds."""
        if self._is_closed:
            return True
        called = threading.Event()
        self._queue.put(called)
        return called.wait(timeout)

    def close(self) -> None:
        """Stop calling the listener with later operations. Returns at once. Idempotent."""
        global _listening
        self._is_closed = True
        with _changing:
            _listening = tuple(one for one in _listening if one is not self)
        self._queue.put(None)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            if isinstance(item, threading.Event):
                item.set()
                continue
            try:
                self._listener(item)
            except Exception:
                if not self._has_failed:
                    _log.exception("%r raised; saves are not affected, and its later errors are not logged", self)
                self._has_failed = True
            del item  # else its context would live until the next operation

    def __repr__(self) -> str:
        return f"<Listening {getattr(self._listener, '__qualname__', self._listener)}>"


_changing = threading.Lock()
_listening: tuple[Listening, ...] = ()  # replaced as a whole, under _changing; any thread reads it
_under_way: dict[int, Operation] = {}  # by id; each access is one method call, which is atomic


def listen(listener: Callable[[Ended], None], *, hears_all: bool = False) -> Listening:
    """Call `listener` with each operation that ends from now on, on a thread of its own.

        listening = listen(lambda ended: print(ended.kind, ended.step, ended.outcome, ended.seconds))

    With `hears_all`, it is also called with the kinds "train" and "mark", which are not operations with a beginning and
    an end. Only the listener's first error is logged. A forked child has no listeners.
    """
    global _listening
    listening = Listening(listener, hears_all=hears_all)
    with _changing:
        _listening = (*_listening, listening)
    return listening


def under_way() -> list[Operation]:
    """The operations that have not ended, oldest first."""
    return list(_under_way.copy().values())


def flush_all(timeout: float) -> None:
    """Wait, for at most `timeout` seconds, until all listeners were called with the operations that ended before."""
    deadline = TIMEKEEPER.now() + timeout
    for listening in _listening:
        listening.flush(max(0.0, deadline - TIMEKEEPER.now()))


@in_forked_child
def _forget() -> None:
    """In a forked child, drop the listeners, whose threads it lacks, and the parent's operations."""
    global _changing, _listening
    _changing, _listening = threading.Lock(), ()
    _under_way.clear()
