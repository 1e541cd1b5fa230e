"""The files of torch.distributed.checkpoint, as far as it is needed to read tensors from it: its metadata, and its tensors.

In: the bytes of `.metadata`, and of what torch.save made of one tensor. Out: names, shapes, and where which bytes lie.
Knows nothing of: files, torch.

Both are pickles, and may be anybody's. They are gone through by an interpreter that makes nothing but lists, tuples, numbers
and text: a name is a text, and a call of it is a record of that call. So nothing is imported or run, and it takes no more
memory than the bytes justify. Names that torch does not write there are refused. Because nothing is made of torch's own
classes, it does not matter of which version they are.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable, Iterator, Mapping
from math import prod
from typing import Any, ClassVar, Final, NamedTuple, NoReturn

from ..collector import no_collection
from ..pickles.machine import ALL, PickleMachine
from ..spec import DTYPES

NAME: Final = ".metadata"
_CHECKPOINT: Final = "torch.distributed.checkpoint"
_MADE_BY: Final = f"{_CHECKPOINT}.metadata."
# Classes whose instances are in the metadata; and functions, which there make what is told by their arguments.
_CLASSES: Final = frozenset(
    {
        *(
            _MADE_BY + name
            for name in (
                "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta",
                "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
            )
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
    "Bool": "bool", "Byte": "uint8", "Char": "int8", "Short": "int16", "Int": "int32", "Long": "int64", "Half": "float16",
    "BFloat16": "bfloat16", "Float": "float32", "Double": "float64", "ComplexFloat": "complex64", "ComplexDouble": "complex128",
}  # fmt: skip
_MAX_DIMS: Final = 64
# Around what torch.save writes of a tensor beside its bytes; and no record of that is larger.
_WINDOW: Final = 4096
_MAX_RECORD: Final = 1 << 20
_MAX_WORD: Final = 16


class OthersReadError(ValueError):
    """For what is sound, but only torch can read."""


class Blob(NamedTuple):
    """Where torch has written one item: bytes of a file beside the metadata."""

    file: str
    offset: int
    length: int


class Chunk(NamedTuple):
    """A rectangle of a tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    blob: Blob


class StoredTensor(NamedTuple):
    """One tensor; it is in `chunks`, which may overlap."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


class Checkpoint(NamedTuple):
    """The content of a metadata file: tensors and blobs by their names, and the path in the state that a name stands for."""

    tensors: Mapping[str, StoredTensor]
    blobs: Mapping[str, Blob]
    paths: Mapping[str, tuple[str | int, ...]]


class Lying(NamedTuple):
    """Where the bytes of a tensor lie, from the first that belongs to it: `num_bytes` from `begin` on. Counted in items,
    the tensor is `shape` with these `strides`.
    """

    dtype: str
    begin: int
    num_bytes: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def is_dense(self) -> bool:
        """Whether the items follow each other row by row."""
        step = 1
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size != 1 and stride != step:
                return not prod(self.shape)
            step *= size
        return True


def parse(data: bytes) -> Checkpoint:
    """Read a metadata file. Raises ValueError for what is none, and names what it refuses."""
    try:
        with no_collection():
            return _MetadataReader(len(data)).checkpoint(_Machine().follow(data))
    except _RefusedError as error:
        raise ValueError(str(error)) from error
    except Exception as error:  # the text may be anybody's: whatever it makes Python raise means the same
        raise ValueError(f"it is malformed ({type(error).__name__}: {error!s:.200})") from error


class _MetadataReader:
    """Reads the records of one file's program, in time linear in its bytes.

    A pickle may name one list a thousand times in two bytes each, so what is gone through is counted: torch writes at least
    a byte for each item of a shape, a path or a list of chunks.
    """

    def __init__(self, num_bytes: int) -> None:
        self._left = num_bytes

    def checkpoint(self, made: Any) -> Checkpoint:
        fields = self._fields(made, "Metadata")
        stored = self._stored(_pairs(fields["storage_data"]))
        tensors: dict[str, StoredTensor] = {}
        blobs: dict[str, Blob] = {}
        for name, metadata in _pairs(fields["state_dict_metadata"]):
            if type(name) is not str or name in tensors or name in blobs:
                raise ValueError(f"{_brief(name)} is not the name of one thing")
            if metadata.name == f"{_MADE_BY}BytesStorageMetadata":
                blobs[name] = stored[name, None]
            else:
                tensors[name] = self._tensor(name, self._fields(metadata, "TensorStorageMetadata"), stored)
        return Checkpoint(tensors, blobs, dict(self._paths(fields.get("planner_data"))))

    def _spend(self, num_items: int) -> None:
        self._left -= num_items
        if self._left < 0:
            raise ValueError("it names the same things again and again")

    def _fields(self, made: Any, name: str) -> dict[str, Any]:
        """The attributes of an instance of one of torch's classes."""
        if not isinstance(made, _MadeObject) or made.name.rpartition(".")[2] != name:
            raise ValueError(f"there is no {name} where one should be")
        pairs = _pairs(made.state)
        self._spend(len(pairs))
        return {key: value for key, value in pairs if type(key) is str}

    def _ints(self, values: Any) -> tuple[int, ...]:
        ints = _ints(values)
        self._spend(len(ints))
        return ints

    def _stored(self, pairs: Any) -> dict[tuple[str, tuple[int, ...] | None], Blob]:
        found = {}
        for index, info in pairs:
            at, where = self._fields(index, "MetadataIndex"), self._fields(info, "_StorageInfo")
            name = at["fqn"]
            if type(name) is not str:
                raise ValueError(f"{_brief(name)} is no name")
            if where.get("transform_descriptors"):
                raise _RefusedError(
                    f"{name!a:.200} was written through extensions ({_brief(where['transform_descriptors'])}); load it with "
                    "torch.distributed.checkpoint"
                )
            file = where["relative_path"]
            if type(file) is not str or not _is_beside(file):
                raise ValueError(f"{_brief(file)} is not the name of a file beside it")
            key = name, None if at.get("offset") is None else self._ints(at["offset"])
            if key in found:
                raise ValueError(f"{name!a:.200} is at two places")
            found[key] = Blob(file, *self._ints((where["offset"], where["length"])))
        _check_apart(found)
        return found

    def _tensor(self, name: str, fields: Mapping[str, Any], stored: Mapping[Any, Blob]) -> StoredTensor:
        properties = fields["properties"]
        if properties.name != f"{_MADE_BY}TensorProperties":
            raise ValueError(f"{properties.name} are no properties")
        state = properties.state  # a tuple of five, or six from torch 2.15 on
        dtype = state[0].name.removeprefix("torch.") if isinstance(state, tuple) else ""
        shape = self._ints(fields["size"])
        if dtype not in DTYPES or len(shape) > _MAX_DIMS or prod(n or 1 for n in shape) >= 2**63:
            raise ValueError(f"{name!a:.200} has dtype {dtype!r:.50} and shape {shape!r:.200}")
        chunks = []
        for one in fields["chunks"]:
            chunk = self._fields(one, "ChunkStorageMetadata")
            offsets, sizes = self._ints(chunk["offsets"]), self._ints(chunk["sizes"])
            if not len(offsets) == len(sizes) == len(shape) or any(
                at + size > whole for at, size, whole in zip(offsets, sizes, shape, strict=True)
            ):
                raise ValueError(f"{name!a:.200} of shape {shape} has no piece at {offsets} of {sizes}")
            if prod(sizes):
                chunks.append(Chunk(offsets, sizes, stored[name, offsets]))
        return StoredTensor(dtype, shape, tuple(chunks))

    def _paths(self, planner_data: Any) -> Iterator[tuple[str, tuple[str | int, ...]]]:
        """The paths of torch's own planners; data that others have kept there means nothing here."""
        for name, path in planner_data if isinstance(planner_data, _Pairs) else ():
            if type(name) is str and isinstance(path, tuple):
                self._spend(len(path))
                if all(type(key) in (str, int) for key in path):
                    yield name, path


def _check_apart(found: Mapping[tuple[str, Any], Blob]) -> None:
    """No two things lie in the same bytes, not even tied weights: all together are never larger than the files."""
    last, owner = Blob("", 0, 0), ""
    for (name, _), blob in sorted(found.items(), key=lambda item: item[1]):
        if blob.file == last.file and blob.offset < last.offset + last.length:
            raise ValueError(f"{name!a:.200} and {owner!a:.200} are in the same bytes of {blob.file!r:.200}")
        last, owner = blob, name


def _is_beside(file: str) -> bool:
    parts = file.split("/")
    return file.isprintable() and "\\" not in file and not any(part in ("", ".", "..") for part in parts)


# --- one tensor, as torch.save has written it ----------------------------------------------------------------------


def tensor_in(read: Callable[[int, int], bytes], blob: Blob) -> Lying:
    """Where the bytes of the tensor are that a blob holds. `read` is called with an offset in the file and a length.

    Raises ValueError for anything that is not one tensor of plain memory, as torch.save writes it, and OthersReadError where it is
    sound all the same.
    """
    window = _Window(read, blob)
    try:
        with zipfile.ZipFile(window) as records:
            infos = {info.filename.partition("/")[2]: info for info in records.infolist()}
            if "byteorder" in infos and _record(records, infos["byteorder"], _MAX_WORD) != b"little":
                raise ValueError("its bytes are in another order")
            made = _Machine().follow(_record(records, infos["data.pkl"], _MAX_RECORD))
        return _lying(made, window, infos)
    except OthersReadError:
        raise
    except Exception as error:
        raise ValueError(
            f"it is not a tensor as torch.save writes it ({type(error).__name__}: {error!s:.200})"
        ) from error


def _record(records: zipfile.ZipFile, info: zipfile.ZipInfo, max_bytes: int) -> bytes:
    """One as torch writes it: a compressed one could become any amount."""
    if info.compress_type != zipfile.ZIP_STORED or info.file_size > max_bytes:
        raise ValueError(f"its {info.filename!a:.200} is compressed, or too large for one tensor")
    return records.read(info)


def _lying(made: Any, window: _Window, infos: Mapping[str, zipfile.ZipInfo]) -> Lying:
    if made.name == "torch._utils._rebuild_parameter":
        made = made.arguments[0]
    dtype = None
    if made.name == "torch._utils._rebuild_tensor_v3":
        storage, offset, shape, strides, _, _, kind, *more = made.arguments
        dtype = kind.name.removeprefix("torch.")
    elif made.name == "torch._utils._rebuild_tensor_v2":
        storage, offset, shape, strides, _, _, *more = made.arguments
    else:
        raise ValueError(f"it is made by {made.name}")
    if any(more):
        raise OthersReadError("it is a view that is computed when it is read, such as a conjugate")
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
    # Nor may its items share places: it would be larger in memory than in the file. torch writes it out.
    if max(offset + num_items, prod(shape)) * item_bytes > info.file_size:
        raise ValueError("it is larger than its storage")
    header = window.at(info.header_offset, 30)
    begin = info.header_offset + 30 + sum(int.from_bytes(header[at : at + 2], "little") for at in (26, 28))
    if begin + info.file_size > window.length:
        raise ValueError("its storage is cut off")
    return Lying(dtype, window.offset + begin + offset * item_bytes, num_items * item_bytes, shape, strides)


class _Window(io.RawIOBase):
    """One blob as a file, of which the beginning and the end are read at once, and little else at all."""

    def __init__(self, read: Callable[[int, int], bytes], blob: Blob) -> None:
        self.offset, self.length = blob.offset, blob.length
        self._read, self._position = read, 0
        self._known: dict[int, bytes] = {}
        first = min(_WINDOW, self.length)
        for at in sorted({0, self.length - first}):
            self._known[at] = read(self.offset + at, first)

    def at(self, offset: int, length: int) -> bytes:
        length = max(0, min(length, self.length - offset))
        if length > _MAX_RECORD:
            raise ValueError("it has more beside its bytes than a tensor has")
        for begin, data in self._known.items():
            if begin <= offset and offset + length <= begin + len(data):
                return data[offset - begin :][:length]
        return self._read(self.offset + offset, length)

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = 0) -> int:
        self._position = max(0, offset + (0, self._position, self.length)[whence])
        return self._position

    def read(self, size: int | None = -1) -> bytes:
        wanted = self.length - self._position if size is None or size < 0 else size
        data = self.at(self._position, wanted)
        self._position += len(data)
        return data


# --- pickles, of which nothing is made ------------------------------------------------------------------------------


class _RefusedError(Exception):
    """For what is no damage."""


class _NamedGlobal(NamedTuple):
    name: str


class _MadeObject:
    """The object that a class or function would have made of these arguments, and the state that it would have been given."""

    def __init__(self, name: str, arguments: tuple[Any, ...]) -> None:
        self.name, self.arguments = name, arguments
        self.state: Any = None


def _brief(value: Any) -> str:
    """For messages. A tuple in a tuple, twice, and so on, is a small pickle with a `repr` of any length."""
    if (
        isinstance(value, tuple | list)
        and len(value) <= _MAX_DIMS
        and all(type(n) in (int, str) for n in value)
    ):
        return f"{value!a:.200}"
    if isinstance(value, str | bytes):
        return f"{value[:200]!a:.200}"
    return (
        f"{value!a:.200}"
        if value is None or isinstance(value, int | float)
        else f"a {type(value).__name__.strip('_').lower()}"
    )


class _Pairs(list[tuple[Any, Any]]):
    """The items of a dict, whose keys are not hashed: they may be anything."""


def _pairs(value: Any) -> _Pairs:
    if not isinstance(value, _Pairs):
        raise ValueError(f"{_brief(value)} is not a dict")
    return value


def _ints(values: Any) -> tuple[int, ...]:
    if isinstance(values, _MadeObject) and values.name == "torch.Size":
        (values,) = values.arguments or ((),)
    if (
        not isinstance(values, list | tuple)
        or len(values) > _MAX_DIMS
        or not all(type(n) is int and 0 <= n < 2**63 for n in values)
    ):
        raise ValueError(f"{_brief(values)} are not counts")
    return tuple(values)


class _Machine(PickleMachine):
    accepted: ClassVar = ALL - {"EMPTY_SET"}
    protocols: ClassVar = range(2, 6)

    def refuse(self, instruction: str) -> NoReturn:
        raise _RefusedError(f"it has the instruction {instruction}, which torch does not write")

    def named(self, module: str, name: str) -> _NamedGlobal:
        full = f"{module}.{name}"
        is_dtype = module == "torch" and name in DTYPES
        is_storage = module == "torch" and name.removesuffix("Storage") in _STORAGES
        if not (full in _CLASSES or is_dtype or is_storage):
            raise _RefusedError(
                f"it names {full!a:.200}, which no checkpoint of torch.distributed.checkpoint needs; nothing was run"
            )
        return _NamedGlobal(full)

    def called(self, function: Any, arguments: Any) -> _MadeObject:
        if not isinstance(function, _NamedGlobal) or not isinstance(arguments, tuple):
            raise ValueError("it calls what cannot be called")
        return _MadeObject(function.name, arguments)

    def given_state(self, made: Any, state: Any) -> None:
        if not isinstance(made, _MadeObject):
            raise ValueError("it gives a state to what has none")
        made.state = state

    def persistent(self, key: Any) -> Any:
        return key

    def empty_dict(self) -> _Pairs:
        return _Pairs()

    def set_items(self, into: Any, items: list[Any]) -> None:
        if not (isinstance(into, _MadeObject) and into.name == "collections.OrderedDict"):
            _pairs(into).extend(zip(items[::2], items[1::2], strict=True))
