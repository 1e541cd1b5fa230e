"""What Weights & Biases, MLflow and Trackio keep of the checkpoints of a run, by their own packages, without a network."""

from __future__ import annotations

import json
import os
import signal
import struct
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from racing import until
from states import assert_is_state, open_run, state_at
from tracked import folder_of, save_with_losses

import async_ckpt

BEST = ("loss", "min")
FIELDS = {"name", "url", "step", "num_bytes", "digest", "created", "record", "roots"}

for _name in ("wandb", "mlflow", "trackio"):
    pytest.importorskip(_name, reason=f"needs {_name}: make test-trackers")


@pytest.fixture(autouse=True)
def _folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the trackers write; they look when they are imported, or when a run begins."""
    for name in ("WANDB_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")


# --- Weights & Biases ---------------------------------------------------------------------------------------------


@pytest.fixture
def wandb_run(tmp_path: Path) -> Iterator[Any]:
    import wandb

    with wandb.init(project="x", mode="offline", settings=wandb.Settings(silent=True, console="off")) as run:
        yield run


def records_of_ended(run: Any) -> dict[str, list[Any]]:
    """The records of an offline run, by their kind. wandb writes the last ones after `finish` has returned."""
    from wandb.proto.wandb_internal_pb2 import Record

    run.finish()
    found: dict[str, list[Any]] = {}

    def is_written() -> bool:
        found.clear()
        for data in log_records(next(Path(run.settings.sync_dir).glob("*.wandb")).read_bytes()):
            record = Record()
            record.ParseFromString(data)
            kind = record.WhichOneof("record_type")
            found.setdefault(kind, []).append(getattr(record, kind))
        return "exit" in found

    until(is_written)
    return found


def log_records(data: bytes) -> Iterator[bytes]:
    """The records of a log in the format of LevelDB, in blocks of 32 KiB; wandb begins it with 7 bytes of its own."""
    at, parts = 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:  # no header fits into the rest of the block
            at += 32768 - at % 32768
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)  # after a checksum
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""


def test_wandb_keeps_a_reference_of_each_commit_with_its_aliases(tmp_path, wandb_run):
    from async_ckpt.integrations.wandb import WandbTracker

    with open_run(tmp_path / "run") as ckpt:
        ckpt.track(WandbTracker(), best=BEST)
        save_with_losses(ckpt, 2.0, 1.0, 3.0)

    artifacts = records_of_ended(wandb_run)["artifact"]
    assert [{*one.aliases} for one in artifacts] == [
        {"step-1", "latest", "best"},
        {"step-2", "latest", "best"},
        {"step-3", "latest"},
    ]
    assert len({one.name for one in artifacts}) == 1
    assert {one.type for one in artifacts} == {"checkpoint"}
    for step, one in enumerate(artifacts, start=1):
        reference = json.loads(one.metadata)
        assert reference.keys() == FIELDS
        assert_is_state(async_ckpt.load(folder_of(reference)), step)
        assert [entry.ref for entry in one.manifest.contents] == [reference["url"]]
        assert not any(entry.local_path for entry in one.manifest.contents)


def test_the_numbers_join_the_rows_of_a_wandb_training_and_do_not_move_its_steps(tmp_path, wandb_run):
    from async_ckpt.integrations.wandb import WandbTracker

    with open_run(tmp_path / "run") as ckpt:
        ckpt.track(WandbTracker())
        for step in (10, 20):
            wandb_run.log({"loss": 0.5}, step=step)
            report = ckpt.save(state_at(step), step).result()
            wandb_run.log({"accuracy": 0.5}, step=step)

    rows = [
        {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in one.item}
        for one in records_of_ended(wandb_run)["history"]
    ]
    assert [row["_step"] for row in rows] == [10, 20]
    assert all(row["loss"] == row["accuracy"] == 0.5 for row in rows)
    last = {key: value for key, value in rows[-1].items() if key.startswith("ckpt/")}
    assert last == report.as_dict("ckpt/")


def test_wandb_names_the_checkpoint_that_a_run_went_on_from(tmp_path, wandb_run):
    from async_ckpt.integrations.wandb import WandbTracker

    with open_run(tmp_path / "run") as ckpt:
        save_with_losses(ckpt, 1.0)
        ckpt.track(WandbTracker())
        ckpt.restore(state_at(0))
    assert wandb_run.config["restored_from"]["step"] == 1
    assert wandb_run.config["restored_from"].keys() == FIELDS


def test_an_online_run_of_wandb_uses_the_artifact_if_it_is_there(tmp_path):
    """By a stand-in for the run, since this needs a server."""
    import wandb

    from async_ckpt.integrations.wandb import WandbTracker

    asked: list[str] = []

    def use_artifact(name: str) -> None:
        asked.append(name)
        raise wandb.errors.CommError("there is none")

    run = SimpleNamespace(
        offline=False, use_artifact=use_artifact, define_metric=lambda *_, **__: None,
        config=SimpleNamespace(update=lambda *_, **__: None),
    )  # fmt: skip
    WandbTracker(run).restored({"name": "run-1", "step": 5})
    assert asked == ["run-1:step-5"]


def test_a_wandb_reference_to_a_store_asks_for_nothing_there(wandb_run):
    from async_ckpt.integrations.wandb import WandbTracker

    for num, scheme in enumerate(("s3", "gs", "az", "https")):
        reference = {"name": "run-1", "url": f"{scheme}://bucket.invalid/run/step_{num}", "step": num}
        WandbTracker().committed(reference, {"ckpt/step": float(num)}, ["latest"])

    artifacts = records_of_ended(wandb_run)["artifact"]
    assert [entry.ref.partition(":")[0] for one in artifacts for entry in one.manifest.contents] == [
        "s3",
        "gs",
        "az",
        "https",
    ]


# --- MLflow -------------------------------------------------------------------------------------------------------


@pytest.fixture
def mlflow_run(tmp_path: Path) -> Iterator[Any]:
    import mlflow

    mlflow.set_tracking_uri((tmp_path / "mlflow").as_uri())
    with mlflow.start_run() as run:
        yield run


def test_mlflow_keeps_a_reference_and_the_numbers_of_each_commit(tmp_path, mlflow_run):
    import mlflow

    from async_ckpt.integrations.mlflow import MlflowTracker

    with open_run(tmp_path / "run") as ckpt:
        save_with_losses(ckpt, 4.0)
        ckpt.track(MlflowTracker(), best=BEST)
        ckpt.restore(state_at(0))
        reports = [ckpt.save(state_at(n), n, record={"loss": loss}).result() for n, loss in ((2, 1.0), (3, 2.0))]

    client, run_id = mlflow.MlflowClient(), mlflow_run.info.run_id
    names = ["restored_from", "step_00000002", "step_00000003"]
    assert [one.path for one in client.list_artifacts(run_id, "checkpoints")] == [
        f"checkpoints/{n}.json" for n in names
    ]
    kept = [mlflow.artifacts.load_dict(f"runs:/{run_id}/checkpoints/{name}.json") for name in names]
    for step, reference in enumerate(kept, start=1):
        assert reference.keys() == FIELDS
        assert_is_state(async_ckpt.load(folder_of(reference)), step)
    tags = client.get_run(run_id).data.tags
    assert {alias: tags[f"ckpt.{alias}"] for alias in ("restored_from", "best", "latest")} == {
        "restored_from": kept[0]["url"],
        "best": kept[1]["url"],
        "latest": kept[2]["url"],
    }
    for name, value in reports[1].as_dict("ckpt/").items():
        history = client.get_metric_history(run_id, name)
        assert [one.step for one in history] == [2, 3]
        assert history[-1].value == value


def test_the_step_of_a_training_that_is_killed_is_there_and_so_is_what_mlflow_was_told_before(tmp_path):
    """Killed while the tracker is in a call: only that call is lost."""
    script = f"""
        import os, signal, sys
        import mlflow
        from async_ckpt.integrations.mlflow import MlflowTracker
        from states import open_run, state_at

        mlflow.set_tracking_uri({(tmp_path / "mlflow").as_uri()!r})
        run = mlflow.start_run()
        tracker = MlflowTracker()
        told = tracker.committed

        def committed(reference, numbers, aliases):
            if reference["step"] == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            told(reference, numbers, aliases)

        tracker.committed = committed
        with open_run({str(tmp_path / "run")!r}) as ckpt:
            ckpt.track(tracker)
            for step in (1, 2):
                ckpt.save(state_at(step), step).result()
        sys.exit("it lives")
    """
    support = Path(async_ckpt.__file__).parent.parent / "tests/support"
    environment = {**os.environ, "PYTHONPATH": f"{support}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], env=environment, capture_output=True)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()

    assert_is_state(async_ckpt.load(tmp_path / "run"), 2)
    (kept,) = (tmp_path / "mlflow").rglob("checkpoints/*.json")
    assert json.loads(kept.read_text())["step"] == 1


# --- Trackio ------------------------------------------------------------------------------------------------------


def test_trackio_keeps_references_and_shows_the_lineage_of_runs(tmp_path):
    script = f"""
        import json, sys
        import trackio
        from trackio.sqlite_storage import SQLiteStorage
        from async_ckpt.integrations.trackio import TrackioTracker
        from states import open_run, state_at

        def train(first, losses):
            run = trackio.init(project="x", embed=False)
            with open_run({str(tmp_path / "run")!r}) as ckpt:
                ckpt.track(TrackioTracker(run), best=("loss", "min"))
                ckpt.restore(state_at(0))
                for step, loss in enumerate(losses, start=first):
                    ckpt.save(state_at(step), step, record={{"loss": loss}}).result()
            trackio.finish()
            return run

        first, second = train(1, [2.0, 1.0]), train(3, [3.0])
        (artifact,) = SQLiteStorage.get_artifacts("x")
        spec = artifact["name"]
        found = {{alias: SQLiteStorage.get_artifact_manifest("x", spec, alias) for alias in artifact["aliases"]}}
        links = [SQLiteStorage.get_run_artifacts("x", run.name, run.id) for run in (first, second)]
        logs = [SQLiteStorage.get_logs("x", run.name) for run in (first, second)]
        json.dump([artifact, found, links, logs], open({str(tmp_path / "told.json")!r}, "w"), default=str)
    """
    support = Path(async_ckpt.__file__).parent.parent / "tests/support"
    environment = {
        **os.environ,
        "PYTHONPATH": f"{support}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
        "TRACKIO_DIR": str(tmp_path / "trackio"),  # it looks once, when it is imported
    }
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], env=environment, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    artifact, found, links, logs = json.loads((tmp_path / "told.json").read_text())

    assert artifact["type"] == "checkpoint"
    versions = {alias: one["metadata"]["step"] for alias, one in found.items()}
    assert versions == {"step-1": 1, "step-2": 2, "step-3": 3, "latest": 3, "best": 2}
    for one in found.values():
        assert one["metadata"].keys() == FIELDS
        assert_is_state(async_ckpt.load(folder_of(one["metadata"])), one["metadata"]["step"])
        assert [entry["path"] for entry in one["manifest"]] == ["reference.json"]
    assert [(len(one["output"]), len(one["input"])) for one in links] == [(2, 0), (1, 1)]
    assert links[1]["input"][0]["version"] == found["step-2"]["version"]
    assert [row["step"] for row in logs[0] if "ckpt/stall_seconds" in row] == [1, 2]
    assert [row["ckpt/restored_from_step"] for row in logs[1] if "ckpt/restored_from_step" in row] == [2]


# --- without a run, or without the package ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "advice"),
    [
        ("wandb.WandbTracker()", r"call wandb.init() before WandbTracker()"),
        ("mlflow.MlflowTracker()", "call mlflow.start_run() before MlflowTracker(), on the same thread"),
        ("trackio.TrackioTracker(None)", "give it what trackio.init() returns"),
    ],
)
def test_a_tracker_without_a_run_says_what_to_do(tmp_path, caplog, make, advice):
    module, _, call = make.partition(".")
    tracker = eval(call, vars(__import__(f"async_ckpt.integrations.{module}", fromlist=["*"])))
    with open_run(tmp_path) as ckpt:
        ckpt.track(tracker)
        save_with_losses(ckpt, 1.0, 2.0)

    assert [advice in record.getMessage() for record in caplog.records if record.name == "async_ckpt"].count(True) == 1
