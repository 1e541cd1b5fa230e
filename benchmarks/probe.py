"""What can only be seen from a process of its own: the peak of its memory, and a first import.

In: sizes. Out: numbers, from other processes. Knows nothing of: figures.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from .apart import result_of

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

# The second sweeps what dead writers left, and imports what that takes.
_NUM_SAVES: Final = 3
_IMPORT: Final = """
import gc, json, sys, time, torch
gc.collect()  # what torch has left to the collector is not ours to pay for
before = set(sys.modules)
begin = time.perf_counter()
import async_ckpt
seconds = time.perf_counter() - begin
print(json.dumps([seconds, sorted(set(sys.modules) - before)]))
"""


def peak_bytes(folder: Path, state_bytes: int, budget: int | None) -> int:
    """Memory that a save took at its peak, beyond what the process held just before."""
    return int(result_of(_measure_peak, folder, state_bytes, budget))


def beyond_segments(root: str, options: Mapping[str, str], state_bytes: int) -> int:
    """Memory that saves to a store took at their peak, beyond what the process held with all segments there."""
    return int(result_of(_measure_beyond_segments, root, dict(options), state_bytes))


def imports(rounds: int) -> tuple[list[float], list[str]]:
    """Seconds of `import async_ckpt` after `import torch`; and the optional packages that come with it."""
    # Compiled code is kept, as it is wherever a package is installed; the first run of all compiles it, untimed.
    with tempfile.TemporaryDirectory() as cache:
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
        environment["PYTHONPYCACHEPREFIX"] = cache
        samples = [_imported(environment) for _ in range(rounds + 1)]
    seconds = [seconds for seconds, _ in samples[1:]]
    return seconds, [name for name in OPTIONAL_PACKAGES if name in samples[0][1]]


def _imported(environment: dict[str, str]) -> tuple[float, list[str]]:
    command = [sys.executable, "-c", _IMPORT]
    told = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment).stdout
    seconds, added = json.loads(told)
    return float(seconds), added


def _status_bytes(key: str) -> int:
    """VmRSS or VmHWM of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(key)


def _measure_peak(folder: Path, state_bytes: int, budget: int | None) -> int:
    from async_ckpt import AsyncCheckpointer

    from .workloads import tensors

    state = {"model": tensors(state_bytes)}
    with AsyncCheckpointer(folder / str(os.getpid()), host_bytes=budget) as checkpointer:
        return _peak_of(lambda: checkpointer.save(state, step=1).result())


def _measure_beyond_segments(root: str, options: dict[str, str], state_bytes: int) -> int:
    from async_ckpt import AsyncCheckpointer, Place

    from .workloads import tensors

    state = {"model": tensors(state_bytes)}
    with AsyncCheckpointer(Place(f"{root}/{os.getpid()}", options=options)) as checkpointer:
        checkpointer.prewarm(state)
        return _peak_of(lambda: [checkpointer.save(state, step).result() for step in range(_NUM_SAVES)])


def _peak_of(action: Callable[[], object]) -> int:
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far, see proc(5)
    before = _status_bytes("VmRSS")
    action()
    return _status_bytes("VmHWM") - before
