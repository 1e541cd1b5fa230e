"""Marks: what people, or a check of the values, say of a committed step. It is good, or bad, or neither any more.

In: the names in a run's folder, commits. Out: the newest mark of each commit; the name and text of a new one. Knows
nothing of: what a mark leads to.

    <root>/mark-500.<attempt>.0001.bad.json      {"note": "loss is nan"}

A mark lies beside the folders of the steps, as the intents of rollbacks do: a save or a restore lists the run's folder
anyway, and the name tells all but the note. A mark never changes. A later one of the same step has a higher number; one
of the kind "none" takes the earlier ones back. It names the attempt that it is about, so a step that is saved anew has
no marks.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from typing import Final, Literal, NamedTuple, TypeAlias

from ...errors import CheckpointError, NoGoodStepError
from ..fields import parsed, table, text
from ..storage.interface import Storage
from .manifest import parse_intent

MarkKind: TypeAlias = Literal["good", "bad"]
GOOD: Final = "good"
BAD: Final = "bad"
NONE: Final = "none"

# Of characters: a restart reads the note of each mark that it obeys.
_MAX_NOTE: Final = 4096
_NAME: Final = r"mark-(\d{1,255})\.([0-9a-f]{8})\.(\d{4,9})\.(good|bad|none)\.json"
# All names of marks sort between these texts.
_FIRST, _LAST = "mark-", "mark."


class Mark(NamedTuple):
    """One mark of an attempt at a step."""

    step: int
    attempt: str
    number: int
    kind: str
    """GOOD, BAD or NONE."""

    @property
    def name(self) -> str:
        return f"mark-{self.step}.{self.attempt}.{self.number:04d}.{self.kind}.json"

    @property
    def order(self) -> tuple[int, bool, str]:
        """The order of marks. If two were put at one moment, the bad one counts."""
        return self.number, self.kind == BAD, self.kind


def kind_of(kind: object) -> str:
    """The kind of a user's mark. Raises ValueError for anything else."""
    if kind is not None and kind not in (GOOD, BAD):
        raise ValueError(f'a step is marked "good", "bad", or None to take its mark back; got {kind!r:.100}')
    return NONE if kind is None else str(kind)


def note_of(note: object) -> str:
    """The note of a user's mark. Raises TypeError unless it is text, and ValueError if it is too long."""
    if not isinstance(note, str):
        raise TypeError(f"note must be text, got {note!r:.100}")
    if len(note) > _MAX_NOTE:
        raise ValueError(f"note has {len(note):,} characters; at most {_MAX_NOTE:,} are stored with a mark")
    return note


def dump(note: str) -> bytes:
    return json.dumps({"note": note}).encode() + b"\n"


def read_note(storage: Storage, mark: Mark) -> str:
    """The note of a mark; empty if it has none, or nobody can read it."""
    try:
        return text(table(parsed(storage.read(mark.name)[0]))["note"])[:_MAX_NOTE]
    except (CheckpointError, FileNotFoundError, ValueError, KeyError):
        return ""


def marked_bad(note: str) -> str:
    """Why a step is passed over."""
    return f"it is marked bad{note and f': {note}'}"


def no_good_step(where: str, skipped: Mapping[int, str]) -> NoGoodStepError:
    """The error if marks leave no step of a run. `skipped` has the reason for each of its steps."""
    steps = sorted(skipped, reverse=True)
    shown = "; ".join(f"step {step}: {skipped[step]}" for step in steps[:5])
    more = f"; and {len(steps) - 5} more" if len(steps) > 5 else ""
    return NoGoodStepError(
        f"{where}: the marks leave no step to continue from: {shown}{more}. Name a step to take it all the same, as "
        f"step={steps[0]}; take a mark back by mark({steps[0]}, None); or give a new run another folder",
        path=where,
        steps=tuple(reversed(steps)),
    )


def parse_mark(name: str) -> Mark | None:
    match = re.fullmatch(_NAME, name)
    return Mark(int(match[1]), match[2], int(match[3]), match[4]) if match else None


def split_marks(names: list[str]) -> tuple[list[str], list[Mark]]:
    """Divide the sorted names in a root into other names, and marks."""
    begin, end = bisect_left(names, _FIRST), bisect_left(names, _LAST)
    if begin == end:
        return names, []
    found = {name: parse_mark(name) for name in names[begin:end]}
    others = [name for name, mark in found.items() if mark is None]
    return [*names[:begin], *others, *names[end:]], [mark for mark in found.values() if mark is not None]


def is_about_step(name: str) -> bool:
    """Whether a name with a step in it, in a run's folder, is that of an intent or a mark, and not of a step."""
    return parse_intent(name) is not None or parse_mark(name) is not None


def newest_of(marks: Iterable[Mark]) -> Mark | None:
    """The mark that counts among those of one commit; None if it has been taken back."""
    newest = max(marks, key=lambda mark: mark.order, default=None)
    return None if newest is None or newest.kind == NONE else newest


def marks_of(marks: Iterable[Mark], attempt_of: Callable[[int], str | None]) -> dict[int, Mark]:
    """The marks that count, by step; `attempt_of` is asked for the commits of steps with marks alone."""
    by_step: dict[int, list[Mark]] = {}
    for mark in marks:
        by_step.setdefault(mark.step, []).append(mark)
    found = {}
    for step, own in by_step.items():
        attempt = attempt_of(step)
        newest = newest_of(mark for mark in own if mark.attempt == attempt)
        if newest is not None:
            found[step] = newest
    return found
