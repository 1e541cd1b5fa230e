"""The parts of the format of torch.distributed.checkpoint needed to read tensors: metadata, and pickles of tensors.

In: the bytes of `.metadata`, and the output of torch.save for one tensor. Out: names, shapes, and places of bytes.
Knows nothing of: files, torch.

Both are untrusted pickles. They are interpreted by a machine that creates only lists, tuples, numbers and text: a name
stays a name, and a call becomes a record of the call. So nothing is imported or run, and the memory is bounded by the
size of the pickle. Names that torch does not write are refused. No class of torch is used, so any version will do.
"""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Iterator, Mapping
from math import prod
from typing import Any, ClassVar, Final, NamedTuple, NoReturn

from ...core.garbage import no_collection
from ...core.pickles.machine import ALL, PickleMachine
from ...core.pickles.saved_objects import ignore_missing_checksums
from ...core.spec import DTYPES, MAX_DIMS
from .virtual_files import RangeFile

NAME: Final = ".metadata"
_CHECKPOINT: Final = "torch.distributed.checkpoint"
_METADATA_MODULE: Final = f"{_CHECKPOINT}.metadata."
# The classes and functions that occur in the metadata and in pickles of tensors.
_CLASSES: Final = frozenset(
    {
        *(
            _METADATA_MODULE + name
            for name in (
                "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta",
                "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
            )
        ),
        *(  # the plans that Megatron keeps in it
            f"{_CHECKPOINT}.planner.{name}"
            for name in ("BytesIOWriteData", "SavePlan", "TensorWriteData", "WriteItem", "WriteItemType")
        ),
        f"{_CHECKPOINT}.filesystem._StorageInfo",
        f"{_CHECKPOINT}.filesystem._StoragePrefix",
        *(
            f"{module}.{name}"
            for module in ("pathlib", "pathlib._local")
            for name in ("Path", "PosixPath", "PurePath", "PurePosixPath", "PureWindowsPath", "WindowsPath")
        ),
        "collections.OrderedDict",
        "torch.Size",
        "torch.serialization._get_layout",
        "torch._utils._rebuild_parameter",
        "torch._utils._rebuild_tensor_v2",
        "torch._utils._rebuild_tensor_v3",
        "torch.storage.UntypedStorage",
    }
)  # fmt: skip
_STORAGES: Final = {
    "Bool": "bool", "Byte": "uint8", "Char": "int8", "Short": "int16", "Int": "int32", "Long": "int64",
    "Half": "float16", "BFloat16": "bfloat16", "Float": "float32", "Double": "float64",
    "ComplexFloat": "complex64", "ComplexDouble": "complex128",
}  # fmt: skip
_WINDOW: Final = 4096  # usually enough for what torch.save writes before and after a tensor's bytes
_MAX_RECORD: Final = 1 << 20
_MAX_WORD: Final = 16


class TorchOnlyError(ValueError):
    """The data is intact, but only torch can read it."""


class Blob(NamedTuple):
    """The place of one item: a range of bytes in a file beside the metadata."""

    file: str
    offset: int
    length: int


class Chunk(NamedTuple):
    """A rectangle of a tensor, and the place of its pickle."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    blob: Blob


class StoredTensor(NamedTuple):
    """One tensor, stored in `chunks`, which may overlap."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


class Checkpoint(NamedTuple):
    """The content of a metadata file: tensors and blobs by their names, and the path in the state for each name."""

    tensors: Mapping[str, StoredTensor]
    blobs: Mapping[str, Blob]
    paths: Mapping[str, tuple[str | int, ...]]


class ZipRecord(NamedTuple):
    """A record of a zip: `num_bytes` from offset `begin` of the file on, and their CRC-32, if they have one."""

    name: str
    begin: int
    num_bytes: int
    crc: int | None


class TensorExtent(NamedTuple):
    """The place of a tensor's bytes: `num_bytes` from offset `begin` on, as items in `shape` with these `strides`.

    The bytes are in `record`, which may have more.
    """

    dtype: str
    begin: int
    num_bytes: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    record: ZipRecord

    @property
    def is_dense(self) -> bool:
        """True if the items are in row-major order without gaps."""
        step = 1
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size != 1 and stride != step:
                return not prod(self.shape)
            step *= size
        return True


def parse(data: bytes) -> Checkpoint:
    """Parse a metadata file. Raises TorchOnlyError for an intact file that only torch can read, and ValueError for a
    malformed file or a refused name.
    """
    try:
        with no_collection():
            return _MetadataReader(len(data)).checkpoint(_DcpMachine().follow(data))
    except TorchOnlyError:
        raise
    except _RefusedError as error:
        raise ValueError(str(error)) from error
    except Exception as error:  # an untrusted pickle may cause any error
        raise ValueError(f"it is malformed ({type(error).__name__}: {error!s:.200})") from error


class _MetadataReader:
    """Reads the records of one metadata file in time linear in its bytes. `parse` creates one for each file.

    A pickle may refer to the same list a thousand times, at two bytes each. So items are counted: torch writes at least
    one byte for each item of a shape, a path or a list of chunks.
    """

    def __init__(self, num_bytes: int) -> None:
        self._left = num_bytes

    def checkpoint(self, record: Any) -> Checkpoint:
        fields = self._fields(record, "Metadata")
        blobs_by_key = self._blobs(_pairs(fields["storage_data"]))
        tensors: dict[str, StoredTensor] = {}
        blobs: dict[str, Blob] = {}
        for name, metadata in _pairs(fields["state_dict_metadata"]):
            if type(name) is not str or name in tensors or name in blobs:
                raise ValueError(f"{_brief(name)} is not a single name")
            if metadata.name == f"{_METADATA_MODULE}BytesStorageMetadata":
                blobs[name] = blobs_by_key[name, None]
            else:
                tensors[name] = self._tensor(name, self._fields(metadata, "TensorStorageMetadata"), blobs_by_key)
        return Checkpoint(tensors, blobs, dict(self._paths(fields.get("planner_data"))))

    def _spend(self, num_items: int) -> None:
        self._left -= num_items
        if self._left < 0:
            raise ValueError("it repeats the same references without end")

    def _fields(self, record: Any, name: str) -> dict[str, Any]:
        """The attributes of an instance of one of torch's classes."""
        if not isinstance(record, _CallRecord) or record.name.rpartition(".")[2] != name:
            raise ValueError(f"{name} is missing")
        pairs = _pairs(record.state)
        self._spend(len(pairs))
        return {key: value for key, value in pairs if type(key) is str}

    def _ints(self, values: Any) -> tuple[int, ...]:
        ints = _ints(values)
        self._spend(len(ints))
        return ints

    def _blobs(self, pairs: Any) -> dict[tuple[str, tuple[int, ...] | None], Blob]:
        blobs = {}
        for index, info in pairs:
            key_fields, info_fields = self._fields(index, "MetadataIndex"), self._fields(info, "_StorageInfo")
            name = key_fields["fqn"]
            if type(name) is not str:
                raise ValueError(f"{_brief(name)} is not a name")
            if info_fields.get("transform_descriptors"):
                raise TorchOnlyError(
                    f"{name!a:.200} was written through extensions ({_brief(info_fields['transform_descriptors'])})"
                )
            file = info_fields["relative_path"]
            if type(file) is not str or not _is_beside(file):
                raise ValueError(f"{_brief(file)} is not the name of a file beside it")
            key = name, None if key_fields.get("offset") is None else self._ints(key_fields["offset"])
            if key in blobs:
                raise ValueError(f"{name!a:.200} is at two places")
            blobs[key] = Blob(file, *self._ints((info_fields["offset"], info_fields["length"])))
        _check_disjoint(blobs)
        return blobs

    def _tensor(self, name: str, fields: Mapping[str, Any], blobs: Mapping[Any, Blob]) -> StoredTensor:
        properties = fields["properties"]
        if properties.name != f"{_METADATA_MODULE}TensorProperties":
            raise ValueError(f"{properties.name} are not tensor properties")
        state = properties.state  # a tuple of five, or six from torch 2.15 on
        dtype = state[0].name.removeprefix("torch.") if isinstance(state, tuple) else ""
        shape = self._ints(fields["size"])
        if dtype not in DTYPES or len(shape) > MAX_DIMS or prod(n or 1 for n in shape) >= 2**63:
            raise ValueError(f"{name!a:.200} has dtype {dtype!r:.50} and shape {shape!r:.200}")
        chunks = []
        for item in fields["chunks"]:
            chunk_fields = self._fields(item, "ChunkStorageMetadata")
            offsets, sizes = self._ints(chunk_fields["offsets"]), self._ints(chunk_fields["sizes"])
            if not len(offsets) == len(sizes) == len(shape) or any(
                at + size > whole for at, size, whole in zip(offsets, sizes, shape, strict=True)
            ):
                raise ValueError(f"{name!a:.200} of shape {shape} has no piece at {offsets} of {sizes}")
            if prod(sizes):
                chunks.append(Chunk(offsets, sizes, blobs[name, offsets]))
        return StoredTensor(dtype, shape, tuple(chunks))

    def _paths(self, planner_data: Any) -> Iterator[tuple[str, tuple[str | int, ...]]]:
        """The paths that torch's own planners have stored; data of other planners is ignored."""
        for name, path in planner_data if isinstance(planner_data, _Pairs) else ():
            if type(name) is str and isinstance(path, tuple):
                self._spend(len(path))
                if all(type(key) in (str, int) for key in path):
                    yield name, path


def _check_disjoint(blobs: Mapping[tuple[str, Any], Blob]) -> None:
    """Raise ValueError if two items share bytes. Even tied weights do not; so items never exceed the files."""
    last, owner = Blob("", 0, 0), ""
    for (name, _), blob in sorted(blobs.items(), key=lambda item: item[1]):
        if blob.file == last.file and blob.offset < last.offset + last.length:
            raise ValueError(f"{name!a:.200} and {owner!a:.200} are in the same bytes of {blob.file!r:.200}")
        last, owner = blob, name


def _is_beside(file: str) -> bool:
    parts = file.split("/")
    return file.isprintable() and "\\" not in file and not any(part in ("", ".", "..") for part in parts)


# --- one tensor, as torch.save writes it --------------------------------------------------------------------------


def locate_tensor(read: Callable[[int, int], bytes], blob: Blob) -> TensorExtent:
    """The place of the bytes of the tensor in a blob. `read` is called with an offset in the file and a length.

    Raises TorchOnlyError for a tensor that only torch can read, and ValueError for a blob that is not a single plain
    tensor as torch.save writes it.
    """
    window = _Window(read, blob)
    try:
        with zipfile.ZipFile(window) as records:
            ignore_missing_checksums(records.infolist())
            infos = {info.filename.partition("/")[2]: info for info in records.infolist()}
            if "byteorder" in infos and _record(records, infos["byteorder"], _MAX_WORD) != b"little":
                raise ValueError("its bytes are in another order")
            record = _DcpMachine().follow(_record(records, infos["data.pkl"], _MAX_RECORD))
        return _location(record, window, infos)
    except TorchOnlyError:
        raise
    except Exception as error:
        raise ValueError(
            f"it is not a tensor as torch.save writes it ({type(error).__name__}: {error!s:.200})"
        ) from error


def _record(records: zipfile.ZipFile, info: zipfile.ZipInfo, max_bytes: int) -> bytes:
    """The bytes of an uncompressed record: a compressed one might expand to any size."""
    if info.compress_type != zipfile.ZIP_STORED or info.file_size > max_bytes:
        raise ValueError(f"its {info.filename!a:.200} is compressed, or too large for one tensor")
    return records.read(info)


def _location(record: Any, window: _Window, infos: Mapping[str, zipfile.ZipInfo]) -> TensorExtent:
    if record.name == "torch._utils._rebuild_parameter":
        record = record.arguments[0]
    dtype = None
    if record.name == "torch._utils._rebuild_tensor_v3":
        storage, offset, shape, strides, _, _, kind, *more = record.arguments
        dtype = kind.name.removeprefix("torch.")
    elif record.name == "torch._utils._rebuild_tensor_v2":
        storage, offset, shape, strides, _, _, *more = record.arguments
    else:
        raise ValueError(f"it is made by {record.name}")
    if any(more):
        raise TorchOnlyError("it is a view that torch computes on reading, such as a conjugate")
    word, kind, key, _, _ = storage
    if word != "storage" or type(key) is not str:
        raise ValueError("it has no storage")
    dtype = dtype or _STORAGES[kind.name.removeprefix("torch.").removesuffix("Storage")]
    info = infos[f"data/{key}"]
    if info.compress_type != zipfile.ZIP_STORED:
        raise ValueError("it is compressed")
    (offset,), shape, strides = _ints((offset,)), _ints(shape), _ints(strides)
    item_bytes = DTYPES[dtype][0]
    num_items = 1 + sum((n - 1) * step for n, step in zip(shape, strides, strict=True)) if prod(shape) else 0
    # Items must not share memory either: the tensor would be larger in memory than in the file. torch expands such.
    if max(offset + num_items, prod(shape)) * item_bytes > info.file_size:
        raise ValueError("it is larger than its storage")
    header = window.at(info.header_offset, 30)
    begin = info.header_offset + 30 + sum(int.from_bytes(header[at : at + 2], "little") for at in (26, 28))
    if begin + info.file_size > window.length:
        raise ValueError("its storage is cut off")
    begin += window.offset
    # `ignore_missing_checksums` removes the attribute if there is no checksum.
    stored = ZipRecord(info.filename, begin, info.file_size, getattr(info, "CRC", None))
    return TensorExtent(dtype, begin + offset * item_bytes, num_items * item_bytes, shape, strides, stored)


class _Window(RangeFile):
    """A blob as a file object. Its begin and end are read once and kept, since zipfile reads little else."""

    def __init__(self, read: Callable[[int, int], bytes], blob: Blob) -> None:
        super().__init__(self._fill, blob.length)
        self.offset, self.length, self._read = blob.offset, blob.length, read
        first = min(_WINDOW, self.length)
        self._known = {at: read(self.offset + at, first) for at in {0, self.length - first}}

    def at(self, offset: int, length: int) -> bytes:
        length = max(0, min(length, self.length - offset))
        if length > _MAX_RECORD:
            raise ValueError("it has more parts than a tensor has")
        for begin, data in self._known.items():
            if begin <= offset and offset + length <= begin + len(data):
                return data[offset - begin :][:length]
        return self._read(self.offset + offset, length)

    def _fill(self, offset: int, target: memoryview) -> None:
        target[:] = self.at(offset, len(target))


# --- the machine ----------------------------------------------------------------------------------------------------


class _RefusedError(Exception):
    """The metadata is refused, although it is not damaged."""


class _GlobalName(NamedTuple):
    name: str


class _CallRecord:
    """A call that would create an object, and the state that the object would get."""

    def __init__(self, name: str, arguments: tuple[Any, ...]) -> None:
        self.name, self.arguments = name, arguments
        self.state: Any = None


def _brief(value: Any) -> str:
    """A short text for messages: tuples nested in a small pickle may have a `repr` of any length."""
    if isinstance(value, tuple | list) and len(value) <= MAX_DIMS and all(type(n) in (int, str) for n in value):
        return f"{value!a:.200}"
    if isinstance(value, str | bytes):
        return f"{value[:200]!a:.200}"
    return (
        f"{value!a:.200}"
        if value is None or isinstance(value, int | float)
        else f"a {type(value).__name__.strip('_').lower()}"
    )


class _Pairs(list[tuple[Any, Any]]):
    """The items of a dict, in a list, since the keys must not be hashed."""


def _pairs(value: Any) -> _Pairs:
    if not isinstance(value, _Pairs):
        raise ValueError(f"{_brief(value)} is not a dict")
    return value


def _ints(values: Any) -> tuple[int, ...]:
    if isinstance(values, _CallRecord) and values.name == "torch.Size":
        (values,) = values.arguments or ((),)
    if (
        not isinstance(values, list | tuple)
        or len(values) > MAX_DIMS
        or not all(type(n) is int and 0 <= n < 2**63 for n in values)
    ):
        raise ValueError(f"{_brief(values)} are not counts")
    return tuple(values)


class _DcpMachine(PickleMachine):
    """Interprets the pickles of torch.distributed.checkpoint, and refuses names that it does not write."""

    accepted: ClassVar = ALL - {"EMPTY_SET"}
    protocols: ClassVar = range(2, 6)

    def refuse(self, instruction: str) -> NoReturn:
        raise _RefusedError(f"it has the instruction {instruction}, which torch does not write")

    def find_global(self, module: str, name: str) -> _GlobalName:
        full = f"{module}.{name}"
        is_dtype = module == "torch" and name in DTYPES
        is_storage = module == "torch" and name.removesuffix("Storage") in _STORAGES
        if not (full in _CLASSES or is_dtype or is_storage):
            raise _RefusedError(
                f"it names {full!a:.200}, which no checkpoint of torch.distributed.checkpoint needs; nothing was run"
            )
        return _GlobalName(full)

    def call(self, function: Any, arguments: Any) -> _CallRecord:
        if not isinstance(function, _GlobalName) or not isinstance(arguments, tuple):
            raise ValueError("it calls an object that is not a function")
        return _CallRecord(function.name, arguments)

    def set_state(self, record: Any, state: Any) -> None:
        if not isinstance(record, _CallRecord):
            raise ValueError("it sets the state of an object that has none")
        record.state = state

    def persistent_load(self, key: Any) -> Any:
        return key

    def empty_dict(self) -> _Pairs:
        return _Pairs()

    def set_items(self, into: Any, items: list[Any]) -> None:
        if not (isinstance(into, _CallRecord) and into.name == "collections.OrderedDict"):
            _pairs(into).extend(zip(items[::2], items[1::2], strict=True))
