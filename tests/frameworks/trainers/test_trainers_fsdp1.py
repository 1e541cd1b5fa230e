"""The Trainer of Transformers and accelerate under FSDP1, on several ranks: resumed with the same losses."""

from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from test_accelerate import ran
from test_transformers_ranks import trained
from torch.distributed.checkpoint import FileSystemReader
from trainers import names_in

WARM = ("trainers", "accelerated")

_FOLDERS, _FILES = "SHARDED_STATE_DICT", "FULL_STATE_DICT"


@pytest.mark.parametrize("kind", [_FOLDERS, _FILES], ids=["folders", "files"])
def test_the_files_are_those_of_the_plain_trainer_and_each_resumes_from_the_other(worlds, tmp_path, kind):
    ways = {way: f"sharded({way}, {kind!r}, 1)" for way in ("Trainer", "Files")}
    losses = {way: trained(worlds, 2, script, tmp_path / way, model="untied")[0] for way, script in ways.items()}
    assert losses["Files"] == losses["Trainer"]
    plain, ours = (tmp_path / way / "checkpoint-2" for way in ways)
    assert names_in(ours) == names_in(plain)
    for folder in [path.name for path in plain.iterdir() if path.is_dir()]:
        keys = [{*FileSystemReader(one / folder).read_metadata().state_dict_metadata} for one in (plain, ours)]
        assert keys[0] == keys[1]
    for folder in (plain, ours):
        resumed, _ = trained(worlds, 2, ways["Files"], tmp_path / f"{folder.parent.name}-2", folder, model="untied")
        assert resumed == losses["Trainer"]
    resumed, _ = trained(worlds, 2, ways["Trainer"], tmp_path / "plain-2", ours, model="untied")
    if kind == _FILES:
        assert resumed == losses["Trainer"]
    else:  # accelerate 1.15 leaves the optimizer's state in its own folders, too
        assert resumed[3] == losses["Trainer"][3]


def test_archives_are_resumed_on_as_many_ranks_bit_for_bit_and_on_others(worlds, tmp_path):
    kind = f"sharded(Archives, {_FOLDERS!r}, 1)"
    whole, _ = trained(worlds, 2, kind, tmp_path / "whole", model="untied")
    folder = tmp_path / "whole" / "checkpoint-2"
    assert len([*(folder / "training.tar").glob("rank_*.tar")]) == 2
    same, _ = trained(worlds, 2, kind, tmp_path / "same", folder, model="untied")
    assert same == whole
    more, _ = trained(worlds, 4, kind, tmp_path / "more", folder, model="untied")
    assert more == pytest.approx(whole, rel=1e-5)


_BEST = """
import warnings
warnings.simplefilter("ignore")
from trainers import *
trainer = trainer_of(sharded({kind}, {of!r}, 1), {folder!r}, model=untied, max_steps=6, load_best_model_at_end=True,
    eval_strategy="steps", eval_steps=2, greater_is_better=True, metric_for_best_model="loss")
trainer.train()
best = trainer.state.best_model_checkpoint, trainer.state.best_metric
here.tell({{"best": best, "loss": trainer.evaluate()["eval_loss"]}})
"""


@pytest.mark.parametrize(
    ("kind", "of"),
    [("Files", _FOLDERS), ("Files", _FILES), ("Archives", _FOLDERS)],
    ids=["folders", "files", "archive"],
)
def test_the_best_model_is_loaded_at_the_end(worlds, tmp_path, kind, of):
    for end in worlds.run(2, _BEST.format(kind=kind, of=of, folder=str(tmp_path))):
        folder, loss = end.told[-1]["best"]
        assert Path(folder).name == "checkpoint-2"  # not the last one
        assert end.told[-1]["loss"] == loss


@pytest.mark.parametrize("whole_tensors", [False, True], ids=["folders", "files"])
def test_the_files_are_those_of_accelerate_and_are_loaded(worlds, tmp_path, whole_tensors):
    options = {"sharded": True, "version": 1, "dropout": 0.0, "whole_tensors": whole_tensors}
    first = {way: ran(worlds, 2, tmp_path / way, layout=way, **options) for way in ("accelerate", "plain")}
    assert [told["losses"] for told in first["accelerate"]] == [told["losses"] for told in first["plain"]]
    plain, ours = (tmp_path / way / "checkpoints" / "checkpoint_1" for way in ("plain", "accelerate"))
    assert names_in(ours) == names_in(plain)
    for folder in (plain, ours):
        again = ran(worlds, 2, tmp_path / f"{folder.parents[1].name}-2", folder, layout="accelerate", **options)
        assert [told["losses"] for told in again] == [told["losses"][4:] for told in first["plain"]]


def test_an_archive_of_accelerate_is_loaded_on_as_many_ranks_bit_for_bit_and_on_others(worlds, tmp_path):
    options = {"sharded": True, "version": 1, "dropout": 0.0}
    first = ran(worlds, 2, tmp_path / "two", **options)
    folder = tmp_path / "two" / "checkpoints" / "checkpoint_1"
    again = ran(worlds, 2, tmp_path / "again", folder, **options)
    assert [told["losses"] for told in again] == [told["losses"][4:] for told in first]
    ran(worlds, 4, tmp_path / "four", folder, **options)


_REFUSED = """
import warnings
warnings.simplefilter("ignore")
from accelerated import *
from trainers import *
def refusal(make):
    try:
        make()
    except NotImplementedError as error:
        return str(error)
def trainer(kind="SHARDED_STATE_DICT", model=untied, strategy=None):
    made = trainer_of(sharded(Plain, kind, 1), {folder!r}, model=model)
    made.accelerator.state.fsdp_plugin.sharding_strategy = strategy
    make_async(made)
def state(kind=None, strategy=None):
    accelerator = Training({folder!r}, sharded=True, version=1).accelerator
    accelerator.state.fsdp_plugin.state_dict_type = kind or "SHARDED_STATE_DICT"
    accelerator.state.fsdp_plugin.sharding_strategy = strategy
    AsyncState(accelerator)
from async_ckpt.integrations.transformers import make_async
from torch.distributed.fsdp import ShardingStrategy
from transformers import Trainer as Plain
here.tell([
    refusal(lambda: trainer("LOCAL_STATE_DICT")),
    refusal(lambda: state("LOCAL_STATE_DICT")),
    refusal(lambda: trainer(strategy=ShardingStrategy.HYBRID_SHARD)),
    refusal(lambda: state(strategy=ShardingStrategy.HYBRID_SHARD)),
    refusal(lambda: trainer(model=untied_with_adapter)),
    refusal(trainer),
])
"""


def test_what_is_not_supported_is_refused_before_any_training(worlds, tmp_path):
    pytest.importorskip("peft")
    local = "FSDP1's LOCAL_STATE_DICT is not supported; set state_dict_type to SHARDED_STATE_DICT"
    hybrid = "FSDP1's hybrid sharding is not supported; set FULL_SHARD or SHARD_GRAD_OP, or use FSDP2"
    adapters = "adapters under FSDP1 are not supported; use FSDP2: fsdp_version=2"
    for end in worlds.run(2, _REFUSED.format(folder=str(tmp_path))):
        assert end.told == [[local, local, hybrid, hybrid, adapters, None]]
