"""Versions of published weights: what their folders are called, and what the index of each says.

In: names, checksums. Out: the bytes of an index, and back. Knows nothing of: tensors, where the folders are.

A version is a folder of Hugging Face, `weight_v000120`. A full one, an anchor, holds the weights. A delta holds, of each
tensor that has changed since its base, one frame of zstd, as a tensor of bytes under the same name; the checksum of the
tensor's new bytes is in the metadata of that file. The index, `model.safetensors.index.json`, says which of the two it is,
and is there only when the version is whole. What other programs do not read of it is under "async_ckpt".

An index of ours has a digest of itself, there too: that of all of its bytes, with zeros in the digest's own place. It is
compared before anything else in the index is believed.

An "xor" frame holds the new bytes xor the base's; an "overwrite" frame a count, the positions of so many bytes, all of them
little-endian and of 4 bytes, and then their new values.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from importlib.util import find_spec
from json.encoder import encode_basestring_ascii
from typing import Any, Final, Literal, NamedTuple, Protocol

import xxhash

Encoding = Literal["xor", "overwrite"]

INDEX: Final = "model.safetensors.index.json"
ENCODINGS: Final = ("xor", "overwrite")
COUNT_BYTES: Final = 4
POSITION_BYTES: Final = 4
MAX_OVERWRITTEN_BYTES: Final = 2**32
MAX_VERSION: Final = 10**18 - 1
OUR_CHECKSUMS: Final = "xxh3-128"
# What others may have in their deltas, and how many digits each has.
CHECKSUM_DIGITS: Final = {OUR_CHECKSUMS: 32, "adler32": 8, "blake3": 64}
_DIGITS: Final = re.compile(r"[0-9a-f]+")
_COMPRESSION: Final = "zstd"
_OURS: Final = "async_ckpt"
# Of which no other delta says anything, and every delta says all.
_OF_DELTAS: Final = ("base_version", "delta_encoding", "compression_format")
_DIGEST: Final = "digest"
_BLANK: Final = "0" * CHECKSUM_DIGITS[OUR_CHECKSUMS]
# What releases before the digest have written; an index that has none must have these and no others.
_UNSEALED: Final = frozenset(
    {"identity", "structure", "digests", "start", "slices", "checksums", "base_identity"}
)
_NUMBER: Final = re.compile(r"[0-9]{1,18}")
_ATTEMPT: Final = re.compile(r"files\.[0-9a-f]{8}")
_FOLDER: Final = re.compile(r"weight_v(\d{6,18})")


def folder_of(version: int) -> str:
    return f"weight_v{version:06d}"


def version_of(folder: str) -> int | None:
    """The version that a folder of this name holds; None if it holds none."""
    match = _FOLDER.fullmatch(folder)
    if match is None:
        return None
    version = int(match[1])
    return version if folder_of(version) == folder else None


def stays_inside(file: object) -> bool:
    """Whether this is the path of a file below a folder, wherever the folder is; not one where receivers keep their marks."""
    if not isinstance(file, str) or not file or "\0" in file or "\\" in file or file[1:2] == ":":
        return False
    parts = file.split("/")
    return is_text(file) and parts[0].lower() != ".weight_sync" and not {"", ".", ".."} & {*parts}


def is_text(name: object) -> bool:
    """Whether it is a text of UTF-8: JSON can spell half of a surrogate pair."""
    try:
        return isinstance(name, str) and name.encode() is not None
    except UnicodeEncodeError:
        return False


def checksum(data: bytes | memoryview) -> str:
    return xxhash.xxh3_128_hexdigest(data)


class Hash(Protocol):
    """A hash object of `hashlib` and its like."""

    def update(self, data: bytes | memoryview, /) -> object: ...

    def hexdigest(self) -> str: ...


class _Adler32:
    def __init__(self) -> None:
        self._sum = 1

    def update(self, data: bytes | memoryview, /) -> None:
        self._sum = zlib.adler32(data, self._sum)

    def hexdigest(self) -> str:
        return f"{self._sum:08x}"


def new_hash(checksum_format: str) -> Hash:
    """The hash of this format."""
    if checksum_format == OUR_CHECKSUMS:
        return xxhash.xxh3_128()
    if checksum_format == "adler32":
        return _Adler32()
    made: Hash = import_module("blake3").blake3()
    return made


def is_checksum(told: object, checksum_format: str = OUR_CHECKSUMS) -> bool:
    """Whether it has the form of one."""
    digits = CHECKSUM_DIGITS[checksum_format]
    return isinstance(told, str) and len(told) == digits and _DIGITS.fullmatch(told) is not None


def identity_of(checksums: Mapping[str, str]) -> str:
    """One digest of all weights, from those of their bytes by name: equal for the same weights, whoever counts them."""
    return checksum("".join(f"{name}\0{checksums[name]}\0" for name in sorted(checksums)).encode())


def structure_of(tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> str:
    """One digest of names, dtypes and shapes: it says whether two versions are of the same model."""
    # As JSON of a list for each, which would be hundreds of thousands of lists.
    rest: dict[tuple[str, tuple[int, ...]], str] = {}
    rows = []
    for name, dtype, shape in sorted(tensors):
        told = rest.setdefault((dtype, shape), "") or json.dumps([dtype, *shape])[1:]
        rest[dtype, shape] = told
        rows.append(f"[{encode_basestring_ascii(name)}, {told}")
    return checksum(f"[{', '.join(rows)}]".encode())


class SliceOf(NamedTuple):
    """The part of a tensor of the model that one of these tensors is, where each rank publishes what it holds."""

    name: str
    dtype: str
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def parsed(cls, told: Any) -> SliceOf:
        """Raises ValueError for what is none."""
        match told:
            case [str(name), str(dtype), [*shape], [*offsets], [*sizes]]:
                numbers = [*shape, *offsets, *sizes]
            case _:
                raise ValueError(f"{told!r:.200} is no slice of a tensor")
        fits = (
            is_text(name)
            and all(type(number) is int for number in numbers)
            and len(shape) == len(offsets) == len(sizes)
            and all(0 <= at <= at + n <= length for length, at, n in zip(shape, offsets, sizes, strict=True))
        )
        if not fits:
            raise ValueError(f"{name!r:.200} has a slice that is not in it")
        return cls(name, dtype, tuple(shape), tuple(offsets), tuple(sizes))


@dataclass(frozen=True, slots=True)
class DeltaFields:
    """The fields of an index that only a delta has: which weights it changes, and how its frames are read."""

    base: int
    encoding: Encoding
    checksum_format: str = OUR_CHECKSUMS
    base_identity: str = ""  # empty in the deltas of other writers


@dataclass(frozen=True, slots=True)
class RankSlices:
    """The slices that one rank publishes, and the start of all ranks to which they belong. Empty for a whole model."""

    start: str = ""
    of_tensors: Mapping[str, SliceOf] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class VersionIndex:
    """The index of a version. Strings and mappings are empty where its writer left them out."""

    version: int
    files: Mapping[str, str]  # the file of each tensor, by name
    delta: DeltaFields | None = None  # None for an anchor
    identity: str = ""  # of all weights of this version
    structure: str = ""
    checksums: Mapping[str, str] = field(default_factory=dict)  # of all tensors, of an anchor
    digests: Mapping[str, str] = field(default_factory=dict)  # of all other files, and of those of a delta
    heads: Mapping[str, str] = field(default_factory=dict)  # of an anchor: the digests of its files' headers
    slices: RankSlices = RankSlices()
    attempt: str = ""  # the folder within, in which all other files are; empty on a disk
    is_sealed: bool = False  # it has a digest of itself, as a Publisher's has
    stamp: str = field(
        default="", compare=False
    )  # by which the storage tells it from another one of its name

    @property
    def prefix(self) -> str:
        """The beginning of the names of its files in the folder of the version."""
        return f"{self.attempt}/" if self.attempt else ""

    @property
    def weight_map(self) -> dict[str, str]:
        """The file of each tensor, by its name, as other programs read it."""
        return {name: self.prefix + file for name, file in self.files.items()}

    @property
    def is_anchor(self) -> bool:
        return self.delta is None

    @property
    def base(self) -> int | None:
        """The version that a delta is against; None for an anchor."""
        return None if self.delta is None else self.delta.base

    @property
    def tensor_files(self) -> list[str]:
        return sorted(set(self.files.values()))

    def metadata(self) -> dict[str, Any]:
        """The "metadata" of an index that is sealed afterwards."""
        ours: dict[str, Any] = {
            _DIGEST: _BLANK,
            "identity": self.identity,
            "structure": self.structure,
        }
        ours["digests"] = dict(self.digests)
        if self.attempt:
            ours["attempt"] = self.attempt
        if self.slices.start:
            ours |= {"start": self.slices.start, "slices": dict(self.slices.of_tensors)}
        told: dict[str, Any] = {"version": f"{self.version:06d}", "checksum_format": OUR_CHECKSUMS}
        if self.delta is None:
            ours |= {"checksums": dict(self.checksums), "heads": dict(self.heads)}
        else:
            ours["base_identity"] = self.delta.base_identity
            told["base_version"] = f"{self.delta.base:06d}"
            told["delta_encoding"] = self.delta.encoding
            told["compression_format"] = _COMPRESSION
        return {**told, _OURS: ours}


def dump_delta(index: VersionIndex) -> bytes:
    """The index of a delta. That of an anchor is one of Hugging Face, with more in its metadata."""
    told = {"metadata": index.metadata(), "weight_map": index.weight_map}
    return seal((json.dumps(told, indent=2, sort_keys=True) + "\n").encode())


def seal(data: bytes) -> bytes:
    """An index with its own digest in it, in the place that `metadata` has left for it."""
    place = f'"{_DIGEST}": "{_BLANK}"'.encode()
    if data.count(place) != 1:
        raise ValueError("an index has one place for its digest")
    return data.replace(place, place.replace(_BLANK.encode(), checksum(data).encode()))


def _is_sealed(data: bytes, ours: Mapping[str, Any]) -> bool:
    """Whether it has a digest of itself. Raises ValueError unless that is the digest of it."""
    if _DIGEST not in ours:
        return False
    digest = ours[_DIGEST]
    if not is_checksum(digest) or data.count(digest.encode()) != 1:
        raise ValueError("its digest is none")
    if checksum(data.replace(digest.encode(), _BLANK.encode())) != digest:
        raise ValueError("it does not match its own digest")
    return True


# --- reading it back, every field by its type -----------------------------------------------------------------


def parse(data: bytes, version: int) -> VersionIndex:
    """The index of what the folder of this version holds. Raises ValueError when it does not hold together."""
    told, metadata = _opened(data)
    ours = _table(metadata.get(_OURS, {}), _OURS)
    is_sealed = _is_sealed(data, ours)
    files = _texts(told.get("weight_map"), "weight_map")
    _refuse_outside(files.values())
    number = number_of(metadata.get("version", version))
    if number != version:
        raise ValueError(f"it is the index of version {number}")
    index = VersionIndex(version, files, _delta_fields(metadata, version), is_sealed=is_sealed)
    return _ours(index, ours) if _OURS in metadata else index


def weight_map_in(data: bytes) -> dict[str, str]:
    """The file of each tensor in any folder of Hugging Face, by its index. Raises ValueError for what is none, or a delta."""
    told, metadata = _opened(data)
    if any(key in metadata for key in _OF_DELTAS):
        raise ValueError("it is the index of a delta")
    files = _texts(told.get("weight_map"), "weight_map")
    _refuse_outside(files.values())
    return files


def _opened(data: bytes) -> tuple[dict[str, Any], dict[str, Any]]:
    """An index, and its metadata."""
    try:
        told = _table(json.loads(data), "it")
        return told, _table(told.get("metadata") or {}, "metadata")
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is not the index of a version ({error!s:.200})") from error


def _refuse_outside(files: Iterable[str]) -> None:
    for file in {*files}:
        if not stays_inside(file):
            raise ValueError(f"{file!r:.300} is not the name of a file of its folder")


def _delta_fields(metadata: Mapping[str, Any], version: int) -> DeltaFields | None:
    """The fields of a delta; None for an anchor. Raises ValueError for a delta that cannot be applied."""
    missing = [key for key in _OF_DELTAS if key not in metadata]
    if len(missing) == len(_OF_DELTAS):
        return None
    if missing:
        raise ValueError(f"it is a delta by its metadata, and has no {missing[0]} there")
    known = {
        "delta_encoding": ENCODINGS,
        "compression_format": (_COMPRESSION,),
        "checksum_format": tuple(CHECKSUM_DIGITS),
    }
    for key, values in known.items():
        if metadata.get(key) not in values:
            raise ValueError(
                f"its {key} is {metadata.get(key)!r:.100}; only {', '.join(values)} can be applied"
            )
    checksum_format = metadata["checksum_format"]
    if checksum_format == "blake3" and find_spec("blake3") is None:
        raise ValueError(
            "its checksum_format is 'blake3', which is computed by the package blake3; install that"
        )
    base = number_of(metadata["base_version"], "base_version")
    if base >= version:
        raise ValueError(f"it is a delta of version {version} against {base}, which is not before it")
    return DeltaFields(base, metadata["delta_encoding"], checksum_format)


def _ours(index: VersionIndex, ours: Mapping[str, Any]) -> VersionIndex:
    """With what only a Publisher writes."""
    if not index.is_sealed and not ours.keys() <= _UNSEALED:
        raise ValueError(f"it has no digest of itself, but {min(ours.keys() - _UNSEALED)!a:.100}")
    checksums = _checksums(ours.get("checksums", {}), "checksums")
    digests = _checksums(ours.get("digests", {}), "digests")
    _refuse_outside(digests)
    attempt, start = ours.get("attempt", ""), ours.get("start", "")
    if not isinstance(start, str) or not (
        attempt == "" or (isinstance(attempt, str) and is_attempt(attempt))
    ):
        raise ValueError(f"{attempt!r:.100} of {start!r:.100} is no attempt")
    wanted = ("identity", "structure") if index.is_anchor else ("identity", "structure", "base_identity")
    for key in wanted:
        if not is_checksum(ours.get(key)):
            raise ValueError(f"its {key} is {ours.get(key)!r:.100}")
    files = {name: _without(file, f"{attempt}/" if attempt else "") for name, file in index.files.items()}
    if index.is_anchor and ("base_identity" in ours or checksums.keys() != files.keys()):
        raise ValueError("it is an anchor by its metadata, and does not have the checksums of its tensors")
    if not index.is_anchor and not digests.keys() >= set(files.values()):
        raise ValueError("it is a delta, and does not have the digests of its files")
    slices = {name: SliceOf.parsed(entry) for name, entry in _table(ours.get("slices", {}), "slices").items()}
    return replace(
        index,
        files=files,
        delta=index.delta and replace(index.delta, base_identity=ours["base_identity"]),
        identity=ours["identity"],
        structure=ours["structure"],
        checksums=checksums,
        digests=digests,
        heads=_checksums(ours.get("heads", {}), "heads"),
        slices=RankSlices(start, slices),
        attempt=attempt,
    )


def _table(told: Any, what: str) -> dict[str, Any]:
    if not isinstance(told, dict):
        raise ValueError(f"{what} is {told!r:.100}, and no table")
    return told


def _texts(told: Any, what: str) -> dict[str, str]:
    table = _table(told, what)
    if not all(type(value) is str for value in table.values()):
        raise ValueError(f"{what} has values that are no texts")
    if not is_text("".join(table)):
        raise ValueError(f"{what} has a name with half of a surrogate pair in it")
    return table


def _checksums(told: Any, what: str) -> dict[str, str]:
    table = _texts(told, what)
    text = "".join(table.values())
    sizes = set(map(len, table.values()))
    if not sizes <= {CHECKSUM_DIGITS[OUR_CHECKSUMS]} or (text and not _DIGITS.fullmatch(text)):
        raise ValueError(f"{what} has values that are no checksums")
    return table


def number_of(told: Any, what: str = "version") -> int:
    """Digits, as others write them, too."""
    if type(told) is int and 0 <= told <= MAX_VERSION:
        return told
    if isinstance(told, str) and _NUMBER.fullmatch(told):
        return int(told)
    raise ValueError(f"its {what} is {told!r:.100}, and no number of a version")


def _without(file: str, prefix: str) -> str:
    if not file.startswith(prefix):
        raise ValueError(f"{file!r:.300} is not a file of its attempt")
    return file.removeprefix(prefix)


def is_attempt(name: str) -> bool:
    """Whether the files of one attempt at a version lie in a folder of this name."""
    return _ATTEMPT.fullmatch(name) is not None
