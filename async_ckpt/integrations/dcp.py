"""Plug-ins for torch.distributed.checkpoint, by the path that users import.

In: nothing. Out: the names of the face's room `dcp`. Knows nothing of: what they do.
"""

from __future__ import annotations

from ..face.dcp import PinnedStager, TarStorageReader, TarStorageWriter, restore, to_dcp

__all__ = ["PinnedStager", "TarStorageReader", "TarStorageWriter", "restore", "to_dcp"]
