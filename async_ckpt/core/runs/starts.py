"""The starts of a run: which process may commit, and which commits count if two processes have written.

In: the listing of a root, manifests, and what each start has seen. Out: the right to commit, or an error that names the
process that has it; steps that do not count. Knows nothing of: archives.

    <root>/start-00000008.5f3a9c01.500.json     the eighth start; its first save was of step 500
    <root>/start-00000008.5f3a9c01.500.seen     the commits that it has seen

A process takes the root at its first save. It creates the file of the next start, then lists the commits, then creates
the `.seen` with those that count, before it writes anything else. It first creates those that earlier starts lack, so
that nobody waits for a start that was killed in between; a start whose own was created by another has lost the root.

A commit counts if each later start that has a commit which counts has seen it. After each manifest the process lists
the starts, and acknowledges the save if all later ones have seen it. A later start lists the commits after it has
created its file, so it has seen every save that was acknowledged without a word about it. A manifest that is put all
the same, after a sleep, is seen by no later start and does not count once the next one has committed.

The file of a start names its ancestors: the starts that it found at all roots that had answered, and theirs. A run that
has begun elsewhere writes nothing to a root with a commit of any other start (`Roots.refuse_strangers`).

Starts of older versions have no `.seen`. They count as having seen the steps below their own commits.

The order of starts is that of their numbers, then of their random tokens. No clock decides anything.
"""

from __future__ import annotations

import os
import re
import socket
import threading
import weakref
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final, NamedTuple, Protocol

from ...errors import CheckpointError, RunTakenError
from ..fields import count, entries, items, number, row, table, text
from ..host.process import in_forked_child
from ..storage.interface import Storage
from ..timing import shown_time, wall_time
from .manifest import Manifest, seal, unseal
from .receipts import as_ranges

_NAME: Final = re.compile(r"start-(\d{8,18})\.([0-9a-f]{8})\.(\d{1,255})\.(json|seen)")
# All names of starts sort between these texts.
_FIRST, _LAST = "start-", "start."
# The number of starts that stay listed where nobody can tell which have ended. If a process sleeps through more of
# them, its commits cannot be told from later ones.
NUM_KEPT: Final = 32


# A `.seen` has the attempts of this many steps, the newest; of those before it has only the steps, so that it stays
# small, and readers need not ask which attempt is there.
_NUM_ATTEMPTS: Final = 32


@dataclass(frozen=True, order=True, slots=True)
class Start:
    """One start of a run; starts compare in their order. `first` is the step of its first save."""

    number: int
    token: str
    first: int = 0
    has_seen: bool = field(default=False, compare=False)
    """Whether its `.seen` was listed."""

    @property
    def name(self) -> str:
        return f"start-{self.label}.{self.first}.json"

    @property
    def seen_name(self) -> str:
        return f"start-{self.label}.{self.first}.seen"

    @property
    def label(self) -> str:
        """The start as manifests name it."""
        return f"{self.number:08d}.{self.token}"

    def is_before(self, other: Start) -> bool:
        """Whether another start has taken over the run. At several roots, one start may have several numbers."""
        return (self.number, self.token) < (other.number, other.token) and self.token != other.token


def split_starts(names: list[str]) -> tuple[list[str], list[Start]]:
    """Divide the sorted names in a root into other names, and starts."""
    begin, end = bisect_left(names, _FIRST), bisect_left(names, _LAST)
    starts: list[Start] = []
    others = names[:begin]
    for name in names[begin:end]:
        match = _NAME.fullmatch(name)
        if match is None:
            others.append(name)
        elif match[4] == "json":
            starts.append(Start(int(match[1]), match[2], int(match[3])))
        elif starts and starts[-1].seen_name == name:
            starts[-1] = replace(starts[-1], has_seen=True)
    return (others + names[end:], starts) if end > begin else (names, starts)


class Seen:
    """The commits that a start has seen: all steps, and the attempts of the newest of them."""

    def __init__(self, steps: Iterable[range], attempts: Mapping[int, str]) -> None:
        self._steps, self._attempts = sorted(steps, key=lambda one: one.start), attempts
        self._firsts = [one.start for one in self._steps]

    @classmethod
    def parse(cls, data: bytes) -> Seen | None:
        """The commits that a `.seen` names; None if it is damaged."""
        try:
            fields = table(unseal(data))
            steps = items(fields["steps"], partial(row, of=(count, count, count)))
            attempts = {int(step): attempt for step, attempt in entries(fields["attempts"], text)}
            return cls([range(first, first + num * step, step) for first, num, step in steps], attempts)
        except (ValueError, KeyError):
            return None

    @classmethod
    def read(cls, storage: Storage, start: Start) -> Seen | None:
        """The commits that a start has seen; None if it has not said so."""
        with suppress(FileNotFoundError):
            return cls.parse(storage.read(start.seen_name)[0])
        return None

    def has(self, step: int, commit: Manifest | None) -> bool:
        """Whether it has seen a commit. Without one: whether it has seen all that there may ever be at this step."""
        if (attempt := self._attempts.get(step)) is not None:
            return commit is not None and attempt in (commit.attempt, *commit.replaces)
        at = bisect_right(self._firsts, step)
        return at > 0 and step in self._steps[at - 1]

    def names(self, step: int, attempt: str) -> bool:
        """Whether it has seen just this attempt, as far as it says so."""
        return self._attempts.get(step) == attempt


class TakenRun(Protocol):
    """A run at a root that is taken: `runs.run.Run`."""

    @property
    def storage(self) -> Storage: ...

    @property
    def root(self) -> Any: ...

    def see(self, own: Start) -> tuple[list[Start], dict[int, str]]: ...

    def descended(self, others: Sequence[Any], starts: Sequence[Start]) -> list[str]: ...


class StartsByName(dict[str, Start]):
    """The starts by their labels, and the latest of each process by its token."""

    def __init__(self, starts: Iterable[Start]) -> None:
        super().__init__((name, start) for start in sorted(starts) for name in (start.token, start.label))

    def of(self, label: str) -> Start | None:
        """The start that a manifest names. It has another number at another root."""
        return self.get(label) or self.get(label.rpartition(".")[2])


class _Later(NamedTuple):
    """A start that has commits which count: the lowest of them is that of `lowest`."""

    start: Start
    seen: Seen | None
    lowest: int | None

    def has_seen(self, step: int, commit: Manifest | None = None) -> bool:
        """Whether it has seen a commit, and not gone back below it since."""
        is_below = self.lowest is None or step < self.lowest
        return is_below and (self.seen is None or self.seen.has(step, commit))


class Line:
    """The rule which commits count. Commits of starts that are not listed, of older versions and of other tools always
    do: their order is unknown.

    Of the starts that have seen, only the latest that has a commit matters: what counted for the ones before it when it
    listed the commits is what it has seen.
    """

    def __init__(
        self,
        steps: Sequence[int],
        starts: Iterable[Start],
        committed: Callable[[int], Manifest | None],
        seen: Callable[[Start], Seen | None] = lambda _: None,
        own: Start | None = None,
    ) -> None:
        """`steps` are ascending; `committed` reads the manifest of a step, None if there is none. The start `own` is
        taken for one that has a commit: its process takes nothing for committed that it has not seen.
        """
        self._committed = committed
        in_order = sorted(starts)
        self._starts = StartsByName(in_order)
        self._later: list[_Later] = []
        firsts: dict[str, int] = {}
        for start in in_order:  # below the first step of one, a process takes the root again
            firsts[start.token] = min(start.first, firsts.get(start.token, start.first))
        for start in in_order[:0:-1]:
            own_steps = filter(partial(self._is_of, start), steps[bisect_left(steps, firsts[start.token]) :])
            lowest = next(own_steps, None)
            if lowest is not None or start == own:
                told = seen(start) if start.has_seen else None
                self._later.append(_Later(start, told, lowest))
                if told is not None:
                    break

    def _is_of(self, start: Start, step: int) -> bool:
        """Whether a step has a commit of this start that counts."""
        commit = self._committed(step)
        return commit is not None and self._starts.of(commit.start) == start and self.counts(step, commit)

    def counts(self, step: int, commit: Manifest) -> bool:
        own = self._starts.of(commit.start) if self._later else None
        return own is None or all(one.has_seen(step, commit) for one in self._later if own.is_before(one.start))

    def out(self, steps: Iterable[int]) -> dict[int, str]:
        """The attempts at these steps that do not count. Reads the commits of steps that a later start has not seen."""
        out: dict[int, str] = {}
        for step in steps if self._later else ():
            if not all(later.has_seen(step) for later in self._later):
                commit = self._committed(step)
                if commit is not None and not self.counts(step, commit):
                    out[step] = commit.attempt
        return out


# --- this process -------------------------------------------------------------------------------------------------


class Tenure:
    """The right of this process to commit at one root. `tenure_of` makes it; all Runs at the root share it.

    From any thread.
    """

    def __init__(self, about: Mapping[str, object] | None = None) -> None:
        """`about` tells of the process that this one stands in for: it has its starts, and no locks."""
        self.start: Start | None = None  # since the first save; replaced under _taking
        self._facts: Mapping[str, object] = {}  # of the run, for the file of the start
        self.seen = b""  # the text of its `.seen`
        self._joined: set[str] = set()  # the tokens of the starts that rank 0 makes for this process, too
        self.about = about
        self._lost: tuple[str, Start, dict[str, object]] | None = None
        self._taking = threading.Lock()  # held over requests, so that concurrent saves take the root once
        self._users: weakref.WeakSet[object] = weakref.WeakSet()
        self._file_lock = ExitStack()  # on the file of the start, as long as this object lives
        weakref.finalize(self, self._file_lock.close).atexit = False

    def leave(self, user: object, withdraw: Callable[[Start], None] = lambda _: None) -> None:
        """Remove a user. After the last one, another process may take the root.

        `withdraw` is then called with the start, whose file is still locked.
        """
        with self._taking:
            if user not in self._users:
                return
            self._users.discard(user)
            if not self._users:
                start, self.start, self._lost = self.start, None, None
                try:
                    if start is not None:
                        withdraw(start)
                finally:
                    self._file_lock.close()

    def take(self, run: TakenRun, step: int, token: str, others: Sequence[TakenRun]) -> tuple[Start, bool]:
        """Take a root for a run that is about to save, unless that was done for this step or a lower one. A process
        that stands in for another one takes it in its name, without a lock, unless that was done.

        Returns the start, and whether it is new: then the caller looks at the commits again. `token` is that of the
        start at this root and those of the `others`. Raises RunTakenError for a root that another process has taken
        meanwhile or that a living one has, and StorageUnavailableError.
        """
        with self._taking:
            self._users.add(run)
            if self.start is not None and self.start.first <= step:
                return self.start, False
            storage, starts = run.storage, run.root.relist().starts
            if self.start is not None:
                self.refuse_if_later(storage, self.start, starts)
                token = self.start.token
            if self.about is not None:
                _tokens.add(token)
                if (there := _last_of(token, step, starts)) is not None:
                    self.refuse_if_later(storage, there, starts)
                    self.start, self.seen = there, storage.read(there.seen_name)[0]
                    return there, True
            refuse_if_alive(storage, starts)
            # Another root of the run may have been taken a moment ago.
            elsewhere = (start for other in others for start in other.root.starts)
            least_number = max((s.number + (s.token != token) for s in elsewhere), default=1)
            number = max(least_number, 1 + max((s.number for s in starts), default=0))
            _tokens.add(token)
            start = Start(number, token, step)
            roots = sorted(one.storage.locate("") for one in (run, *others))
            self._facts = {**(self.about or {}), "roots": roots, "ancestors": run.descended(others, starts)}
            self._put(storage, start)
            self._put_seen(run, start, *run.see(start))
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
            storage.put_new(start.name, seal({**_about_this_process(), **self._facts}))
        if self.about is None:
            unlock = storage.hold(start.name)
            self._file_lock.close()
            self._file_lock.callback(_unlock_in, os.getpid(), unlock)

    def _put_seen(self, run: TakenRun, own: Start, starts: Sequence[Start], commits: Mapping[int, str]) -> None:
        """Put what a start has seen, and first that of earlier starts which were killed before they put theirs."""
        storage = run.storage
        if self.start is not None and later_than(self.start, starts):  # it was not there when this one was named
            storage.delete(own.name)
        self.refuse_if_later(storage, self.start or own, starts)
        steps = sorted(commits)
        attempts = {str(step): commits[step] for step in steps[-_NUM_ATTEMPTS:] if commits[step]}
        self.seen = seal({"by": own.label, "steps": [*as_ranges(steps)], "attempts": attempts})
        for start in starts:
            if start < own and not start.has_seen:
                with suppress(FileExistsError):
                    storage.put_new(start.seen_name, self.seen)
        try:
            storage.put_new(own.seen_name, self.seen)
        except FileExistsError:
            if storage.read(own.seen_name)[0] != self.seen:  # else an earlier put that failed has arrived
                self.refuse_if_later(storage, own, run.root.relist().starts)
                raise _taken_error(storage.locate(""), own, {}, is_alive=False) from None

    def put_back(self, storage: Storage, start: Start) -> None:
        """Put the files of the start again, after the root was emptied."""
        with self._taking:
            if self.start == start:
                self._put(storage, start)
                with suppress(FileExistsError):
                    storage.put_new(start.seen_name, self.seen)

    def unknown_error(self, storage: Storage, step: int, error: Exception) -> RunTakenError:
        """The error of a rank that finds the manifest of a step, but cannot list the starts."""
        text = f"whether another process has taken the run is unknown, and so is step {step}: {error}"
        return RunTakenError(text, path=storage.locate(""), host="", pid=0, since=0.0, undecided=True)

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
        if later := later_than(own, starts):
            self.note_lost(storage, later)
            assert self._lost is not None
            raise _taken_error(*self._lost, is_alive=False, put=put)

    def note_lost(self, storage: Storage, later: Sequence[Start]) -> None:
        """Note that these starts have the root, so that the next save is refused."""
        self._lost = storage.locate(""), max(later), about_start(storage, max(later))


def _last_of(token: str, step: int, starts: Iterable[Start]) -> Start | None:
    """The last of these starts that has this token, may commit this step, and has said what it has seen."""
    of_token = (start for start in starts if start.token == token and start.first <= step and start.has_seen)
    return max(of_token, default=None)


def later_than(own: Start | None, starts: Iterable[Start]) -> list[Start]:
    """The starts that have taken over the run from this one."""
    return [start for start in starts if own is not None and own.is_before(start)]


def _unlock_in(process: int, unlock: Callable[[], None]) -> None:
    """Unlock the file of a start, but not in a forked child."""
    if os.getpid() == process:
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
    return RunTakenError(text, path=root, host=host, pid=pid, since=since, undecided=put is not None)
