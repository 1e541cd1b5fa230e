"""Tensors that an engine's model loads, and the model's errors for tensors that do not fit.

In: names and tensors, and a model. Out: the same names and tensors, or an error that names the tensor. Knows nothing
of: where the tensors are stored.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ...errors import StateMismatchError
from ..common.stored_weights import Item


class HandedOn:
    """The items of one load, passed to the model one by one."""

    def __init__(self) -> None:
        self._last = ""
        self._failed: BaseException | None = None  # the error of the source, which is not the model's

    def each(self, items: Iterable[Item]) -> Iterator[Item]:
        """Yield these items. Errors of the iterable are not attributed to the model."""
        try:
            for self._last, tensor in items:
                yield self._last, tensor
        except GeneratorExit:
            raise
        except BaseException as error:
            self._failed = error
            raise

    @contextmanager
    def into(self, model: Any, source: object) -> Iterator[None]:
        """The block in which a model loads the items. Raises StateMismatchError if the model refuses one."""
        try:
            yield
        except (torch.OutOfMemoryError, OSError):
            raise
        except Exception as error:
            if error is self._failed:
                raise
            at = f" at or after {self._last!a:.200}" if self._last else ""
            raise StateMismatchError(
                f"{source}: {type(model).__name__} refuses these weights{at}: {type(error).__name__}: {error}; load "
                "weights of the model that the engine has, by the names that export_hf writes",
                mismatched=(self._last,) if self._last else (),
            ) from error
