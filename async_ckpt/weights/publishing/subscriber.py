"""`Subscriber`: pulls the weights of a version into a folder that engines load, or into a module.

In: a root with versions. Out: a folder or a module with one of them. Knows nothing of: publishers, engines.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Final, Self, TypeAlias

import torch

from ... import PullReport
from ...errors import (
    CheckpointError,
    ClosedError,
    CorruptCheckpointError,
    NotAFolderError,
    NotCommittedError,
    UsageError,
)
from ...plumbing import kept_memory, operations, places, spec
from ..delta import VersionIndex
from .base_model import BaseModel
from .folder_replica import FolderReplica
from .in_memory.borrow import BorrowedVersion, PublisherMemory
from .live_weights import MemoryReplica, PullResult, new_crew, update_replica
from .module import fill, refuse_misfit
from .of_ranks.pieces import PiecedTensor
from .of_ranks.rank_replicas import VersionOfRanks
from .of_ranks.root_versions import RootVersions
from .version_files import Anchor

_Into: TypeAlias = str | os.PathLike[str] | torch.nn.Module
# The number of attempts of a pull while versions that it reads are being replaced.
_TRIES: Final = 10

_log: Final = logging.getLogger("async_ckpt")


class Subscriber:
    """Follows the versions that a `Publisher` adds at a root, from any host and at any time.

        subscriber = async_ckpt.Subscriber("s3://bucket/weights")
        for version in subscriber.watch():
            subscriber.pull(into="/local/model")

    It needs only the files: a process that starts late, or was killed, has the newest weights after one `pull`.
    It writes nothing at the root. If the publisher lends its newest version to processes of this host and user
    (`local=True`), a pull reads the version from that memory, and otherwise from the root.

    Args:
        root: where the versions are: a path, a URL or a Place.
        base: a Hugging Face folder on this machine, for a root whose first version is a delta against a model that
            is not published there, such as slime's. A pull that finds no anchor begins with this model. The folder must
            not change.

    Raises NotADirectoryError if `base` is not a folder, and ValueError if it is not on this machine.
    """

    def __init__(self, root: places.Anywhere, *, base: str | os.PathLike[str] | None = None) -> None:
        place = places.written_at(root)
        model = None if base is None else BaseModel(places.local_place(base).absolute())
        self._root = RootVersions(place, model)
        self._versions = self._root.of_rank(0, 0)  # of a whole model
        self._sizes: dict[int, int] = {}  # by version, of the world that published it; 0 for a whole model
        self._held: list[MemoryReplica] = []  # the slices of each rank, from the last pull of a spread model
        self._read: set[int] = set()  # the versions that the running pull reads
        self._crew = new_crew()
        self._closed = threading.Event()
        # Host memory of each module that was pulled into; used by one `pull` at a time.
        self._modules: weakref.WeakKeyDictionary[torch.nn.Module, MemoryReplica] = weakref.WeakKeyDictionary()
        self._memory = PublisherMemory()  # one `pull` at a time borrows from it
        self._pulling = threading.Lock()
        self._pid = os.getpid()

    @property
    def root(self) -> str:
        """The root, as messages show it: without secrets.

        print(subscriber.root)  # s3://bucket/weights
        """
        return self._versions.root

    def versions(self) -> list[int]:
        """The complete versions, ascending.

        subscriber.versions()  # [100, 101, 102]
        """
        self._refuse_if_closed()
        numbers = self._numbers()
        lent = self._lent(numbers)
        # A lent version is the publisher's newest. Versions with higher numbers are about to be replaced.
        return numbers if lent is None else [*(number for number in numbers if number < lent[0]), lent[0]]

    def _lent(self, numbers: list[int]) -> tuple[int, str] | None:
        """The lent version and its identity, if it is the newest; None if no version is lent.

        `numbers` are the versions in a listing of the root that was just made.
        """
        lent = self._memory.newest(self._versions.owner_token(), max(numbers, default=None))
        if lent is None and self._pulling.acquire(blocking=False):
            self._memory.drop()  # the publisher has ended
            self._pulling.release()
        return lent

    def _numbers(self) -> list[int]:
        """The complete versions. Lists the root and each world of ranks, and sends a request for each new version."""
        names = self._versions.storage.names("")
        if not names and not self._versions.storage.remote and Path(self._versions.root).is_file():
            raise NotAFolderError(f"{self._versions.root} is a file; give the folder with the versions")
        self._sizes = self._root.sizes(names)
        return [*self._sizes]

    def latest(self) -> int | None:
        """The newest version, or None.

        subscriber.latest()  # 102
        """
        return max(self.versions(), default=None)

    def newest(self) -> tuple[int, str] | None:
        """The newest version and the identity of its weights, or None.

            subscriber.newest()  # (102, '1f0e…')

        The identity changes if a version is published again with other weights. It is empty if the version cannot be
        read. The root is listed once, and once more for each world of ranks that has published there.
        """
        self._refuse_if_closed()
        return self._newest()

    def _newest(self) -> tuple[int, str] | None:
        numbers = self._numbers()
        lent = self._lent(numbers)
        if lent is not None or not numbers:
            return lent
        return numbers[-1], self._identity(numbers[-1])

    def pull(self, into: str | os.PathLike[str] | torch.nn.Module, version: int | None = None) -> PullReport:
        """Bring a folder or a module to a version, and return a report.

            report = subscriber.pull("/local/model")
            model = AutoModelForCausalLM.from_pretrained("/local/model")

        If the target has an earlier version, only the deltas after that version are read, and applied in place, in
        order. Otherwise the pull begins with the newest anchor up to the wanted version. Every tensor is compared with
        its checksum. After an error, even at the last tensor, the target has its previous weights, or those of a
        version between them and the wanted one. If a pull into a folder was killed, or its weights were damaged, the
        next pull begins with an anchor.

        Args:
            into: a folder on this machine that is new, empty, or filled by an earlier pull. Pulls of several
                processes into it take turns. Files that you add later stay. Or a module: its parameters and
                buffers get the new bytes after all of them are read and compared, which needs host memory of the size
                of the weights.
            version: by default the newest.

        The folder is an ordinary Hugging Face folder. Do not map its files to memory during a pull: they change.

        Raises NotCommittedError if there is no such version, or if a version that it is built on is missing;
        CorruptCheckpointError for damaged files; StateMismatchError for another model; UnsupportedStateError for a
        module with tensors that cannot be filled in place; FileExistsError for a folder with other files;
        MemoryError, StorageUnavailableError and StorageFullError.
        """
        self._refuse_if_closed()
        with operations.observed("pull", (self.root,)) as operation:
            report = self._pull_now(into, version, operation)
            operation.end(report.version, report)
        return report

    def _pull_now(self, into: _Into, version: int | None, operation: operations.Operation) -> PullReport:
        number = None if version is None else spec.whole_step(version, what="version")
        if not self._pulling.acquire(blocking=False):
            raise UsageError("another pull of this Subscriber is under way; use one for each thread")
        try:
            # Independent of the caller's mode and default device: our tensors are plain host tensors.
            with torch.inference_mode(False), torch.device("cpu"):
                lent = self._pull_lent(into, number)
                target, result = lent or self._pull_newest(into, number)
        finally:
            self._crew.stop()
            self._pulling.release()
        return PullReport(
            target, result.base, result.num_versions, result.num_bytes, operation.seconds, from_memory=lent is not None
        )

    def _pull_lent(self, into: _Into, number: int | None) -> tuple[int, PullResult] | None:
        """Pull a version from the memory of its publisher; None if it is not lent."""
        with self._memory.borrowed(self._versions.owner_token(fresh=True), number) as found:
            if found is None:
                return None
            try:
                return found.number, self._take(into, found)
            except CorruptCheckpointError as error:
                _log.warning("%s; the root is used instead", error)
                return None

    def _take(self, into: _Into, version: BorrowedVersion | VersionOfRanks) -> PullResult:
        """Read a version, and replace the weights of the target by it, whatever version the target has."""
        if isinstance(into, torch.nn.Module):
            source = self._describe(version.number)
            refuse_misfit(into, version.kinds, version.adapter, source)
            result = version.read(self._crew)
            fill(into, version.tensors, version.adapter, source, self._crew)
            return result
        folder = self._folder(into)
        with folder.locked():
            state = folder.state
            if state is not None and (state.version, state.identity) == (version.number, version.identity):
                return PullResult(version.number, 0, 0)
            result, files = version.read(self._crew), version.files
            folder.become(version.tensors, version.number, version.identity, files)
        return result._replace(num_bytes=result.num_bytes + sum(map(len, files.values())))

    def _pull_newest(self, into: _Into, number: int | None) -> tuple[int, PullResult]:
        """Pull a version from the root, and start again if versions that it read were replaced meanwhile."""
        for has_more in reversed(range(_TRIES)):
            target = self._target(number)
            size = self._sizes.get(target, 0)
            try:
                if size:
                    if len(self._held) != size:
                        self._held = [MemoryReplica(_allocate) for _ in range(size)]
                    return target, self._take(into, VersionOfRanks(self._root, target, size, self._held))
                return target, self._pull(into, target)
            except (CorruptCheckpointError, NotCommittedError) as error:
                if not (has_more and self._were_replaced(target, size)):
                    raise
                _log.info("%s; it was replaced meanwhile; pulling it again", error)
        raise AssertionError("the last try returns or raises")

    def _were_replaced(self, target: int, size: int) -> bool:
        return self._root.were_replaced(target, size) if size else self._versions.were_replaced(self._read)

    def _pull(self, into: _Into, target: int) -> PullResult:
        """Bring a folder, or the memory of a module, to a version of a whole model."""
        self._read = {target}
        update = partial(
            update_replica, versions=self._versions, target=target, crew=self._crew, before_apply=self._note_versions
        )
        if not isinstance(into, torch.nn.Module):
            folder, base = self._folder(into), self._versions.base
            if base is not None and folder.folder == base.folder.resolve():
                raise ValueError(f"{into} is the base itself, which must not change; pull into another folder")
            with folder.locked():
                return update(folder)
        replica = self._modules.setdefault(into, MemoryReplica(_allocate))
        result = update(replica, before_seed=partial(_refuse_other_module, into))
        adapter = self._versions.read_or_base(target, fresh=False).adapter
        tensors = {name: PiecedTensor.of(replica.tensor(name)) for name in replica.tensors}
        fill(into, tensors, adapter, self._describe(target), self._crew)
        return result

    def _note_versions(self, chain: Sequence[VersionIndex]) -> None:
        """Record which versions at the root this pull reads. The base model is not one of them."""
        self._read |= {index.version for index in chain if not self._versions.is_base(index)}

    def watch(self, *, poll_seconds: float = 1.0) -> Iterator[int]:
        """Yield the newest version, and then each newer version when it is published, until `close`.

            for version in subscriber.watch():
                subscriber.pull(model, version)

        If several versions were published between two polls, only the newest is yielded. After a rollback it yields a
        lower number. Each poll lists the root once, and once more for each world of ranks that has published there.

        Args:
            poll_seconds: the time between two polls.
        """
        self._refuse_if_forked()
        return self._watch(spec.seconds_above_0("poll_seconds", poll_seconds))

    def _watch(self, poll_seconds: float) -> Iterator[int]:
        seen: tuple[int, str] | None = None
        while not self._closed.is_set():
            # A lower number, or the same number with other weights, counts as well: the training was rolled back.
            current = self._newest()
            if current is not None and current != seen:
                seen = current
                yield current[0]
            else:
                self._closed.wait(poll_seconds)

    def _identity(self, version: int) -> str:
        """The identity of a version's weights, from the cache if possible; empty if the version cannot be read."""
        try:
            return self._root.identity(version)
        except CheckpointError:
            return ""

    def close(self) -> None:
        """End every `watch`, and free the memory. May be called again, from any thread.

        subscriber.close()
        """
        if os.getpid() != self._pid:
            return  # it belongs to the parent process
        self._closed.set()
        self._modules.clear()
        self._memory.drop()
        self._held = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Subscriber {self._versions.root}{' (closed)' if self._closed.is_set() else ''}>"

    def _refuse_if_forked(self) -> None:
        if os.getpid() != self._pid:
            raise ClosedError("this Subscriber belongs to the parent process; make one in this process")

    def _refuse_if_closed(self) -> None:
        self._refuse_if_forked()
        if self._closed.is_set():
            raise ClosedError(f"{self!r}: create a new one")

    def _describe(self, version: int) -> str:
        return f"version {version} of {self._versions.root}"

    def _target(self, version: int | None) -> int:
        existing = self._numbers()
        if version is not None:
            if version not in existing and (self._versions.base is None or version or existing[:1] == [0]):
                self._versions.read(version, fresh=True, others=existing)  # raises, and says which versions exist
            return version
        newest = max(existing, default=None)
        if newest is None:
            raise NotCommittedError(
                f"{self._versions.root}: no version is published yet", path=self._versions.root, step=None
            )
        return newest

    @staticmethod
    def _folder(into: str | os.PathLike[str]) -> FolderReplica:
        return FolderReplica(Path(places.local_place(into)).absolute())


def _refuse_other_module(module: torch.nn.Module, anchor: Anchor) -> None:
    kinds = {name: (tensor.dtype, tensor.shape) for name, tensor in anchor.tensors.items()}
    refuse_misfit(module, kinds, anchor.source.index.adapter, anchor.source.path)


def _allocate(num_bytes: int) -> torch.Tensor:
    try:
        return kept_memory.host_memory().lend(num_bytes)
    except MemoryError:
        raise MemoryError(
            "a pull into a module, or of versions that ranks have published, takes the size of the weights in host "
            f"memory, and {num_bytes:,} bytes are not free; pull into a folder, or free memory"
        ) from None
