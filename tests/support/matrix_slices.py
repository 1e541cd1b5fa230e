"""Slices of sharded tensors against torch's own cutting: each mesh, each way to place, each size, on each of its ranks.

`python tests/support/matrix_slices.py 8` tries data and tensor parallelism up to 8 x 8 with sizes 1 to 40, which takes a quarter
of an hour; `tests/core/slicing/test_slices.py` tries some. Every element of a tensor has its own number as its value, and torch cuts: so a
rectangle is right when its elements are numbered as its offsets say. Over all ranks of a case each element has to be
written once. One process stands at one rank after the other, by torch's `fake` backend.
"""

import argparse
import itertools
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from fake_ranks import distributed, standing_at
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from async_ckpt import UnsupportedStateError
from async_ckpt.core.slicing.sharded import LocalShards, Slicer
from async_ckpt.core.slicing.shares import Holding, rectangles_to_write
from async_ckpt.core.slicing.slices import Rectangle, Slices

Tensors = dict[str, tuple[Any, tuple[int, ...]]]  # what a rank holds, and the global shape
SIZES = range(1, 41)


def numbered(shape: tuple[int, ...]) -> torch.Tensor:
    """Each element is its own number."""
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)


def block(full: torch.Tensor, rectangle: Rectangle) -> torch.Tensor:
    where = zip(rectangle.global_offsets, rectangle.sizes, strict=True)
    return full[tuple(slice(at, at + size) for at, size in where)]


@dataclass
class Tally:
    tried: int = 0  # tensors on ranks
    refused: int = 0  # tensors, by one of their ranks at least: nothing of such a save is committed
    wrong: list[str] = field(default_factory=list)


def run(title: str, world: int, build: Callable[[int], Tensors], tally: Tally) -> None:
    """Everything that the ranks of a world hold, sliced by each of them and compared with what it is."""
    said: dict[str, dict[int, Slices]] = {}
    writes: dict[str, list[Rectangle]] = {}
    refused: set[str] = set()
    wrong: dict[str, list[str]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for rank in range(world):
        with standing_at(rank, world):
            tensors = build(rank)
            here = _at_rank(rank, tensors, tally, refused, wrong)
            shapes.update((name, tensor[1]) for name, tensor in tensors.items())
        for name, slices in here.items():
            said.setdefault(name, {})[rank] = slices
        holdings = {name: Holding(slices, 4, slices.replicas()) for name, slices in here.items()}
        for name, rectangles in rectangles_to_write(holdings).items():
            writes.setdefault(name, []).extend(rectangles)
    tally.refused += len(refused)
    for name in said.keys() - refused:
        told = [*wrong[name], *_over_ranks(said[name], writes[name], shapes[name])]
        tally.wrong += [f"{title}, {name}: {one}" for one in told]


def _at_rank(
    rank: int, tensors: Tensors, tally: Tally, refused: set[str], wrong: dict[str, list[str]]
) -> dict[str, Slices]:
    slicer, found = Slicer(), {}
    for name, (tensor, shape) in tensors.items():
        tally.tried += 1
        try:
            sliced = slicer.slice(tensor, name=name)
        except UnsupportedStateError as error:
            refused.add(error.path)
            continue
        found[name] = sliced.slices
        wrong.setdefault(name, []).extend(f"rank {rank}: {told}" for told in wrong_bytes(sliced, shape))
    return found


def wrong_bytes(sliced: LocalShards, shape: tuple[int, ...]) -> Iterator[str]:
    full = numbered(shape)
    if sliced.slices.global_shape != shape:
        yield f"global shape {sliced.slices.global_shape}, not {shape}"
    for rectangle, part in zip(sliced.slices.rectangles, sliced.parts, strict=True):
        if not torch.equal(part.detach(), block(full, rectangle)):
            yield f"{rectangle} has wrong bytes"


def _over_ranks(said: dict[int, Slices], writes: list[Rectangle], shape: tuple[int, ...]) -> Iterator[str]:
    """What ranks say of each other, and whether together they write everything once."""
    for rank, slices in said.items():
        if slices.mesh is not None and slices.cuts is not None and slices.coordinate is not None:
            if slices.mesh.rank_at(slices.coordinate) != rank:
                yield f"rank {rank} stands at {slices.coordinate} of {slices.mesh}"
            for coordinate in itertools.product(*map(range, slices.mesh.shape)):
                there = Slices.at(coordinate, global_shape=slices.global_shape, cuts=slices.cuts, mesh=slices.mesh)
                if said[slices.mesh.rank_at(coordinate)] != there:
                    yield f"rank {rank} is mistaken about the one at {coordinate}"
            break  # all of them say the same, as was just seen, or have other meshes
    counts = torch.zeros(shape)
    for rectangle in writes:
        block(counts, rectangle).add_(1)
    if not bool((counts == 1).all()):
        yield f"written {counts.unique().tolist()} times"


def fsdp2_over_tp(
    rank: int, mesh_shape: dict[str, int], placed: dict[str, tuple[Placement, ...]], sizes: Iterable[int]
) -> Tensors:
    """Parameters that are cut by tensor (and expert) parallelism as `placed` says, and then by `fully_shard`."""
    mesh = init_device_mesh("cpu", tuple(mesh_shape.values()), mesh_dim_names=tuple(mesh_shape))
    data = tuple(name for name in mesh_shape if name in ("replicate", "dp"))
    model = tuple(name for name in mesh_shape if name not in data)
    module, shapes = torch.nn.Module(), {}
    for kind, placements in placed.items():
        for size in sizes:
            name = f"{kind}_{size}"
            shapes[name] = (3, size) if any(getattr(one, "dim", 0) == 1 for one in placements) else (size, 2)
            full = distributed(numbered(shapes[name]), mesh[model], list(placements))
            module.register_parameter(name, torch.nn.Parameter(full))
    fully_shard(module, mesh=mesh[data])
    return {name: (parameter, shapes[name]) for name, parameter in module.named_parameters()}


def torch_cuts(mesh_shape: tuple[int, ...], placed: Iterable[tuple[Placement, ...]], sizes: Iterable[int]) -> Tensors:
    """DTensors as `distribute_tensor` makes them, which cuts from left to right."""
    names = tuple("abc"[: len(mesh_shape)])
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=names)
    tensors: Tensors = {}
    for placements, size in itertools.product(placed, sizes):
        shape = (size, 5)
        made = distributed(numbered(shape), mesh, list(placements))
        tensors[f"{placements}_{size}"] = (made, shape)
    return tensors


def all_placements(mesh_shape: tuple[int, ...]) -> list[tuple[Placement, ...]]:
    """All but two strided shards of which the first may stand for a shard order: that is what `fully_shard` makes."""
    factors = sorted({2, 3, mesh_shape[-1]} - {1})
    ways = [Replicate(), Shard(0), Shard(1), *(_StridedShard(0, split_factor=n) for n in factors)]

    def stands_for_an_order(placements: tuple[Placement, ...]) -> bool:
        strided = [(at, one) for at, one in enumerate(placements) if isinstance(one, _StridedShard)]
        for (at, first), _ in itertools.combinations(strided, 2):
            later = mesh_shape[at + 1 :]
            sets = (some for n in range(1, len(later) + 1) for some in itertools.combinations(later, n))
            if first.split_factor in map(math.prod, sets):
                return True
        return False

    return [one for one in itertools.product(ways, repeat=len(mesh_shape)) if not stands_for_an_order(one)]


MODEL_PARALLEL: dict[str, tuple[Placement, ...]] = {
    "rows": (Shard(0),),
    "columns": (Shard(1),),
    "whole": (Replicate(),),
    "packed": (_StridedShard(0, split_factor=2),),
    "packed_3": (_StridedShard(0, split_factor=3),),
}

# Along the same dimension. The others are cut once along each, and torch has one way to do that.
CUT_TWICE = {kind: MODEL_PARALLEL[kind] for kind in ("rows", "packed")}


def matrix(most: int, sizes: Iterable[int] = SIZES) -> Iterator[tuple[str, Tally]]:
    sizes = list(sizes)
    for dp, tp in itertools.product(range(1, most + 1), repeat=2):
        tally = Tally()
        shape = {"dp": dp, "tp": tp}
        placed = MODEL_PARALLEL if max(dp, tp) <= 4 else CUT_TWICE
        run(
            f"fully_shard {shape}",
            dp * tp,
            lambda rank, shape=shape, placed=placed: fsdp2_over_tp(rank, shape, placed, sizes),
            tally,
        )
        yield f"fully_shard over tensor parallelism, dp {dp} x tp {tp}", tally
    for replicate, dp, tp in itertools.product(range(1, min(most, 3) + 1), repeat=3):
        tally = Tally()
        shape = {"replicate": replicate, "dp": dp, "tp": tp}
        run(
            f"hsdp {shape}",
            replicate * dp * tp,
            lambda rank, shape=shape: fsdp2_over_tp(rank, shape, MODEL_PARALLEL, sizes),
            tally,
        )
        yield f"HSDP over tensor parallelism, {replicate} x {dp} x {tp}", tally
    experts = {"rows": (Shard(0), Shard(0)), "mixed": (Shard(0), Shard(1)), "whole": (Shard(0), Replicate())}
    for dp, ep, tp in itertools.product(range(1, min(most, 3) + 1), repeat=3):
        tally = Tally()
        shape = {"dp": dp, "ep": ep, "tp": tp}
        run(
            f"experts {shape}",
            dp * ep * tp,
            lambda rank, shape=shape: fsdp2_over_tp(rank, shape, experts, sizes),
            tally,
        )
        yield f"fully_shard over expert and tensor parallelism, {dp} x {ep} x {tp}", tally
    for mesh_shape in [(4,), (7,), (2, 3), (3, 2), (3, 4), (2, 2, 2), (3, 2, 2)]:
        tally = Tally()
        placed = all_placements(mesh_shape)
        world = torch.Size(mesh_shape).numel()
        few = sizes if len(mesh_shape) < 3 else sizes[::4]
        run(
            f"distribute_tensor {mesh_shape}",
            world,
            lambda rank, shape=mesh_shape, placed=placed, few=few: torch_cuts(shape, placed, few),
            tally,
        )
        yield f"distribute_tensor, {mesh_shape}", tally


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("most", type=int, help="data and tensor parallelism up to this size")
    most = parser.parse_args().most
    total = Tally()
    for title, tally in matrix(most):
        print(f"{title}: {tally.tried} tried, {tally.refused} refused, {len(tally.wrong)} wrong", flush=True)
        for told in tally.wrong[:5]:
            print(f"  {told}", flush=True)
        total.tried += tally.tried
        total.refused += tally.refused
        total.wrong += tally.wrong
    print(f"{total.tried} tensors on ranks, {total.refused} tensors refused, {len(total.wrong)} wrong")
    return 1 if total.wrong else 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
