"""Versions of a LoRA adapter: the files that PEFT writes, which engines load beside a base that they have."""

import json
from typing import Any

import pytest
import torch
from exported import SMALL, LoraConfig, PeftModel, Tensors, assert_same, spoil, state_of, transformers, weights_in
from published import changed, edit, weights_below
from states import open_run

import async_ckpt
from async_ckpt import Publisher, StateMismatchError, StorageUnavailableError, Subscriber, UnsupportedStateError
from async_ckpt.core.host.shared_memory import CAN_SHARE
from async_ckpt.weights.delta import INDEX, parse

peft = pytest.importorskip("peft", reason="compares with the files that PEFT writes")

# PEFT says when it saves embeddings, looks for the config of a base that is nowhere, and asks transformers what it renames.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore:.is_gradient_checkpointing:FutureWarning")

FILES = ["adapter_config.json", "adapter_model.safetensors"]
OPTIONS: dict[str, dict[str, Any]] = {
    "some layers": {"target_modules": ["q_proj", "v_proj"]},
    "with ranks of their own, and DoRA": {
        "target_modules": "all-linear",
        "rank_pattern": {"layers.0.self_attn.q_proj": 4},
        "use_dora": True,
    },
    "a head trained whole, and biases": {
        "target_modules": r".*\.[qk]_proj",
        "modules_to_save": ["lm_head"],
        "bias": "lora_only",
    },
    "some tokens": {"target_modules": ["q_proj"], "trainable_token_indices": [1, 2]},
    "embeddings": {"target_modules": ["q_proj", "embed_tokens"]},
}


def base() -> Any:
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL, attention_bias=True))
    model.name_or_path = "base/model"
    return model


def adapted(**options: Any) -> Any:
    """An adapter of the same base each time, with other weights."""
    model = peft.get_peft_model(base(), peft.LoraConfig(**{"r": 2, "target_modules": ["q_proj", "v_proj"], **options}))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_" in name:
                parameter.normal_()
    return model


def trained(model: torch.nn.Module, seed: int) -> Tensors:
    """Change some of what is trained; what the whole model is then."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.view(-1)[seed % parameter.numel()] += 1
    return state_of(model)


@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_folder_and_a_module_follow_an_adapter_and_the_files_are_those_of_peft(options, encoding, tmp_path):
    model, copy = adapted(**options), adapted(**options)
    with (
        Publisher(tmp_path / "weights", encoding=encoding) as publisher,
        Subscriber(tmp_path / "weights") as subscriber,
    ):
        for version in (1, 2, 3):
            were = trained(model, version)
            publisher.publish(model, version).result()
            reports = [subscriber.pull(tmp_path / "local"), subscriber.pull(copy)]
            model.save_pretrained(tmp_path / f"peft-{version}")

            assert [report.base for report in reports] == [version - 1 or None] * 2
            assert_same(weights_in(tmp_path / "local"), weights_in(tmp_path / f"peft-{version}"))
            assert_same(dict(copy.state_dict()), were)
    assert parse((tmp_path / "weights" / "weight_v000003" / INDEX).read_bytes(), 3).base == 2
    assert sorted(weights_below(tmp_path / "local")) == FILES
    written, by_peft = ((tmp_path / folder / "adapter_config.json").read_text() for folder in ("local", "peft-3"))
    for text in (written, by_peft):
        assert json.loads(text)["base_model_name_or_path"] == "base/model"
    assert_configs_are_alike(json.loads(written), json.loads(by_peft))
    loaded = peft.PeftModel.from_pretrained(base(), tmp_path / "local")
    assert_same(dict(loaded.state_dict()), dict(model.state_dict()))


def assert_configs_are_alike(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Sets have any order in PEFT's, and the class of the base is noted by its `save_pretrained` alone."""

    def plain(value: Any) -> Any:
        return sorted(value) if isinstance(value, list) and all(isinstance(one, str) for one in value) else value

    leave_out = {"auto_mapping", "peft_version"}
    assert {k: plain(v) for k, v in found.items() if k not in leave_out} == {
        k: plain(v) for k, v in wanted.items() if k not in leave_out
    }


def test_an_anchor_is_a_folder_that_peft_loads_where_it_lies(tmp_path):
    model = adapted()
    with Publisher(tmp_path / "weights") as publisher:
        publisher.publish(model, 1).result()
    loaded = peft.PeftModel.from_pretrained(base(), tmp_path / "weights" / "weight_v000001")

    assert_same(dict(loaded.state_dict()), dict(model.state_dict()))


def test_the_active_adapter_of_several_is_published_and_fills_that_of_a_module(tmp_path):
    model, copy = adapted(), adapted()
    for one in (model, copy):
        one.add_adapter("second", peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
        one.set_adapter("second")
    trained(model, 1)
    before = state_of(copy)
    with Publisher(tmp_path / "weights") as publisher:
        publisher.publish(model, 1).result()
        model.base_model.set_adapter(["default", "second"])
        with pytest.raises(UnsupportedStateError, match=r"several adapters \(default, second\); choose one"):
            publisher.publish(model, 2)
    Subscriber(tmp_path / "weights").pull(copy)

    of_second = {name: tensor for name, tensor in model.state_dict().items() if ".second." in name}
    assert_same(dict(copy.state_dict()), before | of_second)


def test_an_adapter_that_transformers_itself_has_added_and_one_by_its_tensors_alone(tmp_path):
    model = base()
    model.add_adapter(peft.LoraConfig(r=2, target_modules=["q_proj"]))
    trained(model, 1)
    with Publisher(tmp_path / "weights") as publisher:
        publisher.publish(model, 1).result()
        Subscriber(tmp_path / "weights").pull(tmp_path / "local")
        trained(model, 2)
        publisher.publish(model.state_dict(), 2, config_folder=tmp_path / "local").result()
    Subscriber(tmp_path / "weights").pull(tmp_path / "local")
    loaded = peft.PeftModel.from_pretrained(base(), tmp_path / "local")

    assert parse((tmp_path / "weights" / "weight_v000002" / INDEX).read_bytes(), 2).base == 1
    own = {name: tensor for name, tensor in model.state_dict().items() if ".lora_" in name}
    assert_same({name: loaded.state_dict()[f"base_model.model.{name}"] for name in own}, own)


def test_a_checkpoint_and_a_version_of_an_adapter_are_of_one_snapshot(tmp_path):
    model = adapted()
    were = state_of(model)
    with Publisher(tmp_path / "weights") as publisher, open_run(tmp_path / "run") as ckpt:
        with async_ckpt.snapshot({"model": model}) as snap:
            handles = [ckpt.save(snap, step=1), publisher.publish(snap["model"], 1)]
        spoil(model)
        for handle in handles:
            handle.result()
    Subscriber(tmp_path / "weights").pull(copy := adapted())

    assert_same(dict(copy.state_dict()), were)
    assert_same(async_ckpt.load(tmp_path / "run")["model"], were)


@pytest.mark.parametrize("again", [False, True], ids=["the same publisher", "another publisher"])
@pytest.mark.parametrize(
    ("field", "value", "shown"),
    [
        ("base_model_name_or_path", "base/other", '"base/model", and this one has "base/other"'),
        ("revision", "v2", 'empty, and this one has "v2"'),
        ("lora_alpha", 64, "8, and this one has 64"),
        ("use_rslora", True, "empty, and this one has true"),
    ],
)
def test_an_adapter_of_another_base_or_scale_is_refused_at_the_root_and_the_one_before_goes_on(
    field, value, shown, again, tmp_path
):
    model, other = adapted(), adapted()
    setattr(other.peft_config["default"], field, value)
    publisher = Publisher(tmp_path / "weights")
    publisher.publish(model, 1).result()
    if again:
        publisher.close()
        publisher = Publisher(tmp_path / "weights")
    with publisher:
        with pytest.raises(StateMismatchError, match=f"adapter has {field} = {shown}.*root of its own"):
            publisher.publish(other, 2).result()
        publisher.publish(model, 2).result()
        assert publisher.versions() == [1, 2]


def test_a_whole_model_and_an_adapter_are_never_versions_of_one_root(tmp_path):
    model = adapted()
    with Publisher(tmp_path / "weights") as publisher:
        publisher.publish(model, 1).result()
        with pytest.raises(StateMismatchError, match="names, dtypes or shapes"):
            publisher.publish(base(), 2).result()
        # The same names in another file, which no engine would look for.
        raw = weights_in(tmp_path / "weights" / "weight_v000001")
        with pytest.raises(StateMismatchError, match=r'has .* = "base/model", and this one has empty'):
            publisher.publish(raw, 2).result()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"lora_alpha": 64}, "the published adapter has lora_alpha = 8, and the module's has 64"),
        ({"use_rslora": True}, "the published adapter has use_rslora = empty, and the module's has true"),
        ({"r": 3}, "the published adapter has r = 2, and the module's has 3"),
        (
            {"target_modules": ["q_proj", "k_proj"]},
            r"missing in the version: .*k_proj.*unknown to the module: .*v_proj",
        ),
    ],
    ids=lambda one: next(iter(one)) if isinstance(one, dict) else "",
)
def test_a_module_whose_adapter_is_another_is_refused_and_stays_as_it_is(options, told, tmp_path):
    with Publisher(tmp_path / "weights") as publisher:
        publisher.publish(adapted(), 1).result()
    module = adapted(**options)
    were = state_of(module)
    with pytest.raises(StateMismatchError, match=told):
        Subscriber(tmp_path / "weights").pull(module)

    assert_same(state_of(module), were)


def test_a_module_of_another_dtype_or_without_an_adapter_is_refused_by_name(tmp_path):
    with Publisher(tmp_path / "adapter") as publisher, Publisher(tmp_path / "model") as of_models:
        publisher.publish(adapted(), 1).result()
        of_models.publish(base(), 1).result()
    half = adapted()
    half.to(torch.bfloat16)
    of_adapter, of_model = Subscriber(tmp_path / "adapter"), Subscriber(tmp_path / "model")
    with pytest.raises(
        StateMismatchError, match=r"lora_A.weight has float32 \[2, 32\], and bfloat16 \[2, 32\] in the module"
    ):
        of_adapter.pull(half)
    with pytest.raises(StateMismatchError, match="it is an adapter, and the module has none; add one to it"):
        of_adapter.pull(base())
    with pytest.raises(
        StateMismatchError, match="it is a whole model, and the module has an adapter; pull into the model"
    ):
        of_model.pull(adapted())
    assert of_model.pull(tmp_path / "local").version == 1
    with pytest.raises(StateMismatchError, match="another model than the weights here"):
        of_adapter.pull(tmp_path / "local")


def test_a_config_of_an_adapter_beside_a_model_would_be_loaded_instead_and_is_refused(tmp_path):
    with Publisher(tmp_path / "weights") as publisher, Subscriber(tmp_path / "weights") as subscriber:
        model = base()
        publisher.publish(model, 1).result()
        subscriber.pull(tmp_path / "local")
        (tmp_path / "local" / "adapter_config.json").write_text("{}")
        changed(model)
        publisher.publish(model, 2).result()
        with pytest.raises(StorageUnavailableError, match=r"adapter_config.json does not belong to a version"):
            subscriber.pull(tmp_path / "local")


def config_of(**fields: Any) -> bytes:
    return json.dumps({"peft_type": "LORA", "r": 4, "bias": "none", **fields}).encode()


def lacks_its_second(state: Tensors) -> None:
    del state["base_model.model.model.layers.0.q_proj.lora_B.mine.weight"]


@pytest.mark.parametrize(
    ("config", "change", "told"),
    [
        (config_of(r=8), None, r"has the shape \[4, 9\], and adapter_config.json gives this layer the rank 8"),
        (config_of(rank_pattern={"q_proj": 2}), None, r"q_proj.lora_A.weight' has the shape \[4, 6\], .*the rank 2"),
        (
            config_of(target_modules=["q_proj", "v_proj"]),
            None,
            r"embed_tokens.* target_modules .* \(q_proj, v_proj\) do not name its layer",
        ),
        (config_of(), lacks_its_second, r"q_proj.lora_A.weight' comes without '.*q_proj.lora_B.weight'"),
        (b'{"peft_type": ', None, "adapter_config.json is not JSON"),
        (b"[]", None, "adapter_config.json is a list, not an object"),
        (config_of(peft_type="IA3"), None, "an adapter of the type IA3 cannot be exported, only LORA"),
    ],
    ids=["rank", "rank of a layer", "layer", "half", "torn", "list", "type"],
)
def test_weights_that_are_not_those_of_their_config_are_refused_by_name(config, change, told, tmp_path):
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "adapter_config.json").write_bytes(config)
    state = dict(PeftModel("mine").state_dict())
    if change is not None:
        change(state)
    with Publisher(tmp_path / "weights") as publisher, pytest.raises(UnsupportedStateError, match=told):
        publisher.publish(state, 1, config_folder=tmp_path / "config")
    assert not (tmp_path / "weights").exists()


def test_an_adapter_whose_base_peft_has_changed_to_begin_it_is_refused_and_its_tensors_are_taken(tmp_path):
    model = peft.get_peft_model(base(), peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights="pissa"))
    model.save_pretrained(tmp_path / "peft")
    with Publisher(tmp_path / "weights") as publisher:
        with pytest.raises(UnsupportedStateError, match="init_lora_weights='pissa', by which PEFT changes the base"):
            publisher.publish(model, 1)
        publisher.publish(peft.get_peft_model_state_dict(model), 1, config_folder=tmp_path / "peft").result()
    Subscriber(tmp_path / "weights").pull(tmp_path / "local")
    assert_same(weights_in(tmp_path / "local"), weights_in(tmp_path / "peft"))


def test_settings_of_an_adapter_that_are_not_texts_make_an_index_damaged(tmp_path):
    with Publisher(tmp_path / "weights") as publisher:
        publisher.publish(PeftModel("mine"), 1).result()
    folder = tmp_path / "weights" / "weight_v000001"
    assert parse((folder / INDEX).read_bytes(), 1).adapter["r"] == json.dumps(LoraConfig().r)
    edit(folder, lambda told: told["metadata"]["async_ckpt"].update(adapter={"r": 4}))
    with pytest.raises(async_ckpt.CorruptCheckpointError, match="adapter has values that are not strings"):
        Subscriber(tmp_path / "weights").pull(tmp_path / "local", 1)


# --- on ranks -----------------------------------------------------------------------------------------------------

ON_RANKS = """
import peft, async_ckpt, warnings
from fake_ranks import no_collectives
warnings.simplefilter("ignore")
class Network(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = torch.nn.Linear(13, 37), torch.nn.Linear(37, 5)
    def forward(self, x):
        return self.b(self.a(x))
torch.manual_seed(0)
model = peft.get_peft_model(Network(), peft.LoraConfig(r=3, target_modules=["a", "b"], base_model_name_or_path="base/model"))
fully_shard(model)
publisher = async_ckpt.Publisher(here.root, anchor_every=3)
for version in range(1, 5):
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            local = parameter.to_local()
            if "lora_" in name and local.numel():
                local.view(-1)[version % local.numel()] += 1 + here.rank
    keep_full(model, here.root + f"-{version}.pt")
    with no_collectives(), async_ckpt.snapshot({"model": model}) as snap:
        handle = publisher.publish(snap["model"], version)
    handle.result()
    here.meet(f"published{version}")
publisher.close()
"""


def test_an_adapter_that_is_spread_over_ranks_is_pulled_as_one(worlds, tmp_path):
    worlds.run(2, ON_RANKS)

    class Network(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = torch.nn.Linear(13, 37), torch.nn.Linear(37, 5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(self.a(x))

    torch.manual_seed(0)
    module = peft.get_peft_model(Network(), peft.LoraConfig(r=3, target_modules=["a", "b"]))
    with Subscriber(worlds.root) as subscriber:
        for version in (2, 4):
            full = torch.load(f"{worlds.root}-{version}.pt")
            subscriber.pull(tmp_path / "local", version)
            subscriber.pull(module, version)
            wanted = {name.replace(".default", ""): full[name] for name in full if ".lora_" in name}
            assert_same(weights_in(tmp_path / "local"), wanted)
            assert_same(dict(module.state_dict()), full)
        other = peft.get_peft_model(Network(), peft.LoraConfig(r=3, lora_alpha=1, target_modules=["a", "b"]))
        with pytest.raises(StateMismatchError, match="has lora_alpha = 8, and the module's has 1"):
            subscriber.pull(other)
    assert sorted(weights_below(tmp_path / "local")) == FILES
    peft.PeftModel.from_pretrained(Network(), tmp_path / "local")


@pytest.mark.skipif(not CAN_SHARE, reason="no memory here can be handed to other processes")
def test_an_adapter_is_taken_from_memory_with_its_names_and_its_settings(tmp_path):
    model = adapted()
    with Publisher(tmp_path / "root", local=True) as publisher, Subscriber(tmp_path / "root") as subscriber:
        publisher.publish(model, 1).result()
        fresh = adapted()
        assert subscriber.pull(fresh).from_memory
        assert subscriber.pull(tmp_path / "lora").from_memory
        with pytest.raises(StateMismatchError, match="lora_alpha"):
            subscriber.pull(adapted(lora_alpha=32))
        with pytest.raises(StateMismatchError, match="it is an adapter, and the module has none"):
            subscriber.pull(base())
    assert_same(state_of(fresh), state_of(model))
    model.save_pretrained(tmp_path / "saved")
    assert_same(weights_in(tmp_path / "lora"), weights_in(tmp_path / "saved"))
