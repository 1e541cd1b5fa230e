"""Saves that write files from copied tensors: wrapped functions, exports and publications.

In: tensors, copied to the host before the caller goes on. Out: a handle, and its report. Knows nothing of: the
files that are written from the copies.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Final

import torch

from ...core.host.loop import awaitable, get_loop, off_loop
from ...core.host.waits import all_of
from ...core.report import Destination, Progress, SaveReport
from ...core.saving.handle import SaveHandle
from ...core.saving.kept_memory import files_saver, host_memory
from ...core.saving.save import Save, SaveState
from ...core.staging.guard import Optimizers
from ...core.staging.host_copy import HostCopy
from ...core.staging.tensors import Wording
from ...core.state.captured import SnapshotView
from ...core.storage.interface import Storage
from ...core.storage.sequential import Appender
from ...core.timing import Spans
from .scratch import Scratch

if TYPE_CHECKING:  # a wrapped function does not need `hf_weights`
    from .hf_weights import Weights


class CopySave(Save):
    """A save that is written from copies of tensors. Subclasses write the files and make them visible."""

    def __init__(
        self,
        path: str,
        tensors: Sequence[torch.Tensor],
        names: Sequence[str],
        *,
        after: Sequence[Future[None]] = (),
        num_tensors: int,
        optimizers: Optimizers,
        spans: Spans,
    ) -> None:
        self.path = path
        # From now on the copy alone keeps the tensors alive.
        self.copy: Final = HostCopy(
            tensors,
            names,
            optimizers=optimizers,
            memory=host_memory(),
            crew=get_loop().copiers,
            wording=Wording(f"the copy of {path}"),
        )
        # Tensors of held snapshots are not copied again; their bytes are valid once the snapshots are complete.
        staged = all_of([self.copy.completion, *after], lambda: f"the copy of {path}")
        super().__init__(None, path, staged, lambda: self.progress, spans)
        self._num_tensors = num_tensors
        self._num_bytes = self._num_retries = 0  # written so far
        self._out: Appender | None = None  # the object that is being written
        self._scratch: Scratch | None = None

    def begin(self) -> SaveHandle:
        """Copy the tensors, or let the guard defer it. Runs on the caller's thread; afterwards tensors may change."""
        try:
            handle = files_saver().take_on(self)
        except BaseException:
            self.copy.release()
            raise
        self.copy.begin()
        return handle

    @property
    @abstractmethod
    def progress(self) -> Progress: ...

    def give_up(self, error: BaseException) -> None:
        super().give_up(error)
        if self._out is not None:
            self._out.fail(error)

    async def run(self, turn: Future[None] | None) -> SaveReport:
        await awaitable(self.staged)
        self.life.go(SaveState.WRITING)
        if turn is not None:
            await awaitable(turn)
        with self.spans.span("write"):
            await self._write()
        self._check()
        self.life.go(SaveState.DURABLE)
        with self.spans.span("commit"):
            await off_loop(self._commit)
        self.life.go(SaveState.COMMITTED)
        return self._report(await awaitable(self.spans.call))

    @abstractmethod
    async def _write(self) -> None:
        """Write everything without making it visible."""

    @abstractmethod
    def _commit(self) -> None:
        """Make the result visible. Blocks."""

    def _write_file(self, place: Storage, name: str, num_bytes: int, pieces: Iterable[memoryview]) -> None:
        """Write one file of this size, from front to back. Blocks."""
        out = self._out = Appender(place, name, limit_bytes=num_bytes)
        before = self._num_bytes
        self._check()
        for piece in pieces:
            out.append(piece)
            self._num_bytes = before + out.num_bytes
        out.finish()
        out.sink.close()
        self._num_retries += out.sink.num_retries
        self._out = None

    def failed(self, error: BaseException) -> None:
        self._end_staging(error)
        self.copy.release()
        try:
            if self._out is not None:
                self._out.abort()
        finally:
            if self._scratch is not None:
                self._leave(self._scratch, error)

    def _leave(self, scratch: Scratch, error: BaseException) -> None:  # noqa: ARG002
        """Remove or keep the scratch folder of a failed save."""
        scratch.remove()

    async def tidy(self) -> None:
        if self._scratch is not None:
            await off_loop(self._scratch.remove)

    def _report(self, call_seconds: float) -> SaveReport:
        seconds, total = self.spans.seconds, self.spans.total()
        return SaveReport(
            status="committed",
            step=None,
            path=self.path,
            num_bytes=self._num_bytes,
            num_tensors=self._num_tensors,
            stall_seconds=call_seconds + self.copy.snapshot.stall_seconds,
            stage_seconds=self.copy.snapshot.stage_seconds,
            write_seconds=seconds["write"],
            commit_seconds=seconds["commit"],
            total_seconds=total,
            retries=self._num_retries,
            destinations=(Destination(self.path, self._num_bytes, total, self._num_retries),),
        )


class WeightsSave(CopySave):
    """A save of a model's weights. Weights of a held snapshot are not copied again."""

    def __init__(
        self,
        path: str,
        weights: Weights,
        *,
        held: SnapshotView | None,
        optimizers: Optimizers,
        spans: Spans,
        after: Sequence[Future[None]] = (),
    ) -> None:
        """`after` are other copies, which must be complete before this one counts as staged."""
        live = weights.tensors if held is None else {}
        super().__init__(
            path,
            list(live.values()),
            list(live),
            after=[*after, *([] if held is None else [held.completion])],
            num_tensors=len(weights.tensors),
            optimizers=optimizers,
            spans=spans,
        )
        self._total_bytes = sum(tensor.nbytes for tensor in weights.tensors.values())
        copies = dict(zip(live, self.copy.tensors, strict=True))
        self._weights = weights._replace(tensors=weights.tensors | copies)

    @property
    def progress(self) -> Progress:
        staged = self._total_bytes if self.staged.done() else 0
        # Small files and headers are written, too, and may be larger than the weights.
        return Progress(max(self._total_bytes, self._num_bytes), staged, self._num_bytes)

    def _release_weights(self) -> None:
        """Release the copies, and the optimizers that wait for them."""
        self._weights = self._weights._replace(tensors={}, files={}, as_published=dict)
        self.copy.release()
