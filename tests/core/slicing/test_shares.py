"""Who writes what of tensors that several ranks hold alike: each element once, and everybody about the same."""

import functools
import random

import pytest
import torch
from matrix_slices import block

from async_ckpt.core.slicing.shares import (
    EVERYBODY_BYTES,
    EVERYBODY_TOTAL_BYTES,
    KNOWN_VERSIONS,
    VERSION,
    Holding,
    rectangles_to_write,
)
from async_ckpt.core.slicing.slices import Cut, Mesh, Rectangle, Replicas, Slices
from async_ckpt.core.spec import KIB, MIB

VOCABULARY, HIDDEN, INNER, KEYS = 128_256, 2_048, 8_192, 512  # of Llama-3.2-1B, which ties its two embeddings


def llama() -> dict[str, tuple[int, ...]]:
    """Shapes of a Llama-3.2-1B, and of AdamW's moments for it."""
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens": (VOCABULARY, HIDDEN), "norm": (HIDDEN,)}
    for layer in range(16):
        of_layer = {
            "q_proj": (HIDDEN, HIDDEN), "k_proj": (KEYS, HIDDEN), "v_proj": (KEYS, HIDDEN), "o_proj": (HIDDEN, HIDDEN),
            "gate_proj": (INNER, HIDDEN), "up_proj": (INNER, HIDDEN), "down_proj": (HIDDEN, INNER),
            "input_layernorm": (HIDDEN,), "post_attention_layernorm": (HIDDEN,),
        }  # fmt: skip
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in of_layer.items()}
    kinds = ("model", "exp_avg", "exp_avg_sq")
    return {f"{kind}.{name}": shape for kind in kinds for name, shape in shapes.items()}


def held(slices: Slices, *, item_bytes: int = 4) -> Holding:
    return Holding(slices, item_bytes, slices.replicas())


def alike(shape: tuple[int, ...], rank: int, world: int, *, item_bytes: int = 4) -> Holding:
    """A plain tensor that is known to be the same on all ranks."""
    return Holding(Slices.plain(shape), item_bytes, Replicas(Mesh.of((world,), range(world)), rank))


def cut(shape: tuple[int, ...], mesh: Mesh, coordinate: tuple[int, ...], *cuts: Cut, item_bytes: int = 4) -> Holding:
    return held(Slices.at(coordinate, global_shape=shape, cuts=cuts, mesh=mesh), item_bytes=item_bytes)


def num_bytes(taken: dict[str, tuple[Rectangle, ...]], *, item_bytes: int = 4) -> int:
    return sum(one.num_elements for rectangles in taken.values() for one in rectangles) * item_bytes


def times_written(shape: tuple[int, ...], name: str, by_rank: list[dict[str, tuple[Rectangle, ...]]]) -> list[int]:
    counts = torch.zeros(shape, dtype=torch.int32)
    for taken in by_rank:
        for rectangle in taken.get(name, ()):
            block(counts, rectangle).add_(1)
    return counts.unique().tolist()


@pytest.mark.parametrize(
    ("data", "shards"),
    [(2, 1), (3, 1), (8, 1), (64, 1), (1, 2), (1, 8), (1, 48), (1, 64), (2, 4), (3, 8), (16, 8)],
    ids=lambda n: str(n),
)
def test_the_largest_writer_of_a_llama_has_at_most_a_tenth_more_than_the_mean(data, shards):
    mesh = Mesh.of((data, shards), range(data * shards))

    @functools.cache
    def of(shape: tuple[int, ...], rank: int) -> Holding:
        if shards == 1:  # DDP
            return alike(shape, rank, data)
        return cut(shape, mesh, divmod(rank, shards), Cut(0, 1))  # HSDP, and FSDP where there is one copy

    sizes = [
        num_bytes(rectangles_to_write({name: of(shape, rank) for name, shape in llama().items()}))
        for rank in range(mesh.size)
    ]

    whole = sum(torch.Size(shape).numel() for shape in llama().values()) * 4
    norms = sum(shape[0] for shape in llama().values() if len(shape) == 1) * 4
    assert sum(sizes) == (whole if shards > 1 else whole + (data - 1) * norms)  # which every rank writes
    assert max(sizes) <= 1.1 * sum(sizes) / len(sizes)


@pytest.mark.parametrize("seed", range(20))
def test_each_element_is_written_once_whatever_the_shapes(seed):
    draw = random.Random(seed)
    world = draw.choice([2, 3, 5, 8])
    shapes = {}
    for number in range(draw.randrange(1, 12)):
        shape = [draw.choice([1, 1, 2, 3, 7, 64, 300]) for _ in range(draw.randrange(4))]
        if draw.random() < 0.5:
            shape.insert(draw.randrange(len(shape) + 1), draw.choice([0, 1_000, 70_000]))
        if torch.Size(shape).numel() < 10_000_000:
            shapes[f"t{number}"] = tuple(shape)
    ranks = Replicas(Mesh.of((world,), range(world)))

    def of(rank: int) -> dict[str, Holding]:
        names = draw.sample(sorted(shapes), len(shapes))  # the order of a dict decides nothing
        mesh = ranks.ranks
        assert mesh is not None
        return {name: cut(shapes[name], mesh, (rank,)) for name in names}

    by_rank = [rectangles_to_write(of(rank)) for rank in range(world)]

    for name, shape in shapes.items():
        assert times_written(shape, name, by_rank) in ([1], []), (name, shape)


def test_a_tensor_of_a_mebibyte_is_cut_at_rows_and_a_smaller_one_is_not():
    mesh = Mesh.of((2,), (0, 1))
    large, small = (256, 1_024), (255, 1_024)

    by_rank = [rectangles_to_write({"t": cut(large, mesh, (rank,)), "u": cut(small, mesh, (rank,))}) for rank in (0, 1)]

    assert by_rank[0]["t"] == (Rectangle((0, 0), (0, 0), (256, 1_024)),)
    assert [len(taken["u"]) for taken in by_rank] == [0, 1]
    alone = [rectangles_to_write({"t": cut(large, mesh, (rank,))})["t"] for rank in (0, 1)]
    assert alone == [
        (Rectangle((0, 0), (0, 0), (128, 1_024)),),
        (Rectangle((128, 0), (128, 0), (128, 1_024)),),
    ]


def test_the_row_in_which_a_share_begins_belongs_to_the_share_before_it():
    """A reader divides old checkpoints as they were written: another way to round is another version."""
    mesh = Mesh.of((3,), range(3))

    taken = [rectangles_to_write({"t": cut((1_000, 1_000), mesh, (rank,))})["t"][0] for rank in range(3)]

    assert [one.global_offsets[0] for one in taken] == [0, 334, 667]
    assert (2, {1, 2}) == (VERSION, KNOWN_VERSIONS)


def test_rows_are_of_the_first_dimension_that_has_several_and_are_never_cut_themselves():
    mesh = Mesh.of((4,), range(4))

    by_rank = [
        rectangles_to_write({"t": cut((1, 2, MIB), mesh, (rank,)), "u": cut((1, 1, MIB), mesh, (rank,))})
        for rank in range(4)
    ]

    assert {one.sizes for taken in by_rank for one in taken["t"]} == {(1, 1, MIB)}
    assert {one.sizes[:2] for taken in by_rank for one in taken["u"]} == {(1, 1)}
    assert times_written((1, 2, MIB), "t", by_rank) == times_written((1, 1, MIB), "u", by_rank) == [1]


def test_rows_of_a_shard_are_counted_from_where_it_begins():
    mesh = Mesh.of((2, 2), range(4))
    shape = (1_024, 1_024)

    by_rank = [rectangles_to_write({"t": cut(shape, mesh, divmod(rank, 2), Cut(0, 1))})["t"] for rank in range(4)]

    assert by_rank[3] == (Rectangle((768, 0), (256, 0), (256, 1_024)),)
    assert times_written(shape, "t", [{"t": taken} for taken in by_rank]) == [1]


def test_copies_on_meshes_that_share_no_rank_are_lines_of_their_own():
    """As fully_shard makes of a norm under tensor parallelism: two ranks on either mesh, and all four in a third."""
    meshes = {
        0: Mesh.of((2,), (0, 2)),
        2: Mesh.of((2,), (0, 2)),
        1: Mesh.of((2,), (1, 3)),
        3: Mesh.of((2,), (1, 3)),
    }
    everybody = Mesh.of((2, 2), range(4))
    shape = (600, 1_000)

    by_rank = [
        rectangles_to_write(
            {
                "norm": cut(shape, meshes[rank], (rank // 2,)),
                "whole": cut(shape, everybody, divmod(rank, 2)),
                "copied": cut(shape, everybody, divmod(rank, 2), Cut(0, 1)),
            }
        )
        for rank in range(4)
    ]

    assert times_written(shape, "norm", by_rank) == [2]  # once on each mesh: nobody knows that they are the same
    assert times_written(shape, "whole", by_rank) == times_written(shape, "copied", by_rank) == [1]
    sizes = [num_bytes(taken) for taken in by_rank]
    assert max(sizes) <= 1.02 * sum(sizes) / 4


def test_small_whole_tensors_are_written_by_every_rank_up_to_16_mib_in_all():
    small, large = (EVERYBODY_BYTES // 4,), (EVERYBODY_BYTES // 4 + 1,)
    many = EVERYBODY_TOTAL_BYTES // EVERYBODY_BYTES
    shapes = {f"t{number:04}": small for number in range(many + 3)} | {"large": large, "step": ()}

    by_rank = [
        rectangles_to_write({name: alike(shape, rank, 2) for name, shape in shapes.items()}) for rank in range(2)
    ]

    times = {name: times_written(shape, name, by_rank) for name, shape in shapes.items()}
    assert times["large"] == [1]
    assert times["step"] == [2]
    both = [name for name in shapes if times[name] == [2]]
    assert sum(torch.Size(shapes[name]).numel() * 4 for name in both) <= EVERYBODY_TOTAL_BYTES
    assert len(both) == many  # and the rest of them once
    assert {times[name][0] for name in shapes} == {1, 2}


@pytest.mark.parametrize("num_items", [8, 1])
def test_small_replicated_dtensors_are_shared_out_and_not_written_by_every_rank(num_items):
    mesh = Mesh.of((2,), (0, 1))

    by_rank = [
        rectangles_to_write({name: cut((num_items,), mesh, (rank,), item_bytes=1) for name in ("t", "u")})
        for rank in (0, 1)
    ]

    assert [sorted(name for name in taken if taken[name]) for taken in by_rank] == [["t"], ["u"]]


def test_a_rank_writes_all_that_only_it_holds_and_nothing_that_is_said_to_be_a_copy():
    mine = Slices((4,), (Rectangle((2,), (0,), (2,)),), cuts=None)
    copy = Slices((4,), (Rectangle((2,), (0,), (2,)),), cuts=None, is_copy=True)

    taken = rectangles_to_write({"mine": held(mine), "copy": held(copy), "big": held(Slices.plain((KIB, KIB)))})

    assert taken["mine"] == mine.rectangles
    assert taken["copy"] == ()
    assert taken["big"] == (Rectangle((0, 0), (0, 0), (KIB, KIB)),)
