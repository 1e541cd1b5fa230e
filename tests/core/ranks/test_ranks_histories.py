"""Histories and generators that each rank has for itself: `restore` fills them on the rank that saved them."""

import pytest

# The same loop in each start of the training; only rank 0 keeps a history of all steps.
LOOP = """
import random
from collections import Counter, defaultdict
import numpy

def made():
    return {{
        "model": {{"w": torch.zeros(3)}},
        "by_step": {{}}, "by_name": defaultdict(list), "seen": set(), "lines": [], "each": Counter(),
        "torch": torch.Generator().manual_seed(here.rank), "numpy": numpy.random.default_rng([5, here.rank]),
        "python": random.Random(here.rank), "alike": torch.Generator().manual_seed(9),
    }}

state = made()
kept = dict(state)
with open_run(here.root) as ckpt:
    start = ckpt.restore(state{options})
    for step in range(0 if start is None else start + 1, {until}):
        if here.rank == 0:
            state["by_step"][step] = step / 2
            state["by_name"]["loss"].append(step)
            state["seen"].add(step)
            state["lines"].append({{"step": step}})
        state["each"][here.rank] += 1
        state["model"]["w"] += 1
        here.drawn = [
            torch.rand(1, generator=state["torch"]).item(), state["numpy"].random(), state["python"].random(),
            torch.rand(1, generator=state["alike"]).item(),
        ]
        here.save(ckpt, state, step, per_rank=["by_step", "by_name", "lines", "each"])
here.tell(["same", all(state[name] is kept[name] for name in kept)])
here.tell(["history", [[*state["by_step"]], state["by_name"].get("loss", []), sorted(state["seen"]),
    [line["step"] for line in state["lines"]], dict(state["each"])]])
here.tell(["drawn", here.drawn])
"""


def told(ended, word):
    return [next(line[1] for line in one.told if isinstance(line, list) and line[0] == word) for one in ended]


@pytest.mark.parametrize("options", ["", ", broadcast=dist.group.WORLD"], ids=["alone", "broadcast"])
def test_each_rank_goes_on_with_its_own_history_and_its_own_generators(worlds, options):
    whole = worlds.run(2, LOOP.format(until=4, options=""), root=worlds.root.with_name("whole"))
    worlds.run(2, LOOP.format(until=2, options=options))
    resumed = worlds.run(2, LOOP.format(until=4, options=options))

    assert all(save["status"] == "committed" for one in resumed for save in one.saves)
    assert told(resumed, "same") == [True, True]
    steps = [0, 1, 2, 3]
    assert told(resumed, "history") == [[steps, steps, steps, steps, {"0": 4}], [[], [], [], [], {"1": 4}]]
    assert told(resumed, "drawn") == told(whole, "drawn")
