"""The Hugging Face model that weights belong to: its config, and the names of its weights.

In: a folder of a model, or its id on the hub, and the names of weights. Out: the files beside the weights, and the
missing names. Knows nothing of: how weights are written.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Collection
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import torch

from ... import Place
from ...errors import CheckpointError
from ...plumbing import spec
from .output import USAGE, Answer, print_note

_CONFIG: Final = "config.json"
# PEFT's files of an adapter. The names of weights in them lack the name of the adapter.
ADAPTER_CONFIG: Final = "adapter_config.json"
ADAPTER: Final = "adapter_model.safetensors"
_ADAPTER_NAME: Final = re.compile(r"(\.lora_\w+)\.default(?=\.|$)")
# The files beside the weights: configs, tokenizers, templates, code.
_BESIDE: Final = ("*.json", "*.txt", "*.model", "*.jinja", "*.py")
_OF_WEIGHTS: Final = (".index.json", "trainer_state.json")
_SHOWN: Final = 3


def folder_of(config: str) -> Path:
    """The folder of a model, fetched from the hub if `config` is an id. Raises ImportError without Transformers."""
    import_module("transformers")
    folder = Path(config)
    if not folder.is_dir():
        fetch: Any = import_module("huggingface_hub").snapshot_download
        try:
            folder = Path(fetch(config, allow_patterns=[*_BESIDE]))
        except (OSError, ValueError) as error:
            raise Answer(
                f"--config takes the folder of a model or its id on the hub; {config} is not a folder, and the hub "
                "says: "
                f"{str(error).splitlines()[0]:.200}"
            ) from error
    if not (folder / _CONFIG).is_file():
        raise Answer(f"{folder} has no {_CONFIG}; --config takes the folder of a model, or its id on the hub", USAGE)
    return folder


def is_adapter(names: Collection[str]) -> bool:
    """Whether weights with these names are only a LoRA adapter."""
    return bool(names) and all(".lora_" in name for name in names)


def name_in_adapter(name: str) -> str:
    """The name of a weight in an adapter's file, without the prefix of the state's entry."""
    return _ADAPTER_NAME.sub(r"\1", name[max(0, name.find("base_model.")) :])


def adapter_config_of(source: Place, config: str) -> bytes | None:
    """The config of an adapter: from the folder that the user names, or from beside the weights."""
    place = Place(config) if config else source
    with suppress(FileNotFoundError, IsADirectoryError, NotADirectoryError, CheckpointError):
        return place.storage().read(ADAPTER_CONFIG)[0]
    if config:
        raise Answer(f"{config} has no {ADAPTER_CONFIG}; for an adapter, --config takes the folder of one", USAGE)
    print_note(
        f"PEFT needs {ADAPTER_CONFIG} beside the weights, and the checkpoint has none: pass --config ADAPTER_FOLDER "
        "with the same settings, or write it by model.peft_config['default'].save_pretrained(FOLDER)"
    )
    return None


def missing_of(folder: Path, names: Collection[str]) -> list[str]:
    """The weights of the model that these names lack, which a loaded model initializes. Names that the model does not
    have are refused, with advice on the prefix to strip, or on the names to select.
    """
    transformers: Any = import_module("transformers")
    config = transformers.AutoConfig.from_pretrained(folder)
    (architecture,) = (getattr(config, "architectures", None) or [None])[:1]
    kind = getattr(transformers, architecture or "", None)
    if kind is None:
        raise Answer(f"{folder / _CONFIG} names no architecture of Transformers; give the config of the trained model")
    with torch.device("meta"):
        model = kind(config)
    model.tie_weights()
    shared = {name: id(value) for name, value in model.named_parameters(remove_duplicate=False)}
    expected = {*model.state_dict()}
    unexpected = sorted({*names} - expected)
    if unexpected:
        raise Answer(_advice(architecture, unexpected, names, expected))
    there = {shared[name] for name in names if name in shared}
    return sorted(name for name in expected - {*names} if shared.get(name) not in there)


def _advice(architecture: str, unexpected: list[str], names: Collection[str], expected: Collection[str]) -> str:
    prefixes = {name[: at + 1] for name in names for at, character in enumerate(name) if character == "."}
    hits = {one: sum(name.removeprefix(one) in expected for name in names if name.startswith(one)) for one in prefixes}
    best = max(sorted(hits), key=lambda one: hits[one], default="")
    if hits.get(best):
        advice = f"pass --select '{best}*' --strip '{best}'"
    elif {*names} & {*expected}:
        advice = "choose the names of the model with --select"
    else:
        advice = "give the config of the model that was trained"
    return f"{architecture} has no {spec.some_of(unexpected, _SHOWN)}; nothing was written: {advice}"


def copy_beside(folder: Path, target: Path) -> None:
    """Copy the files beside the weights of a model into another folder."""
    for pattern in _BESIDE:
        for path in folder.glob(pattern):
            if not path.name.endswith(_OF_WEIGHTS):
                shutil.copyfile(path, target / path.name)
