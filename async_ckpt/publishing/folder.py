"""Weights in a folder that engines load, and that follow versions.

In: the indices of versions, and a storage with their files. Out: a folder of Hugging Face with the newest of these.
Knows nothing of: which versions there are.

A delta is applied in place, by memory maps. The files of an anchor are made in a folder within, on the same disk, and renamed to
their places when all of them are there and compared. No other files are touched than those that are noted as put there by versions,
and of these none whose bytes are also those of a file elsewhere, by a link of either kind.
"""

from __future__ import annotations

import json
import logging
import mmap
import os
import threading
from collections.abc import Collection, Iterator, Mapping, Set
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import torch

from ..around.export import is_left_out
from ..around.hub import Weights
from ..around.shards import MAX_SHARD_BYTES, index_of, shards_of
from ..errors import StorageUnavailableError
from ..format import safetensors
from ..format.delta import INDEX, checksum, identity_of, new_hash, structure_of
from ..host.waits import ENDS_THE_CALL, Wait
from ..state.dtypes import dtype_name
from ..storage.confined import ConfinedFolder, read_at, write_at
from ..storage.disk import free_bytes_at, full, preallocate, translated
from .difference import checksum_of
from .notes import FOLDER, LOCK, NEW, OLD, SINGLE, NotedFiles, Notes
from .replica import Damaged, other_model
from .source import Anchor, State, TensorPart, VersionSource

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_POLL_SECONDS: Final = 0.05
# In folders that are otherwise empty.
_OF_DISKS: Final = frozenset({"lost+found"})
_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")
_log: Final = logging.getLogger("async_ckpt")


class FolderReplica:
    """A folder of Hugging Face on this machine, which nobody else changes.

    Its notes say which version it holds, and in which files. One caller at a time, inside `locked`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder = Path(os.path.realpath(folder))  # it may be a link, or where a disk is mounted
        self._files = ConfinedFolder(folder)
        self._notes = Notes(self._files)
        self._state: State | None = None
        self._there = NotedFiles({}, (), "")  # what versions have put there
        with translated(folder):
            is_folder, is_there = folder.is_dir(), os.path.lexists(folder)
            names = {*os.listdir(folder)} - _OF_DISKS if is_folder else set()
        if is_there and not is_folder:
            raise NotADirectoryError(f"{folder} is a file; give a folder to pull into")
        if names and FOLDER not in names:
            raise FileExistsError(
                f"{folder} has files that no version put there; give a folder that is new or empty"
            )

    @contextmanager
    def locked(self) -> Iterator[None]:
        with translated(self.folder):
            os.makedirs(self.folder, exist_ok=True)
        fd = self._files.open(LOCK, os.O_CREAT | os.O_RDWR, make=True)
        try:
            wait = Wait("", ENDS_THE_CALL)
            while not self._is_taken(fd):
                wait.goes_on(lambda: f"another pull into {self.folder}")
                threading.Event().wait(_POLL_SECONDS)
            with suppress(StorageUnavailableError):  # what could not be removed the last time
                self._clear()
            self._there = self._put_there()
            self._state = self._noted()
            yield
        finally:
            with suppress(OSError):  # it was opened for its lock, and nothing was written
                os.close(fd)

    def _is_taken(self, fd: int) -> bool:
        with translated(self.folder):
            return _try_lock(fd)

    @property
    def state(self) -> State | None:
        return self._state

    def _noted(self) -> State | None:
        """The state in its notes, if these can be believed."""
        noted = self._notes.noted()
        try:
            if noted is None:
                return None
            if noted.state is None:
                return self._marked(noted.version)
            if not self._has_all_files():
                return None
            if noted.boot == _boot() != "":
                return noted.state
            if self._checksums() != noted.state.checksums:
                return None
        except (Damaged, StorageUnavailableError):
            return None
        self.note(noted.state)
        return noted.state

    def _marked(self, version: int) -> State | None:
        """The weights that are there, which another receiver says to be a version."""
        found, structure = self._checksums(), self._structure()
        return State(version, identity_of(found), structure, found, is_marked=True) if structure else None

    def _checksums(self) -> dict[str, str]:
        with self._bytes(None) as found:
            return {name: checksum(data) for name, data in found.items()}

    def _has_all_files(self) -> bool:
        """Whether they are there still, and the weights as long as they were. What the user has made of a config is his."""
        there = self._there
        return bool(there.sizes) and all(
            self._files.size(name) == size if name in there.weights else self._files.stat(name) is not None
            for name, size in there.sizes.items()
        )

    def _put_there(self) -> NotedFiles:
        """The files that versions have put there; of a folder that another receiver has filled, its weights."""
        noted, files = self._notes.noted(), self._notes.files()
        if files.weights and (noted is None or noted.state is not None):
            return files
        others = self._notes.files_of_another()
        return NotedFiles({**files.sizes, **others.sizes}, others.weights, "")

    def _structure(self) -> str:
        """The names and kinds of the tensors that are there, or were before a pull that was killed; empty where nobody can tell."""
        if self._there.structure:
            return self._there.structure
        tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
        try:
            for file in self._there.weights:
                fd = self._files.open(file, os.O_RDONLY)
                try:
                    table, _ = _header(fd)
                finally:
                    os.close(fd)
                kinds = [safetensors.loaded_as(code, shape) for code, shape in table.kinds]
                tensors |= {
                    name: (kinds[row[0]][0], tuple(kinds[row[0]][1])) for name, row in table.rows.items()
                }
        except (OSError, ValueError, StorageUnavailableError):
            return ""
        return structure_of((name, *told) for name, told in tensors.items()) if tensors else ""

    def seed(self, anchor: Anchor) -> int:
        self._refuse_other_model(anchor)
        with self._renewed(anchor.num_bytes):
            num_bytes = self._copy_others(anchor.source)
            self._take_over(anchor.source.index.tensor_files, self._copy_weights(anchor))
        return num_bytes + anchor.num_bytes

    def _refuse_other_model(self, anchor: Anchor) -> None:
        """Raises StateMismatchError. A version that a Publisher has made is believed where nobody knows what was here."""
        state = self._state
        if state is not None and state.structure != anchor.structure:
            raise other_model(anchor.source.where, anchor.tensors.keys() - state.checksums.keys())
        if (
            state is None
            and not anchor.source.index.is_sealed
            and self._structure() not in ("", anchor.structure)
        ):
            raise other_model(anchor.source.where, ())

    def become(
        self, tensors: Mapping[str, torch.Tensor], version: int, identity: str, beside: Mapping[str, bytes]
    ) -> None:
        """Have these weights and files instead of its own."""
        structure = structure_of((n, dtype_name(t.dtype), tuple(t.shape)) for n, t in tensors.items())
        if self._state is not None and self._state.structure != structure:
            raise other_model(f"version {version}", tensors.keys() - self._state.checksums.keys())
        shards = shards_of(Weights("model", dict(tensors), {}, {}, dict), MAX_SHARD_BYTES)
        with self._renewed(sum(shard.num_bytes for shard in shards)):
            for name, data in beside.items():
                self._files.put(f"{NEW}/{name}", [data])
            for shard in shards:
                self._files.put(f"{NEW}/{shard.name}", (view for _, view in shard.pieces()))
            if len(shards) > 1:
                self._files.put(f"{NEW}/{INDEX}", [index_of(shards)])
            checksums = {name: checksum_of(tensor) for name, tensor in tensors.items()}
            state = State(version, identity, structure, checksums)
            self._take_over([shard.name for shard in shards], state)

    @contextmanager
    def _renewed(self, num_bytes: int) -> Iterator[None]:
        """While the files of another version are made, and take over."""
        free = free_bytes_at(self.folder)
        if free is not None and free < num_bytes:
            raise full(self.folder, num_bytes, free)
        try:
            self._clear()
            yield
        finally:
            with suppress(StorageUnavailableError):
                self._clear()

    def _clear(self) -> None:
        for inner in (NEW, OLD):
            self._files.delete_all(inner)

    def _take_over(self, weights: Collection[str], state: State) -> None:
        """Put what is new in the place of the files of the version before; each at once. After an error that one is there again."""
        before, known = self._state, self._there
        sizes = self._files.sizes(NEW)
        self._look_for_decoys(sizes.keys() | known.sizes.keys())
        new = NotedFiles(sizes, tuple(weights), state.structure)
        self.note(None)
        self._notes.note_files(new._replace(sizes={**known.sizes, **sizes}))
        aside: list[str] = []
        put: list[str] = []
        try:
            for name in sorted(known.sizes.keys() | sizes.keys()):
                if self._files.stat(name) is not None:
                    self._set_aside(name)
                    aside.append(name)
                if name in sizes:
                    self._files.move(f"{NEW}/{name}", name)
                    put.append(name)
                else:
                    self._files.delete(name)
            self._notes.note_files(new)
            self._there = new
            self.note(state)
        except BaseException:
            for name in put:
                self._files.delete(name)
            for name in aside:
                self._files.move(f"{OLD}/{name}", name)
            self._notes.note_files(known)
            self._there = known
            self.note(before)
            raise

    def _set_aside(self, name: str) -> None:
        """Keep a file until what takes its place is there; where files can have two names, it stays meanwhile."""
        if not self._files.link(name, f"{OLD}/{name}"):
            self._files.move(name, f"{OLD}/{name}")

    def _look_for_decoys(self, ours: Collection[str]) -> None:
        """Raises StorageUnavailableError for a file of the user's that is loaded instead of a version, and warns of others that
        may be.
        """
        for name in {SINGLE, INDEX} - {*ours}:
            if self._files.stat(name) is not None:
                raise StorageUnavailableError(
                    f"{self.folder / name} was not put there by a version, and would be loaded instead of one; move it away",
                    path=str(self.folder / name),
                )
        with translated(self.folder):
            beside = [n for n in os.listdir(self.folder) if n.endswith(".safetensors") and n not in ours]
        if beside:
            _log.warning(
                "%s has weights that no version put there, such as %s; engines that load every file would load these too",
                self.folder,
                min(beside),
            )

    def _copy_others(self, source: VersionSource) -> int:
        """Config, tokenizer and the like; and an index, where several files have the weights."""
        num_bytes = 0
        for name in source.other_files():
            if source.index.is_sealed or not is_left_out(name):  # weights, which deltas would not change
                data = source.read(name)
                self._files.put(f"{NEW}/{name}", [data])
                num_bytes += len(data)
        if source.index.tensor_files != [SINGLE]:
            plain = {"metadata": {}, "weight_map": dict(source.index.files)}
            self._files.put(f"{NEW}/{INDEX}", [(json.dumps(plain, indent=2, sort_keys=True) + "\n").encode()])
        return num_bytes

    def _copy_weights(self, anchor: Anchor) -> State:
        begins: dict[str, int] = {}
        for where in anchor.tensors.values():
            begins[where.file] = min(where.begin, begins.get(where.file, where.begin))
        files: dict[str, int] = {}
        try:
            for name in anchor.source.index.tensor_files:
                inner = f"{NEW}/{name}"
                with translated(self.folder / inner), anchor.source.open(name) as reader:
                    fd = files[name] = self._files.open(inner, os.O_CREAT | os.O_EXCL | os.O_RDWR, make=True)
                    preallocate(fd, reader.num_bytes, self.folder / inner)
                    head = memoryview(bytearray(begins.get(name, reader.num_bytes)))
                    anchor.source.fill(reader, name, 0, head)
                    write_at(fd, head, 0)

            def put(file: str, at: int, data: memoryview, parts: list[TensorPart]) -> None:  # noqa: ARG001
                with translated(self.folder / NEW / file):
                    write_at(files[file], data, at)

            return anchor.read(put)
        finally:
            for name, fd in files.items():
                with translated(self.folder / NEW / name):
                    os.close(fd)

    @contextmanager
    def regions(self, names: Collection[str]) -> Iterator[Mapping[str, torch.Tensor]]:
        """Raises Damaged."""
        nothing = torch.empty(0, dtype=torch.uint8)
        self._look_for_decoys(self._there.sizes)
        with self._bytes(names) as parts:
            found = {n: torch.frombuffer(p, dtype=torch.uint8) if p else nothing for n, p in parts.items()}
            try:
                yield found
            finally:
                found.clear()

    def checksums(self, names: Set[str], checksum_format: str) -> dict[str, str]:
        """Raises Damaged."""
        found: dict[str, str] = {}
        with self._bytes(None) as parts:
            for name in parts.keys() & names:
                made = new_hash(checksum_format)
                made.update(parts[name])
                found[name] = made.hexdigest()
        return found

    @contextmanager
    def _bytes(self, names: Collection[str] | None) -> Iterator[dict[str, memoryview]]:
        """The bytes of these tensors, to be changed in place; with None, of all, to be read. Raises Damaged."""
        found: dict[str, memoryview] = {}
        maps: list[mmap.mmap] = []
        try:
            for file in self._there.weights:
                try:
                    with translated(self.folder / file, passing=(FileNotFoundError,)):
                        parts = self._parts_of(file, names, maps)
                except (FileNotFoundError, ValueError) as error:
                    path = str(self.folder / file)
                    raise Damaged(f"{path} is damaged ({error})", path=path) from error
                if parts.keys() & found.keys():
                    raise Damaged(f"{self.folder}: two files have the same tensor", path=str(self.folder))
                found |= parts
            yield found
        finally:
            found.clear()
            for mapped in maps:
                with suppress(BufferError):  # a traceback looks at it still, and closes it when it goes
                    mapped.close()

    def _parts_of(
        self, file: str, names: Collection[str] | None, maps: list[mmap.mmap]
    ) -> dict[str, memoryview]:
        """The bytes of tensors in a file, which is mapped to memory for them. Raises ValueError for what is no such file."""
        is_read, is_own = names is None, False
        while True:
            fd = self._files.open(file, os.O_RDONLY if is_read else os.O_RDWR)
            try:
                table, at = _header(fd)
                rows = {name: row for name, row in table.rows.items() if names is None or name in names}
                if not rows:
                    return {}
                if is_read or is_own or os.fstat(fd).st_nlink == 1:
                    maps.append(mmap.mmap(fd, 0, access=mmap.ACCESS_READ if is_read else mmap.ACCESS_WRITE))
                    break
            finally:
                os.close(fd)
            self._files.part(file, by=f"{NEW}/{file}")
            is_own = True
        whole = memoryview(maps[-1])
        return {name: whole[at + begin : at + end] for name, (_, begin, end) in rows.items()}

    def note(self, state: State | None) -> None:
        self._notes.note(state, _boot())
        self._state = state


def _try_lock(fd: int) -> bool:
    if fcntl is None:
        return True
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _header(fd: int) -> tuple[safetensors.HeaderTable, int]:
    """The tensors in a file, and where its data begins. Raises ValueError for what is no safetensors file."""
    num_bytes = os.fstat(fd).st_size
    if num_bytes < 8:
        raise ValueError("it is cut off")
    length = memoryview(bytearray(8))
    read_at(fd, length, 0)
    begin = 8 + int.from_bytes(length, "little")
    if begin > min(num_bytes, 8 + safetensors.MAX_HEADER_BYTES):
        raise ValueError("it is cut off, or no safetensors file")
    head = bytearray(begin)
    read_at(fd, memoryview(head), 0)
    table = safetensors.parse_table(bytes(head))
    safetensors.refuse_unwritable((*table.rows, *table.metadata, *table.metadata.values()))
    safetensors.refuse_gaps(table, num_bytes - begin)
    return table, begin


def _boot() -> str:
    """The id of the machine's current start: files that were written since are there, synced or not. Empty where nobody can tell."""
    try:
        return _BOOT.read_text().strip()
    except OSError:
        return ""
