"""`python -m tests.matrices.objects`: each request to a store fails once, in each way in which it may.

In: the command line. Out: a report, and exit status 1 if a promise was broken. Knows nothing of: how a place is tried.

First each scenario of `tests.matrices.calls` runs unharmed at an S3 server, and its requests are counted. Then there is a child
for each of these requests and each fault that fits it: for one in `PARTS` of them, since a place takes half a second.
"""

import sys
from typing import Final

from tests.matrices.attack_driver import Matrix
from tests.matrices.objects.request_faults import FAULTS
from tests.matrices.objects.request_places import request_attackers
from tests.matrices.objects.store_roots import SCENARIOS

PARTS: Final = 6

COLUMNS: Final = {
    "refused": ["500", "503", "503, Retry-After", "409", "412, false", "401", "403", "404"],
    "cut": ["reset before", "body cut", "answer cut"],
    "carried out, no answer": ["answer lost"],
    "acknowledged, lost": ["archive lost"],
    "no answer": ["no answer"],
    "slow": ["slow"],
    "condition ignored": ["condition ignored"],
    "three times": ["500, thrice", "answer lost, thrice"],
    "for ever": ["503, for ever", "403, for ever", "away, for ever"],
    "SIGKILL": ["SIGKILL before", "SIGKILL after"],
}

MATRIX: Final = Matrix(
    "requests",
    list(SCENARIOS),
    list(FAULTS),
    request_attackers,
    "python -m tests.matrices.objects",
    PARTS,
    COLUMNS,
)

if __name__ == "__main__":
    sys.exit(MATRIX.run())
