"""Refuses models whose weights in memory are not what an engine would load.

In: a model, and its weights as they would be written. Out: nothing, or an error that names the method of the model.
Knows nothing of: files, versions. Imports neither transformers nor PEFT: it inspects attributes of their models.

Most quantisers of transformers repack weights for their kernels, so the state dict differs from the checkpoint.
"""

from __future__ import annotations

import json
import re
from typing import Any, Final

import torch

from ..errors import UnsupportedStateError
from ..plumbing import captured, hf_weights

_MAPPING: Final = "publish a mapping of the names and tensors that the engine loads"
# The quantisation methods whose state dict has the same names and values as their checkpoints.
_SAME_IN_MEMORY: Final = frozenset({"fp8", "compressed-tensors", "bitsandbytes"})
# Weights of these dtypes need scales. Depending on the method, the scale of a `weight` has one of these names.
_NEEDS_SCALE: Final = frozenset({torch.float8_e4m3fn, torch.float8_e5m2})
_SCALES: Final = ("{0}_scale_inv", "{0}_scale", "{1}.scale", "{1}.qscale_weight")
# Initialisations of adapters by which PEFT changes the base weights in memory.
_CHANGES_BASE: Final = re.compile(r"pissa|olora|corda|loftq|lora_ga")


def refuse_unreadable(given: Any, weights: hf_weights.Weights) -> None:
    """Raises UnsupportedStateError for a model, or one in a snapshot, that an engine would load with other weights."""
    live = captured.module_of(given) if isinstance(given, captured.SnapshotView) else given
    if not isinstance(live, torch.nn.Module):
        return  # the names of a mapping are the user's
    why = _of_adapter(weights) if weights.adapter else _of_quantised(live, weights)
    if why is not None:
        raise UnsupportedStateError(f"this model cannot be published: {why}", path="")


def _of_adapter(weights: hf_weights.Weights) -> str | None:
    how = json.loads(weights.files.get(hf_weights.ADAPTER_CONFIG, b"{}")).get("init_lora_weights")
    if not isinstance(how, str) or not _CHANGES_BASE.match(how.lower()):
        return None
    return (
        f"its adapter began with init_lora_weights={how!r}, by which PEFT changes the base in memory, and an engine "
        "with the base as it was would compute something else; publish the merged model, or, if the engine has the "
        "changed base, get_peft_model_state_dict(model) with the adapter's config_folder"
    )


def _of_quantised(model: torch.nn.Module, weights: hf_weights.Weights) -> str | None:
    parts = list(model.modules())
    quantisers = [part.hf_quantizer for part in parts if getattr(part, "hf_quantizer", None) is not None]
    for quantiser in quantisers:
        method = getattr(getattr(quantiser, "quantization_config", None), "quant_method", None)
        method = getattr(method, "value", method)
        if method not in _SAME_IN_MEMORY or not _is_serializable(quantiser):
            return (
                f"it is quantised by {method or type(quantiser).__qualname__}, so its tensors in memory are not those "
                f"of its checkpoints; {_MAPPING}"
            )
    if any(getattr(getattr(part, "quantization_status", None), "value", None) == "decompressed" for part in parts):
        return f"it is quantised, and its first forward pass has decompressed its weights; {_MAPPING}"
    lost = _without_scale(weights) if quantisers else None
    if lost is not None:
        return (
            f"it is quantised, and the scale of {lost!a} has no name in its checkpoints, since the model does not know "
            f"which it was loaded from; load it with from_pretrained, or {_MAPPING}"
        )
    return None


def _is_serializable(quantiser: Any) -> bool:
    answer = getattr(quantiser, "is_serializable", False)
    return bool(answer() if callable(answer) else answer)


def _without_scale(weights: hf_weights.Weights) -> str | None:
    """The checkpoint name of the first FP8 weight without a scale; None if each has one."""
    published = weights.described()
    for name, tensor in published.items():
        scales = (scale.format(name, name.rpartition(".")[0]) for scale in _SCALES)
        if tensor.dtype in _NEEDS_SCALE and not any(scale in published for scale in scales):
            return name
    return None
