"""The trace of a run as a file, which Perfetto and chrome://tracing open directly.

In: a path, a trace. Out: a JSON array of events, complete after every save. Knows nothing of: the events' meaning.

The format is Chrome's Trace Event Format, in its JSON array form, with times in microseconds since the epoch.
"""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Final

from .timing import Clock, Trace, monotonic

_END: Final = b"\n]\n"


class TraceFile:
    """The file of one trace, which overwrites an existing one. The events of each save are added at its end.

    A checkpointer creates, writes and closes the file. Raises OSError if it cannot be created. A later error fails no
    save; `close` raises it.
    """

    def __init__(self, path: str | os.PathLike[str], clock: Clock = monotonic) -> None:
        self._path = Path(path).absolute()
        self.trace = Trace(clock)
        self._lock = threading.Lock()  # held during writes: events of two saves must not interleave
        self._is_empty = True
        self._error: OSError | None = None
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_bytes(b"[" + _END)

    def write(self) -> None:
        """Append the events since the last call."""
        with self._lock:
            lines = [json.dumps(event, default=str).encode() for event in self.trace.take()]
            if not lines or self._error is not None:
                return
            try:
                with open(self._path, "r+b") as file:
                    file.seek(-len(_END), os.SEEK_END)
                    file.write((b"\n" if self._is_empty else b",\n") + b",\n".join(lines) + _END)
                self._is_empty = False
            except OSError as error:
                self._error = error

    def close(self) -> None:
        self.write()
        if self._error is not None:
            raise self._error

    def __repr__(self) -> str:
        return f"<TraceFile {self._path}>"
