"""Starts of one run whose requests interleave in any order: at most one line goes on, and what was acknowledged is on it."""

import random

import pytest
from interleaved import Objects, Process, line
from slices import some

from async_ckpt import RunTakenError, StepBehindError, StepExistsError
from async_ckpt.core.runs import run


def steps_to_save(dice: random.Random, *, retire: bool) -> list[int]:
    """Counted from the newest that is found: each above the one before it, but for rollbacks."""
    step, steps = 0, []
    for _ in range(dice.randint(1, 4)):
        step += dice.choice([-4, -2, 1, 2]) if retire else dice.randint(1, 3)
        steps.append(step)
    return steps


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "_SEEN_PAUSE_SECONDS", 0)


@pytest.mark.parametrize("seed", some(range(10_000), 51))
def test_whatever_the_order_of_their_requests_one_line_goes_on(seed):
    dice = random.Random(seed)
    objects, retire, overwrite = Objects(), dice.random() < 0.5, dice.random() < 0.3
    processes: list[Process] = []
    alive: list[Process] = []
    try:
        for _ in range(dice.randint(2, 4)):
            steps = steps_to_save(dice, retire=retire)
            token = f"{dice.getrandbits(32):08x}"
            alive.append(Process(objects, steps, retire=retire, overwrite=overwrite, token=token))
            processes.append(alive[-1])
            # How far it, and those before it, come before the next one is started.
            for _ in range(dice.randint(0, 6)):
                chosen = dice.choice(alive)
                for _ in range(dice.choice([1, 2, 5, 12, 30])):
                    chosen.go()
            if len(alive) > 1 and dice.random() < 0.3:
                alive.pop(dice.randrange(len(alive))).kill()
        dice.shuffle(alive)
        for one in alive:
            one.finish()
        check(objects, processes)
        newest = [made.step for made in line(objects)][-1:]
        restarted = Process(objects, [1], retire=False)
        processes.append(restarted)
        restarted.finish()
        assert [made.step for made in restarted.acknowledged] == [step + 1 for step in newest or [-1]]
        check(objects, processes)
    finally:
        for one in processes:
            one.kill()


def check(objects: Objects, processes: list[Process]) -> None:
    for one in processes:
        for error in one.errors:
            assert isinstance(error, RunTakenError | StepBehindError | StepExistsError), repr(error)
    made = line(objects)
    on = {one.attempt for one in made}
    told = {one.attempt for process in processes for one in process.acknowledged}
    left_out = gone(objects, on | told)
    for one in processes:
        for commit, own in zip(one.acknowledged, one.starts, strict=True):
            assert commit.attempt in on | left_out, f"step {commit.step} of process {one.number} was acknowledged"
            for later, seen in objects.seen.items():
                if own.is_before(later):
                    was_seen = seen.names(commit.step, commit.attempt)
                    assert was_seen or commit.attempt in left_out, f"{later} has not seen step {commit.step}"
    for label in {one.start for one in made}:  # what a line goes on from is there, or it has left it out
        for start, seen in objects.seen.items():
            if start.label == label:
                assert {*seen._attempts.values()} <= on | left_out, f"{start} goes on from what is not there"
    labels = [manifest.start for manifest in made]
    assert labels == sorted(labels)  # one line: no earlier start has a step above a later one's


def gone(objects: Objects, sound: set[str]) -> set[str]:
    """What commits that are sound, or were until a later one, have retired or replaced."""
    known = set(sound)
    while more := {
        attempt
        for one in objects.manifests
        if one.attempt in known
        for attempt in (*(retired.attempt for retired in one.retires), *one.replaces)
        if attempt not in known
    }:
        known |= more
    return {
        attempt
        for one in objects.manifests
        if one.attempt in known
        for attempt in (*(retired.attempt for retired in one.retires), *one.replaces)
    }
