"""Versions of published weights: what their folders are called, and what the index of each says.

In: names, checksums. Out: the bytes of an index, and back. Knows nothing of: tensors, where the folders are.

A version is a folder of Hugging Face, `weight_v000120`. A full one, an anchor, holds the weights. A delta holds, of each
tensor that has changed since its base, one frame of zstd, as a tensor of bytes under the same name; the checksum of the
tensor's new bytes is in the metadata of that file. The index, `model.safetensors.index.json`, says which of the two it is,
and is there only when the version is whole. What other programs do not read of it is under "async_ckpt".

An "xor" frame holds the new bytes xor the base's; an "overwrite" frame a count, the positions of so many bytes, all of them
little-endian and of 4 bytes, and then their new values.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple

import xxhash

Encoding = Literal["xor", "overwrite"]

INDEX: Final = "model.safetensors.index.json"
ENCODINGS: Final = ("xor", "overwrite")
COUNT_BYTES: Final = 4
POSITION_BYTES: Final = 4
MAX_OVERWRITTEN_BYTES: Final = 2**32
MAX_VERSION: Final = 10**18 - 1
_CHECKSUMS: Final = "xxh3-128"
_COMPRESSION: Final = "zstd"
_OURS: Final = "async_ckpt"
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
    return parts[0] != ".weight_sync" and not {"", ".", ".."} & {*parts}


def checksum(data: bytes | memoryview) -> str:
    return xxhash.xxh3_128_hexdigest(data)


def identity_of(checksums: Mapping[str, str]) -> str:
    """One digest of all weights, from those of their bytes by name: equal for the same weights, whoever counts them."""
    digest = xxhash.xxh3_128()
    for name in sorted(checksums):
        digest.update(f"{name}\0{checksums[name]}\0".encode())
    return digest.hexdigest()


def structure_of(tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> str:
    """One digest of names, dtypes and shapes: it says whether two versions are of the same model."""
    rows = sorted([name, dtype, *shape] for name, dtype, shape in tensors)
    return checksum(json.dumps(rows).encode())


class SliceOf(NamedTuple):
    """Which part of a tensor of the model one of these tensors is, where each rank publishes what it holds."""

    name: str
    dtype: str
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def parsed(cls, told: Any) -> SliceOf:
        """Raises ValueError or TypeError for what is none."""
        name, dtype, *numbers = told
        shape, offsets, sizes = (tuple(int(n) for n in of_dims) for of_dims in numbers)
        fits = len(shape) == len(offsets) == len(sizes) and all(
            0 <= at <= at + size <= length for length, at, size in zip(shape, offsets, sizes, strict=True)
        )
        if not fits:
            raise ValueError(f"{name!r:.200} has a slice that is not in it")
        return cls(str(name), str(dtype), shape, offsets, sizes)


@dataclass(frozen=True, slots=True)
class VersionIndex:
    """What the index of a version says. Texts are empty, and mappings too, where its writer did not say it."""

    version: int
    files: Mapping[str, str]  # of each tensor in it, by name
    base: int | None = None  # of a delta
    encoding: Encoding | None = None
    identity: str = ""  # of all weights of this version
    base_identity: str = ""
    structure: str = ""
    checksums: Mapping[str, str] = field(default_factory=dict)  # of all tensors, of an anchor
    digests: Mapping[str, str] = field(default_factory=dict)  # of all other files, and of those of a delta
    # Where each rank publishes what it holds: by which start of them all, and what part of a tensor each tensor is.
    start: str = ""
    slices: Mapping[str, SliceOf] = field(default_factory=dict)
    attempt: str = ""  # the folder within, in which all other files are; empty on a disk

    @property
    def prefix(self) -> str:
        """What the names of its files begin with in the folder of the version."""
        return f"{self.attempt}/" if self.attempt else ""

    @property
    def weight_map(self) -> dict[str, str]:
        """The file of each tensor, by its name, as other programs read it."""
        return {name: self.prefix + file for name, file in self.files.items()}

    @property
    def is_anchor(self) -> bool:
        return self.base is None

    @property
    def tensor_files(self) -> list[str]:
        return sorted(set(self.files.values()))

    def metadata(self) -> dict[str, Any]:
        """What goes under "metadata"."""
        ours: dict[str, Any] = {"identity": self.identity, "structure": self.structure}
        ours["digests"] = dict(self.digests)
        if self.attempt:
            ours["attempt"] = self.attempt
        if self.start:
            ours |= {"start": self.start, "slices": dict(self.slices)}
        told: dict[str, Any] = {"version": f"{self.version:06d}", "checksum_format": _CHECKSUMS}
        if self.base is None:
            ours["checksums"] = dict(self.checksums)
        else:
            ours["base_identity"] = self.base_identity
            told["base_version"] = f"{self.base:06d}"
            told["delta_encoding"] = self.encoding
            told["compression_format"] = _COMPRESSION
        return {**told, _OURS: ours}


def dump_delta(index: VersionIndex) -> bytes:
    """The index of a delta. That of an anchor is one of Hugging Face, with more in its metadata."""
    return sealed({"metadata": index.metadata(), "weight_map": index.weight_map})


def sealed(told: Mapping[str, Any]) -> bytes:
    """An index of ours as text, with a digest of all else in it."""
    plain = json.loads(json.dumps(told))
    plain["metadata"][_OURS]["digest"] = _digest_of(plain)
    return (json.dumps(plain, indent=2, sort_keys=True) + "\n").encode()


def _digest_of(told: Mapping[str, Any]) -> str:
    """Of all that an index says, however it is spaced."""
    return checksum(json.dumps(told, sort_keys=True, separators=(",", ":")).encode())


def _unseal(told: Any) -> None:
    """Take the digest out of an index of ours. Raises ValueError unless it is that of all else."""
    ours = told["metadata"][_OURS]
    digest = ours.pop("digest", "")
    if digest != _digest_of(told):
        raise ValueError(
            "it does not match its own digest, or an earlier version of async_ckpt has written it"
        )


def parse(data: bytes, version: int) -> VersionIndex:
    """The index of what the folder of this version holds. Raises ValueError when it does not hold together."""
    try:
        told = json.loads(data)
        if _OURS in (told.get("metadata") or {}):
            _unseal(told)
        files, metadata = dict(told["weight_map"]), dict(told.get("metadata") or {})
        ours = dict(metadata.get(_OURS) or {})
        digests = {str(name): str(digest) for name, digest in dict(ours.get("digests") or {}).items()}
        checksums = {str(name): str(digest) for name, digest in dict(ours.get("checksums") or {}).items()}
        texts = {key: str(ours.get(key, "")) for key in ("identity", "structure", "base_identity", "start")}
        slices = {str(key): SliceOf.parsed(one) for key, one in dict(ours.get("slices") or {}).items()}
        attempt = str(ours.get("attempt") or "")
        if attempt and not is_attempt(attempt):
            raise ValueError(f"{attempt!r:.100} is no attempt")
        if attempt:
            files = {str(name): _without(file, f"{attempt}/") for name, file in files.items()}
        number = int(metadata.get("version", version))
        is_delta = "delta_encoding" in metadata
        base = int(metadata["base_version"]) if is_delta else None
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise ValueError(f"it is not the index of a version ({error!r:.200})") from error
    if not (files or identity_is_of_nothing(texts["identity"], base)):
        raise ValueError("it names no tensors")
    for file in (*files.values(), *digests):
        if not stays_inside(file):
            raise ValueError(f"{file!r:.300} is not the name of a file of its folder")
    if number != version:
        raise ValueError(f"it is the index of version {number}")
    if base is not None:
        _refuse_foreign(metadata, base, version)
    return VersionIndex(
        version=version,
        files=files,
        base=base,
        encoding=metadata.get("delta_encoding"),
        checksums=checksums,
        digests=digests,
        slices=slices,
        attempt=attempt,
        **texts,
    )


def identity_is_of_nothing(identity: str, base: int | None) -> bool:
    """Whether an index of ours may name no tensors: that of a delta without a change, or of a rank that has none."""
    return bool(identity) or base is not None


def _without(file: object, prefix: str) -> str:
    if not isinstance(file, str) or not file.startswith(prefix):
        raise ValueError(f"{file!r:.300} is not a file of its attempt")
    return file.removeprefix(prefix)


def is_attempt(name: str) -> bool:
    """Whether the files of one attempt at a version lie in a folder of this name."""
    return _ATTEMPT.fullmatch(name) is not None


def _refuse_foreign(metadata: Mapping[str, Any], base: int, version: int) -> None:
    """Raises ValueError for a delta that cannot be applied."""
    known = {
        "delta_encoding": ENCODINGS,
        "compression_format": (_COMPRESSION,),
        "checksum_format": (_CHECKSUMS,),
    }
    for key, values in known.items():
        if metadata.get(key) not in values:
            raise ValueError(
                f"its {key} is {metadata.get(key)!r:.100}; only {', '.join(values)} can be applied"
            )
    if not 0 <= base < version:
        raise ValueError(f"it is a delta of version {version} against {base}, which is not before it")
