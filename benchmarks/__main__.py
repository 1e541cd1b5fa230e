"""`python -m benchmarks`: measure, print the tables, and store them with facts about the machine.

In: the command line. Out: tables, benchmarks/results/*.json, .md, .png and .svg. Knows nothing of: how a figure is
measured.
"""

from __future__ import annotations

import argparse
import compileall
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Final, NamedTuple

import async_ckpt

from .environment import describe
from .headline import add_run, headline
from .setting import KEPT, Setting
from .table import Row, kept_of, markdown, show_in, write

RESULTS: Final = Path(__file__).parent / "results"
README: Final = RESULTS.parent.parent / "README.md"
PAGE: Final = README.parent / "docs" / "benchmarks.md"
Measure = Callable[[Setting], Mapping[str, Row]]


class Table(NamedTuple):
    """Measurements that are stored in one file and shown behind the mark of the same name."""

    measures: Mapping[str, Measure]
    packages: Sequence[str] = ()
    closing: str = ""
    """Text that is printed after the table."""
    part_of: str = ""
    """The table of the page that combines this one with tables measured in other environments."""


# The module of each table, and the names of the table's measures if the module has other measures, too.
_TABLES: Final[dict[str, tuple[str, ...]]] = {
    "figures": ("figures",),
    "comparison": ("compare", "comparison"),
    "growth": ("growth",),
    "shapes": ("compare", "shapes"),
    "stores": ("stores",),
    "tiers": ("tiers",),
    "scale": ("scale",),
    "trace": ("tracing",),
    "groups": ("groups",),
    "finite": ("finite",),
    "unchanged": ("unchanged",),
    "ranks": ("ranks", "two_ranks", "beside_dcp"),
    "publish": ("publishing",),
    "one_host": ("one_host",),
    "command": ("command",),
    "history": ("history",),
    "memory": ("memory_place",),
    "intervals": ("intervals",),
    "trainers": ("trainers",),
    **{name: ("frameworks", name) for name in ("torchtitan", "deepspeed", "ray", "verl", "skyrl")},
    "dcp": ("ranks", "dcp"),
    "gpu": ("gpu",),
}
# Growth comes first: the memory of a process is measured best while the process is small.
_USUAL: Final = ("growth", "trace", "figures", "comparison")
RUNS: Final = RESULTS / "runs" / "comparison.json"


def _table(name: str) -> Table:
    """The table of a name. Only its own module is imported."""
    place, *own = _TABLES[name]
    module = import_module(f"{__package__}.{place}")
    every = module.measures() if place == "gpu" else module.MEASURES
    measures = {key: measure for key, measure in every.items() if key in own or not own}
    if place == "frameworks":
        return Table(measures, (name,), part_of=place)
    return Table(measures, getattr(module, "PACKAGES", ()), getattr(module, "CLOSING", ""))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = _parser()
    options = parser.parse_args(arguments)
    toy = options.quick or os.environ.get("QUICK") == "1"
    unknown = [name for name in options.table if name not in _TABLES]
    if unknown:
        parser.error(f"there is no table {unknown[0]}; there are {', '.join(_TABLES)}")
    tables = {name: _table(name) for name in options.table or _USUAL}
    if options.only:
        tables = _only(tables, options.only)
        if not tables:
            parser.error(f"--only {options.only}: no table has it")
    # As an installer does. Otherwise, compilation at import would count as time of a save or restore.
    compileall.compile_dir(Path(async_ckpt.__file__).parent, quiet=1)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that temporary files are deleted
    for name, table in tables.items():
        _measure(name, table, options, toy=toy)


def _only(tables: Mapping[str, Table], measure: str) -> dict[str, Table]:
    return {
        name: table._replace(measures={measure: table.measures[measure]})
        for name, table in tables.items()
        if measure in table.measures
    }


def _measure(name: str, table: Table, options: argparse.Namespace, *, toy: bool) -> None:
    options.dir.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="bench-", dir=options.dir)).absolute()
    stem = _kept_at(options, name, table.part_of, toy=toy)
    rows: dict[str, Row] = {}
    try:
        environment = describe(folder, table.packages)
        for figure, measure in table.measures.items():
            print(f"measuring {figure} …", flush=True)
            setting = Setting.toy(folder / figure) if toy else Setting(folder / figure)
            rows |= measure(replace(setting, gpu_seconds=options.seconds or setting.gpu_seconds))
            if stem is not None:  # after each measure, so that an interrupted run keeps its results
                write(stem, kept_of(rows, environment))
                _keep(folder / figure / KEPT, stem.parent / stem.name)
            shutil.rmtree(folder / figure, ignore_errors=True)
    finally:
        shutil.rmtree(folder)
        if not any(options.dir.iterdir()):
            options.dir.rmdir()
    print("\n" + markdown(kept_of(rows, environment)) + table.closing)
    if stem is None:
        return
    if find_spec("matplotlib") is not None:
        from .plots import draw

        draw(stem)
    if stem == RESULTS / table.part_of / name:
        kept = kept_of(rows, environment)
        shown = joined(stem.parent) if table.part_of else markdown(kept)
        show_in(PAGE, table.part_of or name, shown)
        if name == "comparison":
            show_in(README, "headline", headline(add_run(RUNS, kept)))


def joined(folder: Path) -> str:
    """The tables of all files in a folder of results, for the page."""
    files = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))]
    return markdown(*files) if files else ""


def _keep(found: Path, folder: Path) -> None:
    if found.is_dir():
        shutil.copytree(found, folder, dirs_exist_ok=True)


def _kept_at(options: argparse.Namespace, name: str, part_of: str, *, toy: bool) -> Path | None:
    """The path of the results without suffix. Toy sizes and single figures are stored only with --out."""
    if options.out:
        return Path(options.out) / name
    return None if toy or options.only else RESULTS / part_of / name


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__.partition("\n")[0])
    every = ", ".join(_TABLES)
    parser.add_argument("table", nargs="*", help=f"of {every}; by default {', '.join(_USUAL)}")
    parser.add_argument("--quick", action="store_true", help="toy sizes, in seconds; the same as QUICK=1")
    parser.add_argument("--only", metavar="FIGURE", help="one figure")
    parser.add_argument("--seconds", type=float, help="for the table gpu, instead of nine minutes")
    parser.add_argument("--dir", type=Path, default=Path("bench_tmp"), help="folder on the disk to measure")
    parser.add_argument("--out", help="folder for the JSON, tables and pictures")
    return parser


if __name__ == "__main__":
    main()
