"""DeepSpeed's Mixture-of-Experts, whose ranks number their experts from 0, goes on with another number of ranks."""

from __future__ import annotations

import pytest

pytest.importorskip("deepspeed", reason="deepspeed is not installed")

WARM = ("deepspeed_runs",)

MODEL = """
import contextlib, re
from deepspeed_runs import deepspeed
from deepspeed.moe.layer import MoE
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict

options = StateDictOptions(flatten_optimizer_state_dict=True)
deepspeed.init_distributed("gloo", dist_init_required=False)

def numbered(state, first):
    return {
        re.sub(r"deepspeed_experts\\.(\\d+)", lambda at: f"deepspeed_experts.{int(at[1]) + first}", name): value
        for name, value in state.items()
    }

def training(steps):
    torch.manual_seed(0)
    model = torch.nn.Sequential(MoE(8, torch.nn.Linear(8, 8), num_experts=4, ep_size=here.size, min_capacity=16, use_rts=False))
    with contextlib.redirect_stdout(None):  # it says that it makes a group
        model[0].set_deepspeed_parallelism()
    first = here.rank * 4 // here.size
    local = model[0].deepspeed_moe.experts.deepspeed_experts
    for number, expert in enumerate(local, first):
        torch.manual_seed(10 + number)
        torch.nn.init.normal_(expert.weight)
        torch.nn.init.constant_(expert.bias, number)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for number in range(steps):
        step(model, optimizer, number)
    return model, optimizer, first

def step(model, optimizer, number):
    # Gradients that are alike however the experts lie; the forward pass is compared below.
    for name, parameter in model.named_parameters():
        parameter.grad = torch.full_like(parameter, 0.1 * (number + 1))
    optimizer.step()

def output(model):
    with torch.no_grad():
        return model[0](torch.randn(16, 8, generator=torch.Generator().manual_seed(3)))[0].tolist()

def state_of(model, optimizer, first):
    moments = get_optimizer_state_dict(model, optimizer, options=options)
    return {"model": numbered(model.state_dict(), first), "optimizer": numbered(moments, first)}
"""


@pytest.mark.parametrize("size", [1, 4])
def test_its_experts_and_their_moments_go_on_by_their_global_numbers(worlds, size):
    saved = worlds.run(
        2,
        MODEL
        + """
model, optimizer, first = training(2)
with open_run(here.root) as ckpt:
    here.save(ckpt, state_of(model, optimizer, first), 1)
here.tell(output(model))
step(model, optimizer, 2)
here.tell(output(model))
""",
    )
    ended = worlds.run(
        size,
        MODEL
        + """
model, optimizer, first = training(0)
state = state_of(model, optimizer, first)
with open_run(here.root) as ckpt:
    ckpt.restore(state)
set_optimizer_state_dict(model, optimizer, numbered(state["optimizer"], -first), options=options)
here.tell(output(model))
step(model, optimizer, 2)
here.tell(output(model))
""",
    )
    for one in ended:
        for got, want in zip(one.told[-2:], saved[0].told[-2:], strict=True):
            assert got == [pytest.approx(row, rel=1e-5, abs=1e-6) for row in want]
