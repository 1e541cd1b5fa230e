"""Answers of rank 0 for all ranks, by the store of their process group: is a save due, is one skipped.

In: questions, asked on every rank. Out: the same answers on all of them. Knows nothing of: what is asked.

A question is known by what it is about, and by how often that was asked before: ranks go on to understand each other
though one of them has failed before it could ask. An error on rank 0 is an answer, too.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, Final

from ...errors import PeerFailedError
from .store import Words

# Questions whose answers stay in the store: no rank is so many steps behind another.
_KEPT: Final = 1000


class Answers:
    """The questions of one checkpointer, and rank 0's answers. From the thread that asks."""

    def __init__(self, words: Callable[[], Words], hear: Callable[[Sequence[str], str, str], list[str]]) -> None:
        """`hear` waits for words: their keys, what they are, and where it is waited."""
        self._words, self._hear = words, hear
        self._num_asked: dict[str, int] = {}  # what was asked last is at the end

    def of_rank_0(self, what: str, step: int, ask: Callable[[], tuple[Any, ...]] | None) -> tuple[Any, ...]:
        """Return the answer of `ask`, which is JSON, on rank 0. `ask` is None on the others. All ranks ask the same
        questions about a step in the same order.

        Raises PeerFailedError on the others where it raises on rank 0, and where rank 0 says nothing in time.
        """
        about = f"answer/{what}/{step}"
        number = self._num_asked.pop(about, 0)
        self._num_asked[about] = number + 1
        question = f"{about}/{number}"
        if ask is None:
            (text,) = self._hear([question], f"rank 0's word on {what}", what)
            answers = json.loads(text)
            if isinstance(answers, str):
                raise PeerFailedError(f"{what} has failed on rank 0: {answers}", rank=0)
        else:
            try:
                answers = ask()
            except BaseException as error:
                self._words().say(question, json.dumps(in_words(error)))
                raise
            self._words().say(question, json.dumps(answers))
        while len(self._num_asked) > _KEPT:
            oldest = next(iter(self._num_asked))
            for number in range(self._num_asked.pop(oldest)):
                if ask is not None:
                    self._words().forget(f"{oldest}/{number}")
        return tuple(answers)


def in_words(error: BaseException) -> str:
    """The text by which the other ranks are told of an error."""
    return f"{type(error).__name__}: {error}"[:2000]
