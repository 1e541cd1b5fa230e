"""A rollback at two roots that is killed, or fails, at any call that changes a disk: both roots together have the line before it or
after it, and never a mixture; and so has each root alone.
"""

import itertools
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from slices import ALL, some
from states import assert_is_state, everywhere, open_run, save_into, state_at

import async_ckpt
from async_ckpt.core.runs.run import Run

# Steps 1, 2 and 4 are at both roots. Prints how many calls there were, and the error of the save.
ROLLING_BACK = """
import errno, json, sys
from children import _die, die_at
from states import open_run, state_at
near, far, how, step, number = sys.argv[1:]
def fail():
    raise OSError(errno.EIO, "the disk has failed")
with open_run([near, far], keep=3, on_rollback="retire") as ckpt:
    count = die_at(int(number), _die if how == "killed" else fail)
    try:
        handle = ckpt.save(state_at(int(step)) | {"note": "new"}, int(step), overwrite=True)
        error = handle.exception()
    except Exception as at_once:
        error = at_once
    ckpt.wait()
    ckpt._lineage.tiers.finish()
    print(json.dumps([count(), None if error is None else type(error).__name__, bool(getattr(error, "undecided", False))]))
"""
OLD = [(1, "step 1"), (2, "step 2"), (4, "step 4")]
LINES = {1: [(1, "new")], 2: [(1, "step 1"), (2, "new")], 3: [*OLD[:2], (3, "new")]}


def line(root: Any) -> list[tuple[int, str]]:
    """The run as every reader sees it: each step with its note."""
    with open_run(root) as ckpt:
        steps = ckpt.steps()
        assert ckpt.latest() == steps[-1]
        assert ckpt.restore(state_at(0) | {"note": ""}) == steps[-1]
        states = [ckpt.load(step) for step in steps]
    for step, state in zip(steps, states, strict=True):
        assert_is_state(state | {"note": f"step {step}"}, step)
    if not isinstance(root, list):
        assert async_ckpt.load(root)["note"] == states[-1]["note"]
    return [(step, state["note"]) for step, state in zip(steps, states, strict=True)]


@pytest.mark.parametrize("how", ["killed", "failed"])
@pytest.mark.parametrize("step", some([1, 2, 3], 3))
def test_at_any_call_of_a_rollback_two_roots_have_the_old_line_or_the_new_one(quick_path, nursery, step, how):
    with open_run([quick_path / "before" / name for name in ("near", "far")]) as ckpt:
        for saved in (1, 2, 4):
            everywhere(ckpt, ckpt.save(state_at(saved), step=saved))

    def roll_back(number: int) -> tuple[list[Path], tuple[int, str | None, bool] | None]:
        top = shutil.copytree(quick_path / "before", quick_path / str(number))
        roots = [top / "near", top / "far"]
        ended = nursery.run(ROLLING_BACK, *roots, how, step, number)
        assert ended.status in (0, -9 if number and how == "killed" else 0), ended.err
        return roots, (tuple(json.loads(ended.out)) if ended.out else None)

    def numbers() -> Iterator[int]:
        outcome = roll_back(0)[1]
        assert outcome is not None
        assert outcome[1:] == (None, False)
        return iter(some(range(1, outcome[0] + 1), outcome[0] // 4))

    seen = set()
    for number in numbers():
        roots, outcome = roll_back(number)
        both = line(roots)
        assert both in (OLD, LINES[step])
        for root in roots:
            assert line(root) in (OLD, LINES[step])
        if outcome is not None and not outcome[2]:
            assert both == LINES[step] or (outcome[1] is not None and both == OLD), (number, outcome)
        seen.add(both == OLD)
        assert_goes_on(roots, step)
        shutil.rmtree(roots[0].parent)
    assert True in seen or not (ALL and how == "killed")


def assert_goes_on(roots: list[Path], step: int) -> None:
    """The next process rolls back at both roots, which are alike then, and clean."""
    with open_run(roots, on_rollback="retire") as ckpt:
        for later in itertools.count(step):
            everywhere(ckpt, ckpt.save(state_at(later), later, overwrite=True))
            if later > step:
                break
    lines = [line(root) for root in roots]
    assert lines[0] == lines[1] == [one for one in OLD if one[0] < step] + [(n, f"step {n}") for n in (step, step + 1)]
    for root in roots:
        assert list(root.glob("rollback-*")) == []


def test_a_step_that_a_place_retires_after_it_was_listed_is_not_listed(tmp_path, monkeypatch):
    near, far = tmp_path / "near", tmp_path / "far"
    save_into([near, far], 1, 2, 3)
    with open_run(near, on_rollback="retire") as ckpt:  # the far place is away
        ckpt.save(state_at(9), 1, overwrite=True).result()
    steps_of = Run.steps

    def then_retire(run: Run) -> list[int]:
        steps = steps_of(run)
        if run.storage.locate("").rstrip("/") == str(far):
            for step in (2, 3):  # as the mover does
                shutil.rmtree(far / f"step_{step:08d}", ignore_errors=True)
        return steps

    monkeypatch.setattr(Run, "steps", then_retire)
    with open_run([near, far]) as ckpt:
        assert ckpt.steps() == [1]
        assert ckpt.latest() == 1
