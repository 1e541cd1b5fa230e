"""A kill at any instruction: what was committed loads, bit for bit."""

import itertools
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from children import Child, Nursery
from slices import some
from states import assert_is_state, leftovers, names_below, open_run, save_into, state_at, weight

import async_ckpt

STATE_MIB = 5  # two segments


# --- killed ----------------------------------------------------------------------------------------------------

# Steps 1, 2 and 4 are there; the scenario runs with the kill armed. Prints how many calls it made.
DYING = """
import sys
from children import die_at
from states import open_run, state_at
root, scenario, number = sys.argv[1], sys.argv[2], int(sys.argv[3])
count = die_at(number)
retire = scenario in ("retire", "again", "between")
with open_run(root, keep=3, on_rollback="retire" if retire else None) as ckpt:
    if scenario == "next":
        ckpt.save(state_at(5, 5), step=5).result()
    elif scenario == "overwrite":
        ckpt.save(state_at(4, 5) | {"note": "new"}, step=4, overwrite=True).result()
    elif scenario == "retire":
        ckpt.save(state_at(1, 5) | {"note": "new"}, step=1, overwrite=True).result()
    elif scenario == "between":
        ckpt.save(state_at(3, 5) | {"note": "new"}, step=3).result()
    elif scenario == "again":
        ckpt.save(state_at(2, 5) | {"note": "new"}, step=2, overwrite=True).result()
        ckpt.save(state_at(1, 5) | {"note": "newer"}, step=1, overwrite=True).result()
print(count())
"""
FIRST = """
import sys
from children import die_at
from states import open_run, state_at
count = die_at(int(sys.argv[2]))
with open_run(sys.argv[1]) as ckpt:
    ckpt.save(state_at(1, 5), step=1).result()
print(count())
"""


def assert_every_commit_loads(root: Path) -> list[int]:
    """The steps that are committed; each loads exactly, and nothing else is taken for a checkpoint."""
    return [step for step, _ in assert_commits_load(root)]


def assert_commits_load(root: Path) -> list[tuple[int, str]]:
    """The same, with the note of each that tells an overwritten step from what it was before."""
    with open_run(root) as ckpt:
        steps = ckpt.steps()
        assert ckpt.latest() == (steps[-1] if steps else None)
        assert ckpt.restore({"note": "", "step": 0}) == ckpt.latest()
        told = []
        for step in steps:
            state = ckpt.load(step)
            told.append((step, "" if state["note"] == f"step {step}" else state["note"]))
            assert told[-1][1] in ("", "new", "newer")
            assert_is_state(state | {"note": f"step {step}"}, step, STATE_MIB)
        if steps:
            assert async_ckpt.load(root)["step"] == steps[-1]
    return told


def assert_work_goes_on(root: Path, step: int) -> None:
    """A new process saves the step that died; the leftovers are gone."""
    with open_run(root, on_rollback="retire") as ckpt:
        ckpt.save(state_at(step, STATE_MIB), step=step, overwrite=True).result()
        ckpt.wait()
        assert ckpt.latest() == step
        assert_is_state(ckpt.load(), step, STATE_MIB)
    assert (root / "latest").read_text() == f"step_{step:08d}\n"
    assert [name for name in names_below(root) if name.endswith("tmp")] == []


def each_death(nursery: Nursery, code: str, roots: Iterator[Path], *arguments: str) -> Iterator[Path]:
    """Run the script once for every call that it makes, or a part of them, killed at that call; yields what is left."""
    whole = nursery.run(code, next(roots), *arguments, 0)
    assert (whole.status, whole.err) == (0, "")
    running: list[tuple[Path, Child, int]] = []

    def died(child: Child, number: int) -> bool:
        """True if it was killed, or has made fewer calls than the whole run before it: who makes a folder differs."""
        ended = child.ended()
        return ended.status == -9 or int(ended.out) < number

    for number in some(range(1, int(whole.out) + 1), 3):
        running.append((root := next(roots), nursery.start(code, root, *arguments, number), number))
        if len(running) > 1:  # the next one dies while this one is looked at
            root, child, of_child = running.pop(0)
            assert died(child, of_child)
            yield root
    for root, child, of_child in running:
        assert died(child, of_child)
        yield root


def test_killed_at_any_call_of_the_first_save_nothing_or_all_of_it_is_there(quick_path, nursery):
    outcomes = set()
    for root in each_death(nursery, FIRST, (quick_path / str(number) for number in itertools.count())):
        outcomes.add(tuple(assert_every_commit_loads(root)))
        assert_work_goes_on(root, 1)
        assert leftovers(root) == []
        shutil.rmtree(root)

    assert outcomes == {(), (1,)}


_OLD = ((1, ""), (2, ""), (4, ""))
_AGAIN = ((1, ""), (2, "new"))


@pytest.mark.parametrize(
    ("scenario", "step", "possible"),
    [
        ("next", 5, {_OLD, (*_OLD, (5, "")), (*_OLD[1:], (5, ""))}),
        ("overwrite", 4, {_OLD, (*_OLD[:2], (4, "new"))}),
        # A rollback is one commit: the old line or the new one, and never a mixture.
        ("retire", 1, {_OLD, ((1, "new"),)}),
        ("between", 3, {_OLD, (*_OLD[:2], (3, "new"))}),
        ("again", 1, {_OLD, _AGAIN, ((1, "newer"),)}),
    ],
)
def test_killed_at_any_call_of_a_later_save_the_run_is_as_before_or_after_it(
    quick_path, nursery, scenario, step, possible
):
    save_into(quick_path / "before", 1, 2, 4, mib=STATE_MIB)
    roots = (shutil.copytree(quick_path / "before", quick_path / str(number)) for number in itertools.count())
    outcomes = set()
    for root in each_death(nursery, DYING, roots, scenario):
        outcomes.add(tuple(assert_commits_load(root)))
        assert_work_goes_on(root, step)
        assert list(root.glob("rollback-*")) == []
        if scenario in ("next", "overwrite"):
            assert leftovers(root) == []
        shutil.rmtree(root)

    assert outcomes == possible


# Step 1 has written the frozen part, which 2 and 3 borrow; 4 writes it anew, so that retention deletes all three.
LENDING = """
import sys
from pathlib import Path
from async_ckpt import Keep
from children import die_at
from states import open_run, weight
root, number = sys.argv[1], int(sys.argv[2])
frozen = {"weight": weight(0, 5)}
def state(step):
    return {"base": frozen, "adapter": {"weight": weight(step)}}
with open_run(root) as ckpt:
    for step in (1, 2, 3):
        ckpt.save(state(step), step=step, unchanged="base").result()
        for name in ("state.json", "hf/config.json"):  # of a trainer
            file = Path(root, f"step_{step:08d}", name)
            file.parent.mkdir(exist_ok=True)
            file.write_text("{}")
count = die_at(number)
with open_run(root, keep=Keep(last=1, whole_folder=True)) as ckpt:
    ckpt.save(state(4), step=4).result()
print(count())
"""


def test_killed_at_any_call_of_retention_no_step_has_lost_what_it_has_borrowed(quick_path, nursery):
    """A borrower goes before its lender, and a manifest before what is beside it: what is listed loads, with the groups
    that other archives hold, and its folder still has what a trainer has written there.
    """
    outcomes = set()
    for root in each_death(nursery, LENDING, (quick_path / str(number) for number in itertools.count())):
        with open_run(root) as ckpt:
            steps = ckpt.steps()
            for step in steps:
                state = ckpt.load(step)
                assert torch.equal(state["base"]["weight"], weight(0, 5))
                assert torch.equal(state["adapter"]["weight"], weight(step))
                beside = root / f"step_{step:08d}"
                assert step == 4 or all((beside / name).exists() for name in ("state.json", "hf/config.json"))
        outcomes.add(tuple(steps))
        shutil.rmtree(root)

    assert outcomes == {(1, 2, 3), (1, 2, 3, 4), (1, 2, 4), (1, 4), (4,)}


TRAINING = """
import sys
from states import open_run, state_at
with open_run(sys.argv[1], keep=3) as ckpt:
    for step in range((ckpt.latest() or 0) + 1, 10_000):
        ckpt.save(state_at(step, 5), step=step)
        print(f"step {step}", flush=True)
"""


def test_a_training_that_is_killed_again_and_again_goes_on_from_its_last_commit(tmp_path, nursery):
    root = tmp_path / "run"
    latest = 0
    for life in range(5):
        child = nursery.start(TRAINING, root)
        child.wait_for_line(f"step {latest + 2 + life}\n")
        child.send(9)
        assert child.ended().status == -9
        steps = assert_every_commit_loads(root)
        # A save is begun when the one before it is committed.
        assert steps[-1] >= latest + life + 1
        latest = steps[-1]
    assert_work_goes_on(root, latest + 1)
    assert leftovers(root) == []


# --- durable ---------------------------------------------------------------------------------------------------

RECORDING = """
import os, sys
from children import watch_disk
from states import open_run, state_at

def path_of(argument):
    return os.readlink(f"/proc/self/fd/{argument}") if isinstance(argument, int) else str(argument)

log = []
with open_run(sys.argv[1]) as ckpt:
    watch_disk(lambda name, arguments: log.append((name, path_of(arguments[-1 if name in ("replace", "link") else 0]))))
    ckpt.save(state_at(1, 5), step=1).result()
    num_calls = len(log)
    ckpt.wait()
for name, path in log[:num_calls]:
    print(name, os.path.relpath(path, sys.argv[1]))
"""


def test_nothing_is_named_before_it_is_synced_and_every_name_is_synced_before_the_next(tmp_path, nursery):
    """The order that survives a power cut: bytes, name of the archive, name of the commit, and only then the future."""
    root = tmp_path / "run"
    out = nursery.out_of(RECORDING, root)
    log = [tuple(line.split(" ", 1)) for line in out.splitlines()]

    def first(call: str, ending: str, after: int = -1) -> int:
        return next(i for i, (c, p) in enumerate(log) if i > after and c == call and p.endswith(ending))

    temp = next(path for call, path in log if call == "pwrite")
    last_write = max(i for i, (call, path) in enumerate(log) if call == "pwrite")
    archive_synced = first("fsync", temp, last_write)
    archive_named = first("replace", ".tar", archive_synced)
    archive_name_synced = first("fsync", "step_00000001", archive_named)
    commit_synced = first("fsync", "tmp", archive_name_synced)
    committed = first("link", "manifest.json", commit_synced)
    commit_name_synced = first("fsync", "step_00000001", committed)
    tracker_synced = first("fsync", "tmp", commit_name_synced)
    assert first("link", "latest", tracker_synced) < len(log)
    assert first("replace", "checkpoints.jsonl", commit_name_synced) < len(log)
    # And every folder that was made is synced in its parent before the commit.
    for made in [(i, path) for i, (call, path) in enumerate(log) if call == "mkdir"]:
        parent = os.path.normpath(os.path.join(made[1], ".."))
        assert first("fsync", parent, made[0]) < committed
