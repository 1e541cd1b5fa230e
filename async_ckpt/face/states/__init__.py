"""Checkpoints of any format, as named items or as a state.

- `sources.py` opens a place: an archive, a step, a run, safetensors, a folder of torch.distributed.checkpoint, a file
  of torch.
- `torch_files.py` reads files of torch.
- `named_items.py` takes a state apart into items with names, and the containers around them.
- `inspected.py`: the names in a checkpoint, without their values.

What is named here is for the wings, by `plumbing.states`.
"""

from __future__ import annotations

from ...core.state.plain import class_name as class_name
from .inspected import NameRow as NameRow
from .inspected import entry_sizes as entry_sizes
from .inspected import places_of as places_of
from .inspected import rows_of as rows_of
from .inspected import walked as walked
from .named_items import Container as Container
from .named_items import Items as Items
from .named_items import NamedItem as NamedItem
from .named_items import Path as Path
from .named_items import PathForm as PathForm
from .named_items import Unread as Unread
from .named_items import attributes_of as attributes_of
from .named_items import beside_items as beside_items
from .named_items import has_items as has_items
from .named_items import kind_of_tensor as kind_of_tensor
from .named_items import node_of as node_of
from .named_items import pieces as pieces
from .named_items import plain_tensor as plain_tensor
from .named_items import shape_of as shape_of
from .named_items import shown_name as shown_name
from .named_items import shown_value as shown_value
from .named_items import side_by_side as side_by_side
from .named_items import typed as typed
from .sources import TensorReader as TensorReader
from .sources import with_items as with_items
from .sources import with_state as with_state
