"""`merge`: a step that several ranks have saved, as one archive with full tensors.

In: a run. Out: one archive, at any destination. Knows nothing of: live objects.

Like any archive, the file is planned first and then written from front to back. While the sink writes one segment, the
next one is gathered from the archives of the ranks, so a few segments of memory are enough for a state of any size.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...core.format.layout import Layout, SegmentPlan, TensorPlan, lay_out
from ...core.host.memory import HostBuffer
from ...core.loading.archives.contents import Contents, Part
from ...core.loading.archives.find import committed_step, from_committed
from ...core.loading.archives.step_archives import Readers
from ...core.loading.load import check_lent
from ...core.report import Destination, SaveReport
from ...core.runs.manifest import NAME as MANIFEST
from ...core.saving.block_digests import BlockDigests
from ...core.saving.file_target import FileTarget
from ...core.spec import SEGMENT_BYTES, Json, TensorSpec, flag
from ...core.state.capture import pickled
from ...core.state.names import shown
from ...core.state.skeletons import merge as merge_skeletons
from ...core.state.tree import ValuesByRank, parts_in, top_keys
from ...core.storage.disk import make_folder
from ...core.storage.interface import Storage
from ...core.storage.place import Anywhere, written_at
from ...core.storage.sequential import Appender
from ...core.timing import monotonic, wall_time
from ...errors import StateMismatchError
from .ranges import Range, read_ranges


def merge(
    run: Anywhere,
    step: int | None,
    destination: Anywhere,
    *,
    from_ranks: Mapping[str, int] | None = None,
    trust: bool = False,
    verify: bool = True,
) -> SaveReport:
    """Write a step that several ranks have saved as one archive with full tensors. Returns when it is durable.

        async_ckpt.merge("runs/a", 500, "out/x.ackpt.tar")

    The archive looks as if one process had saved the state: `load` returns the same as for the step, bit for bit, and
    other programs can read the safetensors files in it. It is streamed through less than 256 MiB of memory, regardless
    of the size of the state. It includes the groups that the step borrows from earlier ones. The run is not changed,
    and nothing is visible at the destination until the whole archive is durable.

    Args:
        run: the root of the run, or the folder of the step; a path, a URL or a Place.
        step: a committed step; None for the newest.
        destination: the path or URL of the archive, or a Place. It is not compressed.
        from_ranks: the rank whose value to take for an entry that was saved per rank, by name, such as {"rng": 0}. It
            must have a rank for each of these entries.
        trust: as for `load`: values that are not plain data are unpickled and pickled again.
        verify: compare the digest of every block that is read.

    Raises NotCommittedError if there is no such step, StateMismatchError if `from_ranks` lacks an entry that was saved
    per rank, KeyError if a name in it matches nothing, UntrustedObjectError, CorruptCheckpointError, ValueError or
    IsADirectoryError for a destination that cannot be written to or is in the folder of a step, StorageFullError and
    StorageUnavailableError.
    """
    begin = monotonic()
    trust, verify = flag("trust", trust), flag("verify", verify)
    place = written_at(destination)
    target = FileTarget.at(place)
    if target.is_compressed:
        raise ValueError(f"{target.path}: a merged archive is a plain tar; give it a name such as merged.tar")
    source = committed_step(run, step)
    storage, name = place.object()
    if storage.exists(MANIFEST):
        raise ValueError(
            f"{target.path}: that is the folder of a committed step, whose archives stay as they are; give another "
            "destination"
        )

    def write(parts: Sequence[Part]) -> SaveReport:
        check_lent(parts, None)
        state = _state_in(parts, trust=trust)
        layout = lay_out(
            TensorPlan(state.specs),
            skeleton=state.skeleton,
            objects=state.objects,
            step=source.read().step,
            mtime=int(wall_time()),
        )
        retries = _write(state, layout, storage, name)
        seconds = monotonic() - begin
        num_stored = sum(spec.alias_of is None for spec in state.specs)
        return SaveReport(
            status="committed",
            step=source.read().step,
            path=target.path,
            num_bytes=layout.file_bytes,
            num_tensors=num_stored,
            stall_seconds=seconds,
            write_seconds=seconds,
            total_seconds=seconds,
            retries=retries,
            destinations=(Destination(target.path, layout.file_bytes, seconds, retries),),
        )

    return from_committed(source, write, verify=verify, readers=Readers(None, from_ranks, reads_all=True))


@dataclass(frozen=True, slots=True)
class _MergedState:
    """The state to write: like a capture of live objects, but with tensors in files."""

    skeleton: str
    specs: list[TensorSpec]
    tensors: list[tuple[Contents, int]]  # by spec
    objects: bytes | None


def _state_in(parts: Sequence[Part], *, trust: bool) -> _MergedState:
    """The merged state. Raises StateMismatchError if `from_ranks` lacks an entry that was saved per rank."""
    values, objects = [], []
    for part in parts:
        value, stored_leaves = part.archive.tree(groups=part.groups)
        values.append(value)
        objects.append(part.archive.objects(stored_leaves, trust=trust))
    _refuse_values_by_rank(parts, values)
    skeletons = {n: _skeleton_of_groups(part) for n, part in enumerate(parts)}
    merged = merge_skeletons(skeletons, {n: len(part.archive.index.tensors) for n, part in enumerate(parts)})
    specs: list[TensorSpec] = []
    tensors: list[tuple[Contents, int]] = []
    first: dict[tuple[int, int], int] = {}
    for numbers in merged.tensors:
        ((n, number),) = numbers.items()
        archive = parts[n].archive
        stored, primary = archive.index.tensors[number], archive.primary(number)
        stored_as = first.setdefault((n, primary), len(specs))
        alias = None if stored_as == len(specs) else stored_as
        specs.append(TensorSpec(stored.path, stored.dtype, stored.shape, alias))
        tensors.append((archive, primary))
    pickles = objects[0] if merged.objects is None else [objects[n][number] for n, number in merged.objects]
    skeleton = json.dumps(merged.skeleton, separators=(",", ":"))
    return _MergedState(skeleton, specs, tensors, pickled(pickles) if pickles else None)


def _refuse_values_by_rank(parts: Sequence[Part], values: Sequence[Any]) -> None:
    by_rank = [leaf for value in values for leaf in parts_in(value, ValuesByRank)]
    if not by_rank:
        return
    names = [shown(leaf.path) for leaf in by_rank]
    example = f"from_ranks={{{names[0]!r}: {min(by_rank[0].values)}}}"
    raise StateMismatchError(
        f"{parts[0].archive.path}: {', '.join(names[:5])}{', …' if len(names) > 5 else ''}: each rank has saved its "
        f"own value; choose a rank, such as {example}",
        mismatched=tuple(names),
    )


def _skeleton_of_groups(part: Part) -> Json:
    """The skeleton of those groups in the file that belong to the step."""
    skeleton = part.archive.index.skeleton
    if part.groups is None:
        return skeleton
    assert top_keys(skeleton) is not None  # see `check_lent`
    (kind,) = (kind for kind in ("dict", "ordered") if kind in skeleton)
    return {**skeleton, kind: [[key, node] for key, node in skeleton[kind] if key in part.groups]}


def _write(state: _MergedState, layout: Layout, storage: Storage, name: str) -> int:
    """Write the archive. Returns the number of retries."""
    if not storage.remote:
        make_folder(Path(storage.locate(name)).parent)
    out = Appender(storage, name, limit_bytes=layout.file_bytes)
    memory = HostBuffer(min(SEGMENT_BYTES, layout.file_bytes))
    try:
        digests, tail = BlockDigests(layout), b""
        for plan in layout.segments(SEGMENT_BYTES):
            _fill(memory, plan, state)
            view = memory.view[: plan.num_bytes]
            digests.note(plan.offset, view[: max(0, digests.covered - plan.offset)])
            if plan.offset + plan.num_bytes > digests.covered:
                tail = tail or digests.sealed()
                _overlay(view, plan.offset, tail, digests.covered)
            out.append(view)
        out.finish()
    except BaseException:
        out.abort()
        raise
    finally:
        memory.free()
    out.sink.close()
    return out.sink.num_retries


def _fill(memory: HostBuffer, plan: SegmentPlan, state: _MergedState) -> None:
    for target, data in plan.literals:
        memory.view[target : target + len(data)] = data
    ranges = [Range(*state.tensors[tensor], source, length, target) for target, tensor, source, length in plan.pieces]
    read_ranges(ranges, memory.tensor)


def _overlay(view: memoryview, offset: int, text: bytes, at: int) -> None:
    """Copy the overlapping part of `text` into a segment. They begin at `at` and `offset` of the file."""
    begin, end = max(at, offset), min(at + len(text), offset + len(view))
    if begin < end:
        view[begin - offset : end - offset] = text[begin - at : end - at]
