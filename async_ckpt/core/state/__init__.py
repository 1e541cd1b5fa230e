"""Converts objects to named tensors and a skeleton of plain values, and back.

- `capture.py` takes a state apart; `captured.py` has the result, and views of snapshots.
- `tree.py` encodes and decodes skeletons, with plain values of `plain.py` and names of `names.py`.
- `division.py` divides a state among ranks, `skeletons.py` merges their skeletons, `per_rank.py` has values per rank.
- `wrappers.py`: names without DDP and FSDP, and cached state dicts; `megatron_tensors.py`: ShardedTensors; `rng.py`:
  random generators; `optimizers.py`: the parts of an optimizer.
"""

from .per_rank import PerRank as PerRank
