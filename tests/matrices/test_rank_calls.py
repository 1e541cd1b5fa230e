"""A part of the places at which a call of one of several ranks fails; `python -m tests.matrices.ranks` tries one in four."""

import shutil
import sys

import pytest
import slices

from tests.matrices.attack_driver import NOT_MET, is_in_shard
from tests.matrices.ranks import rank_places
from tests.matrices.ranks.__main__ import MATRIX
from tests.matrices.ranks.rank_scenarios import RANK_SCENARIOS

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("cc") is None, reason="the library that makes calls fail is built by cc"
)


def test_no_call_of_a_rank_that_fails_breaks_a_promise(tmp_path):
    names = list(RANK_SCENARIOS)
    results = MATRIX.attack(
        tmp_path,
        lambda place: is_in_shard(place, slices.PART, (1, 150)),
        scenarios=[names[slices.PART % len(names)]],
        num_workers=1,
    )

    assert {str(place): found for place, found in results.items() if found not in (None, NOT_MET)} == {}


def test_ranks_that_were_told_otherwise_are_found(tmp_path):
    root = tmp_path / "root"
    (tmp_path / "notes.0").write_text("begun save 2 20\ntold save 2 20\n")
    (tmp_path / "notes.1").write_text("begun save 2 20\nrefused save 2 Undecided\n")
    assert rank_places._told("save of 2 ranks", root).told == {1: 10, 2: 20}

    (tmp_path / "notes.1").write_text("begun save 2 20\nrefused save 2 Decided\n")
    with pytest.raises(AssertionError, match="others that it has failed"):
        rank_places._told("save of 2 ranks", root)


def test_a_step_of_ranks_that_was_told_of_and_is_gone_is_found(tmp_path):
    (tmp_path / "notes.0").write_text("begun save 7 70\ntold save 7 70\n")
    told = rank_places._told("DCP async_save of 2 ranks", tmp_path / "root")

    with pytest.raises(AssertionError, match="were told of, and are gone"):
        RANK_SCENARIOS["save of 2 ranks"].check(tmp_path, told)
