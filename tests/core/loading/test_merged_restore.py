"""What several ranks have saved, restored in place: each rank reads what it holds, in the layout that is live now."""

import functools
import random
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_ranks import distributed, no_collectives, standing_at
from matrix_restores import SHAPES, SUITE, fully_sharded, layouts, restore, saved, wrong_at
from matrix_slices import numbered
from rank_archives import commit, load_all, opened, restore_at, write_all
from slices import ALL, PART, some
from states import MIB, difference
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.utils._pytree import tree_map_only
from trained_ranks import own_values, trained

from async_ckpt import StateMismatchError
from async_ckpt.core.loading.archives.contents import Part
from async_ckpt.core.loading.restore import RestoreOptions, restore_state
from async_ckpt.core.slicing.sharded import local_part


@pytest.fixture(scope="module")
def step_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a step that was saved in this layout."""
    return functools.cache(lambda name: saved(tmp_path_factory.mktemp("layout"), *SUITE[name]))


# A part: each layout into itself and two others, and from two others.
_OTHERS = some(range(1, len(SUITE)), 4)
PAIRS = [
    (before, after)
    for i, before in enumerate(SUITE)
    for j, after in enumerate(SUITE)
    if (j - i) % len(SUITE) in (0, *_OTHERS)
]


@pytest.mark.parametrize(("before", "after"), PAIRS)
def test_each_rank_gets_its_own_of_what_any_layout_has_saved(before, after, step_of):
    """The oracle is torch's own cutting: what it made is emptied, filled, and compared with what it was."""
    world, build = SUITE[after]

    for rank in range(world):
        assert wrong_at(rank, world, build, step_of(before)) == [], rank


def test_a_few_of_all_layouts_into_a_few_others(tmp_path):
    """Of the whole matrix, see `matrix_restores`."""
    chance, every = random.Random(PART), layouts(4)
    num_sources = len(every) if ALL else 4
    for number, before in enumerate(chance.sample(sorted(every), num_sources)):
        step = saved(tmp_path / str(number), *every[before])
        for after in chance.sample(sorted(every), 6):
            world, build = every[after]
            rank = chance.randrange(world)
            assert wrong_at(rank, world, build, step) == [], (before, after, rank)


# --- models and optimizers ----------------------------------------------------------------------------------------------


def held(state: dict[str, Any]) -> dict[str, Any]:
    """All that a rank has of a model and its optimizer, as plain values."""
    optimizer = state["optimizer"].state_dict()
    return {
        "model": {name: local_part(tensor).clone() for name, tensor in state["model"].state_dict().items()},
        "moments": [
            {name: local_part(value).clone() for name, value in moments.items()}
            for moments in optimizer["state"].values()
        ],
        "groups": optimizer["param_groups"],
    }


@pytest.mark.parametrize("has_moments", [True, False], ids=["moments", "none yet"])
@pytest.mark.parametrize("world", [3, 2], ids=["same layout", "another"])
def test_a_sharded_model_and_its_optimizer_are_filled_where_they_are(world, has_moments, tmp_path):
    paths = write_all(tmp_path, 3, lambda _: trained(3))

    for rank in range(world):
        with standing_at(rank, world):
            expected, live = held(trained(world)), trained(world, seed=1)
            if not has_moments:
                live["optimizer"].state.clear()
            before = [local_part(tensor).data_ptr() for tensor in live["model"].state_dict().values()]
            with no_collectives():
                restore_at(rank, world, paths, live)

            assert difference(held(live), expected) is None
            assert [local_part(tensor).data_ptr() for tensor in live["model"].state_dict().values()] == before
            for parameter, moments in live["optimizer"].state.items():
                assert moments["exp_avg"].placements == parameter.placements


def test_a_sharded_model_takes_what_one_process_has_saved(tmp_path):
    paths = write_all(tmp_path, 1, lambda _: trained(None))

    with standing_at(1, 2):
        live = trained(2, seed=1)
        live["optimizer"].state.clear()
        restore_at(1, 2, paths, live)

        assert difference(held(live), held(trained(2))) is None


def test_a_plain_model_takes_what_ranks_have_saved(tmp_path):
    paths = write_all(tmp_path, 3, lambda _: trained(3))

    with standing_at(0, 1):
        live = trained(None, seed=1)
        restore_at(0, 1, paths, live)

    assert difference(held(live), held(trained(None))) is None


def test_another_shape_is_refused_by_name_before_anything_is_written(tmp_path):
    paths = write_all(tmp_path, 2, fully_sharded(2))

    with standing_at(0, 2), torch.no_grad():
        live = {
            "a": numbered((13, 6)).zero_(),
            "b": distributed(numbered((9,)), init_device_mesh("cpu", (2,)), [Shard(0)]),
        }
        with pytest.raises(StateMismatchError, match=r"b is float32\[9\] here and float32\[7\] in the checkpoint"):
            restore_at(0, 2, paths, live)

        assert not live["a"].any()


# --- values of each rank ------------------------------------------------------------------------------------------------


def nothing() -> dict[str, Any]:
    return {
        "model": {"w": torch.zeros(3)},
        "rng": {"python": [9, 9], "torch": torch.tensor([9])},
        "timer": 9.0,
    }


def test_a_rank_of_a_world_of_the_same_size_gets_its_own_values(tmp_path):
    paths = write_all(tmp_path, 3, own_values)

    live = nothing()
    restore_at(2, 3, paths, live, per_rank=["rng"])

    assert difference(live, own_values(2)) is None


def test_in_a_world_of_another_size_nobody_gets_anothers_value(tmp_path):
    paths = write_all(tmp_path, 3, own_values)

    live = nothing()
    with pytest.raises(StateMismatchError) as caught:
        restore_at(2, 4, paths, live, per_rank=["rng"])

    assert difference(live, nothing()) is None
    assert "rng has a separate value for each rank that saved" in str(caught.value)
    assert "from_ranks={'timer': 0}" in str(caught.value)


def test_in_a_world_of_another_size_values_are_left_out_or_taken_from_a_rank(tmp_path):
    paths = write_all(tmp_path, 3, own_values)

    live = nothing()
    restore_at(2, 4, paths, live, per_rank=["rng"], select="model")
    assert difference(live, {**nothing(), "model": own_values(0)["model"]}) is None

    restore_at(2, 4, paths, live, per_rank=["rng"], from_ranks={"rng": 1, "timer": 0})
    assert difference(live, {**own_values(1), "timer": 0.0}) is None


def test_what_differs_inside_of_a_model_or_an_optimizer_is_named_too(tmp_path):
    def trained_at(rank: int) -> dict[str, Any]:
        state = trained(None)
        groups = state["optimizer"].param_groups
        if rank:
            groups.append({**groups[0], "params": [nn.Parameter(torch.ones(2))]})
        return state

    paths = write_all(tmp_path, 2, trained_at)
    with pytest.raises(StateMismatchError) as caught:
        restore_at(0, 1, paths, trained(None), per_rank=["model.1.running_mean"])

    assert "model.1.running_mean has a separate value for each rank that saved" in str(caught.value)
    assert "optimizer.param_groups has a separate value for each rank that saved" in str(caught.value)
    assert len(caught.value.mismatched) == 2


class Scheduler:
    """An object that takes its state as a whole."""

    def __init__(self) -> None:
        self.state: Any = None

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def test_no_object_is_handed_the_values_of_all_ranks(tmp_path):
    paths = write_all(tmp_path, 2, lambda rank: {"scheduler": {"last": {"lr": 0.1 * rank}, "step": 1}})

    live = {"scheduler": Scheduler(), "empty": {}}
    with pytest.raises(StateMismatchError, match=r"scheduler\.last\.lr has a separate value for each rank"):
        restore_at(0, 3, paths, {"scheduler": live["scheduler"]})
    assert live["scheduler"].state is None

    restore_at(1, 2, paths, {"scheduler": live["scheduler"]})
    assert live["scheduler"].state == {"last": {"lr": 0.1}, "step": 1}


def test_a_stage_of_a_pipeline_takes_its_part_and_misses_nothing_else(tmp_path):
    def stage(rank: int) -> dict[str, Any]:
        return {"model": {f"{rank}.weight": numbered((3, 2)) + rank, "shared": numbered((2,))}}

    paths = write_all(tmp_path, 2, stage)
    live = {"model": {"1.weight": torch.zeros(3, 2), "shared": torch.zeros(2)}}

    restore_at(0, 1, paths, live)
    assert difference(live, stage(1)) is None

    with pytest.raises(StateMismatchError, match=r"unexpected in the checkpoint: model\.shared"):
        restore_at(0, 1, paths, {"model": {"1.weight": torch.zeros(3, 2)}})


def test_a_name_of_another_rank_is_found_though_its_archive_was_opened_for_bytes_before(tmp_path):
    def stage(rank: int) -> dict[str, Any]:
        return {"model": fully_sharded(2)(rank), f"stage{rank}": {"x": numbered((3,)) + rank}}

    step, live = saved(tmp_path, 2, stage), {"model": {}, "stage1": {"x": torch.zeros(3)}}

    with standing_at(0, 2), torch.no_grad():
        restore(step, 0, 2, live)
    assert torch.equal(live["stage1"]["x"], numbered((3,)) + 1)


def test_a_rank_keeps_its_part_of_a_group_that_is_of_each(tmp_path):
    """Shards of two models, say, that have the same names on the ranks of each."""
    paths = write_all(tmp_path, 2, lambda rank: {"own": fully_sharded(2)(rank)})

    with standing_at(1, 2), torch.no_grad():
        live, expected = fully_sharded(2)(1), fully_sharded(2)(1)
        for tensor in live.values():
            local_part(tensor).zero_()
        restore_at(1, 2, paths, {"own": live}, per_rank=["own"])

        assert all(torch.equal(local_part(live[name]), local_part(expected[name])) for name in SHAPES)


LARGE = torch.arange(40_000.0)
UNLIKE: dict[str, tuple[Any, Any]] = {
    "list and tuple": ([LARGE], (LARGE,)),
    "dict and OrderedDict": ({"w": LARGE}, OrderedDict(w=LARGE)),
    "lists of two lengths": ([LARGE], [LARGE, LARGE + 1]),
    "tensor and dict": (LARGE, {"w": LARGE}),
    "tensor and None": (LARGE, None),
    "keys that read alike": ({1: LARGE}, {"1": LARGE}),
}


@pytest.mark.parametrize("unlike", UNLIKE)
def test_what_ranks_have_divided_is_whole_though_its_container_is_of_another_kind_on_some(unlike: str, tmp_path: Path):
    """Ranks divide tensors by name and shape: four of them, two with each kind."""
    paths = write_all(tmp_path, 4, lambda rank: {"m": UNLIKE[unlike][rank // 2]})

    for rank in range(4):
        want = {"m": UNLIKE[unlike][rank // 2]}
        live = tree_map_only(torch.Tensor, torch.zeros_like, want)
        restore_at(rank, 4, paths, live)
        assert difference(live, want) is None, rank


def test_shards_are_one_tensor_for_another_number_of_ranks_though_some_have_nothing_in_its_place(tmp_path: Path):
    """Two stages of a pipeline, each sharded over two ranks, of which one alone has the head."""

    def stage(rank: int) -> dict[str, Any]:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stages", "shards"))["shards"]
        return {"head": distributed(numbered((7, 3)), mesh, [Shard(0)]) if rank >= 2 else None}

    step = commit(write_all(tmp_path / "step_00000001", 4, stage), differing=("head",))

    live = {"head": torch.zeros(7, 3)}
    restore(step, 0, 1, live, from_ranks={"head": 3})
    assert torch.equal(live["head"], numbered((7, 3)))


def test_a_sparse_tensor_that_differs_between_ranks_is_kept_for_each_as_a_whole(tmp_path: Path):
    """By what ranks have compared only its values differ, and not where they are."""
    paths = write_all(tmp_path, 2, lambda rank: {"m": {"s": (torch.eye(3) + rank * torch.eye(3)).to_sparse()}})

    loaded = load_all(paths, per_rank=["m.s.values"])["m"]["s"]
    assert [one.to_dense().trace().item() for one in loaded.values()] == [3, 6]


# --- what is read -------------------------------------------------------------------------------------------------------


def test_what_lies_between_wide_rows_is_not_read(tmp_path, num_read):
    """Of three rows of 8 MiB a rank of eight holds 1 MiB each."""
    paths = write_all(tmp_path, 1, lambda _: {"wide": numbered((3, 2 * MIB))})
    with standing_at(5, 8), torch.no_grad():
        full = numbered((3, 2 * MIB))
        live = distributed(full, init_device_mesh("cpu", (8,)), [Shard(1)])
        expected = local_part(live).clone()
        local_part(live).zero_()
        with opened(paths, verify=False, ranks=(5, 8)) as merged:
            num_read.clear()
            restore_state([Part(merged)], {"wide": live}, RestoreOptions())

        assert torch.equal(local_part(live), expected)
    assert num_read[paths[0].name] <= 3 * MIB * 1.02


# --- objects with a state dict of their own -----------------------------------------------------------------------------


class Training:
    """Takes its state as torch's `set_state_dict` does: sharded as it has given it."""

    def __init__(self, tensors: dict[str, Any], epoch: int) -> None:
        self.tensors, self.epoch = tensors, epoch

    def state_dict(self) -> dict[str, Any]:
        return {"tensors": dict(self.tensors), "epoch": self.epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert all(isinstance(tensor, DTensor) for tensor in state["tensors"].values() if tensor.dim())
        self.tensors, self.epoch = state["tensors"], state["epoch"]


def test_an_object_with_shards_gets_them_back_as_shards(tmp_path):
    paths = write_all(tmp_path, 3, lambda rank: {"training": Training(fully_sharded(3)(rank), 5)})

    with standing_at(1, 2), torch.no_grad():
        live, expected = Training(fully_sharded(2)(1), 0), fully_sharded(2)(1)
        for tensor in live.tensors.values():
            local_part(tensor).zero_()
        restore_at(1, 2, paths, {"training": live})

        assert live.epoch == 5
        assert all(torch.equal(local_part(live.tensors[name]), local_part(expected[name])) for name in SHAPES)


def test_a_partial_tensor_is_refused_by_name(tmp_path):
    paths = write_all(tmp_path, 2, fully_sharded(2))

    with standing_at(0, 2):
        mesh = init_device_mesh("cpu", (2,))
        live = DTensor.from_local(numbered((7,)), mesh, [Partial()], run_check=False)
        with pytest.raises(StateMismatchError, match="b cannot be filled: a DTensor that is Partial"):
            restore_at(0, 2, paths, {"b": live}, select="b")
