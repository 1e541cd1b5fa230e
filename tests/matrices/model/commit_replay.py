"""A path of the model, taken by the library itself: real runs on one store, each process a thread that waits for its turn.

In: moves. Out: where storage and handles differ from the model, after each of them. Knows nothing of: invariants, what ranks say to each
other (`word_replay`).

A process stops at the gates, which are named as the moves. A move that only reads may have no gate, where the library has nothing to read;
one that changes storage must have it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

from interleaved import Objects, StoreOf
from racing import PATIENCE, Call

from async_ckpt import Keep, RunTakenError, StepBehindError, StepExistsError
from async_ckpt.core.runs import run as runs
from async_ckpt.core.runs.manifest import Archive, parse, parse_intent
from async_ckpt.core.runs.receipts import Exchange
from async_ckpt.core.runs.run import Run
from async_ckpt.core.runs.starts import split_starts
from async_ckpt.core.runs.tenure import Tenure

from .commit_model import Move
from .commit_state import Attempt, Configuration, State


class Stopped(BaseException):
    """The path has ended."""


class _GivenUp(Exception):
    """The receipts of the other ranks have not come."""


@contextmanager
def without_waiting() -> Iterator[None]:
    """No process waits for another one."""
    with mock.patch.object(runs, "_SEEN_TRIES", 1):
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
            if f"{root.folder(step)}/manifest.json" in self.replay.objects.data:  # else another process has renamed it
                self.gate("finish" if self._is_committing else "rename")
            retire(step, retired)

        def gated_look() -> None:
            self.gate("look before deleting" if self._is_committing else "look")
            look()

        see, renew = root.see, root.make_new_version

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
        root.make_new_version, root.see = gated_renew, gated_see  # type: ignore[method-assign]

    # --- the training ---

    def _work(self) -> None:
        try:
            self._train()
        except Stopped:
            pass
        except BaseException as error:
            self.errors.append(error)
        finally:
            with self._changed:
                self.has_ended = True
                self._changed.notify_all()

    def _train(self) -> None:
        self.gate("restore")
        zero = self.replay.players[self.start][0]
        self.base = zero.base if self.number else (self.run.latest() or 0)
        steps: list[int] = []
        for more in self.plan:
            step = max(1, self.base + more)
            attempt = name_of(Attempt(self.start, step, steps.count(step)))
            steps.append(step)
            word = self._hears(step, attempt, zero) if self.number else self._decides(step, attempt)
            if self._is_committing:
                self.said.pop()
            self.said.append((attempt, word))

    def _hears(self, step: int, attempt: str, zero: Player) -> str:
        """What rank 0 has said; or what is at the root, if nothing is heard of it."""
        if self.gate("hear") == "hear":
            return dict(zero.said)[attempt].replace("committing", "committed")
        manifest = Exchange(self.run.storage, self.run.folder(step), attempt).manifest()
        if manifest is None:
            return "undecided"
        self._last_manifest = attempt
        try:
            self.run.look_again(manifest)
        except RunTakenError:
            return "undecided"
        return "committed"

    def _put_archive(self, step: int, attempt: str) -> Archive:
        self.gate("put archive")
        path = self.run.attempt_path(step, attempt, self.number)
        self.run.storage.replace(path, b"x")
        return Archive(path.rpartition("/")[2], 1, "0" * 32)

    def _decides(self, step: int, attempt: str) -> str:
        run, may_be_there = self.run, False
        options = {"overwrite": False, "rolled_back": False, "retire": self.configuration.retire}
        try:
            self.gate("check")
            run.check(step, **options)
            if not (run.root.own is not None and run.root.own.first <= step):
                self.gate("list starts")
                run.take(step, [])
                self.gate("check again")
                run.check(step, **options)
            archive = self._put_archive(step, attempt)
            if self.gate("collect") == "give up":
                raise _GivenUp
            run.check_taken()
            may_be_there = True
            run.commit(
                step, attempt, (archive,), replaces=None, retire=self.configuration.retire,
                world_size=self.configuration.num_ranks,
            )  # fmt: skip
        except (RunTakenError, StepExistsError, StepBehindError, _GivenUp) as error:
            if may_be_there and not isinstance(error, StepExistsError):
                return "taken"
            self._last_manifest = ""  # it was another one's
            self.gate("refuse")
            self._discard(step, attempt)
            return "refused"
        self.said.append((attempt, "committing"))
        run.announce(step)
        try:
            run.retain(step, replaced=None, in_flight=[step])
        except RunTakenError:
            pass
        return "committed"

    def _discard(self, step: int, attempt: str) -> None:
        self.run.storage.delete(self.run.attempt_path(step, attempt, self.number))


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
        return {
            "starts": sorted((one.number, one.token, one.first) for one in starts),
            "seen": sorted(one.label for one in starts if one.has_seen),
            "manifests": sorted(
                (one.step, one.attempt, tuple(two.attempt for two in one.retires)) for one in manifests
            ),
            "intents": sorted(intent[1] for path in data if (intent := parse_intent(path))),
            "tracker": int(data["latest"][0].split(b"_")[-1] or 0) if "latest" in data else 0,
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
    archives = have["archives"]
    return {**have, "archives": [one for one in archives if step_of(one) not in deleted and one[:8] not in replaced]}


# Gates at which moves of other names lead on.
_GATES = {
    "give up": ("collect",),
    "hear nothing": ("hear",),
    "end rollback": ("rename", "finish"),
    "rename out": ("finish",),
    "look for the intent": ("look",),
    "put intent to replace": ("put intent",),
    "look to replace": ("look",),
}


def as_modelled(state: State) -> dict[str, Any]:
    """The same of a state."""
    store = state.store
    archives = []
    for ranks in state.starts:
        for number, rank in enumerate(ranks):
            archives += [f"{name_of(attempt)}{number:05d}" for attempt in rank.archives]
    return {
        "starts": sorted((one.number, token_of(one.token), one.first) for one in store.starts),
        "seen": sorted(f"{one.number:08d}.{token_of(one.token)}" for one, _ in store.seen if one in store.starts),
        "manifests": sorted(
            (one.step, name_of(one.attempt), tuple(map(name_of, one.retires))) for one in store.manifests
        ),
        "intents": sorted(map(name_of, store.intents)),
        "tracker": store.tracker,
        "archives": sorted(archives),
    }


def token_of(start: int) -> str:
    return f"{start:08x}"


def name_of(attempt: Attempt) -> str:
    return f"{attempt.start:02x}{attempt.step:04x}{attempt.number:02x}"


def step_of(name: str) -> int:
    return int(name[2:6], 16)
