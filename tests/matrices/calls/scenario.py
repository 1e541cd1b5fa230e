"""A scenario of the attacks on calls: what it prepares, does and checks; and what its child notes meanwhile.

In: a folder, the notes of a child. Out: what the child has begun, been told and been refused. Knows nothing of: what is done.

A child notes that something begins, and that it was told of its end, in a file that is not below the attacked folder. Whatever
was told must be there; whatever is there must have been begun.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch

from async_ckpt import CheckpointError

FROZEN: Final = torch.arange(500.0)


def state_of(number: int) -> dict[str, Any]:
    return {"model": {"w": torch.full((3000,), float(number))}, "frozen": {"base": FROZEN}, "number": number}


def number_of(state: dict[str, Any]) -> int:
    """Which of these states it is. Raises AssertionError for any other."""
    number: int = state["number"]
    assert torch.equal(state["model"]["w"], torch.full((3000,), float(number))), "a torn state"
    assert torch.equal(state["frozen"]["base"], FROZEN), "a torn group"
    return number


class Notes:
    """What a child has begun and been told of: lines of a file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o644)

    @contextmanager
    def of(self, what: str, key: int, number: int) -> Iterator[None]:
        """The block does this; a documented error of it is noted, and the child goes on."""
        self._line("begun", what, key, number)
        try:
            yield
        except CheckpointError as error:
            self._line("refused", what, key, type(error).__name__)
        except OSError as error:  # of files that are the user's own
            self._line("refused", what, key, f"OSError-{error.errno}")
        else:
            self._line("told", what, key, number)

    def _line(self, *words: object) -> None:
        os.write(self._fd, (" ".join(map(str, words)) + "\n").encode())


@dataclass
class Told:
    """What the notes of a child say, after those of the starting state."""

    told: dict[int, int] = field(default_factory=dict)
    """Numbers by step or version, as of the last word about each."""
    may: dict[int, set[int]] = field(default_factory=dict)
    unsure: set[int] = field(default_factory=set)
    """Steps and versions that something was begun about, and not told of."""
    refused: list[str] = field(default_factory=list)

    def check(self, there: list[int], keep: int | None = None) -> None:
        """All steps or versions that were told of are there, but for those that retention may have deleted."""
        known = sorted({*self.told, *self.unsure})
        kept = known if keep is None else known[-keep:]
        gone = [key for key in kept if key not in self.unsure and key not in there]
        assert not gone, f"{gone} were told of, and are gone: {there}"

    def wrong_refusal(self, *, is_survived: bool, has_plain_errors: bool = False) -> str | None:
        """What should not have been refused, or not by this error. None if nothing."""
        refused = "; ".join(self.refused)
        if is_survived and refused:
            return f"it has failed: {refused}"
        if "OSError" in refused and not has_plain_errors:
            return f"it has raised an error that is none of the library's: {refused}"
        return None

    def read(self, path: Path) -> Told:
        for line in path.read_text().splitlines():
            kind, what, key, number = line.split()
            step = int(key)
            if kind == "refused":
                self.refused.append(f"{what} {key}: {number}")
                continue
            self.may.setdefault(step, set()).add(int(number))
            gone = [other for other in self.told if other > step] if what == "back" else []
            if kind == "begun":
                self.unsure |= {step, *gone}
            else:
                for other in gone:
                    self.told.pop(other)
                self.told[step] = int(number)
                self.unsure -= {step, *gone}
        return self


@dataclass(frozen=True)
class Scenario:
    """One kind of run. `prepare` and `act` get the folder that is attacked."""

    prepare: Callable[[Path], None]
    act: Callable[[Path, Notes], None]
    check: Callable[[Path, Told], None]
    before: Mapping[int, int] = field(default_factory=dict)
    """What `prepare` has saved: numbers by step or version."""
    has_plain_errors: bool = False
    """Whether it may raise OSError: of files that are the user's own, and for the exit status of the command."""
