"""The skeleton: a nested structure as JSON, with its tensors and its pickled leaves cut out and numbered.

In: any nesting of containers and plain values. Out: JSON, and the structure back from it.
Knows nothing of: files, devices, how a tensor is stored.

A plain value stands for itself where JSON has it; everything else is an object with one key, its kind:
`{"dict": [[key, node], ...]}`, `{"tensor": 7}`, `{"float": "7ff8000000000000"}`. Nothing in it can name code:
decoding imports nothing.
"""

from __future__ import annotations

import base64
import itertools
import math
import struct
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from ..errors import UnsupportedStateError
from ..spec import Json
from .names import Path, printable, shown

_SCALARS: Final = frozenset({str, int, float, bool, type(None)})
# Bytes from here on are stored like a tensor: base64 in the index would cost a third more, and every reader's time.
INLINE_BYTES: Final = 4096
# More than any dtype has; from a few megabytes of fields within fields, numpy takes minutes to make one.
_MAX_FIELDS: Final = 10_000
_MAX_DIMS: Final = 64
_STORED: Final = frozenset({"tensor", "ndarray", "bytes", "object"})
_OMITTED: Final = object()


def is_omitted(node: Json) -> bool:
    """Nothing was selected of a whole state."""
    return node is _OMITTED


class Encoder:
    """One walk over a state. `leaf` gets what is neither container nor plain value, and returns its node; `contents` tells
    what is in an object with a `state_dict`.

    Leaves whose path `keep` turns down are left out, and so are containers that end up without any.
    """

    def __init__(
        self,
        leaf: Callable[[Any, Path], Json],
        keep: Callable[[Path], bool] | None = None,
        contents: Callable[[Any, Path], Any] = lambda value, _: value.state_dict(),
    ) -> None:
        self._leaf, self._keep, self._contents = leaf, keep, contents
        self.types: set[type] = set()  # that `decode` needs to make the same again
        self._open: set[int] = set()  # containers between the root and here: meeting one again is a cycle

    def encode(self, value: Any, path: Path = ()) -> Json:
        """The node for `value`. Raises UnsupportedStateError for a cycle, or a key that cannot be stored."""
        kind = type(value)
        if kind in _SCALARS:
            return _scalar_node(value) if self._is_kept(path) else _OMITTED
        if isinstance(value, torch.Tensor):
            return self._leaf(value, path) if self._is_kept(path) else _OMITTED
        if kind is not dict and not isinstance(value, type) and callable(getattr(value, "state_dict", None)):
            return self._inside(value, path, lambda: self.encode(self._contents(value, path), path))
        if isinstance(value, dict):
            return self._inside(value, path, lambda: self._dict(value, path))
        if isinstance(value, list | tuple):
            return self._inside(value, path, lambda: self._sequence(value, path))
        if not self._is_kept(path):
            return _OMITTED
        node = _plain_node(value)
        return self._leaf(value, path) if node is None else node

    def _is_kept(self, path: Path) -> bool:
        return self._keep is None or self._keep(path)

    def _inside(self, container: Any, path: Path, encode: Callable[[], Json]) -> Json:
        if id(container) in self._open:
            where = shown(path)
            raise UnsupportedStateError(f"{where} contains itself; a checkpoint is a tree", path=where)
        self._open.add(id(container))
        try:
            return encode()
        finally:
            self._open.discard(id(container))

    def _dict(self, value: dict[Any, Any], path: Path) -> Json:
        items = []
        for key, item in value.items():
            inner = (*path, key)
            node = self.encode(item, inner)
            if node is not _OMITTED:
                items.append([_key_node(key, inner), node])
        if not (items or self._stays_empty(value, path)):
            return _OMITTED
        if not isinstance(value, OrderedDict):
            return {"dict": items}
        # What `Module.state_dict` hangs on its result; modules read their version from it when they load.
        metadata = getattr(value, "_metadata", None)
        if not isinstance(metadata, dict):
            return {"ordered": items}
        return {"ordered": items, "metadata": Encoder(_no_leaf).encode(dict(metadata), (*path, "_metadata"))}

    def _sequence(self, value: Sequence[Any], path: Path) -> Json:
        if isinstance(value, torch.Size):
            return {"size": list(value)} if self._is_kept(path) else _OMITTED
        encoded = [self.encode(item, (*path, i)) for i, item in enumerate(value)]
        nodes = [node for node in encoded if node is not _OMITTED]
        if not (nodes or self._stays_empty(value, path)):
            return _OMITTED
        if isinstance(value, tuple) and len(nodes) < len(value):
            return {"tuple": nodes}
        if isinstance(value, list):
            return {"list": nodes}
        fields = getattr(value, "_fields", None)
        if fields is None:
            return {"tuple": nodes}
        self.types.add(type(value))
        return {"namedtuple": [class_name(type(value)), list(fields), nodes]}

    def _stays_empty(self, container: Any, path: Path) -> bool:
        """Whether a container without entries stays: it had none, and is itself wanted."""
        return self._keep is None or (not container and self._keep(path))


@dataclass(frozen=True, slots=True)
class Stored:
    """A leaf that is not in the skeleton itself: entry `number` of its kind.

    "tensor" and "bytes" are numbered together, "object" apart. An "ndarray" is a tensor too; `descr` and `shape`
    say how its bytes are to be read when torch has no dtype for it.
    """

    kind: str
    number: int
    descr: Json = None
    shape: Json = None
    path: Path = ()  # of an "object", for people: what is in it is not known before it is opened

    def as_array(self, tensor: torch.Tensor) -> Any:
        """The numpy array over the memory of `tensor`, which holds the bytes. Raises ValueError where they do not fit."""
        array = tensor.numpy()
        if self.descr is None:
            return array
        dtype = _numpy_dtype(self.descr)
        if (
            len(self.shape) > _MAX_DIMS
            or not all(type(n) is int and 0 <= n < 2**63 for n in self.shape)
            or math.prod(self.shape) * dtype.itemsize != array.size
        ):
            raise ValueError(
                f"shape {self.shape!r:.100} and dtype {self.descr!r:.100} do not fit {array.size} bytes"
            )
        # Without bytes there is nothing to view; numpy counts such an array's items without allocating any.
        return array.view(dtype).reshape(self.shape) if array.size else type(array)(tuple(self.shape), dtype)


def flat(names: Iterable[str]) -> Json:
    """The skeleton of a dict of tensors that are numbered in the order of their names."""
    return {"dict": [[name, {"tensor": number}] for number, name in enumerate(names)]}


def decode(
    node: Json, *, types: Iterable[type] = (), keep: Callable[[Path], bool] | None = None
) -> tuple[Any, list[Stored]]:
    """The structure back from its skeleton, with a `Stored` where the archive has more to say; and all of these.

    A namedtuple becomes its class if that is among `types`, else a plain tuple. Leaves whose path `keep` turns down
    are left out, and so are containers that end up without any; the whole is None when nothing is left.
    Raises ValueError for a node that `encode` would not have made: nothing in a skeleton can make it raise another
    error, or allocate more than the skeleton's own size.
    """
    decoder = _Decoder({class_name(t): t for t in types}, keep)
    try:
        value = decoder.decode(node)
    except Exception as error:
        raise _malformed(error) from error
    return (None if value is _OMITTED else value), decoder.stored


def top_keys(node: Json) -> list[Any] | None:
    """The keys of a skeleton that is a dict, without decoding what they stand for; None for any other.

    Raises ValueError for a node that `encode` would not have made.
    """
    kind = next(iter(node), None) if isinstance(node, dict) else None
    if kind not in ("dict", "ordered"):
        return None
    try:
        return [_key(raw) for raw, _ in node[kind]]
    except Exception as error:
        raise _malformed(error) from error


def _malformed(error: Exception) -> ValueError:
    """The text may be anybody's: whatever it makes Python raise means the same."""
    return ValueError(printable(f"{type(error).__name__}: {error!s:.200}"))


def replaced(value: Any, give: Callable[[Stored], Any]) -> Any:
    """A copy of a decoded structure with every `Stored` replaced by what `give` has for it."""
    if isinstance(value, Stored):
        return give(value)
    if isinstance(value, dict):
        made = type(value)((key, replaced(item, give)) for key, item in value.items())
        if isinstance(value, OrderedDict) and hasattr(value, "_metadata"):
            made._metadata = value._metadata  # type: ignore[attr-defined]
        return made
    if type(value) is list:
        return [replaced(item, give) for item in value]
    if isinstance(value, tuple) and not isinstance(value, torch.Size):
        items = [replaced(item, give) for item in value]
        return value._make(items) if hasattr(value, "_make") else tuple(items)
    return value


class _Decoder:
    def __init__(self, types: dict[str, type], keep: Callable[[Path], bool] | None) -> None:
        self._types, self._keep = types, keep
        self.stored: list[Stored] = []

    def decode(self, node: Json, path: Path = ()) -> Any:
        if not isinstance(node, dict):
            if isinstance(node, list):
                raise ValueError("a bare list in the skeleton")
            return self._leaf(lambda: node, path)
        kind = next(iter(node), None)
        value: Any = node.get(kind)
        if kind == "dict":
            return self._dict(value, path, {})
        if kind == "ordered":
            made = self._dict(value, path, OrderedDict())
            if made is not _OMITTED and "metadata" in node:
                made._metadata = _metadata(node["metadata"])
            return made
        if kind == "list":
            return self._items(value, path)
        if kind == "tuple":
            items = self._items(value, path)
            return items if items is _OMITTED else tuple(items)
        if kind == "namedtuple":
            name, fields, nodes = value
            items = self._items(nodes, path)
            if items is _OMITTED:
                return items
            cls: Any = self._types.get(name)
            same = getattr(cls, "_fields", None) == tuple(fields) and len(items) == len(fields)
            return cls._make(items) if same else tuple(items)
        if kind in _STORED:
            number, *how = value if kind == "ndarray" else [value]
            where = path if kind == "object" else ()
            return self._leaf(lambda: self._store(kind, number, *how, path=where), path)
        return self._leaf(lambda: _plain_value(kind, value), path)

    def _store(
        self, kind: str, number: Json, descr: Json = None, shape: Json = None, *, path: Path = ()
    ) -> Stored:
        if type(number) is not int or number < 0:
            raise ValueError(f"{number!r:.50} does not number a leaf")
        self.stored.append(Stored(kind, number, descr, shape, path))
        return self.stored[-1]

    def _leaf(self, make: Callable[[], Any], path: Path) -> Any:
        return make() if self._keep is None or self._keep(path) else _OMITTED

    def _dict(self, items: Json, path: Path, into: Any) -> Any:
        for raw_key, node in items:
            key = _key(raw_key)
            value = self.decode(node, (*path, key))
            if value is not _OMITTED:
                into[key] = value
        return into if into or self._wanted_empty(items, path) else _OMITTED

    def _items(self, nodes: Json, path: Path) -> Any:
        values = [self.decode(node, (*path, i)) for i, node in enumerate(nodes)]
        kept = [v for v in values if v is not _OMITTED]
        return kept if kept or self._wanted_empty(nodes, path) else _OMITTED

    def _wanted_empty(self, nodes: Json, path: Path) -> bool:
        """Whether a container without entries stays: it had none, and is itself wanted."""
        return self._keep is None or (not nodes and self._keep(path))


def class_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def dtype_named(name: str) -> torch.dtype:
    """The torch dtype of that name; raises ValueError when this torch has none."""
    dtype = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"this version of torch has no dtype {name!r:.50}; install a newer one to load it")
    return dtype


def _scalar_node(value: Any) -> Json:
    """What JSON has too stands for itself, unless JSON would change it."""
    if isinstance(value, str):
        return (
            value
            if value.isascii() or _is_unicode(value)
            else {"str": value.encode("utf-8", "surrogatepass").hex()}
        )
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": struct.pack(">d", value).hex()}
    if type(value) is int and not -(2**63) <= value < 2**63:
        return {"int": hex(value)}
    return value


def _is_unicode(text: str) -> bool:
    """False for text with lone surrogates, two of which JSON would join into one character."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _plain_node(value: Any) -> Json | None:
    """The node of a value that needs no pickle, or None."""
    kind = type(value)
    if kind is bytes and len(value) < INLINE_BYTES:
        return {"inline": _base64(value)}
    if kind is complex:
        return {"complex": struct.pack(">dd", value.real, value.imag).hex()}
    if kind is torch.dtype:
        return {"dtype": dtype_name(value)}
    if kind is torch.device:
        return {"device": str(value)}
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.generic) and is_describable(value.dtype):
        if isinstance(value, numpy.str_):
            return {"npstr": _scalar_node(value[:])}  # str(value) would drop trailing zeros
        if isinstance(value, numpy.bytes_):
            return {"npbytes": _base64(bytes(value))}
        return {"npscalar": [numpy.lib.format.dtype_to_descr(value.dtype), _base64(value.tobytes())]}
    return None


def _plain_value(kind: str | None, value: Json) -> Any:
    if kind == "float":
        return struct.unpack(">d", bytes.fromhex(value))[0]
    if kind == "int":
        return int(value, 16)
    if kind == "str":
        return bytes.fromhex(value).decode("utf-8", "surrogatepass")
    if kind == "inline":
        return base64.b64decode(value, validate=True)
    if kind == "complex":
        return complex(*struct.unpack(">dd", bytes.fromhex(value)))
    if kind == "size":
        return torch.Size(value)
    if kind == "dtype":
        return dtype_named(value)
    if kind == "device":
        return torch.device(value)
    if kind in ("npstr", "npbytes", "npscalar"):
        return _numpy_scalar(kind, value)
    raise ValueError(f"the skeleton has a node of the unknown kind {kind!r:.50}")


def _numpy_scalar(kind: str, value: Json) -> Any:
    import numpy

    if kind == "npstr":
        return numpy.str_(_key(value))
    if kind == "npbytes":
        return numpy.bytes_(base64.b64decode(value, validate=True))
    dtype = _numpy_dtype(value[0])
    data = base64.b64decode(value[1], validate=True)
    if len(data) != dtype.itemsize:
        raise ValueError("a numpy scalar with another number of bytes than its dtype has")
    return numpy.frombuffer(data, dtype)[0] if data else numpy.zeros((), dtype)[()]


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _key_node(key: Any, path: Path) -> Json:
    """A dict key as a node; only what hashes and needs no pickle."""
    if type(key) is int and not _has_text(key):
        raise UnsupportedStateError(
            f"{shown(path)}: a key of {key.bit_length():,} bits cannot be stored; use a string, or a smaller number",
            path=shown(path),
        )
    if type(key) in _SCALARS:
        return _scalar_node(key)
    if type(key) is tuple:
        return {"tuple": [_key_node(part, path) for part in key]}
    node = None if _is_void(key) else _plain_node(key)
    if node is None:
        raise UnsupportedStateError(
            f"{shown(path)}: a key of type {type(key).__qualname__} cannot be stored; use a string or a number",
            path=shown(path),
        )
    return node


def _has_text(number: int) -> bool:
    """Whether Python writes an integer in decimal, as names of tensors do: some thousands of digits are its limit."""
    try:
        str(number)
    except ValueError:
        return False
    return True


def _key(node: Json) -> Any:
    if isinstance(node, str):
        return node
    key = _plain(node)
    if _is_void(key):
        raise ValueError("a key of the skeleton is a record of numpy")
    return key


def _is_void(key: Any) -> bool:
    """Whether a key is a record, or raw bytes, of numpy: they raise when they are compared with anything else."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(key, numpy.void)


def _plain(node: Json) -> Any:
    """What a node stands for that has no leaf stored elsewhere."""
    value, stored = decode(node)
    if stored:
        raise ValueError("a key, or metadata, of the skeleton is not a plain value")
    return value


def _metadata(node: Json) -> dict[Any, Any]:
    value = _plain(node)
    if not isinstance(value, dict):
        raise ValueError("the metadata of a state dict is not a dict")
    return value


def _no_leaf(_value: Any, _path: Path) -> Json:
    return None  # a state dict's metadata is plain: version numbers


def is_describable(dtype: Any) -> bool:
    """Whether an array of this dtype is stored as its bytes: it holds no Python objects, and not too many fields."""
    return not dtype.hasobject and _num_fields(dtype) <= _MAX_FIELDS


def _num_fields(dtype: Any) -> int:
    """The fields of a structured dtype, those within fields and the gaps between them included."""
    if dtype.subdtype is not None:
        return _num_fields(dtype.subdtype[0])
    return sum(2 + _num_fields(dtype.fields[name][0]) for name in dtype.names or ())


def _numpy_dtype(descr: Json) -> Any:
    """A dtype from its .npy description; never one with Python objects."""
    import numpy

    dtype = numpy.lib.format.descr_to_dtype(_tuples(descr, itertools.count()))
    if dtype.hasobject:
        raise ValueError("a numpy array of Python objects outside of objects.pt")
    return dtype


def _tuples(descr: Json, fields: Iterator[int]) -> Any:
    """JSON has turned the tuples of a structured dtype's description into lists. `fields` counts its fields."""
    if isinstance(descr, str):
        if len(descr) > 1000:
            raise ValueError(f"the dtype {descr:.50}… is too long")
        return descr
    made = []
    for name, inner, *shape in descr:
        if next(fields) > _MAX_FIELDS:
            raise ValueError(f"a dtype of more than {_MAX_FIELDS:,} fields")
        made.append(
            (tuple(name) if isinstance(name, list) else name, _tuples(inner, fields), *map(tuple, shape))
        )
    return made
