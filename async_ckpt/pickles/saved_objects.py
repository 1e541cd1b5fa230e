"""Leaves that are not plain data, read back from what `torch.save` made of them, or from what pretends to be that.

In: bytes that may be anybody's. Out: the objects, or a refusal before they take more memory than those bytes justify.
Knows nothing of: archives, files.

torch's weights-only unpickler calls only functions that it knows, but those allocate what the file says:
`bytearray(2**40)` is thirty bytes of pickle, and one more copy of something large is five. So each pickle is first
interpreted on a stack like that unpickler's, where a call is judged by its arguments instead of being made. The records
that were checked are then written to a new zip, so that torch reads exactly those.
"""

from __future__ import annotations

import io
import math
import pickle
import zipfile
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final, NoReturn

import torch

from ..collector import no_collection
from ..spec import DTYPES, with_article
from .machine import PROTOCOL_2, PickleMachine

# What may be copied, in items and characters: so many for each byte of the pickle, and some besides. `torch.save` writes
# out all that loading copies, so an honest pickle needs one for each byte at most.
_ITEMS_PER_BYTE: Final = 4
_FREE_ITEMS: Final = 1 << 16
# Python hashes nested tuples by recursion, and crashes when they are nested too deeply. It does not pickle deeper ones.
_MAX_DEPTH: Final = 1000
_MAX_DIMS: Final = 64

_ITEM_BYTES: Final = {
    "torch.storage.UntypedStorage": 1,
    **{
        f"torch.{name}Storage": item_bytes
        for item_bytes, names in {
            1: "Byte Char Bool QInt8 QUInt8 QUInt4x2 QUInt2x4",
            2: "Short Half BFloat16",
            4: "Int Float QInt32",
            8: "Long Double ComplexFloat",
            16: "ComplexDouble",
        }.items()
        for name in names.split()
    },
}


def load(data: bytes, *, trust: bool) -> Any:
    """The object that `torch.save` wrote as these bytes. With `trust`, any pickle is run.

    Without it, raises pickle.UnpicklingError for an object that requires trust, naming it, and other errors for bytes that
    `torch.save` never writes.
    """
    if trust:
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)
    found = records(data)
    with no_collection():
        _Survey(found).run()
        return torch.load(io.BytesIO(_zipped(found)), map_location="cpu", weights_only=True)


def records(data: bytes) -> dict[str, bytes]:
    """The records that loading takes, by their names within their folder."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        infos = archive.infolist()
        if any(info.compress_type != zipfile.ZIP_STORED for info in infos):
            raise ValueError("a record is compressed")
        if sum(info.file_size for info in infos) > len(data):
            raise ValueError("its records are larger than all of it")
        found = {info.filename.partition("/")[2]: info for info in infos}
        if len(found) < len(infos):
            raise ValueError("two records have one name")
        return {name: archive.read(info) for name, info in found.items() if _is_read(name)}


def _is_read(name: str) -> bool:
    return name in ("data.pkl", "version", "byteorder") or name.startswith("data/")


def _zipped(records: Mapping[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, data in records.items():
            archive.writestr(f"archive/{name}", data)
    return buffer.getvalue()


# --- what stands on the stack for what would be made ---------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Global:
    """A class or function, by the name that Python 3 has for it."""

    name: str


@dataclass(frozen=True, slots=True)
class _PickledStorage:
    num_bytes: int
    item_bytes: int


@dataclass(frozen=True, slots=True)
class _Tensor:
    num_items: int
    is_expanded: bool  # it has more items than its storage


@dataclass(frozen=True, slots=True)
class _Bytes:
    num_items: int


class _Made:
    """Anything else."""


_MADE: Final = _Made()


class _Dict(list[Any]):
    """The keys of a dict, of which none is hashed."""

    __slots__ = ()


class _NestedTuple(tuple[Any, ...]):
    """A tuple that holds tuples, and knows what hashing it takes: all that it holds is gone through, as often as it is there."""

    depth: int
    num_hashed: int


def _depth(items: tuple[Any, ...]) -> int:
    return items.depth if isinstance(items, _NestedTuple) else 1


def _num_hashed(items: tuple[Any, ...]) -> int:
    return items.num_hashed if isinstance(items, _NestedTuple) else 1 + len(items)


class _Survey(PickleMachine):
    """Follows a pickle as torch's weights-only unpickler does, and judges each call by its arguments instead of making it."""

    accepted: ClassVar = PROTOCOL_2
    protocols: ClassVar = range(2, 3)

    def __init__(self, records: Mapping[str, bytes]) -> None:
        super().__init__()
        self._records = records
        self._left = _FREE_ITEMS + _ITEMS_PER_BYTE * len(records["data.pkl"])
        self._left_of_tensors = sum(map(len, records.values()))
        self._known = _registered()

    def run(self) -> None:
        self.follow(self._records["data.pkl"])

    def spend(self, num_items: int) -> None:
        self._left -= num_items
        if self._left < 0:
            raise ValueError("it makes far more than it holds")

    def spend_on_tensor(self, num_items: int) -> None:
        self._left_of_tensors -= num_items
        if self._left_of_tensors < 0:
            raise ValueError("it copies tensors again and again")

    # --- what is made -----------------------------------------------------------------------------------------

    def refuse(self, instruction: str) -> NoReturn:
        raise pickle.UnpicklingError(f"Unsupported operand {instruction}")

    def named(self, module: str, name: str) -> _Global:
        if (module, name) in NAME_MAPPING:
            module, name = NAME_MAPPING[module, name]
        else:
            module = IMPORT_MAPPING.get(module, module)
        return _Global(f"{module}.{name}")

    def empty_dict(self) -> _Dict:
        return _Dict()

    def empty_set(self) -> _Made:
        return _MADE

    def set_items(self, into: Any, items: list[Any]) -> None:
        if not isinstance(into, _Dict):
            raise ValueError("it sets items of what is not a dict")
        for key in items[::2]:
            self.hash(key)
        into += items[::2]

    def tuple_of(self, items: Iterable[Any]) -> tuple[Any, ...]:
        inner = [item for item in items if isinstance(item, tuple)]
        if not inner:
            return tuple(items)
        made = _NestedTuple(items)
        made.depth = 1 + max(map(_depth, inner))
        if made.depth > _MAX_DEPTH:
            raise ValueError("a tuple is nested too deeply")
        # Not beyond what is refused: twice the same tuple, twice that, and so on, is a number of any length.
        made.num_hashed = min(1 + len(made) + sum(map(_num_hashed, inner)), self._left + 1)
        return made

    def hash(self, key: Any) -> None:
        if isinstance(key, tuple):
            self.spend(_num_hashed(key))

    def persistent(self, key: Any) -> _PickledStorage:
        word, kind, name, _, num_items = key
        item_bytes = _ITEM_BYTES[kind.name]
        if (
            word != "storage"
            or not isinstance(name, str)
            or not name.isdecimal()
            or type(num_items) is not int
        ):
            raise ValueError("it refers to something else than a storage")
        num_bytes = len(self._records[f"data/{name}"])
        if num_items * item_bytes != num_bytes:
            raise ValueError(f"a storage of {num_items} items of {item_bytes} bytes has {num_bytes} bytes")
        return _PickledStorage(num_bytes, item_bytes)

    def given_state(self, made: Any, state: Any) -> None:
        """A dict of attributes, which is copied, or that and another one."""
        if isinstance(made, _Tensor | _PickledStorage):
            raise ValueError("it gives a tensor a state")
        self.spend_on_dicts(state)

    def spend_on_dicts(self, state: Any) -> None:
        for part in state if isinstance(state, tuple) else [state]:
            self.spend(len(part) if isinstance(part, _Dict) else 1)

    def called(self, function: Any, arguments: Any) -> Any:
        if not isinstance(function, _Global) or not isinstance(arguments, tuple):
            raise ValueError("it calls what cannot be called")
        self.spend(len(arguments))
        rule = _RULES.get(function.name)
        if rule is not None:
            return rule(self, *arguments)
        if function.name not in self._known:
            raise pickle.UnpicklingError(f"GLOBAL {function.name.removeprefix('builtins.')} is called")
        return _MADE


def _registered() -> set[str]:
    """The functions that the user has told torch to call; their arguments are then the user's to judge."""
    found = torch.serialization.get_safe_globals()
    return {f[1] if isinstance(f, tuple) else f"{f.__module__}.{f.__qualname__}" for f in found}


# --- what torch calls without being told to: the rules for arguments ---------------------------------------------


def _spend_on_items(survey: _Survey, arguments: Iterable[Any]) -> None:
    """The arguments that a container is made from: plain ones, all of whose items are copied, and may be hashed."""
    for argument in arguments:
        if isinstance(argument, str):
            survey.spend(len(argument))
        elif isinstance(argument, list | tuple):
            survey.spend(len(argument))
            for item in argument:
                survey.hash(item)
        elif not (argument is None or isinstance(argument, bool | int | float)):
            raise ValueError(f"it makes a container of {with_article(type(argument).__name__.strip('_'))}")


def _set(survey: _Survey, *arguments: Any) -> _Made:
    _spend_on_items(survey, arguments)
    return _MADE


def _dict(survey: _Survey, *arguments: Any) -> _Dict:
    _spend_on_items(survey, arguments)
    return _Dict(item for argument in arguments if isinstance(argument, list | tuple) for item in argument)


def _size(survey: _Survey, sizes: Any = ()) -> tuple[Any, ...]:
    if not isinstance(sizes, list | tuple):
        raise ValueError("it makes a size of what is not a sequence")
    survey.spend(len(sizes))
    return survey.tuple_of(sizes)


def _value(survey: _Survey, *arguments: Any) -> _Made:
    """A complex number, a device, a layout."""
    _spend_on_items(survey, arguments)
    return _MADE


def _encoded(survey: _Survey, text: Any, codec: Any) -> _Bytes:
    """Bytes, as pickles of protocol 2 write them. Other codecs are programs of their own, and some make much of little."""
    if not isinstance(text, str) or codec not in ("latin1", "latin-1"):
        raise ValueError("it encodes text in another way than pickle does")
    survey.spend(len(text))
    return _Bytes(len(text))


def _bytearray(survey: _Survey, *arguments: Any) -> _Made:
    if len(arguments) == 2:
        arguments = (_encoded(survey, *arguments),)
    if not all(isinstance(argument, _Bytes) for argument in arguments):
        raise ValueError("it makes a bytearray of something else than bytes")
    survey.spend(sum(argument.num_items for argument in arguments))
    return _MADE


def _tensor(survey: _Survey, storage: Any, offset: Any, size: Any, stride: Any, *_: Any) -> _Tensor:  # noqa: ARG001
    return _within(storage, storage.item_bytes, offset, size, stride)


def _tensor_of_dtype(
    survey: _Survey,  # noqa: ARG001
    storage: Any,
    offset: Any,
    size: Any,
    stride: Any,
    _requires_grad: Any,
    _hooks: Any,
    dtype: Any,
    *_: Any,
) -> _Tensor:
    return _within(storage, DTYPES[dtype.name.removeprefix("torch.")][0], offset, size, stride)


def _within(storage: Any, item_bytes: int, offset: Any, size: Any, stride: Any) -> _Tensor:
    """A tensor that lies within its storage: torch may enlarge one that is too small."""
    if not isinstance(storage, _PickledStorage) or len(size) != len(stride) or len(size) > _MAX_DIMS:
        raise ValueError("it makes a tensor of something else")
    if not all(type(n) is int and 0 <= n < 2**63 for n in (offset, *size, *stride)):
        raise ValueError("a tensor has an absurd shape")
    num_items = math.prod(size)
    end = offset + 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True)) if num_items else 0
    if end * item_bytes > storage.num_bytes or num_items >= 2**63:
        raise ValueError("a tensor is larger than its storage")
    return _Tensor(num_items, num_items * item_bytes > storage.num_bytes)


def _quantised(
    survey: _Survey, storage: Any, offset: Any, size: Any, stride: Any, how: Any, *_: Any
) -> _Made:
    return _converted(survey, _tensor(survey, storage, offset, size, stride), *how)


def _converted(survey: _Survey, *arguments: Any) -> _Made:
    """Something made from tensors, which may be copied as a whole."""
    for argument in arguments:
        parts = argument if isinstance(argument, tuple) else [argument]
        survey.spend(len(parts))
        for part in parts:
            if isinstance(part, _Tensor):
                if part.is_expanded:
                    raise ValueError("it copies a tensor that is larger than its storage")
                survey.spend_on_tensor(part.num_items)
            elif isinstance(part, str | list | tuple):
                survey.spend(len(part))
    return _MADE


def _parameter(survey: _Survey, data: Any, *more: Any) -> Any:
    if not isinstance(data, _Tensor | _Made):
        raise ValueError("it makes a parameter of something else than a tensor")
    for state in more:
        survey.spend_on_dicts(state)
    return data


def _subclass(survey: _Survey, function: Any, _type: Any, arguments: Any, state: Any) -> Any:
    """A function's result, as another type, with attributes."""
    survey.spend_on_dicts(state)
    return survey.called(function, arguments)


_RULES: Final[dict[str, Callable[..., Any]]] = {
    "builtins.set": _set,
    "collections.Counter": _dict,
    "collections.OrderedDict": _dict,
    "torch.Size": _size,
    "builtins.complex": _value,
    "torch.device": _value,
    "torch.serialization._get_layout": _value,
    "_codecs.encode": _encoded,
    "builtins.bytearray": _bytearray,
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _tensor_of_dtype,
    "torch._utils._rebuild_qtensor": _quantised,
    "torch._utils._rebuild_sparse_tensor": _converted,
    "torch._utils._rebuild_nested_tensor": _converted,
    "torch._utils._rebuild_device_tensor_from_cpu_tensor": _converted,
    "torch._utils._rebuild_meta_tensor_no_storage": _converted,
    "torch._utils._rebuild_wrapper_subclass": _converted,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter,
    "torch.nn.parameter.Parameter": _parameter,
    "torch._tensor._rebuild_from_type_v2": _subclass,
}
