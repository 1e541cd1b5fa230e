"""Weights in a folder that engines load, and that follow versions.

In: the indices of versions, and a storage with their files. Out: a folder of Hugging Face with the newest of these.
Knows nothing of: which versions there are.

A delta is applied in place, by memory maps. The files of an anchor are made in a folder within, on the same disk, and renamed to
their places when all of them are there and compared.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import shutil
import stat
import threading
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import torch

from ..around.hub import Weights
from ..around.shards import MAX_SHARD_BYTES, index_of, shards_of, view_of
from ..format import safetensors
from ..format.delta import INDEX, checksum, stays_inside, structure_of
from ..host.waiting import ENDS_THE_CALL, Wait
from ..state.dtypes import dtype_name
from ..storage.disk import free_bytes_at, full, preallocate, pwrite, remove_if_empty, translated
from ..storage.scratch import files_in
from .difference import checksum_of
from .replica import Damaged, other_model
from .source import Anchor, Source, State

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_POLL_SECONDS: Final = 0.05
# What other receivers of these versions use, too.
_SYNC: Final = ".weight_sync"
_STATE: Final = f"{_SYNC}/state.json"
_LOCK: Final = f"{_SYNC}/lock"
# And what only this one does.
_FILES: Final = f"{_SYNC}/files.json"
_NEW: Final = f"{_SYNC}/new"
_OLD: Final = f"{_SYNC}/old"
_WEIGHTS: Final = ("*.safetensors", "*.safetensors.index.json")
# In folders that are otherwise empty.
_OF_DISKS: Final = frozenset({"lost+found"})
_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")


class FolderReplica:
    """A folder of Hugging Face on this machine, which nobody else changes.

    A file in it says which version it holds, and is not there while that changes. Another one lists the files that versions have
    put there; all others are the user's. Nothing is synced: after a restart of the machine all bytes are compared with their
    checksums first.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder = folder.resolve()  # which may be a link, or where a disk is mounted
        self._state: State | None = None
        if folder.exists() and not folder.is_dir():
            raise NotADirectoryError(f"{folder} is a file; give a folder to pull into")
        if folder.is_dir() and not (folder / _SYNC).is_dir() and {*os.listdir(folder)} - _OF_DISKS:
            raise FileExistsError(
                f"{folder} has files that no version put there; give a folder that is new or empty"
            )

    @contextmanager
    def locked(self) -> Iterator[None]:
        if (self.folder / _SYNC).is_symlink():
            raise FileExistsError(
                f"{self.folder / _SYNC} is a link; make it a folder, or pull into another one"
            )
        with translated(self.folder):
            (self.folder / _SYNC).mkdir(parents=True, exist_ok=True)
            fd = os.open(self.folder / _LOCK, os.O_CREAT | os.O_RDWR, 0o666)
        try:
            wait = Wait("", ENDS_THE_CALL)
            while not _try_lock(fd):
                wait.goes_on(lambda: f"another pull into {self.folder}")
                threading.Event().wait(_POLL_SECONDS)
            self._state = self._noted()
            yield
        finally:
            os.close(fd)

    @property
    def state(self) -> State | None:
        return self._state

    def _noted(self) -> State | None:
        """What its note says, if that can be believed."""
        try:
            told = json.loads((self.folder / _STATE).read_bytes())
            state = State(int(told["version"]), told["identity"], told["structure"], dict(told["checksums"]))
        except (OSError, ValueError, KeyError, TypeError):
            return None  # there is none, or one of another receiver
        if not self._has_all_files():
            return None
        if told.get("boot") == _boot() != "":
            return state
        try:
            found = self._checksums()
        except (OSError, Damaged):
            return None
        if found != state.checksums:
            return None
        self.note(state)
        return state

    def _checksums(self) -> dict[str, str]:
        found: dict[str, str] = {}
        with self.regions(None) as regions:
            for name, region in regions.items():
                found[name] = checksum(view_of(region)) if len(region) else checksum(b"")
        return found

    def seed(self, anchor: Anchor) -> int:
        source, state = anchor.source, self._state
        if state is not None and state.structure != anchor.structure:
            raise other_model(source.where, anchor.tensors.keys() - state.checksums.keys())
        with self._renewed(anchor.num_bytes) as new:
            num_bytes = self._copy_others(source, new)
            self._take_over(new, self._copy_weights(anchor, new))
        return num_bytes + anchor.num_bytes

    def become(
        self, tensors: Mapping[str, torch.Tensor], version: int, identity: str, beside: Mapping[str, bytes]
    ) -> None:
        """Have these weights and files instead of its own."""
        structure = structure_of((n, dtype_name(t.dtype), tuple(t.shape)) for n, t in tensors.items())
        if self._state is not None and self._state.structure != structure:
            raise other_model(f"version {version}", tensors.keys() - self._state.checksums.keys())
        shards = shards_of(Weights("model", dict(tensors), {}, {}, dict), MAX_SHARD_BYTES)
        with self._renewed(sum(shard.num_bytes for shard in shards)) as new:
            for name, data in beside.items():
                (new / name).parent.mkdir(parents=True, exist_ok=True)
                (new / name).write_bytes(data)
            for shard in shards:
                with open(new / shard.name, "wb") as file:
                    file.writelines(view for _, view in shard.pieces())
            if len(shards) > 1:
                (new / INDEX).write_bytes(index_of(shards))
            checksums = {name: checksum_of(tensor) for name, tensor in tensors.items()}
            self._take_over(new, State(version, identity, structure, checksums))

    @contextmanager
    def _renewed(self, num_bytes: int) -> Iterator[Path]:
        """Where the files of another version are made, before they take over."""
        free = free_bytes_at(self.folder)
        if free is not None and free < num_bytes:
            raise full(self.folder, num_bytes, free)
        try:
            with translated(self.folder):
                self._clear()
                (self.folder / _NEW).mkdir()
                yield self.folder / _NEW
        finally:
            with suppress(OSError):
                self._clear()

    def _clear(self) -> None:
        for inner in (_NEW, _OLD):
            if (self.folder / inner).exists():
                shutil.rmtree(self.folder / inner)

    def _take_over(self, new: Path, state: State) -> None:
        """Put these files in the place of those of the version before; each at once. After an error that one is there again."""
        before, names = self._state, {path.relative_to(new).as_posix() for path in files_in(new)}
        known = self._files()
        gone = {*known} or {path.name for pattern in _WEIGHTS for path in self.folder.glob(pattern)}
        for name in gone | names:
            _refuse_links_above(self.folder, name)
        self.note(None)
        _write(self.folder / _FILES, known | dict.fromkeys(names, 0))
        aside: list[str] = []
        put: list[str] = []
        try:
            for name in sorted(gone | names):
                if os.path.lexists(self.folder / name):
                    _set_aside(self.folder / name, self.folder / _OLD / name)
                    aside.append(name)
                if name in names:
                    (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
                    os.replace(new / name, self.folder / name)
                    put.append(name)
                else:
                    self._delete(name)
            _write(self.folder / _FILES, {name: os.path.getsize(self.folder / name) for name in names})
            self.note(state)
        except BaseException:
            for name in put:
                self._delete(name)
            for name in aside:
                os.replace(self.folder / _OLD / name, self.folder / name)
            _write(self.folder / _FILES, known)
            self.note(before)
            raise

    def _delete(self, name: str) -> None:
        (self.folder / name).unlink(missing_ok=True)
        if "/" in name:
            remove_if_empty((self.folder / name).parent)

    def _files(self) -> dict[str, int]:
        """The files that versions have put there, and their sizes when they did."""
        try:
            told = json.loads((self.folder / _FILES).read_bytes())
            return {name: int(size) for name, size in told.items() if stays_inside(name)}
        except (OSError, ValueError, TypeError, AttributeError):
            return {}

    def _has_all_files(self) -> bool:
        """Whether they are there still, and the weights as long as they were. What the user has made of a config is his."""
        files = self._files()
        for name, num_bytes in files.items():
            try:
                _refuse_links_above(self.folder, name)
                found = os.lstat(self.folder / name)
            except OSError:
                return False
            if name.endswith(".safetensors") and (
                not stat.S_ISREG(found.st_mode) or found.st_size != num_bytes
            ):
                return False
        return bool(files)

    def _weight_files(self) -> list[str]:
        """The files with weights that versions have put there; where another receiver has, all that there are."""
        known = self._files() or {path.name for path in self.folder.glob("*.safetensors")}
        return sorted(name for name in known if name.endswith(".safetensors"))

    @staticmethod
    def _copy_others(source: Source, into: Path) -> int:
        """Config, tokenizer and the like; and an index, where several files have the weights."""
        num_bytes = 0
        with translated(into):
            for name in source.other_files():
                data = source.read(name)
                (into / name).parent.mkdir(parents=True, exist_ok=True)
                (into / name).write_bytes(data)
                num_bytes += len(data)
            if len(source.index.tensor_files) > 1:
                plain = {"metadata": {}, "weight_map": dict(source.index.files)}
                (into / INDEX).write_text(json.dumps(plain, indent=2, sort_keys=True) + "\n")
        return num_bytes

    @staticmethod
    def _copy_weights(anchor: Anchor, into: Path) -> State:
        files: dict[str, int] = {}
        try:
            with translated(into):
                for name in anchor.source.index.tensor_files:
                    with anchor.source.open(name) as reader:
                        fd = files[name] = os.open(into / name, os.O_CREAT | os.O_RDWR, 0o666)
                        preallocate(fd, reader.num_bytes, into / name)
                        begin = min(
                            (w.begin for w in anchor.tensors.values() if w.file == name),
                            default=reader.num_bytes,
                        )
                        head = memoryview(bytearray(begin))
                        reader.read_into(0, head)
                    _write_at(fd, head, 0)

                def put(name: str, at: int, part: memoryview) -> None:
                    where = anchor.tensors[name]
                    _write_at(files[where.file], part, where.begin + at)

                return anchor.read(put)
        finally:
            for fd in files.values():
                os.close(fd)

    @contextmanager
    def regions(self, names: Collection[str] | None) -> Iterator[Mapping[str, torch.Tensor]]:
        """With None, of all tensors. Raises Damaged."""
        found: dict[str, torch.Tensor] = {}
        maps: list[mmap.mmap] = []
        try:
            for name in self._weight_files():
                path = self.folder / name
                try:
                    _own_alone(self.folder, name, self.folder / _SYNC)
                    regions = _regions_in(path, maps)
                except (ValueError, OSError) as error:
                    raise Damaged(f"{path} is damaged ({error})", path=str(path)) from error
                found |= {n: region for n, region in regions.items() if names is None or n in names}
                regions.clear()
            yield found
        finally:
            found.clear()
            for mapped in maps:
                with suppress(BufferError):  # a traceback looks at it still, and closes it when it goes
                    mapped.close()

    def note(self, state: State | None) -> None:
        with translated(self.folder):
            if state is None:
                (self.folder / _STATE).unlink(missing_ok=True)
            else:
                _write(self.folder / _STATE, _told(state))
        self._state = state


def _try_lock(fd: int) -> bool:
    if fcntl is None:
        return True
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _refuse_links_above(folder: Path, name: str) -> None:
    """Raises FileExistsError where a folder between these two is a link: what it leads to is not this folder's."""
    for parent in Path(name).parents:
        if parent != Path() and (folder / parent).is_symlink():
            raise FileExistsError(f"{folder / parent} is a link; make it a folder, or pull into another one")


def _own_alone(folder: Path, name: str, temp: Path) -> None:
    """See that a file has no other name, and is no link: what is changed in place must change nowhere else.

    A file that has another name is copied. Raises OSError for what is no file, or is not there.
    """
    _refuse_links_above(folder, name)
    path = folder / name
    found = os.lstat(path)
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.ELOOP, "it is a link, or no file", str(path))
    if found.st_nlink > 1:
        copy = temp / "copy"
        try:
            shutil.copyfile(path, copy, follow_symlinks=False)
            os.replace(copy, path)
        finally:
            copy.unlink(missing_ok=True)


def _regions_in(path: Path, maps: list[mmap.mmap]) -> dict[str, torch.Tensor]:
    """The bytes of each tensor in a file, which is mapped to memory for it. Raises ValueError for what is no such file."""
    fd = os.open(path, os.O_RDWR | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0))
    try:
        mapped = mmap.mmap(fd, 0)
    finally:
        os.close(fd)
    maps.append(mapped)
    begin = 8 + int.from_bytes(mapped[:8], "little")
    rows, _ = safetensors.parse_foreign_header(mapped[:begin])
    found = {}
    for name, row in rows.items():
        length = row.end - row.begin
        if begin + row.end > len(mapped):
            raise ValueError("it is cut off")
        found[name] = (
            torch.frombuffer(mapped, dtype=torch.uint8, count=length, offset=begin + row.begin)
            if length
            else torch.empty(0, dtype=torch.uint8)
        )
    return found


def _set_aside(path: Path, to: Path) -> None:
    """Keep a file under another name until what takes its place is there; where files can have two names, it stays meanwhile."""
    to.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(path, to, follow_symlinks=False)
    except OSError:
        os.replace(path, to)


def _told(state: State) -> dict[str, Any]:
    return {
        "version": f"{state.version:06d}",
        "identity": state.identity,
        "structure": state.structure,
        "boot": _boot(),
        "checksums": state.checksums,
    }


def _write(path: Path, told: Mapping[str, Any]) -> None:
    """At once."""
    temp = path.with_name(path.name + ".tmp")
    temp.write_text(json.dumps(told))
    os.replace(temp, path)


def _boot() -> str:
    """Which start of the machine this is: what was written since is there, synced or not. Empty where nobody can tell."""
    try:
        return _BOOT.read_text().strip()
    except OSError:
        return ""


def _write_at(fd: int, data: memoryview, offset: int) -> None:
    while data:
        num_written = pwrite(fd, data, offset)
        data, offset = data[num_written:], offset + num_written
