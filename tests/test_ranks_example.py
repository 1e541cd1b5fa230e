"""The example of several ranks, as it is printed: four ranks train, and then two go on."""

import json
import os
import subprocess
import sys
from pathlib import Path

from async_ckpt import AsyncCheckpointer

ROOT = Path(__file__).parent.parent


def trained(ranks: int, folder: Path, steps: int) -> list[dict[str, object]]:
    """What rank 0 tells of a start by torchrun."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += ["-m", "examples.train_ranks", str(folder), "--steps", str(steps)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_two_ranks_go_on_with_what_four_have_saved(tmp_path):
    assert trained(4, tmp_path, 20)[0] == {"event": "restored", "step": None}
    first, *steps = trained(2, tmp_path, 30)
    assert first == {"event": "restored", "step": 20}
    assert [event["step"] for event in steps] == [*range(21, 31)]
    assert AsyncCheckpointer(tmp_path).steps() == [20, 30]
