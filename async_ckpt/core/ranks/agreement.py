"""The agreement of all ranks that one save is committed at one root.

In: an archive of this rank that is durable, and receipts of the others. Out: what the manifest is to name; or the
decision of rank 0, which alone makes one. Knows nothing of: what is in the archives.

The part of a rank in this rendezvous is a receipt: its archive is durable. Rank 0 says "committed" when the manifest
is put and no later start was seen, and "failed" only if the manifest will never be put. A rank that hears nothing any
more, since rank 0 or the store is gone, goes by the manifest, and without one does not know.
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
from ..runs.receipts import NO_TABLE, Cause, Exchange, Receipt, Table, spread_of, table_of
from .calls import AttemptPlace, Decision, JointSave, JointState, OwnPart
from .comparison import Comparison
from .meeting import in_words
from .peers import Ranks
from .rendezvous import LEAVE_SECONDS, LOOK_SECONDS, Rendezvous

# At a root that is away, when nothing is heard of rank 0.
_MANIFEST_LOOKS: Final = 10
# Ranks whose findings are in a note.
_RANKS_TOLD: Final = 4


class Agreement(Rendezvous):
    """One rank's part in the agreement on one save. `saving.targets` creates it."""

    has_others = True

    def __init__(self, ranks: Ranks, joint: JointSave, places: Sequence[AttemptPlace]) -> None:
        """`places` are those that rank 0 chooses from."""
        super().__init__(ranks.meeting, ranks.calls, joint)
        self._ranks, self._places = ranks, places
        self._is_committed_here = False  # as rank 0 knows
        self._compared: tuple[Table, Mapping[str, str]] | None = None  # what follows from the commit
        self._has_details = False  # of this rank; on rank 0, of any
        self.is_apart = False  # on rank 0: another rank has written its archive to another folder
        self.found = ""  # on rank 0, what the ranks have found in the values that they have written
        self.lent: Collection[tuple[str, int]] = ()  # on rank 0, of the archives of all ranks
        self.spread: Mapping[str, Any] = {}  # on rank 0, how much longer some ranks took than others

    @property
    def is_told(self) -> bool:
        """True on another rank if rank 0 has said that the save is committed."""
        return self._joint.heard is not None and self._joint.heard.kind == "committed"

    @property
    def fails_elsewhere(self) -> bool:
        """True if the place does not answer another rank, or has no room for it, as that rank has said."""
        unable = (StorageUnavailableError.__name__, StorageFullError.__name__)
        return any(cause.rank != self.rank and cause.error.startswith(unable) for cause in self._joint.causes)

    @property
    def place(self) -> int:
        """The number of the run's place that the save goes to; on another rank, once the attempt has its name."""
        return self._joint.place

    @property
    def follows(self) -> bool:
        """Whether the next place gets a copy in the same pass; likewise."""
        return self._joint.follows

    @property
    def _run(self) -> AttemptPlace:
        return self._places[self._joint.place]

    @property
    def _exchange(self) -> Exchange:
        return Exchange(self._run.storage, self._run.folder(self._joint.step or 0), self._joint.attempt)

    async def has_room(self) -> None:
        """On another rank: wait until rank 0 has deleted what must make room for this save, if it does. Raises
        PeerFailedError.
        """
        while self._joint.makes_room and not self.decides:
            self._raise_if_failed(self._joint.heard)
            if why := self._lost_rank_0():
                raise PeerFailedError(f"{self._joint.what} is not committed: {why}. {self._meeting.advised}", rank=0)
            await self._bell()

    def made_room(self) -> None:
        """On rank 0: the other ranks may write."""
        self._calls.say_room(self._joint)

    async def agree(
        self,
        archive: Archive,
        times: SaveTimes,
        found: str = "",
        lent: Sequence[tuple[str, int]] = (),
    ) -> RankFiles | None:
        """This rank's archive is durable, after these `times`: say so. On rank 0, go on once all ranks have.

        `found` tells what a check has found in its values, `lent` of which groups its archive refers to which steps.
        Raises PeerFailedError.
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
        """Details for rank 0: a structure that it may not know, from its first rank, and digests of copies."""
        structure, details = part.structure, {}
        mates = self._joint.table.classes.get(structure.digest, ())
        if structure.digest != self._ranks.known.committed and (not mates or mates[0] == self.rank):
            details["structure"] = structure.text
        return details if part.copies is None else {**details, "copies": part.copies}

    async def _all_receipts(self, own: Receipt) -> RankFiles:
        """On rank 0: wait for the receipts of the others, and compare them. Raises as `agree`."""
        receipts = await self._gathered()
        ordered = [own, *(Receipt(*receipts[rank]) for rank in range(1, self.world_size))]
        self._has_details = any(receipt.has_details for receipt in ordered)
        missing = await off_loop(partial(self._exchange.missing_archive, self.world_size))
        if missing is not None:
            self._raise_missing_archive(missing)
        self.spread = spread_of(ordered)
        self.lent = {(group, step) for receipt in ordered for group, step in receipt.lent}
        told = [f"rank {one.rank}: {one.found}" for one in ordered if one.found]
        self.found = "; ".join(told[:_RANKS_TOLD]) + (
            f"; and {len(told) - _RANKS_TOLD} more ranks" * (len(told) > _RANKS_TOLD)
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
            "system, or an object store",
            rank=rank,
        )

    @property
    def _where(self) -> str:
        """The run's place, or the folder of a one-off save, for messages."""
        return self._run.storage.locate(self._exchange.folder if self._joint.path else "")

    # --- the decision, on another rank ------------------------------------------------------------------------

    async def hear(self) -> Manifest | None:
        """The manifest that rank 0 has committed, on the others. Raises PeerFailedError for its refusal, and where it
        says nothing.
        """
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
                f"{joint.what}: {silence}. It may be committed: look at what is committed there when "
                f"{self._where if decision else 'rank 0'} is back",
                rank=0,
                undecided=True,
            )
        try:
            await off_loop(partial(self._run.look_again, found))
        except RunTakenError as error:
            raise PeerFailedError(str(error), rank=0, undecided=True) from error
        self._is_committed(await off_loop(partial(self._table_after, found)))
        return found

    async def _manifest_there(self) -> Manifest | None:
        """The manifest at the root, as far as it answers."""
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
        """On rank 0, around putting the manifest: if that fails, nobody knows whether it is there."""
        self._joint.maybe_put = True
        try:
            yield
        except StepExistsError:
            self._joint.maybe_put = False  # it is another one's
            raise
        except StorageFullError:
            if not self._run.storage.remote:
                with suppress(CheckpointError, OSError):
                    self._joint.maybe_put = self._exchange.manifest() is not None
            raise

    def committed(self, manifest: Manifest) -> None:
        """On rank 0: the manifest is there, and no later start was seen."""
        assert self._compared is not None
        table, texts = self._compared
        self._is_committed_here = True
        self._ranks.known.compared.update(table.classes)
        self._ranks.known.texts = dict(texts)
        self._is_committed(table)
        self._say(Decision("committed", manifest=manifest.dump().decode()))

    def afterwards(self) -> None:
        """On rank 0, when nobody waits any more: delete what ranks have said, which takes time where they are many."""
        self._calls.forget(self._joint)
        with suppress(CheckpointError, OSError):  # they go with the step
            if self._has_details:
                self._exchange.forget()

    def refuse(self, error: BaseException) -> bool:
        """Give the save up on this rank. Whether its archive may be deleted: nobody can commit it any more. Blocks."""
        joint = self._joint
        if self.decides:
            return self._refuse_for_all(error)
        if not joint.attempt:  # there is no archive yet, and rank 0 is told once it makes the call
            self._calls.fail(joint, Cause(self.rank, in_words(error)))
        elif self._has_said_yes:
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
            if not self._is_committed_here:  # the others need not wait
                self._say(Decision("unknown"))
            return False  # nobody knows whether it is committed
        self._say(Decision("failed", tuple(joint.causes) or (Cause(0, in_words(error)),)))
        self._calls.decide(joint, JointState.REFUSED, None)
        self.afterwards()
        return True

    def _learn_of_lost_answer(self, error: BaseException) -> None:
        """On rank 0: its put of the manifest has failed, but may have arrived. Then the other ranks know what follows
        from the commit, and so must this one.
        """
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
