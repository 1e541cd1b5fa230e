"""`RngState`: every generator goes on where it was."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from rng_trainers import NAMES, TRAINERS
from states import difference

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


def test_all_generators_repeat_what_they_drew_after_the_state():
    random.gauss(0, 1)
    np.random.normal()
    state = RngState().state_dict()
    first = draw()
    assert draw() != first
    RngState().load_state_dict(state)
    assert draw() == first


def test_the_state_goes_through_an_archive_without_trust(archive):
    random.gauss(0, 1)
    np.random.normal()
    async_ckpt.save({"rng": RngState()}, archive).result()
    first = draw()
    loaded = async_ckpt.load(archive)["rng"]
    RngState().load_state_dict(loaded)
    assert draw() == first
    RngState().load_state_dict(loaded)
    assert difference(RngState().state_dict(), loaded) is None


def test_it_is_restored_in_place_with_the_rest_of_a_run(tmp_path):
    with AsyncCheckpointer(tmp_path) as ckpt:
        handle = ckpt.save({"rng": RngState(), "n": 1}, step=1)
        first = draw()
        handle.result()
        assert ckpt.restore({"rng": RngState()}) == 1
    assert draw() == first


def test_a_state_taken_when_save_was_called_is_what_is_stored(archive):
    handle = async_ckpt.save({"rng": RngState()}, archive)
    first = draw()
    handle.result()
    RngState().load_state_dict(async_ckpt.load(archive)["rng"])
    assert draw() == first


@pytest.mark.parametrize("missing", ["python", "numpy", "torch"])
def test_a_missing_generator_is_left_as_it_is(missing):
    state = RngState().state_dict()
    first = draw()
    del state[missing]
    RngState().load_state_dict(state)
    again = draw()
    parts = {"python": slice(0, 3), "numpy": slice(3, 6), "torch": slice(6, 9)}
    for name, part in parts.items():
        assert (again[part] == first[part]) is (name != missing)


def test_states_of_devices_that_are_not_here_are_passed_over():
    state = RngState().state_dict()
    RngState().load_state_dict(
        state | {"cuda": [torch.zeros(16, dtype=torch.uint8)] * 64 if not torch.cuda.is_available() else []}
    )
    RngState().load_state_dict(state | {"another": 1})


def test_another_process_goes_on_with_the_same_numbers(archive, nursery):
    async_ckpt.save({"rng": RngState()}, archive).result()
    code = (
        "import sys, random, torch, async_ckpt\n"
        "async_ckpt.RngState().load_state_dict(async_ckpt.load(sys.argv[1])['rng'])\n"
        "print(random.random(), torch.rand(1).item())"
    )
    assert nursery.run(code, archive).out.split() == [repr(random.random()), repr(torch.rand(1).item())]


# --- the key sets of trainers ------------------------------------------------------------------------------------
# `keys` must make exactly what the calls of each trainer take.


@pytest.mark.parametrize(("keys", "restores"), TRAINERS, ids=lambda value: getattr(value, "__name__", value))
def test_a_trainer_restores_with_its_own_calls_what_went_through_an_archive(archive, keys, restores):
    random.gauss(0, 1)
    np.random.normal()
    async_ckpt.save({"rng": RngState(keys)}, archive).result()
    first = draw()

    restores(async_ckpt.load(archive)["rng"])

    assert draw() == first


@pytest.mark.parametrize("written", NAMES)
@pytest.mark.parametrize("reader", NAMES)
def test_every_key_set_is_read_whichever_is_written(archive, written, reader):
    random.gauss(0, 1)
    np.random.normal()
    async_ckpt.save({"rng": RngState(written)}, archive).result()
    first = draw()

    RngState(reader).load_state_dict(async_ckpt.load(archive)["rng"])

    assert draw() == first


@pytest.mark.parametrize(("keys", "names"), NAMES.items())
def test_a_key_set_has_exactly_its_keys(keys, names):
    state = RngState(keys).state_dict()

    host = {key for key in state if "cuda" not in key}
    assert host == set(names)
    if not torch.cuda.is_available():
        assert set(state) == host


@pytest.mark.parametrize("keys", ["skyrl", "verl", "open-instruct"])
def test_trainers_get_numpys_tuple_and_we_its_dict(keys):
    np.random.normal()

    theirs = RngState(keys).state_dict()[NAMES[keys][1]]

    assert [type(part) for part in theirs] == [str, np.ndarray, int, int, float]
    assert theirs[0] == "MT19937"
    assert theirs[3] == 1
    assert RngState().state_dict()["numpy"]["bit_generator"] == "MT19937"


def test_an_unknown_key_set_is_refused_by_name():
    with pytest.raises(ValueError, match=r"'skyrl', 'verl', 'open-instruct'.*got 'tinker'"):
        RngState("tinker")  # type: ignore[arg-type]


def test_lists_where_tuples_were_are_read_too():
    random.gauss(0, 1)
    state = RngState("skyrl").state_dict()
    version, internal, gauss = state["random"]
    first = draw()

    RngState().load_state_dict(state | {"random": [version, list(internal), gauss], "numpy": list(state["numpy"])})

    assert draw() == first


def test_a_numpy_that_runs_on_another_bit_generator_goes_on_too():
    usual = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(5))
    try:
        state = RngState().state_dict()
        first = draw()
        RngState().load_state_dict(state)
        assert draw() == first
    finally:
        np.random.set_bit_generator(usual)


# --- states that are none ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("state", "found"),
    [
        ({}, "nothing"),
        ({"model": 1, 7: 2}, "'model', 7"),
        (None, "NoneType"),
        ([{"python": 1}], "list"),
    ],
)
def test_a_state_without_any_known_key_says_what_was_found(state, found):
    with pytest.raises(ValueError, match=f"found .*{found}"):
        RngState().load_state_dict(state)


PYTHON = random.Random(1).getstate()
KEY = np.zeros(624, np.uint32)
BROKEN = [
    ("python", None),
    ("random", (3, (1, 2), None)),
    ("random", (PYTHON[0], (*PYTHON[1][:-1], 9999), None)),
    ("python_rng_state", (*PYTHON[:2], "half")),
    ("torch", torch.zeros(3, dtype=torch.uint8)),
    ("cpu", torch.zeros(5056, dtype=torch.uint8)),
    ("torch_cpu_rng_state", "a string"),
    ("numpy", ("PCG64", 1, 2)),
    ("numpy", ("MT19937", KEY[:5], 3)),
    ("numpy", ("MT19937", KEY, 9999)),
    ("numpy", ("MT19937", KEY, -7)),
    ("numpy_rng_state", {"bit_generator": "MT19937", "state": {"key": KEY, "pos": 625}}),
    ("cuda", "a string"),
    ("cuda", [torch.zeros(16, dtype=torch.uint8), None]),
    ("cuda", 5),
    ("torch_cuda_rng_states", {"cuda:zero": torch.zeros(16, dtype=torch.uint8)}),
]


@pytest.mark.parametrize(("key", "value"), BROKEN)
@pytest.mark.parametrize("position", ["first", "last"])
def test_a_broken_state_is_named_and_no_generator_is_set(key, value, position):
    random.gauss(0, 1)
    np.random.normal()
    keys = next((keys for keys, names in NAMES.items() if key in names), "open-instruct")
    broken = RngState(keys).state_dict()
    draw()
    random.gauss(0, 1)
    np.random.normal()
    now = RngState().state_dict()
    broken.pop(key, None)
    broken = {key: value, **broken} if position == "first" else {**broken, key: value}

    with pytest.raises(ValueError, match=f"'{key}' does not hold"):
        RngState().load_state_dict(broken)

    assert difference(RngState().state_dict(), now) is None


# --- devices -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["one", "list", "names"])
def test_states_of_devices_in_every_form_are_taken_where_there_are_none(form):
    one = RngState().state_dict()["torch"] if not torch.cuda.is_available() else torch.cuda.get_rng_state()
    forms: dict[str, dict[str, Any]] = {
        "one": {"cuda": one},
        "list": {"torch_cuda_rng_state_all": [one] * 2},
        "names": {"torch_cuda_rng_states": {"cuda:0": one, "cuda:99": one}},
    }
    state = RngState("open-instruct").state_dict()
    first = draw()

    RngState().load_state_dict(state | forms[form])

    assert draw() == first
