"""`python -m benchmarks`: measure, print the table, and keep it with the machine that it was measured on.

In: the command line. Out: a table, benchmarks/results/*.json and .md. Knows nothing of: how a figure is measured.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import torch

from . import figures, table
from .compression import compression
from .environment import describe
from .gpu import gpu
from .setting import Setting

RESULTS: Final = Path(__file__).parent / "results"
README: Final = Path(__file__).parent.parent / "README.md"
Measure = Callable[[Setting], Mapping[str, table.Row]]
MEASURES: Final[dict[str, Measure]] = {
    "stall": figures.stall,
    "guarded_stall": figures.guarded_stall,
    "durable_bandwidth": figures.durable_bandwidth,
    "small": figures.small,
    "restore": figures.restore,
    "memory": figures.memory,
    "training": figures.training,
    "wrapped": figures.wrapped,
    "compression": compression,
    "import_time": figures.import_time,
}


class Chosen(NamedTuple):
    """What is measured in one run."""

    name: str  # of the result files, and of the mark in the README
    measures: Mapping[str, Measure]
    packages: Sequence[str] = ()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = _parser()
    options = parser.parse_args(arguments)
    quick = options.quick or os.environ.get("QUICK") == "1"
    chosen = _chosen(options)
    measures = chosen.measures
    if options.only:
        if options.only not in measures:
            parser.error(f"--only: there are {', '.join(measures)}")
        measures = {options.only: measures[options.only]}
    options.dir.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="bench-", dir=options.dir))
    try:
        environment = describe(folder, chosen.packages)
        rows: dict[str, table.Row] = {}
        for name, measure in measures.items():
            print(f"measuring {name} …", flush=True)
            rows |= dict(measure(Setting.toy(folder / name) if quick else Setting(folder / name)))
            shutil.rmtree(folder / name, ignore_errors=True)
    finally:
        shutil.rmtree(folder)
        if not any(options.dir.iterdir()):
            options.dir.rmdir()
    print("\n" + table.markdown(list(rows.values()), environment))
    stem = _kept_at(options, chosen.name, toy=quick)
    if stem:
        table.write(stem, rows, environment)
    if stem in (RESULTS / "figures", RESULTS / "stores"):
        table.show_in(README, stem)


def _chosen(options: argparse.Namespace) -> Chosen:
    if options.gpu:
        return Chosen("figures_gpu", {"gpu": gpu})
    if options.stores:
        from . import stores  # and with it clients and servers that the others do not need

        return Chosen("stores", stores.MEASURES, stores.PACKAGES)
    return Chosen("figures", MEASURES)


def _kept_at(options: argparse.Namespace, name: str, *, toy: bool) -> Path | None:
    """Toy sizes and single figures are kept only where the caller says, and so is what could not be measured."""
    if options.out:
        return Path(options.out).with_suffix("")
    if toy or options.only or (options.gpu and not torch.cuda.is_available()):
        return None
    return RESULTS / name


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="toy sizes, in seconds; the same as QUICK=1")
    parser.add_argument("--gpu", action="store_true", help="the figures of a CUDA device instead")
    parser.add_argument("--stores", action="store_true", help="the figures of object stores instead")
    parser.add_argument("--only", metavar="FIGURE", help="one figure")
    parser.add_argument("--dir", type=Path, default=Path("bench_tmp"), help="folder on the disk to measure")
    parser.add_argument("--out", help="where the JSON and the table go, without suffix")
    return parser


if __name__ == "__main__":
    main()
