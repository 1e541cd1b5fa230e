"""A user's script, written with types, runs."""

import subprocess
import sys
from pathlib import Path

import pytest

import async_ckpt

SCRIPT = Path(__file__).with_name("typed_user.py")


def test_a_typed_script_of_a_user_runs(tmp_path, nursery):
    run = "import os, runpy, sys; os.chdir(sys.argv[2]); runpy.run_path(sys.argv[1], run_name='__main__')"
    done = nursery.run(run, SCRIPT, tmp_path)
    told = [line for line in done.err.splitlines() if not line.startswith("async_ckpt has waited")]
    assert (done.status, told) == (0, [])
    assert "[2, 4]" in done.out


def test_a_slip_of_the_pen_is_found_by_a_type_checker_and_every_error_is_known_to_it(tmp_path):
    pytest.importorskip("mypy")
    errors = [name for name in vars(async_ckpt.errors) if name.endswith("Error")]
    script = tmp_path / "script.py"
    lines = ["import async_ckpt", "async_ckpt.sav({}, 'x.tar')", *(f"async_ckpt.{name}" for name in errors)]
    script.write_text("\n".join(lines))
    house = Path(async_ckpt.__file__).parent
    done = subprocess.run(
        [
            *(sys.executable, "-m", "mypy", "--strict", "--config-file=", "--cache-dir", tmp_path / "cache"),
            "--follow-imports=skip",  # the names of the package alone: no need to read all of it
            *(house / "__init__.py", house / "errors.py", script),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    (told, *_) = done.stdout.splitlines()
    assert told.endswith('script.py:2: error: Module has no attribute "sav"; maybe "save"?  [attr-defined]')
    assert "Found 1 error in 1 file" in done.stdout
