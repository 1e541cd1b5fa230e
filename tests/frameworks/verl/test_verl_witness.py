"""Folders that earlier code has written under verl are loaded, and gone on with, by today's.

What is expected was told by a training that had saved nothing, before: see `tests/witnesses/make_frameworks.py`.
"""

from __future__ import annotations

import pytest
from witnessed import LAST, VERL_RANKS, expected_of

import async_ckpt

pytest.importorskip("verl", reason="verl is not installed: make test-frameworks")


WARM = ("verl_runs", "witnessed")
TRACKER = "latest_checkpointed_iteration.txt"

_GO_ON = """
from verl_runs import *
from witnessed import VERL, of_verl
root = {run!r}
def resumed():
    contents = ["model", "optimizer", "extra", "hf_model"]
    training = Training(root, version={version}, sizes=VERL, save_contents=contents)
    training.resume()
    return training
def named(step):
    dist.barrier()
    if here.rank == 0:
        Path(root, {tracker!r}).write_text(str(step))
    dist.barrier()
training = resumed()
here.tell([of_verl(training), training.train_dataloader.at])
named(2)
here.tell(of_verl(resumed()))
named(4)
training = resumed()
here.tell(training.train({last}))
training.manager.wait()
here.tell(tracked(root))
dist.barrier()
here.tell(of_verl(resumed()) == of_verl(training))
"""


@pytest.mark.parametrize("name", VERL_RANKS)
def test_a_training_goes_on_and_saves_beside_the_old_steps(worlds, witness, name):
    """Of the step that the tracker names, and of the one before it."""
    version, size = VERL_RANKS[name]
    folder = witness(f"verl_{name}")
    expected = expected_of(folder)
    ends = worlds.run(size, _GO_ON.format(run=str(folder / "run"), version=version, tracker=TRACKER, last=LAST))
    for rank, (end, states, losses) in enumerate(zip(ends, expected.states, expected.losses_after(4), strict=True)):
        newest, before, trained, named, is_loaded_again = end.told
        assert newest == [states["4"], 4 if rank == 0 else 0]  # the loader is the driver's
        assert before == states["2"]
        assert trained == pytest.approx(losses, rel=1e-4)  # another processor may round otherwise
        assert (named, is_loaded_again) == (LAST, True)
    for step in (2, 4, LAST):
        archives = folder / "run" / f"global_step_{step}" / "actor" / "training.tar"
        assert async_ckpt.verify(archives).num_bytes > 0


_ON_OTHER_RANKS = """
from verl_runs import *
from witnessed import VERL
training = Training({run!r}, version={version}, sizes=VERL)
here.tell(training.resume())
here.tell([training.digest(), training.scheduler.last_epoch])
"""


@pytest.mark.parametrize(("name", "size"), [("fsdp1", 1), ("fsdp1", 3), ("fsdp2", 1), ("fsdp2", 3), ("one", 2)])
def test_other_numbers_of_ranks_load_the_same_weights(worlds, witness, name, size):
    folder = witness(f"verl_{name}")
    want = expected_of(folder).states[0]["4"]["weights"]
    ends = worlds.run(size, _ON_OTHER_RANKS.format(run=str(folder / "run"), version=VERL_RANKS[name][0]))
    assert [end.told for end in ends] == [[4, [want, 4]]] * size
