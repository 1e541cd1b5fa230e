"""Calls to the workers of SkyRL about a save that is under way.

In: a dispatch, and the name of a model. Out: the state of its workers' saves, and their errors. Knows nothing of: the
files.

The dispatch of SkyRL 0.3 has no such calls. They go to the workers, which have them if they save in the background.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any


class WorkerCalls:
    """Calls to the workers of a dispatch about their saves. Workers without such methods write during the call."""

    def __init__(self, dispatch: Any) -> None:
        self._dispatch = dispatch

    def have_pending_save(self, model: str) -> bool:
        """True if a worker of this model is still saving. Does not wait for the save."""
        return any(self._of_each(model, "has_pending_save"))

    def finalize(self, model: str, model_id: str | None = None) -> None:
        """Wait until the files of this model are complete and durable. Raises the error of its save."""
        method = with_model_id(self._dispatch, "finalize_pending_saves")
        if method is not None:
            method(model=model, model_id=model_id)
        else:
            self._of_each(model, "finalize_pending_saves")

    def _of_each(self, model: str, name: str) -> list[Any]:
        """The results of a method from each worker of a model; empty if the workers have no such method."""
        group = getattr(self._dispatch, "_actor_groups", {}).get(model)
        if group is None or not hasattr(group._actor_handlers[0], name):
            return []
        results: list[Any] = importlib.import_module("ray").get(group.async_run_ray_method("pass_through", name))
        return results


def with_model_id(dispatch: Any, name: str) -> Callable[..., Any] | None:
    """A method of the dispatch, wrapped if necessary to accept a `model_id`; None if the dispatch has none."""
    method: Callable[..., Any] | None = getattr(dispatch, name, None)
    if method is None:
        return None
    parameters = inspect.signature(method).parameters.values()
    if any(p.name == "model_id" or p.kind is p.VAR_KEYWORD for p in parameters):
        return method

    def without_id(*, model_id: str | None, **arguments: Any) -> Any:  # noqa: ARG001
        return method(**arguments)

    return without_id
