"""Tensors that are made of others: a wrapper subclass of the tests' own, and what any tensor is made of."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch


class Rounding(Enum):
    NEAREST = "nearest"
    DOWN = "down"


@dataclass(frozen=True)
class Scheme:
    """How `Scaled` was made: the part of its context that is neither text nor a number."""

    rounding: Rounding = Rounding.NEAREST
    dtype: torch.dtype = torch.float32


class Scaled(torch.Tensor):
    """`codes` times `scale`, row by row, by torch's protocol for wrapper subclasses."""

    codes: torch.Tensor
    scale: torch.Tensor
    context: Any
    is_cut_by_rows = False

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor, context: Any = None) -> Scaled:
        made: Scaled = torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32, device=codes.device)
        made.codes, made.scale, made.context = codes, scale, {"bits": 8} if context is None else context
        return made

    def __init__(self, *_: Any) -> None: ...

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scale"], self.context

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, torch.Tensor], context: Any, _size: Any, _stride: Any) -> Scaled:
        return cls(inner["codes"], inner["scale"], context)

    def dequantised(self) -> torch.Tensor:
        codes = self.codes.dequantised() if isinstance(self.codes, Scaled) else self.codes
        return codes.float() * self.scale

    def __repr__(self, **_: Any) -> str:
        return f"Scaled({self.codes}, {self.scale})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def each(one: Any, call: Any) -> Any:
            return cls(call(one.codes), call(one.scale), one.context)

        if func in (torch.ops.aten.detach.default, torch.ops.aten.clone.default, torch.ops.aten.alias.default):
            return each(args[0], func)
        if func is torch.ops.aten._to_copy.default:
            return each(args[0], lambda part: part.to(kwargs.get("device")))
        if func is torch.ops.aten.slice.Tensor and args[0].is_cut_by_rows and (len(args) == 1 or args[1] == 0):
            return each(args[0], lambda part: func(part, *args[1:], **(kwargs or {})))
        plain = [arg.dequantised() if isinstance(arg, Scaled) else arg for arg in args]
        result = func(*plain, **(kwargs or {}))
        if func.overloadpacket.__name__.endswith("_"):  # in place: the codes are the values, the scale is one
            args[0].codes.copy_(result.round())
            args[0].scale.fill_(1.0)
            return args[0]
        return result


class Rows(Scaled):
    """A class that can be cut by rows, as it says by its slices."""

    is_cut_by_rows = True


class Axis(Rows):
    """A class with one scale for each row, for each column, or for all: its context says which, and not its shapes."""

    def dequantised(self) -> torch.Tensor:
        return self.codes.float() * (self.scale[:, None] if self.context == "row" else self.scale)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_slice = func is torch.ops.aten.slice.Tensor and (len(args) == 1 or args[1] == 0)
        if is_slice and args[0].context != "row":
            return cls(func(args[0].codes, *args[1:]), args[0].scale, args[0].context)
        return super().__torch_dispatch__(func, types, args, kwargs)


def scaled(*shape: int, seed: int = 0, context: Any = None) -> Scaled:
    made = torch.Generator().manual_seed(seed)
    codes = torch.randint(-128, 128, shape, dtype=torch.int8, generator=made)
    return Scaled(codes, torch.rand(shape[0], *(1,) * (len(shape) - 1), generator=made), context)


def inner_tensors(tensor: Any) -> Iterator[torch.Tensor]:
    """The plain tensors that a tensor is made of, as torch itself says."""
    if hasattr(tensor, "__tensor_flatten__"):
        for name in tensor.__tensor_flatten__()[0]:
            yield from inner_tensors(getattr(tensor, name))
    elif hasattr(tensor, "_masked_data"):
        yield from inner_tensors(tensor._masked_data)
        yield from inner_tensors(tensor._masked_mask)
    elif tensor.layout is torch.sparse_coo:
        yield from (tensor._indices(), tensor._values())
    elif tensor.layout is torch.strided:
        yield tensor
    else:
        rows = tensor.layout in (torch.sparse_csr, torch.sparse_bsr)
        yield from (
            (tensor.crow_indices(), tensor.col_indices()) if rows else (tensor.ccol_indices(), tensor.row_indices())
        )
        yield tensor.values()


def bytes_in(tensor: Any) -> list[bytes]:
    """The bytes of each plain tensor that a tensor is made of."""
    return [part.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes() for part in inner_tensors(tensor)]
