"""Every random generator that training draws from, as one object to put into a state.

In: the process. Out: a state dict, and the generators set back to it. Knows nothing of: checkpoints.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from typing import Any

import torch


class RngState:
    """Python, numpy, torch CPU and every CUDA device: `ckpt.save({..., "rng": RngState()}, step=n)`.

    Restoring takes what is there: a missing key, a numpy that is not installed, and another number of
    devices are tolerated (the first ones are set, in order).
    """

    def state_dict(self) -> dict[str, Any]:
        """Plain values and CPU tensors, under the keys `python`, `numpy`, `torch`, `cuda`."""
        state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            state["numpy"] = numpy.random.get_state(legacy=False)
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            state["cuda"] = torch.cuda.get_rng_state_all()
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Set every generator that the state knows."""
        if "python" in state_dict:
            version, internal, gauss = state_dict["python"]
            random.setstate((version, tuple(internal), gauss))
        if "torch" in state_dict:
            torch.set_rng_state(state_dict["torch"].cpu())
        if "numpy" in state_dict:
            try:
                import numpy
            except ImportError:
                pass  # a run without numpy draws nothing from it
            else:
                numpy.random.set_state(state_dict["numpy"])
        if "cuda" in state_dict and torch.cuda.is_available():
            for device, state in zip(range(torch.cuda.device_count()), state_dict["cuda"], strict=False):
                torch.cuda.set_rng_state(state.cpu(), device)
