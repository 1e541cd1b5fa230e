"""The registration of this package with vLLM.

In: vLLM, as it is installed. Out: entries in its registries, or an error that names what has moved. Knows nothing of:
weights.
"""

from __future__ import annotations

import warnings
from functools import cache
from importlib import import_module
from typing import Final

from ..common.framework_checks import require, require_module, require_names

NAME: Final = "async_ckpt"

_HERE: Final = __name__.rpartition(".")[0]
_TRANSFER: Final = "vllm.distributed.weight_transfer"
_LOADERS: Final = "vllm.model_executor.model_loader"
# The names that are used here, by module and class. The empty class is the module itself.
_USED: Final[dict[str, dict[str, tuple[str, ...]]]] = {
    _TRANSFER: {
        "": ("WeightSource", "ParamMeta", "Shard", "Replicate"),
        "WeightTransferEngineFactory": ("register_engine",),
        "WeightTransferTrainerFactory": ("register_engine", "trainer_init"),
        "WeightTransferEngine": ("parse_update_info", "receive_weights", "init_transfer_engine"),
        "TrainerWeightTransferEngine": ("trainer_init", "send_weights"),
    },
    f"{_TRANSFER}.base": {"": ("TrainerInitInfo", "WeightTransferInitInfo", "WeightTransferUpdateInfo")},
    _LOADERS: {"": ("register_model_loader",), "DefaultModelLoader": ("get_all_weights", "load_weights")},
    f"{_LOADERS}.reload": {"": ("initialize_layerwise_reload", "finalize_layerwise_reload")},
    f"{_LOADERS}.reload.layerwise": {"": ("get_layerwise_info",)},
    f"{_LOADERS}.mtp_validation": {"": ("disable_mtp_completeness_check",)},
}


@cache
def register() -> None:
    """Register the transfer engines and the model loader with vLLM, as "async_ckpt". May be called again.

        async_ckpt.integrations.vllm.register()

    vLLM calls this itself, in each of its processes, if async_ckpt is installed as a package. A training calls it
    before it creates a transfer engine.

    Raises ImportError if vLLM is not installed, and RuntimeError if it lacks a name that is used here.
    """
    package = require("vllm")
    for name, classes in _USED.items():
        module = require_module(package, name)
        for of_class, names in classes.items():
            if of_class:
                require_names(package, module, [of_class])
            require_names(package, getattr(module, of_class) if of_class else module, names)
    transfer, loaders = import_module(_TRANSFER), import_module(_LOADERS)
    engines = f"{_HERE}.weight_transfer"
    transfer.WeightTransferEngineFactory.register_engine(NAME, engines, "StoredWeightsEngine")
    transfer.WeightTransferTrainerFactory.register_engine(NAME, engines, "SnapshotSender")
    loaders.register_model_loader(NAME)(import_module(f"{_HERE}.model_loader").StoredModelLoader)


def plugin() -> None:
    """Call `register`, with errors as warnings: vLLM calls this in all of its processes, used or not."""
    try:
        register()
    except Exception as error:  # an engine that does not use async_ckpt must start
        warnings.warn(f"async_ckpt is not registered with vLLM: {error}", RuntimeWarning, stacklevel=2)
