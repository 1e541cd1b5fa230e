"""`also=`: one copy for an export and the checkpoint that is made from it."""

from __future__ import annotations

import os
import sys
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from exported import (
    assert_same,
    gpt2,
    held_back,  # noqa: F401
    spoil,
    state_of,
    weights_in,
)
from racing import Call
from states import MIB, difference, open_run

import async_ckpt
from async_ckpt import StorageUnavailableError, TornSnapshotError
from async_ckpt.staging.stager import Snapshot


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
def test_a_checkpoint_made_from_the_exports_copy_is_the_one_that_is_made_without(where, tmp_path, held_back):  # noqa: F811
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


def test_what_the_export_has_copied_is_not_read_again(tmp_path, held_back):  # noqa: F811
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


def test_what_was_seen_to_change_since_the_export_is_read_again(tmp_path, held_back):  # noqa: F811
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


def test_memory_that_has_become_anothers_is_not_taken_for_what_was_exported(tmp_path, held_back):  # noqa: F811
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


def test_views_and_tied_tensors_are_found_in_the_copy_of_their_memory(tmp_path, held_back):  # noqa: F811
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
