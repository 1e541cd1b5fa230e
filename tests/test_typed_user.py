"""A user's script, written with types, runs."""

from pathlib import Path

SCRIPT = Path(__file__).with_name("typed_user.py")


def test_a_typed_script_of_a_user_runs(tmp_path, nursery):
    run = "import os, runpy, sys; os.chdir(sys.argv[2]); runpy.run_path(sys.argv[1], run_name='__main__')"
    done = nursery.run(run, SCRIPT, tmp_path)
    assert (done.status, done.err) == (0, "")
    assert "[2, 4]" in done.out
