"""The memory behind a deferred tensor: what is copied is of the instant, or the save fails; the process never ends.

Copies are made where a test says so: on this thread, by `Staged.copy`, and tests act between two segments.
"""

import ctypes
import errno
import itertools
import mmap
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from accelerators import Simulated
from racing import PATIENCE
from scripted_disk import scripted
from states import MIB, SEGMENT, open_run

from async_ckpt import TornSnapshotError
from async_ckpt.core.format.layout import cut, slices
from async_ckpt.core.host import pool
from async_ckpt.core.host.pool import Lease, SegmentPool
from async_ckpt.core.host.threads import Crew
from async_ckpt.core.spec import TensorSpec
from async_ckpt.core.staging import device as device_module
from async_ckpt.core.staging.filler import StagingHost
from async_ckpt.core.staging.guard import deferrable
from async_ckpt.core.staging.host_copy import BufferPool, HostCopy
from async_ckpt.core.staging.snapshot import Snapshot
from async_ckpt.core.staging.tensors import SourceTensors
from async_ckpt.core.timing import monotonic

# The allocator gives memory back to the system when a tensor of more than 32 MiB is freed, and may keep that of others.
LARGE_MIB = 36
# The largest tensor that the call copies itself.
SMALL = 64 * 1024


class HeldCrew(Crew):
    """Holds what happens after `begin`, and runs it on the thread that releases it."""

    def __init__(self) -> None:
        super().__init__("held", 1)
        self._held: list[Callable[[], None]] = []
        self.num_now = 0  # tasks that the caller waited for

    def submit(self, task: Callable[[], None], refused: Any = None) -> None:
        if task.__name__ == "_fill_later":
            self._held.append(task)
        else:
            self.num_now += 1
            task()

    def release(self) -> None:
        while self._held:
            self._held.pop()()


class Staged:
    """A guarded snapshot of some tensors, begun; nothing that is deferred is copied before `copy` is called."""

    num_tail = 0

    def __init__(self, tensors: list[torch.Tensor], optimizer: torch.optim.Optimizer):
        specs = [TensorSpec((f"t{i}",), "uint8", (t.nbytes,)) for i, t in enumerate(tensors)]
        sizes = [spec.num_bytes for spec in specs]
        extents = [(sum(sizes[:i]), n, i) for i, n in enumerate(sizes)]
        self.crew = HeldCrew()
        self.image = bytearray(sum(sizes))
        self._between: dict[int, Callable[[], None]] = {}
        self._extents = extents
        source = SourceTensors(specs, tensors, deferred=deferrable((optimizer,), tensors), copies_small=True)
        self.snapshot = Snapshot(
            source,
            slices(sum(sizes), SEGMENT, cut(extents, SEGMENT), ()),
            self,
            StagingHost(SegmentPool(SEGMENT, max_bytes=64 * SEGMENT), self.crew.submit, monotonic),
            optimizers=[optimizer],
        )
        self.snapshot.begin()
        for device in source.devices.values():
            device.enqueue = self._then_act(device.enqueue)
        assert not self.snapshot.completion.done(), self.snapshot.completion.exception()

    def check(self) -> None:
        """The save never fails elsewhere."""

    def put(self, number: int, lease: Lease) -> None:
        part = self.image[number * SEGMENT : (number + 1) * SEGMENT]
        self.image[number * SEGMENT : (number + 1) * SEGMENT] = lease.segment.view[: len(part)]
        lease.release()
        self._after_segment(number)

    def _then_act(self, enqueue: Callable[..., Any]) -> Callable[..., Any]:
        numbers = itertools.count()

        def enqueue_and_act(*arguments: Any) -> Any:
            event = enqueue(*arguments)
            self._after_segment(next(numbers))
            return event

        return enqueue_and_act

    def _after_segment(self, number: int) -> None:
        self._between.pop(number, lambda: None)()

    def after_segment(self, number: int, act: Callable[[], None]) -> None:
        """When this segment is copied, or its copy enqueued, and the next one is not."""
        self._between[number] = act

    def copy(self) -> BaseException | None:
        """Have everything copied; what the snapshot ended with."""
        self.crew.release()
        return self.snapshot.completion.exception(PATIENCE)

    def bytes_of(self, number: int) -> bytes:
        at, length, _ = self._extents[number]
        return bytes(self.image[at : at + length])


class Place:
    """Where the tensors of a test are. Calling it begins a guarded snapshot of some."""

    def __init__(self, sim: Simulated | None = None) -> None:
        self.sim = sim
        self.device = "cpu" if sim is None else "sim"

    def __call__(self, tensors: list[torch.Tensor], optimizer: torch.optim.Optimizer) -> Staged:
        return Staged(tensors, optimizer)

    def parameter(self, mib: int = LARGE_MIB, seed: int = 0) -> torch.nn.Parameter:
        return parameter(mib, seed, self.device)

    def full(self, value: float) -> torch.Tensor:
        return torch.full((LARGE_MIB * MIB // 4,), value, device=self.device)

    def may_race(self) -> None:
        """What is torn was written to and read at one time."""
        if self.sim is not None:
            self.sim.may_race = True

    def resize(self, tensor: torch.Tensor, num_bytes: int) -> None:
        if self.sim is None:
            tensor.untyped_storage().resize_(num_bytes)
        else:
            self.may_race()
            self.sim.sim.resize(tensor, num_bytes)


@pytest.fixture(autouse=True)
def one_copy_a_segment(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that something can be done between the copies."""
    monkeypatch.setattr(pool, "MAX_RUN_BYTES", SEGMENT)


@pytest.fixture(params=["host", "early", "late"])
def staged(request) -> Iterator[Place]:
    if request.param == "host":
        yield Place()
        return
    made = Simulated(request.param)
    with made.here():
        yield Place(made)
    made.assert_in_order()


def parameter(mib: int = LARGE_MIB, seed: int = 0, device: str = "cpu") -> torch.nn.Parameter:
    made = torch.arange(mib * MIB // 4, dtype=torch.float32).add_(1.5 + seed).to(device)
    return torch.nn.Parameter(made, requires_grad=False)


def sgd(*parameters: torch.nn.Parameter) -> torch.optim.SGD:
    return torch.optim.SGD(parameters, lr=1.0)


def bytes_of(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.detach().clone().cpu().numpy())  # a storage that numpy sees cannot be resized


def assert_torn(error: BaseException | None, *names: str) -> None:
    assert isinstance(error, TornSnapshotError)
    assert error.names == names
    assert all(name in str(error) for name in names)


# What a state may have of a parameter; `state_dict` gives what is detached.
SAVED_AS: dict[str, Callable[[torch.nn.Parameter], torch.Tensor]] = {
    "the parameter": lambda p: p,
    "detached": lambda p: p.detach(),
    "its data": lambda p: p.data,
}


# --- small tensors beside them ----------------------------------------------------------------------------------


def waits_beside_tensors_of(staged: Place, sizes: list[int]) -> int:
    """How often the call waits if such tensors are beside a parameter. All are saved as they were at the call."""
    p = staged.parameter()
    others = [torch.full((size,), 1 + i % 250, dtype=torch.uint8) for i, size in enumerate(sizes)]
    want = [bytes_of(tensor) for tensor in (p, *others)]
    made = staged([p, *others], sgd(p))
    for tensor in others:
        tensor.zero_()

    assert made.copy() is None
    assert [made.bytes_of(number) for number in range(len(want))] == want
    return made.crew.num_now


@pytest.mark.parametrize("sizes", [[4], [0, 4, 1], [1, SMALL, 0, 7], [4] * 1000, [SMALL] * 32], ids=len)
def test_the_call_copies_small_tensors_itself_and_waits_for_no_thread(staged, sizes):
    assert waits_beside_tensors_of(staged, sizes) == 0


@pytest.mark.parametrize("sizes", [[SMALL + 1], [4] * 1025, [SMALL] * 33, [SMALL, SMALL + 1, 4]], ids=len)
def test_tensors_that_are_not_small_or_too_many_may_change_right_after_the_call_too(staged, sizes):
    assert waits_beside_tensors_of(staged, sizes) == 1


@pytest.mark.parametrize(
    "of", [lambda m: m[:, :2], lambda m: m.conj(), lambda m: m.conj().imag], ids=["strided", "conjugated", "negated"]
)
def test_small_tensors_that_are_not_dense_may_change_right_after_the_call_too(of):
    p, matrix = parameter(), torch.arange(9.0).reshape(3, 3) * (1 + 2j)
    small = of(matrix)
    want = bytes_of(small.resolve_conj().resolve_neg().contiguous())
    made = Staged([p, small], sgd(p))
    matrix.zero_()

    assert made.copy() is None
    assert made.bytes_of(1) == want


# --- another tensor in its place --------------------------------------------------------------------------------


def test_the_data_of_a_parameter_may_be_replaced_and_what_is_copied_is_the_instants(staged):
    p = staged.parameter()
    want = bytes_of(p)
    made = staged([p], sgd(p))
    p.data = torch.full_like(p, 9.0)

    assert made.copy() is None
    assert made.bytes_of(0) == want


@pytest.mark.parametrize("staged", ["early", "late"], indirect=True)
def test_a_parameter_may_move_to_another_device_before_it_is_copied(staged):
    p = staged.parameter()
    want = bytes_of(p)
    made = staged([p], sgd(p))
    p.data = torch.full(p.shape, 9.0, device="sim:1")

    assert made.copy() is None
    assert made.bytes_of(0) == want


def test_the_data_may_be_replaced_by_nothing_and_the_old_memory_stays_until_it_is_copied(staged):
    p = staged.parameter()
    want = bytes_of(p)
    made = staged([p], sgd(p))
    p.data = torch.empty(0, device=staged.device)
    others = [staged.full(7.0) for _ in range(4)]  # would take the memory, were it free

    assert made.copy() is None
    assert made.bytes_of(0) == want
    assert others


@pytest.mark.parametrize("of", SAVED_AS.values(), ids=SAVED_AS)
def test_a_write_to_what_a_parameter_was_replaced_by_tears_nothing(staged, of):
    p = staged.parameter()
    want = bytes_of(p)
    made = staged([of(p)], sgd(p))
    p.data = torch.full_like(p, 9.0)
    with torch.no_grad():
        p.add_(1)

    assert made.copy() is None
    assert made.bytes_of(0) == want


def test_a_write_to_the_memory_before_it_is_replaced_is_found_by_its_bytes(staged):
    p = staged.parameter()
    staged.may_race()
    made = staged([p], sgd(p))
    p.add_(1)
    p.data = torch.full_like(p, 9.0)

    assert_torn(made.copy(), "t0")


@pytest.mark.parametrize("of", SAVED_AS.values(), ids=SAVED_AS)
def test_a_write_to_one_item_alone_is_found_by_the_version_while_the_parameter_is_where_it_was(staged, of):
    p = staged.parameter()
    staged.may_race()
    made = staged([of(p)], sgd(p))
    p[1] = 7.0  # no sample meets it

    assert_torn(made.copy(), "t0")


def test_a_write_through_another_view_than_the_optimizers_is_found_by_its_version(staged):
    p = staged.parameter()
    view = p.data
    staged.may_race()
    made = staged([view], sgd(p))
    view[1] = 7.0

    assert_torn(made.copy(), "t0")


def test_parameters_may_be_swapped_while_they_are_copied(staged):
    p, other = staged.parameter(), staged.parameter(seed=1)
    want = bytes_of(p)
    made = staged([p], sgd(p))
    torch.utils.swap_tensors(p, other)
    with torch.no_grad():
        p.add_(1)

    assert made.copy() is None
    assert made.bytes_of(0) == want


def test_a_conjugated_view_of_a_parameter_is_copied_at_once():
    p = torch.nn.Parameter(torch.randn(MIB, dtype=torch.complex64))

    assert deferrable((sgd(p),), [p.detach().conj(), p]).keys() == {1}


# --- a storage that loses its memory ------------------------------------------------------------------------------


def resized(num_bytes: int) -> Callable[[torch.nn.Parameter], None]:
    def resize(p: torch.nn.Parameter) -> None:
        p.untyped_storage().resize_(num_bytes)

    return resize


RESIZES = {"freed": 0, "smaller": 4096, "larger": 2 * LARGE_MIB * MIB}


@pytest.mark.parametrize("num_bytes", RESIZES.values(), ids=RESIZES)
def test_a_storage_that_is_resized_before_it_is_copied_fails_the_snapshot_by_name(staged, num_bytes):
    p, intact = staged.parameter(), staged.parameter(2)
    made = staged([intact, p], sgd(p, intact))
    staged.resize(p, num_bytes)

    assert_torn(made.copy(), "t1")
    assert p.untyped_storage().nbytes() == num_bytes  # and nobody has given it memory again


@pytest.mark.parametrize("num_bytes", RESIZES.values(), ids=RESIZES)
@pytest.mark.parametrize("number", [1, LARGE_MIB * MIB // SEGMENT - 1, LARGE_MIB * MIB // SEGMENT])
def test_a_storage_that_is_resized_at_any_time_never_ends_the_process(staged, num_bytes, number):
    """At last when the tensor is copied as a whole, and others are not."""
    p, q = staged.parameter(), staged.parameter(8)
    made = staged([p, q], sgd(p, q))
    made.after_segment(number, lambda: staged.resize(p, num_bytes))

    assert_torn(made.copy(), "t0")


def test_a_storage_that_is_resized_when_everything_is_copied_harms_nothing(staged):
    p = staged.parameter()
    want = bytes_of(p)
    made = staged([p], sgd(p))
    assert made.copy() is None
    staged.resize(p, 0)

    assert made.bytes_of(0) == want


def test_a_storage_that_loses_its_bytes_and_gets_memory_again_fails_the_snapshot(staged):
    p = staged.parameter()
    made = staged([p], sgd(p))
    staged.resize(p, 0)
    between = staged.full(7.0)  # takes the memory, or leaves it for the storage
    staged.resize(p, LARGE_MIB * MIB)
    p.data.fill_(7.0)  # as memory of others may hold; it counts no write

    assert_torn(made.copy(), "t0")
    assert between.numel()


def test_memory_that_is_another_tensors_meanwhile_is_not_committed(staged):
    p = staged.parameter()
    made = staged([p], sgd(p))
    staged.resize(p, 0)
    others = [staged.full(7.0) for _ in range(4)]

    assert_torn(made.copy(), "t0")
    assert others


def test_all_tensors_in_a_storage_that_is_freed_are_named(staged):
    flat = torch.randn(2 * MIB * LARGE_MIB // 4, device=staged.device)
    parts = [torch.nn.Parameter(part, requires_grad=False) for part in flat.split(MIB * LARGE_MIB // 4)]
    made = staged([*parts, flat.new_ones(3)], sgd(*parts))
    staged.resize(flat, 0)

    assert_torn(made.copy(), "t0", "t1")


def test_two_tensors_in_one_storage_are_copied_each(staged):
    flat = torch.randn(2 * MIB * LARGE_MIB // 4, device=staged.device)
    parts = [torch.nn.Parameter(part, requires_grad=False) for part in flat.split(MIB * LARGE_MIB // 4)]
    want = [bytes_of(part) for part in parts]
    made = staged(list(parts), sgd(*parts))
    for part in parts:
        part.data = torch.empty(0, device=staged.device)
    del flat

    assert made.copy() is None
    assert [made.bytes_of(0), made.bytes_of(1)] == want


def test_a_save_of_which_a_storage_is_freed_fails_and_the_next_one_commits(tmp_path):
    p = parameter(40)
    with open_run(tmp_path, host_bytes=16 * MIB) as ckpt, scripted(ckpt) as disk:
        disk.stop("write")
        handle = ckpt.save({"model": {"p": p}}, step=1, guard=sgd(p))
        assert not handle.staging_completion.done()
        p.untyped_storage().resize_(0)
        disk.release_all()
        assert_torn(handle.exception(), "model.p")

        p.data = parameter(40).data
        ckpt.save({"model": {"p": p}}, step=2, guard=sgd(p)).result()
        assert torch.equal(ckpt.load(2)["model"]["p"], p)
        assert ckpt.steps() == [2]


@pytest.fixture
def host_copy() -> Iterator[Callable[..., tuple[HostCopy, HeldCrew]]]:
    memory = BufferPool()

    def begin(tensors: Sequence[torch.Tensor], optimizer: torch.optim.Optimizer) -> tuple[HostCopy, HeldCrew]:
        crew = HeldCrew()
        names = [f"t{number}" for number in range(len(tensors))]
        made = HostCopy(tensors, names, optimizers=[optimizer], memory=memory, crew=crew)
        made.begin()
        assert not made.completion.done()
        return made, crew

    yield begin
    memory.release()


def test_a_host_copy_of_a_storage_that_is_freed_fails_by_name(host_copy):
    p, q = parameter(), parameter()
    made, crew = host_copy([p, q], sgd(p, q))
    q.untyped_storage().resize_(0)
    crew.release()

    assert_torn(made.completion.exception(), "t1")


@pytest.mark.parametrize(
    "other", [lambda p: torch.full_like(p, 9.0), lambda p: torch.empty(0)], ids=["others", "nothing"]
)
def test_a_host_copy_is_of_the_instant_when_the_data_is_replaced_and_written_to(host_copy, other):
    p = parameter()
    want = bytes_of(p)
    made, crew = host_copy([p], sgd(p))
    p.data = other(p)
    p.add_(1)
    crew.release()

    assert made.completion.exception() is None
    assert bytes_of(made.tensors[0]) == want


# --- on a device ------------------------------------------------------------------------------------------------


def test_memory_that_is_freed_while_its_copy_is_enqueued_is_found_afterwards(sim, monkeypatch):
    sim.may_race = True
    p = parameter(device="sim")
    made = Staged([p], sgd(p))
    (device,) = made.snapshot._source.devices.values()
    enqueue = device.enqueue

    def freed_meanwhile(*arguments: Any) -> Any:
        sim.sim.resize(p, 0)
        return enqueue(*arguments)

    monkeypatch.setattr(device, "enqueue", freed_meanwhile)

    assert_torn(made.copy(), "t0")


# --- the copy itself --------------------------------------------------------------------------------------------


def refuse(*_: object) -> int:
    ctypes.set_errno(errno.EPERM)
    return -1


@pytest.fixture(params=[refuse, None], ids=["refused", "not there"])
def no_kernel(request, monkeypatch) -> None:
    """The system does not copy for us."""
    monkeypatch.setattr(device_module, "_process_vm_writev", request.param)


@pytest.mark.usefixtures("no_kernel")
def test_where_the_system_does_not_copy_for_us_the_storage_is_looked_at_before_each_piece():
    p, q = parameter(), parameter(seed=1)
    want = bytes_of(p)
    made = Staged([p], sgd(p))
    assert made.copy() is None
    assert made.bytes_of(0) == want

    made = Staged([p, q], sgd(p, q))
    made.after_segment(1, lambda: p.untyped_storage().resize_(0))
    assert_torn(made.copy(), "t0")

    made = Staged([q, parameter()], sgd(q))
    made.after_segment(3, lambda: q.untyped_storage().resize_(0))  # only its sample is still to be taken
    assert_torn(made.copy(), "t0")


@pytest.mark.parametrize("num_bytes", RESIZES.values(), ids=RESIZES)
def test_a_storage_that_is_resized_just_after_a_piece_of_it_was_copied_is_found(monkeypatch, num_bytes):
    p = parameter()
    made = Staged([p], sgd(p))
    copy = device_module.copy_by_kernel

    def resized_meanwhile(*arguments: Any) -> Any:
        monkeypatch.undo()
        p.untyped_storage().resize_(num_bytes)
        return copy(*arguments)

    monkeypatch.setattr(device_module, "copy_by_kernel", resized_meanwhile)
    assert_torn(made.copy(), "t0")


linux = pytest.mark.skipif(device_module._process_vm_writev is None, reason="this system copies nothing for us")


@linux
def test_the_kernel_copies_until_the_first_page_that_cannot_be_read():
    page = mmap.PAGESIZE
    source, target = mmap.mmap(-1, 3 * page), bytearray(3 * page)
    source[:] = bytes(range(256)) * (3 * page // 256)
    begin = ctypes.addressof(ctypes.c_char.from_buffer(source))
    to = ctypes.addressof(ctypes.c_char.from_buffer(target))

    assert device_module.copy_by_kernel(to, begin + 1, 2 * page) == 2 * page
    assert target[: 2 * page] == source[1 : 2 * page + 1]
    no_access = ctypes.c_int(0)
    assert not ctypes.CDLL(None).mprotect(ctypes.c_void_p(begin + page), ctypes.c_size_t(2 * page), no_access)
    assert device_module.copy_by_kernel(to, begin, 3 * page) == page
    assert device_module.copy_by_kernel(to, begin + page, 1) == 0
    assert device_module.sample_by_kernel(to, torch.tensor([begin + 5, begin + 7, begin + page])) == 2
    assert target[:2] == bytes([5, 7])
