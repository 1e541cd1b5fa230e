"""The folder of a checkpoint that torch.distributed.checkpoint has written, read as an archive is.

In: a storage with such a folder. Out: contents as those of an archive. Knows nothing of: torch's engine.

The metadata tells which rectangles of a tensor are in which part of which file; each part is what torch.save made of it.
Where in that the bytes lie is looked up when they are wanted, for all that are wanted at once; then they are read by
ranges, as any others. There are no digests: damage to what is no header cannot be noticed.
"""

from __future__ import annotations

import contextlib
import functools
import io
import math
import pickle
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Final

import torch

from ...errors import CorruptCheckpointError, UntrustedObjectError
from ...format import dcp, digests
from ...format.dcp import Blob, Lying, StoredTensor
from ...format.index import Index, IndexedTensor, Member, Slice
from ...host.threads import run_together
from ...pickles import saved_objects
from ...slicing.cover import Box, cover
from ...spec import DTYPES, Extent, Spread
from ...state.containers import nested
from ...state.dtypes import dtype_named
from ...state.names import Path, Select, shown
from ...state.tree import Encoder, StoredLeaf, replaced
from ...storage.interface import Reader, Storage
from .contents import Contents, Groups, Source
from .virtual_files import JoinedFile

_MAX_READERS: Final = 16
_NOWHERE: Final = Member(digests.MEMBER, Extent(0, 0))


class _TensorFile(Contents):
    """A file with some of the tensors, or the bytes of one that had to be put in order."""

    _advice: ClassVar[str] = "fetch it again"

    def __init__(self, reader: Reader, *, path: str) -> None:
        super().__init__(reader, path=path)
        self.index = Index(None, (), (), (), None, _NOWHERE, reader.num_bytes)

    @property
    def num_bytes(self) -> int:
        return self.index.file_bytes


class OpenDcp(Contents):
    """The folder, its metadata read and checked. What is opened is closed with `stack`.

    Raises CorruptCheckpointError for metadata that is none, that is hostile, or that needs what only torch has.
    """

    _advice: ClassVar[str] = "fetch it again, or load it with torch.distributed.checkpoint"

    def __init__(self, storage: Storage, stack: contextlib.ExitStack) -> None:
        super().__init__(JoinedFile(()), path=storage.locate(""))
        self._storage, self._stack = storage, stack
        try:
            told = dcp.parse(storage.read(dcp.NAME)[0])
            paths = {name: told.paths.get(name) or (name,) for name in (*told.tensors, *told.blobs)}
            skeleton = _skeleton(paths, told.tensors)
        except ValueError as error:
            raise self.corrupt(f"its {dcp.NAME} cannot be trusted: {error}") from error
        self._told: Sequence[StoredTensor] = list(told.tensors.values())
        self._blobs: Sequence[tuple[str, Blob]] = list(told.blobs.items())
        self._trusts = False
        tensors = tuple(
            IndexedTensor(
                paths[name], one.dtype, one.shape, (), None, Spread(None, 0) if len(one.chunks) > 1 else None
            )
            for name, one in told.tensors.items()
        )
        self.index = Index(None, (), tensors, (), skeleton, _NOWHERE, 0)
        self._files: dict[str, _TensorFile] = {}
        # By what it is of: written by whichever thread has looked it up, each once.
        self._found: dict[Blob, tuple[_TensorFile, Extent]] = {}

    @property
    def files(self) -> Sequence[Contents]:
        return (self,)

    def tree(
        self, *, select: Select = None, types: Iterable[type] = (), groups: Groups = None
    ) -> tuple[Any, list[StoredLeaf]]:
        """Values that need no trust are in the tree itself: settings of optimizers are looked into."""
        value, stored = super().tree(select=select, types=types, groups=groups)
        leaves = [leaf for leaf in stored if leaf.kind == "object"]
        data = self._data([self._blobs[leaf.number][1] for leaf in leaves])
        opened: dict[int, Any] = {}
        for leaf, one in zip(leaves, data, strict=True):
            with contextlib.suppress(pickle.UnpicklingError):
                opened[leaf.number] = self._opened(leaf, one, trust=False)

        def give(leaf: StoredLeaf) -> Any:
            return opened[leaf.number] if leaf.kind == "object" and leaf.number in opened else leaf

        rest = [leaf for leaf in stored if leaf.kind != "object" or leaf.number not in opened]
        return replaced(value, give), rest

    def objects(self, stored: Iterable[StoredLeaf], *, trust: bool) -> list[Any]:
        """Load the blobs that need trust. Raises UntrustedObjectError."""
        wanted = [leaf for leaf in stored if leaf.kind == "object"]
        found: list[Any] = [None] * len(self._blobs)
        data = self._data([self._blobs[leaf.number][1] for leaf in wanted])
        for leaf, one in zip(wanted, data, strict=True):
            try:
                found[leaf.number] = self._opened(leaf, one, trust=trust)
            except pickle.UnpicklingError as error:
                raise UntrustedObjectError(
                    f"{self.path}: {shown(leaf.path)} is a Python object, not plain data; if you trust whoever wrote this "
                    "checkpoint, load it with trust=True, or leave it out with select=",
                    path=self.path,
                ) from error
        return found

    def need(self, wanted: Iterable[tuple[int, Box | None]]) -> None:
        """ArchiveAccount up where the bytes of these lie, by several threads."""
        blobs = {
            chunk.blob: chunk.sizes
            for number, within in wanted
            for chunk in self._told[number].chunks
            if within is None or Box(chunk.offsets, chunk.sizes).common(within)
        }
        jobs = [functools.partial(self._look_up, blob) for blob in blobs if blob not in self._found]
        for blob in blobs:  # not by several threads
            self._file(blob)
        run_together("look up", jobs, max_threads=_MAX_READERS)

    def sources(self, number: int, within: Box | None = None) -> Sequence[Source]:
        """Where a tensor is to be read from, each element once. Raises CorruptCheckpointError for a gap."""
        told, name = self._told[number], self.index.tensors[number].dotted
        boxes = [Box(chunk.offsets, chunk.sizes) for chunk in told.chunks]
        taken, missing = cover(told.shape, boxes)
        for box in missing:
            raise self.corrupt(f"{shown((name,))}: {box} of shape {list(told.shape)} is in none of its files")
        needed = [(i, box) for i, box in taken if within is None or box.common(within)]
        self.need([(number, within)])
        found = []
        for i, box in needed:
            chunk = told.chunks[i]
            file, extent = self._found[chunk.blob]
            if extent.length != math.prod(chunk.sizes) * DTYPES[told.dtype][0]:
                raise self.corrupt(f"{shown((name,))} is not of the shape or dtype that the metadata says")
            found.append(Source(file, Slice(0, name, extent, chunk.offsets, chunk.sizes), box))
        return found

    # --- parts ------------------------------------------------------------------------------------------------

    def _look_up(self, blob: Blob) -> None:
        file = self._files[blob.file]

        def read(offset: int, length: int) -> bytes:
            return file.read(Extent(offset, length))

        try:
            lying = dcp.tensor_in(read, blob)
        except dcp.OthersReadError as error:
            raise CorruptCheckpointError(
                f"{file.path}: at byte {blob.offset:,}: {error}; load it with torch.distributed.checkpoint",
                path=file.path,
            ) from error
        except ValueError as error:
            raise file.corrupt(f"at byte {blob.offset:,}: {error}") from error
        if lying.is_dense:
            self._found[blob] = file, Extent(lying.begin, lying.num_bytes)
        else:
            ordered = _in_order(lying, read(lying.begin, lying.num_bytes))
            self._found[blob] = _TensorFile(JoinedFile((ordered,)), path=file.path), Extent(0, len(ordered))

    def _file(self, blob: Blob) -> _TensorFile:
        """The file of a blob, closed with the others. Raises CorruptCheckpointError where it is not all there."""
        if blob.file not in self._files:
            shown_as = self._storage.locate(blob.file)
            try:
                reader = self._stack.enter_context(self._storage.open(blob.file))
            except (FileNotFoundError, IsADirectoryError, ValueError) as error:
                raise CorruptCheckpointError(
                    f"{shown_as}: it is missing, though {dcp.NAME} names it; fetch it again", path=shown_as
                ) from error
            self._files[blob.file] = _TensorFile(reader, path=shown_as)
        file = self._files[blob.file]
        if blob.offset + blob.length > file.num_bytes:
            raise file.corrupt(f"it has {file.num_bytes:,} bytes, and {dcp.NAME} names more: truncated")
        return file

    def _data(self, blobs: Sequence[Blob]) -> list[bytes]:
        found: dict[int, bytes] = {}

        def read(number: int, file: _TensorFile, extent: Extent) -> None:
            found[number] = file.read(extent)

        files = [self._file(blob) for blob in blobs]
        jobs = [
            functools.partial(read, number, file, Extent(blob.offset, blob.length))
            for number, (file, blob) in enumerate(zip(files, blobs, strict=True))
        ]
        run_together("look up", jobs, max_threads=_MAX_READERS)
        return [found[number] for number in range(len(blobs))]

    def _opened(self, leaf: StoredLeaf, data: bytes, *, trust: bool) -> Any:
        """Raises pickle.UnpicklingError for what takes trust."""
        try:
            if trust:
                return torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)
            return saved_objects.load(data)
        except pickle.UnpicklingError:
            raise
        except Exception as error:
            raise self.corrupt(f"{shown(leaf.path)} cannot be loaded: {error!r:.300}") from error


def _skeleton(paths: Mapping[str, Path], tensors: Mapping[str, StoredTensor]) -> Any:
    """The skeleton of the nested state; numbers count the tensors, and the others apart. Raises ValueError for paths that do not fit."""
    numbers = {name: number for number, name in enumerate(tensors)}
    others = {name: number for number, name in enumerate(name for name in paths if name not in numbers)}

    def node(leaf: Any, _: Path) -> Any:
        return {"tensor": numbers[leaf.name]} if leaf.name in numbers else {"object": others[leaf.name]}

    state = nested((path, _Leaf(name)) for name, path in paths.items())
    return Encoder(node).encode(state)


class _Leaf:
    def __init__(self, name: str) -> None:
        self.name = name


def _in_order(lying: Lying, data: bytes) -> bytes:
    """The items row by row, as many as there are, for the few tensors that were saved in another order, such as channels last."""
    flat = torch.frombuffer(bytearray(data), dtype=dtype_named(lying.dtype))
    dense = flat.as_strided(lying.shape, lying.strides).contiguous()
    return dense.view(-1).view(torch.uint8).numpy().tobytes()
