"""Rank 0's comparison of the receipts of all ranks, once it has them all.

In: receipts, in the order of ranks. Out: what the manifest must name; or an error that says how the ranks differ. Knows
nothing of: how ranks wait for each other.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final

from ...errors import CheckpointError, PeerFailedError, UnsupportedStateError
from ..runs import layouts
from ..runs.coverage import check_coverage, own_names
from ..runs.manifest import RankFiles, archive_name
from ..runs.receipts import NO_TABLE, Exchange, Receipt, Table, look_all
from ..slicing.locator import Classes, StepLayout
from ..slicing.shares import EVERYBODY_BYTES, MODULUS
from ..spec import DTYPES, some_of
from .calls import JointSave
from .peers import Ranks
from .shared_values import Values, apart, differing, lacking, values_of

# How many archives rank 0 reads where the values of ranks differ.
_MAX_COMPARED: Final = 64

_log = logging.getLogger("async_ckpt")


class Comparison:
    """The comparison of one save at one root. `Agreement` creates it on rank 0. Its methods block."""

    def __init__(self, ranks: Ranks, joint: JointSave, exchange: Exchange) -> None:
        self._ranks, self._joint, self._exchange = ranks, joint, exchange
        self._per_rank: tuple[str, ...] = ()  # as named by any rank

    def compare(self, receipts: Sequence[Receipt]) -> tuple[Table, Mapping[str, str], RankFiles]:
        """Check that the archives are of one state, and have all of it; then write the files that the manifest must
        name.

        Returns the table that holds from then on, the structures of the ranks, and the files that the manifest must
        name. Raises PeerFailedError, UnsupportedStateError.
        """
        known = self._ranks.known
        classes: dict[str, list[int]] = {}
        for receipt in receipts:
            classes.setdefault(receipt.structure, []).append(receipt.rank)
        # A local dict, since another save, which arrived late at another root, may be compared at the same time.
        texts = {
            digest: known.texts.get(digest) or self._structure_text(receipts, mates)
            for digest, mates in classes.items()
        }
        tables = {receipt.table for receipt in receipts} - {NO_TABLE}
        if tables - {self._joint.table.digest}:
            raise PeerFailedError(
                f"{self._joint.what} is not committed: its ranks disagree on who writes which data, as after a save "
                "that only some ranks called; make the same calls of save on every rank",
                rank=0,
            )
        covered = Table(classes).digest
        own = known.covered.get(covered)
        if own is None:
            check_coverage(classes, texts)
            own = own_names(texts)
            known.covered = {covered: own}
        part = self._joint.part
        assert part is not None
        self._per_rank = tuple(sorted({*part.per_rank, *own}))
        self._check_shares(receipts, texts)
        self._check_balances(receipts)
        is_each = part.copies is not None
        self._compare_copies([receipt for receipt in receipts if is_each or receipt.structure not in known.compared])
        table = self._compare_values(receipts, classes)
        archives = self._exchange.put_archives(receipts)
        shared = {structure: mates for structure, mates in self._joint.table.classes.items() if structure in texts}
        root = self._ranks.divider.root_mesh
        divided = StepLayout(table.classes, texts, shared, root, of_some=table.of_some)
        layout = self._exchange.put_layout(layouts.dump(divided, table))
        num_bytes = sum(receipt.num_bytes for receipt in receipts)
        per_rank = tuple(sorted({*self._per_rank, *table.differing}))
        return table, texts, RankFiles(archives, layout, table.digest, num_bytes, per_rank)

    def _check_shares(self, receipts: Sequence[Receipt], texts: Mapping[str, str]) -> None:
        """Check that ranks which share tensors all still have them, since each wrote only its share and relied on the
        others.

        Raises UnsupportedStateError.
        """
        for structure, mates in self._joint.table.classes.items():
            if not any(receipts[rank].structure == structure and receipts[rank].table != NO_TABLE for rank in mates):
                continue
            others: dict[str, int] = {}  # other structures, and the lowest rank that has each
            for rank in mates:
                others.setdefault(receipts[rank].structure, rank)
            others.pop(structure, None)
            for other, rank in others.items():
                gone = _tensors(texts[structure]) - _tensors(texts[other])
                if gone:
                    name = json.loads(min(gone))[0].replace("\x1f", ".")
                    raise UnsupportedStateError(
                        f"rank {rank} no longer has {name} in the form that other ranks expect; change the state on "
                        "every rank at the same step, and save again",
                        path=name,
                    )

    def _check_balances(self, receipts: Sequence[Receipt]) -> None:
        """Check that ranks which share tensors have together written all of them. The division of shares guarantees
        this. The check ensures that a step with holes is never committed, even after an error in that division. Raises
        CheckpointError.
        """
        for structure, mates in self._joint.table.classes.items():
            theirs = [receipts[rank] for rank in mates]
            are_all = all(receipt.structure == structure and receipt.table != NO_TABLE for receipt in theirs)
            if are_all and sum(receipt.balance for receipt in theirs) % MODULUS:
                raise CheckpointError(
                    f"{self._joint.what}: {len(mates)} ranks, the first of them {mates[0]}, disagree "
                    "on how to split replicated tensors, "
                    "so that some bytes would be missing; please report this, and how their calls and states differ"
                )

    def _compare_copies(self, receipts: Sequence[Receipt]) -> None:
        """Check that replicas of a tensor are equal on all ranks. Raises UnsupportedStateError, naming the tensor."""
        first: dict[tuple[str, str], tuple[int, str]] = {}
        copies: dict[int, Any] = {}
        distinct: dict[str, Receipt] = {}  # the lowest rank of those with equal digests
        for receipt in receipts:
            distinct.setdefault(receipt.copies, receipt)

        def read(receipt: Receipt) -> None:
            copies[receipt.rank] = self._exchange.details_of(receipt).get("copies") or {}

        look_all(self._exchange.storage, [partial(read, receipt) for receipt in distinct.values()])
        for rank in sorted(copies):
            for part, tensors in copies[rank].items():
                for name, digest in tensors.items():
                    other, there = first.setdefault((part, name), (rank, digest))
                    if there != digest:
                        raise UnsupportedStateError(
                            f"{name} should be the same on ranks {other} and {rank}, but differs: ranks that hold the "
                            "same part of a tensor (for a plain tensor, all ranks) must have the same values. If each "
                            "rank holds a part of a larger tensor, such as its experts, declare that with "
                            "async_ckpt.sharded; if each rank has its own tensor, name its group in per_rank=",
                            path=name,
                        )

    def _compare_values(self, receipts: Sequence[Receipt], classes: Classes) -> Table:
        """The table that follows from the values and small tensors of the ranks: the names that differ, with one
        warning, and the names that only ranks of some structures have. Archives are read only if something has changed
        in these values.

        Raises UnsupportedStateError if differences are not allowed, or if only some ranks with the same tensors have an
        entry.
        """
        joint, exchange = self._joint, self._exchange
        known = joint.table.differing
        ours: dict[tuple[str, str], Receipt] = {}
        for receipt in receipts:
            ours.setdefault((receipt.structure, receipt.values), receipt)
        if len(ours) == len(classes) and len({digest[:16] for _, digest in ours}) == 1:
            return Table(classes, known, {one: names for one, names in joint.table.of_some.items() if one in classes})
        values: dict[int, Values] = {}

        def read(rank: int) -> None:
            path = f"{exchange.folder}/{archive_name(rank, joint.attempt)}"
            values[rank] = values_of(exchange.storage, path, EVERYBODY_BYTES, self._per_rank)

        chosen = list(ours.values())[:_MAX_COMPARED]
        look_all(exchange.storage, [partial(read, one.rank) for one in chosen])
        by_structure: dict[str, list[Values]] = {}
        for one in chosen:
            by_structure.setdefault(one.structure, []).append(values[one.rank])
        for alike in by_structure.values():
            alone = lacking(alike, alike[0].plain) or lacking(alike[:1], {name for one in alike for name in one.plain})
            if alone:
                raise UnsupportedStateError(
                    f"only some ranks have {', '.join(alone[:5])}; save the same entries on all ranks, or name the "
                    "entries of each rank in per_rank=",
                    path=alone[0],
                )
        common = set[str].intersection(*(set(alike[0].plain) for alike in by_structure.values()))
        of_some = {one: apart(alike[0].plain, common) for one, alike in by_structure.items()}
        names = differing(list(values.values()))
        self._report_differing(names)
        return Table(classes, tuple(sorted({*known, *names})), {one: there for one, there in of_some.items() if there})

    def _report_differing(self, names: Sequence[str]) -> None:
        """Warn of names that differ between ranks. Raises UnsupportedStateError if differences are not allowed."""
        exchange = self._exchange
        if names and not self._ranks.may_differ:
            raise UnsupportedStateError(
                f"not the same on all ranks: {', '.join(names[:5])}; name the values of each rank in "
                'per_rank=, or allow differences with differing="keep"',
                path=names[0],
            )
        if names:
            _log.warning(
                "%s: not the same on all ranks, so the step keeps one for each rank: %s. Name them in per_rank= if "
                "that is intended; declare shards of larger tensors by async_ckpt.sharded",
                exchange.storage.locate(exchange.folder),
                some_of(names, 5),
            )

    def _structure_text(self, receipts: Sequence[Receipt], mates: Sequence[int]) -> str:
        for rank in mates:
            text = self._exchange.details_of(receipts[rank]).get("structure")
            if isinstance(text, str):
                return text
        raise CheckpointError(f"ranks {mates} do not describe their states")


def _tensors(text: str) -> set[str]:
    """The lines of a structure that describe tensors."""
    return {line for line in text.splitlines() if json.loads(line)[1] in DTYPES}
