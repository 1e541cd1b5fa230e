"""Receipts of the ranks of one attempt, and the objects of all ranks beside its manifest.

In: a storage and an attempt. Out: the ranks' reports on their archives. Knows nothing of: waiting.

    <step>/receipts.<attempt>/<rank>.json    details of a rank beyond its receipt, at the first save of a structure
    <step>/archives.<attempt>.bin      sizes and digests of the archives, 24 bytes for each rank, to be read by range
    <step>/layout.<attempt>.json       which ranks have states of which structure, and the tensors of each structure

Only rank 0 decides: its manifest is the commit. Receipts are exchanged through the store of the ranks. Earlier versions
put them as names of files, with a verdict.<attempt>.json; the sweep deletes these.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from types import MappingProxyType
from typing import Any, Final, NamedTuple, Self, TypeAlias

from ...errors import CheckpointError, CorruptCheckpointError
from ..fields import count, entries, items, row, table, text, whole
from ..format.digests import block_digest
from ..format.index import MAX_RANKS
from ..host.threads import run_together
from ..host.waits import SHARED_SECONDS
from ..slicing.locator import Classes
from ..storage.interface import Storage
from ..timing import TIMEKEEPER, monotonic
from .manifest import NAME as MANIFEST
from .manifest import Archive, Manifest, archive_name, missing_error, parse, seal, unseal


class Table(NamedTuple):
    """A summary of the ranks' states: which ranks have equal structures, and the names of values that differ.

    `of_some` are names that all ranks of one structure have and other ranks lack, such as those of a pipeline stage.
    """

    classes: Classes = MappingProxyType({})
    differing: tuple[str, ...] = ()
    of_some: Mapping[str, tuple[str, ...]] = MappingProxyType({})

    @property
    def digest(self) -> str:
        """The digest by which receipts name the table."""
        return block_digest(json.dumps(self.packed(), sort_keys=True).encode()).hex()[:16]

    def packed(self) -> dict[str, Any]:
        """The table as JSON. Ranks are ranges (first, number, step), so that it stays small with many ranks."""
        runs = {structure: list(as_ranges(ranks)) for structure, ranks in self.classes.items()}
        fields: dict[str, Any] = {"classes": runs, "differing": self.differing}
        return {**fields, "of_some": dict(self.of_some)} if self.of_some else fields

    @classmethod
    def unpacked(cls, raw: Mapping[str, Any]) -> Self:
        """The table in this JSON. Raises ValueError or KeyError if it is malformed."""
        of_run = (count, partial(count, at_most=MAX_RANKS), whole)
        runs = dict(entries(raw["classes"], partial(items, of=partial(row, of=of_run))))
        if sum(num for ranges in runs.values() for _, num, _ in ranges) > MAX_RANKS:
            raise ValueError("the table has too many ranks")
        classes = {
            structure: [first + step * n for first, num, step in ranges for n in range(num)]
            for structure, ranges in runs.items()
        }
        of_some = dict(entries(raw.get("of_some", {}), partial(items, of=text)))
        return cls(classes, items(raw["differing"], text), of_some)


EMPTY: Final = Table()
NO_TABLE: Final = "0" * 16
_LOOK_SECONDS: Final = 0.2  # between two looks at a folder that shows a file late
# Concurrent requests to a store.
_READS_IN_FLIGHT: Final = 128
_RECORD: Final = struct.Struct("<Q16s")
_ALL: Final = r"archives\.([0-9a-f]{8})\.bin"
_FOLDER: Final = r"receipts\.[0-9a-f]{8}"
_BESIDE: Final = r"verdict\.[0-9a-f]{8}\.json|layout\.[0-9a-f]{8}(\.rebuilt)?\.json|archives\.[0-9a-f]{8}\.bin"
Lent: TypeAlias = tuple[str, int, str]  # a group, and the step and the attempt that lend some of its tensors


def layout_name(attempt: str) -> str:
    return f"layout.{attempt}.json"


def attempt_of_all(name: str) -> str | None:
    """The attempt in the name of a list of all ranks' archives; None for any other name."""
    match = re.fullmatch(_ALL, name)
    return match and match[1]


def is_receipt_folder(name: str) -> bool:
    return re.fullmatch(_FOLDER, name) is not None


def is_beside(name: str) -> bool:
    """True for the name of an object that an attempt of several ranks writes beside its archives."""
    return re.fullmatch(_BESIDE, name) is not None


class Receipt(NamedTuple):
    """One rank's report on an attempt: its archive is durable.

    `table` is the digest of the Table by which the rank took its share, or `NO_TABLE` if it wrote everything that it
    holds. `structure` is the digest of its state's structure. `values` has two halves: the digest of the values that
    should be equal on all ranks, and of the values that should be equal on all ranks of its structure. `copies` is the
    digest of the values that the rank compared with other ranks in this save, `NO_TABLE` for none. The balances of all
    ranks that share add up (see `slicing.shares`). `seconds` is the time from the call until the archive was durable,
    and `stall_seconds` the stall of the training. `has_details`: the rank has put an object with more. `found` names
    tensors with values that are not finite. `lent` is what its archive refers to in earlier steps.
    """

    rank: int
    table: str = NO_TABLE
    structure: str = NO_TABLE
    values: str = "0" * 32
    copies: str = NO_TABLE
    digest: str = "0" * 32
    num_bytes: int = 0
    balance: int = 0
    seconds: float = 0.0
    stall_seconds: float = 0.0
    has_details: bool = False
    found: str = ""
    lent: Sequence[Lent] = ()


def spread_of(receipts: Sequence[Receipt]) -> dict[str, Any]:
    """The fields of an event about the spread of times: the slowest, the most stalled and the median rank."""
    by_time = sorted(receipts, key=lambda receipt: receipt.seconds)
    by_stall = sorted(receipts, key=lambda receipt: receipt.stall_seconds)
    return {
        "slowest_rank": by_time[-1].rank,
        "slowest_rank_seconds": by_time[-1].seconds,
        "median_rank_seconds": by_time[len(by_time) // 2].seconds,
        "most_stalled_rank": by_stall[-1].rank,
        "most_stalled_rank_seconds": by_stall[-1].stall_seconds,
        "median_rank_stall_seconds": by_stall[len(by_stall) // 2].stall_seconds,
    }


class Cause(NamedTuple):
    """The error because of which a rank could not do its part."""

    rank: int
    error: str


class Exchange:
    """The objects of one attempt at a step, at one root. All methods block, and may be called from any thread."""

    def __init__(self, storage: Storage, folder: str, attempt: str) -> None:
        self.storage, self.folder, self.attempt = storage, folder, attempt

    def put_details(self, rank: int, details: Mapping[str, Any]) -> None:
        """Put details of this rank beyond its receipt. Rank 0 reads them only through `details_of`."""
        self.storage.replace(self._details_of(rank), seal(details))

    def details_of(self, receipt: Receipt) -> Mapping[str, Any]:
        """The details that a rank put beyond its receipt; empty if none. Raises CorruptCheckpointError."""
        if not receipt.has_details:
            return {}
        path = self._details_of(receipt.rank)
        try:
            return table(unseal(self.storage.read(path)[0]))
        except (ValueError, FileNotFoundError) as error:
            raise CorruptCheckpointError(f"{path}: {error}", path=path) from error

    def forget(self) -> None:
        """Delete all details, once the attempt is decided."""
        self.storage.delete_all(f"{self.folder}/receipts.{self.attempt}")

    def _details_of(self, rank: int) -> str:
        return f"{self.folder}/receipts.{self.attempt}/{rank:05d}.json"

    def manifest(self) -> Manifest | None:
        """The step's manifest, if it is of this attempt or one that replaced it; else None."""
        path = f"{self.folder}/{MANIFEST}"
        try:
            manifest = parse(self.storage.read(path)[0], path=path)
        except FileNotFoundError:
            return None
        return manifest if self.attempt in (manifest.attempt, *manifest.replaces) else None

    def missing_archive(self, world_size: int) -> int | None:
        """The first rank whose archive is not there, though that rank has written it; None if all are there."""
        rank_of = {archive_name(rank, self.attempt): rank for rank in range(world_size)}
        deadline = monotonic() + SHARED_SECONDS
        while missing := rank_of.keys() - self.storage.listed(self.folder, [*rank_of]):
            name = min(missing, key=rank_of.__getitem__)
            if rank_of[name] == 0 or monotonic() > deadline or not self._is_there(f"{self.folder}/{name}"):
                return rank_of[name]
            TIMEKEEPER.sleep(_LOOK_SECONDS)
        return None

    def _is_there(self, path: str) -> bool:
        """Whether an object exists that a listing does not show.

        A shared folder may hide for a while what other machines have written. But it refuses a new file of a name that
        exists: if it takes one, the object was written to another folder, or deleted.
        """
        if self.storage.remote:
            return self.storage.exists(path)
        try:
            self.storage.put_new(path, b"")
        except FileExistsError:
            return True
        self.storage.delete(path)
        return False

    # --- the objects that the manifest names ------------------------------------------------------------------

    def put_archives(self, receipts: Sequence[Receipt]) -> Archive:
        """Put the list of the archives: sizes and digests, in the order of ranks."""
        data = b"".join(_RECORD.pack(receipt.num_bytes, bytes.fromhex(receipt.digest)) for receipt in receipts)
        return self._put(f"archives.{self.attempt}.bin", data)

    def put_layout(self, text: bytes) -> Archive:
        """Put the layout, which `layouts` describes."""
        return self._put(layout_name(self.attempt), text)

    def _put(self, name: str, data: bytes) -> Archive:
        self.storage.replace(f"{self.folder}/{name}", data)
        return Archive(name, len(data), block_digest(data).hex())


def archives_of(storage: Storage, folder: str, manifest: Manifest) -> tuple[Archive, ...]:
    """All archives of a commit, in the order of ranks. Raises CorruptCheckpointError."""
    return archives_in(storage, folder, manifest.lenders, manifest.step)


def archives_in(storage: Storage, folder: str, archives: Sequence[Archive], named_by: int) -> tuple[Archive, ...]:
    """The archives that a manifest names, directly or by the list of the archives of all ranks."""
    attempt = re.fullmatch(_ALL, archives[0].name) if len(archives) == 1 else None
    if attempt is None:
        return tuple(archives)
    data = read_beside(storage, folder, archives[0], named_by)
    if not data or len(data) % _RECORD.size:
        path = storage.locate(f"{folder}/{archives[0].name}")
        raise CorruptCheckpointError(f"{path}: {len(data)} bytes are not a list of archives", path=path)
    return tuple(
        Archive(archive_name(rank, attempt[1]), num_bytes, digest.hex())
        for rank, (num_bytes, digest) in enumerate(_RECORD.iter_unpack(data))
    )


def broken_folders(storage: Storage, manifests: Mapping[str, Manifest]) -> dict[str, str]:
    """The broken steps, by folder, each with a description of the first wrong object. A step is broken if an object of
    its own, or one that it borrows from, is missing or has another size than its manifest says. Every report of broken
    steps uses this check.

    `storage` is the root. Archives are not read, except the tables of compressed ones. A missing layout does not make a
    step broken, since it loads without. Steps that are deleted or replaced during the check are left out.
    """
    wanted: dict[str, list[tuple[str, Archive]]] = {}
    wrong: dict[str, str] = {}

    def expand(folder: str, manifest: Manifest) -> None:
        lists: dict[tuple[str, str], list[Archive]] = {(folder, ""): [*manifest.lenders]}
        for lent in manifest.elsewhere:
            lists.setdefault((lent.folder, lent.group), []).append(lent.archive)
        try:
            wanted[folder] = [
                (holder, archive)
                for (holder, _), archives in lists.items()
                for archive in archives_in(storage, holder, archives, manifest.step)
            ]
        except CorruptCheckpointError as error:
            wrong[folder] = str(error)

    def look(folder: str) -> None:
        sizes[folder] = {**storage.sizes(folder)}

    def look_inside(folder: str, archive: Archive) -> None:
        from ..storage.compressed import open_decompressed  # lazy: not needed for an intact run at its first place

        path = f"{folder}/{archive.name}"
        with suppress(FileNotFoundError, IsADirectoryError, CorruptCheckpointError), storage.open(path) as reader:
            sizes[folder][archive.name] = open_decompressed(reader, path).num_bytes

    look_all(storage, [partial(expand, *pair) for pair in manifests.items()])
    sizes: dict[str, dict[str, int]] = {holder: {} for objects in wanted.values() for holder, _ in objects}
    look_all(storage, [partial(look, folder) for folder in sizes])
    of_other_sizes = {
        (holder, archive)
        for objects in wanted.values()
        for holder, archive in objects
        if sizes[holder].get(archive.name, archive.num_bytes) != archive.num_bytes
    }
    look_all(storage, [partial(look_inside, *pair) for pair in of_other_sizes])
    for folder, objects in wanted.items():
        for holder, archive in objects:
            found = sizes[holder].get(archive.name)
            if found != archive.num_bytes:
                name = archive.name if holder == folder else f"{holder}/{archive.name}, which it borrows from,"
                has = "is missing" if found is None else f"has {found:,} bytes and should have {archive.num_bytes:,}"
                wrong[folder] = f"{name} {has}"
                break
    return {folder: text for folder, text in wrong.items() if _is_still(storage, folder, manifests[folder])}


def look_all(storage: Storage, tasks: Sequence[Callable[[], None]]) -> None:
    """Run tasks that make requests, in parallel at a store. Raises the error of one of them."""
    if storage.remote:
        run_together("look", tasks, max_threads=_READS_IN_FLIGHT)
    else:
        for task in tasks:
            task()


def _is_still(storage: Storage, folder: str, manifest: Manifest) -> bool:
    try:
        return parse(storage.read(f"{folder}/{MANIFEST}")[0], path=folder) == manifest
    except (FileNotFoundError, CheckpointError):
        return False


def table_of(storage: Storage, folder: str, manifest: Manifest) -> Table:
    """The table of a commit. Raises CorruptCheckpointError."""
    if manifest.ranks is None:
        return Table()
    data = read_beside(storage, folder, manifest.ranks.layout, manifest.step)
    try:
        return Table.unpacked(table(unseal(data)))
    except (ValueError, KeyError) as error:
        path = storage.locate(f"{folder}/{manifest.ranks.layout.name}")
        raise CorruptCheckpointError(f"{path}: {error!r:.300}", path=path) from error


def read_beside(storage: Storage, folder: str, archive: Archive, named_by: int) -> bytes:
    """The content of an object that a manifest names beside its archives. Raises CorruptCheckpointError."""
    path = f"{folder}/{archive.name}" if folder else archive.name
    try:
        data = storage.read(path)[0]
    except FileNotFoundError as error:
        raise missing_error(storage.locate(path), named_by) from error
    if block_digest(data).hex() != archive.digest:
        shown = storage.locate(path)
        raise CorruptCheckpointError(
            f"{shown} does not match the digest in its manifest; load an earlier checkpoint", path=shown
        )
    return data


def as_ranges(ranks: Sequence[int]) -> Iterable[list[int]]:
    """Encode ascending numbers as ranges (first, number, step)."""
    at = 0
    while at < len(ranks):
        step = ranks[at + 1] - ranks[at] if at + 1 < len(ranks) else 1
        stop = at + 1
        while stop < len(ranks) and ranks[stop] - ranks[stop - 1] == step:
            stop += 1
        yield [ranks[at], stop - at, step]
        at = stop
