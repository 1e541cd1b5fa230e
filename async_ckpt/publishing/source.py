"""The files of one version: where its tensors lie, and their bytes.

In: the index of a version, and a storage with its files. Out: tensors, frames, small files, each compared with its checksum.
Knows nothing of: other versions, replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Final, NamedTuple

import xxhash

from ..errors import CorruptCheckpointError
from ..format import safetensors
from ..format.delta import (
    CHECKSUM_DIGITS,
    INDEX,
    VersionIndex,
    checksum,
    folder_of,
    identity_of,
    is_checksum,
    stays_inside,
    structure_of,
)
from ..host.threads import Crew
from ..spec import DTYPES, MIB
from ..storage.interface import Reader, Storage

_CHUNK_BYTES: Final = 4 * MIB


@dataclass(frozen=True, slots=True)
class State:
    """The identity of weights that somebody has: `checksums` of all tensors by name.

    `stamp` is that of the index of others by which they are the version; empty where a Publisher's says what it holds. If another
    receiver has marked them as the version, nothing is known but that.
    """

    version: int
    identity: str
    structure: str
    checksums: dict[str, str] = field(repr=False)
    stamp: str = ""
    is_marked: bool = False

    def is_base_of(self, index: VersionIndex) -> bool:
        """Whether a delta can be applied to them."""
        return self.version == index.base and index.base_identity in ("", self.identity)

    def is_version(self, index: VersionIndex) -> bool:
        """Whether these are its weights already."""
        return self.version == index.version and index.identity in ("", self.identity)


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


class TensorPart(NamedTuple):
    """Some bytes of a tensor."""

    name: str
    begin: int  # from the beginning of the tensor
    data: memoryview


class VersionSource:
    """The files of one version."""

    def __init__(self, storage: Storage, index: VersionIndex) -> None:
        self.storage, self.index = storage, index
        self.folder = folder_of(index.version)
        self.where = storage.locate(self.folder)

    @property
    def stamp(self) -> str:
        """That of its index, if nothing in that says which weights these are."""
        return "" if self.index.identity else self.index.stamp

    def open(self, file: str) -> Reader:
        """Raises CorruptCheckpointError if it is missing."""
        try:
            return self.storage.open(f"{self.folder}/{self.index.prefix}{file}")
        except (FileNotFoundError, IsADirectoryError) as error:
            raise self.corrupt(file, "it is missing, or was deleted meanwhile") from error

    def fill(self, reader: Reader, file: str, at: int, target: memoryview) -> None:
        """Read a part of a file. Raises CorruptCheckpointError if it ends too early."""
        try:
            reader.read_into(at, target)
        except EOFError as error:
            raise self.corrupt(file, f"it was cut off while it was read ({error})") from error

    def other_files(self) -> list[str]:
        """Config, tokenizer and the like."""
        known = {*self.index.tensor_files, INDEX}
        names = self.index.digests or self.storage.sizes(
            f"{self.folder}/{self.index.prefix}".rstrip("/")
        )  # which other writers do not list
        return [name for name in names if name not in known and stays_inside(name)]

    def read(self, file: str) -> memoryview:
        """A small file, compared with its digest."""
        with self.open(file) as reader:
            data = memoryview(bytearray(reader.num_bytes))
            self.fill(reader, file, 0, data)
        self._compare(file, data)
        return data

    def whole(self, file: str, crew: Crew) -> memoryview:
        """All of a file, by several reads at once, compared with its digest."""
        with self.open(file) as reader:
            blob = memoryview(bytearray(reader.num_bytes))
            parts = range(0, len(blob), _CHUNK_BYTES)
            crew.run_all(partial(self.fill, reader, file, at, blob[at : at + _CHUNK_BYTES]) for at in parts)
        self._compare(file, blob)
        return blob.toreadonly()

    def _compare(self, file: str, data: memoryview) -> None:
        wanted = self.index.digests.get(file)
        if wanted is not None and checksum(data) != wanted:
            raise self.corrupt(file, "its bytes are not those that were published")

    def _header(self, file: str, data: memoryview, num_bytes: int) -> tuple[safetensors.HeaderTable, int]:
        """The header of a file, whose tensors fill it, and where these begin. `data` is its beginning, up to there at
        least.
        """
        try:
            if not safetensors.begins(data):
                raise ValueError("it is not a safetensors file")
            head = bytes(data[: _header_bytes(data)])
            if self.index.heads.get(file) not in (None, checksum(head)):
                raise ValueError("its header is not the one that was published")
            table = safetensors.parse_table(head)
            safetensors.refuse_unwritable((*table.rows, *table.metadata, *table.metadata.values()))
            safetensors.refuse_gaps(table, num_bytes - len(head))
        except ValueError as error:
            raise self.corrupt(file, str(error)) from error
        return table, len(head)

    def _header_of(self, file: str, reader: Reader) -> tuple[safetensors.HeaderTable, int]:
        """As above, of which no more is read."""
        head = memoryview(bytearray(min(8, reader.num_bytes)))
        self.fill(reader, file, 0, head)
        if len(head) == 8 and int.from_bytes(head, "little") <= safetensors.MAX_HEADER_BYTES:
            head = memoryview(bytearray(min(_header_bytes(head), reader.num_bytes)))
            self.fill(reader, file, 0, head)
        return self._header(file, head, reader.num_bytes)

    def frames(self, file: str, blob: memoryview) -> Iterator[tuple[str, Frame]]:
        """The tensors in a file of a delta."""
        table, at = self._header(file, blob, len(blob))
        for name, (kind, begin, end) in table.rows.items():
            if table.kinds[kind] != ("U8", [end - begin]):
                raise self.corrupt(file, f"{name!a:.200} is no frame in it")
            yield (
                name,
                Frame(file, blob[at + begin : at + end], self._checksum_in(file, name, table.metadata)),
            )

    def frame_checksums(self) -> dict[str, str]:
        """A delta's checksums of the tensors that it changes; no more is read than these."""
        found: dict[str, str] = {}
        for file in self.index.tensor_files:
            with self.open(file) as reader:
                table, _ = self._header_of(file, reader)
            found |= {name: self._checksum_in(file, name, table.metadata) for name in table.rows}
        return found

    def _checksum_in(self, file: str, name: str, told: Mapping[str, object]) -> str:
        wanted = told.get(name)
        if not is_checksum(wanted, self.index.checksum_format):
            raise self.corrupt(file, f"it has no checksum of {name!a:.200}")
        return str(wanted)

    def tensors(self) -> dict[str, Where]:
        """Where the tensors of an anchor lie."""
        found: dict[str, Where] = {}
        for file in self.index.tensor_files:
            found |= self.held_in(file)
        if {name: where.file for name, where in found.items()} != self.index.files:
            raise self.corrupt(INDEX, "it names other tensors than its files hold")
        return found

    def held_in(self, file: str) -> dict[str, Where]:
        """Where the tensors in one of the files of an anchor lie."""
        with self.open(file) as reader:
            table, at = self._header_of(file, reader)
        if any(map(_is_any_checksum, (table.metadata[name] for name in table.metadata.keys() & table.rows))):
            raise self.corrupt(file, "it has checksums of its tensors, as only the frames of a delta have")
        kinds = [self._kind(file, code, shape) for code, shape in table.kinds]
        found = {}
        for name, (kind, begin, end) in table.rows.items():
            dtype, shape, num_bytes = kinds[kind]
            if num_bytes != end - begin:
                raise self.corrupt(file, f"it has another number of bytes for {name!a:.200} than its shape")
            found[name] = Where(file, dtype, shape, at + begin, num_bytes)
        return found

    def _kind(self, file: str, code: str, shape: list[int]) -> tuple[str, tuple[int, ...], int]:
        """A dtype, a shape, and how many bytes a tensor of these has."""
        try:
            dtype, shape = safetensors.loaded_as(code, shape)
        except ValueError as error:
            raise self.corrupt(file, str(error)) from error
        return dtype, tuple(shape), prod(shape) * DTYPES[dtype][0]

    def corrupt(self, file: str, why: str, *, tensors: tuple[str, ...] = ()) -> CorruptCheckpointError:
        where = f"{self.where}/{file}"
        return CorruptCheckpointError(
            f"{where}: {why}; what was here before is still here: publish an anchor, or pull another version",
            path=where,
            tensors=tensors,
        )


def _is_any_checksum(told: object) -> bool:
    return any(is_checksum(told, known) for known in CHECKSUM_DIGITS)


def _header_bytes(begin: memoryview) -> int:
    return 8 + int.from_bytes(begin[:8], "little")


class Anchor:
    """A full version, to be read once."""

    def __init__(self, source: VersionSource, crew: Crew) -> None:
        self.source, self._crew = source, crew
        self.tensors = source.tensors()
        self.structure = structure_of((n, w.dtype, w.shape) for n, w in self.tensors.items())
        if source.index.structure not in ("", self.structure):
            raise source.corrupt(
                INDEX, "its files hold tensors of other names, dtypes or shapes than it tells of"
            )
        if not self.tensors and not source.index.is_sealed:
            raise source.corrupt(INDEX, "it is a model without tensors")

    @property
    def num_bytes(self) -> int:
        return sum(where.num_bytes for where in self.tensors.values())

    def read(self, put: Callable[[str, int, memoryview, list[TensorPart]], None]) -> State:
        """Give the bytes of all tensors to `put`: from an offset of a file on, and what parts of tensors these are.

        A large tensor comes in pieces, all from one thread; small ones come many at a time. Returns what they are.
        """
        found = dict.fromkeys(self.tensors, "")
        readers = {file: self.source.open(file) for file in self.source.index.tensor_files}

        def copy(run: list[str]) -> None:
            first, last = self.tensors[run[0]], self.tensors[run[-1]]
            end = last.begin + last.num_bytes
            digest, chunk = xxhash.xxh3_128(), memoryview(bytearray(min(_CHUNK_BYTES, end - first.begin)))
            for at in range(first.begin, max(end, first.begin + 1), _CHUNK_BYTES):
                data = chunk[: end - at]
                self.source.fill(readers[first.file], first.file, at, data)
                if len(run) == 1:
                    digest.update(data)
                    parts = [TensorPart(run[0], at - first.begin, data)]
                else:
                    parts = [TensorPart(name, 0, _part_of(data, at, self.tensors[name])) for name in run]
                    found.update((part.name, checksum(part.data)) for part in parts)
                put(first.file, at, data, parts)
            if len(run) == 1:
                found[run[0]] = digest.hexdigest()
            self._compare(run, found)

        try:
            self._crew.run_all(partial(copy, run) for run in self._runs())
        finally:
            for reader in readers.values():
                reader.close()
        identity = identity_of(found)
        if self.source.index.identity not in ("", identity):
            raise self.source.corrupt(INDEX, "its checksums are not those of the version that it tells of")
        return State(self.source.index.version, identity, self.structure, found, self.source.stamp)

    def _runs(self) -> list[list[str]]:
        """The tensors, as many at a time as lie beside each other in a piece that is read; the longest first."""
        runs: list[list[str]] = []
        room, file = 0, ""
        for name, where in sorted(self.tensors.items(), key=_place_of):
            room -= where.num_bytes
            if room < 0 or where.file != file:
                runs.append([])
                room, file = _CHUNK_BYTES - where.num_bytes, where.file
            runs[-1].append(name)
        return sorted(runs, key=lambda run: -self.tensors[run[0]].num_bytes)

    def _compare(self, names: list[str], found: Mapping[str, str]) -> None:
        told = self.source.index.checksums
        for name in names if told else ():
            if found[name] != told.get(name):
                raise self.source.corrupt(
                    self.tensors[name].file,
                    f"{name}: its bytes are not those that were published",
                    tensors=(name,),
                )


def _place_of(named: tuple[str, Where]) -> tuple[str, int, int]:
    _, where = named
    return where.file, where.begin, where.num_bytes


def _part_of(data: memoryview, at: int, where: Where) -> memoryview:
    """The bytes of one tensor in what was read of its file, from an offset on."""
    return data[where.begin - at :][: where.num_bytes]
