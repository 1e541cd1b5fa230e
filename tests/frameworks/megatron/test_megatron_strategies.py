"""Megatron-Core's `dist_checkpointing` after `use`: its own calls save and load archives, at once or by its queue."""

from __future__ import annotations

import pytest

pytest.importorskip("megatron.core", reason="megatron-core is not installed: make test-megatron")


WARM = ("megatron_runs",)

STATE = """
import argparse, string
from pathlib import Path
from megatron_runs import *
from megatron.core.dist_checkpointing import LocalNonpersistentObject, ShardedTensor
begin_on_cpu()
folder = Path({folder!r})

def state(fill=True):
    rows = torch.arange(6.0).view(2, 3) + 6 * here.rank if fill else torch.zeros(2, 3)
    return {{
        "rows": ShardedTensor.from_rank_offsets("a.rows", rows, (0, here.rank, here.size)),
        "norm": ShardedTensor.from_rank_offsets("norm", torch.full((3,), 1.0 + here.rank * (not fill)), replica_id=here.rank),
        "object": ShardedObject("own", {{"x": torch.tensor([here.rank])}} if fill else None, (here.size,), (here.rank,)),
        "local": LocalNonpersistentObject(here.rank),
        "args": argparse.Namespace(lr=0.1),
        "list": [1, (2, 3)],
    }}

def of_all():
    return {{str(n): ShardedObject("own", None, (2,), (n,)) for n in (0, 1)}}

def shown(found):
    return [found["rows"].tolist(), found["norm"].tolist(), found["object"]["x"].tolist(), found["local"], found["args"].lr]

def make(name):
    (folder / name).mkdir(parents=True, exist_ok=True)
    dist.barrier()
    return str(folder / name)
"""


def told(worlds, size, folder, script):
    return [end.told for end in worlds.run(size, STATE.format(folder=str(folder)) + script)]


def test_after_use_megatrons_own_calls_write_archives_and_read_both_kinds(worlds, tmp_path):
    script = """
dist_checkpointing.save(state(), make("theirs"))
ours.use()
dist_checkpointing.save(state(), make("ours"))
for name in ("theirs", "ours"):
    here.tell(shown(dist_checkpointing.load(state(False), make(name))))
    metadata = dist_checkpointing.serialization.load_sharded_metadata(make(name))
    here.tell(sorted((part.key, list(part.global_shape), list(part.global_offset)) for part in metadata.values()))
    here.tell(sorted(dist_checkpointing.load_tensors_metadata(make(name))))
    here.tell([value["x"].tolist() for value in
               dist_checkpointing.load(of_all(), make(name), validate_access_integrity=False).values() if isinstance(value, dict)])
"""
    for rank, (theirs, parts, tensors, objects, *own) in enumerate(told(worlds, 2, tmp_path, script)):
        rows = [[float(6 * rank + 3 * row + at) for at in range(3)] for row in range(2)]
        assert theirs == [rows, [1.0] * 3, [rank], rank, 0.1]
        assert own == [theirs, parts, tensors, objects]
        assert objects == [[0], [1]]
        assert tensors == ["a.rows", "norm"]
    assert not [*(tmp_path / "ours").glob("*.distcp")]
    assert (tmp_path / "ours" / "training.tar" / "manifest.json").exists()


def test_the_queue_of_megatron_finalizes_a_save_when_it_is_durable_and_not_before(worlds, tmp_path):
    script = """
from children import hold_writes
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
ours.use()
queue = AsyncCallsQueue()
path, tracker = make("iter_0000007"), folder / "tracker"
go = hold_writes()
live = state()
request = dist_checkpointing.save(live, path, async_sharded_save=True, async_strategy="mcore")
request.add_finalize_fn(lambda: tracker.write_text("7"))
queue.schedule_async_request(request)
live["rows"].data.fill_(-1.0)  # the save has a copy
here.tell([queue.maybe_finalize_async_calls(blocking=False), tracker.exists()])
go.set()
here.tell([queue.maybe_finalize_async_calls(blocking=True), tracker.read_text()])
here.tell(shown(ours.load_checkpoint(state(False), str(folder), 7)[0])[0][0])
"""
    for rank, (before, after, rows) in enumerate(told(worlds, 2, tmp_path, script)):
        assert before == [[], False]
        assert after == [[0], "7"]
        assert rows == [6.0 * rank, 6.0 * rank + 1, 6.0 * rank + 2]


def test_a_save_of_the_queue_that_fails_raises_on_all_ranks_and_finalizes_nothing(worlds, tmp_path):
    script = """
from async_ckpt.core.storage.local import LocalSink
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
ours.use()
queue, path, tracker = AsyncCallsQueue(), make("iter_0000007"), folder / "tracker"
if here.rank == 1:
    LocalSink.write = lambda *_: here.fail(OSError(28, "full"))
request = dist_checkpointing.save(state(), path, async_sharded_save=True, async_strategy="mcore")
request.add_finalize_fn(lambda: tracker.write_text("7"))
queue.schedule_async_request(request)
try:
    queue.maybe_finalize_async_calls(blocking=True)
except Exception as error:
    here.tell(f"{type(error).__name__}: {error}")
here.tell(tracker.exists())
"""
    (other, not_moved), (_, _) = told(worlds, 2, tmp_path, script)
    assert other.startswith("PeerFailedError: ")
    assert "rank 1" in other
    assert not_moved is False


def test_what_cannot_be_loaded_is_refused_by_name(worlds, tmp_path):
    script = """
def error_of(call):
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"

here.tell(ours.load_checkpoint(state(False), str(folder)))
ours.save_checkpoint({**state(), "odd": string.Template("x")}, str(folder), 3).result()
dist.barrier()
here.tell(error_of(lambda: ours.load_checkpoint(state(False), str(folder))))
more = {**state(False), "more": ShardedTensor.from_rank_offsets("more", torch.ones(1), replica_id=here.rank)}
here.tell(error_of(lambda: ours.load_checkpoint(more, str(folder), trust=True)))
other = {**state(False), "object": ShardedObject("other", None, (1,), (0,), replica_id=here.rank)}
here.tell(error_of(lambda: ours.load_checkpoint(other, str(folder), trust=True)))
wide = {**state(False), "norm": ShardedTensor.from_rank_offsets("norm", torch.ones(4), replica_id=here.rank)}
here.tell(error_of(lambda: ours.load_checkpoint(wide, str(folder), trust=True)))
dist.barrier()
(folder / "latest_checkpointed_iteration.txt").write_text("release")
dist.barrier()
here.tell(error_of(lambda: ours.load_checkpoint(state(False), str(folder), trust=True)))
"""
    for none, untrusted, missing, no_object, shape, tracker in told(worlds, 2, tmp_path, script):
        assert none is None
        assert untrusted.startswith("UntrustedObjectError: ")
        assert "has objects of classes that were not declared safe; if you trust whoever wrote it" in untrusted
        assert missing.startswith("CheckpointingException: ")
        assert "more" in missing
        assert no_object.endswith("has no other/shard_0_1")
        assert "norm" in shape
        assert "[4] here and float32[3] in the checkpoint" in shape
        assert "names no iteration, but has 'release'; give iteration=" in tracker
        assert tracker.startswith("ValueError: ")


def test_tensors_of_another_dtype_are_converted_in_a_load(worlds, tmp_path):
    script = """
ours.save_checkpoint(state(), str(folder), 3).result()
dist.barrier()
half = torch.zeros(2, 3, dtype=torch.bfloat16)
live = {"rows": ShardedTensor.from_rank_offsets("a.rows", half, (0, here.rank, here.size))}
rows = ours.load_checkpoint(live, str(folder))[0]["rows"]
here.tell([str(rows.dtype), rows.tolist()])
"""
    for rank, (found,) in enumerate(told(worlds, 2, tmp_path, script)):
        assert found == ["torch.bfloat16", [[float(6 * rank + 3 * row + at) for at in range(3)] for row in range(2)]]
