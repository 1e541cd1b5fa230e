"""Several ranks save one state together: real processes with gloo, and torch's own word for what the full tensors are."""

import pytest
import torch
from rank_oracle import saved
from rank_worlds import Worlds
from states import difference, open_run

import async_ckpt

ONCE = """
import random
before = random.getstate()
state = {make}
keep_full(state, here.root + ".pt")
with open_run(here.root) as ckpt:
    here.save(ckpt, state, 1)
assert random.getstate() == before  # its numbers are the training's
"""


@pytest.mark.parametrize(
    ("size", "make"),
    [(2, "fsdp()"), (4, "fsdp()"), (4, "hsdp(2)"), (4, "fsdp_tp(2)"), (6, "fsdp_tp(3)"), (2, "ddp(3000)")],
)
def test_what_is_saved_by_several_ranks_is_the_full_state_bit_for_bit(worlds, size, make):
    told = worlds.run(size, ONCE.format(make=make))

    assert [one.saves for one in told] == [[{"step": 1, "status": "committed"}]] * size
    found, want = saved(worlds.root, 1), torch.load(f"{worlds.root}.pt")
    assert difference(dict(sorted(found.tensors.items())), dict(sorted(want.items()))) is None
    assert [state["lr"] for state in found.states] == [0.01] * size
    assert open_run(worlds.root).steps() == [1]


def shares(worlds: Worlds, step: int) -> list[float]:
    """What each rank has written, beside the mean."""
    num_bytes = saved(worlds.root, step).num_bytes
    return [one * len(num_bytes) / sum(num_bytes) for one in num_bytes]


@pytest.mark.parametrize("make", ["ddp(60_000)", "hsdp(4, 60_000)"])
def test_what_all_ranks_hold_is_written_in_equal_shares(worlds, make):
    worlds.run(4, ONCE.format(make=make))

    assert max(shares(worlds, 1)) <= 1.1


# What a user does to a model, and what becomes of it when it is saved under FSDP2.
KINDS = {
    "frozen parameters": """
model = network()
for parameter in model[0].parameters():
    parameter.requires_grad_(False)
fully_shard(model)
state = trained(model)
""",
    "shared parameters": """
model = torch.nn.Sequential(torch.nn.Linear(5, 5), torch.nn.ReLU(), torch.nn.Linear(5, 5, bias=False))
model[2].weight = model[0].weight
fully_shard(model)
state = {"model": model, "lr": 0.01}
""",
    "parameters offloaded to the CPU": """
from torch.distributed.fsdp import CPUOffloadPolicy
state = trained(fully_shard(network(), offload_policy=CPUOffloadPolicy(pin_memory=False)))
""",
    "parameters made on meta": """
with torch.device("meta"):
    model = torch.nn.Sequential(torch.nn.Linear(13, 37), torch.nn.Linear(37, 5))
fully_shard(model)
model.to_empty(device="cpu")
for number, parameter in enumerate(model.parameters()):
    torch.nn.init.constant_(parameter, float(number))
state = trained(model)
""",
    "mixed precision": """
from torch.distributed.fsdp import MixedPrecisionPolicy
state = trained(fully_shard(network(), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)))
""",
    "more ranks than rows": """
state = {"model": {"few": spread(1, 7), "none": spread(0, 7), "all": numbered(2), "number": numbered()}, "lr": 0.01}
""",
    "cut along another dimension": """
state = {"model": {"columns": spread(5, 9, placements=(Shard(1),)), "whole": spread(5, 9, placements=(Replicate(),))}, "lr": 0.01}
""",
}


@pytest.mark.parametrize("kind", KINDS)
def test_any_kind_of_parameters_is_saved_whole(worlds, kind):
    code = KINDS[kind] + ONCE.replace("state = {make}\n", "")
    told = worlds.run(2, code)

    assert [one.saves for one in told] == [[{"step": 1, "status": "committed"}]] * 2
    found, want = saved(worlds.root, 1), torch.load(f"{worlds.root}.pt")
    assert difference(dict(sorted(found.tensors.items())), dict(sorted(want.items()))) is None


def test_what_is_still_on_meta_is_refused_by_name_on_all_ranks(worlds):
    script = """
    with torch.device("meta"):
        model = torch.nn.Sequential(torch.nn.Linear(13, 37))
    fully_shard(model)
    with open_run(here.root) as ckpt:
        here.save(ckpt, {"model": model}, 1)
    """
    for one in worlds.run(2, script):
        assert "model.0.weight" in one.saves[0]["text"]
    assert open_run(worlds.root).steps() == []


def test_the_history_has_one_event_for_all_ranks_with_the_slowest_and_the_median(worlds):
    worlds.run(4, ONCE.format(make="fsdp()"))

    event, _ = async_ckpt.history(worlds.root)

    assert (event["kind"], event["step"], event["world_size"]) == ("save", 1, 4)
    assert event["num_bytes"] >= sum(saved(worlds.root, 1).num_bytes)
    assert event["slowest_rank"] in range(4)
    assert event["most_stalled_rank"] in range(4)
    assert event["slowest_rank_seconds"] >= event["median_rank_seconds"] > 0
    assert event["most_stalled_rank_seconds"] >= event["median_rank_stall_seconds"] > 0
