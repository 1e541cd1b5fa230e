"""Several ranks, and a run at several places: rank 0 chooses the place of a save, and copies; all know what has arrived."""

from pathlib import Path

import pytest
import torch
from rank_oracle import run_of, saved
from rank_states import numbered
from states import open_run

# `at(call, where, do)` has `do` called ahead of a call of the disk that is about this place.
PRELUDE = """
import shutil
from pathlib import Path
from async_ckpt import CheckpointError, Place, StorageUnavailableError
from async_ckpt.core.saving import mover, tiers
from async_ckpt.core.storage.local import LocalSink, LocalStorage
from racing import PATIENCE, until

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

mover._FIRST_PAUSE_SECONDS = mover._PAUSE_SECONDS = tiers._AWAY_SECONDS = 0.01
"""


def run(worlds, script: str, *roots: object, size: int = 2, more: str = "", **options):
    """`roots` may tell nodes apart by `{here.rank}`; each rank tells what the others hold at the end."""
    given = ", ".join(root if isinstance(root, str) else f"{str(root)!r}" for root in roots)
    body = PRELUDE + f"ckpt = open_run([{given}]{more})\n" + script + "\nckpt.close()"
    return worlds.run(size, body, **options)


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


def test_a_step_is_committed_at_the_first_place_and_every_rank_knows_when_it_is_at_the_others(worlds, roots):
    script = """
for step in (1, 2):
    handle = ckpt.save(small(step), step)
    here.tell([Path(handle.result().path).parent.name, [handle.at(place).result(PATIENCE) for place in ckpt.roots]])
"""
    ended = run(worlds, script, *roots, size=3)

    assert [one.told for one in ended] == [[["near", [1, 1]], ["near", [2, 2]]]] * 3
    for root in roots:
        assert_holds(root, 1, 2)
        assert_nothing_else_in(root)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("call", ["create", "write", "finish"])
def test_a_place_that_fails_on_a_rank_costs_one_save_and_all_ranks_go_on_at_the_next(worlds, roots, rank, call):
    script = f"""
if here.rank == {rank}:
    at("{call}", "/near/step_00000001/rank_", away)
here.save(ckpt, small(1), 1)
tiers._AWAY_SECONDS = 600.0
if here.rank == 0 == {rank}:
    at("put_new", "/near/", away)  # what is tried when it is asked whether it is back
handle = ckpt.save(small(2), 2)
here.tell(Path(handle.result().path).parent.name)
here.save(ckpt, small(3), 3)
"""
    ended = run(worlds, script, *roots)

    for number, one in enumerate(ended):
        failed, last = one.saves
        assert failed["error"] == ("StorageUnavailableError" if number == rank else "PeerFailedError")
        assert last["status"] == "committed"
        assert one.told[1] == "far"
    assert_holds(roots[1], 2, 3)
    assert open_run(roots[0]).steps() == []


def test_the_handles_of_all_ranks_wait_until_a_step_has_left_the_memory(worlds, roots):
    script = """
if here.rank == 0:
    at("finish", "/far/", lambda: here.hear("settled"))
handle = ckpt.save(small(1), 1)
if here.rank:
    save = ckpt._saver.ledger.saves()[0]
    until(save.settled.done)
    here.tell(handle.done())
    here.say("settled")
here.tell(handle.result().status)
"""
    memory = f"Place({str(roots[0])!r}, volatile=True)"
    ended = run(worlds, script, memory, roots[1])

    assert [one.told for one in ended] == [["committed"], [False, "committed"]]
    assert_holds(roots[1], 1)


def test_a_rank_is_told_when_rank_0_has_died_before_a_step_has_left_the_memory(worlds, roots):
    script = """
if here.rank == 0:
    manifest = Path(ckpt.roots[0], "step_00000001", "manifest.json")
    at("finish", "/far/", lambda: (until(manifest.exists), here.die()))
handle = ckpt.save(small(1), 1)
here.tell(type(handle.exception(PATIENCE)).__name__)
"""
    memory = f"Place({str(roots[0])!r}, volatile=True)"
    _, second = run(worlds, script, memory, roots[1], killed={0})

    assert second.told == ["PeerFailedError"]
    assert open_run(roots[0]).steps() == [1]


@pytest.mark.parametrize("reads", [True, False], ids=["found", "unknown"])
def test_a_step_whose_commit_rank_0_could_not_see_leaves_the_memory_all_the_same(worlds, roots, reads):
    """The manifest is there, but its put has failed: the other ranks go by it."""
    script = f"""
real, looks = LocalStorage.put_new, [{int(not reads)}]
def put_and_fail(disk, path, data, *more, **options):
    answer = real(disk, path, data, *more, **options)
    if "/near" in str(disk.locate(path)) and path.endswith("step_00000002/manifest.json"):
        at("read", "/near/step_00000002/manifest.json", away, times=looks[0])
        away()
    return answer
if here.rank == 0:
    LocalStorage.put_new = put_and_fail
for step in (1, 2, 3, 4):
    try:
        here.tell(ckpt.save(small(step), step).result(PATIENCE).status)
    except CheckpointError as error:
        here.tell(type(error).__name__)
"""
    memory = f"Place({str(roots[0])!r}, volatile=True)"
    first, second = run(worlds, script, memory, roots[1])

    assert first.told == ["committed", "StorageUnavailableError", "committed", "committed"]
    assert second.told == ["committed"] * 4
    assert {2, 4} <= {*open_run(roots[1]).steps()}


def test_the_handles_of_all_ranks_fail_with_the_copy_and_the_step_follows(worlds, roots):
    script = """
down = [True]
at("finish", "/far/", lambda: away() if down[0] else None)
handle = ckpt.save(small(1), 1)
here.tell([type(handle.exception(PATIENCE)).__name__, "it is away" in str(handle.exception())])
here.say(f"failed-{here.rank}")
if here.rank == 0:
    here.hear("failed-0", "failed-1")
    down[0] = False
here.tell(handle.at(ckpt.roots[1]).result(PATIENCE))
"""
    memory = f"Place({str(roots[0])!r}, volatile=True)"
    ended = run(worlds, script, memory, roots[1])

    assert [one.told for one in ended] == [[["StorageUnavailableError", True], 1]] * 2
    assert_holds(roots[1], 1)


@pytest.mark.parametrize("is_away", [False, True], ids=["disk answers", "disk is away"])
def test_closing_on_all_ranks_has_the_last_step_leave_the_memory_or_says_that_it_stays_there(worlds, roots, is_away):
    script = f"""
import warnings
warnings.simplefilter("ignore")  # of what is left
at("finish", "/far/", away if {is_away} else lambda: here.hear("closing"))
handle = ckpt.save(small(1), 1)
save = ckpt._saver.ledger.saves()[0]
until(save.settled.done)
here.say("closing")
try:
    ckpt.close()
except CheckpointError as error:
    here.tell(type(error).__name__)
here.tell(handle.done())
"""
    memory = f"Place({str(roots[0])!r}, volatile=True)"
    ended = run(worlds, script, memory, roots[1])

    errors = ["StorageUnavailableError"] if is_away else []
    assert [one.told for one in ended] == [[*errors, True]] * 2
    assert open_run(roots[1]).steps() == ([] if is_away else [1])
    assert_holds(roots[0], 1)


def test_a_place_that_is_no_disk_and_that_ranks_do_not_share_is_passed_over(worlds, tmp_path):
    script = """
for step in (1, 2, 3):
    here.save(ckpt, small(step), step)
"""
    own = f"Place(f'{tmp_path}/node{{here.rank}}', fs=__import__('fsspec').filesystem('file'))"
    ended = run(worlds, script, own, tmp_path / "shared")

    assert outcomes(ended) == [["PeerFailedError", "committed", "committed"]] * 2
    assert "must be shared by all ranks" in ended[0].saves[0]["text"]
    assert_holds(tmp_path / "shared", 2, 3)


def test_unchanged_groups_are_borrowed_and_copied_with_the_steps_that_borrow_them(worlds, roots):
    script = """
frozen = {"t": spread(9, 9)}
for step in (1, 2, 3):
    here.save(ckpt, {**small(step), "frozen": frozen}, step, unchanged=["frozen"])
"""
    ended = run(worlds, script, *roots, more=", keep=1")

    assert outcomes(ended) == [["committed"] * 3] * 2
    for root in roots:
        assert open_run(root).steps() == [1, 3]
        assert {one.step for one in run_of(root).manifest(3).elsewhere} == {1}


def test_a_restart_of_all_ranks_copies_what_the_near_place_alone_holds(worlds, roots):
    run(worlds, "here.save(ckpt, small(1), 1)", roots[0])
    script = """
here.tell(ckpt.restore(small(0)))
"""
    ended = run(worlds, script, *roots)

    assert [one.told for one in ended] == [[1], [1]]
    assert_holds(roots[1], 1)


def test_rank_0_alone_says_what_has_arrived(worlds, roots):
    """The log of words is its own: a word of another rank would stand in the place of one of these."""
    script = """
from async_ckpt.core.ranks.word_log import WordLog
said, real = [], WordLog.append
WordLog.append = lambda log, topic, word: (said.append(word), real(log, topic, word))[1]
for step in (1, 2):
    ckpt.save(small(step), step).at(ckpt.roots[1]).result(PATIENCE)
here.tell([word["copied"] for word in said if "copied" in word])
"""
    first, *others = run(worlds, script, *roots, size=3)

    assert first.told == [[1, 2]]
    assert [one.told for one in others] == [[[]]] * 2
