"""The command `async-ckpt` on real runs, piped and in a terminal: what it says, and with which status it ends."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import documented, in_process, in_terminal, run_command, store_options
from exported import gpt2
from published import Line, flip
from rank_archives import commit, write_all
from scripted_disk import scripted
from states import open_run, state_at

import async_ckpt
from async_ckpt.core.runs.naming import naming_of
from async_ckpt.core.storage.local import LocalStorage
from async_ckpt.tools.command.output import print_table
from benchmarks.restarts import step_on_disk

ESCAPES = "red\x1b[31m\nnext"


class Thing:
    """An object that is no plain data."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Step 2 borrows a group of step 1, and has NaN, Inf, an object and a name that a terminal would act upon."""
    root = tmp_path_factory.mktemp("runs") / "a"
    base = {"w": torch.arange(6.0).reshape(2, 3)}
    tied = torch.ones(4)
    with open_run(root) as ckpt:
        ckpt.save({"base": base, "step": 1}, 1, record={"loss": 0.5, "note": ESCAPES}).result()
        state = {
            "base": base,
            "head": {
                "odd": torch.tensor([1.0, float("nan"), float("inf"), 3.0]),
                ESCAPES: tied,
                "tied": tied,
            },
            "step": 2,
            "who": Thing(),
        }
        ckpt.save(state, 2, unchanged="base", record={"loss": 0.25}, rolling=True).result()
    return root


def test_ls_lists_the_steps_of_a_run(root):
    told = documented("ls", root)

    assert (told["version"], told["kind"]) == (1, "steps")
    first, second = told["steps"]
    assert (first["step"], first["record"]["note"], first["marks"]) == (1, ESCAPES, ["lends"])
    assert (second["step"], second["num_ranks"]) == (2, 1)
    assert second["marks"] == ["latest", "rolling", "borrows from 1", "tracker"]
    assert second["num_bytes"] == sum(path.stat().st_size for path in (root / "step_00000002").glob("*.tar"))

    lines = run_command("ls", root).stdout.splitlines()
    assert lines[0].split() == [
        "step",
        "age",
        "size",
        "ranks",
        "durable",
        "in",
        "bandwidth",
        "stall",
        "loss",
        "note",
        "marks",
    ]
    assert len(lines) == 3


def test_ls_lists_the_runs_in_a_folder(root):
    (run,) = documented("ls", root.parent)["runs"]
    assert (run["name"], run["num_steps"], run["latest"]) == ("a", 2, 2)


@pytest.mark.parametrize(
    ("named", "step"), [("@1", 1), ("@latest", 2), ("@best:loss", 2), ("@best:loss:max", 1), ("/@1", 1)]
)
def test_a_step_is_named_by_its_run_and_what_it_is_there(root, named, step):
    assert run_command("inspect", f"{root}{named}", "step").stdout == f"{step}\n"
    assert documented("verify", f"{root}{named}")["steps"] == [step]


@pytest.mark.parametrize(
    ("named", "reason"),
    [
        ("@7", "no committed step in 7; 1 to 2 are committed"),
        ("@best:accuracy", "'accuracy'"),
        ("@best", "loss:min"),
        ("/step_00000001@1", "name the root of its run"),
        ("/nowhere@latest", "there is nothing at this path"),
    ],
)
def test_a_step_that_no_run_has_is_named_with_those_that_there_are(root, named, reason):
    ended = run_command("inspect", f"{root}{named}")
    assert (ended.returncode in (1, 2), reason in ended.stderr) == (True, True), ended.stderr


def test_a_path_that_is_there_is_no_step_of_a_run(root, tmp_path):
    run = Path(shutil.copytree(root, tmp_path / "a"))
    shutil.copytree(root, tmp_path / "a@1")
    assert [row["step"] for row in documented("ls", f"{run}@1")["steps"]] == [1, 2]


def test_a_step_of_a_run_in_a_store_is_named_by_its_number(bucket):
    with open_run(bucket.place("run")) as ckpt:
        ckpt.save({"epoch": 7}, 3).result()
    options, keys = store_options(bucket.server.options)
    for named in ("@3", "@latest"):
        assert run_command("inspect", bucket.url(f"run{named}"), "epoch", *options, **keys).stdout == "7\n"


def test_files_with_numbers_in_their_names_are_no_steps(root, tmp_path):
    copy = Path(shutil.copytree(root, tmp_path / "a"))
    (copy / "events.out.tfevents.1700000000").write_text("of another program")
    (copy / "step_00000009").write_text("a file with the name of a step")
    assert [row["step"] for row in documented("ls", copy)["steps"]] == [1, 2]
    assert documented("repair", copy)["damages"] == []


def test_ls_goes_on_with_the_rest_where_a_manifest_is_damaged(tmp_path):
    with open_run(tmp_path / "run") as ckpt:
        for step in (1, 2):
            ckpt.save({"w": torch.ones(3)}, step).result()
    flip(tmp_path / "run/step_00000001/manifest.json", 200)

    first, second = documented("ls", tmp_path / "run")["steps"]

    assert first["marks"] == ["its manifest is damaged"]
    assert second["marks"] == ["latest", "tracker"]


def test_ls_shows_what_is_not_committed_where_it_is_asked_to(tmp_path):
    with open_run(tmp_path / "run") as ckpt:
        ckpt.save({"w": torch.ones(3)}, 1).result()
    (tmp_path / "run/step_00000002").mkdir()
    (tmp_path / "run/step_00000002/rank_00000.0123abcd.tar").touch()

    assert [row["step"] for row in documented("ls", tmp_path / "run")["steps"]] == [1]
    marks = {row["step"]: row["marks"] for row in documented("ls", tmp_path / "run", "--all")["steps"]}
    assert marks == {1: ["latest", "tracker"], 2: ["not committed"]}


FOREIGN_NAMES = (
    "notes-2.txt",
    "world.98994f8f00112233.json",
    "world.0011223344556677.00001.json",
    "events.out.170",
    "v3",
)


# The namings that have a tracker.
NAMED = (None, "verl", "skyrl", "deepspeed")


@pytest.mark.parametrize("naming", [*NAMED, async_ckpt.Naming("at{:03d}step", None)])
def test_only_names_of_the_run_s_own_naming_are_steps(tmp_path, naming):
    root = tmp_path / "run"
    with async_ckpt.AsyncCheckpointer(root, naming=naming) as ckpt:
        for step in (7, 12_000):
            ckpt.save({"w": torch.ones(3)}, step).result()
        own = (async_ckpt.Naming() if naming is None else naming_of(naming)).step_format
    for name in FOREIGN_NAMES:
        (root / name).write_text("of somebody else")
    (root / "logs_3").mkdir()
    (root / "logs_3" / "out.txt").write_text("of somebody else")
    other = "step_00000044" if naming is not None else "global_step_44"  # of another naming, and not committed
    (root / other).mkdir()
    (root / own.format(13_000)).mkdir()
    (root / own.format(13_000) / "rank_00000.0123abcd.tar").touch()
    (root / own.format(14_000)).mkdir()
    (root / own.format(14_000) / "model.pt").touch()
    (root / own.format(15_000)).mkdir()
    (root / own.format(16_000)).touch()

    rows = documented("ls", root, "--all")["steps"]
    assert [(row["step"], row["folder"]) for row in rows] == [
        (step, own.format(step)) for step in (7, 12_000, 13_000, 14_000, 15_000)
    ]
    newest, *others = (row["marks"] for row in rows[1:])
    assert (newest[0], len(newest)) == ("latest", 2 if naming in NAMED else 1)  # with the tracker, by its name
    assert others == [["not committed"], ["of another program"], ["not committed"]]
    assert [row["step"] for row in documented("ls", root)["steps"]] == [7, 12_000]


def test_a_step_whose_number_has_outgrown_the_zeros_of_its_naming_is_listed_once(tmp_path):
    with async_ckpt.AsyncCheckpointer(tmp_path, naming=async_ckpt.Naming("s{:02d}", None)) as ckpt:
        for step in (9, 10, 100):
            ckpt.save({"w": torch.ones(3)}, step).result()
    assert [row["step"] for row in documented("ls", tmp_path, "--all")["steps"]] == [9, 10, 100]
    assert async_ckpt.verify(tmp_path).steps == (9, 10, 100)


def test_saves_that_have_failed_and_cleaned_up_are_listed_from_the_history(tmp_path):
    for root, committed in ((tmp_path / "a", [1]), (tmp_path / "b", [])):
        with open_run(root) as ckpt:
            for step in committed:
                ckpt.save({"w": torch.ones(3)}, step).result()
            with scripted(ckpt) as disk:
                disk.fail("write", error=async_ckpt.StorageUnavailableError("the disk is away", path=str(root)))
                assert ckpt.save({"w": torch.ones(3)}, 2).exception() is not None
                ckpt.wait()
        assert not (root / "step_00000002").exists()

        rows = documented("ls", root, "--all")["steps"]
        assert [row["step"] for row in rows] == [*committed, 2]
        failed = rows[-1]
        assert failed["marks"] == ["failed: StorageUnavailableError: the disk is away"]
        assert (failed["folder"], failed["num_bytes"], failed["seconds"]) == ("", None, None)
        assert failed["created"] == async_ckpt.history(root)[-2]["time"]
        assert "failed: StorageUnavailableError: the disk is away" in run_command("ls", root, "--all").stdout
    assert [row["step"] for row in documented("ls", tmp_path / "a")["steps"]] == [1]
    assert run_command("ls", tmp_path / "b").returncode == 1


def test_names_of_other_things_in_a_bucket_are_no_steps(bucket):
    with async_ckpt.AsyncCheckpointer(bucket.place("run")) as ckpt:
        ckpt.save({"w": torch.ones(3)}, 1).result()
    bucket.write([f"run/{name}" for name in FOREIGN_NAMES], b"x")
    bucket.write(["run/step_00000003/rank_00000.0123abcd.tar", "run/step_00000004"], b"x")
    store, keys = store_options(bucket.server.options)
    rows = json.loads(run_command("ls", bucket.url("run"), "--all", *store, "--json", **keys).stdout)["steps"]
    assert [(row["step"], row["marks"]) for row in rows] == [(1, ["latest", "tracker"]), (3, ["not committed"])]


def test_the_work_of_a_command_grows_with_the_names_in_the_root_and_not_with_their_square(tmp_path):
    """Thousands of foreign names, each of which could be a naming of its own: a listing for each took minutes."""
    root = tmp_path / "run"
    with open_run(root) as ckpt:
        for step in (1, 2):
            ckpt.save({"w": torch.ones(3)}, step, record={"loss": 0.5}).result()

    def listings(*words: Any) -> int:
        calls = []
        with pytest.MonkeyPatch.context() as patch:
            names = LocalStorage.names
            patch.setattr(LocalStorage, "names", lambda self, folder: calls.append(folder) or names(self, folder))
            assert run_command(*words).returncode == 0
        return len(calls)

    commands: list[tuple[Any, ...]] = [
        ("ls", root), ("ls", root, "--all"), ("ls", root, "--check"), ("verify", root), ("watch", root, "--once"),
        ("page", root, "-o", tmp_path / "a.html", "--overwrite"), ("repair", root),
        ("prune", root, "--keep", "last=2", "--dry-run"),
    ]  # fmt: skip
    before = [listings(*words) for words in commands]
    for number in range(300):
        (root / f"world.{number:016x}.json").touch()
        (root / f"{number:03d}-{'abc'[number % 3] * number}.txt"[:200]).touch()
    assert [listings(*words) for words in commands] == before


def test_ls_has_columns_for_the_entries_of_records_that_most_steps_have(tmp_path):
    """A column for each of a hundred thousand keys took hours."""
    with open_run(tmp_path) as ckpt:
        for step in (1, 2):
            keys = {f"key{step}.{number}": number for number in range(3000)}
            keys |= {"eval_loss": 2.0, "eval_runtime": 0.1, "eval_samples_per_second": 9.0, "epoch": 1, "lr": 0.1}
            ckpt.save({"w": torch.ones(3)}, step, record={"loss": 1 / step, **keys}).result()
    head, *rows, last = run_command("ls", tmp_path).stdout.splitlines()
    assert head.split()[-4:] == ["epoch", "eval_loss", "loss", "marks"]
    assert len(rows) == 2
    assert last == "6,003 more columns of the records: pass --records"
    assert run_command("ls", tmp_path, "--best", "lr").stdout.splitlines()[0].split()[-4:-1] == [
        "eval_loss",
        "loss",
        "lr",
    ]
    head, *_, last = run_command("ls", tmp_path, "--records").stdout.splitlines()
    assert {"loss", "eval_loss", "epoch", "lr"} < {*head.split()}
    assert last == "5,906 more columns of the records: pass --json"
    assert len(documented("ls", tmp_path)["steps"][1]["record"]) == 3006


def test_ls_lists_the_versions_of_a_publication(tmp_path):
    with Line(tmp_path / "v", gpt2()) as line:
        line.publish(1, 2)

    first, second = documented("ls", tmp_path / "v")["versions"]

    assert (first["kind"], first["base"], second["kind"], second["base"]) == ("anchor", None, "delta", 1)
    assert first["num_bytes"] > second["num_bytes"] > 0


@pytest.mark.parametrize("arguments", [("--help",), ("ls", "--help"), ("ls", "{root}"), ("ls", "{root}", "--json")])
def test_help_and_ls_import_neither_torch_nor_rich_in_a_pipe(root, arguments):
    code = (
        "import sys; from async_ckpt.tools.command.main import app; app(args=sys.argv[1:], standalone_mode=False); "
        "print({'torch', 'rich', 'numpy', 'obstore'} & {*sys.modules})"
    )
    words = [word.format(root=root) for word in arguments]
    out = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=True)
    assert out.stdout.splitlines()[-1] == "set()"


def test_a_table_aligns_wide_characters_and_is_not_folded_in_a_pipe(capsys):
    print_table(("name", ">size"), [("短い", "1"), ("x" * 20_000, "10")])
    head, wide, long = capsys.readouterr().out.splitlines()
    assert head == "name" + " " * 19_998 + "size"
    assert wide == "短い" + " " * 19_996 + "     1"
    assert long == "x" * 20_000 + "    10"


def test_inspect_shows_names_shapes_and_places(root):
    rows = {row["name"]: row for row in documented("inspect", root / "step_00000002")["names"]}

    assert rows["base.w"]["shape"] == [2, 3]
    assert rows["base.w"]["places"][0]["file"].startswith(str(root / "step_00000001"))
    assert rows["head.tied"]["alias_of"] is not None
    assert rows["who"]["kind"] == "object"
    assert rows["step"]["value"] == 2


def test_inspect_takes_statistics_of_what_is_finite(root):
    (row,) = documented("inspect", root, "head.odd", "--stats")["names"]
    assert row["stats"] == {
        "min": 1.0, "max": 3.0, "mean": 2.0, "std": 1.0, "norm": 10**0.5, "num_nan": 1, "num_inf": 1,
    }  # fmt: skip


def test_inspect_takes_patterns_and_says_when_there_is_nothing(root):
    assert [row["name"] for row in documented("inspect", root, "base.*")["names"]] == ["base.w"]
    ended = run_command("inspect", root, "typo")
    assert (ended.returncode, ended.stdout) == (1, "")
    assert "no name in it matches typo" in ended.stderr


PRINTED = [
    torch.tensor(2.5),
    torch.zeros(0, 3),
    torch.arange(1000),
    torch.arange(1001.0) * 1e5,
    torch.rand(3, 400, dtype=torch.float64),
    torch.rand(9, 8, 7, 6).bfloat16(),
    torch.rand(5, 5, 5, 5, 5),
    torch.rand(20, 100, dtype=torch.complex64),
    torch.rand(40, 50) > 0.5,
    torch.rand(2000).to(torch.float8_e4m3fn),
    torch.full((50, 50), float("nan")),
]


def test_inspect_prints_one_tensor_as_torch_does(tmp_path):
    with open_run(tmp_path / "run") as ckpt:
        ckpt.save({f"t{number:02d}": tensor for number, tensor in enumerate(PRINTED)}, 1).result()
    for number, tensor in enumerate(PRINTED):
        printed = run_command("inspect", tmp_path / "run", f"t{number:02d}").stdout
        assert f"\n{tensor!s}\n" in printed
    assert "tensor(" not in run_command("inspect", tmp_path / "run", "t0*").stdout


def test_inspect_prints_each_of_several_values_that_are_named_in_their_order(tmp_path):
    with open_run(tmp_path / "run") as ckpt:
        ckpt.save({"epoch": 7, "name": "a"}, 1).result()
    for names in (("epoch", "name"), ("name", "epoch")):
        assert json.loads(run_command("inspect", tmp_path / "run", *names).stdout) == {"epoch": 7, "name": "a"}
    assert run_command("inspect", tmp_path / "run", "name").stdout == '"a"\n'


def test_inspect_of_several_ranks_says_which_have_written_a_tensor(tmp_path):
    folder = tmp_path / "step_00000001"
    folder.mkdir()
    commit(
        write_all(folder, 4, lambda rank: {"whole": torch.arange(1e6), "own": rank}, per_rank=("own",)),
        per_rank=("own",),
    )
    rows = {row["name"]: row for row in documented("inspect", folder)["names"]}
    assert rows["whole"]["shape"] == [1_000_000]
    assert len({place["file"] for place in rows["whole"]["places"]}) == 4
    assert sorted(place["rank"] for place in rows["whole"]["places"]) == [0, 1, 2, 3]
    assert " 0-3" in run_command("inspect", folder, "whole").stdout


def test_inspect_of_hundreds_of_ranks_opens_a_few_archives(tmp_path):
    """By the layout of the step: those of the others need not even be there, unless a place in them is asked for."""
    step = step_on_disk(tmp_path / "run", 32, 3)
    run = {"names": documented("inspect", step)["names"], "rows": run_command("inspect", step).stdout}
    for rank in range(1, 32):
        (archive,) = step.glob(f"rank_{rank:05d}.*.tar")
        archive.unlink()

    assert run_command("inspect", step).stdout == run["rows"]
    assert run["rows"].count(" of ranks 0-31\n") == 3
    assert [row["ranks"] for row in run["names"]] == [[*range(32)]] * 3
    assert [len(row["places"]) for row in run["names"]] == [32] * 3
    assert run_command("inspect", step, "--json").returncode == 1


def test_inspect_reads_folders_of_hugging_face(tmp_path):
    async_ckpt.export_hf(gpt2(), tmp_path / "hf").result()
    rows = documented("inspect", tmp_path / "hf")["names"]
    assert any(row["name"] == "transformer.wte.weight" for row in rows)


def test_doctor_says_how_things_are_and_no_secret(tmp_path):
    ended = run_command("doctor", tmp_path, "--json", AWS_ACCESS_KEY_ID="AKIASECRET")
    told = json.loads(ended.stdout)["findings"]
    assert {"async_ckpt", "Python", "torch", "free space"} <= {one["subject"] for one in told}
    assert any("AWS_ACCESS_KEY_ID is set" in one["text"] for one in told)
    assert "AKIASECRET" not in ended.stdout


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (("ls", "{tmp}/nowhere"), 1, "there is nothing at this path"),
        (("ls", "{tmp}/empty"), 1, "the folder is empty"),
        (("ls", "{tmp}"), 1, "no committed checkpoint there"),
        (("ls", "{tmp}/file"), 2, "is a file, not a run"),
        (("page", "{tmp}/file"), 2, "is a file, not a run"),
        (("verify", "{tmp}/nowhere"), 1, "there is nothing at this path"),
        (("verify", "{tmp}/empty"), 1, "the folder is empty"),
        (("repair", "{tmp}/file"), 2, "is a file, not a run"),
        (("inspect", "{tmp}/nowhere"), 1, "there is nothing at this path"),
        (("inspect", "{tmp}/file"), 1, "file"),
        (("ls", "nonsense://x"), 2, "nonsense"),
        (("ls",), 2, "Missing argument"),
        (("frobnicate",), 2, "No such command"),
        (
            ("ls", "s3://nobody/run", "--endpoint", "http://127.0.0.1:9", "--region", "x", "--deadline", "1"),
            74,
            "nobody",
        ),
    ],
)
def test_what_cannot_be_answered_is_said_on_stderr(tmp_path, arguments, status, said):
    (tmp_path / "file").write_text("no archive")
    (tmp_path / "empty").mkdir()
    env = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x"}
    ended = run_command(*(one.format(tmp=tmp_path) for one in arguments), **env)
    assert (ended.returncode, ended.stdout) == (status, ""), ended.stderr
    assert said in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize("columns", [40, 120])
@pytest.mark.parametrize("word", ["ls", "inspect"])
def test_nothing_of_a_checkpoint_reaches_a_terminal_raw(root, word, columns):
    assert b"\x1b[31m" not in in_terminal(word, root, columns=columns)
    assert "\x1b" not in run_command(word, root).stdout


def test_a_pipe_that_is_closed_ends_it_quietly(root):
    shell = f"{sys.executable} -m async_ckpt inspect {root} --json | head -1"
    ended = subprocess.run(["sh", "-c", shell], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.stdout, ended.stderr) == ("{\n", "")


@pytest.mark.parametrize("word", ["ls", "verify", "inspect", "doctor"])
def test_a_reader_that_reads_nothing_ends_it_quietly(root, word):
    shell = f"{{ {sys.executable} -m async_ckpt {word} {root}; echo $? >&2; }} | true"
    ended = subprocess.run(["sh", "-c", shell], capture_output=True, text=True, timeout=60, check=False)
    assert ended.stderr in ("0\n", "141\n")  # done before the pipe was closed, or ended by SIGPIPE


def test_it_is_a_program_of_its_own(root):
    assert in_process("ls", root).stdout.split()[:2] == ["step", "age"]
    assert in_process("frobnicate").returncode == 2


def test_a_table_that_a_terminal_is_too_narrow_for_becomes_lines(root):
    lines = in_terminal("ls", root, columns=40).decode().splitlines()
    assert any("borrows from 1" in line for line in lines)
    assert any(re.fullmatch(r"(\x1b\[[0-9;]*m)*step 2(\x1b\[[0-9;]*m)*", line) for line in lines)


def test_ls_says_what_the_time_of_a_run_went_to(tmp_path):
    with open_run(tmp_path) as ckpt:
        log = ckpt._roots.runs[0].events
        log._opened = log._clock() - 600  # as if it had begun ten minutes ago
        ckpt.save(state_at(1), 1).result()

    assert re.search(r"^time: \d+\.\d% trained, .* 0\.0% redone, of 60\d s$", run_command("ls", tmp_path).stdout, re.M)
    goodput = documented("ls", tmp_path)["goodput"]
    assert sum(
        goodput[f"{part}_share"] for part in ("trained", "stall", "slower", "restore", "redone")
    ) == pytest.approx(1)
