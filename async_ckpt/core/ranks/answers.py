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

    def question(self, what: str, step: int) -> str:
        """A new question about a step. All ranks ask the same ones about it in the same order."""
        about = f"answer/{what}/{step}"
        number = self._num_asked.pop(about, 0)
        self._num_asked[about] = number + 1
        return f"{about}/{number}"

    def of_rank_0(self, question: str, ask: Callable[[], tuple[Any, ...]] | None) -> tuple[Any, ...]:
        """Return the answer of `ask`, which is JSON, on rank 0. `ask` is None on the others.

        Raises PeerFailedError on the others where it raises on rank 0, and where rank 0 says nothing in time.
        """
        if ask is not None:
            try:
                answers = ask()
            except BaseException as error:
                self.fail(question, error)
                raise
            self._words().say(question, json.dumps(answers))
            self._forget()
            return answers
        what = question.split("/")[1]
        (text,) = self._hear([question], f"rank 0's word on {what}", what)
        while len(self._num_asked) > _KEPT:
            del self._num_asked[next(iter(self._num_asked))]
        answers = json.loads(text)
        if isinstance(answers, str):
            raise PeerFailedError(f"{what} has failed on rank 0: {answers}", rank=0)
        return tuple(answers)

    def fail(self, question: str, error: BaseException) -> None:
        """On rank 0: answer a question with an error, which the other ranks raise as PeerFailedError."""
        self._words().say(question, json.dumps(in_words(error)))

    def _forget(self) -> None:
        while len(self._num_asked) > _KEPT:
            about = next(iter(self._num_asked))
            for number in range(self._num_asked.pop(about)):
                self._words().forget(f"{about}/{number}")


def in_words(error: BaseException) -> str:
    """The text by which the other ranks are told of an error."""
    return f"{type(error).__name__}: {error}"[:2000]
