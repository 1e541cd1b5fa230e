"""Things that one publication leaves to the next: the newest version, and the bytes that a delta is against.

In: the number and the structure of a version that is to be. Out: whether it may be, what it is against, and what is deleted for
it or after it. Knows nothing of: how versions are written.

It changes only when what it changes to is durable.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Final

import torch

from ..errors import (
    CheckpointError,
    StateMismatchError,
    StepBehindError,
    StepExistsError,
)
from ..format.delta import Encoding, VersionIndex, folder_of
from ..host.limits import num_cpus
from ..host.loop import get_loop
from ..host.threads import Crew
from ..saving.default import held_memory
from ..state.dtypes import dtype_name
from ..storage.interface import Storage
from ..storage.place import Place
from .ranks import RankLines, RanksStart
from .replica import MemoryReplica, bring
from .source import State, Where
from .versions import Ownership, Versions, mark_replaced

_log: Final = logging.getLogger("async_ckpt")


class Line:
    """Things that one publication leaves to the next. The publication whose turn it is has them."""

    def __init__(
        self,
        storage: Storage,
        *,
        anchor_every: int,
        encoding: Encoding | None,
        keep: int | None,
        max_bytes: int | None,
        follows: bool,
        retires: bool,
        place: Place,
        start: RanksStart | None = None,
        size: int | None = None,
    ) -> None:
        """`place` is the root; of what is spread over ranks, `start` and `size` are those of all ranks."""
        self.start, self._size, self._ranks = start, size, RankLines(place)
        self.is_clean = False  # nothing unfinished is left, of this publisher or one before it
        self.storage, self.encoding, self.keep = storage, encoding, keep
        self.versions, self.ownership = Versions(storage), Ownership(storage)
        self._retires = retires  # versions that are not below a new one
        self._newest_elsewhere: int | None = None  # in other lines at the root, once it was looked for
        self._version = 0  # the one that was prepared last
        self._retired: list[Versions] = []  # the lines in which it takes the place of others
        self._has_replaced = False  # since the last version that was durable
        # Not all of them: the training has the better claim, and is slowed by whoever reads memory beside it.
        self.crew = Crew("encode", max(1, num_cpus() // 2), background=True)
        self._anchor_every, self._max_bytes = anchor_every, max_bytes
        self._follows = follows  # the newest version that is durable, not an acknowledged one
        self._base = MemoryReplica(self._take)
        self._num_since_anchor = 0
        self._structure = ""  # of the newest version

    def _take(self, num_bytes: int) -> torch.Tensor:
        try:
            return held_memory().lend(num_bytes, crew=get_loop().copiers, max_bytes=self._max_bytes)
        except MemoryError as error:
            raise MemoryError(
                f"deltas need the weights of the version before in host memory: {error}; encoding=None needs none"
            ) from None

    def prepare(self, version: int, structure: str, check: Callable[[], None]) -> None:
        """See that a version may be added, and take the root for it. Asks the storage; `check` may end a wait."""
        root = self.versions.root
        if self.ownership.is_taken:
            self.ownership.check()
        there = self.versions.numbers()
        if self._newest_elsewhere is None:
            self._newest_elsewhere = self._ranks.newest_elsewhere(self._size)
        self._version, self._retired = version, []
        if max([*there, self._newest_elsewhere]) >= version:
            self._take_the_place_of(version, there, check)
        before = self._structure or self._told_structure(there)
        if before not in ("", structure):
            raise StateMismatchError(
                f"{root}: the versions there have tensors of other names, dtypes or shapes, and readers apply one version to the "
                "other; publish another model to a root of its own",
                missing=(),
                unexpected=(),
                mismatched=(),
            )
        if not self.ownership.is_taken:  # and not before: whoever is refused takes nothing from anybody
            self.ownership.take()
            self.storage.sweep_uploads()
        if not self.is_clean:
            self.versions.delete_unfinished()
            self.is_clean = True
        if version not in there and self.storage.names(folder_of(version)):
            raise StepExistsError(
                f"{root}: there is a folder {folder_of(version)} already, which is no version of a Publisher; delete it, or give "
                "a higher number",
                step=version,
            )

    def _take_the_place_of(self, version: int, there: list[int], check: Callable[[], None]) -> None:
        """Find out whether it may be that these are not below the version. Raises StepExistsError, StepBehindError."""
        above = [number for number in there if number >= version]
        if self._retires:
            newest = max((number for number in above if not self.versions.is_ours(number)), default=-1)
            advice = "it is not a Publisher's, so it is not deleted; give a higher one"
        else:
            newest = self._newest_of_all(above, check)
            advice = 'give a higher one, or make the Publisher with on_rollback="retire"'
        if newest < version:
            self._retired = [
                self.versions,
                *(self._ranks.elsewhere(self._size).values() if self._retires else ()),
            ]
            return
        root = self.versions.root
        if newest == version:
            alone = "" if self.start else ". If all ranks publish the same model, let rank 0 do it alone"
            raise StepExistsError(
                f"{root}: version {version} is published already; {advice}{alone}", step=version
            )
        raise StepBehindError(
            f"{root}: version {version} is not newer than {newest}, which is published; {advice}",
            step=version,
            newest=newest,
        )

    def _newest_of_all(self, above: list[int], check: Callable[[], None]) -> int:
        """The newest version that is there for somebody, or will be, once all ranks have it.

        What one rank has published, and others had not when they were killed, never will.
        """
        assert self._newest_elsewhere is not None
        whole = self._ranks.sizes()
        if self.start is None:
            return max([*above, *whole])
        word = self.start.word(check)
        alive = (number for number in above if self.versions.start_of(number) == word)
        return max([-1, *whole, *alive, *self._ranks.plain_numbers()])

    def _told_structure(self, there: list[int]) -> str:
        """The newest index among those that can be read."""
        for number in reversed(there):
            try:
                return self.versions.read(number).structure
            except CheckpointError as error:
                _log.warning("version %d is passed over: %s", number, error)
        return ""

    def retire(self) -> None:
        """Delete what the version that was prepared takes the place of."""
        for line in self._retired if self._is_first else self._retired[:1]:
            gone = [number for number in line.numbers() if number >= self._version]
            line.delete(gone, token=self.ownership.token, check=self.ownership.check)
        if self._retired:
            self._retired, self._newest_elsewhere = [], None
            self._has_replaced = True
            mark_replaced(self._ranks.storage)

    def mark_replaced(self) -> None:
        """A version is durable that has taken the place of others: have readers look again."""
        if self._has_replaced:
            self._has_replaced = False
            mark_replaced(self._ranks.storage)

    @property
    def _is_first(self) -> bool:
        """Whether this rank, or the only one, sees to what others have left at the root."""
        return self.start is None or self.start.is_first

    def make_room(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take the memory for what deltas are against, before anything is written. Raises MemoryError."""
        if self.encoding is not None and self._anchor_every > 1:
            self._base.lay_out(_where(tensors))

    def base_for(self, acknowledged: int | None) -> MemoryReplica | None:
        """The base that a delta may be against now; None if the version is to be an anchor."""
        if self.encoding is None or self._num_since_anchor + 1 >= self._anchor_every:
            return None
        base = self._base
        if not self._follows:
            if acknowledged is None or acknowledged >= self._version:
                return None
            try:
                # Against the bytes that are there, not those that were meant to be.
                bring(base, self.versions, acknowledged, self.crew)
            except CheckpointError as error:
                _log.warning("version %d was acknowledged, and cannot be read: %s", acknowledged, error)
                return None
        state = base.state
        if state is None or state.version >= self._version or not self.versions.is_complete(state.version):
            return None
        return base

    def published(self, index: VersionIndex, state: State, tensors: Mapping[str, torch.Tensor]) -> None:
        """A version is durable: it is the base of the next ones, if nothing else is."""
        self._structure = state.structure
        self._num_since_anchor = 0 if index.is_anchor else self._num_since_anchor + 1
        if self.encoding is None or self._anchor_every == 1:
            return
        base = self._base
        if not self._follows and base.state is not None:
            return
        is_all = index.is_anchor or base.state is None
        changed = tensors if is_all else {name: tensors[name] for name in index.files}
        base.note(None)
        base.take_over(changed, self.crew)
        base.note(state)

    def retain(self) -> None:
        """Delete what is neither among the newest versions nor needed by one of them."""
        if self.keep is None:
            return
        own = self.versions.numbers()
        whole = self._ranks.sizes()
        # Of what other ranks may yet fail to publish, what is whole counts, and all after it.
        there = sorted({*whole, *own} if self.start is None else whole)
        if not there:
            return
        oldest = there[-self.keep :][0]
        token = self.ownership.token
        self._retain_from(oldest, self.versions, token)
        if self._is_first:
            for name, line in self._ranks.elsewhere(self._size).items():
                if line.numbers() and not self._retain_from(oldest, line, token):
                    self._ranks.remove(name)

    @staticmethod
    def _retain_from(oldest: int, line: Versions, token: str) -> list[int]:
        """Delete what is older, and needed by none of the others; what is left."""
        there = line.numbers()
        needed = line.needed_by([number for number in there if number >= oldest])
        gone = [number for number in there if number not in needed and line.is_ours(number)]
        line.delete(gone, token=token)
        return [number for number in there if number not in gone]

    def close(self) -> None:
        self.crew.stop()
        self._base = MemoryReplica(self._take)


def _where(tensors: Mapping[str, torch.Tensor]) -> dict[str, Where]:
    return {
        name: Where("", dtype_name(tensor.dtype), tuple(tensor.shape), 0, tensor.nbytes)
        for name, tensor in tensors.items()
    }
