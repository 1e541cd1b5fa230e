"""Tensors on their way into an engine's model, and what the model says to those that are not its own.

In: names and tensors, and a model. Out: the same, or an error that names the tensor. Knows nothing of: where they
lie.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ...errors import StateMismatchError
from ..common.stored_weights import Item


class HandedOn:
    """The items of one load, which it hands on one by one."""

    def __init__(self) -> None:
        self._last = ""
        self._failed: BaseException | None = None  # the error of the source, which is no one else's

    def each(self, items: Iterable[Item]) -> Iterator[Item]:
        """These items. The model is not to blame for their errors."""
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
        """The block in which a model takes the items. Raises StateMismatchError for one that it refuses."""
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
