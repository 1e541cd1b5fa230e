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


_ROUNDS = 6
# What a rank does in a round, and how often.
_RESTORES = {"right": 8, "missed": 2, "wrong": 1, "Ctrl-C": 1, "twice": 1}

RESTORE = """
import signal
from async_ckpt.core.ranks import meeting

meeting.PEER_CALL_SECONDS = 2.0

def interrupted():
    receive = ckpt._ranks.meeting.receive
    def call(*arguments, **options):
        signal.raise_signal(signal.SIGINT)
        return receive(*arguments, **options)
    ckpt._ranks.meeting.receive = call
    try:
        return ckpt.restore(target)
    finally:
        ckpt._ranks.meeting.receive = receive

def outcome_of(call):
    try:
        return call()
    except (Exception, KeyboardInterrupt) as error:
        return f"{{type(error).__name__}}: {{error}}"

target = small(0)
with open_run(here.root) as ckpt:
    for step, kinds in enumerate({plan!r}, start=1):
        here.save(ckpt, small(step), step)
        here.meet(f"before{{step}}")
        calls = {{
            "right": [lambda: ckpt.restore(target)],
            "missed": [],
            "wrong": [lambda: ckpt.restore(target, strict=3)],
            "Ctrl-C": [interrupted],
            "twice": [lambda: ckpt.restore(target)] * 2,
        }}[kinds[here.rank]]
        here.tell([outcome_of(call) for call in calls])
        here.meet(f"after{{step}}")
"""


@pytest.mark.parametrize("seed", slices.some(range(60), 57))
def test_in_no_plan_of_restores_does_a_rank_get_an_older_step_and_each_wrong_round_costs_at_most_one_more(worlds, seed):
    size, drawn = 2 + seed % 2, random.Random(seed)
    plan = [drawn.choices([*_RESTORES], [*_RESTORES.values()], k=size) for _ in range(_ROUNDS - 2)]
    plan += [["right"] * size] * 2
    told = [
        [line for line in one.told if isinstance(line, list)] for one in worlds.run(size, RESTORE.format(plan=plan))
    ]

    num_wrong = 0
    for step, (kinds, *outcomes) in enumerate(zip(plan, *told, strict=True), start=1):
        said = [outcome for calls in outcomes for outcome in calls]
        assert {outcome for outcome in said if isinstance(outcome, int)} <= {step}, (plan, told)
        if set(kinds) != {"right"}:
            num_wrong += 1
        elif set(said) != {step}:
            num_wrong -= 1
            assert num_wrong >= 0, (plan, told)
