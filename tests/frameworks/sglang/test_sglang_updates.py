"""Snapshots for engines of SGLang: its flattened buckets, in this process and over its routes."""

from __future__ import annotations

import threading

import pytest
import torch
from racing import until
from served_engines import ServedEngine
from torch.multiprocessing import reductions

import async_ckpt
from async_ckpt.integrations.common import framework_checks

pytest.importorskip("sglang", reason="sglang is not installed: make test-sglang")

import sglang
from sglang.srt.weight_sync import tensor_bucket
from sglang_engines import Engine, Policy

from async_ckpt.integrations.sglang import HttpEngine, send_weights

WARM = ("sglang_engines",)


def has(model: torch.nn.Module, wanted: torch.nn.Module) -> bool:
    return all(torch.equal(tensor, wanted.state_dict()[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("bucket_bytes", [1, 120, 1 << 30])
def test_an_engine_has_the_weights_of_the_snapshot_in_buckets_of_the_size_that_was_asked_for(bucket_bytes):
    trained, engine = Policy(), Engine()
    wanted = Policy()
    wanted.load_state_dict(trained.state_dict())
    with async_ckpt.snapshot({"model": trained, "epoch": 1}) as snap:
        with torch.no_grad():
            trained.embed.weight += 1
        send_weights(engine, snap["model"], bucket_bytes=bucket_bytes)

    assert has(engine.model, wanted)
    assert engine.num_flushed == 1
    assert sum(engine.sizes) == sum(tensor.nbytes for tensor in wanted.state_dict().values())
    assert engine.sizes == {1: [7, 8, 96, 2048], 120: [111, 2048], 1 << 30: [2159]}[bucket_bytes]


def test_each_rank_of_an_engine_gets_a_handle_of_its_own():
    trained, engine = Policy(), Engine(tp_rank=2)
    with async_ckpt.snapshot({"model": trained}) as snap:
        send_weights(engine, snap["model"], tp_size=3)

    assert has(engine.model, trained)


def test_an_engine_that_refuses_is_asked_to_end_its_session_and_takes_the_right_weights_afterwards():
    trained, wide, engine = Policy(), Policy(24), Engine()
    with async_ckpt.snapshot({"wide": wide, "model": trained}) as snap:
        with pytest.raises(
            RuntimeError, match=r"SGLang refuses update_weights_from_tensor.*must match.*old and some new"
        ):
            send_weights(engine, snap["wide"])
        send_weights(engine, snap["model"])

    assert has(engine.model, trained)


def test_a_session_of_somebody_else_is_an_error_and_not_ended():
    trained, engine = Policy(), Engine()
    engine.begin_weight_update()
    with async_ckpt.snapshot({"model": trained}) as snap, pytest.raises(RuntimeError, match="already open"):
        send_weights(engine, snap["model"])

    assert engine.end_weight_update() == (True, "Success")


def test_a_snapshot_that_is_closed_is_read_to_its_end_and_not_again():
    trained, engine = Policy(), Engine()
    snap = async_ckpt.snapshot({"model": trained})
    part = snap["model"]
    engine.model.before_load = snap.close  # type: ignore[assignment]
    send_weights(engine, part, bucket_bytes=1)
    assert has(engine.model, trained)

    with pytest.raises(async_ckpt.ClosedError):
        send_weights(engine, part)
    assert engine.begin_weight_update()[0]


def test_what_does_not_fit_is_refused_before_the_engine_is_told_anything():
    trained = Policy()
    with async_ckpt.snapshot({"model": trained, "none": {"empty": torch.empty(0)}}) as snap:
        with pytest.raises(ValueError, match="no items"):
            send_weights(Engine(), snap["none"])
        with pytest.raises(TypeError, match="must be in a snapshot"):
            send_weights(Engine(), Policy())  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="cannot be told the version"):
            send_weights(Engine(), snap["model"], version=3)
        with pytest.raises(ValueError, match="bucket_bytes must be a number of bytes"):
            send_weights(Engine(), snap["model"], bucket_bytes=0)
        with pytest.raises(ValueError, match="leave it out with group="):
            send_weights(Engine(), snap["model"], tp_size=2, group=object())
        with pytest.raises(TypeError, match="needs an engine"):
            send_weights(None, snap["model"])
    with pytest.raises(ValueError, match="http://"):
        HttpEngine("127.0.0.1:30000")


def test_memory_of_the_host_is_refused_where_sglang_makes_handles_of_devices_alone(monkeypatch):
    trained, engine = Policy(), Engine()
    monkeypatch.setattr(reductions, "_reduce_tensor_original", reductions.reduce_tensor, raising=False)
    with async_ckpt.snapshot({"model": trained}) as snap, pytest.raises(ValueError, match="pass device="):
        send_weights(engine, snap["model"])

    assert engine.begin_weight_update()[0]  # its session was ended


# --- an engine in another process ---------------------------------------------------------------------------------


class Served(ServedEngine):
    """An engine in a process of its own, behind SGLang's routes."""

    module = "sglang_engines"


def test_an_engine_in_another_process_takes_weights_and_their_version_and_one_that_is_killed_is_an_error(
    nursery, tmp_path
):
    trained = Policy()
    first = Served(nursery, tmp_path / "first")
    (first.folder / "hold").touch()
    failed: list[BaseException] = []
    with async_ckpt.snapshot({"model": trained}) as snap:

        def send() -> None:
            try:
                send_weights(HttpEngine(first.url), snap["model"], bucket_bytes=1)
            except ConnectionError as error:
                failed.append(error)

        sending = threading.Thread(target=send)
        sending.start()
        until(lambda: (first.folder / "loading").exists())
        first.kill()
        sending.join(60)
        assert "the engine has not answered" in str(failed[0])
        with pytest.raises(ConnectionError, match="begin_weight_update"):
            send_weights(HttpEngine(first.url), snap["model"])

        second = Served(nursery, tmp_path / "second")
        send_weights(HttpEngine(second.url, api_key="admin"), snap["model"], version=12)

    told = second.state()
    second.kill()
    assert told["version"] == "12"
    state = trained.state_dict()
    assert all(
        torch.equal(torch.tensor(v, dtype=state[n].dtype).view_as(state[n]), state[n]) for n, v in told["state"].items()
    )
    assert told["state"].keys() == state.keys()


def test_what_a_server_says_when_it_refuses_is_in_the_error(nursery, tmp_path):
    served, wide = Served(nursery, tmp_path / "engine"), Policy(24)
    with async_ckpt.snapshot({"model": wide}) as snap, pytest.raises(RuntimeError, match="must match the size"):
        send_weights(HttpEngine(served.url), snap["model"])
    served.kill()


# --- several ranks ------------------------------------------------------------------------------------------------

_RANKS = """
import torch, torch.distributed as dist, async_ckpt
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from sglang_engines import Engine, Policy
from async_ckpt.integrations.sglang import send_weights

torch.manual_seed(1)
model = Policy()
mesh = init_device_mesh("cpu", (here.size,))
state = model.state_dict()
sharded = {name: distribute_tensor(tensor, mesh, [Shard(0)]) if tensor.dim() else tensor for name, tensor in state.items()}
engine = Engine(tp_rank=1) if here.rank == 0 else None
with async_ckpt.snapshot({"model": sharded}) as snap:
    send_weights(engine, snap["model"], bucket_bytes=300, group=dist.group.WORLD)
    if engine is not None:
        assert all(torch.equal(tensor, state[name]) for name, tensor in engine.model.state_dict().items())
        engine.model = Policy(24)
    try:
        send_weights(engine, snap["model"], group=dist.group.WORLD)
    except Exception as error:
        here.tell([type(error).__name__, str(error)])
"""


def test_ranks_send_to_one_engine_together_and_all_learn_of_its_refusal(worlds):
    first, second = (end.told[-1] for end in worlds.run(2, _RANKS))

    assert first[0] == "RuntimeError"
    assert second[0] == "PeerFailedError"
    assert "SGLang refuses" in first[1]
    assert "rank 0 has failed: RuntimeError: SGLang refuses" in second[1]


# --- another version ----------------------------------------------------------------------------------------------


def test_a_name_that_has_moved_is_named_before_the_engine_is_told_anything(monkeypatch):
    monkeypatch.delattr(tensor_bucket, "FlattenedTensorBucket")
    trained = Policy()
    with (
        async_ckpt.snapshot({"model": trained}) as snap,
        pytest.raises(RuntimeError, match=r"no .*FlattenedTensorBucket"),
    ):
        send_weights(Engine(), snap["model"])


def test_another_version_of_sglang_gives_one_warning(monkeypatch):
    monkeypatch.setattr(sglang, "__version__", "0.6.1")
    framework_checks.require.cache_clear()
    trained = Policy()

    def send_twice() -> None:
        with async_ckpt.snapshot({"model": trained}) as snap:
            send_weights(Engine(), snap["model"])
            send_weights(Engine(), snap["model"])

    with pytest.warns(UserWarning, match=r"sglang 0\.6\.1 was not") as told:
        send_twice()

    assert len(told) == 1
    framework_checks.require.cache_clear()
