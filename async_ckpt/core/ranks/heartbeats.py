"""Heartbeats: which ranks of one start have ended, or are silent.

In: the store of the ranks, and the prefix of their start. Out: for a rank that is asked for, why it is taken for lost.
Knows nothing of: saves.

Every few seconds each process says a number that rises, and its open calls. A process on the same machine that is gone
is lost at once. Another is lost when nothing was heard of it for two minutes, by a store that answers. A rank
that was busy, or stopped, is a rank again with its next heartbeat. A store without a server has no heartbeats, since
a FileStore grows with each of them: there, and before the first heartbeat, a rank is known by what it said when ranks
met.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import Any, Final, NamedTuple

from ..host.loop import get_loop
from ..host.process import has_ended
from ..host.waits import SILENCE_SECONDS, growing_pauses
from ..timing import monotonic
from .store import Connection

# Between two heartbeats, and how many ranks of a start give one in a second.
_INTERVAL_SECONDS: Final = 5.0
_BEATS_PER_SECOND: Final = 2000
# From the end of a process until nothing can come any more of what it has said.
_LAST_WORDS_SECONDS: Final = 1.5
_SAID_SECONDS: Final = 30.0  # a silence of which the log tells

_log = logging.getLogger("async_ckpt")


class Heartbeat(NamedTuple):
    """The last heartbeat of a rank: a number and the names of its open calls, since when it is known, and how often it
    was read.
    """

    text: str
    since: float
    reads: int


class Heartbeats:
    """The heartbeats that this process gives and hears. A start of the ranks creates it, and any thread may ask."""

    def __init__(self, connection: Connection, rank: int, size: int, open_calls: Callable[[], Iterable[str]]) -> None:
        """`open_calls` are those of this rank."""
        self.interval = max(_INTERVAL_SECONDS, size / _BEATS_PER_SECOND)
        self._connection, self._rank, self._open_calls = connection, rank, open_calls
        self._processes: dict[int, str] = {}  # as ranks have said when they met; entries are set once
        self._heard: Mapping[int, Heartbeat] = {}  # replaced as a whole, like all below
        self._asked: Mapping[int, float] = {}  # ranks, and when somebody has asked for them last
        self._said: frozenset[int] = frozenset()  # ranks of whose silence the log has told
        self._ended: Mapping[int, float] = {}  # ranks whose processes have ended, and since when that is known

    def begin(self, prefix: str) -> None:
        """Give heartbeats below this prefix from now on, if the store is one for them."""
        if self._connection.has_server:
            get_loop().begin(self._live(f"{prefix}/heartbeat"))

    def note(self, rank: int, process: str) -> None:
        """The process of a rank, as `own_process` of that rank has it."""
        self._processes[rank] = process

    def lost(self, ranks: Iterable[int]) -> dict[int, str]:
        """Why some of these ranks are lost, by their numbers. Nobody is silent while the store does not answer."""
        now, wanted = monotonic(), list(ranks)
        self._asked = {**self._asked, **dict.fromkeys(wanted, now)}
        ended = {rank: why for rank in wanted if (why := _ended(self._processes.get(rank, "")))}
        self._ended = {**dict.fromkeys(ended, now), **self._ended}
        # What it has said last is heard before.
        reasons = {rank: why for rank, why in ended.items() if now - self._ended[rank] > _LAST_WORDS_SECONDS}
        answered, heard = self._connection.answered_at, self._heard
        if now - answered > 3 * self.interval:
            return reasons
        for rank in [rank for rank in wanted if rank in heard and rank not in reasons]:
            beat = heard[rank]
            silent = answered - beat.since if beat.reads > 1 else 0.0
            if silent > SILENCE_SECONDS:
                reasons[rank] = f"nothing was heard of it for {silent:.0f} s"
            elif silent > _SAID_SECONDS and rank not in self._said:
                self._said |= {rank}
                _log.warning("rank %s has been silent for %.0f s; still waiting for it", rank, silent)
        return reasons

    def not_called(self, ranks: Iterable[int], call: str) -> list[int]:
        """The ranks, among these, that live and have not made an open call, as far as they have said."""
        heard = self._heard
        return [rank for rank in ranks if rank in heard and call not in heard[rank].text.split()[1:]]

    async def _live(self, prefix: str) -> None:
        pid = os.getpid()
        pauses, was_heard = growing_pauses(self.interval, 12 * self.interval), monotonic()
        for number in itertools.count():
            if self._connection.is_over or pid != os.getpid():
                return
            wanted = [one for one, at in self._asked.items() if monotonic() - at < 3 * self.interval]
            text = " ".join([str(number), *self._open_calls()])
            exchanged = partial(_exchanged, prefix, self._rank, text, wanted)
            try:
                heard = await asyncio.wrap_future(self._connection.ask(exchanged))
            except RuntimeError:  # the store is gone, for now at least
                await asyncio.sleep(next(pauses))
            else:
                was_deaf, was_heard = monotonic() - was_heard > 3 * self.interval, monotonic()
                self._hear(heard, was_deaf=was_deaf)
                await asyncio.sleep(self.interval)

    def _hear(self, heard: Mapping[int, str], *, was_deaf: bool) -> None:
        now, beats = monotonic(), dict(self._heard)
        for rank, text in heard.items():
            before = beats.get(rank)
            if before is None or before.text != text or was_deaf:
                beats[rank] = Heartbeat(text, now, 1)
                self._said -= {rank}
            else:
                beats[rank] = Heartbeat(text, before.since, before.reads + 1)
        self._heard = beats


def _exchanged(prefix: str, rank: int, text: str, wanted: Collection[int], store: Any) -> dict[int, str]:
    """Give this rank's heartbeat, and read those of others. No key is got that may be missing: that would wait."""
    store.set(f"{prefix}/{rank}", text)
    keys = {one: f"{prefix}/{one}" for one in wanted}
    there = keys if store.check([*keys.values()]) else {one: key for one, key in keys.items() if store.check([key])}
    values = store.multi_get([*there.values()]) if there else []
    return {one: value.decode() for one, value in zip(there, values, strict=True)}


def _ended(process: str) -> str:
    """Why a process is lost, if it was of this machine and has ended; else an empty text."""
    return f"its process, {process.split()[1]} on the same machine, has ended" if has_ended(process) else ""
