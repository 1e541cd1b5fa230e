"""Saves of many ranks in one process: rank 0 and one follower are real, the other ranks are simulated.

In: how tensors are sharded, the number of ranks. Out: the time of a commit, and its requests to the object store, to
the ranks' store and to rank 0. Knows nothing of: archives, which become durable at random moments.

The other ranks are simulated as far as the real ones see them. Captures, shares, words, receipts, the agreement,
manifest, layout, coverage, tracker and journal are real. Digests of large tensors are not, since they would take hours
here. The stores are simulated: `far_store` stores objects, and `far_words` the words between ranks.

A commit is timed from the last durable archive to manifest, tracker and journal, in simulated time: 30 ms per request,
at most 16 at a time, 1,000 names per page of a listing, the time of the ranks' store, and the computing time of rank 0.
Archives become durable within two seconds of each other. Meanwhile all other ranks poll the ranks' store for the next
word of rank 0, and send heartbeats. Each poll, receipt and heartbeat takes time of its server. As in a long training,
there were more words before than the log keeps.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import random
import tracemalloc
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cached_property, partial
from types import SimpleNamespace
from typing import Any, Final, Literal, NamedTuple
from unittest.mock import patch

import torch

from async_ckpt.core.format.layout import TensorPlan, lay_out
from async_ckpt.core.ranks import agreement, calls, divide, heartbeats, rendezvous, word_log
from async_ckpt.core.ranks import start as ranks_start
from async_ckpt.core.ranks import world as ranks_world
from async_ckpt.core.ranks.meeting import Meeting
from async_ckpt.core.ranks.peers import Ranks
from async_ckpt.core.ranks.word_log import Word
from async_ckpt.core.report import SaveReport
from async_ckpt.core.runs.manifest import NAME as MANIFEST
from async_ckpt.core.runs.manifest import Archive, Manifest, SaveTimes, archive_name, parse, seal
from async_ckpt.core.runs.receipts import NO_TABLE, Exchange, Receipt
from async_ckpt.core.runs.roots import Roots
from async_ckpt.core.runs.run import Run
from async_ckpt.core.saving.admission import Admission
from async_ckpt.core.saving.attempt import SaveOutcome
from async_ckpt.core.saving.ledger import Ledger
from async_ckpt.core.saving.lineage import Lineage, StepCall
from async_ckpt.core.saving.targets import begin_step
from async_ckpt.core.slicing.sharded import LocalShards, Slicer
from async_ckpt.core.slicing.shares import MODULUS
from async_ckpt.core.slicing.slices import Cut, Mesh, Slices
from async_ckpt.core.state.capture import capture
from async_ckpt.core.state.captured import Capture
from async_ckpt.core.state.division import StateDivider

from .far_store import Bucket, FarStorage, Traffic, VirtualLoop
from .far_words import CHECK_SECONDS, GET_SECONDS, SET_SECONDS, Client, LoopOfRanks, Server

Kind = Literal["FSDP", "HSDP", "DDP"]
KINDS: Final[tuple[Kind, ...]] = ("FSDP", "HSDP", "DDP")
NUM_TENSORS: Final = 1000
LATENCY_SECONDS: Final = 0.03
# The number of ranks that hold one copy under HSDP.
_SHARDS: Final = 8
# The shapes of Llama-3.1-405B.
_VOCABULARY, _HIDDEN, _INNER, _KEYS = 128_256, 16_384, 53_248, 1_024
_ARCHIVE_BYTES: Final = 1 << 30
_FOLLOWER: Final = 1
# From the call to the first durable archive. By then, all ranks poll at their longest interval.
_WRITE_SECONDS: Final = 30.0
# From the first durable archive to the last.
_SPREAD_SECONDS: Final = 2.0
_TICK_SECONDS: Final = 0.02
_REST_BEATS: Final = 10
# The storage of a task's rank. Its blocking calls take the time of their requests.
_storage: ContextVar[FarStorage] = ContextVar("_storage")


def state(num_tensors: int) -> dict[str, Any]:
    """The parameters of a Llama with AdamW's state. The tensors have shapes, and almost no memory."""
    model: dict[str, Any] = {}
    optimizer: dict[str, Any] = {}
    for name, shape in itertools.islice(_parameters(), num_tensors // 4):
        model[name] = _large(shape)
        moments = {"exp_avg": _large(shape), "exp_avg_sq": _large(shape)}
        optimizer[name] = {"step": torch.zeros(()), **moments}
    return {"model": model, "optimizer": {"state": optimizer, "lr": 1e-4}, "step": 1}


def _parameters() -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "embed_tokens", (_VOCABULARY, _HIDDEN)
    yield "norm", (_HIDDEN,)
    yield "lm_head", (_VOCABULARY, _HIDDEN)
    of_layer = {
        "q_proj": (_HIDDEN, _HIDDEN), "k_proj": (_KEYS, _HIDDEN), "v_proj": (_KEYS, _HIDDEN), "o_proj": (_HIDDEN, _HIDDEN),
        "gate_proj": (_INNER, _HIDDEN), "up_proj": (_INNER, _HIDDEN), "down_proj": (_HIDDEN, _INNER),
        "input_layernorm": (_HIDDEN,), "post_attention_layernorm": (_HIDDEN,),
    }  # fmt: skip
    for layer in itertools.count():
        for name, shape in of_layer.items():
            yield f"layers.{layer}.{name}", shape


def _large(shape: Sequence[int]) -> torch.Tensor:
    return torch.empty(1).expand(*shape)


class Placed(Slicer):
    """The slices of each tensor on one rank of a world, without a process group. Each rank has all scalars."""

    def __init__(self, kind: Kind, rank: int, size: int) -> None:
        super().__init__()
        self._cuts: tuple[Cut, ...] | None = None if kind == "DDP" else (Cut(0, int(kind == "HSDP")),)
        self._mesh = Mesh(0, (size,), (1,))
        self._coordinate: tuple[int, ...] = (rank,)
        self._held: dict[Any, Slices] = {}  # cached as in `Slicer`
        if kind == "HSDP":
            self._mesh = Mesh(0, (size // _SHARDS, _SHARDS), (_SHARDS, 1))
            self._coordinate = divmod(rank, _SHARDS)

    def slice(self, value: Any, *, name: str) -> LocalShards:  # noqa: ARG002
        if self._cuts is None or not value.dim():
            return LocalShards(Slices.plain(value.shape), (value,))
        held = self._held.get(value.shape)
        if held is None:
            held = self._held[value.shape] = Slices.at(
                self._coordinate, global_shape=value.shape, cuts=self._cuts, mesh=self._mesh
            )
        parts = [value[: one.sizes[0]] for one in held.rectangles]
        return LocalShards(held, tuple(parts))


def captured(kind: Kind, rank: int, size: int, num_tensors: int, placed: Placed | None = None) -> Capture:
    """The capture of a rank's state. `placed` is what the rank keeps from save to save."""
    return capture(state(num_tensors), slicer=placed or Placed(kind, rank, size))


@dataclass(frozen=True, slots=True)
class Saved:
    """One save, in simulated seconds from the moment at which the last archive was durable."""

    commit_seconds: float
    """The time until rank 0 has committed the step."""
    said_seconds: float
    """The time until rank 0 announces the commit to the other ranks."""
    known_seconds: float
    """The time until the last rank has read the commit."""
    afterwards_seconds: float
    """The time of the work that rank 0 does after the commit, during the training."""
    rank_0: Traffic
    """Rank 0's traffic with the object store until the commit."""
    afterwards_requests: int
    follower: Traffic
    requests: int
    """The requests of all ranks to the object store until the last rank has read the commit."""
    busiest: int
    """The most requests in one second, of all ranks except rank 0 and the follower."""
    words_of_rank_0: Traffic
    """Rank 0's traffic with the ranks' store, from the call to the end of its work."""
    words_of_follower: Traffic
    """The follower's traffic with the ranks' store, from the first durable archive until it has read the commit."""
    store_share: float
    """The busy share of the ranks' store, from about the first durable archive until the last rank has the commit."""
    manifest_bytes: int
    layout_bytes: int
    archives_bytes: int


class Rest(NamedTuple):
    """The load of all ranks on their store, per second, while nobody saves."""

    requests: float
    bytes: float
    store_share: float


class SimulatedWorld:
    """The ranks of one training. Call `save` repeatedly; only the first call is a first save."""

    def __init__(self, kind: Kind, size: int, num_tensors: int = NUM_TENSORS) -> None:
        self.kind, self.size, self._num_tensors = kind, size, num_tensors
        self._random = random.Random(size)
        self._bucket, self._loop = Bucket(), VirtualLoop()
        self._server, self._loop_of_ranks = Server(self._loop), LoopOfRanks(self._loop)
        self._patches = self._patched()
        here = captured(kind, 0, size, num_tensors)
        self._structure = StateDivider(0, size).structure(here).digest
        self._rank_0 = _Rank(self, 0, here)
        self._follower = _Rank(self, _FOLLOWER, captured(kind, _FOLLOWER, size, num_tensors))
        self._start = self._rank_0.ranks.meeting.start
        self._is_first = True
        self._loop.run_until_complete(self._meet())
        self.met_seconds = self._loop.time()
        """The time until all ranks have received rank 0's answer to their hello."""

    def _patched(self) -> ExitStack:
        """Patch the library's clocks, loop and connections to those of this world."""
        patches = ExitStack()
        for module in (calls, heartbeats, rendezvous):
            patches.enter_context(patch.object(module, "monotonic", self._loop.time))
        for module in (ranks_start, word_log, calls, heartbeats):
            patches.enter_context(patch.object(module, "get_loop", lambda: self._loop_of_ranks))
        for module in (word_log, rendezvous):
            patches.enter_context(patch.object(module, "_RANDOM", self._random))
        patches.enter_context(patch.object(agreement, "off_loop", lambda fn: _storage.get().off_loop(fn)))
        patches.enter_context(patch.object(ranks_start, "Connection", lambda client: client.connection))
        return patches

    def close(self) -> None:
        self._loop_of_ranks.stop()
        self._loop.close()
        self._patches.close()

    def save(self, step: int) -> Saved:
        """Save a step on all ranks."""
        for one in (self._rank_0, self._follower):
            one.storage.traffic, one.client.traffic = Traffic(), Traffic()
        attempt = self._begun(step)
        first = self._loop.time() + _WRITE_SECONDS
        durable = [first + self._random.uniform(0, _SPREAD_SECONDS) for _ in range(self.size)]
        told = self._others_say(attempt, durable)
        others = _Others(self, first)
        busy: list[float] = []
        self._loop.call_at(first - others.longest, lambda: busy.append(self._server.busy_seconds))
        self._loop.call_at(first, lambda: setattr(self._follower.client, "traffic", Traffic()))
        lead = self._rank_0.lead(durable[0], attempt.archive(0))
        follow = self._follower.follow(durable[_FOLLOWER], attempt.archive(_FOLLOWER))
        self._loop.run_until_complete(_all(lead, follow, others.all_heard()))
        made = self._manifest(attempt)
        assert made.ranks is not None
        last = max(durable)
        rank_0, follower = self._rank_0, self._follower
        looks = follower.committed_at - follower.heard_at  # the time to read the commit, which all others need, too
        known_at = max([follower.committed_at, *(at + looks for at in others.heard.values())])
        share = (self._server.busy_seconds - busy[0]) / (known_at - first + others.longest)
        when = self._requests(told, others)
        self._is_first = False
        return Saved(
            rank_0.committed_at - last,
            rank_0.said_at - last,
            known_at - last,
            rank_0.done_at - rank_0.committed_at,
            rank_0.until_committed,
            rank_0.storage.traffic.requests - rank_0.until_committed.requests,
            follower.storage.traffic,
            sum(when.values()) + rank_0.until_committed.requests + follower.storage.traffic.requests,
            max(when.values(), default=0),
            rank_0.client.traffic,
            follower.client.traffic,
            share,
            len(made.dump()),
            made.ranks.layout.num_bytes,
            made.ranks.archives.num_bytes,
        )

    def rank_0_bytes(self, step: int) -> int:
        """The peak of additional memory of rank 0 during a commit."""
        attempt = self._begun(step)
        self._others_say(attempt, [self._loop.time()] * self.size)
        self._loop.run_until_complete(self._follower.say_first(attempt))
        tracemalloc.start()
        try:
            self._loop.run_until_complete(self._rank_0.lead(self._loop.time(), attempt.archive(0)))
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        self._loop.run_until_complete(self._follower.hear())
        self._is_first = False
        return peak

    def rest(self) -> Rest:
        """Measure some time in which nobody saves."""
        seconds = _REST_BEATS * self._start.heartbeats.interval
        for one in (self._rank_0, self._follower):
            one.client.traffic = Traffic()
        busy = self._server.busy_seconds
        self._loop.run_until_complete(asyncio.sleep(seconds))
        lead, follow = self._rank_0.client.traffic, self._follower.client.traffic
        others = self.size - 1
        return Rest(
            (lead.requests + others * follow.requests) / seconds,
            (lead.sent + lead.received + others * (follow.sent + follow.received)) / seconds,
            (self._server.busy_seconds - busy) / seconds,
        )

    # --- what the others do -----------------------------------------------------------------------------------

    async def _meet(self) -> None:
        """Let the ranks find each other, and publish the structures of their states."""
        others = [rank for rank in range(1, self.size) if rank != _FOLLOWER]
        for rank in others:
            self._server.put(f"async_ckpt/hello/{rank}", f"{_nonce(rank)} {self.size} elsewhere {rank} 1")
            self._server.add("async_ckpt/hellos", 1)
        self._server.serve(len(others) * (SET_SECONDS + CHECK_SECONDS))
        prefix = f"async_ckpt/{self._start.token.result()}"
        while len(self._start.nonces) < self.size - 1:
            await asyncio.sleep(_TICK_SECONDS)
        for rank in others:
            self._server.put(f"{prefix}/here/{rank}", _nonce(rank))
        self._server.serve(len(others) * (CHECK_SECONDS + 2 * GET_SECONDS + SET_SECONDS))
        await asyncio.wrap_future(self._follower.ranks.meeting.start.token)
        for rank in range(self.size):
            self._server.put(f"{prefix}/{self._rank_0.ranks.meeting.topic}/structure/{rank}", self._structure)
        self._is_late_in_training()
        self._beat()

    def _is_late_in_training(self) -> None:
        """Pretend that more words were said than the log keeps, and that all ranks have read them."""
        said = self._start.log._num_written = 2 * word_log._KEPT
        self._follower.ranks.meeting.start.log._num_read = said
        prefix = f"{self._start.prefix}/log"
        self._server.put(f"{prefix}/first", str(said - word_log._KEPT))

    def _beat(self) -> None:
        """Charge the server for the others' heartbeats of one tick."""
        number = (self.size - 2) * _TICK_SECONDS / self._start.heartbeats.interval
        self._server.serve(number * (SET_SECONDS + CHECK_SECONDS))
        self._loop.call_later(_TICK_SECONDS, self._beat)

    def _begun(self, step: int) -> _Attempt:
        with patch.object(divide, "_digests", _told):
            self._rank_0.begin(step)
            self._follower.begin(step)
        return _Attempt(self._rank_0.run.folder(step), self._rank_0.joint.attempt)

    def _others_say(self, attempt: _Attempt, durable: Sequence[float]) -> dict[int, float]:
        """Have all other ranks report that their archives are durable. Returns the moment for each of them."""
        part, shares_by = self._rank_0.part, self._rank_0.joint.shares_by
        exchange = Exchange(self._follower.storage, attempt.folder, attempt.name)
        key = self._rank_0.ranks.calls.key_of(attempt.name)
        values = part.shared.digest()
        more = self._copies if self._is_first else [None] * _SHARDS
        says = [(NO_TABLE, b"") if one is None else (agreement._digest(one), seal({"copies": one})) for one in more]
        told: dict[int, float] = {}
        # The first of them carries the balance of all of them.
        balance = -(part.balance + self._follower.part.balance) % MODULUS
        for rank in range(self.size):
            archive = attempt.archive(rank)
            self._bucket.put(f"{attempt.folder}/{archive.name}", b"", durable[rank])
            if rank in (0, _FOLLOWER):
                continue
            copies, details = says[rank % _SHARDS]
            receipt = Receipt(
                rank,
                shares_by,
                part.structure.digest,
                values,
                copies,
                archive.digest,
                archive.num_bytes,
                balance=balance,
                has_details=self._is_first,
            )
            balance = 0
            # At the first save, each rank checks first that it sees rank 0's object in the root.
            told[rank] = durable[rank] + LATENCY_SECONDS * 2 * self._is_first
            if self._is_first:
                self._bucket.put(exchange._details_of(rank), details, told[rank])
            self._say(told[rank], key, rank, json.dumps([_nonce(rank), *receipt]))
        return told

    def _say(self, at: float, key: str, rank: int, text: str) -> None:
        """Send a receipt: set a value, and add to a count."""

        def arrives() -> None:
            self._server.put(f"{key}/{rank}", text)
            self._server.add(f"{key}/count", 1)

        if at <= self._loop.time():
            arrives()
            return
        self._loop.call_at(at, lambda: self._loop.call_at(self._server.serve(SET_SECONDS + CHECK_SECONDS), arrives))

    @cached_property
    def _copies(self) -> list[dict[str, dict[str, str]]]:
        """For each shard, the report of its ranks at the first save on data that other ranks may also have."""
        found = []
        for rank in range(_SHARDS):
            here = captured(self.kind, rank, self.size, self._num_tensors)
            states = StateDivider(rank, self.size)
            states.divided(here, range(self.size))
            found.append(_told(states.copies(here)))
        return found

    def _requests(self, told: dict[int, float], others: _Others) -> Counter[int]:
        """The others' requests to the object store, by second. Each makes as many as the follower."""
        when: Counter[int] = Counter()
        before, after = self._follower.until_said.requests, self._follower.storage.traffic.requests
        for rank, at in told.items():
            when[int(at)] += before
            when[int(others.heard[rank])] += after - before
        return when

    def _manifest(self, attempt: _Attempt) -> Manifest:
        found = self._bucket.folders[attempt.folder][MANIFEST]
        assert isinstance(found.data, bytes)
        return parse(found.data, path=MANIFEST)


class _Others:
    """All other ranks, which poll for the word with the decision, each at its own moments."""

    def __init__(self, world: SimulatedWorld, first: float) -> None:
        """Begin to poll at the first durable archive."""
        self._random, self._loop, self._server = world._random, world._loop, world._server
        self.longest = word_log.longest_pause(world.size)
        start = world._start
        self._client = Client(world._server, world._follower.storage)
        self._log, self._number = f"{start.prefix}/log", start.log._num_written + 1  # the next is the call's word
        self._seconds: dict[bool, float] = {}  # of a poll, by whether the word is there
        self.heard: dict[int, float] = {}
        self._have_all = asyncio.Event()
        others = [rank for rank in range(world.size) if rank not in (0, _FOLLOWER)]
        self._num_others = len(others)
        for rank in others:
            self._loop.call_at(first - self._random.uniform(0, self.longest), self._look, rank)

    async def all_heard(self) -> None:
        await self._have_all.wait()

    def _look(self, rank: int) -> None:
        is_there = self._server.is_there(f"{self._log}/{self._number}", self._loop.time())
        if is_there not in self._seconds:
            self._client.taken, self._client.begun_at = 0.0, self._loop.time()
            here: Any = SimpleNamespace(_num_read=self._number, _num_empty=0)
            word_log.WordLog._next_word(here, self._log, self._client)
            self._seconds[is_there] = self._client.taken
        at = self._server.serve(self._seconds[is_there])
        if is_there:
            self.heard[rank] = at
            if len(self.heard) == self._num_others:
                self._have_all.set()
        else:
            self._loop.call_at(at + self.longest * self._random.uniform(0.75, 1.25), self._look, rank)


class _Attempt(NamedTuple):
    folder: str
    name: str

    def archive(self, rank: int) -> Archive:
        digest = hashlib.blake2b(f"{self.name} {rank}".encode(), digest_size=16).hexdigest()
        return Archive(archive_name(rank, self.name), _ARCHIVE_BYTES + rank, digest)


class _Rank:
    """One of the two real ranks."""

    def __init__(self, world: SimulatedWorld, rank: int, capture: Capture) -> None:
        loop = self._loop = world._loop
        self.storage = FarStorage(world._bucket, LATENCY_SECONDS, loop.time)
        self.client = Client(world._server, self.storage)
        self.run = Run(self.storage, clock=lambda: 1e9 + loop.time())
        self.ranks = Ranks(Meeting(), 1)
        self.ranks.meeting._world = ranks_world.World(rank, world.size, store=self.client, has_group=True)
        self._receive_as_it_is = self.ranks.calls._receive
        self.ranks.calls._receive = self._receive  # type: ignore[method-assign]
        self._announce_as_it_is = self.ranks.calls.announce_decision
        self.ranks.calls.announce_decision = self._announce_decision  # type: ignore[method-assign, assignment]
        self._lineage = Lineage(
            Roots([self.run]),
            Ledger(),
            Admission(),
            retire=False,
            catch_up=lambda *_, **__: [],
            copy_step=lambda *_, **__: [],
            ranks=self.ranks,
        )
        self._capture = capture
        self.committed_at = self.done_at = self.heard_at = self.said_at = 0.0
        self.until_committed = self.until_said = Traffic()
        assert self.ranks.meeting.start

    def _receive(self, word: Word) -> None:
        if "decision" in word:
            self.heard_at = self._loop.time()
        self._receive_as_it_is(word)

    def _announce_decision(self, *arguments: Any) -> Any:
        self.said_at = self.storage.moment
        return self._announce_as_it_is(*arguments)

    def begin(self, step: int) -> None:
        """The call of `save` without the copies."""
        joint = self.ranks.called(step)
        assert joint is not None
        self.joint = joint
        self._target = begin_step(self._lineage, StepCall(step, joint), self.ranks)
        divided, facts, part = self.ranks.divider.divided(self._capture, joint)
        assert part is not None
        self.part = part
        part.shared.lie_in(
            lay_out(
                TensorPlan(divided.specs),
                skeleton=divided.skeleton,
                objects=None,
                step=step,
                mtime=0,
                ranks=facts,
            )
        )

    async def lead(self, durable_at: float, archive: Archive) -> None:
        _storage.set(self.storage)
        await self._target.begin(_goes_on)
        await self.storage.off_loop(self._target.check)
        await asyncio.sleep(durable_at - self._loop.time())
        times = SaveTimes(self._loop.time(), 0.0)
        await self._target.agree(archive, times)
        await self.storage.off_loop(partial(self._target.commit, archive, times))
        self.committed_at = self._loop.time()
        self.until_committed = replace(self.storage.traffic)
        self._target._note_save = lambda *_: None  # type: ignore[method-assign]
        outcome = SaveOutcome(SaveReport("committed", None, ""), 0.0, {})
        await self.storage.off_loop(partial(self._target.afterwards, outcome))
        self.done_at = self._loop.time()

    @property
    def _agreement(self) -> agreement.Agreement:
        agreed = self._target._agreement
        assert isinstance(agreed, agreement.Agreement)
        return agreed

    async def follow(self, durable_at: float, archive: Archive) -> None:
        _storage.set(self.storage)
        await self._target.begin(_goes_on)
        await asyncio.sleep(durable_at - self._loop.time())
        await self._say(archive)
        self.until_said = replace(self.storage.traffic)
        await self.hear()
        self.committed_at = self._loop.time()

    async def say_first(self, attempt: _Attempt) -> None:
        """Send the follower's receipt before rank 0 begins."""
        _storage.set(self.storage)
        await self._target.begin(_goes_on)
        await self._say(attempt.archive(_FOLLOWER))

    async def _say(self, archive: Archive) -> None:
        await self._agreement.agree(archive, SaveTimes(self._loop.time(), 0.0))

    async def hear(self) -> None:
        _storage.set(self.storage)
        self._target._manifest = await self._agreement.receive()


def _goes_on() -> None: ...


async def _all(*parts: Any) -> None:
    await asyncio.gather(*parts)


def _nonce(rank: int) -> str:
    return f"{rank:016x}"


def _told(copies: Sequence[tuple[str, str, list[torch.Tensor]]]) -> dict[str, dict[str, str]]:
    """Replaces the digests of ranks' data: digests of names, equal where the data is equal."""
    found: dict[str, dict[str, str]] = {}
    for what, name, _ in copies:
        digest = hashlib.blake2b(f"{what}{name}".encode(), digest_size=8).hexdigest()
        found.setdefault(what, {})[name.replace("\x1f", ".")] = digest
    return found
