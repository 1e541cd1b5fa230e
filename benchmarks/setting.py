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
"""A measure's folder for files that are kept beside its results."""
T = TypeVar("T")
L = TypeVar("L")


@dataclass(frozen=True, slots=True)
class Setting:
    folder: Path
    """A folder on a real disk, empty, removed afterwards."""
    state_bytes: int = 1024 * MIB
    training_bytes: int = 1024 * MIB
    num_small: int = 100_000
    budget_bytes: int = 128 * MIB
    rounds: int = 4
    few_rounds: int = 3
    """Of what hardly varies, such as bytes, or takes long."""
    compare_bytes: int = 192 * MIB
    compare_rounds: int = 6
    """Of everything that is compared, each with processes of its own; fewer than six tell no interval."""
    num_later: int = 3
    """Saves of one process that count as later ones; one more comes before them."""
    frozen_bytes: int = 256 * MIB
    """Of a frozen base, and of a training in which every tensor changes beside it."""
    settle_seconds: float = 3.0
    """Of training, between the warming up and the first save of what starts a process; a quarter for others."""
    shape_bytes: int = 1536 * MIB
    """As far as memory has eight times as much."""
    gpu_seconds: float = 480.0
    """For all that is measured on a GPU; what does not fit is not run. The command ends within a minute more."""
    gib_bytes: int = 1024 * MIB
    """What stands for a GiB there."""
    gpu_model: str = "gpt2"
    """What is trained there: "gpt2", or "linear" layers."""
    gpu_steps: int = 10
    """On either side of each save."""
    num_pending: int = 8192
    num_mebibytes: tuple[int, int] = (100, 600)
    """Tensors of 1 MiB in two states."""
    first_bytes: int = 7 * 1024 * MIB
    """Of a state that is saved into memory that is new; as far as there is three times as much."""
    shape_rounds: int = 1
    num_shaped: int = 5
    """Candidates that save each shape."""
    growth_bytes: int = 64 * 1024 * MIB
    """At most; memory says how much of it."""
    many_saves: int = 200
    kept_steps: tuple[int, ...] = (20, 500, 1500, 3000)
    stored_steps: tuple[int, ...] = (20, 160, 640)
    """Committed steps that one more is committed beside: on the disk, and in a store."""
    kept_rounds: int = 30
    num_trainings: int = 10_000
    """Simulated ones, that fail at random."""
    rank_bytes: int = 256 * MIB
    store_bytes: int = 1024 * MIB
    served_bytes: int = 256 * MIB
    """What the real servers are given, which take long, and places behind others, which are given much."""
    listed_steps: int = 10_000
    inspected_ranks: int = 256
    read_bytes: tuple[int, ...] = (256 * MIB, 2048 * MIB)
    """Of checkpoints whose size the memory of a command must not depend on."""

    world_tensors: int = 1000
    world_sizes: tuple[int, ...] = (8, 64, 256, 1024, 4096, 16384)
    """Ranks, most of which are simulated."""
    central_sizes: tuple[int, ...] = (8, 64, 256)
    """Of a plan that one rank makes for all, which takes long."""
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
