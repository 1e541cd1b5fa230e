"""Deletion of steps, and of the leftovers of dead writers.

In: a root, steps to delete. Out: a root without them, but with the files of other programs. Knows nothing of: rules.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import Final, NamedTuple

from ...errors import CheckpointError, NotCommittedError
from ..storage.interface import Storage
from ..storage.store_facts import PROBE
from .manifest import NAME as MANIFEST
from .manifest import Manifest, attempt_of, intent_name, is_retired_name
from .manifest import parse as parse_manifest
from .marks import Mark
from .receipts import attempt_of_all, is_beside, is_receipt_folder, look_all
from .root import Root

_ARCHIVE: Final = r"(rank_\d{5,}|driver)\.[0-9a-f]{8}\.tar"
_TEMP: Final = rf"\..*\.async_ckpt-tmp|{re.escape(PROBE)}[0-9a-f]+"
_CLAIM: Final = r"world\.[0-9a-f]{16}(\.\d{5,}|\.[0-9a-f]{8})?\.json"
_OF_OTHER_RANK: Final = r"\.?rank_(?!00000\.)\d{5,}\.[0-9a-f]{8}\."
# How often to list a folder again if a listed manifest is gone when it is read. Other processes do not replace it so
# many times.
_READ_TRIES: Final = 20


def is_library_name(name: str) -> bool:
    """True for a name in a step's folder that this library gives to any file but a manifest."""
    is_file = bool(re.fullmatch(_ARCHIVE, name) or re.fullmatch(_TEMP, name)) or is_retired_name(name)
    return is_file or is_beside(name) or is_receipt_folder(name)


def is_claim(name: str) -> bool:
    """True for the name of a file by which ranks claim a root, or the folder of a one-off save."""
    return re.fullmatch(_CLAIM, name) is not None


def _of_ranks(names: Iterable[str]) -> set[str]:
    """The attempts of several ranks to which objects of these names belong."""
    attempts = set()
    for name in names:
        if is_beside(name) or is_receipt_folder(name) or re.match(_OF_OTHER_RANK, name):
            attempts.add(attempt_of(name))
    return attempts


class StepFolder(NamedTuple):
    """A step's folder: its names, its manifest if intact, the names in all (also retired) manifests, its text."""

    names: list[str]
    manifest: Manifest | None
    named: set[str]
    text: bytes | None = None


class Sweeper:
    """Deletes steps and leftovers below one root. A Run creates and owns it. Methods may be called from any thread."""

    def __init__(self, root: Root) -> None:
        self._root = root
        self._swept = self._has_ranks = False

    @property
    def _storage(self) -> Storage:
        return self._root.storage

    def read_folder(self, step: int) -> StepFolder:
        """Read the folder of a step and the manifests in it, including retired ones."""
        folder = self._root.folder(step)
        for _ in range(_READ_TRIES):
            names = self._storage.names(folder)
            manifests: dict[str, Manifest] = {}
            texts: dict[str, bytes] = {}
            try:
                for name in names:
                    if name == MANIFEST or is_retired_name(name):
                        path = f"{folder}/{name}"
                        texts[name] = self._storage.read(path)[0]
                        manifests[name] = parse_manifest(texts[name], path=path)
            except CheckpointError:
                break
            except FileNotFoundError:  # just deleted or replaced: look again
                continue
            named = {name for manifest in manifests.values() for name in manifest.own_names}
            return StepFolder(names, manifests.get(MANIFEST), named, texts.get(MANIFEST))
        # A damaged manifest might name any archive.
        return StepFolder(names, None, {name for name in names if re.fullmatch(_ARCHIVE, name)}, texts.get(MANIFEST))

    def _borrowed_names(self, step: int) -> set[str]:
        """The archives of a step that later steps borrow from, even if the step was overwritten since.

        If there is a later step in a newer format, all archives: it may borrow from any of them.
        """
        commits = self._root.view(self._root.relist())
        if any(later > step and later in commits for later in self._root.newer_format):
            return {name for name in self._storage.names(self._root.folder(step)) if re.fullmatch(_ARCHIVE, name)}
        borrowers = (manifest for later, manifest in commits.borrowers.items() if later > step)
        lent = {borrowed.archive.name for m in borrowers for borrowed in m.elsewhere if borrowed.step == step}
        # A borrower names the list of all ranks' archives, which stands for all of them.
        attempts = {attempt for name in lent if (attempt := attempt_of_all(name))}
        names = self._storage.names(self._root.folder(step)) if attempts else []
        return lent | {name for name in names if attempt_of(name) in attempts}

    def retired_attempts(self, step: int) -> set[str]:
        """The attempts at a step whose manifests a rollback has renamed, and the attempts that those had replaced."""
        folder = self._root.folder(step)
        attempts: set[str] = set()
        for name in self._storage.names(folder):
            if is_retired_name(name):
                try:
                    data = self._storage.read(f"{folder}/{name}")[0]
                    retired = parse_manifest(data, path=f"{folder}/{name}")
                    attempts.update((retired.attempt, *retired.replaces))
                except (CheckpointError, FileNotFoundError):
                    continue
        return attempts

    def discard(self, step: int, attempt: str, rank: int = 0) -> None:
        """Delete the archive of an attempt that failed, unless a manifest names it all the same."""
        try:
            named = self.read_folder(step).named
            archive, driver = self._root.attempt_path(step, attempt, rank), self._root.driver_path(step, attempt)
            for path in (archive, driver):
                if path.rpartition("/")[2] not in named:
                    self._storage.delete(path)
            if archive.rpartition("/")[2] not in named:
                self._storage.delete(intent_name(step, attempt))
        except BaseException:
            self._swept = False  # the next save sweeps the rest
            raise

    def sweep(self, *, delete: bool = True) -> list[str]:
        """Delete the leftovers of dead writers: temp files, unfinished uploads, archives that no manifest names,
        intents, and the marks of commits that are gone. Returns their names.

        With `delete=False`, they are only listed, without the uploads.
        """
        swept = self._storage.sweep_uploads() if delete else []
        listing = self._root.relist()
        if delete:
            with suppress(CheckpointError):
                self._root.finish_rollbacks(listing)
        newest = self._root.newest(listing)
        swept_names: list[str] = []
        sweep_folder = partial(self._sweep_folder, newest=newest, swept=swept_names, delete=delete)
        look_all(self._storage, [partial(sweep_folder, step) for step in (None, *listing.steps)])
        dead = [intent_name(*intent) for intent in listing.intents if self._is_dead_intent(*intent)]
        dead += [mark.name for mark in self._root.marks if self._is_dead_mark(mark)]
        swept_names += dead
        if delete:
            self._storage.delete_many(dead)
        return swept + sorted(swept_names)

    def _is_dead_intent(self, step: int, attempt: str) -> bool:
        """Whether an announced attempt can no longer be committed: its archive, which is written first, is gone."""
        manifest = self._root.find(step)
        if manifest is not None and manifest.attempt == attempt:
            return False  # it is committed, and its rollback is unfinished
        return not self._storage.exists(self._root.attempt_path(step, attempt))

    def _is_dead_mark(self, mark: Mark) -> bool:
        """Whether the commit of a mark is gone. A mark is always put after its commit."""
        try:
            manifest = self._root.read(mark.step, explain=False)[0]
        except NotCommittedError:
            return True
        except CheckpointError:
            return False
        return manifest.attempt != mark.attempt

    def delete_replaced(self, step: int, replaced: Manifest | None) -> None:
        """Delete the archives of a commit that was overwritten, except archives that later steps borrow."""
        borrowed = self._borrowed_names(step) if replaced else set()
        names = [name for name in (replaced.own_names if replaced else ()) if name not in borrowed]
        self._storage.delete_many([f"{self._root.folder(step)}/{name}" for name in names])

    def delete(
        self,
        steps: Mapping[int, StepFolder],
        needed: Callable[[Collection[int]], Collection[int]],
        *,
        whole_folder: bool = False,
    ) -> list[int]:
        """Delete steps, all manifests first. Returns the deleted steps, ascending.

        After the manifests are deleted, `needed` returns the steps that must stay all the same; their manifests are put
        back. If it raises, all manifests are put back. Files of other programs are deleted only with `whole_folder`.
        """
        if not steps:
            return []
        self._swept, was_swept = False, self._swept  # if this fails, the next save sweeps the archives
        for step in sorted(steps, reverse=True):  # a step may borrow from older ones
            self._root.note_deleted(step)
            self._storage.delete(self._root.manifest_path(step))
        stay: Collection[int] = steps
        try:
            stay = needed(steps)
        finally:
            for step in stay:
                if (text := steps[step].text) is not None:
                    with suppress(FileExistsError):  # the step was committed anew
                        self._storage.put_new(self._root.manifest_path(step), text)
        gone = sorted(steps.keys() - {*stay})
        for step in reversed(gone):
            self._delete_rest(step, steps[step], whole_folder=whole_folder)
        self._storage.delete_many([mark.name for mark in self._root.marks if mark.step in gone])
        self._swept = was_swept
        return gone

    def _delete_rest(self, step: int, inside: StepFolder, *, whole_folder: bool) -> None:
        folder = self._root.folder(step)
        own = {name for name in inside.names if name in inside.named or is_retired_name(name)}
        self._storage.delete_many([f"{folder}/{name}" for name in sorted(own)])
        foreign = []
        for name in inside.names:
            if name in own:
                continue
            if is_beside(name) or is_receipt_folder(name):  # left by earlier attempts
                self._storage.delete_all(f"{folder}/{name}")
            elif name != MANIFEST and not is_library_name(name):
                foreign.append(name)  # library files left here may belong to a living writer: the sweep checks
        if whole_folder:
            others = [f"{folder}/{name}" for name in foreign]
            look_all(self._storage, [partial(self._storage.delete_all, path) for path in others])
            self._storage.remove_if_empty(folder)
        elif foreign:
            self._root.warn_once(
                "foreign",
                f"{self._storage.locate(folder)}: step {step} was deleted by keep=, but files that "
                f"async_ckpt did not write, such as {foreign[0]!r}, are kept. The same applies to later steps; "
                "delete them yourself, or pass Keep(whole_folder=True)",
            )

    def _sweep_folder(self, step: int | None, *, newest: int | None, swept: list[str], delete: bool) -> None:
        """Sweep the folder of a step, or the root itself."""
        folder = "" if step is None else self._root.folder(step)
        names = self._storage.names(folder)
        decided = step is None or (newest is not None and step <= newest)
        attempts = _of_ranks(names)

        def dead_of(candidates: Iterable[str], *, delete: bool) -> list[str]:
            """The candidates whose writers are dead. Locks of ranks on other machines may not be visible here."""
            of_ranks = {n for n in candidates if self._has_ranks or attempt_of(n) in attempts}
            if self._storage.locks_tell:
                of_ranks = set()
            sweep = partial(self._storage.sweep, folder, delete=delete, decided=decided)
            alone = [n for n in candidates if n not in of_ranks]
            return [*sweep(alone), *sweep(sorted(of_ranks), of_ranks=True)]

        temps = dead_of([n for n in names if re.fullmatch(_TEMP, n)], delete=delete)
        archives = [n for n in names if re.fullmatch(_ARCHIVE, n)]
        dead: list[str] = []
        known = None if step is None else self._root.known.get(step)
        if known is not None and {*archives} == {name for name in known.own_names if re.fullmatch(_ARCHIVE, name)}:
            archives = []  # all of them are committed
        if step is not None and archives and {*archives} != self.read_folder(step).named:
            dead = dead_of(archives, delete=False)
            # Read again after the check of the locks: a writer releases its lock only after it has put its manifest.
            named = self.read_folder(step).named | (self._borrowed_names(step) if dead else set())
            dead = [name for name in dead if name not in named]
        if delete:
            self._storage.delete_many([f"{folder}/{name}" for name in dead])
        if step is None:  # claims of starts of several ranks
            claims = list(filter(is_claim, names))
            dead += self._storage.sweep("", claims, delete=delete, decided=True, of_ranks=True)
        elif decided:
            dead += self._sweep_beside(folder, names, {*dead}, delete=delete)
        if delete and step is not None and len(temps) == len(names):
            # A writer was killed before it wrote an archive.
            self._storage.remove_if_empty(folder)
        swept += [f"{folder}/{name}" if folder else name for name in (*temps, *dead)]

    def _sweep_beside(self, folder: str, names: Iterable[str], dead: set[str], *, delete: bool) -> list[str]:
        """Sweep the other objects of attempts of several ranks whose archives are all gone."""
        living = {attempt_of(n) for n in names if re.fullmatch(_ARCHIVE, n) and n not in dead}
        orphans = [n for n in names if is_beside(n) and attempt_of(n) not in living]
        swept = self._storage.sweep(folder, orphans, delete=delete, decided=True, of_ranks=True)
        attempts = {attempt_of(n) for n in (*swept, *dead)} - living
        for name in filter(is_receipt_folder, names):
            path = f"{folder}/{name}"
            if attempt_of(name) in attempts:
                if delete:
                    self._storage.delete_all(path)
            elif attempt_of(name) not in living:  # its ranks were killed before any of them began an archive
                receipts = self._storage.names(path)
                old = self._storage.sweep(path, receipts, delete=delete, decided=True, of_ranks=True)
                swept += [f"{name}/{receipt}" for receipt in old]
                if delete:
                    self._storage.remove_if_empty(path)
        return swept

    def sweep_once(self, *, has_ranks: bool = False) -> None:
        """Sweep once per process, which cleans up its own failures. With several ranks, only old leftovers."""
        if not self._swept:
            self._swept, self._has_ranks = True, has_ranks
            try:
                self.sweep()
            except BaseException:
                self._swept = False
                raise
