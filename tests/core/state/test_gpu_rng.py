"""`RngState` on CUDA devices: each generator goes on where it was."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from rng_trainers import NAMES, TRAINERS
from states import difference

import async_ckpt
from async_ckpt import AsyncCheckpointer, RngState, StateMismatchError

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _own_generators() -> Any:
    """The test draws from, and sets, the process's generators; others get theirs back."""
    before = random.getstate(), torch.get_rng_state(), torch.cuda.get_rng_state_all()
    yield
    random.setstate(before[0])
    torch.set_rng_state(before[1])
    torch.cuda.set_rng_state_all(before[2])


def draw_on_devices() -> list[Any]:
    return [torch.rand(4, device=f"cuda:{i}").tolist() for i in range(torch.cuda.device_count())]


@pytest.mark.parametrize(("keys", "restores"), TRAINERS, ids=lambda value: getattr(value, "__name__", value))
def test_a_trainer_restores_its_devices(archive, keys, restores):
    async_ckpt.save({"rng": RngState(keys)}, archive).result()
    first = draw_on_devices()
    every = keys == "open-instruct"

    restores(async_ckpt.load(archive)["rng"])

    again = draw_on_devices()
    current = torch.cuda.current_device()
    assert again[current] == first[current]
    assert (again == first) is (every or torch.cuda.device_count() == 1)


def test_a_generator_of_a_device_goes_on_where_it_was(tmp_path):
    saved, live = (torch.Generator("cuda").manual_seed(seed) for seed in (1, 2))
    torch.rand(5, generator=saved, device="cuda")
    with AsyncCheckpointer(tmp_path) as ckpt:
        ckpt.save({"g": saved}, 1).result()
        state = {"g": live}
        ckpt.restore(state)
        loaded = ckpt.load()["g"]
        with pytest.raises(
            StateMismatchError, match=r"g is a torch\.Generator of cpu here and a torch\.Generator of cuda"
        ):
            ckpt.restore({"g": torch.Generator()})
    expected = torch.rand(3, generator=saved, device="cuda").tolist()
    assert state["g"] is live
    assert torch.rand(3, generator=live, device="cuda").tolist() == expected
    assert torch.rand(3, generator=loaded, device="cuda").tolist() == expected


@pytest.mark.parametrize("keys", NAMES)
@pytest.mark.parametrize("map_location", [None, "cuda"])
def test_we_restore_the_devices_of_every_key_set(archive, keys, map_location):
    async_ckpt.save({"rng": RngState(keys)}, archive).result()
    first = draw_on_devices()

    RngState().load_state_dict(async_ckpt.load(archive, map_location=map_location)["rng"])

    current = torch.cuda.current_device()
    assert draw_on_devices()[current] == first[current]


def test_a_state_of_more_devices_sets_those_that_are_here():
    state = RngState().state_dict()
    first = draw_on_devices()
    state["cuda"] += [torch.zeros_like(state["cuda"][0])]
    RngState().load_state_dict(state)
    assert draw_on_devices() == first

    by_name = {f"cuda:{i}": one for i, one in enumerate(state["cuda"])}
    RngState().load_state_dict({"torch_cuda_rng_states": by_name})
    assert draw_on_devices() == first


def test_a_broken_state_of_a_device_changes_no_generator():
    state = RngState("skyrl").state_dict()
    draw_on_devices()
    now = RngState().state_dict()

    for broken in (torch.zeros(3, dtype=torch.uint8), torch.zeros(16)):
        with pytest.raises(ValueError, match="'cuda' does not hold"):
            RngState().load_state_dict(state | {"cuda": broken})

    assert difference(RngState().state_dict(), now) is None
