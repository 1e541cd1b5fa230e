"""Faults that last for one turn: of the disk, of the store, and of the readers beside.

In: a proxy, processes, a source of chance. Out: context managers. Knows nothing of: turns.
"""

import os
import resource
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from random import Random
from typing import Any, Final

from async_ckpt.testing import FaultyProxy

_FILE_BYTES: Final = 1 << 20


@contextmanager
def no_large_files() -> Iterator[None]:
    """The disk takes files of a MiB at most: Python leaves the signal for that ignored, so that a write fails by EFBIG."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (_FILE_BYTES, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


STORE_FAULTS: Final[Mapping[str, Callable[[FaultyProxy], Any]]] = {
    "SlowDown, twice": lambda proxy: proxy.answer("SlowDown", times=2),
    "InternalError, once": lambda proxy: proxy.answer("InternalError", times=1),
    "InternalError, for ever": lambda proxy: proxy.answer("InternalError"),
    "a request that is cut": lambda proxy: proxy.cut_request(0, times=1),
    "an answer that is lost": lambda proxy: proxy.lose_response(times=1),
    "an answer that is cut": lambda proxy: proxy.cut_response(10, times=1),
    "answers that come late": lambda proxy: proxy.delay(0.2, times=5),
}


@contextmanager
def store_fault(proxy: FaultyProxy, name: str) -> Iterator[None]:
    STORE_FAULTS[name](proxy)
    try:
        yield
    finally:
        proxy.clear()


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """A process that stands still in the midst of whatever it does."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def any_store_fault(rng: Random) -> str:
    """The one for ever takes as long as the client waits, so it is rare."""
    names = list(STORE_FAULTS)
    return rng.choices(names, [1 if "ever" in name else 6 for name in names])[0]
