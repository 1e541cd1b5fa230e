"""The agreement of all ranks that one save is committed at one root.

In: an archive of this rank that is durable, and receipts of the others. Out: what the manifest is to name; or the
decision of rank 0, which alone makes one. Knows nothing of: what is in the archives.

A rank says by the store that its archive is durable: a receipt, and a count. Rank 0 looks at the count, and reads all
receipts once they are there. It says "committed" when the manifest is put and no later start was seen, and "failed"
only if the manifest will never be put. A rank that hears nothing any more, since rank 0 or the store is gone, goes by
the manifest, and without one does not know.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from types import MappingProxyType
from typing import Any, Final, NoReturn, TypeVar

from ...errors import (
    CheckpointError,
    PeerFailedError,
    RunTakenError,
    StepExistsError,
    StorageFullError,
    StorageUnavailableError,
)
from ..format.digests import block_digest
from ..host.loop import OffLoop, ask_for_exception
from ..host.waits import DECISION_SECONDS, PEER_SECONDS, SHARED_SECONDS, SILENCE_SECONDS, growing_pauses, wait_for
from ..runs.manifest import Archive, Manifest, RankFiles, SaveTimes, parse
from ..runs.receipts import NO_TABLE, Cause, Exchange, Receipt, Table, spread_of, table_of
from ..spans import monotonic
from .answers import in_words
from .calls import AttemptPlace, Decision, JointSave, JointState, OwnPart, peers_failed
from .comparison import Comparison
from .peers import Ranks
from .shared_root import SharedRoot
from .store import count_of

T = TypeVar("T")

# Between looks at the store, or at a root: it grows from the one to the other, and no two ranks look at the same time.
_FIRST_LOOK_SECONDS: Final = 0.01
_LOOK_SECONDS: Final = {False: 0.5, True: 2.0}  # at a folder or the store of the ranks, and at an object store
# Of all ranks that wait for the same: S3 answers so many requests a second below one prefix.
_MAX_LOOKS_PER_SECOND: Final = 5500
# Between looks at who is missing, and at who is lost.
_LOOK_AROUND_SECONDS: Final = 2.0
_SAID_SECONDS: Final = 30.0  # a wait for rank 0's call of which the log tells
# At a root that is away, when nothing is heard of rank 0.
_MANIFEST_LOOKS: Final = 10
# What rank 0 says last has this long to leave before its process may end.
_LEAVE_SECONDS: Final = 5.0
# Not Python's own generator: its numbers are the training's, which a save must not take from it.
_RANDOM: Final = random.SystemRandom()

_log = logging.getLogger("async_ckpt")


class Alone:
    """The agreement of a process that saves alone, with nothing to agree on."""

    rank, world_size, has_others, decides, is_apart = 0, 1, False, True, False
    spread: Final[Mapping[str, Any]] = MappingProxyType({})

    def __init__(self, attempt: str) -> None:
        self.attempt = attempt

    async def named(self, check: Callable[[], None]) -> None:
        """Do nothing: the attempt has its name."""

    async def agree(self, archive: Archive, times: SaveTimes, off_loop: OffLoop, check: Callable[[], None]) -> None:
        """Do nothing: no other rank writes the step."""

    async def hear(self, off_loop: OffLoop, check: Callable[[], None]) -> None:
        """Do nothing: no other rank decides."""

    def claim(self) -> None:
        """The root is this process's."""

    def committing(self) -> AbstractContextManager[None]:
        return nullcontext()

    def committed(self, manifest: Manifest) -> None:
        """Do nothing: no other rank waits for the commit."""

    def afterwards(self) -> None:
        """Do nothing: there are no receipts."""

    def refuse(self, error: BaseException) -> bool:  # noqa: ARG002
        return True


class Agreement:
    """One rank's part in the agreement on one save at one root. `saving.targets` creates one for each root. On the
    loop, but for what blocks, which is called elsewhere.
    """

    has_others = True

    def __init__(self, ranks: Ranks, joint: JointSave, run: AttemptPlace, number: int = 0) -> None:
        """`number` is that of the root among all roots."""
        self._ranks, self._joint, self._run, self._number = ranks, joint, run, number
        self._has_said_yes = self._is_refused = False
        self._is_committed_here = False  # as rank 0 knows
        self._compared: tuple[Table, Mapping[str, str]] | None = None  # what follows from the commit
        self._has_details = False  # of some rank
        self._begun_at = ranks.meeting.start.connection.now()
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
        return bool(self._joint.attempt) and self._root.is_apart

    @property
    def _root(self) -> SharedRoot:
        return self._ranks.root(self._run, self._number, self._joint)

    @property
    def _exchange(self) -> Exchange:
        return Exchange(self._run.storage, self._run.folder(self._joint.step or 0), self._joint.attempt)

    @property
    def _key(self) -> str:
        return f"{self._ranks.calls.key_of(self._joint.attempt)}/{self._number}"

    @property
    def attempt(self) -> str:
        return self._joint.attempt

    async def named(self, check: Callable[[], None]) -> None:
        """Wait until the attempt has its name, since rank 0 has made the same call. `check` is called meanwhile, and
        may raise.

        Raises PeerFailedError if the call fails before that, or rank 0 does not make it.
        """
        joint, is_told, since = self._joint, False, monotonic()
        begun = asyncio.wrap_future(joint.begun)
        begun.add_done_callback(ask_for_exception)
        while not begun.done():
            await asyncio.wait([begun], timeout=_LOOK_SECONDS[False])
            check()
            waited = monotonic() - since
            if not is_told and waited > _SAID_SECONDS and not begun.done():
                is_told = True
                _log.warning("rank 0 has made no call for %s for %.0f s; it is waited for", joint.what, waited)
            why = self._lost_rank_0()
            if not why and waited > PEER_SECONDS:
                why = f"after {waited:.0f} s rank 0 has made no call for it. {self._ranks.meeting.advised}"
            if why and not begun.done():
                raise PeerFailedError(f"{joint.what} is not committed: {why}", rank=0)
        begun.result()

    def claim(self) -> None:
        """Before anything is written: have the other ranks see that it is the same root."""
        if self.decides:
            self._root.claim()

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
        details = self._details(part)
        receipt = Receipt(
            self.rank,
            joint.shares_by,
            part.structure.digest,
            await off_loop(part.shared.digest),
            NO_TABLE if part.copies is None else _digest(part.copies),
            archive.digest,
            archive.num_bytes,
            part.balance,
            times.seconds,
            times.stall_seconds,
            bool(details),
        )
        if details:
            await off_loop(partial(self._exchange.put_details, self.rank, details))
        await off_loop(partial(self._put_receipt, receipt))
        return await self._all_receipts(receipt, off_loop, check) if self.decides else None

    def _details(self, part: OwnPart) -> dict[str, Any]:
        """Details for rank 0: a structure that it may not know, from its first rank, and digests of copies."""
        structure, details = part.structure, {}
        mates = self._joint.table.classes.get(structure.digest, ())
        if structure.digest != self._ranks.known.committed and (not mates or mates[0] == self.rank):
            details["structure"] = structure.text
        return details if part.copies is None else {**details, "copies": part.copies}

    def _put_receipt(self, receipt: Receipt) -> None:
        """Tell rank 0 that this rank's archive is durable, unless the attempt has failed by now."""
        joint, key = self._joint, self._key
        if self.decides:
            return
        text = json.dumps([self._ranks.meeting.start.nonce, *receipt])
        if joint.is_decided and not joint.is_committed:
            raise peers_failed(joint, joint.causes)

        def put(store: Any) -> None:
            store.set(f"{key}/{self.rank}", text)
            store.add(f"{key}/count", 1)

        self._has_said_yes = True  # also if it fails, since it may have arrived
        said = self._ranks.meeting.start.connection.ask(put)
        if not wait_for(said, SILENCE_SECONDS):
            self._raise_silent_store()
        said.result()

    async def _see_that_it_is_shared(self, off_loop: OffLoop, check: Callable[[], None]) -> None:
        joint, begun, named_at = self._joint, monotonic(), 0.0
        for seconds in _looks(self._run.storage.remote, self.world_size):
            sees = await off_loop(self._root.sees)
            if sees:
                return
            if self._root.is_named and not named_at:
                named_at = monotonic()
            if sees is False or (named_at and monotonic() > named_at + SHARED_SECONDS):
                await off_loop(self._root.say_apart)
                self._raise_apart()
            self._raise_refusal(joint.heard.get(-1))
            why = self._lost_rank_0()
            if not why and not named_at and monotonic() > begun + PEER_SECONDS:
                why = f"after {PEER_SECONDS:.0f} s rank 0 has not begun to write to {self._root.where}"
            if why and joint.is_any:
                raise StorageUnavailableError(why, path=self._root.where)
            if why:
                raise PeerFailedError(f"{joint.what} is not committed: {why}. {self._ranks.meeting.advised}", rank=0)
            await _pause(seconds, check)

    def _raise_refusal(self, decision: Decision | None) -> None:
        self._is_refused = decision is not None and decision.kind in ("failed", "elsewhere")
        if decision is not None and self._is_refused:
            raise peers_failed(self._joint, decision.causes) if decision.kind == "failed" else self._elsewhere()

    def _lost_rank_0(self) -> str:
        """Why rank 0, or the store, is lost for this rank."""
        lost = self._ranks.meeting.start.heartbeats.lost([0])
        return f"rank 0 is lost: {lost[0]}" if lost else self._silence_of_store()

    # --- rank 0 -----------------------------------------------------------------------------------------------

    async def _all_receipts(self, own: Receipt, off_loop: OffLoop, check: Callable[[], None]) -> RankFiles:
        start = self._ranks.meeting.start
        size, deadline, looked = self.world_size, monotonic() + PEER_SECONDS, monotonic()
        receipts = {0: own}
        for seconds in _looks(is_remote=False):
            count, refusal = await self._ask(self._look, check) or (0, None)
            if refusal is not None:
                self._joint.causes.append(refusal)
                raise peers_failed(self._joint, [refusal])
            if count >= size - 1:
                receipts |= await self._ask(partial(self._read, range(1, size)), check) or {}
                if len(receipts) == size:
                    break
            if not self._root.is_shared and await off_loop(self._root.found_apart):
                self._raise_apart()
            if monotonic() > min(looked + _LOOK_AROUND_SECONDS, deadline):
                looked = monotonic()
                there = await self._ask(self._there, check)
                missing = [rank for rank in range(1, size) if there is not None and rank not in there]
                if lost := start.heartbeats.lost(missing):
                    self._raise_lost(lost, await self._ask(partial(self._last_words, [*lost]), check) or {})
                closed = await self._ask(partial(self._ranks.calls.closed, missing), check)
                if closed:
                    words = await self._ask(partial(self._last_words, closed), check) or {}
                    self._raise_lost(dict.fromkeys(closed, "it has closed its checkpointer"), words)
                if looked > deadline:
                    self._raise_missing(missing)
            await _pause(seconds, check)
        self._root.is_shared = True
        ordered = [receipts[rank] for rank in range(size)]
        self._has_details = any(receipt.has_details for receipt in ordered)
        self.spread = spread_of(ordered)
        comparison = Comparison(self._ranks, self._joint, self._run, self._exchange)
        table, texts, of_ranks = await off_loop(partial(comparison.compare, ordered))
        self._compared = table, texts
        return of_ranks

    def _look(self, store: Any) -> tuple[int, Cause | None]:
        """How many receipts are there, and the refusal of a rank."""
        count = count_of(store, f"{self._key}/count")
        return count, self._ranks.calls.refusal(self._joint.attempt, self._number, store)

    def _there(self, store: Any) -> set[int]:
        """The ranks whose receipts are there."""
        return {rank for rank in range(1, self.world_size) if store.check([f"{self._key}/{rank}"])}

    def _last_words(self, ranks: Sequence[int], store: Any) -> dict[int, Cause]:
        words = {rank: self._ranks.calls.last_word(rank, store) for rank in ranks}
        return {rank: word for rank, word in words.items() if word is not None}

    def _read(self, ranks: Sequence[int], store: Any) -> dict[int, Receipt]:
        """The receipts of ranks, all of which have counted theirs."""
        keys = [f"{self._key}/{rank}" for rank in ranks]
        if not store.check(keys):
            return {}
        receipts = {}
        for text in store.multi_get(keys):
            nonce, *fields = json.loads(text)
            receipt = Receipt(*fields)
            if nonce == self._ranks.meeting.start.nonces.get(receipt.rank):  # it is not another process's
                receipts[receipt.rank] = receipt
        return receipts

    async def _ask(self, call: Callable[[Any], T], check: Callable[[], None]) -> T | None:
        """The answer of the ranks' store; None if it is away at this moment.

        Raises PeerFailedError if it has been away for SILENCE_SECONDS.
        """
        answer = asyncio.wrap_future(self._ranks.meeting.start.connection.ask(call))
        answer.add_done_callback(ask_for_exception)
        while not answer.done():
            await asyncio.wait([answer], timeout=_LOOK_SECONDS[False])
            check()
            self._raise_silent_store()
        if isinstance(answer.exception(), RuntimeError):
            self._raise_silent_store()
            return None
        return answer.result()

    def _silence_of_store(self) -> str:
        silent = self._ranks.meeting.start.connection.silence_since(self._begun_at)
        return f"the store of the ranks has not answered for {silent:.0f} s" if silent > SILENCE_SECONDS else ""

    def _raise_silent_store(self) -> None:
        why = self._silence_of_store()
        if why:
            raise PeerFailedError(f"{self._joint.what} is not committed: {why}", rank=0)

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

    def _raise_lost(self, lost: Mapping[int, str], words: Mapping[int, Cause]) -> NoReturn:
        causes = [
            Cause(rank, f"{why}; before that, {words[rank].error}" if rank in words else why)
            for rank, why in lost.items()
        ]
        self._joint.causes += causes
        error = peers_failed(self._joint, causes)
        if self._joint.is_any:
            raise StorageUnavailableError(str(error), path=self._root.where)
        raise error

    def _raise_missing(self, missing: Sequence[int]) -> NoReturn:
        who = ", ".join(map(str, missing[:20])) + (f" and {len(missing) - 20} more" if len(missing) > 20 else "")
        who = f"rank{'s' if len(missing) > 1 else ''} {who}"
        self._joint.causes += [Cause(rank, "it did not finish its part in time") for rank in missing[:20]]
        where = self._root.where
        if self._joint.is_any:
            raise StorageUnavailableError(
                f"{where}: after {PEER_SECONDS:.0f} s nothing was heard there of {who}", path=where
            )
        shared = "" if self._root.is_shared else f"; {where} must be shared by all ranks"
        raise PeerFailedError(
            f"{self._joint.what} is not committed: after {PEER_SECONDS:.0f} s nothing was heard of {who}. "
            f"{self._ranks.meeting.advised}{shared}",
            rank=missing[0] if missing else 0,
        )

    # --- the decision, on another rank ------------------------------------------------------------------------

    async def hear(self, off_loop: OffLoop, check: Callable[[], None]) -> Manifest | None:
        """The manifest that rank 0 has committed, on the others. Raises PeerFailedError for its refusal, and where it
        says nothing.

        Where one of several roots is enough, StorageUnavailableError if it is committed at another one, and never here.
        """
        return None if self.decides else await self._heard(off_loop, check)

    async def _heard(self, off_loop: OffLoop, check: Callable[[], None]) -> Manifest:
        joint = self._joint
        decision, silence = await self._decision(off_loop, check)
        self._raise_refusal(decision)
        if decision is not None and decision.kind == "committed":
            manifest = parse(decision.manifest.encode(), path=self._exchange.folder)
            self._is_committed(await off_loop(partial(self._table_after, manifest)))
            return manifest
        found = await self._manifest_there(off_loop, check)
        if found is None:
            raise PeerFailedError(
                f"{joint.what}: {silence}. It may be committed: look at what is committed there when "
                f"{self._root.where if decision else 'rank 0'} is back",
                rank=0,
                undecided=True,
            )
        try:
            await off_loop(partial(self._run.look_again, found))
        except RunTakenError as error:
            raise PeerFailedError(str(error), rank=0, undecided=True) from error
        self._is_committed(await off_loop(partial(self._table_after, found)))
        return found

    async def _decision(self, off_loop: OffLoop, check: Callable[[], None]) -> tuple[Decision | None, str]:
        """The decision that rank 0 has said, and if it has not said yes or no, why not."""
        joint, deadline, looked = self._joint, monotonic() + DECISION_SECONDS, monotonic()
        while True:
            decision = joint.heard.get(self._number) or joint.heard.get(-1)
            if decision is not None:
                return decision, "rank 0 cannot say whether it is committed"
            joint.bell.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(joint.bell.wait(), _LOOK_SECONDS[False])
            check()
            if monotonic() < looked + _LOOK_AROUND_SECONDS:
                continue
            looked = monotonic()
            if lost := self._lost_rank_0():
                return None, f"{lost}, and has not said whether it is committed"
            if joint.is_any and await off_loop(self._root.found_apart):
                self._raise_apart()
            if monotonic() > deadline:
                return None, f"rank 0 has not said in {DECISION_SECONDS:.0f} s whether it is committed"

    async def _manifest_there(self, off_loop: OffLoop, check: Callable[[], None]) -> Manifest | None:
        """The manifest at the root, as far as it answers."""
        for _ in range(_MANIFEST_LOOKS):
            with suppress(StorageUnavailableError):
                return await off_loop(self._exchange.manifest)
            await _pause(_LOOK_SECONDS[self._run.storage.remote], check)
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
        self._root.is_shared = True
        self._ranks.calls.decide(self._joint, JointState.COMMITTED, table)

    # --- the commit, on rank 0 --------------------------------------------------------------------------------

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
            if not self._run.storage.remote and self._is_missing():
                self._joint.maybe_at.discard(self._run)
            raise

    def _is_missing(self) -> bool:
        """Whether it is sure that the manifest is not there."""
        with suppress(CheckpointError, OSError):
            return self._exchange.manifest() is None
        return False

    def _found(self) -> Manifest | None:
        """The manifest, if the root shows it."""
        with suppress(CheckpointError, OSError):
            return self._exchange.manifest()
        return None

    def committed(self, manifest: Manifest) -> None:
        """On rank 0: the manifest is there, and no later start was seen."""
        assert self._compared is not None
        table, texts = self._compared
        self._is_committed_here = True
        self._ranks.known.compared.update(table.classes)
        self._ranks.known.texts = dict(texts)
        self._is_committed(table)
        self._say(Decision("committed", manifest=manifest.dump().decode()), self._number)

    def afterwards(self) -> None:
        """On rank 0, when nobody waits any more: delete what ranks have said, which takes time where they are many."""
        self._ranks.calls.forget(self._joint, self._number)
        with suppress(CheckpointError, OSError):  # they go with the step
            if self._has_details:
                self._exchange.forget()
            if self._joint.path:
                self._root.withdraw()

    def refuse(self, error: BaseException) -> bool:
        """Give the save up on this rank, at all roots; or only at this root, if it is committed at another one.

        Whether the archive here may be deleted: nobody can commit it any more. What is committed elsewhere is copied
        here under the same names, at any time, so then it may not. Blocks.
        """
        joint = self._joint
        if self.decides:
            return self._refuse_for_all(error)
        if not joint.attempt:  # there is no archive yet, and rank 0 is told once it makes the call
            self._ranks.calls.fail(joint, Cause(self.rank, in_words(error)))
        elif self._has_said_yes:
            if not (joint.is_decided or self._is_refused or self._root.is_apart):
                return False  # rank 0 may still commit it
        elif not (self._is_refused or self._root.is_apart):
            root = self._number if joint.is_any else None
            wait_for(self._ranks.calls.refuse(joint.attempt, Cause(self.rank, in_words(error)), root), _LEAVE_SECONDS)
        return not joint.is_committed

    def _refuse_for_all(self, error: BaseException) -> bool:
        joint = self._joint
        if self._run in joint.maybe_at or (joint.maybe_at and not joint.is_committed):
            self._learn_of_lost_answer(error)
            if not self._is_committed_here:  # the others need not wait
                self._say(Decision("elsewhere" if joint.is_committed else "unknown"), self._number)
            return False  # nobody knows whether it is committed here
        if joint.is_committed:
            self._say(Decision("elsewhere"), self._number)
        else:
            self._say(Decision("failed", tuple(joint.causes) or (Cause(0, in_words(error)),)), -1)
            self._ranks.calls.decide(joint, JointState.REFUSED, None)
        self.afterwards()
        return not joint.is_committed

    def _say(self, decision: Decision, root: int) -> None:
        wait_for(self._ranks.calls.say_decision(self._joint, decision, root), _LEAVE_SECONDS)

    def _learn_of_lost_answer(self, error: BaseException) -> None:
        """On rank 0: its put of the manifest has failed, but may have arrived. Then the other ranks know what follows
        from the commit, and so must this one.
        """
        joint, is_lost = self._joint, isinstance(error, StorageUnavailableError)
        is_open = is_lost and self._run in joint.maybe_at and not joint.is_committed
        manifest = self._found() if is_open else None
        if manifest is not None:
            error.add_note(f"{joint.what} is committed all the same: its manifest is at {self._root.where}")
            self.committed(manifest)
            self.afterwards()


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
