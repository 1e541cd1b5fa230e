"""The targets of saves to a run, and of saves by several ranks: one attempt at a step, or at a folder.

In: places, runs. Out: targets. Knows nothing of: tensors.
"""

from __future__ import annotations

import logging
import os
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from ...errors import (
    CheckpointError,
    NotAFolderError,
    NotCommittedError,
    StepExistsError,
    StorageFullError,
    StorageUnavailableError,
)
from ..events.kinds import MEASURED, brief, largest, shortened
from ..host.loop import get_loop
from ..ranks.calls import JointSave
from ..ranks.one_off import STEP, OneOffFolder
from ..ranks.peers import Ranks
from ..ranks.world import ranks
from ..report import SaveReport
from ..runs.manifest import Archive, GroupLocation, Manifest, RankFiles, SaveTimes, attempt_of
from ..runs.marks import BAD, Mark
from ..runs.receipts import Lent
from ..runs.run import Run
from ..spec import BLOCK_BYTES, align_up
from ..storage.interface import Sink
from ..storage.locks import refuse_in_running
from .attempt import ObjectSize, SaveOutcome, Target
from .block_digests import GroupDigest
from .lineage import Lineage, StepCall, StepContents
from .mover import PassingCopy

if TYPE_CHECKING:
    from ..ranks.agreement import Agreement

_log = logging.getLogger("async_ckpt")


class Alone:
    """Replaces the `Agreement` in a process that saves alone, and has nothing to agree on."""

    rank, world_size, has_others, decides, follows = 0, 1, False, True, True
    is_apart = fails_elsewhere = is_announced = False
    spread: Final[Mapping[str, Any]] = MappingProxyType({})
    found = ""
    lent: Final[Collection[tuple[str, int]]] = ()

    def __init__(self, attempt: str, place: int) -> None:
        self.attempt, self.place = attempt, place

    async def _wait(self, *_: Any) -> None:
        """Do nothing: the attempt has its name, and no other rank makes room, writes or decides."""

    def _ignore(self, *_: Any) -> None:
        """Do nothing: no other rank waits for a message."""

    named = has_room = agree = receive = _wait
    made_room = committed = afterwards = _ignore
    committing = nullcontext

    def refuse(self, error: BaseException) -> bool:  # noqa: ARG002
        return True


class JointTarget(Target):
    """A target that several ranks write to. They agree before the commit."""

    _agreement: Agreement | Alone
    _of_ranks: RankFiles | None = None  # the manifest names it, if several ranks have agreed
    _manifest: Manifest | None = None  # set if another rank has committed
    _found = ""  # this rank's values that are not finite, in words

    async def begin(self, check: Callable[[], None]) -> None:
        if self._agreement.has_others:
            await self._agreement.named(check)
            self.rename(self._archive_path())

    @abstractmethod
    def _archive_path(self) -> str:
        """The path of this rank's archive, once the attempt has its name."""

    @property
    def _lent(self) -> Sequence[Lent]:
        """The groups of earlier steps that this rank's archive refers to."""
        return ()

    async def agree(self, archive: Archive, times: SaveTimes) -> None:
        self._found = "" if self.finite is None else self.finite.found()
        self._of_ranks = await self._agreement.agree(archive, times, self._found, self._lent)
        self._manifest = await self._agreement.receive()

    def refuse(self, error: BaseException) -> bool:
        return self._agreement.refuse(error)


class FolderTarget(JointTarget):
    """One attempt at a one-off save of several ranks: the archive of this rank, in the folder of the save."""

    _agreement: Agreement

    def __init__(self, folder: OneOffFolder, agreement: Agreement) -> None:
        super().__init__(folder.storage, "", folder.folder(STEP))
        self._folder, self._agreement = folder, agreement
        self._replaces: tuple[Manifest, str] | None = None
        self.num_bytes_beside = 0
        if not self.storage.remote:
            refuse_in_running(Path(self.path))
            if Path(self.path).exists() and not Path(self.path).is_dir():
                raise NotAFolderError(f"{self.path} is a file, but several ranks write a folder; give another path")

    def _archive_path(self) -> str:
        return self._folder.attempt_path(STEP, self._agreement.attempt, self._agreement.rank)

    def check(self) -> None:
        if self._agreement.decides:
            self.storage.prove(for_run=True)
            self._replaces = self._folder.check()

    def commit(self, archive: Archive, times: SaveTimes) -> None:
        manifest = self._manifest
        if manifest is None:
            with self._agreement.committing():
                manifest = self._folder.commit(
                    self._agreement.attempt,
                    self._of_ranks,
                    self._agreement.world_size,
                    replaces=self._replaces,
                    times=times,
                )
            self._agreement.committed(manifest)
        self.num_bytes_beside = manifest.num_bytes - archive.num_bytes

    def discard(self) -> None:
        self._folder.discard(self._agreement.attempt, self._agreement.rank)

    def tidy(self) -> None:
        if self._agreement.decides:
            self._agreement.afterwards()
            self._folder.clear(self._replaces[0] if self._replaces else None)


class StepAdmission:
    """The check that a step may be committed at its place. Only the deciding rank makes it: at once if no network is
    involved, otherwise before the commit. A target creates it on the caller's thread, and calls it on others.
    """

    def __init__(self, lineage: Lineage, run: Run, call: StepCall, agreement: Agreement | Alone) -> None:
        """Raises at once what is known to refuse the step. On a rank that does not decide, nothing is checked."""
        self.rolled_back = lineage.rolled_back
        self.overwrite = call.overwrite or call.step in lineage.damaged
        self._lineage, self._run, self._call, self._agreement = lineage, run, call, agreement
        # Needed until this process has taken the place; after that, the commits at the place show it.
        elsewhere = lineage.roots.known_elsewhere(run).commits
        self._elsewhere = () if run.has_start else (*elsewhere, *lineage.roots.listed)
        self._is_done = False  # a check has passed
        if agreement.decides:
            run.check_start()
            run.check_known(call.step, overwrite=self.overwrite)
            if not run.storage.remote:
                self.again()

    def once(self) -> None:
        """Check, unless a check has already passed. Raises what refuses the step."""
        if not self._is_done:
            self.again()

    def again(self) -> None:
        """Check. Raises what refuses the step."""
        with self.telling_ranks():
            self._run.check(
                self._call.step,
                overwrite=self.overwrite,
                rolled_back=self.rolled_back is not None,
                retire=self._lineage.retire,
                elsewhere=self._elsewhere,
            )
        self._is_done = True

    @contextmanager
    def telling_ranks(self) -> Iterator[None]:
        """Explain a step that exists already: if each rank saves separately, another one may have committed it."""
        try:
            yield
        except StepExistsError as error:
            rank, world_size = ranks()
            if world_size < 2 or self._agreement.has_others:
                raise
            raise StepExistsError(
                f"{error}. This is rank {rank} of {world_size}: if every rank saves to {self._run.storage.locate('')}, "
                "each writes the whole state, and only one can commit the step. Save on rank 0 alone "
                "(`if dist.get_rank() == 0: …`), give each rank a root of its own, or initialize the process group "
                "first, so that all ranks save together",
                step=self._call.step,
            ) from error.__cause__


class StepTarget(JointTarget):
    """One attempt at one step. A request creates it; an attempt calls it on other threads."""

    def __init__(self, lineage: Lineage, call: StepCall, agreement: Agreement | Alone) -> None:
        """`agreement` is with the other ranks, if there are any. Then rank 0 alone checks and commits the step, chooses
        its place, and decides whether the next place gets a copy at the same time. The other ranks learn this once the
        attempt has its name. Raises as `StepAdmission` does.
        """
        run = lineage.roots.runs[agreement.place]
        folder = run.folder(call.step)
        name = folder if agreement.has_others else run.attempt_path(call.step, agreement.attempt)
        super().__init__(run.storage, name)
        self.has_further_places = len(lineage.roots.runs) > 1
        self._lineage, self._call, self._agreement = lineage, call, agreement
        self._check = StepAdmission(lineage, run, call, agreement)
        self.contents = StepContents(call)
        self._is_announced = False  # the tracker and journal name the step
        self._replaces: tuple[Manifest, str] | None = None
        self._driver_sink: Sink | None = None
        self._num_bytes = 0  # the size of the archive
        self._passing: PassingCopy | None = None
        self.num_bytes_beside = len(call.driver.image) if call.driver else 0

    async def begin(self, check: Callable[[], None]) -> None:
        await super().begin(check)
        await self._agreement.has_room()
        self.storage = self.run.storage
        self.path = self.storage.locate(self.run.folder(self._call.step) if self._agreement.has_others else self._name)

    @property
    def run(self) -> Run:
        """The run at the place of the save, as far as this rank knows."""
        return self._lineage.roots.runs[self._agreement.place]

    @property
    def _lent(self) -> Sequence[Lent]:
        over = self.contents.over
        return () if over is None else [_as_lent(location) for location in over.locations.values()]

    def _archive_path(self) -> str:
        return self.run.attempt_path(self._call.step, self._token, self._agreement.rank)

    @property
    def _token(self) -> str:
        return self._agreement.attempt

    @property
    def in_order(self) -> bool:
        return any(run.storage.in_order for run in self._lineage.roots.runs)

    def part_segments(self, num_bytes: int, segment_bytes: int) -> int:
        return max(run.storage.part_segments(num_bytes, segment_bytes) for run in self._lineage.roots.runs)

    def open(self, size: ObjectSize) -> Sink:
        self._num_bytes = size.num_bytes
        if self._agreement.decides and not self.storage.remote:
            if self._take():
                self._check.again()
            self.run.sweeper.sweep_once(has_ranks=self._agreement.has_others)  # first, since sweeping makes room
        if self._agreement.decides and self.run.keep.free is not None:
            self._make_room()
        return super().open(size)

    def _make_room(self) -> None:
        """Delete old steps if there is no room for this one, before any rank writes."""
        run = self.run
        if self.storage.remote:  # the place is the folders of nodes
            self.storage.prove(for_run=True)
            self._take()
        self._check.once()
        try:
            run.make_room(
                self._call.step,
                self._num_bytes + self.num_bytes_beside,
                in_flight=self._lineage.in_flight(run),
                broken=self._lineage.damaged,
                is_part=self._agreement.has_others,
            )
        except StorageUnavailableError as error:  # the save may still fit
            run.root.warn_once("room", f"{run.storage.locate('')}: Keep(free=…) could not delete steps: {error}")
        self._agreement.made_room()

    def follow(self, size: ObjectSize) -> PassingCopy | None:
        mover = self._lineage.tiers.next_mover(self.run) if self._agreement.follows else None
        self._passing = None if mover is None else mover.follow(self._call.step, self._name, size.create)
        return self._passing

    def check(self) -> None:
        if self.contents.over is not None:
            self.contents.over.compare()
        if not self._agreement.decides:
            return
        if self.storage.remote:
            self.storage.prove(for_run=True)
            self._take()
        self._check.once()
        if self.storage.remote:
            with suppress(CheckpointError):
                self.run.learn()
        if self._check.overwrite:
            self._replaces = self.run.manifest_to_replace(self._call.step)

    def _take(self) -> bool:
        """Take the place for this process, at its first save there. Returns True if it was taken just now."""
        roots = self._lineage.roots
        is_new = roots.take(self.run, self._call.step)
        roots.write_places(self.run)
        if is_new and self._lineage.retire and max(roots.listed, default=-1) > self._call.step:
            with suppress(StorageUnavailableError):
                roots.view()  # so that the commit names the newer steps of other places
        return is_new

    def commit(self, archive: Archive, times: SaveTimes) -> None:
        if self._manifest is not None:  # rank 0 has committed
            if not self._agreement.is_announced:
                self._lineage.tiers.note_commit(self.run, self._call.step)
            self.contents.warn_of_lost_driver(self._manifest, self._agreement.rank)
            self._is_committed_as(self._manifest, archive)
            self._is_announced = True
            return
        if self._agreement.has_others:
            self.run.check_taken()  # the other ranks learn of a commit from its manifest, so it must not be void
            if self.has_further_places:  # the other ranks have expected the place of the last commit
                borrowed = {*map(_as_lent, self.contents.lent()), *self._agreement.lent}
                for step, attempt in sorted({(step, attempt) for _, step, attempt in borrowed}):
                    self._lineage.tiers.bring(self.run, step, attempt)
        elsewhere = (*self.contents.lent(), *self._lent_to_others(), *self._write_driver())
        manifest = self._put_manifest(archive, times, elsewhere)
        self._close_driver()
        if found := self._agreement.found or self._found:
            self._mark_bad(found)  # before anybody learns of the commit, and copies the step or restarts from it
        self._agreement.committed(manifest)
        self._is_committed_as(manifest, archive)
        self._lineage.tiers.committed(self.run, self._call.step, manifest.num_bytes)
        with suppress(CheckpointError):  # the checkpoint is committed already; `afterwards` tries again
            self._announce()

    def _lent_to_others(self) -> list[GroupLocation]:
        """The archives of earlier steps that archives of other ranks refer to, but this rank's does not.

        Raises NotCommittedError if the place does not have them.
        """
        others, locations = {*self._agreement.lent}.difference(map(_as_lent, self.contents.lent())), []
        for group, step, attempt in sorted(others):
            manifest = self.run.manifest(step)
            if manifest.attempt != attempt:
                raise NotCommittedError(f"step {step} was replaced, which this step borrows from", path="", step=step)
            locations.append(GroupLocation(group, step, self.run.folder(step), manifest.lenders[0], in_part=True))
        return locations

    def _put_manifest(self, archive: Archive, times: SaveTimes, elsewhere: tuple[GroupLocation, ...]) -> Manifest:
        with self._agreement.committing(), self._check.telling_ranks():
            return self.run.commit(
                self._call.step,
                self._token,
                (archive,),
                replaces=self._replaces,
                retire=self._lineage.retire,
                record=self._call.record,
                elsewhere=elsewhere,
                ranks=self._of_ranks,
                world_size=self._agreement.world_size,
                times=times,
                known_elsewhere=self._lineage.roots.known_elsewhere(self.run),
            )

    def _is_committed_as(self, manifest: Manifest, archive: Archive) -> None:
        self.num_bytes_beside = manifest.num_bytes - archive.num_bytes
        self._lineage.groups.committed(self.run, manifest.lenders, self.contents)
        if self.contents.over is not None:
            self.contents.over.committed(self.run, self._call.step, archive, manifest.lenders[0])
        self._lineage.committed(since=self._check.rolled_back)

    def _mark_bad(self, found: str) -> None:
        """Mark the step, which was just committed. A failure is only logged."""
        outcome, found = "is marked bad", shortened(found)
        try:
            self.run.put_mark(Mark(self._call.step, self._token, 1, BAD), found)
            self._lineage.note("mark", self._call.step, mark=BAD, note=found)
        except CheckpointError as error:
            outcome = f"could not be marked bad ({error})"
        _log.warning("%s: step %s %s: %s", self.storage.locate(""), self._call.step, outcome, found)

    def _announce(self) -> None:
        self.run.announce(self._call.step, in_flight=self._lineage.in_flight(self.run))
        self._is_announced = True

    def _write_driver(self) -> list[GroupLocation]:
        """Write the archive of `driver=`, before the manifest that names it. Returns its groups."""
        driver = self._call.driver
        if driver is None:
            return []
        path, num_bytes = self.run.root.driver_path(self._call.step, self._token), len(driver.image)
        # Use a sink: it keeps other processes from sweeping the archive before the manifest exists.
        sink = self._driver_sink = self.storage.create(
            path, num_bytes=num_bytes, segment_bytes=align_up(num_bytes, BLOCK_BYTES), max_segments=2
        )
        try:
            sink.write(0, memoryview(driver.image), StaticLease())
            sink.finish()
        except BaseException:
            sink.abort()
            raise
        self.num_driver_bytes = num_bytes
        archive = Archive(path.rpartition("/")[2], num_bytes, driver.digest)
        folder = self.run.folder(self._call.step)
        return [GroupLocation(group, self._call.step, folder, archive) for group in driver.groups]

    def _close_driver(self) -> None:
        """Close the sink, once the manifest names the archive, or the save has failed."""
        if self._driver_sink is not None:
            self._driver_sink.close()

    def refuse(self, error: BaseException) -> bool:
        self._lineage.tensors.forget()  # the lending step may be gone, so the next save is written whole
        if isinstance(error, NotCommittedError) and self._call.joint is None:  # else, other ranks may rely on it
            self._lineage.groups.forget(error.step)
        is_apart, on_other_rank = self._agreement.is_apart, self._agreement.fails_elsewhere
        if is_apart or on_other_rank or isinstance(error, StorageUnavailableError | StorageFullError):
            self._lineage.tiers.failed(
                self.run, error, num_bytes=self._num_bytes, for_good=is_apart, on_other_rank=on_other_rank
            )
        is_refused = super().refuse(error)
        joint = self._call.joint
        if joint is not None and joint.maybe_put:  # other ranks may find the manifest, and wait for copies of the step
            self._lineage.tiers.note_commit(self.run, self._call.step)
            self._lineage.tiers.wake(after=self.run)
        return is_refused

    def unchanged_in(self, digests: Mapping[str, GroupDigest]) -> tuple[str, ...]:
        over = self.contents.over
        return self._lineage.unchanged_in(digests, {*self.contents.lenders, *(over.whole_groups if over else ())})

    def promise(self) -> Future[int] | None:
        return self._lineage.tiers.promise(self.run, self._call.step)

    def is_kept(self) -> bool:
        return self._lineage.tiers.is_kept(self._call.step)

    def discard(self) -> None:
        self._close_driver()
        if self._passing is not None:
            self._passing.discard()
        self.run.sweeper.discard(self._call.step, self._token, self._agreement.rank)

    def afterwards(self, outcome: SaveOutcome) -> None:
        if not self._agreement.decides:
            return
        self._note_save(*outcome)
        refusal: CheckpointError | None = None
        try:
            if not self._is_announced:
                self._announce()
        except CheckpointError as error:
            refusal = error  # a tracker that cannot be moved must not keep old steps forever
        try:
            self._retain()
        finally:
            self.run.write_events()
        if refusal is not None:
            raise refusal

    def _retain(self) -> None:
        replaced = self._replaces[0] if self._replaces else None
        self._agreement.afterwards()
        self.run.retain(self._call.step, replaced=replaced, in_flight=self._lineage.in_flight(self.run))
        if self.storage.remote:
            self.run.sweeper.sweep_once(has_ranks=self._agreement.has_others)

    def _note_save(self, report: SaveReport, call_seconds: float, groups: Mapping[str, int]) -> None:
        """Note the outcome of the save in the history."""
        measured = {name: getattr(report, name) for name in MEASURED}
        self._lineage.note(
            "save",
            self._call.step,
            **measured,
            **self._lineage.facts(),
            attempt=self._token,
            call_seconds=call_seconds,
            free_bytes=self.storage.free_bytes(),
            groups=largest(groups),
            unchanged=report.unchanged_groups,
            borrowed={lent.group: lent.step for lent in self.contents.lent()},
            record=brief(self._call.record),
            destinations=[*map(asdict, report.destinations)] if self.has_further_places else [],
            world_size=self._agreement.world_size,
            **self._agreement.spread,
        )

    def failed(self, error: BaseException, seconds: float) -> None:
        if not self._agreement.decides:
            return
        facts = {"error": type(error).__name__, "message": shortened(str(error)), "total_seconds": seconds}
        self._lineage.note("failed", self._call.step, **facts)
        if not (self.storage.remote and isinstance(error, StorageUnavailableError)):  # it would fail after a long wait
            self.run.write_events()

    def hangs(self, quiet: Future[None]) -> None:
        where = self.path
        self._lineage.tiers.failed(self.run, StorageUnavailableError(f"{where} does not answer", path=where), quiet)
        get_loop().note_call(quiet)


def _as_lent(location: GroupLocation) -> Lent:
    return location.group, location.step, attempt_of(location.archive.name)


def begin_step(lineage: Lineage, call: StepCall, ranks: Ranks) -> StepTarget:
    """Begin an attempt at a step, of all ranks together if there are several. Raises what refuses it."""
    joint, runs = call.joint, lineage.roots.runs
    if joint is None:
        agreement: Agreement | Alone = Alone(os.urandom(4).hex(), lineage.tiers.choose())
    else:
        if ranks.world.rank == 0:
            joint.place = lineage.tiers.choose()
            mover = lineage.tiers.next_mover(runs[joint.place])
            joint.follows = mover is not None and mover.may_follow(call.step)
            joint.makes_room = runs[joint.place].keep.free is not None
        else:
            joint.place = runs.index(lineage.tiers.near)
        from ..ranks.agreement import Agreement

        ranks.calls.plan(joint)
        for run in runs:
            run.join(ranks.meeting.token()[:8])
        agreement = Agreement(ranks, joint, runs)
    return StepTarget(lineage, call, agreement)


def folder_target(folder: OneOffFolder, joint: JointSave, ranks: Ranks) -> FolderTarget:
    """Begin an attempt at a one-off save of all ranks together. Raises what refuses it."""
    from ..ranks.agreement import Agreement

    ranks.calls.plan(joint)
    return FolderTarget(folder, Agreement(ranks, joint, [folder]))


class StaticLease:
    """A lease of memory that Python itself keeps alive."""

    def retain(self) -> None: ...

    def release(self) -> None: ...
