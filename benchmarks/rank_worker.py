"""One rank of a small world, which saves when it is told to.

In: commands on stdin, one a line. Out: what each save has cost, as JSON on stdout. Knows nothing of: other worlds.

Commands: "ours N" and "dcp N" save the state as number N; "end" ends it.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard

import async_ckpt

WIDTH = 1024


def main() -> None:
    rank, world_size, store, root, num_bytes = (
        int(sys.argv[1]),
        int(sys.argv[2]),
        *sys.argv[3:5],
        int(sys.argv[5]),
    )
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    num_layers = max(1, num_bytes // (3 * 4 * WIDTH * WIDTH))  # with AdamW's two moments
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
            dist.barrier()
            begin = perf_counter()
            if command == "ours":
                stall, whole = saved_by_us(ckpt, state, int(number), begin)
            else:
                stall, whole = saved_by_dcp(model, optimizer, Path(root) / f"dcp{number}", begin)
            dist.barrier()
            print(json.dumps([stall, whole]), flush=True)
    dist.destroy_process_group()


def saved_by_us(
    ckpt: async_ckpt.AsyncCheckpointer, state: Any, step: int, begin: float
) -> tuple[float, float]:
    handle = ckpt.save(state, step)
    called = perf_counter() - begin
    report = handle.result()
    whole = perf_counter() - begin
    ckpt.wait()
    return max(called, report.stall_seconds), whole


def saved_by_dcp(model: Any, optimizer: Any, folder: Path, begin: float) -> tuple[float, float]:
    weights, moments = get_state_dict(model, optimizer)
    dcp: Any = torch.distributed.checkpoint
    future = dcp.async_save({"model": weights, "optimizer": moments}, checkpoint_id=str(folder))
    called = perf_counter() - begin
    future.result()
    whole = perf_counter() - begin
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder)
    return called, whole


if __name__ == "__main__":
    main()
    os._exit(0)  # gloo's threads may outlive the group
