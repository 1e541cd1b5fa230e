"""Fills a module, or its adapter, with the weights of a version: with all of them, or with none if they do not fit.

In: a module, and the tensors of a version by name. Out: the module with their bytes.
Knows nothing of: where the tensors come from.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any

import torch

from ...errors import StateMismatchError, UnsupportedStateError
from ...plumbing import backends, capture, hf_weights, leaf_names, sharded, threads, wrappers
from .difference import checksum_of
from .of_ranks.pieces import PiecedTensor

_ADVICE = "pull into a folder, and load that"


Kinds = Mapping[str, tuple[str, tuple[int, ...]]]


def refuse_misfit(module: torch.nn.Module, given: Kinds, adapter: Mapping[str, str], source: str) -> None:
    """Check that the version and the module have the same tensors.

    `given` are the dtypes and shapes of the version's tensors, by name. `adapter` are the settings of its adapter.
    Raises StateMismatchError, and UnsupportedStateError for a module that cannot be filled in place.
    """
    live = _live(module, adapter, source)
    _refuse_unfillable(module, live)
    wanted = hf_weights.weights_of(module, {})
    if wanted.as_published(dict(wanted.tensors)).keys() != wanted.tensors.keys():
        raise StateMismatchError(
            f"{source}: {type(wrappers.plain_model(module)).__qualname__} has other weights in memory than in its "
            f"checkpoints; {_ADVICE}"
        )
    storages = {_memory_key(live[name]) for name in given if name in live}
    missing = sorted(name for name in wanted.tensors.keys() - given.keys() if _memory_key(live[name]) not in storages)
    unexpected = sorted(given.keys() - live.keys())
    kinds = {name: (leaf_names.dtype_name(tensor.dtype), tuple(tensor.shape)) for name, tensor in live.items()}
    mismatched = sorted(name for name, kind in given.items() if kinds.get(name, kind) != kind)
    if missing or unexpected or mismatched:
        problems = [
            f"{problem}: {', '.join(names[:3])}{', …' if len(names) > 3 else ''}"
            for problem, names in (
                ("missing in the version", missing),
                ("unknown to the module", unexpected),
                ("of another dtype or shape", mismatched),
            )
            if names
        ]
        example = "".join(
            f"; {name} has {_described(given[name])}, and {_described(kinds[name])} in the module"
            for name in mismatched[:1]
        )
        raise StateMismatchError(
            f"{source}: it does not fit the module ({'; '.join(problems)}{example}); the module is unchanged. Make the "
            "module of the same config and dtype, or pull into a folder",
            missing=tuple(missing),
            unexpected=tuple(unexpected),
            mismatched=tuple(mismatched),
        )


def fill(
    module: torch.nn.Module,
    tensors: Mapping[str, PiecedTensor],
    adapter: Mapping[str, str],
    source: str,
    crew: threads.Crew,
) -> None:
    """Copy the new bytes to the module, tied tensors once. Before that, raises the errors of `refuse_misfit`."""
    refuse_misfit(module, {n: (leaf_names.dtype_name(t.dtype), t.shape) for n, t in tensors.items()}, adapter, source)
    live = _live(module, adapter, source)
    copied = dict(tensors)
    for names in _tied(live, tensors):
        if not _are_equal([tensors[name] for name in names]):
            raise StateMismatchError(
                f"{source}: {' and '.join(names[:3])} are one tensor in the module, but have different values in the "
                "version; the module is unchanged. Untie them, or publish a model in which they are tied",
                mismatched=tuple(names),
            )
        for name in names[1:]:
            del copied[name]
    for one, other, distance in _overlapping(live, copied):
        first, second = (tensors[name].whole().contiguous().flatten().view(torch.uint8) for name in (one, other))
        if not torch.equal(first[distance:][: len(second)], second[: len(first) - distance]):
            raise StateMismatchError(
                f"{source}: {one} and {other} overlap in the memory of the module, but have different values there in "
                "the version; the module is unchanged. clone() one of them",
                mismatched=(one, other),
            )
    on_host = sorted((n for n in copied if backends.is_on_host(live[n])), key=lambda n: -tensors[n].num_bytes)
    crew.run_all(partial(_copy, live[name], tensors[name]) for name in on_host)
    for name in copied.keys() - {*on_host}:  # on this thread, in the order of its stream
        _copy(live[name], tensors[name])


def _copy(live: torch.Tensor, tensor: PiecedTensor) -> None:
    # A tensor created in inference mode can only be changed in inference mode.
    with torch.no_grad(), torch.inference_mode(live.is_inference()):
        tensor.copy_to(live.detach())


def _are_equal(tensors: Sequence[PiecedTensor]) -> bool:
    """Whether these tensors have the same bytes, judged by the checksums of their pieces if known."""
    known = {tuple((piece.box, piece.checksum) for piece in tensor.pieces) for tensor in tensors}
    if len(known) == 1 and all(checksum for _, checksum in next(iter(known))):
        return True
    return len({checksum_of(tensor.whole()) for tensor in tensors}) == 1


def _live(module: torch.nn.Module, adapter: Mapping[str, str], source: str) -> Mapping[str, torch.Tensor]:
    """The tensors of the module by the names of the version: all of them, or those of the active adapter.

    Raises StateMismatchError if only one of module and version is an adapter, or if the settings of both differ.
    """
    has_adapter = bool(getattr(wrappers.plain_model(module), "peft_config", None))
    if has_adapter is not bool(adapter):
        raise StateMismatchError(
            f"{source}: it is {'an adapter' if adapter else 'a whole model'}, and the module has "
            f"{'an adapter' if has_adapter else 'none'}; "
            + ("add one to it with get_peft_model" if adapter else "pull into the model without its adapter")
            + ", or pull into a folder"
        )
    if not adapter:
        live: Mapping[str, torch.Tensor] = wrappers.plain_state_dict(module)
        return live
    weights = hf_weights.weights_of(module, {})
    settings = weights.adapter
    for name in sorted((adapter.keys() | settings.keys()) - {*hf_weights.OF_BASE}):
        was, is_now = settings.get(name, "empty"), adapter.get(name, "empty")
        if was != is_now:
            raise StateMismatchError(
                f"{source}: the published adapter has {name} = {is_now:.200}, and the module's has {was:.200}; the "
                "module is unchanged. Create its adapter from the published config, or pull into a folder"
            )
    return weights.tensors


def _described(kind: tuple[str, tuple[int, ...]]) -> str:
    return f"{kind[0]} {list(kind[1])}"


def _tied(live: Mapping[str, torch.Tensor], names: Mapping[str, object]) -> Iterator[list[str]]:
    """Groups of names that share one tensor of the module."""
    groups: dict[tuple[object, ...], list[str]] = {}
    for name in names:
        if live[name].numel():
            groups.setdefault(_memory_key(live[name]), []).append(name)
    return (group for group in groups.values() if len(group) > 1)


def _overlapping(live: Mapping[str, torch.Tensor], names: Iterable[str]) -> Iterator[tuple[str, str, int]]:
    """Pairs of dense tensors of the module, of which the second begins in the first, at this distance in bytes."""
    dense = [name for name in names if live[name].numel() and backends.is_dense(live[name])]
    spans = sorted((str(live[name].device), live[name].data_ptr(), name) for name in dense)
    for i, (device, begin, name) in enumerate(spans):
        for of_other, at, other in islice(spans, i + 1, None):
            if of_other != device or at >= begin + live[name].nbytes:
                break
            yield name, other, at - begin


def _refuse_unfillable(module: torch.nn.Module, live: Mapping[str, Any]) -> None:
    own = {
        tensor.untyped_storage().data_ptr()
        for tensor in (*module.parameters(), *module.buffers())
        if _why_not(tensor) is None
    }
    for name, tensor in live.items():
        if not isinstance(tensor, torch.Tensor) and not sharded.is_sharded(tensor):
            continue  # `weights_of` refuses it
        why = _why_not(tensor)
        if why is None and tensor.numel() and tensor.untyped_storage().data_ptr() not in own:
            why = f"the module's state dict has a copy of it, as that of FSDP1 has; {_ADVICE}"
        if why is not None:
            raise UnsupportedStateError(f"{name!a}: {why}; the module is unchanged", path=name)


def _why_not(tensor: Any) -> str | None:
    """The reason why a tensor of a module cannot be filled, or None."""
    if sharded.is_sharded(tensor):
        return f"it is sharded, and only plain tensors are filled; {_ADVICE} into the model"
    return capture.why_not(tensor) or (
        f"several of its elements share one place in memory; clone() it, or {_ADVICE}" if _overlaps(tensor) else None
    )


def _overlaps(tensor: torch.Tensor) -> bool:
    """Whether elements may share memory, judged by the strides alone."""
    extent = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and tensor.numel():
            if stride <= extent:
                return True
            extent += stride * (size - 1)
    return False


def _memory_key(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
