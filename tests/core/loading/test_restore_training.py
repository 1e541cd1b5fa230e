"""Restoring modules and optimizers in place; and training goes on as if nothing had been."""

import os
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from states import difference, network, restored
from torch import nn

from async_ckpt import AsyncCheckpointer, RngState, StateMismatchError


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        sum(p.square().sum() * (1 + torch.rand(())) for p in model.parameters()).backward()
        optimizer.step()


def pointers(optimizer: torch.optim.Optimizer) -> list[int]:
    return [v.data_ptr() for s in optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor)]


# --- modules and optimizers --------------------------------------------------------------------------------------

OPTIMIZERS = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "AdamW tensor lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.1), foreach=False),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "Adagrad": lambda p: torch.optim.Adagrad(p),
    "Rprop": lambda p: torch.optim.Rprop(p),
    "Adafactor": lambda p: torch.optim.Adafactor(p),
    "NAdam": lambda p: torch.optim.NAdam(p),
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
@pytest.mark.parametrize("fresh", [True, False], ids=["fresh", "used"])
def test_a_model_and_its_optimizer_come_back_in_place(make, fresh, ckpt):
    model = network()
    optimizer = make(model.parameters())
    trained(model, optimizer)
    other = network()
    other_optimizer = make(other.parameters())
    if not fresh:
        trained(other, other_optimizer, 5)
    weights, state = [p.data_ptr() for p in other.parameters()], pointers(other_optimizer)
    restored(ckpt, {"model": model, "optimizer": optimizer}, {"model": other, "optimizer": other_optimizer})
    assert difference(other.state_dict(), model.state_dict()) is None
    assert difference(other_optimizer.state_dict(), optimizer.state_dict()) is None
    assert [p.data_ptr() for p in other.parameters()] == weights
    assert fresh or pointers(other_optimizer) == state
    for p, q in ((model, optimizer), (other, other_optimizer)):
        torch.manual_seed(1)
        trained(p, q)
    assert difference(other.state_dict(), model.state_dict()) is None


def test_a_used_optimizer_takes_back_that_it_had_no_state(ckpt):
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    ckpt.save({"optimizer": optimizer}, step=1).result()
    trained(model, optimizer)
    assert ckpt.restore({"optimizer": optimizer}) == 1
    assert not any(optimizer.state.values())
    trained(model, optimizer)


@pytest.mark.parametrize("fresh", [True, False], ids=["fresh", "used"])
def test_moments_keep_the_dtype_that_they_were_saved_in(fresh, ckpt):
    """torch's own load_state_dict would cast them to the parameter's."""

    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Linear(4, 3).to(torch.bfloat16)
        return model, torch.optim.AdamW(model.parameters())

    model, optimizer = make()
    for p in model.parameters():
        optimizer.state[p] = {
            "step": torch.tensor(3.0), "exp_avg": torch.randn_like(p, dtype=torch.float32),
            "exp_avg_sq": torch.rand_like(p, dtype=torch.float64),
        }  # fmt: skip
    other, other_optimizer = make()
    if not fresh:
        trained(other, other_optimizer)
    restored(ckpt, {"model": model, "o": optimizer}, {"model": other, "o": other_optimizer})
    assert difference(other_optimizer.state_dict(), optimizer.state_dict()) is None
    assert other.weight.dtype == torch.bfloat16
    assert {s["exp_avg"].dtype for s in other_optimizer.state.values()} == {torch.float32}


def test_hyperparameters_and_groups_come_back(ckpt):
    def make(lr: float) -> torch.optim.Optimizer:
        torch.manual_seed(0)
        a, b = nn.Linear(2, 2), nn.Linear(3, 3)
        groups = [{"params": a.parameters(), "name": "a"}, {"params": b.parameters(), "lr": lr / 10}]
        return torch.optim.AdamW(groups, lr=lr, betas=(lr, 0.5))

    optimizer, other = make(0.5), make(0.1)
    optimizer.param_groups[0]["initial_lr"] = 1.0
    restored(ckpt, {"o": optimizer}, {"o": other})
    assert difference(other.state_dict(), optimizer.state_dict()) is None
    assert other.param_groups[1]["lr"] == 0.05
    assert other.param_groups[0]["initial_lr"] == 1.0


def test_a_learning_rate_that_is_a_tensor_is_filled_in_place(ckpt):
    weight = nn.Parameter(torch.ones(2))
    optimizer, other = (torch.optim.SGD([weight], lr=torch.tensor(lr)) for lr in (0.5, 0.1))
    rate = other.param_groups[0]["lr"]
    restored(ckpt, {"o": optimizer}, {"o": other})
    assert other.param_groups[0]["lr"] is rate
    assert rate.item() == 0.5


def test_tied_weights_stay_tied(ckpt):
    def make() -> nn.Module:
        model = nn.ModuleDict({"embed": nn.Embedding(5, 3), "head": nn.Linear(3, 5, bias=False)})
        model["head"].weight = model["embed"].weight
        return model

    model, other = make(), make()
    restored(ckpt, {"model": model}, {"model": other})
    assert other["head"].weight is other["embed"].weight
    assert difference(other.state_dict(), model.state_dict()) is None


@pytest.mark.parametrize("num_items", [4, 5_000_000], ids=["in one read", "in several"])
def test_weights_tied_when_saved_fill_weights_that_are_not(num_items, ckpt):
    weight = torch.randn(num_items)
    live = {"a": torch.zeros(num_items), "b": torch.zeros(num_items)}
    restored(ckpt, {"a": weight, "b": weight}, live)
    assert difference(live, {"a": weight, "b": weight}) is None
    assert live["a"].data_ptr() != live["b"].data_ptr()


def test_parameters_that_are_not_contiguous_are_filled_in_place(ckpt):
    saved = {
        "conv": nn.Conv2d(3, 5, 3),
        "t": torch.randn(4, 6),
        "z": torch.randn(3, dtype=torch.complex64),
        "h": torch.ones(8).bfloat16(),
    }
    base, z = torch.zeros(10, 10), torch.zeros(3, dtype=torch.complex64)
    live = {
        "conv": nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last), "t": base[1:9:2, 2:8],
        "z": z.conj(), "h": torch.zeros(2, 8).bfloat16().t()[:, 1],
    }  # fmt: skip
    pointer = live["conv"].weight.data_ptr()
    restored(ckpt, saved, live)
    assert live["conv"].weight.data_ptr() == pointer
    assert live["conv"].weight.is_contiguous(memory_format=torch.channels_last)
    assert difference(live["conv"].state_dict(), saved["conv"].state_dict()) is None
    assert torch.equal(base[1:9:2, 2:8], saved["t"])
    assert base.count_nonzero() <= 24
    assert torch.equal(z.conj(), saved["z"])
    assert difference(live["h"], saved["h"]) is None


def test_parameters_of_every_common_dtype_are_filled_in_place(ckpt):
    kinds = [
        torch.float64,
        torch.float16,
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.int64,
        torch.bool,
        torch.complex64,
        torch.uint16,
    ]
    saved = {str(k): torch.randint(0, 2, (5, 3)).to(k) for k in kinds}
    live = {str(k): torch.zeros(5, 3).to(k) for k in kinds}
    strided = {str(k): torch.zeros(3, 5).to(k).t() for k in kinds}
    restored(ckpt, {"a": saved, "b": saved}, {"a": live, "b": strided})
    assert difference(live, saved) is None
    assert difference(strided, saved) is None


class WithExtra(nn.Module):
    """A module with something beside its tensors."""

    def __init__(self, extra: Any) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.extra = extra

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


@pytest.mark.parametrize(
    "extra",
    [{"scale": 2.0, "amax": [1, 2]}, torch.arange(3.0), "text", {"history": torch.ones(2)}],
    ids=["dict", "tensor", "text", "tensors"],
)
def test_extra_state_comes_back(extra, ckpt):
    model = nn.Sequential(WithExtra(extra), nn.Linear(2, 2))
    other = nn.Sequential(
        WithExtra(type(extra)() if not isinstance(extra, torch.Tensor) else torch.zeros(3)), nn.Linear(2, 2)
    )
    restored(ckpt, {"model": model}, {"model": other})
    assert difference(other.state_dict(), model.state_dict()) is None
    assert difference(other[0].extra, extra) is None


def test_hooks_of_a_module_run_when_it_is_restored(ckpt):
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    seen: list[str] = []
    other.register_load_state_dict_pre_hook(lambda module, state, *_: seen.append(f"pre {sorted(state)}"))
    other.register_load_state_dict_post_hook(lambda module, keys: seen.append("post"))
    pointer = other.weight.data_ptr()
    restored(ckpt, {"model": model}, {"model": other})
    assert seen == ["pre ['bias', 'weight']", "post"]
    assert difference(other.state_dict(), model.state_dict()) is None
    assert other.weight.data_ptr() == pointer


class Doubling(nn.Linear):
    """Keeps something that follows from its weight, and makes it anew whenever it is loaded."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.doubled = self.weight.detach() * 2

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        self.doubled = self.weight.detach() * 2


def test_an_inner_module_with_its_own_way_of_loading_is_asked(ckpt):
    model, other = nn.Sequential(Doubling()), nn.Sequential(Doubling())
    restored(ckpt, {"model": model}, {"model": other})
    assert difference(other[0].doubled, model[0].doubled) is None


class Renaming(nn.Module):
    """Shows its parameter under another name, and takes it back from there."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(2))

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return OrderedDict(renamed=self.w.detach())

    def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        self.w.data.copy_(state_dict["renamed"])


def test_a_module_with_its_own_state_dict_is_loaded_by_it(ckpt):
    model, other = Renaming(), Renaming()
    restored(ckpt, {"model": model}, {"model": other})
    assert torch.equal(other.w, model.w)


class Scaler:
    """Like a gradient scaler: some numbers, and a load_state_dict."""

    def __init__(self, scale: float) -> None:
        self.state: dict[str, Any] = {"scale": scale, "growth": [scale, scale], "t": torch.tensor(scale)}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.state = state_dict


def test_an_object_with_load_state_dict_gets_its_state_through_that(ckpt):
    scaler, live = Scaler(8.0), Scaler(1.0)
    restored(ckpt, {"scaler": scaler, "list": [scaler]}, {"scaler": live, "list": [Scaler(0.0)]})
    assert difference(live.state, scaler.state) is None


@pytest.mark.parametrize("make", [
    lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 10),
    lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, 20),
    lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o),
    lambda o: torch.optim.lr_scheduler.SequentialLR(
        o, [torch.optim.lr_scheduler.ConstantLR(o), torch.optim.lr_scheduler.ExponentialLR(o, 0.9)], [2]
    ),
], ids=["cosine", "one cycle", "plateau", "sequential"])  # fmt: skip
def test_a_scheduler_goes_on_where_it_was(make, ckpt):
    def build() -> tuple[Any, Any]:
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1, momentum=0.5)
        return optimizer, make(optimizer)

    def go(optimizer: Any, scheduler: Any) -> list[float]:
        rates = []
        for _ in range(5):
            optimizer.step()
            scheduler.step(*[1.0] * isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau))
            rates.append(optimizer.param_groups[0]["lr"])
        return rates

    first, second = build(), build()
    go(*first)
    names = ("optimizer", "scheduler")
    restored(ckpt, dict(zip(names, first, strict=True)), dict(zip(names, second, strict=True)), trust=True)
    assert go(*second) == go(*first)


# --- training goes on --------------------------------------------------------------------------------------------


class Training:
    """A small but real loop: dropout, batch norm, momentum, a schedule, shuffled data."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 30)
        self.progress = {"step": 0, "losses": []}

    @property
    def state(self) -> dict[str, Any]:
        return {
            "model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler, "rng": RngState(), "progress": self.progress,
        }  # fmt: skip

    def step(self) -> None:
        inputs = torch.randn(8, 6) + float(np.random.rand())
        self.optimizer.zero_grad()
        loss = (self.model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        self.progress["step"] += 1
        self.progress["losses"].append(loss.item())


def test_training_goes_on_bit_for_bit_after_a_restore(tmp_path):
    first = Training(1)
    with AsyncCheckpointer(tmp_path, guard=first.optimizer) as ckpt:
        for step in range(1, 16):
            first.step()
            if step % 5 == 0:
                ckpt.save(first.state, step=step)
    second = Training(2)
    second.step()
    with AsyncCheckpointer(tmp_path) as ckpt:
        assert ckpt.restore(second.state, step=10) == 10
    assert second.progress["step"] == 10
    for _ in range(5):
        second.step()
    assert second.progress == first.progress
    assert difference(second.model.state_dict(), first.model.state_dict()) is None
    assert difference(second.optimizer.state_dict(), first.optimizer.state_dict()) is None
    assert second.scheduler.get_last_lr() == first.scheduler.get_last_lr()


def test_bytes_are_read_once_for_all_that_lie_together(ckpt, tmp_path, num_read):
    saved = {"w": torch.ones(5), "loader": {str(n): bytes([n % 256]) * 5000 for n in range(200)}}
    ckpt.save(saved, step=1).result()
    live = {"w": torch.zeros(5), "loader": {str(n): b"" for n in range(200)}}
    ckpt.restore(live)
    assert difference(live, saved) is None
    archive = next(tmp_path.rglob("*.tar"))
    assert 200 * 5000 <= num_read[archive.name] < 10 * os.path.getsize(archive)


def test_shapes_that_differ_everywhere_are_told_without_saying_that_names_do(ckpt):
    ckpt.save({"m": nn.Linear(4, 4)}, step=1).result()
    with pytest.raises(StateMismatchError) as caught:
        ckpt.restore({"m": nn.Linear(8, 8)})
    assert "no name in the checkpoint" not in str(caught.value)
    assert len(caught.value.mismatched) == 2


@pytest.mark.parametrize(("saved", "live"), [([torch.ones(3)], [torch.zeros(4)]), (torch.ones(3), torch.zeros(4))])
def test_a_state_without_names_at_its_top_is_not_said_to_lack_them(saved, live, ckpt):
    ckpt.save(saved, step=1).result()
    with pytest.raises(StateMismatchError) as caught:
        ckpt.restore(live)
    assert "no name in the checkpoint" not in str(caught.value)
    assert len(caught.value.mismatched) == 1


def test_what_is_filled_counts_as_written_to(ckpt):
    """Autograd and `unchanged=` know by its version that a tensor has other values."""
    ckpt.save({"w": torch.ones(5), "t": torch.ones(4, 6)}, step=1).result()
    live = {"w": torch.zeros(5), "t": torch.zeros(6, 4).t()}
    before = [tensor._version for tensor in live.values()]
    ckpt.restore(live)
    assert all(tensor._version > version for tensor, version in zip(live.values(), before, strict=True))
    with torch.inference_mode():
        live = {"w": torch.zeros(5), "t": torch.zeros(6, 4).t()}
        ckpt.restore(live)
    assert bool((live["t"] == 1).all())
    ckpt.restore(live)  # made in inference mode, restored outside of it


@pytest.mark.parametrize("verify", ["frist", None, "", 2])
def test_a_slip_in_verify_is_no_check_and_no_lack_of_one(verify, ckpt):
    ckpt.save({"w": torch.ones(5)}, step=1).result()
    live = {"w": torch.zeros(5)}
    for read in (lambda: ckpt.restore(live, verify=verify), lambda: ckpt.load(verify=verify)):
        with pytest.raises(ValueError, match="first"):
            read()
    assert not live["w"].any()


def test_names_that_are_shared_at_the_top_are_not_said_to_be_missing(ckpt):
    ckpt.save({"m": nn.Linear(4, 4)}, step=1).result()
    with pytest.raises(StateMismatchError) as caught:
        ckpt.restore({"m": nn.Sequential(nn.Linear(4, 4))})
    assert "no name in the checkpoint" not in str(caught.value)
    assert caught.value.missing == ("m.0.weight", "m.0.bias")
    with pytest.raises(StateMismatchError, match="is in the live state; the checkpoint holds m"):
        ckpt.restore(nn.Linear(4, 4))


@pytest.mark.parametrize(
    ("files", "told"),
    [
        (
            {
                "latest_ckpt_global_step.txt": "20",
                "global_step_20/policy/model.pt": "x",
                "global_step_20/data.pt": "x",
            },
            r"global_step_20 and latest_ckpt_global_step\.txt, which says '20'",
        ),
        ({"global_step_10/model.pt": "x", "global_step_20/model.pt": "x"}, "global_step_20, global_step_10"),
    ],
    ids=["skyrl", "folders"],
)
def test_a_run_that_a_trainer_has_written_without_us_is_told_of(tmp_path, files, told):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    options = {"naming": "skyrl"}
    with AsyncCheckpointer(tmp_path, **options) as ckpt:
        with pytest.warns(RuntimeWarning, match=told):
            assert ckpt.restore({"w": torch.zeros(2)}) is None
        assert {p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*") if p.is_file()} == files.keys()


def test_what_a_killed_process_of_ours_left_is_not_taken_for_somebody_elses(tmp_path):
    (tmp_path / "step_00000001").mkdir()
    (tmp_path / "step_00000001/rank_00000.0123abcd.tar").write_bytes(b"x")
    (tmp_path / "step_00000002").mkdir()
    with AsyncCheckpointer(tmp_path) as ckpt:
        assert ckpt.restore({"w": torch.zeros(2)}) is None
