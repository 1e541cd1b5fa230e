"""The versions at a root: which are there, what is in each, which are needed, and who may add one.

In: a storage. Out: indices, the way from what somebody has to what is wanted, and the bytes. Knows nothing of: replicas.

A version is there when its index is, which is written last. Its base is another one; a chain of them ends at an anchor.
"""

from __future__ import annotations

import json
import os
import re
import socket
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Final, NamedTuple

from ..errors import CheckpointError, ClosedError, CorruptCheckpointError, NotCommittedError
from ..format.delta import (
    INDEX,
    VersionIndex,
    checksum,
    folder_of,
    is_attempt,
    parse,
    version_of,
)
from ..storage.disk import sync_folder, translated
from ..storage.interface import Storage
from ..storage.locks import TEMP_SUFFIX, temps_of
from ..storage.scratch import Scratch
from .base import Base
from .notes import SINGLE
from .source import State, VersionSource

# Which publisher adds versions: the one that has written this last.
_OWNER: Final = "publisher.json"
# In a store: which folders a publisher is about to fill or to delete, each publisher by its token.
_UNFINISHED: Final = re.compile(r"unfinished(\.[0-9a-f]{16})?\.json")
# Whenever versions take the place of others, a publisher leaves such a mark in the root, and takes older ones away: whoever
# lists the root then believes nothing that was read before.
_MARK: Final = re.compile(r"replaced\.[0-9a-f]{16}\.json")


class _Known(NamedTuple):
    """An index that was read, its version in the storage, and what a disk knows it by."""

    told: VersionIndex
    version: str
    stamp: object


def marks_in(names: Iterable[str]) -> frozenset[str]:
    """The marks of replaced versions among the names in a root."""
    return frozenset(filter(_MARK.fullmatch, names))


def mark_replaced(root: Storage) -> None:
    """Have readers believe nothing that they have read at this root before."""
    older = marks_in(root.names(""))
    root.put_new(f"replaced.{os.urandom(8).hex()}.json", b"{}\n")
    root.delete_many(sorted(older))


class Versions:
    """The versions at one root. From any thread."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        # Versions that were there, each with what its index was known by then; under _lock.
        self._known: dict[int, _Known] = {}
        self._marks: frozenset[str] = frozenset()  # in the last listing; under _lock
        self._lock = threading.Lock()

    @property
    def root(self) -> str:
        return self.storage.locate("")

    def numbers(self, names: Iterable[str] | None = None) -> list[int]:
        """The versions that are whole, ascending: one listing, unless the names there are given, and a question for each
        that was not seen before.
        """
        there = [*(self.storage.names("") if names is None else names)]
        found = {number for name in there if (number := version_of(name)) is not None}
        with self._lock:
            before, self._marks = self._marks, marks_in(there)
            kept = self._known if before == self._marks else {}
            self._known = {
                n: known for n, known in kept.items() if n in found and known.stamp == self._stamp(n)
            }
            known = set(self._known)
        asked = {f"{folder_of(number)}/{INDEX}": number for number in sorted(found - known)}
        seen = {asked[path] for path in (self.storage.existing(list(asked)) if asked else ())}
        bare = {number for number in asked.values() if number not in seen and self._bare(number) is not None}
        return sorted(known | seen | bare)

    def _bare(self, number: int) -> VersionIndex | None:
        """The equivalent of an index of a version that others have published as one file, without one; None if it is no such.

        Only on a disk, where folders are renamed to their place: in a store the index tells that all of it is there.
        """
        if self.storage.remote or not Ownership(self.storage).admits(number, b""):
            return None
        index = VersionIndex(number, {"": SINGLE}, stamp=str(self._stamp(number, SINGLE)))
        try:
            return replace(
                index, files=dict.fromkeys(VersionSource(self.storage, index).held_in(SINGLE), SINGLE)
            )
        except CorruptCheckpointError:
            return None

    def read(self, number: int, *, wanted_by: str = "", fresh: bool = False) -> VersionIndex:
        """Raises NotCommittedError if it is not there, and CorruptCheckpointError for what is no index of it.

        What was read before is believed, unless it is to be `fresh`: somebody may have emptied the root and begun again.
        """
        with self._lock:
            known = None if fresh else self._known.get(number)
        path = f"{folder_of(number)}/{INDEX}"
        if known is not None and known.stamp == self._stamp(number):
            return known.told
        try:
            stamp = self._stamp(number)
            data, version = self.storage.read(path)
            index = replace(parse(data, number), stamp=version)
            if not index.is_sealed and not Ownership(self.storage).admits(number, data, index):
                raise ValueError(
                    f"it is damaged, or another program's: a Publisher publishes here ({_OWNER}), whose indices have digests of "
                    "themselves. What others publish belongs into a root of its own"
                )
        except FileNotFoundError:
            bare = self._bare(number)
            if bare is not None:
                return bare
            with self._lock:
                self._known.pop(number, None)
            there = self.numbers()
            told = f"there are {there[0]} to {there[-1]}" if there else "there is none"
            if wanted_by and number < there[0]:
                told += "; if it is the model that all began with, give its folder: Subscriber(root, base=…)"
            raise NotCommittedError(
                f"{self.root}: version {number} is not there{wanted_by}; {told}", path=self.root, step=number
            ) from None
        except ValueError as error:
            where = self.storage.locate(path)
            raise CorruptCheckpointError(
                f"{where}: {error}; fetch or publish it again", path=where
            ) from error
        with self._lock:
            self._known[number] = _Known(index, version, stamp)
        return index

    def bytes_of(self, number: int) -> bytes:
        """The index as it is in the storage; nothing if there is none."""
        try:
            return self.storage.read(f"{folder_of(number)}/{INDEX}")[0]
        except FileNotFoundError:
            return b""

    def _stamp(self, number: int, file: str = INDEX) -> object:
        """The identity of an index as a file on a disk; None in a store, where marks in the root do."""
        if self.storage.remote:
            return None
        with suppress(OSError):
            told = os.stat(Path(self.root) / folder_of(number) / file)
            return told.st_ino, told.st_mtime_ns, told.st_size
        return None

    def were_replaced(self, numbers: Iterable[int]) -> bool:
        """Whether one of these versions, as it was read last, is gone or another one by now."""
        for number in numbers:
            with self._lock:
                known = self._known.get(number)
            try:
                version = self.storage.read(f"{folder_of(number)}/{INDEX}")[1]
            except FileNotFoundError:
                return True
            if known is None or known.version != version:
                return True
        return False

    def read_or_base(
        self, number: int, base: Base | None, *, wanted_by: str = "", fresh: bool = True
    ) -> VersionIndex:
        """The index, or that of the base, which stands for what is older than all versions. Raises as `read` does."""
        try:
            return self.read(number, wanted_by=wanted_by, fresh=fresh)
        except NotCommittedError:
            if base is None or number >= min(self.numbers(), default=1):
                raise
            return base.index(number)

    def chain(self, target: int, state: State | None, base: Base | None = None) -> list[VersionIndex]:
        """The versions to apply to a state, or from nothing on, to have a version: in this order. Empty if it is there already.

        `base` stands for what the oldest version is against. Raises NotCommittedError where one is missing, and
        CorruptCheckpointError.
        """
        steps: list[VersionIndex] = []
        number, wanted_by = target, ""
        while True:
            index = self.read_or_base(number, base, wanted_by=wanted_by)
            if state is not None and state.is_version(index):
                break
            steps.append(index)
            if index.base is None or (state is not None and state.is_base_of(index)):
                break
            wanted_by = f", and version {number} is a delta against it"
            number = index.base
        return steps[::-1]

    def is_complete(self, number: int) -> bool:
        """Whether a version is there, and all that it is built on."""
        there, at = self.numbers(), number
        with suppress(CheckpointError):  # of an index that is damaged
            while at in there:
                base = self.read(at).base
                if base is None:
                    return True
                at = base
        return False

    def is_ours(self, number: int) -> bool:
        """Whether a publisher of this library has made it, as far as one can tell."""
        try:
            return bool(self.read(number).identity)
        except CheckpointError:
            return False

    def start_of(self, number: int) -> str:
        """In which start of all ranks it was published; empty if nobody can tell."""
        try:
            return self.read(number).start
        except CheckpointError:
            return ""

    def needed_by(self, kept: Sequence[int]) -> set[int]:
        """These versions, and all that their chains need, as far as they can be followed."""
        needed: set[int] = set()
        for number in kept:
            at: int | None = number
            while at is not None and at not in needed:
                needed.add(at)
                try:
                    at = self.read(at).base
                except CheckpointError:
                    break
        return needed

    def delete(
        self, numbers: Sequence[int], *, token: str = "", check: Callable[[], None] = lambda: None
    ) -> None:
        """Each at once, or the index first, so that nobody takes what is left for a version; the newest first, whose base it
        is not. `check` raises where the publisher with this token may delete nothing any more.
        """
        if numbers:
            self.begin(*numbers, token=token)
        for number in sorted(numbers, reverse=True):
            with self._lock:
                self._known.pop(number, None)
            check()
            if self.storage.remote:
                self.storage.delete(f"{folder_of(number)}/{INDEX}")
                self.storage.delete_all(folder_of(number))
            else:
                self._take_away(Path(self.root), folder_of(number))

    @staticmethod
    def _take_away(root: Path, name: str) -> None:
        """Under a name that the next publisher sweeps, if this one is killed meanwhile."""
        with Scratch(root, "weight_v") as scratch, translated(root / name), suppress(FileNotFoundError):
            os.replace(root / name, scratch.folder)
            sync_folder(root)

    def begin(self, *numbers: int, token: str) -> None:
        """Say that the folders of these versions are of no use without their index, before one of them is without.

        On a disk there are no such folders: they are renamed to their place, and from it.
        """
        if self.storage.remote:
            told = json.dumps({"versions": sorted(numbers)}).encode() + b"\n"
            self.storage.replace(f"unfinished.{token}.json", told)

    def delete_unfinished(self) -> None:
        """Delete what publishers have begun and not finished, and nothing else. Only for the owner of the root.

        Of a version that is there, these are the files of other attempts, which an overtaken publisher has written late.
        """
        if not self.storage.remote:
            return
        there = set(self.numbers())
        for name in filter(_UNFINISHED.fullmatch, self.storage.names("")):
            try:
                begun = [int(number) for number in json.loads(self.storage.read(name)[0])["versions"]]
            except (FileNotFoundError, ValueError, KeyError, TypeError):
                begun = []  # nobody can tell
            for number in begun:
                if number not in there:
                    self.storage.delete_all(folder_of(number))
                elif self.is_ours(number):
                    self._delete_other_attempts(number)
            self.storage.delete(name)

    def _delete_other_attempts(self, number: int) -> None:
        own = self.read(number).attempt
        for name in self.storage.names(folder_of(number)):
            if is_attempt(name) and name != own:
                self.storage.delete_all(f"{folder_of(number)}/{name}")

    def discard(self, number: int, attempt: str) -> None:
        """Delete what an attempt that has failed has written to a store."""
        self.storage.delete_all(f"{folder_of(number)}/{attempt}")


class Ownership:
    """The right of one publisher to add versions: the last that has taken it has it."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self.token = os.urandom(8).hex()
        self._told = b""
        self.is_taken = False

    def take(self) -> None:
        """Whoever has it has lost it."""
        told = {"token": self.token, "host": socket.gethostname(), "pid": os.getpid()}
        self._told = json.dumps({**told, "unsealed": self._unsealed()}, sort_keys=True).encode() + b"\n"
        names = [] if self._storage.remote else self._storage.names("")
        marks = [name for name in names if name.startswith(".replaced.") and name.endswith(TEMP_SUFFIX)]
        left = [*temps_of(_OWNER, names), *marks]
        self._storage.sweep("", left, delete=True)  # of those that were killed in the next line
        self._storage.replace(_OWNER, self._told)
        self.is_taken = True

    def _unsealed(self) -> dict[str, str]:
        """The versions whose index has no digest of itself, and that were there before the first publisher that writes one: each
        with the digest of its index, which is that of nothing if it has none.
        """
        told = self._owner()
        if told is not None and "unsealed" in told:
            return _texts(told["unsealed"])
        found: dict[str, str] = {}
        versions = Versions(self._storage)
        for number in versions.numbers():
            with suppress(CheckpointError):
                if not versions.read(number).is_sealed:
                    found[str(number)] = checksum(versions.bytes_of(number))
        return found

    def admits(self, number: int, data: bytes, index: VersionIndex | None = None) -> bool:
        """Whether an index that has no digest of itself is that of a version all the same.

        Where a publisher publishes, anything may be a damaged index of its own, also what looks as if others had written it.
        """
        told = self._owner()
        if told is None:
            return True
        if "unsealed" not in told:  # of a release before, of which indices say what they are
            return index is not None and bool(index.identity)
        return _texts(told["unsealed"]).get(str(number)) == checksum(data)

    def _owner(self) -> dict[str, object] | None:
        """The note of the publisher that has taken the root; None if none has."""
        try:
            told = json.loads(self._storage.read(_OWNER)[0])
        except FileNotFoundError:
            return None
        except (ValueError, RecursionError):
            return {"unsealed": {}}
        return told if isinstance(told, dict) else {"unsealed": {}}

    def check(self) -> None:
        """Raises ClosedError when another publisher has taken it since."""
        root = self._storage.locate("")
        try:
            told = self._storage.read(_OWNER)[0]
        except FileNotFoundError:
            raise ClosedError(
                f"{root}: somebody has emptied it while this Publisher was at work; make another one"
            ) from None
        if told != self._told:
            other = told.decode(errors="replace").strip()
            raise ClosedError(
                f"{root}: another Publisher has begun to publish here ({other:.200}); give each one a root of its own. "
                "If all ranks publish the same model, let rank 0 do it alone"
            )


def _texts(told: object) -> dict[str, str]:
    return told if isinstance(told, dict) and all(isinstance(t, str) for t in told.values()) else {}
