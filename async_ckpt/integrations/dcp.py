"""Plug-ins for torch.distributed.checkpoint, at the path that users import.

In: nothing. Out: the names of `face.dcp`. Knows nothing of: their implementation.
"""

from __future__ import annotations

from ..face.dcp import PinnedStager, TarStorageReader, TarStorageWriter, restore, to_dcp

__all__ = ["PinnedStager", "TarStorageReader", "TarStorageWriter", "restore", "to_dcp"]
