"""Versions of quantised models: weights and scales as their checkpoints have them, or an error that names the method."""

import json
from typing import Any

import pytest
import torch
from exported import PeftModel, adapter_of, assert_same, gpt2, state_of, transformers, weights_in
from quantised import changed_bits, checkpoint, experts, in_fp8, llama, with_experts_apart

import async_ckpt
from async_ckpt import Publisher, StateMismatchError, Subscriber, UnsupportedStateError
from async_ckpt.weights.delta import INDEX, parse

pytest.importorskip("transformers.quantizers.quantizer_finegrained_fp8", reason="needs transformers 5")


@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
@pytest.mark.parametrize("scales", ["float", "ue8m0"])
def test_a_folder_and_a_module_follow_a_model_in_fp8_and_the_files_are_those_of_transformers(
    scales, encoding, tmp_path
):
    model, copy = (in_fp8(llama(), scale_fmt=scales) for _ in range(2))
    with (
        Publisher(tmp_path / "weights", encoding=encoding) as publisher,
        Subscriber(tmp_path / "weights") as subscriber,
    ):
        for version in (1, 2, 3):
            publisher.publish(model, version).result()
            subscriber.pull(tmp_path / "local")
            subscriber.pull(copy)
            model.save_pretrained(tmp_path / f"hf-{version}")

            assert_same(weights_in(tmp_path / "local"), weights_in(tmp_path / f"hf-{version}"))
            assert_same(dict(copy.state_dict()), dict(model.state_dict()))
            changed_bits(model)
    assert parse((tmp_path / "weights" / "weight_v000003" / INDEX).read_bytes(), 3).base == 2
    found = weights_in(tmp_path / "local")
    wanted = {"float": torch.float32, "ue8m0": torch.float8_e8m0fnu}[scales]
    assert found["model.layers.0.mlp.up_proj.weight"].dtype == torch.float8_e4m3fn
    assert found["model.layers.0.mlp.up_proj.weight_scale_inv"].dtype == wanted
    configs = [json.loads((tmp_path / folder / "config.json").read_text()) for folder in ("local", "hf-3")]
    assert configs[0]["quantization_config"] == configs[1]["quantization_config"]
    assert configs[0]["quantization_config"]["quant_method"] == "fp8"


def test_an_export_has_scales_of_mxfp8_too(tmp_path):
    model = in_fp8(llama(), scale_fmt="ue8m0")
    async_ckpt.export_hf(model, tmp_path / "out").result()
    model.save_pretrained(tmp_path / "hf")

    assert_same(weights_in(tmp_path / "out"), weights_in(tmp_path / "hf"))


def test_experts_in_fp8_have_a_scale_each_as_in_the_checkpoint_that_was_loaded(tmp_path, monkeypatch):
    from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

    # Without a GPU it would dequantise what it loads.
    monkeypatch.setattr(FineGrainedFP8HfQuantizer, "validate_environment", lambda *_, **__: None)
    made = in_fp8(experts())
    state = with_experts_apart(made.state_dict())
    folder = checkpoint(tmp_path / "checkpoint", made, state)
    model = type(made).from_pretrained(folder)
    with Publisher(tmp_path / "weights") as publisher, Subscriber(tmp_path / "weights") as subscriber:
        publisher.publish(model, 1).result()
        subscriber.pull(tmp_path / "local")
        assert_same(weights_in(tmp_path / "local"), state)
        changed_bits(model)
        publisher.publish(model, 2).result()
        subscriber.pull(tmp_path / "local")
        assert_same(weights_in(tmp_path / "local"), with_experts_apart(model.state_dict()))
        with pytest.raises(
            StateMismatchError, match="other weights in memory than in its checkpoints; pull into a folder"
        ):
            subscriber.pull(model)
        with pytest.raises(
            UnsupportedStateError, match=r"the scale of '.*experts.0.*weight' has no name in its checkpoints"
        ):
            publisher.publish(made, 3)


def test_weights_that_a_training_has_quantised_itself_are_published_by_the_names_that_it_gives(tmp_path):
    """As trainers of reinforcement learning do it: a mapping, and the config of the model that the engine has."""
    model = in_fp8(llama())
    folder = checkpoint(tmp_path / "engine", model, state_of(model))
    with Publisher(tmp_path / "weights") as publisher:
        for version in (1, 2):
            changed_bits(model)
            publisher.publish(dict(model.state_dict()), version, config_folder=folder).result()
    Subscriber(tmp_path / "weights").pull(tmp_path / "local")

    assert_same(weights_in(tmp_path / "local"), dict(model.state_dict()))
    assert (tmp_path / "local" / "config.json").read_bytes() == (folder / "config.json").read_bytes()


@pytest.mark.parametrize("bits", [4, 8])
def test_a_model_of_bitsandbytes_is_published_as_transformers_saves_it(bits, tmp_path):
    pytest.importorskip("bitsandbytes")
    llama().save_pretrained(tmp_path / "base")
    config = transformers.BitsAndBytesConfig(load_in_4bit=bits == 4, load_in_8bit=bits == 8, bnb_4bit_quant_type="nf4")
    model = transformers.LlamaForCausalLM.from_pretrained(
        tmp_path / "base", quantization_config=config, device_map="cpu"
    )
    model.save_pretrained(tmp_path / "hf")
    with Publisher(tmp_path / "weights") as publisher:
        publisher.publish(model, 1).result()
    Subscriber(tmp_path / "weights").pull(tmp_path / "local")

    assert_same(weights_in(tmp_path / "local"), weights_in(tmp_path / "hf"))
    with pytest.raises(UnsupportedStateError, match=r"the module's state dict has a copy of it.*pull into a folder"):
        Subscriber(tmp_path / "weights").pull(model)


@pytest.mark.parametrize(("preset", "stored"), [("FP8_DYNAMIC", "weight"), ("W4A16", "weight_packed")])
def test_a_model_of_compressed_tensors_is_published_as_its_checkpoint_is(preset, stored, tmp_path):
    quantization = pytest.importorskip("compressed_tensors.quantization")
    from compressed_tensors.compressors import ModelCompressor

    scheme = quantization.preset_name_to_scheme(preset, ["Linear"])
    if scheme.weights.group_size:
        scheme.weights.group_size = 32
    form = "float-quantized" if stored == "weight" else "pack-quantized"
    config = quantization.QuantizationConfig(
        config_groups={"all": scheme}, ignore=["lm_head"], quantization_status="compressed", format=form
    )
    made = llama()
    quantization.apply_quantization_config(made, config)
    for part in made.modules():
        if hasattr(part, "weight_scale"):
            part.weight_scale.data.fill_(0.01)
    ModelCompressor(quantization_config=config).compress_model(made)
    state = state_of(made)
    folder = checkpoint(tmp_path / "checkpoint", made, state, config.model_dump(mode="json"))
    model, copy = (type(made).from_pretrained(folder) for _ in range(2))
    with Publisher(tmp_path / "weights") as publisher, Subscriber(tmp_path / "weights") as subscriber:
        publisher.publish(model, 1).result()
        subscriber.pull(tmp_path / "local")
        assert_same(weights_in(tmp_path / "local"), state)
        model.model.layers[0].mlp.up_proj.weight_scale.data.fill_(0.02)
        publisher.publish(model, 2).result()
        subscriber.pull(tmp_path / "local")
        subscriber.pull(copy)
        assert f"model.layers.0.mlp.up_proj.{stored}" in state
        assert_same(weights_in(tmp_path / "local"), dict(model.state_dict()))
        assert_same(dict(copy.state_dict()), dict(model.state_dict()))
        model(torch.arange(4)[None])
        with pytest.raises(UnsupportedStateError, match="its first forward pass has decompressed its weights"):
            publisher.publish(model, 3)


class Quantiser:
    """What transformers' has, of which only this is asked."""

    def __init__(self, method: str, *, is_serializable: bool = True) -> None:
        self.quantization_config = type("Config", (), {"quant_method": method})()
        self._answer = is_serializable

    def is_serializable(self) -> bool:
        return self._answer


@pytest.mark.parametrize(
    ("quantiser", "shown"),
    [
        (Quantiser("gptq"), "gptq"),
        (Quantiser("mxfp4"), "mxfp4"),
        (Quantiser("fp8", is_serializable=False), "fp8"),
        (object(), "object"),
    ],
    ids=["gptq", "mxfp4", "fp8 that is not saved", "unknown"],
)
def test_a_model_whose_names_cannot_be_known_is_refused_by_its_method_also_as_a_part(quantiser, shown, tmp_path):
    model = gpt2()
    model.hf_quantizer = quantiser
    with Publisher(tmp_path / "weights") as publisher:
        for given in (model, torch.nn.ModuleDict({"policy": model})):
            with pytest.raises(UnsupportedStateError, match=f"quantised by {shown}, so its tensors.*publish a mapping"):
                publisher.publish(given, 1)
        with async_ckpt.snapshot({"model": model}) as snap, pytest.raises(UnsupportedStateError, match=shown):
            publisher.publish(snap["model"], 1)
    assert not (tmp_path / "weights").exists()


def test_an_adapter_of_a_base_that_is_quantised_by_any_method_is_published(tmp_path):
    model = PeftModel("default")
    model.base_model.model.hf_quantizer = Quantiser("gptq")
    with Publisher(tmp_path / "weights") as publisher:
        publisher.publish(model, 1).result()
    Subscriber(tmp_path / "weights").pull(tmp_path / "local")

    assert_same(weights_in(tmp_path / "local"), adapter_of(model.base_model.model.state_dict(), "default"))


def test_a_module_that_is_quantised_otherwise_is_refused_by_name_and_stays_as_it_is(tmp_path):
    with Publisher(tmp_path / "weights") as publisher:
        publisher.publish(in_fp8(llama()), 1).result()
    plain, other = llama(), in_fp8(llama(), scale_fmt="ue8m0")
    for module, told in (
        (plain, r"unknown to the module: .*weight_scale_inv"),
        (
            other,
            r"of another dtype or shape: .*weight_scale_inv.*has float32 \[4, 8\], and float8_e8m0fnu \[4, 8\] in the",
        ),
    ):
        were = state_of(module)
        with pytest.raises(StateMismatchError, match=told):
            Subscriber(tmp_path / "weights").pull(module)
        assert_same(state_of(module), were)


ON_RANKS = """
import async_ckpt
class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        bits = numbered(37, 16).to(torch.uint8) % 0x3f
        self.weight = torch.nn.Parameter(bits.view(torch.float8_e4m3fn), requires_grad=False)
        self.weight_scale_inv = torch.nn.Parameter((numbered(5, 2) + 1).to(torch.float8_e8m0fnu), requires_grad=False)
model = Layer()
torch.save(dict(model.state_dict()), here.root + ".pt") if here.rank == 0 else None
spread = {name: distribute_tensor(tensor.view(torch.uint8), mesh_of(), [Shard(0)]) for name, tensor in model.state_dict().items()}
spread = {name: DTensor.from_local(one.to_local().view(model.state_dict()[name].dtype), mesh_of(), [Shard(0)],
    shape=one.shape, stride=one.stride()) for name, one in spread.items()}
with async_ckpt.Publisher(here.root) as publisher:
    publisher.publish(spread, 1).result()
here.meet("published")
"""


def test_weights_and_scales_that_are_spread_over_ranks_are_pulled_as_whole_ones(worlds, tmp_path):
    worlds.run(2, ON_RANKS)
    Subscriber(worlds.root).pull(tmp_path / "local")
    wanted: dict[str, Any] = torch.load(f"{worlds.root}.pt")

    assert_same(weights_in(tmp_path / "local"), wanted)
