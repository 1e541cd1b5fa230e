"""What must not grow: samples of a process and of the places that it writes to, and the trend of each.

In: a process, folders, a bucket. Out: samples by name; slopes with their noise. Knows nothing of: what the process does.

The slope is that of Theil and Sen: the median of the slopes between all pairs of samples, which single high samples do not
move. Its noise is the middle 95 % of the slopes of series that are made of blocks of its residuals (a moving-block
bootstrap), since neighbouring samples are alike.
"""

import ctypes
import gc
import os
import random
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Final

Sample = dict[str, float]

_MIB: Final = 1 << 20
_SERIES: Final = 400
_HOUR: Final = 3600.0


@dataclass(frozen=True, slots=True)
class Bound:
    """What a quantity may grow by in an hour although its trend is above the noise: less than anyone would notice."""

    unit: str
    per_hour: float


# A leak of one object, descriptor or page for each save would be above all of these after some thousand saves.
BOUNDS: Final[Mapping[str, Bound]] = {
    "resident memory": Bound("MiB", 24.0),
    "memory of the reader": Bound("MiB", 24.0),
    "objects of Python": Bound("", 2_000.0),
    "descriptors": Bound("", 1.0),
    "descriptors of the reader": Bound("", 2.0),
    "threads": Bound("", 1.0),
    "memory files": Bound("", 0.5),
    "files in /dev/shm": Bound("", 0.5),
    "temporary files": Bound("", 0.5),
    "files of the runs on disk": Bound("", 8.0),
    "objects of the runs at the store": Bound("", 8.0),
    "open uploads": Bound("", 0.5),
}


def of_this_process() -> Sample:
    """Sampled when nothing is under way: unreachable objects are collected, and freed memory is given back, before."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    names = [_name_of(fd) for fd in os.listdir("/proc/self/fd")]
    mapped = {line.split(maxsplit=5)[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
    return {
        "resident memory": _resident_bytes(os.getpid()) / _MIB,
        "objects of Python": len(gc.get_objects()),
        "descriptors": len(names),
        "threads": threading.active_count(),
        "memory files": sum("memfd:" in name for name in names),
        # Those of other processes are beside them: what is open or mapped here is ours.
        "files in /dev/shm": sum(name.startswith("/dev/shm/") for name in {*names, *mapped}),
    }


def of_reader(pid: int) -> Sample:
    """Of another process, as far as it lives."""
    try:
        descriptors = len(os.listdir(f"/proc/{pid}/fd"))
        return {"memory of the reader": _resident_bytes(pid) / _MIB, "descriptors of the reader": descriptors}
    except FileNotFoundError:
        return {}


def files_below(folder: Path) -> list[str]:
    """Files that go while they are listed are no files."""
    return [os.path.join(parent, name) for parent, _, names in os.walk(folder) for name in names]


def num_to_go(paths: Iterable[str]) -> int:
    """How many of these files or objects are expected to go.

    Those that tell which processes have had a run stay, by design, and so does what a rollback has retired: a manifest, and
    the archive of its attempt.
    """
    names_in: dict[str, list[str]] = {}
    for path in paths:
        folder, _, name = path.rpartition("/")
        names_in.setdefault(folder, []).append(name)
    return sum(map(_num_to_go, names_in.values()))


def _num_to_go(names: Sequence[str]) -> int:
    retired = sum(name.startswith("manifest.retired-") for name in names)
    if retired and "manifest.json" not in names:
        return 0
    return sum(not name.startswith("start-") for name in names) - 2 * retired


def _name_of(fd: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except FileNotFoundError:
        return ""


def _resident_bytes(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class Trend:
    """How one quantity went. Slopes are by the hour."""

    first: float
    last: float
    slope: float
    low: float
    high: float

    def is_flat(self, bound: Bound) -> bool:
        """Whether there is no growth beyond the noise, or none that counts."""
        return self.low <= 0 or self.slope < bound.per_hour


def trend(times: Sequence[float], values: Sequence[float], rng: random.Random) -> Trend:
    """The trend of a series. `times` are seconds, ascending."""
    slope = _slope(times, values)
    middle = median(value - slope * time for time, value in zip(times, values, strict=True))
    residuals = [value - slope * time - middle for time, value in zip(times, values, strict=True)]
    block = max(1, round(len(values) ** 0.5))
    slopes = sorted(slope + _slope(times, _shuffled(residuals, block, rng)) for _ in range(_SERIES))
    low, high = slopes[int(0.025 * _SERIES)], slopes[int(0.975 * _SERIES)]
    return Trend(values[0], values[-1], slope * _HOUR, low * _HOUR, high * _HOUR)


def _slope(times: Sequence[float], values: Sequence[float]) -> float:
    """The median of the slopes between pairs. Of long series, pairs that are half of it apart stand for all."""
    count = len(times)
    half = count // 2
    whole = count <= 60
    pairs = ((i, j) for i in range(count) for j in (range(i + 1, count) if whole else range(i + half, count)))
    return median((values[j] - values[i]) / (times[j] - times[i]) for i, j in pairs)


def _shuffled(values: Sequence[float], block: int, rng: random.Random) -> list[float]:
    made: list[float] = []
    while len(made) < len(values):
        begin = rng.randrange(len(values) - block + 1)
        made += values[begin : begin + block]
    return made[: len(values)]


def sampled(*parts: Callable[[], Sample]) -> Sample:
    """One sample of all parts."""
    return {name: value for part in parts for name, value in part().items()}
