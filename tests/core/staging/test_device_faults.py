"""What a device may do to a save: refuse memory or pinning, break, object to waiting. Nothing torn is ever committed."""

import itertools
import os
import signal
import threading
import time
import warnings
from typing import Any

import pytest
import simulated
import torch
from accelerators import of_simulation
from children import Ended
from racing import PATIENCE, Call, until
from scripted_disk import scripted
from states import MIB, assert_is_state, leftovers, open_run, state_at

import async_ckpt
from async_ckpt import StorageUnavailableError, TornSnapshotError
from async_ckpt.core.host import memory as memory_module
from async_ckpt.core.saving import kept_memory
from async_ckpt.core.staging import side_stream, tensors
from async_ckpt.core.staging.device import Device
from async_ckpt.core.staging.filler import SegmentFiller
from async_ckpt.core.staging.host_copy import BufferPool

ITEMS = MIB // 4  # of a tensor of 1 MiB


def state_of(value: float, device: str = "sim") -> dict[str, torch.Tensor]:
    """What is packed, what is copied by itself, and what is not dense."""
    state = {f"small{n}": torch.full((100 + n,), value, device=device) for n in range(20)}
    state["large"] = torch.full((2 * ITEMS,), value, device=device)
    state["strided"] = torch.full((3 * ITEMS,), value, device=device)[::3]
    return state


def assert_all(state: dict[str, torch.Tensor], value: float) -> None:
    assert [name for name, tensor in state.items() if not bool((tensor == value).all())] == []


def guarded(value: float = 3.0, items: int = 4 * ITEMS, device: str = "sim"):
    p = torch.nn.Parameter(torch.full((items,), value, device=device))
    p.grad = torch.ones_like(p)
    return p, torch.optim.SGD([p], lr=1.0)


both = pytest.mark.parametrize("sim", ["early", "late"], indirect=True)


# --- a failed save -------------------------------------------------------------------------------------------------


def test_memory_of_a_failed_save_is_lent_to_nobody_while_copies_still_write_to_it(tmp_path, sim):
    p, optimizer = guarded(items=32 * ITEMS)
    with open_run(tmp_path, host_bytes=16 * MIB) as ckpt, scripted(ckpt) as disk:
        ckpt.prewarm({"p": p})  # a call that waits for memory learns of the failure, and ends with it
        disk.fail("create", error=StorageUnavailableError("gone", path="/ckpt"))
        writing = disk.stop("write")
        with sim.ahead():
            failing = ckpt.save({"p": p}, step=1, guard=optimizer)
            until(lambda: disk.calls != [])
            failing.looked_at = True
            second = Call(lambda: ckpt.save(state_at(2, 3), step=2))
            second.wait_until_inside("enter", "_fill_now")
        sim.module.synchronize()
        writing.release()
        assert isinstance(failing.exception(), StorageUnavailableError)
        second.outcome().result()
        assert_is_state(ckpt.load(2), 2, 3)
        assert ckpt.steps() == [2]


@both
def test_training_follows_the_copies_of_a_save_that_failed_during_its_call(tmp_path, sim, monkeypatch):
    goes_on = threading.Event()
    fill_run, wait, is_quiet = SegmentFiller._fill_run, Device.wait, Device.is_quiet

    def fill_and_fail(self: SegmentFiller, *arguments: Any) -> None:
        fill_run(self, *arguments)
        on_another_thread = threading.Thread(target=self._on_end, args=(StorageUnavailableError("gone", path="/ckpt"),))
        on_another_thread.start()
        until(lambda: self._error is not None)

    def wait_later(self: Device, event: Any) -> None:
        goes_on.wait(PATIENCE)
        wait(self, event)

    def is_quiet_later(self: Device) -> bool:
        goes_on.wait(PATIENCE)
        return is_quiet(self)

    monkeypatch.setattr(SegmentFiller, "_fill_run", fill_and_fail)
    monkeypatch.setattr(Device, "wait", wait_later)
    monkeypatch.setattr(Device, "is_quiet", is_quiet_later)
    state = state_of(1.0)
    with open_run(tmp_path) as ckpt:
        failing = ckpt.save(state, step=1)
        for tensor in state.values():
            tensor.fill_(2.0)
        goes_on.set()
        with pytest.raises(StorageUnavailableError):
            failing.result()


def test_a_failed_save_returns_only_when_no_thread_fills_its_memory_any_more(tmp_path, gate, monkeypatch):
    memmove, filled = tensors.memmove, []

    def stopping(target: int, source: int, num_bytes: int) -> None:
        filled.append(num_bytes)
        if len(filled) == 1:
            gate.passed()
        memmove(target, source, num_bytes)

    monkeypatch.setattr(tensors, "memmove", stopping)
    with open_run(tmp_path, host_bytes=16 * MIB) as ckpt, scripted(ckpt) as disk:
        disk.fail("create", error=StorageUnavailableError("gone", path="/ckpt"))
        failing = Call(lambda: ckpt.save({"w": torch.full((ITEMS,), 3.0)}, step=1))
        gate.wait_reached()
        failing.wait_until_inside_all("stop", "wait")
        assert failing.is_alive()
        gate.open()
        assert isinstance(failing.outcome().exception(), StorageUnavailableError)
        ckpt.save({"w": torch.full((ITEMS,), 4.0)}, step=2).result()
        assert_all(ckpt.load(2), 4.0)


# --- no memory left on the device ---------------------------------------------------------------------------------


def test_a_first_save_of_large_tensors_takes_no_memory_of_the_device(tmp_path, sim):
    state = {"w": torch.full((4 * ITEMS,), 7.0, device="sim"), "one": torch.ones(3, device="sim")}
    sim.sim.settle()
    memory = sim.sim.memories[0]
    before = memory.most_bytes = memory.lent_bytes
    with open_run(tmp_path) as ckpt:
        ckpt.save(state, step=1).result()
        assert (
            memory.most_bytes <= before + 512
        )  # a tensor of three items is copied by itself, or what is beside it with it


def test_small_tensors_are_saved_from_a_device_that_is_full(tmp_path, sim):
    state = {f"small{n}": torch.full((100 + n,), 3.0, device="sim") for n in range(300)}
    sim.sim.settle()
    memory = sim.sim.memories[0]
    memory.limit_bytes = memory.lent_bytes
    with open_run(tmp_path) as ckpt:
        ckpt.save(state, step=1).result()
        assert_all(ckpt.load(1), 3.0)


def test_a_device_that_is_full_is_prewarmed_as_far_as_it_goes(tmp_path, sim):
    state = {"w": torch.full((4 * ITEMS,), 7.0, device="sim"), "small": torch.ones(3, device="sim")}
    sim.sim.settle()
    memory = sim.sim.memories[0]
    with open_run(tmp_path) as ckpt:
        memory.limit_bytes = memory.lent_bytes
        ckpt.prewarm(state)
        assert ckpt._saver.pool._free
        ckpt.save(state, step=1).result()
        assert_all({"w": ckpt.load(1)["w"]}, 7.0)


def test_small_tensors_are_gathered_in_no_more_than_32_mib_of_the_device(tmp_path, sim):
    state = {f"small{n}": torch.full((50_000,), 3.0, device="sim") for n in range(240)}  # 46 MiB
    sim.sim.settle()
    memory = sim.sim.memories[0]
    before = memory.most_bytes = memory.lent_bytes
    with open_run(tmp_path) as ckpt:
        ckpt.save(state, step=1).result()
        assert memory.most_bytes - before <= 32 * MIB
        assert_all(ckpt.load(1), 3.0)


@pytest.mark.parametrize("guard", [False, True])
def test_any_allocation_of_a_save_may_fail_and_nothing_torn_is_committed(tmp_path, sim, guard, monkeypatch):
    monkeypatch.setattr(side_stream.side_of, "_made", {})  # or it has its buffers already
    p, optimizer = guarded()
    memory = sim.sim.memories[0]
    outcomes: list[str] = []
    with open_run(tmp_path) as ckpt:
        for step in itertools.count():
            memory.refuse = set()
            state = {"p": p, **state_of(3.0)}
            refused = memory.num_allocations + 1 + step
            memory.refuse = {refused}
            try:
                ckpt.save(state, step=step, guard=optimizer if guard else None).result()
            except torch.OutOfMemoryError:
                outcomes.append("refused")
            else:
                outcomes.append("saved")
            if memory.num_allocations < refused:  # it has made no more
                break
        memory.refuse = set()
        assert len(outcomes) > 1
        assert ckpt.steps() == [step for step, outcome in enumerate(outcomes) if outcome == "saved"]
        for step in ckpt.steps():
            assert_all(ckpt.load(step), 3.0)
    assert leftovers(tmp_path) == []


def test_a_load_for_which_a_device_has_no_memory_fails_and_the_next_one_is_right(tmp_path, sim):
    memory = sim.sim.memories[0]
    with open_run(tmp_path) as ckpt:
        ckpt.save({"w": torch.full((4 * ITEMS,), 3.0)}, step=1).result()
        sim.sim.settle()
        memory.limit_bytes = memory.lent_bytes
        with pytest.raises(torch.OutOfMemoryError, match="simulated device 0"):
            ckpt.load(1, map_location="sim")
        memory.limit_bytes = None
        assert_all(ckpt.load(1, map_location="sim"), 3.0)


# --- pinning ------------------------------------------------------------------------------------------------------


@both
def test_refused_pinning_is_told_once_and_the_copies_are_right(tmp_path, sim):
    sim.sim.refuses_pinning = True
    p, optimizer = guarded()
    with open_run(tmp_path) as ckpt:
        with pytest.warns(RuntimeWarning, match=r"refused to page-lock host memory \(error 1\)") as told:
            ckpt.save(state_of(3.0), step=1).result()
        ckpt.save({"p": p}, step=2, guard=optimizer).result()  # a second warning would be an error
        assert_all(ckpt.load(1), 3.0)
        assert_all(ckpt.load(2), 3.0)
    assert len(told) == 1
    assert "ulimit" not in str(told[0].message)


@both
def test_a_refusal_is_no_matter_of_later_saves(tmp_path, sim, monkeypatch):
    """Memory that could not be page-locked is not kept: a copy into it would hold the training thread up."""
    p, optimizer = guarded()
    monkeypatch.setattr(Device(p.device)._side, "_boxes", [])  # those of earlier tests
    with open_run(tmp_path / "before") as ckpt:
        sim.sim.refuses_pinning = True
        with pytest.warns(RuntimeWarning, match="refused to page-lock"):
            ckpt.save({"p": p}, step=1, guard=optimizer).result()
        sim.sim.refuses_pinning = False
    with open_run(tmp_path / "after") as ckpt:
        with sim.ahead():
            handle = ckpt.save({"p": p}, step=1, guard=optimizer)
        handle.result()
        assert_all(ckpt.load(1), 3.0)


@both
@pytest.mark.parametrize("what", [KeyboardInterrupt, ValueError])
def test_a_failed_save_ends_even_if_the_wait_for_its_copies_is_cut_short(tmp_path, sim, monkeypatch, what):
    """Its memory, to which the device may still write, is not lent again."""
    p, _ = guarded()
    enqueue = Device.enqueue

    def failing(self: Device, *arguments: Any) -> None:
        enqueue(self, *arguments)
        raise OSError("lost")

    def cut_short(self: Device) -> bool:
        raise what("cut short")

    with open_run(tmp_path) as ckpt:
        ckpt.save({"p": p}, step=1).result()
        with monkeypatch.context() as patch:
            patch.setattr(Device, "enqueue", failing)
            patch.setattr(Device, "is_quiet", cut_short)
            with pytest.raises(what if what is KeyboardInterrupt else OSError, match=r"cut short|lost"):
                ckpt.save({"p": p}, step=2).result(PATIENCE)
        assert "leaked" in repr(ckpt._saver.pool)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # nobody has the handle of a call that was interrupted
            ckpt.save({"p": p}, step=3).result(PATIENCE)
        assert ckpt.steps() == [1, 3]
    assert leftovers(tmp_path) == []


@both
def test_a_save_that_fails_waits_for_the_copies_that_a_device_still_makes(tmp_path, sim, monkeypatch):
    p, _ = guarded()
    enqueue = Device.enqueue

    def failing(self: Device, *arguments: Any) -> None:
        enqueue(self, *arguments)
        raise OSError("lost")

    with open_run(tmp_path) as ckpt:
        ckpt.save({"p": p}, step=1).result()
        with monkeypatch.context() as patch:
            patch.setattr(Device, "enqueue", failing)
            with sim.ahead():
                call = Call(lambda: ckpt.save({"p": p}, step=2))
                until(lambda: sim.sim.scheduler.num_waiting > 0 or not call.is_alive())
                assert call.is_alive()
            with pytest.raises(OSError, match="lost"):
                call.outcome().result(PATIENCE)
        assert ", 0 of " in repr(ckpt._saver.pool)
        assert "leaked" not in repr(ckpt._saver.pool)


def test_a_second_interrupt_does_not_take_tensors_from_under_a_thread_that_copies(tmp_path, monkeypatch):
    order = []
    copy, drop = tensors.SourceTensors.copy_from_host, tensors.SourceTensors.drop

    def interrupting(self: tensors.SourceTensors, *arguments: Any, **options: Any) -> None:
        if not order:
            order.append("copying")
            for _ in range(2):
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
                time.sleep(0.3)  # for what must not happen meanwhile
            order.append("copied")
        copy(self, *arguments, **options)

    def dropping(self: tensors.SourceTensors) -> None:
        order.append("dropped")
        drop(self)

    with open_run(tmp_path) as ckpt:
        with monkeypatch.context() as patch:
            patch.setattr(tensors.SourceTensors, "copy_from_host", interrupting)
            patch.setattr(tensors.SourceTensors, "drop", dropping)
            before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have had it ignored
            try:
                with pytest.raises(KeyboardInterrupt):
                    ckpt.save(state_at(1), step=1)
            finally:
                signal.signal(signal.SIGINT, before)
        assert order == ["copying", "copied", "dropped"]
        ckpt.save(state_at(2), step=2).result(PATIENCE)
        assert ckpt.steps() == [2]
        assert ", 0 of " in repr(ckpt._saver.pool)


def test_memory_that_the_driver_does_not_let_go_of_stays_mapped(tmp_path, sim, monkeypatch):
    monkeypatch.setattr(simulated.Runtime, "simHostUnregister", lambda self, address: 713)
    leaked = len(memory_module._leaked)
    with open_run(tmp_path) as ckpt:
        ckpt.save(state_of(3.0), step=1).result()
    assert len(memory_module._leaked) > leaked


def test_a_checkpointer_closes_on_a_broken_device(tmp_path, sim):
    with open_run(tmp_path) as ckpt:
        ckpt.save(state_of(3.0), step=1).result()
        sim.sim.break_down(0)
    assert async_ckpt.load(tmp_path) is not None


def test_prewarm_makes_all_that_the_first_save_needs_of_a_device(tmp_path, sim):
    state = {n: t for n, t in state_of(3.0).items() if n != "strided"}
    with open_run(tmp_path) as ckpt:
        ckpt.prewarm(state)
        sim.sim.settle()
        memory, streams, pinned = sim.sim.memories[0], len(sim.sim.scheduler.queues), sim.sim.num_registrations
        before = memory.lent_bytes
        memory.most_bytes = before
        ckpt.save(state, step=1).result()
        assert memory.most_bytes <= before
        assert len(sim.sim.scheduler.queues) == streams
        # Not how many are left: a pool of an earlier test may go, and take its own with it, at any moment.
        assert sim.sim.num_registrations == pinned


def test_more_saves_may_be_in_flight_than_there_are_threads_to_copy(tmp_path, sim):
    num_saves = 40
    with open_run(tmp_path, max_in_flight=num_saves, segment_bytes=4 * MIB) as ckpt:
        ckpt.prewarm({"w": torch.full((ITEMS,), 0.0, device="sim")})
        with sim.ahead():
            handles = [ckpt.save({"w": torch.full((ITEMS,), float(n), device="sim")}, step=n) for n in range(num_saves)]
        for handle in handles:
            handle.result()
        assert all(bool((ckpt.load(n)["w"] == n).all()) for n in range(num_saves))


# --- a device that breaks -----------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("with_guard", [False, True])
def test_a_device_that_broke_before_a_save_fails_it_and_the_host_is_saved_on(tmp_path, sim, with_guard):
    p, optimizer = guarded()
    with open_run(tmp_path) as ckpt:
        ckpt.save({"p": p}, step=0).result()
        sim.sim.break_down(0)
        with pytest.raises(RuntimeError, match="device-side assert"):
            ckpt.save({"p": p}, step=1, guard=optimizer if with_guard else None).result()
        ckpt.save(state_at(2), step=2).result()
        assert ckpt.steps() == [0, 2]
        assert_is_state(ckpt.load(2), 2)


@both
@pytest.mark.parametrize("with_guard", [False, True])
def test_a_device_that_breaks_while_it_is_copied_from_fails_the_save_and_keeps_its_memory(tmp_path, sim, with_guard):
    p, optimizer = guarded()
    with open_run(tmp_path, host_bytes=32 * MIB, max_in_flight=2) as ckpt:
        with sim.ahead():
            handle = ckpt.save({"p": p}, step=1, guard=optimizer if with_guard else None)
            sim.let_it_come_to_a_stop(handle)
            sim.sim.break_down(0)
        with pytest.raises(RuntimeError, match="device-side assert"):
            handle.result()
        assert "leaked" in repr(ckpt._saver.pool)
        ckpt.save(state_at(2), step=2).result()
        assert ckpt.steps() == [2]
    assert leftovers(tmp_path) == []


def test_a_device_that_breaks_after_staging_costs_no_checkpoint(tmp_path, sim):
    with open_run(tmp_path) as ckpt, scripted(ckpt) as disk:
        disk.stop("write")
        handle = ckpt.save(state_of(3.0), step=1)
        handle.wait_staged()
        sim.sim.break_down(0)
        disk.release_all()
        handle.result()
        assert_all(ckpt.load(1), 3.0)


def test_one_of_two_devices_that_is_broken_does_not_harm_the_other(tmp_path, sim):
    whole, lost = torch.full((ITEMS,), 3.0, device="sim:1"), torch.full((ITEMS,), 3.0, device="sim:0")
    with open_run(tmp_path, max_in_flight=2) as ckpt:
        ckpt.save({"whole": whole, "lost": lost}, step=1).result()
        sim.sim.break_down(0)
        with pytest.raises(RuntimeError, match="device-side assert"):
            ckpt.save({"whole": whole, "lost": lost}, step=2).result()
        ckpt.save({"whole": whole}, step=3).result()
        assert ckpt.steps() == [1, 3]
        assert_all(ckpt.load(3), 3.0)
    whole += 1  # and the training goes on there
    assert_all({"whole": whole}, 4.0)


@pytest.mark.parametrize("with_guard", [False, True])
def test_a_device_that_breaks_under_a_snapshot_fails_it_and_its_memory_is_lent_to_nobody(sim, with_guard, monkeypatch):
    # Memory that is lost counts as lent for good, which would count in other tests.
    monkeypatch.setattr(kept_memory._shared, "host_memory", BufferPool())
    p, optimizer = guarded()
    leaked = len(memory_module._leaked)
    with sim.ahead():
        broken = async_ckpt.snapshot({"p": p}, guard=optimizer if with_guard else None)
        sim.let_it_come_to_a_stop(broken.completion)
        sim.sim.break_down(0)
    assert "device-side assert" in str(broken.completion.exception())
    assert len(memory_module._leaked) > leaked
    broken.close()
    with async_ckpt.snapshot({"w": torch.full((4 * ITEMS,), 3.0)}) as held:
        held.completion.result()
        addresses = {segment.address for segment in memory_module._leaked}
        assert held["w"].data_ptr() not in addresses
        assert_all({"w": held["w"]}, 3.0)


def test_a_state_on_a_device_that_broke_is_not_restored_and_loads_on_the_host(tmp_path, sim):
    state = {"w": torch.full((4 * ITEMS,), 3.0, device="sim")}
    with open_run(tmp_path) as ckpt:
        ckpt.save(state, step=1).result()
        sim.sim.break_down(0)
        with pytest.raises(RuntimeError, match="device-side assert"):
            ckpt.restore(state)
        assert_all(ckpt.load(1), 3.0)


# --- what the training does ---------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("with_guard", [False, True])
@pytest.mark.parametrize("to", ["sim:1", "cpu"])
def test_a_model_that_moves_right_after_save_is_saved_as_it_was(tmp_path, sim, to, with_guard):
    model = torch.nn.Linear(ITEMS, 4, bias=False, device="sim")
    torch.nn.init.constant_(model.weight, 3.0)
    guard = torch.optim.SGD(model.parameters(), lr=1.0) if with_guard else None
    with open_run(tmp_path) as ckpt:
        with sim.ahead():
            handle = ckpt.save(dict(model.named_parameters()), step=1, guard=guard)
            if to != "cpu":  # which would wait for the device
                model.to(to)
        model.to(to)
        torch.nn.init.constant_(model.weight, -1.0)
        torch.full((4 * ITEMS,), -1.0, device="sim")  # takes the memory, were it free
        handle.result()
        assert_all(ckpt.load(1), 3.0)


@both
@pytest.mark.parametrize("num_bytes", [0, 4096, 64 * MIB])
def test_a_storage_that_is_resized_while_it_is_copied_fails_the_save_by_name(tmp_path, sim, num_bytes):
    """torch's allocator for CUDA tells to whom it lends the memory, this one does not; see `tests/cuda`."""
    sim.may_race = True  # the copy may read what others write
    state = {"w": torch.full((4 * ITEMS,), 3.0, device="sim")}
    with open_run(tmp_path) as ckpt:
        with sim.ahead():
            handle = ckpt.save(state, step=1)
            sim.sim.resize(state["w"], num_bytes)
            torch.full((4 * ITEMS,), -1.0, device="sim")
        with pytest.raises(TornSnapshotError, match="w lost its memory by resize_ of its storage") as caught:
            handle.result()
        assert caught.value.names == ("w",)


def test_a_forked_child_saves_what_is_on_the_host_and_leaves_the_devices_alone(tmp_path, sim):
    on_host, optimizer = guarded(device="cpu")
    with open_run(tmp_path / "parent") as ckpt:
        ckpt.prewarm({"w": torch.empty(16 * ITEMS, device="sim")})
        with sim.ahead():
            handle = ckpt.save(state_of(3.0), step=1)
            assert ckpt._saver.pool._free
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # of threads, which are not in the child
                child = os.fork()
            if child == 0:
                try:
                    with open_run(tmp_path / "child", guard=optimizer) as other:
                        other.save({"p": on_host, "rng": async_ckpt.RngState()}, step=1).result(timeout=30)
                        async_ckpt.wrap(torch.save)(on_host, str(tmp_path / "p.pt")).result(timeout=30)
                    for memory in {segment.memory for segment in ckpt._saver.pool._free}:
                        memory.free()  # as at its end
                    os._exit(sim.sim.scheduler.num_asked_elsewhere)
                except BaseException:
                    os._exit(99)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        handle.result()
        assert_all(ckpt.load(1), 3.0)
    with open_run(tmp_path / "child") as other:
        assert_all({"p": other.load(1)["p"]}, 3.0)


AT_THE_END = """
import sys
from accelerators import Simulated
import torch
from states import open_run
device = Simulated(sys.argv[2])
device.sim.is_here = True
p = torch.nn.Parameter(torch.full((3_000_000,), 3.0, device="sim"))
optimizer = torch.optim.SGD([p], lr=1.0)
ckpt = open_run(sys.argv[1])
device.busy()
p.data.fill_(4.0)
guard = optimizer if sys.argv[3] == "guarded" else None
"""
SAVED = """
ckpt.save({"w": p}, step=1, guard=guard)
"""
BROKEN = """
with device.ahead():
    ckpt.save({"w": p}, step=1, guard=guard)
    device.sim.break_down(0)
"""


@of_simulation
@pytest.mark.parametrize("guard", ["guarded", "not guarded"])
@pytest.mark.parametrize("schedule", ["early", "late"])
def test_at_the_end_of_the_interpreter_copies_under_way_are_made_and_committed(tmp_path, nursery, schedule, guard):
    ended = nursery.run(AT_THE_END + SAVED, tmp_path, schedule, guard)

    assert ended == Ended(0, "", "")
    with open_run(tmp_path) as ckpt:
        assert_all(ckpt.load(1), 4.0)


@of_simulation
@pytest.mark.parametrize("guard", ["guarded", "not guarded"])
def test_a_device_that_broke_does_not_keep_the_interpreter_and_the_save_is_told_as_failed(tmp_path, nursery, guard):
    ended = nursery.run(AT_THE_END + BROKEN, tmp_path, "late", guard)

    assert ended.status == 75
    assert "device-side assert" in ended.err
    with open_run(tmp_path) as ckpt:
        assert ckpt.steps() == []


@pytest.mark.parametrize("guard", ["guarded", "not guarded"])
def test_a_device_that_broke_is_not_taken_for_a_host_that_is_short_of_memory(tmp_path, sim, monkeypatch, guard):
    """CUDA answers every call for a broken device by its error, also the one that page-locks memory."""
    monkeypatch.setattr(simulated.Runtime, "simHostRegister", lambda *_: 710)
    p, optimizer = guarded()
    with open_run(tmp_path) as ckpt, warnings.catch_warnings():
        warnings.simplefilter("error")
        sim.sim.break_down(0)
        with pytest.raises(RuntimeError, match="device-side assert"):
            ckpt.save({"p": p}, step=1, guard=optimizer if guard == "guarded" else None).result()
        with pytest.raises(RuntimeError, match="device-side assert"):
            ckpt.prewarm({"p": p})
