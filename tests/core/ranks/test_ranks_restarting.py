"""Ranks that are started again hear nothing of the start before, and write nothing that was written then."""

from __future__ import annotations

import sys

import pytest
import torch
import torch.distributed as dist
from rank_oracle import saved
from rank_worlds import Worlds
from states import open_run

from async_ckpt.core.ranks.world import World

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks as Linux has them")

# When it is started again, rank 1 comes first, and looks for what rank 0 has said.
START = """
from racing import until
from async_ckpt.core.ranks import meeting

real = meeting.Wait.goes_on
meeting.Wait.goes_on = lambda self, what: (here.say("waits"), real(self, what))
with open_run(here.root) as ckpt:
    state = {{"whole": torch.zeros(300, 1000), "step": 0}}
    if here.rank == 0 and {is_again}:
        until(lambda: here.is_said("waits") or here.is_said("restored"))
    here.tell(ckpt.restore(state))
    here.say("restored")
    for step in {steps}:
        here.save(ckpt, {{"whole": torch.full((300, 1000), float(step)), "step": step}}, step)
"""


def test_ranks_that_an_agent_starts_again_hear_nothing_of_the_start_before(worlds: Worlds):
    first = worlds.start(2, START.format(is_again=False, steps=[1, 2]))
    first.ended()
    again = worlds.start(2, START.format(is_again=True, steps=[3]), after=first).ended()

    assert [one.told[0] for one in again] == [2, 2]
    assert [save.get("status") for one in again for save in one.saves] == ["committed"] * 2
    for step in (1, 2, 3):
        assert torch.equal(saved(worlds.root, step).tensors["whole"], torch.full((300, 1000), float(step)))


def _prefix(store: dist.Store, rank: int, size: int) -> str:
    """What this rank's words begin with, when its process is new."""
    return World(rank, size, store=dist.PrefixStore("", store)).words("it")._prefix


def test_each_start_of_a_world_has_words_of_its_own(monkeypatch):
    store = dist.HashStore()
    seen = set()
    # It grows and shrinks, and one process has several groups.
    for size in (2, 2, 3, 2, 3):
        (words,) = {_prefix(store, rank, size) for rank in reversed(range(size))}
        assert words not in seen
        seen.add(words)
    # The others were started, and rank 1 has failed before it could say anything.
    seen |= {_prefix(store, 0, 2), _prefix(store, 0, 2)}
    assert _prefix(store, 0, 2) == _prefix(store, 1, 2)
    # Again, and rank 1 comes first: it cannot know that, but learns it when rank 0 is there.
    _prefix(store, 0, 2)
    early = World(1, 2, store=dist.PrefixStore("", store))
    assert not early.is_over()
    now = _prefix(store, 0, 2)
    assert early.words("it")._prefix != now
    assert early.is_over()
    assert early.is_over()
    assert _prefix(store, 1, 2) == _prefix(store, 0, 2) != now
    # A rank that starts again alone does not take words of the others for its own.
    assert _prefix(store, 1, 2) not in {*seen, _prefix(store, 0, 3)}

    # Where one agent starts all ranks, it counts, whoever has failed how early.
    monkeypatch.setenv("GROUP_WORLD_SIZE", "1")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    early = _prefix(store, 0, 2)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    assert _prefix(store, 1, 2) == _prefix(store, 0, 2) != early
    # Agents of several nodes do not count alike.
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    last = _prefix(store, 0, 3)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    assert _prefix(store, 1, 3) == last


def test_what_one_start_opens_is_numbered_anew():
    store = dist.PrefixStore("", dist.HashStore())
    world = World(0, 2, store=store)
    first, second = world.opening(), world.opening()
    assert first._prefix != second._prefix
    other = World(0, 2, store=dist.PrefixStore("", dist.HashStore()))
    assert other.opening()._prefix == first._prefix


# Each rank has values of its own, by which it is seen who has written them.
AGAIN = """
{before}
with open_run(here.root{options}) as ckpt:
    state = {{"whole": torch.full((300, 1000), {value}), "own": torch.full((300, 1000), {value} + here.rank)}}
    here.save(ckpt, state, 1, per_rank=["own"], overwrite=True)
"""
# As where a rank has heard an old one after all.
OLD_TOKEN = "from async_ckpt.core.ranks.meeting import Meeting; Meeting.token = lambda self: '0123456789abcdef'"


@pytest.mark.parametrize("has_group", [True, False])
def test_what_an_earlier_start_has_committed_is_not_written_again_under_the_same_names(worlds, has_group):
    options = "" if has_group else ", ranks=(here.rank, here.size), run_id='a'"
    before = OLD_TOKEN if has_group else ""
    told = []
    for value in (1.0, 7.0):
        script = AGAIN.format(before=before, options=options, value=value)
        told += [one.saves[0] for one in worlds.run(2, script, has_group=has_group)]

    assert [one.get("status") for one in told] == ["committed"] * 2 + [None] * 2
    assert [one.get("error") for one in told[2:]] == ["CheckpointError"] * 2
    with open_run(worlds.root) as ckpt:
        state = ckpt.load(1)
    assert torch.equal(state["whole"], torch.full((300, 1000), 1.0))
    for rank in (0, 1):
        assert torch.equal(state["own"][rank], torch.full((300, 1000), 1.0 + rank))


# One rank counts another number of them. Its error is there before rank 0 looks.
SIZES = """
sizes = {sizes}
with open_run(here.root, ranks=(here.rank, sizes[here.rank]), run_id="a") as ckpt:
    if here.rank == 0:
        here.at("receipt", lambda: here.hear("told"))
    here.at("after receipt", lambda: here.say("told") if here.rank == {odd} else None)
    here.save(ckpt, {{"whole": numbered(3)}}, 1)
"""


@pytest.mark.parametrize(("sizes", "odd"), [([2, 2, 3], 2), ([3, 2, 3], 1)])
def test_ranks_that_count_each_other_differently_commit_nothing(worlds: Worlds, sizes: list[int], odd: int):
    ended = worlds.run(3, SIZES.format(sizes=sizes, odd=odd), has_group=False)

    told = ended[odd].saves[0]
    assert told["error"] == "CheckpointError"
    assert f"rank 0 counts {sizes[0]} ranks and rank {odd} {sizes[odd]}; give ranks= the same" in told["text"]
    for rank, one in enumerate(ended):
        if rank != odd and rank < sizes[0]:
            assert (one.saves[0]["error"], one.saves[0]["undecided"]) == ("PeerFailedError", False)
            assert f"rank {odd}: CheckpointError" in one.saves[0]["text"]
    assert open_run(worlds.root).steps() == []


# A disk without locks, or a store: nothing tells the new world that the old one lives.
STALLED = """
from pathlib import Path
from racing import until
from async_ckpt.core.storage.local import LocalStorage
LocalStorage.hold = lambda *_: lambda: None
with open_run(here.root) as ckpt:
    for step in (1, 2):
        here.save(ckpt, small(step), step)
    if here.rank == 0:
        here.at("{point}", lambda: (here.say("stalled"), until(Path("{go}").exists)), step=10)
    here.save(ckpt, small(10), 10)
    here.save(ckpt, small(11), 11)
"""
NEW_WORLD = """
from async_ckpt.core.storage.local import LocalStorage
LocalStorage.hold = lambda *_: lambda: None
with open_run(here.root) as ckpt:
    state = small(0)
    here.tell(ckpt.restore(state))
    for step in (3, 4):
        here.save(ckpt, state, step)
    {then}
    for step in (5, 6):
        here.save(ckpt, state, step)
"""


# Rank 0 sleeps between its manifest and its look for later starts.
SLEEPS_AFTER_ITS_MANIFEST = """
from pathlib import Path
from racing import until
from async_ckpt.core.storage.local import LocalStorage
from async_ckpt.core.runs.run import Run
LocalStorage.hold = lambda *_: lambda: None
look = Run.look_again
def sleepy(self, manifest):
    if manifest.step == 10 and {who}:
        here.say(f"asleep{{here.rank}}")
        until(Path({go!r}).exists)
    look(self, manifest)
Run.look_again = sleepy
with open_run(here.root) as ckpt:
    for step in (1, 2):
        here.save(ckpt, small(step), step)
    here.save(ckpt, small(10), 10)
"""
SEES_OR_NOT = """
from async_ckpt.core.storage.local import LocalStorage
LocalStorage.hold = lambda *_: lambda: None
with open_run(here.root, on_rollback="retire") as ckpt:
    ckpt.restore(small(0), step={base})
    here.save(ckpt, small(3), {base} + 1, **({{"overwrite": True}} if {base} == 1 else {{}}))
"""


@pytest.mark.parametrize("base", [1, 2, 10])
@pytest.mark.parametrize("who", ["here.rank == 0", "here.rank == 1", "True"])
def test_no_two_ranks_contradict_each_other_where_a_new_world_comes_after_the_manifest(worlds, tmp_path, who, base):
    go = tmp_path / "go"
    old = worlds.start(2, SLEEPS_AFTER_ITS_MANIFEST.format(who=who, go=str(go)))
    for rank in (0, 1) if who == "True" else (int(who[-1]),):
        old.wait_for(f"asleep{rank}")
    new = worlds.run(2, SEES_OR_NOT.format(base=base))
    go.touch()
    ended = old.ended()

    assert [save.get("status") for one in new for save in one.saves] == ["committed"] * 2
    assert [one.saves[2].get("status") for one in ended] == ["committed"] * 2  # the new world has seen the step


@pytest.mark.parametrize("point", ["receipt", "manifest"])
def test_a_world_that_wakes_after_another_has_gone_on_commits_nothing_that_counts(worlds, tmp_path, point):
    go, woken = tmp_path / "go", tmp_path / "woken"
    old = worlds.start(2, STALLED.format(point=point, go=go))
    old.wait_for("stalled")
    waits = "from pathlib import Path; from racing import until; here.meet('half'); here.say('half'); "
    new = worlds.start(2, NEW_WORLD.format(then=waits + f"until(Path({str(woken)!r}).exists)"))
    new.wait_for("half")
    go.touch()
    ended = old.ended()
    woken.touch()

    assert [save.get("status") for one in new.ended() for save in one.saves] == ["committed"] * 8
    assert ended[0].saves[2]["error"] == "RunTakenError"
    assert f"process {new.children[0].pid} on" in ended[0].saves[2]["text"]
    assert ended[0].saves[3]["error"] == "RunTakenError"
    if point == "receipt":  # else the other rank may have seen the manifest
        assert ended[1].saves[2]["error"] == "PeerFailedError"
        assert "rank 0: RunTakenError" in ended[1].saves[2]["text"]
    with open_run(worlds.root) as ckpt:
        assert ckpt.steps() == [1, 2, 3, 4, 5, 6]
