"""A soak of some seconds; `python -m tests.matrices.soak` is the hour."""

import os
import random

import pytest
import slices

from tests.matrices.soak.__main__ import soak
from tests.matrices.soak.watched_quantities import Bound, num_to_go, of_this_process, trend

pytestmark = pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="descriptors are counted in /proc")


@pytest.mark.filterwarnings("ignore")
def test_a_training_with_faults_and_readers_keeps_its_promises_and_leaves_nothing_open(tmp_path, monkeypatch):
    monkeypatch.setenv("SOAK_DIR", str(tmp_path))
    report = soak(1.0, seed=slices.PART, pause_seconds=0.0)

    assert report.counts["turns"] >= 5
    assert report.details["left"] == {}


def test_a_series_that_grows_by_one_for_each_save_is_not_flat():
    times = [30.0 * number for number in range(120)]
    noise = random.Random(0)
    leaking = trend(times, [20 + noise.choice((0, 0, 1, 3)) + 0.1 * n for n in range(120)], random.Random(1))
    steady = trend(times, [20 + noise.choice((0, 0, 1, 3)) for _ in times], random.Random(1))

    assert not leaking.is_flat(Bound("", 1.0))
    assert leaking.slope == pytest.approx(12, rel=0.2)
    assert steady.is_flat(Bound("", 1.0))


def test_a_descriptor_that_stays_open_is_counted(tmp_path):
    before = of_this_process()["descriptors"]
    with open(tmp_path / "kept", "w"):
        assert of_this_process()["descriptors"] == before + 1


def test_what_a_rollback_has_retired_is_not_expected_to_go():
    kept = ["run/step_1/rank_00000.aaaaaaaa.tar", "run/step_1/manifest.json"]
    retired = ["run/step_2/rank_00000.bbbbbbbb.tar", "run/step_2/manifest.retired-0.json", "run/start-1.x"]
    anew = [f"run/step_3/{name}" for name in ("a.tar", "b.tar", "manifest.json", "manifest.retired-1.json")]

    assert num_to_go(kept + retired + anew) == 4
