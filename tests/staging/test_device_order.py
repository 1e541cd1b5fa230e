"""Who waits for whom on a device: each wait that is left out is noticed, under both extreme schedules.

A scenario is right as it is; with one wait left out, by a mutant, it loads wrong bytes, fails, or races.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerators import Simulated
from racing import Call
from scripted_disk import scripted
from states import MIB, open_run

from async_ckpt.staging.device import Alias, Device
from async_ckpt.staging.snapshot import Snapshot
from async_ckpt.staging.tensors import SourceTensors

ITEMS = MIB // 4
Scenario = Callable[[Path, Simulated], str | None]


def wrong(loaded: dict[str, torch.Tensor], value: float) -> str | None:
    return next((f"{name} differs" for name, t in loaded.items() if not bool((t == value).all())), None)


def write_before_and_after(root: Path, device: Simulated) -> str | None:
    """Training writes to a tensor just before `save`, and just after it."""
    state = {f"w{n}": torch.zeros(ITEMS, device="sim") for n in range(3)}
    with open_run(root) as ckpt:
        with device.ahead():
            for tensor in state.values():
                tensor.fill_(3)
            handle = ckpt.save(state, step=1)
            for tensor in state.values():
                tensor.fill_(-1)
            device.let_it_come_to_a_stop(handle)
        handle.result()
        return wrong(ckpt.load(1), 3.0)


def step_while_it_is_copied(root: Path, device: Simulated) -> str | None:
    """A guarded optimizer steps while the copies of its parameters are still to be made."""
    p = torch.nn.Parameter(torch.full((4 * ITEMS,), 3.0, device="sim"))
    p.grad = torch.ones_like(p)
    optimizer = torch.optim.SGD([p], lr=1.0)
    with open_run(root, guard=optimizer) as ckpt:
        ckpt.prewarm({"p": p})
        with device.ahead():
            handle = ckpt.save({"p": p}, step=1)
            optimizer.step()
        handle.result()
        return wrong(ckpt.load(1), 3.0)


def step_before_it_is_enqueued(root: Path, device: Simulated) -> str | None:
    """The optimizer steps while the enqueueing of copies waits for memory."""
    p = torch.nn.Parameter(torch.full((8 * MIB,), 3.0, device="sim"))
    p.grad = torch.ones_like(p)
    optimizer = torch.optim.SGD([p], lr=1.0)
    with open_run(root, host_bytes=16 * MIB) as ckpt, scripted(ckpt) as disk:
        disk.stop("write")
        handle = ckpt.save({"p": p}, step=1, guard=optimizer)
        step = Call(optimizer.step)
        step.wait_until_inside("hold")
        disk.release_all()
        step.outcome()
        handle.result()
        return wrong(ckpt.load(1), 3.0)


def data_replaced_before_it_is_enqueued(root: Path, device: Simulated) -> str | None:
    """A parameter gets other memory while the copy of the old one is still to be enqueued, and others want that."""
    p = torch.nn.Parameter(torch.full((8 * MIB,), 3.0, device="sim"))
    optimizer = torch.optim.SGD([p], lr=1.0)
    with open_run(root, host_bytes=16 * MIB) as ckpt, scripted(ckpt) as disk:
        disk.stop("write")
        handle = ckpt.save({"p": p}, step=1, guard=optimizer)
        p.data = torch.full((8 * MIB,), -1.0, device="sim")
        others = [torch.full((8 * MIB,), -1.0, device="sim") for _ in range(2)]
        disk.release_all()
        handle.result()
        del others
        return wrong(ckpt.load(1), 3.0)


def memory_of_another_stream_freed(root: Path, device: Simulated) -> str | None:
    """What was allocated on another stream is freed right after `save`, as FSDP frees its full parameters."""
    other = device.stream()
    with device.module.stream(other):
        state = {"w": torch.full((4 * ITEMS,), 3.0, device="sim")}
    device.module.current_stream().wait_stream(other)
    with open_run(root) as ckpt:
        with device.ahead():
            handle = ckpt.save(state, step=1)
            device.sim.resize(state["w"], 0)
            with device.module.stream(other):
                for _ in range(2):
                    torch.full((4 * ITEMS,), -1.0, device="sim")
        handle.result()
        return wrong(ckpt.load(1), 3.0)


def caught(scenario: Scenario, root: Path, device: Simulated) -> str | None:
    """What is wrong with what a scenario saves; None if nothing is."""
    try:
        found = scenario(root, device)
    except Exception as error:
        found = repr(error)
    device.may_race = bool(device.sim.races)  # is told here
    return found or next(iter(device.sim.races), None)


# --- the mutants ------------------------------------------------------------------------------------------------


def no_following(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Device, "follow_training", lambda self: None)


def no_holding(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Device, "hold_training", lambda self: None)


def no_waiting_for_the_event(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Device, "wait", lambda self, event: None)


def no_wait_of_the_stream_in_the_guard(patch: pytest.MonkeyPatch) -> None:
    hold, hold_training = Snapshot.hold, Device.hold_training
    holding: list[bool] = []  # `begin` holds on other threads, or before

    def marked(self: Snapshot) -> None:
        holding.append(True)
        hold(self)

    patch.setattr(Snapshot, "hold", marked)
    patch.setattr(Device, "hold_training", lambda self: None if holding else hold_training(self))


def no_waiting_until_all_is_enqueued(patch: pytest.MonkeyPatch) -> None:
    def hold(self: Snapshot) -> None:
        for device in self._source.devices.values():
            device.hold_training()

    patch.setattr(Snapshot, "hold", hold)


class Told:
    """What a storage has told of itself; it is not kept alive."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._told = storage.data_ptr(), storage.nbytes()

    def data_ptr(self) -> int:
        return self._told[0]

    def nbytes(self) -> int:
        return self._told[1]


def no_keeping_alive(patch: pytest.MonkeyPatch) -> None:
    init, look = Alias.__init__, SourceTensors.locate

    def weak(self: Alias, tensor: torch.Tensor) -> None:
        init(self, tensor)
        told: Any = Told(self._storage)
        self._storage = told

    def forgetful(self: SourceTensors) -> None:
        look(self)
        self._storages = []

    patch.setattr(Alias, "__init__", weak)
    patch.setattr(SourceTensors, "locate", forgetful)


def no_telling_the_allocator(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Device, "keep", lambda self, tensor: None)


MUTANTS: list[tuple[Callable[[pytest.MonkeyPatch], None], Scenario]] = [
    (no_following, write_before_and_after),
    (no_holding, write_before_and_after),
    (no_waiting_for_the_event, write_before_and_after),
    (no_wait_of_the_stream_in_the_guard, step_while_it_is_copied),
    (no_waiting_until_all_is_enqueued, step_before_it_is_enqueued),
    (no_keeping_alive, data_replaced_before_it_is_enqueued),
    (no_telling_the_allocator, memory_of_another_stream_freed),
]
SCENARIOS = list(dict.fromkeys(scenario for _, scenario in MUTANTS))
both_extremes = pytest.mark.parametrize("sim", ["early", "late"], indirect=True)


@both_extremes
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_nothing_is_torn_and_nothing_races(tmp_path, sim, scenario):
    assert caught(scenario, tmp_path, sim) is None


@both_extremes
@pytest.mark.parametrize(("mutant", "scenario"), MUTANTS, ids=lambda part: part.__name__)
def test_a_wait_that_is_left_out_is_noticed(tmp_path, sim, mutant, scenario, monkeypatch):
    mutant(monkeypatch)

    assert caught(scenario, tmp_path, sim) is not None
