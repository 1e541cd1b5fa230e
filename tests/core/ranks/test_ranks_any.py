"""Several ranks, several roots, and one of these is enough: roots that are away for some ranks, and caches of nodes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from rank_oracle import run_of, saved
from rank_states import numbered
from states import open_run

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks as Linux has them")

# `at(call, where, do)` has `do` called ahead of a call of the disk that is about this place.
PRELUDE = """
import shutil
from pathlib import Path
from async_ckpt import Place, StorageUnavailableError
from async_ckpt.core.ranks import agreement
from async_ckpt.core.saving import delivery
from async_ckpt.core.storage.local import LocalSink, LocalStorage
from racing import until

def at(call, where, do, times=None):
    owner = LocalSink if call in ("write", "finish") else LocalStorage
    real, left = getattr(owner, call), [times]
    def instead(disk, *arguments, **options):
        path = str(disk._target if owner is LocalSink else disk.locate(str(arguments[0])))
        if where in path and left[0] != 0:
            left[0] = None if left[0] is None else left[0] - 1
            do()
        return real(disk, *arguments, **options)
    setattr(owner, call, instead)

def away():
    raise StorageUnavailableError("it is away", path="x")

delivery._FIRST_PAUSE_SECONDS = 0.01
"""


def run(worlds, script: str, *roots: object, size: int = 2, **options):
    """`roots` may tell nodes apart by `{here.rank}`; each rank tells what the others hold at the end."""
    given = ", ".join(root if isinstance(root, str) else f"{str(root)!r}" for root in roots)
    body = PRELUDE + f"ckpt = open_run([{given}], commit='any')\n" + script + "\nckpt.close()"
    return worlds.run(size, body, **options)


@pytest.fixture
def roots(tmp_path: Path) -> list[Path]:
    return [tmp_path / "near", tmp_path / "far"]


def assert_holds(root: object, *steps: int) -> None:
    """These steps, whole, by itself."""
    assert open_run(root).steps() == list(steps)
    for step in steps:
        assert torch.equal(saved(root, step).tensors["model.cut"], numbered(41, 3) + step)


def assert_nothing_else_in(root: Path) -> None:
    """No receipts, nothing half-written, and no archives that are in no manifest."""
    for step in open_run(root).steps():
        folder = root / f"step_{step:08d}"
        assert {path.name for path in folder.rglob("*")} == {
            "manifest.json",
            *run_of(root).manifest(step).own_names,
        }


def outcomes(ended) -> list[list[str]]:
    return [[save.get("status") or save["error"] for save in one.saves] for one in ended]


def test_a_step_is_committed_where_all_ranks_are_first_and_at_the_other_root_when_they_are_there(worlds, roots):
    script = """
if here.rank == 1:
    at("write", "/near/", lambda: here.hear("committed"))
here.save(ckpt, small(1), 1)
here.tell([Path(root, "step_00000001/manifest.json").exists() for root in ckpt.roots])
here.meet("looked")
here.say("committed")
ckpt.wait()
here.save(ckpt, small(2), 2)
"""
    ended = run(worlds, script, *roots)

    assert outcomes(ended) == [["committed"] * 2] * 2
    assert [one.told[1] for one in ended] == [[False, True]] * 2
    for root in roots:
        assert_holds(root, 1, 2)
        assert_nothing_else_in(root)


def test_what_is_lost_on_the_way_to_one_root_is_copied_from_the_other(worlds, roots):
    """Each rank has lost another one's; so no root has all archives by the first way."""
    script = """
where = ("/near/", "/far/")[here.rank]
at("write", where, away, times=1)
at("finish", where, away, times=1)
here.save(ckpt, small(1), 1)
ckpt.wait()
here.save(ckpt, small(2), 2)
here.tell(ckpt.metrics()["destinations_missed"])
"""
    ended = run(worlds, script, *roots)

    assert outcomes(ended) == [["committed"] * 2] * 2
    for root in roots:
        assert_holds(root, 1, 2)
        assert_nothing_else_in(root)


def test_ranks_that_reach_no_root_together_commit_nothing(worlds, roots):
    script = """
delivery.AGAIN_SECONDS = 0.0
where = ("/near/", "/far/")[here.rank]
at("create", where, away)
at("replace", where, away)
at("read", where, away)
at("names", where, away)
state = small(1)
here.at("looking again" if here.rank == 0 else "hear", lambda: here.say(f"waiting{here.rank}"))
here.expire(lambda: here.is_said("waiting0") and here.is_said("waiting1"))
here.save(ckpt, state, 1)
"""
    first, second = run(worlds, script, *roots)

    assert first.saves[0]["error"] == "StorageUnavailableError"
    assert second.saves[0]["error"] == "PeerFailedError"
    for root in roots:
        assert open_run(root).steps() == []


def test_a_root_where_a_rank_is_too_late_is_caught_up_by_the_next_save(worlds, roots):
    script = """
delivery.LAG_SECONDS = 0.0 if here.rank == 0 else 900.0
if here.rank == 1:
    at("write", "/far/", lambda: here.hear("given up"), times=1)
here.save(ckpt, small(1), 1)
if here.rank == 0:
    ckpt.wait()
    here.say("given up")
ckpt.wait()
here.meet("ended")
here.tell(Path(ckpt.roots[1], "step_00000001/manifest.json").exists())
delivery.LAG_SECONDS = 900.0
here.meet("told")
here.save(ckpt, small(2), 2)
"""
    ended = run(worlds, script, *roots)

    assert outcomes(ended) == [["committed"] * 2] * 2
    assert [one.told[1] for one in ended] == [False, False]
    for root in roots:
        assert_holds(root, 1, 2)


@pytest.mark.parametrize("who", [0, 1])
def test_what_fails_on_a_rank_for_every_root_is_told_to_all_by_every_root(worlds, roots, who):
    script = """
def fail():
    raise OSError("broken")
if here.rank == WHO:
    at("write", "/step_00000001/", fail)
here.save(ckpt, small(1), 1)
here.save(ckpt, small(2), 2)
"""
    ended = run(worlds, script.replace("WHO", str(who)), *roots)

    assert [one[0] for one in outcomes(ended)][1 - who] == "PeerFailedError"
    assert "broken" in ended[1 - who].saves[0]["text"]
    assert [one[1] for one in outcomes(ended)] == ["committed"] * 2
    for root in roots:
        assert_holds(root, 2)


def test_where_a_manifest_could_not_be_put_another_root_commits_the_step(worlds, roots):
    script = """
if here.rank == 0:
    at("put_new", "/near/step_00000001/manifest", away, times=1)
else:
    at("write", "/far/", lambda: until(lambda: bool(list(Path(ckpt.roots[0]).glob("*/receipts.*/*")))), times=1)
here.save(ckpt, small(1), 1)
"""
    ended = run(worlds, script, *roots)

    assert outcomes(ended) == [["committed"]] * 2
    for root in roots:  # it was tried there again, whichever was first
        assert_holds(root, 1)


CACHED = """
for step in (1, 2, 3):
    here.save(ckpt, small(step), step)
ckpt.wait()
here.tell([ckpt.metrics()["destinations_missed"], [d.error for d in ckpt.save(small(4), 4).result().destinations]])
ckpt.wait()
here.tell(sorted(path.name[:10] for path in Path(ckpt.roots[0]).glob("step_*/rank_*")))
"""
RESTORED = """
state = small(0)
here.meet("made")
here.tell([ckpt.restore(state, select="model.cut"), float(state["model"]["cut"].full_tensor().min())])
"""


def test_a_root_that_each_node_has_for_itself_is_a_cache_from_which_its_ranks_restore(worlds, tmp_path):
    shared, cache = tmp_path / "shared", f"f'{tmp_path}/node{{here.rank}}'"
    ended = run(worlds, CACHED, cache, shared)

    assert outcomes(ended) == [["committed"] * 3] * 2
    assert [one.told[3] for one in ended] == [[0.0, [None, None]]] * 2
    assert [one.told[4] for one in ended] == [[f"rank_0000{rank}"] for rank in (0, 1)]
    assert_holds(shared, 1, 2, 3, 4)

    lost = sorted((shared / "step_00000004").glob("rank_*"))
    for archive in lost:  # they are read where they are near
        archive.rename(archive.with_suffix(".away"))
    assert [one.told[0] for one in run(worlds, RESTORED, cache, shared)] == [[4, 4.0]] * 2
    for archive in lost:
        archive.with_suffix(".away").rename(archive)
    (damaged,) = (tmp_path / "node1").glob("step_*/rank_*")
    with open(damaged, "r+b") as file:
        file.seek(20_000)
        file.write(b"damaged")
    ended = run(worlds, RESTORED, cache, shared)
    assert [one.told[0] for one in ended] == [[4, 4.0]] * 2
    assert "read from another root" in ended[1].err


def test_a_shared_root_is_caught_up_from_the_caches_of_nodes(worlds, tmp_path):
    """It was away while the archives were written."""
    script = """
at("create", "/shared/", away, times=2)
here.save(ckpt, small(1), 1)
"""
    ended = run(worlds, script, f"f'{tmp_path}/node{{here.rank}}'", tmp_path / "shared")

    assert outcomes(ended) == [["committed"]] * 2
    assert_holds(tmp_path / "shared", 1)


def test_unchanged_groups_are_written_again_where_one_root_is_enough(worlds, roots):
    """For when a commit arrives at another root, is not known alike to all ranks."""
    script = """
state = {**small(0), "frozen": {"t": spread(9, 9)}}
for step in (1, 2):
    here.save(ckpt, {**state, **small(step)}, step, unchanged=["frozen"])
"""
    ended = run(worlds, script, *roots)

    assert outcomes(ended) == [["committed"] * 2] * 2
    for root in roots:
        assert_holds(root, 1, 2)
        assert not run_of(root).manifest(2).elsewhere
