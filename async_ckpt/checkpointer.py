"""`AsyncCheckpointer`: the managed run that users hold.

In: states and steps. Out: handles, and states back. Knows nothing of: bytes, threads.
"""

from __future__ import annotations

import operator
import os
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, Self

import torch

from .errors import (
    CheckpointError,
    CorruptCheckpointError,
    NotCommittedError,
)
from .loading.catch_up import catch_up
from .loading.contents import Part
from .loading.find import from_newest, from_step
from .loading.load import Verify, check_verify, state_of
from .loading.match import is_looked_into
from .loading.restore import restore_state
from .runs.naming import Naming, naming_of
from .runs.record import plain_record
from .runs.retention import best_of, keep_of, lacking
from .runs.roots import opened
from .saving.admission import OnOverlap
from .saving.borrowed import Contents, check_entries, driver_of
from .saving.handle import SaveHandle
from .saving.line import Line
from .saving.policy import Due, SavePolicy
from .saving.saver import Saver
from .saving.signals import Notice
from .saving.story import CommitRule
from .saving.targets import StepTarget
from .spans import wall_time
from .spec import Keep
from .staging.guard import unwrapped
from .staging.held import guard_beside
from .state.held import Held
from .state.names import Select
from .storage.place import Anywhere


class _Inherited:
    """Stands for what the checkpointer was given."""

    def __repr__(self) -> str:
        return "that of the checkpointer"


_INHERITED: Any = _Inherited()


class AsyncCheckpointer:
    """Saves of one training run below one folder or URL, or several of them, and what to do with the old ones.

    Args:
        root: the run's folder, made by the first save, a URL such as "s3://bucket/run", or a `Place` with what its client
            needs; or a list of these: every save then goes to all of them in one pass, and a step is there when any of
            them has it.
        keep: how many of the newest steps are kept, or `Keep(last=…, every=…, best=…, seconds=…)`; None keeps all.
            `Place(…, keep=…)` gives one of several roots another retention.
        due: when `should_save` says so, as `Due(every=…, seconds=…, deadline=…, signals=True)`; with signals the
            checkpointer is to be constructed on the main thread.
        guard: the optimizer (or several) that alone changes its parameters and state, in `step()`: the copy of these
            then overlaps the next forward and backward, and `step()` waits for what is left of it.
        host_bytes: hard budget of host memory for snapshots, at least 16 MiB; by default what the state needs, up to
            half of the memory that is free. With less than the state, `save` waits for the disk.
        segment_bytes: the unit of copying and writing, a multiple of 4 MiB; 32 MiB unless the budget is small.
        on_overlap: what `save` does while `max_in_flight` saves are under way: "wait" (reported as stall), or "skip".
        max_in_flight: saves that may be under way at once; each takes host memory of its own.
        on_rollback: "retire" lets a save below the newest commit take the newer ones out of the run; by default
            such a save raises StepBehindError.
        naming: what steps and tracker are called for other programs: "skyrl", "verl", "open-instruct", "deepspeed", or
            `Naming(step_format=…, tracker=…)`; by default "step_{:08d}", named by the file `latest`.
        strict: raise at `save`, before anything is started, what an earlier save failed with and nobody looked at.
        exit_timeout: seconds that the interpreter's exit waits for saves; None: as long as they take.
        progress: draw a bar for each save on stderr, or in the notebook. It needs tqdm.
        commit: with several roots, "all" makes a save wait for all of them, and fail when one fails; with "any" it is
            committed where it is durable first, and a root that lags or fails is caught up later.
        max_bandwidth: bytes per second that a place is written with at most, over a few segments; the rest of its disk
            or network is for others. A save takes longer then, and without enough host memory its staging does, too.
            Each process has as much for itself; what is copied to catch a root up is not held to it.
        trace: a file for what each thread of this process did, and when, of every save: open it in
            https://ui.perfetto.dev. It is made anew, and whole after each save; give each process its own.

    The tracker never moves back, not even from a newer step that somebody else has written there; only from one that a
    rollback has taken out of the run.

    Safe to call from any thread. Opening, listing and reading change nothing on storage.
    """

    def __init__(
        self,
        root: Anywhere | Sequence[Anywhere],
        *,
        keep: int | Keep | None = None,
        due: Due | None = None,
        guard: Any = None,
        host_bytes: int | None = None,
        segment_bytes: int | None = None,
        on_overlap: OnOverlap = "wait",
        max_in_flight: int = 1,
        on_rollback: Literal["retire"] | None = None,
        naming: Naming | str | None = None,
        strict: bool = False,
        exit_timeout: float | None = None,
        progress: bool = False,
        commit: CommitRule = "all",
        max_bandwidth: float | None = None,
        trace: str | os.PathLike[str] | None = None,
    ) -> None:
        if on_rollback not in (None, "retire"):
            raise ValueError(f'on_rollback must be None or "retire", got {on_rollback!r}')
        if commit not in ("all", "any"):
            raise ValueError(f'commit must be "all" or "any", got {commit!r}')
        if due is not None and not isinstance(due, Due):
            raise TypeError(f"due must be Due(every=…, seconds=…, …), got {due!r:.100}")
        due = due or Due()
        notice = self._notice = Notice(due.signals)
        self._policy = SavePolicy(due, preempted=lambda: notice.is_given)
        self._roots = opened(root, keep=keep_of(keep), naming=naming_of(naming), clock=wall_time)
        self.roots = self._roots.names
        self.root = self.roots[0]
        self._guard = unwrapped(guard)  # refused now rather than at the first save, and gone through once
        self._saver = Saver(
            host_bytes=host_bytes,
            segment_bytes=segment_bytes,
            on_overlap=on_overlap,
            max_in_flight=max_in_flight,
            strict=strict,
            exit_timeout=exit_timeout,
            progress=progress,
            keep_warm=True,
            max_bandwidth=max_bandwidth,
            trace=trace,
        )
        self._line = Line(
            self._roots, self._saver, rule=commit, retire=on_rollback == "retire", catch_up=catch_up
        )
        self._notice.listen()  # last: what could not be constructed has no handlers

    # --- saving -----------------------------------------------------------------------------------------------

    def save(
        self,
        state: Any,
        step: int,
        *,
        overwrite: bool = False,
        guard: Any = _INHERITED,
        record: Mapping[str, Any] | None = None,
        rolling: bool = False,
        ttl_seconds: float | None = None,
        select: Select = None,
        unchanged: Collection[str] = (),
        per_rank: Collection[str] = (),
        driver: Mapping[str, Any] | None = None,
    ) -> SaveHandle:
        """Begin to save `state` as `step`; returns as soon as the caller may go on training.

        `guard` overrides the checkpointer's for this save. With `overwrite`, a committed step stays loadable until
        the new one is committed.
        `record` is a small mapping of plain JSON data, such as {"loss": 0.5, "epoch": 3}, that is committed with the step
        and stands in its line of `checkpoints.jsonl`; a float that is not finite becomes None there. A `rolling` save is
        deleted once a newer step is committed, one with `ttl_seconds` by the first save after these have passed, whatever
        `keep=` says; both are marks in the record, and such steps count for none of its rules.
        `select` saves only a part: a name, a glob over dotted paths such as "*.lora_*", or several; `restore(strict=False)`
        then leaves the rest alone.
        `unchanged` names groups, entries at the top level of the state, that have not changed since they were last saved,
        or restored, by this checkpointer: a frozen reference policy, the base model under LoRA. They are not written
        again: the manifest points to the archive that has them, which stays as long as that is so. One that was not saved
        yet is written. The statement is checked: NotUnchangedError when one of its tensors is not the same memory, or
        was written to, as far as its version counter tells: it stands still under `.data` and numpy.
        `per_rank` names entries at the top level that each rank has for itself, such as the position of its data loader.
        There is one rank as yet: its entries come back as all others do, and a name that the state lacks is refused.
        `driver` is what one process holds for all ranks (dataloader, actors): more entries of the state, up to 64 MiB, that
        are written to an archive of their own beside the ranks', and come back with every load.
        Raises UnsupportedStateError, StepExistsError, StepBehindError, ClosedError; all else ends in the handle. (A
        store is not asked on this thread: there a step that exists, or lies behind, ends in the handle as well.)
        """
        step = _whole(step)
        if select is not None and unchanged:
            raise ValueError(
                "select= and unchanged= exclude each other; leave the groups out of the state instead"
            )
        plain = plain_record(record, rolling=rolling, ttl_seconds=ttl_seconds)
        check_entries(state, per_rank, "per_rank")
        token, contents = os.urandom(4).hex(), Contents()
        if driver is not None:
            contents.driver = driver_of(driver, state, step=step)

        line, runs = self._line, self._roots.runs
        groups = [unchanged] if isinstance(unchanged, str) else unchanged
        handle = self._saver.save(
            lambda: contents.own_of(state, groups, line.groups, step=step, runs=runs),
            lambda: [StepTarget(line, run, step, token, overwrite, plain, contents) for run in runs],
            select=select,
            # What was saved in part is nothing to borrow from.
            captured_as=contents.captured if select is None else lambda _: None,
            step=step,
            needs=contents.lenders,
            guard=self._guard_of(state, guard),
            rule=line.rule,
            skipped_path=runs[0].storage.locate(runs[0].folder(step)),
            unchanged_in=lambda digests: line.unchanged_in(digests, contents.borrowed_groups),
        )
        self._policy.follow(step, handle)
        return handle

    def should_save(self, step: int) -> bool:
        """Whether a save of `step` is due by any of the rules of `due=`. Ask once at every step.

        A deadline makes one save due: at the last step after which another step, a save and the margin would no longer
        fit, each taken to last as long as the longest of the last 100 steps and 5 saves (a minute before the first).
        Once that save has ended, another is due only if it still fits. A notice too short for any is answered by one
        try. The step saved last, or restored, is not due; asked again about a step, the answer is the same.
        By time, or by a signal, the answer differs between processes: ask on rank 0 and broadcast it. `Due(every=…)` alone needs only the step.
        A signal makes one save due, at the next step; another only if that one has failed.
        Raises ValueError when there is no rule, and nothing else.
        """
        return self._policy.should_save(step)

    @property
    def preempted(self) -> bool:
        """Whether one of the signals of `Due(signals=…)` has come: save, and leave.

            if ckpt.should_save(step):
                ckpt.save(state, step)
                if ckpt.preempted:  # asked here, so that nothing is left unsaved
                    break

        Always False without `signals`.
        """
        return self._notice.is_given

    def prewarm(self, state: Any) -> None:
        """Do ahead of the first save what only it would have to wait for: planning, taking and locking memory."""
        self._saver.prewarm(state)

    def release(self) -> None:
        """Give back the host memory that no save is using; the next one takes it again."""
        self._saver.pool.release()

    def wait(self, timeout: float | None = None) -> None:
        """Wait for every save begun so far, retention included, and raise the first error nobody has looked at."""
        self._saver.wait(timeout)

    def catch_up(self) -> dict[str, list[int]]:
        """Copy to each root what others hold and it lacks, on this thread; the steps that each was given.

        Raises StorageUnavailableError when a root is still away, after the others have been caught up.
        """
        return self._line.catch_up()

    def metrics(self, prefix: str = "") -> dict[str, float]:
        """Numbers for a logger, under the same keys on every call, from the first on; NaN where there is none yet."""
        return self._saver.metrics(prefix)

    def close(self) -> None:
        """Wait for every save and raise the first error nobody has looked at. Idempotent.

        Signal handlers are put back. Ctrl-C gives up the saves that are waited for.
        """
        try:
            self._saver.close()
        finally:
            self._notice.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except CheckpointError as failed:
            if error is None:
                raise
            error.add_note(f"async_ckpt: a save failed too: {type(failed).__name__}: {failed}")

    # --- reading ----------------------------------------------------------------------------------------------

    def steps(self) -> list[int]:
        """The committed steps, ascending."""
        return self._roots.steps()

    def latest(self) -> int | None:
        """The newest committed step, or None."""
        return self._roots.latest()

    def records(self) -> dict[int, dict[str, Any]]:
        """The record of every committed step, ascending by step; empty where `save` was given none."""
        return {step: dict(made.record) if made else {} for step, made in self._roots.view().items()}

    def best(self, metric: str, *, mode: Literal["min", "max"]) -> int:
        """The committed step whose record has the best value of a metric; of equals the newer one.

            ckpt.save(state, step=100, record={"loss": 0.5})
            state = ckpt.load(ckpt.best("loss", mode="min"))

        A value that is no finite number counts for nothing. Raises NotCommittedError when no record has the metric.
        """
        if mode not in ("min", "max"):
            raise ValueError(f'mode must be "min" or "max", got {mode!r}')
        commits = self._roots.view()
        found = best_of(list(commits), commits, (metric, mode, 1))
        if not found:
            why = f"no record of a committed step has the metric {lacking(metric, commits)}"
            raise NotCommittedError(f"{self.root}: {why}", path=self.root, step=None)
        return found[0]

    def load(
        self,
        step: int | None = None,
        *,
        map_location: str | torch.device | None = None,
        select: Select = None,
        trust: bool = False,
        verify: bool = True,
        mmap: bool = False,
        types: Iterable[type] = (),
    ) -> Any:
        """Build the state of a step, by default the newest; see `async_ckpt.load`. Raises NotCommittedError."""

        def build(parts: Sequence[Part]) -> Any:
            return state_of(
                parts, map_location=map_location, select=select, trust=trust, mmap=mmap, types=types
            )

        check_verify(verify)
        if step is not None:
            return from_step(self._roots, step, build, verify=verify)
        found = from_newest(self._roots, build, verify=verify)
        if found is None:
            raise NotCommittedError(f"{self.root}: nothing is committed yet", path=self.root, step=None)
        return found[1]

    def restore(
        self,
        state: Any,
        step: int | None = None,
        *,
        select: Select = None,
        strict: bool = True,
        trust: bool = False,
        verify: Verify = True,
        types: Iterable[type] = (),
    ) -> int | None:
        """Fill live objects in place from a step, by default the newest; the step, or None when nothing is committed.

        With `step=None`, a step that turns out to be corrupt is passed over with a warning, for the next older one; one that
        its writer deletes while it is read is followed by what is the newest then. A folder in which only another
        program has saved is warned of. A module is matched by the names of the plain model: whether it is wrapped for
        parallel training or compiled, here or when it was saved, makes no difference.
        `verify="first"` checks every byte before any is written, at the price of reading twice.
        Raises StateMismatchError before anything is written, CorruptCheckpointError, NotCommittedError.
        """

        def put_back(parts: Sequence[Part]) -> None:
            restore_state(parts, state, select=select, strict=strict, trust=trust, verify=verify, types=types)

        def tell(step: int, error: CorruptCheckpointError) -> None:
            warnings.warn(f"step {step} is passed over: {error}", RuntimeWarning, stacklevel=4)

        check_verify(verify)
        for pending in self._saver.ledger.pending():
            pending.handle.staging_completion.exception()  # what is being copied must not be overwritten
        if step is not None:
            from_step(self._roots, step, put_back, verify=bool(verify))
        else:
            found = from_newest(self._roots, put_back, verify=bool(verify), passed_over=tell)
            if found is None:
                for told in self._roots.told_of_others():
                    warnings.warn(told, RuntimeWarning, stacklevel=2)
                return None
            step = found[0]
        newest = self.latest()
        self._line.restored(behind=newest is not None and step < newest)
        if strict and select is None and isinstance(state, Mapping):
            # These hold what the step has: they need not be written again, if they are said to be unchanged.
            groups = {name: value for name, value in state.items() if is_looked_into(value)}
            self._line.groups.restored(groups, step, self._roots.holding(step))
        self._policy.restored(step)
        return step

    # --- parts ------------------------------------------------------------------------------------------------

    def _guard_of(self, state: Any, guard: Any) -> Any:
        """A snapshot was guarded when it was taken, or was not."""
        if guard is not _INHERITED:
            return guard_beside(state, guard)
        return None if isinstance(state, Held) else self._guard

    def __repr__(self) -> str:
        steps = sorted({step for run in self._roots.runs for step in run.known_steps()})
        told = [f"{', '.join(map(str, steps[-5:]))}" + (f" of {len(steps)} steps" if len(steps) > 5 else "")]
        pending = [pending.handle for pending in self._saver.ledger.pending() if not pending.handle.done()]
        told += [f"step {handle.step} is {handle.progress.fraction:.0%} written" for handle in pending]
        return f"<AsyncCheckpointer {', '.join(self.roots)}: {'; '.join(filter(None, told)) or 'no step'}, {self._saver!r}>"


def _whole(step: Any) -> int:
    """Numbers of numpy count, too."""
    try:
        number = -1 if isinstance(step, bool | torch.Tensor) else operator.index(step)
    except TypeError:
        number = -1
    if number < 0:
        shown = repr(step) if isinstance(step, int | float | str) else f"a {type(step).__qualname__}"
        raise ValueError(
            f"step must be a whole number from 0 on, got {shown}; the order is save(state, step)"
        )
    return number
