"""What can only be seen from a process of its own: the peak of its memory, and a first import.

In: sizes. Out: numbers, from subprocesses. Knows nothing of: figures.
Run as `python -m benchmarks.probe FOLDER STATE_BYTES BUDGET`, this is such a process itself.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

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

_IMPORT: Final = """
import json, sys, time, torch
before = set(sys.modules)
begin = time.perf_counter()
import async_ckpt
seconds = time.perf_counter() - begin
print(json.dumps([seconds, sorted(set(sys.modules) - before)]))
"""


def peak_bytes(folder: Path, state_bytes: int, budget: int | None) -> int:
    """Memory that a save took at its peak, beyond what the process held just before."""
    command = ["-m", __name__, str(folder), str(state_bytes), str(budget or 0)]
    return int(_output(*command))


def imports(rounds: int) -> tuple[list[float], list[str]]:
    """Seconds of `import async_ckpt` after `import torch`; and the optional packages that come with it."""
    # Compiled code is kept, as it is wherever a package is installed; the first run of all compiles it, untimed.
    with tempfile.TemporaryDirectory() as cache:
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
        environment["PYTHONPYCACHEPREFIX"] = cache
        samples = [json.loads(_output("-c", _IMPORT, environment=environment)) for _ in range(rounds + 1)]
    seconds = [float(sample) for sample, _ in samples[1:]]
    return seconds, [name for name in OPTIONAL_PACKAGES if name in samples[0][1]]


def _output(*arguments: str, environment: dict[str, str] | None = None) -> str:
    command = [sys.executable, *arguments]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment).stdout


def _status_bytes(key: str) -> int:
    """VmRSS or VmHWM of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(key)


def _measure_peak(folder: Path, state_bytes: int, budget: int) -> int:
    from async_ckpt import AsyncCheckpointer

    from .workloads import tensors

    state = {"model": tensors(state_bytes)}
    with AsyncCheckpointer(folder / str(os.getpid()), host_bytes=budget or None) as checkpointer:
        Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far, see proc(5)
        before = _status_bytes("VmRSS")
        checkpointer.save(state, step=1).result()
        return _status_bytes("VmHWM") - before


if __name__ == "__main__":
    print(_measure_peak(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))
