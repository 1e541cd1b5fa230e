"""Our checkpoint engine in the workers of a training and of rollouts, by the calls of verl's manager: whole weights or an
error, whoever dies."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from slices import some

pytest.importorskip("verl", reason="verl is not installed: make test-frameworks")

from verl_syncs import BUCKET_BYTES, AsyncCkptEngine, Job, digest, job, outcome, weights_at

import async_ckpt
from async_ckpt.integrations.verl_weights import weight_engine

WARM = ("verl_syncs",)


def at(step: int) -> str:
    return digest(weights_at(step))


def published(root: Path) -> dict[int, bool]:
    """The versions at a root, and whether each has files of whole weights."""
    folders = {int(path.name[8:]): path for path in root.glob("weight_v*")}
    weights = sum(tensor.nbytes for tensor in weights_at(0).values())
    return {
        number: sum(file.stat().st_size for file in path.glob("*.safetensors")) > weights
        for number, path in sorted(folders.items())
    }


def pulled(root: Path, step: int) -> bool:
    with async_ckpt.Subscriber(root) as subscriber:
        subscriber.pull(root.parent / "pulled", step)
    return digest(async_ckpt.load(root.parent / "pulled")) == at(step)


# --- the ways -----------------------------------------------------------------------------------------------------


def test_rollouts_on_the_host_get_the_weights_from_memory_while_nothing_is_durable(nursery, tmp_path):
    with job(nursery, tmp_path, cache=str(tmp_path / "cache")) as one:
        assert one.sync(1) == [at(1)] * 2
        one.senders[0].call("wait_durable")  # a version waits for the one before
        one.senders[0].call("hold_disk")
        assert one.sync(2) == [at(2)] * 2
        assert [worker.call("get") for worker in one.receivers] == [at(2)] * 2
        assert 2 not in published(tmp_path / "root")
        one.senders[0].call("release_disk")
        assert one.sync(3) == [at(3)] * 2
    assert published(tmp_path / "root") == {1: True, 2: False, 3: False}
    assert not (tmp_path / "cache").exists()
    assert pulled(tmp_path / "root", 3)


def test_rollouts_elsewhere_share_one_folder_of_their_host_and_read_only_deltas(nursery, tmp_path):
    with job(nursery, tmp_path, local=False, cache=str(tmp_path / "cache")) as one:
        assert one.sync(1) == [at(1)] * 2
        inode = (tmp_path / "cache" / "model.safetensors").stat().st_ino
        for step in (2, 3):
            assert one.sync(step) == [at(step)] * 2
            assert [worker.call("get") for worker in one.receivers] == [at(step)] * 2
        assert (tmp_path / "cache" / "model.safetensors").stat().st_ino == inode  # deltas were applied in place
    assert published(tmp_path / "root") == {1: True, 2: False, 3: False}


def test_a_rollout_elsewhere_gets_from_the_root_what_its_neighbours_get_from_memory(nursery, tmp_path):
    with job(nursery, tmp_path, cache=str(tmp_path / "cache")) as one:
        one.receivers[1].call("be_elsewhere")
        for step in (1, 2):
            assert one.sync(step) == [at(step)] * 2
            assert step in published(tmp_path / "root")  # the sync of a rollout elsewhere ends durably
    assert (tmp_path / "cache").exists()


@pytest.mark.parametrize("is_elsewhere", [True, False], ids=["elsewhere", "host"])
def test_rollouts_get_the_weights_through_a_store(nursery, tmp_path, s3, bucket, is_elsewhere):
    root, cache = f"s3://{bucket}/weights", tmp_path / "cache"
    with job(nursery, tmp_path, root=root, options=s3.options, cache=str(cache)) as one:
        if is_elsewhere:
            one.receivers[0].call("be_elsewhere")
        for step in (1, 2, 3):
            assert one.sync(step) == [at(step)] * 2
        one.senders[0].call("wait_durable")
    assert cache.exists() is is_elsewhere
    with async_ckpt.Subscriber(async_ckpt.Place(root, options=s3.options)) as subscriber:
        assert subscriber.versions() == [1, 2, 3]
        assert subscriber.pull(tmp_path / "pulled").num_versions == 3  # an anchor and two deltas
    assert digest(async_ckpt.load(tmp_path / "pulled")) == at(3)


def test_weights_of_float32_are_published_whole(nursery, tmp_path):
    with job(nursery, tmp_path, senders=1, receivers=1) as one:
        for step in (1, 2):
            [got] = one.sync(step, dtype="float32")
            assert got == digest(weights_at(step, torch.float32))
    assert published(tmp_path / "root") == {1: True, 2: True}


def test_a_training_that_is_set_back_and_one_that_counts_nothing_send_what_they_have(nursery, tmp_path):
    with job(nursery, tmp_path, local=False, cache=str(tmp_path / "cache")) as one:
        for step, content in ((5, 1), (5, 2), (3, 3), (4, 4)):
            assert one.sync(step, content) == [at(content)] * 2
        assert one.sync(None, 6) == [at(6)] * 2
    assert [*published(tmp_path / "root")] == [3, 4, 5]


def test_descriptors_and_files_stay_as_many_over_many_syncs(nursery, tmp_path):
    with job(nursery, tmp_path, publisher={"keep": 3}) as one:
        counts = []
        for step in range(1, 31):
            assert one.sync(step) == [at(step)] * 2
            counts.append([worker.call("num_descriptors") for worker in (*one.senders, *one.receivers)])
        # Files of a version are open while it becomes durable, so counts differ by a few; one for each sync would be 20.
        assert max(map(max, counts[20:])) <= max(map(max, counts[5:10])) + 10
        assert len(published(tmp_path / "root")) <= 30


# --- who dies, or cannot go on ------------------------------------------------------------------------------------


def test_the_sender_dies_and_the_rollouts_say_so_and_have_the_weights_of_before(nursery, tmp_path):
    with job(nursery, tmp_path, cache=str(tmp_path / "cache")) as one:
        assert one.sync(1) == [at(1)] * 2
        one.senders[0].call("wait_durable")
        one.prepare()
        for worker in one.receivers:
            worker.ask("receive", 2)
        one.senders[0].kill()
        for worker in one.receivers:
            with pytest.raises(RuntimeError, match="PeerFailedError: rank 0 of the training has ended"):
                worker.answer()
            assert worker.call("get") == at(1)
        one.replace_dead()
        assert one.sync(2) == [at(2)] * 2


def test_a_rollout_that_dies_between_two_tensors_holds_up_nobody(nursery, tmp_path):
    with job(nursery, tmp_path) as one:
        one.receivers[0].call("die_at_tensor", 2)
        assert one.sync(1) == [""]
        assert one.receivers[1].call("get") == at(1)
        one.replace_dead()
        assert one.sync(2) == [at(2)] * 2


def test_another_model_and_tensors_that_cannot_be_sent_are_an_error_of_all_and_the_next_sync_is_whole(
    nursery, tmp_path
):
    with job(nursery, tmp_path) as one:
        assert one.sync(1) == [at(1)] * 2
        errors = one.sync(2, dtype="float16")
        assert len(errors) == 3  # that of the other rank is none
        assert all("StateMismatchError" in error for error in errors)
        errors = one.sync(2, fails_at=1)
        assert len(errors) == 3
        assert all("UnsupportedStateError: 'twice': a sparse tensor" in error for error in errors)
        assert [worker.call("get") for worker in one.receivers] == [at(1)] * 2
        assert one.sync(2) == [at(2)] * 2


def test_a_broken_disk_is_an_error_of_all_who_need_it(nursery, tmp_path):
    with job(nursery, tmp_path, local=False, cache=str(tmp_path / "cache")) as one:
        assert one.sync(1) == [at(1)] * 2
        one.senders[0].call("refuse_disk")
        errors = one.sync(2)
        assert len(errors) == 3
        assert all("the disk is broken" in error for error in errors)
        assert [worker.call("get") for worker in one.receivers] == [at(1)] * 2


def test_the_first_of_two_trainings_at_one_root_is_told(nursery, tmp_path):
    with job(nursery, tmp_path) as first:
        assert first.sync(1) == [at(1)] * 2
        with job(nursery, tmp_path) as second:
            assert second.sync(2, 7) == [at(7)] * 2
            errors = first.sync(3)
            assert len(errors) == 3
            assert all("ClosedError" in error for error in errors)
            assert second.sync(3, 8) == [at(8)] * 2


def test_rollouts_that_wait_for_another_step_are_told(nursery, tmp_path):
    with job(nursery, tmp_path, senders=1, receivers=1) as one:
        one.prepare()
        one.senders[0].ask("send", 1, 1)
        one.receivers[0].ask("receive", 2)
        assert "has sent version 1, but 2 was expected" in str(outcome(one.receivers[0]))


def test_a_sender_that_sends_nothing_is_waited_for_until_the_deadline(nursery, tmp_path):
    with job(nursery, tmp_path, senders=1, receivers=1, timeout_seconds=0.2) as one:
        one.prepare()
        with pytest.raises(RuntimeError, match=r"has sent no weights for 0\.2 s"):
            one.receivers[0].call("receive", 1)


# --- killed at many moments ---------------------------------------------------------------------------------------


def survive(one: Job, step: int) -> None:
    """A sync in which somebody may die; then all that live have whole weights, and the next sync is whole."""
    allowed = {at(step), at(step - 1)}
    one.sync(step)
    for worker in [*one.senders, *one.receivers]:  # who has died after its last answer, while all became durable, too
        if worker.is_alive:
            worker.ask("live_on")
            outcome(worker)
    for worker in [worker for worker in one.receivers if worker.is_alive]:
        held = outcome_of_get(worker)
        assert held in allowed or "NotCommittedError" in held or "ClosedError" in held, held
    one.replace_dead()
    assert one.sync(step + 1) == [at(step + 1)] * 2
    assert [worker.call("get") for worker in one.receivers] == [at(step + 1)] * 2


def outcome_of_get(worker) -> str:
    worker.ask("get")
    return str(outcome(worker))


@pytest.mark.parametrize("way", ["memory", "root"])
@pytest.mark.parametrize("moment", some(range(25), 3))
def test_after_a_kill_at_a_random_moment_all_have_whole_weights(nursery, tmp_path, way, moment):
    chosen = random.Random(f"{way} {moment}")
    options = {} if way == "memory" else {"local": False, "cache": str(tmp_path / "cache")}
    with job(nursery, tmp_path, **options) as one:
        assert one.sync(1) == [at(1)] * 2
        one.senders[0].call("wait_durable")  # the moment is one of the next sync
        if chosen.random() < 0.5:  # a sync makes about thirty such calls in the sender, and a pull as many
            one.senders[0].call("die_at_call", chosen.randint(1, 40))
        elif way == "root" and chosen.random() < 0.5:
            one.receivers[0].call("die_at_call", chosen.randint(1, 40))
        else:
            one.receivers[chosen.randrange(2)].call("die_at_tensor", chosen.randint(1, 6))
        survive(one, 2)


# --- arguments, and other versions of verl ------------------------------------------------------------------------


def test_arguments_that_are_not_valid_are_refused_when_the_engine_is_made(tmp_path):
    def make(root: object = tmp_path / "root", **options: object) -> AsyncCkptEngine:
        return AsyncCkptEngine(BUCKET_BYTES, str(root) if root else None, **options)

    with pytest.raises(ValueError, match=r"engine_kwargs\.async_ckpt\.root="):
        make(root=None)
    with pytest.raises(ValueError, match="timeout_seconds must be a number of seconds above 0"):
        make(timeout_seconds=0)
    with pytest.raises(ValueError, match="publisher has no option 'kep'; there are anchor_every, keep"):
        make(is_master=True, publisher={"kep": 3})
    with pytest.raises(ValueError, match='encoding must be "xor"'):
        make(is_master=True, publisher={"encoding": "gzip"})
    with pytest.raises(ValueError, match="options= and engine= are for URLs"):
        make(options={"region": "x"})


def test_calls_outside_of_a_sync_are_refused(tmp_path):
    engine = AsyncCkptEngine(BUCKET_BYTES, str(tmp_path))
    with pytest.raises(RuntimeError, match="send_weights was called outside of a sync"):
        asyncio.run(engine.send_weights(iter(())))

    async def first(weights) -> None:
        await anext(weights)

    with pytest.raises(RuntimeError, match="receive_weights was called outside of a sync"):
        asyncio.run(first(engine.receive_weights()))
    with pytest.raises(async_ckpt.NotCommittedError, match="no weights were received yet"):
        asyncio.run(first(engine.get_weights()))


def test_a_topology_without_a_sender_or_with_several_roots_is_refused(tmp_path):
    receivers = [AsyncCkptEngine(BUCKET_BYTES, str(tmp_path / name)).prepare() for name in ("a", "b")]
    with pytest.raises(ValueError, match=r"1 training ranks \(rank 0 first\) and 1 rollout workers were expected"):
        AsyncCkptEngine.build_topology(1, 1, receivers)
    sender = {**receivers[0], "address": ("127.0.0.1", 1, "sync")}
    with pytest.raises(ValueError, match="the workers have different roots"):
        AsyncCkptEngine.build_topology(1, 2, [sender, *receivers])


def test_a_sender_that_is_gone_before_the_sync_is_named(tmp_path):
    engine = AsyncCkptEngine(BUCKET_BYTES, str(tmp_path))
    with pytest.raises(async_ckpt.PeerFailedError, match="cannot be reached at 127"):
        engine.init_process_group("receiver", ("127.0.0.1", 9, "sync"), 0)


@pytest.mark.parametrize(
    ("methods", "what"), [({"pause_weights"}, "pause_weights is new"), ({"finalize"}, "finalize is gone")]
)
def test_an_interface_that_has_moved_is_named_when_the_engine_is_registered(monkeypatch, methods, what):
    moved = type("Moved", (), {"__abstractmethods__": weight_engine._METHODS ^ methods})
    monkeypatch.setattr(weight_engine, "CheckpointEngineWithCache", moved)
    with pytest.raises(RuntimeError, match=rf"has changed \({what}.*install verl 0\.9"):
        weight_engine._refuse_other_methods()


def test_another_version_of_verl_is_one_warning():
    code = "import verl; verl.__version__ = '0.12.0'; import async_ckpt.integrations.verl_weights"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stderr.count("verl 0.12.0 was not tested with async_ckpt") == 1


def test_the_folder_of_the_host_may_not_be_another_user_s(nursery, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    (tmp_path / f"async_ckpt-weights-{os.getuid()}").mkdir()
    os.chmod(tmp_path / f"async_ckpt-weights-{os.getuid()}", 0o777)
    with job(nursery, tmp_path, senders=1, receivers=1, local=False, temporary=str(tmp_path)) as one:
        errors = one.sync(1)
        assert any("others may write to it" in error for error in errors)
