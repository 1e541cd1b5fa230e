"""`AsyncCheckpointer`: the managed run that users hold.

In: states and steps. Out: handles, and states back. Knows nothing of: bytes, threads.
"""

from __future__ import annotations

import asyncio
import os
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any, Literal, Self

from ..core.host.loop import ask_for_exception, awaitable
from ..core.host.operations import notify, observed
from ..core.ranks.meeting import Meeting
from ..core.ranks.nodes import RunNodes
from ..core.ranks.peers import Differing, Ranks
from ..core.ranks.world import world_of
from ..core.runs.manifest import Archive
from ..core.runs.marks import MarkKind
from ..core.runs.naming import Naming, naming_of
from ..core.runs.record import plain_record
from ..core.runs.roots import Roots, open_roots
from ..core.runs.run import Run
from ..core.saving.admission import Admission, OnOverlap
from ..core.saving.drain import Writers
from ..core.saving.finite import NonFinite
from ..core.saving.handle import SaveHandle
from ..core.saving.interval import Past, SaveInterval
from ..core.saving.ledger import Ledger
from ..core.saving.lineage import Lineage
from ..core.saving.planner import pool_for
from ..core.saving.policy import Due, SavePolicy
from ..core.saving.request import StepRequest
from ..core.saving.saver import Saver
from ..core.saving.signals import Notice
from ..core.spec import Ema, Keep, flag, keep_of, whole_count, whole_step
from ..core.staging.guard import INHERITED, FirstSteps, unwrapped
from ..core.state.names import Select
from ..core.storage.interface import Storage
from ..core.storage.pace import Pace
from ..core.storage.place import Anywhere, local_place
from ..core.timing import wall_time
from ..core.trace import TraceFile
from ..errors import CheckpointError, StorageUnavailableError
from .run_history import events_at
from .run_reader import RunReader
from .tracking import ExperimentTracker, Tracking

if TYPE_CHECKING:
    from ..core.loading.load import Verify
    from ..core.saving.ema import WeightMean


class AsyncCheckpointer(RunReader):
    """The checkpoints of one training run, stored in a folder, at a URL, or at several places.

        with AsyncCheckpointer("runs/a", keep=3, guard=optimizer) as ckpt:
            start = ckpt.restore({"model": model, "optimizer": optimizer})  # the step, or None
            for step in range(0 if start is None else start + 1, 1000):
                train(step)
                if step % 100 == 99:
                    ckpt.save({"model": model, "optimizer": optimizer}, step)

    Args:
        root: the run's folder, which the first save creates; a URL such as "s3://bucket/run"; a `Place`; or a list of
            these from near to far, such as ["/nvme/run", "s3://bucket/run"]. With a list, a save is committed at the
            first place that answers and has room, then copied to the others in the background; `handle.at(place)`
            waits for a copy. A step exists if at least one place has it.
        keep: how many of the newest steps to keep, or `Keep(last=…, every=…, best=…, good=…, bytes=…)`. None keeps all.
            `Place(…, keep=…)` gives one of several places its own retention.
        due: the rules of `should_save`: `Due(every=…, seconds=…, overhead=…, mtbf=…, deadline=…, signals=True)`. With
            signals, the checkpointer must be constructed on the main thread.
        ema: `Ema(decay, groups=…)` keeps an exponential moving average of weights in the archives, as the group `ema`.
        guard: the optimizer (or optimizers) whose `step()` is the only code that changes its parameters and its state.
            Copying them then overlaps the next forward and backward pass, and `step()` waits until the copy is done.
            On one rank, the memory for their first save is allocated in the background during the first two steps.
        host_bytes: the hard limit of host memory for snapshots, at least 16 MiB. By default the size of the state, up
            to half of the free memory. If the state does not fit, `save` waits for the disk.
        segment_bytes: the unit of copying and writing, a multiple of 4 MiB. 32 MiB unless `host_bytes` is small.
        on_overlap: what `save` does while `max_in_flight` saves are under way: "wait" (the wait counts as stall) or
            "skip".
        max_in_flight: how many saves may be under way at once. Each needs its own host memory.
        on_rollback: "retire" removes newer commits from the run when a lower step is saved. By default such a save
            raises StepBehindError.
        naming: the names that another program expects: "skyrl", "verl", "open-instruct", "deepspeed", or
            `Naming(step_format=…, tracker=…)`. By default a step is named "step_{:08d}", and the file `latest` (the
            tracker) names the newest step.
        strict: before a save starts, raise the error of an earlier save if it has not been retrieved yet.
        exit_timeout: how many seconds the interpreter waits for saves at exit. None means no limit.
        progress: draw a bar for each save on stderr, or in the notebook. Needs tqdm.
        commit: deprecated. Several places always behave like "any"; `handle.at(place)` replaces "all".
        max_bandwidth: the most bytes per second that are written to a place, averaged over a few segments; it includes
            copies of steps to that place, except those made by `close`. Each process has this limit separately.
        trace: a file that records what each thread did, and when; open it in https://ui.perfetto.dev. It is replaced
            when the checkpointer is constructed, and complete after each save. Give each process its own file.
        ranks: (rank, world size), for processes without a process group of torch.distributed, such as Ray actors.
            (0, 1) means that this process saves alone, even if it is in a process group. By default, the ranks are
            those of the default process group, and every rank calls `save` and `restore`.
        store: with `ranks`, a store of torch.distributed to which all ranks are connected, such as a TCPStore. The
            ranks coordinate through it as they do with a process group.
        differing: plain values and small tensors should be equal on all ranks. By default, values that differ are saved
            for each rank, with a warning; with "fail", the save fails.
        check_replicas: compare replicated tensors across ranks at every save. By default, only the first save of each
            structure does so.
        mesh: the DeviceMesh of which the meshes of all tensors are submeshes, such as (data parallel, tensor parallel).
            Tensors that are replicated across submeshes, such as norms under FSDP and tensor parallelism, are then
            written once.
        check: `NonFinite(every=…)` checks the values of saves in the background, and marks a step with NaN or Inf as
            bad.

    The tracker never moves back, unless a rollback has removed the step that it names. All methods may be
    called from any thread. Opening, listing and reading do not change the storage. With several places, `restore`
    starts copies and deletes files that killed writers have left in memory. With several ranks as well, it writes a
    small file to each place on disk, so that the ranks find out whether they share it.
    """

    _is_preempted = False
    _owner_notes: Sequence[str] = ()  # as of the last check, so that each note is warned of once
    _tracked: Sequence[Tracking] = ()
    _interval: SaveInterval | None = None  # rank 0's, as of the last `should_save`

    def __init__(
        self,
        root: Anywhere | Sequence[Anywhere],
        *,
        keep: int | Keep | None = None,
        due: Due | None = None,
        guard: Any = None,
        ema: Ema | None = None,
        host_bytes: int | None = None,
        segment_bytes: int | None = None,
        on_overlap: OnOverlap = "wait",
        max_in_flight: int = 1,
        on_rollback: Literal["retire"] | None = None,
        naming: Naming | str | None = None,
        strict: bool = False,
        exit_timeout: float | None = None,
        progress: bool = False,
        commit: str | None = None,
        max_bandwidth: float | None = None,
        trace: str | os.PathLike[str] | None = None,
        ranks: tuple[int, int] | None = None,
        store: Any = None,
        differing: Differing = "keep",
        check_replicas: bool = False,
        mesh: Any = None,
        check: NonFinite | None = None,
    ) -> None:
        due = _checked_rules(commit, due, check, on_rollback)
        writers = Writers(max_bandwidth)
        self._notice = Notice(due.signals)
        self._policy = SavePolicy(due, preempted=self._is_leaving, stall_seconds=self._stall_seconds)
        self._roots = open_roots(
            root, keep=keep_of(keep), naming=naming_of(naming), clock=wall_time, max_bandwidth=writers.max_bandwidth
        )
        self.roots, self.root = self._roots.names, self._roots.names[0]
        self._mean = None if ema is None else _mean_of(ema)
        self._guard = unwrapped(guard)  # raises errors now rather than at the first save
        self._ranks = Ranks(
            Meeting(ranks, store=store),
            whole_count("max_in_flight", max_in_flight),
            differing=differing,
            check_replicas=check_replicas,
            mesh=mesh,
        )
        self._ranks.nodes = RunNodes(self._ranks.meeting, self._roots, partial(_send_archive, writers.pace_of))
        self._saver = Saver(
            pool_for(segment_bytes, host_bytes),
            admission=Admission(max_in_flight, on_overlap),
            ledger=Ledger(exit_timeout, strict=strict, progress=progress, roots=self.roots),
            writers=writers,
            trace_file=None if trace is None else TraceFile(local_place(trace)),
            keep_warm=True,
            ranks=self._ranks,
            check=check,
        )
        self._lineage = Lineage(
            self._roots,
            self._saver.ledger,
            self._saver.admission,
            retire=on_rollback == "retire",
            catch_up=_catch_up,
            copy_step=_copy_step,
            pace_of=writers.pace_of,
            ranks=self._ranks,
        )
        self._lineage.facts, self._lineage.tiers.exit_timeout = self._policy.facts, self._saver.ledger.exit_timeout
        if ranks is None and (keep is not None or guard is not None or due != Due()):  # not if it only reads
            self._warn_of_owner(is_early=True)
        FirstSteps(self._guard if ranks in (None, (0, 1)) else (), self._saver.expect)
        self._notice.listen()  # last: a checkpointer that could not be constructed has no handlers

    # --- saving -----------------------------------------------------------------------------------------------

    def save(
        self,
        state: Any,
        step: int,
        *,
        overwrite: bool = False,
        guard: Any = INHERITED,
        record: Mapping[str, Any] | None = None,
        rolling: bool = False,
        ttl_seconds: float | None = None,
        select: Select = None,
        unchanged: Collection[str] | Literal["auto"] = "auto",
        per_rank: Collection[str] = (),
        driver: Mapping[str, Any] | None = None,
    ) -> SaveHandle:
        """Begin to save `state` as `step`. Returns a handle as soon as training may continue.

            handle = ckpt.save({"model": model, "optimizer": optimizer}, step=100, record={"loss": 0.5})

        Args:
            state: any nesting of dicts, lists, tuples, tensors, plain values and objects with `state_dict()`; or a
                snapshot.
            step: the number of the step, at least 0.
            overwrite: replace a step that is already committed. It stays loadable until the new one is committed.
            guard: overrides the checkpointer's `guard` for this save.
            record: a small mapping of JSON data, where torch and numpy scalars are allowed too. It is committed with
                the step and written to the step's line of `checkpoints.jsonl`. A non-finite float is stored as None.
            rolling: delete this step once a newer one is committed, regardless of `keep=`.
            ttl_seconds: delete this step at the first save after this many seconds, regardless of `keep=`. The rules of
                `keep=` ignore rolling steps and those with a `ttl_seconds`.
            select: save only this part: a name, a glob over dotted paths such as "*.lora_*", or several of them.
                `restore(strict=False)` then leaves the rest of the state alone.
            unchanged: names of groups (top-level entries) that have not changed since this checkpointer saved or
                restored them, such as a frozen reference policy. They are not written again: the manifest refers to the
                archive that contains them, which is kept as long as it is needed. A group that was never saved is
                written. "auto" does the same for large module parameters that do not require a gradient: a parameter
                whose memory and version counter are those of the last commit is neither copied nor written, and its
                bytes are compared in the background. With (), everything is written.
            per_rank: names of top-level entries that are separate on each rank, such as the position of its data
                loader; `RngState` always is. At a restore, each rank gets its own back.
            driver: more entries of the state, which one process holds for all ranks (data loader, actors), at most
                64 MiB. With several ranks, those passed on rank 0 are saved. They are written to a separate archive
                and are part of every load.

        Raises UnsupportedStateError, StepExistsError, StepBehindError, ClosedError, NotUnchangedError (the memory or
        the version counter of a group in `unchanged` has changed; writes through `.data` or numpy go unnoticed),
        PeerFailedError if another rank does not answer in time, ValueError or KeyError for names that the state does
        not have, and ValueError or TypeError for invalid arguments. All other errors are raised by the handle. Stores
        are not accessed on this thread: if a step already exists in one, the handle raises the error. It also raises
        TornSnapshotError if a tensor that "auto" did not write again was changed without its version counter.
        """
        try:
            step = whole_step(step, "; the order is save(state, step)")
        except ValueError as error:
            self._ranks.called_in_vain(error)
            raise
        request = StepRequest(
            state,
            step,
            self._lineage,
            self._ranks,
            guard=self._guard if guard is INHERITED else guard,
            is_own_guard=guard is not INHERITED,
            select=select,
            mean=self._mean,
        )
        try:  # an error on this rank is reported to the other ranks
            request.check(
                overwrite=overwrite,
                record=plain_record(record, rolling=rolling, ttl_seconds=ttl_seconds),
                unchanged=unchanged,
                per_rank=per_rank,
                driver=driver,
            )
            handle = self._saver.save(request)
        except BaseException as error:
            if request.joint is not None:
                self._ranks.failed(request.joint, error)
            raise
        request.begun(handle.staging_completion)
        if self._lineage.tiers.movers:
            handle.places = self._lineage.tiers
        self._policy.follow(step, handle)
        return handle

    def mark(self, step: int, kind: MarkKind | None, *, note: str = "") -> None:
        """Mark a committed step as "good" or "bad", or take its mark back with None.

            ckpt.mark(1200, "bad", note="loss is nan")

        `restore`, `load` and `best` skip bad steps; retention deletes them, and `Keep(good=…)` keeps good ones. A mark
        is a small file, written at each place that has the step and answers. Files are never changed: the newest mark
        of a step counts. Saving the step again removes its mark. Any process may mark the steps of a run, even of one
        that another process is training; the other process sees the mark at its next save or restore. Waits for the
        saves that are under way, as `restore` does. With several ranks, only rank 0 writes the mark.

        Raises NotCommittedError for a step that is not committed, StorageUnavailableError if the mark cannot be written
        at any place that has the step, and ValueError or TypeError for invalid arguments.
        """
        step = whole_step(step)
        self._see_own_saves("mark()")
        if self._ranks.world.rank == 0:
            self._roots.mark(step, kind, note)
            notify("mark", self.roots, {kind or "none": 1})

    def should_save(self, step: int) -> bool:
        """Return True if one of the rules of `due=` wants a save of `step`. Call it once at every step.

            if ckpt.should_save(step):
                ckpt.save(state, step)

        A deadline makes one save due, at the last step after which another step, a save and the margin would no longer
        fit. Steps and saves are assumed to take as long as the longest of the last 100 steps and 5 saves (one minute
        before the first save). After that save, another one is due only if it still fits. If no save fits any more, one
        is attempted anyway. A signal makes one save due at the next step, and another one only if the first has failed.

        With `overhead` or `mtbf`, a save is due when the interval computed from the cost of the last saves has passed;
        `interval` returns it. A step's time is the time between two calls.

        The step that was last saved or restored is never due. Another call for the same step returns the same answer.
        With several ranks and rules of time, cost or signals, rank 0 decides for all, and the other ranks report
        signals to it in this call: call it on every rank, at every step. `Due(every=…)` alone depends only on the step
        and needs no communication. Raises ValueError if there is no rule, if `step` is not a valid step, or once the
        first save has shown that a save costs more than `Due(mtbf=…)`, so that the training would make no progress.
        Raises PeerFailedError on the other ranks if it raises on rank 0, or rank 0 has passed the step or is lost.
        """
        is_due = self._is_due(step)
        reached = None if self._saver.is_closed else self._policy.reached()
        if reached is not None:
            self._lineage.progressed(reached)
            self._report_training()
        return is_due

    def _is_due(self, step: int) -> bool:
        if self._policy.is_arithmetic:
            return self._policy.should_save(whole_step(step))
        try:
            number = whole_step(step)
            leaving = self._notice.has_signals and self._ranks.is_leaving(asked=self._notice.is_given)
        except BaseException as error:
            self._ranks.asks_in_vain(error)
            raise

        def answer() -> Sequence[Any]:
            self._is_preempted = leaving
            is_due = self._policy.should_save(number)
            return is_due, leaving, self._policy.interval() if self._policy.has_interval else None

        is_due, self._is_preempted, interval = self._ranks.answer_of_rank_0("should_save()", number, answer)
        self._interval = None if interval is None else SaveInterval(*interval)
        return bool(is_due)

    def interval(self) -> SaveInterval:
        """The current interval of `Due(overhead=…)` or `Due(mtbf=…)`, and the reason for it.

            print(ckpt.interval())  # 420 s by overhead: a save costs 4.2 s of training, durable after 9.1 s

        `seconds` is the time from the start of one save to the start of the next. With several ranks, all of them
        return rank 0's interval as of the last `should_save`. Raises ValueError without such a rule.
        """
        return self._interval if self._interval and not self._ranks.is_alone else self._policy.interval()

    @property
    def preempted(self) -> bool:
        """True if one of the signals of `Due(signals=…)` has arrived, so that the process should save and exit.

            if ckpt.should_save(step):
                ckpt.save(state, step)
                if ckpt.preempted:  # only after a save, so that nothing is left unsaved
                    break

        Always False without `signals`. With several ranks, a signal on any rank counts, and all ranks return what
        rank 0 knew at the last `should_save`.
        """
        return self._notice.is_given if self._ranks.is_alone else self._is_preempted

    def prewarm(self, state: Any, *, per_rank: Collection[str] = ()) -> None:
        """Plan the archive, and allocate and page-lock host memory, before the first save.

            ckpt.prewarm({"model": model, "optimizer": optimizer})

        With several ranks, call it on every rank: they exchange the structures of their states, so that the first save
        need not wait for that. Pass the `per_rank` of that save. Raises PeerFailedError if a rank does not call this.
        """
        with self._ranks.meeting_ahead(per_rank) as meet:
            self._saver.prewarm(state if self._mean is None else self._mean.planned(state), meet)

    def release(self) -> None:
        """Free the host memory that no save is using. The next save allocates it again.

        ckpt.release()
        """
        self._saver.pool.release()
        if self._mean is not None:
            self._mean.release()

    def wait(self, timeout: float | None = None) -> None:
        """Wait for every save begun so far, and for retention, and raise the first error not retrieved yet.

        ckpt.wait(timeout=600)  # seconds; TimeoutError when it has passed
        """
        self._saver.wait(timeout)

    def catch_up(self) -> dict[str, list[int]]:
        """Copy to each place all steps that it lacks, and that its `every` and `keep` select, on this thread. Returns
        the copied steps by place.

            ckpt.catch_up()  # {"runs/a": [], "s3://bucket/run": [100, 200]}

        The newest steps are copied to further places automatically; this fills the gaps. The step of a save that has
        not ended is left out, even if its handle has failed already: call `wait` first. Raises StorageUnavailableError
        if a place is still unavailable, after copying to the others.
        """
        return self._lineage.catch_up()

    def track(
        self,
        tracker: ExperimentTracker,
        *,
        best: tuple[str, Literal["min", "max"]] | None = None,
        timeout: float = 10.0,
    ) -> None:
        """Report every commit and restore from now on to an experiment tracker: a reference and the save's numbers.

            ckpt.track(WandbTracker(), best=("loss", "min"))  # of async_ckpt.integrations.wandb

        Call it before `restore`. With several ranks, only rank 0 reports; the others may make the call, too. A tracker
        runs on its own thread and delays no save; its first error is logged as a warning. While a thousand operations
        are waiting for it, further ones are dropped, which is logged once. `close` waits for the tracker.

        Args:
            tracker: `WandbTracker`, `MlflowTracker`, `TrackioTracker` or `TensorBoardTracker`, each from its module in
                `async_ckpt.integrations`; or your own object with the methods `committed` and `restored`.
            best: a metric of the records, and whether its minimum or maximum is best, for the alias `best`; by default
                that of `Keep(best=…)`.
            timeout: the most seconds that `close` waits for the tracker to handle all operations.

        Raises TypeError if `tracker` lacks these methods, and ValueError for an invalid `best`.
        """
        ranks = self._ranks  # a listener must not keep the checkpointer alive
        tracking = Tracking(tracker, self._roots, best, is_first_rank=lambda: ranks.world.rank == 0, timeout=timeout)
        self._tracked = (*self._tracked, tracking)

    def metrics(self, prefix: str = "") -> dict[str, float]:
        """Numbers for a logger, with the same keys on every call. A number that is not known yet is NaN.

        wandb.log(ckpt.metrics("ckpt/"))
        """
        spent = self._policy.spent().as_dict(f"{prefix}time_")
        return self._saver.metrics(prefix, num_behind=len(self._lineage.tiers.behind())) | spent

    def close(self) -> None:
        """Wait for every save, and raise the first error not retrieved yet. May be called again.

            ckpt.close()  # leaving the `with` block does it

        With several places, the newest step is then copied to every place that answers. A RuntimeWarning lists the
        copies that were not made; raises StorageUnavailableError if a reboot would lose the step. A place that does not
        answer is given ten seconds, or two minutes if no other place that survives a reboot has the step. Ctrl-C
        abandons the saves and copies that are still under way. Signal handlers are restored.
        Rank 0 waits up to five seconds for ranks that have not made their first call yet.
        """
        tiers, left, limit = self._lineage.tiers, list[str](), 0.0  # after Ctrl-C, the second limit is 0
        try:
            self._saver.close()
            limit = inf
        finally:
            self._notice.close()
            if self._saver.belongs_here:
                try:
                    left = tiers.finish(limit)
                finally:
                    self._end()
                for words in left:
                    warnings.warn(words, RuntimeWarning, stacklevel=2)
        if self._saver.belongs_here:
            self._saver.wait()
            if left and tiers.has_lost:
                raise StorageUnavailableError(left[0], path=self.roots[0])

    def _end(self) -> None:
        if (reached := self._policy.reached(is_last=True)) is not None:
            self._lineage.note("progress", reached, **self._policy.facts())
        self._report_training()
        self._ranks.close()
        self._roots.close(is_quiet=all(save.finished.done() for save in self._saver.ledger.saves()))
        for tracking in self._tracked:  # last, so that nothing else waits for a tracker that hangs
            tracking.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
        try:
            self.close()
        except CheckpointError as failed:
            if error is None:
                raise
            error.add_note(f"async_ckpt: a save failed too: {type(failed).__name__}: {failed}")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
        """Wait for the saves while the event loop runs, and close."""
        saves = [awaitable(save.finished) for save in self._saver.ledger.saves()]
        try:
            for save in saves:
                save.add_done_callback(ask_for_exception)
            if saves:
                await asyncio.wait(saves)
        finally:  # the task may be cancelled
            self.__exit__(kind, error)

    # --- reading ----------------------------------------------------------------------------------------------

    def restore(
        self,
        state: Any,
        step: int | None = None,
        *,
        select: Select = None,
        strict: bool | None = None,
        trust: bool = False,
        verify: Verify = True,
        types: Iterable[type] = (),
        from_ranks: Mapping[str, int] | None = None,
        fallback: bool = False,
        broadcast: Any = None,
        marked: Literal["good"] | None = None,
    ) -> int | None:
        """Load a step into live objects in place; by default, the newest step that is not marked bad. Returns the step,
        or None if nothing is committed.

            start = ckpt.restore({"model": model, "optimizer": optimizer, "rng": async_ckpt.RngState()})

        Waits for this checkpointer's saves that are under way, so that it sees their steps, and warns if one of them
        fails. Afterwards, the memory for the first save is allocated in the background, as `prewarm` does. With several
        places, restoring the newest step also starts copying steps that only nearer places have to the further ones,
        unless another live process owns the run; to only read, open a single place.

        Everything is compared before any object is changed: one error lists all names that are missing or unexpected,
        and all tensors of another shape or dtype. A module is matched by its own names first, then by those of the
        plain model, so it does not matter whether it is, or was, wrapped (DDP, DataParallel, FSDP1, `torch.compile`).

        Args:
            state: the objects to load into, in the structure that was saved.
            step: which step. With None, a step that is corrupt or marked bad is skipped with a warning, and the next
                older one is taken; saves up to the next commit may replace the skipped step, or remove it from the run.
                A bad step that is given by number is restored, with a warning.
            select: restore only this part, as for `save`.
            strict: False ignores names that only the state or only the step has; by default they are an error. A
                different shape is always an error. With True, a data loader that would continue in another order is an
                error, too, instead of a warning.
            trust: as for `async_ckpt.load`.
            verify: compare the digest of every block. "first" does so before any object is changed, and reads twice.
            types: as for `async_ckpt.load`.
            from_ranks: for a step saved by a world of another size: the rank whose value to take for an entry that was
                saved per rank, by name, such as {"loader": 0}. In a world of the same size, each rank gets its own
                value. In another, an `RngState` takes that of the rank's number modulo the saved world size, and warns.
            fallback: with several ranks and without `step`, make all ranks skip a step that is corrupt for one of them.
                By default, that rank raises CorruptCheckpointError. Not for objects whose `load_state_dict` is a
                collective, as under FSDP1.
            broadcast: a process group of ranks that hold the same tensors, such as `mesh.get_group("replicate")`, or
                `dist.group.WORLD` under DDP. Each rank reads a part of the tensors and broadcasts it to the others. All
                ranks of the group make this call.
            marked: with "good", take the newest step that is marked good, instead of the newest step.

        With several ranks and without `step`, all ranks make this call and take the step that rank 0 chooses. It raises
        PeerFailedError if it fails on another rank before that, or a rank does not make it.

        Raises StateMismatchError before any object is changed, CorruptCheckpointError, StorageUnavailableError (also if
        a root does not answer and the others have no step), NoGoodStepError if the marks rule out every step,
        ValueError for an invalid `step`, and NotCommittedError if `step` is not committed or if the newest step has
        another `naming`.
        """
        # Imported here, as in `load`: the reading code is large, and a training may start without it.
        from ..core.loading.restore import RestoreOptions
        from ..core.loading.run_restore import RunRestore
        from .ema_restore import MeanRestore

        with self._ranks.meeting.restoring(talks=not hasattr(step, "__index__")):
            step = _wanted_step(step, marked)
            options = RestoreOptions(
                select,
                None if strict is None else flag("strict", strict),
                flag("trust", trust),
                verify,
                () if types is None else types,
                goes_back=self._policy.has_step,
            )
            mean = MeanRestore(self._mean, state, options, self._saver.pool)
            call = RunRestore(
                self._roots,
                state,
                options,
                ranks=self._ranks,
                pool=self._saver.pool,
                see_own_saves=partial(self._see_own_saves, "restore()", overwrites=True),
                from_ranks=from_ranks,
                fallback=fallback,
                only_good=marked == "good",
                before=mean.read,
            )
            with observed("restore", self.roots) as operation:
                restored = call.restore(step, broadcast, operation.spans)
                seconds = operation.seconds
                operation.end(restored)
        is_first = self._ranks.world.rank == 0 and self._saver.belongs_here
        notes = self._warn_of_owner() if is_first else []
        if is_first and not notes:
            self._roots.sweep_memory(has_ranks=not self._ranks.is_alone)
        captured = self._saver.warm(state, call.state_dicts.of)
        if restored is None:
            for note in self._roots.foreign_notes():
                warnings.warn(f"nothing was restored: {note}", RuntimeWarning, stacklevel=2)
            return None
        mean.end(restored)
        newest = self._roots.latest()
        behind = newest is not None and restored < newest
        if behind and is_first:
            self._roots.view()  # the next commit names the steps that it retires, at whichever place they are
        self._lineage.restored(
            restored, behind=behind, damaged=call.damaged, seconds=seconds, phases=operation.spans.seconds
        )
        if is_first and not notes and restored == newest:  # after a rollback, the next commit starts copies
            self._lineage.tiers.wake()
        if captured is not None and (groups := call.restored_groups()):
            self._lineage.groups.restored(captured, groups, restored, self._roots.holding(restored)[0])
        self._count_from(restored, seconds, knows_all=is_first)
        return restored

    # --- parts ------------------------------------------------------------------------------------------------

    def _count_from(self, step: int, seconds: float, *, knows_all: bool) -> None:
        """Start the rules of `should_save` from a step whose restore took `seconds`. `knows_all` is True on rank 0."""
        past = Past.of(events_at(self._roots)) if knows_all and self._policy.has_interval else None
        self._policy.restored(step, past, seconds=seconds)
        self._report_training()

    def _warn_of_owner(self, *, is_early: bool = False) -> Sequence[str]:
        """Warn once about each live process that saves to the roots. Sends no request. Returns all current notes.

        If `is_early`, the world is not final yet, and nothing is checked with several ranks.
        """
        if is_early and not world_of().is_one:
            return []
        before, self._owner_notes = self._owner_notes, self._roots.owner_notes()
        for note in self._owner_notes:
            if note not in before:
                warnings.warn(f"no step can be saved: {note}", RuntimeWarning, stacklevel=3)
        return self._owner_notes

    def _is_leaving(self) -> bool:
        return self._notice.is_given or self._is_preempted

    def _stall_seconds(self) -> float:
        return self._saver.ledger.stall_seconds

    def _report_training(self) -> None:
        """Report to listeners how this process has spent its time."""
        notify("train", self.roots, self._policy.spent().seconds)

    def __repr__(self) -> str:
        under_way = [save.handle for save in self._saver.ledger.saves() if not save.handle.done()]
        facts = [self._roots.known(), *(f"saving step {save.step}: {save.progress}" for save in under_way)]
        if self._saver.is_closed:
            facts.append("closed")
        return f"<AsyncCheckpointer {', '.join(self.roots)}: {'; '.join(facts)}>"


def _wanted_step(step: int | None, marked: str | None) -> int | None:
    """The requested step, or None. Raises ValueError for a mark other than "good", and for a step beside a mark."""
    if marked not in (None, "good") or (marked and step is not None):
        raise ValueError(f'marked must be "good", and without a step, or None; got {marked!r:.100}')
    return None if step is None else whole_step(step)


def _checked_rules(commit: str | None, due: Due | None, check: object, on_rollback: object) -> Due:
    """The rules of `should_save`. Raises TypeError for a wrong type of `due` or `check`, and ValueError for a wrong
    `on_rollback` or `commit`. Warns that `commit` is deprecated.
    """
    if on_rollback not in (None, "retire"):
        raise ValueError(f'on_rollback must be None or "retire", got {on_rollback!r}')
    if due is not None and not isinstance(due, Due):
        raise TypeError(f"due must be Due(every=…, seconds=…, …), got {due!r:.100}")
    if check is not None and not isinstance(check, NonFinite):
        raise TypeError(f"check must be NonFinite(every=…), or None, got {check!r:.100}")
    if commit not in (None, "any"):
        raise ValueError(
            f"commit={commit!r}: a save is committed at the first place that answers, and copied to the others; leave "
            "commit= out, and call handle.at(place).result() to wait until a step is at another place"
        )
    if commit:
        warnings.warn(
            'commit="any" is how several places commit anyway; leave it out', DeprecationWarning, stacklevel=3
        )
    return due or Due()


def _mean_of(ema: Ema) -> WeightMean:
    from ..core.saving.ema import WeightMean  # only a run with a mean needs it

    return WeightMean(ema)


def _catch_up(roots: Roots, run: Run, *, skip: Collection[int], pace: Pace | None) -> list[int]:
    from ..core.loading.catch_up import catch_up  # only a run at several places needs it

    return catch_up(roots, run, skip=skip, pace=pace)


def _send_archive(
    pace_of: Callable[[Storage], Pace | None], source: Storage, target: Run, path: str, archive: Archive
) -> None:
    from ..core.loading.catch_up import send_archive  # only a run with places local to a node needs it

    send_archive(source, target, path, archive, pace=pace_of(target.storage))


def _copy_step(source: Run, target: Run, step: int, **options: Any) -> list[int]:
    from ..core.loading.catch_up import copy_step  # only a run at several places needs it

    return copy_step(source, target, step, **options)
