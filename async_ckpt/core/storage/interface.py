"""The protocols of storages, their sinks and readers.

In: paths below a root, bytes. Out: durable objects, and their bytes back. Knows nothing of: tensors, steps, commits.
All calls block, and may be made from any thread; none is made on the event loop. Paths use `/`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from typing import Protocol, Self


class MemoryLoan(Protocol):
    """Memory on loan for one call. To use the memory after the call, retain it, and release it at the end."""

    def retain(self) -> None: ...

    def release(self) -> None: ...


class Sink(Protocol):
    """The write side of one object. Only `finish` makes the object appear.

    `Storage.create` makes it for one delivery, which owns it and ends it by `finish` or `abort`, and `close`.
    """

    @property
    def num_bytes(self) -> int:
        """The size of the object; until the object is finished, the announced size."""

    @property
    def num_retries(self) -> int:
        """The number of requests, or whole attempts, that were repeated."""
        return 0

    @property
    def failed(self) -> Future[None] | None:
        """A future that gets the error once the object is known to fail; None if `write` and `finish` raise it."""
        return None

    @property
    def retryable(self) -> bool:
        """True if everything written is still in memory, so that the whole object can be sent again."""
        return False

    def write(self, offset: int, data: memoryview, lease: MemoryLoan) -> None:
        """Take one segment at `offset`; all but the last are whole. From any thread, in any order, each segment once.

        `data` is the memory of `lease` and does not change until `lease` is released. A sink that sends it later
        retains the lease; a sink that has failed has released all. Raises StorageFullError, StorageUnavailableError.
        """

    def finish(self, num_bytes: int | None = None) -> None:
        """Make the object durable and visible under its name, whole. All writes have returned.

        `num_bytes` is the size of the object if only a limit was announced.
        """

    def abort(self) -> None:
        """Leave no trace of the object. Idempotent; raises only errors that the caller can act on."""

    def close(self) -> None:
        """Release locks: the object was committed, or never will be. Idempotent."""
        return

    def give_up(self) -> None:
        """Release every lease that is not being sent at this moment; the object will not be finished.

        Does not wait; `abort` follows. Idempotent. From any thread.
        """
        return

    def relieve(self) -> bool:
        """Release one lease that is kept only for another attempt, since memory is short. From any thread.

        False if there is none.
        """
        return False


class Reader(Protocol):
    """The read side of one object."""

    num_bytes: int

    def read_into(self, offset: int, target: memoryview) -> None:
        """Fill `target` from `offset` on. From any thread. Raises EOFError if the object ends too early.

        Raises StorageUnavailableError, also if the object was replaced after it was opened.
        """

    def close(self) -> None:
        """Close what is open; by default nothing is."""
        return

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Storage(Protocol):
    """One root. A missing object raises FileNotFoundError; any other failure raises StorageUnavailableError."""

    remote: bool  # calls go through a network, so a save makes none on its caller's thread
    in_order: bool  # sinks send in file order, and hold segments that come early

    @property
    def locks_tell(self) -> bool:
        """Whether all that write here run on machines that see each other's locks, so that a free lock is proof."""
        return False

    def locate(self, path: str) -> str:
        """The full name of an object for messages, without credentials."""

    def part_segments(self, num_bytes: int, segment_bytes: int) -> int:
        """The number of consecutive segments that a sink must hold before it can send any of them."""

    def create(
        self,
        path: str,
        *,
        num_bytes: int,
        segment_bytes: int,
        max_segments: int | None = None,
        exact: bool = True,
    ) -> Sink:
        """Begin an object of exactly this size; parents are made. Raises StorageFullError before a byte is written.

        The object comes in segments of `segment_bytes`, of which at most `max_segments` are on loan at a time. Without
        `exact`, `num_bytes` is a limit, and `finish` is given the size.
        """

    def prove(self, *, for_run: bool = False) -> None:  # noqa: ARG002
        """Make sure, once in a process, that what is saved here can be read again; see `proven/place_proof.py`.

        A place for a run also has to replace small objects, and to list new ones at once. Does nothing on a disk.
        Raises StorageUnavailableError.
        """
        return

    def open(self, path: str) -> Reader:
        """Open an object. Raises FileNotFoundError, and IsADirectoryError if folders are real."""

    def read(self, path: str) -> tuple[bytes, str]:
        """The content of a small object, and its version: a text that changes whenever the object is replaced.

        Raises FileNotFoundError only if `names` does not list it either; a broken link, or anything else that is not a
        file, raises StorageUnavailableError.
        """

    def read_many(self, paths: Sequence[str]) -> dict[str, tuple[bytes, str] | None]:  # noqa: ARG002
        """The contents and versions of small objects, by their paths, as far as there is a faster way than `read`.

        None is the content of an object that does not exist. A path that is left out proves nothing about its object.
        """
        return {}

    def put_new(self, path: str, data: bytes) -> None:
        """Write a small object durably if there is none of that name. Raises FileExistsError otherwise."""

    def replace(self, path: str, data: bytes, *, version: str | None = None) -> str | None:
        """Write or replace a small object durably and atomically; with `version`, only if that is its version.

        Returns the new version, or None if the place does not tell it. Raises FileExistsError for another version.
        """

    def append_lines(self, path: str, lines: bytes) -> int | None:  # noqa: ARG002
        """Add whole lines to a small object, which is created if it is missing. Returns its size. They are not durable.

        None if no object can grow at this place: then nothing was written.
        """
        return None

    def under_way(self, folder: str) -> tuple[int, int]:  # noqa: ARG002
        """The bytes written so far of objects that another process is writing in a folder, and their sizes at the end.

        Zeros in places where nobody sees an object before it is whole.
        """
        return 0, 0

    num_nodes: int = 1
    """How many folders it has, each with a part of the bytes: several where each node has one of its own."""

    def free_bytes(self) -> int | None:
        """The bytes that may still be written here; None if that is not known, or has no limit."""
        return None

    def settle(self, path: str) -> None:  # noqa: ARG002
        """Make an object durable that is visible, since whoever has put it may not have done so yet."""
        return None  # at a store, what is visible is durable  # noqa: RET501

    def sender(
        self,
        path: str,  # noqa: ARG002
        to: Storage,  # noqa: ARG002
        num_bytes: int,  # noqa: ARG002
        digest: str,  # noqa: ARG002
    ) -> Callable[[Callable[[], None]], None] | None:
        """A function that has another process copy an archive to another place of the run, if it lies on its disk.

        The function calls `check` now and then, which may raise.
        """
        return None

    def move(self, path: str, to: str) -> None:
        """Rename a small object, durably."""

    def delete(self, path: str) -> None:
        """Delete an object, and the folder that this leaves empty. No error if there is no object."""

    def delete_many(self, paths: Sequence[str]) -> None:
        """Delete objects, each as `delete` does, in any order; in few requests if the place can.

        After an error some of them may be deleted.
        """
        for path in paths:
            self.delete(path)

    def delete_all(self, path: str) -> None:
        """Delete an object, or a folder with its content. No error if there is neither. Links are not followed."""

    def remove_if_empty(self, folder: str) -> bool:
        """Remove an empty folder below the root. False if the folder is not empty, or does not exist.

        Harms no writer, even one that has made the folder and put nothing into it yet. Raises nothing.
        """

    def names(self, folder: str) -> list[str]:
        """The names of the objects and folders directly in a folder, sorted; none if there is no such folder."""

    def listed(self, folder: str, names: Collection[str]) -> set[str]:
        """The names, among these, of objects directly in a folder, by a listing as fast as it can be had."""
        return {*names}.intersection(self.names(folder))

    def sizes(self, folder: str) -> dict[str, int]:
        """The sizes of all objects below a folder, at any depth, by their paths from there, sorted.

        Empty if there is no such folder; without objects that are being written. Raises CorruptCheckpointError for an
        object whose name is not a path to it.
        """

    def exists(self, path: str) -> bool:
        """Whether there is an object (or, if folders are real, a folder) of this name."""

    def existing(self, paths: Sequence[str]) -> list[str]:
        """The paths, among these, that exist, in the order given. Asks in parallel if requests are slow."""

    def sweep(
        self,
        folder: str,  # noqa: ARG002
        names: list[str],  # noqa: ARG002
        *,
        delete: bool = False,  # noqa: ARG002
        decided: bool = False,  # noqa: ARG002
        of_ranks: bool = False,  # noqa: ARG002
    ) -> list[str]:
        """The names, among these, of objects whose writer has provably ended. With `delete`, they are deleted.

        `decided` says that a newer step is committed, so no writer can still commit these. If the writer cannot be
        asked, that and a day's age by the store's clock are the proof; also for an object that one of several ranks has
        written (`of_ranks`), which may run on another machine.
        """
        return []

    def hold(self, path: str) -> Callable[[], None]:  # noqa: ARG002
        """Lock an object, as a sign to other processes that this one lives, until the returned function is called.

        Does nothing in places without locks, such as stores.
        """
        return lambda: None

    def is_held(self, path: str) -> bool:  # noqa: ARG002
        """Whether another living process provably has locked an object."""
        return False

    def sweep_uploads(self) -> list[str]:
        """Abort unfinished uploads below this root, older than a day by the store's clock. Returns their names."""
