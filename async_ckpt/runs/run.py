"""A managed run on one root: which steps are committed, and how one more becomes so (DESIGN §4).

In: a storage and the naming of its steps. Out: commits that are whole or not there. Knows nothing of: tensors, threads.

    <root>/step_00000500/rank_00000.<attempt>.tar     never written again once a manifest names it
    <root>/step_00000500/driver.<attempt>.tar         only if there is driver state, which one rank writes for all
    <root>/step_00000500/manifest.json                written last; its presence is the commit
    <root>/rollback-500.<attempt>.json                the intent of a rollback to this step: see `manifest`
    <root>/latest                                     the tracker: the newest step, for people, scripts and trainers
    <root>/checkpoints.jsonl                          one line per commit

Every decision is made from what is on storage at that moment, so several processes may share a root. What a commit costs
must not grow with the steps that are kept: a commit that this process has seen stays known until a listing, a rollback or
its own retention says otherwise, and what is about to be deleted is looked at again. The root is listed once for each
save. That no other process has committed since is told by the version of the journal, which each of them replaces.
"""

from __future__ import annotations

import logging
import os
import re
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import takewhile
from typing import Any, Final, NamedTuple

from ..errors import CheckpointError, NotCommittedError, StepBehindError, StepExistsError, StorageUnavailableError
from ..host.threads import Crew
from ..spans import Clock
from ..storage.base import Storage
from . import journal, manifest
from .manifest import INTENT, Archive, Elsewhere, Manifest, Retired, intent_name
from .naming import STEP_FORMAT, TRACKER, Tracker, folder_pattern, tracker_of
from .record import number
from .retention import Commits, Retention

# A manifest that a rollback has retired: still there for whoever wants it back, no longer a commit.
_RETIRED: Final = re.compile(r"manifest\.retired-[0-9a-f]{8}\.json")
_ARCHIVE: Final = re.compile(r"(rank_\d{5,}|driver)\.[0-9a-f]{8}\.tar")
_TEMP: Final = re.compile(r"\..*\.async_ckpt-tmp|\.async_ckpt-probe-[0-9a-f]+")
# Whoever is refused a move of the tracker has met a writer that was faster. So many in a row are a store that refuses all.
_TRACKER_TRIES: Final = 20
# How often a manifest that is listed, and gone when it is read, is looked for again: more often than others will replace it.
_READ_TRIES: Final = 20
# A writer that keeps one step deletes it with its next save: whoever reads that slowly comes too late many times.
TRIES: Final = 100
# Folders that are looked into for what other programs have written: those of the newest steps.
_LOOKED_INTO: Final = 10
# Requests to a store that are made at the same time.
_READS_IN_FLIGHT: Final = 16

_log = logging.getLogger("async_ckpt")


class _Listing(NamedTuple):
    """What one listing of the root says: the folders of steps, ascending, and the rollbacks that are announced."""

    steps: list[int]
    intents: list[tuple[int, str]]

    def has(self, step: int) -> bool:
        at = bisect_left(self.steps, step)
        return self.steps[at : at + 1] == [step]

    def having(self, step: int) -> _Listing:
        """The same with this step, whose folder may be younger."""
        return self if self.has(step) else _Listing(sorted([*self.steps, step]), self.intents)


class _Inside(NamedTuple):
    """What lies in the folder of a step: its manifest, if it has a sound one, and the archives that are named."""

    names: list[str]
    made: Manifest | None
    named: set[str]


class Run:
    """The steps below one root."""

    def __init__(
        self,
        storage: Storage,
        *,
        clock: Clock,
        step_format: str = STEP_FORMAT,
        tracker: Tracker | str | None = TRACKER,
        retention: Retention | None = None,
    ) -> None:
        self.storage = storage
        self._clock = clock
        self._step_format = step_format
        self._step_pattern = folder_pattern(step_format)
        self._tracker = tracker_of(tracker, step_format)
        if self._tracker is not None and self._tracker.name == journal.NAME:
            raise ValueError(
                f"tracker must not be {journal.NAME}, which is the journal; give it another name"
            )
        self.retention = retention or Retention()
        # The commit of one save runs beside the retention of the one before: one announces at a time.
        self._announcing = threading.Lock()
        # Under _announcing:
        self._told: list[int] | None = None  # the steps that the journal has; None: not known
        self._journal_version: str | None = None  # as it was written here last; None: not known
        self._tracks: int | None = None  # what the tracker names; None: not known
        self._lines: dict[
            int, bytes
        ] = {}  # of the journal, for known commits; each is taken out in one step, by any thread
        self._lock = threading.Lock()
        # Under _lock, and read without it:
        self._known = Commits()  # that were seen, and could be read; replaced as a whole
        self._made: set[int] = set()  # steps committed here by this object: known without asking
        self._parsed: dict[str, int] = {}  # the step that a name in the root stands for; -1: none
        self._said: set[str] = set()  # warnings that are given once
        # Replaced as a whole, by any thread:
        self._listing: _Listing | None = None  # the last one, and what was committed or deleted here since
        self._swept = False

    # --- reading: changes nothing on storage ------------------------------------------------------------------

    def folder(self, step: int) -> str:
        return self._step_format.format(step)

    def steps(self) -> list[int]:
        """The committed steps, ascending."""

        def committed(listing: _Listing) -> list[int]:
            paths = {self._manifest_path(step): step for step in listing.steps}
            found = [paths[path] for path in self.storage.existing(list(paths))]
            gone = self._retiring(listing.intents)
            return [step for step in found if not self._is_retired(step, gone)]

        return self._settled(committed)

    def latest(self) -> int | None:
        """The newest committed step."""

        def newest(listing: _Listing) -> list[int]:
            found = self._newest(listing.steps, self._retiring(listing.intents))
            return [] if found is None else [found]

        return next(iter(self._settled(newest)), None)

    def manifest(self, step: int) -> Manifest:
        """Raises NotCommittedError when there is none."""
        made = self._read(step)[0]
        gone = self._retiring(self._list().intents)
        if gone.get(step) == made.attempt:
            raise self._not_committed(step)
        return made

    def archive_path(self, step: int, archive: Archive) -> str:
        return f"{self.folder(step)}/{archive.name}"

    def view(self) -> Commits:
        """The committed steps with their manifests, ascending; None for one that is damaged. Known ones are not read again."""
        return self._view(self._list())

    def written_by_others(self) -> str | None:
        """What looks like a run here though nothing is committed: folders of steps, or a tracker, of another program."""
        folders = []
        for step in self._list().steps[: -_LOOKED_INTO - 1 : -1]:
            names = self.storage.names(self.folder(step))
            if any(not (_ARCHIVE.fullmatch(n) or _TEMP.fullmatch(n) or _RETIRED.fullmatch(n)) for n in names):
                folders.append(self.folder(step))
        told = (
            [", ".join(folders[:3]) + (f" and {len(folders) - 3} more" if len(folders) > 3 else "")]
            if folders
            else []
        )
        found = self._read_tracker(self._tracker) if self._tracker else None
        if self._tracker is not None and found is not None:
            told.append(
                f"{self._tracker.name}, which says {found[0][:100].decode(errors='replace').strip()!r}"
            )
        return " and ".join(told) or None

    # --- committing -------------------------------------------------------------------------------------------

    def check(self, step: int, *, overwrite: bool, rolled_back: bool, retire: bool) -> None:
        """Refuse a step that could not be committed: StepExistsError, StepBehindError."""
        listing = self._list()
        gone = self._retiring(listing.intents)
        steps = listing.steps
        above = bisect_right(steps, step)
        exists = self._newest(steps[bisect_left(steps, step) : above], gone) is not None
        if exists and not overwrite:
            raise _exists(step)
        if retire or (exists and not rolled_back):
            return
        newest = self._newest(steps[above:], gone)
        if newest is not None:
            raise StepBehindError(
                f"step {step} lies behind the committed step {newest}, and a run is a line; save above it, use another "
                'root, or open the checkpointer with on_rollback="retire"',
                step=step,
                newest=newest,
            )

    def check_known(self, step: int, *, overwrite: bool) -> None:
        """What `check` finds without asking the storage."""
        if step in self._made and not overwrite:
            raise _exists(step)

    def attempt_path(self, step: int, attempt: str, rank: int = 0) -> str:
        return f"{self.folder(step)}/rank_{rank:05d}.{attempt}.tar"

    def driver_path(self, step: int, attempt: str) -> str:
        return f"{self.folder(step)}/driver.{attempt}.tar"

    def found(self, step: int) -> tuple[Manifest, str] | None:
        """The step's manifest, if it is committed, and its version: what `overwrite` will replace, and nothing else."""
        try:
            made, version = self._read(step)
        except NotCommittedError:
            return None
        except CheckpointError:  # a damaged manifest may be overwritten like any other
            _, version = self.storage.read(self._manifest_path(step))
            made = Manifest(step, "", 1, 0.0, ())
        listing = self._listing or self._list()
        return None if self._retiring(listing.intents).get(step) == made.attempt else (made, version)

    def commit(
        self,
        step: int,
        attempt: str,
        archives: tuple[Archive, ...],
        *,
        replaces: tuple[Manifest, str] | None,
        retire: bool,
        record: Mapping[str, Any] | None = None,
        elsewhere: tuple[Elsewhere, ...] = (),
    ) -> Manifest:
        """Make the durable archives of an attempt the step's checkpoint. From here on it is true; then `announce` it.

        With `retire`, the newer steps leave the run by the same manifest.
        Raises StepExistsError when another writer was faster; its commit stands.
        """
        listing = self._listing or self._list()
        is_behind = bool(listing.steps) and listing.steps[-1] > step
        if listing.intents or (retire and is_behind) or replaces is not None:
            listing = self._list()
            # An earlier rollback counts while its manifest stands, which this commit may end: finish it first.
            self._clean(listing.intents)
        newer = self._look_up(listing.steps[bisect_right(listing.steps, step) :]) if retire else {}
        retires = tuple(Retired(s, found.attempt if found else "") for s, found in sorted(newer.items()))
        before = replaces[0] if replaces else None
        earlier = (before.attempt, *before.replaces) if before else ()
        made = Manifest(
            step,
            attempt,
            len(archives),
            self._clock(),
            archives,
            tuple(filter(None, earlier)),
            record or {},
            elsewhere,
            retires,
        )
        if retires:
            self.storage.put_new(intent_name(step, attempt), made.dump())
        try:
            self._put(made, replaces)
        except FileExistsError as error:
            raise StepExistsError(
                f"step {step} was committed by another writer in the meantime; theirs stands", step=step
            ) from error
        self._note({step: made})
        self._forget(newer)
        with self._lock:
            self._made.add(step)
            self._made -= newer.keys()
        self._listing = None if newer or listing.intents else (self._listing or listing).having(step)
        self._parsed[self.folder(step)] = step
        return made

    def adopt(self, made: Manifest, *, replaces: tuple[Manifest, str] | None) -> None:
        """Commit, under its own manifest, a step whose archives were copied here from another root.

        Raises StepExistsError when the step has been committed here meanwhile.
        """
        self._clean(self._list().intents)
        try:
            self._put(made, replaces)
        except FileExistsError as error:
            raise _exists(made.step) from error
        self._note({made.step: made})
        self._listing = None
        self._delete_replaced(made.step, replaces[0] if replaces else None)

    def committed(self, step: int) -> Manifest | None:
        """The step's manifest; None where there is none that can be read."""
        return self._try(step)

    def retired(self, step: int) -> set[str]:
        """Attempts at a step that a rollback has taken out of the run."""
        folder = self.folder(step)
        attempts = set()
        for name in self.storage.names(folder):
            if _RETIRED.fullmatch(name):
                try:
                    data = self.storage.read(f"{folder}/{name}")[0]
                    attempts.add(manifest.parse(data, path=f"{folder}/{name}").attempt)
                except (CheckpointError, FileNotFoundError):
                    continue
        gone = self._retiring((self._listing or self._list()).intents).get(step)
        return attempts | {gone} if gone else attempts

    def discard(self, step: int, attempt: str) -> None:
        """Delete the archive of an attempt that was not committed. If its manifest got there all the same, it stays."""
        try:
            named = self._inside(step).named
            archive, driver = self.attempt_path(step, attempt), self.driver_path(step, attempt)
            for path in (archive, driver):
                if path.rpartition("/")[2] not in named:
                    self.storage.delete(path)
            if archive.rpartition("/")[2] not in named:
                self.storage.delete(intent_name(step, attempt))
        except BaseException:
            self._swept = False  # the next save sweeps what this has left
            raise

    def retain(self, step: int, *, replaced: Manifest | None, in_flight: Collection[int]) -> list[int]:
        """Delete what `overwrite` and retention leave behind; the manifest goes first. Returns the deleted steps, ascending."""
        listing = self._listing or self._list()
        self._clean(listing.intents)
        view = self._view(listing)
        self._delete_replaced(step, replaced)
        protected = self._protected(step, view, in_flight)
        doomed = self.doomed(view, protected=protected)
        # Another process may have overwritten them: judged is what is there now.
        inside = {old: self._inside(old) for old in doomed}
        if any(inside[old].made != view[old] for old in doomed):
            self._forget(doomed)
            view = self._view(listing)
            doomed = [old for old in self.doomed(view, protected=protected) if old in inside]
        self._listing = None
        for old in reversed(doomed):  # a step may borrow from older ones, which go after it
            self._delete(old, inside[old])
        view = view.without(doomed)
        with self._announcing:
            if self._told != list(view):  # what another process has done since, too
                self._journal_version = None
                self._write_journal(view)
        self._say_what_best_lacks(view)
        return doomed

    def doomed(self, commits: Commits, *, protected: Collection[int] = ()) -> list[int]:
        """The steps that retention does not keep at this hour, and that no step which it keeps has borrowed from."""
        doomed = self.retention.doomed(commits, now=self._clock(), protected=protected)
        while doomed:
            gone = set(doomed)
            kept = (made for step, made in commits.borrowers.items() if step not in gone)
            needed = {borrowed.step for made in kept for borrowed in made.elsewhere}
            if needed.isdisjoint(gone):
                break
            doomed = [step for step in doomed if step not in needed]
        return doomed

    def sweep(self) -> list[str]:
        """Delete what dead writers left: temp files, unfinished uploads, archives that no manifest names, and intents."""
        swept = self.storage.sweep_uploads()
        listing = self._list()
        with suppress(CheckpointError):
            self._clean(listing.intents)
        newest = self._newest(listing.steps, {})
        found: list[str] = []
        tasks = [partial(self._sweep_folder, step, newest, found) for step in listing.steps]
        self._do_all([partial(self._sweep_folder, None, newest, found), *tasks])
        for step, attempt in listing.intents:
            if self._is_dead_intent(step, attempt):
                self.storage.delete(intent_name(step, attempt))
                found.append(intent_name(step, attempt))
        return swept + sorted(found)

    def sweep_once(self) -> None:
        """What an earlier process left behind; our own failures leave nothing."""
        if not self._swept:
            self._swept = True
            try:
                self.sweep()
            except BaseException:
                self._swept = False
                raise

    def journal(self) -> list[dict[str, object]]:
        """The records of `checkpoints.jsonl`, as far as they can be read."""
        try:
            return journal.parse(self.storage.read(journal.NAME)[0], locate=self.storage.locate)
        except FileNotFoundError:
            return []

    def learn(self) -> None:
        """Read ahead, while an archive is on its way, the manifests that the journal is made from."""
        self._view(self._listing or self._list(), tolerant=True)

    def announce(self, step: int | None = None, *, in_flight: Collection[int] = ()) -> None:
        """Bring tracker and journal up to date with what is committed, whoever committed it.

        After the commit of `step`, steps that its retention is about to delete have no line in the journal any more.
        Raises StorageUnavailableError; then the one may be up to date without the other.
        """
        with self._announcing:
            listing = self._listing if step is not None else None
            if listing is None or not (step is None or listing.has(step)):
                listing = self._list()
            self._listing = None  # until it is known that nobody else has been here
            self._clean(listing.intents)
            view = self._view(listing, tolerant=True)
            refusal: StorageUnavailableError | None = None
            if self._tracker is not None and view:
                try:
                    self._track(self._tracker, next(reversed(view)))
                except StorageUnavailableError as error:
                    refusal = error
            was_known = self._journal_version is not None
            if self._write_journal(self._spared(view, step, in_flight)):
                self._listing = listing if was_known and not listing.intents else None
            else:
                # Another process has been here, and may have overwritten, or taken out of the run, what is known.
                self._forget(self._known)
                view = self._view(self._list(), tolerant=True)
                self._write_journal(self._spared(view, step, in_flight))
            if refusal is not None:
                raise refusal

    # --- what is there ----------------------------------------------------------------------------------------

    def _manifest_path(self, step: int) -> str:
        return f"{self.folder(step)}/{manifest.NAME}"

    def _list(self) -> _Listing:
        """List the root: one request. What was seen before is not parsed again: there may be thousands of steps."""
        names = self.storage.names("")
        intents: list[tuple[int, str]] = []
        try:
            steps = list(map(self._parsed.__getitem__, names))
        except KeyError:
            steps = [self._parse(name, intents) for name in names]
        if len(self._parsed) > 2 * len(names) + 100:  # most of these were deleted since
            self._parsed = {}
        steps.sort()
        listing = self._listing = _Listing(steps[bisect_left(steps, 0) :], intents)
        return listing

    def _parse(self, name: str, intents: list[tuple[int, str]]) -> int:
        """The step that a name in the root stands for, or -1. An intent goes to `intents`."""
        step = self._parsed.get(name)
        if step is not None:
            return step
        if intent := INTENT.fullmatch(name):  # they come and go, and are of interest each time
            intents.append((int(intent[1]), intent[2]))
            return -1
        match = self._step_pattern.fullmatch(name)
        step = int(match[1]) if match and self.folder(int(match[1])) == name else -1
        self._parsed[name] = step
        return step

    def _settled(self, look: Callable[[_Listing], list[int]]) -> list[int]:
        """What `look` finds, ascending, in a listing, or in the next one: what is listed and not committed may have been
        deleted since, by a writer that has committed something newer.
        """
        listing = self._list()
        for _ in range(TRIES):
            found = look(listing)
            if found[-1:] == listing.steps[-1:]:
                return found
            before, listing = listing, self._list()
            if listing == before:
                return found
        raise overtaken(self.storage.locate(""))

    def _view(self, listing: _Listing, *, tolerant: bool = False) -> Commits:
        """The commits of a listing, ascending. `tolerant`: one that cannot be read now is left out."""
        gone = self._retiring(listing.intents)
        self._forget(gone)
        known = self._known
        if list(known) == listing.steps:
            return known
        found = self._look_up([step for step in listing.steps if step not in known], tolerant=tolerant)
        found = {step: made for step, made in found.items() if not _is_out(step, made, gone)}
        self._note({step: made for step, made in found.items() if made is not None})
        self._forget(self._known.keys() - {*listing.steps})
        known = self._known
        return Commits({s: known.get(s) for s in listing.steps if s in known or s in found})

    def _note(self, seen: Mapping[int, Manifest]) -> None:
        """These are committed."""
        if not seen:
            return
        with self._lock:
            self._known = self._known.having(seen)
            for step in seen:
                self._lines.pop(step, None)

    def _forget(self, steps: Iterable[int]) -> None:
        """Have these steps looked at again before anything is said of them."""
        gone = {*steps}
        if gone:
            with self._lock:
                self._known = self._known.without(gone)
                for step in gone:
                    self._lines.pop(step, None)

    def _look_up(self, steps: Sequence[int], *, tolerant: bool = False) -> dict[int, Manifest | None]:
        """Read the manifests of those steps that are committed, in parallel where reading is slow; None for a damaged one."""
        found: dict[int, Manifest | None] = {}

        def look(step: int) -> None:
            try:
                found[step] = self._read(step, say=False)[0]
            except NotCommittedError:
                pass
            except StorageUnavailableError:
                if not tolerant:
                    raise
            except CheckpointError:
                found[step] = None

        self._do_all([partial(look, step) for step in steps])
        return found

    def _do_all(self, tasks: Sequence[Callable[[], None]]) -> None:
        if not self.storage.remote or len(tasks) < 2:
            for task in tasks:
                task()
            return
        crew = Crew("look", min(_READS_IN_FLIGHT, len(tasks)))
        try:
            crew.run_all(tasks)
        finally:
            crew.stop()

    def _newest(self, steps: Sequence[int], gone: Mapping[int, str]) -> int | None:
        """The last of these steps, given in ascending order, that is committed."""
        for step in reversed(steps):
            if self.storage.exists(self._manifest_path(step)) and not self._is_retired(step, gone):
                return step
        return None

    def _read(self, step: int, *, say: bool = True) -> tuple[Manifest, str]:
        path = self._manifest_path(step)
        try:
            data, version = self.storage.read(path)
        except FileNotFoundError as error:
            raise (self._not_committed(step) if say else NotCommittedError(path, step=step)) from error
        return manifest.parse(data, path=path), version

    def _not_committed(self, step: int) -> NotCommittedError:
        steps = self.steps()
        have = f"committed: {', '.join(map(str, steps[-5:]))}" if steps else "nothing is committed yet"
        return NotCommittedError(
            f"{self.storage.locate('')}: no step {step}; {have}", path=self._manifest_path(step), step=step
        )

    def _try(self, step: int) -> Manifest | None:
        try:
            return self._read(step, say=False)[0]
        except CheckpointError:
            return None

    # --- rollbacks --------------------------------------------------------------------------------------------

    def _retiring(self, intents: Sequence[tuple[int, str]]) -> dict[int, str]:
        """What announced rollbacks have taken out of the run, as far as exactly the announced attempt stands committed."""
        gone: dict[int, str] = {}
        for step, attempt in intents:
            made = self._try(step)
            if made is not None and made.attempt == attempt:
                gone.update((retired.step, retired.attempt) for retired in made.retires)
        return gone

    def _is_retired(self, step: int, gone: Mapping[int, str]) -> bool:
        return step in gone and _is_out(step, self._try(step), gone)

    def _clean(self, intents: Sequence[tuple[int, str]]) -> None:
        """Rename the manifests that committed rollbacks have taken out of the run; then nobody needs the intents."""
        for step, attempt in intents:
            made = self._try(step)
            if made is None or made.attempt != attempt:
                continue  # not committed: it counts for nothing, and goes with its archive
            gone = {retired.step: retired.attempt for retired in made.retires}
            found = self._look_up(list(gone))
            for newer in sorted(found, reverse=True):
                if _is_out(newer, found[newer], gone):
                    folder = self.folder(newer)
                    retired = f"{folder}/manifest.retired-{os.urandom(4).hex()}.json"
                    with suppress(FileNotFoundError):  # somebody else was faster
                        self.storage.move(f"{folder}/{manifest.NAME}", retired)
            with self._lock:
                self._made -= gone.keys()
            self.storage.delete(intent_name(step, attempt))

    def _is_dead_intent(self, step: int, attempt: str) -> bool:
        """Whether nobody can commit what was announced any more: its archive is written first, and is not there."""
        made = self._try(step)
        if made is not None and made.attempt == attempt:
            return False  # it is true, and could not be cleaned up
        return not self.storage.exists(self.attempt_path(step, attempt))

    # --- committing and deleting ------------------------------------------------------------------------------

    def _put(self, made: Manifest, replaces: tuple[Manifest, str] | None) -> None:
        path = self._manifest_path(made.step)
        if replaces is None:
            self.storage.put_new(path, made.dump())
        else:
            self.storage.replace(path, made.dump(), version=replaces[1])

    def _protected(self, step: int, view: Commits, in_flight: Collection[int]) -> set[int]:
        """What retention does not touch after the commit of a step, whatever its rules say."""
        newer = takewhile(lambda later: later >= step, reversed(view))
        protected = {*in_flight, *newer}
        if self._tracker is not None:
            tracked = self._tracks
            if tracked is None:
                # Retention does not depend on the tracker: one that cannot be read names nothing.
                with suppress(StorageUnavailableError):
                    found = self._read_tracker(self._tracker)
                    tracked = self._tracker.parse(found[0]) if found else None
            if tracked is not None:
                protected.add(tracked)
        return protected

    def _borrowed(self, step: int) -> set[str]:
        """Archives of a step that later ones have borrowed from, also if the step itself names another by now."""
        made = (made for later, made in self.view().borrowers.items() if later > step)
        return {borrowed.archive.name for m in made for borrowed in m.elsewhere if borrowed.step == step}

    def _delete_replaced(self, step: int, replaced: Manifest | None) -> None:
        """What `overwrite` leaves behind."""
        borrowed = self._borrowed(step) if replaced else set()
        for archive in replaced.own_archives if replaced else ():
            if archive.name not in borrowed:
                self.storage.delete(self.archive_path(step, archive))

    def _inside(self, step: int) -> _Inside:
        """What lies in the folder of a step, and what of that its manifest names, or one that was retired."""
        folder = self.folder(step)
        for _ in range(_READ_TRIES):
            names = self.storage.names(folder)
            manifests: dict[str, Manifest] = {}
            try:
                for name in names:
                    if name == manifest.NAME or _RETIRED.fullmatch(name):
                        path = f"{folder}/{name}"
                        manifests[name] = manifest.parse(self.storage.read(path)[0], path=path)
            except CheckpointError:
                break
            except FileNotFoundError:  # deleted or replaced this moment: look again
                continue
            named = {archive.name for made in manifests.values() for archive in made.own_archives}
            return _Inside(names, manifests.get(manifest.NAME), named)
        # One is damaged: it might name any of them.
        return _Inside(names, None, {name for name in names if _ARCHIVE.fullmatch(name)})

    def _delete(self, step: int, inside: _Inside) -> None:
        folder = self.folder(step)
        self._forget([step])
        with self._lock:
            self._made.discard(step)
        self.storage.delete(f"{folder}/{manifest.NAME}")
        foreign = []
        for name in inside.names:
            if name in inside.named or _RETIRED.fullmatch(name):
                self.storage.delete(f"{folder}/{name}")
            elif name != manifest.NAME:
                foreign.append(name)
        if foreign:
            self._say_once(
                "foreign",
                f"{self.storage.locate(folder)}: step {step} was deleted by the keep_ options, but {foreign[0]!r} and "
                "whatever else async_ckpt did not write stays there, as in the folders of all steps that follow; "
                "delete it yourself",
            )

    def _sweep_folder(self, step: int | None, newest: int | None, swept: list[str]) -> None:
        """Sweep the folder of a step, or the root itself."""
        folder = "" if step is None else self.folder(step)
        names = self.storage.names(folder)
        decided = step is None or (newest is not None and step <= newest)
        temps = self.storage.sweep(
            folder, [n for n in names if _TEMP.fullmatch(n)], delete=True, decided=decided
        )
        archives = [n for n in names if _ARCHIVE.fullmatch(n)]
        dead: list[str] = []
        known = None if step is None else self._known.get(step)
        if known is not None and {*archives} == {archive.name for archive in known.own_archives}:
            archives = []  # nobody needs to ask
        if step is not None and archives and {*archives} != self._inside(step).named:
            dead = self.storage.sweep(folder, archives, delete=False, decided=decided)
            # Looked at again after the locks: a writer gives its lock up only once its manifest is there.
            named = self._inside(step).named | (self._borrowed(step) if dead else set())
            dead = [name for name in dead if name not in named]
        for name in dead:
            self.storage.delete(f"{folder}/{name}")
        if step is not None and len(temps) == len(names):
            # A writer was killed before it had written anything, or had ended.
            self.storage.remove_if_empty(folder)
        swept += [f"{folder}/{name}" if folder else name for name in (*temps, *dead)]

    # --- tracker and journal ----------------------------------------------------------------------------------

    def _spared(self, view: Commits, step: int | None, in_flight: Collection[int]) -> Commits:
        """What the retention that follows the commit of a step is going to leave."""
        if step is None:
            return view
        return view.without(self.doomed(view, protected=self._protected(step, view, in_flight)))

    def _write_journal(self, view: Commits) -> bool:
        """One line for each step; only those of new commits are made anew. Under _announcing.

        False when somebody else has written it since it was written here: every process does so with each commit.
        """
        lines = self._lines
        for step in view.keys() - lines.keys():
            made = view[step]
            if made is not None:
                lines[step] = journal.dump([(self.archive_path(step, made.archives[0]), made)])
        data = b"".join(filter(None, map(lines.get, view)))
        version, self._journal_version, self._told = self._journal_version, None, None
        try:
            self._journal_version = self.storage.replace(journal.NAME, data, version=version)
        except FileExistsError:
            return False
        self._told = list(view)
        return True

    def _track(self, tracker: Tracker, newest: int) -> None:
        """Move the tracker on to the newest committed step, if it may go there."""
        self._tracks = None
        for _ in range(_TRACKER_TRIES):
            with suppress(FileExistsError):  # another writer was faster: judged anew is what it wrote
                found = self._read_tracker(tracker)
                if found is None:
                    self.storage.put_new(tracker.name, tracker.dump(newest))
                elif self._may_move(tracked := tracker.parse(found[0]), newest):
                    self.storage.replace(tracker.name, tracker.dump(newest), version=found[1])
                else:
                    newest = tracked or newest
                self._tracks = newest
                return
        path = self.storage.locate(tracker.name)
        raise StorageUnavailableError(
            f"{path} is not moved to step {newest}: it changed {_TRACKER_TRIES} times meanwhile", path=path
        )

    def _may_move(self, tracked: int | None, newest: int) -> bool:
        """Whether the tracker may be moved from one step to another: forwards, and back only from a retired step.

        What names a newer step that is not committed here is somebody else's word, such as the trainer's own save in
        the same folder. What names none is nobody's.
        """
        # Even to the same: who has judged an older text must find it changed.
        if tracked is None or tracked <= newest:
            return True
        names = self.storage.names(self.folder(tracked))
        return manifest.NAME not in names and any(_RETIRED.fullmatch(name) for name in names)

    def _read_tracker(self, tracker: Tracker) -> tuple[bytes, str] | None:
        try:
            return self.storage.read(tracker.name)
        except FileNotFoundError:
            return None

    # --- what is said once ------------------------------------------------------------------------------------

    def _say_what_best_lacks(self, view: Commits) -> None:
        if "best" in self._said:
            return
        metric = self.retention.unheard_metric(view)
        if metric is not None:
            numbers = {
                key
                for made in view.values()
                if made
                for key, value in made.record.items()
                if number(value) is not None
            }
            have = (
                f"their records have {', '.join(sorted(numbers))}" if numbers else "no record has any number"
            )
            self._say_once(
                "best",
                f"{self.storage.locate('')}: keep_best keeps every step, for no record has the metric {metric!r} ({have}); "
                f'give it with each save, as record={{"{metric}": …}}',
            )

    def _say_once(self, what: str, message: str) -> None:
        with self._lock:
            new = what not in self._said
            self._said.add(what)
        if new:
            _log.warning("%s", message)


def _is_out(step: int, made: Manifest | None, gone: Mapping[int, str]) -> bool:
    """Whether a rollback took this very commit of the step out of the run; one that is damaged is what was there."""
    return step in gone and (made is None or made.attempt == gone[step])


def overtaken(where: str) -> StorageUnavailableError:
    """What to raise when something newer has come each of `TRIES` times."""
    return StorageUnavailableError(
        f"{where}: {TRIES} times in a row the newest step was deleted before it was read; have the writer keep more "
        "of them (keep_last)",
        path=where,
    )


def _exists(step: int) -> StepExistsError:
    return StepExistsError(f"step {step} is committed already; pass overwrite=True to replace it", step=step)
