"""Facts about the machine that figures were measured on, without which a figure means nothing.

In: the folder that is written to, packages. Out: plain values for the result file. Knows nothing of: figures.
"""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

import async_ckpt


def describe(folder: Path, packages: Sequence[str] = ()) -> dict[str, str | int | float]:
    told: dict[str, str | int | float] = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "cpu": _after("/proc/cpuinfo", "model name") or platform.processor() or "unknown",
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(int((_after("/proc/meminfo", "MemTotal") or "0 kB").split()[0]) / 2**20, 1),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "kernel": platform.release(),
        "file_system": file_system(folder),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "xxhash": _version("xxhash"),
        "async_ckpt": f"{async_ckpt.__version__} at {_commit()}",
    }
    return told | {name: _version(name) for name in packages}


def file_system(folder: Path) -> str:
    """The type of the file system of the folder, by the longest mount point above it."""
    best, kind = Path("/"), "unknown"
    for line in Path("/proc/mounts").read_text().splitlines():
        _, mount, found, *_ = line.split()
        if folder.resolve().is_relative_to(mount) and len(mount) >= len(str(best)):
            best, kind = Path(mount), found
    return kind


def _commit() -> str:
    """The commit of the measured code, if git has one; with a "+" if files differ from it."""
    here = Path(__file__).parent
    asked = [["rev-parse", "--short", "HEAD"], ["status", "--porcelain", "--", "*.py", "../async_ckpt"]]
    try:
        commit, changed = (
            subprocess.run(["git", *words], cwd=here, check=True, capture_output=True, text=True).stdout.strip()
            for words in asked
        )
    except (OSError, subprocess.CalledProcessError):
        return "no commit"
    return commit + ("+" if changed else "")


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def _after(path: str, key: str) -> str | None:
    """The value in the first `key : value` line of a file of /proc."""
    for line in Path(path).read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == key:
            return value.strip()
    return None
