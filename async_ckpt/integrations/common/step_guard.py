"""The guard of a trainer's optimizers, chosen automatically.

In: the optimizers of a training. Out: the guards of a snapshot, with methods that wait for it.
Knows nothing of: frameworks.

A guard makes an optimizer wait by torch's hook before `step()`. If an optimizer does not run this hook, or if other
methods change the weights, too, these methods of the object are replaced by ones that wait. An optimizer that steps in
the backward pass cannot be made to wait; its parameters and state are copied at once.
"""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final

from torch.optim import Optimizer

from ...plumbing import guards as saving_guards
from ...plumbing import optimizer_parts

# Attributes of optimizers that step in the backward pass: LOMO, and the layer-wise ones of Transformers.
_STEP_IN_BACKWARD: Final = ("fused_backward", "optimizer_dict")
# Methods of schedule-free optimizers that change the weights, besides `step`.
_MODES: Final = ("train", "eval")


class StepGuard:
    """Chooses the guards for one trainer. Warns once about each class of optimizers for which a hook is not enough."""

    def __init__(self) -> None:
        self._warned: set[str] = set()  # classes of optimizers

    def __call__(self, optimizers: Iterable[Any]) -> list[Any]:
        """The guards of a snapshot, for these optimizers. Tensors without a guard are copied at once."""
        guards = []
        for optimizer in optimizers:
            guard = self._guard_of(optimizer)
            if guard is not None:
                guards.append(guard)
        return guards

    def _guard_of(self, optimizer: Any) -> Any:
        *wrappers, inner = _layers(optimizer)
        parts = optimizer_parts.all_of(inner) if isinstance(inner, Optimizer) else [inner]
        if any(map(_steps_in_backward, parts)):
            self._warn(inner, "it may step in the backward pass", "training waits at each save until all is copied")
            return None
        has_hooks, has_modes = _has_hooks(inner), any(map(_has_modes, parts))
        if has_hooks and not has_modes:
            return optimizer
        if not (hasattr(inner, "param_groups") and hasattr(inner, "state") and hasattr(inner, "step")):
            self._warn(inner, "it is not like torch's optimizers", "training waits at each save until all is copied")
            return None
        if has_modes:
            waits = "these methods, and step(), wait instead until all is copied"
            self._warn(inner, "its train() and eval() change the weights", waits)
        else:
            self._warn(inner, "its step() runs no hooks", "its step() waits instead until all is copied")
        return _held(inner, wrappers)

    def _warn(self, optimizer: Any, reason: str, consequence: str) -> None:
        name = type(optimizer).__qualname__
        if name not in self._warned:
            self._warned.add(name)
            warnings.warn(
                f"{name} cannot be guarded by a hook alone, since {reason}: {consequence}", UserWarning, stacklevel=5
            )


def _layers(optimizer: Any) -> Iterator[Any]:
    """An optimizer and, below wrappers such as accelerate's, the innermost one."""
    yield optimizer
    while hasattr(optimizer := getattr(optimizer, "optimizer", None), "step"):
        yield optimizer


def _steps_in_backward(optimizer: Any) -> bool:
    groups = getattr(optimizer, "param_groups", ())
    hooked = any(getattr(p, "_post_accumulate_grad_hooks", None) for group in groups for p in group["params"])
    return hooked or any(hasattr(optimizer, name) for name in _STEP_IN_BACKWARD)


def _has_modes(optimizer: Any) -> bool:
    return all(callable(getattr(optimizer, name, None)) for name in _MODES)


def _has_hooks(optimizer: Any) -> bool:
    try:
        return bool(saving_guards.unwrapped(optimizer))
    except TypeError:
        return False


# --- methods that wait ------------------------------------------------------------------------------------------------


class _StandIn(Optimizer):
    """An optimizer that stands in for one with other methods that must wait: the guard reads its parameters and state.

    It never steps. The methods of the original optimizer wait at its gate.
    """

    def __init__(self, optimizer: Any) -> None:
        super().__init__([p for group in optimizer.param_groups for p in group["params"]], {})
        self.follow(optimizer)

    def follow(self, optimizer: Any) -> None:
        """Take over the original's current groups and state, since loading may have replaced them."""
        self.param_groups, self.state = optimizer.param_groups, optimizer.state


_stand_ins: weakref.WeakKeyDictionary[Any, _StandIn] = weakref.WeakKeyDictionary()


def _held(optimizer: Any, wrappers: Sequence[Any]) -> _StandIn:
    """The stand-in of an optimizer. From now on, its methods and its wrappers' `step` wait for the guard."""
    stand_in = _stand_ins.get(optimizer)
    if stand_in is None:
        stand_in = _StandIn(optimizer)
        for target in (*wrappers, optimizer):  # a wrapper may have kept the original `step`
            target.step = _waiting(target.step, stand_in)
        for name in _MODES if _has_modes(optimizer) else ():
            setattr(optimizer, name, _waiting(getattr(optimizer, name), stand_in, name == "train"))
        _stand_ins[optimizer] = stand_in  # last: an optimizer in here has methods that wait
    stand_in.follow(optimizer)
    return stand_in


def _waiting(method: Callable[..., Any], stand_in: _StandIn, mode: bool | None = None) -> Callable[..., Any]:
    """A method that first waits at the gate; a method that sets a `mode` waits only if the mode changes."""
    gate, owner = saving_guards.gate_of(stand_in), weakref.ref(getattr(method, "__self__", stand_in))

    @functools.wraps(method)
    def wait_first(*args: Any, **kwargs: Any) -> Any:
        if mode is None or _modes_of(owner()) != {mode}:
            gate.hold()
        return method(*args, **kwargs)

    return wait_first


def _modes_of(optimizer: Any) -> set[Any]:
    """The modes recorded in a schedule-free optimizer, or in its groups."""
    own = getattr(optimizer, "train_mode", None)
    return {group.get("train_mode", own) for group in getattr(optimizer, "param_groups", ())}
