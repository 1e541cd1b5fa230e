"""Worlds of real ranks: processes that a test starts as torchrun would, with gloo, and kills where it likes.

Above is what a test has; below is `Here`, by which a rank's script tells the test what has come of it. A world's processes
are forked from the warm one of `children`, and meet by a TCPStore that the test holds, as torchrun's agent does.
"""

import ctypes
import json
import os
import signal
import textwrap
import time
import traceback
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from children import Child, Nursery
from racing import PATIENCE, until

from async_ckpt import AsyncCheckpointer, CheckpointError, PeerFailedError
from async_ckpt.core.ranks import divide, meeting, rendezvous
from async_ckpt.core.ranks.agreement import Agreement
from async_ckpt.core.runs.receipts import Exchange
from async_ckpt.core.runs.sweep import Sweeper
from async_ckpt.core.saving.targets import StepTarget
from async_ckpt.core.storage.local import LocalSink, LocalStorage

_PRELUDE = """
import os, torch
import torch.distributed as dist
from rank_worlds import Here
from rank_states import *
from states import open_run
here = Here()
"""
# In a rank without a process group: what a launcher would give it.
AGENT_STORE = "dist.TCPStore(os.environ['MASTER_ADDR'], int(os.environ['MASTER_PORT']), is_master=False)"

_write = os.write  # as it is before a test watches what a rank writes to the disk
# On a machine with other work, ranks take a minute to import a trainer.
_PATIENCE = 3 * PATIENCE


@dataclass
class Ended:
    """How one rank ended: its exit status, negative for a signal, and what its script has told, in order."""

    status: int
    told: list[Any]
    err: str

    @property
    def saves(self) -> list[dict[str, Any]]:
        return [one for one in self.told if isinstance(one, dict) and "step" in one]


@dataclass
class World:
    """One start of a training: a process for each rank."""

    folder: Path
    children: list[Child]
    store: Any  # has the port, unless rank 0 hosts it
    killed: set[int] = field(default_factory=set)

    def kill(self, rank: int) -> None:
        self.children[rank].send(signal.SIGKILL)
        self.killed.add(rank)
        self.say(f"dead{rank}")

    def say(self, word: str) -> None:
        (self.folder / word).touch()

    def wait_for(self, word: str) -> None:
        until((self.folder / word).exists)

    def ended(
        self, *, killed: Collection[int] = (), failed: Collection[int] = (), patience: float = _PATIENCE
    ) -> list[Ended]:
        """What became of every rank; all but `killed` and `failed` must have ended well. None is left running."""
        killed = {*killed, *self.killed}
        ends, hung = [], None
        for child in self.children:
            try:
                ends.append(child.ended(patience))
            except AssertionError as error:
                hung = hung or error
                for other in self.children:
                    _kill(other)
        if hung is not None:
            raise hung
        for rank, end in enumerate(ends):
            want = -signal.SIGKILL if rank in killed else 0
            assert rank in failed or end.status == want, f"rank {rank} ended with {end.status}\n{end.err}"
        return [Ended(end.status, _told(end.out), end.err) for end in ends]


def _told(out: str) -> list[Any]:
    """What a script has told, without what gloo of torch 2.9 prints when it connects."""
    return [json.loads(line) for line in out.splitlines() if not line.startswith("[Gloo]")]


def _kill(child: Child) -> None:
    try:
        child.send(signal.SIGKILL)
    except ProcessLookupError:
        pass


class Worlds:
    """Starts worlds. `root` is where their scripts save."""

    def __init__(self, nursery: Nursery, folder: Path) -> None:
        self._nursery, self._folder, self.root = nursery, folder, folder / "run"
        self._num_started = 0

    def start(
        self,
        size: int,
        script: str,
        *,
        root: object = None,
        has_group: bool = True,
        store_at_rank_0: bool = False,
        after: World | None = None,
        store: Any = None,
        **env: object,
    ) -> World:
        """`env` is for the script; `store_at_rank_0` has the store of the group die with rank 0, as without an agent.

        `after` another world, the agent starts the ranks again: its store is still there. `store` is one at a `port`.
        """
        self._num_started += 1
        folder = self._folder / f"world-{self._num_started}"
        folder.mkdir()
        store = store if after is None else after.store
        if store is None and not store_at_rank_0:
            store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for rank in range(size if after is not None and store is not None else 0):
            store.delete_key(f"default_pg/0//cpu//0/{rank}")  # gloo would call the dead
        launched = {
            "WORLD_SIZE": size,
            "LOCAL_WORLD_SIZE": size,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": _free_port() if store is None else store.port,
            "TORCHELASTIC_USE_AGENT_STORE": store is not None,
            "GLOO_SOCKET_IFNAME": "lo",
            "WORLD_FOLDER": folder,
            "WORLD_ROOT": self.root if root is None else root,
            "WORLD_HAS_GROUP": has_group,
            **env,
        }
        code = _PRELUDE + textwrap.dedent(script) + "\nhere.leave()\n"
        children = [
            self._nursery.start(
                code,
                env={name: str(value) for name, value in {**launched, "RANK": rank, "LOCAL_RANK": rank}.items()},
            )
            for rank in range(size)
        ]
        return World(folder, children, store)

    def run(
        self,
        size: int,
        script: str,
        *,
        killed: Collection[int] = (),
        patience: float = _PATIENCE,
        **options: Any,
    ) -> list[Ended]:
        return self.start(size, script, **options).ended(killed=killed, patience=patience)

    def told(self, size: int, script: str, **options: Any) -> list[list[Any]]:
        """What each rank tells."""
        return [one.told for one in self.run(size, script, **options)]


def _free_port() -> int:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


# --- in the process of a rank ---------------------------------------------------------------------------------


class Here:
    """This rank. Its process ends with the one that it was forked from."""

    def __init__(self) -> None:
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL, 0, 0, 0)
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.root = os.environ["WORLD_ROOT"]
        self._folder = Path(os.environ["WORLD_FOLDER"])
        if os.environ["WORLD_HAS_GROUP"] == "True":
            dist.init_process_group("gloo")
            self.meet("connected")  # gloo fails on a rank that still connects to one that has left
        torch.manual_seed(0)

    def leave(self) -> None:
        """All ranks that live are done: nobody takes away what another still needs."""
        if dist.is_initialized():
            dist.destroy_process_group()

    # --- what the test is told, and the other ranks

    def tell(self, what: Any) -> None:
        _write(1, (json.dumps(what) + "\n").encode())

    def save(self, ckpt: AsyncCheckpointer, state: Any, step: int, **options: Any) -> dict[str, Any]:
        """Save, wait for the end, and tell of it."""
        told: dict[str, Any] = {"step": step}
        where = "save"
        try:
            handle = ckpt.save(state, step, **options)
            where = "handle"
            told["status"] = handle.result().status
        except Exception as error:
            told |= {"raised_by": where, "error": type(error).__name__, "text": str(error)}
            if isinstance(error, PeerFailedError):
                told |= {"rank": error.rank, "undecided": error.undecided}
            elif not isinstance(error, CheckpointError):
                told["traceback"] = traceback.format_exc()
        self.tell(told)
        return told

    def say(self, word: str) -> None:
        (self._folder / word).touch()

    def is_said(self, word: str) -> bool:
        """Whether a rank has said this. No rank hears of its own death: other threads may run for a moment longer."""
        return word != f"dead{self.rank}" and (self._folder / word).exists()

    def hear(self, *words: str) -> None:
        until(lambda: all(map(self.is_said, words)))

    def fail(self, error: BaseException) -> None:
        """To be called at a point."""
        raise error

    def meet(self, word: str) -> None:
        """All ranks come here; not by the group, whose calls are counted."""
        self.say(f"{word}-{self.rank}")
        self.hear(*(f"{word}-{rank}" for rank in range(self.size)))

    # --- what happens to it

    def die(self) -> None:
        self.say(f"dead{self.rank}")
        os.kill(os.getpid(), signal.SIGKILL)

    def at(self, point: str, do: Callable[[], Any], *, step: int | None = None) -> None:
        """Have `do` called ahead of this, or behind it (`after receipt`), at a step or at each; on the thread that does it."""
        after = point.startswith("after ")
        owner, name, step_of = _POINTS[point.removeprefix("after ")]
        real = getattr(owner, name)

        def call(*arguments: Any, **options: Any) -> Any:
            concerned = step_of(*arguments) and (step is None or f"step_{step:08d}" in step_of(*arguments))
            if concerned and not after:
                do()
            made = real(*arguments, **options)
            if concerned and after:
                do()
            return made

        setattr(owner, name, call)

    def die_last(self) -> None:
        self.wait_for_others()
        self.die()

    def wait_for_others(self) -> None:
        """Until all other ranks have their archives there, of the step that is not committed yet; and soon their
        receipts."""
        until(self._others_are_done)
        time.sleep(0.1)

    def _others_are_done(self) -> bool:
        steps = [step for step in Path(self.root).glob("step_*") if not (step / "manifest.json").exists()]
        ranks = {int(path.name[5:10]) for step in steps for path in step.glob("rank_*.tar")}
        return len(ranks - {self.rank}) == self.size - 1

    def expire(self, is_due: Callable[[], bool]) -> None:
        """From then on no deadline of the ranks lies ahead."""
        real, num_calls = rendezvous.monotonic, 0

        def clock() -> float:
            nonlocal num_calls
            num_calls += is_due()
            return real() + 1e6 * num_calls

        rendezvous.monotonic = meeting.monotonic = clock  # type: ignore[attr-defined]


_POINTS: dict[str, tuple[Any, str, Callable[..., str]]] = {
    "capture": (divide.Divider, "divided", lambda *_: "capture"),
    "write": (LocalSink, "write", lambda sink, *_: str(sink._target)),
    "receipt": (Agreement, "_put", lambda agreed, *_: agreed._exchange.folder),
    "manifest": (
        LocalStorage,
        "put_new",
        lambda _, path, *__: path if path.endswith("manifest.json") else "",
    ),
    "sweep": (Sweeper, "sweep_once", lambda *_: "sweep"),
    "decision": (Exchange, "manifest", lambda exchange, *_: exchange.folder),
    "driver": (StepTarget, "_write_driver", lambda target: target._name),
    "verdict": (Agreement, "_announce", lambda agreed, *_: agreed._exchange.folder),
    "hear": (Agreement, "hear", lambda agreed, *_: "" if agreed.decides else agreed._run.folder(agreed._joint.step)),
}
