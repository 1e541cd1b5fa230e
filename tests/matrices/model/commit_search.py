"""All states of a configuration of the model, in the order of their distance from the first.

In: a configuration. Out: how many there are, and the shortest way to one that violates an invariant. Knows nothing of: the protocol.

This is a search of its own, in Python. Of the checkers that the package index offers, TLC needs Java, SPIN and Stateright a compiler and a
second language, and what is in Python checks formulas over graphs that are there already. A model in the language of the library can be
laid beside it, and its paths can be replayed against it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from .commit_invariants import stuck, violated
from .commit_model import Move, moves, sorted_ranks
from .commit_state import Configuration, State, Store, first_state

Key = tuple[int, ...]


@dataclass(slots=True)
class Found:
    """What a search has found."""

    configuration: Configuration
    states: int = 0
    transitions: int = 0
    depth: int = 0
    ends: int = 0
    is_whole: bool = True
    violation: str = ""
    path: list[Move] = field(default_factory=list)  # to the violation, or to the last state found


class _Numbers:
    """Parts of states as numbers, so that equal parts are held once."""

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}
        self._parts: list[Any] = []

    def key(self, state: State) -> Key:
        parts = [state.store, *state.starts, state.faults]
        return tuple(map(self._number, parts))

    def state(self, key: Key) -> State:
        store, *starts, faults = (self._parts[number] for number in key)
        return State(store, tuple(starts), faults)

    def _number(self, part: Any) -> int:
        number = self._numbers.get(part)
        if number is None:
            number = self._numbers[part] = len(self._parts)
            self._parts.append(part)
        return number


def search(configuration: Configuration, bound: int = 1_000_000) -> Found:
    """Explores all states, or the nearest `bound` of them, up to the first violation."""
    found, numbers = Found(configuration), _Numbers()
    first = numbers.key(sorted_ranks(first_state(configuration)))
    before: dict[Key, Key | None] = {first: None}
    depths, waiting = {first: 0}, deque([first])
    last = first
    while waiting and not found.violation:
        last = key = waiting.popleft()
        state, depth = numbers.state(key), depths.pop(key)
        found.depth = depth
        following = moves(configuration, state)
        if not following:
            found.ends += 1
            found.violation = stuck(state) or ""
        for move in following:
            found.transitions += 1
            then = numbers.key(sorted_ranks(move.then))
            wrong = violated(configuration, state, move.then)
            if then not in before and (len(before) < bound or wrong):
                before[then] = key
                depths[then] = depth + 1
                waiting.append(then)
            elif then not in before:
                found.is_whole = False
            if wrong:
                # An invariant between two states is violated by this edge, whatever the shortest way to its end.
                found.violation, last = wrong, then
                before[then] = key
                break
    found.states = len(before)
    found.path = _path(configuration, _keys(before, last), numbers)
    return found


def _keys(before: dict[Key, Key | None], last: Key) -> list[Key]:
    keys: list[Key] = [last]
    while (previous := before[keys[-1]]) is not None:
        keys.append(previous)
    return keys[::-1]


def _path(configuration: Configuration, keys: list[Key], numbers: _Numbers) -> list[Move]:
    """The moves along these states, with each rank under its own number from the first to the last."""
    state, path = first_state(configuration), []
    for key in keys[1:]:
        wanted = numbers.state(key)
        move = next(one for one in moves(configuration, state) if sorted_ranks(one.then) == wanted)
        path.append(move)
        state = move.then
    return path


def told(found: Found) -> str:
    """A path for people."""
    lines = [f"{found.configuration.name}: {found.violation or 'no violation'}, after {len(found.path)} moves"]
    for number, move in enumerate(found.path, 1):
        store: Store = move.then.store
        have = ", ".join(f"{one.step} of start {one.token + 1}" for one in store.manifests)
        who = f"start {move.start + 1}, rank {move.rank}"
        lines.append(f"{number:4}  {who}: {move.what:22} steps: {have or 'none'}; tracker: {store.tracker}")
    return "\n".join(lines)
