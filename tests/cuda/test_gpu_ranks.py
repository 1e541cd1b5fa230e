"""Two ranks under FSDP2 (one where there is one device), a device each, whose collectives run on the devices' streams: torch's
process group over NCCL, or over one of our own on the simulated runtime.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from children import Nursery
from cuda_simulation import ABOVE, BELOW

pytestmark = pytest.mark.gpu

RANKS = min(2, torch.cuda.device_count())
TRAINING = f"""
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
rank = int(sys.argv[2])
torch.cuda.set_device(rank)
dist.init_process_group("nccl", store=dist.FileStore(root + "/store", {RANKS}), rank=rank, world_size={RANKS})
mesh = init_device_mesh("cuda", ({RANKS},))

def training(seed):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(600, 700), torch.nn.ReLU(), torch.nn.Linear(700, 601)).cuda()
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)

def losses(model, optimizer, numbers):
    found = []
    for number in numbers:
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(2 * number + rank)
        loss = model(torch.randn(8, 600, generator=generator).cuda()).square().mean()
        loss.backward()
        optimizer.step()
        found.append(loss.detach())
    return [loss.item() for loss in found]

model, optimizer = training(seed=0)
losses(model, optimizer, range(2))
"""
END = """
dist.destroy_process_group()
"""


@pytest.fixture
def on_two_ranks(processes: Nursery, tmp_path: Path) -> Callable[[str], None]:
    def run(script: str) -> None:
        children = [processes.start(ABOVE + TRAINING + script + END + BELOW, tmp_path, rank) for rank in range(RANKS)]
        for child in children:
            ended = child.ended()
            assert "all is well" in ended.out, ended
            assert ended.status == 0, ended

    return run


@pytest.mark.parametrize("kind", ["guarded", "not guarded"])
def test_a_sharded_training_is_restored_and_goes_on_exactly(on_two_ranks, kind):
    on_two_ranks(
        f"""
state = {{"model": model, "optimizer": optimizer}}
with open_run(root + "/run") as ckpt:
    for step in range(2):
        handle = ckpt.save(state, step=step, guard=optimizer if {kind == "guarded"} else None)
        wanted = losses(model, optimizer, range(2, 5))
        handle.result()
    ckpt.restore(state)
    assert losses(model, optimizer, range(2, 5)) == wanted
    other = training(seed=1)
    ckpt.restore(dict(zip(state, other)))
    assert losses(*other, range(2, 5)) == wanted
"""
    )


def test_what_is_gathered_and_freed_beside_a_save_changes_nothing_in_it(on_two_ranks):
    """The parameters of the next forward pass are gathered into memory that the last one has freed."""
    on_two_ranks(
        """
with open_run(root + "/run") as ckpt:
    wanted = {name: tensor.full_tensor().cpu() for name, tensor in model.state_dict().items()}
    with held(torch.cuda.current_stream()):
        handle = ckpt.save({"model": model}, step=1)
        optimizer.zero_grad()
        loss = model(torch.ones(8, 600).pin_memory().to("cuda", non_blocking=True)).square().mean()
        loss.backward()
        optimizer.step()
    handle.result()
    saved = {"model": training(seed=1)[0]}
    ckpt.restore(saved)
    for name, tensor in saved["model"].state_dict().items():
        assert torch.equal(tensor.full_tensor().cpu(), wanted[name]), name
"""
    )
