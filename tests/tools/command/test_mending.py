"""`async-ckpt prune` and `repair`: what they show is what they do, and a run is whole after any interruption."""

import itertools
import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import documented, in_terminal, run_command, store_options
from folders import read as tree_of
from slices import some
from states import assert_is_state, leftovers, open_run, state_at

import async_ckpt
from async_ckpt import Keep
from async_ckpt.core.runs.run import Run
from async_ckpt.stores.s3.store import ObjectStorage
from async_ckpt.tools.command import pruning

# A word with the kill armed; prints how many calls it made.
DYING = """
import contextlib, io, sys
from children import die_at
from async_ckpt.tools.command.main import status_of
root, word, *options, number = sys.argv[1:]
count = die_at(int(number))
with contextlib.redirect_stdout(io.StringIO()):
    assert status_of([word, root, *options]) == 0
print(count())
"""


def saved(root: Any, steps: int = 5, **options: Any) -> Any:
    with open_run(root, **options) as ckpt:
        for step in range(1, steps + 1):
            ckpt.save(state_at(step), step, record={"loss": abs(step - 2.0)}).result()
    return root


def assert_is_run(root: Path, steps: list[int]) -> None:
    with open_run(root) as ckpt:
        assert ckpt.steps() == steps
        for step in steps:
            assert_is_state(ckpt.load(step), step)


def retired_run(root: Path) -> Path:
    """Steps 1 to 4, of which a rollback to 2 has retired 3 and 4."""
    saved(root, steps=4)
    with open_run(root, on_rollback="retire") as ckpt:
        ckpt.save(state_at(2), 2, overwrite=True).result()
    return root


def damages(root: Any, *options: Any, status: int = 1) -> dict[str, str]:
    return {one["subject"]: one["text"] for one in documented("repair", root, *options, status=status)["damages"]}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return saved(tmp_path / "a")


# --- prune --------------------------------------------------------------------------------------------------------


def fates(root: Any, *options: Any) -> dict[int, bool]:
    """Whether each step is deleted."""
    return {row["step"]: row["deleted"] for row in documented("prune", root, *options)["steps"]}


def test_what_is_shown_is_what_goes(root):
    before = tree_of(root)
    rules = ("--keep", "last=2", "--keep", "best=loss:min:1")
    shown = fates(root, *rules, "--dry-run")
    assert tree_of(root) == before
    assert shown == {1: True, 2: False, 3: True, 4: False, 5: False}
    assert fates(root, *rules, "--yes") == shown
    assert_is_run(root, [2, 4, 5])
    assert len((root / "checkpoints.jsonl").read_text().splitlines()) == 3
    assert leftovers(root) == []


@pytest.mark.parametrize(
    ("rules", "keep"),
    [
        (["last=3"], Keep(last=3)),
        (["every=2"], Keep(every=2)),
        (["every=3", "best=loss:max:2"], Keep(every=3, best=("loss", "max", 2))),
        (["seconds=1000"], Keep(seconds=1000)),
        (["bytes=2.5e6"], Keep(bytes=2.5e6)),
    ],
)
def test_it_deletes_what_the_retention_of_a_training_would(tmp_path, rules, keep):
    with open_run(tmp_path / "b", keep=keep) as ckpt:
        for step in range(1, 6):
            ckpt.save(state_at(step), step, record={"loss": abs(step - 2.0)})
        ckpt.wait()
        kept = ckpt.steps()
    shown = fates(saved(tmp_path / "a"), *(word for rule in rules for word in ("--keep", rule)), "--dry-run")
    assert {step for step, deleted in shown.items() if not deleted} >= {*kept}
    if "best" not in str(rules):  # the best of all that ever were may be another one than that of those that are left
        assert [step for step, deleted in shown.items() if not deleted] == kept


def test_the_step_that_the_tracker_names_and_those_that_lend_stay(tmp_path):
    root, base = tmp_path / "a", {"w": torch.ones(10)}
    with open_run(root) as ckpt:
        for step in range(1, 5):
            ckpt.save({"base": base, "n": step}, step, unchanged="base" if step > 1 else None).result()
    (root / "latest").write_text("step_00000003\n")
    assert fates(root, "--keep", "last=1", "--yes") == {1: False, 2: True, 3: False, 4: False}
    assert torch.equal(async_ckpt.load(root)["base"]["w"], torch.ones(10))


def _lose_archive(folder: Path) -> None:
    for path in folder.glob("*.tar"):
        path.unlink()


def _cut_manifest(folder: Path) -> None:
    (folder / "manifest.json").write_text("{")


@pytest.mark.parametrize("damage", [_lose_archive, _cut_manifest])
@pytest.mark.parametrize("rule", ["last=1", "every=5", "best=loss:max"])  # each of which the broken step would fill
def test_broken_steps_stay_and_never_count_for_a_rule(root, damage, rule):
    damage(root / "step_00000005")
    shown = fates(root, "--keep", rule, "--dry-run")
    assert fates(root, "--keep", rule, "--yes") == shown
    assert [step for step, deleted in shown.items() if not deleted] == [4, 5]
    assert_is_state(async_ckpt.load(root / "step_00000004"), 4)


def test_an_older_broken_step_stays_with_what_it_borrows(tmp_path):
    root, base = tmp_path / "a", {"w": torch.ones(10)}
    with open_run(root) as ckpt:
        for step in range(1, 7):
            ckpt.save({"base": base, "n": step}, step, unchanged="base" if step == 3 else None).result()
    _lose_archive(root / "step_00000003")
    gone = [step for step, deleted in fates(root, "--keep", "last=2", "--yes").items() if deleted]
    assert gone == [1, 4]


def test_the_table_says_of_a_step_that_stays_why_it_is_broken(root):
    _cut_manifest(root / "step_00000005")
    told = run_command("prune", root, "--keep", "last=1", "--dry-run").stdout
    assert "keep, broken: its manifest is damaged" in told


def test_nobody_is_asked_where_nobody_can_answer(root):
    before = tree_of(root)
    ended = run_command("prune", root, "--keep", "last=1")
    assert (ended.returncode, "--yes" in ended.stderr) == (2, True)
    assert tree_of(root) == before


@pytest.mark.parametrize(("answer", "steps"), [("y", [5]), ("n", [1, 2, 3, 4, 5]), ("", [1, 2, 3, 4, 5])])
def test_somebody_is_asked_in_a_terminal(root, answer, steps):
    written = in_terminal("prune", root, "--keep", "last=1", answer=answer, status=0 if answer == "y" else 1)
    assert b"Delete them?" in written
    assert_is_run(root, steps)


def test_a_run_of_a_living_process_is_refused(tmp_path, nursery):
    root = tmp_path / "a"
    child = nursery.start(
        """
        import sys, time
        from states import open_run, state_at
        ckpt = open_run(sys.argv[1])
        for step in (1, 2, 3):
            ckpt.save(state_at(step), step).result()
        print("saved", flush=True)
        time.sleep(60)
        """,
        root,
    )
    child.wait_for_line("saved")
    refused = [
        run_command("prune", root, "--keep", "last=1", "--yes"),
        run_command("repair", root, "--apply"),
        run_command("prune", root, "--keep", "last=1", "--yes", "--unattended"),
    ]
    child.send(signal.SIGKILL)
    child.ended()
    for ended in refused:
        assert ended.returncode == 1
        assert ended.stdout == ""  # nobody reads a table of what cannot be deleted
        assert f"process {child.pid}" in ended.stderr
        assert "is alive" in ended.stderr
    assert_is_run(root, [1, 2, 3])
    assert run_command("prune", root, "--keep", "last=1", "--yes").returncode == 0
    assert_is_run(root, [3])


def test_a_store_cannot_tell_who_lives_and_says_so(bucket, nursery):
    place = bucket.place("runs/a")
    child = nursery.start(
        """
        import json, socket, sys
        from states import open_run, state_at
        from async_ckpt import Place
        socket.gethostname = lambda: "elsewhere"
        with open_run(Place(sys.argv[1], options=json.loads(sys.argv[2]))) as ckpt:
            for step in (1, 2, 3):
                ckpt.save(state_at(step), step).result()
        """,
        place.url,
        json.dumps(place.options),
    )
    assert child.ended().status == 0
    store, env = store_options(place.options)
    options = (*store, "--keep", "last=1", "--yes")
    ended = run_command("prune", place.url, *options, **env)
    assert (ended.returncode, "on 'elsewhere'" in ended.stderr, "--unattended" in ended.stderr) == (1, True, True)
    assert run_command("prune", place.url, *options, "--unattended", **env).returncode == 0
    with open_run(place) as ckpt:
        assert ckpt.steps() == [3]


# A training that goes on from step 1, whose group it does not write again, and leaves the run or lives on.
GOES_ON = """
import json, sys, time, torch
from states import open_run
from async_ckpt import Place
url, options, lives = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3] == "lives"
state = {"base": {"w": torch.zeros(10)}, "n": 0}
ckpt = open_run(Place(url, options=options), on_rollback="retire")
assert ckpt.restore(state, step=1) == 1
ckpt.save(state, 3, unchanged="base").result()
print("saved", flush=True)
time.sleep(60) if lives else ckpt.close()
"""


def lending_run(place: Any) -> None:
    with open_run(place) as ckpt:
        for step in (1, 2, 4, 5):
            ckpt.save({"base": {"w": torch.full((10,), float(step))}, "n": step}, step).result()


def pruned_meanwhile(
    place: Any,
    monkeypatch: pytest.MonkeyPatch,
    owner: Any,
    name: str,
    go_on: Any,
    *more: str,
    path: str = "",
    **env: str,
) -> Any:
    """`prune`, of which the first call with this path is made only after `go_on`."""
    real, calls = getattr(owner, name), itertools.count()

    def call(*arguments: Any, **options: Any) -> Any:
        if path in str(arguments[1:]) and next(calls) == 0:
            go_on()
        return real(*arguments, **options)

    monkeypatch.setattr(owner, name, staticmethod(call) if name == "of" else call)
    ended = run_command("prune", place, "--keep", "last=1", "--yes", *more, **env)
    assert next(calls), "nobody came there"
    return ended


@pytest.mark.parametrize(
    ("owner", "name"),
    [(pruning._Shown, "of"), (pruning, "refuse_writer"), (pruning._Shown, "delete"), (Run, "changing")],
)
@pytest.mark.parametrize("lives", ["lives", "ends"])
def test_a_training_that_begins_while_it_works_keeps_what_it_goes_on_from(
    tmp_path, nursery, monkeypatch, owner, name, lives
):
    root = tmp_path / "a"
    lending_run(root)
    children = []

    def go_on() -> None:
        children.append(nursery.start(GOES_ON, root, "{}", lives))
        children[0].wait_for_line("saved") if lives == "lives" else children[0].ended()

    ended = pruned_meanwhile(root, monkeypatch, owner, name, go_on)
    if lives == "lives":
        assert (ended.returncode, "is alive" in ended.stderr) == (1, True), ended
        children[0].send(signal.SIGKILL)
        children[0].ended()
    with open_run(root) as ckpt:
        assert ckpt.latest() == 3
        loaded = ckpt.load()
        assert (loaded["n"], loaded["base"]["w"][0].item()) == (1, 1.0)
    assert [path.name for path in root.glob("start-*")] != []


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("names", "('',)"),
        ("put_new", "start-"),
        ("delete", "step_00000004/manifest"),
        ("delete_many", "step_00000004/rank"),
    ],
)
def test_at_a_store_it_stops_where_a_training_has_begun_and_puts_back_what_that_may_need(
    bucket, nursery, monkeypatch, name, path
):
    place = bucket.place("runs/a")
    lending_run(place)
    store, env = store_options(place.options)
    is_late = name == "delete_many"  # all manifests are gone, and nobody has begun until then

    def go_on() -> None:
        child = nursery.start(GOES_ON, place.url, json.dumps(place.options), "ends").ended()
        assert (child.status != 0) == is_late, child.err

    pruned_meanwhile(place.url, monkeypatch, ObjectStorage, name, go_on, *store, "--unattended", path=path, **env)
    with open_run(place) as ckpt:
        if is_late:
            assert ckpt.steps() == [5]
        else:
            assert ckpt.latest() == 3
            assert ckpt.load()["base"]["w"][0].item() == 1.0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ((), "say which steps to keep"),
        (("--keep", "lst=3"), "not 'lst=3'"),
        (("--keep", "last"), "not 'last'"),
        (("--keep", "last=x"), "not 'last=x'"),
        (("--keep", "last=0"), "numbers above 0, not 'last=0'"),
        (("--keep", "seconds=nan"), "not 'seconds=nan'"),
        (("--keep", "last=1", "--keep", "best=los"), "the metric 'los' (their records have loss)"),
        (("--keep", "last=1", "--keep", "last=2"), "twice"),
        (("--keep", "best="), "not 'best='"),
    ],
)
def test_rules_that_are_none_are_refused(root, options, said):
    ended = run_command("prune", root, *options, "--yes")
    assert (ended.returncode, said in ended.stderr) == (2, True), ended.stderr
    assert_is_run(root, [1, 2, 3, 4, 5])


# --- repair -------------------------------------------------------------------------------------------------------


def test_nothing_is_mended_where_nothing_is_broken(root):
    before = tree_of(root)
    assert damages(root, status=0) == {}
    assert damages(root, "--apply", status=0) == {}
    assert tree_of(root) == before


def test_tracker_and_journal_are_made_again_from_the_manifests(root):
    whole = tree_of(root)
    (root / "latest").unlink()
    (root / "checkpoints.jsonl").write_text("torn")
    broken = tree_of(root)

    assert {*damages(root)} == {"latest", "checkpoints.jsonl"}
    assert tree_of(root) == broken
    damages(root, "--apply", status=0)
    assert tree_of(root) == whole


@pytest.mark.parametrize("text", ["step_00000009\n", "nonsense", "", "step_00000002\n"])
def test_a_tracker_that_names_no_step_is_made_right(root, text):
    (root / "latest").write_text(text)
    damages(root, "--apply", status=0)
    assert (root / "latest").read_text() == "step_00000005\n"


def test_a_tracker_at_a_step_of_another_program_is_left_alone(root):
    (root / "step_00000009").mkdir()
    (root / "step_00000009" / "model.bin").touch()
    (root / "latest").write_text("step_00000009\n")
    assert "left alone" in damages(root, "--apply")["latest"]
    assert (root / "latest").read_text() == "step_00000009\n"


@pytest.mark.parametrize("naming", ["verl", "deepspeed"])
def test_the_tracker_of_another_trainer_is_made_again(tmp_path, naming):
    root = saved(tmp_path / "a", naming=naming)
    whole = tree_of(root)
    tracker = "latest" if naming == "deepspeed" else "latest_checkpointed_iteration.txt"
    (root / tracker).write_bytes(b"\xff")
    damages(root, "--apply", status=0)
    assert tree_of(root) == whole


def test_what_dead_writers_have_left_is_swept(root):
    (archive,) = (root / "step_00000003").glob("*.tar")
    shutil.copy(archive, archive.with_name("rank_00000.aabbccdd.tar"))
    (root / "step_00000004" / ".rank_00000.aabbccdd.tar.01234567.async_ckpt-tmp").touch()
    before = tree_of(root)

    assert "aabbccdd" in damages(root)["leftovers"]
    assert tree_of(root) == before
    damages(root, "--apply", status=0)
    assert leftovers(root) == []
    assert_is_run(root, [1, 2, 3, 4, 5])


def test_a_retired_step_is_put_back(tmp_path):
    root = retired_run(tmp_path / "a")
    before = tree_of(root)
    assert "step_00000004" in damages(root, "--unretire", 4)
    assert tree_of(root) == before

    damages(root, "--unretire", 4, "--apply", status=0)
    assert_is_run(root, [1, 2, 4])
    assert (root / "latest").read_text() == "step_00000004\n"
    with open_run(root) as ckpt:  # a training goes on from there
        assert ckpt.restore({"step": 0, "note": ""}, strict=False) == 4
        ckpt.save(state_at(5), 5).result()
        assert ckpt.steps() == [1, 2, 4, 5]


def test_a_step_that_cannot_be_put_back_is_said(tmp_path):
    root = retired_run(tmp_path / "a")
    for step, said in ((2, "is committed"), (7, "no step 7 was retired")):
        ended = run_command("repair", root, "--unretire", step, "--apply")
        assert (ended.returncode, said in ended.stderr) == (1, True), ended.stderr
    (archive,) = (root / "step_00000003").glob("*.tar")
    archive.unlink()
    ended = run_command("repair", root, "--unretire", 3)
    assert (ended.returncode, archive.name in ended.stderr) == (1, True)


def test_a_damaged_manifest_is_named_and_the_rest_is_mended(root):
    (root / "step_00000002" / "manifest.json").write_text("{}")
    (root / "latest").unlink()
    told = damages(root, "--apply")
    assert {*told} == {"step_00000002/manifest.json", "latest", "checkpoints.jsonl"}
    assert (root / "latest").read_text() == "step_00000005\n"


# --- killed -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        ("prune", "--keep", "last=1", "--yes"),
        ("repair", "--apply"),
        ("repair", "--unretire", "4", "--apply"),
    ],
    ids=["prune", "repair", "unretire"],
)
def test_killed_at_any_call_the_run_is_whole_and_the_same_command_ends_it(quick_path, nursery, arguments):
    source = retired_run(quick_path / "a")
    (archive,) = (source / "step_00000001").glob("*.tar")
    shutil.copy(archive, archive.with_name("rank_00000.aabbccdd.tar"))
    (source / "latest").unlink()
    numbers = itertools.count()

    def copied() -> Path:
        return Path(shutil.copytree(source, quick_path / str(next(numbers))))

    whole = nursery.run(DYING, copied(), *arguments, 0)
    assert (whole.status, whole.err) == (0, "")
    end = {"prune": [2], "repair": [1, 2], "unretire": [1, 2, 4]}["unretire" if "4" in arguments else arguments[0]]
    for number in some(range(1, int(whole.out) + 1), 3):
        root = copied()
        assert nursery.run(DYING, root, *arguments, number).status == -signal.SIGKILL
        with open_run(root) as ckpt:
            steps = ckpt.steps()
        assert 2 in steps
        assert_is_run(root, steps)
        again = run_command(arguments[0], root, *arguments[1:])
        assert again.returncode == 0 or "is committed" in again.stderr
        run_command("repair", root, "--apply")
        assert_is_run(root, end)
        assert damages(root, status=0) == {}
        shutil.rmtree(root)


def test_a_folder_of_runs_and_several_runs_are_repaired(tmp_path):
    for name in ("a", "b", "c"):
        saved(tmp_path / "runs" / name, steps=1)
        (tmp_path / "runs" / name / "latest").unlink()
    a, c = tmp_path / "runs/a", tmp_path / "runs/c"

    refused = run_command("repair", tmp_path / "runs", "--unretire", "1")
    assert (refused.returncode, "one run" in refused.stderr) == (2, True)
    told = run_command("repair", tmp_path / "runs").stdout
    assert all(f"{tmp_path}/runs/{name}: 1 of 1 can be repaired" in told for name in ("a", "b", "c"))
    assert run_command("repair", a, c, "--apply").stdout.count("1 of 1 repaired") == 2
    assert "b: nothing to repair" not in run_command("repair", tmp_path / "runs", "--apply").stdout
    assert run_command("repair", tmp_path / "runs").stdout.count("nothing to repair") == 3
