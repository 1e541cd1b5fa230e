"""Plug-ins for torch.distributed.checkpoint, and converters between its checkpoints and this library's.

In: the plans of torch's planners; paths. Out: steps of archives; torch's targets and live objects, filled; folders that
plain torch loads. Knows nothing of: training.

- `writer.py`: `TarStorageWriter`; `stager.py`: `PinnedStager`, the host copy for async_save.
- `reader.py`: `TarStorageReader`; `convert.py`: `restore` and `to_dcp`.
- `metadata.py`: fully qualified names and paths, and the items that each rank wrote.
- `entries.py`: the items of a step by their names in torch's metadata.
"""

from __future__ import annotations

from .convert import restore, to_dcp
from .reader import TarStorageReader
from .stager import PinnedStager
from .writer import TarStorageWriter

__all__ = ["PinnedStager", "TarStorageReader", "TarStorageWriter", "restore", "to_dcp"]
