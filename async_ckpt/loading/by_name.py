"""What torch.distributed.checkpoint.state_dict makes of an optimizer: by the names of parameters, and no longer by their numbers.

In: what was saved of an optimizer, the live one, and the names of its parameters. Out: the state that the optimizer itself would
have given. Knows nothing of: archives.

It is nested as the optimizer's own state is, or flat: `state.<name>.<key>`, and `param_groups.<name>.<key>` for each parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, Final, NamedTuple

import torch

_STATE: Final = "state."
_GROUPS: Final = "param_groups."


class _ByName(NamedTuple):
    """Each parameter's state, and in which group it is."""

    states: Mapping[str, dict[Any, Any]]
    group_of: Mapping[str, int]
    groups: list[dict[str, Any]]
    """Their settings; of a flat one, each parameter is a group."""
    is_flat: bool

    def key_of(self, name: str) -> str:
        """Of a flat one, the key of one of the settings."""
        return f"{_GROUPS}{name}.{next(iter(self.groups[self.group_of[name]]))}"


def is_by_name(saved: Any) -> bool:
    """Whether it is such a state."""
    return _is_nested(saved) or _is_flat(saved)


def numbered(
    saved: dict[Any, Any],
    optimizer: torch.optim.Optimizer,
    names: Mapping[int, Collection[str]],
    *,
    is_of_some: Callable[[str], bool],
) -> dict[str, Any]:
    """By the numbers of this optimizer, given the names of each parameter by its id; flat entries of some ranks may be of no use.

    Raises ValueError, with what to say of it, where a parameter has no name there, or where they are grouped otherwise.
    """
    told = _nested(saved) if _is_nested(saved) else _flat(saved)
    states: dict[int, Any] = {}
    groups: list[dict[str, Any]] = []
    left = {*told.group_of}
    for live in optimizer.param_groups:
        own = [_name_of(parameter, names, told.group_of) for parameter in live["params"]]
        numbers = range(len(states), len(states) + len(own))
        states |= {number: told.states.get(name, {}) for number, name in zip(numbers, own, strict=True)}
        of = sorted({told.group_of[name] for name in own})
        together = [name for name, group in told.group_of.items() if group in of]
        if not told.is_flat and (len(of) > 1 or {*together} != {*own}):
            raise ValueError(f"has other groups of parameters in the checkpoint: {', '.join(together)[:200]}")
        settings = told.groups[of[0]] if of else {}
        groups.append({**settings, "params": list(numbers)})
        left.difference_update(own)
    left = {name for name in left if not told.is_flat or not is_of_some(told.key_of(name))}
    if left:
        raise ValueError(
            f"has parameters in the checkpoint that it lacks here: {', '.join(sorted(left))[:200]}"
        )
    return {"state": {number: state for number, state in states.items() if state}, "param_groups": groups}


def _name_of(parameter: torch.Tensor, names: Mapping[int, Collection[str]], there: Mapping[str, int]) -> str:
    known = sorted(there.keys() & {*names.get(id(parameter), ())})
    if not known:
        raise ValueError(
            "was saved by the names of parameters, as get_optimizer_state_dict gives it, and no module beside it has its parameters "
            "by these names; restore it together with its model, or into get_optimizer_state_dict(model, optimizer), and hand "
            "that to set_optimizer_state_dict"
        )
    return known[0]


def _is_nested(saved: Any) -> bool:
    groups = saved.get("param_groups") if isinstance(saved, dict) else None
    if not isinstance(groups, list) or not isinstance(saved.get("state", {}), dict):
        return False
    params = [group.get("params") if isinstance(group, dict) else None for group in groups]
    if not all(isinstance(own, list) for own in params):
        return False
    found = [name for own in params for name in own or ()]
    states = saved.get("state", {}).values()
    return (
        bool(found) and all(type(name) is str for name in found) and all(type(one) is dict for one in states)
    )


def _is_flat(saved: Any) -> bool:
    return (
        isinstance(saved, dict)
        and any(str(key).startswith(_GROUPS) for key in saved)
        and all(type(key) is str and key.startswith((_STATE, _GROUPS)) for key in saved)
    )


def _nested(saved: Mapping[str, Any]) -> _ByName:
    groups = saved["param_groups"]
    group_of = {name: i for i, group in enumerate(groups) for name in group["params"]}
    settings = [{key: value for key, value in group.items() if key != "params"} for group in groups]
    return _ByName(saved.get("state", {}), group_of, settings, is_flat=False)


def _flat(saved: Mapping[str, Any]) -> _ByName:
    states: dict[str, dict[Any, Any]] = {}
    settings: dict[str, dict[str, Any]] = {}
    for key, value in saved.items():
        into, rest = (
            (states, key[len(_STATE) :]) if key.startswith(_STATE) else (settings, key[len(_GROUPS) :])
        )
        name, _, last = rest.rpartition(".")
        into.setdefault(name, {})[last] = value
    group_of = {name: i for i, name in enumerate(settings)}
    return _ByName(states, group_of, list(settings.values()), is_flat=True)
