"""Whole tensors on the host: the copies are the tensors of one instant, and their memory is used again."""

import gc
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from budgets import with_budget
from racing import Call, HeldCrew
from states import MIB, bits_of

from async_ckpt.core.host.threads import Crew
from async_ckpt.core.spec import DTYPES
from async_ckpt.core.staging.guard import deferrable
from async_ckpt.core.staging.host_copy import BufferPool, HostCopy


@pytest.fixture
def crew():
    made = Crew("test", 4)
    yield made
    made.stop()


@pytest.fixture
def memory():
    made = BufferPool()
    yield made
    made.release()


@pytest.fixture
def copy_of(memory, crew):
    """Begins a copy."""

    def begin(tensors: Sequence[torch.Tensor], optimizers: Sequence[Any] = (), by: Crew | None = None) -> HostCopy:
        names = [f"t{number}" for number in range(len(tensors))]
        made = HostCopy(tensors, names, optimizers=optimizers, memory=memory, crew=by or crew)
        made.begin()
        return made

    return begin


def raw(dtype: torch.dtype) -> torch.Tensor:
    """Random bytes, seen as this dtype."""
    data = torch.randint(0, 256, (6 * dtype.itemsize,), dtype=torch.uint8)
    return torch.empty(0, dtype=dtype).set_(data.untyped_storage(), 0, (2, 3), (3, 1))


big = torch.arange(100.0)
KINDS = {
    "plain": lambda: torch.randn(3, 4),
    "transposed": lambda: torch.randn(3, 4).t(),
    "strided": lambda: torch.randn(10)[::3],
    "offset": lambda: torch.randn(10)[4:7],
    "expanded": lambda: torch.randn(1, 4).expand(5, 4),
    "channels last": lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "0-dim": lambda: torch.tensor(5.0),
    "empty": lambda: torch.empty(0),
    "empty of shape": lambda: torch.empty(3, 0, 2),
    "empty view": lambda: torch.randn(4)[4:],
    "conj": lambda: torch.randn(3, dtype=torch.complex64).conj(),
    "neg": lambda: torch.randn(3, dtype=torch.complex64).conj().imag,
    "parameter": lambda: torch.nn.Parameter(torch.randn(3)),
    "frozen parameter": lambda: torch.nn.Parameter(torch.randn(3), requires_grad=False),
    "leaf": lambda: torch.randn(3, requires_grad=True),
    "not a leaf": lambda: torch.randn(3, requires_grad=True) * 2,
    "inference": lambda: inferred(),
    **{f"{name}": (lambda name=name: raw(getattr(torch, name))) for name in DTYPES if hasattr(torch, name)},
}


def inferred() -> torch.Tensor:
    with torch.inference_mode():
        return torch.randn(3)


@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_is_the_tensor_in_other_memory(copy_of, kind):
    tensor = KINDS[kind]()
    made = copy_of([tensor])
    made.completion.result()
    (copy,) = made.tensors

    assert type(copy) is type(tensor)
    assert (copy.dtype, copy.shape, copy.stride()) == (tensor.dtype, tensor.shape, tensor.stride())
    assert copy.storage_offset() == tensor.storage_offset()
    assert copy.requires_grad is tensor.requires_grad
    assert (copy.is_conj(), copy.is_neg()) == (tensor.is_conj(), tensor.is_neg())
    assert copy.untyped_storage().nbytes() == tensor.untyped_storage().nbytes()
    assert bytes(copy.untyped_storage()) == bytes(tensor.untyped_storage())
    assert not copy.is_inference()
    if tensor.numel():
        assert copy.data_ptr() != tensor.data_ptr()


def test_a_tensor_of_another_type_stays_one(copy_of):
    class Sub(torch.Tensor):
        pass

    tensor = torch.randn(3).as_subclass(Sub).requires_grad_()
    made = copy_of([tensor])
    made.completion.result()

    assert type(made.tensors[0]) is Sub
    assert made.tensors[0].requires_grad
    assert torch.equal(bits_of(made.tensors[0]), bits_of(tensor))


def test_what_shared_memory_shares_it_again_and_is_copied_once(copy_of):
    base = torch.randn(1000)
    made = copy_of([base, base[10:20], base.view(10, 100).t(), torch.randn(10)])
    made.completion.result()
    a, b, c, other = made.tensors
    a.fill_(7)

    assert made.num_bytes < 4000 + 512 + 512
    assert bool((b == 7).all())
    assert bool((c == 7).all())
    assert not bool((other == 7).any())


def test_storages_of_their_own_at_one_address_stay_apart_and_share_their_memory(copy_of):
    data = bytearray(64)
    first, second = torch.frombuffer(data, dtype=torch.uint8), torch.frombuffer(data, dtype=torch.uint8)
    made = copy_of([first, second, torch.empty(0), torch.empty(0)])
    made.completion.result()
    a, b, c, d = made.tensors

    assert a.untyped_storage()._cdata != b.untyped_storage()._cdata
    assert a.data_ptr() == b.data_ptr()
    assert made.num_bytes == 512
    assert c.untyped_storage()._cdata != d.untyped_storage()._cdata


def test_tensors_larger_than_a_segment_are_copied_whole(copy_of):
    tensors = [torch.randint(0, 256, (n,), dtype=torch.uint8) for n in (70 * MIB + 1, 3, 33 * MIB)]
    made = copy_of(tensors)
    made.completion.result()

    assert all(torch.equal(a, b) for a, b in zip(made.tensors, tensors, strict=True))


def test_no_tensors_are_no_copy(copy_of):
    made = copy_of([])

    assert made.completion.done()
    assert made.tensors == []


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, lambda: torch.device("meta")])
def test_the_mode_of_the_caller_does_not_show(copy_of, mode):
    tensor = torch.randn(3)
    with mode():
        made = copy_of([tensor, tensor[1:]])
    made.completion.result()

    assert made.tensors[0].device.type == "cpu"
    assert not made.tensors[0].is_inference()
    assert torch.equal(made.tensors[0], tensor)


# --- the guard -------------------------------------------------------------------------------------------------


def ones(mib: int = 2) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.ones(mib * MIB // 4))


def sgd(*params: torch.nn.Parameter) -> torch.optim.Optimizer:
    for p in params:
        p.grad = torch.ones_like(p)
    return torch.optim.SGD(params, lr=1.0)


def test_a_guarded_parameter_is_copied_later_and_its_optimizer_waits(copy_of, crew):
    first, second, other = ones(), ones(), torch.ones(MIB)
    optimizers = [sgd(first), sgd(second)]
    held = HeldCrew(crew)
    made = copy_of([first, second, other], optimizers, held)
    assert not made.completion.done()

    other.zero_()
    steps = [Call(optimizer.step) for optimizer in optimizers]
    for step in steps:
        step.wait_until_inside("hold")
    held.release()
    for step in steps:
        step.outcome()
    made.completion.result()

    assert all(bool((copy == 1).all()) for copy in made.tensors)
    assert bool((first == 0).all())


@pytest.mark.parametrize("order", [1, -1])
def test_a_storage_of_which_only_a_part_is_guarded_is_copied_at_once(copy_of, crew, order):
    flat = torch.ones(2 * MIB)
    first, second = torch.nn.Parameter(flat[:MIB]), torch.nn.Parameter(flat[MIB:])
    tensors = [first, second, flat][::order]
    made = copy_of(tensors, [sgd(first)], HeldCrew(crew))

    assert made.completion.done()
    flat.zero_()
    assert all(bool((copy == 1).all()) for copy in made.tensors)


def test_all_of_a_flat_buffer_that_is_a_parameter_itself_is_guarded(copy_of, crew):
    flat = ones()
    held = HeldCrew(crew)
    made = copy_of([flat.detach()[:10], flat], [sgd(flat)], held)

    assert not made.completion.done()
    held.release()
    made.completion.result()


def test_what_only_begins_like_a_parameter_is_not_guarded():
    flat = torch.ones(2 * MIB)
    p = torch.nn.Parameter(flat[:MIB])
    every_other = torch.nn.Parameter(torch.ones(2 * MIB)[::2])
    tensors = [flat, p.detach(), every_other.detach().as_strided((MIB,), (1,))]

    assert deferrable((torch.optim.SGD([p, every_other]),), tensors).keys() == {1}


# --- memory ----------------------------------------------------------------------------------------------------


def finish(made: HostCopy) -> None:
    """As if a function had run on the copies, and kept none."""
    made.completion.result()
    made.release()


def test_a_buffer_serves_the_next_copy_of_about_its_size(copy_of, memory):
    addresses = []
    for length in (1000, 999, 600, 1000):
        made = copy_of([torch.ones(length)])
        addresses.append(made.tensors[0].data_ptr())
        finish(made)

    assert len(set(addresses)) == 1
    assert repr(memory) == "<BufferPool 0 bytes lent, 1 buffers idle>"


def test_memory_that_code_keeps_is_its_own_until_it_drops_it(copy_of, memory):
    kept = []
    for number in range(4):
        made = copy_of([torch.full((1000,), float(number)), torch.ones(3)])
        kept.append([made.tensors[0][:10].numpy(), made.tensors[0].untyped_storage()][number % 2])
        finish(made)

    assert repr(memory) == "<BufferPool 0 bytes lent, 0 buffers idle>"
    assert [float(part[0]) for part in kept[::2]] == [0.0, 2.0]
    assert [torch.empty(0).set_(part)[0].item() for part in kept[1::2]] == [1.0, 3.0]
    kept.clear()
    assert repr(memory) == "<BufferPool 0 bytes lent, 2 buffers idle>"  # twice what one copy needs


def test_copies_of_many_sizes_keep_no_more_than_twice_what_was_needed_at_one_time(copy_of, memory):
    largest = 0
    for number in range(100):
        made = copy_of([torch.ones((number * 37 % 100 + 1) * 1000)])
        largest = max(largest, made.num_bytes)
        finish(made)
        assert memory._idle_bytes() <= 2 * largest
    assert len(memory._idle) <= 8

    memory.release()
    assert repr(memory) == "<BufferPool 0 bytes lent, 0 buffers idle>"


def test_the_next_copy_waits_while_the_budget_is_used_up(crew, monkeypatch):
    memory = with_budget(monkeypatch, 10_000)

    def begin(length: int) -> HostCopy:
        return HostCopy([torch.ones(length)], ["t"], optimizers=(), memory=memory, crew=crew)

    first, second = begin(1000), begin(1000)
    third = Call(lambda: begin(1000))
    third.wait_until_inside("take")
    assert third.is_alive()
    first.release()
    assert third.outcome().num_bytes
    second.release()


def test_one_copy_alone_may_exceed_the_budget(crew, monkeypatch):
    memory = with_budget(monkeypatch, 100)
    for _ in range(2):
        made = HostCopy([torch.ones(1000)], ["t"], optimizers=(), memory=memory, crew=crew)
        made.release()
        made.release()  # counts once
        del made
    assert repr(memory).startswith("<BufferPool 0 bytes lent")


def test_a_copy_waits_for_none_that_is_held_and_the_limit_of_these_counts_no_other(monkeypatch):
    memory = with_budget(monkeypatch, 10_000)
    kept = memory.lend(8000)
    under_way = memory.take(8000)  # no wait for what may never end

    with pytest.raises(MemoryError, match=r"beside 8,000 of others, open or still read, and half of the free"):
        memory.lend(8000)
    also_kept = memory.lend(1000, max_bytes=9000)
    assert memory.lent_bytes == 17_000
    memory.end(under_way)
    assert memory.lent_bytes == 9000
    del kept, also_kept
    assert memory.lent_bytes == 0


def test_a_budget_is_kept_by_giving_up_what_is_idle(crew, monkeypatch):
    memory = with_budget(monkeypatch, 10_000)
    for length in (1000, 2400):
        made = HostCopy([torch.ones(length)], ["t"], optimizers=(), memory=memory, crew=crew)
        made.release()
        del made

    assert memory._idle_bytes() <= 10_000


def test_whoever_works_on_a_copy_never_waits_for_it(crew, monkeypatch):
    memory = with_budget(monkeypatch, 100)
    ended = threading.Event()
    made = []

    def nested() -> None:
        made.append(memory.take(1000))
        ended.set()

    memory.take(1000)
    crew.submit(nested)
    assert ended.wait(60)


def test_a_copy_that_cannot_be_begun_takes_nothing(memory, crew):
    class Broken:
        param_groups = property(lambda self: 1 / 0)

    with pytest.raises(ZeroDivisionError):
        HostCopy([torch.ones(3)], ["t"], optimizers=[Broken()], memory=memory, crew=crew)
    assert repr(memory).startswith("<BufferPool 0 bytes lent")


def test_a_copy_may_end_and_its_buffer_come_back_in_the_middle_of_anything(copy_of, memory):
    """Finalizers run wherever Python collects garbage: also where the lock is held."""
    made = copy_of([torch.ones(1000)])
    made.completion.result()
    ending = threading.Thread(target=made.release, daemon=True)
    with memory._changed:
        ending.start()
        ending.join(60)
        assert not ending.is_alive()
        assert repr(memory) == "<BufferPool 0 bytes lent, 1 buffers idle>"


def test_a_source_is_let_go_of_when_it_is_copied(copy_of):
    tensor = torch.ones(1000)
    gone = weakref.ref(tensor)
    made = copy_of([tensor])
    made.completion.result()
    del tensor
    gc.collect()

    assert gone() is None
    assert bool((made.tensors[0] == 1).all())
