"""The story on several ranks: train under FSDP, kill one rank in the middle of a save, start again, compare every loss; then go on
with fewer ranks.

In: a folder for checkpoints. Out: lines to read; exit code 1 if one bit differs.

    python -m examples.demo_ranks
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any, Final

import torch

import async_ckpt
from examples.process import command_line, events, running
from examples.train_ranks import EVERY

ROOT: Final = Path("demo_out/ranks")
STEPS: Final = 60
KILLED_IN: Final = 40
RANKS: Final = 4
FEWER: Final = 2
MORE_STEPS: Final = 80


def main() -> None:
    began = time.perf_counter()
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # or torchrun sets it, and says so
    shutil.rmtree(ROOT, ignore_errors=True)

    print(f"1. {STEPS} steps under FSDP on {RANKS} ranks, without interruption and without a save, to compare with")
    whole = train(RANKS)
    print(f"   loss {told(whole, 1):.3f} at step 1, {told(whole, STEPS):.3f} at step {STEPS}")

    print(
        f"\n2. The same, saved every {EVERY} steps; the last rank is killed in the middle of the save of step {KILLED_IN}"
    )
    killed = train(RANKS, "--die-in", str(KILLED_IN), fails=True)
    with async_ckpt.AsyncCheckpointer(ROOT, ranks=(0, 1)) as ckpt:
        committed = ckpt.steps()
    print(f"   committed: {committed}")
    if KILLED_IN in committed or not committed:
        sys.exit(f"step {KILLED_IN} should not be committed, and an earlier one should")

    print("\n3. All ranks started again")
    resumed = train(RANKS)
    print(f"   restored step {resumed['restored']}, and went on to step {STEPS}")
    if resumed["restored"] != committed[-1]:
        sys.exit(f"restored step {resumed['restored']}, and the last commit was {committed[-1]}")
    for name, other in (("killed", killed), ("resumed", resumed)):
        wrong = [step for step, loss in other["losses"].items() if loss != whole["losses"][step]]
        if wrong:
            sys.exit(f"NOT the same training as without saving ({name}): step {wrong[0]}")
    print(f"   every loss equals that of the uninterrupted run, bit for bit, up to {told(resumed, STEPS):.6f}")

    print("\n4. One process, without a process group, loads what the ranks have saved")
    state = async_ckpt.load(ROOT)
    tensors = [value for value in state["model"].values() if isinstance(value, torch.Tensor)]
    print(f"   {len(tensors)} full tensors, {sum(tensor.numel() for tensor in tensors):,} numbers")
    print(f"\n5. {FEWER} ranks go on with what {RANKS} have saved")
    fewer = train(FEWER, steps=MORE_STEPS)
    first, before = told(fewer, STEPS + 1), told(resumed, STEPS)
    print(
        f"   restored step {fewer['restored']}; loss {before:.3f} at step {STEPS} on {RANKS} ranks, {first:.3f} at the next on {FEWER},"
    )
    print(
        f"   {told(fewer, MORE_STEPS):.3f} at step {MORE_STEPS} (not bit for bit: {FEWER} ranks draw other batches than {RANKS})"
    )
    if fewer["restored"] != STEPS or abs(first - before) > 0.25 * abs(told(whole, 1) - before):
        sys.exit(f"step {STEPS} should be restored, and the loss go on from there")
    print(f"\ncheckpoints: {ROOT}\ntime:        {time.perf_counter() - began:.0f} s")
    print(f"next:        {command_line()} ls {ROOT}")


def train(ranks: int, *options: str, steps: int = STEPS, fails: bool = False) -> dict[str, Any]:
    """One start of all ranks, by torchrun; its losses by step, and the step that it began from."""
    is_saved = bool(options) or ROOT.exists()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += [
        "-m",
        "examples.train_ranks",
        *([str(ROOT)] if is_saved else []),
        "--steps",
        str(steps),
        *options,
    ]
    trace: dict[str, Any] = {"restored": None, "losses": {}}
    with running(command, quiet=fails) as process:
        for event in events(process):
            if event["event"] == "restored":
                trace["restored"] = event["step"]
            else:
                trace["losses"][event["step"]] = event["loss"]
    if (process.returncode != 0) is not fails:
        sys.exit(f"the training ended with exit code {process.returncode}; see above")
    return trace


def told(trace: dict[str, Any], step: int) -> float:
    return float.fromhex(trace["losses"][step])


if __name__ == "__main__":
    main()
