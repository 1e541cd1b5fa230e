"""Checkpoints of any format, as named items or as a state.

- `checkpoint_reader.py` opens a place: an archive, a step, a run, safetensors, a folder of
  torch.distributed.checkpoint, a file of torch.
- `torch_files.py` reads files of torch.
- `named_items.py` splits a state into items with names, and the containers around them.
- `inspected.py`: the names in a checkpoint, without their values.

The wings use the names in this file through `plumbing.states`.
"""

from __future__ import annotations

# isort: off
from ...core.state.plain import class_name as class_name
from .inspected import (
    NameRow as NameRow, entry_sizes as entry_sizes, places_of as places_of, rows_of as rows_of, walked as walked,
)  # fmt: skip
from .named_items import (
    Container as Container, Items as Items, NamedItem as NamedItem, Path as Path, PathForm as PathForm,
    Unread as Unread, attributes_of as attributes_of, beside_items as beside_items, has_items as has_items,
    kind_of_tensor as kind_of_tensor, node_of as node_of, pieces as pieces, plain_tensor as plain_tensor,
    shape_of as shape_of, shown_value as shown_value, side_by_side as side_by_side, typed as typed,
)  # fmt: skip
from .checkpoint_reader import TensorReader as TensorReader, with_items as with_items, with_state as with_state
