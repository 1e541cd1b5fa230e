"""The state dicts of a state's objects, each taken once, and whether a state is spread over ranks.

In: states. Out: the results of `state_dict()`. Knows nothing of: skeletons, archives.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any, Final

import torch

from ..slicing.sharded import is_sharded
from .captured import SnapshotView, has_dtensors
from .plain import fields_of, is_record, method_of

SEQUENCES: Final = list | tuple | deque


class StateDictCache:
    """State dicts, each of which is taken once: taking one may be a collective, or take minutes."""

    def __init__(self) -> None:
        # By the id of the object, which is kept alive so that no other object gets its id.
        self._taken: dict[int, tuple[Any, Any, Exception | None]] = {}

    def of(self, value: Any) -> Any:
        """The state dict of an object. Raises the error of its `state_dict()`."""
        if id(value) not in self._taken:
            self._taken[id(value)] = (value, *_take(value))
        _, state, error = self._taken[id(value)]
        if error is not None:
            raise error
        return state

    def is_spread(self, state: Any) -> bool:
        """True if other ranks hold parts of tensors of this state. Errors of state dicts are kept for `of`."""
        with suppress(RecursionError):
            return self._is_spread(state, set())
        return False

    def _is_spread(self, value: Any, seen: set[int]) -> bool:
        if is_sharded(value):
            return True
        if isinstance(value, torch.Tensor | type) or id(value) in seen:
            return False
        seen.add(id(value))
        if isinstance(value, SnapshotView):
            return has_dtensors(value)
        if method_of(value, "state_dict") is not None:
            with suppress(Exception):
                return self._is_spread(self.of(value), seen)
            return any(map(is_sharded, _parameters_of(value)))
        return any(self._is_spread(item, seen) for item in items_of(value))


def items_of(value: Any) -> list[Any]:
    """The items of a container; none of any other value."""
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, SEQUENCES):
        return list(value)
    return list(fields_of(value).values()) if is_record(value) else []


def _parameters_of(value: Any) -> Iterable[Any]:
    """The tensors of a module or an optimizer whose state dict cannot be had."""
    if isinstance(value, torch.nn.Module):
        return itertools.chain(value.parameters(), value.buffers())
    if isinstance(value, torch.optim.Optimizer):
        return (parameter for group in value.param_groups for parameter in group["params"])
    return ()


def _take(value: Any) -> tuple[Any, Exception | None]:
    try:
        return value.state_dict(), None
    except Exception as error:
        return None, error
