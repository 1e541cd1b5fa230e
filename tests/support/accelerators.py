"""The accelerator that a test runs on: the simulation under one of its schedules, or a CUDA device."""

from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Final

import cuda_simulation
import pytest
import simulated
import torch
from racing import until
from sim_streams import WORK_SECONDS

# Cycles that a stream is kept busy with, so that copies are enqueued behind real work: some 50 ms.
_BUSY_CYCLES = 100_000_000


WHY_NOT: Final = "this torch takes no accelerator that is written in Python"
of_simulation = pytest.mark.skipif(not simulated.is_possible(), reason=WHY_NOT)
"""For tests of which a child has the device."""


class Simulated:
    """Streams that run by a schedule; see `simulated`."""

    kind = "sim"

    def __init__(self, schedule: str | int) -> None:
        """Skips the test where torch takes no accelerator that is written in Python."""
        if not simulated.is_possible():
            pytest.skip(WHY_NOT)
        self.sim = simulated.install()
        self.sim.reset(schedule)
        self.module: Any = torch.get_device_module("sim")
        self.may_race = False

    def shortest_wait_seconds(self, num_bytes: int) -> float:
        """Less than a stream waits for any copy. Two events without a wait between them are `WORK_SECONDS` apart."""
        return 1.5 * WORK_SECONDS

    def busy(self, device: int = 0) -> None:
        """Keep the current stream busy until somebody waits for it."""
        self.sim.scheduler.run_kernel(self.module.current_stream(device).queue)

    def ahead(self) -> AbstractContextManager[None]:
        """What is enqueued inside is enqueued before any of it runs."""
        return self.sim.scheduler.ahead([self.module.current_stream(n).queue for n in range(2)])

    def let_it_come_to_a_stop(self, handle: Future[Any]) -> None:
        """Return when a save can go on no further without the device; or when it has ended."""
        until(lambda: handle.done() or self.sim.scheduler.num_waiting > 0)

    def stream(self, device: int = 0) -> Any:
        return self.sim.stream(device)

    @contextmanager
    def here(self) -> Iterator[None]:
        self.sim.is_here = True
        try:
            yield
        finally:
            self.sim.is_here = False

    def assert_in_order(self) -> None:
        assert self.sim.scheduler.failures == []
        assert self.may_race or self.sim.races == []


class Cuda:
    """The real one, or `torch.cuda` itself over a simulated runtime, which tells of what is out of order."""

    kind = "cuda"

    def __init__(self) -> None:
        self.module: Any = torch.cuda
        self.may_race = False

    def shortest_wait_seconds(self, num_bytes: int) -> float:
        """No bus moves a terabyte in a second. Two events without a wait between them are some microseconds apart."""
        return num_bytes / 1e12

    def busy(self, device: int = 0) -> None:
        with torch.cuda.device(device):
            torch.cuda._sleep(_BUSY_CYCLES)

    @contextmanager
    def ahead(self) -> Iterator[None]:
        """What is enqueued inside is enqueued before any of it runs."""
        if cuda_simulation.is_here():
            with cuda_simulation.held(*(torch.cuda.current_stream(n) for n in range(torch.cuda.device_count()))):
                yield
        else:
            self.busy()
            yield

    def stream(self, device: int = 0) -> Any:
        return torch.cuda.Stream(device)

    @contextmanager
    def here(self) -> Iterator[None]:
        yield

    def assert_in_order(self) -> None:
        """Streams of hardware tell nobody."""
        if cuda_simulation.is_here():
            reports = cuda_simulation.reports()
            assert self.may_race or not reports, "\n".join(reports)


Accelerator = Simulated | Cuda
