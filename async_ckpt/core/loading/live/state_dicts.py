"""The state dicts of live objects, each taken once for one restore.

In: live objects. Out: the results of their `state_dict()`. Knows nothing of: archives.

Taking a state dict may be a collective, as under FSDP1, or take minutes. So with several ranks all of them are taken
before anything else, in the same order on every rank, whatever is committed. A single process takes only those that it
needs.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch

from ...state.plain import method_of
from ...state.wrappers import StateDictCache, items_of
from .kinds import is_plain_optimizer


class LiveStateDicts(StateDictCache):
    """The state dicts of one restore, taken on the thread that restores. `AsyncCheckpointer.restore` creates it."""

    def take_all(self, state: Any) -> None:
        """Take the state dicts of all objects in a state, in their order there. Errors are kept for `of`."""
        seen: set[int] = set()

        def visit(value: Any) -> None:
            if id(value) in seen or isinstance(value, torch.Tensor | type):
                return
            seen.add(id(value))
            if None not in (method_of(value, "load_state_dict"), method_of(value, "state_dict")):
                if not is_plain_optimizer(value):
                    with suppress(Exception):
                        self.of(value)
                return
            for item in items_of(value):
                visit(item)

        visit(state)
