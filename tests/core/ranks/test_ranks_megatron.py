"""Megatron's ShardedTensors in the states of several ranks: saved by their keys, wherever they lie."""

import sys

import pytest
import torch
from megatron_parts import LocalNonpersistentObject, ShardedObject, ShardedTensor, ShardedTensorFactory
from rank_states import numbered
from states import open_run

import async_ckpt
from async_ckpt import StateMismatchError, UnsupportedStateError
from async_ckpt.core.slicing.sharded import Slicer
from async_ckpt.core.state.capture import capture

linux = pytest.mark.skipif(sys.platform != "linux", reason="forks as Linux has them")

# Two stages of a pipeline with two layers each, of tensor parallelism 2. All layers are rows of one tensor, as Megatron has
# it; each stage calls its own 0 and 1. The norm is on both ranks of a stage; the embedding on the first stage, and a copy
# on the last. A flattened part of an optimizer's moment is no rectangle.
STAGES = """
from megatron_parts import ShardedTensor
stage, tp = divmod(here.rank, 2)

def state(add, fill=None):
    def part(whole, *cuts, **options):
        data = whole.clone() if fill is None else torch.full_like(whole, fill)
        return ShardedTensor.of(options.pop("key"), data.contiguous(), *cuts, **options)
    layers = numbered(4, 6, 10) + add
    model = {}
    for i in (0, 1):
        number = 2 * stage + i
        weight = layers[number, 3 * tp : 3 * tp + 3]
        model[f"layers.{i}.weight"] = part(weight, (0, number, 4), (1, tp, 2), key="layers.weight", prepended=1)
        norm = numbered(9) + number + add
        model.setdefault("norms", {})[i] = part(norm, key=f"layers.{number}.norm", replica_id=(0, tp, 0))
    table = (numbered(8, 5) + add)[4 * tp : 4 * tp + 4]
    model["embedding" if stage == 0 else "output"] = part(table, (0, tp, 2), key="table", replica_id=(0, 0, stage))
    flat = ShardedTensor.of("moment", numbered(4, 4) + add)
    elements = slice(5 * here.rank if here.rank else 0, 5 * here.rank + 5 if here.rank < 3 else 16)
    flat.data = (flat.data.reshape(-1)[elements].clone() if fill is None
                 else torch.full((elements.stop - elements.start,), fill))
    flat.flattened_range = elements
    return {"model": model, "optimizer": {"state": {"exp_avg": flat}}, "args": {"lr": 0.1}}

def tensors(value):
    if isinstance(value, ShardedTensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors(item)
"""
SAVED = (
    STAGES
    + """
with open_run(here.root) as ckpt:
    for step in (1, 2):
        here.save(ckpt, state(step), step)
    live = state(0, fill=-1.0)
    here.tell(ckpt.restore(live))
    here.tell([torch.equal(a.data, b.data) for a, b in zip(tensors(live), tensors(state(2)), strict=True)])
"""
)


def test_stages_of_megatron_are_one_state_by_its_keys_and_each_restores_its_own(worlds):
    for one in worlds.run(4, SAVED):
        assert [save.get("status") for save in one.saves] == ["committed"] * 2, one.saves
        assert one.told[2] == 2
        assert one.told[3] == [True] * 6

    with open_run(worlds.root) as ckpt:
        for step in (1, 2):
            model = ckpt.load(step)["model"]
            assert torch.equal(model["layers.weight"], numbered(4, 6, 10) + step)
            assert torch.equal(model["table"], numbered(8, 5) + step)
            for number in range(4):
                assert torch.equal(model[f"layers.{number}.norm"], numbered(9) + number + step)
            loaded = ckpt.load(step)
            assert torch.equal(loaded["optimizer"]["moment"], numbered(4, 4) + step)
            assert loaded["args"] == {"lr": 0.1}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        # Rank 1 has the copy, rank 0 nothing.
        (
            "state = {'m': {'w': part} if here.rank else {}}",
            "w is sharded, but not all of its ranks saved it",
        ),
        (
            "state = {'m': {'w': part}}; part.data += here.rank",
            "w should be the same on ranks 0 and 1, but differs",
        ),
        (
            "part.replica_id = 0; part.global_shape = (3 + here.rank,); state = {'m': {'w': part}}",
            "w is float32",
        ),
    ],
)
def test_copies_of_megatron_are_compared_and_what_only_copies_have_is_missed(worlds, change, told):
    script = f"""
    from megatron_parts import ShardedTensor
    part = ShardedTensor.of("w", numbered(3), replica_id=here.rank)
    {change}
    with open_run(here.root) as ckpt:
        here.save(ckpt, state, 1)
    """
    for one in worlds.run(2, script):
        assert told in one.saves[0]["text"]


def test_slices_of_one_key_are_one_tensor():
    rows = [ShardedTensor.of("w", torch.full((3,), float(n)), (0, n, 2), prepended=1) for n in (0, 1)]
    captured = capture({"a": {"x": rows[0], "inner": {"y": rows[1]}}}, slicer=Slicer())

    assert [spec.path for spec in captured.specs] == [("a", "w"), ("a", "w")]
    assert captured.slices[0].global_shape == (2, 3)
    assert [tensor.tolist() for tensor in captured.tensors] == [[[0.0] * 3], [[1.0] * 3]]


def test_by_select_they_are_known_by_their_keys():
    state = {"a": {"x": ShardedTensor.of("w", torch.ones(3)), "y": torch.ones(2)}}

    assert [spec.path for spec in capture(state, "a.w", slicer=Slicer()).specs] == [("a", "w")]
    assert [spec.path for spec in capture(state, "a.y", slicer=Slicer()).specs] == [("a", "y")]


PART = ShardedTensor.of("w", torch.ones(3))


@pytest.mark.parametrize(
    ("state", "told"),
    [
        (
            {"a": {"x": PART, "w": 3}},
            r"a\.w: another entry has the name of this ShardedTensor",
        ),
        ({"a": [PART]}, r"a\.w: a ShardedTensor must be in a dict of the state"),
        (PART, "a ShardedTensor called 'w' must be an entry of a dict"),
        ({"a": {"x": PART, "y": PART}}, r"a\.w: .* overlap"),
        (
            {"a": {"x": PART, "y": ShardedTensor.of("w", torch.ones(4))}},
            r"a\.w: its slices belong to tensors of shapes \(3,\) and \(4,\)",
        ),
        (
            {"a": {"x": PART, "y": ShardedTensor.of("w", torch.ones(3).half())}},
            r"a\.w: its slices have different dtypes: torch.float16, torch.float32",
        ),
        (
            {"a": {"x": ShardedObject("o", 3, (1,), (0,))}},
            r"a\.x: a ShardedObject holds any kind of object; save its data",
        ),
        (
            {"a": {"x": ShardedTensorFactory("f", torch.ones(2), list, list)}},
            r"a\.x: a ShardedTensorFactory makes ShardedTensors, but is not one; replace it by its build\(\)",
        ),
        (
            {"a": {"x": LocalNonpersistentObject(3)}},
            r"a\.x: a LocalNonpersistentObject is not to be saved; leave it out",
        ),
    ],
)
def test_what_of_megatron_has_no_place_is_refused_by_name(state, told):
    with pytest.raises(UnsupportedStateError, match=told):
        capture(state, slicer=Slicer())


def test_one_file_takes_none_of_them(tmp_path):
    with pytest.raises(UnsupportedStateError, match=r"a\.x: each rank has only a part of a ShardedTensor"):
        async_ckpt.save({"a": {"x": PART}}, tmp_path / "x.tar")


def embedding(num_rows: int, first: int, **options) -> dict:
    """Rows of a vocabulary that is padded to a multiple of the number of ranks, filled with -1."""
    part = ShardedTensor.of("embedding", torch.full((num_rows, 4), -1.0), (0, first // num_rows, 2), **options)
    return {"model": {"e": part}}


@pytest.mark.parametrize(("num_rows", "num_loaded"), [(6, 4), (5, 5), (3, 3), (12, 0)])
def test_with_allow_shape_mismatch_the_overlap_is_loaded_and_the_rest_left_as_it_is(tmp_path, num_rows, num_loaded):
    """Ten rows were saved; the second of two ranks holds as many rows from there on."""
    saved = torch.arange(40.0).view(10, 4)
    with open_run(tmp_path) as ckpt:
        ckpt.save({"model": {"embedding": saved}}, step=1).result()
        state = embedding(num_rows, num_rows)
        if num_rows != 5:
            with pytest.raises(StateMismatchError, match=r"float32\[10, 4\] in the checkpoint"):
                ckpt.restore(state)
        state["model"]["e"].allow_shape_mismatch = True
        assert ckpt.restore(state) == 1

    rows = state["model"]["e"].data
    assert torch.equal(rows[:num_loaded], saved[num_rows : num_rows + num_loaded])
    assert bool((rows[num_loaded:] == -1).all())


def test_allow_shape_mismatch_of_a_flattened_range(tmp_path):
    """As of a distributed optimizer: elements 2 to 14 of the four rows from row 8 on."""
    saved = torch.arange(40.0).view(10, 4)
    part = ShardedTensor.of("embedding", torch.zeros(4, 4), (0, 2, 3))
    part.data, part.flattened_range, part.allow_shape_mismatch = torch.full((12,), -1.0), slice(2, 14), True
    with open_run(tmp_path) as ckpt:
        ckpt.save({"model": {"embedding": saved}}, step=1).result()
        assert ckpt.restore({"model": {"e": part}}) == 1

    assert part.data.tolist() == [*saved.view(-1)[34:].tolist(), *[-1.0] * 6]


def test_values_that_ranks_of_one_structure_alone_have_are_loaded_of_all(worlds, tmp_path):
    script = """
from megatron_parts import ShardedTensor
part = ShardedTensor.of("layers.w", torch.full((2, 3), float(here.rank)), (0, here.rank, 3))
with open_run(here.root) as ckpt:
    here.save(ckpt, {"model": part, f"own/{here.rank}": [[here.rank] * 3]}, 1)
"""
    worlds.run(3, script, root=tmp_path / "run")

    for _ in range(2):
        loaded = async_ckpt.load(tmp_path / "run")
        assert [loaded[f"own/{rank}"] for rank in range(3)] == [[[rank] * 3] for rank in range(3)]
        for layout in (tmp_path / "run").glob("step_*/layout.*"):
            layout.unlink()
