"""Wrapped tensors on real ranks: as the local tensor of a DTensor, and as a value that all ranks have alike."""

from typing import Any

import pytest
import torch
from tensor_classes import Axis, Rows, Scaled, bytes_in, scaled

import async_ckpt

# The rows of this rank, as a DTensor whose local tensor is wrapped.
OF_RANKS = """
from tensor_classes import Scaled, scaled, bytes_in
from async_ckpt.core.slicing.sharded import Placed

def sharded(whole, mesh=None, placements=(Shard(0),)):
    numbers = torch.arange(float(len(whole)))[:, None].expand(whole.shape).contiguous()
    like = distribute_tensor(numbers, mesh or mesh_of(), placements)
    rows = like._local_tensor[:, 0].long()
    return Placed.of(like).around(Scaled(whole.codes[rows], whole.scale[rows], whole.context))
"""
SAVE = (
    OF_RANKS
    + """
with open_run(here.root) as ckpt:
    here.save(ckpt, {{"w": sharded(scaled({rows}, 3), {placed}), "all": scaled(2, 2, seed=5), "n": 7}}, 1)
"""
)
RESTORE = (
    OF_RANKS
    + """
from async_ckpt import StateMismatchError
live = {{"w": sharded(scaled({rows}, 3, seed=9), {placed}), "all": scaled(2, 2, seed=9), "n": 0}}
before = bytes_in(live["w"]._local_tensor)
with open_run(here.root) as ckpt:
    try:
        ckpt.restore(live)
        want = sharded(scaled({rows}, 3), {placed})
        here.tell([
            bytes_in(live["w"]._local_tensor) == bytes_in(want._local_tensor),
            bytes_in(live["all"]) == bytes_in(scaled(2, 2, seed=5)), live["n"],
        ])
    except StateMismatchError as error:
        here.tell([bytes_in(live["w"]._local_tensor) == before, str(error)])
"""
)
PLACED = {
    "shards": "None",
    "shards and replicas": "mesh_of(2, 2), (Replicate(), Shard(0))",
    "cut twice": "mesh_of(2, 2), (Shard(0), Shard(0))",
    "replicas": "None, (Replicate(),)",
}


@pytest.mark.parametrize("placed", PLACED.values(), ids=PLACED.keys())
def test_each_rank_gets_its_shard_of_a_wrapped_tensor_back(worlds, placed):
    worlds.run(4, SAVE.format(rows=8, placed=placed))
    assert worlds.told(4, RESTORE.format(rows=8, placed=placed)) == [[[True, True, 7]]] * 4


ROWS = (
    OF_RANKS.replace("Scaled(whole", "type(whole)(whole")
    + """
from tensor_classes import Rows

def rows(seed=0):
    whole = scaled({rows}, 3, seed=seed)
    return Rows(whole.codes, whole.scale)
"""
)


@pytest.mark.parametrize(("num_rows", "size"), [(8, 1), (8, 2), (8, 3), (7, 3)])
def test_one_whose_class_cuts_it_by_rows_is_cut_again_for_another_number_of_ranks(worlds, num_rows, size):
    of_rows = ROWS.replace("{rows}", str(num_rows))
    worlds.run(4, of_rows + '\nwith open_run(here.root) as ckpt:\n    here.save(ckpt, {"w": sharded(rows())}, 1)\n')
    ended = worlds.run(
        size,
        of_rows
        + """
live = {"w": sharded(rows(9))}
with open_run(here.root) as ckpt:
    ckpt.restore(live)
here.tell(bytes_in(live["w"]._local_tensor) == bytes_in(sharded(rows())._local_tensor))
""",
    )
    assert [one.told for one in ended] == [[True]] * size
    loaded = async_ckpt.load(worlds.root, types=[Rows])["w"]
    assert type(loaded) is Rows
    assert bytes_in(loaded) == bytes_in(scaled(num_rows, 3))
    live = {"w": Rows(scaled(num_rows, 3, seed=9).codes, scaled(num_rows, 3, seed=9).scale)}
    with async_ckpt.AsyncCheckpointer(worlds.root) as ckpt:
        ckpt.restore(live)
    assert bytes_in(live["w"]) == bytes_in(scaled(num_rows, 3))


AXES = (
    OF_RANKS
    + """
from tensor_classes import Axis

def whole(kind, seed=0):
    drawn = torch.Generator().manual_seed(seed)
    codes = torch.randint(-128, 128, (ROWS, COLUMNS), dtype=torch.int8, generator=drawn)
    return Axis(codes, torch.rand({"row": ROWS, "column": COLUMNS, "all": 1}[kind], generator=drawn), kind)

def of_ranks(kind, seed=0):
    all_rows = whole(kind, seed)
    like = distribute_tensor(torch.arange(float(ROWS))[:, None].expand(ROWS, COLUMNS).contiguous(), mesh_of(), [Shard(0)])
    rows = like._local_tensor[:, 0].long()
    scale = all_rows.scale[rows] if kind == "row" else all_rows.scale.clone()
    return Placed.of(like).around(Axis(all_rows.codes[rows], scale, kind))
"""
)


@pytest.mark.parametrize(
    ("num_rows", "columns", "size"), [(8, 2, 1), (8, 2, 2), (4, 1, 2), (5, 2, 2), (5, 2, 3), (3, 3, 1), (3, 3, 2)]
)
def test_a_class_whose_context_says_how_it_is_cut_is_asked_for_each_context(worlds, num_rows, columns, size):
    """A rank may have as many rows as columns, a single row, or none: shapes do not say what belongs to a row."""
    script = AXES.replace("ROWS", str(num_rows)).replace("COLUMNS", str(columns))
    kinds = ["row", "column", "all"]
    saved = worlds.run(
        4,
        script
        + f"""
with open_run(here.root) as ckpt:
    here.save(ckpt, {{kind: of_ranks(kind) for kind in {kinds}}}, 1)
""",
    )
    assert [one.saves[0].get("status", one.saves) for one in saved] == ["committed"] * 4
    ended = worlds.run(
        size,
        script
        + f"""
live = {{kind: of_ranks(kind, 9) for kind in {kinds[::-1]}}}
with open_run(here.root) as ckpt:
    ckpt.restore(live)
here.tell([bytes_in(live[kind]._local_tensor) == bytes_in(of_ranks(kind)._local_tensor) for kind in live])
""",
    )
    assert [one.told for one in ended] == [[[True] * 3]] * size
    scope: dict[str, Any] = {"torch": torch}
    exec(script[script.index("from tensor_classes import Axis") : script.index("def of_ranks")], scope)
    loaded = async_ckpt.load(worlds.root, types=[Axis])
    assert {kind: bytes_in(loaded[kind]) for kind in kinds} == {kind: bytes_in(scope["whole"](kind)) for kind in kinds}


def test_a_wrapped_tensor_is_refused_in_another_cut_and_stays_as_it_is(worlds):
    worlds.run(4, SAVE.format(rows=8, placed="None"))
    ended = worlds.run(2, RESTORE.format(rows=8, placed="None"))
    for one in ended:
        ((is_as_before, error),) = one.told
        assert is_as_before
        assert "w has the shards [[0, 2, 1]] here and [[0, 4, 1]] in the checkpoint" in error


def test_replicas_of_a_wrapped_tensor_are_written_once_and_made_again_from_all_ranks(worlds):
    worlds.run(4, SAVE.format(rows=8, placed="None, (Replicate(),)"))
    loaded = async_ckpt.load(worlds.root, types=[Scaled])
    assert bytes_in(loaded["w"]) == bytes_in(scaled(8, 3))
    assert bytes_in(loaded["all"]) == bytes_in(scaled(2, 2, seed=5))


def test_a_single_process_loads_the_shards_of_a_wrapped_tensor_as_a_stack(worlds):
    """Nothing says how they would be joined, so that no class is made of them."""
    worlds.run(4, SAVE.format(rows=8, placed="None"))
    loaded = async_ckpt.load(worlds.root, types=[Scaled])["w"]
    assert {name: tuple(part.shape) for name, part in loaded.items()} == {"codes": (4, 2, 3), "scale": (4, 2, 1)}
    assert torch.equal(loaded["codes"].reshape(8, 3), scaled(8, 3).codes)


def test_uneven_shards_of_a_wrapped_tensor_are_refused_by_name(worlds):
    ended = worlds.run(
        2,
        OF_RANKS
        + """
from async_ckpt import CheckpointError
with open_run(here.root, strict=False) as ckpt:
    try:
        ckpt.save({"w": sharded(scaled(5, 3))}, step=1).result()
    except CheckpointError as error:
        here.tell(str(error))
    try:
        ckpt.wait()
    except CheckpointError:
        pass
""",
    )
    for one in ended:
        (error,) = one.told
        assert "w.codes is int8[2, 3, 3] on rank 0 and int8[2, 2, 3] on rank 1; " in error


def test_uneven_shards_of_a_wrapped_tensor_come_back_as_values_of_each_rank(worlds):
    ended = worlds.run(
        2,
        OF_RANKS
        + """
with open_run(here.root) as ckpt:
    ckpt.save({"w": sharded(scaled(5, 3))}, step=1, per_rank=["w"]).result()
    live = {"w": sharded(scaled(5, 3, seed=9))}
    here.tell([ckpt.restore(live), bytes_in(live["w"]._local_tensor) == bytes_in(sharded(scaled(5, 3))._local_tensor)])
""",
    )
    assert [one.told for one in ended] == [[[1, True]]] * 2


def test_a_snapshot_of_a_sharded_wrapped_tensor_is_refused_by_name(worlds):
    ended = worlds.run(
        2,
        OF_RANKS
        + """
import async_ckpt
try:
    async_ckpt.snapshot({"w": sharded(scaled(4, 3))})
except async_ckpt.UnsupportedStateError as error:
    here.tell([error.path, str(error)])
""",
    )
    for one in ended:
        ((path, error),) = one.told
        assert path == "w.codes"
        assert "a snapshot cannot hold a DTensor whose local tensor is wrapped; save the live state instead" in error


def test_merging_a_step_keeps_wrapped_tensors_and_their_shards(worlds, tmp_path):
    worlds.run(4, SAVE.format(rows=8, placed="None"))
    async_ckpt.merge(worlds.root, None, tmp_path / "merged.tar")
    loaded = async_ckpt.load(tmp_path / "merged.tar", types=[Scaled])
    assert bytes_in(loaded["all"]) == bytes_in(scaled(2, 2, seed=5))
    assert torch.equal(loaded["w"]["codes"].reshape(8, 3), scaled(8, 3).codes)
