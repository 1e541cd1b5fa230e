"""Which accelerator is asked, by which names; and what becomes of tensors on one that cannot copy beside the training."""

import logging
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import simulated
import torch
from states import MIB, open_run

import async_ckpt
from async_ckpt import RngState
from async_ckpt.core import backends
from async_ckpt.core.backends import backend as backend_module
from async_ckpt.core.backends.backend import UNSUPPORTED, Backend
from async_ckpt.core.backends.by_torch import backend_by_torch
from async_ckpt.core.host import memory as memory_module
from async_ckpt.core.host import pool as pool_module
from async_ckpt.core.host.pool import SegmentPool
from async_ckpt.core.loading import fill as fill_module
from async_ckpt.core.saving import kept_memory
from async_ckpt.core.spec import PAGE_BYTES
from async_ckpt.core.staging import side_stream
from async_ckpt.core.staging.guard import deferrable

ITEMS = MIB // 4


@pytest.fixture
def poor(sim, monkeypatch) -> Iterator[Any]:
    """The device publishes no streams."""
    monkeypatch.delattr(simulated.Module, "Stream")
    backends._backend.cache_clear()
    yield sim
    backends._backend.cache_clear()


def test_a_device_of_any_name_is_asked_through_its_module(sim):
    tensor = torch.ones(3, device="sim:1")

    assert backends.device_of(tensor) == torch.device("sim:1")
    assert backends.device_of(torch.ones(3)) is None
    assert backends.device_of(torch.ones(3, device="meta")) is None
    assert backends.accelerator() == "sim"
    assert repr(backends.backend_of(tensor.device)) == "<Backend sim>"


def test_a_process_without_an_accelerator_has_none():
    assert backends.accelerator() is None
    assert backends.current_device() is None
    assert not backends.is_capturing()
    assert set(RngState().state_dict()) <= {"python", "numpy", "torch"}


def test_a_device_that_does_not_say_whether_it_is_in_use_is_asked_which_one_is_current(sim, monkeypatch):
    monkeypatch.delattr(simulated.Module, "is_initialized")

    assert backends.current_device() == torch.device("sim:0")


def test_tensors_of_a_device_without_streams_are_copied_while_save_waits_and_none_is_deferred(tmp_path, poor, caplog):
    p = torch.nn.Parameter(torch.full((2 * ITEMS,), 3.0, device="sim"))
    p.grad = torch.ones_like(p)
    optimizer = torch.optim.SGD([p], lr=1.0)
    state = {
        "p": p,
        "t": torch.full((40, 30), 3.0, device="sim").t(),
        "one": torch.tensor(3.0, device="sim:1"),
    }
    with caplog.at_level(logging.INFO, "async_ckpt"), open_run(tmp_path) as ckpt:
        assert deferrable((optimizer,), [p]) == {}
        for step in range(2):
            p.data.fill_(3.0)
            handle = ckpt.save(state, step=step, guard=optimizer)
            p.data.zero_()
            handle.result()
            assert all(bool((t == 3).all()) for t in ckpt.load(step).values())
        ckpt.restore(state, step=1)
        assert bool((p == 3).all())
        assert bool((ckpt.load(1, map_location="sim:1")["p"] == 3).all())
    assert [record.message for record in caplog.records if "torch.sim" in record.message] == [
        "torch.sim has no Stream: save waits while its tensors are copied, and guard= defers none of them"
    ]


def test_a_device_that_publishes_no_more_than_is_needed_is_copied_from_beside_the_training(tmp_path, sim, monkeypatch):
    for name in (
        "stream",
        "current_device",
        "get_rng_state",
        "is_initialized",
    ):
        monkeypatch.delattr(simulated.Module, name)
    p = torch.nn.Parameter(torch.full((4 * ITEMS,), 3.0, device="sim"))
    p.grad = torch.ones_like(p)
    optimizer = torch.optim.SGD([p], lr=1.0)
    state = {"p": p, "rng": RngState("verl")}
    with open_run(tmp_path, guard=optimizer) as ckpt:
        ckpt.prewarm(state)
        with sim.ahead():
            handle = ckpt.save(state, step=1)
            optimizer.step()
            assert not handle.staging_completion.done()
        handle.result()
        async_ckpt.wrap(torch.save)(state["p"], str(tmp_path / "p.pt")).result()
        loaded = ckpt.load(1)
    assert bool((loaded["p"] == 3).all())
    assert "sim" not in loaded["rng"]


@pytest.mark.parametrize(("kind", "lacks"), [("cuda", False), ("xpu", False), ("mps", True)])
def test_what_torch_publishes_of_each_maker_is_what_is_asked_for(kind, lacks):
    assert bool(Backend.lacks(torch.get_device_module(kind))) is lacks


def test_memory_is_page_locked_by_the_names_that_the_runtime_of_each_maker_has():
    called: list[tuple[Any, ...]] = []
    runtime = SimpleNamespace(
        npuHostRegister=lambda *arguments: called.append(arguments) or 0,
        npuHostUnregister=lambda *arguments: called.append(arguments) or 507899,
    )
    module = SimpleNamespace(npurt=lambda: runtime, device=simulated.Module().device)
    backend = Backend("npu", module)

    assert backend.register(4096, 8192, torch.device("sim:0")) == 0
    assert backend.unregister(4096, torch.device("sim:0")) == 507899
    assert called == [(4096, 8192, 2), (4096,)]


def test_each_device_has_one_stream_for_all_saves_and_one_for_all_loads(tmp_path, sim, monkeypatch):
    monkeypatch.setattr(side_stream.side_of, "_made", {})
    monkeypatch.setattr(fill_module._stream_of, "_made", {})
    before = len(sim.sim.scheduler.queues)
    with open_run(tmp_path, max_in_flight=2) as ckpt:
        for step in range(3):
            state = {where: torch.full((ITEMS,), 3.0, device=where) for where in ("sim:0", "sim:1")}
            ckpt.save(state, step=step)
        ckpt.wait()
        for where in ("sim:0", "sim:1", "sim:0"):
            ckpt.load(2, map_location=where)
        ckpt.restore(state)
    made = sim.sim.scheduler.queues[before:]

    assert sorted(queue.device for queue in made if not queue.of_training) == [0, 0, 1, 1]


def test_a_runtime_that_locks_no_memory_is_no_error():
    backend = Backend("other", SimpleNamespace(device=simulated.Module().device))

    assert backend.register(4096, 8192, torch.device("sim:0")) == UNSUPPORTED
    assert backend.bus_address(torch.device("sim:0")) is None
    assert not backend.is_capturing()


@pytest.mark.parametrize("keys", [None, "verl", "skyrl"])
def test_the_generators_of_any_accelerator_are_saved_under_its_name(sim, keys):
    state = RngState(keys).state_dict()
    drawn = torch.rand(4, device="sim")
    assert "sim" in state
    assert isinstance(state["sim"], list) is (keys is None)

    RngState(keys).load_state_dict(state)
    assert torch.equal(torch.rand(4, device="sim"), drawn)


def test_the_generators_of_an_accelerator_that_is_not_here_are_passed_over(sim):
    state = RngState().state_dict()
    sim.sim.is_here = False
    try:
        RngState().load_state_dict({k: v for k, v in state.items() if k != "sim"} | {"npu": state["sim"]})
    finally:
        sim.sim.is_here = True


def on_page(num_bytes: int) -> torch.Tensor:
    """Memory that begins on a page, as what a driver allocates."""
    memory = torch.zeros(num_bytes + PAGE_BYTES, dtype=torch.uint8)
    return memory[-memory.data_ptr() % PAGE_BYTES :][:num_bytes]


def test_where_no_memory_can_be_page_locked_torchs_allocator_gives_it(tmp_path, sim, monkeypatch):
    """As on XPU."""
    kept_memory.release()  # what others have left
    given = []

    def host_memory(self: Backend, num_bytes: int) -> torch.Tensor:
        given.append(on_page(num_bytes))
        return given[-1]

    monkeypatch.setattr(Backend, "host_memory", host_memory)
    registered = set(sim.sim.registered)  # by others, whose boxes may go meanwhile
    state = {"w": torch.full((3 * ITEMS,), 3.0, device="sim")}
    with open_run(tmp_path) as ckpt:
        ckpt.save(state, step=1).result()
        with async_ckpt.snapshot(state) as held:
            ckpt.save(held, step=2).result()
        assert all(bool((ckpt.load(step)["w"] == 3).all()) for step in (1, 2))
        assert all(segment.pinned for segment in ckpt._saver.pool._free)
    assert given
    assert registered.issuperset(sim.sim.registered)


# --- memory that torch's allocator gives --------------------------------------------------------------------------


@pytest.mark.parametrize("num_segments", [1, 5, 33])
def test_memory_of_torchs_allocator_is_asked_for_in_sizes_that_it_does_not_round_up(sim, monkeypatch, num_segments):
    asked: list[int] = []
    monkeypatch.setattr(backend_module, "page_locked", lambda num_bytes: asked.append(num_bytes) or on_page(num_bytes))
    xpu = Backend("xpu", sim.module)  # without a runtime of this name
    for module in (memory_module, pool_module):
        monkeypatch.setattr(module, "backend_of", lambda _: xpu)
    pool = SegmentPool(MIB)
    pool.admit(num_segments * MIB, least=num_segments)
    pool.reserve(num_segments, None, pin=torch.device("sim:0"))

    assert sum(asked) == num_segments * MIB
    assert all(num_bytes.bit_count() == 1 for num_bytes in asked)
    assert len(asked) <= 2
    pool.close()


@pytest.mark.parametrize("offset", [0, 64])
def test_page_locked_memory_begins_on_a_page_wherever_the_allocator_puts_it(monkeypatch, offset):
    asked: list[int] = []

    def empty(num_bytes: int, **_: Any) -> torch.Tensor:
        asked.append(num_bytes)
        return on_page(num_bytes + offset)[offset:]

    monkeypatch.setattr(backend_module.torch, "empty", empty)
    memory = backend_module.page_locked(8 * PAGE_BYTES)

    assert memory.data_ptr() % PAGE_BYTES == 0
    assert memory.numel() == 8 * PAGE_BYTES
    assert asked == [8 * PAGE_BYTES] + [9 * PAGE_BYTES] * (offset > 0)


# --- torch's own classes alone ------------------------------------------------------------------------------------


@pytest.fixture
def bare(sim, monkeypatch):
    """The simulated device as torch knows one that publishes no names of its own for streams."""

    def set_stream(stream: Any) -> None:
        sim.sim.thread.streams[stream.queue.device] = stream

    def set_device(index: int) -> None:
        sim.sim.thread.device = index

    module = SimpleNamespace(simrt=sim.module.simrt, is_available=sim.module.is_available)
    get = torch.get_device_module
    monkeypatch.setattr(torch, "get_device_module", lambda kind: module if str(kind) == "sim" else get(kind))
    monkeypatch.setattr(torch, "Stream", simulated.Stream)
    monkeypatch.setattr(torch, "Event", simulated.Event)
    monkeypatch.setattr(torch.accelerator, "current_stream", simulated.current_stream)
    monkeypatch.setattr(torch.accelerator, "set_stream", set_stream)
    monkeypatch.setattr(torch.accelerator, "current_device_index", sim.module.current_device)
    monkeypatch.setattr(torch.accelerator, "set_device_index", set_device)
    monkeypatch.setattr(side_stream.side_of, "_made", {})
    monkeypatch.setattr(fill_module._stream_of, "_made", {})
    backends._backend.cache_clear()
    yield sim
    backends._backend.cache_clear()


def test_an_accelerator_with_torchs_own_classes_alone_is_copied_beside_the_training(tmp_path, bare):
    p = torch.nn.Parameter(torch.full((4 * ITEMS,), 3.0, device="sim"))
    p.grad = torch.ones_like(p)
    optimizer = torch.optim.SGD([p], lr=1.0)
    state = {"p": p, "other": torch.full((ITEMS,), 5.0, device="sim:1")}
    with open_run(tmp_path, guard=optimizer) as ckpt:
        ckpt.prewarm(state)
        with bare.ahead():
            handle = ckpt.save(state, step=1)
            optimizer.step()
            assert not handle.staging_completion.done()
        handle.result()
        assert bool((p == 2).all())
        ckpt.restore(state)
    assert bool((p == 3).all())
    assert bool((state["other"] == 5).all())


def test_an_accelerator_whose_streams_are_all_the_same_has_no_backend(sim, monkeypatch):
    """As torch has it for the simulation, which gives it no streams: a new one is the current one."""
    module = SimpleNamespace(is_initialized=sim.module.is_initialized)

    assert backend_by_torch("sim", module) is None
    assert backend_by_torch("hpu", None) is None


def test_a_device_without_a_number_stands_for_any_of_its_kind(sim):
    tensor = torch.zeros(1, device="sim:1")

    assert backends.is_at(tensor, torch.device("sim"))
    assert backends.is_at(tensor, torch.device("sim:1"))
    assert not backends.is_at(tensor, torch.device("sim:0"))
    assert not backends.is_at(tensor, torch.device("cpu"))


def test_no_weak_reference_is_taken_to_an_event_of_torch(sim):
    """Those to the events of torch 2.11 on CUDA are left dangling, and the process crashes at its end."""
    device = torch.device("sim", 0)
    backend = backends.backend_of(device)
    for event in (backend.waiting_event(), backend.timing_event()):
        event.record(backend.current_stream(device))
        assert weakref.getweakrefcount(event._event) == 0
