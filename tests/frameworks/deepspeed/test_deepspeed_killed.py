"""DeepSpeed's ranks, killed at any moment: `latest` names a whole folder, and training goes on from it with the same losses.

Killed by the number of the call that changes the disk, a write half done: one rank, which the others then notice, or all.
The 20 moments of each layout are drawn at random, and the tests try one of them. All of them are tried by
`ASYNC_CKPT_MATRICES=all pytest tests/frameworks/deepspeed/test_deepspeed_killed.py`.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from racing import until
from rank_worlds import Worlds
from slices import some

import async_ckpt

pytest.importorskip("deepspeed", reason="deepspeed is not installed: make test-frameworks")


WARM = ("deepspeed_runs",)
NEVER = 10**9
NUM_KILLS = 20

_KILLED = """
import io
from children import die_at
from deepspeed_runs import *
from async_ckpt.core import timing

real_save, real_clock, num_looks = torch.save, timing.monotonic, 0
def save(content, file, **options):
    if not isinstance(file, str):
        return real_save(content, file, **options)
    held = io.BytesIO()
    real_save(content, held, **options)
    fd = os.open(file, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o666)
    os.write(fd, held.getbuffer())  # by a call that is counted
    os.close(fd)
def is_alone():
    return here.is_said(f"dead{{1 - here.rank}}")
def clock():  # nobody waits half an hour for the dead
    global num_looks
    num_looks += is_alone()
    return real_clock() + 1e6 * num_looks
torch.save, timing.monotonic = save, clock
here.expire(is_alone)

count = die_at({number} if here.rank == {rank} else 10**9, here.die)
try:
    training = Training({stage}, {layout!r})
    training.engine.load_checkpoint({folder!r})
    training.train(6, {folder!r})
    training.checkpoints.wait()
except Exception:
    here.say(f"failed{{here.rank}}")
    raise
here.tell({{"losses": training.losses, "calls": count()}})
here.say(f"done{{here.rank}}")
"""


def trained(worlds: Worlds, layout: str, folder: Path) -> list[dict[str, Any]]:
    """What a training tells that goes on there to its end."""
    return [end.told[-1] for end in worlds.run(2, script_of(layout, folder))]


def script_of(layout: str, folder: Path, rank: int = 0, number: int = NEVER) -> str:
    stage = {"deepspeed": 2, "archive": 3}[layout]
    return _KILLED.format(stage=stage, layout=layout, folder=str(folder), rank=rank, number=number)


def kill(worlds: Worlds, script: str, rank: int, *, all_at_once: bool) -> None:
    """Run a training of which a rank dies, and kill the other one as torchrun does: at once, or when it has failed."""
    world = worlds.start(2, script)

    def has_said(*words: str) -> bool:
        return any((world.folder / word).exists() for word in words)

    until(lambda: has_said(f"dead{rank}", f"done{rank}"))
    if not all_at_once:
        until(lambda: has_said(f"failed{1 - rank}", f"done{1 - rank}"))
    for each in (0, 1):
        world.kill(each)
    world.ended(failed={0, 1})


def files_in(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("layout", ["deepspeed", "archive"])
def test_whenever_ranks_are_killed_latest_names_a_whole_folder_and_training_goes_on_bit_for_bit(
    worlds, quick_path, layout
):
    whole = trained(worlds, layout, quick_path / "whole")
    for number in some(range(NUM_KILLS), NUM_KILLS):
        draw, folder = random.Random(number), quick_path / f"killed-{number}"
        rank = number % 2
        moment = draw.randrange(1, 1 + whole[rank]["calls"])
        kill(worlds, script_of(layout, folder, rank, moment), rank, all_at_once=number % 4 < 2)
        latest = folder / "latest"
        tag = latest.read_text() if latest.exists() else "global_step0"
        if latest.exists() and layout == "archive":
            async_ckpt.verify(folder / tag)
        elif latest.exists():
            assert files_in(folder / tag) == files_in(quick_path / "whole" / tag)
        newest = int(tag.removeprefix("global_step"))
        for before, after in zip(whole, trained(worlds, layout, folder), strict=True):
            assert after["losses"] == {step: loss for step, loss in before["losses"].items() if int(step) > newest}
        assert latest.read_text() == "global_step6"
        # Who dies between `latest` and removing the hidden folder leaves that to the next save.
        assert newest == 6 or not [path.name for path in folder.iterdir() if path.name.startswith(".")]
