"""`Ema`: which mean of the weights is in an archive, that it goes on after restarts, and that the training pays nothing."""

import threading
import weakref
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from racing import until
from scripted_disk import scripted
from states import open_run
from tensor_classes import Scaled

import async_ckpt
from async_ckpt import AsyncCheckpointer, Ema, StateMismatchError, StorageFullError, UnsupportedStateError
from async_ckpt.core.host.loop import get_loop
from async_ckpt.core.host.threads import running_future
from async_ckpt.core.saving import ema
from async_ckpt.core.saving.ema import Mean, WeightMean

DECAY = 0.9
SAVES = (1, 3, 4, 8)


def weights(step: int, items: int = 50_000, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(items, generator=torch.Generator().manual_seed(step)).to(dtype)


def state_at(step: int) -> dict[str, Any]:
    tied = weights(step)
    return {
        "model": {
            "tied": [tied, tied],
            "half": weights(step + 100, dtype=torch.bfloat16),
            "wide": weights(step + 200, 10, torch.float64),
            "crossed": weights(step + 300, 600).view(20, 30).t(),
            "complex": torch.complex(weights(step, 9), weights(step + 1, 9)),
            "count": torch.tensor(step),
            "empty": torch.empty(0),
            "name": f"step {step}",
            "array": np.full(3, step, dtype=np.float32),
        },
        "step": step,
    }


def mean_of(saves: Mapping[int, torch.Tensor]) -> torch.Tensor:
    """The manual, read out in float64."""
    before, mean = None, None
    for step, given in saves.items():
        wide = given.to(torch.complex128 if given.is_complex() else torch.float64)
        kept = 0.0 if before is None else DECAY ** (step - before)
        mean, before = wide if mean is None else kept * mean + (1 - kept) * wide, step
    return mean


def run(root: Any, **options: Any) -> AsyncCheckpointer:
    return open_run(root, ema=Ema(DECAY), **options)


def save(ckpt: AsyncCheckpointer, *steps: int, **options: Any) -> None:
    for step in steps:
        ckpt.save(state_at(step), step, **options).result()


def tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from tensors(inner)


def assert_same_bits(one: Any, other: Any) -> None:
    pairs = list(zip(tensors(one), tensors(other), strict=True))
    assert pairs
    for ours, theirs in pairs:
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)


# --- which mean ---------------------------------------------------------------------------------------------------


def test_each_archive_has_the_mean_of_the_saves_up_to_it_by_the_steps_between_them(tmp_path):
    with run(tmp_path) as ckpt:
        save(ckpt, *SAVES)
        for number, step in enumerate(SAVES, 1):
            found = ckpt.load(step)
            assert_same_bits(found["model"], state_at(step)["model"])
            mean = found["ema"]["model"]
            for name in ("half", "wide", "crossed", "complex"):
                want = mean_of({one: state_at(one)["model"][name] for one in SAVES[:number]})
                torch.testing.assert_close(mean[name].to(want.dtype), want, rtol=1e-6, atol=1e-6)
            assert [mean[name].dtype for name in ("half", "wide")] == [torch.float32, torch.float64]
            assert (mean["count"], mean["name"], *mean["array"]) == (step, f"step {step}", step, step, step)
    first, second = async_ckpt.load(tmp_path)["ema"]["model"]["tied"]
    assert first.data_ptr() == second.data_ptr()


def test_the_mean_of_a_module_can_be_loaded_into_another_one(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(30, 30), torch.nn.BatchNorm1d(30))
    with run(tmp_path) as ckpt:
        ckpt.save({"model": model}, 1).result()
        with torch.no_grad():
            model[0].weight.zero_()
        ckpt.save({"model": model}, 2).result()
        averaged = torch.nn.Sequential(torch.nn.Linear(30, 30), torch.nn.BatchNorm1d(30))
        averaged.load_state_dict(ckpt.load(select="ema")["ema"]["model"])
        torch.testing.assert_close(averaged[0].weight, DECAY * ckpt.load(1)["model"]["0.weight"])


def test_only_the_groups_that_were_named_are_averaged(tmp_path):
    state = {"policy": {"w": torch.ones(3)}, "critic": [torch.ones(2)], "reference": {"w": torch.ones(4)}}
    with open_run(tmp_path, ema=Ema(DECAY, groups=["policy", "critic"])) as ckpt:
        ckpt.save(state, 1).result()
        assert list(ckpt.load()["ema"]) == ["policy", "critic"]


def test_a_part_and_a_step_that_is_saved_again_leave_the_mean_as_it_is(tmp_path):
    with run(tmp_path / "a") as ckpt, run(tmp_path / "b") as other:
        save(ckpt, 1, 3)
        save(other, 1, 3)
        save(ckpt, 4, select="step")
        save(ckpt, 4, overwrite=True)
        save(ckpt, 4, overwrite=True)
        save(other, 4)
        assert "ema" in ckpt.load()
        assert_same_bits(ckpt.load()["ema"], other.load()["ema"])


def test_a_snapshot_is_averaged_as_the_state_that_it_was_made_of(tmp_path):
    with run(tmp_path / "a") as ckpt, run(tmp_path / "b") as other:
        save(other, *SAVES)
        for step in SAVES:
            with async_ckpt.snapshot(state_at(step)) as snap:
                ckpt.save(snap, step).result()
        assert_same_bits(ckpt.load(), other.load())


def test_other_weights_begin_another_mean_and_that_is_said(tmp_path, caplog):
    with run(tmp_path) as ckpt:
        ckpt.save({"model": {"w": torch.ones(3)}}, 1).result()
        ckpt.save({"model": {"w": torch.zeros(4)}}, 2).result()
        assert torch.equal(ckpt.load()["ema"]["model"]["w"], torch.zeros(4))
    assert "the mean of model begins anew" in caplog.text


# --- restarts and failures ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("prewarms", [False, True])
def test_a_restart_goes_on_bit_for_bit(tmp_path, prewarms):
    with run(tmp_path / "whole") as whole:
        save(whole, *SAVES)
        for at in range(1, len(SAVES)):
            root = tmp_path / str(at)
            with run(root) as ckpt:
                save(ckpt, *SAVES[:at])
            with run(root) as ckpt:
                live = state_at(0)
                assert ckpt.restore(live) == SAVES[at - 1]
                if prewarms:
                    ckpt.prewarm(live)
                save(ckpt, *SAVES[at:])
                assert_same_bits(ckpt.load(), whole.load())


def test_after_a_rollback_the_mean_is_that_of_the_restored_step(tmp_path):
    with run(tmp_path / "a", on_rollback="retire") as ckpt, run(tmp_path / "b") as other:
        save(ckpt, 1, 3, 4)
        assert ckpt.restore(state_at(0), step=3) == 3
        save(ckpt, 8)
        save(other, 1, 3, 8)
        assert_same_bits(ckpt.load()["ema"], other.load()["ema"])


def test_a_save_that_fails_after_its_copy_is_in_the_mean_once(tmp_path):
    with run(tmp_path / "a") as ckpt, run(tmp_path / "b") as other, scripted(ckpt, 0) as storage:
        save(ckpt, 1)
        storage.fail("finish", error=StorageFullError("full", path="x", needed_bytes=1, free_bytes=0))
        handle = ckpt.save(state_at(3), 3)
        with pytest.raises(StorageFullError):
            handle.result()
        save(ckpt, 4)
        save(other, 1, 3, 4)
        assert ckpt.steps() == [1, 4]
        assert_same_bits(ckpt.load()["ema"], other.load()["ema"])


def test_a_copy_that_is_torn_leaves_the_mean_as_it_is(tmp_path, monkeypatch):
    from async_ckpt.core.staging import snapshot

    with run(tmp_path / "a") as ckpt, run(tmp_path / "b") as other:
        save(ckpt, 1)

        def torn(self: Any, _: int) -> None:
            raise async_ckpt.TornSnapshotError("it was torn", names=("model",))

        with monkeypatch.context() as patch:
            patch.setattr(snapshot.SegmentFiller, "fill", torn)
            with pytest.raises(async_ckpt.TornSnapshotError):
                ckpt.save(state_at(3), 3).result()
        save(ckpt, 4)
        save(other, 1, 4)
        assert_same_bits(ckpt.load()["ema"], other.load()["ema"])


def test_a_run_begins_a_mean_when_it_is_asked_for_and_goes_on_without_one(tmp_path):
    with open_run(tmp_path) as ckpt:
        save(ckpt, 1)
    with run(tmp_path) as ckpt:
        assert ckpt.restore(state_at(0)) == 1
        save(ckpt, 3)
        assert torch.equal(ckpt.load()["ema"]["model"]["tied"][0], state_at(3)["model"]["tied"][0])
    live = state_at(0)
    with open_run(tmp_path) as ckpt:
        assert ckpt.restore(live) == 3
        save(ckpt, 4)
        assert "ema" not in ckpt.load()
    assert "ema" not in live


def test_a_mean_of_other_weights_is_an_error_before_anything_is_written(tmp_path):
    with run(tmp_path) as ckpt:
        ckpt.save({"model": {"w": torch.ones(3)}, "more": {"w": torch.ones(2)}}, 1).result()
    live = {"model": {"w": torch.zeros(3)}, "more": {"w": torch.zeros(2)}}
    with open_run(tmp_path, ema=Ema(DECAY, groups="more")) as ckpt:
        with pytest.raises(StateMismatchError, match=r"ema\.more"):
            ckpt.restore(live)
        assert torch.equal(live["model"]["w"], torch.zeros(3))
        assert ckpt.restore(live, strict=False) == 1
        ckpt.save(live, 2).result()
        assert torch.equal(ckpt.load()["ema"]["more"]["w"], torch.ones(2))


# --- what it costs ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("guarded", [False, True])
def test_the_call_returns_and_the_weights_may_change_while_the_mean_is_updated(tmp_path, monkeypatch, guarded):
    held, update = threading.Event(), Mean.update

    def late(*arguments: Any) -> None:
        assert held.wait(60)
        update(*arguments)

    monkeypatch.setattr(Mean, "update", late)
    model = torch.nn.Linear(1000, 1000)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(1, 1000)).sum().backward()
    optimizer.step()
    with run(tmp_path, guard=optimizer if guarded else None) as ckpt:
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        handle = ckpt.save({"model": model, "optimizer": optimizer}, 1)
        model(torch.ones(1, 1000)).sum().backward()
        optimizer.step()
        assert not torch.equal(model.weight, before["weight"])
        assert not handle.done()
        held.set()
        handle.result()
        assert_same_bits([ckpt.load()["model"], ckpt.load()["ema"]["model"]], [before, before])


class Updates:
    """A mean whose updates are collected instead of run."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.waiting: list[Any] = []
        background = SimpleNamespace(submit=lambda update, refused: self.waiting.append(update))
        loop = SimpleNamespace(copiers=get_loop().copiers, background=background)
        monkeypatch.setattr(ema, "get_loop", lambda: loop)
        self.mean, self.staged = WeightMean(Ema(DECAY)), running_future()

    def join(self, step: int) -> list[weakref.ref[torch.Tensor]]:
        """A save is joined, its weights are copied, and all that waits for that was told. Returns the copies."""
        told = threading.Event()
        joined = self.mean.joined(state_at(step), step, None)
        joined.copy.completion.add_done_callback(lambda _: told.set())
        assert told.wait(60)
        return [weakref.ref(tensor) for tensor in tensors(joined.state["model"].state_dict())]


def test_an_update_waits_until_the_save_before_has_copied_the_mean(monkeypatch):
    updates = Updates(monkeypatch)
    updates.join(1)
    assert len(updates.waiting) == 1
    updates.mean.follow(updates.staged)
    updates.join(2)
    updates.waiting.pop()()
    assert updates.waiting == []
    updates.staged.set_result(None)
    assert len(updates.waiting) == 1


def test_the_future_of_a_save_that_is_kept_keeps_no_copy_of_the_weights(monkeypatch):
    updates = Updates(monkeypatch)
    updates.join(1)
    updates.mean.follow(updates.staged)  # a handle has it
    copies = updates.join(2)
    updates.waiting.pop()()
    updates.staged.set_result(None)
    updates.waiting.pop()()
    until(lambda: copies and not any(copy() is not None for copy in copies))


# --- what is refused ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("decay", [0, 1, 1.5, -0.1, True, "0.9", float("nan"), None])
def test_a_decay_that_makes_no_sense_is_refused(decay):
    with pytest.raises(ValueError, match=r"Ema\(decay\) must be a number above 0 and below 1"):
        Ema(decay)


@pytest.mark.parametrize("groups", [[], ["ema"], [3], ()])
def test_groups_that_make_no_sense_are_refused(groups):
    with pytest.raises(ValueError, match=r"Ema\(groups=…\) must be names of entries of the state"):
        Ema(0.9, groups=groups)


@pytest.mark.parametrize(
    ("state", "options", "message"),
    [
        ({"weights": {}}, {}, "the state has no entry of that name"),
        ({"model": {"w": torch.ones(1)}, "ema": 1}, {}, "ema= adds the entry 'ema'"),
        ({"model": {"w": torch.ones(1)}}, {"driver": {"ema": 1}}, "ema= adds the entry 'ema'"),
        ({"model": {"w": torch.ones(1)}, "step": 1}, {"unchanged": "model"}, "leave that out of unchanged="),
    ],
)
def test_a_state_without_room_for_a_mean_is_refused(tmp_path, state, options, message):
    with run(tmp_path) as ckpt, pytest.raises(ValueError, match=message):
        ckpt.save(state, 1, **options)


def test_wrapped_tensors_are_refused_by_name(tmp_path):
    wrapped = Scaled(torch.ones(4, 4), torch.ones(4, 1))
    with run(tmp_path) as ckpt:
        with pytest.raises(UnsupportedStateError, match=r"model\.w: there is no mean of .*Scaled"):
            ckpt.save({"model": {"w": wrapped}}, 1)
        with pytest.raises(TypeError, match="ema must be Ema"):
            open_run(tmp_path, ema=0.9)
        save(ckpt, 1)


# --- ranks --------------------------------------------------------------------------------------------------------

RANKS = """
from async_ckpt import Ema
ckpt = open_run(here.root, ema=Ema(0.9))
state = small(0)
here.tell(ckpt.restore(state))
for step in {steps}:
    here.save(ckpt, small(step), step)
ckpt.close()
"""


def test_what_each_rank_has_for_itself_has_a_mean_on_each(worlds):
    script = """
from async_ckpt import Ema
ckpt = open_run(here.root, ema=Ema(0.5))
for step in (1, 2):
    here.save(ckpt, {"model": {"w": torch.full((50_000,), float(step * 10 + here.rank))}}, step, per_rank="model")
ckpt.close()
"""
    worlds.run(2, script)

    found = async_ckpt.load(worlds.root)["ema"]
    assert [found[rank]["model"]["w"].unique().tolist() for rank in (0, 1)] == [[15.0], [16.0]]


def test_shards_are_averaged_and_resharded(worlds):
    worlds.run(2, RANKS.format(steps=[1, 3]))
    ended = worlds.run(3, RANKS.format(steps=[4]))
    assert [one.told[0] for one in ended] == [3] * 3

    found = async_ckpt.load(worlds.root)
    mean = found["ema"]["model"]
    for name, own in found["model"].items():
        want = mean_of({step: own + (step - 4.0) for step in (1, 3, 4)})
        torch.testing.assert_close(mean[name].double(), want)
