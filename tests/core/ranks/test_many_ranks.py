"""What a save costs where there are many ranks: two of them are real, and what others do at the store is simulated."""

import json
from itertools import islice

import pytest

from async_ckpt.core.ranks.rendezvous import looks
from async_ckpt.core.runs import coverage
from async_ckpt.core.runs.coverage import check_coverage
from async_ckpt.core.slicing.slices import Slices
from async_ckpt.core.state.division import StateDivider
from async_ckpt.errors import UnsupportedStateError
from benchmarks.simulated_ranks import KINDS, Saved, SimulatedWorld, captured

TENSORS = 40
replicas = Slices.replicas


def saves(kind, size: int) -> list[Saved]:
    world = SimulatedWorld(kind, size, TENSORS)
    try:
        return [world.save(step) for step in (1, 2)]
    finally:
        world.close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_says_no_more_to_others_where_there_are_more_of_them(kind):
    for few, many in zip(saves(kind, 64), saves(kind, 1024), strict=True):
        assert many.follower.sent <= few.follower.sent * 1.05
        # Of the files in the root, a start's and those of rank 0, more or fewer are there when a rank looks.
        assert many.follower.received <= few.follower.received * 1.05 + 3 * 270
        assert many.follower.requests <= few.follower.requests + 2
        assert many.words_of_follower.requests < 60
        assert many.words_of_follower.sent < 4096
        assert many.layout_bytes <= few.layout_bytes * 1.05
        assert many.manifest_bytes <= few.manifest_bytes + 16


@pytest.mark.parametrize("kind", KINDS)
def test_rank_0_asks_the_object_store_the_same_however_many_ranks_there_are(kind):
    for few, many in zip(saves(kind, 64), saves(kind, 1024), strict=True):
        assert abs(many.rank_0.requests - few.rank_0.requests) <= 3
        assert many.rank_0.requests < 25
        assert many.commit_seconds < few.commit_seconds + 1


def test_rank_0_reads_all_receipts_by_one_question_and_deletes_them_once_the_step_is_committed():
    _, later = saves("FSDP", 1024)
    assert later.words_of_rank_0.received < 1024 * 300
    assert later.words_of_rank_0.requests < 1.5 * 1024  # most of them to delete the receipts of the save before


def test_the_ranks_store_keeps_up_with_looks_receipts_and_heartbeats():
    world = SimulatedWorld("FSDP", 4096, TENSORS)
    try:
        saved = world.save(1)
        rest = world.rest()
    finally:
        world.close()

    assert saved.store_share < 0.95
    assert rest.store_share < 0.1
    assert saved.known_seconds < saved.commit_seconds + 2


def test_many_ranks_look_less_often_so_that_a_store_answers_all_of_them():
    for size in (2, 1000, 16_384):
        pauses = list(islice(looks(True, size), 20))
        assert size / (sum(pauses) / len(pauses)) < 7000
    assert next(looks(True, 2)) < 0.1
    assert next(looks(False, 16_384)) < 0.1  # a folder of this machine


def test_a_gap_is_found_in_a_tensor_that_fewer_ranks_have_than_another_that_is_cut_alike():
    def line(name: str) -> str:
        return json.dumps([name, "float32", [6], [[[0, 0, 1]], [3], [1], False, True]])

    classes = {"a": [0, 1], "b": [2]}
    whole = {"a": f"{line('x')}\n{line('y')}", "b": f"{line('x')}\n{line('y')}"}
    check_coverage(classes, whole)

    with pytest.raises(UnsupportedStateError, match="y is sharded, but not all of its ranks saved it"):
        check_coverage(classes, {**whole, "b": line("x")})


@pytest.mark.parametrize("kind", KINDS)
def test_who_shares_tensors_that_are_cut_alike_is_found_once(kind, monkeypatch):
    here, states = captured(kind, 3, 1024, TENSORS), StateDivider(3, 1024)
    asked = []
    monkeypatch.setattr(Slices, "replicas", lambda slices: asked.append(slices) or replicas(slices))

    states.divided(here, range(1024))
    assert len(asked) <= 4
    states.divided(captured(kind, 3, 1024, TENSORS), range(1024))
    assert len(asked) <= 4


def test_a_rank_holds_on_to_nothing_of_tensors_that_others_write():
    """Views of all of them would take longer than all else of a plan."""
    divided = StateDivider(3, 1024).divided(captured("DDP", 3, 1024, TENSORS), range(1024)).captured
    nothing = [tensor for spec, tensor in zip(divided.specs, divided.tensors, strict=True) if spec.shape == (0,)]

    assert len(nothing) > TENSORS // 2
    assert len({id(tensor) for tensor in nothing}) == 1


def test_ranks_are_looked_through_for_gaps_once_for_all_tensors_that_are_cut_alike(monkeypatch):
    lines = [json.dumps([f"t{n}", "float32", [8], [[[0, 0, 1]], [8], [1], False, True]]) for n in range(50)]
    looked = []
    monkeypatch.setattr(coverage, "_has_all", lambda *told: looked.append(told) or True)

    check_coverage({"a": range(8)}, {"a": "\n".join(lines)})
    assert len(looked) == 1
