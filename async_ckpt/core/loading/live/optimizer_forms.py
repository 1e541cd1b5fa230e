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


class _Parsed(NamedTuple):
    """A state in one of these forms. In a flat state, each parameter is a group of its own."""

    form: Form
    settings: list[dict[str, Any]]
    """The settings of each group."""
    members: Sequence[Sequence[Any]]
    """The numbers or names of the parameters in each group."""
    states: Mapping[Any, dict[Any, Any]]
    """The states of parameters by their numbers or names."""

    def group_of(self) -> dict[Any, int]:
        """The group of each parameter."""
        return {one: i for i, members in enumerate(self.members) for one in members}

    def named(self, names: Sequence[Sequence[str]]) -> _Parsed:
        """A numbered state with these names of the parameters of each group, which are all different."""
        numbers = zip(chain(*names), chain(*self.members), strict=True)
        states = {name: self.states.get(number, {}) for name, number in numbers}
        return _Parsed(Form.NESTED, self.settings, names, states)

    def groups_with(self, chosen: Collection[Any] | None = None) -> list[SavedParameters]:
        """The groups that have some of these parameters, with only these; all groups by default."""
        groups = [
            (settings, [one for one in members if chosen is None or one in chosen])
            for settings, members in zip(self.settings, self.members, strict=True)
        ]
        return [
            SavedParameters(settings, [self.states.get(one, {}) for one in members])
            for settings, members in groups
            if members or chosen is None
        ]


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
        self._optimizer, self._names_beside = optimizer, names
        self._saved, self._state = saved, _parsed(saved)
        self._own: Any = None  # the optimizer's state dict, if it was taken
        self._form = None if self._state is None else self._live_form(state_dict_of)

    def _live_form(self, state_dict_of: Callable[[Any], Any]) -> Form | None:
        live = self._optimizer
        for method, hooks in (("load_state_dict", "load_state_dict_pre"), ("state_dict", "state_dict_post")):
            if not (has_own(live, method) or getattr(live, f"_optimizer_{hooks}_hooks", None)):
                return Form.NUMBERED
        with suppress(Exception):  # some optimizers have no state dict yet: then the state is loaded as it was saved
            self._own = state_dict_of(live)
        own = _parsed(self._own)
        return None if own is None else own.form

    def convert(self, *, is_of_some: Callable[[str], bool]) -> Any:
        """The saved state in the optimizer's form, without flat entries of parameters that only other ranks have.

        Raises ValueError, with a message for the user, if a parameter has no name, or if the groups differ.
        """
        saved, state, form = self._saved, self._state, self._form
        if state is not None and state.form is Form.NUMBERED:
            _refuse_odd_names(saved["param_groups"])
        if state is None or form is None:
            return saved
        if state.form is form is Form.NUMBERED:
            if adapts_states(self._optimizer):
                return saved
            ordered = self._in_own_order(saved, state)
            return {**ordered, "param_groups": self._with_live_names(ordered["param_groups"])}
        if state.form is form is Form.FLAT:
            names = self._own_names()
            return {k: v for k, v in saved.items() if not is_of_some(k) or _name_in(k, names) in names}
        if state.form is form:
            return saved
        if state.form is Form.NUMBERED:
            state = self._named(saved["param_groups"], state)
        if form is Form.FLAT:  # settings that were not saved keep their live values
            own = {key: value for key, value in self._own.items() if key.startswith(_GROUPS)}
            return {**own, **_flatten(state)}
        has_names = _names_of(self._optimizer.param_groups) is not None
        live = self._live_settings() if state.form is Form.FLAT or has_names else ()
        return _group(state, self._ids(state), is_of_some, live)

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

    def _own_names(self) -> set[str]:
        """The names in the optimizer's own state dict."""
        own = _parsed(self._own)
        return set() if own is None else {*chain(*own.members)}

    def _groups(self) -> list[list[torch.Tensor]]:
        """The parameters of each group, in the order of their numbers."""
        inner = groups_of(self._optimizer)
        if self._form is not Form.NUMBERED:
            return [group["params"] for group in inner]
        live = self._optimizer.param_groups
        if self._own is not None and _sizes(live) != (sizes := _sizes(self._own["param_groups"])):
            if _sizes(inner) != sizes:
                raise ValueError("has its own numbering of parameters, but the checkpoint has names")
            live = inner
        return [group["params"] for group in live]

    def _ids(self, state: _Parsed) -> list[list[tuple[Any, str]]]:
        """The key of each parameter in a state of the optimizer's form, and its name, for each group."""
        if self._form is Form.NESTED:
            return [[(name, name) for name in group["params"]] for group in self._own["param_groups"]]
        known, saved_names, numbers = self.known_names(), state.group_of(), count()
        groups = [
            [(next(numbers), _name_of(parameter, known, saved_names)) for parameter in group]
            for group in self._groups()
        ]
        _refuse_twice([name for group in groups for _, name in group])
        return groups

    def _named(self, groups: Sequence[Mapping[str, Any]], state: _Parsed) -> _Parsed:
        """Converts a numbered state to the names that the optimizer's own state uses."""
        own, sizes = self._own_names(), _sizes(groups)
        names = [[*group.get("param_names", ())] for group in groups]
        if [*map(len, names)] != sizes or own != {*chain(*names)}:
            live = self._groups()
            if (live_sizes := [*map(len, live)]) != sizes:
                raise ValueError(f"has parameter groups of {live_sizes} here and of {sizes} in the checkpoint")
            known = self.known_names()
            names = [[_name_of(parameter, known, own, _IS_NUMBERED) for parameter in group] for group in live]
        _refuse_twice([*chain(*names)])
        return state.named(names)

    def _own_groups(self) -> list[dict[str, Any]]:
        """The groups in the order in which the optimizer's own state dict numbers the parameters."""
        groups: list[dict[str, Any]] = self._optimizer.param_groups if self._own is None else self._own["param_groups"]
        return groups

    def _in_own_order(self, saved: dict[str, Any], state: _Parsed) -> dict[str, Any]:
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
        ordered = _group(state.named(saved_names), ids, lambda _: False, self._live_settings())
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
        parsed = _parsed(saved)
        if not isinstance(state, dict) or parsed is None or parsed.form is not self._form:
            return
        if self._form is Form.NUMBERED:
            parameters: dict[Any, torch.Tensor] = dict(enumerate(chain(*self._groups())))
        else:
            known, names = self.known_names(), parsed.group_of()
            parameters = {}
            for parameter in (own for group in groups_of(self._optimizer) for own in group["params"]):
                with suppress(ValueError):
                    parameters[_name_of(parameter, known, names)] = parameter
        if self._form is Form.FLAT:
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
    state, parts = _parsed(saved), parts_of(live)
    if state is None or adapts_states(live):
        return None
    if state.form is Form.NUMBERED:
        pairs = _in_turn(parts, state.groups_with())
    else:
        names = known()
        pairs = ((part, _groups_of_part(part, state, names)) for part in parts)
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


def _groups_of_part(part: Any, state: _Parsed, names: Names) -> list[SavedParameters]:
    """The saved groups of an optimizer's parameters; all groups if none of its parameters has a name."""
    parameters = chain(*(group["params"] for group in getattr(part, "param_groups", ())))
    own = {name for parameter in parameters for name in names.get(id(parameter), ())}
    return state.groups_with(own) or state.groups_with()


def _group(
    state: _Parsed,
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
    is_flat, group_of = state.form is Form.FLAT, state.group_of()
    left = {*group_of}
    for i, group in enumerate(ids):
        own = {name for _, name in group}
        if unknown := own - group_of.keys():
            raise ValueError(f"has parameters that the checkpoint lacks: {', '.join(sorted(unknown))[:200]}")
        states |= {identifier: state.states.get(name, {}) for identifier, name in group}
        sources = sorted({group_of[name] for name in own})
        together = [*chain(*(state.members[source] for source in sources))]
        if not (is_flat or live) and (len(sources) > 1 or {*together} != own):
            raise ValueError(f"has other groups of parameters in the checkpoint: {', '.join(together)[:200]}")
        settings = _common([state.settings[source] for source in sources], live[i] if i < len(live) else {})
        groups.append({**settings, "params": [identifier for identifier, _ in group]})
        left -= own
    if is_flat:
        left = {
            name for name in left if not is_of_some(f"{_GROUPS}{name}.{next(iter(state.settings[group_of[name]]))}")
        }
    if left:
        raise ValueError(f"has parameters in the checkpoint that it lacks here: {', '.join(sorted(left))[:200]}")
    return {
        "state": {identifier: own_state for identifier, own_state in states.items() if own_state},
        "param_groups": groups,
    }


def _flatten(state: _Parsed) -> dict[str, Any]:
    entries: dict[str, Any] = {}

    def add(at: str, value: Any) -> None:
        if type(value) is dict and value:
            for key, inner in value.items():
                add(f"{at}.{key}", inner)
        else:
            entries[at] = value

    for name, own in state.states.items():
        for key, value in own.items():
            add(f"{_STATE}{name}.{key}", value)
    for name, group in state.group_of().items():
        entries |= {f"{_GROUPS}{name}.{key}": value for key, value in state.settings[group].items()}
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


def _parsed(saved: Any) -> _Parsed | None:
    """The parts of a state; None if it is in a form of its own."""
    if not isinstance(saved, dict):
        return None
    if "param_groups" not in saved:
        has_groups = any(str(key).startswith(_GROUPS) for key in saved)
        is_flat = has_groups and all(type(key) is str and key.startswith((_STATE, _GROUPS)) for key in saved)
        return _flat(saved) if is_flat else None
    groups, states = saved.get("param_groups"), saved.get("state", {})
    if not (
        isinstance(groups, list)
        and isinstance(states, dict)
        and all(isinstance(group, dict) and isinstance(group.get("params"), list) for group in groups)
        and all(isinstance(state, dict) for state in states.values())
    ):
        return None
    members = [group["params"] for group in groups]
    kinds = {type(one) for one in chain(*members)}
    if kinds <= {int} and "state" in saved:
        numbered = {number: state_of_parameter(states, number) for number in chain(*members)}
        return _Parsed(Form.NUMBERED, [*map(_settings, groups)], members, numbered)
    return _Parsed(Form.NESTED, [*map(_settings, groups)], members, states) if kinds == {str} else None


def is_optimizer_state(saved: Any) -> bool:
    """True for a state dict of torch.optim.Optimizer: numbered parameters in groups, and a dict for each with state."""
    state = _parsed(saved)
    return state is not None and state.form is Form.NUMBERED


def state_of_parameter(states: dict[Any, Any], number: int) -> Any:
    """The saved state of a parameter, whose number torch.distributed.checkpoint turns into a string."""
    return states[number] if number in states else states.get(str(number), {})


def _flat(saved: Mapping[str, Any]) -> _Parsed:
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
    return _Parsed(Form.FLAT, [*settings.values()], [[name] for name in settings], states)


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
