"""Crews of plain threads, and the life of an object that threads share, as a table of its states.

In: callables, which report their own errors; the states that may follow each state. Out: the present state.
Knows nothing of: the work of tasks, the meaning of states.

Crews replace Python's executors, which refuse work once the interpreter has begun to exit, when the last checkpoint
must still be written. Their threads are not daemons, so that none dies in the middle of a write. An exit hook stops
them, after the hooks that were registered later (the worker's drain) have run.
"""

from __future__ import annotations

import ctypes
import os
import queue
import sys
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Final, Generic, TypeAlias, TypeVar

from ...errors import ClosedError
from .process import in_forked_child

S = TypeVar("S")

Task = Callable[[], None]
# A function that queues a task. If no thread can be started for it, it calls its second argument with the error.
Submit = Callable[[Task, Callable[[RuntimeError], None]], None]

_BACKGROUND_NICENESS: Final = 10
# ioprio_set(2), for which libc has no function: the number of the system call, its subject (a thread), and the idle
# class, which is served when no other class has requests, and by the scheduler mq-deadline within ten seconds.
_IOPRIO_SET: Final = {"x86_64": 251, "aarch64": 30}
_IOPRIO_WHO_PROCESS: Final = 1
_IOPRIO_IDLE: Final = 3 << 13
_IOPRIO_USUAL: Final = 0  # the priority follows from the nice value
# More threads than the last saves of a script have been seen to start.
_NUM_RESERVED: Final = 64

_crews: weakref.WeakSet[Crew] = weakref.WeakSet()


class LibraryThread(threading.Thread):
    """A thread of this library. It must not wait for a save: the save may need this very thread."""

    def run(self) -> None:
        if "torch" in sys.modules:  # commands that only look at a run do not import torch
            from ..backends import claim_thread

            claim_thread()
        super().run()


def start_thread(name: str, run: Task, *, daemon: bool = False) -> Running:
    """Run `run` on a new thread, or on an idle thread of the reserve. Raises RuntimeError if no thread can be started.

    The interpreter does not wait for a `daemon` when it exits.
    """
    name = f"async_ckpt-{name}"
    thread = LibraryThread(target=run, name=name, daemon=daemon)
    try:
        thread.start()
    except RuntimeError as error:
        reserved = _ReserveTask(name, run)
        if daemon or not _reserve.submit_if_idle(reserved.run):
            raise RuntimeError(
                f"async_ckpt needs another thread: {error}; if this process or its container is at the limit of "
                "threads (ulimit -u, pids.max), raise it or start fewer"
            ) from error
        return reserved
    return thread


class _ReserveTask:
    """A task on a thread of the reserve, with the methods of a thread that was started for it."""

    def __init__(self, name: str, run: Task) -> None:
        self._name, self._run = name, run
        self._ended = threading.Event()

    def run(self) -> None:
        threading.current_thread().name = self._name
        try:
            self._run()
        finally:
            self._ended.set()

    def is_alive(self) -> bool:
        return not self._ended.is_set()

    def join(self, timeout: float | None = None) -> None:
        self._ended.wait(timeout)


# The thread that `start_thread` started, or its task on a thread of the reserve.
Running: TypeAlias = threading.Thread | _ReserveTask


def is_library_thread() -> bool:
    """True on a thread of the library."""
    return isinstance(threading.current_thread(), LibraryThread)


class Crew:
    """Up to `max_threads` threads that take tasks in order. If none is idle, a new task starts a thread.

    With `background`, the threads run at low priority, so that they yield to the training. A crew belongs to the
    process that created it, and does nothing in a forked child.
    """

    def __init__(self, name: str, max_threads: int, *, background: bool = False) -> None:
        self.name = name
        self.max_threads = max_threads
        self._background = background
        # Each item is a list with one task; the list is emptied when the task is run or dropped. None ends one thread.
        self._tasks: queue.SimpleQueue[list[Task] | None] = queue.SimpleQueue()
        # Guards all fields below, and the order of the queue. Not held while a thread is started or a task is run.
        self._lock = threading.Lock()
        self._num_threads = 0
        self._num_ending = 0  # threads that were told to end, and have not yet taken the None from the queue
        self._num_stops = 0
        self._num_waiting = 0  # tasks that are queued or running
        self._is_over = False  # the interpreter is exiting
        self._yielding: list[int] = []  # native ids of the threads in the disk's idle class
        self._pid = os.getpid()
        _crews.add(self)

    def submit(self, task: Task, refused: Callable[[RuntimeError], None] | None = None) -> None:
        """Run `task` on a thread of the crew, after the tasks submitted before it have begun.

        If no thread can be started for it, because the system has none left or the interpreter is exiting, the task is
        dropped and `refused` is called with the error. Without `refused`, raises RuntimeError.
        """
        queued = [task]
        with self._lock:
            self._num_waiting += 1
            start = self._num_waiting > self._num_threads and self._num_threads < self.max_threads
            is_over, num_stops = self._is_over, self._num_stops
            if start:
                self._num_threads += 1
                number = self._num_threads
            self._tasks.put(queued)  # under the lock, so before the None of a later `stop`: the task still runs
        if start:
            try:
                if is_over:  # the exit hook has run, so nothing would stop the thread, and the interpreter would hang
                    raise RuntimeError("the interpreter is exiting")
                start_thread(f"{self.name}-{number}", self._run)
            except RuntimeError as error:
                with self._lock:
                    if self._num_stops == num_stops:
                        self._num_threads -= 1
                    else:
                        self._num_ending -= 1
                    if not queued:  # another thread has taken the task
                        return
                    queued.clear()
                    self._num_waiting -= 1
                if refused is None:
                    raise
                refused(error)

    def submit_if_idle(self, task: Task) -> bool:
        """Run `task` if a thread of the crew is idle; else return False."""
        with self._lock:
            is_idle = self._num_waiting < self._num_threads
            if is_idle:
                self._num_waiting += 1
                self._tasks.put([task])
            return is_idle

    def _run(self) -> None:
        with self._lock:
            if self._background:
                _give_way()
                self._yielding.append(threading.get_native_id())
        while True:
            queued = self._tasks.get()
            with self._lock:
                if queued is None and self._num_ending:
                    self._num_ending -= 1
                    break
                task = queued.pop() if queued else None
            if task is None:  # the task was refused
                continue
            try:
                task()
            except BaseException:
                # Tasks report their own errors. If one fails to, the thread must still live on.
                threading.excepthook(threading.ExceptHookArgs((*sys.exc_info(), threading.current_thread())))
            finally:
                with self._lock:
                    self._num_waiting -= 1
            del task  # else the task's objects would live until the next task
        with self._lock, suppress(ValueError):  # the kernel may reuse the id for another thread
            self._yielding.remove(threading.get_native_id())

    def run_all(self, tasks: Iterable[Task]) -> None:
        """Run tasks on the crew's threads, and block until all are done.

        After an error no further task begins, and the error is raised once the running tasks have ended.
        """
        todo = iter(tasks)
        lock = threading.Lock()
        errors: list[BaseException] = []
        workers_ended = threading.Semaphore(0)

        def work() -> None:
            try:
                while not errors:
                    with lock:
                        task = next(todo, None)
                    if task is None:
                        return
                    task()
            except BaseException as error:
                errors.append(error)
            finally:
                workers_ended.release()

        num_left = 0
        try:
            # Hold back all tasks until all threads have started: tasks that allocate memory delay the start of threads.
            with lock:
                for _ in range(self.max_threads):
                    self.submit(work)
                    num_left += 1
            while num_left:
                workers_ended.acquire()
                num_left -= 1
        except BaseException as error:
            # Ctrl-C, or no thread left: begin no further task, and wait for the running ones, which may use files that
            # the caller closes next.
            errors.append(error)
            for _ in range(num_left):
                workers_ended.acquire()
            raise
        if errors:
            raise errors[0]

    def hurry(self) -> None:
        """Give these threads normal disk priority from now on, because the user waits for them."""
        with self._lock:
            self._background = False
            yielding, self._yielding = self._yielding, []
        for thread in yielding:
            _set_io_class(thread, _IOPRIO_USUAL)

    def stop(self, *, for_good: bool = False) -> None:
        """Let the threads end once the tasks already submitted are done. Returns at once. Idempotent.

        Tasks submitted later start new threads, unless `for_good`.
        """
        if os.getpid() != self._pid:
            return
        with self._lock:
            num_threads, self._num_threads = self._num_threads, 0
            self._num_ending += num_threads
            self._num_stops += 1
            self._is_over = self._is_over or for_good
            for _ in range(num_threads):
                self._tasks.put(None)

    def __repr__(self) -> str:
        return f"<Crew {self.name}: {self._num_threads} threads, {self._num_waiting} tasks>"


# Threads that are started in advance, for the last saves under a Python that cannot start threads while it exits.
_reserve = Crew("reserve", _NUM_RESERVED)


def prepare_for_exit() -> None:
    """Start the threads that running saves may need while the interpreter exits.

    Python 3.12.0 and 3.12.1 refuse to start threads then, even in the hooks that run before the threads are joined.
    """
    if (3, 12, 0) <= sys.version_info < (3, 12, 2):
        with suppress(RuntimeError):  # the system has no threads left
            _reserve.run_all(())


@in_forked_child
def _forget() -> None:
    global _reserve
    _reserve = Crew("reserve", _NUM_RESERVED)


def run_together(name: str, tasks: Sequence[Task], *, max_threads: int) -> None:
    """Like `Crew.run_all`, on new threads for these tasks. A single task runs on the caller's thread."""
    if len(tasks) < 2:
        for task in tasks:
            task()
        return
    crew = Crew(name, min(max_threads, len(tasks)))
    try:
        crew.run_all(tasks)
    finally:
        crew.stop()


def give_way() -> None:
    """Lower the priority of this process: of the calling thread, and of threads that it starts from now on."""
    if sys.platform == "linux":
        _give_way()
    elif hasattr(os, "nice"):
        os.nice(_BACKGROUND_NICENESS)


def _give_way() -> None:
    """Lower the calling thread's priority for processor and disk. Only Linux has priorities of threads (sched(7)).

    The nice value alone affects disk requests only under the scheduler BFQ.
    """
    if sys.platform != "linux":
        return
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _BACKGROUND_NICENESS)
    _set_io_class(threading.get_native_id(), _IOPRIO_IDLE)


def _set_io_class(thread: int, priority: int) -> None:
    number = _IOPRIO_SET.get(os.uname().machine) if sys.platform == "linux" else None
    if number is not None:
        ctypes.CDLL(None).syscall(number, _IOPRIO_WHO_PROCESS, thread, priority)


def running_future() -> Future[Any]:
    """A future that cannot be cancelled."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    return future


def resolve(outcome: Future[S], fn: Callable[[], S]) -> None:
    """Make a call, and resolve the future with its outcome. Unlike asyncio's futures, it accepts StopIteration."""
    try:
        outcome.set_result(fn())
    except BaseException as error:
        outcome.set_exception(error)


def conclude(outcome: Future[None], error: BaseException | None) -> None:
    """Resolve a future without a value, or with the error if there is one."""
    if error is None:
        outcome.set_result(None)
    else:
        outcome.set_exception(error)


class Life(Generic[S]):
    """The present state of one object, initially the first state in the table. Guarded by the lock of its owner."""

    __slots__ = ("_successors", "now")

    def __init__(self, successors: Mapping[S, Collection[S]]) -> None:
        self._successors = successors
        self.now = next(iter(successors))

    def go(self, state: S) -> bool:
        """Change to `state` if it may follow the present state; else return False."""
        if state not in self._successors[self.now]:
            return False
        self.now = state
        return True


def _stop_all() -> None:
    for crew in list(_crews):
        crew.stop(for_good=True)


# Runs before the interpreter joins its non-daemon threads; atexit would be too late.
try:
    threading._register_atexit(_stop_all)  # type: ignore[attr-defined]
except RuntimeError as error:
    raise ClosedError("the interpreter is exiting; async_ckpt must be used for the first time before that") from error
