"""The requests of users: a state to a path, and a state as a step of a run.

In: arguments of `save`. Out: targets, and what of the state is written to them. Knows nothing of: threads, memory.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from ..ranks.attempts import Joint, Ranks
from ..spec import flag
from ..staging.held_snapshot import refuse_guard
from ..state.captured import Capture
from ..state.names import Select
from .borrowed import Contents, Look, check_driver, check_entries
from .delivery import Target
from .line import Line
from .save import Request, UnchangedIn
from .targets import step_targets


class FileRequest(Request):
    """A state as one object at a path."""

    def __init__(self, state: Any, target: Target, *, guard: Any = None, select: Select = None) -> None:
        self._state, self._target, self.guard, self.select = state, target, guard, select

    def targets(self) -> Sequence[Target]:
        return [self._target]

    def state(self) -> Any:
        state, self._state = self._state, None  # the save may outlive the user's interest in it
        return state

    def captured(self, captured: Capture) -> None:
        refuse_guard(captured.completions, self.guard)


class StepRequest(Request):
    """A state as one step of a run, at all of its roots."""

    def __init__(
        self,
        state: Any,
        step: int,
        line: Line,
        ranks: Ranks,
        *,
        guard: Any,
        is_own_guard: bool,
        select: Select,
    ) -> None:
        """`is_own_guard`: the guard was given to this call, and not to the checkpointer."""
        self.step = self._step = step
        self.guard, self.select, self.rule = guard, select, line.rule
        self.joint: Joint | None = ranks.called(step)
        self.contents = Contents(self.joint)
        self._state, self._is_own_guard = state, is_own_guard
        self._line, self._ranks = line, ranks
        self._record: Mapping[str, Any] = {}
        self._overwrite = False
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
        """Take the other arguments of `save`. Raises ValueError and TypeError for those that are wrong."""
        state = self._state
        self._overwrite, self._record = flag("overwrite", overwrite), record
        self._unchanged = [unchanged] if isinstance(unchanged, str) else unchanged
        if self.select is not None and unchanged:
            raise ValueError(
                "select= and unchanged= exclude each other; leave the groups out of the state instead"
            )
        check_entries(state, per_rank, "per_rank")
        if self.joint is not None:
            self.joint.per_rank = (per_rank,) if isinstance(per_rank, str) else tuple(per_rank)
        if driver is not None:
            check_driver(driver, state)
            self.contents.take_driver(driver, step=self._step, rank=self._ranks.world.rank)

    @property
    def skipped_path(self) -> str:
        run = self._line.roots.runs[0]
        return run.storage.locate(run.folder(self._step))

    def targets(self) -> Sequence[Target]:
        return step_targets(
            self._line, self._step, self._overwrite, self._record, self.contents, self._ranks, self.joint
        )

    def state(self) -> Any:
        """The state without the groups that are borrowed from earlier steps."""
        runs = self._line.roots.runs
        state, self._state = self._state, None  # the save may outlive the user's interest in it
        own, self.contents.borrowed = self._line.groups.without(
            state, self._unchanged, step=self._step, runs=runs, joint=self.joint
        )
        return own

    def captured(self, captured: Capture) -> None:
        if self._is_own_guard:
            refuse_guard(captured.completions, self.guard)
        if self.joint is not None:
            self.joint.borrowed = {lent.group: lent.step for lent in self.contents.borrowed}
        if self.select is None:  # nothing can be borrowed from a step that was saved in part
            self.contents.look = Look(captured)

    @property
    def needs(self) -> Callable[[], Collection[int]]:
        return self.contents.lenders

    @property
    def unchanged_in(self) -> UnchangedIn:
        line, contents = self._line, self.contents
        return lambda digests: line.unchanged_in(digests, {lent.group for lent in contents.borrowed})
