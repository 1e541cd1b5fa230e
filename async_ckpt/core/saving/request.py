"""The requests of users: a state to a path, and a state as a step of a run.

In: arguments of `save`. Out: targets, and the state to write to them. Knows nothing of: threads, memory.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from ..ranks.attempts import JointSave
from ..ranks.one_off import OneOffFolder
from ..ranks.peers import Ranks
from ..spec import entry_names, flag
from ..staging.held_snapshot import refuse_guard
from ..state.captured import Capture, SnapshotView
from ..state.names import Select
from ..state.wrappers import StateDictOf, state_dict_of
from .delivery import Target
from .lineage import Lineage, StateOutline, StepContents
from .story import CommitRule, UnchangedIn
from .targets import folder_target, step_targets


class SaveRequest(ABC):
    """The state that a caller wants to save, and its targets. A saver calls it on the caller's thread, top down."""

    step: int | None = None
    guard: Any = None
    select: Select = None
    rule: CommitRule = "all"
    joint: JointSave | None = None  # the save as all ranks see it, where there are several
    state_dict_of: StateDictOf = staticmethod(state_dict_of)

    @property
    def skipped_path(self) -> str:
        """The path of the report, if the save is skipped."""
        return ""

    def skipped(self) -> None:  # noqa: B027 - only a step of a run has a history
        """Tell the history that the save was not begun, since others are under way."""

    @abstractmethod
    def targets(self) -> Sequence[Target]:
        """The places to write to, once it is this save's turn. Raises the refusal of the save."""

    @abstractmethod
    def state(self) -> Any:
        """The state to write, once it is this save's turn. Raises the refusal of the save."""

    @abstractmethod
    def captured(self, captured: Capture) -> None:
        """Take note of the captured state. Raises the refusal of the save."""

    @property
    def needs(self) -> Callable[[], Collection[int]]:
        """The steps that must stay on storage until the save is settled. For any thread; keeps no tensor alive."""
        return tuple

    @property
    def unchanged_in(self) -> UnchangedIn:
        """See `StateSave`. The function keeps neither the state nor its guard alive: a handle may live for long."""
        return lambda _: ()


def check_driver(driver: Mapping[str, Any], state: Any) -> None:
    """Raises TypeError unless it is a mapping, and ValueError for entries without a name, or with a name of the
    state.
    """
    if not isinstance(driver, Mapping):
        raise TypeError(f'driver must be a mapping such as {{"loader": state}}, got {driver!r:.100}')
    for name in driver:
        if not isinstance(name, str) or (isinstance(state, Mapping | SnapshotView) and name in state):
            raise ValueError(f"driver={name!r}: the state has entries of the same name; rename those of driver=")
    if not isinstance(state, Mapping | SnapshotView):
        raise ValueError("driver= adds entries to the state, so the state must be a dict")


def check_entries(state: Any, names: Collection[str], option: str) -> None:
    """Raises ValueError, naming the option, for a name that is not an entry at the top level of the state."""
    for name in names:
        if not isinstance(state, Mapping | SnapshotView) or name not in state:
            raise ValueError(f"{option}={name!r}: the state has no entry of that name at its top level")


class FileRequest(SaveRequest):
    """A state as one object at a path."""

    def __init__(
        self,
        state: Any,
        target: Target,
        *,
        guard: Any = None,
        select: Select = None,
        state_dict_of: StateDictOf = state_dict_of,
    ) -> None:
        self._state, self._target, self.guard, self.select = state, target, guard, select
        self.state_dict_of = state_dict_of

    def targets(self) -> Sequence[Target]:
        return [self._target]

    def state(self) -> Any:
        state, self._state = self._state, None  # so that the save does not keep it alive
        return state

    def captured(self, captured: Capture) -> None:
        refuse_guard(captured.completions, self.guard)


class FolderRequest(SaveRequest):
    """A state that is spread over ranks, as a folder at a path. All ranks make it alike."""

    def __init__(
        self,
        state: Any,
        folder: OneOffFolder,
        ranks: Ranks,
        *,
        guard: Any = None,
        select: Select = None,
        state_dict_of: StateDictOf = state_dict_of,
    ) -> None:
        self.joint: JointSave = ranks.called_once(folder)
        self._state, self._folder, self._ranks = state, folder, ranks
        self.guard, self.select, self.state_dict_of = guard, select, state_dict_of

    def targets(self) -> Sequence[Target]:
        return [folder_target(self._folder, self.joint, self._ranks)]

    def state(self) -> Any:
        state, self._state = self._state, None  # so that the save does not keep it alive
        return state

    def captured(self, captured: Capture) -> None:
        refuse_guard(captured.completions, self.guard)


class StepRequest(SaveRequest):
    """A state as one step of a run, at all of its roots."""

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
    ) -> None:
        """`is_own_guard`: the guard is of this call, and not the checkpointer's."""
        self.step = step
        self.guard, self.select, self.rule = guard, select, lineage.rule
        self.joint: JointSave | None = ranks.called(step)
        self.contents = StepContents(step, self.joint)
        self._state, self._is_own_guard = state, is_own_guard
        self._lineage, self._ranks = lineage, ranks
        self._unchanged: Collection[str] = ()

    def check(
        self,
        *,
        overwrite: bool,
        record: Mapping[str, Any],
        unchanged: Collection[str],
        per_rank: Collection[str],
        driver: Mapping[str, Any] | None,
    ) -> None:
        """Take the other arguments of `save`. Raises ValueError and TypeError for wrong ones."""
        state, contents = self._state, self.contents
        contents.overwrite, contents.record = flag("overwrite", overwrite), record
        self._unchanged = entry_names("unchanged", unchanged)
        if self.select is not None and self._unchanged:
            raise ValueError("select= and unchanged= exclude each other; leave the groups out of the state instead")
        own = entry_names("per_rank", per_rank)
        check_entries(state, own, "per_rank")
        if self.joint is not None:
            self.joint.part.per_rank = own
        if driver is not None:
            check_driver(driver, state)
            contents.take_driver(driver, rank=self._ranks.world.rank)

    @property
    def skipped_path(self) -> str:
        run = self._lineage.roots.runs[0]
        return run.storage.locate(run.folder(self.contents.step))

    def skipped(self) -> None:
        step = self.contents.step
        self._lineage.note("skipped", step, first_step=step, count=1)

    def targets(self) -> Sequence[Target]:
        return step_targets(self._lineage, self.contents, self._ranks)

    def state(self) -> Any:
        """The state without the groups that are borrowed from earlier steps."""
        runs = self._lineage.roots.runs
        state, self._state = self._state, None  # so that the save does not keep it alive
        self._lineage.groups.begin(self.contents)
        written, self.contents.borrowed = self._lineage.groups.without(state, self._unchanged, self.contents, runs=runs)
        return written

    def captured(self, captured: Capture) -> None:
        if self._is_own_guard:
            refuse_guard(captured.completions, self.guard)
        if self.joint is not None:
            self.joint.part.borrowed = {lent.group: lent.step for lent in self.contents.borrowed}
        if self.select is None:  # nothing can be borrowed from a step that was saved in part
            self.contents.outline = StateOutline(captured)

    @property
    def needs(self) -> Callable[[], Collection[int]]:
        return self.contents.lenders

    @property
    def unchanged_in(self) -> UnchangedIn:
        lineage, contents = self._lineage, self.contents
        return lambda digests: lineage.unchanged_in(digests, {lent.group for lent in contents.borrowed})
