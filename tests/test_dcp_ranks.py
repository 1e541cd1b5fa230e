"""torch.distributed.checkpoint with our writer and reader, on real ranks with gloo."""

from __future__ import annotations

import sys

import pytest
import torch
from states import difference

import async_ckpt

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks as Linux has them")

PRELUDE = """
from dcp_states import *
"""
SAVE = (
    PRELUDE
    + """
state = {make}
model, optimizer = state["model"], state["optimizer"]
taken, states = get_state_dict(model, optimizer)
state = {{"model": taken, "optim": states, "rank": "shared"}}
keep_full(state, here.root + ".pt")
save(state, here.root + "/step_00000001")
"""
)
LOAD = (
    PRELUDE
    + """
state = {make}
model, optimizer = state["model"], state["optimizer"]
with torch.no_grad():
    for parameter in model.parameters():
        parameter.zero_()
taken, states = get_state_dict(model, optimizer)
state = {{"model": taken, "optim": states, "rank": ""}}
load(state, here.root + "/step_00000001")
keep_full(state, here.root + ".loaded.pt")
here.tell(state["rank"])
"""
)


def kept(worlds, name):
    return dict(sorted(torch.load(f"{worlds.root}{name}").items()))


def flat(state, path=()):
    if isinstance(state, torch.Tensor):
        return {".".join(path): state}
    items = state.items() if isinstance(state, dict) else enumerate(state) if isinstance(state, list) else ()
    return {name: t for key, inner in items for name, t in flat(inner, (*path, str(key))).items()}


@pytest.mark.parametrize(
    ("before", "make", "after", "other"),
    [
        (2, "fsdp()", 3, "fsdp()"),
        (4, "hsdp(2)", 2, "fsdp()"),
        (4, "fsdp_tp(2)", 2, "fsdp()"),
        (2, "fsdp()", 4, "fsdp_tp(2)"),
    ],
)
def test_what_ranks_save_is_one_step_that_other_ranks_load_in_another_layout(
    worlds, before, make, after, other
):
    worlds.run(
        before, SAVE.format(make=make.replace("fsdp()", "fsdp(width=14)").replace("hsdp(2)", "hsdp(2, 14)"))
    )

    want = kept(worlds, ".pt")
    found = async_ckpt.load(f"{worlds.root}/step_00000001")
    assert difference(dict(sorted(flat(found).items())), want) is None
    assert found["rank"] == "shared"
    assert async_ckpt.verify(f"{worlds.root}/step_00000001").num_archives == before
    told = worlds.run(after, LOAD.format(make=other.replace("fsdp()", "fsdp(width=14)")))
    assert [one.told for one in told] == [["shared"]] * after
    assert difference(kept(worlds, ".loaded.pt"), want) is None
