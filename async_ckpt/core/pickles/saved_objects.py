"""Objects that are not plain data, loaded from the output of `torch.save`, which may be forged.

In: untrusted bytes. Out: the objects, or a refusal before they take more memory than the bytes justify.
Knows nothing of: archives, files.

torch's weights-only unpickler calls only functions that it knows, but these allocate as much as the file demands:
`bytearray(2**40)` takes thirty bytes of pickle, and another copy of a large object takes five. So each pickle is first
interpreted on a stack like the unpickler's, which checks the arguments of each call instead of making it. The checked
records are then written to a new zip, so that torch reads exactly these.
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

from ..garbage import no_collection
from ..spec import DTYPES, with_article
from .machine import PROTOCOL_2, PickleMachine, Recorded, Recorder

# The limit of items and characters that loading may copy: a number per byte of the pickle, plus a constant.
# `torch.save` writes out everything that loading copies, so a genuine pickle needs at most one per byte.
_ITEMS_PER_BYTE: Final = 4
_FREE_ITEMS: Final = 1 << 16
# Python hashes nested tuples recursively, and crashes if they are nested too deeply. It cannot pickle tuples that are
# nested more deeply than this.
_MAX_DEPTH: Final = 1000
_MAX_DIMS: Final = 64
# Longer integers are pickled by LONG4, an instruction that torch's weights-only unpickler does not know.
_MAX_INT_BITS: Final = 255 * 8 - 1

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
    """Load the output of `torch.save`. With `trust`, any pickle is run.

    Without `trust`, raises pickle.UnpicklingError for an object that requires it, naming the object, and other errors
    for bytes that `torch.save` never writes.
    """
    if trust:
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)  # nosec B614
    contents = records(data)
    with no_collection():
        _Survey(contents).follow(contents["data.pkl"])
        return torch.load(io.BytesIO(_zip(contents)), map_location="cpu", weights_only=True)


def needing_trust(data: bytes) -> dict[int, str]:
    """The objects in a list that require trust: for each, by number, the name of the class or function that is refused.

    Called with bytes that `load` has refused. Empty if the objects cannot be examined one by one.
    """
    try:
        contents, recorder = records(data), _TrustRecorder()
        objects = recorder.follow(contents["data.pkl"])
        search = _RefusedNames(_unsafe_among(recorder.names, contents))
        refused = {number: search.first_in(value) for number, value in enumerate(objects)}
    except Exception:  # the pickle is malformed, or nested too deeply
        return {}
    return {number: name for number, name in refused.items() if name is not None}


def missing_class(path: str, error: ImportError | AttributeError) -> ImportError:
    """The error for a file with an object whose package or class cannot be imported. `error` is from `pickle`."""
    name = error.name if isinstance(error, ImportError) else None
    if name:
        package = name.partition(".")[0]
        return ImportError(
            f"{path}: it has an object of the package {package}, which cannot be imported here ({error})"
        )
    return ImportError(
        f"{path}: it has an object of a class that cannot be found here ({error!s:.200}); read it in the program that "
        "wrote it"
    )


def records(data: bytes) -> dict[str, bytes]:
    """The records that loading reads, by their names below the archive's top folder. Raises ValueError."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        infos = archive.infolist()
        if any(info.compress_type != zipfile.ZIP_STORED for info in infos):
            raise ValueError("a record is compressed")
        if sum(info.file_size for info in infos) > len(data):
            raise ValueError("its records are larger than the whole file")
        ignore_missing_checksums(infos)
        infos_by_name = {info.filename.partition("/")[2]: info for info in infos}
        if len(infos_by_name) < len(infos):
            raise ValueError("two records have one name")
        return {name: archive.read(info) for name, info in infos_by_name.items() if _is_read(name)}


def ignore_missing_checksums(infos: Iterable[zipfile.ZipInfo]) -> bool:
    """Skip zipfile's checks if torch saved under `set_crc32_options(False)`, with all checksums 0. True if it did."""
    filled = [info for info in infos if info.file_size]
    if not filled or any(info.CRC for info in filled):
        return False
    for info in filled:
        del info.CRC
    return True


def _is_read(name: str) -> bool:
    return name in ("data.pkl", "version", "byteorder") or name.startswith("data/")


def _zip(records: Mapping[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, data in records.items():
            archive.writestr(f"archive/{name}", data)
    return buffer.getvalue()


# --- the values on the stack, which represent the objects that torch would create -----------------------------------


@dataclass(frozen=True, slots=True)
class _Global:
    """A class or function, by its name in Python 3."""

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


class _Opaque:
    """Any other object; the checks need no facts about it."""


_OPAQUE: Final = _Opaque()


class _Dict(list[Any]):
    """The keys of a dict, as a list, since they must not be hashed."""

    __slots__ = ()


class _Tuple(tuple[Any, ...]):
    """A tuple that is not empty, with the cost of hashing it: an inner tuple is hashed as often as it occurs."""

    depth: int
    num_hashed: int


class _TrustRecorder(Recorder):
    """Records the structure of objects, with Python 3 names. `names` has the names as they are in the pickle."""

    accepted: ClassVar = PROTOCOL_2 | {"LONG4"}

    def __init__(self) -> None:
        super().__init__()
        self.names: set[tuple[str, str]] = set()

    def find_global(self, module: str, name: str) -> Recorded:
        self.names.add((module, name))
        return Recorded("name", [_current_name(module, name)])


def _unsafe_among(names: Iterable[tuple[str, str]], contents: Mapping[str, bytes]) -> set[str]:
    """The names that torch's weights-only unpickler refuses, found by giving it a pickle of these names alone."""
    program = b"".join([b"\x80\x02", *(f"c{module}\n{name}\n".encode() for module, name in names), b"."])
    head = {name: data for name, data in contents.items() if not name.startswith("data/")}
    zipped = io.BytesIO(_zip({**head, "data.pkl": program}))
    return {*torch.serialization.get_unsafe_globals_in_checkpoint(zipped)}


class _RefusedNames:
    """A search for the first refused name in each of several values, which may share parts."""

    def __init__(self, unsafe: set[str]) -> None:
        self._unsafe, self._callable = unsafe, _RULES.keys() | _safe_globals()
        self._known: dict[int, str | None] = {}  # by id; the values outlive this object, so ids are not reused

    def first_in(self, value: Any) -> str | None:
        if isinstance(value, int) and value.bit_length() > _MAX_INT_BITS:
            return "int"
        if not isinstance(value, list | tuple | Recorded):
            return None
        if id(value) not in self._known:
            self._known[id(value)] = None  # ends the recursion in an object that contains itself
            self._known[id(value)] = self._first_among(value)
        return self._known[id(value)]

    def _first_among(self, value: Any) -> str | None:
        parts = value.parts if isinstance(value, Recorded) else value
        if isinstance(value, Recorded) and value.operation == "name":
            return parts[0] if parts[0] in self._unsafe else None
        if isinstance(value, Recorded) and value.operation == "call" and isinstance(parts[0], Recorded):
            name = parts[0].parts[0]
            if parts[0].operation == "name" and name not in self._callable:
                return str(name)
        return next(filter(None, map(self.first_in, parts)), None)


class _Survey(PickleMachine):
    """Interprets a pickle like torch's weights-only unpickler, but only checks the arguments of calls."""

    accepted: ClassVar = PROTOCOL_2
    protocols: ClassVar = range(2, 3)

    def __init__(self, records: Mapping[str, bytes]) -> None:
        super().__init__()
        self._records = records
        self._items_left = _FREE_ITEMS + _ITEMS_PER_BYTE * len(records["data.pkl"])
        self._tensor_items_left = sum(map(len, records.values()))
        self._known = _safe_globals()

    def spend(self, num_items: int) -> None:
        self._items_left -= num_items
        if self._items_left < 0:
            raise ValueError("it builds far more data than it contains")

    def spend_on_tensor(self, num_items: int) -> None:
        self._tensor_items_left -= num_items
        if self._tensor_items_left < 0:
            raise ValueError("it copies tensors again and again")

    # --- instructions -----------------------------------------------------------------------------------------

    def refuse(self, instruction: str) -> NoReturn:
        raise pickle.UnpicklingError(f"Unsupported operand {instruction}")

    def find_global(self, module: str, name: str) -> _Global:
        return _Global(_current_name(module, name))

    def empty_dict(self) -> _Dict:
        return _Dict()

    def empty_set(self) -> _Opaque:
        return _OPAQUE

    def set_items(self, into: Any, items: list[Any]) -> None:
        if not isinstance(into, _Dict):
            raise ValueError("it sets items of an object that is not a dict")
        for key in items[::2]:
            self.hash(key)
        into += items[::2]

    def make_tuple(self, items: Iterable[Any]) -> tuple[Any, ...]:
        made = _Tuple(items)
        inner = [item for item in made if isinstance(item, _Tuple)]
        made.depth = 1 + max((item.depth for item in inner), default=0)
        if made.depth > _MAX_DEPTH:
            raise ValueError("a tuple is nested too deeply")
        # Capped just above the budget: for a tuple that is doubled again and again, the number could have any length.
        num_hashed = 1 + len(made) + sum(item.num_hashed for item in inner)
        made.num_hashed = min(num_hashed, self._items_left + 1)
        return made

    def hash(self, key: Any) -> None:
        if isinstance(key, _Tuple):
            self.spend(key.num_hashed)

    def persistent_load(self, key: Any) -> _PickledStorage:
        word, kind, name, _, num_items = key
        item_bytes = _ITEM_BYTES[kind.name]
        if word != "storage" or not isinstance(name, str) or not name.isdecimal() or type(num_items) is not int:
            raise ValueError("it refers to an object that is not a storage")
        num_bytes = len(self._records[f"data/{name}"])
        if num_items * item_bytes != num_bytes:
            raise ValueError(f"a storage of {num_items} items of {item_bytes} bytes has {num_bytes} bytes")
        return _PickledStorage(num_bytes, item_bytes)

    def set_state(self, target: Any, state: Any) -> None:
        """Count the attributes, a dict or a pair of dicts, which loading copies."""
        if isinstance(target, _Tensor | _PickledStorage):
            raise ValueError("it sets the state of a tensor")
        self.spend_on_dicts(state)

    def spend_on_dicts(self, state: Any) -> None:
        for part in state if isinstance(state, tuple) else [state]:
            self.spend(len(part) if isinstance(part, _Dict) else 1)

    def call(self, function: Any, arguments: Any) -> Any:
        if not isinstance(function, _Global) or not isinstance(arguments, tuple):
            raise ValueError("it calls an object that is not a function")
        self.spend(len(arguments))
        rule = _RULES.get(function.name)
        if rule is not None:
            return rule(self, *arguments)
        if function.name not in self._known:
            raise pickle.UnpicklingError(f"GLOBAL {function.name.removeprefix('builtins.')} is called")
        return _OPAQUE


def _current_name(module: str, name: str) -> str:
    """The Python 3 name of a class or function. `torch.save` writes its Python 2 name."""
    if (module, name) in NAME_MAPPING:
        module, name = NAME_MAPPING[module, name]
    else:
        module = IMPORT_MAPPING.get(module, module)
    return f"{module}.{name}"


def _safe_globals() -> set[str]:
    """The names of functions that the user has allowed torch to call, with any arguments."""
    functions = torch.serialization.get_safe_globals()
    return {
        function[1] if isinstance(function, tuple) else f"{function.__module__}.{function.__qualname__}"
        for function in functions
    }


# --- rules for the arguments of the functions that torch always allows ---------------------------------------------


def _spend_on_items(survey: _Survey, arguments: Iterable[Any]) -> None:
    """Count the arguments of a container, whose items are all copied, and perhaps hashed. They must be plain values."""
    for argument in arguments:
        if isinstance(argument, str):
            survey.spend(len(argument))
        elif isinstance(argument, list | tuple):
            survey.spend(len(argument))
            for item in argument:
                survey.hash(item)
        elif not (argument is None or isinstance(argument, bool | int | float)):
            raise ValueError(f"it makes a container of {with_article(type(argument).__name__.strip('_'))}")


def _dict(survey: _Survey, *arguments: Any) -> _Dict:
    _spend_on_items(survey, arguments)
    return _Dict(item for argument in arguments if isinstance(argument, list | tuple) for item in argument)


def _size(survey: _Survey, sizes: Any = ()) -> tuple[Any, ...]:
    if not isinstance(sizes, list | tuple):
        raise ValueError("it makes a size from an object that is not a sequence")
    survey.spend(len(sizes))
    return survey.make_tuple(sizes)


def _value(survey: _Survey, *arguments: Any) -> _Opaque:
    """Allow a set, a complex number, a device or a layout."""
    _spend_on_items(survey, arguments)
    return _OPAQUE


def _encode(survey: _Survey, text: Any, codec: Any) -> _Bytes:
    """Allow bytes as protocol 2 writes them. Other codecs run other code, and some expand their input."""
    if not isinstance(text, str) or codec not in ("latin1", "latin-1"):
        raise ValueError("it encodes text by another codec than pickle does")
    survey.spend(len(text))
    return _Bytes(len(text))


def _bytearray(survey: _Survey, *arguments: Any) -> _Opaque:
    if len(arguments) == 2:
        arguments = (_encode(survey, *arguments),)
    if not all(isinstance(argument, _Bytes) for argument in arguments):
        raise ValueError("it makes a bytearray from an object that is not bytes")
    survey.spend(sum(argument.num_items for argument in arguments))
    return _OPAQUE


def _tensor(survey: _Survey, storage: Any, offset: Any, size: Any, stride: Any, *_: Any) -> _Tensor:  # noqa: ARG001
    return _tensor_within(storage, storage.item_bytes, offset, size, stride)


def _tensor_of_dtype(_: _Survey, storage: Any, offset: Any, size: Any, stride: Any, *more: Any) -> _Tensor:
    _requires_grad, _hooks, dtype, *_rest = more
    return _tensor_within(storage, DTYPES[dtype.name.removeprefix("torch.")][0], offset, size, stride)


def _tensor_within(storage: Any, item_bytes: int, offset: Any, size: Any, stride: Any) -> _Tensor:
    """Allow a tensor that lies within its storage: torch would enlarge a storage that is too small."""
    if not isinstance(storage, _PickledStorage) or len(size) != len(stride) or len(size) > _MAX_DIMS:
        raise ValueError("it makes a tensor from an object that is not a storage")
    if not all(type(number) is int and 0 <= number < 2**63 for number in (offset, *size, *stride)):
        raise ValueError("a tensor has an absurd shape")
    num_items = math.prod(size)
    end = offset + 1 + sum((number - 1) * step for number, step in zip(size, stride, strict=True)) if num_items else 0
    if end * item_bytes > storage.num_bytes or num_items >= 2**63:
        raise ValueError("a tensor is larger than its storage")
    return _Tensor(num_items, num_items * item_bytes > storage.num_bytes)


def _quantised(survey: _Survey, storage: Any, offset: Any, size: Any, stride: Any, params: Any, *_: Any) -> _Opaque:
    return _tensor_conversion(survey, _tensor(survey, storage, offset, size, stride), *params)


def _tensor_conversion(survey: _Survey, *arguments: Any) -> _Opaque:
    """Allow an object made from tensors, and count these, since they may be copied."""
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
    return _OPAQUE


def _parameter(survey: _Survey, data: Any, *more: Any) -> Any:
    if not isinstance(data, _Tensor | _Opaque):
        raise ValueError("it makes a parameter from an object that is not a tensor")
    for state in more:
        survey.spend_on_dicts(state)
    return data


def _subclass(survey: _Survey, function: Any, _type: Any, arguments: Any, state: Any) -> Any:
    """Allow the result of a function, converted to another type, with attributes."""
    survey.spend_on_dicts(state)
    return survey.call(function, arguments)


_RULES: Final[dict[str, Callable[..., Any]]] = {
    "builtins.set": _value,
    "collections.Counter": _dict,
    "collections.OrderedDict": _dict,
    "torch.Size": _size,
    "builtins.complex": _value,
    "torch.device": _value,
    "torch.serialization._get_layout": _value,
    "_codecs.encode": _encode,
    "builtins.bytearray": _bytearray,
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _tensor_of_dtype,
    "torch._utils._rebuild_qtensor": _quantised,
    "torch._utils._rebuild_sparse_tensor": _tensor_conversion,
    "torch._utils._rebuild_nested_tensor": _tensor_conversion,
    "torch._utils._rebuild_device_tensor_from_cpu_tensor": _tensor_conversion,
    "torch._utils._rebuild_meta_tensor_no_storage": _tensor_conversion,
    "torch._utils._rebuild_wrapper_subclass": _tensor_conversion,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter,
    "torch.nn.parameter.Parameter": _parameter,
    "torch._tensor._rebuild_from_type_v2": _subclass,
}
