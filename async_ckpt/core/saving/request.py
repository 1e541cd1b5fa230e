"""The requests of users: to save a state to a path, or as a step of a run.

In: arguments of `save`. Out: targets, and the state to write to them. Knows nothing of: threads, memory.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Literal

from ..ranks.calls import JointSave
from ..ranks.one_off import OneOffFolder
from ..ranks.peers import Ranks
from ..runs.run import Run
from ..spec import entry_names, flag
from ..staging.guard import Optimizers, refuse_guard, warn_if_foreign
from ..staging.snapshot import Snapshot
from ..state.captured import Capture, SnapshotView
from ..state.names import Select
from ..state.wrappers import StateDictOf, state_dict_of
from .attempt import Target
from .lineage import Driver, Lineage, StateOutline, StepCall, StepContents
from .taken_over import frozen_memory
from .targets import begin_step, folder_target

if TYPE_CHECKING:
    from .ema import WeightMean


class SaveRequest(ABC):
    """The state that a caller wants to save, and its target. A saver calls it on the caller's thread, top down."""

    contents = StepContents(StepCall(-1))  # `begin` sets the contents of a step of a run
    copy: Snapshot | None = None  # a copy that is made first, and fills this save; set by `written`

    def __init__(
        self,
        state: Any,
        step: int | None = None,
        *,
        guard: Any = None,
        select: Select = None,
        state_dict_of: StateDictOf = state_dict_of,
        joint: JointSave | None = None,
    ) -> None:
        """`joint` is the save as all ranks see it, if there are several."""
        self._state, self.step, self.joint = state, step, joint
        self.guard, self.select, self.state_dict_of = guard, select, state_dict_of

    def skipped(self) -> str:
        """Note in the history that the save was skipped: others are under way. Returns the path for the report."""
        return ""

    @abstractmethod
    def begin(self) -> Target:
        """Begin the save, whose turn it is, and return its target. Raises if the save is refused."""

    def written(self) -> Any:
        """The state to write, once it is this save's turn. Can be called only once. Raises if the save is refused."""
        state, self._state = self._state, None  # so that the save does not keep it alive
        return state

    def check_captured(self, whole: Capture, optimizers: Optimizers) -> None:  # noqa: ARG002
        """Raises if the captured state is refused. Also checks `guard`, which has these optimizers."""
        refuse_guard(whole.completions, self.guard)

    def taken_over(self, captured: Capture, whole: Capture) -> Capture:  # noqa: ARG002
        """The part of the state that this process writes, without the tensors that earlier steps have."""
        return captured


def check_driver(driver: Mapping[str, Any], state: Any) -> None:
    """Raises TypeError unless `driver` is a mapping, and ValueError for entries without a name or with a used one."""
    if not isinstance(driver, Mapping):
        raise TypeError(f'driver must be a mapping such as {{"loader": state}}, got {driver!r:.100}')
    for name in driver:
        if not isinstance(name, str):
            raise ValueError(f"driver={name!r:.100}: the names of entries must be text")
        if isinstance(state, Mapping | SnapshotView) and name in state:
            raise ValueError(f"driver={name!r}: the state has entries of the same name; rename those of driver=")
    if not isinstance(state, Mapping | SnapshotView):
        raise ValueError("driver= adds entries to the state, so the state must be a dict")


def check_entries(state: Any, names: Collection[str], option: str) -> None:
    """Raises ValueError, with the name of the option, for a name that is not a top-level entry of the state."""
    for name in names:
        if not isinstance(state, Mapping | SnapshotView) or name not in state:
            raise ValueError(f"{option}={name!r}: the state has no entry of that name at its top level")


class FileRequest(SaveRequest):
    """A state to be saved as one object at a path."""

    def __init__(self, state: Any, target: Target, **options: Any) -> None:
        """The options are those of `SaveRequest`."""
        super().__init__(state, **options)
        self._target = target

    def begin(self) -> Target:
        return self._target


class FolderRequest(SaveRequest):
    """A state that is sharded over ranks, to be saved as a folder at a path. All ranks create it in the same order."""

    joint: JointSave

    def __init__(self, state: Any, folder: OneOffFolder, ranks: Ranks, **options: Any) -> None:
        """The options are those of `SaveRequest`."""
        super().__init__(state, joint=ranks.called(None, folder.path), **options)
        assert self.joint is not None, "one rank saves no folder"
        self._folder, self._ranks = folder, ranks

    def begin(self) -> Target:
        return folder_target(self._folder, self.joint, self._ranks)


class StepRequest(SaveRequest):
    """A state to be saved as one step of a run."""

    _run: Run  # at the place where the step goes, as far as this rank knows

    def __init__(
        self,
        state: Any,
        step: int,
        lineage: Lineage,
        ranks: Ranks,
        *,
        guard: Any,
        is_own_guard: bool,
        select: Select,
        mean: WeightMean | None,
    ) -> None:
        """`is_own_guard`: the guard was passed to this call, not to the checkpointer. `select` excludes `mean`."""
        super().__init__(state, step, guard=guard, select=select, joint=ranks.called(step))
        self._call = StepCall(step, self.joint)
        self._lineage, self._ranks, self._is_own_guard = lineage, ranks, is_own_guard
        self.mean = mean if select is None else None
        self._of_mean: Collection[Future[None]] = ()  # resolve when the copy of the weights, and the mean, are complete
        self._looks_for_unchanged = False

    def check(
        self,
        *,
        overwrite: bool,
        record: Mapping[str, Any],
        unchanged: Collection[str] | Literal["auto"],
        per_rank: Collection[str],
        driver: Mapping[str, Any] | None,
    ) -> None:
        """Check and take the other arguments of `save`. Raises ValueError and TypeError for wrong ones."""
        call, state, is_rank_0 = self._call, self._state, not self._ranks.world.rank
        self._looks_for_unchanged = unchanged == "auto" and self.select is None
        overwrite = flag("overwrite", overwrite)
        unchanged = entry_names("unchanged", () if unchanged == "auto" else unchanged)
        if self.select is not None and unchanged:
            raise ValueError("select= and unchanged= exclude each other; leave the groups out of the state instead")
        own = entry_names("per_rank", per_rank)
        check_entries(state, own, "per_rank")
        if self.mean is not None:
            check_entries(state, self.mean.groups, "Ema(groups=…)")
            if self.mean.group in {*state, *(driver or ())}:
                raise ValueError(f"ema= adds the entry {self.mean.group!r} to the state, which has one; rename it")
            if not {*unchanged}.isdisjoint(self.mean.groups):
                raise ValueError(f"ema= averages {', '.join(self.mean.groups)}; leave that out of unchanged=")
            if not {*own}.isdisjoint(self.mean.groups):
                own = (*own, self.mean.group)
        if driver is not None:
            check_driver(driver, state)
        self._call = StepCall(
            call.step,
            call.joint,
            overwrite,
            record,
            unchanged,
            own,
            Driver.of(driver, call.step) if driver is not None and is_rank_0 else None,
            frozenset(driver if driver is not None and not is_rank_0 else ()),
        )

    def skipped(self) -> str:
        step, run = self._call.step, self._lineage.roots.runs[0]
        self._lineage.note("skipped", step, first_step=step, count=1)
        return run.storage.locate(run.folder(step))

    def begin(self) -> Target:
        target = begin_step(self._lineage, self._call, self._ranks)
        self.contents, self._run = target.contents, target.run
        return target

    def written(self) -> Any:
        """The state without the groups that are borrowed from earlier steps."""
        groups, call, contents = self._lineage.groups, self._call, self.contents
        contents.number = groups.begin(call.step)
        left, contents.borrowed = groups.without(super().written(), call, contents.number, run=self._run)
        if self.mean is not None:
            left, self._of_mean, self.copy = self.mean.joined(left, call.step, self.guard)
        return left

    def check_captured(self, whole: Capture, optimizers: Optimizers) -> None:
        if self._is_own_guard:
            refuse_guard([one for one in whole.completions if one not in self._of_mean], self.guard)
        if self.select is None:  # nothing can be borrowed from a step that was saved in part
            self.contents.outline = StateOutline(whole)
            # A trainer saves the parts of its state one by one, all with its guard; this is the whole state.
            if not (self.contents.lenders or whole.completions):
                warn_if_foreign(optimizers, whole.tensors, stacklevel=6)

    def begun(self, staged: Future[None]) -> None:
        """Note that the save has begun; its state is in host memory once `staged` is done."""
        if self.mean is not None and self._of_mean:
            self.mean.follow(staged)

    def taken_over(self, captured: Capture, whole: Capture) -> Capture:
        lineage, call = self._lineage, self._call
        if not self._looks_for_unchanged or whole.completions:
            lineage.tensors.forget()
            return captured
        # A step that replaces or retires others must not depend on them, so it is written whole.
        may_take = not (call.overwrite or lineage.rolled_back or call.step in lineage.damaged)
        frozen = frozen_memory(whole)
        captured, self.contents.over = lineage.tensors.begin(captured, frozen, self._run, call.step, may_take=may_take)
        return captured
