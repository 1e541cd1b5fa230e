"""What real ranks have saved, restored by others: a model and its AdamW in another layout, and steps that not all can read."""

import pytest
import torch
from rank_worlds import Worlds
from states import difference

import async_ckpt

SAVE = """
state = {make}
keep_full(state, here.root + ".saved")
with open_run(here.root) as ckpt:
    here.save(ckpt, state, 1)
"""
RESTORE = """
state = {make}
with open_run(here.root) as ckpt:
    here.tell(ckpt.restore(state))
keep_full(state, here.root + ".restored")
model, optimizer = state["model"], state["optimizer"]
model(torch.ones(4, 13)).square().sum().backward()
optimizer.step()  # it goes on
"""
LAYOUTS = {
    "2 to 3": (2, "fsdp()", 3, "fsdp()"),
    "4 to 2": (4, "fsdp()", 2, "fsdp()"),
    "4 to 1": (4, "hsdp(2)", 1, "trained(network())"),
    "FSDP2 to TP": (3, "fsdp(width=14)", 2, "fsdp_tp(2)"),
    "TP to FSDP2": (4, "fsdp_tp(2)", 3, "fsdp(width=14)"),
    "DDP to FSDP2": (2, "ddp()", 2, "fsdp()"),
}


@pytest.mark.parametrize("layouts", LAYOUTS)
def test_a_model_and_its_optimizer_go_on_in_another_layout(worlds, layouts):
    size, make, new_size, new_make = LAYOUTS[layouts]
    worlds.run(size, SAVE.format(make=make))

    assert worlds.told(new_size, RESTORE.format(make=new_make)) == [[1]] * new_size
    saved, restored = (torch.load(f"{worlds.root}.{name}") for name in ("saved", "restored"))
    assert difference(dict(sorted(restored.items())), dict(sorted(saved.items()))) is None
    assert any("exp_avg" in name for name in saved)


TWICE = """
with open_run(here.root) as ckpt:
    for step in (1, 2):
        here.save(ckpt, small(step), step)
"""
# What each rank says in the end: the step that it has restored, whether that is what it has now, or its error.
AGAIN = """
import warnings
warnings.simplefilter("ignore")
from async_ckpt.core.loading import run_restore
{harm}
state = small(0)
with open_run(here.root) as ckpt:
    try:
        step = ckpt.restore(state, fallback={fallback})
        want = (numbered(41, 3) + step).chunk(here.size)[here.rank]
        here.tell([step, state["step"] == step and torch.equal(state["model"]["cut"].to_local(), want)])
    except Exception as error:
        here.tell([type(error).__name__, str(error)])
"""


def damaged(worlds: Worlds, how: str) -> None:
    (path,) = (worlds.root / "step_00000002").glob("rank_00002.*.tar")
    if how == "a missing archive":
        path.unlink()
        return
    data = bytearray(path.read_bytes())
    at = {"a corrupt index": 700, "a corrupt block": len(data) // 2}[how]
    data[at] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("how", ["a corrupt block", "a missing archive", "a corrupt index"])
def test_what_one_rank_cannot_read_is_left_by_all_or_raised(worlds, how):
    """Of the archives of three ranks the last is damaged."""
    worlds.run(3, TWICE)
    damaged(worlds, how)

    ended = worlds.run(2, AGAIN.format(harm="", fallback=True))
    assert [one.told for one in ended] == [[[1, True]]] * 2

    ended = worlds.run(2, AGAIN.format(harm="", fallback=False))
    told = [one.told[0] for one in ended]
    assert "CorruptCheckpointError" in [one[0] for one in told]
    assert all(one == [2, True] or one[0] == "CorruptCheckpointError" for one in told)


MISFITS = """
with open_run(here.root) as ckpt:
    ckpt.save({"b": torch.ones(3)}, 1).result()
for culprit in (1, 0):
    with open_run(here.root) as ckpt:
        try:
            ckpt.restore({"b": torch.zeros(3 + (here.rank == culprit))}, fallback=True)
        except Exception as error:
            here.tell([type(error).__name__, getattr(error, "rank", None), str(error)])
"""


def test_what_does_not_fit_on_one_rank_fails_on_all_and_none_waits(worlds):
    ended = worlds.run(2, MISFITS)

    for told, culprit in zip(zip(*(one.told for one in ended), strict=True), (1, 0), strict=True):
        assert told[culprit][0] == "StateMismatchError"
        assert told[1 - culprit][:2] == ["PeerFailedError", culprit]
        assert f"rank {culprit} could not restore step 1: StateMismatchError: " in told[1 - culprit][2]


HIDES = """
from async_ckpt.core.storage.local import LocalStorage
names, read, looks = LocalStorage.names, LocalStorage.read, [0]

def is_hidden():
    looks[0] += 1
    return here.rank == 1 and looks[0] <= {looks}

def stale_names(self, path):
    found = names(self, path)
    return [one for one in found if one != "step_00000002"] if path == "" and is_hidden() else found

def stale_read(self, path):
    if "step_00000002" in path and is_hidden():
        raise FileNotFoundError(path)
    return read(self, path)

LocalStorage.names, LocalStorage.read = stale_names, stale_read
run_restore.SEEN_SECONDS = {seconds}
"""


def test_a_rank_that_sees_an_old_listing_waits_for_the_step_that_rank_0_names(worlds):
    worlds.run(3, TWICE)

    assert worlds.told(2, AGAIN.format(harm=HIDES.format(looks=6, seconds=60), fallback=False)) == [[[2, True]]] * 2


def test_a_rank_that_never_sees_that_step_restores_no_other(worlds):
    worlds.run(3, TWICE)

    ended = worlds.run(2, AGAIN.format(harm=HIDES.format(looks=10**9, seconds=0.5), fallback=False))

    assert ended[0].told == [[2, True]]
    assert ended[1].told[0][0] == "PeerFailedError"
    assert "rank 0 restores step 2, which rank 1 does not see there" in ended[1].told[0][1]


def test_a_missing_layout_changes_nothing_but_what_is_read(worlds):
    worlds.run(3, TWICE)
    for path in worlds.root.glob("step_*/layout.*.json"):
        path.unlink()

    assert worlds.told(2, AGAIN.format(harm="", fallback=False)) == [[[2, True]]] * 2
    assert async_ckpt.load(worlds.root)["step"] == 2
