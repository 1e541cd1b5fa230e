"""Models that are spread over ranks: each rank publishes versions of the slices that it holds.

- `pieces.py`: the slices that one rank publishes, and whole tensors out of them; `root_versions.py`: the versions
  that all ranks have published; `rank_replicas.py`: their slices in the memory of a reader.
"""
