"""The names by which vLLM finds what is here.

In: vLLM, as it is installed. Out: entries in its registries, or an error that says what has moved. Knows nothing of:
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
# By module, and in it by class: the names that are used here.
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
    """Name the transfer engines and the model loader to vLLM, as "async_ckpt". May be called again.

        async_ckpt.integrations.vllm.register()

    vLLM does it itself, in each of its processes, where async_ckpt is installed as a package. A training calls it
    before it makes a transfer engine.

    Raises ImportError if vLLM is not installed, and RuntimeError if it lacks what is used here, by its name.
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
    """`register` for vLLM, which calls it in all of its processes, also where nobody uses it: an error is a warning."""
    try:
        register()
    except Exception as error:  # an engine that needs none of this must start
        warnings.warn(f"async_ckpt is not registered with vLLM: {error}", RuntimeWarning, stacklevel=2)
