"""`x.tar.zst` against tar.gz, and a place with `compression=` against a plain one: speed and size, on trained weights.

In: a setting. Out: rows. Knows nothing of: how frames are made.
"""

from __future__ import annotations

import shutil
import tarfile
from pathlib import Path
from time import perf_counter, process_time
from typing import Final, Literal

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
        rows |= _of_a_place(setting, dtype, num_bytes)
    return rows


def _of_a_place(setting: Setting, dtype: torch.dtype, num_bytes: int) -> dict[str, Figure]:
    name, plain = str(dtype).removeprefix("torch."), "the same at a place without compression="
    state, folder = _weights(dtype, num_bytes), setting.folder / "places"

    def moved(compression: Literal["zstd"] | None) -> tuple[float, float, float]:
        """Processor seconds of a copy, seconds of a load from its target, and MiB there."""
        shutil.rmtree(folder, ignore_errors=True)
        far = async_ckpt.Place(folder / "far", compression=compression)
        with async_ckpt.AsyncCheckpointer([folder / "near", far]) as ckpt:
            handle = ckpt.save(state, step=1)
            handle.result()
            begin = process_time()
            handle.at(far).result()
            ckpt.wait()
            seconds = process_time() - begin
        begin = perf_counter()
        async_ckpt.load(folder / "far")
        loading = perf_counter() - begin
        return seconds, loading, sum(path.stat().st_size for path in folder.glob("far/step_*/*.tar")) / MIB

    pairs = side_by_side(setting.few_rounds, lambda: moved("zstd"), lambda: moved(None))
    per_gb = num_bytes / 1e9
    return {
        f"place_{name}_size": Figure(
            f'size of {num_bytes // MIB} MiB of {name} weights at a place with compression="zstd"',
            "MiB",
            plain,
            Target("≤", 0.84 if dtype == torch.float32 else 0.68),
            [(a[2], b[2]) for a, b in pairs],
        ),
        f"place_{name}_copy": Figure(
            f"processor time of the copy of {name} weights to that place, compression included",
            "s per GB",
            f"{plain}, where the save itself writes most of the copy",
            None,
            [(a[0] / per_gb, b[0] / per_gb) for a, b in pairs],
        ),
        f"place_{name}_load": Figure(
            f"load from that place, a disk, of {name} weights",
            "s per GB",
            plain,
            None,
            [(a[1] / per_gb, b[1] / per_gb) for a, b in pairs],
        ),
    }


def _weights(dtype: torch.dtype, num_bytes: int) -> dict[str, dict[str, torch.Tensor]]:
    """Weights of the scale of initialized layers, which trained layers stay close to."""
    count = num_bytes // dtype.itemsize // 16
    return {"model": {f"layers.{i}.weight": (torch.randn(count) * 0.02).to(dtype) for i in range(16)}}


def _beside_gzip(
    setting: Setting, dtype: torch.dtype, num_bytes: int
) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    folder = setting.folder / "compression"
    folder.mkdir(parents=True, exist_ok=True)
    zst, plain, gz = folder / "x.tar.zst", folder / "x.pt", folder / "x.tar.gz"
    state = _weights(dtype, num_bytes)
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
