"""Which rank of how many a process is: by its process group, by its user's word, or alone whatever its launcher has set."""

import warnings

import pytest
import torch
import torch.distributed as dist
from scripted_disk import scripted
from states import open_run, save_into, state_at

import async_ckpt
from async_ckpt import StepExistsError
from async_ckpt.core.ranks.world import ranks


def test_one_rank_of_a_process_group_saves_alone_when_it_says_so(worlds):
    script = """
    model = ddp()["model"]
    if here.rank == 0:
        with open_run(here.root, ranks=(0, 1)) as ckpt:
            here.save(ckpt, {"model": model}, 1)
    """
    first, _ = worlds.run(2, script)

    assert first.saves == [{"step": 1, "status": "committed"}]
    assert len(open_run(worlds.root).load()["model"]) == 6


def test_ranks_with_a_root_each_save_side_by_side_when_they_say_so(worlds):
    script = """
    with open_run(f"{here.root}/rank{here.rank}", ranks=(0, 1)) as ckpt:
        here.save(ckpt, {"whole": numbered(3)}, 1)
    """
    for one in worlds.run(2, script):
        assert one.saves == [{"step": 1, "status": "committed"}]
    assert [open_run(worlds.root / f"rank{rank}").steps() for rank in (0, 1)] == [[1], [1]]


def test_what_the_launcher_has_set_tells_of_ranks_too(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    with open_run(tmp_path) as one, open_run(tmp_path) as two:
        one.save(state_at(1), step=1).result()

        with pytest.raises(StepExistsError, match="This is rank 3 of 8") as caught:
            two.save(state_at(1), step=1)
        assert caught.value.step == 1
        with pytest.raises(StepExistsError) as own:
            one.save(state_at(1), step=1)
        assert "rank" not in str(own.value)  # it was this very checkpointer that has committed it


def test_a_file_that_every_rank_may_write_is_warned_of_once(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "8")
    for rank, expected in ((0, 0), (3, 1)):
        monkeypatch.setenv("RANK", str(rank))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("default")
            for i in range(2):
                async_ckpt.save(state_at(i), tmp_path / f"{i}.tar").result()
        assert len(caught) == expected
    assert "this is rank 3 of 8" in str(caught[0].message)
    assert "Save on rank 0 alone" in str(caught[0].message)
    assert caught[0].filename == __file__


@pytest.mark.parametrize(
    ("rank", "world_size", "what"),
    [
        (
            "4",
            "4",
            "RANK=4 and WORLD_SIZE=4 in the environment contradict each other: the ranks of 4 processes are 0 to 3",
        ),
        ("-1", "4", "RANK=-1 and WORLD_SIZE=4 in the environment contradict each other"),
        ("0", "0", "RANK=0 and WORLD_SIZE=0 in the environment contradict each other"),
        ("one", "2", "RANK and WORLD_SIZE in the environment must be numbers: .*'one'"),
    ],
)
def test_what_no_launcher_sets_is_refused(tmp_path, monkeypatch, rank, world_size, what):
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", world_size)
    with open_run(tmp_path) as ckpt, pytest.raises(ValueError, match=what):
        ckpt.save(state_at(1), step=1)
    save_into(tmp_path, 1, ranks=(0, 1))


@pytest.mark.parametrize(
    ("given", "error", "what"),
    [
        ({"ranks": (4, 4), "store": dist.HashStore()}, ValueError, "the ranks of 4 processes are 0 to 3"),
        ({"ranks": (-1, 4), "store": dist.HashStore()}, ValueError, "the ranks of 4 processes are 0 to 3"),
        ({"ranks": (0, 4)}, ValueError, "needs store=, a store of torch.distributed.*is_master=rank == 0"),
        (
            {"ranks": 4, "store": dist.HashStore()},
            TypeError,
            r"ranks must be \(rank, world_size\), such as \(0, 4\), got 4",
        ),
        ({"ranks": "04"}, TypeError, "ranks must be"),
        ({"ranks": (0, True)}, TypeError, "ranks must be"),
        ({"ranks": (0.0, 4)}, TypeError, "ranks must be"),
        ({"ranks": (0, 1, 2)}, TypeError, "ranks must be"),
        ({"store": dist.HashStore()}, ValueError, "store= needs ranks="),
        (
            {"ranks": (0, 4), "store": "localhost:29500"},
            TypeError,
            "must be a store of torch.distributed.*got 'localhost",
        ),
    ],
)
def test_ranks_that_cannot_be_are_refused_at_once(tmp_path, given, error, what):
    with pytest.raises(error, match=what):
        open_run(tmp_path, **given)


def test_the_cause_is_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with open_run(tmp_path) as one, open_run(tmp_path) as two, scripted(two) as disk:
        stop = disk.stop("put_new", "manifest.json")
        handle = two.save(state_at(1), step=1)
        stop.wait_reached()
        one.save(state_at(1), step=1).result()
        disk.release_all()

        error = handle.exception()
    assert isinstance(error, StepExistsError)
    assert isinstance(error.__cause__, FileExistsError)


@pytest.mark.parametrize(("rank", "world_size"), [(None, None), ("0", "1"), ("0", None), ("", ""), ("", "2")])
def test_a_process_alone_is_told_nothing_of_ranks(tmp_path, monkeypatch, rank, world_size):
    for name, value in (("RANK", rank), ("WORLD_SIZE", world_size)):
        monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value)
    assert ranks() == (0, 1)
    with open_run(tmp_path) as one, open_run(tmp_path) as two:
        one.save(state_at(1), step=1).result()

        with pytest.raises(StepExistsError) as caught:
            two.save(state_at(1), step=1)
    assert str(caught.value) == "step 1 is already committed; pass overwrite=True to replace it"


def test_a_torch_without_distributed_has_no_ranks(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(torch.distributed, "is_available", lambda: False)
    monkeypatch.delattr(torch.distributed, "is_initialized")

    assert ranks() == (0, 1)
