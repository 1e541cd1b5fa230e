"""Measurements that need a new process: the peak of its memory, a first import, and a command.

In: sizes, arguments. Out: numbers, from other processes. Knows nothing of: figures.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from time import perf_counter, sleep
from typing import TYPE_CHECKING, Final, NamedTuple

from .apart import result_of
from .limits import SEGMENT_BYTES, WarmMemory
from .processes import status_bytes

if TYPE_CHECKING:
    from async_ckpt import SaveReport

OPTIONAL_PACKAGES: Final = [
    "fsspec",
    "matplotlib",
    "numpy",
    "obstore",
    "rich",
    "s3fs",
    "tenacity",
    "zstandard",
]

# The second save sweeps leftovers of dead writers, and imports the modules for that.
_NUM_SAVES: Final = 3
# Two saves that may lack warm memory, and later ones for comparison.
_NUM_FIRST: Final = 5
_IMPORT: Final = """
import gc, json, sys, time, torch
gc.collect()  # what torch has left to the collector is not ours to pay for
before = set(sys.modules)
begin = time.perf_counter()
from async_ckpt import AsyncCheckpointer
seconds = time.perf_counter() - begin
print(json.dumps([seconds, sorted(set(sys.modules) - before)]))
"""
_COMMAND: Final = """
import sys
from async_ckpt.tools.command.main import status_of
status = status_of(sys.argv[1:])
print("torch" in sys.modules, file=sys.stderr)
sys.exit(status)
"""


class CommandRuns(NamedTuple):
    """Several processes of the command `async-ckpt` with the same arguments."""

    seconds: list[float]
    num_lines: int
    """The number of lines that the command prints."""
    needs_torch: bool


def peak_bytes(folder: Path, state_bytes: int, budget: int | None) -> int:
    """The peak of memory during a save, beyond the memory of the process just before."""
    return int(result_of(_measure_peak, folder, state_bytes, budget))


def first_saves(folder: Path, state_bytes: int) -> list[SaveReport]:
    """Reports of a process's first saves of a state, one every second, in the order of the calls.

    Another process has used as much memory before. A virtual machine gets pages from its host when memory is first
    used, which happens only once, at a fraction of the usual speed.
    """
    result_of(_take_memory, 2 * state_bytes)
    reports: list[SaveReport] = result_of(_measure_first, folder, state_bytes)
    return reports


def beyond_segments(root: str, options: Mapping[str, str], state_bytes: int) -> int:
    """The peak of memory during saves to a store, beyond the memory of the process with all segments allocated."""
    return int(result_of(_measure_beyond_segments, root, dict(options), state_bytes))


def command_peak_bytes(module: str, arguments: Sequence[str]) -> int:
    """The peak of memory during a command, beyond the memory of the process with its module imported."""
    return int(result_of(_measure_command, module, [*arguments]))


def command(arguments: Sequence[str], rounds: int) -> CommandRuns:
    """Run the command with these arguments, timed from the start of its process to the end."""
    with _compiling() as environment:
        first = subprocess.run(
            [sys.executable, "-c", _COMMAND, *arguments], check=True, capture_output=True, text=True, env=environment
        )
        words = [sys.executable, "-m", "async_ckpt", *arguments]
        seconds = [_seconds_of(words, environment) for _ in range(rounds)]
    return CommandRuns(seconds, len(first.stdout.splitlines()), first.stderr.strip() == "True")


def python(code: str, rounds: int) -> list[float]:
    """Seconds of a process that runs this code."""
    with _compiling() as environment:
        return [_seconds_of([sys.executable, "-c", code], environment) for _ in range(rounds + 1)][1:]


def _seconds_of(words: Sequence[str], environment: Mapping[str, str]) -> float:
    begin = perf_counter()
    subprocess.run(words, check=True, stdout=subprocess.PIPE, env=environment)
    return perf_counter() - begin


@contextmanager
def _compiling() -> Iterator[dict[str, str]]:
    """An environment for processes that keep compiled code, like an installed package. The first one compiles it."""
    with tempfile.TemporaryDirectory() as cache:
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
        environment["PYTHONPYCACHEPREFIX"] = cache
        yield environment


def imports(rounds: int) -> tuple[list[float], list[str]]:
    """Seconds of `from async_ckpt import AsyncCheckpointer` after `import torch`, and its optional packages."""
    with _compiling() as environment:
        samples = [_imported(environment) for _ in range(rounds + 1)]
    seconds = [seconds for seconds, _ in samples[1:]]
    return seconds, [name for name in OPTIONAL_PACKAGES if name in samples[0][1]]


def _imported(environment: dict[str, str]) -> tuple[float, list[str]]:
    command = [sys.executable, "-c", _IMPORT]
    told = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment).stdout
    seconds, added = json.loads(told)
    return float(seconds), added


def _measure_peak(folder: Path, state_bytes: int, budget: int | None) -> int:
    from async_ckpt import AsyncCheckpointer

    from .workloads import tensors

    state = {"model": tensors(state_bytes)}
    with AsyncCheckpointer(folder / str(os.getpid()), host_bytes=budget) as checkpointer:
        return _peak_of(lambda: checkpointer.save(state, step=1).result())


def _take_memory(num_bytes: int) -> None:
    WarmMemory(num_bytes, SEGMENT_BYTES)


def _measure_first(folder: Path, state_bytes: int) -> list[SaveReport]:
    from async_ckpt import AsyncCheckpointer

    from .workloads import tensors

    state = {"model": tensors(state_bytes)}
    reports = []
    with AsyncCheckpointer(folder / str(os.getpid()), keep=1) as checkpointer:
        for step in range(_NUM_FIRST):
            reports.append(checkpointer.save(state, step).result())
            checkpointer.wait()
            sleep(1)
    return reports


def _measure_beyond_segments(root: str, options: dict[str, str], state_bytes: int) -> int:
    from async_ckpt import AsyncCheckpointer, Place

    from .workloads import tensors

    state = {"model": tensors(state_bytes)}
    with AsyncCheckpointer(Place(f"{root}/{os.getpid()}", options=options)) as checkpointer:
        checkpointer.prewarm(state)
        return _peak_of(lambda: [checkpointer.save(state, step).result() for step in range(_NUM_SAVES)])


def _measure_command(module: str, arguments: list[str]) -> int:
    import_module(f"async_ckpt.tools.command.{module}")
    from async_ckpt.tools.command.main import status_of

    return _peak_of(lambda: status_of(arguments))


def _peak_of(action: Callable[[], object]) -> int:
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak, see proc(5)
    before = status_bytes("VmRSS")
    action()
    return status_bytes("VmHWM") - before
