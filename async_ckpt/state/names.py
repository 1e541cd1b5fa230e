"""Names of what is in a state, and which of them are selected.

In: paths and patterns. Out: dotted names, and what is within them. Knows nothing of: tensors.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Sequence, Set
from typing import Any


class Selector:
    """Whether a path is selected: by its name, by the name of what it is in, or by a glob over the dotted path."""

    def __init__(self, patterns: Iterable[str]) -> None:
        self._patterns = list(patterns)
        self.unused = list(self._patterns)  # those that have selected nothing so far

    def __call__(self, path: Path) -> bool:
        name = dotted(path)
        if self.unused:
            self.unused = [pattern for pattern in self.unused if not _matches(name, pattern)]
        return any(_matches(name, pattern) for pattern in self._patterns)

    def reaches(self, name: str) -> bool:
        """Whether it selects, or may select, an entry of this name at the top, or something in it."""
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
    """Whether a dotted name is one of these, or of something inside one of them. However many there are, it takes no longer."""
    end = len(name) if groups else -1
    while end >= 0 and name[:end] not in groups:
        end = name.rfind(".", 0, end)
    return end >= 0


def shown(path: Path) -> str:
    """The name of a path, for people."""
    return printable(dotted(path)) if path else "the state"


def printable(text: str) -> str:
    """The text with lone surrogates written out, which no terminal and no log file takes."""
    return text.encode(errors="backslashreplace").decode()


def _text(key: Any) -> str:
    try:
        return str(key)
    except (ValueError, RecursionError):  # an integer, or one in a tuple, of thousands of digits
        return f"{hex(key)[:20]}…" if isinstance(key, int) else f"<{type(key).__qualname__}>"


def selector(select: Select) -> Selector | None:
    """What the user has selected; None for everything. Raises TypeError for what is no name."""
    if select is None:
        return None
    patterns = (
        [select] if isinstance(select, str) else list(select) if isinstance(select, Iterable) else [select]
    )
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise TypeError(
                f'select must be a name, a glob such as "*.lora_*", or several of them, got {pattern!r:.100}'
            )
    return Selector(patterns)


Path = tuple[Any, ...]
Select = str | Sequence[str] | None
