"""The starts of a run: which commits count if two processes have written.

In: the listing of a root, manifests, and the commits that each start has seen. Out: steps that do not count. Knows
nothing of: archives, the start of this process (`tenure`).

    <root>/start-00000008.5f3a9c01.500.json     the eighth start; its first save was of step 500
    <root>/start-00000008.5f3a9c01.500.seen     the commits that it has seen

A process takes the root at its first save. It creates the file of the next start, then lists the commits, then creates
its `.seen` file with the commits that count, before it writes anything else. Before its own, it creates the `.seen`
files that earlier starts lack, so that nobody waits for a start that was killed in between. A start whose `.seen` was
created by another process has lost the root.

A commit counts if it was seen by each later start that itself has a commit which counts. After putting a manifest, a
process lists the starts, and acknowledges the save if all later starts have seen it. A later start lists the commits
after it has created its file, so it has seen every save that was acknowledged while that file was not listed. If a
process sleeps and puts its manifest later, no later start has seen it, and it stops counting at their next commit.

The file of a start names its ancestors: the starts that it found at all roots that answered, and their ancestors. A run
that has begun elsewhere writes nothing to a root with a commit of any other start (`Roots.refuse_strangers`).

Starts of older versions have no `.seen`. They count as having seen the steps below their own commits.

Starts are ordered by their numbers, then by their random tokens. No clock decides anything.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Final, NamedTuple

from ...errors import CheckpointError
from ..fields import count, entries, items, row, table, text
from ..storage.interface import Storage
from .manifest import Manifest, seal, unseal
from .receipts import as_ranges

_NAME: Final = re.compile(r"start-(\d{8,18})\.([0-9a-f]{8})\.(\d{1,255})\.(json|seen)")
# All names of starts sort between these two.
_FIRST, _LAST = "start-", "start."
# A `.seen` has the attempts of this many newest steps. For older steps it has only the numbers, so that it stays small,
# and readers need not look up which attempt is there.
_NUM_ATTEMPTS: Final = 32


@dataclass(frozen=True, order=True, slots=True)
class Start:
    """One start of a run. Starts sort in their order. `first` is the step of its first save."""

    number: int
    token: str
    first: int = 0
    has_seen: bool = field(default=False, compare=False)
    """True if its `.seen` was listed."""

    @property
    def name(self) -> str:
        return f"start-{self.label}.{self.first}.json"

    @property
    def seen_name(self) -> str:
        return f"start-{self.label}.{self.first}.seen"

    @property
    def label(self) -> str:
        """The start as manifests name it."""
        return f"{self.number:08d}.{self.token}"

    def is_before(self, other: Start) -> bool:
        """Whether `other` has taken over the run. One start may have different numbers at several roots."""
        return (self.number, self.token) < (other.number, other.token) and self.token != other.token


def split_starts(names: list[str]) -> tuple[list[str], list[Start]]:
    """Split the sorted names in a root into other names, and starts."""
    begin, end = bisect_left(names, _FIRST), bisect_left(names, _LAST)
    starts: list[Start] = []
    others = names[:begin]
    for name in names[begin:end]:
        match = _NAME.fullmatch(name)
        if match is None:
            others.append(name)
        elif match[4] == "json":
            starts.append(Start(int(match[1]), match[2], int(match[3])))
        elif starts and starts[-1].seen_name == name:
            starts[-1] = replace(starts[-1], has_seen=True)
    return (others + names[end:], starts) if end > begin else (names, starts)


class Seen:
    """The commits that a start has seen: all steps, and the attempts of the newest steps."""

    def __init__(self, steps: Iterable[range], attempts: Mapping[int, str]) -> None:
        self._steps, self._attempts = sorted(steps, key=lambda one: one.start), attempts
        self._firsts = [one.start for one in self._steps]

    @staticmethod
    def dump(own: Start, commits: Mapping[int, str]) -> bytes:
        """The text of the `.seen` of a start. `commits` are the attempts that it has seen, by step; "" if unknown."""
        steps = sorted(commits)
        attempts = {str(step): commits[step] for step in steps[-_NUM_ATTEMPTS:] if commits[step]}
        return seal({"by": own.label, "steps": [*as_ranges(steps)], "attempts": attempts})

    @classmethod
    def parse(cls, data: bytes) -> Seen | None:
        """Parse a `.seen`; None if it is damaged."""
        try:
            fields = table(unseal(data))
            steps = items(fields["steps"], partial(row, of=(count, count, count)))
            attempts = {int(step): attempt for step, attempt in entries(fields["attempts"], text)}
            return cls([range(first, first + num * step, step) for first, num, step in steps], attempts)
        except (ValueError, KeyError):
            return None

    @classmethod
    def read(cls, storage: Storage, start: Start) -> Seen | None:
        """The commits that a start has seen; None if it has no `.seen`, or a damaged one."""
        with suppress(FileNotFoundError):
            return cls.parse(storage.read(start.seen_name)[0])
        return None

    def has(self, step: int, commit: Manifest | None) -> bool:
        """Whether the start has seen this commit of the step. With None: whether it has seen every possible one."""
        if (attempt := self._attempts.get(step)) is not None:
            return commit is not None and attempt in (commit.attempt, *commit.replaces)
        at = bisect_right(self._firsts, step)
        return at > 0 and step in self._steps[at - 1]

    def names(self, step: int, attempt: str) -> bool:
        """True if the `.seen` names exactly this attempt of the step."""
        return self._attempts.get(step) == attempt


class StartsByName(dict[str, Start]):
    """The starts by label, and for each process its latest start by token."""

    def __init__(self, starts: Iterable[Start]) -> None:
        super().__init__((name, start) for start in sorted(starts) for name in (start.token, start.label))

    def of(self, label: str) -> Start | None:
        """The start that a manifest names. If the manifest was copied from another root, only the token may match."""
        return self.get(label) or self.get(label.rpartition(".")[2])


class _Later(NamedTuple):
    """A start with commits that count; `lowest` is the lowest of their steps."""

    start: Start
    seen: Seen | None
    lowest: int | None

    def has_seen(self, step: int, commit: Manifest | None = None) -> bool:
        """Whether the start has seen this commit and has not committed at or below its step."""
        is_below = self.lowest is None or step < self.lowest
        return is_below and (self.seen is None or self.seen.has(step, commit))


class Line:
    """The rule that decides which commits count. Commits of unlisted starts, older versions and other tools always
    count: their order is unknown.

    Of the starts with a `.seen`, only the latest one that has a commit matters: its `.seen` already reflects which
    commits counted according to the starts before it.
    """

    def __init__(
        self,
        steps: Sequence[int],
        starts: Iterable[Start],
        committed: Callable[[int], Manifest | None],
        seen: Callable[[Start], Seen | None] = lambda _: None,
        own: Start | None = None,
        elsewhere: Callable[[int], Iterable[Manifest | None]] = lambda _: (),
    ) -> None:
        """`steps` are ascending; `committed` reads the manifest of a step, or returns None. The start `own` is treated
        as if it had a commit, so that its process never takes a commit into account that it has not seen. `elsewhere`
        reads the manifests of a step at further roots, one by one: a start may have saved only there.
        """
        self._committed, self._elsewhere = committed, elsewhere
        in_order = sorted(starts)
        self._starts = StartsByName(in_order)
        self._later: list[_Later] = []
        firsts = {start.token: start.first for start in in_order}  # a process takes a root again only for lower steps
        for start in in_order[:0:-1]:
            own_steps = filter(partial(self._is_of, start), steps[bisect_left(steps, firsts[start.token]) :])
            lowest = next(own_steps, None)
            if lowest is not None or start == own:
                seen_by_start = seen(start) if start.has_seen else None
                self._later.append(_Later(start, seen_by_start, lowest))
                if seen_by_start is not None:
                    break

    def _is_of(self, start: Start, step: int) -> bool:
        """Whether a step has a commit of this start that counts."""
        commits = filter(None, chain([self._committed(step)], self._elsewhere(step)))
        return any(self._starts.of(commit.start) == start and self.counts(step, commit) for commit in commits)

    def counts(self, step: int, commit: Manifest) -> bool:
        own = self._starts.of(commit.start) if self._later else None
        return own is None or all(one.has_seen(step, commit) for one in self._later if own.is_before(one.start))

    def unseen(self, steps: Iterable[int]) -> list[int]:
        """The steps that a later start may not have seen, so that their commits may not count. Reads no manifest."""
        return [step for step in steps if not all(later.has_seen(step) for later in self._later)]

    def out(self, steps: Iterable[int]) -> dict[int, str]:
        """The attempts at these steps that do not count. Reads manifests only of steps unseen by a later start."""
        commits = ((step, self._committed(step)) for step in self.unseen(steps))
        return {step: commit.attempt for step, commit in commits if commit and not self.counts(step, commit)}


def later_than(own: Start | None, starts: Iterable[Start]) -> list[Start]:
    """The starts that have taken over the run from `own`."""
    return [start for start in starts if own is not None and own.is_before(start)]


def about_start(storage: Storage, start: Start) -> dict[str, object]:
    """The description of a start's process; empty if it cannot be read."""
    with suppress(CheckpointError, OSError, ValueError):
        fields = unseal(storage.read(start.name)[0])
        if isinstance(fields, dict):
            return fields
    return {}
