"""What the CUDA runtime may refuse, and devices that break or have no memory left: saves fail or go on, and nothing else does."""

from __future__ import annotations

import threading
from typing import Any

import cuda_simulation
import pytest
import torch
from cuda_simulation import held, refuse
from racing import Call, until
from states import MIB, open_run

import async_ckpt
from async_ckpt.core.backends import backend_of
from async_ckpt.core.host.memory import HostBuffer
from async_ckpt.core.staging.device import Device
from async_ckpt.core.staging.filler import SegmentFiller

pytestmark = pytest.mark.gpu


def use_the_device() -> None:
    """As a training does next: a launch, which raises what the runtime has kept from a call before."""
    assert torch.ones(3, device="cuda").add_(1).tolist() == [2, 2, 2]


def on_host() -> tuple[HostBuffer, torch.device]:
    device = torch.device("cuda", 0)
    use_the_device()
    return HostBuffer(MIB, device), device


# --- page-locked memory ------------------------------------------------------------------------------------------------


def test_memory_that_is_not_unregistered_is_kept_and_the_next_launch_knows_nothing_of_it():
    buffer, device = on_host()
    assert buffer.pin(device) == 0
    refuse("cudaHostUnregister")
    buffer.free()

    use_the_device()
    assert buffer.is_leaked


def test_memory_that_is_not_registered_is_used_as_it_is_and_the_next_launch_knows_nothing_of_it():
    buffer, device = on_host()
    refuse("cudaHostRegister")
    assert buffer.pin(device) == cuda_simulation.INVALID_VALUE

    use_the_device()
    assert not buffer.pinned


def test_a_refusal_is_forgotten_on_a_device_without_memory(apart):
    apart(
        """
from async_ckpt.core.host.memory import HostBuffer
torch.cuda.init()
device = torch.device("cuda", 0)
torch.zeros(1, device="cuda")
torch.cuda.empty_cache()
cuda_simulation.leave_free(0)
buffer = HostBuffer(MIB, device)
refuse("cudaHostRegister")
assert buffer.pin(device) == 1
torch.cuda._sleep(1)
"""
    )


@pytest.mark.parametrize("call", ["cudaHostRegister", "cudaHostUnregister"])
def test_memory_is_known_to_be_registered_when_the_way_back_to_the_device_before_is_refused(call):
    buffer, device = on_host()
    before = cuda_simulation.num_registered()
    with torch.cuda.device(1):
        if call == "cudaHostRegister":
            refuse("cudaSetDevice", after=1)
            assert buffer.pin(device) == 0
            assert cuda_simulation.num_registered() == before + 1
            assert buffer.pinned
            buffer.free()
        else:
            assert buffer.pin(device) == 0
            refuse("cudaSetDevice", after=1)
            buffer.free()
    assert cuda_simulation.num_registered() == before
    torch.cuda.set_device(0)


def test_all_page_locked_memory_is_given_back_by_release(apart):
    apart(
        """
state = {"w": torch.ones(4 * MIB, device="cuda")}
with open_run(root) as ckpt:
    ckpt.save(state, step=1).result()
async_ckpt.save(state, root + "/x.tar").result()
assert cuda_simulation.num_registered() > 0
async_ckpt.release()
assert cuda_simulation.num_registered() <= 1  # a few bytes of the side stream's stay
"""
    )


def test_what_one_save_got_no_page_locked_memory_for_is_asked_for_again_by_the_next(apart):
    """Or its samples would be copied into ordinary memory, and the call would wait for the device."""
    apart(
        """
from racing import Call, until
p = torch.nn.Parameter(torch.ones(MIB, device="cuda"))
optimizer = torch.optim.SGD([p], lr=1.0)
refuse("cudaHostRegister", times=1000)
with open_run(root + "/first") as ckpt:
    ckpt.save({"p": p}, step=1, guard=optimizer).result()
cuda_simulation.start_over()
with open_run(root + "/second") as ckpt:
    ckpt.prewarm({"p": p})
    with held(torch.cuda.current_stream()):
        call = Call(lambda: ckpt.save({"p": p}, step=1, guard=optimizer))
        until(lambda: not call.is_alive())
    call.outcome().result()
"""
    )


# --- any call that is refused ------------------------------------------------------------------------------------------

# Not cudaSetDevice: torch's own destructors make that call, and end the process if it is refused.
CALLS = [
    "cudaEventCreate", "cudaEventRecord", "cudaEventQuery", "cudaEventSynchronize", "cudaStreamWaitEvent", "cudaMemcpyAsync",
    "cudaHostRegister", "cudaHostUnregister", "cudaMalloc", "kernel", "cudaStreamCreate", "cudaThreadExchangeStreamCaptureMode",
]  # fmt: skip


@pytest.mark.parametrize("kind", ["guarded", "not guarded"])
@pytest.mark.parametrize("call", CALLS)
def test_whichever_call_is_refused_the_save_fails_or_is_right_and_the_next_one_is_right(apart, call, kind):
    apart(
        """
from async_ckpt.core.host import pool
call, kind = sys.argv[2:]
p = torch.nn.Parameter(torch.ones(2 * MIB, device="cuda"))
small = {f"s{n}": torch.full((n + 1,), 2.0, device="cuda") for n in range(8)}
strided = torch.full((600, 300), 3.0, device="cuda").t()
other = torch.full((MIB,), 4.0, device="cuda:1")
torch.cuda.synchronize()
optimizer = torch.optim.SGD([p], lr=1.0)
state = {"p": p, "strided": strided, "other": other, **small}
def is_right(saved):
    return (bool((saved["p"] == 1).all()) and bool((saved["strided"] == 3).all()) and bool((saved["other"] == 4).all())
        and all(bool((saved[name] == 2).all()) for name in small))
guard = optimizer if kind == "guarded" else None
num_failed = 0
for after in range(7):
    with open_run(f"{root}/{after}", host_bytes=16 * MIB) as ckpt:
        refuse(call, after=after)
        try:
            error = ckpt.save(state, step=1, guard=guard).exception()
        except RuntimeError as raised:
            error = raised
        cuda_simulation._runtime().sim_refuse_nothing()
        num_failed += error is not None
        if error is None:
            assert is_right(ckpt.load(1)), after
        else:
            assert ckpt.steps() == [], after
        torch.ones(1, device="cuda").add_(1).item()
        ckpt.save(state, step=2, guard=guard).result()
        assert is_right(ckpt.load(2)), after
        if error is not None:
            error = None
    gc.collect()
async_ckpt.release()
""",
        call,
        kind,
    )


def test_where_the_runtime_makes_no_stream_torch_does_and_the_next_launch_knows_nothing_of_it(apart):
    apart(
        """
from async_ckpt.core.backends import backend_of
torch.ones(1, device="cuda")
device = torch.device("cuda", 0)
backend = backend_of(device)
refuse("cudaStreamCreate")
stream = backend.new_stream(device)
assert not isinstance(stream, torch.cuda.ExternalStream), stream
with backend.on_stream(device, stream):
    torch.ones(3, device="cuda").add_(1)
"""
    )


@pytest.mark.usefixtures("two_devices")
def test_a_stream_is_made_on_its_device_and_the_thread_stays_on_its_own():
    with torch.cuda.device(0):
        stream = backend_of(torch.device("cuda", 1)).new_stream(torch.device("cuda", 1))
        assert isinstance(stream, torch.cuda.ExternalStream)
        assert torch.cuda.current_device() == 0
        assert stream.device == torch.device("cuda", 1)
        with torch.cuda.stream(stream):
            assert torch.ones(3, device="cuda:1").add_(1).tolist() == [2, 2, 2]


# --- a device that breaks ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["saved", "guarded and saved"])
def test_a_saved_tensor_is_freed_after_its_device_has_broken_as_any_other(apart, kind):
    apart(
        """
p = torch.nn.Parameter(torch.ones(MIB, device="cuda"))
state = {"p": p, "small": torch.ones(3, device="cuda"), "strided": torch.ones(300, 200, device="cuda").t()}
optimizer = torch.optim.SGD([p], lr=1.0)
with open_run(root) as ckpt:
    ckpt.save(state, step=1, guard=optimizer if "guarded" in sys.argv[2] else None).result()
    ckpt.wait()
    cuda_simulation.break_device()
    try:
        torch.ones(1, device="cuda").item()
    except RuntimeError:
        pass
    p = state = optimizer = None
    gc.collect()
    assert bool((ckpt.load(1)["p"] == 1).all())
""",
        kind,
    )


@pytest.mark.parametrize("kind", ["guarded", "not guarded"])
def test_a_device_that_breaks_while_it_is_copied_from_fails_the_save_alone(apart, kind):
    apart(
        """
p = torch.nn.Parameter(torch.ones(MIB, device="cuda"))
optimizer = torch.optim.SGD([p], lr=1.0)
with open_run(root) as ckpt:
    ckpt.save({"p": p}, step=1).result()
    with held(torch.cuda.current_stream()):
        handle = ckpt.save({"p": p}, step=2, guard=optimizer if sys.argv[2] == "guarded" else None)
        cuda_simulation.break_device()
    assert handle.exception() is not None
    assert "leaked" in repr(ckpt._saver.pool)  # the device may still write to it
    assert ckpt.steps() == [1]
    p = optimizer = handle = None
    gc.collect()
    ckpt.save({"n": torch.ones(3)}, step=3).result()
""",
        kind,
    )


def test_a_device_that_breaks_after_staging_costs_no_checkpoint(apart):
    apart(
        """
state = {"w": torch.full((MIB,), 3.0, device="cuda")}
with open_run(root) as ckpt, scripted(ckpt) as disk:
    disk.stop("write")
    handle = ckpt.save(state, step=1)
    handle.wait_staged()
    cuda_simulation.break_device()
    disk.release_all()
    assert handle.result().stall_seconds < 60
    assert bool((ckpt.load(1)["w"] == 3).all())
"""
    )


# --- saves that fail ---------------------------------------------------------------------------------------------------


def test_a_save_that_fails_ends_when_the_device_has_made_its_copies(tmp_path, monkeypatch):
    p = torch.full((MIB,), 3.0, device="cuda")
    enqueue = Device.enqueue

    def failing(self: Device, *arguments: Any) -> None:
        enqueue(self, *arguments)
        raise OSError("lost")

    with open_run(tmp_path) as ckpt:
        ckpt.save({"p": p}, step=1).result()
        monkeypatch.setattr(Device, "enqueue", failing)
        before = cuda_simulation.num_calls("cudaEventSynchronize")
        with held(torch.cuda.current_stream()):
            call = Call(lambda: ckpt.save({"p": p}, step=2))
            until(lambda: cuda_simulation.num_calls("cudaEventSynchronize") > before or not call.is_alive())
            assert call.is_alive()
        with pytest.raises(OSError, match="lost"):
            call.outcome().result()
        assert ", 0 of " in repr(ckpt._saver.pool)
        assert "leaked" not in repr(ckpt._saver.pool)


def test_training_follows_the_copies_of_a_save_that_failed_during_its_call(tmp_path, monkeypatch):
    goes_on = threading.Event()
    fill_run, wait, is_quiet = SegmentFiller._fill_run, Device.wait, Device.is_quiet

    def fill_and_fail(self: SegmentFiller, *arguments: Any, **options: Any) -> None:
        fill_run(self, *arguments, **options)
        gone = async_ckpt.StorageUnavailableError("gone", path="/ckpt")
        threading.Thread(target=self._on_end, args=(gone,)).start()
        until(lambda: self._error is not None)

    def wait_later(self: Device, event: Any) -> None:
        goes_on.wait()
        wait(self, event)

    def is_quiet_later(self: Device) -> bool:
        goes_on.wait()
        return is_quiet(self)

    monkeypatch.setattr(SegmentFiller, "_fill_run", fill_and_fail)
    monkeypatch.setattr(Device, "wait", wait_later)
    monkeypatch.setattr(Device, "is_quiet", is_quiet_later)
    w = torch.full((MIB,), 3.0, device="cuda")
    with open_run(tmp_path) as ckpt:
        failing = ckpt.save({"w": w}, step=1)
        w.fill_(2)  # would be reported
        goes_on.set()
        with pytest.raises(async_ckpt.StorageUnavailableError):
            failing.result()


# --- a device without memory -------------------------------------------------------------------------------------------

FULL = """
def fill_up():
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    cuda_simulation.leave_free(0)
    taken = []
    for num_bytes in (MIB, 1 << 16, 512):
        while True:
            try:
                taken.append(torch.empty(num_bytes, dtype=torch.uint8, device="cuda"))
            except torch.OutOfMemoryError:
                break
    return taken
def strange():
    whole = torch.arange(1500 * 401, dtype=torch.float32, device="cuda")
    spectrum = torch.complex(whole[:3000], whole[3000:6000])
    return {
        "transposed": whole.view(1500, 401).t(),
        "strided": whole[::7],
        "far": whole.view(1500, 401)[::100, ::50],
        "expanded": whole[:300].view(300, 1).expand(300, 5),
        "conjugated": spectrum.conj(),
        "negated": torch._neg_view(whole[:5000]),
        "imaginary": spectrum.conj().imag,
        "bf16": whole.to(torch.bfloat16).view(401, 1500)[:, ::3],
        "halves": whole.to(torch.float8_e4m3fn).view(401, 1500).t(),
        "scalar": whole[17],
    }
"""


@pytest.mark.parametrize("kind", ["guarded", "not guarded"])
@pytest.mark.parametrize("room", ["without", "with"])
def test_a_device_with_or_without_free_memory_is_saved_whatever_the_layout_of_its_tensors(apart, kind, room):
    apart(
        FULL
        + """
p = torch.nn.Parameter(torch.arange(2 * MIB, dtype=torch.float32, device="cuda"))
q = torch.nn.Parameter(torch.ones(70_000, device="cuda"))
r = torch.nn.Parameter(torch.arange(700 * 900, dtype=torch.float32, device="cuda").view(700, 900).t())
optimizer = torch.optim.SGD([p, q, r], lr=1.0)
state = {"p": p, "q": q, "r": r, "small": [torch.full((n,), float(n), device="cuda") for n in range(1, 40)], **strange()}
wanted = {name: tensor.detach().cpu() for name, tensor in state.items() if name != "small"}
taken = fill_up() if sys.argv[3] == "without" else []
guard = optimizer if sys.argv[2] == "guarded" else None
with open_run(root) as ckpt:
    for step in (1, 2):
        ckpt.save(state, step=step, guard=guard).result()
        saved = ckpt.load(step)
        for name, tensor in wanted.items():
            as_bytes = lambda one: one.resolve_conj().resolve_neg().contiguous().view(torch.uint8)
            assert saved[name].shape == tensor.shape, name
            if tensor.dim():
                assert torch.equal(as_bytes(saved[name]), as_bytes(tensor)), name
            else:
                assert saved[name] == tensor
        assert all(bool((one == one.numel()).all()) for one in saved["small"])
""",
        kind,
        room,
    )


def test_a_write_outside_of_the_step_is_found_on_a_device_without_free_memory(apart):
    apart(
        FULL
        + """
p = torch.nn.Parameter(torch.ones(8 * MIB, device="cuda"))
optimizer = torch.optim.SGD([p], lr=1.0)
taken = fill_up()
with open_run(root, host_bytes=16 * MIB) as ckpt, scripted(ckpt) as disk:
    disk.stop("write")
    handle = ckpt.save({"p": p}, step=1, guard=optimizer)
    p.data.add_(1)
    disk.release_all()
    error = handle.exception()
    assert isinstance(error, async_ckpt.TornSnapshotError), error
    assert error.names == ("p",)
assert cuda_simulation.reports()  # it was a race
"""
    )


def test_memory_that_is_short_is_left_to_the_training(apart):
    """Before torch's allocator refuses, it gives back what it keeps: so a refusal is not asked for again and again."""
    apart(
        FULL
        + """
state = {f"s{n}": torch.full((100 + n,), 3.0, device="cuda") for n in range(50)}
taken = fill_up()
with open_run(root) as ckpt:
    for step in range(5):
        if step == 1:
            before = cuda_simulation.num_calls("cudaMalloc")
        ckpt.save(state, step=step).result()
    assert cuda_simulation.num_calls("cudaMalloc") == before
"""
    )
