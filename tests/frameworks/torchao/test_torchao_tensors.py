"""torchao's quantised weights and optimizers: they are saved as their inner tensors, and trainings go on from them."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from states import open_run
from tensor_classes import bytes_in
from torch import nn

import async_ckpt
from async_ckpt import StateMismatchError

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    logging.getLogger("torchao").setLevel(logging.ERROR)  # it says which kernels are not for this machine
    optim: Any = pytest.importorskip("torchao.optim", reason="torchao is not installed")
    quantization: Any = pytest.importorskip("torchao.quantization")
    from torchao.float8 import float8_training_tensor, fsdp_utils
    from torchao.optim.subclass_4bit import OptimState4bit
    from torchao.optim.subclass_8bit import OptimState8bit
    from torchao.optim.subclass_fp8 import OptimStateFp8
    from torchao.prototype.mx_formats.mx_tensor import MXTensor
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor
    from torchao.quantization.granularity import PerAxis, PerGroup
    from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import to_nf4

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torchao", "ignore::DeprecationWarning:torchao")


# --- weights ------------------------------------------------------------------------------------------------------

WEIGHTS: dict[str, Callable[[], Any]] = {
    "int8, by channel": lambda: quantization.Int8WeightOnlyConfig(),
    "int8, with activations": lambda: quantization.Int8DynamicActivationInt8WeightConfig(),
    "4 bits, by group": lambda: quantization.IntxWeightOnlyConfig(torch.int4, PerGroup(32)),
    "2 bits, by channel": lambda: quantization.IntxWeightOnlyConfig(torch.int2, PerAxis(0)),
    "int4, with activations": lambda: quantization.Int8DynamicActivationIntxWeightConfig(torch.int4, PerGroup(32)),
    "float8": lambda: quantization.Float8WeightOnlyConfig(),
}


def quantised(config: Any, seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 32)).to(torch.bfloat16)
    quantization.quantize_(model, config)
    return model


def bytes_of(model: nn.Module) -> dict[str, list[bytes]]:
    return {name: bytes_in(tensor) for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("config", WEIGHTS.values(), ids=WEIGHTS.keys())
def test_a_quantised_model_is_filled_where_it_is(config, tmp_path):
    saved, live = quantised(config(), 0), quantised(config(), 1)
    weight = live[0].weight
    x = torch.ones(2, 128, dtype=torch.bfloat16)
    assert not torch.equal(saved(x), live(x))
    with open_run(tmp_path) as ckpt:
        ckpt.save({"model": saved}, step=1).result()
        ckpt.restore({"model": live})
    assert live[0].weight is weight
    assert bytes_of(live) == bytes_of(saved)
    assert torch.equal(saved(x), live(x))


@pytest.mark.parametrize("config", WEIGHTS.values(), ids=WEIGHTS.keys())
def test_a_quantised_model_has_the_same_bytes_after_a_load_and_another_save(config, tmp_path):
    model = quantised(config(), 0)
    one, other = tmp_path / "one.tar", tmp_path / "other.tar"
    async_ckpt.save(model, one).result()
    types = classes_needed(model)
    loaded = async_ckpt.load(one, types=types)
    assert type(loaded["0.weight"]) is type(model[0].weight)
    async_ckpt.save(loaded, other).result()
    again = async_ckpt.load(other, types=types)
    assert {name: bytes_in(tensor) for name, tensor in again.items()} == bytes_of(model)
    empty = quantised(config(), 1)
    empty.load_state_dict(again, assign=True)
    assert bytes_of(empty) == bytes_of(model)


def nf4(seed: int) -> Any:
    return to_nf4(torch.randn(256, 256, generator=torch.Generator().manual_seed(seed)))


def mx(seed: int) -> Any:
    made = torch.randn(32, 64, generator=torch.Generator().manual_seed(seed))
    return MXTensor.to_mx(made.to(torch.bfloat16), torch.float8_e4m3fn)


def nvfp4(seed: int) -> Any:
    made = torch.randn(32, 64, generator=torch.Generator().manual_seed(seed))
    return NVFP4Tensor.to_nvfp4(made.to(torch.bfloat16))


@pytest.mark.parametrize("make", [nf4, mx, nvfp4])
def test_other_formats_of_four_and_eight_bits_come_back(make, tmp_path):
    live = make(1)
    types = classes_needed(nn.ParameterDict({"w": nn.Parameter(make(0), requires_grad=False)}))
    with open_run(tmp_path) as ckpt:
        ckpt.save({"w": make(0)}, step=1).result()
        ckpt.restore({"w": live})
        loaded = ckpt.load(types=types)["w"]
    assert type(loaded) is type(live)
    assert bytes_in(live) == bytes_in(loaded) == bytes_in(make(0))


def classes_needed(model: nn.Module) -> list[type]:
    """The classes of torchao that the contexts of these weights name, as a user finds them by the errors."""
    found: set[type] = set()

    def look(value: Any) -> None:
        if isinstance(value, dict):
            value = list(value.values())
        if isinstance(value, list | tuple):
            for item in value:
                look(item)
        if type(value).__module__.startswith("torchao."):
            found.add(type(value))
            look([*getattr(value, "__dict__", {}).values()])

    for tensor in model.state_dict().values():
        if hasattr(tensor, "__tensor_flatten__"):
            found.add(type(tensor))
            look(tensor.__tensor_flatten__()[1])
    return list(found)


def test_a_model_quantised_otherwise_is_refused_and_stays_as_it_is(tmp_path):
    saved = quantised(quantization.IntxWeightOnlyConfig(torch.int4, PerGroup(32)), 0)
    live = quantised(quantization.IntxWeightOnlyConfig(torch.int4, PerGroup(64)), 1)
    before = bytes_of(live)
    with open_run(tmp_path) as ckpt:
        ckpt.save({"model": saved}, step=1).result()
        with pytest.raises(
            StateMismatchError, match=r'model\.0\.weight has the context .*"block_size".*64.* here and '
        ):
            ckpt.restore({"model": live})
    assert bytes_of(live) == before


def test_weights_that_are_gathered_in_float8_come_back(tmp_path):
    """Those of float8 training under FSDP2: high precision in a wrapper."""

    def weight(fill: float) -> Any:
        config = float8_training_tensor.LinearMMConfig()
        return fsdp_utils.WeightWithDynamicFloat8CastTensor(torch.full((4, 8), fill), config, torch.float8_e4m3fn)

    live = weight(0.0)
    with open_run(tmp_path) as ckpt:
        ckpt.save({"w": weight(3.0)}, step=1).result()
        ckpt.restore({"w": live})
    assert bytes_in(live) == bytes_in(weight(3.0))


# --- optimizers ---------------------------------------------------------------------------------------------------

OPTIMIZERS = {
    "8 bits": (optim.AdamW8bit, OptimState8bit),
    "4 bits": (optim.AdamW4bit, OptimState4bit),
    "fp8": (optim.AdamWFp8, OptimStateFp8),
}


class Training:
    """A model whose optimizer keeps its moments in few bits. torch.compile would only take time."""

    def __init__(self, optimizer: type, steps: int = 0) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(128, 64)
        self.optimizer = optimizer(self.model.parameters(), lr=0.1)
        for step in range(steps):
            self.step(step)

    def step(self, number: int) -> None:
        made = torch.Generator().manual_seed(number)
        self.model(torch.randn(4, 128, generator=made)).square().sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer}


@pytest.fixture
def uncompiled(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize(("optimizer", "moments"), OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
@pytest.mark.parametrize("steps", [0, 1], ids=["a fresh one", "one that has stepped"])
def test_a_training_goes_on_bit_for_bit(optimizer, moments, steps, tmp_path):
    saved, live = Training(optimizer, 3), Training(optimizer, steps)
    with open_run(tmp_path) as ckpt:
        ckpt.save(saved.state, step=3, guard=saved.optimizer).result()
        ckpt.restore(live.state, types=[moments])
    for number in (3, 4):
        saved.step(number)
        live.step(number)
    assert torch.equal(saved.model.weight, live.model.weight)
    assert type(live.optimizer.state[live.model.weight]["exp_avg"]) is moments


@pytest.mark.usefixtures("uncompiled")
def test_a_fresh_optimizer_says_which_class_it_needs(tmp_path):
    with open_run(tmp_path) as ckpt:
        ckpt.save(Training(optim.AdamW8bit, 1).state, step=1).result()
        with pytest.raises(
            StateMismatchError, match=r"exp_avg is a torchao\.optim\.subclass_8bit\.OptimState8bit in the "
        ):
            ckpt.restore(Training(optim.AdamW8bit).state)


# Moments in few bits under FSDP2: DTensors whose local tensors are wrapped.
SHARDED = """
import warnings
warnings.simplefilter("ignore")
import torch._dynamo
from torchao.optim import AdamW8bit
from torchao.optim.subclass_8bit import OptimState8bit
from tensor_classes import bytes_in
torch.compile = lambda function, **_: function

def training(steps):
    torch.manual_seed(0)
    model = torch.nn.Linear(256, 64 * 2)
    fully_shard(model, mesh=mesh_of())
    optimizer = AdamW8bit(model.parameters(), lr=0.1)
    for number in range(steps):
        step(model, optimizer, number)
    return {"model": model, "optimizer": optimizer}

def step(model, optimizer, number):
    made = torch.Generator().manual_seed(number)
    model(torch.randn(4, 256, generator=made)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()

def content(state):
    moments = state["optimizer"].state[state["model"].weight]
    return [bytes_in(moments[name]._local_tensor) for name in ("exp_avg", "exp_avg_sq")] + [
        bytes_in(parameter._local_tensor) for parameter in state["model"].parameters()
    ]
"""


def test_a_training_under_fsdp2_goes_on_bit_for_bit_on_as_many_ranks(worlds):
    worlds.run(
        2,
        SHARDED
        + """
state = training(2)
with open_run(here.root) as ckpt:
    here.save(ckpt, state, 2)
""",
    )
    ended = worlds.run(
        2,
        SHARDED
        + """
want, live = training(2), training(0)
with open_run(here.root) as ckpt:
    here.tell(ckpt.restore(live, types=[OptimState8bit]))
here.tell(content(live) == content(want))
for state in (want, live):
    step(state["model"], state["optimizer"], 2)
here.tell(content(live) == content(want))
""",
    )
    assert [one.told for one in ended] == [[2, True, True]] * 2


@pytest.mark.parametrize("size", [1, 4])
def test_a_training_under_fsdp2_goes_on_with_another_number_of_ranks(worlds, size):
    """The class cuts its scales by rows, where these are whole blocks."""
    saved = worlds.run(
        2,
        SHARDED
        + """
state = training(2)
with open_run(here.root) as ckpt:
    here.save(ckpt, state, 2)
step(state["model"], state["optimizer"], 2)
here.tell(state["model"].weight.full_tensor().tolist())
""",
    )
    ended = worlds.run(
        size,
        SHARDED
        + """
live = training(0)
with open_run(here.root) as ckpt:
    ckpt.restore(live, types=[OptimState8bit])
step(live["model"], live["optimizer"], 2)
here.tell(live["model"].weight.full_tensor().tolist())
""",
    )
    want = saved[0].told[-1]
    for one in ended:
        assert torch.allclose(torch.tensor(one.told[-1]), torch.tensor(want), rtol=1e-4, atol=1e-5)


QUANTISED = """
import warnings
warnings.simplefilter("ignore")
import torchao.quantization as q
from async_ckpt.core.slicing.sharded import Placed
from tensor_classes import bytes_in

def weight(seed):
    torch.manual_seed(seed)
    model = torch.nn.Linear(128, 64).to(torch.bfloat16)
    q.quantize_(model, q.Float8WeightOnlyConfig())
    return model.weight.detach()

def sharded(whole):
    like = distribute_tensor(torch.zeros(whole.shape, dtype=torch.bfloat16), mesh_of(), [Shard(0)])
    rows = len(whole) // here.size
    return Placed.of(like).around(whole[here.rank * rows : (here.rank + 1) * rows])
"""


@pytest.mark.parametrize("size", [1, 4])
def test_quantised_weights_are_cut_again_for_another_number_of_ranks(worlds, size):
    worlds.run(
        2, QUANTISED + "\nwith open_run(here.root) as ckpt:\n    here.save(ckpt, {'w': sharded(weight(0))}, 1)\n"
    )
    ended = worlds.run(
        size,
        QUANTISED
        + """
live = {"w": sharded(weight(1).clone())}
with open_run(here.root) as ckpt:
    ckpt.restore(live)
here.tell(bytes_in(live["w"]._local_tensor) == bytes_in(sharded(weight(0))._local_tensor))
""",
    )
    assert [one.told for one in ended] == [[True]] * size


def test_moments_whose_blocks_are_not_rows_are_refused_by_name_on_another_number_of_ranks(worlds):
    sharded = SHARDED.replace("Linear(256, 64 * 2)", "Linear(128, 64 * 4)").replace("randn(4, 256", "randn(4, 128")
    worlds.run(2, sharded + "\nwith open_run(here.root) as ckpt:\n    here.save(ckpt, training(1), 1)\n")
    ended = worlds.run(
        4,
        sharded
        + """
from async_ckpt import StateMismatchError
with open_run(here.root) as ckpt:
    try:
        ckpt.restore(training(0), types=[OptimState8bit])
    except StateMismatchError as error:
        here.tell(str(error))
""",
    )
    for one in ended:
        (error,) = one.told
        assert "exp_avg has the shards [[0, 4, 1]] here and [[0, 2, 1]] in the checkpoint" in error
