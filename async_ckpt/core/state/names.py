"""The names of a state's entries, the selection of some of them, and the names of dtypes.

In: paths and patterns; dtypes. Out: dotted names, and whether each is selected; names of dtypes, and dtypes by name.
Knows nothing of: the values of tensors.
"""

from __future__ import annotations

import fnmatch
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence, Set
from typing import Any, Final

import torch

from ..spec import Json


class Selector:
    """True for a selected path: by its name, by the name of a container around it, or by a glob over its name.

    `selector` creates it for one call of the user.
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
        """True if a top-level entry of this name, or an entry in it, may be selected."""
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
    """True if a dotted name is one of the groups, or inside a group, in a time independent of their number."""
    end = len(name) if groups else -1
    while end >= 0 and name[:end] not in groups:
        end = name.rfind(".", 0, end)
    return end >= 0


def shown(path: Path) -> str:
    """The name of a path for messages."""
    return printable(dotted(path)) if path else "the state"


def printable(text: str) -> str:
    """The text with lone surrogates escaped, since terminals and log files reject them."""
    return text if text.isascii() else text.encode(errors="backslashreplace").decode()


def _text(key: Any) -> str:
    try:
        return str(key)
    except (ValueError, RecursionError):  # the key is or contains an integer with thousands of digits
        return f"{hex(key)[:20]}…" if isinstance(key, int) else f"<{type(key).__qualname__}>"


def selector(select: Select, *, what: str = "select") -> Selector | None:
    """The selector for `select`, or None for all. Raises TypeError, naming the argument, for an invalid pattern."""
    if select is None:
        return None
    patterns = [select] if isinstance(select, str) else list(select) if isinstance(select, Iterable) else [select]
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise TypeError(
                f'{what} must be a name, a glob such as "*.lora_*", or several of them, got {pattern!r:.100}'
            )
    return Selector(patterns)


Path = tuple[Any, ...]
Select = str | Sequence[str] | None


# Real dtypes have fewer fields. numpy takes minutes to make a dtype from megabytes of nested fields.
_MAX_FIELDS: Final = 10_000


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a torch dtype, such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def dtype_named(name: str) -> torch.dtype:
    """The torch dtype of that name. Raises ValueError if this version of torch lacks it."""
    dtype = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"this version of torch has no dtype {name!r:.50}; install a newer one to load it")
    return dtype


def is_describable(dtype: Any) -> bool:
    """True if arrays of this dtype are stored as bytes: the dtype has no Python objects, and not too many fields."""
    return not dtype.hasobject and _num_fields(dtype) <= _MAX_FIELDS


def numpy_dtype(descr: Json) -> Any:
    """The dtype of a .npy description. Raises ValueError for a dtype with Python objects."""
    import numpy

    dtype = numpy.lib.format.descr_to_dtype(_tuples(descr, itertools.count()))
    if dtype.hasobject:
        raise ValueError("a numpy array of Python objects outside of objects.pt")
    return dtype


def _num_fields(dtype: Any) -> int:
    """The number of fields of a structured dtype, including nested fields and gaps."""
    if dtype.subdtype is not None:
        return _num_fields(dtype.subdtype[0])
    return sum(2 + _num_fields(dtype.fields[name][0]) for name in dtype.names or ())


def _tuples(descr: Json, fields: Iterator[int]) -> Any:
    """The description of a structured dtype with tuples restored from JSON's lists. `fields` counts its fields."""
    if isinstance(descr, str):
        if len(descr) > 1000:
            raise ValueError(f"the dtype {descr:.50}… is too long")
        return descr
    tuples = []
    for name, inner, *shape in descr:
        if next(fields) > _MAX_FIELDS:
            raise ValueError(f"a dtype of more than {_MAX_FIELDS:,} fields")
        tuples.append((tuple(name) if isinstance(name, list) else name, _tuples(inner, fields), *map(tuple, shape)))
    return tuples
