"""The starts of a run: which process may commit, and which commits count if two processes have written.

In: the listing of a root, and manifests. Out: the right to commit, or an error that names the process that has it;
steps that do not count. Knows nothing of: archives.

    <root>/start-00000008.5f3a9c01.500.json     the eighth start; its first save was of step 500

A process takes the root at its first save by creating the next start there. It commits as long as the root lists no
later start. It lists the root right after each manifest, and the next start lists the commits after it has taken the
root: so either the earlier process sees the later start and does not acknowledge the save, or the later process sees
the commit and refuses to save below it. A manifest that a process has put all the same, after a sleep, is excluded by
the rule of `out_of_line`.

The order of starts is that of their numbers, then of their random tokens. No clock decides anything.
"""

from __future__ import annotations

import os
import re
import socket
import threading
import weakref
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Final, NamedTuple

from ...errors import CheckpointError, RunTakenError
from ..fields import number
from ..host.process import in_forked_child
from ..spans import shown_time, wall_time
from ..storage.interface import Storage
from .manifest import seal, unseal

_NAME: Final = re.compile(r"start-(\d{8,18})\.([0-9a-f]{8})\.(\d{1,255})\.json")
# All names of starts sort between these texts.
_FIRST, _LAST = "start-", "start."
# The number of starts that stay listed where nobody can tell which have ended. If a process sleeps through more of
# them, its commits cannot be told from later ones.
NUM_KEPT: Final = 32


class Start(NamedTuple):
    """One start of a run; starts compare in their order. `first` is the step of its first save."""

    number: int
    token: str
    first: int = 0

    @property
    def name(self) -> str:
        return f"start-{self.label}.{self.first}.json"

    @property
    def label(self) -> str:
        """The start as manifests name it."""
        return f"{self.number:08d}.{self.token}"

    def is_before(self, other: Start) -> bool:
        """Whether another start has taken over the run. At several roots, one start may have several numbers."""
        return self[:2] < other[:2] and self.token != other.token


def split_starts(names: list[str]) -> tuple[list[str], list[Start]]:
    """Divide the sorted names in a root into other names, and starts."""
    begin, end = bisect_left(names, _FIRST), bisect_left(names, _LAST)
    starts, others = [], names[:begin]
    for name in names[begin:end]:
        match = _NAME.fullmatch(name)
        if match is None:
            others.append(name)
        else:
            starts.append(Start(int(match[1]), match[2], int(match[3])))
    return (others + names[end:], starts) if starts else (names, starts)


class Commit(NamedTuple):
    """A committed step for the rule of `out_of_line`: its attempt, and the start that its manifest names."""

    attempt: str
    start: str


Committed = Callable[[int], Commit | None]


def out_of_line(steps: Sequence[int], starts: Iterable[Start], committed: Committed) -> dict[int, str]:
    """The attempts, by step, that do not count: a later start has committed a step below them.

    Otherwise starts never fall as steps rise, since a start that saves below newer steps retires them, or is refused.
    `steps` are ascending; `committed` reads the commit of a step, None if there is none. Commits of starts that are not
    listed, of older versions and of other tools always count: their order is unknown.
    """
    known = _by_token(starts)
    firsts = [start.first for start in sorted(known.values())[1:]]
    out: dict[int, str] = {}
    latest: Start | None = None
    for step in steps[bisect_left(steps, min(firsts)) :] if firsts else ():  # there is no later start below
        commit = committed(step)
        own = _start_of(commit, known)
        if commit is None or own is None:
            continue
        if latest is not None and own.is_before(latest):
            out[step] = commit.attempt
        else:
            latest = own
    return out


def counts(step: int, steps: Sequence[int], starts: Iterable[Start], committed: Committed) -> bool:
    """Whether the commit of one step counts, by the rule of `out_of_line`.

    Reads only manifests that may be of later starts.
    """
    known = _by_token(starts)
    if len(known) < 2 or (own := _start_of(committed(step), known)) is None:
        return True
    begin = min((later.first for later in known.values() if own.is_before(later)), default=step)
    below = steps[bisect_left(steps, begin) : bisect_left(steps, step)]
    others = (_start_of(committed(lower), known) for lower in reversed(below))
    return not any(other is not None and own.is_before(other) for other in others)


def _by_token(starts: Iterable[Start]) -> dict[str, Start]:
    """One start for each process, with its lowest first step: below that, a process takes the root again."""
    known: dict[str, Start] = {}
    for start in sorted(starts):
        earlier = known.get(start.token, start)
        known[start.token] = start._replace(first=min(start.first, earlier.first))
    return known


def _start_of(commit: Commit | None, known: dict[str, Start]) -> Start | None:
    return known.get(commit.start.rpartition(".")[2]) if commit else None


# --- this process -------------------------------------------------------------------------------------------------


class Tenure:
    """The right of this process to commit at one root. `tenure_of` makes it; all Runs at the root share it.

    From any thread.
    """

    def __init__(self) -> None:
        self.start: Start | None = None  # since the first save; replaced under _taking
        self._roots: Sequence[str] = ()  # of the run, for the file of the start
        self._joined: set[str] = set()  # the tokens of the starts that rank 0 makes for this process, too
        self._lost: tuple[str, Start, dict[str, object]] | None = None
        self._taking = threading.Lock()  # held over requests, so that concurrent saves take the root once
        self._users: weakref.WeakSet[object] = weakref.WeakSet()
        self._hold = _Hold()
        weakref.finalize(self, self._hold.release).atexit = False

    def leave(self, user: object, withdraw: Callable[[str], None] = lambda _: None) -> None:
        """Remove a user. After the last one, another process may take the root.

        `withdraw` is then called with the name of the start's file, which is still locked.
        """
        with self._taking:
            if user not in self._users:
                return
            self._users.discard(user)
            if not self._users:
                start, self.start, self._lost = self.start, None, None
                try:
                    if start is not None:
                        withdraw(start.name)
                finally:
                    self._hold.release()

    def take(
        self,
        user: object,
        storage: Storage,
        step: int,
        token: str,
        listed: Callable[[], Sequence[Start]],
        elsewhere: Callable[[], Iterable[Start]],
        *,
        roots: Sequence[str] = (),
    ) -> tuple[Start, bool]:
        """Take a root for a user that is about to save, unless that was done for this step or a lower one.

        Returns the start, and whether it is new: then the caller looks at the commits again. `token` is that of the
        start at all `roots` of the run; `listed` lists the starts at this root, and `elsewhere` those at the others.
        Raises RunTakenError for a root that another living process has, and StorageUnavailableError.
        """
        with self._taking:
            self._users.add(user)
            if self.start is not None and self.start.first <= step:
                return self.start, False
            starts = listed()
            if self.start is not None:
                self.refuse_if_later(storage, self.start, starts)
                token = self.start.token
            refuse_if_alive(storage, starts)
            # Another root of the run may have been taken a moment ago.
            least_number = max((s.number + (s.token != token) for s in elsewhere()), default=1)
            number = max(least_number, 1 + max((s.number for s in starts), default=0))
            _tokens.add(token)
            start = Start(number, token, step)
            self._roots = roots
            self._put(storage, start)
            self.start = start
            return start, True

    def join(self, token: str) -> None:
        """Note the token of the start of all ranks, which rank 0 makes."""
        self._joined.add(token)

    def own(self, starts: Iterable[Start], label: str) -> Start | None:
        """The start of this process, or of the ranks that it is one of; else the one that a manifest names."""
        number, _, token = label.partition(".")
        named = Start(int(number), token) if number else None
        return self.start or max((start for start in starts if start.token in self._joined), default=named)

    def _put(self, storage: Storage, start: Start) -> None:
        with suppress(FileExistsError):  # an earlier put that failed may have arrived
            storage.put_new(start.name, seal({**_about_this_process(), "roots": [*self._roots]}))
        self._hold.replace(storage.hold(start.name))

    def put_back(self, storage: Storage, start: Start) -> None:
        """Put the file of the start again, after the root was emptied."""
        with self._taking:
            if self.start == start:
                self._put(storage, start)

    def refuse_if_lost(self) -> None:
        """Raise RunTakenError if it is known that a later start has the root."""
        if self._lost is not None:
            raise _taken_error(*self._lost, is_alive=False)

    def refuse_if_later(
        self, storage: Storage, own: Start | None, starts: Iterable[Start], *, put: int | None = None
    ) -> None:
        """Raise RunTakenError if one of these starts is later than this process's own.

        `put` is a step whose manifest is there already: the process of the later start may have seen it, or not.
        """
        later = [start for start in starts if own is not None and own.is_before(start)]
        if later:
            self._lost = storage.locate(""), max(later), about_start(storage, max(later))
            raise _taken_error(*self._lost, is_alive=False, put=put)


class _Hold:
    """The lock on the file of a start. Its Tenure owns it; a finalizer releases it, but not in a forked child."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._unlock: Callable[[], None] | None = None

    def replace(self, unlock: Callable[[], None]) -> None:
        self.release()
        self._unlock = unlock

    def release(self) -> None:
        unlock, self._unlock = self._unlock, None
        if unlock is not None and os.getpid() == self._pid:
            unlock()


_tokens: set[str] = set()  # of the starts of this process
_tenures: weakref.WeakValueDictionary[str, Tenure] = weakref.WeakValueDictionary()
_lock = threading.Lock()


def tenure_of(root: str) -> Tenure:
    """The tenure of this process at a root. The caller keeps it as long as it is needed."""
    with _lock:
        tenure = _tenures.get(root)
        if tenure is None:
            tenure = _tenures[root] = Tenure()
        return tenure


@in_forked_child
def _forget_tenures() -> None:
    """In a forked child, which is another start: the locks are the parent's."""
    global _tokens, _tenures, _lock
    _tokens, _tenures, _lock = set(), weakref.WeakValueDictionary(), threading.Lock()


def refuse_if_alive(storage: Storage, starts: Iterable[Start]) -> None:
    """Raise RunTakenError if another living process provably has the newest of these starts."""
    newest = max(starts, default=None)
    if newest is not None and newest.token not in _tokens and storage.is_held(newest.name):
        raise _taken_error(storage.locate(""), newest, about_start(storage, newest), is_alive=True)


def _about_this_process() -> dict[str, object]:
    return {"host": socket.gethostname(), "pid": os.getpid(), "since": wall_time()}


def about_start(storage: Storage, start: Start) -> dict[str, object]:
    """The description of a start's process; empty if it cannot be read."""
    with suppress(CheckpointError, OSError, ValueError):
        fields = unseal(storage.read(start.name)[0])
        if isinstance(fields, dict):
            return fields
    return {}


def has_ended_here(about: dict[str, object]) -> bool:
    """Whether the process of a start, whose lock is free, was one of this machine and has ended.

    A free lock alone is no proof: some file systems show locks to the processes of one machine only.
    """
    pid = about.get("pid")
    return about.get("host") == socket.gethostname() and isinstance(pid, int) and (pid == os.getpid() or not lives(pid))


def lives(pid: int) -> bool:
    """Whether a process of this number is alive on this machine."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:
        return True  # of another user
    return True


def _taken_error(
    root: str, start: Start, about: dict[str, object], *, is_alive: bool, put: int | None = None
) -> RunTakenError:
    host, pid, since = about.get("host"), about.get("pid"), 0.0
    host = host if isinstance(host, str) else "an unknown host"
    pid = pid if isinstance(pid, int) and not isinstance(pid, bool) else 0
    with suppress(ValueError):
        since = number(about.get("since"))
    owner = f"process {pid} on {host!a:.200}, which began to save there at {shown_time(since)} by its clock"
    if is_alive:
        text = (
            f"{root}: {owner}, is alive and has the run; stop it, let it close its checkpointer, or save to another "
            "root"
        )
    else:
        text = (
            f"{root}: {owner}, has taken the run over (start {start.number}); this process can commit nothing "
            "there any more. End it, or close its checkpointer and make a new one to take the run back"
        )
    if put is not None:
        text += (
            f". The manifest of step {put} was put before that was known, so the step may be committed all the same: "
            "look at what is committed"
        )
    error = RunTakenError(text)
    error.path, error.host, error.pid, error.since, error.undecided = root, host, pid, since, put is not None
    return error
