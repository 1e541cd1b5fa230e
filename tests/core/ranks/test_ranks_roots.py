"""Where several ranks save: shared folders, stores, several roots; and roots that only look shared, or that others use too."""

from __future__ import annotations

import sys
import threading

import pytest
import torch
from racing import until
from rank_oracle import run_of, saved
from rank_states import numbered
from states import open_run

from async_ckpt import CheckpointError, CorruptCheckpointError, Place, verify
from async_ckpt.core.ranks.shared_root import SharedRoot
from async_ckpt.core.ranks.world import World
from async_ckpt.core.storage.local import LocalStorage

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks as Linux has them")

TWICE = """
with open_run({root}) as ckpt:
    for step in (1, 2):
        here.save(ckpt, small(step), step)
"""


def assert_committed(root: object, steps: list[int]) -> None:
    assert open_run(root).steps() == steps
    for step in steps:
        assert torch.equal(saved(root, step).tensors["model.cut"], numbered(41, 3) + step)


def test_a_store_is_a_root_like_any_other(worlds, s3, bucket):
    options = s3.options
    root = f"Place('s3://{bucket}/run', options={options})"
    ended = worlds.run(2, "from async_ckpt import Place\n" + TWICE.format(root=root))

    assert [save.get("status") for one in ended for save in one.saves] == ["committed"] * 4
    assert_committed(Place(f"s3://{bucket}/run", options=options), [1, 2])
    assert not [key for key in s3.keys(bucket) if "receipts" in key]


def test_several_roots_have_every_step_each(worlds, tmp_path):
    roots = [tmp_path / "a", tmp_path / "b"]
    ended = worlds.run(2, TWICE.format(root=f"{[str(root) for root in roots]}"))

    assert [save.get("status") for one in ended for save in one.saves] == ["committed"] * 4
    for root in roots:
        assert_committed(root, [1, 2])


SECOND_AWAY = """
from async_ckpt import StorageUnavailableError
from async_ckpt.core.storage.local import LocalStorage
put_new, failed = LocalStorage.put_new, []

def put(storage, path, data):
    is_second = path.endswith("00000001/manifest.json") and str(storage.root).endswith("b")
    if here.rank == 0 and is_second and not failed:
        failed.append(path)
        if {arrives}:
            put_new(storage, path, data)
        raise StorageUnavailableError("no answer", path=path)
    return put_new(storage, path, data)

LocalStorage.put_new = put
with open_run({roots}) as ckpt:
    for step in (1, 2):
        here.save(ckpt, small(step), step)
"""


@pytest.mark.parametrize("arrives", [False, True])
def test_ranks_do_not_wait_for_a_second_manifest_whose_put_has_failed(worlds, tmp_path, arrives):
    """All must have it, so the save has failed; it is committed at the first root, and the second is caught up."""
    roots = [tmp_path / "a", tmp_path / "b"]
    script = SECOND_AWAY.format(roots=[str(root) for root in roots], arrives=arrives)
    ended = worlds.run(3, script)

    for one in ended:
        told, later = one.saves
        assert told.get("error") == "StorageUnavailableError" or (arrives and one is not ended[0]), told
        assert later.get("status") == "committed"
    if not arrives:
        assert "committed at another root" in ended[1].saves[0]["text"]
    for root in roots:
        assert_committed(root, [1, 2])


def test_unchanged_groups_are_borrowed_at_each_of_several_roots(worlds, tmp_path):
    roots = [tmp_path / "a", tmp_path / "b"]
    script = f"""
with open_run({[str(root) for root in roots]}, keep=1) as ckpt:
    frozen = {{"t": spread(9, 9)}}
    for step in (1, 2, 3, 4):
        here.save(ckpt, {{**small(step), "frozen": frozen}}, step, unchanged=["frozen"])
"""
    ended = worlds.run(2, script)

    assert [save.get("status") for one in ended for save in one.saves] == ["committed"] * 8
    for root in roots:
        assert open_run(root).steps() == [1, 4]
        assert {one.step for one in run_of(root).manifest(4).elsewhere} == {1}


def test_saves_that_begin_together_claim_a_root_once_and_another_start_does_not(tmp_path):
    together = threading.Barrier(2, timeout=60)

    class Meeting(LocalStorage):
        def put_new(self, *arguments, **options):
            together.wait()
            return super().put_new(*arguments, **options)

    def at(storage):
        return SharedRoot(storage, "root/0", World(0, 2, "first"), lambda: "token", lambda: None)

    failed = []

    def claim():
        try:
            root.claim()
        except CheckpointError as error:
            failed.append(error)

    root = at(Meeting(tmp_path))
    saves = [threading.Thread(target=claim) for _ in range(2)]
    for save in saves:
        save.start()
    for save in saves:
        save.join(60)
    assert failed == []
    with pytest.raises(CheckpointError, match="run_id='first' was used by an earlier start"):
        at(LocalStorage(tmp_path)).claim()


# As where each node has a disk of its own. Rank 0 does not find the receipt of rank 1.
LOCAL = """
with open_run(f"{here.root}/node{here.rank}"{options}) as ckpt:
    state = small(1)
    {expire}
    here.save(ckpt, state, 1)
    here.save(ckpt, small(2), 2)
"""
EXPIRE = """
    here.at("looking again", lambda: here.say(f"waiting{here.rank}"))
    here.expire(lambda: here.is_said(f"waiting{here.rank}"))
"""


@pytest.mark.parametrize("text", [b"", b"[]", b'{"rank": 0}', b'{"rank": "0", "world_size": 2, "nonce": "x"}'])
def test_a_claim_that_nobody_can_read_is_refused_by_name(tmp_path, text):
    root = SharedRoot(LocalStorage(tmp_path), "root/0", World(1, 2, "first"), lambda: "token", lambda: None)
    (tmp_path / "world.token.json").write_bytes(text)
    with pytest.raises(CorruptCheckpointError, match=r"world\.token\.json: it is not the claim of a rank"):
        root.sees()


@pytest.mark.parametrize("has_group", [True, False])
def test_a_root_that_is_local_to_each_node_is_refused(worlds, has_group):
    """With a process group at once on all ranks; else when nothing was heard for long enough."""
    options = "" if has_group else ", ranks=(here.rank, here.size), run_id='first'"
    state = LOCAL.replace("small(1)", "{'a': numbered(9)}").replace("small(2)", "{'a': numbered(9)}")
    script = state.replace("{options}", options).replace("{expire}", "" if has_group else EXPIRE.strip())
    first, second = worlds.run(2, script, has_group=has_group)

    assert (first.saves[0]["error"], first.saves[0]["rank"]) == ("PeerFailedError", 1)
    assert f"{worlds.root}/node0 must be shared by all ranks" in first.saves[0]["text"]
    assert second.saves[0]["error"] == "PeerFailedError"
    seen = "rank 1 does not see there what rank 0 has written" if has_group else "rank 0 has not begun to write to"
    assert seen in second.saves[0]["text"]
    assert "a root that all ranks share" in second.saves[0]["text"].replace("Give", "give")
    assert [one.saves[1]["error"] for one in (first, second)] == ["PeerFailedError"] * 2
    for rank in (0, 1):
        assert open_run(worlds.root / f"node{rank}").steps() == []


# Two trainings have been given one folder. The second begins while the first is about to commit.
INTRUDER = """
with open_run(here.root) as ckpt:
    if "{who}" == "first" and here.rank == 0:
        here.at("manifest", lambda: (Path("{go}.wanted").touch(), until(Path("{go}").exists)), step=1)
    here.tell("ready") if here.rank else None
    here.save(ckpt, small(1), 1)
    here.save(ckpt, small(2 if "{who}" == "first" else 3), 2 if "{who}" == "first" else 3)
"""


def test_of_two_trainings_in_one_folder_the_first_goes_on_and_the_other_is_told_by_name(worlds, tmp_path):
    script = "from pathlib import Path\nfrom racing import until\n" + INTRUDER
    go = tmp_path / "go"
    first = worlds.start(2, script.format(who="first", go=go))
    until((tmp_path / "go.wanted").exists)
    second = worlds.start(2, script.format(who="second", go=go)).ended()
    go.touch()
    ended = first.ended()

    assert [save.get("status") for one in ended for save in one.saves] == ["committed"] * 4
    for number in (0, 1):
        told = [one.saves[number] for one in second]
        assert [one["error"] for one in told] == ["RunTakenError", "PeerFailedError"]
        assert f"process {first.children[0].pid} on" in told[0]["text"]
        assert "rank 0: RunTakenError" in told[1]["text"]
    assert_committed(worlds.root, [1, 2])


def test_a_world_of_another_size_goes_on(worlds):
    script = """
    with open_run(here.root) as ckpt:
        state = small(0)
        start = ckpt.restore(state)
        step = 1 if start is None else start + 1
        here.tell([start, float(state["model"]["whole"].min())])
        here.save(ckpt, small(step), step)
    """
    for size, start in ((2, [None, 0.0]), (3, [1, 1.0]), (2, [2, 2.0])):
        for one in worlds.run(size, script):
            assert one.told[0] == start
            assert one.saves[0].get("status") == "committed", one.saves
    assert_committed(worlds.root, [1, 2, 3])
    assert [saved(worlds.root, step).manifest.world_size for step in (1, 2, 3)] == [2, 3, 2]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_clock_that_is_hours_off_on_one_rank_changes_nothing(worlds, rank):
    """Nor does the next start, by a clock that is right again."""
    script = """
    from async_ckpt.face import checkpointer
    real = checkpointer.wall_time
    checkpointer.wall_time = lambda: real() + {seconds}
    with open_run(here.root, keep=2) as ckpt:
        for step in {steps}:
            here.save(ckpt, small(step), step)
    """
    seconds = f"(5 * 3600 if here.rank == {rank} else 0)"
    first = worlds.run(2, script.format(seconds=seconds, steps=[1, 2]))
    second = worlds.run(2, script.format(seconds=0, steps=[3]))

    assert [save.get("status") for one in (*first, *second) for save in one.saves] == ["committed"] * 6
    assert_committed(worlds.root, [2, 3])


MISTAKEN = """
from racing import until
from async_ckpt.core.ranks import agreement
from async_ckpt.core.runs.receipts import Exchange

# Rank 1 puts its mistaken receipt at one root when it has learned of its mistake at the other, and waits for that
# receipt; or when it has taken back its receipts without a wait.
begin, put, withdraw, clock = agreement.Agreement._put_receipt, Exchange.put_receipt, Exchange.withdraw, agreement.monotonic
mistaken, looks, withdrawn = [], [], []
def begun(self, *receipt):
    if here.rank == 1 and self._joint.step == 7:
        mistaken.append(self._joint)
    begin(self, *receipt)
def late(self, *receipt):
    if mistaken and self.storage.locate("").rstrip("/").endswith("/b"):
        until(lambda: len(looks) > 1 or self in withdrawn)
    put(self, *receipt)
def noted(self, rank):
    withdraw(self, rank)
    withdrawn.append(self)
def looked_at():
    if mistaken and mistaken[0].instead is not None:
        looks.append(clock())
    return clock()
agreement.Agreement._put_receipt, agreement.monotonic = begun, looked_at
Exchange.put_receipt, Exchange.withdraw = late, noted

with open_run({roots}, commit={commit!r}, max_in_flight=2) as ckpt:
    here.save(ckpt, small(1), 1)
    here.save(ckpt, small(2), 2 if here.rank == 0 else 7)
    here.save(ckpt, small(7), 7)
    here.save(ckpt, small(8), 8)
"""


@pytest.mark.parametrize("commit", ["all", "any"])
def test_a_rank_that_saves_another_step_leaves_no_receipt_at_any_of_several_roots(worlds, tmp_path, commit):
    """The next attempt at that step has the same name: a receipt that is left would be taken for a part of it."""
    roots = [tmp_path / "a", tmp_path / "b"]
    ended = worlds.run(2, MISTAKEN.format(roots=[str(root) for root in roots], commit=commit))

    for one in ended:
        assert [save.get("status", save.get("error", "failed")) for save in one.saves][2:] == ["committed"] * 2, (
            one.saves
        )
        assert one.saves[1].get("status") != "committed"
    for root in roots:
        assert open_run(root).steps() == [1, 7, 8]
        assert verify(root).steps == (1, 7, 8)
        assert list(root.glob("step_00000007/receipts.*")) == []
