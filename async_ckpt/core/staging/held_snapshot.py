"""A held snapshot: the host copy of one instant, for any number of readers.

In: a state. Out: its parts by name, until it is closed. Knows nothing of: its readers.
"""

from __future__ import annotations

import weakref
from typing import Any, Self

from ..host.loop import get_loop
from ..state.capture import capture
from ..state.captured import SnapshotCopies, SnapshotView, structure_of
from ..timing import monotonic
from .guard import unwrapped
from .host_copy import BufferPool, HostCopy
from .tensors import Wording


class HeldSnapshot(SnapshotView):
    """A whole state as it was at one instant, in host memory. `async_ckpt.snapshot` returns it.

        with async_ckpt.snapshot({"model": model}) as snap:
            handle = ckpt.save(snap, step=100)

    It can be indexed by name. A save or export that reads it keeps the parts that it reads until it is done, even after
    `close`. A snapshot that is no longer referenced closes itself. It cannot be used in a forked child.
    """

    def __init__(
        self, state: Any, *, guard: Any, memory: BufferPool, max_bytes: int | None = None, waits: bool = False
    ) -> None:
        """With `waits`, it waits if memory is short, since its readers end soon; otherwise it is refused."""
        self._began, self._call_seconds = monotonic(), 0.0
        optimizers, crew = unwrapped(guard), get_loop().copiers
        captured = capture(state, local_parts=True)
        if captured.completions:
            raise TypeError("the state is, or contains, a snapshot already; use it directly")
        structure = structure_of(captured)  # it may refuse the state, so it comes before the copy
        names = [spec.dotted for spec in captured.specs]
        copy = HostCopy(
            captured.tensors,
            names,
            optimizers=optimizers,
            memory=memory,
            crew=crew,
            held=not waits,
            max_bytes=max_bytes,
            wording=Wording("the copy of a snapshot", "snap.completion.result()"),
        )
        self.num_bytes = copy.num_bytes
        # Bound to the source, which the parts share: the memory stays while any part exists.
        source = SnapshotCopies(captured, copy.tensors, copy.completion)
        self._release = weakref.finalize(source, copy.release)
        self._release.atexit = False
        self._copy = copy
        super().__init__(source, structure)

    @property
    def stall_seconds(self) -> float:
        """Seconds that the snapshot has stalled the caller's thread or stream so far: the call, the copies, and the
        guard.

        print(snap.stall_seconds)  # 0.012

        They are not part of its readers' reports, each of which covers its own call.
        """
        return self._call_seconds + self._copy.snapshot.stall_seconds

    def close(self) -> None:
        """Return the memory, except for parts that are still being read. May be called again.

        snap.close()  # leaving the `with` block does it
        """
        self._source.close()
        if self._release.detach() is not None:
            self._copy.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def begin(snapshot: HeldSnapshot) -> None:
    """On the caller's thread: copy, or enqueue the copy of, everything that must not wait."""
    snapshot._copy.begin()
    snapshot._call_seconds = monotonic() - snapshot._began
