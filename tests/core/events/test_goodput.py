"""How the time of a run was spent, by the events of its history."""

import math
from typing import Any

import pytest

from async_ckpt.core.events.goodput import PARTS, Goodput, goodput_of
from async_ckpt.core.events.kinds import Event, event


def at(kind: str, time: float, step: int | None = None, *, opened: float | None = 0.0, **facts: Any) -> Event:
    return event(kind, time, step, opened=opened, **facts)


def save(time: float, step: int, *, opened: float | None = 0.0, stall: float = 0.0, slower: float = 0.0) -> Event:
    """A save that was called at this time, and was committed five seconds later."""
    facts = {"stall_seconds": stall, "total_seconds": 5.0, "slower_seconds": slower}
    return at("save", time + 5, step, opened=opened, **facts)


def seconds(spent: Goodput) -> list[float]:
    return [getattr(spent, f"{part}_seconds") for part in PARTS]


def test_a_run_that_never_failed_has_lost_stalls_and_slower_steps_alone():
    spent = goodput_of([save(100, 10, stall=2), save(200, 20, stall=2, slower=3), at("closed", 300)])

    assert seconds(spent) == [293, 4, 3, 0, 0]
    assert spent.total_seconds == 300
    assert not spent.starts[0].has_failed


def test_the_seconds_of_all_parts_are_those_from_the_opening_to_the_last_event():
    events = [
        at("restore", 60, 5, opened=20.0, total_seconds=30),
        save(100, 10, opened=20.0, stall=4, slower=1),
        at("progress", 160, 14, opened=20.0, slower_seconds=2),
        at("failed", 190, 18, opened=20.0, total_seconds=9),
        save(220, 20, opened=20.0, stall=4),
    ]
    spent = goodput_of(events)

    assert spent.total_seconds == pytest.approx(225 - 20)
    assert seconds(spent)[1:] == [8, 3, 30, 0]


def test_steps_above_the_one_restored_were_trained_in_vain():
    events = [
        save(100, 10),
        at("progress", 160, 16),  # and killed then
        at("restore", 1010, 10, opened=1000.0, total_seconds=10),
        save(1110, 20, opened=1000.0),
        at("closed", 1120, opened=1000.0),
    ]
    spent = goodput_of(events)
    first, second = spent.starts

    assert seconds(first) == [100, 0, 0, 0, 60]
    assert seconds(second) == [110, 0, 0, 10, 0]
    assert (first.has_failed, second.has_failed, spent.num_failed) == (True, False, 1)
    assert [first.opened, second.opened] == [0, 1000]
    assert seconds(spent) == [210, 0, 0, 10, 60]


def test_what_a_killed_process_did_after_its_last_step_is_lost_however_the_next_one_resumes():
    events = [save(100, 10), at("retention", 130, 10), save(1100, 20, opened=1000.0)]
    first, second = goodput_of(events).starts

    assert seconds(first) == [100, 0, 0, 0, 30]
    assert (first.has_failed, second.has_failed) == (True, False)


def test_a_process_that_closes_after_its_last_save_has_lost_nothing():
    events = [
        save(100, 10),
        at("closed", 106),
        at("restore", 1010, 10, opened=1000.0, total_seconds=10),
        save(1110, 20, opened=1000.0),
    ]
    spent = goodput_of(events)

    assert seconds(spent) == [106 + 105, 0, 0, 10, 0]
    assert spent.num_failed == 0


def test_a_process_that_closes_above_its_last_save_has_lost_the_steps_in_between():
    events = [
        save(100, 10),
        at("progress", 150, 15),
        at("closed", 160),
        at("restore", 1010, 10, opened=1000.0, total_seconds=10),
    ]

    assert seconds(goodput_of(events)) == [100, 0, 0, 10, 60]
    assert goodput_of(events).num_failed == 1


def test_a_rollback_within_a_process_is_no_failure_but_costs_what_is_done_again():
    events = [
        save(100, 10),
        save(200, 20),
        at("restore", 260, 10, total_seconds=10),
        save(360, 20),
        at("closed", 365),
    ]
    spent = goodput_of(events)

    assert seconds(spent) == [100 + 105, 0, 0, 10, 150]
    assert spent.num_failed == 0


def test_going_back_over_several_starts_takes_from_each_what_is_done_again():
    events = [
        save(100, 10),
        save(200, 20),
        at("closed", 205),
        at("restore", 1000, 20, opened=1000.0, total_seconds=0),
        save(1100, 30, opened=1000.0),
        at("closed", 1105, opened=1000.0),
        at("restore", 2000, 10, opened=2000.0, total_seconds=0),
    ]
    first, second, third = goodput_of(events).starts

    assert seconds(first) == [100, 0, 0, 0, 105]
    assert seconds(second) == [0, 0, 0, 0, 105]
    assert third.total_seconds == 0


def test_events_of_older_versions_tell_starts_apart_by_the_closing_of_the_run():
    events = [
        save(100, 10, opened=None),
        save(200, 20, opened=None),
        at("closed", 205, opened=None),
        save(1000, 30, opened=None),
        save(1100, 40, opened=None),
    ]
    spent = goodput_of(events)

    assert [start.total_seconds for start in spent.starts] == [105, 105]


def test_of_no_events_no_time_is_known_and_the_keys_are_the_same():
    nothing, some = goodput_of([]), goodput_of([save(100, 10)])

    assert nothing.as_dict("goodput/").keys() == some.as_dict("goodput/").keys()
    assert math.isnan(nothing.shares["trained"])
    assert str(nothing) == "no time is known"
    assert str(some) == "100.0% trained, 0.0% stall, 0.0% slower, 0.0% restore, 0.0% redone, of 105 s"


def test_times_that_go_backwards_make_no_negative_seconds():
    spent = goodput_of([save(100, 10, stall=500), save(50, 20, slower=900), at("restore", 10, 5, total_seconds=99)])

    assert min(seconds(spent)) >= 0
