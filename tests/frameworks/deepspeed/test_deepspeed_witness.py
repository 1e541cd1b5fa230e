"""Folders that earlier code has written under DeepSpeed are loaded, and gone on with, by today's.

What is expected was told by DeepSpeed alone, before: see `tests/witnesses/make_frameworks.py`.
"""

from __future__ import annotations

import pytest
from witnessed import LAST, expected_of

import async_ckpt

pytest.importorskip("deepspeed", reason="deepspeed is not installed: make test-frameworks")


WARM = ("deepspeed_runs", "witnessed")
# The layout of the folder, the stage of ZeRO, and the layout of the engine that goes on.
GOES_ON = [
    *(("own", stage, "deepspeed") for stage in range(4)),
    *(("own", stage, "archive") for stage in range(1, 4)),
    *(("archive", stage, layout) for stage in range(1, 4) for layout in ("archive", "deepspeed")),
]

_GO_ON = """
import contextlib, io
from deepspeed_runs import *
from witnessed import DEEPSPEED, of_deepspeed
def loaded(tag=None):
    training = Training({stage}, {layout!r}, **DEEPSPEED[{stage}])
    with contextlib.redirect_stdout(io.StringIO()):  # DeepSpeed prints there
        _, client_state = training.engine.load_checkpoint({run!r}, tag)
    assert client_state["step"] == training.step
    return training
here.tell([of_deepspeed(loaded("global_step2")), of_deepspeed(training := loaded())])
here.tell(training.train({last}, {run!r}))
training.checkpoints.wait()
dist.barrier()
here.tell(of_deepspeed(loaded()) == of_deepspeed(training))
"""


@pytest.mark.parametrize(("kind", "stage", "layout"), GOES_ON)
def test_a_training_goes_on_from_both_layouts_and_saves_beside_them(worlds, witness, kind, stage, layout):
    """Both steps are loaded, and so is what is saved at the end."""
    folder = witness(f"deepspeed_{kind}_{stage}")
    ends = worlds.run(2, _GO_ON.format(stage=stage, layout=layout, run=str(folder / "run"), last=LAST))
    expected = expected_of(folder)
    for end, states, losses in zip(ends, expected.states, expected.losses_after(4), strict=True):
        found, trained, is_loaded_again = end.told
        assert found == [states["2"], states["4"]]
        assert trained == pytest.approx(losses, rel=1e-4)  # another processor may round otherwise
        assert is_loaded_again
    assert (folder / "run" / "latest").read_text() == f"global_step{LAST}"
    assert {path.name for path in (folder / "run").glob("global_step*")} == {f"global_step{n}" for n in (2, 4, LAST)}
    for step in (2, 4) if kind == "archive" else ():
        assert async_ckpt.verify(folder / "run" / f"global_step{step}").num_bytes > 0


_ON_OTHER_RANKS = """
from deepspeed_runs import *
from witnessed import DEEPSPEED, of_deepspeed
training = Training({stage}, "archive", **DEEPSPEED[{stage}])
training.engine.load_checkpoint({run!r})
here.tell(of_deepspeed(training))
"""


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("size", [1, 3])
def test_other_numbers_of_ranks_load_the_same_state_of_archives(worlds, witness, stage, size):
    folder = witness(f"deepspeed_archive_{stage}")
    want = expected_of(folder).states[0]["4"]
    ends = worlds.run(size, _ON_OTHER_RANKS.format(stage=stage, run=str(folder / "run")))
    assert [end.told for end in ends] == [[want]] * size
