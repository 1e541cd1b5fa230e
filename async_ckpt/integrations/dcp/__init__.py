"""Plug-ins for torch.distributed.checkpoint, and the way from its checkpoints to this library's and back.

In: what torch's planners have planned; paths. Out: steps of archives, torch's targets and live objects filled from them,
and folders that plain torch loads. Knows nothing of: training.
"""

from __future__ import annotations

from .convert import restore, to_dcp
from .reader import TarStorageReader
from .stager import PinnedStager
from .writer import TarStorageWriter

__all__ = ["PinnedStager", "TarStorageReader", "TarStorageWriter", "restore", "to_dcp"]
