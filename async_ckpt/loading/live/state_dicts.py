"""The state dicts of live objects, each taken once for one restore.

In: live objects. Out: the results of their `state_dict()`. Knows nothing of: archives.

Taking a state dict may be a collective, as under FSDP1, or take minutes. So with several ranks all of them are taken
before anything else, in the same order on every rank, whatever is committed. A single process takes only those that it
needs.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch

from ...state.plain import fields_of, is_record
from .kinds import SEQUENCES, is_plain_optimizer


class LiveStateDicts:
    """The state dicts of one restore, taken on the thread that restores. `AsyncCheckpointer.restore` creates it."""

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

    def take_all(self, state: Any) -> None:
        """Take the state dicts of all objects in a state, in their order there. Errors are kept for `of`."""
        seen: set[int] = set()

        def visit(value: Any) -> None:
            if id(value) in seen or isinstance(value, torch.Tensor | type):
                return
            seen.add(id(value))
            if isinstance(value, Mapping):
                inner = list(value.values())
            elif isinstance(value, SEQUENCES):
                inner = list(value)
            elif callable(getattr(value, "load_state_dict", None)) and callable(getattr(value, "state_dict", None)):
                if not is_plain_optimizer(value):
                    with suppress(Exception):
                        self.of(value)
                return
            else:
                inner = list(fields_of(value).values()) if is_record(value) else []
            for item in inner:
                visit(item)

        visit(state)


def _take(value: Any) -> tuple[Any, Exception | None]:
    try:
        return value.state_dict(), None
    except Exception as error:
        return None, error
