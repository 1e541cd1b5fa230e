"""When a save is due. Time is a number that the tests move."""

import math
from collections.abc import Callable
from concurrent.futures import Future
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from clocked_training import ClockedTraining
from racing import until
from scripted_disk import scripted
from states import open_run, state_at

from async_ckpt import Due, StorageFullError
from async_ckpt.core.report import SaveReport
from async_ckpt.core.saving.policy import FIRST_SAVE_SECONDS, MARGIN_SECONDS, SavePolicy

NOON = datetime(2026, 8, 1, 12, tzinfo=UTC)


class Training(ClockedTraining):
    """A training that began at noon."""

    def __init__(self, **rules: Any) -> None:
        super().__init__(noon=NOON.timestamp(), **rules)

    def save(self, seconds: float) -> None:
        """A save that is known to have taken so long; the clock does not move."""
        self.begin_save().set_result(committed(seconds))


def committed(seconds: float) -> SaveReport:
    return SaveReport("committed", 1, "x", total_seconds=seconds)


SKIPPED = SaveReport("skipped", 1, "x")
FULL = StorageFullError("the disk is full", path="/ckpt", needed_bytes=2, free_bytes=1)


# --- every k steps -----------------------------------------------------------------------------------------------


def test_a_save_is_due_at_every_step_that_is_divided_but_the_first():
    policy = SavePolicy(Due(every=4))

    assert [step for step in range(13) if policy.should_save(step)] == [4, 8, 12]


def test_by_steps_alone_two_processes_agree_whatever_their_clocks_say():
    fast, slow = Training(every=3), Training(every=3)

    assert [fast.run(0.1) for _ in range(9)] == [slow.run(100.0) for _ in range(9)]


# --- every t seconds ---------------------------------------------------------------------------------------------


def test_time_is_counted_from_opening_and_then_from_the_beginning_of_the_last_save():
    training = Training(seconds=10)

    assert [training.run(4) for _ in range(3)] == [False, False, True]
    training.begin_save()
    assert [training.run(4) for _ in range(3)] == [False, False, True]


def test_a_save_that_nobody_asked_about_counts_too():
    training = Training(seconds=10)
    training.run(9)
    training.begin_save()

    assert not training.run(9)


def test_time_is_counted_from_restoring():
    training = Training(seconds=10)
    training.now = 500.0
    training.policy.restored(7)
    training.step = 7

    assert not training.run(9)
    assert training.run(1)


def test_what_is_due_stays_due_until_a_save_begins():
    training = Training(seconds=10)

    assert training.run(10)
    assert training.run(1)
    training.begin_save()
    assert not training.run(1)


def test_a_skipped_save_leaves_due_what_was_due():
    training = Training(seconds=10)
    training.run(10)
    save: Future[SaveReport] = Future()
    save.set_result(SKIPPED)
    training.policy.follow(training.step, save)

    assert training.policy.should_save(training.step)
    assert training.run(1)


def test_a_failed_save_is_not_repeated_at_every_step():
    training = Training(seconds=10)
    training.run(10)
    training.begin_save().set_exception(FULL)

    assert [training.run(4) for _ in range(3)] == [False, False, True]


def test_any_of_several_rules_makes_a_save_due():
    training = Training(every=5, seconds=3)

    due = []
    for _ in range(8):
        if training.run(1):
            due.append(training.step)
            training.begin_save()

    assert due == [3, 5, 8]


# --- one step ----------------------------------------------------------------------------------------------------


def test_asked_twice_about_a_step_it_answers_the_same_though_time_has_passed():
    training = Training(seconds=10)

    assert not training.run(9)
    training.now += 5
    assert not training.policy.should_save(training.step)
    assert training.run(0)
    assert training.policy.should_save(training.step)


def test_the_step_that_was_saved_or_restored_is_not_due():
    policy = SavePolicy(Due(every=5))
    assert policy.should_save(5)
    policy.follow(5, Future())
    assert not policy.should_save(5)

    policy.restored(10)
    assert not policy.should_save(10)
    assert policy.should_save(15)


def test_after_going_back_a_step_is_due_once_more():
    policy = SavePolicy(Due(every=5))
    policy.should_save(10)
    policy.follow(10, Future())
    policy.restored(5)

    assert policy.should_save(10)


# --- a deadline --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("step", "save", "margin"), [(1, 10, 0), (1, 10, 25), (7, 3, 10), (40, 90, 30), (0.25, 0, 0)])
def test_one_save_is_made_at_the_last_step_after_which_another_would_be_too_late(step, save, margin):
    training = Training(deadline=NOON + timedelta(seconds=1000), margin_seconds=margin)
    training.run(step)
    training.save(save)

    began = []
    while training.now < 1000:
        if training.run(step):
            began.append(training.now)
            running, ends = training.begin_save(), training.now + save
        if began and not running.done() and training.now >= ends:
            running.set_result(committed(save))

    assert len(began) == 1
    assert began[0] + save + margin <= 1000 < began[0] + step + save + margin


def test_before_the_first_save_a_minute_is_expected():
    left = [FIRST_SAVE_SECONDS + MARGIN_SECONDS + 3.0]
    training = Training(deadline=lambda: left[0])
    training.run(2)

    assert not training.run(2)
    left[0] -= 2
    assert training.run(2)


@pytest.mark.parametrize(
    ("saves", "longest"), [((500, 5, 30, 6, 7, 8), 30), ((500, 30, 5, 6, 7, 8, 9), 9), ((5, 500), 500)]
)
def test_the_longest_of_the_last_five_saves_is_expected(saves, longest):
    left = [10_000.0]
    training = Training(deadline=lambda: left[0], margin_seconds=0)
    training.run(2)
    for seconds in saves:
        training.save(seconds)

    left[0] = longest + 2
    assert not training.run(2)
    left[0] = longest + 1
    assert training.run(2)


def test_a_failed_save_says_nothing_about_how_long_saves_take():
    training = Training(deadline=lambda: 20.0, margin_seconds=0)
    training.run()
    training.begin_save().set_exception(FULL)
    training.save(5)

    assert not training.run()


def test_the_longest_of_the_last_hundred_steps_is_expected():
    training = Training(deadline=lambda: 60.0, margin_seconds=0)
    training.run()
    training.save(5)

    assert training.run(56)  # an evaluation: the next step may hold another
    training.save(5)
    assert all(training.run(1) for _ in range(99))
    assert not training.run(1)


def test_the_time_that_restoring_takes_is_no_step():
    training = Training(deadline=lambda: 60.0, margin_seconds=0)
    training.run(1)
    training.save(5)
    training.now += 3600
    training.policy.restored(1)

    assert not training.run(1)
    assert not training.run(1)


def at_noon(left: Callable[[], float]) -> list[Any]:
    """The same deadline, 100 seconds after noon, in all its forms."""
    when = NOON + timedelta(seconds=100)
    return [
        when,
        when.astimezone(timezone(timedelta(hours=-8))),
        when.timestamp(),
        round(when.timestamp()),
        left,
    ]


@pytest.mark.parametrize("form", range(5))
def test_a_deadline_is_a_time_or_a_function_of_the_seconds_left(form):
    trainings: list[Training] = []
    deadline = at_noon(lambda: 100 - trainings[0].now)[form]
    trainings.append(Training(deadline=deadline, margin_seconds=0))
    (training,) = trainings

    assert next(n for n in range(1, 50) if training.run(1)) == 100 - FIRST_SAVE_SECONDS


def test_nothing_is_due_while_the_deadline_is_not_known():
    left: list[float | None] = [None]
    training = Training(deadline=lambda: left[0])

    assert not any(training.run(1) for _ in range(100))
    left[0] = math.nan
    assert not training.run(1)
    left[0] = math.inf
    assert not training.run(1)


@pytest.mark.parametrize("seconds", [89.0, 5.0, 0.0, -5.0])
def test_when_the_notice_is_too_short_a_save_is_tried_once(seconds):
    left: list[float | None] = [None]
    training = Training(deadline=lambda: left[0])
    training.run()
    training.save(60)  # for another reason, before the notice came

    left[0] = seconds
    assert training.run()
    training.save(60)
    assert not training.run()
    assert not training.run()


def test_while_a_save_is_under_way_no_other_is_due_for_the_deadline():
    training = Training(deadline=NOON + timedelta(seconds=100), margin_seconds=10)
    training.run(1)
    training.save(20)
    training.run(59)  # a step as long as this may come again
    assert training.policy.should_save(training.step)
    save = training.begin_save()

    assert not training.run(1)
    save.set_result(committed(5))
    assert training.run(1)  # 38 seconds are left, and 30 are enough
    training.save(5)
    assert not training.run(9)  # 29 are not


def test_a_last_save_that_failed_is_due_again_while_there_is_room():
    training = Training(deadline=lambda: 75.0 - training.now, margin_seconds=10)
    training.run(1)
    training.save(20)
    assert training.run(40)
    training.begin_save().set_exception(FULL)

    assert training.run(1)
    training.begin_save().set_exception(FULL)
    assert not training.run(5)


def test_a_deadline_that_is_put_off_makes_another_save_due():
    left = [50.0]
    training = Training(deadline=lambda: left[0])
    training.run()
    training.save(30)
    assert not any(training.run() for _ in range(3))

    left[0] = 1000
    assert not training.run()
    left[0] = 50
    assert training.run()


def test_a_function_that_fails_is_told_of_once_and_asked_again(caplog):
    answers: list[Any] = [
        RuntimeError("no metadata"),
        "soon",
        RuntimeError("no metadata"),
        10.0,
        RuntimeError("again"),
    ]

    def deadline() -> Any:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    training = Training(deadline=deadline)

    assert [training.run() for _ in range(5)] == [False, False, False, True, False]
    assert [record.message for record in caplog.records] == [
        "the deadline function raised; there is no deadline until it returns one"
    ] * 2


# --- rules that are none -----------------------------------------------------------------------------------------


def test_without_a_rule_the_answer_is_what_to_give():
    with pytest.raises(ValueError, match="pass due=Due"):
        SavePolicy(Due()).should_save(1)


@pytest.mark.parametrize(
    ("rule", "complaint"),
    [
        ({"every": 0}, r"Due\(every=…\) must be a whole number, at least 1, got 0"),
        ({"every": 1.5}, r"a whole number, at least 1, got 1\.5"),
        ({"seconds": 0}, r"Due\(seconds=…\) must be a number above 0, got 0"),
        ({"seconds": math.nan}, "above 0, got nan"),
        ({"seconds": "x"}, "above 0, got 'x'"),
        ({"seconds": True}, "above 0, got True"),
        ({"margin_seconds": -1}, r"Due\(margin_seconds=…\) must be a number, 0 or more, got -1"),
        ({"margin_seconds": None}, "0 or more, got None"),
        ({"deadline": 3600}, r"3600 is not a time .* add it to time\.time"),
        ({"deadline": math.nan}, "nan is not a time"),
        ({"deadline": datetime(2026, 8, 1)}, "no time zone"),
    ],
)
def test_a_rule_that_means_nothing_is_refused(rule, complaint):
    with pytest.raises(ValueError, match=complaint):
        Due(**rule)


def test_what_is_no_rule_at_all_is_refused(tmp_path):
    with pytest.raises(TypeError, match=r"due must be Due\(every=….*got 50"):
        open_run(tmp_path, due=50)


def test_a_deadline_of_another_type_is_refused():
    with pytest.raises(TypeError, match="not str"):
        Due(deadline="tomorrow")  # type: ignore[arg-type]


# --- a run -------------------------------------------------------------------------------------------------------


def test_a_run_saves_when_its_policy_says_so_and_goes_on_counting_after_a_restore(tmp_path):
    with open_run(tmp_path, due=Due(every=3)) as ckpt:
        for step in range(8):
            if ckpt.should_save(step):
                ckpt.save(state_at(step), step=step)
        ckpt.wait()
        assert ckpt.steps() == [3, 6]

    with open_run(tmp_path, due=Due(every=3)) as ckpt:
        state = state_at(0)
        assert ckpt.restore(state) == 6
        assert [step for step in range(6, 13) if ckpt.should_save(step)] == [9, 12]


def test_a_run_learns_from_its_saves_how_late_the_last_one_may_be(tmp_path):
    left = [None, 80.0, 80.0, 5.0, 5.0]
    with open_run(tmp_path, due=Due(deadline=lambda: left.pop(0))) as ckpt:
        assert not ckpt.should_save(1)
        assert ckpt.should_save(2)  # a minute is expected
        ckpt.save(state_at(2), step=2).result()
        assert not ckpt.should_save(3)  # seconds are
        assert ckpt.should_save(4)
        ckpt.save(state_at(4), step=4).result()
        assert not ckpt.should_save(5)


def test_a_save_that_a_run_skips_stays_due(tmp_path):
    with open_run(tmp_path, due=Due(seconds=1e-9), on_overlap="skip") as ckpt, scripted(ckpt) as disk:
        disk.stop("write")
        assert ckpt.should_save(1)
        ckpt.save(state_at(1), step=1)
        assert not ckpt.should_save(1)
        assert ckpt.should_save(2)
        assert ckpt.save(state_at(2), step=2).result().status == "skipped"
        assert ckpt.should_save(2)
        disk.release_all()


def test_asking_does_not_count_as_having_looked_at_an_error(tmp_path):
    ckpt = open_run(tmp_path, due=Due(every=1))
    with scripted(ckpt) as disk:
        disk.fail("write", error=FULL)
        handle = ckpt.save(state_at(1), step=1)
        until(handle.done)
        assert ckpt.should_save(2)

        with pytest.raises(StorageFullError):
            ckpt.close()
