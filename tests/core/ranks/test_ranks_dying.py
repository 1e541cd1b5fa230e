"""A rank is killed in the middle of a save: the step is whole or not there, and no two ranks are told opposite things."""

import os
import time
from pathlib import Path

import pytest
import torch
from rank_oracle import run_of, saved
from rank_states import numbered
from rank_worlds import Ended, Worlds
from states import open_run

SIZE = 3
# Step 1 is saved by all; one of them dies in step 2, and the deadlines of the others then pass.
DYING = """
who, waiting = {who}, {waiting}
with open_run(here.root) as ckpt:
    here.save(ckpt, small(1), 1)
    state = small(2)
    here.meet("made")
    if here.rank == who:
        if "{point}" == "save":
            {die}()
        here.at("{point}", {die}, step=None if "{point}" == "capture" else 2)
    if here.rank in waiting:
        here.expire(lambda: here.is_said(f"dead{{who}}"))
    here.save(ckpt, state, 2)
"""
AGAIN = """
with open_run(here.root) as ckpt:
    state = small(0)
    start = ckpt.restore(state) or 0
    assert state["model"]["whole"].min() == start
    for step in range(start + 1, 4):
        here.save(ckpt, small(step), step)
"""


def assert_goes_on(worlds: Worlds, steps: list[int]) -> None:
    """Every step that is there is whole; and so are those that the next start of the training saves."""
    assert open_run(worlds.root).steps() == steps
    for ended in worlds.run(SIZE, AGAIN):
        assert [one.get("status") for one in ended.saves] == ["committed"] * (3 - steps[-1]), ended.saves
    for step in (1, 2, 3):
        found = saved(worlds.root, step)
        assert torch.equal(found.tensors["model.cut"], numbered(41, 3) + step)
        assert torch.equal(found.tensors["model.whole"], numbered(300, 1000) + step)
        assert [state["step"] for state in found.states] == [step] * SIZE


def second(ended: list[Ended], dead: int) -> list[dict]:
    """What the others were told of the second save."""
    return [one.saves[1] for rank, one in enumerate(ended) if rank != dead]


@pytest.mark.parametrize("point", ["save", "capture", "write", "receipt"])
def test_a_rank_that_dies_before_its_part_is_done_is_named_to_all_others(worlds, point):
    script = DYING.format(who=1, waiting=[0], point=point, die="here.die_last")
    told = second(worlds.run(SIZE, script, killed={1}), dead=1)

    assert [one["error"] for one in told] == ["PeerFailedError"] * 2
    assert [one["undecided"] for one in told] == [False] * 2
    assert [one["rank"] for one in told] == [1] * 2
    assert "nothing was heard of rank 1" in told[0]["text"]
    assert "rank 1: it did not finish its part in time" in told[1]["text"]
    assert_goes_on(worlds, [1])


def test_a_rank_that_dies_when_its_part_is_done_is_not_missed(worlds):
    script = DYING.format(who=1, waiting=[], point="after receipt", die="here.die")
    told = second(worlds.run(SIZE, script, killed={1}), dead=1)

    assert [one.get("status") for one in told] == ["committed"] * 2
    assert_goes_on(worlds, [1, 2])


@pytest.mark.parametrize("point", ["save", "capture", "write", "receipt", "after receipt", "manifest"])
def test_without_rank_0_nothing_is_committed_and_nobody_says_that_it_failed(worlds, point):
    has_begun = point != "save"  # before that the others write nothing that rank 0 could wait for
    script = DYING.format(who=0, waiting=[1, 2], point=point, die="here.die_last" if has_begun else "here.die")
    told = second(worlds.run(SIZE, script, killed={0}), dead=0)

    assert [one["error"] for one in told] == ["PeerFailedError"] * 2
    assert [one["undecided"] for one in told] == [has_begun] * 2
    assert_goes_on(worlds, [1])


def test_what_rank_0_has_committed_before_it_died_is_committed_everywhere(worlds):
    script = DYING.format(who=0, waiting=[], point="after manifest", die="here.die")
    told = second(worlds.run(SIZE, script, killed={0}), dead=0)

    assert [one.get("status") for one in told] == ["committed"] * 2
    assert_goes_on(worlds, [1, 2])


@pytest.mark.parametrize("point", ["after receipt", "manifest"])
def test_what_the_dead_have_left_goes_after_a_day_and_nothing_else(worlds, point):
    """Rank 0 died when all archives were there; then rank 1 in a later start, and left an archive that was not finished."""
    worlds.run(SIZE, DYING.format(who=0, waiting=[1, 2], point=point, die="here.die_last"), killed={0})
    again = DYING.replace("here.save(ckpt, small(1), 1)", "")
    worlds.run(SIZE, again.format(who=1, waiting=[0], point="write", die="here.die_last"), killed={1})
    (worlds.root / "step_00000002/notes.txt").touch()
    assert_goes_on(worlds, [1])
    left = left_behind(worlds)
    assert len(left) > SIZE

    day_before_yesterday = time.time() - 2 * 86400
    for path in left:
        os.utime(path, (day_before_yesterday, day_before_yesterday))
    worlds.run(SIZE, SAVE_4)
    assert [path.name for path in left_behind(worlds)] == ["notes.txt"]


SAVE_4 = """
with open_run(here.root) as ckpt:
    here.save(ckpt, small(4), 4)
"""


def left_behind(worlds: Worlds) -> list[Path]:
    """What lies in the folders of steps, and is of no commit."""
    found = []
    for step in open_run(worlds.root).steps():
        named = {"manifest.json", *run_of(worlds.root).manifest(step).own_names}
        folder = worlds.root / f"step_{step:08d}"
        found += [path for path in folder.rglob("*") if not path.is_dir() and path.name not in named]
        found += [path for path in folder.iterdir() if path.is_dir()]
    return found


def test_archives_of_other_machines_are_not_swept_though_their_locks_are_not_seen(worlds):
    """Rank 0 sweeps at its first save, when rank 1 is done already."""
    script = """
    if here.rank == 1:
        import fcntl
        fcntl.lockf = lambda *_: None
    with open_run(here.root) as ckpt:
        if here.rank == 0:
            here.at("sweep", here.wait_for_others)
        here.save(ckpt, small(1), 1)
    """
    for one in worlds.run(2, script):
        assert one.saves[0].get("status") == "committed", one.saves
    assert torch.equal(saved(worlds.root, 1).tensors["model.cut"], numbered(41, 3) + 1)


@pytest.mark.parametrize("who", [0, 1])
def test_a_rank_that_dies_in_the_first_save_is_missed_and_the_next_start_begins_anew(worlds, who):
    """Rank 0 before it could say anything; another when all others wait for how its state looks."""
    script = f"""
    state = small(1)
    with open_run(here.root) as ckpt:
        if here.rank == {who}:
            here.at("capture", here.die)
        here.expire(lambda: here.is_said("dead{who}"))
        here.save(ckpt, state, 1)
    """
    for rank, one in enumerate(worlds.run(2, script, killed={who})):
        for save in one.saves:
            assert rank != who
            assert (save["error"], save["rank"]) == ("PeerFailedError", who)
    for one in worlds.run(2, AGAIN):
        assert [save.get("status") for save in one.saves] == ["committed"] * 3


def test_the_others_go_on_to_hear_when_the_store_of_the_group_dies_with_rank_0(worlds):
    """As without torchrun's agent. Nothing is asked of it after the first save."""
    script = DYING.format(who=0, waiting=[], point="after manifest", die="here.die")
    told = second(worlds.run(SIZE, script, killed={0}, store_at_rank_0=True), dead=0)

    assert [one.get("status") for one in told] == ["committed"] * 2
