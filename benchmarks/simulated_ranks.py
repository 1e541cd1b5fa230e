"""Saves of many ranks in one process: rank 0 and one follower as they are, and what all others do as far as these see it.

In: how tensors are spread, how many ranks there are. Out: how long a commit takes, and what it asks of the store and of
rank 0. Knows nothing of: archives, which are said to be durable at random moments.

What is real: captures, shares, receipts, the agreement, manifest, layout, coverage, tracker and journal. What is not: digests
of large tensors, which would take hours here, and the time that the store of the process group takes.

A commit is timed from the last durable archive to manifest, tracker and journal, in simulated time: 30 ms a request, at most 16 at a
time, 1,000 names a page of a listing, plus what rank 0 computes. Archives become durable within two seconds of each other.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import random
import tracemalloc
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Final, Literal, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist

from async_ckpt.core.format.layout import TensorPlan, lay_out
from async_ckpt.core.ranks import agreement, divide
from async_ckpt.core.ranks import world as ranks_world
from async_ckpt.core.ranks.meeting import Meeting
from async_ckpt.core.ranks.peers import Ranks
from async_ckpt.core.runs.manifest import NAME as MANIFEST
from async_ckpt.core.runs.manifest import Archive, Manifest, SaveTimes, archive_name, parse, seal
from async_ckpt.core.runs.receipts import NO_TABLE, Exchange, Receipt
from async_ckpt.core.runs.roots import Roots
from async_ckpt.core.runs.run import Run
from async_ckpt.core.saving.admission import Admission
from async_ckpt.core.saving.ledger import Ledger
from async_ckpt.core.saving.lineage import Lineage, StepCall, StepContents
from async_ckpt.core.saving.targets import begin_step
from async_ckpt.core.slicing.sharded import LocalShards, Slicer
from async_ckpt.core.slicing.shares import MODULUS
from async_ckpt.core.slicing.slices import Cut, Mesh, Slices
from async_ckpt.core.state.capture import capture
from async_ckpt.core.state.captured import Capture
from async_ckpt.core.state.division import StateDivider

from .far_store import Bucket, FarStorage, Traffic, VirtualLoop

Kind = Literal["FSDP", "HSDP", "DDP"]
KINDS: Final[tuple[Kind, ...]] = ("FSDP", "HSDP", "DDP")
NUM_TENSORS: Final = 1000
LATENCY_SECONDS: Final = 0.03
# Ranks that HSDP has a whole copy on.
_SHARDS: Final = 8
# Of a Llama-3.1-405B.
_VOCABULARY, _HIDDEN, _INNER, _KEYS = 128_256, 16_384, 53_248, 1_024
_ARCHIVE_BYTES: Final = 1 << 30
_FOLLOWER: Final = 1


def state(num_tensors: int) -> dict[str, Any]:
    """Parameters of a Llama, and for each of them what AdamW has. They have shapes and no memory to speak of."""
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
    """Says of every tensor what a rank of a world has of it, without a process group. Scalars are whole on each rank."""

    def __init__(self, kind: Kind, rank: int, size: int) -> None:
        super().__init__()
        self._cuts: tuple[Cut, ...] | None = None if kind == "DDP" else (Cut(0, int(kind == "HSDP")),)
        self._mesh = Mesh(0, (size,), (1,))
        self._coordinate: tuple[int, ...] = (rank,)
        self._held: dict[Any, Slices] = {}  # as a `Slicer` remembers them
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
    """What a rank holds; `placed` is what it keeps from save to save."""
    return capture(state(num_tensors), slicer=placed or Placed(kind, rank, size))


@dataclass(frozen=True, slots=True)
class Saved:
    """One save, in simulated seconds from the moment on at which the last archive was durable."""

    commit_seconds: float
    """Until it is committed, and rank 0 is done with all that comes before its handle is."""
    known_seconds: float
    """Until the last rank knows."""
    afterwards_seconds: float
    """What rank 0 goes on to do then, beside the training."""
    rank_0: Traffic
    """Until then."""
    afterwards_requests: int
    follower: Traffic
    requests: int
    """Of all ranks, until the last knows."""
    busiest: int
    """Most of these in one second."""
    manifest_bytes: int
    layout_bytes: int
    archives_bytes: int


class SimulatedWorld:
    """The ranks of one training. `save` again and again: only the first of them is a first one."""

    def __init__(self, kind: Kind, size: int, num_tensors: int = NUM_TENSORS, *, spread_seconds: float = 2.0) -> None:
        """Archives are durable within `spread_seconds` of each other."""
        self.kind, self.size, self._num_tensors, self._spread = kind, size, num_tensors, spread_seconds
        self._random = random.Random(size)
        self._bucket, self._loop = Bucket(), VirtualLoop()
        here = captured(kind, 0, size, num_tensors)
        self._store = dist.HashStore()  # type: ignore[attr-defined]
        structure = StateDivider(0, size).structure(here).digest
        for rank in range(size):
            self._store.set(f"scale/structure/{rank}", structure)
        self._rank_0 = _Rank(self, 0, here)
        self._follower = _Rank(self, _FOLLOWER, captured(kind, _FOLLOWER, size, num_tensors))
        self._is_first = True

    def close(self) -> None:
        self._loop.close()

    def save(self, step: int) -> Saved:
        """All ranks save a step."""
        attempt = self._begun(step)
        now = self._loop.time()
        durable = [now + self._random.uniform(0, self._spread) for _ in range(self.size)]
        begun = self._others_say(attempt, durable)
        for one in (self._rank_0, self._follower):
            one.storage.traffic = Traffic()
        lead = self._rank_0.lead(durable[0], attempt.archive(0))
        follow = self._follower.follow(durable[_FOLLOWER], attempt.archive(_FOLLOWER))
        self._loop.run_until_complete(_both(lead, follow))
        made = self._manifest(attempt)
        assert made.ranks is not None
        put_at, last = self._bucket.folders[attempt.folder][MANIFEST].since, max(durable)
        known, when = self._others_hear(begun, put_at)
        self._is_first = False
        rank_0, follower = self._rank_0, self._follower
        return Saved(
            rank_0.committed_at - last,
            max(known, follower.committed_at) - last,
            rank_0.done_at - rank_0.committed_at,
            rank_0.until_committed,
            rank_0.storage.traffic.requests - rank_0.until_committed.requests,
            follower.storage.traffic,
            sum(when.values()) + rank_0.until_committed.requests + follower.storage.traffic.requests,
            max(when.values(), default=0),
            len(made.dump()),
            made.ranks.layout.num_bytes,
            made.ranks.archives.num_bytes,
        )

    def rank_0_bytes(self, step: int) -> int:
        """The most memory that rank 0 has taken at one time to commit a step, besides what it had."""
        attempt = self._begun(step)
        self._rank_0.claim()
        self._others_say(attempt, [self._loop.time()] * self.size)
        self._loop.run_until_complete(self._follower.say(attempt.archive(_FOLLOWER)))
        tracemalloc.start()
        try:
            self._loop.run_until_complete(self._rank_0.lead(self._loop.time(), attempt.archive(0)))
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        self._loop.run_until_complete(self._follower.hear())
        self._is_first = False
        return peak

    # --- what the others do -----------------------------------------------------------------------------------

    def _begun(self, step: int) -> _Attempt:
        with patch.object(divide, "_digests", _told):
            self._rank_0.begin(step)
            self._follower.begin(step)
        joint = self._rank_0.joint
        return _Attempt(self._rank_0.run.folder(step), joint.attempt)

    def _others_say(self, attempt: _Attempt, durable: Sequence[float]) -> dict[int, float]:
        """Have all other ranks put their receipts; when each of them has."""
        part, shares_by = self._rank_0.part, self._rank_0.joint.shares_by
        exchange = Exchange(self._follower.storage, attempt.folder, attempt.name)
        values = part.shared.digest()
        more = self._copies if self._is_first else [None] * _SHARDS
        says = [
            (NO_TABLE, seal({})) if one is None else (agreement._digest(one), seal({"copies": one})) for one in more
        ]
        told: dict[int, float] = {}
        # One of them has the balance of all these.
        balance = -(part.balance + self._follower.part.balance) % MODULUS
        for rank in range(self.size):
            archive = attempt.archive(rank)
            self._bucket.put(f"{attempt.folder}/{archive.name}", b"", durable[rank])
            if rank in (0, _FOLLOWER):
                continue
            copies, body = says[rank % _SHARDS]
            receipt = Receipt(
                rank,
                shares_by,
                part.structure.digest,
                values,
                copies,
                archive.digest,
                archive.num_bytes,
                balance=balance,
            )
            balance = 0
            # At the first save, each looks first whether it sees what rank 0 has put into the root.
            told[rank] = durable[rank] + LATENCY_SECONDS * (1 + self._is_first)
            path = f"{exchange._receipts}/{receipt.name}"
            self._bucket.put(path, body, told[rank])
        return told

    @cached_property
    def _copies(self) -> list[dict[str, dict[str, str]]]:
        """What ranks say at the first save of what others may have, too: the same by the shard that they hold."""
        found = []
        for rank in range(_SHARDS):
            here = captured(self.kind, rank, self.size, self._num_tensors)
            states = StateDivider(rank, self.size)
            states.divided(here, range(self.size))
            found.append(_told(states.copies(here)))
        return found

    def _others_hear(self, told: Mapping[int, float], put_at: float) -> tuple[float, Counter[int]]:
        """When the last of them has read the manifest; and how many requests they make in each second."""
        when: Counter[int] = Counter()
        last = 0.0
        for at in told.values():
            when[int(at - LATENCY_SECONDS)] += 1 + self._is_first
            moment = at
            for number, pause in enumerate(agreement._looks(True, self.size)):
                moment += pause if number else pause * self._random.random()
                when[int(moment)] += 1
                if moment >= put_at:
                    break
                asks_for_verdict = number % agreement._LOOKS_PER_VERDICT == agreement._LOOKS_PER_VERDICT - 1
                when[int(moment)] += asks_for_verdict
                moment += (1 + asks_for_verdict) * LATENCY_SECONDS
            last = max(last, moment + LATENCY_SECONDS)
        return last, when

    def _manifest(self, attempt: _Attempt) -> Manifest:
        found = self._bucket.folders[attempt.folder][MANIFEST]
        assert isinstance(found.data, bytes)
        return parse(found.data, path=MANIFEST)


class _Attempt(NamedTuple):
    folder: str
    name: str

    def archive(self, rank: int) -> Archive:
        digest = hashlib.blake2b(f"{self.name} {rank}".encode(), digest_size=16).hexdigest()
        return Archive(archive_name(rank, self.name), _ARCHIVE_BYTES + rank, digest)


class _Rank:
    """One of the two that are as they are."""

    def __init__(self, world: SimulatedWorld, rank: int, capture: Capture) -> None:
        loop = self._loop = world._loop
        self.storage = FarStorage(world._bucket, LATENCY_SECONDS, loop.time)
        self.run = Run(self.storage, clock=lambda: 1e9 + loop.time())
        self.ranks = Ranks(Meeting(), 1)
        self.ranks.meeting._world = ranks_world.World(rank, world.size, store=world._store, has_group=True)
        self.ranks.meeting._words = ranks_world.Words(world._store, "scale")
        self._lineage = Lineage(
            Roots([self.run]),
            Ledger(),
            Admission(),
            rule="all",
            retire=False,
            catch_up=lambda *_, **__: [],
            ranks=self.ranks,
        )
        self._capture = capture
        self._claimed: object = None
        self.committed_at = self.done_at = 0.0
        self.until_committed = Traffic()

    def begin(self, step: int) -> None:
        """What the call of `save` does, but for copying."""
        joint = self.ranks.called(step)
        assert joint is not None
        self.joint = joint
        call = StepCall(step, joint)
        (self._target,) = begin_step(self._lineage, call, self.ranks)(StepContents(call))
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
        await self.storage.off_loop(self.claim)
        await self.storage.off_loop(self._target.check)
        await asyncio.sleep(durable_at - self._loop.time())
        await self.say(archive)
        await self.storage.off_loop(partial(self._target.commit, (archive,)))
        self.committed_at = self._loop.time()
        self.until_committed = replace(self.storage.traffic)
        await self.storage.off_loop(self._target.afterwards)
        self.done_at = self._loop.time()

    def claim(self) -> None:
        """As it is done before anything is written, once for each save."""
        assert self._target._agreement is not None
        if self._claimed is not self.joint:
            self._target._agreement.claim()
            self._claimed = self.joint

    async def follow(self, durable_at: float, archive: Archive) -> None:
        await self.storage.off_loop(self.claim)
        await asyncio.sleep(durable_at - self._loop.time())
        await self.say(archive)
        await self.hear()
        self.committed_at = self._loop.time()

    async def say(self, archive: Archive) -> None:
        self._target.times = SaveTimes(self._loop.time(), 0.0)
        await self._target.agree(archive, self.storage.off_loop, _goes_on)

    async def hear(self) -> None:
        await self._target.hear(self.storage.off_loop, _goes_on)


def _goes_on() -> None: ...


async def _both(one: Any, other: Any) -> None:
    await asyncio.gather(one, other)


def _told(copies: Sequence[tuple[str, str, list[torch.Tensor]]]) -> dict[str, dict[str, str]]:
    """In the place of digests of what ranks hold: alike where that is."""
    found: dict[str, dict[str, str]] = {}
    for what, name, _ in copies:
        digest = hashlib.blake2b(f"{what}{name}".encode(), digest_size=8).hexdigest()
        found.setdefault(what, {})[name.replace("\x1f", ".")] = digest
    return found
