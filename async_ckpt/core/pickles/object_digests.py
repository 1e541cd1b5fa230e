"""Digests of pickled objects, which are equal for equal objects of several ranks even if their pickles differ.

In: the output of `torch.save` for a list of objects. Out: digests. Knows nothing of: the classes of the objects.

The order of a set does not count, and neither does the sharing of parts in memory. No object is created.
"""

from __future__ import annotations

import hashlib
import struct
import zipfile
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from ..spec import MIB
from .machine import Recorded, Recorder, UnknownInstructionError
from .saved_objects import records

# With the names of Python 2, too, since `torch.save` pickles by protocol 2.
_SETS: Final = {f"{module}.{name}" for module in ("builtins", "__builtin__") for name in ("set", "frozenset")}
_MAX_BYTES: Final = MIB  # it takes a microsecond for each byte


def object_digests(data: bytes) -> Callable[[int], str]:
    """The digest of each object in a list, by its number. Raises ValueError for bytes that `torch.save` never writes.

    Large or very deep pickles take too long to interpret, so their objects all have the digest of the whole pickle.
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
    """The digest of one object. Bytes that `torch.save` never writes are taken as they are."""
    try:
        contents = records(data)
        if len(contents["data.pkl"]) <= _MAX_BYTES:
            return _Digests(contents).of(Recorder().follow(contents["data.pkl"])).hex()
    except (ValueError, LookupError, RecursionError, zipfile.BadZipFile, UnknownInstructionError):
        pass
    return _digest([data]).hex()


class _Digests:
    """The digests of the values of one pickle, each computed once."""

    def __init__(self, records: Mapping[str, bytes]) -> None:
        self._records = records
        self._known: dict[int, bytes] = {}  # by the id of lists, tuples and results, which all live as long
        self._open: dict[int, int] = {}  # the ids of those that contain the current value, with their depths

    def of(self, value: Any) -> bytes:
        if type(value) is float:  # of NaN, `repr` is one text for many bits
            return _digest([b"float", struct.pack(">d", value)])
        if not isinstance(value, list | tuple | Recorded):
            return _digest([f"{type(value).__name__} {value!r}".encode(errors="surrogatepass")])
        if id(value) in self._open:  # it contains itself: so many levels up
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
            word, kind, key, _, size = parts  # the device does not count
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
