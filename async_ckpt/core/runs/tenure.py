"""The right of this process to commit at a root, taken at its first save: see `starts`.

In: a root, and the starts that are listed there. Out: the start of this process, or an error that names the process
that has the run. Knows nothing of: which commits count.
"""

from __future__ import annotations

import os
import socket
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress

from ...errors import CheckpointError, RunTakenError
from ..fields import number
from ..host.process import in_forked_child
from ..storage.interface import Storage
from ..timing import shown_time, wall_time
from .manifest import seal
from .root import Root
from .starts import Seen, Start, about_start, later_than


class Tenure:
    """The right of this process to commit at one root, made by `tenure_of` for all Runs at the root. Thread-safe."""

    def __init__(self, about: Mapping[str, object] | None = None) -> None:
        """`about` describes the process that this one stands in for: it uses that process's starts, and no locks."""
        self.start: Start | None = None  # set at the first save; replaced under _taking
        self._facts: Mapping[str, object] = {}  # fields about the run for the file of the start
        self.seen = b""  # the text of its `.seen`
        self._joined: set[str] = set()  # the tokens of starts that rank 0 makes for all ranks
        self.about = about
        self._lost: tuple[str, Start, dict[str, object]] | None = None
        self._taking = threading.Lock()  # held during requests, so that concurrent saves take the root once
        self._is_quiet = True  # no save of a user that has left may still commit
        self._users: weakref.WeakSet[Root] = weakref.WeakSet()
        self._file_lock = ExitStack()  # the lock on the file of the start
        weakref.finalize(self, self._file_lock.close).atexit = False

    def leave(self, root: Root, *, withdraws: bool = False, is_quiet: bool = True) -> None:
        """Remove a user. Once the last user has left, another process may take the root.

        With `withdraws`, the last user deletes the files of the start, while they are still locked. Unless `is_quiet`,
        a save that was given up hangs, and may still commit: then the start counts as alive while this process is.
        """
        with self._taking:
            if root not in self._users:
                return
            self._users.discard(root)
            self._is_quiet = self._is_quiet and is_quiet
            if not self._users:
                start, self.start, self._lost = self.start, None, None
                if start is not None and self._is_quiet:
                    _tokens.discard(start.token)
                self._is_quiet = True
                try:
                    if withdraws and start is not None:
                        with suppress(CheckpointError):  # harmless if they stay: the next start follows this one
                            root.storage.delete_many([start.name, start.seen_name])
                finally:
                    self._file_lock.close()

    def take(self, root: Root, step: int, token: str, others: Sequence[Root]) -> tuple[Start, bool]:
        """Take a root before a save of `step`, unless it was taken for this step or a lower one. A process that stands
        in for another takes the root in its name, without a lock, or uses the start that is there in its name.

        Returns the start, and whether it is new: then the caller looks at the commits again. `token` is the start's
        token, the same at this root and at the `others`. Raises RunTakenError if another process has taken the root
        meanwhile or a living process has it, and StorageUnavailableError.
        """
        with self._taking:
            self._users.add(root)
            if self.start is not None and self.start.first <= step:
                return self.start, False
            storage, starts = root.storage, root.relist().starts
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
            elsewhere = (start for other in others for start in other.starts)
            least_number = max((s.number + (s.token != token) for s in elsewhere), default=1)
            number = max(least_number, 1 + max((s.number for s in starts), default=0))
            _tokens.add(token)
            start = Start(number, token, step)
            roots = sorted(one.storage.locate("") for one in (root, *others))
            self._facts = {**(self.about or {}), "roots": roots, "ancestors": root.descended(others, starts)}
            self._put(storage, start)
            self._put_seen(root, start, *root.see(start))
            self.start = start
            return start, True

    def join(self, token: str) -> None:
        """Note the token of the start that rank 0 makes for all ranks."""
        self._joined.add(token)

    def own(self, starts: Iterable[Start], label: str) -> Start | None:
        """The start of this process, or that of its ranks; else the start that a manifest names by `label`."""
        number, _, token = label.partition(".")
        named = Start(int(number), token) if number else None
        return self.start or max((start for start in starts if start.token in self._joined), default=named)

    def _put(self, storage: Storage, start: Start) -> None:
        with suppress(FileExistsError):  # an earlier put that seemed to fail may have succeeded
            storage.put_new(start.name, seal({**_about_this_process(), **self._facts}))
        if self.about is None:
            unlock = storage.hold(start.name)
            self._file_lock.close()
            self._file_lock.callback(_unlock_in, os.getpid(), unlock)

    def _put_seen(self, root: Root, own: Start, starts: Sequence[Start], commits: Mapping[int, str]) -> None:
        """Put the `.seen` of a start, and before it those that earlier starts lack, which may have been killed."""
        storage = root.storage
        if self.start is not None and later_than(self.start, starts):  # a start that was made since this one was named
            storage.delete(own.name)
        self.refuse_if_later(storage, self.start or own, starts)
        self.seen = Seen.dump(own, commits)
        for start in starts:
            if start < own and not start.has_seen:
                with suppress(FileExistsError):
                    storage.put_new(start.seen_name, self.seen)
        try:
            storage.put_new(own.seen_name, self.seen)
        except FileExistsError:
            if storage.read(own.seen_name)[0] != self.seen:  # if equal, an earlier put that seemed to fail succeeded
                self.refuse_if_later(storage, own, root.relist().starts)
                raise _taken_error(storage.locate(""), own, {}, is_alive=False) from None

    def put_back(self, storage: Storage, start: Start) -> None:
        """Put the files of the start again, after the root was emptied."""
        with self._taking:
            if self.start == start:
                self._put(storage, start)
                with suppress(FileExistsError):
                    storage.put_new(start.seen_name, self.seen)

    def unknown_error(self, storage: Storage, step: int, error: Exception) -> RunTakenError:
        """The error for a rank that finds the manifest of a step, but cannot list the starts."""
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

        `put` is a step whose manifest was already put; the later start may or may not have seen it.
        """
        if later := later_than(own, starts):
            self.note_lost(storage, later)
            assert self._lost is not None
            raise _taken_error(*self._lost, is_alive=False, put=put)

    def note_lost(self, storage: Storage, later: Sequence[Start]) -> None:
        """Note that these starts have the root, so that the next save is refused."""
        self._lost = storage.locate(""), max(later), about_start(storage, max(later))


def _last_of(token: str, step: int, starts: Iterable[Start]) -> Start | None:
    """The last of these starts that has this token, may commit this step, and has a `.seen`."""
    of_token = (start for start in starts if start.token == token and start.first <= step and start.has_seen)
    return max(of_token, default=None)


def _unlock_in(process: int, unlock: Callable[[], None]) -> None:
    """Unlock the file of a start, but not in a forked child."""
    if os.getpid() == process:
        unlock()


_tokens: set[str] = set()  # the tokens of this process's starts that may still commit
_tenures: weakref.WeakValueDictionary[str, Tenure] = weakref.WeakValueDictionary()
_lock = threading.Lock()


def tenure_of(root: str) -> Tenure:
    """The tenure of this process at a root. The registry has only weak references, so the caller must hold it."""
    with _lock:
        tenure = _tenures.get(root)
        if tenure is None:
            tenure = _tenures[root] = Tenure()
        return tenure


@in_forked_child
def _forget_tenures() -> None:
    """In a forked child, drop all tenures: it counts as another start, and the locks belong to the parent."""
    global _tokens, _tenures, _lock
    _tokens, _tenures, _lock = set(), weakref.WeakValueDictionary(), threading.Lock()


def refuse_if_alive(storage: Storage, starts: Iterable[Start]) -> None:
    """Raise RunTakenError if the newest of these starts provably belongs to another living process."""
    newest = max(starts, default=None)
    if newest is not None and newest.token not in _tokens and storage.is_held(newest.name):
        raise _taken_error(storage.locate(""), newest, about_start(storage, newest), is_alive=True)


def _about_this_process() -> dict[str, object]:
    return {"host": socket.gethostname(), "pid": os.getpid(), "since": wall_time()}


def has_ended_here(start: Start, about: dict[str, object]) -> bool:
    """True if the process of a start, whose lock is free, ran on this machine and has ended, or is this process, and
    no save of that start may still commit.

    A free lock alone is no proof: on some file systems, locks are visible only to processes of one machine.
    """
    pid = about.get("pid")
    if about.get("host") != socket.gethostname() or not isinstance(pid, int):
        return False
    return start.token not in _tokens if pid == os.getpid() else not lives(pid)


def lives(pid: int) -> bool:
    """Whether a process with this pid is alive on this machine."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:
        return True  # it belongs to another user
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
            f"{root}: {owner}, is alive and owns the run; stop it, let it close its checkpointer, or save to another "
            "root"
        )
    else:
        text = (
            f"{root}: {owner}, has taken the run over (start {start.number}); this process can commit nothing "
            "there any more. End it, or close its checkpointer and make a new one to take the run back"
        )
    if put is not None:
        text += (
            f". The manifest of step {put} was written before that was known, so the step may be committed: check "
            "which steps are committed"
        )
    return RunTakenError(text, path=root, host=host, pid=pid, since=since, undecided=put is not None)
