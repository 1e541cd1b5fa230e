"""Facts about a data loader that the order of its items depends on, besides the position in its state.

In: a data loader, a sampler or a dataset with a position. Out: a few numbers and names; the differences between two
loaders, as text. Knows nothing of: the package of a loader, files.

Loaders are recognized by their attributes: the loaders of torch, torchdata, accelerate and torchtitan all have a
dataset and workers. A sampler has replicas, and an iterable dataset of Hugging Face has shards.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from contextlib import suppress
from operator import attrgetter
from typing import Any, Final

import torch
from torch.utils.data import DistributedSampler, IterableDataset

from ..spec import Json

HOW_TO_KEEP_ORDER: Final = "construct the data loader as it was at the save"
# The warning, with the checkpoint, the loader, and the facts that differ.
ANOTHER_ORDER: Final = (
    "async_ckpt: %s: %s yields its data in another order than at the save: %s; "
    f"{HOW_TO_KEEP_ORDER}, or some items are repeated and others skipped"
)
# The names of facts in messages.
_WORDS: Final = {
    "items": "number of items", "batches": "number of batches", "batch_size": "batch size", "drop_last": "drop_last",
    "shards": "number of shards", "num_workers": "number of workers", "world_size": "world size",
    "sampling": "sampling", "seed": "seed", "pads": "drop_last of the sampler", "buffer_size": "buffer size",
}  # fmt: skip
# The attributes in which samplers and datasets have the number of ranks that share the items.
_WORLD_SIZES: Final = ("num_replicas", "num_processes", "dp_world_size", "world_size")
# Classes that take items in order, or in the order of their inner sampler.
_PLAIN: Final = frozenset({"SequentialSampler", "BatchSampler", "BatchSamplerShard", "SkipBatchSampler"})


def loader_facts(value: Any, restored: Collection[int] = ()) -> dict[str, int | str]:
    """The facts of a loader, a sampler or a dataset; empty for any other object.

    The seed of a generator is left out if the id of the generator is in `restored`.
    """
    is_sampler = bool(_get(value, "num_replicas", int))
    has_workers = _get(value, "num_workers", int) is not None and _get(value, "dataset") is not None
    if not (has_workers or is_sampler or _get(value, "num_shards", int)):
        return {}
    dataset = _first((_get(value, "dataset"), value))
    is_iterable = isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__")
    batches, samplers = _get(value, "batch_sampler"), _nested(value, "batch_sampler", "sampler", "dataset._sampler")
    world_size = _world_size([*samplers, dataset, _get(dataset, "_distributed")], is_iterable=is_iterable)
    facts = {
        "items": _length(dataset),
        # If the length of an iterable dataset's loader is requested, torch warns later if the length was wrong.
        "batches": None if is_iterable else _length(value),
        "batch_size": _get(value, "batch_size", int) or _get(batches, "batch_size", int),
        "drop_last": _get(batches, "drop_last", bool),
        "shards": _get(dataset, "num_shards", int),
        "num_workers": _get(value, "num_workers", int),
        "world_size": world_size,
        **(_of_stages(dataset) if is_iterable else _of_samplers(samplers[not is_sampler :], restored)),
    }
    if facts["items"] is None or facts["items"] % world_size == 0:
        facts.pop("pads", None)  # all ranks have the same number of items
    return {name: fact for name, fact in facts.items() if fact is not None}


def order_differences(live: Any, saved: Json, restored: Collection[int] = ()) -> list[str]:
    """The facts, as text, that differ between a live loader and a saved one, so that the order of items differs.

    Facts that only one side has are not compared. `saved` may come from any file; the result is empty unless it is a
    dict. `restored` has the ids of the generators that get their saved state.
    """
    if not isinstance(saved, dict):
        return []
    facts = loader_facts(live, restored)
    if "batches" in facts and facts["batches"] == saved.get("batches"):
        facts.pop("drop_last", None)  # the last batch is complete in both
    return [
        "{} {:.60} in the checkpoint and {:.60} here".format(_WORDS[name], *map(_shown, (saved[name], fact)))
        for name, fact in facts.items()
        if name in saved and saved[name] != fact
    ]


def _shown(fact: Json) -> str:
    return repr(fact).strip("'\"")


def _nested(part: Any, *names: str) -> list[Any]:
    """An object, its first existing attribute of these names, that attribute's attribute, and so on."""
    parts: list[Any] = []
    while part is not None and len(parts) < 100:  # a user's object may contain itself
        parts.append(part)
        part = _first(_get(part, name) for name in names)
    return parts


def _of_samplers(samplers: list[Any], restored: Collection[int]) -> dict[str, Any]:
    """The facts of a loader whose dataset has a length: the samplers that mix its items, and their seed."""
    if not samplers:
        return {}
    if all(type(part).__module__.startswith("torchdata.") for part in samplers):
        # The state of such a loader includes the state of the samplers' generator.
        restored = {*restored, *(id(_get(part, "generator")) for part in samplers)}
    shares = [part for part in samplers if isinstance(part, DistributedSampler)]
    mixing = [part for part in samplers if not (_name(part) in _PLAIN or (part in shares and not part.shuffle))]
    return {
        "sampling": f"by {' of '.join(map(_name, mixing))}" if mixing else "in order",
        "seed": _first(_seed(part, restored) for part in mixing),
        "pads": _first(_get(part, "drop_last", bool) for part in shares),
    }


def _name(sampler: Any) -> str:
    """The name of a sampler's class. torchdata's samplers produce the same order as torch's samplers."""
    name = type(sampler).__name__.removeprefix("Stateful")
    return f"{name} with replacement" if _get(sampler, "replacement", bool) else name


def _of_stages(dataset: Any) -> dict[str, Any]:
    """The facts of an iterable dataset: the seed and the buffer size of Hugging Face's `shuffle`."""
    source = _first((_get(dataset, "dataset"), dataset))  # accelerate wraps the dataset
    stages = _nested(_get(source, "_ex_iterable"), "ex_iterable")
    return {
        "seed": _first(_seed(stage) for stage in stages),
        "buffer_size": _first(_get(stage, "buffer_size", int) for stage in stages),
    }


def _seed(part: Any, restored: Collection[int] = ()) -> Any:
    """The seed of a sampler, or of a stage of a dataset; None if it has no seed, or if its seed does not matter."""
    if (number := _first((_get(part, "initial_seed", int), _get(part, "seed", int)))) is not None:
        return number
    if id(generator := _get(part, "generator")) in restored:
        return None
    if isinstance(generator, torch.Generator):
        return generator.initial_seed()
    return _get(generator, "bit_generator.seed_seq.entropy", int)


def _first(facts: Iterable[Any]) -> Any:
    return next((fact for fact in facts if fact is not None), None)


def _world_size(parts: list[Any], *, is_iterable: bool) -> int:
    if number := next(filter(None, (_get(part, name, int) for part in parts for name in _WORLD_SIZES)), None):
        return int(number)
    # An iterable dataset may divide its items itself. Datasets of Hugging Face record this in `_distributed`.
    if is_iterable and not hasattr(parts[-2], "_distributed") and torch.distributed.is_available():
        return torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    return 1


def _get(value: Any, name: str, kind: type = object) -> Any:
    """An attribute of a value, or a nested attribute such as "a.b"; None unless it is exactly of this class."""
    with suppress(Exception):  # an attribute of a user's class may raise anything
        found = attrgetter(name)(value)
        return found if kind in (object, type(found)) else None
    return None


def _length(value: Any) -> int | None:
    with suppress(Exception):  # the value has no length, or its length is unknown
        return len(value)
    return None
