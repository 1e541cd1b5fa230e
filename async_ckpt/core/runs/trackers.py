"""Tracker and journal: the files about a run for people and other programs. This library does not trust them.

In: a root and its commits. Out: the two files, up to date. Knows nothing of: how a step is committed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from ...errors import StorageUnavailableError
from ..events.kinds import Event, event
from ..storage.interface import Storage
from . import journal
from .manifest import NAME as MANIFEST
from .manifest import Manifest, is_retired_name
from .naming import Tracker
from .retention import Commits
from .root import Root

# A refused update of the tracker means that another writer was faster. This many refusals in a row mean that the store
# refuses every update.
_TRACKER_TRIES: Final = 20


class Announcer:
    """The writer of the tracker and journal of one root. A Run creates and owns it. Thread-safe."""

    def __init__(self, root: Root, tracker: Tracker | None) -> None:
        self._root, self._tracker = root, tracker
        # Held during requests: a save may commit while retention after the previous save is still running.
        self._announcing = threading.Lock()
        # Guarded by _announcing:
        self._journaled: list[int] | None = None  # the steps in the journal; None: unknown
        self._journal_version: str | None = None  # the version that this object wrote last; None: unknown
        self._tracks: int | None = None  # the step in the tracker; None: unknown

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
            self._root.listing = None  # set again below if no other process has committed
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
                # Another process has committed, and may have overwritten or retired the commits known here.
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
        """Write one line for each step. The caller holds _announcing.

        Returns False if another process has written the journal since this object last did, that is, has committed.
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
        """Set the tracker to the newest committed step, unless `_may_move` forbids it."""
        self._tracks = None
        for _ in range(_TRACKER_TRIES):
            with suppress(FileExistsError):  # another writer was faster: read the tracker again
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
        """Whether the tracker may move from step `tracked` to `newest`: forwards, and back only from a retired step.

        A newer step that was never committed here belongs to another program, such as the trainer's own save.
        """
        # Also rewritten for an equal step, so that the update of a writer that has read an older text is refused.
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
    """The event of a save, rebuilt from its manifest. It has no times: the manifest was written before the end."""
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
