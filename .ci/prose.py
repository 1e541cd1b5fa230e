"""Finds docstrings that do not begin with the thing that they are about, class names that stand for several things, and
lines that are too long.

Run by `make check`. Exits with 1 if there are any, and if the seconds of a test file are not known. Large files, folders,
classes and signatures are only noted: the question to ask is whether their states can be drawn in one table.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections import Counter, defaultdict
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "async_ckpt"
TESTS = PACKAGE.parent / "tests"
# Tests that need an environment of their own, or a GPU, take no part in the lanes.
OF_OTHERS = tuple(f"tests/frameworks/{path.stem}/" for path in (TESTS.parent / "constraints").glob("*.txt"))
MAX_COLUMNS = 120
# More of these are worth a look, and no more than that.
MANY_LINES, MANY_FILES, MANY_ATTRIBUTES, MANY_PARAMETERS = 500, 15, 15, 8
NO_SUBJECT = re.compile(r"(What|Which|Who|Of|Those|It|Nobody)\b")


def main() -> int:
    complaints, owners = [], defaultdict(list)
    for folder, size in sorted(Counter(path.parent for path in PACKAGE.rglob("[!_]*.py")).items()):
        if size > MANY_FILES:
            note(folder.relative_to(PACKAGE), size, "files")
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        lines = path.read_text(encoding="utf-8").splitlines()
        if len(lines) > MANY_LINES:
            note(name, len(lines), "lines")
        of_command = name == "tools/command/main.py"  # a word has a parameter for each of its options
        for number, line in enumerate(lines, 1):
            if len(line) > MAX_COLUMNS:
                complaints.append(f"async_ckpt/{name}:{number}: {len(line)} columns, more than {MAX_COLUMNS}")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                if (size := len(attributes_of(node))) > MANY_ATTRIBUTES:
                    note(f"{name}:{node.lineno} {node.name}", size, "attributes")
                owners[node.name.lstrip("_")].append(f"{name}:{node.lineno}")
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                size = num_parameters(node)
                if size > MANY_PARAMETERS and not of_command:
                    note(f"{name}:{node.lineno} {node.name}", size, "parameters")
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node) or ""
                if NO_SUBJECT.match(text):
                    complaints.append(
                        f"async_ckpt/{name}:{getattr(node, 'lineno', 1)}: begin with the thing: {text[:60]!r}"
                    )
    complaints += [
        f"the class name {name} is there several times: {', '.join(places)}"
        for name, places in sorted(owners.items())
        if len(places) > 1
    ]
    known = json.loads((TESTS / "durations.json").read_text(encoding="utf-8"))
    complaints += [
        f"tests/durations.json lacks {name}: run `make durations`, or write down the seconds that the file takes"
        for name in sorted(path.relative_to(TESTS.parent).as_posix() for path in TESTS.rglob("test_*.py"))
        if name not in known and not name.startswith(OF_OTHERS)
    ]
    print(*complaints, sep="\n", end="\n" if complaints else "")
    return bool(complaints)


def note(what: object, size: int, of: str) -> None:
    print(f"note: async_ckpt/{what} has {size} {of}; is it one thing?")


def num_parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    names = [arg.arg for arg in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
    return len(names) - (names[:1] in (["self"], ["cls"]))


def attributes_of(node: ast.ClassDef) -> set[str]:
    """The fields of a class, and what its methods assign to `self`."""
    fields = {one.target.id for one in node.body if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)}
    stored = (one for one in ast.walk(node) if isinstance(one, ast.Attribute) and isinstance(one.ctx, ast.Store))
    return fields | {one.attr for one in stored if isinstance(one.value, ast.Name) and one.value.id == "self"}


if __name__ == "__main__":
    sys.exit(main())
