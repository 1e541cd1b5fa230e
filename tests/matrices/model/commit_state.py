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


class Store(NamedTuple):
    """What lies at the root, but for what belongs to one rank. `put` and `deleted` are only for the invariants."""

    starts: tuple[Start, ...] = ()
    manifests: tuple[Manifest, ...] = ()  # ascending
    intents: tuple[Attempt, ...] = ()
    renamed: tuple[Attempt, ...] = ()
    verdicts: tuple[Attempt, ...] = ()
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

    def at(self, step: int) -> Manifest | None:
        return next((one for one in self.manifests if one.step == step), None)


class Seen(NamedTuple):
    """What a process has listed or read, and goes by."""

    steps: tuple[int, ...] = ()
    intents: tuple[Attempt, ...] = ()
    number: int = 0  # of the start to put, or the newest step for the tracker
    tracker: tuple[int, int] = (0, 0)
    relists: bool = False
    verdicts: tuple[Attempt, ...] = ()  # in the folders that are to go
    going: tuple[Manifest, ...] = ()  # the manifests in these folders


class Rank(NamedTuple):
    """One process: where it is, what it knows, and what it has put under names of its own."""

    at: str = "restore"
    save: int = 0
    base: int = 0
    own: Start | None = None
    decided: tuple[int, ...] = ()  # steps, once for each attempt
    left: tuple[int, ...] = ()  # steps of attempts that this rank does not know the decision of
    archives: tuple[Attempt, ...] = ()
    receipts: tuple[tuple[Attempt, bool], ...] = ()
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
    manifests: tuple[Manifest, ...], intents: tuple[Attempt, ...], starts: tuple[Start, ...], by_starts: bool = True
) -> tuple[Manifest, ...]:
    """The commits that count: `Root.steps`."""
    retired = retired_by(manifests, intents)
    left = [one for one in manifests if one.attempt not in retired]
    known: dict[int, Start] = {}
    for start in sorted(starts):
        known[start.token] = start
    counted, latest = [], None
    for one in left:
        own = known.get(one.token)
        if own is None:
            counted.append(one)
        elif latest is not None and own.is_before(latest) and by_starts:
            continue
        else:
            latest = own
            counted.append(one)
    return tuple(counted)


def retired_by(manifests: tuple[Manifest, ...], intents: tuple[Attempt, ...]) -> set[Attempt]:
    """`Root.retired_by`."""
    return {attempt for one in manifests if one.attempt in intents for attempt in one.retires}


def line_of(store: Store, broken: str = "") -> tuple[Manifest, ...]:
    return line(store.manifests, store.intents, store.starts, broken != "readers take every manifest")
