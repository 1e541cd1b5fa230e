"""`python -m tests.matrices.ranks`: each call of each of several ranks fails once, in each way in which it may.

In: the command line. Out: a report, and exit status 1 if a promise was broken. Knows nothing of: how a place is tried.

First each scenario runs unharmed, and the calls of each rank that touch the disk are counted. Then there is a world of processes
for each of these calls and each fault that fits it: for one in `PARTS` of them, since a world takes some seconds.
"""

import sys
from typing import Final

from tests.matrices.attack_driver import Matrix
from tests.matrices.ranks.rank_places import RANK_FAULTS, rank_attackers
from tests.matrices.ranks.rank_scenarios import RANK_SCENARIOS

PARTS: Final = 4

MATRIX: Final = Matrix(
    "ranks", list(RANK_SCENARIOS), list(RANK_FAULTS), rank_attackers, "python -m tests.matrices.ranks", PARTS
)

if __name__ == "__main__":
    sys.exit(MATRIX.run())
