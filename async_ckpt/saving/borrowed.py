"""Groups of a state that the caller says are unchanged: not written again, but borrowed from the step that has them.

In: what saves captured, and where it was committed. Out: what need not be written, or that the statement is wrong.
Knows nothing of: files.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final, NamedTuple

from ..errors import NotUnchangedError
from ..ranks.attempts import Joint
from ..runs.manifest import Archive, Elsewhere, Manifest
from ..runs.run import Run
from ..slicing.sharded import Slicer
from ..spec import MIB, Json, TensorSpec
from ..state.capture import capture
from ..state.captured import Capture, Mark, SnapshotView, is_leaf, part_of
from .planner import small_archive

_MAX_DRIVER_BYTES: Final = 64 * MIB

_log = logging.getLogger("async_ckpt")


class Look:
    """How a state looked when it was captured; kept to be compared with, without its tensors."""

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

    def of(self, group: str) -> _GroupLook:
        numbers = [i for i, spec in enumerate(self._specs) if spec.path[:1] == (group,)]
        of = self._specs[numbers[0]].of if numbers else None
        first = of.number if of else numbers[0] if numbers else 0
        node, unknown = _relative(self._entries.get(group), first)
        return _GroupLook([self._specs[i] for i in numbers], [self._marks[i] for i in numbers], node, unknown)


@dataclass(frozen=True, slots=True)
class _GroupLook:
    specs: Sequence[TensorSpec]
    marks: Sequence[Mark | None]
    node: Json
    has_objects: bool

    def differences(self, other: _GroupLook) -> list[str]:
        """The names of what differs, or cannot be compared. Nothing: it is the same memory, and was not written to."""
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
class _Written:
    """Where a group was written last, in one archive or several, and how it looked then."""

    step: int
    borrowed: tuple[Elsewhere, ...]
    look: Look
    runs: set[Run] = field(default_factory=set)

    @property
    def archives(self) -> tuple[Archive, ...]:
        return tuple(lent.archive for lent in self.borrowed)


# Stands for what was known before any save; and for all that one process knows.
_FIRST: Final = -(2**63)


class Driver(NamedTuple):
    """The archive of what one process holds for all ranks."""

    image: bytes
    digest: str
    groups: tuple[str, ...]


def check_driver(driver: Mapping[str, Any], state: Any) -> None:
    """Raises TypeError for what is not a mapping, and ValueError for entries without a name, or with one that the state
    has too.
    """
    if not isinstance(driver, Mapping):
        raise TypeError(f'driver must be a mapping such as {{"loader": state}}, got {driver!r:.100}')
    for name in driver:
        if not isinstance(name, str) or (isinstance(state, Mapping | SnapshotView) and name in state):
            raise ValueError(
                f"driver={name!r}: the state has entries of the same name; rename those of driver="
            )
    if not isinstance(state, Mapping | SnapshotView):
        raise ValueError("driver= adds entries to the state, so the state must be a dict")


def check_entries(state: Any, names: Collection[str], option: str) -> None:
    """Raises ValueError, naming the option, for a name that is not an entry at the top level of the state."""
    for name in [names] if isinstance(names, str) else names:
        if not isinstance(state, Mapping | SnapshotView) or name not in state:
            raise ValueError(f"{option}={name!r}: the state has no entry of that name at its top level")


class Contents:
    """One save: what it borrows, and how what it writes looks. Made on the caller's thread, then only read."""

    def __init__(self, joint: Joint | None = None) -> None:
        self.joint = joint
        self.borrowed: tuple[Elsewhere, ...] = ()
        self.look: Look | None = None
        self.driver: Driver | None = None
        self._given_here: frozenset[str] = frozenset()  # entries of driver= on a rank that writes none

    def lenders(self) -> list[int]:
        """The steps that it borrows from."""
        return [lent.step for lent in self.borrowed]

    def take_driver(self, driver: Mapping[str, Any], *, step: int, rank: int) -> None:
        """What rank 0 is given is that of all ranks. Raises ValueError for too many bytes."""
        if rank:
            self._given_here = frozenset(driver)
        else:
            image, digest = small_archive(driver, step=step, max_bytes=_MAX_DRIVER_BYTES)
            self.driver = Driver(image, digest, tuple(driver))

    def warn_of_lost_driver(self, made: Manifest, rank: int) -> None:
        """On another rank than 0: its driver= is nowhere, if that of rank 0 has not the same entries."""
        lost = sorted(self._given_here.difference(lent.group for lent in made.elsewhere))
        self._given_here = frozenset()
        if lost:
            _log.warning(
                "step %s: driver= of rank %s is not saved: %s. Only that of rank 0 is, which lacks them; give driver= there",
                made.step,
                rank,
                ", ".join(lost),
            )


class UnchangedGroups:
    """What a run knows of the groups that it has written. From any thread."""

    def __init__(self, slicer: Callable[[], Slicer | None] = lambda: None) -> None:
        """`slicer` tells which slices of tensors are here, where there are several ranks."""
        self._slicer = slicer
        self._lock = threading.Lock()
        # Since the save of this number, ascending. Replaced as a whole; under _lock, and read without it.
        self._known: list[tuple[int, dict[str, _Written]]] = []

    def _written(self, joint: Joint | None = None) -> dict[str, _Written]:
        """The newest; with several ranks, what all of them know when a save begins, though some know of a commit sooner."""
        known = [written for number, written in self._known if joint is None or number <= joint.decided]
        return known[-1] if known else {}

    def without(
        self,
        state: Any,
        names: Collection[str],
        *,
        step: int,
        runs: Sequence[Run],
        joint: Joint | None = None,
    ) -> tuple[Any, tuple[Elsewhere, ...]]:
        """The state without those of the named groups that are committed at all these runs already; and where they are.

        Several ranks borrow the same. When a commit arrives at a second root is not told alike to all of them, so where one
        root is enough they write everything.
        Raises ValueError for a name that is not a group of the state, NotUnchangedError for one that has changed.
        """
        if not names:
            return state, ()
        for name in names:
            there = isinstance(state, Mapping | SnapshotView) and name in state
            if there and _is_plain(_entry(state, name)):
                raise ValueError(
                    f"unchanged={name!r}: that entry of the state is one tensor or value, and only a group can be left out: a "
                    "dict, a module, an optimizer; put it in a dict"
                )
            if not there:
                raise ValueError(f"unchanged={name!r}: the state has no group of that name at its top level")
        if joint is not None and joint.is_any:
            return state, ()
        borrowed: list[Elsewhere] = []
        # Without the lock: this is the caller's thread, which may be interrupted, and must not be while it holds one.
        written = self._written(joint)
        for name in sorted(names):
            known = written.get(name)
            if known is None or known.step >= step or not known.runs.issuperset(runs):
                continue  # it has to be written
            now = Look(capture({name: _entry(state, name)}, slicer=self._slicer())).of(name)
            differences = known.look.of(name).differences(now)
            if differences:
                shown = ", ".join(differences[:5]) + (" and others" if len(differences) > 5 else "")
                raise NotUnchangedError(
                    f"{name} has changed since step {known.step}: {shown}; leave it out of unchanged=",
                    names=tuple(differences),
                )
            borrowed += known.borrowed
        absent = {b.group for b in borrowed}
        if len(absent) == len(state):
            raise ValueError("every group is said to be unchanged; there would be nothing to save")
        return {key: _entry(state, key) for key in state if key not in absent}, tuple(borrowed)

    def lenders(self) -> set[int]:
        """The steps that the next save may borrow from."""
        return {known.step for _, written in self._known for known in written.values()}

    def committed(self, run: Run, step: int, archives: tuple[Archive, ...], contents: Contents) -> None:
        """A save is true at one run: from now on its groups may be borrowed from it."""
        if contents.look is None:
            return
        joint = contents.joint
        with self._lock:
            newest = self._written()
            if any(known.step > step for known in newest.values()):
                for known in newest.values():  # it arrived late
                    if known.archives == archives:
                        known.runs.add(run)
                return
            lent = {**newest, **self._written(joint)}  # at a second root, this save is the newest itself
            kept = {b.group: lent[b.group] for b in contents.borrowed if b.group in lent}
            for group in contents.look.groups:
                before = newest.get(group)
                if before is None or before.archives != archives:
                    there = tuple(Elsewhere(group, step, run.folder(step), archive) for archive in archives)
                    before = _Written(step, there, contents.look)
                before.runs.add(run)
                kept[group] = before
            if joint is None:
                self._known = [(_FIRST, kept)]
                return
            entries = [*(one for one in self._known if one[0] < joint.number), (joint.number, kept)]
            # What the next save cannot ask for any more goes, and with it the protection of these steps.
            oldest = max((number for number, _ in entries if number <= joint.decided + 1), default=_FIRST)
            self._known = [one for one in entries if one[0] >= oldest]

    def restored(self, captured: Capture, groups: Collection[str], step: int, runs: Sequence[Run]) -> None:
        """Groups of a live state hold what a step at these runs has: they need not be written again either."""
        made = runs[0].committed(step)
        if made is None or not groups:
            return
        folder = runs[0].folder(step)
        parts = {name: tuple(Elsewhere(name, step, folder, a) for a in made.lenders) for name in groups}
        parts |= {name: there for name in groups if (there := made.lent(name))}
        look = Look(captured)
        with self._lock:
            written = {group: _Written(lent[0].step, lent, look, set(runs)) for group, lent in parts.items()}
            self._known = [(_FIRST, written)]


def _entry(state: Any, name: Any) -> Any:
    return part_of(state, name) if isinstance(state, SnapshotView) else state[name]


def _is_plain(value: Any) -> bool:
    if isinstance(value, SnapshotView):
        return is_leaf(value)
    return not isinstance(value, Mapping | list | tuple) and not hasattr(value, "state_dict")


def _relative(node: Json, first: int) -> tuple[Json, bool]:
    """A group's node with its tensors counted from its first; and whether there are leaves that cannot be compared."""
    if isinstance(node, list):
        parts = [_relative(inner, first) for inner in node]
        return [inner for inner, _ in parts], any(unknown for _, unknown in parts)
    if not isinstance(node, dict):
        return node, False
    if "object" in node:
        return node, True
    if "tensor" in node:
        return {"tensor": node["tensor"] - first}, False
    found = {key: _relative(inner, first) for key, inner in node.items()}
    return {key: inner for key, (inner, _) in found.items()}, any(unknown for _, unknown in found.values())
