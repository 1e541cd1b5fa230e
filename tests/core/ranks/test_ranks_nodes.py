"""Places that ranks do not share: a disk or a RAM disk of each node, in front of one that all share.

A node is simulated by a folder that some ranks have and others do not.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
from rank_oracle import saved
from states import open_run

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks as Linux has them")

PRELUDE = """
import shutil
from pathlib import Path
from async_ckpt import Place, RngState
from racing import PATIENCE, until
ROOT = Path({root!r})
NODES = {nodes!r}

def opened(**options):
    near = ROOT / f"node{{NODES[here.rank]}}" / "run"
    near.parent.mkdir(exist_ok=True)
    return open_run([near, ROOT / "far"], **options)

def live():
    return {{"model": {{"cut": spread(41, 3), "whole": numbered(300, 1000)}}, "step": 0}}

def restored(ckpt):
    state = live()
    step = ckpt.restore(state)
    if step is not None:
        want = small(step)
        assert torch.equal(state["model"]["cut"].full_tensor(), want["model"]["cut"].full_tensor())
        assert torch.equal(state["model"]["whole"], want["model"]["whole"]) and state["step"] == step
    return step
"""


def run(worlds, root: Path, nodes: str, script: str, **options):
    """`nodes` names the node of each rank by a letter."""
    return worlds.run(len(nodes), PRELUDE.format(root=str(root), nodes=nodes) + script, **options)


def told(ended) -> list:
    return [one.told for one in ended]


@pytest.mark.parametrize("nodes", ["aabb", "abab", "aabc", "ab"])
def test_a_step_is_committed_on_the_disks_of_all_nodes_and_restored_from_them(worlds, tmp_path, nodes):
    script = """
ckpt = opened()
for step in (1, 2):
    handle = ckpt.save(small(step), step)
    here.tell([handle.result().path.split("/")[-3:], handle.at(ROOT / "far").result(PATIENCE)])
ckpt.close()
"""
    ended = run(worlds, tmp_path, nodes, script, patience=60)

    for letter, told in zip(nodes, (one.told for one in ended), strict=True):
        assert told == [[[f"node{letter}", "run", f"step_{step:08d}"], step] for step in (1, 2)]
    for letter in set(nodes):
        assert {path.name for path in (tmp_path / f"node{letter}" / "run" / "step_00000002").glob("rank_*")} != set()
        assert (tmp_path / f"node{letter}" / "run" / "step_00000002" / "manifest.json").exists()
    assert saved(tmp_path / "far", 2).manifest.world_size == len(nodes)

    shutil.rmtree(tmp_path / "far")
    ended = run(worlds, tmp_path, nodes, "ckpt = opened()\nhere.tell(restored(ckpt))\nckpt.close()")

    assert [one.told for one in ended] == [[2]] * len(nodes)
