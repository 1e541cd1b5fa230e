"""The names of the plain model for live modules, independent of the wrappers around a module or its parts.

In: modules and optimizers. Out: their state dicts without the prefixes of wrappers; the saved name for each live name.
Knows nothing of: skeletons, archives.

A wrapper holds one module in a known attribute, which is part of every name in its state dict, such as
`module.0.weight` of a DistributedDataParallel. Wrappers are recognized by class, since a submodule may also be called
`module`. The classes behind a saved name are unknown. If a saved name matches no live name, wrapper attributes are
removed from it until it matches exactly one plain name.
"""

from __future__ import annotations

import itertools
import sys
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cache
from typing import Any, Final, TypeAlias

import torch

from ..slicing.sharded import as_declared, declare_like, is_declared, is_sharded
from .captured import SnapshotView, has_dtensors
from .optimizers import held_by, is_plain_optimizer
from .plain import fields_of, is_record
from .plain import method_of as method_of

# Wrappers by module and class name, with the attribute that holds the inner module. If the module is not imported, the
# class has no instances.
_WRAPPERS: Final = (
    ("torch.nn.parallel.data_parallel", "DataParallel", "module"),
    ("torch.nn.parallel.distributed", "DistributedDataParallel", "module"),
    ("torch._dynamo.eval_frame", "OptimizedModule", "_orig_mod"),
    ("torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel", "_fsdp_wrapped_module"),
    ("torch.distributed.algorithms._checkpoint.checkpoint_wrapper", "ActivationWrapper", "_checkpoint_wrapped_module"),
)
_ATTRIBUTES: Final = frozenset(attribute for _, _, attribute in _WRAPPERS)
# Attributes that are never the name of a user's own submodule.
_UNLIKELY: Final = _ATTRIBUTES - {"module"}
# Attributes that the wrappers remove from the names in state dicts, but not from the metadata.
_HIDDEN: Final = frozenset({"_fsdp_wrapped_module", "_checkpoint_wrapped_module"})


class PlainNames:
    """The names of one module's parts without wrappers. False if the module has no wrappers."""

    def __init__(self, root: torch.nn.Module) -> None:
        self._attribute: Callable[[type], str | None] = cache(_attribute_of)
        self._open: set[int] = set()  # modules between the root and the current module
        self._inner: dict[str, list[str]] = {}  # plain name -> attributes of the wrappers around the module
        self._modules: dict[str, str] = {}
        self._walk(root, "")

    def __bool__(self) -> bool:
        return bool(self._inner)

    def module(self, name: str) -> str:
        """The plain name of a module, as in a state dict's metadata."""
        if name not in self._modules:
            self._modules[name] = self._without_wrappers(name.split(".") if name else [])
        return self._modules[name]

    def entry(self, name: Any) -> Any:
        """The plain name of a parameter, a buffer or an extra state."""
        if not isinstance(name, str):
            return name
        module, _, last = name.rpartition(".")
        return _joined(self.module(module), last)

    @property
    def are_shown(self) -> bool:
        """True if the names in the module's own state dict contain wrapper attributes."""
        return any(not _HIDDEN.issuperset(attributes) for attributes in self._inner.values())

    def of(self, names: Iterable[Any]) -> dict[Any, Any]:
        """The plain name of each name; all names are unchanged if two would become equal."""
        plain = {name: self.entry(name) for name in names}
        return plain if len({*plain.values()}) == len(plain) else {name: name for name in plain}

    def _walk(self, module: torch.nn.Module, at: str) -> None:
        if id(module) in self._open:
            return
        self._open.add(id(module))
        attribute = self._attribute(type(module))
        for name, child in module._modules.items():
            if child is None:
                continue
            if name == attribute:
                self._inner.setdefault(at, []).append(name)
            self._walk(child, at if name == attribute else _joined(at, name))
        self._open.discard(id(module))

    def _without_wrappers(self, parts: list[str]) -> str:
        at, left = "", deque(parts)
        while left:
            for attribute in self._inner.get(at, ()):
                if left and left[0] == attribute:
                    left.popleft()
            if left:
                at = _joined(at, left.popleft())
        return at


def plain_model(module: torch.nn.Module) -> torch.nn.Module:
    """The model without the wrappers around it."""
    while (attribute := _attribute_of(type(module))) is not None:
        inner = module._modules.get(attribute)
        if inner is None:
            break
        module = inner
    return module


def plain_state_dict(module: torch.nn.Module) -> Any:
    """The module's `state_dict()`, by the names of the plain model; declared shards are DTensors."""
    given = state_dict_of(module)
    for name in [name for name, value in given.items() if is_declared(value)]:
        given[name] = as_declared(given[name])
    return _plain_state(PlainNames(module), given)


def has_names(groups: Iterable[Any]) -> bool:
    """Whether parameter groups have the names of their parameters."""
    return any(isinstance(group, dict) and "param_names" in group for group in groups)


def look_wrapped(names: Collection[str]) -> bool:
    """True if names look like the names in a wrapper's state dict. This is a guess, good enough for a warning."""
    return (bool(names) and all(name.startswith("module.") for name in names)) or any(
        not _UNLIKELY.isdisjoint(name.split(".")) for name in names
    )


def state_dict_of(value: Any) -> Any:
    """An object's own `state_dict()`, whose tensors are declared sharded like the object's own tensors."""
    if isinstance(value, torch.optim.Optimizer):
        for parameter, state in getattr(value, "state", {}).items():
            for tensor in state.values() if isinstance(state, dict) and is_declared(parameter) else ():
                declare_like(tensor, parameter)
    given = value.state_dict()
    if isinstance(value, torch.nn.Module) and isinstance(given, dict):
        for name, tensor in itertools.chain(
            value.named_parameters(remove_duplicate=False), value.named_buffers(remove_duplicate=False)
        ):
            if is_declared(tensor):
                declare_like(given.get(name), tensor)
    return given


StateDictOf: TypeAlias = Callable[[Any], Any]


class StateDicts:
    """The state dicts of the objects in one state, by the names of plain models."""

    def __init__(self, state: Any, state_dict_of: StateDictOf = state_dict_of) -> None:
        self._state, self._state_dict_of = state, state_dict_of
        self._names: dict[int, set[str]] | None = None

    def of(self, value: Any) -> Any:
        """An object's `state_dict()`, with plain names for a module or an optimizer."""
        given = self._state_dict_of(value)
        if isinstance(value, torch.nn.Module):
            return _plain_state(PlainNames(value), given)
        if isinstance(value, torch.optim.Optimizer) and isinstance(given, dict):
            groups = given.get("param_groups")
            # A container may have fewer groups than the optimizers that it steps.
            if isinstance(groups, list) and len(groups) == len(value.param_groups) and has_names(groups):
                return {**given, "param_groups": list(map(self._group, groups, value.param_groups))}
        return given

    def _group(self, given: dict[str, Any], live: dict[str, Any]) -> dict[str, Any]:
        """A parameter group with plain names, which are looked up in the modules of the state."""
        names = given.get("param_names", ())
        if not may_be_wrapped(names) or len(names) != len(live["params"]):
            return given
        if self._names is None:
            self._names = names_of_parameters(self._state)
        return {**given, "param_names": list(map(self._plain_name, live["params"], names))}

    def _plain_name(self, parameter: torch.Tensor, name: str) -> str:
        assert self._names is not None
        known = [plain for plain in self._names.get(id(parameter), ()) if same_but_wrapped(plain, name)]
        return known[0] if len(known) == 1 else name


def names_of_parameters(state: Any) -> dict[int, set[str]]:
    """The plain names of each parameter, by id, in a state's modules, also inside of objects with a state dict."""
    names: dict[int, set[str]] = {}
    for module in _modules_in(state, set()):
        plain = PlainNames(module)
        for name, parameter in module.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), set()).add(plain.entry(name))
    return names


def paired(live: Mapping[Any, Any], saved: Iterable[Any]) -> tuple[dict[str, str], list[str]]:
    """The saved name of each live name, and messages about ambiguous names. `live` maps live names to plain names.

    A checkpoint of the same model has exactly the live names, and a checkpoint of the plain model exactly the plain
    names. In any other checkpoint, a saved name that equals a live or plain name belongs to that name, unless it
    matches several. Remaining names are paired if the saved name is the plain name with wrapper attributes added.
    """
    names = {name for name in saved if isinstance(name, str)}
    plain_names = {name: plain for name, plain in live.items() if isinstance(name, str)}
    if names == plain_names.keys():
        return {name: name for name in plain_names}, []
    if names == {*plain_names.values()}:
        return plain_names, []
    pairs = {(name, other) for name, plain in plain_names.items() for other in {name, plain} & names}
    lives, saves = Counter(name for name, _ in pairs), Counter(other for _, other in pairs)
    ambiguous = [(name, other) for name, other in pairs if lives[name] > 1 or saves[other] > 1]
    bare_live, bare_saved = by_bare_name(plain_names), by_bare_name(names)
    for bare, others in bare_saved.items():
        same = bare_live.get(bare, [])
        if all(map(saves.__contains__, others)) or all(map(lives.__contains__, same)):
            continue
        likes = [(name, other) for name in same for other in others if _is_wrapped(plain_names[name], other)]
        if len(likes) == 1:
            pairs.add(likes[0])
        else:
            ambiguous += likes
    return dict(pairs), _described(ambiguous)


def live_metadata(module: torch.nn.Module, names: PlainNames, saved: dict[str, Any]) -> dict[str, Any]:
    """The metadata of a saved state dict, under the names of the live module's submodules."""
    live = [name for name, _ in module.named_modules(remove_duplicate=False)]
    if saved.keys() == {*live}:
        return saved
    bare = {_bare_module(name): version for name, version in saved.items() if isinstance(name, str)}
    versions = {**bare, **saved}
    likes = ((name, (names.module(name), name, _bare_module(name))) for name in live)
    return OrderedDict(
        (name, versions[next(like for like in several if like in versions)])
        for name, several in likes
        if not versions.keys().isdisjoint(several)
    )


def may_be_wrapped(names: Iterable[Any]) -> bool:
    """True if one of these names contains a wrapper attribute."""
    return any(isinstance(name, str) and _bare(name) != name for name in names)


def same_but_wrapped(one: str, other: str) -> bool:
    """Whether two names are equal except for wrapper attributes."""
    return _bare(one) == _bare(other)


def _attribute_of(cls: type) -> str | None:
    """The attribute in which instances of a class hold the inner module; None if the class is not a wrapper."""
    known = ((getattr(sys.modules.get(module), name, None), inner) for module, name, inner in _WRAPPERS)
    return next((inner for kind, inner in known if kind and issubclass(cls, kind)), None)


def _plain_state(names: PlainNames, given: Any) -> Any:
    if not names or not isinstance(given, dict):
        return given
    plain = names.of(given)
    if names.are_shown and all(name == new for name, new in plain.items()):
        return given
    renamed: Any = OrderedDict() if isinstance(given, OrderedDict) else {}
    renamed.update((plain[name], value) for name, value in given.items())
    metadata = getattr(given, "__dict__", {}).get("_metadata")
    if isinstance(metadata, dict):  # an inner module comes after its wrapper, and overwrites the wrapper's entry
        renamed._metadata = OrderedDict((names.module(name), version) for name, version in metadata.items())
    return renamed


def _modules_in(value: Any, seen: set[int]) -> Iterator[torch.nn.Module]:
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, torch.nn.Module):
        yield value
    elif items := items_of(value):
        for item in items:
            yield from _modules_in(item, seen)
    elif method_of(value, "state_dict") is not None:
        yield from held_by(value, torch.nn.Module)  # such as the parts of a model


def _bare(name: str) -> str:
    """A name without attributes that a wrapper may have added."""
    module, _, last = name.rpartition(".")
    return _joined(_bare_module(module), last)


def _is_wrapped(plain: str, name: str) -> bool:
    """True if `name` is the plain name with wrapper attributes added, given that their bare names are equal."""
    left = iter(name.split("."))
    return all(part in left for part in plain.split("."))


def _bare_module(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _ATTRIBUTES)


def by_bare_name(names: Iterable[str]) -> dict[str, list[str]]:
    """Names by their bare names, which lack the attributes that a wrapper may have added."""
    by_bare_name: dict[str, list[str]] = {}
    for name in names:
        by_bare_name.setdefault(_bare(name), []).append(name)
    return by_bare_name


def _described(ambiguous: Iterable[tuple[str, str]]) -> list[str]:
    saved: dict[str, list[str]] = {}
    live: dict[str, list[str]] = {}
    for name, other in sorted({*ambiguous}):
        saved.setdefault(name, []).append(other)
        live.setdefault(other, []).append(name)
    one_of_several = {name for name in saved if len(saved[name]) > 1}
    return [
        *(f"{name!r} may be {_either(saved[name])} of the checkpoint" for name in sorted(one_of_several)),
        *(
            f"{name!r} of the checkpoint may be {_either(live[name])}"
            for name in live
            if len(live[name]) > 1 and one_of_several.isdisjoint(live[name])
        ),
    ]


def _either(names: Iterable[str]) -> str:
    return " or ".join(map(repr, names))


def _joined(module: str, name: str) -> str:
    return f"{module}.{name}" if module else name


SEQUENCES: Final = list | tuple | deque


class StateDictCache:
    """State dicts, each taken only once: `state_dict()` may be a collective, as under FSDP1, or take minutes."""

    def __init__(self) -> None:
        # By the id of the object, which is kept alive so that its id is not reused.
        self._taken: dict[int, tuple[Any, Any, Exception | None]] = {}

    def of(self, value: Any) -> Any:
        """The state dict of an object. Raises the error of its `state_dict()`."""
        if id(value) not in self._taken:
            try:
                self._taken[id(value)] = value, state_dict_of(value), None
            except Exception as error:
                self._taken[id(value)] = value, None, error
        _, state, failure = self._taken[id(value)]
        if failure is not None:
            raise failure
        return state

    def take_all(self, state: Any) -> None:
        """Take the state dicts of all objects in a state, in the order of the state. `of` raises their errors.

        A single process only takes the state dicts that it needs. Several ranks take all state dicts before anything
        else, in the same order on every rank, whatever is committed.
        """
        self._take_all(state, set())

    def _take_all(self, value: Any, seen: set[int]) -> None:
        if id(value) in seen or isinstance(value, torch.Tensor | type):
            return
        seen.add(id(value))
        if None in (method_of(value, "load_state_dict"), method_of(value, "state_dict")):
            for item in items_of(value):
                self._take_all(item, seen)
        elif not is_plain_optimizer(value):
            with suppress(Exception):
                self.of(value)

    def is_spread(self, state: Any) -> bool:
        """True if other ranks hold parts of tensors of this state. Errors of state dicts are raised later by `of`."""
        with suppress(RecursionError):
            return self._is_spread(state, set())
        return False

    def _is_spread(self, value: Any, seen: set[int]) -> bool:
        if is_sharded(value):
            return True
        if isinstance(value, torch.Tensor | type) or id(value) in seen:
            return False
        seen.add(id(value))
        if isinstance(value, SnapshotView):
            return has_dtensors(value)
        if method_of(value, "state_dict") is not None:
            with suppress(Exception):
                return self._is_spread(self.of(value), seen)
            return any(map(is_sharded, _parameters_of(value)))
        return any(self._is_spread(item, seen) for item in items_of(value))


def items_of(value: Any) -> list[Any]:
    """The items of a container; empty for any other value."""
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, SEQUENCES):
        return list(value)
    return list(fields_of(value).values()) if is_record(value) else []


def _parameters_of(value: Any) -> Iterable[Any]:
    """The tensors of a module or an optimizer whose state dict cannot be taken."""
    if isinstance(value, torch.nn.Module):
        return itertools.chain(value.parameters(), value.buffers())
    if isinstance(value, torch.optim.Optimizer):
        return (parameter for group in value.param_groups for parameter in group["params"])
    return ()
