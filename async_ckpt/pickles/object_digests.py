"""Digests of pickled objects, which are equal for equal objects of several ranks though their pickles may differ.

In: what `torch.save` made of a list of objects. Out: digests. Knows nothing of: what the objects are; none of them is made.

The order of a set does not count, nor which parts of an object were one in memory.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, Final, NoReturn

from ..spec import MIB
from .machine import ALL, PickleMachine
from .saved_objects import records

# Named as Python 2 had them, too: `torch.save` pickles by protocol 2.
_SETS: Final = {f"{module}.{name}" for module in ("builtins", "__builtin__") for name in ("set", "frozenset")}
_MAX_BYTES: Final = MIB  # it takes a microsecond for each


def object_digests(data: bytes) -> Callable[[int], str]:
    """That of each object of the list, by its number. Raises ValueError for what `torch.save` never makes of a list.

    Of large or very deep pickles, which would take long to follow, only all of the bytes are compared.
    """
    found = records(data)
    if len(found.get("data.pkl", b"")) > _MAX_BYTES:
        return lambda _: _digested([data]).hex()
    try:
        objects = _Operations().follow(found["data.pkl"])
        if type(objects) is not list:
            raise ValueError("it is no list of objects")
        digests = _Digests(found)
        return [digests.of(one).hex() for one in objects].__getitem__
    except (RecursionError, _NotFollowedError):
        return lambda _: _digested([data]).hex()
    except LookupError as error:
        raise ValueError(f"it is no pickle: {error!r}") from error


class _NotFollowedError(Exception):
    """For an instruction that the machine does not know."""


class _Result:
    """The result of an operation on values from the stack; and the items that others have put into it since."""

    __slots__ = ("operation", "parts")

    def __init__(self, operation: str, parts: Iterable[Any] = ()) -> None:
        self.operation, self.parts = operation, [*parts]


class _Operations(PickleMachine):
    """Follows a pickle, and keeps of each object how it would be made."""

    accepted: ClassVar = ALL
    protocols: ClassVar = range(2, 6)

    def refuse(self, instruction: str) -> NoReturn:
        raise _NotFollowedError(instruction)

    def named(self, module: str, name: str) -> _Result:
        return _Result("name", [f"{module}.{name}"])

    def called(self, function: Any, arguments: Any) -> _Result:
        return _Result("call", [function, arguments])

    def given_state(self, made: Any, state: Any) -> None:
        made.parts += [_Result("state"), state]

    def persistent(self, key: Any) -> _Result:
        return _Result("storage", key)

    def empty_dict(self) -> _Result:
        return _Result("dict")

    def empty_set(self) -> _Result:
        return _Result("set")

    def set_items(self, into: Any, items: list[Any]) -> None:
        into.parts += items

    def append(self, into: Any, items: list[Any]) -> None:
        (into.parts if isinstance(into, _Result) else into).extend(items)


class _Digests:
    """The digests of values that a program has left, each made once."""

    def __init__(self, records: Mapping[str, bytes]) -> None:
        self._records = records
        self._known: dict[
            int, bytes
        ] = {}  # by the identity of lists, tuples and results, which all live as long

    def of(self, value: Any) -> bytes:
        if not isinstance(value, list | tuple | _Result):
            return _digested([f"{type(value).__name__} {value!r}".encode(errors="surrogatepass")])
        if id(value) not in self._known:
            self._known[id(value)] = b"itself"  # for what holds itself
            self._known[id(value)] = _digested(self._parts_of(value))
        return self._known[id(value)]

    def _parts_of(self, value: Any) -> list[bytes]:
        if not isinstance(value, _Result):
            return [type(value).__name__.encode(), *map(self.of, value)]
        parts = value.parts
        if value.operation == "storage":
            word, kind, key, _, size = parts  # where it was does not count
            return [b"storage", *map(self.of, (word, kind, size)), self._records[f"data/{key}"]]
        digests = [*map(self.of, parts)]
        if value.operation == "call" and isinstance(parts[0], _Result) and parts[0].parts[0] in _SETS:
            digests[1] = b"".join(sorted(map(self.of, parts[1][0])))
        return [value.operation.encode(), *digests]


def _digested(parts: Iterable[bytes]) -> bytes:
    made = hashlib.blake2b(digest_size=8)
    for part in parts:
        made.update(len(part).to_bytes(8, "little"))
        made.update(part)
    return made.digest()
