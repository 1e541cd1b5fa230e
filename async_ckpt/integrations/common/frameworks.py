"""The version of a framework and the names that a plug-in uses of it, checked when the plug-in is made.

In: the name of a package. Out: the package, or an error that says what to do. Knows nothing of: checkpoints.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterable
from functools import cache
from types import ModuleType
from typing import Any, Final

LOGGED_AS: Final = "async_ckpt/"
"""The prefix of the figures of saves in the loggers of frameworks."""


@cache
def require(package: str, *, oldest: str, newest: str) -> ModuleType:
    """A framework's package, imported. Warns once if its version lies outside of those that were tested.

    `oldest` and `newest` are the versions that were tested, such as "4.50" and "5.23"; what follows in the installed
    version does not count. Raises ImportError if the package is not installed.
    """
    try:
        module = importlib.import_module(package)
    except ModuleNotFoundError as error:
        raise ImportError(f"this needs {package}, which is not installed: pip install '{package}>={oldest}'") from error
    version = _numbers(version_of(module))
    if not _numbers(oldest) <= version or version[: len(_numbers(newest))] > _numbers(newest):
        warnings.warn(
            f"{package} {version_of(module)} was not tested with async_ckpt; {oldest} to {newest} were",
            UserWarning,
            stacklevel=3,
        )
    return module


def require_names(package: ModuleType, owner: Any, names: Iterable[str]) -> None:
    """Raise RuntimeError if an object of a framework lacks names that a plug-in calls, some of them private.

    Called when a plug-in is made, so that this does not come up in the middle of a training.
    """
    missing = [name for name in names if not hasattr(owner, name)]
    if missing:
        where = getattr(owner, "__name__", None) or type(owner).__name__
        raise RuntimeError(
            f"{package.__name__} {version_of(package)} has no {where}.{missing[0]}, which async_ckpt needs; install "
            "a version that its page in docs/ lists as tested"
        )


def version_of(package: ModuleType) -> str:
    return str(getattr(package, "__version__", "of an unknown version"))


def _numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: (4, 50) of "4.50.dev0"."""
    numbers = []
    for part in version.split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)
