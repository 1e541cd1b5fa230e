"""Ray Train: real workers, whose steps Ray knows as soon as they are durable, and from which a killed training goes on.

Workers are killed at 20 moments that are drawn at random, and the tests try one of them. All of them are tried by
`ASYNC_CKPT_MATRICES=all pytest tests/frameworks/ray -k whenever`.
"""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from children import die_at
from slices import some

pytest.importorskip("ray", reason="ray is not installed: make test-frameworks")
pytest.importorskip("pyarrow", reason="pyarrow, which Ray Train needs, is not installed: make test-frameworks")

import fsspec
import pyarrow.fs
import ray
import ray.train
from ray.train import CheckpointConfig, FailureConfig, Result, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

import async_ckpt
from async_ckpt.integrations.ray_train import RayCheckpointer

pytestmark = pytest.mark.filterwarnings("ignore")  # Ray's own


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    here = Path(__file__).resolve().parent
    folders = (here, here.parents[1] / "support", here.parents[2])
    path = os.pathsep.join((*map(str, folders), os.environ.get("PYTHONPATH", "")))
    ray.init(
        num_cpus=4,
        include_dashboard=False,
        log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": path}},
    )
    yield
    ray.shutdown()


NEVER = 10**9
NUM_KILLS = 20


def die_once(config: dict[str, Any], rank: int) -> Callable[[], int]:
    """Have this worker die at a call that changes the disk, unless one has died before. Returns the count so far."""
    died = Path(config["losses"], "died")

    def die() -> None:
        died.touch()
        os.kill(os.getpid(), signal.SIGKILL)

    return die_at(NEVER if died.exists() else config["dies_at_call"].get(rank, NEVER), die)


def loop(config: dict[str, Any]) -> None:
    """A training whose data follow the step and the rank; each worker appends its losses to a file of its own."""
    rank, world = ray.train.get_context().get_world_rank(), ray.train.get_context().get_world_size()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    trained: Any = torch.nn.parallel.DistributedDataParallel(model) if world > 1 else model
    state = {"model": model, "optimizer": optimizer}
    count = die_once(config, rank) if "dies_at_call" in config else None
    with RayCheckpointer(guard=optimizer, options=config.get("options")) as ckpt:
        start = ckpt.restore(state)
        for step in range(0 if start is None else start + 1, config["steps"]):
            data = torch.Generator().manual_seed(step)
            batch = torch.randn(12, 8, generator=data)[rank :: max(1, world)]
            optimizer.zero_grad()
            loss = trained(batch).square().mean()
            loss.backward()
            optimizer.step()
            with open(Path(config["losses"], f"{world}-{rank}.jsonl"), "a") as file:
                file.write(json.dumps([step, loss.item().hex()]) + "\n")
            if config.get("dies_at") == step and rank == world - 1 and not Path(config["losses"], "died").exists():
                ckpt.wait()
                Path(config["losses"], "died").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            handle = ckpt.save(state, step, record={"score": -abs(step - 2)})
            if config.get("is_silent_at") == step and start is None:
                ckpt.wait()  # durable, but Ray has not heard of it
                os.kill(os.getpid(), signal.SIGKILL)
            ckpt.report({"score": -abs(step - 2)}, handle)
    Path(config["losses"], f"ended-{world}-{rank}").write_text(str(count and count()))


def fit(
    tmp_path: Path,
    *,
    workers: int = 2,
    max_failures: int = 0,
    keep: CheckpointConfig | None = None,
    storage: tuple[str, pyarrow.fs.FileSystem] | None = None,
    **config: Any,
) -> Result:
    path, filesystem = storage or (str(tmp_path / "storage"), None)
    losses = tmp_path / "losses"
    losses.mkdir(exist_ok=True)
    return TorchTrainer(
        loop,
        train_loop_config={"losses": str(losses), "steps": 5, **config},
        scaling_config=ScalingConfig(num_workers=workers, resources_per_worker={"CPU": 1}),
        run_config=RunConfig(
            name="run",
            storage_path=path,
            storage_filesystem=filesystem,
            checkpoint_config=keep or CheckpointConfig(),
            failure_config=FailureConfig(max_failures=max_failures),
        ),
    ).fit()


def losses_of(tmp_path: Path, name: str) -> dict[int, str]:
    """The loss of each step, the last where it was trained twice."""
    return dict(json.loads(line) for line in (tmp_path / "losses" / name).read_text().splitlines())


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a training of two workers has run that was not killed, and has counted its calls."""
    folder = tmp_path_factory.mktemp("whole")
    fit(folder, dies_at_call={})
    return folder


def steps_in(result: Result) -> list[str]:
    return [Path(checkpoint.path).name for checkpoint, _ in result.best_checkpoints]


def test_ray_has_each_step_once_it_is_durable_and_deletes_by_its_own_rules(tmp_path):
    keep = CheckpointConfig(num_to_keep=2, checkpoint_score_attribute="score")
    result = fit(tmp_path, keep=keep)
    assert Path(result.checkpoint.path) == tmp_path / "storage/run/step_00000004"
    left = {path.name for path in (tmp_path / "storage/run").glob("step_*")}
    assert left == {*steps_in(result), "step_00000004"}  # the newest is kept beside the best two
    assert len(steps_in(result)) == 2
    assert "step_00000002" in steps_in(result)
    assert result.metrics["async_ckpt/saves_committed"] >= 1
    for checkpoint, _ in result.best_checkpoints:
        assert async_ckpt.verify(checkpoint.path).num_archives
    state = async_ckpt.load(result.checkpoint.path)
    assert set(state) == {"model", "optimizer"}


def test_a_training_whose_worker_is_killed_goes_on_with_the_same_losses_and_then_on_fewer(whole, tmp_path):
    fit(tmp_path, max_failures=1, dies_at=3)
    assert (tmp_path / "losses/died").exists()
    for rank in range(2):
        assert losses_of(tmp_path, f"2-{rank}.jsonl") == losses_of(whole, f"2-{rank}.jsonl")
    result = fit(tmp_path, workers=1, steps=7)
    assert Path(result.checkpoint.path).name == "step_00000006"
    assert list(losses_of(tmp_path, "1-0.jsonl")) == [5, 6]


def test_whenever_a_worker_is_killed_training_goes_on_from_a_durable_step_with_the_same_losses(whole, tmp_path):
    """Killed at calls that change the disk, a write half done."""
    calls = [int((whole / f"losses/ended-2-{rank}").read_text()) for rank in range(2)]
    losses = [losses_of(whole, f"2-{rank}.jsonl") for rank in range(2)]
    for number in some(range(NUM_KILLS), NUM_KILLS):
        folder, rank = tmp_path / f"killed-{number}", number % 2
        folder.mkdir()
        moment = random.Random(number).randrange(1, 1 + calls[rank])
        result = fit(folder, max_failures=1, dies_at_call={rank: moment})
        assert Path(result.checkpoint.path).name == "step_00000004"
        assert async_ckpt.verify(folder / "storage/run").steps == tuple(range(5))
        for of_rank, expected in enumerate(losses):
            lines = (folder / f"losses/2-{of_rank}.jsonl").read_text().splitlines()
            assert {step: loss for step, loss in map(json.loads, lines) if expected[step] != loss} == {}
            assert losses_of(folder, f"2-{of_rank}.jsonl").keys() == expected.keys()


def test_a_run_in_a_store_goes_on_after_a_kill_and_ray_deletes_there_by_its_own_rules(whole, s3, bucket, tmp_path):
    filesystem = pyarrow.fs.S3FileSystem(
        access_key=s3.options["access_key_id"],
        secret_key=s3.options["secret_access_key"],
        region=s3.options["region"],
        endpoint_override=s3.endpoint,
    )
    result = fit(
        tmp_path,
        max_failures=1,
        keep=CheckpointConfig(num_to_keep=2),
        storage=(f"{bucket}/runs", filesystem),
        options=s3.options,
        dies_at=3,
    )
    assert (tmp_path / "losses/died").exists()
    for rank in range(2):
        assert losses_of(tmp_path, f"2-{rank}.jsonl") == losses_of(whole, f"2-{rank}.jsonl")
    assert result.checkpoint.path == f"{bucket}/runs/run/step_00000004"
    kept = {key.split("/")[2] for key in s3.keys(bucket) if "/step_" in key}
    assert kept == {"step_00000003", "step_00000004"}
    where = async_ckpt.Place(f"s3://{result.checkpoint.path}", options=s3.options)
    assert set(async_ckpt.load(where)) == {"model", "optimizer"}


def without_group(config: dict[str, Any]) -> None:
    torch.distributed.destroy_process_group()
    state = {"w": torch.zeros(3), "step": -1}
    for newest in (None, 1):
        with RayCheckpointer() as ckpt:
            assert ckpt.restore(state) == newest
            for step in range(2):
                state["step"] = step + (newest or 0) + (newest is not None)
                ckpt.report({}, ckpt.save(state, state["step"]))


def test_workers_without_a_process_group_agree_by_a_store_of_their_own(tmp_path):
    trainer = TorchTrainer(
        without_group,
        train_loop_config={},
        scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 1}),
        run_config=RunConfig(name="run", storage_path=str(tmp_path)),
    )
    trainer.fit()
    assert async_ckpt.verify(tmp_path / "run").steps == (0, 1, 2, 3)


def unknown_storage(config: dict[str, Any]) -> None:
    RayCheckpointer()


def test_a_storage_file_system_whose_url_is_not_known_is_refused(tmp_path):
    """One of Python's own, say, of which only its kind is known."""
    filesystem = pyarrow.fs.PyFileSystem(pyarrow.fs.FSSpecHandler(fsspec.filesystem("local")))
    trainer = TorchTrainer(
        unknown_storage,
        scaling_config=ScalingConfig(num_workers=1, resources_per_worker={"CPU": 1}),
        run_config=RunConfig(name="run", storage_path=str(tmp_path), storage_filesystem=filesystem),
    )
    with pytest.raises(ray.train.TrainingFailedError, match="which async_ckpt has no URL for"):
        trainer.fit()


def test_steps_that_ray_has_not_heard_of_are_reported_when_one_is_restored(tmp_path):
    result = fit(tmp_path, max_failures=1, is_silent_at=2)
    assert sorted(steps_in(result)) == [f"step_{step:08d}" for step in range(5)]
    scores = {Path(checkpoint.path).name: metrics["score"] for checkpoint, metrics in result.best_checkpoints}
    assert scores["step_00000002"] == 0


def failing(config: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match="CheckpointConfig"):
        RayCheckpointer(keep=3)
    with RayCheckpointer() as ckpt:
        with pytest.raises(ValueError, match="one by one"):
            ckpt.save({"a": {"w": torch.zeros(3)}}, 0, unchanged={"a"})
        handle = ckpt.save({"w": torch.zeros(3)}, 0)
        ckpt.report({}, handle)
        ckpt.wait()
        (Path(config["storage"]) / "run/step_00000001").write_text("a file where the folder would be")
        ckpt.report({}, ckpt.save({"w": torch.zeros(3)}, 1))
        ckpt.wait()


def test_a_save_that_fails_fails_the_training(tmp_path):
    trainer = TorchTrainer(
        failing,
        train_loop_config={"storage": str(tmp_path)},
        scaling_config=ScalingConfig(num_workers=1, resources_per_worker={"CPU": 1}),
        run_config=RunConfig(name="run", storage_path=str(tmp_path)),
    )
    with pytest.raises(ray.train.TrainingFailedError, match="step_00000001"):
        trainer.fit()
    assert async_ckpt.verify(tmp_path / "run").steps == (0,)
