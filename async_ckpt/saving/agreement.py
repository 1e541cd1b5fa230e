"""How the ranks of one save come to agree that it is committed, at one root.

In: an archive of this rank that is durable, and receipts of the others. Out: what the manifest is to name; or the decision of
rank 0, which alone makes one. Knows nothing of: what is in the archives.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final

from ..errors import (
    CheckpointError,
    PeerFailedError,
    StepExistsError,
    StorageUnavailableError,
    UnsupportedStateError,
)
from ..format.digests import block_digest
from ..runs import layouts
from ..runs.coverage import check_coverage
from ..runs.manifest import Archive, Manifest, OfRanks, archive_name
from ..runs.receipts import NO_TABLE, Cause, Exchange, Receipt, Table, Verdict, table_of
from ..runs.run import Run
from ..spans import monotonic
from ..state.ranked import Structure
from ..state.shares import EVERYBODY_BYTES
from ..state.writers import Layout
from .delivery import OffLoop
from .ranks import NOT_ALONE, Joint, Ranks, in_words
from .values import differing
from .worker import get_worker

# How long rank 0, whose own archive is durable, waits for the receipts of others; they wait longer for its decision.
PEER_SECONDS: Final = 1800.0
_MORE_SECONDS: Final = 600.0
# How long a root that all ranks share may hide what another has written: NFS does so for a minute.
SHARED_SECONDS: Final = 120.0
# Archives that rank 0 looks into where their ranks' values are not the same.
_MAX_COMPARED: Final = 64
# Between looks at a root: it grows from the one to the other, and no two ranks look at the same time.
_FIRST_LOOK_SECONDS: Final = 0.02
_LOOK_SECONDS: Final = {False: 0.5, True: 2.0}  # at a folder, and at a store
# Of all ranks that wait for the same: S3 answers so many requests a second below one prefix.
_MAX_LOOKS_PER_SECOND: Final = 5500
# At a store a failure may be heard of later than a commit, so that most looks are one request.
_LOOKS_PER_VERDICT: Final = 4

_log = logging.getLogger("async_ckpt")


class Agreement:
    """How one rank agrees with the others on one save, at one root. On the loop, but for `refuse`."""

    def __init__(self, ranks: Ranks, joint: Joint, run: Run) -> None:
        self._ranks, self._joint, self._run = ranks, joint, run
        self._exchange = Exchange(run.storage, run.folder(joint.step), joint.attempt)
        self._has_said_yes = False
        self._table: Table | None = None  # that follows from the commit
        self._refused: Sequence[str] = ()  # attempts that were decided before
        self.may_be_committed = False  # rank 0 is about to put the manifest, or has

    @property
    def rank(self) -> int:
        return self._ranks.world.rank

    @property
    def world_size(self) -> int:
        return self._ranks.world.size

    @property
    def decides(self) -> bool:
        """Whether this is the rank that does."""
        return self.rank == 0

    async def agree(self, archive: Archive, off_loop: OffLoop, check: Callable[[], None]) -> OfRanks | None:
        """This rank's archive is durable: say so. On rank 0, go on once all ranks have.

        `check` is called in between, and raises when nobody waits for it any more. Raises PeerFailedError.
        """
        joint = self._joint
        assert joint.structure is not None
        assert joint.shared is not None
        if not self.decides:
            await self._see_that_it_is_shared(off_loop, check)
        receipt = Receipt(
            self.rank,
            joint.shares_by,
            joint.structure.digest,
            await off_loop(joint.shared.digest),
            NO_TABLE if joint.copies is None else _digest(joint.copies),
            archive.digest,
            archive.num_bytes,
        )
        await off_loop(partial(self._exchange.put_receipt, receipt, self._more(joint.structure)))
        self._has_said_yes = True
        return await self._all_receipts(off_loop, check) if self.decides else None

    def claim(self) -> None:
        """On rank 0, before anything is written: what the others find there if they see the same root.

        Raises CheckpointError for a run_id that was used before.
        """
        ranks = self._ranks
        if self._run in ranks.claimed:
            return
        data = json.dumps({"world_size": ranks.world.size}).encode()
        try:
            self._run.storage.put_new(self._claim, data)
        except FileExistsError as error:
            raise CheckpointError(
                f"{self._run.storage.locate('')}: run_id={ranks.world.run_id!r} was used by an earlier start; give a new one at every start"
            ) from error
        ranks.claimed.add(self._run)

    @property
    def _claim(self) -> str:
        return f"world.{self._ranks.token()}.json"

    async def _see_that_it_is_shared(self, off_loop: OffLoop, check: Callable[[], None]) -> None:
        if self._run in self._ranks.claimed:
            return
        deadline = monotonic() + SHARED_SECONDS
        for seconds in _looks(self._run.storage.remote, self.world_size):
            if await off_loop(lambda: self._claim in self._run.storage.names("")):
                break
            if await off_loop(self._exchange.verdict) is not None:
                return  # it is shared, and rank 0 has failed before it could say so
            if monotonic() > deadline:
                where, rank = self._run.storage.locate(""), self._ranks.world.rank
                raise PeerFailedError(
                    f"{where}: rank {rank} does not see there what rank 0 has written. Give a root that all ranks share: a "
                    "folder on a shared file system, or an object store",
                    rank=0,
                    undecided=False,
                )
            await _pause(seconds, check)
        self._ranks.claimed.add(self._run)

    def _more(self, structure: Structure) -> dict[str, Any]:
        """What rank 0 reads where a structure is new to it: of the first rank that has it; and digests of copies of all."""
        mates = self._joint.table.classes.get(structure.digest, ())
        is_first = not mates or mates[0] == self.rank
        more: dict[str, Any] = {"rank": self.rank, **({"structure": structure.text} if is_first else {})}
        return more if self._joint.copies is None else {**more, "copies": self._joint.copies}

    async def _all_receipts(self, off_loop: OffLoop, check: Callable[[], None]) -> OfRanks:
        size, deadline = self._ranks.world.size, monotonic() + PEER_SECONDS
        for seconds in _looks(self._run.storage.remote):
            receipts = await off_loop(self._exchange.receipts)
            refused = [receipt for receipt in receipts.values() if not receipt.is_ok]
            if refused:
                await off_loop(partial(self._raise_refusals, refused))
            if len(receipts) == size:
                break
            if monotonic() > deadline:
                self._raise_missing(receipts)
            await _pause(seconds, check)
        ordered = [receipts[rank] for rank in range(size)]
        return await off_loop(partial(self._compared, ordered))

    def _raise_refusals(self, refused: Sequence[Receipt]) -> None:
        causes = [
            Cause(one.rank, str(self._exchange.more_of(one).get("error", "it gave no reason")))
            for one in refused
        ]
        self._joint.causes += causes
        raise _peers_failed(self._joint.step, causes)

    def _raise_missing(self, receipts: dict[int, Receipt]) -> None:
        missing = [rank for rank in range(self._ranks.world.size) if rank not in receipts]
        who = ", ".join(map(str, missing[:20])) + (
            f" and {len(missing) - 20} more" if len(missing) > 20 else ""
        )
        self._joint.causes += [Cause(rank, "it did not finish its part in time") for rank in missing[:20]]
        is_first = not self._ranks.compared  # no commit has shown yet that all see the same root
        shared = f"; {self._run.storage.locate('')} must be shared by all ranks" if is_first else ""
        raise PeerFailedError(
            f"step {self._joint.step} is not committed: after {PEER_SECONDS:.0f} s nothing was heard of rank"
            f"{'s' if len(missing) > 1 else ''} {who}. {NOT_ALONE[0].upper()}{NOT_ALONE[1:]}{shared}",
            rank=missing[0],
            undecided=False,
        )

    def _compared(self, receipts: Sequence[Receipt]) -> OfRanks:
        """Check that the archives are of one state, and have all of it; then write what the manifest is to name."""
        ranks = self._ranks
        classes: dict[str, list[int]] = {}
        for receipt in receipts:
            classes.setdefault(receipt.structure, []).append(receipt.rank)
        for digest, mates in classes.items():
            if digest not in ranks.known:
                ranks.known[digest] = self._structure_text(receipts, mates)
        tables = {receipt.table for receipt in receipts} - {NO_TABLE}
        if tables - {self._joint.table.digest}:
            raise PeerFailedError(
                f"step {self._joint.step} is not committed: its ranks do not agree on who writes what, as after saves that "
                "only some of them have called; call save alike on every rank",
                rank=0,
                undecided=False,
            )
        texts = {digest: ranks.known[digest] for digest in classes}
        covered = Table(classes).digest
        if covered not in ranks.covered:
            check_coverage(classes, texts)
            ranks.covered = {covered}
        self._check_shares(receipts, texts)
        is_each = self._joint.copies is not None
        self._compare_copies([one for one in receipts if is_each or one.structure not in ranks.compared])
        ranks.known = texts
        self._table = Table(classes, self._differing(receipts))
        archives = self._exchange.put_archives(receipts)
        shared = {one: mates for one, mates in self._joint.table.classes.items() if one in texts}
        told = Layout(self._table.classes, texts, shared, ranks.root)
        layout = self._exchange.put_layout(layouts.dump(told, self._table))
        num_bytes = sum(receipt.num_bytes for receipt in receipts)
        per_rank = tuple(sorted({*self._joint.per_rank, *self._table.differing}))
        return OfRanks(archives, layout, self._table.digest, num_bytes, per_rank)

    def _check_shares(self, receipts: Sequence[Receipt], texts: Mapping[str, str]) -> None:
        """Whoever took a share left the rest to ranks that had a state of the same structure: each must still have all of it.

        Raises UnsupportedStateError.
        """
        for structure, mates in self._joint.table.classes.items():
            if not any(
                receipts[rank].structure == structure and receipts[rank].table != NO_TABLE for rank in mates
            ):
                continue
            others: dict[str, int] = {}  # than that, and the lowest rank that has it
            for rank in mates:
                others.setdefault(receipts[rank].structure, rank)
            others.pop(structure, None)
            for other, rank in others.items():
                gone = {*texts[structure].splitlines()} - {*texts[other].splitlines()}
                if gone:
                    name = json.loads(min(gone))[0].replace("\x1f", ".")
                    raise UnsupportedStateError(
                        f"rank {rank} no longer has {name} as other ranks have it, which counted on that; have every rank change what "
                        "it saves at the same step, and save again",
                        path=name,
                    )

    def _compare_copies(self, receipts: Sequence[Receipt]) -> None:
        """What several ranks hold of a tensor must be the same. Raises UnsupportedStateError, naming one that is not."""
        first: dict[tuple[str, str], tuple[int, str]] = {}
        found: dict[int, Any] = {}
        distinct: dict[str, Receipt] = {}  # of ranks that say the same, the lowest
        for receipt in receipts:
            distinct.setdefault(receipt.copies, receipt)

        def read(receipt: Receipt) -> None:
            found[receipt.rank] = self._exchange.more_of(receipt).get("copies") or {}

        self._run.do_all([partial(read, receipt) for receipt in distinct.values()])
        for rank in sorted(found):
            for what, tensors in found[rank].items():
                for name, digest in tensors.items():
                    other, there = first.setdefault((what, name), (rank, digest))
                    if there != digest:
                        raise UnsupportedStateError(
                            f"{name} should be the same on ranks {other} and {rank}, and is not: ranks that have the same part of a tensor, "
                            "as all have of a plain one, must have the same values. Give its group in per_rank=, if each has its own",
                            path=name,
                        )

    def _differing(self, receipts: Sequence[Receipt]) -> tuple[str, ...]:
        """The names of values and small tensors that are not the same on all ranks; each is told once.

        Raises UnsupportedStateError where that is not allowed, and where ranks with the same tensors have other values.
        """
        joint, exchange = self._joint, self._exchange
        known = joint.table.differing
        ours: dict[str, Receipt] = {}
        for receipt in receipts:
            ours.setdefault(receipt.values, receipt)
        if len(ours) == 1:
            return known
        chosen = list(ours.values())[:_MAX_COMPARED]
        paths = {one.rank: f"{exchange.folder}/{archive_name(one.rank, joint.attempt)}" for one in chosen}
        names, _ = differing(exchange.storage, list(paths.values()), EVERYBODY_BYTES, joint.per_rank)
        for structure in {one.structure for one in chosen}:
            alike = [paths[one.rank] for one in chosen if one.structure == structure]
            _, alone = differing(exchange.storage, alike, EVERYBODY_BYTES, joint.per_rank)
            if alone:
                raise UnsupportedStateError(
                    f"only some ranks have {', '.join(alone[:5])}; have all of them save the same entries, or name what each has for "
                    "itself in per_rank=",
                    path=alone[0],
                )
        if names and not self._ranks.may_differ:
            raise UnsupportedStateError(
                f"not the same on all ranks: {', '.join(names[:5])}; name what each rank has for itself in per_rank=, or allow "
                'it with differing="keep"',
                path=names[0],
            )
        if names:
            more = f" and {len(names) - 5} more" if len(names) > 5 else ""
            _log.warning(
                "%s: not the same on all ranks, and so kept for each of them: %s%s. Name them in per_rank= if that is meant",
                exchange.storage.locate(exchange.folder),
                ", ".join(names[:5]),
                more,
            )
        return tuple(sorted({*known, *names}))

    def _structure_text(self, receipts: Sequence[Receipt], mates: Sequence[int]) -> str:
        for rank in mates:
            text = self._exchange.more_of(receipts[rank]).get("structure")
            if isinstance(text, str):
                return text
        raise CheckpointError(f"ranks {mates} do not say how their states look")

    async def hear(
        self, off_loop: OffLoop, check: Callable[[], None], seconds: float | None = None
    ) -> Manifest:
        """On ranks other than 0: what that has committed. Raises PeerFailedError for its verdict, and where there is none in time."""
        in_time = PEER_SECONDS + _MORE_SECONDS if seconds is None else seconds
        deadline = monotonic() + in_time
        remote = self._run.storage.remote
        for number, pause in enumerate(_looks(remote, self.world_size)):
            decision: Manifest | Verdict | None = None
            asks_for_verdict = not remote or number % _LOOKS_PER_VERDICT == 0
            with suppress(StorageUnavailableError):  # rank 0 may commit all the same
                decision = await off_loop(partial(self._exchange.decision, asks_for_verdict=asks_for_verdict))
            if isinstance(decision, Manifest):
                table = await off_loop(partial(self._table_after, decision))
                self._is_committed(table)
                return decision
            if decision is not None:
                self._ranks.decided(self._joint, decision.table)
                raise _peers_failed(self._joint.step, decision.causes)
            if monotonic() > deadline:
                break
            await _pause(pause, check)
        self._joint.is_followed = False
        raise PeerFailedError(
            f"step {self._joint.step}: rank 0 has not said in {in_time:.0f} s whether it is committed. It may "
            "be: look at what is committed when rank 0 is back",
            rank=0,
            undecided=True,
        )

    def _table_after(self, made: Manifest) -> Table:
        if made.ranks is None or made.ranks.table == self._joint.table.digest:
            return self._joint.table
        return table_of(self._run.storage, self._run.folder(made.step), made)

    def _is_committed(self, table: Table) -> None:
        if self._joint.structure is not None:
            self._ranks.compared.add(self._joint.structure.digest)
        self._ranks.decided(self._joint, table)

    def committed(self) -> None:
        """On rank 0: the manifest is there."""
        assert self._table is not None
        self._ranks.compared.update(self._table.classes)
        self._refused = self._ranks.decided_attempts(self._joint.step)
        self._is_committed(self._table)

    def afterwards(self) -> None:
        """On rank 0, when nobody waits any more: delete what each rank has said, which takes time where they are many."""
        with suppress(CheckpointError, OSError):  # they go with the step
            self._exchange.forget(self._refused)

    def refuse(self, error: BaseException) -> bool:
        """The save has failed on this rank. Whether its archive may be deleted: nobody can commit it any more."""
        self._joint.is_followed = False  # until `follow`
        if self.decides:
            if self.may_be_committed and not isinstance(error, StepExistsError):
                return False  # nobody knows whether it is
            rank, joint = 0, self._joint
            causes = tuple(joint.causes) or (Cause(rank, in_words(error)),)
            self._exchange.put_verdict(Verdict(joint.attempt, causes, joint.table))
            self._ranks.decided(joint, None)
            return True
        if not self._has_said_yes:
            told = Receipt(self._ranks.world.rank, is_ok=False)
            self._exchange.put_receipt(told, {"error": in_words(error)})
            return True
        # Rank 0 may still commit what has its yes.
        return self._joint.is_decided

    async def follow(self, off_loop: OffLoop, seconds: float | None = None) -> None:
        """This rank has no part in it any more: learn what is decided all the same."""
        if not self._joint.is_decided:
            self._joint.is_followed = True
            with suppress(CheckpointError, OSError):
                await self.hear(off_loop, lambda: None, seconds)


def _looks(is_remote: bool, num_ranks: int = 1) -> Iterator[float]:
    """Seconds to pause between looks at what so many ranks look at."""
    least = num_ranks / _MAX_LOOKS_PER_SECOND if is_remote else 0.0
    seconds = max(_FIRST_LOOK_SECONDS, least)
    while True:
        yield seconds * random.uniform(0.75, 1.25)
        seconds = min(1.5 * seconds, max(_LOOK_SECONDS[is_remote], least))


async def _pause(seconds: float, check: Callable[[], None]) -> None:
    check()
    await asyncio.sleep(seconds)


def _digest(copies: dict[str, dict[str, str]]) -> str:
    return block_digest(json.dumps(copies, sort_keys=True).encode()).hex()[:16]


def _peers_failed(step: int, causes: Sequence[Cause]) -> PeerFailedError:
    told = "; ".join(f"rank {cause.rank}: {cause.error}" for cause in causes[:5])
    more = f"; and {len(causes) - 5} more" if len(causes) > 5 else ""
    return PeerFailedError(
        f"step {step} is not committed: {told}{more}", rank=causes[0].rank if causes else 0, undecided=False
    )


def tell_of_failure(ranks: Ranks, joint: Joint, runs: Sequence[Run], error: BaseException) -> None:
    """The call of `save` has raised on this rank: tell the others, and learn what they decide. Does not wait for that."""
    ranks.failed(joint, error)
    if not joint.attempt:
        return  # nobody was told of an attempt
    worker = get_worker()

    async def tell(agreement: Agreement) -> None:
        with suppress(CheckpointError, OSError):
            await worker.off_loop(partial(agreement.refuse, error))
            await agreement.follow(worker.off_loop)

    for run in runs:
        worker.begin(tell(Agreement(ranks, joint, run)))


def listen_again(ranks: Ranks, runs: Sequence[Run], joint: Joint) -> None:
    """A save was given up undecided on this rank: rank 0 may have decided since. Does not wait for that."""
    joint.is_followed = True
    worker = get_worker()

    async def listen() -> None:
        for run in runs:
            await Agreement(ranks, joint, run).follow(worker.off_loop, SHARED_SECONDS)

    worker.begin(listen())
