"""One child for each place: a call, by its number, and what happens to it.

In: a scenario, a place, a nursery whose children have the shim. Out: what was found wrong, or nothing. Knows nothing of: which
places there are to try.
"""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import threading
import time
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from children import Ended, Nursery

from tests.matrices.attack_driver import NOT_MET, Place
from tests.matrices.calls.attack_scenarios import SCENARIOS
from tests.matrices.calls.scenario import Scenario, Told

SHIM: Final = Path(__file__).with_name("attack_shim.c")
_PATIENCE: Final = 120.0
_STOPPED_SECONDS: Final = 0.1

# As the shim numbers them.
_NONE, _KILL, _STOP, _SLOW, _SHORT, _FIRST_ERRNO = 0, 1, 2, 3, 4, 1000
_CHANGES: Final = frozenset(
    {"create", "write", "fsync", "truncate", "allocate", "rename", "link", "unlink", "rmdir", "mkdir"}
)
_ALL: Final = _CHANGES | {"open", "read"}
_SPACE: Final = frozenset({"create", "write", "truncate", "allocate", "rename", "link", "mkdir"})


class Fault(NamedTuple):
    """What happens to a call, and to which kinds of calls the system lets it happen."""

    code: int
    calls: frozenset[str]
    is_survived: bool = False
    """Nothing may fail by it."""


FAULTS: Final[Mapping[str, Fault]] = {
    "SIGKILL": Fault(_KILL, _CHANGES),
    "SIGSTOP": Fault(_STOP, frozenset({"fsync", "rename", "unlink"}), is_survived=True),
    "slow": Fault(_SLOW, frozenset({"fsync", "create"}), is_survived=True),
    "short": Fault(_SHORT, frozenset({"write"}), is_survived=True),
    "EINTR": Fault(
        _FIRST_ERRNO + errno.EINTR, frozenset({"create", "open", "write", "read", "fsync"}), is_survived=True
    ),
    "EIO": Fault(_FIRST_ERRNO + errno.EIO, _ALL | {"close"}),
    "ENOSPC": Fault(_FIRST_ERRNO + errno.ENOSPC, _SPACE),
    "EDQUOT": Fault(_FIRST_ERRNO + errno.EDQUOT, _SPACE),
    "EROFS": Fault(_FIRST_ERRNO + errno.EROFS, _CHANGES - {"write", "fsync", "allocate", "truncate"}),
    "ESTALE": Fault(_FIRST_ERRNO + errno.ESTALE, _ALL),
}

_JOB = """
import ctypes, os, sys, warnings
warnings.simplefilter("ignore")
scenario, root, notes, kind, number, code, log = sys.argv[1:]
from tests.matrices.attack_driver import NOT_MET, Place
from tests.matrices.calls.attack_scenarios import act
fd = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_TRUNC) if log else -1
shim = ctypes.CDLL(None)
shim.attack_arm(root.encode(), kind.encode(), ctypes.c_long(int(number)), int(code), fd)
act(scenario, root, notes)
if not shim.attack_is_met():
    os.write(1, b"not met")
"""


def build_shim(folder: Path) -> Path:
    """The library that children are started with. Raises FileNotFoundError where there is no compiler."""
    built = folder / "attack_shim.so"
    flags = ["-shared", "-fPIC", "-O1", "-D_LARGEFILE64_SOURCE"]
    subprocess.run(["cc", *flags, "-o", str(built), str(SHIM), "-ldl"], check=True, capture_output=True)
    return built


@dataclass
class _Prepared:
    folder: Path
    calls: Sequence[str]


class CallAttacker:
    """Tries places, one after the other. One thread owns it, and its nursery."""

    def __init__(self, folder: Path, shim: Path) -> None:
        self._folder = folder
        folder.mkdir()
        (folder / "nursery").mkdir()
        modules = ("tests.matrices.calls.attack_scenarios", "async_ckpt.tools.command.main")
        self._nursery = Nursery(folder / "nursery", *modules, env={"LD_PRELOAD": str(shim)})
        self._prepared: dict[str, _Prepared] = {}
        self._count = 0

    def __enter__(self) -> CallAttacker:
        return self

    def __exit__(self, *_: object) -> None:
        self._nursery.__exit__(*_)

    def places(self, scenario: str) -> Sequence[Place]:
        """Each call of the unharmed scenario with each fault that fits it. Raises AssertionError if it fails by itself."""
        of_kind: Counter[str] = Counter()
        found = []
        for kind in self._ready(scenario).calls:
            of_kind[kind] += 1
            fitting = [name for name, fault in FAULTS.items() if kind in fault.calls]
            found += [Place(scenario, name, kind, of_kind[kind]) for name in fitting]
        return found

    def wrong(self, place: Place) -> str | None:
        """What does not hold after this. None if all does."""
        scenario, fault = SCENARIOS[place.scenario], FAULTS[place.fault]
        root, notes = self._copy(place.scenario)
        try:
            ended = self._run(place.scenario, root, notes, place, fault.code)
            status, error = ended.status, ended.err
            told = told_by(scenario, notes)
            if status == 0 and NOT_MET in ended.out:
                return NOT_MET
            if not (fault.code == _KILL and status == -signal.SIGKILL):
                if status != 0:
                    return f"the child ended with {status}: {error[-600:]}"
                if "Traceback" in error:
                    return f"it has printed: {error[-600:]}"
            refusal = told.wrong_refusal(is_survived=fault.is_survived, has_plain_errors=scenario.has_plain_errors)
            return refusal or broken(scenario, root, told)
        except AssertionError as hung:
            return f"{hung!s:.600}"
        finally:
            shutil.rmtree(root.parent, ignore_errors=True)

    def _ready(self, name: str) -> _Prepared:
        if name not in self._prepared:
            folder = self._folder / f"prepared-{len(self._prepared)}"
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                (folder / "root").mkdir(parents=True)
                SCENARIOS[name].prepare(folder / "root")
            self._prepared[name] = _Prepared(folder, ())
            root, notes = self._copy(name)
            log = root.parent / "calls"
            ended = self._run(name, root, notes, Place(name, "", "none", 0), _NONE, log)
            told = told_by(SCENARIOS[name], notes)
            assert ended.status == 0, f"{name} ended with {ended.status} by itself: {ended.err[-2000:]}"
            assert not told.refused, f"{name} failed by itself: {told.refused}"
            found = broken(SCENARIOS[name], root, told)
            assert found is None, f"{name} is wrong by itself: {found}"
            self._prepared[name] = _Prepared(folder, log.read_text().split())
            shutil.rmtree(root.parent)
        return self._prepared[name]

    def _copy(self, name: str) -> tuple[Path, Path]:
        self._count += 1
        into = self._folder / f"place-{self._count}"
        shutil.copytree(self._ready(name).folder / "root", into / "root")
        return into / "root", into / "notes"

    def _run(self, name: str, root: Path, notes: Path, place: Place, code: int, log: Path | None = None) -> Ended:
        child = self._nursery.start(_JOB, name, root, notes, place.kind, place.number, code, log or "")
        waker = threading.Thread(target=wake, args=(child.pid,)) if code == _STOP else None
        if waker is not None:
            waker.start()
        ended = child.ended(_PATIENCE)
        if waker is not None:
            waker.join()
        return ended


def wake(pid: int) -> None:
    """Let a process that has been stopped go on, until it is gone."""
    while True:
        time.sleep(_STOPPED_SECONDS)
        try:
            os.kill(pid, signal.SIGCONT)
        except ProcessLookupError:
            return
        state = state_of_process(pid)
        if state in ("Z", ""):
            return


def state_of_process(pid: int) -> str:
    """As /proc tells: T if it is stopped, Z if it has ended; empty if it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def told_by(scenario: Scenario, notes: Path) -> Told:
    """What a child has been told of, and what there was before."""
    told = Told(dict(scenario.before), {step: {number} for step, number in scenario.before.items()})
    return told.read(notes) if notes.exists() else told  # a child that was killed early has made none


def broken(scenario: Scenario, root: Path, told: Told) -> str | None:
    """The first promise that does not hold."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            scenario.check(root, told)
        except Exception as error:  # whatever it is, the promise is broken
            return f"{type(error).__name__}: {error!s:.500}"
    return None
