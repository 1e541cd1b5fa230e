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
from ..format.delta import INDEX, VersionIndex, checksum, folder_of, identity_of, stays_inside, structure_of
from ..host.threads import Crew
from ..spec import DTYPES, MIB
from ..storage.base import Reader, Storage

_CHUNK_BYTES: Final = 4 * MIB


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
            return self.storage.open(f"{self.folder}/{self.index.prefix}{file}")
        except (FileNotFoundError, IsADirectoryError) as error:
            raise self.corrupt(file, "it is missing, or was deleted meanwhile") from error

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
        rows, metadata, begin = self._header(file, head)
        if rows and all(row.code == "U8" and name in metadata for name, row in rows.items()):
            raise self.corrupt(
                file, "it holds the frames of a delta, and its index says that they are weights"
            )
        end = begin + max((row.end for row in rows.values()), default=0)
        if end < reader.num_bytes:
            raise self.corrupt(file, f"it has {reader.num_bytes - end:,} bytes behind its tensors")
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
