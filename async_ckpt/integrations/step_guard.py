"""The guard of a trainer's optimizers, found by itself.

In: the optimizers of a training. Out: those that a snapshot may be guarded by. Knows nothing of: frameworks.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any, Final

from ..staging.guard import unwrapped

# Attributes of optimizers that step in the backward pass: LOMO, and the layer-wise ones of Transformers.
_STEP_IN_BACKWARD: Final = ("fused_backward", "optimizer_dict")


class StepGuard:
    """The choice of a guard, for one trainer: it says once which optimizers it cannot take."""

    def __init__(self) -> None:
        self._warned: set[str] = set()  # classes of optimizers

    def __call__(self, optimizers: Iterable[Any]) -> list[Any]:
        """The optimizers that change their parameters in `step` alone. What others own is copied at once."""
        guarded = []
        for optimizer in optimizers:
            name, reason = type(getattr(optimizer, "optimizer", optimizer)).__qualname__, _why_not(optimizer)
            if reason is None:
                guarded.append(optimizer)
            elif name not in self._warned:
                self._warned.add(name)
                warnings.warn(
                    f"{name} cannot be guarded, since {reason}: training waits at each save until all is copied",
                    UserWarning,
                    stacklevel=3,
                )
        return guarded


def _why_not(optimizer: Any) -> str | None:
    """The reason why an optimizer may change something outside of its `step()`, as far as that shows; or None."""
    try:
        stepped = unwrapped(optimizer)
    except TypeError:
        return "its step() is not that of a torch optimizer"
    for one in stepped:
        if callable(getattr(one, "train", None)) and callable(getattr(one, "eval", None)):
            return "its train() and eval() change the weights"
        groups = getattr(one, "param_groups", ())
        hooked = any(getattr(p, "_post_accumulate_grad_hooks", None) for group in groups for p in group["params"])
        if hooked or any(hasattr(one, name) for name in _STEP_IN_BACKWARD):
            return "it may step in the backward pass"
    return None
