"""One call of `AsyncCheckpointer.restore`: chooses the step, and reads it into live objects.

In: the roots of a run, live objects, options. Out: the step that was restored. Knows nothing of: saves, bytes.

Ranks must not start from different steps, even if they see or can read different steps. So if the user gives no step,
rank 0 names one, and no rank falls back to an older step on its own.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final, Protocol

from ...errors import CorruptCheckpointError, NotCommittedError, PeerFailedError
from ..host.pool import SegmentPool
from ..ranks.meeting import Talk, in_words
from ..ranks.peers import Ranks
from ..runs.roots import NOT_GOOD, Roots
from ..spec import flag
from ..state.rng import RngState
from ..state.wrappers import StateDictCache
from ..timing import TIMEKEEPER, Spans, monotonic
from .archives.contents import Part
from .archives.find import PassedOver, from_newest, from_step
from .archives.step_archives import Readers
from .broadcast import Share, Sharing
from .live.match import is_looked_into
from .load import check_verify
from .restore import RestoreOptions, restore_state

# The time after which a rank must see a step that rank 0 sees: NFS hides a new step for up to a minute.
SEEN_SECONDS: Final = 120.0
_LOOK_SECONDS: Final = 0.2
_FINE: Final = "fine"
_CORRUPT: Final = "corrupt"


class SeeOwnSaves(Protocol):
    """A function that waits until the saves of this rank are decided, and calls `meanwhile` repeatedly."""

    def __call__(self, *, meanwhile: Callable[[], None] = ...) -> None: ...


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
        use = partial(self._fill, sharing)
        if step is not None:
            self._see_own_saves()
            share = from_step(self._roots, step, use, verify=bool(self._options.verify), readers=self._readers)
            if self._ranks.world.rank == 0 and (reason := self._roots.bad_mark(step)):
                warnings.warn(f"step {step} is restored, and {reason}", RuntimeWarning, stacklevel=4)
            return step, share
        self._ranks.meet_nodes()
        talk = self._ranks.meeting.talk()
        if talk is not None:
            return self._read_agreed(talk, use)
        self._see_own_saves()
        self._roots.check_naming()
        return from_newest(
            self._roots,
            use,
            verify=bool(self._options.verify),
            readers=self._readers,
            only_good=self._only_good,
            falls_back=True,
            on_skip=self._skip,
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

    # --- several ranks ------------------------------------------------------------------------------------------

    def _read_agreed(
        self, talk: Talk, use: Callable[[Sequence[Part]], Share | None]
    ) -> tuple[int | None, Share | None]:
        """The step that rank 0 names and all ranks read, and the result of `use`; (None, None) if none is committed.

        A rank that finds the step corrupt raises. With `fallback`, rank 0 names an older step instead, and any other
        error of a rank is a PeerFailedError on the other ranks.
        """
        if talk.rank:
            self._see_own_saves()
        passed = PassedOver(self._skip)
        while (step := passed.next(partial(self._agreed_step, talk, len(passed.corrupt)))) is not None:
            try:
                share = from_step(self._roots, step, use, verify=bool(self._options.verify), readers=self._readers)
            except CorruptCheckpointError as error:
                if not self._fallback:
                    raise
                _is_fine_everywhere(talk, step, is_fine=False)
                passed.note(step, error)
                continue
            except BaseException as error:
                if self._fallback:  # the other ranks wait for this rank's answer
                    _send_failure(talk, step, error)
                raise
            if not self._fallback or _is_fine_everywhere(talk, step, is_fine=True):
                return step, share
            why = f"step {step} is corrupt as another rank reads it"
            passed.note(step, CorruptCheckpointError(why, path=repr(self._roots)))
        passed.raise_any(self._roots)
        return None, None

    def _agreed_step(self, talk: Talk, number: int, skipped: dict[int, str]) -> int | None:
        """The step, not in `skipped`, that rank 0 names, once this rank sees it.

        Rank 0 first waits for its own unfinished saves. `skipped` gets steps excluded by marks.
        """
        key = f"{number}/step"  # after so many corrupt ones
        if talk.rank == 0:
            try:
                self._see_own_saves(meanwhile=talk.take_time)
                newest = self._newest_but(skipped)
            except BaseException as error:
                talk.send(key, json.dumps({"error": in_words(error)}))
                raise
            talk.send(key, json.dumps({"found": newest, "skipped": [*skipped.items()]}))
            return newest[0] if newest else None
        text = talk.receive(key, "the step that rank 0 restores")
        answer: dict[str, Any] = json.loads(text)
        if "error" in answer:
            raise PeerFailedError(f"rank 0 could not say which step to restore: {answer['error']}", rank=0)
        skipped.update(answer["skipped"])
        if answer["found"] is None:
            return None
        step, attempt = answer["found"]
        self._wait_until_seen(int(step), str(attempt), talk.rank)
        return int(step)

    def _newest_but(self, skipped: dict[int, str]) -> tuple[int, str] | None:
        self._roots.check_naming()
        step = self._roots.newest_sound(skipped, only_good=self._only_good)
        if step is None:
            self._roots.refuse_if_left_out()
            return None
        manifest = next((manifest for run in self._roots.holding(step) if (manifest := run.committed(step))), None)
        return step, "" if manifest is None else manifest.attempt

    def _wait_until_seen(self, step: int, attempt: str, rank: int) -> None:
        deadline = monotonic() + SEEN_SECONDS
        while True:
            with suppress(NotCommittedError):
                if any(
                    not attempt or (manifest is not None and attempt in (manifest.attempt, *manifest.replaces))
                    for manifest in (run.committed(step) for run in self._roots.holding(step))
                ):
                    return
            if monotonic() > deadline:
                raise PeerFailedError(
                    f"{self._roots!r}: rank 0 restores step {step}, which rank {rank} does not see there; give a root "
                    "that all ranks share",
                    rank=0,
                )
            TIMEKEEPER.sleep(_LOOK_SECONDS)


def _is_fine_everywhere(talk: Talk, step: int, *, is_fine: bool) -> bool:
    """True if all ranks could read a step. Waits for all answers. Raises PeerFailedError if a rank has failed."""
    word = _FINE if is_fine else _CORRUPT
    if talk.rank:
        talk.send(f"{step}/{talk.rank}", word)
    else:
        words = [word, *talk.receive_of_ranks(str(step), "what the other ranks read")]
        failed = next((word for word in words if word not in (_FINE, _CORRUPT)), None)
        talk.send(f"{step}/all", failed or (_FINE if {*words} == {_FINE} else _CORRUPT))
    word = talk.receive(f"{step}/all", "what the other ranks read")
    if word not in (_FINE, _CORRUPT):
        failure = json.loads(word)
        raise PeerFailedError(
            f"rank {failure['rank']} could not restore step {step}: {failure['error']}", rank=failure["rank"]
        )
    return word == _FINE


def _send_failure(talk: Talk, step: int, error: BaseException) -> None:
    """Make all ranks fail, without waiting for them: an older step would not help, since the error is not damage."""
    word = json.dumps({"rank": talk.rank, "error": in_words(error)})
    talk.send(f"{step}/{talk.rank or 'all'}", word)


def _names_of_generators(state: Any) -> Iterator[str]:
    """The dotted names of the random generators in a live state's dicts, which may contain each other."""
    todo, seen = [("", state)], set[int]()
    for prefix, part in todo:
        if isinstance(part, dict) and id(part) not in seen:
            seen.add(id(part))
            yield from (f"{prefix}{name}" for name, value in part.items() if isinstance(value, RngState))
            todo += [(f"{prefix}{name}.", value) for name, value in part.items()]
