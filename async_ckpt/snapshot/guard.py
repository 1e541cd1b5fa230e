"""The guard: what keeps an optimizer off a tensor that is still being copied (DESIGN §5).

In: optimizers, and snapshots in the making. Out: the tensors whose copy may overlap training; a step that waits.
Knows nothing of: files, segments.

That a tensor changes only inside `optimizer.step()` is the caller's statement. It is never inferred, and the
tripwires of the stager check it.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, Final, Protocol

import torch

from ..spec import MIB, TensorSpec

# Below this a copy costs less than keeping account of it.
DEFERRED_BYTES: Final = MIB

Optimizers = Sequence[torch.optim.Optimizer]


class Held(Protocol):
    """What a gate waits for: a snapshot whose copies are under way."""

    def hold(self) -> None:
        """Return when the optimizer may step, having held the thread or its stream for as long as that took."""


class Gate:
    """The pre-step hook of one optimizer. It is registered once and stays: coming and going defeats `torch.compile`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pending: set[Held] = set()  # under _lock

    def __deepcopy__(self, memo: dict[int, Any]) -> Gate:
        """Of a copied optimizer: the copy is for saving, and never steps."""
        return Gate()

    def close(self, snapshot: Held) -> None:
        with self._lock:
            self._pending.add(snapshot)

    def open(self, snapshot: Held) -> None:
        with self._lock:
            self._pending.discard(snapshot)

    def _before_step(self, *_: Any) -> None:
        if self._pending:  # read without the lock: only this thread's own saves matter to this step
            with self._lock:
                pending = list(self._pending)
            for snapshot in pending:
                snapshot.hold()


_gates: weakref.WeakKeyDictionary[torch.optim.Optimizer, Gate] = weakref.WeakKeyDictionary()


def gate_of(optimizer: torch.optim.Optimizer) -> Gate:
    gate = _gates.get(optimizer)
    if gate is None:
        gate = _gates[optimizer] = Gate()
        optimizer.register_step_pre_hook(gate._before_step)
    return gate


def unwrapped(guard: Any) -> Optimizers:
    """The torch optimizers behind what the user passed as `guard`: one, several, or wrappers such as accelerate's.

    Raises TypeError for anything else.
    """
    if guard is None:
        return ()
    found: list[torch.optim.Optimizer] = []
    for given in (
        guard if isinstance(guard, Iterable) and not isinstance(guard, torch.optim.Optimizer) else (guard,)
    ):
        optimizer = given
        while not isinstance(optimizer, torch.optim.Optimizer) and hasattr(optimizer, "optimizer"):
            optimizer = optimizer.optimizer
        # A scheduler has an optimizer and a step() as well, but not that of the optimizer.
        is_scheduler = isinstance(given, torch.optim.lr_scheduler.LRScheduler)
        if is_scheduler or not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(
                f"guard must be a torch optimizer, or several; got {type(given).__qualname__}. "
                "Where no optimizer's step() changes the state, use handle.wait_staged() instead."
            )
        found.append(optimizer)
    return tuple(found)


def deferrable(
    optimizers: Optimizers, specs: Sequence[TensorSpec], tensors: Sequence[torch.Tensor]
) -> frozenset[int]:
    """Which tensors may be copied after `save` has returned: large, dense ones in an optimizer's params and state.

    None while a stream is being captured into a graph, nor of an optimizer with `capturable` groups: replaying a
    graph runs no hooks. A CPU tensor in the state of an optimizer for a device (AdamW's `step`) is never deferred.
    """
    if not optimizers or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
        return frozenset()
    guarded: dict[int, int] = {}  # how many bytes from an address on
    for optimizer in optimizers:
        if not any(group.get("capturable") for group in optimizer.param_groups):
            for tensor in _dense(optimizer):
                at, num_bytes = tensor.data_ptr(), tensor.numel() * tensor.element_size()
                guarded[at] = max(num_bytes, guarded.get(at, 0))
    return frozenset(
        i
        for i, (spec, tensor) in enumerate(zip(specs, tensors, strict=True))
        if spec.num_bytes >= DEFERRED_BYTES
        and tensor.is_contiguous()
        # What only begins like a parameter, such as a flat buffer of which it is the first, holds more than that.
        and spec.num_bytes <= guarded.get(tensor.data_ptr(), 0)
    )


def _dense(optimizer: torch.optim.Optimizer) -> Iterable[torch.Tensor]:
    """The tensors of an optimizer that it alone changes, as far as they lie in one piece."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    on_host = all(p.device.type == "cpu" for p in params)
    yield from (p for p in params if type(p) in (torch.Tensor, torch.nn.Parameter) and p.is_contiguous())
    for state in optimizer.state.values():
        for value in state.values() if isinstance(state, dict) else ():
            ours = type(value) is torch.Tensor and (on_host or value.device.type == "cuda")
            if ours and value.is_contiguous():
                yield value
