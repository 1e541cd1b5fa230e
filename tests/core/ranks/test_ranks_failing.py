"""A rank cannot do its part of a save, or not in time: all of them learn why, and the next save is none the worse."""

import pytest
import torch
import torch.distributed as dist
from racing import Thrown
from rank_oracle import saved
from rank_states import numbered
from rank_worlds import Ended, Worlds
from states import open_run

from async_ckpt.core.ranks import rendezvous
from async_ckpt.core.ranks.calls import Calls, JointSave
from async_ckpt.core.ranks.meeting import Meeting
from async_ckpt.core.ranks.rendezvous import Rendezvous


def column(ended: list[Ended], save: int, key: str) -> list:
    """What each rank was told of one of its saves."""
    return [one.saves[save].get(key) for one in ended]


def assert_whole(worlds: Worlds, *steps: int) -> None:
    """These are committed, and nothing is left of attempts at them that failed."""
    assert open_run(worlds.root).steps() == list(steps)
    for step in steps:
        found = saved(worlds.root, step)
        assert torch.equal(found.tensors["model.cut"], numbered(41, 3) + step)
        there = {path.name for path in (worlds.root / f"step_{step:08d}").iterdir()}
        assert there == {"manifest.json", *found.manifest.own_names}


RAISING = """
with open_run(here.root) as ckpt:
    for step in (1, 2, 3):
        state = small(step)
        if here.rank == 1 and step == {step}:
            state["lost"] = torch.empty(3, device="meta")
        here.save(ckpt, state, step)
"""


@pytest.mark.parametrize("step", [1, 2])
def test_what_one_rank_cannot_save_is_told_to_all(worlds, step):
    """In the first save the other ranks wait for its structure; later, for its receipt."""
    ended = worlds.run(2, RAISING.format(step=step))

    assert column(ended, step - 1, "error") == ["PeerFailedError", "UnsupportedStateError"]
    assert column(ended, step - 1, "raised_by") == ["handle", "save"]
    assert ended[0].saves[step - 1]["rank"] == 1
    assert "rank 1: UnsupportedStateError: lost" in ended[0].saves[step - 1]["text"]
    assert_whole(worlds, *sorted({1, 2, 3} - {step}))


AT_A_POINT = """
from async_ckpt import StorageFullError
error = StorageFullError("no room here", path="x", needed_bytes=1, free_bytes=0)
with open_run(here.root) as ckpt:
    if here.rank == {rank}:
        here.at("{point}", lambda: here.fail(error), step=2)
    for step in (1, 2, 3):
        here.save(ckpt, small(step), step)
"""


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_whose_disk_is_full_is_named_to_all_others(worlds, rank):
    ended = worlds.run(3, AT_A_POINT.format(rank=rank, point="write"))

    want = ["PeerFailedError"] * 3
    want[rank] = "StorageFullError"
    assert column(ended, 1, "error") == want
    for other in {0, 1, 2} - {rank}:
        assert f"rank {rank}: StorageFullError: no room here" in ended[other].saves[1]["text"]
        assert ended[other].saves[1]["rank"] == rank
        assert not ended[other].saves[1]["undecided"]
    assert_whole(worlds, 1, 3)


# As a file system that is mounted read-only there.
READ_ONLY = """
import errno
from async_ckpt import StorageUnavailableError
error = StorageUnavailableError("read-only file system", path="x")
with open_run(here.root) as ckpt:
    here.save(ckpt, small(1), 1)
    if here.rank == {rank}:
        for point in ("write", "manifest"):
            here.at(point, lambda: here.fail(error), step=2)
    for step in (2, 3):
        here.save(ckpt, small(step), step)
"""


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_can_write_nothing_at_the_root_says_so_to_the_others_at_once(worlds, rank):
    ended = worlds.run(2, READ_ONLY.format(rank=rank))

    want = ["PeerFailedError"] * 2
    want[rank] = "StorageUnavailableError"
    assert column(ended, 1, "error") == want
    assert f"rank {rank}: StorageUnavailableError: read-only" in ended[1 - rank].saves[1]["text"]
    assert ended[1 - rank].saves[1]["rank"] == rank
    assert not ended[1 - rank].saves[1]["undecided"]
    assert column(ended, 2, "status") == ["committed"] * 2


# Rank 1's archive is there. What rank 0 puts from then on lies in a folder that it makes anew.
DELETED = """
import shutil
def delete():
    here.wait_for_others()
    shutil.rmtree(os.path.join(here.root, "step_00000002"))
with open_run(here.root) as ckpt:
    here.save(ckpt, small(1), 1)
    if here.rank == 0:
        here.at("{point}", delete, step=2)
    for step in (2, 3):
        here.save(ckpt, small(step), step)
"""


@pytest.mark.parametrize("point", ["write", "receipt", "after receipt"])
def test_a_folder_that_is_deleted_while_ranks_write_there_fails_that_save_at_once(worlds, point):
    """A manifest would name archives that are gone."""
    ended = worlds.run(2, DELETED.format(point=point))

    assert None not in column(ended, 1, "error")
    assert not any(column(ended, 1, "undecided"))
    assert column(ended, 2, "status") == ["committed"] * 2


# Rank 0's verdict goes with the folder.
UNHEARD = """
import shutil
from async_ckpt import StorageFullError
def fail():
    here.wait_for_others()
    here.fail(StorageFullError("no room here", path="x"))
def delete():
    shutil.rmtree(os.path.join(here.root, "step_00000002"))
with open_run(here.root) as ckpt:
    here.save(ckpt, small(1), 1)
    if here.rank == 0:
        here.at("receipt", fail, step=2)
        here.at("after verdict", delete, step=2)
    for step in (2, 3):
        here.save(ckpt, small(step), step)
"""


def test_a_verdict_that_is_deleted_is_heard_all_the_same(worlds):
    ended = worlds.run(2, UNHEARD)

    assert column(ended, 1, "error") == ["StorageFullError", "PeerFailedError"]
    assert "rank 0: StorageFullError: no room here" in ended[1].saves[1]["text"]
    assert column(ended, 2, "status") == ["committed"] * 2


# The receipt of rank 1 has arrived, and rank 0 has seen it, when rank 1 is told that it was lost.
IN_DOUBT = """
from async_ckpt import StorageUnavailableError
def lose():
    if not here.is_said("lost"):
        here.hear("seen")
        here.say("lost")
        here.fail(StorageUnavailableError("no answer came", path="x"))
def wait():
    here.say("seen")
    here.hear("ended")
with open_run(here.root) as ckpt:
    here.save(ckpt, small(1), 1)
    here.at("manifest" if here.rank == 0 else "after receipt", wait if here.rank == 0 else lose, step=2)
    here.save(ckpt, small(2), 2)
    here.say("ended" if here.rank == 1 else "committed")
    here.save(ckpt, small(3), 3)
"""


def test_an_archive_stays_whose_receipt_may_have_arrived(worlds):
    ended = worlds.run(2, IN_DOUBT)

    assert column(ended, 1, "status") == ["committed", None]
    assert column(ended, 1, "error") == [None, "StorageUnavailableError"]
    assert column(ended, 2, "status") == ["committed"] * 2
    assert_whole(worlds, 1, 2, 3)


# Rank 1 is ready when rank 0 has given up already.
LATE = """
with open_run(here.root) as ckpt:
    here.save(ckpt, small(1), 1)
    if here.rank == 1:
        here.at("receipt", lambda: here.hear("no"), step=2)
    if here.rank == 0:
        here.at("after verdict", lambda: here.say("no"))
        here.expire(lambda: not here.is_said("no"))
    here.save(ckpt, small(2), 2)
    here.meet("told")
    here.save(ckpt, small(2), 2)
"""


def test_what_comes_too_late_is_refused_and_the_step_may_be_saved_again(worlds):
    ended = worlds.run(2, LATE)

    assert column(ended, 1, "error") == ["PeerFailedError"] * 2
    assert column(ended, 1, "rank") == [1] * 2
    assert column(ended, 1, "undecided") == [False] * 2
    assert column(ended, 2, "status") == ["committed"] * 2
    assert_whole(worlds, 1, 2)


# Rank 1 gives up at the moment when rank 0 is about to commit.
RACE = """
with open_run(here.root) as ckpt:
    if here.rank == 0:
        here.at("manifest", lambda: (here.say("committing"), here.hear("given up")), step=1)
    if here.rank == 1:
        here.expire(lambda: here.is_said("committing") and not here.is_said("given up"))
    here.save(ckpt, small(1), 1)
    here.say("given up")
    here.meet("told")
    here.save(ckpt, small(1), 1, overwrite=True)
    here.save(ckpt, small(2), 2)
"""


def test_who_gives_up_while_rank_0_commits_is_undecided_and_deletes_nothing(worlds):
    ended = worlds.run(2, RACE)

    assert column(ended, 0, "status") == ["committed", None]
    assert ended[1].saves[0]["undecided"]
    assert "It may be" in ended[1].saves[0]["text"]
    assert column(ended, 2, "status") == ["committed"] * 2
    assert_whole(worlds, 1, 2)


# What goes wrong on rank 0 before it puts the manifest is a sure no.
DRIVER = """
with open_run(here.root) as ckpt:
    if here.rank == 0:
        {what}
    for step in (1, 2, 3):
        here.save(ckpt, small(step), step, driver={driver})
"""


@pytest.mark.parametrize(
    ("what", "driver", "error"),
    [
        (
            "here.at('driver', lambda: here.fail(OSError('broken')), step=2)",
            '{"a": 1} if here.rank == 0 else None',
            "OSError: broken",
        ),
        (
            "pass",
            '{"a": 1 if step != 2 else (lambda: 1)} if here.rank == 0 else None',
            "UnsupportedStateError",
        ),
    ],
)
def test_a_driver_that_cannot_be_written_fails_the_save_of_all(worlds, what, driver, error):
    ended = worlds.run(2, DRIVER.format(what=what, driver=driver))

    assert ended[1].saves[1]["error"] == "PeerFailedError"
    assert f"rank 0: {error}" in ended[1].saves[1]["text"]
    assert not ended[1].saves[1]["undecided"]
    assert_whole(worlds, 1, 3)


AWAY = """
from async_ckpt import StorageUnavailableError
with open_run(here.root) as ckpt:
    if here.rank == 1:
        def refuse():
            if not here.is_said("refused"):
                here.say("refused")
                raise StorageUnavailableError("not now", path="x")
        here.at("decision", refuse)
    here.save(ckpt, small(1), 1)
"""


def test_a_root_that_is_away_while_the_decision_is_waited_for_is_asked_again(worlds):
    ended = worlds.run(2, AWAY)

    assert column(ended, 0, "status") == ["committed"] * 2


LOST = """
from async_ckpt import StorageUnavailableError
with open_run(here.root, max_in_flight={most}) as ckpt:
    here.save(ckpt, small(1), 1)
    if here.rank == 0:
        here.at("after manifest", lambda: here.fail(StorageUnavailableError("no answer", path="x")), step=2)
    for step in (2, 3, 4, 5):
        here.save(ckpt, small(step), step)
"""


@pytest.mark.parametrize("most", [1, 2])
def test_a_manifest_that_is_there_though_its_answer_was_lost_is_known_to_all_ranks_and_later_saves_commit(worlds, most):
    ended = worlds.run(2, LOST.format(most=most))

    assert ended[0].saves[1]["error"] == "StorageUnavailableError"
    assert ended[1].saves[1]["status"] == "committed"
    for number in (2, 3, 4):
        assert column(ended, number, "status") == ["committed"] * 2
    assert_whole(worlds, 1, 2, 3, 4, 5)


STRICT = """
with open_run(here.root, strict=True) as ckpt:
    here.save(ckpt, small(1), 1)
    if here.rank == 1:
        here.at("write", lambda: here.fail(OSError("broken")), step=2)
    handle = ckpt.save(small(2), 2)
    if here.rank == 0:
        handle.exception()
    else:
        handle.staging_completion.exception()
        until(handle.done)
    here.save(ckpt, small(3), 3)
    here.save(ckpt, small(4), 4)
"""


def test_a_save_that_is_not_even_begun_on_one_rank_is_told_to_all(worlds):
    """Under `strict`, the rank that has not looked at its error raises it at the next save."""
    ended = worlds.run(2, "from racing import until\n" + STRICT)

    assert column(ended, 1, "raised_by") == ["handle", "save"]
    assert "rank 1: OSError: broken" in ended[0].saves[1]["text"]
    assert_whole(worlds, 1, 4)


def test_a_rank_whose_save_has_failed_does_not_wait_for_rank_0_to_make_the_call(monkeypatch):
    """Nor is rank 0 blamed, though its time is over in the same moment."""
    monkeypatch.setattr(rendezvous, "PEER_SECONDS", 0.0)
    meeting = Meeting((1, 2), store=dist.HashStore())
    joint = JointSave(2)
    calls = Calls(meeting, 1, lambda _: None)
    calls.enter(joint)

    def has_failed() -> None:
        raise Thrown

    with pytest.raises(Thrown):
        Rendezvous(meeting, calls, joint).wait_named(has_failed)


NO_MANIFEST = """
from async_ckpt import StorageFullError, StorageUnavailableError
with open_run(here.root) as ckpt:
    here.save(ckpt, small(1), 1)
    if here.rank == 0:
        here.at("manifest", lambda: here.fail({error}("not now", path="x")), step=2)
    here.save(ckpt, small(2), 2)
    here.meet("told")
"""


@pytest.mark.parametrize(
    ("error", "undecided", "says"),
    [
        ("StorageFullError", False, "not now"),
        ("StorageUnavailableError", True, "rank 0 cannot say whether it is committed"),
    ],
)
def test_who_waits_for_a_manifest_that_rank_0_could_not_put_is_told_so_at_once(worlds, error, undecided, says):
    """A full disk has no manifest; after any other error it may be there, or come."""
    ended = worlds.run(2, NO_MANIFEST.format(error=error))

    assert ended[0].saves[1]["error"] == error
    assert ended[1].saves[1]["undecided"] is undecided
    assert says in ended[1].saves[1]["text"]
