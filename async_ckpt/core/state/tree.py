"""The skeleton: a nested structure as JSON, in which numbers stand for tensors and pickled leaves.

In: any nesting of containers and plain values. Out: JSON; and the structure decoded from JSON.
Knows nothing of: files, devices, how a tensor is stored.

A plain value is a node of `plain`. Any other node is an object with one key, its kind: `{"dict": [[key, node], ...]}`,
`{"tensor": 7}`. Classes of namedtuples, dataclasses and enums are stored by name, and looked up among the caller's
`types`. A skeleton cannot refer to code: decoding imports nothing. A wrapped tensor is a container of tensors.

A restore compares live objects with notes in the node of a state dict: for an optimizer the names of its classes, for a
data loader the facts that the order of its items depends on.
"""

from __future__ import annotations

import json
import math
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, NamedTuple, TypeVar, cast

import torch

from ...errors import UnsupportedStateError
from ..slicing.sharded import is_ordinary
from ..spec import MAX_DIMS, Json, with_article
from .generators import SavedGenerator, generator_node
from .names import Path, numpy_dtype, printable, shown
from .per_rank import ListItems, PerRank
from .plain import (
    SCALARS,
    NotPlainError,
    class_name,
    enum_node,
    fields_of,
    has_fields,
    hashable_node,
    hashable_value,
    is_record,
    make_record,
    member_of,
    method_of,
    plain_node,
    plain_value,
    scalar_node,
)
from .wrapped import Wrapper, can_be_made, is_sparse_layout, made, taken_apart

T = TypeVar("T")

_STORED: Final = frozenset({"tensor", "ndarray", "bytes", "object"})
# The kinds of containers: of keys with nodes, and of nodes in order.
KEYED: Final = frozenset({"dict", "ordered", "dataclass", "places", "wrapped"})
IN_ORDER: Final = frozenset({"list", "tuple", "deque", "namedtuple"})
_OMITTED: Final = object()


# The keys of notes in the node of a state dict: for an optimizer, the class names of each of its parts, with base
# classes; for a data loader, its `loaders.loader_facts`.
CLASSES: Final = "optimizer"
LOADER: Final = "loader"


def is_omitted(node: Json) -> bool:
    """True for the node of a state from which nothing was selected."""
    return node is _OMITTED


def _stays_empty(container: Any, path: Path, keep: Callable[[Path], bool] | None) -> bool:
    """True if an empty container stays: it was empty before the selection, and is selected itself."""
    return keep is None or (not container and keep(path))


class Encoder:
    """One walk over a state.

    `leaf` returns the node of a value that is neither a container nor plain. `contents` returns the contents of an
    object with a `state_dict`. Leaves whose path `keep` refuses are left out, and so are containers that become empty.
    Dataclass instances that are `taken` are left out, since they belong elsewhere in the skeleton.
    """

    def __init__(
        self,
        leaf: Callable[[Any, Path], Json],
        keep: Callable[[Path], bool] | None = None,
        contents: Callable[[Any, Path], Any] = lambda value, _: value.state_dict(),
        taken: Callable[[Any, Path], bool] = lambda *_: False,
    ) -> None:
        self._leaf, self._keep, self._contents, self._taken = leaf, keep, contents, taken
        self.types: set[type] = set()  # `decode` needs these classes to build equal values
        self._open: set[int] = set()  # containers between the root and the current value, to detect cycles

    def encode(self, value: Any, path: Path = ()) -> Json:
        """The node for `value`. Raises UnsupportedStateError for a cycle, or a key that cannot be stored."""
        kind = type(value)
        if kind in SCALARS:
            return scalar_node(value) if self._is_kept(path) else _OMITTED
        if isinstance(value, torch.Tensor):
            return self._tensor(value, path, self._is_kept(path))
        if isinstance(value, Enum):  # first, since a member may also be an int or a tuple
            self.types.add(kind)
            return self._plain(value, enum_node, path)
        if kind is not dict and method_of(value, "state_dict") is not None:
            return self._inside(value, path, lambda: self.encode(self._contents(value, path), path))
        if isinstance(value, dict):
            return self._inside(value, path, lambda: self._dict(value, path))
        if isinstance(value, list | tuple):
            return self._inside(value, path, lambda: self._sequence(value, path))
        if kind is deque:
            return self._inside(value, path, lambda: self._deque(value, path))
        if isinstance(value, OfClass):
            return self._of_class(value, path)
        if is_record(value):
            if self._taken(value, path):
                return _OMITTED
            return self._inside(value, path, lambda: self._record(value, path))
        return self._plain(value, _value_node, path)

    def _tensor(self, value: Any, path: Path, is_kept: bool) -> Json:
        """The node of a tensor. A selected tensor is stored with all of its inner tensors."""
        apart = taken_apart(value, path)
        if apart is None:
            return self._leaf(value, path) if is_kept else _OMITTED
        wrapper, parts = apart
        inner = [(*path, name) for name in parts]
        nodes = [self._tensor(parts[at[-1]], at, is_kept or self._is_kept(at)) for at in inner]
        items = [[at[-1], node] for at, node in zip(inner, nodes, strict=True) if node is not _OMITTED]
        if len(items) < len(parts):
            return {"dict": items} if items else _OMITTED
        return {"wrapped": {**facts_of(wrapper, path, self.types), "inner": items}}

    def _plain(self, value: Any, to_node: Callable[[Any], Json | None], path: Path) -> Json:
        if not self._is_kept(path):
            return _OMITTED
        node = to_node(value)
        return self._leaf(value, path) if node is None else node

    def _is_kept(self, path: Path) -> bool:
        return self._keep is None or self._keep(path)

    def _inside(self, container: Any, path: Path, encode: Callable[[], Json]) -> Json:
        if id(container) in self._open:
            raise UnsupportedStateError(f"{shown(path)} contains itself; a checkpoint is a tree", path=shown(path))
        self._open.add(id(container))
        try:
            return encode()
        finally:
            self._open.discard(id(container))

    def _dict(self, value: dict[Any, Any], path: Path) -> Json:
        items = self._entries(value, path)
        if items is _OMITTED:
            return _OMITTED
        if not isinstance(value, OrderedDict):
            return {"places" if isinstance(value, ListItems) else "dict": items}
        # `Module.state_dict` attaches the versions of modules, which modules read when they load.
        metadata = vars(value).get("_metadata")
        if not isinstance(metadata, dict):
            return {"ordered": items}
        # The metadata is plain: version numbers.
        plain = Encoder(lambda _value, _path: None)
        return {"ordered": items, "metadata": plain.encode(dict(metadata), (*path, "_metadata"))}

    def _record(self, value: Any, path: Path) -> Json:
        self.types.add(type(value))
        items = self._entries(fields_of(value), path)
        return items if items is _OMITTED else {"dataclass": [class_name(type(value)), items]}

    def _of_class(self, value: OfClass, path: Path) -> Json:
        """The node that `decode` with `types=None` has made the value of."""
        name, fields = value.name, value.fields
        if isinstance(value.value, dict):
            items = self._entries(value.value, path)
            return {"wrapped": {**json.loads(fields[0]), "inner": items}} if fields else {"dataclass": [name, items]}
        if fields:
            return {"namedtuple": [name, list(fields), self._items(value.value, path)]}
        return {"enum": [name, hashable_node(value.value)]}

    def _entries(self, value: Mapping[Any, Any], path: Path) -> Any:
        items = []
        for key, item in value.items():
            inner = (*path, key)
            # Most items are ordinary tensors, and a state has up to hundreds of thousands of them.
            node = self._leaf(item, inner) if self._keep is None and is_ordinary(item) else self.encode(item, inner)
            if node is not _OMITTED:
                items.append([key if type(key) is str and key.isascii() else _key_node(key, inner), node])
        return items if items or _stays_empty(value, path, self._keep) else _OMITTED

    def _deque(self, value: deque[Any], path: Path) -> Json:
        nodes = self._items(value, path)
        return nodes if nodes is _OMITTED else {"deque": [nodes, value.maxlen]}

    def _items(self, value: Sequence[Any], path: Path) -> Any:
        encoded = [self.encode(item, (*path, i)) for i, item in enumerate(value)]
        nodes = [node for node in encoded if node is not _OMITTED]
        return nodes if nodes or _stays_empty(value, path, self._keep) else _OMITTED

    def _sequence(self, value: Sequence[Any], path: Path) -> Json:
        if isinstance(value, torch.Size):
            return {"size": list(value)} if self._is_kept(path) else _OMITTED
        nodes = self._items(value, path)
        if nodes is _OMITTED:
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


def facts_of(wrapper: Wrapper, path: Path, types: set[type]) -> dict[str, Json]:
    """The node of a wrapped tensor without its inner tensors. Classes that `decode` needs are added to `types`.

    A class in the context is stored by name. Raises UnsupportedStateError if the context is not plain data.
    """

    def class_node(value: Any, at: Path) -> Json:
        if isinstance(value, type):
            encoder.types |= {value} if can_be_made(value) else set()
            return {"class": class_name(value)}
        part = f"{shown(at[len(path) :])} in " if at != path else ""
        raise UnsupportedStateError(
            f"{shown(path)}: {part}the context of {wrapper.kind} is {with_article(type(value).__qualname__)}, and only "
            "plain data is stored; save its inner tensors, or a plain tensor of its values; nothing was written",
            path=shown(path),
        )

    encoder = Encoder(class_node, contents=class_node)
    facts = {
        "class": wrapper.kind,
        "size": list(wrapper.size),
        "stride": None if wrapper.stride is None else list(wrapper.stride),
        "context": encoder.encode(wrapper.context, path),
    }
    if wrapper.cls is not None:
        types |= {wrapper.cls, *encoder.types}
    return {**facts, "shards": list(map(list, wrapper.shards))} if wrapper.shards else facts


@dataclass(frozen=True, slots=True)
class StoredLeaf:
    """A leaf that is stored outside of the skeleton: entry `number` of its kind.

    Kinds "tensor" and "bytes" are numbered together, kind "object" separately. An "ndarray" counts as a tensor; `descr`
    and `shape` describe its bytes if torch has no dtype for it.
    """

    kind: str
    number: int
    descr: Json = None
    shape: Json = None
    path: Path = ()  # of an "object", for messages

    def as_array(self, tensor: torch.Tensor) -> Any:
        """A numpy array that shares the memory of `tensor`. Raises ValueError if it does not fit the bytes."""
        array = tensor.numpy()
        if self.descr is None:
            return array
        dtype = numpy_dtype(self.descr)
        if (
            len(self.shape) > MAX_DIMS
            or not all(type(n) is int and 0 <= n < 2**63 for n in self.shape)
            or math.prod(self.shape) * dtype.itemsize != array.size
        ):
            raise ValueError(f"shape {self.shape!r:.100} and dtype {self.descr!r:.100} do not fit {array.size} bytes")
        # An array without bytes cannot be a view. numpy allocates nothing for its items.
        return array.view(dtype).reshape(self.shape) if array.size else type(array)(tuple(self.shape), dtype)


def flat(names: Iterable[str]) -> Json:
    """The skeleton of a dict of tensors that are numbered in the order of their names."""
    return {"dict": [[name, {"tensor": number}] for number, name in enumerate(names)]}


@dataclass(frozen=True, slots=True)
class SavedRecord:
    """The saved fields of a dataclass instance, from which an instance is made once its leaves are read."""

    cls: type
    fields: dict[str, Any]


@dataclass(frozen=True, slots=True)
class OfClass:
    """A saved value of a class of which only the name is known.

    `value` is a dict of the fields of a dataclass, a tuple of the items of a namedtuple, whose names are in `fields`,
    or the value of an enum member.
    """

    name: str
    value: Any
    fields: tuple[str, ...] = ()


class InnerTensors(dict[str, Any]):
    """The inner tensors of a wrapped tensor by name. `wrapper` is None if the tensor's class is not known here."""

    def __init__(
        self, inner: Mapping[str, Any], facts: Mapping[str, Json], wrapper: Wrapper | None, path: Path
    ) -> None:
        super().__init__(inner)
        self.facts, self.wrapper, self.path = facts, wrapper, path

    @property
    def kind(self) -> str:
        return str(self.facts["class"])

    def of_size(self, like: torch.Tensor) -> InnerTensors:
        """The same inner tensors for a tensor of the size of `like`, which is a shard."""
        assert self.wrapper is not None
        wrapper = self.wrapper._replace(size=tuple(like.shape), stride=like.stride())
        return InnerTensors(self, self.facts, wrapper, self.path)

    def made(self, inner: dict[str, Any], *, of_shard: bool = False) -> Any:
        """The wrapped tensor built from these inner tensors; the dict `inner` if its class is not known.

        For a tensor that was cut into shards, this is a dict, too, unless `inner` are the inner tensors of a single
        shard. Raises ValueError if the class refuses them.
        """
        if self.wrapper is None or (self.wrapper.shards and not of_shard):
            return inner
        context = replaced(self.wrapper.context, lambda leaf: leaf)  # a context has no leaves
        try:
            return made(self.wrapper._replace(context=context), inner)
        except Exception as error:  # the user's own class may raise anything
            raise ValueError(
                f"{shown(self.path)}: {self.kind} cannot be made of its inner tensors "
                f"({type(error).__name__}: {error!s:.200}); leave it out of types= to get these"
            ) from error


class NodesByRank(NamedTuple):
    """A node for each rank, for a value that each rank has separately. Only in merged skeletons, never in a file."""

    nodes: Mapping[int, Json]


@dataclass(frozen=True, slots=True)
class ValuesByRank:
    """The saved values of a name that each rank has separately: rank -> value. `path` is for messages."""

    values: dict[int, Any]
    path: Path


def decode(
    node: Json, *, types: Iterable[type] | None = (), keep: Callable[[Path], bool] | None = None
) -> tuple[Any, list[StoredLeaf]]:
    """The structure of a skeleton, with a `StoredLeaf` for each leaf in the archive, and the list of these leaves.

    If its class is among `types`, a namedtuple or an enum member is an instance of the class, and a dataclass instance
    is a `SavedRecord`. Otherwise a namedtuple is a tuple, an enum member is its value, and a dataclass instance is a
    dict. Wrapped tensors are `InnerTensors`. If `types` is None, all of these are `OfClass`, a wrapped tensor with its
    facts as the only field. Leaves whose path `keep` refuses are left out, and so are containers that become empty; the
    result is None if nothing is left.

    Raises ValueError for a node that `encode` would not have made. No skeleton can cause another error, or an
    allocation larger than the skeleton itself. Raises TypeError for `types` that are not stored by name, or that have
    the same name, and for the class of a wrapped tensor if the classes that its context names are missing.
    """
    decoder = _Decoder(None if types is None else _by_name(types), keep)
    try:
        value = decoder.decode(node)
    except Exception as error:
        raise _malformed(error) from error
    if decoder.lacking:
        name, lacking = decoder.lacking[0]
        raise TypeError(f"types= has {name}, whose context needs {', '.join(sorted(lacking))}, too; add that to types=")
    return (None if value is _OMITTED else value), decoder.stored


def _by_name(types: Iterable[type]) -> dict[str, type]:
    by_name: dict[str, type] = {}
    if isinstance(types, type) or not isinstance(types, Iterable):
        name = types.__qualname__ if isinstance(types, type) else f"{types!r:.100}"
        raise TypeError(f"types must be a list of classes, such as types=[Config], got {name}")
    for cls in map(_rebuilt, types):
        name = class_name(cls)
        if by_name.setdefault(name, cls) is not cls:
            raise TypeError(
                f"two classes are called {name}, and only the name is saved; rename one of them, or use only one"
            )
    return by_name


def _rebuilt(cls: Any) -> Any:
    """Returns a class from `types`. Raises TypeError for a class that is never stored by name."""
    is_class = isinstance(cls, type)
    if is_class and ("__dataclass_fields__" in vars(cls) or issubclass(cls, Enum) or hasattr(cls, "_make")):
        return cls
    if is_class and can_be_made(cls):
        return cls
    name = cls.__qualname__ if is_class else f"{cls!r:.100}"
    raise TypeError(f"types must be classes of namedtuples, dataclasses, enums or wrapped tensors; got {name}")


def with_notes(node: Json, notes: Mapping[Path, Mapping[str, Json]]) -> Json:
    """The skeleton with notes added to the nodes of the state dicts at these paths."""
    for path, own in notes.items():
        inner = _node_at(node, path)
        if isinstance(inner, dict) and "dict" in inner:
            inner.update(own)
    return node


def classes_at(node: Json, path: Path) -> list[list[str]]:
    """The class names of each part of the optimizer that was saved at a path; empty if they are not known."""
    names = note_at(node, path, CLASSES)
    known = names if isinstance(names, list) else []
    return [[str(name) for name in chain] for chain in known if isinstance(chain, list) and chain]


def note_at(node: Json, path: Path, key: str) -> Json:
    """A note on the state dict that was saved at a path; None if it has no such note."""
    inner = _node_at(node, path)
    return inner.get(key) if isinstance(inner, dict) else None


def notes_of_all(nodes: Sequence[Json]) -> dict[str, Json]:
    """The notes of several ranks on one node: the classes of all ranks, and the loader facts common to all."""
    classes = dict.fromkeys(tuple(chain) for node in nodes for chain in classes_at(node, ()))
    loaders = [note_at(node, (), LOADER) for node in nodes]
    notes: dict[str, Json] = {CLASSES: [*map(list, classes)]} if classes else {}
    if all(isinstance(facts, dict) for facts in loaders):
        notes[LOADER] = {name: fact for name, fact in loaders[0].items() if all(fact == of.get(name) for of in loaders)}
    return notes


def _node_at(node: Json, path: Path) -> Json:
    """The node at a path of a well-formed skeleton; None if no node has this path."""
    for key in path:
        kind = kind_of(node)
        _, inside = split(kind, node[kind]) if kind in KEYED | IN_ORDER else ([], [])
        if kind in KEYED:
            node = next((inner for raw, inner in inside if key_of(raw) == key), None)
        else:
            node = inside[key] if type(key) is int and key < len(inside) else None
    return node


def kind_of(node: Json) -> Any:
    """The kind of a node; None for a scalar."""
    return next(iter(node), None) if isinstance(node, dict) else None


def split(kind: str, value: Json) -> tuple[list[Json], list[Json]]:
    """Splits the value of a container node into its facts and the list of its items."""
    if kind == "deque":
        nodes, maxlen = value
        return [maxlen], nodes
    if kind in ("dataclass", "namedtuple"):
        *facts, inside = value
        return facts, inside
    if kind == "wrapped":
        return [{name: fact for name, fact in value.items() if name != "inner"}], value["inner"]
    return [], value


def joined(kind: str, facts: list[Json], inside: list[Json]) -> Json:
    """The inverse of `split`."""
    if kind == "deque":
        return [inside, *facts]
    if kind == "wrapped":
        return {**facts[0], "inner": inside}
    return [*facts, inside] if facts else inside


def top_keys(node: Json) -> list[Any] | None:
    """The keys of a skeleton that is a dict, without decoding its values; None for any other skeleton.

    Raises ValueError for a node that `encode` would not have made.
    """
    kind = kind_of(node)
    if kind not in ("dict", "ordered"):
        return None
    try:
        return [key_of(raw) for raw, _ in node[kind]]
    except Exception as error:
        raise _malformed(error) from error


def _malformed(error: Exception) -> ValueError:
    """The error for a malformed skeleton, for any exception that its untrusted text has caused."""
    return ValueError(printable(f"{type(error).__name__}: {error!s:.200}"))


def replaced(
    value: Any,
    give: Callable[[StoredLeaf], Any],
    of_ranks: Callable[[ValuesByRank], Any] | None = None,
    of_inner: Callable[[InnerTensors, dict[str, Any]], Any] = InnerTensors.made,
) -> Any:
    """A copy of a decoded structure with every `StoredLeaf` replaced by the result of `give`.

    A value of each rank becomes a `PerRank`, or the result of `of_ranks`. A wrapped tensor becomes the result of
    `of_inner`, which also receives the copies of the inner tensors.
    """

    def copy_of(inner: Any) -> Any:
        return replaced(inner, give, of_ranks, of_inner)

    if isinstance(value, StoredLeaf):
        return give(value)
    if isinstance(value, ValuesByRank):
        if of_ranks is not None:
            return of_ranks(value)
        return PerRank({rank: replaced(item, give) for rank, item in value.values.items()})
    if isinstance(value, SavedRecord):
        return make_record(value.cls, copy_of(value.fields))
    if isinstance(value, SavedGenerator):
        return value.made()
    if isinstance(value, OfClass):
        return OfClass(value.name, copy_of(value.value), value.fields)
    if isinstance(value, InnerTensors):
        return of_inner(value, {name: copy_of(part) for name, part in value.items()})
    if type(value) in (dict, OrderedDict, ListItems):  # only these dicts have leaves; any other dict was in a pickle
        copy: Any = type(value)((key, copy_of(item)) for key, item in value.items())
        if isinstance(value, OrderedDict) and hasattr(value, "_metadata"):
            # A deep copy of the metadata: load_state_dict(assign=True) writes to its dicts.
            copy._metadata = copy_of(value._metadata)
        return copy
    if type(value) is list:
        return [copy_of(item) for item in value]
    if type(value) is set:
        return set(value)
    if type(value) is deque:
        return deque((copy_of(item) for item in value), value.maxlen)
    if isinstance(value, tuple) and not isinstance(value, torch.Size):
        items = [copy_of(item) for item in value]
        return value._make(items) if hasattr(value, "_make") else tuple(items)
    return value


def parts_in(value: Any, kind: type[T]) -> Iterator[T]:
    """The outermost parts of this class in a decoded structure. Values of each rank are not searched."""
    if isinstance(value, kind):
        yield value
    elif isinstance(value, SavedRecord):
        yield from parts_in(value.fields, kind)
    elif isinstance(value, OfClass):
        yield from parts_in(value.value, kind)
    elif isinstance(value, dict | list | tuple | deque) and type(value) is not torch.Size:
        for item in value.values() if isinstance(value, dict) else value:
            yield from parts_in(item, kind)


class _Decoder:
    def __init__(
        self, types: dict[str, type] | None, keep: Callable[[Path], bool] | None, *, of_context: bool = False
    ) -> None:
        """`of_context`: the node is the context of a wrapped tensor, which may contain classes by name."""
        self._types, self._keep, self._is_context = types, keep, of_context
        self.stored: list[StoredLeaf] = []
        self.unknown: set[str] = set()  # classes that are not among `types`
        self.lacking: list[tuple[str, set[str]]] = []  # classes of tensors, with missing classes of contexts

    def decode(self, node: Json, path: Path = ()) -> Any:
        if not isinstance(node, dict):
            if isinstance(node, NodesByRank):
                return self._apart(node, path)
            if isinstance(node, list):
                raise ValueError("a bare list in the skeleton")
            return self._leaf(lambda: node, path)
        kind = next(iter(node), None)
        value: Any = node.get(kind)
        if kind == "dict":
            return self._dict(value, path, {})
        if kind == "ordered":
            ordered = self._dict(value, path, OrderedDict())
            if ordered is not _OMITTED and "metadata" in node:
                ordered._metadata = _metadata(node["metadata"])
            return ordered
        if kind == "list":
            return self._items(value, path)
        if kind == "places":
            return self._places(value, path)
        if kind == "tuple":
            items = self._items(value, path)
            return items if items is _OMITTED else tuple(items)
        if kind in ("namedtuple", "deque", "dataclass", "wrapped"):
            return getattr(self, f"_{kind}")(value, path)
        if kind == "class" and self._is_context:
            return self._class(value)
        if kind == "enum":
            return self._leaf(lambda: self._enum(value), path)
        if kind == "generator":
            return self._leaf(lambda: SavedGenerator.of_node(value), path)
        if kind in _STORED:
            number, *facts = value if kind == "ndarray" else [value]
            shown_path = path if kind == "object" else ()
            return self._leaf(lambda: self._store(kind, number, *facts, path=shown_path), path)
        return self._leaf(lambda: plain_value(kind, value), path)

    def _apart(self, apart: NodesByRank, path: Path) -> Any:
        values = {rank: self.decode(node, path) for rank, node in apart.nodes.items()}
        kept = {rank: value for rank, value in values.items() if value is not _OMITTED}
        return ValuesByRank(kept, path) if kept else _OMITTED

    def _namedtuple(self, value: Json, path: Path) -> Any:
        name, fields, nodes = value
        items = self._items(nodes, path)
        if items is _OMITTED:
            return items
        if self._types is None:
            return OfClass(_class_name(name), tuple(items), tuple(map(str, fields)))
        cls: Any = self._class(name)
        same = getattr(cls, "_fields", None) == tuple(fields) and len(items) == len(fields)
        return cls._make(items) if same else tuple(items)

    def _wrapped(self, value: Json, path: Path) -> Any:
        facts = {name: fact for name, fact in value.items() if name != "inner"}
        keep = self._keep
        if is_whole := keep is None or keep(path):
            self._keep = None
        inner = self._dict(value["inner"], path, {})
        self._keep = keep
        if not is_whole or len(inner) < len(value["inner"]):
            return inner
        if self._types is None:
            return OfClass(_class_name(facts["class"]), inner, (json.dumps(facts),))
        return InnerTensors(inner, facts, self._wrapper(**facts), path)

    def _wrapper(self, **facts: Json) -> Wrapper | None:
        """A wrapped tensor without its inner tensors; None if its class is not among `types`."""
        kind, shards = _class_name(facts["class"]), tuple(tuple(map(int, cut)) for cut in facts.get("shards", ()))
        size, stride = _sizes(facts["size"]), facts["stride"] and _sizes(facts["stride"])
        assert self._types is not None
        cls = self._types.get(kind)
        if not is_sparse_layout(kind) and (cls is None or not can_be_made(cls)):
            return None
        context = _Decoder(self._types, None, of_context=True)
        value = context.decode(facts["context"])
        if context.stored:
            raise ValueError("the context of a tensor has a leaf that is stored apart")
        if context.unknown:
            self.lacking.append((kind, context.unknown))
        return Wrapper(kind, cls, size, stride, value, cast("Any", shards))

    def _deque(self, value: Json, path: Path) -> Any:
        nodes, maxlen = value
        items = self._items(nodes, path)
        if items is _OMITTED:
            return items
        if maxlen is not None and (type(maxlen) is not int or maxlen < len(nodes)):
            raise ValueError(f"a deque of {len(nodes)} items has a maxlen of {maxlen!r:.50}")
        return deque(items, maxlen)

    def _dataclass(self, value: Json, path: Path) -> Any:
        name, items = value
        fields = self._dict(items, path, {})
        if fields is _OMITTED:
            return fields
        if self._types is None:
            return OfClass(_class_name(name), fields)
        cls: Any = self._class(name)
        is_whole = len(fields) == len(items) and hasattr(cls, "__dataclass_fields__") and has_fields(cls, fields)
        return SavedRecord(cls, fields) if is_whole else fields

    def _enum(self, value: Json) -> Any:
        name, node = value
        plain = hashable_value(node)
        if self._types is None:
            return OfClass(_class_name(name), plain)
        cls = self._class(name)
        return member_of(cls, plain) if cls is not None and issubclass(cls, Enum) else plain

    def _class(self, name: str) -> type | None:
        cls = None if self._types is None else self._types.get(name)
        if cls is None:
            self.unknown.add(_class_name(name))
        return cls

    def _store(self, kind: str, number: Json, descr: Json = None, shape: Json = None, *, path: Path = ()) -> StoredLeaf:
        if type(number) is not int or number < 0:
            raise ValueError(f"{number!r:.50} is not the number of a leaf")
        self.stored.append(StoredLeaf(kind, number, descr, shape, path))
        return self.stored[-1]

    def _leaf(self, make: Callable[[], Any], path: Path) -> Any:
        return make() if self._keep is None or self._keep(path) else _OMITTED

    def _dict(self, items: Json, path: Path, into: Any) -> Any:
        for raw_key, node in items:
            key = key_of(raw_key)
            value = self.decode(node, (*path, key))
            if value is not _OMITTED:
                into[key] = value
        return into if into or _stays_empty(items, path, self._keep) else _OMITTED

    def _places(self, items: Json, path: Path) -> Any:
        ordered = dict(sorted(items))
        if len(ordered) < len(items) or any(type(key) is not int or key < 0 for key in ordered):
            raise ValueError("the places in a list must be different numbers from 0")
        if ordered.keys() == set(range(len(items))):
            return self._items(ordered.values(), path)
        return self._dict(items, path, ListItems())

    def _items(self, nodes: Json, path: Path) -> Any:
        values = [self.decode(node, (*path, i)) for i, node in enumerate(nodes)]
        kept = [v for v in values if v is not _OMITTED]
        return kept if kept or _stays_empty(nodes, path, self._keep) else _OMITTED


def _sizes(value: Json) -> tuple[int | None, ...]:
    """The sizes, or strides, of a wrapped tensor."""
    if len(value) > MAX_DIMS or not all(size is None or (type(size) is int and 0 <= size < 2**63) for size in value):
        raise ValueError(f"{value!r:.100} is not the size of a tensor")
    return tuple(value)


def _value_node(value: Any) -> Json | None:
    """The node of a plain value or a random generator; None for any other value."""
    node = plain_node(value)
    return generator_node(value) if node is None else node


def _class_name(name: Json) -> str:
    if not isinstance(name, str):
        raise ValueError(f"{name!r:.50} is not the name of a class")
    return name


def _key_node(key: Any, path: Path) -> Json:
    """A dict key as a node. Raises UnsupportedStateError for a key that needs a pickle."""
    if type(key) is str:
        return scalar_node(key)
    cause: NotPlainError | None = None
    try:
        node = hashable_node(key)
        str(key)  # tensor names contain the key; Python refuses to convert more than some thousand digits
        return node
    except NotPlainError as error:
        why, cause = f"a key of type {error.kind} cannot be stored; use a string or a number", error
    except ValueError:
        why = "a key with that many digits cannot be stored; use a string, or a smaller number"
    raise UnsupportedStateError(f"{shown(path)}: {why}", path=shown(path)) from cause


def key_of(node: Json) -> Any:
    """The key of a dict from its node."""
    return node if isinstance(node, str) else hashable_value(node)


def _metadata(node: Json) -> dict[Any, Any]:
    value, stored = decode(node)
    if stored or not isinstance(value, dict):
        raise ValueError("the metadata of a state dict is not a dict of plain values")
    return value
