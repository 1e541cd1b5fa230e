"""`checkpoints.jsonl` as tinker-cookbook reads it: which batch comes next, and where the state is, also in a run that moved."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from states import assert_is_state, open_run, save_into, state_at

import async_ckpt
from async_ckpt.core.runs.journal import parse


def last_record(log_path: Path) -> dict[str, Any] | None:
    """What tinker-cookbook's `get_last_checkpoint` returns: the last line that has a state."""
    path = log_path / "checkpoints.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return next((record for line in reversed(lines) if "state_path" in (record := json.loads(line))), None)


def train(root: Path, *, killed_after: int) -> list[int]:
    """The batches that a loop of tinker-cookbook's trains: `batch` is the next one to execute."""
    resume = last_record(root)
    trained = []
    with open_run(root) as ckpt:
        for batch in range(resume["batch"] if resume else 0, killed_after):
            trained.append(batch)
            ckpt.save(state_at(batch), step=batch).result()
    return trained


def test_a_loop_that_resumes_from_the_batch_of_a_record_repeats_none_and_misses_none(tmp_path):
    assert train(tmp_path, killed_after=3) + train(tmp_path, killed_after=6) == [0, 1, 2, 3, 4, 5]


def test_a_batch_that_the_record_names_is_left_as_it_is(tmp_path):
    with open_run(tmp_path) as ckpt:
        ckpt.save(state_at(7), step=7, record={"batch": 0, "epoch": 2}).result()
        assert (last_record(tmp_path)["batch"], last_record(tmp_path)["epoch"]) == (0, 2)
        ckpt.save(state_at(8), step=8, record={"batch": None}).result()
        assert last_record(tmp_path)["batch"] == 9


@pytest.mark.parametrize("how", [shutil.copytree, Path.rename])
def test_the_records_of_a_run_that_was_copied_or_moved_lead_into_the_new_place(tmp_path, how):
    """Before anything is saved there, and after; the old place, if it is still there, holds something else by now."""
    old, new = tmp_path / "old", tmp_path / "new"
    save_into(old, 1)
    how(old, new)
    if old.exists():
        with open_run(old) as ckpt:
            ckpt.save(state_at(99), step=1, overwrite=True).result()

    assert str(old) not in (new / "checkpoints.jsonl").read_text()
    assert_is_state(async_ckpt.load(new / last_record(new)["state_path"]), 1)

    save_into(new, 2)
    assert_is_state(async_ckpt.load(new / last_record(new)["state_path"]), 2)


def test_lines_that_are_no_records_are_passed_over():
    assert parse(b'[1]\n\xff\xfe\n{"step": 1}\nnull\n{"step"') == [{"step": 1}]


def test_a_line_that_is_nested_too_deeply_is_skipped():
    assert parse(b'{"step": 1}\n' + b"[" * 100_000 + b'\n{"step": 2}\n') == [{"step": 1}, {"step": 2}]


def test_a_record_takes_numbers_of_torch_and_numpy_that_have_one_value(tmp_path):
    with open_run(tmp_path) as ckpt:
        record = {"loss": torch.tensor(0.5), "of": [np.float32(2), np.int64(3), np.array(4)], "best": np.bool_(True)}
        ckpt.save(state_at(1), step=1, record=record).result()
        assert ckpt.records() == {1: {"loss": 0.5, "of": [2.0, 3, 4], "best": True}}
        for wrong in (torch.ones(2), np.ones(1), torch.ones((), device="meta"), torch.tensor(1j)):
            with pytest.raises(TypeError, match=r'record\["loss"\] is of type .*value\.item\(\)'):
                ckpt.save(state_at(2), step=2, record={"loss": wrong})
