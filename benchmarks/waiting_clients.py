"""Real clients of a real store, which wait for rank 0's word as ranks do: `python -m benchmarks.waiting_clients`.

In: the number of clients. Out: the time until all have a word, and the processor time of the store's server. Knows
nothing of: saves.

Each client is a `WorldStart` of the library with its own connection. A process has a few hundred of them; rank 0 and
the server have their own processes. All of them share the processors of this machine, so the computing time of the
clients is part of the time of a word.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import queue
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection as Pipe
from statistics import median
from typing import Any, Final, NamedTuple

from .processes import processor_seconds
from .setting import Setting
from .table import Row

NUM_CLIENTS: Final = 200
_PER_PROCESS: Final = 250
# How many clients connect at the same time. Elsewhere, each has its own host; here, all share two processors.
_AT_ONCE: Final = 50
_NUM_WORDS: Final = 5
_TOPIC: Final = "benchmark"
# The time between two words, in which polling intervals grow as in a long save, and the time of measurements without
# words.
_QUIET_SECONDS: Final = 4.0
_PATIENCE_SECONDS: Final = 150.0


class Waited(NamedTuple):
    num_clients: int
    to_all_seconds: list[float]
    """The time from the call that sends a word until the last client has received it, for each word."""
    to_half_seconds: list[float]
    word_cpu_seconds: list[float]
    """The server's processor time from the call until all clients have received the word, for each word."""
    waiting_share: float
    """The share of one processor that the server uses while all clients wait and no word is sent."""
    resting_share: float
    """The same share while no client waits."""
    descriptors: int
    """The number of open descriptors of the server."""


def clients(setting: Setting) -> Mapping[str, Row]:
    """The time of a word to many clients. `CLIENTS=1000` in the environment sets a larger number."""
    from .scale import Growth

    toy = max(setting.world_sizes) < NUM_CLIENTS
    sizes = [8] if toy else sorted({NUM_CLIENTS, int(os.environ.get("CLIENTS", NUM_CLIENTS))})
    found = {size: waited(size) for size in sizes}

    def growth(title: str, unit: str, of: Any) -> Growth:
        return Growth(
            f"real clients of a store: {title}", unit, {"clients": [(size, of(found[size])) for size in sizes]}
        )

    return {
        "clients_word": growth("a word to all", "ms", lambda one: 1e3 * median(one.to_all_seconds)),
        "clients_word_half": growth("a word to half of them", "ms", lambda one: 1e3 * median(one.to_half_seconds)),
        "clients_word_cpu": growth(
            "the server's processor time for a word", "ms", lambda one: 1e3 * median(one.word_cpu_seconds)
        ),
        "clients_waiting": growth("the server while all wait", "% of a core", lambda one: 100 * one.waiting_share),
        "clients_resting": growth("the server while nobody waits", "% of a core", lambda one: 100 * one.resting_share),
        "clients_descriptors": growth("descriptors at the server", "", lambda one: one.descriptors),
    }


def waited(num_clients: int) -> Waited:
    """Measure words to this many clients. Raises RuntimeError if a client does not receive a word in time."""
    # torch looks up the name of each address, which takes long without a name server.
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
    context = multiprocessing.get_context("spawn")
    heard: Any = context.Queue()
    ours, theirs = context.Pipe()
    server = context.Process(target=_serve, args=(theirs,), daemon=True)
    server.start()
    port = ours.recv()
    bounds = [*range(1, num_clients + 1, _PER_PROCESS), num_clients + 1]
    pairs = [context.Pipe() for _ in bounds[1:]]
    crews = [
        context.Process(target=_wait, args=(port, range(first, last), num_clients + 1, heard, pair[1]), daemon=True)
        for first, last, pair in zip(bounds[:-1], bounds[1:], pairs, strict=True)
    ]
    lead, leads = context.Pipe()
    rank_0 = context.Process(target=_lead, args=(port, num_clients + 1, leads), daemon=True)
    processes = [*crews, rank_0, server]
    try:
        for one in (*crews, rank_0):
            one.start()
        return _measured(num_clients, server.pid or 0, heard, lead, [pair[0] for pair in pairs])
    finally:
        for one in processes:
            one.kill()
        for one in processes:
            one.join()


def _measured(num_clients: int, server: int, heard: Any, lead: Pipe, crews: list[Pipe]) -> Waited:
    for crew in (lead, *crews):
        _answer(crew)
    descriptors = len(os.listdir(f"/proc/{server}/fd"))
    resting = _share(server)
    for crew in crews:
        crew.send("wait")
        _answer(crew)
    to_all, to_half, cpu = [], [], []
    waiting = 0.0
    for number in range(_NUM_WORDS):
        waiting = _share(server)
        before = processor_seconds(server)
        lead.send(number)
        said_at = _answer(lead)
        at = sorted(_next_heard(heard, number) - said_at for _ in range(num_clients))
        cpu.append(processor_seconds(server) - before)
        to_all.append(at[-1])
        to_half.append(at[len(at) // 2])
    return Waited(num_clients, to_all, to_half, cpu, waiting, resting, descriptors)


def _answer(pipe: Pipe) -> Any:
    if not pipe.poll(_PATIENCE_SECONDS):
        raise RuntimeError("a process of the clients does not answer")
    return pipe.recv()


def _next_heard(heard: Any, number: int) -> float:
    try:
        word, at = heard.get(timeout=_PATIENCE_SECONDS)
    except queue.Empty:
        raise RuntimeError("a client has not heard a word") from None
    assert word == number
    return float(at)


def _share(pid: int) -> float:
    """The share of one processor that a process uses for some seconds."""
    before, begin = processor_seconds(pid), time.monotonic()
    time.sleep(_QUIET_SECONDS)
    return (processor_seconds(pid) - before) / (time.monotonic() - begin)


# --- the processes ----------------------------------------------------------------------------------------------------


def _store(port: int) -> Any:
    import torch.distributed as dist

    return dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)  # type: ignore[attr-defined]


def _serve(pipe: Pipe) -> None:
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    pipe.send(store.port)
    with suppress(EOFError):
        pipe.recv()


def _lead(port: int, size: int, pipe: Pipe) -> None:
    from async_ckpt.core.ranks.start import WorldStart
    from async_ckpt.core.ranks.world import World

    store = _store(port)
    start = WorldStart(World(0, size, store))
    pipe.send("begun")
    while True:
        number, at = pipe.recv(), time.monotonic()
        start.log.append(_TOPIC, {"number": number}).result()
        pipe.send(at)


def _nothing(store: Any) -> None: ...


def _wait(port: int, ranks: range, size: int, heard: Any, pipe: Pipe) -> None:
    from async_ckpt.core.host.loop import get_loop
    from async_ckpt.core.ranks.calls import JointSave
    from async_ckpt.core.ranks.start import WorldStart
    from async_ckpt.core.ranks.world import World

    store = _store(port)
    starts: list[WorldStart] = []
    for at in range(0, len(ranks), _AT_ONCE):
        few = [WorldStart(World(rank, size, store)) for rank in ranks[at : at + _AT_ONCE]]
        for start in few:
            start.token.result(_PATIENCE_SECONDS)
            start.connection.ask(_nothing).result(_PATIENCE_SECONDS)
        starts += few
    for start in starts:
        start.log.subscribe(_TOPIC, lambda word: heard.put((word["number"], time.monotonic())))
    pipe.send("met")
    pipe.recv()
    for start in starts:
        get_loop().soon(partial(start.log.wait, JointSave(None)))
    pipe.send("waiting")
    pipe.recv()


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.waiting_clients", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--clients", type=int, default=NUM_CLIENTS)
    print(waited(parser.parse_args().clients))


if __name__ == "__main__":
    main()
