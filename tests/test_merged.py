"""What several ranks have saved, loaded as one state: full tensors, bit for bit, and nobody's value taken for another's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from matrix_slices import MODEL_PARALLEL, fsdp2_over_tp, numbered, torch_cuts
from rank_archives import load_all, write_all
from states import difference
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Placement, Shard
from torch.distributed.tensor.placement_types import _StridedShard


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
def test_a_sharded_model_loads_as_full_tensors(mesh_shape: tuple[int, ...], verify: bool, tmp_path: Path):
    paths = write_all(tmp_path, 4, lambda _: {"model": sharded(mesh_shape)})

    loaded = load_all(paths, verify=verify)

    assert difference(loaded, {"model": network().state_dict()}) is None


def test_what_replicas_share_loads_whole(tmp_path: Path):
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
def test_what_fully_shard_cuts_unevenly_loads_with_each_element_in_its_place(
    mesh: dict[str, int], placed: dict[str, tuple[Placement, ...]], sizes: list[int], tmp_path: Path
):
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


def test_strided_shards_load_with_each_element_in_its_place(tmp_path: Path):
    placed = [(_StridedShard(0, split_factor=2), Shard(1)), (Shard(1), Shard(1)), (Shard(0), Shard(0))]
    paths = write_all(
        tmp_path,
        6,
        lambda _: {name: tensor for name, (tensor, _) in torch_cuts((2, 3), placed, [2, 8]).items()},
    )

    for name, tensor in load_all(paths).items():
        assert torch.equal(tensor, numbered(tuple(tensor.shape))), name


def test_tied_weights_stay_tied(tmp_path: Path):
    def build(_: int) -> Any:
        model = sharded((4,))
        return {"model": model, "tied": model[1].weight}  # three rows on four ranks: one has nothing of it

    loaded = load_all(write_all(tmp_path, 4, build))

    assert loaded["tied"] is loaded["model"]["1.weight"]


def test_stages_of_a_pipeline_load_as_one_model(tmp_path: Path):
    def build(rank: int) -> Any:
        return {"model": {f"{rank}.weight": numbered((3, 2)) + rank, "note": "both"}, f"only {rank}": rank}

    loaded = load_all(write_all(tmp_path, 2, build))

    assert difference(loaded, {
        "model": {"0.weight": numbered((3, 2)), "note": "both", "1.weight": numbered((3, 2)) + 1},
        "only 0": 0, "only 1": 1,
    }) is None  # fmt: skip


def test_of_archives_that_overlap_the_lowest_ranks_bytes_are_read(tmp_path: Path):
    paths = write_all(tmp_path, 3, lambda rank: {"t": numbered((40, 10)) + 1000 * rank}, shared=False)

    assert torch.equal(load_all(paths)["t"], numbered((40, 10)))
    assert torch.equal(load_all(paths[::-1])["t"], numbered((40, 10)))
