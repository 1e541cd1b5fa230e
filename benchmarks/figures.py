"""The figures of a machine without a GPU. Each compares the library with the limit of the machine itself.

In: a setting. Out: figures by name. Knows nothing of: how they are printed.

Between samples, `wait` lets retention end, since deleting a file of 2 GiB keeps a disk busy for a while.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from statistics import median
from time import perf_counter, process_time, thread_time
from typing import Any, Final, NamedTuple, Protocol

import torch

from async_ckpt import AsyncCheckpointer, Place, SaveHandle, SaveReport, save, wrap

from . import probe
from .compression import compression
from .limits import (
    MIB,
    NUM_COPIERS,
    NUM_CPUS,
    NUM_READERS,
    READ_BYTES,
    SEGMENT_BYTES,
    WarmMemory,
    drop_cache,
    seconds_of,
    torch_save_seconds,
    whole_pages,
)
from .setting import Setting, side_by_side
from .table import Figure, Target, above_noise, fixed
from .workloads import Training, small_tensors, tensors

# A generous bound for the index, padding and digests of an archive.
_OVERHEAD_BYTES: Final = 64 * MIB
_MEMORY_ROUNDS: Final = 2
# How many loops of pure Python are timed on either side of each save.
_NUM_COUNTS: Final = 500
_DATA_BYTES: Final = 256 * MIB
# How many calls are timed in each round, if they take milliseconds.
_CALLS: Final = 5
# How many steps are timed on either side of each save that overlaps steps.
_UNDISTURBED_STEPS: Final = 6


class Saves:
    """Repeated saves of one state, in a run that keeps the last one. Its pool is warm."""

    def __init__(self, root: Path | Place | list[Path | Place], state: Any, **options: Any) -> None:
        self.checkpointer = AsyncCheckpointer(root, keep=1, **options)
        self.checkpointer.prewarm(state)
        self._state = state
        self._steps = itertools.count(1)
        self.first_bytes = self.run().num_bytes

    def begin(self) -> SaveHandle:
        return self.checkpointer.save(self._state, next(self._steps))

    def end(self, handle: SaveHandle) -> SaveReport:
        report = handle.result()
        self.checkpointer.wait()
        return report

    def run(self) -> SaveReport:
        return self.end(self.begin())

    def durable_seconds(self) -> float:
        """Seconds from the call until the future resolves."""
        begin = perf_counter()
        handle = self.begin()
        handle.result()
        seconds = perf_counter() - begin
        self.checkpointer.wait()
        return seconds

    def arrival_seconds(self, place: Path | Place) -> float:
        """Seconds from the call until the step is at a further place."""
        begin = perf_counter()
        handle = self.begin()
        handle.at(place).result()
        seconds = perf_counter() - begin
        self.end(handle)
        return seconds

    def archive(self) -> Path:
        return next(Path(self.checkpointer.root).glob("step_*/*.tar"))


class Calls:
    """Repeated calls of a function that saves to a path and returns a handle. Its memory is warm."""

    def __init__(self, fn: Callable[[Any, Path], SaveHandle], state: Callable[[], Any], path: Path) -> None:
        self._fn, self._state, self._path = fn, state, path
        self.end(self.begin())

    def begin(self) -> SaveHandle:
        return self._fn(self._state(), self._path)

    def end(self, handle: SaveHandle) -> SaveReport:
        return handle.result()


class BareSaves:
    """The work that no save can avoid: the call copies the bytes, and threads write them in the background."""

    def __init__(self, path: Path, subject: Training) -> None:
        self._path = path
        states = subject.optimizer.state.values()
        self._tensors = [*subject.model.parameters(), *(item for state in states for item in state.values())]
        self._num_bytes = whole_pages(sum(tensor.nbytes for tensor in self._tensors))
        self._memory = WarmMemory(self._num_bytes, SEGMENT_BYTES)
        self._writer = ThreadPoolExecutor(1)

    def begin(self) -> Future[float]:
        self._memory.copy_seconds(self._tensors)
        return self._writer.submit(self._memory.write_seconds, self._path, self._num_bytes)

    def end(self, written: Future[float]) -> BareReport:
        return BareReport(written.result())


class BareReport(NamedTuple):
    """The report of a save by `BareSaves`."""

    total_seconds: float
    """The seconds of the writing alone."""


def costs_of(rounds: int, what: str, name: str, measured: Saves, limit: Saves, beside: str) -> dict[str, Figure]:
    """The costs of saves compared with other saves: seconds until durable, and seconds of all processors."""

    def cost(saves: Saves) -> tuple[float, float]:
        begin = process_time()
        return saves.run().total_seconds, process_time() - begin

    pairs = side_by_side(rounds, partial(cost, measured), partial(cost, limit))
    for saves in (measured, limit):
        saves.checkpointer.close()
    return {
        f"{name}_saves": Figure(f"{what}, call to durable", "s", beside, None, [(a[0], b[0]) for a, b in pairs]),
        f"{name}_saves_cpu": Figure(f"{what}, processor time", "s", beside, None, [(a[1], b[1]) for a, b in pairs]),
    }


def stall(setting: Setting) -> dict[str, Figure]:
    state = tensors(setting.state_bytes)
    warm = WarmMemory(setting.state_bytes, SEGMENT_BYTES)
    saves = Saves(setting.folder / "stall", {"model": state})
    with saves.checkpointer:
        pairs = side_by_side(
            setting.rounds,
            lambda: saves.run().stall_seconds * 1e3,
            lambda: warm.copy_seconds(list(state.values())) * 1e3,
        )
    figure = Figure("stall of save, CPU tensors", "ms", "memmove, same threads, warm memory", Target("≤", 1.25), pairs)
    return {"stall": figure}


def guarded_stall(setting: Setting) -> dict[str, Figure]:
    subject = Training(setting.state_bytes, batch=8)
    saves = Saves(setting.folder / "guarded", subject.state, guard=subject.optimizer)
    staging: list[float] = []

    def stall_milliseconds() -> float:
        handle = saves.begin()
        while not handle.staging_completion.done():  # like gradient accumulation over micro-batches
            subject.forward_backward()
        subject.optimizer.step()
        report = saves.end(handle)
        staging.append(report.stage_seconds * 1e3)
        return report.stall_seconds * 1e3

    with saves.checkpointer:
        stalls = [stall_milliseconds() for _ in range(setting.rounds)]
    title = "stall of save(guard=optimizer), its step included, when forward and backward outlast the copy"
    note = f"which takes {median(staging):.0f} ms meanwhile"
    return {"guarded_stall": fixed(title, "ms", stalls, 10.0, note)}


def guarded_call(setting: Setting) -> dict[str, Figure]:
    """Only the call of a guarded save: no step follows, and nothing else runs."""
    subject = Training(setting.compare_bytes, batch=1)
    saves = Saves(setting.folder / "call", subject.state, guard=subject.optimizer)
    with saves.checkpointer:
        stalls = [saves.run().stall_seconds * 1e3 for _ in range(_CALLS * setting.rounds)]
    few, many = setting.num_mebibytes
    parameters = [torch.nn.Parameter(torch.rand(MIB // 4)) for _ in range(many)]
    optimizer = torch.optim.SGD(parameters)
    each: list[float] = []
    fewer = Saves(setting.folder / "few", parameters[:few], guard=optimizer)
    more = Saves(setting.folder / "many", parameters, guard=optimizer)
    with fewer.checkpointer, more.checkpointer:
        for _ in range(_CALLS * setting.rounds):
            seconds = more.run().stall_seconds - fewer.run().stall_seconds
            each.append(seconds / (many - few) * 1e6)
    title = f"stall of save(guard=optimizer) of {setting.compare_bytes / 1e9:.2f} GB, no step"
    by_tensor = f"the same per tensor of 1 MiB ({many} beside {few})"
    return {
        "guarded_call": fixed(title, "ms", stalls, 2.0),
        "guarded_tensor": fixed(by_tensor, "µs", each, 12.0),
    }


def first_saves(setting: Setting) -> dict[str, Figure]:
    """First saves, in new processes whose pool of host memory is cold, without a training."""
    num_bytes = setting.first_bytes_here()
    told = [probe.first_saves(setting.folder, num_bytes) for _ in range(setting.few_rounds)]
    of, later = f"save of {num_bytes / 1e9:.2g} GB into a cold pool", "a later one"

    def figure(title: str, number: int, most: float, seconds: Callable[[SaveReport], float]) -> Figure:
        pairs = [(seconds(saves[number]), median(map(seconds, saves[2:]))) for saves in told]
        return Figure(title, "s", later, Target("≤", most), pairs)

    return {
        "first_total": figure(f"first {of}, call to durable", 0, 2.0, lambda report: report.total_seconds),
        "first_stall": figure("the same: stall", 0, 2.0, lambda report: report.stall_seconds),
        "second_total": figure("the second: call to durable", 1, 1.2, lambda report: report.total_seconds),
        "second_stall": figure("the same: stall", 1, 1.2, lambda report: report.stall_seconds),
    }


def durable_bandwidth(setting: Setting) -> dict[str, Figure]:
    """The bandwidth compared with the disk alone, and with all that a save needs: copy, digests and disk."""
    state = tensors(setting.state_bytes)
    saves = Saves(setting.folder / "durable", {"model": state})
    num_bytes = saves.run().num_bytes
    warm = WarmMemory(num_bytes, SEGMENT_BYTES)

    def beside(copied: Sequence[torch.Tensor]) -> list[tuple[float, float]]:
        return side_by_side(
            setting.rounds,
            lambda: num_bytes / saves.durable_seconds() / 1e9,
            lambda: num_bytes / warm.write_seconds(setting.folder / "raw", num_bytes, copied) / 1e9,
        )

    with saves.checkpointer:
        disk, all_of_it = beside(()), beside(list(state.values()))
    title, limit = "durable bandwidth, digests on", "O_DIRECT pwrite + fsync, same threads"
    return {
        "durable_bandwidth": Figure(title, "GB/s", limit, None, disk),
        "durable_limit": Figure("the same", "GB/s", f"memmove, digests, {limit}", Target("≥", 0.93), all_of_it),
    }


def bandwidth_limit(setting: Setting) -> dict[str, Figure]:
    """`max_bandwidth` at a quarter of the measured bandwidth of the disk."""
    state = tensors(setting.compare_bytes)
    folder = setting.folder / "bandwidth_limit"
    free = Saves(folder / "free", {"model": state})
    with free.checkpointer:
        reports = [free.run() for _ in range(setting.few_rounds)]
    allowed = median(report.bandwidth for report in reports) / 4
    held = Saves(folder / "held", {"model": state}, max_bandwidth=allowed)
    with held.checkpointer:
        pairs = [(held.run().bandwidth / 1e9, allowed / 1e9) for _ in range(setting.few_rounds)]
    title = "durable bandwidth under max_bandwidth"
    return {"bandwidth_limit": Figure(title, "GB/s", "max_bandwidth", Target("≤", 1.05), pairs)}


def reads_beside(setting: Setting) -> dict[str, Figure]:
    """The share of the disk that others get during a save, such as a loader of the training's data."""
    state = tensors(setting.state_bytes)
    saves = Saves(setting.folder / "beside", {"model": state})
    num_bytes = saves.run().num_bytes
    warm = WarmMemory(num_bytes, SEGMENT_BYTES)
    other = setting.folder / "data"
    warm.write(other, min(num_bytes, _DATA_BYTES))

    with saves.checkpointer:
        pairs = side_by_side(
            setting.few_rounds,
            lambda: _reads_per_second(other, saves.durable_seconds),
            lambda: _reads_per_second(other, lambda: warm.write_seconds(setting.folder / "raw", num_bytes)),
        )
    title = "reads of 1 MiB that another thread makes of the same disk beside a save"
    limit = "beside O_DIRECT pwrite + fsync at the usual priority"
    return {"reads_beside": Figure(title, "per s", limit, Target("≥", 1.0), pairs)}


def _reads_per_second(path: Path, write: Callable[[], float]) -> float:
    """Reads one after the other, during a call of `write`."""
    reader = WarmMemory(MIB, MIB)
    ended = threading.Event()
    counts: list[int] = []
    thread = threading.Thread(target=lambda: counts.append(reader.reads_until(ended, path)))
    thread.start()
    begin = perf_counter()
    try:
        write()
    finally:
        seconds = perf_counter() - begin
        ended.set()
        thread.join()
    return counts[0] / seconds


def products_beside(setting: Setting) -> dict[str, Figure]:
    """The share of the processors that others get during a save that compresses on all processors but one."""
    state = tensors(setting.compare_bytes)
    path = setting.folder / "beside.tar.zst"
    path.parent.mkdir(parents=True, exist_ok=True)
    data = torch.cat([tensor.flatten() for tensor in state.values()]).numpy().data.cast("B")
    pieces = [data[at : at + SEGMENT_BYTES] for at in range(0, len(data), SEGMENT_BYTES)]

    def compress() -> None:
        zstandard = import_module("zstandard")
        local = threading.local()

        def one(piece: memoryview) -> None:
            if not hasattr(local, "compressor"):
                local.compressor = zstandard.ZstdCompressor(level=3)
            local.compressor.compress(piece)

        seconds_of([partial(one, piece) for piece in pieces], NUM_COPIERS)

    pairs = side_by_side(
        setting.few_rounds,
        lambda: _products_per_second(lambda: save({"model": state}, path).result()),
        lambda: _products_per_second(compress),
    )
    title = "products of matrices per second, on every processor, beside a save that compresses"
    limit = "beside zstd of the same, as many threads as processors, at the usual priority"
    return {"products_beside": Figure(title, "", limit, Target("≥", 1.0), pairs)}


def _products_per_second(work: Callable[[], object]) -> float:
    """Products of matrices during a call of `work`, by as many threads as there are processors."""
    ended = threading.Event()
    counts: list[int] = []

    def multiply() -> None:
        torch.set_num_threads(1)
        matrix, count = torch.rand(256, 256), 0
        while not ended.is_set():
            matrix @ matrix
            count += 1
        counts.append(count)

    threads = [threading.Thread(target=multiply) for _ in range(NUM_CPUS)]
    for thread in threads:
        thread.start()
    begin = perf_counter()
    try:
        work()
    finally:
        seconds = perf_counter() - begin
        ended.set()
        for thread in threads:
            thread.join()
    return sum(counts) / seconds


def small(setting: Setting) -> dict[str, Figure]:
    state = small_tensors(setting.num_small)
    saves = Saves(setting.folder / "small", {"model": state})
    stalls: list[float] = []

    def save_seconds() -> float:
        begin = perf_counter()
        handle = saves.begin()
        stalls.append(perf_counter() - begin)
        handle.result()
        seconds = perf_counter() - begin
        saves.checkpointer.wait()
        return seconds

    with saves.checkpointer:
        pairs = side_by_side(
            setting.few_rounds,
            save_seconds,
            lambda: torch_save_seconds({"model": state}, setting.folder / "small.pt"),
        )
    count = f"{setting.num_small:,} tensors of 1 KiB"
    per_tensor = [seconds / setting.num_small * 1e6 for seconds in stalls]
    return {
        "small_stall": fixed(f"stall of save per tensor, {count}, plan known", "µs", per_tensor, 10.0),
        "small_save": Figure(f"whole save, {count}", "s", "torch.save + fsync", Target("≤", 1.0), pairs),
    }


def restore(setting: Setting) -> dict[str, Figure]:
    """The bandwidth compared with the disk alone, and with all that a restore needs: disk, digests and copy."""
    state = {"model": tensors(setting.state_bytes)}
    ring = WarmMemory(NUM_READERS * READ_BYTES, READ_BYTES)
    saves = Saves(setting.folder / "restore", state)
    archive = saves.archive()

    def bandwidth(read_seconds: Callable[[], float]) -> float:
        drop_cache(archive)
        return archive.stat().st_size / read_seconds() / 1e9

    def restore_seconds() -> float:
        begin = perf_counter()
        saves.checkpointer.restore(state)
        return perf_counter() - begin

    def beside(into: Sequence[torch.Tensor]) -> list[tuple[float, float]]:
        return side_by_side(
            setting.rounds,
            lambda: bandwidth(restore_seconds),
            lambda: bandwidth(lambda: ring.read_seconds(archive, into)),
        )

    with saves.checkpointer:
        disk, all_of_it = beside(()), beside([torch.empty_like(tensor) for tensor in state["model"].values()])
    title, limit = "restore in place, verified, cold cache", "O_DIRECT read, same threads"
    return {
        "restore": Figure(title, "GB/s", limit, None, disk),
        "restore_limit": Figure("the same", "GB/s", f"{limit}, digests, memmove", Target("≥", 0.93), all_of_it),
    }


def memory(setting: Setting) -> dict[str, Figure]:
    folder, budget = setting.folder / "memory", setting.budget_bytes

    def figure(title: str, state_bytes: int, host_bytes: int | None) -> Figure:
        allowed = host_bytes or state_bytes
        peaks = [
            probe.peak_bytes(folder, state_bytes, host_bytes) for _ in range(min(_MEMORY_ROUNDS, setting.few_rounds))
        ]
        limit = f"{allowed // MIB} + {_OVERHEAD_BYTES // MIB} MiB"
        pairs = [(peak / MIB, (allowed + _OVERHEAD_BYTES) / MIB) for peak in peaks]
        return Figure(title, "MiB", limit, Target("≤", 1.0), pairs)

    tight = f"the same under host_bytes={budget // MIB} MiB, of a state ten times that"
    return {
        "memory": figure("host memory of the first save, beyond the state", setting.state_bytes, None),
        "memory_budget": figure(tight, 10 * budget, budget),
    }


def import_time(setting: Setting) -> dict[str, Figure]:
    seconds, added = probe.imports(setting.few_rounds)
    title = "from async_ckpt import AsyncCheckpointer, after import torch"
    return {
        "import_time": fixed(title, "ms", [sample * 1e3 for sample in seconds], 60.0),
        "import_added": Figure(
            "optional packages that it imports",
            "",
            "fixed",
            Target("≤", 0.0),
            [(len(added), 1)],
            ", ".join(added),
        ),
    }


def training(setting: Setting) -> dict[str, Figure]:
    """One thread trains and one core is free. Steps that overlap a save are compared with steps that do not."""
    with one_thread():
        subject = Training(setting.training_bytes, batch=32)
        saves = Saves(setting.folder / "training", subject.state, guard=subject.optimizer)
        bare = BareSaves(setting.folder / "bare", subject)
        with saves.checkpointer:
            windows = side_by_side(setting.rounds, lambda: slowed(subject, saves), lambda: slowed(subject, bare))
    ours = [window for window, _ in windows]
    lost = above_noise((window.lost, other.lost) for window, other in windows)
    title, limit = "training seconds lost to one guarded save", "memmove in the call, then O_DIRECT pwrite + fsync"
    return {
        "training": Figure(title, "s", "seconds of the save", None, [(w.lost, w.save) for w in ours], _told(ours)),
        "training_limit": Figure("the same", "s", limit, Target("≤", 1.15), lost),
    }


def wrapped(setting: Setting) -> dict[str, Figure]:
    """Pickling in the background holds Python's lock for a part of its time; `save` pickles no tensor."""
    folder = setting.folder / "wrapped"
    folder.mkdir(parents=True)
    with one_thread():
        subject = Training(setting.compare_bytes, batch=32)
        by_pickle = Calls(wrap(torch.save, guard=subject.optimizer), subject.state_dict, folder / "x.pt")
        by_save = Calls(partial(save, guard=subject.optimizer), subject.state_dict, folder / "x.tar")
        rounds = range(setting.few_rounds)
        windows = [(slowed(subject, by_pickle), slowed(subject, by_save)) for _ in rounds]
        plain = [torch_save_seconds(subject.state_dict(), folder / "plain.pt") for _ in windows]
    pairs = [(ours.lost, seconds) for (ours, _), seconds in zip(windows, plain, strict=True)]
    other = median(archive.lost for _, archive in windows) * 1e3
    note = f"{_told([ours for ours, _ in windows])}; async_ckpt.save of the same loses {other:+.0f} ms"
    title = "training seconds lost to one guarded wrap(torch.save)"
    return {
        "wrapped": Figure(title, "s", "torch.save + fsync", None, pairs, note),
        "wrapped_python": _python_beside(setting, folder),
    }


def _python_beside(setting: Setting, folder: Path) -> Figure:
    """Pure Python, which needs the lock for every instruction, is slowed most, and most by small tensors."""
    count = setting.num_small // 100  # with 100,000 tensors that all wait for the lock, a save takes minutes
    state = small_tensors(count)
    by_pickle = Calls(wrap(torch.save), lambda: state, folder / "small.pt")
    by_save = Calls(save, lambda: state, folder / "small.tar")
    samples = [(_python_lost(by_pickle), _python_lost(by_save)) for _ in range(setting.few_rounds)]
    share = median(lost / seconds for _, (lost, seconds) in samples)
    title = f"seconds that a thread of pure Python loses beside wrap(torch.save), {count:,} tensors of 1 KiB"
    note = f"beside async_ckpt.save: {share:.0%} of its seconds"
    return Figure(title, "s", "seconds of the save", None, [ours for ours, _ in samples], note)


def _python_lost(saves: Calls) -> tuple[float, float]:
    """Seconds that a thread of pure Python loses during a save in the background, and the seconds of the save."""

    def count() -> None:
        for _ in range(20_000):
            pass

    usual = [clocked(count)[0] for _ in range(_NUM_COUNTS)]
    handle, begin, num_counts = saves.begin(), perf_counter(), 0
    while not handle.done():
        count()
        num_counts += 1
    seconds = perf_counter() - begin
    saves.end(handle)
    usual += [clocked(count)[0] for _ in range(_NUM_COUNTS)]
    return seconds - num_counts * median(usual), seconds


@contextmanager
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _told(windows: Sequence[Window]) -> str:
    lost, own, noise = (median(values) * 1e3 for values in zip(*(w[:3] for w in windows), strict=True))
    return (
        f"{lost:+.0f} ms, of which the training thread itself is busy {own:+.0f} ms; "
        f"as many steps without a save are off by {noise:.0f} ms"
    )


class Trains(Protocol):
    """A training that runs step by step."""

    def step(self) -> None: ...


class Window(NamedTuple):
    """One save, and the steps that overlap it, in seconds."""

    lost: float
    """The additional time of these steps over as many undisturbed steps."""
    own: float
    """The additional processor time of the training thread, which is lost even if another core is free."""
    noise: float
    """The time that as many steps seem to lose without a save."""
    save: float


def slowed(subject: Trains, saves: Any) -> Window:
    undisturbed = [clocked(subject.step) for _ in range(_UNDISTURBED_STEPS)]
    handles: list[Any] = []

    def saving_step() -> None:
        handles.append(saves.begin())
        subject.step()

    during = [clocked(saving_step)]
    while not handles[0].done():
        during.append(clocked(subject.step))
    report = saves.end(handles[0])
    undisturbed += [clocked(subject.step) for _ in range(_UNDISTURBED_STEPS)]
    usual_wall, usual_own = (median(values) for values in zip(*undisturbed, strict=True))
    others = undisturbed[-len(during) :]
    return Window(
        lost=sum(wall - usual_wall for wall, _ in during),
        own=sum(own - usual_own for _, own in during),
        noise=abs(sum(wall - usual_wall for wall, _ in others)),
        save=report.total_seconds,
    )


def clocked(action: Callable[[], None]) -> tuple[float, float]:
    """Seconds of an action, and seconds of this thread on a processor."""
    wall, own = perf_counter(), thread_time()
    action()
    return perf_counter() - wall, thread_time() - own


MEASURES: Final[dict[str, Callable[[Setting], dict[str, Figure]]]] = {
    "stall": stall,
    "guarded_stall": guarded_stall,
    "guarded_call": guarded_call,
    "first_saves": first_saves,
    "durable_bandwidth": durable_bandwidth,
    "small": small,
    "restore": restore,
    "memory": memory,
    "training": training,
    "wrapped": wrapped,
    "bandwidth_limit": bandwidth_limit,
    "reads_beside": reads_beside,
    "products_beside": products_beside,
    "compression": compression,
    "import_time": import_time,
}
