"""Reading a run and its steps without live objects.

In: the roots of a run. Out: steps, records, states. Knows nothing of: how saves are made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch

from ..core.runs.retention import best_of, describe_missing_metric
from ..core.runs.roots import Roots
from ..core.spec import flag, whole_step
from ..core.state.names import Select
from ..errors import NotCommittedError

if TYPE_CHECKING:
    from ..core.saving.saver import Saver
    from .run_history import History


class RunReader:
    """The reading side of a checkpointer. It does not change the storage.

    Every method except `steps` first waits for the saves that this checkpointer has under way, so that it sees their
    commits. A save that fails is ignored, with a warning. On a thread of the library, where waiting would be a
    deadlock, these methods raise RuntimeError.
    """

    root: str
    _roots: Roots
    _saver: Saver

    def _see_own_saves(
        self, reader: str, *, overwrites: bool = False, meanwhile: Callable[[], None] = lambda: None
    ) -> None:
        """Wait until each save of this object is committed or has failed, so that `reader` sees it."""
        if self._saver.belongs_here:  # in a forked child, the saves belong to the parent
            self._saver.ledger.see_decided(reader, meanwhile, overwrites=overwrites)

    def steps(self) -> list[int]:
        """The steps committed so far, ascending. Unlike the other methods, it never waits for a save.

        ckpt.steps()  # [100, 200, 300]
        """
        return self._roots.steps()

    def latest(self) -> int | None:
        """The newest committed step, regardless of its mark, or None if all roots answer and have no step. Waits for
        saves, as `restore` does.

        ckpt.latest()  # 300
        """
        self._see_own_saves("latest()")
        return self._roots.latest()

    def records(self) -> dict[int, dict[str, Any]]:
        """The record of every committed step, ascending by step; empty if `save` was called without a record.

        ckpt.records()  # {100: {"loss": 0.7}, 200: {"loss": 0.5}, 300: {}}
        """
        self._see_own_saves("records()")
        return {step: dict(manifest.record) if manifest else {} for step, manifest in self._roots.view().items()}

    def marks(self) -> dict[int, tuple[str, str]]:
        """The mark of every committed step that has one, "good" or "bad", with its note, ascending by step.

        ckpt.marks()  # {200: ("good", ""), 300: ("bad", "loss is nan")}
        """
        self._see_own_saves("marks()")
        return self._roots.marks()

    def history(self) -> History:
        """The history of this run, as `async_ckpt.history` returns it; empty for a new run.

        pandas.DataFrame(ckpt.history())
        """
        from .run_history import history_of

        self._see_own_saves("history()")
        return history_of(self._roots)

    def best(self, metric: str, *, mode: Literal["min", "max"]) -> int:
        """The committed step whose record has the best value of a metric. Of equal values, the newest counts.

            ckpt.save(state, step=100, record={"loss": 0.5})
            state = ckpt.load(ckpt.best("loss", mode="min"))

        Values that are not finite numbers are ignored, and so are steps that are marked bad. Raises NotCommittedError
        if no other record has the metric.
        """
        if mode not in ("min", "max"):
            raise ValueError(f'mode must be "min" or "max", got {mode!r}')
        self._see_own_saves("best()")
        commits = self._roots.view()
        best_steps = best_of(list(commits), commits, (metric, mode, 1))
        if not best_steps:
            which = "committed step" if commits.sound(commits) == [*commits] else "step that is not marked bad"
            why = f"no record of a {which} has the metric {describe_missing_metric(metric, commits)}"
            raise NotCommittedError(f"{self.root}: {why}", path=self.root, step=None)
        return best_steps[0]

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
        """Read the state of a step, by default the newest step that is not marked bad. Waits for saves that are under
        way, as `restore` does.

        The other arguments are those of `async_ckpt.load`.

            weights = ckpt.load(100, select="model")["model"]

        Raises NotCommittedError if there is no such step, or if the newest one was saved under another `naming`,
        NoGoodStepError if all are marked bad, and ValueError for an invalid `step`.
        """
        from ..core.loading.archives.find import from_newest, from_step
        from ..core.loading.archives.step_archives import Readers, selected_by
        from ..core.loading.load import LoadOptions, check_verify, state_of

        check_verify(verify)
        step = None if step is None else whole_step(step)
        options = LoadOptions(
            map_location, select, flag("trust", trust), flag("mmap", mmap), () if types is None else types
        )
        # The saver's buffers are already page-locked, which makes the copy to a device faster.
        build = partial(state_of, options=options, pool=self._saver.pool)
        readers = Readers(None, from_ranks, wants=selected_by(select))
        self._see_own_saves("load()")
        if step is not None:
            return from_step(self._roots, step, build, verify=verify, readers=readers)
        self._roots.check_naming()
        loaded = from_newest(self._roots, build, verify=verify, readers=readers)
        if loaded is None:
            reason = "; ".join(self._roots.foreign_notes()) or f"{self.root}: nothing is committed yet"
            raise NotCommittedError(reason, path=self.root, step=None)
        return loaded[1]
