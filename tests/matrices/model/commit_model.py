"""The commit of a save by several ranks, as steps between which any other process may take any number of its own.

In: a state. Out: the states that follow. Knows nothing of: the order in which states are looked at, what must hold in them, and what ranks
say to each other (`word_model`): receipts come or do not, and a rank hears what rank 0 has decided, or hears nothing and goes by the
manifest.

Each step makes at most one change to storage, and is named by the function of the library that it stands for (`STANDS_FOR`). Reads that
follow one listing are taken for one moment. There is one root, whose listings show at once what is written unless a configuration is
`slow`; there is no `overwrite`, no journal, no sweep, no put that fails and arrives all the same, and a rank has one save under way. A
process that has crashed is one that takes no step any more. It needs no steps of its own: what must hold is said of storage and of handles
alone, and storage after a crash is storage while that process sleeps. So all crashes, and all processes that wake late, are among the
orders.

Two savings leave out no state that an invariant tells apart. An archive has a name of its own, and nothing looks at it before the manifest;
so putting it commutes with each step of every other process, and where a process can do so, only that step is taken (a persistent set of one
step, in a graph without cycles). Ranks other than 0 of one start have the same program, and are kept sorted.
"""

from collections.abc import Iterator
from typing import Final, NamedTuple

from async_ckpt.core.ranks.agreement import Agreement
from async_ckpt.core.ranks.calls import Calls
from async_ckpt.core.runs.receipts import Exchange
from async_ckpt.core.runs.root import Root
from async_ckpt.core.runs.run import Run
from async_ckpt.core.runs.sweep import Sweeper
from async_ckpt.core.runs.tenure import Tenure
from async_ckpt.core.runs.trackers import Announcer
from async_ckpt.core.storage.interface import Storage

from .commit_state import Attempt, Configuration, Manifest, Rank, Seen, Start, State, Store, line_of, retired_by

STANDS_FOR: Final = {
    "restore": Run.latest,
    "check": Run.check,
    "list starts": Tenure.take,
    "put start": Tenure._put,
    "list commits": Root.see,
    "new version": Root.make_new_version,
    "help": Tenure._put_seen,
    "put seen": Tenure._put_seen,
    "check again": Run.check,
    "put archive": Storage.create,
    "collect": Agreement._all_receipts,
    "give up": Agreement._raise_missing,
    "look": Run.check_taken,
    "rename": Root.finish_rollbacks,
    "end rollback": Root.finish_rollbacks,
    "put intent": Run._announce,
    "look for the intent": Run.check_taken,
    "put intent to replace": Run._announce,
    "look to replace": Run.check_taken,
    "replace manifest": Run._put,
    "put manifest": Run._put,
    "look again": Run.look_again,
    "finish": Root.finish_rollbacks,
    "rename out": Root.retire,
    "read tracker": Announcer._read_tracker,
    "put tracker": Announcer._track,
    "look before deleting": Run.check_taken,
    "delete": Sweeper.delete,
    "look after deleting": Run._needed_of,
    "put back": Sweeper.delete,
    "refuse": Agreement._refuse_for_all,
    "hear": Calls._note_decision,
    "hear nothing": Exchange.manifest,
}


class Move(NamedTuple):
    start: int
    rank: int
    what: str
    then: State
    is_private: bool = False


class Outcome(NamedTuple):
    """Of one step of one process."""

    what: str
    store: Store
    rank: Rank
    is_fault: bool = False


# --- the moves --------------------------------------------------------------------------------------------------


def moves(configuration: Configuration, state: State) -> list[Move]:
    """All that may come next; or one private step, which commutes with all others."""
    found: list[Move] = []
    for start, ranks in enumerate(state.starts):
        for rank, one in enumerate(ranks):
            if one.at == "done":
                continue
            process = Process(configuration, state, start, rank)
            is_private = process.is_private
            for outcome in process.outcomes():
                changed = (*ranks[:rank], outcome.rank, *ranks[rank + 1 :])
                starts = (*state.starts[:start], changed, *state.starts[start + 1 :])
                then = State(outcome.store, starts, state.faults - outcome.is_fault, state.slow)
                found.append(Move(start, rank, outcome.what, then, is_private))
                if is_private:
                    return found[-1:]
                found += _hidden(configuration, state.store, found[-1])
    if state.store.hidden:
        found.append(Move(-1, 0, "show", state._replace(store=state.store._replace(hidden=()))))
    return found


def _hidden(configuration: Configuration, before: Store, move: Move) -> list[Move]:
    """The same move, if it has put what listings may show late, and they do."""
    then = move.then
    put: set[Start | Manifest] = (
        set(then.store.starts).difference(before.starts)
        if configuration.slow == "starts"
        else set(then.store.manifests).difference(before.manifests)
    )
    if not (then.slow and put):
        return []
    store = then.store._replace(hidden=tuple(sorted(put)))
    return [move._replace(then=then._replace(store=store, slow=then.slow - 1))]


def sorted_ranks(state: State) -> State:
    """The same state with ranks of equal programs in one order."""
    return state._replace(starts=tuple((ranks[0], *sorted(ranks[1:], key=_order)) for ranks in state.starts))


def _order(rank: Rank) -> tuple[object, ...]:
    return rank[:3] + rank[4:]


class Process:
    """What one rank of one start may do next. Methods are named as the places in `Rank.at`."""

    def __init__(self, configuration: Configuration, state: State, start: int, rank: int) -> None:
        self.configuration, self.state, self.start, self.number = configuration, state, start, rank
        self.ranks = state.starts[start]
        self.rank, self.store = self.ranks[rank], state.store
        self.shown = self.store.listed_by(start)  # by listings
        self.plan, self.broken = configuration.plans[start], configuration.broken

    @property
    def is_private(self) -> bool:
        if self.broken:
            return False
        if self.number and self.rank.at == "restore":
            return self.ranks[0].at != "restore"  # it copies what does not change any more
        return self.rank.at == "put archive"

    @property
    def step(self) -> int:
        return max(1, self.rank.base + self.plan[self.rank.save])

    @property
    def attempt(self) -> Attempt:
        number = self.rank.begun.count(self.step)
        return Attempt(self.start, self.step, 0 if self.broken == "attempts keep their name" else number)

    def outcomes(self) -> Iterator[Outcome]:
        place = self.rank.at.replace(" ", "_")
        yield from getattr(self, f"{'other' if self.number else 'zero'}_{place}")()

    def goes(self, at: str, store: Store | None = None, *, what: str = "", **changes: object) -> Outcome:
        rank = self.rank._replace(at=at, **changes)  # type: ignore[arg-type]
        return Outcome(what or self.rank.at, store or self.store, rank)

    def ends(self, word: str, store: Store | None = None, *, what: str = "", rank: Rank | None = None) -> Outcome:
        """The save ends, by this word of the handle."""
        rank, attempt, step = rank or self.rank, self.attempt, self.step
        rank = rank._replace(
            save=rank.save + 1,
            begun=(*rank.begun, step),
            said=(*rank.said, (attempt, word)),
            seen=Seen(),
        )
        rank = rank._replace(at=self._begins(rank))
        if word == "refused" and attempt in rank.archives:  # `discard`
            rank = rank._replace(archives=tuple(one for one in rank.archives if one != attempt))
        return Outcome(what or self.rank.at, store or self.store, rank)

    def _begins(self, rank: Rank) -> str:
        """Where a rank begins its next save."""
        if rank.save == len(self.plan):
            return "done"
        return "hear" if self.number else "check"

    @property
    def is_taken(self) -> bool:
        """`Tenure.refuse_if_later`."""
        own = self.rank.own
        return own is not None and any(own.is_before(start) for start in self.shown.starts)

    @property
    def is_overtaken(self) -> bool:
        """`Run.look_again`, on any rank: rank 0 has told the others the token of its start."""
        if self.broken == "rank 0 alone looks after the manifest":
            return False
        own = max((start for start in self.shown.starts if start.token == self.start), default=None)
        return not self._is_seen(own)

    def _is_seen(self, own: Start | None) -> bool:
        later = self.shown.later_than(own)
        if self.broken == "a start that has seen nothing yet is none":
            later = [start for start in later if start in dict(self.shown.seen)]
        return self.shown.has_seen(later, self.attempt)

    def listed(self, **more: object) -> Seen:
        seen = Seen(tuple(one.step for one in self.shown.manifests), self.store.intents)
        return seen._replace(**more)  # type: ignore[arg-type]

    # --- rank 0, up to its receipt ---

    def zero_restore(self) -> Iterator[Outcome]:
        counted = line_of(self.shown, self.broken)
        yield self.goes("check", base=counted[-1].step if counted else 0)

    def zero_check(self) -> Iterator[Outcome]:
        must_take = self.rank.own is None or self.rank.own.first > self.step
        yield self.goes("refuse" if self._is_refused() else "list starts" if must_take else "put archive")

    def _is_refused(self) -> bool:
        counted = [one.step for one in line_of(self.shown, self.broken, self.rank.own)]
        is_behind = bool(counted) and counted[-1] > self.step and not self.configuration.retire
        return self.is_taken or self.step in counted or is_behind

    def zero_list_starts(self) -> Iterator[Outcome]:
        if self.is_taken:
            yield self.goes("refuse")
        else:
            number = 1 + max((start.number for start in self.shown.starts), default=0)
            seen = self._looked(Seen(number=number, first=self.step))
            lists = self.broken == "commits are listed before the start is put"
            yield self.goes("put start", seen=seen if lists else Seen(number=number, first=self.step))

    def zero_put_start(self) -> Iterator[Outcome]:
        seen = self.rank.seen
        new = Start(seen.number, self.start, seen.first)
        store = self.store._replace(starts=tuple(sorted({*self.store.starts, new})))
        lists = self.broken == "commits are listed before the start is put"
        yield self.goes("put seen" if lists else "list commits", store)

    def zero_list_commits(self) -> Iterator[Outcome]:
        intents = self.store.intents
        yield self.goes("new version", seen=self.rank.seen._replace(intents=intents)) if intents else self._sees()

    def zero_new_version(self) -> Iterator[Outcome]:
        """`Root.make_new_version`, of each step that an intent announces; then all is listed again."""
        intent, *left = self.rank.seen.intents
        there, store = self.store.at(intent.step), self.store
        if there is not None:
            version = 1 + max(one.version for one in store.put)
            others = [one for one in store.manifests if one != there]
            made = there._replace(version=version + there.version)
            store = store._replace(manifests=tuple(sorted([*others, made])))
        seen = self.rank.seen._replace(intents=tuple(left))
        yield self.goes("new version", store, seen=seen) if left else self._sees(store)

    def _looked(self, seen: Seen) -> Seen:
        return seen._replace(saw=tuple(one.attempt for one in line_of(self.shown, self.broken, self.rank.own)))

    def _sees(self, store: Store | None = None) -> Outcome:
        new = Start(self.rank.seen.number, self.start, self.rank.seen.first)
        if self.shown.later_than(self.rank.own or new):
            if self.rank.own is not None:
                store = self.store._replace(starts=tuple(one for one in self.store.starts if one != new))
            return self.goes("refuse", store, seen=Seen())
        told = dict(self.shown.seen)
        helps = tuple(start for start in self.shown.starts if start < new and start not in told)
        seen = self._looked(self.rank.seen)._replace(helps=helps)
        return self.goes("help" if helps else "put seen", store, seen=seen)

    def zero_help(self) -> Iterator[Outcome]:
        start, *left = self.rank.seen.helps
        seen = self.rank.seen._replace(helps=tuple(left))
        yield self.goes("help" if left else "put seen", self._with_seen(start), seen=seen)

    def _with_seen(self, start: Start) -> Store:
        if start in dict(self.store.seen):
            return self.store
        return self.store._replace(seen=tuple(sorted([*self.store.seen, (start, self.rank.seen.saw)])))

    def zero_put_seen(self) -> Iterator[Outcome]:
        own = Start(self.rank.seen.number, self.start, self.rank.seen.first)
        if own in dict(self.store.seen):
            yield self.goes("refuse", seen=Seen())
        else:
            yield self.goes("check again", self._with_seen(own), own=own, seen=Seen())

    def zero_check_again(self) -> Iterator[Outcome]:
        yield self.goes("refuse" if self._is_refused() else "put archive")

    def zero_put_archive(self) -> Iterator[Outcome]:
        yield self.goes("collect", archives=(*self.rank.archives, self.attempt))

    def zero_collect(self) -> Iterator[Outcome]:
        """The receipts of the other ranks, which the model of words has: they come, or one does not."""
        skips = self.broken == "no look before the manifest"
        seen = self.listed() if skips else Seen()
        yield self.goes("rename" if skips else "look", seen=seen, is_late=self.is_taken)
        if self.state.faults:
            yield self.goes("refuse", what="give up")._replace(is_fault=True)

    # --- rank 0, the commit ---

    def zero_look(self) -> Iterator[Outcome]:
        yield self.goes("refuse") if self.is_taken else self.goes("rename", seen=self.listed())

    def zero_rename(self) -> Iterator[Outcome]:
        """What an earlier rollback has left is brought to its end."""
        seen = self.rank.seen
        is_behind = self.configuration.retire and bool(seen.steps) and seen.steps[-1] > self.step
        if is_behind or seen.intents:
            yield self.goes("end rollback", seen=self.listed())
        else:
            yield from self._intend(seen)

    def zero_end_rollback(self) -> Iterator[Outcome]:
        store = self._one_more_retired()
        if store is None:
            yield from self._intend(self.rank.seen)
        else:
            yield self.goes("end rollback", store)

    def _one_more_retired(self) -> Store | None:
        """`Root.finish_rollbacks`, one change at a time; None once there is none to come."""
        for intent in self.rank.seen.intents:
            own = self.store.at(intent.step)
            if own is None or own.attempt != intent or intent not in self.store.intents:
                continue
            by = next((start for start in self.shown.starts if start[:2] == (own.number, own.token)), None)
            if not self.shown.has_seen(self.shown.later_than(by), intent):
                continue
            left = [one for one in self.store.manifests if one.attempt in own.retires]
            if left:
                return _renamed(self.store, left[-1])
            return self.store._replace(intents=tuple(one for one in self.store.intents if one != intent))
        return None

    def _retires(self, seen: Seen) -> tuple[Attempt, ...]:
        if not self.configuration.retire:
            return ()
        return tuple(one.attempt for one in self.shown.manifests if one.step in seen.steps and one.step > self.step)

    def _intend(self, seen: Seen) -> Iterator[Outcome]:
        """`Run.commit`, up to the manifest: of a rollback, it puts the intent first."""
        retires = self._retires(seen)
        what = "put intent" if retires else self.rank.at
        if not retires or self.broken == "rollbacks without an intent":
            yield self.goes("put manifest", what=what)
            return
        intents = tuple(sorted({*self.store.intents, self.attempt}))
        yield self.goes("look for the intent", self.store._replace(intents=intents), what=what, seen=seen)

    def zero_look_for_the_intent(self) -> Iterator[Outcome]:
        yield self.ends("taken") if self.is_taken else self.goes("put manifest")

    def zero_put_manifest(self) -> Iterator[Outcome]:
        there = self.store.at(self.step)
        if there is None or self.broken == "manifests are put without a condition":
            yield self.goes("look again", self._with_manifest())
        elif there in line_of(self.shown, self.broken, self.rank.own):
            yield self.goes("refuse")
        else:
            is_told = self.broken != "what does not count is replaced without an intent"
            at = "put intent to replace" if is_told else "replace manifest"
            yield self.goes(at, seen=self.rank.seen._replace(going=(there,)))

    def zero_put_intent_to_replace(self) -> Iterator[Outcome]:
        intents = tuple(sorted({*self.store.intents, self.attempt}))
        yield self.goes("look to replace", self.store._replace(intents=intents))

    def zero_look_to_replace(self) -> Iterator[Outcome]:
        yield self.ends("taken") if self.is_taken else self.goes("replace manifest")

    def zero_replace_manifest(self) -> Iterator[Outcome]:
        there, store = self.store.at(self.step), self.store
        if there is None or (there,) != self.rank.seen.going:
            yield self.goes("refuse")
            return
        replaced = tuple(sorted({*store.replaced, there.attempt}))
        yield self.goes("look again", self._with_manifest()._replace(replaced=replaced))

    def _with_manifest(self) -> Store:
        store, own = self.store, self.rank.own
        assert own is not None
        made = Manifest(self.step, self.attempt, own.token, self._retires(self.rank.seen), own.number)
        others = [one for one in store.manifests if one.step != self.step]
        return store._replace(manifests=tuple(sorted([*others, made])), put=(*store.put, made))

    def zero_look_again(self) -> Iterator[Outcome]:
        sees = not self._is_seen(self.rank.own) and self.broken != "no look after the manifest"
        yield self.ends("taken") if sees else self._acknowledged(self.store)

    def _acknowledged(self, store: Store) -> Outcome:
        counted = line_of(self.shown, self.broken, self.rank.own)
        newest = counted[-1].step if counted else self.step  # a later start may have gone on, or gone back
        rank = self.rank._replace(said=(*self.rank.said, (self.attempt, "committed")), seen=self.listed(number=newest))
        return Outcome(self.rank.at, store, rank._replace(at="finish" if store.intents else "read tracker"))

    def _after(self, outcome: Outcome) -> Outcome:
        """The save has ended, and its word was said before."""
        rank = outcome.rank._replace(said=outcome.rank.said[:-1])
        return self.ends("committed", outcome.store, what=outcome.what, rank=rank)

    # --- rank 0, after the commit ---

    def zero_finish(self) -> Iterator[Outcome]:
        store = self._one_more_retired()
        yield self.goes("read tracker") if store is None else self.goes("finish", store)

    def zero_read_tracker(self) -> Iterator[Outcome]:
        store, newest = self.store, self.rank.seen.number
        may_move = store.tracker <= newest or (
            store.at(store.tracker) is None and any(one.step == store.tracker for one in store.renamed)
        )
        if may_move:
            yield self.goes("put tracker", seen=self.rank.seen._replace(tracker=(store.tracker, store.version)))
        else:
            yield self._retain(self.goes("read tracker"))

    def zero_put_tracker(self) -> Iterator[Outcome]:
        seen, store = self.rank.seen, self.store
        if store.version != seen.tracker[1] and self.broken != "the tracker is put without a condition":
            yield self.goes("read tracker")
            return
        moved = store._replace(tracker=seen.number, version=store.version + 1)
        yield self._retain(self.goes("put tracker", moved))

    def _retain(self, outcome: Outcome) -> Outcome:
        """`Run.retain`: what does not count is renamed first."""
        shown = outcome.store.listed_by(self.start)
        counted = line_of(shown, self.broken, self.rank.own)
        retired = retired_by(counted, shown.intents)
        out = [
            one
            for one in shown.manifests
            if one not in counted and one.attempt not in retired and one.step in self.rank.seen.steps
        ]
        if out:
            seen = self.rank.seen._replace(going=tuple(out))
            return outcome._replace(rank=outcome.rank._replace(at="rename out", seen=seen))
        return self._delete(outcome)

    def zero_rename_out(self) -> Iterator[Outcome]:
        *left, out = self.rank.seen.going
        there = self.store.at(out.step)
        is_there = there is not None and there.attempt == out.attempt
        store = _renamed(self.store, there) if is_there and there is not None else self.store
        outcome = self.goes("rename out", store, seen=self.rank.seen._replace(going=tuple(left)))
        yield outcome if left else self._delete(outcome)

    def _delete(self, outcome: Outcome) -> Outcome:
        """`Run.retain`: which steps are to go."""
        keep = self.configuration.keep
        counted = line_of(outcome.store.listed_by(self.start), self.broken, self.rank.own)
        steps = [one.step for one in counted if one.step in self.rank.seen.steps]
        doomed = [step for step in steps if step < self.step][: max(0, len(steps) - keep)] if keep else []
        if not doomed:
            return self._after(outcome)
        at = "delete" if self.broken == "no look before deleting" else "look before deleting"
        going = tuple(one for one in outcome.store.manifests if one.step in doomed)
        seen = Seen(tuple(doomed), going=going)
        return outcome._replace(rank=outcome.rank._replace(at=at, seen=seen))

    def zero_look_before_deleting(self) -> Iterator[Outcome]:
        outcome = self.goes("delete")
        yield self._after(outcome) if self.is_taken else outcome

    def zero_delete(self) -> Iterator[Outcome]:
        *left, going = self.rank.seen.steps
        manifest = self.store.at(going)
        seen, store = self.rank.seen, self.store
        if manifest is not None:
            manifests = tuple(one for one in store.manifests if one != manifest)
            store = store._replace(manifests=manifests, deleted=tuple(sorted({*store.deleted, manifest.attempt})))
        yield self.goes("delete" if left else "look after deleting", store, seen=seen._replace(steps=tuple(left)))

    def zero_look_after_deleting(self) -> Iterator[Outcome]:
        seen = self.rank.seen
        if self.is_taken and seen.going:
            yield self.goes("put back")
        else:
            yield self._after(self.goes("look after deleting"))

    def zero_put_back(self) -> Iterator[Outcome]:
        seen, store = self.rank.seen, self.store
        manifest, *left = seen.going
        if store.at(manifest.step) is None:
            store = store._replace(manifests=tuple(sorted([*store.manifests, manifest])))
        outcome = self.goes("put back", store, seen=seen._replace(going=tuple(left)))
        yield outcome if left else self._after(outcome)

    def zero_refuse(self) -> Iterator[Outcome]:
        yield self.ends("refused")

    # --- the other ranks ---

    def other_restore(self) -> Iterator[Outcome]:
        zero = self.ranks[0]
        if zero.at != "restore":
            yield self.goes("hear", base=zero.base)

    def other_hear(self) -> Iterator[Outcome]:
        """Rank 0 says what it has decided, once it has; a rank that hears nothing goes by the manifest."""
        word = dict(self.ranks[0].said).get(self.attempt)
        if word in ("committed", "refused"):
            yield self.ends(word)
        if word == "taken" or self.state.faults:
            manifest = self.store.at(self.step)
            is_there = manifest is not None and manifest.attempt == self.attempt
            outcome = self.goes("look again") if is_there else self.ends("undecided")
            yield outcome._replace(what="hear nothing", is_fault=word != "taken")

    def other_look_again(self) -> Iterator[Outcome]:
        yield self.ends("undecided" if self.is_overtaken else "committed")


def _renamed(store: Store, one: Manifest) -> Store:
    """`Root._retire`, which compares what it has renamed with what it has read."""
    left = tuple(other for other in store.manifests if other != one)
    return store._replace(manifests=left, renamed=tuple(sorted({*store.renamed, one.attempt})))
