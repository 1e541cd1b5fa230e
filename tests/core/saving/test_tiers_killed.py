"""A training that is killed at any moment, with a RAM disk in front of a disk: what its handles said is there."""

import random
import signal
import time
from typing import Any

import pytest
from slices import some
from states import assert_is_state, open_run, state_at

TRAINING = """
import os, sys
from async_ckpt import Place
from states import open_run, state_at
memory, disk, compression = sys.argv[1:]
with open_run([Place(memory, volatile=True), Place(disk, compression=compression or None)], keep=2) as ckpt:
    step = ckpt.restore(state_at(0, 5)) or 0
    os.write(1, f"restored {step}\\n".encode())
    for step in range(step + 1, step + 200):
        handle = ckpt.save(state_at(step, 5), step)
        handle.add_done_callback(lambda done: os.write(1, f"durable {done.result().step}\\n".encode()))
        for save in ckpt._saver.ledger.saves():
            save.settled.result()
        os.write(1, f"committed {step}\\n".encode())
"""


def newest(places: list[Any]) -> int:
    with open_run(places) as ckpt:
        step = ckpt.latest() or 0
        if step:
            assert_is_state(ckpt.load(step), step, 5)
        return step


@pytest.mark.parametrize("seed", some(range(200), 20))
def test_what_was_said_to_be_durable_or_committed_is_restored(nursery, quick_path, tmp_path, seed):
    dice, memory, disk = random.Random(seed), quick_path / "run", tmp_path / "run"
    compression = "zstd" if seed % 2 else ""
    for _ in range(2):  # and then the next start
        child = nursery.start(TRAINING, memory, disk, compression)
        child.wait_for_line("restored")
        time.sleep(dice.uniform(0.0, 0.6))
        child.send(signal.SIGKILL)
        ended = child.ended()
        told = [line.split() for line in ended.out.splitlines() if len(line.split()) == 2]
        said = {
            kind: max((int(step) for what, step in told if what == kind), default=0)
            for kind in ("durable", "committed")
        }
        assert newest([memory, disk]) >= max(said["committed"], said["durable"])
        assert newest([disk]) >= said["durable"]
    state = state_at(0, 5)
    with open_run([memory, disk]) as ckpt:
        step = ckpt.restore(state) or 0  # it may have been killed before its first save
        assert step >= max(said.values())
        assert_is_state(state, step, 5)
