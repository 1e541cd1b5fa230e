"""The folder of a checkpoint of torch.distributed.checkpoint, read like an archive.

In: a storage with such a folder. Out: contents like those of an archive. Knows nothing of: torch's engine.

The metadata lists which rectangles of a tensor are in which part of which file. Each part is the output of torch.save.
The place of the bytes in it is looked up on demand, for many parts at once; then the bytes are read by ranges, like
those of an archive. There are no digests, but torch.save writes a CRC-32 for each part. To compare it, a part is read
whole when its first piece is needed.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import pickle
import zlib
from bisect import bisect_right, insort
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Final, NoReturn

import torch

from ...core.format import digests
from ...core.format.index import Index, IndexedTensor, Member, Slice
from ...core.host.threads import run_together
from ...core.loading.archives.contents import Contents, Groups, Source
from ...core.pickles import saved_objects
from ...core.pickles.object_digests import object_digest
from ...core.slicing.boxes import Box, cover
from ...core.spec import DTYPES, Extent
from ...core.state.names import Path, Select, dtype_named, shown
from ...core.state.per_rank import nested
from ...core.state.tree import Encoder, StoredLeaf, replaced
from ...core.storage.interface import Reader, Storage
from ...errors import CorruptCheckpointError, UntrustedObjectError
from . import dcp_metadata
from .dcp_checksums import RecordCheck, damage_in
from .dcp_metadata import Blob, StoredTensor, TensorExtent
from .virtual_files import JoinedFile

_MAX_READERS: Final = 16
_NOWHERE: Final = Member(digests.MEMBER, Extent(0, 0))


class _TensorFile(Contents):
    """A file with some of the tensors, or the reordered bytes of one tensor in memory."""

    _advice: ClassVar[str] = "fetch it again"

    def __init__(self, reader: Reader, *, path: str) -> None:
        super().__init__(reader, path=path)
        self.index = Index(None, (), (), (), None, _NOWHERE, reader.num_bytes)
        # The records to compare, by the offset of their first byte, which is also the number of their "member". They do
        # not overlap.
        self._checks: dict[int, RecordCheck] = {}
        self._begins: list[int] = []  # ascending

    @property
    def num_bytes(self) -> int:
        return self.index.file_bytes

    def compare(self, check: RecordCheck) -> None:
        """From now on, compare a record with its checksum when it is read. Called by the loading thread."""
        self._checks[check.extent.offset] = check
        insort(self._begins, check.extent.offset)

    def headers(self, members: Iterable[int]) -> list[Extent]:
        """The records that have yet to be compared, and must therefore be read whole."""
        checks = filter(None, map(self._checks.get, members))
        return [check.extent for check in checks if not check.is_done]

    def verify(self, offset: int, data: memoryview) -> None:
        begins = self._begins
        first = max(0, bisect_right(begins, offset) - 1)
        for begin in itertools.islice(begins, first, bisect_right(begins, offset + len(data) - 1)):
            check = self._checks[begin]
            if check.extent.end > offset and not check.matches(offset, data):
                raise self._damaged(check)

    def read(self, extent: Extent) -> bytes:
        """The bytes of a small extent. The record around them is compared, if it has not been compared yet."""
        first = bisect_right(self._begins, extent.offset) - 1
        check = self._checks[self._begins[first]] if first >= 0 else None
        if check is None or check.is_done or extent.end > check.extent.end:
            return super().read(extent)
        return self.record(check)[extent.offset - check.extent.offset :][: extent.length]

    def record(self, check: RecordCheck) -> bytes:
        """The bytes of a record, compared with its checksum. Raises CorruptCheckpointError."""
        data = super().read(check.extent)
        check.is_done = zlib.crc32(data) == check.record.crc
        if not check.is_done:
            raise self._damaged(check)
        return data

    def _damaged(self, check: RecordCheck) -> CorruptCheckpointError:
        record = check.record
        return CorruptCheckpointError(
            f"{self.path}: at byte {record.begin:,}: record {record.name!a:.200}, which has {shown((check.name,))}, "
            f"does not match its checksum; {self._advice}",
            path=self.path,
            tensors=(check.name,),
        )


class OpenDcp(Contents):
    """The folder of a checkpoint with valid metadata. `stack` closes the opened files.

    Raises CorruptCheckpointError for metadata that is malformed or hostile, or that only torch can read.
    """

    _advice: ClassVar[str] = "fetch it again, or load it with torch.distributed.checkpoint"
    keeps_empty: ClassVar[bool] = False

    def __init__(self, storage: Storage, stack: contextlib.ExitStack, *, verify: bool) -> None:
        """With `verify`, all data that is read is compared with its checksum, if it has one."""
        super().__init__(None, path=storage.locate(""))
        self._storage, self._stack, self._verify = storage, stack, verify
        try:
            metadata = dcp_metadata.parse(storage.read(dcp_metadata.NAME)[0])
            paths = {name: metadata.paths.get(name) or (name,) for name in (*metadata.tensors, *metadata.blobs)}
            skeleton = _skeleton(paths, metadata.tensors)
        except dcp_metadata.TorchOnlyError as error:
            raise CorruptCheckpointError(
                f"{self.path}: {error}; load it with torch.distributed.checkpoint", path=self.path
            ) from error
        except ValueError as error:
            raise self.corrupt(f"its {dcp_metadata.NAME} cannot be trusted: {error}") from error
        self._tensors: Sequence[StoredTensor] = list(metadata.tensors.values())
        self._blobs: Sequence[tuple[str, Blob]] = list(metadata.blobs.items())
        tensors = tuple(
            IndexedTensor(
                paths[name],
                tensor.dtype,
                tensor.shape,
                (),
                None,
                is_spread=len(tensor.chunks) > 1,
            )
            for name, tensor in metadata.tensors.items()
        )
        self.index = Index(None, (), tensors, (), skeleton, _NOWHERE, 0)
        self._files: dict[str, _TensorFile] = {}
        # The place of each blob's bytes, and the member of the file to compare; written once, by the thread that has
        # looked them up.
        self._locations: dict[Blob, tuple[_TensorFile, Extent, int]] = {}

    def tree(
        self, *, select: Select = None, types: Iterable[type] | None = (), groups: Groups = None
    ) -> tuple[Any, list[StoredLeaf]]:
        """The saved structure, including values that need no trust, since the settings of optimizers are inspected."""
        value, stored = super().tree(select=select, types=types, groups=groups)
        leaves = [leaf for leaf in stored if leaf.kind == "object"]
        texts = self._read_blobs([leaf.number for leaf in leaves])
        opened: dict[int, Any] = {}
        for leaf, text in zip(leaves, texts, strict=True):
            with contextlib.suppress(pickle.UnpicklingError):
                opened[leaf.number] = self._unpickle(leaf, text, trust=False)

        def give(leaf: StoredLeaf) -> Any:
            return opened[leaf.number] if leaf.kind == "object" and leaf.number in opened else leaf

        rest = [leaf for leaf in stored if leaf.kind != "object" or leaf.number not in opened]
        return replaced(value, give), rest

    def objects(self, stored: Iterable[StoredLeaf], *, trust: bool) -> list[Any]:
        """Load the blobs that need trust. Raises UntrustedObjectError."""
        wanted = [leaf for leaf in stored if leaf.kind == "object"]
        objects: list[Any] = [None] * len(self._blobs)
        texts = self._read_blobs([leaf.number for leaf in wanted])
        for leaf, text in zip(wanted, texts, strict=True):
            try:
                objects[leaf.number] = self._unpickle(leaf, text, trust=trust)
            except pickle.UnpicklingError as error:
                raise UntrustedObjectError(
                    f"{self.path}: {shown(leaf.path)} is a Python object, not plain data; if you trust whoever wrote "
                    "this checkpoint, load it with trust=True, or leave it out with select=",
                    path=self.path,
                ) from error
        return objects

    def object_digests(self, stored: Iterable[StoredLeaf]) -> dict[int, str]:
        wanted = [leaf.number for leaf in stored if leaf.kind == "object"]
        texts = self._read_blobs(wanted)
        return {number: object_digest(text) for number, text in zip(wanted, texts, strict=True)}

    def map(self) -> NoReturn:
        raise ValueError(
            f"mmap=True maps one file, but {self.path} is a folder of torch.distributed.checkpoint, with a tensor's "
            "pieces in several files; leave mmap out"
        )

    def need(self, wanted: Iterable[tuple[int, Box | None]]) -> None:
        """Look up the places of the bytes of these tensors, on several threads."""
        blobs = {
            chunk.blob: self.index.tensors[number].dotted
            for number, within in wanted
            for chunk in self._tensors[number].chunks
            if within is None or Box(chunk.offsets, chunk.sizes).common(within)
        }
        checks: list[tuple[_TensorFile, RecordCheck]] = []
        jobs = [
            functools.partial(self._locate, blob, name, checks)
            for blob, name in blobs.items()
            if blob not in self._locations
        ]
        for blob in blobs:  # only on this thread: it fills a dict
            self._open_file(blob)
        run_together("look up", jobs, max_threads=_MAX_READERS)
        for file, check in checks:
            file.compare(check)

    def sources(self, number: int, within: Box | None = None) -> Sequence[Source]:
        """The places to read a tensor from, each element once. Raises CorruptCheckpointError for a gap."""
        tensor, name = self._tensors[number], self.index.tensors[number].dotted
        needed = [(i, box) for i, box in self._cover(number) if within is None or box.common(within)]
        self.need([(number, within)])
        sources = []
        for i, box in needed:
            chunk = tensor.chunks[i]
            file, extent, member = self._locations[chunk.blob]
            if extent.length != math.prod(chunk.sizes) * DTYPES[tensor.dtype][0]:
                raise self.corrupt(f"{shown((name,))} is not of the shape or dtype that the metadata says")
            sources.append(Source(file, Slice(member, name, extent, Box(chunk.offsets, chunk.sizes)), box))
        return sources

    def items(self) -> Iterator[tuple[str, Contents, Blob]]:
        """Every stored item: its name, its open file and its place there. Raises CorruptCheckpointError for a gap, and
        for a file that is missing or truncated.
        """
        for number, tensor in enumerate(self._tensors):
            self._cover(number)
            for chunk in tensor.chunks:
                yield self.index.tensors[number].dotted, self._open_file(chunk.blob), chunk.blob
        for name, blob in self._blobs:
            yield name, self._open_file(blob), blob

    # --- parts ------------------------------------------------------------------------------------------------

    def _cover(self, number: int) -> Sequence[tuple[int, Box]]:
        """The numbers of the chunks that make up a tensor, each with the box to take from it. Raises
        CorruptCheckpointError for a gap.
        """
        tensor = self._tensors[number]
        taken, missing = cover(tensor.shape, [Box(chunk.offsets, chunk.sizes) for chunk in tensor.chunks])
        for box in missing:
            name = shown((self.index.tensors[number].dotted,))
            raise self.corrupt(f"{name}: {box} of shape {list(tensor.shape)} is in none of its files")
        return taken

    def _locate(self, blob: Blob, name: str, checks: list[tuple[_TensorFile, RecordCheck]]) -> None:
        """Look up the place of a blob's bytes. Adds the record to compare, when it is read, to `checks`."""
        file = self._files[blob.file]

        def read(offset: int, length: int) -> bytes:
            return file.read(Extent(offset, length))

        try:
            location = dcp_metadata.locate_tensor(read, blob)
        except dcp_metadata.TorchOnlyError as error:
            raise CorruptCheckpointError(
                f"{file.path}: at byte {blob.offset:,}: {error}; load it with torch.distributed.checkpoint",
                path=file.path,
            ) from error
        except ValueError as error:
            raise file.corrupt(f"at byte {blob.offset:,}: {error}") from error
        record = location.record
        check = RecordCheck(name, record) if self._verify and record.crc is not None and record.num_bytes else None
        if location.is_dense:
            if check is not None:
                checks.append((file, check))
            self._locations[blob] = file, Extent(location.begin, location.num_bytes), record.begin
            return
        if check is None:
            data = read(location.begin, location.num_bytes)
        else:
            data = file.record(check)[location.begin - record.begin :][: location.num_bytes]
        ordered = _dense_bytes(location, data)
        self._locations[blob] = _TensorFile(JoinedFile((ordered,)), path=file.path), Extent(0, len(ordered)), 0

    def _open_file(self, blob: Blob) -> _TensorFile:
        """The file of a blob, which `stack` closes. Raises CorruptCheckpointError if it is missing or truncated."""
        if blob.file not in self._files:
            shown_as = self._storage.locate(blob.file)
            try:
                reader = self._stack.enter_context(self._storage.open(blob.file))
            except (FileNotFoundError, IsADirectoryError, ValueError) as error:
                raise CorruptCheckpointError(
                    f"{shown_as}: it is missing, though {dcp_metadata.NAME} names it; fetch it again", path=shown_as
                ) from error
            self._files[blob.file] = _TensorFile(reader, path=shown_as)
        file = self._files[blob.file]
        if blob.offset + blob.length > file.num_bytes:
            raise file.corrupt(f"it has {file.num_bytes:,} bytes, but {dcp_metadata.NAME} names more: truncated")
        return file

    def _read_blobs(self, numbers: Sequence[int]) -> list[bytes]:
        """The bytes of these blobs. Raises CorruptCheckpointError for a blob that does not match its checksums."""
        data: dict[int, bytes] = {}

        def read(number: int, file: _TensorFile) -> None:
            name, blob = self._blobs[number]
            text = data[number] = file.read(Extent(blob.offset, blob.length))
            damage = damage_in(text) if self._verify else None
            if damage is not None:
                raise CorruptCheckpointError(
                    f"{file.path}: at byte {blob.offset:,}: {shown((name,))}: {damage}; {self._advice}",
                    path=file.path,
                    tensors=(name,),
                )

        jobs = [functools.partial(read, number, self._open_file(self._blobs[number][1])) for number in {*numbers}]
        run_together("look up", jobs, max_threads=_MAX_READERS)
        return [data[number] for number in numbers]

    def _unpickle(self, leaf: StoredLeaf, data: bytes, *, trust: bool) -> Any:
        """The object of a leaf. Raises pickle.UnpicklingError if it requires trust."""
        try:
            return saved_objects.load(data, trust=trust)
        except pickle.UnpicklingError:
            raise
        except (ImportError, AttributeError) as error:
            if trust:
                raise saved_objects.missing_class(f"{self.path}: {shown(leaf.path)}", error) from error
            raise self.corrupt(f"{shown(leaf.path)} cannot be loaded: {error!r:.300}") from error
        except Exception as error:
            raise self.corrupt(f"{shown(leaf.path)} cannot be loaded: {error!r:.300}") from error


def _skeleton(paths: Mapping[str, Path], tensors: Mapping[str, StoredTensor]) -> Any:
    """The skeleton of the nested state.

    Tensors and objects are numbered separately. Raises ValueError for paths that clash.
    """
    numbers = {name: number for number, name in enumerate(tensors)}
    others = {name: number for number, name in enumerate(name for name in paths if name not in numbers)}

    def node(leaf: Any, _: Path) -> Any:
        return {"tensor": numbers[leaf.name]} if leaf.name in numbers else {"object": others[leaf.name]}

    state = nested((path, _NamedLeaf(name)) for name, path in paths.items())
    return Encoder(node).encode(state)


class _NamedLeaf:
    def __init__(self, name: str) -> None:
        self.name = name


def _dense_bytes(location: TensorExtent, data: bytes) -> bytes:
    """The items of a tensor row by row, if it was saved in another order, such as channels last."""
    flat = torch.frombuffer(bytearray(data), dtype=dtype_named(location.dtype))
    dense = flat.as_strided(location.shape, location.strides).contiguous()
    return dense.view(-1).view(torch.uint8).numpy().tobytes()
