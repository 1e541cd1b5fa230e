"""What a power cut may leave: the model of it, by traces that are right or wrong, and a part of the states of the library's own."""

import random
from collections.abc import Sequence

import pytest
from slices import ALL, PART

from tests.matrices.power.cut_model import JOURNAL, MODELS, POSIX, Disk, Tree
from tests.matrices.power.disk_records import TOP, Create, Link, Record, Remove, Rename, Sync, Write
from tests.matrices.power.real_disk import why_not

FOLDER, FILE, OTHER = 1, 2, 3
NEW_FOLDER = [Create((TOP, "in"), FOLDER, is_folder=True)]
TEMP = [Create((FOLDER, "tmp"), FILE), Write(FILE, 0, b"n" * 5000)]
RENAMED = [Rename((FOLDER, "tmp"), (FOLDER, "x"))]
RIGHT = [*NEW_FOLDER, Sync(TOP), *TEMP, Sync(FILE), *RENAMED, Sync(FOLDER)]
WHOLE: Tree = {"in": None, "in/x": b"n" * 5000}


def states(records: Sequence[Record], model: str = POSIX) -> list[Tree]:
    disk = Disk(model)
    for record in records:
        disk.apply(record)
    found: dict[frozenset[tuple[str, bytes | None]], Tree] = {}
    for tree in disk.states(200, random.Random(1)):
        found.setdefault(frozenset(tree.items()), tree)
    return [*found.values()]


@pytest.mark.parametrize("model", MODELS)
def test_when_all_is_synced_a_cut_leaves_one_state(model):
    assert states(RIGHT, model) == [WHOLE]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("number", range(1, len(RIGHT)))
def test_a_new_file_that_is_made_rightly_is_there_whole_or_not_at_all(model, number):
    assert {tree.get("in/x", b"n" * 5000) for tree in states(RIGHT[:number], model)} == {b"n" * 5000}


def test_a_file_that_is_renamed_before_it_is_synced_may_be_empty_cut_short_or_zeros():
    found = {tree.get("in/x") for tree in states([one for one in RIGHT if one != Sync(FILE)])}
    assert found == {
        b"",
        b"n" * 5000,
        b"n" * 4096,
        bytes(5000),
        bytes(4096),
        b"n" * 4096 + bytes(904),
        bytes(4096) + b"n" * 904,
    }


def test_a_name_in_a_folder_that_is_not_synced_may_be_missing():
    found = states(RIGHT[:-1])
    assert WHOLE in found
    assert {"in": None} in found


def test_a_folder_whose_parent_is_not_synced_may_be_missing_with_all_that_is_in_it():
    found = states([one for one in RIGHT if one != Sync(TOP)])
    assert sorted(map(len, found)) == [0, 2]


def test_a_file_that_is_replaced_is_the_old_one_or_the_new_one():
    old = [Create((FOLDER, "x"), OTHER), Write(OTHER, 0, b"old"), Sync(OTHER), Sync(FOLDER)]
    found = states([*RIGHT[:2], *old, *RIGHT[2:-1]])
    assert {tree["in/x"] for tree in found} == {b"old", b"n" * 5000}


def test_a_block_that_is_written_over_may_be_the_old_one_while_others_are_new():
    written = [*RIGHT, Write(FILE, 0, b"w" * 8192)]
    old = b"n" * 5000
    assert {old, b"w" * 8192, b"w" * 4096 + old[4096:], old[:4096] + b"w" * 904} <= {t["in/x"] for t in states(written)}


def test_removals_that_are_not_synced_may_be_undone_but_a_folder_goes_only_with_what_was_in_it():
    found = states([*RIGHT, Remove((FOLDER, "x")), Remove((TOP, "in"))])
    assert sorted(map(len, found)) == [0, 1, 2]
    assert {"in/x": b"n" * 5000} not in found


def test_changes_in_two_folders_are_in_no_order_by_posix_and_in_theirs_by_a_journal():
    links = [Link((FOLDER, "x"), (TOP, "first")), Link((FOLDER, "x"), (FOLDER, "second"))]
    for model, is_possible in ((POSIX, True), (JOURNAL, False)):
        names = [{*tree} for tree in states([*RIGHT, *links], model)]
        assert ({"in", "in/x", "in/second"} in names) is is_possible
        assert {"in", "in/x", "first"} in names


def test_syncing_a_file_makes_its_name_durable_in_a_journal_only():
    records = [*NEW_FOLDER, Sync(TOP), *TEMP, Sync(FILE)]
    assert [len(states(records, model)) for model in (POSIX, JOURNAL)] == [2, 1]


# --- the library --------------------------------------------------------------------------------------------------

_TRY_SOME = """
import sys
from pathlib import Path
from tests.matrices.power.power_slice import try_some
sys.exit(1 if try_some(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3] == "True") else 0)
"""
_TRY_REAL = """
import sys
from pathlib import Path
from tests.matrices.power.power_slice import cut_real_disk
sys.exit(1 if cut_real_disk(int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])) else 0)
"""


def test_nothing_acknowledged_is_lost_to_a_cut_and_each_kind_of_sync_is_needed(nursery, quick_path):
    ended = nursery.run(_TRY_SOME, PART, quick_path, ALL)
    assert ended.status == 0, ended.out + ended.err
    assert ended.out.count("nothing wrong") >= 3
    assert ended.out.count("is noticed") == 3


@pytest.mark.skipif(why_not() is not None, reason=why_not() or "")
def test_a_real_file_system_loses_nothing_acknowledged_when_it_is_shut_down(nursery, tmp_path):
    ended = nursery.run(_TRY_REAL, PART, tmp_path / "disk", 40 if ALL else 1)
    assert ended.status == 0, ended.out + ended.err
    assert "cuts" in ended.out
