"""What an engine of DeepSpeed is refused, and says: other writers, places and states, and a second training in a folder."""

from __future__ import annotations

import pytest

pytest.importorskip("deepspeed", reason="deepspeed is not installed: make test-frameworks")


WARM = ("deepspeed_runs",)

_TOLD = """
import contextlib, io
from deepspeed_runs import *
def told(call):
    try:
        call()
    except Exception as error:
        here.tell([type(error).__name__, str(error)])
    else:
        here.tell(["nothing", ""])
"""


def refusals(worlds, script: str, size: int = 1, rank: int = 0) -> list[list[str]]:
    return worlds.run(size, _TOLD + script)[rank].told


_ENGINES = """
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine
plain = Training(1, None).engine
told(lambda: use(plain, "tar"))
use(plain)
told(lambda: use(plain))
class OtherEngine(TorchCheckpointEngine):
    pass
other = Training(1, None).engine
other.checkpoint_engine = OtherEngine()
told(lambda: use(other))
offloaded = Training(3, None).engine
offloaded.optimizer.swap_optimizer = True  # as where its state is on NVMe
told(lambda: use(offloaded))
told(lambda: Training(1, "deepspeed", checkpoint={"use_node_local_storage": True}))
behind = Training(1, None).engine
behind.zenflow = True
told(lambda: use(behind))
"""


def test_engines_that_are_not_served_are_refused(worlds):
    told = refusals(worlds, _ENGINES)
    assert [kind for kind, _ in told] == ["ValueError"] * 3 + ["NotImplementedError"] * 3
    texts = (
        "layout must be", "call use() once", "makes OtherEngine save; remove that from the config",
        "an optimizer that is offloaded to NVMe is not supported", "set use_node_local_storage to false",
        "ZenFlow updates asynchronously, and is not supported",
    )  # fmt: skip
    for (_, text), expected in zip(told, texts, strict=True):
        assert expected in text


_ARCHIVES = """
told(lambda: Training(0, "archive"))
with contextlib.redirect_stdout(io.StringIO()):  # DeepSpeed prints there
    told(lambda: Training(1, "archive", bf16={"enabled": True}, data_types={"grad_accum_dtype": "fp32"}))
experts = Training(1, None).engine
experts.has_moe_layers = True
told(lambda: use(experts, "archive"))
"""


def test_archives_of_engines_whose_state_is_spread_otherwise_are_refused(worlds):
    told = refusals(worlds, _ARCHIVES)
    assert [kind for kind, _ in told] == ["NotImplementedError"] * 3
    texts = (
        "without ZeRO, DeepSpeed's own files are loaded",
        'BF16_Optimizer is not supported with layout="archive"',
        'layout="archive" supports ZeRO over all ranks, without model parallelism and experts',
    )
    for (_, text), expected in zip(told, texts, strict=True):
        assert expected in text


_PLACES = """
files, archives = Training(1, "deepspeed"), Training(1, "archive")
told(lambda: files.engine.save_checkpoint(""))
told(lambda: files.engine.save_checkpoint("s3://bucket/run"))
archives.train(1, {folder!r}, every=1)
archives.checkpoints.wait()
told(lambda: files.engine.load_checkpoint({folder!r}, custom_load_fn=print))
open({folder!r} + "/taken", "w").close()
files.engine.save_checkpoint({folder!r}, tag="taken")
told(files.checkpoints.wait)
told(lambda: archives.engine.save_checkpoint({folder!r}, tag="global_step1"))  # again, and beside another engine
told(archives.checkpoints.wait)
here.tell(sorted(os.listdir({folder!r} + "/global_step1")))
"""


def test_places_that_cannot_be_saved_to_are_refused(worlds, tmp_path):
    *told, files = refusals(worlds, _PLACES.format(folder=str(tmp_path / "run")))
    kinds = ["ValueError", "ValueError", "ValueError", "OccupiedError", "nothing", "nothing"]
    assert [kind for kind, _ in told] == kinds
    texts = ("non-empty", 'layout="archive"', "custom_load_fn", "is a file", "", "")
    for (_, text), expected in zip(told, texts, strict=True):
        assert expected in text
    assert files == ["rank_00000.tar"]


_SILENT = """
from async_ckpt.core.ranks import rendezvous
training, real = Training(1, "deepspeed"), torch.save
def save(*args, **options):
    if here.rank == 1:
        here.hear("given up")
    real(*args, **options)
torch.save, rendezvous.PEER_SECONDS = save, 0.0
training.train(2, {folder!r})
if here.rank == 0:
    training.checkpoints.ended.exception()
    here.say("given up")
told(training.checkpoints.wait)
"""


def test_a_rank_of_which_nothing_is_heard_fails_the_save_on_all(worlds, tmp_path):
    ends = worlds.run(2, _TOLD + _SILENT.format(folder=str(tmp_path / "run")))
    kind, text = ends[0].told[0]
    assert kind == "PeerFailedError"
    assert "nothing was heard of rank 1. Call save_checkpoint on every rank" in text
    assert ends[1].told[0][0] != "nothing"
    assert not (tmp_path / "run" / "latest").exists()


_HOLDS = """
training = Training(1, "deepspeed")
training.train(2, {folder!r})
training.checkpoints.wait()
here.say("saved")
here.hear("refused")
training.engine.destroy()
here.say("destroyed")
here.hear("ended")
"""
_COMES = """
training = Training(1, {layout!r})
training.train(4)
told(lambda: training.engine.save_checkpoint({folder!r}))
told(training.checkpoints.wait)
"""


def test_a_second_training_in_a_folder_is_refused_on_all_ranks_until_the_first_has_ended(worlds, tmp_path):
    run = str(tmp_path / "run")
    first = worlds.start(1, _TOLD + _HOLDS.format(folder=run))
    first.wait_for("saved")
    for layout in ("deepspeed", "archive"):
        ends = worlds.run(2, _TOLD + _COMES.format(folder=run, layout=layout))
        assert [end.told[0][0] for end in ends] == ["RunTakenError", "PeerFailedError"]
        for end in ends:
            assert f"another trainer (process {first.children[0].pid} on " in end.told[0][1]
    assert (tmp_path / "run" / "latest").read_text() == "global_step2"
    first.say("refused")
    first.wait_for("destroyed")
    ends = worlds.run(2, _TOLD + _COMES.format(folder=run, layout="archive"))
    assert [end.told for end in ends] == [[["nothing", ""]] * 2] * 2
    first.say("ended")
    first.ended()
    assert (tmp_path / "run" / "latest").read_text() == "global_step4"
