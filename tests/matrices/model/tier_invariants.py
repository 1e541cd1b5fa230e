"""What must hold of tiers, as questions to a state of the model.

In: a state, and the one before it. Out: what does not hold. Knows nothing of: how states are found.
"""

from collections.abc import Iterator
from typing import Final

from .tier_model import TierMove
from .tier_state import (
    NUM_TOKENS,
    UNLISTED,
    Process,
    State,
    TierConfiguration,
    awake,
    by_id,
    counting,
    history,
    last_steps,
)

INVARIANTS: Final = (
    "what was acknowledged at a place counts there, or a later one of its line, or a rollback or an overwrite names it",
    "the commits that count at a place are one line",
    "what a rollback has retired is not restored once all places have answered",
    "every archive that a commit names is there",
    "restore says None only if nothing that was acknowledged is at its places",
    "no place that has a step is left without one",
    "what retention has deleted at a place does not come back",
    "a conflict is said only of a commit that is not of the line",
    "starts of one machine, whose places all answer, have no conflict",
    "no start is taken by one that it goes on from",
    "no step is deleted while it is moved, but by a start that has taken the place",
    "each start and each mover comes to its end, and the far place then has the newest step, unless there is a conflict",
)


def violated(configuration: TierConfiguration, before: State | None, state: State) -> str | None:
    """The first invariant that does not hold."""
    found = _broken_at_places(configuration, state)
    if (number := next(found, None)) is None and before is not None:
        number = next(_broken_between(configuration, before, state), None)
    return None if number is None else INVARIANTS[number]


def _broken_at_places(configuration: TierConfiguration, state: State) -> Iterator[int]:
    named = {other for one in state.made for other in (*one.replaces, *one.retires)}
    counted = [counting(place, state.made, is_any=configuration.broken == UNLISTED) for place in state.places]
    histories = [{one for entry in entries for one in history(state.made, entry.attempt)} for entries in counted]
    for process in state.processes:
        for attempt, place in process.acknowledged:
            is_lost = place == configuration.loses and attempt in state.gone
            if not is_lost and attempt not in histories[place] and attempt not in named:
                yield 0
        if process.taken_by in last_steps(process.line):
            yield 9
        if any(foreign <= -10 and -10 - foreign in last_steps(process.line) for _, foreign in process.conflicts):
            yield 9
    for entries in counted:
        for one, previous in zip(entries[1:], entries, strict=False):
            if previous.attempt not in history(state.made, one.attempt):
                yield 1
        if not all(one.whole for one in entries):
            yield 3


def _broken_between(configuration: TierConfiguration, before: State, state: State) -> Iterator[int]:
    for number, (earlier, later) in enumerate(zip(before.processes, state.processes, strict=True)):
        if earlier.at == "restore" and later.at != "restore":
            there = {
                attempt
                for attempt, place in earlier.owed
                if place in configuration.places[number]
                and not (place == configuration.loses and attempt in state.gone)
            }
            yield from _wrongly_restored(state, len(configuration.places[number]), later, there)
        for at, foreign in later.conflicts[len(earlier.conflicts) :]:
            if configuration.is_one_machine:
                yield 8
            line = history(state.made, later.base)
            if foreign in {*line, *_retired_at(configuration, state, at, line)}:
                yield 7
    if state.loss != before.loss:
        return
    for number, was in enumerate(before.places):
        place = state.places[number]
        if counting(was, before.made) and not counting(place, state.made):
            yield 5
        if {one.attempt for one in counting(place, state.made)} - {one.attempt for one in was.entries} & {*was.deleted}:
            yield 6
        deleted = {*place.deleted}.difference(was.deleted)
        for process in before.processes if deleted else ():
            mover = process.mover
            newest = max(place.starts)
            if mover.at == "copy" and mover.attempt in deleted and newest.number == process.numbers[number]:
                yield 10


def _retired_at(configuration: TierConfiguration, state: State, place: int, line: tuple[int, ...]) -> set[int]:
    """What the attempts of a line have retired at a place of theirs."""
    places = configuration.places
    return {
        other
        for one in state.made
        if one.id in line and place in places[configuration.start_of(one.token)]
        for other in one.retires
    }


def _wrongly_restored(state: State, num_places: int, process: Process, there: set[int]) -> Iterator[int]:
    if process.at == "run" and process.base < 0 and there:
        yield 4
    if process.at == "run" and len(process.asked) == num_places:
        attempts = by_id(state.made)
        if any(process.base in attempts[one].retires for one in there):
            yield 2


def stuck(configuration: TierConfiguration, state: State) -> str | None:
    """The invariant of progress, of a state from which no move leads on."""
    named = {other for one in state.made for other in (*one.replaces, *one.retires)}
    for number in awake(configuration, state.processes):
        process, order = state.processes[number], configuration.places[number]
        if process.at != "done":
            return INVARIANTS[11]
        far = counting(state.places[order[-1]], state.made)
        line = {one for entry in far for one in history(state.made, entry.attempt)}
        is_acknowledged = any(one == process.base for one, _ in process.acknowledged)
        if not process.word and not process.conflicts and is_acknowledged and process.base not in line | named:
            return INVARIANTS[11]
    return None


def told(move: TierMove) -> str:
    """A move for people."""
    state = move.then
    steps = {one.id: f"{one.step} of start {one.id // 10 % NUM_TOKENS + 1}" for one in state.made}
    shown = []
    for place in state.places:
        counted = counting(place, state.made)
        have = ", ".join(steps[one.attempt] + ("" if one in counted else " (out)") for one in place.entries)
        shown.append(have or "nothing")
    who = "" if move.start < 0 else f"start {move.start + 1}, "
    silent = f"; silent: {', '.join(str(one + 1) for one in state.away)}" if state.away else ""
    return f"{who}place {move.place + 1}: {move.what:38} places: {' | '.join(shown)}{silent}"
