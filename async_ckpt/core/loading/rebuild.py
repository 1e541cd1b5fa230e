"""The layout of a step, rebuilt from the indices of all its archives.

In: a run, and a step that several ranks have saved. Out: `layout.<attempt>.rebuilt.json` in its folder.
Knows nothing of: bytes of tensors.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple, cast

from ..format.index import Index
from ..host.threads import run_together
from ..runs import layouts
from ..runs.receipts import Table
from ..slicing.cover import Box
from ..slicing.locator import ShardLocator, StepLayout, name_of
from ..slicing.slices import Mesh
from ..state.names import dotted, is_within
from ..storage.place import Anywhere
from .archives.find import committed_step
from .archives.step_archives import NamedArchives, open_archive

_MAX_OPENERS: Final = 16
_compact_json: Final = json.JSONEncoder(separators=(",", ":")).encode


class ArchiveAccount(NamedTuple):
    """An archive's account of its rank: the structure of the rank's state, and the boxes that it has written."""

    structure: str
    written: Mapping[str, set[Box]]
    aliases: set[str]


def rebuild_layout(run: Anywhere, step: int) -> str:
    """Rebuild the layout of a step that several ranks have saved, from the indices of all its archives.

        async_ckpt.files.rebuild_layout("runs/a", 500)

    Loading needs this only if its error says so: hundreds of ranks have saved the step, and the layout that tells a
    reader which archives it needs is missing or damaged. The new layout is written beside the old one, and its path or
    URL is returned. Nothing else is changed.

    Args:
        run: the root of the run, or the folder of the step; a path, a URL or a Place.
        step: a committed step.

    Raises NotCommittedError if the step is not committed there, ValueError for a step of one rank or of
    TarStorageWriter, which need no layout, CorruptCheckpointError if an archive is missing or damaged, and
    StorageUnavailableError.
    """
    committed = committed_step(run, step)
    storage = committed.storage
    manifest = committed.read()
    if manifest.ranks is None:
        saver = "one rank" if len(manifest.archives) == 1 else "torch.distributed.checkpoint"
        raise ValueError(f"step {step} was saved by {saver}, which does not need a layout")
    named = committed.archives(manifest)[0]
    accounts = _read_accounts(named)
    known = layouts.read(storage, named.folder, named.attempt)
    layout = layout_of(accounts, known and known.root)
    name = layouts.rebuilt_name(named.attempt)
    path = f"{named.folder}/{name}" if named.folder else name
    # Which values ranks of each structure have is not looked up: each structure then has some of its own.
    of_some = {digest: (digest,) for digest in layout.classes}
    storage.replace(path, layouts.dump(layout, Table(layout.classes, tuple(named.per_rank), of_some)))
    return storage.locate(path)


def _read_accounts(named: NamedArchives) -> list[ArchiveAccount]:
    accounts: dict[int, ArchiveAccount] = {}

    def read_account(rank: int) -> None:
        with contextlib.ExitStack() as stack:
            archive = open_archive(named.storage, *named.archives[rank], True, stack, named.named_by)
            accounts[rank] = account_of(archive.index, named.per_rank)

    everybody = range(len(named.archives))
    run_together("open", [functools.partial(read_account, rank) for rank in everybody], max_threads=_MAX_OPENERS)
    return [accounts[rank] for rank in everybody]


def account_of(index: Index, per_rank: Sequence[str] | Any = ()) -> ArchiveAccount:
    """The account that an index gives of its rank.

    `per_rank` are the dotted names of values that each rank has separately, which are not part of a structure.
    """
    per_rank_names, lines, written, aliases = frozenset(per_rank), [], dict[str, set[Box]](), set[str]()
    for tensor in index.tensors:
        if is_within(dotted(tensor.path), per_rank_names):
            continue
        name, spread = name_of(tensor.path), cast(Any, None)
        if tensor.spread is not None and tensor.spread.cuts is None:
            spread = {"held": tensor.spread.held}
        elif tensor.spread is not None:
            assert index.ranks is not None
            mesh = Mesh(*index.ranks.meshes[tensor.spread.mesh])
            is_inside = index.ranks.rank in mesh.all_ranks()
            spread = [tensor.spread.cuts, mesh.shape, mesh.stride, mesh.ranks, is_inside]
        tied = [] if tensor.alias_of is None else [name_of(index.tensors[tensor.alias_of].path)]
        lines.append(_compact_json([name, tensor.dtype, tensor.shape, spread, *tied]))
        if tensor.alias_of is not None:
            aliases.add(name)
        else:
            written[name] = {Box(piece.offsets, piece.sizes) for piece in tensor.slices if piece.extent.length}
            written[name] |= {Box(lent.offsets, lent.sizes) for lent in tensor.lent}
    return ArchiveAccount("\n".join(sorted(lines)), written, aliases)


def layout_of(accounts: Sequence[ArchiveAccount], root: Mesh | None = None) -> StepLayout:
    """The layout of a step, given the accounts in the order of ranks.

    Boxes that follow from arithmetic are left to it; the others are listed.
    """
    classes: dict[str, list[int]] = {}
    structures: dict[str, str] = {}
    for rank, account in enumerate(accounts):
        digest = hashlib.blake2b(account.structure.encode(), digest_size=8).hexdigest()
        structures[digest] = account.structure
        classes.setdefault(digest, []).append(rank)
    aliases = {name for account in accounts for name in account.aliases}
    irregular_shared = _irregular(StepLayout(classes, structures, classes, root), accounts, aliases)
    irregular_alone = _irregular(StepLayout(classes, structures), accounts, aliases)
    shared: dict[str, Sequence[int]] = {}
    irregular: set[int] = set()
    for digest, ranks in classes.items():
        if len(irregular_shared.intersection(ranks)) < len(irregular_alone.intersection(ranks)):
            shared[digest] = ranks
        irregular |= (irregular_shared if digest in shared else irregular_alone).intersection(ranks)
    boxes_of_irregular = {
        rank: {name: sorted(boxes) for name, boxes in accounts[rank].written.items() if boxes}
        for rank in sorted(irregular)
    }
    return StepLayout(classes, structures, shared, root, boxes_of_irregular)


def _irregular(layout: StepLayout, accounts: Sequence[ArchiveAccount], aliases: set[str]) -> set[int]:
    """The ranks that have written other boxes than follow from a layout."""
    writers = ShardLocator(layout, aliases)
    return {rank for rank, account in enumerate(accounts) if writers.boxes_of(rank) != account.written}
