"""What only a device shows: streams, events, pinned memory. On the simulation, and with `-m gpu` on a CUDA device."""

from __future__ import annotations

import pytest
import torch
from scripted_disk import scripted
from states import MIB, SEGMENT, leftovers, open_run

import async_ckpt
from async_ckpt import TornSnapshotError

# Items of a large tensor: several segments of it are several MiB.
LARGE = 3 * MIB // 4


@pytest.fixture
def ckpt(tmp_path, accelerator):
    with open_run(tmp_path) as opened:
        yield opened


def many_tensors(value: float, device: str) -> dict[str, torch.Tensor]:
    """Large, small and strange, all of one value."""
    state = {f"small.{n}": torch.full((n,), value, device=device) for n in range(1, 100)}
    state |= {f"large.{n}": torch.full((LARGE + n,), value, device=device) for n in range(3)}
    state["transposed"] = torch.full((1500, 1001), value, device=device).t()
    state["strided"] = torch.full((LARGE,), value, device=device)[::3]
    state["bf16"] = torch.full((LARGE // 3,), value, device=device, dtype=torch.bfloat16)
    state["scalar"] = torch.tensor(value, device=device)
    state["empty"] = torch.empty(0, device=device)
    state["host"] = torch.full((LARGE // 3,), value)
    return state


def assert_all(state: dict[str, torch.Tensor], value: float) -> None:
    for name, tensor in state.items():
        assert bool((tensor == value).all()), name


def test_changing_tensors_on_the_training_stream_right_after_save_changes_nothing_in_the_checkpoint(ckpt, accelerator):
    state = many_tensors(7.0, accelerator.kind)
    with accelerator.ahead():
        handle = ckpt.save(state, step=1)
        for tensor in state.values():
            tensor.fill_(-1)
    handle.result()

    assert_all(ckpt.load(1), 7.0)
    assert_all(state, -1.0)


def test_what_is_enqueued_before_save_is_in_the_checkpoint(ckpt, accelerator):
    state = many_tensors(0.0, accelerator.kind)
    with accelerator.ahead():
        for tensor in state.values():
            tensor.fill_(3)
        handle = ckpt.save(state, step=1)
    handle.result()

    assert_all(ckpt.load(1), 3.0)


def test_a_save_on_another_current_stream_follows_that_stream(ckpt, accelerator):
    state = many_tensors(0.0, accelerator.kind)
    accelerator.module.synchronize()
    stream = accelerator.stream()
    with accelerator.module.stream(stream), accelerator.ahead():
        for tensor in state.values():
            tensor.fill_(5)
        handle = ckpt.save(state, step=1)
        for tensor in state.values():
            tensor.fill_(-1)
    handle.result()

    assert_all(ckpt.load(1), 5.0)
    stream.synchronize()


def test_save_does_not_wait_for_the_device(ckpt, accelerator):
    state = {"w": torch.ones(LARGE, device=accelerator.kind)}
    ckpt.prewarm(state)
    ckpt.save(state, step=1).result()
    accelerator.module.synchronize()
    done = accelerator.module.Event()
    with accelerator.ahead():
        done.record()
        handle = ckpt.save(state, step=2)

        assert not done.query()  # the kernel that was enqueued before is still running
        assert not handle.staging_completion.done()
    handle.result()
    assert done.query()


def test_memory_freed_right_after_save_is_not_reused_before_it_is_copied(ckpt, accelerator):
    state = {"w": torch.full((LARGE,), 4.0, device=accelerator.kind)}
    with accelerator.ahead():
        handle = ckpt.save(state, step=1)
        del state
        for _ in range(8):
            torch.full((LARGE,), -1.0, device=accelerator.kind)
    handle.result()

    assert_all(ckpt.load(1), 4.0)


def test_memory_of_another_stream_freed_right_after_save_is_not_reused_before_it_is_copied(ckpt, accelerator):
    other = accelerator.stream()
    with accelerator.module.stream(other):
        state = {"w": torch.full((LARGE,), 4.0, device=accelerator.kind)}
    accelerator.module.current_stream().wait_stream(other)
    with accelerator.ahead():
        handle = ckpt.save(state, step=1)
        del state
        with accelerator.module.stream(other):
            for _ in range(8):
                torch.full((LARGE,), -1.0, device=accelerator.kind)
    handle.result()

    assert_all(ckpt.load(1), 4.0)


def test_a_budget_smaller_than_the_state_is_enough(tmp_path, accelerator):
    state = {f"w{n}": torch.full((MIB + n,), float(n), device=accelerator.kind) for n in range(12)}
    with open_run(tmp_path, host_bytes=16 * MIB) as ckpt:
        ckpt.save(state, step=1).result()
        assert ckpt.metrics()["pool_bytes"] <= 16 * MIB
        saved = ckpt.load(1)
    for number in range(12):
        assert bool((saved[f"w{number}"] == number).all())


def test_segments_for_a_device_are_page_locked(ckpt, accelerator):
    ckpt.save({"w": torch.ones(2 * LARGE, device=accelerator.kind)}, step=1).result()
    ckpt.wait()
    free = ckpt._saver.pool._free

    assert free
    assert all(segment.pinned for segment in free)
    if accelerator.kind == "cuda":
        assert all(segment.tensor.is_pinned() for segment in free)
    assert all(segment.num_bytes == SEGMENT for segment in free)


def test_tied_and_shared_tensors_on_the_device_are_stored_once(ckpt, accelerator):
    tensor = torch.arange(LARGE, device=accelerator.kind)
    report = ckpt.save({"a": tensor, "b": tensor}, step=1).result()

    assert report.num_bytes < 7 * MIB
    saved = ckpt.load(1)
    assert torch.equal(saved["a"], tensor.cpu())
    assert torch.equal(saved["b"], tensor.cpu())


# --- guarded ---------------------------------------------------------------------------------------------------

KINDS = [{"foreach": True}, {"fused": True}, {"foreach": False, "fused": False}]


def training(device: str, **options):
    torch.manual_seed(0)
    made = torch.nn.Sequential(torch.nn.Linear(512, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 512))
    model = made.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), **options)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.randn(16, 512, device=device)).square().mean().backward()
        optimizer.step()

    return model, optimizer, step


def copy_of(model, optimizer):
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    return weights, [{name: tensor.clone() for name, tensor in s.items()} for s in optimizer.state.values()]


def assert_saved(saved, wanted) -> None:
    weights, moments = wanted
    for name, tensor in weights.items():
        assert torch.equal(saved["model"][name], tensor.cpu()), name
    for number, moment in enumerate(moments):
        for name, tensor in moment.items():
            assert torch.equal(saved["optimizer"]["state"][number][name], tensor.cpu()), (number, name)


@pytest.mark.parametrize("budget", [None, 16 * MIB], ids=["ample", "tight"])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_guarded_training_saves_the_state_before_each_step(tmp_path, kind, budget, accelerator):
    model, optimizer, step = training(accelerator.kind, **kind)
    step()
    wanted = {}
    with open_run(tmp_path, guard=optimizer, host_bytes=budget) as ckpt:
        for number in range(3):
            wanted[number] = copy_of(model, optimizer)
            accelerator.busy()
            ckpt.save({"model": model, "optimizer": optimizer}, step=number)
            step()
        ckpt.wait()
        for number, state in wanted.items():
            assert_saved(ckpt.load(number), state)


def test_the_guarded_copy_overlaps_and_the_step_waits_on_the_device(tmp_path, accelerator):
    p = torch.nn.Parameter(torch.ones(4 * MIB, device=accelerator.kind))
    p.grad = torch.ones_like(p)
    optimizer = torch.optim.SGD([p], lr=1.0)
    with open_run(tmp_path, guard=optimizer) as ckpt:
        ckpt.prewarm({"p": p})
        with accelerator.ahead():
            handle = ckpt.save({"p": p}, step=1)
            assert not handle.staging_completion.done()
            optimizer.step()
        handle.result()
        assert bool((ckpt.load(1)["p"] == 1).all())
        assert bool((p == 0).all())


@pytest.mark.parametrize("how", ["in place", "by data", "fused"])
def test_a_write_outside_of_the_step_fails_the_save_and_names_the_tensor(tmp_path, how, accelerator):
    accelerator.may_race = True  # that is what it is about
    p = torch.nn.Parameter(torch.ones(8 * MIB, device=accelerator.kind))
    optimizer = torch.optim.SGD([p], lr=1.0)
    with open_run(tmp_path, host_bytes=16 * MIB) as ckpt, scripted(ckpt) as disk:
        disk.stop("write")
        handle = ckpt.save({"model": {"p": p}}, step=1, guard=optimizer)
        if how == "in place":
            with torch.no_grad():
                p.add_(1)
        elif how == "by data":
            p.data.add_(1)
        else:
            p.grad = torch.ones_like(p)
            states = [torch.zeros_like(p), torch.zeros_like(p), torch.tensor(1.0, device=accelerator.kind)]
            torch._fused_adamw_(
                [p.data], [p.grad], [states[0]], [states[1]], [], [states[2]], lr=1.0, beta1=0.9, beta2=0.999,
                weight_decay=0.0, eps=1e-8, amsgrad=False, maximize=False,
            )  # fmt: skip
        disk.release_all()
        error = handle.exception()

        assert isinstance(error, TornSnapshotError)
        assert error.names == ("model.p",)
        assert ckpt.steps() == []
    assert leftovers(tmp_path) == []


def test_the_data_of_a_parameter_may_be_replaced_while_it_is_copied(tmp_path, accelerator):
    p = torch.nn.Parameter(torch.ones(8 * MIB, device=accelerator.kind))
    optimizer = torch.optim.SGD([p], lr=1.0)
    with open_run(tmp_path, host_bytes=16 * MIB) as ckpt, scripted(ckpt) as disk:
        disk.stop("write")
        handle = ckpt.save({"p": p}, step=1, guard=optimizer)
        p.data = torch.full_like(p, 9.0)
        disk.release_all()
        handle.result()
        assert bool((ckpt.load(1)["p"] == 1).all())


def test_a_failing_disk_lets_the_step_go(tmp_path, accelerator):
    p = torch.nn.Parameter(torch.ones(8 * MIB, device=accelerator.kind))
    p.grad = torch.ones_like(p)
    optimizer = torch.optim.SGD([p], lr=1.0)
    with open_run(tmp_path, host_bytes=16 * MIB) as ckpt, scripted(ckpt) as disk:
        disk.fail("write", error=async_ckpt.StorageUnavailableError("gone", path="/ckpt"), times=None)
        handle = ckpt.save({"p": p}, step=1, guard=optimizer)
        optimizer.step()

        assert isinstance(handle.exception(), async_ckpt.StorageUnavailableError)
        assert bool((p == 0).all())


def test_the_stall_of_the_stream_is_reported(ckpt, accelerator):
    state = {"w": torch.ones(8 * LARGE, device=accelerator.kind)}
    ckpt.prewarm(state)
    with scripted(ckpt) as disk:
        disk.stop("write")
        with accelerator.ahead():  # or the copies might have ended before training gets there
            handle = ckpt.save(state, step=1)
        handle.wait_staged()
        accelerator.module.synchronize()  # a wait that is not over yet counts nothing
        disk.release_all()
        report = handle.result()

    assert report.stall_seconds > accelerator.shortest_wait_seconds(state["w"].nbytes)


# --- back to the device ----------------------------------------------------------------------------------------


def test_a_state_is_loaded_to_the_device(ckpt, accelerator):
    state = many_tensors(2.0, accelerator.kind)
    ckpt.save(state, step=1).result()
    saved = ckpt.load(1, map_location=accelerator.kind)

    assert all(tensor.device.type == accelerator.kind for tensor in saved.values())
    assert_all(saved, 2.0)


def test_a_training_is_restored_in_place_and_goes_on_exactly(tmp_path, accelerator):
    model, optimizer, step = training(accelerator.kind, fused=True)
    for _ in range(3):
        step()
    rng = async_ckpt.RngState()
    with open_run(tmp_path) as ckpt:
        ckpt.save({"model": model, "optimizer": optimizer, "rng": rng}, step=3).result()
        for _ in range(3):
            step()
        wanted = copy_of(model, optimizer)
        drawn = torch.rand(5, device=accelerator.kind)
        addresses = [p.data_ptr() for p in model.parameters()]

        assert ckpt.restore({"model": model, "optimizer": optimizer, "rng": rng}) == 3
        for _ in range(3):
            step()
        assert [p.data_ptr() for p in model.parameters()] == addresses
        for name, tensor in model.state_dict().items():
            assert torch.equal(tensor, wanted[0][name]), name
        assert torch.equal(torch.rand(5, device=accelerator.kind), drawn)


def test_a_new_training_is_restored_onto_the_device(tmp_path, accelerator):
    model, optimizer, step = training(accelerator.kind)
    for _ in range(2):
        step()
    with open_run(tmp_path) as ckpt:
        ckpt.save({"model": model, "optimizer": optimizer}, step=2).result()
    wanted = copy_of(model, optimizer)
    other_model, other_optimizer, _ = training(accelerator.kind)
    with open_run(tmp_path) as ckpt:
        assert ckpt.restore({"model": other_model, "optimizer": other_optimizer}) == 2

    found = copy_of(other_model, other_optimizer)
    assert all(torch.equal(found[0][name], tensor) for name, tensor in wanted[0].items())
    for mine, theirs in zip(found[1], wanted[1], strict=True):
        assert all(torch.equal(mine[name], tensor) for name, tensor in theirs.items())
        assert mine["exp_avg"].device.type == accelerator.kind


def test_a_checkpoint_of_the_device_loads_on_the_host_as_it_was(ckpt, accelerator):
    tensor = torch.randn(MIB, device=accelerator.kind).to(torch.float8_e4m3fn)
    ckpt.save({"w": tensor}, step=1).result()
    saved = ckpt.load(1)["w"]

    assert saved.device.type == "cpu"
    assert torch.equal(saved.view(torch.uint8), tensor.cpu().view(torch.uint8))


def test_a_state_is_loaded_and_restored_to_the_device_inside_of_inference_mode(ckpt, accelerator):
    ckpt.save(many_tensors(5.0, accelerator.kind), step=1).result()
    with torch.inference_mode():
        assert_all(ckpt.load(1, map_location=accelerator.kind), 5.0)
        live = many_tensors(0.0, accelerator.kind)
        ckpt.restore(live)
        assert_all(live, 5.0)


# --- graphs, which only hardware has ---------------------------------------------------------------------------


@pytest.mark.gpu
def test_a_capturable_optimizer_in_a_graph_defers_nothing(tmp_path):
    p = torch.nn.Parameter(torch.ones(2 * LARGE, device="cuda"))
    p.grad = torch.ones_like(p)
    optimizer = torch.optim.AdamW([p], lr=0.5, capturable=True)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            optimizer.step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    with open_run(tmp_path, guard=optimizer) as ckpt:
        wanted = p.detach().clone()
        torch.cuda._sleep(100_000_000)
        handle = ckpt.save({"p": p, "optimizer": optimizer}, step=1)
        graph.replay()  # runs no hooks
        handle.result()

        assert torch.equal(ckpt.load(1)["p"], wanted.cpu())
        assert not torch.equal(p, wanted)


@pytest.mark.gpu
def test_a_graph_is_captured_while_background_threads_copy(tmp_path):
    p = torch.nn.Parameter(torch.ones(16 * MIB, device="cuda"))
    optimizer = torch.optim.SGD([p], lr=1.0)
    x = torch.ones(MIB, device="cuda")
    with open_run(tmp_path, guard=optimizer, host_bytes=64 * MIB) as ckpt, scripted(ckpt) as disk:
        disk.stop("write")
        handle = ckpt.save({"p": p}, step=1)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = x + 1
            disk.release_all()  # only now are most copies enqueued, and waited for, by threads of the library
            handle.wait_staged()
        graph.replay()
        handle.result()

        assert bool((y == 2).all())
        assert bool((ckpt.load(1)["p"] == 1).all())
