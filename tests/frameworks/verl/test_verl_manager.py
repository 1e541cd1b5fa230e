"""verl's checkpoint manager and ours, by verl's own trainer: equal losses after a kill, and on other ranks; exports; adapters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_worlds import Worlds
from safetensors.torch import load_file

import async_ckpt

pytest.importorskip("verl", reason="verl is not installed: make test-frameworks")


WARM = ("verl_runs",)

_TRAIN = """
from verl_runs import *
training = Training({root!r}, {kind!r}, batch=12 // here.size, **{options})
resumed = training.resume() if {resume} else 0
before = training.digest(only_adapters={only_adapters})
training.train({last}, every={every})
if {kind!r} == "ours":
    training.manager.wait()
here.tell({{"losses": training.losses, "resumed": resumed, "before": before,
            "after": training.digest(only_adapters={only_adapters})}})
"""


def trained(
    worlds: Worlds, root: Path, *, size: int = 2, kind: str = "ours", resume: bool = False, last: int = 4,
    every: int | None = 2, only_adapters: bool = False, **options: Any,
) -> list[dict[str, Any]]:  # fmt: skip
    """The losses of each rank by step, and the weights before and after."""
    script = _TRAIN.format(
        root=str(root), kind=kind, resume=resume, last=last, every=every, only_adapters=only_adapters, options=options
    )
    return [end.told[-1] for end in worlds.run(size, script)]


def losses(trainings: list[dict[str, Any]], after: int = 0) -> list[dict[str, float]]:
    return [{step: loss for step, loss in one["losses"].items() if int(step) > after} for one in trainings]


def means(trainings: list[dict[str, Any]], after: int = 0) -> list[float]:
    of_ranks = losses(trainings, after)
    return [sum(one[step] for one in of_ranks) / len(of_ranks) for step in of_ranks[0]]


def tracked(root: Path) -> str:
    return (root / "latest_checkpointed_iteration.txt").read_text()


@pytest.mark.parametrize("version", [2, 1])
def test_ranks_go_on_with_the_same_losses_to_the_last_bit_and_other_ranks_with_the_same_weights(
    worlds, tmp_path, version
):
    whole = trained(worlds, tmp_path / "whole", last=6, every=None, version=version)
    run = tmp_path / "run"
    cut = trained(worlds, run, version=version)
    assert tracked(run) == "4"
    assert sorted(path.name for path in (run / "global_step_4").iterdir()) == ["actor", "data.pt"]
    resumed = trained(worlds, run, resume=True, last=6, every=None, version=version)
    assert [one["resumed"] for one in resumed] == [4, 4]
    assert [{**one, **other} for one, other in zip(losses(cut), losses(resumed), strict=True)] == losses(whole)
    assert [one["after"] for one in resumed] == [one["after"] for one in whole]
    for size in (1, 3):
        other = trained(worlds, run, size=size, resume=True, last=6, every=None, version=version)
        assert [one["before"] for one in other] == [cut[0]["after"]] * size
        # Random numbers of each rank are its own, and the gradients are a little different by them.
        assert means(other) == pytest.approx(means(whole, 4), rel=1e-3)
    async_ckpt.verify(run / "global_step_4" / "actor" / "training.tar")


def test_one_rank_saves_what_two_load(worlds, tmp_path):
    one = trained(worlds, tmp_path, size=1)
    two = trained(worlds, tmp_path, size=2, resume=True, last=4)
    assert [other["before"] for other in two] == [one[0]["after"]] * 2


@pytest.mark.parametrize("version", [2, 1])
def test_what_verls_own_manager_has_written_is_resumed_with_the_same_losses(worlds, tmp_path, version):
    whole = trained(worlds, tmp_path, kind="theirs", last=6, every=4, version=version)
    resumed = trained(worlds, tmp_path, resume=True, last=6, every=6, version=version)
    assert losses(resumed) == losses(whole, 4)
    assert tracked(tmp_path) == "6"


_LOAD = """
from verl_runs import *
training = Training("none", load_contents={contents}, **{options})
try:
    training.manager.load_checkpoint({folder!r})
    error = None
except Exception as raised:
    error = f"{{type(raised).__name__}}: {{raised}}"
here.tell({{"error": error, "weights": training.digest(), "steps": training.scheduler.last_epoch,
            "has_state": bool(training.optimizer.state), "noise": torch.rand(()).item()}})
"""


def loaded(worlds: Worlds, folder: Path, contents: list[str], size: int = 2, **options: Any) -> list[dict[str, Any]]:
    ends = worlds.run(size, _LOAD.format(folder=str(folder), contents=contents, options=options))
    return [end.told[-1] for end in ends]


def test_a_folder_of_verls_own_manager_is_refused_on_other_ranks_by_name(worlds, tmp_path):
    trained(worlds, tmp_path, kind="theirs", last=2)
    [one] = loaded(worlds, tmp_path / "global_step_2" / "actor", ["model"], size=1)
    assert "FileNotFoundError" in one["error"]
    assert "another number of ranks" in one["error"]


def test_contents_are_saved_and_loaded_as_the_config_names_them(worlds, tmp_path):
    fresh = loaded(worlds, tmp_path / "none", ["model"])
    assert all("NotCommittedError" in one["error"] for one in fresh)
    whole = trained(worlds, tmp_path / "whole", last=2)
    folder = tmp_path / "whole" / "global_step_2" / "actor"
    for one in loaded(worlds, folder, ["model"]):
        assert one == {**fresh[0], "error": None, "weights": whole[0]["after"], "noise": one["noise"]}
    for rank, one in enumerate(loaded(worlds, folder, ["optimizer", "extra"])):
        assert one["weights"] == fresh[rank]["weights"]
        assert (one["steps"], one["has_state"]) == (2, True)
        assert one["noise"] != fresh[rank]["noise"]

    trained(worlds, tmp_path / "part", last=2, save_contents=["model"])
    part = tmp_path / "part" / "global_step_2" / "actor"
    assert sorted(async_ckpt.load(part / "training.tar")) == ["model", "verl"]
    assert all(
        "has only model, but load_contents also names optimizer" in one["error"]
        for one in loaded(worlds, part, ["optimizer"])
    )
    trained(worlds, tmp_path / "extra", last=2, save_contents=["extra"])
    extra = loaded(worlds, tmp_path / "extra" / "global_step_2" / "actor", ["extra"])
    assert [one["steps"] for one in extra] == [2, 2]


# --- exports, and adapters ----------------------------------------------------------------------------------------


def assert_same_export(found: Path, want: Path) -> None:
    names = sorted(path.name for path in want.iterdir())
    assert sorted(path.name for path in found.iterdir()) == names
    for name in names:
        if name.endswith(".safetensors"):
            tensors, others = load_file(found / name), load_file(want / name)
            assert tensors.keys() == others.keys()
            assert all(torch.equal(tensors[key], others[key]) for key in others)
            assert {key: one.dtype for key, one in tensors.items()} == {key: one.dtype for key, one in others.items()}
        elif name.endswith(".json"):
            assert json.loads((found / name).read_text()) == json.loads((want / name).read_text()), name
        else:
            assert (found / name).read_bytes() == (want / name).read_bytes()


@pytest.mark.parametrize("options", [{}, {"tied": True}, {"lora": True}], ids=str)
def test_the_export_is_the_one_that_verl_makes(worlds, tmp_path, options):
    contents = ["model", "optimizer", "extra", "hf_model"]
    for kind in ("theirs", "ours"):
        trained(worlds, tmp_path / kind, kind=kind, last=2, save_contents=contents, **options)
    found, want = (tmp_path / kind / "global_step_2" / "actor" for kind in ("ours", "theirs"))
    assert_same_export(found / "huggingface", want / "huggingface")
    others = {path.name for path in want.iterdir() if path.suffix == ".json"}
    assert others | {"_async_ckpt.digests.json"} == {path.name for path in found.iterdir() if path.suffix == ".json"}
    assert all((found / name).read_bytes() == (want / name).read_bytes() for name in others)
    if "lora" not in options:  # under FSDP, verl's own manager exports on GPUs alone
        trained(worlds, tmp_path / "fsdp", last=2, save_contents=["hf_model"], version=1, **options)
        assert_same_export(tmp_path / "fsdp" / "global_step_2" / "actor" / "huggingface", want / "huggingface")


@pytest.mark.parametrize("version", [2, 1])
def test_adapters_alone_are_saved_and_resumed(worlds, tmp_path, version):
    options: dict[str, Any] = {"lora": True, "save_lora_only": True, "version": version, "only_adapters": True}
    whole = trained(worlds, tmp_path / "whole", last=4, every=None, **options)
    trained(worlds, tmp_path / "run", last=2, **options)
    weights = async_ckpt.load(tmp_path / "run" / "global_step_2" / "actor" / "training.tar", select="model")["model"]
    assert weights
    assert all("lora_" in name for name in weights)
    resumed = trained(worlds, tmp_path / "run", resume=True, last=4, every=None, **options)
    assert losses(resumed) == losses(whole, 2)
    assert [one["after"] for one in resumed] == [one["after"] for one in whole]
    [one] = trained(worlds, tmp_path / "run", size=1, resume=True, last=2, every=None, **options)
    assert one["before"] == resumed[0]["before"]


# --- verl's own tests, and its engine -----------------------------------------------------------------------------

_OWN_TESTS = """
import importlib.util, inspect, pathlib, pytest, tempfile
from verl_runs import *
import verl
path = pathlib.Path(verl.__file__).parents[1] / "tests/checkpoint_engine/test_fsdp_lora_only_checkpoint_on_cpu.py"
spec = importlib.util.spec_from_file_location("theirs", path)
theirs = importlib.util.module_from_spec(spec)
spec.loader.exec_module(theirs)

class OfBase(theirs.TestBaseCheckpointManagerLoraOnly):
    @staticmethod
    def _make_manager(checkpoint_config):
        return VerlCheckpointManager(model=object(), optimizer=None, checkpoint_config=checkpoint_config)

class OfFsdp(theirs.TestFSDPCheckpointManagerLoraOnly):
    def _make_fsdp_manager(self, checkpoint_config, model=None):
        model = theirs._FakeFSDPModel(has_lora=True) if model is None else model
        return VerlCheckpointManager(model=model, checkpoint_config=checkpoint_config)

for cls in (OfBase, OfFsdp):
    for name, test in inspect.getmembers(cls, inspect.isfunction):
        if not name.startswith("test_"):
            continue
        with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
            for function, value in [("get_rank", 0), ("get_world_size", 1), ("barrier", None)]:
                patch.setattr(dist, function, lambda value=value: value)
            try:
                test(cls(), **{"tmp_path": pathlib.Path(folder)} if "tmp_path" in inspect.signature(test).parameters else {})
                here.tell([name, "passed"])
            except FileNotFoundError as error:
                here.tell([name, pathlib.Path(error.filename).name])
"""


def test_verls_own_tests_of_its_manager_pass_with_ours_but_for_those_that_read_its_files(worlds):
    [end] = worlds.run(1, _OWN_TESTS, has_group=False)
    ended = dict(end.told)
    of_files = [name for name, how in ended.items() if how == "model_world_size_1_rank_0.pt"]
    assert len(of_files) == 3
    assert len(ended) >= 12
    assert all(how == "passed" for name, how in ended.items() if name not in of_files), ended


_ENGINE = """
from verl_runs import *
from async_ckpt.integrations.verl import engines
from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp import transformer_impl
transformer_impl.log_gpu_memory_usage = lambda *_, **__: None  # asks a GPU
found = {}
for vendor in ("", "async_ckpt"):
    os.environ["VERL_ENGINE_VENDOR"] = vendor
    for model_type in ("language_model", "value_model"):
        for backend in ("fsdp", "fsdp2"):
            found[f"{vendor} {model_type} {backend}"] = EngineRegistry.get_engine_cls(model_type, backend).__name__
here.tell(found)

class Engine(engines.LanguageModelEngine):
    # verl's engine builds its model on a GPU. All else is verl's own: with weights that stay on the host, it moves none.
    def __init__(self, training):
        self.training, self.checkpoint_config = training, training.manager.checkpoint_config
        self._is_offload_param = self._is_offload_optimizer = False
        self._uses_fsdp2_cpu_offload_policy = True
        self.model_config = SimpleNamespace(get_processor=tokenizer_of, trust_remote_code=False)
        self.engine_config = SimpleNamespace(forward_only=False)
        self.optimizer_config = SimpleNamespace(total_training_steps=4)
    def _build_model_optimizer(self):
        self.module, self.optimizer = self.training.model, self.training.optimizer
        self.lr_scheduler = self.training.scheduler

root = os.environ["RUN"]
training = Training(root)
engine = Engine(training)
engine.initialize()
here.tell(type(engine.checkpoint_manager).__module__)
training.trainer.actor_rollout_wg = training.manager = engine
training.train(4)
here.tell(files_in(root + "/global_step_4/actor"))  # durable: it is the last step
engine.checkpoint_manager.trainer_went_on()  # as when weights are asked for
dist.barrier()
here.tell(tracked(root))
other = Training(root)
other.resume()
here.tell(other.digest() == training.digest())
engine.save_checkpoint(None)
"""


def test_verls_registry_gives_engines_with_our_manager_whose_last_save_is_durable(worlds, tmp_path):
    for end in worlds.run(2, _ENGINE, RUN=str(tmp_path)):
        found, manager, names, *others = end.told
        assert {cls for key, cls in found.items() if key.startswith("async_ckpt")} == {
            "LanguageModelEngine",
            "ValueModelEngine",
        }
        assert all(cls.startswith("FSDPEngine") for key, cls in found.items() if not key.startswith("async_ckpt"))
        assert manager == "async_ckpt.integrations.verl.checkpoint_manager"
        assert {"training.tar/manifest.json", "huggingface/config.json", "fsdp_config.json"} <= {*names}
        assert ".async_ckpt.saving" not in names
        assert others == [4, True]
