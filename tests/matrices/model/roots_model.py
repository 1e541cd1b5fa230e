"""The commit of one save at two roots by several ranks, by either rule: what each rank may believe, and what it may delete.

In: a configuration. Out: states, the moves between them, and what does not hold in one. Knows nothing of: the order in which states are
looked at.

Each move is one call of one rank at one root, and may fail, arrive although it fails, or take for ever. There is one start and one attempt:
what follows from starts and rollbacks is in the model of one root. The store of the process group answers. Archives and receipts are puts of
one rank, which others see by the receipts alone; a rank that has crashed is one that moves no more.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

INVARIANTS: Final = (
    'a handle that says committed is right: at one root, or by the rule "all" at both',
    "what a rank takes for refused is committed at no root",
    "every archive that a manifest names is there",
    "each save comes to its end, and no rank waits for what has been said",
)


class RootsConfiguration(NamedTuple):
    """What is explored."""

    name: str
    num_ranks: int
    rule: str  # "all" or "any"
    faults: int = 0  # calls that fail, and waits that end
    lost: int = 0  # calls that arrive although they fail
    broken: str = ""  # how the protocol is changed, so that a violation must be found


class Root(NamedTuple):
    """What lies at one root, and what rank 0 has said of it by the store of the process group."""

    archives: tuple[int, ...] = ()
    receipts: tuple[tuple[int, bool], ...] = ()
    manifest: bool = False
    verdict: str = ""  # "no", or "elsewhere"
    said: str = ""  # the same, or "unknown"


class Part(NamedTuple):
    """One rank at one root: `RankPart`, with its `Delivery` and `Agreement`."""

    at: str = "write"
    is_durable: bool = False  # the archive
    error: str = ""  # "away", which the rule "any" does without; "unheard", likewise; or "refused"
    yes: bool = False
    may_have_said_yes: bool = False
    is_refused: bool = False  # it has heard so
    may_be_there: bool = False  # the manifest, as rank 0 knows
    is_committed: bool = False
    may_delete: bool = False


class Rank(NamedTuple):
    at: str = "saving"  # "saving", "ending" after an error, "late" once it is committed somewhere, "done"
    life: str = ""  # of the joint save: "committed", "refused", "left"
    said: str = ""  # by its handle
    parts: tuple[Part, Part] = (Part(), Part())


class State(NamedTuple):
    roots: tuple[Root, Root]
    ranks: tuple[Rank, ...]
    left: tuple[int, int]  # faults and lost answers that may still be


class RootsMove(NamedTuple):
    rank: int
    root: int
    what: str
    then: State


def first_state(configuration: RootsConfiguration) -> State:
    return State((Root(), Root()), (Rank(),) * configuration.num_ranks, (configuration.faults, configuration.lost))


def sorted_ranks(state: State) -> State:
    """Ranks other than 0 have one program: they are numbered anew, by what each has done."""

    def done(rank: int) -> tuple[object, ...]:
        there = [(rank in root.archives, [one for one in root.receipts if one[0] == rank]) for root in state.roots]
        return state.ranks[rank], [(is_there, [is_ok for _, is_ok in said]) for is_there, said in there]

    order = [0, *sorted(range(1, len(state.ranks)), key=done)]
    now = {before: number for number, before in enumerate(order)}
    roots = tuple(
        root._replace(
            archives=tuple(sorted(now[rank] for rank in root.archives)),
            receipts=tuple(sorted((now[rank], is_ok) for rank, is_ok in root.receipts)),
        )
        for root in state.roots
    )
    return State(roots, tuple(state.ranks[rank] for rank in order), state.left)


def moves(configuration: RootsConfiguration, state: State) -> list[RootsMove]:
    processes = [Process(configuration, state, number) for number in range(len(state.ranks))]
    found = [move for process in processes for move in process.moves()]
    found += _caught_up(state)
    if not found and configuration.rule == "any":
        # Ranks that miss different roots, each of which the save can do without: nobody has said a thing, and deadlines end it.
        found = [move for process in processes for move in process.deadlines()]
    return found


def _caught_up(state: State) -> list[RootsMove]:
    """`Lineage.catch_up_behind`: once rank 0 has done with it, the step is copied to the root that lacks it, and its manifest last."""
    there = [root.manifest for root in state.roots]
    if state.ranks[0].at != "done" or all(there) or not any(there):
        return []
    lacking = there.index(False)
    archives = tuple(range(len(state.ranks)))
    copied = state.roots[lacking]._replace(archives=archives, manifest=True)
    roots = (copied, state.roots[1]) if lacking == 0 else (state.roots[0], copied)
    return [RootsMove(-1, lacking, "catch up", state._replace(roots=roots))]


class Process:
    """What one rank may do next."""

    def __init__(self, configuration: RootsConfiguration, state: State, number: int) -> None:
        self.state, self.number, self.rank = state, number, state.ranks[number]
        self.is_any, self.broken = configuration.rule == "any", configuration.broken
        self.decides = number == 0

    def moves(self) -> Iterator[RootsMove]:
        rank = self.rank
        if rank.at == "done":
            return
        if rank.at == "saving" and (settled := self._settled()) is not None:
            yield self._move(0, "settle", settled)
            return
        for at, part in enumerate(rank.parts):
            if rank.at == "ending":
                yield from self._ends(at, part)
            elif part.at != "ended" and not part.is_committed:
                yield from getattr(self, f"_{part.at.replace(' ', '_')}")(at, part)

    def deadlines(self) -> Iterator[RootsMove]:
        for at, part in enumerate(self.rank.parts):
            if part.at == "collect":
                yield self._part(at, "collect in vain", part._replace(at="failed", error="away"))
            elif part.at == "hear":
                yield self._part(
                    at, "hear nothing", part._replace(at="failed", error="unheard"), life=self.rank.life or "left"
                )

    # --- the whole save: `Attempt` ---

    def _settled(self) -> Rank | None:
        """What `Attempt` makes of its parts; None as long as it waits."""
        rank = self.rank
        errors = [part.error for part in rank.parts if part.error]
        if any(not self._may_miss(error) for error in errors) or len(errors) == len(rank.parts):
            return rank._replace(at="ending", said="failed", life=rank.life or "left")
        arrived = [part.is_committed for part in rank.parts]
        if all(arrived) or (self.is_any and any(arrived)):
            return self._or_done(rank._replace(at="late", said="committed"))
        return None

    def _may_miss(self, error: str) -> bool:
        return self.is_any and error != "refused"

    def _or_done(self, rank: Rank) -> Rank:
        is_over = all(part.at == "ended" or part.is_committed for part in rank.parts)
        return rank._replace(at="done") if is_over else rank

    # --- one root ---

    def _write(self, at: int, part: Part) -> Iterator[RootsMove]:
        if self.rank.said:  # `arrive_late` waits for it, and then no more
            yield from self._fails(at, part, "away", "give up")
        yield self._puts_archive(at, part, "write")
        yield from self._fails(at, part._replace(at="copy"), "", "cannot write")

    def _copy(self, at: int, part: Part) -> Iterator[RootsMove]:
        """`Delivery._copy_from`: the place is back."""
        others = [other for number, other in enumerate(self.rank.parts) if number != at]
        if self.is_any and any(other.at not in ("write", "copy", "failed", "ended") for other in others):
            yield self._puts_archive(at, part, "copy")
            yield from self._fails(at, part, "away", "give up")
        elif not self.is_any or all(other.at in ("copy", "failed", "ended") for other in others):
            yield self._part(at, "give up", part._replace(at="failed", error="away"))

    def _puts_archive(self, at: int, part: Part, what: str) -> RootsMove:
        root = self.state.roots[at]
        archives = tuple(sorted({*root.archives, self.number}))
        return self._part(at, what, part._replace(at="say yes", is_durable=True), root._replace(archives=archives))

    def _say_yes(self, at: int, part: Part) -> Iterator[RootsMove]:
        if not self.is_any and any(other.at in ("write", "copy") for other in self.rank.parts):
            return  # it waits until the archive is durable everywhere
        root = self.state.roots[at]
        receipts = tuple(sorted({*root.receipts, (self.number, True)}))
        said = part._replace(at="collect" if self.decides else "hear", yes=True, may_have_said_yes=True)
        yield self._part(at, "say yes", said, root._replace(receipts=receipts))
        failed = part._replace(at="failed", error="away", may_have_said_yes=self.broken != "a lost yes is none")
        yield from self._fails(at, failed, "away", "cannot say yes")
        if self.state.left[1]:
            yield self._part(at, "say yes, unheard", failed, root._replace(receipts=receipts), lost=1)

    def _hear(self, at: int, part: Part) -> Iterator[RootsMove]:
        """`Agreement._heard`."""
        root, rank = self.state.roots[at], self.rank
        of_others = [other.verdict for number, other in enumerate(self.state.roots) if number != at]
        if root.manifest:
            changed = part._replace(at="heard", is_committed=True)
            yield self._part(at, "hear yes", changed, life=rank.life if self._is_decided else "committed")
        elif "no" in (root.verdict, root.said, *of_others):
            changed = part._replace(at="failed", error="refused", is_refused=True)
            yield self._part(at, "hear no", changed, life=rank.life if self._is_decided else "refused")
        elif "elsewhere" in (root.verdict, root.said):
            yield self._part(at, "hear elsewhere", part._replace(at="failed", error="away", is_refused=True))
        elif root.said == "unknown":
            yield self._part(at, "hear nothing", part._replace(at="failed", error="unheard"), life=rank.life or "left")
        else:
            yield from self._fails(at, part, "unheard", "hear nothing", life=rank.life or "left")

    def _collect(self, at: int, part: Part) -> Iterator[RootsMove]:
        """`Agreement._all_receipts`."""
        receipts = self.state.roots[at].receipts
        if any(not is_ok for _, is_ok in receipts) and self.broken != "refusals are not read":
            yield self._part(at, "collect a no", part._replace(at="failed", error="refused"))
        elif len({rank for rank, is_ok in receipts if is_ok}) == len(self.state.ranks):
            yield self._part(at, "collect", part._replace(at="commit"))
        else:
            if self.broken == "receipts are not awaited":
                yield self._part(at, "collect", part._replace(at="commit"))
            yield from self._fails(at, part, "away" if self.is_any else "refused", "collect in vain")

    def _commit(self, at: int, part: Part) -> Iterator[RootsMove]:
        """`StepTarget.commit`; one root after the other, and where one of them has it, as a late commit."""
        others = [other for number, other in enumerate(self.rank.parts) if number != at]
        if not self.is_any and (
            any(other.at in ("write", "copy", "say yes", "collect") for other in others)
            or (at == 1 and not others[0].is_committed)
        ):
            return
        root = self.state.roots[at]
        known = part._replace(at="committed", is_committed=True, may_be_there=True)
        yield self._part(at, "put manifest", known, root._replace(manifest=True), life="committed")
        failed = part._replace(may_be_there=self.broken != "a manifest that may be there is not")
        yield from self._fails(at, failed, "away", "cannot put manifest")
        yield from self._fails(at, part, "away", "no room for the manifest")
        if self.state.left[1]:
            failed = failed._replace(at="failed", error="away")
            yield self._part(at, "put manifest, unheard", failed, root._replace(manifest=True), lost=1)
        if self.rank.said == "committed":  # `Delivery._commit_late` tries again for some time, and then no more
            yield self._part(at, "give up", part._replace(at="failed", error="away"))

    def _failed(self, at: int, part: Part) -> Iterator[RootsMove]:
        """Nothing but the end is left here: once the save is committed elsewhere, `arrive_late` refuses."""
        if self.rank.said == "committed":
            yield from self._refuse(at, part)

    # --- the end ---

    def _ends(self, at: int, part: Part) -> Iterator[RootsMove]:
        """`Attempt.__aexit__`: each root is told, one after the other, and then what may go is taken back."""
        parts = self.rank.parts
        if part.at == "take back":
            if all(other.at in ("take back", "ended") for other in parts):
                yield self._take_back(at, part)
        elif part.at != "ended" and all(other.at in ("take back", "ended") for other in parts[:at]):
            yield from self._refuse(at, part)

    def _take_back(self, at: int, part: Part) -> RootsMove:
        root = self.state.roots[at]
        if part.may_delete and part.is_durable:
            root = root._replace(archives=tuple(one for one in root.archives if one != self.number))
        return self._part(at, "take back", part._replace(at="ended"), root)

    def _refuse(self, at: int, part: Part) -> Iterator[RootsMove]:
        """`Agreement.refuse`."""
        following = "take back" if self.rank.at == "ending" else "ended"
        if self.decides:
            yield from self._decides_no(at, part._replace(at=following))
            return
        is_committed = self.rank.life == "committed" and self.broken != "what is committed elsewhere is deleted"
        ended = part._replace(at=following, may_delete=not is_committed)
        if part.yes:
            kept = ended._replace(may_delete=ended.may_delete and self._is_decided)
            yield self._part(at, "leave", kept)
        elif part.is_refused:
            yield self._part(at, "leave", ended)
        else:
            root = self.state.roots[at]
            receipts = tuple(sorted({*root.receipts, (self.number, False)}))
            kept = ended._replace(may_delete=ended.may_delete and not part.may_have_said_yes)
            yield self._part(at, "say no", kept, root._replace(receipts=receipts))

    def _decides_no(self, at: int, ended: Part) -> Iterator[RootsMove]:
        root, parts, rank = self.state.roots[at], self.rank.parts, self.rank
        is_committed = rank.life == "committed"
        if ended.may_be_there or (any(other.may_be_there for other in parts) and not is_committed):
            if is_committed and not ended.is_committed:
                root = root._replace(said="elsewhere")
            elif not is_committed:
                root = root._replace(said="unknown")
            yield self._part(at, "leave", ended, root)
            return
        word = "elsewhere" if is_committed else "no"
        told = root._replace(verdict=root.verdict or word, said=word)
        ended = ended._replace(may_delete=not is_committed)
        life = rank.life if self._is_decided else "refused"
        yield self._part(at, "say no", ended, told, life=life)
        if self.state.left[0]:
            yield self._part(at, "say no to the group", ended, root._replace(said=word), life=life, faults=1)

    # --- moves ---

    @property
    def _is_decided(self) -> bool:
        return self.rank.life in ("committed", "refused")

    def _fails(self, at: int, part: Part, error: str, what: str, life: str | None = None) -> Iterator[RootsMove]:
        if self.state.left[0]:
            failed = part._replace(at="failed", error=error) if error else part
            yield self._part(at, what, failed, life=life, faults=1)

    def _part(
        self,
        at: int,
        what: str,
        part: Part,
        root: Root | None = None,
        *,
        life: str | None = None,
        faults: int = 0,
        lost: int = 0,
    ) -> RootsMove:
        parts = (*self.rank.parts[:at], part, *self.rank.parts[at + 1 :])
        rank = self.rank._replace(parts=parts, life=self.rank.life if life is None else life)
        return self._move(at, what, self._or_done(rank) if rank.said else rank, root, faults, lost)

    def _move(
        self, at: int, what: str, rank: Rank, root: Root | None = None, faults: int = 0, lost: int = 0
    ) -> RootsMove:
        state = self.state
        roots = state.roots if root is None else (*state.roots[:at], root, *state.roots[at + 1 :])
        ranks = (*state.ranks[: self.number], rank, *state.ranks[self.number + 1 :])
        left = state.left[0] - faults, state.left[1] - lost
        return RootsMove(self.number, at, what, State(roots, ranks, left))


# --- what must hold ---------------------------------------------------------------------------------------------


def violated(configuration: RootsConfiguration, before: State | None, state: State) -> str | None:
    """The first invariant that does not hold."""
    there = [root.manifest for root in state.roots]
    is_committed = all(there) if configuration.rule == "all" else any(there)
    for rank in state.ranks:
        if rank.said == "committed" and not is_committed:
            return INVARIANTS[0]
        if rank.life == "refused" and any(there):
            return INVARIANTS[1]
    for root in state.roots:
        if root.manifest and len(root.archives) < configuration.num_ranks:
            return INVARIANTS[2]
    return None


def stuck(state: State) -> str | None:
    """The invariant of progress, of a state from which no move leads on."""
    return None if all(rank.at == "done" for rank in state.ranks) else INVARIANTS[3]


def told(move: RootsMove) -> str:
    """A move for people."""
    have = ["manifest" if root.manifest else root.verdict or root.said or "nothing" for root in move.then.roots]
    who = "a later start" if move.rank < 0 else f"rank {move.rank}"
    return f"{who}, root {move.root + 1}: {move.what:26} roots: {have[0]}, {have[1]}"
