"""vLLM: weights of held snapshots and stored weights, for running engines and for engines that start.

In: a snapshot, or the place of stored weights. Out: an engine that has them. Knows nothing of: how an archive is read.

- `weight_source.py`: `SnapshotSource`, a held snapshot as vLLM's WeightSource, for any of its transfer engines.
- `weight_transfer.py`: the transfer engines `async_ckpt`. They send a snapshot through memory that processes of one
  host share, or stored weights to any host.
- `model_loader.py`: the load format `async_ckpt`, for an engine that starts.
- `registration.py`: `register`, which registers all of them with vLLM; `plugin`, which vLLM calls itself.
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
    """Import modules that need vLLM on first access, so that the plugin of an engine does not import them."""
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_LATER[name]}"), name)
