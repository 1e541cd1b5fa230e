"""A snapshot on ranks: one copy of each rank's shards, of which a checkpoint, an export and a version are made."""

from pathlib import Path

import pytest
import torch
from accelerators import of_simulation
from exported import weights_in
from rank_oracle import saved
from states import difference

from async_ckpt import Subscriber

READERS = """
import async_ckpt
from fake_ranks import no_collectives
state = {make}
keep_full({{"model": state["model"]}}, here.root + ".pt")
state["rng"] = async_ckpt.RngState()
state["position"] = 3
ckpt, publisher = open_run(here.root), async_ckpt.Publisher(here.root + "-weights")
with no_collectives():
    with async_ckpt.snapshot(state, guard=state["optimizer"]) as snap:
        handles = [ckpt.save(snap, step=5)]
        torch.rand(1 + here.rank)
        for parameter in state["model"].parameters():
            parameter.data.mul_(2)
        handles += [async_ckpt.export_hf(snap["model"], here.root + "-hf"), publisher.publish(snap["model"], version=5)]
        whole = snap["model"]["0.weight"]
        here.tell([type(whole).__name__, list(whole.shape), str(whole.to_local().device)])
    for handle in handles:
        handle.result()
publisher.close()
ckpt.close()
"""


@pytest.mark.parametrize(("size", "make"), [(2, "fsdp()"), (4, "fsdp_tp(2)")])
def test_a_checkpoint_an_export_and_a_version_are_of_the_instant_of_one_snapshot(worlds, tmp_path, size, make):
    ended = worlds.run(size, READERS.format(make=make))

    full = torch.load(f"{worlds.root}.pt")
    found = saved(worlds.root, 5)
    assert difference({name: found.tensors[name] for name in full}, full) is None
    assert found.manifest.ranks is not None
    assert found.manifest.ranks.per_rank == ("rng",)
    plain = {name.removeprefix("model."): tensor for name, tensor in full.items()}
    assert difference(weights_in(Path(f"{worlds.root}-hf")), dict(sorted(plain.items()))) is None
    Subscriber(f"{worlds.root}-weights").pull(tmp_path / "pulled")
    assert difference(weights_in(tmp_path / "pulled"), dict(sorted(plain.items()))) is None
    assert [one.told[0] for one in ended] == [["DTensor", list(plain["0.weight"].shape), "cpu"]] * size


# The model is on a simulated device of the rank's own, under FSDP2; gloo moves nothing there, so gradients are made.
ONE_COPY = """
import async_ckpt, simulated
from fake_ranks import no_collectives
sim, device = simulated.install(), f"sim:{{here.rank}}"
sim.reset("early")
torch.get_device_module("sim").set_device(here.rank)
model = network(400).to(device)
fully_shard(model, mesh=init_device_mesh("sim", (here.size,)))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
ckpt, publisher = open_run(here.root), async_ckpt.Publisher(here.root + "-weights", encoding={encoding!r})

def copied():
    return sum(num_bytes for origin, target, num_bytes in sim.copies if (origin, target) == ("sim", "cpu"))

for step in (1, 2, 3):
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    local = [one.to_local() for one in (*model.parameters(), *(s for state in optimizer.state.values() for s in state.values()))
             if isinstance(one, DTensor)]
    assert {{one.device.type for one in local}} == {{"sim"}}
    before = copied()
    with no_collectives(), async_ckpt.snapshot({{"model": model, "optimizer": optimizer}}, guard=optimizer) as snap:
        handles = [ckpt.save(snap, step)]
        if {publishes}:
            handles += [publisher.publish(snap["model"], step), async_ckpt.export_hf(snap["model"], here.root + f"-hf{{step}}")]
    for handle in handles:
        handle.result()
    here.tell([copied() - before, sum(one.nbytes for one in local)])
    here.meet(f"saved{{step}}")
torch.save({{name: p.to_local().cpu() for name, p in model.named_parameters()}}, here.root + f"-{{here.rank}}.pt")
publisher.close()
ckpt.close()
"""


@of_simulation
@pytest.mark.parametrize("encoding", ["xor", None])
def test_a_step_that_is_saved_published_and_exported_is_copied_from_each_device_once(worlds, tmp_path, encoding):
    both = [one.told for one in worlds.run(2, ONE_COPY.format(publishes=True, encoding=encoding))]
    script = ONE_COPY.format(publishes=False, encoding=encoding)
    saves_alone = [one.told for one in worlds.run(2, script, root=tmp_path / "alone")]

    assert both == saves_alone  # not a byte more is copied than for the save
    for copied, held in (step for one in both for step in one):
        assert held <= copied <= 1.05 * held
    parts = [torch.load(f"{worlds.root}-{rank}.pt") for rank in range(2)]
    whole = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    assert difference({f"model.{n}": saved(worlds.root, 3).tensors[f"model.{n}"] for n in whole},
                      {f"model.{n}": tensor for n, tensor in whole.items()}) is None  # fmt: skip
    Subscriber(f"{worlds.root}-weights").pull(tmp_path / "pulled")
    for folder in (tmp_path / "pulled", Path(f"{worlds.root}-hf3")):
        assert difference(weights_in(folder), dict(sorted(whole.items()))) is None


COMPARED = """
import threading
import async_ckpt
from async_ckpt.core.ranks import divide
from async_ckpt.core.staging.snapshot import Snapshot

go, fill, digests = threading.Event(), Snapshot._fill_later, divide._digests
Snapshot._fill_later = lambda snapshot: go.wait(60) and fill(snapshot)
weight = torch.nn.Parameter(numbered(600, 1000) + 1)
optimizer = torch.optim.SGD([weight])
with async_ckpt.snapshot({"weight": weight}, guard=optimizer) as snap:
    result = snap.completion.result
    snap.completion.result = lambda *timeout: (go.set(), result(*timeout))

    def compared(copies):
        here.tell(snap.completion.done())
        go.set()
        return digests(copies)

    divide._digests = compared
    with open_run(here.root) as ckpt:
        here.save(ckpt, snap, 1)
"""


def test_replicas_in_a_snapshot_are_compared_once_their_bytes_are_there(worlds):
    for one in worlds.run(2, COMPARED):
        assert one.told[0] is True
        assert one.saves[0].get("status") == "committed"
    assert torch.equal(saved(worlds.root, 1).tensors["weight"], torch.arange(600_000.0).reshape(600, 1000) + 1)


REFUSED = """
import async_ckpt
from torch.distributed.tensor import Partial
partial = DTensor.from_local(torch.ones(3, 13), mesh_of(), [Partial()], run_check=False)
try:
    async_ckpt.snapshot({"model": {"a": partial}})
except async_ckpt.UnsupportedStateError as error:
    here.tell(str(error))
"""


def test_a_snapshot_refuses_by_name_what_no_rank_can_save(worlds):
    for one in worlds.run(2, REFUSED):
        assert "model.a: a DTensor that is Partial" in one.told[0]
