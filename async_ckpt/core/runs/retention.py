"""Retention: the rules that choose the steps to delete.

In: the committed steps with their manifests, the time. Out: the steps to delete. Knows nothing of: storage.

The newest step is always kept. Steps that are known to be broken are kept, too, but not counted: the newest step that
is not broken is also kept. The following steps are deleted, and not counted by the rules:

    rolling      the record of the save has `rolling`, and a newer step is committed
    expired      the save is older than the `ttl_seconds` of its record

Any other step is kept if at least one rule of `Keep` keeps it, or if no rule is set. If a rule is set, steps that are
marked bad are deleted and not counted, except that the newest step that is not bad is kept. The rules keep a step if:

    good         it is among this many newest steps marked good, even if it is rolling or has expired
    last         it is among this many newest steps
    every        its number is a multiple of this
    best         it is among the best steps by a metric of the records; of equal steps, the newer is better. A step
                 whose record lacks the metric, or has a value that is not a finite number, is never among them. While
                 no record has the metric, which is probably a mistake, all steps are kept
    seconds      it was committed at most this long ago
    bytes        it, all newer steps and the steps that they borrow from have at most this many bytes together, or it is
                 the newest. A manifest that cannot be read counts as 0 bytes

`free` is not such a rule: while less is free, kept steps are deleted, too, in the order that `Run.doomed` describes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final

from ..spec import Best, Keep
from .manifest import Manifest
from .marks import BAD, GOOD, Mark
from .record import number

_PASSING: Final = ("rolling", "ttl_seconds")


class Commits(dict[int, Manifest | None]):
    """The committed steps, ascending, with their manifests: None for a manifest that cannot be read. Immutable.

    Steps that may expire, borrowers and marks are also listed separately: of thousands of steps, they are few.
    """

    __slots__ = ("borrowers", "marks", "passing")

    def __init__(self, commits: Mapping[int, Manifest | None] | None = None) -> None:
        super().__init__(sorted((commits or {}).items()))
        self.passing: dict[int, Manifest] = {}  # steps that are rolling or may expire
        self.borrowers: dict[int, Manifest] = {}  # steps with groups in archives of other steps
        self.marks: dict[int, Mark] = {}  # the mark that counts, for each marked step
        self._note(self)

    def having(self, commits: Mapping[int, Manifest | None]) -> Commits:
        """A copy with these commits added; they replace earlier commits of the same steps."""
        if commits and self and min(commits) <= next(reversed(self)):
            return Commits({**self, **commits}).with_marks(self.marks)
        copy = self._copy()
        copy.update(sorted(commits.items()))
        copy._note(commits)
        return copy

    def without(self, steps: Iterable[int]) -> Commits:
        """A copy without these steps."""
        copy = self._copy()
        for step in steps:
            for commits in (copy, copy.passing, copy.borrowers, copy.marks):
                commits.pop(step, None)
        return copy

    def with_marks(self, marks: Mapping[int, Mark]) -> Commits:
        """The same commits with these marks."""
        if marks == self.marks:
            return self
        copy = self._copy()
        copy.marks = dict(marks)
        return copy

    def sound(self, steps: Iterable[int]) -> list[int]:
        """These steps without those that are marked bad."""
        return [step for step in steps if not (step in self.marks and self.marks[step].kind == BAD)]

    def _copy(self) -> Commits:
        copy = Commits()
        copy.update(self)
        copy.passing, copy.borrowers, copy.marks = dict(self.passing), dict(self.borrowers), dict(self.marks)
        return copy

    def _note(self, commits: Mapping[int, Manifest | None]) -> None:
        for step, manifest in commits.items():
            if manifest is not None and not manifest.record.keys().isdisjoint(_PASSING):
                self.passing[step] = manifest
            if manifest is not None and manifest.elsewhere:
                self.borrowers[step] = manifest


def deletable_steps(
    keep: Keep, commits: Commits, *, now: float, protected: Collection[int] = (), broken: Collection[int] = ()
) -> list[int]:
    """The steps that the rules delete, the oldest first."""
    steps = [step for step in commits if step not in broken] if broken else list(commits)
    passing = {step for step, manifest in commits.passing.items() if _is_passing(manifest, now)}
    lasting = [step for step in steps if step not in passing] if passing else steps
    kept = {*steps[-1:], *commits.sound(steps)[-1:], *protected, *broken, *_kept_by_rules(keep, lasting, commits, now)}
    kept.update(_newest_good(keep, steps, commits))
    return sorted(commits.keys() - kept)


def without_needed(going: Collection[int], commits: Commits) -> list[int]:
    """The steps of `going`, which are to be deleted, without those that a remaining step borrows from."""
    going = list(going)
    while going:
        gone_steps = set(going)
        kept = (manifest for step, manifest in commits.borrowers.items() if step not in gone_steps)
        needed = {borrowed.step for manifest in kept for borrowed in manifest.elsewhere}
        if needed.isdisjoint(gone_steps):
            break
        going = [step for step in going if step not in needed]
    return going


def steps_for_room(order: Sequence[int], commits: Commits, missing_bytes: float, *, at_least: int = 0) -> list[int]:
    """The shortest prefix of `order` whose deletion frees `missing_bytes`, or all of it if that is too little.

    The prefix has at least `at_least` steps. Steps that a remaining step borrows from are left out of the result.
    """

    def freed(count: int) -> int:
        return sum(_bytes_of(commits[step]) for step in without_needed(order[:count], commits))

    count = at_least + bisect_left(range(at_least, len(order)), missing_bytes, key=freed)
    return without_needed(order[:count], commits)


def unknown_metric(keep: Keep, commits: Commits) -> str | None:
    """The metric of `best`, if there are commits and none of their records has it; else None."""
    if keep.best is None or not commits or best_of(list(commits), commits, keep.best) is not None:
        return None
    return keep.best[0]


def _kept_by_rules(keep: Keep, steps: list[int], commits: Commits, now: float) -> set[int]:
    if (keep.last, keep.every, keep.best, keep.seconds, keep.good, keep.bytes) == (None,) * 6:
        return set(steps)
    steps = commits.sound(steps)
    wanted: set[int] = set()
    if keep.last is not None:
        wanted.update(steps[-keep.last :])
    if keep.every is not None:
        wanted.update(step for step in steps if step % keep.every == 0)
    if keep.best is not None:
        best = best_of(steps, commits, keep.best)
        wanted.update(steps if best is None else best)
    if keep.seconds is not None:
        wanted.update(step for step in steps if _age(commits[step], now) <= keep.seconds)
    if keep.bytes is not None:
        wanted.update(_that_fit(steps, commits, keep.bytes))
    return wanted


def _newest_good(keep: Keep, steps: list[int], commits: Commits) -> list[int]:
    marks = commits.marks
    return [step for step in steps if step in marks and marks[step].kind == GOOD][-keep.good :] if keep.good else []


def _that_fit(steps: list[int], commits: Commits, most_bytes: float) -> list[int]:
    """The newest of these steps that fit into `most_bytes`, counting the steps that they borrow from; at least one."""
    fitting: list[int] = []
    counted: set[int] = set()
    num_bytes = 0
    for step in reversed(steps):
        added = {step, *_lenders(step, commits)} - counted
        num_bytes += sum(_bytes_of(commits.get(one)) for one in added)
        if fitting and num_bytes > most_bytes:
            break
        fitting.append(step)
        counted |= added
    return fitting


def _lenders(step: int, commits: Commits) -> set[int]:
    """The steps that this step borrows from, directly or through other steps: they stay while it does."""
    found: set[int] = set()
    pending = [step]
    while pending:
        manifest = commits.borrowers.get(pending.pop())
        new = {lent.step for lent in manifest.elsewhere} - found if manifest is not None else set()
        found |= new
        pending += new
    return found


def _bytes_of(manifest: Manifest | None) -> int:
    return manifest.num_bytes if manifest is not None else 0


def _is_passing(manifest: Manifest, now: float) -> bool:
    """Whether a save is rolling or has expired."""
    ttl_seconds = number(manifest.record.get("ttl_seconds"))
    return manifest.record.get("rolling") is True or (ttl_seconds is not None and _age(manifest, now) > ttl_seconds)


def _age(manifest: Manifest | None, now: float) -> float:
    """The seconds since the commit; 0 if the manifest cannot be read, so that such a step never expires."""
    return now - manifest.created if manifest is not None else 0.0


def best_of(steps: list[int], commits: Commits, by: Best) -> list[int] | None:
    """The best of these steps, except steps marked bad; None if no record of any commit has the metric."""
    metric, mode, count = by
    values = {
        step: value
        for step in commits.sound(commits)
        if (manifest := commits[step]) is not None and (value := number(manifest.record.get(metric))) is not None
    }
    if not values:
        return None
    sign = 1 if mode == "max" else -1
    ranked = sorted((sign * values[step], step) for step in steps if step in values)
    return [step for _, step in ranked[-count:]]


def describe_missing_metric(metric: str, commits: Commits) -> str:
    """Text for messages: the metric that no record has, the metrics that records have, and advice."""
    records = [manifest.record for manifest in commits.values() if manifest is not None]
    numbers = {key for record in records for key, value in record.items() if number(value) is not None}
    have = f"their records have {', '.join(sorted(numbers))}" if numbers else "no record has any number"
    return f'{metric!r} ({have}); give it with each save, as record={{"{metric}": …}}'
