"""One candidate in a new process: the cost of a save for the training, its duration, and whether it is correct.

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

# How many steps are timed on either side of each save: as many as slower saves overlap. Fewer steps would make the
# usual time of a step less certain.
_UNDISTURBED_STEPS: Final = 6
_SAMPLE_SECONDS: Final = 0.02
_NUM_IN_BURST: Final = 3
_NUM_ALONE: Final = 2
# The first of them also imports modules.
_NUM_COLD: Final = 3


def run(name: str, workload: str, num_bytes: int, folder: Path, setting: Setting, *, burst: bool) -> dict[str, Any]:
    """Run a trial in a new process. Returns the result of `Trial.measured`, or the reason why there is none.

    `burst` also measures saves that come faster than the disk.
    """
    settle = setting.settle_seconds if CANDIDATES[name].has_process else setting.settle_seconds / 4
    # A candidate that gets only a part of the state takes long, and its times vary little.
    num_later = setting.num_later if CANDIDATES[name].share == 1 else 1
    folder.mkdir(parents=True)
    try:
        return result_of(_measured, name, workload, num_bytes, folder, num_later, settle, burst)  # type: ignore[no-any-return]
    except NoAnswerError as error:
        return {"failed": str(error)[:300]}
    finally:
        shutil.rmtree(folder)


def lost_to_nothing(workload: str, num_bytes: int, folder: Path, setting: Setting) -> list[float]:
    """The seconds that a training seems to lose to no save at all, in a new process, measured like a save."""
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
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # some candidates share each tensor by a descriptor
    candidate = CANDIDATES[name]
    subject = WORKLOADS[workload](int(num_bytes * candidate.share))
    return Trial(candidate, subject, folder).measured(num_later, settle_seconds, burst=burst)


class Trial:
    """Save after save, with the previous ones deleted. One thread trains, and the other processors are free."""

    def __init__(self, candidate: type[Candidate], subject: Subject, folder: Path) -> None:
        import_module(candidate.package)  # its memory does not count as memory of a save
        self.subject = subject
        self._device = here()
        self.num_bytes = num_bytes_of(subject.state_dict())
        for _ in range(_UNDISTURBED_STEPS):  # until the training has allocated its memory
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
        self.while_training()  # the second save often differs: it allocates memory and files once more
        result["later"] = [self.while_training() for _ in range(num_later - 1)]
        wanted = _digest(self.subject.state_dict())
        result["later"].append(self.while_training())
        torch.set_num_threads(num_threads)  # without a training
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
        """Train without saves for some time."""
        end = perf_counter() + seconds
        while perf_counter() < end:
            self._undisturbed = [*self._undisturbed[1 - _UNDISTURBED_STEPS :], elapsed(self._step)]

    def while_training(self) -> dict[str, Any]:
        """Seconds that steps lose until a save is durable, and the seconds of its call and its waits."""
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
        """Seconds from the call until durable without a training, and processor seconds, including child processes."""
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
        """Wait until the save is durable, then delete the previous one, so that each save finds as much space."""
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
        if self._device is not None:  # otherwise, a step would end during the next one
            self._device.synchronize()

    @contextmanager
    def _pinned(self) -> Iterator[None]:
        """Keep this thread on one processor, so that each step finds the same caches.

        The threads of a candidate begin in its own calls, outside of this block, and may run anywhere.
        """
        os.sched_setaffinity(0, {max(self._processors)})
        try:
            yield
        finally:
            os.sched_setaffinity(0, self._processors)

    def _peak_bytes(self) -> int:
        """The peak of host memory during a save, beyond the memory before any save. Shared memory counts once."""
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
        """Saves one step apart, faster than any disk: seconds lost to each, and whether each has its own values."""
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
        """Seconds to restore into zeroed tensors."""
        live = self.subject.state_dict()
        for _, tensor in tensors_of(live):
            tensor.zero_()
        self.candidate.forget()
        into = self.subject.state if self.candidate.into_objects else live
        begin = perf_counter()
        self.candidate.restore(number, into)
        return perf_counter() - begin

    def _restored(self, number: int, wanted: str) -> dict[str, Any]:
        """Restores into zeroed tensors: seconds with a cold and a warm page cache, and whether the values are right."""
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
    """The digest of the bits and names of all tensors."""
    digest = xxhash.xxh3_128()
    for name, tensor in tensors_of(state):
        digest.update(name.encode())
        digest.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu().numpy().data)
    return digest.hexdigest()


def _trim() -> None:
    """Return freed memory to the system, so that it does not count for later measurements."""
    gc.collect()
    with suppress(AttributeError, OSError):  # only glibc has it
        ctypes.CDLL(None).malloc_trim(0)


def _tree() -> list[int]:
    """This process and all its descendants."""
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
    """Processor seconds of all processes, including those that have ended."""
    seconds = 0.0
    for pid in _tree():
        with _gone():
            seconds += processor_seconds(pid, with_children=True)
    return seconds


@contextmanager
def _gone() -> Iterator[None]:
    """Skip a process that has ended meanwhile."""
    try:
        yield
    except (FileNotFoundError, ProcessLookupError):
        pass
