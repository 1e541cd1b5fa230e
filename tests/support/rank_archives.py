"""The archives of all ranks of a step, written by one process that stands at one rank after the other."""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from archives import assemble, parsed_index, read_index
from fake_ranks import standing_at
from states import bits_of

from async_ckpt.core.format.layout import TensorPlan, lay_out
from async_ckpt.core.loading.archives.archive import OpenArchive
from async_ckpt.core.loading.archives.contents import Part
from async_ckpt.core.loading.archives.merged_archives import MergedArchives
from async_ckpt.core.loading.load import LoadOptions, state_of
from async_ckpt.core.loading.restore import RestoreOptions, restore_state
from async_ckpt.core.runs import layouts
from async_ckpt.core.runs.manifest import GroupLocation, Manifest, RankFiles, parse
from async_ckpt.core.runs.receipts import NO_TABLE, Exchange, Receipt, Table
from async_ckpt.core.slicing.boxes import Box
from async_ckpt.core.slicing.locator import ShardLocator, StepLayout, name_of
from async_ckpt.core.slicing.slices import Mesh
from async_ckpt.core.spec import RankFacts
from async_ckpt.core.state.capture import capture
from async_ckpt.core.state.captured import Capture
from async_ckpt.core.state.division import StateDivider
from async_ckpt.core.state.names import dotted, is_within
from async_ckpt.core.storage.local import LocalStorage

ATTEMPT = "0123abcd"
Build = Callable[[int], Any]


def write_all(
    folder: Path, world: int, build: Build, *, shared: bool = True, per_rank: tuple[str, ...] = ()
) -> list[Path]:
    """Write what `build(rank)` makes on each rank; not `shared`, nobody knows of others, and all write all they hold."""
    ranked = [StateDivider(rank, world) for rank in range(world)]
    classes: dict[str, list[int]] = {}
    captures: list[Capture] = []
    for rank, states in enumerate(ranked):
        with standing_at(rank, world):
            captures.append(capture(build(rank), slicer=states.slicer))
        if shared:
            classes.setdefault(states.structure(captures[rank], per_rank).digest, []).append(rank)
    paths = []
    for rank, (states, captured) in enumerate(zip(ranked, captures, strict=True)):
        mates = classes.get(states.structure(captured, per_rank).digest, ())
        divided = states.divided(captured, mates, per_rank)
        path = folder / f"rank_{rank:05d}.{ATTEMPT}.tar"
        paths.append(write(path, divided.captured, divided.ranks))
    return paths


def write(path: Path, captured: Capture, ranks: RankFacts) -> Path:
    """Write one archive, at once and in one piece."""
    layout = lay_out(
        TensorPlan(captured.specs),
        skeleton=captured.skeleton,
        objects=captured.objects,
        step=1,
        mtime=0,
        ranks=ranks,
    )
    data = bytearray(layout.file_bytes)
    for offset, literal in layout.literals:
        data[offset : offset + len(literal)] = literal
    for offset, num_bytes, number in layout.plan.in_file_order:
        begin = layout.base + offset
        data[begin : begin + num_bytes] = bytes(bits_of(captured.tensors[number]).numpy())
    path.parent.mkdir(parents=True, exist_ok=True)
    text = bytes(data[512 : layout.base])
    path.write_bytes(assemble(text, bytes(data[layout.base : layout.digests.data.offset - 512])))
    return path


def commit(
    paths: Sequence[Path],
    *,
    per_rank: tuple[str, ...] = (),
    differing: tuple[str, ...] = (),
    lent: Mapping[str, Path] | None = None,
) -> Path:
    """Make a committed step of archives that lie in its folder; returns the folder. `lent` are groups of other steps;
    `differing` is what rank 0 has found to differ."""
    folder = paths[0].parent
    exchange = Exchange(LocalStorage(folder.parent), folder.name, ATTEMPT)
    receipts = [
        Receipt(rank, digest=parsed_digest(path), num_bytes=path.stat().st_size) for rank, path in enumerate(paths)
    ]
    layout = _layout_of([_account_of(path, per_rank) for path in paths])
    of_ranks = RankFiles(
        exchange.put_archives(receipts),
        exchange.put_layout(layouts.dump(layout, Table(layout.classes, per_rank))),
        NO_TABLE,
        sum(one.num_bytes for one in receipts),
        (*per_rank, *differing),
    )
    elsewhere = tuple(
        GroupLocation(group, 1, lender.name, archive)
        for group, lender in (lent or {}).items()
        for archive in parse((lender / "manifest.json").read_bytes(), path=str(lender)).lenders
    )
    made = Manifest(2 if lent else 1, ATTEMPT, len(paths), 0.0, (), elsewhere=elsewhere, ranks=of_ranks)
    (folder / "manifest.json").write_bytes(made.dump())
    return folder


class _Account(NamedTuple):
    """What an archive tells of its rank: the structure of its state, and the boxes that it has written."""

    structure: str
    written: Mapping[str, set[Box]]


def _account_of(path: Path, per_rank: Sequence[str] = ()) -> _Account:
    index, raw = parsed_index(path), read_index(path)
    lines, written = [], dict[str, set[Box]]()
    for tensor, row in zip(index.tensors, raw["tensors"], strict=True):
        if is_within(dotted(tensor.path), frozenset(per_rank)):
            continue
        name, spread = name_of(tensor.path), (row if "alias" not in row else raw["tensors"][row["alias"]]).get("spread")
        facts: Any = None if spread is None else {"held": spread[2]}
        if spread is not None and spread[0] is not None:
            rank, _, meshes = raw["ranks"]
            start, *grid = meshes[spread[1]]
            facts = [spread[0], *grid, rank in Mesh(start, *map(tuple, grid)).all_ranks()]
        tied = [] if tensor.alias_of is None else [name_of(index.tensors[tensor.alias_of].path)]
        lines.append(json.dumps([name, tensor.dtype, tensor.shape, facts, *tied], separators=(",", ":")))
        if not tied:
            written[name] = {piece.box for piece in tensor.slices if piece.extent.length}
    return _Account("\n".join(sorted(lines)), written)


def _layout_of(accounts: Sequence[_Account]) -> StepLayout:
    """The layout of a step: a structure is shared if more of its ranks have then written what follows by arithmetic."""
    classes: dict[str, list[int]] = {}
    structures: dict[str, str] = {}
    for rank, account in enumerate(accounts):
        digest = hashlib.blake2b(account.structure.encode(), digest_size=8).hexdigest()
        structures[digest] = account.structure
        classes.setdefault(digest, []).append(rank)
    by_shares, alone = StepLayout(classes, structures, classes), StepLayout(classes, structures)
    odd, odd_alone = _irregular(by_shares, accounts), _irregular(alone, accounts)
    shared = {one: ranks for one, ranks in classes.items() if len(odd & {*ranks}) < len(odd_alone & {*ranks})}
    return alone._replace(shared=shared)


def _irregular(layout: StepLayout, accounts: Sequence[_Account]) -> set[int]:
    """The ranks that have written other boxes than follow from a layout."""
    locator = ShardLocator(layout)
    return {rank for rank, account in enumerate(accounts) if locator.boxes_of(rank) != account.written}


def irregular_ranks(folder: Path, per_rank: tuple[str, ...] = ()) -> set[int]:
    """The ranks of a committed step that have written other boxes than follow from its layout."""
    found = layouts.read(LocalStorage(folder), "", ATTEMPT)
    assert found is not None
    return _irregular(found, [_account_of(path, per_rank) for path in sorted(folder.glob("rank_*.tar"))])


def parsed_digest(path: Path) -> str:
    with LocalStorage(path.parent).open(path.name) as reader:
        return OpenArchive(reader, path=str(path), verify=True).digest


@contextmanager
def opened(paths: Sequence[Path], *, verify: bool = True, **how: Any) -> Iterator[MergedArchives]:
    """The archives as one file."""
    with ExitStack() as stack:
        archives = []
        for path in paths:
            reader = stack.enter_context(LocalStorage(path.parent).open(path.name))
            archives.append(OpenArchive(reader, path=str(path), verify=verify))
        yield MergedArchives(archives, path=str(paths[0].parent), **how)


def load_all(paths: Sequence[Path], *, verify: bool = True, select: Any = None, **how: Any) -> Any:
    """The state that these archives are, in full tensors."""
    chosen = {name: how.pop(name) for name in LoadOptions._fields if name in how}
    with opened(paths, verify=verify, **how) as merged:
        return state_of([Part(merged)], LoadOptions(select=select, **chosen))


def restore_at(rank: int, world: int, paths: Sequence[Path], live: Any, *, verify: bool = True, **how: Any) -> None:
    """Fill what is live on a rank; this process stands there already."""
    merging: Mapping[str, Any] = {name: how.pop(name) for name in ("per_rank", "from_ranks") if name in how}
    with opened(paths, verify=verify, ranks=(rank, world), **merging) as merged:
        restore_state([Part(merged)], live, RestoreOptions(**how))
