"""A figure of the benchmarks is met or missed only where its pairs and the noise of the machine leave no doubt."""

import pytest

from benchmarks.compare import Contender, pairs_of
from benchmarks.table import Figure, Noise, Target, kept_of, markdown


def figure(measured, limit, noise=0.0):
    return Figure(
        "lost", "s", "another", Target("≤", 1.0), [(measured + at / 1e4, limit) for at in range(6)], noise=noise
    )


@pytest.mark.parametrize(
    ("measured", "limit", "noise", "met"),
    [(0.010, 0.020, 0.0, True), (0.010, 0.020, 0.005, True), (0.010, 0.020, 0.012, None), (0.030, 0.020, 0.012, None),
     (0.030, 0.020, 0.008, False), (0.0198, 0.020, 0.0, None)],
)  # fmt: skip
def test_a_verdict_holds_with_the_noise_added_and_taken_away(measured, limit, noise, met):
    assert figure(measured, limit, noise).met is met


def test_the_noise_is_as_large_as_two_measurements_of_nothing_may_differ():
    noise = Noise("nothing", [(0.001, 0.0), (0.0, 0.003), (0.002, 0.0), (0.0, 0.0), (0.0, 0.0), (0.0, 0.0)])
    assert noise.seconds == pytest.approx(0.003)
    assert "-3 - 2" in markdown(kept_of({"no_save": noise}, {}))


def trial_of(seconds):
    return {"later": [{"lost": lost} for lost in seconds]}


def test_a_round_is_one_pair_however_many_saves_it_has():
    ours, other = (
        Contender(name, [trial_of([low, low, 9.0]), trial_of([low + 1, low, low])])
        for name, low in (("ours_guarded", 1.0), ("tar", 2.0))
    )
    assert pairs_of(ours, other, "lost") == [(1.0, 2.0), (1.0, 2.0)]
