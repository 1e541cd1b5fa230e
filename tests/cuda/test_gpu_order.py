"""The order of copies and training on CUDA devices: by the clocks of the runtime, whatever the timing."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import cuda_simulation
import pytest
import torch
from cuda_simulation import held
from racing import until
from scripted_disk import scripted
from states import MIB, leftovers, open_run

import async_ckpt
from async_ckpt import SaveHandle, TornSnapshotError
from async_ckpt.core.host.loop import get_loop
from async_ckpt.core.saving import ledger
from async_ckpt.core.saving.attempt import StateSave
from async_ckpt.core.staging.side_stream import side_of
from async_ckpt.errors import UsageError
from async_ckpt.integrations.dcp import PinnedStager

pytestmark = pytest.mark.gpu


def here(device: int = 0) -> torch.cuda.Stream:
    return torch.cuda.current_stream(device)


def mixed(value: float, device: str = "cuda") -> dict[str, torch.Tensor]:
    """Tensors that are copied alone, gathered, and made dense."""
    return {
        "large": torch.full((MIB,), value, device=device),
        "transposed": torch.full((700, 301), value, device=device).t(),
        **{f"small.{n}": torch.full((n,), value, device=device) for n in range(1, 30)},
    }


def assert_all(saved: dict[str, torch.Tensor], value: float) -> None:
    for name, tensor in saved.items():
        assert bool((tensor == value).all()), name


def guarded(value: float, items: int = MIB, device: str = "cuda") -> tuple[torch.nn.Parameter, torch.optim.SGD]:
    p = torch.nn.Parameter(torch.full((items,), value, device=device))
    p.grad = torch.ones_like(p)
    return p, torch.optim.SGD([p], lr=1.0)


# --- what training does before and after -------------------------------------------------------------------------------


def test_what_training_writes_before_a_save_is_in_it_and_what_it_writes_after_is_not(tmp_path):
    state = mixed(0.0)
    with open_run(tmp_path) as ckpt:
        with held(here()):
            for tensor in state.values():
                tensor.fill_(3)
            handle = ckpt.save(state, step=1)
            for tensor in state.values():
                tensor.fill_(-1)
        handle.result()
        assert_all(ckpt.load(1), 3.0)


@pytest.mark.parametrize("priority", [0, -1])
def test_a_save_follows_the_stream_on_which_it_is_called_and_that_stream_follows_the_save(tmp_path, priority):
    state, stream = mixed(0.0), torch.cuda.Stream(priority=priority)
    stream.wait_stream(here())
    with open_run(tmp_path) as ckpt, torch.cuda.stream(stream):
        with held(stream):
            for tensor in state.values():
                tensor.fill_(3)
            handle = ckpt.save(state, step=1)
            for tensor in state.values():
                tensor.fill_(-1)
        handle.result()
        assert_all(ckpt.load(1), 3.0)
    stream.synchronize()


def test_a_save_on_a_stream_of_others_follows_it(tmp_path):
    """Such as one that a library has made in the driver, and torch has not."""
    import ctypes

    made = ctypes.c_void_p()
    assert ctypes.CDLL(None).cudaStreamCreateWithFlags(ctypes.byref(made), 1) == 0
    stream = torch.cuda.ExternalStream(made.value, device="cuda:0")
    state = mixed(0.0)
    stream.wait_stream(here())
    with open_run(tmp_path) as ckpt, torch.cuda.stream(stream):
        for tensor in state.values():
            tensor.fill_(3)
        handle = ckpt.save(state, step=1)
        for tensor in state.values():
            tensor.fill_(-1)
        handle.result()
        assert_all(ckpt.load(1), 3.0)
    stream.synchronize()


def test_the_stream_of_copies_does_not_keep_the_default_stream(tmp_path):
    state = mixed(3.0)
    stream = torch.cuda.Stream()
    stream.wait_stream(here())
    with open_run(tmp_path) as ckpt:
        ckpt.prewarm(state)
        with held(stream):
            with torch.cuda.stream(stream):
                torch.ones(1, device="cuda")
                handle = ckpt.save(state, step=1)
            torch.ones(3, device="cuda").add_(1)
            done = torch.cuda.Event()
            done.record()
            until(done.query)  # while the copies wait
            assert not handle.staging_completion.done()
        handle.result()


def test_a_save_waits_for_no_device(tmp_path):
    """The call returns while the stream is held, with a first save, too: nothing in it waits for the stream."""
    state = mixed(3.0)
    torch.cuda.synchronize()
    with open_run(tmp_path) as ckpt, held(here()):
        handle = ckpt.save(state, step=1)
        assert not handle.staging_completion.done()
    handle.result()


@pytest.fixture
def objecting() -> Iterator[None]:
    """torch raises wherever it waits for a stream."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a prototype
        torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


def test_saves_loads_and_snapshots_wait_for_no_stream_as_a_whole(tmp_path, objecting):
    p, optimizer = guarded(3.0)
    with open_run(tmp_path) as ckpt:
        ckpt.save({"p": p, **mixed(3.0)}, step=1, guard=optimizer).result()
        optimizer.step()
        with async_ckpt.snapshot({"p": p}) as snap:
            ckpt.save(snap, step=2).result()
        loaded = ckpt.load(1, map_location="cuda")
        torch.cuda.set_sync_debug_mode("default")
        assert_all(loaded, 3.0)
        assert_all(ckpt.load(2), 2.0)


def test_a_failed_save_waits_for_no_stream_as_a_whole(tmp_path, objecting):
    p, optimizer = guarded(3.0, 8 * MIB)
    with open_run(tmp_path, host_bytes=16 * MIB) as ckpt, scripted(ckpt) as disk:
        disk.fail("write", error=async_ckpt.StorageUnavailableError("gone", path="/ckpt"), times=None)
        handle = ckpt.save({"p": p}, step=1, guard=optimizer)
        optimizer.step()
        assert isinstance(handle.exception(), async_ckpt.StorageUnavailableError)


def test_the_stall_of_a_stream_is_as_long_as_its_wait_for_the_copies(tmp_path):
    """What another stream does meanwhile, by the device's clock, takes no longer."""
    state, other = {"w": torch.full((MIB,), 3.0, device="cuda")}, torch.cuda.Stream()
    copies = side_of(torch.device("cuda", 0)).stream
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    with open_run(tmp_path) as ckpt:
        with held(copies):
            handle = ckpt.save(state, step=1)
            get_loop().sync()  # which lists the save
            [save] = [save for save in ledger.all_saves() if save.handle is handle]
            assert isinstance(save, StateSave)
            [device] = save.snapshot._source.devices.values()
            before, after = device._holds[0]
            before.synchronize()
            with torch.cuda.stream(other):
                begin.record()
                torch.cuda._sleep(100_000_000)
                end.record()
            end.synchronize()
            assert save.snapshot.stall_seconds < begin.elapsed_time(end) / 1e3  # what is not over counts nothing
        after.synchronize()
        assert handle.result().stall_seconds >= begin.elapsed_time(end) / 1e3


def test_two_saves_one_behind_the_other_are_each_as_of_their_call(tmp_path):
    state = mixed(0.0)
    with open_run(tmp_path, max_in_flight=2) as ckpt:
        handles = []
        with held(here()):
            for step in range(2):
                for tensor in state.values():
                    tensor.fill_(step)
                handles.append(ckpt.save(state, step=step))
        for handle in handles:
            handle.result()
        for step in range(2):
            assert_all(ckpt.load(step), float(step))


def test_two_threads_save_to_two_runs_at_once(tmp_path):
    states = [mixed(float(n)) for n in range(2)]
    torch.cuda.synchronize()
    ready = threading.Barrier(2)

    def saved(number: int) -> SaveHandle:
        with open_run(tmp_path / str(number)) as ckpt:
            ready.wait()
            handles = [ckpt.save(states[number], step=step) for step in range(3)]
            for tensor in states[number].values():
                tensor.fill_(-1)
            for handle in handles:
                handle.result()
            assert_all(ckpt.load(2), float(number))

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(saved, range(2)))


# --- two devices -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("current", [0, 1])
@pytest.mark.usefixtures("two_devices")
def test_what_is_on_two_devices_is_saved_as_of_the_call(tmp_path, current):
    state = {f"{n}.{name}": tensor for n in range(2) for name, tensor in mixed(0.0, f"cuda:{n}").items()}
    with open_run(tmp_path) as ckpt, torch.cuda.device(current):
        with held(here(0), here(1)):
            for tensor in state.values():
                tensor.fill_(3)
            handle = ckpt.save(state, step=1)
            for tensor in state.values():
                tensor.fill_(-1)
        handle.result()
        assert_all(ckpt.load(1), 3.0)


@pytest.mark.usefixtures("two_devices")
def test_steps_of_an_optimizer_on_two_devices_wait_for_the_copies(tmp_path):
    parameters = [guarded(3.0, device=f"cuda:{n}")[0] for n in range(2)]
    optimizer = torch.optim.SGD(parameters, lr=1.0)
    with open_run(tmp_path) as ckpt:
        with held(here(0), here(1)):
            handle = ckpt.save({f"p{n}": p for n, p in enumerate(parameters)}, step=1, guard=optimizer)
            optimizer.step()
        handle.result()
        assert_all(ckpt.load(1), 3.0)
        assert all(bool((p == 2).all()) for p in parameters)


def test_a_save_of_the_second_device_makes_no_context_on_the_first(apart):
    apart(
        """
torch.cuda.set_device(1)
p = torch.nn.Parameter(torch.ones(MIB, device="cuda:1"))
p.grad = torch.ones_like(p)
optimizer = torch.optim.SGD([p], lr=1.0)
with open_run(root) as ckpt:
    ckpt.prewarm({"p": p})
    for step in range(2):
        ckpt.save({"p": p, "small": p[:3]}, step=step, guard=optimizer if step else None)
        optimizer.step()
    ckpt.wait()
    ckpt.load(1, map_location="cuda:1")
    ckpt.restore({"p": p, "small": p.detach()[:3].clone()})
async_ckpt.release()
assert cuda_simulation.has_context(1)
assert not cuda_simulation.has_context(0)
"""
    )


# --- guarded -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [{"foreach": True}, {"fused": True}, {"foreach": False}], ids=str)
def test_the_step_is_enqueued_behind_copies_that_are_still_to_be_made(tmp_path, kind):
    model = torch.nn.Linear(300, 400, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, **kind)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    wanted = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    with open_run(tmp_path, guard=optimizer) as ckpt:
        with held(here()):
            handle = ckpt.save({"model": model, "optimizer": optimizer}, step=1)
            optimizer.step()
        handle.result()
        saved = ckpt.load(1)["model"]
        for name, tensor in wanted.items():
            assert torch.equal(saved[name], tensor.cpu())


def test_a_step_on_another_stream_than_the_save_waits_for_the_copies(tmp_path):
    p, optimizer = guarded(3.0)
    stream = torch.cuda.Stream()
    stream.wait_stream(here())
    with open_run(tmp_path, guard=optimizer) as ckpt:
        with held(here()):
            handle = ckpt.save({"p": p}, step=1)
            with torch.cuda.stream(stream):
                optimizer.step()
        handle.result()
        assert_all(ckpt.load(1), 3.0)
    stream.synchronize()


def test_a_step_waits_until_the_last_copy_is_enqueued(tmp_path):
    p, optimizer = guarded(3.0, 8 * MIB)
    with open_run(tmp_path, host_bytes=16 * MIB, guard=optimizer) as ckpt, scripted(ckpt) as disk:
        disk.stop("write")
        handle = ckpt.save({"p": p}, step=1)
        stepping = threading.Thread(target=optimizer.step)
        stepping.start()
        disk.release_all()
        stepping.join()
        handle.result()
        assert_all(ckpt.load(1), 3.0)


@pytest.mark.parametrize("how", ["by data", "in place", "to an item that is in no sample"])
def test_a_write_outside_of_the_step_fails_the_save_by_name(tmp_path, how):
    p, optimizer = guarded(3.0, 8 * MIB)
    with open_run(tmp_path, host_bytes=16 * MIB) as ckpt, scripted(ckpt) as disk:
        disk.stop("write")
        handle = ckpt.save({"p": p}, step=1, guard=optimizer)
        with torch.no_grad():
            if how == "to an item that is in no sample":
                p[1] = 9
            else:
                (p.data if how == "by data" else p).add_(1)
        disk.release_all()
        error = handle.exception()
    assert isinstance(error, TornSnapshotError)
    assert error.names == ("p",)
    assert cuda_simulation.reports() or not cuda_simulation.is_here()  # it is a race, too


@pytest.mark.usefixtures("two_devices")
def test_a_write_to_the_second_device_outside_of_the_step_fails_the_save_by_name(tmp_path):
    first, second = guarded(3.0)[0], guarded(3.0, 8 * MIB, "cuda:1")[0]
    optimizer = torch.optim.SGD([first, second], lr=1.0)
    with open_run(tmp_path, host_bytes=16 * MIB) as ckpt, scripted(ckpt) as disk:
        disk.stop("write")
        handle = ckpt.save({"first": first, "second": second}, step=1, guard=optimizer)
        second.data.add_(1)
        disk.release_all()
        error = handle.exception()
    assert isinstance(error, TornSnapshotError)
    assert error.names == ("second",)
    assert cuda_simulation.reports() or not cuda_simulation.is_here()  # it is a race, too


# --- memory that is freed or lent again --------------------------------------------------------------------------------


def others(num: int = 4) -> list[torch.Tensor]:
    return [torch.full((MIB,), -1.0, device="cuda") for _ in range(num)]


@pytest.mark.parametrize("stream", ["the training's", "another"])
def test_memory_that_is_freed_right_after_a_save_is_lent_to_nobody_before_it_is_copied(tmp_path, stream):
    home = here() if stream == "the training's" else torch.cuda.Stream()
    with torch.cuda.stream(home):
        state = mixed(4.0)
    here().wait_stream(home)
    with open_run(tmp_path) as ckpt:
        with held(here()):
            handle = ckpt.save(state, step=1)
            state.clear()
            with torch.cuda.stream(home):
                others()
        handle.result()
        assert_all(ckpt.load(1), 4.0)
    home.synchronize()


def test_a_storage_that_is_resized_right_after_a_save_is_saved_as_it_was_if_its_memory_is_the_trainings(tmp_path):
    state = {"w": torch.full((MIB,), 4.0, device="cuda")}
    with open_run(tmp_path) as ckpt:
        with held(here()):
            handle = ckpt.save(state, step=1)
            state["w"].untyped_storage().resize_(0)
            others()
        handle.result()
        assert_all(ckpt.load(1), 4.0)


def test_a_storage_of_another_stream_that_is_resized_while_it_is_copied_fails_the_save_by_name(tmp_path):
    home = torch.cuda.Stream()
    with torch.cuda.stream(home):
        state = {"v": torch.ones(3, device="cuda"), "w": torch.full((MIB,), 4.0, device="cuda")}
    here().wait_stream(home)
    with open_run(tmp_path) as ckpt:
        with held(here()):
            handle = ckpt.save(state, step=1)
            state["w"].untyped_storage().resize_(0)
        error = handle.exception()
        assert isinstance(error, TornSnapshotError)
        assert error.names == ("w",)
        assert "resize_" in str(error)
        assert ckpt.steps() == []


def test_a_guarded_storage_that_is_resized_while_it_is_copied_fails_the_save_by_name(tmp_path):
    p, optimizer = guarded(4.0)
    with open_run(tmp_path) as ckpt:
        with held(here()):
            handle = ckpt.save({"p": p}, step=1, guard=optimizer)
            p.untyped_storage().resize_(0)
        error = handle.exception()
        assert isinstance(error, TornSnapshotError)
        assert error.names == ("p",)


def test_the_data_of_a_parameter_is_replaced_while_it_is_copied(tmp_path):
    p, optimizer = guarded(4.0)
    with open_run(tmp_path) as ckpt:
        with held(here()):
            handle = ckpt.save({"p": p}, step=1, guard=optimizer)
            p.data = torch.full((MIB,), -1.0, device="cuda")
            with torch.no_grad():
                p.add_(1)  # is counted, but of other memory
            others()
        handle.result()
        assert_all(ckpt.load(1), 4.0)


def test_a_saved_tensor_is_not_marked_for_the_stream_of_copies(tmp_path):
    """Memory that is freed after the save is lent at once to a tensor of its size: nothing has to be waited for."""
    with open_run(tmp_path) as ckpt:
        for step, is_guarded in enumerate((False, True)):
            p, optimizer = guarded(4.0)
            ckpt.save({"p": p}, step=step, guard=optimizer if is_guarded else None).result()
            ckpt.wait()
            before = cuda_simulation.num_calls("cudaEventRecord")
            del p, optimizer
            assert cuda_simulation.num_calls("cudaEventRecord") == before


# --- graphs ------------------------------------------------------------------------------------------------------------


def test_a_replay_right_after_a_save_changes_nothing_in_it(tmp_path):
    w = torch.full((MIB,), 3.0, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        w.mul_(2)
    with open_run(tmp_path) as ckpt:
        with held(here()):
            handle = ckpt.save({"w": w}, step=1)
            graph.replay()
        handle.result()
        assert_all(ckpt.load(1), 3.0)
        assert bool((w == 6).all())


@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
def test_a_graph_is_captured_on_any_stream_of_torchs_pool_while_copies_go_on(tmp_path, mode):
    """None of them is the stream of copies, whose operations would get into the graph."""
    w, x = torch.full((MIB,), 3.0, device="cuda"), torch.ones(1000, device="cuda")
    torch.cuda.synchronize()
    with open_run(tmp_path) as ckpt:
        ckpt.save({"w": w}, step=0).result()
        for step, stream in enumerate([torch.cuda.Stream() for _ in range(33)], 1):
            graph = torch.cuda.CUDAGraph()
            stream.wait_stream(here())
            handle = ckpt.save({"w": w}, step=step)
            with torch.cuda.graph(graph, stream=stream, capture_error_mode=mode):
                y = x + step
            graph.replay()
            assert bool((y == step + 1).all())
            handle.result()
        assert_all(ckpt.load(33), 3.0)


SAVES: dict[str, Callable[[async_ckpt.AsyncCheckpointer, Any], Any]] = {
    "a run's": lambda ckpt, state: ckpt.save(state, step=1),
    "one file's": lambda ckpt, state: async_ckpt.save(state, str(Path(ckpt.root) / "one.tar")),
    "a snapshot's": lambda ckpt, state: async_ckpt.snapshot(state),
    "another's": lambda ckpt, state: async_ckpt.wrap(torch.save)(state, str(Path(ckpt.root) / "one.pt")),
}


@pytest.mark.parametrize("save", SAVES.values(), ids=SAVES)
def test_a_save_is_refused_while_a_graph_is_captured_which_goes_on(tmp_path, save):
    w, graph = torch.ones(1000, device="cuda"), torch.cuda.CUDAGraph()
    with open_run(tmp_path) as ckpt:
        with torch.cuda.graph(graph):
            y = w + 1
            with pytest.raises(UsageError, match="while a graph is being captured"):
                save(ckpt, {"w": w})
        graph.replay()
        assert bool((y == 2).all())
        assert leftovers(tmp_path) == []
        ckpt.save({"w": w}, step=2).result()
        assert ckpt.steps() == [2]


@pytest.mark.parametrize("mode", ["global", "thread_local"])
def test_a_guarded_step_that_is_captured_waits_on_the_host_and_takes_no_event_into_its_graph(tmp_path, mode):
    p, optimizer = guarded(3.0, 8 * MIB)
    torch.cuda.synchronize()
    with open_run(tmp_path, host_bytes=16 * MIB) as ckpt, scripted(ckpt) as disk:
        disk.stop("write")
        handle = ckpt.save({"p": p}, step=1, guard=optimizer)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode=mode):
            disk.release_all()
            optimizer.step()
            assert handle.staging_completion.done()
        handle.result()
        assert_all(ckpt.load(1), 3.0)
        graph.replay()
        assert bool((p == 2).all())


# --- back to the device, and by other ways -----------------------------------------------------------------------------


@pytest.mark.usefixtures("two_devices")
def test_what_is_loaded_or_restored_is_there_for_the_stream_that_uses_it_next(tmp_path):
    state = mixed(3.0)
    with open_run(tmp_path) as ckpt:
        ckpt.save(state, step=1).result()
        with held(here()):
            for tensor in state.values():
                tensor.fill_(-1)
        ckpt.restore(state)
        assert_all({name: tensor + 1 for name, tensor in state.items()}, 4.0)
        assert_all({name: tensor + 1 for name, tensor in ckpt.load(1, map_location="cuda:1").items()}, 4.0)


def test_a_held_snapshot_is_of_the_instant_of_its_call(tmp_path):
    state = mixed(3.0)
    with held(here()):
        snap = async_ckpt.snapshot(state)
        for tensor in state.values():
            tensor.fill_(-1)
    with snap, open_run(tmp_path) as ckpt:
        ckpt.save(snap, step=1).result()
        assert_all(ckpt.load(1), 3.0)


def test_a_wrapped_function_gets_the_state_of_the_instant_of_its_call(tmp_path):
    state = mixed(3.0)
    save = async_ckpt.wrap(torch.save)
    with held(here()):
        handle = save(state, str(tmp_path / "x.pt"))
        for tensor in state.values():
            tensor.fill_(-1)
    handle.result()
    assert_all(torch.load(tmp_path / "x.pt", map_location="cpu"), 3.0)


@pytest.mark.usefixtures("two_devices")
def test_a_stager_of_two_devices_stages_the_state_of_the_instant_of_its_call():
    state = {f"w{n}": torch.zeros(MIB, device=f"cuda:{n}") for n in range(2)}
    with closing(PinnedStager()) as stager:
        with held(here(0), here(1)):
            for tensor in state.values():
                tensor.fill_(3)
            staged = stager.stage(state)
            for tensor in state.values():
                tensor.fill_(-1)
        assert_all(staged.result(60), 3.0)


def test_at_the_end_of_the_interpreter_copies_under_way_are_made_and_committed(apart, tmp_path):
    apart(
        """
w = torch.full((4 * MIB,), 3.0, device="cuda")
ckpt = open_run(root)
torch.cuda._sleep(50_000_000)
ckpt.save({"w": w}, step=1)
w.fill_(-1)
"""
    )
    with open_run(tmp_path) as ckpt:
        assert_all(ckpt.load(1), 3.0)
