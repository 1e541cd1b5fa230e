"""The figures of a run at several places: the cost of further places for a training, and restarts from memory.

In: a setting. Out: figures by name. Knows nothing of: how they are printed.

A further place is a folder on the same disk, or a store on loopback that stores its data; its server uses the same
processors. Processor time is that of all threads of a process: of this one while it only moves, and of `async-ckpt
move` from before the save until the step has arrived.
"""

from __future__ import annotations

import itertools
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any, Final

from async_ckpt import AsyncCheckpointer, Place, SaveHandle, SaveReport
from async_ckpt.core.saving.mover import Mover

from .figures import Saves, one_thread, slowed
from .limits import SEGMENT_BYTES, WarmMemory
from .processes import processor_seconds
from .ranks import world
from .setting import Setting, side_by_side
from .store_server import options_for, store_server
from .table import Figure, Target, above_noise, fixed
from .workloads import Training, tensors

PACKAGES: Final = ("obstore",)
_GB: Final = 1e9
# Common links: one that is slower than a disk, and one that is slower than the saves of a training.
_GIGABITS, _SLOW_GIGABITS = 10, 2
_SLOW_SYNC_SECONDS: Final = 3.0
_MOVE_SECONDS: Final = 0.5  # of processor time for a GB
_WARM: Final = 2  # moves that do not count
_EXIT_SECONDS: Final = 1.0  # for places that never respond
_NODES: Final = 2
_RAM: Final = Path("/dev/shm")


def until_committed(setting: Setting) -> dict[str, Figure]:
    """A disk with a store behind it: until a save is committed, and until it is at the store.

    The former is compared with the disk alone, and the latter with the store alone.
    """
    state = {"model": tensors(setting.served_bytes)}
    names = map(str, itertools.count())  # a new run for each

    def beside(alone: str, endpoint: str) -> list[tuple[float, float]]:
        name = next(names)
        disk, store = setting.folder / name, partial(_store, endpoint)
        one = Saves(store(f"{name}/one") if alone == "store" else disk / "one", state)
        far = store(f"{name}/two")
        two = Saves([disk / "two", far], state)
        with one.checkpointer, two.checkpointer:
            measured = two.durable_seconds if alone == "disk" else partial(two.arrival_seconds, far)
            return side_by_side(setting.rounds, measured, one.durable_seconds)

    with store_server(gigabits=_GIGABITS, keep=True) as slower, store_server(keep=True) as endpoint:
        committed, committed_link, arrived, arrived_link = (
            beside("disk", endpoint),
            beside("disk", slower),
            beside("store", endpoint),
            beside("store", slower),
        )
    near, far, link = "committed at a disk, a store behind it", "at the store behind a disk", f"{_GIGABITS} Gbit/s"
    return {
        "two_places": Figure(near, "s", "to the disk alone", Target("≤", 1.1), committed),
        "two_places_link": Figure(
            f"{near}, through {link}", "s", "to the disk alone", Target("≤", 1.1), committed_link
        ),
        "far_place": Figure(far, "s", "to the store alone", None, arrived),
        "far_place_link": Figure(f"{far}, through {link}", "s", "to the store alone", Target("≤", 1.15), arrived_link),
    }


def lost(setting: Setting) -> dict[str, Figure]:
    """Steps count until the last step is at the store. One thread trains.

    On two cores, the threads of the library have the other core. The store's server, which would be on another machine,
    only uses time that both leave.
    """
    with (
        one_thread(),
        store_server(keep=True, gives_way=True) as fast,
        store_server(gigabits=_SLOW_GIGABITS, keep=True, gives_way=True) as slow,
    ):
        subject = Training(setting.training_bytes // 4, batch=32)
        cases = {
            "lost_follows": ("which keeps up", fast, 1),
            "lost_lags": (f"of saves that come faster than {_SLOW_GIGABITS} Gbit/s", slow, 3),
        }
        rows = {}
        for name, (words, endpoint, num_saves) in cases.items():
            far = _store(endpoint, name)
            one = Saves(setting.folder / name / "one", subject.state, guard=subject.optimizer)
            two = Saves([setting.folder / name / "two", far], subject.state, guard=subject.optimizer)
            with one.checkpointer, two.checkpointer:
                windows = side_by_side(
                    setting.rounds,
                    lambda: slowed(subject, _Burst(two, num_saves, far)),  # noqa: B023
                    lambda: slowed(subject, _Burst(one, num_saves)),  # noqa: B023
                )
            pairs = above_noise([(ours.lost, other.lost) for ours, other in windows])
            noise = median(window.noise for pair in windows for window in pair)
            title = f"training seconds lost to {num_saves} guarded save{'s' * (num_saves > 1)} to a disk and a store, {words}"
            note = f"two cores; as many steps without a save are off by {noise * 1e3:.0f} ms"
            rows[name] = Figure(title, "s", "to the disk alone", Target("≤", 1.1), pairs, note)
    return rows


class _Burst:
    """Saves in a row, which end when the last one is at its farthest place. For `slowed`."""

    def __init__(self, saves: Saves, num_saves: int, far: Place | None = None) -> None:
        self._saves, self._num_left, self._far = saves, num_saves, far

    def begin(self) -> _Burst:
        self._handle = self._next()
        return self

    def _next(self) -> SaveHandle:
        self._num_left -= 1
        return self._saves.begin()

    def done(self) -> bool:
        """Called between two steps."""
        if self._num_left and self._handle.done():
            self._handle = self._next()
        return not self._num_left and self._arrived().done()

    def _arrived(self) -> Future[Any]:
        return self._handle if self._far is None else self._handle.at(self._far)

    def end(self, _: _Burst) -> SaveReport:
        return self._saves.end(self._handle)


def moves(setting: Setting) -> dict[str, Figure]:
    """The processor time of a move, by a thread of the training, and by another process.

    The first moves, which create clients, allocate memory and import modules, do not count.
    """
    state = {"model": tensors(setting.store_bytes)}
    gigabytes = setting.store_bytes / _GB
    rows = {}
    with store_server(keep=True) as endpoint:
        for name, far in {"disk": setting.folder / "far", "store": _store(endpoint, "far")}.items():
            for by, moved in (("thread", _moved_by_thread), ("process", _moved_by_process)):
                folder = setting.folder / name / by
                there = far / by if isinstance(far, Path) else _store(endpoint, f"far/{by}")
                samples = moved([folder, there], state, setting.few_rounds)
                title = f"processor time of a move from a disk to a {name}, by {_MOVERS[by]}"
                rates = [seconds / gigabytes for seconds in samples]
                rows[f"move_{name}_{by}"] = fixed(title, "s per GB", rates, _MOVE_SECONDS)
                shutil.rmtree(folder)
    return rows


_MOVERS: Final = {"thread": "the training's own thread", "process": "async-ckpt move"}


def _moved_by_thread(places: list[Path | Place], state: Any, rounds: int) -> list[float]:
    with _without_copies_in_the_pass():
        saves = Saves(places, state)
        with saves.checkpointer:
            return [_moved(saves, places[-1], process_time) for _ in range(rounds + _WARM)][_WARM:]


def _moved_by_process(places: list[Path | Place], state: Any, rounds: int) -> list[float]:
    saves = Saves(places, state)
    keys = {"AWS_ACCESS_KEY_ID": "anyone", "AWS_SECRET_ACCESS_KEY": "anything"}
    command = [sys.executable, "-m", "async_ckpt", "move", str(places[0])]
    with (
        saves.checkpointer,
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **keys}) as mover,
    ):
        assert mover.stdout is not None
        mover.stdout.readline()  # the first step has arrived, and the command runs
        try:
            clock = partial(processor_seconds, mover.pid)
            return [_moved(saves, places[-1], clock, after=False) for _ in range(rounds + _WARM)][_WARM:]
        finally:
            mover.terminate()


def _moved(saves: Saves, far: Path | Place, clock: Callable[[], float], *, after: bool = True) -> float:
    """The time on a clock from a commit, or from the call before it, to the arrival of the step at a further place."""
    begin = clock()
    handle = saves.begin()
    handle.result()
    if after:
        begin = clock()
    handle.at(far).result()
    seconds = clock() - begin
    saves.end(handle)
    return seconds


@contextmanager
def _without_copies_in_the_pass() -> Iterator[None]:
    """Move steps that would otherwise be copied while they are saved."""
    real = Mover.may_follow
    Mover.may_follow = lambda *_: False  # type: ignore[method-assign]
    try:
        yield
    finally:
        Mover.may_follow = real  # type: ignore[method-assign]


def never_waits(setting: Setting) -> dict[str, Figure]:
    """A save is committed at the disk as fast as without a further place, whatever happens to that place."""
    state = {"model": tensors(setting.served_bytes)}
    rows = {}
    cases: Mapping[str, tuple[str, Callable[[Path], Any]]] = {
        "far_slow": (f"whose fsync takes {_SLOW_SYNC_SECONDS:g} s", _slow_to_sync),
        "far_hangs": ("that accepts requests and answers none", lambda _: _unanswering()),
        "far_away": ("that refuses connections", lambda _: _refusing()),
    }
    for name, (words, opened) in cases.items():
        with opened(setting.folder / name / "far") as far:
            one = Saves(setting.folder / name / "one", state)
            two = Saves([setting.folder / name / "two", far], state, exit_timeout=_EXIT_SECONDS)
            with one.checkpointer:
                pairs = side_by_side(2 * setting.rounds, partial(_held, two), partial(_held, one))
        stalls = (median(pair[number][0] for pair in pairs) * 1e3 for number in (0, 1))
        note = "stall {:.1f} ms beside {:.1f} ms".format(*stalls)
        durable = [(both[1], alone[1]) for both, alone in pairs]
        title = f"committed at a disk, a place behind it {words}"
        rows[name] = Figure(title, "s", "to the disk alone", Target("≤", 1.1), durable, note)
    return rows


def _held(saves: Saves) -> tuple[float, float]:
    """The seconds of the call, and the seconds until the save is committed."""
    begin = perf_counter()
    handle = saves.begin()
    call = perf_counter() - begin
    handle.result()
    return call, perf_counter() - begin


@contextmanager
def _slow_to_sync(folder: Path) -> Iterator[Path]:
    """A folder in which each fsync takes three seconds, like an overloaded disk."""
    real, never = os.fsync, threading.Event()

    def fsync(fd: int) -> None:
        real(fd)
        if os.readlink(f"/proc/self/fd/{fd}").startswith(str(folder)):
            never.wait(_SLOW_SYNC_SECONDS)

    os.fsync = fsync  # type: ignore[assignment]
    try:
        yield folder
    finally:
        os.fsync = real


@contextmanager
def _unanswering() -> Iterator[Place]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield _store(f"http://127.0.0.1:{server.getsockname()[1]}", "run")


@contextmanager
def _refusing() -> Iterator[Place]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    yield _store(f"http://127.0.0.1:{port}", "run")


def restarts(setting: Setting) -> dict[str, Figure]:
    """Restores from memory in front of a disk, on each rank into touched tensors. The first one does not count."""
    if not _RAM.is_dir():
        return {}
    with ExitStack() as stack:
        ram = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-", dir=_RAM)))
        state = {"model": tensors(setting.served_bytes)}
        memory = WarmMemory(setting.served_bytes, SEGMENT_BYTES)
        places: list[Path | Place] = [ram / "one", setting.folder / "one"]
        Saves(places, state).checkpointer.close()

        def restart() -> float:
            with AsyncCheckpointer(places) as ckpt:
                begin = perf_counter()
                ckpt.restore(state)
                return perf_counter() - begin

        restart()
        copied = partial(memory.copy_seconds, [*state["model"].values()], back=True)
        alone = side_by_side(2 * setting.rounds, restart, partial(copied, num_threads=1))
        by_all = side_by_side(setting.rounds, restart, copied)
        size = 2 * _NODES
        folder = setting.folder / "ranks"
        ranks = stack.enter_context(world(size, folder, setting.served_bytes, "tier_rank", str(ram), str(_NODES)))
        for command in ("save", "restart", "copy"):
            ranks.save(command)
        together = side_by_side(2 * setting.rounds, lambda: ranks.save("restart")[1], lambda: ranks.save("copy")[1])
    title, limit = "restore from memory in front of a disk", "memmove of the tensors"
    of = f"{title}, {size} ranks on {_NODES} simulated nodes"
    return {
        "restart": Figure(f"{title}, one process", "s", f"{limit}, one thread", Target("≤", 1.3), alone),
        "restart_threads": Figure("the same", "s", f"{limit}, as many threads as cores", None, by_all),
        "restart_ranks": Figure(of, "s", f"{limit}, on all ranks at once", Target("≤", 1.3), together),
    }


def _store(endpoint: str, path: str) -> Place:
    return Place(f"s3://bucket/{path}", options=options_for(endpoint))


MEASURES: Final[dict[str, Callable[[Setting], dict[str, Figure]]]] = {
    "until_committed": until_committed,
    "lost": lost,
    "moves": moves,
    "never_waits": never_waits,
    "restarts": restarts,
}
