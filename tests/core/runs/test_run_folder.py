"""The folder of a run: what lies where, tracker and journal, and what a reader makes of it, damaged or not."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from scripted_disk import scripted
from states import assert_is_state, footprint, leftovers, names_below, open_run, records, save, save_into, state_at

import async_ckpt
from async_ckpt import CorruptCheckpointError, Naming, NotCommittedError
from async_ckpt.core.runs import manifest

# --- what lies where -------------------------------------------------------------------------------------------


def test_a_run_looks_as_the_manual_says(tmp_path):
    with open_run(tmp_path) as ckpt:
        report = ckpt.save(state_at(500), step=500).result()

    archive = report.path.rpartition("/")[2]
    start, seen = sorted(path.name for path in tmp_path.glob("start-*"))
    assert re.fullmatch(r"start-00000001\.[0-9a-f]{8}\.500\.json", start)
    assert seen == start.replace(".json", ".seen")
    assert names_below(tmp_path) == [
        "checkpoints.jsonl",
        "latest",
        "step_00000500/manifest.json",
        f"step_00000500/{archive}",
    ]
    rank, attempt, ending = archive.split(".")
    assert (rank, ending) == ("rank_00000", "tar")
    assert len(attempt) == 8
    assert int(attempt, 16) >= 0


def test_a_manifest_names_the_attempt_the_size_and_the_digest_of_the_archive(tmp_path):
    with open_run(tmp_path) as ckpt:
        report = ckpt.save(state_at(5), step=5).result()

    manifest = json.loads((tmp_path / "step_00000005/manifest.json").read_text())
    (archive,) = manifest["archives"]
    assert (manifest["format"], manifest["version"], manifest["step"], manifest["world_size"]) == (
        "async_ckpt",
        1,
        5,
        1,
    )
    assert archive["name"] == f"rank_00000.{manifest['attempt']}.tar"
    assert archive["num_bytes"] == report.num_bytes == Path(report.path).stat().st_size
    assert manifest["created"] > 1_700_000_000


# --- the tracker -----------------------------------------------------------------------------------------------


def test_the_tracker_names_the_newest_step_only_after_its_commit(tmp_path):
    with open_run(tmp_path) as ckpt, scripted(ckpt) as disk:
        ckpt.save(state_at(1), step=1).result()
        assert (tmp_path / "latest").read_text() == "step_00000001\n"
        stop = disk.stop("put_new", "manifest.json")
        handle = ckpt.save(state_at(2), step=2)
        stop.wait_reached()
        assert (tmp_path / "latest").read_text() == "step_00000001\n"
        stop.release()
        handle.result()
        assert (tmp_path / "latest").read_text() == "step_00000002\n"


def test_the_tracker_can_have_another_name_or_be_left_out(tmp_path):
    save_into(tmp_path / "named", 1, naming=Naming(tracker="newest"))
    save_into(tmp_path / "none", 1, 2, naming=Naming(tracker=None), keep=1)

    assert (tmp_path / "named/newest").read_text() == "step_00000001\n"
    assert not (tmp_path / "named/latest").exists()
    assert not (tmp_path / "none/latest").exists()


@pytest.mark.parametrize(
    "content", [None, "", "step_", "500", "step_00000000\n", "../../etc", "\x00\xff", "step_00000001 step_2"]
)
def test_nobody_trusts_the_tracker(tmp_path, content):
    with open_run(tmp_path) as ckpt:
        ckpt.save(state_at(1), step=1).result()
        if content is None:
            (tmp_path / "latest").unlink()
        else:
            (tmp_path / "latest").write_text(content, encoding="latin-1")

        assert ckpt.latest() == 1
        assert_is_state(ckpt.load(), 1)
        ckpt.save(state_at(2), step=2).result()
    assert (tmp_path / "latest").read_text() == "step_00000002\n"


# --- the journal -----------------------------------------------------------------------------------------------


def test_the_journal_has_one_line_per_commit(tmp_path):
    with open_run(tmp_path) as ckpt:
        reports = [ckpt.save(state_at(step), step=step).result() for step in (1, 2, 3)]

    lines = records(tmp_path)
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert [line["num_bytes"] for line in lines] == [report.num_bytes for report in reports]
    assert [str(tmp_path / line["path"]) for line in lines] == [report.path for report in reports]
    assert all(line["created"] > 1_700_000_000 for line in lines)


def test_the_journal_follows_retention_and_overwriting(tmp_path):
    with open_run(tmp_path, keep=2) as ckpt:
        save(ckpt, 1, 2, 3)
        ckpt.save({"new": True}, step=3, overwrite=True).result()
        ckpt.wait()

    lines = records(tmp_path)
    assert [line["step"] for line in lines] == [2, 3]
    assert (tmp_path / lines[-1]["path"]).exists()


def test_a_torn_last_line_of_the_journal_breaks_nothing(tmp_path):
    with open_run(tmp_path) as ckpt:
        save(ckpt, 1, 2)
        whole = (tmp_path / "checkpoints.jsonl").read_bytes()
        for length in range(len(whole)):
            (tmp_path / "checkpoints.jsonl").write_bytes(whole[:length])
            assert ckpt.steps() == [1, 2]
        ckpt.save(state_at(3), step=3).result()
        assert [record["step"] for record in records(tmp_path)] == [1, 2, 3]


def test_the_journal_is_written_again_when_somebody_has_deleted_it(tmp_path):
    save_into(tmp_path, 1)
    (tmp_path / "checkpoints.jsonl").unlink()
    with open_run(tmp_path) as ckpt:
        ckpt.save(state_at(2), step=2).result()
        assert [record["step"] for record in records(tmp_path)] == [1, 2]


# --- steps and their folders -----------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [-1, True, False, 1.0, "1", None, torch.tensor(1)], ids=repr)
def test_a_step_is_a_whole_number_from_zero_on(tmp_path, step):
    with open_run(tmp_path) as ckpt, pytest.raises(ValueError, match="step must be a whole number"):
        ckpt.save(state_at(1), step=step)
    assert names_below(tmp_path) == []


def test_step_zero_and_very_large_steps_are_steps(tmp_path):
    with open_run(tmp_path) as ckpt:
        for step in (0, 99_999_999, 100_000_000, 10**15):
            ckpt.save(state_at(step % 1000), step=step).result()
        assert ckpt.steps() == [0, 99_999_999, 100_000_000, 10**15]
        assert ckpt.latest() == 10**15
        assert_is_state(ckpt.load(100_000_000), 0)


@pytest.mark.parametrize(
    ("step_format", "folder"),
    [
        ("step_{:08d}", "step_00000042"),
        ("{}", "42"),
        ("{:d}", "42"),
        ("checkpoint-{}", "checkpoint-42"),
        ("iter_{:07d}_done", "iter_0000042_done"),
        ("a.b+c({:03d})", "a.b+c(042)"),
        ("{0:05d}", "00042"),
    ],
)
def test_the_folder_of_a_step_follows_its_format(tmp_path, step_format, folder):
    with open_run(tmp_path, naming=Naming(step_format), keep=1) as ckpt:
        save(ckpt, 41, 42)
        ckpt.wait()
        assert ckpt.steps() == [42]
        assert_is_state(ckpt.load(), 42)
    assert (tmp_path / folder / "manifest.json").exists()
    assert (tmp_path / "latest").read_text() == folder + "\n"


@pytest.mark.parametrize(
    "step_format",
    [
        "step", "", "{}{}", "a/{}", "a\\{}", "{:x}", "{:o}", "{:b}", "{:c}", "{:,}", "{:+d}", "{", "{name}", "{1}", "{0.real}",
        "step_{:8d}", "{:1>9}", "{:.0f}", "{!r:>9}", "{{{}}}", "step\n{}",
    ],
)  # fmt: skip
def test_a_format_without_exactly_one_step_in_it_is_refused(tmp_path, step_format):
    with pytest.raises(ValueError, match="step_format"):
        Naming(step_format)


def test_folders_that_are_no_steps_are_not_listed(tmp_path):
    with open_run(tmp_path) as ckpt:
        ckpt.save(state_at(7), step=7).result()
        for name in ("step_7", "step_000000007", "step_00000008", "xstep_00000009", "step_00000010.bak"):
            (tmp_path / name).mkdir()
        shutil.copy(tmp_path / "step_00000007/manifest.json", tmp_path / "step_7")
        shutil.copy(tmp_path / "step_00000007/manifest.json", tmp_path / "step_00000010.bak")

        assert ckpt.steps() == [7]


# --- reading ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["missing", "."])
def test_nothing_is_committed_in_an_empty_or_missing_folder(tmp_path, name):
    ckpt = open_run(tmp_path / name)

    assert ckpt.steps() == []
    assert ckpt.latest() is None
    assert ckpt.restore({"w": torch.zeros(3)}) is None
    with pytest.raises(NotCommittedError, match="nothing is committed yet"):
        ckpt.load()
    with pytest.raises(NotCommittedError):
        ckpt.restore({"w": torch.zeros(3)}, step=3)
    with pytest.raises(FileNotFoundError):
        async_ckpt.load(tmp_path / name)
    assert list(tmp_path.iterdir()) == []


def test_a_missing_step_is_told_with_the_steps_that_are_there(tmp_path):
    with open_run(tmp_path) as ckpt:
        save(ckpt, 1, 2)
        with pytest.raises(NotCommittedError, match="1, 2") as caught:
            ckpt.load(3)
    assert caught.value.step == 3


def test_opening_listing_and_reading_change_nothing_on_storage(tmp_path):
    save_into(tmp_path, 1, 2, keep=1)
    dead = tmp_path / "step_00000003"
    dead.mkdir()
    (dead / "rank_00000.0123abcd.tar").write_bytes(b"half")
    (dead / ".rank_00000.0123abcd.tar.4567cdef.async_ckpt-tmp").write_bytes(b"half")
    before = footprint(tmp_path)

    with open_run(tmp_path, keep=1) as ckpt:
        assert ckpt.steps() == [2]
        assert ckpt.latest() == 2
        ckpt.load()
        ckpt.load(2, mmap=True)
        ckpt.restore(state_at(0))
        ckpt.prewarm(state_at(0))
        ckpt.metrics()
        ckpt.wait()
    async_ckpt.load(tmp_path)
    async_ckpt.load(tmp_path / "step_00000002")

    assert footprint(tmp_path) == before


def test_the_first_save_sweeps_what_dead_writers_left(tmp_path):
    save_into(tmp_path, 1)
    dead = tmp_path / "step_00000003"
    dead.mkdir()
    for folder in (dead, tmp_path / "step_00000001"):
        (folder / "rank_00000.0123abcd.tar").write_bytes(b"half")
        (folder / ".rank_00000.0123abcd.tar.4567cdef.async_ckpt-tmp").write_bytes(b"half")
    for name in (".latest.01234567.async_ckpt-tmp", ".async_ckpt-probe-0123abcd"):
        (tmp_path / name).write_bytes(b"half")

    with open_run(tmp_path) as ckpt:
        ckpt.save(state_at(2), step=2).result()
        assert ckpt.steps() == [1, 2]
        assert_is_state(ckpt.load(1), 1)
    assert leftovers(tmp_path) == []
    assert not dead.exists()


def test_a_sweep_leaves_what_a_living_writer_has_finished_but_not_committed(tmp_path):
    with open_run(tmp_path) as slow, open_run(tmp_path) as other, scripted(slow) as disk:
        stop = disk.stop("put_new", "manifest.json")
        late = slow.save(state_at(5), step=5)
        stop.wait_reached()
        other.save(state_at(4), step=4).result()
        stop.release()

        assert late.result().status == "committed"
        assert_is_state(other.load(5), 5)


def test_a_sweep_leaves_what_a_damaged_manifest_might_name(tmp_path):
    with open_run(tmp_path) as ckpt:
        path = Path(ckpt.save(state_at(1), step=1).result().path)
    (tmp_path / "step_00000001/manifest.json").write_text("{")
    save_into(tmp_path, 2)

    assert path.exists()


def test_a_folder_without_a_manifest_is_no_checkpoint(tmp_path):
    save_into(tmp_path, 1, 2)
    (tmp_path / "step_00000002/manifest.json").unlink()

    with open_run(tmp_path) as ckpt:
        assert ckpt.latest() == 1
        assert_is_state(ckpt.load(), 1)
        with pytest.raises(NotCommittedError):
            ckpt.load(2)


def test_a_flip_of_any_bit_of_a_manifest_is_found(tmp_path):
    """With borrowed groups and a record, since a key that is misread must not be taken for one that is absent."""
    frozen = {"weight": torch.zeros(4)}
    with open_run(tmp_path) as ckpt:
        for step in (1, 2):
            state = {"base": frozen, "adapter": torch.full((2,), float(step))}
            ckpt.save(state, step=step, unchanged="base", record={"loss": 0.5}).result()
    path = tmp_path / "step_00000002/manifest.json"
    data = path.read_bytes()
    sound = manifest.parse(data, path="")
    assert [borrowed.group for borrowed in sound.elsewhere] == ["base"]
    for bit in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CorruptCheckpointError):
            manifest.parse(bytes(flipped), path="")
    for bit in range(0, 8 * len(data), 97):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        with open_run(tmp_path) as ckpt:
            with pytest.raises(CorruptCheckpointError):
                ckpt.load(2)
            live = {"base": {"weight": torch.ones(4)}, "adapter": torch.zeros(2)}
            with pytest.warns(RuntimeWarning, match="step 2 is skipped"):
                assert ckpt.restore(live) == 1
            assert torch.equal(live["base"]["weight"], frozen["weight"])


def test_a_manifest_that_ends_too_early_or_goes_on_is_found(tmp_path):
    save_into(tmp_path, 1)
    data = (tmp_path / "step_00000001/manifest.json").read_bytes()
    for damaged in (*(data[:length] for length in range(len(data))), data + b" ", b"", bytes(len(data))):
        with pytest.raises(CorruptCheckpointError):
            manifest.parse(damaged, path="")


@pytest.mark.parametrize("size", [1, 2])
def test_the_folder_of_a_step_is_no_run_that_begins_anew(tmp_path, size):
    roots = [tmp_path / "near", tmp_path / "far"][:size]
    with open_run(roots) as ckpt:
        ckpt.save(state_at(3), step=3).result()
        ckpt.catch_up()
    there = sorted((roots[0] / "step_00000003").iterdir())
    with open_run([root / "step_00000003" for root in roots]) as ckpt:
        with pytest.raises(
            NotCommittedError, match=r"step_00000003 is the folder of one step, not of a run; open the run"
        ):
            ckpt.restore(state_at(0))
        with pytest.raises(NotCommittedError, match="is the folder of one step"):
            ckpt.save(state_at(4), step=4).result()
    assert sorted((roots[0] / "step_00000003").iterdir()) == there
