"""What of the model is explored, and the broken protocols in which a violation must be found.

In: nothing. Out: configurations. Knows nothing of: how they are explored.
"""

from typing import Final

from .commit_invariants import INVARIANTS
from .commit_state import Configuration

WHOLE: Final = (
    Configuration("one start, three saves, one rank fails", 2, ((1, 1, 2),), faults=1),
    Configuration("one start, three saves, three ranks fail", 3, ((1, 1, 2),), faults=3),
    Configuration("two starts, two saves each", 2, ((1, 2), (1, 2))),
    Configuration("two starts, the second saves below the first", 2, ((2, 3), (1,))),
    Configuration("two starts, one rank fails", 2, ((1, 1), (1,)), faults=1),
    Configuration("three starts", 2, ((1,), (2,), (1,))),
    Configuration("two starts, a rollback each", 2, ((1, 3, 2), (1, -1)), retire=True),
    Configuration("three starts, two roll back", 2, ((1, 3), (-1,), (-1,)), retire=True),
    Configuration("two starts that keep one step", 2, ((1, 2, 3), (1, 2)), keep=1),
)
QUICK: Final = (
    Configuration("one start, two saves, one rank fails", 3, ((1, 1),), faults=1),
    Configuration("two starts", 2, ((1,), (1,))),
    Configuration("a rollback", 2, ((1, 3, 2),), retire=True),
)

# A process that sleeps between its last look and its deletion, while a later start rolls back and commits the same step anew.
KNOWN: Final = Configuration(
    "two starts that keep one step, the second rolls back", 2, ((2, 4), (-3, -2)), retire=True, keep=1
)
# The library takes listings for what was put before. A store that hides one start, or one manifest, for a while breaks that.
SLOW: Final = (
    Configuration("two starts, a listing hides one for a while", 2, ((1,), (1,)), slow="starts"),
    Configuration("two starts, a listing hides one manifest for a while", 2, ((2,), (1,)), slow="manifests"),
)
VIOLATIONS: Final = {KNOWN.name: INVARIANTS[8], **{one.name: INVARIANTS[10] for one in SLOW}}
"""Which of these are known to violate which invariant."""


def _broken(what: str, num_ranks: int, *plans: tuple[int, ...], **more: int) -> Configuration:
    return Configuration(what, num_ranks, plans, **more, broken=what)  # type: ignore[arg-type]


# Each with the number of the invariant that is violated, here and below.
_BROKEN: Final = (
    (_broken("attempts keep their name", 3, (1, 1), faults=1), 3),
    (_broken("commits are listed before the start is put", 2, (2,), (1,)), 10),
    (_broken("a start that has seen nothing yet is none", 2, (1,), (1,)), 10),
    (_broken("what does not count is replaced without an intent", 1, (1,), (1,), (2,)), 11),
    (_broken("no look before the manifest", 2, (1,), (1,)), 2),
    (_broken("no look after the manifest", 2, (2,), (1,)), 10),
    (_broken("rank 0 alone looks after the manifest", 2, (2,), (1,)), 10),
    (_broken("manifests are put without a condition", 2, (1,), (1,)), 5),
    (_broken("rollbacks without an intent", 2, (1, 3, 2), retire=True), 6),
    (_broken("readers take every manifest", 2, (2,), (1,)), 6),
    (_broken("the tracker is put without a condition", 2, (1,), (1,)), 7),
    (_broken("no look before deleting", 1, (2, 4), (-3, -2), keep=1, retire=True), 8),
)

BROKEN: Final = tuple((one, INVARIANTS[number]) for one, number in _BROKEN)
"""Each with the invariant that is violated."""
