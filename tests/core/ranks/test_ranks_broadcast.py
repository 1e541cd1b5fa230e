"""`restore(…, broadcast=group)`: ranks that hold the same read it once, together."""

from typing import Any

import pytest
from rank_worlds import Worlds

# Saved, spoilt and restored; what each rank reads is counted.
SCRIPT = """
import os
from async_ckpt.core.storage.local import LocalReader
from async_ckpt import RngState
num_read, read_into = [0], LocalReader.read_into

def counting(self, offset, target):
    num_read[0] += len(target)
    read_into(self, offset, target)

LocalReader.read_into = counting
state = {make}
state["odd"] = {{"transposed": (numbered(300, 700) + 1).T, "bytes": numbered(5).to(torch.bfloat16)}}
state["own"] = {{"number": here.rank, "tensor": torch.full((4,), here.rank)}}
state["rng"] = RngState()

def held():
    found = {{}}
    def look(path, value):
        if hasattr(value, "state_dict") and not isinstance(value, RngState):
            value = value.state_dict()
        if isinstance(value, dict):
            for key, inner in value.items():
                look((*path, key), inner)
        elif isinstance(value, torch.Tensor):
            found[path] = getattr(value, "_local_tensor", value)
        elif isinstance(value, int):
            found[path] = value
    look((), state)
    return found

with open_run(here.root) as ckpt:
    here.save(ckpt, state, 1, per_rank=["own"])
    want = {{path: value.clone() if isinstance(value, torch.Tensor) else value for path, value in held().items()}}
    drawn = torch.rand(3)
    for value in held().values():
        if isinstance(value, torch.Tensor):
            with torch.no_grad():
                value.fill_(7)
    state["own"]["number"] = 99
    here.meet("spoilt")
    num_read[0] = 0
    {before}
    try:
        step = ckpt.restore(state, {step}, broadcast={group}, verify={verify})
    except Exception as error:
        here.tell([type(error).__name__, str(error)])
    else:
        wrong = [".".join(map(str, path)) for path, value in held().items() if not (
            torch.equal(value, want[path]) if isinstance(value, torch.Tensor) else value == want[path]
        )]
        here.tell([step, wrong, torch.equal(torch.rand(3), drawn), num_read[0]])
"""


def told(
    worlds: Worlds,
    size: int,
    make: str,
    group: str,
    *,
    before: str = "",
    step: object = None,
    verify: object = False,
) -> list[Any]:
    script = SCRIPT.format(make=make, group=group, before=before, step=step, verify=repr(verify))
    return [one.told[-1] for one in worlds.run(size, script)]


WIDTH = 60_000  # 3.1 MB of weights, with their moments 9.4


@pytest.mark.parametrize("verify", [False, "first"])
def test_under_ddp_all_ranks_together_read_the_state_about_once(worlds, verify):
    ends = told(worlds, 3, f"ddp({WIDTH})", "dist.group.WORLD", verify=verify)

    assert [one[:3] for one in ends] == [[1, [], True]] * 3
    if not verify:
        state_bytes = 3 * 4 * 19 * WIDTH
        assert sum(one[3] for one in ends) < 1.6 * state_bytes  # with what is small and of each, and three indices each


def test_replicas_of_hsdp_read_what_they_hold_once(worlds):
    make = f"hsdp(2, {WIDTH})"
    mesh = "mesh_of(2, 2, names=('replicate', 'shard'))['replicate'].get_group()"
    shared = told(worlds, 4, make, mesh, step=1)

    assert [one[:3] for one in shared] == [[1, [], True]] * 4
    assert sum(one[3] for one in shared) < 1.6 * 3 * 4 * 19 * WIDTH


def test_ranks_that_hold_different_slices_read_all_of_their_own_and_are_warned(worlds):
    before = "import warnings; warnings.simplefilter('error')"
    ends = told(worlds, 2, "fsdp()", "dist.group.WORLD", before=before)
    assert [one[0] for one in ends] == ["RuntimeWarning"] * 2
    assert "hold different slices" in ends[0][1]


def test_ranks_that_hold_different_slices_get_the_right_ones_all_the_same(worlds):
    ends = told(worlds, 2, "fsdp()", "dist.group.WORLD", before="import warnings; warnings.simplefilter('ignore')")

    assert [one[:3] for one in ends] == [[1, [], True]] * 2


def test_a_rank_that_fails_fails_the_restore_on_all_and_nobody_waits(worlds):
    before = """
    real = LocalReader.read_into
    def failing(self, offset, target):
        if here.rank == 1:
            raise OSError(5, "Input/output error")
        real(self, offset, target)
    LocalReader.read_into = failing
"""
    ends = told(worlds, 2, f"ddp({WIDTH})", "dist.group.WORLD", before=before, step=1)

    assert ends[0][0] == "PeerFailedError"
    assert "rank 1 could not read its part" in ends[0][1]
    assert ends[1][0] == "OSError"


def test_ranks_that_restore_different_steps_are_all_told_so(worlds):
    before = "here.save(ckpt, state, 2, per_rank=['own'])"
    ends = told(worlds, 2, "ddp(1)", "dist.group.WORLD", before=before, step="1 + here.rank")

    assert [one[0] for one in ends] == ["ValueError"] * 2
    assert "restore different steps: [1, 2]" in ends[0][1]


def test_what_is_no_group_is_refused(worlds):
    (end,) = told(worlds, 1, "fsdp()", "'replicate'")

    assert end[0] == "TypeError"
    assert "mesh.get_group('replicate')" in end[1]
