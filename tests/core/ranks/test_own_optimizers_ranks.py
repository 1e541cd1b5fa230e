"""Optimizers with state dicts of their own on real ranks: under FSDP2, over tensor parallelism, and in stages of a pipeline."""

import pytest
import torch
from states import difference

SAVE = """
from contained_ranks import *
state = {make}
keep(state, here.root + ".saved")
with open_run(here.root) as ckpt:
    here.save(ckpt, state, 1)
"""
RESTORE = """
from contained_ranks import *
state = {make}
with open_run(here.root) as ckpt:
    here.tell(ckpt.restore(state))
keep(state, here.root + ".restored")
model_of(state)(torch.ones(4, 13)).square().sum().backward()
state["optimizer"].step()  # it goes on
"""
LAYOUTS = {
    "as they were": (
        4,
        "contained(fsdp_tp(2), several=True)",
        4,
        "contained(fsdp_tp(2), several=True, steps=2)",
    ),
    "FSDP2 over TP to FSDP2": (4, "contained(fsdp_tp(2))", 3, "contained(fsdp(width=14))"),
    "FSDP2 to one": (2, "contained(fsdp())", 1, "contained(trained(network()), steps=0)"),
    "fresh, without state": (2, "contained(fsdp())", 2, "contained(fsdp(), Lazy, steps=0)"),
    "fresh, wrapped": (2, "fsdp()", 2, "contained(fsdp(), Wrapper, steps=0)"),
    "from numbers": (2, "fsdp()", 2, "contained(fsdp(), Lazy, steps=0)"),
    "to numbers": (2, "contained(fsdp(), Lazy)", 2, "{n: x for n, x in fsdp().items() if n != 'lr'}"),
}


@pytest.mark.parametrize("layouts", LAYOUTS)
def test_a_container_goes_on_in_another_layout(worlds, layouts):
    size, make, new_size, new_make = LAYOUTS[layouts]
    worlds.run(size, SAVE.format(make=make))

    assert worlds.told(new_size, RESTORE.format(make=new_make)) == [[1]] * new_size
    saved, restored = (torch.load(f"{worlds.root}.{name}") for name in ("saved", "restored"))
    assert difference(dict(sorted(restored.items())), dict(sorted(saved.items()))) is None
    assert any("exp_avg" in name for name in saved)


SAVE_STAGES = """
from contained_ranks import *
with open_run(here.root) as ckpt:
    here.save(ckpt, stages((here.rank, here.rank + 2), 0, {kind}), 1)
"""
RESTORE_STAGES = """
from contained_ranks import *
own = {own}
state, want = stages(own, 1, {kind}), told(stages(own, 0, {kind}))
with open_run(here.root) as ckpt:
    ckpt.restore(state)
found = told(state)
here.tell([name for name in want if found[name] != want[name]])
"""


@pytest.mark.parametrize(
    ("size", "own", "kind"),
    [
        (2, "(here.rank, here.rank + 2)", None),
        (2, "(2 * here.rank, 2 * here.rank + 1)", None),
        (2, "(2 * here.rank, 2 * here.rank + 1)", "sgd"),
        (1, "(0, 1, 2, 3)", None),
        (4, "(here.rank,)", None),
    ],
)
def test_stages_of_a_pipeline_take_their_own_of_what_others_have_saved(worlds, size, own, kind):
    worlds.run(2, SAVE_STAGES.format(kind=kind))
    assert worlds.told(size, RESTORE_STAGES.format(own=own, kind=kind)) == [[[]]] * size
