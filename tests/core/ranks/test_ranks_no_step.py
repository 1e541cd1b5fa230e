"""`save` with something that is no step, on some ranks: the others learn it within seconds, and stay together."""

from typing import Any, NamedTuple

import pytest
import torch
from rank_oracle import saved
from rank_states import numbered
from rank_worlds import Ended, Worlds
from states import open_run

SIZE = 3


class Call(NamedTuple):
    """One call of all ranks."""

    step: int
    without_step: list[int]  # these ranks

    def told(self, rank: int) -> str:
        if rank in self.without_step:
            return "ValueError"
        return "PeerFailedError" if self.without_step else "committed"


PLAN = """
plan, wrong = {plan}, {wrong!r}
with open_run(here.root, max_in_flight={most}) as ckpt:
    for number, (step, without_step) in enumerate(plan):
        here.save(ckpt, small(number), wrong if here.rank in without_step else step, overwrite=True)
"""


def assert_goes_as_planned(worlds: Worlds, plan: list[Call], *, wrong: Any, most: int) -> None:
    """Every rank is told what it should be, and what is committed last at a step is there, of one call."""
    ended = worlds.run(SIZE, PLAN.format(plan=[tuple(call) for call in plan], wrong=wrong, most=most))

    last: dict[int, int] = {}
    for number, call in enumerate(plan):
        outcomes = [outcome(one, number) for one in ended]
        assert outcomes == [call.told(rank) for rank in range(SIZE)], (number, call)
        if outcomes == ["committed"] * SIZE:
            last[call.step] = number
    assert open_run(worlds.root).steps() == sorted(last)
    for step, number in last.items():
        assert torch.equal(saved(worlds.root, step).tensors["model.cut"], numbered(41, 3) + number)


def outcome(ended: Ended, number: int) -> str:
    """The error of a save, or its status."""
    told = ended.saves[number]
    assert not told.get("undecided"), told
    if "PeerFailedError" in (error := told.get("error", "")):
        assert "step must be" in told["text"] or "UnsupportedStateError" in told["text"]
    return error or told["status"]


@pytest.mark.parametrize(
    ("ranks", "first", "wrong", "most"),
    [([0], 0, -1, 1), ([0], 1, None, 2), ([1], 0, 2**63, 2), ([1], 1, "1", 1), ([0, 1, 2], 1, -1, 1)],
)
def test_all_ranks_are_told_and_the_next_save_commits_at_the_same_step_too(worlds, ranks, first, wrong, most):
    """In the first save, too, in which ranks have not met yet."""
    plan = [Call(step, []) for step in range(4)]
    plan.insert(first, Call(first, ranks))

    assert_goes_as_planned(worlds, plan, wrong=wrong, most=most)


ENDING = """
with open_run(here.root) as ckpt:
    here.save(ckpt, small(1), 1)
    state = dict(small(2))
    if here.rank == 1:
        state["lost"] = torch.empty(3, device="meta")
    here.save(ckpt, state, None if here.rank == 0 else 2)
    here.save(ckpt, small(3), None if here.rank == 1 else 3)
"""


def test_a_rank_that_ends_after_a_call_that_raised_is_not_waited_for(worlds):
    ended = worlds.run(SIZE, ENDING)

    assert [outcome(one, 1) for one in ended] == ["ValueError", "UnsupportedStateError", "PeerFailedError"]
    assert [outcome(one, 2) for one in ended] == ["PeerFailedError", "ValueError", "PeerFailedError"]


SKIPPING = """
with open_run(here.root, on_overlap="skip") as ckpt:
    here.save(ckpt, small(0), None if here.rank == 1 else 0)
    here.save(ckpt, small(1), 1)
"""


def test_where_overlapping_saves_are_skipped_all_ranks_are_told_too(worlds):
    ended = worlds.run(SIZE, SKIPPING)

    assert [outcome(one, 0) for one in ended] == ["PeerFailedError", "ValueError", "PeerFailedError"]
    assert [outcome(one, -1) for one in ended] == ["committed"] * SIZE
