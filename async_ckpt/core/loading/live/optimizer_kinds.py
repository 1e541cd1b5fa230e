"""Kinds of optimizers, distinguished by the settings of their groups and by the keys of their states.

In: a live optimizer, and saved groups and states. Out: the reason why their kinds differ.
Knows nothing of: archives, names of parameters.

A state dict does not record the optimizer's class, and a live optimizer has no state before its first step. So the
settings are compared first, and then the keys of the saved states with the keys that torch's own optimizers need.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum
from typing import Any, Final, NamedTuple

import torch

from ...state.optimizers import has_own, name_of_class

# Settings of torch's optimizers that change neither the keys of the states nor their meaning: how an update is
# computed, its sign, and what the weight decay is added to. torch has added each of them to existing classes.
_SHARED: Final = frozenset({"foreach", "fused", "capturable", "differentiable", "maximize", "decoupled_weight_decay"})
# Entries of groups that are not settings, and entries that torch's schedulers add.
_BESIDE: Final = frozenset(
    {"params", "param_names", "initial_lr", "swa_lr", "min_lr", "max_lr", "base_momentum", "max_momentum"}
)
# Torch 2.6 lacks this setting, so its Adam and AdamW have the same settings.
_UNSAID: Final = frozenset({"decoupled_weight_decay"})
# Class names of bitsandbytes that differ only in bits or in paging.
_VARIANT: Final = re.compile(r"^Paged|(8|32)bit$")
_ADAM: Final = frozenset({"torch.Adam", "torch.AdamW"})  # in older versions, neither is derived from the other
_WHAT_TO_DO: Final = "; leave it out with select=, or load() the state and pass the usable parts to load_state_dict()"


class _Likeness(IntEnum):
    """The likeness of a saved optimizer class to the live class."""

    NONE = 0
    RELATED = 1  # one is derived from the other, or is a variant of it
    SAME = 2


class SavedParameters(NamedTuple):
    """A saved group of parameters: its settings, and the states of the parameters."""

    settings: Mapping[str, Any]
    states: Sequence[Mapping[Any, Any]]


class _StateKeys(NamedTuple):
    """The keys of a parameter's state: keys that always exist, and optional keys with the setting that needs each."""

    always: frozenset[str]
    others: Mapping[str, str]

    def fit(self, states: Iterable[Mapping[Any, Any]]) -> bool:
        return all(self.always <= state.keys() <= {*self.always, *self.others} for state in states)


def _keys(always: str, others: Mapping[str, str] | str = "") -> _StateKeys:
    optional = dict.fromkeys(others.split(), "") if isinstance(others, str) else others
    return _StateKeys(frozenset(always.split()), optional)


# torch's optimizers by the names of their classes. LBFGS has one state for all parameters.
_STATES: Final = {
    "Adadelta": _keys("step square_avg acc_delta"),
    "Adafactor": _keys("step", "row_var col_var variance"),
    "Adagrad": _keys("step sum"),
    "Adam": _keys("step exp_avg exp_avg_sq", {"max_exp_avg_sq": "amsgrad"}),
    "AdamW": _keys("step exp_avg exp_avg_sq", {"max_exp_avg_sq": "amsgrad"}),
    "Adamax": _keys("step exp_avg exp_inf"),
    "ASGD": _keys("step eta mu ax"),
    "LBFGS": _keys("func_evals n_iter", "d t old_dirs old_stps ro H_diag prev_flat_grad prev_loss al"),
    "Muon": _keys("", "momentum_buffer"),
    "NAdam": _keys("step mu_product exp_avg exp_avg_sq"),
    "RAdam": _keys("step exp_avg exp_avg_sq"),
    "RMSprop": _keys("step square_avg", {"momentum_buffer": "momentum", "grad_avg": "centered"}),
    "Rprop": _keys("step prev step_size"),
    "SGD": _keys("", "momentum_buffer"),
    "SparseAdam": _keys("step exp_avg exp_avg_sq"),
}
_LBFGS: Final = _STATES["LBFGS"]
# Keys of state entries whose shape is not that of the parameter.
_OF_OTHER_SHAPE: Final = frozenset(
    {"step", "eta", "mu", "mu_product", "row_var", "col_var", *_LBFGS.always, *_LBFGS.others}
)


def kind_difference(
    live: torch.optim.Optimizer, groups: Sequence[SavedParameters], classes: Sequence[Sequence[str]] = ()
) -> str | None:
    """The reason, for the user, why a state is from another kind of optimizer; None if the kinds match.

    `classes` are the class names that the state was saved from, as returned by `classes_of`; empty if they are not
    known. If the live class is one of them, one side may have additional settings, but not both: another version of the
    class adds some, and so do users and schedulers. A related class must have the same settings. An unrelated class may
    be a wrapper that hides the wrapped optimizer, so it must have the settings of one of torch's classes.
    """
    saved = {key for group in groups for key in group.settings} - _BESIDE
    states = [state for group in groups for state in group.states if state]
    kind, likely = _kind_of(live), _likely_kinds(saved, states)
    own = {key for group in getattr(live, "param_groups", ()) for key in group} - _BESIDE
    if not own:  # a wrapper that hides the wrapped optimizer
        return None
    defaults = {*getattr(live, "defaults", {})} - _BESIDE
    only_saved, only_live = saved - own - _SHARED, defaults - saved - _SHARED
    known = saved & _all_settings()
    is_of_torch = any(_settings_of(other) == known for other in likely)
    has_these = known <= own and known - _SHARED == (own & _all_settings()) - _SHARED
    likeness = max((_likeness(chain, live) for chain in classes), default=None)
    if likeness is _Likeness.NONE:
        fits = is_of_torch and has_these and kind in (None, *likely)
    elif likeness is _Likeness.RELATED:
        fits = not only_saved and (not only_live or kind in likely)
    elif likeness is None and kind is not None and likely:
        fits = kind in likely
    else:
        fits = not (only_saved and only_live) and (likeness is not None or has_these or not is_of_torch)
    if not fits:
        names = [chain[0].rpartition(".")[2] for chain in classes] or [f"like {' or '.join(likely)}"] * bool(likely)
        return _other_kind(live, only_saved, only_live, names)
    return _unlike_states(live, kind, states) or _lacking(live, kind, groups) or _coupled(live, groups)


def has_shape_of_parameter(live: torch.optim.Optimizer, key: Any) -> bool:
    """Whether this entry of a state has the shape of its parameter; False if that is unknown."""
    if (kind := _kind_of(live)) is None or key in _OF_OTHER_SHAPE:
        return False
    return key in _STATES[kind].always or key in _STATES[kind].others


def has_one_state(live: torch.optim.Optimizer) -> bool:
    """Whether the optimizer has one state for all its parameters, which depends on their order."""
    return _kind_of(live) == "LBFGS"


def _likeness(chain: Sequence[str], live: Any) -> _Likeness:
    """The likeness of the saved class to the live class. `chain` lists the saved class and its base classes."""
    own = [name_of_class(cls) for cls in type(live).__mro__]
    (package, _, name), (own_package, _, own_name) = (names[0].rpartition(".") for names in (chain, own))
    if name == own_name and (package == own_package or "__main__" in (package, own_package)):
        return _Likeness.SAME
    are_adam = not (_ADAM.isdisjoint(chain) or _ADAM.isdisjoint(own))
    if chain[0] in own or own[0] in chain or _VARIANT.sub("", name) == _VARIANT.sub("", own_name) or are_adam:
        return _Likeness.RELATED
    return _Likeness.NONE


def _other_kind(live: Any, only_saved: set[str], only_live: set[str], names: Sequence[str]) -> str:
    found = f", with {_listed(only_saved)}" if only_saved else ""
    found += f" ({', '.join(names)})" if names else ""
    name = type(live).__qualname__
    here = f"{name} has {_listed(only_live)} instead" if only_live else f"it is {name} here"
    return f"was saved from another kind of optimizer{found}; {here}{_WHAT_TO_DO}"


def _unlike_states(live: Any, kind: str | None, states: Sequence[Mapping[Any, Any]]) -> str | None:
    """The reason why states do not fit an optimizer that is not torch's: their keys differ from the live keys."""
    live_states = [state for state in getattr(live, "state", {}).values() if isinstance(state, Mapping) and state]
    is_plain = isinstance(live, torch.optim.Optimizer) and not has_own(live, "state_dict")
    if kind is not None or not (is_plain and states and live_states):
        return None
    saved, own = ({key for state in several for key in state} for several in (states, live_states))
    if not (saved - own and own - saved):
        return None
    return (
        f"was saved from another kind of optimizer, whose states have {_listed(saved - own)}; those of "
        f"{type(live).__qualname__} have {_listed(own - saved)} instead{_WHAT_TO_DO}"
    )


def _lacking(live: Any, kind: str | None, groups: Iterable[SavedParameters]) -> str | None:
    """The reason why states do not fit one of torch's optimizers: they lack a key that its next step needs."""
    if kind is None:
        return None
    keys, defaults = _STATES[kind], getattr(live, "defaults", {})
    for settings, states in groups:
        with_settings = {key for key, name in keys.others.items() if _is_on(settings.get(name, defaults.get(name)))}
        for state in filter(None, states):
            if lacks := (keys.always | with_settings) - state.keys():
                return (
                    f"was saved from another kind of optimizer, whose states have {_listed(state)}; "
                    f"{type(live).__qualname__} needs {_listed(lacks)} as well{_WHAT_TO_DO}"
                )
    return None


def _coupled(live: Any, groups: Iterable[SavedParameters]) -> str | None:
    """The reason why AdamW, which always decouples its weight decay, cannot continue a state of Adam."""
    adds = (settings for settings, _ in groups if settings.get("decoupled_weight_decay") is False)
    if _kind_of(live) == "AdamW" and any(_is_on(settings.get("weight_decay")) for settings in adds):
        return (
            "was saved from another kind of optimizer: Adam, which adds its weight decay to the gradients; "
            f"{type(live).__qualname__} subtracts it from the weights{_WHAT_TO_DO}"
        )
    return None


def _is_on(value: Any) -> bool:
    return isinstance(value, bool | int | float) and bool(value)


def _listed(keys: Iterable[Any]) -> str:
    return ", ".join(sorted(map(str, keys)))


def _kind_of(live: torch.optim.Optimizer) -> str | None:
    """The name of the torch class that an optimizer is an instance of."""
    kinds = _kinds()
    return next((cls.__name__ for cls in type(live).__mro__ if kinds.get(cls.__name__) is cls), None)


def _likely_kinds(saved: set[str], states: Sequence[Mapping[Any, Any]]) -> list[str]:
    """The torch classes with such states and these settings; only classes without further settings if there are any."""
    known = saved & _all_settings()
    likely = [
        kind
        for kind in _kinds()
        if _settings_of(kind) - _SHARED <= known <= _settings_of(kind) and _STATES[kind].fit(states)
    ]
    alike = known ^ _UNSAID  # with or without `decoupled_weight_decay`
    return [
        kind
        for kind in likely
        if _settings_of(kind) == known or (f"torch.{kind}" in _ADAM and _settings_of(kind) == alike)
    ] or likely


@functools.cache
def _kinds() -> dict[str, type[torch.optim.Optimizer]]:
    """The classes of the installed torch whose states are known."""
    return {name: cls for name in _STATES if (cls := getattr(torch.optim, name, None)) is not None}


@functools.cache
def _settings_of(kind: str) -> frozenset[str]:
    names = {*inspect.signature(_kinds()[kind]).parameters} - {"params"}
    return frozenset(names | {"decoupled_weight_decay"} if kind == "AdamW" else names)


@functools.cache
def _all_settings() -> frozenset[str]:
    return frozenset(name for kind in _kinds() for name in _settings_of(kind))
