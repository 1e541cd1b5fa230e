"""What a start has seen: the orders of requests in which a process is overtaken, each forced by letting it go on to one request."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from interleaved import Objects, Process, line

from async_ckpt import RunTakenError, StepExistsError
from async_ckpt.core.runs import run
from async_ckpt.core.runs.manifest import Manifest, seal, unseal
from async_ckpt.core.runs.starts import Line, Seen, Start, split_starts

Begin = Callable[..., Process]


@pytest.fixture
def objects(monkeypatch: pytest.MonkeyPatch) -> Objects:
    monkeypatch.setattr(run, "_SEEN_PAUSE_SECONDS", 0)
    return Objects()


@pytest.fixture
def begin(objects: Objects) -> Iterator[Begin]:
    """Begin a process that saves the newest step that it finds and so many more; tokens ascend."""
    begun: list[Process] = []

    def begin(*steps: int, retire: bool = False, overwrite: bool = False, token: str = "") -> Process:
        token = token or f"{len(begun):08x}"
        begun.append(Process(objects, steps, retire=retire, overwrite=overwrite, token=token))
        return begun[-1]

    yield begin
    for one in begun:
        one.kill()


def go_to(process: Process, at: str) -> Process:
    """Let it go on until it is about to make this request."""
    while not process.at.startswith(at):
        assert process.go(), f"it has ended: {process.errors}"
    return process


def go_past(process: Process, at: str) -> Process:
    go_to(process, at).go()
    return process


def told(process: Process) -> list[int]:
    return [made.step for made in process.acknowledged]


def steps(objects: Objects) -> list[int]:
    return [made.step for made in line(objects)]


def assert_undecided(process: Process) -> None:
    assert [(type(one), one.undecided) for one in process.errors] == [(RunTakenError, True)]


def fields_of(objects: Objects, number: int) -> dict[str, Any]:
    (name,) = (name for name in objects.data if name.startswith(f"start-{number:08d}") and name.endswith(".seen"))
    return unseal(objects.data[name][0])


# --- what it says ------------------------------------------------------------------------------------------------


def test_a_start_says_what_it_has_seen_before_it_writes_anything_else(objects, begin):
    begin(2, 4, 6).finish()
    late = go_to(begin(8), "replace step_")
    names = sorted(name for name in objects.data if name.startswith("start-"))
    assert [name.rpartition(".")[2] for name in names] == ["json", "seen"] * 2
    assert fields_of(objects, 1)["steps"] == []
    assert fields_of(objects, 2)["steps"] == [[1, 3, 2]]
    assert fields_of(objects, 2)["attempts"].keys() == {"1", "3", "5"}
    late.finish()
    assert told(late) == [13]


def test_what_a_start_has_seen_stays_small_however_many_steps_there_are():
    commits = dict.fromkeys(range(0, 500_000, 100), "0123abcd")
    objects = Objects()
    one = Process(objects, [1], retire=False)
    one.run.see = lambda own: ([], commits)  # type: ignore[method-assign]
    one.finish()
    (name,) = (name for name in objects.data if name.endswith(".seen"))
    assert len(objects.data[name][0]) < 2000


# --- the overtaken one ---------------------------------------------------------------------------------------------


def test_a_save_that_the_next_start_has_seen_is_committed_though_the_run_is_taken(objects, begin):
    old = go_past(begin(1, 2), "put_new step_00000000/manifest.json")
    new = go_past(begin(1), "put_new start-00000002.00000001.1.seen")
    old.finish()
    assert told(old) == [0]
    assert [type(error) for error in old.errors] == [RunTakenError]  # the next save
    assert not old.errors[0].undecided
    new.finish()
    assert steps(objects) == [0, 1]


@pytest.mark.parametrize("new_commits_first", [False, True])
def test_a_save_that_the_next_start_has_not_seen_is_undecided_and_does_not_count_once_that_one_has_committed(
    objects, begin, new_commits_first
):
    old = go_to(begin(4), "put_new step_00000003/manifest.json")
    new = go_past(begin(1), "put_new start-00000002.00000001.0.seen")
    if new_commits_first:
        new.finish()
    old.finish()
    assert_undecided(old)
    assert steps(objects) == ([0] if new_commits_first else [3])
    new.finish()
    assert (told(new), steps(objects)) == ([0], [0])


def test_a_start_that_has_not_said_yet_what_it_has_seen_is_waited_for(objects, begin):
    old = go_past(begin(1), "put_new step_00000000/manifest.json")
    new = go_to(begin(1), "put_new start-00000002.00000001.1.seen")
    for _ in range(10):
        old.go()
    assert (told(old), old.at) == ([], "names ")
    new.go()
    old.finish()
    assert told(old) == [0]


def test_one_that_never_says_it_leaves_the_save_undecided(objects, begin):
    old = go_past(begin(1), "put_new step_00000000/manifest.json")
    go_to(begin(1), "put_new start-00000002.00000001.1.seen").kill()
    old.finish()
    assert_undecided(old)
    assert steps(objects) == [0]


@pytest.mark.parametrize("first", [0, 1])
def test_of_two_starts_of_one_number_the_later_token_goes_on_whichever_file_comes_first(objects, begin, first):
    both = [go_to(begin(1), f"put_new start-00000001.{token:08x}") for token in (0, 1)]
    both[first].go()
    both[1 - first].go()
    for one in both:
        one.finish()
    assert (told(both[0]), told(both[1])) == ([], [0])
    assert [type(error) for error in both[0].errors] == [RunTakenError]
    assert steps(objects) == [0]


def test_a_start_that_was_killed_before_it_said_what_it_has_seen_holds_nobody_up(objects, begin):
    old = go_to(begin(4), "put_new step_00000003/manifest.json")
    go_to(begin(1), "put_new start-00000002.00000001.0.seen").kill()
    new = begin(1, 2)
    new.finish()
    assert told(new) == [0, 1]
    assert fields_of(objects, 2)["by"] == "00000003.00000002"
    old.finish()
    assert_undecided(old)
    assert steps(objects) == [0, 1]


def test_a_start_that_wakes_after_the_next_one_has_said_so_for_it_has_lost_the_run(objects, begin):
    slow = go_to(begin(1), "put_new start-00000001.00000000.0.seen")
    new = begin(1)
    new.finish()
    slow.finish()
    (error,) = slow.errors
    assert isinstance(error, RunTakenError)
    assert "has taken the run over (start 2)" in str(error)
    assert not error.undecided
    assert (told(slow), told(new), steps(objects)) == ([], [0], [0])


def test_a_start_whose_word_another_has_put_has_lost_the_run_even_if_that_one_has_left_it(objects, begin):
    """As a command that deletes steps does."""
    slow = go_to(begin(1), "put_new start-00000001.00000000.0.seen")
    go_past(begin(1), "put_new start-00000002.00000001.0.seen").kill()
    for name in [name for name in objects.data if name.startswith("start-00000002")]:
        del objects.data[name]
    slow.finish()
    assert [type(error) for error in slow.errors] == [RunTakenError]
    assert objects.manifests == []


def test_a_process_that_takes_the_run_again_has_lost_it_to_one_that_came_in_between(objects, begin):
    """Though the file that it puts then is later than that one's, by its token."""
    old = go_to(begin(4, 1, retire=True, token="f" * 8), "put_new start-00000002")
    new = begin(1, 2)
    new.finish()
    old.finish()
    assert told(old) == [3]
    assert [type(error) for error in old.errors] == [RunTakenError]
    assert [name for name in objects.data if name.startswith("start-00000002.f")] == []
    assert (told(new), steps(objects)) == ([4, 5], [3, 4, 5])


# --- three starts, rollbacks, replacements --------------------------------------------------------------------------


def test_of_three_starts_the_last_one_goes_on_from_what_the_second_has_not_seen_if_that_has_not_committed(
    objects, begin
):
    old = go_to(begin(1), "put_new step_00000000/manifest.json")
    second = go_to(begin(1), "put_new step_00000000/manifest.json")
    old.finish()
    assert_undecided(old)
    third = go_past(begin(1), "put_new start-00000003.00000002.1.seen")
    second.finish()  # which may not replace what the third one goes on from
    assert told(second) == []
    third.finish()
    assert (told(third), steps(objects)) == ([1], [0, 1])
    assert line(objects)[0].start == "00000001.00000000"


def test_a_start_puts_its_step_in_the_place_of_one_that_does_not_count(objects, begin):
    old = go_to(begin(1), "put_new step_00000000/manifest.json")
    new = go_to(begin(1), "put_new step_00000000/manifest.json")
    old.finish()
    new.finish()
    assert (told(old), told(new)) == ([], [0])
    assert [made.start for made in line(objects)] == ["00000002.00000001"]
    assert len([name for name in objects.data if name.endswith(".tar")]) == 1
    assert not [name for name in objects.data if name.startswith("rollback-")]


def test_a_replacement_that_comes_after_the_next_start_has_seen_the_step_is_refused(objects, begin):
    begin(1).finish()
    old = go_to(begin(0, overwrite=True), "replace step_00000000/manifest.json")
    new = begin(1)
    new.finish()
    before = line(objects)
    old.finish()
    assert [type(error) for error in old.errors] == [StepExistsError]
    assert line(objects) == before
    assert [made.attempt for made in before] == [
        objects.manifests[0].attempt,
        *(made.attempt for made in new.acknowledged),
    ]


def test_one_that_has_come_before_is_what_the_next_start_has_seen(objects, begin):
    begin(1).finish()
    old = go_past(begin(0, overwrite=True), "replace step_00000000/manifest.json")
    begin(1).finish()
    old.finish()
    assert told(old) == [0]
    assert line(objects)[0].attempt == old.acknowledged[0].attempt


def test_a_rollback_that_the_next_start_has_not_seen_retires_nothing(objects, begin):
    begin(2, 4, 9).finish()
    old = go_to(begin(-2, retire=True), "put_new step_00000006/manifest.json")
    new = go_past(begin(1), "put_new start-00000003.00000002.9.seen")
    old.finish()
    assert_undecided(old)
    assert steps(objects) == [1, 3, 6]  # until the next start has committed
    go_past(new, "put_new step_00000009/manifest.json")
    assert steps(objects) == [1, 3, 8, 9]
    new.finish()
    assert (told(new), steps(objects)) == ([9], [1, 3, 8, 9])


def test_a_step_that_was_deleted_is_not_committed_anew_by_one_that_had_found_it_free(objects, begin):
    first = go_to(begin(1), "put_new step_00000000/manifest.json")
    second = go_to(begin(1), "put_new step_00000000/manifest.json")
    first.finish()
    third = begin(1, 2)
    third.finish()
    del objects.data["step_00000000/manifest.json"]  # as retention does
    second.finish()
    assert_undecided(second)
    assert (told(third), steps(objects)) == ([1, 2], [1, 2])


def test_what_a_rollback_leaves_out_stays_out_for_the_start_before_it(objects, begin):
    old = go_to(begin(1, 4, 7), "put_new step_00000006/manifest.json")
    new = begin(-2, retire=True)
    new.finish()
    old.finish()
    assert told(old) == [0, 3]
    assert_undecided(old)
    assert (told(new), steps(objects)) == ([1], [0, 1])


# --- the rule ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{}",
        seal({}),
        seal({"steps": [[1, 2]], "attempts": {}}),
        seal({"steps": [[1, 2, 0]], "attempts": {}}),
        seal({"steps": [[1, -2, 1]], "attempts": {}}),
        seal({"steps": [], "attempts": {"9" * 5000: "0123abcd"}}),
        seal({"steps": [], "attempts": {"1": 5}}),
        seal({"steps": 5, "attempts": {}}),
        seal({"steps": [], "attempts": []}),
    ],
)
def test_a_damaged_one_says_nothing(text):
    assert Seen.parse(text) is None


def test_a_hostile_one_costs_no_memory():
    seen = Seen.parse(seal({"steps": [[0, 2**62, 1], [5, 2**62, 2**62]], "attempts": {}}))
    assert seen is not None
    assert seen.has(2**61, None) in (True, False)


def test_without_a_word_of_what_it_has_seen_a_start_has_seen_the_steps_below_its_own():
    """As in runs of older versions, and where the file is damaged."""
    starts = [Start(1, "a" * 8), Start(2, "b" * 8, 3)]
    commits = {step: Manifest(step, f"{step:08x}", 1, 0.0, (), start=starts[step == 3].label) for step in (1, 3, 5)}
    for has_seen in (False, True):
        told = [starts[0], Start(2, "b" * 8, 3, has_seen=has_seen)]
        assert Line([1, 3, 5], told, commits.get).out([1, 3, 5]) == {5: commits[5].attempt}


def test_one_file_is_no_start_without_the_other():
    both = ["start-00000008.5f3a9c01.500.json", "start-00000008.5f3a9c01.500.seen"]
    assert [start.has_seen for start in split_starts(both)[1]] == [True]
    assert [start.has_seen for start in split_starts(both[:1])[1]] == [False]
    assert split_starts(both[1:]) == ([], [])
