"""Random plans of right, wrong, missed and repeated calls of ranks: nobody contradicts another, and the next call works."""

import random

import pytest
import slices

_STEPS = 6
_PLANS_OF_A_WORLD = 10
_WORLDS = 50

# What a rank does at a step, and how often.
_KINDS = {"right": 14, "missed": 2, "option": 1, "state": 1, "step": 1, "twice": 1}

PLAY = """
import async_ckpt

class Raises:
    def state_dict(self):
        raise OSError("it cannot be read")
    def load_state_dict(self, state):
        raise AssertionError("nothing is loaded")

def outcome_of(call):
    try:
        call().result(120.0)
    except Exception as error:
        return "undecided" if getattr(error, "undecided", False) else f"{{type(error).__name__}}: {{error}}"
    return "committed"

cut = spread(40, 3)  # here: a mesh of ranks is made by all of them together
for number, plan in {plans!r}.items():
    ckpt = async_ckpt.AsyncCheckpointer(f"{{here.root}}/{{number}}")
    outcomes = []
    for step, kinds in enumerate(plan, start=1):
        kind, state = kinds[here.rank], {{"model": {{"cut": cut}}, "step": step}}
        calls = {{
            "right": [lambda: ckpt.save(state, step)],
            "missed": [],
            "option": [lambda: ckpt.save(state, step, per_rank=["absent"])],
            "state": [lambda: ckpt.save({{**state, "odd": Raises()}}, step)],
            "step": [lambda: ckpt.save(state, "none")],
            "twice": [lambda: ckpt.save(state, step)] * 2,
        }}[kind]
        outcomes.append([outcome_of(call) for call in calls])
    here.tell(outcomes)
    ckpt.close()
"""


def plan_of(seed: int, size: int) -> list[list[str]]:
    """What each rank does at each step; the last step is right on all."""
    drawn = random.Random(seed)
    steps = [drawn.choices([*_KINDS], [*_KINDS.values()], k=size) for _ in range(_STEPS - 1)]
    return [*steps, ["right"] * size]


def wrong_in(plan: list[list[str]], outcomes: list[list[list[str]]], committed: set[str]) -> list[str]:
    """What breaks a promise; `outcomes` are those of each rank."""
    wrong, num_free = [], 0
    for number, kinds in enumerate(plan):
        said = [one[number] for one in outcomes]
        first = {calls[0].partition(":")[0] for calls in said if calls}
        is_wrong = not set(kinds) <= {"right", "twice"}
        if "committed" in first and (is_wrong or first - {"committed", "undecided"}):
            wrong.append(f"step {number + 1}: {said}")
        # A call without a step, which no other rank makes, is whichever comes next, and costs that.
        num_free += kinds.count("step")
        if set(kinds) == {"right"} and first != {"committed"}:
            num_free -= 1
            if num_free < 0:
                wrong.append(f"step {number + 1} was right on all: {said}")
        is_there = f"step_{number + 1:08d}" in committed
        if ("committed" in first) and not is_there:
            wrong.append(f"step {number + 1} is told of, and not there: {said}")
    return wrong


@pytest.mark.parametrize("world", slices.some(range(_WORLDS), 49))
def test_no_plan_of_calls_has_ranks_contradict_each_other_or_costs_more_than_its_wrong_calls(worlds, world):
    size = 2 + world % 2
    plans = {n: plan_of(world * _PLANS_OF_A_WORLD + n, size) for n in range(_PLANS_OF_A_WORLD)}
    ended = worlds.run(size, PLAY.format(plans=plans))

    for n, plan in plans.items():
        committed = {path.parent.name for path in (worlds.root / str(n)).glob("step_*/manifest.json")}
        found = wrong_in(plan, [one.told[n] for one in ended], committed)
        assert not found, (world, plan, found)
