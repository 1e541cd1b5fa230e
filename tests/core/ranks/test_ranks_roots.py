"""Where several ranks save: shared folders, stores, several roots; and roots that only look shared, or that others use too."""

import pytest
import torch
from racing import until
from rank_oracle import saved
from rank_states import numbered
from rank_worlds import AGENT_STORE
from states import open_run

from async_ckpt import Place, verify

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


GONE = """
state = {{"ref": {{"w": numbered(9)}}, "model": {{"w": numbered(7)}}}}
with open_run({root}) as ckpt:
    here.save(ckpt, state, 1)
with open_run({root}) as ckpt:
    ckpt.restore(state)
    if here.rank:
        here.say("restored")
    else:
        here.hear("restored")
        files.remove({step})
    for step in (2, 3):
        here.save(ckpt, state, step, unchanged=["ref"])
    here.save(ckpt, state, 4)
"""


def test_no_rank_alone_forgets_that_it_may_borrow_from_a_restored_step_that_is_gone(worlds, s3, bucket):
    root, step = (f"Place('s3://{bucket}/run{path}', options={s3.options})" for path in ("", "/step_00000001"))
    ended = worlds.run(2, "from async_ckpt import Place, files\n" + GONE.format(root=root, step=step))

    for one in ended:
        assert [save.get("status") for save in one.saves] == ["committed", None, None, "committed"]
    assert ["borrows ref from step 1" in save["text"] for save in ended[0].saves[1:3]] == [True, True]


# As where each node has a disk of its own.
LOCAL = """
with open_run(f"{here.root}/node{here.rank}"{options}) as ckpt:
    here.save(ckpt, {"a": numbered(9)}, 1)
    here.save(ckpt, {"a": numbered(9)}, 2)
"""


@pytest.mark.parametrize("has_group", [True, False])
def test_a_root_that_is_local_to_each_node_is_refused(worlds, has_group):
    options = "" if has_group else f", ranks=(here.rank, here.size), store={AGENT_STORE}"
    first, second = worlds.run(2, LOCAL.replace("{options}", options), has_group=has_group)

    assert (first.saves[0]["error"], first.saves[0]["rank"]) == ("PeerFailedError", 1)
    assert f"{worlds.root}/node0 must be shared by all ranks" in first.saves[0]["text"]
    assert second.saves[0]["error"] == "PeerFailedError"
    assert f"the archive of rank 1 is not in {worlds.root}/node0" in second.saves[0]["text"]
    assert "Give a root that all ranks share" in first.saves[0]["text"]
    assert [one.saves[1]["error"] for one in (first, second)] == ["PeerFailedError"] * 2
    for rank in (0, 1):
        assert open_run(worlds.root / f"node{rank}").steps() == []
        assert list((worlds.root / f"node{rank}").glob("step_*/*")) == []


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
states = [small(step) for step in range(9)]
with open_run({roots}, max_in_flight=2) as ckpt:
    for step in [(1, 2, 7, 8), (1, 7, 7, 8)][here.rank]:
        here.save(ckpt, states[step], step)
"""


def test_a_rank_that_saves_another_step_leaves_nothing_at_any_of_several_roots(worlds, tmp_path):
    """Its call belongs to that of rank 0 which has the same step, and nothing is taken for a part of another."""
    roots = [tmp_path / "a", tmp_path / "b"]
    first, second = worlds.run(2, MISTAKEN.format(roots=[str(root) for root in roots]))

    assert [save.get("status") for save in first.saves] == ["committed", None, "committed", "committed"]
    assert [save.get("status") for save in second.saves] == ["committed", "committed", None, "committed"]
    assert "rank 1: it has made no call for step 2; make the same calls on every rank" in first.saves[1]["text"]
    assert "only rank 1 has made this call" in second.saves[2]["text"]
    assert_committed(roots[0], [1, 7, 8])
    assert open_run(roots[1]).latest() == 8
    for root in roots:
        assert verify(root).steps == tuple(open_run(root).steps())
        assert list(root.glob("step_*/receipts.*")) == []
        assert list(root.glob("step_00000002/*")) == []
