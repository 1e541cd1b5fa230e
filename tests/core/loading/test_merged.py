"""What several ranks have saved, loaded as one state: full tensors, bit for bit, and nobody's value taken for another's."""

import time
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from archives import flip, forge, little_memory
from matrix_slices import MODEL_PARALLEL, fsdp2_over_tp, numbered, torch_cuts
from rank_archives import commit, load_all, opened, write_all
from states import MIB, difference
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import _StridedShard

import async_ckpt
from async_ckpt import CorruptCheckpointError
from async_ckpt.core.loading.archives.contents import Part
from async_ckpt.core.loading.archives.find import from_path
from async_ckpt.core.loading.archives.merged_archives import MergedArchives
from async_ckpt.core.loading.archives.step_archives import Readers
from async_ckpt.core.state import PerRank


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(70, 513), nn.Linear(513, 3)).to(torch.bfloat16)


def sharded(mesh_shape: tuple[int, ...]) -> nn.Module:
    model = network()
    names = ("replicate", "shard")[-len(mesh_shape) :]
    fully_shard(model, mesh=init_device_mesh("cpu", mesh_shape, mesh_dim_names=names))
    return model


# --- tensors ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mesh_shape", [(4,), (2, 2)], ids=["FSDP2", "HSDP"])
@pytest.mark.parametrize("verify", [True, False], ids=["verified", "not"])
def test_a_sharded_model_loads_as_full_tensors(mesh_shape, verify, tmp_path):
    paths = write_all(tmp_path, 4, lambda _: {"model": sharded(mesh_shape)})

    loaded = load_all(paths, verify=verify)

    assert difference(loaded, {"model": network().state_dict()}) is None


def test_what_replicas_share_loads_whole(tmp_path):
    """Above 1 MiB a tensor is cut at rows, below it belongs to one rank, and small ones are written by all."""
    state = {
        "large": numbered((700, 600)),
        "middle": numbered((300, 100)),
        "small": numbered((5,)),
        "none": numbered((0, 3)),
    }
    paths = write_all(tmp_path, 3, lambda _: state)

    assert difference(load_all(paths), state) is None
    assert sum(path.stat().st_size for path in paths) < 2.2 * 700 * 600 * 4


@pytest.mark.parametrize(
    ("mesh", "placed", "sizes"),
    [
        ({"dp": 3, "tp": 2}, MODEL_PARALLEL, [1, 7, 13]),
        ({"replicate": 2, "dp": 2, "tp": 2}, {"rows": (Shard(0),), "columns": (Shard(1),)}, [7]),
    ],
    ids=["FSDP2 over TP", "HSDP over TP"],
)
def test_what_fully_shard_cuts_unevenly_loads_with_each_element_in_its_place(mesh, placed, sizes, tmp_path):
    shapes: dict[str, tuple[int, ...]] = {}

    def build(rank: int) -> dict[str, Any]:
        tensors = fsdp2_over_tp(rank, mesh, placed, sizes)
        shapes.update((name, shape) for name, (_, shape) in tensors.items())
        return {name: tensor for name, (tensor, _) in tensors.items()}

    paths = write_all(tmp_path, torch.Size(mesh.values()).numel(), build)

    loaded = load_all(paths)
    assert len(loaded) == len(placed) * len(sizes)
    for name, tensor in loaded.items():
        assert torch.equal(tensor, numbered(shapes[name])), name


def test_strided_shards_load_with_each_element_in_its_place(tmp_path):
    placed = [(_StridedShard(0, split_factor=2), Shard(1)), (Shard(1), Shard(1)), (Shard(0), Shard(0))]
    paths = write_all(
        tmp_path,
        6,
        lambda _: {name: tensor for name, (tensor, _) in torch_cuts((2, 3), placed, [2, 8]).items()},
    )

    for name, tensor in load_all(paths).items():
        assert torch.equal(tensor, numbered(tuple(tensor.shape))), name


def test_tied_weights_stay_tied(tmp_path):
    def build(_: int) -> Any:
        model = sharded((4,))
        return {"model": model, "tied": model[1].weight}  # three rows on four ranks: one has nothing of it

    loaded = load_all(write_all(tmp_path, 4, build))

    assert loaded["tied"] is loaded["model"]["1.weight"]


def test_stages_of_a_pipeline_load_as_one_model(tmp_path):
    def build(rank: int) -> Any:
        return {"model": {f"{rank}.weight": numbered((3, 2)) + rank, "note": "both"}, f"only {rank}": rank}

    loaded = load_all(write_all(tmp_path, 2, build))

    assert difference(loaded, {
        "model": {"0.weight": numbered((3, 2)), "note": "both", "1.weight": numbered((3, 2)) + 1},
        "only 0": 0, "only 1": 1,
    }) is None  # fmt: skip


def test_of_archives_that_overlap_the_lowest_ranks_bytes_are_read(tmp_path):
    paths = write_all(tmp_path, 3, lambda rank: {"t": numbered((40, 10)) + 1000 * rank}, shared=False)

    assert torch.equal(load_all(paths)["t"], numbered((40, 10)))
    assert torch.equal(load_all(paths[::-1])["t"], numbered((40, 10)))


# --- values -------------------------------------------------------------------------------------------------------------


def values_of(rank: int) -> dict[str, Any]:
    return {
        "rng": {"torch": torch.tensor([rank, 1]), "python": (rank, "x")},
        "model": {"w": numbered((3, 2))},
        "timers": {"alike": 1.5, "seconds": float(rank), "kind": 1 if rank else True, "zero": 0.0 if rank else -0.0},
        "names": {"a", "b"},
        "shift": [numbered((2,))] * rank,
    }  # fmt: skip


def test_what_ranks_have_of_their_own_comes_from_all_of_them(tmp_path):
    loaded = load_all(write_all(tmp_path, 3, values_of), per_rank=["rng"])

    assert {rank: value["python"] for rank, value in loaded["rng"].items()} == {n: (n, "x") for n in range(3)}
    assert [loaded["rng"][rank]["torch"].tolist() for rank in range(3)] == [[0, 1], [1, 1], [2, 1]]


def test_values_that_differ_come_from_all_ranks_even_where_python_calls_them_equal(tmp_path):
    loaded = load_all(write_all(tmp_path, 3, values_of), per_rank=["rng"])

    timers = loaded["timers"]
    assert timers["alike"] == 1.5
    assert dict(timers["seconds"]) == {0: 0.0, 1: 1.0, 2: 2.0}
    assert repr(timers["kind"]) == "PerRank({0: True, 1: 1, 2: 1})"
    assert repr(timers["zero"]) == "PerRank({0: -0.0, 1: 0.0, 2: 0.0})"
    assert loaded["names"] == {"a", "b"}
    assert [len(items) for items in loaded["shift"].values()] == [0, 1, 2]


def test_a_value_of_each_rank_cannot_be_changed(tmp_path):
    timers = load_all(write_all(tmp_path, 2, values_of))["timers"]

    with pytest.raises(TypeError):
        timers["seconds"][0] = 5.0
    assert isinstance(timers["seconds"], PerRank)


def test_whose_value_counts_can_be_said_by_name(tmp_path):
    paths = write_all(tmp_path, 3, values_of)

    loaded = load_all(paths, per_rank=["rng"], from_ranks={"rng": 2, "timers.seconds": 1})

    assert loaded["rng"]["python"] == (2, "x")
    assert loaded["rng"]["torch"].tolist() == [2, 1]
    assert loaded["timers"]["seconds"] == 1.0
    assert isinstance(loaded["timers"]["kind"], PerRank)
    assert load_all(paths, from_ranks={"timers": 1, "rng": 0, "shift": 0})["timers"] == values_of(1)["timers"]


def test_a_rank_that_has_no_such_value_is_refused_by_name(tmp_path):
    with pytest.raises(KeyError, match="rank 7 has saved no rng; ranks 0, 1, 2 have"):
        load_all(write_all(tmp_path, 3, values_of), per_rank=["rng"], from_ranks={"rng": 7})


def test_small_tensors_come_from_the_lowest_rank_unless_they_are_of_each(tmp_path):
    """Running statistics, say: every rank has written its own, and the manifest knows whether they were alike."""
    paths = write_all(tmp_path, 2, lambda rank: {"model": {"bn.mean": torch.full((2,), float(rank))}})

    assert load_all(paths)["model"]["bn.mean"].tolist() == [0, 0]
    apart = load_all(paths, per_rank=["model.bn.mean"])["model"]["bn.mean"]
    assert {rank: value.tolist() for rank, value in apart.items()} == {0: [0, 0], 1: [1, 1]}


class Odd:
    """Not plain data, so it is pickled."""

    def __init__(self, rank: int) -> None:
        self.rank = rank


@pytest.mark.filterwarnings("ignore")
def test_pickled_objects_have_equal_digests_if_they_are_equal_whichever_rank_has_saved_them(tmp_path):
    """So they are compared without being loaded, which would need trust."""
    paths = write_all(tmp_path, 2, lambda rank: {"shared": Odd(0), f"of{rank}": Odd(0), "odd": Odd(rank)})

    with opened(paths, per_rank=["odd"]) as merged:
        _, stored = merged.tree()
        digest_of = merged.object_digests(stored)
        told = [(leaf.path[0], digest_of[leaf.number]) for leaf in stored if leaf.kind == "object"]

    shared = dict(told)["shared"]
    assert sorted((name, digest == shared) for name, digest in told) == [
        ("odd", False), ("odd", True), ("of0", True), ("of1", True), ("shared", True)
    ]  # fmt: skip


@pytest.mark.filterwarnings("ignore")
def test_pickled_objects_are_those_of_the_lowest_rank_unless_they_are_of_each(tmp_path):
    paths = write_all(tmp_path, 2, lambda rank: {"a": [Odd(-1)] * rank, "odd": Odd(rank)})

    loaded = load_all(paths, trust=True, per_rank=["odd"])

    assert [value.rank for value in loaded["odd"].values()] == [0, 1]
    assert load_all(paths, trust=True, select="odd")["odd"].rank == 0


def test_many_archives_become_one_quickly(tmp_path):
    state = {"model": {f"layers.{n}.weight": torch.ones(2) for n in range(1000)}}
    paths = write_all(tmp_path, 16, lambda rank: {"rng": list(range(rank)), **state})

    with opened(paths, verify=False, per_rank=["rng"]) as merged:
        archives = merged.files
        begin = time.process_time()
        again = MergedArchives(archives, path="x", per_rank=["rng"])
        for leaf in again.tree()[1]:
            again.sources(leaf.number)
        seconds = time.process_time() - begin

    assert seconds < 1


# --- a committed step ---------------------------------------------------------------------------------------------------


@pytest.fixture
def step(tmp_path: Path) -> Path:
    """The folder of a step that four ranks have saved."""
    paths = write_all(
        tmp_path / "run" / "step_00000001",
        4,
        lambda rank: {"model": sharded((4,)), "rng": rank, "lr": 0.5, "own": torch.ones(rank + 1)},
        per_rank=("rng", "own"),
    )
    return commit(paths, per_rank=("rng", "own"))


@pytest.mark.parametrize("of", ["step", "run"])
def test_a_step_of_several_ranks_loads_by_its_folder_and_by_that_of_its_run(of, step):
    loaded = async_ckpt.load(step if of == "step" else step.parent, from_ranks={"own": 1})

    assert difference(loaded["model"], network().state_dict()) is None
    assert dict(loaded["rng"]) == {0: 0, 1: 1, 2: 2, 3: 3}
    assert loaded["own"].tolist() == [1, 1]


def test_a_group_that_a_step_of_other_ranks_has_lent_loads_with_the_rest(step):
    """It was saved by four; now there are six, each with values of its own."""
    own = write_all(step.parent / "step_00000002", 6, lambda rank: {"rng": 10 + rank, "lr": 0.25}, per_rank=("rng",))
    later = commit(own, per_rank=("rng",), lent={"model": step})

    loaded = async_ckpt.load(later, from_ranks={"rng": 5})

    assert loaded.keys() == {"rng", "lr", "model"}
    assert (loaded["rng"], loaded["lr"]) == (15, 0.25)
    assert difference(loaded["model"], network().state_dict()) is None
    assert async_ckpt.verify(later).num_archives == 10


def test_every_archive_of_a_step_is_verified(step):
    assert async_ckpt.verify(step).num_archives == 4

    flip(step / "rank_00002.0123abcd.tar", 20000)
    with pytest.raises(CorruptCheckpointError, match="rank_00002"):
        async_ckpt.verify(step)


def test_a_name_that_nothing_has_is_no_choice(step):
    with pytest.raises(
        KeyError, match=r"'rnk' names nothing in .*step_00000001; these values differ by rank: own, rng"
    ):
        async_ckpt.load(step, from_ranks={"rnk": 0})


def test_the_archive_of_one_rank_gives_what_is_whole_in_it_and_names_the_folder_for_the_rest(step):
    path = step / "rank_00003.0123abcd.tar"

    assert async_ckpt.load(path, select=["rng", "lr", "own"])["own"].tolist() == [1, 1, 1, 1]
    with pytest.raises(
        ValueError,
        match=rf"rank 3 of 4 ranks saved, and not all of model.*; load the folder of the step, {step}",
    ):
        async_ckpt.load(path)


def test_what_lies_in_pieces_cannot_be_mapped(step):
    with pytest.raises(ValueError, match="several ranks have saved"):
        async_ckpt.load(step, mmap=True)


def test_a_step_that_lacks_the_archive_of_a_rank_is_corrupt(step):
    (step / "rank_00001.0123abcd.tar").unlink()

    with pytest.raises(CorruptCheckpointError, match="rank_00001"):
        async_ckpt.load(step)


def test_of_many_archives_little_more_than_the_indices_is_kept_in_memory(tmp_path):
    """Of each archive the first 4 MiB are read; of a few they are kept, since most readers want more of it."""
    state = {"model": numbered((1040, 1024))}
    folder = commit(write_all(tmp_path / "run" / "step_00000001", 17, lambda _: state, shared=False))

    def traced(parts: Sequence[Part]) -> int:
        assert len(parts[0].archive.files) == 17
        return tracemalloc.get_traced_memory()[0]

    everything = Readers(reads_all=True)
    tracemalloc.start()
    try:
        from_path(folder, traced, verify=True, readers=everything)  # whatever the first time imports
        before = tracemalloc.get_traced_memory()[0]
        assert from_path(folder, traced, verify=True, readers=everything) - before < 4 * MIB
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("accelerator", ["late"], indirect=True)
def test_pieces_are_put_together_on_a_device(accelerator, tmp_path):
    placed = [(Shard(1), Shard(0)), (Shard(1), Shard(1))]

    def build(_: int) -> Any:
        return {name: made for name, (made, _) in torch_cuts((2, 3), placed, [2, 8]).items()}

    for tensor in load_all(write_all(tmp_path, 6, build), map_location=accelerator.kind).values():
        assert tensor.device.type == accelerator.kind
        assert torch.equal(tensor.cpu(), numbered(tuple(tensor.shape)))


# --- lies ---------------------------------------------------------------------------------------------------------------


def pieces_of(raw: dict[str, Any], name: str) -> list[dict[str, Any]]:
    (row,) = [row for row in raw["tensors"] if row["path"] == ["model", name]]
    return row["slices"]


@pytest.fixture
def honest(tmp_path: Path) -> list[Path]:
    """Four ranks have three rows of a tensor each, and all of another."""
    return write_all(
        tmp_path,
        4,
        lambda _: {
            "model": {
                "w": torch_cuts((4,), [(Shard(0),)], [12])["(Shard(dim=0),)_12"][0],
                "b": numbered((5,)),
                "again": numbered((5,)),
            }
        },
    )


def test_what_no_archive_has_is_named_with_the_ranks_that_should_have_it(honest):
    forge(honest[2], lambda raw: pieces_of(raw, "w").clear())

    with pytest.raises(
        CorruptCheckpointError,
        match=r"model\.w: \[6:9, 0:5\] of shape \[12, 5\] is in none .* 15 elements, which rank 2 should have",
    ) as caught:
        async_ckpt.load(commit(honest))
    assert caught.value.tensors == ("model.w",)


def test_a_missing_slice_that_is_not_selected_harms_nobody(honest):
    forge(honest[2], lambda raw: pieces_of(raw, "w").clear())

    assert torch.equal(load_all(honest, select="model.b")["model"]["b"], numbered((5,)))


def row_of(raw: dict[str, Any], name: str) -> dict[str, Any]:
    (row,) = [row for row in raw["tensors"] if row["path"] == ["model", name]]
    return row


def grow(raw: dict[str, Any]) -> None:
    row_of(raw, "w")["shape"] = [1 << 40, 5]


def shrink(raw: dict[str, Any]) -> None:
    row_of(raw, "b")["dtype"], row_of(raw, "b")["shape"] = "int32", [5]


def untie(raw: dict[str, Any]) -> None:
    raw["tensors"][2] = {"path": raw["tensors"][2]["path"], "alias": 1}


def repeat(raw: dict[str, Any]) -> None:
    raw["skeleton"]["dict"][0][1]["dict"].append(["again", {"tensor": 0}])


def nonsense(raw: dict[str, Any]) -> None:
    raw["skeleton"]["dict"][0][1]["dict"][0] = 7


def nowhere(raw: dict[str, Any]) -> None:
    raw["skeleton"]["dict"][0][1]["dict"][0][1] = {"tensor": 99}


def same_rank(raw: dict[str, Any]) -> None:
    raw["ranks"][0] = 1


def other_world(raw: dict[str, Any]) -> None:
    raw["ranks"][1] = 5


def of_one(raw: dict[str, Any]) -> None:
    del raw["ranks"]
    raw["tensors"], raw["skeleton"] = [], {"dict": []}


def moved(raw: dict[str, Any]) -> None:
    pieces_of(raw, "w")[0]["offsets"] = [8, 0]


def many_runs(raw: dict[str, Any]) -> None:
    row_of(raw, "w")["spread"][0] = [[0, 0, 2**31 - 1]]
    pieces_of(raw, "w").clear()


LIES = {
    "larger on one rank": (grow, r"model\.w is float32\[12, 5\] on rank 0 and float32\[\d+, 5\] on rank 2"),
    "of another dtype on one rank": (shrink, r"model\.b is float32\[5\] on rank 0 and int32\[5\] on rank 2"),
    "tied on one rank": (untie, r"index and model\.safetensors disagree about \['again'\]"),
    "at two places on one rank": (repeat, "has two paths in the state"),
    "a skeleton of nonsense": (nonsense, "cannot be read as one"),
    "a tensor that is not there": (nowhere, "is not the number of a tensor of rank 2"),
    "of the same rank as another": (same_rank, "it is rank 1's, and so is"),
    "of a larger world": (other_world, r"worlds of \[4, 5\] ranks"),
    "of no rank": (of_one, "belongs to one of several ranks, but it does not"),
    "elsewhere in its tensor": (moved, r"model\.w: \[6:8, 0:5\] of shape"),
    "cut into billions of runs": (many_runs, r"model\.w: \[6:9, 0:5\]"),
}  # fmt: skip


@pytest.mark.parametrize("name", LIES)
def test_archives_that_contradict_each_other_are_refused(name, honest):
    lie, says = LIES[name]
    forge(honest[2], lie)

    with little_memory(), pytest.raises(CorruptCheckpointError, match=says):
        load_all(honest)


def test_a_shape_that_all_ranks_lie_about_takes_no_memory(honest):
    for path in honest:
        forge(path, grow)

    with little_memory(), pytest.raises(CorruptCheckpointError, match=r"model\.w: \[12:1099511627776, 0:5\]"):
        load_all(honest)
