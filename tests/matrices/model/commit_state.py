"""What there is in the model of the commit: a store, the processes, and what a reader sees.

In: nothing. Out: states. Knows nothing of: what may come next.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple


class Configuration(NamedTuple):
    """What is explored."""

    name: str
    num_ranks: int
    plans: tuple[tuple[int, ...], ...]  # the steps that each start saves, counted from the newest that it finds
    retire: bool = False
    keep: int = 0  # so many steps; 0 keeps all
    faults: int = 0  # how many ranks fail or lose patience
    slow: str = ""  # "starts" or "manifests": listings of other starts may show one of them late
    broken: str = ""  # how the protocol is changed, so that a violation must be found


class Start(NamedTuple):
    number: int
    token: int
    first: int

    def is_before(self, other: Start) -> bool:
        return self[:2] < other[:2] and self.token != other.token


class Attempt(NamedTuple):
    start: int
    step: int
    number: int


class Manifest(NamedTuple):
    step: int
    attempt: Attempt
    token: int
    retires: tuple[Attempt, ...] = ()
    number: int = 0  # of the start
    version: int = 0


class Store(NamedTuple):
    """What lies at the root, but for what belongs to one rank. `put` and `deleted` are only for the invariants."""

    starts: tuple[Start, ...] = ()
    seen: tuple[tuple[Start, tuple[Attempt, ...]], ...] = ()  # what starts have seen
    manifests: tuple[Manifest, ...] = ()  # ascending
    intents: tuple[Attempt, ...] = ()
    renamed: tuple[Attempt, ...] = ()
    replaced: tuple[Attempt, ...] = ()  # what did not count, by a commit of the same step
    tracker: int = 0
    version: int = 0  # of the tracker
    put: tuple[Manifest, ...] = ()  # all manifests that ever were, in their order
    deleted: tuple[Attempt, ...] = ()
    hidden: tuple[Start | Manifest, ...] = ()  # from listings of other starts, at most one

    def listed_by(self, start: int) -> Store:
        """As the listings of this start show it."""
        hidden = [one for one in self.hidden if one.token != start]
        if not hidden:
            return self
        return self._replace(
            starts=tuple(one for one in self.starts if one not in hidden),
            manifests=tuple(one for one in self.manifests if one not in hidden),
        )

    def later_than(self, own: Start | None) -> list[Start]:
        return [start for start in self.starts if own is not None and own.is_before(start)]

    def has_seen(self, starts: list[Start], attempt: Attempt) -> bool:
        """Whether each of these starts has seen it: `Root.have_seen`."""
        told = dict(self.seen)
        return all(attempt in told.get(start, ()) for start in starts)

    def at(self, step: int) -> Manifest | None:
        return next((one for one in self.manifests if one.step == step), None)


class Seen(NamedTuple):
    """What a process has listed or read, and goes by."""

    steps: tuple[int, ...] = ()
    intents: tuple[Attempt, ...] = ()
    number: int = 0  # of the start to put, or the newest step for the tracker
    tracker: tuple[int, int] = (0, 0)
    first: int = 0  # of the start to put
    saw: tuple[Attempt, ...] = ()  # what that start has seen
    helps: tuple[Start, ...] = ()  # starts that have not said what they have seen
    going: tuple[Manifest, ...] = ()  # the manifests in these folders


class Rank(NamedTuple):
    """One process: where it is, what it knows, and what it has put under names of its own."""

    at: str = "restore"
    save: int = 0
    base: int = 0
    own: Start | None = None
    begun: tuple[int, ...] = ()  # steps, once for each attempt
    archives: tuple[Attempt, ...] = ()
    said: tuple[tuple[Attempt, str], ...] = ()  # by its handles
    seen: Seen = Seen()
    is_late: bool = False  # only for the invariants: it had lost the run when all ranks had said yes


class State(NamedTuple):
    store: Store
    starts: tuple[tuple[Rank, ...], ...]
    faults: int
    slow: int = 0  # how many puts may be shown late


def first_state(configuration: Configuration) -> State:
    ranks = (Rank(),) * configuration.num_ranks
    return State(Store(), (ranks,) * len(configuration.plans), configuration.faults, bool(configuration.slow))


# --- what a reader sees -----------------------------------------------------------------------------------------


@lru_cache(200_000)
def line(
    manifests: tuple[Manifest, ...],
    intents: tuple[Attempt, ...],
    starts: tuple[Start, ...],
    seen: tuple[tuple[Start, tuple[Attempt, ...]], ...],
    own: Start | None,
) -> tuple[Manifest, ...]:
    """The commits that count: `Root.steps`."""
    told = dict(seen)
    later: list[tuple[Start, tuple[Attempt, ...] | None, int | None]] = []

    def counts(one: Manifest) -> bool:
        by = next((start for start in starts if start[:2] == (one.number, one.token)), None)
        return by is None or all(
            (lowest is None or one.step < lowest) and (saw is None or one.attempt in saw)
            for start, saw, lowest in later
            if by.is_before(start)
        )

    for start in sorted(starts)[:0:-1]:
        lowest = min((m.step for m in manifests if (m.number, m.token) == start[:2] and counts(m)), default=None)
        if lowest is not None or start == own:
            later.append((start, told.get(start), lowest))
            if start in told:
                break
    counted = tuple(one for one in manifests if counts(one))
    retired = retired_by(counted, intents)
    return tuple(one for one in counted if one.attempt not in retired)


def retired_by(manifests: tuple[Manifest, ...], intents: tuple[Attempt, ...]) -> set[Attempt]:
    """`Root._retired_by`, of manifests that count."""
    return {attempt for one in manifests if one.attempt in intents for attempt in one.retires}


def line_of(store: Store, broken: str = "", own: Start | None = None) -> tuple[Manifest, ...]:
    if broken == "readers take every manifest":
        return store.manifests
    return line(store.manifests, store.intents, store.starts, store.seen, own)
