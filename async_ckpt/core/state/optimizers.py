"""Optimizers that consist of other optimizers, and optimizers with their own state dict methods.

In: optimizers. Out: the parts of an optimizer, its parameter groups, the names of parameters, and whether its methods
are torch's. Knows nothing of: saved states, steps.

torchtitan has a container for the optimizers of all model parts, ZeroRedundancyOptimizer contains the optimizer of this
rank's part, and accelerate wraps an optimizer. They are recognized by what their attributes hold, not by the
attributes' names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import torch

T = TypeVar("T")
Optimizer: TypeAlias = torch.optim.Optimizer


def all_of(optimizer: Optimizer) -> list[Optimizer]:
    """The optimizer, and all optimizers that it steps, recursively."""
    by_id: dict[int, Optimizer] = {}
    todo = [optimizer]
    while todo:
        one = todo.pop()
        if id(one) not in by_id:
            by_id[id(one)] = one
            todo += reversed(_parts_held_by(one))
    return list(by_id.values())


def parts_of(optimizer: Optimizer) -> list[Optimizer]:
    """The innermost optimizers that this optimizer steps, in its order; the optimizer itself if it steps no other."""
    return [one for one in all_of(optimizer) if not _parts_held_by(one)]


def is_optimizer(value: Any) -> bool:
    """Whether an object is an optimizer, or wraps an optimizer."""
    return isinstance(value, Optimizer) or hasattr(type(value), "param_groups")


def classes_of(optimizer: Any) -> list[list[str]]:
    """The class names of the optimizer's parts, each with its base classes except torch's Optimizer.

    A name consists of the package and the class, since classes are moved between modules of a package.
    """
    kinds = dict.fromkeys(map(type, parts_of(optimizer)))
    return [[name_of_class(cls) for cls in kind.__mro__ if cls not in (Optimizer, object)] for kind in kinds]


def name_of_class(cls: type) -> str:
    return f"{cls.__module__.partition('.')[0]}.{cls.__name__}"


def groups_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """The parameter groups of all parts of an optimizer."""
    return [group for part in parts_of(optimizer) for group in part.param_groups]


def names_in(optimizer: Optimizer) -> dict[int, set[str]]:
    """The names in an optimizer's groups, by the ids of its parameters; parameters without a name are left out."""
    names: dict[int, set[str]] = {}
    for group in (*groups_of(optimizer), *_own_groups(optimizer)):
        for parameter, name in zip(group["params"], group.get("param_names", ()), strict=False):
            names.setdefault(id(parameter), set()).add(name)
    return names


def has_own(optimizer: Optimizer, method: str) -> bool:
    """Whether an optimizer, or its class, overrides `state_dict` or `load_state_dict` of torch."""
    return method in vars(optimizer) or getattr(type(optimizer), method) is not getattr(Optimizer, method)


def is_plain_optimizer(optimizer: Any) -> bool:
    """True for torch's optimizers, and for optimizers that save and load like them."""
    if not isinstance(optimizer, Optimizer):
        return False
    if any(has_own(optimizer, method) for method in ("state_dict", "load_state_dict")):
        return False
    hooks = (
        "_optimizer_load_state_dict_pre_hooks",
        "_optimizer_load_state_dict_post_hooks",
        "_optimizer_state_dict_post_hooks",
    )
    return not any(getattr(optimizer, name, None) for name in hooks)


def held_by(value: Any, kind: type[T]) -> Iterator[T]:
    """The objects of a class that are attributes of an object, or items of a list or dict that is an attribute."""
    for held in list(getattr(value, "__dict__", {}).values()):
        several = held.values() if isinstance(held, Mapping) else held
        candidates = several if isinstance(held, Mapping | list | tuple) else (held,)
        yield from (one for one in candidates if isinstance(one, kind))


def _parts_held_by(optimizer: Optimizer) -> list[Optimizer]:
    return [one for one in held_by(optimizer, Optimizer) if _is_part(one, optimizer)]


def _is_part(inner: Optimizer, outer: Optimizer) -> bool:
    """Whether `outer` steps `inner`: they share parameters, or `outer` has no parameters."""
    if inner is outer:
        return False
    groups = _own_groups(outer)
    own = {id(parameter) for group in groups for parameter in group["params"]}
    return not own or any(id(parameter) in own for group in _own_groups(inner) for parameter in group["params"])


def _own_groups(optimizer: Optimizer) -> Sequence[dict[str, Any]]:
    groups = getattr(optimizer, "param_groups", None)  # a wrapper may not have called `Optimizer.__init__`
    return groups if isinstance(groups, list) else ()
