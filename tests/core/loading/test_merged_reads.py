"""Of the archives of many ranks a reader opens those that have what it wants, and reads little else of them."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_ranks import distributed, standing_at
from matrix_restores import restore, saved
from matrix_slices import MODEL_PARALLEL, fsdp2_over_tp, numbered, torch_cuts
from rank_archives import ATTEMPT, Build, commit, irregular_ranks, write_all
from states import MIB, difference
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import async_ckpt
from async_ckpt import CorruptCheckpointError, StateMismatchError
from async_ckpt.core.runs import layouts
from async_ckpt.core.runs.receipts import Table
from async_ckpt.core.slicing.sharded import local_part
from async_ckpt.core.storage.local import LocalReader, LocalStorage

BLOCK = 4 * MIB


def names_of(ranks: Any) -> set[str]:
    return {f"rank_{rank:05d}.{ATTEMPT}.tar" for rank in ranks}


def archives_in(num_read: dict[str, int]) -> set[str]:
    return {name for name in num_read if name.endswith(".tar")}


def rows(shape: tuple[int, ...], num_tensors: int) -> Callable[[int], Build]:
    """Tensors that are cut along their rows, over all ranks of a world."""

    def build_for(world: int) -> Build:
        def build(_: int) -> dict[str, Any]:
            mesh = init_device_mesh("cpu", (world,))
            return {f"{n}": distributed(numbered(shape) + n, mesh, [Shard(0)]) for n in range(num_tensors)}

        return build

    return build_for


def emptied(build: Build, rank: int) -> tuple[dict[str, Any], int]:
    live = build(rank)
    for tensor in live.values():
        local_part(tensor).fill_(-1)
    return live, sum(local_part(tensor).nbytes for tensor in live.values())


def check(live: dict[str, Any], expected: dict[str, Any]) -> None:
    for name, tensor in live.items():
        assert torch.equal(local_part(tensor), local_part(expected[name])), name


@pytest.mark.parametrize("verify", [True, False], ids=["verified", "not"])
def test_the_same_layout_reads_its_own_bytes_and_asks_for_no_layout(verify, tmp_path, num_read):
    build = rows((2048, 2048), 2)(2)
    folder = saved(tmp_path, 2, build)
    with standing_at(1, 2), torch.no_grad():
        live, own_bytes = emptied(build, 1)
        num_read.clear()
        restore(folder, 1, 2, live, verify=verify)
        check(live, build(1))

    assert archives_in(num_read) == names_of([1])
    assert not any("layout" in name for name in num_read)
    assert sum(num_read.values()) <= 1.02 * own_bytes


def test_other_ranks_along_the_first_dimension_read_little_more_than_their_own_bytes(tmp_path, num_read):
    """From 3 ranks to 2; all that is read is counted, whole blocks where they are verified, indices and digests too."""
    before, after = (rows((3 * 2048, 7168), 1)(world) for world in (3, 2))
    folder = saved(tmp_path, 3, before)
    for rank, overlapping in ((0, [0, 1]), (1, [1, 2])):
        with standing_at(rank, 2), torch.no_grad():
            expected = after(rank)
            for verify, most in ((True, 1.1), (False, 1.02)):
                live = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
                num_read.clear()
                restore(folder, rank, 2, live, verify=verify)

                check(live, expected)
                assert archives_in(num_read) == names_of(overlapping)
                assert sum(num_read.values()) <= most * local_part(live["0"]).nbytes
                assert local_part(live["0"]).nbytes == 84 * MIB


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="this system has no such advice")
def test_ranks_that_read_what_others_read_share_it(tmp_path, monkeypatch):
    """Along the other dimension, each of them wants a part of every block. In the same layout, none reads what another does."""
    build = rows((64, 64), 1)(2)
    folder = saved(tmp_path, 2, build)
    shared: set[str] = set()
    monkeypatch.setattr(LocalReader, "share", lambda reader: shared.add(reader._path.name))

    with standing_at(1, 2), torch.no_grad():
        restore(folder, 1, 2, build(1))
        assert not shared
        mesh = init_device_mesh("cpu", (2,))
        across = {"0": distributed(torch.zeros(64, 64), mesh, [Shard(1)])}
        restore(folder, 1, 2, across)

    assert shared == names_of([0, 1])
    assert torch.equal(local_part(across["0"]), numbered((64, 64))[:, 32:])


@pytest.mark.parametrize("world", [5, 12, 40])
def test_a_rank_opens_the_archives_that_overlap_its_own_rows(world, tmp_path, num_read):
    before, after = (rows((120, 2), 3)(n) for n in (8, world))
    folder = saved(tmp_path, 8, before)
    for rank in range(0, world, 3):
        with standing_at(rank, world), torch.no_grad():
            live, _ = emptied(after, rank)
            num_read.clear()
            restore(folder, rank, world, live)
            check(live, after(rank))

        first, last = rank * 120 // world, (rank + 1) * 120 // world - 1
        assert names_of(range(first // 15, last // 15 + 1)) == archives_in(num_read)


def test_one_process_that_selects_one_tensor_opens_the_archives_that_have_it(tmp_path, num_read):
    """Under DDP each rank has written a share of the tensors."""
    state = {f"{n}": numbered((300, 100)) + n for n in range(12)}
    folder = saved(tmp_path, 6, lambda _: state)
    num_read.clear()

    assert difference(async_ckpt.load(folder, select="11"), {"11": state["11"]}) is None
    assert len(archives_in(num_read)) <= 2  # one that knows all names, and the one that has it


def test_one_process_that_loads_everything_opens_all_archives_once(tmp_path, num_read):
    build = rows((120, 2), 3)(8)
    folder = saved(tmp_path, 8, build)
    num_read.clear()

    loaded = async_ckpt.load(folder)

    assert all(torch.equal(loaded[f"{n}"], numbered((120, 2)) + n) for n in range(3))
    assert archives_in(num_read) == names_of(range(8))
    for name in names_of(range(8)):
        assert num_read[name] <= (folder / name).stat().st_size


# --- whose archive has what -------------------------------------------------------------------------------------------


def over_tp(mesh: dict[str, int], sizes: list[int]) -> Build:
    return lambda rank: {name: tensor for name, (tensor, _) in fsdp2_over_tp(rank, mesh, MODEL_PARALLEL, sizes).items()}


def stages(rank: int) -> dict[str, Any]:
    """A pipeline of two stages, each over two ranks; what is whole is divided among the ranks of a stage."""
    stage = rank // 2
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))["dp"]
    made = distributed(numbered((700, 600)), mesh, [Shard(0)])
    return {"model": {f"{stage}.cut": made, f"{stage}.whole": numbered((700, 600)) + stage}}


LAYOUTS: dict[str, tuple[int, Build]] = {
    "DDP": (3, lambda _: {"a": numbered((700, 600)), "b": numbered((300, 100)), "c": numbered((3,))}),
    "HSDP": (8, over_tp({"replicate": 2, "dp": 2, "tp": 2}, [7, 600])),
    "FSDP2 over TP": (6, over_tp({"dp": 3, "tp": 2}, [1, 7, 13])),
    "strided": (6, lambda _: {
        name: tensor for name, (tensor, _) in torch_cuts((2, 3), [(_StridedShard(0, split_factor=2), Shard(1))], [8]).items()
    }),
    "whole on each": (4, lambda _: {
        name: tensor for name, (tensor, _) in torch_cuts((2, 2), [(Replicate(), Replicate())], [900]).items()
    }),
    "a pipeline": (4, stages),
}  # fmt: skip


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "all write all"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_each_rank_has_written_follows_by_arithmetic(layout, shared, tmp_path):
    """Nothing has to be said apart from that."""
    world, build = LAYOUTS[layout]
    folder = saved(tmp_path, world, build, shared=shared)

    found = layouts.read(LocalStorage(folder), "", ATTEMPT)

    assert found is not None
    assert bool(found.shared) <= shared
    assert irregular_ranks(folder) == set()


def test_a_stage_of_another_cut_of_a_pipeline_opens_those_that_had_its_layers(tmp_path, num_read):
    folder = saved(tmp_path, 4, stages)
    live = {"model": {name: torch.zeros(700, 600) for name in ("0.whole", "1.cut", "1.whole")}}
    num_read.clear()

    restore(folder, 3, 4, live, strict=False)

    assert torch.equal(live["model"]["0.whole"], numbered((700, 600)))
    assert torch.equal(live["model"]["1.whole"], numbered((700, 600)) + 1)
    assert torch.equal(live["model"]["1.cut"], numbered((700, 600)))


def test_values_of_a_rank_that_is_chosen_are_read_from_its_archive(tmp_path, num_read):
    build = lambda rank: {"rng": {"seed": rank, "state": torch.full((3,), rank)}, **rows((12, 2), 1)(6)(rank)}  # noqa: E731
    folder = saved(tmp_path, 6, build, per_rank=("rng",))
    live = {"rng": {"seed": 9, "state": torch.zeros(3, dtype=torch.int64)}}
    num_read.clear()

    restore(folder, 0, 2, live, from_ranks={"rng": 4})

    assert difference(live["rng"], {"seed": 4, "state": torch.full((3,), 4)}) is None
    assert archives_in(num_read) == names_of([0, 4])
    with pytest.raises(StateMismatchError, match=r"from_ranks=\{'rng': 0\}"):
        restore(folder, 0, 2, live)
    with pytest.raises(KeyError, match="rank 6 has saved no rng; ranks 0, 1, 2, 3, 4, 5 have"):
        restore(folder, 0, 2, live, from_ranks={"rng": 6})
    assert {rank: rng["seed"] for rank, rng in async_ckpt.load(folder)["rng"].items()} == dict(enumerate(range(6)))


# --- without a layout -------------------------------------------------------------------------------------------------


def many(folder: Path) -> Path:
    return saved(folder, 7, rows((21, 2), 2)(7))


def restored_by_two(folder: Path) -> None:
    for rank in range(2):
        with standing_at(rank, 2), torch.no_grad():
            build = rows((21, 2), 2)(2)
            live, _ = emptied(build, rank)
            restore(folder, rank, 2, live)
            check(live, build(rank))


def test_without_a_sound_layout_a_few_archives_are_all_opened(tmp_path, num_read):
    folder = many(tmp_path)
    path = folder / f"layout.{ATTEMPT}.json"
    text = path.read_bytes()
    for data in (None, b"", text.replace(b'"shares": 2', b'"shares": 3'), text[:-9] + b"}"):
        path.unlink()
        if data is not None:
            path.write_bytes(data)
        num_read.clear()
        restored_by_two(folder)
        assert archives_in(num_read) == names_of(range(7))
        path.write_bytes(text)


def test_a_layout_that_says_nothing_true_costs_looks_and_no_byte(tmp_path):
    """As if the tensors were cut over ranks in another order."""
    folder = many(tmp_path)
    path = folder / f"layout.{ATTEMPT}.json"
    told = layouts.parse(path.read_bytes())
    lies = {digest: text.replace("[1],[],true", "[1],[6,5,4,3,2,1,0],true") for digest, text in told.structures.items()}
    path.write_bytes(layouts.dump(told._replace(structures=lies), Table(told.classes)))

    restored_by_two(folder)


def test_a_rank_that_wrote_more_than_its_share_costs_no_byte(tmp_path):
    """One rank wrote all that it holds, though it might have left half of it to another."""
    folder = tmp_path / "run" / "step_00000001"
    state = {f"{n}": numbered((300, 100)) + n for n in range(4)}
    shared = write_all(folder, 4, lambda _: state)
    alone = write_all(tmp_path / "other", 4, lambda _: state, shared=False)
    shared[2].write_bytes(alone[2].read_bytes())
    commit(shared)

    assert difference(async_ckpt.load(folder, select="3"), {"3": state["3"]}) is None


def test_a_gap_is_told_by_name_whatever_the_layout_says(tmp_path, monkeypatch):
    """Half a step, copied by hand: an archive of another state where rank 1's should be."""
    folder = tmp_path / "run" / "step_00000001"
    paths = write_all(folder, 3, rows((21, 2), 2)(3))
    others = write_all(tmp_path / "other", 3, rows((21, 2), 1)(3))
    paths[1].write_bytes(others[1].read_bytes())
    commit(paths)

    with standing_at(0, 2), torch.no_grad():
        live, _ = emptied(rows((21, 2), 2)(2), 0)
        with pytest.raises(CorruptCheckpointError, match=r"1: \[7:14, 0:2\] of shape \[21, 2\] is in none"):
            restore(folder, 0, 2, live)
