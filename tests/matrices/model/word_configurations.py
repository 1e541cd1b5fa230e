"""What is explored of what ranks say to each other, and how it is broken where a violation must be found.

In: nothing. Out: configurations. Knows nothing of: how they are explored.
"""

from __future__ import annotations

from typing import Final

from .word_model import INVARIANTS, NO_STEP, Call, WordConfiguration

_NONE: Final = Call(NO_STEP)
_ONE, _TWO, _THREE = Call(1), Call(2), Call(3)
_FAILS: Final = Call(1, fails=True)
_BOTH: Final = ((0, 1), (0, 2))
_SECOND: Final = ((0, 2),)


def _words(name: str, *plans: tuple[Call, ...], **more: object) -> WordConfiguration:
    return WordConfiguration(name, plans, **more)  # type: ignore[arg-type]


_EXPORT: Final = Call(5, channel=1)
_MISSED: Final = _words("words: a call that one rank misses", (_ONE, _TWO), (_TWO,), common=_SECOND)
_ALONE: Final = _words("words: a call that one rank makes alone", (_TWO,), (_ONE, _TWO), common=_SECOND)
_ALIKE: Final = _words("words: two calls alike", (_ONE, _TWO), (_ONE, _TWO), common=_BOTH)
_FAULTS: Final = _words("words: two puts fail", (_ONE, _TWO), (_ONE, _TWO), faults=2)
_ALARM: Final = _words("words: a living rank is taken for dead", (_ONE, _TWO), (_ONE, _TWO), alarms=1)
_CHANNELS: Final = _words(
    "words: two channels, in other orders",
    (_ONE, _EXPORT),
    (_EXPORT._replace(waits=True), _ONE),
    common=((0, 1), (1, 5)),
)
_LATE_NO: Final = _words(
    "words: a missed call fails elsewhere first",
    (_FAILS, Call(2, channel=1), _THREE),
    (Call(2, channel=1), _THREE),
    in_flight=2,
)

WORDS: Final = (
    _ALIKE,
    _MISSED,
    _ALONE,
    _words("words: arguments that are wrong on another rank", (_ONE, _TWO), (_NONE, _TWO), common=_SECOND),
    _words("words: arguments that are wrong on rank 0", (_NONE, _TWO), (_ONE, _TWO), common=_SECOND),
    _words(
        "words: a wrong call of one rank alone costs one call", (_TWO, _THREE), (_NONE, _TWO, _THREE), common=((0, 3),)
    ),
    _words("words: a call that fails on another rank", (_ONE, _TWO), (_FAILS, _TWO), common=_SECOND),
    _words("words: a call that fails on rank 0", (_FAILS, _TWO), (_ONE, _TWO), common=_SECOND),
    _words("words: a step that is saved twice", (_ONE, _ONE), (_ONE, _ONE), common=((0, 1),)),
    _words("words: one rank saves a step twice", (_ONE, _TWO), (_ONE, _ONE, _TWO), common=_BOTH),
    _words("words: steps that disagree", (_ONE, Call(4)), (_THREE, Call(4)), common=((0, 4),)),
    _words("words: a call that is skipped", (_ONE._replace(skips=True), _TWO), (_ONE, _TWO), common=_SECOND),
    _words("words: one rank goes back", (_TWO, _ONE, _THREE), (_ONE, _THREE), common=((0, 3),)),
    _CHANNELS,
    _LATE_NO,
    _words("words: three calls, two in flight", (_ONE, _TWO, _THREE), (_ONE, _TWO, _THREE), in_flight=2, common=_BOTH),
    _words("words: both ranks may die", (_ONE, _TWO), (_ONE, _TWO), deaths=2),
    _words("words: the store vanishes", (_ONE, _TWO), (_ONE, _TWO), vanishes=True),
    _words("words: the store vanishes, a rank dies, a put fails", (_ONE,), (_ONE,), vanishes=True, deaths=1, faults=1),
    _FAULTS,
    _ALARM,
    _words("words: three ranks, two calls alike", *[(_ONE, _TWO)] * 3, common=_BOTH),
    _words("words: three ranks, one misses a call", (_ONE, _TWO), (_TWO,), (_ONE, _TWO), common=_SECOND),
    _words("words: three ranks, one has wrong arguments", (_ONE, _TWO), (_NONE, _TWO), (_ONE, _TWO), common=_SECOND),
    _words("words: three ranks, two may die", *[(_ONE,)] * 3, deaths=2),
    _words("words: three ranks, a put fails, one is taken for dead", *[(_ONE,)] * 3, faults=1, alarms=1),
    _words("words: three ranks, the store vanishes, a put fails", *[(_ONE,)] * 3, faults=1, vanishes=True),
)

QUICK_WORDS: Final = (*WORDS[:5], _CHANNELS)

_BROKEN: Final = (
    (_CHANNELS, "one log, read in order", 3),
    (_ALONE, "a word above the entry is refused", 3),
    (_ALARM, "no manifest is a no", 0),
    (_ALIKE, "a count before its receipt", 2),
    (_ALIKE, "receipts are not awaited", 2),
    (_ALIKE, "a word is deleted unread", 3),
    (_FAULTS, "a put without an answer is a no", 1),
    (_FAULTS, "a decision ahead of its call is forgotten", 4),
    (_MISSED, "refusals are not read", 3),
    (_MISSED, "words are matched by a count", 2),
)
BROKEN_WORDS: Final = tuple(
    (one._replace(name=f"words: {what}", broken=what), INVARIANTS[number]) for one, what, number in _BROKEN
)
"""Each with the invariant that is violated."""
