"""Where a save goes: one object at a path of the user's choice, or one attempt at a step of a run.

In: places, runs. Out: targets. Knows nothing of: tensors.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from enum import IntEnum
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self

from ..errors import CheckpointError, StepExistsError, StorageUnavailableError
from ..host.loop import OffLoop, get_loop
from ..ranks.agreement import Agreement, Alone, listen_again
from ..ranks.attempts import Joint, Ranks
from ..ranks.world import ranks
from ..runs.manifest import Archive, Elsewhere, Manifest, OfRanks
from ..runs.run import Run
from ..spec import BLOCK_BYTES, align_up
from ..storage.base import Sink, Storage
from ..storage.bulk import Parcel, copy
from ..storage.compressed import Zstd, ZstdSink, refuse_if_missing
from ..storage.locks import temps_of
from ..storage.place import Place
from ..storage.scratch import refuse_in_running
from .borrowed import Contents
from .delivery import Target, Verify
from .line import Line

Compression = Zstd | Literal["zstd"] | None


def _how(compression: Compression, name: str) -> Zstd | None:
    """What the user said, or what the name says."""
    if compression is None:
        return Zstd() if name.endswith(".zst") else None
    if compression == "zstd":
        return Zstd()
    if not isinstance(compression, Zstd):
        raise ValueError(f'compression must be "zstd", a Zstd(…) or None, got {compression!r}')
    return compression


class FileTarget:
    """One object at a path of the user's choice: durable is committed."""

    num_bytes_beside = 0

    @classmethod
    def at(cls, place: Place, compression: Compression = None) -> Self:
        """What the user said, checked."""
        storage, name = place.object()
        how = _how(compression, name)
        if how is not None:
            refuse_if_missing()
        return cls(storage, name, how)

    def __init__(self, storage: Storage, name: str, how: Zstd | None = None) -> None:
        """`how` it is compressed on the way, if it is."""
        self.storage, self.name, self._how = storage, name.rpartition("/")[2], how
        self._name = name
        self.in_order = storage.in_order or how is not None
        self.path = self.storage.locate(self._name)
        if not self.storage.remote and Path(self.path).is_dir():
            example = os.path.join(self.path, "checkpoint.tar")
            raise IsADirectoryError(f"{self.path} is a folder; give the path of a file, such as {example}")
        if not self.storage.remote:
            refuse_in_running(Path(self.path).parent)

    def open(self, num_bytes: int, segment_bytes: int, max_segments: int) -> Sink:
        if not self.storage.remote:
            self.storage.sweep("", temps_of(self._name, self.storage.names("")), delete=True)
        if self._how is not None:
            return ZstdSink(
                self.storage, self._name, num_bytes=num_bytes, segment_bytes=segment_bytes, how=self._how
            )
        return self.storage.create(
            self._name, num_bytes=num_bytes, segment_bytes=segment_bytes, max_segments=max_segments
        )

    def part_segments(self, num_bytes: int, segment_bytes: int) -> int:
        return 1 if self._how is not None else self.storage.part_segments(num_bytes, segment_bytes)

    def check(self) -> None:
        """Nothing to ask."""

    def commit(self, archives: tuple[Archive, ...], *, late: bool = False) -> None:
        """Nothing to agree on."""

    is_cache = may_be_sent_again = False

    def copy_of(self, other: Target, num_bytes: int, verify: Verify, check: Callable[[], None]) -> Sink:
        raise NotImplementedError("a file has one place")

    async def agree(self, archive: Archive, off_loop: OffLoop, check: Callable[[], None]) -> None:
        """Nobody else writes it."""

    async def hear(self, off_loop: OffLoop, check: Callable[[], None]) -> None:
        """Nobody else decides."""

    def refuse(self, error: BaseException) -> bool:  # noqa: ARG002
        return True

    async def follow(self, off_loop: OffLoop) -> None:
        """Nobody else decides."""

    def hangs(self, quiet: Future[None]) -> None:
        """There is no other place to go on with."""

    def discard(self) -> None:
        """It may have replaced an older file: this one is whole, so it stays."""

    def afterwards(self) -> None:
        """Nothing to delete."""


class Reached(IntEnum):
    """The life of an attempt at a step, at one root: it goes from each to the next."""

    BEGUN = 0
    CHECKED = 1  # it was known, when this was asked, that the step could be committed
    COMMITTED = 2
    ANNOUNCED = 3  # tracker and journal say so


class StepTarget:
    """One attempt at one step, at one root. Raises at once when that is known to be in vain."""

    def __init__(
        self,
        line: Line,
        run: Run,
        step: int,
        token: str,
        overwrite: bool,
        record: Mapping[str, Any],
        contents: Contents,
        agreement: Agreement | Alone,
    ) -> None:
        """`agreement` is with the other ranks, if there are any; then rank 0 alone checks and commits the step."""
        self._agreement = agreement
        self._line, self._run, self._step, self._token = line, run, step, token
        self._overwrite, self._record, self._contents = overwrite, record, contents
        self._rolled_back = line.rolled_back
        self._reached = Reached.BEGUN
        self._has_settled = run.has_start  # what the other roots show of earlier starts is known
        self._replaces: tuple[Manifest, str] | None = None
        self._driver_sink: Sink | None = None
        self._of_ranks: OfRanks | None = None  # what the manifest is to name, where several ranks have agreed
        self._made: Manifest | None = None  # what another rank has committed
        self.num_bytes_beside = len(contents.driver.image) if contents.driver else 0
        self._name = run.attempt_path(step, token, agreement.rank)
        self.name = self._name.rpartition("/")[2]
        self.storage, self.in_order = run.storage, run.storage.in_order
        self.path = run.storage.locate(run.folder(step) if agreement.has_others else self._name)
        if agreement.decides:
            self._check_at_once()

    def _check_at_once(self) -> None:
        line, run = self._line, self._run
        run.check_start()
        run.check_known(self._step, overwrite=self._overwrite)
        if not run.storage.remote:
            try:
                self._check()
            except StorageUnavailableError:
                if line.rule == "all" or line.has_one_root:
                    raise  # otherwise its delivery fails, unless it is back by then

    def open(self, num_bytes: int, segment_bytes: int, max_segments: int) -> Sink:
        if self._line.hangs(self._run):
            raise StorageUnavailableError(
                f"{self.path}: earlier writes there have not returned yet", path=self.path
            )
        self._agreement.claim()
        if self._agreement.decides and not self.storage.remote:
            if self._take():
                self._check()
            self._run.sweep_once(has_ranks=self._agreement.has_others)  # first, for it makes room
        return self.storage.create(
            self._name, num_bytes=num_bytes, segment_bytes=segment_bytes, max_segments=max_segments
        )

    def part_segments(self, num_bytes: int, segment_bytes: int) -> int:
        return self.storage.part_segments(num_bytes, segment_bytes)

    def check(self) -> None:
        if not self._agreement.decides:
            return
        if self.storage.remote:
            self._take()
        if self._reached < Reached.CHECKED:
            self._check()
        if self.storage.remote:
            with suppress(CheckpointError):
                self._run.learn()
        if self._overwrite:
            self._replaces = self._run.found(self._step)

    def _take(self) -> bool:
        """Take the root for this process, at its first save there. Whether it was taken now."""
        return self._run.take(self._step, [run for run in self._line.roots.runs if run is not self._run])

    def _check(self) -> None:
        if not (self._line.has_one_root or self._has_settled):
            self._has_settled = True
            self._line.roots.settle()
        with self._telling_ranks():
            self._run.check(
                self._step,
                overwrite=self._overwrite,
                rolled_back=self._rolled_back is not None,
                retire=self._line.retire,
            )
        self._reached = Reached.CHECKED

    @contextmanager
    def _telling_ranks(self) -> Iterator[None]:
        """Where ranks save each for itself, whoever committed the step first may have been another of them."""
        try:
            yield
        except StepExistsError as error:
            rank, world_size = ranks()
            if world_size < 2 or self._agreement.has_others:
                raise
            raise StepExistsError(
                f"{error}. This is rank {rank} of {world_size}: if every rank saves to {self._run.storage.locate('')}, "
                "each writes the whole state, and only one can commit the step. Save on rank 0 alone "
                "(`if dist.get_rank() == 0: …`), give each rank a root of its own, or initialize the process group first, "
                "so that all ranks save together",
                step=self._step,
            ) from error.__cause__

    @property
    def is_cache(self) -> bool:
        return self._agreement.is_apart

    @property
    def may_be_sent_again(self) -> bool:
        return self._agreement.has_others and not self.is_cache

    def copy_of(self, other: Target, num_bytes: int, verify: Verify, check: Callable[[], None]) -> Sink:
        sinks: list[Sink] = []
        parcel = Parcel(partial(other.storage.open, self._name), self._name, num_bytes, verify)
        copy([parcel], self.storage, background=True, check=check, finished=sinks.append)
        return sinks[0]

    async def agree(self, archive: Archive, off_loop: OffLoop, check: Callable[[], None]) -> None:
        self._of_ranks = await self._agreement.agree(archive, off_loop, check)

    async def hear(self, off_loop: OffLoop, check: Callable[[], None]) -> None:
        self._made = await self._agreement.hear(off_loop, check)

    def refuse(self, error: BaseException) -> bool:
        return self._agreement.refuse(error)

    async def follow(self, off_loop: OffLoop) -> None:
        await self._agreement.follow(off_loop)

    def commit(self, archives: tuple[Archive, ...], *, late: bool = False) -> None:
        if self._made is not None:  # rank 0 has
            self._contents.warn_of_lost_driver(self._made, self._agreement.rank)
            self._is_committed_as(self._made, archives, late=late)
            self._reached = Reached.ANNOUNCED
            return
        if (
            self._agreement.has_others
        ):  # the other ranks learn of a commit by its manifest, so it must not be in vain
            self._run.check_taken()
        elsewhere = (*self._contents.borrowed, *self._write_driver())
        made = self._made_elsewhere() if late else None
        if made is not None:
            self._run.adopt(made, replaces=self._replaces)
        else:
            made = self._commit(archives, elsewhere, retire=self._line.retire and not late)
        self._reached = Reached.COMMITTED
        self._close_driver()
        self._agreement.committed()
        self._is_committed_as(made, archives, late=late)
        with suppress(CheckpointError):  # the checkpoint is true already; tried once more afterwards
            self._announce()

    def _made_elsewhere(self) -> Manifest | None:
        """The manifest by which this attempt is committed at another root. A late commit takes it over: it takes out of the run
        what that has taken out, and no newer step that has followed since.
        """
        for run in self._line.roots.runs:
            with suppress(StorageUnavailableError):
                made = run.committed(self._step) if run is not self._run else None
                if made is not None and made.attempt == self._token:
                    return made
        return None

    def _commit(
        self, archives: tuple[Archive, ...], elsewhere: tuple[Elsewhere, ...], *, retire: bool
    ) -> Manifest:
        with self._agreement.committing(), self._telling_ranks():
            return self._run.commit(
                self._step,
                self._token,
                archives,
                replaces=self._replaces,
                retire=retire,
                record=self._record,
                elsewhere=elsewhere,
                ranks=self._of_ranks,
                world_size=self._agreement.world_size,
            )

    def _is_committed_as(self, made: Manifest, archives: tuple[Archive, ...], *, late: bool) -> None:
        self.num_bytes_beside = made.num_bytes - sum(archive.num_bytes for archive in archives)
        self._line.groups.committed(self._run, self._step, made.lenders, self._contents)
        if not late:
            self._line.committed(since=self._rolled_back)

    def _announce(self) -> None:
        self._run.announce(self._step, in_flight=self._line.in_flight())
        self._reached = Reached.ANNOUNCED

    def _write_driver(self) -> list[Elsewhere]:
        """Beside the rank's archive, before the manifest that names both; what of the state is in it."""
        driver = self._contents.driver
        if driver is None:
            return []
        path, num_bytes = self._run.driver_path(self._step, self._token), len(driver.image)
        # By a sink, which keeps others from sweeping it before the manifest is there.
        sink = self._driver_sink = self.storage.create(
            path, num_bytes=num_bytes, segment_bytes=align_up(num_bytes, BLOCK_BYTES), max_segments=2
        )
        try:
            sink.write(0, memoryview(driver.image), _Kept())
            sink.finish()
        except BaseException:
            sink.abort()
            raise
        archive = Archive(path.rpartition("/")[2], num_bytes, driver.digest)
        folder = self._run.folder(self._step)
        return [Elsewhere(group, self._step, folder, archive) for group in driver.groups]

    def _close_driver(self) -> None:
        """Its fate is decided."""
        if self._driver_sink is not None:
            self._driver_sink.close()

    def discard(self) -> None:
        self._close_driver()
        self._run.discard(self._step, self._token, self._agreement.rank)

    def afterwards(self) -> None:
        if self.is_cache:
            self._run.trim(self._step, self._token, self._agreement.rank, in_flight=self._line.in_flight())
        if self.is_cache or not self._agreement.decides:
            return
        replaced = self._replaces[0] if self._replaces else None
        refusal: CheckpointError | None = None
        if self._reached < Reached.ANNOUNCED:
            try:
                self._announce()
            except CheckpointError as error:
                refusal = error  # a tracker that cannot be moved must not keep old steps for ever
        self._agreement.afterwards()
        self._run.retain(self._step, replaced=replaced, in_flight=self._line.in_flight())
        if self.storage.remote:
            self._run.sweep_once(has_ranks=self._agreement.has_others)
        self._line.catch_up_behind(self._run)
        if refusal is not None:
            raise refusal

    def hangs(self, quiet: Future[None]) -> None:
        self._line.left_behind(self._run, quiet)
        get_loop().note_hanging(quiet)


def step_targets(
    line: Line,
    step: int,
    overwrite: bool,
    record: Mapping[str, Any],
    contents: Contents,
    ranks: Ranks,
    joint: Joint | None,
) -> list[StepTarget]:
    """An attempt at a step, at each root; of all ranks together, with `joint`. Raises what refuses it at once."""
    if joint is None:
        token = os.urandom(4).hex()
        return [
            StepTarget(line, run, step, token, overwrite, record, contents, Alone())
            for run in line.roots.runs
        ]
    runs = line.roots.runs
    ranks.begin(joint, partial(listen_again, get_loop(), ranks, runs))
    joint.is_any = line.rule == "any" and not line.has_one_root
    agreements = {run: Agreement(ranks, joint, run, [one for one in runs if one is not run]) for run in runs}
    return [
        StepTarget(line, run, step, joint.attempt, overwrite, record, contents, agreement)
        for run, agreement in agreements.items()
    ]


class _Kept:
    """Memory that stays as long as anybody looks at it."""

    def retain(self) -> None: ...

    def release(self) -> None: ...
