"""Live objects with a known structure, which may be filled in place, without their own `load_state_dict`.

In: live objects, and saved states of optimizers. Out: whether they are of such a kind. Knows nothing of: archives.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from typing import Any

import torch

from ...state.plain import is_record
from ...state.wrapped import plain_parts
from ...state.wrappers import SEQUENCES


def is_looked_into(live: Any, state_dict_of: Callable[[Any], Any]) -> bool:
    """True if taking the state dict has no effects: for a plain module, a container or a tensor."""
    is_structure = isinstance(live, torch.Tensor | MutableMapping | SEQUENCES) or is_record(live)
    return is_structure or is_plain_module(live, state_dict_of)


def is_plain_module(live: Any, state_dict_of: Callable[[Any], Any]) -> bool:
    """True for a module whose state dict is its own memory, and whose loading has no other effects.

    `state_dict_of` takes the state dict, or returns the one taken before.
    """
    if not isinstance(live, torch.nn.Module) or type(live).load_state_dict is not torch.nn.Module.load_state_dict:
        return False
    for module in live.modules():
        hooks = (*module._load_state_dict_pre_hooks.values(), *module._load_state_dict_post_hooks.values())
        if not all(map(_is_fully_shard_hook, hooks)):
            return False
        if not type(module)._load_from_state_dict.__module__.startswith("torch.nn."):
            return False
    own = {part.data_ptr() for tensor in (*live.parameters(), *live.buffers()) for part in plain_parts(tensor)}
    given = (tensor for tensor in state_dict_of(live).values() if isinstance(tensor, torch.Tensor))
    return all(part.data_ptr() in own for tensor in given for part in plain_parts(tensor))


def _is_fully_shard_hook(hook: Any) -> bool:
    """True for the hook of FSDP2 that reshards a module, which taking the state dict has already done."""
    module: str = getattr(hook, "hook", hook).__module__
    return module.startswith("torch.distributed.fsdp._fully_shard")


def is_optimizer_state(saved: Any) -> bool:
    """True for a state dict of torch.optim.Optimizer: numbered parameters in groups, and a dict for each with state."""
    return has_groups(saved, of=int) and "state" in saved


def has_groups(saved: Any, *, of: type) -> bool:
    """True for a state with groups of parameters, which are known by values of this type, and a dict for each that has
    state.
    """
    groups, states = (saved.get("param_groups"), saved.get("state", {})) if isinstance(saved, dict) else (None, None)
    return (
        isinstance(groups, list)
        and isinstance(states, dict)
        and all(isinstance(group, dict) and isinstance(group.get("params"), list) for group in groups)
        and all(type(one) is of for group in groups for one in group["params"])
        and all(isinstance(state, dict) for state in states.values())
    )


def is_on_device(group: dict[str, Any]) -> bool:
    """True if the update kernel of these parameters reads `step` from their device."""
    return bool(group.get("capturable") or group.get("fused"))


def state_of_parameter(states: dict[Any, Any], number: int) -> Any:
    """The saved state of a parameter, whose number torch.distributed.checkpoint turns into text."""
    return states[number] if number in states else states.get(str(number), {})
