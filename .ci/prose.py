"""Finds docstrings that do not begin with the thing that they are about, class names that stand for several things, and
lines that are too long.

Run by `make check`. Exits with 1 if there are any.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "async_ckpt"
MAX_COLUMNS = 120
MANY_LINES = 500  # a file of more is worth a look, and no more than that
NO_SUBJECT = re.compile(r"(What|Which|Who|Of|Those|It|Nobody)\b")


def main() -> int:
    complaints, owners = [], defaultdict(list)
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        lines = path.read_text(encoding="utf-8").splitlines()
        if len(lines) > MANY_LINES:
            print(f"note: async_ckpt/{name} has {len(lines)} lines; is it one thing?")
        for number, line in enumerate(lines, 1):
            if len(line) > MAX_COLUMNS:
                complaints.append(f"async_ckpt/{name}:{number}: {len(line)} columns, more than {MAX_COLUMNS}")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                owners[node.name.lstrip("_")].append(f"{name}:{node.lineno}")
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
    print(*complaints, sep="\n", end="\n" if complaints else "")
    return bool(complaints)


if __name__ == "__main__":
    sys.exit(main())
