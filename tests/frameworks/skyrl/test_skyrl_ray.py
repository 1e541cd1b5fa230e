"""SkyRL's trainer, its dispatch and its workers as actors of Ray: two workers save behind the training, and one fails."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("skyrl", reason="skyrl is not installed: make test-frameworks")

import ray
from skyrl_runs import BackgroundTrainer, cpu_workers, trainer_of

pytestmark = pytest.mark.filterwarnings("ignore")  # Ray's own


@pytest.fixture(scope="module")
def dispatch() -> Iterator[Any]:
    """SkyRL's dispatch to two workers. The GPUs that it asks Ray for are numbers only."""
    here = Path(__file__).parent
    path = os.pathsep.join((str(here.parents[1] / "support"), str(here.parents[2]), os.environ.get("PYTHONPATH", "")))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
        ray.init(
            num_cpus=4,
            num_gpus=2,
            include_dashboard=False,
            log_to_driver=False,
            runtime_env={"env_vars": {"PYTHONPATH": path}},
        )
        yield cpu_workers()
        ray.shutdown()


def on_workers(dispatch: Any, name: str, *arguments: Any) -> list[Any]:
    return ray.get(dispatch._actor_groups["policy"].async_run_ray_method("pass_through", name, *arguments))


def shown(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if not path.name.startswith("."))


def test_latest_waits_for_the_workers_whose_errors_reach_the_trainer_and_who_train_meanwhile(dispatch, tmp_path):
    trainer = trainer_of(BackgroundTrainer, str(tmp_path), dispatch)
    trainer.global_step = 1
    on_workers(dispatch, "train", 1)
    on_workers(dispatch, "hold_files", True)
    assert trainer.save_checkpoints() == str(tmp_path / "global_step_1")
    losses = on_workers(dispatch, "train", 3)  # while nothing is durable
    assert on_workers(dispatch, "has_pending_save") == [True, True]
    assert shown(tmp_path) == []
    on_workers(dispatch, "hold_files", False)
    trainer.wait_for_checkpoints()
    assert shown(tmp_path) == ["global_step_1", "latest_ckpt_global_step.txt"]
    assert len(list(tmp_path.glob("global_step_1/policy/async_ckpt/step_*/*.tar"))) == 2

    trainer.global_step = 3
    on_workers(dispatch, "break_disk_of", 1)
    trainer.save_checkpoints()
    with pytest.raises(Exception, match="the disk of rank 1 is broken"):
        trainer.wait_for_checkpoints()
    assert shown(tmp_path) == ["global_step_1", "latest_ckpt_global_step.txt"]

    assert trainer.load_checkpoints() == (1, str(tmp_path / "global_step_1"))
    on_workers(dispatch, "set_step", 1)
    assert on_workers(dispatch, "train", 3) == losses
