"""Hostile inputs of every parser: all that are kept, and a few hundred that are made from them, others at each commit."""

from slices import PART

_TRY_ALL = """
import sys
from pathlib import Path
from tests.matrices.hostile.hostile_slice import try_all
sys.exit(1 if try_all(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])) else 0)
"""


def test_hostile_inputs_are_refused_by_documented_errors_and_reach_nothing(nursery, tmp_path):
    # An input that hangs is found by an alarm of its own: what is waited for here is thousands of them on a busy machine.
    ended = nursery.start(_TRY_ALL, 150, PART, tmp_path / "failures").ended(600)
    assert ended.status == 0, ended.out + ended.err
    assert ended.out.count("'inputs': ") > 25
