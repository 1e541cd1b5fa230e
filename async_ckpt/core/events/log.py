"""The bounded log of a run's events, at one root.

In: events as they happen. Out: lines on storage, and events back. Knows nothing of: steps, commits.

    <root>/history.jsonl               the last events, one per line
    <root>/history/000007.jsonl.gz     earlier events, compressed; the oldest of these files are deleted

On a disk, lines are appended to the file without a sync: a power cut may lose the last ones. In a store, whose objects
cannot grow, the file is replaced as a whole; it has at most a few hundred lines.

The history is a convenience: an error is logged once, and never fails a save. Events that could not be written are
written with the next ones.
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
from .kinds import Event, dump, event, parse

NAME: Final = "history.jsonl"
FOLDER: Final = "history"
# The limit of all files together.
MAX_BYTES: Final = MIB
# A file of lines that has grown beyond this is compressed. A store receives the whole file with every commit.
PART_BYTES: Final = 64 * KIB
# The limit of the compressed files. The file of lines may have up to twice PART_BYTES.
_COMPRESSED_BYTES: Final = MAX_BYTES - 2 * PART_BYTES
_PART: Final = r"(\d{6})\.jsonl\.gz"
# The limit of events that wait to be written. Between two commits there are few, except for skipped saves, which are
# joined into one.
_WAITING: Final = 1000
_TRIES: Final = 3
_READERS: Final = 32
# The limit of decompression: a small forged file may decompress to a huge one.
_MOST_DECOMPRESSED: Final = 4 * PART_BYTES
_GZIP: Final = zlib.MAX_WBITS + 16

_log = logging.getLogger("async_ckpt")


class EventLog:
    """The log of events at one root. A Run creates and owns it. Thread-safe; `note` and `write` never raise."""

    def __init__(self, storage: Storage, clock: Clock, opened: float | None = None) -> None:
        """`opened` is the time at which this process opened the run, in seconds since the epoch."""
        self._storage, self._clock, self._opened = storage, clock, opened
        # Used without a lock, since a signal may interrupt callers of `save` at any line.
        self._noted: deque[Event] = deque(maxlen=_WAITING)
        self._writing = threading.Lock()  # held during requests: two threads must not replace the same file
        # Guarded by _writing:
        self._waiting: list[Event] = []  # events that could not be written
        self._text: bytes | None = None  # the content of the object in a store; None: unknown
        self._version: str | None = None
        self._has_warned = False

    def note(self, kind: str, step: int | None, **facts: Any) -> None:
        """Remember an event until the next `write`."""
        self._noted.append(event(kind, self._clock(), step, opened=self._opened, **facts))

    def write(self, *, again: bool = True) -> None:
        """Write the events noted so far. With `again=False`, do nothing if the last write failed."""
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
        newest = self._content()[0]  # first: if it is compressed meanwhile, its lines are read twice, but not missed
        return parse(b"\n".join([*self._parts(self._names()), newest]))

    def read_with_noted(self) -> list[Event]:
        """The events on storage, and those of this process that are not written yet."""
        noted = self._noted.copy()  # first: events that are written meanwhile are read twice, and returned once
        events = self.read()
        return events + [one for one in noted if one not in events]

    def read_newest(self) -> list[Event]:
        """The last events: those in the file that is not compressed yet."""
        return parse(self._content()[0])

    def read_before(self) -> list[Event]:
        """The events before those of `read_newest`: from the file that was compressed last."""
        return parse(b"".join(self._parts(self._names()[-1:])))

    def copy_from(self, other: EventLog) -> None:
        """Become a copy of the log at another root. Raises StorageUnavailableError."""
        newest, names = other._content()[0], other._names()
        for name in {*names}.difference(self._names()):
            with suppress(FileNotFoundError, FileExistsError):  # deleted at the source, or copied by another process
                self._storage.put_new(f"{FOLDER}/{name}", other._storage.read(f"{FOLDER}/{name}")[0])
        if newest:
            self._storage.replace(NAME, newest)
        self._storage.delete_many([f"{FOLDER}/{name}" for name in {*self._names()}.difference(names)])

    def _add(self, lines: bytes) -> int:
        """Append lines to the file. Returns its size in bytes."""
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
            except FileExistsError:  # another process has written: read the file again, to keep its lines
                self._text = None
                if not left:
                    raise
        return len(self._text or b"")

    def _put_away(self) -> None:
        """Move the lines into a new compressed file, and delete the oldest compressed files beyond the limit."""
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
        """The content of these compressed files; empty for a file that is damaged or was deleted meanwhile."""
        parts = dict.fromkeys(names, b"")

        def read(name: str) -> None:
            with suppress(FileNotFoundError, zlib.error):
                data = self._storage.read(f"{FOLDER}/{name}")[0]
                parts[name] = zlib.decompressobj(wbits=_GZIP).decompress(data, _MOST_DECOMPRESSED)

        run_together("read", [partial(read, name) for name in names], max_threads=_READERS)
        return [*parts.values()]


def _pieces(lines: Sequence[bytes]) -> Iterator[bytes]:
    """The lines joined into pieces of at most PART_BYTES, or of a single longer line."""
    piece: list[bytes] = []
    for line in lines:
        if piece and sum(map(len, piece)) + len(line) > PART_BYTES:
            yield b"".join(piece)
            piece = []
        piece.append(line)
    yield b"".join(piece)
