"""Objects on one side, named tensors and a skeleton of plain values on the other.

- `capture.py` takes a state apart; `captured.py` has the result, and views of snapshots.
- `tree.py` makes skeletons and decodes them, with values of `plain.py`, and names of `names.py`.
- `division.py` divides a state among ranks, `skeletons.py` merges theirs, `per_rank.py` has values per rank.
- `wrappers.py`: names behind DDP and FSDP, and state dicts, each taken once; `megatron_tensors.py`: ShardedTensors;
  `rng.py`: random generators; `optimizers.py`: those that one optimizer consists of.
"""

from .per_rank import PerRank as PerRank
