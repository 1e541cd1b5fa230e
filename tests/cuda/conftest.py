"""Fixtures of the tests of CUDA devices. What hardware does not do when it is asked to needs the simulated CUDA runtime."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import cuda_simulation
import pytest
import torch
from children import Ended, Nursery
from cuda_simulation import ABOVE, BELOW


@pytest.fixture(autouse=True)
def _in_order() -> Iterator[None]:
    cuda_simulation.start_over()
    yield
    reports = cuda_simulation.reports()
    cuda_simulation.start_over()
    for device in range(torch.cuda.device_count()):
        torch.cuda.synchronize(device)  # memory of this test is lent to the next one, whose accesses are ordered behind
    assert not reports, "\n".join(reports)


@pytest.fixture
def two_devices() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two devices")


@pytest.fixture(scope="session")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    """What forks children that have not used a device yet; torch looks for devices by NVML, or they could use none."""
    with Nursery(tmp_path_factory.mktemp("children"), env={"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}) as nursery:
        yield nursery


@pytest.fixture
def apart(processes: Nursery, tmp_path: Path) -> Callable[..., Ended]:
    """Runs a script in a process of its own, which may break the device, and has to come to its end in order."""

    def run(script: str, *arguments: object, whole_exit: bool = False) -> Ended:
        if "cuda:1" in script and torch.cuda.device_count() < 2:
            pytest.skip("needs two devices")
        ended = processes.run(ABOVE + script + BELOW, tmp_path, *arguments, whole_exit=whole_exit)
        if cuda_simulation.NEEDED in ended.err:
            pytest.skip(cuda_simulation.NEEDED)
        assert "all is well" in ended.out, ended
        assert ended.status == 0, ended
        return ended

    return run
