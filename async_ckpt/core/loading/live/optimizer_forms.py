"""Converts the saved state of an optimizer to the form that the live optimizer loads: by parameter numbers or by names.

In: the saved state of an optimizer, the live one, and the names of its parameters. Out: the state in the form of the
live optimizer, with room for all of its tensors. Knows nothing of: archives.

States by names come from torch.distributed.checkpoint.state_dict and from containers of several optimizers. Such a
state is nested like the optimizer's own state, or flat, with the keys `state.<name>.<key>` and
`param_groups.<name>.<key>` for each parameter. A state in any other form is not converted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from enum import Enum
from itertools import chain, count, islice
from typing import Any, Final, NamedTuple, TypeAlias

import torch

from ...state.optimizers import groups_of, has_own, is_plain_optimizer, names_in, parts_of
from ...state.wrappers import by_bare_name, same_but_wrapped
from .optimizer_kinds import SavedParameters, has_one_state, kind_difference

_STATE: Final = "state."
_GROUPS: Final = "param_groups."

Names: TypeAlias = Mapping[int, Collection[str]]


class Form(Enum):
    """The way in which a state dict identifies parameters."""

    NUMBERED = "by numbers, as torch's optimizers do"
    NESTED = "by names, in groups"
    FLAT = "by names, which are in the keys"
    OTHER = "in a way of its own"


class _ByName(NamedTuple):
    """A state by names: the state and the group of each parameter."""

    states: Mapping[str, dict[Any, Any]]
    group_of: Mapping[str, int]
    groups: list[dict[str, Any]]
    """The settings of each group. In a flat state, each parameter is a group of its own."""
    is_flat: bool

    def key_of(self, name: str) -> str:
        """The key of a setting of this parameter in a flat state."""
        return f"{_GROUPS}{name}.{next(iter(self.groups[self.group_of[name]]))}"


def form_of(state: Any) -> Form:
    """The form of a state dict."""
    if is_optimizer_state(state):
        return Form.NUMBERED
    if _is_nested(state):
        return Form.NESTED
    return Form.FLAT if _is_flat(state) else Form.OTHER


class OptimizerConverter:
    """Converts saved states to the form that a live optimizer loads. `Match` creates one for each optimizer.

    torch's own `load_state_dict` expects numbers, any other the form of the optimizer's own `state_dict`. That method
    is called only then, since it may have any side effect. A state of unknown form is loaded as it was saved.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        saved: Any,
        names: Callable[[], Names],
        state_dict_of: Callable[[Any], Any],
    ) -> None:
        """`names` returns the names of parameters in live modules; `state_dict_of`, the optimizer's state dict."""
        self._state_dict_of = state_dict_of
        self._optimizer, self._names_beside = optimizer, names
        self._own: Any = None  # the optimizer's state dict, if it was taken
        self.form = Form.OTHER if form_of(saved) is Form.OTHER else self._form()

    def _form(self) -> Form:
        live = self._optimizer
        for method, hooks in (("load_state_dict", "load_state_dict_pre"), ("state_dict", "state_dict_post")):
            if not (has_own(live, method) or getattr(live, f"_optimizer_{hooks}_hooks", None)):
                return Form.NUMBERED
        with suppress(Exception):  # some optimizers have no state dict yet: then the state is loaded as it was saved
            self._own = self._state_dict_of(live)
        return form_of(self._own)

    def convert(self, saved: Any, *, is_of_some: Callable[[str], bool]) -> Any:
        """The saved state in the optimizer's form, without flat entries of parameters that only other ranks have.

        Raises ValueError, with a message for the user, if a parameter has no name, or if the groups differ.
        """
        form = form_of(saved)
        if form is Form.NUMBERED:
            _refuse_odd_names(saved["param_groups"])
        if form is self.form is Form.NUMBERED:
            if adapts_states(self._optimizer):
                return saved
            ordered = self._in_own_order(saved)
            return {**ordered, "param_groups": self._with_live_names(ordered["param_groups"])}
        if form is self.form is Form.FLAT:
            names = {*_by_name(self._own).group_of}
            return {k: v for k, v in saved.items() if not is_of_some(k) or _name_in(k, names) in names}
        if form is self.form or Form.OTHER in (form, self.form):
            return saved
        by_name = self._named(saved) if form is Form.NUMBERED else _by_name(saved)
        if self.form is Form.FLAT:  # settings that were not saved keep their live values
            own = {key: value for key, value in self._own.items() if key.startswith(_GROUPS)}
            return {**own, **_flatten(by_name)}
        has_names = _names_of(self._optimizer.param_groups) is not None
        live = self._live_settings() if by_name.is_flat or has_names else ()
        return _group(by_name, self._ids(by_name), is_of_some, live)

    def with_room(self, state: Any, saved: Any, make: Callable[[torch.Tensor, Any], Any]) -> Any:
        """A copy of the optimizer's own state, with an entry for each saved entry of its parameters.

        `make` returns a missing entry, given the parameter and the saved value. Only dicts and lists are copied.
        """
        state = _copy(state)
        for parameter, live, saved_entries in self._pairs(state, saved):
            for key, value in saved_entries.items():
                if key not in live:
                    live[key] = make(parameter, value)
        return state

    # --- names ------------------------------------------------------------------------------------------------

    def known_names(self) -> Names:
        """The names of parameters by their ids: the names in live modules, and the names in the optimizer."""
        known = {number: {*names} for number, names in self._names_beside().items()}
        for number, names in names_in(self._optimizer).items():
            known.setdefault(number, set()).update(names)
        return known

    def _groups(self) -> list[list[torch.Tensor]]:
        """The parameters of each group, in the order of their numbers."""
        inner = groups_of(self._optimizer)
        if self.form is not Form.NUMBERED:
            return [group["params"] for group in inner]
        live = self._optimizer.param_groups
        if self._own is not None and _sizes(live) != (sizes := _sizes(self._own["param_groups"])):
            if _sizes(inner) != sizes:
                raise ValueError("has its own numbering of parameters, but the checkpoint has names")
            live = inner
        return [group["params"] for group in live]

    def _ids(self, by_name: _ByName) -> list[list[tuple[Any, str]]]:
        """The key of each parameter in a state of the optimizer's form, and its name, for each group."""
        if self.form is Form.NESTED:
            return [[(name, name) for name in group["params"]] for group in self._own["param_groups"]]
        known, number = self.known_names(), 0
        groups: list[list[tuple[Any, str]]] = []
        for group in self._groups():
            groups.append([])
            for parameter in group:
                groups[-1].append((number, _name_of(parameter, known, by_name.group_of)))
                number += 1
        _refuse_twice([name for group in groups for _, name in group])
        return groups

    def _named(self, saved: Mapping[str, Any]) -> _ByName:
        """Converts a numbered state to the names that the optimizer's own state uses."""
        groups = saved["param_groups"]
        own = {*_by_name(self._own).group_of}
        names = [[*group.get("param_names", ())] for group in groups]
        if [*map(len, names)] != _sizes(groups) or own != {*chain(*names)}:
            live = self._groups()
            if list(map(len, live)) != _sizes(groups):
                raise ValueError(
                    f"has parameter groups of {list(map(len, live))} here and of {_sizes(groups)} in the checkpoint"
                )
            known = self.known_names()
            names = [[_name_of(parameter, known, own, _IS_NUMBERED) for parameter in group] for group in live]
        _refuse_twice([*chain(*names)])
        return _numbered(saved, names)

    def _own_groups(self) -> list[dict[str, Any]]:
        """The groups in the order in which the optimizer's own state dict numbers the parameters."""
        groups: list[dict[str, Any]] = self._optimizer.param_groups if self._own is None else self._own["param_groups"]
        return groups

    def _in_own_order(self, saved: dict[str, Any]) -> dict[str, Any]:
        """A numbered state, reordered like the live groups by parameter names if both sides have names."""
        own, groups = self._own_groups(), saved["param_groups"]
        names, saved_names = _names_of(own), _names_of(groups)
        if names is None or saved_names is None or names == saved_names:
            return saved
        saved_name = _saved_names([*chain(*names)], [*chain(*saved_names)])
        if has_one_state(self._optimizer) and [*saved_name.values()] != [*chain(*saved_names)]:
            raise ValueError(
                "has one state for all parameters, which were in another order at the save; pass them in the order "
                f"{', '.join(chain(*saved_names))!s:.200}"
            )
        numbers = count()
        ids = [[(next(numbers), saved_name[name]) for name in group_names] for group_names in names]
        ordered = _group(_numbered(saved, saved_names), ids, lambda _: False, self._live_settings())
        for group, pairs in zip(ordered["param_groups"], ids, strict=True):
            group["param_names"] = [name for _, name in pairs]
        return {**saved, **ordered}

    def _live_settings(self) -> list[dict[str, Any]]:
        """The live settings of each group, for settings that were not saved; empty if a restore keeps them anyway."""
        is_plain = is_plain_optimizer(self._optimizer)
        return [{} if is_plain else _settings(group) for group in self._own_groups()]

    def _with_live_names(self, groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """The saved groups with the parameter names of the live model, which may be wrapped, unlike the saved model."""
        own = self._own_groups()
        is_same = _sizes(own) == _sizes(groups)
        keeps = has_own(self._optimizer, "load_state_dict")
        merged = []
        for i, group in enumerate(groups):
            live = own[i].get("param_names") if is_same else None
            saved_names = group.get("param_names", ())
            group = {key: value for key, value in group.items() if key != "param_names"}
            if keeps and live is not None and saved_names:
                is_alike = len(live) == len(saved_names) and all(map(same_but_wrapped, live, saved_names))
                group["param_names"] = live if is_alike else saved_names
            merged.append(group)
        return merged

    # --- both sides -------------------------------------------------------------------------------------------

    def _pairs(self, state: Any, saved: Any) -> Iterator[tuple[torch.Tensor, dict[Any, Any], dict[Any, Any]]]:
        """Each parameter, the dict in `state` that holds its entries, and its saved entries."""
        if self.form is Form.OTHER or not (isinstance(state, dict) and form_of(saved) is self.form):
            return
        if self.form is Form.NUMBERED:
            parameters: dict[Any, torch.Tensor] = dict(enumerate(chain(*self._groups())))
        else:
            known, names = self.known_names(), {*_by_name(saved).group_of}
            parameters = {}
            for parameter in (own for group in groups_of(self._optimizer) for own in group["params"]):
                with suppress(ValueError):
                    parameters[_name_of(parameter, known, names)] = parameter
        if self.form is Form.FLAT:
            for key, value in saved.items():
                name = _name_in(key, parameters)
                if name in parameters:
                    yield parameters[name], state, {key: value}
            return
        states = state.setdefault("state", {})
        for identifier, parameter in parameters.items():
            saved_entries = state_of_parameter(saved["state"], identifier)
            if isinstance(saved_entries, dict) and saved_entries:
                yield parameter, states.setdefault(identifier, {}), saved_entries


def another_kind(
    live: Any, saved: Any, known: Callable[[], Names], classes: Sequence[Sequence[str]] = ()
) -> str | None:
    """The reason why a state is of another kind than an optimizer or its parts; None if the kinds match.

    `known` returns the names of parameters; it is called only if the state is by names. `classes` are the class names
    that the state was saved from, as returned by `classes_of`; empty if they are not known.
    """
    form, parts = form_of(saved), parts_of(live)
    if form is Form.OTHER or adapts_states(live):
        return None
    if form is Form.NUMBERED:
        groups = [
            SavedParameters(
                _settings(group), [state_of_parameter(saved["state"], number) for number in group["params"]]
            )
            for group in saved["param_groups"]
        ]
        pairs = _in_turn(parts, groups)
    else:
        by_name, names = _by_name(saved), known()
        pairs = ((part, _groups_of_part(part, by_name, names)) for part in parts)
    return next(filter(None, (kind_difference(part, own, classes) for part, own in pairs if own)), None)


def adapts_states(live: Any) -> bool:
    """Whether a hook of the user converts a saved state before the optimizer loads it."""
    return bool(getattr(live, "_optimizer_load_state_dict_pre_hooks", None))


def _in_turn(parts: Sequence[Any], groups: list[SavedParameters]) -> Iterator[tuple[Any, list[SavedParameters]]]:
    """Each optimizer with its saved groups, if the numbers of saved and live groups are equal.

    If all optimizers have the same class, only the first one, with all groups.
    """
    sizes = [len(getattr(part, "param_groups", ())) for part in parts]
    if len({*map(type, parts)}) == 1:
        yield parts[0], groups
    elif sum(sizes) == len(groups):
        left = iter(groups)
        yield from ((part, [*islice(left, size)]) for part, size in zip(parts, sizes, strict=True))


def _groups_of_part(part: Any, by_name: _ByName, names: Names) -> list[SavedParameters]:
    """The saved groups of an optimizer's parameters; all groups if none of its parameters has a name."""
    parameters = chain(*(group["params"] for group in getattr(part, "param_groups", ())))
    own = {name for parameter in parameters for name in names.get(id(parameter), ())} & by_name.group_of.keys()
    states_of: dict[int, list[Any]] = {}
    for name in own or by_name.group_of:
        states_of.setdefault(by_name.group_of[name], []).append(by_name.states.get(name, {}))
    return [SavedParameters(by_name.groups[i], states) for i, states in states_of.items()]


def _by_name(saved: Mapping[str, Any]) -> _ByName:
    return _nested(saved) if _is_nested(saved) else _flat(saved)


def _group(
    by_name: _ByName,
    ids: list[list[tuple[Any, str]]],
    is_of_some: Callable[[str], bool],
    live: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """A nested state with the groups in `ids`, which list the key and the name of each parameter.

    If the state is flat, or if the `live` settings of the groups are given, the saved groups may be different. Then a
    group gets each setting that the saved groups of its parameters agree on, and keeps its live setting otherwise.
    """
    states: dict[Any, Any] = {}
    groups: list[dict[str, Any]] = []
    left = {*by_name.group_of}
    for i, group in enumerate(ids):
        own = {name for _, name in group}
        if unknown := own - by_name.group_of.keys():
            raise ValueError(f"has parameters that the checkpoint lacks: {', '.join(sorted(unknown))[:200]}")
        states |= {identifier: by_name.states.get(name, {}) for identifier, name in group}
        sources = sorted({by_name.group_of[name] for name in own})
        together = [name for name, number in by_name.group_of.items() if number in sources]
        if not (by_name.is_flat or live) and (len(sources) > 1 or {*together} != own):
            raise ValueError(f"has other groups of parameters in the checkpoint: {', '.join(together)[:200]}")
        settings = _common([by_name.groups[source] for source in sources], live[i] if i < len(live) else {})
        groups.append({**settings, "params": [identifier for identifier, _ in group]})
        left -= own
    left = {name for name in left if not by_name.is_flat or not is_of_some(by_name.key_of(name))}
    if left:
        raise ValueError(f"has parameters in the checkpoint that it lacks here: {', '.join(sorted(left))[:200]}")
    return {
        "state": {identifier: state for identifier, state in states.items() if state},
        "param_groups": groups,
    }


def _flatten(by_name: _ByName) -> dict[str, Any]:
    entries: dict[str, Any] = {}

    def add(at: str, value: Any) -> None:
        if type(value) is dict and value:
            for key, inner in value.items():
                add(f"{at}.{key}", inner)
        else:
            entries[at] = value

    for name, state in by_name.states.items():
        for key, value in state.items():
            add(f"{_STATE}{name}.{key}", value)
    for name, group in by_name.group_of.items():
        entries |= {f"{_GROUPS}{name}.{key}": value for key, value in by_name.groups[group].items()}
    return entries


_IS_NAMED: Final = (
    "was saved by parameter names, as by get_optimizer_state_dict, but no module in the live state has its parameters "
    "under these names; restore it together with its model, or restore into "
    "get_optimizer_state_dict(model, optimizer), and pass that to set_optimizer_state_dict"
)
_IS_NUMBERED: Final = (
    "was saved by parameter numbers and is loaded by names, but no module in the live state has its parameters under "
    "the names of its state dict; restore it together with its model, or give the optimizer named parameters"
)


def _name_of(parameter: torch.Tensor, known: Names, saved_names: Collection[str], why: str = _IS_NAMED) -> str:
    candidates = sorted({*known.get(id(parameter), ())}.intersection(saved_names))
    if not candidates:
        raise ValueError(why)
    return candidates[0]


def _refuse_twice(names: Sequence[str]) -> None:
    if len({*names}) < len(names):
        twice = sorted(name for name, times in Counter(names).items() if times > 1)
        raise ValueError(f"has parameters with the same name, perhaps from several modules: {', '.join(twice)[:200]}")


def _refuse_odd_names(groups: Iterable[Mapping[str, Any]]) -> None:
    """Raises ValueError if the names of parameters in an untrusted index are not lists of strings."""
    for group in groups:
        names = group.get("param_names", ())
        if not (isinstance(names, list | tuple) and all(isinstance(name, str) for name in names)):
            raise ValueError("has names of parameters that are not a list of text")


def _names_of(groups: Sequence[Mapping[str, Any]]) -> list[list[str]] | None:
    """The names of the parameters of each group; None if a parameter has no name."""
    names = [[*group.get("param_names", ())] for group in groups]
    return names if any(names) and [*map(len, names)] == _sizes(groups) else None


def _saved_names(live: Sequence[str], saved: Sequence[str]) -> dict[str, str]:
    """The saved name of each live parameter: the same name, or the name that differs only by what wrappers add.

    Raises ValueError for parameters that only one side has.
    """
    _refuse_twice(live)
    _refuse_twice(saved)
    names = {name: name for name in {*live} & {*saved}}
    others = by_bare_name({*saved} - names.keys())
    for bare, same in by_bare_name({*live} - names.keys()).items():
        if len(same) == len(others.get(bare, ())) == 1:
            names[same[0]] = others[bare][0]
    found = [
        f"has parameters {where}: {', '.join(sorted(left))!s:.200}"
        for where, left in (
            ("that the checkpoint lacks", {*live} - names.keys()),
            ("in the checkpoint that it lacks here", {*saved} - {*names.values()}),
        )
        if left
    ]
    if found:
        raise ValueError(f"{', and '.join(found)}; give the optimizer the parameters that were saved, by their names")
    return {name: names[name] for name in live}


def _common(groups: Sequence[Mapping[str, Any]], live: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that these groups have in common, and the live settings where the groups differ."""
    if not groups:
        return dict(live)
    first, *others = map(_settings, groups)
    common = {key: value for key, value in first.items() if all(key in one and one[key] == value for one in others)}
    differing = {key for one in (first, *others) for key in one} - common.keys()
    return {key: value for key, value in live.items() if key in differing} | common


def _sizes(groups: Iterable[Mapping[str, Any]]) -> list[int]:
    return [len(group["params"]) for group in groups]


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def _copy(state: Any) -> Any:
    """A copy of the dicts and lists of a state; other values are shared."""
    if isinstance(state, dict):
        return {key: _copy(value) for key, value in state.items()}
    return list(map(_copy, state)) if type(state) is list else state


# --- forms ----------------------------------------------------------------------------------------------------------


def is_optimizer_state(saved: Any) -> bool:
    """True for a state dict of torch.optim.Optimizer: numbered parameters in groups, and a dict for each with state."""
    return _has_groups(saved, of=int) and "state" in saved


def _is_nested(saved: Any) -> bool:
    return _has_groups(saved, of=str) and any(group["params"] for group in saved["param_groups"])


def _has_groups(saved: Any, *, of: type) -> bool:
    """True for a state whose groups list parameters as values of type `of`, with a dict for each parameter's state."""
    groups, states = (saved.get("param_groups"), saved.get("state", {})) if isinstance(saved, dict) else (None, None)
    return (
        isinstance(groups, list)
        and isinstance(states, dict)
        and all(isinstance(group, dict) and isinstance(group.get("params"), list) for group in groups)
        and all(type(one) is of for group in groups for one in group["params"])
        and all(isinstance(state, dict) for state in states.values())
    )


def state_of_parameter(states: dict[Any, Any], number: int) -> Any:
    """The saved state of a parameter, whose number torch.distributed.checkpoint turns into a string."""
    return states[number] if number in states else states.get(str(number), {})


def _is_flat(saved: Any) -> bool:
    return (
        isinstance(saved, dict)
        and any(str(key).startswith(_GROUPS) for key in saved)
        and all(type(key) is str and key.startswith((_STATE, _GROUPS)) for key in saved)
    )


def _nested(saved: Mapping[str, Any]) -> _ByName:
    groups = saved["param_groups"]
    group_of = {name: i for i, group in enumerate(groups) for name in group["params"]}
    return _ByName(saved.get("state", {}), group_of, list(map(_settings, groups)), is_flat=False)


def _numbered(saved: Mapping[str, Any], names: Sequence[Sequence[str]]) -> _ByName:
    """Converts a numbered state to these names of the parameters of each group, which are all different."""
    groups = saved["param_groups"]
    group_of = {name: i for i, own in enumerate(names) for name in own}
    numbers = chain(*(group["params"] for group in groups))
    states = {name: state_of_parameter(saved["state"], n) for name, n in zip(group_of, numbers, strict=True)}
    return _ByName(states, group_of, list(map(_settings, groups)), is_flat=False)


def _flat(saved: Mapping[str, Any]) -> _ByName:
    settings: dict[str, dict[str, Any]] = {}
    states: dict[str, dict[Any, Any]] = {}
    for key in saved:
        if key.startswith(_GROUPS):
            name, _, last = key[len(_GROUPS) :].rpartition(".")
            settings.setdefault(name, {})[last] = saved[key]
    names = {*settings}
    for key in saved:
        if key.startswith(_STATE):
            name, rest = _parse_key(key, _STATE, names)
            *above, last = rest.split(".")
            into = states.setdefault(name, {})
            for part in above:  # the state of a parameter may itself be nested
                into = into.setdefault(part, {})
            into[last] = saved[key]
    group_of = {name: i for i, name in enumerate(settings)}
    return _ByName(states, group_of, list(settings.values()), is_flat=True)


def _name_in(key: str, names: Collection[str]) -> str:
    """The name of the parameter that a key of a flat state belongs to."""
    return _parse_key(key, _STATE if key.startswith(_STATE) else _GROUPS, names)[0]


def _parse_key(key: str, prefix: str, names: Collection[str]) -> tuple[str, str]:
    """The name of the parameter in a key, and the name of the setting; both may contain dots."""
    name, _, rest = key[len(prefix) :].rpartition(".")
    known, setting = name, rest
    while known and known not in names:
        known, _, part = known.rpartition(".")
        setting = f"{part}.{setting}"
    return (known, setting) if known else (name, rest)
