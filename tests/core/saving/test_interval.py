"""The interval between saves by what they cost and how often the training fails. Time is a number that the tests move."""

import math
import signal
from typing import Any

import pytest
from clocked_training import ClockedTraining
from states import open_run, save_into, state_at

from async_ckpt import Due, StorageFullError
from async_ckpt.core.report import SaveReport
from async_ckpt.core.saving.interval import (
    FIRST_SAVE_SECONDS,
    AdaptiveInterval,
    Past,
    SaveCost,
    daly_seconds,
    slower_seconds,
)
from async_ckpt.core.saving.policy import interval_of

DAY = 86_400.0


class Training(ClockedTraining):
    def save(self, *, stall: float = 0.0, durable: float = 0.0) -> None:
        """A save that has ended when the next step has."""
        self.begin_save().set_result(committed(stall, durable))

    def until_due(self, seconds: float = 1.0) -> float:
        """Train until a save is due. Returns the seconds since the last one began."""
        begin = self.begun[-1] if self.begun else 0.0
        while not self.run(seconds):
            assert self.now - begin < 1e7
        return self.now - begin


def committed(stall: float, durable: float) -> SaveReport:
    return SaveReport("committed", 1, "x", stall_seconds=stall, total_seconds=durable)


def interval(**rules: Any) -> AdaptiveInterval:
    made = interval_of(Due(**rules))
    assert made is not None
    return made


# --- the formulas --------------------------------------------------------------------------------------------------


def daly_model(interval_seconds: float, cost: float, mtbf: float) -> float:
    """The time that a second of training takes in all, by the exact model of Daly's paper, without restarts."""
    return mtbf * math.expm1(interval_seconds / mtbf) / (interval_seconds - cost)


@pytest.mark.parametrize("mtbf", [600.0, 3600.0, DAY, 30 * DAY])
@pytest.mark.parametrize("share", [1e-5, 1e-3, 0.05, 0.5])
def test_no_other_interval_is_better_than_dalys_by_a_hundredth_of_the_exact_model(mtbf, share):
    cost = share * mtbf
    chosen = daly_model(daly_seconds(cost, mtbf), cost, mtbf) - 1
    others = [daly_model(cost * (1 + 1.01**n / 100), cost, mtbf) - 1 for n in range(2500) if 1.01**n < 100 / share * 20]

    assert chosen <= 1.01 * min(others)


def test_a_save_that_costs_more_than_two_failures_apart_follows_after_one():
    assert daly_seconds(500.0, 100.0) == 600.0
    assert daly_seconds(50.0, DAY) == pytest.approx(math.sqrt(2 * 50 * DAY), rel=0.01)


def test_slower_steps_are_those_beside_a_save_against_the_median_step():
    assert slower_seconds([1.5] * 10, 1.0, 0.0) == pytest.approx(5.0)
    assert slower_seconds([0.9] * 10, 1.0, 0.0) == 0.0
    assert slower_seconds([], 1.0, 0.0) == 0.0


def test_an_evaluation_beside_a_save_is_no_cost_of_it():
    assert slower_seconds([1.2] * 9 + [300.0], 1.0, 0.0) == pytest.approx(2.0)


def test_the_stall_is_not_counted_again_as_a_slower_step():
    assert slower_seconds([3.0], 1.0, 2.0) == 0.0
    assert slower_seconds([3.5, 1.5], 1.0, 2.0) == pytest.approx(1.0)


# --- overhead ------------------------------------------------------------------------------------------------------


def test_the_first_save_is_due_after_a_minute_and_the_next_by_what_it_has_cost():
    training = Training(overhead=0.01)

    assert training.until_due() == FIRST_SAVE_SECONDS
    training.save(stall=2.0)
    assert training.until_due() == 200


def test_the_interval_follows_the_median_of_the_last_five_saves():
    training = Training(overhead=0.1)
    training.until_due()
    waits = []
    for stall in (50.0, 1.0, 1.0, 4.0, 4.0, 4.0, 4.0):
        training.save(stall=stall)
        waits.append(training.until_due())

    assert waits == [500, 255, 10, 25, 40, 40, 40]


def test_steps_that_are_slower_beside_a_save_are_part_of_its_cost():
    training = Training(overhead=0.1)
    training.until_due()
    save = training.begin_save()
    for _ in range(10):
        assert not training.run(1.5)
    save.set_result(committed(0.0, 15.0))
    training.run(1.5)  # the save was under way in this step, too

    assert training.policy.interval().cost_seconds == pytest.approx(11 * 0.5)
    assert training.policy.interval().seconds == pytest.approx(55)


def test_saves_cost_no_more_than_the_share_of_the_time_that_is_allowed():
    training = Training(overhead=0.02)
    training.until_due()
    lost, begin = 0.0, training.now
    for number in range(50):
        stall = 0.5 + 0.5 * (number > 25)
        training.now += stall
        training.save(stall=stall)
        lost += stall
        training.until_due()

    assert 0.015 < lost / (training.now - begin) <= 0.021


def test_no_save_is_due_before_the_one_before_it_is_durable():
    training = Training(overhead=1.0)
    training.until_due()
    save = training.begin_save()

    assert not any(training.run() for _ in range(200))
    save.set_result(committed(0.5, 200.0))
    training.run()
    assert training.policy.interval().rule == "durable"
    training.save(stall=0.5, durable=90.0)
    assert training.until_due() == 200


def test_a_failed_save_tells_no_cost_and_the_next_is_due_after_the_same_interval():
    training = Training(overhead=0.01)
    training.until_due()
    training.save(stall=1.0)
    training.until_due()
    training.begin_save().set_exception(StorageFullError("full", path="/x", needed_bytes=2, free_bytes=1))

    assert training.until_due() == 100


def test_the_bounds_are_kept_but_never_below_the_time_that_a_save_takes():
    cheap, dear = SaveCost(0.01, 0.0, 3.0), SaveCost(50.0, 0.0, 3.0)
    for cost, bounds, seconds, rule in (
        (cheap, {}, 3.0, "durable"),
        (cheap, {"at_least": 30}, 30, "at_least"),
        (dear, {"at_most": 600}, 600, "at_most"),
        (dear, {"at_most": 2}, 3.0, "durable"),
        (dear, {"at_least": 30, "at_most": 9000}, 5000, "overhead"),
    ):
        adaptive = interval(overhead=0.01, **bounds)
        adaptive.add(cost)
        assert (adaptive.after(0).seconds, adaptive.after(0).rule) == (seconds, rule)
    assert interval(overhead=0.01, at_most=5).after(0).seconds == 5
    assert interval(overhead=0.01, at_least=500).after(0).seconds == 500


# --- mtbf ----------------------------------------------------------------------------------------------------------


def test_the_interval_of_a_given_mtbf_is_dalys():
    training = Training(mtbf=DAY)
    training.until_due()
    training.save(stall=50.0, durable=60.0)

    assert training.until_due() == math.ceil(daly_seconds(50.0, DAY))
    assert training.policy.interval().mtbf_seconds == DAY


def test_of_two_rules_the_longer_interval_counts():
    for mtbf, rule in ((3600.0, "overhead"), (1000 * DAY, "mtbf")):
        adaptive = interval(overhead=0.01, mtbf=mtbf)
        adaptive.add(SaveCost(10.0, 0.0, 1.0))
        assert adaptive.after(0).rule == rule
        assert adaptive.after(0).seconds == pytest.approx(max(1000.0, daly_seconds(10.0, mtbf)))


def test_a_measured_mtbf_is_a_day_at_first_and_three_failures_say_more():
    assert Past().mtbf_seconds(0.0) == DAY
    assert Past(1, 3600.0).mtbf_seconds(0.0) == (DAY + 3600) / 2
    assert Past(2, 3600.0).mtbf_seconds(600.0) == (DAY + 4200) / 3
    assert Past(3, 3600.0).mtbf_seconds(0.0) == 1200
    assert Past(3, 3600.0).mtbf_seconds(1800.0) == 1800


def test_a_training_that_goes_on_without_a_failure_saves_less_often():
    adaptive = interval(mtbf="measured")
    adaptive.resume(Past(4, 4 * 3600.0, [SaveCost(1.0, 0.0, 1.0)]))

    assert adaptive.after(0).seconds < adaptive.after(10 * 3600.0).seconds


def test_an_mtbf_below_the_cost_of_a_save_is_an_error_at_the_first_decision_that_knows_it():
    training = Training(mtbf=30.0)
    training.until_due()
    training.save(stall=40.0)

    with pytest.raises(
        ValueError, match=r"Due\(mtbf=30\): a save costs 40 s .* fails every 30 s makes no progress; give"
    ):
        training.run()


def test_a_single_dear_save_among_others_is_no_error():
    training = Training(mtbf=30.0)
    training.until_due()
    for stall in (1.0, 400.0):
        training.save(stall=stall)
        training.run()

    assert training.policy.interval().cost_seconds == pytest.approx(200.5)


# --- rules that are none -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "complaint"),
    [
        ({"overhead": 0}, r"Due\(overhead=…\) must be a share above 0 and up to 1, got 0"),
        ({"overhead": 1.01}, r"up to 1, got 1\.01"),
        ({"overhead": math.nan}, "got nan"),
        ({"overhead": "1%"}, "got '1%'"),
        ({"overhead": True}, "got True"),
        ({"mtbf": 0}, r'Due\(mtbf=…\) must be a number above 0 of seconds, or "measured", got 0'),
        ({"mtbf": "auto"}, "got 'auto'"),
        ({"mtbf": math.nan}, "got nan"),
        ({"overhead": 0.1, "at_least": 0}, r"Due\(at_least=…\) must be a number above 0, got 0"),
        ({"overhead": 0.1, "at_most": "x"}, r"Due\(at_most=…\) must be a number above 0, got 'x'"),
        ({"overhead": 0.1, "at_least": 9, "at_most": 8}, r"Due\(at_least=9\) is above at_most=8"),
        ({"every": 5, "at_least": 9}, r"bound the interval of overhead= or mtbf=; give one of these"),
    ],
)
def test_a_rule_of_cost_that_means_nothing_is_refused(rule, complaint):
    with pytest.raises(ValueError, match=complaint):
        Due(**rule)


def test_without_such_a_rule_there_is_no_interval(tmp_path):
    with open_run(tmp_path, due=Due(every=3)) as ckpt, pytest.raises(ValueError, match=r"give due=Due\(overhead"):
        ckpt.interval()


# --- a run ---------------------------------------------------------------------------------------------------------


def test_a_run_tells_its_interval_and_why(tmp_path):
    with open_run(tmp_path, due=Due(overhead=1e-9, at_most=1e-6)) as ckpt:
        assert str(ckpt.interval()) == "1e-06 s by at_most: no save is measured yet"
        assert ckpt.should_save(1)
        report = ckpt.save(state_at(1), step=1).result()
        ckpt.should_save(2)

        now = ckpt.interval()
        assert now.rule == "durable"
        assert now.seconds == now.durable_seconds == report.total_seconds
        assert now.cost_seconds >= report.stall_seconds > 0
        assert "by durable: a save costs" in str(now)


def test_a_process_that_resumes_knows_what_the_last_saves_have_cost(tmp_path):
    save_into(tmp_path, 1)

    with open_run(tmp_path, due=Due(overhead=0.01)) as ckpt:
        assert ckpt.interval().rule == "first"
        ckpt.restore(state_at(0))
        (save,) = (one for one in ckpt.history() if one["kind"] == "save")
        assert ckpt.interval().cost_seconds == pytest.approx(save["stall_seconds"], abs=1e-4)


def test_what_a_process_measures_counts_as_later_than_the_history():
    adaptive = interval(overhead=0.1)
    adaptive.add(SaveCost(9.0, 0.0, 1.0))
    adaptive.resume(Past(costs=[SaveCost(1.0, 0.0, 1.0)] * 5))
    for _ in range(2):
        adaptive.add(SaveCost(9.0, 0.0, 1.0))

    assert adaptive.after(0).cost_seconds == 9.0


KILLED = """
import os, signal, sys
from states import open_run, state_at
ckpt = open_run(sys.argv[1])
ckpt.restore(state_at(0))
step = (ckpt.latest() or 0) + 1
ckpt.save(state_at(step), step=step).result()
ckpt.wait()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_run_counts_the_processes_that_were_killed_before_it(tmp_path, nursery):
    for _ in range(2):
        assert nursery.run(KILLED, tmp_path).status == -signal.SIGKILL

    with open_run(tmp_path, due=Due(mtbf="measured")) as ckpt:
        assert ckpt.interval().mtbf_seconds == pytest.approx(DAY, rel=0.01)  # nobody has looked
        assert ckpt.restore(state_at(0)) == 2
        assert ckpt.interval().mtbf_seconds == pytest.approx(DAY / 3, rel=0.01)
