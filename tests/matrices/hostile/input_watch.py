"""One hostile input, watched: its errors, its time, its memory, and whatever it does outside of its folder.

In: a target and an input. Out: what was wrong, if anything was. Knows nothing of: how inputs are made.

Python's audit events tell of each file that is opened, each import, each program, socket and piece of code. Those that a
hostile input has no business with are recorded, and refused before they happen. An import is fine if the seeds of the
target needed it, too: the library imports much of itself late.
"""

import os
import re
import resource
import signal
import sys
import time
import traceback
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from .hostile_target import Scratch, Target

MAX_SECONDS = 1.0  # of the processor, for one input
HANGS_SECONDS = 60
MAX_MEMORY = 256 << 20
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
# What events name first is a path that is changed.
_CHANGES = {
    "os.mkdir", "os.remove", "os.rmdir", "os.rename", "os.link", "os.symlink", "os.chmod", "os.chown", "os.truncate",
    "os.utime", "os.setxattr", "shutil.rmtree", "shutil.move", "shutil.copyfile", "shutil.copytree", "os.chflags",
}  # fmt: skip
_OF_TWO = {"os.rename", "os.link", "shutil.move", "shutil.copyfile", "shutil.copytree"}
_RUNS = re.compile(
    r"exec|compile|code\.__new__|marshal\.load|os\.(system|exec|fork|forkpty|posix_spawn|spawn|startfile|putenv|chdir|kill)"
    r"|subprocess\..*|pty\.spawn|socket\.(connect|bind|sendto|sendmsg|getaddrinfo|gethostbyname)|urllib\..*|http\..*"
    r"|ctypes\.(dlopen|dlsym|call_function|string_at)|pickle\.find_class|sys\.(addaudithook|_getframe\.none)|import"
)
# What json itself needs to read the encodings of JSON, and what the command needs for its messages.
_MAY_IMPORT = re.compile(
    r"(async_ckpt|typer|rich)(\..*)?|encodings\.utf_(8|8_sig|16|16_be|16_le|32|32_be|32_le)|encodings\.unicode_escape"
)
# What an import does that the library puts off until it is needed. Nothing else becomes fine by a sound input that does it.
_OF_IMPORTS = {
    "import",
    "exec",
    "compile",
    "code.__new__",
    "marshal.loads",
    "ctypes.dlopen",
    "ctypes.dlsym",
    "os.putenv",
}
# Files that Python itself reads, such as lines of code for a traceback.
_PYTHONS = (
    sys.prefix,
    sys.base_prefix,
    str(Path(__file__).parents[3]),
    "/proc/",
    "/sys/",
    "/usr/lib/",
    "/usr/share/zoneinfo",
)


class EscapedError(BaseException):
    """Raised in place of the act that a hostile input must not lead to."""


class HangError(BaseException):
    """An input takes far too long."""


@dataclass
class Tally:
    """What all inputs of one target came to."""

    inputs: int = 0
    slowest: float = 0.0
    peak_bytes: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    wrong: Counter[str] = field(default_factory=Counter)

    def as_dict(self) -> dict[str, Any]:
        return {
            "inputs": self.inputs,
            "slowest": round(self.slowest, 4),
            "peak_mib": self.peak_bytes >> 20,
            "errors": dict(self.errors.most_common()),
            "wrong": dict(self.wrong),
        }


class Watch:
    """Runs inputs of one target. One in a process, whose audit hook stays until the process ends."""

    def __init__(self, target: Target, failures: Path) -> None:
        self.target, self.tally = target, Tally()
        self._failures = failures
        self._is_on = self._learns = False
        self._escapes: list[str] = []
        self._fine: set[str] = set()  # imports, and calls of exec, that seeds led to
        self._base = 0
        sys.addaudithook(self._audit)

    def learn(self, inputs: list[bytes]) -> None:
        """Run inputs that are known, to import all that the library imports late; memory counts from then on."""
        self._learns = True
        for data in inputs:
            self.run(data)
        self._learns = False
        self.tally = Tally()
        self._base = _peak_bytes()
        _limit_addresses()

    def run(self, data: bytes, *, alarm: bool = False) -> str:
        """Run one input. Returns what was wrong, in one line: empty if nothing was."""
        self._escapes = []
        begun = time.process_time()
        outcome, wrong = "accepted", ""
        if alarm:
            signal.signal(signal.SIGALRM, _hangs)
            signal.alarm(HANGS_SECONDS)
        self._is_on = True
        try:
            self.target.run(data)
        except self.target.errors as error:
            self._is_on = False
            outcome = type(error).__name__
            wrong = f"MemoryError behind {outcome}" if _is_of_memory(error) else ""
        except (EscapedError, HangError) as error:
            self._is_on = False
            outcome = wrong = type(error).__name__
        except BaseException as error:
            self._is_on = False
            outcome = type(error).__name__
            wrong = f"{outcome} at {_place_of(error)}: {error!s:.80}"
        finally:
            self._is_on = False
            if alarm:
                signal.alarm(0)
        if self._escapes:
            wrong = self._escapes[0]
        self._count(data, outcome, wrong, time.process_time() - begun)
        return wrong

    def _count(self, data: bytes, outcome: str, wrong: str, seconds: float) -> None:
        tally = self.tally
        tally.inputs += 1
        tally.errors[outcome] += 1
        tally.slowest = max(tally.slowest, seconds)
        tally.peak_bytes = max(tally.peak_bytes, _peak_bytes() - self._base if self._base else 0)
        if self._learns:
            return
        if not wrong and seconds > MAX_SECONDS:
            wrong = "slow: more than a second"
        if not wrong and tally.peak_bytes > MAX_MEMORY:
            wrong, self._base = "memory: more than 256 MiB", _peak_bytes()
        if wrong:
            key = re.sub(r"0x[0-9a-f]+|\d+|'[^']*'", "…", wrong)
            tally.wrong[key] += 1
            if tally.wrong[key] <= 3:
                self._keep(data, wrong)

    def _keep(self, data: bytes, wrong: str) -> None:
        self._failures.mkdir(parents=True, exist_ok=True)
        name = self.target.name.replace(" ", "-")
        path = self._failures / f"{name}-{sum(self.tally.wrong.values())}-{os.getpid()}.bin"
        path.write_bytes(data)
        print(
            f"{self.target.name}: {wrong}\n  python -m tests.matrices.hostile --only {name} --replay {path}", flush=True
        )

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self._is_on:
            return
        what = self._forbidden(event, arguments)
        if what and self._learns and event in _OF_IMPORTS:
            self._fine.add(what)
        elif what and what not in self._fine:
            self._escapes.append(what)
            raise EscapedError(what)

    def _forbidden(self, event: str, arguments: tuple[Any, ...]) -> str:
        """What an event does that a hostile input has no business with; empty if it is fine."""
        if event == "open":
            path, mode, flags = arguments
            writes = bool(flags & _WRITES) if isinstance(flags, int) and mode is None else set(str(mode)) & set("wax+")
            if writes and not self._is_inside(path):
                return f"writes {path!r:.200}"
            return "" if self._may_read(path) else f"reads {path!r:.200}"
        if event in _CHANGES:
            paths = arguments[1:2] if event == "os.symlink" else arguments[: 2 if event in _OF_TWO else 1]
            outside = [one for one in paths if not self._is_inside(one)]
            return f"{event} {outside[0]!r:.200}" if outside else ""
        if event == "import":
            return "" if _MAY_IMPORT.fullmatch(str(arguments[0])) else f"imports {arguments[0]!r:.100}"
        if event in ("exec", "compile", "code.__new__", "marshal.loads"):
            return "" if _is_importing() else f"{event} {_shown_code(arguments[0])!r:.100}"
        return f"{event} {arguments!r:.200}" if _RUNS.fullmatch(event) else ""

    def _may_read(self, path: object) -> bool:
        if self.target.reads_anywhere or self._is_inside(path):
            return True
        return isinstance(path, str | bytes | os.PathLike) and os.fsdecode(path).startswith(_PYTHONS)

    @staticmethod
    def _is_inside(path: object) -> bool:
        """Whether a path is in the scratch folder. A descriptor, and a name beside a descriptor, were judged when it was opened."""
        if isinstance(path, int):
            return True
        if not isinstance(path, str | bytes | os.PathLike):
            return False
        text = os.fsdecode(path)
        if not text.startswith("/"):
            return ".." not in text.split("/")
        return os.path.normpath(text).startswith((f"{Scratch.folder}", "/dev/null"))


def _is_importing() -> bool:
    """Whether the code that is run is that of a module which is imported, or of a class that Python makes from text."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith("<frozen importlib") or name.endswith(
            ("/collections/__init__.py", "/dataclasses.py", "/typing.py")
        ):
            return True
        frame = frame.f_back
    return False


def _shown_code(code: object) -> str:
    return str(getattr(code, "co_filename", code))


def _is_of_memory(error: BaseException) -> bool:
    one: BaseException | None = error
    while one is not None:
        if isinstance(one, MemoryError):
            return True
        one = one.__cause__
    return False


def _place_of(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "/async_ckpt/" in frame.filename]
    last = (own or frames)[-1]
    return f"{Path(last.filename).name}:{last.lineno}"


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def _limit_addresses() -> None:
    """Have what would take the machine's memory fail with MemoryError, which is wrong as well."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        used = int(statm.read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + 6 * MAX_MEMORY, resource.getrlimit(resource.RLIMIT_AS)[1]))


def _hangs(*_: object) -> None:
    raise HangError
