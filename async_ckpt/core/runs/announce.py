"""Tracker and journal: the files about a run for people and other programs. This library does not trust them.

In: a root and its commits. Out: the two files, up to date. Knows nothing of: how a step is committed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from ...errors import StorageUnavailableError
from ..events.shapes import Event, event
from ..storage.interface import Storage
from . import journal
from .manifest import NAME as MANIFEST
from .manifest import Manifest, is_retired_name
from .naming import Tracker
from .retention import Commits
from .root import Root

# A refused move of the tracker means that another writer was faster; this many, that the store refuses them all.
_TRACKER_TRIES: Final = 20


class Announcer:
    """The tracker and the journal of one root. A Run creates and owns it. From any thread."""

    def __init__(self, root: Root, tracker: Tracker | None) -> None:
        self._root, self._tracker = root, tracker
        # Held over requests: a save may commit while the retention of the save before runs.
        self._announcing = threading.Lock()
        # Under _announcing:
        self._journaled: list[int] | None = None  # the steps in the journal; None: not known
        self._journal_version: str | None = None  # as this object wrote it last; None: not known
        self._tracks: int | None = None  # the step in the tracker; None: not known

    @property
    def _storage(self) -> Storage:
        return self._root.storage

    def announce(self, step: int | None, spared: Callable[[Commits], Commits]) -> None:
        """Bring both files up to date with the commits of all processes; `step` has just been committed.

        The journal lists the commits that `spared` returns. After StorageUnavailableError, one file may be up to
        date and the other not.
        """
        with self._announcing:
            listing = self._root.listing if step is not None else None
            if listing is None or not (step is None or listing.has(step)):
                listing = self._root.relist()
            self._root.listing = None  # until it is known that no other process has committed
            self._root.finish_rollbacks(listing)
            view = self._root.view(listing, tolerant=True)
            refusal: StorageUnavailableError | None = None
            if self._tracker is not None and view:
                try:
                    self._track(self._tracker, next(reversed(view)))
                except StorageUnavailableError as error:
                    refusal = error
            was_known = self._journal_version is not None
            if self._write_journal(spared(view)):
                self._root.listing = listing if was_known and not listing.intents else None
            else:
                # Another process has committed, and may have overwritten or retired the known commits.
                self._root.forget(self._root.known)
                view = self._root.view(self._root.relist(), tolerant=True)
                self._write_journal(spared(view))
            if refusal is not None:
                raise refusal

    def rewrite(self, view: Commits) -> None:
        """Rewrite the journal, after retention has deleted steps."""
        with self._announcing:
            if self._journaled != list(view):
                self._journal_version = None
                self._write_journal(view)

    def tracked_step(self) -> int | None:
        """The step that the tracker names; None if it names none, or cannot be read."""
        if self._tracker is None or self._tracks is not None:
            return self._tracks
        with suppress(StorageUnavailableError):
            content = self._read_tracker(self._tracker)
            return self._tracker.parse(content[0]) if content else None
        return None

    def tracker_text(self) -> tuple[str, str] | None:
        """The tracker's name and the beginning of its content, if it is there."""
        content = self._read_tracker(self._tracker) if self._tracker is not None else None
        if self._tracker is None or content is None:
            return None
        return self._tracker.name, content[0][:100].decode(errors="replace").strip()

    def _write_journal(self, view: Commits) -> bool:
        """Write one line for each step. Under _announcing.

        False if another process has written the journal since this object did: each does so with every commit.
        """
        lines = self._root.lines
        for step in view.keys() - lines.keys():
            manifest = view[step]
            if manifest is not None:
                lines[step] = journal.dump([(manifest.path_in(self._root.folder(step)), manifest)])
        data = b"".join(filter(None, map(lines.get, view)))
        version, self._journal_version, self._journaled = self._journal_version, None, None
        try:
            self._journal_version = self._storage.replace(journal.NAME, data, version=version)
        except FileExistsError:
            return False
        self._journaled = list(view)
        return True

    def _track(self, tracker: Tracker, newest: int) -> None:
        """Move the tracker on to the newest committed step, if it may go there."""
        self._tracks = None
        for _ in range(_TRACKER_TRIES):
            with suppress(FileExistsError):  # another writer was faster: look at its text
                content = self._read_tracker(tracker)
                if content is None:
                    self._storage.put_new(tracker.name, tracker.dump(newest))
                elif self._may_move(tracked := tracker.parse(content[0]), newest):
                    self._storage.replace(tracker.name, tracker.dump(newest), version=content[1])
                else:
                    newest = tracked or newest
                self._tracks = newest
                return
        path = self._storage.locate(tracker.name)
        raise StorageUnavailableError(
            f"{path} was not moved to step {newest}: others changed it {_TRACKER_TRIES} times in the meantime",
            path=path,
        )

    def _may_move(self, tracked: int | None, newest: int) -> bool:
        """Whether the tracker may be moved from one step to another: forwards, and back only from a retired step.

        A newer step that is not committed here is of another program, such as the trainer's own save in this folder.
        """
        # Even to the same step: a writer that has read an older text must find it changed.
        if tracked is None or tracked <= newest:
            return True
        names = self._storage.names(self._root.folder(tracked))
        return MANIFEST not in names and any(map(is_retired_name, names))

    def _read_tracker(self, tracker: Tracker) -> tuple[bytes, str] | None:
        try:
            return self._storage.read(tracker.name)
        except FileNotFoundError:
            return None


def event_of(manifest: Manifest) -> Event:
    """The event of a save, as far as its manifest has it: without times, since the manifest was written before the
    commit had ended.
    """
    return event(
        "save",
        manifest.created,
        manifest.step,
        attempt=manifest.attempt,
        num_bytes=manifest.num_bytes,
        borrowed={lent.group: lent.step for lent in manifest.elsewhere if lent.step != manifest.step},
        record=dict(manifest.record),
        world_size=manifest.world_size,
    )
