"""Crews of threads that are stopped while tasks come: every task runs."""

import queue
import threading
from typing import Any

import pytest
from racing import PATIENCE, until

from async_ckpt.core.host import threads
from async_ckpt.core.host.threads import Crew


class SlowQueue:
    """A queue into which something comes only after something else has happened."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.before_put = lambda: None

    def get(self) -> Any:
        return self._queue.get()

    def put(self, item: Any) -> None:
        if item is not None:
            self.before_put()
        self._queue.put(item)


@pytest.mark.parametrize("num_idle", [0, 1, 2])
def test_a_task_that_comes_while_the_crew_is_stopped_runs(monkeypatch, num_idle):
    crew, tasks, ran = Crew("ending", 4), SlowQueue(), threading.Event()
    crew._tasks = tasks  # type: ignore[assignment]
    gate = threading.Barrier(num_idle + 1)
    for _ in range(num_idle):
        crew.submit(lambda: gate.wait(PATIENCE) and None)
    gate.wait(PATIENCE)
    until(lambda: crew._num_waiting == 0)
    stopping = threading.Thread(target=crew.stop)

    def stop() -> None:
        """In another thread, as far as it gets before the task is in the queue."""
        stopping.start()
        stopping.join(0.2)

    tasks.before_put = stop
    crew.submit(ran.set)

    assert ran.wait(PATIENCE)
    stopping.join()
    crew.stop()
    until(lambda: not any(one.name.startswith("async_ckpt-ending") for one in threading.enumerate()))


def test_tasks_go_on_after_a_thread_that_could_not_be_started_at_the_moment_of_a_stop(monkeypatch):
    crew, ran, real = Crew("ending", 1), threading.Event(), threads.start_thread

    def none_left(*_: Any) -> None:
        crew.stop()
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threads, "start_thread", none_left)
    refused: list[RuntimeError] = []
    crew.submit(ran.set, refused.append)
    assert len(refused) == 1
    assert not ran.is_set()

    monkeypatch.setattr(threads, "start_thread", real)
    crew.submit(ran.set)
    assert ran.wait(PATIENCE)
    crew.stop()


def test_tasks_and_stops_of_many_threads_lose_none():
    crew, num_run, lock = Crew("ending", 3), 0, threading.Lock()

    def task() -> None:
        nonlocal num_run
        with lock:
            num_run += 1

    def work() -> None:
        for _ in range(500):
            crew.submit(task)
            crew.stop()

    workers = [threading.Thread(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    until(lambda: num_run == 2000)
    until(lambda: not any(one.name.startswith("async_ckpt-ending") for one in threading.enumerate()))
