"""Retention by bytes, and by the free space of a disk: which steps make room, when, and that no other goes."""

import itertools
import shutil
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import pytest
import torch
from buckets import InMemory
from commands import run_command
from disks import mounted, needs_mount
from hypothesis import given
from hypothesis import strategies as st
from scripted_disk import scripted
from states import assert_is_state, journaled_steps, open_run, save, save_into, state_at

from async_ckpt import AsyncCheckpointer, Keep, NotCommittedError, Place, StorageUnavailableError
from async_ckpt.core.runs.manifest import Archive, GroupLocation, Manifest
from async_ckpt.core.runs.retention import Commits, deletable_steps, steps_for_room
from async_ckpt.core.spec import MIB

# A step of a state of one MiB, with its index and its manifest, takes less than this.
STEP_BYTES = MIB + 128 * 1024


def commit(step: int, num_bytes: int, *lenders: int) -> Manifest:
    lent = tuple(GroupLocation("base", one, f"step_{one}", Archive(f"rank_{one}", 0, "")) for one in lenders)
    return Manifest(step, "", 1, float(step), (Archive(f"rank_{step}", num_bytes, ""),), elsewhere=lent)


def commits(**sizes: int | tuple[int, ...]) -> Commits:
    """Steps by name: their bytes, and the steps that they have borrowed from."""
    rows = {int(name[1:]): size if isinstance(size, tuple) else (size,) for name, size in sizes.items()}
    return Commits({step: commit(step, *row) for step, row in rows.items()})


# --- the rules ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keep", "made", "doomed"),
    [
        (Keep(bytes=20), commits(s1=10, s2=10, s3=10), [1]),
        (Keep(bytes=29.5), commits(s1=10, s2=10, s3=10), [1]),
        (Keep(bytes=30), commits(s1=10, s2=10, s3=10), []),
        (Keep(bytes=1), commits(s1=10, s2=10), [1]),
        (Keep(bytes=12), commits(s1=1, s2=100, s3=10), [1, 2]),  # none is taken from behind one that does not fit
        (Keep(bytes=10, last=2), commits(s1=10, s2=10, s3=10), [1]),
        # A lender is counted once, with the newest of those that need it.
        (Keep(bytes=104), commits(s1=100, s2=50, s3=(2, 1), s4=(2, 1)), [1, 2]),
        (Keep(bytes=103), commits(s1=100, s2=50, s3=(2, 1), s4=(2, 1)), [1, 2, 3]),
        (Keep(free=1), commits(s1=10, s2=10), []),
    ],
)
def test_the_newest_steps_that_fit_are_kept(keep, made, doomed):
    assert deletable_steps(keep, made, now=0.0) == doomed


def test_an_unmarked_step_is_kept_beside_a_newer_rolling_one_though_it_is_too_large():
    rolling = Manifest(2, "", 1, 2.0, (Archive("rank_2", 1, ""),), record={"rolling": True})

    assert deletable_steps(Keep(bytes=5), Commits({1: commit(1, 10), 2: rolling}), now=0.0) == []


def stay_together(going: Collection[int], lent: Mapping[int, Collection[int]]) -> bool:
    """Whether no step that stays has borrowed from one that goes."""
    return not any(set(lent[step]) & set(going) for step in lent if step not in going)


lending = st.dictionaries(st.integers(1, 9), st.tuples(st.integers(0, 9), st.sets(st.integers(1, 9))), min_size=1)


@given(lending, st.integers(0, 60), st.integers(0, 3), st.randoms(use_true_random=False))
def test_no_more_steps_make_room_than_must_and_none_that_another_needs(rows, missing, at_least, random):
    lent = {step: [one for one in lenders if one < step and one in rows] for step, (_, lenders) in rows.items()}
    made = Commits({step: commit(step, size, *lent[step]) for step, (size, _) in rows.items()})
    order = random.sample(sorted(made), random.randint(0, len(made)))
    at_least = min(at_least, len(order))

    def freed(going: Collection[int]) -> int:
        return sum(rows[step][0] for step in going)

    def most(count: int) -> set[int]:
        """The largest part of the first steps that nobody who stays needs."""
        sets = (set(some) for n in range(count + 1) for some in itertools.combinations(order[:count], n))
        return max((some for some in sets if stay_together(some, lent)), key=len)

    going = steps_for_room(order, made, missing, at_least=at_least)

    enough = [count for count in range(at_least, len(order) + 1) if freed(most(count)) >= missing]
    assert set(going) == most(enough[0] if enough else len(order))


# --- a small disk -------------------------------------------------------------------------------------------------


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with room for seven steps."""
    with mounted(tmp_path / "disk", f"size={8 * MIB}") as folder:
        yield folder


def free_at(disk: Path) -> int:
    return shutil.disk_usage(disk).free


@needs_mount
def test_room_is_made_before_each_save_so_that_the_disk_does_not_fill(disk):
    with open_run(disk / "run", keep=Keep(free=3 * MIB)) as ckpt:
        for step in range(1, 13):
            save(ckpt, step)
            assert free_at(disk) >= 3 * MIB
            assert journaled_steps(ckpt) == ckpt.steps()
        assert ckpt.steps() == [9, 10, 11, 12]  # no more were deleted than had to be
        for step in ckpt.steps():
            assert_is_state(ckpt.load(step), step)


@needs_mount
def test_the_first_save_after_a_restart_makes_room_that_others_have_taken(disk):
    save_into(disk / "run", 1, 2, 3, 4)
    (disk / "others").write_bytes(bytes(free_at(disk) - MIB // 2))
    with open_run(disk / "run", keep=Keep(free=MIB)) as ckpt:
        save(ckpt, 5)
        assert ckpt.steps() == [3, 4, 5]


@needs_mount
def test_what_the_rules_do_not_keep_makes_room_first_and_what_they_keep_for_good_last(disk):
    with open_run(disk / "run") as ckpt:
        for step in (1, 2, 3, 4, 5, 6):
            save(ckpt, step, record={"loss": float(step)})
    with open_run(disk / "run", keep=Keep(last=3, every=3, best=("loss", "min", 1), free=3 * MIB)) as ckpt:
        save(ckpt, 7)
        assert ckpt.steps() == [1, 3, 6, 7]  # 2 went first; then 4 and 5, which are not the oldest


@needs_mount
def test_bad_steps_make_room_first_good_ones_last_and_the_newest_that_is_not_bad_stays(disk):
    with open_run(disk / "run") as ckpt:
        save(ckpt, 1, 2, 3, 4, 5, 6)
        ckpt.mark(1, "good")
        ckpt.mark(4, "bad")
    with open_run(disk / "run", keep=Keep(good=1, free=3 * MIB)) as ckpt:
        save(ckpt, 7)
        assert ckpt.steps() == [1, 7]  # by the rule; room there was enough then
    with open_run(disk / "run", keep=Keep(free=3 * MIB)) as ckpt:
        save(ckpt, 8, 9)
        ckpt.mark(8, "bad")
        save(ckpt, 10, 11)
        assert ckpt.steps() == [7, 9, 10, 11]  # first the bad one, then the oldest
    with open_run(disk / "run", keep=Keep(free=100 * MIB)) as ckpt:
        ckpt.mark(11, "bad")
        with scripted(ckpt, 0) as storage:
            storage.fail("create", error=StorageUnavailableError("it is away", path="x"))
            with pytest.raises(StorageUnavailableError):
                ckpt.save(state_at(12), step=12).result()
        assert ckpt.steps() == [10, 11]


@needs_mount
def test_the_newest_step_stays_though_there_is_too_little_room_and_that_is_said_once(disk, caplog):
    with open_run(disk / "run", keep=Keep(free=100 * MIB)) as ckpt:
        for step in (1, 2, 3):
            save(ckpt, step)
            assert ckpt.steps() == [step]
            assert_is_state(ckpt.load(step), step)
    said = [record.message for record in caplog.records if "Keep(free=…) cannot be kept" in record.message]
    assert len(said) == 1
    assert "bytes too few will be free" in said[0]


@needs_mount
def test_of_damaged_steps_and_one_that_is_restored_the_sound_one_stays(disk):
    save_into(disk / "run", 1, 2, 3)
    for archive in (disk / "run").glob("step_0000000[23]/*.tar"):
        archive.write_bytes(b"")
    (disk / "run/step_00000003/manifest.json").write_bytes(b"{}")
    with open_run(disk / "run", keep=Keep(free=100 * MIB)) as ckpt:
        with pytest.warns(RuntimeWarning):
            assert ckpt.restore(state_at(0)) == 1
        with scripted(ckpt, 0) as storage:
            storage.fail("create", error=StorageUnavailableError("it is away", path="x"))
            with pytest.raises(StorageUnavailableError):
                ckpt.save(state_at(4), step=4).result()
        assert_is_state(ckpt.load(1), 1)


@needs_mount
def test_a_lender_stays_until_its_last_borrower_goes(disk):
    base = {"weight": torch.ones(MIB // 4)}
    with open_run(disk / "run") as ckpt:
        for step in (1, 2, 3):
            ckpt.save({"base": base, "step": step}, step=step, unchanged="base").result()
        save(ckpt, 4)
    with open_run(disk / "run", keep=Keep(free=free_at(disk))) as ckpt:
        save(ckpt, 5)
        assert ckpt.steps() == [4, 5]  # of 2 and 3 alone, with their few bytes, there would be no room
    with open_run(disk / "run", keep=Keep(free=free_at(disk) - STEP_BYTES - 65536)) as ckpt:
        ckpt.save({"base": base, "step": 6}, step=6).result()
        assert ckpt.restore({"base": base, "step": 0}) == 6
        for step in (7, 8):
            ckpt.save({"base": base, "step": step}, step=step, unchanged="base").result()
        ckpt.wait()
        assert torch.equal(ckpt.load(8)["base"]["weight"], base["weight"])


@needs_mount
def test_a_save_goes_on_though_old_steps_cannot_be_deleted_and_they_still_load(disk, caplog):
    save_into(disk / "run", 1, 2, 3)
    with open_run(disk / "run", keep=Keep(free=free_at(disk))) as ckpt, scripted(ckpt, 0) as storage:
        storage.fail("delete", "step_00000001", error=StorageUnavailableError("it hangs", path="x"))
        ckpt.save(state_at(4), step=4).result()
        assert "Keep(free=…) could not delete steps: it hangs" in caplog.text
        ckpt.wait()
        for step in ckpt.steps():
            assert_is_state(ckpt.load(step), step)
        assert ckpt.steps()[-2:] == [3, 4]


# --- places -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", ["alone", "further"])
def test_a_place_that_does_not_tell_its_free_space_is_refused(tmp_path, given):
    store = InMemory().place
    root = Place(store.url, fs=store.fs) if given == "alone" else [tmp_path, store]
    with pytest.raises(ValueError, match=r"does not report its free space, so Keep\(free=…\) cannot be used"):
        AsyncCheckpointer(root, keep=Keep(free=1e9))
    if given == "further":
        AsyncCheckpointer([Place(tmp_path, keep=Keep(free=1e9)), store], keep=3).close()


@needs_mount
def test_memory_in_front_of_a_disk_makes_room_and_takes_every_save(disk, tmp_path):
    with open_run([Place(disk / "run", keep=Keep(free=3 * MIB)), tmp_path / "far"]) as ckpt:
        for step in range(1, 11):
            save(ckpt, step)
            assert free_at(disk) >= 3 * MIB
            assert (disk / f"run/step_{step:08d}").is_dir()
        assert ckpt.catch_up()[str(disk / "run")] == []  # what made room does not come back
    assert open_run(disk / "run").steps() == [7, 8, 9, 10]
    assert open_run(tmp_path / "far").steps() == [*range(1, 11)]


@needs_mount
def test_a_further_place_makes_room_before_a_copy(disk, tmp_path):
    with open_run([tmp_path / "near", Place(disk / "run", keep=Keep(free=3 * MIB))]) as ckpt:
        for step in range(1, 11):
            save(ckpt, step)
            assert free_at(disk) >= 3 * MIB
    assert open_run(disk / "run").steps() == [7, 8, 9, 10]


@needs_mount
def test_a_place_that_is_full_of_its_own_steps_is_not_passed_over(disk, tmp_path):
    save_into(disk / "run", *range(1, 7))
    (disk / "others").write_bytes(bytes(free_at(disk) - MIB // 2))
    save_into([Place(disk / "run", keep=Keep(free=MIB // 4)), tmp_path / "far"], 7, 8)
    assert open_run(disk / "run").steps()[-2:] == [7, 8]


@needs_mount
def test_the_command_makes_room(disk):
    save_into(disk / "run", 1, 2, 3, 4)
    wanted = free_at(disk) + STEP_BYTES
    shown = run_command("prune", disk / "run", "--keep", f"free={wanted}", "--dry-run").stdout
    assert "2 of 4 steps would be deleted" in shown
    assert run_command("prune", disk / "run", "--keep", f"free={wanted}", "--yes").returncode == 0
    assert free_at(disk) >= wanted
    assert open_run(disk / "run").steps() == [3, 4]
    with pytest.raises(NotCommittedError):
        open_run(disk / "run").load(1)


# --- ranks --------------------------------------------------------------------------------------------------------

# Rank 0 deletes nothing before every other rank has come to where it waits for that.
RANKS = """
import torch
from pathlib import Path
from async_ckpt import Keep
from async_ckpt.core.ranks.agreement import Agreement
from async_ckpt.core.runs.run import Run
from racing import until
DISK = Path({disk!r})
make_room, has_room, waiting = Run.make_room, Agreement.has_room, DISK / "waiting"
def late(run, step, *more, **options):
    until(lambda: waiting.exists())
    make_room(run, step, *more, **options)
    waiting.unlink()
async def told(agreement):
    if here.rank:
        waiting.touch()
    await has_room(agreement)
Run.make_room, Agreement.has_room = late, told
ckpt = open_run(DISK / "run", keep=Keep(free=1 << 19))
for step in range(1, 9):
    here.save(ckpt, {{"own": torch.full((1 << 18,), float(step))}}, step, per_rank="own")
here.tell(ckpt.steps())
ckpt.close()
"""


@needs_mount
def test_no_rank_writes_before_rank_0_has_made_room_for_all(disk, worlds):
    """The disk has room for three steps of two MiB each: without waiting, the fourth would not fit."""
    ended = worlds.run(2, RANKS.format(disk=str(disk)))

    assert [save.get("status") or save["error"] for one in ended for save in one.saves] == ["committed"] * 16
    assert [one.told[-1] for one in ended] == [[6, 7, 8]] * 2


NODES = """
import torch
from pathlib import Path
from async_ckpt import Keep, Place
from racing import until
ROOT = Path({root!r})
ckpt = open_run([Place(ROOT / f"node{{here.rank}}/run", keep=Keep(free=3 << 20)), ROOT / "far"])
for step in range(1, 9):
    handle = ckpt.save({{"own": torch.full((1 << 18,), float(step))}}, step, per_rank="own")
    here.tell([handle.result().path.split("/")[-3], handle.at(ROOT / "far").result()])
    ckpt.wait()
    until(lambda: not any(mover.worker.is_running for mover in ckpt._lineage.tiers.movers))
ckpt.close()
"""


@needs_mount
def test_each_node_has_so_much_free(tmp_path, worlds):
    with mounted(tmp_path / "node0", f"size={8 * MIB}") as big, mounted(tmp_path / "node1", f"size={6 * MIB}") as small:
        assert worlds.told(2, NODES.format(root=str(tmp_path))) == [
            [[f"node{rank}", step] for step in range(1, 9)] for rank in (0, 1)
        ]
        assert free_at(small) >= 3 * MIB
        for node in (big, small):
            assert sorted(path.name for path in (node / "run").glob("step_*")) == ["step_00000007", "step_00000008"]
    assert open_run(tmp_path / "far").steps() == [*range(1, 9)]
