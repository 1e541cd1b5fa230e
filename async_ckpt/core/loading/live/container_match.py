"""Live containers and saved ones, side by side: each is filled where it is, item by item.

In: live containers, and the structure of an archive. Out: changes to make once all is read, and differences. Knows
nothing of: modules, optimizers, sharded tensors.

Whatever can change stays the same object. Where it cannot be filled, that is a difference; only items of a history,
which come and go, are exchanged.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, MutableSet, Sequence
from contextlib import contextmanager, suppress
from enum import Enum
from typing import Any, Final

import torch

from ...slicing.sharded import is_of_megatron
from ...slicing.slices import Ints
from ...spec import with_article
from ...state.generators import SavedGenerator, copy_state, is_generator
from ...state.megatron_tensors import keys_below
from ...state.names import Path, Selector, dotted, shown
from ...state.per_rank import ListItems
from ...state.plain import (
    SCALARS,
    field_names,
    fields_of,
    has_fields,
    is_frozen,
    is_record,
    make_record,
    member_of,
    method_of,
)
from ...state.tree import InnerTensors, SavedRecord, StoredLeaf, ValuesByRank, parts_in, replaced
from ...state.wrappers import SEQUENCES, StateDictCache
from ..archives.contents import Contents, Part
from ..fill import Wanted
from .containers import (
    Change,
    are_same_objects,
    buffer_change,
    child_of,
    entry_change,
    field_change,
    is_array,
    is_buffer,
    is_immutable,
    is_list,
    is_mapping,
    is_namespace,
    is_plain,
    list_change,
    mapping_change,
    set_change,
)
from .differences import Differences

HOW_TO_MAKE_ONE: Final = (
    "nothing here can be filled: give its class in types=, or make it first, as an optimizer does in its first step"
)


class ContainerMatch:
    """The part of a walk that is about containers and plain values; `Match` is the whole."""

    def __init__(
        self,
        part: Part,
        objects: list[Any],
        chosen: Selector | None,
        state_dicts: StateDictCache,
        *,
        goes_back: bool,
    ) -> None:
        """`objects` are the unpickled ones, and `chosen` is the selection, None for all. `goes_back`: the live state is
        that of a training which has saved or restored before, so that names it lacks were added since.
        """
        self.wanted: dict[tuple[int, Ints | None, int], Wanted] = {}
        self.actions: list[Callable[[], None]] = []
        self.differences = Differences(chosen)
        self.archive, self._objects, self._state_dicts = part.archive, objects, state_dicts
        self._keeps_empty, self._goes_back = part.keeps_empty, goes_back
        self._new: dict[int, torch.Tensor] = {}  # memory of tensors without a live counterpart
        self._groups: dict[Path, dict[Any, Any]] = {}  # the saved dicts at the top and of the groups
        self._filled = _FilledObjects(part.archive, objects)
        self._in_history = False  # the items here come and go, so that one which does not fit is exchanged

    def visit(self, live: Any, saved: Any, path: Path) -> Any:
        """Match one pair. Returns the value that the place should have afterwards: the live object, or a new one."""
        raise NotImplementedError

    def megatron_tensor(self, live: Any, path: Path) -> None:
        """Match one of Megatron's sharded tensors, which has its own name in the group that it lies in."""
        raise NotImplementedError

    def _value(self, live: Any, saved: Any, path: Path) -> Any:
        """Match a live value that is no tensor, and has no state of its own."""
        if isinstance(live, Enum):  # like a namedtuple, it is of the live class
            return member_of(type(live), self._materialize(saved))
        if is_immutable(live) and not (isinstance(live, tuple) or is_record(live)):
            return self._materialize(saved)
        saved = self._unpickled(live, saved)
        is_rebuilt = isinstance(live, tuple) or (is_record(live) and is_frozen(live))
        if not is_rebuilt and (why := self._filled.why_not(live, saved, path)):
            return self._unfit(live, saved, path, why)
        if is_array(live):
            return self._array(live, saved, path)
        if is_generator(live):
            return self._generator(live, saved, path)
        return self._container(live, saved, path)

    def _unpickled(self, live: Any, saved: Any) -> Any:
        """The items of a pickled container, so that the live one is filled with them; any other value as it is."""
        value = self._object_of(saved)
        if isinstance(value, dict | SEQUENCES):
            return value
        if is_mapping(live) and is_mapping(value):
            return {key: value[key] for key in list(value)}
        if is_namespace(live) and type(value) is type(live):
            return dict(vars(value))
        if (is_list(live) or isinstance(live, tuple)) and (is_list(value) or isinstance(value, tuple)):
            return list(value)
        return set(value) if isinstance(live, MutableSet) and isinstance(value, MutableSet) else saved

    def _object_of(self, saved: Any) -> Any:
        """The object that was pickled; any other saved value as it is."""
        is_object = isinstance(saved, StoredLeaf) and saved.kind == "object"
        return self._objects[saved.number] if is_object else saved

    def _unfit(self, live: Any, saved: Any, path: Path, why: str) -> Any:
        """Note that a live object cannot be filled; or exchange it, as an item of a history."""
        if self._in_history:
            return self._materialize(saved)
        self.differences.add(path, why)
        return live

    def _change(self, live: Any, change: Change | None, path: Path) -> Any:
        """Make a change when everything has been read. One that the live object would refuse is a difference."""
        if change is not None and (why := change.why_not()):
            self.differences.add(
                path, f"cannot be filled: {with_article(type(live).__qualname__)} refuses the change ({why})"
            )
        elif change is not None:
            self.actions.append(change.make)
        return live

    @contextmanager
    def _history(self, is_history: bool = True) -> Iterator[None]:
        """Visit items that come and go, so that one may be exchanged."""
        before, self._in_history = self._in_history, self._in_history or is_history
        try:
            yield
        finally:
            self._in_history = before

    def _container(self, live: Any, saved: Any, path: Path) -> Any:
        fields = saved.fields if isinstance(saved, SavedRecord) else saved
        if isinstance(fields, dict) and not isinstance(fields, ListItems):
            if is_mapping(live):
                return self._mapping(live, fields, path)
            if is_record(live):
                return self._record(live, fields, path)
            if is_namespace(live):
                self._mapping(vars(live), fields, path)
                return live
        if is_list(live) or isinstance(live, tuple):
            saved = saved if self._keeps_empty else self._all_items(live, saved)
            if isinstance(saved, SEQUENCES) and not isinstance(saved, torch.Size):
                return self._tuple(live, saved, path) if isinstance(live, tuple) else self._list(live, saved, path)
        if isinstance(live, MutableSet) and isinstance(saved, set | frozenset):
            return self._change(live, set_change(live, saved), path)
        if is_buffer(live):
            return self._buffer(live, saved, path)
        if is_immutable(live):
            return self._materialize(saved)
        return self._opaque(live, saved, path)

    def _opaque(self, live: Any, saved: Any, path: Path) -> Any:
        """Leave an object of another kind as it is, if it was saved as it is; otherwise it cannot be filled."""
        if are_same_objects(live, self._object_of(saved)):
            return live
        if self._in_history or (is_record(live) and all(map(is_immutable, fields_of(live).values()))):
            return self._materialize(saved)
        kind = with_article(type(live).__qualname__)
        if is_list(live) or is_mapping(live) or isinstance(live, tuple | MutableSet) or is_record(live):
            self._add_kind_difference(path, f"is {kind} here", saved)
        elif method_of(live, "state_dict") is not None:
            self.differences.add(path, f"is {kind} here, which has a state_dict() but no load_state_dict(): add it")
        else:
            self.differences.add(
                path,
                f"is {kind} here, which restore cannot fill: other holders of the object would keep the old value; "
                "give it state_dict() and load_state_dict(), or use load(), and leave it out here with select=",
            )
        return live

    def _buffer(self, live: Any, saved: Any, path: Path) -> Any:
        content = self._materialize(saved)
        fits = content.typecode == live.typecode if isinstance(content, array) and isinstance(live, array) else False
        if not (fits or (isinstance(live, bytearray) and isinstance(content, bytes | bytearray))):
            self._add_kind_difference(path, f"is {with_article(type(live).__qualname__)} here", saved)
            return live
        return live if content == live else self._change(live, buffer_change(live, content), path)

    def _generator(self, live: Any, saved: Any, path: Path) -> Any:
        value = self._object_of(saved)
        self.differences.generators.add(id(live))
        if is_generator(value):
            known = SavedGenerator.of(value)
            if known is None and type(value) is type(live):
                self.actions.append(lambda: copy_state(value, live))
                return live
            saved = saved if known is None else known
        if not isinstance(saved, SavedGenerator):
            self._add_kind_difference(path, f"is {with_article(type(live).__qualname__)} here", saved)
        elif why := saved.why_not(live):
            self.differences.add(path, why)
        else:
            self.actions.append(lambda: saved.put_into(live))
        return live

    def _mapping(self, live: MutableMapping[Any, Any], saved: dict[Any, Any], path: Path) -> Any:
        if not len(live):  # an empty container takes all that was saved
            return self._entries(live, {}, saved, path)
        has_names = any(isinstance(key, str) for key in live) and not isinstance(live, defaultdict | Counter)
        # At the top, names that are not live are not asked for.
        if (path or not has_names) and is_plain(live, with_arrays=self._in_history):
            return self._plain_mapping(live, self._with_live_keys(live, saved), path)
        names: set[Any] = set()  # the saved names of Megatron's tensors
        if len(path) < 2:
            self._groups[path], names = saved, keys_below(live, deep=bool(path))
        keyed = [key for key, value in live.items() if is_of_megatron(value)]
        others = {name: value for name, value in saved.items() if name not in names}
        self._compare_names(
            [key for key in live if not (key in keyed or self._is_left_out(live, key, saved))], others, path
        )
        for key in list(live):
            if key in keyed:
                self.megatron_tensor(live[key], (*path, key))
            elif key in others:
                self._entry(live, key, saved[key], (*path, key))
        return live

    def _entry(self, live: MutableMapping[Any, Any], key: Any, saved: Any, path: Path) -> None:
        now = live[key]
        value = self.visit(now, saved, path)
        if value is not now:
            self._change(live, entry_change(live, key, value), path)

    def _plain_mapping(self, live: MutableMapping[Any, Any], saved: dict[Any, Any], path: Path) -> Any:
        """Match a mapping of plain values: it gets the entries that were saved, and loses what was added later.

        A name that only the live one has is a difference at the start of a program, which may have got a new setting.
        """
        is_history = self._in_history or isinstance(live, defaultdict | Counter)
        kept, missing = {}, []
        for key in [key for key in live if key not in saved]:
            if self._is_left_out(live, key, saved) or not self._is_chosen((*path, key)):
                kept[key] = live[key]
            elif isinstance(key, str) and not (is_history or self._goes_back):
                kept[key] = live[key]
                missing.append(key)
        if missing:
            self.differences.add_names(missing, (), path)
        with self._history(is_history):
            return self._entries(live, kept, saved, path)

    def _entries(self, live: MutableMapping[Any, Any], kept: dict[Any, Any], saved: dict[Any, Any], path: Path) -> Any:
        """Give a mapping all entries that were saved, in their order, beside those that it keeps."""
        entries: dict[Any, Any] = {}
        for key, value in saved.items():
            inner = (*path, key)
            with self._history(not isinstance(key, str)):
                if key in live:
                    entries[key] = self.visit(live[key], value, inner)
                elif not self.archive.is_of_others(inner):
                    entries[key] = self._new_entry(live, value, inner)
        if kept or not self._keeps_empty:  # the order of a part, and of torch.distributed.checkpoint, says nothing
            both = kept | entries
            entries = {key: both[key] for key in live if key in both} | entries
        self._change(live, mapping_change(live, entries), path)
        if isinstance(live, OrderedDict) and not len(live) and hasattr(saved, "_metadata"):
            self.actions.append(lambda: setattr(live, "_metadata", saved._metadata))
        return live

    def _new_entry(self, live: Any, saved: Any, path: Path) -> Any:
        """The value for an entry that a live mapping lacks."""
        if type(saved) in SCALARS:
            return saved
        child = child_of(live, saved)
        if child is not None:
            return self.visit(child, saved, path)
        return self._new_item(next((live[key] for key in live), None), saved)

    def _new_item(self, sibling: Any, saved: Any) -> Any:
        """The value for an item that a live container lacks: of the class of its sibling, if it was saved like one."""
        if is_record(sibling) and type(saved) is dict and has_fields(type(sibling), saved):
            return self._materialize(SavedRecord(type(sibling), saved))
        value = self._materialize(saved)
        if isinstance(sibling, Enum):
            return member_of(type(sibling), value)
        if type(value) is tuple and hasattr(sibling, "_make") and len(value) == len(sibling):
            return sibling._make(value)
        return value

    def _with_live_keys(self, live: MutableMapping[Any, Any], saved: dict[Any, Any]) -> dict[Any, Any]:
        """The saved dict, with numbers for keys again, which torch.distributed.checkpoint has turned into text."""
        if self._keeps_empty or not all(type(key) is int for key in live):
            return saved
        numbers = {key: int(key) for key in saved if isinstance(key, str) and key.removeprefix("-").isdecimal()}
        return {numbers.get(key, key): value for key, value in saved.items()}

    def _is_chosen(self, path: Path) -> bool:
        chosen = self.differences.selector
        return chosen is None or chosen(path)

    def _is_left_out(self, live: MutableMapping[Any, Any], key: Any, saved: dict[Any, Any]) -> bool:
        """True for what is empty in the live state, if the writer of the archive leaves that out."""
        return key not in saved and not self._keeps_empty and self._is_empty(live[key])

    def _is_empty(self, value: Any) -> bool:
        """True for what torch.distributed.checkpoint leaves out: a dict, or an object's state dict, that has nothing in
        it, but perhaps others of these, or lists of them.
        """
        if isinstance(value, Mapping):
            return all(map(self._is_empty, value.values()))
        if type(value) is list:
            return bool(value) and all(map(self._is_empty, value))
        if method_of(value, "state_dict") is not None:
            with suppress(Exception):
                return self._is_empty(self._state_dicts.of(value))
        return False

    def _with_left_out(self, saved: dict[Any, Any], live: Any) -> dict[Any, Any]:
        """The saved dict, with the empty dicts of the live one that the writer of the archive has left out."""
        if not isinstance(live, dict):
            return saved
        whole = {
            key: self._with_left_out(value, live.get(key)) if type(value) is dict else value
            for key, value in saved.items()
        }
        return whole | {
            key: _emptied(value) for key, value in live.items() if key not in saved and self._is_empty(value)
        }

    def _all_items(self, live: Sequence[Any], saved: Any) -> Any:
        """The saved items of a list, with the empty ones that the writer of the archive has left out."""
        items = saved if isinstance(saved, ListItems) else dict(enumerate(saved))
        missing = {*range(len(live))} - items.keys()
        if missing and len(live) == len(items) + len(missing) and all(self._is_empty(live[i]) for i in missing):
            return [items[i] if i in items else _emptied(live[i]) for i in range(len(live))]
        return saved

    def _record(self, live: Any, saved: dict[str, Any], path: Path) -> Any:
        """Match the fields of a dataclass's instance. They are set in place, or in a new instance if it is frozen."""
        fields = fields_of(live)
        names = [*fields, *(name for name in field_names(live) if name in saved and name not in fields)]
        if self._in_history and {*names} != saved.keys():
            return self._materialize(saved)
        self._compare_names(names, saved, path)
        changed = {}
        for name in names:
            if name in saved:
                value = self.visit(fields.get(name), saved[name], (*path, name))
                if name not in fields or value is not fields[name]:
                    changed[name] = value
        if is_frozen(live):
            return make_record(type(live), {**fields, **changed}) if changed else live
        for name, value in changed.items():
            self._change(live, field_change(live, name, value), (*path, name))
        return live

    def _tuple(self, live: Any, saved: Any, path: Path) -> Any:
        """Match the items of a tuple: those that can change are filled, and others make a new tuple."""
        if not live:
            return self._materialize(saved)
        if len(live) != len(saved):
            return self._unfit(live, saved, path, f"has {len(live)} entries here and {len(saved)} in the checkpoint")
        values = [self.visit(a, b, (*path, i)) for i, (a, b) in enumerate(zip(live, saved, strict=True))]
        if all(value is now for value, now in zip(values, live, strict=True)):
            return live
        if type(live) is not tuple:
            with suppress(Exception):  # the user's own class may raise anything
                return live._make(values) if hasattr(live, "_make") else type(live)(values)
        return tuple(values)

    def _list(self, live: Any, saved: Any, path: Path) -> Any:
        """Match the items of a list. One of plain values gets as many as were saved. A deque keeps its newest items."""
        items = list(saved)
        if isinstance(live, deque) and live.maxlen is not None:
            items = items[len(items) - min(len(items), live.maxlen) :]
        if not self._is_whole(live, items, path):
            return self._chosen_items(live, items, path)
        if len(live) not in (0, len(items)) and not is_plain(live, with_arrays=True):
            self.differences.add(
                path,
                f"has {len(live)} entries here and {len(items)} in the checkpoint; give it as many, or none: an empty "
                "list takes all that was saved",
            )
            return live
        comes_and_goes = len(live) != len(items) or isinstance(live, deque)
        with self._history(comes_and_goes and is_plain(live, with_arrays=True)):
            values = [self.visit(a, b, (*path, i)) for i, (a, b) in enumerate(zip(live, items, strict=False))]
            last = live[-1] if len(live) else None
            values += [self._new_item(last, item) for item in items[len(values) :]]
        return self._change(live, list_change(live, values), path)

    def _is_whole(self, live: Any, items: list[Any], path: Path) -> bool:
        """True if all items of a saved list are selected."""
        return self._is_chosen(path) or all(self._is_chosen((*path, i)) for i in range(max(len(live), len(items))))

    def _chosen_items(self, live: Any, items: list[Any], path: Path) -> Any:
        """Match some of the items of a list: those at the places that the selection reaches."""
        chosen = self.differences.selector
        assert chosen is not None
        reached = [i for i in range(len(live)) if self._is_chosen((*path, i)) or chosen.reaches(dotted((*path, i)))]
        if len(reached) != len(items):
            self.differences.add(path, "is selected in part, and has other items here than in the checkpoint")
            return live
        values = list(live)
        for i, item in zip(reached, items, strict=True):
            values[i] = self.visit(live[i], item, (*path, i))
        return self._change(live, list_change(live, values), path)

    def _compare_names(self, live: Iterable[Any], saved: dict[Any, Any], path: Path) -> None:
        self.differences.add_names(live, saved, path)
        if path:  # at the top, saved entries that are not live are ignored
            names = set(live)
            paths = ((*path, key) for key in saved if key not in names)
            # An entry of some ranks alone, such as another stage of a pipeline, is theirs.
            self.differences.add_unexpected(inner for inner in paths if not self.archive.is_of_some(inner))

    def _materialize(self, saved: Any) -> Any:
        """A new value for a saved one. Its tensors are filled together with the live ones."""

        def give(leaf: StoredLeaf) -> Any:
            if leaf.kind == "object":
                return self._objects[leaf.number]
            if leaf.kind == "bytes":
                return self.archive.content(self.archive.primary(leaf.number))
            self.archive.need([(leaf.number, None)])  # before `primary`: a tie may be known only afterwards
            number = self.archive.primary(leaf.number)
            if number not in self._new:
                self._new[number] = self.archive.empty(number, torch.device("cpu"))
                self._request(number, self._new[number])
            return self.archive.leaf(leaf, self._new[number], torch.device("cpu"))

        return replaced(saved, give, self.differences.add_value_of_each_rank, self._around_new)

    def _around_new(self, saved: InnerTensors, inner: dict[str, Any]) -> Any:
        """A wrapped tensor that the live state lacks, made of inner tensors that are still to be filled."""
        if saved.wrapper is not None and not saved.wrapper.shards:
            return self.visit(self.archive.made(saved, inner, are_read=False), saved, saved.path)
        self.differences.add(saved.path, f"is {with_article(saved.kind)} in the checkpoint, and {HOW_TO_MAKE_ONE}")
        return None

    def _array(self, live: Any, saved: Any, path: Path) -> Any:
        is_stored = isinstance(saved, StoredLeaf) and saved.kind in ("ndarray", "object")
        value: Any = self._materialize(saved) if is_stored else saved
        here = f"is a numpy array {live.dtype}{list(live.shape)} here"
        if not is_array(value) and not self._in_history:
            self._add_kind_difference(path, here, saved)
        elif not is_array(value):
            return self._materialize(saved)
        elif (value.shape, value.dtype) != (live.shape, live.dtype):
            why = f"{here} and {value.dtype}{list(value.shape)} in the checkpoint; give it one like that, or None"
            return self._unfit(live, saved, path, why)
        elif not live.flags.writeable:
            return self._unfit(live, saved, path, "cannot be filled: it is a read-only numpy array")
        else:
            self.actions.append(lambda: live.__setitem__(..., value))
        return live

    def _request(self, number: int, tensor: torch.Tensor, offsets: Ints | None = None) -> None:
        number = self.archive.primary(number)
        self.wanted[number, offsets, tensor.data_ptr() or id(tensor)] = Wanted(number, tensor, offsets)

    def _add_kind_difference(self, path: Path, here: str, saved: Any) -> None:
        if of_ranks := list(parts_in(saved, ValuesByRank)):
            for leaf in of_ranks:
                self.differences.add_value_of_each_rank(leaf)
            return
        if isinstance(saved, StoredLeaf):
            kind = type(self._objects[saved.number]).__qualname__ if saved.kind == "object" else saved.kind
        elif isinstance(saved, SavedGenerator | InnerTensors):
            kind = saved.kind
        elif isinstance(saved, ListItems):
            kind = "list without some of its items"
        else:
            kind = (saved.cls if isinstance(saved, SavedRecord) else type(saved)).__qualname__
        self.differences.add(path, f"{here} and {with_article(kind)} in the checkpoint")


class _FilledObjects:
    """The live objects that one walk fills, each once: one that is at two places of the state has one value.

    `objects` are the unpickled ones of the archive.
    """

    def __init__(self, archive: Contents, objects: Sequence[Any]) -> None:
        self._archive, self._objects = archive, objects
        self._seen: dict[int, tuple[Any, Any, Path]] = {}  # by id; keeps the objects, so that no id is used twice

    def why_not(self, live: Any, saved: Any, path: Path) -> str | None:
        """The reason why an object cannot be filled at this place; None if nothing else fills it."""
        _, before, first = self._seen.setdefault(id(live), (live, saved, path))
        if first == path or self._are_alike(before, saved):
            return None
        return f"is the same object as {shown(first)} here, and has another value in the checkpoint"

    def _are_alike(self, one: Any, other: Any) -> bool:
        """True if two saved values are the same."""
        if isinstance(one, StoredLeaf) and isinstance(other, StoredLeaf):
            return self._are_leaves_alike(one, other)
        if type(one) is not type(other):
            return False
        if isinstance(one, SavedRecord):
            return self._are_alike(one.fields, other.fields)
        if isinstance(one, InnerTensors) and one.facts != other.facts:
            return False
        if isinstance(one, dict):
            return list(one) == list(other) and all(self._are_alike(one[key], other[key]) for key in one)
        if isinstance(one, list | tuple | deque):
            return len(one) == len(other) and all(map(self._are_alike, one, other))
        return bool(one == other or (isinstance(one, float) and math.isnan(one) and math.isnan(other)))

    def _are_leaves_alike(self, one: StoredLeaf, other: StoredLeaf) -> bool:
        if (one.kind, one.descr, one.shape) != (other.kind, other.descr, other.shape):
            return False
        if one.kind == "object":
            return are_same_objects(self._objects[one.number], self._objects[other.number])
        first, second = self._archive.primary(one.number), self._archive.primary(other.number)
        if first == second:
            return True
        return one.kind != "tensor" and self._archive.content(first) == self._archive.content(second)


def _emptied(value: Any) -> Any:
    """Dicts and lists of the same shape, for a value that was left out since it is empty."""
    if isinstance(value, Mapping):
        return {key: _emptied(item) for key, item in value.items()}
    return list(map(_emptied, value)) if isinstance(value, list) else {}
