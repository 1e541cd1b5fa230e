"""The mean of weights in one call of `AsyncCheckpointer.restore`.

In: open archives of a step. Out: the mean in them, if there is one. Knows nothing of: steps, how a mean is updated.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from ..core.host.pool import SegmentPool
from ..core.loading.archives.contents import Part
from ..core.loading.restore import RestoreOptions, restore_state
from ..core.saving.ema import GROUP, Mean, WeightMean
from ..core.state.wrappers import StateDictCache
from ..errors import StateMismatchError


class MeanRestore:
    """Reads the mean before the state is filled, so that a mean of other weights raises before anything is changed."""

    def __init__(self, mean: WeightMean | None, state: Any, options: RestoreOptions, pool: SegmentPool) -> None:
        self._mean = mean if options.select is None else None  # restoring a part of the state leaves the mean alone
        self._state, self._options, self._pool = state, options, pool
        self._found: Mean | None = None

    def read(self, parts: Sequence[Part], state_dicts: StateDictCache) -> None:
        """Read the mean. Raises StateMismatchError for a mean of other weights; `strict=False` ignores such a mean."""
        self._found, having = None, [part for part in parts if part.has_group(GROUP)]
        if self._mean is None or not having:
            return
        tensors, found = self._mean.live(self._state, state_dicts.of)
        options = self._options._replace(strict=None, goes_back=False)
        with suppress(*() if self._options.compares_names else (StateMismatchError,)):
            restore_state(having, {GROUP: tensors}, options, pool=self._pool, state_dicts=state_dicts)
            self._found = found

    def end(self, step: int) -> None:
        """Called once the state has the bytes of `step`."""
        if self._mean is not None:
            self._mean.restored(self._found, step)
