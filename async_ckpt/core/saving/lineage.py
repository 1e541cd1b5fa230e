"""The lineage of a run: its line of steps, and the facts that saves and restores leave for later saves.

In: restores, commits, captured states, hanging writes. Out: the facts that a new save needs about earlier ones, and the
groups that it may borrow from them. Knows nothing of: how an archive is written.
"""

from __future__ import annotations

import itertools
import json
import logging
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Final, NamedTuple, TypeAlias

from ...errors import CheckpointError, ClosedError, NotUnchangedError
from ..host.loop import get_loop
from ..host.operations import notify
from ..ranks.calls import JointSave
from ..ranks.peers import Ranks
from ..runs.manifest import Archive, GroupLocation, Manifest
from ..runs.roots import Roots
from ..runs.run import Run
from ..slicing.sharded import Slicer
from ..spec import MIB, Json, TensorSpec, some_of
from ..state.capture import capture
from ..state.captured import Capture, Mark, SnapshotView, is_leaf, part_of
from ..state.plain import method_of
from ..storage.interface import Storage
from ..storage.pace import Pace
from .admission import Admission
from .block_digests import GroupDigest
from .ledger import Ledger
from .mover import CopyStep
from .planner import small_archive
from .taken_over import TakenOver, UnchangedTensors, still_lends
from .tiers import Tiers

_MAX_DRIVER_BYTES: Final = 64 * MIB

# The `since` of groups that every save may borrow: with one rank all groups, with several the groups of a restore.
_FIRST: Final = -(2**63)

_log = logging.getLogger("async_ckpt")


# Copies to a run the steps that only other roots have, and returns them: `loading.catch_up.catch_up`.
CatchUp: TypeAlias = Callable[..., list[int]]


class Lineage:
    """The facts that saves and restores of one checkpointer leave for later saves. May be called from any thread.

    The checkpointer creates it; targets report commits to it, and retention asks it which steps to keep. The lock
    guards tables only.
    """

    def __init__(
        self,
        roots: Roots,
        ledger: Ledger,
        admission: Admission,
        *,
        retire: bool,
        catch_up: CatchUp,
        copy_step: CopyStep,
        pace_of: Callable[[Storage], Pace | None] = lambda _: None,
        ranks: Ranks,
    ) -> None:
        """`pace_of` gives the pace of the writes to a place."""
        self.roots, self._may_retire = roots, retire
        self.facts: Callable[[], dict[str, Any]] = dict  # about the training, for events in the history
        self.tiers = Tiers(roots, copy_step, pace_of, self.in_flight, ranks)
        self._pace_of = pace_of
        self.groups = UnchangedGroups(lambda: ranks.divider.slicer)
        self.tensors = UnchangedTensors()
        self._ledger, self._admission, self._catch_up, self._ranks = ledger, admission, catch_up, ranks
        self._lock = threading.Lock()
        # The last restore from a step below the newest commit, until a commit follows. Under _lock; read without it.
        self.rolled_back: object | None = None
        self.damaged: Collection[int] = ()  # under _lock: the newer steps, if that restore found all of them damaged
        self._digests: dict[str, bytes] = {}  # the last commit's digests, by group; under _lock

    def unchanged_in(self, digests: Mapping[str, GroupDigest], borrowed: Collection[str]) -> tuple[str, ...]:
        """The groups of a commit whose bytes equal those in the previous commit, borrowed groups included.

        Called once for each commit, in the order of commits.
        """
        with self._lock:
            before, self._digests = self._digests, {name: digest.here for name, digest in digests.items()}
            self._digests.update({name: before[name] for name in borrowed if name in before})
        same = {name for name, digest in digests.items() if before.get(name) == digest.before}
        return tuple(sorted(same.union(borrowed)))

    @property
    def retire(self) -> bool:
        """True if a commit takes newer steps out of the run: the user allows it, or they are damaged."""
        return self._may_retire or bool(self.damaged)

    def restored(
        self, step: int, *, behind: bool, damaged: Collection[int], seconds: float, phases: Mapping[str, float]
    ) -> None:
        """Note that training continues from a step. `behind`: the step is older than the newest commit. `seconds` is
        how long the restore took, and `phases` its parts.

        `damaged` are the newer steps that the restore could not read: saves before the next commit replace or retire
        them.
        """
        with self._lock:
            self.rolled_back = object() if behind else None
            self.damaged = damaged if behind else ()
            self._digests = {}
        self.tensors.forget()
        parts = {f"{phase}_seconds": of_phase for phase, of_phase in phases.items()}
        self.note("restore", step, behind=behind, total_seconds=seconds, **parts)

    def progressed(self, step: int) -> None:
        """Note in the history, in the background, that the training has reached a step."""
        if self._ranks.world.rank:
            return
        self.note("progress", step, **self.facts())
        loop = get_loop()
        for run in self.roots.runs:
            write = partial(run.write_events, again=False)
            with suppress(ClosedError):  # the interpreter is exiting
                loop.soon(partial(loop.background.submit, write, lambda _: None))

    def note(self, kind: str, step: int, **facts: Any) -> None:
        """Note an event, which is written with the next save, and report a mark to listeners. Only rank 0 does this."""
        if self._ranks.world.rank == 0:
            if kind == "mark":
                notify("mark", self._ledger.roots, {facts["mark"]: 1})
            for run in self.roots.runs:
                run.events.note(kind, step, **facts)

    def committed(self, *, since: object | None) -> None:
        """Note a commit whose save began after the restore `since`. The run continues from this commit."""
        with self._lock:
            if self.rolled_back is since:
                self.rolled_back, self.damaged = None, ()

    def in_flight(self, run: Run) -> Collection[int]:
        """The steps that retention must leave at a place: being saved, lending to saves, or still to be copied."""
        steps = {step for slot in self._admission.under_way() for step in (slot.step, *slot.needs())}
        lenders = self.groups.lenders() | self.tensors.lenders()
        return {step for step in steps if step is not None} | lenders | self.tiers.held(run)

    def catch_up(self) -> dict[str, list[int]]:
        """Copy to each root the steps that only other roots have. Returns the steps copied to each root.

        Raises StorageUnavailableError if a root still does not answer, after the others have been caught up.
        """
        copied: dict[str, list[int]] = {}
        errors: list[CheckpointError] = []
        under_way = {save.handle.step for save in self._ledger.saves() if not save.finished.done()}
        skip = {step for step in under_way if step is not None}
        for run in self.roots.runs:
            root = run.storage.locate("").rstrip("/") or "/"
            try:
                with run.copying:
                    copied[root] = self._catch_up(self.roots, run, skip=skip, pace=self._pace_of(run.storage))
            except CheckpointError as error:
                errors.append(error)
        if errors:
            raise errors[0]
        return copied


class StateOutline:
    """The outline of a captured state: names, dtypes, shapes, version counters and plain values, but no tensors."""

    def __init__(self, captured: Capture) -> None:
        self._specs, self._marks, self._skeleton = captured.specs, captured.marks, captured.skeleton

    @cached_property
    def _entries(self) -> dict[Any, Json]:
        node = json.loads(self._skeleton)
        items = (node.get("dict") or node.get("ordered") or ()) if isinstance(node, dict) else ()
        return {key: inner for key, inner in items if isinstance(key, str)}

    @cached_property
    def groups(self) -> list[str]:
        return list(self._entries)

    def of(self, group: str) -> GroupOutline:
        numbers = [i for i, spec in enumerate(self._specs) if spec.path[:1] == (group,)]
        of = self._specs[numbers[0]].of if numbers else None
        first = of.number if of else numbers[0] if numbers else 0
        node, unknown = _relative(self._entries.get(group), first)
        return GroupOutline([self._specs[i] for i in numbers], [self._marks[i] for i in numbers], node, unknown)


class GroupOutline(NamedTuple):
    specs: Sequence[TensorSpec]
    marks: Sequence[Mark | None]
    node: Json
    has_objects: bool

    def differences(self, other: GroupOutline) -> list[str]:
        """The names of what differs, or cannot be compared. Empty: the same memory, without a write to it."""
        if self.has_objects or other.has_objects:
            return ["objects that are not plain data"]
        ours = [(spec.path, spec.dtype, spec.shape) for spec in self.specs]
        theirs = [(spec.path, spec.dtype, spec.shape) for spec in other.specs]
        if ours != theirs:
            changed = set(ours) ^ set(theirs)
            return sorted({".".join(map(str, path)) for path, *_ in changed}) or ["the order of its tensors"]
        names = [
            spec.dotted
            for spec, before, now in zip(self.specs, self.marks, other.marks, strict=True)
            if 0 not in spec.shape and (before is None or before != now)
        ]
        return names or ([] if self.node == other.node else ["plain values"])


@dataclass(slots=True)
class SavedGroup:
    """A group as it was last written: the archives that have it, the outline of that state, and their run."""

    step: int
    borrowed: tuple[GroupLocation, ...]
    outline: StateOutline
    run: Run


class Driver(NamedTuple):
    """The archive of `driver=`: entries that rank 0 saves on behalf of all ranks."""

    image: bytes
    digest: str
    groups: tuple[str, ...]

    @classmethod
    def of(cls, entries: Mapping[str, Any], step: int) -> Driver:
        """Raises ValueError if the archive is too large."""
        return cls(*small_archive(entries, step=step, max_bytes=_MAX_DRIVER_BYTES), tuple(entries))


class StepCall(NamedTuple):
    """The checked arguments of one call of `save`."""

    step: int
    joint: JointSave | None = None
    overwrite: bool = False
    record: Mapping[str, Any] = {}
    unchanged: Collection[str] = ()
    per_rank: Collection[str] = ()
    driver: Driver | None = None
    given_here: frozenset[str] = frozenset()  # the entries of driver= on a rank other than 0, which does not write them


@dataclass(slots=True)
class StepContents:
    """The contents of one step that is being saved: the call, and what it borrows. Filled in by the planning."""

    call: StepCall
    number: int = 0  # in the order of the calls; from `UnchangedGroups.begin`
    borrowed: tuple[GroupLocation, ...] = ()
    outline: StateOutline | None = None  # outlines the groups that are written, if later steps may borrow them
    over: TakenOver | None = None  # tensors of written groups that are taken over from earlier steps

    @property
    def lenders(self) -> Mapping[str, int]:
        """The step that lends each borrowed group, by group."""
        return {lent.group: lent.step for lent in self.borrowed}

    def lent(self) -> tuple[GroupLocation, ...]:
        """The archives of earlier steps that this step borrows from."""
        return (*self.borrowed, *(() if self.over is None else self.over.locations.values()))

    def warn_of_lost_driver(self, manifest: Manifest, rank: int) -> None:
        """On other ranks than 0: warn of entries of driver= that are not saved, since rank 0 does not have them."""
        lost = sorted(self.call.given_here.difference(lent.group for lent in manifest.elsewhere))
        if lost:
            _log.warning(
                "step %s: rank %s has entries in driver= that are not saved: only those of rank 0 are; pass these to "
                "save() on rank 0: %s",
                manifest.step,
                rank,
                ", ".join(lost),
            )


class _Known(NamedTuple):
    """The groups that one save left to be borrowed, by name."""

    since: int
    """The number of the joint save that committed the groups. Joint saves may borrow them once it is decided."""
    number: int
    """The number of the save or restore in this process."""
    groups: dict[str, SavedGroup]


class UnchangedGroups:
    """The committed groups of a run that the next save may borrow. May be called from any thread.

    A save replaces or retires what is committed at its step and above, perhaps even if it fails. Groups of such steps
    that were known before the save began are no longer lent, since their archives may be gone.
    """

    def __init__(self, slicer: Callable[[], Slicer | None] = lambda: None) -> None:
        """`slicer` finds the slices of tensors that this rank holds, if there are several ranks."""
        self._slicer = slicer
        self._lock = threading.Lock()
        # In ascending order. Replaced as a whole; under _lock, and read without it.
        self._known: list[_Known] = []
        self._numbers = itertools.count(1)
        # (number, step) of the saves that began after the oldest entry of `_known`. The caller's thread appends without
        # a lock, since it may be interrupted; older entries are removed under _lock.
        self._begun: list[tuple[int, int]] = []

    def begin(self, step: int) -> int:
        """Note that a save begins, and return its number. On the caller's thread, in the order of the calls."""
        number = next(self._numbers)
        self._begun.append((number, step))
        return number

    def _newest(self, joint: JointSave | None = None) -> _Known | None:
        """The newest groups. With several ranks: the newest that all of them know when the save begins."""
        known = [one for one in self._known if joint is None or one.since <= joint.newest_decided]
        return known[-1] if known else None

    def _to_lend(self, call: StepCall, own_number: int) -> dict[str, SavedGroup]:
        """The known groups, except those of steps that later saves, this one included, may have replaced or retired."""
        known = self._newest(call.joint)
        if known is None:
            return {}
        steps = [step for number, step in self._begun.copy() if known.number < number <= own_number]
        lowest = min(steps, default=call.step)
        return {name: group for name, group in known.groups.items() if group.step < lowest}

    def without(self, state: Any, call: StepCall, number: int, *, run: Run) -> tuple[Any, tuple[GroupLocation, ...]]:
        """The state without the unchanged groups of a call that this run already has, and the archives that have them.

        Several ranks must borrow the same groups, so they all refer to the last commit. If the save goes to another
        place, rank 0 copies that commit there. Raises ValueError for a name that is not a group of the state,
        NotUnchangedError for a group that has changed.
        """
        names = call.unchanged
        if not names:
            return state, ()
        for name in names:
            is_entry = isinstance(state, Mapping | SnapshotView) and name in state
            if is_entry and _is_plain(_entry(state, name)):
                raise ValueError(
                    f"unchanged={name!r}: this entry is a tensor or value, but only groups (dicts, modules, "
                    "optimizers) can be unchanged; put it in a dict"
                )
            if not is_entry:
                raise ValueError(f"unchanged={name!r}: the state has no group of that name at its top level")
        borrowed: list[GroupLocation] = []
        # Without the lock: the caller's thread may be interrupted, which must not happen while it holds one.
        lent = self._to_lend(call, number)
        for name in sorted(names):
            known = lent.get(name)
            if known is None or (known.run is not run and call.joint is None):
                continue  # it must be written
            if not still_lends(known.run, known.borrowed):
                continue  # the archive was deleted by hand
            now = StateOutline(capture({name: _entry(state, name)}, slicer=self._slicer())).of(name)
            differences = known.outline.of(name).differences(now)
            if differences:
                raise NotUnchangedError(
                    f"{name} has changed since step {known.step}: {some_of(differences, 5)}; leave it out of "
                    "unchanged=",
                    names=tuple(differences),
                )
            borrowed += known.borrowed
        absent = {b.group for b in borrowed}
        if len(absent) == len(state):
            raise ValueError("unchanged= names every group, so there is nothing to save")
        return {key: _entry(state, key) for key in state if key not in absent}, tuple(borrowed)

    def forget(self, step: int | None) -> None:
        """Stop lending groups of a step that is gone. Called only with one rank: other ranks may rely on them."""
        with self._lock:
            self._known = [
                known._replace(groups={name: group for name, group in known.groups.items() if group.step != step})
                for known in self._known
            ]

    def lenders(self) -> set[int]:
        """The steps that the next save may borrow from."""
        return {group.step for known in self._known for group in known.groups.values()}

    def committed(self, run: Run, archives: tuple[Archive, ...], contents: StepContents) -> None:
        """Note a commit: from now on its groups may be borrowed."""
        if contents.outline is None:
            return
        step, joint = contents.call.step, contents.call.joint
        with self._lock:
            known = filter(None, (self._newest(), self._newest(joint)))
            lent = {name: group for entry in known for name, group in entry.groups.items()}
            kept = {b.group: lent[b.group] for b in contents.borrowed if b.group in lent}
            for name in contents.outline.groups:
                written = tuple(GroupLocation(name, step, run.folder(step), archive) for archive in archives)
                in_part = tuple(location for location in contents.lent() if location.in_part and location.group == name)
                kept[name] = SavedGroup(step, written + in_part, contents.outline, run)
            if joint is None:
                self._set([_Known(_FIRST, contents.number, kept)])
                return
            entries = [entry for entry in self._known if entry.since < joint.number]
            entries.append(_Known(joint.number, contents.number, kept))
            # Drop entries that no save can ask for any more, and with them the protection of their steps.
            oldest = max((entry.since for entry in entries if entry.since <= joint.newest_decided + 1), default=_FIRST)
            self._set([entry for entry in entries if entry.since >= oldest])

    def _set(self, known: list[_Known]) -> None:
        """Replace `_known`, under the lock, and drop the begun saves that no entry needs any more."""
        self._known = known
        for begun in self._begun.copy():
            if begun[0] <= known[0].number:
                self._begun.remove(begun)

    def restored(self, captured: Capture, groups: Collection[str], step: int, run: Run) -> None:
        """Note that groups of a live state have the bytes of a step of this run, so that saves may borrow them, too."""
        manifest = run.committed(step)
        if manifest is None or not groups:
            return
        folder = run.folder(step)
        parts = {name: tuple(GroupLocation(name, step, folder, a) for a in manifest.lenders) for name in groups}
        for name in groups:
            lent = manifest.lent(name)
            parts[name] = (*(parts[name] if all(location.in_part for location in lent) else ()), *lent)
        outline = StateOutline(captured)
        with self._lock:
            written = {group: SavedGroup(lent[0].step, lent, outline, run) for group, lent in parts.items()}
            self._set([_Known(_FIRST, next(self._numbers), written)])


def _entry(state: Any, name: Any) -> Any:
    return part_of(state, name) if isinstance(state, SnapshotView) else state[name]


def _is_plain(value: Any) -> bool:
    if isinstance(value, SnapshotView):
        return is_leaf(value)
    return not isinstance(value, Mapping | list | tuple) and method_of(value, "state_dict") is None


def _relative(node: Json, first: int) -> tuple[Json, bool]:
    """The node of a group, with its tensors numbered from the first one; and True if a leaf cannot be compared."""
    if isinstance(node, list):
        parts = [_relative(inner, first) for inner in node]
        return [inner for inner, _ in parts], any(unknown for _, unknown in parts)
    if not isinstance(node, dict):
        return node, False
    if "object" in node:
        return node, True
    if "tensor" in node:
        return {"tensor": node["tensor"] - first}, False
    nodes = {key: _relative(inner, first) for key, inner in node.items()}
    return {key: inner for key, (inner, _) in nodes.items()}, any(unknown for _, unknown in nodes.values())
