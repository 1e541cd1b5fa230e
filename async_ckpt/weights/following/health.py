"""The health of a sidecar: log lines, and a status file for probes.

In: pulls, loads and errors. Out: events; a JSON file that is rewritten at each poll of the root, and before a pull or a
load, which may take long. Knows nothing of: folders, engines.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

from ... import PullReport
from ...plumbing import timing

# The time between two health lines, and between two reports of an unchanged error.
_LINE_SECONDS: Final = 60.0


class Event(NamedTuple):
    """An event of a sidecar: its kind, a line for people, and its facts for programs.

    `is_bad` marks errors.
    """

    kind: str
    line: str
    facts: Mapping[str, Any]
    is_bad: bool = False


LogEvent = Callable[[Event], None]


class Health:
    """The health of one sidecar. `facts` describe the sidecar, and are in each status.

    Raises OSError if `file` cannot be written.
    """

    def __init__(self, facts: Mapping[str, Any], file: Path | None, log: LogEvent) -> None:
        self._facts, self._file, self._log = facts, file, log
        self._newest: int | None = None
        self._version: int | None = None  # the version that the engine has taken
        self._loaded_at: float | None = None
        self._errors: dict[str, str] = {}  # by the part that fails
        self._reported_at: dict[str, float] = {}  # when each of these errors was last reported
        self._last_error: dict[str, Any] | None = None
        self._doing: dict[str, Any] | None = None
        self._next_line = timing.TIMEKEEPER.now() + _LINE_SECONDS
        if file is not None:
            self._write(file)

    def has(self, version: int | None) -> None:
        """Set the version that the engine is known to have, since an unknown time."""
        if version != self._version:
            self._version, self._loaded_at = version, None

    def sees(self, newest: int | None) -> None:
        self._newest = newest

    def pulled(self, report: PullReport) -> None:
        if report.num_versions:
            facts = {
                name: getattr(report, name) for name in ("base", "num_versions", "num_bytes", "seconds", "from_memory")
            }
            facts["weight_version"] = report.version  # `version` is the version of the document
            self._log(Event("pulled", f"pulled {report}", facts))

    def loaded(self, version: int, seconds: float) -> None:
        self._version, self._loaded_at = version, timing.wall_time()
        engine = self._facts["engine"]
        if engine:
            line = f"version {version} loaded by {engine} in {seconds:.2f} s"
            self._log(Event("told", line, {"weight_version": version, "seconds": seconds}))

    def lost(self, version: int, reported: str) -> None:
        """Report that the engine has another version than the one that it loaded."""
        self._version = self._loaded_at = None
        line = f"{self._facts['engine']} has version {reported!r:.100}, not {version}: telling it again"
        self._log(Event("lost", line, {"weight_version": version, "said": reported}))

    def failed(self, part: str, error: BaseException) -> None:
        """Record an error of a part, and report it if it is new, or was not reported for a minute."""
        text, now = f"{error}" or type(error).__name__, timing.TIMEKEEPER.now()
        self._last_error = {"part": part, "error": text, "at": timing.wall_time()}
        if self._errors.get(part) == text and now < self._reported_at[part] + _LINE_SECONDS:
            return
        self._errors[part], self._reported_at[part] = text, now
        self._log(Event("failed", text, {"part": part, "error": text}, is_bad=True))

    def works(self, part: str) -> None:
        self._errors.pop(part, None)

    @contextmanager
    def doing(self, part: str, version: int) -> Iterator[None]:
        """A block during which the status shows this operation. The file is not written again before its end."""
        self._doing = {"part": part, "weight_version": version, "since": timing.wall_time()}
        self._write_status()
        try:
            yield
        finally:
            self._doing = None

    def beat(self) -> None:
        """Write the status file, and once a minute a health line."""
        self._write_status()
        if timing.TIMEKEEPER.now() >= self._next_line:
            self._next_line = timing.TIMEKEEPER.now() + _LINE_SECONDS
            self._log(Event("health", self._line(), self._status()))

    def ended(self) -> None:
        self.beat()
        self._log(Event("ended", f"ended; {self._line()}", self._status()))

    def _line(self) -> str:
        status = self._status()
        version, age = status["weight_version"], status["age_seconds"]
        line = "no version loaded" if version is None else f"version {version}"
        line += "" if age is None else f" for {age:.0f} s"
        line += f", newest {self._newest}" if self._newest is not None else ", no version at the root"
        return f"{line}; {status['error'] or 'no error'}"

    def _status(self) -> dict[str, Any]:
        now = timing.wall_time()
        age = None if self._loaded_at is None else max(0.0, now - self._loaded_at)
        return {
            **self._facts,
            "weight_version": self._version,
            "age_seconds": age,
            "newest": self._newest,
            "doing": self._doing,
            "error": "; ".join(self._errors.values()) or None,
            "last_error": self._last_error,
            "written_at": now,
        }

    def _write_status(self) -> None:
        if self._file is None:
            return
        try:
            self._write(self._file)
            self.works("status")
        except OSError as error:
            self.failed("status", error)

    def _write(self, file: Path) -> None:
        """Replace the status file as a whole. Raises OSError."""
        temp = file.with_name(f".{file.name}.{os.urandom(4).hex()}.tmp")
        try:
            with open(temp, "x") as new:  # "x" follows no link that another user has created there
                new.write(json.dumps(self._status()) + "\n")
            os.replace(temp, file)
        except BaseException:
            temp.unlink(missing_ok=True)
            raise
