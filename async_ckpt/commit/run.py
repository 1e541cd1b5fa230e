"""A managed run on one root: which steps are committed, and how one more becomes so (DESIGN §4).

In: a storage and the naming of its steps. Out: commits that are whole or not there. Knows nothing of: tensors, threads.

    <root>/step_00000500/rank_00000.<attempt>.tar     never written again once a manifest names it
    <root>/step_00000500/driver.<attempt>.tar         only if there is driver state, which one rank writes for all
    <root>/step_00000500/manifest.json                written last; its presence is the commit
    <root>/latest                                     the tracker: the newest step, for people, scripts and trainers
    <root>/checkpoints.jsonl                          one line per commit

Every decision is made from what is on storage at that moment, so several processes may share a root.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from typing import Any, Final

from ..errors import (
    CheckpointError,
    CorruptCheckpointError,
    FormatVersionError,
    NotCommittedError,
    StepBehindError,
    StepExistsError,
    StorageUnavailableError,
)
from ..spans import Clock
from ..storage.base import Storage
from . import journal, manifest
from .manifest import Archive, Elsewhere, Manifest
from .naming import STEP_FORMAT, TRACKER, Tracker, folder_pattern, tracker_of
from .retention import Retention

# A manifest that a rollback has retired: still there for whoever wants it back, no longer a commit.
_RETIRED: Final = re.compile(r"manifest\.retired-[0-9a-f]{8}\.json")
_ARCHIVE: Final = re.compile(r"(rank_\d{5,}|driver)\.[0-9a-f]{8}\.tar")
_TEMP: Final = re.compile(r"\..*\.async_ckpt-tmp|\.async_ckpt-probe-[0-9a-f]+")
# Whoever is refused a move of the tracker has met a writer that was faster. So many in a row are a store that refuses all.
_TRACKER_TRIES: Final = 20


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
        self._known: dict[int, Manifest] = {}  # what the journal was last made from; under _announcing
        self._newest: Manifest | None = None  # committed here since the last time; under _announcing
        self._swept = False
        self._made: set[int] = set()  # steps committed here by this object: known without asking

    # --- reading: changes nothing on storage ------------------------------------------------------------------

    def folder(self, step: int) -> str:
        return self._step_format.format(step)

    def steps(self) -> list[int]:
        """The committed steps, ascending."""
        steps = {f"{self.folder(step)}/{manifest.NAME}": step for step in self._folders()}
        return [steps[path] for path in self.storage.existing(list(steps))]

    def latest(self) -> int | None:
        """The newest committed step."""
        for step in reversed(self._folders()):
            if self.storage.exists(f"{self.folder(step)}/{manifest.NAME}"):
                return step
        return None

    def manifest(self, step: int) -> Manifest:
        """Raises NotCommittedError when there is none."""
        return self._read(step)[0]

    def archive_path(self, step: int, archive: Archive) -> str:
        return f"{self.folder(step)}/{archive.name}"

    # --- committing -------------------------------------------------------------------------------------------

    def check(self, step: int, *, overwrite: bool, rolled_back: bool, retire: bool) -> None:
        """Refuse a step that could not be committed: StepExistsError, StepBehindError."""
        exists = self.storage.exists(f"{self.folder(step)}/{manifest.NAME}")
        if exists and not overwrite:
            raise _exists(step)
        newest = self.latest()
        if newest is not None and newest > step and not retire and (rolled_back or not exists):
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
            return self._read(step)
        except NotCommittedError:
            return None
        except CheckpointError:  # a damaged manifest may be overwritten like any other
            _, version = self.storage.read(f"{self.folder(step)}/{manifest.NAME}")
            return Manifest(step, "", 1, 0.0, ()), version

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

        Raises StepExistsError when another writer was faster; its commit stands.
        """
        if retire:
            self._retire_above(step)
        before = replaces[0] if replaces else None
        earlier = (before.attempt, *before.replaces) if before else ()
        made = Manifest(
            step, attempt, len(archives), self._clock(), archives, earlier, record or {}, elsewhere
        )
        path = f"{self.folder(step)}/{manifest.NAME}"
        try:
            if replaces is None:
                self.storage.put_new(path, made.dump())
            else:
                self.storage.replace(path, made.dump(), version=replaces[1])
        except FileExistsError as error:
            raise StepExistsError(
                f"step {step} was committed by another writer in the meantime; theirs stands", step=step
            ) from error
        self._made.add(step)
        with self._announcing:
            self._known[step] = self._newest = made
        return made

    def adopt(self, made: Manifest, *, replaces: tuple[Manifest, str] | None) -> None:
        """Commit, under its own manifest, a step whose archives were copied here from another root.

        Raises StepExistsError when the step has been committed here meanwhile.
        """
        path = f"{self.folder(made.step)}/{manifest.NAME}"
        try:
            if replaces is None:
                self.storage.put_new(path, made.dump())
            else:
                self.storage.replace(path, made.dump(), version=replaces[1])
        except FileExistsError as error:
            raise _exists(made.step) from error
        with self._announcing:
            self._known.pop(made.step, None)
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
        return attempts

    def discard(self, step: int, attempt: str) -> None:
        """Delete the archive of an attempt that was not committed. If its manifest got there all the same, it stays."""
        named = self._named(step)
        for path in (self.attempt_path(step, attempt), self.driver_path(step, attempt)):
            if path.rpartition("/")[2] not in named:
                self.storage.delete(path)

    def retain(self, step: int, *, replaced: Manifest | None, in_flight: Collection[int]) -> list[int]:
        """Delete what `overwrite` and retention leave behind; the manifest goes first. Returns the deleted steps."""
        self._delete_replaced(step, replaced)
        steps = self.steps()
        tracked = self._tracked()
        safe_from = step if tracked is None else min(step, tracked)
        protected = {*in_flight, *(s for s in steps if s >= safe_from)}
        doomed = self.doomed(self.manifests(steps), protected=protected)
        if doomed:
            # Another process may have overwritten them: judged are those that are there now.
            self._forget(doomed)
            now = set(self.doomed(self.manifests(steps), protected=protected))
            doomed = [old for old in doomed if old in now]
        for old in doomed:
            self._delete(old)
        if doomed:
            self.announce()
        return doomed

    def doomed(self, commits: Mapping[int, Manifest | None], *, protected: Collection[int] = ()) -> list[int]:
        """The steps that retention does not keep at this hour, and that no step which it keeps has borrowed from."""
        doomed = self.retention.doomed(commits, now=self._clock(), protected=protected)
        while True:
            kept = [made for step, made in commits.items() if step not in doomed and made is not None]
            needed = {borrowed.step for made in kept for borrowed in made.elsewhere}
            if needed.isdisjoint(doomed):
                return doomed
            doomed = [step for step in doomed if step not in needed]

    def manifests(self, steps: Iterable[int]) -> dict[int, Manifest | None]:
        """The manifests of committed steps, read once; None for one that is damaged. Deleted ones are left out."""
        found: dict[int, Manifest | None] = {}
        with self._announcing:
            for step in steps:
                try:
                    found[step] = self._known[step] = self._known.get(step) or self.manifest(step)
                except NotCommittedError:
                    continue
                except (CorruptCheckpointError, FormatVersionError):
                    found[step] = None
        return found

    def sweep(self) -> list[str]:
        """Delete what dead writers left: temp files, unfinished uploads, and archives that no manifest names."""
        swept = self.storage.sweep_uploads()
        newest = self.latest()
        for step in [None, *self._folders()]:
            folder = "" if step is None else self.folder(step)
            names = self.storage.names(folder)
            decided = step is None or (newest is not None and step <= newest)
            temps = self.storage.sweep(
                folder, [n for n in names if _TEMP.fullmatch(n)], delete=True, decided=decided
            )
            archives = [n for n in names if _ARCHIVE.fullmatch(n)]
            dead: list[str] = []
            if step is not None and archives and archives != self._named(step):
                dead = self.storage.sweep(folder, archives, delete=False, decided=decided)
                # Looked at again after the locks: a writer gives its lock up only once its manifest is there.
                named = {*self._named(step), *(self._borrowed(step) if dead else ())}
                dead = [name for name in dead if name not in named]
            for name in dead:
                self.storage.delete(f"{folder}/{name}")
            if temps and step is not None:
                # It is gone already; the folder goes, too, if that was all.
                self.storage.delete(f"{folder}/{temps[0]}")
            swept += [f"{folder}/{name}" if folder else name for name in (*temps, *dead)]
        return swept

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
            return journal.parse(self.storage.read(journal.NAME)[0])
        except FileNotFoundError:
            return []

    # --- parts ------------------------------------------------------------------------------------------------

    def _borrowed(self, step: int) -> set[str]:
        """Archives of a step that later ones have borrowed from, also if the step itself names another by now."""
        made = self.manifests(later for later in self.steps() if later > step).values()
        return {b.archive.name for m in made if m is not None for b in m.elsewhere if b.step == step}

    def _delete_replaced(self, step: int, replaced: Manifest | None) -> None:
        """What `overwrite` leaves behind."""
        borrowed = self._borrowed(step) if replaced else set()
        for archive in replaced.own_archives if replaced else ():
            if archive.name not in borrowed:
                self.storage.delete(self.archive_path(step, archive))

    def _folders(self) -> list[int]:
        found = (self._step_pattern.fullmatch(name) for name in self.storage.names(""))
        return sorted(int(match[1]) for match in found if match and self.folder(int(match[1])) == match[0])

    def _read(self, step: int) -> tuple[Manifest, str]:
        path = f"{self.folder(step)}/{manifest.NAME}"
        try:
            data, version = self.storage.read(path)
        except FileNotFoundError as error:
            steps = self.steps()
            have = f"committed: {', '.join(map(str, steps[-5:]))}" if steps else "nothing is committed yet"
            raise NotCommittedError(
                f"{self.storage.locate('')}: no step {step}; {have}", path=path, step=step
            ) from error
        return manifest.parse(data, path=path), version

    def _named(self, step: int) -> list[str]:
        """Archives that the step's manifest names, or one that was retired."""
        folder = self.folder(step)
        names: list[str] = []
        for name in self.storage.names(folder):
            if name == manifest.NAME or _RETIRED.fullmatch(name):
                try:
                    parsed = manifest.parse(self.storage.read(f"{folder}/{name}")[0], path=f"{folder}/{name}")
                except CheckpointError:  # damaged: it might name any of them
                    return self.storage.names(folder)
                except FileNotFoundError:  # deleted or replaced this moment: look again
                    return self._named(step)
                names += [archive.name for archive in parsed.own_archives]
        return sorted(names)

    def _retire_above(self, step: int) -> None:
        for newer in reversed([s for s in self.steps() if s > step]):
            folder = self.folder(newer)
            self._made.discard(newer)
            self.storage.move(
                f"{folder}/{manifest.NAME}", f"{folder}/manifest.retired-{os.urandom(4).hex()}.json"
            )

    def learn(self) -> None:
        """Read ahead, while an archive is on its way, the manifests that the journal is made from."""
        with self._announcing:
            for step in self.steps():
                made = self._known.get(step) or self._try(step)
                if made is not None:
                    self._known[step] = made

    def announce(self) -> None:
        """Bring tracker and journal up to date with what is committed, whoever committed it."""
        with self._announcing:
            self._announce()

    def _announce(self) -> None:
        while True:
            steps = self.steps()
            newest = steps[-1:]  # its manifest may be new, or replaced; those of the others are known
            told, self._newest = self._newest, None
            fresh = newest if told is None or newest != [told.step] else []
            known = ((s, (self._known.get(s) if s not in fresh else None) or self._try(s)) for s in steps)
            self._known = {step: made for step, made in known if made is not None}
            if self._tracker is not None and steps:
                self._track(self._tracker, steps[-1])
            self.storage.replace(journal.NAME, self._journal())
            # Another process may have committed in between and been overwritten just now.
            if self.latest() == (steps[-1] if steps else None):
                return

    def _try(self, step: int) -> Manifest | None:
        try:
            return self.manifest(step)
        except CheckpointError:
            return None

    def _journal(self) -> bytes:
        paths = ((self.archive_path(step, made.archives[0]), made) for step, made in self._known.items())
        return journal.dump((path, self.storage.locate(path), made) for path, made in paths)

    def _track(self, tracker: Tracker, newest: int) -> None:
        """Move the tracker on to the newest committed step, if it may go there."""
        for _ in range(_TRACKER_TRIES):
            with suppress(FileExistsError):  # another writer was faster: judged anew is what it wrote
                found = self._read_tracker(tracker)
                if found is None:
                    self.storage.put_new(tracker.name, tracker.dump(newest))
                elif self._may_move(tracker.parse(found[0]), newest):
                    self.storage.replace(tracker.name, tracker.dump(newest), version=found[1])
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

    def _tracked(self) -> int | None:
        """The step that the tracker names, if it names one."""
        tracker = self._tracker
        found = self._read_tracker(tracker) if tracker else None
        return tracker.parse(found[0]) if tracker and found else None

    def _read_tracker(self, tracker: Tracker) -> tuple[bytes, str] | None:
        try:
            return self.storage.read(tracker.name)
        except FileNotFoundError:
            return None

    def _forget(self, steps: Iterable[int]) -> None:
        """Have the manifests of these steps read again when they are asked for."""
        with self._announcing:
            for step in steps:
                self._known.pop(step, None)

    def _delete(self, step: int) -> None:
        named = self._named(step)
        folder = self.folder(step)
        self._made.discard(step)
        self.storage.delete(f"{folder}/{manifest.NAME}")
        for name in self.storage.names(folder):
            if name in named or _RETIRED.fullmatch(name):
                self.storage.delete(f"{folder}/{name}")


def _exists(step: int) -> StepExistsError:
    return StepExistsError(f"step {step} is committed already; pass overwrite=True to replace it", step=step)
