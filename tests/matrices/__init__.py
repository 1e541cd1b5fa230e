"""Promises attacked as a whole, by one program for each part: `make attack`. The programs find tests/support as pytest does."""

import sys
from pathlib import Path

_SUPPORT = str(Path(__file__).parents[1] / "support")
sys.path[:0] = [] if _SUPPORT in sys.path else [_SUPPORT]
