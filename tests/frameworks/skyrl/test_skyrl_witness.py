"""Folders that earlier code has written under SkyRL are loaded, and gone on with, by today's.

What is expected was told by SkyRL alone, before: see `tests/witnesses/make_frameworks.py`.
"""

from __future__ import annotations

import pytest
from witnessed import LAST, expected_of

import async_ckpt

pytest.importorskip("skyrl", reason="skyrl is not installed: make test-frameworks")

WARM = ("skyrl_runs", "witnessed")

_GO_ON = """
from skyrl_runs import *
from witnessed import SKYRL, of_skyrl
def loaded(step):
    training = Training({layout!r}, SKYRL)
    states = training.load_checkpoint(f"{run}/global_step_{{step}}/policy")
    training.step = step
    return training, states["client_state"]
training, client_state = loaded(4)
here.tell([of_skyrl(training), client_state])
losses = training.train({last})
here.tell({{step: float.fromhex(loss) for step, loss in enumerate(losses, 5)}})
training.save_checkpoint("{run}/global_step_{last}/policy")
training.strategy.finalize_pending_saves()
dist.barrier()
here.tell(of_skyrl(loaded({last})[0]) == of_skyrl(training))
"""


@pytest.mark.parametrize(
    ("kind", "layout"),
    [("async_ckpt", "async_ckpt"), ("async_ckpt", "both"), ("skyrl", "async_ckpt"), ("skyrl", "skyrl")],
)
def test_ranks_go_on_from_both_layouts_and_save_beside_them(worlds, witness, kind, layout):
    folder = witness(f"skyrl_ranks_{kind}")
    expected = expected_of(folder)
    ends = worlds.run(2, _GO_ON.format(run=folder / "run", layout=layout, last=LAST))
    for rank, end in enumerate(ends):
        found, trained, is_loaded_again = end.told
        assert found == [expected.states[rank]["4"], {"epoch": 2, "rank": rank}]
        assert trained == pytest.approx(expected.losses_after(4)[rank], rel=1e-4)  # processors round otherwise
        assert is_loaded_again


_ON_OTHER_RANKS = """
from skyrl_runs import *
from witnessed import SKYRL, of_skyrl
training = Training("async_ckpt", SKYRL)
training.load_checkpoint("{run}/global_step_4/policy")
state = of_skyrl(training)
here.tell([state["weights"], state["lr"]])
"""


@pytest.mark.parametrize("size", [2, 3])
def test_other_numbers_of_ranks_load_the_same_weights(worlds, witness, size):
    folder = witness("skyrl_trainer")
    want = expected_of(folder).states[0]["4"]
    ends = worlds.run(size, _ON_OTHER_RANKS.format(run=folder / "run"))
    assert [end.told for end in ends] == [[[want["weights"], want["lr"]]]] * size


_BY_TRAINER = """
from skyrl_runs import *
from witnessed import SKYRL, of_skyrl
training = TrainingByTrainer({run!r}, sizes=SKYRL)
here.tell([training.resume(), of_skyrl(training.worker)])
losses = training.train({last})
here.tell([{{step: float.fromhex(loss) for step, loss in enumerate(losses, {step} + 1)}}, training.data])
training.trainer.wait_for_checkpoints()
again = TrainingByTrainer({run!r}, sizes=SKYRL)
here.tell([again.resume(), of_skyrl(again.worker) == of_skyrl(training.worker)])
"""


@pytest.mark.parametrize("step", [3, 4])
def test_a_trainer_goes_on_and_saves_beside_the_old_steps(worlds, witness, step):
    """From the newest step, and from the one before it where the newest is gone."""
    folder = witness("skyrl_trainer")
    latest = folder / "run" / "latest_ckpt_global_step.txt"
    assert latest.read_text() == "4"
    if step == 3:
        (folder / "run" / "global_step_4").rename(folder / "gone")
        latest.write_text("3")
    expected = expected_of(folder)
    (end,) = worlds.run(1, _BY_TRAINER.format(run=str(folder / "run"), step=step, last=LAST))
    (resumed, state), (trained, data), again = end.told
    assert (resumed, state) == (step, expected.states[0][str(step)])
    assert trained == pytest.approx(expected.losses_after(step)[0], rel=1e-4)
    assert data == expected.data[0][2 * step :]
    assert again == [LAST, True]
    assert latest.read_text() == str(LAST)
    assert {path.name for path in (folder / "run").glob("global_step_*")} >= {f"global_step_{n}" for n in (3, 5, 6)}
    for n in (3, LAST):
        assert async_ckpt.verify(folder / "run" / f"global_step_{n}" / "policy" / "async_ckpt").num_bytes > 0


_TINKER = """
from skyrl_runs import *
from async_ckpt.integrations.skyrl import CheckpointBackend
from witnessed import SKYRL, of_skyrl
training = Training("async_ckpt", SKYRL)
({backend})(OneWorker(training)).load_checkpoint({tar!r}, "a")
training.step = 4
here.tell(of_skyrl(training))
here.tell({{step: float.fromhex(loss) for step, loss in enumerate(training.train({last}), 5)}})
with CheckpointBackend(OneWorker(training)) as backend:
    backend.save_checkpoint({tar!r} + ".next", "a")
again = Training("async_ckpt", SKYRL)
CheckpointBackend(OneWorker(again)).load_checkpoint({tar!r} + ".next", "a")
here.tell(of_skyrl(again) == of_skyrl(training))
"""


@pytest.mark.parametrize("backend", ["CheckpointBackend", "tinker_backend"])
def test_a_tar_of_the_tinker_backend_is_loaded_by_ours_and_by_theirs(worlds, witness, backend):
    folder = witness("skyrl_tinker")
    expected = expected_of(folder)
    tar = str(folder / "run" / "a" / "000004.tar.gz")
    (end,) = worlds.run(1, _TINKER.format(backend=backend, tar=tar, last=LAST))
    state, trained, is_loaded_again = end.told
    assert state == expected.states[0]["4"]
    assert trained == pytest.approx(expected.losses_after(4)[0], rel=1e-4)
    assert is_loaded_again
