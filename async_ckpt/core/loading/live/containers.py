"""Live containers: fills each kind in place, and recognizes immutable values, which may be replaced instead.

In: live values, and their new contents. Out: changes to make and to undo. Knows nothing of: archives, names.

A container is filled item by item with its own methods, since a user's class may refuse some items.
"""

from __future__ import annotations

import functools
import pickle
import sys
import types
from array import array
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, MutableMapping, MutableSequence, MutableSet
from contextlib import suppress
from enum import Enum
from pathlib import PurePath
from typing import Any, Final, NamedTuple

import torch

from ....errors import CorruptCheckpointError
from ...pickles.object_digests import object_digests
from ...state.capture import pickled
from ...state.generators import is_generator
from ...state.per_rank import ListItems
from ...state.plain import fields_of, is_frozen, is_record, method_of

_BUILT_IN: Final = frozenset(
    {dict, OrderedDict, defaultdict, Counter, list, deque, set, bytearray, array, types.SimpleNamespace}
)
_IMMUTABLE: Final = (
    str, bytes, int, float, complex, types.NoneType, types.EllipsisType, types.NotImplementedType, range, slice,
    type, Enum, types.FunctionType, types.ModuleType, PurePath,
    torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size,
)  # fmt: skip
_MAPPING_METHODS: Final = ("__getitem__", "__setitem__", "__delitem__", "__iter__", "__len__", "keys", "items")


class Change(NamedTuple):
    """A change of a live object's contents. `may_fail` is True if it calls a method of a user's class."""

    make: Callable[[], None]
    undo: Callable[[], None]
    may_fail: bool

    def why_not(self) -> str | None:
        """The reason why the object refuses the change, or None. The change is made and undone to find out."""
        if not self.may_fail:
            return None
        try:
            self.make()
        except Exception as error:
            return f"{type(error).__name__}: {error!s:.200}"
        finally:
            with suppress(Exception):
                self.undo()
        return None


def take_actions(actions: Iterable[Callable[[], None]]) -> None:
    """Take the actions that follow once all tensors are filled. An error, as of `load_state_dict`, gets a note."""
    with torch.no_grad():
        for action in actions:
            try:
                action()
            except CorruptCheckpointError:  # the values are wrong, not the object
                raise
            except Exception as error:
                error.add_note(
                    "async_ckpt: this comes from an object of the live state, which refuses its saved values. The "
                    "state is partly overwritten by now: restore another step, or mend the object, before training on"
                )
                raise


# --- kinds --------------------------------------------------------------------------------------------------------


def is_mapping(live: Any) -> bool:
    """True for a mutable mapping. A class that is not registered as MutableMapping counts if it has the methods."""
    if isinstance(live, MutableMapping):
        return True
    kind = type(live)  # `__array__` excludes the tables of pandas
    return not (isinstance(live, Mapping | type) or hasattr(kind, "__array__")) and all(
        callable(getattr(kind, name, None)) for name in _MAPPING_METHODS
    )


def is_list(live: Any) -> bool:
    """True for a list, a deque, or a similar class: its length can change, and it can contain any objects."""
    return isinstance(live, MutableSequence) and not isinstance(live, bytearray | array)


def is_buffer(live: Any) -> bool:
    """True for a bytearray, or an `array.array`."""
    return isinstance(live, bytearray | array)


def is_namespace(live: Any) -> bool:
    """True for a SimpleNamespace or argparse's Namespace, whose attributes are all of its state."""
    argparse = sys.modules.get("argparse")
    return isinstance(live, types.SimpleNamespace) or (argparse is not None and isinstance(live, argparse.Namespace))


def is_array(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def is_plain(live: Any, *, with_arrays: bool, _open: frozenset[int] = frozenset()) -> bool:
    """True for a value without tensors, modules or other objects with a state, such as settings or a history.

    `with_arrays`: whether arrays of numpy count as plain, too.
    """
    if isinstance(live, str | int | float | types.NoneType):
        return True
    if isinstance(live, torch.Tensor) or is_generator(live) or method_of(live, "load_state_dict") is not None:
        return False
    if is_array(live):
        return with_arrays
    if isinstance(live, set | frozenset | MutableSet) or is_buffer(live):
        return True
    inner = _items_of(live)
    if inner is None:
        return is_immutable(live)
    if id(live) in _open:  # it contains itself; it was saved as a tree
        return True
    return all(is_plain(item, with_arrays=with_arrays, _open=_open | {id(live)}) for item in inner)


def _items_of(live: Any) -> Iterable[Any] | None:
    """The items of a container, or the fields of a record; None for anything else."""
    if is_mapping(live):
        return [live[key] for key in list(live)]
    if is_list(live) or isinstance(live, tuple):
        return list(live)
    if is_namespace(live):
        return list(vars(live).values())
    return list(fields_of(live).values()) if is_record(live) else None


def is_immutable(value: Any) -> bool:
    """True for an immutable value, which is replaced instead of filled."""
    if isinstance(value, _IMMUTABLE):
        return True
    if isinstance(value, tuple | frozenset):
        return all(map(is_immutable, value))
    if isinstance(value, functools.partial):
        return all(map(is_immutable, (value.func, *value.args, *value.keywords.values())))
    if isinstance(value, types.MethodType | types.BuiltinFunctionType):
        return is_immutable(value.__self__)
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.generic | numpy.dtype):
        return True
    if is_record(value):
        return is_frozen(value) and all(map(is_immutable, fields_of(value).values()))
    if is_mapping(value) or is_list(value) or isinstance(value, MutableSet):  # mutable, though some of them have a hash
        return False
    return _is_known_by_value(value)


def _is_known_by_value(value: Any) -> bool:
    """True if a pickled copy has the same value and hash, as Python requires of immutable values."""
    kind: Any = type(value)
    if kind.__hash__ in (None, object.__hash__) or kind.__eq__ is object.__eq__:
        return False
    try:
        copy = pickle.loads(pickle.dumps(value))  # nosec B301
        return bool(copy is value or (copy == value and hash(copy) == hash(value)))
    except Exception:  # the user's own class may raise anything
        return False


def are_same_objects(one: Any, other: Any) -> bool:
    """True for objects of the same class whose pickles have the same digest."""
    try:
        return type(one) is type(other) and object_digests(pickled([one]))(0) == object_digests(pickled([other]))(0)
    except Exception:  # they cannot be pickled
        return False


def child_of(live: Any, saved: Any) -> Any:
    """A new empty container for an entry that the live mapping lacks, made as the mapping itself makes its entries.

    None if the saved value can be inserted as it is.
    """
    child: Any = None
    with suppress(Exception):  # the user's own classes may raise anything
        if isinstance(live, defaultdict) and live.default_factory is not None:
            child = live.default_factory()
        elif (type(saved) in (dict, OrderedDict) and isinstance(live, dict)) and (
            hasattr(type(live), "__getattr__") or getattr(live, "__dict__", None) is live
        ):
            child = type(live)()  # its entries are attributes, at every level
    if type(saved) in (dict, OrderedDict):
        fits = is_mapping(child) or method_of(child, "load_state_dict") is not None or is_record(child)
    elif isinstance(saved, list | deque):
        fits = is_list(child)
    else:
        fits = isinstance(saved, set) and isinstance(child, MutableSet)
    return child if fits else None


# --- changes ------------------------------------------------------------------------------------------------------


def mapping_change(live: Any, entries: dict[Any, Any]) -> Change | None:
    """Give a mapping exactly these entries. None if it has them already, in this order."""
    before = {key: live[key] for key in list(live)}
    if list(before) == list(entries) and all(before[key] is value for key, value in entries.items()):
        return None
    return Change(lambda: _put_entries(live, entries), lambda: _put_back(live, before), type(live) not in _BUILT_IN)


def _put_entries(live: Any, entries: dict[Any, Any]) -> None:
    for key in [key for key in live if key not in entries]:
        del live[key]
    for key, value in entries.items():
        if key not in live or live[key] is not value:
            live[key] = value
    if _has_own_order(live) and list(live) != list(entries):
        live.clear()
        for key, value in entries.items():
            live[key] = value


def _put_back(live: Any, before: dict[Any, Any]) -> None:
    """Undo changes, some of which the class may have refused. If it refuses to undo one, bypass its methods."""
    with suppress(Exception):
        _put_entries(live, before)
    if isinstance(live, dict) and list(live.items()) != list(before.items()):
        kind = _kind_of_dict(live)
        kind.clear(live)
        for key, value in before.items():
            kind.__setitem__(live, key, value)


def _has_own_order(live: Any) -> bool:
    """True for a dict whose class changes entries by dict's own methods, so all may be set again in another order."""
    if not isinstance(live, dict):
        return False
    kind, plain = type(live), _kind_of_dict(live)
    return kind.__setitem__ is plain.__setitem__ and kind.clear is plain.clear


def _kind_of_dict(live: dict[Any, Any]) -> type[dict[Any, Any]]:
    return OrderedDict if isinstance(live, OrderedDict) else dict


def entry_change(live: Any, key: Any, value: Any) -> Change:
    """Set an existing entry of a mapping."""
    before = live[key]
    return Change(
        lambda: live.__setitem__(key, value), lambda: live.__setitem__(key, before), type(live) not in _BUILT_IN
    )


def list_change(live: Any, values: list[Any]) -> Change | None:
    """Give a list or a deque exactly these items. A deque keeps its maxlen. None if it has these items already."""
    before = list(live)
    if len(before) == len(values) and all(value is now for value, now in zip(values, before, strict=True)):
        return None

    kind: Any = next((kind for kind in (list, deque) if isinstance(live, kind)), type(live))

    def put(items: list[Any], kind: Any) -> None:
        kind.clear(live)
        kind.extend(live, items)

    return Change(lambda: put(values, type(live)), lambda: put(before, kind), type(live) not in _BUILT_IN)


def set_change(live: Any, items: Iterable[Any]) -> Change:
    before, kind = list(live), set if isinstance(live, set) else type(live)

    def put(items: Iterable[Any], kind: Any) -> None:
        kind.clear(live)
        for item in items:
            kind.add(live, item)

    return Change(lambda: put(items, type(live)), lambda: put(before, kind), type(live) not in _BUILT_IN)


def buffer_change(live: Any, content: Any) -> Change:
    """Give a bytearray or an array new content of the same item type."""
    before = live[:]
    # A bytearray with an exported buffer cannot change its size.
    return Change(lambda: live.__setitem__(slice(None), content), lambda: live.__setitem__(slice(None), before), True)


def field_change(live: Any, name: str, value: Any) -> Change:
    """Set a field of a dataclass instance; the field may have no value yet."""
    fields = fields_of(live)

    def undo() -> None:
        if name in fields:
            setattr(live, name, fields[name])
        else:
            delattr(live, name)

    return Change(lambda: setattr(live, name, value), undo, True)


# --- what torch.distributed.checkpoint leaves out -----------------------------------------------------------------


def with_left_out(live: Any, saved: Any, state_dict_of: Callable[[Any], Any]) -> Any:
    """A saved state with the parts that torch.distributed.checkpoint leaves out, taken from the live state.

    These are empty dicts, the order of entries, and the type of numeric keys. Modules and optimizers are not changed.
    """
    if type(saved) not in (dict, list, ListItems) or isinstance(live, torch.nn.Module | torch.optim.Optimizer):
        return saved
    if method_of(live, "load_state_dict") is not None:
        with suppress(Exception):  # an object without a state dict yet has no empty dict in it
            live = state_dict_of(live)
    if isinstance(saved, list | ListItems):
        items = saved if isinstance(saved, ListItems) else dict(enumerate(saved))
        places = range(len(live) if is_list(live) or isinstance(live, tuple) else 0)
        if not all(_is_empty(live[i], state_dict_of) for i in places if i not in items) or not items.keys() <= {
            *places
        }:
            return saved
        return [with_left_out(live[i], items[i], state_dict_of) if i in items else live[i] for i in places]
    if is_record(live) or is_namespace(live):
        live = fields_of(live) if is_record(live) else vars(live)
    if not is_mapping(live) or not len(live):
        return saved
    if all(type(key) is int for key in live):
        numbers = {key: int(key) for key in saved if isinstance(key, str) and key.removeprefix("-").isdecimal()}
        saved = {numbers.get(key, key): value for key, value in saved.items()}
    here = {
        key: with_left_out(live[key], saved[key], state_dict_of) if key in saved else live[key]
        for key in live
        if key in saved or _is_empty(live[key], state_dict_of)
    }
    return here | {key: value for key, value in saved.items() if key not in here}


def _is_empty(value: Any, state_dict_of: Callable[[Any], Any]) -> bool:
    """True for a dict or an object's state dict that is empty, or has only empty dicts and lists of them in it."""
    if isinstance(value, Mapping):
        return all(_is_empty(item, state_dict_of) for item in value.values())
    if type(value) is list:
        return bool(value) and all(_is_empty(item, state_dict_of) for item in value)
    if method_of(value, "state_dict") is not None:
        with suppress(Exception):
            return _is_empty(state_dict_of(value), state_dict_of)
    return False
