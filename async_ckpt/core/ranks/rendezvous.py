"""One call that all ranks make together: rank 0 names it, each rank does its part, and rank 0 decides.

In: calls, on every rank. Out: on rank 0, the report of each rank on its part; on the others, rank 0's decision. Knows
nothing of: what the parts are.

A rank that has done its part writes a report to the store, and increments a counter. Rank 0 polls the counter, and
reads all reports once they are complete. A rank that cannot do its part refuses with the reason, and rank 0 fails the
call on all ranks. Saves, exports, publications and the folders of frameworks meet in this way.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import random
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final, NoReturn, TypeVar

from ...errors import PeerFailedError
from ..host.loop import ask_for_exception, awaitable, get_loop, off_loop
from ..host.process import in_forked_child
from ..host.waits import DECISION_SECONDS, PEER_SECONDS, SILENCE_SECONDS, growing_pauses, wait_for
from ..runs.receipts import Cause
from ..spec import some_of
from ..timing import TIMEKEEPER, monotonic
from .calls import Calls, Decision, JointSave, JointState, peers_failed
from .meeting import Meeting, in_words, wait_for_rank_0
from .store import count_of
from .world import World, world_of_group

T = TypeVar("T")
Check = Callable[[], None]

# The pause between looks at the store, or at a root, grows from the first value to the second, with jitter so that
# ranks do not look at the same time.
_FIRST_LOOK_SECONDS: Final = 0.01
LOOK_SECONDS: Final = {False: 0.5, True: 2.0}  # at a folder or the store of the ranks, and at an object store
# The limit for all ranks that wait for the same object: S3 answers about this many requests a second below one prefix.
_MAX_LOOKS_PER_SECOND: Final = 5500
# The pause between checks for missing and lost ranks.
_LOOK_AROUND_SECONDS: Final = 2.0
_LOGGED_SECONDS: Final = 30.0  # the log reports longer waits for rank 0's call
# Rank 0's last message has this long to be sent before its process may end.
LEAVE_SECONDS: Final = 5.0
# Not Python's own generator: a save must not take numbers that the training would draw.
_RANDOM: Final = random.SystemRandom()

_log = logging.getLogger("async_ckpt")


def _nothing_to_check() -> None:
    """Check nothing: the caller waits as long as it takes."""


class Rendezvous:
    """The rendezvous of all ranks in one call. `Channel.call` creates it; an `Agreement` is a rendezvous about
    archives.

    Coroutines run on the library's loop; the methods that block are called on other threads.
    """

    def __init__(self, meeting: Meeting, calls: Calls, joint: JointSave) -> None:
        self._meeting, self._calls, self._joint = meeting, calls, joint
        self._has_reported = self._is_refused = False
        self._check: Check = _nothing_to_check  # called in every wait, and may raise
        self._begun_at = monotonic()

    @property
    def rank(self) -> int:
        return self._meeting.world.rank

    @property
    def world_size(self) -> int:
        return self._meeting.world.size

    @property
    def decides(self) -> bool:
        """True on rank 0, which alone decides."""
        return self.rank == 0

    @property
    def attempt(self) -> str:
        """The name of the call, the same on all ranks; empty until rank 0 has named the call."""
        return self._joint.attempt

    @property
    def _key(self) -> str:
        return self._calls.key_of(self._joint.attempt)

    def wait_named(self, check: Check) -> str:
        """Wait for the name of the call, and return it. Blocks. Only this wait calls `check`. Raises as `named`."""
        _waited(self._until_named(check))
        return self.attempt

    async def named(self, check: Check) -> None:
        """Wait until the call has its name: until rank 0 has made it, too. `check` is called in this and all later
        waits for this call, and may raise.

        Raises PeerFailedError if the call fails before that, or rank 0 does not make it.
        """
        self._check = check
        await self._until_named(check)

    async def _until_named(self, check: Check) -> None:
        joint, is_logged, since = self._joint, False, monotonic()
        begun = awaitable(joint.begun)
        begun.add_done_callback(ask_for_exception)
        while not begun.done():
            await asyncio.wait([begun], timeout=LOOK_SECONDS[False])
            check()
            if begun.done():
                break
            waited = monotonic() - since
            if not is_logged and waited > _LOGGED_SECONDS:
                is_logged = True
                _log.warning("rank 0 has made no call for %s for %.0f s; still waiting for it", joint.what, waited)
            why = self._lost_rank_0()
            if not why and waited > PEER_SECONDS:
                why = f"after {waited:.0f} s rank 0 has made no call for it. {self._meeting.advised}"
            if why:
                raise PeerFailedError(f"{joint.what} is not committed: {why}", rank=0)
        begun.result()

    # --- a part that is done ----------------------------------------------------------------------------------

    def _put(self, part: Sequence[Any]) -> None:
        """Report to rank 0 that this rank has done its part. Raises if the call has failed by now. Blocks."""
        joint, key = self._joint, self._key
        if self.decides:
            return
        text = json.dumps([self._meeting.start.nonce, *part])
        if joint.is_decided and not joint.is_committed:
            raise peers_failed(joint, joint.causes)

        def put(store: Any) -> None:
            store.set(f"{key}/{self.rank}", text)
            store.add(f"{key}/count", 1)

        self._has_reported = True  # even if the put fails, since it may have arrived
        pauses = looks(is_remote=False)
        # If the store stays silent, the wait for the decision raises.
        while not self._silence_of_store():
            stored = self._meeting.start.connection.ask(put)
            if wait_for(stored, SILENCE_SECONDS) and not isinstance(stored.exception(), RuntimeError):
                stored.result()
                return
            TIMEKEEPER.sleep(next(pauses))

    async def _gathered(self) -> dict[int, list[Any]]:
        """On rank 0: the reports of all other ranks, by rank, once they are complete.

        Raises PeerFailedError for a rank that refuses, is lost, or does not report.
        """
        start, size, begun = self._meeting.start, self.world_size, monotonic()
        looked, deadline, logs_at = begun, begun + PEER_SECONDS, begun + _LOGGED_SECONDS
        for seconds in looks(is_remote=False):
            count, refusal = await self._ask(self._look) or (0, None)
            if refusal is not None:
                self._joint.causes.append(refusal)
                raise peers_failed(self._joint, [refusal])
            if count >= size - 1:
                parts = await self._ask(self._read) or {}
                if len(parts) == size - 1:
                    start.note_all_here()
                    return parts
            if monotonic() > min(looked + _LOOK_AROUND_SECONDS, deadline):
                looked = monotonic()
                there = await self._ask(self._there)
                missing = [rank for rank in range(1, size) if there is not None and rank not in there]
                closed = await self._ask(partial(self._calls.closed, missing)) or ()
                lost = start.heartbeats.lost(missing) or dict.fromkeys(closed, "it has closed its checkpointer")
                if lost:
                    self._raise_lost(lost, await self._ask(partial(self._last_words, [*lost])) or {})
                if looked > deadline:
                    self._raise_missing(missing)
                if looked > logs_at and (late := start.heartbeats.not_called(missing, self.attempt)):
                    logs_at = math.inf
                    _log.warning(
                        "%s: %s had made no call for it after %.0f s; still waiting",
                        self._joint.what,
                        _named(late),
                        looked - begun,
                    )
            await self._pause(seconds)
        raise AssertionError("looks never end")

    def _look(self, store: Any) -> tuple[int, Cause | None]:
        """The number of parts that are done, and the refusal of a rank, if there is one."""
        count = count_of(store, f"{self._key}/count")
        return count, self._calls.refusal(self._joint.attempt, store)

    def _there(self, store: Any) -> set[int]:
        """The ranks that have done their parts."""
        return {rank for rank in range(1, self.world_size) if store.check([f"{self._key}/{rank}"])}

    def _last_words(self, ranks: Sequence[int], store: Any) -> dict[int, Cause]:
        words = {rank: self._calls.last_word(rank, store) for rank in ranks}
        return {rank: word for rank, word in words.items() if word is not None}

    def _read(self, store: Any) -> dict[int, list[Any]]:
        """The reports of all other ranks; empty if one of them is not there yet."""
        keys = {rank: f"{self._key}/{rank}" for rank in range(1, self.world_size)}
        if not store.check([*keys.values()]):
            return {}
        parts = {}
        for rank, text in zip(keys, store.multi_get([*keys.values()]), strict=True):
            nonce, *part = json.loads(text)
            if nonce == self._meeting.start.nonces.get(rank):  # otherwise the report is another process's
                parts[rank] = part
        return parts

    async def _ask(self, call: Callable[[Any], T]) -> T | None:
        """The answer of the ranks' store; None if the store does not answer at this moment.

        Raises PeerFailedError if it has not answered for SILENCE_SECONDS.
        """
        answer = awaitable(self._meeting.start.connection.ask(call))
        answer.add_done_callback(ask_for_exception)
        while not answer.done():
            await asyncio.wait([answer], timeout=LOOK_SECONDS[False])
            self._check()
            self._raise_silent_store()
        if isinstance(answer.exception(), RuntimeError):
            self._raise_silent_store()
            return None
        return answer.result()

    async def _pause(self, seconds: float) -> None:
        self._check()
        await asyncio.sleep(seconds)

    # --- who is lost ------------------------------------------------------------------------------------------

    def _lost_rank_0(self) -> str:
        """Why rank 0, or the store, is lost for this rank; empty if it is not."""
        return self._meeting.start.lost_rank_0(self._begun_at)

    def _silence_of_store(self) -> str:
        return self._meeting.start.connection.silence_since(self._begun_at)

    def _raise_silent_store(self) -> None:
        if why := self._silence_of_store():
            raise PeerFailedError(f"{self._joint.what} is not committed: {why}", rank=0)

    def _raise_lost(self, lost: Mapping[int, str], words: Mapping[int, Cause]) -> NoReturn:
        causes = [
            Cause(rank, f"{why}; before that, {words[rank].error}" if rank in words else why)
            for rank, why in lost.items()
        ]
        self._joint.causes += causes
        raise peers_failed(self._joint, causes)

    def _raise_missing(self, missing: Sequence[int]) -> NoReturn:
        late = self._meeting.start.heartbeats.not_called(missing, self.attempt)
        others = [rank for rank in missing if rank not in late]
        absent = [f"{_named(late)} had made no call for it"] if late else []
        reasons = " and ".join(absent + ([f"nothing was heard of {_named(others)}"] if others else []))
        self._joint.causes += [Cause(rank, "it did not finish its part in time") for rank in missing[:20]]
        raise PeerFailedError(
            f"{self._joint.what} is not committed: after {PEER_SECONDS:.0f} s {reasons}. {self._meeting.advised}",
            rank=missing[0] if missing else 0,
        )

    # --- the decision -----------------------------------------------------------------------------------------

    async def _decision(self, seconds: float = DECISION_SECONDS) -> tuple[Decision | None, str]:
        """On another rank: the decision of rank 0. If rank 0 has said neither yes nor no, also the reason."""
        joint, deadline, looked = self._joint, monotonic() + seconds, monotonic()
        while True:
            if (decision := joint.decision) is not None:
                return decision, "rank 0 cannot say whether it is committed"
            await self._bell()
            if monotonic() < looked + _LOOK_AROUND_SECONDS:
                continue
            looked = monotonic()
            if lost := self._lost_rank_0():
                return None, f"{lost}, and has not said whether it is committed"
            if monotonic() > deadline:
                return None, f"rank 0 has not said in {seconds:.0f} s whether it is committed"

    async def _bell(self) -> None:
        """Wait until something is heard about the call, or for a short time."""
        self._joint.bell.clear()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._joint.bell.wait(), LOOK_SECONDS[False])
        self._check()

    def _raise_if_failed(self, decision: Decision | None) -> None:
        if decision is not None and decision.kind == "failed":
            self._is_refused = True
            raise peers_failed(self._joint, decision.causes)

    def _announce(self, decision: Decision) -> None:
        wait_for(self._calls.announce_decision(self._joint, decision), LEAVE_SECONDS)


class RankCall(Rendezvous):
    """One rank's part in a call that has no archives to agree on."""

    async def all_done(self, part: Sequence[Any], check: Check) -> list[Sequence[Any]] | None:
        """Report that this rank has done its part, with a few values. On rank 0: return the values of all ranks, once
        all have reported; then rank 0 calls `decide`. On the others: return None; they call `receive`.

        Raises PeerFailedError.
        """
        await self.named(check)
        if self.world_size == 1:
            return [part]
        await off_loop(partial(self._put, part))
        if not self.decides:
            return None
        parts = await self._gathered()
        return [part, *(parts[rank] for rank in range(1, self.world_size))]

    async def receive(self) -> None:
        """On another rank: wait until rank 0 has done what follows. With heartbeats, this wait has no limit.

        Raises PeerFailedError if rank 0 has failed, or, with `undecided`, if the outcome is not known.
        """
        has_heartbeats = self._meeting.start.connection.has_server
        decision, silence = await self._decision(math.inf if has_heartbeats else DECISION_SECONDS)
        self._raise_if_failed(decision)
        if decision is None or decision.kind != "committed":
            raise PeerFailedError(f"{self._joint.what}: {silence}. It may be complete", rank=0, undecided=True)
        self._calls.decide(self._joint, JointState.COMMITTED, None)

    def decide(self) -> None:
        """On rank 0: announce that what follows from all parts is done. Blocks for a moment."""
        if self.world_size > 1:
            self._calls.decide(self._joint, JointState.COMMITTED, None)
            self._announce(Decision("committed"))
            self._calls.forget(self._joint)

    def conclude(self, what_follows: Callable[[], None]) -> None:
        """Report that this rank has done its part, and wait for all ranks. Then rank 0 calls `what_follows`, and the
        others wait until it has returned. Blocks. Raises PeerFailedError, and on rank 0 the errors of `what_follows`.
        """

        async def met() -> bool:
            if await self.all_done([], _nothing_to_check) is not None:
                return True
            await self.receive()
            return False

        if _waited(met()):
            what_follows()
            self.decide()

    def fail(self, error: BaseException) -> None:
        """Report to the other ranks that this rank's part, or what follows on rank 0, has failed. Does not wait."""
        if self.world_size > 1 and not (self._joint.is_decided or self._is_refused):
            self._calls.fail(self._joint, Cause(self.rank, in_words(error)))


class Channel:
    """The calls about one topic, in one process. Any rank may make the first call."""

    def __init__(self, topic: str, advice: str, *, is_of_paths: bool = False) -> None:
        """`topic` and `is_of_paths` must be the same on all ranks; `advice` is what to do if a rank does not come."""
        self.meeting = Meeting(topic=topic, advice=advice, is_of_paths=is_of_paths)
        self._calls = Calls(self.meeting, 1, lambda _: None)
        self._own_token = os.urandom(8).hex()  # used by a process without other ranks

    @classmethod
    def of_group(cls, topic: str, advice: str, *, is_of_paths: bool = False) -> Channel:
        """The channel of a topic in the current process group. Each process has one for each topic."""
        found = _of_group.get(topic)
        if found is None or found.world != world_of_group():
            found = _of_group[topic] = cls(topic, advice, is_of_paths=is_of_paths)
        return found

    @property
    def world(self) -> World:
        return self.meeting.world

    def token(self, check: Check, awaited: str) -> str:
        """A name for this topic: the same on all ranks, and different for every start. A single process has a random
        name. Waits for the first message of rank 0, and calls `check` meanwhile. Raises PeerFailedError: "waited 600 s
        for" `awaited`.
        """
        if self.world.is_one:
            return self._own_token
        start = self.meeting.start
        wait_for_rank_0(start, start.token, awaited, check)
        return self.meeting.token()

    def call(self, step: int | None = None, path: str = "") -> RankCall:
        """Make a call, identified by its path or its step. Does not wait.

        Raises ValueError if the process group has changed.
        """
        made = self._entered(step, path)
        if not self.world.is_one:
            self._calls.plan(made._joint)
        return made

    def fail(self, error: BaseException, step: int | None = None, path: str = "") -> None:
        """Report that the call raised here before it could be made; without a step, the next call. Does not wait."""
        with suppress(ValueError):  # the process group has changed, which the caller reports
            self._entered(step, path).fail(error)

    def _entered(self, step: int | None, path: str) -> RankCall:
        self.meeting.refuse_if_changed()
        joint = JointSave(step, path)
        if self.world.is_one:
            joint.attempt = os.urandom(4).hex()
            joint.begun.set_result(None)
        else:
            self._calls.enter(joint)
        return RankCall(self.meeting, self._calls, joint)


_of_group: dict[str, Channel] = {}  # keyed by topic


@in_forked_child
def _forget_channels() -> None:
    _of_group.clear()


def _named(ranks: Sequence[int]) -> str:
    """The ranks, for messages."""
    return f"rank{'s' if len(ranks) > 1 else ''} {some_of(ranks, 20)}"


def _waited(coroutine: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine on the library's loop. Blocks."""
    outcome = get_loop().begin(coroutine)
    wait_for(outcome)
    return outcome.result()


def looks(is_remote: bool, num_ranks: int = 1) -> Iterator[float]:
    """Seconds to pause between looks at an object that `num_ranks` ranks look at."""
    least = num_ranks / _MAX_LOOKS_PER_SECOND if is_remote else 0.0
    for seconds in growing_pauses(max(_FIRST_LOOK_SECONDS, least), max(LOOK_SECONDS[is_remote], least)):
        yield seconds * _RANDOM.uniform(0.75, 1.25)
