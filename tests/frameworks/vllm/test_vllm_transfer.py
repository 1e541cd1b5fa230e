"""The transfer engines `async_ckpt` of vLLM: a training's snapshots, and stored weights, in a worker that runs."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from children import Nursery
from racing import until
from served_engines import ServedEngine

import async_ckpt

pytest.importorskip("vllm", reason="vllm is not installed: make test-vllm")

from vllm_engines import Decoder, Worker

from async_ckpt.integrations.vllm import SenderInit, SnapshotSource, StoredWeights

WARM = ("vllm_engines",)


def sender(client: Any, source: Any = None, rank: int = 0, **options: Any) -> Any:
    from vllm.distributed.weight_transfer import WeightTransferTrainerFactory

    return WeightTransferTrainerFactory.trainer_init(SenderInit(rank=rank, **options), client=client, source=source)


def has(model: torch.nn.Module, wanted: torch.nn.Module) -> bool:
    return all(torch.equal(tensor, wanted.state_dict()[name]) for name, tensor in model.state_dict().items())


def step(model: Decoder) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 1


@pytest.fixture
def buckets(quick_path: Path) -> Path:
    """Where buckets are put; nothing may be left there."""
    folder = quick_path / "buckets"
    folder.mkdir()
    yield folder
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("bucket_bytes", [1, 3000, 1 << 30])
def test_a_running_engine_takes_the_weights_of_one_snapshot_after_the_other(buckets, bucket_bytes):
    trained, worker = Decoder(), Worker()
    with async_ckpt.snapshot({"model": trained}) as snap:
        source = SnapshotSource(snap["model"])
        engine = sender(worker, source, buckets=str(buckets), bucket_bytes=bucket_bytes)
        step(trained)  # the snapshot is of before
        engine.send_weights(version=1)
        assert not has(worker.model, trained)
    with async_ckpt.snapshot({"model": trained}) as snap:
        source.renew(snap["model"])
        engine.send_weights(version=2)

    assert has(worker.model, trained)
    assert worker.version == "2"
    assert worker.num_updates == {1: 12, 3000: 6, 1 << 30: 2}[bucket_bytes]
    engine.shutdown()


@pytest.mark.parametrize("kind", ["archive", "version"])
def test_a_running_engine_takes_stored_weights(tmp_path, kind):
    trained, worker = Decoder(), Worker()
    if kind == "archive":
        async_ckpt.save({"model": trained, "epoch": 1}, tmp_path / "x.tar").result()
        weights = StoredWeights(str(tmp_path / "x.tar"))
    else:
        with async_ckpt.Publisher(tmp_path / "weights") as publisher:
            publisher.publish(trained, version=7).result()
        weights = StoredWeights(str(tmp_path / "weights"), version=7)

    sender(worker, folder=str(tmp_path / "local")).send_weights(weights, version=7)

    assert has(worker.model, trained)
    assert worker.version == "7"


def test_nothing_is_asked_of_an_engine_for_weights_that_are_not_there(tmp_path, buckets):
    worker = Worker()
    engine = sender(worker, buckets=str(buckets))

    with pytest.raises(async_ckpt.NotCommittedError):
        engine.send_weights(StoredWeights(str(tmp_path / "nowhere")))
    with pytest.raises(ValueError, match="without a source"):
        engine.send_weights()

    worker.start_weight_update()  # it is not in the middle of one


def test_a_snapshot_that_is_closed_is_read_to_its_end_and_not_again(buckets):
    trained, worker = Decoder(), Worker()
    snap = async_ckpt.snapshot({"model": trained})
    worker.model.before_weight = lambda name: snap.close()  # type: ignore[assignment]
    engine = sender(worker, SnapshotSource(snap["model"]), buckets=str(buckets), bucket_bytes=1)

    engine.send_weights(version=1)

    assert has(worker.model, trained)
    with pytest.raises(async_ckpt.ClosedError):
        engine.send_weights(version=2)
    worker.start_weight_update()


def test_a_snapshot_of_another_model_is_refused_and_the_one_before_stays(buckets):
    trained, other, worker = Decoder(), Decoder(24), Worker()
    with async_ckpt.snapshot({"model": trained, "other": other, "flat": torch.zeros(3)}) as snap:
        source = SnapshotSource(snap["model"])
        with pytest.raises(async_ckpt.StateMismatchError, match=r"embed\.weight") as refused:
            source.renew(snap["other"])
        assert "head.weight" in refused.value.mismatched
        with pytest.raises(TypeError, match="must be in a snapshot"):
            source.renew(trained)
        with pytest.raises(async_ckpt.UnsupportedStateError):
            SnapshotSource(snap)

        sender(worker, source, buckets=str(buckets)).send_weights()

    assert has(worker.model, trained)


def test_an_engine_refuses_weights_of_another_model_by_name_and_takes_the_right_ones_afterwards(buckets):
    trained, wide, worker = Decoder(), Decoder(24), Worker()
    with async_ckpt.snapshot({"wide": wide, "model": trained}) as snap:
        with pytest.raises(async_ckpt.StateMismatchError, match=r"Decoder refuses.*embed\.weight"):
            sender(worker, SnapshotSource(snap["wide"]), buckets=str(buckets)).send_weights()
        before = {name: tensor.clone() for name, tensor in worker.model.state_dict().items()}
        assert not any(tensor.is_meta for tensor in before.values())  # it has its old weights again
        sender(worker, SnapshotSource(snap["model"]), buckets=str(buckets)).send_weights()

    assert has(worker.model, trained)


def test_an_update_that_a_killed_training_has_left_open_is_ended_by_the_next_training(buckets):
    trained, worker = Decoder(), Worker()
    worker.start_weight_update()
    with async_ckpt.snapshot({"model": trained}) as snap:
        sender(worker, SnapshotSource(snap["model"]), buckets=str(buckets)).send_weights(version=2)

    assert has(worker.model, trained)
    assert worker.version == "2"


def test_a_training_that_fails_in_the_middle_tells_the_engine_so_and_can_send_again(buckets):
    trained, worker = Decoder(), Worker()

    class Fails(SnapshotSource):
        fails = True

        def iter_full(self):
            for number, item in enumerate(super().iter_full()):
                if number == 2 and self.fails:
                    raise OSError("the disk of the training is gone")
                yield item

    with async_ckpt.snapshot({"model": trained}) as snap:
        source = Fails(snap["model"])
        engine = sender(worker, source, buckets=str(buckets), bucket_bytes=1)
        with pytest.raises(OSError, match="is gone"):
            engine.send_weights()
        source.fails = False
        engine.send_weights()

    assert has(worker.model, trained)


def test_an_engine_is_told_why_there_will_be_no_more():
    worker = Worker()
    worker.init_weight_transfer_engine({"folder": None})
    worker.start_weight_update()

    with pytest.raises(RuntimeError, match=r"failed in the middle.*OSError: gone.*old and some new"):
        worker.update_weights({"weights": None, "failed": "OSError: gone"})
    worker.start_weight_update()
    with pytest.raises(ValueError, match="Invalid update_info"):
        worker.update_weights({"names": ["a"]})
    worker.start_weight_update()
    with pytest.raises(ValueError, match="needs either weights="):
        worker.update_weights({})


def test_a_bucket_that_has_no_room_is_an_error_of_the_folder(tmp_path):
    worker, trained = Worker(), Decoder()
    (tmp_path / "file").touch()
    with async_ckpt.snapshot({"model": trained}) as snap:
        engine = sender(worker, SnapshotSource(snap["model"]), buckets=str(tmp_path / "file"))
        with pytest.raises(async_ckpt.StorageUnavailableError, match="file"):
            engine.send_weights()

    worker.start_weight_update()


# --- a worker in another process ----------------------------------------------------------------------------------


class Served(ServedEngine):
    """A worker in a process of its own, behind vLLM's routes, with vLLM's own client."""

    module = "vllm_engines"

    def __init__(self, nursery: Nursery, folder: Path) -> None:
        from vllm.distributed.weight_transfer import HTTPVLLMWeightSyncClient

        super().__init__(nursery, folder)
        self.client = HTTPVLLMWeightSyncClient(self.url, timeout=60)


def test_a_worker_in_another_process_takes_a_snapshot_and_one_that_is_killed_in_between_costs_the_training_nothing(
    nursery, tmp_path, buckets
):
    trained = Decoder()
    first = Served(nursery, tmp_path / "first")
    (first.folder / "hold").touch()
    failed: list[BaseException] = []
    with async_ckpt.snapshot({"model": trained}) as snap:
        source = SnapshotSource(snap["model"])
        engine = sender(first.client, source, buckets=str(buckets), bucket_bytes=1)

        def send() -> None:
            try:
                engine.send_weights(version=1)
            except OSError as error:
                failed.append(error)

        sending = threading.Thread(target=send)
        sending.start()
        until(lambda: (first.folder / "loading").exists())
        first.kill()
        sending.join(60)
        assert len(failed) == 1
        assert list(buckets.iterdir()) == []

        second = Served(nursery, tmp_path / "second")
        sender(second.client, source, buckets=str(buckets)).send_weights(version=1)

    told = second.state()
    second.kill()
    assert told["version"] == "1"
    assert {name: torch.tensor(value) for name, value in told["state"].items()}.keys() == trained.state_dict().keys()
    assert all(torch.equal(torch.tensor(told["state"][name]), tensor) for name, tensor in trained.state_dict().items())


_KILLED = """
import os, signal, sys
import async_ckpt
from vllm_engines import Decoder, Worker
from vllm.distributed.weight_transfer import WeightTransferTrainerFactory
from async_ckpt.integrations.vllm import SenderInit, SnapshotSource
worker, trained = Worker(), Decoder()
with async_ckpt.snapshot({"model": trained}) as snap:
    engine = WeightTransferTrainerFactory.trainer_init(
        SenderInit(rank=0, buckets=sys.argv[1]), client=worker, source=SnapshotSource(snap["model"]))
    worker.model.before_weight = lambda name: os.kill(os.getpid(), signal.SIGKILL)
    engine.send_weights()
"""


def test_the_bucket_of_a_training_that_was_killed_is_swept_by_the_next(nursery, buckets):
    assert nursery.run(_KILLED, buckets).status == -signal.SIGKILL
    assert list(buckets.iterdir())
    trained, worker = Decoder(), Worker()

    with async_ckpt.snapshot({"model": trained}) as snap:
        sender(worker, SnapshotSource(snap["model"]), buckets=str(buckets)).send_weights()

    assert has(worker.model, trained)


# --- a training on several ranks ----------------------------------------------------------------------------------

_RANKS = """
import json, torch, async_ckpt
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from vllm.distributed.weight_transfer import WeightTransferTrainerFactory
from vllm_engines import Decoder, Worker
from async_ckpt.integrations.vllm import SenderInit, SnapshotSource, register

register()
torch.manual_seed(1)
model = Decoder()
whole = {name: tensor.clone() for name, tensor in model.state_dict().items()}
mesh = init_device_mesh("cpu", (here.size,))
for layer in model.layers:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
worker = Worker() if here.rank == 0 else None
with async_ckpt.snapshot({"model": model}) as snap:
    source = SnapshotSource(snap["model"])
    engine = WeightTransferTrainerFactory.trainer_init(SenderInit(rank=here.rank), client=worker, source=source)
    engine.send_weights(version=3)
    local = {name: tensor.clone() for name, tensor in source.iter_local()}
    metas = [[m.name, list(m.shape), list(m.owners), list(m.mesh_shape), [p.dim for p in m.placements]] for m in source.metadata]
if worker is not None:
    assert worker.version == "3"
    assert all(torch.equal(tensor, whole[name]) for name, tensor in worker.model.state_dict().items())
for name, tensor in model.state_dict().items():
    assert torch.equal(local[name], tensor.to_local()), name
here.tell(metas)
"""


def test_ranks_send_together_and_each_has_its_own_slices_without_the_others(worlds):
    first, second = (end.told[-1] for end in worlds.run(2, _RANKS))

    assert first == second
    assert first[0] == ["embed.weight", [32, 16], [0, 1], [2], [0]]
    assert len(first) == 6
