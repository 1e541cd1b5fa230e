"""Ranks without a process group that bring a store of torch.distributed: they agree by it as those of a group do."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from rank_oracle import saved
from rank_states import numbered
from rank_worlds import AGENT_STORE
from states import open_run

from async_ckpt import PeerFailedError
from async_ckpt.core.ranks import meeting
from async_ckpt.core.ranks.meeting import Meeting
from async_ckpt.core.ranks.store import Connection, Messages

STORES = {
    "TCPStore": AGENT_STORE,
    "PrefixStore": "dist.PrefixStore('of saves', {TCPStore})",
    "FileStore": "dist.FileStore({file!r}, here.size)",
}

_SAVES = """
from async_ckpt import Due
store = {store}
state = {{"whole": numbered(300, 1000), "own": {{"rank": -1}}}}
with open_run(here.root, ranks=(here.rank, here.size), store=store, on_overlap="skip", due=Due(seconds=1e-9)) as ckpt:
    ckpt.prewarm(state, per_rank=["own"])
    start = ckpt.restore(state)
    here.tell([start, state["own"]["rank"]])
    for step in ({steps}):
        state["whole"], state["own"] = numbered(300, 1000) + step, {{"rank": here.rank}}
        here.meet(f"step {{step}}")
        here.tell(ckpt.should_save(step))
        here.save(ckpt, state, step, per_rank=["own"])
here.meet("saved")  # before the store goes with a rank
"""


def script(kind: str, file: Path, steps: str) -> str:
    store = STORES[kind].format(file=str(file), TCPStore=STORES["TCPStore"])
    return _SAVES.format(store=store, steps=steps)


@pytest.mark.parametrize("kind", STORES)
def test_ranks_with_a_store_share_the_work_agree_on_a_step_and_start_again(worlds, tmp_path, kind):
    """The store outlives the first start, and has its words: none of them is taken for one of the second."""
    first = worlds.start(2, script(kind, tmp_path / "store", "1, 2"), has_group=False)
    ended = first.ended()
    again = worlds.run(2, script(kind, tmp_path / "store", "3,"), has_group=False, after=first)

    for rank, (one, other) in enumerate(zip(ended, again, strict=True)):
        assert [save["status"] for save in (*one.saves, *other.saves)] == ["committed"] * 3
        assert one.told[:2] == [[None, -1], True]
        assert other.told[:2] == [[2, rank], True]
    assert sum(saved(worlds.root, 1).num_bytes) == 300 * 1000 * 4  # each has written a share, as they met before
    assert torch.equal(saved(worlds.root, 3).tensors["whole"], numbered(300, 1000) + 3)
    assert open_run(worlds.root).steps() == [1, 2, 3]


def test_a_rank_that_fails_in_its_call_is_told_to_the_others_by_the_store(worlds):
    body = f"""
    with open_run(here.root, ranks=(here.rank, here.size), store={STORES["TCPStore"]}) as ckpt:
        here.save(ckpt, {{"whole": numbered(3)}}, None if here.rank else 1)
        here.save(ckpt, {{"whole": numbered(3)}}, 2)
    here.meet("saved")
    """
    first, second = worlds.run(2, body, has_group=False)

    assert (first.saves[0]["error"], second.saves[0]["error"]) == ("PeerFailedError", "ValueError")
    assert [one.saves[1]["status"] for one in (first, second)] == ["committed"] * 2


def test_worlds_below_prefixes_of_one_store_do_not_mix(worlds):
    """Ranks of the same numbers, at one time."""
    body = """
    store = dist.PrefixStore("{name}", {tcp})
    with open_run(here.root + "/{name}", ranks=(here.rank, here.size), store=store) as ckpt:
        here.say(f"began{{here.rank}}")
        here.hear("go")
        for step in (1, 2, 3):
            here.save(ckpt, {{"whole": numbered(300, 1000) + {add}}}, step)
    here.meet("saved")
    """
    tcp = STORES["TCPStore"]
    first = worlds.start(2, body.format(name="a", tcp=tcp, add=1), has_group=False)
    second = worlds.start(2, body.format(name="b", tcp=tcp, add=2), has_group=False, after=first)
    for world in (first, second):
        world.wait_for("began0")
        world.wait_for("began1")
    for world in (first, second):
        world.say("go")

    for world in (first, second):
        assert [save.get("status") for one in world.ended() for save in one.saves] == ["committed"] * 6
    for name, add in (("a", 1), ("b", 2)):
        assert torch.equal(saved(worlds.root / name, 3).tensors["whole"], numbered(300, 1000) + add)


def test_a_store_keeps_the_answers_about_the_newest_steps_alone(monkeypatch):
    """A training asks at every step, about some steps twice, and the store is memory of rank 0's process. A rank that
    has not asked for long goes on from there.
    """
    monkeypatch.setattr(meeting, "_KEPT", 2)
    store = dist.HashStore()
    messages = Messages(Connection(store), "start")
    first, second, third = (Meeting((rank, 3), store=store) for rank in range(3))
    for one in (first, second, third):
        monkeypatch.setattr(one, "messages", lambda: messages)
        monkeypatch.setattr(one, "receive", lambda keys, *_: messages.receive(keys, lambda _: None))
    for step in (1, 2, 2, 3, 4):
        answer = first.answer_of_rank_0("due", step, lambda: [True, False])
        assert second.answer_of_rank_0("due", step, list) == answer == [True, False]

    said = [f"answer/{number}" for number in range(6)]
    assert [key for key in said if key not in messages.missing(said)] == ["answer/3", "answer/4"]
    assert third.answer_of_rank_0("due", 4, list) == [True, False]


def test_an_answer_is_that_about_the_same_step_whatever_calls_a_rank_has_missed_or_made_alone(monkeypatch):
    store = dist.HashStore()
    messages = Messages(Connection(store), "start")
    first, second = (Meeting((rank, 2), store=store) for rank in range(2))
    for one in (first, second):
        monkeypatch.setattr(one, "messages", lambda: messages)
    for step in (1, 2, 3):
        first.answer_of_rank_0("due", step, lambda step=step: [step])
    assert second.answer_of_rank_0("due", 2, list) == [2]  # 1 was missed
    with pytest.raises(PeerFailedError, match="rank 0 asks about step 3, this rank about 2"):
        second.answer_of_rank_0("due", 2, list)  # made twice
    assert second.answer_of_rank_0("due", 3, list) == [3]
    first.answer_of_rank_0("due", 1, lambda: [1])  # after a rollback
    assert second.answer_of_rank_0("due", 1, list) == [1]


def test_a_restore_that_rank_0_never_answers_waits_for_it_once(monkeypatch):
    waits: list[str] = []

    def gives_up(start, future, what, *_):
        waits.append(what)
        raise PeerFailedError("waited", rank=0)

    monkeypatch.setattr(meeting, "wait_for_rank_0", gives_up)
    store = dist.HashStore()
    second = Meeting((1, 2), store=store)
    with pytest.raises(PeerFailedError), second.restoring(talks=True):
        second.talk()
    assert waits == ["the first save or restore of rank 0"]
