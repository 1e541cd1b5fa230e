"""Weights by their Hugging Face names, and the small files beside the weights of a model.

In: a model, or its state dict. Out: tensors by the names that `from_pretrained` looks for, each once.
Knows nothing of: files and folders. Imports neither transformers nor PEFT; it inspects their models.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import torch

from ...core.backends import has_plain_bytes
from ...core.fields import is_unicode
from ...core.format.safetensors import held_as
from ...core.slicing.sharded import is_of_fsdp1, is_sharded, local_part
from ...core.spec import with_article
from ...core.state.capture import why_not
from ...core.state.captured import SnapshotView, module_of, tree_of
from ...core.state.names import dtype_name
from ...core.state.plain import method_of
from ...core.state.wrappers import look_wrapped, plain_model, plain_state_dict
from ...core.storage.disk import refuse_dangling
from ...errors import NotAFolderError, UnsupportedStateError

CONFIG: Final = "config.json"
ADAPTER_CONFIG: Final = "adapter_config.json"
ADAPTER_FILE: Final = "adapter_model.safetensors"
Tensors = dict[str, torch.Tensor]

# The prefix of names in PEFT's files, however the adapter was added to the model.
_ADAPTER_PREFIX: Final = "base_model.model."
# The names of PEFT's parameters in memory: the kind, the adapter (not in the names of its files), and the rest.
_OF_ADAPTER: Final = re.compile(
    r"\.(?P<kind>lora_\w+|trainable_tokens_delta|modules_to_save)\.(?P<adapter>[^.]+)(?P<rest>\..+)?$"
)
# The key of a safetensors header that is not a tensor.
_RESERVED: Final = "__metadata__"
# Modules that PEFT treats as embeddings: if a LoRA layer wraps one, the wrapped layer is saved, too.
_EMBEDDINGS: Final = frozenset({"embed_tokens", "lm_head"})
# The names in files lack the adapter, so that one of these follows the kind directly.
_LEAVES: Final = frozenset({"weight", "bias"})
# The first matrix of a LoRA layer in PEFT's files, whose rows are the rank.
_FIRST_MATRIX: Final = re.compile(r"\.(lora_A\.weight|lora_embedding_A)$")
# The fields of an adapter's config on which the meaning of its tensors depends: its base model, and its settings.
OF_BASE: Final = ("base_model_name_or_path", "revision")
_SETTINGS: Final = (
    *OF_BASE,
    "peft_type",
    "r",
    "lora_alpha",
    "rank_pattern",
    "alpha_pattern",
    "use_rslora",
    "use_dora",
    "use_bdlora",
    "use_qalora",
    "qalora_group_size",
    "fan_in_fan_out",
    "layer_replication",
    "alora_invocation_tokens",
    "trainable_token_indices",
)


class Weights(NamedTuple):
    """The content of a model's folder: tensors by name, names tied to others, and small files made from the model."""

    stem: str
    tensors: Tensors
    tied: dict[str, str]
    files: dict[str, bytes]
    # Converts a copy of `tensors` to the names and shapes of published checkpoints.
    as_published: Callable[[Tensors], Tensors]
    # The fields of an adapter's config on which the meaning of its tensors depends, as JSON; empty for a model.
    adapter: Mapping[str, str] = MappingProxyType({})

    def described(self) -> Tensors:
        """The tensors as in published checkpoints, on the meta device: only names, dtypes and shapes."""
        empty = {
            name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for name, tensor in self.tensors.items()
        }
        return self.as_published(empty)

    def refuse_converted(self) -> None:
        """Raises UnsupportedStateError if checkpoints of this sharded model have other tensors than its memory."""
        if self.described().keys() != self.tensors.keys():
            raise UnsupportedStateError(
                "this model is sharded, and its tensors in memory differ from those in its checkpoints; use export_hf "
                "instead",
                path="",
            )

    @staticmethod
    def looks_whole(given: Any) -> bool:
        """True for a model of whole tensors, which a rank may export alone. False also for a value that is no model."""
        with contextlib.suppress(Exception):
            named = tree_of(given) if isinstance(given, SnapshotView) else given
            tensors = list(named.parameters() if isinstance(named, torch.nn.Module) else named.values())
            return bool(tensors) and not any(map(is_sharded, tensors))
        return False

    @property
    def is_spread(self) -> bool:
        """True if any tensor is sharded over ranks."""
        return any(map(is_sharded, self.tensors.values()))

    @property
    def last(self) -> str:
        """The file that is written last: without it, nothing loads the others."""
        return CONFIG if self.stem == "model" else ADAPTER_CONFIG

    def is_own(self, path: str) -> bool:
        """True if a file of this name contains such weights, from this export or an earlier one."""
        if self.stem == "model":
            return re.fullmatch(r"model(-\d+-of-\d+)?\.safetensors(\.index\.json)?", path) is not None
        return path == ADAPTER_FILE


def weights_of(given: Any, config_files: Mapping[str, bytes]) -> Weights:
    """The content to write for a model or state dict. `config_files` are the user's files beside it.

    Raises UnsupportedStateError for values other than plain tensors of dtypes that safetensors knows.
    """
    live, named = given, given
    if isinstance(given, SnapshotView):
        live, named = module_of(given), tree_of(given)
        if not isinstance(named, Mapping):
            raise UnsupportedStateError(f"{given!r} cannot be exported; give the part that is a model", path="")
    model: Any = plain_model(live) if isinstance(live, torch.nn.Module) else None
    tensors = _tensors_of(named)
    if model is None and look_wrapped(tensors):
        name = next(iter(tensors))
        warnings.warn(
            f"names such as {name!a} are written as they are, but `from_pretrained` does not load such names of a "
            "wrapped model; export the model itself, or rename the weights",
            RuntimeWarning,
            stacklevel=3,
        )
    ignored = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    tensors = {name: tensor for name, tensor in tensors.items() if name not in ignored}
    if getattr(model, "peft_config", None) or ADAPTER_CONFIG in config_files:
        weights = _adapter_of(model, tensors, config_files)
    else:
        kept, tied = _without_tied(tensors, _tied_by_loading(model))
        weights = Weights("model", kept, tied, _configs_of(model), lambda copy: _as_published(model, copy))
    for name, tensor in weights.tensors.items():
        _check(name, tensor)
    if not weights.tensors:
        raise UnsupportedStateError("the model has no weights", path="")
    return weights._replace(tensors={name: tensor.detach() for name, tensor in weights.tensors.items()})


def json_bytes(value: Any) -> bytes:
    """JSON as transformers and PEFT write it."""
    return (json.dumps(value, indent=2, sort_keys=True, default=_plain) + "\n").encode()


# --- any model ----------------------------------------------------------------------------------------------------


def _tensors_of(given: Any) -> Tensors:
    """The tensors of a model, by their names in the plain model, or those of a mapping."""
    if isinstance(given, torch.nn.Module):
        named = plain_state_dict(given)
    elif isinstance(given, Mapping):
        named = given
    elif method_of(given, "state_dict") is not None:
        named = given.state_dict()
    else:
        raise UnsupportedStateError(
            f"{with_article(type(given).__qualname__)} cannot be exported; give a model, or a flat mapping of "
            "names to tensors",
            path="",
        )
    for name, value in named.items():
        if not isinstance(name, str) or not isinstance(value, torch.Tensor):
            raise UnsupportedStateError(
                f"{name!r:.200} is {with_article(type(value).__qualname__)}; give a model, or a flat mapping of "
                'names to tensors such as state["model"]',
                path=str(name),
            )
        if is_of_fsdp1(value):
            raise UnsupportedStateError(
                f"{name!a} is a shard of FSDP1, but only whole tensors and DTensors have the names of a published "
                "model; use fully_shard (FSDP2), or pass the state dict that FSDP1 gathers on rank 0 by "
                "StateDictType.FULL_STATE_DICT with rank0_only",
                path=name,
            )
    return dict(named)


def _tied_by_loading(model: Any) -> frozenset[str] | None:
    """The names that `from_pretrained` ties to others by itself; None if the model does not list them."""
    for attribute in ("all_tied_weights_keys", "_tied_weights_keys"):  # transformers 5, and 4
        names = getattr(model, attribute, None)
        if names is not None:
            return frozenset(names)
    return None


def _without_tied(tensors: Tensors, tied: frozenset[str] | None) -> tuple[Tensors, dict[str, str]]:
    """The tensors without tied ones, and a mapping from each dropped name to the name that is kept.

    If a model lists its tied names, other tensors that share memory are written under every name, since nothing would
    tie them again.
    """
    groups: dict[Any, list[str]] = {}
    for name, tensor in tensors.items():
        local = local_part(tensor)  # this rank's part of a sharded tensor
        key = (
            (local.device, local.data_ptr(), local.dtype, tensor.shape, local.stride())
            if why_not(local) is None and local.numel()
            else name
        )
        groups.setdefault(key, []).append(name)
    left_out = {}
    for names in groups.values():
        kept = next((name for name in names if tied is None or name not in tied), names[0])
        left_out.update({name: kept for name in names if name != kept and (tied is None or name in tied)})
    return {name: tensor for name, tensor in tensors.items() if name not in left_out}, left_out


def _configs_of(model: Any) -> dict[str, bytes]:
    """The files that `save_pretrained` writes beside the weights, for a model that has a config."""
    files = {}
    config: Any = getattr(model, "config", None)
    if hasattr(config, "to_json_string"):
        fields = json.loads(config.to_json_string())
        fields["architectures"] = [_class_name(model)]
        if isinstance(dtype := getattr(model, "dtype", None), torch.dtype):
            fields["torch_dtype" if "torch_dtype" in fields else "dtype"] = dtype_name(dtype)
        files[CONFIG] = json_bytes(fields)
    generation: Any = getattr(model, "generation_config", None)
    if hasattr(generation, "to_json_string"):
        fields = json.loads(generation.to_json_string())
        fields.pop("compile_config", None)  # concerns only this process
        files["generation_config.json"] = json_bytes(fields)
    return files


def _class_name(model: Any) -> str:
    """The name of the model's original class: fully_shard replaces it by one derived from it and `FSDPModule`."""
    return next(
        kind.__name__ for kind in type(model).__mro__ if not any(base.__name__ == "FSDPModule" for base in kind.__mro__)
    )


def _as_published(model: Any, tensors: Tensors) -> Tensors:
    """The tensors in the form of published checkpoints; transformers 5 merges some in memory, such as all experts.

    `from_pretrained` reads both forms, other programs only the published one. The model's own conversion is used.
    """
    loading = sys.modules.get("transformers.core_model_loading")
    if not hasattr(loading, "revert_weight_conversion") or not hasattr(model, "all_tied_weights_keys"):
        return tensors
    published: Tensors = loading.revert_weight_conversion(model, tensors)  # type: ignore[union-attr]
    return published


def _check(name: str, tensor: torch.Tensor) -> None:
    why = why_not(tensor := local_part(tensor))
    if why is None and held_as(dtype_name(tensor.dtype), tensor.shape) is None:
        why = f"safetensors does not know {tensor.dtype}; convert it first"
    if why is None and not has_plain_bytes(tensor):
        why = f"it is on {tensor.device}; move it to the CPU first"
    if why is None and (name == _RESERVED or not is_unicode(name)):
        why = "safetensors does not accept this name; rename it"
    if why is not None:
        raise UnsupportedStateError(f"{name!a}: {why}; nothing was written", path=name)


# --- adapters -----------------------------------------------------------------------------------------------------


def _adapter_of(model: Any, tensors: Tensors, config_files: Mapping[str, bytes]) -> Weights:
    """The weights of a LoRA adapter, under the names in PEFT's files."""
    files: dict[str, bytes] = {}
    adapters = getattr(model, "peft_config", None)
    if adapters:
        adapter: str | None = _active(model, adapters)
        files[ADAPTER_CONFIG] = json_bytes({**adapters[adapter].to_dict(), "inference_mode": True})
    else:
        adapter = _only_adapter(tensors)
    config = _config_in(config_files[ADAPTER_CONFIG] if ADAPTER_CONFIG in config_files else files[ADAPTER_CONFIG])
    if config.get("peft_type") != "LORA":
        raise UnsupportedStateError(
            f"an adapter of the type {config.get('peft_type')} cannot be exported, only LORA; "
            "use wrap(model.save_pretrained)",
            path=ADAPTER_CONFIG,
        )
    if not any(".lora_" in name for name in tensors):
        raise UnsupportedStateError(
            f"there is an {ADAPTER_CONFIG}, but the weights are not LoRA's; give a config_folder without it",
            path=ADAPTER_CONFIG,
        )
    selected = tensors if adapter is None else _adapter_only(tensors, adapter, config)
    named = {_ADAPTER_PREFIX + name.removeprefix(_ADAPTER_PREFIX): tensor for name, tensor in selected.items()}
    _refuse_other_config(named, config)
    return Weights("adapter_model", named, {}, files, lambda copy: copy, _settings_in(config))


def _config_in(data: bytes) -> dict[str, Any]:
    try:
        config = json.loads(data)
    except ValueError as error:
        raise UnsupportedStateError(
            f"{ADAPTER_CONFIG} is not JSON ({error}); pass a config_folder with the adapter's config",
            path=ADAPTER_CONFIG,
        ) from error
    if not isinstance(config, dict):
        raise UnsupportedStateError(
            f"{ADAPTER_CONFIG} is {with_article(type(config).__name__)}, not an object; pass a config_folder with the "
            "adapter's config",
            path=ADAPTER_CONFIG,
        )
    return config


def _settings_in(config: Mapping[str, Any]) -> dict[str, str]:
    """The fields on which the meaning of an adapter's tensors depends, as JSON; without empty ones."""
    given = {name: config[name] for name in _SETTINGS if config.get(name)}
    return {name: json.dumps(value, sort_keys=True, default=_plain) for name, value in given.items()}


def _refuse_other_config(tensors: Tensors, config: Mapping[str, Any]) -> None:
    """Raises UnsupportedStateError for tensors, named as in files, that cannot be those of the config."""
    for name, tensor in tensors.items():
        match = _FIRST_MATRIX.search(name)
        if match is None:
            continue
        second = name[: match.start()] + match[0].replace("_A", "_B")
        if second not in tensors:
            raise UnsupportedStateError(
                f"{name!a} comes without {second!a}; pass all weights of the adapter", path=name
            )
        why = _why_misfit(name[: match.start()].removeprefix(_ADAPTER_PREFIX), tensor, config)
        if why is not None:
            raise UnsupportedStateError(
                f"{name!a} has the shape {list(tensor.shape)}, and {why}; give the config of this adapter", path=name
            )


def _why_misfit(layer: str, first: torch.Tensor, config: Mapping[str, Any]) -> str | None:
    """The reason why the first matrix of a layer does not fit the config; None if it may fit."""
    if config.get("target_parameters") or config.get("use_bdlora"):
        return None  # these matrices cover several weights
    rank, targets = _rank_of(layer, config), config.get("target_modules")
    if rank is not None and first.shape[:1] != (rank,):
        return f"{ADAPTER_CONFIG} gives this layer the rank {rank}"
    if not isinstance(targets, list | set) or not targets or config.get("ensure_weight_tying"):
        return None  # a pattern, which only the base's names could resolve, or layers tied to named ones
    if any(f".{layer}".endswith(f".{target}") for target in targets):
        return None
    named = ", ".join(sorted(map(str, targets)))
    return f"the target_modules of its {ADAPTER_CONFIG} ({named:.200}) do not name its layer"


def _rank_of(layer: str, config: Mapping[str, Any]) -> int | None:
    """The rank of a layer by PEFT's rules; None if it is not in the config."""
    for pattern, rank in (config.get("rank_pattern") or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", layer):
            return int(rank)
    return config.get("r")


def _active(model: Any, adapters: Iterable[str]) -> str:
    """The active adapter, or the only one."""
    active = getattr(model, "active_adapters", None) or getattr(model, "active_adapter", None)
    if callable(active):
        active = active()
    names = [active] if isinstance(active, str) else list(active or adapters)
    if len(names) != 1:
        raise UnsupportedStateError(
            f"the model has several adapters ({', '.join(names)}); choose one: model.set_adapter(name)", path=""
        )
    return str(names[0])


def _only_adapter(tensors: Tensors) -> str | None:
    """The adapter that these names belong to, as PEFT names them in memory; None if they are named as in files."""
    matches = [_OF_ADAPTER.search(name) for name in tensors]
    names = sorted({match["adapter"] for match in matches if match} - _LEAVES)
    if len(names) > 1:
        raise UnsupportedStateError(
            f"these are the weights of several adapters ({', '.join(names)}); give the model, or the weights of one",
            path="",
        )
    return names[0] if names else None


def _adapter_only(tensors: Tensors, adapter: str, config: Mapping[str, Any]) -> Tensors:
    """The tensors that PEFT's `get_peft_model_state_dict` selects, under the names that it gives."""
    bias = config.get("bias", "none")
    selected: Tensors = {}
    layers = set()
    # A head tied to the embeddings also shares their trained tokens; only those of the embeddings are saved.
    deltas = {name: tensor for name, tensor in tensors.items() if ".trainable_tokens_delta." in name}
    tied = _without_tied(deltas, None)[1]
    tensors = {name: tensor for name, tensor in tensors.items() if name not in tied}
    for name, tensor in tensors.items():
        match = _OF_ADAPTER.search(name)
        if match is not None and match["adapter"] == adapter:
            layers.add(name[: match.start()])
            selected[_name_in_file(name, match)] = tensor
    embeddings = set()
    if config.get("trainable_token_indices") is None:  # PEFT trains single tokens to avoid saving embeddings
        embeddings = {f"{layer}.base_layer" for layer in layers if layer.rpartition(".")[2] in _EMBEDDINGS}
    for name, tensor in tensors.items():
        layer, _, leaf = name.rpartition(".")
        if layer in embeddings:
            selected[name] = tensor
        trained = bias == "all" or (bias == "lora_only" and layer.removesuffix(".base_layer") in layers)
        if trained and leaf == "bias" and _OF_ADAPTER.search(name) is None and ".original_module." not in name:
            selected[name] = tensor
    return selected


def _name_in_file(name: str, match: re.Match[str]) -> str:
    """The name of a parameter in PEFT's files: without the adapter, and without the kind for whole modules."""
    layer, kind, rest = name[: match.start()], match["kind"], match["rest"] or ""
    if kind == "modules_to_save":
        return layer + rest
    if kind == "lora_magnitude_vector":
        rest = ""  # a parameter in old releases of PEFT, a module in new ones
    return f"{layer}.{kind}{rest}"


def _plain(value: Any) -> Any:
    """A JSON value in place of a config's value that JSON cannot represent."""
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
        f"the config contains {with_article(type(value).__qualname__)}, which JSON cannot represent; "
        "pass a config_folder with a valid config",
        path="",
    )


# Files in a config folder that are not copied: weights in any format and their indices, archives, hidden files.
_NOT_COPIED: Final = re.compile(
    r"\..*|.*\.index\.json|.*\.(safetensors|bin|pt|pth|ckpt|gguf|h5|msgpack|ot|onnx|onnx_data|tflite|pkl|npz|distcp"
    r"|tar|zst|gz|zip)",
    re.IGNORECASE,
)


# The only subfolder that belongs to a tokenizer.
_TEMPLATES: Final = "additional_chat_templates"


def is_left_out(path: str) -> bool:
    """True for a file in a model's folder that is not copied beside its weights."""
    return any(map(_NOT_COPIED.fullmatch, path.split("/")))


def files_of(folder: Path) -> dict[str, bytes]:
    """The config, tokenizer and similar files, read at once, so that the folder may be deleted after the call."""
    if not folder.is_dir():
        refuse_dangling(folder)
        raise NotAFolderError(f"config_folder {folder} is not a folder; give the one with the model's config.json")
    paths = [path for path in folder.iterdir() if not is_left_out(path.name) and not path.is_dir()]
    paths += (folder / _TEMPLATES).glob("*.jinja")
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(paths)}
