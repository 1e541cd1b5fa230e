"""The protocols of storages, their sinks and readers.

In: paths below a root, bytes. Out: durable objects, and their bytes back. Knows nothing of: tensors, steps, commits.
All calls block, so none is made on an event loop. Any thread may make them. Paths use `/`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from typing import Protocol, Self


class MemoryLoan(Protocol):
    """Memory lent for one call. A function that uses it after the call calls `retain`, and `release` at the end."""

    def retain(self) -> None: ...

    def release(self) -> None: ...


class Sink(Protocol):
    """The write side of one object. Only `finish` makes the object appear.

    `Storage.create` makes a sink for one delivery, which owns it, calls `finish` or `abort`, and then `close`.
    """

    @property
    def num_bytes(self) -> int:
        """The size of the finished object; before that, the announced size."""

    @property
    def num_retries(self) -> int:
        """The number of requests, or whole attempts, that were repeated."""
        return 0

    @property
    def failed(self) -> Future[None] | None:
        """A future that receives the error once the object has failed; None if only `write` and `finish` report it."""
        return None

    @property
    def retryable(self) -> bool:
        """True if everything written is still in memory, so that the whole object can be sent again."""
        return False

    def write(self, offset: int, data: memoryview, lease: MemoryLoan) -> None:
        """Write one segment at `offset`, from any thread; all but the last are full. Each comes once, in any order.

        `data` is the memory of `lease` and does not change until `lease` is released. A sink that sends it later
        retains the lease; a failed sink has released every lease. Raises StorageFullError, StorageUnavailableError.
        """

    def finish(self, num_bytes: int | None = None) -> None:
        """Make the whole object durable and visible under its name. Call it once all writes have returned.

        `num_bytes` is the size of the object if only a limit was announced.
        """

    def abort(self) -> None:
        """Leave no trace of the object. Idempotent; raises only errors that the caller can act on."""

    def close(self) -> None:
        """Release locks, after the object was committed or given up. Idempotent."""
        return

    def give_up(self) -> None:
        """Release every lease that is not being sent at this moment, since the object will not be finished.

        Returns without waiting. The caller calls `abort` afterwards. Idempotent and thread-safe.
        """
        return

    def relieve(self) -> bool:
        """Release one lease that is kept only for another attempt, since memory is short. Thread-safe.

        Returns False if there is no such lease.
        """
        return False


class Reader(Protocol):
    """The read side of one object."""

    num_bytes: int

    def read_into(self, offset: int, target: memoryview) -> None:
        """Fill `target` with the bytes from `offset` on. Thread-safe. Raises EOFError if the object ends too early.

        Raises StorageUnavailableError if the read fails, or if the object was replaced after it was opened.
        """

    def close(self) -> None:
        """Release files and connections; by default there are none to release."""
        return

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Storage(Protocol):
    """One root. A missing object raises FileNotFoundError; any other failure raises StorageUnavailableError."""

    remote: bool  # calls use a network, so a save makes none on its caller's thread
    in_order: bool  # sinks send segments in file order, and hold early ones

    @property
    def locks_tell(self) -> bool:
        """Whether all writers run on machines that see each other's locks: a free lock proves that its writer ended."""
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
        """Begin an object of exactly this size, and make its folders. Raises StorageFullError before a byte is written.

        The object is written in segments of `segment_bytes`; at most `max_segments` are on loan at a time. Unless
        `exact`, `num_bytes` is a limit, and `finish` receives the size.
        """

    def prove(self, *, for_run: bool = False) -> None:  # noqa: ARG002
        """Check, once per process, that objects written here can be read back; see `proven/place_proof.py`.

        A place for a run must also replace small objects, and list new ones at once. Does nothing on a disk.
        Raises StorageUnavailableError.
        """
        return

    def open(self, path: str) -> Reader:
        """Open an object. Raises FileNotFoundError; IsADirectoryError for a folder, where folders are real."""

    def read(self, path: str) -> tuple[bytes, str]:
        """The content of a small object, and its version: a string that changes whenever the object is replaced.

        Raises FileNotFoundError only for an object that `names` does not list either. A broken link, or anything else
        that is not a file, raises StorageUnavailableError.
        """

    def read_many(self, paths: Sequence[str]) -> dict[str, tuple[bytes, str] | None]:  # noqa: ARG002
        """The contents and versions of small objects by path, if the storage has a faster way than `read`.

        A missing object maps to None. Nothing is known about an object whose path is left out.
        """
        return {}

    def put_new(self, path: str, data: bytes) -> None:
        """Write a small object durably. Raises FileExistsError if an object of this name exists."""

    def replace(self, path: str, data: bytes, *, version: str | None = None) -> str | None:
        """Write or replace a small object durably and atomically; with `version`, only if the object has this version.

        Returns the new version, or None if not reported. Raises FileExistsError if `version` is given and differs.
        """

    def append_lines(self, path: str, lines: bytes) -> int | None:  # noqa: ARG002
        """Append whole lines, not durably, to a small object, and create it if it is missing. Returns its size.

        Returns None, and writes nothing, if this storage cannot append to objects.
        """
        return None

    def under_way(self, folder: str) -> tuple[int, int]:  # noqa: ARG002
        """The bytes written so far, and the final sizes, of objects that other processes are writing in a folder.

        Zeros in storages where an object is invisible until it is complete.
        """
        return 0, 0

    num_nodes: int = 1
    """The number of folders that share the bytes: several if each node has its own folder."""

    def free_bytes(self) -> int | None:
        """The bytes that can still be written here; None if unknown or unlimited."""
        return None

    def settle(self, path: str) -> None:  # noqa: ARG002
        """Make a visible object durable, since its writer may not have done so yet."""
        return None  # in an object store, visible objects are durable  # noqa: RET501

    def sender(
        self,
        path: str,  # noqa: ARG002
        to: Storage,  # noqa: ARG002
        num_bytes: int,  # noqa: ARG002
        digest: str,  # noqa: ARG002
    ) -> Callable[[Callable[[], None]], None] | None:
        """A function that has another node copy an archive to the place `to`; None if this process must copy it itself.

        The function calls `check` repeatedly, which may raise.
        """
        return None

    def move(self, path: str, to: str) -> None:
        """Rename a small object, durably."""

    def delete(self, path: str) -> None:
        """Delete an object, and its folder if that is then empty. A missing object is no error."""

    def delete_many(self, paths: Sequence[str]) -> None:
        """Delete objects as `delete` does, in any order, and in few requests if the storage can.

        After an error, some objects may already be deleted.
        """
        for path in paths:
            self.delete(path)

    def delete_all(self, path: str) -> None:
        """Delete an object, or a folder with its content. A missing path is no error. Links are not followed."""

    def remove_if_empty(self, folder: str) -> bool:
        """Remove a folder below the root if it is empty. Returns False if it is not empty, or does not exist.

        Safe even if a writer has just made the folder and written nothing into it yet. Never raises.
        """

    def names(self, folder: str) -> list[str]:
        """The sorted names of objects and folders directly in a folder; empty if the folder does not exist."""

    def listed(self, folder: str, names: Collection[str]) -> set[str]:
        """The subset of `names` that exists directly in a folder, by the fastest way to list it."""
        return {*names}.intersection(self.names(folder))

    def sizes(self, folder: str) -> dict[str, int]:
        """The sizes of all objects below a folder, at any depth, by path relative to the folder, sorted.

        Empty if the folder does not exist. Objects that are being written are left out. Raises CorruptCheckpointError
        for an object whose name is not a valid path.
        """

    def exists(self, path: str) -> bool:
        """Whether an object of this name exists; or a folder, where folders are real."""

    def existing(self, paths: Sequence[str]) -> list[str]:
        """The subset of `paths` that exists, in the given order. Slow requests are made in parallel."""

    def sweep(
        self,
        folder: str,  # noqa: ARG002
        names: list[str],  # noqa: ARG002
        *,
        delete: bool = False,  # noqa: ARG002
        decided: bool = False,  # noqa: ARG002
        of_ranks: bool = False,  # noqa: ARG002
    ) -> list[str]:
        """The subset of `names` whose writers have provably ended. With `delete`, these objects are deleted.

        `decided` means that a newer step is committed, so no writer can still commit these objects. Where no lock shows
        whether a writer lives, the proof is `decided`, and an age of more than a day by the store's clock. Objects
        `of_ranks` also need this proof, since their writers may run on other machines.
        """
        return []

    def hold(self, path: str) -> Callable[[], None]:  # noqa: ARG002
        """Lock an object, to show other processes that this one lives. The returned function unlocks it.

        Does nothing in storages without locks, such as object stores.
        """
        return lambda: None

    def is_held(self, path: str) -> bool:  # noqa: ARG002
        """Whether another living process has provably locked an object."""
        return False

    def sweep_uploads(self) -> list[str]:
        """Abort unfinished uploads below this root, older than a day by the store's clock. Returns their names."""
