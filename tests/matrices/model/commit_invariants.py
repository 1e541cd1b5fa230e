"""What docs/guarantees.md promises of a commit of several ranks, as questions to a state of the model.

In: a state, the move that led there, or that none leads on. Out: what does not hold. Knows nothing of: how states are found.
"""

from collections.abc import Iterator
from typing import Final

from .commit_state import Attempt, Configuration, Manifest, State, Store, line_of

INVARIANTS: Final = (
    "what rank 0 has acknowledged is on the line, or a later commit has retired it, or retention has deleted it",
    "what another rank calls committed is on the line, or a later commit has retired it, or retention has deleted it",
    "no manifest is put by a start that had lost the run when all receipts were there",
    "what is refused is committed by nobody",
    "the archive of the same attempt lies under a manifest",
    "a manifest goes only by a rollback, by the rule of starts, or by retention",
    "a run is a line: starts rise with steps, and so do the commits that were acknowledged",
    "the tracker moves back only from a step that was retired",
    "retention deletes neither the newest step nor what another start goes on from",
    "each save comes to its end, and no rank waits for what has been said",
    "each later start has seen what a handle has called committed",
    "what a start has seen stays on the line with its commits, or they retire it, or retention deletes it",
)


def violated(configuration: Configuration, before: State | None, state: State) -> str | None:
    """The first invariant that does not hold."""
    for number in _broken_in(configuration, state):
        return INVARIANTS[number]
    if before is not None and before.store is not state.store:
        for number in _broken_between(configuration, before, state):
            return INVARIANTS[number]
    return None


def _broken_in(configuration: Configuration, state: State) -> Iterator[int]:
    store = state.store
    counted = line_of(store, configuration.broken)
    on = {one.attempt for one in counted}
    put = {one.attempt for one in store.put}
    gone = {attempt for one in store.put for attempt in one.retires}.union(store.deleted)
    for ranks in state.starts:
        for number, rank in enumerate(ranks):
            for attempt, word in rank.said:
                if word == "committed" and attempt not in on and attempt not in gone:
                    yield min(number, 1)
                if word == "refused" and attempt in put:
                    yield 3
    for one in store.manifests:
        if one.attempt not in state.starts[one.attempt.start][0].archives:
            yield 4
    there = {one.attempt for one in store.manifests}.union(store.renamed, store.deleted, store.replaced)
    if not put <= there:
        yield 5
    acknowledged = {attempt for ranks in state.starts for attempt, word in ranks[0].said if word == "committed"}
    if not _is_line(store, counted, acknowledged):
        yield 6
    told = {attempt for ranks in state.starts for rank in ranks for attempt, word in rank.said if word == "committed"}
    for one in store.put:
        by = (one.number, one.token)
        later = [saw for start, saw in store.seen if start[:2] > by and start.token != one.token]
        if one.attempt in told - gone and not all(one.attempt in saw for saw in later):
            yield 10
    by_start = {(one.number, one.token) for one in counted}
    for start, saw in store.seen:
        if start[:2] in by_start and not on.union(gone).issuperset(saw):
            yield 11


def _is_line(store: Store, counted: tuple[Manifest, ...], acknowledged: set[Attempt]) -> bool:
    order = {one.attempt: number for number, one in enumerate(store.put)}
    starts = [(one.number, one.token) for one in counted]
    puts = [order[one.attempt] for one in counted if one.attempt in acknowledged]
    return starts == sorted(starts) and puts == sorted(puts)


def _broken_between(configuration: Configuration, earlier: State, later: State) -> Iterator[int]:
    before, after = earlier.store, later.store
    if len(after.put) > len(before.put) and earlier.starts[after.put[-1].attempt.start][0].is_late:
        yield 2
    if after.tracker < before.tracker and all(one.step != before.tracker for one in before.renamed):
        yield 7
    if after.deleted != before.deleted:
        counted = line_of(before, configuration.broken)
        if counted and counted[-1].attempt in set(after.deleted).difference(before.deleted):
            yield 8


def stuck(state: State) -> str | None:
    """The invariant of progress, of a state from which no move leads on."""
    return None if all(rank.at == "done" for ranks in state.starts for rank in ranks) else INVARIANTS[9]


__all__ = ["INVARIANTS", "Attempt", "stuck", "violated"]
