"""How the ranks of one start find each other, by a store that may have the keys of earlier starts.

In: a configuration. Out: states, the moves between them, and what does not hold in one. Knows nothing of: the order in which states are
looked at, what is said afterwards (`word_model`).

Each rank says hello by a nonce. Rank 0 answers each nonce with its token, below which all else lies; the rank then says there that it has
met it. Rank 0 begins once all have said so, each by the nonce that was answered last: a hello may be that of a dead start. (In the library
it begins to save before that, and takes receipts of the nonce that it has answered last alone.) It answers a new nonce of a rank that it has
not met, and refuses one of a rank that it has met, which has started again alone. Of two processes that say they are one rank, the one
whose hello is gone gives up.
"""

from collections.abc import Iterator
from typing import Final, NamedTuple

INVARIANTS: Final = (
    "ranks that have met are of one start",
    "a start that has begun has met each of its ranks",
    "ranks that start together meet, and one that starts again alone is refused",
)


class StartConfiguration(NamedTuple):
    """What is explored: starts of all ranks, one after the other, and ranks that are started again alone."""

    name: str
    num_ranks: int
    starts: int = 1
    again: int = 0
    broken: str = ""


class Process(NamedTuple):
    """One process. Its nonce is its number among all that were ever started, and on rank 0 also its token."""

    rank: int
    start: int
    nonce: int
    at: str = "new"  # "waiting", "met", "begun", "refused", "dead"
    token: int = -1
    answered: tuple[tuple[int, int], ...] = ()  # on rank 0: rank, nonce
    met: tuple[tuple[int, int], ...] = ()  # on rank 0: rank, nonce
    named: tuple[int, ...] = ()  # on rank 0: ranks that it refuses
    is_again: bool = False


class State(NamedTuple):
    hello: tuple[tuple[int, int], ...]  # rank, nonce
    welcome: tuple[tuple[int, int, int], ...]  # rank, nonce, token
    here: tuple[tuple[int, int, int], ...]  # token, rank, nonce
    processes: tuple[Process, ...]
    left: tuple[int, int]  # starts, ranks that start again


class StartMove(NamedTuple):
    process: int
    what: str
    then: State


def first_state(configuration: StartConfiguration) -> State:
    processes = tuple(Process(rank, 0, rank) for rank in range(configuration.num_ranks))
    return State((), (), (), processes, (configuration.starts - 1, configuration.again))


def sorted_ranks(state: State) -> State:
    return state


def moves(configuration: StartConfiguration, state: State) -> list[StartMove]:
    found = [
        StartMove(number, what, then)
        for number, one in enumerate(state.processes)
        for what, then in _steps(configuration, state, number, one)
    ]
    return [*found, *_restarts(configuration, state)]


def _steps(configuration: StartConfiguration, state: State, number: int, one: Process) -> Iterator[tuple[str, State]]:
    if one.at in ("dead", "refused") or (one.at == "met" and one.rank):
        return

    def now(process: Process, **changes: object) -> State:
        processes = (*state.processes[:number], process, *state.processes[number + 1 :])
        return state._replace(processes=processes, **changes)  # type: ignore[arg-type]

    hello = dict(state.hello)
    if one.rank:
        if one.at == "new":
            changed = tuple(sorted({**hello, one.rank: one.nonce}.items()))
            yield "says hello", now(one._replace(at="waiting"), hello=changed)
            return
        if hello.get(one.rank) != one.nonce:
            yield "is refused: another process is this rank", now(one._replace(at="refused"))
            return
        for rank, nonce, token in state.welcome:
            if rank == one.rank and (nonce == one.nonce or configuration.broken == "any answer is one"):
                here = tuple(sorted({*state.here, (token, one.rank, one.nonce)}))
                yield "meets rank 0", now(one._replace(at="met", token=token), here=here)
        return
    others = range(1, configuration.num_ranks)
    answered, met_by = dict(one.answered), dict(one.met)
    for rank in others:
        nonce = hello.get(rank)
        if nonce is None or answered.get(rank) == nonce:
            continue
        if rank in met_by and configuration.broken != "a rank that starts again alone is answered":
            if rank not in one.named:
                yield "refuses a rank", now(one._replace(named=(*one.named, rank)))
            continue
        welcome = {of: (said, token) for of, said, token in state.welcome} | {rank: (nonce, one.nonce)}
        packed = tuple(sorted((of, *value) for of, value in welcome.items()))
        answers = tuple(sorted({**answered, rank: nonce}.items()))
        met = (*one.met, (rank, nonce)) if configuration.broken == "a hello is enough" else one.met
        yield "answers", now(one._replace(answered=answers, met=met), welcome=packed)
    for token, rank, nonce in state.here:
        is_answered = answered.get(rank) == nonce or configuration.broken == "an earlier answer counts"
        if token == one.nonce and rank not in met_by and is_answered:
            yield "has met a rank", now(one._replace(met=(*one.met, (rank, nonce))))
    if len(met_by) == len(others) and one.at != "begun":
        yield "begins", now(one._replace(at="begun", token=one.nonce))


def _restarts(configuration: StartConfiguration, state: State) -> Iterator[StartMove]:
    size = configuration.num_ranks
    if state.left[0]:
        start = max(one.start for one in state.processes) + 1
        dead = tuple(one._replace(at="dead") for one in state.processes)
        new = tuple(Process(rank, start, len(dead) + rank) for rank in range(size))
        yield StartMove(
            -1, "all ranks start again", state._replace(processes=dead + new, left=(state.left[0] - 1, state.left[1]))
        )
    if state.left[1]:
        for number, one in enumerate(state.processes):
            if one.rank and one.at not in ("dead", "new", "refused"):
                gone = (*state.processes[:number], one._replace(at="dead"), *state.processes[number + 1 :])
                new = Process(one.rank, one.start, len(gone), is_again=True)
                left = (state.left[0], state.left[1] - 1)
                yield StartMove(-1, "a rank starts again alone", state._replace(processes=(*gone, new), left=left))


def violated(configuration: StartConfiguration, before: State | None, state: State) -> str | None:
    for one in state.processes:
        if one.at == "met":
            first = next(p for p in state.processes if p.nonce == one.token)
            if first.start != one.start and one.at != "dead":
                return INVARIANTS[0]
    for first in state.processes:
        met = dict(first.met)
        for rank in met if first.at == "begun" else ():
            own = [one for one in state.processes if (one.rank, one.start) == (rank, first.start)]
            if not any(one.token == first.nonce for one in own):
                return INVARIANTS[1]
        for one in state.processes:
            if one.rank and one.at == "met" and one.token == first.nonce and met.get(one.rank, one.nonce) != one.nonce:
                return INVARIANTS[2]
    return None


def stuck(configuration: StartConfiguration, state: State) -> str | None:
    live = [one for one in state.processes if one.at != "dead"]
    first = next(one for one in live if one.rank == 0)
    for one in live:
        if one.rank and one.at != "met":
            is_refused = one.is_again and (one.at == "refused" or one.rank in first.named)
            if not is_refused:
                return INVARIANTS[2]
    if first.at != "begun":
        return INVARIANTS[1]
    return None


def told(move: StartMove) -> str:
    who = "a launcher" if move.process < 0 else f"process {move.process}, rank {move.then.processes[move.process].rank}"
    return f"{who}: {move.what:34} hello: {dict(move.then.hello)}, here: {move.then.here}"
