"""A call of `save` that has raised on this rank before it was known what it saves, and what the others learn of it.

In: the error. Out: a call that is counted as on all ranks. Knows nothing of: attempts at a root.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Final

from ..host.deadlines import PEER_SECONDS
from ..host.loop import Loop
from ..host.waits import growing_pauses
from ..runs.receipts import Cause
from ..spans import monotonic
from .answers import in_words
from .attempts import AttemptPlace, JointSave
from .peers import Ranks

_NO_STEP: Final = -1
_FIRST_LOOK_SECONDS, _LOOK_SECONDS = 0.05, 1.0


def tell_of_wrong_call(ranks: Ranks, runs: Sequence[AttemptPlace], error: BaseException, loop: Loop) -> None:
    """Count a call whose step is no step, and tell the other ranks, whose save by the same call fails. Does not wait.

    Rank 0 is told by the attempt that it makes instead, once it has said which that is. Ranks without a store of a
    process group cannot be told, and where overlapping saves are skipped, nobody knows whether the call counts.
    """
    with suppress(ValueError, RuntimeError):  # the group has changed, or its store is gone: the caller raises `error`
        if ranks.is_alone or ranks.skips:
            return
        joint, world = JointSave(_NO_STEP), ranks.world
        ranks.attempts.begin_nothing(joint, in_words(error))
        ranks.meeting.does_not_meet()
        if world.rank == 0 or world.store is None:
            return
        roots = [ranks.root(run, joint) for run in runs]  # in this order, as on all ranks
        cause = Cause(world.rank, in_words(error))

        async def tell() -> None:
            deadline = monotonic() + PEER_SECONDS
            for seconds in growing_pauses(_FIRST_LOOK_SECONDS, _LOOK_SECONDS):
                instead = await loop.off_loop(partial(ranks.attempts.said_instead, joint))
                if instead is not None:
                    ranks.attempts.is_mistaken(joint, instead)  # before rank 0 can save that step again
                    for root in roots:
                        await loop.off_loop(partial(root.say_refusal, instead.attempt, cause))
                if instead is not None or monotonic() > deadline:
                    break
                await asyncio.sleep(seconds)

        loop.begin(tell())
