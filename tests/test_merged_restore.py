"""What several ranks have saved, restored in place: each rank reads what it holds, in the layout that is live now."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_ranks import standing_at
from matrix_slices import numbered
from rank_archives import Build, restore_at, write_all
from states import difference
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from async_ckpt import StateMismatchError
from async_ckpt.state.sharded import local

SHAPES = {"a": (13, 6), "b": (7,), "c": (6, 10, 4), "d": (2, 40)}


def cut(mesh_shape: tuple[int, ...], *placements: Any) -> Callable[[int], dict[str, Any]]:
    """Numbered tensors as `distribute_tensor` cuts them."""

    def build(_: int) -> dict[str, Any]:
        mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=tuple("xyz"[: len(mesh_shape)]))
        return {
            name: distribute_tensor(
                numbered(shape), mesh, [p if getattr(p, "dim", 0) < len(shape) else Replicate() for p in placements],
                src_data_rank=None,
            )
            for name, shape in SHAPES.items()
        }  # fmt: skip

    return build


def plain(_: int) -> dict[str, Any]:
    return {name: numbered(shape) for name, shape in SHAPES.items()}


def fully_sharded(world: int) -> Callable[[int], dict[str, Any]]:
    def build(_: int) -> dict[str, Any]:
        module = nn.Module()
        for name, shape in SHAPES.items():
            module.register_parameter(name, nn.Parameter(numbered(shape)))
        fully_shard(module, mesh=init_device_mesh("cpu", (world,)))
        return dict(module.named_parameters())

    return build


def strided(_: int) -> dict[str, Any]:
    """fully_shard over tensor parallelism, on 6 ranks."""
    made = {}
    for name, shape in SHAPES.items():
        mesh = init_device_mesh("cpu", (3, 2), mesh_dim_names=("dp", "tp"))
        module = nn.Module()
        full = distribute_tensor(numbered(shape), mesh["tp"], [Shard(0)], src_data_rank=None)
        module.register_parameter(name, nn.Parameter(full))
        fully_shard(module, mesh=mesh["dp"])
        made |= dict(module.named_parameters())
    return made


LAYOUTS: dict[str, tuple[int, Build]] = {
    "DDP": (2, plain),
    "FSDP2 on 2": (2, fully_sharded(2)),
    "FSDP2 on 3": (3, fully_sharded(3)),
    "FSDP2 on 9": (9, fully_sharded(9)),
    "TP": (2, cut((2,), Shard(1))),
    "TP twice": (6, cut((2, 3), Shard(1), Shard(2))),
    "HSDP": (4, cut((2, 2), Replicate(), Shard(0))),
    "FSDP2 over TP": (6, strided),
}


@pytest.mark.parametrize("after", LAYOUTS)
@pytest.mark.parametrize("before", LAYOUTS)
def test_each_rank_gets_its_own_of_what_any_layout_has_saved(before: str, after: str, tmp_path: Path):
    """The oracle is torch's own cutting: what it made is emptied, filled, and compared with what it was."""
    world, build = LAYOUTS[before]
    paths = write_all(tmp_path, world, build)

    world, build = LAYOUTS[after]
    for rank in range(world):
        with standing_at(rank, world), torch.no_grad():
            live, expected = build(rank), build(rank)
            for tensor in live.values():
                local(tensor).fill_(-1)

            restore_at(rank, world, paths, live)

            for name, tensor in live.items():
                assert torch.equal(local(tensor), local(expected[name])), (rank, name)


# --- models and optimizers ----------------------------------------------------------------------------------------------


def trained(world: int | None, *, seed: int = 0) -> dict[str, Any]:
    """A model and an optimizer that has moments, sharded or not; of equal values for each seed, wherever it is made."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(10, 13), nn.BatchNorm1d(13), nn.Linear(13, 3))
    if world is not None:
        fully_shard(model[0], mesh=init_device_mesh("cpu", (world,)))
        fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * (seed + 1))
    for parameter in model.parameters():
        state = optimizer.state[parameter]
        state["step"] = torch.tensor(float(seed))
        for name in ("exp_avg", "exp_avg_sq"):
            state[name] = torch.zeros_like(parameter)
            values = numbered(tuple(parameter.shape)) + len(name) + seed
            local(state[name]).copy_(local(values if world is None else distributed_like(parameter, values)))
    return {"model": model, "optimizer": optimizer}


def distributed_like(tensor: Any, full: torch.Tensor) -> DTensor:
    return distribute_tensor(full, tensor.device_mesh, tensor.placements, src_data_rank=None)


def held(state: dict[str, Any]) -> dict[str, Any]:
    """All that a rank has of a model and its optimizer, as plain values."""
    optimizer = state["optimizer"].state_dict()
    return {
        "model": {name: local(tensor).clone() for name, tensor in state["model"].state_dict().items()},
        "moments": [
            {name: local(value).clone() for name, value in moments.items()}
            for moments in optimizer["state"].values()
        ],
        "groups": optimizer["param_groups"],
    }


def no_collectives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever torch would send to other ranks fails."""
    for name in (
        "all_gather_into_tensor",
        "all_gather",
        "all_reduce",
        "broadcast",
        "scatter",
        "all_to_all",
        "reduce_scatter_tensor",
    ):
        monkeypatch.setattr(torch.distributed, name, None)
    for name in ("all_gather_tensor", "all_reduce", "broadcast", "all_to_all_single"):
        monkeypatch.setattr(torch.distributed._functional_collectives, name, None)


@pytest.mark.parametrize("has_moments", [True, False], ids=["moments", "none yet"])
@pytest.mark.parametrize("world", [3, 2], ids=["same layout", "another"])
def test_a_sharded_model_and_its_optimizer_are_filled_where_they_are(
    world: int, has_moments: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    paths = write_all(tmp_path, 3, lambda _: trained(3))

    for rank in range(world):
        with standing_at(rank, world):
            expected, live = held(trained(world)), trained(world, seed=1)
            if not has_moments:
                live["optimizer"].state.clear()
            before = [local(tensor).data_ptr() for tensor in live["model"].state_dict().values()]
            with monkeypatch.context() as patched:
                no_collectives(patched)
                restore_at(rank, world, paths, live)

            assert difference(held(live), expected) is None
            assert [local(tensor).data_ptr() for tensor in live["model"].state_dict().values()] == before
            for parameter, moments in live["optimizer"].state.items():
                assert moments["exp_avg"].placements == parameter.placements


def test_a_sharded_model_takes_what_one_process_has_saved(tmp_path: Path):
    paths = write_all(tmp_path, 1, lambda _: trained(None))

    with standing_at(1, 2):
        live = trained(2, seed=1)
        live["optimizer"].state.clear()
        restore_at(1, 2, paths, live)

        assert difference(held(live), held(trained(2))) is None


def test_a_plain_model_takes_what_ranks_have_saved(tmp_path: Path):
    paths = write_all(tmp_path, 3, lambda _: trained(3))

    with standing_at(0, 1):
        live = trained(None, seed=1)
        restore_at(0, 1, paths, live)

    assert difference(held(live), held(trained(None))) is None


def test_another_shape_is_refused_by_name_before_anything_is_written(tmp_path: Path):
    paths = write_all(tmp_path, 2, fully_sharded(2))

    with standing_at(0, 2), torch.no_grad():
        live = {
            "a": numbered((13, 6)).zero_(),
            "b": distribute_tensor(
                numbered((9,)), init_device_mesh("cpu", (2,)), [Shard(0)], src_data_rank=None
            ),
        }
        with pytest.raises(
            StateMismatchError, match=r"b is float32\[9\] here and float32\[7\] in the checkpoint"
        ):
            restore_at(0, 2, paths, live)

        assert not live["a"].any()
