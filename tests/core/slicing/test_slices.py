"""What a rank holds of a tensor, said by arithmetic: every way in which torch cuts, and what is refused by name."""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fake_ranks import distributed, standing_at
from matrix_slices import (
    MODEL_PARALLEL,
    Tally,
    all_placements,
    block,
    fsdp2_over_tp,
    numbered,
    run,
    torch_cuts,
    wrong_bytes,
)
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp._shard_utils import _create_chunk_sharded_tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.parallel.fsdp import _chunk_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from async_ckpt import UnsupportedStateError
from async_ckpt.core.slicing.sharded import Slicer, is_sharded
from async_ckpt.core.slicing.slices import Cut, Mesh, Rectangle, Slices, cuts_of, flat_range

TP_FIRST = (Cut(0, 1), Cut(0, 0))
OF_FSDP1 = pytest.mark.filterwarnings(
    "ignore:`_get_pg_default_device`:UserWarning",
    "ignore:Multiple backends:UserWarning",
    "ignore:Please use DTensor:FutureWarning",
)


def is_right(tally: Tally) -> bool:
    assert not tally.wrong
    return tally.tried > 0


@pytest.fixture
def alone() -> Iterator[None]:
    with standing_at(0, 1):
        yield


def on_mesh(placements: list[Any], local: torch.Tensor, shape: tuple[int, ...], **spec: Any) -> DTensor:
    """A DTensor on a mesh of one rank, which says of itself what it is told to."""
    mesh = init_device_mesh("cpu", (1,) * len(placements))
    return with_spec(mesh, placements, local, shape, **spec)


def with_spec(
    mesh: DeviceMesh, placements: list[Any], local: torch.Tensor, shape: tuple[int, ...], **spec: Any
) -> DTensor:
    meta = TensorMeta(torch.Size(shape), numbered(shape).stride(), local.dtype)
    return DTensor(local, DTensorSpec(mesh, tuple(placements), tensor_meta=meta, **spec), requires_grad=False)


# --- as torch cuts ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dp", "tp", "sizes"), [(3, 2, [1, 7, 13, 19]), (3, 4, [5, 27])], ids=["3 x 2", "3 x 4"])
def test_fully_shard_over_tensor_parallelism_is_cut_from_the_right_whatever_the_size(dp, tp, sizes):
    """At dp 3 x tp 4 and size 27 shapes fit both ways on some ranks, and only one way has the right bytes."""
    tally, shape = Tally(), {"dp": dp, "tp": tp}

    run("", dp * tp, lambda rank: fsdp2_over_tp(rank, shape, MODEL_PARALLEL, sizes), tally)

    assert is_right(tally)
    assert tally.refused == 0


def test_hsdp_over_tensor_parallelism_has_copies_on_the_ranks_of_the_first_dimension():
    tally, shape = Tally(), {"replicate": 2, "dp": 2, "tp": 2}

    run("", 8, lambda rank: fsdp2_over_tp(rank, shape, MODEL_PARALLEL, [7]), tally)

    assert is_right(tally)
    assert tally.refused == 0


def test_fully_shard_over_expert_and_tensor_parallelism_comes_after_both():
    tally, shape = Tally(), {"dp": 2, "ep": 2, "tp": 2}
    experts = {
        "rows": (Shard(0), Shard(0)),
        "mixed": (Shard(0), Shard(1)),
        "packed": (Shard(0), MODEL_PARALLEL["packed"][0]),
    }

    run("", 8, lambda rank: fsdp2_over_tp(rank, shape, experts, [9]), tally)

    assert is_right(tally)
    assert tally.refused == 0


@pytest.mark.parametrize("mesh_shape", [(4,), (3, 2), (2, 2, 2)], ids=str)
def test_dtensors_are_cut_as_distribute_tensor_cuts_them(mesh_shape):
    tally, placed = Tally(), all_placements(mesh_shape)
    few = placed if len(placed) < 50 else placed[::5]

    run("", math.prod(mesh_shape), lambda rank: torch_cuts(mesh_shape, few, [2, 8]), tally)

    assert is_right(tally)
    assert tally.refused == 0


def test_what_distribute_tensor_cuts_otherwise_than_fully_shard_is_refused_by_one_of_its_ranks():
    """The placements are the same, and so is the shape on most ranks; not on all."""
    tally = Tally()

    run(
        "",
        6,
        lambda rank: torch_cuts((3, 2), [(_StridedShard(0, split_factor=2), Shard(0))], [7, 13, 19]),
        tally,
    )

    assert not tally.wrong
    assert tally.refused == 3


def test_wherever_the_two_ways_to_cut_differ_the_shape_differs_on_some_rank():
    differing = 0
    for dp, tp in itertools.product(range(2, 6), repeat=2):
        mesh = Mesh.of((dp, tp), range(dp * tp))
        for size in range(1, 30):
            ways = [
                [Slices.at(at, global_shape=(size,), cuts=cuts, mesh=mesh) for at in itertools.product(range(dp), range(tp))]
                for cuts in (TP_FIRST, (Cut(0, 0, tp), Cut(0, 1)))
            ]  # fmt: skip
            if [one.rectangles for one in ways[0]] != [one.rectangles for one in ways[1]]:
                differing += 1
                assert [one.local_shape for one in ways[0]] != [one.local_shape for one in ways[1]], (
                    dp,
                    tp,
                    size,
                )
    assert differing > 30


# --- meshes and ranks ---------------------------------------------------------------------------------------------------


def test_a_rank_outside_of_the_mesh_holds_nothing():
    for rank in range(4):
        with standing_at(rank, 4):
            mesh = DeviceMesh("cpu", [1, 2])
            local = numbered((4,))[(rank - 1) * 2 : rank * 2] if rank in (1, 2) else torch.empty(0)
            tensor = with_spec(mesh, [Shard(0)], local, (4,))

            slices = Slicer().slice(tensor, name="t").slices

            assert slices.mesh == Mesh(1, (2,), (1,))
            assert slices.coordinate == ((rank - 1,) if rank in (1, 2) else None)
            assert [one.global_offsets for one in slices.rectangles] == [((rank - 1) * 2,)] * (rank in (1, 2))


def test_meshes_of_pipeline_stages_begin_at_different_ranks_and_have_the_same_shape():
    meshes = []
    for rank in (1, 5):
        with standing_at(rank, 8):
            mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))["dp", "tp"]
            tensor = distributed(numbered((4, 4)), mesh, [Shard(0), Shard(1)])
            meshes.append(Slicer().slice(tensor, name="t").slices.mesh)

    assert meshes == [Mesh(0, (2, 2), (2, 1)), Mesh(4, (2, 2), (2, 1))]


def test_a_mesh_in_no_regular_order_lists_its_ranks():
    ranks = [[0, 3], [1, 2]]
    for rank in range(4):
        with standing_at(rank, 4):
            mesh = DeviceMesh("cpu", ranks)
            tensor = distributed(numbered((4, 4)), mesh, [Replicate(), Shard(0)])

            slices = Slicer().slice(tensor, name="t").slices

            assert slices.mesh == Mesh(0, (2, 2), (), (0, 3, 1, 2))
            assert slices.coordinate is not None
            assert slices.mesh.rank_at(slices.coordinate) == rank
            copies = slices.replicas()
            assert copies.ranks is not None
            assert copies.ranks.all_ranks() == ([0, 1] if rank in (0, 1) else [3, 2])
            assert copies.ranks.all_ranks()[copies.number] == rank


def test_replicas_are_the_ranks_that_differ_only_where_nothing_is_cut():
    mesh = Mesh.of((2, 3, 2), range(12))
    held = {
        coordinate: Slices.at(coordinate, global_shape=(9, 4), cuts=(Cut(0, 1),), mesh=mesh)
        for coordinate in itertools.product(range(2), range(3), range(2))
    }

    for coordinate, slices in held.items():
        same = [mesh.rank_at(other) for other in held if held[other].rectangles == slices.rectangles]
        copies = slices.replicas()
        assert copies.ranks is not None
        assert copies.ranks.all_ranks() == same
        assert copies.ranks.all_ranks()[copies.number] == mesh.rank_at(coordinate)


def test_a_mesh_must_have_as_many_ranks_as_places():
    with pytest.raises(ValueError, match=r"a mesh of shape \(2, 2\) does not have 3 ranks"):
        Mesh.of((2, 2), [0, 1, 2])


# --- orders of cuts -----------------------------------------------------------------------------------------------------


def test_a_split_factor_says_after_which_later_dimensions_a_cut_comes():
    """As torch writes the order 2, 0, 1 on a mesh of 4 x 3 x 2."""
    cuts = cuts_of([(0, 2), (0, 2), (0, 1)], (4, 3, 2))

    assert cuts == (Cut(0, 2), Cut(0, 0), Cut(0, 1))


def test_runs_that_continue_each_other_are_one_rectangle():
    alone = Slices.at((0,), global_shape=(6,), cuts=(Cut(0, 0, 3),), mesh=Mesh.of((1,), [0]))

    assert alone.rectangles == (Rectangle.whole((6,)),)


def test_a_shard_order_that_is_not_the_default_is_followed():
    shape, mesh_shape, order = (13, 2), (2, 3), ((0, (1, 0)),)
    found = []
    for rank in range(6):
        with standing_at(rank, 6):
            mesh = init_device_mesh("cpu", mesh_shape)
            local = numbered(shape)
            for mesh_dim in order[0][1]:
                pieces = local.chunk(mesh_shape[mesh_dim])
                step = mesh.get_coordinate()[mesh_dim]
                local = pieces[step] if step < len(pieces) else local[:0]
            tensor = with_spec(mesh, [Shard(0), Shard(0)], local, shape)
            if not hasattr(tensor._spec, "shard_order"):
                pytest.skip("this version of torch has one order only")
            tensor._spec.shard_order = ShardOrder(order)

            sliced = Slicer().slice(tensor, name="t")

            found += wrong_bytes(sliced, shape)
            assert sliced.slices.cuts == TP_FIRST
    assert not found


def ShardOrder(order: tuple[tuple[int, tuple[int, ...]], ...]) -> Any:  # noqa: N802
    from torch.distributed.tensor._dtensor_spec import ShardOrderEntry

    return tuple(ShardOrderEntry(*entry) for entry in order)


def test_a_shard_order_that_the_placements_do_not_have_is_an_error():
    with pytest.raises(ValueError, match=r"its shard order cuts dimension 0 along \[1\], its placements \[0, 1\]"):
        cuts_of([(0, 1), (0, 1)], (2, 2), order={0: [1]})


@pytest.mark.usefixtures("alone")
def test_split_factors_are_runs_where_torch_says_that_they_are_no_order():
    tensor = on_mesh([_StridedShard(0, split_factor=1), Shard(0)], numbered((4,)), (4,))
    assert Slicer().slice(tensor, name="t").slices.cuts == (Cut(0, 0), Cut(0, 1))

    assert cuts_of([(0, 2), (0, 1)], (3, 2)) == (Cut(0, 1), Cut(0, 0))
    assert cuts_of([(0, 2), (0, 1)], (3, 2), order={}) == (Cut(0, 0, 2), Cut(0, 1))


def test_packed_parallelism_under_a_fully_shard_that_does_not_count_it_is_refused(monkeypatch):
    """As in torch 2.10 and 2.11, whose fully_shard then puts a plain Shard first, though it cuts last."""

    def num_shards_map(spec: DTensorSpec) -> list[int]:
        shards = [1] * spec.ndim
        for mesh_dim, placement in enumerate(spec.placements):
            if isinstance(placement, Shard) and not isinstance(placement, _StridedShard):
                shards[placement.dim] *= spec.mesh.size(mesh_dim)
        return shards

    monkeypatch.setattr(DTensorSpec, "num_shards_map", property(num_shards_map))
    with standing_at(3, 4):
        held = fsdp2_over_tp(3, {"dp": 2, "tp": 2}, {k: MODEL_PARALLEL[k] for k in ("packed", "rows")}, [8])
        packed, rows = held["packed_8"][0], held["rows_8"][0]
        assert [type(one) for one in packed.placements] == [Shard, _StridedShard]

        with pytest.raises(
            UnsupportedStateError, match=r"qkv: with this version of torch .* install torch 2.12"
        ) as caught:
            Slicer().slice(packed, name="qkv")
        assert not list(wrong_bytes(Slicer().slice(rows, name="rows"), (8, 2)))

    assert caught.value.path == "qkv"


# --- what is refused ----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("alone")
def test_a_partial_dtensor_is_refused_by_name():
    mesh = init_device_mesh("cpu", (1,))
    tensor = DTensor.from_local(torch.ones(4), mesh, [Partial()])

    with pytest.raises(
        UnsupportedStateError,
        match=r"^opt\.grad: a DTensor that is Partial\(sum\) on .* call redistribute\(\)",
    ) as caught:
        Slicer().slice(tensor, name="opt.grad")

    assert caught.value.path == "opt.grad"


@pytest.mark.usefixtures("alone")
def test_a_placement_that_is_not_known_is_refused_by_name():
    class Ragged(Shard):
        pass

    tensor = on_mesh([Ragged(0)], torch.ones(4), (4,))

    with pytest.raises(UnsupportedStateError, match=r"^w: a DTensor that is placed by .* cannot be stored"):
        Slicer().slice(tensor, name="w")


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("local", [(3, 2), (4, 1), (0, 2)])
def test_a_local_shape_that_the_placements_do_not_give_is_refused_by_name(local):
    tensor = on_mesh([Shard(0)], torch.ones(local), (4, 2))

    with pytest.raises(
        UnsupportedStateError,
        match=r"^w: this rank holds a local tensor of shape .* puts \(4, 2\) of \(4, 2\)",
    ):
        Slicer().slice(tensor, name="w")


@pytest.mark.usefixtures("alone")
def test_a_cut_of_a_dimension_that_the_tensor_does_not_have_is_refused_by_name():
    tensor = on_mesh([Shard(2)], torch.ones(4), (4,))

    with pytest.raises(UnsupportedStateError, match=r"^w: .* cuts a dimension that a tensor of 1 does not have"):
        Slicer().slice(tensor, name="w")


# --- plain tensors, and memory ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), (3,), (2, 3)])
def test_a_plain_tensor_is_one_rectangle(shape):
    tensor = numbered(shape)

    sliced = Slicer().slice(tensor, name="t")

    assert not is_sharded(tensor)
    assert sliced.slices == Slices(shape, (Rectangle.whole(shape),))
    assert sliced.slices.is_plain
    assert sliced.parts[0] is tensor


def test_a_tensor_without_elements_has_no_rectangles():
    assert Slicer().slice(torch.empty(0, 3), name="t").slices == Slices((0, 3), ())


@pytest.mark.usefixtures("alone")
def test_a_tensor_without_dimensions_is_whole_on_every_rank_of_its_mesh():
    tensor = distributed(torch.tensor(7.0), init_device_mesh("cpu", (1,)), [Replicate()])

    sliced = Slicer().slice(tensor, name="step")

    assert sliced.slices.rectangles == (Rectangle((), (), ()),)
    assert sliced.parts[0].item() == 7.0


def test_parts_are_the_memory_of_the_local_tensor_and_belong_to_no_graph():
    with standing_at(1, 2):
        mesh = init_device_mesh("cpu", (2,))
        strided = [_StridedShard(0, split_factor=2)]
        tensor = torch.nn.Parameter(distributed(numbered((8,)), mesh, strided))

        sliced = Slicer().slice(tensor, name="t")
        with torch.no_grad():
            tensor._local_tensor.fill_(5)

        assert [part.tolist() for part in sliced.parts] == [[5, 5], [5, 5]]
        assert not any(part.requires_grad for part in sliced.parts)
        assert [part._version for part in sliced.parts] == [tensor._local_tensor._version] * 2


def test_a_local_tensor_that_is_still_being_gathered_is_waited_for():
    with standing_at(0, 2):
        mesh = init_device_mesh("cpu", (2,))
        gathered = AsyncCollectiveTensor(torch.ones(4))
        tensor = with_spec(mesh, [Replicate()], gathered, (4,))

        (part,) = Slicer().slice(tensor, name="t").parts

        assert type(part) is torch.Tensor


def test_what_is_known_of_a_tensor_is_remembered_and_its_local_shape_still_looked_at():
    with standing_at(0, 2):
        mesh = init_device_mesh("cpu", (2,))
        slicer = Slicer()
        first = distributed(numbered((4,)), mesh, [Shard(0)])
        second = DTensor(torch.ones(3), first._spec, requires_grad=False)

        assert slicer.slice(first, name="a").slices is slicer.slice(first, name="b").slices
        with pytest.raises(UnsupportedStateError, match=r"^c: this rank holds"):
            slicer.slice(second, name="c")


# --- tensors that bring their rectangles along --------------------------------------------------------------------------


@OF_FSDP1
@pytest.mark.parametrize("size", [1, 2, 3, 5, 12])
def test_fsdp1_shards_are_where_their_metadata_says(size):
    counts = torch.zeros(size, 3)
    for rank in range(3):
        with standing_at(rank, 3):
            group = dist.group.WORLD
            assert group is not None
            tensor = _create_chunk_sharded_tensor(numbered((size, 3)), rank, 3, 1, group)

            sliced = Slicer().slice(tensor, name="w")

            assert is_sharded(tensor)
            assert sliced.slices.cuts is None
            assert not list(wrong_bytes(sliced, (size, 3)))
            for rectangle in sliced.slices.rectangles:
                block(counts, rectangle).add_(1)
    assert counts.unique().tolist() == [1]


@OF_FSDP1
def test_fsdp1_over_tensor_parallelism_has_shards_within_shards():
    found = []
    for rank in range(2):  # the others torch's own code gets wrong: it takes ranks of a group for those of the world
        with standing_at(rank, 4):
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
            cut_by_tp = distributed(numbered((8, 3)), mesh["tp"], [Shard(0)])
            tensor = _chunk_tensor(cut_by_tp, 0, 2, 1, mesh["dp"].get_group())

            sliced = Slicer().slice(tensor, name="w")

            assert not list(wrong_bytes(sliced, (8, 3)))
            found += sliced.slices.rectangles
    assert found == [Rectangle((0, 0), (0, 0), (2, 3)), Rectangle((4, 0), (0, 0), (2, 3))]


def declared(**changed: Any) -> torch.Tensor:
    """Two blocks of a tensor of 6 x 4 in one of 5 x 4, and a row of padding; as torch 2.14 has it."""
    tensor = torch.full((5, 4), -1.0)
    tensor[0:2], tensor[3:5] = numbered((6, 4))[4:6], numbered((6, 4))[1:3]
    facts = {
        "global_shape": (6, 4),
        "global_offsets": ((4, 0), (1, 0)),
        "local_offsets": ((0, 0), (3, 0)),
        "local_sizes": ((2, 4), (2, 4)),
    }
    for name, value in (facts | changed).items():
        setattr(tensor, name, value)
    return tensor


def test_a_tensor_that_declares_its_slices_is_believed():
    sliced = Slicer().slice(declared(), name="w")

    assert is_sharded(declared())
    assert len(sliced.parts) == 2
    assert not list(wrong_bytes(sliced, (6, 4)))


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"global_shape": (5, 4)}, r"is not inside the global shape \(5, 4\)"),
        ({"global_shape": (6, 4, 1)}, "is not inside the global shape"),
        ({"local_offsets": ((0, 0), (4, 0))}, r"is not inside its shape \(5, 4\)"),
        ({"local_offsets": ((0, 0), (-1, 0))}, "is not inside its shape"),
        ({"global_offsets": ((2, 0), (1, 0))}, "overlap"),
        ({"global_offsets": ((0, 0), (1, 0))}, "overlap"),
        ({"local_sizes": ((2, 4),)}, "it declares 2 global offsets, 2 local ones and 1 sizes"),
    ],
)
def test_slices_that_contradict_their_tensor_are_refused_by_name(changed, told):
    with pytest.raises(UnsupportedStateError, match=f"^experts.w: .*{told}"):
        Slicer().slice(declared(**changed), name="experts.w")


@dataclass
class Megatron:
    """What Megatron's ShardedTensor has."""

    data: torch.Tensor | None
    local_shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    replica_id: Any = 0
    prepend_axis_num: int = 0
    flattened_range: slice | None = None
    key: str = "decoder.w"
    axis_fragmentations: tuple[int, ...] | None = None


def test_megatrons_tensors_say_where_they_lie_and_how_they_are_called():
    data = numbered((3, 8, 4))[2, 2:4]
    sharded = Megatron(data, (2, 4), (3, 8, 4), (2, 2, 0), prepend_axis_num=1)

    sliced = Slicer().slice(sharded, name="model.w")

    assert is_sharded(sharded)
    assert sliced.slices.rectangles[0].sizes == (1, 2, 4)
    assert not list(wrong_bytes(sliced, (3, 8, 4)))


def test_what_megatron_has_as_fields_may_be_properties():
    @dataclass
    class Whole:
        data: torch.Tensor
        local_shape: tuple[int, ...] = (4,)
        global_offset: tuple[int, ...] = (0,)
        key: str = "w"
        axis_fragmentations: None = None
        replica_id: int = 0

        @property
        def global_shape(self) -> tuple[int, ...]:
            return self.local_shape

    sharded = Whole(torch.arange(4))

    assert is_sharded(sharded)
    assert Slicer().slice(sharded, name="w").parts[0].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(("replica", "is_copy"), [(0, False), (1, True), ((0, 0, 0), False), ((0, 1, 0), True)])
def test_megatrons_copies_are_written_by_another_rank(replica, is_copy):
    sharded = Megatron(torch.ones(4), (4,), (4,), (0,), replica_id=replica)

    assert Slicer().slice(sharded, name="w").slices.is_copy is is_copy


def test_megatrons_ranges_of_elements_are_rectangles_whatever_they_begin_and_end_with():
    shape, offset, whole = (2, 3, 4), (1, 0, 4), (3, 3, 8)
    full = numbered(whole)[1:3, 0:3, 4:8].reshape(-1)
    for start, stop in itertools.combinations_with_replacement(range(25), 2):
        sharded = Megatron(full[start:stop], shape, whole, offset, flattened_range=slice(start, stop))

        sliced = Slicer().slice(sharded, name="w")

        assert not list(wrong_bytes(sliced, whole))
        assert sum(part.numel() for part in sliced.parts) == stop - start
        assert len(sliced.parts) <= 5


def test_flat_ranges_are_in_the_order_of_the_elements():
    full = numbered((3, 2, 5))

    found = [
        block(full, Rectangle(offsets, (), sizes)).reshape(-1).tolist()
        for offsets, sizes in flat_range((3, 2, 5), 3, 27)
    ]

    assert list(itertools.chain(*found)) == list(range(3, 27))


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"data": None}, "the ShardedTensor 'decoder.w' has no data"),
        ({"data": torch.ones(3)}, r"its data has shape \(3,\) and not \(4,\)"),
        ({"flattened_range": slice(1, 3)}, r"its data has shape \(4,\) and not the 2 elements"),
        ({"global_offset": (5,)}, r"is not inside the global shape \(8,\)"),
    ],
)
def test_megatrons_tensors_that_do_not_hold_together_are_refused_by_name(changed, told):
    facts: dict[str, Any] = {
        "data": torch.ones(4),
        "local_shape": (4,),
        "global_shape": (8,),
        "global_offset": (4,),
    }

    with pytest.raises(UnsupportedStateError, match=f"^w: .*{told}"):
        Slicer().slice(Megatron(**(facts | changed)), name="w")


@pytest.mark.parametrize("value", [3, "text", None, SimpleNamespace(key=1, data=None)])
def test_other_leaves_are_no_sharded_tensors(value):
    assert not is_sharded(value)
