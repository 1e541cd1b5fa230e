"""Heartbeats: which ranks of one start have ended, or are silent.

In: the store of the ranks, and the name of their start. Out: for a rank that is asked for, why it is taken for lost.
Knows nothing of: saves.

Every few seconds each process says a number that rises and which process it is, by a connection of its own: a call to a
store that does not answer may take as long as it likes, and holds up nobody else. A process on the same machine that is
gone is lost at once. Another is lost when nothing was heard of it for two minutes, by a store that answers. A rank that
was busy, or stopped, is a rank again with its next heartbeat. Only a TCPStore, of a process group or the user's own,
has heartbeats: a FileStore would grow with each of them.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import socket
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any, Final, NamedTuple

from ..host.loop import get_loop
from ..host.waits import SILENCE_SECONDS, growing_pauses
from ..spans import duration, monotonic
from .world import World

# Between two heartbeats, and how many ranks of a start give one in a second.
_INTERVAL_SECONDS: Final = 5.0
_BEATS_PER_SECOND: Final = 2000
_SAID_SECONDS: Final = 30.0  # a silence of which the log tells
_CONNECT_SECONDS: Final = 10.0

_log = logging.getLogger("async_ckpt")


class Heartbeat(NamedTuple):
    """The last heartbeat of a rank: its text, since when that is known, and how often it was read."""

    text: str
    since: float
    reads: int


class Heartbeats:
    """The heartbeats that this process gives and hears. A meeting creates it. The loop's thread changes what was heard,
    and any thread may ask.
    """

    def __init__(self) -> None:
        self._heard: Mapping[int, Heartbeat] = {}  # replaced as a whole, like all below that any thread may ask for
        self._answered = 0.0  # when the store has answered last
        self._asked: Mapping[int, float] = {}  # ranks, and when somebody has asked for them last
        self._interval = _INTERVAL_SECONDS
        self._said: frozenset[int] = frozenset()  # ranks of whose silence the log has told
        self._pid = 0  # of the process that gives them

    def begin(self, world: World, token: str) -> None:
        """Give heartbeats from now on, if the ranks have a store for them, until `end` or the interpreter's exit."""
        address = _address_of(world.store)
        if address is None or world.is_one or self._pid == os.getpid():
            return
        self._pid, self._heard, self._answered = os.getpid(), {}, 0.0
        self._interval = max(_INTERVAL_SECONDS, world.size / _BEATS_PER_SECOND)
        get_loop().begin(self._live(address, f"async_ckpt/heartbeat/{token}", world.rank))

    def end(self) -> None:
        """Give no more heartbeats: this rank has closed. May be called again."""
        self._pid = 0

    def lost(self, ranks: Iterable[int]) -> dict[int, str]:
        """Why some of these ranks are lost, by their numbers. None are while the store does not answer this process."""
        now, wanted = monotonic(), list(ranks)
        self._asked = {**self._asked, **dict.fromkeys(wanted, now)}
        if now - self._answered > 3 * self._interval:
            return {}
        heard, reasons = self._heard, {}
        for rank in [rank for rank in wanted if rank in heard]:  # of others, which may not have begun, deadlines tell
            beat = heard[rank]
            silent = self._answered - beat.since if beat.reads > 1 else 0.0
            if (pid := _gone(beat.text)) is not None:
                reasons[rank] = f"its process, {pid} on the same machine, has ended"
            elif silent > SILENCE_SECONDS:
                reasons[rank] = f"nothing was heard of it for {silent:.0f} s"
            elif silent > _SAID_SECONDS and rank not in self._said:
                self._said |= {rank}
                _log.warning("nothing was heard of rank %s for %.0f s; it is waited for", rank, silent)
        return reasons

    async def _live(self, address: tuple[str, int], prefix: str, rank: int) -> None:
        off_loop, pid = get_loop().off_loop, os.getpid()
        own = f"{_machine()} {pid} {_began(pid) or 0}"
        store: Any = None
        pauses = growing_pauses(self._interval, 12 * self._interval)
        for number in itertools.count():
            if not self._pid:
                return
            wanted = [one for one, at in self._asked.items() if monotonic() - at < 3 * self._interval]
            try:
                store = store or await off_loop(partial(_connected, address))
                heard = await off_loop(partial(_exchanged, store, prefix, rank, f"{number} {own}", wanted))
            except RuntimeError:  # the store is gone, for now at least
                store = None
                await asyncio.sleep(next(pauses))
            else:
                self._hear(heard)
                await asyncio.sleep(self._interval)

    def _hear(self, heard: Mapping[int, str]) -> None:
        now, beats = monotonic(), dict(self._heard)
        was_deaf = now - self._answered > 3 * self._interval
        for rank, text in heard.items():
            before = beats.get(rank)
            if before is None or before.text != text or was_deaf:
                beats[rank] = Heartbeat(text, now, 1)
                self._said -= {rank}
            else:
                beats[rank] = Heartbeat(text, before.since, before.reads + 1)
        self._heard, self._answered = beats, now


def _address_of(store: Any) -> tuple[str, int] | None:
    """Host and port of a TCPStore, also below prefixes; None for any other store, and for none."""
    import torch.distributed as dist

    while isinstance(store, dist.PrefixStore):  # type: ignore[attr-defined]
        store = store.underlying_store
    return (store.host, store.port) if isinstance(store, dist.TCPStore) else None  # type: ignore[attr-defined]


def _connected(address: tuple[str, int]) -> Any:
    import torch.distributed as dist

    try:  # torch prints lines of its own where there is no server
        socket.create_connection(address, _CONNECT_SECONDS).close()
    except OSError as error:
        raise RuntimeError(f"there is no store at {address}") from error
    connect: Any = dist.TCPStore  # type: ignore[attr-defined]
    return connect(*address, is_master=False, timeout=duration(_CONNECT_SECONDS))


def _exchanged(store: Any, prefix: str, rank: int, text: str, wanted: Collection[int]) -> dict[int, str]:
    """Give this rank's heartbeat, and read those of others. No key is got that may be missing: that would wait."""
    store.set(f"{prefix}/{rank}", text)
    keys = {one: f"{prefix}/{one}" for one in wanted}
    there = keys if store.check([*keys.values()]) else {one: key for one, key in keys.items() if store.check([key])}
    values = store.multi_get([*there.values()]) if there else []
    return {one: value.decode() for one, value in zip(there, values, strict=True)}


# --- processes of this machine ------------------------------------------------------------------------------------


@cache
def _machine() -> str:
    """This machine, and its space of process numbers."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"
    return "-"


def _began(pid: int) -> int | None:
    """When a process began, in ticks since the machine's start; None if it has ended, or is not known."""
    with suppress(OSError, ValueError, IndexError):
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if state in "ZX" else int(fields[18])
    return None


def _gone(text: str) -> int | None:
    """The number of the process that gave this heartbeat, if it is of this machine and has ended."""
    with suppress(ValueError):
        _, machine, pid, began = text.split()
        if machine == _machine() != "-" and int(began) and _began(int(pid)) != int(began):
            return int(pid)
    return None
