"""A path of the model, taken by the library itself: real runs and agreements on one store, each process a thread that waits for its turn.

In: moves. Out: where storage and handles differ from the model, after each of them. Knows nothing of: invariants.

A process stops at the gates, which are named as the moves. A move that only reads may have no gate, where the library has nothing to read;
one that changes storage must have it.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

from interleaved import Objects, StoreOf
from racing import PATIENCE, Call

from async_ckpt import Keep, PeerFailedError, RunTakenError, StepBehindError, StepExistsError
from async_ckpt.core.ranks import agreement
from async_ckpt.core.ranks.agreement import Agreement
from async_ckpt.core.ranks.attempts import JointSave, JointState, OwnPart
from async_ckpt.core.ranks.heartbeats import Heartbeats
from async_ckpt.core.runs import run as runs
from async_ckpt.core.runs.manifest import Archive, Manifest, RankFiles, parse, parse_intent
from async_ckpt.core.runs.receipts import EMPTY, Exchange, Receipt
from async_ckpt.core.runs.run import Run
from async_ckpt.core.runs.starts import Tenure, split_starts

from .commit_model import Move
from .commit_state import Attempt, Configuration, State


class Stopped(BaseException):
    """The path has ended."""


_now = threading.local()


class _Comparison:
    """All ranks have equal states."""

    def __init__(self, ranks: Any, joint: JointSave, run: Run, exchange: Exchange) -> None:
        self._exchange = exchange

    def compare(self, receipts: Sequence[Receipt]) -> tuple[Any, RankFiles]:
        archives, layout = self._exchange.put_archives(receipts), self._exchange.put_layout(b"layout")
        return EMPTY, RankFiles(archives, layout, EMPTY.digest, len(receipts))


def _clock() -> float:
    return 1e9 if getattr(_now, "is_late", False) else 0.0


async def _no_pause(seconds: float, check: Callable[[], None]) -> None:
    check()


@contextmanager
def without_waiting() -> Iterator[None]:
    """Deadlines pass where a path says so, and at no other moment."""
    with (
        mock.patch.object(agreement, "Comparison", _Comparison),
        mock.patch.object(agreement, "_pause", _no_pause),
        mock.patch.object(agreement, "monotonic", _clock),
        mock.patch.object(runs, "_SEEN_TRIES", 1),
    ):
        yield


class Player:
    """One rank of one start."""

    def __init__(self, replay: Replay, start: int, number: int) -> None:
        self.replay, self.start, self.number = replay, start, number
        self.configuration = replay.configuration
        self.plan, self.said, self.base = self.configuration.plans[start], [], 0
        self.errors: list[BaseException] = []
        self.at, self.goes_by, self._is_stopped, self.has_ended = "", "", False, False
        self._last_manifest = self._seen_name = ""
        self._is_deleting = self._is_seeing = False
        self._changed = threading.Condition()
        self.run = Run(
            StoreOf(replay.objects, self._asks),
            clock=lambda: 0.0,  # type: ignore[arg-type]
            keep=Keep(last=self.configuration.keep) if self.configuration.keep else Keep(),
            opening=token_of(start),
        )
        self.run._tenure = Tenure()
        self.run.join(token_of(start))
        self._gate_library()
        self._thread = Call(self._work)

    @property
    def _is_committing(self) -> bool:
        """The manifest is acknowledged, and the save goes on."""
        return bool(self.said) and self.said[-1][1] == "committing"

    # --- gates ---

    def gate(self, at: str) -> str:
        """Stop here; the name of the move that leads on."""
        with self._changed:
            self.at, self.goes_by = at, ""
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: self.goes_by or self._is_stopped, PATIENCE)
            if self._is_stopped:
                raise Stopped
            _now.is_late = self.goes_by in ("give up", "hear nothing")
            self.at = ""
            return self.goes_by

    def go(self, what: str) -> None:
        self.wait()
        with self._changed:
            self.goes_by = what
            self.at = ""
            self._changed.notify_all()
        self.wait()

    def wait(self) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self.at or self.has_ended, PATIENCE)

    def stop(self) -> None:
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()
        self._thread.join(PATIENCE)

    def _asks(self, call: str, path: str) -> None:
        """Ahead of a request."""
        name = path.rpartition("/")[2]
        if call == "put_new" and path.startswith("start-") and path.endswith(".seen"):
            self.gate("put seen" if path == self._seen_name else "help")
        elif call == "put_new" and path.startswith("start-"):
            self.gate("put start")
            self._seen_name = path.replace(".json", ".seen")
        elif call == "put_new" and path.startswith("rollback-"):
            self.gate("put intent")
        elif call == "put_new" and name == "manifest.json" and self._is_committing:
            self._is_deleting = False
            self.gate("put back")
        elif call == "put_new" and name == "manifest.json":
            self.gate("put manifest")
            if path not in self.replay.objects.data:  # it is put now
                self._last_manifest = path
        elif call == "replace" and name == "manifest.json" and not self._is_seeing:
            self.gate("replace manifest")
            self._last_manifest = path
        elif call == "names" and not path and self._is_deleting:
            self._is_deleting = False
            self.gate("look after deleting")
        elif call == "names" and not path and self._last_manifest:
            self._last_manifest = ""
            self.gate("look again")
        elif call == "put_new" and name.startswith("verdict."):
            self._last_manifest = ""  # it was another one's
            self.gate("put verdict")
        elif path == "latest":
            self.gate("read tracker" if call == "read" else "put tracker")
        elif call == "delete" and name == "manifest.json":
            self.gate("delete")
            self._is_deleting = True
        elif call == "delete" and path.startswith("rollback-"):
            self.gate("finish")

    def _gate_library(self) -> None:
        """Where a move is more than one request."""
        root = self.run.root
        retire, look = root._retire, self.run.check_taken

        def gated_retire(step: int, retired: Any) -> None:
            self.gate("finish" if self._is_committing else "rename")
            retire(step, retired)

        def gated_look() -> None:
            self.gate("look before deleting" if self._is_committing else "look")
            look()

        see, renew = self.run._see, root.make_new_version

        def gated_see(*arguments: Any) -> Any:
            self.gate("list commits")
            self._is_seeing = True
            try:
                return see(*arguments)
            finally:
                self._is_seeing = False

        def gated_renew(*arguments: Any) -> None:
            self.gate("new version")
            renew(*arguments)

        root._retire, self.run.check_taken = gated_retire, gated_look  # type: ignore[method-assign]
        root.make_new_version, self.run._see = gated_renew, gated_see  # type: ignore[method-assign]

    # --- the training ---

    def _work(self) -> None:
        try:
            asyncio.run(self._train())
        except Stopped:
            pass
        except BaseException as error:
            self.errors.append(error)
        finally:
            with self._changed:
                self.has_ended = True
                self._changed.notify_all()

    async def _train(self) -> None:
        self.gate("restore")
        zero = self.replay.players[self.start][0]
        self.base = zero.base if self.number else (self.run.latest() or 0)
        joints: dict[int, list[JointSave]] = {}
        for more in self.plan:
            step = max(1, self.base + more)
            before = joints.setdefault(step, [])
            if before and not before[-1].is_decided:
                before[-1].life.go(JointState.BEGUN)
                await self._agreement(before[-1], "listen again").follow(_at_once)
                if not before[-1].is_decided:
                    return
            joint = JointSave(step, attempt=name_of(Attempt(self.start, step, len(before))))
            structure, shared = SimpleNamespace(digest="0" * 16, text=""), SimpleNamespace(digest=lambda: "0" * 32)
            joint.take(OwnPart(structure, (), shared, 0, None), joint.table)  # type: ignore[arg-type]
            joint.life.go(JointState.BEGUN)
            before.append(joint)
            word = await (self._saves_with(joint) if self.number else self._decides(joint))
            if self._is_committing:
                self.said.pop()
            self.said.append((joint.attempt, word))

    def _agreement(self, joint: JointSave, listens: str = "hear") -> Agreement:
        root = SimpleNamespace(
            is_apart=False, is_named=True, is_shared=True, where="", sees=lambda: True, claim=lambda: None,
            verdict=lambda attempt: None, refusal=lambda attempt: None, found_apart=lambda: False,
            say_verdict=lambda verdict: False, say_refusal=lambda attempt, cause: False,
            say_unknown=lambda attempt: False, is_unknown=lambda attempt: False,
        )  # fmt: skip
        attempts = SimpleNamespace(
            decide=lambda one, state, table: None if one.is_decided else one.life.go(state),
            say=lambda one: None,
            said_instead=lambda one: None,
            decided_at=lambda step: [],
        )
        ranks: Any = SimpleNamespace(
            world=SimpleNamespace(rank=self.number, size=self.configuration.num_ranks, store=None),
            root=lambda run, one: root,
            attempts=attempts,
            known=SimpleNamespace(compared=set()),
            meeting=SimpleNamespace(advice="see what they say", heartbeats=Heartbeats()),
        )
        made = Agreement(ranks, joint, self.run)
        exchange = made._exchange

        def gated(at: str, call: Callable[..., Any]) -> Callable[..., Any]:
            def gated_call(*arguments: Any, **more: Any) -> Any:
                self.gate(at)
                return call(*arguments, **more)

            return gated_call

        def gated_decision(**more: Any) -> Any:
            self.gate(listens)
            decision = decide(**more)
            if isinstance(decision, Manifest) and listens == "hear":
                self._last_manifest = decision.attempt
            return decision

        decide = exchange.decision
        exchange.receipts = gated("collect", exchange.receipts)  # type: ignore[method-assign]
        exchange.decision = gated_decision  # type: ignore[method-assign]
        return made

    def _put_archive(self, joint: JointSave) -> Archive:
        self.gate("put archive")
        path = self.run.attempt_path(joint.step, joint.attempt, self.number)
        self.run.storage.replace(path, b"x")
        return Archive(path.rpartition("/")[2], 1, "0" * 32)

    async def _saves_with(self, joint: JointSave) -> str:
        made = self._agreement(joint)
        archive = self._put_archive(joint)
        try:
            what = self.gate("put receipt")
            if what == "not begun":
                made._raise_not_begun()
            if what == "put refusal":
                self._discard(joint)
                made.refuse(OSError("it has failed"), is_followed=True)
                await made.follow(_at_once)
                return "refused" if joint.is_decided else "undecided"
            await made.agree(archive, _times(), _at_once, _nothing)
            await made.hear(_at_once, _nothing)
        except Exception as error:
            if made.refuse(error):
                self._discard(joint)
            return "refused" if joint.is_decided else "undecided"
        return "committed"

    async def _decides(self, joint: JointSave) -> str:
        run, step, made = self.run, joint.step, self._agreement(joint)
        options = {"overwrite": False, "rolled_back": False, "retire": self.configuration.retire}
        try:
            self.gate("check")
            run.check(step, **options)
            if not (run._start is not None and run._start.first <= step):
                self.gate("list starts")
                run.take(step, [])
                self.gate("check again")
                run.check(step, **options)
            archive = self._put_archive(joint)
            self.gate("put receipt")
            of_ranks = await made.agree(archive, _times(), _at_once, _nothing)
            run.check_taken()
            with made.committing():
                run.commit(
                    step, joint.attempt, (archive,), replaces=None, retire=self.configuration.retire, ranks=of_ranks,
                    world_size=self.configuration.num_ranks,
                )  # fmt: skip
            made.committed()
        except (RunTakenError, StepExistsError, StepBehindError, PeerFailedError) as error:
            if not made.refuse(error):
                return "taken"
            self._discard(joint)
            return "refused"
        self.said.append((joint.attempt, "committing"))
        run.announce(step)
        try:
            run.retain(step, replaced=None, in_flight=[step])
        except RunTakenError:
            pass
        return "committed"

    def _discard(self, joint: JointSave) -> None:
        self.run.storage.delete(self.run.attempt_path(joint.step, joint.attempt, self.number))


def _nothing() -> None:
    """Somebody waits for the save still."""


def _times() -> Any:
    return SimpleNamespace(seconds=0.0, stall_seconds=0.0)


async def _at_once(call: Callable[[], Any]) -> Any:
    return call()


class Replay:
    """All processes of a configuration, over one store."""

    def __init__(self, configuration: Configuration) -> None:
        self.configuration, self.objects = configuration, Objects()
        self.players: list[list[Player]] = []
        for start in range(len(configuration.plans)):
            self.players.append([])
            for number in range(configuration.num_ranks):
                self.players[start].append(Player(self, start, number))

    def follow(self, path: Sequence[Move]) -> int:
        """Take these moves, comparing after each; the number of those that the library has taken at a gate."""
        taken = 0
        try:
            for number, move in enumerate(path, 1):
                taken += self._take(move, path[number - 2].then.store if number > 1 else None, number)
        finally:
            for start in self.players:
                for player in start:
                    player.stop()
        return taken

    def _take(self, move: Move, before: Any, number: int) -> bool:
        player = self.players[move.start][move.rank]
        player.wait()
        where = f"move {number}, start {move.start + 1}, rank {move.rank}, {move.what}"
        assert not player.errors, f"{where}: {player.errors[0]!r}"
        fits = player.at in _GATES.get(move.what, (move.what,))
        if fits:
            player.go(move.what)
        else:
            assert move.then.store == before, f"{where}: the library is at {player.at!r}"
        assert not player.errors, f"{where}: {player.errors[0]!r}"
        store = move.then.store
        gone = {one.step for one in store.deleted}, {*map(name_of, store.replaced)}
        there, expected = _without(self.as_it_is(), *gone), _without(as_modelled(move.then), *gone)
        assert there == expected, f"{where}: the library, at {player.at!r}, has {there}, the model {expected}"
        self._compare_words(move.then, where)
        return fits

    def _compare_words(self, state: State, where: str) -> None:
        for start, ranks in enumerate(state.starts):
            for number, rank in enumerate(ranks):
                player = self.players[start][number]
                modelled = [(name_of(attempt), word) for attempt, word in rank.said]
                said = [(name, "committed" if word == "committing" else word) for name, word in player.said]
                assert said == modelled, f"{where}: rank {number} says {said}, in the model {modelled}"

    def as_it_is(self) -> dict[str, Any]:
        """What the store has, in the words of the model."""
        data = self.objects.data
        starts = split_starts(sorted(path for path in data if "/" not in path))[1]
        manifests = [parse(data[path][0], path=path) for path in data if path.endswith("/manifest.json")]
        receipts = [path.rpartition("/") for path in data if "/receipts." in path]
        return {
            "starts": sorted((one.number, one.token, one.first) for one in starts),
            "seen": sorted(one.label for one in starts if one.has_seen),
            "manifests": sorted(
                (one.step, one.attempt, tuple(two.attempt for two in one.retires)) for one in manifests
            ),
            "intents": sorted(intent[1] for path in data if (intent := parse_intent(path))),
            "verdicts": sorted(path.split(".")[1] for path in data if "/verdict." in path),
            "tracker": int(data["latest"][0].split(b"_")[-1] or 0) if "latest" in data else 0,
            "receipts": sorted(
                (folder.split("receipts.")[1], int(name[:5]), name.endswith(".ok")) for folder, _, name in receipts
            ),
            "archives": sorted(
                path.split(".")[1] + path.split("rank_")[1][:5]
                for path in data
                if "/rank_" in path and path.endswith(".tar")
            ),
        }


def _without(have: dict[str, Any], deleted: set[int], replaced: set[str]) -> dict[str, Any]:
    """Leaves out what lies beside a manifest in the folders of deleted steps, or of one that was replaced: the model
    keeps it.
    """
    for kind in ("receipts", "archives"):
        names = [(one if kind == "archives" else one[0], one) for one in have[kind]]
        have[kind] = [one for name, one in names if step_of(name) not in deleted and name[:8] not in replaced]
    return have


# Gates at which moves of other names lead on.
_GATES = {
    "give up": ("collect",),
    "hear nothing": ("hear", "listen again"),
    "put refusal": ("put receipt",),
    "not begun": ("put receipt",),
    "end rollback": ("rename", "finish"),
    "rename out": ("finish",),
    "look for the intent": ("look",),
    "put intent to replace": ("put intent",),
    "look to replace": ("look",),
}


def as_modelled(state: State) -> dict[str, Any]:
    """The same of a state."""
    store = state.store
    receipts, archives = [], []
    for ranks in state.starts:
        for number, rank in enumerate(ranks):
            receipts += [(name_of(attempt), number, is_ok) for attempt, is_ok in rank.receipts]
            archives += [f"{name_of(attempt)}{number:05d}" for attempt in rank.archives]
    return {
        "starts": sorted((one.number, token_of(one.token), one.first) for one in store.starts),
        "seen": sorted(f"{one.number:08d}.{token_of(one.token)}" for one, _ in store.seen if one in store.starts),
        "manifests": sorted(
            (one.step, name_of(one.attempt), tuple(map(name_of, one.retires))) for one in store.manifests
        ),
        "intents": sorted(map(name_of, store.intents)),
        "verdicts": sorted(map(name_of, store.verdicts)),
        "tracker": store.tracker,
        "receipts": sorted(receipts),
        "archives": sorted(archives),
    }


def token_of(start: int) -> str:
    return f"{start:08x}"


def name_of(attempt: Attempt) -> str:
    return f"{attempt.start:02x}{attempt.step:04x}{attempt.number:02x}"


def step_of(name: str) -> int:
    return int(name[2:6], 16)
