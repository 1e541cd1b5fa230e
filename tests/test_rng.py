"""`RngState`: every generator goes on where it was."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import difference

import async_ckpt
from async_ckpt import AsyncCheckpointer, RngState


@pytest.fixture(autouse=True)
def _own_generators() -> Any:
    """The test draws from, and sets, the process's generators; others get theirs back."""
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(before[0])
    np.random.set_state(before[1])
    torch.set_rng_state(before[2])


def draw() -> list[Any]:
    # gauss and normal keep half of a pair for the next call: that must be kept too
    return [
        random.random(), random.gauss(0, 1), random.getrandbits(200),
        np.random.rand(3).tolist(), np.random.normal(), np.random.randint(1 << 60),
        torch.randn(5).tolist(), torch.randperm(10).tolist(), torch.rand(1).item(),
    ]  # fmt: skip


def test_all_generators_repeat_what_they_drew_after_the_state() -> None:
    random.gauss(0, 1)
    np.random.normal()
    state = RngState().state_dict()
    first = draw()
    assert draw() != first
    RngState().load_state_dict(state)
    assert draw() == first


def test_the_state_goes_through_an_archive_without_trust(archive: Path) -> None:
    random.gauss(0, 1)
    np.random.normal()
    async_ckpt.save({"rng": RngState()}, archive).result()
    first = draw()
    loaded = async_ckpt.load(archive)["rng"]
    RngState().load_state_dict(loaded)
    assert draw() == first
    RngState().load_state_dict(loaded)
    assert difference(RngState().state_dict(), loaded) is None


def test_it_is_restored_in_place_with_the_rest_of_a_run(tmp_path: Path) -> None:
    with AsyncCheckpointer(tmp_path) as ckpt:
        handle = ckpt.save({"rng": RngState(), "n": 1}, step=1)
        first = draw()
        handle.result()
        assert ckpt.restore({"rng": RngState()}) == 1
    assert draw() == first


def test_a_state_taken_when_save_was_called_is_what_is_stored(archive: Path) -> None:
    handle = async_ckpt.save({"rng": RngState()}, archive)
    first = draw()
    handle.result()
    RngState().load_state_dict(async_ckpt.load(archive)["rng"])
    assert draw() == first


@pytest.mark.parametrize("missing", ["python", "numpy", "torch"])
def test_a_missing_generator_is_left_as_it_is(missing: str) -> None:
    state = RngState().state_dict()
    first = draw()
    del state[missing]
    RngState().load_state_dict(state)
    again = draw()
    parts = {"python": slice(0, 3), "numpy": slice(3, 6), "torch": slice(6, 9)}
    for name, part in parts.items():
        assert (again[part] == first[part]) is (name != missing)
    RngState().load_state_dict({})


def test_states_of_devices_that_are_not_here_are_passed_over() -> None:
    state = RngState().state_dict()
    RngState().load_state_dict(
        state | {"cuda": [torch.zeros(16, dtype=torch.uint8)] * 64 if not torch.cuda.is_available() else []}
    )
    RngState().load_state_dict(state | {"another": 1})


def test_another_process_goes_on_with_the_same_numbers(archive: Path) -> None:
    async_ckpt.save({"rng": RngState()}, archive).result()
    code = (
        "import sys, random, torch, async_ckpt\n"
        "async_ckpt.RngState().load_state_dict(async_ckpt.load(sys.argv[1])['rng'])\n"
        "print(random.random(), torch.rand(1).item())"
    )
    done = subprocess.run([sys.executable, "-c", code, archive], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [repr(random.random()), repr(torch.rand(1).item())]
