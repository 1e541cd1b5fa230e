"""The example of a training that is followed: how it reads what a launcher says."""

import pytest

from examples.train_rollout import rank_and_world


@pytest.mark.parametrize(
    ("rank", "world", "wanted"),
    [
        (None, None, (0, 1)),
        ("", "", (0, 1)),
        ("0", "", (0, 1)),
        (None, "8", (0, 1)),
        (" 3", "8 ", (3, 8)),
        ("0", "1", (0, 1)),
    ],
)
def test_variables_that_are_unset_or_empty_mean_that_there_is_no_launcher(rank, world, wanted, monkeypatch):
    for name, value in (("RANK", rank), ("WORLD_SIZE", world)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    assert rank_and_world() == wanted


@pytest.mark.parametrize(("rank", "world"), [("x", "8"), ("8", "8"), ("-1", "8"), ("1.5", "2")])
def test_variables_that_make_no_sense_are_told_of(rank, world, monkeypatch):
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", world)
    with pytest.raises(SystemExit, match="unset both"):
        rank_and_world()
