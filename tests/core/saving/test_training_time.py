"""The time of a process by what it went to, and what the history is told of a training between two saves."""

import signal
from concurrent.futures import Future

import pytest
from clocked_training import ClockedTraining
from states import open_run, state_at

import async_ckpt
from async_ckpt import Due
from async_ckpt.core.events.goodput import PARTS, Goodput
from async_ckpt.core.report import SaveReport


class Training(ClockedTraining):
    """A training whose saves end when the next step has."""

    def __init__(self) -> None:
        self.stall = 0.0
        super().__init__(every=1000, stall_seconds=lambda: self.stall)

    def steps(self, num_steps: int = 1, *, seconds: float = 1.0) -> None:
        for _ in range(num_steps):
            self.run(seconds)

    def save(self, *, stall: float = 0.0) -> Future[SaveReport]:
        save = self.begin_save()
        self.now += stall
        self.stall += stall
        return save

    def end(self, save: Future[SaveReport], *, stall: float = 0.0) -> None:
        save.set_result(SaveReport("committed", 1, "x", stall_seconds=stall))

    def restore(self, step: int, *, seconds: float) -> None:
        self.now += seconds
        self.step = step
        self.policy.restored(step, seconds=seconds)

    @property
    def spent(self) -> list[float]:
        return [self.policy.spent().seconds[part] for part in PARTS]


def test_all_time_is_training_that_no_save_and_no_restore_has_taken():
    training = Training()
    training.restore(0, seconds=7)
    training.steps(20)
    save = training.save(stall=2)
    training.steps(10, seconds=1.5)
    training.end(save, stall=2)
    training.steps()

    # Of the eleven steps beside the save, the first also holds its stall; the last took a second.
    assert training.spent == pytest.approx([20 + 11, 2, 5 * 1.1, 7, 0], abs=0.6)
    assert sum(training.spent) == pytest.approx(training.now)


def test_going_back_within_a_process_makes_what_is_above_the_step_done_again():
    training = Training()
    for _ in range(2):
        training.steps(10)
        training.end(training.save())
    training.steps(5)
    training.restore(10, seconds=3)
    assert training.spent == [10, 0, 0, 3, 15]
    training.steps(10)
    training.restore(0, seconds=1)

    assert training.spent == [10, 0, 0, 4, 25]


def test_going_back_to_the_last_save_loses_only_what_came_after_it():
    training = Training()
    for _ in range(2):
        training.steps(10)
        training.end(training.save())
    training.steps(5)
    training.restore(20, seconds=3)

    assert training.spent == [20, 0, 0, 3, 5]


def test_going_back_to_the_step_of_the_last_restore_counts_from_there():
    training = Training()
    training.restore(100, seconds=1)
    training.steps(10)
    training.restore(100, seconds=1)

    assert training.spent == [0, 0, 0, 2, 10]


def test_the_history_is_told_once_in_a_minute_which_step_was_reached_and_not_after_a_save():
    training = Training()
    told = []
    for step in range(1, 301):
        training.steps()
        if step == 200:
            training.end(training.save())
        told.append(training.policy.reached())

    assert [step for step in told if step] == [60, 120, 180, 260]
    assert training.policy.reached(is_last=True) == 300
    assert training.policy.reached(is_last=True) is None


def test_slower_steps_are_told_once():
    training = Training()
    training.steps(20)
    save = training.save()
    training.steps(10, seconds=1.5)
    training.end(save)
    training.steps(seconds=1.5)

    assert training.policy.facts()["slower_seconds"] == pytest.approx(5.5)
    assert training.policy.facts()["slower_seconds"] is None


# --- a run ---------------------------------------------------------------------------------------------------------


def test_a_run_that_ends_above_its_last_save_says_how_far_it_came(tmp_path):
    with open_run(tmp_path, due=Due(overhead=0.5, at_most=1000)) as ckpt:
        for step in range(1, 5):
            ckpt.should_save(step)
            if step == 2:
                ckpt.save(state_at(step), step).result()

    told = [(one["kind"], one["step"]) for one in async_ckpt.history(tmp_path)]
    assert told == [("save", 2), ("progress", 4), ("closed", None)]
    (save, progress, _) = async_ckpt.history(tmp_path)
    assert " s by " in save["interval"]
    assert "a save costs" in progress["interval"]


KILLED = """
import os, signal, sys
from async_ckpt import Due
from async_ckpt.core.saving import policy
from racing import until
from states import open_run, state_at
import async_ckpt
policy.PROGRESS_SECONDS = 0.0
ckpt = open_run(sys.argv[1], due=Due(every=1000))
start = ckpt.restore(state_at(0)) or 0
for step in range(start + 1, start + 6):
    if step == start + 1:
        ckpt.save(state_at(step), step).result()
        ckpt.wait()
    ckpt.should_save(step)
until(lambda: any(one["kind"] == "progress" and one["step"] == start + 5 for one in async_ckpt.history(sys.argv[1])))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_training_has_told_how_far_it_came_and_what_is_above_its_save_is_done_again(tmp_path, nursery):
    for _ in range(2):
        assert nursery.run(KILLED, tmp_path).status == -signal.SIGKILL
    with open_run(tmp_path) as ckpt:
        ckpt.restore(state_at(0))
        ckpt.save(state_at(3), 3).result()

    spent = async_ckpt.history(tmp_path).goodput()
    first, second, third = spent.starts
    assert [start.has_failed for start in spent.starts] == [True, True, False]
    assert first.redone_seconds > 0
    assert second.redone_seconds > 0
    assert third.redone_seconds == 0
    assert second.restore_seconds > 0
    assert sum(spent.shares.values()) == pytest.approx(1)
    restores = [one for one in async_ckpt.history(tmp_path) if one["kind"] == "restore"]
    for one in restores:
        parts = [one[f"{part}_seconds"] for part in ("find", "plan", "read", "fill")]
        assert min(parts) >= 0
        assert sum(parts) <= one["total_seconds"] + 4e-5  # each is rounded


def test_metrics_have_the_time_of_the_process_under_the_same_keys_from_the_first_call(tmp_path):
    with open_run(tmp_path) as ckpt:
        before = ckpt.metrics("ckpt/")
        ckpt.save(state_at(1), 1).result()
        ckpt.restore(state_at(0))
        after = ckpt.metrics("ckpt/")

    assert before.keys() == after.keys()
    assert {f"ckpt/time_{key}" for key in Goodput().as_dict()} <= after.keys()
    assert after["ckpt/time_stall_seconds"] == after["ckpt/stall_seconds_total"] > 0
    assert after["ckpt/time_restore_seconds"] > 0
    assert sum(after[f"ckpt/time_{part}_share"] for part in PARTS) == pytest.approx(1)
