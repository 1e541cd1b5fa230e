"""Values that all rooms share: descriptions of tensors, extents of bytes, the steps to keep.

In: plain values. Out: frozen, validated values. Knows nothing of: torch, files, clocks.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import inf, prod
from numbers import Integral, Real
from threading import TIMEOUT_MAX
from typing import Any, Final, Literal, NamedTuple, TypeAlias, TypeGuard

KIB: Final = 1024
MIB: Final = 1024 * KIB
GIB: Final = 1024 * MIB

# The page size of every supported platform, and the largest logical block of common disks, which O_DIRECT requires.
PAGE_BYTES: Final = 4096
# The unit of verification: small enough for a partial read, and large enough that the digests of a terabyte
# take only 8 MB.
BLOCK_BYTES: Final = 4 * MIB
# The size of a segment: one part of the file image, one leased piece of memory, one write, one part of a multipart
# upload.
SEGMENT_BYTES: Final = 32 * MIB
# The most dimensions of a tensor or a mesh that torch allows.
MAX_DIMS: Final = 64
# The largest step that a manifest can have.
_MAX_STEP: Final = 2**63 - 1

Json: TypeAlias = Any

# The dtype's name in torch -> (bytes per item, code in safetensors). Without a code, a tensor is stored as U8 with one
# more trailing dimension, because existing readers refuse a header with an unknown code.
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
# Codes that only recent readers know (safetensors 0.8 knows all): used in separate files, but not in archives.
NEW_CODES: Final[dict[str, str]] = {
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
    "float4_e2m1fn_x2": "F4",  # a byte has two items, which safetensors counts separately
    "complex64": "C64",
}


class Extent(NamedTuple):
    """Bytes [offset, offset + length) of one object."""

    offset: int
    length: int

    @property
    def end(self) -> int:
        return self.offset + self.length


class Box(NamedTuple):
    """A box of a tensor: `sizes` elements along each dimension, from `offsets` on."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        return prod(self.sizes)

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Box:
        return cls((0,) * len(shape), shape)

    def common(self, other: Box) -> Box | None:
        """The elements in both boxes; None if there are none."""
        begins, sizes = [], []
        for a, n, b, m in zip(*self, *other, strict=True):
            begin, end = max(a, b), min(a + n, b + m)
            if begin >= end:
                return None
            begins.append(begin)
            sizes.append(end - begin)
        return Box(tuple(begins), tuple(sizes))

    def relative_to(self, other: Box) -> Box:
        """The same box with offsets relative to those of another box."""
        return Box(tuple(a - b for a, b in zip(self.offsets, other.offsets, strict=True)), self.sizes)

    def __str__(self) -> str:
        """The box as a Python slice: `[0:4, 2:6]`."""
        return f"[{', '.join(f'{at}:{at + size}' for at, size in zip(*self, strict=True))}]"


class RankFacts(NamedTuple):
    """The rank of an archive, the number of ranks, and the meshes over which its tensors are sharded.

    A mesh is given by its first rank, its shape, its strides, and, if it is not a regular grid, all of its ranks.
    """

    rank: int
    world_size: int
    meshes: tuple[tuple[int, tuple[int, ...], tuple[int, ...], tuple[int, ...]], ...] = ()


class Spread(NamedTuple):
    """The division of a tensor among several ranks: `cuts` (dimension, dimension of the mesh, runs) over a mesh.

    If `cuts` is None, the division follows no rule, and `held` lists the boxes of this rank.
    """

    cuts: tuple[tuple[int, int, int], ...] | None
    mesh: int
    held: tuple[Box, ...] = ()


class SliceFacts(NamedTuple):
    """The position of a slice in a tensor that is divided among several ranks."""

    number: int
    """The number of the tensor in this rank's state. Its slices are consecutive."""
    shape: tuple[int, ...]
    """The shape of the whole tensor."""
    offsets: tuple[int, ...] | None
    """The offsets of the slice in the tensor; None if this archive has no bytes of the tensor."""
    spread: Spread | None = None
    """The division of the tensor among the ranks; None if each rank has all of it."""


class TensorSpec(NamedTuple):
    """One tensor of a state, or a slice of one: its path in the tree, its dtype and its shape.

    A NamedTuple, because a save may have hundreds of thousands of them, and compares their list with that of the last
    save, whose plan it reuses if they are equal.
    """

    path: tuple[Any, ...]
    dtype: str
    shape: tuple[int, ...]
    alias_of: int | None = None
    """The index of an earlier tensor with the same memory (tied weights); the bytes are stored once."""
    of: SliceFacts | None = None
    """The position of a slice in a tensor that several ranks hold; None if this archive has the whole tensor."""
    lender: int | None = None
    """The number of the earlier step's archive that has the bytes; None if they are stored in this archive."""

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * DTYPES[self.dtype][0]

    @property
    def dotted(self) -> str:
        return ".".join(map(str, self.path))


def by_tensor(specs: Sequence[TensorSpec]) -> list[list[int]]:
    """The numbers of the specs of each tensor: several if the tensor is in several slices, else one."""
    numbers: list[list[int]] = []
    before: SliceFacts | None = None
    for i, spec in enumerate(specs):
        if before is not None and spec.of is not None and before.number == spec.of.number:
            numbers[-1].append(i)
        else:
            numbers.append([i])
        before = spec.of
    return numbers


# In descriptions of structures, these words stand in place of a dtype: for a borrowed group, with the step that lends
# it in place of the shape; for a value that each rank saves for itself; and for the mesh of which the meshes of all
# tensors are parts.
BORROWED: Final = "borrowed"
PER_RANK: Final = "per rank"
ROOT_MESH: Final = "root mesh"

Best: TypeAlias = tuple[str, Literal["min", "max"], int]


@dataclass(frozen=True, slots=True)
class Keep:
    """The steps of a run that are kept. A step that none of these rules keeps is deleted after a commit.

        AsyncCheckpointer("runs/a", keep=Keep(last=2, every=1000, best=("loss", "min", 3)))

    The newest step is always kept. Without any rule, all steps are kept. `keep=3` is short for `Keep(last=3)`.

    Args:
        last: keep this many of the newest steps.
        every: keep every step that is a multiple of this.
        best: keep the best steps by a metric of their records: the metric, "min" or "max", and how many, such as
            ("loss", "min", 3). Of two equal steps, the newer one is better. While no record has the metric, every step
            is kept, with a warning.
        seconds: keep the steps that were committed at most this many seconds ago.
        whole_folder: delete the whole folder of a step, including files that other programs have written there. By
            default those files are kept.
        good: keep this many of the newest steps that are marked good, even if they are rolling or have expired. If any
            rule is set, steps that are marked bad are deleted, and no rule counts them; the newest step that is not
            marked bad is kept.
        bytes: keep the newest steps that have at most this many bytes together, and at least one step. A step that
            others borrow from counts once.
        free: a limit for disks instead of a rule. Before a save, steps are deleted until at least this many bytes will
            be free after it, even if other rules keep them: first steps that are marked bad, then the oldest, and last
            those that `every`, `best` and `good` keep. The newest step, and the newest not marked bad, stay.

    Raises ValueError if a rule is not valid.
    """

    last: int | None = None
    every: int | None = None
    best: Best | None = None
    seconds: float | None = None
    whole_folder: bool = False
    good: int | None = None
    bytes: float | None = None
    free: float | None = None

    def __post_init__(self) -> None:
        for name in ("last", "every", "good"):
            if (count := getattr(self, name)) is not None:
                hint = "; None keeps every step" if name == "last" else ""
                object.__setattr__(self, name, whole_count(f"Keep({name}=…)", count, hint))
        for name in ("seconds", "bytes", "free"):
            if (limit := getattr(self, name)) is not None:
                object.__setattr__(self, name, number_above_0(f"Keep({name}=…)", limit))
        if not isinstance(self.whole_folder, bool):
            raise ValueError(f"Keep(whole_folder=…) must be True or False, got {self.whole_folder!r}")
        if self.best is not None:
            object.__setattr__(self, "best", _best_of(self.best))


@dataclass(frozen=True, slots=True)
class Ema:
    """An exponential moving average of weights, stored in the archives of a run as the group `ema`.

        AsyncCheckpointer("runs/a", ema=Ema(0.9999))

    It is updated on the host, in the background, from the copies that saves make, so only once per save. A save n steps
    after the previous one has the weight `1 - decay**n` in the mean; the first save sets the mean to its weights. The
    mean is in float32, and takes four bytes of host memory per weight; during a save, a copy of the weights is held in
    addition. Integers are copied without averaging.

    Args:
        decay: the share of the old mean that remains after one step, above 0 and below 1, such as 0.9999.
        groups: the top-level entries of the state whose tensors are averaged.

    Raises ValueError and TypeError for arguments that are not valid.
    """

    decay: float
    groups: Sequence[str] = ("model",)

    def __post_init__(self) -> None:
        if not is_number(self.decay) or not 0 < self.decay < 1:
            raise ValueError(
                f"Ema(decay) must be a number above 0 and below 1, such as 0.9999, got {self.decay!r:.100}"
            )
        object.__setattr__(self, "decay", float(self.decay))
        groups = entry_names("Ema(groups=…)", self.groups)
        if not groups or "ema" in groups or not all(isinstance(name, str) for name in groups):
            raise ValueError(
                f"Ema(groups=…) must be names of entries of the state, other than 'ema', got {groups!r:.100}"
            )
        object.__setattr__(self, "groups", tuple(dict.fromkeys(groups)))


def keep_of(keep: Keep | int | None) -> Keep:
    """The rules for a user's `keep=`. A number n is short for Keep(last=n).

    Raises TypeError unless it is Keep or a number of steps, and ValueError as `Keep` does.
    """
    if isinstance(keep, Keep) or keep is None:
        return keep or Keep()
    with suppress(TypeError):
        return Keep(last=integer(keep))
    raise TypeError(f"keep must be a number of steps, or Keep(…), got {keep!r:.100}")


def _best_of(best: Any) -> Best:
    """Check a user's `best`. Raises ValueError if it is not valid."""
    with suppress(TypeError):
        metric, mode, count = best if isinstance(best, tuple) and len(best) == 3 else (None, None, 0)
        if isinstance(metric, str) and mode in ("min", "max") and integer(count) >= 1:
            return metric, mode, integer(count)
    raise ValueError(
        'Keep(best=…) must be a metric of the records, "min" or "max", and how many to keep, such as '
        f'("loss", "min", 3); got {best!r:.100}'
    )


def is_number(value: object) -> TypeGuard[float]:
    """Whether this is a real number, of Python or numpy. A bool is none."""
    return isinstance(value, Real) and not isinstance(value, bool)


def integer(value: Any) -> int:
    """An integer of Python, numpy or torch as an int. Raises TypeError for other types, and for bools."""
    if isinstance(value, bool):
        raise TypeError(f"{value!r} is not an integer")
    return operator.index(value)


def number_above_0(name: str, value: Any, rule: str = "a finite number above 0") -> float:
    """Check a number from the user. Raises ValueError unless it is finite and above 0. It is returned as Python's."""
    if not is_number(value) or not 0 < value < inf:
        raise ValueError(f"{name} must be {rule}, got {value!r:.100}")
    return int(value) if isinstance(value, Integral) else float(value)


def seconds_above_0(name: str, value: Any) -> float:
    """Check seconds from the user. Raises ValueError unless above 0. Shortened to the longest possible wait."""
    if not is_number(value) or not value > 0:
        raise ValueError(f"{name} must be a number of seconds above 0, got {value!r:.100}")
    return min(float(value), TIMEOUT_MAX)


def whole_bytes(name: str, value: Any) -> int:
    """Check a size in bytes from the user. Raises ValueError unless it is a finite number, at least 1."""
    if not is_number(value) or not 1 <= value < inf:
        raise ValueError(f"{name} must be a number of bytes above 0, such as 4 * 2**30, got {value!r:.100}")
    return int(value)


def whole_count(name: str, value: Any, advice: str = "") -> int:
    """Check a count from the user. Raises ValueError unless it is a whole number, at least 1."""
    with suppress(TypeError):
        if (number := integer(value)) >= 1:
            return number
    raise ValueError(f"{name} must be a whole number, at least 1, got {value!r:.100}{advice}")


def whole_step(step: Any, advice: str = "", *, what: str = "step") -> int:
    """Check a step from the user, which may be an integer of numpy. Raises ValueError unless it is in 0 … 2**63 - 1."""
    try:
        number = -1 if hasattr(step, "untyped_storage") else integer(step)  # a tensor is probably the state
    except TypeError:
        number = -1
    if number < 0:
        shown = repr(step) if isinstance(step, int | float | str) else with_article(type(step).__qualname__)
        raise ValueError(f"{what} must be a whole number from 0 on, got {shown}{advice}")
    if number > _MAX_STEP:
        raise ValueError(f"{what} must be below 2**63, got {number!r:.100}{advice}")
    return number


def seconds_or_none(name: str, value: Any) -> float | None:
    """Check seconds from the user. Raises TypeError unless they are a number or None, ValueError if negative."""
    if value is not None and not is_number(value):
        raise TypeError(f"{name} must be a number of seconds or None, got {value!r:.100}")
    if value is not None and not value >= 0:
        raise ValueError(f"{name} must be at least 0 seconds, got {value!r}")
    return value


def flag(name: str, value: Any) -> bool:
    """Check a flag from the user, which may be a bool of numpy. Raises ValueError for any other type."""
    if type(value).__name__ not in ("bool", "bool_"):
        raise ValueError(f"{name} must be True or False, got {value!r:.100}")
    return bool(value)


def entry_names(name: str, value: Any) -> tuple[Any, ...]:
    """The names of entries from the user: one name, several, or None for no name. Raises TypeError for other types."""
    if value is None or isinstance(value, str):
        return () if value is None else (value,)
    if not isinstance(value, Iterable):
        raise TypeError(f"{name} must be the name of an entry of the state, or several of them, got {value!r:.100}")
    return tuple(value)


def with_article(kind: str) -> str:
    """The name of a type with its article: a dict, an int, an LSTM, a UUID, an ndarray."""
    if kind[:2].isupper():  # the name is an acronym, whose first letter is spelled out
        return f"{'an' if kind[0] in 'AEFHILMNORSX' else 'a'} {kind}"
    return f"{'an' if kind[:1].lower() in ('a', 'e', 'i', 'o') or kind.startswith('nd') else 'a'} {kind}"


def some_of(texts: Sequence[object], most: int) -> str:
    """The first of these texts, and the number of the others, such as "a, b and 3 more"."""
    more = f" and {len(texts) - most:,} more" if len(texts) > most else ""
    return ", ".join(map(str, texts[:most])) + more


def align_up(value: int, to: int) -> int:
    """The smallest multiple of `to` that is not below `value`."""
    return -(-value // to) * to
