"""Matches live objects with saved ones: finds the live memory that each saved tensor belongs to.

In: live objects, and the structure of an archive. Out: tensors to fill, actions to take afterwards, and differences.
Knows nothing of: files, steps.

Modules and torch's own optimizers are filled directly; other objects load their value with their own `load_state_dict`.
Mutable objects keep their identity: a container is filled item by item. A mutable object that cannot be filled is a
difference. Only an item of a history, whose items come and go, is replaced instead.
"""

from __future__ import annotations

import functools
import json
import math
from array import array
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, MutableSet
from contextlib import contextmanager, suppress
from enum import Enum
from typing import Any, Final, cast

import torch

from ....errors import UnsupportedStateError
from ...slicing.boxes import Box
from ...slicing.sharded import (
    Placed,
    Slicer,
    as_declared,
    declare_like,
    has_shards,
    is_dtensor,
    is_of_megatron,
    is_sharded,
)
from ...slicing.slices import Ints
from ...spec import Json, with_article
from ...state.capture import why_not
from ...state.captured import SnapshotView
from ...state.generators import SavedGenerator, copy_state, is_generator
from ...state.megatron_tensors import keys_below, name_of
from ...state.names import Path, Selector, dotted, dtype_name, printable, shown
from ...state.optimizers import is_optimizer, is_plain_optimizer
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
from ...state.tree import (
    LOADER,
    InnerTensors,
    SavedRecord,
    StoredLeaf,
    ValuesByRank,
    classes_at,
    facts_of,
    note_at,
    parts_in,
    replaced,
)
from ...state.wrapped import Wrapper, is_sparse_layout, plain_parts, taken_apart
from ...state.wrappers import (
    SEQUENCES,
    PlainNames,
    StateDictCache,
    live_metadata,
    may_be_wrapped,
    names_of_parameters,
    paired,
)
from ..archives.contents import Contents
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
from .optimizer_forms import OptimizerConverter, another_kind, is_optimizer_state, state_of_parameter
from .optimizer_kinds import has_shape_of_parameter

_HOW_TO_MAKE_ONE: Final = (
    "there is no live tensor to fill: pass its class in types=, or create it first, as an optimizer's first step does"
)


class Match:
    """One walk over the live objects and the saved structure in parallel, on the thread that restores.

    `restore_state` creates a Match for each archive. `wanted` lists the memory to fill: live tensors, and new tensors
    for values that `actions` set afterwards. `differences` lists everything that does not fit.
    """

    def __init__(
        self,
        archive: Contents,
        objects: list[Any],
        chosen: Selector | None,
        state_dicts: StateDictCache,
        root: Any,
        *,
        goes_back: bool,
    ) -> None:
        """`objects` are the unpickled objects, `chosen` is the selection, None for all, and `root` is the whole live
        state, whose modules name parameters. `goes_back`: the training has saved or restored before, so live names that
        the checkpoint lacks are new.
        """
        self.wanted: dict[tuple[int, Ints | None, int], Wanted] = {}
        self.actions: list[Callable[[], None]] = []
        self.differences = Differences(chosen)
        self.archive, self._objects, self._state_dicts = archive, objects, state_dicts
        self._root, self._slicer, self._goes_back = root, Slicer(), goes_back
        self._has_tensors = False  # a tensor matched, even if this rank holds no part of it
        self._new: dict[int, torch.Tensor] = {}  # memory of tensors without a live counterpart
        self._groups: dict[Path, dict[Any, Any]] = {}  # the saved dicts at the top level and of the groups
        self._filled: dict[int, tuple[Any, Any, Path]] = {}  # by id; keeps the objects alive, so that no id is reused
        self._in_history = False  # the walk is among items that come and go: an item that does not fit is replaced

    @property
    def fits(self) -> bool:
        """True if any saved entry matches the live state."""
        return bool(self._has_tensors or self.wanted or self.actions)

    def visit(self, live: Any, saved: Any, path: Path) -> Any:
        """Match one pair. Returns the value to have at this path afterwards: the live object, or a new one."""
        if type(live) in SCALARS and type(saved) in SCALARS:
            return saved
        if saved is live:  # see `containers.with_left_out`
            return live
        if isinstance(live, SnapshotView):
            raise TypeError(
                f"restore fills objects in place and cannot fill a snapshot, as {shown(path)} is; give it the live "
                "objects"
            )
        if isinstance(saved, ValuesByRank):
            self.differences.add_value_of_each_rank(saved)
            return live
        if isinstance(live, torch.Tensor):
            return (
                self._copied(live, saved, path) if isinstance(saved, torch.Tensor) else self._tensor(live, saved, path)
            )
        if _is_plain_module(live, self._state_dicts.of):
            return self._module(live, saved, path)
        if isinstance(live, torch.optim.Optimizer):
            return self._any_optimizer(live, saved, path)
        return self._object(live, saved, path)

    def _object(self, live: Any, saved: Any, path: Path) -> Any:
        if method_of(live, "load_state_dict") is not None:
            if saved is None and self._state_dicts.of(live) is not None:
                self._add_kind_difference(path, f"is {with_article(type(live).__qualname__)} here", saved)
                return live
            self.differences.add_loader(path, live, note_at(self.archive.index.skeleton, path, LOADER))
            if is_optimizer(live) and (why := another_kind(live, saved, self._names, self._classes(path))):
                self.differences.add(path, why)
                return live
            expected = self._as_live_expects(live, saved, path)
            return self._load(live, expected, self._own_state(live, expected), path)
        return self._value(live, saved, path)

    def _load(self, live: Any, expected: Any, state: dict[Any, Any] | None, path: Path) -> Any:
        """Load a value with the object's own `load_state_dict`; if `state` is given, fill it in place and load it."""
        value = self._materialize(expected) if state is None else self.visit(state, expected, path)
        self.actions.append(lambda: live.load_state_dict(value))
        return live

    # --- plain values and containers ----------------------------------------------------------------------------

    def _value(self, live: Any, saved: Any, path: Path) -> Any:
        """Match a live value that is not a tensor and has no state dict."""
        if isinstance(live, Enum):  # like a namedtuple, the member gets the live class
            return member_of(type(live), self._materialize(saved))
        if is_immutable(live) and not (isinstance(live, tuple) or is_record(live)):
            return self._materialize(saved)
        saved = self._unpickled(live, saved)
        is_rebuilt = isinstance(live, tuple) or (is_record(live) and is_frozen(live))
        if not is_rebuilt and (first := self._filled_at(live, saved, path)) is not None:
            why = f"is the same object as {shown(first)} here, and has another value in the checkpoint"
            return self._unfit(live, saved, path, why)
        if is_array(live):
            return self._array(live, saved, path)
        if is_generator(live):
            return self._generator(live, saved, path)
        return self._container(live, saved, path)

    def _unpickled(self, live: Any, saved: Any) -> Any:
        """The items of a pickled container, to fill the live container with; any other value unchanged."""
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
        """The object that was pickled; any other saved value unchanged."""
        is_object = isinstance(saved, StoredLeaf) and saved.kind == "object"
        return self._objects[saved.number] if is_object else saved

    def _unfit(self, live: Any, saved: Any, path: Path, why: str) -> Any:
        """Add a difference for a live object that cannot be filled; in a history, replace the object instead."""
        if self._in_history:
            return self._materialize(saved)
        self.differences.add(path, why)
        return live

    def _change(self, live: Any, change: Change | None, path: Path) -> Any:
        """Make a change after everything has been read. A change that the live object would refuse is a difference."""
        if change is not None and (why := change.why_not()):
            self.differences.add(
                path, f"cannot be filled: {with_article(type(live).__qualname__)} refuses the change ({why})"
            )
        elif change is not None:
            self.actions.append(change.make)
        return live

    @contextmanager
    def _history(self, is_history: bool = True) -> Iterator[None]:
        """Visit items that come and go: an item that does not fit is replaced."""
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
        if isinstance(saved, SEQUENCES) and not isinstance(saved, torch.Size):
            if isinstance(live, tuple):
                return self._tuple(live, saved, path)
            if is_list(live):
                return self._list(live, saved, path)
        if isinstance(live, MutableSet) and isinstance(saved, set | frozenset):
            return self._change(live, set_change(live, saved), path)
        if is_buffer(live):
            return self._buffer(live, saved, path)
        if is_immutable(live):
            return self._materialize(saved)
        return self._opaque(live, saved, path)

    def _opaque(self, live: Any, saved: Any, path: Path) -> Any:
        """Keep an object of an unknown kind if the saved one is the same; else replace it, or add a difference."""
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
        if not len(live):  # an empty container receives everything that was saved
            return self._entries(live, {}, saved, path)
        has_names = any(isinstance(key, str) for key in live) and not isinstance(live, defaultdict | Counter)
        # At the top level, saved names that the live state lacks are not wanted.
        if (path or not has_names) and is_plain(live, with_arrays=self._in_history):
            return self._plain_mapping(live, saved, path)
        names: set[Any] = set()  # the saved names of Megatron's tensors
        if len(path) < 2:
            self._groups[path], names = saved, keys_below(live, deep=bool(path))
        keyed = [key for key, value in live.items() if is_of_megatron(value)]
        others = {name: value for name, value in saved.items() if name not in names}
        self._compare_names([key for key in live if key not in keyed], others, path)
        for key in list(live):
            if key in keyed:
                self._megatron_tensor(live[key], (*path, key))
            elif key in others:
                inner, now = (*path, key), live[key]
                value = self.visit(now, saved[key], inner)
                if value is not now:
                    self._change(live, entry_change(live, key, value), inner)
        return live

    def _plain_mapping(self, live: MutableMapping[Any, Any], saved: dict[Any, Any], path: Path) -> Any:
        """Match a mapping of plain values: it gets the saved entries, and loses entries that were added later.

        A name that only the live mapping has is a difference at the start of a program: it may be a new setting.
        """
        is_history = self._in_history or isinstance(live, defaultdict | Counter)
        kept, missing = {}, []
        for key in [key for key in live if key not in saved]:
            if not self._is_chosen((*path, key)):
                kept[key] = live[key]
            elif isinstance(key, str) and not (is_history or self._goes_back):
                kept[key] = live[key]
                missing.append(key)
        if missing:
            self.differences.add_names(missing, (), path)
        with self._history(is_history):
            return self._entries(live, kept, saved, path)

    def _entries(self, live: MutableMapping[Any, Any], kept: dict[Any, Any], saved: dict[Any, Any], path: Path) -> Any:
        """Give a mapping all entries that were saved, in their order, in addition to the entries in `kept`."""
        entries: dict[Any, Any] = {}
        for key, value in saved.items():
            inner = (*path, key)
            with self._history(not isinstance(key, str)):
                if key in live:
                    entries[key] = self.visit(live[key], value, inner)
                elif not self.archive.is_of_others(inner):
                    entries[key] = self._new_entry(live, value, inner)
        if kept:  # then only a part of the order is known
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
        """The value for an item that a live container lacks, of its sibling's class if the saved value fits it."""
        if is_record(sibling) and type(saved) is dict and has_fields(type(sibling), saved):
            return self._materialize(SavedRecord(type(sibling), saved))
        value = self._materialize(saved)
        if isinstance(sibling, Enum):
            return member_of(type(sibling), value)
        if type(value) is tuple and hasattr(sibling, "_make") and len(value) == len(sibling):
            return sibling._make(value)
        return value

    def _is_chosen(self, path: Path) -> bool:
        chosen = self.differences.selector
        return chosen is None or chosen(path)

    def _record(self, live: Any, saved: dict[str, Any], path: Path) -> Any:
        """Match the fields of a dataclass instance: set them in place, or make a new instance if it is frozen."""
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
        """Match the items of a tuple: fill mutable items in place, and make a new tuple if any item is replaced."""
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
        """Match the items of a list. A list of plain values may change its length. A deque keeps its newest items."""
        items = list(saved)
        if isinstance(live, deque) and live.maxlen is not None:
            items = items[len(items) - min(len(items), live.maxlen) :]
        num_items = max(len(live), len(items))
        if not (self._is_chosen(path) or all(self._is_chosen((*path, i)) for i in range(num_items))):
            return self._chosen_items(live, items, path)
        if len(live) not in (0, len(items)) and not is_plain(live, with_arrays=True):
            self.differences.add(
                path,
                f"has {len(live)} entries here and {len(items)} in the checkpoint; make it equally long, or pass "
                "an empty list, which receives all saved items",
            )
            return live
        comes_and_goes = len(live) != len(items) or isinstance(live, deque)
        with self._history(comes_and_goes and is_plain(live, with_arrays=True)):
            values = [self.visit(a, b, (*path, i)) for i, (a, b) in enumerate(zip(live, items, strict=False))]
            last = live[-1] if len(live) else None
            values += [self._new_item(last, item) for item in items[len(values) :]]
        return self._change(live, list_change(live, values), path)

    def _chosen_items(self, live: Any, items: list[Any], path: Path) -> Any:
        """Match the items of a list at the indices that the selection reaches."""
        chosen = self.differences.selector
        assert chosen is not None
        reached = [i for i in range(len(live)) if self._is_chosen((*path, i)) or chosen.reaches(dotted((*path, i)))]
        if len(reached) != len(items):
            self.differences.add(path, "is partly selected, and the selected items differ from those in the checkpoint")
            return live
        values = list(live)
        for i, item in zip(reached, items, strict=True):
            values[i] = self.visit(live[i], item, (*path, i))
        return self._change(live, list_change(live, values), path)

    def _compare_names(self, live: Iterable[Any], saved: dict[Any, Any], path: Path) -> None:
        self.differences.add_names(live, saved, path)
        if path:  # at the top level, saved entries that the live state lacks are ignored
            names = set(live)
            paths = ((*path, key) for key in saved if key not in names)
            # Entries that only some ranks saved, such as another stage of a pipeline, are not meant for this rank.
            self.differences.add_unexpected(inner for inner in paths if inner not in self.archive.of_some)

    def _materialize(self, saved: Any) -> Any:
        """A new value for a saved one. Its tensors are filled together with the live tensors."""

        def give(leaf: StoredLeaf) -> Any:
            if leaf.kind == "object":
                return self._objects[leaf.number]
            if leaf.kind == "bytes":
                return self.archive.content(self.archive.primary(leaf.number))
            self.archive.need([(leaf.number, None)])  # before `primary`: opening more archives may reveal a tie
            number = self.archive.primary(leaf.number)
            if number not in self._new:
                self._new[number] = self.archive.empty(number, torch.device("cpu"))
                self._request(number, self._new[number])
            return self.archive.leaf(leaf, self._new[number], torch.device("cpu"))

        return replaced(saved, give, self.differences.add_value_of_each_rank, self._around_new)

    def _around_new(self, saved: InnerTensors, inner: dict[str, Any]) -> Any:
        """A wrapped tensor that the live state lacks, built from inner tensors that are filled later."""
        if saved.wrapper is not None and not saved.wrapper.shards:
            return self.visit(self.archive.made(saved, inner, are_read=False), saved, saved.path)
        self.differences.add(saved.path, f"is {with_article(saved.kind)} in the checkpoint, but {_HOW_TO_MAKE_ONE}")
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

    # --- objects at two places ----------------------------------------------------------------------------------

    def _filled_at(self, live: Any, saved: Any, path: Path) -> Path | None:
        """The other path at which the same live object gets a different value; None if no such path exists."""
        _, before, first = self._filled.setdefault(id(live), (live, saved, path))
        return None if first == path or self._are_alike(before, saved) else first

    def _are_alike(self, one: Any, other: Any) -> bool:
        """True if two saved values are equal."""
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
        first, second = self.archive.primary(one.number), self.archive.primary(other.number)
        if first == second:
            return True
        return one.kind != "tensor" and self.archive.content(first) == self.archive.content(second)

    # --- tensors ------------------------------------------------------------------------------------------------

    def _copied(self, live: Any, saved: Any, path: Path) -> Any:
        """Match a live tensor with one in a pickled container."""
        if (live.shape, live.dtype) != (saved.shape, saved.dtype) or why_not(live) or _is_expanded(live):
            self.differences.add(
                path,
                f"is {dtype_name(live.dtype)}{list(live.shape)} here and {dtype_name(saved.dtype)}{list(saved.shape)} "
                "in the checkpoint",
            )
        else:
            self.actions.append(lambda: live.copy_(saved))
        return live

    def _tensor(self, live: Any, saved: Any, path: Path) -> Any:
        try:
            apart = taken_apart(live, path)
            if apart is not None:
                return self._wrapped(live, *apart, saved, path)
        except UnsupportedStateError as error:
            self._add_refusal(error, path)
            return live
        if not (isinstance(saved, StoredLeaf) and saved.kind == "tensor"):
            self._add_kind_difference(path, "is a tensor here", saved)
            return live
        indexed = self.archive.index.tensors[saved.number]
        is_keyed = is_of_megatron(live)
        shape = tuple(live.global_shape if is_keyed else as_declared(live).shape)
        dtype = dtype_name(live.data.dtype if is_keyed and live.data is not None else live.dtype)
        try:
            parts = self._local_parts(live, path)
        except UnsupportedStateError as error:
            self._add_refusal(error, path)
            return live
        fits = shape == indexed.shape
        if is_keyed and getattr(live, "allow_shape_mismatch", False) and len(shape) == len(indexed.shape):
            fits, parts = True, list(_overlaps(parts, indexed.shape))
        why = next(filter(None, (why_not(part) for _, part in parts)), None)
        if why:
            self.differences.add(path, f"cannot be filled: {why}")
        elif not fits or dtype != indexed.dtype:
            self.differences.add(
                path, f"is {dtype}{list(shape)} here and {indexed.dtype}{list(indexed.shape)} in the checkpoint"
            )
        elif any(_is_expanded(part) for _, part in parts):
            self.differences.add(path, "cannot be filled: it is expanded, several items share one place")
        else:
            self._has_tensors = True
            for offsets, part in parts:
                self._request(saved.number, part, offsets)
        return live

    def _add_refusal(self, error: UnsupportedStateError, path: Path) -> None:
        refusal = str(error).removeprefix(f"{shown(path)}: ").removesuffix("; nothing was written")
        self.differences.add(path, f"cannot be filled: {refusal}")

    def _wrapped(self, live: Any, wrapper: Wrapper, parts: dict[str, Any], saved: Any, path: Path) -> Any:
        """Match a tensor subclass that wraps inner tensors: these are filled if everything else is equal."""
        if not isinstance(saved, InnerTensors):
            self._add_kind_difference(path, f"is {with_article(wrapper.kind)} here", saved)
        elif differences := list(_differing(facts_of(wrapper, path, set()), parts, saved)):
            self.differences.add(path, "; ".join(differences))
        else:
            for name, part in parts.items():
                self._tensor(part, saved[name], (*path, name))
            if is_sparse_layout(wrapper.kind):
                self.actions.append(lambda: self.archive.check_indices(live, path))
        return live

    def _local_parts(self, live: Any, path: Path) -> list[tuple[Ints | None, torch.Tensor]]:
        """The parts of a tensor that this rank holds, with their offsets in the tensor; None for the whole tensor."""
        if not is_sharded(live):
            return [(None, live)]
        slices, parts = self._slicer.slice(live, name=shown(path))
        return [(rectangle.global_offsets, part) for rectangle, part in zip(slices.rectangles, parts, strict=True)]

    def _megatron_tensor(self, live: Any, path: Path) -> None:
        """Match one of Megatron's sharded tensors, which has a name of its own within its group."""
        name = name_of(live, path)
        if live.key in self._groups.get(name[:-1], {}):
            self._tensor(live, self._groups[name[:-1]][live.key], path)
        else:
            self.differences.add_missing(name)

    # --- modules, and objects with a state of their own ---------------------------------------------------------

    def _module(self, module: torch.nn.Module, saved: Any, path: Path) -> Any:
        if not isinstance(saved, dict):
            self._add_kind_difference(path, "is a module here", saved)
            return module
        live = self._state_dicts.of(module)
        names = PlainNames(module).of(live)
        saved = self._by_plain_name(names, saved, path)
        self._compare_names(names.values(), saved, path)
        extra: dict[str, Any] = {}
        for here, value in live.items():
            name = names[here]
            if name not in saved:
                continue
            if isinstance(value, torch.Tensor):
                self._tensor(value, saved[name], (*path, name))
            else:
                extra[here] = self._materialize(saved[name])
        if extra:  # for set_extra_state
            self.actions.append(lambda: module.load_state_dict(extra, strict=False))
        return module

    def _by_plain_name(self, names: dict[str, str], saved: dict[Any, Any], path: Path) -> dict[Any, Any]:
        """The saved state of a module by the live module's plain names; names that the live module lacks are kept."""
        live_names, ambiguous = paired(names, saved)
        self.differences.add_all_of(path, (f"{line}; load() it and rename one of them" for line in ambiguous))
        plain = {live_names[here]: name for here, name in names.items() if here in live_names}
        return {plain.get(name, name): value for name, value in saved.items()}

    def _as_live_expects(self, live: Any, saved: Any, path: Path) -> Any:
        """The saved state of an object with the names that its own `load_state_dict` expects."""
        if not (isinstance(live, torch.nn.Module) and isinstance(saved, dict)):
            return saved
        plain = PlainNames(live)
        expected = saved
        # Taking the state dict may gather sharded parameters.
        if (plain.are_shown or may_be_wrapped(saved)) and isinstance(state := self._state_dicts.of(live), dict):
            names = plain.of(state)
            live_name_of = {name: raw for raw, name in names.items()}
            values = self._by_plain_name(names, saved, path)
            expected = type(saved)((live_name_of.get(name, name), value) for name, value in values.items())
        if isinstance(metadata := getattr(saved, "__dict__", {}).get("_metadata"), dict):
            expected = OrderedDict(expected)
            expected._metadata = live_metadata(live, plain, metadata)  # type: ignore[attr-defined]
        return expected

    def _own_state(
        self, live: Any, saved: Any, with_room: Callable[[Any], Any] = lambda state: state
    ) -> dict[Any, Any] | None:
        """An object's own state dict if it has shards, to fill in place and load with the rest; otherwise None.

        `state_dict()` may have any side effect, so it is called only for a checkpoint of several ranks, and only for an
        optimizer or a value with tensors. Its names also tell whether entries are missing that other ranks may have
        saved, as in a pipeline. Wrapped tensors are filled in place, too, since only the state dict may have their
        class.
        """
        tensors = [leaf for leaf in parts_in(saved, StoredLeaf) if leaf.kind == "tensor"]
        are_spread = any(self.archive.index.tensors[leaf.number].is_spread for leaf in tensors)
        are_wrapped = next(parts_in(saved, InnerTensors), None) is not None
        may_lack = not self.archive.has_all_names and (tensors or isinstance(live, torch.optim.Optimizer))
        if not (are_spread or are_wrapped or may_lack):
            return None
        state = self._state_dicts.of(live)
        self.differences.add_own_names(state, saved)
        state = with_room(state) if are_spread or are_wrapped else None
        return state if isinstance(state, dict) and (are_wrapped or has_shards(state)) else None

    # --- optimizers ---------------------------------------------------------------------------------------------

    def _any_optimizer(self, live: torch.optim.Optimizer, saved: Any, path: Path) -> Any:
        """Fill one of torch's optimizers; for any other optimizer, convert the state to the form that it loads."""
        try:
            saved = self._with_empty_state(saved, path)
            converter = OptimizerConverter(live, saved, self._names, self._state_dicts.of)
            if why := another_kind(live, saved, converter.known_names, self._classes(path)):
                raise ValueError(why)
            saved = converter.convert(is_of_some=lambda key: (*path, key) in self.archive.of_some)
            if is_plain_optimizer(live):
                return self._optimizer(live, saved, path)
            state = self._own_state(live, saved, lambda own: converter.with_room(own, saved, self._room_for))
        except ValueError as error:
            self.differences.add(path, str(error))
            return live
        return self._load(live, saved, state, path)

    def _names(self) -> dict[int, set[str]]:
        return names_of_parameters(self._root)

    def _classes(self, path: Path) -> list[list[str]]:
        """The class names of a saved optimizer; empty if they are not known."""
        return classes_at(self.archive.index.skeleton, path)

    def _room_for(self, parameter: torch.Tensor, saved: Any) -> torch.Tensor | None:
        """New memory for an optimizer's tensor: wrapped, or sharded like the parameter; None if neither applies."""
        if isinstance(saved, InnerTensors) and saved.wrapper is not None:
            wrapped: torch.Tensor = self._new_wrapped(parameter, saved)
            return wrapped
        if not (isinstance(saved, StoredLeaf) and saved.kind == "tensor" and is_sharded(parameter)):
            return None
        if tuple(as_declared(parameter).shape) != self.archive.index.tensors[saved.number].shape:
            return None
        room = torch.empty_like(parameter.detach(), dtype=self.archive.dtype(saved.number))
        declare_like(room, parameter)
        return room

    def _with_empty_state(self, saved: Any, path: Path) -> Any:
        """The saved state of an optimizer, with the empty dict that torch.distributed.checkpoint leaves out."""
        if isinstance(saved, dict) and "param_groups" in saved and "state" not in saved:
            # The dict may also be missing because it was not selected.
            below = (*path, "state")
            if not any(tensor.path[: len(below)] == below for tensor in self.archive.index.tensors):
                return {**saved, "state": {}}
        return saved

    def _optimizer(self, optimizer: torch.optim.Optimizer, saved: Any, path: Path) -> Any:
        """Load like Optimizer.load_state_dict, but in place, and without casting to the dtype of the parameter."""
        if not is_optimizer_state(saved):
            self._add_kind_difference(path, "is an optimizer here", saved)
            return optimizer
        groups = saved["param_groups"]
        sizes = [len(group["params"]) for group in groups]
        live_sizes = [len(group["params"]) for group in optimizer.param_groups]
        if sizes != live_sizes:
            self.differences.add(path, f"has parameter groups of {live_sizes} here and of {sizes} in the checkpoint")
            return optimizer
        for i, (live_group, group) in enumerate(zip(optimizer.param_groups, groups, strict=True)):
            for key, value in group.items():
                if key not in ("params", "param_names"):  # the live model has its own names
                    self._setting(live_group, key, value, (*path, "param_groups", i, key))
            step_on_device = bool(group.get("capturable") or group.get("fused"))  # where the update kernel reads `step`
            for param, number in zip(live_group["params"], group["params"], strict=True):
                state, inner = state_of_parameter(saved["state"], number), (*path, "state", number)
                self._optimizer_state(optimizer, param, state, step_on_device, inner)
        # `load_state_dict` ends with this call, too: in `__setstate__` optimizers upgrade states of older versions.
        self.actions.append(
            lambda: optimizer.__setstate__({"state": optimizer.state, "param_groups": optimizer.param_groups})
        )
        return optimizer

    def _optimizer_state(
        self,
        optimizer: torch.optim.Optimizer,
        param: torch.Tensor,
        saved: Any,
        step_on_device: bool,
        path: Path,
    ) -> None:
        live = optimizer.state.get(param, {})
        state: dict[Any, Any] = {}
        whole = as_declared(param)
        for key, value in saved.items():
            live_tensor = live.get(key)
            if isinstance(value, InnerTensors):
                state[key] = self._wrapped_state(param, live_tensor, value, (*path, key))
                continue
            if not (isinstance(value, StoredLeaf) and value.kind == "tensor"):
                state[key] = self._materialize(value)
                continue
            tensor = self.archive.index.tensors[value.number]
            declare_like(live_tensor, param)
            fits = (type(live_tensor) is torch.Tensor or is_sharded(live_tensor)) and (
                tuple(as_declared(live_tensor).shape),
                dtype_name(live_tensor.dtype),
            ) == (tensor.shape, tensor.dtype)
            if has_shape_of_parameter(optimizer, key) and tensor.shape != tuple(whole.shape):
                self.differences.add(
                    (*path, key),
                    f"is {list(tensor.shape)} in the checkpoint, and its parameter {list(whole.shape)} here",
                )
            if not fits and tensor.shape and (room := self._room_for(param, value)) is not None:
                live_tensor = room
            elif not fits:
                # Like torch, keep `step` on the host unless the update kernel reads it from the device.
                device = param.device if key != "step" or step_on_device else torch.device("cpu")
                live_tensor = self.archive.empty(self.archive.primary(value.number), device)
            state[key] = self._tensor(live_tensor, value, (*path, key))

        def hand_over() -> None:
            if state:
                optimizer.state[param] = state
            else:
                optimizer.state.pop(param, None)

        self.actions.append(hand_over)

    def _wrapped_state(self, param: torch.Tensor, live: Any, saved: InnerTensors, path: Path) -> Any:
        """Match a wrapped tensor of an optimizer, which has no state before its first step."""
        if not isinstance(live, torch.Tensor):
            if saved.wrapper is None:
                self.differences.add(path, f"is {with_article(saved.kind)} in the checkpoint, but {_HOW_TO_MAKE_ONE}")
                return None
            live = self._new_wrapped(param, saved)
        return self._tensor(live, saved, path)

    def _new_wrapped(self, param: torch.Tensor, saved: InnerTensors) -> Any:
        """A new wrapped tensor to fill, on the device of the parameter, and sharded like the parameter."""
        assert saved.wrapper is not None
        row = (0,) * len(saved.wrapper.shards)
        shapes: Iterator[Ints] | None = None
        if is_dtensor(param) and not row:
            # On the meta device, where the wrapper's class itself narrows the whole tensor to this rank's part.
            like = replaced(saved, lambda leaf: torch.empty(self._shape(leaf), dtype=self._dtype(leaf), device="meta"))
            for rectangle in self._slicer.slice(param, name=shown(saved.path)).slices.rectangles[:1]:
                for dim, (at, size) in enumerate(zip(rectangle.global_offsets, rectangle.sizes, strict=True)):
                    like = like if size == like.shape[dim] else like.narrow(dim, at, size)
            shapes = iter([tuple(part.shape) for part in plain_parts(like)])
            saved = saved.of_size(like)

        def room(leaf: StoredLeaf) -> torch.Tensor:
            shape = self._shape(leaf)[len(row) :] if shapes is None else next(shapes)
            box = Box(row + (0,) * len(shape), (1,) * len(row) + shape)
            self.archive.need([(leaf.number, box)])
            self.archive.sources(self.archive.primary(leaf.number), box)  # raises if no archive has the box
            return torch.empty(shape, dtype=self._dtype(leaf), device=param.device)

        local = replaced(saved, room, of_inner=functools.partial(InnerTensors.made, of_shard=True))
        return Placed.of(param.detach()).around(local) if is_dtensor(param) else local

    def _shape(self, leaf: StoredLeaf) -> Ints:
        return self.archive.index.tensors[leaf.number].shape

    def _dtype(self, leaf: StoredLeaf) -> torch.dtype:
        return self.archive.dtype(leaf.number)

    def _setting(self, group: dict[str, Any], key: str, saved: Any, path: Path) -> None:
        """Match a setting of an optimizer, which the live optimizer may lack."""
        now = group.get(key)
        with self._history(is_plain(now, with_arrays=True)):  # groups may share one list by default
            value = self.visit(now, saved, path)
        if value is not now:
            self.actions.append(lambda: group.__setitem__(key, value))


def _differing(here: dict[str, Json], parts: Mapping[str, Any], saved: InnerTensors) -> Iterator[str]:
    """The differences between a live wrapped tensor and a saved one, as text."""
    there = {**saved.facts, "inner tensors": [*saved]}
    here = {**here, "inner tensors": [*parts]}
    for fact in dict.fromkeys((*here, *there)):
        one, other = cast("tuple[Json, Json]", (here.get(fact), there.get(fact)))
        if fact == "context" and all(isinstance(node, dict) and [*node] == ["dict"] for node in (one, other)):
            one, other = (
                [entry for entry in a["dict"] if entry not in b["dict"]] for a, b in ((one, other), (other, one))
            )
        if one != other:
            yield f"has the {fact} {_shown_node(one)} here and {_shown_node(other)} in the checkpoint"


def _shown_node(node: Json) -> str:
    return printable(node if isinstance(node, str) else json.dumps(node))[:200]


def _overlaps(
    parts: Iterable[tuple[Ints | None, torch.Tensor]], shape: Ints
) -> Iterator[tuple[Ints | None, torch.Tensor]]:
    """The parts of a tensor, cut at the bounds of another shape."""
    for offsets, part in parts:
        at = (0,) * part.ndim if offsets is None else offsets
        sizes = [min(size, whole - begin) for size, whole, begin in zip(part.shape, shape, at, strict=True)]
        if all(size > 0 for size in sizes):
            yield at, part.detach()[tuple(map(slice, sizes))]


def _is_expanded(tensor: torch.Tensor) -> bool:
    return any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))


# --- kinds of live objects ------------------------------------------------------------------------------------------


def is_looked_into(live: Any, state_dict_of: Callable[[Any], Any]) -> bool:
    """True if taking the state dict has no side effects: for a plain module, a container or a tensor."""
    is_structure = isinstance(live, torch.Tensor | MutableMapping | SEQUENCES) or is_record(live)
    return is_structure or _is_plain_module(live, state_dict_of)


def _is_plain_module(live: Any, state_dict_of: Callable[[Any], Any]) -> bool:
    """True for a module whose state dict is its own memory, and whose loading has no side effects.

    `state_dict_of` takes the state dict, or returns a cached one.
    """
    if not isinstance(live, torch.nn.Module) or type(live).load_state_dict is not torch.nn.Module.load_state_dict:
        return False
    for module in live.modules():
        hooks = (*module._load_state_dict_pre_hooks.values(), *module._load_state_dict_post_hooks.values())
        kinds = [getattr(hook, "hook", hook).__module__ for hook in hooks]
        # The hook of FSDP2 reshards a module, which taking the state dict has already done.
        if not all(kind.startswith("torch.distributed.fsdp._fully_shard") for kind in kinds):
            return False
        if not type(module)._load_from_state_dict.__module__.startswith("torch.nn."):
            return False
    own = {part.data_ptr() for tensor in (*live.parameters(), *live.buffers()) for part in plain_parts(tensor)}
    given = (tensor for tensor in state_dict_of(live).values() if isinstance(tensor, torch.Tensor))
    return all(part.data_ptr() in own for tensor in given for part in plain_parts(tensor))
