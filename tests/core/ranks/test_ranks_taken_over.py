"""Frozen parameters are taken over on ranks, too: each rank decides about its own archive, and any world reads it."""

from textwrap import dedent

import pytest
import torch
from rank_oracle import run_of
from states import difference, open_run

import async_ckpt

TRAINED = """
from torch.distributed.fsdp import fully_shard
from frozen import Adapted
model = Adapted()
for number in range(2):
    model.base[number] = torch.nn.Linear(1100, 1100, bias=False).requires_grad_(False)
{shard}
state = {{"model": model, "lr": 0.01}}
def trained():
    with torch.no_grad():
        model.down.weight.add_(1)
"""
FSDP2 = TRAINED.format(shard="fully_shard(model)")
REPLICATED = TRAINED.format(shard="")


def size_of(run: str, step: int) -> int:
    ranks = run_of(run).manifest(step).ranks
    assert ranks is not None
    return ranks.num_bytes


def assert_is_saved(run: str, step: int) -> None:
    found = {
        f"model.{name}": tensor
        for name, tensor in async_ckpt.load(f"{run}/step_{step:08d}", select="model")["model"].items()
    }
    assert difference(dict(sorted(found.items())), dict(sorted(torch.load(f"{run}.{step}.pt").items()))) is None


@pytest.mark.parametrize("make", [FSDP2, REPLICATED], ids=["FSDP2", "replicated"])
@pytest.mark.parametrize("readers", [1, 3])
def test_a_frozen_base_is_written_once_by_all_ranks_together(worlds, make, readers):
    script = """
    with open_run(here.root, keep=1) as ckpt:
        for step in range(1, 4):
            trained()
            keep_full(state, f"{here.root}.{step}.pt")
            here.save(ckpt, state, step)
    """
    told = worlds.run(2, make + dedent(script))

    assert [[one["status"] for one in rank.saves] for rank in told] == [["committed"] * 3] * 2
    assert open_run(worlds.root).steps() == [1, 3]
    assert {one.step for one in run_of(worlds.root).manifest(3).elsewhere} == {1}
    assert size_of(worlds.root, 3) < size_of(worlds.root, 1) / 10
    assert_is_saved(worlds.root, 3)
    assert async_ckpt.verify(worlds.root).steps == (1, 3)
    restored = """
    with open_run(here.root) as ckpt:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        assert ckpt.restore(state) == 3
        keep_full(state, f"{here.root}.again.pt")
        here.save(ckpt, state, 4)
    """
    worlds.run(readers, make + dedent(restored))
    again, want = torch.load(f"{worlds.root}.again.pt"), torch.load(f"{worlds.root}.3.pt")
    assert difference(dict(sorted(again.items())), dict(sorted(want.items()))) is None
    assert not run_of(worlds.root).manifest(4).elsewhere


def test_ranks_may_take_different_tensors_over(worlds):
    """One rank's shard was written to. Another world than the one that saved reads each part from where it is."""
    script = """
    with open_run(here.root, keep=1) as ckpt:
        for step in range(1, 5):
            if step == 3 and here.rank == 1:
                with torch.no_grad():
                    model.base[0].weight._local_tensor.mul_(2)
            keep_full(state, f"{here.root}.{step}.pt")
            here.save(ckpt, state, step)
    """
    worlds.run(2, FSDP2 + dedent(script))

    assert {one.step for one in run_of(worlds.root).manifest(4).elsewhere} == {1, 3}
    assert open_run(worlds.root).steps() == [1, 3, 4]
    assert size_of(worlds.root, 1) / 10 < size_of(worlds.root, 3) < size_of(worlds.root, 1) * 2 / 3
    assert_is_saved(worlds.root, 3)
    assert_is_saved(worlds.root, 4)


def test_a_write_past_the_counter_on_one_rank_fails_the_save_of_all(worlds):
    script = """
    with open_run(here.root) as ckpt:
        for step in range(1, 4):
            if step == 2 and here.rank == 1:
                model.base[0].weight._local_tensor.data[0, 0] += 1
            keep_full(state, f"{here.root}.{step}.pt")
            here.save(ckpt, state, step)
    """
    told = worlds.run(2, FSDP2 + dedent(script))

    assert [one.get("status") for one in told[0].saves] == ["committed", None, "committed"]
    assert "model.base.0.weight" in told[1].saves[1]["text"]
    assert "TornSnapshotError" in told[0].saves[1]["text"]
    assert open_run(worlds.root).steps() == [1, 3]
    assert_is_saved(worlds.root, 3)


PLACES = """
from async_ckpt.core.saving.tiers import Tiers
has_room, is_full = Tiers._has_room, []
Tiers._has_room = lambda tiers, run: run not in is_full and has_room(tiers, run)

def saved(ckpt, step, word, **options):
    # After the first save, rank 0 saves last, so that the other rank does not know the place yet.
    if here.rank == 0 and ckpt.steps():
        here.hear(word)
    handle = ckpt.save(state, step, **options)
    here.say(word)
    return handle
"""


@pytest.mark.parametrize("make", [FSDP2, REPLICATED], ids=["FSDP2", "replicated"])
def test_at_several_places_a_frozen_base_is_where_the_steps_are_that_borrow_it(worlds, tmp_path, make):
    """Rank 0 alone chooses the place: the other ranks expect that of the last commit, and borrow from a step there."""
    near, far = (str(tmp_path / name) for name in ("near", "far"))
    script = f"""
    with open_run([{near!r}, {far!r}]) as ckpt:
        for step in range(1, 8):
            is_full[:] = [ckpt._roots.runs[0]] if step in (3, 4) else []
            trained()
            keep_full(state, f"{{here.root}}.{{step}}.pt")
            here.tell(saved(ckpt, step, f"begun{{step}}").result().path)
    """
    told = worlds.run(2, make + PLACES + dedent(script))

    assert [path.startswith(far) for path in told[0].told] == [step in (3, 4) for step in range(1, 8)]
    for root, steps in ((near, (1, 2, 5, 6, 7)), (far, (3, 4, 7))):
        assert {*steps} <= {*open_run(root).steps()}
        for step in steps:
            found = async_ckpt.load(f"{root}/step_{step:08d}", select="model")["model"]
            want = torch.load(f"{worlds.root}.{step}.pt")
            assert (
                difference({f"model.{name}": found[name] for name in sorted(found)}, dict(sorted(want.items()))) is None
            )
        async_ckpt.verify(root)
        assert size_of(root, 7) < size_of(near, 1) / 10
    assert size_of(near, 2) < size_of(near, 1) / 10
