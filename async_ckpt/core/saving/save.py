"""One save: from its call until everything that follows its commit is done.

In: how a subclass writes and commits. Out: a resolved handle; after an error, no trace of the save. Knows nothing of:
other saves.

The state of a save is its `life`; this module defines the states and their order. Three futures show it to others, in
this order: `settled` resolves when the save is committed, or has failed and its temporary files are gone; the handle
with the report or the error; `finished` when retention has been applied, too. A handle with a `promise` resolves last.
A lane of the drain knows only whether it has ended.

The caller's thread creates a save, and may be interrupted by a signal between any two lines. From `Ledger.begin` on the
save belongs to the loop's thread, which no signal interrupts, so its life needs no lock.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from contextvars import copy_context
from enum import Enum
from functools import partial
from typing import Any, Final

from ..host.loop import off_loop
from ..host.operations import Kind
from ..host.threads import Life, running_future
from ..host.waits import LIVENESS_SECONDS, Wait, wait_for, wait_for_all
from ..report import Progress, SaveReport
from ..timing import Spans
from .handle import SaveHandle, name_of, progress_of


class SaveState(Enum):
    """The states of a save. Bytes are written as soon as they are staged; WRITING begins when all bytes are staged."""

    PLANNED = "planned"
    STAGING = "staging"
    WRITING = "writing"
    DURABLE = "durable"
    COMMITTED = "committed"
    FAILED = "failed"
    ABANDONED = "abandoned"  # the call of `save` raised


_ENDS: Final = frozenset({SaveState.FAILED, SaveState.ABANDONED})
_GOES: Final[Mapping[SaveState, Collection[SaveState]]] = {
    SaveState.PLANNED: {SaveState.STAGING, *_ENDS},
    SaveState.STAGING: {SaveState.WRITING, *_ENDS},
    SaveState.WRITING: {SaveState.DURABLE, *_ENDS},
    SaveState.DURABLE: {SaveState.COMMITTED, *_ENDS},
    SaveState.COMMITTED: (),
    SaveState.FAILED: (),
    SaveState.ABANDONED: (),
}


class Save(ABC):
    """One save of any kind: of a state, of files, or by a function of the user's. Subclasses implement it."""

    exit_timeout: float | None = None  # seconds that the interpreter's exit waits for it
    written_bytes: int | None = None  # written by this process, if the report also counts the bytes of other ranks

    def __init__(
        self, step: int | None, path: str, staged: Future[None], progress: Callable[[], Progress], spans: Spans
    ) -> None:
        """`staged` resolves when the caller may change the state. The handle keeps `progress`, and not the save.

        `spans` began with the call.
        """
        self.staged, self.spans, self.context = staged, spans, copy_context()
        begin = spans.clock()
        staged.add_done_callback(lambda _: spans.add("stage", begin))
        self.life = Life(_GOES)
        self.settled = running_future()  # committed or failed, and tidied: the next save may commit
        self.finished = running_future()  # retention is done, too; of a save without a promise, also the progress bar
        self.given_up: BaseException | None = None
        self.handle = SaveHandle(step, path, staged, progress)

    def reported_as(self, roots: tuple[str, ...]) -> tuple[Kind, tuple[str, ...]]:
        """The kind of the save, and the roots, as reported to listeners. `roots` are those of the checkpointer."""
        return "save", roots

    @abstractmethod
    async def run(self, turn: Future[None] | None) -> SaveReport:
        """Make the save durable and, once the previous save is settled (`turn`), visible. Raises on failure."""

    @abstractmethod
    def failed(self, error: BaseException) -> None:
        """Remove every trace of the save, after `run` has raised `error`. Blocks."""

    def give_up(self, error: BaseException) -> None:
        """Make `run` raise this error soon, since nobody waits for the save any more. Called from any thread."""
        self.given_up = error

    def promise(self) -> Future[int] | None:
        """The future that the handle waits for after the commit, if there is one."""
        return None

    def is_kept(self) -> bool:
        """True if the promise was kept after the handle had already failed."""
        return False

    async def tidy(self) -> None:  # noqa: B027 - most have no files but those that they commit
        """After the commit, remove every temporary file of the save. The handle waits for this."""

    async def afterwards(self) -> None:  # noqa: B027 - only runs have retention
        """Apply retention, after the commit. The handle does not wait for this."""

    async def after_failure(self, error: BaseException) -> None:  # noqa: B027 - most tell nobody
        """Report the error to people. Nobody waits for this."""

    async def run_to_end(self, turn: Future[None] | None) -> SaveReport:
        """Run the save, and remove every trace of it if it fails."""
        try:
            return await self.run(turn)
        except BaseException as error:
            self.life.go(SaveState.FAILED)
            try:
                await off_loop(partial(self.failed, error))
            except Exception as another:
                error.add_note(f"async_ckpt: cleaning up after it failed too: {another}")
            raise

    def _end_staging(self, error: BaseException) -> None:
        """Resolve `staged` after a failure."""
        if not self.staged.done():
            self.staged.set_exception(error)

    def _check(self) -> None:
        """Raise the error with which the save was given up, if it was."""
        if self.given_up is not None:
            raise self.given_up

    @property
    def has_ended(self) -> bool:
        """True if nothing of the save remains to be done."""
        return self.finished.done() and self.handle.done()

    @property
    def is_unseen(self) -> bool:
        """True if the save has failed and nobody has looked at its error."""
        return self.has_failed and not (self.handle.looked_at or self.is_kept())

    @property
    def has_failed(self) -> bool:
        """True if the save has failed. Asking does not count as a look at the error."""
        return self.handle.done() and Future.exception(self.handle) is not None

    def __repr__(self) -> str:
        return f"<Save of {name_of(self.handle)}: {self.life.now.value}>"


def wait_for_saves(saves: Sequence[Save], wait: Wait, timeout: float | None = None, *, promises: bool = True) -> None:
    """Wait until all saves have finished, and with `promises` all handles are done. Raises TimeoutError."""

    def left() -> list[SaveHandle]:
        return [save.handle for save in saves if not (save.has_ended if promises else save.finished.done())]

    ends: list[Future[Any]] = [save.finished for save in saves]
    ends += [save.handle for save in saves if promises]
    if not wait_for_all(ends, timeout, lambda: wait.goes_on(lambda: progress_of(left()))):
        raise TimeoutError(f"{(left() or [saves[-1].handle])[0]!r} is still under way after {timeout} s")


def wait_for_decisions(saves: Sequence[Save], wait: Wait, meanwhile: Callable[[], None]) -> None:
    """Wait until each save is committed, has failed, or was given up. `meanwhile` is called now and then."""

    def left() -> list[SaveHandle]:
        return [save.handle for save in saves if not save.settled.done()]

    for save in saves:
        while not (save.given_up or wait_for(save.settled, LIVENESS_SECONDS)):
            wait.goes_on(lambda: progress_of(left()))
            meanwhile()
