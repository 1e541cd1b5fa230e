"""What one of several ranks writes of a state, and how the state looks to all of them.

In: captured states of this rank, and which ranks have states alike. Out: captured states with what this rank writes.
Knows nothing of: other ranks' states, files.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Final, Generic, NamedTuple, TypeVar

import torch

from ..errors import UnsupportedStateError
from ..slicing.sharded import Slicer
from ..slicing.shares import Holding, balance, by_everybody, rectangles_to_write, sharers
from ..slicing.slices import Mesh, Rectangle, Replicas, Slices
from ..spec import (
    BORROWED,
    DTYPES,
    PER_RANK,
    ROOT_MESH,
    MeshFacts,
    RankFacts,
    SliceOf,
    Spread,
    TensorSpec,
    by_tensor,
)
from .captured import Capture
from .names import is_within

T = TypeVar("T")
# Of most tensors a rank of many writes nothing: to cut that from each of them would take longer than all else.
_NOTHING: Final = torch.empty(0, dtype=torch.uint8, device="cpu")
_in_short: Final = json.JSONEncoder(separators=(",", ":")).encode


class Structure(NamedTuple):
    """How a rank's state looks, without its values: alike on all ranks whose states differ in nothing but these. All that who
    writes what follows from is in it.

    `text` has a line for each tensor: its path, dtype and global shape, how it is cut, and the shape of the mesh; and to which
    other one it is tied, where something of it is here. No rank is named in it, but for those of a mesh that is no regular
    grid, and of the root mesh.
    """

    text: str
    digest: str


class _WriteSource(NamedTuple):
    """Where what is written comes from: a spec of the captured state, and what of its tensor; None for all of it."""

    spec: int
    within: tuple[slice, ...] | None
    is_nothing: bool = False


class RankShare(NamedTuple):
    """What one rank writes of a state."""

    captured: Capture
    ranks: RankFacts | None
    """What its index says of it; None where it has all of the state."""
    small: Mapping[str, int] = MappingProxyType({})
    """The numbers of the specs of small tensors that every rank writes for itself, by their dotted names."""
    balance: int = 0
    """See `shares.balance`: by it rank 0 sees that the ranks have left nothing out."""


@dataclass(slots=True)
class _Inventory:
    """What a state of this rank looks like. `specs` and `slices` are those of the last capture that looked like it."""

    specs: list[TensorSpec]
    slices: Sequence[Slices]
    per_rank: tuple[str, ...]
    names: Sequence[str]
    tensors: Sequence[list[int]]
    structure: Structure


@dataclass(frozen=True, slots=True)
class _WritePlan:
    look: _Inventory
    mates: Sequence[int]
    specs: list[TensorSpec]
    sources: list[_WriteSource]
    ranks: RankFacts
    small: Mapping[str, int]
    copies: Sequence[tuple[str, str, list[int]]]  # what of it, name, captured specs
    balance: int


class RankedStates:
    """The states of one rank of several, seldom others than the one before. From one thread at a time.

    It divides among the ranks what they hold alike; only those that are known to have the same structure share.
    """

    def __init__(self, rank: int, world_size: int, root: Mesh | None = None) -> None:
        """`root` is a mesh of which those of all tensors are parts: it tells which of these have copies of each other."""
        self.rank, self.world_size, self._root = rank, world_size, root
        self.slicer = Slicer(rank)
        self._look: _Inventory | None = None
        self._plan: _WritePlan | None = None

    def structure(
        self,
        captured: Capture,
        per_rank: tuple[str, ...] = (),
        borrowed: Mapping[str, int] = MappingProxyType({}),
    ) -> Structure:
        """`per_rank` are the names of what each rank has for itself: of that, nothing else is part of this. `borrowed` groups are
        not saved again: they are those of the steps that are given with them.
        """
        made = self._looked_at(captured, per_rank).structure
        if not borrowed:
            return made
        lines = [json.dumps([group, BORROWED, [step], None]) for group, step in sorted(borrowed.items())]
        return _digested("\n".join([*lines, made.text]))

    def divided(
        self, captured: Capture, mates: Sequence[int] = (), per_rank: tuple[str, ...] = ()
    ) -> RankShare:
        """What this rank writes of what it has captured; `mates` are all ranks that are known to have the same structure.

        If this rank is none of them, it writes all that it holds.
        """
        look, plan = self._looked_at(captured, per_rank), self._plan
        if plan is None or plan.look is not look or plan.mates != mates:
            plan = self._plan = self._planned(captured, look, mates)
        tensors = [
            _NOTHING if is_nothing else _narrowed(captured.tensors[i], within)
            for i, within, is_nothing in plan.sources
        ]
        marks = [captured.marks[source.spec] for source in plan.sources]
        frozen = frozenset(n for n, one in enumerate(plan.sources) if one.spec in captured.frozen)
        made = replace(captured, specs=plan.specs, tensors=tensors, marks=marks, frozen=frozen)
        return RankShare(made, plan.ranks, plan.small, plan.balance)

    def copies(self, captured: Capture) -> list[tuple[str, str, list[torch.Tensor]]]:
        """The tensors of the state that was divided last of which other ranks may have the same: what of it, its name, and
        the slices that are here. Small ones are not among them: every rank writes those.
        """
        assert self._plan is not None
        return [(what, name, [captured.tensors[i] for i in specs]) for what, name, specs in self._plan.copies]

    def _has_others(self, slices: Slices) -> bool:
        """Whether ranks may have the same of a tensor as this one, as far as can be known."""
        mesh = slices.mesh
        return mesh is None or slices.replicas().size > 1 or mesh.size < self.world_size

    def _looked_at(self, captured: Capture, per_rank: tuple[str, ...]) -> _Inventory:
        """The last look, if the state still looks like that."""
        look = self._look
        if (
            look is None
            or look.per_rank != per_rank
            or look.specs != captured.specs
            or look.slices != captured.slices
        ):
            look = self._look = _look_at(captured, per_rank, self._root)
        look.specs, look.slices = captured.specs, captured.slices  # to be compared again, these cost nothing
        return look

    def _planned(self, captured: Capture, look: _Inventory, given: Sequence[int]) -> _WritePlan:
        mates = given if self.rank in given else [self.rank]
        names, tensors, per_rank = look.names, look.tensors, frozenset(look.per_rank)
        sharing = _AnswersBySlices(lambda slices: sharers(slices, self.rank, mates, self._root))
        has_others = _AnswersBySlices(self._has_others)
        own = {number for number, name in enumerate(names) if is_within(_shown(name), per_rank)}
        holdings: dict[bool, dict[str, Holding]] = {False: {}, True: {}}  # what is shared, and what is not
        for number, slices in enumerate(captured.slices):
            if captured.specs[tensors[number][0]].alias_of is None:
                holdings[number in own][names[number]] = Holding(
                    slices,
                    DTYPES[captured.specs[tensors[number][0]].dtype][0],
                    Replicas() if number in own else sharing(slices),
                )
        # What a rank has for itself must not change what it takes of the rest: others have more of their own, or less.
        taken = rectangles_to_write(holdings[False]) | rectangles_to_write(holdings[True])
        everybody = by_everybody(holdings[False])
        small: dict[str, int] = {}
        copies = []
        for number, slices in enumerate(captured.slices):
            primary = _primary(number, captured, tensors)  # others may not have tied it
            is_compared = not own.intersection((number, primary)) and names[primary] not in everybody
            if is_compared and slices.rectangles and has_others(slices):
                copies.append((_boxes(slices), names[number], tensors[primary]))
        meshes: dict[Mesh, int] = {}
        specs: list[TensorSpec] = []
        sources: list[_WriteSource] = []
        first: dict[int, int] = {}  # of the captured specs, in the new ones
        for number, slices in enumerate(captured.slices):
            here = tensors[number]
            spec = captured.specs[here[0]]
            assert spec.of is not None
            first[here[0]] = len(specs)
            told = SliceOf(number, slices.global_shape, None, _spread(slices, meshes))
            ours = () if spec.alias_of is not None else taken[names[number]]
            if names[number] in everybody and number not in own and ours:
                small[_shown(names[number])] = len(specs)
            for rectangle in ours:
                i, within = _place(rectangle, slices.rectangles, here)
                specs.append(
                    spec._replace(shape=rectangle.sizes, of=told._replace(offsets=rectangle.global_offsets))
                )
                sources.append(_WriteSource(i, within))
            if not ours:
                alias = None if spec.alias_of is None else first[spec.alias_of]
                specs.append(spec._replace(shape=(0,), alias_of=alias, of=told))
                sources.append(_WriteSource(here[0], None, is_nothing=True))
        facts = tuple(MeshFacts(mesh.start, mesh.shape, mesh.stride, mesh.ranks) for mesh in meshes)
        ranks = RankFacts(self.rank, self.world_size, facts)
        return _WritePlan(look, given, specs, sources, ranks, small, copies, balance(holdings[False], taken))


class _AnswersBySlices(Generic[T]):
    """What is asked of slices and follows from their mesh and cuts alone: most tensors of a state have the same, and its
    answers may list many ranks.
    """

    def __init__(self, ask: Callable[[Slices], T]) -> None:
        self._ask, self._answers = ask, dict[Any, T]()

    def __call__(self, slices: Slices) -> T:
        key = slices.mesh, slices.cuts, slices.coordinate
        if key not in self._answers:
            self._answers[key] = self._ask(slices)
        return self._answers[key]


def _shown(name: str) -> str:
    return name.replace("\x1f", ".")


def _boxes(slices: Slices) -> str:
    """What of a tensor is here: whoever has the same of it must have the same values."""
    return _in_short([[one.global_offsets, one.sizes] for one in slices.rectangles])


def _primary(number: int, captured: Capture, tensors: Sequence[list[int]]) -> int:
    """The number of the tensor that this one is tied to, or else its own."""
    alias = captured.specs[tensors[number][0]].alias_of
    of = None if alias is None else captured.specs[alias].of
    return number if of is None else of.number


def _look_at(captured: Capture, per_rank: tuple[str, ...], root: Mesh | None) -> _Inventory:
    tensors, own = by_tensor(captured.specs), frozenset(per_rank)
    names = ["\x1f".join(map(str, captured.specs[here[0]].path)) for here in tensors]  # the same on all ranks
    if len(set(names)) < len(names):
        shown = _shown(next(name for name, count in Counter(names).items() if count > 1))
        raise UnsupportedStateError(
            f"{shown}: two tensors have this name, as by the keys 1 and '1' of one dict; ranks tell tensors apart by their names, so "
            "give them different ones",
            path=shown,
        )
    lines = [_in_short([name, PER_RANK, [], None]) for name in per_rank]
    if root is not None:
        lines.append(_in_short(["", ROOT_MESH, root, None]))
    for number, (name, here, slices) in enumerate(zip(names, tensors, captured.slices, strict=True)):
        if is_within(_shown(name), own):
            continue
        mesh = slices.mesh
        spread: Any = None
        if slices.cuts is None:
            # Of a copy, another rank must have what it is a copy of.
            held = () if slices.is_copy else slices.rectangles
            spread = {"held": [[one.global_offsets, one.sizes] for one in held]}
        elif mesh is not None:
            spread = [slices.cuts, mesh.shape, mesh.stride, mesh.ranks, slices.coordinate is not None]
        dtype = captured.specs[here[0]].dtype
        primary = _primary(number, captured, tensors)
        tied = [] if primary == number else [names[primary]]
        lines.append(_in_short([name, dtype, slices.global_shape, spread, *tied]))
    structure = _digested("\n".join(sorted(lines)))
    return _Inventory(captured.specs, captured.slices, per_rank, names, tensors, structure)


def _digested(text: str) -> Structure:
    return Structure(text, hashlib.blake2b(text.encode(), digest_size=8).hexdigest())


def _spread(slices: Slices, meshes: dict[Mesh, int]) -> Spread | None:
    if slices.cuts is None:
        held = tuple((one.global_offsets, one.sizes) for one in slices.rectangles)
        return Spread(None, 0, held)
    if slices.mesh is None:
        return None
    cuts = tuple((cut.dim, cut.mesh_dim, cut.runs) for cut in slices.cuts)
    return Spread(cuts, meshes.setdefault(slices.mesh, len(meshes)))


def _place(
    rectangle: Rectangle, held: Sequence[Rectangle], specs: Sequence[int]
) -> tuple[int, tuple[slice, ...] | None]:
    """Which of the slices that are here it is in, and what of that it is."""
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


def _narrowed(tensor: torch.Tensor, within: tuple[slice, ...] | None) -> torch.Tensor:
    return tensor if within is None else tensor.detach()[within]
