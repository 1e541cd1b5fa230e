"""The protocol of ranks: one log of rank 0's words for all calls, which each rank matches to its own by channel and step.

In: a configuration. Out: states, the moves between them, and what does not hold in one. Knows nothing of: the order in which states are
looked at, starts of worlds (`commit_model`), how ranks find each other (`start_model`).

Rank 0 says each of its calls as a word of the log: channel, step, and the name of the attempt, here the number of the word; a call that
fails there before it has begun, or that nobody makes, is one word that says so. Later it says what was decided. Another rank enters a call
in its channel's queue before it looks at an argument, and matches words to entries by their steps, never by a count. Each rank has one
connection to the store: what it sets arrives later, in order; what it asks is answered behind that. A rank that dies moves no more, and the
store may vanish for all at once. Both are silence: the moves that follow from it (`deadlines`) come when nothing else can.

`word_replay` has the library take random paths of it. One thing differs on purpose: words go once all living ranks have read them, and in
the library once a thousand more were said.
"""

from collections.abc import Iterator
from typing import Any, Final, NamedTuple

INVARIANTS: Final = (
    "no handle says committed where another says failed",
    "what is committed has its manifest, and what has failed has none",
    "a manifest names archives of its own attempt, of all ranks, and of one step",
    "what all ranks call alike is committed on all of them",
    "each call comes to its end, and no rank waits for what cannot come",
)
# A step of a call that has none, because its arguments are wrong.
NO_STEP: Final = 0
ALONE: Final = "alone"  # what a call comes to that no other rank has made


class Call(NamedTuple):
    """One call of a plan. `fails`: in the call, behind the look at its step; `skips`: on rank 0, nobody makes this save; `waits`: the plan
    goes on when it has ended.
    """

    step: int
    channel: int = 0
    fails: bool = False
    waits: bool = False
    skips: bool = False


class WordConfiguration(NamedTuple):
    """What is explored."""

    name: str
    plans: tuple[tuple[Call, ...], ...]  # of each rank
    common: tuple[tuple[int, int], ...] = ()  # channels and steps that end as committed on all ranks
    in_flight: int = 1
    deaths: int = 0
    faults: int = 0  # puts that fail; each second one arrives all the same
    vanishes: bool = False  # the store
    alarms: int = 0  # a living rank is taken for dead: rank 0, or by rank 0
    broken: str = ""

    @property
    def num_ranks(self) -> int:
        return len(self.plans)


class Word(NamedTuple):
    """Of rank 0. `kind` is "save", or what was decided of an attempt: "committed", "failed", "undecided". `ends`: what a call has come to
    that has not begun, "failed" or "skipped".
    """

    kind: str
    channel: int
    step: int
    attempt: int
    ends: str = ""


class Entry(NamedTuple):
    """A call that has not ended."""

    step: int
    channel: int
    call: int  # its number in the plan
    fails: bool = False
    at: str = "open"  # then "writing", "durable", "told"; on rank 0 "collecting", "putting", "put"
    attempt: int = -1


class Rank(NamedTuple):
    calls: int = 0  # made so far
    entries: tuple[Entry, ...] = ()
    pending: tuple[Word, ...] = ()  # words without an entry yet, and what was decided of them
    read: int = 0  # words
    pipe: tuple[tuple[str, tuple[Any, ...]], ...] = ()  # set, and not there yet
    said: tuple[tuple[int, int, str], ...] = ()  # number of the call, attempt, what its handle says
    is_dead: bool = False
    taken: tuple[int, ...] = ()  # on rank 0: ranks that it takes for dead, until their next sign


class Store(NamedTuple):
    words: tuple[Word, ...] = ()
    first: int = 0  # words before it are deleted
    receipts: tuple[tuple[int, int, bool], ...] = ()  # rank, attempt, yes
    counts: tuple[tuple[int, int], ...] = ()  # attempt, number of receipts
    signs: tuple[int, ...] = ()  # words that each rank has read, as it has said
    is_gone: bool = False


class State(NamedTuple):
    store: Store
    archives: tuple[tuple[int, int, int], ...]  # attempt, rank, step
    manifests: tuple[tuple[int, tuple[int, ...]], ...]  # attempt, and the attempts whose archives it names, by rank
    ranks: tuple[Rank, ...]
    left: tuple[int, int, int]  # deaths, faults, alarms


class WordMove(NamedTuple):
    rank: int
    what: str
    then: State


def first_state(configuration: WordConfiguration) -> State:
    size = configuration.num_ranks
    left = configuration.deaths, configuration.faults, configuration.alarms
    return State(Store(signs=(0,) * size), (), (), (Rank(),) * size, left)


def sorted_ranks(state: State) -> State:
    """As it is: each rank has a plan of its own."""
    return state


def moves(configuration: WordConfiguration, state: State) -> list[WordMove]:
    processes = [Process(configuration, state, number) for number, rank in enumerate(state.ranks) if not rank.is_dead]
    found = [move for process in processes for move in process.moves()]
    if not found:
        found = [move for process in processes for move in process.deadlines()]
    if found and not state.store.is_gone and configuration.vanishes:
        gone = state._replace(store=state.store._replace(is_gone=True))
        found.append(WordMove(-1, "the store vanishes", gone))
    return found


class Process:
    """What one rank may do next."""

    def __init__(self, configuration: WordConfiguration, state: State, number: int) -> None:
        self.configuration, self.state, self.number = configuration, state, number
        self.rank, self.store = state.ranks[number], state.store
        self.plan, self.broken = configuration.plans[number], configuration.broken

    # --- moves ------------------------------------------------------------------------------------------------

    def moves(self) -> Iterator[WordMove]:
        yield from self._call()
        yield from self._arrive()
        yield from self._write()
        yield from self._alarmed()
        if not (self.rank.pipe or self.store.is_gone):  # the answer comes behind what was set
            if self.number:
                yield from self._read()
            else:
                yield from self._collect()
                yield from self._delete()
        if self.number == 0:
            yield from self._put()
        if self.state.left[0] and (self.rank.entries or self.rank.calls < len(self.plan)):
            left = (self.state.left[0] - 1, *self.state.left[1:])
            yield self._move("dies", self.rank._replace(is_dead=True), left=left)

    def _alarmed(self) -> Iterator[WordMove]:
        """This rank takes rank 0 for dead, which may only be slow."""
        if not (self.number and self.state.left[2]):
            return
        left = (*self.state.left[:2], self.state.left[2] - 1)
        for entry in self.rank.entries:
            if entry.at == "told":
                yield self._move("takes rank 0 for dead", self._end(self.rank, entry, self._looked(entry)), left=left)
            elif entry.at == "writing":
                rank = self._receipt(self._end(self.rank, entry, "failed"), entry, yes=False)
                yield self._move("takes rank 0 for dead", rank, left=left)

    def deadlines(self) -> Iterator[WordMove]:
        """What follows from silence, once nothing else can come."""
        for entry in self.rank.entries:
            if self.number == 0 and entry.at in ("durable", "collecting"):
                yield self._move("gives up on a rank", self._decide(self.rank, entry, "failed"))
            elif self.number and entry.at in ("open", "writing"):
                yield self._move("hears nothing", self._end(self.rank, entry, ALONE))
            elif self.number and entry.at == "told":
                yield self._move("looks at the manifest", self._end(self.rank, entry, self._looked(entry)))

    def _call(self) -> Iterator[WordMove]:
        """The training makes its next call, which waits until there is room."""
        rank = self.rank
        if rank.calls == len(self.plan) or len(rank.entries) > self.configuration.in_flight:
            return
        waits = rank.calls and self.plan[rank.calls - 1].waits
        if waits and any(entry.call == rank.calls - 1 for entry in rank.entries):
            return
        call = self.plan[rank.calls]
        entry = Entry(call.step, call.channel, rank.calls, call.fails)
        rank = rank._replace(calls=rank.calls + 1)
        if self.number:
            yield self._move(f"calls step {call.step}", self._matched(rank._replace(entries=(*rank.entries, entry))))
            return
        number = rank.read  # rank 0 counts the words that it has said
        is_begun = not (call.step == NO_STEP or call.fails or call.skips)
        ends = "" if is_begun else "skipped" if call.skips else "failed"
        word = Word("save", call.channel, call.step, number, ends)
        rank = rank._replace(read=number + 1, pipe=(*rank.pipe, ("word", word)))
        entry = entry._replace(attempt=number, at="writing")
        rank = rank._replace(entries=(*rank.entries, entry)) if is_begun else self._end(rank, entry, ends)
        yield self._move(f"calls step {call.step}", rank)

    def _arrive(self) -> Iterator[WordMove]:
        if not self.rank.pipe or self.store.is_gone:
            return
        (what, value), *rest = self.rank.pipe
        store = self.store
        if what == "word":
            store = store._replace(words=(*store.words, Word(*value)))
        elif what == "receipt":
            store = store._replace(receipts=tuple(sorted({*store.receipts, (self.number, *value)})))
        elif what == "count":
            counts = dict(store.counts)
            counts[value[0]] = counts.get(value[0], 0) + 1
            store = store._replace(counts=tuple(sorted(counts.items())))
        else:
            store = store._replace(signs=(*store.signs[: self.number], value[0], *store.signs[self.number + 1 :]))
        move = self._move(f"{what} arrives", self.rank._replace(pipe=tuple(rest)), store=store)
        first, *others = move.then.ranks
        if what == "sign" and self.number in first.taken:
            first = first._replace(taken=tuple(one for one in first.taken if one != self.number))
            move = move._replace(then=move.then._replace(ranks=(first, *others)))
        yield move

    def _write(self) -> Iterator[WordMove]:
        """This rank's archive becomes durable, or fails; and what follows on another rank is its receipt."""
        for entry in self.rank.entries:
            if entry.at != "writing":
                continue
            if self.state.left[1]:
                left = (self.state.left[0], self.state.left[1] - 1, self.state.left[2])
                failed = (
                    self._receipt(self._end(self.rank, entry, "failed"), entry, yes=False)
                    if self.number
                    else self._decide(self.rank, entry, "failed")
                )
                yield self._move("cannot write", failed, left=left)
            archives = tuple(sorted((*self.state.archives, (entry.attempt, self.number, entry.step))))
            at = "told" if self.number else "collecting"
            rank = self._with(self.rank, entry, entry._replace(at=at))
            if self.number:
                rank = self._receipt(rank, entry, yes=True)
            yield self._move("has written", rank, archives=archives)

    # --- another rank -----------------------------------------------------------------------------------------

    def _read(self) -> Iterator[WordMove]:
        rank, store = self.rank, self.store
        if rank.read >= len(store.words):
            return
        if rank.read < store.first:
            yield self._move("finds a word gone", self._left_out(rank))
            return
        word = store.words[rank.read]
        if self.broken == "one log, read in order" and word.kind == "save" and not self._may_match(word):
            return
        rank = rank._replace(read=rank.read + 1, pipe=(*rank.pipe, ("sign", (rank.read + 1,))))
        if word.kind == "save":
            rank = self._matched(rank._replace(pending=(*rank.pending, word)))
        else:
            rank = self._heard(rank, word)
        yield self._move(f"reads {word.kind}", rank)

    def _may_match(self, word: Word) -> bool:
        """In the broken protocol that matches before it reads on: whether there is an entry to compare with."""
        return any(entry.at == "open" and entry.channel == word.channel for entry in self.rank.entries)

    def _matched(self, rank: Rank) -> Rank:
        """Match the words of each channel to its entries, both in order."""
        while (found := self._next_match(rank)) is not None:
            word, entry = found
            if word is None:
                assert entry is not None
                rank = self._end(rank, entry, ALONE)
            elif entry is None:
                rank = self._refuse(self._without(rank, word), word)
            elif word.ends:
                rank = self._end(self._without(rank, word), entry, word.ends, word.attempt)
            elif NO_STEP in (word.step, entry.step) or entry.fails:
                rank = self._refuse(self._end(self._without(rank, word), entry, "failed", word.attempt), word)
            else:
                taken = entry._replace(at="writing", attempt=word.attempt)
                rank = self._with(self._without(rank, word), entry, taken)
                decided = [one for one in rank.pending if one.kind != "save" and one.attempt == word.attempt]
                for one in decided:
                    rank = self._heard(rank._replace(pending=tuple(p for p in rank.pending if p != one)), one)
        return rank

    def _next_match(self, rank: Rank) -> tuple[Word | None, Entry | None] | None:
        """The next word and entry of one call, or one of them that has none."""
        for channel in sorted({word.channel for word in rank.pending}):
            words = [word for word in rank.pending if word.kind == "save" and word.channel == channel]
            entries = [entry for entry in rank.entries if entry.at == "open" and entry.channel == channel]
            if not (words and entries):
                continue
            if self.broken == "words are matched by a count":
                return words[0], entries[0]
            for at, word in enumerate(words):
                for number, entry in enumerate(entries):
                    if word.step == entry.step or NO_STEP in (word.step, entry.step):
                        return (words[0], None) if at else (None, entries[0]) if number else (word, entry)
            if words[0].step < entries[0].step or self.broken == "a word above the entry is refused":
                return words[0], None
            return None, entries[0]
        return None

    def _heard(self, rank: Rank, word: Word) -> Rank:
        """What was decided of an attempt: for the entry that has it, or for the word that waits for an entry."""
        entry = next((one for one in rank.entries if one.attempt == word.attempt), None)
        if entry is not None:  # rank 0 does not know: each rank looks for itself
            return self._end(rank, entry, self._looked(entry) if word.kind == "undecided" else word.kind)
        if self.broken == "a decision ahead of its call is forgotten":
            return rank
        if any(one.kind == "save" and one.attempt == word.attempt for one in rank.pending):
            return rank._replace(pending=(*rank.pending, word))
        return rank

    def _left_out(self, rank: Rank) -> Rank:
        """It was taken for dead: it goes by the manifests, and by the words that are left."""
        for entry in rank.entries:
            if entry.at == "told":
                rank = self._end(rank, entry, self._looked(entry))
            elif entry.at != "open":
                rank = self._end(rank, entry, "undecided")
        return rank._replace(read=self.store.first, pending=())

    def _looked(self, entry: Entry) -> str:
        is_there = any(attempt == entry.attempt for attempt, _ in self.state.manifests)
        if self.broken == "no manifest is a no" and not is_there:
            return "failed"
        return "committed" if is_there else "undecided"

    def _refuse(self, rank: Rank, word: Word) -> Rank:
        """Say no, and forget what was decided."""
        rank = rank._replace(pending=tuple(one for one in rank.pending if one.attempt != word.attempt))
        return rank if word.ends else self._receipt(rank, word, yes=False)

    def _receipt(self, rank: Rank, of: Word | Entry, *, yes: bool) -> Rank:
        said = (("receipt", (of.attempt, yes)), *[("count", (of.attempt,))] * yes)
        if self.broken == "a count before its receipt":
            said = said[::-1]
        return rank._replace(pipe=(*rank.pipe, *said))

    # --- rank 0 -----------------------------------------------------------------------------------------------

    def _collect(self) -> Iterator[WordMove]:
        size = self.configuration.num_ranks
        for entry in self.rank.entries:
            if entry.at not in ("writing", "collecting"):
                continue
            there = {rank: yes for rank, attempt, yes in self.store.receipts if attempt == entry.attempt}
            if not all(there.values()):
                if self.broken != "refusals are not read":
                    yield self._move("sees a no", self._decide(self.rank, entry, "failed"))
                    continue
            elif self.state.left[2]:
                left = (*self.state.left[:2], self.state.left[2] - 1)
                for other in set(range(1, size)).difference(there):
                    taken = self.rank._replace(taken=(*self.rank.taken, other))
                    yield self._move("takes a rank for dead", self._decide(taken, entry, "failed"), left=left)
            is_counted = dict(self.store.counts).get(entry.attempt, 0) == size - 1
            is_all = is_counted or self.broken == "receipts are not awaited"
            if entry.at == "collecting" and is_all and self._is_first(entry):
                yield self._move("has all receipts", self._with(self.rank, entry, entry._replace(at="putting")))

    def _is_first(self, entry: Entry) -> bool:
        """Whether no earlier call of the channel is under way: steps are committed in order."""
        return not any(one.channel == entry.channel and one.call < entry.call for one in self.rank.entries)

    def _put(self) -> Iterator[WordMove]:
        for entry in self.rank.entries:
            if entry.at != "putting":
                continue
            there = {rank: attempt for rank, attempt, yes in self.store.receipts if attempt == entry.attempt and yes}
            names = (entry.attempt, *(there.get(rank, -1) for rank in range(1, self.configuration.num_ranks)))
            put = tuple(sorted((*self.state.manifests, (entry.attempt, names))))
            yield self._move("puts the manifest", self._decide(self.rank, entry, "committed"), manifests=put)
            if self.state.left[1]:
                left = (self.state.left[0], self.state.left[1] - 1, self.state.left[2])
                word = "failed" if self.broken == "a put without an answer is a no" else "undecided"
                unknown = self._decide(self.rank, entry, word)
                yield self._move("gets no answer to its put", unknown, left=left)
                yield self._move("gets no answer to a put that arrives", unknown, left=left, manifests=put)
                found = self._decide(self.rank, entry, "committed")
                yield self._move("gets no answer, and finds its put", found, left=left, manifests=put)

    def _decide(self, rank: Rank, entry: Entry, word: str) -> Rank:
        said = Word(word, entry.channel, entry.step, entry.attempt)
        rank = rank._replace(read=rank.read + 1, pipe=(*rank.pipe, ("word", said)))
        return self._end(rank, entry, word)

    def _delete(self) -> Iterator[WordMove]:
        """Words that every living rank has read."""
        lost = {*self.rank.taken, *(number for number, rank in enumerate(self.state.ranks) if rank.is_dead), 0}
        live = [sign for rank, sign in enumerate(self.store.signs) if rank not in lost]
        until = min(live, default=len(self.store.words))
        if self.broken == "a word is deleted unread":
            until = len(self.store.words)
        if until > self.store.first and self.configuration.in_flight:
            yield self._move("deletes words", self.rank, store=self.store._replace(first=until))

    # --- states -----------------------------------------------------------------------------------------------

    def _end(self, rank: Rank, entry: Entry, word: str, attempt: int | None = None) -> Rank:
        entries = tuple(one for one in rank.entries if one.call != entry.call)
        of = entry.attempt if attempt is None else attempt
        return rank._replace(entries=entries, said=(*rank.said, (entry.call, of, word)))

    def _with(self, rank: Rank, entry: Entry, now: Entry) -> Rank:
        return rank._replace(entries=tuple(now if one.call == entry.call else one for one in rank.entries))

    def _without(self, rank: Rank, word: Word) -> Rank:
        return rank._replace(pending=tuple(one for one in rank.pending if one != word))

    def _move(
        self,
        what: str,
        rank: Rank,
        *,
        store: Store | None = None,
        left: tuple[int, int, int] | None = None,
        archives: tuple[tuple[int, int, int], ...] | None = None,
        manifests: tuple[tuple[int, tuple[int, ...]], ...] | None = None,
    ) -> WordMove:
        state = self.state
        ranks = (*state.ranks[: self.number], rank, *state.ranks[self.number + 1 :])
        then = State(
            state.store if store is None else store,
            state.archives if archives is None else archives,
            state.manifests if manifests is None else manifests,
            ranks,
            state.left if left is None else left,
        )
        return WordMove(self.number, what, then)


# --- what holds -------------------------------------------------------------------------------------------------------


def violated(configuration: WordConfiguration, before: State | None, state: State) -> str | None:
    words: dict[int, set[str]] = {}
    for rank in state.ranks:
        for _, attempt, word in rank.said:
            if attempt >= 0:
                words.setdefault(attempt, set()).add(word)
    for rank in state.ranks[1:]:
        read = {word.attempt for word in state.store.words[: rank.read] if word.kind != "save"}
        if any(entry.attempt in read for entry in rank.entries):
            return INVARIANTS[4]
    there = dict(state.manifests)
    for attempt, said in words.items():
        if {"committed", "failed"} <= said:
            return INVARIANTS[0]
        if ("committed" in said and attempt not in there) or ("failed" in said and attempt in there):
            return INVARIANTS[1]
    for attempt, names in there.items():
        steps = {archive[1]: archive[2] for archive in state.archives if archive[0] == attempt}
        if set(names) != {attempt} or len(steps) < len(names) or len(set(steps.values())) > 1:
            return INVARIANTS[2]
    return None


def stuck(configuration: WordConfiguration, state: State) -> str | None:
    """What does not hold in a state from which no move leads on."""
    live = [number for number, rank in enumerate(state.ranks) if not rank.is_dead]
    for number in live:
        if len(state.ranks[number].said) != len(configuration.plans[number]):
            return INVARIANTS[4]
    for channel, step in configuration.common:
        for number in live:
            plan = configuration.plans[number]
            calls = {at for at, call in enumerate(plan) if (call.channel, call.step) == (channel, step)}
            if not any(call in calls and word == "committed" for call, _, word in state.ranks[number].said):
                return INVARIANTS[3]
    return None


def told(move: WordMove) -> str:
    who = "the store" if move.rank < 0 else f"rank {move.rank}"
    said = "; ".join(f"rank {n} says {list(rank.said)}" for n, rank in enumerate(move.then.ranks) if rank.said)
    return f"{who}: {move.what:36} {said}"
