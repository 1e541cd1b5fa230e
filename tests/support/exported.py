"""Small models and adapters to export, and what is read back of them."""

import copy
import enum
import os
import tempfile
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from racing import until
from states import difference

os.environ["HF_HUB_OFFLINE"] = "1"  # read when it is imported

import transformers
from safetensors import safe_open

import async_ckpt

transformers.utils.logging.disable_progress_bar()
transformers.utils.logging.set_verbosity_error()  # of special tokens outside of a vocabulary of 99

Tensors = dict[str, torch.Tensor]
SMALL: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 99,
}  # fmt: skip


def gpt2() -> Any:
    config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=99, n_positions=16)
    return transformers.GPT2LMHeadModel(config)


def mixtral() -> Any:
    """In memory all experts are one tensor; in its checkpoints each has its own."""
    config = transformers.MixtralConfig(**SMALL, num_key_value_heads=2, num_local_experts=4)
    return transformers.MixtralForCausalLM(config)


def state_of(model: torch.nn.Module) -> Tensors:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def spoil(model: torch.nn.Module) -> None:
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.fill_(7)


def weights_in(folder: Path) -> Tensors:
    """Every tensor of every safetensors file directly in a folder."""
    found: Tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                assert name not in found
                found[name] = file.get_tensor(name)
    return found


def assert_same(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> None:
    assert sorted(found) == sorted(wanted)
    assert difference({name: found[name] for name in wanted}, dict(wanted)) is None


def assert_loads(folder: Path, wanted: Tensors, cls: Any) -> None:
    """transformers finds every weight, misses none, and each has every bit."""
    model, told = cls.from_pretrained(folder, output_loading_info=True)
    assert {name: value for name, value in told.items() if value} == {}
    assert_same(dict(model.state_dict()), wanted)


def assert_only(folder: Path, *names: str) -> None:
    """Nothing else is in the folder, or stays there: what was exchanged is removed once the handle has resolved."""
    until(lambda: not any(name.startswith(".") for name in os.listdir(folder)))
    # A publisher leaves a mark where versions have taken the place of others.
    assert sorted(name for name in os.listdir(folder) if not name.startswith("replaced.")) == sorted(names)


@pytest.fixture
def held_back() -> Iterator[threading.Event]:
    """Exports begun now are copied to the host, and not written before the event is set."""
    go, inside = threading.Event(), threading.Event()

    def first(path: str) -> None:
        inside.set()
        assert go.wait(60)
        Path(path).write_text("done")

    with tempfile.TemporaryDirectory() as folder:
        handle = async_ckpt.wrap(first)(f"{folder}/x")
        assert inside.wait(60)
        yield go
        go.set()
        handle.result()


class PeftType(str, enum.Enum):  # noqa: UP042
    LORA = "LORA"
    IA3 = "IA3"


class LoraConfig:
    """What PEFT's has, as far as its file shows it."""

    def __init__(self, **options: Any) -> None:
        self.peft_type = PeftType.LORA
        self.base_model_name_or_path = "base/model"
        self.r, self.lora_alpha, self.bias = 4, 8, "none"
        self.target_modules = {"v_proj", "q_proj", "embed_tokens"}
        self.inference_mode = False
        self.revision = None
        vars(self).update(options)

    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))


class LoraLayer(torch.nn.Module):
    """A layer with the parameters of several adapters beside it, where PEFT puts them."""

    def __init__(self, base: torch.nn.Module, *adapters: str, dora: bool = False) -> None:
        super().__init__()
        self.base_layer = base
        shape = base.weight.shape
        if isinstance(base, torch.nn.Embedding):
            self.lora_A, self.lora_B = torch.nn.ModuleDict(), torch.nn.ModuleDict()
            self.lora_embedding_A = torch.nn.ParameterDict({name: torch.rand(4, shape[0]) for name in adapters})
            self.lora_embedding_B = torch.nn.ParameterDict({name: torch.rand(shape[1], 4) for name in adapters})
            return
        self.lora_A = torch.nn.ModuleDict({name: torch.nn.Linear(shape[1], 4, bias=False) for name in adapters})
        self.lora_B = torch.nn.ModuleDict({name: torch.nn.Linear(4, shape[0], bias=False) for name in adapters})
        if dora:
            self.lora_magnitude_vector = torch.nn.ModuleDict({name: Magnitude(shape[0]) for name in adapters})


class Magnitude(torch.nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.rand(size))


class TrainedWhole(torch.nn.Module):
    """PEFT's ModulesToSaveWrapper."""

    def __init__(self, module: torch.nn.Module, *adapters: str) -> None:
        super().__init__()
        self.original_module = module
        self.modules_to_save = torch.nn.ModuleDict({name: copy.deepcopy(module) for name in adapters})


class TrainedTokens(torch.nn.Module):
    """PEFT's TrainableTokensWrapper."""

    def __init__(self, module: torch.nn.Embedding, *adapters: str) -> None:
        super().__init__()
        self.original_module = module
        self.token_adapter = torch.nn.Module()
        self.token_adapter.base_layer = module
        self.token_adapter.trainable_tokens_delta = torch.nn.ParameterDict(
            {name: torch.rand(2, module.weight.shape[1]) for name in adapters}
        )


class Decoder(torch.nn.Module):
    """NamedArchives as a transformer is, of which it has as much as adapters meet."""

    def __init__(self, *adapters: str) -> None:
        super().__init__()
        self.model = torch.nn.Module()
        self.model.embed_tokens = LoraLayer(torch.nn.Embedding(9, 6), *adapters)
        self.model.positions = TrainedTokens(torch.nn.Embedding(5, 6), *adapters)
        layer = torch.nn.Module()
        layer.q_proj = LoraLayer(torch.nn.Linear(6, 6), *adapters)
        layer.k_proj = torch.nn.Linear(6, 6)
        layer.v_proj = LoraLayer(torch.nn.Linear(6, 6, bias=False), *adapters, dora=True)
        self.model.layers = torch.nn.ModuleList([layer])
        self.lm_head = TrainedWhole(torch.nn.Linear(6, 9), *adapters)


class PeftModel(torch.nn.Module):
    """The outside of PEFT's, whose `__getattr__` leads to the model within, too."""

    def __init__(self, *adapters: str, model: torch.nn.Module | None = None, **options: Any) -> None:
        super().__init__()
        self.base_model = torch.nn.Module()
        self.base_model.model = Decoder(*adapters) if model is None else model
        self.peft_config = {name: LoraConfig(**options) for name in adapters}
        self.active_adapter = adapters[0]

    @property
    def active_adapters(self) -> list[str]:
        return [self.active_adapter]

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "base_model":
                raise
            return getattr(self.base_model.model, name)


# What get_peft_model_state_dict has, and what it is called in memory, with "{}" for the adapter.
IN_FILE = {
    "base_model.model.model.embed_tokens.base_layer.weight": "model.embed_tokens.base_layer.weight",
    "base_model.model.model.embed_tokens.lora_embedding_A": "model.embed_tokens.lora_embedding_A.{}",
    "base_model.model.model.embed_tokens.lora_embedding_B": "model.embed_tokens.lora_embedding_B.{}",
    "base_model.model.model.positions.token_adapter.trainable_tokens_delta": (
        "model.positions.token_adapter.trainable_tokens_delta.{}"
    ),
    "base_model.model.model.layers.0.q_proj.lora_A.weight": "model.layers.0.q_proj.lora_A.{}.weight",
    "base_model.model.model.layers.0.q_proj.lora_B.weight": "model.layers.0.q_proj.lora_B.{}.weight",
    "base_model.model.model.layers.0.v_proj.lora_A.weight": "model.layers.0.v_proj.lora_A.{}.weight",
    "base_model.model.model.layers.0.v_proj.lora_B.weight": "model.layers.0.v_proj.lora_B.{}.weight",
    "base_model.model.model.layers.0.v_proj.lora_magnitude_vector": (
        "model.layers.0.v_proj.lora_magnitude_vector.{}.weight"
    ),
    "base_model.model.lm_head.weight": "lm_head.modules_to_save.{}.weight",
    "base_model.model.lm_head.bias": "lm_head.modules_to_save.{}.bias",
}


def adapter_of(state: Mapping[str, torch.Tensor], adapter: str) -> Tensors:
    """Of the decoder's state, what PEFT would write."""
    return {name: state[inner.format(adapter)] for name, inner in IN_FILE.items()}
