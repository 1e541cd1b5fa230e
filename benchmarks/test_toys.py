"""`make bench-check`: every benchmark runs to its end at toy size, in seconds; its values mean nothing at that size.

The stored pictures show the stored figures.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from .candidates import CANDIDATES
from .plots import draw

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results"
_MAY_LACK = ("needs CUDA", "not installed", "not measured on a GPU")
TOY_FIGURES: dict[str, dict[str, set[str]]] = {
    "figures": {
        "figures": {
            "stall",
            "guarded_stall",
            "durable_bandwidth",
            "restore",
            "training",
            "bandwidth_limit",
            "reads_beside",
        }
    },
    "comparison": {
        "figures": {"lost_best", "lost_tar", "durable_gzip", "restore_torch", "lost_first"},
        "candidates": set(CANDIDATES),
    },
    "growth": {"growth": {"growth_durable", "growth_tensors", "growth_saves_memory", "growth_ranks"}},
    "shapes": {"workloads": {"shape_gpt2", "shape_rank_of_8b", "shape_lora", "shape_small", "shape_huge"}},
    "stores": {
        "figures": {"upload", "upload_link", "upload_cpu", "upload_memory", "download"},
        "peers": {"raw", "s3fs", "boto3", "moto", "rclone"},
    },
    "tiers": {
        "figures": {
            "two_places",
            "far_place_link",
            "lost_lags",
            "move_store_process",
            "far_hangs",
            "restart",
            "restart_ranks",
        }
    },
    "ranks": {"figures": {"two_ranks", "ranks_stall", "ranks_durable"}},
    "intervals": {"figures": {"interval_known_weibull", "interval_measured_exponential", "interval_overhead"}},
    "dcp": {"figures": {"plugged_stall", "plugged_durable", "restore_columns", "read_columns"}},
    "scale": {
        "figures": {
            "plan_first_ddp",
            "plan_cached_hsdp",
            "plan_beside_dcp",
            "commit_first_fsdp",
            "memory_hsdp",
        },
        "ranks": {
            "growth_plan_first",
            "growth_dcp_global",
            "growth_known",
            "growth_layout",
            "growth_restart_all",
            "growth_restart_shared",
        },
    },
    "publish": {
        "figures": {
            "publish_beside",
            "publish_full",
            "publish_bytes",
            "publish_encode",
            "publish_apply",
            "publish_full_torch",
            "publish_delta_safetensors",
        }
    },
    "one_host": {
        "figures": {"one_host_files", "one_host_memcpy", "one_host_beside"},
        "ways": {"one_host_way_0", "one_host_way_5"},
    },
    "command": {
        "figures": {
            "command_help",
            "command_ls",
            "command_torch",
            "command_ls_many",
            "command_ls_store",
            "command_page",
            "command_page_memory",
            "command_page_bytes",
            "command_page_browser",
            "command_inspect",
            "command_verify",
            "command_cp",
            "command_memory_0",
        }
    },
    "history": {"figures": {"history_disk", "history_requests", "history_saves", "history_bytes"}},
    "trainers": {
        "figures": {
            "transformers_transformers_beside_plain",
            "transformers_archive_beside_own",
            "lightning_file_durable",
            "accelerate_accelerate_durable",
        }
    },
    "memory": {"figures": {"memory_committed", "memory_durable", "memory_restored"}},
    "groups": {"figures": {"group_digests_2", "group_digests_100", "group_saves", "group_saves_cpu"}},
    "finite": {"figures": {"finite_float32", "finite_float8_e4m3fn", "finite_saves", "finite_saves_cpu"}},
    "unchanged": {"figures": {"unchanged_bytes", "unchanged_lost", "unchanged_lost_moonclip", "unchanged_no_use_call"}},
    "gpu": {"figures": {"gpu_pending", "gpu_copy_16", "gpu_inflation_guarded", "gpu_traps"}},
    "trace": {"spans": {"step_of_the_training", "stage", "write", "digest", "finish", "commit"}},
}


def kept_by(program: list[str], name: str, folder: Path) -> dict[str, Any]:
    """The stored content of a table after a program has measured it at toy size."""
    command = [sys.executable, *program, name, "--dir", str(folder / "disk"), "--out", str(folder)]
    quick = {**os.environ, "QUICK": "1"}
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=600, env=quick)
    return json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", TOY_FIGURES)
def test_the_benchmark_runs_at_toy_size(name: str, tmp_path: Path) -> None:
    kept = kept_by(["-m", "benchmarks"], name, tmp_path)
    for group, names in TOY_FIGURES[name].items():
        assert names <= kept[group].keys()
    groups = [
        kept.get("candidates", {}),
        *(row["candidates"] for row in kept.get("workloads", {}).values()),
    ]
    why_not = {row["title"]: row["not_measured"] for group in groups for row in group.values() if "not_measured" in row}
    assert [title for title, why in why_not.items() if not why.startswith(_MAY_LACK)] == []


def test_every_part_of_the_gpu_benchmark_runs_on_a_simulated_device_and_keeps_what_it_saves(
    tmp_path: Path,
) -> None:
    """With only torch and xxhash installed."""
    rows = kept_by(["tests/support/bench_on_simulation.py"], "gpu", tmp_path)["figures"]
    why_not = {name: row["note"] for name, row in rows.items() if "pairs" not in row}
    peers = [name for name in rows if name.endswith(("_torch_checkpointing", "_resiliency"))]

    assert why_not == dict.fromkeys(peers, "not measured: not installed")
    assert rows["gpu_traps"]["met"]
    assert rows["gpu_graphs"]["met"]


@pytest.mark.parametrize("picture", sorted(RESULTS.glob("*.svg")))
def test_a_picture_is_what_the_kept_figures_make(picture: Path, tmp_path: Path) -> None:
    """Only the words, which are the figures, are compared: lines differ with the version of the drawing library."""
    stem = next(p for p in picture.parent.glob("*.json") if picture.name.startswith(p.stem + "_")).stem
    shutil.copy(picture.parent / f"{stem}.json", tmp_path)
    drawn = {path.name: path for path in draw(tmp_path / stem)}
    words = [re.findall(r"<text[^>]*>(.*?)</text>", p.read_text(), re.DOTALL) for p in (picture, drawn[picture.name])]
    assert words[0] == words[1]
    assert any(words[0])
