"""The check that the ranks of a step together hold all of its tensors, from the structures of their states alone.

In: structures, and the ranks that have each. Out: nothing, or an error that names the gap. Knows nothing of: archives.

A structure has one line for each tensor, written by `state.division`: its name, dtype, global shape, sharding, and the
tensor that it is tied to. A tied tensor is stored once, so it is covered if that one is. Other lines are marks on which
all ranks must agree, since they decide which rank writes which tensor.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import product
from math import prod
from typing import NamedTuple, NoReturn, TypeAlias

from ...errors import UnsupportedStateError
from ..slicing.boxes import Box, cover
from ..spec import BORROWED, DTYPES, PER_RANK, ROOT_MESH, Json
from ..state.names import is_within

# The sharding of a tensor as JSON, and the structures whose ranks shard it that way.
_Spread: TypeAlias = tuple[str, tuple[str, ...]]


class _HeldSlices(NamedTuple):
    """A tensor as the ranks of one structure hold it."""

    dtype: str
    shape: tuple[int, ...]
    spread: Json
    structure: str
    ranks: Sequence[int]


def check_coverage(classes: Mapping[str, Sequence[int]], structures: Mapping[str, str]) -> None:
    """Check that the ranks together hold all tensors. `classes` has the ranks of each structure, `structures` its text.

    Raises UnsupportedStateError for a tensor whose shape or dtype differs between ranks, for a tensor with a part that
    no rank holds, and for marks on which ranks do not agree.
    """
    tensors: dict[str, list[_HeldSlices]] = {}
    marks: dict[str, dict[str, set[tuple[str, str]]]] = {BORROWED: {}, PER_RANK: {}, ROOT_MESH: {}}
    for digest, ranks in classes.items():
        for line in structures[digest].splitlines():
            name, dtype, shape, spread, *_ = json.loads(line)
            if dtype in DTYPES:
                tensors.setdefault(name, []).append(_HeldSlices(dtype, tuple(shape), spread, digest, ranks))
            else:
                marks[dtype].setdefault(digest, set()).add((name, json.dumps(shape)))
    _check_marks(classes, marks)
    _check_per_rank(classes, marks[PER_RANK], tensors)
    known: dict[_Spread, bool] = {}
    for name, held in tensors.items():
        shown = name.replace("\x1f", ".")
        first = held[0]
        for other in held[1:]:
            if (other.dtype, other.shape) != (first.dtype, first.shape):
                raise UnsupportedStateError(
                    f"{shown} is {first.dtype}{list(first.shape)} on rank {first.ranks[0]} and "
                    f"{other.dtype}{list(other.shape)} on rank {other.ranks[0]}; give them different names, or "
                    "name their group in per_rank=; parts that sharded() declares must have one shape and dtype",
                    path=shown,
                )
        if not _is_covered(first.shape, held, known):
            _raise_gap(shown, held)


def own_names(structures: Mapping[str, str]) -> tuple[str, ...]:
    """The names of the objects that each rank saves for itself (`per_rank=`), according to these structures."""
    lines = {line for text in structures.values() for line in text.splitlines() if PER_RANK in line}
    entries = (json.loads(line) for line in lines)
    return tuple(sorted(name for name, dtype, *_ in entries if dtype == PER_RANK))


def _check_marks(classes: Mapping[str, Sequence[int]], marks: Mapping[str, Mapping[str, set[tuple[str, str]]]]) -> None:
    """Check that borrowed groups and the root mesh are the same on all ranks."""
    borrowed, roots = marks[BORROWED], marks[ROOT_MESH]
    if len({frozenset(borrowed.get(digest, ())) for digest in classes}) > 1:
        groups = sorted({group for lent in borrowed.values() for group, _ in lent})
        raise UnsupportedStateError(
            f"not all ranks borrow {', '.join(groups)} from the same step; pass the same unchanged= on every rank, "
            "and restore the same step on all",
            path=groups[0],
        )
    first, *others = classes
    for other in others:
        if roots.get(other) != roots.get(first):
            raise UnsupportedStateError(
                f"mesh= is not the same on ranks {classes[first][0]} and {classes[other][0]}; give the same "
                "DeviceMesh to the AsyncCheckpointer of every rank, or to none",
                path="",
            )


def _check_per_rank(
    classes: Mapping[str, Sequence[int]],
    marks: Mapping[str, set[tuple[str, str]]],
    tensors: Mapping[str, Sequence[_HeldSlices]],
) -> None:
    """Check that no tensor is per rank on one rank and shared on another. Pipeline stages may have different names."""
    own_by_structure = {digest: {name for name, _ in marks.get(digest, ())} for digest in classes}
    everything = set().union(*own_by_structure.values())
    missing = {digest: frozenset(everything - names) for digest, names in own_by_structure.items()}
    if not any(missing.values()):
        return
    for name, held in tensors.items():
        shown = name.replace("\x1f", ".")
        for slices in held:
            if is_within(shown, missing[slices.structure]):
                group = next(group for group in missing[slices.structure] if is_within(shown, {group}))
                rank = next(ranks[0] for digest, ranks in classes.items() if group in own_by_structure[digest])
                raise UnsupportedStateError(
                    f"{group} is in per_rank= on rank {rank}, but not on rank {slices.ranks[0]}, which shares "
                    f"{shown}; give the same per_rank= on every rank",
                    path=shown,
                )


def _is_covered(shape: tuple[int, ...], held: Sequence[_HeldSlices], known: dict[_Spread, bool]) -> bool:
    """Whether the slices cover a tensor. `known` caches the answer by sharding: most tensors share one mesh."""
    if not prod(shape) or any(slices.spread is None for slices in held):
        return True
    boxes: list[Box] = []
    meshes: dict[str, list[_HeldSlices]] = {}
    for slices in held:
        if isinstance(slices.spread, dict):
            boxes += [Box(tuple(at), tuple(sizes)) for at, sizes in slices.spread["held"]]
        else:
            meshes.setdefault(json.dumps(slices.spread), []).append(slices)
    for text, alike in meshes.items():
        spread = text, tuple(slices.structure for slices in alike)
        if spread not in known:
            known[spread] = _is_whole(alike)
        if known[spread]:
            return True
    return not cover(shape, boxes).missing


def _is_whole(alike: Sequence[_HeldSlices]) -> bool:
    """Whether the ranks of these slices, which have one sharding, make up a whole mesh."""
    cuts, mesh_shape, stride, is_irregular, is_inside = alike[0].spread
    if not is_inside:
        return False
    ranks = sorted(rank for slices in alike for rank in slices.ranks)
    if is_irregular and len(ranks) % prod(mesh_shape) == 0:
        return True  # each rank has checked that its mesh is whole
    present = set(ranks)
    return any(_has_all(cuts, start, mesh_shape, stride, present) for start in ranks)


def _has_all(cuts: Json, start: int, shape: Sequence[int], stride: Sequence[int], ranks: set[int]) -> bool:
    """Whether `ranks` has, from `start` on, all ranks of a mesh that have different parts."""
    cut = {mesh_dim for _, mesh_dim, _ in cuts}
    along = [range(size) if dim in cut else range(1) for dim, size in enumerate(shape)]
    return all(
        start + sum(step * by for step, by in zip(steps, stride, strict=True)) in ranks for steps in product(*along)
    )


def _raise_gap(name: str, held: Sequence[_HeldSlices]) -> NoReturn:
    by_look: dict[str, list[int]] = {}
    for slices in held:
        by_look.setdefault(_describe(slices.spread), []).extend(slices.ranks)
    if len(by_look) > 1:
        looks = "; ".join(f"{look} on {_shown_ranks(ranks)}" for look, ranks in list(by_look.items())[:5])
        raise UnsupportedStateError(
            f"{name} is sharded differently on its ranks, so parts of it are missing: it is {looks}; give it the "
            "same placements and mesh on every rank",
            path=name,
        )
    ranks = [rank for slices in held for rank in slices.ranks]
    raise UnsupportedStateError(
        f"{name} is sharded, but not all of its ranks saved it: only {_shown_ranks(ranks)} did; save the same state "
        "on every rank",
        path=name,
    )


def _describe(spread: Json) -> str:
    """The placements and mesh as torch prints them."""
    if isinstance(spread, dict):
        return "given in slices"
    cuts, shape = spread[:2]
    placements = ["Replicate()"] * len(shape)
    for dim, mesh_dim, _ in cuts:
        placements[mesh_dim] = f"Shard({dim})"
    return f"[{', '.join(placements)}] on a mesh of shape {shape}"


def _shown_ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, sorted(ranks)[:20])) + (" and others" if len(ranks) > 20 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"
