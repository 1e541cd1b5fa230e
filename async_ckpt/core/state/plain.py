"""Plain values to JSON and back: values that need neither a pickle nor the bytes of a tensor.

In: a value, or an untrusted node. Out: its node, or its value. Knows nothing of: containers, tensors, files.

Numbers, strings, booleans and None are JSON values if JSON can represent them. Every other value is an object with one
key, its kind: `{"date": "2024-02-29"}`. Reading a node allocates no more memory than the node's own text, and imports
nothing that it names. Only values of exactly these types are plain, since a subclass may have more state.
"""

from __future__ import annotations

import base64
import dataclasses
import math
import re
import struct
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import date, datetime, time, timedelta, timezone, tzinfo
from enum import Enum
from functools import partial
from importlib import import_module
from pathlib import Path, PosixPath, PurePath, PurePosixPath, PureWindowsPath, WindowsPath
from typing import TYPE_CHECKING, Any, Final

import torch

from ..fields import is_unicode
from ..spec import Json
from .names import dtype_name, dtype_named, is_describable, numpy_dtype

if TYPE_CHECKING:
    from decimal import Decimal
    from fractions import Fraction
    from zoneinfo import ZoneInfo

SCALARS: Final = frozenset({str, int, float, bool, type(None)})
# Longer bytes are stored like a tensor: base64 in the index is a third longer, and every reader would have to parse it.
INLINE_BYTES: Final = 4096
# The time to reduce a fraction grows with the square of its length.
_MAX_FRACTION_BITS: Final = 4096
# The name of a time zone is the path of a file below the system's folder of time zones, and must not leave the folder.
_ZONE: Final = r"[A-Za-z0-9_+-]{1,64}(/[A-Za-z0-9_+-]{1,64}){0,3}"
_MEMORY_FORMATS: Final = {
    str(value).removeprefix("torch."): value
    for value in (torch.contiguous_format, torch.channels_last, torch.channels_last_3d, torch.preserve_format)
}
# The class that a path is read as, by its saved class. A path of this system's own kind keeps its class.
_PATHS: Final[Mapping[str, type[PurePath]]] = {
    "PurePosixPath": PurePosixPath,
    "PosixPath": PurePosixPath,
    "PureWindowsPath": PureWindowsPath,
    "WindowsPath": PureWindowsPath,
}


class NotPlainError(Exception):
    """Raised if a value, or a part of it, has no node. `kind` is the name of its type."""

    def __init__(self, value: Any) -> None:
        self.kind = type(value).__qualname__
        super().__init__(self.kind)


# --- values as nodes ----------------------------------------------------------------------------------------------


def scalar_node(value: Any) -> Json:
    """The node of a scalar: the scalar itself, unless JSON would change it."""
    if isinstance(value, str):
        return value if value.isascii() or is_unicode(value) else {"str": value.encode("utf-8", "surrogatepass").hex()}
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": struct.pack(">d", value).hex()}
    if type(value) is int and not -(2**63) <= value < 2**63:
        return {"int": hex(value)}
    return value


def plain_node(value: Any) -> Json | None:
    """The node of a value that is not a scalar; None if the value is not plain."""
    try:
        if (write := _writer_of(type(value))) is not None:
            return write(value)
        return _numpy_node(value)
    except NotPlainError:
        return None


def hashable_node(value: Any) -> Json:
    """The node of a dict key or a set item: a scalar, a plain value, or a tuple of these.

    Raises NotPlainError for any other value.
    """
    if type(value) in SCALARS:
        return scalar_node(value)
    if type(value) is tuple:
        return {"tuple": [hashable_node(part) for part in value]}
    node = None if _is_void(value) else plain_node(value)
    if node is None:
        raise NotPlainError(value)
    return node


def enum_node(member: Enum) -> Json | None:
    """The node of an enum member; None if the member's value is not plain."""
    try:
        return {"enum": [class_name(type(member)), hashable_node(member.value)]}
    except NotPlainError:
        return None


def class_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _time_node(value: datetime | time) -> Json:
    naive = value.replace(tzinfo=None, fold=0)
    return {type(value).__name__: [naive.isoformat(), value.fold, _zone_node(value.tzinfo)]}


def _zone_node(zone: tzinfo | None) -> Json:
    if zone is None:
        return None
    if isinstance(zone, timezone):
        offset, *name = zone.__getinitargs__()  # type: ignore[attr-defined]
        return {"timezone": [offset.days, offset.seconds, offset.microseconds, *map(scalar_node, name)]}
    if _is_late(type(zone), "zoneinfo.ZoneInfo"):
        key: str | None = zone.key  # type: ignore[attr-defined]
        if key is not None and re.fullmatch(_ZONE, key):
            return {"zone": key}
    raise NotPlainError(zone)


def _fraction_node(value: Fraction) -> Json:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > _MAX_FRACTION_BITS:
        raise NotPlainError(value)
    return {"fraction": [scalar_node(value.numerator), scalar_node(value.denominator)]}


def _slice_node(value: slice) -> Json:
    parts = (value.start, value.stop, value.step)
    if any(type(part) not in (int, type(None)) for part in parts):
        raise NotPlainError(value)
    return {"slice": [scalar_node(part) for part in parts]}


def _set_node(value: set[Any] | frozenset[Any]) -> Json:
    """The items in sorted order, since the order of a set differs from process to process."""
    return {type(value).__name__: sorted(map(hashable_node, value), key=repr)}


def _bytes_node(value: bytes) -> Json:
    if len(value) >= INLINE_BYTES:
        raise NotPlainError(value)
    return {"inline": to_base64(value)}


def _numpy_node(value: Any) -> Json | None:
    numpy = sys.modules.get("numpy")
    if numpy is None or not isinstance(value, numpy.generic) or not is_describable(value.dtype):
        return None
    if isinstance(value, numpy.str_):
        return {"npstr": scalar_node(value[:])}  # str(value) would drop trailing zeros
    if isinstance(value, numpy.bytes_):
        return {"npbytes": to_base64(bytes(value))}
    return {"npscalar": [numpy.lib.format.dtype_to_descr(value.dtype), to_base64(value.tobytes())]}


_WRITERS: Final[Mapping[type, Callable[[Any], Json]]] = {
    bytes: _bytes_node,
    complex: lambda value: {"complex": struct.pack(">dd", value.real, value.imag).hex()},
    torch.dtype: lambda value: {"dtype": dtype_name(value)},
    torch.device: lambda value: {"device": str(value)},
    torch.memory_format: lambda value: {"memory_format": str(value).removeprefix("torch.")},
    **dict.fromkeys(
        (PurePosixPath, PureWindowsPath, PosixPath, WindowsPath),
        lambda path: {"path": [type(path).__name__, scalar_node(str(path))]},
    ),
    date: lambda value: {"date": value.isoformat()},
    datetime: _time_node,
    time: _time_node,
    timedelta: lambda value: {"timedelta": [value.days, value.seconds, value.microseconds]},
    timezone: _zone_node,
    range: lambda value: {"range": [scalar_node(part) for part in (value.start, value.stop, value.step)]},
    slice: _slice_node,
    set: _set_node,
    frozenset: _set_node,
}

# Types of modules that are imported on demand: a program with such a value has already imported the module.
_LATE_WRITERS: Final[Mapping[str, Callable[[Any], Json]]] = {
    "zoneinfo.ZoneInfo": _zone_node,
    "decimal.Decimal": lambda value: {"decimal": str(value)},
    "fractions.Fraction": _fraction_node,
    "uuid.UUID": lambda value: {"uuid": value.hex},
}


def _writer_of(kind: type) -> Callable[[Any], Json] | None:
    writer = _WRITERS.get(kind)
    if writer is None:
        name = f"{kind.__module__}.{kind.__qualname__}"
        writer = _LATE_WRITERS.get(name) if _is_late(kind, name) else None
    return writer


def _is_late(kind: type, name: str) -> bool:
    """True if `kind` is the class of that name in an imported module."""
    module, _, inner = name.rpartition(".")
    return getattr(sys.modules.get(module), inner, None) is kind


def to_base64(data: bytes) -> str:
    """The bytes as text of base64."""
    return base64.b64encode(data).decode("ascii")


def from_base64(text: Json) -> bytes:
    """The bytes of a text that `to_base64` made. Raises an unspecified error for any other text."""
    return base64.b64decode(text, validate=True)


# --- nodes as values ----------------------------------------------------------------------------------------------
# The text is untrusted: a reader may raise any error of a constructor, and no constructor may allocate much.


def plain_value(kind: str | None, value: Json) -> Any:
    """The value of a node of this kind. Raises an unspecified error if `plain_node` would not have made the node."""
    read = _READERS.get(kind) if isinstance(kind, str) else None
    if read is None:
        raise ValueError(f"the skeleton has a node of the unknown kind {kind!r:.50}")
    return read(value)


def hashable_value(node: Json) -> Any:
    """The value of a node that `hashable_node` made."""
    if isinstance(node, list):
        raise ValueError("a bare list in the skeleton")
    if not isinstance(node, dict):
        return node
    kind = next(iter(node), None)
    if kind == "tuple":
        return tuple(map(hashable_value, node[kind]))
    value = plain_value(kind, node.get(kind))
    if _is_void(value):
        raise ValueError("a key of the skeleton is a record of numpy")
    return value


def member_of(cls: type[Enum], value: Any) -> Any:
    """The enum member with this value, or the value itself if no member has it."""
    try:
        return cls(value)
    except Exception:  # the user's own class may raise anything for an unknown value
        return value


def _int(node: Json) -> int:
    value = hashable_value(node)
    if type(value) is not int:
        raise ValueError(f"{value!r:.50} is not an integer")
    return value


def _text(node: Json) -> str:
    value = hashable_value(node)
    if type(value) is not str:
        raise ValueError(f"{value!r:.50} is not text")
    return value


def _path(value: Json) -> PurePath:
    """A path of this system if it was saved on the same kind of system; otherwise a pure path."""
    name, text = value[0], _text(value[1])
    if name == type(Path()).__name__:
        return Path(text)
    return _PATHS[name](text)


def _time(cls: type[datetime | time], value: Json) -> datetime | time:
    text, fold, zone = value
    return cls.fromisoformat(text).replace(fold=_int(fold), tzinfo=_zone(zone))


def _zone(node: Json) -> tzinfo | None:
    value = hashable_value(node)
    if value is not None and not isinstance(value, tzinfo):
        raise ValueError(f"{value!r:.50} is not a time zone")
    return value


def _timedelta(value: Json) -> timedelta:
    days, seconds, microseconds = map(_int, value)
    return timedelta(days, seconds, microseconds)


def _timezone(value: Json) -> timezone:
    *offset, name = value if len(value) == 4 else (*value, None)
    return timezone(_timedelta(offset)) if name is None else timezone(_timedelta(offset), _text(name))


def _named_zone(value: Json) -> ZoneInfo:
    if not isinstance(value, str) or not re.fullmatch(_ZONE, value):
        raise ValueError(f"{value!r:.50} is not the name of a time zone")
    from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

    try:
        return ZoneInfo(value)
    except (ZoneInfoNotFoundError, OSError) as error:
        raise ValueError(f"this system has no time zone {value!r:.50}; install the tzdata package") from error


def _fraction(value: Json) -> Fraction:
    numerator, denominator = map(_int, value)
    if max(numerator.bit_length(), denominator.bit_length()) > _MAX_FRACTION_BITS:
        raise ValueError("a fraction of too many digits")
    from fractions import Fraction

    return Fraction(numerator, denominator)


def _decimal(value: Json) -> Decimal:
    from decimal import Context, Decimal, InvalidOperation

    # Malformed digits raise, whatever traps the caller's own context has set.
    return Decimal(_text(value), Context(traps=[InvalidOperation]))


def _range(value: Json) -> range:
    start, stop, step = map(_int, value)
    return range(start, stop, step)


def _slice(value: Json) -> slice:
    start, stop, step = (None if part is None else _int(part) for part in value)
    return slice(start, stop, step)


def _numpy_scalar(value: Json) -> Any:
    import numpy

    dtype = numpy_dtype(value[0])
    data = from_base64(value[1])
    if len(data) != dtype.itemsize:
        raise ValueError("a numpy scalar with another number of bytes than its dtype has")
    return numpy.frombuffer(data, dtype)[0] if data else numpy.zeros((), dtype)[()]


_READERS: Final[Mapping[str, Callable[[Json], Any]]] = {
    "float": lambda value: struct.unpack(">d", bytes.fromhex(value))[0],
    "int": lambda value: int(value, 16),
    "str": lambda value: bytes.fromhex(value).decode("utf-8", "surrogatepass"),
    "inline": from_base64,
    "complex": lambda value: complex(*struct.unpack(">dd", bytes.fromhex(value))),
    "size": torch.Size,
    "dtype": dtype_named,
    "device": torch.device,
    "memory_format": _MEMORY_FORMATS.__getitem__,
    "path": _path,
    "date": date.fromisoformat,
    "datetime": partial(_time, datetime),
    "time": partial(_time, time),
    "timedelta": _timedelta,
    "timezone": _timezone,
    "zone": _named_zone,
    "decimal": _decimal,
    "fraction": _fraction,
    "uuid": lambda value: import_module("uuid").UUID(hex=value),
    "range": _range,
    "slice": _slice,
    "set": lambda value: set(map(hashable_value, value)),
    "frozenset": lambda value: frozenset(map(hashable_value, value)),
    "npstr": lambda value: import_module("numpy").str_(_text(value)),
    "npbytes": lambda value: import_module("numpy").bytes_(from_base64(value)),
    "npscalar": _numpy_scalar,
}


def _is_void(value: Any) -> bool:
    """True for a numpy record or raw numpy bytes, which raise if they are compared with another type."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.void)


# --- objects ------------------------------------------------------------------------------------------------------


def method_of(value: Any, name: str) -> Callable[..., Any] | None:
    """A method of an object, such as `state_dict`; None if the object has no such method.

    The method may be an attribute of the object itself, or come from the `__getattr__` of a wrapper. For mappings only
    the class is searched, since many mappings have each of their entries, or any name at all, as an attribute.
    """
    if isinstance(value, type) or (isinstance(value, Mapping) and not callable(getattr(type(value), name, None))):
        return None
    try:
        method = getattr(value, name, None)
    except Exception:  # a `__getattr__` may raise anything for an unknown name
        return None
    return method if callable(method) else None


# --- dataclasses --------------------------------------------------------------------------------------------------


def is_record(value: Any) -> bool:
    """True for an instance of a dataclass without attributes besides its fields, since others would be lost.

    False for an instance of a class that only inherits from a dataclass, since it may have more state than the fields.
    """
    kind = type(value)
    if "__dataclass_fields__" not in vars(kind):
        return False
    attributes: Any = ()
    with suppress(Exception):  # an instance with slots has no `__dict__`
        attributes = vars(value)
    return set(attributes) <= set(kind.__dataclass_fields__)


def field_names(record: Any) -> list[str]:
    """The names of the fields of a dataclass or its instance."""
    return [field.name for field in dataclasses.fields(record)]


def fields_of(record: Any) -> dict[str, Any]:
    """The fields of a dataclass instance that have a value; a field with `init=False` may have no value yet."""
    fields = {}
    for name in field_names(record):
        with suppress(AttributeError, LookupError):
            fields[name] = getattr(record, name)
    return fields


def has_fields(cls: Any, names: Mapping[str, Any]) -> bool:
    """True if these names are fields of a dataclass, and are sufficient to make an instance."""
    needed = {field.name for field in dataclasses.fields(cls) if field.init}
    return needed <= names.keys() <= set(field_names(cls))


def is_frozen(record: Any) -> bool:
    """True for an instance of a frozen dataclass."""
    return bool(type(record).__dataclass_params__.frozen)


def make_record(cls: Any, fields: Mapping[str, Any]) -> Any:
    """An instance of a dataclass with these fields, or a dict of the fields if the class refuses them.

    As in copying and unpickling, `__init__` and `__post_init__` are not called: the fields already have their results.
    """
    try:
        record = cls.__new__(cls)
        for name, value in fields.items():
            object.__setattr__(record, name, value)
    except Exception:  # the user's own class may raise anything
        return dict(fields)
    return record
