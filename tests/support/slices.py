"""What takes too long for every run of the tests: a part of each matrix, and all of it with ASYNC_CKPT_MATRICES=all.

Which part it is changes with the commit, so that many commits together have tried all of it. The header of a run says its number, and
ASYNC_CKPT_PART=number tries the same part again.
"""

import os
import subprocess
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import async_ckpt

Rows = TypeVar("Rows", bound=Sequence[object])

ALL = os.environ.get("ASYNC_CKPT_MATRICES") == "all"


def _part() -> int:
    told = os.environ.get("ASYNC_CKPT_PART")
    if told is not None:
        return int(told)
    here = Path(async_ckpt.__file__).parent
    try:
        command = ["git", "rev-parse", "--short=8", "HEAD"]
        done = subprocess.run(command, cwd=here, capture_output=True, text=True, check=True)
        return int(done.stdout[:6], 16)
    except (OSError, subprocess.CalledProcessError, ValueError):  # a source distribution, say
        return zlib.crc32(async_ckpt.__version__.encode()) % 0x1000000


PART = _part()
os.environ["ASYNC_CKPT_PART"] = str(PART)  # of the processes that share the tests, too


def shown() -> str:
    """What the header of a run says."""
    return "matrices: all" if ALL else f"matrices: part {PART}, which ASYNC_CKPT_PART={PART} repeats"


def _one_in(number: int) -> int:
    """The step of a range of which one in `number` is tried."""
    return 1 if ALL else number


def some(rows: Rows, number: int) -> Rows:
    """One in `number` of these, at least one. A `number` that is odd meets every bit of the bytes in turn."""
    number = max(1, min(_one_in(number), len(rows)))
    return rows[PART % number :: number]  # type: ignore[return-value]


def is_tried(row: int, number: int) -> bool:
    """Whether this row is among those of which one in `number` is tried."""
    return row % _one_in(number) == PART % _one_in(number)


def examples(number: int) -> int:
    """How many examples hypothesis tries of so many; it draws others each time."""
    return number // _one_in(3)
