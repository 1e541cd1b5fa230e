"""How a start finds what it goes on from, and which commits are of its line.

In: what a start has listed at its places. Out: what it then knows. Knows nothing of: what it saves and moves (`tier_model`).

The newest step is the highest of the latest start, without what a commit at any place has retired. The line of a step is that of the start
that has put it there, up to this step: the starts that it has gone on from, each with the last of its steps.
"""

from collections.abc import Iterable, Mapping
from typing import Final

from .tier_state import (
    UNLISTED,
    Ancestor,
    Attempt,
    Place,
    Process,
    TierConfiguration,
    changed,
    counting,
    found_with,
    last_steps,
    line_to,
)

_ALL: Final = 99  # a step above all others


def restored(configuration: TierConfiguration, made: Mapping[int, Attempt], number: int, process: Process) -> Process:
    """The process once it has listed its places."""
    order, broken = configuration.places[number], configuration.broken
    answers = {place: one for place, one in zip(order, process.view, strict=True) if one is not None}
    attempts = tuple(sorted(made.values()))
    counted = {
        place: [entry.attempt for entry in counting(one, attempts, is_any=broken == UNLISTED)]
        for place, one in answers.items()
    }
    there = {one for entries in counted.values() for one in entries}
    there -= {other for one in there for other in made[one].retires}
    starts = [start for one in answers.values() for start in one.starts]
    process = process._replace(
        at="run",
        view=(),
        owed=(),
        asked=tuple(answers),
        after=tuple(sorted(found_with(starts))),
        top=max((start.number for start in starts), default=0),
    )
    if not there:
        is_none = len(answers) == len(order) or broken == "None although a place is silent"
        return process if is_none else process._replace(at="done", word="nothing to restore")
    is_by_step = broken == "the highest step is the newest"
    newest = max((made[one] for one in there), key=lambda one: (0 if is_by_step else one.number, one.step, one.id))
    line = _line_of(newest, answers.values(), broken)
    process = process._replace(base=newest.id, line=line, repeat=newest.retires)
    own = {place: [one for one in entries if is_own(process, made, one)] for place, entries in counted.items()}
    have = process.have
    for place, entries in own.items():
        if entries:
            have = changed(have, place, newest_of(made, entries))
    of_line = {one for entries in own.values() for one in entries}
    untold = tuple(place for place in order if newest.id not in own.get(place, ()))
    goes_back = any(step < 0 for step in configuration.plans[number])
    return process._replace(
        have=have,
        apart=tuple(sorted(there - of_line)),
        untold=untold if newest.retires else (),
        known=tuple(sorted(there & of_line)) if goes_back else (),
    )


def _line_of(newest: Attempt, places: Iterable[Place], broken: str) -> tuple[Ancestor, ...]:
    """The ancestors of a start that goes on from this attempt."""
    if broken == "ancestors are all starts that were listed":
        tokens = found_with(start for one in places for start in one.starts)
        return tuple(Ancestor(token, _ALL) for token in sorted(tokens))
    line = {newest.token: Ancestor(newest.token, newest.step, newest.id)}
    for place in places if broken != "ancestors are not carried over" else ():
        for start in place.starts:
            if any(entry.attempt == newest.id and entry.is_by(start) for entry in place.entries):
                line = last_steps(line_to(start.line, newest.step)) | line
    return tuple(sorted(line.values()))


def is_own(process: Process, made: Mapping[int, Attempt], attempt: int) -> bool:
    """Whether an attempt is of the line of a process, as far as this can tell."""
    one = made[attempt]
    if attempt in process.repeat or one.token == process.token:
        return attempt not in process.repeat
    last = last_steps(process.line).get(one.token)
    if last is None or one.step != last.step or last.attempt < 0:
        return last is not None and one.step <= last.step
    return attempt in (last.attempt, *made[last.attempt].replaces)


def newest_of(made: Mapping[int, Attempt], attempts: Iterable[int]) -> int:
    return max((made[one] for one in attempts), key=lambda one: one.key).id
