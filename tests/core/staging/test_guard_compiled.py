"""The guard under `torch.compile(optimizer.step)`: its hook is not part of what is compiled, and never a reason to compile again."""

from collections import Counter
from collections.abc import Callable, Iterator

import pytest
import torch
from states import open_run
from torch._dynamo.testing import CompileCounter
from torch._dynamo.utils import counters

from async_ckpt.core.staging.snapshot import Snapshot

# One more than the recompilations after which torch gives a function up.
NUM_SAVES = 10
ITEMS = 300_000  # more than 1 MiB, or nothing is deferred


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """The numbers of the frames that torch.compile has compiled so far, by their outcome."""
    torch._dynamo.reset()
    counters.clear()
    yield counters["frames"]
    torch._dynamo.reset()
    counters.clear()


def trained(optimizer: torch.optim.Optimizer, step: Callable[[], None]) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    step()


@pytest.mark.filterwarnings("ignore")  # of torch.compile's own, about what it leaves out
def test_saves_between_compiled_steps_compile_nothing_and_hold_each_step_untraced(tmp_path, compiled, monkeypatch):
    hold, held_while_compiling = Snapshot.hold, []

    def noted(self: Snapshot) -> None:
        held_while_compiling.append(torch.compiler.is_compiling())  # True in everything that is traced
        hold(self)

    monkeypatch.setattr(Snapshot, "hold", noted)
    parameter = torch.nn.Parameter(torch.zeros(ITEMS))
    optimizer = torch.optim.Adam([parameter], lr=torch.tensor(0.1))
    graphs = CompileCounter()
    step = torch.compile(optimizer.step, backend=graphs)
    with open_run(tmp_path, guard=optimizer, keep=NUM_SAVES, max_in_flight=2) as ckpt:
        ckpt.save({"p": parameter}, step=0).result()
        for _ in range(3):
            trained(optimizer, step)
        num_graphs, frames = graphs.frame_count, dict(compiled)
        for number in range(1, NUM_SAVES):
            saved = parameter.detach().clone()
            handle = ckpt.save({"p": parameter}, step=number)
            trained(optimizer, step)
            handle.result()
            assert torch.equal(ckpt.load(number)["p"], saved)

    assert num_graphs > 0
    assert (graphs.frame_count, dict(compiled)) == (num_graphs, frames)
    assert held_while_compiling
    assert not any(held_while_compiling)
