"""Objects on one side, named tensors and a skeleton of plain values on the other."""

from .containers import PerRank as PerRank
