"""The command on folders of many runs: what is below them, by kind, and each word on all of them."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from commands import documented, run_command, store_options
from published import flip
from states import open_run

import async_ckpt
from async_ckpt.core import timing
from async_ckpt.core.events.log import EventLog
from async_ckpt.core.storage.local import LocalStorage


def saved(root: Path, losses: list[float]) -> None:
    with open_run(root) as ckpt:
        for step, loss in enumerate(losses, 1):
            ckpt.save({"w": torch.full((10,), loss)}, step, record={"loss": loss}).result()


@pytest.fixture(scope="module")
def kept_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("folder")
    saved(folder / "a", [3.0, 1.0, 2.0])
    saved(folder / "sweep/b", [0.5, 0.25])
    saved(folder / "sweep/deep/c", [4.0])
    with async_ckpt.Publisher(folder / "sweep/weights") as publisher:
        publisher.publish({"w": torch.ones(3)}, 1).result()
    async_ckpt.save({"w": torch.ones(3)}, folder / "bare.tar").result()
    torch.save({"w": torch.ones(3)}, folder / "sweep/old.pt")
    (folder / "data.tar").write_bytes(b"of somebody else" * 100)
    (folder / "notes").mkdir()
    (folder / "notes/today.txt").write_text("nothing")
    (folder / ".hidden").mkdir()
    saved(folder / ".hidden/d", [1.0])
    return folder


@pytest.fixture
def folder(kept_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(kept_folder, tmp_path / "folder"))


def test_ls_finds_everything_below_a_folder_by_its_kind(folder):
    told = documented("ls", folder)

    assert {row["name"]: (row["kind"], row["num_steps"], row["latest"]) for row in told["runs"]} == {
        "a": ("run", 3, 3),
        "bare.tar": ("archive", 0, None),
        "sweep/b": ("run", 2, 2),
        "sweep/deep/c": ("run", 1, 1),
        "sweep/old.pt": ("torch", 0, None),
        "sweep/weights": ("publication", 1, 1),
    }
    assert told["runs"][1]["num_bytes"] == (folder / "bare.tar").stat().st_size
    assert told["not_looked_into"] == []


def test_ls_ends_with_what_it_has_not_looked_into(folder):
    shutil.move(folder / "a", folder / "1/2/3/4/5/a")
    assert documented("ls", folder)["not_looked_into"] == ["1/2/3/4"]
    assert run_command("ls", folder).stdout.splitlines()[-1].startswith("not looked into: 1/2/3/4;")


def test_ls_ranks_runs_by_their_best_values(folder):
    def ranked(best: str) -> list[tuple[str, list[float]]]:
        return [(row["name"], row["best"]) for row in documented("ls", folder, "--best", best)["runs"]]

    assert ranked("loss") == [("sweep/b", [0.25, 2]), ("a", [1.0, 2]), ("sweep/deep/c", [4.0, 1])]
    assert ranked("loss:max") == [("sweep/deep/c", [4.0, 1]), ("a", [3.0, 1]), ("sweep/b", [0.5, 1])]
    assert "loss  at step" in run_command("ls", folder, "--best", "loss").stdout
    assert "'accuracy'" in run_command("ls", folder, "--best", "accuracy").stderr


def test_ls_of_a_folder_names_the_broken_steps_of_each_run(folder):
    (archive,) = (folder / "a/step_00000002").glob("*.tar")
    archive.unlink()
    (folder / "sweep/b/step_00000001/manifest.json").write_text("{")

    told = {row["name"]: (row["broken"], row["latest"]) for row in documented("ls", folder)["runs"]}

    assert (told["a"], told["sweep/b"], told["sweep/deep/c"]) == (([2], 3), ([1], 2), ([], 1))
    head, *lines = run_command("ls", folder).stdout.splitlines()
    assert head.split()[-1] == "broken"
    assert [line.split()[-1] for line in lines if line.startswith(("a ", "sweep/b"))] == ["2", "1"]


def test_ls_finds_runs_in_a_store(bucket):
    for name in ("x/a", "x/y/b"):
        with open_run(bucket.place(name)) as ckpt:
            ckpt.save({"w": torch.ones(3)}, 1).result()
    options, keys = store_options(bucket.server.options)
    told = json.loads(run_command("ls", bucket.url("x"), *options, "--json", **keys).stdout)
    assert [(row["name"], row["kind"]) for row in told["runs"]] == [("a", "run"), ("y/b", "run")]
    storage = bucket.place("x/a").storage()
    storage.delete_many(
        [name for name in (f"step_00000001/{one}" for one in storage.names("step_00000001")) if ".tar" in name]
    )
    told = json.loads(run_command("ls", bucket.url("x"), "--check", *options, "--json", **keys).stdout)
    assert [row["broken"] for row in told["runs"]] == [[1], []]


def test_verify_goes_on_behind_damage_and_ends_with_the_gravest_status(folder):
    (archive,) = (folder / "a/step_00000002").glob("*.tar")
    flip(archive, archive.stat().st_size // 2)

    ended = run_command("verify", folder, "--json")

    assert ended.returncode == 1
    told = {Path(one["place"]).name: one["sound"] for one in map(json.loads, ended.stdout.splitlines())}
    assert told == {"a": False, "b": True, "c": True, "weights": True, "bare.tar": True, "old.pt": True}
    ended = run_command("verify", folder / "nowhere", folder / "sweep/b")
    assert (ended.returncode, "there is nothing at this path" in ended.stderr) == (1, True)
    assert "sound" in ended.stdout


def test_a_broken_link_in_a_folder_keeps_no_run_from_being_found(folder: Path) -> None:
    (folder / "gone").symlink_to(folder / "nowhere")
    (folder / "loop").symlink_to("loop")
    told = documented("ls", folder)
    assert "a" in [row["name"] for row in told["runs"]]
    assert told["not_looked_into"] == ["gone", "loop"]
    ended = run_command("verify", folder)
    assert ended.returncode == 0, ended.stderr
    assert "a: 3 steps" in ended.stdout
    assert "not looked into: gone, loop" in ended.stderr


def test_cp_keeps_the_names_of_runs_below_the_destination(folder, tmp_path):
    assert run_command("cp", folder, tmp_path / "copy", "--latest").returncode == 0
    assert [row["name"] for row in documented("ls", tmp_path / "copy")["runs"]] == ["a", "sweep/b", "sweep/deep/c"]
    assert run_command("cp", folder / "a", folder / "sweep/b", tmp_path / "two").returncode == 0
    assert [row["name"] for row in documented("ls", tmp_path / "two")["runs"]] == ["a", "b"]


def test_a_run_that_lies_too_deep_is_not_denied(folder, tmp_path):
    (tmp_path / "x/1/2/3/4").mkdir(parents=True)
    shutil.copytree(folder / "a", tmp_path / "x/1/2/3/4/a")

    ended = run_command("ls", tmp_path / "x")

    assert (ended.returncode, "nothing was found down to 4 levels; name a folder below 1/2/3/4" in ended.stderr) == (
        2,
        True,
    )


def test_prune_has_its_rules_for_each_run(folder):
    ended = run_command("prune", folder, "--keep", "last=1", "--yes")
    assert (ended.returncode, ended.stdout.splitlines()[0].startswith(f"{folder}/")) == (0, True)
    assert [(row["name"], row["latest"]) for row in documented("ls", folder)["runs"] if row["num_steps"] == 1] == [
        ("a", 3), ("sweep/b", 2), ("sweep/deep/c", 1), ("sweep/weights", 1),
    ]  # fmt: skip


def test_watch_has_a_line_for_each_run_and_knows_those_that_have_ended(folder):
    ended = run_command("watch", folder, "--once")

    assert ended.returncode == 0, ended.stdout
    lines = [line.split() for line in ended.stdout.splitlines()]
    assert [(line[0].removeprefix(f"{folder}/"), line[-1]) for line in lines[1:]] == [
        ("a", "ended"), ("sweep/b", "ended"), ("sweep/deep/c", "ended"),
    ]  # fmt: skip
    told = [*map(json.loads, run_command("watch", folder, "--once", "--json").stdout.splitlines())]
    assert [one["ended"] is not None for one in told] == [True] * 3


def test_a_run_that_goes_on_has_not_ended_and_may_be_too_old(tmp_path):
    saved(tmp_path, [1.0])
    assert "ended" in run_command("watch", tmp_path, "--once", "--older", "0s").stdout
    log = EventLog(LocalStorage(tmp_path), timing.wall_time)
    log.note("restore", 1)
    log.write()

    ended = run_command("watch", tmp_path, "--once", "--older", "0s")

    assert (ended.returncode, "--older allows 0 s" in ended.stdout) == (1, True)
    assert run_command("watch", tmp_path, "--once", "--older", "1h").returncode == 0
    assert "90s, 20min, 2h or 1d" in run_command("watch", tmp_path, "--older", "soon").stderr


def test_a_pipe_gets_whole_lines_with_the_reason_before_the_path(tmp_path):
    saved(tmp_path, [1.0])
    path = "/a" * 200
    log = EventLog(LocalStorage(tmp_path), timing.wall_time)
    log.note("failed", 2, error="StorageFullError", message=f"{path}: 4 bytes needed, 1 free")
    log.write()

    (warning,) = [line for line in run_command("watch", tmp_path, "--once").stdout.splitlines() if line.startswith("!")]

    assert warning.endswith(f"StorageFullError: 4 bytes needed, 1 free ({path})")


def test_a_folder_without_runs_is_said_to_have_none(tmp_path):
    torch.save({"w": torch.ones(3)}, tmp_path / "old.pt")
    for word in ("watch", "page", "prune"):
        ended = run_command(word, tmp_path, *(("--keep", "last=1", "--yes") if word == "prune" else ()))
        assert (ended.returncode, "there is no run in it" in ended.stderr) == (2, True)


def test_load_of_a_folder_above_runs_names_them_and_not_the_file_beside_them(folder):
    async_ckpt.save({"w": torch.ones(3)}, folder / "x.pt").result()
    with pytest.raises(async_ckpt.NotCommittedError, match=f"name one of them: {folder}/a, {folder}/sweep$"):
        async_ckpt.load(folder)


def test_convert_to_a_folder_that_is_there_says_so_before_it_looks_at_the_source(folder):
    async_ckpt.save({"w": torch.ones(3), "note": "no tensor"}, folder / "x.tar").result()
    ended = run_command("convert", folder / "x.tar", folder / "a")
    assert (ended.returncode, f"{folder}/a already exists" in ended.stderr) == (1, True)
