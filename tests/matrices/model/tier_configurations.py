"""What is explored of tiers, and how their rules are broken where a violation must be found.

In: nothing. Out: configurations. Knows nothing of: how they are explored.
"""

from typing import Final

from .tier_invariants import INVARIANTS
from .tier_state import UNLISTED, TierConfiguration

_TWO: Final = (0, 1)  # a near place, and a far one
_THREE: Final = (0, 1, 2)
_HERE, _THERE = (0, 2), (1, 2)  # two machines, each with a near place of its own


def _tiers(
    name: str, *plans: tuple[int, ...], at: tuple[tuple[int, ...], ...] = (), **more: object
) -> TierConfiguration:
    return TierConfiguration(f"tiers: {name}", plans, at or (_TWO,) * len(plans), **more)  # type: ignore[arg-type]


def _in_turn(
    name: str, *plans: tuple[int, ...], at: tuple[tuple[int, ...], ...] = (), **more: object
) -> TierConfiguration:
    return _tiers(f"{name}, one after the other", *plans, at=at, alive=1, **more)


_ONE: Final = _tiers("one start", (1, 2, 3))
_KEEPS: Final = _tiers("one start that keeps one step", (1, 2, 3), keep=(1, 1))
_BACK: Final = _tiers("a start goes back, and both places fall silent", (1, 2, -1, 3, 4), silences=(1, 1))
_OVER: Final = _tiers("a start goes back, and overwrites a step", (1, 3, -1, 2, 2))
_STARTS: Final = _tiers("two starts", (1,), (2,))
_SAVES: Final = _tiers("two starts, two saves each", (1, 2), (2, 3))
_ROLLBACK: Final = _tiers("a rollback", (1, 2), (-1, 2, 3))
_KEEP: Final = _tiers("two starts that keep one step", (1, 2), (2, 3), keep=(1, 1))
_MACHINES: Final = _tiers("two machines", (1,), (2,), at=(_HERE, _THERE))
_NEAR: Final = _tiers("two starts, the near place falls silent", (1,), (2,), silences=(1, 0))
_LOST: Final = _tiers("two starts, the near place is lost", (1,), (2,), loses=0, reverse=True)
_SILENT: Final = _in_turn("two starts, both places fall silent", (1, 2), (3,), silences=(1, 1))
_AGAIN: Final = _in_turn("a start goes back, another goes on", (1, 2, -1, 3, 4), (5,))
_ELSEWHERE: Final = _in_turn("a rollback on another machine", (1, 3), (-1, 2, 2), (4,), at=(_HERE, _THERE, _HERE))
_CARRIED: Final = _in_turn(
    "three starts on two machines", (1,), (2,), (3,), at=(_HERE, _THERE, _THERE), silences=(0, 0, 1)
)

TIERS: Final = (
    _ONE,
    _KEEPS,
    _tiers("one start that keeps one step, and both places fall silent", (1, 2), keep=(1, 1), silences=(1, 1)),
    _BACK,
    _OVER,
    _STARTS,
    _SAVES,
    _tiers("an overwrite", (1, 1), (1, 2)),
    _ROLLBACK,
    _KEEP,
    _MACHINES,
    _tiers("two machines that keep one step", (1, 2), (2, 3), at=(_HERE, _THERE), keep=(1, 1, 1)),
    _tiers("two machines, the far place falls silent", (1, 2), (2, 3), at=(_HERE, _THERE), silences=(0, 0, 1)),
    _NEAR,
    _tiers("a rollback, the near place falls silent", (1, 2), (-1, 2), silences=(1, 0)),
    _tiers("two starts, three places", (1,), (2,), at=(_THREE,) * 2),
    _LOST,
    _LOST._replace(name="tiers: two starts, the near place is lost, tokens rise", reverse=False),
    _tiers("two starts, the near place is replaced by an older one", (1,), (2,), loses=0, is_old=True),
    _SILENT,
    _AGAIN,
    _ELSEWHERE,
    _CARRIED,
    _in_turn("two machines, and back", (1,), (2,), (3,), at=(_HERE, _THERE, _HERE), silences=(0, 0, 1)),
    _in_turn("three places, the second falls silent", (1, 2), (3,), at=(_THREE,) * 2, silences=(0, 1, 0)),
    _in_turn("two starts that keep one step, the far place falls silent", (1, 2), (3,), keep=(1, 1), silences=(0, 1)),
    _in_turn("two rollbacks, the far place falls silent", (1, 2), (-1, 2), (-1, 3), silences=(0, 1)),
    _in_turn("a rollback, the near place is replaced by an older one", (1, 2, -1, 3), (4,), loses=0, is_old=True),
    _in_turn(
        "the near place is replaced by an older one, the far one falls silent",
        (1, 2),
        (3,),
        loses=0,
        is_old=True,
        silences=(0, 1),
    ),
    _tiers("three starts, two of them at a time", (1,), (2,), (2,), alive=2),
)
QUICK_TIERS: Final = (_KEEPS, _STARTS, _ROLLBACK, _MACHINES, _LOST, _ELSEWHERE)

_TIERS_BROKEN: Final = (
    (_MACHINES, "a mover does not look at ancestors", 0),
    (_CARRIED, "ancestors are not carried over", 7),
    (_KEEPS, "a mover fills gaps", 6),
    (_MACHINES, "a mover does not list starts after its put", 0),
    (_AGAIN, "retirements are not repeated", 8),
    (_KEEPS, "retention deletes the step that is being moved", 10),
    (_ONE, "a manifest before its archive", 3),
    (_NEAR, "None although a place is silent", 4),
    (_LOST, "a number of each place alone", 9),
    (_STARTS, ".seen is what was listed before", 0),
    (_SILENT, "ancestors are all starts that were listed", 1),
    (_SILENT, "a mover takes a silent place for one that has the step", 11),
    (_STARTS, "a moved manifest is of the start that saved it", 0),
    (_STARTS, "a step is moved before it is acknowledged", 8),
    (_KEEP, "a manifest of the same attempt is enough", 0),
    (_ROLLBACK, "a mover does not wait for the rollback", 0),
    (_OVER, "a rollback is no start of its own", 1),
    (_SAVES, "what a start has not seen may be a conflict", 8),
    (_STARTS, "a start does not look for one that goes on from it", 8),
    (_ELSEWHERE, "the highest step is the newest", 2),
    (_LOST, UNLISTED, 0),
)
BROKEN_TIERS: Final = tuple(
    (one._replace(name=f"tiers: {what}", broken=what), INVARIANTS[number]) for one, what, number in _TIERS_BROKEN
)
"""Each with the invariant that is violated."""
