"""The versions at a root: which ones exist, their indices and chains, and which publisher may add a version.

In: a storage. Out: indices, chains of them from held weights to a wanted version. Knows nothing of: replicas.

The index of a version is written last, and the version exists from then on. The base of a delta is an earlier version.
Following the bases leads to an anchor.
"""

from __future__ import annotations

import json
import os
import re
import socket
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Final, NamedTuple

from ...errors import CheckpointError, ClosedError, CorruptCheckpointError, NotCommittedError
from ...plumbing import Storage, disk, fields, locks, scratches, store_facts
from ..delta import (
    INDEX,
    VersionIndex,
    checksum,
    folder_of,
    is_attempt,
    parse,
    version_of,
)
from .base_model import BaseModel
from .folder_notes import SINGLE
from .version_files import VersionSource, WeightsState

# Only the publisher that wrote this file last may add versions.
_OWNER: Final = "publisher.json"
# The prefix of scratch folders on a disk.
UNFINISHED_VERSION: Final = "weight_v"
# Earlier releases listed in these files the folders in a store that they were about to fill or to delete.
_UNFINISHED: Final = re.compile(r"unfinished(\.[0-9a-f]{16})?\.json")
# A publisher that replaces versions writes a new mark to the root and deletes older marks. A reader discards its cache
# when it finds another mark than before in a listing.
_MARK: Final = re.compile(r"replaced\.[0-9a-f]{16}\.json")


def marks_in(names: Iterable[str]) -> frozenset[str]:
    """The marks of replaced versions among the names at a root."""
    return frozenset(filter(_MARK.fullmatch, names))


def mark_replaced(root: Storage) -> None:
    """Make readers discard their caches of this root."""
    older = marks_in(root.names(""))
    root.put_new(f"replaced.{os.urandom(8).hex()}.json", b"{}\n")
    root.delete_many(sorted(older))


class Versions:
    """The versions at one root, with a cache of their indices. Thread-safe.

    `base` is the base of the oldest version, if that version is a delta against a model that was not published.
    """

    def __init__(self, storage: Storage, base: BaseModel | None = None) -> None:
        self.storage, self.base = storage, base
        self._known: dict[int, VersionIndex] = {}  # by version; under _lock
        self._marks: frozenset[str] = frozenset()  # in the last listing; under _lock
        self._owner_token: str | None = None  # of the publisher at that time; under _lock
        self._lock = threading.Lock()

    @property
    def root(self) -> str:
        return self.storage.locate("")

    def numbers(self, names: Iterable[str] | None = None) -> list[int]:
        """The complete versions, ascending.

        Sends one listing, unless the names at the root are given, and a request for each version not seen before.
        """
        listed = [*(self.storage.names("") if names is None else names)]
        folders = {number for name in listed if (number := version_of(name)) is not None}
        with self._lock:
            before, self._marks = self._marks, marks_in(listed)
            kept = self._known if before == self._marks else {}
            self._owner_token = self._owner_token if before == self._marks and self.storage.remote else None
            self._known = {n: known for n, known in kept.items() if n in folders and self._is_current(known)}
            known = set(self._known)
        requested = {f"{folder_of(number)}/{INDEX}": number for number in sorted(folders - known)}
        seen = {requested[path] for path in (self.storage.existing(list(requested)) if requested else ())}
        bare = {number for number in {*requested.values()} - seen if self._version_without_index(number) is not None}
        return sorted(known | seen | bare)

    def _version_without_index(self, number: int) -> VersionIndex | None:
        """An index for a version that another program published as one file without an index; None without such a file.

        Always None in a store, where only an index shows that a version is complete. On a disk, folders are renamed.
        """
        if self.storage.remote or not _admits(self.storage, number, b""):
            return None
        index = VersionIndex(number, {"": SINGLE}, stamp=self._stamp(number, SINGLE))
        try:
            return replace(index, files=dict.fromkeys(VersionSource(self.storage, index).tensors_in(SINGLE), SINGLE))
        except CorruptCheckpointError:
            return None

    def read(
        self, number: int, *, wanted_by: str = "", fresh: bool = False, others: Collection[int] = ()
    ) -> VersionIndex:
        """The index of a version. Raises NotCommittedError if it does not exist, and CorruptCheckpointError.

        With `fresh`, the cache is not used, because the root may have been emptied and filled again. `others` are more
        versions at the root to name in the message.
        """
        with self._lock:
            known = None if fresh else self._known.get(number)
        path = f"{folder_of(number)}/{INDEX}"
        if known is not None and self._is_current(known):
            return known
        try:
            stamp = self._stamp(number)
            data, version = self.storage.read(path)
            index = replace(parse(data, number), stamp=version if self.storage.remote else stamp)
            if not index.is_sealed and not _admits(self.storage, number, data, index):
                raise ValueError(
                    f"it is damaged, or another program's: a Publisher publishes here ({_OWNER}), and its indices "
                    "have digests of themselves. Let other programs publish to another root"
                )
        except FileNotFoundError:
            bare = self._version_without_index(number)
            if bare is not None:
                return bare
            with self._lock:
                self._known.pop(number, None)
            existing = sorted({*self.numbers(), *others})
            advice = f"there are {existing[0]} to {existing[-1]}" if existing else "there is none"
            if wanted_by and existing and number < existing[0]:
                advice += "; if it is the model that all began with, give its folder: Subscriber(root, base=…)"
            raise NotCommittedError(
                f"{self.root}: version {number} does not exist{wanted_by}; {advice}", path=self.root, step=number
            ) from None
        except ValueError as error:
            shown = self.storage.locate(path)
            raise CorruptCheckpointError(f"{shown}: {error}; fetch or publish it again", path=shown) from error
        with self._lock:
            self._known[number] = index
        return index

    def bytes_of(self, number: int) -> bytes:
        """The bytes of an index; empty if it does not exist."""
        try:
            return self.storage.read(f"{folder_of(number)}/{INDEX}")[0]
        except FileNotFoundError:
            return b""

    def _is_current(self, known: VersionIndex) -> bool:
        """Whether a cached index is still in its file. Always in a store, where marks at the root show changes."""
        return self.storage.remote or known.stamp == self._stamp(known.version)

    def _stamp(self, number: int, file: str = INDEX) -> str:
        """The identity of a file on a disk; empty in a store, and if there is no such file."""
        if not self.storage.remote:
            with suppress(OSError):
                status = os.stat(Path(self.root) / folder_of(number) / file)
                return f"{status.st_ino}-{status.st_mtime_ns}-{status.st_size}"
        return ""

    def were_replaced(self, numbers: Iterable[int]) -> bool:
        """Whether one of these versions was deleted or replaced since its index was read."""
        for number in numbers:
            with self._lock:
                known = self._known.get(number)
            path = f"{folder_of(number)}/{INDEX}"
            try:
                stamp = self.storage.read(path)[1] if self.storage.remote else self._stamp(number)
            except FileNotFoundError:
                return True
            if known is None or known.stamp != stamp:
                return True
        return False

    def read_or_base(self, number: int, *, wanted_by: str = "", fresh: bool = True) -> VersionIndex:
        """The index of a version. Versions older than all at the root are the base model. Raises as `read` does."""
        try:
            return self.read(number, wanted_by=wanted_by, fresh=fresh)
        except NotCommittedError:
            if self.base is None or number >= min(self.numbers(), default=1):
                raise
            return self.base.index(number)

    def is_base(self, index: VersionIndex) -> bool:
        """Whether this is the index of the base model."""
        return self.base is not None and self.base.is_source_of(index)

    def source(self, index: VersionIndex) -> VersionSource:
        """The files of the version, or of the base model, that an index describes."""
        if self.base is not None and self.is_base(index):
            return self.base.source(index)
        return VersionSource(self.storage, index)

    def chain(self, target: int, state: WeightsState | None) -> list[VersionIndex]:
        """The versions to apply, in order, to get from `state` to `target`. Empty if `state` is that version already.

        Without a state, the chain begins with an anchor. Raises NotCommittedError if a version is missing, and
        CorruptCheckpointError.
        """
        chain: list[VersionIndex] = []
        number, wanted_by = target, ""
        while True:
            index = self.read_or_base(number, wanted_by=wanted_by)
            if state is not None and state.is_version(index):
                break
            chain.append(index)
            if index.base is None or (state is not None and state.is_base_of(index)):
                break
            wanted_by = f", and version {number} is a delta against it"
            number = index.base
        return chain[::-1]

    def owner_token(self, *, fresh: bool = False) -> str:
        """The token of the publisher that owns the root; empty if no publisher does.

        In a store it is cached until a listing shows another publisher. With `fresh`, the cache is not used.
        """
        with self._lock:
            known = None if fresh else self._owner_token
        token = token_of_owner(self.storage) if known is None else known
        with self._lock:
            self._owner_token = token
        return token

    def is_complete(self, number: int) -> bool:
        """Whether a version and all versions that it is built on exist."""
        existing = self.numbers()
        return all(at in existing and index is not None for at, index in self._built_on(number))

    def _built_on(self, number: int) -> Iterator[tuple[int, VersionIndex | None]]:
        """A version and its bases, with their indices, down to an anchor, or with None at an unreadable index."""
        at: int | None = number
        while at is not None:
            index = self._read_if_sound(at)
            yield at, index
            at = None if index is None else index.base

    def is_ours(self, number: int) -> bool:
        """Whether a Publisher has made this version, according to its index."""
        index = self._read_if_sound(number)
        return index is not None and bool(index.identity)

    def start_of(self, number: int) -> str:
        """The start of all ranks in which a version was published; empty if its index does not contain it."""
        index = self._read_if_sound(number)
        return "" if index is None else index.slices.start

    def _read_if_sound(self, number: int) -> VersionIndex | None:
        """The index of a version; None if it cannot be read."""
        try:
            return self.read(number)
        except CheckpointError:
            return None

    def needed_by(self, kept: Sequence[int]) -> set[int]:
        """These versions, and all versions in their chains, as far as indices can be read."""
        needed: set[int] = set()
        for number in kept:
            for at, _ in self._built_on(number):
                if at in needed:
                    break
                needed.add(at)
        return needed

    def delete(self, numbers: Sequence[int], check: Callable[[], None]) -> None:
        """Delete versions, the newest first, because they are built on older ones.

        On a disk, a folder is removed by one rename. In a store, its index is deleted first, so that no reader takes
        the remaining files for a version. `check` raises if the publisher may no longer delete.
        """
        for number in sorted(numbers, reverse=True):
            with self._lock:
                self._known.pop(number, None)
            check()
            if self.storage.remote:
                self.storage.delete(f"{folder_of(number)}/{INDEX}")
                self.storage.delete_all(folder_of(number))
            else:
                self._remove_folder(Path(self.root), folder_of(number))

    @staticmethod
    def _remove_folder(root: Path, name: str) -> None:
        """Delete a folder, after renaming it so that the next publisher deletes it if this process is killed."""
        with (
            scratches.Scratch(root, UNFINISHED_VERSION) as scratch,
            disk.translated(root / name),
            suppress(FileNotFoundError),
        ):
            os.replace(root / name, scratch.folder)
            disk.sync_folder(root)

    def delete_unfinished(self) -> None:
        """Delete the attempts in a store that no index names. Only the owner of the root may call this.

        Such attempts remain of publishers that were killed or lost the root, and of interrupted deletions. On a disk
        there are none, because folders are renamed into place and out of it.
        """
        if not self.storage.remote:
            return
        existing = set(self.numbers())
        try:
            paths = self.storage.sizes("")
        except CorruptCheckpointError:  # another program has put an object there whose name is no path
            return
        for folder, attempt in sorted({(*path.split("/"), "")[:2] for path in paths}):
            number = version_of(folder)
            if number is None or not is_attempt(attempt):
                continue
            index = self._read_if_sound(number)
            if number not in existing or (index is not None and index.identity and index.attempt != attempt):
                self.discard(number, attempt)
        self.storage.sweep("", [*filter(_UNFINISHED.fullmatch, paths)], delete=True, decided=True)

    def clear(self, number: int) -> bool:
        """Delete late files in the folder of a version that does not exist. Returns whether the folder is empty then.

        Only the owner of the root may call this.
        """
        names = self.storage.names(folder_of(number))
        if names and self.storage.remote and all(map(is_attempt, names)):
            self.storage.delete_all(folder_of(number))
            return True
        return not names

    def withdraw(self, number: int, data: bytes, attempt: str) -> None:
        """Remove a version that a publisher added, with these bytes as its index, after it had lost the root."""
        if self.bytes_of(number) != data:
            return
        if self.storage.remote:
            self.storage.delete(f"{folder_of(number)}/{INDEX}")
            self.discard(number, attempt)
            mark_replaced(self.storage)
        else:
            self._remove_folder(Path(self.root), folder_of(number))

    def discard(self, number: int, attempt: str) -> None:
        """Delete the files of an attempt in a store."""
        self.storage.delete_all(f"{folder_of(number)}/{attempt}")


class Ownership:
    """The right of one publisher to add versions. The publisher that took the root last owns it.

    Owned by a `VersionSeries`. Rank 0 of several ranks `also` owns the common root, so that it and a publisher of
    another world detect each other.
    """

    def __init__(self, storage: Storage, also: Ownership | None = None, token: str = "") -> None:
        """`token` is random by default."""
        self._storage, self._also = storage, also
        self.token = token or os.urandom(8).hex()
        self._note = b""
        self.is_taken = False

    def take(self) -> None:
        """Take the root from the publisher that owns it, if any."""
        if self._also is not None:
            self._also.take()
        owner = {"token": self.token, "host": socket.gethostname(), "pid": os.getpid()}
        self._note = json.dumps({**owner, "unsealed": self._unsealed()}, sort_keys=True).encode() + b"\n"
        names = self._storage.names("")
        marks = [name for name in names if name.startswith(".replaced.") and name.endswith(locks.TEMP_SUFFIX)]
        probes = [name for name in names if name.startswith(store_facts.PROBE)]
        left = [*locks.temps_of(_OWNER, names), *marks, *probes]
        self._storage.sweep("", left, delete=True, decided=True)  # left by killed processes
        self._storage.replace(_OWNER, self._note)
        if not self._storage.remote:  # the publisher that loses the root cannot rename its folder into place any more
            root = Path(self._storage.locate(""))
            with disk.translated(root):
                scratches.take_away(root, UNFINISHED_VERSION)
        if self._storage.remote:  # the root may have been emptied, and get other versions with the same numbers
            mark_replaced(self._storage)
        self.is_taken = True

    def _unsealed(self) -> dict[str, str]:
        """The versions without a digest in their index that existed before the first publisher that writes digests.

        Maps each version's number to the digest of its index, or of no bytes if it has no index.
        """
        owner = _owner_of(self._storage)
        if owner is not None and owner.unsealed is not None:
            return owner.unsealed
        unsealed: dict[str, str] = {}
        versions = Versions(self._storage)
        for number in versions.numbers():
            with suppress(CheckpointError):
                if not versions.read(number).is_sealed:
                    unsealed[str(number)] = checksum(versions.bytes_of(number))
        return unsealed

    def check(self) -> None:
        """Raises ClosedError if another publisher has taken the root."""
        if self._also is not None:
            self._also.check()
        root = self._storage.locate("")
        try:
            note = self._storage.read(_OWNER)[0]
        except FileNotFoundError:
            raise ClosedError(
                f"{root}: another process has emptied it while this Publisher was open; create a new one"
            ) from None
        if note != self._note:
            other = note.decode(errors="replace").strip()
            raise ClosedError(
                f"{root}: another Publisher has begun to publish here ({other:.200}); give each its own root. If "
                "all ranks publish the same model, let rank 0 publish alone"
            )


def token_of_owner(storage: Storage) -> str:
    """The token of the publisher that owns this root; empty if no publisher does."""
    owner = _owner_of(storage)
    return "" if owner is None else owner.token


def _admits(storage: Storage, number: int, data: bytes, index: VersionIndex | None = None) -> bool:
    """Whether to accept an index that does not contain its own digest.

    At a root with a publisher, such an index may be a damaged index of that publisher, whatever it looks like.
    """
    owner = _owner_of(storage)
    if owner is None:
        return True
    if owner.unsealed is None:
        return index is not None and bool(index.identity)
    return owner.unsealed.get(str(number)) == checksum(data)


class _OwnerNote(NamedTuple):
    """The note of a publisher. `unsealed` is None in notes of earlier releases, whose indices have an identity."""

    token: str
    unsealed: dict[str, str] | None


def _owner_of(storage: Storage) -> _OwnerNote | None:
    """The note of the publisher that owns the root; None if no publisher does. An unreadable note counts as empty."""
    try:
        note = fields.table(fields.parsed(storage.read(_OWNER)[0]))
        unsealed = dict(fields.entries(note["unsealed"], fields.text)) if "unsealed" in note else None
        return _OwnerNote(fields.text(note.get("token", "")), unsealed)
    except FileNotFoundError:
        return None
    except ValueError:
        return _OwnerNote("", {})
