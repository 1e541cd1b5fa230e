"""What is saved, and the training that goes on meanwhile.

In: sizes. Out: states, and steps of a real training. Knows nothing of: checkpoints, clocks.
"""

from __future__ import annotations

from typing import Any, Final

import torch

_WIDTH: Final = 2048
_TENSOR_BYTES: Final = _WIDTH * _WIDTH * 4


def tensors(num_bytes: int) -> dict[str, torch.Tensor]:
    """fp32 matrices of 16 MiB. The headers in the file shift them, so that they straddle segments as real ones do."""
    count = max(1, num_bytes // _TENSOR_BYTES)
    return {f"layers.{i}.weight": torch.rand(_WIDTH, _WIDTH) for i in range(count)}


def small_tensors(count: int) -> dict[str, torch.Tensor]:
    """1 KiB each."""
    return {f"layers.{i}.scale": torch.randn(256) for i in range(count)}


class Training:
    """Linear layers under AdamW, whose parameters and state together have about `num_bytes`."""

    def __init__(self, num_bytes: int, *, batch: int, device: str = "cpu") -> None:
        count = max(1, num_bytes // (3 * _TENSOR_BYTES))
        layers = [torch.nn.Linear(_WIDTH, _WIDTH, bias=False, device=device) for _ in range(count)]
        self.model = torch.nn.Sequential(*layers)
        # Fused as anyone would have it who cares for speed; it is also the step that touches memory hardest.
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)
        self._inputs = torch.randn(batch, _WIDTH, device=device)
        self.step()  # the optimizer makes its state in the first step

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer}

    def state_dict(self) -> dict[str, Any]:
        return {name: part.state_dict() for name, part in self.state.items()}

    def step(self) -> None:
        self.forward_backward()
        self.optimizer.step()

    def forward_backward(self) -> None:
        self.optimizer.zero_grad(
            set_to_none=False
        )  # gradients keep their memory, as step times should not vary
        self.model(self._inputs).square().mean().backward()
