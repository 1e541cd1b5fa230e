"""Staging for torch.distributed.checkpoint.async_save: copies of one instant, in memory that is used again."""

import copy
import gc
import os
import pickle
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from dcp_states import CheckpointException, PinnedStager, TarStorageWriter, dcp, plain, training
from racing import Call, HeldCrew
from states import difference, weight
from torch.distributed.checkpoint.staging import AsyncStager

import async_ckpt
from async_ckpt import TornSnapshotError, UnsupportedStateError
from async_ckpt.core.host.loop import get_loop
from async_ckpt.face.dcp import stager as module


class Held(TarStorageWriter):
    """Writes when the test lets it."""

    def __init__(self, path: Path, **options: Any) -> None:
        super().__init__(path, **options)
        self.may_write = threading.Event()

    def write_data(self, plan: Any, planner: Any) -> Any:
        assert self.may_write.wait(60)
        return super().write_data(plan, planner)


@pytest.fixture
def stager():
    made = PinnedStager()
    yield made
    made.close()


def test_the_copy_is_of_one_instant_whatever_happens_to_the_state(tmp_path, stager):
    state = training()
    before = copy.deepcopy(state)
    writer = Held(tmp_path / "x")
    assert isinstance(stager, AsyncStager)
    response = dcp.async_save(state, storage_writer=writer, async_stager=stager)
    response.staging_completion.result(60)
    for tensor in state["model"].values():
        tensor.zero_()
    state["listed"][0].zero_()
    state["plain"].append(5)
    writer.may_write.set()
    response.upload_completion.result(60)

    assert difference(plain(async_ckpt.load(tmp_path / "x")), plain(before)) is None


def test_a_writer_stages_by_itself_and_no_save_sees_the_bytes_of_another(tmp_path):
    state = {"w": weight(0), "n": torch.ones(3)}
    writers, futures = [], []
    for number in range(3):
        state["w"].copy_(weight(number))
        writers.append(Held(tmp_path / f"{number}"))
        futures.append(dcp.async_save(state, storage_writer=writers[-1]))
    for writer in reversed(writers):
        writer.may_write.set()
    for number, future in enumerate(futures):
        future.result(60)
        assert torch.equal(async_ckpt.load(tmp_path / f"{number}")["w"], weight(number))


def test_one_writer_has_several_saves_under_way_that_all_go_where_they_should(tmp_path):
    writer = Held(tmp_path / "none")
    futures = [
        dcp.async_save({"n": number}, storage_writer=writer, checkpoint_id=tmp_path / f"{number}")
        for number in range(3)
    ]
    writer.may_write.set()
    for number, future in enumerate(futures):
        future.result(60)
        assert async_ckpt.load(tmp_path / f"{number}") == {"n": number}
    dcp.save({"n": 3}, storage_writer=writer, checkpoint_id=tmp_path / "3")
    assert sorted(os.listdir(tmp_path)) == ["0", "1", "2", "3"]
    assert all(len(os.listdir(tmp_path / name)) == 2 for name in "0123")


class Numbered(TarStorageWriter):
    """Its saves write when they are told to, each."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.begun = [threading.Event() for _ in range(4)]
        self.may_write = [threading.Event() for _ in range(4)]

    def write_data(self, plan, planner):
        number = planner.state_dict["n"]
        self.begun[number].set()
        assert self.may_write[number].wait(60)
        return super().write_data(plan, planner)


def test_of_several_saves_to_one_folder_the_last_one_stands_there_whichever_ends_first(tmp_path):
    writer = Numbered(tmp_path / "x", overwrite=True)
    futures = []
    for number in range(4):
        futures.append(dcp.async_save({"n": number, "w": weight(number)}, storage_writer=writer))
        assert writer.begun[number].wait(60)
    for number, stands in ((1, 1), (0, 1), (3, 3), (2, 3)):
        writer.may_write[number].set()
        futures[number].result(60)
        assert async_ckpt.load(tmp_path / "x")["n"] == stands
        assert len(os.listdir(tmp_path / "x")) == 2


def test_another_writers_commit_meanwhile_is_kept(tmp_path):
    writer = Numbered(tmp_path / "x", overwrite=True)
    future = dcp.async_save({"n": 0}, storage_writer=writer)
    assert writer.begun[0].wait(60)
    dcp.save({"n": 9}, storage_writer=TarStorageWriter(tmp_path / "x"))
    writer.may_write[0].set()
    with pytest.raises(CheckpointException, match="another writer has committed"):
        future.result(60)
    assert async_ckpt.load(tmp_path / "x") == {"n": 9}


def test_memory_is_used_again_once_nobody_holds_the_copy(stager):
    state = {"w": weight(1)}
    first = stager.stage(state).result(60)["w"]
    address = first.data_ptr()
    second = stager.stage(state).result(60)["w"]
    assert second.data_ptr() != address
    del first
    gc.collect()
    third = stager.stage(state).result(60)["w"]
    assert third.data_ptr() == address
    assert torch.equal(third, second)


def test_too_little_memory_is_an_error_of_the_save():
    stager = PinnedStager(host_bytes=1000)
    with pytest.raises(MemoryError):
        stager.stage({"w": weight(1)})


def test_tied_tensors_and_declared_slices_stay_what_they_are(stager):
    one = torch.randn(4, 4)
    sliced = torch.zeros(2, 4)
    facts = {
        "global_shape": (4, 4),
        "global_offsets": ((2, 0),),
        "local_offsets": ((0, 0),),
        "local_sizes": ((2, 4),),
    }
    vars(sliced).update(facts)
    made = stager.stage({"a": one, "b": [one, one.t()], "c": sliced}).result(60)
    assert made["a"] is made["b"][0]
    assert made["a"].untyped_storage().data_ptr() == made["b"][1].untyped_storage().data_ptr()
    assert vars(made["c"]) == facts
    assert not made["a"].requires_grad


def test_what_cannot_be_staged_is_named(stager):
    with pytest.raises(UnsupportedStateError, match="a meta tensor has no values"):
        stager.stage({"model": {"w": torch.empty(3, device="meta")}})
    with pytest.raises(UnsupportedStateError, match="cannot be copied"):
        stager.stage({"lock": threading.Lock()})


def sgd(parameter: torch.nn.Parameter) -> torch.optim.Optimizer:
    parameter.grad = torch.ones_like(parameter)
    return torch.optim.SGD([parameter], lr=1.0)


def test_under_a_guard_the_optimizer_waits_for_the_copy(tmp_path, monkeypatch):
    """The rest of the copy is held until the step waits for it."""
    parameter = torch.nn.Parameter(torch.ones(1 << 20))
    optimizer = sgd(parameter)
    crew = HeldCrew(get_loop().copiers)
    monkeypatch.setattr(module, "get_loop", lambda: type("Loop", (), {"copiers": crew}))
    stager = PinnedStager(guard=optimizer)
    response = dcp.async_save(
        {"w": parameter.detach()}, storage_writer=TarStorageWriter(tmp_path / "x"), async_stager=stager
    )
    assert not response.staging_completion.done()
    step = Call(optimizer.step)
    step.wait_until_inside("hold")
    crew.release()
    step.outcome()
    response.upload_completion.result(60)
    assert bool((async_ckpt.load(tmp_path / "x")["w"] == 1).all())
    assert bool((parameter == 0).all())


def test_a_tensor_that_changes_under_a_guard_fails_the_save(tmp_path, monkeypatch):
    parameter = torch.nn.Parameter(torch.ones(1 << 20))
    crew = HeldCrew(get_loop().copiers)
    monkeypatch.setattr(module, "get_loop", lambda: type("Loop", (), {"copiers": crew}))
    stager = PinnedStager(guard=sgd(parameter))
    response = dcp.async_save(
        {"w": parameter.detach()}, storage_writer=TarStorageWriter(tmp_path / "x"), async_stager=stager
    )
    parameter.data.add_(1)
    crew.release()
    with pytest.raises(TornSnapshotError):
        response.upload_completion.result(60)
    with pytest.raises(TornSnapshotError):
        stager.synchronize_staging()
    assert not (tmp_path / "x").exists()


def test_a_writer_with_a_guard_answers_with_both_futures_and_without_one_when_all_is_copied(tmp_path):
    """The type of torch's answer tells whether training still has to wait for the copy."""
    parameter = torch.nn.Parameter(torch.ones(1 << 20))
    state = {"w": parameter.detach()}
    future = dcp.async_save(state, storage_writer=TarStorageWriter(tmp_path / "plain"))
    parameter.data.zero_()
    guarded = dcp.async_save(state, storage_writer=TarStorageWriter(tmp_path / "guarded", guard=sgd(parameter)))

    assert isinstance(future, Future)
    future.result(60)
    assert bool((async_ckpt.load(tmp_path / "plain")["w"] == 1).all())
    guarded.staging_completion.result(60)
    guarded.upload_completion.result(60)
    assert bool((async_ckpt.load(tmp_path / "guarded")["w"] == 0).all())


def test_torch_that_knows_no_future_of_a_copy_gets_the_copy(monkeypatch, stager):
    monkeypatch.setattr(module, "_MAY_RETURN_FUTURE", False)
    assert torch.equal(stager.stage({"w": weight(1)})["w"], weight(1))
    assert stager.should_synchronize_after_execute is False


def test_it_goes_to_another_process_without_its_memory(tmp_path):
    writer = TarStorageWriter(tmp_path / "x", guard=sgd(torch.nn.Parameter(torch.ones(2))))
    made = pickle.loads(pickle.dumps(writer))
    dcp.save({"w": torch.ones(2)}, storage_writer=made)
    assert async_ckpt.load(tmp_path / "x")["w"].tolist() == [1, 1]
    assert made.stage({"w": torch.ones(2)})["w"].tolist() == [1, 1]
    assert os.listdir(tmp_path / "x")
