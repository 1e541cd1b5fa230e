"""Sharded tensors of any kind, as slices and the plain tensors that hold them.

In: a tensor, a DTensor, FSDP1's or Megatron's ShardedTensor, or a tensor that declares its slices. Out: its `Slices`,
and a plain tensor for each rectangle. Knows nothing of: other ranks. Calls no collective, and reads no values.

Only this module knows how torch, from 2.6 on, describes shards; it tests for features, not for versions. Classes that
torch imports on demand are not imported here: before torch imports them, there are no such tensors.
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Iterable, Mapping, Sequence, Set
from math import prod
from typing import Any, Final, NamedTuple, TypeAlias

import torch

from ...errors import UnsupportedStateError
from .slices import Cut, Ints, Mesh, Rectangle, Slices, cuts_of, flat_range

_DECLARED = ("global_shape", "global_offsets", "local_offsets", "local_sizes")
_MEGATRON = frozenset(
    {"key", "data", "local_shape", "global_shape", "global_offset", "axis_fragmentations", "replica_id"}
)
# A state has one spec for each combination of shape and placements, seldom more than a thousand.
_MAX_SPECS = 100_000
_SHARD = "torch.distributed.tensor.placement_types", "Shard"
PLAIN_TYPES: Final = frozenset({torch.Tensor, torch.nn.Parameter, torch.nn.Buffer})

# The slices of a DTensor, and the shape of its local tensor on this rank.
_LocalSlices: TypeAlias = tuple[Slices, Ints | None]


class LocalShards(NamedTuple):
    """The slices of one tensor on this rank, with a plain tensor for each rectangle. A `Slicer` creates it."""

    slices: Slices
    parts: tuple[torch.Tensor, ...]


def sharded(tensor: torch.Tensor, mesh: Any, placements: Sequence[Any]) -> torch.Tensor:
    """Declare that a plain tensor is one rank's shard of a larger tensor, such as the experts of a Mixture-of-Experts.

        experts = mesh["ep"]
        for layer in model.layers:
            async_ckpt.sharded(layer.experts.w1, experts, [Shard(0)])  # (local experts, …) of (all experts, …)

    The tensor itself does not change. From then on, saves and restores treat it as a DTensor with these placements, and
    an optimizer's state for it, too, so that another number of ranks can restore it. The declaration belongs to the
    tensor object, and lasts as long as the object: declare parameters after they have been moved to their final place.
    A tensor that is not declared must be equal on all ranks, or named in `per_rank=`.

    Args:
        tensor: a plain tensor or parameter, of the same shape on all ranks of the mesh.
        mesh: torch's DeviceMesh of the ranks that hold its shards and replicas.
        placements: for each dimension of the mesh, `Shard(dim)` or `Replicate()` of torch.distributed.tensor.

    Returns the tensor. Raises TypeError for a DTensor or a tensor that is made of other tensors, and ValueError for
    placements that do not fit the mesh or the tensor.
    """
    if not is_ordinary(tensor):
        raise TypeError(
            f"only plain tensors can be declared, got {type(tensor).__qualname__}; a DTensor knows its shards itself"
        )
    mesh_of(mesh)
    from torch.distributed.tensor import DTensor, Replicate, Shard

    fits = isinstance(placements, Sequence) and len(placements) == mesh.ndim
    if not fits or not all(
        isinstance(one, Replicate) or (isinstance(one, Shard) and -tensor.ndim <= one.dim < tensor.ndim)
        for one in placements
    ):
        raise ValueError(
            f"placements {placements!r:.100} do not fit a mesh of {mesh.ndim} dimensions and a tensor of "
            f"{tensor.ndim}; give Replicate(), or Shard(dim) of the tensor, for each dimension of the mesh"
        )
    if mesh.get_coordinate() is None:
        raise ValueError("the mesh lacks this rank, whose part would not be saved; give one of all ranks with parts")
    _declarations()[tensor] = Placed.of(DTensor.from_local(tensor.detach(), mesh, placements, run_check=False))
    return tensor


@functools.cache
def _declarations() -> Any:
    """The declared tensors, each with its placement. They are compared by identity, and not kept alive."""
    from torch.utils.weak import WeakIdKeyDictionary

    return WeakIdKeyDictionary()


def declare_like(tensor: Any, other: torch.Tensor) -> None:
    """Declare a tensor like `other`, if `other` is declared and has the same shape."""
    if isinstance(tensor, torch.Tensor) and is_declared(other) and tensor.shape == other.shape:
        _declarations()[tensor] = _declarations()[other]


def is_ordinary(value: Any) -> bool:
    """True for a strided tensor of torch's own classes."""
    return type(value) in PLAIN_TYPES and value.layout is torch.strided


def is_declared(value: Any) -> bool:
    declared = _declarations()
    return bool(declared.data) and isinstance(value, torch.Tensor) and value in declared  # `data` is the dict itself


def as_declared(value: Any) -> Any:
    """The DTensor of which a tensor was declared to be a shard; any other value as it is."""
    return _declarations()[value].around(value.detach()) if is_declared(value) else value


def is_sharded(value: Any) -> bool:
    """True for a leaf of a state of which other ranks may hold other shards, or replicas."""
    return (
        is_declared(value)
        or is_dtensor(value)
        or isinstance(value, InnerShard)
        or is_of_fsdp1(value)
        or _declares_slices(value)
        or is_of_megatron(value)
    )


def is_of_megatron(value: Any) -> bool:
    """True for a dataclass with the fields, or properties, of Megatron's ShardedTensor, which is not a tensor."""
    return declares_fields(value, _MEGATRON)


def declares_fields(value: Any, names: Set[str]) -> bool:
    """True for an instance of a dataclass with these fields, some of which may be properties.

    Its class is inspected, not the object: some dicts and mocks have any attribute, and others raise an arbitrary error
    for an attribute.
    """
    kind = type(value)
    fields: Mapping[str, Any] = getattr(kind, "__dataclass_fields__", {})
    return bool(fields) and all(name in fields or hasattr(kind, name) for name in names)


def has_shards(state: Any) -> bool:
    """True if these dicts and lists contain a sharded tensor."""
    if isinstance(state, Mapping):
        return any(map(has_shards, state.values()))
    if isinstance(state, list | tuple):
        return any(map(has_shards, state))
    return is_sharded(state)


def local_part(value: Any) -> Any:
    """The local tensor of a DTensor; any other value as it is."""
    return value._local_tensor if is_dtensor(value) else value


def is_dtensor(value: Any) -> bool:
    return _is_a(value, "torch.distributed.tensor", "DTensor")


class Placed(NamedTuple):
    """The placement of a DTensor, without its local tensor."""

    spec: Any  # torch's DTensorSpec: mesh, placements, global shape
    requires_grad: bool

    @classmethod
    def of(cls, tensor: Any) -> Placed:
        return cls(tensor._spec, tensor.requires_grad)

    def around(self, local: torch.Tensor) -> Any:
        """A DTensor with this placement and the local tensor `local`, of the same shape, on any device."""
        dtensor: Any = sys.modules["torch.distributed.tensor"].DTensor
        return dtensor(local, self.spec, requires_grad=self.requires_grad)


class InnerShard(NamedTuple):
    """A tensor inside the local tensor of a DTensor, if the local tensor is made of several.

    If the inner tensor is cut as the DTensor is, `whole` is the shape of the inner tensors of all shards together.
    Otherwise it may be a scale that belongs to a row, to a block or to everything. Then the inner tensors of all shards
    form a stack, with a leading dimension for each cut, which can be restored only with the same cuts.
    """

    of: Any
    inner: Any
    whole: Ints | None = None

    @property
    def shape(self) -> Ints:
        if self.whole is not None:
            return self.whole
        return (*(count for _, count, _ in shards_of(self.of, "the tensor")), *self.inner.shape)

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = self.inner.dtype
        return dtype


def shards_of(dtensor: Any, name: str) -> tuple[tuple[int, int, int], ...]:
    """The cuts of a DTensor in their order: dimension, number of pieces, runs. Raises as `Slicer.slice` does."""
    mesh = mesh_of(dtensor._spec.mesh)
    cuts = _cuts(dtensor._spec, mesh, dtensor.ndim, name)
    return tuple((cut.dim, mesh.shape[cut.mesh_dim], cut.runs) for cut in cuts)


def mesh_of(device_mesh: Any) -> Mesh:
    """The ranks of torch's DeviceMesh. Raises TypeError for other values."""
    if not _is_a(device_mesh, "torch.distributed.device_mesh", "DeviceMesh"):
        raise TypeError(
            f"mesh must be the DeviceMesh that contains the meshes of all tensors, got {device_mesh!r:.100}"
        )
    ranks = device_mesh.mesh
    return Mesh.of(ranks.shape, ranks.flatten().tolist())


class Slicer:
    """Finds the slices of tensors that this rank holds. Its owner keeps it between saves, since it caches meshes and
    cuts.

    slicer = Slicer()
    sliced = slicer.slice(model.weight, name="model.weight")
    list(zip(sliced.slices.rectangles, sliced.parts))
    """

    def __init__(self, rank: int | None = None) -> None:
        """`rank` is the number of this rank in the save; by default its rank in the process group."""
        self._rank = rank
        self._mesh_of = functools.cache(mesh_of)
        self._specs: dict[Any, _LocalSlices] = {}

    def slice(self, value: Any, *, name: str) -> LocalShards:
        """The shards of a tensor on this rank.

        Raises UnsupportedStateError, whose message begins with `name`, for a DTensor that is Partial, has an unknown
        placement, or whose local shape contradicts its placements; and for slices that contradict their tensor.
        """
        value = as_declared(value)
        if is_dtensor(value):
            slices, local = self._local_of(value, name)
            return LocalShards(slices, _parts(local, slices.rectangles))
        if isinstance(value, InnerShard):
            return self._of_inner(value, name)
        if is_of_fsdp1(value):
            return self._of_sharded_tensor(value, name)
        if _declares_slices(value):
            return _of_declared(value, name)
        if is_of_megatron(value):
            return _of_megatron(value, name)
        slices = Slices.plain(value.shape)
        return LocalShards(slices, (value,) if slices.rectangles else ())

    def local_tensor(self, tensor: Any, *, name: str) -> torch.Tensor:
        """The local tensor of a DTensor, after the collective that produces it, if any. Raises as `slice` does."""
        return self._local_of(tensor, name)[1]

    def _of_inner(self, shard: InnerShard, name: str) -> LocalShards:
        whole, _ = self._local_of(shard.of, name)
        if whole.cuts is None or whole.mesh is None:
            raise refused(name, "the mesh of a wrapped tensor numbers the ranks differently from this save")
        cuts, local = whole.cuts, shard.inner.detach()
        if shard.whole is None:
            cuts = tuple(Cut(dim, cut.mesh_dim) for dim, cut in enumerate(whole.cuts))
            local = local[(None,) * len(cuts)]
        slices = Slices.at(whole.coordinate, global_shape=shard.shape, cuts=cuts, mesh=whole.mesh)
        if slices.local_shape not in (None, tuple(local.shape)) and local.numel():
            raise refused(
                name, f"{tuple(local.shape)} of {slices.global_shape} are in this shard, and the shards are uneven"
            )
        return LocalShards(slices, _parts(local, slices.rectangles))

    def _local_of(self, tensor: Any, name: str) -> tuple[Slices, torch.Tensor]:
        spec, local = tensor._spec, tensor._local_tensor
        known = self._specs.get(spec)
        if known is None:
            if len(self._specs) >= _MAX_SPECS:
                self._specs.clear()
            slices = self._cut(spec, tensor.shape, name)
            known = self._specs[spec] = self._as_numbered(slices), slices.local_shape
        slices, shape = known
        if _is_a(local, "torch.distributed._functional_collectives", "AsyncCollectiveTensor"):
            local = local.wait()
        if shape is not None and local.shape != shape and (local.numel() or prod(shape)):
            raise refused(
                name,
                f"this rank holds a local tensor of shape {tuple(local.shape)}, but {list(spec.placements)} "
                f"on a mesh of {slices.mesh and slices.mesh.shape} puts {shape} of {slices.global_shape} here; "
                "redistribute() it to Shard or Replicate, or declare its slices as torch's CheckpointableTensor does",
            )
        return slices, local

    def _as_numbered(self, slices: Slices) -> Slices:
        """The slices, without a mesh that numbers this rank differently: such a mesh says nothing about other ranks."""
        mesh, coordinate = slices.mesh, slices.coordinate
        if mesh is None or coordinate is None or self._rank in (None, mesh.rank_at(coordinate)):
            return slices
        return slices._replace(cuts=None, mesh=None, coordinate=None)

    def _cut(self, spec: Any, global_shape: Iterable[int], name: str) -> Slices:
        mesh = self._mesh_of(spec.mesh)
        coordinate = spec.mesh.get_coordinate()
        return Slices.at(
            None if coordinate is None else tuple(coordinate),
            global_shape=global_shape,
            cuts=_cuts(spec, mesh, len(tuple(global_shape)), name),
            mesh=mesh,
        )

    def _of_sharded_tensor(self, tensor: Any, name: str) -> LocalShards:
        """The shards of FSDP1's ShardedTensor. With tensor parallelism, a shard may be a sharded tensor itself."""
        rectangles: list[Rectangle] = []
        parts: list[torch.Tensor] = []
        for shard in tensor.local_shards():
            offsets, sizes = tuple(shard.metadata.shard_offsets), tuple(shard.metadata.shard_sizes)
            inner = self.slice(shard.tensor, name=name)
            if inner.slices.global_shape != sizes and prod(sizes):
                raise refused(name, f"its shard at {offsets} has shape {inner.slices.global_shape} and not {sizes}")
            for rectangle, part in zip(inner.slices.rectangles, inner.parts, strict=True):
                moved = _sum(offsets, rectangle.global_offsets)
                rectangles.append(Rectangle(moved, (0,) * len(moved), rectangle.sizes))
                parts.append(part)
        return LocalShards(_given(tensor.metadata().size, rectangles, name), tuple(parts))


def _cuts(spec: Any, mesh: Mesh, num_dims: int, name: str) -> tuple[Cut, ...]:
    """The cuts of a DTensor. From torch 2.10 on, the spec has a shard order in addition to the placements."""
    placed = [_placed(placement, num_dims, spec, name) for placement in spec.placements]
    by_factor = any(here and here[1] > 1 for here in placed)
    if getattr(spec, "use_strided_shard_as_shard_order", None) is False or not by_factor:
        order = {entry[0]: entry[1] for entry in getattr(spec, "shard_order", None) or ()}
    else:
        order = None
    try:
        cuts = cuts_of(placed, mesh.shape, order=order)
    except ValueError as error:
        raise refused(name, str(error)) from error
    for first, second in itertools.combinations(cuts, 2):
        strided = max(first, second, key=lambda cut: cut.mesh_dim)
        if first.dim == second.dim and strided.runs > 1 and not _is_cut_from_the_left(spec, mesh, strided):
            raise refused(
                name,
                f"with this version of torch {list(spec.placements)} may mean cuts from either end of the mesh; "
                "install torch 2.12 or newer",
            )
    return cuts


def _placed(placement: Any, num_dims: int, spec: Any, name: str) -> tuple[int, int] | None:
    """The dimension that a placement cuts, and its split factor; None for a replica."""
    if placement.is_replicate():
        return None
    if placement.is_partial():
        raise refused(
            name,
            f"a DTensor that is {placement!r} on a dimension of its mesh holds only partial values; "
            "call redistribute() to Replicate or Shard first",
        )
    if type(placement).__name__ not in ("Shard", "_StridedShard"):
        raise refused(
            name, f"a DTensor that is placed by {placement!r} cannot be stored; redistribute() it to Shard or Replicate"
        )
    dim = placement.dim + num_dims if placement.dim < 0 else placement.dim
    if not 0 <= dim < num_dims:
        raise refused(name, f"{list(spec.placements)} cuts a dimension that a tensor of {num_dims} does not have")
    return dim, int(getattr(placement, "split_factor", 1))


def _is_cut_from_the_left(spec: Any, mesh: Mesh, strided: Cut) -> bool:
    """True if the placements of a dimension, one of them with runs, mean cuts from the left of the mesh.

    In 2.10 and 2.11, torch does not count strided shards among the shards of a dimension. There fully_shard ignores
    packed tensor parallelism and puts a plain `Shard` before it: the same placements and shapes then mean different
    rows. Up to 2.9, the placements do not mean cuts from the left if the size is uneven.
    """
    cutting = {at: one for at, one in enumerate(spec.placements) if getattr(one, "dim", None) == strided.dim}
    shards = prod(mesh.shape[mesh_dim] for mesh_dim in cutting)
    if any(type(one).__name__ == "_StridedShard" and _is_a(one, *_SHARD) for one in cutting.values()):  # up to 2.9
        return bool(spec.shape[strided.dim] % (shards * strided.runs) == 0)
    counted = getattr(spec, "num_shards_map", None)
    return counted is None or counted[strided.dim] == shards


def _of_declared(tensor: torch.Tensor, name: str) -> LocalShards:
    """The shards of a tensor with the attributes of torch 2.14's `CheckpointableTensor`."""
    shape, *lists = (getattr(tensor, attribute) for attribute in _DECLARED)
    offsets, local_offsets, sizes = ([tuple(map(int, ints)) for ints in rows] for rows in lists)
    if not len(offsets) == len(local_offsets) == len(sizes):
        raise refused(
            name, f"it declares {len(offsets)} global offsets, {len(local_offsets)} local ones and {len(sizes)} sizes"
        )
    rectangles = [Rectangle(*facts) for facts in zip(offsets, local_offsets, sizes, strict=True)]
    rectangles = [rectangle for rectangle in rectangles if rectangle.num_elements]
    for rectangle in rectangles:
        if not _is_inside(rectangle.local_offsets, rectangle.sizes, tensor.shape):
            raise refused(name, f"{rectangle} is not inside its shape {tuple(tensor.shape)}")
    return LocalShards(_given(shape, rectangles, name), _parts(tensor, rectangles))


def joined(sliced: Sequence[LocalShards], *, name: str) -> tuple[Slices, tuple[torch.Tensor, ...]]:
    """The shards of one tensor from several places of a state, joined. Copies count only if there are no originals.

    Raises UnsupportedStateError, whose message begins with `name`, for slices that overlap or belong to different
    tensors.
    """
    shapes = sorted({shards.slices.global_shape for shards in sliced})
    if len(shapes) > 1:
        raise refused(name, f"its slices belong to tensors of shapes {shapes[0]} and {shapes[1]}")
    originals = [shards for shards in sliced if not shards.slices.is_copy]
    held = [pair for shards in originals or sliced for pair in zip(shards.slices.rectangles, shards.parts, strict=True)]
    slices = _given(shapes[0], [rectangle for rectangle, _ in held], name, is_copy=not originals)
    return slices, tuple(part for _, part in held)


def _of_megatron(sharded: Any, name: str) -> LocalShards:
    """The shards of Megatron's ShardedTensor: `data` is the block at `global_offset`, or a range of its elements."""
    data, added = sharded.data, getattr(sharded, "prepend_axis_num", 0)
    if data is None:
        raise refused(name, f"the ShardedTensor {sharded.key!r} has no data")
    offset, sizes = tuple(sharded.global_offset), (1,) * added + tuple(sharded.local_shape)
    elements = getattr(sharded, "flattened_range", None)
    if elements is None:
        blocks, parts = [(offset, sizes)], [data.detach()[(None,) * added] if added else data]
    else:
        start, stop, _ = elements.indices(prod(sizes))
        ranges = list(flat_range(sizes, start, stop))
        blocks = [(_sum(offset, inner), inner_sizes) for inner, inner_sizes in ranges]
        lengths = [prod(inner_sizes) for _, inner_sizes in ranges]
        if tuple(data.shape) != (sum(lengths),):
            raise refused(
                name, f"its data has shape {tuple(data.shape)} and not the {stop - start} elements of {elements}"
            )
        flat = data.detach().split(lengths) if lengths else ()
        parts = [part.view(inner_sizes) for part, (_, inner_sizes) in zip(flat, ranges, strict=True)]
    rectangles = [Rectangle(at, (0,) * len(at), size) for at, size in blocks]
    for part, rectangle in zip(parts, rectangles, strict=True):
        if tuple(part.shape) != rectangle.sizes:
            raise refused(name, f"its data has shape {tuple(data.shape)} and not {tuple(sharded.local_shape)}")
    held = [pair for pair in zip(rectangles, parts, strict=True) if pair[0].num_elements]
    replica = sharded.replica_id
    is_copy = any(replica) if isinstance(replica, Iterable) else bool(replica)
    slices = _given(sharded.global_shape, [rectangle for rectangle, _ in held], name, is_copy=is_copy)
    return LocalShards(slices, tuple(part for _, part in held))


def _given(global_shape: Iterable[int], rectangles: Sequence[Rectangle], name: str, *, is_copy: bool = False) -> Slices:
    """Slices of given rectangles, after a check that these lie inside the tensor and do not overlap."""
    shape = tuple(map(int, global_shape))
    for rectangle in rectangles:
        if not _is_inside(rectangle.global_offsets, rectangle.sizes, shape):
            raise refused(name, f"{rectangle} is not inside the global shape {shape}")
    ordered = sorted(rectangles)
    for number, rectangle in enumerate(ordered, start=1):
        for other in itertools.islice(ordered, number, None):
            if shape and other.global_offsets[0] >= rectangle.global_offsets[0] + rectangle.sizes[0]:
                break  # all later rectangles begin behind it, too
            if rectangle.box.common(other.box) is not None:
                raise refused(name, f"{rectangle} and {other} overlap")
    return Slices(shape, tuple(rectangles), cuts=None, is_copy=is_copy)


def _is_inside(offsets: Ints, sizes: Ints, shape: Iterable[int]) -> bool:
    shape = tuple(shape)
    return len(offsets) == len(sizes) == len(shape) and all(
        0 <= offset <= offset + size <= whole for offset, size, whole in zip(offsets, sizes, shape, strict=True)
    )


def _parts(local: torch.Tensor, rectangles: Sequence[Rectangle]) -> tuple[torch.Tensor, ...]:
    if len(rectangles) == 1 and rectangles[0].sizes == local.shape:
        return (local,)
    local = local.detach()  # without `detach`, a view of a parameter would belong to its graph
    return tuple(
        local[tuple(slice(at, at + size) for at, size in zip(block.local_offsets, block.sizes, strict=True))]
        for block in rectangles
    )


def _sum(a: Ints, b: Ints) -> Ints:
    return tuple(x + y for x, y in zip(a, b, strict=True))


def _is_a(value: Any, module: str, name: str) -> bool:
    cls = getattr(sys.modules.get(module), name, None)
    return cls is not None and isinstance(value, cls)


def is_of_fsdp1(value: Any) -> bool:
    """True for torch's ShardedTensor, which FSDP1's sharded state dicts contain instead of a parameter."""
    return _is_a(value, "torch.distributed._shard.sharded_tensor", "ShardedTensor")


def _declares_slices(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and all(hasattr(value, name) for name in _DECLARED)


def refused(name: str, why: str) -> UnsupportedStateError:
    """The error for a tensor that cannot be saved."""
    return UnsupportedStateError(f"{name}: {why}; nothing was written", path=name)
