"""What one rank alone does, or has, or is late with: the others hear of it, and all go on together."""

import json

import pytest
import torch
import torch.distributed as dist
from fake_ranks import standing_at
from rank_oracle import run_of
from rank_states import numbered
from states import open_run
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from async_ckpt import Due, load
from async_ckpt.core.ranks.shared_values import SharedValues, apart
from async_ckpt.core.runs.coverage import check_coverage
from async_ckpt.core.state.capture import capture
from async_ckpt.core.state.division import StateDivider
from async_ckpt.errors import UnsupportedStateError


def texts(saves: list[dict[str, object]]) -> list[object]:
    """Of each save, that it is committed, or why not."""
    return [save.get("status") or save["text"] for save in saves]


MISTAKEN = """
states = [small(step) for step in range(5)]
with open_run(here.root) as ckpt:
    if here.rank == 0:
        here.hear("failed")  # rank 1 does not know by then what this start is called
    here.save(ckpt, states[1], 1, per_rank=["nope"] if here.rank else [])
    here.say("failed")
    here.save(ckpt, states[1], 1)
    here.save(ckpt, states[2], 2, record={"loss": here} if here.rank == 0 else None)
    here.save(ckpt, states[2], 2)
"""


def test_what_is_wrong_on_one_rank_alone_fails_on_all_and_all_go_on(worlds):
    """Even in the first call of all, and in the arguments that rank 0 alone uses."""
    first, second = worlds.run(2, MISTAKEN)

    for one, by_call, by_handle in ((first, 2, 0), (second, 0, 2)):
        assert [save.get("status") for save in one.saves] == [None, "committed", None, "committed"]
        assert [one.saves[n]["raised_by"] for n in (by_call, by_handle)] == ["save", "handle"]
    assert "rank 1: ValueError: per_rank='nope'" in first.saves[0]["text"]
    assert "rank 0: TypeError: record" in second.saves[2]["text"]
    assert open_run(worlds.root).steps() == [1, 2]


SKIPPING = """
states = [small(step) for step in range(6)]
with open_run(here.root, on_overlap="skip") as ckpt:
    if here.rank == {rank}:
        ckpt._saver.save, save = None, ckpt._saver.save  # fails before it could ask
    here.save(ckpt, states[1], 1)
    if here.rank == {rank}:
        ckpt._saver.save = save
    here.meet("failed")
    if here.rank == 0:
        here.at("write", lambda: here.hear("called-0", "called-1"), step=2)
    second = ckpt.save(states[2], 2)
    third = ckpt.save(states[3], 3)
    here.meet("called")
    here.tell([second.result().status, third.result().status])
"""


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_skip_alike_after_one_of_them_has_failed_to_ask(worlds, rank):
    ended = worlds.run(2, SKIPPING.format(rank=rank))

    assert [one.told[-1] for one in ended] == [["committed", "skipped"]] * 2
    assert [save["raised_by"] for one in ended for save in one.saves].count("save") >= 1
    assert open_run(worlds.root).steps() == [2]


def test_a_process_group_of_other_ranks_is_refused_by_a_checkpointer_that_knows_another(worlds):
    script = """
    with open_run(here.root) as ckpt:
        here.save(ckpt, small(1), 1)
        dist.destroy_process_group()
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        here.save(ckpt, {}, 2)
        for call in (ckpt.prewarm, ckpt.restore):
            try:
                call({})
            except ValueError as error:
                here.tell(str(error))
    """
    for rank, one in enumerate(worlds.run(2, script)):
        assert one.saves[1]["raised_by"] == "save"
        assert one.told[2:] == [one.saves[1]["text"]] * 2
        assert (
            f"this process was rank {rank} of 2, but in the current process group it is rank 0 of 1"
            in one.saves[1]["text"]
        )


@pytest.mark.parametrize("option", ["on_overlap", "due"])
def test_what_needs_agreement_is_taken_with_ranks_and_a_store_as_with_one_rank(tmp_path, option):
    given = {"on_overlap": "skip", "due": Due(seconds=3)}[option]
    open_run(tmp_path, **{option: given}, ranks=(1, 2), store=dist.HashStore()).close()
    open_run(tmp_path, **{option: given}, ranks=(0, 1)).close()


def test_what_is_unchanged_may_be_tied_or_without_elements_on_a_rank(worlds):
    """And borrowed after a restore, when each rank writes a share of what all have."""
    script = """
    whole = numbered(300, 100)
    lent = {"a": whole, "tied": whole, "cut": spread(1, 6), "none": torch.empty(0, 3)}
    for n, step in enumerate((1, 3)):
        with open_run(here.root) as ckpt:
            state = {"ref": lent, "model": {"w": numbered(7) + step}}
            if n:
                ckpt.prewarm(state)
                here.tell(ckpt.restore(state))
            here.save(ckpt, state, step, unchanged=["ref"])
            here.save(ckpt, state, step + 1, unchanged=["ref"])
    """
    for one in worlds.run(2, script):
        assert texts(one.saves) == ["committed"] * 4
    for step in (2, 3, 4):
        assert {lent.group for lent in run_of(worlds.root).manifest(step).elsewhere} == {"ref"}
    assert torch.equal(load(worlds.root)["ref"]["tied"], numbered(300, 100))


def test_objects_are_compared_one_by_one_and_not_by_their_pickles(worlds):
    script = """
    from fractions import Fraction
    state = {"order": {0, 8} if here.rank else {8, 0}, "loader": Fraction(here.rank, 7), "same": Fraction(1, 7)}
    with open_run(here.root, differing="fail") as ckpt:
        here.save(ckpt, state, 1, per_rank=["loader"])
        here.save(ckpt, state, 2)
    """
    first, _ = worlds.run(2, script)

    assert texts(first.saves)[0] == "committed"
    assert "not the same on all ranks: loader;" in first.saves[1]["text"]
    assert run_of(worlds.root).manifest(1).ranks.per_rank == ("loader",)


def test_a_small_tensor_that_differs_is_named_wherever_it_lies(worlds):
    script = """
    state = {"first": numbered(3), "large": numbered(300, 1000), "then": numbered(5), "own": torch.tensor([here.rank]), "last": numbered(7)}
    with open_run(here.root) as ckpt:
        here.save(ckpt, state, 1)
    """
    worlds.run(2, script)

    assert run_of(worlds.root).manifest(1).ranks.per_rank == ("own",)
    loaded = load(worlds.root)
    assert [int(loaded["own"][rank]) for rank in (0, 1)] == [0, 1]
    assert torch.equal(loaded["last"], numbered(7))


def test_ranks_that_the_process_group_calls_otherwise_write_all_that_they_hold():
    """What a mesh says of other ranks is about those of the process group."""
    told = {}
    for group_rank in range(4):
        with standing_at(group_rank, 4):
            mesh = init_device_mesh("cpu", (2, 2))
            part = DTensor.from_local(numbered(4, 300), mesh, [Replicate(), Shard(0)], run_check=False)
            states = StateDivider(3 - group_rank, 4)
            captured = capture({"w": part}, slicer=states.slicer)
            structure = states.structure(captured)
            told[3 - group_rank] = structure
            made = states.divided(captured, [0, 1, 2, 3]).captured
        assert [spec.shape for spec in made.specs] == [(4, 300)]
    classes: dict[str, list[int]] = {}
    for rank, structure in told.items():
        classes.setdefault(structure.digest, []).append(rank)
    assert sorted(map(sorted, classes.values())) == [[0, 2], [1, 3]]
    check_coverage(classes, {structure.digest: structure.text for structure in told.values()})


def test_keys_that_read_alike_are_refused_by_name():
    states = StateDivider(0, 2)
    with pytest.raises(UnsupportedStateError, match=r"^m\.1: two tensors have this name"):
        states.structure(capture({"m": {1: numbered(3), "1": numbered(4)}}, slicer=states.slicer))


def test_ranks_that_cut_a_tensor_in_different_ways_are_told_how():
    texts = {
        "a": json.dumps(["w", "float32", [4, 4], [[[0, 0, 1]], [2], [1], False, True]]),
        "b": json.dumps(["w", "float32", [4, 4], [[[1, 1, 1]], [1, 2], [0, 1], False, True]]),
    }
    told = (
        r"w is sharded differently .*: it is \[Shard\(0\)\] on a mesh of shape \[2\] on rank 0; "
        r"\[Replicate\(\), Shard\(1\)\] on a mesh of shape \[1, 2\] on rank 1; give it the same"
    )
    with pytest.raises(UnsupportedStateError, match=told):
        check_coverage({"a": [0], "b": [1]}, texts)


def test_a_driver_that_only_another_rank_than_0_has_is_told_of(worlds):
    script = """
    import logging.handlers
    logging.getLogger("async_ckpt").addHandler(told := logging.handlers.BufferingHandler(100))
    with open_run(here.root) as ckpt:
        here.save(ckpt, {"a": numbered(3)}, 1, driver={"loader": 5, **({"other": 7} if here.rank else {})})
        here.save(ckpt, {"a": numbered(3)}, 2, driver={"loader": here.rank})
    here.tell([one.getMessage() for one in told.buffer if one.levelno >= logging.WARNING])
    """
    first, second = worlds.run(2, script)

    assert first.told[-1] == []
    (told,) = second.told[-1]
    assert "step 1: rank 1 has entries in driver= that are not saved" in told
    assert "save() on rank 0: other" in told
    assert load(worlds.root)["loader"] == 0


def test_stages_of_a_pipeline_are_compared_once_and_then_only_what_has_changed(worlds):
    script = """
    from async_ckpt.core.ranks import comparison
    real, looked = comparison.values_of, []

    def values_of(storage, path, *arguments):
        looked.append(path[:13])
        return real(storage, path, *arguments)

    comparison.values_of = values_of
    with open_run(here.root) as ckpt:
        for step in range(1, 7):
            stage = {"w": torch.full((4,), step), "none": [], "n": step}
            lr = 0.1 * step + (here.rank if step == 4 else 0)
            here.save(ckpt, {f"stage{here.rank}": stage, "all": {f"of{here.rank}": step, "lr": lr}}, step)
    here.tell(looked)
    """
    first, second = worlds.run(2, script)

    assert texts(first.saves) == texts(second.saves) == ["committed"] * 6
    assert (first.told[-1], second.told[-1]) == (["step_00000001"] * 2 + ["step_00000004"] * 2, [])
    assert [run_of(worlds.root).manifest(step).ranks.per_rank for step in (3, 4)] == [(), ("all.lr",)]
    assert load(worlds.root)["stage1"]["n"] == 6


def test_replicas_are_read_for_their_comparison_at_the_first_save_alone_on_every_rank(worlds):
    script = """
    from async_ckpt.core.ranks import divide
    real, read = divide._digests, []

    def digests(copies):
        read.append(here.rank)
        return real(copies)

    divide._digests = digests
    state = ddp()
    with open_run(here.root) as ckpt:
        for step in (1, 2, 3):
            here.save(ckpt, state, step)
    here.tell(read)
    """
    assert [one.told[-1] for one in worlds.run(2, script)] == [[0], [1]]


def test_what_only_some_ranks_have_is_compared_among_these():
    def halves(state: dict[str, object], of_some: list[str]) -> tuple[str, str]:
        told = SharedValues(capture(state).skeleton, None, {}, [], (), of_some).digest()
        return told[:16], told[16:]

    one, other = (
        halves({"lr": 1, "stage0": {"n": 1}}, ["stage0"]),
        halves({"lr": 1, "stage1": {"n": 2}}, ["stage1"]),
    )
    assert one[0] == other[0]
    assert one[1] != halves({"lr": 1, "stage0": {"n": 2}}, ["stage0"])[1]
    assert one[0] != halves({"lr": 2, "stage0": {"n": 1}}, ["stage0"])[0]
    assert apart(["a.b.c", "a.b.d", "a.e", "x", "lr.now"], ["a.e", "lr.then"]) == ("a.b", "lr.now", "x")
