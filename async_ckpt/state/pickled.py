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
import pickletools
import zipfile
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, NamedTuple

import torch

from ..spec import DTYPES, with_article

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


def load(data: bytes) -> Any:
    """The object that `torch.save` made these bytes of.

    Raises pickle.UnpicklingError for what takes trust, naming it, and other errors for what `torch.save` never writes.
    """
    found = records(data)
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


class _Global(NamedTuple):
    """A class or function, by the name that Python 3 has for it."""

    name: str


class _PickledStorage(NamedTuple):
    num_bytes: int
    item_bytes: int


class _Tensor(NamedTuple):
    num_items: int
    is_expanded: bool  # it has more items than its storage


class _Bytes(NamedTuple):
    num_items: int


class _Made(NamedTuple):
    """Anything else."""


class _Dict(list[Any]):
    """The keys of a dict, of which none is hashed."""


class _Tuple(tuple[Any, ...]):
    """A tuple that knows what hashing it takes: all that it holds is gone through, as often as it is in there."""

    num_hashed: int
    depth: int


class _Survey:
    """Goes through a pickle as torch's weights-only unpickler does, without making anything that it names."""

    def __init__(self, records: Mapping[str, bytes]) -> None:
        self._records = records
        self._left = _FREE_ITEMS + _ITEMS_PER_BYTE * len(records["data.pkl"])
        self._left_of_tensors = sum(map(len, records.values()))
        self._stack: list[Any] = []
        self._below: list[list[Any]] = []  # the stacks under each mark
        self._memo: dict[int, Any] = {}
        self._known = _registered()

    def run(self) -> None:
        for opcode, argument, _ in pickletools.genops(self._records["data.pkl"]):
            act = _ACTS.get(opcode.name)
            if act is None:
                raise pickle.UnpicklingError(f"Unsupported operand {opcode.name}")
            act(self, argument)

    def spend(self, num_items: int) -> None:
        self._left -= num_items
        if self._left < 0:
            raise ValueError("it makes far more than it holds")

    def spend_on_tensor(self, num_items: int) -> None:
        self._left_of_tensors -= num_items
        if self._left_of_tensors < 0:
            raise ValueError("it copies tensors again and again")

    # --- the stack --------------------------------------------------------------------------------------------

    def push(self, value: Any) -> None:
        self._stack.append(value)

    def last(self, num: int) -> list[Any]:
        items = self._stack[-num:]
        if len(items) < num:
            raise ValueError("its stack is empty")
        del self._stack[-num:]
        return items

    def mark(self) -> None:
        self._below.append(self._stack)
        self._stack = []

    def marked(self) -> list[Any]:
        items, self._stack = self._stack, self._below.pop()
        return items

    def put(self, number: int) -> None:
        self._memo[number] = self._stack[-1]

    def get(self, number: int) -> None:
        self.push(self._memo[number])

    # --- what is made -----------------------------------------------------------------------------------------

    def protocol(self, number: int) -> None:
        if number != 2:
            raise ValueError(f"it is of protocol {number}")

    def name(self, argument: str) -> None:
        module, _, name = argument.partition(" ")
        if (module, name) in NAME_MAPPING:
            module, name = NAME_MAPPING[module, name]
        else:
            module = IMPORT_MAPPING.get(module, module)
        self.push(_Global(f"{module}.{name}"))

    def append(self, items: list[Any]) -> None:
        if type(self._stack[-1]) is not list:
            raise ValueError("it appends to what is not a list")
        self._stack[-1] += items

    def set_items(self, items: list[Any]) -> None:
        if not isinstance(self._stack[-1], _Dict):
            raise ValueError("it sets items of what is not a dict")
        for key in items[::2]:
            self.hash(key)
        self._stack[-1] += items[::2]

    def tuple_of(self, items: Iterable[Any]) -> _Tuple:
        made = _Tuple(items)
        inner = [item for item in made if isinstance(item, _Tuple)]
        made.depth = 1 + max((item.depth for item in inner), default=0)
        if made.depth > _MAX_DEPTH:
            raise ValueError("a tuple is nested too deeply")
        # Not beyond what is refused: twice the same tuple, twice that, and so on, is a number of any length.
        made.num_hashed = min(1 + len(made) + sum(item.num_hashed for item in inner), self._left + 1)
        return made

    def hash(self, key: Any) -> None:
        if isinstance(key, _Tuple):
            self.spend(key.num_hashed)

    def storage(self) -> None:
        word, kind, key, _, num_items = self._stack.pop()
        item_bytes = _ITEM_BYTES[kind.name]
        if word != "storage" or not isinstance(key, str) or not key.isdecimal() or type(num_items) is not int:
            raise ValueError("it refers to something else than a storage")
        num_bytes = len(self._records[f"data/{key}"])
        if num_items * item_bytes != num_bytes:
            raise ValueError(f"a storage of {num_items} items of {item_bytes} bytes has {num_bytes} bytes")
        self.push(_PickledStorage(num_bytes, item_bytes))

    def build(self) -> None:
        """Give an object its state: a dict of its attributes, which is copied, or that and another one."""
        (state,) = self.last(1)
        if isinstance(self._stack[-1], _Tensor | _PickledStorage):
            raise ValueError("it gives a tensor a state")
        self.spend_on_dicts(state)

    def spend_on_dicts(self, state: Any) -> None:
        for part in state if isinstance(state, _Tuple) else [state]:
            self.spend(len(part) if isinstance(part, _Dict) else 1)

    def call(self) -> None:
        function, arguments = self.last(2)
        self.push(self.made_by(function, arguments))

    def made_by(self, function: Any, arguments: Any) -> Any:
        if not isinstance(function, _Global) or not isinstance(arguments, _Tuple):
            raise ValueError("it calls what cannot be called")
        self.spend(len(arguments))
        rule = _RULES.get(function.name)
        if rule is not None:
            return rule(self, *arguments)
        if function.name not in self._known:
            raise pickle.UnpicklingError(f"GLOBAL {function.name.removeprefix('builtins.')} is called")
        return _Made()


def _registered() -> set[str]:
    """The functions that the user has told torch to call; their arguments are then the user's to judge."""
    found = torch.serialization.get_safe_globals()
    return {f[1] if isinstance(f, tuple) else f"{f.__module__}.{f.__qualname__}" for f in found}


_ACTS: Final[dict[str, Callable[[_Survey, Any], None]]] = {
    **dict.fromkeys(
        ("BININT", "BININT1", "BININT2", "BINFLOAT", "BINUNICODE", "SHORT_BINSTRING", "LONG1"), _Survey.push
    ),
    "NONE": lambda survey, _: survey.push(None),
    "NEWTRUE": lambda survey, _: survey.push(True),
    "NEWFALSE": lambda survey, _: survey.push(False),
    "EMPTY_LIST": lambda survey, _: survey.push([]),
    "EMPTY_DICT": lambda survey, _: survey.push(_Dict()),
    "EMPTY_SET": lambda survey, _: survey.push(_Made()),
    "EMPTY_TUPLE": lambda survey, _: survey.push(survey.tuple_of(())),
    "TUPLE": lambda survey, _: survey.push(survey.tuple_of(survey.marked())),
    "TUPLE1": lambda survey, _: survey.push(survey.tuple_of(survey.last(1))),
    "TUPLE2": lambda survey, _: survey.push(survey.tuple_of(survey.last(2))),
    "TUPLE3": lambda survey, _: survey.push(survey.tuple_of(survey.last(3))),
    "APPEND": lambda survey, _: survey.append(survey.last(1)),
    "APPENDS": lambda survey, _: survey.append(survey.marked()),
    "SETITEM": lambda survey, _: survey.set_items(survey.last(2)),
    "SETITEMS": lambda survey, _: survey.set_items(survey.marked()),
    "MARK": lambda survey, _: survey.mark(),
    "BINPUT": _Survey.put,
    "LONG_BINPUT": _Survey.put,
    "BINGET": _Survey.get,
    "LONG_BINGET": _Survey.get,
    "GLOBAL": _Survey.name,
    "BINPERSID": lambda survey, _: survey.storage(),
    "REDUCE": lambda survey, _: survey.call(),
    "NEWOBJ": lambda survey, _: survey.call(),
    "BUILD": lambda survey, _: survey.build(),
    "PROTO": _Survey.protocol,
    "STOP": lambda *_: None,
}


# --- what torch calls without being told to: the rules for arguments ---------------------------------------------


def _spend_on_items(survey: _Survey, arguments: Iterable[Any]) -> None:
    """The arguments that a container is made from: plain ones, all of whose items are copied, and may be hashed."""
    for argument in arguments:
        if isinstance(argument, str):
            survey.spend(len(argument))
        elif isinstance(argument, list | _Tuple):
            survey.spend(len(argument))
            for item in argument:
                survey.hash(item)
        elif not (argument is None or isinstance(argument, bool | int | float)):
            raise ValueError(f"it makes a container of {with_article(type(argument).__name__.strip('_'))}")


def _set(survey: _Survey, *arguments: Any) -> _Made:
    _spend_on_items(survey, arguments)
    return _Made()


def _dict(survey: _Survey, *arguments: Any) -> _Dict:
    _spend_on_items(survey, arguments)
    return _Dict(item for argument in arguments if isinstance(argument, list | _Tuple) for item in argument)


def _size(survey: _Survey, sizes: Any = ()) -> _Tuple:
    if not isinstance(sizes, list | _Tuple):
        raise ValueError("it makes a size of what is not a sequence")
    survey.spend(len(sizes))
    return survey.tuple_of(sizes)


def _value(survey: _Survey, *arguments: Any) -> _Made:
    """A complex number, a device, a layout."""
    _spend_on_items(survey, arguments)
    return _Made()


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
    return _Made()


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
        parts = argument if isinstance(argument, _Tuple) else [argument]
        survey.spend(len(parts))
        for part in parts:
            if isinstance(part, _Tensor):
                if part.is_expanded:
                    raise ValueError("it copies a tensor that is larger than its storage")
                survey.spend_on_tensor(part.num_items)
            elif isinstance(part, str | list | _Tuple):
                survey.spend(len(part))
    return _Made()


def _parameter(survey: _Survey, data: Any, *more: Any) -> Any:
    if not isinstance(data, _Tensor | _Made):
        raise ValueError("it makes a parameter of something else than a tensor")
    for state in more:
        survey.spend_on_dicts(state)
    return data


def _subclass(survey: _Survey, function: Any, _type: Any, arguments: Any, state: Any) -> Any:
    """A function's result, as another type, with attributes."""
    survey.spend_on_dicts(state)
    return survey.made_by(function, arguments)


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
