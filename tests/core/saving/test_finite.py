"""The check of a save's values for NaN and Inf: what it finds, what it leaves alone, and what it says."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from states import MIB, everywhere, open_run

from async_ckpt import AsyncCheckpointer, NonFinite, StorageUnavailableError
from async_ckpt.core.storage.local import LocalStorage

HALF_BLOCK = 2 * MIB
DTYPES = [
    "float64", "float32", "float16", "bfloat16", "complex32", "complex64", "complex128", "float8_e4m3fn", "float8_e5m2",
    "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu",
]  # fmt: skip


def largest(name: str) -> torch.Tensor:
    """The finite numbers of either sign that are nearest to what is none, in blocks and a half."""
    dtype = getattr(torch, name)
    part = torch.zeros(0, dtype=dtype).real.dtype if dtype.is_complex else dtype
    ends = torch.tensor([torch.finfo(part).max, torch.finfo(part).min], dtype=torch.float64).to(part)
    if name == "float8_e8m0fnu":  # which has no sign
        ends = ends[:1].repeat(2)
    numbers = ends.repeat(3 * HALF_BLOCK // ends.element_size())
    return numbers.view(dtype) if dtype.is_complex else numbers


def bits_of(value: float, name: str) -> torch.Tensor:
    dtype = getattr(torch, name)
    number = torch.tensor([value])
    return (torch.complex(torch.zeros(1), number) if dtype.is_complex else number).to(dtype).view(torch.uint8)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "run"


def marked(root: Path, state: Any, step: int = 1, **check: Any) -> str | None:
    """The note of the mark that a save of the state gets."""
    with open_run(root, check=NonFinite(**check)) as ckpt:
        ckpt.save(state, step).result()
        kind, note = ckpt.marks().get(step, (None, None))
        assert kind in ("bad", None)
        return note


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("name", DTYPES)
def test_one_number_of_any_dtype_that_is_not_finite_is_found(root, name):
    values = largest(name)
    assert marked(root, {"model": {"w": values, "ones": torch.ones(9)}}) is None
    step, raw = 1, values.view(torch.uint8)
    for value in (math.nan, math.inf, -math.inf):
        bits = bits_of(value, name)
        # A dtype without such numbers has another one in its place.
        is_finite = bool(bits.view(values.dtype).to(torch.complex64).isfinite())
        for at in (0, values.nbytes - len(bits)):
            before = raw[at : at + len(bits)].clone()
            raw[at : at + len(bits)] = bits
            step += 1
            note = marked(root, {"model": {"w": values, "ones": torch.ones(9)}}, step)
            assert note == (None if is_finite else "NaN or Inf in model.w")
            raw[at : at + len(bits)] = before


def test_integers_and_flags_are_no_numbers_that_could_be_infinite(root):
    bits = {
        name: torch.full((64,), -1).to(getattr(torch, name)) for name in ("int64", "int32", "int16", "int8", "uint8")
    }

    assert marked(root, {"model": {**bits, "flag": torch.ones(8, dtype=torch.bool), "none": torch.empty(0)}}) is None


def test_of_tensors_side_by_side_those_are_named_that_have_it(root):
    layers = {f"layer{n}": torch.ones(1000) for n in range(2000)}
    for n in (7, 1234):
        layers[f"layer{n}"][-1] = math.nan

    assert marked(root, {"model": layers}) == "NaN or Inf in model.layer7, model.layer1234"


def test_a_note_names_a_few_tensors_and_counts_the_others(root):
    state = {"optimizer": {n: {"exp_avg": torch.full((4,), math.inf)} for n in range(9)}}

    found = "NaN or Inf in optimizer.0.exp_avg, optimizer.1.exp_avg, optimizer.2.exp_avg and 6 more"
    assert marked(root, state) == found


def test_what_may_have_such_values_is_left_alone(root):
    state = {"model": {"attn_mask": torch.full((4,), -math.inf), "w": torch.ones(4)}, "noise": torch.tensor(math.nan)}

    assert marked(root, state, ignore=["*.attn_mask", "noise"]) is None
    assert marked(root, state, 2, ignore="noise") == "NaN or Inf in model.attn_mask"


def test_the_first_save_and_each_of_that_number_is_checked(root):
    with open_run(root, check=NonFinite(every=3)) as ckpt:
        for step in range(10, 80, 10):
            ckpt.save({"w": torch.tensor(math.nan)}, step).result()
        assert [*ckpt.marks()] == [10, 40, 70]


def test_without_the_check_nothing_is_marked(root):
    with open_run(root) as ckpt:
        ckpt.save({"w": torch.tensor(math.nan)}, 1).result()
        assert ckpt.marks() == {}


def test_the_mark_is_there_with_the_commit_so_that_a_restart_passes_over_the_step(root, caplog):
    with open_run(root, check=NonFinite(), keep=1) as ckpt:
        for step, value in ((1, 1.0), (2, math.nan), (3, math.inf)):
            ckpt.save({"w": torch.full((4,), value)}, step).result()
        ckpt.wait()
        assert "step 3 is marked bad: NaN or Inf in w" in caplog.text
        live = {"w": torch.zeros(4)}
        with pytest.warns(RuntimeWarning, match="step 3 is skipped"):
            assert ckpt.restore(live) == 1  # which retention has kept, as the newest that is sound
        assert live["w"].tolist() == [1.0] * 4
        events = [(one["step"], one["mark"]) for one in ckpt.history() if one["kind"] == "mark"]
    assert events == [(2, "bad"), (3, "bad")]


def test_a_further_place_gets_the_mark_with_the_step(tmp_path):
    near, far = tmp_path / "near", tmp_path / "far"
    with open_run([near, far], check=NonFinite()) as ckpt:
        for step, value in ((1, 1.0), (2, math.nan)):
            everywhere(ckpt, ckpt.save({"w": torch.full((4,), value)}, step))
    for place in (near, far):
        with open_run(place) as alone:
            assert alone.marks() == {2: ("bad", "NaN or Inf in w")}


def test_a_mark_that_cannot_be_put_costs_the_save_nothing(root, caplog, monkeypatch):
    put_new = LocalStorage.put_new

    def refuse(own: LocalStorage, path: str, data: bytes) -> None:
        if path.startswith("mark-"):
            raise StorageUnavailableError("the disk is gone", path=path)
        put_new(own, path, data)

    monkeypatch.setattr(LocalStorage, "put_new", refuse)
    assert marked(root, {"w": torch.tensor(math.nan)}) is None
    assert "step 1 could not be marked bad (the disk is gone): NaN or Inf in w" in caplog.text


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"every": 0}, ValueError, "NonFinite.every=…. must be a whole number"),
        ({"every": 2.5}, ValueError, "must be a whole number"),
        ({"ignore": 7}, TypeError, "NonFinite.ignore=…. must be a name"),
    ],
)
def test_a_check_that_makes_no_sense_says_what_to_give(options, error, says):
    with pytest.raises(error, match=says):
        NonFinite(**options)


def test_a_checkpointer_takes_no_other_check(root):
    with pytest.raises(TypeError, match="check must be NonFinite"):
        AsyncCheckpointer(root, check=True)
