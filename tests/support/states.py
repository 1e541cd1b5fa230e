"""States that are a function of their step, runs that hold them, and how two of them differ, bit for bit."""

import dataclasses
import json
import math
import os
import random
import struct
from collections import OrderedDict, deque
from datetime import datetime, time
from decimal import Decimal
from pathlib import Path
from typing import Any

import torch
from racing import PATIENCE, until
from torch import nn

from async_ckpt import AsyncCheckpointer, Place, SaveHandle, SaveReport
from async_ckpt.core.events.log import NAME as HISTORY
from async_ckpt.core.runs.tiers_file import NAME as TIERS

MIB = 1 << 20
SEGMENT = 4 * MIB


def weight(step: int, mib: int = 1) -> torch.Tensor:
    """`mib` MiB whose every item depends on the step."""
    return torch.arange(mib * MIB // 4, dtype=torch.int32).mul_(2 * step + 1).add_(step)


def noise(num_bytes: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(num_bytes)


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2, bias=False))


def state_at(step: int, mib: int = 1) -> dict[str, Any]:
    return {
        "model": {"weight": weight(step, mib), "bias": torch.full((3,), float(step)), "none": torch.empty(0)},
        "step": step,
        "note": f"step {step}",
    }


def assert_is_state(state: dict[str, Any], step: int, mib: int = 1) -> None:
    want = state_at(step, mib)
    assert state["step"] == step
    assert state["note"] == want["note"]
    for name, tensor in want["model"].items():
        assert torch.equal(state["model"][name], tensor), f"{name} of step {step} differs"


def open_run(root: str | os.PathLike[str] | Place | list[Any], **options: Any) -> AsyncCheckpointer:
    options.setdefault("segment_bytes", SEGMENT)
    return AsyncCheckpointer(root, **options)


def everywhere(ckpt: AsyncCheckpointer, handle: SaveHandle) -> SaveReport:
    """Wait until a save is committed, and copied to all further places of its run, where retention has been applied."""
    report = handle.result()
    for place in ckpt.roots[1:]:
        handle.at(place).result(PATIENCE)
    ckpt.wait()
    until(lambda: not any(mover.worker.is_running for mover in ckpt._lineage.tiers.movers))
    return report


def save(ckpt: AsyncCheckpointer, *steps: int, mib: int = 1, **options: Any) -> None:
    """Save these steps one after the other, each everywhere before the next."""
    for step in steps:
        everywhere(ckpt, ckpt.save(state_at(step, mib), step=step, **options))


def save_into(root: str | os.PathLike[str] | Place | list[Any], *steps: int, mib: int = 1, **options: Any) -> None:
    """Open a run, `save` these steps into it and close it."""
    with open_run(root, **options) as ckpt:
        save(ckpt, *steps, mib=mib)


def restored(ckpt: AsyncCheckpointer, saved: Any, live: Any, **how: Any) -> Any:
    """Save one state, restore it into another; returns that one."""
    ckpt.save(saved, step=1).result()
    assert ckpt.restore(live, **how) == 1
    return live


def is_incidental(name: str) -> bool:
    """Whether a file in a run's root tells of its processes or places, or is its history; it stays there."""
    return name in (HISTORY, TIERS) or (name.startswith("start-") and name.endswith((".json", ".seen")))


def names_below(root: str | os.PathLike[str]) -> list[str]:
    """Every file below a folder, but for those that tell which processes have had the run, and its history."""
    top = Path(root)
    files = (path for path in top.rglob("*") if not (path.is_dir() or is_incidental(path.name)))
    return sorted(str(path.relative_to(top)) for path in files)


def journaled_steps(ckpt: AsyncCheckpointer) -> list[int]:
    """The steps in the journal of the first root."""
    data, _ = ckpt._roots.runs[0].storage.read("checkpoints.jsonl")
    return [json.loads(line)["step"] for line in data.splitlines()]


def records(root: Path) -> list[dict]:
    return [json.loads(line) for line in (root / "checkpoints.jsonl").read_text().splitlines()]


def leftovers(root: str | os.PathLike[str]) -> list[str]:
    """Files below a run's root that no commit accounts for."""
    rows = []
    for name in names_below(root):
        path = Path(root, name)
        named = path.with_name("manifest.json")
        alive = named.exists() and any(
            archive["name"] == path.name for archive in json.loads(named.read_text())["archives"]
        )
        if not alive and path.name not in ("manifest.json", "latest", "checkpoints.jsonl"):
            rows.append(name)
    return rows


def footprint(root: str | os.PathLike[str]) -> dict[str, tuple[int, int, int, int]]:
    """All that a change on storage would show in: mode, inode, size, time of every file and folder."""
    top = Path(root)
    found = {}
    for path in [top, *top.rglob("*")]:
        stat = path.lstat()
        found[str(path.relative_to(top))] = (stat.st_mode, stat.st_ino, stat.st_size, stat.st_mtime_ns)
    return found


def states_equal(a: Any, b: Any) -> bool:
    """Whether two states are the same in structure, types, order of keys, and every bit of every value."""
    return difference(a, b) is None


def difference(a: Any, b: Any, path: str = "state") -> str | None:
    """Where two states differ first, for a readable failure: `assert difference(a, b) is None`."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return _tensor_difference(a, b, path)
    if type(a) is not type(b):
        return f"{path}: {type(a).__name__} and {type(b).__name__}"
    if isinstance(a, dict):
        return _dict_difference(a, b, path)
    if dataclasses.is_dataclass(a):
        return _dict_difference(vars(a), vars(b), path)
    if isinstance(a, deque) and a.maxlen != b.maxlen:
        return f"{path}: a maxlen of {a.maxlen} and {b.maxlen}"
    if isinstance(a, list | tuple | deque):
        if len(a) != len(b):
            return f"{path}: {len(a)} and {len(b)} entries"
        found = (difference(x, y, f"{path}[{i}]") for i, (x, y) in enumerate(zip(a, b, strict=True)))
        return next((f for f in found if f), None)
    if hasattr(a, "dtype") and hasattr(a, "tobytes"):  # numpy's, which need not be installed
        same = a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
        return None if same else f"{path}: {a!r} and {b!r}"
    if isinstance(a, float | complex):
        return None if _bits(a) == _bits(b) else f"{path}: {a!r} and {b!r}"
    if isinstance(a, Decimal):
        return None if str(a) == str(b) else f"{path}: {a} and {b}"
    if isinstance(a, datetime | time) and (a.tzinfo, a.fold) != (b.tzinfo, b.fold):
        return f"{path}: {a!r} and {b!r}"
    return None if a == b else f"{path}: {a!r:.200} and {b!r:.200}"


def _tensor_difference(a: torch.Tensor, b: torch.Tensor, path: str) -> str | None:
    if (a.dtype, a.shape, a.device) != (b.dtype, b.shape, b.device):
        return f"{path}: {a.dtype}{list(a.shape)} on {a.device} and {b.dtype}{list(b.shape)} on {b.device}"
    return None if torch.equal(bits_of(a), bits_of(b)) else f"{path}: the values differ"


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor, in order, as a flat uint8 tensor."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    if not plain.numel():
        return torch.empty(0, dtype=torch.uint8)
    # A contiguous tensor with one item may have any stride; a view as bytes wants 1.
    return plain.reshape(-1).as_strided((plain.numel(),), (1,)).view(torch.uint8)


def _dict_difference(a: dict[Any, Any], b: dict[Any, Any], path: str) -> str | None:
    # Keys are compared by position, so a key may be a NaN, and True is not taken for 1.
    found = difference(list(a), list(b), f"{path} keys")
    if found is None and isinstance(a, OrderedDict):
        same = getattr(a, "_metadata", None) == getattr(b, "_metadata", None)
        found = None if same else f"{path}._metadata"
    if found is not None:
        return found
    pairs = zip(a.items(), b.values(), strict=True)
    inner = (difference(x, y, f"{path}[{key!r:.50}]") for (key, x), y in pairs)
    return next((f for f in inner if f), None)


def _bits(value: complex) -> str:
    """Bits of a float or a complex; every NaN with its payload."""
    number = complex(value)
    kind = "f" if isinstance(value, float) else "c"
    if kind == "f" and not math.isnan(value):
        return kind + float(value).hex()
    return kind + struct.pack(">dd", number.real, number.imag).hex()
