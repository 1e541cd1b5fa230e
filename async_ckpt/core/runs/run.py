"""A run at one root: its committed steps, and the commit of a new one.

In: a storage and the naming of its steps. Out: commits that are complete or absent. Knows nothing of: tensors, threads.

    <root>/step_00000500/rank_00000.<attempt>.tar     never changed once a manifest names it
    <root>/step_00000500/driver.<attempt>.tar         only for driver state, which one rank writes for all
    <root>/step_00000500/manifest.json                written last; its presence is the commit
    <root>/rollback-500.<attempt>.json                the intent of a rollback to this step: see `manifest`
    <root>/mark-500.<attempt>.0001.bad.json           a mark of this step: see `marks`
    <root>/latest                                     the tracker: the newest step, for people, scripts and trainers
    <root>/checkpoints.jsonl                          one line per commit
    <root>/history.jsonl, history/                    the log of events: see `events.log`

Every decision is made from the present content of the storage, so several processes may share a root. The cost of a
commit must not grow with the number of kept steps: a commit that this process has seen stays cached until a listing, a
rollback or its own retention removes it, and a step is read again before it is deleted. The root is listed once for
each save. Every commit replaces the journal, so its version shows whether another process has committed.
"""

from __future__ import annotations

import os
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import takewhile
from typing import Any, Final, NamedTuple

from ...errors import (
    CheckpointError,
    ConflictError,
    CorruptCheckpointError,
    NotCommittedError,
    StepBehindError,
    StepExistsError,
    StorageUnavailableError,
)
from ..events.log import EventLog
from ..spec import Keep, some_of
from ..storage.interface import Storage
from ..timing import TIMEKEEPER, Clock
from .foreign_entries import foreign_kind, foreign_steps, incomplete_steps, newest_of_other_namings
from .manifest import NAME as MANIFEST
from .manifest import Archive, GroupLocation, Manifest, RankFiles, Retired, SaveTimes, intent_name
from .marks import Mark, dump
from .naming import STEP_FORMAT, TRACKER, TRACKERS, tracker_of
from .retention import (
    Commits,
    deletable_steps,
    describe_missing_metric,
    steps_for_room,
    unknown_metric,
    without_needed,
)
from .root import Listing, Root, replaceable
from .starts import Seen, Start, about_start, later_than
from .sweep import Sweeper, is_library_name
from .tenure import Tenure, has_ended_here, refuse_if_alive, tenure_of
from .trackers import Announcer

# The number of start files that are kept where it is unknown which processes have ended. If a process sleeps while more
# starts than this are made, the order of its commits and theirs is lost.
_NUM_KEPT: Final = 32
# How many times, and with which pauses, to look for the `.seen` of a later start: before it puts that file, the start
# lists the commits and reads manifests.
_SEEN_TRIES: Final = 30
_SEEN_PAUSE_SECONDS: Final = 0.1
# How long a save that needs room waits for a deletion in progress.
_DELETING_SECONDS: Final = 10.0


class Elsewhere(NamedTuple):
    """The commits of a run at its other roots, by step, as far as this process knows."""

    commits: dict[int, list[Manifest]]
    is_complete: bool
    """True if each of these roots has answered since the run was opened."""


class Run:
    """The steps of a run at one root. `roots.open_roots` makes it for a checkpointer. Thread-safe.

    Its `root` names and reads files, its `sweeper` deletes them, and `events` is the log for people.
    """

    def __init__(
        self,
        storage: Storage,
        *,
        clock: Clock,
        step_format: str = STEP_FORMAT,
        tracker: tuple[str, str] | str | None = TRACKER,
        keep: Keep | None = None,
        every: int | None = None,
        is_volatile: bool = False,
        compresses: bool = False,
        opening: str = "",
    ) -> None:
        """`every`: only steps that are multiples of this are copied here from other roots. `is_volatile`: a reboot
        loses the files here. `compresses`: archives that are copied here are compressed. `opening` is a random text for
        the checkpointer, the same at all of its roots.

        Raises ValueError for `Keep(free=)` at a place whose free space is unknown.
        """
        if keep is not None and keep.free is not None and (storage.remote or storage.free_bytes() is None):
            raise ValueError(
                f"{storage.locate('')} does not report its free space, so Keep(free=…) cannot be used; pass "
                "Keep(bytes=…), or with several places, give each place its own retention: Place(…, keep=…)"
            )
        self._opening = opening or os.urandom(4).hex()
        self.root = Root(storage, step_format)
        self.keep, self.is_volatile, self._every = keep or Keep(), is_volatile, every
        self.compresses = compresses
        self._clock = clock
        self._tenure = tenure_of(storage.locate(""))
        self._swept_for: set[Start] = set()  # the start of this process after which earlier starts were swept
        self._is_changing = False  # the root was taken by `changing`, not by a save
        self._has_closed = False
        self.refusal = ""  # if not empty: why this process may never save a step here
        self._announcer = Announcer(self.root, tracker_of(tracker, step_format))
        self.sweeper = Sweeper(self.root)
        self.copying = threading.Lock()  # held while steps are copied here: two copies would write the same object
        self._deleting = threading.Lock()  # held while steps are deleted, so that `make_room` counts the freed bytes
        self.events = EventLog(storage, clock, clock())

    @property
    def storage(self) -> Storage:
        return self.root.storage

    # --- reading: changes nothing in the storage --------------------------------------------------------------

    def folder(self, step: int) -> str:
        return self.root.folder(step)

    def attempt_path(self, step: int, attempt: str, rank: int = 0) -> str:
        return self.root.attempt_path(step, attempt, rank)

    def steps(self) -> list[int]:
        """The committed steps, ascending."""
        return self.root.steps()

    @property
    def has_start(self) -> bool:
        """True if this process has taken the root."""
        return self.root.own is not None

    @property
    def token(self) -> str:
        """The token of this process's start at the root; empty before its first save."""
        return self.root.own.token if self.root.own is not None else ""

    def known_steps(self) -> list[int]:
        """The committed steps. At a store, only those that this object has seen or committed, without a request."""
        if not self.storage.remote:
            with suppress(CheckpointError, OSError):
                return self.steps()
        return sorted(self.root.committed_here | self.root.known.keys())

    def latest(self) -> int | None:
        """The newest committed step."""

        def newest(listing: Listing) -> list[int]:
            step = self.root.newest(listing)
            return [] if step is None else [step]

        return next(iter(self.root.list_settled(newest)), None)

    def manifest(self, step: int) -> Manifest:
        """The manifest of a step. Raises NotCommittedError if the step is not committed."""
        manifest = self.root.read(step)[0]
        if self.root.excluded(self.root.relist(), [step]).get(step) == manifest.attempt:
            raise self.root.not_committed(step)
        return manifest

    def view(self, names: list[str] | None = None) -> Commits:
        """The committed steps with their manifests, ascending; None for a damaged manifest. Cached ones are not read.

        `names` are the names in the root, if the caller has just listed it.
        """
        return self.root.view(self.root.relist(names))

    def check_naming(self) -> None:
        """Raise NotCommittedError if the newest step at the root has another naming than this run.

        Without this check, a training would start from scratch or from an old step, and mix two namings in one folder.
        """
        names = self.storage.names("")
        self._refuse_step_folder(MANIFEST in names)
        other = newest_of_other_namings(self.storage, self.root.is_step, names)
        newest = None if other is None else self.latest()
        own = None if newest is None else self.committed(newest)
        if other is None or (newest is not None and (own is None or own.created >= other.manifest.created)):
            return
        shown = self.storage.locate("")
        have = "nothing is committed" if newest is None else f"step {newest} is the newest"
        later = " later" if newest is not None else ""
        raise NotCommittedError(
            f"{shown}: {have} under this naming, but {other.folder} was committed{later} under "
            f"another; {other.advice}, or name the step, or give a new run another folder",
            path=shown,
            step=None,
        )

    def _refuse_step_folder(self, is_one_step: bool) -> None:
        """Raise NotCommittedError if the root is itself the folder of a step: a run in it would start from scratch."""
        if is_one_step:
            shown = self.storage.locate("").rstrip("/")
            run = shown.rpartition("/")[0]
            raise NotCommittedError(
                f"{shown} is the folder of one step, not of a run; open the run, {run}, or read the step with "
                f"load({shown!r})",
                path=shown,
                step=None,
            )

    def describe_foreign(self) -> str | None:
        """A description, with advice, of entries that look like a run or a checkpoint, for a root without a commit."""
        names = self.storage.names("")
        kind = foreign_kind(names)
        shown = some_of(foreign_steps(self.storage, self.root.is_step, is_library_name), 3)
        tracker = self._announcer.tracker_text()
        other = next((name for name in names if name in TRACKERS), "")
        tracker_note = f"{tracker[0]}, which says {tracker[1]!r}" if tracker else other
        if halves := incomplete_steps(self.storage, self.root.is_step):
            return (
                f"the archives of all ranks without their manifest, in {halves[0]}: the copy is incomplete, or its "
                "save ended just before it was committed; copy the step again from a place that has all of it"
            )
        if kind is not None or not (shown or tracker_note):
            return kind
        return (
            f"{' and '.join(filter(None, (shown, tracker_note)))}; another program has written that: load it with "
            "that program, and save once to continue from here"
        )

    # --- committing -------------------------------------------------------------------------------------------

    def check(
        self, step: int, *, overwrite: bool, rolled_back: bool, retire: bool, elsewhere: Collection[int] = ()
    ) -> None:
        """Raise StepExistsError or StepBehindError for an impossible step. `elsewhere`: steps of other roots."""
        listing = self.root.relist()
        self._refuse_step_folder(listing.is_one_step)
        self._tenure.refuse_if_later(self.storage, self.root.own, listing.starts)
        steps = listing.steps
        above = bisect_right(steps, step)
        exists = step in elsewhere or self.root.newest(listing, steps[bisect_left(steps, step) : above]) is not None
        if exists and not overwrite:
            raise _exists(step)
        if retire or (exists and not rolled_back):
            return
        newest = max((s for s in (*elsewhere, self.root.newest(listing, steps[above:])) if s is not None), default=-1)
        if newest > step:
            raise StepBehindError(
                f"step {step} is below the committed step {newest}, and steps must increase; save a higher step, use "
                'another root, or open the checkpointer with on_rollback="retire"',
                step=step,
                newest=newest,
            )

    def check_known(self, step: int, *, overwrite: bool) -> None:
        """The part of `check` that makes no request, unless this object has committed the step before."""
        if step in self.root.committed_here and not overwrite:
            try:
                self.root.read(step, explain=False)
            except NotCommittedError:  # it was deleted by hand
                self.root.note_deleted(step)
                return
            except CheckpointError:
                pass
            raise _exists(step)

    def manifest_to_replace(self, step: int) -> tuple[Manifest, str] | None:
        """The step's manifest and its version, which `overwrite` will replace; None if the step is not committed."""
        found = replaceable(self.storage, self.root.manifest_path(step), step)
        if found is None:
            return None
        listing = self.root.listing or self.root.relist()
        retired = self.root.excluded(listing, [step]).get(step)
        return None if retired and retired == found[0].attempt else found

    def commit(
        self,
        step: int,
        attempt: str,
        archives: tuple[Archive, ...],
        *,
        replaces: tuple[Manifest, str] | None,
        retire: bool,
        record: Mapping[str, Any] | None = None,
        elsewhere: tuple[GroupLocation, ...] = (),
        ranks: RankFiles | None = None,
        world_size: int = 1,
        times: SaveTimes | None = None,
        known_elsewhere: Elsewhere = Elsewhere({}, True),  # noqa: B008 - never changed
    ) -> Manifest:
        """Commit an attempt, whose archives are durable, by putting its manifest. Call `announce` after that.

        With `ranks`, several ranks have written the attempt, and the objects in `ranks` list their archives. With
        `retire`, the manifest retires all newer steps. It also replaces and retires the commits `known_elsewhere`, and
        repeats what the newest manifest has retired or replaced, if another root still has it or has not answered yet.

        Raises StepExistsError if another writer was faster; its commit stands. Raises NotCommittedError if a step that
        this one borrows from is gone. If it raises RunTakenError with `undecided`, the manifest exists.
        """
        self.refuse_if_lender_is_gone(step, elsewhere)
        listing = self.root.listing or self.root.relist()
        is_behind = bool(listing.steps) and listing.steps[-1] > step
        if listing.intents or (retire and is_behind) or replaces is not None:
            listing = self.root.relist()
            # A rollback counts while its manifest exists. This commit may replace that manifest, so finish it first.
            self.root.finish_rollbacks(listing)
        newer = self.root.look_up(listing.steps[bisect_right(listing.steps, step) :]) if retire else {}
        here = {Retired(s, manifest.attempt if manifest else "") for s, manifest in newer.items()}
        before, there = self._retired_elsewhere(known_elsewhere)
        rolled_back = here | {one for one in there - before if retire and one.step > step}
        retires = _in_order(before | rolled_back, here)
        previous = replaces[0] if replaces else None
        replaced = [*filter(None, (previous,)), *known_elsewhere.commits.get(step, ())]
        earlier = dict.fromkeys(name for one in replaced for name in (one.attempt, *one.replaces) if name)
        manifest = Manifest(
            step,
            attempt,
            world_size,
            self._clock(),
            archives if ranks is None else (),
            tuple(earlier),
            record or {},
            elsewhere,
            retires,
            ranks,
            self._start_label(None if rolled_back else previous, listing),
            times,
        )
        try:
            out = self._put(manifest, replaces)
        except FileExistsError as error:
            raise StepExistsError(
                f"step {step} was committed by another writer in the meantime; that checkpoint was kept", step=step
            ) from error
        self.root.note_commit(manifest, newer, listing)
        if rolled_back:
            self.events.note("rollback", step, retired=sorted({retired.step for retired in rolled_back}))
        self.look_again(manifest)
        if out is not None:
            with suppress(CheckpointError):  # the next sweep deletes them
                self.sweeper.delete_replaced(step, out)
        return manifest

    def _retired_elsewhere(self, known: Elsewhere) -> tuple[set[Retired], set[Retired]]:
        """The commits that the newest manifest here retires and other roots may have; and all known commits there."""
        there = {Retired(step, one.attempt) for step, manifests in known.commits.items() for one in manifests}
        retired = self.retired_by(next(reversed(self.root.known), None))
        return {one for one in retired if one in there or not known.is_complete}, there

    def refuse_if_lender_is_gone(self, step: int, elsewhere: Collection[GroupLocation]) -> None:
        """Raise NotCommittedError if `step` borrows from a step that was deleted or replaced meanwhile."""
        for lender in sorted({lent.step for lent in elsewhere} - {step}):
            lent_here = [lent for lent in elsewhere if lent.step == lender]
            if self.lends(lent_here):
                continue
            groups, shown = ", ".join(sorted(lent.group for lent in lent_here)), self.storage.locate("")
            raise NotCommittedError(
                f"{shown}: step {step} is not committed: it borrows {groups} from step {lender}, which was deleted or "
                "replaced there meanwhile. Save again; with several ranks, leave it out of unchanged= in the next save",
                path=self.storage.locate(self.root.manifest_path(lender)),
                step=lender,
            )

    def lends(self, lent: Collection[GroupLocation]) -> bool:
        """True if these archives exist and a committed manifest names them, so that nobody deletes them."""
        missing = {(location.step, location.archive.name) for location in lent}
        for step in {location.step for location in lent}:
            try:
                manifest = self.root.read(step, explain=False)[0]
            except NotCommittedError:
                continue
            except CorruptCheckpointError:
                return True  # a damaged manifest may name any archive
            missing -= {(step, name) for name in manifest.own_names}
        if missing:  # the lender may have been overwritten after other steps had borrowed these archives
            self.root.forget(list(self.root.known.borrowers))
            borrowers = self.view().borrowers.values()
            missing -= {(other.step, other.archive.name) for manifest in borrowers for other in manifest.elsewhere}
        paths = {f"{location.folder}/{location.archive.name}" for location in lent}
        return not missing and len(self.storage.existing(sorted(paths))) == len(paths)

    def _start_label(self, before: Manifest | None, listing: Listing) -> str:
        """The start to name in a manifest: below newer steps that of the replaced manifest, so that these count."""
        above = listing.steps[bisect_right(listing.steps, before.step) :] if before else []
        if before is not None and self.root.newest(listing, above) is not None:
            return before.start
        return self.root.own.label if self.root.own else ""

    def join(self, token: str) -> None:
        """Note the token of the start that all ranks share. Rank 0 makes that start at its first save."""
        self._opening = token
        self._tenure.join(token)

    def look_again(self, manifest: Manifest) -> None:
        """After a manifest was put, raise RunTakenError if another process has taken the run meanwhile.

        All ranks call this: then no rank takes a save for committed that the other process has not seen. If the other
        process has not put its `.seen` yet, this waits for it for about three seconds.
        """
        start = self.root.own
        try:
            for tries_left in reversed(range(_SEEN_TRIES)):
                listing = self.root.relist()
                own = start or self._tenure.own(listing.starts, manifest.start)
                later = later_than(own, listing.starts)
                if not tries_left or all(one.has_seen for one in later):
                    break
                TIMEKEEPER.sleep(_SEEN_PAUSE_SECONDS)
            if not self.root.have_seen(later, manifest):
                self._tenure.refuse_if_later(self.storage, own, later, put=manifest.step)
        except StorageUnavailableError as error:
            if start is not None:
                error.add_note(f"The manifest of step {manifest.step} exists: check which steps are committed")
                raise
            raise self._tenure.unknown_error(self.storage, manifest.step, error) from error
        finally:
            if start is not None and manifest.ranks is None and manifest.elsewhere:
                self._withdraw_if_lender_is_gone(manifest)
        if start is None:
            return
        if later:
            self._tenure.note_lost(self.storage, later)
        elif start not in listing.starts:
            self._tenure.put_back(self.storage, start)
        elif len(listing.starts) > 1:
            self._sweep_starts(start, listing.starts)

    def _sweep_starts(self, own: Start, starts: Sequence[Start]) -> None:
        """Delete the files of starts that are no longer needed, after a commit of `own`.

        The file of a start orders its commits relative to those of other starts. Where it is known which processes have
        ended, the file is not needed once no process of that start or an earlier one can put a manifest, and the
        manifests that do not count were renamed. The file of a start at several roots stays: it also serves the others.
        """
        before = [start for start in sorted(starts) if start.is_before(own)]
        going = before[: 1 - _NUM_KEPT]
        with suppress(CheckpointError):  # another start sweeps them
            if not self.storage.remote and own not in self._swept_for:
                self._swept_for = {own}
                ended = {*self.storage.sweep("", [start.name for start in before])}
                settled = [*takewhile(lambda start: start.name in ended and self._is_settled(start), before)]
                if settled:  # their processes can put no more manifests
                    listing = self.root.relist()
                    line = self.root.line(listing)
                    unseen = self.root.look_up(line.unseen(listing.steps))  # raises if one cannot be read now
                    found = {step: commit for step, commit in unseen.items() if commit is not None}
                    self.root.retire({s: one.attempt for s, one in found.items() if not line.counts(s, one)})
                    self.root.listing = None
                going += settled
            if going:
                self.storage.delete_many(sorted(name for start in {*going} for name in (start.name, start.seen_name)))

    def _is_settled(self, start: Start) -> bool:
        """True if the process of a start, whose lock is free, has provably ended, and no other root has its commits."""
        about = about_start(self.storage, start)
        return about.get("roots") == [self.storage.locate("")] and has_ended_here(start, about)

    def _withdraw_if_lender_is_gone(self, manifest: Manifest) -> None:
        """Retire the manifest again if archives that it borrows were deleted while it was put: it cannot be loaded."""
        try:
            self.refuse_if_lender_is_gone(manifest.step, manifest.elsewhere)
        except NotCommittedError:
            self.root.retire({manifest.step: manifest.attempt})
            self.root.note_deleted(manifest.step)
            raise

    # --- the right to commit ----------------------------------------------------------------------------------

    def check_start(self) -> None:
        """Raise RunTakenError if another process has the run, as far as this is known without network requests."""
        self._tenure.refuse_if_lost()
        if self.root.own is None and not self.storage.remote:
            refuse_if_alive(self.storage, (self.root.listing or self.root.relist()).starts)

    def take(self, step: int, others: Sequence[Run]) -> bool:
        """Take the root for this process, at its first save. True if it was just taken: then check the step again.

        `others` are the runs at the other roots. Raises RunTakenError.
        """
        if self.root.own is not None and self.root.own.first <= step:
            return False
        token = next((other.token for other in others if other.token), self._opening)
        own, is_new = self._tenure.take(self.root, step, token, [other.root for other in others])
        self.root.note_start(own, Seen.parse(self._tenure.seen))
        return is_new

    def descent(self) -> set[str]:
        """The tokens of the starts that the run at this root has had, and of this process's own start."""
        own = {*filter(None, (self._opening, self.token, *self.root.ancestors))}
        listed = self.root.starts or self.root.relist().starts
        return own.union((one.token for one in listed), () if self.has_start else self.root.recorded_ancestors(listed))

    def refuse_strangers(self, known: Collection[str]) -> None:
        """Raise ConflictError if a commit here was made by a listed start whose token is not in `known`."""
        for manifest, stranger in self.strange_commits(known):
            where, about = self.storage.locate(""), about_start(self.storage, stranger)
            raise ConflictError(
                f"{where}: step {manifest.step} there was saved by process {about.get('pid')} on "
                f"{about.get('host')!a:.200}, which went on from another step than this run did; nothing is copied "
                "there. Restore from that place to continue from its steps, give this run another place, or decide "
                "with async-ckpt move --adopt or --retire",
                path=where,
                step=manifest.step,
            )

    def strange_commits(self, known: Collection[str]) -> Iterator[tuple[Manifest, Start]]:
        """The commits here that were made by listed starts whose tokens are not in `known`, newest first."""
        listing = self.root.listing or self.root.relist()
        strangers = {start.token: start for start in listing.starts if start.token not in known}
        for manifest in reversed(self.root.view(listing).values() if strangers else ()):
            stranger = None if manifest is None else strangers.get(manifest.start.rpartition(".")[2])
            if manifest is not None and stranger is not None:
                yield manifest, stranger

    def retired_by(self, step: int | None) -> frozenset[Retired]:
        """The commits that the manifest of this step retires or replaces."""
        manifest = None if step is None else self.root.known_or_found(step)
        if manifest is None:
            return frozenset()
        return frozenset((*manifest.retires, *(Retired(manifest.step, name) for name in manifest.replaces)))

    def takes(self, step: int) -> bool:
        """Whether this step is copied here from other roots."""
        return self._every is None or step % self._every == 0

    def kept_for_good(self, commits: Commits) -> set[int]:
        """The steps that `every`, `best` or `good` of this root's retention keep."""
        keep = Keep(every=self.keep.every, best=self.keep.best, good=self.keep.good)
        if keep == Keep() or unknown_metric(keep, commits) is not None:
            return set()
        return set(commits).difference(deletable_steps(keep, commits, now=self._clock()))

    def stand_in(self, start: Start, about: Mapping[str, object], ancestors: Iterable[str]) -> None:
        """From now on, act for the process of `about`: in the name of its start elsewhere, copy its steps here."""
        if not (self.stands_in and self._opening == start.token):
            self._tenure, self.root.own = Tenure(about), None
            self.root.forget(list(self.root.known))
            self._opening = start.token
        self.root.ancestors = frozenset(ancestors)

    @property
    def stands_in(self) -> bool:
        return self._tenure.about is not None

    def check_taken(self, token: str = "") -> None:
        """Raise RunTakenError if another process has taken the run; called before a commit or a deletion. `token` is
        that of this process's start at another root, in whose name a mover may have taken this root.
        """
        if self.root.own is not None or token:
            starts = self.root.relist().starts
            own = self.root.own or max((start for start in starts if start.token == token), default=None)
            self._tenure.refuse_if_later(self.storage, own, starts)

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Take the root for a change other than a save. Where locks work, no process begins to save there meanwhile.

        The block starts with an empty cache. If another process begins to save there all the same, `check_taken` and
        `retain` raise RunTakenError. Raises RunTakenError for a root that a living process has.
        """
        self.root.forget(list(self.root.known))
        steps = self.root.relist().steps
        self._is_changing = True
        try:
            self.take(steps[-1] + 1 if steps else 0, [])
            self.check_taken()
            others = [start for start in self.root.starts if start != self.root.own]
            refuse_if_alive(self.storage, others)  # another process may have taken the root at the same moment
            yield
        finally:
            self.root.own, self._is_changing = None, False
            self._tenure.leave(self.root, withdraws=True)

    def close(self, *, is_quiet: bool = True) -> None:
        """Give up the root, so that another process can take it before this one ends. See `Tenure.leave`."""
        if self.has_start and not self._has_closed:
            self._has_closed = True
            self.events.note("closed", None)
        self.write_events(again=False)
        self._tenure.leave(self.root, is_quiet=is_quiet)
        self._tenure = Tenure()  # of a save that was given up: if it fails late, the next checkpointer goes on

    def write_events(self, *, again: bool = True) -> None:
        """Write the events noted so far, if this process has taken the root: a mere reader changes nothing."""
        if self.has_start:
            self.events.write(again=again)

    def adopt(
        self, manifest: Manifest, *, replaces: tuple[Manifest, str] | None, retires: Sequence[Retired] = ()
    ) -> None:
        """Commit a step whose archives were copied from another root, with its manifest and the rollback in it.
        `retires` are further commits that it retires here.

        Raises StepExistsError if the step was committed here meanwhile, and RunTakenError if another process has the
        run.
        """
        if retires:
            manifest = manifest._replace(retires=_in_order(manifest.retires, retires))
        listing = self.root.relist()
        if self.root.own is None:
            refuse_if_alive(self.storage, listing.starts)
        self._tenure.refuse_if_later(self.storage, self.root.own, listing.starts)
        self.root.finish_rollbacks(listing)
        if self.root.is_gap(listing, manifest):
            manifest = manifest._replace(start="")  # its place in the order of the starts here is unknown
        try:
            self._put(manifest, replaces)
        except FileExistsError as error:
            raise _exists(manifest.step) from error
        self.root.forget(retired.step for retired in manifest.retires)
        self.root.note({manifest.step: manifest})
        self.root.listing = None
        if manifest.retires or replaces:
            self.root.finish_rollbacks(listing._replace(intents=[(manifest.step, manifest.attempt)]))
        if replaces and replaces[0].attempt != manifest.attempt:  # equal if its archives were repaired
            self.sweeper.delete_replaced(manifest.step, replaces[0])
        if self.root.own is not None:
            self.look_again(manifest)

    def committed(self, step: int) -> Manifest | None:
        """The step's manifest; None if it is missing or cannot be read."""
        return self.root.find(step)

    def retired_attempts(self, step: int) -> set[str]:
        """The attempts at a step that a rollback has retired."""
        attempts = self.sweeper.retired_attempts(step)
        retired = self.root.excluded(self.root.listing or self.root.relist(), [step]).get(step)
        return attempts | {retired} if retired else attempts

    # --- marks ------------------------------------------------------------------------------------------------

    def put_mark(self, mark: Mark, note: str) -> None:
        with suppress(FileExistsError):  # another process has just put the same mark
            self.storage.put_new(mark.name, dump(note))
        self.root.marks = [*self.root.marks, mark]

    def bring_marks(self, source: Run) -> None:
        """Copy the marks of another root, as of its last listing, for commits that are here, too."""
        here = {*self.root.marks}
        for mark in source.root.marks:
            commit = self.root.known_or_found(mark.step) if mark not in here else None
            if commit is not None and commit.attempt == mark.attempt:
                with suppress(FileExistsError, FileNotFoundError):
                    self.storage.put_new(mark.name, source.storage.read(mark.name)[0])

    # --- deleting ---------------------------------------------------------------------------------------------

    def retain(
        self,
        step: int,
        *,
        replaced: Manifest | None,
        in_flight: Collection[int],
        only: Commits | None = None,
        is_copy: bool = False,
    ) -> list[int]:
        """Delete replaced archives, and the steps that retention deletes. Returns these steps, ascending.

        Commits that do not count are retired, except after the copy of a step, which itself retires them (`adopt`).
        With `only`, all steps stay that are not in it or were replaced since. Raises RunTakenError if another process
        has taken the run; every step from which that process may continue still exists then.
        """
        listing = self.root.listing or self.root.relist()
        self.root.finish_rollbacks(listing)
        view = self.root.view(listing)
        if not is_copy:
            self.root.retire(self.root.out)  # only after the commit: until then, a later start may have seen them
        self.sweeper.delete_replaced(step, replaced)
        protected = self._protected(step, view, in_flight)
        if only is not None:
            protected |= {old for old, manifest in view.items() if old not in only or only[old] != manifest}
        doomed, view = self._delete(step, listing, view, partial(self.doomed, protected=protected))
        self._warn_of_what_is_kept(view)
        return doomed

    def make_room(
        self,
        step: int,
        num_bytes: int,
        *,
        in_flight: Collection[int],
        broken: Collection[int] = (),
        is_part: bool = False,
    ) -> None:
        """Delete steps until `Keep(free=)` bytes will be free after `num_bytes` of a step are written.

        The newest step that is not `broken` stays; if the room is still too small, one warning says so. If other ranks
        write parts of the step (`is_part`), its size is unknown and taken to be at least that of the largest step here.
        Raises RunTakenError as `retain` does.
        """
        if self.keep.free is None:
            return
        listing = self.root.listing or self.root.relist()
        view = self.root.view(listing)
        if is_part:
            num_bytes = max([num_bytes, *(manifest.num_bytes for manifest in view.values() if manifest is not None)])
        if not self.lack_bytes(num_bytes):
            return
        protected = self._protected(step, view, in_flight)
        choose = partial(self.doomed, protected=protected, broken=broken, coming_bytes=num_bytes)
        self._delete(step, listing, view, choose, wait_seconds=_DELETING_SECONDS)
        if lack := self.lack_bytes(num_bytes):
            self.root.warn_once(
                "free",
                f"{self.storage.locate('')}: Keep(free=…) cannot be kept: after step {step}, {lack:,.0f} bytes too "
                "few will be free, although no further step may be deleted. Make room there, or lower free=",
            )

    def lack_bytes(self, num_bytes: float = 0) -> float:
        """The bytes missing to `Keep(free=)` after `num_bytes` more are written here; 0 without a limit.

        With a folder on each node, each node gets an equal part of the bytes, and the limit applies to each node.
        """
        free = None if self.keep.free is None else self.storage.free_bytes()
        if free is None or self.keep.free is None:
            return 0
        return max(0, num_bytes - self.storage.num_nodes * (free - self.keep.free))

    def can_free(self, num_bytes: int, in_flight: Collection[int]) -> bool:
        """Whether `make_room` can probably free `num_bytes`, by the commits in the cache. Makes no request."""
        known = [manifest for step, manifest in self.root.known.items() if step not in in_flight]
        freed = sum(manifest.num_bytes for manifest in known[:-1] if manifest is not None)
        return self.keep.free is not None and freed >= num_bytes

    def _delete(
        self,
        step: int,
        listing: Listing,
        view: Commits,
        choose: Callable[[Commits], list[int]],
        *,
        wait_seconds: float = 0.0,
    ) -> tuple[list[int], Commits]:
        """Delete the steps that `choose` returns. Returns these steps, ascending, and the remaining commits. Waits at
        most `wait_seconds` for a deletion in progress: one that hangs must not block others.
        """
        is_alone = self._deleting.acquire(timeout=wait_seconds)
        try:
            doomed = choose(view)
            # Another process may have overwritten them: apply the rules to the present manifests.
            inside = {old: self.sweeper.read_folder(old) for old in doomed}
            if any(inside[old].manifest != view[old] for old in doomed):
                self.root.forget(doomed)
                view = self.root.view(listing)
                doomed = [old for old in choose(view) if old in inside]
            if doomed:
                self.check_taken()  # another process may have continued from one of them
            self.root.listing = None
            going = {old: inside[old] for old in doomed}
            doomed = self.sweeper.delete(going, self._needed_of, whole_folder=self.keep.whole_folder)
            view = view.without(doomed)
            if doomed:
                self.events.note("retention", step, deleted=doomed)
            self._announcer.rewrite(view)
            return doomed, view
        finally:
            if is_alone:
                self._deleting.release()

    def _needed_of(self, gone: Collection[int]) -> set[int]:
        """The steps in `gone`, whose manifests were just deleted, that a present commit borrows from.

        Raises RunTakenError if another process has taken the run, which may be about to borrow from any of them. A
        borrower checks the lender's manifest after it has taken the run, and again after it has put its own manifest
        (`commit`). So either this method sees the borrower's manifest, or the borrower sees that the lender is gone.
        """
        if self._is_changing:
            self.root.forget(list(self.root.known))
        listing = self.root.relist()
        self._tenure.refuse_if_later(self.storage, self.root.own, listing.starts)
        view = self.root.view(listing._replace(steps=[step for step in listing.steps if step not in gone]))
        self.root.listing = None
        return {lent.step for manifest in view.borrowers.values() for lent in manifest.elsewhere if lent.step in gone}

    def steps_to_delete(
        self, commits: Commits, *, protected: Collection[int] = (), broken: Collection[int] = ()
    ) -> list[int]:
        """The steps that retention does not keep now, without those that kept steps borrow from. `broken` steps stay,
        and are not counted.

        Empty if there is a step in a newer format: it may borrow from any other, and may be the best.
        """
        if self._in_newer_format(commits):
            return []
        going = deletable_steps(self.keep, commits, now=self._clock(), protected=protected, broken=broken)
        return without_needed(going, commits)

    def doomed(
        self,
        commits: Commits,
        *,
        protected: Collection[int] = (),
        broken: Collection[int] = (),
        coming_bytes: int | None = None,
    ) -> list[int]:
        """The steps to delete here now: those that the rules do not keep and, while less than `Keep(free=)` is free,
        others: first steps marked bad, then the oldest, and last the steps that are kept for good. Given
        `coming_bytes`, only the steps whose deletion is needed to make room for these. The newest readable step that is
        not `broken` stays, and so does the newest such step that is not marked bad.
        """
        readable = [step for step, manifest in commits.items() if manifest is not None and step not in broken]
        sound = commits.sound(readable)
        stay = {*protected, *readable[-1:], *sound[-1:]}
        by_rules = self.steps_to_delete(commits, protected=stay, broken=broken)
        missing, is_before = self.lack_bytes(coming_bytes or 0), coming_bytes is not None
        if not missing or self._in_newer_format(commits):
            return [] if is_before else by_rules
        lasting, unmarked = self.kept_for_good(commits), set(sound)
        others = [step for step in readable if step not in {*stay, *by_rules}]
        order = [*by_rules, *sorted(others, key=lambda step: (step in lasting, step in unmarked, step))]
        return steps_for_room(order, commits, missing, at_least=0 if is_before else len(by_rules))

    def protected(self) -> set[int]:
        """The steps, other than the newest, that retention keeps regardless of its rules: the step in the tracker."""
        tracked_step = self._announcer.tracked_step()
        return set() if tracked_step is None else {tracked_step}

    # --- tracker and journal ----------------------------------------------------------------------------------

    def announce(self, step: int | None = None, *, in_flight: Collection[int] = ()) -> None:
        """Bring tracker and journal up to date with the commits of all processes.

        Given `step`, which was just committed, the journal gets no lines for steps that retention is about to delete.
        After StorageUnavailableError, one of the files may be up to date and the other not.
        """

        def spared(view: Commits) -> Commits:
            """The steps that the retention after this commit will keep."""
            if step is None:
                return view
            return view.without(self.steps_to_delete(view, protected=self._protected(step, view, in_flight)))

        self._announcer.announce(step, spared)

    def learn(self) -> None:
        """Read the manifests of all commits in advance, such as while an archive is being sent."""
        self.root.view(self.root.listing or self.root.relist(), tolerant=True)

    def _put(self, manifest: Manifest, replaces: tuple[Manifest, str] | None) -> Manifest | None:
        """Put a manifest. Returns the manifest that it has replaced because that did not count, if there was one.

        Raises FileExistsError if there is any other manifest.
        """
        path, text, out = self.root.manifest_path(manifest.step), manifest.dump(), None
        if manifest.retires or replaces:
            self._announce(manifest)
        if replaces is None:
            with suppress(FileExistsError):
                self.storage.put_new(path, text)
                return None
            replaces = self._if_out(manifest.step)
            out = replaces[0]
            self._announce(manifest)
        self.storage.replace(path, text, version=replaces[1])
        return out

    def _announce(self, manifest: Manifest) -> None:
        """Put an intent. Raises RunTakenError. A start that takes the run puts its file and then lists intents, so
        either it sees this one, and has the replacement refused, or its file is seen here, and the manifest is not put.
        """
        with suppress(FileExistsError):
            self.storage.put_new(intent_name(manifest.step, manifest.attempt), manifest.dump())
        self.check_taken()

    def _if_out(self, step: int) -> tuple[Manifest, str]:
        """The manifest of a step and its version. Raises FileExistsError if it counts or cannot be read."""
        try:
            found = self.root.read(step, explain=False)
        except CheckpointError as error:
            raise FileExistsError(step) from error
        if self.root.excluded(self.root.relist(), [step]).get(step) != found[0].attempt:
            raise FileExistsError(step)
        return found

    def _protected(self, step: int, view: Commits, in_flight: Collection[int]) -> set[int]:
        """The steps that retention keeps after the commit of `step`, regardless of its rules."""
        newer = takewhile(lambda later: later >= step, reversed(view))
        return {*in_flight, *newer, *self.protected()}

    def _in_newer_format(self, commits: Commits) -> list[int]:
        return sorted(step for step in self.root.newer_format if step in commits and commits[step] is None)

    def _warn_of_what_is_kept(self, view: Commits) -> None:
        if newer := self._in_newer_format(view):
            self.root.warn_once(
                "newer format",
                f"{self.storage.locate('')}: keep= deletes nothing, because a newer version of async_ckpt has saved "
                f"step {newer[0]}, which may need any of the others; use that version, or delete the step",
            )
        metric = None if self.root.has_warned("best") else unknown_metric(self.keep, view)
        if metric is not None:
            self.root.warn_once(
                "best",
                f"{self.storage.locate('')}: Keep(best=…) keeps every step, because no record has the metric "
                f"{describe_missing_metric(metric, view)}",
            )


def _in_order(elsewhere: Iterable[Retired], here: Iterable[Retired]) -> tuple[Retired, ...]:
    """The commits that a rollback retires, in the order of steps; of each step, the commit at this root comes last."""
    here = {*here}
    return tuple(sorted({*elsewhere, *here}, key=lambda one: (one.step, one in here, one.attempt)))


def _exists(step: int) -> StepExistsError:
    return StepExistsError(f"step {step} is already committed; pass overwrite=True to replace it", step=step)
