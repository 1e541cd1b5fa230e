"""What a save needs of a device beside its copies: memory, page-locked memory, kernels, room in the launch queue."""

import gc
from collections.abc import Iterator

import pytest
import torch
from accelerators import Simulated
from states import MIB, open_run

import async_ckpt
from async_ckpt import TornSnapshotError
from async_ckpt.core.host.threads import is_library_thread
from async_ckpt.core.staging import guard as guard_module
from async_ckpt.core.staging import side_stream
from async_ckpt.core.staging.device import Alias

ITEMS = MIB // 4
KIB = 1024


@pytest.fixture
def fresh(sim: Simulated, monkeypatch: pytest.MonkeyPatch) -> Simulated:
    """The simulated device in a process that has made no side stream yet."""
    monkeypatch.setattr(side_stream.side_of, "_made", {})
    return sim


def parameters(number: int, items: int) -> tuple[list[torch.nn.Parameter], torch.optim.Optimizer]:
    made = [torch.nn.Parameter(torch.full((items,), float(n), device="sim")) for n in range(number)]
    return made, torch.optim.SGD(made, lr=1.0)


# --- page-locked memory -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [32, 200])
def test_a_guarded_first_save_page_locks_nothing_after_prewarm(tmp_path, fresh, monkeypatch, number):
    monkeypatch.setattr(guard_module, "DEFERRED_BYTES", 64 * KIB)
    made, optimizer = parameters(number, 16 * KIB)
    with open_run(tmp_path, guard=optimizer) as ckpt:
        ckpt.prewarm({"p": made})
        before = fresh.sim.num_registrations
        ckpt.save({"p": made}, step=1).result()

        assert fresh.sim.num_registrations == before


def test_memory_is_page_locked_on_threads_of_the_library_alone(tmp_path, fresh, monkeypatch):
    """Which have told the driver to leave captures of graphs alone."""
    runtime = type(fresh.module.simrt())
    register, on = runtime.simHostRegister, []

    def noted(self, *arguments: int) -> int:
        on.append(is_library_thread())
        return register(self, *arguments)

    monkeypatch.setattr(runtime, "simHostRegister", noted)
    made, optimizer = parameters(2, ITEMS)
    with open_run(tmp_path / "cold", guard=optimizer) as ckpt:
        ckpt.save({"p": made}, step=1).result()
    monkeypatch.setattr(side_stream.side_of, "_made", {})
    with open_run(tmp_path / "warm", guard=optimizer) as ckpt:
        ckpt.prewarm({"p": made})
    with open_run(tmp_path / "not guarded") as ckpt:
        ckpt.save({"p": made}, step=1).result()
    with async_ckpt.snapshot({"w": torch.ones(3 * MIB + 1, device="sim")}) as held:
        held.completion.result()

    assert on
    assert all(on)


# --- a device that is full ----------------------------------------------------------------------------------------


def fill_up(fresh: Simulated) -> None:
    gc.collect()  # or what others have left could be freed later
    fresh.sim.settle()
    memory = fresh.sim.memories[0]
    memory.limit_bytes = memory.lent_bytes


def many_small() -> list[torch.Tensor]:
    return [torch.full((100 + n,), 3.0, device="sim") for n in range(50)]


def test_a_device_that_is_full_is_asked_for_scratch_once(tmp_path, fresh):
    small, memory = many_small(), fresh.sim.memories[0]
    fill_up(fresh)
    with open_run(tmp_path) as ckpt:
        ckpt.save(small, step=1).result()
        asked = memory.num_allocations
        for step in (2, 3):
            ckpt.save(small, step=step).result()

        assert memory.num_allocations == asked
        assert all(bool((t == 3).all()) for t in ckpt.load(3))


@pytest.mark.parametrize("how", ["prewarm", "report"])
def test_a_device_that_has_memory_again_gives_scratch(tmp_path, fresh, how, monkeypatch):
    small, memory = many_small(), fresh.sim.memories[0]
    fill_up(fresh)
    if how == "report":
        free = lambda _: ((memory.limit_bytes or 1 << 30) - memory.lent_bytes, 1 << 30)  # noqa: E731
        monkeypatch.setattr(fresh.module, "mem_get_info", free, raising=False)
    with open_run(tmp_path) as ckpt:
        ckpt.save(small, step=1).result()
        memory.limit_bytes = None
        if how == "prewarm":
            ckpt.prewarm(small)
        del fresh.sim.copies[:]
        ckpt.save(small, step=2).result()

        assert len(fresh.sim.copies) == 1


# --- the launch queue -----------------------------------------------------------------------------------------------


@pytest.fixture
def longest(fresh: Simulated, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The most work that lay in a side stream at one time."""
    scheduler, most = fresh.sim.scheduler, [0]
    put = scheduler._put

    def noted(queue, *work) -> None:
        put(queue, *work)
        if not queue.of_training:
            most[0] = max(most[0], len(queue.work))

    monkeypatch.setattr(scheduler, "_put", noted)
    return most


def test_a_tensor_that_is_not_dense_takes_two_operations_for_each_32_mib(tmp_path, fresh):
    transposed = torch.arange(16 * MIB, dtype=torch.int32).to("sim").view(1024, -1).t()  # 64 MiB
    with open_run(tmp_path) as ckpt:
        ckpt.prewarm({"w": transposed})
        del fresh.sim.copies[:]
        ckpt.save({"w": transposed}, step=1).result()
        operations = len(fresh.sim.copies)

        assert torch.equal(ckpt.load(1)["w"], transposed.cpu())
    assert operations <= 2 * 2 + 4  # and some where the archive is cut


def test_small_tensors_that_are_not_dense_cross_the_bus_together(tmp_path, fresh):
    views = [torch.arange(3 * (50 + n)).to("sim")[::3] for n in range(100)]
    with open_run(tmp_path) as ckpt:
        ckpt.prewarm(views)
        del fresh.sim.copies[:]
        ckpt.save(views, step=1).result()
        across = [copy for copy in fresh.sim.copies if copy[1] == "cpu"]

        assert all(torch.equal(a, b.cpu()) for a, b in zip(ckpt.load(1), views, strict=True))
    assert len(across) == 1


@pytest.mark.parametrize("sim", ["late"], indirect=True)
def test_the_launch_queue_is_never_full_however_many_tensors_there_are(tmp_path, longest, fresh):
    views = [torch.full((2 * (MIB // 16 + 4),), float(n), device="sim")[::2] for n in range(1200)]
    with open_run(tmp_path) as ckpt:
        fresh.busy()
        ckpt.save(views, step=1).result()
        assert all(bool((t == n).all()) for n, t in enumerate(ckpt.load(1)))

    assert 0 < longest[0] < 1000


# --- kernels --------------------------------------------------------------------------------------------------------


def test_prewarm_launches_every_kind_of_operation_that_a_save_enqueues(tmp_path, fresh, monkeypatch):
    """Or a kernel would be loaded at its first launch, behind one of the training that runs."""
    launched: set[str] = set()
    scheduler = fresh.sim.scheduler
    enqueue = scheduler.enqueue

    def noted(queue, does, accesses=(), told="") -> None:
        if not queue.of_training and not told.startswith("reuse"):
            launched.add(told)
        enqueue(queue, does, accesses, told)

    monkeypatch.setattr(scheduler, "enqueue", noted)
    made, optimizer = parameters(3, ITEMS)
    complex_one = torch.full((5, 7), 1 + 2j, dtype=torch.complex64).to("sim")
    state = {
        "p": made,
        "small": many_small(),
        "strided": [torch.ones(100, dtype=dtype, device="sim")[::2] for dtype in (torch.float32, torch.uint8)],
        "views": [torch.conj(complex_one), torch._neg_view(torch.ones(5, device="sim")), torch.conj(complex_one).imag],
    }
    with open_run(tmp_path, guard=optimizer) as ckpt:
        ckpt.prewarm(state)
        by_prewarm = set(launched)
        ckpt.save(state, step=1).result()

        assert launched == by_prewarm
        assert len(launched) > 1
        loaded = ckpt.load(1)["views"]
    assert [t.flatten()[0].item() for t in loaded] == [1 - 2j, -1, -2]


# --- memory that goes away --------------------------------------------------------------------------------------------


def test_memory_that_is_gone_by_its_turn_is_not_read_and_the_tensor_is_named(tmp_path, fresh, monkeypatch):
    made, optimizer = parameters(3, ITEMS)
    made.append(torch.nn.Parameter(torch.ones(3 * ITEMS // 2, device="sim")))
    optimizer.add_param_group({"params": made[3:]})
    first = made[0].data_ptr()
    copy = Alias.part

    def freed_meanwhile(self: Alias, begin: int, length: int, stride: int = 1) -> torch.Tensor:
        if self.address == first and stride == 1 and made[3].untyped_storage().nbytes():
            fresh.sim.resize(made[3], 0)  # while the first is being enqueued
        return copy(self, begin, length, stride)

    monkeypatch.setattr(Alias, "part", freed_meanwhile)
    with open_run(tmp_path, guard=optimizer) as ckpt:
        ckpt.prewarm({"p": made})
        with pytest.raises(TornSnapshotError, match=r"p\.3\b"):
            ckpt.save({"p": made}, step=1).result()

    copied = [num_bytes for *_, num_bytes in fresh.sim.copies if num_bytes > 64 * KIB]
    assert copied == [MIB] * 3
