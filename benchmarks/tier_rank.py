"""One rank of a small world whose nodes have their own memory. It saves and restores on request.

In: commands on stdin, one per line. Out: the costs of each, as JSON on stdout. Knows nothing of: other worlds.

Commands: "save N", once; "restart N" opens the run and restores the step; "copy N" copies as many bytes. "end" ends it.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from async_ckpt import AsyncCheckpointer

from .limits import SEGMENT_BYTES, WarmMemory
from .workloads import tensors


def main() -> None:
    rank, size, store, root, num_bytes, ram, num_nodes = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=int(rank), world_size=int(size))
    node = int(rank) * int(num_nodes) // int(size)
    places = [Path(ram) / f"node{node}", Path(root) / "far"]
    mesh = init_device_mesh("cpu", (int(size),))
    own = tensors(int(num_bytes) // int(size))
    state = {"model": {name: DTensor.from_local(one, mesh, [Shard(0)], run_check=False) for name, one in own.items()}}
    memory = WarmMemory(sum(one.nbytes for one in own.values()), SEGMENT_BYTES)
    for line in sys.stdin:
        command = line.split()[0]
        if command == "end":
            break
        dist.barrier()
        print(json.dumps((0.0, _run(command, places, state, [*own.values()], memory))), flush=True)
    dist.destroy_process_group()


def _run(command: str, places: list[Path], state: Any, own: list[torch.Tensor], memory: WarmMemory) -> float:
    begin = perf_counter()
    if command == "copy":
        return memory.copy_seconds(own, back=True, num_threads=1)
    with AsyncCheckpointer(places) as ckpt:
        if command == "save":
            ckpt.save(state, 1).result()
        else:
            begin = perf_counter()
            assert ckpt.restore(state) == 1
        return perf_counter() - begin


if __name__ == "__main__":
    main()
    os._exit(0)  # gloo's threads may outlive the group
