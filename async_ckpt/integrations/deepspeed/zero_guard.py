"""The guard of an engine: it covers the tensors that its optimizer changes only in a step.

In: an engine. Out: torch optimizers for the guard of a snapshot. Knows nothing of: checkpoints.

A ZeRO optimizer keeps flat buffers that belong to no torch optimizer: the fp32 partitions, which it lends to the inner
optimizer for a step, and the weights, which it updates after that. Neither changes before the first `step()` of the
inner optimizer. So a stand-in owns the buffers, and that `step()` waits at its gate.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final

import torch
from torch.utils._pytree import tree_leaves

from ...plumbing import guards as saving_guards
from ..common.step_guard import StepGuard

# The flat buffers of DeepSpeed's optimizers, each a list of tensors, or of lists of them.
_BUFFERS: Final = (
    "bit16_groups_flat", "single_partition_of_fp32_groups", "fp32_partitioned_groups_flat", "fp16_groups_flat",
    "fp32_groups_flat", "bf16_groups_flat", "fp32_groups_flat_partition",
)  # fmt: skip


class ZeroGuard:
    """The guard of one engine's saves."""

    def __init__(self) -> None:
        self._choose = StepGuard()
        self._stand_in: _BufferOwner | None = None

    def __call__(self, engine: Any, parts: Iterable[torch.Tensor] = ()) -> list[Any]:
        """The guards for a snapshot taken now; empty if everything must be copied at once.

        `parts` are those parts of the flat buffers that the snapshot copies separately.
        """
        inner = innermost(engine.optimizer)
        if inner is None:
            return []
        guards = self._choose([inner])
        if guards != [inner]:  # it has no hooks, or steps in the backward pass
            return guards
        if self._stand_in is None or self._stand_in.held is not inner:
            self._stand_in = _BufferOwner(inner)
        self._stand_in.follow(engine, parts)
        return [inner, self._stand_in]


class _BufferOwner(torch.optim.Optimizer):
    """An optimizer that owns the tensors that the wrappers of another one change after its steps. It never steps."""

    def __init__(self, held: torch.optim.Optimizer) -> None:
        super().__init__([torch.zeros(1)], {})
        self.held = held
        gate = saving_guards.gate_of(self)

        def wait_first(*_: Any) -> None:
            gate.hold()

        held.register_step_pre_hook(torch.compiler.disable(wait_first))

    def follow(self, engine: Any, parts: Iterable[torch.Tensor]) -> None:
        """Take over the engine's current buffers and weights, since loading may have replaced them."""
        weights = [p for p in engine.module.parameters() if not hasattr(p, "ds_id")]  # ZeRO 3 gathers those at any time
        self.param_groups = [{"params": [*weights, *_buffers(engine.optimizer), *parts]}]
        self.state = self.held.state


def innermost(optimizer: Any) -> torch.optim.Optimizer | None:
    """The torch optimizer inside DeepSpeed's wrappers; None if the engine has none."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = inner
    return optimizer if isinstance(optimizer, torch.optim.Optimizer) else None


def _buffers(optimizer: Any) -> Iterator[torch.Tensor]:
    while optimizer is not None:
        buffers = tree_leaves([getattr(optimizer, name, None) for name in _BUFFERS])
        yield from filter(torch.is_tensor, buffers)
        optimizer = getattr(optimizer, "optimizer", None)
