"""Models that are spread over ranks: each rank publishes versions of the slices that it holds.

- `own_slices.py`: what one rank publishes; `rank_versions.py`: the versions that all ranks have published;
  `pieces.py`: whole tensors out of slices; `rank_replicas.py`: the slices of all ranks in the memory of a reader.
"""
