"""What is attacked on several ranks: a starting state, the work of each rank, and what has to hold afterwards.

In: a folder, the rank's place in its world. Out: notes of what each rank has begun, been told and been refused; the first
promise that is broken. Knows nothing of: faults, places.

Whatever any rank was told must be there; a rank that was told that a save has failed, which was decided, is right; and a single
process goes on from what is there.
"""

import fcntl
import os
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from rank_worlds import Here
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import async_ckpt
from async_ckpt import AsyncCheckpointer, CheckpointError, PeerFailedError, Place
from async_ckpt.integrations.dcp import TarStorageWriter
from tests.matrices.calls.attack_scenarios import check_steps, closing
from tests.matrices.calls.scenario import FROZEN, Notes, Told, number_of, state_of

_TWO_DAYS: Final = 2 * 86_400
# What a start begins that has overtaken another.
NEXT: Final = "next"


def _of_ranks(number: int, mesh: DeviceMesh) -> dict[str, Any]:
    """`state_of(number)`, with its weights cut into as many parts as there are ranks."""
    state = state_of(number)
    cut = state["model"]["w"].chunk(mesh.size())[mesh.get_rank()]
    state["model"]["w"] = DTensor.from_local(cut, mesh, [Shard(0)], run_check=False)
    return state


@dataclass
class Rank:
    """One rank in the middle of its work. `states` are those that it saves, made while all ranks live."""

    here: Here
    root: Path
    notes: Notes
    states: dict[int, dict[str, Any]]
    armed: Callable[[], None]
    """To be called when all is made: from now on the calls count."""

    def begin(self) -> None:
        self.here.meet("made")
        self.armed()

    def save(self, ckpt: AsyncCheckpointer, what: str, step: int, number: int, **options: Any) -> None:
        with self.notes.of(what, step, number):
            try:
                ckpt.save(self.states[number], step, **options).result()
            except PeerFailedError as error:
                raise Undecided(str(error)) if error.undecided else Decided(str(error)) from error


class Undecided(CheckpointError):
    """A rank was told that nobody knows whether the step is committed."""


class Decided(CheckpointError):
    """A rank was told that another has failed, and that the step is not committed."""


def _open(root: Path, **options: Any) -> AsyncCheckpointer:
    return AsyncCheckpointer(root / "run", on_rollback="retire", **options)


def _three(root: Path, **options: Any) -> AsyncCheckpointer:
    """As memory in front of a disk, with a store behind both."""
    memory = Place(root / "run", volatile=True)
    return AsyncCheckpointer([memory, root / "second", root / "third"], on_rollback="retire", **options)


@dataclass(frozen=True)
class RankScenario:
    """One kind of run of several ranks."""

    size: int
    act: Callable[[Rank], None]
    check: Callable[[Path, Told], None]
    numbers: Sequence[int]
    before: Mapping[int, int] = field(default_factory=dict)
    """What is there at the beginning: numbers by step, saved by `before_size` ranks."""
    before_size: int = 0
    opened: Callable[..., AsyncCheckpointer] | None = _open
    """The run; None if it is none."""


def _saves(rank: Rank, opened: Callable[[Path], AsyncCheckpointer] = _open) -> None:
    with closing(opened(rank.root)) as ckpt:
        rank.begin()
        rank.save(ckpt, "save", 2, 20)
        rank.save(ckpt, "save", 3, 30)


def _rolls_back(rank: Rank) -> None:
    with closing(_open(rank.root)) as ckpt:
        rank.begin()
        rank.save(ckpt, "back", 1, 11, overwrite=True)


def _goes_on(rank: Rank) -> None:
    with closing(_open(rank.root, keep=2)) as ckpt:
        live = rank.states[0]
        rank.begin()
        with suppress(CheckpointError):  # all ranks go on all the same
            assert ckpt.restore(live) == 2
            assert torch.equal(live["model"]["w"].to_local(), torch.full((3000 // rank.here.size,), 20.0))
        rank.save(ckpt, "save", 3, 30)


def _saves_by_dcp(rank: Rank) -> None:
    import torch.distributed.checkpoint as dcp

    rank.begin()
    for step, number in ((2, 20), (3, 30)):
        with rank.notes.of("save", step, number):
            try:
                writer = TarStorageWriter(str(rank.root / f"dcp-{step}"))
                answer = dcp.async_save(rank.states[number], storage_writer=writer)
                getattr(answer, "upload_completion", answer).result()
            except (RuntimeError, dcp.api.CheckpointException) as error:  # of gloo, and of DCP, about any rank
                raise Undecided(str(error)[:200]) from error


def save_before(rank: Rank, steps: Mapping[int, int], opened: Callable[[Path], AsyncCheckpointer]) -> None:
    with opened(rank.root) as ckpt:
        for step, number in steps.items():
            ckpt.save(rank.states[number], step).result()


def _age(root: Path) -> None:
    """As if all of it had been written two days ago: what ranks leave is swept when it is old."""
    then = time.time() - _TWO_DAYS
    for path in root.rglob("*"):
        os.utime(path, (then, then), follow_symlinks=False)


def _check_three(root: Path, told: Told) -> None:
    """Also if the memory is lost, of which no handle has told."""
    with AsyncCheckpointer([root / "second", root / "third"]) as ckpt:
        check_steps(ckpt, told)
    _check_run(root, told, opened=_three)


def _check_run(
    root: Path, told: Told, keep: int | None = None, opened: Callable[[Path], AsyncCheckpointer] = _open
) -> None:
    _age(root)
    with opened(root) as ckpt:
        numbers = check_steps(ckpt, told, keep)
        steps = [*numbers]
        live = {**state_of(0), "frozen": {"base": FROZEN.clone()}}
        if steps:
            assert ckpt.restore(live) == steps[-1]
            assert number_of(live) == numbers[steps[-1]]
        ckpt.save(state_of(990), 99).result()
        ckpt.wait()
        assert number_of(ckpt.load(99)) == 990
    with opened(root) as ckpt:  # what lay above the newest step is decided by now
        ckpt.save(state_of(1000), 100).result()
    for run in root.iterdir():
        named = "".join(path.read_text() for path in run.glob("*/*.json"))
        left = [path.name for path in run.rglob("*") if ".tmp" in path.name or "rollback-" in path.name]
        left += [path.name for path in run.rglob("*.tar") if path.name.split(".")[1] not in named]
        assert not left, f"left in {run.name}: {', '.join(left)}"


def _check_dcp(root: Path, told: Told) -> None:
    import torch.distributed.checkpoint as dcp

    for step in (2, 3):
        folder = root / f"dcp-{step}"
        try:
            number = number_of(async_ckpt.load(folder))
        except (CheckpointError, FileNotFoundError):
            assert step not in told.told, f"step {step} was told of"
        else:
            assert number in told.may[step]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.save(state_of(7), storage_writer=TarStorageWriter(str(folder), overwrite=True), no_dist=True)
        assert number_of(async_ckpt.load(folder)) == 7


RANK_SCENARIOS: Final[Mapping[str, RankScenario]] = {
    "save of 2 ranks": RankScenario(2, _saves, _check_run, (20, 30), {1: 10}, 2),
    "save of 4 ranks": RankScenario(4, _saves, _check_run, (20, 30), {1: 10}, 4),
    "rollback of 2 ranks": RankScenario(2, _rolls_back, _check_run, (11,), {1: 10, 2: 20}, 2),
    "4 ranks, then 2": RankScenario(
        2, _goes_on, lambda root, told: _check_run(root, told, 2), (0, 30), {1: 10, 2: 20}, 4
    ),
    "DCP async_save of 2 ranks": RankScenario(2, _saves_by_dcp, _check_dcp, (20, 30), opened=None),
    "2 ranks, three places": RankScenario(
        2, lambda rank: _saves(rank, _three), _check_three, (20, 30), {1: 10}, 2, opened=_three
    ),
}


def act(here: Here, name: str, root: str, notes: str, armed: Callable[[], None]) -> None:
    """In the process of a rank. Without notes, what is there at the beginning is made."""
    scenario = RANK_SCENARIOS[name]
    numbers = scenario.numbers if notes else [*scenario.before.values()]
    mesh = init_device_mesh("cpu", (here.size,))
    states = {number: _of_ranks(number, mesh) for number in numbers}
    rank = Rank(here, Path(root), Notes(Path(notes or os.devnull)), states, armed)
    torch.manual_seed(0)
    if notes:
        scenario.act(rank)
    else:
        assert scenario.opened is not None
        save_before(rank, scenario.before, scenario.opened)


def overtake(here: Here, name: str, root: str, notes: str) -> None:
    """In the process of a rank: a new start, on another machine, which sees no locks of the one that is stopped."""
    fcntl.lockf = lambda *_: None
    mesh = init_device_mesh("cpu", (here.size,))
    live, state = _of_ranks(0, mesh), _of_ranks(500, mesh)
    told = Notes(Path(notes))
    opened = RANK_SCENARIOS[name].opened
    assert opened is not None
    with opened(Path(root)) as ckpt:
        step = (ckpt.restore(live) or 0) + 1
        with told.of(NEXT, step, 500):
            ckpt.save(state, step).result()
