"""Experts that each rank has a part of, as plain tensors: declared, they go on with another number of ranks."""

import pytest
import torch

import async_ckpt

# A small Mixture-of-Experts, trained alike on any number of ranks: each has some of the eight experts, and all see the
# same tokens, so that a sum over the ranks of what their experts say is what a single rank says of all.
TRAINING = """
import async_ckpt

class Experts(torch.nn.Module):
    def __init__(self, ep, declare):
        super().__init__()
        whole = torch.Generator().manual_seed(0)
        rank, size = (0, 1) if ep is None else (ep.get_local_rank(), ep.size())
        self.first, self.group = rank * 8 // size, None if ep is None else ep.get_group()
        rows = slice(self.first, self.first + 8 // size)
        self.w1 = torch.nn.Parameter(0.3 * torch.randn(8, 16, 6, generator=whole, dtype=torch.float64)[rows])
        self.w2 = torch.nn.Parameter(0.3 * torch.randn(8, 6, 16, generator=whole, dtype=torch.float64)[rows])
        for parameter in self.parameters() if declare and ep is not None else ():
            async_ckpt.sharded(parameter, *PLACES(ep))

    def forward(self, x, gates):
        gates = gates[:, self.first : self.first + len(self.w1)]
        inner = torch.einsum("td,edh->teh", x, self.w1.transpose(1, 2)).relu()
        out = torch.einsum("teh,ehd->ted", inner, self.w2.transpose(1, 2))
        said = (gates[..., None] * out).sum(1)
        if self.group is None:
            return said
        return torch.distributed.nn.functional.all_reduce(said, group=self.group)

PLACES = lambda ep: (ep, [Shard(0)])

class Model(torch.nn.Module):
    def __init__(self, ep=None, declare=True):
        super().__init__()
        torch.manual_seed(1)
        self.router, self.experts = torch.nn.Linear(6, 8, dtype=torch.float64), Experts(ep, declare)

    def forward(self, x):
        return x + self.experts(x, self.router(x).softmax(-1))

def training(ep=None, steps=0, declare=True):
    model = Model(ep, declare)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    losses = [step(model, optimizer, number, ep) for number in range(steps)]
    return {"model": model, "optimizer": optimizer}, losses

def step(model, optimizer, number, ep=None):
    x = torch.randn(5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(number))
    loss = (model(x) - x.flip(0)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    size = 1 if ep is None else ep.size()
    for name, parameter in model.named_parameters():
        parameter.grad /= size  # the backward pass of the sum has summed the gradients of all ranks, which are alike
        if size > 1 and "router" in name:  # each rank has the gradient by its own experts
            torch.distributed.all_reduce(parameter.grad, group=ep.get_group())
    optimizer.step()
    return loss.item()
"""
SAVE = (
    TRAINING
    + """
import torch.distributed.nn.functional
ep = mesh_of()
state, losses = training(ep, 3)
with open_run(here.root) as ckpt:
    here.save(ckpt, state, 3)
losses += [step(state["model"], state["optimizer"], number, ep) for number in (3, 4)]
here.tell(losses)
"""
)
RESTORE = (
    TRAINING
    + """
import torch.distributed.nn.functional
ep = mesh_of()
state, losses = training(ep, STEPS)
with open_run(here.root) as ckpt:
    here.tell(ckpt.restore(state))
here.tell([step(state["model"], state["optimizer"], number, ep) for number in (3, 4)])
"""
)


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("steps", [0, 1], ids=["a fresh one", "one that has stepped"])
def test_a_mixture_of_experts_goes_on_with_another_number_of_ranks(worlds, size, steps):
    saved = worlds.run(4, SAVE)
    losses = saved[0].told[-1][3:]
    ended = worlds.run(size, RESTORE.replace("STEPS", str(steps)))
    for one in ended:
        restored, gone_on = one.told
        assert restored == 3
        assert gone_on == pytest.approx(losses, rel=1e-12)


def test_the_whole_is_loaded_from_all_ranks_and_restored_without_ranks(worlds):
    worlds.run(4, SAVE)
    loaded = async_ckpt.load(worlds.root)
    assert loaded["model"]["experts.w1"].shape == (8, 16, 6)
    assert loaded["optimizer"]["state"][2]["exp_avg"].shape == (8, 16, 6)
    assert all(expert.any() for expert in loaded["optimizer"]["state"][2]["exp_avg"])
    scope: dict[str, object] = {"torch": torch}
    exec(TRAINING, scope)
    state, _ = scope["training"]()  # type: ignore[operator]
    with async_ckpt.AsyncCheckpointer(worlds.root) as ckpt:
        ckpt.restore(state)
    assert torch.equal(state["model"].experts.w1, loaded["model"]["experts.w1"])
    assert torch.equal(
        state["optimizer"].state[state["model"].experts.w1]["exp_avg"], loaded["optimizer"]["state"][2]["exp_avg"]
    )


REPLICAS = (
    TRAINING.replace("(ep, [Shard(0)])", "(world, [Replicate(), Shard(0)])")
    + """
import torch.distributed.nn.functional
world = mesh_of(2, 2, names=("edp", "ep"))
"""
)


# Each rank numbers its experts from 0. Names by their global numbers are those of other ranks, too.
NUMBERED = """
import re
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict

options = StateDictOptions(flatten_optimizer_state_dict=True)

def numbered(state, first):
    return {re.sub(r"experts\\.(\\d+)", lambda at: f"experts.{int(at[1]) + first}", name): value for name, value in state.items()}

def training(steps):
    per_rank = 8 // here.size
    first = here.rank * per_rank
    model = torch.nn.ModuleDict({"experts": torch.nn.ModuleList(torch.nn.Linear(3, 2) for _ in range(per_rank))})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for number, expert in enumerate(model["experts"], start=first):
        torch.nn.init.constant_(expert.weight, number)
        torch.nn.init.constant_(expert.bias, -number)
    for _ in range(steps):
        sum((number + 1) * expert(torch.ones(3)).sum() for number, expert in enumerate(model["experts"], first)).backward()
        optimizer.step()
    return model, optimizer, first

def state_of(model, optimizer, first):
    moments = get_optimizer_state_dict(model, optimizer, options=options)
    return {"model": numbered(model.state_dict(), first), "optimizer": numbered(moments, first)}
"""


@pytest.mark.parametrize("size", [1, 2, 8])
def test_experts_that_ranks_number_from_0_go_on_by_their_global_numbers(worlds, size):
    worlds.run(
        4,
        NUMBERED
        + """
with open_run(here.root) as ckpt:
    here.save(ckpt, state_of(*training(2)), 1)
""",
    )
    ended = worlds.run(
        size,
        NUMBERED
        + """
model, optimizer, first = training(0)
state = state_of(model, optimizer, first)
with open_run(here.root) as ckpt:
    ckpt.restore(state)
set_optimizer_state_dict(model, optimizer, numbered(state["optimizer"], -first), options=options)
want, expected, _ = training(2)
here.tell(all(torch.equal(a, b) for a, b in zip(model.parameters(), want.parameters())))
for trained in (optimizer, expected):
    for parameter in trained.param_groups[0]["params"]:
        parameter.grad = torch.ones_like(parameter)
    trained.step()
here.tell(all(torch.equal(a, b) for a, b in zip(model.parameters(), want.parameters())))
""",
    )
    assert [one.told for one in ended] == [[True, True]] * size


def test_replicas_of_experts_are_written_once(worlds):
    ended = worlds.run(
        4,
        REPLICAS
        + """
state, _ = training(world["ep"], 2)
with open_run(here.root) as ckpt:
    ckpt.save(state, 1).result()
    here.tell(ckpt.save(state, 2).result().num_bytes)
    live, _ = training(world["ep"])
    ckpt.restore(live)
here.tell(all(torch.equal(a, b) for a, b in zip(live["model"].parameters(), state["model"].parameters())))
""",
    )
    assert [one.told[1] for one in ended] == [True] * 4
    assert async_ckpt.load(worlds.root)["model"]["experts.w2"].shape == (8, 6, 16)


def test_experts_that_are_not_declared_are_refused_with_a_hint(worlds):
    ended = worlds.run(
        2,
        """
from async_ckpt import CheckpointError
with open_run(here.root) as ckpt:
    try:
        ckpt.save({"w1": torch.full((300, 1000), float(here.rank))}, 1).result()
    except CheckpointError as error:
        here.tell(str(error))
    try:
        ckpt.wait()
    except CheckpointError:
        pass
""",
    )
    for one in ended:
        assert "such as its experts, declare that with async_ckpt.sharded" in one.told[0]


def test_a_snapshot_holds_declared_tensors_as_shards(worlds):
    worlds.run(
        2,
        TRAINING
        + """
import torch.distributed.nn.functional
state, _ = training(mesh_of(), 1)
with open_run(here.root) as ckpt, async_ckpt.snapshot(state) as snap:
    ckpt.save(snap, 1).result()
""",
    )
    assert async_ckpt.load(worlds.root)["model"]["experts.w1"].shape == (8, 16, 6)


def test_an_export_has_all_experts(worlds):
    worlds.run(
        2,
        TRAINING
        + """
import torch.distributed.nn.functional
state, _ = training(mesh_of())
async_ckpt.export_hf(state["model"], here.root + ".hf").result()
""",
    )
    weights = async_ckpt.load(f"{worlds.root}.hf/model.safetensors")
    assert weights["experts.w1"].shape == (8, 16, 6)
    assert len({expert.sum().item() for expert in weights["experts.w1"]}) == 8


def test_what_cannot_be_declared_is_refused(worlds):
    ended = worlds.run(
        1,
        """
import async_ckpt
from torch.distributed.tensor import Partial
mesh = mesh_of()
for value, places in [
    (spread(4, 2), [Shard(0)]), (torch.eye(2).to_sparse(), [Shard(0)]), (torch.ones(2), [Shard(1)]),
    (torch.ones(2), []), (torch.ones(()), [Shard(0)]), (torch.ones(2), Shard(0)), (torch.ones(2), ["ep"]),
    (torch.ones(2), [Partial()]),
]:
    try:
        async_ckpt.sharded(value, mesh, places)
    except (TypeError, ValueError) as error:
        here.tell([type(error).__name__, str(error)])
try:
    async_ckpt.sharded(torch.ones(2), "ep", [Shard(0)])
except TypeError as error:
    here.tell(["TypeError", str(error)])
tensor = async_ckpt.sharded(torch.ones(2), mesh, [Shard(0)])
try:
    async_ckpt.save({"w": tensor}, here.root + ".tar", select=None).result()
except async_ckpt.UnsupportedStateError as error:
    here.tell(["UnsupportedStateError", str(error)])
""",
    )
    kinds = [kind for kind, _ in ended[0].told]
    assert kinds[:9] == ["TypeError"] * 2 + ["ValueError"] * 6 + ["TypeError"]
    assert "only plain tensors can be declared, got DTensor" in ended[0].told[0][1]
    assert all("do not fit a mesh of 1 dimensions and a tensor of" in text for _, text in ended[0].told[2:8])
    assert "mesh must be the DeviceMesh" in ended[0].told[8][1]


def test_a_rank_that_the_mesh_lacks_cannot_declare_a_part(worlds):
    """Nothing of it would be saved."""
    ended = worlds.run(
        3,
        """
import async_ckpt
from torch.distributed.device_mesh import DeviceMesh
mesh = DeviceMesh("cpu", [0, 1])
try:
    async_ckpt.sharded(torch.ones(2), mesh, [Shard(0)])
    here.tell("declared")
except ValueError as error:
    here.tell(str(error))
here.meet("told")  # none leaves gloo while another still connects
""",
    )
    assert [one.told for one in ended[:2]] == [["declared"]] * 2
    assert "the mesh lacks this rank, whose part would not be saved" in ended[2].told[0]


@pytest.mark.parametrize(
    ("part", "why"),
    [
        ("torch.ones(3 - here.rank, 2)", "w is float32[6, 2] on rank 0 and float32[4, 2] on rank 1; "),
        (
            "torch.ones(2, 2).to([torch.float32, torch.bfloat16][here.rank])",
            "w is float32[4, 2] on rank 0 and bfloat16",
        ),
    ],
)
def test_parts_that_are_not_alike_are_refused_by_name(worlds, part, why):
    ended = worlds.run(
        2,
        f"""
import async_ckpt
with open_run(here.root) as ckpt:
    here.save(ckpt, {{"w": async_ckpt.sharded({part}, mesh_of(), [Shard(0)])}}, 1)
""",
    )
    advice = "parts that sharded() declares must have one shape and dtype"
    assert all(why in one.saves[0]["text"] and advice in one.saves[0]["text"] for one in ended)


def test_parts_of_another_whole_are_refused_in_a_restore(worlds):
    """Eight experts of four ranks cannot be shared among three alike; and a tensor that is not declared is no part."""
    part = "async_ckpt.sharded(torch.full(({}, 2), float(here.rank)){}, mesh_of(), [Shard(0)])"
    saving = (
        "import async_ckpt\nwith open_run(here.root) as ckpt:\n    here.save(ckpt, {'w': "
        + part.format(2, "")
        + "}, 1)"
    )
    worlds.run(4, saving)
    for live, size, why in (
        (part.format(3, ""), 3, "w is float32[9, 2] here and float32[8, 2] in the checkpoint"),
        (part.format(4, ".double()"), 2, "w is float64[8, 2] here and float32[8, 2] in the checkpoint"),
        ("torch.ones(4, 2)", 2, "w is float32[4, 2] here and float32[8, 2] in the checkpoint"),
    ):
        ended = worlds.run(
            size,
            f"""
import async_ckpt
live = {live}
before = live.clone()
with open_run(here.root) as ckpt:
    try:
        ckpt.restore({{"w": live}})
    except async_ckpt.StateMismatchError as error:
        here.tell([str(error), torch.equal(live, before)])
""",
        )
        assert all(why in one.told[0][0] and one.told[0][1] for one in ended)
