"""What tests of the plug-ins for torch.distributed.checkpoint save, load and compare."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor

from async_ckpt.integrations.dcp import PinnedStager, TarStorageReader, TarStorageWriter

__all__ = [
    "CheckpointException",
    "PinnedStager",
    "TarStorageReader",
    "TarStorageWriter",
    "cause",
    "dcp",
    "emptied",
    "get_state_dict",
    "load",
    "plain",
    "save",
    "set_state_dict",
    "training",
]


def save(state: Any, path: object, **options: Any) -> Any:
    return dcp.save(state, storage_writer=TarStorageWriter(path, **options))  # type: ignore[arg-type]


def load(state: Any, path: object, **options: Any) -> Any:
    dcp.load(state, storage_reader=TarStorageReader(path, **options))  # type: ignore[arg-type]
    return state


def plain(value: Any) -> Any:
    """As torch's names have it: dicts with keys of text, lists, and no empty dicts."""
    if isinstance(value, Mapping):
        made = {str(key): plain(inner) for key, inner in value.items()}
        return {key: inner for key, inner in sorted(made.items()) if inner != {}}
    if isinstance(value, list):
        return [plain(inner) for inner in value]
    return value


def training(width: int = 7) -> dict[str, Any]:
    """A model and an optimizer that have taken a step, as their state dicts, and plain values."""
    model = torch.nn.Sequential(torch.nn.Linear(5, width), torch.nn.Linear(width, 3))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 5)).sum().backward()
    optimizer.step()
    return {
        "model": model.state_dict(),
        "optim": optimizer.state_dict(),
        "step": 3,
        "listed": [torch.ones(2), "text", {"none": torch.zeros(0, 3)}],
        "plain": [1, (2.5, None)],
        "pair": (1, torch.full((2,), 2.0)),
    }


def emptied(value: Any) -> Any:
    """The same with other values everywhere, to be loaded into."""
    if isinstance(value, DTensor):
        return torch.zeros_like(value)
    if isinstance(value, torch.Tensor):
        return torch.full_like(value, 9)
    if isinstance(value, Mapping):
        return {key: emptied(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [emptied(inner) for inner in value]
    return None


def cause(raised: Any) -> BaseException:
    """The error of the first rank that had one, which torch wraps."""
    error: BaseException = next(iter(raised.value.failures.values()))[0]
    return error
