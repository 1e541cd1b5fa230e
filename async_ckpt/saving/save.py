"""One save: from its call until everything that follows its commit is done.

In: what a subclass writes and commits. Out: a handle that is resolved, or an error without a trace of the save.
Knows nothing of: other saves.

The caller's thread creates a save, and may be interrupted by a signal between any two lines. From `Ledger.begin` on the
save belongs to the loop's thread, which no signal interrupts, so its life needs no lock.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from ..host.loop import OffLoop, get_loop
from ..host.threads import running_future
from ..host.waits import LIVENESS_SECONDS, Wait, wait_for, wait_for_all
from ..ranks.attempts import Joint
from ..report import Progress, SaveReport
from ..staging.snapshot import Snapshot
from ..state.captured import Capture
from ..state.names import Select
from .delivery import Target
from .groups import GroupDigest
from .handle import SaveHandle, name_of, progress_of
from .story import Attempt, CommitRule, State, new_life, story

UnchangedIn = Callable[[Mapping[str, GroupDigest]], tuple[str, ...]]


class Save(ABC):
    """One save of any kind: of a state, of files, or by a function of the user's. Subclasses say how it is carried out."""

    exit_timeout: float | None = None  # seconds that the interpreter's exit waits for it
    num_missed = 0  # targets where it should be once it is committed, and is not

    def __init__(
        self, step: int | None, path: str, staged: Future[None], progress: Callable[[], Progress]
    ) -> None:
        """`staged` resolves when the caller may change what is saved. The handle keeps `progress`, and not the save."""
        self.staged = staged
        self.life = new_life()
        self.settled = running_future()  # committed or failed, so that the next save may commit
        self.finished = running_future()  # retention and the progress bar have ended, too
        self.given_up: BaseException | None = None
        self.handle = SaveHandle(
            step=step,
            path=path,
            staging=staged,
            progress=progress,
            submit_callbacks=get_loop().callbacks.submit,
        )

    @abstractmethod
    async def run(self, turn: Future[None] | None, off_loop: OffLoop) -> SaveReport:
        """Make it durable and, once the save before it is settled (`turn`), visible. Raises what went wrong."""

    @abstractmethod
    def failed(self, error: BaseException) -> None:
        """`run` has raised this error: remove every trace of the save. Blocks."""

    def give_up(self, error: BaseException) -> None:
        """The process or the user waits for it no more: `run` raises this error soon. From any thread."""
        self.given_up = error

    @abstractmethod
    async def afterwards(self, off_loop: OffLoop) -> None:
        """Clean up after the commit."""

    async def tell(self, turn: Future[None] | None, off_loop: OffLoop) -> SaveReport:
        """Run it, and see that no trace of it stays if it fails."""
        try:
            return await self.run(turn, off_loop)
        except BaseException as error:
            self.life.go(State.FAILED)
            try:
                await off_loop(partial(self.failed, error))
            except Exception as another:
                error.add_note(f"async_ckpt: cleaning up after it failed too: {another}")
            raise

    def _end_staging(self, error: BaseException) -> None:
        """The caller may change what is saved, since it has failed."""
        if not self.staged.done():
            self.staged.set_exception(error)

    def _check(self) -> None:
        """Raise the error with which it was given up, if it was."""
        if self.given_up is not None:
            raise self.given_up

    @property
    def is_unseen(self) -> bool:
        """Whether it has failed and nobody has looked at its error."""
        return self.has_failed and not self.handle.looked_at

    @property
    def has_failed(self) -> bool:
        """Whether it has ended in an error. This is no look at the error."""
        return self.handle.done() and Future.exception(self.handle) is not None

    def __repr__(self) -> str:
        return f"<Save of {name_of(self.handle)}: {self.life.now.value}>"


class Request(ABC):
    """What a caller wants to save, and where to. Its methods are called on the caller's thread, in this order."""

    step: int | None = None
    guard: Any = None
    select: Select = None
    rule: CommitRule = "all"
    joint: Joint | None = None  # the save as all ranks see it, where there are several

    @property
    def skipped_path(self) -> str:
        """The path of the report, if the save is skipped."""
        return ""

    @abstractmethod
    def targets(self) -> Sequence[Target]:
        """The places to write to, once it is this save's turn. Raises what refuses the save."""

    @abstractmethod
    def state(self) -> Any:
        """The state to write, once it is this save's turn. Raises what refuses the save."""

    @abstractmethod
    def captured(self, captured: Capture) -> None:
        """The state was captured. Raises what refuses the save."""

    @property
    def needs(self) -> Callable[[], Collection[int]]:
        """The steps that must stay on storage until the save is settled; asked from any thread. Keeps nothing of the state."""
        return tuple

    @property
    def unchanged_in(self) -> UnchangedIn:
        """See `StateSave`. The function keeps nothing of the state, nor its guard: a handle may live for long."""
        return lambda _: ()


class StateSave(Save):
    """A save of a state: the snapshot fills the segments of an archive, and the attempt takes them to every target."""

    def __init__(
        self,
        step: int | None,
        attempt: Attempt,
        snapshot: Snapshot,
        num_tensors: int,
        unchanged_in: UnchangedIn,
    ) -> None:
        """`unchanged_in` tells which groups have the bytes of the commit before; it is asked once, after the commit."""
        drain = attempt.drain
        super().__init__(step, attempt.targets[0].path, snapshot.completion, lambda: drain.progress)
        self.attempt, self.snapshot = attempt, snapshot
        self.called: Future[float] = (
            running_future()
        )  # the seconds of the call, once the caller has its handle
        self._num_tensors, self._unchanged_in = num_tensors, unchanged_in

    async def run(self, turn: Future[None] | None, off_loop: OffLoop) -> SaveReport:
        attempt = self.attempt
        await story(attempt, turn, off_loop, self.life)
        return attempt.report(
            await asyncio.wrap_future(self.called),
            step=self.handle.step,
            num_tensors=self._num_tensors,
            unchanged_groups=self._unchanged_in(attempt.drain.group_digests()),
        )

    def failed(self, error: BaseException) -> None:
        """The attempt has left no trace already."""

    def give_up(self, error: BaseException) -> None:
        super().give_up(error)
        self.attempt.drain.fail(error)

    async def afterwards(self, off_loop: OffLoop) -> None:  # noqa: ARG002
        try:
            await self.attempt.afterwards()
        finally:
            self.num_missed = self.attempt.num_missed


def wait_for_saves(saves: Sequence[Save], wait: Wait, timeout: float | None = None) -> None:
    """Wait until all of these have finished. Raises TimeoutError when `timeout` seconds have passed without."""

    def left() -> list[SaveHandle]:
        return [save.handle for save in saves if not save.finished.done()]

    finished = [save.finished for save in saves]
    if not wait_for_all(finished, timeout, lambda: wait.goes_on(lambda: progress_of(left()))):
        raise TimeoutError(f"{(left() or [saves[-1].handle])[0]!r} is still under way after {timeout} s")


def wait_for_decisions(saves: Sequence[Save], wait: Wait, meanwhile: Callable[[], None]) -> None:
    """Wait until each of these is committed, has failed, or was given up. `meanwhile` is called now and then."""

    def left() -> list[SaveHandle]:
        return [save.handle for save in saves if not save.handle.done()]

    for save in saves:
        while not (save.given_up or wait_for(save.handle, LIVENESS_SECONDS)):
            wait.goes_on(lambda: progress_of(left()))
            meanwhile()
