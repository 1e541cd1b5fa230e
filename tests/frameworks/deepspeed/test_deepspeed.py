"""DeepSpeed's own layout, written behind the training: its files, `latest` last, and equal losses after a kill."""

from __future__ import annotations

from pathlib import Path

import pytest
from deepspeed_worlds import after, trained

pytest.importorskip("deepspeed", reason="deepspeed is not installed: make test-frameworks")


WARM = ("deepspeed_runs",)


def files_in(folder: Path) -> list[str]:
    """The files of DeepSpeed, without the history beside them and the digests of each rank."""
    files = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return sorted(name for name in files if name != "history.jsonl" and "_async_ckpt.digests" not in name)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_files_are_those_of_deepspeed_and_both_resume_from_them(worlds, tmp_path, stage):
    plain = trained(worlds, stage, None, tmp_path / "plain", last=4)
    ours = trained(worlds, stage, "deepspeed", tmp_path / "ours", last=4)
    assert ours == plain
    assert files_in(tmp_path / "ours") == files_in(tmp_path / "plain")
    assert (tmp_path / "ours" / "latest").read_text() == "global_step4"
    whole = trained(worlds, stage, None, None, last=6)
    for layout in (None, "deepspeed"):
        assert trained(worlds, stage, layout, None, tmp_path / "ours") == after(4, whole)
    assert trained(worlds, stage, "deepspeed", None, tmp_path / "plain") == after(4, whole)


# --- killed -------------------------------------------------------------------------------------------------------

_KILLED = """
from deepspeed_runs import *
from async_ckpt.integrations.deepspeed import tag_folder
training = Training({stage}, "deepspeed")
real = tag_folder.name_latest
def name_latest(file, tag):
    if tag == "global_step4" and {before}:
        here.die()
    real(file, tag)
    if tag == "global_step4":
        here.die()
if here.rank == 0:
    tag_folder.name_latest = name_latest
training.train(4, {folder!r})
here.hear("dead0")
os._exit(0)
"""


@pytest.mark.parametrize(("stage", "before"), [(1, True), (2, False)])
def test_what_is_killed_before_or_after_latest_moves_resumes_with_the_same_losses(worlds, tmp_path, stage, before):
    worlds.run(2, _KILLED.format(stage=stage, before=before, folder=str(tmp_path / "run")), killed={0})
    newest = 2 if before else 4
    assert (tmp_path / "run" / "latest").read_text() == f"global_step{newest}"
    whole = trained(worlds, stage, None, None)
    assert trained(worlds, stage, None, None, tmp_path / "run") == after(newest, whole)
    assert trained(worlds, stage, "deepspeed", tmp_path / "run", tmp_path / "run") == after(newest, whole)
    assert (tmp_path / "run" / "latest").read_text() == "global_step6"
    assert not [path.name for path in (tmp_path / "run").iterdir() if path.name.startswith(".")]


# --- what waits, and what fails -----------------------------------------------------------------------------------

_HELD = """
import threading
from deepspeed_runs import *
from async_ckpt.integrations.deepspeed import checkpoint_engine
training, may_write, real = Training(1, "deepspeed"), threading.Event(), torch.save
def save(*args, **options):
    may_write.wait()
    real(*args, **options)
torch.save = save
training.train(5, {folder!r}, every=3)  # steps 4 and 5 are taken while nothing of step 3 is written
here.tell({{"step": training.step, "there": sorted(name for name in os.listdir({folder!r}) if name[0] != "." and name != "history.jsonl")}})
may_write.set()
training.checkpoints.wait()
here.tell({{"latest": open({folder!r} + "/latest").read(), "reports": [one.step for one in training.checkpoints.reports()]}})
"""


def test_no_step_waits_for_files_and_nothing_is_visible_before_all_are_durable(worlds, tmp_path):
    for end in worlds.run(2, _HELD.format(folder=str(tmp_path / "run"))):
        assert end.told[0] == {"step": 5, "there": ["zero_to_fp32.py", "zero_to_torch.py"]}
        assert end.told[1] == {"latest": "global_step3", "reports": [3]}


_FAILS = """
from deepspeed_runs import *
training, real = Training(2, "deepspeed"), torch.save
def save(*args, **options):
    if here.rank == {rank} and training.step >= 4:
        raise OSError("no room")
    real(*args, **options)
torch.save = save
try:
    training.train(6, {folder!r})
except Exception as error:
    here.tell([training.step, type(error).__name__, str(error)])
torch.save = real
training.engine.load_checkpoint({folder!r})
here.tell(training.step)
"""


@pytest.mark.parametrize("rank", [0, 1])
def test_a_save_that_fails_on_one_rank_is_raised_on_all_and_latest_names_the_one_before(worlds, tmp_path, rank):
    ends = worlds.run(2, _FAILS.format(rank=rank, folder=str(tmp_path / "run")))
    for number, end in enumerate(ends):
        assert end.told[0][:2] == [6, "StorageUnavailableError" if number == rank else "PeerFailedError"]
        assert "no room" in end.told[0][2]
        assert end.told[-1] == 2
    assert (tmp_path / "run" / "latest").read_text() == "global_step2"
    assert not (tmp_path / "run" / "global_step4").exists()


_DAMAGED = """
from pathlib import Path
from deepspeed_runs import *
training = Training(1, "deepspeed")
training.train(4, {folder!r})
training.checkpoints.wait()
here.meet("saved")
if here.rank == 0:
    file = next(path for path in Path({folder!r}, "global_step4").iterdir() if "optim_states" in path.name)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
here.meet("damaged")
step = training.step
for tag in (None, "global_step4", "global_step2"):
    try:
        here.tell(training.engine.load_checkpoint({folder!r}, tag)[1]["step"])
    except Exception as error:
        here.tell([type(error).__name__, str(error), training.step == step])
"""


def test_a_file_with_other_bytes_is_not_loaded_on_any_rank_and_an_earlier_tag_is(worlds, tmp_path):
    for end in worlds.run(2, _DAMAGED.format(folder=str(tmp_path))):
        *refused, loaded = end.told
        for kind, text, is_unchanged in refused:
            assert (kind, "optim_states.pt" in text, "nothing was loaded" in text, is_unchanged) == (
                "CorruptCheckpointError", True, True, True,
            )  # fmt: skip
        assert loaded == 2


_REFUSED_COPY = """
import errno, threading
from async_ckpt.face.around import scratch
from deepspeed_runs import *
rmtree = scratch.shutil.rmtree
def rmtree_in_vain(*_, **__):
    scratch.shutil.rmtree = rmtree
    raise OSError(errno.ENOTEMPTY, "another rank has just written there")
scratch.shutil.rmtree = rmtree_in_vain
training = Training(1, "deepspeed")
training.train(1)
state = {{"lock": threading.Lock()}} if here.rank == 0 else {{}}
try:
    training.engine.save_checkpoint({folder!r}, client_state=state)
except Exception as error:
    here.tell([type(error).__name__, str(error)])
training.engine.save_checkpoint({folder!r}, tag="second", client_state={{"a": [here.rank]}}, save_latest=False)
training.checkpoints.wait()
here.tell(sorted({{*os.listdir({folder!r})}} - {{"history.jsonl"}}))
here.tell(training.engine.load_checkpoint({folder!r}, "second")[1]["a"])
"""


def test_a_state_that_cannot_be_copied_on_one_rank_is_refused_on_all_and_the_next_save_is_written(worlds, tmp_path):
    ends = worlds.run(2, _REFUSED_COPY.format(folder=str(tmp_path / "run")))
    assert [end.told[0][0] for end in ends] == ["UnsupportedStateError", "PeerFailedError"], ends[0].told[0]
    for end in ends:
        assert end.told[1] == [".async_ckpt.lock", "second", "zero_to_fp32.py", "zero_to_torch.py"]
        assert end.told[2] == [0]  # as with DeepSpeed, that of rank 0


_TO_FP32 = """
from deepspeed_runs import *
training = Training({stage}, "deepspeed", bf16={{"enabled": {bf16}}})
training.train(2, {folder!r})
training.checkpoints.wait()
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint as whole
from deepspeed.utils import safe_get_full_fp32_param
mine = {{name: safe_get_full_fp32_param(p) for name, p in training.engine.module.named_parameters()}}
import contextlib, io
with contextlib.redirect_stdout(io.StringIO()):
    theirs = whole({folder!r})
here.tell([name for name, p in mine.items() if not torch.equal(theirs[name].float(), p)])
"""


@pytest.mark.parametrize(("stage", "bf16"), [(2, True), (3, False)])
def test_zero_to_fp32_makes_whole_weights_of_the_folder(worlds, tmp_path, stage, bf16):
    assert [
        end.told for end in worlds.run(2, _TO_FP32.format(stage=stage, bf16=bf16, folder=str(tmp_path / "run")))
    ] == [[[]]] * 2
