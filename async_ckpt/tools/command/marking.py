"""The marks of a step, good or bad, from a shell.

In: a run, a step, a mark. Out: the mark at each place of the run that has the step. Knows nothing of: the effects of a
mark.
"""

from __future__ import annotations

from typing import Literal

from ... import Place
from ...plumbing import runs
from .output import USAGE, Answer, mark_in_words, print_json, print_text
from .run_places import open_run, places_of
from .selection import whole_runs_at


def show(place: Place, step: int, *, bad: str | None, good: str | None, clear: bool, as_json: bool) -> None:
    """Mark a step, or remove its mark, at all places of its run that have the step and respond."""
    if [bad is not None, good is not None, clear].count(True) != 1:
        raise Answer("pass one of --bad NOTE, --good NOTE and --clear", USAGE)
    kind: Literal["good", "bad"] | None = "bad" if bad is not None else None if clear else "good"
    note = bad or good or ""
    chosen = whole_runs_at(place, ", and the step after it")
    naming = next((one.naming for one in chosen if step in one.run.steps()), chosen[0].naming)
    places = places_of(place)
    runs.Roots([open_run(one.storage(), naming) for one in places]).mark(step, kind, note)
    if as_json:
        document = {"place": place.shown, "step": step, "mark": kind or "none", "note": note}
        print_json("mark", {**document, "places": [one.shown for one in places]})
    else:
        change = "has no mark any more" if kind is None else f"is marked {mark_in_words(kind, note)}"
        print_text(f"step {step} of {place.shown} {change}")
