"""The state dicts of live objects, each taken once for one restore.

In: live objects. Out: what their `state_dict()` gives. Knows nothing of: archives.

Taking one may be a collective, as under FSDP1, or take minutes. So with several ranks all of them are taken before anything is looked at,
in the same order on every rank and whatever is committed; one process takes only those that it needs.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch

from ...state.plain import fields_of, is_record
from .kinds import SEQUENCES, is_plain_optimizer


class LiveStateDicts:
    """Made for one restore, on the thread that restores."""

    def __init__(self) -> None:
        self._taken: dict[
            int, tuple[Any, Any, Exception | None]
        ] = {}  # with the object, which so keeps its id

    def of(self, value: Any) -> Any:
        """Raises what its `state_dict()` has raised."""
        if id(value) not in self._taken:
            self._taken[id(value)] = (value, *_take(value))
        _, state, error = self._taken[id(value)]
        if error is not None:
            raise error
        return state

    def take_all(self, state: Any) -> None:
        """Take those of all objects that have their own, in the order in which they are in a state. Errors are kept for `of`."""
        seen: set[int] = set()

        def visit(value: Any) -> None:
            if id(value) in seen or isinstance(value, torch.Tensor | type):
                return
            seen.add(id(value))
            if isinstance(value, Mapping):
                inner = list(value.values())
            elif isinstance(value, SEQUENCES):
                inner = list(value)
            elif callable(getattr(value, "load_state_dict", None)) and callable(
                getattr(value, "state_dict", None)
            ):
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
