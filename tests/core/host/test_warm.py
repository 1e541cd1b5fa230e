"""Memory that is warm: what a restore reads through, and what it leaves for the first save."""

import gc
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from racing import Call, Gate, until
from states import MIB, SEGMENT, open_run

import async_ckpt
from async_ckpt.core.host.memory import HostBuffer
from async_ckpt.core.host.pool import SegmentPool
from async_ckpt.core.host.threads import Crew
from async_ckpt.core.loading import fill
from async_ckpt.core.saving.saver import Saver
from async_ckpt.core.staging import guard
from async_ckpt.core.staging.guard import gate_of


def state_of(mib: int) -> dict[str, torch.Tensor]:
    return {"w": torch.arange(mib * MIB // 4, dtype=torch.int32), "b": torch.ones(3)}


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The size of each segment that is made."""
    sizes: list[int] = []
    real = HostBuffer.__init__

    def init(self: HostBuffer, num_bytes: int, *how: object, **options: object) -> None:
        sizes.append(num_bytes)
        real(self, num_bytes, *how, **options)

    monkeypatch.setattr(HostBuffer, "__init__", init)
    return sizes


@pytest.fixture
def pool():
    pool = SegmentPool(SEGMENT, max_bytes=8 * SEGMENT)
    yield pool
    pool.close()


# --- what is borrowed --------------------------------------------------------------------------------------------


def test_what_is_free_is_borrowed_first_and_new_memory_as_far_as_the_budget_goes(pool, made):
    first = pool.borrow(3, pin=None)
    assert len(first) == len(made) == 3
    for lease in first:
        lease.release()
    again = pool.borrow(20, pin=None)
    assert (len(again), len(made)) == (8, 8)
    assert pool.borrow(1, pin=None) == []
    for lease in again:
        lease.release()
    assert "0 of 8 segments lent" in repr(pool)


def test_who_waits_for_memory_comes_before_who_borrows(pool):
    leases = pool.borrow(8, pin=None)
    waiting = Call(lambda: pool.lease((0, 0), pin=None, check=lambda: None))
    until(lambda: "1 waiting" in repr(pool))
    assert pool.borrow(1, pin=None) == []
    leases.pop().release()
    waiting.outcome().release()
    for lease in leases:
        lease.release()


def test_a_closed_pool_lends_nothing(pool):
    pool.close()
    assert pool.borrow(1, pin=None) == []


def test_memory_that_cannot_be_had_is_not_counted(pool, monkeypatch):
    def full(*_):
        raise MemoryError

    monkeypatch.setattr("async_ckpt.core.host.pool.HostBuffer", full)
    with pytest.raises(MemoryError):
        pool.borrow(2, pin=None)
    with pytest.raises(MemoryError):
        pool.reserve(2, Crew("make", 2), pin=None)
    assert "0 of 0 segments lent" in repr(pool)


# --- what is reserved --------------------------------------------------------------------------------------------


def test_while_memory_is_reserved_a_save_makes_its_own(pool, monkeypatch):
    gate, real = Gate(), HostBuffer.touch

    def touch(self: HostBuffer) -> None:
        gate.passed()
        real(self)

    monkeypatch.setattr(HostBuffer, "touch", touch)
    crew = Crew("make", 1)
    reserving = Call(lambda: pool.reserve(8, crew, pin=None))
    gate.wait_reached()
    leases = [pool.lease((0, n), pin=None, check=lambda: None) for n in range(7)]
    gate.open()
    reserving.outcome()
    assert "7 of 8 segments lent" in repr(pool)
    for lease in leases:
        lease.release()
    crew.stop()


def test_nobody_is_asked_for_memory_while_some_is_being_made(pool, monkeypatch):
    gate, real = Gate(), HostBuffer.touch

    def touch(self: HostBuffer) -> None:
        gate.passed()
        real(self)

    monkeypatch.setattr(HostBuffer, "touch", touch)
    asked: list[bool] = []
    pool.add_reliever(lambda starving: bool(asked.append(starving)))
    leases = pool.borrow(7, pin=None)
    reserving = Call(lambda: pool.reserve(8, None, pin=None))
    gate.wait_reached()
    waiting = Call(lambda: pool.lease((0, 7), pin=None, check=lambda: None))
    until(lambda: "1 waiting" in repr(pool))
    gate.open()
    waiting.outcome().release()
    reserving.outcome()
    assert asked == []
    for lease in leases:
        lease.release()


def test_reserving_ends_when_nobody_needs_it_any_more(pool):
    asked = threading.Semaphore(3)
    pool.reserve(8, Crew("make", 1), pin=None, goes_on=lambda: asked.acquire(blocking=False))
    assert pool.num_bytes == 3 * SEGMENT


# --- a guard -----------------------------------------------------------------------------------------------------


@contextmanager
def recorded(owner: Any, name: str) -> Iterator[list[None]]:
    """A mark for each call of a method that has returned."""
    real, calls = getattr(owner, name), list[None]()

    def call(*args: object, **options: object) -> None:
        real(*args, **options)
        calls.append(None)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, call)
        yield calls


def stepped(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = torch.ones_like(p)
    optimizer.step()


def test_the_first_steps_of_a_guard_take_the_memory_of_the_first_save(tmp_path, made):
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.ones(8 * MIB // 4))])
    with open_run(tmp_path, guard=optimizer, segment_bytes=4 * MIB) as ckpt:
        assert ckpt._saver.pool.num_bytes == 0
        stepped(optimizer)
        until(lambda: ckpt._saver.pool.num_bytes >= 8 * MIB)
        stepped(optimizer)  # which begins with the state that the first one has made
        until(lambda: ckpt._saver.pool.num_bytes >= 24 * MIB)
        assert not gate_of(optimizer)._pending
        num_made = len(made)
        ckpt.save({"optimizer": optimizer.state_dict()}, step=1).result()
        assert len(made) <= num_made + 1  # for the scalars, and for the archive's index


def test_after_a_restore_the_first_step_takes_no_more_memory(tmp_path, made):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(8 * MIB // 4))], momentum=0.9)
    stepped(optimizer)
    with open_run(tmp_path, guard=optimizer, segment_bytes=4 * MIB) as ckpt:
        ckpt.restore({"optimizer": optimizer, "p": optimizer.param_groups[0]["params"]})
        until(lambda: ckpt._saver.pool.num_bytes >= 20 * MIB)  # with the index of the archive
        num_made = len(made)
        with recorded(ckpt._saver.pool, "reserve") as reserves:
            stepped(optimizer)
            until(lambda: reserves)
        assert not gate_of(optimizer)._pending
        assert len(made) == num_made


def test_a_guard_that_cannot_be_looked_at_steps_and_is_left_alone(tmp_path, monkeypatch):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(4))], lr=1.0)
    calls = []

    def fails(saver: Saver, values: list[object]) -> None:
        calls.append(values)
        raise MemoryError

    monkeypatch.setattr(Saver, "expect", fails)
    with open_run(tmp_path, guard=optimizer):
        for _ in range(3):
            stepped(optimizer)

    assert len(calls) == 2
    assert optimizer.param_groups[0]["params"][0].tolist() == [-2.0] * 4


def test_steps_that_are_captured_into_a_graph_show_nothing(tmp_path, monkeypatch):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(MIB))])
    with open_run(tmp_path, guard=optimizer) as ckpt:
        with monkeypatch.context() as capturing:
            capturing.setattr(guard, "is_capturing", lambda: True)
            for _ in range(3):
                stepped(optimizer)
            assert gate_of(optimizer)._pending
            assert ckpt._saver.pool.num_bytes == 0
        stepped(optimizer)
        until(lambda: ckpt._saver.pool.num_bytes >= 4 * MIB)


def test_a_guard_keeps_neither_its_checkpointer_nor_its_optimizers_alive(tmp_path):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(4))])
    ckpt = open_run(tmp_path, guard=optimizer)
    ckpt.close()
    saver = weakref.ref(ckpt._saver)
    del ckpt
    gc.collect()
    assert saver() is None
    stepped(optimizer)
    assert not gate_of(optimizer)._pending

    with open_run(tmp_path, guard=optimizer) as ckpt:
        gone = weakref.ref(optimizer)
        del optimizer, ckpt
    gc.collect()
    assert gone() is None


# --- a restore ---------------------------------------------------------------------------------------------------


def test_a_restore_reads_through_the_pool_and_leaves_it_warm(tmp_path, made):
    state = state_of(40)
    wanted = {name: tensor.clone() for name, tensor in state.items()}
    with open_run(tmp_path, segment_bytes=32 * MIB) as ckpt:
        ckpt.save(state, step=1).result()
    for tensor in state.values():
        tensor.zero_()
    made.clear()
    with open_run(tmp_path, segment_bytes=32 * MIB) as ckpt:
        assert ckpt.restore(state) == 1
        assert set(made) == {4 * MIB, 32 * MIB}  # the first block is read before the size of anything is known
        until(lambda: ckpt._saver.pool.num_bytes >= 64 * MIB)
        num_made = len(made)
        ckpt.save(state, step=2).result()
        assert len(made) == num_made  # the first save has found all of its memory
    assert all(torch.equal(state[name], wanted[name]) for name in wanted)


def test_small_segments_are_no_buffers_and_the_restore_has_its_own(tmp_path, made):
    state = state_of(20)
    with open_run(tmp_path, segment_bytes=4 * MIB) as ckpt:
        ckpt.save(state, step=1).result()
        made.clear()
        ckpt.restore(state)
        assert fill.READ_BYTES in made
        assert_equal = torch.arange(20 * MIB // 4, dtype=torch.int32)
        assert torch.equal(state["w"], assert_equal)


def test_where_nothing_is_committed_the_memory_is_taken_all_the_same(tmp_path):
    with open_run(tmp_path) as ckpt:
        assert ckpt.restore(state_of(40)) is None
        until(lambda: ckpt._saver.pool.num_bytes >= 40 * MIB)
        assert ckpt.steps() == []


def test_the_first_save_leaves_memory_for_all_of_the_next_however_little_it_needed_at_once(tmp_path):
    with open_run(tmp_path) as ckpt:
        ckpt.save(state_of(160), step=1).result()
        until(lambda: ckpt._saver.pool.num_bytes >= 160 * MIB)


def test_a_save_under_way_keeps_its_memory_while_another_step_is_restored(tmp_path):
    state = state_of(30)
    with open_run(tmp_path, host_bytes=16 * MIB) as ckpt:
        ckpt.save(state, step=1).result()
        ckpt.save(state, step=2)
        assert ckpt.restore(state_of(30), step=1) == 1
        ckpt.wait()
        assert ckpt.steps() == [1, 2]


def test_a_checkpointer_that_closes_takes_no_more(tmp_path, monkeypatch):
    gate, real = Gate(), HostBuffer.touch

    def touch(self: HostBuffer) -> None:
        gate.passed()
        real(self)

    monkeypatch.setattr(HostBuffer, "touch", touch)
    ckpt = open_run(tmp_path)
    ckpt.restore(state_of(100))
    gate.wait_reached()
    ckpt.close()
    gate.open()
    until(lambda: ckpt._saver.pool.num_bytes == 0)


def test_a_state_that_cannot_be_saved_is_restored_all_the_same(tmp_path):
    with open_run(tmp_path) as ckpt:
        ckpt.save({"w": torch.ones(3)}, step=1).result()
        live = {"w": torch.zeros(3), "odd": torch.ones(3, device="meta")}
        assert ckpt.restore(live, strict=False) == 1
        assert live["w"].tolist() == [1, 1, 1]


def test_a_process_ends_while_memory_is_still_taken(tmp_path, nursery):
    script = """
    import sys, torch, async_ckpt
    ckpt = async_ckpt.AsyncCheckpointer(sys.argv[1])
    ckpt.restore({"w": torch.empty(1 << 30, dtype=torch.uint8)})
    """
    assert nursery.out_of(script, tmp_path) == ""


@pytest.mark.skipif(not hasattr(__import__("os"), "fork"), reason="forks as POSIX has them")
def test_a_forked_child_restores_without_its_parents_memory(tmp_path, nursery):
    script = """
    import os, sys, children, torch, async_ckpt, warnings
    children.forks_on_purpose()
    warnings.filterwarnings("ignore", "no step can be saved")  # by the child, whose parent lives
    state = {"w": torch.arange(5_000_000)}
    ckpt = async_ckpt.AsyncCheckpointer(sys.argv[1])
    ckpt.save(state, step=1).result()
    child = os.fork()
    if child == 0:
        state["w"].zero_()
        assert async_ckpt.AsyncCheckpointer(sys.argv[1]).restore(state) == 1
        print(int(state["w"][-1]), flush=True)
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """
    assert nursery.out_of(script, tmp_path) == "4999999\n0\n"


def test_the_state_is_not_held_by_what_is_done_in_the_background(tmp_path):
    with open_run(tmp_path) as ckpt:
        state = state_of(10)
        ckpt.restore(state)
        until(lambda: ckpt._saver.pool.num_bytes >= 10 * MIB)
        tensor = weakref.ref(state["w"])
        del state

        def is_gone() -> bool:
            gc.collect()
            return tensor() is None

        until(is_gone)
    async_ckpt.release()
