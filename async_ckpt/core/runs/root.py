"""The view of one root: its steps, which of them are committed, and which rollbacks are announced.

In: a storage and the naming of its steps. Out: listings and manifests. Knows nothing of: committing.

A commit that this process has seen stays known until a listing, a rollback or its own retention removes it.
"""

from __future__ import annotations

import logging
import threading
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from typing import Final, NamedTuple

from ...errors import CheckpointError, FormatVersionError, NotCommittedError, StorageUnavailableError
from ..storage.interface import Storage
from .foreign_entries import newest_of_other_namings, step_formats
from .manifest import NAME as MANIFEST
from .manifest import Archive, Manifest, archive_name, intent_name, parse_intent, retired_name, seal, unseal
from .manifest import parse as parse_manifest
from .marks import Mark, marks_of, split_marks
from .mover_file import NAME as MOVING
from .naming import STEP_FORMAT, folder_pattern
from .receipts import look_all
from .retention import Commits
from .starts import Line, Seen, Start, StartsByName, about_start, later_than, split_starts
from .tiers_file import NAME as TIERS

# A writer with keep=1 deletes each step at its next save, so a slow reader may come too late many times in a row.
TRIES: Final = 100
# Manifests that are read, and held in memory as text, at a time.
_READ_TOGETHER: Final = 1024

_log = logging.getLogger("async_ckpt")


class Listing(NamedTuple):
    """One listing of the root: the steps that have folders, ascending, the announced rollbacks, and the starts."""

    steps: list[int]
    intents: list[tuple[int, str]]
    starts: list[Start] = []  # noqa: RUF012 - never changed
    is_one_step: bool = False  # the root is itself the folder of a step

    def has(self, step: int) -> bool:
        at = bisect_left(self.steps, step)
        return self.steps[at : at + 1] == [step]

    def having(self, step: int) -> Listing:
        """This listing with a step added, whose folder may have been made since."""
        return self if self.has(step) else self._replace(steps=sorted([*self.steps, step]))


class Root:
    """The steps below one root, and a cache of their manifests. A Run creates and owns it. Thread-safe."""

    def __init__(self, storage: Storage, step_format: str = STEP_FORMAT) -> None:
        self.storage = storage
        self._step_format = step_format
        self._step_pattern = folder_pattern(step_format)
        self._lock = threading.Lock()
        # Written under _lock, read without it:
        self.known = Commits()  # commits that were seen and could be read; replaced as a whole
        self.lines: dict[int, bytes] = {}  # journal lines of known commits; any thread may remove one
        self.committed_here: set[int] = set()  # steps that this object has committed
        self._parsed: dict[str, int] = {}  # the step of each name in the root; -1: not a step
        self._warned_topics: set[str] = set()  # warnings that were given, each only once
        # Replaced as a whole, by any thread:
        self.starts: list[Start] = []  # from the last listing
        self.marks: list[Mark] = []  # from the last listing
        self.has_mover_file = self.has_tiers_file = False  # the last listing had a `moving.json`, a `tiers.json`
        # Attempts, by step, that do not count because of commits at other roots:
        self.outside: dict[int, str] = {}
        # Attempts, by step, that did not count at the last `view`:
        self.out: dict[int, str] = {}
        # The start of this process, from its first save on, and the tokens of the starts before it:
        self.own: Start | None = None
        self.ancestors: frozenset[str] = frozenset()
        self._seen: dict[Start, Seen | None] = {}  # the commits that each start has seen, which never change
        # Steps in a format that only a newer version of the library reads, at the last `look_up`:
        self.newer_format: frozenset[int] = frozenset()
        self.is_viewed = False  # `view` has returned all commits of the root at least once
        # The last listing, updated by this object's commits. None: list again.
        self.listing: Listing | None = None

    def folder(self, step: int) -> str:
        return self._step_format.format(step)

    def archive_path(self, step: int, archive: Archive) -> str:
        return f"{self.folder(step)}/{archive.name}"

    def attempt_path(self, step: int, attempt: str, rank: int = 0) -> str:
        return f"{self.folder(step)}/{archive_name(rank, attempt)}"

    def driver_path(self, step: int, attempt: str) -> str:
        return f"{self.folder(step)}/driver.{attempt}.tar"

    def manifest_path(self, step: int) -> str:
        return f"{self.folder(step)}/{MANIFEST}"

    def relist(self, names: list[str] | None = None) -> Listing:
        """List the root by one request, or use `names` from a listing that was just made.

        Known names are not parsed again, since there may be thousands of steps.
        """
        names, self.marks = split_marks(self.storage.names("") if names is None else names)
        names, starts = split_starts(names)
        self.starts, self.has_mover_file, self.has_tiers_file = starts, MOVING in names, TIERS in names
        intents: list[tuple[int, str]] = []
        try:
            steps = list(map(self._parsed.__getitem__, names))
        except KeyError:
            steps = [self._parse(name, intents) for name in names]
        if len(self._parsed) > 2 * len(names) + 100:  # most of the cached names were deleted
            self._parsed = {}
        steps.sort()
        listing = self.listing = Listing(steps[bisect_left(steps, 0) :], intents, starts, MANIFEST in names)
        return listing

    def _parse(self, name: str, intents: list[tuple[int, str]]) -> int:
        """The step of a name in the root, or -1. An intent is added to `intents`."""
        step = self._parsed.get(name)
        if step is not None:
            return step
        if intent := parse_intent(name):  # not cached, since each listing must report it
            intents.append(intent)
            return -1
        step = self._parsed[name] = self.step_of(name)
        return step

    def step_of(self, name: str) -> int:
        """The step whose folder has this name, or -1."""
        match = self._step_pattern.fullmatch(name)
        return int(match[1]) if match and self.folder(int(match[1])) == name else -1

    def is_step(self, name: str) -> bool:
        """True if this is the name of a step's folder."""
        return self.step_of(name) >= 0

    def list_settled(self, look: Callable[[Listing], list[int]]) -> list[int]:
        """The steps, ascending, that `look` returns for a listing. The root is listed again while the listing's newest
        step is not among them: a writer may have committed a newer step and deleted this one since.
        """
        listing = self.relist()
        for _ in range(TRIES):
            steps = look(listing)
            if steps[-1:] == listing.steps[-1:]:
                return steps
            before, listing = listing, self.relist()
            if listing == before:
                return steps
        raise overtaken_error(self.storage.locate(""))

    def view(self, listing: Listing, *, tolerant: bool = False) -> Commits:
        """The commits of a listing, ascending. With `tolerant`, commits that cannot be read now are left out."""
        retired = self._retired_by(listing, self.line(listing)) if listing.intents else {}
        self.forget(retired)
        manifests: dict[int, Manifest | None] = {}
        if list(self.known) != listing.steps:
            unknown = [step for step in listing.steps if step not in self.known]
            manifests = self.look_up(unknown, tolerant=tolerant)
            manifests = {
                step: manifest for step, manifest in manifests.items() if not is_excluded(step, manifest, retired)
            }
            self.note({step: manifest for step, manifest in manifests.items() if manifest is not None})
            self.forget(self.known.keys() - {*listing.steps})
        known = self.known
        line = Line([*known], listing.starts, known.get, self.seen, self.own)
        stale = self.out = line.out(known) | {
            step: attempt for step, attempt in self.outside.items() if is_excluded(step, known.get(step), self.outside)
        }
        if stale:
            self.forget(stale)
            known = self.known
        if list(known) != listing.steps:
            of_listing = (s for s in listing.steps if s in known or (s in manifests and s not in stale))
            known = Commits({step: known.get(step) for step in of_listing})
        self.is_viewed |= not tolerant
        return known.with_marks(marks_of(self.marks, lambda step: attempt_of(known.get(step))))

    def note(self, manifests: Mapping[int, Manifest]) -> None:
        """Note that these steps are committed."""
        if not manifests:
            return
        with self._lock:
            self.known = self.known.having(manifests)
            for step in manifests:
                self.lines.pop(step, None)

    def note_commit(self, manifest: Manifest, newer: Collection[int], listing: Listing) -> None:
        """Note that this object has committed a step, and with it retired the `newer` steps."""
        self.note({manifest.step: manifest})
        self.forget(newer)
        with self._lock:
            self.committed_here.add(manifest.step)
            self.committed_here.difference_update(newer)
        self.listing = None if newer or listing.intents else (self.listing or listing).having(manifest.step)
        self._parsed[self.folder(manifest.step)] = manifest.step

    def note_deleted(self, step: int) -> None:
        """Note that this object is about to delete a step."""
        self.forget([step])
        with self._lock:
            self.committed_here.discard(step)

    def forget(self, steps: Iterable[int]) -> None:
        """Drop these steps from the cache, so that they are read again."""
        forgotten = {*steps}
        if forgotten:
            with self._lock:
                self.known = self.known.without(forgotten)
                for step in forgotten:
                    self.lines.pop(step, None)

    def read_from(self, storage: Storage) -> None:
        """Read and write through another storage of the same place from now on."""
        self.storage = storage
        self.forget(list(self.known))
        self.listing = None

    def look_up(self, steps: Sequence[int], *, tolerant: bool = False) -> dict[int, Manifest | None]:
        """The manifests of those of these steps that are committed. A store is read in parallel.

        None stands for a manifest that is damaged or in a newer format.
        """
        manifests: dict[int, Manifest | None] = {}
        newer_format: set[int] = set()

        def look(step: int, content: tuple[bytes, str] | None) -> None:
            try:
                manifests[step] = self.read(step, content, explain=False)[0]
            except NotCommittedError:
                pass
            except StorageUnavailableError:
                if not tolerant:
                    raise
            except CheckpointError as error:
                manifests[step] = None
                if isinstance(error, FormatVersionError):
                    newer_format.add(step)

        if not self.storage.remote:  # on disk, checking which files exist is faster than failing to open them
            known_paths = {self.manifest_path(step): step for step in steps}
            steps_there = [known_paths[path] for path in self.storage.existing([*known_paths])]
        else:
            steps_there = [*steps]
        for first in range(0, len(steps_there), _READ_TOGETHER):
            paths = {step: self.manifest_path(step) for step in steps_there[first : first + _READ_TOGETHER]}
            contents = self.storage.read_many([*paths.values()])
            for step, path in paths.items():
                if (content := contents.get(path)) is not None:
                    look(step, content)
            look_all(self.storage, [partial(look, step, None) for step, path in paths.items() if path not in contents])
        with self._lock:
            self.newer_format = self.newer_format.difference(steps) | newer_format
        return manifests

    def newest(self, listing: Listing, steps: Sequence[int] | None = None) -> int | None:
        """The last of these ascending steps, by default of all listed, that is committed and counts."""
        line = self.line(listing)
        retired = {**self.outside, **self._retired_by(listing, line)}
        for step in reversed(listing.steps if steps is None else steps):
            is_there = self.storage.exists(self.manifest_path(step))
            if is_there and not self.is_retired(step, {**retired, **line.out([step])}):
                return step
        return None

    def read(
        self, step: int, content: tuple[bytes, str] | None = None, *, explain: bool = True
    ) -> tuple[Manifest, str]:
        """The manifest of a step and its version; parsed from `content`, if given. Raises NotCommittedError."""
        path = self.manifest_path(step)
        try:
            data, version = content or self.storage.read(path)
        except FileNotFoundError as error:
            raise (self.not_committed(step) if explain else NotCommittedError(path, step=step)) from error
        return parse_manifest(data, path=self.storage.locate(path)), version

    def not_committed(self, step: int) -> NotCommittedError:
        steps = self.steps()
        have = f"committed: {', '.join(map(str, steps[-5:]))}" if steps else "nothing is committed yet"
        other = newest_of_other_namings(self.storage, self.is_step)
        if other is not None:
            have += f"; but {other.folder} is, under another naming; {other.advice}"
        return NotCommittedError(
            f"{self.storage.locate('')}: no step {step}; {have}", path=self.manifest_path(step), step=step
        )

    def find(self, step: int) -> Manifest | None:
        try:
            return self.read(step, explain=False)[0]
        except CheckpointError:
            return None

    def known_or_found(self, step: int) -> Manifest | None:
        """The manifest of a step from the cache, or else as it can be read now; None if it cannot."""
        return self.known.get(step) or self.find(step)

    def line(self, listing: Listing) -> Line:
        """The rule that decides which commits of a listing count. Reads manifests only if there are several starts."""
        return Line(listing.steps, listing.starts, cache(self.known_or_found), self.seen, self.own)

    def seen(self, start: Start) -> Seen | None:
        """The commits that a listed start has seen; None if unknown."""
        if start not in self._seen:
            self._seen[start] = Seen.read(self.storage, start)
        return self._seen[start]

    def see(self, own: Start) -> tuple[list[Start], dict[int, str]]:
        """The starts that a new start sees, and the attempts, by step, that it continues from.

        A replacement of a manifest that an earlier process has announced, but not made yet, will be refused.
        """
        listing = self.relist()
        for step, _ in listing.intents:
            self.make_new_version(step, own.label)
        if listing.intents:
            listing = self.relist()
        try:
            commits = self.view(listing)
        except StorageUnavailableError:  # perhaps because of a single manifest
            return listing.starts, dict.fromkeys(self.steps(), "")
        return listing.starts, {step: attempt_of(manifest) or "" for step, manifest in commits.items()}

    def make_new_version(self, step: int, mark: str) -> None:
        """Rewrite a manifest with other bytes, so that the storage refuses to replace its previous version."""
        path = self.manifest_path(step)
        with suppress(FileNotFoundError, FileExistsError, ValueError):  # its version changed just now, or it is damaged
            data, version = self.storage.read(path)
            fields = {**unseal(data), "seen_by": mark}
            del fields["digest"]
            self.storage.replace(path, seal(fields), version=version)

    def descended(self, others: Sequence[Root], starts: Sequence[Start]) -> list[str]:
        """The tokens of the starts here and at other roots that have answered, and of their ancestors."""
        of_others = {start.token for other in others for start in other.starts} | self.ancestors
        of_others.update(*(other.ancestors for other in others))
        self.ancestors = frozenset(of_others.union(self.recorded_ancestors(starts), (start.token for start in starts)))
        return sorted(self.ancestors)

    def recorded_ancestors(self, starts: Sequence[Start]) -> set[str]:
        """The ancestors that the file of the newest of these starts names."""
        listed = about_start(self.storage, max(starts)).get("ancestors") if starts else None
        return {token for token in listed if isinstance(token, str)} if isinstance(listed, list) else set()

    def note_start(self, own: Start, seen: Seen | None) -> None:
        """Note the start of this process, and the commits that it has seen."""
        self.own = own
        self._seen[own] = seen

    def have_seen(self, starts: Iterable[Start], manifest: Manifest) -> bool:
        """True if all these starts have seen exactly this commit."""
        seen_by_starts = (self.seen(start) if start.has_seen else None for start in starts)
        return all(seen is not None and seen.names(manifest.step, manifest.attempt) for seen in seen_by_starts)

    def _retired_by(self, listing: Listing, line: Line) -> dict[int, str]:
        """The attempts, by step, that announced rollbacks have retired, if the announced attempt counts itself."""
        retired: dict[int, str] = {}
        for step, attempt in listing.intents:
            manifest = self.find(step)
            if manifest is not None and manifest.attempt == attempt and line.counts(step, manifest):
                retired.update(manifest.retires)
        return retired

    def excluded(self, listing: Listing, steps: Sequence[int]) -> dict[int, str]:
        """The attempts at these steps that do not count: retired by a rollback, or not seen by a later start."""
        line = self.line(listing)
        return {**self.outside, **self._retired_by(listing, line), **line.out(steps)}

    def is_gap(self, listing: Listing, manifest: Manifest) -> bool:
        """True if a commit of another root is missing here below all commits of later starts that have not seen it."""
        if self.line(listing).counts(manifest.step, manifest):
            return False
        return Line(listing.steps, listing.starts, self.find).counts(manifest.step, manifest)

    def leave_out(self, step: int, attempt: str) -> None:
        """Note that commits at other roots show that this attempt does not count."""
        self.outside = {**self.outside, step: attempt}
        self.forget([step])

    def traces(self) -> set[int]:
        """The steps of the last listing, and those that were retired or left out here. Deleted steps leave no trace."""
        listing = self.listing or self.relist()
        unfinished = filter(None, map(self.known_or_found, (step for step, _ in listing.intents)))
        return {*listing.steps, *self.outside, *(one.step for manifest in unfinished for one in manifest.retires)}

    def retire(self, stale: Mapping[int, str]) -> None:
        """Rename the manifests of commits that do not count, so that their steps are free again."""
        for step in sorted(stale, reverse=True):
            self._retire(step, stale)
        self.outside = {step: attempt for step, attempt in self.outside.items() if step not in stale}
        self.forget(stale)

    def _retire(self, step: int, retired: Mapping[int, str]) -> None:
        """Rename the manifest of a step if it is of the attempt in `retired`.

        Between the read and the move, this process may sleep, and another process may retire the manifest and commit
        the step anew. If the move has hit that new manifest, it is put back.
        """
        path, new_path = self.manifest_path(step), f"{self.folder(step)}/{retired_name()}"
        try:
            before = self.storage.read(path)[0]
            if not _is_of(before, path, retired[step]):
                return
            self.storage.move(path, new_path)
            after = self.storage.read(new_path)[0]
        except FileNotFoundError:  # another process was faster
            return
        if after != before:
            with suppress(FileExistsError):
                self.storage.put_new(path, after)

    def is_retired(self, step: int, retired: Mapping[int, str]) -> bool:
        return step in retired and is_excluded(step, self.find(step), retired)

    def finish_rollbacks(self, listing: Listing) -> None:
        """Rename the manifests that committed rollbacks have retired, and delete the intents.

        The intent of a rollback that a later start has not seen stays: that start may continue from the retired steps.
        """
        for step, attempt in listing.intents:
            manifest = self.find(step)
            if manifest is None or manifest.attempt != attempt:
                continue  # not committed: the sweep deletes the intent
            later = later_than(StartsByName(listing.starts).of(manifest.start), listing.starts)
            if not self.have_seen(later, manifest):
                continue
            retired = {commit.step: commit.attempt for commit in manifest.retires}
            look_all(self.storage, [partial(self._retire, newer, retired) for newer in sorted(retired, reverse=True)])
            with self._lock:
                self.committed_here -= retired.keys()
            self.outside = {step: attempt for step, attempt in self.outside.items() if retired.get(step) != attempt}
            self.storage.delete(intent_name(step, attempt))

    def warn_once(self, topic: str, message: str) -> None:
        with self._lock:
            new = topic not in self._warned_topics
            self._warned_topics.add(topic)
        if new:
            _log.warning("%s", message)

    def has_warned(self, topic: str) -> bool:
        return topic in self._warned_topics

    def steps(self) -> list[int]:
        """The committed steps, ascending."""

        def committed(listing: Listing) -> list[int]:
            paths = {self.manifest_path(step): step for step in listing.steps}
            committed_steps = [paths[path] for path in self.storage.existing(list(paths))]
            retired = self.excluded(listing, committed_steps)
            return [step for step in committed_steps if not self.is_retired(step, retired)]

        return self.list_settled(committed)


def formats_at(storage: Storage) -> list[str]:
    """The formats of committed steps. Raises StorageUnavailableError if each newest step is deleted too soon."""
    before: list[str] | None = None
    for _ in range(TRIES):
        names = storage.names("")
        formats = step_formats(storage, names)
        if formats or names == before:
            return formats
        before = names  # since this listing, a writer may have committed a newer step and deleted the listed one
    raise overtaken_error(storage.locate(""))


def attempt_of(manifest: Manifest | None) -> str | None:
    return None if manifest is None else manifest.attempt


def is_excluded(step: int, manifest: Manifest | None, retired: Mapping[int, str]) -> bool:
    """True if `retired` has this commit of the step. A damaged manifest is taken for the retired one."""
    return step in retired and (manifest is None or manifest.attempt == retired[step])


def _is_of(data: bytes, path: str, attempt: str) -> bool:
    try:
        return parse_manifest(data, path=path).attempt == attempt
    except CheckpointError:  # a damaged manifest is taken for the retired one
        return True


def overtaken_error(shown: str) -> StorageUnavailableError:
    """The error for a reader that has come too late `TRIES` times."""
    return StorageUnavailableError(
        f"{shown}: {TRIES} times in a row the newest step was deleted before it was read; raise keep= of the writer",
        path=shown,
    )


def replaceable(storage: Storage, path: str, step: int) -> tuple[Manifest, str] | None:
    """The manifest at a path, and its version; None if there is none. A damaged manifest may be replaced, too.

    Raises StorageUnavailableError for a manifest that cannot be read now, since it may be sound.
    """
    try:
        data, version = storage.read(path)
    except FileNotFoundError:
        return None
    try:
        return parse_manifest(data, path=storage.locate(path)), version
    except CheckpointError:
        return Manifest(step, "", 1, 0.0, ()), version
