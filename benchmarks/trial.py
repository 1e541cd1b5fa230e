"""One candidate in a process of its own: what a save costs the training, how long it takes, and whether it is true.

In: a candidate, a workload, a folder. Out: numbers. Knows nothing of: other candidates, tables.
"""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, Final

import torch
import xxhash

from .apart import NoAnswerError, result_of
from .candidates import CANDIDATES, Candidate, NoSave, num_bytes_of, tensors_of
from .gpu_bench import here
from .limits import drop_cache, files_of, fill_cache, sync
from .processes import processor_seconds, status_bytes
from .setting import Setting, elapsed
from .workloads import WORKLOADS, State, Subject

# On either side of each save, as many as the slower saves overlap: a step's usual time is no better known by fewer.
_UNDISTURBED_STEPS: Final = 6
_SAMPLE_SECONDS: Final = 0.02
_NUM_IN_BURST: Final = 3
_NUM_ALONE: Final = 2
# Of which the first also imports modules.
_NUM_COLD: Final = 3


def run(name: str, workload: str, num_bytes: int, folder: Path, setting: Setting, *, burst: bool) -> dict[str, Any]:
    """In a process of its own, with processes of its own: what `Trial.measured` says, or why it says nothing.

    With `burst`, also of saves that come faster than the disk.
    """
    settle = setting.settle_seconds if CANDIDATES[name].has_process else setting.settle_seconds / 4
    # What is given a sample takes long, and always as long.
    num_later = setting.num_later if CANDIDATES[name].share == 1 else 1
    folder.mkdir(parents=True)
    try:
        return result_of(_measured, name, workload, num_bytes, folder, num_later, settle, burst)  # type: ignore[no-any-return]
    except NoAnswerError as error:
        return {"failed": str(error)[:300]}
    finally:
        shutil.rmtree(folder)


def lost_to_nothing(workload: str, num_bytes: int, folder: Path, setting: Setting) -> list[float]:
    """The seconds that a training seems to lose to no save at all, in a process of its own; measured like any save."""
    return result_of(_nothing, workload, num_bytes, folder, setting)  # type: ignore[no-any-return]


def _nothing(workload: str, num_bytes: int, folder: Path, setting: Setting) -> list[float]:
    trial = Trial(NoSave, WORKLOADS[workload](num_bytes), folder)
    torch.set_num_threads(1)
    trial.settle(setting.settle_seconds / 4)
    return [trial.while_training()["lost"] for _ in range(setting.num_later + 2)][2:]


def _measured(
    name: str, workload: str, num_bytes: int, folder: Path, num_later: int, settle_seconds: float, burst: bool
) -> dict[str, Any]:
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # some share each tensor by a descriptor
    candidate = CANDIDATES[name]
    subject = WORKLOADS[workload](int(num_bytes * candidate.share))
    return Trial(candidate, subject, folder).measured(num_later, settle_seconds, burst=burst)


class Trial:
    """One thread trains, and the other processors are free; save after save, each with the ones before deleted."""

    def __init__(self, candidate: type[Candidate], subject: Subject, folder: Path) -> None:
        import_module(candidate.package)  # what it takes is no memory of a save
        self.subject = subject
        self._device = here()
        self.num_bytes = num_bytes_of(subject.state_dict())
        for _ in range(_UNDISTURBED_STEPS):  # until memory is what training takes
            subject.forward_backward()
            subject.optimizer_step()
        _trim()
        self._before = _held_bytes()
        self.candidate = candidate(folder, subject)
        self.number = 0
        self._undisturbed: list[float] = []  # seconds of the steps since the last save
        self._processors = os.sched_getaffinity(0)

    def measured(self, num_later: int, settle_seconds: float, *, burst: bool) -> dict[str, Any]:
        num_threads = torch.get_num_threads()
        torch.set_num_threads(1)
        prewarm = elapsed(self.candidate.prewarm)
        self.settle(settle_seconds)
        result: dict[str, Any] = {"num_bytes": self.num_bytes, "prewarm": prewarm}
        result["first"] = self.while_training()
        self.while_training()  # the second is often unlike all others: memory and files are taken up once more
        result["later"] = [self.while_training() for _ in range(num_later - 1)]
        wanted = _digest(self.subject.state_dict())
        result["later"].append(self.while_training())
        torch.set_num_threads(num_threads)  # nothing trains meanwhile
        looked_at = self.number
        result["alone"] = [self._alone() for _ in range(_NUM_ALONE)]
        result |= self._restored(looked_at, wanted)
        self.candidate.delete(looked_at)
        result["peak_bytes"] = self._peak_bytes()
        if burst and not self.candidate.synchronous:
            torch.set_num_threads(1)
            result["burst"] = self._burst()
            result["same"] &= result["burst"]["same"]
        self.candidate.close()
        return result

    def settle(self, seconds: float) -> None:
        """Train alone for so long."""
        end = perf_counter() + seconds
        while perf_counter() < end:
            self._undisturbed = [*self._undisturbed[1 - _UNDISTURBED_STEPS :], elapsed(self._step)]

    def while_training(self) -> dict[str, Any]:
        """Seconds that steps take longer than others do, until a save is durable; and what the call and its waits took."""
        before = self._undisturbed
        begin = perf_counter()
        self._save()
        call = perf_counter() - begin
        held: list[float] = []
        during = [call + elapsed(lambda: self._step(held))]
        while not self.candidate.done():
            during.append(elapsed(lambda: self._step(held)))
        if not self.candidate.durable:
            syncing = threading.Thread(target=self._sync)
            syncing.start()
            while syncing.is_alive():
                during.append(elapsed(lambda: self._step(held)))
        total = call if self.candidate.synchronous else perf_counter() - begin
        self._finish()
        self._undisturbed = [elapsed(self._step) for _ in range(_UNDISTURBED_STEPS)]
        usual = median(before + self._undisturbed)
        return {
            "lost": sum(seconds - usual for seconds in during),
            "stall": max(call + sum(held), self.candidate.stall_seconds),
            "total": total,
            "step": usual,
            "steps": during,
        }

    def _alone(self) -> dict[str, float]:
        """From the call to durable, with nothing else to do; and processor seconds, of child processes too."""
        processor, begin = _processor_seconds(), perf_counter()
        self._save()
        self._wait()
        seconds, processor = perf_counter() - begin, _processor_seconds() - processor
        self.candidate.delete(self.number)
        return {"durable": seconds, "processor": processor}

    def _save(self) -> None:
        self.number += 1
        self.candidate.save(self.number)

    def _finish(self) -> None:
        """Until it is durable; then the one before is deleted, so that each finds as much room."""
        self._wait()
        self.candidate.delete(self.number - 1)

    def _wait(self) -> None:
        self.candidate.wait()
        if not self.candidate.durable:
            self._sync()

    def _sync(self) -> None:
        sync(self.candidate.path(self.number))

    def _step(self, held: list[float] | None = None) -> None:
        with self._pinned():
            self.subject.forward_backward()
        begin = perf_counter()
        with self.candidate.stepping():
            if held is not None:
                held.append(perf_counter() - begin)
            with self._pinned():
                self.subject.optimizer_step()
        if self._device is not None:  # else a step would end in the time of another
            self._device.synchronize()

    @contextmanager
    def _pinned(self) -> Iterator[None]:
        """Keep this thread on one processor, so that each step finds the same caches. The threads of a candidate begin in
        its own calls, outside of this, and may run anywhere.
        """
        os.sched_setaffinity(0, {max(self._processors)})
        try:
            yield
        finally:
            os.sched_setaffinity(0, self._processors)

    def _peak_bytes(self) -> int:
        """Of host memory in use during a save, beyond what was there before any; shared memory counts once."""
        _trim()
        ended, peak = threading.Event(), [0]

        def sample() -> None:
            while not ended.wait(_SAMPLE_SECONDS):
                peak[0] = max(peak[0], _held_bytes())

        sampler = threading.Thread(target=sample)
        sampler.start()
        try:
            self._save()
            self._finish()
        finally:
            ended.set()
            sampler.join()
        return peak[0] - self._before

    def _burst(self) -> dict[str, Any]:
        """Saves one step apart, faster than any disk: seconds lost to each; and whether each is of its own moment."""
        before, first, lost, states = self.number, self.number + 1, 0.0, []
        usual = median(elapsed(self._step) for _ in range(_UNDISTURBED_STEPS))
        for _ in range(_NUM_IN_BURST):
            states.append({name: tensor.clone() for name, tensor in tensors_of(self.subject.state_dict())})
            lost += elapsed(self._save)
            lost += elapsed(self._step) - usual
        self.candidate.wait()
        same = True
        for number, state in enumerate(states, first):
            self.bring_back(number)
            same &= _digest(self.subject.state_dict()) == _digest(state)
        self._finish()
        for number in range(before, self.number):
            self.candidate.delete(number)
        return {"lost": lost / _NUM_IN_BURST, "same": same}

    def bring_back(self, number: int) -> float:
        """Seconds, into tensors that were zeroed before."""
        live = self.subject.state_dict()
        for _, tensor in tensors_of(live):
            tensor.zero_()
        self.candidate.forget()
        into = self.subject.state if self.candidate.into_objects else live
        begin = perf_counter()
        self.candidate.restore(number, into)
        return perf_counter() - begin

    def _restored(self, number: int, wanted: str) -> dict[str, Any]:
        """A save, into zeroed tensors: seconds with no page of its files in the cache, and with all; and whether it is
        what was to be saved.
        """
        path = self.candidate.path(number)
        files, cold = files_of(path), []
        for _ in range(_NUM_COLD):
            for file in files:
                drop_cache(file)
            cold.append(self.bring_back(number))
        for file in files:
            fill_cache(file)
        warm = self.bring_back(number)
        same = _digest(self.subject.state_dict()) == wanted
        disk_bytes = sum(file.stat().st_blocks * 512 for file in files)
        return {"restore_cold": cold, "restore_warm": warm, "same": same, "disk_bytes": disk_bytes}


def _digest(state: State) -> str:
    """Of the bits of every tensor, under its name."""
    digest = xxhash.xxh3_128()
    for name, tensor in tensors_of(state):
        digest.update(name.encode())
        digest.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu().numpy().data)
    return digest.hexdigest()


def _trim() -> None:
    """Give back what was freed: it is no memory of what comes next."""
    gc.collect()
    with suppress(AttributeError, OSError):  # glibc alone has it
        ctypes.CDLL(None).malloc_trim(0)


def _tree() -> list[int]:
    """This process and those that it started, and they."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with _gone():
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    found = [os.getpid()]
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid]
    return found


def _held_bytes() -> int:
    """Private memory of all processes, and shared memory once."""
    private, shared = 0, 0
    for pid in _tree():
        with _gone():
            private += status_bytes("RssAnon", pid)
            shared = max(shared, status_bytes("RssShmem", pid))
    return private + shared


def _processor_seconds() -> float:
    """Of all processes, those that have ended included."""
    seconds = 0.0
    for pid in _tree():
        with _gone():
            seconds += processor_seconds(pid, with_children=True)
    return seconds


@contextmanager
def _gone() -> Iterator[None]:
    """A process that has ended meanwhile is left out."""
    try:
        yield
    except (FileNotFoundError, ProcessLookupError):
        pass
