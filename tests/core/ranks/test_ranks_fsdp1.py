"""FSDP1 on real ranks: its sharded state dicts are saved, loaded as full tensors, and restored by its own `load_state_dict`."""

import torch
from states import open_run

# Taking FSDP1's state dict is a collective, as all of its calls are; none is made by a save of it.
FSDP1 = """
import functools, warnings
warnings.simplefilter("ignore")
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, StateDictType, ShardedStateDictConfig
from torch.distributed.fsdp import FullStateDictConfig, ShardedOptimStateDictConfig
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

def wrapped(value=None):
    model = network(37)
    if value is not None:
        for parameter in model.parameters():
            torch.nn.init.constant_(parameter, value)
    model = FSDP(model, auto_wrap_policy=ModuleWrapPolicy({torch.nn.Linear}), use_orig_params=True,
                 device_id=torch.device("cpu"))
    FSDP.set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig(),
                             ShardedOptimStateDictConfig())
    return model

def step(model, optimizer):
    made = torch.Generator().manual_seed(here.rank)
    model(torch.randn(4, 13, generator=made)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()

def full(model):
    with FSDP.summon_full_params(model):
        return {name.replace("_fsdp_wrapped_module.", ""): value.detach().clone()
                for name, value in model.named_parameters()}

def state_of(model, optimizer):
    return {"model": model.state_dict(), "optimizer": FSDP.optim_state_dict(model, optimizer)}
"""
SAVED = (
    FSDP1
    + """
model = wrapped()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
step(model, optimizer)
with open_run(here.root) as ckpt:
    here.save(ckpt, state_of(model, optimizer), 1)
    here.save(ckpt, {"model": model}, 2)  # which takes its state dict, and gives it back at a restore
step(model, optimizer)
kept = full(model)
if here.rank == 0:
    torch.save(kept, f"{here.root}.pt")
"""
)
RESTORED = (
    FSDP1
    + """
model = wrapped(0.5)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
step(model, optimizer)  # or it has no state to fill
state = state_of(model, optimizer)
with open_run(here.root) as ckpt:
    here.tell(ckpt.restore(state, step=1))
model.load_state_dict(state["model"])
optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, state["optimizer"]))
step(model, optimizer)
want = torch.load(f"{here.root}.pt")
found = full(model)
here.tell(sorted(name for name in want if not torch.equal(want[name], found[name])))
here.tell(len(want))

other = wrapped(0.5)
with open_run(here.root) as ckpt:
    ckpt.restore({"model": other}, step=2)
with open_run(here.root) as ckpt:
    state = {"model": wrapped(0.5).state_dict()}
    ckpt.restore(state, step=1)
same = wrapped(0.25)
same.load_state_dict(state["model"])
found, want = full(other), full(same)
here.tell([bool(torch.equal(found[name], want[name])) for name in want])
"""
)


def test_a_training_under_fsdp1_goes_on_with_the_same_bits(worlds):
    for one in worlds.run(2, SAVED):
        assert [save.get("status") for save in one.saves] == ["committed"] * 2, one.saves

    loaded = open_run(worlds.root).load(1)
    assert loaded["model"]["0.weight"].shape == (37, 13)
    assert loaded["optimizer"]["state"]["0.weight"]["exp_avg"].shape == (37, 13)
    assert torch.count_nonzero(loaded["optimizer"]["state"]["0.weight"]["exp_avg"]) > 37

    for one in worlds.run(2, RESTORED):
        assert one.told[0] == 1
        assert one.told[1] == []
        assert one.told[2] == 6
        assert one.told[3] == [True] * 6
