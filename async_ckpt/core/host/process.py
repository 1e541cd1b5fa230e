"""This process: state that a forked child must not inherit, and names by which others see that a process has ended.

In: functions that reset a module's globals. Out: calls of them in each forked child; whether the child has lost the
threads of a tokio runtime; names of processes. Knows nothing of: the globals.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import weakref
from collections.abc import Callable, Hashable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Generic, TypeVar

Forget = TypeVar("Forget", bound=Callable[[], None])
K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

_forgetting: list[Callable[[], None]] = []


def in_forked_child(forget: Forget) -> Forget:
    """Call `forget` in every child that is forked from now on.

    It must not acquire a lock: the thread that holds it may not exist in the child.
    """
    _forgetting.append(forget)
    return forget


class OnceInProcess(Generic[K, V]):
    """Objects that a process creates once per key. A forked child starts without, and never finalizes its parent's."""

    def __init__(self, make: Callable[[K], V]) -> None:
        self._make = make
        self._made: dict[K, V] = {}
        self._making = threading.Lock()
        in_forked_child(self._forget)

    def __call__(self, key: K) -> V:
        with self._making:
            if key not in self._made:
                self._made[key] = self._make(key)
            return self._made[key]

    def _forget(self) -> None:
        for made in self._made.values():
            never_end(made)
        self._made, self._making = {}, threading.Lock()


def never_end(inherited: object) -> None:
    """In a forked child: keep an object of the parent alive for good, so that its finalizers never run.

    They might use connections of the parent, unregister these from the parent's event loops, which share their epoll
    instances with the child, or wait for threads that only the parent has.
    """
    for finalizer in list(getattr(weakref.finalize, "_registry", ())):
        alive = finalizer.peek()
        if alive is not None and alive[0] is inherited:
            finalizer.detach()
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(inherited))


def _forget_all() -> None:
    for forget in _forgetting:
        forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)


_has_lost_tokio = False


def has_lost_tokio() -> bool:
    """True if this process was forked from one that had imported obstore and had threads named like those of tokio.

    Threads of other libraries that use tokio have the same names; then obstore is refused needlessly.
    """
    return _has_lost_tokio


@in_forked_child
def _look_at_parent() -> None:
    global _has_lost_tokio
    _has_lost_tokio = _has_lost_tokio or ("obstore" in sys.modules and _has_tokio(os.getppid()))


def _has_tokio(process: int) -> bool:
    """Whether a process has threads of a tokio runtime (on Linux)."""
    with suppress(OSError):
        tasks = f"/proc/{process}/task"
        for task in os.listdir(tasks):
            with suppress(OSError), open(f"{tasks}/{task}/comm", "rb") as file:
                if file.read().startswith(b"tokio-"):
                    return True
    return False


# --- processes of this machine ------------------------------------------------------------------------------------


def own_process() -> str:
    """The name of this process for `has_ended`: its machine, pid and start time."""
    pid = os.getpid()
    return f"{machine()} {pid} {began(pid) or 0}"


def has_ended(process: str) -> bool:
    """True if the process with this name, from `own_process`, ran on this machine and has ended, by proc(5)."""
    try:
        where, pid, since = process.split()
        return where == machine() != "-" and int(since) != 0 and began(int(pid)) != int(since)
    except ValueError:
        return False


@cache
def machine() -> str:
    """The name of this boot of this machine, and of the process's pid namespace; "-" if the system does not have it."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"
    return "-"


def began(pid: int) -> int | None:
    """The start time of a process, in clock ticks since boot; None if it has ended, or the time is unknown."""
    with suppress(OSError, ValueError, IndexError):
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if state in "ZX" else int(fields[18])
    return None
