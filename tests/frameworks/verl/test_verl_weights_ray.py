"""verl's own manager, registry and workers, as actors of Ray, with our checkpoint engine: two ranks and two rollouts."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("verl", reason="verl is not installed: make test-frameworks")

import ray
from verl_rollouts import Exporter, Replica, config_of, group_of, manager_of
from verl_syncs import digest, weights_at

pytestmark = pytest.mark.filterwarnings("ignore")  # Ray's own


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    here = Path(__file__).resolve()
    folders = (here.parents[2] / "support", here.parents[3])
    path = os.pathsep.join((*map(str, folders), os.environ.get("PYTHONPATH", "")))
    ray.init(
        num_cpus=8,
        object_store_memory=100 * 2**20,
        include_dashboard=False,
        log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": path, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}},
    )
    yield
    ray.shutdown()


def test_the_manager_syncs_its_rollouts_which_a_killed_one_leaves_whole_and_another_joins(tmp_path):
    config = config_of(tmp_path / "root", cache=str(tmp_path / "cache"))
    exporters = group_of(Exporter, 2, config=config)
    replicas = [Replica(config), Replica(config)]
    manager = manager_of(config, exporters, replicas)

    def sync(step: int) -> None:
        exporters.train_to(step)
        metrics = manager.update_weights(global_steps=step)
        assert metrics["async_ckpt/num_bytes"] == sum(tensor.nbytes for tensor in weights_at(step).values())
        want = digest(weights_at(step))
        assert [one.group.taken() for one in manager.replicas] == [[(want, "named_tensors", step)]] * 2
        assert [one.group.taken_again() for one in manager.replicas] == [[want]] * 2

    for step in (1, 2):
        sync(step)
    in_order = ["abort_all_requests", "release_kv_cache", "resume_kv_cache", "resume_generation"]
    assert replicas[0].asked == in_order * 2

    os.kill(replicas[1].group.process()[0], signal.SIGKILL)
    exporters.train_to(3)
    with pytest.raises(ray.exceptions.RayActorError):
        manager.update_weights(global_steps=3)
    manager.remove_replicas([replicas[1]])
    manager.add_replicas([Replica(config)])
    sync(3)
    assert not (tmp_path / "cache").exists()  # all came from memory
