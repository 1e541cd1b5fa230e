"""Wrapped tensors, which consist of inner tensors: wrapper subclasses, sparse tensors, masked tensors.

In: a tensor. Out: its inner tensors by name, and its other facts; or a tensor built from these.
Knows nothing of: files, classes that are not imported.

A subclass defines its inner tensors by torch's protocol, `__tensor_flatten__` and `__tensor_unflatten__`. Torch's
sparse and masked tensors lack these methods, so this module implements the equivalent for them. The inner tensors of a
DTensor are the inner tensors of its local tensor.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple

import torch

from ..slicing.sharded import PLAIN_TYPES, InnerShard, is_dtensor, is_ordinary, is_sharded, refused, shards_of
from .names import Path, shown
from .plain import class_name

_ROWS: Final = "crow_indices", "col_indices", "values"
_COLUMNS: Final = "ccol_indices", "row_indices", "values"
_COMPRESSED: Final[Mapping[torch.layout, tuple[str, ...]]] = {
    torch.sparse_csr: _ROWS,
    torch.sparse_bsr: _ROWS,
    torch.sparse_csc: _COLUMNS,
    torch.sparse_bsc: _COLUMNS,
}
_LAYOUTS: Final[Mapping[str, torch.layout]] = {str(layout): layout for layout in (torch.sparse_coo, *_COMPRESSED)}
_MASKED: Final = "_masked_data", "_masked_mask"


class Wrapper(NamedTuple):
    """A tensor without its inner tensors."""

    kind: str
    """The name of the tensor's class, or of its layout if it is sparse."""
    cls: type | None
    size: tuple[int | None, ...]
    """The size of each dimension; None where it is not a number, as in a jagged tensor."""
    stride: tuple[int | None, ...] | None
    context: Any
    shards: tuple[tuple[int, int, int], ...] = ()
    """The cuts of a DTensor, as `shards_of` gives them."""


def taken_apart(tensor: Any, path: Path) -> tuple[Wrapper, dict[str, Any]] | None:
    """A tensor without its inner tensors, and the inner tensors by name; None if it is not a wrapped tensor.

    The inner tensors of a DTensor are `InnerShard`, unless all shards have the same inner tensor. Raises
    UnsupportedStateError, whose message begins with the name of `path`, if the class violates the protocol.
    """
    kind = type(tensor)
    if is_ordinary(tensor):
        return None
    if isinstance(tensor, InnerShard):
        apart = taken_apart(tensor.inner, path)
        return apart and (apart[0], {inner: tensor._replace(inner=part) for inner, part in apart[1].items()})
    if is_dtensor(tensor):
        apart = taken_apart(tensor._local_tensor, path)
        if apart is None:
            return None
        wrapper, parts = apart[0]._replace(size=_numbers(tensor.shape), stride=_numbers(tensor.stride())), apart[1]
        shards = shards_of(tensor, shown(path))
        cut = _cut_alike(tensor._local_tensor, *apart, frozenset(dim for dim, *_ in shards))
        if cut is None:
            return wrapper._replace(shards=shards), {name: InnerShard(tensor, part) for name, part in parts.items()}
        return wrapper, {
            name: InnerShard(tensor, part, _whole(tensor, part, shards)) if name in cut else part
            for name, part in parts.items()
        }
    if not isinstance(tensor, torch.Tensor) or is_sharded(tensor):
        return None
    if tensor.layout in _LAYOUTS.values() and kind in PLAIN_TYPES:
        return _of_sparse(tensor)
    if _is_masked(kind):
        parts = {inner: getattr(tensor, inner) for inner in _MASKED}
        return Wrapper(class_name(kind), kind, _numbers(tensor.shape), None, None), parts
    return _of_subclass(tensor, shown(path)) if follows_protocol(kind) else None


# Results of `_cut_alike`, by class, context, and the shapes of the tensor and its inner tensors.
_cuts_known: dict[Any, frozenset[str] | None] = {}
_MAX_KNOWN: Final = 10_000


def _cut_alike(local: Any, wrapper: Wrapper, parts: Mapping[str, Any], dims: frozenset[int]) -> frozenset[str] | None:
    """The inner tensors that are cut along these dimensions like the tensor; None if some are cut otherwise.

    The class itself takes slices to find out. An inner tensor is cut if the first, the middle and the last row of the
    tensor have its rows at the same positions. It is whole if each of these slices has all of it. For a tensor with a
    single row both may be true. Then it is whole if an empty slice, where the class supports it, also has all of it.
    """
    shapes = tuple((name, part.shape) for name, part in parts.items())
    key = type(local), repr(wrapper.context), local.shape, dims, shapes
    if key not in _cuts_known:
        if len(_cuts_known) >= _MAX_KNOWN:
            _cuts_known.clear()
        try:
            with torch.no_grad():
                ways = [_ways_along(local, wrapper, parts, dim) for dim in sorted(dims)]
        except Exception:  # the user's own class may raise anything
            ways = [None]
        is_known = None not in ways and all(way == ways[0] for way in ways)
        _cuts_known[key] = (ways[0] if ways else frozenset(parts)) if is_known else None
    return _cuts_known[key]


def _ways_along(local: Any, wrapper: Wrapper, parts: Mapping[str, Any], dim: int) -> frozenset[str] | None:
    """The inner tensors that are cut along a dimension; None if some are neither cut nor whole."""
    size, cut, whole = local.shape[dim], {*parts}, {*parts}
    for at, number in {(0, 1), (size // 2, 1), (size - 1, 1), (0, int(size > 1))} if size else ():
        row = None
        with suppress(Exception):  # the user's own class may raise anything
            row = taken_apart(local.narrow(dim, at, number), ())
        if row is None or row[0].context != wrapper.context or row[1].keys() != parts.keys():
            if number:
                return None
            continue
        for name, part in parts.items():
            if type(part) not in PLAIN_TYPES:
                return None
            # The part may have several rows for each row of the tensor; a flat part is only cut along dimension 0.
            may_be_cut = part.ndim == local.ndim or (dim == 0 and part.ndim > 0)
            rows = part.shape[dim] // size if may_be_cut and part.shape[dim] % size == 0 else 0
            if not rows or not _is_same(row[1][name], part.narrow(dim, at * rows, number * rows)):
                cut.discard(name)
            if row[1][name].shape != part.shape or not torch.equal(_bits(row[1][name]), _bits(part)):
                whole.discard(name)  # compared by bits, since some classes copy whole inner tensors into a slice
    if not size:
        return frozenset(name for name, part in parts.items() if part.ndim > dim and not part.shape[dim])
    return frozenset(cut) if cut | whole == {*parts} else None


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """True for two views of the same memory."""
    return (one.data_ptr(), one.shape, one.stride()) == (other.data_ptr(), other.shape, other.stride())


def _whole(dtensor: Any, part: torch.Tensor, shards: tuple[tuple[int, int, int], ...]) -> tuple[int, ...]:
    """The shape of an inner tensor of the whole DTensor, if the inner tensor is cut like the DTensor."""
    local, cut = dtensor._local_tensor.shape, {dim for dim, *_ in shards}
    return tuple(
        dtensor.shape[dim] * (size // local[dim] if local[dim] else 1) if dim in cut else size
        for dim, size in enumerate(part.shape)
    )


def plain_parts(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    """The plain tensors on this rank that a tensor consists of; the tensor itself if it is not wrapped."""
    if is_ordinary(tensor):
        return (tensor,)
    apart = taken_apart(tensor, ())
    if apart is None:
        return (getattr(tensor, "_local_tensor", tensor) if is_dtensor(tensor) else tensor,)
    inner = [part.inner if isinstance(part, InnerShard) else part for part in apart[1].values()]
    return [plain for part in inner for plain in plain_parts(part)]


def follows_protocol(kind: type) -> bool:
    """True for a class of tensors that implements torch's protocol.

    AsyncCollectiveTensor, the result of a collective, implements it, too, but has no values before the collective ends.
    """
    return (
        hasattr(kind, "__tensor_flatten__")
        and hasattr(kind, "__tensor_unflatten__")
        and kind.__qualname__ != "AsyncCollectiveTensor"
    )


def can_be_made(kind: type) -> bool:
    """True for a class whose instances `made` can make."""
    return issubclass(kind, torch.Tensor) and (follows_protocol(kind) or _is_masked(kind))


def is_sparse_layout(kind: str) -> bool:
    """True if a `Wrapper.kind` is the name of a sparse layout, so that no class is needed to make the tensor."""
    return kind in _LAYOUTS


def made(wrapper: Wrapper, inner: Mapping[str, Any]) -> Any:
    """The wrapped tensor built from these inner tensors. Raises any exception that the class raises.

    The indices of a sparse tensor are not checked.
    """
    if wrapper.kind in _LAYOUTS:
        layout, (*indices, values) = _LAYOUTS[wrapper.kind], inner.values()
        known: dict[str, Any] = {"check_invariants": False}
        make: Any = torch.sparse_compressed_tensor
        if layout is torch.sparse_coo:
            make, known["is_coalesced"] = torch.sparse_coo_tensor, bool(wrapper.context["is_coalesced"])
        else:
            known["layout"] = layout
        return make(*indices, values, wrapper.size, **known)
    cls: Any = wrapper.cls
    if _is_masked(cls):
        masked = cls.__new__(cls, *inner.values())  # its `__init__` would clone them
        for name, part in inner.items():
            setattr(masked, name, part)
        return masked
    return cls.__tensor_unflatten__(dict(inner), wrapper.context, wrapper.size, wrapper.stride)


def check_indices(tensor: torch.Tensor) -> None:
    """Check the indices of a sparse tensor, which kernels trust. Raises RuntimeError if they do not fit its size."""
    if tensor.layout is torch.sparse_coo:
        torch._validate_sparse_coo_tensor_args(
            tensor._indices(), tensor._values(), tensor.shape, is_coalesced=tensor.is_coalesced()
        )
    elif tensor.layout in _COMPRESSED:
        rows, columns, values = (getattr(tensor, name)() for name in _COMPRESSED[tensor.layout])
        torch._validate_sparse_compressed_tensor_args(rows, columns, values, tensor.shape, tensor.layout)


def _of_sparse(tensor: torch.Tensor) -> tuple[Wrapper, dict[str, Any]]:
    plain, kind = tensor.detach(), str(tensor.layout)
    if tensor.layout is torch.sparse_coo:
        wrapper = Wrapper(kind, None, tuple(tensor.shape), None, {"is_coalesced": tensor.is_coalesced()})
        return wrapper, {"indices": plain._indices(), "values": plain._values()}
    parts = {name: getattr(plain, name)() for name in _COMPRESSED[tensor.layout]}
    return Wrapper(kind, None, tuple(tensor.shape), None, None), parts


def _of_subclass(tensor: Any, name: str) -> tuple[Wrapper, dict[str, Any]]:
    kind = type(tensor)
    try:
        names, context = tensor.__tensor_flatten__()
        parts = {inner: getattr(tensor, inner) for inner in names}
        wrapper = Wrapper(class_name(kind), kind, _numbers(tensor.shape), _numbers(tensor.stride()), context)
    except Exception as error:  # the user's own class may raise anything
        why = f"__tensor_flatten__ of {kind.__qualname__} failed ({type(error).__name__}: {error})"
        raise refused(name, f"{why}; save the plain tensors that it wraps") from error
    for inner, part in parts.items():
        if not isinstance(inner, str) or not isinstance(part, torch.Tensor):
            raise refused(
                name,
                f"__tensor_flatten__ of {kind.__qualname__} names {inner!r:.50}, which is not a tensor but "
                f"{type(part).__qualname__}; save the plain tensors that it wraps",
            )
    return wrapper, parts


def _numbers(sizes: Any) -> tuple[int | None, ...]:
    return tuple(size if type(size) is int else None for size in sizes)


def _is_masked(kind: type) -> bool:
    masked = sys.modules.get("torch.masked.maskedtensor.core")
    return masked is not None and issubclass(kind, masked.MaskedTensor)
