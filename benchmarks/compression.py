"""`x.tar.zst` beside the tar.gz that it replaces: speed and size, on weights as they come out of training.

In: a setting. Out: rows. Knows nothing of: how frames are made.
"""

from __future__ import annotations

import tarfile
from pathlib import Path
from time import perf_counter
from typing import Final

import torch

import async_ckpt

from .limits import MIB
from .setting import Setting, side_by_side
from .table import Figure, Target

# gzip takes half a minute for a GB, so both are measured on a sample.
_SAMPLE_BYTES: Final = 128 * MIB
_TOY_BYTES: Final = 8 * MIB
_GZIP_LEVEL: Final = 6
_ROUNDS: Final = 2


def compression(setting: Setting) -> dict[str, Figure]:
    rows = {}
    for dtype in (torch.float32, torch.bfloat16):
        num_bytes = _SAMPLE_BYTES if setting.state_bytes > _SAMPLE_BYTES else _TOY_BYTES
        name = str(dtype).removeprefix("torch.")
        speeds, sizes = _beside_gzip(setting, dtype, num_bytes)
        beside = f"tarfile, gzip level {_GZIP_LEVEL}, from the page cache, no fsync"
        rows[f"zstd_{name}"] = Figure(
            f'save(…, compression="zstd") of {name} weights, call to durable',
            "GB/s",
            beside,
            Target("≥", 10.0),
            speeds,
        )
        rows[f"zstd_{name}_size"] = Figure(
            f"size of that .tar.zst ({num_bytes // MIB} MiB of weights)",
            "MiB",
            beside,
            Target("≤", 1.0),
            sizes,
        )
    return rows


def _beside_gzip(
    setting: Setting, dtype: torch.dtype, num_bytes: int
) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    folder = setting.folder / "compression"
    folder.mkdir(parents=True, exist_ok=True)
    zst, plain, gz = folder / "x.tar.zst", folder / "x.pt", folder / "x.tar.gz"
    count = num_bytes // dtype.itemsize // 16
    # The scale that layers are initialised with, and stay near to.
    state = {"model": {f"layers.{i}.weight": (torch.randn(count) * 0.02).to(dtype) for i in range(16)}}
    torch.save(state, plain)
    async_ckpt.save(state, zst).result()

    def ours() -> tuple[float, float]:
        begin = perf_counter()
        async_ckpt.save(state, zst).result()
        return _measured(begin, num_bytes, zst)

    def gzip() -> tuple[float, float]:
        begin = perf_counter()
        with tarfile.open(gz, "w:gz", compresslevel=_GZIP_LEVEL) as tar:
            tar.add(plain, "x.pt")
        return _measured(begin, num_bytes, gz)

    pairs = side_by_side(min(_ROUNDS, setting.few_rounds), ours, gzip)
    return [(a[0], b[0]) for a, b in pairs], [(a[1], b[1]) for a, b in pairs]


def _measured(begin: float, num_bytes: int, path: Path) -> tuple[float, float]:
    return num_bytes / (perf_counter() - begin) / 1e9, path.stat().st_size / MIB
