"""All states of a configuration of a model, in the order of their distance from the first.

In: a model, a configuration. Out: how many there are, and the shortest way to one that violates an invariant. Knows nothing of: the
protocol.

This is a search of its own, in Python. Of the checkers that the package index offers, TLC needs Java, SPIN and Stateright a compiler and a
second language, and what is in Python checks formulas over graphs that are there already. A model in the language of the library can be
laid beside it, and its paths can be replayed against it.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from . import line_model, start_model, tier_invariants, tier_model, tier_state, word_model
from .commit_invariants import stuck, violated
from .commit_model import moves, sorted_ranks
from .commit_state import Configuration, State, first_state
from .line_model import LineConfiguration
from .start_model import StartConfiguration
from .tier_state import TierConfiguration
from .word_model import WordConfiguration

Key = tuple[int, ...]


class Model(NamedTuple):
    """What a search asks. Of a state it knows no more than that it can be taken apart, and put together again."""

    first: Callable[[Any], Any]
    moves: Callable[[Any, Any], Sequence[Any]]
    sorted: Callable[[Any], Any]  # the same state with ranks of equal programs in one order
    violated: Callable[[Any, Any, Any], str | None]
    stuck: Callable[[Any, Any], str | None]
    apart: Callable[[Any], tuple[Any, ...]]
    together: Callable[[Sequence[Any]], Any]
    told: Callable[[Any], str]  # a move, for people


def _together(parts: Sequence[Any]) -> State:
    store, *starts, left = parts
    return State(store, tuple(starts), *left)


def _told(move: Any) -> str:
    have = ", ".join(f"{one.step} of start {one.token + 1}" for one in move.then.store.manifests)
    who = "the store" if move.start < 0 else f"start {move.start + 1}, rank {move.rank}"
    return f"{who}: {move.what:22} steps: {have or 'none'}; tracker: {move.then.store.tracker}"


_MODELS: Final = {
    Configuration: Model(
        first_state,
        moves,
        sorted_ranks,
        violated,
        lambda _, state: stuck(state),
        lambda state: (state.store, *state.starts, (state.faults, state.slow)),
        _together,
        _told,
    ),
    LineConfiguration: Model(
        line_model.first_state,
        line_model.moves,
        line_model.sorted_ranks,
        line_model.violated,
        lambda _, state: line_model.stuck(state),
        lambda state: (state.lines, state.manifests, state.put, *state.starts),
        lambda parts: line_model.State(*parts[:3], tuple(parts[3:])),
        line_model.told,
    ),
    TierConfiguration: Model(
        tier_state.first_state,
        tier_model.moves,
        lambda state: state,
        tier_invariants.violated,
        tier_invariants.stuck,
        lambda state: (*state.places, *state.processes, state[1], state[3:]),
        lambda parts: tier_state.together(parts),
        tier_invariants.told,
    ),
    StartConfiguration: Model(
        start_model.first_state,
        start_model.moves,
        start_model.sorted_ranks,
        start_model.violated,
        start_model.stuck,
        lambda state: (state.hello, state.welcome, state.here, *state.processes, state.left),
        lambda parts: start_model.State(*parts[:3], tuple(parts[3:-1]), parts[-1]),
        start_model.told,
    ),
    WordConfiguration: Model(
        word_model.first_state,
        word_model.moves,
        word_model.sorted_ranks,
        word_model.violated,
        word_model.stuck,
        lambda state: (state.store, state.archives, state.manifests, *state.ranks, state.left),
        lambda parts: word_model.State(*parts[:3], tuple(parts[3:-1]), parts[-1]),
        word_model.told,
    ),
}


@dataclass(slots=True)
class Found:
    """What a search has found."""

    configuration: Any
    states: int = 0
    transitions: int = 0
    depth: int = 0
    ends: int = 0
    is_whole: bool = True
    violation: str = ""
    path: list[Any] = field(default_factory=list)  # to the violation, or to the last state found


class _Numbers:
    """Parts of states as numbers, so that equal parts are held once."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._numbers: dict[Any, int] = {}
        self._parts: list[Any] = []

    def key(self, state: Any) -> Key:
        return tuple(map(self._number, self._model.apart(self._model.sorted(state))))

    def state(self, key: Key) -> Any:
        return self._model.together([self._parts[number] for number in key])

    def _number(self, part: Any) -> int:
        number = self._numbers.get(part)
        if number is None:
            number = self._numbers[part] = len(self._parts)
            self._parts.append(part)
        return number


def search(configuration: Any, bound: int = 1_000_000) -> Found:
    """Explores all states, or the nearest `bound` of them, up to the first violation."""
    model = _MODELS[type(configuration)]
    found, numbers = Found(configuration), _Numbers(model)
    first = numbers.key(model.first(configuration))
    before: dict[Key, Key | None] = {first: None}
    depths, waiting = {first: 0}, deque([first])
    last = first
    while waiting and not found.violation:
        last = key = waiting.popleft()
        state, depth = numbers.state(key), depths.pop(key)
        found.depth = depth
        following = model.moves(configuration, state)
        if not following:
            found.ends += 1
            found.violation = model.stuck(configuration, state) or ""
        for move in following:
            found.transitions += 1
            then = numbers.key(move.then)
            wrong = model.violated(configuration, state, move.then)
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
    found.path = _path(model, configuration, _keys(before, last), numbers)
    return found


def _keys(before: dict[Key, Key | None], last: Key) -> list[Key]:
    keys: list[Key] = [last]
    while (previous := before[keys[-1]]) is not None:
        keys.append(previous)
    return keys[::-1]


def _path(model: Model, configuration: Any, keys: list[Key], numbers: _Numbers) -> list[Any]:
    """The moves along these states, with each rank under its own number from the first to the last."""
    state, path = model.first(configuration), []
    for key in keys[1:]:
        move = next(one for one in model.moves(configuration, state) if numbers.key(one.then) == key)
        path.append(move)
        state = move.then
    return path


def told(found: Found) -> str:
    """A path for people."""
    shown = _MODELS[type(found.configuration)].told
    lines = [f"{found.configuration.name}: {found.violation or 'no violation'}, after {len(found.path)} moves"]
    return "\n".join([*lines, *(f"{number:4}  {shown(move)}" for number, move in enumerate(found.path, 1))])
