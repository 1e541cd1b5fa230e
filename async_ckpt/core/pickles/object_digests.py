"""Digests of pickled objects. Equal objects of several ranks have equal digests, even if their pickles differ.

In: the output of `torch.save` for a list of objects. Out: digests. Knows nothing of: the classes of the objects.

The digest depends neither on the order of sets nor on which parts share memory. No object is created.
"""

from __future__ import annotations

import hashlib
import struct
import zipfile
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any, Final

from ..spec import MIB
from .machine import Recorded, Recorder, UnknownInstructionError
from .saved_objects import records

# Also by their names in Python 2, since `torch.save` uses protocol 2.
_SETS: Final = {f"{module}.{name}" for module in ("builtins", "__builtin__") for name in ("set", "frozenset")}
_MAX_BYTES: Final = MIB  # interpreting takes a microsecond per byte


def object_digests(data: bytes) -> Callable[[int], str]:
    """A function that returns the digest of each object in a list, by number.

    Large or very deep pickles take too long to interpret, so all their objects get the digest of the whole pickle.
    Raises ValueError for bytes that `torch.save` never writes.
    """
    contents = records(data)
    if len(contents.get("data.pkl", b"")) > _MAX_BYTES:
        return lambda _: _digest([data]).hex()
    try:
        objects = Recorder().follow(contents["data.pkl"])
        if type(objects) is not list:
            raise ValueError("it is not a list of objects")
        digests = _Digests(contents)
        return [digests.of(value).hex() for value in objects].__getitem__
    except (RecursionError, UnknownInstructionError):
        return lambda _: _digest([data]).hex()
    except LookupError as error:
        raise ValueError(f"it is not a pickle: {error!r}") from error


def object_digest(data: bytes) -> str:
    """The digest of one object. Of bytes that `torch.save` never writes, it is the digest of the bytes."""
    with suppress(ValueError, LookupError, RecursionError, zipfile.BadZipFile, UnknownInstructionError):
        contents = records(data)
        if len(contents["data.pkl"]) <= _MAX_BYTES:
            return _Digests(contents).of(Recorder().follow(contents["data.pkl"])).hex()
    return _digest([data]).hex()


class _Digests:
    """The digests of the values of one pickle, each computed once."""

    def __init__(self, records: Mapping[str, bytes]) -> None:
        self._records = records
        self._known: dict[int, bytes] = {}  # by id; the values outlive this object, so ids are not reused
        self._open: dict[int, int] = {}  # the ids of the values that contain the current one, with their depths

    def of(self, value: Any) -> bytes:
        if type(value) is float:  # by its bits, since all NaNs have the same `repr`
            return _digest([b"float", struct.pack(">d", value)])
        if not isinstance(value, list | tuple | Recorded):
            return _digest([f"{type(value).__name__} {value!r}".encode(errors="surrogatepass")])
        if id(value) in self._open:  # a cycle: the digest says how many levels up it leads
            return b"itself %d" % (len(self._open) - self._open[id(value)])
        if id(value) not in self._known:
            self._open[id(value)] = len(self._open)
            self._known[id(value)] = _digest(self._parts_of(value))
            del self._open[id(value)]
        return self._known[id(value)]

    def _parts_of(self, value: Any) -> list[bytes]:
        if not isinstance(value, Recorded):
            return [type(value).__name__.encode(), *map(self.of, value)]
        parts = value.parts
        if value.operation == "storage":
            word, kind, key, _, size = parts  # without the device
            return [b"storage", *map(self.of, (word, kind, size)), self._records[f"data/{key}"]]
        digests = [*map(self.of, parts)]
        if value.operation == "call" and isinstance(parts[0], Recorded) and parts[0].parts[0] in _SETS:
            digests[1] = b"".join(sorted(map(self.of, parts[1][0])))
        return [value.operation.encode(), *digests]


def _digest(parts: Iterable[bytes]) -> bytes:
    hasher = hashlib.blake2b(digest_size=8)
    for part in parts:
        hasher.update(len(part).to_bytes(8, "little"))
        hasher.update(part)
    return hasher.digest()
