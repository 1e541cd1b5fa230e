"""Runs that earlier code has written under torchtitan are loaded, and gone on with, by today's.

What is expected was told by torchtitan alone, before: see `tests/witnesses/make_frameworks.py`.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from rank_worlds import Worlds
from witnessed import LAST, TORCHTITAN, expected_of

import async_ckpt
from async_ckpt import AsyncCheckpointer, Naming

pytest.importorskip("torchtitan", reason="torchtitan is not installed")


WARM = ("titan_trainers", "witnessed")

_GO_ON = """
from titan_trainers import *
from witnessed import of_torchtitan
def state_at(step):
    trainer = Trainer({run!r}, {layout!r}, seed=5, load_step=step)
    assert trainer.load()
    trainer.checkpointer.close()
    return of_torchtitan(trainer)
here.tell([state_at(2), state_at(-1)])
trainer = Trainer({run!r}, {layout!r}, seed=5)
here.tell({{step: float.fromhex(loss) for step, loss in trainer.train({last}).items()}})
here.tell(state_at(-1) == of_torchtitan(trainer))
"""


def go_on(worlds: Worlds, folder: Path, layout: str) -> None:
    """Load both steps, train from the newer one to the end, and load what is saved then."""
    script = _GO_ON.format(run=str(folder / "run"), layout=layout, last=LAST)
    expected = expected_of(folder)
    ends = worlds.run(TORCHTITAN[layout], script)
    for end, states, losses in zip(ends, expected.states, expected.losses_after(4), strict=True):
        found, trained, is_loaded_again = end.told
        assert found == [states["2"], states["4"]]
        assert trained == pytest.approx(losses, rel=1e-4)  # another processor may round otherwise
        assert is_loaded_again
    with AsyncCheckpointer(folder / "run" / "checkpoint", naming=Naming("step-{}")) as ckpt:
        assert ckpt.steps() == [2, 4, LAST]
    for step in (2, 4, LAST):
        assert async_ckpt.verify(folder / "run" / "checkpoint" / f"step-{step}").num_bytes > 0


@pytest.mark.parametrize("layout", TORCHTITAN)
def test_a_training_goes_on_and_saves_beside_the_old_steps(worlds, witness, layout):
    go_on(worlds, witness(f"torchtitan_{layout}"), layout)


@pytest.mark.parametrize("layout", TORCHTITAN)
def test_a_training_goes_on_where_the_tracker_and_the_journal_were_lost(worlds, witness, layout):
    folder = witness(f"torchtitan_{layout}")
    for name in ("latest", "checkpoints.jsonl"):
        (folder / "run" / "checkpoint" / name).unlink()
    go_on(worlds, folder, layout)
    assert (folder / "run" / "checkpoint" / "latest").read_text().strip() == f"step-{LAST}"
    assert len((folder / "run" / "checkpoint" / "checkpoints.jsonl").read_text().splitlines()) == 3


_IN_OTHER_LAYOUT = """
from titan_trainers import *
from witnessed import of_torchtitan
trainer = Trainer({run!r}, {layout!r}, seed=5, exclude_from_loading=["dataloader"])
assert trainer.load()
here.tell(of_torchtitan(trainer))
"""


@pytest.mark.parametrize(
    ("layout", "size", "other"),
    [("fsdp", 1, "one"), ("fsdp", 3, "fsdp"), ("tp", 1, "one"), ("tp", 2, "fsdp"), ("one", 2, "tp"), ("pp", 1, "one")],
)
def test_other_layouts_of_ranks_load_the_same_state(worlds, witness, layout, size, other):
    folder = witness(f"torchtitan_{layout}")
    states = [one["4"] for one in expected_of(folder).states]
    want = {what: {name: digest for one in states for name, digest in one[what].items()} for what in states[0]}
    ends = worlds.run(size, _IN_OTHER_LAYOUT.format(run=str(folder / "run"), layout=other))
    assert [end.told for end in ends] == [[want]] * size
