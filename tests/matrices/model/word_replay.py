"""A path of the model of words, taken by the library itself: real calls and agreements of all ranks on one loop, whose time stands still.

In: moves. Out: where what a call comes to differs from the model. Knows nothing of: invariants.

Each rank has the library's `Calls` of each channel, and an `Agreement` for each call. In the place of a `Start` and its connection it has
queues: what a rank sets goes into its pipe, and gets to the store when the path says that it arrives; rank 0's words get into the log, and
are heard when the path says that they are read. What takes time in the library is a gate here, and a deadline passes where the path says so.
"""

from __future__ import annotations

import asyncio
import json
import selectors
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any, Final
from unittest import mock

from interleaved import Objects, StoreOf

from async_ckpt import PeerFailedError, StorageUnavailableError
from async_ckpt.core.host.waits import SILENCE_SECONDS
from async_ckpt.core.ranks import agreement, calls, rendezvous
from async_ckpt.core.ranks.agreement import Agreement
from async_ckpt.core.ranks.calls import Calls, JointSave, JointState, OwnPart
from async_ckpt.core.ranks.peers import KnownStates
from async_ckpt.core.ranks.rendezvous import Rendezvous
from async_ckpt.core.ranks.word_log import Word
from async_ckpt.core.runs.manifest import Archive, Manifest, RankFiles
from async_ckpt.core.runs.receipts import EMPTY, Cause, Exchange, Receipt

from .word_model import NO_STEP, Call, Entry, Rank, State, WordConfiguration, WordMove, first_state

_STRUCTURE: Final = "0" * 16
_LATER_SECONDS: Final = 3.0  # enough to look around
_MUCH_LATER_SECONDS: Final = 1e6


class _Still(selectors.DefaultSelector):
    def select(self, timeout: float | None = None) -> list[Any]:
        return super().select(0)


class StillLoop(asyncio.SelectorEventLoop):
    """A loop whose time goes on where it is told to."""

    def __init__(self) -> None:
        super().__init__(_Still())
        self.now = 0.0

    def time(self) -> float:
        return self.now

    def settle(self) -> None:
        """Run all that can run."""
        self.run_until_complete(self._idle())

    async def _idle(self) -> None:
        num_idle = 0
        while num_idle < 3:
            await asyncio.sleep(0)
            num_idle = 0 if self._ready else num_idle + 1  # type: ignore[attr-defined]


class _Comparison:
    """All ranks have equal states."""

    def __init__(self, ranks: Any, joint: JointSave, exchange: Exchange) -> None:
        self._exchange = exchange

    def compare(self, receipts: Sequence[Receipt]) -> tuple[Any, dict[str, str], RankFiles]:
        archives, layout = self._exchange.put_archives(receipts), self._exchange.put_layout(b"layout")
        return EMPTY, {}, RankFiles(archives, layout, EMPTY.digest, len(receipts))


class _Place:
    """The place of one attempt. It may be away."""

    def __init__(self, objects: Objects, joint: JointSave) -> None:
        self.storage, self._joint = StoreOf(objects, self._asked), joint
        self.is_away = False

    def _asked(self, call: str, path: str) -> None:
        if self.is_away:
            raise StorageUnavailableError(f"{path}: away", path=path)

    def folder(self, step: int) -> str:
        return f"step_{step}.{self._joint.attempt}"

    def look_again(self, manifest: Manifest) -> None: ...


class _Store:
    """The store of the ranks."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.is_gone = False

    def set(self, key: str, value: str) -> None:
        self.values[key] = value

    def add(self, key: str, amount: int) -> int:
        self.values[key] = str(int(self.values.get(key, "0")) + amount)
        return int(self.values[key])

    def check(self, keys: Sequence[str]) -> bool:
        return all(key in self.values for key in keys)

    def get(self, key: str) -> bytes:
        return self.values[key].encode()

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def delete_key(self, key: str) -> bool:
        return self.values.pop(key, None) is not None


class _Pipe:
    """What another rank sets, in its order: a receipt or a refusal, or a count."""

    def __init__(self) -> None:
        self.items: deque[tuple[str, Callable[[_Store], Any]]] = deque()

    def set(self, key: str, value: str) -> None:
        if "/why/" not in key:  # for a rank 0 that finds this rank lost, which the model does not have
            self.items.append(("receipt", lambda store: store.set(key, value)))

    def add(self, key: str, amount: int) -> None:
        self.items.append(("count", lambda store: store.add(key, amount)))


class _Start:
    """In the place of a start and its connection."""

    nonce = "nonce"
    has_server = True

    def __init__(self, player: Player) -> None:
        self._player = player
        self.token = _done("token")
        self.nonces = dict.fromkeys(range(player.size), self.nonce)
        self.connection = self.heartbeats = self.log = self
        self.prefix = "async_ckpt/token"
        self.subscribers: dict[str, Callable[[Word], None]] = {}
        self.early: dict[str, list[Word]] = {}

    def append(self, topic: str, word: Word) -> Future[Any]:
        self._player.words.append(json.dumps([topic, word]))
        return _done(None)

    def subscribe(self, topic: str, subscriber: Callable[[Word], None]) -> None:
        self.subscribers[topic] = subscriber
        for word in self.early.pop(topic, []):
            subscriber(word)

    def read(self, topic: str, word: Word) -> None:
        if topic in self.subscribers:
            self.subscribers[topic](word)
        else:
            self.early.setdefault(topic, []).append(word)

    def wait(self, waiting: object) -> None: ...

    def wait_no_more(self, waiting: object) -> None: ...

    def note_all_here(self) -> None: ...

    def silence_since(self, begun: float) -> str:
        is_silent = self._player.replay.store.is_gone and _now() - begun > SILENCE_SECONDS
        return "the store is silent" if is_silent else ""

    def lost_rank_0(self, since: float) -> str:
        return self.lost([0]).get(0) or self.silence_since(since)

    def lost(self, ranks: Sequence[int]) -> dict[int, str]:
        return {rank: "silent" for rank in ranks if rank in self._player.lost}

    def ask(self, call: Callable[[Any], Any], *, given: bool = False) -> Future[Any]:
        store = self._player.replay.store
        if self._player.number:
            return _done(call(self._player.pipe))
        if store.is_gone:
            failed: Future[Any] = Future()
            failed.set_exception(RuntimeError("the store is gone"))
            return failed
        return _done(call(store))


class _Task:
    """One call of one rank, on its way."""

    def __init__(self, player: Player, call: Call) -> None:
        self.player, self.call = player, call
        self.clock, self.pause_seconds = 0.0, 0.0
        self.at, self.gate_ahead = "", None
        self.outcome = ""
        self.run: asyncio.Task[None] | None = None
        is_step = call.step != NO_STEP
        self.joint = JointSave(call.step if is_step else None)
        self.place = _Place(player.replay.objects, self.joint)

    def begin(self) -> None:
        """What `save` does, up to the part that is made on the loop."""
        joint, of_channel = self.joint, self.player.calls[self.call.channel]
        of_channel.enter(joint)
        if self.call.fails or self.call.step == NO_STEP:
            of_channel.fail(joint, Cause(self.player.number, "it fails"))
            self.outcome = "failed"
        elif self.call.skips and not self.player.number:
            of_channel.skip(joint)
            self.outcome = "skipped"
        else:
            structure, shared = SimpleNamespace(digest=_STRUCTURE, text=""), SimpleNamespace(digest=lambda: "0" * 32)
            of_channel.plan(joint)
            joint.part = OwnPart(structure, (), shared, 0, None)  # type: ignore[arg-type]
            self.run = self.player.replay.loop.create_task(self._run())

    async def gate(self, at: str) -> str:
        """Stop here; the name of the move that leads on."""
        self.at, self.gate_ahead = at, asyncio.get_running_loop().create_future()
        return await self.gate_ahead

    def go(self, what: str) -> None:
        assert self.gate_ahead is not None
        assert not self.gate_ahead.done()
        self.at = ""
        self.gate_ahead.set_result(what)

    async def _run(self) -> None:
        _task.set(self)
        of_channel = self.player.ranks[self.call.channel]
        made = Agreement(of_channel, self.joint, [self.place])  # type: ignore[arg-type]
        try:
            await made.named(_nothing)
            if self.joint.life.now is JointState.SKIPPED:
                self.outcome = "skipped"
                return
            if await self.gate("write") == "cannot write":
                raise OSError("it cannot write")
            if self.player.number:
                await made.agree(_ARCHIVE, _TIMES)
                await made.receive()
            else:
                await self._lead(made)
            self.outcome = "committed"
        except Exception as error:
            is_over = made.refuse(error)
            await asyncio.sleep(0)  # a decision is noted on the loop
            is_undecided = getattr(error, "undecided", False) or not (self.player.number or is_over)
            is_committed = self.joint.is_committed
            self.outcome = "committed" if is_committed else "undecided" if is_undecided else "failed"
            if not isinstance(error, PeerFailedError | StorageUnavailableError | OSError):
                raise

    async def _lead(self, made: Agreement) -> None:
        await self.gate("collect")
        of_ranks = await made.agree(_ARCHIVE, _TIMES)
        what = await self.gate("put")
        step, attempt = self.call.step, self.joint.attempt
        manifest = Manifest(step, attempt, self.player.size, 0.0, (), ranks=of_ranks)
        with made.committing():
            if what != "gets no answer to its put":
                self.place.storage.replace(f"{self.place.folder(step)}/manifest.json", manifest.dump())
            if what != "puts the manifest":
                self.place.is_away = what == "gets no answer to a put that arrives"
                raise StorageUnavailableError("no answer", path=self.place.folder(step))
        made.committed(manifest)
        made.afterwards()


class Player:
    """One rank."""

    def __init__(self, replay: WordReplay, number: int) -> None:
        self.replay, self.number = replay, number
        self.size = replay.configuration.num_ranks
        self.plan = replay.configuration.plans[number]
        self.tasks: list[_Task] = []
        self.words: deque[str] = deque()  # said by rank 0, and not there yet
        self.pipe = _Pipe()
        self.num_read = 0
        self.lost: set[int] = set()
        self.is_dead = False
        self.start = _Start(self)
        self.calls: dict[int, Calls] = {}
        self.ranks: dict[int, Any] = {}
        for channel in {call.channel for plan in replay.configuration.plans for call in plan}:
            self._open(channel)

    def _open(self, channel: int) -> None:
        world = SimpleNamespace(rank=self.number, size=self.size, is_one=False)
        advice = "see what they say"
        meeting: Any = SimpleNamespace(
            world=world, topic=str(channel), start=self.start, is_of_paths=False, table=EMPTY, advice=advice, advised=advice
        )  # fmt: skip
        root = SimpleNamespace(
            is_apart=False, is_named=True, is_shared=True, where="", sees=lambda: True, found_apart=lambda: False
        )
        known = KnownStates(committed=_STRUCTURE)
        self.calls[channel] = Calls(meeting, self.replay.configuration.in_flight, known.note_committed)
        self.ranks[channel] = SimpleNamespace(
            world=world, root=lambda *_: root, calls=self.calls[channel], known=known, meeting=meeting
        )


class WordReplay:
    """All ranks of a configuration."""

    def __init__(self, configuration: WordConfiguration) -> None:
        self.configuration = configuration
        self.loop, self.objects, self.store = StillLoop(), Objects(), _Store()
        self.log: list[str] = []
        self.players = [Player(self, number) for number in range(configuration.num_ranks)]

    def follow(self, path: Sequence[WordMove]) -> None:
        """Take these moves, and compare what the calls have come to. AssertionError where that differs."""
        state = first_state(self.configuration)
        try:
            with _without_waiting(self.loop):
                for number, move in enumerate(path, 1):
                    self._take(move, state, f"move {number}, rank {move.rank}, {move.what}")
                    state = move.then
                self._compare(state)
        finally:
            for task in asyncio.all_tasks(self.loop):
                task.cancel()
            self.loop.settle()
            for run in [task.run for player in self.players for task in player.tasks if task.run is not None]:
                if run.done() and not run.cancelled():
                    run.exception()  # or asyncio logs one that nobody has asked for
            self.loop.close()

    def _take(self, move: WordMove, before: State, where: str) -> None:
        if move.rank < 0:
            self.store.is_gone = True
            return
        player, was, now = self.players[move.rank], before.ranks[move.rank], move.then.ranks[move.rank]
        changed = next((entry for entry in was.entries if entry not in now.entries), None)
        task = player.tasks[changed.call] if changed is not None and move.what in _OF_ENTRIES else None
        if move.what == "dies":
            player.is_dead = True
        elif move.what.startswith("calls step"):
            player.tasks.append(_Task(player, player.plan[was.calls]))
            player.tasks[-1].begin()
        elif move.what == "word arrives":
            assert player.words, f"{where}: the library has said nothing"
            self.log.append(player.words.popleft())
        elif move.what in ("receipt arrives", "count arrives"):
            assert player.pipe.items, f"{where}: the library has said nothing"
            kind, arrive = player.pipe.items.popleft()
            assert kind == move.what.split()[0], f"{where}: the library has set a {kind}"
            arrive(self.store)
        elif move.what.startswith("reads"):
            self._read(player, before.store.words[was.read].kind, where)
        elif task is not None:
            assert changed is not None
            self._go_on(task, changed, move, now, where)
        self.loop.settle()

    def _read(self, player: Player, kind: str, where: str) -> None:
        topic, word = json.loads(self.log[player.num_read])
        said = _KINDS[word["decision"]] if "decision" in word else "save"
        assert said == kind, f"{where}: rank 0 of the library has said {said}"
        player.num_read += 1
        player.start.read(topic, word)

    def _go_on(self, task: _Task, entry: Entry, move: WordMove, now: Rank, where: str) -> None:
        what, player = move.what, task.player
        if what in ("hears nothing", "looks at the manifest") or (player.number and entry.at == "told"):
            assert not task.at, f"{where}: the library is at {task.at!r}"
            task.clock += _MUCH_LATER_SECONDS
            self.loop.now += 1.0
            return
        if entry.at == "writing":
            assert task.at == "write", f"{where}: the library is at {task.at!r}"
            fails = what == "cannot write" or (player.number and what == "takes rank 0 for dead")
            task.go("cannot write" if fails else "has written")
            self.loop.settle()
        if player.number or what in ("has written", "cannot write"):
            return
        expected = "put" if entry.at == "putting" else "collect"
        assert task.at == expected, f"{where}: the library is at {task.at!r}"
        if what == "gives up on a rank":
            task.pause_seconds = _MUCH_LATER_SECONDS
        elif what == "takes a rank for dead":
            task.pause_seconds, player.lost = _LATER_SECONDS, {now.taken[-1]}
        task.go(what)
        self.loop.settle()
        task.pause_seconds, player.lost = 0.0, set()

    def _compare(self, state: State) -> None:
        for task in [
            one for player in self.players for one in player.tasks if one.at == "write" and not player.is_dead
        ]:
            task.go("has written")  # a rank that writes hears of a failure once it has written
            self.loop.settle()
        for player, rank in zip(self.players, state.ranks, strict=True):
            modelled = {call: _LIKE.get(word, word) for call, _, word in rank.said}
            for number, task in enumerate(player.tasks):
                run = task.run
                assert run is None or not run.done() or run.exception() is None, repr(run.exception())
                if task.call.step == NO_STEP or task.call.fails:
                    continue  # it has raised
                word = modelled.get(number, "")
                where = f"rank {player.number}, call {number}, of step {task.call.step}"
                assert player.is_dead or task.outcome == word, (
                    f"{where}: the library says {task.outcome!r}, at {task.at!r}, and the model {word!r}"
                )


# Those that change an entry of their rank, and no queue.
_OF_ENTRIES: Final = (
    "has written", "cannot write", "takes rank 0 for dead", "hears nothing", "looks at the manifest", "sees a no",
    "gives up on a rank", "takes a rank for dead", "has all receipts", "puts the manifest", "gets no answer to its put",
    "gets no answer to a put that arrives", "gets no answer, and finds its put",
)  # fmt: skip
_KINDS: Final = {"committed": "committed", "failed": "failed", "unknown": "undecided"}
_LIKE: Final = {"alone": "failed"}
_ARCHIVE: Final = Archive("rank_00000.tar", 1, "0" * 32)
_TIMES: Final[Any] = SimpleNamespace(seconds=0.0, stall_seconds=0.0)

_task: ContextVar[_Task] = ContextVar("_task")


def _now() -> float:
    task = _task.get(None)
    return 0.0 if task is None else task.clock


def _nothing() -> None: ...


async def _at_once(call: Callable[[], Any]) -> Any:
    return call()


async def _pause(_: Rendezvous, seconds: float) -> None:
    task = _task.get()
    assert task.pause_seconds, "rank 0 waits for what the model has"
    task.clock += task.pause_seconds
    await asyncio.sleep(0)


def _done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


@contextmanager
def _without_waiting(loop: StillLoop) -> Iterator[None]:
    """Deadlines pass where a path says so, and at no other moment."""
    with (
        mock.patch.object(agreement, "Comparison", _Comparison),
        mock.patch.object(Agreement, "_pause", _pause),
        mock.patch.object(agreement, "off_loop", _at_once),
        mock.patch.object(Exchange, "missing_archive", return_value=None),
        mock.patch.object(rendezvous, "monotonic", _now),
        mock.patch.object(calls, "monotonic", _now),
        mock.patch.object(calls, "get_loop", return_value=SimpleNamespace(soon=loop.call_soon)),
    ):
        yield
