"""Snapshots in checkpoint-engine's ParameterServer, and updates of engines that live, refuse, hang and die."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch

from async_ckpt.integrations.common.held_weights import HeldTensor

pytest.importorskip("checkpoint_engine", reason="checkpoint-engine is not installed: make test-sglang")

from async_ckpt.integrations.parameter_server import share_of, update

WARM = ("parameter_servers",)


def test_each_tensor_has_one_owner_and_the_owners_have_about_as_many_bytes():
    sizes = [1000, 900, 500, 500, 300, 7, 0, 1]
    tensors = [HeldTensor(f"t{n}", torch.uint8, (size,), None) for n, size in enumerate(sizes)]

    shares = [share_of(tensors, rank, 3) for rank in range(3)]

    assert sorted(itertools.chain(*shares)) == sorted(tensor.name for tensor in tensors)
    loads = [sum(tensor.num_bytes for tensor in tensors if tensor.name in share) for share in shares]
    assert max(loads) - min(loads) <= 300
    assert share_of(tensors, 1, 3) == share_of(tensors, 1, 3)


def test_a_server_of_another_kind_is_refused_by_the_name_of_what_it_lacks():
    with pytest.raises(RuntimeError, match=r"checkpoint_engine 0.* has no SimpleNamespace\.register_checkpoint"):
        update(SimpleNamespace(), "x", print)


# Each rank is a training's process and has an engine beside it, a process of its own that is forked before any thread.
_PRELUDE = """
import multiprocessing, os, signal, torch, async_ckpt
from parameter_servers import FREE_BYTES, receive, server_of
from async_ckpt.integrations.parameter_server import register_checkpoint, update

def an_engine(connection, kind):
    path = connection.recv()
    def load(weights):
        got = {name: tensor.clone() for name, tensor in weights}
        if kind == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "refuses":
            raise ValueError("size mismatch for embed.weight")
        if kind == "hangs":
            signal.pause()
        state.update(got)
    state = {}
    try:
        receive(path, load)
        connection.send({name: tensor.numpy() for name, tensor in state.items()})
    except BaseException as error:
        connection.send(f"{type(error).__name__}: {error}")

def engine(kind):
    ours, theirs = multiprocessing.get_context("fork").Pipe()
    process = multiprocessing.get_context("fork").Process(target=an_engine, args=(theirs, kind), daemon=True)
    process.start()
    theirs.close()
    return ours, process

def asks(server, connection):
    def ask(paths):
        connection.send(dict(paths)[server._device_uuid])
        told = connection.recv()  # EOFError if the engine dies
        if isinstance(told, str):
            raise RuntimeError(told)
        received.update(told)
    return ask

received = {}
torch.manual_seed(1)
model = {f"layer.{n}.weight": torch.randn(300, 300 + n) for n in range(9)} | {
    "norm": torch.randn(5).to(torch.bfloat16).float(), "scale": torch.tensor(3.0), "big": torch.randn(1000, 300)}
"""

_UPDATES = (
    _PRELUDE.replace("{", "{{").replace("}", "}}")
    + """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
connection, process = engine("lives")
held = dict(model)
if {spread}:
    mesh = init_device_mesh("cpu", (here.size,))
    held = {{name: distribute_tensor(t, mesh, [Shard(0)]) if t.dim() else t for name, t in model.items()}}
server = server_of(here.rank, here.size, {port})
with async_ckpt.snapshot({{"model": held}}) as snap:
    mine = register_checkpoint(server, "step-1", snap["model"])
import torch.distributed as dist
dist.destroy_process_group()  # the server makes one for each update
server.gather_metas("step-1")
update(server, "step-1", asks(server, connection), timeout_seconds=60)
process.join(60)
assert received.keys() == model.keys()
assert all(torch.equal(torch.from_numpy(received[name]).view(model[name].shape), model[name]) for name in model)
server.unregister_checkpoint("step-1")
here.tell(mine)
"""
)


@pytest.fixture
def port() -> int:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@pytest.mark.parametrize("spread", [False, True], ids=["whole on each rank", "spread over ranks"])
def test_engines_beside_two_ranks_have_the_weights_of_the_snapshot_each_of_which_one_rank_has_registered(
    worlds, port, spread
):
    first, second = (end.told[-1] for end in worlds.run(2, _UPDATES.format(spread=spread, port=port)))

    assert len(first) + len(second) == len({*first, *second}) == 12


_FAILS = (
    _PRELUDE.replace("{", "{{").replace("}", "}}")
    + """
import torch.distributed as dist
dist.destroy_process_group()
engines = {{kind: engine(kind) for kind in ("unreachable", "dies", "refuses", "lives")}}
server = server_of(0, 1, {port})
with async_ckpt.snapshot({{"model": model}}) as snap:
    register_checkpoint(server, "step-1", snap["model"])
    server.gather_metas("step-1")
def attempt(kind, timeout_seconds):
    connection, process = engines[kind]
    ask = asks(server, connection)
    def asking(paths):
        if kind == "unreachable":
            raise ConnectionRefusedError("connection refused")
        ask(paths)
    try:
        update(server, "step-1", asking, timeout_seconds=timeout_seconds)
    except Exception as error:
        return [type(error).__name__, str(error), type(error.__cause__).__name__]
    finally:
        process.kill()
        process.join()
told = {{}}
for kind, timeout_seconds in [("unreachable", 600), ("dies", 600), ("refuses", 600)]:
    told[kind] = attempt(kind, timeout_seconds)
told["lives"] = attempt("lives", 60)
told["has all"] = received.keys() == model.keys()
here.tell(told)
"""
)


def test_an_engine_that_cannot_be_reached_that_dies_or_refuses_is_an_error_at_once_and_the_next_one_gets_all(
    worlds, port
):
    (told,) = (end.told[-1] for end in worlds.run(1, _FAILS.format(port=port)))

    assert told["unreachable"][0] == told["dies"][0] == "PeerFailedError"
    assert "connection refused" in told["unreachable"][1]
    assert told["unreachable"][2] == "ConnectionRefusedError"
    assert told["dies"][2] == "EOFError"
    assert told["refuses"][0] == "RuntimeError"
    assert told["lives"] is None
    assert told["has all"]


_HANGS = (
    _PRELUDE.replace("{", "{{").replace("}", "}}")
    + """
import torch.distributed as dist
dist.destroy_process_group()
connection, process = engine("hangs")
server = server_of(0, 1, {port})
with async_ckpt.snapshot({{"model": model}}) as snap:
    register_checkpoint(server, "step-1", snap["model"], use_shared_memory_pool=True)
server.gather_metas("step-1")
def ask(paths):
    connection.send(dict(paths)[server._device_uuid])
    connection.poll(2)
try:
    update(server, "step-1", ask, timeout_seconds=1)
except Exception as error:
    here.tell([type(error).__name__, str(error)])
process.kill()
"""
)


def test_an_engine_that_says_nothing_ends_the_update_after_the_time_that_it_was_given(worlds, port):
    (told,) = (end.told[-1] for end in worlds.run(1, _HANGS.format(port=port)))

    assert told[0] == "PeerFailedError"
    assert "has not answered for 1 s" in told[1]
