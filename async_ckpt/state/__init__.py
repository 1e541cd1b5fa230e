"""Objects on one side, named tensors and a skeleton of plain values on the other."""

from .per_rank import PerRank as PerRank
