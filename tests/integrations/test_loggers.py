"""The lines of docs/metrics.md by which loggers get `ckpt.metrics()`, each run with the logger itself."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from states import open_run, state_at

import async_ckpt

PAGE = Path(async_ckpt.__file__).parent.parent / "docs/metrics.md"


def line_of(logger: str) -> str:
    """What the page says to write for a logger."""
    (line,) = re.findall(rf"^\| {re.escape(logger)} \| `(.+)` \|$", PAGE.read_text(encoding="utf-8"), flags=re.M)
    return line


@pytest.fixture
def logged(tmp_path) -> Callable[..., dict[str, float]]:
    """Run the line of a logger after a save, and return what it was given."""

    def log(logger: str, **names: Any) -> dict[str, float]:
        with open_run(tmp_path / "run") as ckpt:
            ckpt.save(state_at(7), step=7).result()
            given = ckpt.metrics("ckpt/")
            ckpt.metrics = lambda prefix: dict(given)  # the time of the training goes on between two calls
            exec(line_of(logger), {"ckpt": ckpt, "step": 7, **names})
            return given

    return log


def test_tensorboard_shows_each_number_at_its_step(tmp_path, logged):
    pytest.importorskip("tensorboard", reason="needs tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path / "log")) as writer:
        given = logged("TensorBoard", writer=writer)

    events = EventAccumulator(str(tmp_path / "log"))
    events.Reload()
    shown = {name: [(one.step, one.value) for one in events.Scalars(name)] for name in events.Tags()["scalars"]}
    assert set(shown) == set(given)
    assert shown["ckpt/last_num_bytes"] == [(7, given["ckpt/last_num_bytes"])]
    assert shown["ckpt/saves_committed"] == [(7, 1.0)]


def test_weights_and_biases_takes_each_number_offline(tmp_path, logged, monkeypatch):
    wandb = pytest.importorskip("wandb", reason="needs wandb")
    for name in ("WANDB_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path))

    with wandb.init(project="x", mode="offline", settings=wandb.Settings(silent=True, console="off")) as run:
        given = logged("Weights & Biases", wandb=wandb)
        assert run.step == 7
        run.log({"of": "the next step"}, step=8)  # which ends the row of step 7
        summary = {key: run.summary[key] for key in given}

    assert summary == given


def test_mlflow_keeps_each_number_at_its_step(tmp_path, logged, monkeypatch):
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow = pytest.importorskip("mlflow", reason="needs mlflow, which takes an older importlib-metadata than others")
    mlflow.set_tracking_uri((tmp_path / "log").as_uri())

    with mlflow.start_run() as run:
        given = logged("MLflow", mlflow=mlflow)

    client = mlflow.MlflowClient()
    assert client.get_run(run.info.run_id).data.metrics == given
    (one,) = client.get_metric_history(run.info.run_id, "ckpt/last_num_bytes")
    assert (one.step, one.value) == (7, given["ckpt/last_num_bytes"])
