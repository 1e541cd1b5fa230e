"""Heartbeats: which ranks of one start have ended, or are silent.

In: the store of the ranks, and the prefix of their start. Out: for the ranks in question, why they count as lost. Knows
nothing of: saves.

Every few seconds each process writes a rising number, and its open calls. If a process on the same machine has ended,
its rank is lost at once. Any other rank is lost after two minutes of silence, counted only while the store answers. A
rank that was busy, or stopped, counts as alive again with its next heartbeat. A store without a server has no
heartbeats, since a FileStore grows with each of them. There, and before the first heartbeat, a rank is judged only by
the process that it named when ranks met.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import Any, Final, NamedTuple

from ..host.loop import awaitable, get_loop
from ..host.process import has_ended
from ..host.waits import SILENCE_SECONDS, growing_pauses
from ..timing import monotonic
from .store import Connection

# The seconds between two heartbeats, and how many heartbeats per second all ranks of a start give together.
_INTERVAL_SECONDS: Final = 5.0
_BEATS_PER_SECOND: Final = 2000
# From the end of a process until all its messages must have arrived.
_LAST_WORDS_SECONDS: Final = 1.5
_LOGGED_SECONDS: Final = 30.0  # the log reports silences longer than this

_log = logging.getLogger("async_ckpt")


class Heartbeat(NamedTuple):
    """The last heartbeat of a rank: a number and its open calls, when it was first read, and how often it was read."""

    text: str
    since: float
    reads: int


class Heartbeats:
    """The heartbeats that this process sends and reads. A start of the ranks creates it; any thread may call it."""

    def __init__(self, connection: Connection, rank: int, size: int, open_calls: Callable[[], Iterable[str]]) -> None:
        """`open_calls` returns the open calls of this rank."""
        self.interval = max(_INTERVAL_SECONDS, size / _BEATS_PER_SECOND)
        self._connection, self._rank, self._open_calls = connection, rank, open_calls
        self._processes: dict[int, str] = {}  # as named by the ranks when they met; entries are set once
        self._received: Mapping[int, Heartbeat] = {}  # replaced as a whole, like all fields below
        self._asked_at: Mapping[int, float] = {}  # when each rank was last asked about
        self._reported: frozenset[int] = frozenset()  # ranks whose silence has been logged
        self._ended: Mapping[int, float] = {}  # ranks whose processes have ended, and when that was noticed

    def begin(self, prefix: str) -> None:
        """Send heartbeats below this prefix from now on, if the store has a server."""
        if self._connection.has_server:
            get_loop().begin(self._live(f"{prefix}/heartbeat"))

    def note(self, rank: int, process: str) -> None:
        """Note the process of a rank, as returned by `own_process` there."""
        self._processes[rank] = process

    def lost(self, ranks: Iterable[int]) -> dict[int, str]:
        """The lost ones of these ranks, with the reason. No rank counts as silent while the store does not answer."""
        now, wanted = monotonic(), list(ranks)
        self._asked_at = {**self._asked_at, **dict.fromkeys(wanted, now)}
        ended = {rank: why for rank in wanted if (why := _ended(self._processes.get(rank, "")))}
        self._ended = {**dict.fromkeys(ended, now), **self._ended}
        # A lost rank is reported only after its last messages were read.
        reasons = {rank: why for rank, why in ended.items() if now - self._ended[rank] > _LAST_WORDS_SECONDS}
        answered, received = self._connection.answered_at, self._received
        if now - answered > 3 * self.interval:
            return reasons
        for rank in [rank for rank in wanted if rank in received and rank not in reasons]:
            beat = received[rank]
            silent = answered - beat.since if beat.reads > 1 else 0.0
            if silent > SILENCE_SECONDS:
                reasons[rank] = f"nothing was heard of it for {silent:.0f} s"
            elif silent > _LOGGED_SECONDS and rank not in self._reported:
                self._reported |= {rank}
                _log.warning("rank %s has been silent for %.0f s; still waiting for it", rank, silent)
        return reasons

    def not_called(self, ranks: Iterable[int], call: str) -> list[int]:
        """The given ranks that are alive and have not made `call`, according to their heartbeats."""
        received = self._received
        return [rank for rank in ranks if rank in received and call not in received[rank].text.split()[1:]]

    async def _live(self, prefix: str) -> None:
        pid = os.getpid()
        pauses, was_heard = growing_pauses(self.interval, 12 * self.interval), monotonic()
        for number in itertools.count():
            if self._connection.is_over or pid != os.getpid():
                return
            wanted = [rank for rank, at in self._asked_at.items() if monotonic() - at < 3 * self.interval]
            text = " ".join([str(number), *self._open_calls()])
            exchanged = partial(_exchanged, prefix, self._rank, text, wanted)
            try:
                received = await awaitable(self._connection.ask(exchanged))
            except RuntimeError:  # the store is gone, at least for now
                await asyncio.sleep(next(pauses))
            else:
                was_deaf, was_heard = monotonic() - was_heard > 3 * self.interval, monotonic()
                self._receive(received, was_deaf=was_deaf)
                await asyncio.sleep(self.interval)

    def _receive(self, received: Mapping[int, str], *, was_deaf: bool) -> None:
        now, beats = monotonic(), dict(self._received)
        for rank, text in received.items():
            before = beats.get(rank)
            if before is None or before.text != text or was_deaf:
                beats[rank] = Heartbeat(text, now, 1)
                self._reported -= {rank}
            else:
                beats[rank] = Heartbeat(text, before.since, before.reads + 1)
        self._received = beats


def _exchanged(prefix: str, rank: int, text: str, wanted: Collection[int], store: Any) -> dict[int, str]:
    """Write this rank's heartbeat, and read those of `wanted`. `get` would wait for a missing key, so `check` first."""
    store.set(f"{prefix}/{rank}", text)
    keys = {one: f"{prefix}/{one}" for one in wanted}
    there = keys if store.check([*keys.values()]) else {one: key for one, key in keys.items() if store.check([key])}
    values = store.multi_get([*there.values()]) if there else []
    return {one: value.decode() for one, value in zip(there, values, strict=True)}


def _ended(process: str) -> str:
    """Why a process is lost, if it ran on this machine and has ended; otherwise an empty text."""
    return f"its process, {process.split()[1]} on the same machine, has ended" if has_ended(process) else ""
