"""What an experiment tracker is told of a run, and what it costs the training if the tracker fails or hangs."""

import importlib
import json
import logging
import math
import sys
from typing import Any

import pytest
from racing import Gate
from states import assert_is_state, open_run, state_at
from tracked import Recorder, folder_of, save_with_losses

import async_ckpt
from async_ckpt import Keep, StepBehindError


def warnings_in(caplog: pytest.LogCaptureFixture, level: int = logging.WARNING) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= level]


def test_a_commit_is_told_with_a_reference_that_opens_it(tmp_path):
    tracker = Recorder()
    with open_run(tmp_path / "a run") as ckpt:
        ckpt.track(tracker)
        report = ckpt.save(state_at(1), 1, record={"loss": 0.5, "notes": ["x"]}).result()

    ((reference, numbers, aliases),) = tracker.committed_steps
    folder = folder_of(reference)
    assert_is_state(async_ckpt.load(folder), 1)
    assert reference["digest"] == json.loads((folder / "manifest.json").read_text())["digest"]
    assert reference["roots"] == [(tmp_path / "a run").as_uri()]
    assert (reference["step"], reference["num_bytes"]) == (1, report.num_bytes)
    assert reference["record"] == {"loss": 0.5, "notes": ["x"]}
    assert numbers == report.as_dict("ckpt/")
    assert not any(map(math.isnan, numbers.values()))
    assert aliases == ["latest"]
    assert json.loads(json.dumps(reference)) == reference


def test_the_best_step_is_that_of_keep_or_of_the_argument(tmp_path):
    by_keep, by_argument = Recorder(), Recorder()
    with open_run(tmp_path, keep=Keep(last=5, best=("loss", "min", 2))) as ckpt:
        ckpt.track(by_keep)
        ckpt.track(by_argument, best=("loss", "max"))
        save_with_losses(ckpt, 2.0, 1.0, 3.0)

    assert by_keep.aliases == {1: ["latest", "best"], 2: ["latest", "best"], 3: ["latest"]}
    assert by_argument.aliases == {1: ["latest", "best"], 2: ["latest"], 3: ["latest", "best"]}


def test_a_step_is_the_best_beside_those_of_earlier_starts(tmp_path):
    with open_run(tmp_path) as ckpt:
        save_with_losses(ckpt, 1.0)
    tracker = Recorder()
    with open_run(tmp_path) as ckpt:
        ckpt.track(tracker, best=("loss", "min"))
        ckpt.save(state_at(2), 2, record={"loss": 1.5})
        ckpt.save(state_at(3), 3, record={"loss": 0.5})

    assert "best" not in tracker.aliases[2]
    assert tracker.aliases[3] == ["latest", "best"]


def test_an_older_step_that_is_saved_again_is_not_the_latest(tmp_path):
    tracker = Recorder()
    with open_run(tmp_path) as ckpt:
        save_with_losses(ckpt, 1.0, 1.0)
        ckpt.track(tracker)
        ckpt.save(state_at(1), 1, overwrite=True).result()

    assert tracker.aliases == {1: []}


def test_a_restore_is_told_with_the_reference_of_its_commit_under_the_name_of_the_run(tmp_path):
    first, second = Recorder(), Recorder()
    with open_run(tmp_path) as ckpt:
        ckpt.track(first)
        save_with_losses(ckpt, 1.0, 2.0)
    with open_run(tmp_path) as ckpt:
        ckpt.track(second)
        ckpt.restore(state_at(0), 1)

    assert second.restored_from == [first.committed_steps[0][0]]


def test_saves_that_are_not_committed_and_those_of_other_runs_are_not_told(tmp_path):
    tracker = Recorder()
    with open_run(tmp_path / "a") as ckpt, open_run(tmp_path / "b") as other:
        ckpt.track(tracker)
        assert ckpt.restore(state_at(0)) is None
        save_with_losses(other, 1.0)
        async_ckpt.save(state_at(1), tmp_path / "x.tar").result()
        ckpt.save(state_at(5), 5).result()
        with pytest.raises(StepBehindError):
            ckpt.save(state_at(4), 4).result()

    assert list(tracker.aliases) == [5]
    assert tracker.restored_from == []


def test_a_tracker_that_hangs_holds_up_neither_saves_nor_the_end(tmp_path, caplog):
    gate = Gate()
    hanging, other = Recorder(), Recorder()
    hanging.committed = lambda *_: gate.passed()  # type: ignore[method-assign]
    with open_run(tmp_path) as ckpt:
        ckpt.track(hanging, timeout=0.01)
        ckpt.track(other)
        ckpt.save(state_at(1), 1).result()
        gate.wait_reached()
        ckpt.save(state_at(2), 2).result()
    gate.open()

    assert list(other.aliases) == [1, 2]
    assert async_ckpt.load(tmp_path)["step"] == 2
    (warning,) = warnings_in(caplog)
    assert "Recorder has not handled the last checkpoints within 0.01 s" in warning


def test_a_tracker_that_raises_is_one_warning_and_is_told_of_later_steps(tmp_path, caplog):
    class Failing(Recorder):
        def committed(self, *told: Any) -> None:
            super().committed(*told)
            raise ConnectionError("the server is away")

    tracker = Failing()
    with open_run(tmp_path) as ckpt:
        ckpt.track(tracker)
        save_with_losses(ckpt, 1.0, 2.0)

    assert list(tracker.aliases) == [1, 2]
    (warning,) = warnings_in(caplog)
    assert "Failing has failed at step 1: ConnectionError('the server is away')" in warning


def test_what_is_no_tracker_and_a_best_that_is_none_are_refused(tmp_path):
    with open_run(tmp_path) as ckpt:
        with pytest.raises(TypeError, match=r"WandbTracker\(\); got <class"):
            ckpt.track(object)
        with pytest.raises(ValueError, match='best must be a metric of the records, and "min" or "max"'):
            ckpt.track(Recorder(), best=("loss", "lowest"))


RANKS = """
from tracked import Recorder
tracker = Recorder()
with open_run(root) as ckpt:
    ckpt.track(tracker)
    ckpt.save({"w": torch.ones(4)}, 1).result()
    ckpt.restore({"w": torch.zeros(4)})
here.tell([list(tracker.aliases), [one["step"] for one in tracker.restored_from]])
"""


def test_only_rank_0_tells(tmp_path, worlds):
    ended = worlds.run(2, f"root = {str(tmp_path / 'run')!r}" + RANKS)

    assert [rank.told[-1] for rank in ended] == [[[1], [1]], [[], []]]


def test_tensorboard_shows_numbers_and_references(tmp_path):
    pytest.importorskip("tensorboard", reason="needs tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    from async_ckpt.integrations.tensorboard import TensorBoardTracker

    with SummaryWriter(str(tmp_path / "log")) as writer, open_run(tmp_path / "run") as ckpt:
        ckpt.track(TensorBoardTracker(writer), best=("loss", "min"))
        save_with_losses(ckpt, 1.0, 2.0)
        ckpt.restore(state_at(0), 1)

    events = EventAccumulator(str(tmp_path / "log"))
    events.Reload()
    assert [one.step for one in events.Scalars("ckpt/stall_seconds")] == [1, 2]
    texts = {name: events.Tensors(f"ckpt/{name}/text_summary") for name in ("latest", "best", "restored_from")}
    assert {name: [one.step for one in told] for name, told in texts.items()} == {
        "latest": [1, 2],
        "best": [1],
        "restored_from": [1],
    }
    reference = json.loads(texts["restored_from"][0].tensor_proto.string_val[0])
    assert_is_state(async_ckpt.load(folder_of(reference)), 1)


def test_a_tracker_without_its_run_says_what_to_do(tmp_path, caplog):
    pytest.importorskip("tensorboard", reason="needs tensorboard")
    from async_ckpt.integrations.tensorboard import TensorBoardTracker

    with open_run(tmp_path) as ckpt:
        ckpt.track(TensorBoardTracker(None))
        save_with_losses(ckpt, 1.0, 2.0)

    (warning,) = warnings_in(caplog)
    assert "there is no writer; give it a SummaryWriter" in warning


@pytest.mark.parametrize(
    ("module", "package"),
    [
        ("wandb", "wandb"),
        ("mlflow", "mlflow"),
        ("trackio", "trackio"),
        ("tensorboard", "torch.utils.tensorboard"),
    ],
)
def test_without_its_package_a_tracker_names_what_to_install(monkeypatch, module, package):
    monkeypatch.delitem(sys.modules, f"async_ckpt.integrations.{module}", raising=False)
    monkeypatch.setitem(sys.modules, package, None)

    with pytest.raises(ImportError, match=f"pip install {module}"):
        importlib.import_module(f"async_ckpt.integrations.{module}")
