"""Marks: judgements of a committed step by people or by a check of its values: good, bad, or none (taken back).

In: the names in a run's folder, commits. Out: the newest mark of each commit; the name and text of a new one. Knows
nothing of: the effects of a mark.

    <root>/mark-500.<attempt>.0001.bad.json      {"note": "loss is nan"}

A mark lies beside the folders of the steps, as the intents of rollbacks do: a save or a restore lists the run's folder
anyway, and the name holds everything but the note. A mark never changes. A later mark of the same step has a higher
number; a mark of the kind "none" takes the earlier marks back. A mark names its attempt, so a step that is saved again
has no marks.
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

# Characters. Limited because a restart reads the note of each mark that it obeys.
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
        """The sort key of marks. Of two marks with the same number, put at the same moment, the bad one counts."""
        return self.number, self.kind == BAD, self.kind


def kind_of(kind: object) -> str:
    """The kind for the user's argument: "good", "bad" or None. Raises ValueError for any other value."""
    if kind is not None and kind not in (GOOD, BAD):
        raise ValueError(f'a mark must be "good" or "bad", or None to remove it; got {kind!r:.100}')
    return NONE if kind is None else str(kind)


def note_of(note: object) -> str:
    """The checked note of a user's mark. Raises TypeError unless it is text, and ValueError if it is too long."""
    if not isinstance(note, str):
        raise TypeError(f"note must be text, got {note!r:.100}")
    if len(note) > _MAX_NOTE:
        raise ValueError(f"note has {len(note):,} characters; at most {_MAX_NOTE:,} are stored with a mark")
    return note


def dump(note: str) -> bytes:
    return json.dumps({"note": note}).encode() + b"\n"


def read_note(storage: Storage, mark: Mark) -> str:
    """The note of a mark; empty if it has none or cannot be read."""
    try:
        return text(table(parsed(storage.read(mark.name)[0]))["note"])[:_MAX_NOTE]
    except (CheckpointError, FileNotFoundError, ValueError, KeyError):
        return ""


def marked_bad(note: str) -> str:
    """The reason, in words, why a step marked bad is passed over."""
    return f"it is marked bad{note and f': {note}'}"


def no_good_step(where: str, skipped: Mapping[int, str]) -> NoGoodStepError:
    """The error if marks exclude all steps of a run. `skipped` has the reason for each step."""
    steps = sorted(skipped, reverse=True)
    shown = "; ".join(f"step {step}: {skipped[step]}" for step in steps[:5])
    more = f"; and {len(steps) - 5} more" if len(steps) > 5 else ""
    return NoGoodStepError(
        f"{where}: the marks leave no step to continue from: {shown}{more}. Name a step to restore it anyway, as "
        f"step={steps[0]}; remove a mark by mark({steps[0]}, None); or give a new run another folder",
        path=where,
        steps=tuple(reversed(steps)),
    )


def parse_mark(name: str) -> Mark | None:
    match = re.fullmatch(_NAME, name)
    return Mark(int(match[1]), match[2], int(match[3]), match[4]) if match else None


def split_marks(names: list[str]) -> tuple[list[str], list[Mark]]:
    """Split the sorted names in a root into other names, and marks."""
    begin, end = bisect_left(names, _FIRST), bisect_left(names, _LAST)
    if begin == end:
        return names, []
    found = {name: parse_mark(name) for name in names[begin:end]}
    others = [name for name, mark in found.items() if mark is None]
    return [*names[:begin], *others, *names[end:]], [mark for mark in found.values() if mark is not None]


def is_about_step(name: str) -> bool:
    """True for the name of an intent or a mark, which has a step in it but is not a step's folder."""
    return parse_intent(name) is not None or parse_mark(name) is not None


def newest_of(marks: Iterable[Mark]) -> Mark | None:
    """The mark that counts, of the marks of one commit; None if there is none or it was taken back."""
    newest = max(marks, key=lambda mark: mark.order, default=None)
    return None if newest is None or newest.kind == NONE else newest


def marks_of(marks: Iterable[Mark], attempt_of: Callable[[int], str | None]) -> dict[int, Mark]:
    """The marks that count, by step. `attempt_of` returns the committed attempt; it is called only for marked steps."""
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
