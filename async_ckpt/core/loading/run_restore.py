"""One call of `AsyncCheckpointer.restore`: chooses the step, and reads it into live objects.

In: the roots of a run, live objects, options. Out: the step that was restored. Knows nothing of: saves, bytes.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from ..host.pool import SegmentPool
from ..ranks.peers import Ranks
from ..runs.roots import NOT_GOOD, Roots
from ..spec import flag
from ..state.rng import RngState
from ..state.wrappers import StateDictCache
from ..timing import Spans
from .archives.contents import Part
from .archives.find import from_step
from .archives.step_archives import Readers
from .broadcast import Share, Sharing
from .live.match import is_looked_into
from .load import check_verify
from .restore import RestoreOptions, restore_state
from .resume import SeeOwnSaves, resume


class RunRestore:
    """One call of `AsyncCheckpointer.restore`, which creates the object and uses it on the calling thread."""

    def __init__(
        self,
        roots: Roots,
        state: Any,
        options: RestoreOptions,
        *,
        ranks: Ranks,
        pool: SegmentPool,
        see_own_saves: SeeOwnSaves,
        from_ranks: Mapping[str, int] | None,
        fallback: bool,
        only_good: bool,
        before: Callable[[Sequence[Part], StateDictCache], None] = lambda *_: None,
    ) -> None:
        """`before` is called for each step that is tried, before the state is filled. It may read from the archives."""
        check_verify(options.verify)
        self._roots, self._state, self._options = roots, state, options
        self._ranks, self._pool, self._see_own_saves = ranks, pool, see_own_saves
        self._readers = Readers(ranks.reader(), from_ranks, wrapping=frozenset(_names_of_generators(state)))
        self._fallback, self._only_good, self._before = flag("fallback", fallback), only_good, before
        self.state_dicts = StateDictCache()
        self._skipped: dict[int, str] = {}  # steps, and why

    @property
    def damaged(self) -> list[int]:
        """The skipped steps; empty if some of them may be sound, since a save must not replace those."""
        return [] if NOT_GOOD in self._skipped.values() else [*self._skipped]

    def restore(self, step: int | None, broadcast: Any, spans: Spans) -> int | None:
        """Fill the state from `step`, or from the newest step. Returns the step, or None if nothing is committed.

        `spans` receives "find" (until the archives are open), "plan", "read" (tensors) and "fill" (other values).
        """
        self._spans, self._finds_since = spans, spans.clock()
        sharing = None if broadcast is None else Sharing(broadcast)
        if not self._ranks.world.is_one:
            self.state_dicts.take_all(self._state)
        try:
            if sharing is None:
                return self._read(step, None)[0]
            return sharing.restore(partial(self._read, step, sharing), lambda resumed: self._read(resumed, None))
        finally:
            self._ranks.hang_up()

    def restored_groups(self) -> list[str]:
        """The names of the groups whose memory now has the step's bytes, so that `unchanged=` may refer to them."""
        if not (self._options.compares_names and self._options.select is None and isinstance(self._state, Mapping)):
            return []
        groups = ((name, value) for name, value in self._state.items() if isinstance(name, str))
        return [name for name, value in groups if is_looked_into(value, self.state_dicts.of)]

    def _read(self, step: int | None, sharing: Sharing | None) -> tuple[int | None, Share | None]:
        """The step that was read, and with `sharing` the work that remains."""
        use, verify = partial(self._fill, sharing), bool(self._options.verify)
        if step is not None:
            self._see_own_saves()
            share = from_step(self._roots, step, use, verify=verify, readers=self._readers)
            if self._ranks.world.rank == 0 and (reason := self._roots.bad_mark(step)):
                warnings.warn(f"step {step} is restored, and {reason}", RuntimeWarning, stacklevel=4)
            return step, share
        self._ranks.meet_nodes()
        return resume(
            self._roots,
            use,
            verify=verify,
            readers=self._readers,
            talk=self._ranks.meeting.talk(),
            see_own_saves=self._see_own_saves,
            fallback=self._fallback,
            on_skip=self._skip,
            only_good=self._only_good,
        ) or (None, None)

    def _skip(self, step: int, reason: str) -> None:
        self._skipped[step] = reason
        if reason != NOT_GOOD:  # with only_good, the caller has asked to skip such steps
            warnings.warn(
                f"step {step} is skipped, and a save at or below it will take its place: {reason}",
                RuntimeWarning,
                stacklevel=7,
            )

    def _fill(self, sharing: Sharing | None, parts: Sequence[Part]) -> Share | None:
        self._spans.add("find", self._finds_since)
        try:
            self._before(parts, self.state_dicts)
            return restore_state(
                parts,
                self._state,
                self._options,
                pool=self._pool,
                sharing=sharing,
                state_dicts=self.state_dicts,
                spans=self._spans,
            )
        finally:
            self._finds_since = self._spans.clock()  # the next "find" is for an older step, if this step is damaged


def _names_of_generators(state: Any) -> Iterator[str]:
    """The dotted names of the random generators in a live state's dicts, which may contain each other."""
    todo, seen = [("", state)], set[int]()
    for prefix, part in todo:
        if isinstance(part, dict) and id(part) not in seen:
            seen.add(id(part))
            yield from (f"{prefix}{name}" for name, value in part.items() if isinstance(value, RngState))
            todo += [(f"{prefix}{name}.", value) for name, value in part.items()]
