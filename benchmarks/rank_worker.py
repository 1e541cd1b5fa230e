"""One rank of a small world, which saves on request.

In: commands on stdin, one per line. Out: the costs of each save, as JSON on stdout. Knows nothing of: other worlds.

Commands for a save as number N:

- "ours N" and "dcp N" save by us and by dcp.async_save, including the creation of state dicts.
- "plugged N" and "unplugged N" save existing state dicts by dcp.async_save, with and without our writer. "engine N"
  does it with a writer that commits and writes nothing.
- "keep N" saves by us and by torch, for later loads into other shards: of columns instead of rows, or of rows on pairs
  of ranks.

Commands that load, where "pairs" may replace "columns":

- "restore-columns N" restores our save by us, "load-columns N" loads torch's save by torch, and "read-columns N" loads
  our save by torch with our reader.
- "bare-columns N" reads the files that such a restore needs, and makes digests and copies of as many bytes.

"end" ends the rank.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter
from typing import Any, Final

import torch
import torch.distributed as dist
import torch.distributed.checkpoint
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, ones

import async_ckpt
from async_ckpt.integrations.dcp import TarStorageReader, TarStorageWriter

from .limits import NUM_READERS, READ_BYTES, WarmMemory, drop_cache

WIDTH = 1024
dcp: Any = torch.distributed.checkpoint


class NothingWritten(TarStorageWriter):
    """A writer that writes nothing, to measure torch's engine and the stager alone."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[list[WriteResult]]:  # noqa: ARG002
        done: torch.futures.Future[list[WriteResult]] = torch.futures.Future()
        done.set_result([])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        pass


def main() -> None:
    rank, world_size, store, root, num_bytes = (
        int(sys.argv[1]),
        int(sys.argv[2]),
        *sys.argv[3:5],
        int(sys.argv[5]),
    )
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    num_layers = max(1, num_bytes // (3 * 4 * WIDTH * WIDTH))  # including AdamW's two moments
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(num_layers)))
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    state = {"model": model, "optimizer": optimizer}
    with async_ckpt.AsyncCheckpointer(Path(root) / "ours", keep=1, guard=optimizer) as ckpt:
        ckpt.prewarm(state)
        for line in sys.stdin:
            command, _, number = line.strip().partition(" ")
            if command == "end":
                break
            stall, whole = run(command, int(number), Path(root), ckpt, state)
            dist.barrier()
            print(json.dumps([stall, whole]), flush=True)
    dist.destroy_process_group()


def saved_by_us(ckpt: async_ckpt.AsyncCheckpointer, state: Any, step: int, begin: float) -> tuple[float, float]:
    handle = ckpt.save(state, step)
    called = perf_counter() - begin
    report = handle.result()
    whole = perf_counter() - begin
    ckpt.wait()
    return max(called, report.stall_seconds), whole


def saved_by_dcp(state: Any, folder: Path, begin: float, writer: Any = None) -> tuple[float, float]:
    where: Any = {"checkpoint_id": str(folder)} if writer is None else {"storage_writer": writer}
    future: Any = dcp.async_save(state, **where)
    called = perf_counter() - begin
    getattr(future, "upload_completion", future).result()
    whole = perf_counter() - begin
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder, ignore_errors=writer is not None)  # the folder is missing if nothing was written
    return called, whole


def state_dicts(model: Any, optimizer: Any) -> dict[str, Any]:
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments}


def kept(root: Path, model: Any, optimizer: Any) -> None:
    state = state_dicts(model, optimizer)
    with async_ckpt.AsyncCheckpointer(root / "kept") as ckpt:
        ckpt.save(state, 1)
    dcp.save(state, checkpoint_id=str(root / "kept_dcp"))


def loaded(command: str, root: Path, model: Any, optimizer: Any) -> float:
    """Seconds of a load from a cold cache."""
    how, _, layout = command.partition("-")
    state = spread(state_dicts(model, optimizer), *LAYOUTS[layout]())
    if dist.get_rank() == 0:
        for path in [*root.glob("kept/*/*.tar"), *root.glob("kept_dcp/*.distcp")]:
            drop_cache(path)
    dist.barrier()
    begin = perf_counter()
    if how == "restore":
        with async_ckpt.AsyncCheckpointer(root / "kept") as ckpt:
            ckpt.restore(state)
            return perf_counter() - begin  # closing it also waits for memory made for a first save
    if how == "load":
        dcp.load(state, checkpoint_id=str(root / "kept_dcp"))
    elif how == "bare":
        read(sorted(root.glob("kept/*/*.tar")), state, layout)
    else:
        dcp.load(state, storage_reader=TarStorageReader(root / "kept"))
    return perf_counter() - begin


def read(archives: list[Path], state: Any, layout: str) -> None:
    """Read all files, or those of the rows that this rank needs half of, and copy as many bytes as its tensors have."""
    half = dist.get_rank() % 2 * 2
    files = archives if layout == "columns" else archives[half : half + 2]
    parts = list(local_parts(state))
    ring = WarmMemory(NUM_READERS * READ_BYTES, READ_BYTES)
    for number, file in enumerate(files):
        ring.read_seconds(file, parts[number :: len(files)], through_cache=True)


def local_parts(value: Any) -> Iterator[torch.Tensor]:
    """The local tensors of this rank."""
    if isinstance(value, DTensor):
        yield value.to_local()
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from local_parts(inner)


def spread(value: Any, mesh: DeviceMesh, placements: list[Placement]) -> Any:
    """The state with ones, and each matrix in another layout.

    Ones are in touched memory, like the values of a training; zeros may not be.
    """
    if isinstance(value, DTensor):
        if value.dim() < 2:
            return torch.ones_like(value)
        return ones(value.shape, device_mesh=mesh, placements=placements)
    if isinstance(value, dict):
        return {key: spread(inner, mesh, placements) for key, inner in value.items()}
    return [spread(inner, mesh, placements) for inner in value] if isinstance(value, list) else value


# Shards along the second dimension, and replicas of shards along the first.
LAYOUTS: Final[dict[str, Callable[[], tuple[DeviceMesh, list[Placement]]]]] = {
    "columns": lambda: (init_device_mesh("cpu", (dist.get_world_size(),)), [Shard(1)]),
    "pairs": lambda: (init_device_mesh("cpu", (2, dist.get_world_size() // 2)), [Replicate(), Shard(0)]),
}


def run(command: str, number: int, root: Path, ckpt: Any, state: Any) -> tuple[float, float]:
    model, optimizer = state["model"], state["optimizer"]
    if command == "keep":
        kept(root, model, optimizer)
        return 0.0, 0.0
    if "-" in command:
        return 0.0, loaded(command, root, model, optimizer)
    made = state_dicts(model, optimizer) if command in ("plugged", "unplugged", "engine") else None
    dist.barrier()
    begin = perf_counter()
    if command == "ours":
        return saved_by_us(ckpt, state, number, begin)
    folder = root / f"{command}{number}"
    if command in ("plugged", "engine"):
        kind = TarStorageWriter if command == "plugged" else NothingWritten
        writer = _WRITERS.setdefault(command, kind(folder, guard=optimizer))
        writer.reset(folder)
        return saved_by_dcp(made, folder, begin, writer)
    return saved_by_dcp(made or state_dicts(model, optimizer), folder, begin)


# One writer for all saves, as in a training.
_WRITERS: Final[dict[str, TarStorageWriter]] = {}


if __name__ == "__main__":
    main()
    os._exit(0)  # gloo's threads may outlive the group
