"""Mutants of the core: a program changes one line of it at a time, and the tests of its room must notice.

`python tests/support/mutants_core.py` makes 300 mutants, runs the fast lane of the room's tests against each, in a copy of the
package, and keeps what it finds in tests/matrices/reports/mutants_core.json. It exits with 1 if a mutant survives that was noticed
before. `--number 40` makes fewer, `--seed 7` others. What is known there of an unchanged line is not run again, unless with `--again`.

A mutant turns a comparison or a condition round, moves a number by one, leaves out a call, or returns None. Some are no fault: a
survivor is worth a look, and no more than that.
"""

import argparse
import ast
import copy
import json
import random
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from mutants_device import ROOT, SURVIVED, Copy, _import_for_all

CORE = ROOT / "async_ckpt" / "core"
KEPT = ROOT / "tests" / "matrices" / "reports" / "mutants_core.json"
_OTHER = {
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Is: ast.IsNot,
    ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And, ast.Add: ast.Sub, ast.Sub: ast.Add,
}  # fmt: skip


class CoreMutant(NamedTuple):
    """One change of one line: `old` at these columns becomes `new`."""

    path: str  # below async_ckpt/
    function: str
    line: int
    begin: int
    end: int
    old: str
    new: str

    @property
    def place(self) -> Path:
        return Path("async_ckpt", self.path)

    @property
    def name(self) -> str:
        """What it is known by when lines above it come and go."""
        return f"{self.path} {self.function}: {self.old} -> {self.new}"

    def changed(self) -> str:
        """The text of the file with this change."""
        lines = (ROOT / self.place).read_text(encoding="utf-8").splitlines(keepends=True)
        line = lines[self.line - 1].encode()
        lines[self.line - 1] = (line[: self.begin] + self.new.encode() + line[self.end :]).decode()
        return "".join(lines)


def mutants_in(path: Path) -> Iterator[CoreMutant]:
    """All mutants of one file."""
    text = path.read_text(encoding="utf-8")
    place = path.relative_to(ROOT / "async_ckpt").as_posix()

    def visit(node: ast.AST, function: str) -> Iterator[CoreMutant]:
        for child in ast.iter_child_nodes(node):
            name = (
                getattr(child, "name", "")
                if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
                else ""
            )
            inner = ".".join(filter(None, [function, name]))
            yield from visit(child, inner)
            other = _other(child)
            lines = getattr(child, "lineno", 0), getattr(child, "end_lineno", 0)
            if other is not None and lines[0] == lines[1]:
                old = ast.get_source_segment(text, child) or ""
                yield CoreMutant(place, inner, lines[0], child.col_offset, child.end_col_offset, old, other)  # type: ignore[attr-defined]

    yield from visit(ast.parse(text), "")


def _other(node: ast.AST) -> str | None:
    """The text of a changed node; None for one that is left as it is."""
    made = copy.deepcopy(node)
    if isinstance(made, ast.Compare) and type(made.ops[0]) in _OTHER:
        made.ops[0] = _OTHER[type(made.ops[0])]()
    elif isinstance(made, ast.BoolOp | ast.BinOp) and type(made.op) in _OTHER:
        made.op = _OTHER[type(made.op)]()  # type: ignore[assignment]
    elif isinstance(made, ast.UnaryOp) and isinstance(made.op, ast.Not):
        return f"({ast.unparse(made.operand)})"
    elif isinstance(made, ast.Constant) and isinstance(made.value, bool):
        return str(not made.value)
    elif isinstance(made, ast.Constant) and type(made.value) is int:
        return str(made.value + 1)
    elif isinstance(made, ast.Return) and made.value is not None and ast.unparse(made.value) != "None":
        return "return None"
    elif isinstance(made, ast.Expr) and isinstance(made.value, ast.Call):
        return "pass"
    else:
        return None
    return f"({ast.unparse(made)})"


def chosen(number: int, seed: int) -> list[CoreMutant]:
    """So many mutants, at most one of a line, drawn from all of the core."""
    drawn = [mutant for path in sorted(CORE.rglob("*.py")) for mutant in mutants_in(path)]
    random.Random(seed).shuffle(drawn)
    by_line = {(mutant.path, mutant.line): mutant for mutant in reversed(drawn)}
    return list(by_line.values())[-number:][::-1]


def tests_for(path: str) -> list[str]:
    """The tests of the room; those that are named like the file first. Words have no room of their own."""
    parts = path.split("/")
    room = parts[1] if len(parts) > 2 else "saving"
    found = sorted((ROOT / "tests" / "core" / room).glob("test_*.py"))
    alike = [one for one in found if Path(path).stem in one.stem]
    ordered = [*alike, *(one for one in found if one not in alike and not one.name.startswith("test_gpu"))]
    return [one.relative_to(ROOT / "tests").as_posix() for one in ordered] or ["test_checkpointer.py"]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--number", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--again", action="store_true", help="run what is known, too")
    options = parser.parse_args()
    known: dict[str, str] = json.loads(KEPT.read_text(encoding="utf-8")) if KEPT.exists() else {}
    _import_for_all()
    lost = []
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        house = Copy(Path(folder) / "house", "--fast")
        for mutant in chosen(options.number, options.seed):
            before = known.get(mutant.name)
            if before is None or options.again:
                known[mutant.name] = house.failing(tests_for(mutant.path), mutant.place, mutant.changed())
                if before not in (None, SURVIVED) and known[mutant.name] == SURVIVED:
                    lost.append(mutant.name)
                KEPT.write_text(json.dumps(dict(sorted(known.items())), indent=1) + "\n", encoding="utf-8")
            print(f"{mutant.name}: {known[mutant.name]}", flush=True)
    survived = sum(killer == SURVIVED for killer in known.values())
    print(
        f"{len(known)} mutants are known, {survived} of them survived; {len(lost)} are noticed no more",
        *lost,
        sep="\n  ",
    )
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
