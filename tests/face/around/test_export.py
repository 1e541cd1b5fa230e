"""`export_hf`: what transformers loads, what lies beside it, and what PEFT would have written of an adapter."""

import copy
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from exported import (
    SMALL,
    Decoder,
    LoraConfig,
    PeftModel,
    PeftType,
    adapter_of,
    assert_loads,
    assert_only,
    assert_same,
    gpt2,
    held_back,  # noqa: F401
    mixtral,
    spoil,
    state_of,
    weights_in,
)
from states import names_below

os.environ["HF_HUB_OFFLINE"] = "1"  # read when it is imported

import transformers
from safetensors import safe_open
from tokenizers import Tokenizer, models, pre_tokenizers

import async_ckpt
from async_ckpt import StorageUnavailableError, UnsupportedStateError
from async_ckpt.core.saving.kept_memory import host_memory

# --- models, and what is read back --------------------------------------------------------------------------------


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


def clip() -> Any:
    """A config of configs."""
    both = {k: v for k, v in SMALL.items() if k != "vocab_size"}
    text = {**both, "vocab_size": 99, "max_position_embeddings": 16}
    vision = {**both, "image_size": 16, "patch_size": 8}
    return transformers.CLIPModel(transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=8))


def compiled(model: torch.nn.Module) -> Any:
    return torch.compile(model, backend="eager")


def metadata_of(path: Path) -> dict[str, str]:
    with safe_open(path, "pt") as file:
        return file.metadata()


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """A folder that is not there yet, in one where nothing else is."""
    (tmp_path / "outer").mkdir()
    return tmp_path / "outer" / "model"


# --- what transformers loads --------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [gpt2, llama_in_bfloat16, t5, bart, marian, bert, mixtral, clip])
def test_a_model_loads_as_it_was_at_the_call_from_what_save_pretrained_would_have_written(make, out, tmp_path):
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


@pytest.mark.parametrize("max_shard_bytes", [0, -1, 0.5, float("nan"), None, "5GB"])
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
    with async_ckpt.snapshot({"model": wrap(model)}) as snap:
        async_ckpt.export_hf(snap["model"], tmp_path / "held").result()

    for folder in (out, tmp_path / "held"):
        assert_loads(folder, wanted, transformers.GPT2LMHeadModel)
        assert json.loads((folder / "config.json").read_text())["architectures"] == ["GPT2LMHeadModel"]


def test_a_submodule_that_is_really_called_so_keeps_its_name(out):
    """Wrappers are known by their class."""
    model = torch.nn.ModuleDict({"module": torch.nn.Linear(2, 3)})
    for given in (model, torch.nn.DataParallel(model)):
        async_ckpt.export_hf(given, out).result()
        assert sorted(weights_in(out)) == ["module.bias", "module.weight"]


@pytest.mark.parametrize("wrap", [compiled, torch.nn.DataParallel], ids=["compiled", "parallel"])
def test_the_names_of_a_mapping_are_written_as_they_are_and_warned_of_if_they_look_wrapped(wrap, out):
    model = torch.nn.Sequential(torch.nn.Linear(2, 3))
    state = wrap(model).state_dict()
    with pytest.warns(RuntimeWarning, match="does not load such names of a wrapped model"):
        async_ckpt.export_hf(state, out).result()
    assert_same(weights_in(out), dict(state))
    async_ckpt.export_hf({"a": torch.ones(2), "module.b": torch.ones(2)}, out).result()


def test_every_dtype_that_safetensors_knows_keeps_every_bit(out):
    raw = torch.randint(0, 256, (64,), dtype=torch.uint8)
    names = (
        "float64 float32 float16 bfloat16 int64 int32 int16 int8 uint64 uint32 uint16 uint8 float8_e4m3fn float8_e5m2"
    )
    state = {name: raw.view(getattr(torch, name)) for name in names.split()}
    state |= {
        "bool": raw > 99,
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 3),
        "one": torch.ones(1).bool(),
        "payload of a NaN, and minus nought": torch.tensor([0x7FC00001, -0x80000000])
        .to(torch.int32)
        .view(torch.float32),
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
    assert [name for name in state if (8 + length + header[name]["data_offsets"][0]) % state[name].itemsize] == []


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


def test_config_and_tokenizer_come_from_the_folder_even_if_it_goes_at_once(from_the_hub, out, held_back):  # noqa: F811
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
        ({"w": torch.ones(3), "step": 5}, r"'step' is an int"),
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
        ({"w": torch.ones(3, dtype=torch.complex128)}, r"'w': safetensors does not know torch.complex128"),
        ({"w": torch.ones(3, dtype=torch.uint8).view(torch.bits8)}, r"'w': safetensors does not know torch.bits8"),
        ({"__metadata__": torch.ones(3)}, r"'__metadata__': safetensors does not accept this name"),
        ({"w\ud800": torch.ones(3)}, r"'w\\ud800': safetensors does not accept this name"),
    ],
)  # fmt: skip
def test_what_is_no_plain_tensor_is_refused_by_name_before_anything_is_written(state, why, out):
    with pytest.raises(UnsupportedStateError, match=why):
        async_ckpt.export_hf(state, out / "deeper")

    assert_only(out.parent)
    assert not host_memory()._bytes(held=False)


@pytest.mark.parametrize("name", ["hf.tar.gz", "hf.ZIP", "hf.tar.zst", "hf.tgz/"])
def test_a_folder_with_the_name_of_an_archive_is_refused(tmp_path, name):
    for destination in (f"{tmp_path}/{name}", f"memory://{tmp_path}/{name}"):
        with pytest.raises(ValueError, match="name of a compressed archive"):
            async_ckpt.export_hf({"w": torch.ones(3)}, destination)
    assert_only(tmp_path)


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
    wanted = adapter_of({name.replace("_orig_mod.", ""): t for name, t in inner.state_dict().items()}, "default")
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
def test_the_file_of_an_adapter_has_the_tensors_that_peft_itself_would_have_written(out, tmp_path, options, tied):
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(llama(tie_word_embeddings=tied, attention_bias=True), peft.LoraConfig(r=2, **options))
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
    with pytest.raises(UnsupportedStateError, match="not LoRA's; give a config_folder without"):
        async_ckpt.export_hf(llama(), out, adapter_config)
    with pytest.raises(UnsupportedStateError, match=r"type IA3 cannot be exported.*wrap\("):
        async_ckpt.export_hf(PeftModel("a", peft_type=PeftType.IA3), out)
    with pytest.raises(UnsupportedStateError, match="the config contains an object, which JSON cannot represent"):
        async_ckpt.export_hf(PeftModel("a", odd=object()), out)

    assert_only(out.parent)
