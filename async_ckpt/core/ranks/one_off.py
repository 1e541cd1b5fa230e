"""The folder of a one-off save of several ranks: one step that belongs to no run.

In: a place, and archives that are durable there. Out: a manifest beside them. Knows nothing of: how ranks agree.

    <path>/rank_00000.<attempt>.tar, archives.<attempt>.bin, layout.<attempt>.json    as in the folder of a step
    <path>/manifest.json                                                              written last

A later save to the same path replaces the manifest, and then deletes the archives that the earlier one names.
"""

from __future__ import annotations

from typing import Final

from ...errors import NotCommittedError, StepExistsError
from ..runs.manifest import NAME as MANIFEST
from ..runs.manifest import Manifest, RankFiles, SaveTimes, archive_name
from ..runs.naming import JOURNAL, parse_step_name
from ..runs.receipts import is_receipt_folder
from ..runs.root import replaceable
from ..runs.sweep import is_claim, is_library_name
from ..storage.interface import Storage
from ..timing import wall_time

# The number of the step in the manifest.
STEP: Final = 0


class OneOffFolder:
    """The folder of one save. A request creates it for each save; a delivery calls it on helper threads."""

    def __init__(self, storage: Storage, name: str) -> None:
        """`storage` contains the folder `name`. Raises ValueError for the root of the storage."""
        if not name.strip("/"):
            raise ValueError(f"{storage.locate('')} is the root of its storage; give the path of a folder in it")
        self.storage, self._name = storage, name
        self.path = storage.locate(name)

    def folder(self, step: int) -> str:  # noqa: ARG002
        return self._name

    def attempt_path(self, step: int, attempt: str, rank: int = 0) -> str:  # noqa: ARG002
        return self._named(archive_name(rank, attempt))

    def _named(self, name: str) -> str:
        return f"{self._name}/{name}"

    def look_again(self, manifest: Manifest) -> None:
        """Do nothing: this folder has no starts."""

    def check(self) -> tuple[Manifest, str] | None:
        """The manifest that a save here replaces, and its version; None if there is none. Raises ValueError for a run,
        and for a step of a run.
        """
        if self.storage.exists(self._named(JOURNAL)):
            raise ValueError(f"{self.path} is a run; save a step with an AsyncCheckpointer, or give another path")
        replaced = self._manifest()
        is_step = parse_step_name(self._name) is not None and self.storage.exists(JOURNAL)
        if is_step or (replaced is not None and replaced[0].start):
            raise ValueError(
                f"{self.path} is, or looks like, a step of the run {self.storage.locate('')}, so readers of the run "
                "would take it for a step; save it with an AsyncCheckpointer, or give another path"
            )
        return replaced

    def _manifest(self) -> tuple[Manifest, str] | None:
        return replaceable(self.storage, self._named(MANIFEST), STEP)

    def commit(
        self,
        attempt: str,
        ranks: RankFiles | None,
        world_size: int,
        *,
        replaces: tuple[Manifest, str] | None,
        times: SaveTimes | None,
    ) -> Manifest:
        """Make the durable archives of an attempt the checkpoint. Raises StepExistsError if another writer won."""
        manifest = Manifest(STEP, attempt, world_size, wall_time(), (), ranks=ranks, times=times)
        try:
            return put_in_place(self.storage, self._named(MANIFEST), manifest, replaces)
        except FileExistsError as error:
            raise StepExistsError(
                f"{self.path}: another writer has meanwhile committed a checkpoint there, which was kept; save again",
                step=STEP,
            ) from error

    def discard(self, attempt: str, rank: int) -> None:
        """Delete the archive of an attempt that was not committed, unless the manifest names it after all."""
        name = archive_name(rank, attempt)
        manifest = self._manifest()
        if manifest is None or name not in manifest[0].own_names:
            self.storage.delete(self._named(name))

    def clear(self, replaced: Manifest | None) -> None:
        """After a commit: delete the replaced archives, and leftovers of ranks that were killed over a day ago."""
        self.storage.delete_many([self._named(name) for name in (replaced.own_names if replaced else ())])
        manifest = self._manifest()
        if manifest is None:
            raise NotCommittedError(f"{self.path} was deleted just now", path=self.path, step=None)
        named = {MANIFEST, *manifest[0].own_names}
        names = self.storage.names(self._name)
        left = [name for name in names if (is_library_name(name) or is_claim(name)) and name not in named]
        files = [name for name in left if not is_receipt_folder(name)]
        old = self.storage.sweep(self._name, files, delete=True, decided=True, of_ranks=True)
        attempts = {name.split(".")[1] for name in old}
        for name in filter(is_receipt_folder, left):
            if name.split(".")[1] in attempts:
                self.storage.delete_all(self._named(name))


def put_in_place(storage: Storage, path: str, manifest: Manifest, replaces: tuple[Manifest, str] | None) -> Manifest:
    """Put a manifest in the place of the one that it `replaces`, and return it with the attempts of all earlier ones.

    Raises FileExistsError if there is another manifest by now.
    """
    if replaces is None:
        storage.put_new(path, manifest.dump())
        return manifest
    before, version = replaces
    manifest = manifest._replace(replaces=tuple(filter(None, (before.attempt, *before.replaces))))
    storage.replace(path, manifest.dump(), version=version)
    return manifest
