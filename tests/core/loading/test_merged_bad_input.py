"""What a restore of many ranks' state refuses, each in words that say what to do; and what of an optimizer is not there."""

import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from archives import forge_manifest
from fake_ranks import distributed, standing_at
from matrix_restores import SHAPES, fully_sharded, restore, saved
from matrix_slices import numbered
from rank_archives import ATTEMPT
from states import difference
from test_merged_reads import restored_by_two, rows
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import async_ckpt
from async_ckpt import CorruptCheckpointError, NotCommittedError, StateMismatchError
from async_ckpt.core.runs import layouts
from async_ckpt.core.runs.manifest import seal, unseal
from async_ckpt.core.slicing.sharded import local_part
from async_ckpt.errors import FormatVersionError


def on_three(tensor: torch.Tensor, placement: Any = None) -> DTensor:
    return distributed(tensor, init_device_mesh("cpu", (3,)), [placement or Shard(0)])


MISFITS: dict[str, tuple[Callable[[], Any], str]] = {
    "another name": (lambda: {"other": on_three(numbered((13, 6)))}, "missing in the checkpoint: other"),
    "a name too many": (
        lambda: {"model": {"a": on_three(numbered((13, 6)))}},
        "unexpected in the checkpoint: model.b|missing in the checkpoint: model",
    ),
    "another shape": (lambda: {"a": on_three(numbered((14, 6)))}, r"a is float32\[14, 6\] here and float32\[13, 6\]"),
    "another dtype": (
        lambda: {"a": on_three(numbered((13, 6)).half())}, r"a is float16\[13, 6\] here and float32\[13, 6\]"
    ),
    "a partial tensor": (
        lambda: {"a": DTensor.from_local(numbered((13, 6)), init_device_mesh("cpu", (3,)), [Partial()], run_check=False)},
        "a cannot be filled: a DTensor that is Partial.* call redistribute",
    ),
    "a tensor on meta": (
        lambda: {"a": on_three(torch.empty(13, 6, device="meta"))},
        "a cannot be filled: a meta tensor has no values; materialise the module first",
    ),
    "a plain tensor on meta": (
        lambda: {"a": torch.empty(13, 6, device="meta")}, "a cannot be filled: a meta tensor has no values; materialise the module first"
    ),
    "no tensor": (lambda: {"a": {"b": on_three(numbered((13, 6)))}}, "a is a dict here and a tensor in the checkpoint"),
}  # fmt: skip


@pytest.mark.parametrize("kind", MISFITS)
def test_what_does_not_fit_is_told_by_name_before_anything_is_written(kind, tmp_path):
    folder = saved(tmp_path, 2, fully_sharded(2))
    make, says = MISFITS[kind]
    with standing_at(1, 3), torch.no_grad():
        fitting = on_three(numbered(SHAPES["b"]), Replicate())
        local_part(fitting).fill_(-1)

        with pytest.raises(StateMismatchError, match=says):
            restore(folder, 1, 3, {**make(), "b": fitting})

        assert bool((local_part(fitting) == -1).all())


def test_a_manifest_of_a_newer_version_is_refused_as_such(tmp_path):
    folder = saved(tmp_path, 3, rows((21, 2), 2)(3))

    forge_manifest(folder / "manifest.json", version=9)
    with pytest.raises(FormatVersionError, match="install a newer async_ckpt"):
        restored_by_two(folder)


def test_a_layout_of_a_newer_version_is_done_without(tmp_path):
    folder = saved(tmp_path, 3, rows((21, 2), 2)(3))
    path = folder / f"layout.{ATTEMPT}.json"
    told = unseal(path.read_bytes())
    del told["digest"]
    path.write_bytes(seal({**told, "shares": 3}))

    with pytest.raises(ValueError, match="shares by version 3"):
        layouts.parse(path.read_bytes())
    restored_by_two(folder)


def test_half_a_step_that_was_copied_by_hand_is_told(tmp_path):
    folder = saved(tmp_path, 3, rows((21, 2), 2)(3))

    half = tmp_path / "half" / "step_00000001"
    shutil.copytree(folder, half, ignore=shutil.ignore_patterns("rank_00002*"))
    with pytest.raises(
        CorruptCheckpointError,
        match=r"rank_00002\S* is missing, though the manifest of step 1 names it; .*copy all of it.*rank 2's, and has parts of 0, 1",
    ) as caught:
        restored_by_two(half)
    assert caught.value.tensors == ("0", "1")

    shutil.rmtree(half)
    shutil.copytree(folder, half, ignore=shutil.ignore_patterns("archives*"))
    with pytest.raises(CorruptCheckpointError, match=r"archives\S* is missing, though the manifest of step 1"):
        restored_by_two(half)

    shutil.rmtree(half)
    shutil.copytree(folder, half, ignore=shutil.ignore_patterns("manifest*"))
    with pytest.raises(NotCommittedError, match="no committed checkpoint there"):
        async_ckpt.load(half)
    with (
        async_ckpt.AsyncCheckpointer(half.parent, ranks=(0, 1)) as ckpt,
        pytest.warns(RuntimeWarning, match=r"archives of all ranks without their manifest, in step_00000001"),
    ):
        assert ckpt.restore({"0": torch.zeros(21, 2)}) is None


def test_a_step_that_was_copied_without_those_that_it_borrows_from_says_so(tmp_path):
    with async_ckpt.AsyncCheckpointer(tmp_path / "run") as ckpt:
        state = {"m": {"w": torch.ones(3)}, "n": 1}
        ckpt.save(state, 1).result()
        ckpt.save(state, 2, unchanged="m").result()
    shutil.copytree(tmp_path / "run" / "step_00000002", tmp_path / "half" / "step_00000002")
    with pytest.raises(
        CorruptCheckpointError,
        match=r"step_00000001.* is missing, though the manifest of step 2 names it; .* merge\(\) step 2",
    ):
        async_ckpt.load(tmp_path / "half")


# --- the state of an optimizer ------------------------------------------------------------------------------------------


def partly_trained(
    world: int | None, *, seed: int = 0, has_state: bool = True
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The second of its layers never had a gradient."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 7), nn.Linear(7, 3))
    if world is not None:
        fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for parameter in model[0].parameters() if has_state else ():
        state = optimizer.state[parameter]
        state["step"] = torch.tensor(float(seed))
        for number, name in enumerate(("exp_avg", "exp_avg_sq")):
            values = numbered(tuple(parameter.shape)) + seed + number
            state[name] = torch.zeros_like(parameter)
            full = values if world is None else distributed(
                values, parameter.device_mesh, parameter.placements
            )  # fmt: skip
            local_part(state[name]).copy_(local_part(full))
    return model, optimizer


def moments(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [
        {name: local_part(value).clone() for name, value in optimizer.state.get(parameter, {}).items()}
        for parameter in optimizer.param_groups[0]["params"]
    ]


@pytest.mark.parametrize("has_state", [True, False], ids=["trained before", "new"])
def test_a_parameter_that_never_had_a_gradient_has_no_state_and_gets_none(has_state, tmp_path):
    folder = saved(tmp_path, 3, lambda _: {"optimizer": partly_trained(3, seed=5)[1]})

    for rank in range(2):
        with standing_at(rank, 2), torch.no_grad():
            live, expected = partly_trained(2, has_state=has_state)[1], partly_trained(2, seed=5)[1]
            restore(folder, rank, 2, {"optimizer": live})

            assert difference(moments(live), moments(expected)) is None
            assert [len(one) for one in moments(live)] == [3, 3, 0, 0]


def flattened(world: int, seed: int) -> dict[str, Any]:
    """As torchtitan saves it: one entry for each parameter and kind of state, by the names of the model."""
    model, optimizer = partly_trained(world, seed=seed)
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    # It would take a step of its own to have all of it.
    for parameter in model[1].parameters():
        parameter.requires_grad_(False)
    return dict(get_optimizer_state_dict(model, optimizer, options=options))


def test_flattened_names_of_fsdp_are_filled_in_another_layout(tmp_path):
    folder = saved(tmp_path, 3, lambda _: {"optimizer": flattened(3, 5)})

    for rank in range(2):
        with standing_at(rank, 2), torch.no_grad():
            live, expected = flattened(2, 0), flattened(2, 5)
            assert any(name.startswith("state.0.weight.exp_avg") for name in live)
            restore(folder, rank, 2, {"optimizer": live})

            for name, value in expected.items():
                if isinstance(value, torch.Tensor):
                    assert torch.equal(local_part(live[name]), local_part(value)), name
                else:
                    assert live[name] == value, name
            assert not any(name.startswith("state.1.") for name in live)


def test_no_name_of_an_optimizer_is_made_up(tmp_path):
    """It is missing, and is told; what is left of it is nobody's."""
    folder = saved(tmp_path, 3, lambda _: {"optimizer": flattened(3, 5)})

    with standing_at(0, 2), torch.no_grad():
        live = flattened(2, 0)
        live["state.1.weight.exp_avg"] = torch.zeros(3, 7)
        with pytest.raises(
            StateMismatchError, match=r"missing in the checkpoint: optimizer\.state\.1\.weight\.exp_avg"
        ):
            restore(folder, 0, 2, {"optimizer": live})
