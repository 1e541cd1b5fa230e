"""What is explored of the next protocols of ranks and of tiers, and how it is broken where a violation must be found.

In: nothing. Out: configurations. Knows nothing of: how they are explored.
"""

from typing import Final, TypeAlias

from . import line_model, start_model, word_model
from .line_model import LineConfiguration
from .start_model import StartConfiguration
from .tier_configurations import BROKEN_TIERS, QUICK_TIERS, TIERS
from .tier_state import TierConfiguration
from .word_model import Call, WordConfiguration

NextConfiguration: TypeAlias = StartConfiguration | WordConfiguration | LineConfiguration | TierConfiguration

_NONE: Final = Call(word_model.NO_STEP)
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

_STARTS_TWICE: Final = StartConfiguration("starts: all start twice", 2, starts=2)
_AGAIN: Final = StartConfiguration("starts: a rank starts again alone", 2, again=1)

STARTS: Final = (
    _STARTS_TWICE,
    _AGAIN,
    StartConfiguration("starts: three ranks start three times", 3, starts=3),
    StartConfiguration("starts: three ranks, one starts again alone", 3, again=1),
    StartConfiguration("starts: three ranks start twice, two of them again", 3, starts=2, again=2),
)

_TWO_LINES: Final = LineConfiguration("lines: two starts", ((1,), (2,)))
_SAME_STEP: Final = LineConfiguration("lines: three starts save one step", ((1,), (1,), (1,)))
_THREE_LINES: Final = LineConfiguration("lines: three starts", ((1,), (2,), (3,)))

LINES: Final = (
    _TWO_LINES,
    LineConfiguration("lines: two starts, two saves each", ((1, 2), (1, 2))),
    LineConfiguration("lines: a rollback", ((1, 2, 3), (-1, 2, 3))),
    _THREE_LINES,
    _SAME_STEP,
    LineConfiguration("lines: two rollbacks", ((1, 2), (-1, 2), (-1, 3))),
    LineConfiguration("lines: a rollback, and what is left out is deleted", ((1, 2), (-1, 2, 3)), sweeps=True),
    LineConfiguration("lines: three starts that delete what does not count", ((1,), (2,), (2,)), sweeps=True),
    LineConfiguration("lines: two rollbacks, and deletions", ((1, 2), (-1, 2), (-1, 3)), sweeps=True),
)

QUICK_NEXT: Final = (*STARTS[:2], *WORDS[:5], _CHANNELS, _TWO_LINES, LINES[2], *QUICK_TIERS)
NEXT: Final = (*STARTS, *WORDS, *LINES, *TIERS)

_NEXT_BROKEN: Final = (
    (_STARTS_TWICE, "any answer is one", 0),
    (_STARTS_TWICE, "a hello is enough", 1),
    (_AGAIN, "a rank that starts again alone is answered", 2),
    (_AGAIN, "an earlier answer counts", 2),
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
    (_TWO_LINES, "commits are listed before the line is claimed", 0),
    (_TWO_LINES, "no look after the put", 0),
    (_TWO_LINES, "lines are looked at before the put alone", 0),
    (_TWO_LINES, "a line without its .seen is none", 0),
    (_TWO_LINES, "a line without a commit is none", 0),
    (_TWO_LINES, "two starts may have one line", 1),
    (_SAME_STEP, "a step has one manifest", 0),
    (_THREE_LINES, "a start goes on that finds its own put by another", 1),
    (_THREE_LINES, "commits that do not count make a line count", 1),
)
_INVARIANTS: Final = {
    StartConfiguration: start_model.INVARIANTS,
    WordConfiguration: word_model.INVARIANTS,
    LineConfiguration: line_model.INVARIANTS,
}
BROKEN_NEXT: Final[tuple[tuple[NextConfiguration, str], ...]] = (
    *(
        (one._replace(name=f"{one.name.partition(':')[0]}: {what}", broken=what), _INVARIANTS[type(one)][number])
        for one, what, number in _NEXT_BROKEN
    ),
    *BROKEN_TIERS,
)
"""Each with the invariant that is violated."""
