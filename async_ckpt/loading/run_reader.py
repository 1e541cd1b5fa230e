"""Reading of a run and of its steps, as far as no live object is needed.

In: the roots of a run. Out: steps, records, states. Knows nothing of: saves.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import torch

from ..errors import NotCommittedError
from ..runs.retention import best_of, describe_missing_metric
from ..runs.roots import Roots
from ..state.names import Select
from .archives.contents import Part
from .archives.find import from_newest, from_step
from .archives.step_archives import Readers
from .load import check_verify, state_of


class RunReader:
    """The reading side of a checkpointer. It changes nothing on storage.

    Each call but `steps` first waits for the saves that this checkpointer has under way, so that it sees what they commit. It
    goes on without one that fails, with a warning. On a thread of the library it raises RuntimeError instead of waiting.
    """

    root: str
    _roots: Roots

    def _see_own_saves(self, reader: str) -> None:
        """Return when what this object writes itself can be seen by `reader`."""

    def steps(self) -> list[int]:
        """The steps that are committed by now, ascending. Unlike all other calls that read, it never waits for a save.

        ckpt.steps()  # [100, 200, 300]
        """
        return self._roots.steps()

    def latest(self) -> int | None:
        """The newest committed step, or None. Waits for saves that are under way, as `restore` does.

        ckpt.latest()  # 300
        """
        self._see_own_saves("latest()")
        return self._roots.latest()

    def records(self) -> dict[int, dict[str, Any]]:
        """The record of every committed step, ascending by step; empty where `save` was given none.

        ckpt.records()  # {100: {"loss": 0.7}, 200: {"loss": 0.5}, 300: {}}
        """
        self._see_own_saves("records()")
        return {step: dict(made.record) if made else {} for step, made in self._roots.view().items()}

    def best(self, metric: str, *, mode: Literal["min", "max"]) -> int:
        """The committed step whose record has the best value of a metric. If two are equal, the newer one.

            ckpt.save(state, step=100, record={"loss": 0.5})
            state = ckpt.load(ckpt.best("loss", mode="min"))

        A value that is not a finite number is ignored. Raises NotCommittedError if no record has the metric.
        """
        if mode not in ("min", "max"):
            raise ValueError(f'mode must be "min" or "max", got {mode!r}')
        self._see_own_saves("best()")
        commits = self._roots.view()
        found = best_of(list(commits), commits, (metric, mode, 1))
        if not found:
            why = f"no record of a committed step has the metric {describe_missing_metric(metric, commits)}"
            raise NotCommittedError(f"{self.root}: {why}", path=self.root, step=None)
        return found[0]

    def load(
        self,
        step: int | None = None,
        *,
        map_location: str | torch.device | None = None,
        select: Select = None,
        trust: bool = False,
        verify: bool = True,
        mmap: bool = False,
        types: Iterable[type] = (),
        from_ranks: Mapping[str, int] | None = None,
    ) -> Any:
        """Read the state of a step, by default the newest. Waits for saves that are under way, as `restore` does; everything else is
        as for `async_ckpt.load`.

            weights = ckpt.load(100, select="model")["model"]

        Raises NotCommittedError if there is no such step, or if the newest one was saved under another `naming`.
        """

        def build(parts: Sequence[Part]) -> Any:
            return state_of(
                parts, map_location=map_location, select=select, trust=trust, mmap=mmap, types=types
            )

        check_verify(verify)
        readers = Readers(None, from_ranks)
        self._see_own_saves("load()")
        if step is not None:
            return from_step(self._roots, step, build, verify=verify, readers=readers)
        found = from_newest(self._roots, build, verify=verify, readers=readers)
        if found is None:
            told = "; ".join(self._roots.foreign_notes()) or f"{self.root}: nothing is committed yet"
            raise NotCommittedError(told, path=self.root, step=None)
        return found[1]
