"""Archives that earlier code has written under frameworks are read, verified and repaired by today's, without the framework.

Trainings that go on from them are in `tests/frameworks`, for they need an environment of their own.
"""

import hashlib
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from commands import run_command
from torch.utils._pytree import tree_leaves
from witnessed import TORCHTITAN, VERL_RANKS, damage, digest, expected_of

import async_ckpt
from async_ckpt import CorruptCheckpointError


class Archives(NamedTuple):
    """Archives in a witness: a step, the group with the weights there, and the file in each archive with them."""

    witness: str
    path: str
    step: int
    group: str = "model"

    @property
    def member(self) -> str:
        return f"{self.group}.safetensors"


ARCHIVES = [
    *(Archives(f"deepspeed_archive_{stage}", f"global_step{n}", n, "fp32") for stage in (1, 2, 3) for n in (2, 4)),
    *(Archives(f"torchtitan_{layout}", f"checkpoint/step-{n}", n) for layout in TORCHTITAN for n in (2, 4)),
    *(Archives(f"verl_{name}", f"global_step_{n}/actor/training.tar", n) for name in VERL_RANKS for n in (2, 4)),
    Archives("skyrl_ranks_async_ckpt", "global_step_4/policy/async_ckpt/step_00000004", 4),
    *(Archives("skyrl_trainer", f"global_step_{n}/policy/async_ckpt/step_{n:08d}", n) for n in (3, 4)),
]
each = pytest.mark.parametrize("archives", ARCHIVES, ids=lambda one: f"{one.witness}-{one.step}")


def digest_of_verl(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.float().contiguous().numpy().tobytes()).hexdigest()


def digests_in(loaded: dict[str, Any], archives: Archives) -> dict[str, str]:
    make = digest_of_verl if archives.witness.startswith("verl") else digest
    return {name: make(tensor) for name, tensor in loaded.items() if name != "count"}


@each
def test_whole_weights_are_read_and_everything_is_verified(witness, archives):
    folder = witness(archives.witness)
    path = folder / "run" / archives.path
    want: dict[str, str] = {}
    for of_rank in expected_of(folder).states:
        want |= of_rank[str(archives.step)]["weights"]
    loaded = async_ckpt.load(path, select=archives.group)[archives.group]
    assert digests_in(loaded, archives) == want
    assert async_ckpt.verify(path).num_bytes > 0


@each
def test_weights_of_which_one_bit_has_changed_are_refused(witness, archives):
    path = witness(archives.witness) / "run" / archives.path
    damage(path if path.is_file() else max(path.glob("rank_*.tar")), archives.member)
    with pytest.raises(CorruptCheckpointError):
        async_ckpt.verify(path)
    with pytest.raises(CorruptCheckpointError):
        async_ckpt.load(path, select=archives.group)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_moments_of_deepspeed_are_read_as_whole_tensors(witness, stage):
    folder = witness(f"deepspeed_archive_{stage}")
    want = expected_of(folder).states[0]["4"]
    loaded = async_ckpt.load(folder / "run" / "global_step4", select=["exp_avg", "exp_avg_sq"])
    for group in ("exp_avg", "exp_avg_sq"):
        assert {name: digest(tensor) for name, tensor in loaded[group].items()} == want[group]


@pytest.mark.parametrize("name", VERL_RANKS)
def test_exports_of_verl_are_read(witness, name):
    folder = witness(f"verl_{name}")
    loaded = async_ckpt.load(folder / "run" / "global_step_4" / "actor" / "huggingface" / "model.safetensors")
    want = expected_of(folder).states[0]["4"]["weights"]
    assert {key: digest_of_verl(tensor) for key, tensor in loaded.items()} == want


RUNS = {
    **{f"deepspeed_archive_{stage}": "run" for stage in (1, 2, 3)},
    **{f"torchtitan_{layout}": "run/checkpoint" for layout in TORCHTITAN},
    "skyrl_ranks_async_ckpt": "run/global_step_4/policy/async_ckpt",
    "skyrl_trainer": "run/global_step_4/policy/async_ckpt",
}


@pytest.mark.parametrize("name", RUNS)
def test_trackers_and_journals_that_were_lost_are_made_again_as_they_were(witness, name):
    """The framework's own loading finds the step by the tracker. That of torchtitan's steps is not known to the command."""
    root = witness(name) / RUNS[name]
    lost = {file: (root / file).read_bytes() for file in ("latest", "checkpoints.jsonl") if (root / file).exists()}
    for file in lost:
        (root / file).unlink()
    assert run_command("repair", root, "--apply").returncode == 0
    is_known = not name.startswith("torchtitan")
    assert "latest" in lost
    for file, text in lost.items():
        if is_known or file != "latest":
            assert (root / file).read_bytes() == text
    assert run_command("repair", root).returncode == 0


@pytest.mark.parametrize("name", ["deepspeed_archive_1", "skyrl_trainer"])
def test_nothing_is_mended_where_nothing_is_broken(witness, name):
    """Archives below DeepSpeed's tags are one-off saves, which have no journal."""
    ended = run_command("repair", witness(name) / RUNS[name])
    assert (ended.returncode, "nothing to repair" in ended.stdout) == (0, True)


LAYOUTS = {
    **{f"deepspeed_archive_{stage}": ("run", "global_step4") for stage in (1, 2, 3)},
    **{f"torchtitan_{layout}": ("run/checkpoint", "step-4") for layout, size in TORCHTITAN.items() if size > 1},
    "skyrl_ranks_async_ckpt": ("run/global_step_4/policy/async_ckpt", "step_00000004"),
}


def tensors_at(path: Path) -> list[torch.Tensor]:
    leaves = tree_leaves(async_ckpt.load(path, trust=True))
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_of_ranks_that_were_lost_are_not_needed(witness, name):
    root, step = witness(name) / LAYOUTS[name][0], LAYOUTS[name][1]
    (layout,) = (root / step).glob("layout.*.json")
    before = tensors_at(root / step)
    layout.unlink()
    found = tensors_at(root / step)
    assert len(found) == len(before) > 0
    assert all(map(torch.equal, found, before))
    assert async_ckpt.verify(root / step).num_bytes > 0
    assert run_command("repair", root, "--apply").returncode == 0
