"""Every rank of a distributed training saves to one root: one of them commits, and the others are told what to do."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import pytest
import torch
from children import Child, Nursery
from scripted_disk import scripted
from states import open_run, state_at

import async_ckpt
from async_ckpt import StepExistsError
from async_ckpt.host.ranks import ranks

needs_fork = pytest.mark.skipif(sys.platform != "linux", reason="forks as Linux has them")

# Both ranks hold a model under DDP; `meet` is a barrier.
HEAD = """
import sys
import torch
import torch.distributed as dist
from async_ckpt import StepExistsError
from async_ckpt.host.ranks import ranks
from children import hold_writes
from states import open_run

torch.set_num_threads(1)
root, meeting, rank = sys.argv[1], sys.argv[2], int(sys.argv[3])
assert ranks() == (0, 1)
dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
assert ranks() == (rank, 2)
meet = dist.barrier
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
model(torch.ones(2, 8) * (rank + 1)).sum().backward()
"""

# Rank 1 comes when the step is there, or has begun when rank 0 commits.
LATE = """
with open_run(root) as ckpt:
    if rank == 0:
        ckpt.save({"model": model}, step=1).result()
    meet()
    if rank == 1:
        try:
            ckpt.save({"model": model}, step=1)
        except StepExistsError as error:
            print(error)
    meet()
"""
OVERTAKEN = """
go = hold_writes()
if rank == 0:
    go.set()
with open_run(root) as ckpt:
    if rank == 1:
        handle = ckpt.save({"model": model}, step=1)
    meet()
    if rank == 0:
        ckpt.save({"model": model}, step=1).result()
    meet()
    go.set()
    if rank == 1:
        print(handle.exception())
    meet()
"""


@needs_fork
@pytest.mark.parametrize(
    ("script", "what"),
    [(LATE, "step 1 is committed already"), (OVERTAKEN, "committed by another writer in the meantime")],
)
def test_the_rank_that_does_not_commit_is_told_to_save_on_rank_0_alone(tmp_path, nursery, script, what):
    first, second = both(nursery, tmp_path, HEAD + script + "dist.destroy_process_group()\n")
    kept, refused = first.ended(), second.ended()

    assert (kept.status, kept.out) == (0, ""), kept.err
    assert refused.status == 0, refused.err
    assert what in refused.out
    assert f"This is rank 1 of 2: if every rank saves to {tmp_path / 'run'}" in refused.out
    assert "Save on rank 0 alone (`if dist.get_rank() == 0: …`)" in refused.out
    with open_run(tmp_path / "run") as ckpt:
        assert ckpt.steps() == [1]
        assert len(ckpt.load()["model"]) == 2


def both(nursery: Nursery, folder: Path, code: str) -> list[Child]:
    return [nursery.start(code, folder / "run", folder / "meeting", rank) for rank in (0, 1)]


@needs_fork
def test_ranks_with_a_root_each_save_side_by_side(tmp_path, nursery):
    body = """
with open_run(f"{root}/rank{rank}") as ckpt:
    ckpt.save({"model": model}, step=1)
dist.destroy_process_group()
"""
    for child in both(nursery, tmp_path, HEAD + body):
        ended = child.ended()
        assert (ended.status, ended.out) == (0, ""), ended.err
    assert [open_run(tmp_path / "run" / f"rank{rank}").steps() for rank in (0, 1)] == [[1], [1]]


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


def test_the_cause_is_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with open_run(tmp_path) as one, open_run(tmp_path) as two, scripted(two) as disk:
        stop = disk.stop("put_new")
        handle = two.save(state_at(1), step=1)
        stop.wait_reached()
        one.save(state_at(1), step=1).result()
        disk.release_all()

        error = handle.exception()
    assert isinstance(error, StepExistsError)
    assert isinstance(error.__cause__, FileExistsError)


@pytest.mark.parametrize(
    ("rank", "world_size"), [(None, None), ("0", "1"), ("0", None), ("", ""), ("one", "2")]
)
def test_a_process_alone_is_told_nothing_of_ranks(tmp_path, monkeypatch, rank, world_size):
    for name, value in (("RANK", rank), ("WORLD_SIZE", world_size)):
        monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value)
    assert ranks() == (0, 1)
    with open_run(tmp_path) as one, open_run(tmp_path) as two:
        one.save(state_at(1), step=1).result()

        with pytest.raises(StepExistsError) as caught:
            two.save(state_at(1), step=1)
    assert str(caught.value) == "step 1 is committed already; pass overwrite=True to replace it"


def test_a_torch_without_distributed_has_no_ranks(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(torch.distributed, "is_available", lambda: False)
    monkeypatch.delattr(torch.distributed, "is_initialized")

    assert ranks() == (0, 1)
