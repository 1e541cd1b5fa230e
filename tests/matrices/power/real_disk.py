"""A real file system whose power is cut: ext4 in a file, shut down without writing its journal, and mounted again.

In: a scenario, the number of a call. Out: what is wrong with what came back, or None. Knows nothing of: the model.

EXT4_IOC_SHUTDOWN stops the file system at once, and drops what is in memory, as a cut does. What the kernel happens to have written by then
is there; so each cut shows one state of the many that the model knows, but it is the kernel that says which.
"""

import fcntl
import os
import shutil
import signal
import struct
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from children import die_at

from .cut_check import wrong_afterwards, wrong_with
from .disk_records import Acknowledged, Begun, Mark
from .power_scenarios import Scenario

_SHUTDOWN, _WITHOUT_JOURNAL = 0x8004587D, struct.pack("I", 2)


def why_not() -> str | None:
    """The reason why no such disk can be made here, or None."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "mounting a file system needs Linux and root"
    if missing := [name for name in ("mkfs.ext4", "mount", "umount") if shutil.which(name) is None]:
        return f"{', '.join(missing)} is not installed"
    return None if Path("/dev/loop-control").exists() else "there are no loop devices"


class RealDisk:
    """An ext4 in a file. It is empty at each `begin`."""

    def __init__(self, place: Path) -> None:
        self._image, self._empty, self.top = place / "image", place / "empty", place / "mounted"
        self._marks = place / "marks"
        self.top.mkdir(parents=True)
        with self._empty.open("wb") as file:
            file.truncate(48 << 20)
        _run("mkfs.ext4", "-q", "-F", "-b", "4096", self._empty)

    @contextmanager
    def mounted(self) -> Iterator[Path]:
        _run("mount", "-o", "loop", self._image, self.top)
        try:
            yield self.top / "data"
        finally:
            _run("umount", self.top)

    def cut(self, scenario: Scenario, at_call: int) -> str | None:
        """Cut the power at a call, or at the end, mount again and read. Returns what is wrong."""
        _run("cp", "--sparse=always", self._empty, self._image)
        self._marks.write_text("")
        with self.mounted() as data:
            data.mkdir()
            _sync(data.parent)
            status = _forked(lambda: self._run(scenario, data, at_call))
        if status not in (0, -signal.SIGKILL):
            return f"the process ended with {status}"
        with self.mounted() as data:
            status = _forked(lambda: self._read(scenario, data))
        return None if status == 0 else "wrong, as told on the other stream"

    def _run(self, scenario: Scenario, data: Path, at_call: int) -> None:
        with self._marks.open("ab", buffering=0) as marks:
            folder = os.open(data, os.O_RDONLY)

            def die() -> None:
                fcntl.ioctl(folder, _SHUTDOWN, _WITHOUT_JOURNAL)
                os.kill(os.getpid(), signal.SIGKILL)

            die_at(at_call, die)
            scenario.run(data, _Told(marks.write))
            die()

    def _read(self, scenario: Scenario, data: Path) -> None:
        marks: list[Mark] = []
        for line in self._marks.read_text().splitlines():
            kind, label, *instead_of = line.split("\t")
            marks.append(Begun(label, tuple(instead_of)) if kind == "begun" else Acknowledged(label))
        wrong = wrong_with(scenario, data, marks) or wrong_afterwards(scenario, data)
        assert wrong is None, wrong


class _Told:
    def __init__(self, write: Callable[[bytes], Any]) -> None:
        self._write = write

    def begins(self, label: str, *, instead_of: tuple[str, ...] = ()) -> None:
        self._write(("\t".join(["begun", label, *instead_of]) + "\n").encode())

    def acknowledged(self, label: str) -> None:
        self._write(f"acknowledged\t{label}\n".encode())


def _forked(do: Callable[[], None]) -> int:
    sys.stdout.flush()
    pid = os.fork()
    if not pid:
        try:
            do()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _sync(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _run(*words: Any) -> None:
    subprocess.run([str(word) for word in words], check=True, capture_output=True)
