"""Plug-ins for torch.distributed.checkpoint.

In: what torch's planners have planned. Out: steps of archives, and torch's targets filled from them.
Knows nothing of: training.
"""

from __future__ import annotations

from .reader import TarStorageReader
from .stager import PinnedStager
from .writer import TarStorageWriter

__all__ = ["PinnedStager", "TarStorageReader", "TarStorageWriter"]
