"""The equality of two objects of any class, by type and content, part by part.

In: two objects. Out: whether they are equal, different, or cannot be compared. Knows nothing of: files, names.

Objects are compared by what pickle would write: class, arguments, attributes and items. The `__eq__` of a class is
never called, since it may ignore any part. Numbers are compared by their bits: 1 differs from 1.0, and NaN is equal to
the same NaN. The order of dicts and sets does not count, and neither does the sharing of parts.
"""

from __future__ import annotations

import copyreg
import struct
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from typing import Any, Final, TypeAlias

import torch

from ....plumbing import states

# Comparing objects that create new parts on each access would never end.
_MAX_PAIRS: Final = 50_000_000
# A set with more items of other than plain types is not compared, since each item is compared with all others.
_MAX_SEARCHED: Final = 300
# Pairs of parts that must be equal.
_Pairs: TypeAlias = Iterable[tuple[Any, Any]]


class Equality(Enum):
    EQUAL = "equal"
    DIFFERENT = "different"
    UNKNOWN = "not compared"


class _DifferentError(Exception):
    """The two are not equal."""


class _UnknownError(Exception):
    """The two cannot be compared."""


def equality(a: Any, b: Any) -> Equality:
    """Whether two objects are equal. Runs code of their classes that defines how they are pickled."""
    stack: list[Iterator[tuple[Any, Any]]] = [iter([(a, b)])]
    seen: dict[tuple[int, int], tuple[Any, Any]] = {}  # keeps the objects alive, so that no other object gets their ids
    is_known, num_pairs = True, 0
    while stack:
        try:
            pair = next(stack[-1], None)
            if pair is None:
                stack.pop()
                continue
            left, right = pair
            num_pairs += 1
            if left is right or (type(left) in _BITS and _same_bits(left, right)):
                continue
            key = id(left), id(right)
            if key in seen:
                continue
            if num_pairs > _MAX_PAIRS:
                return Equality.UNKNOWN
            seen[key] = pair
            stack.append(iter(_parts(left, right)))
        except _DifferentError:
            return Equality.DIFFERENT
        except Exception:
            is_known = False
    return Equality.EQUAL if is_known else Equality.UNKNOWN


# --- bits ---------------------------------------------------------------------------------------------------------

_BITS: Final[dict[type, Callable[[Any], Any]]] = {
    bool: lambda value: value,
    int: lambda value: value,
    str: lambda value: value,
    bytes: lambda value: value,
    bytearray: lambda value: value,
    float: lambda value: struct.pack("<d", value),
    complex: lambda value: struct.pack("<dd", value.real, value.imag),
}


def _same_bits(a: Any, b: Any) -> bool:
    """True for equal values of a type in `_BITS`. Raises _DifferentError for others."""
    bits = _BITS[type(a)]
    if type(a) is not type(b) or bits(a) != bits(b):
        raise _DifferentError
    return True


# --- parts --------------------------------------------------------------------------------------------------------


def _parts(a: Any, b: Any) -> _Pairs:
    """Pairs of parts of two objects that must be equal. Raises _DifferentError and _UnknownError."""
    kind, other = type(a), type(b)
    if kind is not other:
        if states.class_name(kind) != states.class_name(other):
            raise _DifferentError
        return [(kind, other), *_parts_of_one_kind(a, b)]
    return _parts_of_one_kind(a, b)


def _parts_of_one_kind(a: Any, b: Any) -> _Pairs:
    find = next((find for is_of, find in _PARTS if isinstance(a, is_of)), None)
    if find is not None:
        return find(a, b)
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(a, numpy.ndarray):
        return _parts_of_arrays(numpy, a, b)
    if numpy is not None and isinstance(a, numpy.generic):
        return [(a.dtype, b.dtype), (numpy.asarray(a), numpy.asarray(b))]
    if numpy is not None and isinstance(a, numpy.dtype):
        return _same(a == b, (dict(a.metadata or {}), dict(b.metadata or {})))
    return _parts_by_pickling(a, b)


def _same(is_same: bool, *pairs: tuple[Any, Any]) -> _Pairs:
    """Return these pairs if `is_same`, else raise _DifferentError."""
    if not is_same:
        raise _DifferentError
    return pairs


def _parts_of_sequences(a: Any, b: Any) -> _Pairs:
    if type(a) not in (list, tuple, torch.Size, deque):
        return _parts_by_pickling(a, b)
    is_same = len(a) == len(b) and getattr(a, "maxlen", None) == getattr(b, "maxlen", None)
    return _same(is_same, *zip(a, b, strict=False))


def _parts_of_dicts(a: Any, b: Any) -> _Pairs:
    plain_a, others_a = _by_plain_key(a)
    plain_b, others_b = _by_plain_key(b)
    if plain_a.keys() != plain_b.keys() or len(others_a) != len(others_b):
        raise _DifferentError
    others = [*zip(others_a, others_b, strict=True)]
    if any(equality(left, right) is not Equality.EQUAL for left, right in others):
        raise _UnknownError  # they may be equal in another order
    yield states.beside_items(a), states.beside_items(b)
    yield from ((item, plain_b[key]) for key, item in plain_a.items())
    yield from ((a[left], b[right]) for left, right in others)


def _by_plain_key(items: Any) -> tuple[dict[Any, Any], list[Any]]:
    """The values of plain keys, by a form that no other key has, and the list of the other keys."""
    plain: dict[Any, Any] = {}
    others: list[Any] = []
    for key in items:
        try:
            plain[states.typed((key,))] = items[key] if isinstance(items, dict) else None
        except Exception:
            others.append(key)
    return plain, others


def _parts_of_sets(a: Any, b: Any) -> _Pairs:
    plain_a, others_a = _by_plain_key(a)
    plain_b, others_b = _by_plain_key(b)
    if plain_a.keys() != plain_b.keys() or len(others_a) != len(others_b):
        raise _DifferentError
    if len(others_a) > _MAX_SEARCHED:
        raise _UnknownError
    for item in others_a:
        found = [equality(item, other) for other in others_b]
        if Equality.EQUAL not in found:
            raise _UnknownError if Equality.UNKNOWN in found else _DifferentError
        del others_b[found.index(Equality.EQUAL)]
    return [(states.attributes_of(a), states.attributes_of(b))]


def _parts_of_classes(a: Any, b: Any) -> _Pairs:
    """The parts of two classes of the same name, each created while its file was read."""
    if states.class_name(a) != states.class_name(b):
        raise _DifferentError
    if issubclass(a, torch.fx.GraphModule):  # each instance has its own class; the code is in its attributes
        return ()
    members = [{name: item for name, item in vars(cls).items() if name not in _OF_CLASS} for cls in (a, b)]
    return [(a.__bases__, b.__bases__), (members[0], members[1])]


def _parts_of_functions(a: Any, b: Any) -> _Pairs:
    """The parts of two functions that were pickled with their code, as cloudpickle does."""
    if (a.__module__, a.__qualname__, a.__code__) != (b.__module__, b.__qualname__, b.__code__):
        raise _DifferentError
    yield from [(a.__defaults__, b.__defaults__), (a.__kwdefaults__, b.__kwdefaults__), (vars(a), vars(b))]
    for left, right in zip(a.__closure__ or (), b.__closure__ or (), strict=True):
        yield left.cell_contents, right.cell_contents
    for name in a.__code__.co_names:
        yield a.__globals__.get(name), b.__globals__.get(name)


def _parts_by_pickling(a: Any, b: Any) -> _Pairs:
    """The parts of two objects that pickle would write. Raises the error of an object that cannot be pickled."""
    left, right = _pickled(a), _pickled(b)
    if isinstance(left, str) or isinstance(right, str):  # the name of an object in a module
        return _same(left == right and getattr(a, "__module__", None) == getattr(b, "__module__", None))
    return zip(left, right, strict=True)


def _pickled(value: Any) -> Any:
    """The name of an object in its module, or its six-part reduced value; see `object.__reduce__`."""
    reduce = copyreg.dispatch_table.get(type(value))
    reduced: Any = reduce(value) if reduce is not None else value.__reduce_ex__(4)
    if isinstance(reduced, str):
        return reduced
    function, arguments, state, listed, entries, setter = [*reduced, None, None, None, None][:6]
    listed, entries = None if listed is None else [*listed], None if entries is None else dict(entries)
    return function, arguments, state, listed, entries, setter


# --- tensors ------------------------------------------------------------------------------------------------------


def _parts_of_tensors(a: torch.Tensor, b: torch.Tensor) -> _Pairs:
    kind = type(a)
    if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return _parts_of_wrappers(a, b)
    if torch.nn.parameter.is_lazy(a):
        return _parts_by_pickling(a, b)
    facts = [(one.dtype, one.layout, one.is_meta, one.requires_grad, one.is_quantized, one.is_nested) for one in (a, b)]
    if facts[0] != facts[1] or states.shape_of(a) != states.shape_of(b):
        raise _DifferentError
    plain = [states.plain_tensor(one) for one in (a, b)]
    return [(states.attributes_of(a), states.attributes_of(b)), tuple(map(_items_of, plain))]


def _parts_of_wrappers(a: Any, b: Any) -> _Pairs:
    """The parts of tensors that wrap other tensors, from `__tensor_flatten__` or from pickling."""
    kind: Any = type(a)
    if kind.__reduce_ex__ is not torch.Tensor.__reduce_ex__ or not hasattr(kind, "__tensor_flatten__"):
        return _parts_by_pickling(a, b)
    (names, context), (other_names, other_context) = a.__tensor_flatten__(), b.__tensor_flatten__()
    rest = [{n: item for n, item in states.attributes_of(one).items() if n not in names} for one in (a, b)]
    inner = [[getattr(one, name) for name in names] for one in (a, b)]
    shapes = [(one.dtype, one.shape, one.requires_grad) for one in (a, b)]
    return [(names, other_names), (context, other_context), *(tuple(two) for two in (rest, inner, shapes))]


class _Bits:
    """The items of a dense tensor, which are compared bit by bit."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def _items_of(tensor: torch.Tensor) -> Any:
    """The parts of a plain tensor of any layout that make up its items. Raises _UnknownError if they cannot be read."""
    if tensor.is_meta:
        return None  # a meta tensor has no items
    if tensor.is_nested:
        return [*tensor.unbind()]
    if tensor.is_quantized:
        return _quantised(tensor)
    if tensor.layout is torch.sparse_coo:
        return tensor.is_coalesced(), tensor._indices(), tensor._values()
    if tensor.layout in _COMPRESSED:
        return [getattr(tensor, name)() for name in _COMPRESSED[tensor.layout]]
    if not states.has_items(tensor):
        raise _UnknownError
    return _Bits(tensor)


def _quantised(tensor: torch.Tensor) -> Any:
    scheme = tensor.qscheme()
    if scheme in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        return scheme, tensor.q_scale(), tensor.q_zero_point(), tensor.int_repr()
    scales, zeros = tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points()
    return scheme, scales, zeros, tensor.q_per_channel_axis(), tensor.int_repr()


def _parts_of_bits(a: _Bits, b: _Bits) -> _Pairs:
    for left, right in states.side_by_side(states.pieces(a.tensor), states.pieces(b.tensor)):
        if not torch.equal(left.view(torch.uint8), right.view(torch.uint8)):
            raise _DifferentError
    return ()


def _parts_of_storages(a: Any, b: Any) -> _Pairs:
    if isinstance(a, torch.TypedStorage):
        return _same(a.dtype == b.dtype, (a._untyped_storage, b._untyped_storage))
    left, right = (torch.empty(0, dtype=torch.uint8).set_(one) for one in (a, b))
    return [(left, right)]


# --- arrays of numpy ----------------------------------------------------------------------------------------------


def _parts_of_arrays(numpy: Any, a: Any, b: Any) -> _Pairs:
    if a.shape != b.shape:
        raise _DifferentError
    yield a.dtype, b.dtype
    if type(a) not in (numpy.ndarray, numpy.memmap):
        yield states.attributes_of(a), states.attributes_of(b)  # such as the mask of a masked array
        a, b = a.view(numpy.ndarray), b.view(numpy.ndarray)
    if a.dtype != b.dtype:
        return
    if a.dtype.names is not None:  # field by field: padding between fields does not count
        yield from ((a[name], b[name]) for name in a.dtype.names)
    elif a.dtype.hasobject or a.dtype.char == "T":  # texts of variable length are stored elsewhere, like objects
        yield a.ravel().tolist(), b.ravel().tolist()
    elif a.size and a.dtype.itemsize:
        left, right = (_Bits(torch.from_numpy(_bytes_of(numpy, one).copy())) for one in (a, b))
        yield left, right


def _bytes_of(numpy: Any, array: Any) -> Any:
    """The bytes of an array's items, without the undefined padding of x87 long doubles."""
    raw = numpy.ascontiguousarray(array).reshape(-1).view(numpy.uint8)
    if array.dtype.char in "gG" and numpy.finfo(numpy.longdouble).nmant == _X87_MANTISSA:
        return raw.reshape(-1, numpy.dtype(numpy.longdouble).itemsize)[:, :_X87_BYTES].reshape(-1)
    return raw


# --- the parts of each class --------------------------------------------------------------------------------------

_X87_MANTISSA: Final = 63
_X87_BYTES: Final = 10
_COMPRESSED: Final = {
    **dict.fromkeys((torch.sparse_csr, torch.sparse_bsr), ("crow_indices", "col_indices", "values")),
    **dict.fromkeys((torch.sparse_csc, torch.sparse_bsc), ("ccol_indices", "row_indices", "values")),
}
# Attributes that are not compared: each class object has its own.
_OF_CLASS: Final = frozenset({"__dict__", "__weakref__", "__doc__", "__module__", "__qualname__"})
# The order matters: an enum's member may also be a tuple.
_PARTS: Final[tuple[tuple[Any, Callable[[Any, Any], _Pairs]], ...]] = (
    (_Bits, _parts_of_bits),
    (torch.Tensor, _parts_of_tensors),
    ((torch.UntypedStorage, torch.TypedStorage), _parts_of_storages),
    (torch.Generator, lambda a, b: _same(a.device == b.device, (a.get_state(), b.get_state()))),
    ((torch.dtype, torch.device, torch.layout, torch.memory_format, torch.qscheme), lambda a, b: _same(a == b)),
    (Enum, lambda a, b: [(a.name, b.name), (a.value, b.value)]),
    (type, _parts_of_classes),
    (types.FunctionType, _parts_of_functions),
    (types.MethodType, lambda a, b: [(a.__func__, b.__func__), (a.__self__, b.__self__)]),
    (
        types.BuiltinFunctionType,
        lambda a, b: [((a.__module__, a.__qualname__), (b.__module__, b.__qualname__)), (a.__self__, b.__self__)],
    ),
    (dict, _parts_of_dicts),
    ((set, frozenset), _parts_of_sets),
    ((list, tuple, deque), _parts_of_sequences),
)
