"""A user's script, written with types, runs."""

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).with_name("typed_user.py")


def test_a_typed_script_of_a_user_runs(tmp_path):
    done = subprocess.run(
        [sys.executable, str(SCRIPT)], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    told = [line for line in done.stderr.splitlines() if not line.startswith("async_ckpt has waited")]
    assert (done.returncode, told) == (0, [])
    assert "[2, 4]" in done.stdout
