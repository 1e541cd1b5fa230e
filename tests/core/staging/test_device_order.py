"""Who waits for whom on a device, under both extreme schedules.

With one wait left out, by a mutant of `mutants_device`, a scenario loads wrong bytes, fails, or races.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerators import Simulated
from racing import Call, Gate, until
from scripted_disk import scripted
from sim_streams import WORK_SECONDS
from states import MIB, open_run

from async_ckpt import SaveHandle, TornSnapshotError
from async_ckpt.core.host.loop import get_loop
from async_ckpt.core.saving import ledger
from async_ckpt.core.staging.device import Device

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


def resized_right_after_save(root: Path, device: Simulated) -> str | None:
    """What is not deferred loses its memory while it is copied, as FSDP frees its full parameters."""
    state = {"w": torch.full((4 * ITEMS,), 3.0, device="sim")}
    with open_run(root) as ckpt:
        with device.ahead():
            handle = ckpt.save(state, step=1)
            device.sim.resize(state["w"], 0)
        return torn_alone(handle, "w", device)


def torn_alone(handle: SaveHandle, name: str, device: Simulated) -> str | None:
    error = handle.exception()
    device.sim.races.clear()  # the copy may read what others write
    return None if isinstance(error, TornSnapshotError) and error.names == (name,) else f"not torn, but {error!r}"


def wait_until_enqueued(handle: SaveHandle) -> None:
    """Return when all copies of a save are enqueued, or it has failed."""
    get_loop().sync()  # which lists the save
    save: Any = next(save for save in ledger.all_saves() if save.handle is handle)
    snapshot = save.snapshot
    until(lambda: "enqueued" in repr(snapshot) or handle.done())


def resized_between_enqueue_and_copy(root: Path, device: Simulated) -> str | None:
    """A deferred tensor loses its memory when its copy is enqueued, but not made, and others want that memory."""
    p, optimizer = guarded(3.0)
    with open_run(root) as ckpt:
        with device.ahead():
            handle = ckpt.save({"p": p}, step=1, guard=optimizer)
            wait_until_enqueued(handle)
            device.sim.resize(p, 0)
            for _ in range(2):
                torch.full((4 * ITEMS,), -1.0, device="sim")
        return torn_alone(handle, "p", device)


def guarded(value: float, items: int = 4 * ITEMS, device: str = "sim") -> tuple[torch.nn.Parameter, torch.optim.SGD]:
    p = torch.nn.Parameter(torch.full((items,), value, device=device))
    p.grad = torch.ones_like(p)
    return p, torch.optim.SGD([p], lr=1.0)


def step_on_two_devices_while_it_is_copied(root: Path, device: Simulated) -> str | None:
    """Guarded parameters, and others, change on both devices while the copies are still to be made."""
    parameters = [guarded(3.0, device=f"sim:{n}")[0] for n in range(2)]
    state = {f"p{n}": p for n, p in enumerate(parameters)}
    state |= {f"w{n}": torch.zeros(ITEMS // 8, device=f"sim:{n}") for n in range(2)}
    optimizer = torch.optim.SGD(parameters, lr=1.0)
    with open_run(root) as ckpt:
        ckpt.prewarm(state)
        with device.ahead():
            for n in range(2):
                state[f"w{n}"].fill_(3)
            handle = ckpt.save(state, step=1, guard=optimizer)
            optimizer.step()
            for n in range(2):
                state[f"w{n}"].fill_(-1)
        handle.result()
        return wrong(ckpt.load(1), 3.0)


def write_to_the_second_device_outside_of_the_step(root: Path, device: Simulated) -> str | None:
    """A parameter on the second device is written to, in a way that no counter shows, while its copy waits for memory."""
    device.may_race = True
    first, second = guarded(3.0)[0], guarded(3.0, 8 * MIB, "sim:1")[0]
    optimizer = torch.optim.SGD([first, second], lr=1.0)
    with open_run(root, host_bytes=16 * MIB) as ckpt, scripted(ckpt) as disk:
        disk.stop("write")
        handle = ckpt.save({"first": first, "second": second}, step=1, guard=optimizer)
        second.data.add_(1)
        disk.release_all()
        return found_torn(handle, "second")


def found_torn(handle: SaveHandle, name: str) -> str | None:
    error = handle.exception()
    found = isinstance(error, TornSnapshotError) and error.names == (name,)
    return None if found else f"{name} is torn, and the save ended with {error!r}"


def another_save_samples_before_a_write(root: Path, device: Simulated) -> str | None:
    """While one guarded save waits for memory, another takes its samples; then a tensor of the first is written to.

    It has the values of the other one then.
    """
    device.may_race = True
    (p, optimizer), (q, other) = guarded(3.0, 8 * MIB), guarded(4.0)
    with open_run(root / "p", host_bytes=16 * MIB) as ckpt, open_run(root / "q") as beside, scripted(ckpt) as disk:
        beside.prewarm({"q": q})
        disk.stop("write")
        handle = ckpt.save({"p": p}, step=1, guard=optimizer)
        beside.save({"q": q}, step=1, guard=other).result()
        p.data.add_(1)
        disk.release_all()
        return found_torn(handle, "p") or wrong(beside.load(1), 4.0)


def a_step_waits_behind_a_kernel_when_the_save_ends(root: Path, device: Simulated) -> str | None:
    """Of the two waits of a stream, one is over when the save ends; the other has not begun, and counts as zero."""
    p, optimizer = guarded(3.0)
    with open_run(root) as ckpt:
        with device.ahead():
            handle = ckpt.save({"p": p, "w": torch.ones(ITEMS, device="sim")}, step=1, guard=optimizer)
            device.busy()
            optimizer.step()
        stall_seconds = handle.result().stall_seconds
        return None if stall_seconds > WORK_SECONDS else f"a stall of {stall_seconds} s"


class ContendedLock:
    """A lock that tells when a thread has to wait for it."""

    def __init__(self, lock: Any) -> None:
        self._lock = lock
        self.is_wanted = False

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            self.is_wanted = True
            self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def two_threads_gather_small_tensors(root: Path, device: Simulated) -> str | None:
    """A second save gathers small tensors between the two halves of a packed copy of the first one."""
    first, second = ({f"t{n}": torch.full((100,), value, device="sim") for n in range(20)} for value in (3.0, 5.0))
    side = Device(torch.device("sim", 0))._side
    gate, lock, cat = Gate(), ContendedLock(side.lock), torch.cat
    gathered: list[torch.Tensor] = []

    def stopping(parts: list[torch.Tensor], *rest: Any, out: torch.Tensor | None = None) -> torch.Tensor:
        made = cat(parts, *rest, out=out)
        if out is not None:
            gathered.append(out)
            if len(gathered) == 1:
                gate.passed()
        return made

    with pytest.MonkeyPatch.context() as patch, open_run(root / "first") as one, open_run(root / "second") as two:
        patch.setattr(torch, "cat", stopping)
        patch.setattr(side, "lock", lock)
        saving = Call(lambda: one.save(first, step=1))
        gate.wait_reached()
        beside = Call(lambda: two.save(second, step=1))
        until(lambda: lock.is_wanted or not beside.is_alive())
        gate.open()
        for call in (saving, beside):
            call.outcome().result()
        return wrong(one.load(1), 3.0) or wrong(two.load(1), 5.0)


# --- the scenarios ----------------------------------------------------------------------------------------------

SCENARIOS = [
    write_before_and_after,
    step_while_it_is_copied,
    step_before_it_is_enqueued,
    data_replaced_before_it_is_enqueued,
    resized_right_after_save,
    step_on_two_devices_while_it_is_copied,
    write_to_the_second_device_outside_of_the_step,
    another_save_samples_before_a_write,
    resized_between_enqueue_and_copy,
    two_threads_gather_small_tensors,
    a_step_waits_behind_a_kernel_when_the_save_ends,
]


@pytest.mark.parametrize("sim", ["early", "late"], indirect=True)
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_nothing_is_torn_and_nothing_races(tmp_path, sim, scenario):
    assert scenario(tmp_path, sim) is None
