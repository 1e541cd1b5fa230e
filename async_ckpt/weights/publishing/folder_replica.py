"""Weights in a folder that engines load, and to which versions are applied.

In: the indices of versions, and a storage with their files. Out: a Hugging Face folder with one of these versions.
Knows nothing of: which versions exist.

A delta is applied in place, through memory maps. The files of an anchor are written to an inner folder on the same
disk, and renamed into place after all of them are complete and compared. Only files that the notes list as installed by
versions are changed. A file with another hard link is copied first, and the target of a symbolic link is never changed.
"""

from __future__ import annotations

import json
import logging
import mmap
import os
import threading
from collections.abc import Collection, Iterator, Mapping, Set
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Final

import torch

from ...errors import NotAFolderError, OccupiedError, StorageUnavailableError
from ...plumbing import device, disk, hf_shards, hf_weights, leaf_names, safetensors, waits
from ..confined_files import ConfinedFolder, write_at
from ..delta import INDEX, checksum, identity_of, new_hash, structure_of
from .difference import checksum_of
from .folder_notes import FOLDER, LOCK, NEW, OLD, SINGLE, InstalledFiles, Notes
from .live_weights import DamagedReplicaError, other_model
from .of_ranks.pieces import PiecedTensor
from .version_files import Anchor, VersionSource, WeightsState, header_in

_POLL_SECONDS: Final = 0.05
# Present in the root of an empty disk.
_OF_DISKS: Final = frozenset({"lost+found"})
# Files that engines load instead of the files of a version.
_DECOYS: Final = frozenset({SINGLE, INDEX, hf_weights.ADAPTER_CONFIG})
_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")
_log: Final = logging.getLogger("async_ckpt")


class FolderReplica:
    """A Hugging Face folder on this machine that versions are applied to. Its notes record the version in it.

    A `Subscriber` creates one for each pull. One caller at a time uses it, inside `locked`, which excludes other
    processes.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder = Path(os.path.realpath(folder))  # it may be a link, or where a disk is mounted
        self._files = ConfinedFolder(folder)
        self._notes = Notes(self._files)
        self.state: WeightsState | None = None
        self._installed = InstalledFiles({}, (), "")  # the files that versions have installed
        with disk.translated(folder):
            # In this order, because another process that pulls here may create the folder at this moment.
            exists, is_folder = os.path.lexists(folder), folder.is_dir()
            names = {*os.listdir(folder)} - _OF_DISKS if is_folder else set()
        if exists and not is_folder:
            disk.refuse_dangling(folder)
            raise NotAFolderError(f"{folder} is a file; give a folder to pull into")
        if names and FOLDER not in names:
            raise OccupiedError(f"{folder} has files that belong to no version; give a new or empty folder")

    @contextmanager
    def locked(self) -> Iterator[None]:
        with self._files.lock_file(LOCK) as fd:
            wait = waits.Wait("", waits.ENDS_THE_CALL)
            while not self._files.try_lock(fd, alone=True):
                wait.goes_on(lambda: f"another pull into {self.folder}")
                threading.Event().wait(_POLL_SECONDS)
            with suppress(StorageUnavailableError):  # leftovers that the previous pull could not remove
                self._clear()
            self._installed = self._installed_files()
            self.state = self._known_state()
            yield

    def _known_state(self) -> WeightsState | None:
        """The state in the marker; None if there is no marker, or the files do not match it."""
        marker = self._notes.marker()
        try:
            if marker is None:
                return None
            if marker.state is None:
                return self._state_of_another(marker.version)
            if not self._has_all_files():
                return None
            if marker.boot == boot_id() != "" and marker.stamps == self._stamps():
                return marker.state
            if self._checksums() != marker.state.checksums:
                return None
        except (DamagedReplicaError, StorageUnavailableError):
            return None
        self.note(marker.state)
        return marker.state

    def _state_of_another(self, version: int) -> WeightsState | None:
        """The state of weights that another receiver has marked as this version."""
        checksums, structure = self._checksums(), self._structure()
        if not structure:
            return None
        return WeightsState(version, identity_of(checksums), structure, checksums, is_marked=True)

    def _checksums(self) -> dict[str, str]:
        return {name: checksum(data) for name, data in self._bytes(None).items()}

    def _has_all_files(self) -> bool:
        """Whether all files still exist, and files of weights have their size. The user may have changed a config."""
        installed = self._installed
        return bool(installed.sizes) and all(
            self._files.size(name) == size if name in installed.weights else self._files.stat(name) is not None
            for name, size in installed.sizes.items()
        )

    def _installed_files(self) -> InstalledFiles:
        """The files that versions have installed; if another receiver has filled the folder, its weights too."""
        marker, files = self._notes.marker(), self._notes.files()
        if files.weights and (marker is None or marker.state is not None):
            return files
        foreign = self._notes.foreign_files()
        return InstalledFiles({**files.sizes, **foreign.sizes}, foreign.weights, "")

    def _structure(self) -> str:
        """The structure of the weights here, or of those before a killed pull; empty if it cannot be read."""
        if self._installed.structure:
            return self._installed.structure
        tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
        try:
            for file in self._installed.weights:
                table, _ = self._header(file)
                kinds = [safetensors.loaded_as(code, shape) for code, shape in table.kinds]
                tensors |= {name: (kinds[row[0]][0], tuple(kinds[row[0]][1])) for name, row in table.rows.items()}
        except (OSError, ValueError, StorageUnavailableError):
            return ""
        return structure_of((name, *kind) for name, kind in tensors.items()) if tensors else ""

    def seed(self, anchor: Anchor) -> int:
        self._refuse_other_model(anchor)
        with self._cleared(anchor.num_bytes):
            num_bytes = self._copy_others(anchor.source)
            self._take_over(anchor.source.index.tensor_files, self._copy_weights(anchor))
        return num_bytes + anchor.num_bytes

    def _refuse_other_model(self, anchor: Anchor) -> None:
        """Raises StateMismatchError for another model. If the model here is unknown, accepts a Publisher's version."""
        state = self.state
        if state is not None and state.structure != anchor.structure:
            raise other_model(anchor.source.path, anchor.tensors.keys() - state.checksums.keys())
        if state is None and not anchor.source.index.is_sealed and self._structure() not in ("", anchor.structure):
            raise other_model(anchor.source.path, ())

    def become(
        self,
        tensors: Mapping[str, PiecedTensor],
        version: int,
        identity: str,
        other_files: Mapping[str, bytes],
    ) -> None:
        """Replace the weights and files here. They are an adapter's if the config of an adapter is among the files."""
        structure = structure_of((n, leaf_names.dtype_name(t.dtype), t.shape) for n, t in tensors.items())
        if self.state is not None and self.state.structure != structure:
            raise other_model(f"version {version}", tensors.keys() - self.state.checksums.keys())
        stem = "adapter_model" if hf_weights.ADAPTER_CONFIG in other_files else "model"
        empty = {name: torch.empty(t.shape, dtype=t.dtype, device="meta") for name, t in tensors.items()}
        shards = hf_shards.shards_of(hf_weights.Weights(stem, empty, {}, {}, dict), hf_shards.MAX_SHARD_BYTES)
        checksums: dict[str, str] = {}

        def pieces(shard: hf_shards.Shard) -> Iterator[memoryview]:
            """The bytes of a file, with one tensor at a time in memory."""
            yield memoryview(shard.head)
            for name in shard.tensors:
                whole = tensors[name].whole()
                checksums[name] = checksum_of(whole)
                yield from (hf_shards.view_of(block) for _, block in device.dense_blocks(whole, 0, whole.nbytes))

        with self._cleared(sum(shard.num_bytes for shard in shards)):
            for name, data in other_files.items():
                self._files.put(f"{NEW}/{name}", [data])
            for shard in shards:
                self._files.put(f"{NEW}/{shard.name}", pieces(shard))
            if len(shards) > 1:
                self._files.put(f"{NEW}/{INDEX}", [hf_shards.index_of(shards)])
            state = WeightsState(version, identity, structure, checksums)
            self._take_over([shard.name for shard in shards], state)

    @contextmanager
    def _cleared(self, num_bytes: int) -> Iterator[None]:
        """Clear the folders for new and old files, before and after a version is written."""
        free = disk.free_bytes_at(self.folder)
        if free is not None and free < num_bytes:
            raise disk.full(self.folder, num_bytes, free)
        try:
            self._clear()
            yield
        finally:
            with suppress(StorageUnavailableError):
                self._clear()

    def _clear(self) -> None:
        for inner in (NEW, OLD):
            self._files.delete_all(inner)

    def _take_over(self, weights: Collection[str], state: WeightsState) -> None:
        """Move the new files into place, each atomically. After an error, the previous version's files are restored."""
        old_state, old = self.state, self._installed
        sizes = self._files.sizes(NEW)
        self._refuse_decoys(sizes.keys() | old.sizes.keys())
        new = InstalledFiles(sizes, tuple(weights), state.structure)
        self.note(None)
        with ExitStack() as undo:
            undo.callback(self._install, old, old_state)
            self._notes.record_files(new._replace(sizes={**old.sizes, **sizes}))
            for name in sorted(old.sizes.keys() | sizes.keys()):
                if self._files.stat(name) is not None:
                    self._set_aside(name)
                    undo.callback(self._files.move, f"{OLD}/{name}", name)
                if name in sizes:
                    self._files.move(f"{NEW}/{name}", name)
                    undo.callback(self._files.delete, name)
                else:
                    self._files.delete(name)
            self._install(new, state)
            undo.pop_all()

    def _install(self, files: InstalledFiles, state: WeightsState | None) -> None:
        """Record which files versions have installed, and which weights are here."""
        self._notes.record_files(files)
        self._installed = files
        self.note(state)

    def _set_aside(self, name: str) -> None:
        """Keep a file in OLD until its replacement is in place. If hard links work, it also stays visible."""
        if not self._files.link(name, f"{OLD}/{name}"):
            self._files.move(name, f"{OLD}/{name}")

    def _refuse_decoys(self, ours: Collection[str]) -> None:
        """Raise StorageUnavailableError for a user's file that engines would load; warn of other files of weights."""
        for name in _DECOYS - {*ours} if hf_weights.ADAPTER_FILE not in ours else ():
            if self._files.stat(name) is not None:
                raise StorageUnavailableError(
                    f"{self.folder / name} does not belong to a version, and engines would load it instead of one; "
                    "move it away",
                    path=str(self.folder / name),
                )
        with disk.translated(self.folder):
            others = [n for n in os.listdir(self.folder) if n.endswith(".safetensors") and n not in ours]
        if others:
            _log.warning(
                "%s has weights that belong to no version, such as %s; engines that load every file would load "
                "these, too",
                self.folder,
                min(others),
            )

    def _copy_others(self, source: VersionSource) -> int:
        """Copy config, tokenizer and other small files, and write an index if there are several files of weights."""
        num_bytes = 0
        for name in source.other_files():
            if source.index.is_sealed or not hf_weights.is_left_out(name):  # files of weights would miss the deltas
                data = source.read(name)
                self._files.put(f"{NEW}/{name}", [data])
                num_bytes += len(data)
        if source.index.tensor_files not in ([SINGLE], [hf_weights.ADAPTER_FILE]):
            plain = {"metadata": {}, "weight_map": dict(source.index.files)}
            self._files.put(f"{NEW}/{INDEX}", [(json.dumps(plain, indent=2, sort_keys=True) + "\n").encode()])
        return num_bytes

    def _copy_weights(self, anchor: Anchor) -> WeightsState:
        begins: dict[str, int] = {}
        for location in anchor.tensors.values():
            begins[location.file] = min(location.begin, begins.get(location.file, location.begin))
        files: dict[str, int] = {}
        try:
            for name in anchor.source.index.tensor_files:
                inner = f"{NEW}/{name}"
                with disk.translated(self.folder / inner), anchor.source.open(name) as reader:
                    fd = files[name] = self._files.open(inner, os.O_CREAT | os.O_EXCL | os.O_RDWR, make=True)
                    disk.preallocate(fd, reader.num_bytes, self.folder / inner)
                    head = memoryview(bytearray(begins.get(name, reader.num_bytes)))
                    anchor.source.fill(reader, name, 0, head)
                    write_at(fd, head, 0)

            def put(name: str, at: int, data: memoryview) -> None:
                location = anchor.tensors[name]
                with disk.translated(self.folder / NEW / location.file):
                    write_at(files[location.file], data, location.begin + at)

            return anchor.read(put)
        finally:
            for name, fd in files.items():
                with disk.translated(self.folder / NEW / name):
                    os.close(fd)

    @contextmanager
    def regions(self, names: Collection[str]) -> Iterator[Mapping[str, torch.Tensor]]:
        """Raises DamagedReplicaError."""
        empty = torch.empty(0, dtype=torch.uint8)
        self._refuse_decoys(self._installed.sizes)
        regions = {n: torch.frombuffer(p, dtype=torch.uint8) if p else empty for n, p in self._bytes(names).items()}
        try:
            yield regions
        finally:
            regions.clear()  # unmaps the files

    def checksums(self, names: Set[str], checksum_format: str) -> dict[str, str]:
        """Raises DamagedReplicaError."""
        checksums: dict[str, str] = {}
        parts = self._bytes(None)
        for name in parts.keys() & names:
            digest = new_hash(checksum_format)
            digest.update(parts[name])
            checksums[name] = digest.hexdigest()
        return checksums

    def _bytes(self, names: Collection[str] | None) -> dict[str, memoryview]:
        """The bytes of the named tensors, writable; with None, those of all tensors, read-only.

        A file stays mapped as long as one of its tensors is referenced. Raises DamagedReplicaError.
        """
        parts: dict[str, memoryview] = {}
        for file in self._installed.weights:
            try:
                with disk.translated(self.folder / file, passing=(FileNotFoundError,)):
                    of_file = self._bytes_in(file, names)
            except (FileNotFoundError, ValueError) as error:
                path = str(self.folder / file)
                raise DamagedReplicaError(f"{path} is damaged ({error})", path=path) from error
            if of_file.keys() & parts.keys():
                raise DamagedReplicaError(f"{self.folder}: two files have the same tensor", path=str(self.folder))
            parts |= of_file
        return parts

    def _bytes_in(self, file: str, names: Collection[str] | None) -> dict[str, memoryview]:
        """The bytes of tensors in a file. Raises ValueError if it is not a safetensors file."""
        table, at = self._header(file)
        rows = {name: row for name, row in table.rows.items() if names is None or name in names}
        if not rows:
            return {}
        status = self._files.stat(file)
        if names is not None and status is not None and status.st_nlink > 1:
            self._files.part(file, by=f"{NEW}/{file}")
        fd = self._files.open(file, os.O_RDONLY if names is None else os.O_RDWR)
        try:
            mapped = mmap.mmap(fd, 0, access=mmap.ACCESS_READ if names is None else mmap.ACCESS_WRITE)
        finally:
            disk.close_quietly(fd)
        whole = memoryview(mapped)
        return {name: whole[at + begin : at + end] for name, (_, begin, end) in rows.items()}

    def _header(self, file: str) -> tuple[safetensors.HeaderTable, int]:
        """The header of a file, and the offset of its tensors. Raises ValueError if it is not a safetensors file."""
        with os.fdopen(self._files.open(file, os.O_RDONLY), "rb") as opened:
            head = opened.read(8)
            head += opened.read(min(int.from_bytes(head, "little"), safetensors.MAX_HEADER_BYTES))
            return header_in(memoryview(head), os.fstat(opened.fileno()).st_size)

    def note(self, state: WeightsState | None) -> None:
        self._notes.note(state, boot_id(), self._stamps())
        self.state = state

    def _stamps(self) -> dict[str, str]:
        """For each file of weights, a text that changes when the file is replaced or written."""
        stamps = {}
        for file in self._installed.weights:
            status = self._files.stat(file)
            if status is not None:
                stamps[file] = f"{status.st_ino} {status.st_mtime_ns} {status.st_size}"
        return stamps


def boot_id() -> str:
    """The id of the machine's current boot; empty if unknown. Files written since this boot exist, even unsynced."""
    try:
        return _BOOT.read_text().strip()
    except OSError:
        return ""
