"""What every place can do.

In: paths below a root, bytes. Out: durable objects, and their bytes back. Knows nothing of: tensors, steps, commits.
All calls block, and may come from any thread; the worker keeps them off its loop. Paths use `/`.
"""

from __future__ import annotations

from types import TracebackType
from typing import Protocol, Self


class Sink(Protocol):
    """The write side of one object that is not there yet. Only `finish` makes it appear."""

    def write(self, offset: int, data: memoryview) -> None:
        """Write at `offset`, from any thread; offsets and lengths are multiples of the page, in any order.

        Raises StorageFullError or StorageUnavailableError.
        """

    def finish(self) -> None:
        """Make the object durable and visible under its name, whole. All writes have returned."""

    def abort(self) -> None:
        """Leave no trace. Idempotent; never raises what the caller cannot act on."""

    def close(self) -> None:
        """The object's fate is decided: it was committed, or it never will be. Idempotent."""


class Reader(Protocol):
    """The read side of one object."""

    num_bytes: int

    def read_into(self, offset: int, target: memoryview) -> None:
        """Fill `target` from `offset` on, from any thread. Raises EOFError where the object ends too early."""

    def close(self) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Storage(Protocol):
    """One root. A missing object is FileNotFoundError; any other refusal is a StorageUnavailableError."""

    def locate(self, path: str) -> str:
        """The full name of an object, for people."""

    def create(self, path: str, *, num_bytes: int) -> Sink:
        """Begin an object of exactly this size; parents are made. Raises StorageFullError before a byte is written."""

    def open(self, path: str) -> Reader: ...

    def read(self, path: str) -> tuple[bytes, str]:
        """A small object, and its version: a text that changes whenever the object is replaced."""

    def put_new(self, path: str, data: bytes) -> None:
        """Write a small object durably, only if there is none; FileExistsError otherwise, whoever came first."""

    def replace(self, path: str, data: bytes, *, version: str | None = None) -> None:
        """Write or replace a small object durably and at once; with `version`, only if it is still that one.

        Raises FileExistsError when it is not.
        """

    def move(self, path: str, to: str) -> None:
        """Rename a small object, durably."""

    def delete(self, path: str) -> None:
        """Delete an object; no error if there is none. A folder that it leaves empty goes with it."""

    def names(self, folder: str) -> list[str]:
        """Names directly in a folder, sorted; none when there is no such folder."""

    def exists(self, path: str) -> bool: ...

    def sweep(self, folder: str, names: list[str], *, delete: bool = False) -> list[str]:
        """Of these names, those whose writer is provably gone; deleted, or left for the caller to judge."""
