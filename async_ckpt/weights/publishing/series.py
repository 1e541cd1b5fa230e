"""The state kept between publications: the versions at the root, its owner, and the base of deltas.

In: the number and the structure of a new version. Out: whether it may be added, and the deletion of versions that it
replaces or makes unnecessary.
Knows nothing of: how versions are written.

A change is recorded here only after it is durable.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Final

from ... import Place
from ...errors import (
    CheckpointError,
    StateMismatchError,
    StepBehindError,
    StepExistsError,
)
from ...plumbing import rendezvous
from ..delta import VersionIndex, folder_of
from ..lent import loan_of_rank
from .delta_base import DeltaBase, DeltaPolicy
from .in_memory.offer import MemoryOffer
from .of_ranks.root_versions import RootVersions
from .versions import Ownership, Versions, mark_replaced

_log: Final = logging.getLogger("async_ckpt")
_WHOM: Final = "rank 0 to publish; all ranks publish a sharded model, at the same root"


class VersionSeries:
    """The versions that one publisher adds: of a whole model at its root, or of one rank's slices in its folder.

    A `Publisher` creates it at its first publication, and closes it. Only the publication whose turn it is uses it, on
    helper threads.
    """

    def __init__(
        self,
        place: Place,
        *,
        deltas: DeltaPolicy,
        keep: int | None,
        retires: bool,
        channel: rendezvous.Channel | None = None,
        offer: MemoryOffer | None = None,
    ) -> None:
        """Begin a series at the root `place`. `channel` connects the ranks of a spread model.

        With an `offer`, versions are also lent in memory.
        """
        self.channel, self.offer = channel, offer
        rank, self.num_ranks = (0, 0) if channel is None else (channel.world.rank, channel.world.size)
        self._is_first = not rank  # rank 0 also deletes versions of other worlds
        self.is_clean = False  # no unfinished attempts are left, of this publisher or of earlier ones
        self._keep, self._retires, self._root = keep, retires, RootVersions(place)
        self.versions = self._root.of_rank(rank, self.num_ranks)
        self.storage = self.versions.storage
        # Rank 0 has the channel's token without waiting. It is also the root's, by which readers find all ranks' loans.
        of_all = None
        if channel is not None and self._is_first:
            of_all = Ownership(self._root.storage, token=channel.token(lambda: None, _WHOM))
        self.ownership = Ownership(self.storage, also=of_all)
        self.base = DeltaBase(deltas)
        self._newest: VersionIndex | None = None  # number, structure and adapter of the newest version added
        self._newest_other: int | None = None  # the newest version of other worlds; None if not looked up yet
        self._version = 0  # the last version that was checked
        self._replaced: list[Versions] = []  # where that version replaces versions
        self._has_replaced = False  # versions were deleted, and the new one is not durable yet

    def prepare(self, version: int, structure: str, adapter: Mapping[str, str], check: Callable[[], None]) -> None:
        """Check that a version may be added, and take the root for it.

        Sends requests to the storage. `check` may end a wait by raising.
        """
        root = self.versions.root
        self.storage.prove(for_run=True)
        if self.ownership.is_taken:
            self.ownership.check()
        existing = self.versions.numbers()
        self._find_replaced(version, existing, check)
        before = self._newest or self._newest_published(existing)
        if before is not None:
            _refuse_other_model(root, before, structure, adapter)
        if not self.ownership.is_taken:  # only now, since a refused publisher must not take the root
            self.ownership.take()
            self.storage.sweep_uploads()
        if not self.is_clean:
            self.versions.delete_unfinished()
            self.is_clean = True
        if version not in existing and not self.versions.clear(version):
            raise StepExistsError(
                f"{root}: there is a folder {folder_of(version)} already, which is not a version of a Publisher; "
                "delete it, or give a higher number",
                step=version,
            )

    def loan_name(self, check: Callable[[], None]) -> str:
        """The name under which versions are lent. Ranks other than 0 wait for rank 0."""
        if self.channel is None:
            return self.ownership.token
        return loan_of_rank(self.channel.token(check, _WHOM), self.channel.world.rank)

    def name_of(self, call: rendezvous.RankCall, check: Callable[[], None]) -> str:
        """The common name of one call on all ranks. Waits for rank 0, and raises PeerFailedError."""
        assert self.channel is not None
        return f"{self.channel.token(check, _WHOM)}-{call.wait_named(check)}"

    def _newest_published(self, existing: list[int]) -> VersionIndex | None:
        """The newest index that can be read; None if no index can."""
        for number in reversed(existing):
            try:
                return self.versions.read(number)
            except CheckpointError as error:
                _log.warning("version %d is skipped: %s", number, error)
        return None

    def published(self, index: VersionIndex) -> None:
        """Record that a version has become durable."""
        self._newest = VersionIndex(index.version, {}, structure=index.structure, adapter=index.adapter)
        if self._has_replaced:
            self._has_replaced = False
            mark_replaced(self._root.storage)

    # --- versions that a new one replaces, when a training continues from an earlier checkpoint -------------------

    def _find_replaced(self, version: int, existing: list[int], check: Callable[[], None]) -> None:
        """Find where a new version replaces others. Raises StepExistsError or StepBehindError if it may not."""
        if self._newest_other is None:
            self._newest_other = self._root.newest_of_other_worlds(self.num_ranks)
        self._version, self._replaced = version, []
        if max([*existing, self._newest_other]) < version:
            return
        above = [number for number in existing if number >= version]
        if self._retires:
            newest = max((number for number in above if not self.versions.is_ours(number)), default=-1)
            advice = "it is not a Publisher's, so it is not deleted; give a higher one"
        else:
            newest = self._newest_of_all(above, check)
            advice = 'give a higher one, or make the Publisher with on_rollback="retire"'
        if newest < version:
            others = self._root.of_other_worlds(self.num_ranks).values() if self._retires else ()
            self._replaced = [self.versions, *others]
            return
        root = self.versions.root
        if newest == version:
            alone = "" if self.channel else ". If all ranks publish the same model, let rank 0 do it alone"
            raise StepExistsError(f"{root}: version {version} is already published; {advice}{alone}", step=version)
        raise StepBehindError(
            f"{root}: version {version} is not newer than {newest}, which is already published; {advice}",
            step=version,
            newest=newest,
        )

    def _newest_of_all(self, above: list[int], check: Callable[[], None]) -> int:
        """The newest version that a reader can pull, now or after all ranks have published it.

        A version that killed ranks never published does not count.
        """
        whole = self._root.sizes()
        if self.channel is None:
            return max(whole, default=-1)
        token = self.channel.token(check, _WHOM)
        alive = (number for number in above if self.versions.start_of(number).partition("-")[0] == token)
        return max([-1, *whole, *alive])

    def delete_replaced(self) -> None:
        """Delete the versions that the checked one replaces, which exist only with on_rollback="retire".

        Readers are notified by marks at the root, now and when the new version is durable.
        """
        for versions in self._replaced if self._is_first else self._replaced[:1]:
            numbers = [number for number in versions.numbers() if number >= self._version]
            versions.delete(numbers, self.ownership.check)
        if self._replaced:
            self._replaced, self._newest_other = [], None
            self._has_replaced = True
            mark_replaced(self._root.storage)

    # --- retention ------------------------------------------------------------------------------------------------

    def retain(self) -> None:
        """Delete the versions that are not among the newest, and that the newest are not built on."""
        if self._keep is None:
            return
        # Other ranks may still fail to publish a version of this rank, so only complete versions are counted.
        counted = [*self._root.sizes()]
        if not counted:
            return
        oldest = counted[-self._keep :][0]
        _retain_from(oldest, self.versions, self.ownership)
        if self._is_first:
            for name, versions in self._root.of_other_worlds(self.num_ranks).items():
                if versions.numbers() and not _retain_from(oldest, versions, self.ownership) and name:
                    self._root.storage.delete_all(name)  # what is left of a rank's folder


def _refuse_other_model(root: str, before: VersionIndex, structure: str, adapter: Mapping[str, str]) -> None:
    """Raises StateMismatchError for weights of another structure, or of an adapter with another config, than before."""
    if before.structure not in ("", structure):
        raise StateMismatchError(
            f"{root}: the versions there have tensors of other names, dtypes or shapes, and readers apply one "
            "version to the next; publish another model to its own root"
        )
    for name in sorted(before.adapter.keys() | adapter.keys()) if before.structure else ():
        was, now = before.adapter.get(name, "empty"), adapter.get(name, "empty")
        if was != now:
            raise StateMismatchError(
                f"{root}: the published adapter has {name} = {was:.200}, and this one has {now:.200}; readers of "
                "deltas keep the config that they have. Publish another adapter, or one for another base, "
                f"to a root of its own; if it is the same, give a config_folder with the earlier {name}"
            )


def _retain_from(oldest: int, versions: Versions, ownership: Ownership) -> list[int]:
    """Delete the versions before `oldest` that no newer version is built on. Returns the remaining versions.

    Raises ClosedError if another publisher takes the root meanwhile, since it may publish the same numbers again.
    """
    existing = versions.numbers()
    needed = versions.needed_by([number for number in existing if number >= oldest])
    unneeded = [number for number in existing if number not in needed and versions.is_ours(number)]
    versions.delete(unneeded, ownership.check)
    return [number for number in existing if number not in unneeded]
