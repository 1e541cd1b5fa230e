"""Four ranks with a RAM disk in front of a disk, killed at any moment: what a rank was told is there at the next start."""

import shutil
import time
from random import Random

import pytest
from rank_worlds import World

# `NODES` names the node of each rank by a letter; each node has memory and a disk of its own, in front of a far place.
TRAINING = """
import itertools, signal
from pathlib import Path
from async_ckpt import CheckpointError, Place
from async_ckpt.core.saving.save import SaveState
from racing import PATIENCE
node = {nodes!r}[here.rank]
memory, disk = Path({memory!r}, node), Path({disks!r}, node)
memory.mkdir(parents=True, exist_ok=True)
disk.mkdir(parents=True, exist_ok=True)
ckpt = open_run([Place(memory / "run", volatile=True), disk / "run", Path({disks!r}, "far")], keep=2)
state = {{"model": {{"cut": spread(41, 3), "whole": numbered(300, 1000)}}, "step": 0}}
begun = ckpt.restore(state) or 0
if begun:
    want = small(begun)
    assert torch.equal(state["model"]["cut"].full_tensor(), want["model"]["cut"].full_tensor())
    assert torch.equal(state["model"]["whole"], want["model"]["whole"]) and state["step"] == begun
here.tell(["restored", begun])
here.say(f"restored{{here.rank}}")

def durable(handle):
    if handle.exception() is None:
        here.tell(["durable", handle.step])

try:
    for step in itertools.count(begun + 1):
        try:
            content = small(step)
        except RuntimeError:  # gloo's, of the collectives that make it: the others are dead already
            break
        handle = ckpt.save(content, step)
        handle.add_done_callback(durable)
        for save in ckpt._saver.ledger.saves():
            save.settled.result(PATIENCE)
            if save.life.now is SaveState.COMMITTED:
                here.tell(["committed", save.handle.step])
except CheckpointError:
    pass  # the others are dead already
while True:
    signal.pause()
"""


def killed(world: World, dice: Random, seconds: float) -> dict[str, set[int]]:
    """The steps that ranks have told of, by what they told. They are killed at a moment drawn, and not all at once."""
    for rank in range(4):
        world.wait_for(f"restored{rank}")
    time.sleep(dice.uniform(0.0, seconds))
    for rank in dice.sample(range(4), 4):
        world.kill(rank)
        time.sleep(dice.choice([0.0, dice.uniform(0.0, seconds / 4)]))
    lines = [line for one in world.ended() for line in one.told]
    return {kind: {step for what, step in lines if what == kind} for kind in ("restored", "committed", "durable")}


@pytest.mark.parametrize("seed", range(10))
def test_what_any_rank_was_told_is_restored_from_memory_and_what_is_durable_survives_a_reboot_too(
    worlds, quick_path, tmp_path, seed
):
    dice = Random(seed)
    memory, disks = quick_path / "memory", tmp_path / "disks"
    script = TRAINING.format(memory=str(memory), disks=str(disks), nodes=dice.choice(["aaaa", "aabb", "abab"]))

    first = killed(worlds.start(4, script), dice, 1.0)
    second = killed(worlds.start(4, script), dice, 1.0)
    shutil.rmtree(memory)  # a reboot of all nodes
    third = killed(worlds.start(4, script), dice, 0.0)

    assert first["restored"] == {0}
    (restored,) = second["restored"]
    assert restored >= max(first["committed"] | first["durable"], default=0)
    (restored,) = third["restored"]
    assert restored >= max(second["durable"] | first["durable"], default=0)
