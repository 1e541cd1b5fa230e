"""Weights whose every bit says of which version they are, for processes that lend versions and borrow them."""

import gc
import os
import signal
from pathlib import Path
from typing import Any

import torch

from async_ckpt.weights.publishing.in_memory.borrow import BorrowedVersion

SHAPES = {"embed": (300, 64), "up.weight": (64, 257), "up.bias": (257,), "head": (8, 3, 5)}


def weights(version: int) -> dict[str, torch.Tensor]:
    drawn = torch.Generator().manual_seed(version)
    return {name: torch.randn(shape, generator=drawn).bfloat16() for name, shape in SHAPES.items()}


class Copy(torch.nn.Module):
    """A module with such weights, all zeros at first."""

    def __init__(self) -> None:
        super().__init__()
        for name, shape in SHAPES.items():
            owner = self
            *inner, last = name.split(".")
            for part in inner:
                if part not in dict(owner.named_children()):
                    owner.add_module(part, torch.nn.Module())
                owner = owner.get_submodule(part)
            owner.register_buffer(last, torch.zeros(shape, dtype=torch.bfloat16))

    def is_version(self, version: int) -> bool:
        """Every bit of it."""
        held, wanted = self.state_dict(), weights(version)
        return all(torch.equal(held[name].view(torch.int16), wanted[name].view(torch.int16)) for name in wanted)


def stop_before_bytes_are_compared() -> None:
    """In a reader: have the process say "stopped" and stop, with a version borrowed, until it gets SIGCONT."""
    read = BorrowedVersion.read

    def stopped(self: BorrowedVersion, crew: Any) -> Any:
        print("stopped", flush=True)
        os.kill(os.getpid(), signal.SIGSTOP)
        return read(self, crew)

    BorrowedVersion.read = stopped  # type: ignore[method-assign]


def memory_of_others() -> dict[str, int]:
    """The shared memory that this process has descriptors of or maps, in bytes, and its number of descriptors."""
    gc.collect()
    mapped = {
        line.split()[4]: int(line.split()[0].split("-")[1], 16) - int(line.split()[0].split("-")[0], 16)
        for line in Path("/proc/self/maps").read_text().splitlines()
        if "memfd:async_ckpt" in line
    }
    return {"maps": len(mapped), "bytes": sum(mapped.values()), "fds": len(os.listdir("/proc/self/fd"))}
