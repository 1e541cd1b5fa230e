"""A run's folder that holds steps of another naming, or what another program has written: it must not look empty."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from archives import forge_manifest
from safetensors.torch import save_file
from states import assert_is_state, open_run, save_into, state_at

import async_ckpt
from async_ckpt import Naming, NotCommittedError

LIVE = {"model": {"weight": torch.zeros(2)}}


@pytest.mark.parametrize(
    ("saved_as", "opened_as", "told"),
    [
        ("verl", None, r'global_step_500 .* open it with naming="verl", or name the step'),
        ("skyrl", None, r'global_step_500 .* naming="skyrl",'),
        ("deepspeed", "verl", r'global_step500 .* naming="open-instruct" or naming="deepspeed",'),
        (None, "verl", r"step_00000500 .* open it without naming=,"),
        (Naming("v2-{}", tracker=None), None, r'v2-500 .* naming=Naming\("v2-\{\}"\)'),
        (Naming("{:06d}.step", tracker=None), None, r'000500.step .* naming=Naming\("\{:06d\}.step"\)'),
    ],
    ids=["verl", "skyrl", "deepspeed", "default", "own", "own with zeros"],
)
def test_a_run_that_is_opened_under_another_naming_says_which_one_to_give(tmp_path, saved_as, opened_as, told):
    save_into(tmp_path, 400, 500, naming=saved_as)
    with open_run(tmp_path, naming=opened_as) as ckpt:
        for use in (lambda: ckpt.restore(LIVE), ckpt.load, lambda: ckpt.restore(LIVE, step=500)):
            with pytest.raises(NotCommittedError, match=told.partition(",")[0]):
                use()
        with pytest.raises(NotCommittedError, match=f"nothing is committed under this naming, but {told}"):
            ckpt.restore(LIVE)


def test_of_two_namings_what_was_committed_last_is_the_newest(tmp_path):
    save_into(tmp_path, 300)
    save_into(tmp_path, 10, 20, naming="verl")  # a run that has begun anew

    assert_is_state(async_ckpt.load(tmp_path), 20)
    with open_run(tmp_path, naming="verl") as ckpt:
        assert_is_state(ckpt.load(), 20)
    with open_run(tmp_path) as ckpt:
        told = 'step 300 is the newest under this naming, but global_step_20 was committed later .* naming="verl"'
        with pytest.raises(NotCommittedError, match=told):
            ckpt.load()
        assert_is_state(ckpt.load(300), 300)
        ckpt.save(state_at(301), step=301).result()
        assert_is_state(ckpt.load(), 301)
    assert_is_state(async_ckpt.load(tmp_path), 301)


def test_folders_with_a_number_that_are_no_commits_of_ours_say_nothing(tmp_path):
    save_into(tmp_path, 1, naming=Naming(tracker=None))
    (tmp_path / "global_step_9").mkdir()
    (tmp_path / "model-7b").mkdir()
    (tmp_path / "model-7b/manifest.json").write_text("{}")
    (tmp_path / "copy_8").mkdir()
    (tmp_path / "copy_8/manifest.json").write_bytes((tmp_path / "step_00000001/manifest.json").read_bytes())
    (tmp_path / "events.12345").write_text("a file")
    with open_run(tmp_path) as ckpt:
        assert_is_state(ckpt.load(), 1)
    with open_run(tmp_path, naming=Naming("other-{}")) as ckpt:
        forge_manifest(tmp_path / "step_00000001/manifest.json", step=2)
        assert ckpt.restore(LIVE) is None


def dcp_folder(root: Path) -> None:
    dcp.save({"w": torch.ones(3)}, checkpoint_id=root, no_dist=True)


def dcp_steps(root: Path) -> None:
    for step in (1, 2):
        dcp_folder(root / f"checkpoint-{step}")


def weights(root: Path) -> None:
    root.mkdir()
    save_file({"w": torch.ones(3)}, root / "model.safetensors")


def steps_of_verl(root: Path) -> None:
    (root / "global_step_7").mkdir(parents=True)
    (root / "global_step_7/actor.pt").write_text("x")


def of_others(*names: str) -> Callable[[Path], None]:
    def write(root: Path) -> None:
        for name in names:
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text("x")

    return write


@pytest.mark.parametrize(
    ("write", "told"),
    [
        (
            dcp_folder,
            r"the folder holds a checkpoint of torch\.distributed\.checkpoint, .* async_ckpt\.load reads",
        ),
        (dcp_steps, "the folder holds checkpoint-2, checkpoint-1; another program has written that"),
        (
            weights,
            r"the folder holds safetensors files, which async_ckpt\.load reads; load one .* model\.safetensors",
        ),
        (steps_of_verl, "the folder holds global_step_7; another program has written that"),
        (
            of_others("checkpoint-5/model.safetensors"),
            "the folder holds checkpoint-5; another program has written that",
        ),
        (
            of_others("iter_0000005/model.pt", "latest_checkpointed_iteration.txt"),
            "the folder holds iter_0000005 and latest_checkpointed_iteration.txt; another program",
        ),
        (
            of_others("last.ckpt", "epoch=1-step=9.ckpt"),
            r"the folder holds epoch=1-step=9\.ckpt, last\.ckpt, not a step",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning:torch")
def test_what_another_program_has_written_there_is_told_of(tmp_path, write, told):
    write(tmp_path / "run")
    with open_run(tmp_path / "run") as ckpt:
        with pytest.warns(RuntimeWarning, match=f"nothing was restored: .*{told}"):
            assert ckpt.restore(LIVE) is None
        with pytest.raises(NotCommittedError, match=told):
            ckpt.load()
