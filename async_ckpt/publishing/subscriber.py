"""`Subscriber`: the weights of a version, in a folder that engines load or in a module.

In: a root with versions. Out: a folder or a module that has one of them. Knows nothing of: publishers, engines.
"""

from __future__ import annotations

import logging
import os
import tempfile
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from shutil import rmtree
from typing import Final, NamedTuple, Self

import torch

from ..errors import CheckpointError, ClosedError, CorruptCheckpointError, NotCommittedError
from ..format.delta import VersionIndex, folder_of, version_of
from ..host.loop import get_loop
from ..host.threads import Crew
from ..report import PullReport, VerifyReport
from ..saving.default import held_memory
from ..saving.policy import whole_step
from ..spans import Clock, Spans, monotonic
from ..storage.place import Anywhere, Place, local_place, written_at
from .base_model import BaseModel
from .folder_replica import FolderReplica
from .module import fill, refuse_misfit
from .rank_versions import RankVersions, WholeVersion, assemble, folder_of_rank, worlds_in
from .replica import MemoryReplica, Replica, new_crew, update_replica
from .source import Anchor, VersionSource, WeightsState
from .versions import Versions

# The number of attempts of a pull while versions that it reads are being replaced.
_TRIES: Final = 10

_log: Final = logging.getLogger("async_ckpt")


class Subscriber:
    """Follows the versions that a `Publisher` adds at a root, from any host and at any time.

        subscriber = async_ckpt.Subscriber("s3://bucket/weights")
        for version in subscriber.watch():
            subscriber.pull(into="/local/model")

    It needs only the files: a process that starts late, or was killed, has the newest weights after one `pull`.
    It writes nothing at the root.

    Args:
        root: where the versions are: a path, a URL or a Place.
        base: a folder of Hugging Face on this machine, for a root whose first version is a delta against a model that
            is not published there, such as slime's. A pull that finds no anchor begins with this model. It must not
            change.

    Raises NotADirectoryError if `base` is not a folder, and ValueError if it is not on this machine.
    """

    def __init__(self, root: Anywhere, *, base: str | os.PathLike[str] | None = None) -> None:
        place = written_at(root)
        self._base = None if base is None else BaseModel(local_place(base).absolute())
        self._versions, self._ranks = Versions(place.storage()), RankVersions(place)
        self._sizes: dict[int, int] = {}  # the size of the world, by version that ranks have published
        self._slices: dict[int, dict[int, MemoryReplica]] = {}  # in memory: by size of the world, by rank
        self._read: set[int] = set()  # the versions that the pull under way reads
        self._crew = new_crew()
        self._closed = threading.Event()
        # Host memory of each module that was pulled into; used by one `pull` at a time.
        self._modules: weakref.WeakKeyDictionary[torch.nn.Module, MemoryReplica] = weakref.WeakKeyDictionary()
        self._pulling = threading.Lock()
        self._pid = os.getpid()

    def versions(self) -> list[int]:
        """The versions that are whole, ascending.

        subscriber.versions()  # [100, 101, 102]
        """
        self._refuse_if_closed()
        return self._numbers()

    def _numbers(self) -> list[int]:
        """The versions that are whole: one listing, one of each world of ranks, and a request for each new version."""
        names = self._versions.storage.names("")
        if not names and not self._versions.storage.remote and Path(self._versions.root).is_file():
            raise NotADirectoryError(f"{self._versions.root} is a file; give the folder with the versions")
        self._sizes = self._ranks.sizes(names)
        return sorted({*self._versions.numbers(names), *self._sizes})

    def latest(self) -> int | None:
        """The newest version, or None.

        subscriber.latest()  # 102
        """
        return max(self.versions(), default=None)

    def pull(self, into: str | os.PathLike[str] | torch.nn.Module, version: int | None = None) -> PullReport:
        """Bring a folder or a module to a version, and return what that took.

            report = subscriber.pull("/local/model")
            model = AutoModelForCausalLM.from_pretrained("/local/model")

        If the target holds an earlier version, only the deltas after that are read, and applied in place, in their
        order. Otherwise the pull begins with the newest anchor up to the version. Every tensor is compared with its
        checksum. After an error, even at the last tensor, the target has its weights of before, or those of a version
        on the way. If a pull into a folder was killed, or its weights were damaged, the next one begins with an
        anchor.

        Args:
            into: a folder on this machine that is new, empty, or filled by an earlier pull. Pulls of several
                processes into it take turns. Files that you put there later stay. Or a module: its parameters and
                buffers get the new bytes once all of them are read and compared, which takes the size of the weights
                in host memory.
            version: by default the newest.

        The folder is an ordinary one of Hugging Face. Do not use its files by memory maps during a pull: they change.

        Raises NotCommittedError if there is no such version, or if one on the way to it is missing;
        CorruptCheckpointError for damaged files; StateMismatchError for another model; UnsupportedStateError for a
        module with tensors that cannot be filled in place; FileExistsError for a folder with other files;
        MemoryError, StorageUnavailableError and StorageFullError.
        """
        self._refuse_if_closed()
        spans = Spans()
        number = None if version is None else whole_step(version, what="version")
        if not self._pulling.acquire(blocking=False):
            raise RuntimeError("another pull of this Subscriber is under way; use one for each thread")
        try:
            # Independent of the caller's mode: our tensors are plain ones on the host.
            with torch.inference_mode(False), torch.device("cpu"):
                target, result = self._pull_newest(into, number)
        finally:
            self._crew.stop()
            self._pulling.release()
        return PullReport(target, *result, spans.total())

    def _pull_newest(
        self, into: str | os.PathLike[str] | torch.nn.Module, number: int | None
    ) -> tuple[int, _PullResult]:
        """Pull a version, and start again if versions that it read were replaced meanwhile."""
        for has_more in reversed(range(_TRIES)):
            target = self._target(number)
            size = self._sizes.get(target)
            try:
                if size is None:
                    return target, self._pull(self._replica(into), target, into)
                return target, self._pull_of_ranks(into, target, size)
            except (CorruptCheckpointError, NotCommittedError) as error:
                if not (has_more and self._were_replaced(target, size)):
                    raise
                _log.info("%s; it was replaced meanwhile, and is pulled again", error)
        raise AssertionError("the last try returns or raises")

    def _were_replaced(self, target: int, size: int | None) -> bool:
        if size is not None:
            return self._ranks.were_replaced(target, size)
        return self._versions.were_replaced(self._read)

    def _pull(self, replica: Replica, target: int, into: object) -> _PullResult:
        self._read = {target}
        with replica.locked():
            before = replica.state
            chain, num_bytes = update_replica(
                replica, self._versions, target, self._crew, base=self._base, before_apply=self._note_versions
            )
            if isinstance(into, torch.nn.Module) and isinstance(replica, MemoryReplica):
                fill(into, {n: replica.tensor(n) for n in replica.tensors}, self._describe(target))
        return _PullResult(_built_on(before, chain), len(chain), num_bytes)

    def _note_versions(self, chain: Sequence[VersionIndex]) -> None:
        """Note which versions of the root this pull reads; the base model is not one of them."""
        self._read |= {i.version for i in chain if self._base is None or not self._base.is_source_of(i)}

    def _pull_of_ranks(self, into: str | os.PathLike[str] | torch.nn.Module, target: int, size: int) -> _PullResult:
        """Update the slices of each rank to the version, in memory; then assemble whole tensors."""
        folder = None if isinstance(into, torch.nn.Module) else self._folder(into)
        with nullcontext() if folder is None else folder.locked():
            version = self._ranks.read_whole(target, size)
            before = None if folder is None else folder.state
            if (
                folder is not None
                and before is not None
                and (before.version, before.identity) == (target, version.identity)
            ):
                return _PullResult(target, 0, 0)
            if isinstance(into, torch.nn.Module):
                given = {name: (whole.dtype, whole.shape) for name, whole in version.tensors.items()}
                refuse_misfit(into, given, self._describe(target))
            result = _PullResult(None, 0, 0)
            for rank in range(size):
                versions, replica = self._ranks.of_rank(rank, size), self._slices_of(rank, size)
                held = replica.state
                chain, num_read = update_replica(replica, versions, target, self._crew)
                version.compare(rank, replica.state.identity if replica.state else "", versions.root)
                num_versions, num_bytes = max(result.num_versions, len(chain)), result.num_bytes + num_read
                result = _PullResult(_built_on(held, chain), num_versions, num_bytes)
            tensors = version.tensors.items()
            if isinstance(into, torch.nn.Module):
                whole = {name: assemble(tensor, self._slices[size]) for name, tensor in tensors}
                fill(into, whole, self._describe(target))
            elif folder is not None:
                config_files = self._config_files(version, size)
                whole = {name: assemble(tensor, self._slices[size]) for name, tensor in tensors}
                folder.become(whole, target, version.identity, config_files)
        return result

    def _config_files(self, version: WholeVersion, size: int) -> dict[str, bytes]:
        """Config, tokenizer and the like, which rank 0 has published with the anchor that the version is built on."""
        versions = self._ranks.of_rank(0, size)
        chain = versions.chain(version.number, None)
        version.compare(0, chain[-1].identity, versions.root)
        source = VersionSource(versions.storage, chain[0])
        return {name: bytes(source.read(name)) for name in source.other_files()}

    def _slices_of(self, rank: int, size: int) -> MemoryReplica:
        if size not in self._slices:
            self._slices = {size: {}}  # drop those of another world
        if rank not in self._slices[size]:
            self._slices[size][rank] = MemoryReplica(_allocate)
        return self._slices[size][rank]

    def watch(self, *, poll_seconds: float = 1.0) -> Iterator[int]:
        """Yield the newest version, and each newer one as it comes, until `close`.

            for version in subscriber.watch():
                subscriber.pull(model, version)

        Versions that are older than the newest when it looks are left out. After a rollback it yields a lower one.
        One poll lists the root once, and once more for each world of ranks that has published there.

        Args:
            poll_seconds: the time between two polls.
        """
        if not isinstance(poll_seconds, int | float) or not poll_seconds > 0:
            raise ValueError(f"poll_seconds must be above 0, got {poll_seconds!r:.100}")
        self._refuse_if_forked()
        return self._watch(poll_seconds)

    def _watch(self, poll_seconds: float) -> Iterator[int]:
        seen: tuple[int, str] | None = None
        while not self._closed.is_set():
            newest = max(self._numbers(), default=None)
            # A lower number, or the same with other weights, counts as well: the training went back to a checkpoint.
            current = None if newest is None else (newest, self._identity(newest))
            if current is not None and current != seen:
                seen = current
                yield current[0]
            else:
                self._closed.wait(poll_seconds)

    def _identity(self, version: int) -> str:
        """The identity of a version's weights, from the cache if the version is known; empty if it cannot be read."""
        size = self._sizes.get(version)
        try:
            if size is None:
                return self._versions.read(version).identity
            return "".join(index.identity for index in self._ranks.indices(version, size))
        except CheckpointError:
            return ""

    def close(self) -> None:
        """End every `watch`, and give the memory back. May be called again, from any thread.

        subscriber.close()
        """
        if os.getpid() != self._pid:
            return  # it belongs to the parent process
        self._closed.set()
        self._modules.clear()
        self._slices = {}

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
            raise ClosedError(f"{self!r}: make another one")

    def _describe(self, version: int) -> str:
        return f"version {version} of {self._versions.root}"

    def _target(self, version: int | None) -> int:
        existing = self._numbers()
        if version is not None:
            if version not in existing and (self._base is None or version or existing[:1] == [0]):
                self._versions.read(version, fresh=True)  # raises, and says which versions exist
            return version
        newest = max(existing, default=None)
        if newest is None:
            raise NotCommittedError(
                f"{self._versions.root}: there is no version yet", path=self._versions.root, step=None
            )
        return newest

    @staticmethod
    def _folder(into: str | os.PathLike[str]) -> FolderReplica:
        return FolderReplica(Path(local_place(into)).absolute())

    def _replica(self, into: str | os.PathLike[str] | torch.nn.Module) -> Replica:
        if not isinstance(into, torch.nn.Module):
            folder = self._folder(into)
            if self._base is not None and folder.folder == self._base.folder.resolve():
                raise ValueError(f"{into} is the base itself, which must not change; pull into another folder")
            return folder
        module = into
        replica = self._modules.get(module)
        if replica is None:
            # A weak reference: the replica lives as long as the module, and must not keep it alive.
            reference = weakref.ref(module)

            def check_model(anchor: Anchor) -> None:
                live = reference()
                if live is not None:
                    kinds = {name: (tensor.dtype, tensor.shape) for name, tensor in anchor.tensors.items()}
                    refuse_misfit(live, kinds, anchor.source.path)

            replica = self._modules[module] = MemoryReplica(_allocate, check_model)
        return replica


class _PullResult(NamedTuple):
    """The version that was built on, and the numbers of versions applied and bytes read."""

    base: int | None
    num_versions: int
    num_bytes: int


def _built_on(before: WeightsState | None, chain: Sequence[VersionIndex]) -> int | None:
    """The version that the target had, if the chain was applied to it."""
    return None if before is None or (chain and chain[0].is_anchor) else before.version


def _allocate(num_bytes: int) -> torch.Tensor:
    try:
        return held_memory().lend(num_bytes, crew=get_loop().copiers)
    except MemoryError:
        raise MemoryError(
            f"a pull into a module, or of versions that ranks have published, takes the weights once in host memory, "
            f"{num_bytes:,} bytes, which are not free; pull into a folder, or free some"
        ) from None


# --- the soundness of all versions ---------------------------------------------------------------------------------


def verify_versions(
    place: Place, *, base: str | os.PathLike[str] | None = None, clock: Clock = monotonic
) -> VerifyReport:
    """Verify the versions at a root. Raises CorruptCheckpointError after all of them were read."""
    begin, root = clock(), place.storage().locate("")
    with tempfile.TemporaryDirectory(prefix="async-ckpt-verify-") as scratch:
        checks = [*checks_of_versions(place, Path(scratch), base=None if base is None else local_place(base))]
    errors = {check.version: check.error for check in checks if check.error is not None}
    sound = tuple(sorted({check.version for check in checks} - errors.keys()))
    if errors:
        damaged = tuple(sorted(errors))
        shown = (", ".join(map(str, numbers)) or "none" for numbers in (damaged, sound))
        raise CorruptCheckpointError(
            "{}: damaged: version {}; sound: {}. {}".format(root, *shown, errors[damaged[0]]),
            path=root,
            damaged_steps=damaged,
            sound_steps=sound,
        ) from errors[damaged[0]]
    if not sound:
        raise NotCommittedError(f"{root}: no version there is whole", path=root, step=None)
    return VerifyReport(root, len(checks), sum(check.num_bytes for check in checks), clock() - begin, versions=sound)


def has_versions(names: Iterable[str]) -> bool:
    """Whether these names at a root are those of versions, or of the ranks that publish some."""
    listed = list(names)
    return any(version_of(name) is not None for name in listed) or bool(worlds_in(listed))


class VersionCheck(NamedTuple):
    """A version that was checked, at the root of all or in the folder of a rank, and its error if it is not sound.

    `kind` is "anchor", "delta" or, if its index cannot be read, "damaged". `num_bytes` are those of its files.
    """

    version: int
    folder: str  # below the root: empty, or the folder of a rank
    kind: str
    num_bytes: int
    error: CheckpointError | None


def checks_of_versions(place: Place, scratch: Path, *, base: Path | None = None) -> Iterator[VersionCheck]:
    """Check all versions at a root, and those of the ranks that publish slices there.

    Each is applied to a folder that is thrown away, in ascending order, so that every checksum is compared and each
    delta is applied once. A version that is built on a damaged one cannot be had either, up to the next anchor.

    `base` is the folder of a base model that is not published. `scratch` gets as many bytes as the model has, and for
    anchors twice as many. Raises StorageUnavailableError and StorageFullError.
    """
    base_model, ranks, crew = BaseModel(base) if base is not None else None, RankVersions(place), new_crew()
    names = ranks.storage.names("")
    try:
        yield from _checks_at("", Versions(ranks.storage), scratch / "versions", base_model, crew)
        for size, begun in sorted(worlds_in(names).items()):
            for rank in sorted(begun):
                folder = folder_of_rank(rank, size)
                yield from _checks_at(folder, ranks.of_rank(rank, size), scratch / folder, None, crew)
        for version, size in ranks.sizes(names).items():
            try:
                ranks.read_whole(version, size)
            except (CorruptCheckpointError, NotCommittedError) as error:
                yield VersionCheck(version, "", "damaged", 0, error)
    finally:
        crew.stop()


def _checks_at(
    folder: str, versions: Versions, scratch: Path, base: BaseModel | None, crew: Crew
) -> Iterator[VersionCheck]:
    damaged: set[int] = set()
    for number in versions.numbers():
        kind, error = "damaged", None
        try:
            index = versions.read(number)
            kind = "anchor" if index.base is None else "delta"
            if index.base in damaged:
                raise CorruptCheckpointError(
                    f"{versions.root}: version {number} is a delta against version {index.base}, which is damaged",
                    path=versions.root,
                )
            replica = FolderReplica(scratch)
            with replica.locked():
                update_replica(replica, versions, number, crew, base=base)
        except (CorruptCheckpointError, NotCommittedError) as caught:
            if number not in versions.numbers():
                continue  # retention was faster
            error = caught
            damaged.add(number)
        yield VersionCheck(number, folder, kind, sum(versions.storage.sizes(folder_of(number)).values()), error)
    rmtree(scratch, ignore_errors=True)
