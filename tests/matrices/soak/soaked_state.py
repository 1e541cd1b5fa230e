"""States that tell which save they are of, so that whoever reads one can say whether it was ever saved.

In: a number. Out: a state whose every item follows from it. Knows nothing of: saves.
"""

from typing import Any, Final

import torch

NUM_TENSORS: Final = 4
ITEMS: Final = 1 << 17
"""Of each tensor: 512 KiB."""


class Soaked:
    """A model with its optimizer, whose values follow from the number of the turn."""

    def __init__(self) -> None:
        self.parameters = [torch.nn.Parameter(torch.zeros(ITEMS)) for _ in range(NUM_TENSORS)]
        self.optimizer = torch.optim.SGD(self.parameters, lr=0.0)
        self.frozen = torch.arange(ITEMS, dtype=torch.int32)
        for parameter in self.parameters:
            parameter.grad = torch.zeros_like(parameter)

    def become(self, number: int) -> dict[str, Any]:
        """The state of this number. The step before waits for copies that are under way, as a training's does."""
        self.optimizer.step()
        with torch.no_grad():
            for i, parameter in enumerate(self.parameters):
                parameter.fill_(_value(number, i))
        return self.state(number)

    def state(self, number: int) -> dict[str, Any]:
        model = {f"layers.{i}": parameter for i, parameter in enumerate(self.parameters)}
        return {"model": model, "number": number, "frozen": {"base": self.frozen}}


def check(state: dict[str, Any]) -> int:
    """The number of a state that was read. Raises AssertionError for one that was never saved."""
    number: int = state["number"]
    for i in range(NUM_TENSORS):
        tensor = state["model"][f"layers.{i}"]
        assert torch.all(tensor == _value(number, i)), f"layers.{i} is not that of {number}"
    assert torch.equal(state["frozen"]["base"], torch.arange(ITEMS, dtype=torch.int32))
    return number


def weights_of(number: int) -> dict[str, torch.Tensor]:
    """Weights to publish: a part of their items differs from one number to the next."""
    weights = {f"layers.{i}": torch.full((1 << 15,), _value(0, i)) for i in range(NUM_TENSORS)}
    for i, tensor in enumerate(weights.values()):
        tensor[number % 97 :: 97] = _value(number, i)
    return weights


def _value(number: int, layer: int) -> float:
    return float((number * 7 + layer) % 65_521)
