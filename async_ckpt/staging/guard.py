"""The guard: what keeps an optimizer off a tensor that is still being copied (DESIGN §5).

In: optimizers, and snapshots in the making. Out: the tensors whose copy may overlap training; a step that waits.
Knows nothing of: files, segments.

That a tensor changes only inside `optimizer.step()` is the caller's statement. It is never inferred, and the
tripwires of the stager check it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any, Final, Protocol

import torch

from ..backends import device_of, has_plain_bytes, is_capturing, is_dense, is_on_host
from ..slicing.sharded import local_part
from ..spec import MIB

# Below this a copy costs less than keeping account of it.
DEFERRED_BYTES: Final = MIB

Optimizers = Sequence[torch.optim.Optimizer]


class Holds(Protocol):
    """What a gate waits for: a snapshot whose copies are under way."""

    def hold(self) -> None:
        """Return when the optimizer may step, having held the thread or its stream for as long as that took."""


class Gate:
    """The pre-step hook of one optimizer. It is registered once and stays: coming and going defeats `torch.compile`."""

    def __init__(self) -> None:
        # Changed and copied in one step each, without a lock: a step that is interrupted must not be while it holds one.
        self._pending: set[Holds] = set()

    def __deepcopy__(self, memo: dict[int, Any]) -> Gate:
        """Of a copied optimizer: the copy is for saving, and never steps."""
        return Gate()

    def close(self, snapshot: Holds) -> None:
        self._pending.add(snapshot)

    def open(self, snapshot: Holds) -> None:
        self._pending.discard(snapshot)

    def _before_step(self, *_: Any) -> None:
        for snapshot in list(self._pending):
            snapshot.hold()


_gates: weakref.WeakKeyDictionary[torch.optim.Optimizer, Gate] = weakref.WeakKeyDictionary()


def gate_of(optimizer: torch.optim.Optimizer) -> Gate:
    gate = _gates.get(optimizer)
    if gate is None:
        gate = Gate()
        optimizer.register_step_pre_hook(gate._before_step)
        _gates[optimizer] = gate  # last: a gate that is known is hung
    return gate


def unwrapped(guard: Any) -> Optimizers:
    """The torch optimizers behind what the user passed as `guard`: one, several, or wrappers such as accelerate's.

    Raises TypeError for anything else.
    """
    if guard is None:
        return ()
    several = isinstance(guard, Iterable) and not isinstance(guard, torch.optim.Optimizer)
    found: list[torch.optim.Optimizer] = []
    for given in guard if several else (guard,):
        optimizer = _innermost(given)
        if optimizer is None:
            raise TypeError(
                f"guard must be a torch optimizer, or several; got {type(given).__qualname__}. "
                "Where no optimizer's step() changes the state, use handle.wait_staged() instead."
            )
        found.append(optimizer)
    return tuple(found)


def _innermost(given: Any) -> torch.optim.Optimizer | None:
    """The torch optimizer whose step() a wrapper calls in the end.

    A wrapper may be a torch optimizer itself, as accelerate's is, and yet have no hooks.
    """
    # A scheduler has an optimizer and a step() as well, but not that of the optimizer.
    if isinstance(given, torch.optim.lr_scheduler.LRScheduler):
        return None
    inner = _innermost(given.optimizer) if hasattr(given, "optimizer") else None
    return given if inner is None and isinstance(given, torch.optim.Optimizer) else inner


def deferrable(optimizers: Optimizers, tensors: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
    """Which tensors may be copied after `save` has returned: large, dense ones in an optimizer's params and state. By the
    number of each, the optimizer's own tensor of this memory, which may be another object.

    None while a stream is being captured into a graph, nor of an optimizer with `capturable` groups: replaying a
    graph runs no hooks. A CPU tensor in the state of an optimizer for a device (AdamW's `step`) is never deferred, nor
    is what lies on a device without streams.
    """
    if not optimizers or is_capturing():
        return {}
    guarded: dict[int, torch.Tensor] = {}  # by address; of those that begin at the same one, the largest
    for optimizer in optimizers:
        if not any(group.get("capturable") for group in optimizer.param_groups):
            for tensor in _params_and_state(optimizer):
                if _is_large(tensor) and tensor.is_contiguous():
                    other = guarded.setdefault(tensor.data_ptr(), tensor)
                    if other is not tensor and tensor.nbytes > other.nbytes:
                        guarded[tensor.data_ptr()] = tensor
    return {
        i: owner
        for i, tensor in enumerate(tensors)
        # What only begins like a parameter, such as a flat buffer of which it is the first, holds more than that.
        if _is_large(tensor)
        and (owner := guarded.get(tensor.data_ptr())) is not None
        and (tensor is owner or tensor.nbytes <= owner.nbytes)
        and is_dense(tensor)
    }


def _params_and_state(optimizer: torch.optim.Optimizer) -> Iterable[torch.Tensor]:
    params = [local_part(p) for group in optimizer.param_groups for p in group["params"]]
    on_host = all(map(is_on_host, params))
    yield from (p for p in params if type(p) in (torch.Tensor, torch.nn.Parameter) and has_plain_bytes(p))
    for state in optimizer.state.values():
        for value in map(local_part, state.values()) if isinstance(state, dict) else ():
            if type(value) is torch.Tensor and (on_host or device_of(value) is not None):
                yield value


def _is_large(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.nbytes >= DEFERRED_BYTES


class _Inherited:
    """Stands for what the checkpointer was given."""

    def __repr__(self) -> str:
        return "that of the checkpointer"


INHERITED: Any = _Inherited()
