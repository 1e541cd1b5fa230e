"""The context of each part of the GPU benchmark: the device, the sizes, and the part's share of the time.

In: a setting. Out: a device that can be kept busy and waited for, saves of its tensors, rounds. Knows nothing of:
figures.

The device is used by torch's generic names, so that the parts run wherever the library has a backend.
"""

from __future__ import annotations

import gc
import itertools
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any, Final, NamedTuple

import torch

from async_ckpt import AsyncCheckpointer, SaveHandle, SaveReport
from async_ckpt.core import backends
from async_ckpt.core.host.limits import free_memory_bytes

from .setting import Setting

# The rate of the device's clock, which torch.cuda._sleep counts: about 2 GHz. It only affects the length of busy times.
_CYCLES_PER_SECOND: Final = 2e9


class CannotMeasureError(Exception):
    """The machine lacks what a row needs."""


class Found(NamedTuple):
    """The result of one row."""

    pairs: Sequence[tuple[float, float]]
    note: str = ""
    details: Mapping[str, Any] = {}


class Accelerator:
    """A kind of device, used by the names that `torch.cuda` has."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.module: Any = torch.get_device_module(kind)

    def require(self, name: str) -> Any:
        """An attribute of the device's module. Raises CannotMeasureError if it does not exist."""
        found = getattr(self.module, name, None)
        if found is None:
            raise CannotMeasureError(f"torch.{self.kind} has no {name}")
        return found

    def synchronize(self) -> None:
        self.module.synchronize()

    def stream(self) -> Any:
        """A new stream for the training."""
        return self.module.Stream()

    def busy(self, seconds: float) -> None:
        """Keep the current stream busy for about this time."""
        self.require("_sleep")(int(seconds * _CYCLES_PER_SECOND))

    def pinned(self, num_bytes: int) -> torch.Tensor:
        """Host memory from torch's own allocator, so that the limit does not depend on the library's pinning."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def free_bytes(self) -> int:
        return int(self.require("mem_get_info")()[0])

    def resize(self, tensor: torch.Tensor, num_bytes: int) -> None:
        tensor.untyped_storage().resize_(num_bytes)

    @contextmanager
    def operations(self) -> Iterator[dict[str, int]]:
        """Count the operations that all threads enqueue in the block, by name. The dict is filled at its end."""
        if self.kind != "cuda":
            raise CannotMeasureError("the profiler counts the calls of CUDA only")
        counts: dict[str, int] = {}
        activities = torch.profiler.ProfilerActivity
        with torch.profiler.profile(activities=[activities.CPU, activities.CUDA]) as profile:
            yield counts
        for event in profile.events() or ():
            if event.name.startswith(("cudaMemcpy", "cudaLaunch", "cuLaunch", "cudaEventRecord", "cudaStreamWait")):
                counts[event.name] = counts.get(event.name, 0) + 1
        if not counts:
            raise CannotMeasureError("the profiler has seen no calls of CUDA")

    def forget(self) -> None:
        """Free memory that has no references."""
        gc.collect()
        if hasattr(self.module, "empty_cache"):
            self.module.empty_cache()


def here() -> Accelerator | None:
    """The accelerator of this process, or None."""
    kind = backends.accelerator()
    return None if kind is None else Accelerator(kind)


@dataclass(frozen=True, slots=True)
class Bench:
    """The context that a part gets."""

    setting: Setting
    device: Accelerator
    ends_at: float
    """The deadline for beginning another round, by `perf_counter`."""

    def gib(self, number: float) -> int:
        """The bytes of `number` GiB; less at toy size."""
        return int(number * self.setting.gib_bytes)

    def rounds(self) -> Iterator[int]:
        """At least one round, and more if the longest round so far would fit in the remaining time."""
        longest = 0.0
        for number in range(self.setting.few_rounds):
            begin = perf_counter()
            if number and begin + longest > self.ends_at:
                return
            yield number
            longest = max(longest, perf_counter() - begin)

    def require_room(self, num_bytes: int) -> None:
        """Raise CannotMeasureError if a state of this size does not fit."""
        self.setting.folder.mkdir(parents=True, exist_ok=True)
        self.device.forget()
        if self.device.free_bytes() < 1.1 * num_bytes:
            raise CannotMeasureError("the device has too little memory")
        if free_memory_bytes() < 2.1 * num_bytes:  # the pool takes at most half of it
            raise CannotMeasureError("the host has too little memory")
        if shutil.disk_usage(self.setting.folder).free < 1.1 * num_bytes:
            raise CannotMeasureError("the disk has too little room")


@dataclass
class Saves:
    """Saves of one state. Each is deleted once it is durable, since the disk may not have room for two."""

    root: Path
    state: Any
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.checkpointer = AsyncCheckpointer(self.root, **self.options)
        latest = self.checkpointer.latest()
        self._steps = itertools.count(1 if latest is None else latest + 1)

    def __enter__(self) -> Saves:
        return self

    def __exit__(self, *error: object) -> None:
        self.checkpointer.close()

    def begin(self) -> SaveHandle:
        return self.checkpointer.save(self.state, next(self._steps))

    def end(self, handle: SaveHandle, *, delete: bool = True) -> SaveReport:
        report = handle.result()
        self.checkpointer.wait()
        if delete:
            shutil.rmtree(Path(report.path).parent)
        return report


def on_stream(device: Accelerator, stream: Any) -> AbstractContextManager[Any]:
    context: AbstractContextManager[Any] = device.module.stream(stream)
    return context
