"""vLLM: weights of held snapshots, and stored ones, for engines that run and engines that start.

In: a snapshot, or the place of stored weights. Out: an engine that has them. Knows nothing of: how an archive is read.

- `weight_source.py`: `SnapshotSource`, a held snapshot as vLLM's WeightSource, for any of its transfer engines.
- `weight_transfer.py`: the transfer engines `async_ckpt`: from a snapshot over memory that processes of one host share,
  or from stored weights on any host.
- `model_loader.py`: the load format `async_ckpt`, for an engine that starts.
- `registration.py`: `register`, which names all of them to vLLM; `plugin` is called by vLLM itself.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ..common.stored_weights import StoredWeights
from .registration import plugin, register

if TYPE_CHECKING:
    from .weight_source import SnapshotSource
    from .weight_transfer import SenderInit

__all__ = ["SenderInit", "SnapshotSource", "StoredWeights", "plugin", "register"]

_LATER = {"SnapshotSource": "weight_source", "SenderInit": "weight_transfer"}


def __getattr__(name: str) -> Any:
    """Import what needs vLLM when it is asked for: the plugin of an engine does not pay for it."""
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_LATER[name]}"), name)
