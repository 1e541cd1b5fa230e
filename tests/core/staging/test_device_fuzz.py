"""Some of the scenarios of `fuzz_device`; all of them by its command."""

import pytest
from fuzz_device import run
from slices import PART

NUM_SCENARIOS = 60
_AT_ONE_TIME = 20
_FIRST = PART % 167 * NUM_SCENARIOS  # of the first 10,000


@pytest.mark.parametrize("first", range(0, NUM_SCENARIOS, _AT_ONE_TIME))
def test_random_trainings_on_a_device_are_saved_as_they_were_at_the_call(tmp_path, first):
    wrong = [
        told
        for seed in range(_FIRST + first, _FIRST + first + _AT_ONE_TIME)
        for told in run(seed, tmp_path / str(seed))
    ]

    assert wrong == []
