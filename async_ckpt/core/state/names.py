"""The names of a state's entries, and the selection of some of them.

In: paths and patterns. Out: dotted names, and true or false for each. Knows nothing of: tensors.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Sequence, Set
from typing import Any


class Selector:
    """True for a selected path: by its name, by the name of a container of it, or by a glob over the dotted path.

    Made by `selector` for one call of the user.
    """

    def __init__(self, patterns: Iterable[str]) -> None:
        self._patterns = list(patterns)
        self.unused = list(self._patterns)  # patterns that have selected nothing so far

    def __call__(self, path: Path) -> bool:
        name = dotted(path)
        if self.unused:
            self.unused = [pattern for pattern in self.unused if not _matches(name, pattern)]
        return any(_matches(name, pattern) for pattern in self._patterns)

    def reaches(self, name: str) -> bool:
        """True if a top-level entry of this name, or something in it, is or may be selected."""
        return any(_matches(name, pattern) or _reaches(name, pattern) for pattern in self._patterns)


def _matches(name: str, pattern: str) -> bool:
    return name == pattern or name.startswith(f"{pattern}.") or fnmatch.fnmatchcase(name, pattern)


def _reaches(name: str, pattern: str) -> bool:
    literal = re.split(r"[*?\[]", pattern, maxsplit=1)[0]
    return literal.startswith(f"{name}.") or (literal != pattern and f"{name}.".startswith(literal))


def dotted(path: Path) -> str:
    """The name of a path, as `select` matches it."""
    return ".".join(map(_text, path))


def is_within(name: str, groups: Set[str]) -> bool:
    """True if a dotted name is one of the groups, or inside one. The time does not depend on the number of groups."""
    end = len(name) if groups else -1
    while end >= 0 and name[:end] not in groups:
        end = name.rfind(".", 0, end)
    return end >= 0


def shown(path: Path) -> str:
    """The name of a path, for people."""
    return printable(dotted(path)) if path else "the state"


def printable(text: str) -> str:
    """The text with lone surrogates written out, since no terminal and no log file accepts them."""
    return text.encode(errors="backslashreplace").decode()


def _text(key: Any) -> str:
    try:
        return str(key)
    except (ValueError, RecursionError):  # an integer, or one in a tuple, of thousands of digits
        return f"{hex(key)[:20]}…" if isinstance(key, int) else f"<{type(key).__qualname__}>"


def selector(select: Select) -> Selector | None:
    """The selector for `select`; None for everything. Raises TypeError for a pattern that is no text."""
    if select is None:
        return None
    patterns = [select] if isinstance(select, str) else list(select) if isinstance(select, Iterable) else [select]
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise TypeError(
                f'select must be a name, a glob such as "*.lora_*", or several of them, got {pattern!r:.100}'
            )
    return Selector(patterns)


Path = tuple[Any, ...]
Select = str | Sequence[str] | None
