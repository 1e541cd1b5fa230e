"""The agreement of all ranks that one save is committed at one root.

In: a durable archive of this rank, and the receipts of the others. Out: on rank 0, what the manifest must name; on the
others, the decision, which only rank 0 makes. Knows nothing of: the contents of archives.

A rank's part in this rendezvous is a receipt: its archive is durable. Rank 0 announces "committed" when the manifest is
put and no later start was seen, and "failed" only if the manifest will never be put. A rank that no longer hears from
rank 0 or the store looks for the manifest; without one it cannot know the decision.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
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
from ..host.loop import off_loop
from ..host.waits import wait_for
from ..runs.manifest import Archive, Manifest, RankFiles, SaveTimes, parse
from ..runs.receipts import EMPTY, NO_TABLE, Cause, Exchange, Lent, Receipt, Table, spread_of, table_of
from .calls import AttemptPlace, Decision, JointSave, JointState, OwnPart
from .comparison import Comparison
from .meeting import in_words
from .peers import Ranks
from .rendezvous import LEAVE_SECONDS, LOOK_SECONDS, Rendezvous

# How often to look for the manifest at a root that does not answer, once rank 0 is silent.
_MANIFEST_LOOKS: Final = 10
# How many ranks' findings a note lists.
_RANKS_NAMED: Final = 4


class Agreement(Rendezvous):
    """One rank's part in the agreement on one save. `saving.targets` creates it."""

    has_others = True

    def __init__(self, ranks: Ranks, joint: JointSave, places: Sequence[AttemptPlace]) -> None:
        """`places` are the places from which rank 0 chooses one."""
        super().__init__(ranks.meeting, ranks.calls, joint)
        self._ranks, self._places = ranks, places
        self._is_committed_here = False  # on rank 0: `committed` was called
        # the table and structures that hold from the commit on
        self._compared: tuple[Table, Mapping[str, str]] | None = None
        self._has_details = False  # this rank has sent details; on rank 0, any rank has
        self.is_apart = False  # on rank 0: another rank has written its archive to another folder
        self.found = ""  # on rank 0: what the ranks have found in the values that they have written
        # on rank 0: the (group, step) pairs that archives of any rank refer to
        self.lent: Collection[Lent] = ()
        self.spread: Mapping[str, Any] = {}  # on rank 0: how much longer some ranks took than others

    @property
    def is_announced(self) -> bool:
        """True on another rank if rank 0 has announced that the save is committed, or may be."""
        return self._joint.decision is not None and self._joint.decision.kind != "failed"

    @property
    def fails_elsewhere(self) -> bool:
        """True if another rank has reported that the place does not answer it, or has no room for it."""
        unable = (StorageUnavailableError.__name__, StorageFullError.__name__)
        return any(cause.rank != self.rank and cause.error.startswith(unable) for cause in self._joint.causes)

    @property
    def place(self) -> int:
        """The number of the place that the save goes to. On other ranks, valid once the attempt has its name."""
        return self._joint.place

    @property
    def follows(self) -> bool:
        """True if the next place gets a copy at the same time. On other ranks, valid once the attempt has its name."""
        return self._joint.follows

    @property
    def _run(self) -> AttemptPlace:
        return self._places[self._joint.place]

    @property
    def _exchange(self) -> Exchange:
        return Exchange(self._run.storage, self._run.folder(self._joint.step or 0), self._joint.attempt)

    async def has_room(self) -> None:
        """On another rank: wait until rank 0 has deleted steps, if it must make room. Raises PeerFailedError."""
        while self._joint.makes_room and not self.decides:
            self._raise_if_failed(self._joint.decision)
            if why := self._lost_rank_0():
                raise PeerFailedError(f"{self._joint.what} is not committed: {why}. {self._meeting.advised}", rank=0)
            await self._bell()

    def made_room(self) -> None:
        """On rank 0: allow the other ranks to write."""
        self._calls.announce_room(self._joint)

    async def agree(
        self,
        archive: Archive,
        times: SaveTimes,
        found: str = "",
        lent: Sequence[Lent] = (),
    ) -> RankFiles | None:
        """Report that this rank's archive is durable, after these `times`. On rank 0, wait for the reports of all
        ranks.

        `found` describes what a check has found in the values, `lent` is what the archive refers to in
        earlier steps. Raises PeerFailedError.
        """
        joint = self._joint
        part = joint.part
        assert part is not None
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
            found,
            lent,
        )
        if details:
            self._has_details = True
            await off_loop(partial(self._exchange.put_details, self.rank, details))
        await off_loop(partial(self._put, receipt))
        return await self._all_receipts(receipt) if self.decides else None

    def _details(self, part: OwnPart) -> dict[str, Any]:
        """The details that rank 0 needs: the structure, if this rank is to describe it, and digests of replicas."""
        structure, details = part.structure, {}
        mates = self._joint.table.classes.get(structure.digest, ())
        if structure.digest != self._ranks.known.committed and (not mates or mates[0] == self.rank):
            details["structure"] = structure.text
        return details if part.copies is None else {**details, "copies": part.copies}

    async def _all_receipts(self, own: Receipt) -> RankFiles:
        """On rank 0: wait for the receipts of the other ranks, and compare them. Raises as `agree` does."""
        receipts = await self._gathered()
        ordered = [own, *(Receipt(*receipts[rank]) for rank in range(1, self.world_size))]
        self._has_details = any(receipt.has_details for receipt in ordered)
        missing = await off_loop(partial(self._exchange.missing_archive, self.world_size))
        if missing is not None:
            self._raise_missing_archive(missing)
        self.spread = spread_of(ordered)
        self.lent = {(group, step, attempt) for receipt in ordered for group, step, attempt in receipt.lent}
        found = [f"rank {receipt.rank}: {receipt.found}" for receipt in ordered if receipt.found]
        self.found = "; ".join(found[:_RANKS_NAMED]) + (
            f"; and {len(found) - _RANKS_NAMED} more ranks" * (len(found) > _RANKS_NAMED)
        )
        comparison = Comparison(self._ranks, self._joint, self._exchange)
        table, texts, of_ranks = await off_loop(partial(comparison.compare, ordered))
        self._compared = table, texts
        return of_ranks

    def _raise_missing_archive(self, rank: int) -> NoReturn:
        where, self.is_apart = self._where, rank > 0
        why = f"the archive of rank {rank} is not in {where}"
        self._joint.causes.append(Cause(rank, why))
        if rank == 0:
            raise PeerFailedError(f"{self._joint.what} is not committed: {why} any more; it was deleted", rank=0)
        raise PeerFailedError(
            f"{self._joint.what} is not committed: {where} must be shared by all ranks, but the archive of rank {rank} "
            "is not there, unless it was deleted just now. Give a root that all ranks share: a folder on a shared file "
            "system, or an object store. Ranks that save to several runs begin them in the same order",
            rank=rank,
        )

    @property
    def _where(self) -> str:
        """The run's place, or the folder of a one-off save, for messages."""
        return self._run.storage.locate(self._exchange.folder if self._joint.path else "")

    # --- the decision, on another rank ------------------------------------------------------------------------

    async def receive(self) -> Manifest | None:
        """On another rank: the manifest that rank 0 has committed. Raises PeerFailedError for a refusal or silence."""
        if self.decides:
            return None
        joint = self._joint
        decision, silence = await self._decision()
        self._raise_if_failed(decision)
        if decision is not None and decision.kind == "committed":
            manifest = parse(decision.manifest.encode(), path=self._exchange.folder)
            self._is_committed(await off_loop(partial(self._table_after, manifest)))
            return manifest
        found = await self._manifest_there()
        if found is None:
            raise PeerFailedError(
                f"{joint.what}: {silence}. It may be committed: check which steps are committed once "
                f"{self._where if decision else 'rank 0'} is back",
                rank=0,
                undecided=True,
            )
        try:
            await off_loop(partial(self._run.look_again, found))
        except RunTakenError as error:
            raise PeerFailedError(str(error), rank=0, undecided=True) from error
        # Rank 0 does not know of the commit, so all ranks divide the next save anew; unless nothing was heard of it.
        self._is_committed(EMPTY if decision else await off_loop(partial(self._table_after, found)))
        return found

    async def _manifest_there(self) -> Manifest | None:
        """The manifest at the root, if the root answers."""
        for _ in range(_MANIFEST_LOOKS):
            with suppress(StorageUnavailableError):
                return await off_loop(self._exchange.manifest)
            await self._pause(LOOK_SECONDS[self._run.storage.remote])
        return None

    def _table_after(self, manifest: Manifest) -> Table:
        if manifest.ranks is None or manifest.ranks.table == self._joint.table.digest:
            return self._joint.table
        return table_of(self._run.storage, self._run.folder(manifest.step), manifest)

    def _is_committed(self, table: Table) -> None:
        self._calls.decide(self._joint, JointState.COMMITTED, table)

    # --- the commit, on rank 0 --------------------------------------------------------------------------------

    @contextmanager
    def committing(self) -> Iterator[None]:
        """On rank 0, around putting the manifest. If the put fails, nobody knows whether the manifest is there."""
        self._joint.maybe_put = True
        try:
            yield
        except StepExistsError:
            self._joint.maybe_put = False  # another attempt's manifest is there
            raise
        except StorageFullError:
            if not self._run.storage.remote:
                with suppress(CheckpointError, OSError):
                    self._joint.maybe_put = self._exchange.manifest() is not None
            raise

    def committed(self, manifest: Manifest) -> None:
        """On rank 0: note that the manifest is there, and that no later start was seen."""
        assert self._compared is not None
        table, texts = self._compared
        self._is_committed_here = True
        self._ranks.known.compared.update(table.classes)
        self._ranks.known.texts = dict(texts)
        self._is_committed(table)
        self._announce(Decision("committed", manifest=manifest.dump().decode()))

    def afterwards(self) -> None:
        """On rank 0, once nobody waits any more: delete the reports of the ranks, which takes time for many ranks."""
        self._calls.forget(self._joint)
        with suppress(CheckpointError, OSError):  # they are deleted with the step
            if self._has_details:
                self._exchange.forget()

    def refuse(self, error: BaseException) -> bool:
        """Give the save up on this rank. Returns True if nobody can commit its archive any more. Blocks."""
        joint = self._joint
        if self.decides:
            return self._refuse_for_all(error)
        if not joint.attempt:  # there is no archive yet; rank 0 learns this when it makes the call
            self._calls.fail(joint, Cause(self.rank, in_words(error)))
        elif self._has_reported:
            if not (joint.is_decided or self._is_refused):
                return False  # rank 0 may still commit it
        elif not self._is_refused:
            wait_for(self._calls.refuse(joint.attempt, Cause(self.rank, in_words(error))), LEAVE_SECONDS)
        if joint.is_committed:
            return False
        if self._has_details:
            with suppress(CheckpointError, OSError):  # rank 0 may not see them
                self._exchange.forget()
        return True

    def _refuse_for_all(self, error: BaseException) -> bool:
        joint = self._joint
        if joint.maybe_put:
            self._learn_of_lost_answer(error)
            if not self._is_committed_here:  # so that the others need not wait
                self._announce(Decision("unknown"))
            return False  # nobody knows whether it is committed
        self._announce(Decision("failed", tuple(joint.causes) or (Cause(0, in_words(error)),)))
        self._calls.decide(joint, JointState.REFUSED, None)
        self.afterwards()
        return True

    def _learn_of_lost_answer(self, error: BaseException) -> None:
        """On rank 0: if a failed put has arrived, the other ranks go by the commit, and so must this rank."""
        joint, manifest = self._joint, None
        if isinstance(error, StorageUnavailableError) and not joint.is_committed:
            with suppress(CheckpointError, OSError):
                manifest = self._exchange.manifest()
        if manifest is not None:
            error.add_note(f"{joint.what} is committed all the same: its manifest is in {self._where}")
            self.committed(manifest)
            self.afterwards()


def _digest(copies: dict[str, dict[str, str]]) -> str:
    return block_digest(json.dumps(copies, sort_keys=True).encode()).hex()[:16]
