"""`python -m benchmarks`: measure, print the table, and keep it with the machine that it was measured on.

In: the command line. Out: a table, benchmarks/results/figures.json and .md. Knows nothing of: how a figure is measured.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import torch

from . import figures, table
from .environment import describe
from .gpu import gpu
from .setting import Setting

RESULTS: Final = Path(__file__).parent / "results"
README: Final = Path(__file__).parent.parent / "README.md"
MEASURES: Final[dict[str, Callable[[Setting], dict[str, table.Figure]]]] = {
    "stall": figures.stall,
    "guarded_stall": figures.guarded_stall,
    "durable_bandwidth": figures.durable_bandwidth,
    "small": figures.small,
    "restore": figures.restore,
    "memory": figures.memory,
    "training": figures.training,
    "import_time": figures.import_time,
}


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(arguments)
    quick = options.quick or os.environ.get("QUICK") == "1"
    measures = {"gpu": gpu} if options.gpu else MEASURES
    if options.only:
        measures = {options.only: MEASURES[options.only]}
    options.dir.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="bench-", dir=options.dir))
    try:
        environment = describe(folder)
        rows: dict[str, table.Figure] = {}
        for name, measure in measures.items():
            print(f"measuring {name} …", flush=True)
            rows |= measure(Setting.toy(folder / name) if quick else Setting(folder / name))
            shutil.rmtree(folder / name, ignore_errors=True)
    finally:
        shutil.rmtree(folder)
        if not any(options.dir.iterdir()):
            options.dir.rmdir()
    print("\n" + table.markdown(list(rows.values()), environment))
    stem = _kept_at(options, toy=quick)
    if stem:
        table.write(stem, rows, environment)
    if stem == RESULTS / "figures":
        table.show_in(README, stem)


def _kept_at(options: argparse.Namespace, *, toy: bool) -> Path | None:
    """Toy sizes and single figures are kept only where the caller says, and so is what could not be measured."""
    if options.out:
        return Path(options.out).with_suffix("")
    if toy or options.only or (options.gpu and not torch.cuda.is_available()):
        return None
    return RESULTS / ("figures_gpu" if options.gpu else "figures")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="toy sizes, in seconds; the same as QUICK=1")
    parser.add_argument("--gpu", action="store_true", help="the figures of a CUDA device instead")
    parser.add_argument("--only", choices=MEASURES, help="one figure")
    parser.add_argument("--dir", type=Path, default=Path("bench_tmp"), help="folder on the disk to measure")
    parser.add_argument("--out", help="where the JSON and the table go, without suffix")
    return parser


if __name__ == "__main__":
    main()
