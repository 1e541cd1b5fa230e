"""Several ranks save one state together: real processes with gloo, and torch's own word for what the full tensors are."""

from __future__ import annotations

import sys

import pytest
import torch
from rank_oracle import saved
from states import difference, open_run

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks as Linux has them")

ONCE = """
state = {make}
keep_full(state, here.root + ".pt")
with open_run(here.root) as ckpt:
    here.save(ckpt, state, 1)
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
