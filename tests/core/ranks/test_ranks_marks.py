"""Marks where several ranks save: rank 0 puts and reads them, and the values of each rank are checked."""

from pathlib import Path

from states import open_run

MARKS = """
with open_run(here.root) as ckpt:
    for step in (1, 2, 3):
        here.save(ckpt, small(step), step)
    ckpt.mark(3, "bad", note="spike")  # on each rank, as a training loop calls it
    if here.rank == 0:
        ckpt.mark(1, "good")
"""
RESTORE = """
import warnings
warnings.simplefilter("ignore")
state = small(0)
with open_run(here.root) as ckpt:
    try:
        here.tell([ckpt.restore(state, {how}), state["step"]])
        {then}
    except Exception as error:
        here.tell([type(error).__name__, str(error)])
"""


def marks_of(root: Path) -> dict[int, tuple[str, str]]:
    with open_run(root) as ckpt:
        return ckpt.marks()


def test_all_ranks_pass_over_the_step_that_rank_0_finds_to_be_bad_and_go_on_below_it(worlds):
    worlds.run(2, MARKS)
    assert marks_of(worlds.root) == {1: ("good", ""), 3: ("bad", "spike")}
    assert len([*worlds.root.glob("mark-3.*")]) == 1

    ended = worlds.run(3, RESTORE.format(how="marked='good'", then=""))
    assert [one.told for one in ended] == [[[1, 1]]] * 3

    ended = worlds.run(3, RESTORE.format(how="fallback=True", then="here.save(ckpt, small(30), 3)"))
    assert [one.told[0] for one in ended] == [[2, 2]] * 3
    assert [one.told[1]["status"] for one in ended] == ["committed"] * 3
    assert marks_of(worlds.root) == {1: ("good", "")}


def test_a_world_does_not_begin_anew_where_all_steps_are_bad(worlds):
    worlds.run(2, MARKS)
    with open_run(worlds.root) as ckpt:
        for step in (1, 2):
            ckpt.mark(step, "bad")

    ended = worlds.run(2, RESTORE.format(how="", then=""))

    for one in ended:
        name, text = one.told[0]
        assert name == "NoGoodStepError"
        assert "step 3: it is marked bad: spike" in text


CHECKED = """
from async_ckpt import NonFinite
with open_run(here.root, check=NonFinite()) as ckpt:
    for step in (1, 2):
        state = small(step)
        if step == 2 and here.rank in {ranks}:
            state["own"] = {{"w": torch.full((4,), float("nan"))}}
        else:
            state["own"] = {{"w": torch.ones(4)}}
        here.save(ckpt, state, step, per_rank=["own"])
"""


def test_the_values_of_each_rank_are_checked_and_the_note_says_on_which_ranks_they_are_bad(worlds):
    worlds.run(3, CHECKED.format(ranks=[1, 2]))

    found = "NaN or Inf in own.w"
    assert marks_of(worlds.root) == {2: ("bad", f"rank 1: {found}; rank 2: {found}")}
