"""A restore takes the state dict of each of the user's objects once, on every rank, whatever is committed: it may be a collective."""

import textwrap

import pytest
from archives import flip

# Each call of a state dict waits for all ranks: were one of them to call it once more, all would hang.
COUNTED = """
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

def taken(self):
    self.num_taken += 1
    dist.barrier()

class Loader:
    num_taken = 0

    def __init__(self):
        self.at = 0

    def state_dict(self):
        taken(self)
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]

class Model(torch.nn.Linear):
    num_taken = 0

    def state_dict(self, *args, **how):
        taken(self)
        return super().state_dict(*args, **how)

class Gathered(torch.nn.Linear):
    # As FSDP1: it is loaded by its own method, too, and its state dict has shards.
    num_taken = 0

    def state_dict(self, *args, **how):
        taken(self)
        return {name: distribute_tensor(t, mesh, [Shard(0)]) for name, t in super().state_dict(*args, **how).items()}

    def load_state_dict(self, state, **how):
        whole = {name: t.full_tensor() for name, t in state.items()}
        return super().load_state_dict(whole, **how)

class Momentum(torch.optim.SGD):
    num_taken = 0

    def state_dict(self):
        taken(self)
        return super().state_dict()

mesh = init_device_mesh("cpu", (here.size,))

def objects():
    torch.manual_seed(3)
    model = Model(4, 6)
    made = {"model": model, "gathered": Gathered(4, 6), "optimizer": Momentum(model.parameters(), lr=0.1), "loaders": [Loader(), Loader()]}
    if here.rank in own_parts:
        made["part"] = {f"of{here.rank}": torch.zeros(2)}
    return made

def counts(state):
    every = [state["model"], state["gathered"], state["optimizer"], *state["loaders"]]
    return [one.num_taken for one in every]
"""
RESTORE = """
state = objects()
with open_run(here.root) as ckpt:
    step = ckpt.restore(state)
here.tell([step, counts(state)])
"""
SAVE = """
state = objects()
state["loaders"][1].at = 7
with open_run(here.root) as ckpt:
    ckpt.save(state, 1).result()
"""


def test_where_nothing_is_committed(worlds):
    assert worlds.told(2, "own_parts = []" + COUNTED + RESTORE) == [[[None, [1, 1, 1, 1, 1]]]] * 2


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("saved_parts", [[], [1]], ids=["alike", "one rank has more"])
def test_where_as_many_ranks_or_others_have_saved(worlds, size, saved_parts):
    worlds.run(2, f"own_parts = {saved_parts}" + COUNTED + SAVE)

    assert worlds.told(size, "own_parts = []" + COUNTED + RESTORE) == [[[1, [1, 1, 1, 1, 1]]]] * size


def test_where_a_rank_looks_for_names_that_another_has_saved(worlds):
    worlds.run(2, "own_parts = [0]" + COUNTED + SAVE)

    ended = worlds.run(
        2, "own_parts = [1]" + COUNTED + RESTORE.replace("restore(state)", "restore(state, strict=False)")
    )

    assert [one.told for one in ended] == [[[1, [1, 1, 1, 1, 1]]]] * 2


def test_where_a_part_that_was_not_saved_contains_the_whole_state(worlds):
    worlds.run(2, "own_parts = []" + COUNTED + SAVE)
    around = 'state["settings"] = {"all": state}\nwith open_run'
    restore = RESTORE.replace("with open_run", around).replace("restore(state)", "restore(state, strict=False)")

    assert worlds.told(2, "own_parts = []" + COUNTED + restore) == [[[1, [1, 1, 1, 1, 1]]]] * 2


def test_where_one_rank_alone_finds_the_newest_step_damaged(worlds):
    """The other fills its state already, and must not wait in a state dict for the first."""
    worlds.run(
        2, "own_parts = []" + COUNTED + SAVE.replace("ckpt.save(state, 1)", "[ckpt.save(state, n) for n in (1, 2)][1]")
    )
    (archive,) = worlds.root.glob("step_00000002/rank_00001.*.tar")
    flip(archive, 700)  # in its index
    script = """
    import warnings
    warnings.simplefilter("ignore")
    state = objects()
    del state["gathered"]  # its own loading waits for all ranks
    with open_run(here.root) as ckpt:
        step = ckpt.restore(state, fallback=True)
    here.tell([step, [one.num_taken for one in (state["model"], state["optimizer"], *state["loaders"])]])
    """

    assert worlds.told(2, "own_parts = []" + COUNTED + textwrap.dedent(script)) == [[[1, [1, 1, 1, 1]]]] * 2


def test_where_the_newest_step_is_damaged_for_all_and_the_ranks_save_it_anew(worlds):
    worlds.run(
        2, "own_parts = []" + COUNTED + SAVE.replace("ckpt.save(state, 1)", "[ckpt.save(state, n) for n in (1, 2)][1]")
    )
    (archive,) = worlds.root.glob("step_00000002/rank_00001.*.tar")
    flip(archive, 700)
    script = """
    import warnings
    warnings.simplefilter("ignore")
    state = objects()
    del state["gathered"]
    with open_run(here.root) as ckpt:
        step = ckpt.restore(state, fallback=True)
        saved = ckpt.save(state, step=2).result().status
    with open_run(here.root) as ckpt:
        warnings.simplefilter("error")
        here.tell([step, saved, ckpt.restore(state)])
    """

    assert worlds.told(2, "own_parts = []" + COUNTED + textwrap.dedent(script)) == [[[1, "committed", 2]]] * 2
