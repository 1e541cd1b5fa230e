"""A part of the places at which a call fails; `python -m tests.matrices.calls` tries all."""

import shutil
import sys

import pytest
import slices

from tests.matrices.attack_driver import NOT_MET, is_in_shard
from tests.matrices.calls import attack_scenarios
from tests.matrices.calls.__main__ import MATRIX
from tests.matrices.calls.scenario import Told

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("cc") is None, reason="the library that makes calls fail is built by cc"
)


def test_no_call_that_fails_breaks_a_promise(tmp_path):
    names = list(attack_scenarios.SCENARIOS)
    scenarios = [names[(slices.PART + number) % len(names)] for number in range(2)]
    results = MATRIX.attack(
        tmp_path,
        lambda place: is_in_shard(place, slices.PART, (1, 100)),
        scenarios=scenarios,
        num_workers=1,
    )

    assert {str(place): found for place, found in results.items() if found not in (None, NOT_MET)} == {}


def test_a_step_that_was_told_of_and_is_gone_or_another_is_found(tmp_path):
    scenario = attack_scenarios.SCENARIOS["save"]
    scenario.prepare(tmp_path)

    with pytest.raises(AssertionError, match="were told of, and are gone"):
        scenario.check(tmp_path, Told({1: 10, 7: 70}, {1: {10}, 7: {70}}))
    with pytest.raises(AssertionError, match="step 1 is 10, and may be"):
        scenario.check(tmp_path, Told({1: 11}, {1: {11}}))
    (tmp_path / "run/step_00000001/rank_00000.0123abcd.tar").touch()
    with pytest.raises(AssertionError, match="left: run/step_00000001/rank_00000"):
        attack_scenarios._check_leftovers(tmp_path)
