"""The files of one version: the locations of its tensors, and their bytes.

In: the index of a version, and a storage with its files. Out: tensors, frames and small files, compared with their
checksums.
Knows nothing of: other versions, replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Final, NamedTuple

import xxhash

from ...errors import CorruptCheckpointError
from ...plumbing import Reader, Storage, safetensors, spec, threads
from ..delta import (
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

_CHUNK_BYTES: Final = 4 * spec.MIB


@dataclass(frozen=True, slots=True)
class WeightsState:
    """The state of held weights: their version, and the checksums of all tensors by name.

    `stamp` is the stamp of the index by which they became the version, if another program wrote it; else empty.
    If `is_marked`, another receiver has marked the weights as the version, and nothing else is known.
    """

    version: int
    identity: str
    structure: str
    checksums: dict[str, str] = field(repr=False)
    stamp: str = ""
    is_marked: bool = False

    def is_base_of(self, index: VersionIndex) -> bool:
        """Whether a delta can be applied to these weights."""
        delta = index.delta
        return delta is not None and self.version == delta.base and delta.base_identity in ("", self.identity)

    def is_version(self, index: VersionIndex) -> bool:
        """Whether these are the weights of a version."""
        return self.version == index.version and index.identity in ("", self.identity)


class TensorLocation(NamedTuple):
    """The location of one tensor in a safetensors file of a version, or of a folder."""

    file: str
    dtype: str
    shape: tuple[int, ...]
    begin: int  # from the beginning of the file
    num_bytes: int


class Frame(NamedTuple):
    """The frame of one tensor in a delta."""

    file: str
    data: memoryview
    checksum: str  # of the new bytes


class VersionSource:
    """The files of one version, read on helper threads."""

    def __init__(self, storage: Storage, index: VersionIndex) -> None:
        self.storage, self.index = storage, index
        self.folder = folder_of(index.version)
        self.path = storage.locate(self.folder)

    @property
    def stamp(self) -> str:
        """The stamp of the index, if the index does not identify the weights; else empty."""
        return "" if self.index.identity else self.index.stamp

    def open(self, file: str) -> Reader:
        """Open a file. Raises CorruptCheckpointError if it is missing."""
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
        """Config, tokenizer and other small files."""
        known = {*self.index.tensor_files, INDEX}
        # Other writers do not list small files in the index.
        names = self.index.digests or self.storage.sizes(f"{self.folder}/{self.index.prefix}".rstrip("/"))
        return [name for name in names if name not in known and stays_inside(name)]

    def read(self, file: str, crew: threads.Crew | None = None) -> memoryview:
        """The bytes of a file, compared with its digest. A crew reads several parts at once."""
        with self.open(file) as reader:
            data = memoryview(bytearray(reader.num_bytes))
            if crew is None:
                self.fill(reader, file, 0, data)
            else:
                parts = range(0, len(data), _CHUNK_BYTES)
                crew.run_all(partial(self.fill, reader, file, at, data[at : at + _CHUNK_BYTES]) for at in parts)
        wanted = self.index.digests.get(file)
        if wanted is not None and checksum(data) != wanted:
            raise self.corrupt(file, "its bytes are not those that were published")
        return data.toreadonly()

    def _header(self, file: str, data: memoryview, num_bytes: int) -> tuple[safetensors.HeaderTable, int]:
        """The header of a file, and the offset of its tensors. `data` includes the header."""
        try:
            return header_in(data, num_bytes, self.index.heads.get(file))
        except ValueError as error:
            raise self.corrupt(file, str(error)) from error

    def _header_of(self, file: str, reader: Reader) -> tuple[safetensors.HeaderTable, int]:
        """The header of a file and the offset of its tensors. Reads only the header."""
        head = memoryview(bytearray(min(8, reader.num_bytes)))
        self.fill(reader, file, 0, head)
        if len(head) == 8 and int.from_bytes(head, "little") <= safetensors.MAX_HEADER_BYTES:
            head = memoryview(bytearray(min(_header_bytes(head), reader.num_bytes)))
            self.fill(reader, file, 0, head)
        return self._header(file, head, reader.num_bytes)

    def frames(self, crew: threads.Crew) -> tuple[dict[str, Frame], int]:
        """All frames of a delta, by tensor, and the number of bytes read."""
        frames: dict[str, Frame] = {}
        num_bytes = 0
        for file in self.index.tensor_files:
            blob = self.read(file, crew)
            num_bytes += len(blob)
            table, at = self._header(file, blob, len(blob))
            for name, (kind, begin, end) in table.rows.items():
                if table.kinds[kind] != ("U8", [end - begin]):
                    raise self.corrupt(file, f"{name!a:.200} is not a frame")
                wanted = self._checksum_in(file, name, table.metadata)
                frames[name] = Frame(file, blob[at + begin : at + end], wanted)
        self._compare_files(frames)
        return frames, num_bytes

    def frame_checksums(self) -> dict[str, str]:
        """The checksums of the tensors that a delta changes. Reads only headers."""
        checksums: dict[str, str] = {}
        for file in self.index.tensor_files:
            with self.open(file) as reader:
                table, _ = self._header_of(file, reader)
            checksums |= {name: self._checksum_in(file, name, table.metadata) for name in table.rows}
        return checksums

    def _checksum_in(self, file: str, name: str, metadata: Mapping[str, object]) -> str:
        wanted = metadata.get(name)
        assert self.index.delta is not None
        if not is_checksum(wanted, self.index.delta.checksum_format):
            raise self.corrupt(file, f"it has no checksum of {name!a:.200}")
        return str(wanted)

    def tensors(self) -> dict[str, TensorLocation]:
        """The locations of an anchor's tensors."""
        locations: dict[str, TensorLocation] = {}
        for file in self.index.tensor_files:
            locations |= self.tensors_in(file)
        self._compare_files(locations)
        return locations

    def _compare_files(self, found: Mapping[str, TensorLocation | Frame]) -> None:
        if {name: one.file for name, one in found.items()} != self.index.files:
            raise self.corrupt(INDEX, "it names other tensors than its files hold")

    def tensors_in(self, file: str) -> dict[str, TensorLocation]:
        """The locations of the tensors in one file of an anchor."""
        with self.open(file) as reader:
            table, at = self._header_of(file, reader)
        beside = [table.metadata[name] for name in table.metadata.keys() & table.rows]
        if any(is_checksum(value, checksum_format) for value in beside for checksum_format in CHECKSUM_DIGITS):
            raise self.corrupt(file, "it has checksums of its tensors, as only the frames of a delta have")
        kinds = [self._kind(file, code, shape) for code, shape in table.kinds]
        locations = {}
        for name, (kind, begin, end) in table.rows.items():
            dtype, shape, num_bytes = kinds[kind]
            if num_bytes != end - begin:
                raise self.corrupt(file, f"it has another number of bytes for {name!a:.200} than its shape")
            locations[name] = TensorLocation(file, dtype, shape, at + begin, num_bytes)
        return locations

    def _kind(self, file: str, code: str, shape: list[int]) -> tuple[str, tuple[int, ...], int]:
        """The dtype, the shape and the size in bytes of tensors with this header entry."""
        try:
            dtype, shape = safetensors.loaded_as(code, shape)
        except ValueError as error:
            raise self.corrupt(file, str(error)) from error
        return dtype, tuple(shape), prod(shape) * spec.DTYPES[dtype][0]

    def corrupt(self, file: str, why: str, *, tensors: tuple[str, ...] = ()) -> CorruptCheckpointError:
        path = f"{self.path}/{file}"
        return CorruptCheckpointError(
            f"{path}: {why}; readers keep the weights that they have: publish an anchor, or pull another version",
            path=path,
            tensors=tensors,
        )


def header_in(data: memoryview, num_bytes: int, digest: str | None = None) -> tuple[safetensors.HeaderTable, int]:
    """The header of a safetensors file, and its length.

    Raises ValueError if it does not have this digest, or its tensors do not fill a file of `num_bytes` without gaps.
    """
    if not safetensors.begins(data):
        raise ValueError("it is not a safetensors file")
    head = bytes(data[: _header_bytes(data)])
    if digest not in (None, checksum(head)):
        raise ValueError("its header is not the one that was published")
    return safetensors.parse_file_header(head, num_bytes), len(head)


def _header_bytes(begin: memoryview) -> int:
    return 8 + int.from_bytes(begin[:8], "little")


class Anchor:
    """The weights of an anchor. A replica reads them once."""

    def __init__(self, source: VersionSource, crew: threads.Crew) -> None:
        self.source, self._crew = source, crew
        self.tensors = source.tensors()
        self.structure = structure_of((n, w.dtype, w.shape) for n, w in self.tensors.items())
        if source.index.structure not in ("", self.structure):
            raise source.corrupt(INDEX, "its files hold tensors with other names, dtypes or shapes than in the index")
        if not self.tensors and not source.index.is_sealed:
            raise source.corrupt(INDEX, "the model has no tensors")

    @property
    def num_bytes(self) -> int:
        return sum(location.num_bytes for location in self.tensors.values())

    def read(self, put: Callable[[str, int, memoryview], None]) -> WeightsState:
        """Read all tensors, and compare them with their checksums. Returns their state.

        `put` is called on helper threads with a tensor's name, an offset in the tensor, and the bytes at that offset. A
        large tensor is passed in pieces, all from one thread.
        """
        checksums = dict.fromkeys(self.tensors, "")
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
                    put(run[0], at - first.begin, data)
                    continue
                for name in run:
                    location = self.tensors[name]
                    part = data[location.begin - at :][: location.num_bytes]
                    checksums[name] = checksum(part)
                    put(name, 0, part)
            if len(run) == 1:
                checksums[run[0]] = digest.hexdigest()
            self._compare(run, checksums)

        try:
            self._crew.run_all(partial(copy, run) for run in self._runs())
        finally:
            for reader in readers.values():
                reader.close()
        identity = identity_of(checksums)
        if self.source.index.identity not in ("", identity):
            raise self.source.corrupt(INDEX, "its checksums are not those of the version that it describes")
        return WeightsState(self.source.index.version, identity, self.structure, checksums, self.source.stamp)

    def _runs(self) -> list[list[str]]:
        """Groups of adjacent tensors, each group read in one piece, the largest tensors first."""
        runs: list[list[str]] = []
        room, file = 0, ""
        in_order = sorted(self.tensors.items(), key=lambda named: (named[1].file, named[1].begin, named[1].num_bytes))
        for name, location in in_order:
            room -= location.num_bytes
            if room < 0 or location.file != file:
                runs.append([])
                room, file = _CHUNK_BYTES - location.num_bytes, location.file
            runs[-1].append(name)
        return sorted(runs, key=lambda run: -self.tensors[run[0]].num_bytes)

    def _compare(self, names: list[str], checksums: Mapping[str, str]) -> None:
        expected = self.source.index.checksums
        for name in names if expected else ():
            if checksums[name] != expected.get(name):
                raise self.source.corrupt(
                    self.tensors[name].file, f"{name}: its bytes are not those that were published", tensors=(name,)
                )
