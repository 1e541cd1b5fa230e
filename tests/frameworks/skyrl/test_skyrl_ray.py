"""SkyRL's trainer, its dispatch and its workers as actors of Ray: saved behind the training, killed, and resumed."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("skyrl", reason="skyrl is not installed: make test-frameworks")

import ray
from skyrl_workers import TrainingByWorkers, kept_model

pytestmark = pytest.mark.filterwarnings("ignore")  # Ray's own
LATEST = "latest_ckpt_global_step.txt"


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    here = Path(__file__).resolve().parent
    folders = (here.parents[1] / "support", here.parents[2])
    path = os.pathsep.join((*map(str, folders), os.environ.get("PYTHONPATH", "")))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
        ray.init(
            num_cpus=4,
            num_gpus=4,  # two for each training: SkyRL gives none back
            object_store_memory=100 * 2**20,
            include_dashboard=False,
            log_to_driver=False,
            runtime_env={"env_vars": {"PYTHONPATH": path, "GLOO_SOCKET_IFNAME": "lo"}},
        )
        yield
        ray.shutdown()


def shown(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if path.name[0] != "." and path.name != "history.jsonl")


def archives(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("policy/async_ckpt/step_*/*.tar"))


def test_two_workers_train_while_nothing_is_durable_and_killed_they_resume_with_the_same_losses(tmp_path):
    model, root = kept_model(tmp_path / "model"), tmp_path / "run"
    one = TrainingByWorkers(tmp_path / "whole", model)
    losses = one.train(6)
    one.begin(root)
    assert one.train(2) == losses[:2]
    assert one.trainer.save_checkpoints() == str(root / "global_step_2")
    one.trainer.wait_for_checkpoints()
    assert shown(root) == ["global_step_2", LATEST]
    assert len(archives(root / "global_step_2")) == 2

    one.train(4)
    one.on_each("hold_files")
    one.trainer.save_checkpoints()
    assert one.train(5) == losses[4:5]  # while nothing of step 4 is durable
    assert one.on_each("has_pending_save") == [True, True]
    os.kill(one.on_each("pid")[1], signal.SIGKILL)
    with pytest.raises(ray.exceptions.RayActorError):
        one.trainer.wait_for_checkpoints()
    assert (shown(root), (root / LATEST).read_text()) == (["global_step_2", LATEST], "2")
    one.end()

    again = TrainingByWorkers(root, model)
    assert again.resume() == 2
    assert again.train(4) == losses[2:4]
    again.on_each("break_disk_of", 1)
    again.trainer.save_checkpoints()
    # As that rank's own error, or as rank 0's PeerFailedError: Ray raises the one that comes first.
    with pytest.raises(Exception, match="the disk of rank 1 is broken"):
        again.trainer.wait_for_checkpoints()
    again.trainer.save_checkpoints()
    assert again.train(6) == losses[4:]
    again.trainer.wait_for_checkpoints()
    assert (shown(root), (root / LATEST).read_text()) == (["global_step_2", "global_step_4", LATEST], "4")
    assert not [path.name for path in root.iterdir() if path.name.startswith(".")]
    again.end()
