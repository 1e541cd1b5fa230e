"""Loads to a device: what they page-lock, and what crosses the bus."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import simulated
import torch
from accelerators import Simulated
from states import MIB, open_run

import async_ckpt
from async_ckpt.core.host.pool import SegmentPool
from async_ckpt.core.loading.archives.find import from_path
from async_ckpt.core.loading.fill import Wanted, fill, planned

both = pytest.mark.parametrize("sim", ["early", "late"], indirect=True)


@pytest.fixture
def uploads(sim: Simulated, monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """What was copied from the host to a device, by whichever stream."""
    copied: list[torch.Tensor] = []
    copy = simulated._copy

    def noted(source: torch.Tensor, target: torch.Tensor, non_blocking: bool) -> torch.Tensor:
        if source.device.type == "cpu" and target.device.type == "sim":
            # Of anything else CUDA makes a copy in pageable memory, and copies that.
            assert source.is_contiguous()
            assert target.is_contiguous()
            assert sim.sim.is_registered(source)
            assert non_blocking
            copied.append(source)
        return copy(source, target, non_blocking)

    monkeypatch.setattr(simulated, "_copy", noted)
    return copied


def filled(path: Path, into: Sequence[torch.Tensor], offsets: Sequence[Any], pool: SegmentPool | None = None) -> None:
    """Fill boxes of the one tensor of a file."""

    def use(parts: Any) -> None:
        wanted = [Wanted(0, memory, at) for memory, at in zip(into, offsets, strict=True)]
        fill(planned([(parts[0].archive, wanted)]), pool=pool)

    from_path(path, use, verify=True)


@pytest.fixture
def saved(archive: Path) -> torch.Tensor:
    whole = torch.arange(4 * MIB).view(1024, -1)  # 32 MiB
    async_ckpt.save({"w": whole}, archive).result()
    return whole


@both
def test_columns_of_a_tensor_reach_a_device_without_pageable_memory(archive, saved, sim, uploads):
    halves = [torch.zeros(1024, 2048, dtype=torch.int64, device="sim") for _ in range(2)]
    filled(archive, halves, [(0, 0), (0, 2048)])

    assert all(torch.equal(half.cpu(), part) for half, part in zip(halves, saved.split(2048, dim=1), strict=True))
    assert sum(copy.nbytes for copy in uploads) <= saved.nbytes  # each byte crosses the bus once


@both
@pytest.mark.parametrize("view", [lambda t: t.t(), lambda t: t[:, ::2]], ids=["transposed", "strided"])
def test_a_tensor_that_is_not_dense_is_filled_without_pageable_memory(archive, sim, uploads, view):
    into = view(torch.zeros(64, 128, device="sim"))
    values = torch.rand(tuple(into.shape))
    async_ckpt.save({"w": values}, archive).result()
    filled(archive, [into], [None])

    assert torch.equal(into.cpu(), values)
    assert uploads


@both
def test_columns_are_right_on_a_device_that_has_no_memory_left(archive, saved, sim):
    half = torch.zeros(1024, 2048, dtype=torch.int64, device="sim")
    transposed = torch.zeros(4096, 1024, dtype=torch.int64, device="sim").t()
    memory = sim.sim.memories[0]
    memory.limit_bytes = 0
    filled(archive, [half, transposed], [(0, 2048), None])
    memory.limit_bytes = None

    assert torch.equal(half.cpu(), saved[:, 2048:])
    assert torch.equal(transposed.cpu(), saved)


def test_a_load_page_locks_its_buffers_by_one_call(archive, saved, sim):
    whole = torch.zeros(1024, 4096, dtype=torch.int64, device="sim")
    before = sim.sim.num_registrations
    filled(archive, [whole], [None])

    assert torch.equal(whole.cpu(), saved)
    assert sim.sim.num_registrations == before + 1


def test_a_restore_page_locks_nothing_that_the_pool_has_page_locked(tmp_path, sim):
    state = {"w": torch.arange(4 * MIB).to("sim")}
    with open_run(tmp_path, segment_bytes=32 * MIB, host_bytes=256 * MIB) as ckpt:
        ckpt.prewarm(state)  # else the pool grows in the background, and page-locks at any moment
        ckpt.save(state, step=1).result()
        pinned = sim.sim.num_registrations
        state["w"].zero_()
        ckpt.restore(state)

        assert sim.sim.num_registrations == pinned
        assert torch.equal(state["w"].cpu(), torch.arange(4 * MIB))


def test_a_load_of_a_run_page_locks_nothing_that_the_pool_has_page_locked(tmp_path, sim):
    state = {"w": torch.arange(4 * MIB).to("sim")}
    with open_run(tmp_path, segment_bytes=32 * MIB, host_bytes=256 * MIB) as ckpt:
        ckpt.prewarm(state)  # else the pool grows in the background, and page-locks at any moment
        ckpt.save(state, step=1).result()
        pinned = sim.sim.num_registrations
        loaded = ckpt.load(map_location="sim")

        assert sim.sim.num_registrations == pinned
        assert torch.equal(loaded["w"].cpu(), torch.arange(4 * MIB))
