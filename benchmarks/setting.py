"""Sizes and numbers of rounds: the real ones, and toy ones that only show that everything runs.

In: the command line. Out: one frozen value that every figure gets. Knows nothing of: figures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, Final, TypeVar

from async_ckpt.core.host.limits import free_memory_bytes

from .limits import MIB

KEPT: Final = "kept"
"""The name of a measure's folder for files that are stored with its results."""
T = TypeVar("T")
L = TypeVar("L")


@dataclass(frozen=True, slots=True)
class Setting:
    folder: Path
    """An empty folder on a real disk, which is deleted afterwards."""
    state_bytes: int = 1024 * MIB
    training_bytes: int = 1024 * MIB
    num_small: int = 100_000
    budget_bytes: int = 128 * MIB
    rounds: int = 4
    few_rounds: int = 3
    """The rounds of measurements that hardly vary, such as numbers of bytes, or that take long."""
    compare_bytes: int = 192 * MIB
    compare_rounds: int = 6
    """The rounds of comparisons, each in new processes. An interval needs at least six."""
    num_later: int = 3
    """The number of later saves measured in one process, after the first two."""
    frozen_bytes: int = 256 * MIB
    """The size of a frozen base, and of a training that is compared with it, in which every tensor changes."""
    settle_seconds: float = 3.0
    """The training between warm-up and first save for candidates that start a process; a quarter for all others."""
    shape_bytes: int = 1536 * MIB
    """The size of the states in `shapes`, reduced to an eighth of the free memory if that is less."""
    gpu_seconds: float = 480.0
    """The time for all GPU measurements; parts that do not fit are skipped. The command ends within another minute."""
    gib_bytes: int = 1024 * MIB
    """The bytes that count as a GiB in GPU measurements."""
    gpu_model: str = "gpt2"
    """The model that is trained on the GPU: "gpt2", or "linear" layers."""
    gpu_steps: int = 10
    """The training steps on the GPU before and after each save."""
    num_pending: int = 8192
    num_mebibytes: tuple[int, int] = (100, 600)
    """The numbers of tensors of 1 MiB in two states."""
    first_bytes: int = 7 * 1024 * MIB
    """The size of a state that is saved into new memory, reduced to a third of the free memory if that is less."""
    shape_rounds: int = 1
    num_shaped: int = 5
    """The number of candidates that save each shape."""
    growth_bytes: int = 64 * 1024 * MIB
    """The largest state, if free memory and disk allow it."""
    many_saves: int = 200
    kept_steps: tuple[int, ...] = (20, 500, 1500, 3000)
    stored_steps: tuple[int, ...] = (20, 160, 640)
    """The numbers of steps in a store, to which one more is committed."""
    kept_rounds: int = 30
    num_trainings: int = 10_000
    """The number of simulated trainings that fail at random."""
    rank_bytes: int = 256 * MIB
    store_bytes: int = 1024 * MIB
    served_bytes: int = 256 * MIB
    """The size of states for real servers, which are slow, and for further places, which receive many saves."""
    listed_steps: int = 10_000
    inspected_ranks: int = 256
    read_bytes: tuple[int, ...] = (256 * MIB, 2048 * MIB)
    """The sizes of checkpoints for a command, whose memory must not depend on the size."""

    world_tensors: int = 1000
    world_sizes: tuple[int, ...] = (8, 64, 256, 1024, 4096, 16384)
    """The numbers of ranks, most of them simulated."""
    central_sizes: tuple[int, ...] = (8, 64, 256)
    """The numbers of ranks for a plan that one rank makes for all ranks, which takes long."""
    reader_sizes: tuple[int, ...] = (8, 128, 2048, 16384)

    def shape_bytes_here(self) -> int:
        return min(self.shape_bytes, free_memory_bytes() // 8)

    def first_bytes_here(self) -> int:
        return min(self.first_bytes, free_memory_bytes() // 3)

    @classmethod
    def toy(cls, folder: Path) -> Setting:
        sizes: dict[str, Any] = {
            "num_later": 1,
            "settle_seconds": 0.1,
            "gib_bytes": MIB,
            "gpu_model": "linear",
            "gpu_steps": 1,
            "num_pending": 64,
            "num_mebibytes": (2, 6),
            "first_bytes": 96 * MIB,
            "num_shaped": 1,
            "compare_bytes": 48 * MIB,
            "frozen_bytes": 32 * MIB,
            "compare_rounds": 1,
            "shape_bytes": 48 * MIB,
            "growth_bytes": 128 * MIB,
            "many_saves": 10,
            "kept_steps": (3, 20),
            "stored_steps": (3, 20),
            "kept_rounds": 2,
            "num_trainings": 20,
            "rank_bytes": 32 * MIB,
            "store_bytes": 96 * MIB,
            "served_bytes": 48 * MIB,
            "listed_steps": 40,
            "inspected_ranks": 4,
            "read_bytes": (16 * MIB, 48 * MIB),
            "world_tensors": 40,
            "world_sizes": (8, 64),
            "central_sizes": (2, 4),
            "reader_sizes": (4, 8),
        }
        return cls(folder, 96 * MIB, 96 * MIB, 1000, 128 * MIB, rounds=2, few_rounds=1, **sizes)


def elapsed(action: Callable[[], object]) -> float:
    """The seconds of an action."""
    begin = perf_counter()
    action()
    return perf_counter() - begin


def side_by_side(rounds: int | Iterable[int], measured: Callable[[], T], limit: Callable[[], L]) -> list[tuple[T, L]]:
    """Pairs (measured, limit). The order alternates between rounds, since the second one finds warmer caches."""
    pairs = []
    for number in range(rounds) if isinstance(rounds, int) else rounds:
        if number % 2:
            second = limit()
            pairs.append((measured(), second))
        else:
            pairs.append((measured(), limit()))
    return pairs
