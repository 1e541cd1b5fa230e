"""Weights as the Hugging Face ecosystem knows them: their names, and the files that are made from the model.

In: a model, or its state dict. Out: tensors by the names that `from_pretrained` looks for, each once.
Knows nothing of: where they go; and imports neither transformers nor PEFT, whose models are asked for what they have.
"""

from __future__ import annotations

import json
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from typing import Any, Final, NamedTuple

import torch

from ..backends import has_plain_bytes
from ..errors import UnsupportedStateError
from ..slicing.sharded import is_of_fsdp1, local_part
from ..spec import DTYPES, with_article
from ..state.capture import why_not
from ..state.captured import SnapshotView, module_of, tree_of
from ..state.dtypes import dtype_name
from ..state.wrappers import look_wrapped, plain_model, plain_state_dict

CONFIG: Final = "config.json"
ADAPTER_CONFIG: Final = "adapter_config.json"
Tensors = dict[str, torch.Tensor]

# What PEFT files begin with, whichever way the adapter was added to the model.
_ADAPTER_PREFIX: Final = "base_model.model."
# PEFT's parameters in memory: the kind, the name of the adapter, and what its files keep of the rest.
_OF_ADAPTER: Final = re.compile(
    r"\.(?P<kind>lora_\w+|trainable_tokens_delta|modules_to_save)\.(?P<adapter>[^.]+)(?P<rest>\..+)?$"
)
# Where a safetensors file has what is no tensor.
_RESERVED: Final = "__metadata__"
# What PEFT calls embeddings: a LoRA layer around one of these is saved with the layer that it is around.
_EMBEDDINGS: Final = frozenset({"embed_tokens", "lm_head"})
# In files the adapter has no name, so that one of these follows at once.
_LEAVES: Final = frozenset({"weight", "bias"})


class Weights(NamedTuple):
    """The content of a folder: tensors by name, names tied to others, and small files made from the model."""

    stem: str
    tensors: Tensors
    tied: dict[str, str]
    files: dict[str, bytes]
    # Of a copy of `tensors`, what published checkpoints call and cut otherwise.
    as_published: Callable[[Tensors], Tensors]

    @property
    def last(self) -> str:
        """The file without which nothing takes the others for a model."""
        return CONFIG if self.stem == "model" else ADAPTER_CONFIG

    def is_own(self, path: str) -> bool:
        """Whether a file of this name holds such weights, of this export or an earlier one."""
        if self.stem == "model":
            return re.fullmatch(r"model(-\d+-of-\d+)?\.safetensors(\.index\.json)?", path) is not None
        return path == "adapter_model.safetensors"


def weights_of(given: Any, beside: Mapping[str, bytes]) -> Weights:
    """The content to write for a model or state dict, with the files that the user puts beside it.

    Raises UnsupportedStateError for anything but plain tensors of dtypes that safetensors knows.
    """
    live, named = given, given
    if isinstance(given, SnapshotView):
        live, named = module_of(given), tree_of(given)
        if not isinstance(named, Mapping):
            raise UnsupportedStateError(
                f"{given!r} cannot be exported; give the part that is a model", path=""
            )
    model: Any = plain_model(live) if isinstance(live, torch.nn.Module) else None
    tensors = _tensors_of(named)
    if model is None and look_wrapped(tensors):
        name = next(iter(tensors))
        warnings.warn(
            f"names such as {name!a} are written as they are, and look like those of a wrapped model, which "
            "`from_pretrained` does not load; export the model itself, whose names are then those of the plain model, or rename them",
            RuntimeWarning,
            stacklevel=3,
        )
    ignored = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    tensors = {name: tensor for name, tensor in tensors.items() if name not in ignored}
    if getattr(model, "peft_config", None) or ADAPTER_CONFIG in beside:
        weights = _adapter_of(model, tensors, beside)
    else:
        kept, tied = _without_tied(tensors, _tied_by_loading(model))
        weights = Weights("model", kept, tied, _configs_of(model), lambda copy: _as_published(model, copy))
    for name, tensor in weights.tensors.items():
        _check(name, tensor)
    if not weights.tensors:
        raise UnsupportedStateError("there are no weights to export", path="")
    return weights._replace(tensors={name: tensor.detach() for name, tensor in weights.tensors.items()})


def json_bytes(value: Any) -> bytes:
    """JSON as transformers and PEFT write it."""
    return (json.dumps(value, indent=2, sort_keys=True, default=_plain) + "\n").encode()


# --- any model ----------------------------------------------------------------------------------------------------


def _tensors_of(given: Any) -> Tensors:
    """The tensors of a model by their names in the plain one, and those of a mapping by their names there."""
    if isinstance(given, torch.nn.Module):
        named = plain_state_dict(given)
    elif isinstance(given, Mapping):
        named = given
    elif hasattr(given, "state_dict"):
        named = given.state_dict()
    else:
        raise UnsupportedStateError(
            f"{with_article(type(given).__qualname__)} cannot be exported; give a model, or a flat mapping of names to tensors",
            path="",
        )
    for name, value in named.items():
        if not isinstance(name, str) or not isinstance(value, torch.Tensor):
            raise UnsupportedStateError(
                f"{name!r:.200} is {with_article(type(value).__qualname__)}; give a model, or a flat mapping of names to tensors "
                'such as state["model"]',
                path=str(name),
            )
        if is_of_fsdp1(value):
            raise UnsupportedStateError(
                f"{name!a} is a shard of FSDP1, and only whole tensors and DTensors have the names of a published model; use "
                "fully_shard (FSDP2), or give what FSDP1 gathers on rank 0: StateDictType.FULL_STATE_DICT with rank0_only",
                path=name,
            )
    return dict(named)


def _tied_by_loading(model: Any) -> frozenset[str] | None:
    """The names that `from_pretrained` ties to others by itself; None where nobody can tell."""
    for attribute in ("all_tied_weights_keys", "_tied_weights_keys"):  # transformers 5, and 4
        names = getattr(model, attribute, None)
        if names is not None:
            return frozenset(names)
    return None


def _without_tied(tensors: Tensors, tied: frozenset[str] | None) -> tuple[Tensors, dict[str, str]]:
    """One of all tensors with the very same memory; and the names of the others, each with that of the one.

    What shares memory though the model does not say so is written under every name, since nothing would tie it again.
    """
    groups: dict[Any, list[str]] = {}
    for name, tensor in tensors.items():
        here = local_part(tensor)  # of what is spread over ranks
        key = (
            (here.device, here.data_ptr(), here.dtype, tensor.shape, here.stride())
            if why_not(here) is None and here.numel()
            else name
        )
        groups.setdefault(key, []).append(name)
    left_out = {}
    for names in groups.values():
        kept = next((name for name in names if tied is None or name not in tied), names[0])
        left_out.update({name: kept for name in names if name != kept and (tied is None or name in tied)})
    return {name: tensor for name, tensor in tensors.items() if name not in left_out}, left_out


def _configs_of(model: Any) -> dict[str, bytes]:
    """The files that `save_pretrained` writes beside the weights, of a model that knows its own config."""
    files = {}
    config: Any = getattr(model, "config", None)
    if hasattr(config, "to_json_string"):
        told = json.loads(config.to_json_string())
        told["architectures"] = [_class_name(model)]
        if isinstance(dtype := getattr(model, "dtype", None), torch.dtype):
            told["torch_dtype" if "torch_dtype" in told else "dtype"] = dtype_name(dtype)
        files[CONFIG] = json_bytes(told)
    generation: Any = getattr(model, "generation_config", None)
    if hasattr(generation, "to_json_string"):
        told = json.loads(generation.to_json_string())
        told.pop("compile_config", None)  # of this run
        files["generation_config.json"] = json_bytes(told)
    return files


def _class_name(model: Any) -> str:
    """That of its own class: fully_shard gives a model another one, made of this and of `FSDPModule`."""
    return next(
        kind.__name__
        for kind in type(model).__mro__
        if not any(base.__name__ == "FSDPModule" for base in kind.__mro__)
    )


def _as_published(model: Any, tensors: Tensors) -> Tensors:
    """Some models of transformers 5 keep their weights otherwise than their checkpoints do, such as experts in one.

    `from_pretrained` reads both; other readers know only what is published. Its own way back is used.
    """
    loading = sys.modules.get("transformers.core_model_loading")
    if not hasattr(loading, "revert_weight_conversion") or not hasattr(model, "all_tied_weights_keys"):
        return tensors
    published: Tensors = loading.revert_weight_conversion(model, tensors)  # type: ignore[union-attr]
    return published


def _check(name: str, tensor: torch.Tensor) -> None:
    why = why_not(tensor := local_part(tensor))
    if why is None and DTYPES[dtype_name(tensor.dtype)][1] is None:
        why = f"safetensors does not know {tensor.dtype}; convert it first"
    if why is None and not has_plain_bytes(tensor):
        why = f"it is on {tensor.device}; move it to the CPU first"
    if why is None and (name == _RESERVED or not _is_text(name)):
        why = "safetensors takes no such name; rename it"
    if why is not None:
        raise UnsupportedStateError(f"{name!a}: {why}; nothing was written", path=name)


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


# --- adapters -----------------------------------------------------------------------------------------------------


def _adapter_of(model: Any, tensors: Tensors, beside: Mapping[str, bytes]) -> Weights:
    """LoRA weights, under the names that PEFT's files have."""
    files: dict[str, bytes] = {}
    adapters = getattr(model, "peft_config", None)
    if adapters:
        adapter: str | None = _active(model, adapters)
        files[ADAPTER_CONFIG] = json_bytes({**adapters[adapter].to_dict(), "inference_mode": True})
    else:
        adapter = _only_adapter(tensors)
    config = json.loads(beside.get(ADAPTER_CONFIG) or files[ADAPTER_CONFIG])
    if config.get("peft_type") != "LORA":
        raise UnsupportedStateError(
            f"an adapter of the type {config.get('peft_type')} cannot be exported, only LORA; "
            "use wrap(model.save_pretrained)",
            path=ADAPTER_CONFIG,
        )
    if not any(".lora_" in name for name in tensors):
        raise UnsupportedStateError(
            f"there is an {ADAPTER_CONFIG}, but the weights are no LoRA's; give a config_folder without it",
            path=ADAPTER_CONFIG,
        )
    found = tensors if adapter is None else _adapter_only(tensors, adapter, config)
    named = {_ADAPTER_PREFIX + name.removeprefix(_ADAPTER_PREFIX): tensor for name, tensor in found.items()}
    return Weights("adapter_model", named, {}, files, lambda copy: copy)


def _active(model: Any, adapters: Iterable[str]) -> str:
    """The adapter that is in use, or the only one."""
    active = getattr(model, "active_adapters", None) or getattr(model, "active_adapter", None)
    if callable(active):
        active = active()
    names = [active] if isinstance(active, str) else list(active or adapters)
    if len(names) != 1:
        raise UnsupportedStateError(
            f"the model has several adapters ({', '.join(names)}); choose one: model.set_adapter(name)",
            path="",
        )
    return str(names[0])


def _only_adapter(tensors: Tensors) -> str | None:
    """The one whose parameters these are by their names in memory; None when they have their names in files."""
    matches = [_OF_ADAPTER.search(name) for name in tensors]
    names = sorted({match["adapter"] for match in matches if match} - _LEAVES)
    if len(names) > 1:
        raise UnsupportedStateError(
            f"these are the weights of several adapters ({', '.join(names)}); give the model, or one's alone",
            path="",
        )
    return names[0] if names else None


def _adapter_only(tensors: Tensors, adapter: str, config: Mapping[str, Any]) -> Tensors:
    """The tensors that PEFT's `get_peft_model_state_dict` selects, under the names that it gives."""
    bias = config.get("bias", "none")
    found: Tensors = {}
    layers = set()
    # A head that is tied to the embeddings shares their trained tokens, too, and only the embeddings' are saved.
    deltas = {name: tensor for name, tensor in tensors.items() if ".trainable_tokens_delta." in name}
    tied = _without_tied(deltas, None)[1]
    tensors = {name: tensor for name, tensor in tensors.items() if name not in tied}
    for name, tensor in tensors.items():
        match = _OF_ADAPTER.search(name)
        if match is not None and match["adapter"] == adapter:
            layers.add(name[: match.start()])
            found[_name_in_file(name, match)] = tensor
    embeddings = set()
    if config.get("trainable_token_indices") is None:  # which are there to save space
        embeddings = {f"{layer}.base_layer" for layer in layers if layer.rpartition(".")[2] in _EMBEDDINGS}
    for name, tensor in tensors.items():
        layer, _, leaf = name.rpartition(".")
        if layer in embeddings:
            found[name] = tensor
        trained = bias == "all" or (bias == "lora_only" and layer.removesuffix(".base_layer") in layers)
        if (
            trained
            and leaf == "bias"
            and _OF_ADAPTER.search(name) is None
            and ".original_module." not in name
        ):
            found[name] = tensor
    return found


def _name_in_file(name: str, match: re.Match[str]) -> str:
    """Without the name of the adapter; a module that is trained whole has its place's name."""
    layer, kind, rest = name[: match.start()], match["kind"], match["rest"] or ""
    if kind == "modules_to_save":
        return layer + rest
    if kind == "lora_magnitude_vector":
        rest = ""  # a parameter once, a module with one now
    return f"{layer}.{kind}{rest}"


def _plain(value: Any) -> Any:
    """Values in configs that JSON has not, as JSON."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, set | frozenset):
        return sorted(value, key=str)
    if isinstance(value, torch.dtype):
        return dtype_name(value)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if hasattr(value, "to_dict"):
        return value.to_dict()
    raise UnsupportedStateError(
        f"the config contains {with_article(type(value).__qualname__)}, which JSON cannot represent; give a config_folder with one that is right",
        path="",
    )
