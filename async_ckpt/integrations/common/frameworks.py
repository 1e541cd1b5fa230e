"""The version of a framework and the names that a plug-in uses of it, checked when the plug-in is made.

In: the name of a package. Out: the package or a name in it, or an error that says what to do. Knows nothing of:
checkpoints.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterable
from functools import cache
from itertools import takewhile
from types import ModuleType
from typing import Any, Final

LOGGED_AS: Final = "async_ckpt/"
"""The prefix of the figures of saves in the loggers of frameworks."""
# The oldest and the newest version that were tested; what follows in an installed version does not count.
TESTED: Final = {
    "accelerate": ("1.15", "1.15"),
    "checkpoint_engine": ("0.4", "0.4"),
    "deepspeed": ("0.19", "0.19"),
    "lightning": ("2.4", "2.6"),
    "lightning_fabric": ("2.4", "2.6"),
    "megatron.core": ("0.19", "0.19"),
    "ray": ("2.60", "2.60"),
    "sglang": ("0.5.23", "0.5"),
    "torchtitan": ("0.3", "0.3"),
    "transformers": ("4.57", "5.23"),
    "verl": ("0.9", "0.9"),
    "vllm": ("0.33", "0.33"),
}


def name_in(module: str, name: str) -> Any:
    """A name of a framework's module, such as a class; `object` where it is not installed, of which `require` tells."""
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError):
        return object


@cache
def require(package: str) -> ModuleType:
    """A framework's package, imported. Warns once if its version lies outside of those that were tested.

    Raises ImportError if the package is not installed.
    """
    oldest, newest = TESTED[package]
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


def require_module(package: ModuleType, name: str) -> Any:
    """A module of a framework, imported. Raises RuntimeError if the framework has no such module."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and not name.startswith(error.name):
            raise  # of another package, which the framework needs
        raise RuntimeError(
            f"{package.__name__} {version_of(package)} has no module {name}, which async_ckpt needs; install a version "
            "that its page in docs/ lists as tested"
        ) from error


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
    return tuple(map(int, takewhile(str.isdigit, version.split("."))))
