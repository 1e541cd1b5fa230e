"""Type checks for fields of untrusted JSON objects.

In: JSON, and its values. Out: the same values, or ValueError. Knows nothing of: their meaning, files.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, TypeVar

T = TypeVar("T")

_LARGEST: Final = sys.float_info.max


def parsed(data: str | bytes) -> Any:
    """Parse JSON. Raises ValueError, also for JSON that is nested too deeply."""
    try:
        return json.loads(data)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def text(value: object) -> str:
    """A text without lone surrogates, which UTF-8 cannot encode, and which cannot be in the name of a file."""
    if not isinstance(value, str):
        raise ValueError(f"{value!r:.100} is not text")
    value.encode()
    return value


def is_unicode(value: str) -> bool:
    """False for text with lone surrogates: UTF-8 cannot encode them, and JSON would join a pair into one character."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def count(value: object, at_most: int = 2**63 - 1) -> int:
    """A whole number from 0 to `at_most`."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= at_most:
        raise ValueError(f"{value!r:.100} is not a count")
    return value


def whole(value: object) -> int:
    """A whole number of either sign."""
    if isinstance(value, bool) or not isinstance(value, int) or abs(value) >= 2**63:
        raise ValueError(f"{value!r:.100} is not a whole number")
    return value


def number(value: object) -> float:
    """A finite number."""
    # An integer in JSON may be larger than any float, and `math.isfinite` would raise OverflowError for it.
    if isinstance(value, bool) or not isinstance(value, int | float) or not -_LARGEST <= value <= _LARGEST:
        raise ValueError(f"{value!r:.100} is not a number")
    return float(value)


def table(value: object) -> dict[str, Any]:
    """A JSON object."""
    if not isinstance(value, dict):
        raise ValueError(f"{value!r:.100} is not an object")
    return value


def items(value: object, of: Callable[[Any], T]) -> tuple[T, ...]:
    """A list of values of one type."""
    if not isinstance(value, list | tuple):
        raise ValueError(f"{value!r:.100} is not a list")
    return tuple(map(of, value))


def row(value: object, of: Sequence[Callable[[Any], Any]]) -> tuple[Any, ...]:
    """A list with exactly one value for each of the types `of`."""
    if not isinstance(value, list | tuple) or len(value) != len(of):
        raise ValueError(f"{value!r:.100} is not a list of {len(of)}")
    return tuple(parse(one) for parse, one in zip(of, value, strict=True))


def entries(value: object, of: Callable[[Any], T]) -> Iterable[tuple[str, T]]:
    """The names and values of a JSON object whose values are of one type."""
    return ((text(name), of(one)) for name, one in table(value).items())
