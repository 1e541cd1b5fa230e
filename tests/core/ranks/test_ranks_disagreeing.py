"""Ranks whose states or calls do not fit together: each of them is told what is wrong, by name; or it is what pipelines do."""

import pytest
import torch
from rank_oracle import saved
from rank_states import numbered
from states import open_run

# Rank 1 has another state in step 2.
OTHER = """
with open_run(here.root) as ckpt:
    for step in (1, 2, 3):
        state = small(step)
        if step == {step} and here.rank == 1:
            {change}
        here.save(ckpt, state, step)
"""
# What rank 1 does to its state, and what all ranks are told.
CHANGES = {
    "another shape": (
        'state["model"]["whole"] = numbered(300, 1001)',
        "model.whole is float32[300, 1000] on rank 0 and float32[300, 1001] on rank 1",
    ),
    "another global shape": (
        'state["model"]["cut"] = DTensor.from_local(numbered(21, 3), mesh_of(), [Shard(0)], run_check=False, shape=(42, 3), stride=(3, 1))',
        "model.cut is float32[41, 3] on rank 0 and float32[42, 3] on rank 1",
    ),
    "another dtype": (
        'state["model"]["whole"] = numbered(300, 1000, dtype=torch.float64)',
        "model.whole is float32[300, 1000] on rank 0 and float64[300, 1000] on rank 1",
    ),
    "no part of what is cut": (
        'del state["model"]["cut"]',
        "model.cut is sharded, but not all",
    ),
    "a mesh of its own": (
        'state["model"]["cut"] = DTensor.from_local(numbered(20, 3), init_device_mesh("cpu", (2, 1)), [Shard(0), Replicate()], run_check=False)',
        "model.cut",
    ),
    "sums that are not added up": (
        'from torch.distributed.tensor import Partial; state["model"]["cut"] = DTensor.from_local(numbered(41, 3), mesh_of(), [Partial()], run_check=False)',
        "model.cut",
    ),
}


@pytest.mark.parametrize("step", [1, 2])
@pytest.mark.parametrize("change", CHANGES)
def test_a_rank_with_another_state_is_told_of_by_name_on_all_ranks(worlds, change, step):
    code, text = CHANGES[change]
    ended = worlds.run(2, OTHER.format(change=code, step=step))

    for one in ended:
        told = one.saves[step - 1]
        assert text in told.get("text", ""), told
        assert not told.get("undecided"), told
    assert open_run(worlds.root).steps() == sorted({1, 2, 3} - {step})


OTHER_STEP = """
with open_run(here.root) as ckpt:
    here.save(ckpt, small(1), 1)
    states = {{step: small(step) for step in range(2, 7)}}  # all ranks take part in each
    saves = []
    for step in {steps}[here.rank == {rank}]:
        try:
            saves.append((step, ckpt.save(states[step], step)))
        except Exception as error:
            here.tell([step, f"{{type(error).__name__}}: {{error}}"])
    for step, handle in saves:
        error = handle.exception()
        here.tell([step, None if error is None else f"{{type(error).__name__}}: {{error}}"])
"""


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("others", "own", "committed"),
    [
        ([2, 3, 4], [2, 4], [2, 4]),
        ([2, 4], [2, 3, 4], [2, 4]),
        ([2, 3, 4], [2, 5, 6], [2]),
        ([2, 4], [2, 2, 4], [2, 4]),
    ],
)
def test_a_call_that_one_rank_misses_or_makes_alone_fails_and_the_next_one_works(worlds, rank, others, own, committed):
    ended = worlds.run(3, OTHER_STEP.format(steps=[others, own], rank=rank))

    for number, one in enumerate(ended):
        outcomes = one.told[1:]
        assert [step for step, error in outcomes if error is None] == committed, outcomes
        for step, error in outcomes:
            if error is not None:
                assert f"step {step}" in error
                assert error.startswith("PeerFailedError" if number else ("PeerFailedError", "StepExistsError"))
    assert open_run(worlds.root).steps() == [1, *committed]
    for step in [1, *committed]:
        there = [path.name.split(".")[0] for path in (worlds.root / f"step_{step:08d}").iterdir()]
        assert sorted(there) == ["archives", "layout", "manifest", "rank_00000", "rank_00001", "rank_00002"]
        assert torch.equal(saved(worlds.root, step).tensors["model.cut"], numbered(41, 3) + step)


STAGES = """
with open_run(here.root) as ckpt:
    for step in (1, 2):
        pair = here.rank // 2
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipe", "dp"))["dp"]
        state = {f"stage{pair}": {"cut": spread(41, 3, mesh=mesh), "whole": numbered(300, 1000)}, "lr": 0.1}
        here.save(ckpt, state, step)
"""


def test_stages_of_a_pipeline_have_names_of_their_own(worlds):
    ended = worlds.run(4, STAGES)

    assert [one.get("status") for end in ended for one in end.saves] == ["committed"] * 8, ended[0].saves
    for step in (1, 2):
        found = saved(worlds.root, step)
        for stage in ("stage0", "stage1"):
            assert torch.equal(found.tensors[f"{stage}.cut"], numbered(41, 3))
            assert torch.equal(found.tensors[f"{stage}.whole"], numbered(300, 1000))
        half = 300 * 1000 * 4 // 2  # the ranks of each stage share what both have
        assert all(abs(num_bytes - half) < 8192 for num_bytes in found.num_bytes), found.num_bytes


ABSENT = """
state = small(1)
with open_run(here.root) as ckpt:
    here.expire(lambda: here.is_said("gone"))
    if here.rank == {absent}:
        here.say("gone")
    else:
        here.save(ckpt, state, 1)
    here.meet("end")
"""


@pytest.mark.parametrize("absent", [0, 1])
def test_a_rank_that_does_not_come_to_the_first_save_is_named(worlds, absent):
    """As under `if rank == 0: ckpt.save(…)`, which needs ranks=(0, 1)."""
    ended = worlds.run(2, ABSENT.format(absent=absent))

    (told,) = ended[1 - absent].saves
    assert (told["error"], told["rank"], told["undecided"]) == ("PeerFailedError", absent, False)
    assert "give its AsyncCheckpointer ranks=(0, 1)" in told["text"]
    assert open_run(worlds.root).steps() == []


def test_a_tensor_that_a_rank_drops_after_others_have_left_it_a_share_fails_that_step_alone(worlds):
    code = 'del state["model"]["whole"]'
    ended = worlds.run(2, OTHER.format(change=code, step=2))

    for one in ended:
        first, second, third = one.saves
        assert first["status"] == third["status"] == "committed"
        assert "rank 1 no longer has model.whole" in second["text"]
    assert torch.equal(saved(worlds.root, 3).tensors["model.whole"], numbered(300, 1000) + 3)
