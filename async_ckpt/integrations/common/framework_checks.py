"""Checks of a framework's version, and of the names that a plug-in uses, when the plug-in is constructed.

In: the name of a package. Out: the package or a name in it, or an error with the remedy. Knows nothing of:
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
"""The prefix of a save's metrics in the loggers of frameworks."""
# The oldest and the newest version that were tested. Further numbers of an installed version are not compared.
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
    """A name in a framework's module, such as a class; `object` if it is not installed, which `require` reports."""
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError):
        return object


@cache
def require(package: str) -> ModuleType:
    """Import a framework's package. Warns once if its version is outside the tested range.

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
    """Import a module of a framework. Raises RuntimeError if the framework has no such module."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and not name.startswith(error.name):
            raise  # a dependency of the framework is missing
        raise RuntimeError(
            f"{package.__name__} {version_of(package)} has no module {name}, which async_ckpt needs; install a version "
            "that its page in docs/ lists as tested"
        ) from error


def require_names(package: ModuleType, owner: Any, names: Iterable[str]) -> None:
    """Raise RuntimeError if an object of a framework lacks names that a plug-in uses, some of them private.

    Called when a plug-in is constructed, so that the error does not come up in the middle of a training.
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
