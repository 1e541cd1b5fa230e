"""The values that everyone passes on: what a tensor is, where bytes lie, which steps are kept.

In: plain values. Out: frozen values that cannot be wrong. Knows nothing of: torch, files, clocks.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, prod
from typing import Any, Final, Literal, NamedTuple, TypeAlias

KIB: Final = 1024
MIB: Final = 1024 * KIB
GIB: Final = 1024 * MIB

# Page size of every platform we serve, and the largest logical block of common disks: what O_DIRECT wants.
PAGE_BYTES: Final = 4096
# The unit of verification (DESIGN §3): small enough for a partial read, large enough that the digests
# of a terabyte are 8 MB.
BLOCK_BYTES: Final = 4 * MIB
# One slice of the file image, one leased piece of memory, one write, one part of a multipart upload.
SEGMENT_BYTES: Final = 32 * MIB

Json: TypeAlias = Any

# dtype name as torch spells it -> (bytes per item, safetensors' code). Without a code the tensor is stored as
# U8 with one more trailing dimension, because the readers in the wild refuse a header with an unknown code.
DTYPES: Final[dict[str, tuple[int, str | None]]] = {
    "float64": (8, "F64"),
    "float32": (4, "F32"),
    "float16": (2, "F16"),
    "bfloat16": (2, "BF16"),
    "int64": (8, "I64"),
    "int32": (4, "I32"),
    "int16": (2, "I16"),
    "int8": (1, "I8"),
    "uint64": (8, "U64"),
    "uint32": (4, "U32"),
    "uint16": (2, "U16"),
    "uint8": (1, "U8"),
    "bool": (1, "BOOL"),
    "float8_e4m3fn": (1, "F8_E4M3"),
    "float8_e5m2": (1, "F8_E5M2"),
    "float8_e4m3fnuz": (1, None),
    "float8_e5m2fnuz": (1, None),
    "float8_e8m0fnu": (1, None),
    "float4_e2m1fn_x2": (1, None),
    "complex32": (4, None),
    "complex64": (8, None),
    "complex128": (16, None),
    "bits8": (1, None),
    "bits16": (2, None),
    "bits1x8": (1, None),
    "bits2x4": (1, None),
    "bits4x2": (1, None),
    **{f"int{n}": (1, None) for n in range(1, 8)},
    **{f"uint{n}": (1, None) for n in range(1, 8)},
}


@dataclass(frozen=True, slots=True)
class Extent:
    """Bytes [offset, offset + length) of one object."""

    offset: int
    length: int

    def __post_init__(self) -> None:
        if self.offset < 0 or self.length < 0:
            raise ValueError(f"negative extent: {self!r}")

    @property
    def end(self) -> int:
        return self.offset + self.length


class MeshFacts(NamedTuple):
    """Ranks in a grid: the first, how many there are along each dimension and how far from one to the next; or all of
    them, where they are not as regular as that.
    """

    start: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    ranks: tuple[int, ...] = ()


class RankFacts(NamedTuple):
    """Of which rank an archive is, of how many; and the meshes that its tensors are spread over."""

    rank: int
    world_size: int
    meshes: tuple[MeshFacts, ...] = ()


class Spread(NamedTuple):
    """How several ranks hold one tensor: by `cuts` (dimension, dimension of the mesh, runs) of the mesh of this number;
    or where that follows from nothing, which rectangles (offsets, sizes) this rank has of it.
    """

    cuts: tuple[tuple[int, int, int], ...] | None
    mesh: int
    held: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = ()


class SliceFacts(NamedTuple):
    """Which slice of a tensor something is, where several ranks hold the tensor together."""

    number: int
    """Of the tensor in this rank's state; its slices follow one another."""
    shape: tuple[int, ...]
    """Of the whole tensor."""
    offsets: tuple[int, ...] | None
    """Where in the tensor the slice begins; None stands for a tensor of which this archive has nothing."""
    spread: Spread | None = None
    """How the ranks hold the tensor; None where each has all of it."""


class TensorSpec(NamedTuple):
    """One tensor of a state, or a slice of one: where it hangs in the tree, and what it is.

    A NamedTuple because a state has up to hundreds of thousands of them on every save, and comparing the list
    with the last save's is how the plan is re-validated.
    """

    path: tuple[Any, ...]
    dtype: str
    shape: tuple[int, ...]
    alias_of: int | None = None
    """Index of the earlier tensor with the very same memory (tied weights), whose bytes are stored once."""
    of: SliceFacts | None = None
    """Which slice it is of what several ranks hold together; None for a tensor that this archive has alone."""

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * DTYPES[self.dtype][0]

    @property
    def dotted(self) -> str:
        return ".".join(map(str, self.path))


def by_tensor(specs: Sequence[TensorSpec]) -> list[list[int]]:
    """The numbers of the specs that each tensor has: one, but for a tensor that is in several slices."""
    found: list[list[int]] = []
    before: SliceFacts | None = None
    for i, spec in enumerate(specs):
        if before is not None and spec.of is not None and before.number == spec.of.number:
            found[-1].append(i)
        else:
            found.append([i])
        before = spec.of
    return found


# Where structures are told, these stand for a dtype: of a group that is not saved again, with the step for its shape; of what
# each rank has for itself, by its name; and of the mesh of which those of all tensors are parts.
BORROWED: Final = "borrowed"
PER_RANK: Final = "per rank"
ROOT_MESH: Final = "root mesh"

Best: TypeAlias = tuple[str, Literal["min", "max"], int]


@dataclass(frozen=True, slots=True)
class Keep:
    """Which steps of a run are kept. A step that none of these rules keeps is deleted after a commit.

        AsyncCheckpointer("runs/a", keep=Keep(last=2, every=1000, best=("loss", "min", 3)))

    The newest step is always kept. Without any rule, all steps are kept. `keep=3` is short for `Keep(last=3)`.

    Args:
        last: keep this many of the newest steps.
        every: keep every step that is a multiple of this.
        best: keep the best steps by a metric of their records: a metric, "min" or "max", and how many, such as
            ("loss", "min", 3). If two steps are equal, the newer one is better. As long as no record has the metric,
            every step is kept, with a warning.
        seconds: keep the steps that were committed at most this many seconds ago.
        whole_folder: delete the whole folder of a step, including files that other programs have written there. By
            default those files are kept.

    Raises ValueError if a rule is not valid.
    """

    last: int | None = None
    every: int | None = None
    best: Best | None = None
    seconds: float | None = None
    whole_folder: bool = False

    def __post_init__(self) -> None:
        for name, count in (("last", self.last), ("every", self.every)):
            if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 1):
                told = "; None keeps every step" if name == "last" else ""
                raise ValueError(f"Keep({name}=…) must be a whole number from 1 on, got {count!r}{told}")
        if self.seconds is not None and (
            isinstance(self.seconds, bool)
            or not isinstance(self.seconds, int | float)
            or not 0 < self.seconds < inf
        ):
            raise ValueError(f"Keep(seconds=…) must be a finite number above 0, got {self.seconds!r}")
        if not isinstance(self.whole_folder, bool):
            raise ValueError(f"Keep(whole_folder=…) must be True or False, got {self.whole_folder!r}")
        if self.best is not None and not _is_best(self.best):
            raise ValueError(
                'Keep(best=…) must be a metric of the records, "min" or "max", and how many to keep, such as '
                f'("loss", "min", 3); got {self.best!r}'
            )


def keep_of(keep: Keep | int | None) -> Keep:
    """What the user means. Raises TypeError for anything but a number of steps, and ValueError as `Keep` does."""
    if isinstance(keep, Keep) or keep is None:
        return keep or Keep()
    try:
        if not isinstance(keep, bool):
            return Keep(last=operator.index(keep))
    except TypeError:
        pass
    raise TypeError(f"keep must be a number of steps, or Keep(…), got {keep!r:.100}")


def _is_best(best: object) -> bool:
    """Whether this is what `best` may be; callers without a type checker give anything."""
    if not isinstance(best, tuple) or len(best) != 3:
        return False
    metric, mode, count = best
    return isinstance(metric, str) and mode in ("min", "max") and isinstance(count, int) and count >= 1


def whole_bytes(name: str, given: Any) -> int:
    """A size that the user gives. Raises ValueError if it is not one."""
    if isinstance(given, bool) or not isinstance(given, int | float) or not 0 < given < inf:
        raise ValueError(f"{name} must be a number of bytes above 0, such as 4 * 2**30, got {given!r}")
    return int(given)


def whole_count(name: str, given: Any) -> int:
    """A number of things that the user gives. Raises ValueError if it is not one."""
    if isinstance(given, bool) or not isinstance(given, int) or given < 1:
        raise ValueError(f"{name} must be a whole number, at least 1, got {given!r:.100}")
    return given


def seconds_or_none(name: str, given: Any) -> float | None:
    """A duration that the user gives. Raises TypeError or ValueError if it is not one."""
    if given is not None and (isinstance(given, bool) or not isinstance(given, int | float)):
        raise TypeError(f"{name} must be a number of seconds, or None, got {given!r:.100}")
    if given is not None and not given >= 0:
        raise ValueError(f"{name} must be at least 0 seconds, got {given!r}")
    return given


def flag(name: str, given: Any) -> bool:
    """A choice that the user gives; what numpy compares counts, too. Raises ValueError if it is not one."""
    if type(given).__name__ not in ("bool", "bool_"):
        raise ValueError(f"{name} must be True or False, got {given!r:.100}")
    return bool(given)


def with_article(kind: str) -> str:
    """What a type is called in a sentence: a dict, an int, an LSTM, a UUID, an ndarray."""
    if kind[:2].isupper():  # its first letters are spelled out
        return f"{'an' if kind[0] in 'AEFHILMNORSX' else 'a'} {kind}"
    return f"{'an' if kind[:1].lower() in ('a', 'e', 'i', 'o') or kind.startswith('nd') else 'a'} {kind}"


def align_up(value: int, to: int) -> int:
    """The smallest multiple of `to` that is not below `value`."""
    return -(-value // to) * to
