"""`unchanged="auto"`: frozen parameters are taken over from the commit that has them, and every step loads bit for bit."""

import json
import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from frozen import Adapted, train
from racing import PATIENCE
from states import open_run

import async_ckpt
from async_ckpt import (
    AsyncCheckpointer,
    CorruptCheckpointError,
    NotCommittedError,
    Place,
    StorageUnavailableError,
    TornSnapshotError,
)
from async_ckpt.core.runs.run import Run
from async_ckpt.core.saving import taken_over
from async_ckpt.core.saving.tiers import Tiers

BASE = 2 << 20  # bytes that a step with the base has at least, and one without it has not


@pytest.fixture
def model() -> Adapted:
    return Adapted()


def save(ckpt: AsyncCheckpointer, model: torch.nn.Module, step: int, **options: Any) -> int:
    """The bytes of a step, which loads bit for bit."""
    num_bytes = ckpt.save({"model": model, "step": step}, step, **options).result().num_bytes
    assert_has(ckpt.load(step)["model"], model)
    return num_bytes


def assert_has(loaded: dict[str, torch.Tensor], model: torch.nn.Module) -> None:
    own = model.state_dict()
    assert loaded.keys() == own.keys()
    for name, tensor in own.items():
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(loaded[name], tensor), name


def lenders(root: Path, step: int) -> set[int]:
    manifest = json.loads((root / f"step_{step:08d}" / "manifest.json").read_text())
    return {row["step"] for row in manifest["elsewhere"]}


@contextmanager
def comparison_held(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Within the block, no tensor is compared with its digest."""
    may_begin, digest = threading.Event(), taken_over._digest

    def held(*args: Any) -> bytes:
        may_begin.wait(60)
        return digest(*args)

    monkeypatch.setattr(taken_over, "_digest", held)
    try:
        yield
    finally:
        may_begin.set()


def test_a_frozen_base_is_written_once_and_read_from_every_step(tmp_path, model):
    with open_run(tmp_path) as ckpt:
        sizes = []
        for step in range(1, 11):
            train(model)
            sizes.append(save(ckpt, model, step))
    assert sizes[0] > BASE
    assert sum(sizes) < 1.1 * (sizes[0] + 10 * sizes[1])
    assert max(sizes[1:]) < BASE / 10
    assert [lenders(tmp_path, step) for step in (1, 2, 10)] == [set(), {1}, {1}]
    for path in (tmp_path, tmp_path / "step_00000010"):
        assert_has(async_ckpt.load(path)["model"], model)
        assert_has(async_ckpt.load(path, mmap=True)["model"], model)
    assert async_ckpt.load(tmp_path, select="*.up.*")["model"].keys() == {"up.weight"}
    assert async_ckpt.verify(tmp_path).steps == tuple(range(1, 11))
    other = Adapted()
    with open_run(tmp_path) as ckpt:
        assert ckpt.restore({"model": other, "step": 0}) == 10
    assert_has(other.state_dict(), model)


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.Adam(p, foreach=True),
        lambda p: torch.optim.AdamW(p, fused=True),
        lambda p: torch.optim.Adagrad(p, fused=True),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    ],
    ids=["SGD", "Adam foreach", "AdamW fused", "Adagrad fused", "SGD fused"],
)
def test_what_an_optimizer_changes_is_written_even_if_it_counts_no_writes(tmp_path, make):
    """Fused optimizers leave the version counters as they are."""
    model = torch.nn.Sequential(torch.nn.Linear(512, 520, bias=False), torch.nn.Linear(520, 530, bias=False))
    model[0].requires_grad_(False)
    optimizer = make(model.parameters())
    with open_run(tmp_path) as ckpt:
        for step in (1, 2, 3):
            train(model, optimizer)
            ckpt.save({"model": model, "optimizer": optimizer}, step).result()
            loaded = ckpt.load(step)
            assert_has(loaded["model"], model)
            for name, value in optimizer.state_dict()["state"][1].items():
                assert value is None or torch.equal(torch.as_tensor(loaded["optimizer"]["state"][1][name]), value)
    assert lenders(tmp_path, 3) == {1}


def test_without_a_live_module_everything_is_written(tmp_path, model):
    """A plain state dict does not tell which of its tensors require a gradient."""
    with open_run(tmp_path) as ckpt:
        sizes = [ckpt.save({"model": model.state_dict()}, step).result().num_bytes for step in (1, 2)]
        assert min(sizes) > BASE


def past_by_data(tensor: torch.Tensor) -> None:
    tensor.data.mul_(2)


def past_by_numpy(tensor: torch.Tensor) -> None:
    tensor.numpy()[:] += 1


@pytest.mark.parametrize("write", [past_by_data, past_by_numpy])
def test_weights_that_are_written_to_past_their_counter_are_written(tmp_path, model, write):
    with open_run(tmp_path) as ckpt:
        for step in (1, 2):
            save(ckpt, model, step)
        write(model.base[0].weight)
        assert save(ckpt, model, 3) > BASE  # one that does not count makes them all doubtful
        assert BASE / 2 < save(ckpt, model, 4) < BASE  # from now on, the counter of that one is not believed
        write(model.base[0].weight)
        assert save(ckpt, model, 5) < BASE
        assert lenders(tmp_path, 5) == {3}


def test_a_single_element_that_is_written_to_past_the_counter_fails_that_save_by_name(tmp_path, model):
    with open_run(tmp_path) as ckpt:
        save(ckpt, model, 1)
        model.base[1].weight.data[0, 0] += 1
        with pytest.raises(TornSnapshotError, match=r"model\.base\.1\.weight .*past its version counter") as caught:
            ckpt.save({"model": model, "step": 2}, 2).result()
        assert caught.value.names == ("model.base.1.weight",)
        assert ckpt.steps() == [1]
        assert save(ckpt, model, 3) > BASE
        assert BASE / 2 < save(ckpt, model, 4) < BASE
        assert lenders(tmp_path, 4) == {3}


def test_a_counted_write_after_the_call_is_a_matter_of_the_next_save(tmp_path, model, monkeypatch):
    with open_run(tmp_path) as ckpt:
        save(ckpt, model, 1)
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        with comparison_held(monkeypatch):
            handle = ckpt.save({"model": model, "step": 2}, 2)
            with torch.no_grad():
                model.base[0].weight.add_(1)
        assert handle.result().num_bytes < BASE
        assert all(torch.equal(ckpt.load(2)["model"][name], tensor) for name, tensor in before.items())
        assert BASE / 2 < save(ckpt, model, 3) < BASE
        assert lenders(tmp_path, 3) == {1}
        assert save(ckpt, model, 4) < BASE / 10
        assert lenders(tmp_path, 4) == {1, 3}


def test_a_write_past_the_counter_after_the_call_is_found(tmp_path, model, monkeypatch):
    with open_run(tmp_path) as ckpt:
        save(ckpt, model, 1)
        with comparison_held(monkeypatch):
            handle = ckpt.save({"model": model, "step": 2}, 2)
            model.base[0].weight.data.add_(1)
        assert isinstance(handle.exception(), TornSnapshotError)
        assert ckpt.steps() == [1]


def test_memory_that_goes_after_the_call_ends_nothing(tmp_path, model, monkeypatch):
    with open_run(tmp_path) as ckpt:
        save(ckpt, model, 1)
        with comparison_held(monkeypatch):
            handle = ckpt.save({"model": model, "step": 2}, 2)
            model.base[0].weight.untyped_storage().resize_(0)
        assert handle.result().num_bytes < BASE


def counted(model: Adapted) -> None:
    with torch.no_grad():
        model.base[0].weight.mul_(2)


def moved(model: Adapted) -> None:
    model.base[0].weight.data = model.base[0].weight.data.clone()


def reallocated(model: Adapted) -> None:
    """The same address, which says nothing: it is another storage."""
    old = model.base[0].weight.data
    storage = torch._C._construct_storage_from_data_pointer(old.data_ptr(), old.device, old.nbytes)
    model.base[0].weight.data = torch.empty(0).set_(storage, 0, old.shape, old.stride())
    model.kept = old


def merged(model: Adapted) -> None:
    """As peft merges an adapter, and takes it out again, which is not exact."""
    delta = torch.randn(520, 512)
    model.base[0].weight.data += delta
    model.base[0].weight.data -= delta


def converted(model: Adapted) -> None:
    model.base[0].to(torch.bfloat16)


def reshaped(model: Adapted) -> None:
    model.base[0].weight.data = model.base[0].weight.data.view(512, 520)


def unfrozen(model: Adapted) -> None:
    model.base[0].requires_grad_(True)


@pytest.mark.parametrize("change", [counted, moved, reallocated, merged, converted, reshaped, unfrozen])
def test_a_tensor_that_is_not_the_same_is_written(tmp_path, model, change):
    with open_run(tmp_path) as ckpt:
        for step in (1, 2):
            save(ckpt, model, step)
        change(model)
        assert save(ckpt, model, 3) > BASE / 4
        assert lenders(tmp_path, 3) == (set() if change is merged else {1})
        save(ckpt, model, 4)


def test_tied_tensors_and_views_of_one_storage(tmp_path):
    """A tied tensor is the tensor that it is tied to; views of one storage are tensors of their own."""
    flat = torch.randn(2, 512, 520)
    model = torch.nn.Module()
    for number in range(2):
        model.register_parameter(f"view_{number}", torch.nn.Parameter(flat[number], requires_grad=False))
    model.tied = model.view_1
    model.transposed = torch.nn.Parameter(torch.randn(600, 512).T, requires_grad=False)
    with open_run(tmp_path) as ckpt:
        sizes = [save(ckpt, model, step) for step in (1, 2)]
        assert sizes[0] - sizes[1] >= 2 * 512 * 520 * 4
        loaded = ckpt.load(2)["model"]
        assert loaded["tied"].data_ptr() == loaded["view_1"].data_ptr()
        with torch.no_grad():
            flat[1].add_(1)  # the counter is the storage's: both are written
        assert save(ckpt, model, 3) > 2 * 512 * 520 * 4


def test_retention_keeps_the_step_that_lends_as_long_as_it_is_needed(tmp_path, model):
    with open_run(tmp_path, keep=1) as ckpt:
        for step in (1, 2, 3):
            save(ckpt, model, step)
        assert ckpt.steps() == [1, 3]
        counted(model)
        model.base[1].weight.data = model.base[1].weight.data.clone()
        save(ckpt, model, 4)
        save(ckpt, model, 5)
        assert ckpt.steps() == [4, 5]


def test_a_lender_that_somebody_deletes_is_not_borrowed_from(tmp_path, model):
    with open_run(tmp_path) as ckpt:
        for step in (1, 2):
            save(ckpt, model, step)
        shutil.rmtree(tmp_path / "step_00000001")
        assert save(ckpt, model, 3) > BASE
        with pytest.raises(CorruptCheckpointError, match="step_00000001"):
            ckpt.load(2)


def test_a_lender_that_is_deleted_after_the_call_fails_that_save_alone(tmp_path, model, monkeypatch):
    with open_run(tmp_path) as ckpt:
        save(ckpt, model, 1)
        with comparison_held(monkeypatch):
            handle = ckpt.save({"model": model, "step": 2}, 2)
            shutil.rmtree(tmp_path / "step_00000001")
        assert isinstance(handle.exception(), NotCommittedError)
        assert save(ckpt, model, 3) > BASE


def test_nothing_is_taken_over_from_a_save_that_is_not_committed(tmp_path, model, monkeypatch):
    def fails(*_: Any, **__: Any) -> None:
        raise StorageUnavailableError("no answer", path="")

    with open_run(tmp_path) as ckpt:
        with monkeypatch.context() as patch:
            patch.setattr(Run, "commit", fails)
            assert isinstance(ckpt.save({"model": model}, 1).exception(), StorageUnavailableError)
        assert save(ckpt, model, 2) > BASE
        assert save(ckpt, model, 3) < BASE / 10


def after_restore(ckpt: AsyncCheckpointer, model: Adapted) -> int:
    ckpt.restore({"model": model, "step": 0})
    return save(ckpt, model, 3)


def rolled_back(ckpt: AsyncCheckpointer, model: Adapted) -> int:
    ckpt.restore({"model": model, "step": 0}, 1)
    return save(ckpt, model, 3)


@pytest.mark.parametrize(
    "how",
    [
        after_restore,
        rolled_back,
        lambda ckpt, model: save(ckpt, model, 1, overwrite=True),
        lambda ckpt, model: save(ckpt, model, 2, overwrite=True),
        lambda ckpt, model: save(ckpt, model, 3, unchanged=()),
    ],
    ids=["restore", "rollback", "retire", "overwrite", "off"],
)
def test_such_a_save_is_whole(tmp_path, model, how):
    with open_run(tmp_path, on_rollback="retire") as ckpt:
        for step in (1, 2):
            save(ckpt, model, step)
        assert how(ckpt, model) > BASE
        save(ckpt, model, 9)
        assert save(ckpt, model, 10) < BASE / 10


def test_each_of_several_places_gets_a_frozen_base_once_and_before_the_steps_that_borrow_it(tmp_path, model):
    roots = [tmp_path / "near", tmp_path / "middle", tmp_path / "far"]
    far = Place(str(roots[2]), compression="zstd", every=2, keep=2)
    with AsyncCheckpointer([*roots[:2], far], keep=2) as ckpt:
        sizes = [save(ckpt, model, 1)]
        for step in range(2, 8):
            train(model)
            sizes.append(save(ckpt, model, step))
        ckpt.save({"model": model, "step": 8}, 8).at(roots[2]).result(PATIENCE)
    assert sizes[0] > BASE > 10 * max(sizes[1:])
    for root in roots:
        assert lenders(root, 8) == {1}
        with open_run(root) as alone:
            assert {1, 8} < {*alone.steps()}
        async_ckpt.verify(root)
    for root in roots[:2]:
        shutil.rmtree(root)
    lost = Adapted()
    with AsyncCheckpointer([*roots[:2], far], keep=2) as ckpt:
        assert ckpt.restore({"model": lost, "step": 0}) == 8
        assert_has(lost.state_dict(), model)
        assert save(ckpt, lost, 9) > BASE
        assert save(ckpt, lost, 10) < BASE / 10


def test_a_save_is_whole_if_it_goes_to_another_place_than_the_one_before(tmp_path, model, monkeypatch):
    roots = [tmp_path / "near", tmp_path / "far"]
    with AsyncCheckpointer(roots) as ckpt:
        near = ckpt._roots.runs[0]
        handles = [ckpt.save({"model": model}, step) for step in (1, 2)]
        has_room = Tiers._has_room
        monkeypatch.setattr(Tiers, "_has_room", lambda tiers, run: run is not near and has_room(tiers, run))
        handles += [ckpt.save({"model": model}, step) for step in (3, 4)]
        monkeypatch.undo()
        handles += [ckpt.save({"model": model}, step) for step in (5, 6)]
        reports = [handle.result() for handle in handles]
    assert [Path(report.path).parents[1].name for report in reports] == ["near", "near", "far", "far", "near", "near"]
    assert [report.num_bytes > BASE for report in reports] == [True, False] * 3
    for step in (2, 4, 6):
        assert_has(async_ckpt.load(Path(reports[step - 1].path).parent)["model"], model)
    assert lenders(roots[1], 6) == {5}


def test_a_damaged_archive_that_lends_a_tensor_is_read_from_the_next_place(tmp_path, model):
    roots = [tmp_path / "near", tmp_path / "far"]
    with AsyncCheckpointer(roots) as ckpt:
        for step in (1, 2):
            ckpt.save({"model": model}, step).at(roots[1]).result(PATIENCE)
        (archive,) = (roots[0] / "step_00000001").glob("*.tar")
        data = bytearray(archive.read_bytes())
        data[len(data) // 2] ^= 1
        archive.write_bytes(data)
        with pytest.warns(RuntimeWarning, match="is read from another place"):
            assert_has(ckpt.load(2)["model"], model)


def test_snapshots_parts_and_means_are_whole(tmp_path, model):
    with open_run(tmp_path / "a") as ckpt:
        save(ckpt, model, 1)
        with async_ckpt.snapshot({"model": model}) as snap:
            assert ckpt.save(snap, 2).result().num_bytes > BASE
        assert ckpt.save({"model": model}, 3, select="model.base.0.*").result().num_bytes > BASE / 4
        assert_has(ckpt.load(2)["model"], model)
    with open_run(tmp_path / "b", ema=async_ckpt.Ema(0.9)) as ckpt:
        for step in (1, 2):
            assert ckpt.save({"model": model}, step).result().num_bytes > BASE
            assert_has(ckpt.load(step)["model"], model)


def test_a_group_that_is_said_to_be_unchanged_may_have_tensors_of_an_earlier_step(tmp_path, model):
    frozen = torch.nn.Linear(512, 600).requires_grad_(False)
    state = {"model": model, "ref": frozen}
    with open_run(tmp_path, keep=1) as ckpt:
        for step in (1, 2):
            ckpt.save(state, step).result()
        ckpt.save(state, 3, unchanged={"ref"}).result()
        train(model)
        ckpt.save(state, 4, unchanged={"ref"}).result()
        loaded = ckpt.load(4)
        assert_has(loaded["ref"], frozen)
        assert_has(loaded["model"], model)
    with open_run(tmp_path, keep=1) as ckpt:
        assert ckpt.restore(state) == 4
        ckpt.save(state, 5, unchanged={"ref"}).result()
        assert_has(ckpt.load(5)["ref"], frozen)
        assert async_ckpt.verify(tmp_path / "step_00000005").steps == (5,)


def test_a_group_of_nothing_else_counts_as_unchanged(tmp_path, model):
    frozen = torch.nn.Linear(512, 600, bias=False).requires_grad_(False)
    with open_run(tmp_path) as ckpt:
        for step in (1, 2):
            train(model)
            report = ckpt.save({"model": model, "ref": frozen}, step).result()
    assert report.unchanged_groups == ("ref",)


def test_damage_to_the_lender_is_found_in_each_step_that_borrows(tmp_path, model):
    with open_run(tmp_path) as ckpt:
        for step in (1, 2):
            save(ckpt, model, step)
    (archive,) = (tmp_path / "step_00000001").glob("rank_*.tar")
    data = bytearray(archive.read_bytes())
    data[len(data) // 2] ^= 1
    archive.write_bytes(data)
    with pytest.raises(CorruptCheckpointError, match=r"step_00000001.* does not match its digest"):
        async_ckpt.load(tmp_path / "step_00000002")
    with pytest.raises(CorruptCheckpointError, match="damaged: step 1, step 2"):
        async_ckpt.verify(tmp_path)


def test_an_archive_alone_says_where_the_rest_of_it_is(tmp_path, model):
    with open_run(tmp_path) as ckpt:
        for step in (1, 2):
            save(ckpt, model, step)
    (archive,) = (tmp_path / "step_00000002").glob("rank_*.tar")
    with pytest.raises(CorruptCheckpointError, match=r"refers to step_00000001/rank_.* load the folder of its step"):
        async_ckpt.load(archive)
    assert async_ckpt.load(archive, select="*.up.*")["model"].keys() == {"up.weight"}


KILLED = """
import os, signal, sys
import torch
from states import open_run
from frozen import Adapted, train
from racing import PATIENCE
torch.manual_seed(0)
model = Adapted()
with open_run(sys.argv[1]) as ckpt:
    for step in (1, 2, 3):
        train(model)
        handle = ckpt.save({"model": model, "step": step}, step)
        if step < 3:
            handle.result()
            torch.save(model.state_dict(), sys.argv[1] + f".{step}.pt")
        else:
            os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_process_that_is_killed_between_saves_leaves_whole_steps(tmp_path, nursery):
    root = tmp_path / "run"
    assert nursery.run(KILLED, str(root)).status == -signal.SIGKILL
    model = Adapted()
    with open_run(root, keep=1) as ckpt:
        step = ckpt.restore({"model": model, "step": 0})
        assert step in (2, 3)
        if step == 2:
            assert_has(torch.load(f"{root}.2.pt"), model)
        train(model)
        assert save(ckpt, model, 5) > BASE
        ckpt.wait()
        assert ckpt.steps() == [5]
        assert save(ckpt, model, 6) < BASE / 10


def test_on_a_device_the_bytes_are_compared_behind_the_training(tmp_path, sim):
    """No sample is taken there: the call would wait for the device."""
    model = torch.nn.Module()
    model.base = torch.nn.Parameter(torch.arange(600.0 * 1000, device="sim").view(600, 1000), requires_grad=False)
    model.up = torch.nn.Parameter(torch.zeros(4, device="sim"))
    with open_run(tmp_path) as ckpt:
        sizes = []
        for step in (1, 2):
            with torch.no_grad():
                model.up.add_(1)
            sizes.append(ckpt.save({"model": model}, step).result().num_bytes)
            loaded = ckpt.load(step)["model"]
            assert torch.equal(loaded["base"], torch.arange(600.0 * 1000).view(600, 1000))
            assert torch.equal(loaded["up"], torch.full((4,), float(step)))
        assert sizes[0] > BASE > 10 * sizes[1]
        model.base.data.mul_(2)
        with pytest.raises(TornSnapshotError, match=r"model\.base "):
            ckpt.save({"model": model}, 3).result()
        assert ckpt.save({"model": model}, 4).result().num_bytes > BASE
        assert torch.equal(ckpt.load(4)["model"]["base"], 2 * torch.arange(600.0 * 1000).view(600, 1000))
