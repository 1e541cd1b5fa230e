"""The operations that would create pickled objects, recorded and not carried out.

In: the program of a pickle. Out: a value for each object, with all that it is made of. Knows nothing of: files, the
classes of the objects.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar, NoReturn

from .machine import ALL, PickleMachine


class UnknownInstructionError(Exception):
    """An instruction is not known to the machine."""


class Recorded:
    """The result of an operation on values of the stack, with the items that were added to it later."""

    __slots__ = ("operation", "parts")

    def __init__(self, operation: str, parts: Iterable[Any] = ()) -> None:
        self.operation, self.parts = operation, [*parts]


class Recorder(PickleMachine):
    """Interprets a pickle, and records for each object the operations that would create it."""

    accepted: ClassVar = ALL
    protocols: ClassVar = range(2, 6)

    def refuse(self, instruction: str) -> NoReturn:
        raise UnknownInstructionError(instruction)

    def find_global(self, module: str, name: str) -> Recorded:
        return Recorded("name", [f"{module}.{name}"])

    def call(self, function: Any, arguments: Any) -> Recorded:
        return Recorded("call", [function, arguments])

    def set_state(self, target: Any, state: Any) -> None:
        target.parts += [Recorded("state"), state]

    def persistent_load(self, key: Any) -> Recorded:
        return Recorded("storage", key)

    def empty_dict(self) -> Recorded:
        return Recorded("dict")

    def empty_set(self) -> Recorded:
        return Recorded("set")

    def set_items(self, into: Any, items: list[Any]) -> None:
        into.parts += items

    def append(self, into: Any, items: list[Any]) -> None:
        (into.parts if isinstance(into, Recorded) else into).extend(items)
