"""The guard: what an optimizer waits for, what is copied at once, and what betrays a broken promise."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from racing import Call, until
from scripted_disk import ScriptedStorage, scripted
from states import MIB, leftovers, open_run

import async_ckpt
from async_ckpt import AsyncCheckpointer, TornSnapshotError
from async_ckpt.core.staging.guard import deferrable, gate_of, unwrapped
from async_ckpt.core.staging.snapshot import Snapshot
from async_ckpt.core.state.capture import capture

# Several times the budget of host memory, so that a copy cannot end before the disk has taken some of it.
PARAMETER_MIB = 40
BUDGET = 16 * MIB


def parameter(value: float = 1.0, mib: int = PARAMETER_MIB) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.full((mib * MIB // 4,), value))


def sgd(*parameters: torch.nn.Parameter, **options: Any) -> torch.optim.SGD:
    for p in parameters:
        p.grad = torch.ones_like(p)
    return torch.optim.SGD(parameters, lr=1.0, **options)


class Training:
    """A guarded run on a disk that stands still, so that every copy is held in the middle."""

    def __init__(self, ckpt: AsyncCheckpointer, disk: ScriptedStorage) -> None:
        self.ckpt, self.disk = ckpt, disk
        self.order: list[str] = []

    def step_in_thread(self, optimizer: torch.optim.Optimizer) -> Call:
        """Call `optimizer.step()`; returns when it is held by the guard, or is through."""

        def step() -> None:
            optimizer.step()
            self.order.append("stepped")

        call = Call(step)
        call.wait_until_inside("hold")
        return call

    def release(self) -> None:
        self.order.append("released")
        self.disk.release_all()


@pytest.fixture
def training(tmp_path):
    with open_run(tmp_path, host_bytes=BUDGET) as ckpt, scripted(ckpt) as disk:
        disk.stop("write")
        yield Training(ckpt, disk)


def test_the_step_waits_until_the_copy_has_ended_and_the_old_values_are_saved(training):
    p = parameter()
    optimizer = sgd(p)
    handle = training.ckpt.save({"p": p}, step=1, guard=optimizer)
    assert not handle.staging_completion.done()

    stepping = training.step_in_thread(optimizer)
    assert stepping.is_alive()
    assert bool((p == 1).all())
    training.release()
    stepping.outcome()
    handle.result()

    assert training.order == ["released", "stepped"]
    assert bool((p == 0).all())
    assert bool((training.ckpt.load(1)["p"] == 1).all())


@pytest.mark.parametrize("as_keyword", [True, False])
def test_a_step_that_begins_with_a_closure_waits_after_the_closure(training, as_keyword):
    """Forward and backward are in the closure, as in Lightning, and overlap the copy."""
    p = parameter()
    optimizer = sgd(p)
    handle = training.ckpt.save({"p": p}, step=1, guard=optimizer)

    def closure() -> float:
        training.order.append("closure")
        return 0.5

    losses = []
    step = (lambda: optimizer.step(closure=closure)) if as_keyword else (lambda: optimizer.step(closure))
    stepping = Call(lambda: losses.append(step()))
    stepping.wait_until_inside("hold")
    assert training.order == ["closure"]
    assert stepping.is_alive()
    assert bool((p == 1).all())
    training.release()
    stepping.outcome()
    handle.result()

    assert losses == [0.5]
    assert bool((p == 0).all())
    assert bool((training.ckpt.load(1)["p"] == 1).all())


def test_a_save_that_is_begun_in_a_closure_holds_the_step_around_it(training):
    p = parameter()
    optimizer = sgd(p)
    gate_of(optimizer)  # as an earlier save has done
    handles = []
    stepping = Call(lambda: optimizer.step(lambda: handles.append(training.ckpt.save({"p": p}, 1, guard=optimizer))))
    stepping.wait_until_inside("hold")
    assert bool((p == 1).all())
    training.release()
    stepping.outcome()

    assert handles[0].result().status == "committed"
    assert bool((training.ckpt.load(1)["p"] == 1).all())


class Perturbing(torch.optim.SGD):
    """Changes the parameters before it calls the closure, as sharpness-aware minimisation does."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.param_groups[0]["params"][0].add_(1)
        return closure()


def test_a_step_that_may_change_something_before_its_closure_waits_before_it(training):
    p = parameter()
    p.grad = torch.ones_like(p)
    optimizer = Perturbing([p], lr=1.0)
    handle = training.ckpt.save({"p": p}, step=1, guard=optimizer)
    stepping = Call(lambda: optimizer.step(lambda: training.order.append("closure")))
    stepping.wait_until_inside("hold")
    assert training.order == []
    training.release()
    stepping.outcome()

    assert handle.result().status == "committed"
    assert training.order == ["released", "closure"]


def test_the_time_that_the_guard_holds_is_reported_as_stall(training):
    p = parameter()
    optimizer = sgd(p)
    handle = training.ckpt.save({"p": p}, step=1, guard=optimizer)
    stepping = training.step_in_thread(optimizer)
    begin = time.perf_counter()
    stepping.join(0.05)
    held_seconds = time.perf_counter() - begin
    training.release()
    stepping.outcome()

    assert handle.result().stall_seconds >= held_seconds


def test_without_a_guard_save_returns_only_when_the_copy_is_made(training):
    p = parameter()
    saving = Call(lambda: training.ckpt.save({"p": p}, step=1))
    saving.wait_until_inside("_fill_now")
    assert saving.is_alive()
    training.release()
    handle = saving.outcome()

    assert handle.staging_completion.done()
    with torch.no_grad():
        p.zero_()
    handle.result()
    assert bool((training.ckpt.load(1)["p"] == 1).all())


def test_a_checkpointers_guard_serves_every_save_and_can_be_put_aside_for_one(tmp_path):
    p = parameter()
    optimizer = sgd(p)
    with open_run(tmp_path, host_bytes=BUDGET, guard=optimizer) as ckpt, scripted(ckpt) as disk:
        disk.stop("write")
        handle = ckpt.save({"p": p}, step=1)
        assert not handle.staging_completion.done()
        disk.release_all()
        handle.result()
        assert ckpt.save({"p": p}, step=2, guard=None).staging_completion.done()


def test_a_one_off_save_takes_a_guard_too(tmp_path):
    p = parameter(mib=8)
    optimizer = sgd(p)
    handle = async_ckpt.save({"p": p}, tmp_path / "x.tar", guard=optimizer)
    optimizer.step()
    handle.result()

    assert bool((async_ckpt.load(tmp_path / "x.tar")["p"] == 1).all())


def test_many_guarded_steps_save_the_state_before_each(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(512, 1024), torch.nn.LayerNorm(1024), torch.nn.Linear(1024, 512))
    optimizer = torch.optim.AdamW(model.parameters())
    wanted = {}
    with open_run(tmp_path, host_bytes=BUDGET, guard=optimizer) as ckpt:
        for step in range(6):
            optimizer.zero_grad()
            model(torch.randn(4, 512)).square().sum().backward()
            wanted[step] = (
                {k: v.clone() for k, v in model.state_dict().items()},
                [{k: v.clone() for k, v in s.items()} for s in optimizer.state.values()],
            )
            ckpt.save({"model": model, "optimizer": optimizer}, step=step)
            optimizer.step()
        ckpt.wait()
        for step, (weights, moments) in wanted.items():
            saved = ckpt.load(step)
            assert all(torch.equal(saved["model"][k], v) for k, v in weights.items())
            for number, moment in enumerate(moments):
                assert all(torch.equal(saved["optimizer"]["state"][number][k], v) for k, v in moment.items())


def test_the_hook_is_registered_once_however_many_saves_and_checkpointers_there_are(tmp_path):
    p = parameter(mib=2)
    optimizer = sgd(p)
    for name in ("a", "b"):
        with open_run(tmp_path / name, guard=optimizer) as ckpt:
            for step in range(5):
                ckpt.save({"p": p}, step=step)
                optimizer.step()

    assert len(optimizer._optimizer_step_pre_hooks) == 1


def test_the_guard_lets_go_of_an_optimizer_that_is_deleted(tmp_path):
    import gc
    import weakref

    p = parameter(mib=2)
    optimizer = sgd(p)
    gone = weakref.ref(optimizer)
    with open_run(tmp_path) as ckpt:
        ckpt.save({"p": p}, step=1, guard=optimizer).result()
        ckpt.wait()
        del optimizer

        def collected() -> bool:
            gc.collect()
            return gone() is None

        until(collected)


def test_several_optimizers_are_each_held(training):
    first, second = parameter(1.0, 20), parameter(2.0, 20)
    optimizers = [sgd(first), sgd(second)]
    handle = training.ckpt.save({"first": first, "second": second}, step=1, guard=optimizers)
    stepping = [training.step_in_thread(optimizer) for optimizer in optimizers]
    assert all(call.is_alive() for call in stepping)
    training.release()
    for call in stepping:
        call.outcome()
    handle.result()

    assert training.order == ["released", "stepped", "stepped"]
    saved = training.ckpt.load(1)
    assert bool((saved["first"] == 1).all())
    assert bool((saved["second"] == 2).all())


def test_steps_that_are_held_are_woken_when_the_copy_ends(training, monkeypatch):
    """And not at their next look at whether it still goes on, to which they might wait a fifth of a second each."""
    monkeypatch.setattr("async_ckpt.core.staging.guard.LIVENESS_SECONDS", 1e6)
    p = parameter()
    optimizer = sgd(p)
    training.ckpt.save({"p": p}, step=1, guard=optimizer)
    stepping = [training.step_in_thread(optimizer) for _ in range(2)]
    assert all(call.is_alive() for call in stepping)
    training.release()
    for call in stepping:
        call.outcome()


@pytest.fixture
def accelerator():
    """A fresh one; accelerate keeps its state in the process."""
    import accelerate

    yield accelerate.Accelerator(cpu=True)
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()


class Wrapper:
    """What steps an optimizer, and is none."""

    def __init__(self, optimizer: object) -> None:
        self.optimizer = optimizer


@pytest.mark.parametrize(
    "wrap",
    [lambda o: o, Wrapper, lambda o: [Wrapper(Wrapper(o))]],
    ids=["itself", "wrapped", "wrapped twice"],
)
def test_the_step_of_a_prepared_optimizer_waits_and_the_old_values_are_saved(training, accelerator, wrap):
    model = torch.nn.Linear(1024, PARAMETER_MIB * MIB // 4096, bias=False)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    want = model.weight.detach().clone()
    handle = training.ckpt.save({"model": model}, step=1, guard=wrap(optimizer))
    assert not handle.staging_completion.done()

    model.weight.grad = torch.ones_like(model.weight)
    stepping = training.step_in_thread(optimizer)
    assert stepping.is_alive()
    assert torch.equal(model.weight, want)
    training.release()
    stepping.outcome()
    handle.result()

    assert training.order == ["released", "stepped"]
    assert torch.equal(model.weight, want - 1)
    assert torch.equal(training.ckpt.load(1)["model"]["weight"], want)


def test_a_scheduler_is_refused_in_whatever_it_is_wrapped(accelerator):
    optimizer = sgd(parameter(mib=1))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    _, prepared = accelerator.prepare(optimizer, schedule)
    for guard in (schedule, prepared, Wrapper(schedule), [Wrapper(Wrapper(schedule))]):
        with pytest.raises(TypeError, match="guard must be a torch optimizer"):
            unwrapped(guard)


def test_an_optimizer_whose_attribute_of_that_name_is_none_is_the_optimizer():
    optimizer = sgd(parameter(mib=1))
    optimizer.optimizer = "adam"  # of its own meaning

    assert unwrapped(optimizer) == (optimizer,)


@pytest.mark.parametrize(
    "guard", ["adam", 1, torch.nn.Linear(2, 2), [torch.nn.Linear(2, 2)], torch.optim.SGD], ids=repr
)
def test_a_guard_that_is_no_optimizer_is_refused(tmp_path, guard):
    with open_run(tmp_path) as ckpt:
        for call in (lambda: ckpt.save({"p": torch.ones(3)}, 1, guard=guard), lambda: open_run(tmp_path, guard=guard)):
            with pytest.raises(TypeError, match="guard must be a torch optimizer"):
                call()
        assert ckpt.save({"p": torch.ones(3)}, step=1).result().status == "committed"


@pytest.mark.parametrize("whole", [True, False])
def test_a_guard_of_which_the_state_has_nothing_is_named_once(tmp_path, whole):
    model, other = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
    stale = torch.optim.SGD(other.parameters())
    state = {"model": model} if whole else {"w": model.weight.detach()[1:]}

    with open_run(tmp_path) as ckpt:
        with pytest.warns(RuntimeWarning, match="guard=SGD: the state has no tensor of this optimizer") as told:
            ckpt.save(state, step=1, guard=stale).result()
        assert told[0].filename == __file__
        ckpt.save(state, step=2, guard=stale).result()  # a second warning would be an error
        ckpt.save(state, step=3, guard=[sgd(*other.parameters()), sgd(*model.parameters())]).result()
        ckpt.save({"other": other, "model": model}, step=4, guard=sgd(*other.parameters()), select="model").result()


def test_a_part_of_a_state_that_a_trainer_saves_alone_may_have_nothing_of_the_guard(tmp_path):
    guard = sgd(parameter(mib=1))
    async_ckpt.save({"w": torch.ones(3)}, tmp_path / "x.tar", guard=guard).result()
    async_ckpt.wrap(torch.save, guard=guard)({"w": torch.ones(3)}, tmp_path / "x.pt").result()
    with async_ckpt.snapshot({"w": torch.ones(3)}, guard=guard):
        pass


def test_none_is_no_guard():
    assert unwrapped(None) == ()


# --- what is copied before save returns -----------------------------------------------------------------------


def test_small_tensors_and_hyperparameters_may_change_right_after_save(training):
    large, small = parameter(), torch.nn.Parameter(torch.full((1000,), 3.0))
    optimizer = sgd(large, small)
    handle = training.ckpt.save({"large": large, "small": small, "optimizer": optimizer}, step=1, guard=optimizer)
    assert not handle.staging_completion.done()
    with torch.no_grad():
        small.zero_()
    optimizer.param_groups[0]["lr"] = 0.25
    training.release()
    handle.result()

    saved = training.ckpt.load(1)
    assert bool((saved["small"] == 3).all())
    assert saved["optimizer"]["param_groups"][0]["lr"] == 1.0
    assert bool((saved["large"] == 1).all())


@pytest.mark.parametrize("width", [256, 512, 1000])
def test_the_call_for_a_guarded_training_waits_for_no_thread_that_copies(tmp_path, monkeypatch, width):
    model = torch.nn.Sequential(torch.nn.Linear(1024, width), torch.nn.LayerNorm(width), torch.nn.Linear(width, 1024))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 1024)).square().sum().backward()
    optimizer.step()

    def waits(snapshot: Snapshot) -> None:
        raise AssertionError(f"the call waits for the copy of {snapshot}")

    monkeypatch.setattr(Snapshot, "_fill_now", waits)
    with open_run(tmp_path, guard=optimizer) as ckpt:
        ckpt.save({"model": model, "optimizer": optimizer, "lr": 0.1}, step=1).result()
        saved = ckpt.load(1)

    assert all(torch.equal(saved["model"][name], tensor) for name, tensor in model.state_dict().items())
    assert saved["lr"] == 0.1


def test_tensors_that_are_not_the_optimizers_may_change_right_after_save(training):
    guarded, other = parameter(), torch.full((2 * MIB,), 5.0)
    optimizer = sgd(guarded)
    handle = training.ckpt.save({"guarded": guarded, "other": other}, step=1, guard=optimizer)
    assert not handle.staging_completion.done()
    other.zero_()
    training.release()
    handle.result()

    assert bool((training.ckpt.load(1)["other"] == 5).all())


def test_a_tensor_that_is_only_as_large_as_the_rule_says_is_deferred_and_one_smaller_is_not():
    large, small = (torch.nn.Parameter(torch.zeros(n)) for n in (MIB // 4, MIB // 4 - 1))
    optimizer = torch.optim.SGD([large, small])
    captured = capture([large, small])

    assert deferrable((optimizer,), captured.tensors).keys() == {0}


def test_the_state_of_the_optimizer_is_deferred_too():
    p = parameter(mib=2)
    optimizer = torch.optim.AdamW([p])
    p.grad = torch.ones_like(p)
    optimizer.step()
    captured = capture(optimizer)
    deferred = deferrable((optimizer,), captured.tensors)

    assert {captured.specs[i].dotted.rpartition(".")[2] for i in deferred} == {"exp_avg", "exp_avg_sq"}


def test_a_view_that_is_not_dense_is_not_deferred():
    p = torch.nn.Parameter(torch.zeros(1024, 1024))
    optimizer = torch.optim.SGD([p])
    captured = capture([p.data.t()])

    assert deferrable((optimizer,), captured.tensors) == {}


def test_nothing_of_a_capturable_optimizer_is_deferred(tmp_path):
    p = parameter()
    optimizer = torch.optim.AdamW([p])
    optimizer.param_groups[0]["capturable"] = True
    with open_run(tmp_path, guard=optimizer) as ckpt, scripted(ckpt) as disk:
        disk.stop("write")
        handle = ckpt.save({"p": p}, step=1)
        handle.wait_staged(timeout=60)
        with torch.no_grad():
            p.zero_()  # no hook runs when a graph is replayed
        disk.release_all()
        handle.result()
        assert bool((ckpt.load(1)["p"] == 1).all())


def test_tied_weights_are_guarded_once_and_saved_once(training):
    p = parameter()
    optimizer = sgd(p)
    handle = training.ckpt.save({"in": p, "out": p}, step=1, guard=optimizer)
    stepping = training.step_in_thread(optimizer)
    training.release()
    stepping.outcome()

    assert handle.result().num_bytes < 1.5 * PARAMETER_MIB * MIB
    saved = training.ckpt.load(1)
    assert bool((saved["in"] == 1).all())
    assert bool((saved["out"] == 1).all())


# --- broken promises ------------------------------------------------------------------------------------------


def write_in_place(p: torch.nn.Parameter) -> None:
    with torch.no_grad():
        p.add_(1)


def write_to_data(p: torch.nn.Parameter) -> None:
    version = p._version
    p.data.add_(1)
    assert p._version == version  # which is why the counter alone would not do


def write_through_numpy(p: torch.nn.Parameter) -> None:
    p.detach().numpy()[:] += 1


@pytest.mark.parametrize("write", [write_in_place, write_to_data, write_through_numpy])
def test_a_write_outside_of_the_step_fails_the_save_and_names_the_tensor(tmp_path, training, write):
    intact, torn = parameter(mib=2), parameter(mib=PARAMETER_MIB)
    optimizer = sgd(intact, torn)
    handle = training.ckpt.save({"model": {"intact": intact, "torn": torn}}, step=1, guard=optimizer)
    assert not handle.staging_completion.done()
    write(torn)
    training.release()

    error = handle.exception()
    assert isinstance(error, TornSnapshotError)
    assert error.names == ("model.torn",)
    assert "model.torn" in str(error)
    assert training.ckpt.steps() == []
    assert leftovers(tmp_path) == []


def test_after_a_torn_snapshot_the_next_save_works(training):
    p = parameter()
    optimizer = sgd(p)
    handle = training.ckpt.save({"p": p}, step=1, guard=optimizer)
    write_in_place(p)
    training.release()
    assert isinstance(handle.exception(), TornSnapshotError)
    with pytest.raises(TornSnapshotError):
        handle.wait_staged()

    optimizer.step()
    training.ckpt.save({"p": p}, step=1, guard=optimizer).result()
    assert torch.equal(training.ckpt.load(1)["p"], p)


def test_a_write_before_the_guarded_step_is_found_although_the_step_waits(training):
    p = parameter()
    optimizer = sgd(p)
    handle = training.ckpt.save({"p": p}, step=1, guard=optimizer)
    write_to_data(p)
    stepping = training.step_in_thread(optimizer)
    training.release()
    stepping.outcome()

    assert isinstance(handle.exception(), TornSnapshotError)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int8], ids=str)
def test_a_change_of_any_one_bit_of_every_item_is_seen(training, dtype):
    p = torch.nn.Parameter(torch.zeros(PARAMETER_MIB * MIB // dtype.itemsize, dtype=dtype), requires_grad=False)
    optimizer = torch.optim.SGD([p])
    handle = training.ckpt.save({"p": p}, step=1, guard=optimizer)
    p.data.view(torch.uint8)[:: dtype.itemsize] ^= 1
    training.release()

    assert isinstance(handle.exception(), TornSnapshotError)


def test_waiting_for_the_staging_lets_the_state_change_in_any_way(tmp_path):
    p = parameter()
    optimizer = sgd(p)
    with open_run(tmp_path, guard=optimizer) as ckpt, scripted(ckpt) as disk:
        disk.stop("write")
        handle = ckpt.save({"p": p}, step=1)
        handle.wait_staged(timeout=60)
        write_in_place(p)
        disk.release_all()
        handle.result()
        assert bool((ckpt.load(1)["p"] == 1).all())


# --- the guard never holds forever ----------------------------------------------------------------------------


def failing(disk: ScriptedStorage) -> Callable[[], None]:
    def release() -> None:
        for stop in disk._stops:
            stop.release(error=async_ckpt.StorageUnavailableError("gone", path="/ckpt"))

    return release


def test_a_failing_disk_lets_the_step_go(training):
    p = parameter()
    optimizer = sgd(p)
    handle = training.ckpt.save({"p": p}, step=1, guard=optimizer)
    stepping = training.step_in_thread(optimizer)
    assert stepping.is_alive()
    failing(training.disk)()
    stepping.outcome()

    assert isinstance(handle.exception(), async_ckpt.StorageUnavailableError)
    assert bool((p == 0).all())


def test_a_place_that_cannot_be_opened_lets_the_step_go(tmp_path):
    p = parameter()
    optimizer = sgd(p)
    with open_run(tmp_path, host_bytes=BUDGET) as ckpt, scripted(ckpt) as disk:
        stop = disk.stop("create", times=1)
        handle = ckpt.save({"p": p}, step=1, guard=optimizer)
        stop.wait_reached()
        stepping = Call(optimizer.step)
        stepping.wait_until_inside("hold")
        stop.release(error=async_ckpt.StorageUnavailableError("gone", path="/ckpt"))
        stepping.outcome()

        assert isinstance(handle.exception(), async_ckpt.StorageUnavailableError)
        assert ckpt.save({"p": p}, step=1).result().status == "committed"


def test_two_guarded_saves_in_flight_are_both_of_their_instant(tmp_path):
    p = parameter(mib=24)
    optimizer = sgd(p)
    with (
        open_run(tmp_path, host_bytes=BUDGET, guard=optimizer, max_in_flight=2) as ckpt,
        scripted(ckpt) as disk,
    ):
        stop = disk.stop("write")

        def train() -> None:
            for step in (1, 2):
                ckpt.save({"p": p}, step=step)
            optimizer.step()

        training = Call(train)
        stop.wait_reached()
        disk.release_all()
        training.outcome()
        ckpt.wait()

        assert bool((p == 0).all())
        assert bool((ckpt.load(1)["p"] == 1).all())
        assert bool((ckpt.load(2)["p"] == 1).all())


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="Linux alone lists the threads of a process")
def test_samples_are_taken_without_threads_of_torch():
    """A training on the host keeps these threads busy, and a call that waits for them takes as long as they do."""
    code = """
import os
import torch
from async_ckpt.core.spec import TensorSpec
from async_ckpt.core.staging.tensors import SourceTensors
from async_ckpt.core.staging.tripwires import Tripwires

torch.set_num_threads(4)
tensors = [torch.empty(1 << 14) for _ in range(1_000)]
specs = [TensorSpec((i,), "F32", (1 << 14,)) for i in range(1_000)]
source = SourceTensors(specs, tensors, deferred=dict(enumerate(tensors)))
source.locate()
num_threads = len(os.listdir("/proc/self/task"))
tripwires = Tripwires(source)
tripwires.look_at_bytes()
assert tripwires.torn() == []
print(len(os.listdir("/proc/self/task")) - num_threads)
torch.take(tensors[0], torch.arange(100_000) % 100)
print(len(os.listdir("/proc/self/task")) - num_threads)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    taken, by_torch = map(int, done.stdout.split())
    assert by_torch > 0, "torch has no threads here, and the test shows nothing"
    assert taken == 0
