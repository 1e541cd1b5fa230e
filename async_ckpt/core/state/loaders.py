"""Facts about a data loader: what the order of its items depends on, beside the position that its state has.

In: a data loader, a sampler or a dataset with a position. Out: a few numbers, and the differences between those of two,
in words. Knows nothing of: which package a loader is from, files.

Loaders are known by what they have, as torch's, torchdata's, accelerate's and torchtitan's all do: a dataset and
workers. A sampler has replicas, and an iterable dataset of Hugging Face has shards.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Final

import torch

from ..spec import Json

HOW_TO_KEEP_ORDER: Final = "construct the data loader as it was at the save"
# The warning: of a checkpoint, a loader, and the facts that differ.
ANOTHER_ORDER: Final = (
    "async_ckpt: %s: %s gives its data in another order than it did: %s; "
    f"{HOW_TO_KEEP_ORDER}, or some items come twice and others not at all"
)
# The facts, in the words of messages.
_WORDS: Final = {
    "items": "number of items", "batches": "number of batches", "batch_size": "batch size",
    "shards": "number of shards", "num_workers": "number of workers", "world_size": "world size",
}  # fmt: skip
# The attributes by which samplers and datasets say among how many ranks they share the items.
_WORLD_SIZES: Final = ("num_replicas", "num_processes", "dp_world_size", "world_size")


def loader_facts(value: Any) -> dict[str, int]:
    """The facts of a loader, a sampler or a dataset; empty for any other object."""
    has_workers = _number(value, "num_workers") is not None and hasattr(value, "dataset")
    if not (has_workers or _number(value, "num_replicas") or _number(value, "num_shards")):
        return {}
    dataset = getattr(value, "dataset", value)
    is_iterable = isinstance(dataset, torch.utils.data.IterableDataset) or not hasattr(dataset, "__getitem__")
    batches = getattr(value, "batch_sampler", None)
    facts = {
        "items": _length(dataset),
        # torch notes that the length of an iterable dataset's loader was asked for, and warns if it was not right.
        "batches": None if is_iterable else _length(value),
        "batch_size": _number(value, "batch_size") or _number(batches, "batch_size"),
        "shards": _number(dataset, "num_shards"),
        "num_workers": _number(value, "num_workers"),
        "world_size": _world_size(value, dataset, is_iterable=is_iterable),
    }
    return {name: number for name, number in facts.items() if number is not None}


def order_differences(live: Any, saved: Json) -> list[str]:
    """The facts that differ between a live loader and a saved one, in words: the order of the items then differs, too.

    Facts that only one side has are not compared. `saved` may come from any file; nothing differs from None.
    """
    if not isinstance(saved, dict):
        return []
    return [
        f"{_WORDS[name]} {saved[name]!r:.30} in the checkpoint and {number} here"
        for name, number in loader_facts(live).items()
        if name in saved and saved[name] != number
    ]


def _world_size(loader: Any, dataset: Any, *, is_iterable: bool) -> int:
    for part in _parts(loader, dataset):
        for name in _WORLD_SIZES:
            if number := _number(part, name):
                return number
    # An iterable dataset may divide its items itself. Datasets of Hugging Face would have said so.
    if is_iterable and not hasattr(dataset, "_distributed") and torch.distributed.is_available():
        return torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    return 1


def _parts(loader: Any, dataset: Any) -> Iterator[Any]:
    """The objects that may divide the items of a loader among ranks."""
    batches = getattr(loader, "batch_sampler", None)
    yield from (loader, getattr(loader, "sampler", None), batches, getattr(batches, "sampler", None))
    yield from (dataset, getattr(dataset, "_distributed", None))


def _number(value: Any, name: str) -> int | None:
    number = getattr(value, name, None)
    return number if type(number) is int else None


def _length(value: Any) -> int | None:
    with suppress(Exception):  # it has none, or does not know it
        return len(value)
    return None
