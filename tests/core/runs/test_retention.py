"""Which steps go, and that no other does: the rules as data, and a run on a disk that obeys them."""

import json
import math
import shutil
import time
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from archives import forge_manifest
from hypothesis import given
from hypothesis import strategies as st
from scripted_disk import scripted
from states import assert_is_state, everywhere, journaled_steps, leftovers, names_below, open_run, state_at

from async_ckpt import AsyncCheckpointer, Keep, Naming, NotCommittedError, StorageUnavailableError
from async_ckpt.core.runs.manifest import Manifest
from async_ckpt.core.runs.retention import Commits, deletable_steps
from async_ckpt.core.runs.run import Run
from async_ckpt.core.spec import keep_of
from async_ckpt.core.storage.local import LocalStorage

GONE = StorageUnavailableError("the disk is gone", path="/ckpt")
NOW = 100.0


def commits(**records: dict[str, Any]) -> dict[int, Manifest | None]:
    """Steps by name, `s5={...}`: each was committed as many seconds after zero as its number says."""
    steps = {int(name[1:]): record for name, record in records.items()}
    return {step: Manifest(step, "", 1, float(step), (), (), record) for step, record in steps.items()}


# --- the rules against a slow and simple reading of them ---------------------------------------------------------


def stays(
    step: int,
    made: Mapping[int, Manifest | None],
    rules: Keep,
    protected: Collection[int],
) -> bool:
    """The manual, read out for one step."""

    def passing(other: int) -> bool:
        record = made[other].record if made[other] is not None else {}
        ttl = record.get("ttl_seconds")
        expires = type(ttl) in (int, float) and math.isfinite(ttl)
        return record.get("rolling") is True or (expires and made[other].created + ttl < NOW)

    def metric(other: int) -> float | None:
        record = made[other].record if made[other] is not None else {}
        value = record.get(rules.best[0])
        return value if type(value) in (int, float) and math.isfinite(value) else None

    def beats(other: int) -> bool:
        mine, theirs = metric(step), metric(other)
        if theirs is None:
            return False
        if theirs == mine:
            return other > step
        return theirs < mine if rules.best[1] == "min" else theirs > mine

    if step == max(made) or step in protected:
        return True
    if passing(step):
        return False
    lasting = [other for other in made if not passing(other)]
    wanted = []
    if rules.last is not None:
        wanted.append(len([other for other in lasting if other > step]) < rules.last)
    if rules.every is not None:
        wanted.append(step % rules.every == 0)
    if rules.best is not None:
        ranked = metric(step) is not None and len([o for o in lasting if beats(o)]) < rules.best[2]
        wanted.append(ranked or not any(metric(other) is not None for other in made))
    if rules.seconds is not None:
        wanted.append(made[step] is None or made[step].created + rules.seconds >= NOW)
    if rules.bytes is not None:
        newer = [made[other].num_bytes for other in lasting if other >= step and made[other] is not None]
        wanted.append(sum(newer) <= rules.bytes or step == max(lasting))
    return any(wanted) or not wanted


values = st.sampled_from([0, 1, 1, 2, 2.5, -1, math.nan, math.inf, -math.inf, None, True, "1"])
records = st.fixed_dictionaries(
    {},
    optional={
        "loss": values,
        "rolling": st.sampled_from([True, True, False, None, 1, "yes"]),
        "ttl_seconds": st.sampled_from([1, 30, 60, 1000, None, "30", math.nan]),
    },
)
runs = st.dictionaries(
    st.integers(0, 40),
    st.none() | st.builds(Manifest.of_folder, st.just(0), st.integers(0, 110), st.integers(0, 50), records),
    min_size=1,
    max_size=14,
)  # fmt: skip
rule_sets = st.builds(
    Keep,
    last=st.none() | st.integers(1, 5),
    every=st.none() | st.integers(1, 8),
    best=st.none() | st.tuples(st.just("loss"), st.sampled_from(["min", "max"]), st.integers(1, 3)),
    seconds=st.none() | st.integers(1, 90),
    bytes=st.none() | st.integers(1, 300),
)


@given(runs, rule_sets, st.sets(st.integers(0, 40), max_size=4))
def test_what_goes_is_exactly_what_the_manual_says(made, rules, protected):
    doomed = deletable_steps(rules, Commits(made), now=NOW, protected=protected)

    assert doomed == [step for step in sorted(made) if not stays(step, made, rules, protected)]
    assert max(made) not in doomed
    assert not protected & set(doomed)


@given(runs, rule_sets, st.sets(st.integers(0, 40), max_size=4))
def test_what_was_left_is_left_when_the_rules_are_read_again(made, rules, protected):
    doomed = deletable_steps(rules, Commits(made), now=NOW, protected=protected)
    left = {step: manifest for step, manifest in made.items() if step not in doomed}

    assert deletable_steps(rules, Commits(left), now=NOW, protected=protected) == []


@given(runs, rule_sets)
def test_another_rule_keeps_more_and_never_less(made, rules):
    if rules == Keep():
        return
    more = replace(rules, last=rules.last or 2)

    assert set(deletable_steps(more, Commits(made), now=NOW)) <= set(deletable_steps(rules, Commits(made), now=NOW))


@pytest.mark.parametrize(
    ("rules", "made", "doomed"),
    [
        (Keep(), {}, []),
        (Keep(1), {}, []),
        (Keep(1), commits(s1={}), []),
        (Keep(2), commits(s1={}, s2={}, s3={}), [1]),
        (Keep(2, 3), commits(s3={}, s4={}, s6={}, s9={}), [4]),
        (Keep(every=10), commits(s5={}, s10={}, s15={}, s20={}, s25={}), [5, 15]),
        (Keep(best=("loss", "min", 1)), commits(s1={"loss": 2}, s2={"loss": 1}, s3={"loss": 3}), [1]),
        (Keep(best=("acc", "max", 1)), commits(s1={"acc": 2}, s2={"acc": 1}, s3={"acc": 0}), [2]),
        (Keep(best=("loss", "min", 1)), commits(s1={"loss": 1}, s2={"loss": 1}, s3={"loss": 1}), [1, 2]),
        # While no record has the metric, all stay; once one has, those without count for nothing.
        (Keep(best=("loss", "min", 9)), commits(s1={}, s2={"loss": math.nan}, s3={"acc": 1}), []),
        (Keep(best=("loss", "min", 9)), commits(s1={}, s2={"loss": 0.5}, s3={}), [1]),
        (Keep(1, best=("loss", "min", 1)), commits(s1={"loss": 1}, s2={"loss": 2}, s3={}), [2]),
        (Keep(seconds=50), commits(s49={}, s50={}, s51={}), [49]),
        (Keep(seconds=1), commits(s1={}, s2={}), [1]),
        # Rolling saves and expired ones go whatever wants them, and take nobody's place.
        (Keep(every=1), commits(s1={"rolling": True}, s2={}), [1]),
        (Keep(2), commits(s1={}, s2={}, s3={"rolling": True}, s4={"rolling": True}), [3]),
        (Keep(best=("loss", "min", 1)), commits(s1={"loss": 2}, s2={"loss": 1, "rolling": True}, s3={}), [2]),
        (Keep(), commits(s1={"rolling": True}), []),
        (Keep(), commits(s1={"rolling": True}, s2={"rolling": True}), [1]),
        (Keep(), commits(s1={"ttl_seconds": 98}, s2={"ttl_seconds": 98}, s3={"ttl_seconds": 1}), [1]),
    ],
)  # fmt: skip
def test_what_retention_dooms(rules, made, doomed):
    assert deletable_steps(rules, Commits(made), now=NOW) == doomed


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("last", 0), ("last", 2.5), ("last", True), ("last", "3"), ("every", -1), ("every", 2.5), ("seconds", "5"),
        ("whole_folder", "yes"), ("seconds", -1), ("seconds", math.nan), ("seconds", math.inf), ("best", "loss"),
        ("best", ("loss", "best", 1)), ("best", ("loss", "min", 1.5)), ("best", (None, "min", 1)),
        ("best", ("loss", "min", 0)), ("best", ("loss", "min")),
        *((option, value) for option in ("bytes", "free") for value in (0, -1, True, "5", math.nan, math.inf)),
    ],
)  # fmt: skip
def test_a_rule_that_makes_no_sense_says_what_to_give(option, value):
    with pytest.raises(ValueError, match=rf"^(keep|Keep\({option}=…\)) must be"):
        Keep(**{option: value})


@pytest.mark.parametrize("keep", ["3", 2.5, (3,), {"last": 3}])
def test_what_is_no_rule_at_all_is_refused(keep, tmp_path):
    with pytest.raises(TypeError, match=r"keep must be a number of steps, or Keep"):
        AsyncCheckpointer(tmp_path, keep=keep)


@pytest.mark.parametrize(("rule", "is_told"), [("last", True), ("every", False)])
def test_whoever_asks_to_keep_no_steps_at_all_is_told_how_to_keep_every_one(rule, is_told):
    with pytest.raises(ValueError, match=rf"Keep\({rule}=…\) must be a whole number, at least 1, got 0") as raised:
        Keep(**{rule: 0})

    assert ("None keeps every step" in str(raised.value)) is is_told


def test_a_number_is_that_of_the_newest_steps():
    assert keep_of(3) == keep_of(torch.tensor(3)) == Keep(last=3)
    assert keep_of(None) == Keep()


# --- a run that obeys them ---------------------------------------------------------------------------------------


def save(ckpt: AsyncCheckpointer, step: int, loss: float | None = None, **options: Any) -> None:
    record = {} if loss is None else {"loss": loss}
    everywhere(ckpt, ckpt.save(state_at(step), step=step, record=record, **options))


def age(root: Path, step: int, seconds: float) -> None:
    """Make a step so much older."""
    path = root / f"step_{step:08d}/manifest.json"
    forge_manifest(path, created=json.loads(path.read_text())["created"] - seconds)


def test_the_best_by_a_metric_stay_and_load(tmp_path):
    with open_run(tmp_path, keep=Keep(best=("loss", "min", 2))) as ckpt:
        for step, loss in ((1, 0.5), (2, 0.1), (3, 0.9), (4, math.nan), (5, 0.2), (6, 0.4)):
            save(ckpt, step, loss)
        assert ckpt.steps() == [2, 5, 6]
        for step in ckpt.steps():
            assert_is_state(ckpt.load(step), step)
        assert journaled_steps(ckpt) == [2, 5, 6]
    assert leftovers(tmp_path) == []


def test_after_a_restart_the_best_are_found_again_on_storage_under_other_rules_too(tmp_path):
    with open_run(tmp_path) as ckpt:
        for step, loss in ((1, 0.1), (2, 0.9), (3, 0.2), (4, 0.8)):
            save(ckpt, step, loss)
    with open_run(tmp_path, keep=Keep(best=("loss", "min", 1), last=2)) as ckpt:
        save(ckpt, 5, 0.5)
        assert ckpt.steps() == [1, 4, 5]
    with open_run(tmp_path, keep=Keep(best=("loss", "max", 1))) as ckpt:
        save(ckpt, 6)
        assert ckpt.steps() == [4, 6]


def test_steps_go_when_they_are_older_than_may_be_and_the_newest_stays(tmp_path):
    with open_run(tmp_path) as ckpt:
        for step in (1, 2, 3):
            save(ckpt, step)
    for step in (1, 2):
        age(tmp_path, step, 7200)
    with open_run(tmp_path, keep=Keep(seconds=3600)) as ckpt:
        save(ckpt, 4)
        assert ckpt.steps() == [3, 4]
    for step in (3, 4):
        age(tmp_path, step, 7200)
    with open_run(tmp_path, keep=Keep(seconds=3600, every=3)) as ckpt:
        assert ckpt.steps() == [3, 4]
        save(ckpt, 5)
        assert ckpt.steps() == [3, 5]


def test_a_save_with_a_time_to_live_goes_after_it_and_the_others_stay(tmp_path):
    with open_run(tmp_path) as ckpt:
        save(ckpt, 1)
        save(ckpt, 2, ttl_seconds=3600)
        save(ckpt, 3, ttl_seconds=36000)
        assert ckpt.steps() == [1, 2, 3]
    for step in (1, 2, 3):
        age(tmp_path, step, 7200)
    with open_run(tmp_path, keep=Keep(every=2)) as ckpt:
        save(ckpt, 4, ttl_seconds=3600)
        assert ckpt.steps() == [4]
    age(tmp_path, 4, 7200)
    with open_run(tmp_path) as ckpt:
        assert ckpt.restore(state_at(0)) == 4
        save(ckpt, 5)
        assert ckpt.steps() == [5]


def test_a_rolling_save_goes_with_the_next_commit_and_takes_no_other_ones_place(tmp_path):
    with open_run(tmp_path, keep=Keep(last=2, every=10)) as ckpt:
        for step in (1, 2):
            save(ckpt, step)
        save(ckpt, 10, rolling=True)
        assert ckpt.steps() == [1, 2, 10]
        save(ckpt, 20, rolling=True)
        assert ckpt.steps() == [1, 2, 20]
        save(ckpt, 21)
        assert ckpt.steps() == [2, 21]


def test_a_rolling_save_stays_when_the_one_after_it_fails(tmp_path):
    with open_run(tmp_path) as ckpt, scripted(ckpt) as disk:
        save(ckpt, 1, rolling=True)
        disk.fail("finish", "step_00000002", error=GONE)
        assert ckpt.save(state_at(2), step=2, rolling=True).exception() is GONE
        ckpt.wait()
        assert ckpt.steps() == [1]
        assert_is_state(ckpt.load(), 1)


def test_overwriting_an_older_step_deletes_nothing_that_is_newer(tmp_path):
    with open_run(tmp_path) as ckpt:
        for step in (1, 2, 3):
            save(ckpt, step)
        save(ckpt, 4, rolling=True)
        save(ckpt, 5)
        assert ckpt.steps() == [1, 2, 3, 5]
    with open_run(tmp_path, keep=1) as ckpt:
        save(ckpt, 2, overwrite=True)
        assert ckpt.steps() == [2, 3, 5]


def test_what_the_tracker_names_stays_and_retention_goes_on_where_it_cannot_be_moved(tmp_path):
    with (
        open_run(tmp_path, keep=1, naming=Naming(tracker="latest_ckpt_global_step.txt")) as ckpt,
        scripted(ckpt) as disk,
    ):
        for step in (1, 2):
            save(ckpt, step)
        disk.fail("replace", "latest_ckpt_global_step.txt", error=GONE, times=None)
        for step in (3, 4):
            save(ckpt, step)
        assert (tmp_path / "latest_ckpt_global_step.txt").read_text() == "2"
        assert ckpt.steps() == [2, 4]


@pytest.mark.parametrize(
    "options", [{"keep": 8}, {"keep": Keep(best=("loss", "min", 8))}, {"keep": Keep(seconds=1e6)}], ids=str
)
def test_a_save_reads_no_manifest_of_a_step_that_it_knows(tmp_path, options):
    with open_run(tmp_path, **options) as ckpt, scripted(ckpt) as disk:
        for step in range(1, 9):
            save(ckpt, step, loss=1.0)
        disk.calls.clear()
        save(ckpt, 9, loss=0.5)
        read = {path for call, path in disk.calls if call == "read" and path.endswith("manifest.json")}

    # The one that goes is looked at again, and the newest may have been replaced.
    assert read <= {"step_00000001/manifest.json", "step_00000009/manifest.json"}


def test_a_step_that_another_process_has_overwritten_is_judged_by_what_is_there_now(tmp_path):
    with open_run(tmp_path, keep=Keep(best=("loss", "min", 1))) as ours, open_run(tmp_path) as theirs:
        save(ours, 1, loss=0.5)
        save(ours, 2, loss=0.9)
        save(theirs, 2, loss=0.1, overwrite=True)
        save(ours, 3)
        assert 2 in ours.steps()
        save(ours, 4)
        assert ours.steps() == [2, 4]


def test_of_the_steps_that_were_to_go_one_that_was_overwritten_since_stays(tmp_path):
    """As `prune` shows them to somebody, who thinks about it."""
    with open_run(tmp_path) as ckpt:
        for step in (1, 2, 3):
            save(ckpt, step)
    run = Run(LocalStorage(tmp_path), clock=time.time, keep=Keep(last=1))
    shown = run.view()
    with open_run(tmp_path) as theirs:
        save(theirs, 1, overwrite=True)

    with run.changing():
        assert run.retain(3, replaced=None, in_flight=(), only=shown) == [2]
    assert run.steps() == [1, 3]


def test_nothing_goes_while_a_manifest_that_decides_cannot_be_read(tmp_path):
    with open_run(tmp_path) as ckpt:
        for step, loss in ((1, 0.1), (2, 0.5), (3, 0.9)):
            save(ckpt, step, loss)
    with open_run(tmp_path, keep=Keep(best=("loss", "min", 1))) as ckpt, scripted(ckpt) as disk:
        away = disk.fail("read", "step_00000001/manifest.json", error=GONE, times=None)
        save(ckpt, 4)
        assert away.reached
        assert ckpt.steps() == [1, 2, 3, 4]
        assert ckpt.metrics()["cleanup_failures"] == 1
    with open_run(tmp_path, keep=Keep(best=("loss", "min", 1))) as ckpt:
        save(ckpt, 5)
        assert ckpt.steps() == [1, 5]


def test_a_damaged_manifest_counts_by_its_number_alone(tmp_path):
    with open_run(tmp_path) as ckpt:
        for step in (1, 2, 3):
            save(ckpt, step, loss=0.1)
    (tmp_path / "step_00000002/manifest.json").write_text("{")
    with open_run(tmp_path, keep=Keep(seconds=1e6)) as ckpt:
        save(ckpt, 4, loss=0.5)
        assert ckpt.steps() == [1, 2, 3, 4]
    with open_run(tmp_path, keep=Keep(best=("loss", "min", 2))) as ckpt:
        save(ckpt, 5, loss=0.5)
        assert ckpt.steps() == [1, 3, 5]
    assert names_below(tmp_path / "step_00000002") == []


def test_the_clock_is_the_one_that_was_handed_in(tmp_path):
    with open_run(tmp_path) as ckpt:
        for step in (1, 2, 3):
            save(ckpt, step)
    later = time.time() + 3600
    run = Run(LocalStorage(tmp_path), clock=lambda: later, keep=Keep(seconds=1800))
    assert run.retain(3, replaced=None, in_flight={2}) == [1]
    assert run.steps() == [2, 3]


def test_while_no_record_has_the_metric_every_step_stays_and_that_is_said_once(tmp_path, caplog):
    """A slip of the pen in `Keep(best=)` must not cost all checkpoints but the newest."""
    with open_run(tmp_path, keep=Keep(best=("val_loss", "min", 1))) as ckpt:
        for step in (1, 2, 3):
            save(ckpt, step, loss=0.5)
        assert ckpt.steps() == [1, 2, 3]
        said = [record.message for record in caplog.records if "Keep(best=…)" in record.message]
        assert len(said) == 1
        assert "'val_loss'" in said[0]
        assert "their records have loss" in said[0]
        ckpt.save(state_at(4), step=4, record={"val_loss": 0.5}).result()
        ckpt.wait()
        assert ckpt.steps() == [4]


def test_files_of_others_stay_in_the_folder_of_a_deleted_step_and_that_is_said_once(tmp_path, caplog):
    with open_run(tmp_path, keep=1) as ckpt:
        for step in (1, 2, 3):
            ckpt.save(state_at(step), step=step).result()
            (tmp_path / f"step_{step:08d}/trainer_state.json").write_text("{}")
            ckpt.wait()
    assert names_below(tmp_path / "step_00000001") == ["trainer_state.json"]
    assert names_below(tmp_path / "step_00000002") == ["trainer_state.json"]
    said = [record.message for record in caplog.records if "did not write" in record.message]
    assert len(said) == 1
    assert "trainer_state.json" in said[0]


def test_a_lender_that_the_next_save_may_borrow_from_is_not_deleted(tmp_path):
    """Also while saves of a part are all that is committed after it."""
    frozen = {"weight": torch.zeros(8)}
    with open_run(tmp_path, keep=1) as ckpt:
        ckpt.save({"base": frozen, "step": 1}, step=1).result()
        for step in (2, 3):
            ckpt.save({"base": frozen, "step": step}, step=step, select="step").result()
            ckpt.wait()
        ckpt.save({"base": frozen, "step": 4}, step=4, unchanged="base").result()
        ckpt.wait()
        assert torch.equal(ckpt.load(4)["base"]["weight"], frozen["weight"])


def test_nothing_that_a_step_of_a_newer_version_may_need_is_deleted_and_that_is_said_once(tmp_path, caplog):
    """What that step has borrowed, and whether it is the best, only the newer version can tell."""
    frozen = {"weight": torch.ones(8)}
    with open_run(tmp_path) as ckpt:
        for step in (1, 2):
            ckpt.save({"base": frozen, "step": step}, step=step, unchanged="base").result()
    manifest = tmp_path / "step_00000002/manifest.json"
    version = json.loads(manifest.read_bytes())["version"]
    forge_manifest(manifest, version=version + 9)
    with open_run(tmp_path, keep=1) as ckpt:
        for step in (3, 4):
            save(ckpt, step)
        save(ckpt, 1, overwrite=True)
        assert ckpt.steps() == [1, 2, 3, 4]
        assert journaled_steps(ckpt) == [1, 3, 4]
    said = [record.message for record in caplog.records if "a newer version of async_ckpt has saved" in record.message]
    assert len(said) == 1
    assert "step 2" in said[0]
    forge_manifest(manifest, version=version)  # as the newer version reads it
    with open_run(tmp_path) as ckpt:
        assert torch.equal(ckpt.load(2)["base"]["weight"], frozen["weight"])
    with open_run(tmp_path, keep=1) as ckpt:
        save(ckpt, 5)
        assert ckpt.steps() == [5]


# --- several roots -----------------------------------------------------------------------------------------------


def test_every_root_obeys_the_rules(roots):
    with open_run(roots, keep=Keep(best=("loss", "min", 1))) as ckpt:
        save(ckpt, 1, loss=0.1)
        save(ckpt, 2, loss=0.5)
        save(ckpt, 3, loss=0.9, rolling=True)
        save(ckpt, 4, loss=0.3)
        save(ckpt, 5)
    for root in roots:
        with open_run(root) as alone:
            assert alone.steps() == [1, 5]


@pytest.mark.parametrize(
    "options",
    [{"keep": Keep(best=("loss", "min", 1))}, {"keep": Keep(last=1, every=4)}, {"keep": Keep(seconds=3600)}],
    ids=str,
)
def test_what_retention_has_deleted_is_not_copied_back_from_a_root_that_was_away(roots, options):
    with open_run(roots) as ckpt:
        for step, loss in ((1, 0.2), (2, 0.9), (4, 0.1)):
            save(ckpt, step, loss)
        save(ckpt, 5, rolling=True)
    for step in (1, 2):
        for root in roots:
            age(root, step, 7200)
    shutil.copytree(roots[1], roots[1].with_name("old"))
    with open_run(roots, **options) as ckpt:
        save(ckpt, 6)
        assert ckpt.steps() == [4, 6]
    shutil.rmtree(roots[1])
    roots[1].with_name("old").rename(roots[1])  # it was away while retention ran, and has all of them still
    with open_run(roots, **options) as ckpt:
        assert ckpt.catch_up() == {str(roots[0]): [], str(roots[1]): [6]}
        save(ckpt, 7)
        assert ckpt.steps() == ([4, 6, 7] if options["keep"] == Keep(seconds=3600) else [4, 7])
    for root in roots:
        assert not (root / "step_00000005").exists()


def test_a_root_that_is_caught_up_is_given_what_the_rules_keep(roots):
    with open_run(roots[0]) as near:
        for step, loss in ((1, 0.1), (2, 0.9), (3, 0.2)):
            save(near, step, loss)
        save(near, 4, rolling=True)
        save(near, 5, rolling=True)
    with open_run(roots, keep=Keep(best=("loss", "min", 1))) as ckpt:
        assert ckpt.catch_up()[str(roots[1])] == [5, 1]


# --- the best ------------------------------------------------------------------------------------------------


def test_the_best_step_is_found_by_its_record(tmp_path):
    with open_run(tmp_path) as ckpt:
        for step, loss in ((1, 0.5), (2, 0.25), (3, math.nan), (4, 0.25), (5, 0.75)):
            ckpt.save(state_at(step), step=step, record={"loss": loss})
        ckpt.save(state_at(6), step=6).result()

        assert ckpt.best("loss", mode="min") == 4  # of equals the newer
        assert ckpt.best("loss", mode="max") == 5
        assert_is_state(ckpt.load(ckpt.best("loss", mode="min")), 4)
        assert list(ckpt.records()) == [1, 2, 3, 4, 5, 6]
        assert (ckpt.records()[2], ckpt.records()[3], ckpt.records()[6]) == (
            {"loss": 0.25},
            {"loss": None},
            {},
        )


def test_a_metric_that_no_record_has_is_told_with_those_that_they_have(tmp_path):
    with open_run(tmp_path) as ckpt:
        with pytest.raises(
            NotCommittedError,
            match=r"has the metric 'loss' \(no record has any number\); give it with each save",
        ):
            ckpt.best("loss", mode="min")
        ckpt.save(state_at(1), step=1, record={"lr": 0.5, "note": "x"}).result()
        with pytest.raises(NotCommittedError, match=r"has the metric 'loss' \(their records have lr\); give it"):
            ckpt.best("loss", mode="min")
        with pytest.raises(NotCommittedError, match=r"has the metric 'note' \(their records have lr\)"):
            ckpt.best("note", mode="max")
        with pytest.raises(ValueError, match='"min" or "max"'):
            ckpt.best("lr", mode="least")


def test_the_best_of_several_roots_is_that_of_the_step_as_it_is_now(tmp_path):
    near, far = tmp_path / "near", tmp_path / "far"
    with open_run([near, far]) as ckpt:
        ckpt.save(state_at(1), step=1, record={"loss": 0.5}).result()
        ckpt.save(state_at(2), step=2, record={"loss": 0.25}).result()
        ckpt.wait()
    with open_run(far) as alone:
        alone.save(state_at(9), step=2, overwrite=True, record={"loss": 0.75}).result()
    with open_run([near, far]) as ckpt:
        assert ckpt.best("loss", mode="min") == 1
        assert ckpt.records() == {1: {"loss": 0.5}, 2: {"loss": 0.75}}
