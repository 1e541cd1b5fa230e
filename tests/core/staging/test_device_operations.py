"""How many operations a save enqueues before it returns: each costs the training's thread."""

import pytest
import torch
from racing import Gate
from states import MIB, open_run

from async_ckpt.core.host import pool
from async_ckpt.core.staging.snapshot import Snapshot

ITEMS = MIB // 4


def counted(sim) -> int:
    with sim.sim.scheduler.changed:  # a destructor on another thread counts what it enqueues, and takes it back
        return sim.sim.scheduler.num_operations


def operations_of_call(
    sim, root, monkeypatch, *, deferred: int, small: int = 0, large: int = 0, items: int = ITEMS
) -> int:
    """Operations enqueued when `save` returns, of so many tensors of 1 MiB that are deferred, and others that are not.

    `large` have `items` items each.
    """
    fill_later, gate = Snapshot._fill_later, Gate()

    def later(self: Snapshot) -> None:
        gate.passed()
        fill_later(self)

    with monkeypatch.context() as patch:
        patch.setattr(Snapshot, "_fill_later", later)
        parameters = [torch.nn.Parameter(torch.ones(ITEMS, device="sim")) for _ in range(deferred)]
        state = {
            "parameters": parameters,
            "small": [torch.ones(100, device="sim") for _ in range(small)],
            "large": [torch.ones(items, device="sim") for _ in range(large)],
        }
        guard = torch.optim.SGD(parameters, lr=1.0) if parameters else None
        with open_run(root, segment_bytes=4 * MIB) as ckpt:
            ckpt.prewarm(state)
            before = counted(sim)
            with sim.ahead():
                handle = ckpt.save(state, step=1, guard=guard)
                enqueued = counted(sim) - before
            gate.open()
            handle.result()
    return enqueued


def test_a_guarded_call_enqueues_as_much_for_many_deferred_tensors_as_for_few(tmp_path, sim, monkeypatch):
    few = operations_of_call(sim, tmp_path / "few", monkeypatch, deferred=2)
    many = operations_of_call(sim, tmp_path / "many", monkeypatch, deferred=60)

    assert abs(many - few) <= 1  # of all saves on a device, an event follows each 128th copy
    assert few <= 16


@pytest.mark.parametrize("guarded", [False, True])
def test_small_tensors_that_lie_side_by_side_are_one_copy(tmp_path, sim, monkeypatch, guarded):
    deferred = 2 if guarded else 0
    few = operations_of_call(sim, tmp_path / "few", monkeypatch, deferred=deferred, small=2)
    many = operations_of_call(sim, tmp_path / "many", monkeypatch, deferred=deferred, small=300)

    assert abs(many - few) <= 1  # of all saves on a device, an event follows each 128th copy


def test_a_call_enqueues_a_copy_for_each_large_tensor_however_many_segments_it_is_in(tmp_path, sim, monkeypatch):
    # Scaled down, by eight: runs of 128 MiB instead of 1 GiB, and two operations for each instead of four.
    monkeypatch.setattr(pool, "MAX_RUN_BYTES", 128 * MIB)
    few = operations_of_call(sim, tmp_path / "few", monkeypatch, deferred=0, large=128)
    many = operations_of_call(sim, tmp_path / "many", monkeypatch, deferred=0, large=384)

    # And an event after each 128 of all saves, so that the driver's queue is never full: at most one more of 256.
    assert many - few <= 256 + 2 * 2 + 256 // 128 + 1
    assert few <= 128 + 2 * 2 + 8


def test_a_tensor_larger_than_many_segments_is_one_copy(tmp_path, sim, monkeypatch):
    small = operations_of_call(sim, tmp_path / "small", monkeypatch, deferred=0, large=1)
    large = operations_of_call(sim, tmp_path / "large", monkeypatch, deferred=0, large=1, items=40 * ITEMS)

    assert abs(large - small) <= 1  # of all saves on a device, an event follows each 128th copy
