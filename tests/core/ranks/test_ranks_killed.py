"""One of two ranks is killed at any call that changes the disk, or a store: the step is there whole or not at all, the other rank
is told nothing that is not so, and the next start goes on.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_oracle import saved
from rank_states import numbered
from rank_worlds import Ended, Worlds
from slices import ALL, some
from states import open_run

from async_ckpt import Place

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks as Linux has them")

DYING = """
import json
from async_ckpt import Place
from children import die_at, die_at_request
write = os.write  # to the test, which is no file
here.tell = lambda what: write(1, (json.dumps(what) + "\\n").encode())
who, root = {who}, {root}
with open_run(root, keep=2) as ckpt:
    state = small(2)
    here.meet("made")
    if here.rank == who:
        count = {die}({number}, here.die)
    else:
        here.expire(lambda: here.is_said(f"dead{{who}}"))
    here.save(ckpt, state, 2)
    ckpt.wait()
if here.rank == who:
    here.tell(count())
"""
BEFORE = """
from async_ckpt import Place
with open_run({root}) as ckpt:
    here.save(ckpt, small(1), 1)
"""
AGAIN = """
from async_ckpt import Place
with open_run({root}, keep=2) as ckpt:
    state = small(0)
    start = ckpt.restore(state)
    here.tell([start, float(state["model"]["whole"].min())])
    here.save(ckpt, small(3), 3)
"""


def assert_is_whole(root: Any, told: dict[str, Any] | None) -> int:
    """The newest committed step; and the survivor was not told otherwise."""
    steps = open_run(root).steps()
    assert steps in ([1], [1, 2])
    for step in steps:
        assert torch.equal(saved(root, step).tensors["model.cut"], numbered(41, 3) + step)
        assert torch.equal(saved(root, step).tensors["model.whole"], numbered(300, 1000) + step)
    if told is not None:
        says = "committed" if told.get("status") == "committed" else "unknown" if told["undecided"] else "failed"
        assert says in ("unknown", "committed" if 2 in steps else "failed")
    return steps[-1]


def each_death(
    worlds: Worlds, who: int, die: str, roots: Iterator[Any], *, num_tried: int
) -> Iterator[tuple[Any, dict[str, Any] | None]]:
    """What is left after each death, or after some of them, and what the survivor was told."""

    def run(number: int, root: Any) -> list[Ended]:
        script = DYING.format(who=who, root=_shown(root), die=die, number=number)
        ended = worlds.start(2, script).ended(failed={who} if number else ())
        # The number of calls differs from run to run: who makes a folder, who asks whether the root is shared.
        assert number == 0 or ended[who].status == -9 or ended[who].told[-1] < number
        return ended

    num_calls = run(0, next(roots))[who].told[-1]
    assert num_calls > 3
    for number in some(range(1, num_calls + 1), num_calls // num_tried):
        root = next(roots)
        survivor = run(number, root)[1 - who]
        yield root, survivor.saves[0] if survivor.saves else None


def _shown(root: Any) -> str:
    return repr(str(root)) if isinstance(root, Path) else f"Place({root.url!r}, options={root.options!r})"


def assert_goes_on(worlds: Worlds, root: Any, newest: int) -> None:
    for one in worlds.run(2, AGAIN.format(root=_shown(root))):
        assert one.told[0] == [newest, float(newest)]
        assert one.saves[0].get("status") == "committed"
    assert torch.equal(saved(root, 3).tensors["model.cut"], numbered(41, 3) + 3)


@pytest.mark.parametrize("who", [0, 1])
def test_killed_at_any_call_of_the_disk_a_step_of_two_ranks_is_whole_or_not_there(worlds, quick_path, who):
    worlds.run(2, BEFORE.format(root=_shown(quick_path / "before")))
    roots = (shutil.copytree(quick_path / "before", quick_path / str(n)) for n in range(1000))
    outcomes = set()
    for root, told in each_death(worlds, who, "die_at", roots, num_tried=2):
        newest = assert_is_whole(root, told)
        outcomes.add(newest)
        if ALL or (who, len(outcomes)) == (0, 1):
            assert_goes_on(worlds, root, newest)
        shutil.rmtree(root)
    assert 1 in outcomes


@pytest.mark.parametrize("who", [0, 1])
def test_killed_at_any_request_that_changes_a_store_a_step_of_two_ranks_is_whole_or_not_there(worlds, s3, bucket, who):
    before = Place(f"s3://{bucket}/before", options=s3.options)
    worlds.run(2, BEFORE.format(root=_shown(before)))

    def roots() -> Iterator[Place]:
        for number in range(1000):
            root = Place(f"s3://{bucket}/{number}", options=s3.options)
            for path in before.storage().sizes(""):
                root.storage().replace(path, before.storage().read(path)[0])
            yield root

    for number, (root, told) in enumerate(each_death(worlds, who, "die_at_request", roots(), num_tried=2 - who)):
        newest = assert_is_whole(root, told)
        if ALL or not (who or number):
            assert_goes_on(worlds, root, newest)
