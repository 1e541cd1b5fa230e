"""The part of a state that one of several ranks writes, and the structure of its state, which ranks compare.

In: captured states of this rank, and the ranks with the same structure. Out: captured states with the part to write.
Knows nothing of: other ranks' states, files.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import torch

from ...errors import UnsupportedStateError
from ..slicing.locator import name_of
from ..slicing.sharded import Slicer
from ..slicing.shares import Holding, balance, by_everybody, rectangles_to_write, sharers
from ..slicing.slices import Mesh, Rectangle, Replicas, Slices
from ..spec import (
    BORROWED,
    DTYPES,
    PER_RANK,
    ROOT_MESH,
    RankFacts,
    SliceFacts,
    Spread,
    TensorSpec,
    by_tensor,
)
from .captured import NOTHING, Capture, RankShare
from .names import is_within

_in_short: Final = json.JSONEncoder(separators=(",", ":")).encode


class Structure(NamedTuple):
    """A rank's state without its values, as text. It is equal on ranks whose states differ only in values.

    The text has all facts that the division among ranks depends on. It has a line for each tensor: path, dtype, global
    shape, cuts and the shape of the mesh, and for a tied tensor with slices on this rank also the name of the other
    tensor. Rank numbers occur only in the root mesh, and in meshes that are not regular grids.
    """

    text: str
    digest: str


class _WriteSource(NamedTuple):
    """The source of a part to write: a captured spec, and the part of its tensor, None for the whole tensor."""

    spec: int
    within: tuple[slice, ...] | None
    is_nothing: bool = False

    def tensor(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        if self.is_nothing:  # of most tensors, if there are many ranks: slicing each would take most of the time
            return NOTHING
        whole = tensors[self.spec]
        return whole if self.within is None else whole.detach()[self.within]


@dataclass(slots=True)
class _Inventory:
    """The tensors and the structure of a capture. `specs` and `slices` are from the last equal capture."""

    specs: list[TensorSpec]
    slices: Sequence[Slices]
    per_rank: tuple[str, ...]
    names: Sequence[str]
    tensors: Sequence[list[int]]
    structure: Structure


class _WritePlan(NamedTuple):
    """The parts that this rank writes of each capture with the same inventory."""

    inventory: _Inventory
    mates: Sequence[int]
    specs: list[TensorSpec]
    sources: list[_WriteSource]
    ranks: RankFacts
    small: Mapping[str, int]
    copies: Sequence[tuple[str, str, list[int]]]  # slices as text, name, captured specs
    balance: int


class StateDivider:
    """Computes which part of each state this rank writes. Most states have the structure of the state before.

    Ranks that are known to have the same structure share the writing of their replicas. Used by one thread at a time.
    """

    def __init__(self, rank: int, world_size: int, root: Mesh | None = None) -> None:
        """`root` is a mesh that contains the meshes of all tensors. It determines which meshes hold replicas."""
        self.rank, self.world_size, self._root = rank, world_size, root
        self.slicer = Slicer(rank)
        self._inventory: _Inventory | None = None
        self._plan: _WritePlan | None = None

    def structure(
        self,
        captured: Capture,
        per_rank: tuple[str, ...] = (),
        borrowed: Mapping[str, int] = MappingProxyType({}),
    ) -> Structure:
        """The structure of a captured state.

        `per_rank` are the names of values that each rank has separately; the structure has only their names. `borrowed`
        has groups that are not saved again, with the steps that they are borrowed from.
        """
        structure = self._inventory_of(captured, per_rank).structure
        if not borrowed:
            return structure
        lines = [json.dumps([group, BORROWED, [step], None]) for group, step in sorted(borrowed.items())]
        return _digested("\n".join([*lines, structure.text]))

    def divided(self, captured: Capture, mates: Sequence[int] = (), per_rank: tuple[str, ...] = ()) -> RankShare:
        """The part of a captured state that this rank writes. `mates` are all ranks known to have the same structure.

        A rank outside of `mates` writes everything that it holds.
        """
        inventory, plan = self._inventory_of(captured, per_rank), self._plan
        if plan is None or plan.inventory is not inventory or plan.mates != mates:
            plan = self._plan = self._planned(captured, inventory, mates)
        tensors = [source.tensor(captured.tensors) for source in plan.sources]
        marks = [captured.marks[source.spec] for source in plan.sources]
        frozen = frozenset(n for n, source in enumerate(plan.sources) if source.spec in captured.frozen)
        written = captured._replace(specs=plan.specs, tensors=tensors, marks=marks, frozen=frozen)
        return RankShare(written, plan.ranks, plan.small, plan.balance)

    def copies(self, captured: Capture) -> list[tuple[str, str, list[torch.Tensor]]]:
        """The tensors with possible replicas in the last divided state: slices as text, name, and parts.

        Small tensors, which every rank writes, are not included.
        """
        assert self._plan is not None
        return [(boxes, name, [captured.tensors[i] for i in specs]) for boxes, name, specs in self._plan.copies]

    def _has_others(self, slices: Slices) -> bool:
        """True if other ranks may hold the same slices of a tensor."""
        mesh = slices.mesh
        return mesh is None or slices.replicas().size > 1 or mesh.size < self.world_size

    def _inventory_of(self, captured: Capture, per_rank: tuple[str, ...]) -> _Inventory:
        """The inventory of a capture: the last inventory if the structure of the state has not changed."""
        last = self._inventory
        if last is None or last.per_rank != per_rank or last.specs != captured.specs or last.slices != captured.slices:
            last = self._inventory = _taken_of(captured, per_rank, self._root)
        last.specs, last.slices = captured.specs, captured.slices  # comparing the same objects again costs nothing
        return last

    def _planned(self, captured: Capture, inventory: _Inventory, given: Sequence[int]) -> _WritePlan:
        names, tensors, per_rank = inventory.names, inventory.tensors, frozenset(inventory.per_rank)
        own = {number for number, name in enumerate(names) if is_within(_shown(name), per_rank)}
        shared, private = self._holdings(captured, inventory, own, given if self.rank in given else [self.rank])
        # Values that each rank has separately may differ in number, and must not change the division of the rest.
        taken = rectangles_to_write(shared) | rectangles_to_write(private)
        everybody = by_everybody(shared)
        copies = self._copies(captured, inventory, own, everybody)
        small: dict[str, int] = {}
        meshes: dict[Mesh, int] = {}
        specs: list[TensorSpec] = []
        sources: list[_WriteSource] = []
        first: dict[int, int] = {}  # the index in the new specs of a tensor's first captured spec
        for number, slices in enumerate(captured.slices):
            numbers = tensors[number]
            spec = captured.specs[numbers[0]]
            assert spec.of is not None
            first[numbers[0]] = len(specs)
            of = SliceFacts(number, slices.global_shape, None, _spread(slices, meshes))
            ours = () if spec.alias_of is not None else taken[names[number]]
            if names[number] in everybody and number not in own and ours:
                small[_shown(names[number])] = len(specs)
            for rectangle in ours:
                i, within = _place(rectangle, slices.rectangles, numbers)
                specs.append(spec._replace(shape=rectangle.sizes, of=of._replace(offsets=rectangle.global_offsets)))
                sources.append(_WriteSource(i, within))
            if not ours:
                alias = None if spec.alias_of is None else first[spec.alias_of]
                specs.append(spec._replace(shape=(0,), alias_of=alias, of=of))
                sources.append(_WriteSource(numbers[0], None, is_nothing=True))
        ranks = RankFacts(self.rank, self.world_size, tuple(meshes))
        return _WritePlan(inventory, given, specs, sources, ranks, small, copies, balance(shared, taken))

    def _holdings(
        self, captured: Capture, inventory: _Inventory, own: Set[int], mates: Sequence[int]
    ) -> tuple[dict[str, Holding], dict[str, Holding]]:
        """The holdings that the ranks divide, and the holdings of `own`, the tensors that each rank has separately."""
        replicas = cache(lambda placement: sharers(placement, self.rank, mates, self._root))
        shared, private = dict[str, Holding](), dict[str, Holding]()
        for number, slices in enumerate(captured.slices):
            spec, name = captured.specs[inventory.tensors[number][0]], inventory.names[number]
            if spec.alias_of is None and number in own:
                private[name] = Holding(slices, DTYPES[spec.dtype][0], Replicas())
            elif spec.alias_of is None:
                shared[name] = Holding(slices, DTYPES[spec.dtype][0], replicas(slices.placement))
        return shared, private

    def _copies(
        self, captured: Capture, inventory: _Inventory, own: Set[int], everybody: Set[str]
    ) -> list[tuple[str, str, list[int]]]:
        """The tensors to compare with other ranks: slices as text, name, captured specs."""
        names, tensors, has_others = inventory.names, inventory.tensors, cache(self._has_others)
        copies = []
        for number, slices in enumerate(captured.slices):
            primary = _primary(number, captured, tensors)  # on other ranks the tensor may not be tied
            is_compared = not own & {number, primary} and names[primary] not in everybody
            if is_compared and slices.rectangles and has_others(slices.placement):
                # Ranks with the same text have the same slices, and must have the same values.
                boxes = _in_short([rectangle.box for rectangle in slices.rectangles])
                copies.append((boxes, names[number], tensors[primary]))
        return copies


def _shown(name: str) -> str:
    return name.replace("\x1f", ".")


def _primary(number: int, captured: Capture, tensors: Sequence[list[int]]) -> int:
    """The number of the tensor that a tensor is tied to; for any other tensor, its own number."""
    alias = captured.specs[tensors[number][0]].alias_of
    of = None if alias is None else captured.specs[alias].of
    return number if of is None else of.number


def _taken_of(captured: Capture, per_rank: tuple[str, ...], root: Mesh | None) -> _Inventory:
    tensors, own = by_tensor(captured.specs), frozenset(per_rank)
    names = [name_of(captured.specs[numbers[0]].path) for numbers in tensors]
    if len(set(names)) < len(names):
        shown = _shown(next(name for name, count in Counter(names).items() if count > 1))
        raise UnsupportedStateError(
            f"{shown}: two tensors have this name, as by the keys 1 and '1' of one dict; ranks tell tensors "
            "apart by their names, so give them different ones",
            path=shown,
        )
    lines = [_in_short([name, PER_RANK, [], None]) for name in per_rank]
    if root is not None:
        lines.append(_in_short(["", ROOT_MESH, root, None]))
    for number, (name, numbers, slices) in enumerate(zip(names, tensors, captured.slices, strict=True)):
        if is_within(_shown(name), own):
            continue
        mesh = slices.mesh
        spread: Any = None
        if slices.cuts is None:
            # Copies are not listed, since another rank must have the original.
            held = () if slices.is_copy else slices.rectangles
            spread = {"held": [rectangle.box for rectangle in held]}
        elif mesh is not None:
            spread = [slices.cuts, mesh.shape, mesh.stride, mesh.ranks, slices.coordinate is not None]
        dtype = captured.specs[numbers[0]].dtype
        primary = _primary(number, captured, tensors)
        tied = [] if primary == number else [names[primary]]
        lines.append(_in_short([name, dtype, slices.global_shape, spread, *tied]))
    structure = _digested("\n".join(sorted(lines)))
    return _Inventory(captured.specs, captured.slices, per_rank, names, tensors, structure)


def _digested(text: str) -> Structure:
    return Structure(text, hashlib.blake2b(text.encode(), digest_size=8).hexdigest())


def _spread(slices: Slices, meshes: dict[Mesh, int]) -> Spread | None:
    if slices.cuts is None:
        return Spread(None, 0, tuple(rectangle.box for rectangle in slices.rectangles))
    if slices.mesh is None:
        return None
    return Spread(slices.cuts, meshes.setdefault(slices.mesh, len(meshes)))


def _place(
    rectangle: Rectangle, held: Sequence[Rectangle], specs: Sequence[int]
) -> tuple[int, tuple[slice, ...] | None]:
    """The spec of the slice that contains a rectangle, and the rectangle's part of the slice, None for all of it."""
    for whole, spec in zip(held, specs, strict=True):
        begins = [a - b for a, b in zip(rectangle.global_offsets, whole.global_offsets, strict=True)]
        ends = [begin + size for begin, size in zip(begins, rectangle.sizes, strict=True)]
        if all(begin >= 0 for begin in begins) and all(
            end <= size for end, size in zip(ends, whole.sizes, strict=True)
        ):
            if rectangle.sizes == whole.sizes:
                return spec, None
            return spec, tuple(slice(begin, end) for begin, end in zip(begins, ends, strict=True))
    raise AssertionError(f"{rectangle} is in none of {held}")
