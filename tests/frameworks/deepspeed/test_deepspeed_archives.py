"""Archives of DeepSpeed's ZeRO: resumed on as many ranks with the same losses, and on others with losses as near as sums are."""

from __future__ import annotations

import pytest
from clients import environment_of
from deepspeed_worlds import after, trained

import async_ckpt

pytest.importorskip("deepspeed", reason="deepspeed is not installed: make test-frameworks")


WARM = ("deepspeed_runs",)


def means(losses: list[dict[int, float]]) -> dict[int, float]:
    return {step: sum(of_rank[step] for of_rank in losses) / len(losses) for step in losses[0]}


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_archives_are_resumed_on_as_many_ranks_and_on_others(worlds, tmp_path, stage):
    whole = trained(worlds, stage, "archive", None, batch=6)
    run = tmp_path / "run"
    assert trained(worlds, stage, "archive", run, last=4, batch=6) == [
        {step: loss for step, loss in of_rank.items() if step <= 4} for of_rank in whole
    ]
    assert (run / "latest").read_text() == "global_step4"
    assert sorted(path.name for path in run.iterdir()) == ["global_step2", "global_step4", "history.jsonl", "latest"]
    assert trained(worlds, stage, "archive", None, run, batch=6) == after(4, whole)
    for size in (1, 3):
        resumed = trained(worlds, stage, "archive", tmp_path / str(size), run, size=size, batch=12 // size)
        assert means(resumed) == pytest.approx(means(after(4, whole)), rel=1e-4)
    assert async_ckpt.load(run / "global_step4", select="fp32")["fp32"]["0.weight"].shape == (600, 8)
    async_ckpt.verify(run / "global_step4")


_OPTIONS = """
import contextlib, io
from deepspeed_runs import *
for layout in (None, "archive"):
    training = Training({stage}, layout)
    training.train(4, {folder!r} + str(layout))
    if training.checkpoints:
        training.checkpoints.wait()
no_optimizer, module, no_scheduler = (
    {{"load_optimizer_states": False}}, {{"load_module_only": True}}, {{"load_lr_scheduler_states": False}})
# Under ZeRO 3, DeepSpeed loads no weights by `load_module_only` alone.
for of_files, of_archives in ((no_optimizer,) * 2, ({{**module, **no_optimizer}}, module), (no_scheduler,) * 2):
    told = []
    for layout, options in ((None, of_files), ("archive", of_archives)):
        training = Training({stage}, layout)
        with contextlib.redirect_stdout(io.StringIO()):  # DeepSpeed prints there
            training.engine.load_checkpoint({folder!r} + str(layout), **options)
        begun = training.step
        told.append([begun, list(training.train(begun + 3).values())])
    here.tell(told)
"""


@pytest.mark.parametrize("stage", [2, 3])
def test_a_part_of_an_archive_is_loaded_as_of_the_files_of_deepspeed(worlds, tmp_path, stage):
    for end in worlds.run(2, _OPTIONS.format(stage=stage, folder=str(tmp_path) + "/")):
        assert [theirs for theirs, _ in end.told] == [ours for _, ours in end.told]
        assert [ours[0] for _, ours in end.told] == [4, 0, 4]


_UNLIKE = """
import contextlib, io
from deepspeed_runs import *
from async_ckpt import StateMismatchError
training = Training(2, "archive", width=8, has_scheduler=False)
training.train(2, {folder!r})
training.checkpoints.wait()
for options in ({{}}, {{"has_scheduler": False, "kind": torch.optim.RAdam}}):
    live = Training(2, "archive", width=8, **options)
    before = [weight.detach().clone() for weight in live.engine.module.parameters()]
    with contextlib.redirect_stdout(io.StringIO()):
        try:
            live.engine.load_checkpoint({folder!r})
        except StateMismatchError as error:
            here.tell(str(error))
    assert all(map(torch.equal, live.engine.module.parameters(), before))
    assert live.step == 0
"""


def test_what_an_archive_lacks_and_the_state_of_another_optimizer_are_refused_before_anything_is_filled(
    worlds, tmp_path
):
    for end in worlds.run(2, _UNLIKE.format(folder=str(tmp_path / "run"))):
        scheduler, kind = end.told
        assert "has no lr_scheduler" in scheduler
        assert "another kind of optimizer" in kind
        assert all(str(tmp_path / "run" / "global_step2") in message for message in end.told)


_URL = """
from deepspeed_runs import *
training = Training(2, "archive")
here.tell(training.engine.load_checkpoint({url!r}) == (None, None))
losses = dict(training.train(4, {url!r}))
training.checkpoints.wait()
here.tell([one.path for one in training.checkpoints.reports()][-1])
for layout in ("archive", "deepspeed"):
    resumed = Training(2, layout)
    here.tell(resumed.engine.load_checkpoint({url!r})[1] == {{"step": 4}})
    here.tell(resumed.train(6))
here.tell(training.train(6))
try:
    training.engine.load_checkpoint({url!r}, "other")
except Exception as error:
    here.tell(f"{{type(error).__name__}}: {{error}}")
"""


def test_archives_are_saved_at_a_url_and_resumed_from_it(worlds, s3, bucket):
    url = f"s3://{bucket}/run"
    ends = worlds.start(2, _URL.format(url=url), **environment_of(s3)).ended()
    for is_new, path, first, archive, second, other, whole, error in (end.told for end in ends):
        assert [is_new, first, second] == [True] * 3
        assert path == f"{url}/global_step4"
        assert archive == other == {step: loss for step, loss in whole.items() if int(step) > 4}
        assert error.startswith(f"NotCommittedError: {url}/other has no archive")
    assert s3.client.get_object(Bucket=bucket, Key="run/latest")["Body"].read() == b"global_step4"


# --- open-instruct ------------------------------------------------------------------------------------------------

_OPEN_INSTRUCT = """
import random, re, shutil
from deepspeed_runs import *
from async_ckpt.integrations.deepspeed import tag_folder
from threading import Event
may_appear, done = Event(), tag_folder.TagFolder.done
def done_when_told(folder, call):
    may_appear.wait()
    done(folder, call)
tag_folder.TagFolder.done = done_when_told
training, run, looks = Training(2, {layout!r}), {folder!r}, []
torch.manual_seed(here.rank)
for step in (1, 2, 3):
    training.train(step)
    drawn = {{"torch_cpu_rng_state": torch.get_rng_state(), "python_rng_state": random.getstate()}}
    state = {{"training_step": step, "episode": 8 * step, "rng_states": drawn, "rank": here.rank}}
    may_appear.set()  # the save before
    training.checkpoints.wait()
    may_appear.clear()
    training.engine.save_checkpoint(run, client_state=state)
    if here.rank == 0:  # its cleanup, while nothing of this step is durable: the newest stays
        steps = sorted(int(found[1]) for name in os.listdir(run) if (found := re.fullmatch("global_step([0-9]+)", name)))
        for old in steps[:-1]:
            shutil.rmtree(f"{{run}}/global_step{{old}}")
        latest = open(f"{{run}}/latest").read() if step > 1 else None
        looks.append([latest, sorted(os.listdir(f"{{run}}/{{latest}}") if latest else [])])
    expected = torch.rand(3)
may_appear.set()
training.checkpoints.wait()
resumed = Training(2, {layout!r})
_, state = resumed.engine.load_checkpoint(run)
torch.set_rng_state(state["rng_states"]["torch_cpu_rng_state"])
here.tell([looks, state["training_step"], state["episode"], state["rank"], torch.equal(torch.rand(3), expected)])
"""


@pytest.mark.parametrize("layout", ["deepspeed", "archive"])
def test_open_instruct_saves_on_all_ranks_and_its_cleanup_leaves_what_latest_names(worlds, tmp_path, layout):
    """As its learners call it: no tag, a client state of each rank, and rank 0 deletes all but the newest folder."""
    ends = worlds.run(2, _OPEN_INSTRUCT.format(layout=layout, folder=str(tmp_path / "run")))
    looks = ends[0].told[0][0]
    assert [latest for latest, _ in looks] == [None, "global_step1", "global_step2"]
    assert len(looks[1][1]) == len(looks[2][1]) >= 3  # files of both ranks
    for rank, end in enumerate(ends):
        of_rank = layout == "archive"  # otherwise all have that of rank 0, as with DeepSpeed
        assert end.told[0][1:] == [3, 24, rank if of_rank else 0, of_rank or rank == 0]
    assert (tmp_path / "run" / "latest").read_text() == "global_step3"
