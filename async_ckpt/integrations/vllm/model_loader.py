"""The load format `async_ckpt`: a vLLM engine starts with weights of this library, from any place.

In: vLLM's load configuration. Out: a model with weights. Knows nothing of: the format in which the weights are stored.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from importlib import import_module
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch

from ..common.framework_checks import require
from ..common.stored_weights import Item, StoredWeights
from .loaded_tensors import HandedOn

_loaders: Final[Any] = import_module("vllm.model_executor.model_loader")
_OF_VLLM: Final = "enable_weights_track"
"""The only option of vLLM's loader that this loader uses: whether a parameter without a weight is an error."""
# The name of each engine's model when it was first loaded. A reload may name other weights.
_FIRST_NAMES: Final[WeakKeyDictionary[torch.nn.Module, str]] = WeakKeyDictionary()


class StoredModelLoader(_loaders.DefaultModelLoader):  # type: ignore[misc]
    """vLLM's loader of models, with the weights of an archive, a step, a run, an export or a published version.

    `model_loader_extra_config` has the arguments of `StoredWeights`; `path` is by default the model itself, and
    `folder` vLLM's `download_dir`. The config and the tokenizer come from the model, as for every load format. If a
    request to reload weights names a place, that place is used instead of `path`.
    """

    def __init__(self, load_config: Any) -> None:
        require("vllm")
        given = dict(load_config.model_loader_extra_config)
        own = {key: given.pop(key) for key in [_OF_VLLM] if key in given}
        super().__init__(dataclasses.replace(load_config, model_loader_extra_config=own))
        self._given = given
        self._handed_on = HandedOn()

    def weights(self, model_config: Any) -> StoredWeights:
        """The place of the weights. Raises ValueError for keys that `StoredWeights` does not know."""
        path = getattr(model_config, "model_weights", "") or model_config.model
        return StoredWeights.of(self._given, path=path, folder=self.load_config.download_dir)

    def _reloaded(self, model_config: Any, model: torch.nn.Module) -> StoredWeights:
        """The place of the weights that a running engine reloads."""
        name = model_config.model
        if _FIRST_NAMES.get(model, name) == name:
            return self.weights(model_config)
        return StoredWeights(name, folder=self._given.get("folder", self.load_config.download_dir))

    def download_model(self, model_config: Any) -> None:
        """Check that the weights exist; nothing is downloaded. Raises NotCommittedError."""
        self.weights(model_config).check()

    def get_all_weights(self, model_config: Any, model: Any) -> Iterator[Item]:
        """Names and tensors. Raises the errors of `StoredWeights.tensors`, and ValueError for `secondary_weights`."""
        if tuple(getattr(model, "secondary_weights", ())):
            raise ValueError(
                f"{type(model).__name__} also takes weights of a second model, which this load format does not have; "
                "use vLLM's own load format with a folder of export_hf"
            )
        return self._handed_on.each(self._reloaded(model_config, model).tensors())

    def load_weights(self, model: Any, model_config: Any) -> None:
        """Fill the model. Raises StateMismatchError if the weights do not fit it."""
        self._handed_on = HandedOn()
        weights = self.weights(model_config)
        weights.check()
        with self._handed_on.into(model, weights):
            super().load_weights(model, model_config)
        _FIRST_NAMES[model] = model_config.model
