"""Staging: what is saved is the state of one instant, whatever happens to it afterwards, and whatever it looks like."""

from __future__ import annotations

import threading

import pytest
import torch
from racing import PATIENCE
from scripted_disk import scripted
from states import MIB, SEGMENT, open_run, weight

import async_ckpt
from async_ckpt.saving import worker
from async_ckpt.staging.device import dense_blocks, flat_bytes, host_pointer

SIZES = [0, 1, 3, 1023, 1024, MIB // 4 - 1, MIB // 4, MIB // 4 + 1, MIB, 3 * MIB + 5]


@pytest.fixture
def ckpt(tmp_path):
    with open_run(tmp_path) as opened:
        yield opened


def test_changing_tensors_right_after_save_changes_nothing_in_the_checkpoint(ckpt):
    state = {str(n): torch.full((n,), 7.0) for n in SIZES}
    with scripted(ckpt) as disk:
        disk.stop("write")
        handle = ckpt.save(state, step=1)
        for tensor in state.values():
            tensor.fill_(-1)
        disk.release_all()
        handle.result()

    for name, tensor in ckpt.load(1).items():
        assert tensor.shape == (int(name),)
        assert bool((tensor == 7).all())


def test_changing_what_is_not_a_tensor_right_after_save_changes_nothing_in_the_checkpoint(ckpt):
    import numpy

    state = {
        "list": [1, 2],
        "dict": {"a": 1},
        "array": numpy.arange(MIB),
        "set": {1, 2},
        "bytes": bytearray(b"abc"),
    }
    with scripted(ckpt) as disk:
        disk.stop("write")
        handle = ckpt.save(state, step=1)
        state["list"].append(3)
        state["dict"]["a"] = 2
        state["array"][:] = -1
        state["set"].add(3)
        state["bytes"][0] = 0
        disk.release_all()
        handle.result()

    saved = ckpt.load(1)
    assert (saved["list"], saved["dict"], saved["set"]) == ([1, 2], {"a": 1}, {1, 2})
    assert bytes(saved["bytes"]) == b"abc"
    assert (saved["array"] == numpy.arange(MIB)).all()


def test_changing_the_live_objects_of_a_training_right_after_save_changes_nothing(ckpt):
    model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.BatchNorm1d(512))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(8, 256)).sum().backward()
    optimizer.step()
    wanted = {k: v.clone() for k, v in model.state_dict().items()}
    moments = [{k: v.clone() for k, v in state.items()} for state in optimizer.state.values()]
    handle = ckpt.save({"model": model, "optimizer": optimizer, "rng": async_ckpt.RngState()}, step=1)
    for _ in range(3):
        model(torch.randn(8, 256)).sum().backward()
        optimizer.step()
    handle.result()

    saved = ckpt.load(1)
    assert all(torch.equal(saved["model"][k], v) for k, v in wanted.items())
    for number, moment in enumerate(moments):
        assert all(torch.equal(saved["optimizer"]["state"][number][k], v) for k, v in moment.items())


STRANGE = {
    "transposed": lambda: torch.arange(1500 * 1000, dtype=torch.float32).view(1500, 1000).t(),
    "strided": lambda: torch.arange(4 * MIB, dtype=torch.int16)[1::3],
    "expanded": lambda: torch.arange(1000, dtype=torch.int64).expand(700, 1000),
    "overlapping": lambda: torch.arange(100_000).as_strided((99_000, 100), (1, 3)),
    "channels last": lambda: torch.randn(4, 16, 64, 65).to(memory_format=torch.channels_last),
    "wide rows": lambda: torch.arange(3 * 2 * MIB, dtype=torch.int32).view(2 * MIB, 3).t(),
    "flipped": lambda: torch.arange(3 * MIB).view(3, MIB).flip(0)[::2],
    "slice of a large storage": lambda: torch.arange(8 * MIB)[5 : 5 + MIB],
    "conj": lambda: torch.randn(300_000, dtype=torch.complex64).conj(),
    "neg": lambda: torch.randn(300_000, dtype=torch.complex64).conj().imag,
    "scalar": lambda: torch.tensor(3.5),
    "empty in the middle": lambda: torch.empty(3, 0, 5),
    "bool": lambda: torch.arange(5 * MIB) % 3 == 0,
    "bf16": lambda: torch.randn(2 * MIB).bfloat16(),
    "fp8": lambda: torch.randn(2 * MIB).to(torch.float8_e4m3fn),
    "requires grad": lambda: torch.randn(MIB, requires_grad=True),
    "inside of a graph": lambda: torch.randn(MIB, requires_grad=True) * 2,
    "inference": lambda: torch.inference_mode()(lambda: torch.randn(MIB))(),
    "shared": lambda: torch.randn(MIB).share_memory_(),
}


@pytest.mark.parametrize("budget", [None, 16 * MIB], ids=["ample", "tight"])
def test_tensors_of_every_build_are_saved_exactly(tmp_path, budget):
    state = {name: make() for name, make in STRANGE.items()}
    with open_run(tmp_path, host_bytes=budget) as ckpt:
        ckpt.save(state, step=1).result()
        saved = ckpt.load(1)

    for name, tensor in state.items():
        assert saved[name].dtype == tensor.dtype, name
        assert saved[name].shape == tensor.shape, name
        want, found = (t.detach().resolve_conj().resolve_neg().contiguous() for t in (tensor, saved[name]))
        assert torch.equal(want.reshape(-1).view(torch.uint8), found.reshape(-1).view(torch.uint8)), name


def test_a_view_stores_its_own_bytes_and_not_its_storage(ckpt):
    report = ckpt.save({"view": torch.zeros(16 * MIB)[: MIB // 4]}, step=1).result()

    assert report.num_bytes < 1.1 * MIB


def test_tied_tensors_are_stored_once_and_loaded_tied(ckpt):
    tensor = weight(1, 5)
    report = ckpt.save({"a": tensor, "b": tensor, "part": tensor[:10]}, step=1).result()
    saved = ckpt.load(1)

    assert report.num_bytes < 6 * MIB
    assert torch.equal(saved["a"], tensor)
    assert torch.equal(saved["b"], tensor)
    assert torch.equal(saved["part"], tensor[:10])


@pytest.mark.parametrize("delta", [-4097, -4096, -1, 0, 1, 4096, 4097])
def test_a_tensor_that_ends_about_where_a_segment_does_is_saved_exactly(ckpt, delta):
    num_bytes = 2 * SEGMENT + delta
    tensor = torch.arange(num_bytes, dtype=torch.int64).to(torch.uint8)
    ckpt.save({"a": tensor, "b": tensor[:5].clone()}, step=1).result()
    saved = ckpt.load(1)

    assert torch.equal(saved["a"], tensor)
    assert torch.equal(saved["b"], tensor[:5])


def test_many_small_tensors_are_saved_exactly(ckpt):
    state = {f"layer.{n}": torch.full((n % 7,), float(n)) for n in range(5_000)}
    ckpt.save(state, step=1).result()
    saved = ckpt.load(1)

    assert list(saved) == list(state)
    assert all(torch.equal(saved[name], tensor) for name, tensor in state.items())


def test_the_plan_of_the_last_save_is_not_used_for_another_state(ckpt):
    first = {"a": weight(1), "b": weight(2)}
    for step, state in enumerate(
        [
            first,
            {"b": weight(3), "a": weight(4)},
            {"a": weight(5).view(torch.float32), "b": weight(6)},
            first | {"c": 1},
        ]
    ):
        ckpt.save(state, step=step).result()
        saved = ckpt.load(step)
        assert list(saved) == list(state)
        for name, value in state.items():
            if isinstance(value, torch.Tensor):
                assert saved[name].dtype == value.dtype
                assert torch.equal(saved[name].view(torch.int32), value.view(torch.int32))


def test_the_same_tensors_at_other_addresses_are_read_from_there(ckpt):
    for step in range(4):
        ckpt.save({"w": weight(step, 5)}, step=step).result()
    for step in range(4):
        assert torch.equal(ckpt.load(step)["w"], weight(step, 5))


def test_a_save_under_grad_and_inference_mode_is_the_same(ckpt):
    tensor = torch.nn.Parameter(torch.randn(MIB))
    with torch.inference_mode():
        ckpt.save({"w": tensor}, step=1).result()
    with torch.enable_grad():
        ckpt.save({"w": tensor}, step=2).result()

    assert torch.equal(ckpt.load(1)["w"], ckpt.load(2)["w"])
    assert tensor.requires_grad
    assert tensor.grad is None


def test_the_default_dtype_and_device_of_the_process_do_not_matter(ckpt):
    state = {"w": weight(1), "transposed": torch.arange(6.0).view(2, 3).t(), "bytes": b"abc"}
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            ckpt.save(state, step=1).result()
            saved = ckpt.load(1)
    finally:
        torch.set_default_dtype(torch.float32)

    assert torch.equal(saved["w"], state["w"])
    assert torch.equal(saved["transposed"], state["transposed"])
    assert saved["bytes"] == b"abc"


# --- the parts -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(STRANGE))
def test_the_blocks_of_a_tensor_are_its_bytes_in_order(name):
    tensor = STRANGE[name]().detach()
    want = bytes(tensor.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).numpy())
    for begin, end in [(0, len(want)), (len(want) // 3, len(want) // 2), (1, max(1, len(want) - 1))]:
        found = bytearray()
        for offset, block in dense_blocks(tensor, begin, end):
            assert offset == begin + len(found)
            found += bytes(block.numpy())
        assert bytes(found) == want[begin:end]


def test_the_flat_bytes_of_a_tensor_keep_its_memory_and_not_the_tensor():
    import weakref

    tensor = torch.arange(1000)
    gone = weakref.ref(tensor)
    flat = flat_bytes(tensor[10:])
    del tensor

    assert gone() is None
    assert flat.view(torch.int64).tolist() == list(range(10, 1000))


def test_only_a_dense_host_tensor_has_an_address():
    tensor = torch.zeros(4, 4)
    assert host_pointer(tensor) == tensor.data_ptr()
    assert host_pointer(tensor.t()) == 0
    assert host_pointer(torch.zeros(3, dtype=torch.complex64).conj()) == 0
    assert host_pointer(torch.empty(0)) == 0


def test_a_save_for_which_the_system_has_no_thread_ends_in_its_handle_and_the_next_one_is_whole(
    tmp_path, monkeypatch
):
    start = threading.Thread.start

    def scarce(thread):
        if thread.name.startswith(("async_ckpt-copy", "async_ckpt-call-")):
            raise RuntimeError("can't start new thread")
        start(thread)

    state = {"w": torch.ones(MIB)}
    with open_run(tmp_path) as ckpt:
        worker.get_worker().copiers.stop()
        worker.get_worker().callers.stop()
        monkeypatch.setattr(threading.Thread, "start", scarce)
        handle = ckpt.save(state, step=1)
        with pytest.raises(RuntimeError, match="new thread"):
            handle.result(PATIENCE)
        with pytest.raises(RuntimeError, match="new thread"):
            worker.get_worker().call(lambda: None)
        monkeypatch.undo()
        ckpt.save(state, step=2).result()
        assert ckpt.steps() == [2]
