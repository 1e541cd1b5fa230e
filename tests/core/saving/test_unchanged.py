"""Groups that are said to be unchanged are not written again, and parts of a state may be saved alone."""

import itertools
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from archives import forge_manifest
from frozen import BIG, Training, save
from scripted_disk import scripted
from states import everywhere, open_run

import async_ckpt
from async_ckpt import AsyncCheckpointer, CorruptCheckpointError, NotUnchangedError, Place
from async_ckpt.core.runs.run import Run


@pytest.fixture
def training() -> Training:
    return Training()


def borrowed_steps(root: Path, step: int) -> list[int]:
    manifest = json.loads((root / f"step_{step:08d}" / "manifest.json").read_text())
    return [row["step"] for row in manifest["elsewhere"]]


def assert_equal(loaded: dict[str, Any], training: Training) -> None:
    assert set(loaded) == set(training.state)
    for name, live in (("ref", training.reference), ("model", training.model)):
        for key, tensor in live.state_dict().items():
            assert torch.equal(loaded[name][key], tensor)


def test_an_unchanged_group_is_written_once_and_read_from_every_step(tmp_path, training):
    with AsyncCheckpointer(tmp_path) as ckpt:
        sizes = [save(ckpt, training, step) for step in (1, 2, 3)]
        assert sizes[0] > sizes[1] + BIG
        assert sizes[1] == sizes[2]
        assert borrowed_steps(tmp_path, 1) == []
        assert borrowed_steps(tmp_path, 2) == borrowed_steps(tmp_path, 3) == [1]
        assert_equal(ckpt.load(), training)
        assert_equal(async_ckpt.load(tmp_path), training)
        assert_equal(async_ckpt.load(tmp_path / "step_00000003"), training)
        assert_equal(ckpt.load(mmap=True), training)


def test_select_reaches_into_borrowed_groups(tmp_path, training):
    with AsyncCheckpointer(tmp_path) as ckpt:
        for step in (1, 2):
            save(ckpt, training, step)
        assert list(ckpt.load(select="ref")) == ["ref"]
        assert list(ckpt.load(select="model")) == ["model"]
        assert list(ckpt.load(select="ref.bias")["ref"]) == ["bias"]
        assert set(ckpt.load(select="*.bias")) == {"model", "ref"}
        with pytest.raises(KeyError, match="matches nothing"):
            ckpt.load(select="nothing")
        torch.nn.init.zeros_(training.reference.bias)
        ckpt.restore({"ref": training.reference}, select="ref.bias")
        assert training.reference.bias.abs().sum() > 0


def test_what_does_not_fit_a_borrowed_group_is_told_before_anything_is_written(tmp_path, training):
    with AsyncCheckpointer(tmp_path) as ckpt:
        for step in (1, 2):
            save(ckpt, training, step)
        live = {"model": torch.nn.Linear(50, 50), "ref": torch.nn.Linear(300, 301)}
        before = live["model"].weight.clone()
        with pytest.raises(async_ckpt.StateMismatchError, match="ref"):
            ckpt.restore(live)
        assert torch.equal(live["model"].weight, before)


def test_a_borrowed_group_needs_a_dict_to_be_restored_into(tmp_path, training):
    with AsyncCheckpointer(tmp_path) as ckpt:
        for step in (1, 2):
            save(ckpt, training, step)
        with pytest.raises(TypeError, match="dict of groups"):
            ckpt.restore(training.model)


@pytest.mark.parametrize("how", ["in place", "other memory", "another shape", "plain value", "a name more"])
def test_a_group_that_has_changed_all_the_same_is_refused_by_name(tmp_path, training, how):
    training.reference = {"w": torch.randn(300, 300), "scale": 1.0}
    with AsyncCheckpointer(tmp_path) as ckpt:
        save(ckpt, training, 1)
        reference = training.reference
        if how == "in place":
            reference["w"].mul_(2)
        elif how == "other memory":
            reference["w"] = reference["w"].clone()
        elif how == "another shape":
            reference["w"] = reference["w"][:299]
        elif how == "plain value":
            reference["scale"] = 2.0
        else:
            reference["more"] = torch.zeros(1)
        with pytest.raises(NotUnchangedError, match=r"leave it out of unchanged=") as caught:
            save(ckpt, training, 2)
        expected = {"plain value": "plain values", "a name more": "ref.more"}.get(how, "ref.w")
        assert caught.value.names == (expected,)
        assert ckpt.steps() == [1]
        assert save(ckpt, training, 2, unchanged=()) > BIG
        assert save(ckpt, training, 3) < BIG
        assert torch.equal(ckpt.load()["ref"]["w"], reference["w"])


@pytest.mark.parametrize("leaf", [np.ones(3), bytearray(b"12"), b"x" * 5000])
def test_what_has_no_version_counter_cannot_be_said_to_be_unchanged(tmp_path, training, leaf):
    training.reference = {"w": torch.randn(3), "leaf": leaf}
    with AsyncCheckpointer(tmp_path) as ckpt:
        save(ckpt, training, 1)
        with pytest.raises(NotUnchangedError):
            save(ckpt, training, 2)


@pytest.mark.parametrize("name", ["nothing", "epoch"])
def test_a_name_that_is_no_group_is_refused(tmp_path, training, name):
    with AsyncCheckpointer(tmp_path) as ckpt, pytest.raises(ValueError, match=f"'{name}'"):
        save(ckpt, training, 1, unchanged={name})


def test_a_state_of_nothing_but_unchanged_groups_is_refused(tmp_path, training):
    with AsyncCheckpointer(tmp_path) as ckpt:
        state = {"ref": training.reference}
        ckpt.save(state, step=1, unchanged="ref").result()
        with pytest.raises(ValueError, match="nothing to save"):
            ckpt.save(state, step=2, unchanged="ref")


def test_a_refused_save_does_not_stand_in_the_way_of_the_next(tmp_path, training):
    with AsyncCheckpointer(tmp_path) as ckpt:
        with pytest.raises(ValueError, match="nothing"):
            save(ckpt, training, 1, unchanged={"nothing"})
        save(ckpt, training, 1)
        assert ckpt.steps() == [1]


def test_retention_keeps_what_later_steps_borrow_from_and_no_longer(tmp_path, training):
    with AsyncCheckpointer(tmp_path, keep=2) as ckpt:
        for step in range(1, 6):
            save(ckpt, training, step)
        ckpt.wait()
        assert ckpt.steps() == [1, 4, 5]
        assert_equal(ckpt.load(4) | {"model": training.model.state_dict()}, training)
        save(ckpt, training, 6, unchanged=())
        save(ckpt, training, 7)
        ckpt.wait()
        assert ckpt.steps() == [6, 7]


def test_a_step_that_others_borrow_from_may_be_overwritten(tmp_path, training):
    with AsyncCheckpointer(tmp_path) as ckpt:
        save(ckpt, training, 1)
        save(ckpt, training, 2)
        old = {key: tensor.clone() for key, tensor in training.reference.state_dict().items()}
        torch.nn.init.zeros_(training.reference.weight)
        save(ckpt, training, 1, overwrite=True, unchanged=())
        ckpt.wait()
        assert torch.equal(ckpt.load(2)["ref"]["weight"], old["weight"])
        assert torch.equal(ckpt.load(1)["ref"]["weight"], training.reference.weight)
    with AsyncCheckpointer(tmp_path) as ckpt:  # whose first save sweeps
        save(ckpt, training, 3)
        ckpt.wait()
        assert torch.equal(ckpt.load(2)["ref"]["weight"], old["weight"])


def test_the_step_itself_is_nothing_to_borrow_from_when_it_is_overwritten(tmp_path, training):
    with AsyncCheckpointer(tmp_path) as ckpt:
        save(ckpt, training, 1)
        assert save(ckpt, training, 1, overwrite=True) > BIG
        assert_equal(ckpt.load(), training)


def test_after_a_restart_a_restored_group_is_known_to_be_written(tmp_path, training):
    with AsyncCheckpointer(tmp_path) as ckpt:
        for step in (1, 2):
            save(ckpt, training, step)
    other = Training()
    with AsyncCheckpointer(tmp_path) as ckpt:
        state = {**other.state, "epoch": 0}
        assert ckpt.restore(state) == 2
        assert state["epoch"] == 3
        assert torch.equal(other.model.weight, training.model.weight)
        assert save(ckpt, other, 3) < BIG
        assert borrowed_steps(tmp_path, 3) == [1]
        assert_equal(ckpt.load(), other)


def test_a_group_that_was_restored_in_part_is_written(tmp_path, training):
    with AsyncCheckpointer(tmp_path) as ckpt:
        save(ckpt, training, 1)
    other = Training()
    with AsyncCheckpointer(tmp_path) as ckpt:
        ckpt.restore(other.state, select="ref.bias")
        assert save(ckpt, other, 2) > BIG


def test_after_a_rollback_groups_are_borrowed_from_below_only(tmp_path, training):
    with AsyncCheckpointer(tmp_path, on_rollback="retire") as ckpt:
        save(ckpt, training, 1, unchanged=())
        save(ckpt, training, 5, unchanged=())
        ckpt.restore(training.state, step=1)
        save(ckpt, training, 3)
        assert borrowed_steps(tmp_path, 3) == [1]
        assert ckpt.steps() == [1, 3]


@pytest.mark.parametrize("folder", ["../elsewhere", "", "..", "/etc", 3, "step_\ud800"])
def test_a_manifest_that_borrows_from_elsewhere_is_refused(tmp_path, training, folder):
    with AsyncCheckpointer(tmp_path) as ckpt:
        for step in (1, 2):
            save(ckpt, training, step)
        path = tmp_path / "step_00000002/manifest.json"
        forge_manifest(path, lambda told: told["elsewhere"][0].update(folder=folder))
        with pytest.raises(CorruptCheckpointError):
            ckpt.load(2)


def test_a_root_that_was_away_is_caught_up_with_what_a_step_borrows_from(tmp_path, training):
    with AsyncCheckpointer(tmp_path / "a") as ckpt:
        for step in (1, 2):
            save(ckpt, training, step)
    with AsyncCheckpointer([tmp_path / "a", tmp_path / "b"], keep=1) as ckpt:
        ckpt.catch_up()
    assert_equal(async_ckpt.load(tmp_path / "b"), training)


def test_a_group_that_a_further_place_lacks_is_borrowed_and_copied_there(tmp_path, training):
    with AsyncCheckpointer(tmp_path / "a") as ckpt:
        save(ckpt, training, 1)
    with AsyncCheckpointer([tmp_path / "a", tmp_path / "b"]) as ckpt:
        ckpt.restore(training.state)
        assert save(ckpt, training, 2) < BIG
    assert_equal(async_ckpt.load(tmp_path / "b"), training)


def test_a_group_that_the_place_of_the_save_lacks_is_written(tmp_path, training):
    with AsyncCheckpointer(tmp_path / "b") as ckpt:
        save(ckpt, training, 1)
    with AsyncCheckpointer([tmp_path / "a", tmp_path / "b"]) as ckpt:
        ckpt.restore(training.state)
        assert save(ckpt, training, 2) > BIG
    assert_equal(async_ckpt.load(tmp_path / "a"), training)


def test_a_store_serves_borrowed_groups(s3, training):
    s3.make_bucket("unchanged")
    root = Place(f"s3://unchanged/{os.urandom(4).hex()}", options=s3.options)
    with AsyncCheckpointer(root) as ckpt:
        assert save(ckpt, training, 1) > BIG > save(ckpt, training, 2)
        assert_equal(ckpt.load(), training)
    assert_equal(async_ckpt.load(replace(root, url=f"{root.text}/step_00000002")), training)


# --- parts ----------------------------------------------------------------------------------------------------


class Adapted(torch.nn.Module):
    """A base model with an adapter beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = torch.nn.Linear(300, 300)
        self.lora_A = torch.nn.Linear(300, 2, bias=False)
        self.lora_B = torch.nn.Linear(2, 300, bias=False)


def test_an_adapter_is_saved_alone_by_a_glob_and_restored_into_the_whole_model(tmp_path):
    model = Adapted()
    with AsyncCheckpointer(tmp_path) as ckpt:
        report = ckpt.save({"model": model, "epoch": 1}, step=1, select=["model.lora_*", "epoch"]).result()
        assert report.num_bytes < BIG
        loaded = ckpt.load()
        assert list(loaded["model"]) == ["lora_A.weight", "lora_B.weight"]
        assert loaded["epoch"] == 1
        other = Adapted()
        base = other.base.weight.clone()
        ckpt.restore({"model": other, "epoch": 0}, strict=False)
        assert torch.equal(other.lora_A.weight, model.lora_A.weight)
        assert torch.equal(other.base.weight, base)


def test_a_part_of_a_one_off_save_is_chosen_the_same_way(tmp_path):
    state = {"a": [torch.ones(2), {"b": torch.zeros(3)}], "c": (1, 2), "d": torch.Size([3])}
    async_ckpt.save(state, tmp_path / "x.tar", select="*.b").result()
    loaded = async_ckpt.load(tmp_path / "x.tar")
    assert list(loaded) == ["a"]
    assert torch.equal(loaded["a"][0]["b"], torch.zeros(3))
    with pytest.raises(KeyError, match="matches nothing in the state"):
        async_ckpt.save(state, tmp_path / "y.tar", select="z")


def test_a_part_is_nothing_to_borrow_from(tmp_path, training):
    with AsyncCheckpointer(tmp_path) as ckpt:
        save(ckpt, training, 1, unchanged=(), select="ref.bias")
        assert save(ckpt, training, 2) > BIG
        with pytest.raises(ValueError, match="exclude each other"):
            save(ckpt, training, 3, select="model")


# --- what one process holds for all ranks ---------------------------------------------------------------------


def driver_state() -> dict[str, Any]:
    return {"dataloader": {"epoch": 2, "order": torch.randperm(1000)}, "actor": {"seen": 7, "seed": (1, 2)}}


def test_driver_state_has_an_archive_of_its_own_and_comes_back_with_the_rest(tmp_path, training):
    driver = driver_state()
    with AsyncCheckpointer(tmp_path) as ckpt:
        path = Path(ckpt.save(training.state, step=1, driver=driver).result().path)
        beside = list(path.parent.glob("driver.*.tar"))
        assert len(beside) == 1
        own = async_ckpt.load(beside[0])
        assert set(own) == {"dataloader", "actor"}
        assert set(async_ckpt.load(path)) == set(training.state)
        loaded = ckpt.load()
        assert torch.equal(loaded.pop("dataloader")["order"], driver["dataloader"]["order"])
        assert loaded.pop("actor") == driver["actor"]
        assert_equal(loaded, training)
        live = {**Training().state, "dataloader": {"epoch": 0, "order": torch.zeros(1000, dtype=torch.int64)}}
        ckpt.restore(live)
        assert torch.equal(live["dataloader"]["order"], driver["dataloader"]["order"])
        assert live["dataloader"]["epoch"] == 2


def test_driver_state_is_that_of_the_call(tmp_path, training):
    driver = driver_state()
    order = driver["dataloader"]["order"].clone()
    with AsyncCheckpointer(tmp_path) as ckpt:
        handle = ckpt.save(training.state, step=1, driver=driver)
        driver["dataloader"]["order"].zero_()
        handle.result()
        assert torch.equal(ckpt.load()["dataloader"]["order"], order)


def test_driver_state_goes_with_its_step(tmp_path, training):
    with AsyncCheckpointer([tmp_path / "a", tmp_path / "b"], keep=1) as ckpt:
        for step in (1, 2):
            everywhere(ckpt, ckpt.save(training.state, step=step, driver=driver_state(), unchanged={"ref"}))
        everywhere(ckpt, ckpt.save(training.state, step=2, driver={"other": 1}, overwrite=True))
        for root in ("a", "b"):
            left = [path.name.split(".")[0] for path in (tmp_path / root / "step_00000002").glob("*.tar")]
            assert sorted(left) == ["driver", "rank_00000"]
            assert async_ckpt.load(tmp_path / root)["other"] == 1


def test_driver_state_is_copied_to_a_root_that_was_away(tmp_path, training):
    with AsyncCheckpointer(tmp_path / "a") as ckpt:
        ckpt.save(training.state, step=1, driver=driver_state()).result()
    with AsyncCheckpointer([tmp_path / "a", tmp_path / "b"]) as ckpt:
        ckpt.catch_up()
    assert async_ckpt.load(tmp_path / "b")["actor"] == driver_state()["actor"]


def test_driver_state_of_an_attempt_that_fails_is_removed(tmp_path, training, gate, monkeypatch):
    commit, folder = Run.commit, tmp_path / "step_00000001"

    def held(run, *arguments, **options):
        monkeypatch.undo()
        gate.passed()
        return commit(run, *arguments, **options)

    with AsyncCheckpointer(tmp_path) as ckpt, AsyncCheckpointer(tmp_path) as other:
        monkeypatch.setattr(Run, "commit", held)
        late = ckpt.save({"w": torch.zeros(1)}, step=1, driver=driver_state())
        gate.wait_reached()
        assert len(list(folder.glob("driver.*.tar"))) == 1
        other.save({"w": torch.zeros(1)}, step=1).result()
        gate.open()
        with pytest.raises(async_ckpt.StepExistsError):
            late.result()
        ckpt.wait()
        assert len(list(folder.glob("rank_*.tar"))) == 1
        assert list(folder.glob("driver.*.tar")) == []


@pytest.mark.parametrize(
    ("driver", "why"),
    [
        ({"model": 1}, "entries of the same name"),
        ({3: 1}, "driver=3: the names of entries must be text"),
        ({"big": torch.zeros(20_000_000)}, "too large"),
    ],
)
def test_driver_state_that_cannot_stand_beside_the_state_is_refused(tmp_path, training, driver, why):
    with AsyncCheckpointer(tmp_path) as ckpt:
        with pytest.raises(ValueError, match=why):
            ckpt.save(training.state, step=1, driver=driver)
        ckpt.save(training.state, step=1).result()


@pytest.mark.parametrize("how", [{"select": "ref"}, {"strict": False}], ids=str)
def test_what_was_restored_in_part_is_not_as_it_was_saved_last(how, training, tmp_path):
    with AsyncCheckpointer(tmp_path) as ckpt:
        save(ckpt, training, 1, unchanged=())
        with torch.no_grad():
            training.reference.weight.add_(1)
        save(ckpt, training, 2, unchanged=())
        ckpt.restore(training.state, step=1, **how)
        with pytest.raises(NotUnchangedError, match="ref"):
            save(ckpt, training, 3)


def test_a_name_that_matches_nothing_is_told_with_what_is_borrowed(training, tmp_path):
    with AsyncCheckpointer(tmp_path) as ckpt:
        for step in (1, 2):
            save(ckpt, training, step)
        for read in (lambda: ckpt.load(2, select="reff"), lambda: async_ckpt.load(tmp_path, select="reff")):
            with pytest.raises(
                KeyError, match=r"it holds epoch, model, optimizer; .* it holds epoch, model, optimizer, ref"
            ):
                read()


def test_a_report_counts_the_bytes_of_the_driver_as_well(tmp_path):
    roots = [tmp_path / "a", tmp_path / "b"]
    with AsyncCheckpointer(roots) as ckpt:
        report = ckpt.save({"w": torch.zeros(8)}, step=1, driver={"loader": list(range(1000))}).result()
    assert [told.num_bytes for told in report.destinations] == [report.num_bytes]
    for root in roots:
        archives = list((root / "step_00000001").glob("*.tar"))
        assert len(archives) == 2
        assert sum(path.stat().st_size for path in archives) == report.num_bytes


SAVES: dict[str, Any] = {
    "save": lambda ckpt, state: ckpt.save(state, ckpt.steps()[-1] + 1),
    "borrow": lambda ckpt, state: ckpt.save(state, ckpt.steps()[-1] + 1, unchanged=["ref"]),
    "again": lambda ckpt, state: ckpt.save(state, ckpt.steps()[-1], overwrite=True),
    "in part": lambda ckpt, state: ckpt.save(state, ckpt.steps()[-1], overwrite=True, select="model"),
    "back": lambda ckpt, state: ckpt.save(state, ckpt.steps()[-2:][0], overwrite=True),
}


@pytest.mark.parametrize("first", SAVES)
def test_no_group_is_borrowed_from_an_archive_that_was_replaced_or_retired(tmp_path, first):
    reference = {"w": torch.arange(4.0)}
    for number, calls in enumerate(itertools.product(SAVES, repeat=3)):
        root = tmp_path / str(number)
        with AsyncCheckpointer(root, keep=4, on_rollback="retire") as ckpt:
            for step in (1, 2):
                ckpt.save({"model": torch.tensor([step]), "ref": reference}, step).result()
            for call in (first, *calls):
                SAVES[call](ckpt, {"model": torch.tensor([7]), "ref": reference}).result()
            ckpt.wait()
            for step in ckpt.steps():
                loaded = ckpt.load(step)
                assert "ref" not in loaded or torch.equal(loaded["ref"]["w"], reference["w"]), calls
        shutil.rmtree(root)


def test_no_group_is_borrowed_from_a_step_that_a_failed_save_may_have_replaced(tmp_path, monkeypatch):
    state = {"model": {"w": torch.zeros(3)}, "ref": {"w": torch.arange(4.0)}}

    def lost(*_: Any, **__: Any) -> None:
        raise OSError(5, "the answer is lost")

    with AsyncCheckpointer(tmp_path, keep=4) as ckpt:
        ckpt.save(state, 1).result()
        with monkeypatch.context() as broken:
            broken.setattr(Run, "announce", lost)  # the manifest has been replaced by then
            ckpt.save(state, 1, overwrite=True).exception()
        ckpt.save(state, 2, unchanged=["ref"]).result()
        ckpt.wait()
        assert torch.equal(ckpt.load(2)["ref"]["w"], state["ref"]["w"])


def test_no_group_is_borrowed_from_a_step_that_a_save_in_flight_is_about_to_retire(tmp_path):
    state = {"model": {"w": torch.zeros(3)}, "ref": {"w": torch.arange(4.0)}}
    with open_run(tmp_path, max_in_flight=2, on_rollback="retire") as ckpt, scripted(ckpt) as disk:
        for step in (1, 2):
            ckpt.save(state, step).result()
        disk.stop("write", times=1)
        back = ckpt.save(state, 1, overwrite=True)
        after = ckpt.save(state, 3, unchanged=["ref"])
        disk.release_all()

        assert [back.result().status, after.result().status] == ["committed"] * 2
        assert ckpt.steps() == [1, 3]
        assert torch.equal(ckpt.load(3)["ref"]["w"], state["ref"]["w"])


# --- steps that somebody deletes by hand ------------------------------------------------------------------------------


def _by_hand(how: str, folder: Any) -> None:
    if how == "manifest":
        (folder / "manifest.json").unlink()
    elif how == "renamed":
        folder.rename(folder.with_name(f"bad_{folder.name}"))
    else:
        shutil.rmtree(folder)


@pytest.mark.parametrize("how", ["folder", "manifest", "renamed"])
@pytest.mark.parametrize("num_roots", [1, 2])
def test_what_was_deleted_by_hand_is_saved_again_and_lends_nothing(tmp_path, how, num_roots):
    roots = [tmp_path / str(number) for number in range(num_roots)]
    state = {"base": {"w": torch.ones(10)}, "n": 0}
    with open_run(roots if num_roots > 1 else roots[0]) as ckpt:
        for step in (1, 2):
            everywhere(ckpt, ckpt.save(state, step, unchanged="base" if step > 1 else None))
        for root in roots:
            _by_hand(how, root / "step_00000002")
        assert ckpt.latest() == 1
        assert everywhere(ckpt, ckpt.save(state, 2, unchanged="base")).unchanged_groups == ("base",)
        _by_hand(how, roots[0] / "step_00000001")
        everywhere(ckpt, ckpt.save(state, 3, unchanged="base"))
        for root in roots:
            assert torch.equal(async_ckpt.load(root / "step_00000003")["base"]["w"], torch.ones(10))


def test_at_a_store_a_lender_that_is_gone_fails_one_save_and_the_next_writes_the_group(s3, bucket):
    state, place = {"base": {"w": torch.ones(10)}, "n": 0}, Place(f"s3://{bucket}/run", options=s3.options)
    with open_run(place) as ckpt:
        ckpt.save(state, 1).result()
        ckpt.wait()
        async_ckpt.files.remove(Place(f"s3://{bucket}/run/step_00000001", options=s3.options))
        with pytest.raises(async_ckpt.NotCommittedError, match="borrows base from step 1, which was deleted"):
            ckpt.save(state, 2, unchanged="base").result()
        ckpt.save(state, 2, unchanged="base").result()
        ckpt.save(state, 1 + 2, unchanged="base").result()
        assert torch.equal(ckpt.load(3)["base"]["w"], torch.ones(10))
