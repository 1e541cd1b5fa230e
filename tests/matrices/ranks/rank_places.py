"""One world for each place: a call of one of its ranks, by its number, and what happens to it.

In: a scenario, a place, a nursery whose children have the shim. Out: what was found wrong, or nothing. Knows nothing of: which
places there are to try.
"""

from __future__ import annotations

import shutil
import signal
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from children import Child, Ended, Nursery
from racing import until
from rank_worlds import World, Worlds

from tests.matrices.attack_driver import NOT_MET, Place
from tests.matrices.calls.attack_places import FAULTS, broken, build_shim, state_of_process, told_by
from tests.matrices.calls.scenario import Told
from tests.matrices.ranks.rank_scenarios import NEXT, RANK_SCENARIOS, Decided

_PATIENCE: Final = 60.0
_STOPPED_SECONDS: Final = 0.1
_STORE_PAUSES_SECONDS: Final = 0.3
_STORE_SILENCE_SECONDS: Final = 2.0

# The rank is stopped ahead of the call, and goes on when this has happened meanwhile.
_MEANWHILE: Final = FAULTS["SIGSTOP"]._replace(
    calls=frozenset({"create", "fsync", "rename", "link", "unlink"}), is_survived=False
)
RANK_FAULTS: Final = {
    **FAULTS,
    "all killed": _MEANWHILE,
    "overtaken": _MEANWHILE,
    "store pauses": _MEANWHILE._replace(is_survived=True),
    "store hangs": _MEANWHILE,
    "store gone": _MEANWHILE,
}
_OF_STORE: Final = frozenset({"store pauses", "store hangs", "store gone"})

_JOB = """
import ctypes, os, warnings
warnings.simplefilter("ignore")
from async_ckpt.core.ranks import rendezvous, store
from tests.matrices.ranks.rank_scenarios import act
who, root, notes, kind = int(os.environ["ARMED"]), here.root, os.environ["NOTES"], os.environ["KIND"]
log = os.environ["CALLS"] and os.open(os.environ["CALLS"] + f".{here.rank}", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
shim = ctypes.CDLL(None)
def armed():
    if log or here.rank == who:
        number, code = int(os.environ["NUMBER"]), int(os.environ["CODE"])
        shim.attack_arm(root.encode(), kind.encode(), ctypes.c_long(number), code, log or -1)
    elif notes:
        here.expire(lambda: here.is_said("dead"))
    if os.environ["SILENCE_SECONDS"]:
        rendezvous.SILENCE_SECONDS = store.SILENCE_SECONDS = float(os.environ["SILENCE_SECONDS"])
act(here, os.environ["SCENARIO"], root, notes and f"{notes}.{here.rank}", armed)
if here.rank == who and not shim.attack_is_met():
    os.write(1, b"not met")
"""

_NEXT_JOB = """
import os, warnings
warnings.simplefilter("ignore")
from tests.matrices.ranks.rank_scenarios import overtake
overtake(here, os.environ["SCENARIO"], here.root, f"{os.environ['NOTES']}.{here.rank}")
"""

_STORE = """
import os, signal, sys
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
with open(sys.argv[1] + ".new", "w") as file:
    file.write(str(store.port))
os.rename(sys.argv[1] + ".new", sys.argv[1])
signal.pause()
"""


class _StoreProcess:
    """A store of the ranks in a process of its own, which can be stopped and killed."""

    def __init__(self, nursery: Nursery, folder: Path) -> None:
        told = folder / "port"
        self._child = nursery.start(_STORE, told)
        until(told.exists)
        self.port = int(told.read_text())

    def send(self, signum: int) -> None:
        self._child.send(signum)

    def end(self) -> None:
        self._child.send(signal.SIGKILL)
        self._child.ended()


@dataclass
class _Prepared:
    root: Path
    calls: Sequence[Sequence[str]] = ()
    """The kinds of the calls of each rank."""


class RankAttacker:
    """Tries places, one after the other. One thread owns it, and its nursery."""

    def __init__(self, folder: Path, shim: Path) -> None:
        self._folder = folder
        (folder / "nursery").mkdir(parents=True)
        modules = ("rank_worlds", "rank_states", "tests.matrices.ranks.rank_scenarios")
        self._nursery = Nursery(folder / "nursery", *modules, env={"LD_PRELOAD": str(shim)})
        (folder / "worlds").mkdir()
        self._worlds = Worlds(self._nursery, folder / "worlds")
        self._prepared: dict[str, _Prepared] = {}
        self._count = 0

    def __enter__(self) -> RankAttacker:
        return self

    def __exit__(self, *_: object) -> None:
        self._nursery.__exit__(*_)

    def places(self, scenario: str) -> Sequence[Place]:
        """Each call of each rank of the unharmed scenario, with each fault that fits it.

        Raises AssertionError if the scenario fails by itself.
        """
        found = []
        for rank, calls in enumerate(self._ready(scenario).calls):
            of_kind: Counter[str] = Counter()
            for kind in calls:
                of_kind[kind] += 1
                fitting = [name for name, fault in RANK_FAULTS.items() if kind in fault.calls]
                fitting = [name for name in fitting if name != "overtaken" or RANK_SCENARIOS[scenario].opened]
                found += [Place(scenario, name, f"{rank}.{kind}", of_kind[kind]) for name in fitting]
        return found

    def wrong(self, place: Place) -> str | None:
        """What does not hold after this. None if all does."""
        root = self._copy(place.scenario)
        try:
            return self._wrong(place, root)
        except AssertionError as hung:
            return f"{hung!s:.600}"
        finally:
            shutil.rmtree(root.parent, ignore_errors=True)

    def _wrong(self, place: Place, root: Path) -> str | None:
        fault, scenario = RANK_FAULTS[place.fault], RANK_SCENARIOS[place.scenario]
        who = int(place.kind.partition(".")[0])
        ends = self._run(place, root)
        told = _told(place.scenario, root)
        attacked = ends[who]
        if attacked.status == 0 and NOT_MET in attacked.out:
            return NOT_MET
        is_killed = place.fault in ("SIGKILL", "all killed") and attacked.status == -signal.SIGKILL
        if failed := _read(root.parent / "next"):
            return f"the start that overtakes has failed: {failed[-600:]}"
        for rank, ended in enumerate(ends):
            if not (ended.status == 0 or is_killed):
                return f"rank {rank} ended with {ended.status}: {ended.err[-600:]}"
            if "Traceback" in ended.err and not is_killed:
                return f"rank {rank} has printed: {ended.err[-600:]}"
        return told.wrong_refusal(is_survived=fault.is_survived) or broken(scenario, root, told)

    def _ready(self, name: str) -> _Prepared:
        if name not in self._prepared:
            scenario, root = RANK_SCENARIOS[name], self._folder / f"prepared-{len(self._prepared)}" / "root"
            root.mkdir(parents=True)
            self._prepared[name] = _Prepared(root)
            if scenario.before:
                for ended in self._start(scenario.before_size, name, root, notes="").ended():
                    assert ended.status == 0, f"{name} cannot be prepared: {ended.err[-2000:]}"
            copy = self._copy(name)
            notes = str(copy.parent / "notes")
            world = self._start(scenario.size, name, copy, notes=notes, log=str(copy.parent / "calls"))
            ends = [child.ended(_PATIENCE) for child in world.children]
            assert all(ended.status == 0 for ended in ends), f"{name} failed by itself: {[e.err[-1000:] for e in ends]}"
            told = _told(name, copy)
            assert not told.refused, f"{name} failed by itself: {told.refused}"
            scenario.check(copy, told)
            calls = [(copy.parent / f"calls.{rank}").read_text().split() for rank in range(scenario.size)]
            self._prepared[name] = _Prepared(root, calls)
            shutil.rmtree(copy.parent)
        return self._prepared[name]

    def _copy(self, name: str) -> Path:
        self._count += 1
        into = self._folder / f"place-{self._count}" / "root"
        shutil.copytree(self._ready(name).root, into)
        return into

    def _start(
        self,
        size: int,
        name: str,
        root: Path,
        *,
        notes: str,
        place: Place | None = None,
        log: str = "",
        store: _StoreProcess | None = None,
    ) -> World:
        who, _, kind = place.kind.partition(".") if place else ("-1", "", "none")
        env: dict[str, Any] = {"SCENARIO": name, "NOTES": notes, "CALLS": log, "ARMED": who, "KIND": kind}
        env |= {"NUMBER": place.number if place else 0, "CODE": RANK_FAULTS[place.fault].code if place else 0}
        loses_store = place is not None and place.fault in ("store hangs", "store gone")
        env["SILENCE_SECONDS"] = _STORE_SILENCE_SECONDS if loses_store else ""
        return self._worlds.start(size, _JOB, root=root, store=store, **env)

    def _run(self, place: Place, root: Path) -> list[Ended]:
        """How each rank has ended. When the attacked one was killed, the deadlines of the others are over."""
        size, who = RANK_SCENARIOS[place.scenario].size, int(place.kind.partition(".")[0])
        store = _StoreProcess(self._nursery, root.parent) if place.fault in _OF_STORE else None
        world = self._start(size, place.scenario, root, notes=str(root.parent / "notes"), place=place, store=store)
        attacked = world.children[who]
        try:
            if RANK_FAULTS[place.fault].code == FAULTS["SIGSTOP"].code and _is_stopped(attacked):
                self._meanwhile(place, root, world, store)
                with suppress(ProcessLookupError):
                    attacked.send(signal.SIGCONT)
            ends = {who: attacked.ended(_PATIENCE)}
            if ends[who].status == -signal.SIGKILL:
                world.say("dead")
            ends |= {rank: child.ended(_PATIENCE) for rank, child in enumerate(world.children) if rank != who}
        finally:
            for child in world.children:
                with suppress(ProcessLookupError):
                    child.send(signal.SIGKILL)
            if store is not None:
                store.end()
        return [ends[rank] for rank in range(size)]

    def _meanwhile(self, place: Place, root: Path, world: World, store: _StoreProcess | None) -> None:
        """What happens while the attacked rank is stopped."""
        match place.fault:
            case "SIGSTOP":
                time.sleep(_STOPPED_SECONDS)
            case "all killed":
                for child in world.children:
                    child.send(signal.SIGKILL)
            case "overtaken" if _num_starts(root) > _num_starts(self._ready(place.scenario).root):
                for child in world.children:
                    child.send(signal.SIGSTOP)
                self._overtake(place, root)
                for child in world.children:
                    child.send(signal.SIGCONT)
            case "store pauses":
                assert store is not None
                store.send(signal.SIGSTOP)
                world.children[int(place.kind.partition(".")[0])].send(signal.SIGCONT)
                time.sleep(_STORE_PAUSES_SECONDS)
                store.send(signal.SIGCONT)
            case "store hangs" | "store gone":
                assert store is not None
                store.send(signal.SIGSTOP if place.fault == "store hangs" else signal.SIGKILL)

    def _overtake(self, place: Place, root: Path) -> None:
        """Another start of the ranks restores what is there, and saves the next step."""
        env = {"NOTES": str(root.parent / "notes.next"), "SCENARIO": place.scenario}
        world = self._worlds.start(RANK_SCENARIOS[place.scenario].size, _NEXT_JOB, root=root, **env)
        ends = [child.ended(_PATIENCE) for child in world.children]
        (root.parent / "next").write_text("\n".join(ended.err for ended in ends if ended.status))


def _is_stopped(child: Child) -> bool:
    """Wait until a process is stopped. False if it has ended before."""
    until(lambda: state_of_process(child.pid) in ("T", "Z", ""))
    return state_of_process(child.pid) == "T"


def _num_starts(root: Path) -> int:
    """The starts of the run that have announced themselves: only of such a one is another the later one."""
    return len([*root.glob("run/start-*.json")])


def _read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def _told(name: str, root: Path) -> Told:
    """What the ranks together were told of. Raises AssertionError if one was told what another knows to be false."""
    lines = [
        tuple(line.split()) for path in sorted(root.parent.glob("notes.*")) for line in path.read_text().splitlines()
    ]
    told_of = {(what, key) for word, what, key, _ in lines if word == "told"}
    failed = {(what, key) for word, what, key, error in lines if word == "refused" and error == Decided.__name__}
    assert told_of.isdisjoint(failed), f"some ranks were told of {told_of & failed}, and others that it has failed"
    first, after = ({int(key) for what, key in told_of if (what == NEXT) is is_next} for is_next in (False, True))
    assert first.isdisjoint(after), f"two starts were told of steps {first & after}"
    together = root.parent / "notes"
    with open(together, "w") as merged:
        for _, what, key, number in dict.fromkeys(line for line in lines if line[0] == "begun"):
            if (what, key) not in failed:
                merged.write(f"begun {what} {key} {number}\n")
            if (what, key) in told_of:
                merged.write(f"told {what} {key} {number}\n")
        merged.writelines(f"{' '.join(line)}\n" for line in lines if line[0] == "refused")
    return told_by(RANK_SCENARIOS[name], together)


@contextmanager
def rank_attackers(folder: Path, num_workers: int) -> Iterator[Sequence[RankAttacker]]:
    """One for each worker."""
    shim = build_shim(folder)
    with ExitStack() as stack:
        yield [stack.enter_context(RankAttacker(folder / f"worker-{n}", shim)) for n in range(num_workers)]
