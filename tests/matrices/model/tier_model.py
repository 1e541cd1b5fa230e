"""Tiers: a save is committed at one place, and a mover in the process copies the newest step to the next one.

In: a configuration. Out: states, and the moves between them. Knows nothing of: the order in which states are looked at, ranks (a start is
one process here), what must hold (`tier_invariants`).

A process lists its places from near to far, one after the other, and goes on from the newest step of those that answer. It commits each
save at the first place that answers. Before it first writes at a place, it takes it: it lists the starts, puts the file of its own start,
lists starts and commits, and puts `.seen`. The file has the line of the start, which is each start that it goes on from with the last step
of it, and the starts that it has found. A start that finds itself among those is taken. A commit that counts at a place, of no start of the
line or above the last step of one, is a conflict, and nothing is written there. What was put after a start had listed the commits was not
acknowledged there: it is no conflict.

The mover copies the newest acknowledged step of the nearer places to the next one, only forward, and takes that place before. A moved
manifest counts as a commit of the start that has moved it. A process that goes back to a lower step is another start from then on, with a
token of its own. Nothing is moved before a manifest has retired the steps above, its own saves that have failed among them, and later
manifests name them until each place has one that does.

The library does not follow all of this yet: its starts name all that they found as ancestors, without last steps; a rollback stays the
start that it was, and what it retired is known by the renamed manifests of the nearer places.

Each move is one call at one place. A call to a silent place fails, or arrives although it fails. A process that is killed is one that moves
no more. An archive and its manifest are one move where nobody can tell; a retention is one, with a look at the starts.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from .tier_restore import is_own, newest_of, restored
from .tier_state import (
    NUM_TOKENS,
    UNLISTED,
    Ancestor,
    Attempt,
    Entry,
    Place,
    Process,
    Start,
    State,
    Task,
    TierConfiguration,
    awake,
    by_id,
    changed,
    counting,
    found_with,
    history,
    line_to,
)


class TierMove(NamedTuple):
    start: int  # -1: the place
    place: int
    what: str
    then: State


def moves(configuration: TierConfiguration, state: State) -> list[TierMove]:
    numbers = awake(configuration, state.processes)
    found = [move for number in numbers for move in Actor(configuration, state, number).moves()]
    return found + list(_of_places(configuration, state))


def _of_places(configuration: TierConfiguration, state: State) -> Iterator[TierMove]:
    for place in state.away:
        away = tuple(one for one in state.away if one != place)
        yield TierMove(-1, place, "answers again", state._replace(away=away))
    if all(state.processes[number].at == "done" for number in awake(configuration, state.processes)):
        return
    for place, left in enumerate(state.left):
        if left and place not in state.away:
            silent = tuple(sorted((*state.away, place)))
            then = state._replace(away=silent, left=changed(state.left, place, left - 1))
            yield TierMove(-1, place, "falls silent", then)
    lost = configuration.loses
    if lost < 0 or state.loss == "lost":
        return
    if configuration.is_old and not state.loss:
        yield TierMove(-1, lost, "is copied", state._replace(copy=state.places[lost], loss="copied"))
        return
    places = (*state.places[:lost], state.copy, *state.places[lost + 1 :])
    kept = {one for entry in counting(state.copy, state.made) for one in history(state.made, entry.attempt)}
    gone = tuple(one.id for one in state.made if one.id not in kept)
    what = "is replaced by its copy" if configuration.is_old else "is replaced by an empty one"
    yield TierMove(-1, lost, what, state._replace(places=places, copy=Place(), loss="lost", gone=gone))


class Actor:
    """What one process may do next. Methods are named as the places in `Task.at`."""

    def __init__(self, configuration: TierConfiguration, state: State, number: int) -> None:
        self.configuration = configuration
        self.state, self.index, self.process = state, number, state.processes[number]
        self.plan, self.order = configuration.plans[number], configuration.places[number]
        self.token, self.keep, self.broken = self.process.token, configuration.keep, configuration.broken
        self.made = by_id(state.made)

    def moves(self) -> Iterator[TierMove]:
        if self.process.at == "restore":
            yield self._restore()
        elif self.process.at == "run":
            for who in ("saver", "mover"):
                task: Task = getattr(self.process, who)
                if task.at:
                    yield from self._calls(who, task)

    def _calls(self, who: str, task: Task) -> Iterator[TierMove]:
        """One call of a thread; at a silent place it fails, and may arrive."""
        other = self.process.mover if who == "saver" else self.process.saver
        if task.at == "look" and other.at in ("start", "list", "seen") and other.place == task.place:
            return  # a lock in the process
        move: TierMove = getattr(self, f"_{task.at}")(who, task)
        if task.place not in self.state.away or task.at == "back":
            yield move
            return
        kept, made = self.process, self.state.made
        if who == "saver" and task.at == "put":
            made = self._with_made(self._attempt())
            kept = self._known(kept, self._attempt())
        if who == "saver":
            if task.at in ("check", "retain"):
                kept = self._saved(kept)
            else:
                kept = kept._replace(saver=Task(), failed=(*kept.failed, task.place))
            yield self._move(task.place, f"{move.what}: it fails", kept, made=made)
        elif self.broken == "a mover takes a silent place for one that has the step":
            have = changed(kept.have, task.place, task.attempt)
            yield self._move(task.place, "gives up", kept._replace(mover=Task(), have=have))
        places = move.then.places
        if task.at in ("start", "seen", "put") and places != self.state.places:
            yield self._move(task.place, f"{move.what}: unheard", kept, places[task.place], made)

    def _restore(self) -> TierMove:
        """Lists the next place; after the last one, the process knows what it goes on from."""
        place = self.order[len(self.process.view)]
        is_away = place in self.state.away
        now = self.process._replace(view=(*self.process.view, None if is_away else self.state.places[place]))
        if len(now.view) == 1:
            now = now._replace(owed=tuple(sorted({p for one in self.state.processes for p in one.acknowledged})))
        if len(now.view) == len(self.order):
            now = restored(self.configuration, self.made, self.index, now)
        return self._move(place, "gets no answer" if is_away else "lists", now)

    # --- taking a place ---------------------------------------------------------------------------------------------

    def _look(self, who: str, task: Task) -> TierMove:
        """Lists the place, before anything is written there."""
        process, place = self.process, self.state.places[task.place]
        if (after := self._goes_on(task.place)) is not None:
            return self._move(task.place, "is taken", self._taken(after))
        if foreign := self._may_not(who, task.place):
            return self._conflict(who, task.place, foreign[0])
        listed = max((start.number for start in place.starts), default=0)
        own = max(process.numbers)
        number = max(own, 1 + listed, 0 if own else 1 + process.top)
        if self.broken == "a number of each place alone":
            number = 1 + listed
        seen = self._of_line(task.place) if self.broken == ".seen is what was listed before" else ()
        now = self._with(who, task._replace(at="start", number=number, seen=seen))
        return self._move(task.place, "lists starts", self._found(now, place))

    def _start(self, who: str, task: Task) -> TierMove:
        place = self.state.places[task.place]
        others = [one for one in place.starts if one.token != self.token]
        start = Start(task.number, self.token, self.process.line, self.process.after)
        at = "seen" if self.broken == ".seen is what was listed before" else "list"
        now = self._with(who, task._replace(at=at))
        return self._move(task.place, "puts its start", now, place._replace(starts=tuple(sorted((*others, start)))))

    def _list(self, who: str, task: Task) -> TierMove:
        """Lists the place again: whatever is put from now on finds the start."""
        place = self.state.places[task.place]
        if (after := self._goes_on(task.place)) is not None:
            return self._move(task.place, "is taken", self._taken(after))
        if foreign := self._may_not(who, task.place):
            return self._conflict(who, task.place, foreign[0])
        later = [one for one in place.starts if one[:2] > (task.number, self.token)]
        if any(one.token in self.process.after for one in later):
            return self._move(task.place, "takes a higher number", self._with(who, task._replace(at="look")))
        if later:
            return self._conflict(who, task.place, -10 - later[0].token)
        now = self._with(who, task._replace(at="seen", seen=self._of_line(task.place)))
        return self._move(task.place, "lists commits", self._found(now, place))

    def _found(self, process: Process, place: Place) -> Process:
        """The process with the starts that it has found, up to its first own one."""
        if any(process.numbers):
            return process
        after = found_with(place.starts).union(process.after) - {self.token}
        return process._replace(after=tuple(sorted(after)))

    def _seen(self, who: str, task: Task) -> TierMove:
        place = self.state.places[task.place]
        own = (task.number, self.token)
        starts = tuple(one._replace(seen=task.seen) if one[:2] == own else one for one in place.starts)
        if starts == place.starts:
            return self._move(task.place, "finds its start gone", self._ended("lost"))
        now = self.process._replace(numbers=changed(self.process.numbers, task.place, task.number))
        now = self._with(who, task._replace(at="put" if who == "saver" else "compare", number=0, seen=()), now)
        return self._move(task.place, "puts what it has seen", now, place._replace(starts=starts))

    def _foreign(self, at: int, retires: Sequence[int]) -> list[int]:
        """The commits that count there and are not of the line."""
        out = {*self._of_line(at), *retires}
        return [one.attempt for one in self._counted(at) if one.attempt not in out]

    def _may_not(self, who: str, at: int) -> list[int]:
        if who == "mover" and self.broken == "a mover does not look at ancestors":
            return []
        return self._foreign(at, self.process.repeat)

    def _goes_on(self, at: int) -> int | None:
        """The token of a start that goes on from this one."""
        if self.broken == "a start does not look for one that goes on from it":
            return None
        return next((one.token for one in self.state.places[at].starts if self.token in one.after), None)

    def _of_line(self, at: int) -> tuple[int, ...]:
        return tuple(one.attempt for one in self._counted(at) if is_own(self.process, self.made, one.attempt))

    # --- a save -----------------------------------------------------------------------------------------------------

    def _put(self, who: str, task: Task) -> TierMove:
        """The manifest: new, or in place of what it replaces or of what does not count."""
        process, place = self.process, self.state.places[task.place]
        attempt = self.made[task.attempt] if who == "mover" else self._attempt()
        if who == "mover" and self._is_behind(task) and self.broken != "a mover fills gaps":
            return self._move(task.place, "is passed over", process._replace(mover=Task()))
        there = next((one for one in place.entries if one.step == attempt.step), None)
        may = (attempt.id, *attempt.replaces, *attempt.retires)
        if there and there.attempt not in may and there in self._counted(task.place):
            if who == "mover":
                return self._move(task.place, "looks again", self._with(who, task._replace(at="compare")))
            return self._conflict(who, task.place, there.attempt)
        number = process.numbers[task.place], self.token
        if self.broken == "a moved manifest is of the start that saved it":
            number = attempt.number, attempt.token
        is_whole = self.broken != "a manifest before its archive"
        entry = Entry(attempt.step, attempt.id, *number, whole=is_whole)
        if there and there.attempt == attempt.id and self._counts_as_done(there, task.place):
            entry = there
        others = [one for one in place.entries if one.step != attempt.step]
        now = self._with(who, task._replace(at="check" if is_whole else "archive"))
        if who == "saver":
            now = self._known(now._replace(base=attempt.id), attempt)
        if self.broken == "a step is moved before it is acknowledged":
            now = now._replace(have=changed(now.have, task.place, attempt.id))
        put = place._replace(entries=tuple(sorted((*others, entry))))
        return self._move(task.place, f"puts step {attempt.step}", now, put, self._with_made(attempt))

    def _counts_as_done(self, entry: Entry, place: int) -> bool:
        """Whether a step that is there already need not be put again: this start has seen it, or is its own."""
        return entry in self._counted(place) or self.broken == "a manifest of the same attempt is enough"

    def _known(self, process: Process, attempt: Attempt) -> Process:
        """A save that fails is known, too: its manifest may be there."""
        goes_back = any(step < 0 for step in self.plan[process.done :])
        return process._replace(known=tuple(sorted({*process.known, attempt.id})) if goes_back else ())

    def _archive(self, who: str, task: Task) -> TierMove:
        place = self.state.places[task.place]
        entries = tuple(one._replace(whole=one.whole or one.attempt == task.attempt) for one in place.entries)
        now = self._with(who, task._replace(at="check"))
        return self._move(task.place, "puts the archive", now, place._replace(entries=entries))

    def _check(self, who: str, task: Task) -> TierMove:
        """The starts are listed again: all later ones have seen what was put."""
        process, place = self.process, self.state.places[task.place]
        own = (process.numbers[task.place], self.token)
        later = [one for one in place.starts if one[:2] > own and one.token != self.token]
        if who == "mover" and self.broken == "a mover does not list starts after its put":
            later = []
        elif not any(one[:2] == own for one in place.starts):
            return self._move(task.place, "finds its start gone", self._ended("lost"))
        unseen = [one for one in later if task.attempt not in (one.seen or ())]
        if unseen and (who == "saver" or self._goes_on(task.place) is not None):
            return self._move(task.place, "is taken", self._taken(unseen[0].token))
        if unseen:
            return self._conflict(who, task.place, -10 - unseen[0].token)
        untold = process.untold
        if {*process.repeat} <= {*self.made[task.attempt].retires}:
            untold = tuple(one for one in untold if one != task.place)
        process = process._replace(
            have=changed(process.have, task.place, task.attempt),
            acknowledged=tuple(sorted((*process.acknowledged, (task.attempt, task.place)))),
            untold=untold,
        )
        if self.keep and self.keep[task.place]:
            process = self._with(who, task._replace(at="retain"), process)
        else:
            process = self._saved(process) if who == "saver" else process._replace(mover=Task())
        return self._move(task.place, "acknowledges", process)

    def _retain(self, who: str, task: Task) -> TierMove:
        """What does not count goes, too."""
        process, place = self.process, self.state.places[task.place]
        counted, own = self._counted(task.place), (process.numbers[task.place], self.token)
        if any(one[:2] > own for one in place.starts):
            now = self._saved(process) if who == "saver" else process._replace(mover=Task())
            return self._move(task.place, "deletes nothing: it is taken", now)
        kept = {one.attempt for one in counted[-self.keep[task.place] :]}
        if process.mover.at in ("compare", "copy") and self.broken != "retention deletes the step that is being moved":
            kept.add(process.mover.attempt)
        entries = tuple(one for one in place.entries if one.attempt in kept)
        deleted = {one.attempt for one in place.entries} - kept
        now = self._saved(process) if who == "saver" else process._replace(mover=Task())
        then = place._replace(entries=entries, deleted=tuple(sorted({*place.deleted, *deleted})))
        return self._move(task.place, "deletes older steps", now, then)

    def _saved(self, process: Process) -> Process:
        return process._replace(saver=Task(), failed=(), done=process.done + 1)

    def _attempt(self) -> Attempt:
        """The attempt of the save that is under way."""
        process, step, number = self.process, self.plan[self.process.done], self.token * 10 + self.process.done
        if number in self.made:
            return self.made[number]
        replaces = tuple(one for one in (process.base, *process.repeat) if one >= 0 and self.made[one].step == step)
        replaces += tuple(other for one in replaces for other in self.made[one].replaces)
        repeats = process.untold and (self.broken != "retirements are not repeated" or process.untold == self.order)
        own = process.numbers[process.saver.place] if process.saver.at else max(process.numbers)
        return Attempt(number, step, self.token, own, replaces, process.repeat if repeats else (), process.base)

    # --- the mover --------------------------------------------------------------------------------------------------

    def _compare(self, who: str, task: Task) -> TierMove:
        """Looks at the target: is the step above what is there?"""
        process = self.process
        target = self._target(process)
        if target is None or target[0] != task.place:
            return self._move(task.place, "has nothing to move", process._replace(mover=Task()))
        step = self.made[target[1]]
        is_blind = self.broken == "a mover does not look at ancestors"
        if not is_blind and (foreign := self._foreign(task.place, (*step.retires, *step.replaces))):
            return self._conflict(who, task.place, foreign[0])
        newest = max((self.made[one] for one in self._of_line(task.place)), key=lambda one: one.key, default=None)
        is_ahead = newest and newest.step >= step.step and newest.id not in (*step.replaces, *step.retires)
        if newest and is_ahead and (newest.id == step.id or self.broken != "a mover fills gaps"):
            now = process._replace(mover=Task(), have=changed(process.have, task.place, newest.id))
            return self._move(task.place, "finds it there", now)
        at = "copy" if self.keep else "put"
        return self._move(task.place, "looks at the target", self._with(who, Task(at, task.place, step.id)))

    def _copy(self, who: str, task: Task) -> TierMove:
        there = [one.attempt for place in self._nearer(task.place) for one in self.state.places[place].entries]
        if task.attempt not in there:
            if self._sources(self.process, task.place) in (None, task.attempt):
                return self._move(task.place, "finds the step gone", self._ended("lost"))
            return self._move(task.place, "finds the step gone", self.process._replace(mover=Task()))
        return self._move(task.place, "copies the archive", self._with(who, task._replace(at="put")))

    def _gaps(self, target: int) -> list[int]:
        """The steps of the places before this one that are not there."""
        there = {one.attempt for one in self.state.places[target].entries}
        return sorted({one for place in self._nearer(target) for one in self._of_line(place)} - there)

    def _is_behind(self, task: Task) -> bool:
        """Whether the process itself has meanwhile put a later step there."""
        there = self.process.have[task.place]
        is_there = there >= 0 and there not in self.process.repeat
        return is_there and self.made[there].key > self.made[task.attempt].key

    def _nearer(self, target: int) -> tuple[int, ...]:
        return self.order[: self.order.index(target)]

    def _sources(self, process: Process, target: int) -> int | None:
        """The newest step at the places before this one."""
        there = [process.have[place] for place in self._nearer(target)]
        there = [one for one in there if one >= 0 and one not in process.repeat]
        return newest_of(self.made, there) if there else None

    def _target(self, process: Process) -> tuple[int, int] | None:
        """The next place that lacks the newest step of those before it, and that step."""
        made = self.made
        if process.untold == self.order and self.broken != "a mover does not wait for the rollback":
            return None
        for place in self.order[1:]:
            step, there = self._sources(process, place), process.have[place]
            if self.broken == "a mover fills gaps" and step is not None and (gaps := self._gaps(place)):
                return place, gaps[0]
            if step is None or step == there or any(place == one for one, _ in process.conflicts):
                continue
            is_below = there >= 0 and there not in process.repeat and made[there].key >= made[step].key
            if not is_below:
                return place, step
        return None

    # --- states -----------------------------------------------------------------------------------------------------

    def _counted(self, at: int) -> tuple[Entry, ...]:
        """The commits that count for this start, which takes nothing for one that it has not seen."""
        number, is_any = self.process.numbers[at], self.broken == UNLISTED
        if self.broken == "what a start has not seen may be a conflict":
            number = 0
        taken = (number, self.token) if number else (0, 0)
        return counting(self.state.places[at], self.state.made, taken, is_any=is_any)

    def _with_made(self, attempt: Attempt) -> tuple[Attempt, ...]:
        return tuple(sorted({*self.state.made, attempt}))

    def _with(self, who: str, task: Task, process: Process | None = None) -> Process:
        process = process or self.process
        return process._replace(saver=task) if who == "saver" else process._replace(mover=task)

    def _ended(self, word: str) -> Process:
        return self.process._replace(at="done", word=word)

    def _taken(self, by: int) -> Process:
        return self._ended("taken")._replace(taken_by=by)

    def _conflict(self, who: str, place: int, foreign: int) -> TierMove:
        own = (max(self.process.numbers[place], getattr(self.process, who).number), self.token)
        later = [one.token for one in self.state.places[place].starts if own[0] and one[:2] > own]
        if (after := self._goes_on(place)) is not None or (who == "saver" and later):
            return self._move(place, "is taken", self._taken(later[0] if after is None else after))
        is_new = place in self.process.asked and foreign not in self.process.apart
        if who == "saver" and not any(self.process.numbers) and is_new:
            return self._move(place, "finds a newer commit than it has restored", self._ended("stale"))
        conflicts = (*self.process.conflicts, (place, foreign))
        now = self._with(who, Task())._replace(conflicts=conflicts)
        return self._move(place, "says that there is a conflict", now)

    def _back(self, who: str, task: Task) -> TierMove:
        """The process restores a lower step. A move that is under way ends, and places are taken anew."""
        process, to = self.process, -self.plan[self.process.done]
        left = [one for one in process.known if self.made[one].step <= to]
        retired = {one for one in process.known if one not in left}
        if not left:
            return self._move(task.place, "finds nothing to go back to", self._ended("nothing to restore"))
        base = newest_of(self.made, left)
        last = self.made[base].step
        if self.broken != "a rollback is no start of its own":
            own = (Ancestor(self.token, last, base),) if self.made[base].token == self.token else ()
            process = process._replace(
                token=self.token + NUM_TOKENS,
                top=max(process.top, *process.numbers),
                numbers=(0,) * len(process.numbers),
                line=tuple(sorted((*process.line, *own))),
                mover=Task(),
            )
        now = process._replace(
            base=base,
            known=tuple(left),
            line=line_to(process.line, last),
            repeat=tuple(sorted({*process.repeat, *retired})),
            untold=self.order,
            saver=Task(),
            done=process.done + 1,
        )
        return self._move(task.place, f"goes back to step {to}", now)

    def _settled(self) -> State:
        """The state once each thread that is idle has chosen what it does next."""
        process, made = self.process, self.state.made
        if process.at == "run":
            process, made = self._chosen(process)
        if process.at == "done":
            process = process._replace(view=(), known=(), failed=(), untold=(), saver=Task(), mover=Task())
        processes = (*self.state.processes[: self.index], process, *self.state.processes[self.index + 1 :])
        return self.state._replace(processes=processes, made=made)

    def _chosen(self, process: Process) -> tuple[Process, tuple[Attempt, ...]]:
        made = self.state.made
        while not process.saver.at and process.done < len(self.plan):
            step = self.plan[process.done]
            if step < 0:
                process = process._replace(saver=Task("back", self.order[0]))
                break
            if process.base >= 0 and step < self.made[process.base].step:
                process = process._replace(done=process.done + 1)
                continue
            shut = {*process.failed, *(one for one, _ in process.conflicts)}
            place = next((one for one in self.order if one not in shut), None)
            self.process = process
            if place is None:
                attempt = self._attempt()
                made = self._with_made(attempt)
                self.made = by_id(made)
                process = self._saved(process)._replace(base=attempt.id)
            else:
                process = process._replace(saver=Task("look", place, self.token * 10 + process.done))
        target = self._target(process) if any(process.numbers) else None
        if not process.mover.at and target:
            process = process._replace(mover=Task("look", *target))
        if not process.saver.at and not process.mover.at:
            process = process._replace(at="done")
        for who, at in (("saver", "put"), ("mover", "compare")):
            task: Task = getattr(process, who)
            if task.at == "look" and process.numbers[task.place]:
                process = self._with(who, task._replace(at=at), process)
        return process, made

    def _move(
        self,
        at: int,
        what: str,
        process: Process,
        place: Place | None = None,
        made: tuple[Attempt, ...] | None = None,
    ) -> TierMove:
        state = self.state
        places = state.places if place is None else (*state.places[:at], place, *state.places[at + 1 :])
        processes = (*state.processes[: self.index], process, *state.processes[self.index + 1 :])
        then = state._replace(places=places, processes=processes, made=state.made if made is None else made)
        return TierMove(self.index, at, what, Actor(self.configuration, then, self.index)._settled())
