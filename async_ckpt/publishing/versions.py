"""The versions at a root: which are there, what is in each, which are needed, and who may add one.

In: a storage. Out: indices, the way from what somebody has to what is wanted, and the bytes. Knows nothing of: replicas.

A version is there when its index is, which is written last. Its base is another one; a chain of them ends at an anchor.
"""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Final, NamedTuple

import xxhash

from ..errors import CheckpointError, ClosedError, CorruptCheckpointError, NotCommittedError
from ..format import safetensors
from ..format.delta import (
    INDEX,
    VersionIndex,
    checksum,
    folder_of,
    identity_of,
    parse,
    stays_inside,
    structure_of,
    version_of,
)
from ..host.threads import Crew
from ..spec import DTYPES, MIB
from ..storage.base import Reader, Storage
from ..storage.disk import sync_folder, translated
from ..storage.locks import temps_of
from ..storage.scratch import Scratch

_CHUNK_BYTES: Final = 4 * MIB
# Which publisher adds versions: the one that has written this last.
_OWNER: Final = "publisher.json"
# In a store: which folders it is about to fill or to delete.
_UNFINISHED: Final = "unfinished.json"
# What others publish as a full version may be this alone.
_SINGLE: Final = "model.safetensors"


@dataclass(frozen=True, slots=True)
class State:
    """Which weights somebody has: `checksums` of all tensors by name."""

    version: int
    identity: str
    structure: str
    checksums: dict[str, str] = field(repr=False)

    def is_base_of(self, index: VersionIndex) -> bool:
        """Whether a delta can be applied to them."""
        return self.version == index.base and index.base_identity in ("", self.identity)

    def is_version(self, index: VersionIndex) -> bool:
        """Whether these are its weights already."""
        return self.version == index.version and index.identity in ("", self.identity)


class Versions:
    """What is at one root. From any thread."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        self._known: dict[int, VersionIndex] = {}  # of versions that were there; under _lock
        self._lock = threading.Lock()

    @property
    def root(self) -> str:
        return self.storage.locate("")

    def numbers(self, names: Iterable[str] | None = None) -> list[int]:
        """The versions that are whole, ascending: one listing, unless the names there are given, and a question for each
        that was not seen before.
        """
        there = self.storage.names("") if names is None else names
        found = {number for name in there if (number := version_of(name)) is not None}
        with self._lock:
            self._known = {number: index for number, index in self._known.items() if number in found}
            known = set(self._known)
        asked = {f"{folder_of(number)}/{INDEX}": number for number in sorted(found - known)}
        seen = {asked[path] for path in (self.storage.existing(list(asked)) if asked else ())}
        bare = {number for number in asked.values() if number not in seen and self._bare(number) is not None}
        return sorted(known | seen | bare)

    def _bare(self, number: int) -> VersionIndex | None:
        """What says as much as an index of a version that others have published as one file, without one; None if it is no such.

        Only on a disk, where folders are renamed to their place: in a store the index tells that all of it is there.
        """
        if self.storage.remote:
            return None
        index = VersionIndex(number, {"": _SINGLE})
        try:
            return replace(index, files=dict.fromkeys(Source(self.storage, index).held_in(_SINGLE), _SINGLE))
        except CorruptCheckpointError:
            return None

    def read(self, number: int, *, wanted_by: str = "", fresh: bool = False) -> VersionIndex:
        """Raises NotCommittedError if it is not there, and CorruptCheckpointError for what is no index of it.

        What was read before is believed, unless it is to be `fresh`: somebody may have emptied the root and begun again.
        """
        with self._lock:
            known = None if fresh else self._known.get(number)
        path = f"{folder_of(number)}/{INDEX}"
        if known is not None:
            return known
        try:
            index = parse(self.storage.read(path)[0], number)
        except FileNotFoundError:
            bare = self._bare(number)
            if bare is not None:
                return bare
            with self._lock:
                self._known.pop(number, None)
            there = self.numbers()
            told = f"there are {there[0]} to {there[-1]}" if there else "there is none"
            raise NotCommittedError(
                f"{self.root}: version {number} is not there{wanted_by}; {told}", path=self.root, step=number
            ) from None
        except ValueError as error:
            where = self.storage.locate(path)
            raise CorruptCheckpointError(
                f"{where}: {error}; fetch or publish it again", path=where
            ) from error
        with self._lock:
            self._known[number] = index
        return index

    def chain(self, target: int, state: State | None) -> list[VersionIndex]:
        """What to apply to a state, or from nothing on, to have a version: in this order. Empty if it is there already.

        Raises NotCommittedError where one is missing, and CorruptCheckpointError.
        """
        steps: list[VersionIndex] = []
        number, wanted_by = target, ""
        while True:
            index = self.read(number, wanted_by=wanted_by, fresh=True)
            if state is not None and state.is_version(index):
                break
            steps.append(index)
            if index.base is None or (state is not None and state.is_base_of(index)):
                break
            wanted_by = f", and version {number} is a delta against it"
            number = index.base
        return steps[::-1]

    def is_complete(self, number: int) -> bool:
        """Whether a version is there, and all that it is built on."""
        there, at = self.numbers(), number
        with suppress(CheckpointError):  # of an index that is damaged
            while at in there:
                base = self.read(at).base
                if base is None:
                    return True
                at = base
        return False

    def is_ours(self, number: int) -> bool:
        """Whether a publisher of this library has made it, as far as one can tell."""
        try:
            return bool(self.read(number).identity)
        except CheckpointError:
            return False

    def start_of(self, number: int) -> str:
        """In which start of all ranks it was published; empty if nobody can tell."""
        try:
            return self.read(number).start
        except CheckpointError:
            return ""

    def needed_by(self, kept: Sequence[int]) -> set[int]:
        """These versions, and all that their chains need, as far as they can be followed."""
        needed: set[int] = set()
        for number in kept:
            at: int | None = number
            while at is not None and at not in needed:
                needed.add(at)
                try:
                    at = self.read(at).base
                except CheckpointError:
                    break
        return needed

    def delete(self, numbers: Sequence[int]) -> None:
        """Each at once, or the index first, so that nobody takes what is left for a version; the newest first, whose base it
        is not.
        """
        if numbers:
            self.begin(*numbers)
        for number in sorted(numbers, reverse=True):
            with self._lock:
                self._known.pop(number, None)
            if self.storage.remote:
                self.storage.delete(f"{folder_of(number)}/{INDEX}")
                self.storage.delete_all(folder_of(number))
            else:
                self._take_away(Path(self.root), folder_of(number))

    @staticmethod
    def _take_away(root: Path, name: str) -> None:
        """Under a name that the next publisher sweeps, if this one is killed meanwhile."""
        with Scratch(root, "weight_v") as scratch, translated(root / name), suppress(FileNotFoundError):
            os.replace(root / name, scratch.folder)
            sync_folder(root)

    def begin(self, *numbers: int) -> None:
        """Say that the folders of these versions are of no use without their index, before one of them is without.

        On a disk there are no such folders: they are renamed to their place, and from it.
        """
        if self.storage.remote:
            self.storage.replace(_UNFINISHED, json.dumps({"versions": sorted(numbers)}).encode() + b"\n")

    def delete_unfinished(self) -> None:
        """Delete what a publisher has begun and not finished, and nothing else. Only for their owner."""
        if not self.storage.remote:
            return
        try:
            begun = [int(number) for number in json.loads(self.storage.read(_UNFINISHED)[0])["versions"]]
        except FileNotFoundError:
            return
        except (ValueError, KeyError, TypeError):
            begun = []  # nobody can tell
        there = set(self.numbers())
        for number in begun:
            if number not in there:
                self.storage.delete_all(folder_of(number))


class Ownership:
    """The right of one publisher to add versions: the last that has taken it has it."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        told = {"token": os.urandom(8).hex(), "host": socket.gethostname(), "pid": os.getpid()}
        self._told = json.dumps(told, sort_keys=True).encode() + b"\n"
        self.is_taken = False

    def take(self) -> None:
        """Whoever has it has lost it."""
        left = [] if self._storage.remote else temps_of(_OWNER, self._storage.names(""))
        self._storage.sweep("", left, delete=True)  # of those that were killed in the next line
        self._storage.replace(_OWNER, self._told)
        self.is_taken = True

    def check(self) -> None:
        """Raises ClosedError when another publisher has taken it since."""
        root = self._storage.locate("")
        try:
            told = self._storage.read(_OWNER)[0]
        except FileNotFoundError:
            raise ClosedError(
                f"{root}: somebody has emptied it while this Publisher was at work; make another one"
            ) from None
        if told != self._told:
            other = told.decode(errors="replace").strip()
            raise ClosedError(
                f"{root}: another Publisher has begun to publish here ({other:.200}); give each one a root of its own. "
                "If all ranks publish the same model, let rank 0 do it alone"
            )


# --- what is in one of them ---------------------------------------------------------------------------------------


class Where(NamedTuple):
    """One tensor in a safetensors file of a version, or of a folder."""

    file: str
    dtype: str
    shape: tuple[int, ...]
    begin: int  # from the beginning of the file
    num_bytes: int


class Frame(NamedTuple):
    """One tensor of a delta."""

    file: str
    data: memoryview
    checksum: str  # of the new bytes


class Source:
    """The files of one version."""

    def __init__(self, storage: Storage, index: VersionIndex) -> None:
        self.storage, self.index = storage, index
        self.folder = folder_of(index.version)
        self.where = storage.locate(self.folder)

    def open(self, file: str) -> Reader:
        """Raises CorruptCheckpointError if it is missing."""
        try:
            return self.storage.open(f"{self.folder}/{file}")
        except (FileNotFoundError, IsADirectoryError) as error:
            raise self.corrupt(file, "it is missing, or was deleted meanwhile") from error

    def other_files(self) -> list[str]:
        """Config, tokenizer and the like."""
        known = {*self.index.tensor_files, INDEX}
        names = self.index.digests or self.storage.sizes(self.folder)  # which other writers do not list
        return [name for name in names if name not in known and stays_inside(name)]

    def read(self, file: str) -> memoryview:
        """A small file, compared with its digest."""
        with self.open(file) as reader:
            data = memoryview(bytearray(reader.num_bytes))
            reader.read_into(0, data)
        self._compare(file, data)
        return data

    def whole(self, file: str, crew: Crew) -> memoryview:
        """All of a file, by several reads at once, compared with its digest."""
        with self.open(file) as reader:
            blob = memoryview(bytearray(reader.num_bytes))
            parts = range(0, len(blob), _CHUNK_BYTES)
            crew.run_all(partial(reader.read_into, at, blob[at : at + _CHUNK_BYTES]) for at in parts)
        self._compare(file, blob)
        return blob.toreadonly()

    def _compare(self, file: str, data: memoryview) -> None:
        wanted = self.index.digests.get(file)
        if wanted is not None and checksum(data) != wanted:
            raise self.corrupt(file, "its bytes are not those that were published")

    def _header(
        self, file: str, data: memoryview
    ) -> tuple[dict[str, safetensors.Row], Mapping[str, str], int]:
        """What the header says, and where the data begins. `data` is the beginning of the file, up to there at least."""
        try:
            if not safetensors.begins(data):
                raise ValueError("it is not a safetensors file")
            rows, metadata = safetensors.parse_foreign_header(bytes(data[: _header_bytes(data)]))
        except ValueError as error:
            raise self.corrupt(file, str(error)) from error
        return rows, metadata, _header_bytes(data)

    def frames(self, file: str, blob: memoryview) -> Iterator[tuple[str, Frame]]:
        """The tensors in a file of a delta."""
        rows, wanted, begin = self._header(file, blob)
        for name, row in rows.items():
            data = blob[begin + row.begin : begin + row.end]
            if row.code != "U8" or row.shape != [row.end - row.begin] or len(data) != row.end - row.begin:
                raise self.corrupt(file, f"{name!a:.200} is no frame in it")
            if name not in wanted:
                raise self.corrupt(file, f"it has no checksum of {name!a:.200}")
            yield name, Frame(file, data, str(wanted[name]))

    def tensors(self) -> dict[str, Where]:
        """Where the tensors of an anchor lie."""
        found: dict[str, Where] = {}
        for file in self.index.tensor_files:
            found.update(self.held_in(file))
        if found.keys() != self.index.files.keys():
            raise self.corrupt(INDEX, "it names other tensors than its files hold")
        return found

    def held_in(self, file: str) -> dict[str, Where]:
        """Where the tensors in one of the files lie."""
        with self.open(file) as reader:
            return dict(self._tensors_in(file, reader))

    def _tensors_in(self, file: str, reader: Reader) -> Iterator[tuple[str, Where]]:
        head = memoryview(bytearray(min(8, reader.num_bytes)))
        reader.read_into(0, head)
        if len(head) == 8 and int.from_bytes(head, "little") <= safetensors.MAX_HEADER_BYTES:
            head = memoryview(bytearray(min(_header_bytes(head), reader.num_bytes)))
            reader.read_into(0, head)
        rows, _, begin = self._header(file, head)
        for name, row in rows.items():
            try:
                dtype, shape = safetensors.loaded_as(row.code, row.shape)
            except ValueError as error:
                raise self.corrupt(file, f"{name!a:.200}: {error}") from error
            num_bytes = prod(shape) * DTYPES[dtype][0]
            if num_bytes != row.end - row.begin or begin + row.end > reader.num_bytes:
                raise self.corrupt(file, f"it is too short for {name!a:.200}, or cut off")
            yield name, Where(file, dtype, tuple(shape), begin + row.begin, num_bytes)

    def corrupt(self, file: str, why: str, *, tensors: tuple[str, ...] = ()) -> CorruptCheckpointError:
        where = f"{self.where}/{file}"
        return CorruptCheckpointError(
            f"{where}: {why}; what was here before is still here: publish an anchor, or pull another version",
            path=where,
            tensors=tensors,
        )


def _header_bytes(begin: memoryview) -> int:
    return 8 + int.from_bytes(begin[:8], "little")


class Anchor:
    """A full version, to be read once."""

    def __init__(self, source: Source, crew: Crew) -> None:
        self.source, self._crew = source, crew
        self.tensors = source.tensors()
        self.structure = structure_of((n, w.dtype, w.shape) for n, w in self.tensors.items())
        if source.index.structure not in ("", self.structure):
            raise source.corrupt(
                INDEX, "its files hold tensors of other names, dtypes or shapes than it tells of"
            )

    @property
    def num_bytes(self) -> int:
        return sum(where.num_bytes for where in self.tensors.values())

    def read(self, put: Callable[[str, int, memoryview], None]) -> State:
        """Give all tensors to `put`, a piece at a time, each tensor from one thread; what they are."""
        told, found = self.source.index.checksums, dict.fromkeys(self.tensors, "")
        readers = {file: self.source.open(file) for file in self.source.index.tensor_files}

        def copy(name: str) -> None:
            where, digest = self.tensors[name], xxhash.xxh3_128()
            chunk = memoryview(bytearray(min(_CHUNK_BYTES, where.num_bytes)))
            for at in range(0, where.num_bytes, _CHUNK_BYTES):
                part = chunk[: where.num_bytes - at]
                readers[where.file].read_into(where.begin + at, part)
                digest.update(part)
                put(name, at, part)
            found[name] = digest.hexdigest()
            if told and found[name] != told.get(name):
                raise self.source.corrupt(
                    where.file, f"{name}: its bytes are not those that were published", tensors=(name,)
                )

        try:
            self._crew.run_all(
                partial(copy, name) for name in sorted(found, key=lambda n: -self.tensors[n].num_bytes)
            )
        finally:
            for reader in readers.values():
                reader.close()
        return State(self.source.index.version, identity_of(found), self.structure, found)
