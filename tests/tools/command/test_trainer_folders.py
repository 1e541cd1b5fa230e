"""The command on what frameworks' trainers have written: by witnesses of each, and by real trainings with a history."""

import json
import os
import random
import shutil
import signal
import tarfile
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

WITNESSES = Path(__file__).parents[2] / "witnesses"
# The folder of the trainer in each witness, whose it is, and its checkpoints by their steps.
TRAINERS = {
    "transformers_own": ("", "Transformers", {4: "checkpoint-4"}),
    "transformers_archive": ("", "Transformers", {4: "checkpoint-4"}),
    "lightning": ("", "Lightning", {4: "epoch=0-step=4.ckpt", 8: "epoch=1-step=8.ckpt"}),
    "deepspeed_own_2": ("run", "DeepSpeed", {2: "global_step2", 4: "global_step4"}),
    "verl_one": ("run", "verl", {2: "global_step_2", 4: "global_step_4"}),
    "verl_fsdp2": ("run", "verl", {2: "global_step_2", 4: "global_step_4"}),
    "skyrl_trainer": ("run", "SkyRL", {3: "global_step_3", 4: "global_step_4"}),
}


def witness(name: str, to: Path) -> Path:
    with tarfile.open(WITNESSES / f"{name}.tar.gz") as file:
        file.extractall(to / name, filter="data")
    return to / name / TRAINERS[name][0] if name in TRAINERS else to / name


@pytest.mark.parametrize("name", TRAINERS)
def test_each_word_works_on_the_folder_of_a_framework(name, tmp_path):
    folder = witness(name, tmp_path)
    _, framework, steps = TRAINERS[name]

    assert {row["step"]: row["folder"] for row in documented("ls", folder)["steps"]} == steps
    (row,) = documented("ls", tmp_path)["runs"]
    assert (row["kind"], row["num_steps"], row["latest"]) == (framework, len(steps), max(steps))
    told = documented("verify", folder)
    assert (told["steps"], told["faults"]) == (sorted(steps), [])
    assert documented("watch", folder, "--once")["step"] == max(steps)
    told = documented("cp", f"{folder}@latest", tmp_path / "copy")["steps"]
    assert [(row["name"], row["outcome"]) for row in told] == [(steps[max(steps)], "copied")]
    assert documented("verify", tmp_path / "copy")["steps"] == [max(steps)]
    told = documented("prune", folder, "--keep", "last=1", "--yes", "--unattended")["steps"]
    assert {row["step"] for row in told if not row["deleted"]} == {max(steps)}
    assert [row["step"] for row in documented("ls", folder)["steps"]] == [max(steps)]
    assert not [path for path in folder.iterdir() if path.name.startswith(".")]


def test_damage_in_a_checkpoint_is_found_by_what_its_files_have(tmp_path):
    damaged = (
        ("transformers_own", "checkpoint-4/optimizer.pt", 4),
        ("verl_fsdp2", "global_step_2/actor/training.tar", 2),
    )
    for name, file, step in damaged:
        folder = witness(name, tmp_path)
        path = next((folder / file).glob("*.tar"), folder / file)
        flip(path, path.stat().st_size // 2)

        told = documented("verify", folder, status=1)

        assert told["damaged"] == [step]
        assert file in told["faults"][0]["subject"]
        assert any("safetensors file has no digests" in note for note in told["notes"])


def test_a_copy_is_a_checkpoint_once_it_is_whole_and_another_one_is_not_replaced(tmp_path):
    folder, target = witness("verl_one", tmp_path), tmp_path / "copy"

    def outcomes(*more: str) -> dict[int, str]:
        return {row["step"]: row["outcome"] for row in documented("cp", folder, target, *more)["steps"]}

    assert outcomes() == {2: "copied", 4: "copied"}
    assert (target / "latest_checkpointed_iteration.txt").read_text() == "4"
    assert outcomes() == {2: "was there", 4: "was there"}
    (target / "global_step_2/data.pt").write_bytes(b"of another training")
    ended = run_command("cp", folder, target)
    assert (ended.returncode, "global_step_2 has other files there" in ended.stderr) == (1, True)
    assert outcomes("--steps", "2", "--overwrite") == {2: "replaced"}
    assert (target / "global_step_2/data.pt").read_bytes() == (folder / "global_step_2/data.pt").read_bytes()


@pytest.mark.parametrize("words", [("ls",), ("watch", "--once")])
def test_one_checkpoint_is_no_run_and_what_shows_it_is_said(words, tmp_path):
    ended = run_command(*words, witness("transformers_own", tmp_path) / "checkpoint-4")
    assert (ended.returncode, "is one checkpoint: name the folder above it" in ended.stderr) == (2, True)


def copy_of(second: Path, target: Path) -> None:
    """A copy by a training whose history says that both were saved at one step."""
    shutil.copyfile(target, second)
    log = EventLog(LocalStorage(target.parent), timing.wall_time)
    for name in (target.name, second.name):
        log.note("save", 8, name=name, record={"loss": 0.5})
    log.note("closed", None)
    log.write()


@pytest.mark.parametrize("made", [Path.symlink_to, Path.hardlink_to, copy_of])
def test_a_second_name_of_a_checkpoint_is_counted_by_no_word_and_copied(made, tmp_path):
    folder = witness("lightning", tmp_path)
    target = folder / "epoch=1-step=8.ckpt"
    made(folder / "last.ckpt", target)

    rows = documented("ls", folder)["steps"]
    assert [(row["step"], "also last.ckpt" in row["marks"]) for row in rows] == [(4, False), (8, True)]
    assert documented("ls", tmp_path)["runs"][0]["num_steps"] == 2
    assert documented("verify", folder)["steps"] == [4, 8]
    status = documented("watch", folder, "--once")
    steps = [one["step"] for one in status["saves"]]
    assert (status["step"], len(steps)) == (8, len({*steps}))
    if made is copy_of:
        (run,) = documented("page", folder, "-o", tmp_path / "page.html")["runs"]
        assert run["num_saves"] == len(steps)
    documented("cp", folder, tmp_path / "copy")
    assert (tmp_path / "copy/last.ckpt").read_bytes() == target.read_bytes()
    documented("cp", folder / "last.ckpt", tmp_path / "one")
    assert [path.name for path in (tmp_path / "one").iterdir()] == ["last.ckpt"]
    documented("prune", folder, "--keep", "every=5", "--yes", "--unattended")
    assert {path.name for path in folder.iterdir()} >= {target.name, "last.ckpt"}


def test_the_checkpoints_of_two_trainings_are_not_mixed(tmp_path):
    def trained(name: str, *steps: int) -> Path:
        for step in steps:
            (tmp_path / name / f"checkpoint-{step}").mkdir(parents=True)
            (tmp_path / name / f"checkpoint-{step}/trainer_state.json").write_text(json.dumps({"of": name}))
        return tmp_path / name

    def with_history(folder: Path, *steps: int) -> Path:
        log = EventLog(LocalStorage(folder), timing.wall_time)
        for step in steps:
            log.note("save", step, name=f"checkpoint-{step}")
        log.write()
        return folder

    def copied(source: Path, target: Path) -> tuple[int, str]:
        ended = run_command("cp", source, target)
        return ended.returncode, ended.stderr

    a, b, other = trained("a", 2, 4), trained("b", 2), trained("c", 6)
    assert copied(a, tmp_path / "copy") == (0, "")
    status, text = copied(other, tmp_path / "copy")
    assert (status, "has checkpoints of another training, such as checkpoint-2" in text) == (1, True)
    status, text = copied(b, tmp_path / "copy")
    assert (status, "checkpoint-2 has other files there" in text) == (1, True)
    # The checkpoints that the copy has are gone at the source, but its history tells of them.
    assert copied(with_history(other, 2, 4, 6), tmp_path / "copy") == (0, "")
    assert copied(with_history(trained("d", 8), 2, 4, 8), tmp_path / "copy")[0] == 1
    with open_run(tmp_path / "run") as ckpt:
        ckpt.save({"w": torch.ones(1)}, 2).result()
    for source, target in (("run", "copy"), ("a", "run")):
        status, text = copied(tmp_path / source, tmp_path / target)
        assert (status, f"{target} has checkpoints of another training" in text) == (1, True)


def test_convert_names_what_it_leaves_out_of_a_checkpoint(tmp_path):
    told = {
        name: run_command("convert", witness(name, tmp_path) / "checkpoint-4", tmp_path / f"{name}.safetensors").stderr
        for name in ("transformers_own", "transformers_archive")
    }

    assert told == {
        "transformers_own": "note: these files were not converted: optimizer.pt, rng_state.pth, scheduler.pt, "
        "trainer_state.json\n",
        "transformers_archive": "note: these files were not converted: trainer_state.json, training.tar\n",
    }


def test_checkpoints_go_to_a_store_and_come_back(bucket, tmp_path):
    folder = witness("transformers_own", tmp_path)
    options, keys = store_options(bucket.server.options)
    url = bucket.url("trainer")
    for_target = [f"--dst-{one[2:]}" if one.startswith("--") else one for one in options]
    assert run_command("cp", folder, url, *for_target, **keys).returncode == 0
    told = json.loads(run_command("ls", url, *options, "--json", **keys).stdout)
    assert [row["folder"] for row in told["steps"]] == ["checkpoint-4"]
    assert run_command("cp", f"{url}@latest", tmp_path / "back", *options, **keys).returncode == 0
    for path in (folder / "checkpoint-4").iterdir():
        assert (tmp_path / "back/checkpoint-4" / path.name).read_bytes() == path.read_bytes()
    pruned = run_command("prune", url, "--keep", "every=3", "--yes", "--unattended", *options, **keys)
    assert (pruned.returncode, "0 of 1" in pruned.stdout) == (0, True)  # the newest stays


def test_the_best_one_and_the_trackers_stay(tmp_path):
    for step in (2, 4, 6):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        state = {"best_model_checkpoint": "elsewhere/checkpoint-2"}
        (folder / "trainer_state.json").write_text(json.dumps(state))

    told = documented("prune", tmp_path, "--keep", "last=1", "--yes", "--unattended")["steps"]

    assert {row["step"]: row["deleted"] for row in told} == {2: False, 4: True, 6: False}


def test_a_folder_of_which_nothing_says_that_its_training_has_ended_is_pruned_unattended_alone(tmp_path):
    folder = witness("deepspeed_own_2", tmp_path)
    ended = run_command("prune", folder, "--keep", "last=1", "--yes")
    assert (ended.returncode, ended.stdout, "--unattended" in ended.stderr) == (1, "", True)
    assert run_command("prune", folder, "--keep", "last=1", "--dry-run").returncode == 0
    log = EventLog(LocalStorage(folder), timing.wall_time)
    log.note("closed", None)
    log.write()
    assert run_command("prune", folder, "--keep", "last=1", "--yes").returncode == 0
    assert async_ckpt.history(folder)[-1]["deleted"] == [2]


def test_a_folder_that_a_living_trainer_has_locked_is_not_pruned(tmp_path, nursery):
    folder = witness("lightning", tmp_path)
    child = nursery.start(
        """
        import sys, time
        from pathlib import Path
        from async_ckpt.integrations.common.folders import FolderHold
        with FolderHold(Path(sys.argv[1])):
            print("held", flush=True)
            time.sleep(60)
        """,
        folder,
    )
    child.wait_for_line("held")
    ended = run_command("prune", folder, "--keep", "last=1", "--yes", "--unattended")
    assert (ended.returncode, "a living trainer" in ended.stderr) == (1, True)
    child.send(signal.SIGKILL)
    child.ended()
    assert run_command("prune", folder, "--keep", "last=1", "--yes").returncode == 0


# --- histories ----------------------------------------------------------------------------------------------------


def test_a_training_by_transformers_has_a_history_that_all_words_show(tmp_path):
    pytest.importorskip("transformers")
    from trainers import Files, trainer_of

    trainer = trainer_of(Files, tmp_path / "run", save_total_limit=2, save_steps=2, logging_steps=2)
    trainer.train()

    events = async_ckpt.history(tmp_path / "run")
    saves = [one for one in events if one["kind"] == "save"]
    assert [(one["step"], one["name"], one["kept"]) for one in saves] == [
        (step, f"checkpoint-{step}", step > 4) for step in (2, 4, 6, 8)
    ]
    assert events[-1]["kind"] == "closed"
    losses = {row["step"]: row["loss"] for row in trainer.state.log_history if "loss" in row}
    assert [one["record"]["loss"] for one in saves] == [losses[step] for step in (2, 4, 6, 8)]
    size = sum(path.stat().st_size for path in (tmp_path / "run/checkpoint-8").rglob("*") if path.is_file())
    newest = documented("ls", tmp_path / "run", "--best", "loss")["steps"][-1]
    assert (newest["step"], newest["num_bytes"], saves[-1]["num_bytes"]) == (8, size, size)
    assert newest["stall_seconds"] == saves[-1]["stall_seconds"] > 0
    assert "ended" in run_command("watch", tmp_path / "run", "--once").stdout
    assert documented("inspect", f"{tmp_path / 'run'}@best:loss")["names"]
    (run,) = documented("page", tmp_path / "run", "-o", tmp_path / "page.html")["runs"]
    assert run["num_saves"] == 4
    assert run_command("prune", tmp_path / "run", "--keep", "last=1", "--yes").returncode == 0


def trained_by_transformers(folder: Path) -> Path:
    from trainers import Files, trainer_of

    trainer_of(Files, folder, max_steps=2, save_steps=2).train()
    return folder / "checkpoint-2"


def trained_by_accelerate(folder: Path) -> Path:
    from accelerated import Training

    training = Training(folder)
    state = training.state("accelerate")
    training.run(save=state.save_state)
    state.wait()
    return max((folder / "checkpoints").iterdir())


@pytest.mark.parametrize("trained", [trained_by_transformers, trained_by_accelerate])
def test_any_flipped_bit_in_a_file_of_the_framework_is_found_and_a_lost_file(trained, tmp_path):
    pytest.importorskip("transformers")
    checkpoint = trained(tmp_path / "run")
    copy = tmp_path / "copy" / checkpoint.name
    shutil.copytree(checkpoint, copy)
    told = documented("verify", copy.parent)
    assert (told["faults"], [note for note in told["notes"] if "no checksums" in note]) == ([], [])
    assert any("digests that were saved beside them" in note for note in told["notes"])

    chosen = random.Random(checkpoint.name)
    for path in sorted(path for path in copy.rglob("*") if path.is_file()):
        whole, is_list = path.read_bytes(), path.name.startswith("_")
        position = chosen.randrange(8 * len(whole))
        flip(path, position // 8, 1 << position % 8)
        faults = documented("verify", copy.parent, status=1)["faults"]
        assert is_list or [Path(fault["subject"]) for fault in faults] == [path]
        if not is_list:
            path.unlink()
            (fault,) = documented("verify", copy.parent, status=1)["faults"]
            assert fault["text"] == "it is missing"
        path.write_bytes(whole)
    assert documented("verify", copy.parent)["faults"] == []


def test_a_save_that_fails_is_in_the_history_of_the_trainer(tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    from trainers import Files, trainer_of

    (tmp_path / "run").mkdir()
    (tmp_path / "run/checkpoint-2").write_text("a file in the way")
    with pytest.raises(async_ckpt.CheckpointError):
        trainer_of(Files, tmp_path / "run", save_steps=2).train()

    kinds = [one["kind"] for one in async_ckpt.history(tmp_path / "run")]
    assert kinds == ["failed", "closed"]


def test_a_training_by_lightning_has_a_history_with_what_it_monitors(tmp_path):
    pytest.importorskip("pytorch_lightning")
    from lightning_runs import NAMES, batches, kit_of, quiet, trainer_of

    from async_ckpt.integrations.lightning import AsyncTarCheckpointIO

    kit = kit_of(NAMES[0])
    callback = kit.ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=2, save_top_k=-1, monitor="step")
    with quiet():
        trainer_of(kit, tmp_path, AsyncTarCheckpointIO(), callback, max_steps=4).fit(kit.Model(), batches())

    saves = [one for one in async_ckpt.history(tmp_path) if one["kind"] == "save"]

    assert [(one["step"], one["name"], one["kept"]) for one in saves] == [
        (2, "step=2.ckpt", True),
        (4, "step=4.ckpt", True),
    ]
    assert [one["record"]["step"] for one in saves] == [2, 4]


def test_a_training_by_accelerate_has_its_history_where_accelerate_does_not_look(tmp_path):
    pytest.importorskip("accelerate")
    from accelerated import Training

    training = Training(tmp_path)
    state = training.state("archive")
    training.run(save=state.save_state)
    state.wait()

    folder = tmp_path / "checkpoints"
    assert "history.jsonl" not in os.listdir(folder)
    rows = documented("ls", folder)["steps"]
    assert rows
    assert all(row["stall_seconds"] is not None for row in rows)
    (run,) = documented("page", tmp_path, "-o", tmp_path / "page.html")["runs"]
    assert run["num_saves"] >= len(rows)
    shutil.rmtree(folder / rows[-1]["folder"])
    assert [one["kept"] for one in async_ckpt.history(tmp_path) if one["kind"] == "save"][-1] is False


def test_repair_notes_the_folders_of_trainers_and_says_which_commands_know_them(tmp_path):
    folder = witness("transformers_own", tmp_path)
    with open_run(tmp_path / "run") as ckpt:
        ckpt.save({"w": torch.ones(3)}, 1).result()
    for place, status in ((tmp_path, 0), (folder, 2)):
        ended = run_command("repair", place)
        assert (ended.returncode, "verify, cp or prune, or name" in ended.stderr) == (status, True)
        assert f"such as {folder}/checkpoint-4" in ended.stderr


def test_diff_with_the_folder_of_a_trainer_names_its_checkpoint(tmp_path):
    folder = witness("transformers_own", tmp_path)
    async_ckpt.save({"w": torch.ones(3)}, tmp_path / "a.tar").result()
    ended = run_command("diff", tmp_path / "a.tar", folder)
    assert (ended.returncode, f"name one of them: {folder}/checkpoint-4" in ended.stderr) == (1, True)
