"""Values that each rank has its own of, side by side.

In: a value for each rank. Out: a frozen mapping. Knows nothing of: states, files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any


class PerRank(Mapping[int, Any]):
    """What several ranks have saved under one name, where each had a value of its own: rank -> value.

        state = async_ckpt.load("runs/a")
        state["rng"][3]  # that of rank 3

    It cannot be changed. `async_ckpt.load(…, from_ranks={"rng": 3})` gives the value of rank 3 alone.
    """

    __slots__ = ("_values",)

    def __init__(self, values: Mapping[int, Any]) -> None:
        self._values = MappingProxyType(dict(values))

    def __getitem__(self, rank: int) -> Any:
        return self._values[rank]

    def __iter__(self) -> Iterator[int]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        told = ", ".join(f"{rank}: {value!r:.60}" for rank, value in self._values.items())
        return f"PerRank({{{told:.600}}})"
