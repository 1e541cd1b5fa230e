"""`async-ckpt verify`: what is damaged, what that costs, and the command that mends it."""

import json
import os
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import documented, in_terminal, run_command, store_options
from exported import gpt2
from published import Line, flip
from rank_archives import commit, write_all
from states import open_run

import async_ckpt
from async_ckpt import CorruptCheckpointError, NotCommittedError
from async_ckpt.core.loading import verify as verification

BASE = {"w": torch.arange(3e6)}

# Two ranks publish three versions of one model, of which the second and the third are deltas.
PUBLISH = """
import async_ckpt
model = fsdp()["model"]
with async_ckpt.Publisher({out!r}) as publisher:
    for version in (1, 2, 3):
        with torch.no_grad():
            next(model.parameters()).to_local().add_(1)
        publisher.publish(model, version).result()
        here.meet(f"published{{version}}")
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Three steps; the second and the third borrow a group from the first."""
    with open_run(tmp_path / "run") as ckpt:
        for step in (1, 2, 3):
            ckpt.save({"base": BASE, "head": torch.full((3_000_000,), float(step))}, step, unchanged="base").result()
    return tmp_path / "run"


def archive_of(root: Path, step: int) -> Path:
    (archive,) = (root / f"step_{step:08d}").glob("*.tar")
    return archive


def mend(fault: dict[str, Any], **places: Path) -> None:
    """Run the command that a fault names."""
    command = fault["mend"].partition(", where")[0]
    for name, place in places.items():
        command = command.replace(name, str(place))
    program, *arguments = shlex.split(command)
    assert program == "async-ckpt"
    ended = run_command(*arguments)
    assert ended.returncode == 0, ended.stderr


def test_a_sound_run_is_one_sentence(root):
    ended = run_command("verify", root)
    assert ended.returncode == 0
    assert ended.stdout.startswith(f"{root}: 3 steps, 1 to 3, sound; ")
    assert len(ended.stdout.splitlines()) == 1
    told = documented("verify", root)
    assert (told["sound"], told["steps"], told["faults"]) == (True, [1, 2, 3], [])
    assert told["num_bytes"] == sum(path.stat().st_size for path in root.glob("step_*/*.tar"))


def _broken_by_faces(root: Path) -> dict[str, set[int]]:
    """The steps that each face of a run calls broken. Of `watch`, only the newest step is known."""
    page = root.parent / "page.html"
    assert run_command("page", root, "-o", page, "--overwrite").returncode == 0
    (fact,) = re.findall(r"<dt>broken</dt><dd>(.*?)</dd>", page.read_text())
    numbers = [int(one) for one in re.findall(r"\d+", fact.partition(":")[2])]
    listed = json.loads(run_command("ls", root, "--check", "--json").stdout)["steps"]
    watched = json.loads(run_command("watch", root, "--once", "--json").stdout)["warnings"]
    repaired = json.loads(run_command("repair", root, "--json").stdout)["damages"]
    pruned = json.loads(run_command("prune", root, "--keep", "last=1", "--dry-run", "--json").stdout)
    return {
        "ls": {row["step"] for row in listed if any(mark.startswith("broken: ") for mark in row["marks"])},
        "verify": {*json.loads(run_command("verify", root, "--json").stdout)["damaged"]},
        "watch": {int(one) for text in watched for one in re.findall(r"step (\d+) is broken", text)},
        "page": {*numbers},
        "repair": {int(one["subject"][5:]) for one in repaired if one["subject"].startswith("step ")},
        "prune": {*pruned["broken"]},
    }


def _loseable(root: Path) -> dict[str, Callable[[], object]]:
    lender, second = root / "step_00000001", root / "step_00000002"
    return {
        "nothing": lambda: None,
        "the folder of the lender": lambda: shutil.rmtree(lender),
        "the archive of the lender": archive_of(root, 1).unlink,
        "the manifest of the lender": (lender / "manifest.json").unlink,
        "a part of the lender's archive": lambda: os.truncate(archive_of(root, 1), 4096),
        "the archive of a borrower": archive_of(root, 2).unlink,
        "the folder of a borrower": lambda: shutil.rmtree(second),
    }


@pytest.mark.parametrize(
    ("lost", "broken"),
    [
        ("nothing", set()),
        ("the folder of the lender", {2, 3}),
        ("the archive of the lender", {1, 2, 3}),
        ("the manifest of the lender", set()),
        ("a part of the lender's archive", {1, 2, 3}),
        ("the archive of a borrower", {2}),
        ("the folder of a borrower", set()),
    ],
)
def test_all_faces_call_the_same_steps_broken(root, lost, broken):
    _loseable(root)[lost]()
    for face, found in _broken_by_faces(root).items():
        assert found == (broken & {3} if face == "watch" else broken), face
    for step in {1, 2, 3} - {int(path.name[5:]) for path in root.glob("step_*") if (path / "manifest.json").exists()}:
        assert step not in broken
    for step in broken:
        with pytest.raises(CorruptCheckpointError):
            async_ckpt.load(root / f"step_{step:08d}")


def test_a_step_of_ranks_is_broken_where_one_archive_of_them_or_of_the_lender_is_gone(tmp_path):
    def build(rank: int) -> dict[str, Any]:
        return {"m": {"w": torch.full((1000,), float(rank))}, "own": torch.full((3,), float(rank))}

    for lost in (0, 1):
        root = tmp_path / str(lost)
        paths = write_all(root / "step_00000001", 2, build, shared=False, per_rank=("m", "own"))
        commit(paths, per_rank=("m", "own"))
        assert not [
            one for row in documented("ls", root, "--check")["steps"] for one in row["marks"] if "broken" in one
        ]
        paths[lost].unlink()
        (row,) = documented("ls", root, "--check")["steps"]
        assert f"broken: {paths[lost].name} is missing" in row["marks"]
        assert documented("verify", root, status=1)["damaged"] == [1]


def test_a_borrowed_archive_that_is_gone_from_a_bucket_is_found(bucket):
    base = {"w": torch.ones(9)}
    with async_ckpt.AsyncCheckpointer(bucket.place("run")) as ckpt:
        for step in (1, 2):
            ckpt.save({"base": base, "n": torch.ones(step)}, step, unchanged="base").result()
    store, keys = store_options(bucket.server.options)
    place = bucket.place("run").storage()
    place.delete_all("step_00000001")
    for words, status in ((("ls", "--check"), 0), (("watch", "--once"), 1), (("repair",), 1), (("verify",), 1)):
        ended = run_command(words[0], bucket.url("run"), *words[1:], *store, **keys)
        assert ended.returncode == status, ended
        assert "step_00000001/rank_00000" in ended.stdout
        assert words[0] == "watch" or "is missing" in ended.stdout  # whose lines are as wide as the terminal


def test_a_damaged_archive_is_named_with_its_tensors_and_mended_by_the_command_it_names(root, tmp_path):
    copy = Path(shutil.copytree(root, tmp_path / "copy"))
    flip(archive_of(root, 3), 6_000_000)

    told = documented("verify", root, status=1)

    assert (told["sound"], told["steps"], told["damaged"]) == (False, [1, 2], [3])
    (fault,) = told["faults"]
    assert (fault["subject"], fault["tensors"], fault["cost"]) == ("step 3", ["head"], "head of step 3")
    assert told["notes"] == ["the newest sound step is 2"]
    mend(fault, OTHER_ROOT=copy)
    assert documented("verify", root)["steps"] == [1, 2, 3]
    assert {path.name for path in root.rglob("*")} == {path.name for path in copy.rglob("*")}


def test_what_borrowers_lose_is_said_and_the_lender_is_what_is_mended(root, tmp_path):
    copy = Path(shutil.copytree(root, tmp_path / "copy"))
    flip(archive_of(root, 1), 18_000_000)

    faults = documented("verify", root, status=1)["faults"]

    assert [fault["subject"] for fault in faults] == ["step 1", "step 2", "step 3"]
    assert faults[2]["cost"] == "base.w of step 3, which borrows from step 1"
    assert len({fault["mend"] for fault in faults}) == 1
    mend(faults[2], OTHER_ROOT=copy)
    assert documented("verify", root)["sound"]


def test_a_lender_that_is_gone_is_brought_back_with_its_borrower(root, tmp_path):
    copy = Path(shutil.copytree(root, tmp_path / "copy"))
    shutil.rmtree(root / "step_00000001")

    faults = documented("verify", root, status=1)["faults"]

    assert [fault["subject"] for fault in faults if fault["tensors"] or "step" in fault["subject"]][:1] == ["step 2"]
    for fault in faults:
        mend(fault, OTHER_ROOT=copy)
    assert documented("verify", root)["steps"] == [1, 2, 3]


def test_a_damaged_manifest_is_copied_again(root, tmp_path):
    copy = Path(shutil.copytree(root, tmp_path / "copy"))
    flip(root / "step_00000002/manifest.json", 200)

    faults = documented("verify", root, status=1)["faults"]

    assert "manifest.json" in faults[0]["text"]
    assert faults[0]["cost"] == "everything of step 2"
    for fault in faults:
        mend(fault, OTHER_ROOT=copy)
    assert documented("verify", root)["steps"] == [1, 2, 3]


def test_trackers_and_journals_are_compared_with_the_manifests(root):
    (root / "latest").write_text("step_00000002\n")
    journal = root / "checkpoints.jsonl"
    journal.write_text("")

    told = documented("verify", root, status=1)

    assert (told["steps"], told["damaged"]) == ([1, 2, 3], [])
    assert {fault["subject"] for fault in told["faults"]} == {"latest", journal.name}
    mend(told["faults"][0])
    assert documented("verify", root)["sound"]


def test_a_tracker_that_moves_on_meanwhile_is_no_fault(root, monkeypatch):
    (root / "latest").write_text("step_00000002\n")
    read = verification.checks_of_run

    def read_and_commit(*arguments: Any) -> Any:
        yield from read(*arguments)
        (root / "latest").write_text("step_00000003\n")

    monkeypatch.setattr(verification, "checks_of_run", read_and_commit)
    assert documented("verify", root)["sound"]


def test_the_folder_of_a_step_and_an_archive_alone(root):
    assert documented("verify", root / "step_00000002")["steps"] == [2]
    assert documented("verify", archive_of(root, 2))["num_archives"] == 1
    flip(archive_of(root, 2), 6_000_000)
    (fault,) = documented("verify", root / "step_00000002", status=1)["faults"]
    assert fault["tensors"] == ["head"]
    (fault,) = documented("verify", archive_of(root, 2), status=1)["faults"]
    assert (fault["subject"], fault["cost"]) == (str(archive_of(root, 2)), "head")


@pytest.mark.parametrize("size", [1, 4])
def test_every_tensor_of_every_rank_that_is_damaged_is_named(tmp_path, size):
    folder = tmp_path / "step_00000001"
    folder.mkdir()
    commit(
        write_all(folder, size, lambda rank: {f"w{rank}": torch.arange(3e6), "own": rank}, per_rank=("own",)),
        per_rank=("own",),
    )
    for archive in folder.glob("*.tar"):
        flip(archive, 6_000_000)
    told = documented("verify", folder, status=1)
    assert told["tensors"] == sorted(told["tensors"])
    assert len(told["tensors"]) == size
    assert told["num_archives"] == size


def test_a_delta_is_compared_with_its_base_and_what_follows_is_lost(tmp_path):
    with Line(tmp_path / "v", gpt2(), anchor_every=3) as line:
        line.publish(1, 2, 3, 4)
    assert documented("verify", tmp_path / "v")["versions"] == [1, 2, 3, 4]
    (delta,) = (tmp_path / "v/weight_v000002").glob("*.safetensors")
    flip(delta, delta.stat().st_size // 2)

    told = documented("verify", tmp_path / "v", status=1)

    assert (told["versions"], told["damaged"]) == ([1, 4], [2, 3])
    assert "a delta against version 2, which is damaged" in told["faults"][1]["text"]
    assert told["faults"][0]["mend"] == "pull version 4, which is an anchor, or a later one"


def test_versions_of_ranks_are_listed_and_verified(worlds, tmp_path):
    out = tmp_path / "out"
    worlds.run(2, PUBLISH.format(out=str(out)))

    rows = documented("ls", out)["versions"]
    assert [(row["version"], row["kind"], row["num_ranks"], row["num_complete"]) for row in rows] == [
        (1, "anchor", 2, 2), (2, "delta", 2, 2), (3, "delta", 2, 2),
    ]  # fmt: skip
    assert documented("verify", out)["versions"] == [1, 2, 3]
    flip(out / "rank_00001_of_00002/weight_v000003/model-00001.safetensors", 50)
    (fault,) = documented("verify", out, status=1)["faults"]
    assert fault["subject"] == "version 3 in rank_00001_of_00002"
    shutil.rmtree(out / "rank_00001_of_00002/weight_v000003")
    told = documented("verify", out)
    assert (told["versions"], told["damaged"]) == ([1, 2], [])  # the third does not exist for any reader
    assert told["notes"] == ["not all ranks have published version 3"]
    assert async_ckpt.verify(out).versions == (1, 2)
    assert [row["num_complete"] for row in documented("ls", out)["versions"]] == [2, 2, 1]
    assert "1 of 2" in run_command("ls", out).stdout
    shutil.rmtree(out / "rank_00001_of_00002")
    with pytest.raises(NotCommittedError, match="no version there is sound"):
        async_ckpt.verify(out)
    ended = run_command("verify", out)
    assert ended.returncode != 0
    assert "no version there is sound" in ended.stdout + ended.stderr


def test_a_run_with_versions_beside_it(root):
    with async_ckpt.Publisher(root) as publisher:
        publisher.publish({"w": torch.ones(3)}, 1).result()
    told = documented("verify", root)
    assert (told["steps"], told["versions"]) == ([1, 2, 3], [1])
    flip(archive_of(root, 2), 6_000_000)
    told = documented("verify", root, status=1)
    assert (told["steps"], told["damaged"]) == ([1, 3], [2])
    assert (told["versions"], told["damaged_versions"]) == ([1], [])
    lines = run_command("verify", root).stdout.splitlines()
    assert [line.partition("; ")[0] for line in lines[-2:]] == [
        f"{root}: 3 steps, 1 to 3, 1 damaged", f"{root}: version 1, sound"
    ]  # fmt: skip


def test_a_terminal_is_shown_a_bar(tmp_path):
    with open_run(tmp_path / "run") as ckpt:
        ckpt.save({"w": torch.zeros(60_000_000)}, 1).result()
    assert b"verify \x1b" in in_terminal("verify", tmp_path / "run")


def test_a_file_of_another_program_is_not_called_damaged(tmp_path):
    (tmp_path / "file").write_text("no archive")
    ended = run_command("verify", tmp_path / "file")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "file: this file was not written by async_ckpt, and has no checksums to verify" in ended.stderr

    torch.save({"w": torch.arange(9000.0)}, tmp_path / "x.pt")
    told = documented("verify", tmp_path / "x.pt")
    assert (told["sound"], told["faults"], told["num_archives"]) == (True, [], 1)
    assert "checked by the CRC-32" in told["notes"][0]
    flip(tmp_path / "x.pt", 9000)
    (fault,) = documented("verify", tmp_path / "x.pt", status=1)["faults"]
    assert "does not match its checksum" in fault["text"]


def test_a_file_that_is_no_archive_is_not_sound(tmp_path):
    (tmp_path / "file").write_bytes(bytes(5000))
    ended = run_command("verify", tmp_path / "file")
    assert ended.returncode == 1
    assert f"{tmp_path}/file: " in ended.stdout
    assert ": one archive, damaged; " in ended.stdout.splitlines()[-1]
