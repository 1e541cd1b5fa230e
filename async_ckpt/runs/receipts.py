"""Messages of the ranks of one attempt on storage: receipts, a verdict, and the lists that a manifest leaves to others.

In: a storage and an attempt. Out: who has done what, and what was decided. Knows nothing of: who waits for whom.

    <step>/receipts.<attempt>/<rank>.<table>.<structure>.<values>.<copies>.<digest>.<size>.<balance>.<ok|err>
                                       one small object per rank
    <step>/verdict.<attempt>.json      rank 0's no: the manifest of this attempt will never be put
    <step>/archives.<attempt>.bin      sizes and digests of the archives, 24 bytes for each rank, to be read by range
    <step>/layout.<attempt>.json       which ranks have states of which structure, and the tensors of each structure

Only rank 0 decides: its manifest is the yes. A receipt says by its name all that rank 0 needs as long as nothing is new;
one listing has them all.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, Final, NamedTuple, Self

from ..errors import CorruptCheckpointError
from ..fields import count, entries, items, row, table, text, whole
from ..format.digests import block_digest
from ..format.index import MAX_RANKS
from ..slicing.locator import Classes
from ..storage.interface import Storage
from .manifest import NAME as MANIFEST
from .manifest import Archive, Manifest, archive_name, missing, parse, seal, unseal


class Table(NamedTuple):
    """Knowledge of the ranks' states: which ranks have states alike, and the names of what differs all the same.

    `of_some` are names of what ranks of a structure have and not all ranks, as of a stage of a pipeline.
    """

    classes: Classes = MappingProxyType({})
    differing: tuple[str, ...] = ()
    of_some: Mapping[str, tuple[str, ...]] = MappingProxyType({})

    @property
    def digest(self) -> str:
        """The digest that a table is known by."""
        return block_digest(json.dumps(self.packed(), sort_keys=True).encode()).hex()[:16]

    def packed(self) -> dict[str, Any]:
        """As JSON: ranks as runs (first, how many, step), of which there are few however many ranks there are."""
        runs = {structure: list(_runs(ranks)) for structure, ranks in self.classes.items()}
        fields: dict[str, Any] = {"classes": runs, "differing": self.differing}
        return {**fields, "of_some": dict(self.of_some)} if self.of_some else fields

    @classmethod
    def unpacked(cls, raw: Mapping[str, Any]) -> Self:
        """Raises ValueError or KeyError for what is no table."""

        def ranks(raw: object) -> list[int]:
            runs = items(raw, partial(row, of=(count, partial(count, at_most=MAX_RANKS), whole)))
            if sum(num for _, num, _ in runs) > MAX_RANKS:
                raise ValueError("it has more ranks than there can be")
            return [first + step * n for first, num, step in runs for n in range(num)]

        classes = dict(entries(raw["classes"], ranks))
        of_some = dict(entries(raw.get("of_some", {}), partial(items, of=text)))
        return cls(classes, items(raw["differing"], text), of_some)


EMPTY: Final = Table()  # nothing is known
NO_TABLE: Final = "0" * 16
_RECORD: Final = struct.Struct("<Q16s")
_NAME: Final = re.compile(
    r"(\d{5,8})\.([0-9a-f]{16})\.([0-9a-f]{16})\.([0-9a-f]{32})\.([0-9a-f]{16})\.([0-9a-f]{32})\.(\d{1,18})\.([0-9a-f]{16})\.(ok|err)"
)
_ALL: Final = re.compile(r"archives\.([0-9a-f]{8})\.bin")
_FOLDER: Final = re.compile(r"receipts\.[0-9a-f]{8}")
_BESIDE: Final = re.compile(
    r"verdict\.[0-9a-f]{8}\.json|layout\.[0-9a-f]{8}(\.rebuilt)?\.json|archives\.[0-9a-f]{8}\.bin"
)


def attempt_of_all(name: str) -> str | None:
    """The attempt, if this is the name of what tells of the archives of all ranks."""
    match = _ALL.fullmatch(name)
    return match and match[1]


def is_folder_of_receipts(name: str) -> bool:
    return _FOLDER.fullmatch(name) is not None


def is_beside(name: str) -> bool:
    """Whether it is the name of what an attempt of several ranks has beside its archives."""
    return _BESIDE.fullmatch(name) is not None


class Receipt(NamedTuple):
    """One rank's report on an attempt. Its archive is durable, if it is `ok`; else it has none.

    `table` is the digest of the classes by which it has taken its share, `NO_TABLE` if it wrote all that it holds;
    `structure`, `values` and `copies` are digests of how its state looks, of what all ranks should have alike (and, in the other
    half, of what those of its structure should, which others do not have), and of what it has compared with other ranks this
    time (`NO_TABLE` for nothing). Of those who share, the balances add up (`slicing.shares`).
    """

    rank: int
    table: str = NO_TABLE
    structure: str = NO_TABLE
    values: str = "0" * 32
    copies: str = NO_TABLE
    digest: str = "0" * 32
    num_bytes: int = 0
    is_ok: bool = True
    balance: int = 0

    @property
    def name(self) -> str:
        end = "ok" if self.is_ok else "err"
        return f"{self.rank:05d}.{self.table}.{self.structure}.{self.values}.{self.copies}.{self.digest}.{self.num_bytes}.{self.balance:016x}.{end}"

    @classmethod
    def named(cls, name: str) -> Receipt | None:
        """The receipt of a name; None for any other name."""
        match = _NAME.fullmatch(name)
        if match is None:
            return None
        rank, table, structure, values, copies, digest, num_bytes, balance, end = match.groups()
        size, is_ok = int(num_bytes), end == "ok"
        return cls(int(rank), table, structure, values, copies, digest, size, is_ok, int(balance, 16))


class Cause(NamedTuple):
    """Why a rank could not do its part."""

    rank: int
    error: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """Rank 0's no to an attempt, and what is known of the ranks' states for the next one."""

    attempt: str
    causes: tuple[Cause, ...]
    table: Table = EMPTY

    def packed(self) -> dict[str, Any]:
        """As JSON."""
        return {"attempt": self.attempt, "causes": self.causes, "table": self.table.packed()}

    @classmethod
    def unpacked(cls, raw: Mapping[str, Any]) -> Self:
        causes = items(raw["causes"], lambda cause: Cause(*row(cause, of=(count, text))))
        return cls(text(raw["attempt"]), causes, Table.unpacked(table(raw["table"])))


class Exchange:
    """The objects of one attempt at a step, at one root. Blocking calls."""

    def __init__(self, storage: Storage, folder: str, attempt: str) -> None:
        self.storage, self.folder, self.attempt = storage, folder, attempt
        self._receipts = self._receipts_of(attempt)

    # --- receipts ---------------------------------------------------------------------------------------------

    def put_receipt(self, receipt: Receipt, details: Mapping[str, Any]) -> None:
        """Say what this rank has done; `more` is read only where it is asked for."""
        self.storage.replace(f"{self._receipts}/{receipt.name}", seal(details))

    def receipts(self) -> dict[int, Receipt]:
        """The receipts that are there, by rank. If one rank has two, the one that says no."""
        receipts: dict[int, Receipt] = {}
        for name in self.storage.names(self._receipts):
            receipt = Receipt.named(name)
            if receipt is not None and (receipt.rank not in receipts or not receipt.is_ok):
                receipts[receipt.rank] = receipt
        return receipts

    def more_of(self, receipt: Receipt) -> Any:
        """The content of a receipt, beside its name. Raises CorruptCheckpointError."""
        path = f"{self._receipts}/{receipt.name}"
        try:
            return unseal(self.storage.read(path)[0])
        except ValueError as error:
            raise CorruptCheckpointError(f"{path}: {error}", path=path) from error

    def forget(self, refused: Iterable[str]) -> None:
        """The attempt is committed, by all ranks: they need neither its receipts any more, nor what is left of refused attempts.

        Not before: as long as one of them may still be late, it would put its receipt into a folder that goes away.
        """
        self.storage.delete_all(self._receipts)
        for attempt in refused:
            self.storage.delete_all(self._receipts_of(attempt))
            self.storage.delete(self._verdict_of(attempt))

    def _receipts_of(self, attempt: str) -> str:
        return f"{self.folder}/receipts.{attempt}"

    # --- what is decided --------------------------------------------------------------------------------------

    def decision(self, *, asks_for_verdict: bool = True) -> Manifest | Verdict | None:
        """The manifest of this very attempt, or one that has replaced it; the verdict on it, unless that is not asked for;
        None as long as neither is there.
        """
        path = f"{self.folder}/{MANIFEST}"
        try:
            manifest = parse(self.storage.read(path)[0], path=path)
        except FileNotFoundError:
            pass
        else:
            if self.attempt in (manifest.attempt, *manifest.replaces):
                return manifest
        return self.verdict() if asks_for_verdict else None

    def verdict(self) -> Verdict | None:
        path = self._verdict_of(self.attempt)
        try:
            return Verdict.unpacked(table(unseal(self.storage.read(path)[0])))
        except FileNotFoundError:
            return None
        except (ValueError, KeyError) as error:
            raise CorruptCheckpointError(f"{path}: {error}", path=path) from error

    def put_verdict(self, verdict: Verdict) -> None:
        """Create-only: an attempt is decided once."""
        try:
            self.storage.put_new(self._verdict_of(self.attempt), seal(verdict.packed()))
        except FileExistsError:
            pass

    def _verdict_of(self, attempt: str) -> str:
        return f"{self.folder}/verdict.{attempt}.json"

    # --- what the manifest leaves to others -------------------------------------------------------------------

    def put_archives(self, receipts: Sequence[Receipt]) -> Archive:
        """Sizes and digests of the archives, in the order of ranks."""
        data = b"".join(
            _RECORD.pack(receipt.num_bytes, bytes.fromhex(receipt.digest)) for receipt in receipts
        )
        return self._put(f"archives.{self.attempt}.bin", data)

    def put_layout(self, text: bytes) -> Archive:
        """See `layouts`."""
        return self._put(f"layout.{self.attempt}.json", text)

    def _put(self, name: str, data: bytes) -> Archive:
        self.storage.replace(f"{self.folder}/{name}", data)
        return Archive(name, len(data), block_digest(data).hex())


def archives_of(storage: Storage, folder: str, manifest: Manifest) -> tuple[Archive, ...]:
    """All archives of a commit, in the order of ranks. Raises CorruptCheckpointError."""
    return archives_in(storage, folder, manifest.lenders, manifest.step)


def archives_in(
    storage: Storage, folder: str, archives: Sequence[Archive], named_by: int
) -> tuple[Archive, ...]:
    """These archives, which the manifest of a step names; or where they are what tells of those of all ranks, these, in their order."""
    attempt = _ALL.fullmatch(archives[0].name) if len(archives) == 1 else None
    if attempt is None:
        return tuple(archives)
    data = _read(storage, folder, archives[0], named_by)
    if not data or len(data) % _RECORD.size:
        path = storage.locate(f"{folder}/{archives[0].name}")
        raise CorruptCheckpointError(f"{path}: {len(data)} bytes do not tell of whole archives", path=path)
    return tuple(
        Archive(archive_name(rank, attempt[1]), num_bytes, digest.hex())
        for rank, (num_bytes, digest) in enumerate(_RECORD.iter_unpack(data))
    )


def table_of(storage: Storage, folder: str, manifest: Manifest) -> Table:
    """A commit's knowledge of the ranks' states. Raises CorruptCheckpointError."""
    if manifest.ranks is None:
        return Table()
    data = _read(storage, folder, manifest.ranks.layout, manifest.step)
    try:
        return Table.unpacked(table(unseal(data)))
    except (ValueError, KeyError) as error:
        path = storage.locate(f"{folder}/{manifest.ranks.layout.name}")
        raise CorruptCheckpointError(f"{path}: {error!r:.300}", path=path) from error


def _read(storage: Storage, folder: str, archive: Archive, named_by: int) -> bytes:
    path = f"{folder}/{archive.name}" if folder else archive.name
    try:
        data = storage.read(path)[0]
    except FileNotFoundError as error:
        raise missing(storage.locate(path), named_by) from error
    if block_digest(data).hex() != archive.digest:
        shown = storage.locate(path)
        raise CorruptCheckpointError(
            f"{shown}: it is not what its manifest names; load an earlier checkpoint", path=shown
        )
    return data


def _runs(ranks: Sequence[int]) -> Iterable[list[int]]:
    at = 0
    while at < len(ranks):
        step = ranks[at + 1] - ranks[at] if at + 1 < len(ranks) else 1
        stop = at + 1
        while stop < len(ranks) and ranks[stop] - ranks[stop - 1] == step:
            stop += 1
        yield [ranks[at], stop - at, step]
        at = stop
