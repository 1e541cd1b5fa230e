"""The states in which a disk may come back after the power was cut behind any call of a trace.

In: records. Out: trees, each with the names and bytes that a journaling file system may show. Knows nothing of: checkpoints.

A file: each block of 4 KiB that was written since the last fsync of the file is new, or as it was at that fsync, which is zero where
there was nothing. Its size is the old one, the new one, or any in between at which a call or a block ends. So a file may be shorter, or
empty, or have its size but zeros as its data, whatever its name is by then: that is delayed allocation. O_DIRECT makes nothing durable.

Names: each change of names reaches the disk whole or not at all, as a transaction of a journal does, in one of two models.

`posix`: only fsync of a folder makes the changes in it durable, and those which they need. Any other subset of the changes may be
there, in which each has those that it needs: the changes of the same name before it and, if it removes a folder, the removal of what was in
it. Changes in different folders are in no order, and the fsync of a file makes no name durable. This is weaker than what any file system of
Linux does, and all that POSIX promises.

`journal`: the changes reach the disk in their order, and any fsync makes all of them before it durable, as with ext4.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from .disk_records import TOP, Create, Entry, Exchange, Link, NameChange, Record, Remove, Rename, Resize, Sync, Write

BLOCK_BYTES = 4096
POSIX, JOURNAL = "posix", "journal"
MODELS = (POSIX, JOURNAL)
_MOST_CONTENTS = 48  # of one file

Tree: TypeAlias = Mapping[str, bytes | None]
"""Bytes by path; None for a folder."""


class _File:
    """What is durable of a file, and what may be."""

    def __init__(self) -> None:
        self._durable = self._now = b""
        self._blocks: set[int] = set()  # written since the last sync
        self._sizes: set[int] = set()
        self._found: list[bytes] | None = None

    def write(self, offset: int, data: bytes) -> None:
        now = self._now.ljust(offset, b"\0")
        self._now = now[:offset] + data + now[offset + len(data) :]
        self._blocks |= {*range(offset // BLOCK_BYTES, -(-(offset + len(data)) // BLOCK_BYTES))}
        self._note_size()

    def resize(self, num_bytes: int) -> None:
        self._now = self._now[:num_bytes].ljust(num_bytes, b"\0")
        if num_bytes < len(self._durable):  # what is written there later is over zeros, or over what was there
            self._blocks |= {*range(num_bytes // BLOCK_BYTES, -(-len(self._durable) // BLOCK_BYTES))}
        self._note_size()

    def _note_size(self) -> None:
        self._sizes |= {len(self._now)}
        self._found = None

    def sync(self) -> None:
        self._durable = self._now
        self._blocks, self._sizes, self._found = set(), set(), None

    def contents(self, chosen: random.Random) -> list[bytes]:
        """What a reader may find after a cut: first all of it, then what is durable."""
        if self._found is None:
            found = {self._now: None, self._durable: None}
            sizes = sorted({*self._sizes, len(self._durable), *self._ends()})
            for blocks in _some_subsets(sorted(self._blocks), chosen):
                found |= dict.fromkeys(self._content(size, blocks) for size in sizes)
            self._found = [*found]
            if len(found) > _MOST_CONTENTS:
                self._found[2:] = chosen.sample(self._found[2:], _MOST_CONTENTS - 2)
        return self._found

    def _ends(self) -> Iterator[int]:
        least, most = sorted((len(self._durable), len(self._now)))
        return (block * BLOCK_BYTES for block in self._blocks if least < block * BLOCK_BYTES < most)

    def _content(self, num_bytes: int, new: Sequence[int]) -> bytes:
        content = bytearray(self._durable[:num_bytes].ljust(num_bytes, b"\0"))
        for block in new:
            begin, end = block * BLOCK_BYTES, min((block + 1) * BLOCK_BYTES, num_bytes)
            if begin < end:
                content[begin:end] = self._now[begin:end].ljust(end - begin, b"\0")
        return bytes(content)


def _some_subsets(blocks: Sequence[int], chosen: random.Random) -> Iterator[Sequence[int]]:
    if len(blocks) <= 3:
        yield from itertools.chain.from_iterable(itertools.combinations(blocks, n) for n in range(len(blocks) + 1))
        return
    yield from ((), blocks, blocks[:-1], blocks[1:])
    for _ in range(24):
        yield [block for block in blocks if chosen.random() < 0.5]


@dataclass(eq=False, slots=True)
class _Change:
    """A change of names that is not durable. `needs` are the changes before it without which it cannot be."""

    sets: Mapping[Entry, int | None]
    needs: list[_Change] = field(default_factory=list)


class Disk:
    """A disk behind the calls that were applied so far."""

    def __init__(self, model: str = POSIX) -> None:
        self._model = model
        self._files: dict[int, _File] = {}
        self._folders = {TOP}
        self._now: dict[Entry, int] = {}
        self._durable: dict[Entry, int] = {}
        self._pending: list[_Change] = []

    def apply(self, record: Record) -> None:
        match record:
            case Write(file, offset, data):
                self._files[file].write(offset, data)
            case Resize(file, num_bytes):
                self._files[file].resize(num_bytes)
            case Sync(of):
                self._sync(of)
            case Create() | Rename() | Exchange() | Link() | Remove():
                self._change(record)

    def _change(self, record: NameChange) -> None:
        removed = None
        sets: dict[Entry, int | None]
        match record:
            case Create(entry, made, is_folder):
                sets = {entry: made}
                if is_folder:
                    self._folders.add(made)
                else:
                    self._files[made] = _File()
            case Rename(entry, to):
                sets = {to: self._now[entry], entry: None}
            case Exchange(entry, to):
                sets = {to: self._now[entry], entry: self._now[to]}
            case Link(entry, to):
                sets = {to: self._now[entry]}
            case Remove(entry):
                removed = self._now[entry]
                sets = {entry: None}
        needs = [earlier for earlier in self._pending if earlier.sets.keys() & sets.keys()]
        if removed in self._folders:
            needs += [earlier for earlier in self._pending if any(folder == removed for folder, _ in earlier.sets)]
        self._pending.append(_Change(sets, needs))
        _set(self._now, sets)

    def _sync(self, of: int) -> None:
        if of in self._files:
            self._files[of].sync()
        if self._model == JOURNAL:
            done = [*self._pending]
        else:
            done = [change for change in self._pending if any(folder == of for folder, _ in change.sets)]
            for change in done:  # grows
                done += [need for need in change.needs if need in self._pending and need not in done]
        for change in [change for change in self._pending if change in done]:
            _set(self._durable, change.sets)
        self._pending = [change for change in self._pending if change not in done]
        for change in self._pending:
            change.needs = [need for need in change.needs if need not in done]

    def is_file(self, number: int) -> bool:
        return number in self._files

    def makes_folders_in(self, folder: int) -> bool:
        """Whether folders were made in this one, which are not durable."""
        return any(
            made in self._folders for change in self._pending for (at, _), made in change.sets.items() if at == folder
        )

    def states(self, most: int, chosen: random.Random) -> Iterator[Tree]:
        """Trees that may be there if the power is cut now, at most so many; first those at the ends."""
        subsets = self._subsets(most, chosen)
        each = max(2, most // len(subsets))
        for subset in subsets:
            names = dict(self._durable)
            for change in subset:
                _set(names, change.sets)
            yield from self._with_contents(_paths(names, self._folders), each, chosen)

    def _with_contents(self, paths: Mapping[str, int], most: int, chosen: random.Random) -> Iterator[Tree]:
        numbers = dict.fromkeys(number for number in paths.values() if number in self._files)
        contents = {number: self._files[number].contents(chosen) for number in numbers}
        choices: list[Sequence[bytes]]
        if math.prod(map(len, contents.values())) <= most:
            choices = [*itertools.product(*contents.values())]
        else:
            choices = [[found[0] for found in contents.values()], [found[:2][-1] for found in contents.values()]]
            choices += [[chosen.choice(found) for found in contents.values()] for _ in range(most - 2)]
        for choice in choices:
            of = dict(zip(contents, choice, strict=True))
            yield {path: of.get(number) for path, number in paths.items()}

    def _subsets(self, most: int, chosen: random.Random) -> list[list[_Change]]:
        """Of the changes that are not durable, sets that may be there: all, none, all but one, and so on."""
        pending = self._pending
        if self._model == JOURNAL:
            return [pending[:number] for number in range(len(pending), -1, -1)]
        if len(pending) <= 6:
            tries = [[*kept] for n in range(len(pending) + 1) for kept in itertools.combinations(pending, n)]
        else:
            tries = [pending, [], *([other for other in pending if other is not one] for one in pending)]
            tries += [[one] for one in pending]
            tries += [
                [one for one in pending if chosen.random() < share] for share in (0.2, 0.5, 0.8) for _ in range(16)
            ]
        found = {}
        for kept in tries:
            able: list[_Change] = []
            for one in kept:
                if all(need in able for need in one.needs):
                    able.append(one)
            found[tuple(map(id, able))] = able
        return [*found.values()][: max(most, 2)]


def _set(names: dict[Entry, int], sets: Mapping[Entry, int | None]) -> None:
    for entry, number in sets.items():
        if number is None:
            names.pop(entry, None)
        else:
            names[entry] = number


def _paths(names: Mapping[Entry, int], folders: set[int]) -> dict[str, int]:
    inside: dict[int, list[tuple[str, int]]] = {}
    for (folder, name), number in names.items():
        inside.setdefault(folder, []).append((name, number))
    found: dict[str, int] = {}
    waiting, met = [("", TOP)], {TOP}
    while waiting:
        above, folder = waiting.pop()
        for name, number in inside.get(folder, ()):
            found[above + name] = number
            if number in folders and number not in met:  # a folder that was moved may have two names, or be in itself
                met.add(number)
                waiting.append((f"{above}{name}/", number))
    return dict(sorted(found.items()))
