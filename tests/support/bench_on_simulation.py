"""`python tests/support/bench_on_simulation.py gpu --quick`: the GPU benchmark on the simulated device, as if nothing but
torch and xxhash were installed. It shows that every part runs; its values say nothing.
"""

import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import accelerators
import torch
from torch.utils._python_dispatch import TorchDispatchMode

_MISSING = (
    "obstore", "s3fs", "fsspec", "botocore", "tenacity", "zstandard", "safetensors", "torch_checkpointing", "pytorch_lightning",
    "nvidia_resiliency_ext", "tqdm", "rich", "matplotlib",
)  # fmt: skip
sys.modules.update(dict.fromkeys(_MISSING))

from benchmarks import __main__, gpu_bench  # noqa: E402


class SimulatedAccelerator(gpu_bench.Accelerator):
    """The simulated device, in the words of the benchmark."""

    def __init__(self, simulated: accelerators.Simulated) -> None:
        super().__init__("sim")
        self._simulated, self._sim = simulated, simulated.sim

    def stream(self) -> Any:
        return self._simulated.stream()

    def busy(self, seconds: float) -> None:
        self._simulated.busy()

    def pinned(self, num_bytes: int) -> torch.Tensor:
        memory = torch.empty(num_bytes, dtype=torch.uint8)
        self.module.simrt().simHostRegister(memory.data_ptr(), num_bytes)
        weakref.finalize(memory.untyped_storage(), self._sim.registered.pop, memory.data_ptr())
        return memory

    def free_bytes(self) -> int:
        return 1 << 30

    def resize(self, tensor: torch.Tensor, num_bytes: int) -> None:
        self._sim.resize(tensor, num_bytes)

    @contextmanager
    def operations(self) -> Iterator[dict[str, int]]:
        counts: dict[str, int] = {}
        before = self._sim.scheduler.num_operations
        yield counts
        counts["operations"] = self._sim.scheduler.num_operations - before


class Graph:
    """What stands for a CUDA graph: operations in place, each done again when it is replayed."""

    def __init__(self) -> None:
        self.operations: list[tuple[Any, Any, Any]] = []

    def replay(self) -> None:
        with torch.no_grad():
            for operation, args, kwargs in self.operations:
                operation(*args, **kwargs)


class _Capture(TorchDispatchMode):
    """Nothing is done meanwhile, as in a capture."""

    def __init__(self, graph: Graph, capture_error_mode: str) -> None:
        super().__init__()
        assert capture_error_mode in ("global", "thread_local")
        self._operations = graph.operations

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.overloadpacket.__name__.endswith("_"), f"{func} is not in place"
        self._operations.append((func, args, kwargs or {}))
        return args[0]


def main() -> None:
    simulated = accelerators.Simulated("late")  # registered before torch's autograd engine starts
    device = SimulatedAccelerator(simulated)
    gpu_bench.here = lambda: device
    device.module.CUDAGraph, device.module.graph = Graph, _Capture
    with simulated.here():
        __main__.main()


if __name__ == "__main__":
    main()
