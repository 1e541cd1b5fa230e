"""Tracker and journal: what a run tells others of its commits. Nobody trusts them.

In: a root and what is committed there. Out: the two files, up to date. Knows nothing of: how a step is committed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from ..errors import StorageUnavailableError
from . import journal
from .manifest import NAME as MANIFEST
from .manifest import is_retired_name
from .naming import Tracker
from .retention import Commits
from .root import Root

# A refused move of the tracker means that another writer was faster. So many in a row mean that the store refuses all.
_TRACKER_TRIES: Final = 20


class Announcer:
    """The tracker and the journal of one root. From any thread."""

    def __init__(self, root: Root, tracker: Tracker | None) -> None:
        self._root, self._tracker = root, tracker
        # The commit of one save runs beside the retention of the one before: one announces at a time.
        self._announcing = threading.Lock()
        # Under _announcing:
        self._journaled: list[int] | None = None  # the steps that the journal has; None: not known
        self._journal_version: str | None = None  # as it was written here last; None: not known
        self._tracks: int | None = None  # what the tracker names; None: not known

    def announce(self, step: int | None, spared: Callable[[Commits], Commits]) -> None:
        """Bring both up to date with what is committed, whoever committed it; `step` was just now.

        The journal has what `spared` leaves. Raises StorageUnavailableError; then the one may be up to date without the
        other.
        """
        with self._announcing:
            listing = self._root.listing if step is not None else None
            if listing is None or not (step is None or listing.has(step)):
                listing = self._root.relist()
            self._root.listing = None  # until it is known that nobody else has been here
            self._root.finish_rollbacks(listing.intents)
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
                # Another process has been here, and may have overwritten, or taken out of the run, what is known.
                self._root.forget(self._root.known)
                view = self._root.view(self._root.relist(), tolerant=True)
                self._write_journal(spared(view))
            if refusal is not None:
                raise refusal

    def journal(self) -> list[dict[str, object]]:
        """The records of `checkpoints.jsonl`, as far as they can be read."""
        try:
            return journal.parse(self._root.storage.read(journal.NAME)[0], locate=self._root.storage.locate)
        except FileNotFoundError:
            return []

    def rewrite(self, view: Commits) -> None:
        """Retention has left these: what another process has done since is told, too."""
        with self._announcing:
            if self._journaled != list(view):
                self._journal_version = None
                self._write_journal(view)

    def tracked(self) -> int | None:
        """The step that the tracker names. Nothing depends on it: one that cannot be read names none."""
        if self._tracker is None or self._tracks is not None:
            return self._tracks
        with suppress(StorageUnavailableError):
            content = self._read_tracker(self._tracker)
            return self._tracker.parse(content[0]) if content else None
        return None

    def tracker_text(self) -> tuple[str, str] | None:
        """The tracker's name and the beginning of what it says, if it is there."""
        content = self._read_tracker(self._tracker) if self._tracker is not None else None
        if self._tracker is None or content is None:
            return None
        return self._tracker.name, content[0][:100].decode(errors="replace").strip()

    def _write_journal(self, view: Commits) -> bool:
        """One line for each step; only those of new commits are made anew. Under _announcing.

        False when somebody else has written it since it was written here: every process does so with each commit.
        """
        lines = self._root.lines
        for step in view.keys() - lines.keys():
            manifest = view[step]
            if manifest is not None:
                lines[step] = journal.dump([(manifest.path_in(self._root.folder(step)), manifest)])
        data = b"".join(filter(None, map(lines.get, view)))
        version, self._journal_version, self._journaled = self._journal_version, None, None
        try:
            self._journal_version = self._root.storage.replace(journal.NAME, data, version=version)
        except FileExistsError:
            return False
        self._journaled = list(view)
        return True

    def _track(self, tracker: Tracker, newest: int) -> None:
        """Move the tracker on to the newest committed step, if it may go there."""
        self._tracks = None
        for _ in range(_TRACKER_TRIES):
            with suppress(FileExistsError):  # another writer was faster: judged anew is what it wrote
                content = self._read_tracker(tracker)
                if content is None:
                    self._root.storage.put_new(tracker.name, tracker.dump(newest))
                elif self._may_move(tracked := tracker.parse(content[0]), newest):
                    self._root.storage.replace(tracker.name, tracker.dump(newest), version=content[1])
                else:
                    newest = tracked or newest
                self._tracks = newest
                return
        path = self._root.storage.locate(tracker.name)
        raise StorageUnavailableError(
            f"{path} was not moved to step {newest}: others changed it {_TRACKER_TRIES} times in the meantime",
            path=path,
        )

    def _may_move(self, tracked: int | None, newest: int) -> bool:
        """Whether the tracker may be moved from one step to another: forwards, and back only from a retired step.

        What names a newer step that is not committed here is somebody else's word, such as the trainer's own save in
        the same folder. What names none is nobody's.
        """
        # Even to the same: who has judged an older text must find it changed.
        if tracked is None or tracked <= newest:
            return True
        names = self._root.storage.names(self._root.folder(tracked))
        return MANIFEST not in names and any(map(is_retired_name, names))

    def _read_tracker(self, tracker: Tracker) -> tuple[bytes, str] | None:
        try:
            return self._root.storage.read(tracker.name)
        except FileNotFoundError:
            return None
