"""What is attacked of the plug-ins: a wrapped `torch.save`, Lightning's checkpoint plugin, and accelerate's states.

In: a folder. Out: scenarios, as far as their packages are installed. Knows nothing of: faults, places.
"""

import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import torch
from racing import until

import async_ckpt
from async_ckpt import CheckpointError
from async_ckpt.core.events.log import NAME as HISTORY
from tests.matrices.calls.scenario import Notes, Scenario, Told, number_of, state_of

Save = Callable[[int, Path], None]
"""Saves the state of this number at a path, and returns when it is there."""


@contextmanager
def _by_wrap() -> Iterator[Save]:
    save = async_ckpt.wrap(torch.save)
    yield lambda number, path: save(state_of(number), path).result()


@contextmanager
def _by_lightning() -> Iterator[Save]:
    from async_ckpt.integrations.lightning import AsyncTarCheckpointIO

    checkpoints = AsyncTarCheckpointIO()

    def save(number: int, path: Path) -> None:
        checkpoints.save_checkpoint(state_of(number), path)
        checkpoints.wait()

    yield save
    with suppress(CheckpointError):  # which a save has told of
        checkpoints.teardown()


def _prepared_accelerator() -> tuple[Any, torch.nn.Linear]:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True)
    return accelerator, accelerator.prepare(torch.nn.Linear(300, 10, bias=False))


@contextmanager
def _by_accelerate() -> Iterator[Save]:
    from async_ckpt.integrations.accelerate import AsyncState

    accelerator, model = _prepared_accelerator()
    checkpoints = AsyncState(accelerator)

    def save(number: int, path: Path) -> None:
        with torch.no_grad():
            model.weight.fill_(number)
        checkpoints.save_state(str(path)).result()

    yield save
    with suppress(CheckpointError):
        checkpoints.wait()


def _loaded(path: Path) -> int:
    return number_of(torch.load(path, weights_only=False))


def _loaded_by_accelerate(path: Path) -> int:
    from async_ckpt.integrations.accelerate import AsyncState

    async_ckpt.verify(path / "training.tar")
    accelerator, model = _prepared_accelerator()
    AsyncState(accelerator).load_state(str(path))
    number = int(model.weight[0, 0])
    assert torch.equal(model.weight, torch.full((10, 300), float(number))), "a torn state"
    return number


# Trainers have one state for a whole process, and the attacker prepares and checks on several threads.
_ONE_AT_A_TIME = threading.Lock()


def _saved_in(root: Path) -> set[str]:
    """The names beside the history that the plug-ins keep."""
    return {path.name for path in (root / "saved").iterdir()} - {HISTORY}


def _scenario(by: Callable[[], Any], loaded: Callable[[Path], int], name: str) -> Scenario:
    def path_of(root: Path, step: int) -> Path:
        return root / "saved" / name.format(step)

    def prepare(root: Path) -> None:
        (root / "saved").mkdir()
        with _ONE_AT_A_TIME, by() as save:
            save(10, path_of(root, 1))
        # Scratch folders go behind the handle, and what is prepared here is copied.
        until(lambda: _saved_in(root) == {name.format(1)})

    def act(root: Path, notes: Notes) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with by() as save:
                for step, number in ((1, 11), (2, 20)):
                    with notes.of("save", step, number):
                        save(number, path_of(root, step))

    def check(root: Path, told: Told) -> None:
        for step in (1, 2):
            if step in told.told or path_of(root, step).exists():
                with _ONE_AT_A_TIME:
                    number = loaded(path_of(root, step))
                allowed = told.may[step] if step in told.unsure else {told.told[step]}
                assert number in allowed, f"{path_of(root, step).name} is {number}, and may be {allowed}"
        with _ONE_AT_A_TIME, by() as save:
            for step in (1, 2):
                save(99, path_of(root, step))
                assert loaded(path_of(root, step)) == 99

        def left() -> list[str]:
            names = _saved_in(root) - {name.format(1), name.format(2)}
            # After a failure, a folder that is complete and could not be put in its place.
            return [one for one in names if not (told.refused and one.endswith(".kept"))]

        with suppress(AssertionError):  # scratch folders go behind the handle
            until(lambda: not left())
        assert not left(), f"left: {', '.join(left())}"

    return Scenario(prepare, act, check, {1: 10})


PLUGINS: Final[Mapping[str, Scenario]] = {
    "wrap(torch.save)": _scenario(_by_wrap, _loaded, "{}.pt"),
    **(
        {"Lightning's plugin": _scenario(_by_lightning, _loaded, "{}.ckpt")}
        if find_spec("pytorch_lightning") or find_spec("lightning")
        else {}
    ),
    **({"accelerate": _scenario(_by_accelerate, _loaded_by_accelerate, "step-{}")} if find_spec("accelerate") else {}),
}
