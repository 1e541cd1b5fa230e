"""The agreement of all ranks that one save is committed at one root.

In: an archive of this rank that is durable, and receipts of the others. Out: what the manifest is to name; or the
decision of rank 0, which alone makes one. Knows nothing of: what is in the archives.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from types import MappingProxyType
from typing import Any, Final, NoReturn

from ...errors import (
    CheckpointError,
    PeerFailedError,
    RunTakenError,
    StepExistsError,
    StorageFullError,
    StorageUnavailableError,
)
from ..format.digests import block_digest
from ..host.loop import Loop, OffLoop
from ..host.waits import DECISION_SECONDS, PEER_SECONDS, SHARED_SECONDS, growing_pauses
from ..runs.manifest import Archive, Manifest, RankFiles, SaveTimes
from ..runs.receipts import NO_TABLE, Cause, Exchange, Receipt, Table, Verdict, spread_of, table_of
from ..spans import monotonic
from .answers import in_words
from .attempts import AttemptPlace, JointSave, JointState, OwnPart, SavedInstead
from .comparison import Comparison
from .peers import Ranks

# Between looks at a root: it grows from the one to the other, and no two ranks look at the same time.
_FIRST_LOOK_SECONDS: Final = 0.02
_LOOK_SECONDS: Final = {False: 0.5, True: 2.0}  # at a folder, and at a store
# Of all ranks that wait for the same: S3 answers so many requests a second below one prefix.
_MAX_LOOKS_PER_SECOND: Final = 5500
# A failure may be heard of later than a commit, so that most looks at a store are one request, and few ask the
# group's store.
_LOOKS_PER_VERDICT: Final = 4
_LOOKS_BEFORE_GROUP: Final = 12
# Not Python's own generator: its numbers are the training's, which a save must not take from it.
_RANDOM: Final = random.SystemRandom()


class Alone:
    """The agreement of a process that saves alone, with nothing to agree on."""

    rank, world_size, has_others, decides, is_apart = 0, 1, False, True, False
    spread: Final[Mapping[str, Any]] = MappingProxyType({})

    async def agree(self, archive: Archive, times: SaveTimes, off_loop: OffLoop, check: Callable[[], None]) -> None:
        """Do nothing: no other rank writes the step."""

    async def hear(self, off_loop: OffLoop, check: Callable[[], None]) -> None:
        """Do nothing: no other rank decides."""

    def claim(self) -> None:
        """The root is this process's."""

    def committing(self) -> AbstractContextManager[None]:
        return nullcontext()

    def committed(self) -> None:
        """Do nothing: no other rank waits for the commit."""

    def afterwards(self) -> None:
        """Do nothing: there are no receipts."""

    def refuse(self, error: BaseException) -> bool:  # noqa: ARG002
        return True

    async def follow(self, off_loop: OffLoop) -> None:
        """Do nothing: no other rank decides."""


class Agreement:
    """One rank's part in the agreement on one save at one root. `saving.targets` creates one for each root. On the
    loop, but for `refuse`.
    """

    has_others = True

    def __init__(self, ranks: Ranks, joint: JointSave, run: AttemptPlace, others: Sequence[AttemptPlace] = ()) -> None:
        """`others` are roots at which rank 0 may say no, too."""
        self._ranks, self._joint, self._run = ranks, joint, run
        self._root = ranks.root(run, joint)
        self._exchange = Exchange(run.storage, run.folder(joint.step), joint.attempt)
        self._others = [Exchange(other.storage, other.folder(joint.step), joint.attempt) for other in others]
        self._yes: Receipt | None = None  # that this rank has put
        self._may_have_said_yes = self._is_refused = False
        self._is_committed_here = False  # as rank 0 knows
        self._table: Table | None = None  # that follows from the commit
        self._refused: Sequence[str] = ()  # attempts that were decided before
        self.spread: Mapping[str, Any] = {}  # on rank 0, how much longer some ranks took than others

    @property
    def rank(self) -> int:
        return self._ranks.world.rank

    @property
    def world_size(self) -> int:
        return self._ranks.world.size

    @property
    def decides(self) -> bool:
        """True on rank 0, which alone decides."""
        return self.rank == 0

    @property
    def is_apart(self) -> bool:
        """True if it is known that ranks see different folders at this root."""
        return self._root.is_apart

    @property
    def _advice(self) -> str:
        advice = self._ranks.meeting.advice
        return f"{advice[0].upper()}{advice[1:]}"

    async def agree(
        self, archive: Archive, times: SaveTimes, off_loop: OffLoop, check: Callable[[], None]
    ) -> RankFiles | None:
        """This rank's archive is durable, after these `times`: say so. On rank 0, go on once all ranks have.

        `check` is called in between, and raises when nobody waits for it any more. Raises PeerFailedError; and where
        one of several roots is enough, StorageUnavailableError for one at which not all ranks can be.
        """
        joint = self._joint
        if self._root.is_apart:
            self._raise_apart()
        part = joint.part
        assert part is not None
        if not self.decides:
            await self._see_that_it_is_shared(off_loop, check)
        receipt = Receipt(
            self.rank,
            joint.shares_by,
            part.structure.digest,
            await off_loop(part.shared.digest),
            NO_TABLE if part.copies is None else _digest(part.copies),
            archive.digest,
            archive.num_bytes,
            balance=part.balance,
            seconds=times.seconds,
            stall_seconds=times.stall_seconds,
        )
        self._may_have_said_yes = True  # a put may arrive though it fails
        await off_loop(partial(self._put_receipt, receipt, self._more(part)))
        if joint.instead is not None:
            self._raise_mistaken(joint.instead)
        self._yes = receipt
        return await self._all_receipts(off_loop, check) if self.decides else None

    def claim(self) -> None:
        """Before anything is written: see that nothing of this attempt was written by an earlier start of this rank,
        which may be committed. Raises CheckpointError.
        """
        if self.decides and self._joint.path:  # which other ranks compare with theirs before they look for the claim
            self._ranks.attempts.say(self._joint)
        self._root.claim()
        path = self._run.attempt_path(self._joint.step, self._joint.attempt, self.rank)
        if self._run.storage.exists(path):
            raise CheckpointError(
                f"{self._run.storage.locate(path)} is there already: an earlier start of rank {self.rank} has written "
                "it; it is kept. Start all ranks together, without a process group with a new run_id="
            )

    async def _see_that_it_is_shared(self, off_loop: OffLoop, check: Callable[[], None]) -> None:
        begun = monotonic()
        named_at: float | None = None
        for number, seconds in enumerate(_looks(self._run.storage.remote, self.world_size)):
            if self._joint.path or _asks_group(number):
                await self._refuse_other(off_loop)
            sees = await off_loop(self._root.sees)
            if sees:
                return
            if sees is None and await off_loop(self._exchange.verdict) is not None:
                return  # it is shared, and rank 0 has failed before it could say so
            if self._root.is_named and named_at is None:
                named_at = monotonic()
            if sees is False or (named_at is not None and monotonic() > named_at + SHARED_SECONDS):
                if self._joint.path:
                    await self._refuse_other(off_loop)  # ahead of `say_apart`, which explains less
                await off_loop(self._root.say_apart)
                self._raise_apart()
            if named_at is None and monotonic() > begun + PEER_SECONDS:
                self._raise_not_begun()
            await _pause(seconds, check)

    async def _refuse_other(self, off_loop: OffLoop) -> None:
        """Raise PeerFailedError, and tell rank 0, if rank 0 saves something else by this call."""
        joint = self._joint
        if joint.instead is None:
            instead = await off_loop(partial(self._ranks.attempts.said_instead, joint))
            if instead is None or joint.is_decided:
                return
            joint.instead = instead  # from now on, no root gets a receipt
            deadline = monotonic() + SHARED_SECONDS
            while any(joint.receipts.values()) and monotonic() < deadline:
                await asyncio.sleep(_FIRST_LOOK_SECONDS)
            await off_loop(partial(self._tell_of_mistake, instead))
            self._ranks.attempts.is_mistaken(joint, instead)
        self._raise_mistaken(joint.instead)

    def _tell_of_mistake(self, instead: SavedInstead) -> None:
        """Take this rank's receipts back, and then tell rank 0, whose next attempt may have the name of this one."""
        joint, rank = self._joint, self.rank
        cause = Cause(rank, f"it saves {joint.what} by the same call; give all ranks the same arguments")
        # Rank 0 is not told as long as a receipt is left that it could take for this rank's yes.
        with suppress(CheckpointError, OSError):
            for exchange in [*joint.receipts]:
                try:
                    exchange.withdraw(rank)
                except (CheckpointError, OSError):
                    exchange.put_receipt(Receipt(rank, is_ok=False), {"error": cause.error})
            if instead.attempt:
                self._root.say_refusal(instead.attempt, cause)
            else:
                self._ranks.attempts.say_dropped(joint.number, joint.step)

    def _put_receipt(self, receipt: Receipt, details: dict[str, Any]) -> None:
        """Put a receipt of this rank, unless it is known that rank 0 saves something else by this call."""
        receipts = self._joint.receipts
        receipts[self._exchange] = True
        try:
            if self._joint.instead is None:
                self._exchange.put_receipt(receipt, details)
        finally:
            receipts[self._exchange] = False

    def _raise_mistaken(self, instead: SavedInstead) -> NoReturn:
        what = self._joint.what
        raise PeerFailedError(
            f"{what} is not committed: rank 0 saves {instead.what} by the same call, and rank {self.rank} {what}; "
            "give all ranks the same arguments",
            rank=0,
        )

    def _raise_not_begun(self) -> NoReturn:
        where = self._root.where
        reason = f"after {PEER_SECONDS:.0f} s rank 0 has not begun to write to {where}"
        if self._joint.is_any:
            raise StorageUnavailableError(reason, path=where)
        raise PeerFailedError(
            f"{self._joint.what} is not committed: {reason}, as far as this rank sees. "
            f"{self._advice}; and give a root that all ranks share",
            rank=0,
        )

    def _more(self, part: OwnPart) -> dict[str, Any]:
        """The rest of a receipt, which rank 0 reads if it needs to: the structure, from its first rank, and the
        digests of copies.
        """
        structure, copies = part.structure, part.copies
        mates = self._joint.table.classes.get(structure.digest, ())
        is_first = not mates or mates[0] == self.rank
        more: dict[str, Any] = {"rank": self.rank, **({"structure": structure.text} if is_first else {})}
        return more if copies is None else {**more, "copies": copies}

    async def _all_receipts(self, off_loop: OffLoop, check: Callable[[], None]) -> RankFiles:
        size, deadline, was_lost = self._ranks.world.size, monotonic() + PEER_SECONDS, False
        for number, seconds in enumerate(_looks(self._run.storage.remote)):
            receipts = await off_loop(self._exchange.receipts)
            refused = [receipt for receipt in receipts.values() if not receipt.is_ok]
            if refused:
                await off_loop(partial(self._raise_refusals, refused))
            asks = was_lost or _asks_group(number)  # a rank may have said why, and ended
            if number == _LOOKS_BEFORE_GROUP:  # a rank that is so late may be saving something else
                await off_loop(partial(self._ranks.attempts.say, self._joint))
            said = await off_loop(self._said_by_group) if asks else None
            if said is not None:
                self._joint.causes.append(said)
                raise _peers_failed(self._joint, [said])
            if any(rank >= size for rank in receipts):
                self._raise_too_many(max(receipts))
            if len(receipts) == size:
                break
            if not self._root.is_shared and await off_loop(self._root.found_apart):
                self._raise_apart()
            lost = self._ranks.meeting.heartbeats.lost(rank for rank in range(size) if rank not in receipts)
            if lost and was_lost:  # and it has left no receipt
                self._raise_lost(lost)
            was_lost = bool(lost)
            if monotonic() > deadline:
                self._raise_missing(receipts)
            await _pause(seconds, check)
        self._root.is_shared = True
        ordered = [receipts[rank] for rank in range(size)]
        self.spread = spread_of(ordered)
        comparison = Comparison(self._ranks, self._joint, self._run, self._exchange)
        self._table, of_ranks = await off_loop(partial(comparison.compare, ordered))
        return of_ranks

    def _said_by_group(self) -> Cause | None:
        """On rank 0: the cause of a rank that can write nothing here, or saves nothing by this call."""
        return self._root.refusal(self._joint.attempt) or self._ranks.attempts.saves_nothing(self._joint)

    def _raise_refusals(self, refused: Sequence[Receipt]) -> None:
        causes = [
            Cause(one.rank, str(self._exchange.details_of(one).get("error", "it gave no reason"))) for one in refused
        ]
        self._joint.causes += causes
        raise _peers_failed(self._joint, causes)

    def _raise_apart(self) -> NoReturn:
        where, who = self._root.where, self._root.apart_rank or 0
        reason = f"rank {who} does not see there what rank 0 has written"
        if self._joint.is_any:
            raise StorageUnavailableError(f"{where} is not shared by all ranks: {reason}", path=where)
        self._joint.causes.append(Cause(who, f"{where} is another folder there"))
        raise PeerFailedError(
            f"{self._joint.what} is not committed: {where} must be shared by all ranks, but {reason}. Give a root that "
            "all ranks share: a folder on a shared file system, or an object store",
            rank=who if self.decides else 0,
        )

    def _raise_too_many(self, rank: int) -> NoReturn:
        size = self._ranks.world.size
        reason = f"rank {rank} has saved it, but rank 0 counts {size} ranks, 0 to {size - 1}"
        self._joint.causes.append(Cause(0, reason))
        raise PeerFailedError(
            f"{self._joint.what} is not committed: {reason}; give ranks= the same number on every rank",
            rank=rank,
        )

    def _raise_lost(self, lost: Mapping[int, str]) -> NoReturn:
        causes = [Cause(rank, why) for rank, why in lost.items()]
        self._joint.causes += causes
        error = _peers_failed(self._joint, causes)
        if self._joint.is_any:
            raise StorageUnavailableError(str(error), path=self._root.where)
        raise error

    def _raise_missing(self, receipts: dict[int, Receipt]) -> None:
        missing = [rank for rank in range(self._ranks.world.size) if rank not in receipts]
        who = ", ".join(map(str, missing[:20])) + (f" and {len(missing) - 20} more" if len(missing) > 20 else "")
        self._joint.causes += [Cause(rank, "it did not finish its part in time") for rank in missing[:20]]
        where = self._root.where
        if self._joint.is_any:
            raise StorageUnavailableError(
                f"{where}: after {PEER_SECONDS:.0f} s nothing was heard there of "
                f"rank{'s' if len(missing) > 1 else ''} {who}",
                path=where,
            )
        shared = "" if self._root.is_shared else f"; {where} must be shared by all ranks"
        raise PeerFailedError(
            f"{self._joint.what} is not committed: after {PEER_SECONDS:.0f} s nothing was heard of rank"
            f"{'s' if len(missing) > 1 else ''} {who}. {self._advice}{shared}",
            rank=missing[0],
        )

    async def hear(self, off_loop: OffLoop, check: Callable[[], None]) -> Manifest | None:
        """The manifest that rank 0 has committed, on the others. Raises PeerFailedError for its verdict, and where
        there is none in time.

        Where one of several roots is enough, StorageUnavailableError if it is committed at another one, and never here.
        """
        in_time = DECISION_SECONDS
        return None if self.decides else await self._heard(off_loop, check, in_time)

    async def _heard(self, off_loop: OffLoop, check: Callable[[], None], in_time: float) -> Manifest:
        deadline, is_unknown, lost = monotonic() + in_time, False, ""
        remote = self._run.storage.remote
        for number, pause in enumerate(_looks(remote, self.world_size)):
            # Rank 0 is not that quick; and many ranks that have said yes at one moment do not all look then.
            await _pause(pause if number else pause * _RANDOM.random(), check)
            decision: Manifest | Verdict | None = None
            asks_for_verdict = not remote or number % _LOOKS_PER_VERDICT == _LOOKS_PER_VERDICT - 1
            with suppress(StorageUnavailableError):  # rank 0 may commit all the same
                decision = await off_loop(partial(self._exchange.decision, asks_for_verdict=asks_for_verdict))
                if decision is None and asks_for_verdict and self._others:
                    decision = await off_loop(self._verdict_of_all)
            if decision is None and (lost or _asks_group(number)):
                await self._refuse_other(off_loop)
                decision = await off_loop(partial(self._root.verdict, self._joint.attempt))
                if decision is None:
                    await off_loop(self._refuse_if_deleted)
            if isinstance(decision, Manifest):
                try:
                    await off_loop(partial(self._run.look_again, decision))
                except RunTakenError as error:
                    self._joint.life.go(JointState.LEFT)
                    raise PeerFailedError(str(error), rank=0, undecided=True) from error
                table = await off_loop(partial(self._table_after, decision))
                self._root.is_shared = True
                self._is_committed(table)
                return decision
            if decision is not None:
                self._is_refused = True
                if not decision.causes:
                    raise self._elsewhere()
                self._ranks.attempts.decide(self._joint, JointState.REFUSED, decision.table)
                raise _peers_failed(self._joint, decision.causes)
            if self._joint.is_any and await off_loop(self._root.found_apart):
                self._raise_apart()
            if is_unknown or lost or monotonic() > deadline:
                break
            lost = self._ranks.meeting.heartbeats.lost([0]).get(0, "")  # look once more: it may have committed before
            # Rank 0 does not know itself: look once more.
            is_unknown = _asks_group(number) and await off_loop(partial(self._root.is_unknown, self._joint.attempt))
        self._joint.life.go(JointState.LEFT)
        silence = (
            "cannot say" if is_unknown else "is lost and has not said" if lost else f"has not said in {in_time:.0f} s"
        )
        why = f" ({lost})" if lost and not is_unknown else ""
        raise PeerFailedError(
            f"{self._joint.what}: rank 0 {silence} whether it is committed{why}. It may be: look at what is committed "
            f"when {self._root.where if is_unknown else 'rank 0'} is back",
            rank=0,
            undecided=True,
        )

    def _refuse_if_deleted(self) -> None:
        """Somebody may have deleted the folder, and with it the receipt for which rank 0 waits: tell it so."""
        with suppress(CheckpointError, OSError):
            # After the commit rank 0 deletes the receipts itself, and does not ask any more.
            if self._yes is not None and not self._exchange.has(self._yes):
                where = self._run.storage.locate(self._exchange.folder)
                cause = Cause(self.rank, f"what it has written to {where} was deleted")
                self._root.say_refusal(self._joint.attempt, cause)

    def _verdict_of_all(self) -> Verdict | None:
        """Rank 0's no to all roots, wherever it could say so."""
        for exchange in self._others:
            with suppress(StorageUnavailableError):
                verdict = exchange.verdict()
                if verdict is not None and verdict.causes:
                    return verdict
        return None

    def _elsewhere(self) -> StorageUnavailableError:
        where = self._run.storage.locate(self._exchange.folder)
        return StorageUnavailableError(
            f"{where}: it is committed at another root, and as far as rank 0 knows not here; it is caught up later",
            path=where,
        )

    def _table_after(self, manifest: Manifest) -> Table:
        if manifest.ranks is None or manifest.ranks.table == self._joint.table.digest:
            return self._joint.table
        return table_of(self._run.storage, self._run.folder(manifest.step), manifest)

    def _is_committed(self, table: Table) -> None:
        if self._joint.part is not None:
            self._ranks.known.compared.add(self._joint.part.structure.digest)
        self._ranks.attempts.decide(self._joint, JointState.COMMITTED, table)

    @contextmanager
    def committing(self) -> Iterator[None]:
        """On rank 0, around putting the manifest: if that fails, nobody knows whether it is there."""
        self._joint.maybe_at.add(self._run)
        try:
            yield
        except StepExistsError:
            self._joint.maybe_at.discard(self._run)  # it is another one's
            raise
        except StorageFullError:
            if not self._run.storage.remote and self._is_there() is False:
                self._joint.maybe_at.discard(self._run)
            raise

    def _is_there(self) -> bool | None:
        """Whether the manifest is there; None where the root does not answer."""
        try:
            return self._exchange.decision(asks_for_verdict=False) is not None
        except (CheckpointError, OSError):
            return None

    def committed(self) -> None:
        """On rank 0: the manifest is there."""
        assert self._table is not None
        self._is_committed_here = True
        self._ranks.known.compared.update(self._table.classes)
        self._refused = self._ranks.attempts.decided_at(self._joint.step)
        self._is_committed(self._table)

    def afterwards(self) -> None:
        """On rank 0, when nobody waits any more: delete what each rank has said, which takes time where they are
        many.
        """
        with suppress(CheckpointError, OSError):  # they go with the step
            self._exchange.forget(self._refused)
            if self._joint.path:
                self._root.withdraw(self._refused)

    def refuse(self, error: BaseException, *, is_followed: bool = False) -> bool:
        """Give the save up on this rank, at all roots; or only at this root, if it is committed at another one.

        Whether the archive here may be deleted: nobody can commit it any more. What is committed elsewhere is copied
        here under the same names, at any time, so then it may not.
        """
        joint = self._joint
        joint.life.go(JointState.BEGUN if is_followed else JointState.LEFT)  # until `follow`
        if self.decides:
            if self._run in joint.maybe_at or (joint.maybe_at and not joint.is_committed):
                self._learn_of_lost_answer(error)
                if joint.is_committed and not self._is_committed_here:
                    self._root.say_verdict(Verdict(joint.attempt, (), joint.table))  # the others need not wait
                elif not joint.is_committed:
                    self._root.say_unknown(joint.attempt)
                return False  # nobody knows whether it is committed here
            causes = tuple(joint.causes) or (Cause(0, in_words(error)),)
            self._ranks.attempts.say(joint)  # to ranks that save nothing by this call
            self._put_verdict(Verdict(joint.attempt, () if joint.is_committed else causes, joint.table))
            self._ranks.attempts.decide(joint, JointState.REFUSED, None)
        elif self._yes is not None:
            if not (joint.is_decided or self._root.is_apart):
                return False  # rank 0 may still commit it
        elif not (joint.instead or self._is_refused or self._root.is_apart):
            self._put_refusal(in_words(error))
            if self._may_have_said_yes:
                return False  # rank 0 may have seen the yes before that
        return not joint.is_committed

    def _learn_of_lost_answer(self, error: BaseException) -> None:
        """On rank 0: its put of the manifest has failed, but may have arrived. Then the other ranks know what follows
        from the commit, and so must this one.
        """
        joint, is_lost = self._joint, isinstance(error, StorageUnavailableError)
        if is_lost and self._run in joint.maybe_at and not joint.is_committed and self._is_there():
            error.add_note(f"{joint.what} is committed all the same: its manifest is at {self._root.where}")
            self.committed()
            self.afterwards()

    def discard(self) -> None:
        """Take away what this rank has put beside its archive where no other rank looks."""
        if not self.decides and self.is_apart:
            self._root.withdraw()

    def _put_verdict(self, verdict: Verdict) -> None:
        """Also by the store of the process group: rank 0 may be unable to write here, or the folder may be deleted."""
        is_said = self._root.say_verdict(verdict)
        try:
            self._exchange.put_verdict(verdict)
        except (CheckpointError, OSError):
            if not is_said:
                raise

    def _put_refusal(self, why: str) -> None:
        """The same for another rank."""
        rank = self._ranks.world.rank
        try:
            self._put_receipt(Receipt(rank, is_ok=False), {"error": why})
        except (CheckpointError, OSError):
            if not self._root.say_refusal(self._joint.attempt, Cause(rank, why)):
                raise

    async def follow(self, off_loop: OffLoop, seconds: float = DECISION_SECONDS) -> None:
        """This rank has no part in it any more: learn what is decided all the same."""
        if not self._joint.is_decided:
            self._joint.life.go(JointState.BEGUN)
            with suppress(CheckpointError, OSError):
                await self._heard(off_loop, lambda: None, seconds)


def _asks_group(number: int) -> bool:
    """True if a look is one of the few, after some seconds, that ask the group's store, too."""
    return number >= _LOOKS_BEFORE_GROUP and number % _LOOKS_PER_VERDICT == 0


def _looks(is_remote: bool, num_ranks: int = 1) -> Iterator[float]:
    """Seconds to pause between looks at what so many ranks look at."""
    least = num_ranks / _MAX_LOOKS_PER_SECOND if is_remote else 0.0
    for seconds in growing_pauses(max(_FIRST_LOOK_SECONDS, least), max(_LOOK_SECONDS[is_remote], least)):
        yield seconds * _RANDOM.uniform(0.75, 1.25)


async def _pause(seconds: float, check: Callable[[], None]) -> None:
    check()
    await asyncio.sleep(seconds)


def _digest(copies: dict[str, dict[str, str]]) -> str:
    return block_digest(json.dumps(copies, sort_keys=True).encode()).hex()[:16]


def _peers_failed(joint: JointSave, causes: Sequence[Cause]) -> PeerFailedError:
    reasons = "; ".join(f"rank {cause.rank}: {cause.error}" for cause in causes[:5])
    more = f"; and {len(causes) - 5} more" if len(causes) > 5 else ""
    return PeerFailedError(
        f"{joint.what} is not committed: {reasons}{more}",
        rank=causes[0].rank if causes else 0,
    )


def tell_of_failure(
    ranks: Ranks, joint: JointSave, runs: Sequence[AttemptPlace], error: BaseException, loop: Loop
) -> None:
    """The call of `save` has raised on this rank: tell the others, and learn what they decide. Does not wait for
    that.
    """
    ranks.failed(joint, error)
    if joint.is_decided:
        return  # it is none on the other ranks
    for run in runs:
        ranks.root(run, joint)  # in this order, as on all ranks

    async def tell_at(run: AttemptPlace) -> None:
        agreement = Agreement(ranks, joint, run)
        with suppress(CheckpointError, OSError):
            await loop.off_loop(lambda: agreement.refuse(error, is_followed=True))
            await agreement.follow(loop.off_loop)

    async def tell() -> None:
        if await _is_named(ranks, joint, loop.off_loop):
            await asyncio.gather(*map(tell_at, runs))

    loop.begin(tell())


async def _is_named(ranks: Ranks, joint: JointSave, off_loop: OffLoop) -> bool:
    """Wait until the attempt that has failed here has its name, and return True; False if it will have none."""
    deadline = monotonic() + PEER_SECONDS
    with suppress(RuntimeError):  # the store is gone, and the others with it
        for seconds in _looks(is_remote=False):
            if joint.attempt != "" or await off_loop(partial(ranks.attempts.is_named, joint)):
                return True
            before = joint.before
            is_in_vain = before is not None and before.is_left
            if is_in_vain or monotonic() > deadline:
                break
            await _pause(seconds, lambda: None)
    ranks.attempts.forget(joint)
    return False


def listen_again(loop: Loop, ranks: Ranks, runs: Sequence[AttemptPlace], joint: JointSave) -> None:
    """A save was given up undecided on this rank: rank 0 may have decided since. Does not wait for that."""
    joint.life.go(JointState.BEGUN)

    async def listen() -> None:
        for run in runs:
            await Agreement(ranks, joint, run).follow(loop.off_loop, SHARED_SECONDS)

    loop.begin(listen())
