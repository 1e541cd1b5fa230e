"""The path by which users import what saves and loads by torch.distributed.checkpoint.

In: nothing. Out: the names of the face's room `dcp`. Knows nothing of: what they do.
"""

from __future__ import annotations

from ..face.dcp import PinnedStager, TarStorageReader, TarStorageWriter, restore, to_dcp

__all__ = ["PinnedStager", "TarStorageReader", "TarStorageWriter", "restore", "to_dcp"]
