"""States that ranks have saved in each layout, restored in each other one, against torch's own cutting.

`python tests/support/matrix_restores.py 8` tries data and tensor parallelism up to 8 x 8, and from 1 to 12 ranks into 1 to 12: 429
layouts into each other, which takes hours, or with `--sources 40 --targets 40` as many of them as that;
`tests/core/loading/test_merged_restore.py` tries some. What torch cuts on a rank is emptied, restored, and compared with what it was.
One process stands at one rank after the other, by torch's `fake` backend.
"""

import argparse
import itertools
import random
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from fake_ranks import distributed, standing_at
from matrix_slices import numbered
from rank_archives import Build, commit, write_all
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from async_ckpt.core.loading.archives.find import CommittedStep, from_committed
from async_ckpt.core.loading.archives.step_archives import Readers
from async_ckpt.core.loading.restore import RestoreOptions, restore_state
from async_ckpt.core.slicing.sharded import local_part
from async_ckpt.core.storage.local import LocalStorage

# Nothing of it is divisible by most numbers of ranks, and some have more ranks than rows.
SHAPES: Mapping[str, tuple[int, ...]] = {
    "a": (13, 6), "b": (7,), "c": (6, 10, 4), "d": (2, 40), "e": (1, 3), "f": (41, 2), "g": (0, 5), "h": (),
}  # fmt: skip
Layouts = Mapping[str, tuple[int, Build]]


def plain(_: int) -> dict[str, Any]:
    return {name: numbered(shape) for name, shape in SHAPES.items()}


def cut(mesh_shape: tuple[int, ...], *placements: Any) -> Build:
    """As `distribute_tensor` cuts them; a tensor of fewer dimensions is whole where it cannot be cut."""

    def build(_: int) -> dict[str, Any]:
        mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=tuple("xyz"[: len(mesh_shape)]))
        return {
            name: distributed(numbered(shape), mesh, _that_fit(placements, shape)) for name, shape in SHAPES.items()
        }

    return build


def _that_fit(placements: Iterable[Any], shape: tuple[int, ...]) -> list[Any]:
    return [one if getattr(one, "dim", -1) < len(shape) else Replicate() for one in placements]


def fully_sharded(*mesh_shape: int) -> Build:
    """FSDP2, or with two dimensions HSDP."""

    def build(_: int) -> dict[str, Any]:
        names = ("replicate", "shard")[-len(mesh_shape) :]
        return _sharded(plain(0), init_device_mesh("cpu", mesh_shape, mesh_dim_names=names))

    return build


def over_tp(dp: int, tp: int, placement: Any) -> Build:
    """fully_shard over tensor parallelism."""

    def build(_: int) -> dict[str, Any]:
        mesh = init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
        tensors = {
            name: distributed(numbered(shape), mesh["tp"], _that_fit([placement], shape))
            for name, shape in SHAPES.items()
        }
        return _sharded(tensors, mesh["dp"])

    return build


def _sharded(tensors: dict[str, Any], mesh: Any) -> dict[str, Any]:
    module = nn.Module()
    for name, tensor in tensors.items():
        if SHAPES[name]:  # fully_shard takes no scalars
            module.register_parameter(name, nn.Parameter(tensor))
    fully_shard(module, mesh=mesh)
    return {**{name: t for name, t in tensors.items() if not SHAPES[name]}, **dict(module.named_parameters())}


SUITE: Layouts = {
    "DDP": (2, plain),
    "FSDP2 on 2": (2, fully_sharded(2)),
    "FSDP2 on 3": (3, fully_sharded(3)),
    "FSDP2 on 9": (9, fully_sharded(9)),
    "TP": (2, cut((2,), Shard(1))),
    "2-D": (6, cut((2, 3), Shard(1), Shard(2))),
    "HSDP": (4, fully_sharded(2, 2)),
    "strided": (3, cut((3,), _StridedShard(0, split_factor=2))),
    "FSDP2 over TP": (6, over_tp(3, 2, Shard(0))),
}


def _stands_for_an_order(one: Any, other: Any, after: int) -> bool:
    """What `fully_shard` makes: the later dimension of the mesh has cut first. `distribute_tensor` cuts otherwise, and is refused."""
    return (
        isinstance(one, _StridedShard)
        and one.dim == getattr(other, "dim", None)
        and (one.split_factor == after or isinstance(other, _StridedShard))
    )


def layouts(most: int) -> Layouts:
    """All of them."""
    found: dict[str, tuple[int, Build]] = {}
    for n in range(1, 13):
        found[f"DDP on {n}"] = n, plain
        found[f"FSDP2 on {n}"] = n, fully_sharded(n)
        found[f"columns on {n}"] = n, cut((n,), Shard(1))
        found[f"packed on {n}"] = n, cut((n,), _StridedShard(0, split_factor=3))
    for a, b in [(2, 2), (2, 3), (3, 2), (3, 4), (4, 3)]:
        ways = [Replicate(), Shard(0), Shard(1), Shard(2), _StridedShard(0, split_factor=2)]
        for one, other in itertools.product(ways, repeat=2):
            if not _stands_for_an_order(one, other, b):
                found[f"{one}, {other} on {a} x {b}"] = a * b, cut((a, b), one, other)
        found[f"HSDP {a} x {b}"] = a * b, fully_sharded(a, b)
    for dp, tp in itertools.product(range(1, most + 1), repeat=2):
        for kind, placement in {
            "rows": Shard(0), "columns": Shard(1), "packed": _StridedShard(0, split_factor=2), "whole": Replicate(),
        }.items():  # fmt: skip
            found[f"FSDP2 over TP by {kind}, {dp} x {tp}"] = dp * tp, over_tp(dp, tp, placement)
    return found


def saved(folder: Path, world: int, build: Build, **how: Any) -> Path:
    """A committed step; its folder."""
    paths = write_all(folder / "run" / "step_00000001", world, build, **how)
    return commit(paths, per_rank=how.get("per_rank", ()))


def restore(folder: Path, rank: int, world: int, live: Any, *, verify: bool = True, **how: Any) -> None:
    """As `AsyncCheckpointer.restore` does it on a rank; this process stands there already."""
    storage = LocalStorage(folder.parent)
    readers = Readers((rank, world), how.pop("from_ranks", None))
    use: Callable[[Any], None] = lambda parts: restore_state(parts, live, RestoreOptions(**how))  # noqa: E731
    from_committed(CommittedStep.at(storage, folder.name, lambda: storage), use, verify=verify, readers=readers)


def wrong_at(rank: int, world: int, build: Build, folder: Path) -> list[str]:
    """The names of tensors that are not what torch makes of them on this rank, once they are restored."""
    with standing_at(rank, world), torch.no_grad():
        live, expected = build(rank), build(rank)
        for tensor in live.values():
            local_part(tensor).fill_(-1)
        restore(folder, rank, world, live)
        return [
            name for name, tensor in live.items() if not torch.equal(local_part(tensor), local_part(expected[name]))
        ]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("most", type=int, help="data and tensor parallelism up to this size")
    parser.add_argument("--targets", type=int, default=0, help="of each layout, only so many others at random")
    parser.add_argument("--sources", type=int, default=0, help="only so many layouts, at random")
    parser.add_argument(
        "--ranks", type=int, default=4, help="of each target, the first, the last, and others at random"
    )
    arguments = parser.parse_args()
    chance, every = random.Random(0), layouts(arguments.most)
    sources = chance.sample(sorted(every), arguments.sources) if arguments.sources else sorted(every)
    num_tried, num_wrong = 0, 0
    for before in sources:
        with tempfile.TemporaryDirectory() as folder:
            step = saved(Path(folder), *every[before])
            targets = chance.sample(sorted(every), arguments.targets) if arguments.targets else sorted(every)
            wrong = []
            for after in targets:
                world, build = every[after]
                some = chance.sample(range(world), min(world, max(0, arguments.ranks - 2)))
                for rank in {0, world - 1, *some}:
                    num_tried += 1
                    names = wrong_at(rank, world, build, step)
                    wrong += [f"  into {after}, rank {rank}: {', '.join(names)}"] if names else []
        num_wrong += len(wrong)
        print(f"{before}: into {len(targets)} layouts, {len(wrong)} wrong", *wrong[:5], sep="\n", flush=True)
    print(f"{num_tried} restores from {len(sources)} layouts, {num_wrong} wrong")
    return 1 if num_wrong else 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
