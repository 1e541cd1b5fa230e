"""The protocol of every place.

In: paths below a root, bytes. Out: durable objects, and their bytes back. Knows nothing of: tensors, steps, commits.
All calls block, and may come from any thread; the worker keeps them off its loop. Paths use `/`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Protocol, Self


class Lent(Protocol):
    """Memory on loan: whoever reads it after the call that handed it over retains it, and releases it when done."""

    def retain(self) -> None: ...

    def release(self) -> None: ...


class Sink(Protocol):
    """The write side of one object that is not there yet. Only `finish` makes it appear."""

    @property
    def num_bytes(self) -> int:
        """The size of the object; until it is finished, the announced one."""

    @property
    def num_retries(self) -> int:
        """Requests, or whole attempts, that had to be made again."""

    @property
    def failed(self) -> Future[None] | None:
        """Raises, as soon as that is known, what the object will not be for; None where `write` and `finish` say all."""

    @property
    def retryable(self) -> bool:
        """True if all that was written is still in memory, to be sent again as a whole if need be."""

    def write(self, offset: int, data: memoryview, lease: Lent) -> None:
        """Take a whole segment, or the last one, at `offset`: from any thread, in any order, each once.

        `data` is `lease`'s memory and stays as it is until that is released. A sink that sends it later retains
        the lease; one that has failed has released everything. Raises StorageFullError, StorageUnavailableError.
        """

    def finish(self, num_bytes: int | None = None) -> None:
        """Make the object durable and visible under its name, whole. All writes have returned.

        `num_bytes` is its size, where only a limit was announced.
        """

    def abort(self) -> None:
        """Leave no trace. Idempotent; never raises what the caller cannot act on."""

    def close(self) -> None:
        """The object's fate is decided: it was committed, or it never will be. Idempotent."""

    def give_up(self) -> None:
        """The object will not be, and its memory is needed: let go of all that is not being sent this moment.

        Does not wait; `abort` follows. Idempotent, from any thread.
        """

    def relieve(self) -> bool:
        """Memory is short: let go of a lease that is kept only so that a failed upload could be tried again.

        From any thread. False when nothing could be let go of.
        """


class Reader(Protocol):
    """The read side of one object."""

    num_bytes: int

    def read_into(self, offset: int, target: memoryview) -> None:
        """Fill `target` from `offset` on, from any thread. Raises EOFError where the object ends too early.

        Raises StorageUnavailableError, also when the object was replaced after it was opened.
        """

    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Storage(Protocol):
    """One root. A missing object is FileNotFoundError; any other refusal is a StorageUnavailableError."""

    remote: bool  # every call goes through a network: none is made on the caller's thread of a save
    in_order: bool  # its sinks send in file order, and hold what comes early

    def locate(self, path: str) -> str:
        """The full name of an object, for people: without credentials."""

    def part_segments(self, num_bytes: int, segment_bytes: int) -> int:
        """How many segments in a row a sink for such an object must hold at once before it can send any of them."""

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

        It comes in segments of `segment_bytes`, of which `max_segments` at most can be on loan at a time; the sink
        holds no more than its share of these. Without `exact`, `num_bytes` is a limit, and `finish` is told the size.
        """

    def open(self, path: str) -> Reader:
        """Raises FileNotFoundError, and IsADirectoryError where folders are real."""

    def read(self, path: str) -> tuple[bytes, str]:
        """A small object, and its version: a text that changes whenever the object is replaced.

        Raises FileNotFoundError only where `names` does not list it either; a link that leads nowhere, or something
        that is no file, is a StorageUnavailableError.
        """

    def put_new(self, path: str, data: bytes) -> None:
        """Write a small object durably, only if there is none; FileExistsError otherwise, whoever came first."""

    def replace(self, path: str, data: bytes, *, version: str | None = None) -> str | None:
        """Write or replace a small object durably and at once; with `version`, only if it is still that one.

        Its new version, where the place tells it. Raises FileExistsError when it is not that one.
        """

    def move(self, path: str, to: str) -> None:
        """Rename a small object, durably."""

    def delete(self, path: str) -> None:
        """Delete an object; no error if there is none. A folder that it leaves empty goes with it."""

    def delete_many(self, paths: Sequence[str]) -> None:
        """Delete objects, each as `delete` does, in any order; in few requests where the place knows how to.

        After an error some of them may be gone.
        """
        for path in paths:
            self.delete(path)

    def delete_all(self, path: str) -> None:
        """Delete an object, or a folder with all that is in it; no error if there is neither. A link is not followed."""

    def remove_if_empty(self, folder: str) -> bool:
        """Remove a folder below the root if there is nothing in it. False when there is, or when there is no folder.

        It harms no writer, even one that has made the folder and put nothing into it yet. Raises nothing.
        """

    def names(self, folder: str) -> list[str]:
        """Names directly in a folder, of objects and folders, sorted; none when there is no such folder."""

    def sizes(self, folder: str) -> dict[str, int]:
        """The size of every object below a folder, however deep, by its path from there, sorted.

        Empty when there is no such folder; without what is still being written. Raises CorruptCheckpointError for an
        object whose name is no path to it.
        """

    def exists(self, path: str) -> bool:
        """Whether there is such an object (or, where folders are real, a folder)."""

    def existing(self, paths: Sequence[str]) -> list[str]:
        """The paths, among these, that exist, in the order given; asked in parallel where asking is slow."""

    def sweep(
        self,
        folder: str,
        names: list[str],
        *,
        delete: bool = False,
        decided: bool = False,
        of_ranks: bool = False,
    ) -> list[str]:
        """The names, among these, whose writer is provably gone; deleted, or left for the caller to judge.

        `decided`: a newer step is committed, so no writer could still commit them. Where the writer itself cannot
        be asked, that and a day's age by the store's clock is the proof; so it is for what one of several ranks has
        written (`of_ranks`), which may run on another machine.
        """

    def hold(self, path: str) -> Callable[[], None]:
        """Show other processes that this one lives, by a lock on an object of its own, until the returned function is called.

        Where there are no locks, as in a store, it does nothing.
        """

    def is_held(self, path: str) -> bool:
        """Whether another living process provably holds an object."""

    def sweep_uploads(self) -> list[str]:
        """Abort unfinished uploads below this root that are older than a day by the store's clock; their names."""
