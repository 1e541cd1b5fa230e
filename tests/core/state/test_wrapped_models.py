"""Models that are wrapped are saved, and restored, under the names of the plain model."""

import copy
import itertools
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from archives import read_index
from plain_data import round_trip
from slices import some
from states import difference, network, restored
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

import async_ckpt
from async_ckpt import AsyncCheckpointer, StateMismatchError

distributed = torch.distributed


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def compiled(module: nn.Module) -> Any:
    return torch.compile(module, backend="eager")


def compiled_inside(model: nn.Module) -> nn.Module:
    model[0] = compiled(model[0])
    return model


def checkpointed(model: nn.Module) -> nn.Module:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model[0] = checkpoint_wrapper(model[0])
    return model


def fully_sharded(model: nn.Module) -> nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel

    return FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)


WRAPPED: dict[str, Callable[[nn.Module], nn.Module]] = {
    "DDP": DistributedDataParallel,
    "DataParallel": DataParallel,
    "compiled": compiled,
    "DDP of compiled": lambda model: DistributedDataParallel(compiled(model)),
    "compiled DDP": lambda model: compiled(DistributedDataParallel(model)),
    "compiled layer": compiled_inside,
    "DDP of a compiled layer": lambda model: DistributedDataParallel(compiled_inside(model)),
    "checkpointed layer": checkpointed,
    "DDP of a checkpointed layer": lambda model: DistributedDataParallel(checkpointed(model)),
    "FSDP": fully_sharded,
    "FSDP of a compiled layer": lambda model: fully_sharded(compiled_inside(model)),
}
INTO = ["compiled DDP", "DDP of a compiled layer", "checkpointed layer", "FSDP of a compiled layer"]
# torch's own, of building FSDP on a machine without a GPU, and of how its state dict is taken.
pytestmark = pytest.mark.filterwarnings(
    "ignore::UserWarning:torch",
    "ignore::FutureWarning:torch",
    "ignore:Guards may run slower on Python 3.13.0:RuntimeWarning",  # torch.compile says so in that release
)


@pytest.mark.parametrize("wrap", WRAPPED.values(), ids=WRAPPED.keys())
def test_a_wrapped_model_is_saved_under_the_names_of_the_plain_one(wrap, archive):
    plain = network()
    loaded = round_trip({"model": wrap(copy.deepcopy(plain))}, archive)["model"]
    assert difference(loaded, plain.state_dict()) is None
    other = network()
    other.load_state_dict(loaded)
    assert [row["path"][1] for row in read_index(archive)["tensors"]] == list(plain.state_dict())


@pytest.mark.parametrize("wrap", WRAPPED.values(), ids=WRAPPED.keys())
def test_plain_and_wrapped_models_restore_each_other(wrap, tmp_path):
    plain, other = network(), network()
    with AsyncCheckpointer(tmp_path / "a") as ckpt:
        restored(ckpt, {"model": plain}, {"model": (live := wrap(network()))})
    with AsyncCheckpointer(tmp_path / "b") as ckpt:
        restored(ckpt, {"model": live}, {"model": other})
    assert difference(other.state_dict(), plain.state_dict()) is None


@pytest.mark.parametrize(("wrap", "into"), some(list(itertools.product(WRAPPED, INTO)), 3))
def test_a_state_dict_of_one_wrapped_model_is_restored_into_another(wrap, into, ckpt):
    """Dicts keep their keys: what the user took of the model is what is saved."""
    plain, live = network(), WRAPPED[into](network())
    state = WRAPPED[wrap](copy.deepcopy(plain)).state_dict()
    restored(ckpt, {"model": state}, {"model": live})
    assert list(ckpt.load()["model"]) == list(state)
    assert all(map(torch.equal, plain.state_dict().values(), live.state_dict().values()))


def test_parts_are_selected_by_their_plain_names(archive, ckpt):
    model = DistributedDataParallel(compiled_inside(network()))
    async_ckpt.save({"model": model}, archive, select="model.0.*").result()
    assert list(async_ckpt.load(archive)["model"]) == ["0.weight", "0.bias"]
    ckpt.save({"model": model}, step=1).result()
    live = compiled(network())
    before = live.state_dict()["_orig_mod.2.weight"].clone()
    ckpt.restore({"model": live}, select="model.0.*")
    assert torch.equal(live.state_dict()["_orig_mod.0.weight"], model.state_dict()["module.0._orig_mod.weight"])
    assert torch.equal(live.state_dict()["_orig_mod.2.weight"], before)


# --- what is no wrapper -------------------------------------------------------------------------------------------


class NamedArchives(nn.Module):
    """A submodule that is really called so."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.module = inner
        self._orig_mod = nn.Linear(1, 1)


def test_a_submodule_called_module_keeps_its_name(archive):
    plain = NamedArchives(network())
    for kind in ("DDP", "DataParallel", "compiled", "DDP of compiled", "compiled DDP", "FSDP"):
        loaded = round_trip(WRAPPED[kind](copy.deepcopy(plain)), archive)
        assert difference(loaded, plain.state_dict()) is None, kind


@pytest.mark.parametrize("saved_by", [lambda m: m, DistributedDataParallel, compiled], ids=["plain", "DDP", "compiled"])
@pytest.mark.parametrize("into", [lambda m: m, DistributedDataParallel, compiled], ids=["plain", "DDP", "compiled"])
@pytest.mark.parametrize("inner", [nn.Linear(2, 2, bias=False), nn.Sequential(nn.Linear(2, 2, bias=False))])
def test_a_submodule_called_module_is_restored_as_itself(saved_by, into, inner, ckpt):
    """The one called `module` and what stands beside it have the same shape, and are not confused."""

    def make() -> nn.Module:
        model = nn.Module()
        model.register_parameter("weight", nn.Parameter(torch.randn(2, 2)))
        model.module = copy.deepcopy(inner)
        nn.init.normal_(next(model.module.parameters()))
        return model

    plain, live = make(), make()
    restored(ckpt, {"model": saved_by(copy.deepcopy(plain))}, {"model": into(live)})
    assert difference(live.state_dict(), plain.state_dict()) is None


def test_averaged_models_and_copies_keep_their_names(ckpt):
    averaged = AveragedModel(DistributedDataParallel(network()))
    ema = {"shadow": copy.deepcopy(network())}
    loaded = ckpt.save({"avg": averaged, "ema": ema}, step=1).result() and ckpt.load()
    assert list(loaded["avg"]) == ["n_averaged", *(f"module.{name}" for name in network().state_dict())]
    assert list(loaded["ema"]["shadow"]) == list(network().state_dict())
    live = AveragedModel(network())
    ckpt.restore({"avg": live, "ema": {"shadow": network()}})
    assert difference(live.module.state_dict(), averaged.module.module.state_dict()) is None


def test_a_plain_model_does_not_fill_a_submodule_called_module(ckpt):
    plain, named = nn.Module(), nn.Module()
    for live in (plain, named):
        live.register_parameter("steps", nn.Parameter(torch.zeros(1)))
    named.module = nn.Linear(2, 2, bias=False)
    plain.register_parameter("weight", nn.Parameter(torch.ones(2, 2)))
    for step, saved in enumerate((plain, plain.state_dict())):
        ckpt.save({"model": saved}, step).result()
        for live in (named, DistributedDataParallel(named)):
            with pytest.raises(StateMismatchError) as caught:
                ckpt.restore({"model": live})
            assert caught.value.missing == ("model.module.weight",)
            assert caught.value.unexpected == ("model.weight",)


class Unwrapping(DistributedDataParallel):
    """As some trainers' are: its state dict is that of the model."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.load_state_dict(*args, **kwargs)


class Adding(DistributedDataParallel):
    """Its state dict has something more."""

    extra = ("note", torch.ones(1))

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        state = super().state_dict(*args, **kwargs)
        state[self.extra[0]] = self.extra[1]
        return state

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        state_dict = dict(state_dict)
        del state_dict[self.extra[0]]
        return super().load_state_dict(state_dict, strict, assign)


@pytest.mark.parametrize("cls", [Unwrapping, Adding])
def test_a_wrapper_with_a_state_dict_of_its_own_is_asked_for_it(cls, ckpt):
    plain, live = network(), cls(network())
    restored(ckpt, {"model": cls(copy.deepcopy(plain))}, {"model": live})
    names = list(ckpt.load()["model"])
    assert names == [*plain.state_dict(), *(["note"] if cls is Adding else [])]
    assert difference(live.module.state_dict(), plain.state_dict()) is None


def test_names_that_would_collide_stay_as_they_are(ckpt, monkeypatch):
    monkeypatch.setattr(Adding, "extra", ("0.bias", torch.zeros(8)))
    plain, live = network(), Adding(network())
    model = Adding(copy.deepcopy(plain))
    restored(ckpt, {"model": model}, {"model": live})
    assert difference(ckpt.load()["model"], model.state_dict()) is None
    assert difference(live.module.state_dict(), plain.state_dict()) is None


# --- ambiguity ----------------------------------------------------------------------------------------------------


def test_a_saved_name_that_may_be_two_live_ones_is_refused_and_named(ckpt):
    live = nn.ModuleDict({"module": nn.Linear(1, 1, bias=False)})
    live.register_parameter("weight", nn.Parameter(torch.zeros(1, 1)))
    before = copy.deepcopy(live.state_dict())
    state = {"module.module.weight": torch.ones(1, 1), "module.weight": torch.ones(1, 1)}  # of a DDP of that
    ckpt.save({"model": state}, step=1).result()
    for strict in (True, False):
        with pytest.raises(StateMismatchError) as caught:
            ckpt.restore({"model": live}, strict=strict)
        may_be = "may be 'module.module.weight' or 'module.weight' of the checkpoint; load() it and rename one of them"
        assert caught.value.mismatched == (f"model: 'module.weight' {may_be}", f"model: 'weight' {may_be}")
    assert difference(live.state_dict(), before) is None


def test_two_saved_names_that_may_be_one_live_one_are_refused_and_named(ckpt):
    state = {"_orig_mod.weight": torch.ones(1, 1), "module.weight": torch.ones(1, 1)}
    ckpt.save({"model": state}, step=1).result()
    for wrap, name in ((lambda model: model, "weight"), (WRAPPED["compiled DDP"], "_orig_mod.module.weight")):
        with pytest.raises(StateMismatchError) as caught:
            ckpt.restore({"model": wrap(nn.Linear(1, 1, bias=False))})
        may_be = "may be '_orig_mod.weight' or 'module.weight' of the checkpoint"
        assert any(f"model: {name!r} {may_be}" in line for line in caught.value.mismatched)


def test_one_saved_name_that_may_be_two_live_ones_is_refused_and_named(ckpt):
    live = nn.ModuleDict({"module": nn.Linear(1, 1, bias=False)})
    live.register_parameter("weight", nn.Parameter(torch.zeros(1, 1)))
    ckpt.save({"model": {"module.module.weight": torch.ones(1, 1)}}, step=1).result()
    with pytest.raises(
        StateMismatchError,
        match=r"'module.module.weight' of the checkpoint may be 'module.weight' or 'weight'",
    ):
        ckpt.restore({"model": live}, strict=False)


def test_an_exact_name_is_taken_before_any_other(ckpt):
    state = {"_orig_mod.weight": torch.ones(1, 1), "module.weight": torch.zeros(1, 1)}
    live = compiled(nn.Linear(1, 1, bias=False))
    ckpt.save({"model": state}, step=1).result()
    with pytest.raises(StateMismatchError) as caught:
        ckpt.restore({"model": live})
    assert (caught.value.unexpected, caught.value.missing) == (("model.module.weight",), ())
    ckpt.restore({"model": live}, strict=False)
    assert live.weight.item() == 1


def test_names_that_fit_nothing_are_told_as_those_of_the_plain_model(ckpt):
    ckpt.save({"model": {"0.weight": torch.ones(3, 4), "other": torch.ones(1)}}, step=1).result()
    with pytest.raises(StateMismatchError) as caught:
        ckpt.restore({"model": DistributedDataParallel(nn.Sequential(nn.Linear(4, 8)))})
    assert caught.value.missing == ("model.0.bias",)
    assert caught.value.unexpected == ("model.other",)
    assert caught.value.mismatched == ("model.0.weight is float32[8, 4] here and float32[3, 4] in the checkpoint",)


# --- what goes with the names -------------------------------------------------------------------------------------


class Versioned(nn.Linear):
    """Notes the version that it is loaded from."""

    _version = 7
    loaded: Any = None

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *args: Any) -> None:
        self.loaded = metadata.get("version")
        super()._load_from_state_dict(state, prefix, metadata, *args)


@pytest.mark.parametrize(
    ("saved_by", "into", "raw"), some(list(itertools.product(WRAPPED, INTO, [False, True])), 5), ids=str
)
def test_modules_are_told_the_version_that_was_saved_of_them(saved_by, into, raw, ckpt):
    saved, inner = WRAPPED[saved_by](nn.Sequential(nn.Linear(2, 2), Versioned(2, 2))), Versioned(2, 2)
    state = {"model": saved.state_dict() if raw else saved}
    restored(ckpt, state, {"model": WRAPPED[into](nn.Sequential(nn.Linear(2, 2), inner))})
    assert inner.loaded == 7


def test_the_version_of_a_submodule_called_module_is_not_taken_for_that_of_the_model(ckpt):
    def make() -> nn.Module:
        model = nn.Module()
        model.module = Versioned(2, 2)
        return model

    live = DistributedDataParallel(make())
    live.register_load_state_dict_post_hook(lambda *_: None)  # so that it is asked to load
    restored(ckpt, {"model": DistributedDataParallel(make()).state_dict()}, {"model": live})
    assert live.module.module.loaded == 7


def trained(wrap: Any, *, named_by: Any = None) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = wrap(network())
    optimizer = torch.optim.SGD((named_by or model).named_parameters(), lr=0.1, momentum=0.9)
    model(torch.randn(4, 4)).sum().backward()
    optimizer.step()
    return model, optimizer


PLAIN_NAMES = [name for name, _ in network().named_parameters()]


@pytest.mark.parametrize("kind", ["DDP", "compiled", "DDP of compiled", "DDP of a compiled layer"])
@pytest.mark.parametrize("first", ["model", "optimizer"])
def test_an_optimizer_has_the_plain_names_of_its_parameters(kind, first, ckpt):
    model, optimizer = trained(WRAPPED[kind])
    before = copy.deepcopy(optimizer.state_dict())
    state = {"model": model, "optimizer": optimizer}
    ckpt.save(state if first == "model" else dict(reversed(state.items())), step=1).result()
    assert ckpt.load()["optimizer"]["param_groups"][0]["param_names"] == PLAIN_NAMES
    assert difference(optimizer.state_dict(), before) is None
    other, live = trained(DataParallel)
    names = live.param_groups[0]["param_names"]
    ckpt.restore({"model": other, "optimizer": live})
    assert live.param_groups[0]["param_names"] is names
    assert names == [f"module.{name}" for name in PLAIN_NAMES]
    for a, b in zip(live.state.values(), optimizer.state.values(), strict=True):
        assert torch.equal(a["momentum_buffer"], b["momentum_buffer"])


def test_an_optimizer_that_loads_in_its_own_way_keeps_its_names_too(ckpt):
    model, optimizer = trained(DataParallel)
    ckpt.save({"model": model, "optimizer": optimizer}, step=1).result()
    other, live = trained(DataParallel)
    live.register_load_state_dict_post_hook(lambda _: None)
    ckpt.restore({"model": other, "optimizer": live})
    assert live.param_groups[0]["param_names"] == [f"module.{name}" for name in PLAIN_NAMES]


def test_names_of_parameters_are_those_of_the_model_in_the_same_state(archive):
    """The optimizer may have been made from the wrapper when the model is saved, or from another model altogether."""
    inner = network()
    _, optimizer = trained(lambda _: inner, named_by=DataParallel(inner))
    state = {"parts": [{"model": inner}], "optimizer": optimizer}
    assert round_trip(state, archive)["optimizer"]["param_groups"][0]["param_names"] == PLAIN_NAMES
    alone = round_trip({"model": network(), "optimizer": optimizer}, archive)
    assert alone["optimizer"]["param_groups"][0]["param_names"] == [f"module.{name}" for name in PLAIN_NAMES]


def test_a_parameter_of_several_names_keeps_the_one_that_its_optimizer_knows(archive):
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    model[1].weight = model[0].weight
    wrapped = DataParallel(model)
    optimizer = torch.optim.SGD([("module.1.weight", model[1].weight)], lr=0.1)
    loaded = round_trip({"model": wrapped, "optimizer": optimizer}, archive)
    assert loaded["optimizer"]["param_groups"][0]["param_names"] == ["1.weight"]


def test_looking_for_wrappers_imports_none(archive):
    code = """
import sys, torch, async_ckpt
before = set(sys.modules)
async_ckpt.save({"model": torch.nn.Linear(1, 1)}, sys.argv[1]).result()
print(sorted(name for name in set(sys.modules) - before if name.startswith(("torch._dynamo", "torch.distributed"))))
"""
    done = subprocess.run([sys.executable, "-c", code, archive], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
