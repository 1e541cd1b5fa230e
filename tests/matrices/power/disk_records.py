"""The calls that changed a folder, in their order, as values.

In: nothing. Out: the types of records. Knows nothing of: how they were recorded, or what a disk keeps of them.

Files and folders are numbers, which no other file has at any time, since names change and inodes are used again.
"""

from dataclasses import dataclass
from typing import TypeAlias

TOP = 0  # the folder in which everything happens; it is durable

Entry: TypeAlias = tuple[int, str]
"""A name in a folder."""


@dataclass(frozen=True, slots=True)
class Create:
    """A new file, or a new folder, with this name."""

    entry: Entry
    made: int
    is_folder: bool = False


@dataclass(frozen=True, slots=True)
class Write:
    file: int
    offset: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Resize:
    """A file was cut, or grown by zeros, as by fallocate(2)."""

    file: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Sync:
    """fsync(2) of a file or a folder has returned."""

    of: int


@dataclass(frozen=True, slots=True)
class Rename:
    entry: Entry
    to: Entry


@dataclass(frozen=True, slots=True)
class Exchange:
    entry: Entry
    to: Entry


@dataclass(frozen=True, slots=True)
class Link:
    entry: Entry
    to: Entry


@dataclass(frozen=True, slots=True)
class Remove:
    """A file lost this name, or an empty folder was removed."""

    entry: Entry


@dataclass(frozen=True, slots=True)
class Begun:
    """A state of this label is being saved. Once it can be loaded, those in `instead_of` need not be there any more."""

    label: str
    instead_of: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """The library has said that the state of this label is saved."""

    label: str


NameChange: TypeAlias = Create | Rename | Exchange | Link | Remove
Mark: TypeAlias = Begun | Acknowledged
Record: TypeAlias = NameChange | Write | Resize | Sync | Mark
