"""The guard of a trainer's optimizers, found by itself.

In: the optimizers of a training. Out: those that a snapshot may be guarded by. Knows nothing of: frameworks.
"""

from __future__ import annotations

import warnings
from typing import Any, Final

from ..staging.guard import Optimizers, unwrapped

# Methods and attributes of optimizers that change parameters outside of `step`: schedule-free ones, and those that step
# in the backward pass (LOMO, and the layer-wise ones of Transformers).
_CHANGING: Final = ("eval", "fused_backward", "optimizer_dict")


class StepGuard:
    """The choice of a guard, for one trainer: it says once which optimizer it cannot take."""

    def __init__(self) -> None:
        self._has_warned = False

    def __call__(self, optimizers: Any) -> Optimizers | None:
        """The optimizers, if they change their parameters in `step` alone; else None: everything is copied at once."""
        try:
            found = unwrapped(optimizers)
            changing: object = next((one for one in found if any(hasattr(one, name) for name in _CHANGING)), None)
        except TypeError:
            changing = optimizers
        if changing is None:
            return found
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"{type(changing).__name__} may change parameters outside of step(), so training waits at each save "
                "until all is copied",
                UserWarning,
                stacklevel=3,
            )
        return None
