"""The marks of a step, good or bad, from a shell.

In: a run, a step, a mark. Out: the mark at each place of the run that has the step. Knows nothing of: arguments.
"""

from __future__ import annotations

from typing import Literal

from ... import Place
from ...plumbing import runs
from .run_places import places_of
from .screen import escaped, mark_in_words, print_json, print_text
from .selection import open_run, whole_runs_at


def show(place: Place, step: int, kind: Literal["good", "bad"] | None, note: str, *, as_json: bool) -> None:
    """Mark a step, at all places of its run that have it and answer. None takes its mark back. Raises Answer if there
    is no run, or the place is the folder of a step, NotCommittedError if the run has no such step, and ValueError if
    the note is too long.
    """
    chosen = whole_runs_at(place, ", and the step after it")
    naming = next((one.naming for one in chosen if step in one.run.steps()), chosen[0].naming)
    places = places_of(place)
    runs.Roots([open_run(one.storage(), naming) for one in places]).mark(step, kind, note)
    if as_json:
        told = {"place": place.shown, "step": step, "mark": kind or "none", "note": note}
        print_json("mark", {**told, "places": [one.shown for one in places]})
    else:
        said = "has no mark any more" if kind is None else f"is marked {mark_in_words(kind, note)}"
        print_text(escaped(f"step {step} of {place.shown} {said}"))
