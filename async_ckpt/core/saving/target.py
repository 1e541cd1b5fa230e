"""The target of a save, as an attempt sees it: one object at one place.

In: an object that is being written. Out: its commit, or its removal. Knows nothing of: segments, how they are written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import NamedTuple

from ..host.loop import OffLoop
from ..report import SaveReport
from ..runs.manifest import Archive, SaveTimes
from ..storage.interface import Sink, Storage
from .block_digests import GroupDigest
from .finite import FiniteCheck


class SaveOutcome(NamedTuple):
    """The report of a committed save, and what only the history of its run has: the sizes of its groups in bytes."""

    report: SaveReport
    call_seconds: float
    groups: Mapping[str, int]


class Target:
    """The place that a save goes to, and its object there. A request creates it; an attempt calls it on helper threads.

    By default a durable object is committed, and there are no other ranks to agree with.
    """

    has_further_places = False
    """Whether the next save can go elsewhere if this place does not answer."""

    num_bytes_beside = 0
    """Bytes of other objects of the checkpoint, which `commit` writes."""

    num_driver_bytes = 0
    """Those of them that this process wrote."""

    followed_bytes = 0
    """Bytes of the copy at the next place that are written."""

    times: SaveTimes | None = None
    """How long the save has taken, set before `agree` and before `commit`."""

    outcome: SaveOutcome | None = None
    """What the save has come to, set before `afterwards`."""

    finite: FiniteCheck | None = None
    """The check of the values of this rank's archive, if they are checked; set before it is written."""

    def __init__(self, storage: Storage, name: str, shown: str | None = None) -> None:
        """`shown` names the place in reports and messages, if that is not the object."""
        self.storage = storage
        self.path = storage.locate(name if shown is None else shown)
        self.rename(name)

    def rename(self, name: str) -> None:
        """Take another name for the object, before it is opened."""
        self._name, self.name = name, name.rpartition("/")[2]

    @property
    def in_order(self) -> bool:
        """True if its sink sends in file order, and holds what comes early."""
        return self.storage.in_order

    def part_segments(self, num_bytes: int, segment_bytes: int) -> int:
        """The number of segments in a row that its sink must hold at once before it can send any of them."""
        return self.storage.part_segments(num_bytes, segment_bytes)

    async def begin(self, check: Callable[[], None]) -> None:
        """Wait until it is known what the object is called. `check` is called meanwhile, and may raise."""

    def open(self, num_bytes: int, segment_bytes: int, max_segments: int) -> Sink:
        """Begin the object, without a request over a network."""
        return self.storage.create(
            self._name, num_bytes=num_bytes, segment_bytes=segment_bytes, max_segments=max_segments
        )

    def follow(
        self,
        num_bytes: int,  # noqa: ARG002
        segment_bytes: int,  # noqa: ARG002
        max_segments: int,  # noqa: ARG002
    ) -> tuple[Sink, Storage] | None:
        """Begin a copy of the object at the next place, if that can take it. A failure there costs the copy alone."""
        return None

    def followed(self, *, is_whole: bool) -> None:
        """Note that the copy has ended, and whether it is there."""

    def check(self) -> None:
        """Make the checks that need requests over a network, while segments are written. Raises a refusal."""

    async def agree(self, archive: Archive, off_loop: OffLoop, check: Callable[[], None]) -> None:
        """Tell the other ranks that the object is durable; on the rank that decides, wait for theirs, on another for
        the decision. Raises when that is a refusal.

        `check` is called in between, and raises when nobody waits any more.
        """

    def refuse(self, error: BaseException) -> bool:  # noqa: ARG002
        """Tell the other ranks that the save has failed.

        False if it may be committed all the same: then its object stays.
        """
        return True

    def commit(self, archives: tuple[Archive, ...]) -> None:
        """Make the durable object the checkpoint."""

    def unchanged_in(self, digests: Mapping[str, GroupDigest]) -> tuple[str, ...]:  # noqa: ARG002
        """The groups with the bytes of the commit before. Called once, after the commit."""
        return ()

    def promise(self) -> Future[int] | None:
        """After the commit: what the save waits for still, if there is anything."""
        return None

    def is_kept(self) -> bool:
        """Whether that has come, once it had failed."""
        return False

    def discard(self) -> None:
        """Remove a durable object that could not be committed, unless it is the checkpoint after all; and its copy."""

    def tidy(self) -> None:
        """Remove what the save has put beside the checkpoint and is not to stay. The handle waits for this."""

    def afterwards(self) -> None:
        """Apply retention. The checkpoint is true whatever happens here."""

    def failed(self, error: BaseException, seconds: float) -> None:
        """Tell the history that the save has failed after so many seconds, without a trace. Nobody waits for this."""

    def hangs(self, quiet: Future[None]) -> None:
        """Note that the save has failed while calls to this place are under way, until `quiet` resolves."""
