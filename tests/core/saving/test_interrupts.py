"""Ctrl-C at some of the lines of `save`; at random ones by the command of `fuzz_interrupts`."""

from pathlib import Path

import pytest
import torch
from fuzz_interrupts import PATIENCE, Interrupt, Training
from slices import some


@pytest.fixture(params=[False, True], ids=["plain", "guarded"])
def training(request: pytest.FixtureRequest, tmp_path: Path):
    made = Training(tmp_path, guarded=request.param)
    yield made
    made.ckpt.close()


def test_interrupted_at_any_line_of_save_a_checkpointer_saves_on(training):
    for _ in range(2):  # what only a first save does is for the command
        training.assert_usable("before")
    files = training.interrupted_save(None).files
    assert len(files) > 500
    in_saver = [number for number, file in enumerate(files, 1) if file.endswith("saver.py")]
    assert len(in_saver) > 50
    for number in sorted({*in_saver, *some(range(1, len(files)), len(files) // 40)}):
        interrupt = training.interrupted_save(number)
        training.assert_usable(interrupt.where)


def test_interrupted_in_the_step_that_a_guard_holds_back_the_save_is_committed(tmp_path):
    training = Training(tmp_path, guarded=True)
    with training.ckpt:
        training.assert_usable("before")
        for number in range(1, 30):
            before = training.weight.detach().clone()
            handle = training.save()
            with Interrupt(number):
                try:
                    training.run_step()
                except KeyboardInterrupt:
                    pass
            handle.result(PATIENCE)
            assert torch.equal(training.ckpt.load(training.number)["weight"], before)
