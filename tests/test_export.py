"""`export_hf`: what transformers loads, what PEFT would have written, whole at every moment; and `also=`, one copy for two."""

from __future__ import annotations

import copy
import enum
import gc
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import uuid
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from children import injected, why_no_strace
from racing import Call, until
from states import MIB, bits_of, difference, names_below, open_run

os.environ["HF_HUB_OFFLINE"] = "1"  # read when it is imported

import transformers
from safetensors import safe_open
from tokenizers import Tokenizer, models, pre_tokenizers

import async_ckpt
from async_ckpt import StorageFullError, StorageUnavailableError, TornSnapshotError, UnsupportedStateError
from async_ckpt.saving.default import host_memory
from async_ckpt.staging.stager import Snapshot
from async_ckpt.testing import FaultyProxy

transformers.utils.logging.disable_progress_bar()
transformers.utils.logging.set_verbosity_error()  # of special tokens outside of a vocabulary of 99

Tensors = dict[str, torch.Tensor]
SMALL: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 99,
}  # fmt: skip


# --- models, and what is read back --------------------------------------------------------------------------------


def gpt2() -> Any:
    config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=99, n_positions=16)
    return transformers.GPT2LMHeadModel(config)


def llama(**options: Any) -> Any:
    config = transformers.LlamaConfig(**{**SMALL, "num_key_value_heads": 2, **options})
    return transformers.LlamaForCausalLM(config)


def llama_in_bfloat16() -> Any:
    return llama().to(torch.bfloat16)


def t5() -> Any:
    config = transformers.T5Config(d_model=32, d_ff=64, num_layers=2, num_heads=4, vocab_size=99, d_kv=8)
    return transformers.T5ForConditionalGeneration(config)


def bart(cls: Any = None, config: Any = None, **options: Any) -> Any:
    sizes = dict.fromkeys(("encoder_layers", "decoder_layers"), 1)
    sizes |= dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 2)
    sizes |= dict.fromkeys(("d_model", "encoder_ffn_dim", "decoder_ffn_dim"), 32)
    made = (config or transformers.BartConfig)(**sizes, vocab_size=99, max_position_embeddings=16, **options)
    return (cls or transformers.BartForConditionalGeneration)(made)


def marian() -> Any:
    """Its positions are computed, and not saved."""
    return bart(transformers.MarianMTModel, transformers.MarianConfig, pad_token_id=98)


def bert() -> Any:
    """It cannot generate."""
    return transformers.BertForMaskedLM(transformers.BertConfig(**SMALL))


def mixtral() -> Any:
    """In memory all experts are one tensor; in its checkpoints each has its own."""
    config = transformers.MixtralConfig(**SMALL, num_key_value_heads=2, num_local_experts=4)
    return transformers.MixtralForCausalLM(config)


def clip() -> Any:
    """A config of configs."""
    both = {k: v for k, v in SMALL.items() if k != "vocab_size"}
    text = {**both, "vocab_size": 99, "max_position_embeddings": 16}
    vision = {**both, "image_size": 16, "patch_size": 8}
    return transformers.CLIPModel(
        transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=8)
    )


def state_of(model: torch.nn.Module) -> Tensors:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def compiled(model: torch.nn.Module) -> Any:
    return torch.compile(model, backend="eager")


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


def metadata_of(path: Path) -> dict[str, str]:
    with safe_open(path, "pt") as file:
        return file.metadata()


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
    assert sorted(os.listdir(folder)) == sorted(names)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """A folder that is not there yet, in one where nothing else is."""
    (tmp_path / "outer").mkdir()
    return tmp_path / "outer" / "model"


@pytest.fixture
def config_folder(tmp_path: Path) -> Path:
    """The config of the small Llama, as it comes without weights."""
    folder = tmp_path / "config"
    transformers.LlamaConfig(**SMALL, num_key_value_heads=2).save_pretrained(folder)
    return folder


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


@pytest.fixture
def no_copying(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """What may be copied later is not copied before the event is set."""
    go, copy_later = threading.Event(), Snapshot._fill_later

    def held(snapshot: Snapshot) -> None:
        go.wait(60)
        copy_later(snapshot)

    monkeypatch.setattr(Snapshot, "_fill_later", held)
    yield go
    go.set()


# --- what transformers loads --------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [gpt2, llama_in_bfloat16, t5, bart, marian, bert, mixtral, clip])
def test_a_model_loads_as_it_was_at_the_call_from_what_save_pretrained_would_have_written(
    make, out, tmp_path
):
    model = make()
    twin, wanted = copy.deepcopy(model), state_of(model)
    handle = async_ckpt.export_hf(model, out)
    spoil(model)
    handle.result()
    twin.save_pretrained(tmp_path / "theirs")

    assert_loads(out, wanted, type(model))
    assert names_below(out) == names_below(tmp_path / "theirs")
    assert_same(weights_in(out), weights_in(tmp_path / "theirs"))
    for name in names_below(out):
        if name.endswith(".json"):
            assert (out / name).read_bytes() == (tmp_path / "theirs" / name).read_bytes()
    assert_only(out.parent, "model")


def test_shards_and_their_index_are_those_of_save_pretrained(out, tmp_path):
    model = gpt2()
    wanted = state_of(model)
    async_ckpt.export_hf(model, out, max_shard_bytes=20_000).result()
    model.save_pretrained(tmp_path / "theirs", max_shard_size=20_000)

    assert_loads(out, wanted, type(model))
    assert names_below(out) == names_below(tmp_path / "theirs")
    name = "model.safetensors.index.json"
    assert (out / name).read_bytes() == (tmp_path / "theirs" / name).read_bytes()
    assert len(list(out.glob("model-*.safetensors"))) > 2


def test_experts_that_are_one_tensor_in_memory_may_lie_in_several_shards(out):
    model = mixtral()
    async_ckpt.export_hf(model, out, max_shard_bytes=20_000).result()

    assert_loads(out, state_of(model), type(model))
    assert "model.layers.0.block_sparse_moe.experts.3.w2.weight" in weights_in(out)
    assert all(path.stat().st_size < 24_000 for path in out.iterdir())


def test_a_shard_is_no_larger_than_allowed_unless_one_tensor_is(out):
    state = {f"w{i}": torch.full((250,), float(i)) for i in range(7)} | {"large": torch.ones(5000)}
    async_ckpt.export_hf(state, out, max_shard_bytes=3000).result()

    assert_same(weights_in(out), state)
    where = json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]
    shards = [[name for name in where if where[name] == shard] for shard in sorted(set(where.values()))]
    assert shards == [["w0", "w1", "w2"], ["w3", "w4", "w5"], ["w6"], ["large"]]


@pytest.mark.parametrize("max_shard_bytes", [0, -1, "5GB"])
def test_a_limit_that_is_none_is_refused(max_shard_bytes, out):
    with pytest.raises(ValueError, match="number of bytes"):
        async_ckpt.export_hf({"w": torch.ones(3)}, out, max_shard_bytes=max_shard_bytes)


def test_a_state_dict_loads_with_the_config_that_lies_in_a_folder(out, config_folder):
    state = state_of(llama())
    handle = async_ckpt.export_hf(state, out, config_folder)
    for tensor in state.values():
        tensor.zero_()
    handle.result()

    wanted = weights_in(out)
    assert any(bool(tensor.any()) for tensor in wanted.values())
    assert_loads(out, wanted, transformers.LlamaForCausalLM)


def test_tied_weights_of_a_state_dict_are_written_once_and_the_other_name_is_told(out, tmp_path):
    model = gpt2()
    model.config.save_pretrained(tmp_path / "config")
    async_ckpt.export_hf(model.state_dict(), out, tmp_path / "config").result()

    assert "lm_head.weight" not in weights_in(out)
    assert metadata_of(out / "model.safetensors") == {
        "lm_head.weight": "transformer.wte.weight",
        "format": "pt",
    }
    assert_loads(out, state_of(model), transformers.GPT2LMHeadModel)


def test_what_shares_memory_though_the_model_does_not_tie_it_is_written_under_every_name(out):
    """transformers refuses such a model; left out, the second name would be loaded as random numbers."""
    model = llama(tie_word_embeddings=False)
    model.model.layers[1].mlp = model.model.layers[0].mlp
    model.lm_head.weight = model.model.embed_tokens.weight
    async_ckpt.export_hf(model, out).result()

    assert_loads(out, state_of(model), transformers.LlamaForCausalLM)


def test_views_of_one_memory_that_are_not_the_same_tensor_are_each_written(out):
    whole = torch.arange(12.0)
    state = {
        "whole": whole,
        "first": whole[:6],
        "square": whole[:9].view(3, 3),
        "turned": whole[:9].view(3, 3).T,
    }
    async_ckpt.export_hf(state, out).result()

    assert_same(weights_in(out), {name: tensor.contiguous() for name, tensor in state.items()})


@pytest.mark.parametrize(
    "wrap",
    [
        compiled,
        torch.nn.DataParallel,
        lambda model: compiled(torch.nn.DataParallel(model)),
        lambda model: torch.nn.DataParallel(compiled(model)),
    ],
    ids=["compiled", "parallel", "compiled-parallel", "parallel-compiled"],
)
def test_a_wrapped_model_is_exported_as_the_model_in_it(wrap, out, tmp_path):
    model = gpt2()
    wanted = state_of(model)
    model.transformer.h[1] = compiled(model.transformer.h[1])
    async_ckpt.export_hf(wrap(model), out).result()
    async_ckpt.export_hf(wrap(model).state_dict(), tmp_path / "state", out).result()

    assert_loads(out, wanted, transformers.GPT2LMHeadModel)
    assert json.loads((out / "config.json").read_text())["architectures"] == ["GPT2LMHeadModel"]
    assert_same(weights_in(tmp_path / "state"), weights_in(out))


def test_every_dtype_that_safetensors_knows_keeps_every_bit(out):
    raw = torch.randint(0, 256, (64,), dtype=torch.uint8)
    names = "float64 float32 float16 bfloat16 int64 int32 int16 int8 uint64 uint32 uint16 uint8 float8_e4m3fn float8_e5m2"
    state = {name: raw.view(getattr(torch, name)) for name in names.split()}
    state |= {
        "bool": raw > 99,
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 3),
        "one": torch.ones(1).bool(),
    }
    async_ckpt.export_hf({name: tensor.clone() for name, tensor in state.items()}, out).result()

    assert_same(weights_in(out), state)


def test_every_tensor_begins_on_a_multiple_of_its_item_size(out):
    """Whoever maps the file looks at it in place."""
    dtypes = [
        torch.int8,
        torch.float64,
        torch.bool,
        torch.float16,
        torch.float32,
        torch.uint8,
        torch.bfloat16,
    ]
    state = {f"w{i}": torch.ones(3, dtype=dtype) for i, dtype in enumerate(dtypes)}
    async_ckpt.export_hf(state, out).result()

    data = (out / "model.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    assert [
        name for name in state if (8 + length + header[name]["data_offsets"][0]) % state[name].itemsize
    ] == []


def test_tensors_that_are_not_dense_are_written_as_they_read(out):
    base = torch.arange(4_000_000.0).view(2000, 2000)
    state = {
        "transposed": base.T,
        "strided": base[::3, 1::7],
        "expanded": torch.tensor([[1.0], [2.0]]).expand(2, 5),
        "negative": torch._neg_view(torch.arange(5.0)),
        "parameter": torch.nn.Parameter(base[:2, :2].T),
    }
    wanted = {name: tensor.detach().clone().contiguous() for name, tensor in state.items()}
    async_ckpt.export_hf(state, out).result()

    assert_same(weights_in(out), wanted)


def test_names_with_odd_characters_come_back_as_they_are(out):
    names = ["", " ", "a b", "ä.ö", "…/../x", 'q"uo\\te', "new\nline", "\0", "format", "config.json", "雪"]
    state = {name: torch.full((2,), float(i)) for i, name in enumerate(names)}
    async_ckpt.export_hf(state, out).result()

    assert_same(weights_in(out), state)


def test_a_tied_name_does_not_take_the_place_of_the_format(out):
    w = torch.ones(3)
    async_ckpt.export_hf({"a": w, "format": w}, out).result()

    assert metadata_of(out / "model.safetensors")["format"] == "pt"


# --- what is beside the weights -----------------------------------------------------------------------------------


@pytest.fixture
def from_the_hub(tmp_path: Path) -> Path:
    """A snapshot as the hub's cache has it: links to blobs, and much that is no config."""
    made = Tokenizer(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=made, unk_token="?")
    tokenizer.chat_template = {"default": "{{ messages }}", "tool_use": "{{ tools }}"}
    plain, blobs, snapshot = (tmp_path / "cache" / name for name in ("plain", "blobs", "snapshot"))
    tokenizer.save_pretrained(plain)
    transformers.LlamaConfig(**SMALL, num_key_value_heads=2).save_pretrained(plain)
    for name in ("README.md", "merges.txt", "spiece.model", "modeling_x.py", "preprocessor_config.json"):
        (plain / name).write_text("{}")
    for name in (
        "model.safetensors", "model-00001-of-00002.safetensors", "model.safetensors.index.json", "pytorch_model.bin",
        "pytorch_model.bin.index.json", "tf_model.h5", "flax_model.msgpack", "rust_model.ot", "x.gguf", "consolidated.pth",
        "optimizer.pt", "model.onnx", "model.onnx_data", "x.tar", "x.tar.zst", ".gitattributes", "original/params.json",
        "checkpoint-5/config.json",
    ):  # fmt: skip
        (plain / name).parent.mkdir(exist_ok=True)
        (plain / name).write_text("weights")
    blobs.mkdir()
    for number, name in enumerate(names_below(plain)):
        os.rename(plain / name, blobs / str(number))
        (snapshot / name).parent.mkdir(parents=True, exist_ok=True)
        (snapshot / name).symlink_to(os.path.relpath(blobs / str(number), (snapshot / name).parent))
    return snapshot


def test_config_and_tokenizer_come_from_the_folder_even_if_it_goes_at_once(from_the_hub, out, held_back):
    state = state_of(llama())
    wanted = {
        name: (from_the_hub / name).read_bytes()
        for name in (
            "README.md", "additional_chat_templates/tool_use.jinja", "chat_template.jinja", "config.json", "merges.txt",
            "modeling_x.py", "preprocessor_config.json", "spiece.model", "tokenizer.json", "tokenizer_config.json",
        )
    }  # fmt: skip
    handle = async_ckpt.export_hf(state, out, from_the_hub)
    shutil.rmtree(from_the_hub.parent)
    held_back.set()
    handle.result()

    assert names_below(out) == sorted([*wanted, "model.safetensors"])
    assert {name: (out / name).read_bytes() for name in wanted} == wanted
    assert not any(path.is_symlink() for path in out.rglob("*"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    assert tokenizer("b a c")["input_ids"] == [1, 0, 2]
    assert tokenizer.chat_template == {"default": "{{ messages }}", "tool_use": "{{ tools }}"}
    assert_loads(out, state, transformers.LlamaForCausalLM)


def test_files_of_the_folder_win_over_what_the_model_knows_of_itself(out, tmp_path):
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "config.json").write_text('{"model_type": "gpt2", "mine": 1}')
    model = gpt2()
    async_ckpt.export_hf(model, out, tmp_path / "config").result()
    model.generation_config.save_pretrained(tmp_path / "theirs")

    assert json.loads((out / "config.json").read_text()) == {"model_type": "gpt2", "mine": 1}
    name = "generation_config.json"  # the folder has none
    assert (out / name).read_bytes() == (tmp_path / "theirs" / name).read_bytes()


def test_a_folder_with_a_tokenizer_only_leaves_the_config_to_the_model(out, tmp_path):
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "vocab.json").write_text("{}")
    model = gpt2()
    async_ckpt.export_hf(model, out, tmp_path / "tokenizer").result()

    assert (out / "vocab.json").exists()
    assert_loads(out, state_of(model), transformers.GPT2LMHeadModel)


def test_a_link_to_nothing_in_the_folder_is_an_error_before_anything_is_written(out, config_folder):
    (config_folder / "tokenizer.json").symlink_to("../blobs/gone")
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json"):
        async_ckpt.export_hf({"w": torch.ones(3)}, out, config_folder)

    assert_only(out.parent)


def test_nothing_is_trusted_that_is_code():
    """No file of the package says the word that lets transformers run code from a repository."""
    house = Path(async_ckpt.__file__).parent

    assert [path for path in house.rglob("*.py") if "trust_remote_code" in path.read_text()] == []


# --- what is refused ----------------------------------------------------------------------------------------------


class WithExtraState(torch.nn.Linear):
    def get_extra_state(self) -> Any:
        return {"scale": 1.0}


@pytest.mark.parametrize(
    ("state", "why"),
    [
        ({"model": {"w": torch.ones(3)}}, r"'model' is a dict.*flat mapping"),
        ({"w": torch.ones(3), "step": 5}, r"'step' is a int"),
        ({"w": [torch.ones(3)]}, r"'w' is a list"),
        ({3: torch.ones(3)}, r"3 is a Tensor"),
        ([torch.ones(3)], r"a list cannot be exported"),
        (torch.ones(3), r"a Tensor cannot be exported"),
        (None, r"a NoneType cannot be exported"),
        ({}, r"no weights"),
        (torch.nn.ReLU(), r"no weights"),
        (WithExtraState(2, 2), r"'_extra_state' is a dict"),
        ({"w": torch.ones(3, device="meta")}, r"'w': a meta tensor has no values.*nothing was written"),
        (torch.nn.Linear(2, 2, device="meta"), r"'weight': a meta tensor"),
        (torch.nn.LazyLinear(2), r"'weight': a lazy parameter"),
        ({"w": torch.eye(3).to_sparse()}, r"'w': a sparse tensor"),
        ({"w": torch.ones(3, dtype=torch.complex64)}, r"'w': safetensors does not know torch.complex64"),
        ({"w": torch.ones(3).to(torch.float8_e5m2fnuz)}, r"'w': safetensors does not know torch.float8_e5m2fnuz"),
        ({"__metadata__": torch.ones(3)}, r"'__metadata__': safetensors takes no such name"),
        ({"w\ud800": torch.ones(3)}, r"'w\\ud800': safetensors takes no such name"),
    ],
)  # fmt: skip
def test_what_is_no_plain_tensor_is_refused_by_name_before_anything_is_written(state, why, out):
    with pytest.raises(UnsupportedStateError, match=why):
        async_ckpt.export_hf(state, out / "deeper")

    assert_only(out.parent)
    assert "0 bytes lent" in repr(host_memory())


def test_a_file_is_no_destination_and_no_config_folder(out):
    out.write_text("a file")
    with pytest.raises(NotADirectoryError, match="is a file"):
        async_ckpt.export_hf({"w": torch.ones(3)}, out)
    with pytest.raises(NotADirectoryError, match="config_folder"):
        async_ckpt.export_hf({"w": torch.ones(3)}, out.with_name("other"), out)
    with pytest.raises(NotADirectoryError, match="config_folder"):
        async_ckpt.export_hf({"w": torch.ones(3)}, out.with_name("other"), "nowhere")
    with pytest.raises(StorageUnavailableError):
        async_ckpt.export_hf({"w": torch.ones(3)}, out / "below").result()

    assert_only(out.parent, "model")
    assert out.read_text() == "a file"


def test_a_guard_that_is_none_is_refused(out):
    with pytest.raises(TypeError, match="guard"):
        async_ckpt.export_hf({"w": torch.ones(3)}, out, guard="adam")

    assert_only(out.parent)


@pytest.mark.parametrize("where", [".", ".."])
def test_the_current_folder_is_not_exchanged_under_the_process(where, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(ValueError, match="current folder"):
        async_ckpt.export_hf({"w": torch.ones(3)}, where)
    async_ckpt.export_hf({"w": torch.ones(3)}, "inside").result()

    assert_only(tmp_path, "here")
    assert_only(tmp_path / "here", "inside")


# --- adapters -----------------------------------------------------------------------------------------------------


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
            self.lora_embedding_A = torch.nn.ParameterDict(
                {name: torch.rand(4, shape[0]) for name in adapters}
            )
            self.lora_embedding_B = torch.nn.ParameterDict(
                {name: torch.rand(shape[1], 4) for name in adapters}
            )
            return
        self.lora_A = torch.nn.ModuleDict(
            {name: torch.nn.Linear(shape[1], 4, bias=False) for name in adapters}
        )
        self.lora_B = torch.nn.ModuleDict(
            {name: torch.nn.Linear(4, shape[0], bias=False) for name in adapters}
        )
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
    """Named as a transformer is, of which it has as much as adapters meet."""

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


@pytest.mark.parametrize("active", ["default", "second"])
def test_the_adapter_in_use_is_written_under_the_names_of_peft(active, out):
    model = PeftModel("default", "second")
    model.active_adapter = active
    wanted = {name: t.clone() for name, t in adapter_of(model.base_model.model.state_dict(), active).items()}
    handle = async_ckpt.export_hf(model, out, max_shard_bytes=1)
    spoil(model)
    handle.result()

    assert names_below(out) == ["adapter_config.json", "adapter_model.safetensors"]
    assert_same(weights_in(out), wanted)
    assert json.loads((out / "adapter_config.json").read_text()) == {
        "base_model_name_or_path": "base/model", "bias": "none", "inference_mode": True, "lora_alpha": 8,
        "peft_type": "LORA", "r": 4, "revision": None, "target_modules": ["embed_tokens", "q_proj", "v_proj"],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("bias", "added"),
    [
        ("lora_only", ["model.layers.0.q_proj.base_layer.bias"]),
        ("all", ["model.layers.0.k_proj.bias", "model.layers.0.q_proj.base_layer.bias"]),
    ],
)
def test_biases_that_are_trained_come_along(bias, added, out):
    model = PeftModel("default", bias=bias)
    async_ckpt.export_hf(model, out).result()

    state = model.base_model.model.state_dict()
    assert_same(
        weights_in(out),
        adapter_of(state, "default") | {f"base_model.model.{name}": state[name] for name in added},
    )


def test_an_adapter_of_a_compiled_model_has_the_same_names(out):
    inner = Decoder("default")
    inner.model.layers[0] = compiled(inner.model.layers[0])
    wanted = adapter_of(
        {name.replace("_orig_mod.", ""): t for name, t in inner.state_dict().items()}, "default"
    )
    async_ckpt.export_hf(PeftModel("default", model=compiled(inner)), out).result()

    assert_same(weights_in(out), wanted)


def test_an_adapter_that_transformers_itself_has_added_gets_the_prefix_of_peft(out):
    model = Decoder("default", "second")
    model.peft_config = {"default": LoraConfig(), "second": LoraConfig()}
    model.active_adapters = lambda: ["second"]
    async_ckpt.export_hf(model, out).result()

    assert_same(weights_in(out), adapter_of(model.state_dict(), "second"))


# What LoraConfig is given. transformers ties the weights of the first model and not of the second.
LORA_CONFIGS: dict[str, dict[str, Any]] = {
    "layers": {"target_modules": ["q_proj", "v_proj"]},
    "every linear layer": {"target_modules": "all-linear", "use_dora": True},
    "tokens": {"target_modules": ["q_proj"], "trainable_token_indices": [1, 2]},
    "tokens of both": {
        "target_modules": ["q_proj"],
        "trainable_token_indices": {"embed_tokens": [1, 2], "lm_head": [1, 2]},
    },
    "embeddings": {"target_modules": ["q_proj", "embed_tokens"]},
    "embeddings by a pattern": {"target_modules": r".*\.(q_proj|embed_tokens)"},
    "embeddings of both": {"target_modules": ["q_proj", "embed_tokens", "lm_head"]},
    "tokens, and a head": {"target_modules": ["lm_head"], "trainable_token_indices": [1, 2]},
    "embeddings trained whole": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
    "both trained whole": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
    "biases": {"target_modules": ["q_proj"], "bias": "all"},
    "a parameter": {"target_modules": ["q_proj"], "target_parameters": ["mlp.down_proj.weight"]},
}


# PEFT says when it saves embeddings, or when they are tied; and asks transformers for what will be renamed.
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore:.is_gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("options", LORA_CONFIGS.values(), ids=LORA_CONFIGS)
def test_the_file_of_an_adapter_has_the_tensors_that_peft_itself_would_have_written(
    out, tmp_path, options, tied
):
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(
        llama(tie_word_embeddings=tied, attention_bias=True), peft.LoraConfig(r=2, **options)
    )
    model.save_pretrained(tmp_path / "peft")
    wanted = weights_in(tmp_path / "peft")

    async_ckpt.export_hf(model, out).result()
    assert_same(weights_in(out), wanted)
    async_ckpt.export_hf(model.state_dict(), out, tmp_path / "peft").result()
    assert_same(weights_in(out), wanted)


def test_of_several_adapters_in_use_none_is_guessed(out):
    model = Decoder("default", "second")
    model.peft_config = {"default": LoraConfig(), "second": LoraConfig()}
    for active in (["default", "second"], None):
        model.active_adapters = active
        with pytest.raises(UnsupportedStateError, match=r"default, second.*set_adapter"):
            async_ckpt.export_hf(model, out)

    assert_only(out.parent)


@pytest.fixture
def adapter_config(tmp_path: Path) -> Path:
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 4, "bias": "none"}')
    return folder


def test_a_state_dict_is_an_adapter_where_its_config_lies_whichever_names_it_has(out, adapter_config):
    model = PeftModel("mine")
    wanted = adapter_of(model.base_model.model.state_dict(), "mine")
    without_prefix = {name.removeprefix("base_model.model."): tensor for name, tensor in wanted.items()}
    for state in (model.state_dict(), model.base_model.model.state_dict(), wanted, without_prefix):
        async_ckpt.export_hf(state, out, adapter_config).result()

        assert_same(weights_in(out), wanted)
        assert names_below(out) == ["adapter_config.json", "adapter_model.safetensors"]
        name = "adapter_config.json"
        assert (out / name).read_bytes() == (adapter_config / name).read_bytes()


def test_what_is_not_one_lora_adapter_is_refused(out, adapter_config):
    with pytest.raises(UnsupportedStateError, match=r"several adapters \(a, b\)"):
        async_ckpt.export_hf(PeftModel("a", "b").state_dict(), out, adapter_config)
    with pytest.raises(UnsupportedStateError, match="no LoRA's; give a config_folder without"):
        async_ckpt.export_hf(llama(), out, adapter_config)
    with pytest.raises(UnsupportedStateError, match=r"type IA3 cannot be exported.*wrap\("):
        async_ckpt.export_hf(PeftModel("a", peft_type=PeftType.IA3), out)
    with pytest.raises(UnsupportedStateError, match="a config holds a object"):
        async_ckpt.export_hf(PeftModel("a", odd=object()), out)

    assert_only(out.parent)


# --- over what is there -------------------------------------------------------------------------------------------


def version(number: int, num_tensors: int = 4) -> Tensors:
    return {f"w{i}": torch.full((500,), float(number)) for i in range(num_tensors)}


def config_of(folder: Path, number: int) -> Path:
    """A folder with a config that says which export it belongs to."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"version": number}))
    return folder


def assert_is_version(folder: Path, number: int, num_tensors: int = 4) -> None:
    """As a loader goes about it: the config, then the one file or the index, then what these name."""
    assert json.loads((folder / "config.json").read_text()) == {"version": number}
    if (folder / "model.safetensors").exists():
        names = ["model.safetensors"]
        assert not (folder / "model.safetensors.index.json").exists()
    else:
        where = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
        names = sorted(set(where.values()))
    assert sorted(path.name for path in folder.glob("*.safetensors")) == names
    found: Tensors = {}
    for name in names:
        with safe_open(folder / name, "pt") as file:
            found |= {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    assert_same(found, version(number, num_tensors))


def test_an_export_over_another_keeps_other_files_and_no_shard_of_the_old(out, tmp_path):
    for number, max_shard_bytes in enumerate([2000, 4000, 10**9, 2000], start=1):
        async_ckpt.export_hf(
            version(number), out, config_of(tmp_path / "config", number), max_shard_bytes
        ).result()
        if number == 1:  # what else may lie there, weights of others below included
            for name in ("notes.txt", "checkpoint-5/model.safetensors", "a/b/model.safetensors.index.json"):
                (out / name).parent.mkdir(parents=True, exist_ok=True)
                (out / name).write_text(name)
            (out / "link").symlink_to("notes.txt")

        assert_is_version(out, number)
        for name in ("notes.txt", "checkpoint-5/model.safetensors", "a/b/model.safetensors.index.json"):
            assert (out / name).read_text() == name
        assert os.readlink(out / "link") == "notes.txt"
        assert_only(out.parent, "model")


def test_a_state_dict_alone_leaves_the_config_that_is_there(out, tmp_path):
    async_ckpt.export_hf(version(1), out, config_of(tmp_path / "config", 2), 2000).result()
    async_ckpt.export_hf(version(2), out).result()

    assert_is_version(out, 2)


def test_an_empty_folder_and_a_link_to_a_folder_are_written_to_and_parents_are_made(tmp_path):
    (tmp_path / "far" / "empty").mkdir(parents=True)
    (tmp_path / "link").symlink_to("far/full")
    async_ckpt.export_hf(version(1), tmp_path / "far" / "empty", config_of(tmp_path / "config", 1)).result()
    for number in (1, 2):  # at first a link to nothing
        async_ckpt.export_hf(
            version(number), tmp_path / "link", config_of(tmp_path / "config", number)
        ).result()
    async_ckpt.export_hf(version(3), tmp_path / "a" / "b" / "c", config_of(tmp_path / "config", 3)).result()

    assert_is_version(tmp_path / "far" / "empty", 1)
    assert_is_version(tmp_path / "link", 2)
    assert_is_version(tmp_path / "a" / "b" / "c", 3)
    assert os.readlink(tmp_path / "link") == "far/full"
    assert_only(tmp_path / "far", "empty", "full")


def test_a_model_is_not_put_beside_an_adapter_and_an_adapter_leaves_a_model(out, adapter_config, tmp_path):
    """from_pretrained takes the adapter's base for the model wherever there is an adapter."""
    async_ckpt.export_hf(version(1), out, config_of(tmp_path / "config", 1)).result()
    for _ in range(2):
        async_ckpt.export_hf(PeftModel("mine"), out).result()
    held = names_below(out)
    with pytest.raises(FileExistsError, match=r"holds an adapter.*delete it"):
        async_ckpt.export_hf(version(2), out, config_of(tmp_path / "config", 2)).result()

    assert held == ["adapter_config.json", "adapter_model.safetensors", "config.json", "model.safetensors"]
    assert names_below(out) == held
    with safe_open(out / "model.safetensors", "pt") as file:
        assert file.get_tensor("w0")[0] == 1
    assert_only(out.parent, "model")


def test_two_exports_at_once_to_one_destination_are_written_one_after_the_other(out, tmp_path, held_back):
    handles = [
        async_ckpt.export_hf(version(i), out, config_of(tmp_path / "config", i), 2000 * i) for i in (1, 2, 3)
    ]
    assert not any(handle.done() for handle in handles)
    assert not out.exists()
    held_back.set()
    for handle in handles:
        handle.result()

    assert_is_version(out, 3)
    assert_only(out.parent, "model")


@pytest.mark.skipif(sys.platform != "linux", reason="folders are exchanged, and opened, as on Linux")
def test_whoever_has_opened_the_folder_reads_one_export_or_none(out, tmp_path):
    async_ckpt.export_hf(version(0), out, config_of(tmp_path / "config", 0), 2000).result()
    num_read, ended = 0, threading.Event()

    def read_on() -> None:
        nonlocal num_read
        while not ended.is_set():
            there = os.open(out, os.O_RDONLY)  # at every moment there is one
            try:
                folder = Path(f"/proc/self/fd/{there}")
                number = json.loads((folder / "config.json").read_text())["version"]
                assert_is_version(folder, number)
                num_read += 1
            except (FileNotFoundError, AssertionError):
                if (folder / "config.json").exists() and os.stat(there).st_ino == os.stat(out).st_ino:
                    raise  # it was not removed under the reader
            finally:
                os.close(there)

    reading = Call(read_on)
    try:
        until(lambda: num_read > 0)
        for number in range(1, 25):
            async_ckpt.export_hf(
                version(number), out, config_of(tmp_path / "config", number), 2000 * (number % 3 + 1)
            ).result()
    finally:
        ended.set()
    reading.outcome()

    assert_is_version(out, 24)


DYING = """
import sys
import torch
import async_ckpt
from children import die_at
state = {f"w{i}": torch.full((500,), 2.0) for i in range(4)}
async_ckpt.export_hf(state, sys.argv[2] + "/warm").result()
count = die_at(int(sys.argv[3]))
async_ckpt.export_hf(state, sys.argv[1], sys.argv[2], 4000).result()
print(count())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="forks and signals as Linux has them")
@pytest.mark.parametrize("was_there", [False, True])
def test_killed_at_any_change_of_the_disk_one_export_is_there_or_the_other(was_there, nursery, tmp_path):
    new, old = config_of(tmp_path / "new", 2), config_of(tmp_path / "old", 1)
    num_calls = 0
    for number in range(1, 1000):
        folder = tmp_path / "runs" / str(number) / "model"
        folder.parent.mkdir(parents=True)
        if was_there:
            async_ckpt.export_hf(version(1), folder, old, 2000).result()
            (folder / "notes.txt").write_text("mine")
        ended = nursery.run(DYING, folder, new, number)
        assert ended.status in (0, -9), ended.err
        if not was_there and not folder.exists():
            assert ended.status == -9
        else:
            assert_is_version(
                folder, json.loads((folder / "config.json").read_text())["version"] if was_there else 2
            )
            assert not was_there or (folder / "notes.txt").read_text() == "mine"
        async_ckpt.export_hf(version(3), folder, config_of(tmp_path / "next", 3), 4000).result()
        assert_is_version(folder, 3)
        assert_only(folder.parent, "model")
        if ended.status == 0:
            num_calls = int(ended.out)
            break
        shutil.rmtree(folder.parent)

    assert number > num_calls > 15  # the scratch is removed once the handle has resolved


# --- what goes wrong ----------------------------------------------------------------------------------------------


@pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="mounting a file system needs root")
def test_a_disk_without_room_is_told_before_a_byte_is_written_and_a_read_only_one_too(
    tmp_path, config_folder
):
    mount = tmp_path / "disk"
    mount.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "none", str(mount)], capture_output=True, check=False
    )
    if done.returncode:
        pytest.skip("mounting a file system needs root")
    try:
        async_ckpt.export_hf({"w": torch.ones(1000)}, mount / "model", config_folder).result()
        state = {"v": torch.ones(MIB // 4), "w": torch.ones(MIB // 2)}
        with pytest.raises(StorageFullError) as caught:
            async_ckpt.export_hf(state, mount / "model", config_folder, max_shard_bytes=MIB).result()
        assert caught.value.needed_bytes > 3 * MIB > 2 * MIB > (caught.value.free_bytes or 0)  # of all shards
        assert_only(mount, "model")
        assert_same(weights_in(mount / "model"), {"w": torch.ones(1000)})

        subprocess.run(["mount", "-o", "remount,ro", str(mount)], check=True)
        with pytest.raises(StorageUnavailableError):
            async_ckpt.export_hf({"w": torch.ones(5)}, mount / "model", config_folder).result()
        with pytest.raises(StorageUnavailableError):
            async_ckpt.export_hf({"w": torch.ones(5)}, mount / "other", config_folder).result()
        assert_only(mount, "model")
        assert_same(weights_in(mount / "model"), {"w": torch.ones(1000)})
    finally:
        subprocess.run(["umount", "-l", str(mount)], check=True)


FAILING = """
import sys
import torch
import async_ckpt
from children import allow_tracing
allow_tracing()
print("ready", flush=True)
sys.stdin.readline()
state = {f"w{i}": torch.full((500,), 2.0) for i in range(4)}
handle = async_ckpt.export_hf(state, sys.argv[1], sys.argv[2], 4000)
print(type(handle.exception()).__name__, flush=True)
"""


@pytest.mark.skipif(sys.platform != "linux" or why_no_strace() is not None, reason="strace is needed")
@pytest.mark.parametrize(
    "fault",
    [
        "pwrite64:error=ENOSPC:when=2",
        "fsync:error=EIO:when=3",
        "link,linkat:error=EIO:when=1",
        "renameat2:error=EXDEV",
    ],
)
def test_a_disk_that_fails_in_the_middle_leaves_the_old_export_and_no_scratch(fault, nursery, tmp_path):
    folder = tmp_path / "outer" / "model"
    async_ckpt.export_hf(version(1), folder, config_of(tmp_path / "old", 1), 2000).result()
    (folder / "notes.txt").write_text("mine")
    os.mkfifo(tmp_path / "go")
    child = nursery.start(
        FAILING, folder, config_of(tmp_path / "new", 2), stdin=str(_opened_later(tmp_path / "go"))
    )
    child.wait_for_line("ready")
    with injected(child, fault):
        (tmp_path / "go").write_text("\n")
        ended = child.ended()

    name = {"pwrite64": "StorageFullError"}.get(fault.partition(":")[0], "StorageUnavailableError")
    if fault.startswith("renameat2"):  # a file system without exchange: two renames do it
        assert "NoneType" in ended.out
        assert_is_version(folder, 2)
    else:
        assert name in ended.out, ended.err
        assert_is_version(folder, 1)
    assert_only(folder.parent, "model")


def _opened_later(path: Path) -> Path:
    """A pipe that its reader need not wait for."""
    os.open(path, os.O_RDWR | os.O_NONBLOCK)
    return path


# --- stores -------------------------------------------------------------------------------------------------------


class Place:
    """A folder in a store, and what it holds behind the library's back."""

    def __init__(self, url: str, options: dict[str, Any], names: Callable[[], list[str]], read: Any) -> None:
        self.url, self.options, self.names, self.read = url, options, names, read

    def fetched(self, folder: Path) -> Path:
        for name in self.names():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(self.read(name))
        return folder


@pytest.fixture(params=["s3", "memory"])
def place(request: pytest.FixtureRequest) -> Place:
    name = f"bucket-{uuid.uuid4().hex[:12]}"
    if request.param == "memory":
        from fsspec.implementations.memory import MemoryFileSystem

        fs, root = MemoryFileSystem(), f"/{name}/models/a"
        return Place(
            f"memory://{name}/models/a",
            {},
            lambda: sorted(path.removeprefix(f"{root}/") for path in fs.find(root)),
            lambda path: fs.cat_file(f"{root}/{path}"),
        )
    server = request.getfixturevalue("s3")
    server.make_bucket(name)
    return Place(
        f"s3://{name}/models/a",
        {"storage_options": server.options},
        lambda: [key.removeprefix("models/a/") for key in server.keys(name)],
        lambda path: server.client.get_object(Bucket=name, Key=f"models/a/{path}")["Body"].read(),
    )


def test_a_model_in_a_store_loads_and_the_next_one_leaves_no_shard_of_it(place, tmp_path):
    model = gpt2()
    wanted = state_of(model)
    handle = async_ckpt.export_hf(model, place.url, max_shard_bytes=20_000, **place.options)
    spoil(model)
    report = handle.result()

    first = place.fetched(tmp_path / "first")
    assert_loads(first, wanted, transformers.GPT2LMHeadModel)
    assert report.num_bytes == sum(path.stat().st_size for path in first.iterdir())
    assert "model.safetensors.index.json" in place.names()

    async_ckpt.export_hf(model, place.url, **place.options).result()
    assert place.names() == ["config.json", "generation_config.json", "model.safetensors"]
    assert_loads(place.fetched(tmp_path / "second"), state_of(model), transformers.GPT2LMHeadModel)


def test_the_config_in_a_store_stays_where_only_weights_come(place, tmp_path):
    async_ckpt.export_hf(
        version(1), place.url, config_of(tmp_path / "config", 2), 2000, **place.options
    ).result()
    async_ckpt.export_hf(version(2), place.url, **place.options).result()

    assert_is_version(place.fetched(tmp_path / "fetched"), 2)


def test_an_adapter_in_a_store_comes_with_its_config_last_and_keeps_a_model_away(place, tmp_path):
    model = PeftModel("mine")
    async_ckpt.export_hf(model, place.url, **place.options).result()
    with pytest.raises(FileExistsError, match="holds an adapter"):
        async_ckpt.export_hf(version(1), place.url, **place.options).result()

    assert place.names() == ["adapter_config.json", "adapter_model.safetensors"]
    assert_same(
        weights_in(place.fetched(tmp_path / "fetched")),
        adapter_of(model.base_model.model.state_dict(), "mine"),
    )


@pytest.fixture
def watched(s3: Any) -> Iterator[tuple[FaultyProxy, Place]]:
    """A folder in a bucket behind a proxy."""
    name = f"bucket-{uuid.uuid4().hex[:12]}"
    s3.make_bucket(name)
    with FaultyProxy(s3.endpoint) as proxy:
        options = {**s3.options, "endpoint": proxy.endpoint}
        yield (
            proxy,
            Place(
                f"s3://{name}/a",
                {"storage_options": options},
                lambda: [key.removeprefix("a/") for key in s3.keys(name)],
                lambda path: s3.client.get_object(Bucket=name, Key=f"a/{path}")["Body"].read(),
            ),
        )


def changes(proxy: FaultyProxy) -> list[str]:
    """What was put and deleted, in order: `+name` and `-name`."""
    return [
        ("-" if request.method == "DELETE" else "+") + request.target.partition("?")[0].rpartition("/")[2]
        for request in proxy.requests
        if request.kind in ("put_object", "delete_object")
    ]


def test_in_a_store_the_config_goes_first_and_comes_last(watched, tmp_path):
    proxy, place = watched
    async_ckpt.export_hf(
        version(1), place.url, config_of(tmp_path / "config", 1), 4000, **place.options
    ).result()
    assert changes(proxy) == [
        "+model-00001-of-00002.safetensors", "+model-00002-of-00002.safetensors", "+model.safetensors.index.json",
        "+config.json",
    ]  # fmt: skip
    before = len(changes(proxy))
    async_ckpt.export_hf(version(2), place.url, config_of(tmp_path / "config", 2), **place.options).result()

    assert changes(proxy)[before:] == [
        "-config.json", "+model.safetensors", "-model-00001-of-00002.safetensors", "-model-00002-of-00002.safetensors",
        "-model.safetensors.index.json", "+config.json",
    ]  # fmt: skip
    assert_is_version(place.fetched(tmp_path / "fetched"), 2)


def test_an_upload_that_fails_in_the_middle_leaves_nothing_that_loads_and_the_next_export_mends_it(
    watched, tmp_path
):
    proxy, place = watched
    async_ckpt.export_hf(
        version(1), place.url, config_of(tmp_path / "config", 1), 2000, **place.options
    ).result()
    fault = proxy.answer("AccessDenied", target="model-00002-of-00002", method="PUT")
    with pytest.raises(StorageUnavailableError):
        async_ckpt.export_hf(
            version(2), place.url, config_of(tmp_path / "config", 2), 4000, **place.options
        ).result()
    assert fault.hits
    assert "config.json" not in place.names()
    proxy.clear()
    async_ckpt.export_hf(
        version(3), place.url, config_of(tmp_path / "config", 3), 4000, **place.options
    ).result()

    assert_is_version(place.fetched(tmp_path / "fetched"), 3)


def test_a_large_shard_goes_up_in_parts(watched, tmp_path):
    proxy, place = watched
    state = {"w": torch.arange(10 * MIB // 2), "v": torch.arange(3)}
    async_ckpt.export_hf(state, place.url, **place.options).result()

    assert proxy.count(kind="upload_part") >= 2
    assert_same(weights_in(place.fetched(tmp_path / "fetched")), state)


# --- one copy for two ---------------------------------------------------------------------------------------------


def trained(mib: int = 0) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A model and an optimizer with a state; with parameters of `mib` MiB, what a guard may defer."""
    model: torch.nn.Module = gpt2()
    if mib:
        model = torch.nn.ModuleDict(
            {"w": torch.nn.Linear(512, mib * 512, bias=False), "v": torch.nn.Linear(3, 3)}
        )
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return model, optimizer


def unseen_write(tensor: torch.Tensor, value: float) -> None:
    """As fused kernels do it: no version counter moves."""
    tensor.data.fill_(value)


def save_to(where: str, state: Any, folder: Path, also: Any, **options: Any) -> tuple[Any, Any]:
    """The handle of a save at one of the places, and what loads it."""
    if where == "save":
        handle = async_ckpt.save(state, folder / "x.tar", also=also, **options)
        return handle, lambda: async_ckpt.load(folder / "x.tar")
    root = folder / "run" if where == "run" else f"memory://{uuid.uuid4().hex}/run"
    ckpt = open_run(root, **({"host_bytes": 16 * MIB} if where != "run" else {}))
    handle = ckpt.save(state, step=1, also=also, **options)

    def load() -> Any:
        with ckpt:
            return ckpt.load(1)

    return handle, load


@pytest.mark.parametrize("where", ["save", "run", "tight and in order"])
def test_a_checkpoint_made_from_the_exports_copy_is_the_one_that_is_made_without(where, tmp_path, held_back):
    model, optimizer = trained(20 if where == "tight and in order" else 0)
    state = {"model": model, "optimizer": optimizer, "step": 5, "name": "x"}
    async_ckpt.save(state, tmp_path / "alone.tar").result()
    wanted = async_ckpt.load(tmp_path / "alone.tar")

    also = async_ckpt.export_hf(model, tmp_path / "hf")
    handle, load = save_to(where, state, tmp_path, also)
    spoil(model)
    optimizer.step()
    report = handle.result()
    held_back.set()
    also.result()

    assert difference(load(), wanted) is None
    assert report.num_bytes > 0
    assert_same(
        weights_in(tmp_path / "hf"), {k: v for k, v in wanted["model"].items() if k != "lm_head.weight"}
    )


def test_what_the_export_has_copied_is_not_read_again(tmp_path, held_back):
    """Whoever changes weights in between has broken the word that both are of one moment; it shows who was read."""
    model, optimizer = trained()
    wanted = state_of(model)
    also = async_ckpt.export_hf(model, tmp_path / "hf")
    for parameter in model.parameters():
        unseen_write(parameter, 7)
    handle = async_ckpt.save({"model": model, "optimizer": optimizer}, tmp_path / "x.tar", also=also)
    handle.result()
    held_back.set()
    also.result()

    assert_same(async_ckpt.load(tmp_path / "x.tar", select="model")["model"], wanted)


def test_what_was_seen_to_change_since_the_export_is_read_again(tmp_path, held_back):
    model, optimizer = trained()
    also = async_ckpt.export_hf(model, tmp_path / "hf")
    exported = state_of(model)
    optimizer.step()
    handle = async_ckpt.save({"model": model}, tmp_path / "x.tar", also=also)
    wanted = state_of(model)
    spoil(model)
    handle.result()
    held_back.set()
    also.result()

    assert difference(wanted, exported) is not None
    assert_same(async_ckpt.load(tmp_path / "x.tar")["model"], wanted)
    del exported["lm_head.weight"]
    assert_same(weights_in(tmp_path / "hf"), exported)


def test_memory_that_has_become_anothers_is_not_taken_for_what_was_exported(tmp_path, held_back):
    memory = bytearray(4096)
    first = torch.frombuffer(memory, dtype=torch.float32)
    unseen_write(first, 1)
    also = async_ckpt.export_hf({"w": first}, tmp_path / "hf")
    del first
    second = torch.frombuffer(memory, dtype=torch.float32)
    unseen_write(second, 2)
    async_ckpt.save({"w": second}, tmp_path / "x.tar", also=also).result()
    held_back.set()
    also.result()

    assert bool((async_ckpt.load(tmp_path / "x.tar")["w"] == 2).all())
    assert bool((weights_in(tmp_path / "hf")["w"] == 1).all())


def test_views_and_tied_tensors_are_found_in_the_copy_of_their_memory(tmp_path, held_back):
    whole = torch.arange(24.0)
    wanted = {"turned": whole.view(4, 6).T, "tail": whole[20:], "same": whole, "again": whole}
    expected = {name: tensor.clone() for name, tensor in wanted.items()}
    also = async_ckpt.export_hf({"w": whole}, tmp_path / "hf")
    unseen_write(whole, 7)
    with torch.inference_mode():
        handle = async_ckpt.save(wanted, tmp_path / "x.tar", also=also)
    handle.result()
    held_back.set()
    also.result()

    assert_same(async_ckpt.load(tmp_path / "x.tar"), expected)


@pytest.mark.parametrize("when", ["ended", "of other tensors"])
def test_an_export_that_has_nothing_to_give_does_no_harm(when, tmp_path):
    model, optimizer = trained()
    also = async_ckpt.export_hf(model if when == "ended" else {"x": torch.ones(3)}, tmp_path / "hf")
    also.result()
    wanted = state_of(model)
    handle = async_ckpt.save({"model": model, "optimizer": optimizer}, tmp_path / "x.tar", also=also)
    spoil(model)
    handle.result()

    assert_same(async_ckpt.load(tmp_path / "x.tar", select="model")["model"], wanted)


def test_an_export_that_failed_does_not_take_the_checkpoint_with_it(tmp_path):
    model, _ = trained(4)
    (tmp_path / "file").touch()
    also = async_ckpt.export_hf(model, tmp_path / "file" / "hf")
    handle = async_ckpt.save({"model": model}, tmp_path / "x.tar", also=also)
    wanted = state_of(model)
    spoil(model)
    handle.result()

    assert isinstance(also.exception(), StorageUnavailableError)
    assert_same(async_ckpt.load(tmp_path / "x.tar")["model"], wanted)


@pytest.mark.parametrize("where", ["save", "run", "tight and in order"])
@pytest.mark.parametrize("guarded", ["export", "save", "both"])
def test_a_guard_on_either_keeps_the_step_off_what_is_still_to_be_copied(where, guarded, tmp_path):
    model, optimizer = trained(24)
    wanted = state_of(model)
    also = async_ckpt.export_hf(model, tmp_path / "hf", guard=optimizer if guarded != "save" else None)
    state = {"model": model, "optimizer": optimizer}
    handle, load = save_to(where, state, tmp_path, also, guard=optimizer if guarded != "export" else None)
    optimizer.step()
    handle.result()
    also.result()

    assert_same(load()["model"], wanted)
    assert_same(weights_in(tmp_path / "hf"), wanted)
    assert difference(state_of(model), wanted) is not None


def test_a_guarded_export_is_of_the_moment_of_the_call(tmp_path, no_copying):
    model, optimizer = trained(8)
    wanted = state_of(model)
    handle = async_ckpt.export_hf(model, tmp_path / "hf", guard=optimizer)
    assert not handle.staging_completion.done()
    stepping = Call(optimizer.step)
    stepping.wait_until_inside("hold")
    no_copying.set()
    stepping.outcome()
    handle.result()

    assert_same(weights_in(tmp_path / "hf"), wanted)


def test_a_torn_export_tears_the_checkpoint_that_is_made_from_it(tmp_path, no_copying):
    model, optimizer = trained(8)
    also = async_ckpt.export_hf(model, tmp_path / "outer" / "hf", guard=optimizer)
    handle = async_ckpt.save(
        {"model": model, "optimizer": optimizer}, tmp_path / "x.tar", also=also, guard=optimizer
    )
    with torch.no_grad():
        model["w"].weight.add_(1)
    no_copying.set()

    for failed in (also, handle):
        error = failed.exception()
        assert isinstance(error, TornSnapshotError)
        assert error.names == ("w.weight",)
    assert not (tmp_path / "x.tar").exists()
    assert not (tmp_path / "outer").exists() or os.listdir(tmp_path / "outer") == []


def test_an_export_that_was_torn_before_has_nothing_to_give(tmp_path, no_copying):
    model, optimizer = trained(8)
    also = async_ckpt.export_hf(model, tmp_path / "hf", guard=optimizer)
    with torch.no_grad():
        model["w"].weight.add_(1)
    no_copying.set()
    assert isinstance(also.exception(), TornSnapshotError)
    async_ckpt.save({"model": model}, tmp_path / "x.tar", also=also).result()

    assert_same(async_ckpt.load(tmp_path / "x.tar")["model"], state_of(model))


def test_a_torn_checkpoint_leaves_the_export_alone(tmp_path, no_copying):
    model, optimizer = trained(8)
    wanted = state_of(model)
    also = async_ckpt.export_hf(model, tmp_path / "hf")  # not guarded: copied at once
    handle = async_ckpt.save(
        {"model": model, "optimizer": optimizer}, tmp_path / "x.tar", also=also, guard=optimizer
    )
    optimizer.state[model["w"].weight]["exp_avg"].add_(1)
    no_copying.set()
    also.result()

    error = handle.exception()
    assert isinstance(error, TornSnapshotError)
    assert error.names == ("optimizer.state.0.exp_avg",)
    assert_same(weights_in(tmp_path / "hf"), wanted)


def test_also_takes_the_handle_of_an_export_and_nothing_else(tmp_path):
    """A wrapped function may change the copies that it was given; an export does not."""
    state = {"w": torch.ones(3)}
    saved = async_ckpt.save(state, tmp_path / "y.tar")
    wrapped = async_ckpt.wrap(torch.save)(state, tmp_path / "y.pt")
    exported = async_ckpt.export_hf(state, tmp_path / "hf")
    for wrong in (saved, wrapped, object(), True, tmp_path, [exported]):
        with pytest.raises(TypeError, match="also= takes the handle that export_hf"):
            async_ckpt.save(state, tmp_path / "x.tar", also=wrong)
        with open_run(tmp_path / "run") as ckpt, pytest.raises(TypeError, match="also= takes the handle"):
            ckpt.save(state, step=1, also=wrong)
    for handle in (saved, wrapped, exported):
        handle.result()

    assert not (tmp_path / "x.tar").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="forks as Linux has them")
def test_in_a_forked_child_the_exports_copy_is_not_touched(tmp_path, nursery):
    """It is not there: reading it would end the child."""
    script = """
import os, sys
import torch, async_ckpt
folder = sys.argv[1]
os.mkfifo(folder + "/pipe")
first = async_ckpt.wrap(lambda path: open(path, "w").write(open(folder + "/pipe").read()))(folder + "/first")
w = torch.ones(1000)
also = async_ckpt.export_hf({"w": w}, folder + "/hf")
child = os.fork()
if child == 0:
    async_ckpt.save({"w": w}, folder + "/x.tar", also=also).result()
    os._exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
with open(folder + "/pipe", "w") as pipe:
    pipe.write("go")
also.result()
"""
    ended = nursery.run(script, tmp_path)

    assert (ended.status, ended.out) == (0, "0\n"), ended.err
    assert_same(async_ckpt.load(tmp_path / "x.tar"), {"w": torch.ones(1000)})


# --- its life -----------------------------------------------------------------------------------------------------


@pytest.mark.skipif(sys.platform != "linux", reason="forks as Linux has them")
def test_a_program_that_ends_right_after_the_call_loses_nothing(nursery, tmp_path):
    script = """
import sys
import torch, async_ckpt
state = {"w": torch.arange(3_000_000)}
async_ckpt.save(state, sys.argv[1] + "/x.tar", also=async_ckpt.export_hf(state, sys.argv[1] + "/hf"))
state["w"].zero_()
"""
    ended = nursery.run(script, tmp_path)

    assert (ended.status, ended.err) == (0, "")
    for found in (async_ckpt.load(tmp_path / "x.tar"), weights_in(tmp_path / "hf")):
        assert_same(found, {"w": torch.arange(3_000_000)})
    assert_only(tmp_path, "x.tar", "hf")


def test_the_report_and_the_progress_count_what_was_written(out, config_folder, held_back):
    state = {"w": torch.ones(5 * MIB // 4), "v": torch.ones(3)}
    handle = async_ckpt.export_hf(state, out, config_folder, max_shard_bytes=1000)
    handle.wait_staged()
    before = handle.progress
    held_back.set()
    report = handle.result()
    after = handle.progress

    assert before.staged_bytes == before.total_bytes > 5 * MIB > before.written_bytes == 0
    num_bytes = sum((out / name).stat().st_size for name in names_below(out))
    assert after.written_bytes == after.total_bytes == after.staged_bytes == num_bytes
    assert (report.status, report.step, report.path) == ("committed", None, str(out))
    assert (report.num_bytes, report.num_tensors) == (num_bytes, 2)
    assert report.destinations[0].num_bytes == num_bytes
    assert report.total_seconds >= report.write_seconds > 0
    assert report.total_seconds >= report.commit_seconds > 0
    assert 0 < report.stall_seconds < report.total_seconds
    assert handle.path == str(out)


def test_many_exports_keep_no_thread_no_file_no_memory_and_no_model(tmp_path):
    def counted() -> tuple[int, int]:
        # The crews' threads stay, and are started as they are needed: how many there are says nothing.
        others = [t for t in threading.enumerate() if not t.name.startswith("async_ckpt-")]
        return len(others), len(os.listdir("/proc/self/fd"))

    def settle() -> None:
        assert_only(tmp_path, "hf")
        until(lambda: not any("append" in thread.name for thread in threading.enumerate()))
        gc.collect()

    model: Any = mixtral()
    handles = [async_ckpt.export_hf(model, tmp_path / "hf", max_shard_bytes=20_000)]
    handles[0].result()
    settle()
    before = counted()
    for number in range(20):
        handles.append(async_ckpt.export_hf(model, tmp_path / "hf", max_shard_bytes=20_000))
        if number % 5 == 0:
            assert async_ckpt.export_hf(model, __file__ + "/nowhere").exception() is not None
    for handle in handles:
        handle.result()
    gone = weakref.ref(model)
    del model
    settle()

    assert counted() <= before
    assert gone() is None
    assert "0 bytes lent" in repr(host_memory())


def test_bits_are_those_of_the_tensor_whatever_they_mean(out):
    """NaNs keep their payload, and minus nought its sign."""
    state = {"w": torch.tensor([0x7FC00001, -0x80000000, 1], dtype=torch.int32).view(torch.float32)}
    async_ckpt.export_hf(state, out).result()

    assert torch.equal(bits_of(weights_in(out)["w"]), bits_of(state["w"]))
