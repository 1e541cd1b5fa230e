"""Marks of steps: what a restart, retention and the best step make of them, where they lie, and how long they last."""

import shutil
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from states import everywhere, open_run

import async_ckpt
from async_ckpt import AsyncCheckpointer, Keep, NotCommittedError
from async_ckpt.core.runs.manifest import Manifest
from async_ckpt.core.runs.marks import Mark, newest_of, split_marks
from async_ckpt.core.runs.retention import Commits, deletable_steps
from async_ckpt.core.runs.root import formats_at
from async_ckpt.core.storage.local import LocalStorage
from async_ckpt.errors import NoGoodStepError

STEPS = (1, 2, 3)


def state_at(step: int) -> dict[str, Any]:
    return {"w": torch.full((8,), float(step))}


def save(ckpt: AsyncCheckpointer, step: int, **options: Any) -> None:
    ckpt.save(state_at(step), step, record={"loss": 1 / step}, **options).result()


def restored(ckpt: AsyncCheckpointer, **how: Any) -> int | None:
    """The step that was restored, which is also what the state says."""
    state = state_at(0)
    step = ckpt.restore(state, **how)
    assert state["w"].tolist() == [float(step or 0)] * 8
    return step


def marks_in(root: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(root.glob("mark-*"))}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def ckpt(root: Path) -> Iterator[AsyncCheckpointer]:
    with open_run(root) as ckpt:
        for step in STEPS:
            save(ckpt, step)
        yield ckpt


# --- what is restored --------------------------------------------------------------------------------------------


def test_a_restart_passes_over_a_bad_step_and_says_why(ckpt, root):
    ckpt.mark(3, "bad", note="loss is nan")

    with open_run(root) as other, pytest.warns(RuntimeWarning, match="step 3 is skipped.*marked bad: loss is nan"):
        assert restored(other) == 2
    assert ckpt.latest() == 3  # it is committed all the same


def test_the_training_goes_on_below_the_bad_steps_without_being_asked_for_a_rollback(ckpt):
    for step in (2, 3):
        ckpt.mark(step, "bad")
    with pytest.warns(RuntimeWarning):
        assert restored(ckpt) == 1

    save(ckpt, 2)

    assert ckpt.steps() == [1, 2]
    assert ckpt.marks() == {}
    assert restored(ckpt) == 2


@pytest.mark.parametrize("read", [AsyncCheckpointer.load, lambda ckpt: async_ckpt.load(ckpt.root)])
def test_a_load_of_the_newest_passes_over_bad_steps_too(ckpt, read):
    for step in (2, 3):
        ckpt.mark(step, "bad", note="spike")

    said = "step {} is passed over: it is marked bad: spike"
    with pytest.warns(RuntimeWarning, match=said.format(3)), pytest.warns(RuntimeWarning, match=said.format(2)) as told:
        assert read(ckpt)["w"][0] == 1
    assert {one.filename for one in told} == {__file__}
    ckpt.mark(1, "bad")
    with pytest.raises(NoGoodStepError, match=r"step 3: it is marked bad: spike; .*step=3"):
        read(ckpt)


def test_the_newest_good_step_is_taken_if_that_is_asked_for(ckpt):
    ckpt.mark(1, "good")
    assert restored(ckpt, marked="good") == 1
    ckpt.mark(2, "good")
    assert restored(ckpt, marked="good") == 2
    with pytest.raises(async_ckpt.errors.StepBehindError):  # step 3 may be sound: no save takes its place by itself
        ckpt.save(state_at(0), 0).result()


def test_where_no_step_is_good_a_run_with_steps_is_refused_and_one_without_begins(ckpt, root):
    with pytest.raises(NoGoodStepError, match="step 3: it is not marked good; step 2") as caught:
        restored(ckpt, marked="good")
    assert (caught.value.path, caught.value.steps) == (str(root), STEPS)
    with open_run(root.with_name("new")) as new:
        assert restored(new, marked="good") is None


def test_a_run_of_bad_steps_does_not_train_from_nothing_and_a_named_step_is_restored(ckpt):
    for step in STEPS:
        ckpt.mark(step, "bad", note=f"spike {step}")

    with pytest.raises(NoGoodStepError, match="step 3: it is marked bad: spike 3") as caught:
        restored(ckpt)
    assert caught.value.steps == STEPS
    with pytest.warns(RuntimeWarning, match="step 2 is restored, and it is marked bad: spike 2"):
        assert restored(ckpt, step=2) == 2
    ckpt.mark(1, None)
    with pytest.warns(RuntimeWarning):
        assert restored(ckpt) == 1


def test_the_best_step_is_never_a_bad_one(ckpt):
    ckpt.mark(3, "bad")
    assert ckpt.best("loss", mode="min") == 2
    for step in (1, 2):
        ckpt.mark(step, "bad")
    with pytest.raises(NotCommittedError, match="no record of a step that is not marked bad has the metric 'loss'"):
        ckpt.best("loss", mode="min")


# --- which mark counts -------------------------------------------------------------------------------------------


def test_the_newest_mark_counts_and_none_is_ever_changed(ckpt, root):
    ckpt.mark(3, "bad", note="spike")
    before = marks_in(root)
    ckpt.mark(3, "good", note="it was the logger")
    assert ckpt.marks() == {3: ("good", "it was the logger")}
    ckpt.mark(3, None)

    assert ckpt.marks() == {}
    assert restored(ckpt) == 3
    assert before.items() <= marks_in(root).items()
    assert len(marks_in(root)) == 3


def test_of_two_marks_at_one_moment_the_bad_one_counts():
    marks = [Mark(1, "0" * 8, 2, kind) for kind in ("good", "bad", "none")]

    assert newest_of(marks) == newest_of(marks[::-1]) == marks[1]
    assert newest_of([*marks, Mark(1, "0" * 8, 10, "good")]).kind == "good"
    assert newest_of([*marks, Mark(1, "0" * 8, 3, "none")]) is None


def test_many_that_mark_at_once_leave_one_mark_that_counts(ckpt, root):
    begin = threading.Barrier(8)

    def mark(kind: str) -> None:
        with AsyncCheckpointer(root) as own:
            begin.wait(60)
            own.mark(2, kind)

    threads = [threading.Thread(target=mark, args=(kind,)) for kind in ("good", "bad") * 4]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    _, marks = split_marks(sorted(marks_in(root)))
    newest = newest_of(marks)
    assert newest is not None
    assert ckpt.marks() == {2: (newest.kind, "")}


def test_a_step_that_is_saved_anew_has_no_mark_and_the_next_start_deletes_the_old_one(ckpt, root):
    ckpt.mark(3, "bad")
    save(ckpt, 3, overwrite=True)

    assert ckpt.marks() == {}
    assert restored(ckpt) == 3
    ckpt.close()
    assert len(marks_in(root)) == 1
    with open_run(root) as later:
        save(later, 4)
    assert marks_in(root) == {}


@pytest.mark.parametrize("text", ["", "[]", '{"note": 7}', "{", '{"note": "\\ud800"}'])
def test_a_note_that_nobody_can_read_takes_nothing_from_the_mark(ckpt, root, text):
    ckpt.mark(3, "bad", note="spike")
    (path,) = root.glob("mark-*")
    path.write_text(text)

    assert ckpt.marks() == {3: ("bad", "")}


def test_names_that_only_look_like_marks_are_none():
    others = ["mark", "mark-1.json", "mark-1.00000000.0001.ugly.json", "mark-x.00000000.0001.bad.json", "marks"]
    name = "mark-1.00000000.0001.bad.json"

    assert split_marks(sorted([*others, name])) == (sorted(others), [Mark(1, "0" * 8, 1, "bad")])


def test_a_mark_is_no_step_of_another_naming(ckpt, root):
    ckpt.mark(3, "good")

    assert formats_at(LocalStorage(root)) == ["step_{:08d}"]
    with open_run(root) as other:
        assert restored(other) == 3


def test_a_run_with_marks_is_listed_as_often_as_one_without(ckpt, root, monkeypatch):
    calls: list[str] = []
    names, read = LocalStorage.names, LocalStorage.read
    monkeypatch.setattr(
        LocalStorage, "names", lambda own, folder: calls.append(f"names {folder}") or names(own, folder)
    )
    monkeypatch.setattr(LocalStorage, "read", lambda own, path: calls.append(f"read {path}") or read(own, path))

    def asked() -> list[str]:
        with open_run(root) as other:
            calls.clear()
            assert restored(other) == 3
            return calls.copy()

    before = asked()
    for step in (1, 2):
        ckpt.mark(step, "bad")
    assert asked() == before


@pytest.mark.parametrize(
    ("step", "kind", "note", "error", "says"),
    [
        (7, "bad", "", NotCommittedError, "no step 7; committed: 1, 2, 3"),
        (3, "ugly", "", ValueError, '"good" or "bad", or None'),
        (-1, "bad", "", ValueError, "step must be"),
        (3, "bad", 7, TypeError, "note must be text"),
        (3, "bad", "x" * 5000, ValueError, "5,000 characters; at most 4,096"),
    ],
)
def test_a_mark_that_makes_no_sense_says_what_to_give(ckpt, root, step, kind, note, error, says):
    with pytest.raises(error, match=says):
        ckpt.mark(step, kind, note=note)
    assert marks_in(root) == {}


def test_a_restore_of_marked_steps_takes_good_and_no_step():
    for wrong in ({"marked": "bad"}, {"marked": "good", "step": 1}):
        with pytest.raises(ValueError, match='marked must be "good"'), AsyncCheckpointer("unused") as ckpt:
            ckpt.restore({}, **wrong)


def test_the_history_has_the_marks(ckpt):
    ckpt.mark(2, "bad", note="spike")
    save(ckpt, 4)
    ckpt.wait()

    (event,) = [one for one in ckpt.history() if one["kind"] == "mark"]
    assert (event["step"], event["mark"], event["note"]) == (2, "bad", "spike")


# --- retention ---------------------------------------------------------------------------------------------------


def with_marks(steps: dict[int, dict[str, Any]], **kinds: str) -> Commits:
    """Commits of these records, with marks by name: s1="bad"."""
    made = {step: Manifest(step, "", 1, float(step), (), (), record) for step, record in steps.items()}
    return Commits(made).with_marks({int(name[1:]): Mark(int(name[1:]), "", 1, kind) for name, kind in kinds.items()})


FOUR: dict[int, dict[str, Any]] = {step: {"loss": step} for step in (1, 2, 3, 4)}


@pytest.mark.parametrize(
    ("rules", "kinds", "doomed"),
    [
        (Keep(2), {"s3": "bad"}, [1, 3]),
        (Keep(1), {"s4": "bad"}, [1, 2]),  # the newest is always kept, and so is the newest that is not bad
        (Keep(1), {"s1": "bad", "s2": "bad", "s3": "bad", "s4": "bad"}, [1, 2, 3]),
        (Keep(every=1), {"s2": "bad"}, [2]),
        (Keep(best=("loss", "min", 1)), {"s1": "bad"}, [1, 3]),
        (Keep(seconds=1000), {"s1": "bad"}, [1]),
        (Keep(), {"s1": "bad"}, []),  # without rules, somebody may want to look at it
        (Keep(1, good=1), {"s1": "good", "s2": "good"}, [1, 3]),
        (Keep(good=2), {"s1": "good", "s2": "good"}, [3]),
        (Keep(good=9), {}, [1, 2, 3]),
        (Keep(1, good=1), {"s1": "good", "s4": "bad"}, [2]),
    ],
)
def test_what_retention_makes_of_marks(rules, kinds, doomed):
    assert deletable_steps(rules, with_marks(FOUR, **kinds), now=100.0) == doomed


def test_a_good_step_stays_though_it_was_rolling_or_has_expired():
    steps = {1: {"rolling": True}, 2: {"ttl_seconds": 1}, 3: {}, 4: {}}

    assert deletable_steps(Keep(9), with_marks(steps), now=100.0) == [1, 2]
    assert deletable_steps(Keep(9, good=2), with_marks(steps, s1="good", s2="good"), now=100.0) == []


records = st.fixed_dictionaries({}, optional={"loss": st.integers(0, 3), "rolling": st.just(True)})


@given(
    st.dictionaries(st.integers(0, 20), records, min_size=1, max_size=10),
    st.sets(st.integers(0, 20)),
    st.builds(
        Keep,
        last=st.integers(1, 4),
        every=st.none() | st.integers(1, 5),
        best=st.none() | st.just(("loss", "min", 2)),
        seconds=st.none() | st.integers(80, 99),
    ),
)
def test_bad_steps_go_and_the_others_as_if_they_were_not_there(made, bad, rules):
    bad &= made.keys()
    others = {step: record for step, record in made.items() if step not in bad}

    doomed = deletable_steps(rules, with_marks(made, **{f"s{step}": "bad" for step in bad}), now=100.0)

    assert doomed == sorted({*deletable_steps(rules, with_marks(others), now=100.0)} | (bad - {max(made)}))


def test_retention_deletes_a_bad_step_with_its_marks_and_keeps_the_good_one(root):
    with open_run(root, keep=Keep(last=2, good=1)) as ckpt:
        for step in (1, 2):
            save(ckpt, step)
        ckpt.mark(1, "good")
        ckpt.mark(2, "bad")
        for step in (3, 4, 5):
            save(ckpt, step)
        ckpt.wait()

        assert ckpt.steps() == [1, 4, 5]
        assert ckpt.marks() == {1: ("good", "")}
    assert [name.split(".")[0] for name in marks_in(root)] == ["mark-1"]


def test_a_mark_of_another_process_counts_at_the_next_save(root):
    with open_run(root, keep=2) as ckpt:
        for step in (1, 2):
            save(ckpt, step)
        with open_run(root) as other:
            other.mark(2, "bad")
        save(ckpt, 3)
        ckpt.wait()
        assert ckpt.steps() == [1, 3]


# --- several places ----------------------------------------------------------------------------------------------


def test_a_mark_lies_at_each_place_of_the_step_and_one_is_enough(tmp_path):
    near, far = tmp_path / "near", tmp_path / "far"
    with open_run([near, far]) as ckpt:
        for step in (1, 2):
            everywhere(ckpt, ckpt.save(state_at(step), step))
        ckpt.mark(2, "bad", note="spike")
    assert marks_in(near) == marks_in(far)
    assert len(marks_in(far)) == 1
    shutil.rmtree(near)

    with open_run([near, far]) as ckpt, pytest.warns(RuntimeWarning, match="marked bad: spike"):
        assert restored(ckpt) == 1


def test_a_place_that_was_away_gets_the_marks_with_the_steps(tmp_path):
    near, far = tmp_path / "near", tmp_path / "far"
    with open_run(near) as ckpt:
        for step in (1, 2):
            save(ckpt, step)
        ckpt.mark(1, "good")
    with open_run([near, far]) as ckpt:
        assert ckpt.catch_up()[str(far)] == [2, 1]
        assert marks_in(far) == marks_in(near)
        with open_run(near) as alone:  # as if the far place did not answer
            alone.mark(2, "bad")
        assert ckpt.marks() == {1: ("good", ""), 2: ("bad", "")}
        ckpt.catch_up()
    assert marks_in(far) == marks_in(near)


def test_a_mark_that_was_taken_back_does_not_come_back_from_a_place_that_has_missed_it(tmp_path):
    near, far = tmp_path / "near", tmp_path / "far"
    with open_run([near, far]) as ckpt:
        everywhere(ckpt, ckpt.save(state_at(1), 1))
        ckpt.mark(1, "bad")
        with open_run(near) as alone:
            alone.mark(1, None)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert restored(ckpt) == 1
        assert ckpt.marks() == {}
