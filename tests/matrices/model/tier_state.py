"""The tiers of a run, as values: places with starts and manifests, the processes, and which commits count at a place.

In: nothing. Out: states. Knows nothing of: what may come next (`tier_model`), what must hold (`tier_invariants`).
"""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple

UNLISTED: Final = "a commit of a start that is not listed counts"  # a broken rule
NUM_TOKENS: Final = 5  # a process adds this to its token at a rollback


class TierConfiguration(NamedTuple):
    """What is explored: the steps that each start saves, and its places from near to far.

    A negative step is none: the start goes back to the step of that number, and retires those above it.
    """

    name: str
    plans: tuple[tuple[int, ...], ...]
    places: tuple[tuple[int, ...], ...]
    keep: tuple[int, ...] = ()  # steps, of each place; 0 keeps all
    silences: tuple[int, ...] = ()  # how often each place falls silent
    loses: int = -1  # the place that is lost once, and replaced by an empty one
    is_old: bool = False  # it is replaced by one with older contents instead
    reverse: bool = False  # of two starts of one number, the first has the higher token
    alive: int = 0  # so many starts may overlap: when another begins, earlier ones have ended or been killed; 0: all
    broken: str = ""

    @property
    def num_ranks(self) -> int:
        return 1

    @property
    def is_one_machine(self) -> bool:
        """Whether each start can see whatever the others have saved."""
        return not self.silences and self.loses < 0 and len({*self.places}) == 1

    def token_of(self, start: int) -> int:
        """The token of a process; after a rollback it has another one."""
        return len(self.plans) - 1 - start if self.reverse else start

    def start_of(self, token: int) -> int:
        start = token % NUM_TOKENS
        return len(self.plans) - 1 - start if self.reverse else start


class Attempt(NamedTuple):
    """An attempt at a step: what its manifest says, wherever it lies. `base` is for the invariants alone."""

    id: int
    step: int
    token: int  # of the start that has saved it
    number: int
    replaces: tuple[int, ...] = ()
    retires: tuple[int, ...] = ()
    base: int = -1  # the attempt that the training went on from

    @property
    def key(self) -> tuple[int, int, int]:
        """The order of the steps of a run: those of later starts are newer."""
        return self.number, self.step, self.id


class Ancestor(NamedTuple):
    """A start that another goes on from, with the last of its steps that is of the line."""

    token: int
    step: int
    attempt: int = -1  # -1: any


class Start(NamedTuple):
    """The file of a start at a place, with its `.seen`."""

    number: int
    token: int
    line: tuple[Ancestor, ...] = ()
    after: tuple[int, ...] = ()  # the starts that it has found anywhere, and those that they have found
    seen: tuple[int, ...] | None = None


class Entry(NamedTuple):
    """A manifest at a place, of the start that has put it there."""

    step: int
    attempt: int
    number: int
    token: int
    whole: bool = True  # the archive is there

    def is_by(self, start: Start) -> bool:
        return (self.number, self.token) == (start.number, start.token)


class Place(NamedTuple):
    starts: tuple[Start, ...] = ()
    entries: tuple[Entry, ...] = ()  # one of each step
    deleted: tuple[int, ...] = ()  # by retention: for the invariants alone


class Task(NamedTuple):
    """What a thread of a process does next, at which place, for which attempt."""

    at: str = ""
    place: int = -1
    attempt: int = -1
    number: int = 0  # of the start that is put next
    seen: tuple[int, ...] = ()


class Process(NamedTuple):
    """One start: what it knows, and its two threads."""

    token: int
    at: str = "restore"  # "run", "done"
    word: str = ""  # why it has ended: "nothing to restore", "stale", "taken", "lost"
    view: tuple[Place | None, ...] = ()  # while it restores: what it has listed
    owed: tuple[tuple[int, int], ...] = ()  # what was acknowledged when it began: for the invariants alone
    asked: tuple[int, ...] = ()  # the places that answered
    apart: tuple[int, ...] = ()  # commits that it listed then, of other lines
    base: int = -1
    line: tuple[Ancestor, ...] = ()
    after: tuple[int, ...] = ()
    known: tuple[int, ...] = ()  # attempts of its line, as long as it may go back
    top: int = 0  # the highest number of a start that it has listed
    repeat: tuple[int, ...] = ()  # retired, and repeated in manifests
    untold: tuple[int, ...] = ()  # places that have no manifest which retires them
    numbers: tuple[int, ...] = ()  # of this start at each place; 0 before it has taken the place
    have: tuple[int, ...] = ()  # the newest attempt of its line at each place, as far as it knows
    conflicts: tuple[tuple[int, int], ...] = ()  # places, with the attempt, or minus the token, that is foreign
    failed: tuple[int, ...] = ()  # places that have failed this save
    saver: Task = Task()
    mover: Task = Task()
    done: int = 0  # calls of the plan
    taken_by: int = -1
    acknowledged: tuple[tuple[int, int], ...] = ()  # attempts, places


class State(NamedTuple):
    places: tuple[Place, ...]
    made: tuple[Attempt, ...]
    processes: tuple[Process, ...]
    away: tuple[int, ...] = ()  # places that are silent
    left: tuple[int, ...] = ()  # silences
    loss: str = ""  # "copied", "lost"
    copy: Place = Place()  # older contents
    gone: tuple[int, ...] = ()  # attempts that were lost with the place


def awake(configuration: TierConfiguration, processes: Sequence[Process]) -> range:
    """The starts that may move."""
    if not configuration.alive:
        return range(len(processes))
    last = max((number for number, one in enumerate(processes) if one.view or one.at != "restore"), default=0)
    return range(max(0, last + 1 - configuration.alive), min(last + 2, len(processes)))


def first_state(configuration: TierConfiguration) -> State:
    num_places = 1 + max(max(one) for one in configuration.places)
    processes = tuple(
        Process(configuration.token_of(start), numbers=(0,) * num_places, have=(-1,) * num_places)
        for start in range(len(configuration.plans))
    )
    return State((Place(),) * num_places, (), processes, (), configuration.silences)


@lru_cache(100_000)
def by_id(made: tuple[Attempt, ...]) -> dict[int, Attempt]:
    return {one.id: one for one in made}


@lru_cache(300_000)
def counting(
    place: Place, made: tuple[Attempt, ...], taken: tuple[int, int] = (0, 0), *, is_any: bool = False
) -> tuple[Entry, ...]:
    """The commits that count at a place, ascending: each later start with a commit that counts has seen them.

    The start that has `taken` the place counts as one with a commit: what it has not seen was not acknowledged there. A
    commit of a start that is not listed counts if a start that is has seen it: else it was put after the place was lost.
    """
    listed = {(one.number, one.token) for one in place.starts}
    told = {attempt for one in place.starts for attempt in one.seen or ()}
    seen = {(one.number, one.token): one.seen or () for one in place.starts}
    counted: list[Entry] = []
    later: list[Sequence[int]] = []
    for own in sorted({(one.number, one.token) for one in place.entries} | {taken}, reverse=True):
        named = [
            one
            for one in place.entries
            if (one.number, one.token) == own
            and (is_any or own in listed or one.attempt in told)
            and all(one.attempt in after for after in later)
        ]
        counted += named
        if named or own == taken:
            later.append(seen.get(own, ()))
    attempts = by_id(made)
    retired = {other for one in counted for other in attempts[one.attempt].retires}
    return tuple(sorted(one for one in counted if one.attempt not in retired))


@lru_cache(100_000)
def history(made: tuple[Attempt, ...], attempt: int) -> tuple[int, ...]:
    """The attempts that one was trained from, and itself."""
    attempts, found = by_id(made), []
    while attempt >= 0:
        found.append(attempt)
        attempt = attempts[attempt].base
    return tuple(found)


def changed(values: tuple[int, ...], at: int, value: int) -> tuple[int, ...]:
    return (*values[:at], value, *values[at + 1 :])


def together(parts: Sequence[Any]) -> State:
    """The state of these places, these processes, what was made, and the rest."""
    *both, made, rest = parts
    places = [one for one in both if isinstance(one, Place)]
    return State(tuple(places), made, tuple(both[len(places) :]), *rest)


def last_steps(line: Sequence[Ancestor]) -> dict[int, Ancestor]:
    return {one.token: one for one in line}


def line_to(line: Sequence[Ancestor], step: int) -> tuple[Ancestor, ...]:
    """A line that ends with a step."""
    return tuple(one if one.step <= step else Ancestor(one.token, step) for one in line)


def found_with(starts: Iterable[Start]) -> set[int]:
    """The tokens of these starts, and of those that they have found."""
    return {token for one in starts for token in (one.token, *one.after)}
