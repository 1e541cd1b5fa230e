"""The bounded log of a run's events, at one root.

In: events as they happen. Out: lines on storage, and events back. Knows nothing of: steps, commits.

    <root>/history.jsonl               the last events, one in a line
    <root>/history/000007.jsonl.gz     earlier ones, compressed; the oldest of these files are deleted

On a disk, lines are added to the file, and not synced: a power cut may cost the last ones. In a store, where no object
grows, the file is replaced as a whole; it has at most a few hundred lines.

The history is a convenience: an error is logged once, and never becomes that of a save. Events that could not be
written are written with the next ones.
"""

from __future__ import annotations

import logging
import re
import threading
import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final

from ..host.threads import run_together
from ..spec import KIB, MIB
from ..storage.interface import Storage
from ..timing import Clock
from .shapes import Event, dump, event, parse

NAME: Final = "history.jsonl"
FOLDER: Final = "history"
# The limit of all files together.
MAX_BYTES: Final = MIB
# A larger file of lines is put away. It is what a store gets with every commit.
PART_BYTES: Final = 64 * KIB
# What is left for the files that were put away, beside one with the lines of just one more write.
_COMPRESSED_BYTES: Final = MAX_BYTES - 2 * PART_BYTES
_PART: Final = r"(\d{6})\.jsonl\.gz"
# Events that wait to be written. Between two commits there are few, but for skipped saves, which become one.
_WAITING: Final = 1000
_TRIES: Final = 3
_READERS: Final = 32
# Reading stops there: a small file may be made that becomes huge when it is decompressed.
_MOST_DECOMPRESSED: Final = 4 * PART_BYTES
_GZIP: Final = zlib.MAX_WBITS + 16

_log = logging.getLogger("async_ckpt")


class EventLog:
    """The log of events at one root. A Run creates and owns it. From any thread; `note` and `write` raise no error."""

    def __init__(self, storage: Storage, clock: Clock, opened: float | None = None) -> None:
        """`opened` is when this process has opened the run."""
        self._storage, self._clock, self._opened = storage, clock, opened
        # Without a lock, since callers of `save` may be interrupted at any line.
        self._noted: deque[Event] = deque(maxlen=_WAITING)
        self._writing = threading.Lock()  # held over requests: two threads must not replace the same file
        # Under _writing:
        self._waiting: list[Event] = []  # that could not be written
        self._text: bytes | None = None  # of the object in a store; None: not known
        self._version: str | None = None
        self._has_warned = False

    def note(self, kind: str, step: int | None, **facts: Any) -> None:
        """Remember an event until the next `write`."""
        self._noted.append(event(kind, self._clock(), step, opened=self._opened, **facts))

    def write(self, *, again: bool = True) -> None:
        """Write the events noted so far. Without `again`, only if the write before did not fail."""
        with self._writing:
            if self._waiting and not again:
                return
            events = self._waiting + [self._noted.popleft() for _ in range(len(self._noted))]
            if not events:
                return
            try:
                for lines in _pieces(dump(events)):
                    if self._add(lines) > PART_BYTES:
                        self._put_away()
                self._waiting = []
            except Exception as error:
                self._text, self._waiting = None, events[-_WAITING:]
                if not self._has_warned:
                    _log.warning("the history of %s is incomplete: %s", self._storage.locate(""), error)
                self._has_warned = True

    def read(self) -> list[Event]:
        """The events on storage, in the order in which they were written. Raises StorageUnavailableError."""
        newest = self._content()[0]  # first: it may be put away at this moment, and then its lines are read twice
        return parse(b"\n".join([*self._parts(self._names()), newest]))

    def read_with_noted(self) -> list[Event]:
        """The events on storage, and those of this process that are not written yet."""
        noted = self._noted.copy()  # first: what is written meanwhile is read twice, and counts once
        events = self.read()
        return events + [one for one in noted if one not in events]

    def read_newest(self) -> list[Event]:
        """The last events: those that are not put away yet."""
        return parse(self._content()[0])

    def read_before(self) -> list[Event]:
        """The events before those: of the file that was put away last."""
        return parse(b"".join(self._parts(self._names()[-1:])))

    def copy_from(self, other: EventLog) -> None:
        """Become a copy of the log at another root. Raises StorageUnavailableError."""
        newest, names = other._content()[0], other._names()
        for name in {*names}.difference(self._names()):
            with suppress(FileNotFoundError, FileExistsError):  # deleted there, or copied by another process
                self._storage.put_new(f"{FOLDER}/{name}", other._storage.read(f"{FOLDER}/{name}")[0])
        if newest:
            self._storage.replace(NAME, newest)
        self._storage.delete_many([f"{FOLDER}/{name}" for name in {*self._names()}.difference(names)])

    def _add(self, lines: bytes) -> int:
        """Add lines to the file. Returns its size."""
        num_bytes = self._storage.append_lines(NAME, lines)
        if num_bytes is not None:
            return num_bytes
        for left in reversed(range(_TRIES)):
            if self._text is None:
                self._text, self._version = self._content()
            try:
                self._version = self._storage.replace(NAME, self._text + lines, version=self._version)
                self._text += lines
                break
            except FileExistsError:  # another process has written; its lines stay
                self._text = None
                if not left:
                    raise
        return len(self._text or b"")

    def _put_away(self) -> None:
        """Compress the file beside the earlier ones, and delete the oldest of these."""
        text = self._content()[0] if self._text is None else self._text
        sizes = {name: size for name, size in self._storage.sizes(FOLDER).items() if re.fullmatch(_PART, name)}
        newest = int(max(sizes, default="000000")[:6]) + 1
        compressor = zlib.compressobj(9, wbits=_GZIP)
        data = compressor.compress(text) + compressor.flush()
        self._storage.put_new(f"{FOLDER}/{newest:06d}.jsonl.gz", data)
        self._storage.delete(NAME)
        self._text = None
        too_many = sum(sizes.values()) + len(data) - _COMPRESSED_BYTES
        old = []
        for name in sorted(sizes):
            if too_many > 0:
                old.append(f"{FOLDER}/{name}")
                too_many -= sizes[name]
        self._storage.delete_many(old)

    def _content(self) -> tuple[bytes, str | None]:
        try:
            return self._storage.read(NAME)
        except FileNotFoundError:
            return b"", None

    def _names(self) -> list[str]:
        return [name for name in self._storage.names(FOLDER) if re.fullmatch(_PART, name)]

    def _parts(self, names: Sequence[str]) -> list[bytes]:
        """The lines that were put away, without files that are damaged, or were deleted meanwhile."""
        parts = dict.fromkeys(names, b"")

        def read(name: str) -> None:
            with suppress(FileNotFoundError, zlib.error):
                data = self._storage.read(f"{FOLDER}/{name}")[0]
                parts[name] = zlib.decompressobj(wbits=_GZIP).decompress(data, _MOST_DECOMPRESSED)

        run_together("read", [partial(read, name) for name in names], max_threads=_READERS)
        return [*parts.values()]


def _pieces(lines: Sequence[bytes]) -> Iterator[bytes]:
    """The lines in pieces of a size that a file may have."""
    piece: list[bytes] = []
    for line in lines:
        if piece and sum(map(len, piece)) + len(line) > PART_BYTES:
            yield b"".join(piece)
            piece = []
        piece.append(line)
    yield b"".join(piece)
