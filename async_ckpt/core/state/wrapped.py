"""Tensors that are made of other tensors: wrapper subclasses, sparse tensors, masked tensors.

In: a tensor. Out: its inner tensors by name, and what the tensor has beside them; or such a tensor made of these.
Knows nothing of: files, the names of classes that are not in memory.

A subclass says by torch's own protocol, `__tensor_flatten__` and `__tensor_unflatten__`, what it is made of. Torch's
sparse and masked tensors do not have these methods, so this module says it for them. A DTensor is made of the inner
tensors of its local tensor.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

import torch

from ...errors import UnsupportedStateError
from ..slicing.sharded import StackedShard, is_dtensor, is_sharded, shards_of
from .names import Path, shown
from .plain import class_name

_PLAIN_TYPES: Final = frozenset({torch.Tensor, torch.nn.Parameter, torch.nn.Buffer})
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
    """The name of its class, or of its layout if it is sparse."""
    cls: type | None
    size: tuple[int | None, ...]
    """None for a size that is no number, as in a jagged tensor."""
    stride: tuple[int | None, ...] | None
    context: Any
    shards: tuple[tuple[int, int, int], ...] = ()
    """The cuts of a DTensor, as `shards_of` gives them."""


def taken_apart(tensor: Any, path: Path) -> tuple[Wrapper, dict[str, Any]] | None:
    """A tensor without its inner tensors, and these by name; None if it is not made of others.

    The inner tensors of a DTensor that is cut are `StackedShard`. Raises UnsupportedStateError, whose message begins
    with the name of `path`, if the class does not follow the protocol.
    """
    kind = type(tensor)
    if kind in _PLAIN_TYPES and tensor.layout is torch.strided:
        return None
    if isinstance(tensor, StackedShard):
        apart = taken_apart(tensor.inner, path)
        return apart and (apart[0], {inner: tensor._replace(inner=part) for inner, part in apart[1].items()})
    if is_dtensor(tensor):
        apart = taken_apart(tensor._local_tensor, path)
        if apart is None:
            return None
        wrapper = apart[0]._replace(
            size=_numbers(tensor.shape), stride=_numbers(tensor.stride()), shards=shards_of(tensor, shown(path))
        )
        return wrapper, {inner: StackedShard(tensor, part) for inner, part in apart[1].items()}
    if not isinstance(tensor, torch.Tensor) or is_sharded(tensor):
        return None
    if tensor.layout in _LAYOUTS.values() and kind in _PLAIN_TYPES:
        return _of_sparse(tensor)
    if _is_masked(kind):
        parts = {inner: getattr(tensor, inner) for inner in _MASKED}
        return Wrapper(class_name(kind), kind, _numbers(tensor.shape), None, None), parts
    return _of_subclass(tensor, shown(path)) if follows_protocol(kind) else None


def plain_parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The plain tensors on this rank that a tensor is made of: itself, if it is not made of others."""
    apart = taken_apart(tensor, ())
    if apart is None:
        yield getattr(tensor, "_local_tensor", tensor) if is_dtensor(tensor) else tensor
        return
    for part in apart[1].values():
        yield from plain_parts(part.inner if isinstance(part, StackedShard) else part)


def follows_protocol(kind: type) -> bool:
    """True for a class of tensors that says what its instances are made of.

    The result of a collective that may be under way says it, too, and has no values before somebody waits for it.
    """
    return (
        hasattr(kind, "__tensor_flatten__")
        and hasattr(kind, "__tensor_unflatten__")
        and kind.__qualname__ != "AsyncCollectiveTensor"
    )


def can_be_made(kind: type) -> bool:
    """True for a class of which `made` makes instances."""
    return issubclass(kind, torch.Tensor) and (follows_protocol(kind) or _is_masked(kind))


def is_sparse_layout(kind: str) -> bool:
    """True if a `Wrapper.kind` is the name of a sparse layout, so that no class is needed to make the tensor."""
    return kind in _LAYOUTS


def made(wrapper: Wrapper, inner: Mapping[str, Any]) -> Any:
    """The tensor of these inner tensors. Whether the indices of a sparse tensor fit its size is not checked.

    Raises whatever the class raises.
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
    """Check the indices of a sparse tensor, which kernels believe. Raises RuntimeError if they do not fit its size."""
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
        raise UnsupportedStateError(
            f"{name}: __tensor_flatten__ of {kind.__qualname__} failed ({type(error).__name__}: {error}); save the "
            "plain tensors that it wraps; nothing was written",
            path=name,
        ) from error
    for inner, part in parts.items():
        if not isinstance(inner, str) or not isinstance(part, torch.Tensor):
            raise UnsupportedStateError(
                f"{name}: __tensor_flatten__ of {kind.__qualname__} names {inner!r:.50}, which is no tensor but "
                f"{type(part).__qualname__}; save the plain tensors that it wraps; nothing was written",
                path=name,
            )
    return wrapper, parts


def _numbers(sizes: Any) -> tuple[int | None, ...]:
    return tuple(size if type(size) is int else None for size in sizes)


def _is_masked(kind: type) -> bool:
    masked = sys.modules.get("torch.masked.maskedtensor.core")
    return masked is not None and issubclass(kind, masked.MaskedTensor)
