"""Models that are spread over ranks: each rank publishes versions of its slices.

- `pieces.py`: the slices that one rank publishes, and whole tensors made of slices; `root_versions.py`: the versions
  that all ranks have published; `rank_replicas.py`: their slices in the memory of a reader.
"""
