"""A few of the kills by the referee; `python -m tests.matrices.referee` does all of them."""

import pytest

pytest.importorskip("ckpt_chaos")


from tests.matrices.referee.__main__ import Case, Launcher, counted, referee, wrong_in
from tests.matrices.referee.referee_eye import BY_DESCRIPTOR, BY_NAME


def test_a_loop_comes_back_from_kills_at_calls_that_the_referee_does_not_see_by_itself(nursery, quick_path):
    rows = referee(Case("loop"), Launcher(nursery), quick_path / "ours", most=8)

    assert wrong_in(rows) == []
    assert counted(rows)["exact"] == len(rows) - 1 >= 3
    assert any(f"os.{name}:" in row.label for row in rows for name in (*BY_NAME, *BY_DESCRIPTOR))


def test_a_plain_file_that_is_cut_is_found(nursery, quick_path):
    rows = referee(Case("plain loop"), Launcher(nursery), quick_path / "plain", most=8)

    assert counted(rows)["raises"] >= 1
    assert any("[torn]" in line and "HARD_FAIL" in line for line in wrong_in(rows))


def test_a_training_that_fails_by_itself_is_not_taken_for_a_killed_one(nursery):
    launcher = Launcher(nursery)

    launcher.run(["no such training", "x", "own"], {"CKPT_CHAOS_CRASH_AT": "3"}, "", 60)

    assert "event 3: ended by itself, status 1" in launcher.failed[0]


def test_a_rank_that_is_not_the_first_is_killed(nursery, quick_path):
    rows = referee(Case("FSDP2", 2, 1), Launcher(nursery), quick_path / "ranks", most=2)

    assert counted(rows) == {"exact": 1, "control failed": 0}
