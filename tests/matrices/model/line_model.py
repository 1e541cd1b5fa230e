"""The next fence: lines of a run, what each has seen, and which commits count. One rule for readers and for handles.

In: a configuration. Out: states, the moves between them, and what does not hold in one. Knows nothing of: the order in which states are
looked at, ranks (`word_model`): a start is one process here.

The library has starts for lines: their files have a number and a random token, so that the number need not be claimed
(`core.runs.starts`). Here a start claims the next line by a file of that number, which only one can create; then it lists the
commits; then it puts what it has seen and goes on from (`.seen`), before it writes anything else. It puts the `.seen` of an earlier line
that has none, so that nobody waits for a start that was killed there; a start that finds its own put by another is taken. After each put of
a manifest it looks at the lines.

A commit counts if each later line with a commit that counts itself names it. A handle is stricter: it says committed once each later line
names it, with or without a commit; a later line without its `.seen` may still leave it out.
"""

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

INVARIANTS: Final = (
    "what a handle has called committed counts, or a line that saw it has left it out",
    "a run is a chain: each commit that counts was trained from the one before it",
    "a line goes on from what counts",
    "what the latest line with a commit has not seen does not count: readers look at no other",
    "each start comes to its end",
)


class LineConfiguration(NamedTuple):
    """What is explored: the steps that each start saves. A negative one is the step to go back to, and comes first."""

    name: str
    plans: tuple[tuple[int, ...], ...]
    sweeps: bool = False  # a start deletes manifests that do not count, once one of its own does
    broken: str = ""

    @property
    def num_ranks(self) -> int:
        return 1


class Commit(NamedTuple):
    """A manifest. `base` is the one that its start had restored, or put before."""

    step: int
    line: int
    number: int  # among all puts
    base: int = -1  # a number, too


class Line(NamedTuple):
    number: int
    start: int
    seen: tuple[int, ...] | None = None  # numbers of commits
    saw: tuple[int, ...] = ()  # what was listed, with what was left out


class Start(NamedTuple):
    at: str = "begin"
    line: int = 0
    saw: tuple[int, ...] = ()
    base: int = -1
    done: int = 0  # calls of the plan
    version: int = -1  # the manifest that the next put replaces
    said: tuple[tuple[int, str], ...] = ()  # of commits


class State(NamedTuple):
    lines: tuple[Line, ...]
    manifests: tuple[Commit, ...]  # one of each step of a line
    put: tuple[Commit, ...]
    starts: tuple[Start, ...]


class LineMove(NamedTuple):
    start: int
    what: str
    then: State


def first_state(configuration: LineConfiguration) -> State:
    return State((), (), (), (Start(),) * len(configuration.plans))


def sorted_ranks(state: State) -> State:
    return state


def counting(lines: Sequence[Line], manifests: Sequence[Commit], broken: str = "") -> list[Commit]:
    """The commits that count, by the rule of readers; the first line comes first."""
    counted: list[Commit] = []
    later: list[Line] = []  # that have a commit which counts
    for line in sorted(lines, reverse=True):
        own = [one for one in manifests if one.line == line.number]
        named = [one for one in own if all(one.number in (after.seen or ()) for after in later)]
        counted += sorted(named, key=lambda one: -one.step)
        if named or (own and broken == "commits that do not count make a line count"):
            later.append(line)
    return counted[::-1]


def moves(configuration: LineConfiguration, state: State) -> list[LineMove]:
    found = [move for number in range(len(state.starts)) for move in Process(configuration, state, number).moves()]
    if not found:
        found = [m for number in range(len(state.starts)) for m in Process(configuration, state, number).deadlines()]
    return found


class Process:
    """What one start may do next. Methods are named as the places in `Start.at`."""

    def __init__(self, configuration: LineConfiguration, state: State, number: int) -> None:
        self.state, self.number, self.start = state, number, state.starts[number]
        self.broken, self.sweeps = configuration.broken, configuration.sweeps
        plan = configuration.plans[number]
        self.back_to = -plan[0] if plan and plan[0] < 0 else None
        self.steps = plan if self.back_to is None else plan[1:]

    def moves(self) -> Iterator[LineMove]:
        if self.start.at != "done":
            yield from getattr(self, f"_{self.start.at}")()

    def deadlines(self) -> Iterator[LineMove]:
        if self.start.at == "look":
            yield self._said("undecided", "gives up waiting for a line")

    # --- the start --------------------------------------------------------------------------------------------

    def _begin(self) -> Iterator[LineMove]:
        line = 1 + max((line.number for line in self.state.lines), default=0)
        at = "claim"
        if self.broken == "commits are listed before the line is claimed":
            yield self._move("lists lines and commits", self._listed()._replace(at=at, line=line))
        else:
            yield self._move("lists lines", self.start._replace(at=at, line=line))

    def _claim(self) -> Iterator[LineMove]:
        line = Line(self.start.line, self.number)
        is_there = any(one.number == line.number for one in self.state.lines)
        if is_there and self.broken != "two starts may have one line":
            yield self._move("finds the line taken", self.start._replace(at="begin"))
            return
        listed = self.broken == "commits are listed before the line is claimed"
        at = "help" if listed else "list"
        yield self._move("claims a line", self.start._replace(at=at), lines=(*self.state.lines, line))

    def _list(self) -> Iterator[LineMove]:
        yield self._move("lists commits", self._listed()._replace(at="help"))

    def _listed(self) -> Start:
        counted = counting(self.state.lines, self.state.manifests, self.broken)
        return self.start._replace(saw=tuple(one.number for one in counted))

    def _help(self) -> Iterator[LineMove]:
        """Earlier lines without their `.seen`, one put each."""
        for line in self.state.lines:
            if line.number < self.start.line and line.seen is None:
                lines = self._with_seen(line, line._replace(seen=self.start.saw, saw=self.start.saw))
                yield self._move("puts what an earlier line has seen", self.start, lines=lines)
                return
        yield self._move("has helped", self.start._replace(at="seen"))

    def _seen(self) -> Iterator[LineMove]:
        line = next(one for one in self.state.lines if (one.number, one.start) == (self.start.line, self.number))
        if line.seen is not None and self.broken != "a start goes on that finds its own put by another":
            yield self._move("is taken: its own was put", self._ended())
            return
        numbers = {one.number: one.step for one in self.state.put}
        kept = tuple(n for n in self.start.saw if self.back_to is None or numbers[n] <= self.back_to)
        now = self.start._replace(at="save", base=kept[-1] if kept else -1)
        if line.seen is not None:
            yield self._move("finds its own put, and goes on", now)
            return
        lines = self._with_seen(line, line._replace(seen=kept, saw=self.start.saw))
        yield self._move("puts what it has seen", now, lines=lines)

    def _with_seen(self, before: Line, after: Line) -> tuple[Line, ...]:
        return tuple(after if one == before else one for one in self.state.lines)

    # --- a save -----------------------------------------------------------------------------------------------

    def _save(self) -> Iterator[LineMove]:
        if self.start.done == len(self.steps):
            yield self._move("has ended", self._ended())
            return
        step = self.steps[self.start.done]
        before = next((one.step for one in self.state.put if one.number == self.start.base), 0)
        there = self._there(step)
        if step <= before:
            yield self._move("has gone on from a later step", self.start._replace(done=self.start.done + 1))
        elif self.broken == "lines are looked at before the put alone" and self._later():
            yield self._move("is taken", self._ended())
        else:
            yield self._move("looks at the step", self.start._replace(at="put", version=there.number if there else -1))

    def _put(self) -> Iterator[LineMove]:
        step = self.steps[self.start.done]
        there = self._there(step)
        if self.broken == "a step has one manifest" and (there.number if there else -1) != self.start.version:
            yield self._move("its put is refused", self.start._replace(at="save"))
            return
        made = Commit(step, self.start.line, len(self.state.put), self.start.base)
        # Its name has the step and the line, so it replaces none of another line.
        others = [one for one in self.state.manifests if one.step != step or self.broken != "a step has one manifest"]
        now = self.start._replace(at="look", version=made.number)
        yield self._move("puts a manifest", now, manifests=tuple(sorted((*others, made))), put=(*self.state.put, made))

    def _look(self) -> Iterator[LineMove]:
        later = self._later()
        if self.broken == "a line without its .seen is none":
            later = [line for line in later if line.seen is not None]
        if self.broken == "a line without a commit is none":
            later = [line for line in later if any(one.line == line.number for one in self.state.manifests)]
        if self.broken in ("no look after the put", "lines are looked at before the put alone"):
            later = []
        if any(line.seen is not None and self.start.version not in line.seen for line in later):
            yield self._said("taken", "sees that it is taken")
        elif all(line.seen is not None for line in later):
            yield self._said("committed", "says committed")

    def _said(self, word: str, what: str) -> LineMove:
        said = (*self.start.said, (self.start.version, word))
        now = self.start._replace(said=said, base=self.start.version, done=self.start.done + 1)
        if word != "committed":
            return self._move(what, now._replace(at="done", saw=(), version=-1))
        return self._move(what, now._replace(at="sweep" if self.sweeps else "save", version=-1))

    def _sweep(self) -> Iterator[LineMove]:
        counted = counting(self.state.lines, self.state.manifests, self.broken)
        going = [one for one in self.state.manifests if one not in counted]
        if going:
            left = tuple(one for one in self.state.manifests if one != going[0])
            yield self._move("deletes what does not count", self.start, manifests=left)
        else:
            yield self._move("has swept", self.start._replace(at="save"))

    # --- states -----------------------------------------------------------------------------------------------

    def _ended(self) -> Start:
        return self.start._replace(at="done", saw=(), version=-1)

    def _there(self, step: int) -> Commit | None:
        return next((one for one in self.state.manifests if one.step == step), None)

    def _later(self) -> list[Line]:
        return [line for line in self.state.lines if line.number > self.start.line]

    def _move(
        self,
        what: str,
        start: Start,
        *,
        lines: tuple[Line, ...] | None = None,
        manifests: tuple[Commit, ...] | None = None,
        put: tuple[Commit, ...] | None = None,
    ) -> LineMove:
        state = self.state
        starts = (*state.starts[: self.number], start, *state.starts[self.number + 1 :])
        then = State(
            state.lines if lines is None else tuple(sorted(lines, key=lambda line: line[:2])),
            state.manifests if manifests is None else manifests,
            state.put if put is None else put,
            starts,
        )
        return LineMove(self.number, what, then)


# --- what holds -------------------------------------------------------------------------------------------------------


def violated(configuration: LineConfiguration, before: State | None, state: State) -> str | None:
    counted = counting(state.lines, state.manifests, configuration.broken)
    numbers = [one.number for one in counted]
    live = {one.line for one in counted}
    have_put = {one.line for one in state.put}
    left_out = {
        number
        for line in state.lines
        if line.number in have_put
        for number in line.saw
        if number not in (line.seen or ())
    }
    for start in state.starts:
        for number, word in start.said:
            if word == "committed" and number not in numbers and number not in left_out:
                return INVARIANTS[0]
    for one, previous in zip(counted, [None, *counted], strict=False):
        if one.base != (-1 if previous is None else previous.number):
            return INVARIANTS[1]
    for line in state.lines:
        if line.number in live and any(number not in numbers for number in (line.seen or ())[-1:]):
            return INVARIANTS[2]
    if not configuration.broken and {*numbers} != _by_the_latest(state.lines, state.manifests):
        return INVARIANTS[3]
    return None


def _by_the_latest(lines: Sequence[Line], manifests: Sequence[Commit]) -> set[int]:
    """The numbers of the commits that count, by what the latest line with a commit has seen alone."""
    latest = max((line for line in lines if any(one.line == line.number for one in manifests)), default=None)
    own = [] if latest is None else [one.number for one in manifests if one.line == latest.number]
    seen = () if latest is None else latest.seen or ()
    return {*own, *(one.number for one in manifests if one.number in seen)}


def stuck(state: State) -> str | None:
    return None if all(start.at == "done" for start in state.starts) else INVARIANTS[-1]


def told(move: LineMove) -> str:
    lines = "; ".join(f"line {line.number}: {line.seen}" for line in move.then.lines)
    made = "; ".join(f"step {one.step} of line {one.line} is {one.number}" for one in move.then.manifests)
    return f"start {move.start + 1}: {move.what:36} {lines} | {made}"
