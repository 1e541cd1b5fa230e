"""The simulated CUDA runtime itself: what it has of hardware, and what it reports."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator

import cuda_simulation
import pytest
import torch
from cuda_simulation import held, reports
from states import MIB

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not cuda_simulation.is_here(), reason=cuda_simulation.NEEDED)]


@pytest.fixture
def pages() -> Iterator[mmap.mmap]:
    made = mmap.mmap(-1, 4 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    yield made
    made.close()


def address_of(pages: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(pages))


def host_tensor(pages: mmap.mmap, begin: int = 0, end: int = 4 * MIB) -> torch.Tensor:
    return torch.frombuffer(memoryview(pages)[begin:end], dtype=torch.uint8)


def registered(address: int, num_bytes: int) -> None:
    assert int(torch.cuda.cudart().cudaHostRegister(address, num_bytes, 0)) == 0


def unregistered(address: int) -> None:
    assert int(torch.cuda.cudart().cudaHostUnregister(address)) == 0


def unordered(found: list[str], *words: str) -> bool:
    return len(found) > 0 and all("not ordered behind" in one and all(word in one for word in words) for one in found)


def test_a_write_that_does_not_wait_for_a_read_on_another_stream_is_reported_whatever_the_timing():
    tensor, side = torch.ones(1000, device="cuda"), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        tensor.sum()
    side.synchronize()  # would make it right, were it known to who writes
    assert not reports()
    with torch.cuda.stream(side):
        tensor.sum()
    tensor.add_(1)
    assert unordered(reports(), "stream 0 writes", "which reads it")


def test_a_read_that_does_not_wait_for_a_write_on_another_stream_is_reported():
    tensor, side = torch.ones(1000, device="cuda"), torch.cuda.Stream()
    with torch.cuda.stream(side):
        tensor.sum()
    assert unordered(reports(), "reads", "which writes it")


def test_a_wait_for_a_stream_or_an_event_puts_accesses_in_order():
    tensor, side, event = torch.ones(1000, device="cuda"), torch.cuda.Stream(), torch.cuda.Event()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        tensor.sum()
        event.record()
    torch.cuda.current_stream().wait_event(event)
    tensor.add_(1)
    event.synchronize()
    assert not reports()


def test_what_one_thread_has_waited_for_is_not_known_to_another_that_has_not_heard_of_it(apart):
    apart(
        """
import ctypes
tensor, side = torch.ones(1000, device="cuda"), torch.cuda.Stream()
side.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(side):
    tensor.sum()
done = []
def wait():
    side.synchronize()
    done.append(True)
thread = threading.Thread(target=wait)
thread.start()
while not done:
    pass
tensor.add_(1)
assert cuda_simulation.reports()
thread.join()
tensor.add_(1)
"""
    )


def test_the_host_cannot_touch_the_memory_of_a_device(apart):
    apart(
        """
address = torch.ones(3, device="cuda").data_ptr()
child = os.fork()
if child == 0:
    import ctypes, resource
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    ctypes.string_at(address, 1)
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -11
"""
    )


def test_a_copy_to_ordinary_memory_returns_when_it_is_done_and_one_to_registered_memory_at_once(pages):
    source, side = torch.ones(4 * MIB, dtype=torch.uint8, device="cuda"), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    host_tensor(pages).copy_(source, non_blocking=True)
    assert pages[4 * MIB - 1] == 1

    registered(address_of(pages), 4 * MIB)
    with held(side), torch.cuda.stream(side):
        target = host_tensor(pages)
        target.copy_(source, non_blocking=True)
        assert cuda_simulation.num_pending() > 0
    side.synchronize()
    unregistered(address_of(pages))


def test_a_copy_across_two_registrations_is_an_error(pages):
    registered(address_of(pages), 2 * MIB)
    registered(address_of(pages) + 2 * MIB, 2 * MIB)
    source = torch.ones(4 * MIB, dtype=torch.uint8, device="cuda")
    with pytest.raises(RuntimeError, match="cudaErrorInvalidValue"):
        host_tensor(pages).copy_(source, non_blocking=True)
    for begin in (0, 2 * MIB):
        unregistered(address_of(pages) + begin)


def test_memory_that_is_unregistered_before_a_copy_to_it_is_waited_for_is_reported(pages):
    registered(address_of(pages), 4 * MIB)
    host_tensor(pages).copy_(torch.ones(4 * MIB, dtype=torch.uint8, device="cuda"), non_blocking=True)
    unregistered(address_of(pages))
    assert unordered(reports(), "cudaHostUnregister")
    torch.cuda.synchronize()


def test_registered_memory_that_is_unmapped_is_reported():
    pages = mmap.mmap(-1, MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = address_of(pages)
    registered(address, MIB)
    pages.close()
    assert reports() == ["registered memory is unmapped"]
    unregistered(address)


def test_registered_memory_that_is_written_to_a_file_before_the_copy_to_it_is_waited_for_is_reported(pages, tmp_path):
    registered(address_of(pages), 4 * MIB)
    with (tmp_path / "x").open("wb", buffering=0) as file:
        host_tensor(pages).copy_(torch.ones(4 * MIB, dtype=torch.uint8, device="cuda"), non_blocking=True)
        file.write(memoryview(pages))
        assert unordered(reports(), "(write)")
        torch.cuda.synchronize()
        file.write(memoryview(pages))
    unregistered(address_of(pages))


def test_memory_is_unregistered_once():
    assert int(torch.cuda.cudart().cudaHostUnregister(4096)) == 713
    with pytest.raises(RuntimeError, match="cudaErrorHostMemoryNotRegistered"):
        torch.cuda._sleep(0)


def test_the_legacy_default_stream_waits_for_blocking_streams_and_they_for_it():
    streams = []
    for flags in (0, 1):
        made = ctypes.c_void_p()
        assert ctypes.CDLL(None).cudaStreamCreateWithFlags(ctypes.byref(made), flags) == 0
        streams.append(torch.cuda.ExternalStream(made.value, device="cuda:0"))
    tensor = torch.ones(1000, device="cuda")
    for stream, reported in zip(streams, (False, True), strict=True):
        with torch.cuda.stream(stream):
            tensor.add_(1)
        tensor.add_(1)
        assert bool(reports()) is reported
    torch.cuda.synchronize()


def test_an_event_is_recorded_on_its_own_device_alone():
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(0))
    with pytest.raises(RuntimeError):
        event.record(torch.cuda.current_stream(1))
    torch.cuda.current_stream(1).wait_event(event)


def test_an_event_has_fired_when_its_stream_has_come_to_it():
    event, later = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    with held(torch.cuda.current_stream()):
        event.record()
        later.record()
        assert not event.query()
    later.synchronize()
    assert event.query()
    assert event.elapsed_time(later) >= 0


@pytest.mark.parametrize(("mode", "breaks"), [("global", True), ("thread_local", False), ("relaxed", False)])
def test_a_query_on_another_thread_breaks_a_capture_of_the_global_mode_alone(apart, mode, breaks):
    apart(
        f"""
x, event = torch.ones(1000, device="cuda"), torch.cuda.Event()
event.record()
event.synchronize()
def query():
    try:
        event.query()
    except RuntimeError as error:
        assert {breaks}, error
graph, failed = torch.cuda.CUDAGraph(), False
try:
    with torch.cuda.graph(graph, capture_error_mode="{mode}"):
        y = x + 1
        thread = threading.Thread(target=query)
        thread.start()
        thread.join()
except RuntimeError:
    failed = True
assert failed is {breaks}
if not failed:
    x.add_(1)
    graph.replay()
    assert y.tolist() == [3.0] * 1000
"""
    )


def test_the_driver_lends_no_more_than_there_is():
    torch.cuda.empty_cache()
    cuda_simulation.leave_free(4 * MIB)
    assert torch.cuda.mem_get_info()[0] == 4 * MIB
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(32 * MIB, dtype=torch.uint8, device="cuda")
    cuda_simulation.leave_free(-1)
    torch.empty(32 * MIB, dtype=torch.uint8, device="cuda")


def test_every_call_for_a_broken_device_fails_and_those_for_another_do_not(apart):
    apart(
        """
other = torch.ones(3, device="cuda:1")
tensor = torch.ones(3, device="cuda")
cuda_simulation.break_device(0)
for task in (lambda: tensor.add_(1), tensor.tolist, torch.cuda.Event().record, torch.cuda.synchronize):
    try:
        task()
    except RuntimeError:
        continue
    raise AssertionError(task)
torch.cuda.set_device(1)
assert other.add_(1).tolist() == [2, 2, 2]
"""
    )


def test_every_call_fails_in_a_forked_child(apart):
    apart(
        """
torch.ones(3, device="cuda")
event = torch.cuda.Event()
event.record()
child = os.fork()
if child == 0:
    for task in (event.query, lambda: torch.cuda._sleep(1)):
        try:
            task()
        except RuntimeError as error:
            assert "initialization error" in str(error)
            continue
        os._exit(1)
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""
    )


def test_draws_go_on_where_a_generator_was():
    torch.cuda.manual_seed(5)
    state = torch.cuda.get_rng_state()
    drawn = [torch.rand(4, device="cuda").tolist() for _ in range(2)]
    assert drawn[0] != drawn[1]
    torch.cuda.set_rng_state(state)
    assert [torch.rand(4, device="cuda").tolist() for _ in range(2)] == drawn
