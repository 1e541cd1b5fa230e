"""What ranks have that others have not - ties, groups of their own - and what is left to whom because of that."""

from typing import Any

import pytest
import torch
from fake_ranks import standing_at
from rank_archives import commit, irregular_ranks, load_all, write_all
from rank_states import DTensor, Replicate, Shard, mesh_of, numbered
from states import open_run

import async_ckpt
from async_ckpt import PerRank, UnsupportedStateError
from async_ckpt.core.runs.coverage import check_coverage, own_names
from async_ckpt.core.slicing.sharded import mesh_of as mesh_facts
from async_ckpt.core.slicing.shares import MODULUS
from async_ckpt.core.state.capture import capture
from async_ckpt.core.state.division import StateDivider


def cut_rows(rank: int, *shape: int) -> DTensor:
    """Of three ranks; it may be none."""
    local = numbered(*shape).tensor_split([-(-shape[0] // 3) * n for n in (1, 2)])[rank].clone()
    return DTensor.from_local(
        local, mesh_of(), [Shard(0)], run_check=False, shape=torch.Size(shape), stride=(shape[1], 1)
    )


def partly_tied(*who: int) -> Any:
    """A state of which these ranks have tied tensors, and the others the same, untied."""

    def build(rank: int) -> dict[str, Any]:
        large, small = numbered(600, 1000), numbered(7)
        cut, rare = cut_rows(rank, 600, 1000), cut_rows(rank, 2, 3)
        other = DTensor.from_local(cut.to_local().clone(), cut.device_mesh, cut.placements)
        tied = rank in who
        return {
            "large": {"a": large, "b": large if tied else large.clone()},
            "small": {"a": small, "b": small if tied else small.clone()},
            "cut": {"a": cut, "b": cut if tied else other},
            "everywhere": {"a": rare, "b": rare},  # but for rank 2, which has nothing of it
        }

    return build


@pytest.mark.parametrize("who", [(0,), (1,), (0, 2), ()], ids=str)
def test_what_only_some_ranks_have_tied_is_all_there(tmp_path, who):
    folder = tmp_path / "run" / "step_00000001"
    paths = write_all(folder, 3, partly_tied(*who))
    commit(paths)

    for state in (load_all(paths), async_ckpt.load(folder)):
        for group, shape in (
            ("large", (600, 1000)),
            ("small", (7,)),
            ("cut", (600, 1000)),
            ("everywhere", (2, 3)),
        ):
            assert torch.equal(state[group]["a"], numbered(*shape))
            assert torch.equal(state[group]["b"], numbered(*shape))
    # A reader works out the same as what the ranks have written.
    assert irregular_ranks(folder) == set()


def test_ranks_that_have_tied_other_tensors_share_with_none_that_have_not():
    """Whoever has tied it would write nothing of what others leave to it."""
    digests = []
    for tied in (False, True):
        states, large = StateDivider(0, 2), numbered(600, 1000)
        with standing_at(0, 2):
            state = {"a": large, "b": large if tied else large.clone()}
            digests.append(states.structure(capture(state, slicer=states.slicer)).digest)
    assert len({*digests}) == 2


def test_what_a_rank_has_for_itself_does_not_change_what_it_leaves_to_others(tmp_path):
    """Rank 0 has much of its own: then it would write other small tensors than rank 1 takes it to."""

    def build(rank: int) -> dict[str, Any]:
        own = [torch.full((64, 256), float(rank)) for _ in range(10 if rank == 0 else 1)]
        return {"buffer": own, "model": {f"{n:03d}": torch.full((64, 256), float(n)) for n in range(280)}}

    folder = tmp_path / "run" / "step_00000001"
    paths = write_all(folder, 2, build, per_rank=("buffer",))
    commit(paths, per_rank=("buffer",))

    state = load_all(paths, per_rank=("buffer",))
    for n in range(280):
        assert bool((state["model"][f"{n:03d}"] == n).all())
    assert irregular_ranks(folder, ("buffer",)) == set()


def structures(
    states: list[dict[str, Any]], per_rank: list[tuple[str, ...]], roots: list[bool] | None = None
) -> tuple[dict[str, list[int]], dict[str, str]]:
    """The classes of these ranks, and how they look."""
    classes: dict[str, list[int]] = {}
    texts: dict[str, str] = {}
    for rank, (state, own) in enumerate(zip(states, per_rank, strict=True)):
        with standing_at(rank, len(states)):
            root = mesh_facts(mesh_of()) if roots and roots[rank] else None
            ranked = StateDivider(rank, len(states), root)
            made = ranked.structure(capture(state, slicer=ranked.slicer), own)
        classes.setdefault(made.digest, []).append(rank)
        texts[made.digest] = made.text
    return classes, texts


def test_a_group_that_only_some_ranks_have_for_themselves_is_refused_by_name():
    state = {"a": {"x": numbered(3)}, "ab": numbered(3)}
    found = structures([state] * 3, [("a",), (), ()])
    with pytest.raises(
        UnsupportedStateError,
        match=r"a is in per_rank= on rank 0, but not on rank 1, which shares a\.x; give the same per_rank=",
    ) as caught:
        check_coverage(*found)
    assert caught.value.path == "a.x"

    check_coverage(*structures([state] * 3, [("a",)] * 3))
    # Stages of a pipeline; and values alone, which are each rank's own wherever one says so.
    stages = structures([{"a": numbered(3), "b": 1}, {"c": numbered(3), "b": 2}], [("a",), ("b", "c")])
    check_coverage(*stages)
    assert own_names(stages[1]) == ("a", "b", "c")


def test_a_mesh_that_only_some_ranks_were_given_is_refused():
    state = {"a": numbered(3)}
    with pytest.raises(UnsupportedStateError, match="mesh= is not the same on ranks 0 and 1; give the same"):
        check_coverage(*structures([state] * 3, [()] * 3, [True, False, True]))
    check_coverage(*structures([state] * 3, [()] * 3, [True] * 3))


# Rank 1 alone names what each rank has for itself. Small values first, then a tensor that ranks divide.
PER_RANK_ON_ONE = """
state = {"whole": numbered(300, 1000), "loader": {"position": here.rank, "seen": torch.tensor([here.rank])}}
with open_run(here.root) as ckpt:
    own = ["loader"] if here.rank else []
    here.save(ckpt, {**state, "loader": {"position": here.rank}}, 1, per_rank=own)
    here.save(ckpt, {**state, "loader": {"noise": torch.full((300, 1000), float(here.rank))}}, 2, per_rank=own)
"""


def test_what_one_rank_alone_calls_its_own_is_kept_for_each_or_refused(worlds):
    ended = worlds.run(2, PER_RANK_ON_ONE)

    assert [one.saves[0].get("status") for one in ended] == ["committed"] * 2
    with open_run(worlds.root) as ckpt:
        assert ckpt.steps() == [1]
        position = ckpt.load(1)["loader"]
    assert isinstance(position, PerRank)
    assert [position[rank]["position"] for rank in (0, 1)] == [0, 1]
    for one in ended:
        assert "loader is in per_rank= on rank 1, but not on rank 0" in one.saves[1]["text"]


def balances(build: Any, world: int, roots: list[bool] | None = None) -> int:
    """The sum of what ranks say they have written, if each takes all of them to have a state like its own."""
    total = 0
    for rank in range(world):
        with standing_at(rank, world):
            mesh = mesh_of(2, world // 2, names=("a", "b"))
            root = mesh_facts(mesh) if roots and roots[rank] else None
            states = StateDivider(rank, world, root)
            total += states.divided(capture(build(rank, mesh), slicer=states.slicer), range(world)).balance
    return total % MODULUS


def test_by_the_sum_of_what_ranks_have_written_it_is_seen_that_something_is_missing():
    def build(rank: int, mesh: Any) -> dict[str, Any]:
        local = numbered(1000, 300).chunk(mesh.size(1))[rank % mesh.size(1)].clone()
        hybrid = DTensor.from_local(local, mesh, [Replicate(), Shard(0)], run_check=False)
        part = DTensor.from_local(numbered(512, 1024), mesh["b"], [Replicate()], run_check=False)
        return {"large": numbered(1024, 1024), "hybrid": hybrid, "part": part, "more": numbered(300, 70)}

    with standing_at(0, 1):
        tensor = numbered(1024, 1024)

    assert balances(build, 4) == 0
    assert balances(build, 4, [True] * 4) == 0
    # Some ranks count on others that do not know of it: the root mesh, a tie, another tensor.
    assert balances(build, 4, [True, False, True, True]) != 0
    assert balances(lambda rank, _: {"a": tensor, "b": tensor if rank else tensor.clone()}, 2) != 0
    assert balances(lambda rank, _: {"a": tensor, **({"b": tensor + 1} if rank == 1 else {})}, 2) != 0
    assert balances(lambda _, __: {"a": tensor, "b": tensor + 1}, 2) == 0


# Rank 1 leaves out what falls to it, by a mistake of the library.
SLIP = """
from async_ckpt.core.state import division

real = division.rectangles_to_write
for step in (1, 2):
    if here.rank == 1 and step == 2:
        division.rectangles_to_write = lambda holdings: {name: () for name in real(holdings)}
    with open_run(here.root) as ckpt:
        here.save(ckpt, {"whole": numbered(300, 1000)}, step)
"""


def test_a_step_of_which_something_was_not_written_is_not_committed(worlds):
    ended = worlds.run(2, SLIP)

    assert [one.saves[0]["status"] for one in ended] == ["committed"] * 2
    for one in ended:
        assert "2 ranks, the first of them 0, disagree on how to split replicated tensors" in one.saves[1]["text"]
    assert open_run(worlds.root).steps() == [1]
