"""checkpoint-engine's ParameterServer and its worker's loop without a GPU: gloo, and memory that processes share by files.

Three things of a device are replaced: its manager, pinned memory, and the handle of a buffer. All else is the package's.
"""

from __future__ import annotations

import os
import warnings
from types import SimpleNamespace
from typing import Any

import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # those of its own imports
    import zmq
    from checkpoint_engine import ParameterServer, pin_memory, ps, worker
    from loguru import logger

logger.remove()  # a line for each bucket
FREE_BYTES = 6 << 20


class _Memory:
    """What is asked of `torch.cuda`."""

    @staticmethod
    def device_count() -> int:
        return 2

    @staticmethod
    def mem_get_info() -> tuple[int, int]:
        return FREE_BYTES, FREE_BYTES

    @staticmethod
    def get_device_properties(index: int | None) -> Any:
        return SimpleNamespace(uuid=f"{os.environ.get('SERVER_NAME', os.getpid())}-{index}")

    def __getattr__(self, name: str) -> Any:
        return lambda *_: 0  # synchronize, empty_cache, ipc_collect, set_device, memory_allocated


class OnHost:
    """In place of the DeviceManager."""

    device_type, backend = "cpu", "gloo"

    def __init__(self) -> None:
        self.device_module = _Memory()


class _TorchWithoutPins:
    """torch, without pinned memory."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def empty(*size: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        return torch.empty(*size, **options)


def _rebuild(manager: bytes, handle: bytes, num_bytes: int, *_: object) -> torch.Tensor:
    storage = torch.UntypedStorage._new_shared_filename_cpu(manager, handle, num_bytes)
    return torch.empty(0, dtype=torch.uint8).set_(storage)


def _shared(buffer: torch.Tensor) -> tuple[Any, tuple[Any, ...]]:
    """A handle that any process of this host can open, with a place for the number of a device, as CUDA's has."""
    manager, handle, num_bytes = buffer.untyped_storage()._share_filename_cpu_()
    return _rebuild, (manager, handle, num_bytes, None, None, None, 0)


ps.DeviceManager = worker.DeviceManager = OnHost
ps.P2PStore = _no_p2p = type("NoStore", (), {"__init__": lambda *_: (_ for _ in ()).throw(ImportError("no RDMA"))})
ps.reduce_tensor, ps.get_ip = _shared, lambda: "127.0.0.1"
pin_memory.torch = _TorchWithoutPins()


def server_of(rank: int, world_size: int, port: int) -> ParameterServer:
    os.environ["RANK"] = str(rank)
    return ParameterServer(
        rank=rank, world_size=world_size, gpu_count=world_size, master_addr="127.0.0.1", master_port=port
    )


def receive(path: str, load: Any) -> None:
    """What a worker of an engine does for one update, by checkpoint-engine's own loop."""
    context = zmq.Context()
    try:
        worker.update_weights_from_ipc(context, path, 0, run=load)
    finally:
        context.destroy(linger=0)
