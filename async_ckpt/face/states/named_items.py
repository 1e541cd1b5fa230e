"""A state split into tensors and arrays, which are read piece by piece, other values, and containers.

In: a state, whose leaves may be those of an archive. Out: items with paths. Knows nothing of: files.

All formats share this walk, so that a state has the same items in each of them. The items of a dict with plain keys,
and the fields of a dataclass, always have their own names; the items of a list, a tuple or a deque have names only if
it contains more than plain data.
"""

from __future__ import annotations

import copyreg
import json
import reprlib
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from math import prod
from typing import Any, Final, NamedTuple

import torch

from ...core.backends import is_host
from ...core.spec import DTYPES
from ...core.state.generators import SavedGenerator
from ...core.state.names import dotted, is_describable
from ...core.state.per_rank import ListItems
from ...core.state.plain import INLINE_BYTES, SCALARS, NotPlainError, class_name, fields_of, hashable_node, is_record
from ...core.state.tree import Encoder, OfClass, StoredLeaf, ValuesByRank

# The part of a tensor that is in memory at once.
CHUNK_BYTES: Final = 32 << 20
# More deeply nested containers are compared as a whole, since Python's stack is bounded.
_MAX_DEPTH: Final = 100
_SHOWN_LENGTH: Final = 200

Chunks = Callable[[], Iterator[torch.Tensor]]
Path = tuple[Any, ...]


class PathForm(IntEnum):
    """The extent to which a format keeps paths: as they are, with all keys as text, or as one dotted name."""

    EXACT = 0
    TEXT = 1  # torch.distributed.checkpoint
    FLAT = 2  # safetensors


class Unread(NamedTuple):
    """An object that was not unpickled. Objects with the same digest would be equal after unpickling."""

    digest: str


@dataclass(frozen=True, slots=True)
class NamedItem:
    """One name of a checkpoint. Its `kind` is one of:

    - "tensor", "array" or "bytes": `chunks` reads the items as flat tensors of `dtype`, in order. The chunks may share
      memory: a chunk is valid until the next one is requested. `facts` has the other properties of a tensor (class,
      requires_grad, attributes; None if the format stores none of these), or the dtype and shape of an array whose
      dtype torch lacks. A tensor without plain items, such as a sparse one, has a `value` instead of `chunks`.
    - "value": `value` is plain.
    - "object": `value` is not plain; an `Unread` if it was not unpickled.
    - "code": `value` is the text of a part of a program.
    - "empty": a container without items.
    """

    path: Path
    kind: str = "value"
    dtype: torch.dtype | None = None
    shape: tuple[int, ...] = ()
    chunks: Chunks | None = None
    value: Any = None
    facts: Any = None

    @property
    def name(self) -> str:
        return dotted(self.path)

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize if self.dtype is not None else 0


class Container(NamedTuple):
    """A container whose items have names: its class, and what it has besides the items, such as attributes."""

    path: Path
    of: str
    beside: Any


class Items(NamedTuple):
    """The items of a checkpoint in its order, and those containers around them that its format keeps."""

    leaves: Sequence[NamedItem]
    containers: Sequence[Container]
    naming: PathForm = PathForm.EXACT
    keeps_empty: bool = True


class ItemWalk:
    """One walk over a state, made by the function that opens it. `stored` adds the item of a leaf of an archive."""

    def __init__(self, stored: Callable[[ItemWalk, StoredLeaf, Path], None] | None = None) -> None:
        self.leaves: list[NamedItem] = []
        self.containers: list[Container] = []
        self._stored = stored
        self._open: set[int] = set()  # ids of the containers around the current value: one may contain itself

    def add(self, value: Any, path: Path = ()) -> None:
        """Add the items of a value."""
        if isinstance(value, SavedGenerator):
            value = value.made()
        if isinstance(value, StoredLeaf) and self._stored is not None:
            self._stored(self, value, path)
            return
        inside = None if id(value) in self._open or len(path) > _MAX_DEPTH else _inside(value)
        if inside is None:
            self.leaves.append(leaf_item(value, path))
            return
        self.containers.append(Container(path, inside.of, inside.beside))
        if not inside.items:
            self.leaves.append(NamedItem(path, "empty"))
            return
        self._open.add(id(value))
        for key, item in inside.items:
            self.add(item, (*path, key))
        self._open.discard(id(value))


# --- containers ---------------------------------------------------------------------------------------------------


class _Inside(NamedTuple):
    of: str
    beside: Any
    items: Sequence[tuple[Any, Any]]


def _inside(value: Any) -> _Inside | None:
    """The items of a container if they have names; None for any other value."""
    kind = type(value)
    if isinstance(value, torch.nn.Module):
        return _inside_module(value)
    if isinstance(value, OfClass):
        items = value.value.items() if isinstance(value.value, dict) else enumerate(value.value if value.fields else ())
        is_leaf = not isinstance(value.value, dict) and (not value.fields or node_of(value) is not None)
        return None if is_leaf else _Inside(value.name, value.fields or None, [*items])
    if isinstance(value, ValuesByRank):
        return _Inside("values of ranks", None, [(f"rank {rank}", one) for rank, one in value.values.items()])
    if isinstance(value, dict):
        if not all(map(_is_plain_key, value)):
            return None
        return _Inside("list" if kind is ListItems else shown_class(kind), beside_items(value), [*value.items()])
    if isinstance(value, list | tuple | deque):
        if node_of(value) is not None:
            return None
        return _Inside(shown_class(kind), beside_items(value), [*enumerate(value)])
    if isinstance(value, type) or not is_record(value):
        return None
    return _Inside(class_name(kind), None, [*fields_of(value).items()])


def beside_items(value: Any) -> Any:
    """The data of a container besides its items: attributes, and arguments of the standard library's containers."""
    kind = type(value)
    if kind in (dict, list, tuple):
        return None
    attributes = attributes_of(value)
    if isinstance(value, OrderedDict) and isinstance(attributes.get("_metadata"), dict):
        # An archive stores the versions of modules as a plain dict.
        attributes["_metadata"] = dict(attributes["_metadata"])
    if isinstance(value, deque):
        return value.maxlen, attributes
    if isinstance(value, defaultdict):
        return value.default_factory, attributes
    fields = getattr(kind, "_fields", None)
    return tuple(fields) if isinstance(fields, tuple | list) else attributes or None


def attributes_of(value: Any) -> dict[str, Any]:
    """The attributes of an instance, including those in slots."""
    try:
        attributes = dict(object.__getattribute__(value, "__dict__"))
    except AttributeError:
        attributes = {}
    for name in copyreg._slotnames(type(value)):  # type: ignore[attr-defined]
        try:
            attributes[name] = object.__getattribute__(value, name)
        except AttributeError:
            continue
    return attributes


def _inside_module(module: torch.nn.Module) -> _Inside | None:
    """The parameters and buffers of a module by their names in its state dict, and all its other attributes."""
    items: list[tuple[str, Any]] = []
    beside: dict[str, Any] = {}
    try:
        _add_module(module, "", items, beside, frozenset())
    except Exception:
        return None
    return _Inside(class_name(type(module)), beside, items)


def _add_module(
    module: torch.nn.Module,
    prefix: str,
    items: list[tuple[str, Any]],
    beside: dict[str, Any],
    inside: frozenset[int],
) -> None:
    attributes = attributes_of(module)
    own = {name: attributes.pop(name) for name in ("_parameters", "_buffers", "_modules")}
    tensors = own["_parameters"] | own["_buffers"]
    items += [(f"{prefix}{name}", tensor) for name, tensor in tensors.items() if tensor is not None]
    # A class with its own way of pickling, such as a traced program, does not restore its attributes from `__dict__`,
    # so these are not compared.
    is_plain = type(module).__reduce__ is object.__reduce__ and type(module).__reduce_ex__ is object.__reduce_ex__
    missing = [name for name, tensor in tensors.items() if tensor is None]
    beside[prefix] = (type(module), missing, attributes) if is_plain else (missing, module.__reduce_ex__(4))
    for name, child in own["_modules"].items():
        if child is None or id(child) in inside:
            beside[f"{prefix}{name}."] = child if child is None else "a module around it"
        else:
            _add_module(child, f"{prefix}{name}.", items, beside, inside | {id(module)})


# --- leaves -------------------------------------------------------------------------------------------------------


def leaf_item(value: Any, path: Path) -> NamedItem:
    """The item of a value that has no named items."""
    if isinstance(value, torch.Tensor):
        return _tensor_item(value, path)
    numpy = sys.modules.get("numpy")
    if numpy is not None and type(value) in (numpy.ndarray, numpy.memmap) and is_describable(value.dtype):
        return _array_item(numpy, value, path)
    if type(value) is bytes and len(value) >= INLINE_BYTES:
        return NamedItem(path, "bytes", torch.uint8, (len(value),), lambda: _pieces_of_bytes(value))
    return NamedItem(path, "object" if node_of(value) is None else "value", value=value)


def _tensor_item(tensor: torch.Tensor, path: Path) -> NamedItem:
    facts = (type(tensor), tensor.requires_grad, attributes_of(tensor))
    if not has_items(tensor):
        return NamedItem(path, "tensor", tensor.dtype, shape_of(tensor), None, tensor, facts)
    return NamedItem(path, "tensor", tensor.dtype, shape_of(tensor), lambda: pieces(tensor), tensor, facts)


def shape_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """The shape of a tensor; empty for a nested or lazy tensor, whose shape is not known."""
    try:
        return tuple(map(int, tensor.shape))
    except Exception:
        return ()


def kind_of_tensor(tensor: torch.Tensor) -> str:
    """A word for a tensor without plain items."""
    if tensor.is_meta:
        return "meta"
    if tensor.is_nested:
        return "nested"
    if tensor.is_quantized:
        return "quantised"
    return "wrapper" if tensor.layout is torch.strided else str(tensor.layout).removeprefix("torch.")


def has_items(tensor: torch.Tensor) -> bool:
    """True if the items of a tensor are in its own memory, dense or strided."""
    kind = type(tensor)
    if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ or torch.nn.parameter.is_lazy(tensor):
        return False
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized or not is_host(tensor.device):
        return False
    if not tensor.numel():
        return True
    last = tensor.storage_offset() + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    try:
        return (last + 1) * tensor.dtype.itemsize <= tensor.untyped_storage().nbytes() and tensor.data_ptr() != 0
    except RuntimeError:  # no storage
        return False


def plain_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The same items as a plain tensor, without gradients."""
    plain = tensor.detach()
    return plain if type(plain) is torch.Tensor else plain.as_subclass(torch.Tensor)


def pieces(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The items of a tensor in row-major order, as flat dense tensors of at most 32 MiB."""
    plain = plain_tensor(tensor).resolve_conj().resolve_neg()
    return _pieces(plain, max(1, CHUNK_BYTES // plain.dtype.itemsize))


def _pieces(tensor: torch.Tensor, num_items: int) -> Iterator[torch.Tensor]:
    if not tensor.numel():
        return
    if tensor.is_contiguous():
        yield from tensor.view(-1).split(num_items)
    elif tensor.numel() <= num_items:
        yield tensor.contiguous().view(-1)
    else:  # a dense copy of an expanded tensor may be far larger than the file
        num_rows = max(1, num_items // (tensor.numel() // len(tensor)))
        for begin in range(0, len(tensor), num_rows):
            rows = tensor[begin : begin + num_rows]
            yield from _pieces(rows if rows.numel() <= num_items else rows[0], num_items)


def side_by_side(
    left: Iterator[torch.Tensor], right: Iterator[torch.Tensor]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The items of two tensors in pieces of equal lengths, until one tensor ends."""
    a = b = torch.empty(0)
    while True:
        a = a if len(a) else next(left, a)
        b = b if len(b) else next(right, b)
        count = min(len(a), len(b))
        if not count:
            return
        yield a[:count], b[:count]
        a, b = a[count:], b[count:]


def _array_item(numpy: Any, array: Any, path: Path) -> NamedItem:
    """The item of a numpy array, in the same form as the item of an archive."""
    flat = numpy.ascontiguousarray(array).reshape(-1)
    raw = flat.view(numpy.uint8) if array.size and array.dtype.itemsize else numpy.empty(0, "u1")
    name = array.dtype.name
    if name in DTYPES and array.dtype.isnative and not array.dtype.names:
        dtype: torch.dtype = getattr(torch, name)
        return NamedItem(path, "array", dtype, array.shape, lambda: _pieces_of_bytes(raw, dtype))
    facts = described(numpy.lib.format.dtype_to_descr(array.dtype), array.shape)
    return NamedItem(path, "array", torch.uint8, (raw.size,), lambda: _pieces_of_bytes(raw), facts=facts)


def described(descr: Any, shape: Iterable[int]) -> str:
    """The dtype and shape of an array that is stored as bytes, as text."""
    return json.dumps([descr, [*shape]])


def _pieces_of_bytes(data: Any, dtype: torch.dtype = torch.uint8) -> Iterator[torch.Tensor]:
    view = memoryview(data).cast("B")
    for begin in range(0, len(view), CHUNK_BYTES):
        yield torch.frombuffer(bytearray(view[begin : begin + CHUNK_BYTES]), dtype=dtype)


# --- plain values -------------------------------------------------------------------------------------------------


class _Nodes(Encoder):
    """Encodes plain values as JSON that is the same for equal values, regardless of the order of a dict.

    Unlike an archive, it does not treat an instance of a subclass as one of its base.
    """

    def __init__(self) -> None:
        super().__init__(_refuse, contents=_refuse)

    def encode(self, value: Any, path: Path = ()) -> Any:
        kind = type(value)
        if kind in SCALARS:
            return super().encode(value, path)
        if isinstance(value, StoredLeaf | ValuesByRank | torch.Tensor | torch.nn.Module):
            _refuse(value, path)
        is_subclass = isinstance(value, dict | list | tuple) and kind not in (
            dict, OrderedDict, ListItems, list, tuple, torch.Size,
        )  # fmt: skip
        if is_subclass and not (isinstance(value, tuple) and hasattr(kind, "_fields")):
            _refuse(value, path)
        if kind is OrderedDict and attributes_of(value).keys() - {"_metadata"}:
            _refuse(value, path)
        return super().encode(value, path)

    def _entries(self, value: Any, path: Path) -> Any:
        return sorted(super()._entries(value, path), key=lambda entry: json.dumps(entry[0]))


def _refuse(value: Any, _path: Path) -> Any:
    raise NotPlainError(value)


def node_of(value: Any) -> str | None:
    """A plain value as JSON, which is the same only for equal values; None for a value that is not plain."""
    try:
        return json.dumps(_Nodes().encode(value))
    except Exception:
        return None


def _is_plain_key(key: Any) -> bool:
    if type(key) is str:
        return True
    try:
        hashable_node(key)
    except Exception:
        return False
    return True


def typed(path: Path) -> Path:
    """A path that is equal only to paths of identical keys: 0 differs from "0", and 1 from True."""
    return tuple(key if type(key) is str else (json.dumps(hashable_node(key)),) for key in path)


# --- for people ---------------------------------------------------------------------------------------------------


class _Short(reprlib.Repr):
    """Texts of values, of bounded length for any value. A `repr` that raises is replaced."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = self.maxlong = _SHOWN_LENGTH
        self.maxlist = self.maxtuple = self.maxset = self.maxfrozenset = self.maxdeque = self.maxdict = 20


_SHORT: Final = _Short()


def shown_value(value: Any) -> str:
    """A short text for a value that is not a tensor."""
    if isinstance(value, Unread | StoredLeaf):
        return "an object that is not unpickled"
    if isinstance(value, OfClass):
        return f"{value.name.rpartition('.')[2]}({shown_value(value.value)})"
    return " ".join(_SHORT.repr(value).split())[:_SHOWN_LENGTH]


def shown_class(kind: type) -> str:
    return class_name(kind).removeprefix("builtins.")
