"""Versions of published weights: the names of their folders, and the index of each.

In: names, checksums. Out: the bytes of an index, and the index back from its bytes.
Knows nothing of: tensors, storages.

A version is a Hugging Face folder, `weight_v000120`. An anchor contains all weights. A delta contains one zstd frame
for each tensor that has changed since its base, stored as a tensor of bytes under the same name. The metadata of the
file contains the checksum of the tensor's new bytes. The index, `model.safetensors.index.json`, tells whether the
version is an anchor or a delta. It is written last, when the version is complete. Fields that only this library reads
are under "async_ckpt".

An index written by this library contains its own digest there, computed over all of its bytes with zeros in place of
the digest. Readers compare the digest before they trust any other field.

An "xor" frame is the new bytes xor the bytes of the base. An "overwrite" frame is a count, that many positions (all
little-endian, 4 bytes each), and the new byte at each position.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from json.encoder import encode_basestring_ascii
from typing import Any, Final, Literal, NamedTuple

import xxhash

from ..plumbing import fields

Encoding = Literal["xor", "overwrite"]

INDEX: Final = "model.safetensors.index.json"
ENCODINGS: Final = ("xor", "overwrite")
COUNT_BYTES: Final = 4
POSITION_BYTES: Final = 4
MAX_OVERWRITTEN_BYTES: Final = 2**32
MAX_VERSION: Final = 10**18 - 1
OUR_CHECKSUMS: Final = "xxh3-128"
# The checksum formats that deltas may have, also those of other writers, and the number of digits of each.
CHECKSUM_DIGITS: Final = {OUR_CHECKSUMS: 32, "adler32": 8, "blake3": 64}
_DIGITS: Final = re.compile(r"[0-9a-f]+")
_COMPRESSION: Final = "zstd"
_OURS: Final = "async_ckpt"
# An anchor has none of these fields, a delta has all.
_OF_DELTAS: Final = ("base_version", "delta_encoding", "compression_format")
# The values that this library can apply.
_KNOWN: Final = {
    "delta_encoding": ENCODINGS,
    "compression_format": (_COMPRESSION,),
    "checksum_format": tuple(CHECKSUM_DIGITS),
}
_DIGEST: Final = "digest"
_BLANK: Final = "0" * CHECKSUM_DIGITS[OUR_CHECKSUMS]
# The fields that earlier releases wrote. They wrote no digest, so an index without one may have only these fields.
_UNSEALED: Final = frozenset({"identity", "structure", "digests", "start", "slices", "checksums", "base_identity"})
_NUMBER: Final = re.compile(r"[0-9]{1,18}")
_ATTEMPT: Final = re.compile(r"files\.[0-9a-f]{8}")
_FOLDER: Final = re.compile(r"weight_v([0-9]{6}|[1-9][0-9]{6,17})")


def folder_of(version: int) -> str:
    return f"weight_v{version:06d}"


def version_of(folder: str) -> int | None:
    """The version that a folder's name stands for; None if it is not the name of a version's folder."""
    match = _FOLDER.fullmatch(folder)
    return None if match is None else int(match[1])


def stays_inside(file: object) -> bool:
    """Whether a path stays below its folder, and outside `.weight_sync`, where receivers keep their marker."""
    if not isinstance(file, str) or not file or "\0" in file or "\\" in file or file[1:2] == ":":
        return False
    parts = file.split("/")
    return fields.is_unicode(file) and parts[0].lower() != ".weight_sync" and not {"", ".", ".."} & {*parts}


def checksum(data: bytes | memoryview) -> str:
    return xxhash.xxh3_128_hexdigest(data)


class _Adler32:
    """zlib's Adler-32 with the methods of a hash in `hashlib`."""

    def __init__(self) -> None:
        self._sum = 1

    def update(self, data: bytes | memoryview, /) -> None:
        self._sum = zlib.adler32(data, self._sum)

    def hexdigest(self) -> str:
        return f"{self._sum:08x}"


def new_hash(checksum_format: str) -> Any:
    """A new hash of this format, with the methods of a hash in `hashlib`."""
    if checksum_format == OUR_CHECKSUMS:
        return xxhash.xxh3_128()
    return _Adler32() if checksum_format == "adler32" else import_module("blake3").blake3()


def is_checksum(value: object, checksum_format: str = OUR_CHECKSUMS) -> bool:
    """Whether a value has the form of a checksum."""
    digits = CHECKSUM_DIGITS[checksum_format]
    return isinstance(value, str) and len(value) == digits and _DIGITS.fullmatch(value) is not None


def identity_of(checksums: Mapping[str, str]) -> str:
    """The digest of all weights, from the checksums of the tensors by name."""
    return checksum("".join(f"{name}\0{checksums[name]}\0" for name in sorted(checksums)).encode())


def structure_of(tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> str:
    """The digest of names, dtypes and shapes: two versions with the same structure are of the same model."""
    # The same text as json.dumps of all rows, without hundreds of thousands of lists.
    kind = cache(lambda dtype, shape: json.dumps([dtype, *shape])[1:])
    rows = (f"[{encode_basestring_ascii(name)}, {kind(dtype, shape)}" for name, dtype, shape in sorted(tensors))
    return checksum(f"[{', '.join(rows)}]".encode())


class SliceOf(NamedTuple):
    """The slice of a model's tensor that one tensor of a rank's version holds."""

    name: str
    dtype: str
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def parsed(cls, value: Any) -> SliceOf:
        """Parse a slice from JSON. Raises ValueError if it is malformed, or not inside its tensor."""
        one = cls(*fields.row(value, (fields.text, fields.text, _counts, _counts, _counts)))
        boxes = zip(one.global_shape, one.offsets, one.sizes, strict=True)
        if not len(one.global_shape) == len(one.offsets) == len(one.sizes) or any(at + n > end for end, at, n in boxes):
            raise ValueError(f"{one.name!r:.200} has a slice that lies outside of it")
        return one


def _counts(value: object) -> tuple[int, ...]:
    return fields.items(value, fields.count)


@dataclass(frozen=True, slots=True)
class DeltaFields:
    """The index fields of a delta: which weights it changes, and how its frames are decoded."""

    base: int
    encoding: Encoding
    checksum_format: str = OUR_CHECKSUMS
    base_identity: str = ""  # empty in the deltas of other writers


@dataclass(frozen=True, slots=True)
class RankSlices:
    """The slices that one rank publishes, and the name of the collective call. Empty for a whole model."""

    start: str = ""
    of_tensors: Mapping[str, SliceOf] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class VersionIndex:
    """The index of a version. Strings and mappings that its writer left out are empty."""

    version: int
    files: Mapping[str, str]  # the file of each tensor, by name
    delta: DeltaFields | None = None  # None for an anchor
    identity: str = ""  # of all weights of this version
    structure: str = ""
    checksums: Mapping[str, str] = field(default_factory=dict)  # of all tensors of an anchor
    digests: Mapping[str, str] = field(default_factory=dict)  # of an anchor's small files, or of a delta's files
    heads: Mapping[str, str] = field(default_factory=dict)  # of the headers of an anchor's files
    slices: RankSlices = RankSlices()
    adapter: Mapping[str, str] = field(default_factory=dict)  # the config fields of an adapter, as JSON
    attempt: str = ""  # the subfolder of the version's folder with its files; empty on a disk
    is_sealed: bool = False  # it contains its own digest, as every index of a Publisher does
    stamp: str = field(default="", compare=False)  # the storage's version of the index file

    @property
    def prefix(self) -> str:
        """The path from the version's folder to the names in `files`."""
        return f"{self.attempt}/" if self.attempt else ""

    @property
    def weight_map(self) -> dict[str, str]:
        """The file of each tensor, relative to the version's folder, as other programs read it."""
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
        """The "metadata" of the index, with zeros in place of the digest, which `seal` inserts."""
        ours: dict[str, Any] = {_DIGEST: _BLANK, "identity": self.identity, "structure": self.structure}
        ours["digests"] = dict(self.digests)
        if self.attempt:
            ours["attempt"] = self.attempt
        if self.slices.start:
            ours |= {"start": self.slices.start, "slices": dict(self.slices.of_tensors)}
        if self.adapter:
            ours["adapter"] = dict(self.adapter)
        common: dict[str, Any] = {"version": f"{self.version:06d}", "checksum_format": OUR_CHECKSUMS}
        if self.delta is None:
            ours |= {"checksums": dict(self.checksums), "heads": dict(self.heads)}
        else:
            ours["base_identity"] = self.delta.base_identity
            common["base_version"] = f"{self.delta.base:06d}"
            common["delta_encoding"] = self.delta.encoding
            common["compression_format"] = _COMPRESSION
        return {**common, _OURS: ours}


def dump_delta(index: VersionIndex) -> bytes:
    """The bytes of a delta's index. An anchor's index is a Hugging Face index with additional metadata."""
    table = {"metadata": index.metadata(), "weight_map": index.weight_map}
    return seal((json.dumps(table, indent=2, sort_keys=True) + "\n").encode())


def seal(data: bytes) -> bytes:
    """The bytes of an index with their digest, in the place that `metadata` has left for it."""
    place = f'"{_DIGEST}": "{_BLANK}"'.encode()
    if data.count(place) != 1:
        raise ValueError("an index must have one place for its digest")
    return data.replace(place, place.replace(_BLANK.encode(), checksum(data).encode()))


def _is_sealed(data: bytes, ours: Mapping[str, Any]) -> bool:
    """Whether an index contains its own digest. Raises ValueError if the digest does not match."""
    if _DIGEST not in ours:
        return False
    digest = ours[_DIGEST]
    if not is_checksum(digest) or data.count(digest.encode()) != 1:
        raise ValueError("its digest is not a checksum, or appears more than once")
    if checksum(data.replace(digest.encode(), _BLANK.encode())) != digest:
        raise ValueError("it does not match its own digest")
    return True


# --- parsing: every field is checked for its type ------------------------------------------------------------


def parse(data: bytes, version: int) -> VersionIndex:
    """Parse the index of a version. Raises ValueError if a field is wrong or contradicts another field."""
    table, metadata = _tables(data)
    ours = _table(metadata.get(_OURS, {}), _OURS)
    is_sealed = _is_sealed(data, ours)
    files = _weight_map(table)
    number = number_of(metadata.get("version", version))
    if number != version:
        raise ValueError(f"it is the index of version {number}")
    index = VersionIndex(version, files, _delta_fields(metadata, version), is_sealed=is_sealed)
    return _ours(index, ours) if _OURS in metadata else index


def weight_map_in(data: bytes) -> dict[str, str]:
    """The file of each tensor, by the index of any Hugging Face folder. Raises ValueError, also for a delta's index."""
    table, metadata = _tables(data)
    if any(key in metadata for key in _OF_DELTAS):
        raise ValueError("it is the index of a delta")
    return _weight_map(table)


def _weight_map(table: Mapping[str, Any]) -> dict[str, str]:
    files = _texts(table.get("weight_map"), "weight_map")
    _refuse_outside(files.values())
    return files


def _tables(data: bytes) -> tuple[dict[str, Any], dict[str, Any]]:
    """The JSON object of an index, and its metadata."""
    try:
        table = _table(json.loads(data), "it")
        return table, _table(table.get("metadata") or {}, "metadata")
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
        raise ValueError(f"its metadata is a delta's, but lacks {missing[0]}")
    for key, values in _KNOWN.items():
        if metadata.get(key) not in values:
            raise ValueError(f"its {key} is {metadata.get(key)!r:.100}; only {', '.join(values)} can be applied")
    checksum_format = metadata["checksum_format"]
    if checksum_format == "blake3" and find_spec("blake3") is None:
        raise ValueError("its checksum_format is 'blake3', which needs the package blake3; install it")
    base = number_of(metadata["base_version"], "base_version")
    if base >= version:
        raise ValueError(f"it is a delta of version {version} against {base}, which is not before it")
    return DeltaFields(base, metadata["delta_encoding"], checksum_format)


def _ours(index: VersionIndex, ours: Mapping[str, Any]) -> VersionIndex:
    """The index with the fields that only a Publisher writes."""
    if not index.is_sealed and not ours.keys() <= _UNSEALED:
        raise ValueError(f"it has no digest of itself, but has {min(ours.keys() - _UNSEALED)!a:.100}")
    checksums = _checksums(ours.get("checksums", {}), "checksums")
    digests = _checksums(ours.get("digests", {}), "digests")
    _refuse_outside(digests)
    attempt, start = ours.get("attempt", ""), ours.get("start", "")
    if not isinstance(start, str) or not (attempt == "" or (isinstance(attempt, str) and is_attempt(attempt))):
        raise ValueError(f"{attempt!r:.100} of {start!r:.100} is not an attempt")
    wanted = ("identity", "structure") if index.is_anchor else ("identity", "structure", "base_identity")
    for key in wanted:
        if not is_checksum(ours.get(key)):
            raise ValueError(f"its {key} is {ours.get(key)!r:.100}")
    files = {name: _without(file, f"{attempt}/" if attempt else "") for name, file in index.files.items()}
    if index.is_anchor and ("base_identity" in ours or checksums.keys() != files.keys()):
        raise ValueError("its metadata is an anchor's, but lacks checksums of its tensors, or has a base")
    if not index.is_anchor and not digests.keys() >= set(files.values()):
        raise ValueError("it is a delta without the digests of its files")
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
        adapter=_texts(ours.get("adapter", {}), "adapter"),
        attempt=attempt,
    )


def _table(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{name} is {value!r:.100}, not an object")
    return value


def _texts(value: Any, name: str) -> dict[str, str]:
    table = _table(value, name)
    if not all(type(text) is str for text in table.values()):
        raise ValueError(f"{name} has values that are not strings")
    if not fields.is_unicode("".join(table)):
        raise ValueError(f"{name} has a name with half of a surrogate pair in it")
    return table


def _checksums(value: Any, name: str) -> dict[str, str]:
    table = _texts(value, name)
    text = "".join(table.values())
    sizes = set(map(len, table.values()))
    if not sizes <= {CHECKSUM_DIGITS[OUR_CHECKSUMS]} or (text and not _DIGITS.fullmatch(text)):
        raise ValueError(f"{name} has values that are not checksums")
    return table


def number_of(value: Any, key: str = "version") -> int:
    """A version number, which may be an integer or a string of digits. Raises ValueError."""
    if type(value) is int and 0 <= value <= MAX_VERSION:
        return value
    if isinstance(value, str) and _NUMBER.fullmatch(value):
        return int(value)
    raise ValueError(f"its {key} is {value!r:.100}, not the number of a version")


def _without(file: str, prefix: str) -> str:
    if not file.startswith(prefix):
        raise ValueError(f"{file!r:.300} is not a file of its attempt")
    return file.removeprefix(prefix)


def is_attempt(name: str) -> bool:
    """Whether this is the name of a folder with the files of one attempt."""
    return _ATTEMPT.fullmatch(name) is not None
