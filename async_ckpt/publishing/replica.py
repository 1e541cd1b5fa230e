"""Weights that follow versions: in a folder, or in memory.

In: the indices of versions, and a storage with their files. Out: the bytes of each tensor, as they are in the newest of
these. Knows nothing of: which versions there are, modules.

A delta is applied in place, and undone if one tensor does not come out as it should. Anchors are written beside what is
there. `bring` is the whole of it.
"""

from __future__ import annotations

import json
import mmap
import os
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Final, Protocol

import torch

from ..around.hub import Weights
from ..around.shards import MAX_SHARD_BYTES, index_of, shards_of, view_of
from ..errors import StateMismatchError
from ..format import safetensors
from ..format.delta import INDEX, VersionIndex, checksum, identity_of, structure_of
from ..host.limits import num_cpus
from ..host.threads import Crew
from ..host.waiting import ENDS_THE_CALL, Wait
from ..staging.device import dense_blocks
from ..state.dtypes import dtype_name, dtype_named
from ..storage.disk import free_bytes_at, full, preallocate, pwrite, translated
from ..storage.scratch import Scratch, publish
from .difference import NotTheBase, apply, checksum_of
from .versions import Anchor, Frame, Source, State, Versions, Where

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_ALIGNMENT: Final = 64
_POLL_SECONDS: Final = 0.05
# What other receivers of these versions use, too.
_SYNC: Final = ".weight_sync"
_STATE: Final = f"{_SYNC}/state.json"
_LOCK: Final = f"{_SYNC}/lock"
_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")


class Replica(Protocol):
    """What versions are brought to. One caller at a time, inside `locked`."""

    @property
    def state(self) -> State | None:
        """Which weights it has; None if it has none that are known to be whole."""

    def locked(self) -> AbstractContextManager[None]:
        """Keep others away."""

    def seed(self, anchor: Anchor) -> int:
        """Have the weights of an anchor instead of its own; the bytes that were read.

        Raises StateMismatchError if its own are those of another model.
        """

    def regions(self, names: Collection[str]) -> AbstractContextManager[Mapping[str, torch.Tensor]]:
        """The bytes of each of these tensors, to be changed in place; without those that it has not."""

    def note(self, state: State | None) -> None:
        """These weights it has now; with None, they are about to change."""


def bring(replica: Replica, versions: Versions, target: int, crew: Crew) -> tuple[list[VersionIndex], int]:
    """Make of a replica a version, by what lies between it and what is there. What was applied, and the bytes read.

    After an error it has the last version that was applied as a whole. Raises NotCommittedError, CorruptCheckpointError,
    StateMismatchError, StorageUnavailableError, StorageFullError.
    """
    chain = versions.chain(target, replica.state)
    num_bytes = 0
    for index in chain:
        source = Source(versions.storage, index)
        if index.is_anchor:
            num_bytes += replica.seed(Anchor(source, crew))
        else:
            num_bytes += _apply(replica, source, crew)
    return chain, num_bytes


def _apply(replica: Replica, source: Source, crew: Crew) -> int:
    """Apply one delta: all of it is read and understood before anything is changed."""
    before, index = replica.state, source.index
    assert before is not None
    assert index.encoding is not None
    blobs = {file: source.whole(file, crew) for file in index.tensor_files}
    frames = {name: frame for file, blob in blobs.items() for name, frame in source.frames(file, blob)}
    if frames.keys() != index.files.keys():
        raise source.corrupt(INDEX, "it names other tensors than its files hold")
    unknown = frames.keys() - before.checksums.keys()
    if unknown or index.structure not in ("", before.structure):
        raise other_model(source.where, unknown)
    checksums = before.checksums | {name: frame.checksum for name, frame in frames.items()}
    now = State(index.version, identity_of(checksums), before.structure, checksums)
    if index.identity not in ("", now.identity):
        raise source.corrupt(
            INDEX, "the checksums in its files are not those of the version that it tells of"
        )
    with replica.regions(frames) as regions:
        if regions.keys() != frames.keys():
            raise source.corrupt(
                INDEX, "what is here has lost some of its tensors; delete it, and pull again"
            )
        replica.note(None)  # whoever dies here leaves what nobody takes for weights
        undo: list[Callable[[], None]] = []
        by_size = sorted(frames, key=lambda name: -len(regions[name]))
        try:
            crew.run_all(partial(_change, regions[n], n, frames[n], source, undo) for n in by_size)
        except BaseException:
            for put_back in undo:
                put_back()
            replica.note(before)
            raise
    replica.note(now)
    return sum(map(len, blobs.values()))


def _change(
    region: torch.Tensor, name: str, frame: Frame, source: Source, undo: list[Callable[[], None]]
) -> None:
    assert source.index.encoding is not None
    try:
        undo.append(apply(frame.data, region, source.index.encoding, frame.checksum))
    except NotTheBase as error:
        raise source.corrupt(frame.file, f"{name}: {error}", tensors=(name,)) from error


def other_model(where: str, names: Collection[str]) -> StateMismatchError:
    """What is said of a version whose tensors are not those that are here."""
    told = f" (such as {min(names)!a:.200})" if names else ""
    return StateMismatchError(
        f"{where}: it is of another model than what is here{told}; pull it into another folder or module",
        missing=(),
        unexpected=tuple(sorted(names)),
        mismatched=(),
    )


# --- in memory ----------------------------------------------------------------------------------------------------


class MemoryReplica:
    """In memory: `take` gives as many bytes as it is asked for, as a uint8 tensor. `fits` raises for another model."""

    def __init__(
        self,
        take: Callable[[int], torch.Tensor],
        fits: Callable[[Anchor], None] = lambda _: None,
    ) -> None:
        self._take, self._fits = take, fits
        self.state: State | None = None
        self.tensors: dict[str, Where] = {}
        self._memory: torch.Tensor | None = None
        self._regions: dict[str, torch.Tensor] = {}

    def locked(self) -> AbstractContextManager[None]:
        return nullcontext()

    def lay_out(self, tensors: Mapping[str, Where]) -> None:
        """Take memory for these, unless there is."""
        if {name: where.num_bytes for name, where in tensors.items()} != {
            name: len(region) for name, region in self._regions.items()
        }:
            self.state, self._regions, self._memory = None, {}, None
            begins, at = {}, 0
            for name, where in tensors.items():
                begins[name] = at
                at += -(-where.num_bytes // _ALIGNMENT) * _ALIGNMENT
            memory = self._memory = self._take(at)
            self._regions = {n: memory[begins[n] : begins[n] + w.num_bytes] for n, w in tensors.items()}
        self.tensors = dict(tensors)

    def seed(self, anchor: Anchor) -> int:
        self._fits(anchor)
        self.state = None
        self.lay_out(anchor.tensors)

        def put(name: str, at: int, part: memoryview) -> None:
            self._regions[name][at : at + len(part)].copy_(torch.frombuffer(part, dtype=torch.uint8))

        self.state = anchor.read(put)
        return anchor.num_bytes

    def take_over(self, tensors: Mapping[str, torch.Tensor], crew: Crew) -> None:
        """Have the bytes of these instead of its own, under their names."""

        def one(name: str) -> None:
            for at, block in dense_blocks(tensors[name], 0, tensors[name].nbytes):
                self._regions[name][at : at + block.numel()].copy_(block)

        crew.run_all(partial(one, name) for name in tensors)

    @contextmanager
    def regions(self, names: Collection[str]) -> Iterator[Mapping[str, torch.Tensor]]:
        yield {name: self._regions[name] for name in names if name in self._regions}

    def tensor(self, name: str) -> torch.Tensor:
        """One tensor, in this memory."""
        told = self.tensors[name]
        return self._regions[name].view(dtype_named(told.dtype)).view(told.shape)

    def region(self, name: str) -> torch.Tensor:
        """The bytes of one tensor."""
        return self._regions[name]

    def note(self, state: State | None) -> None:
        self.state = state


# --- in a folder --------------------------------------------------------------------------------------------------


class FolderReplica:
    """A folder of Hugging Face on this machine, which nobody else changes.

    A file in it says which version it holds, and is not there while a delta is being applied. Nothing is synced: after a
    restart of the machine all bytes are compared with their checksums first.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._state: State | None = None
        if folder.exists() and not folder.is_dir():
            raise NotADirectoryError(f"{folder} is a file; give a folder to pull into")
        if folder.is_dir() and not (folder / _SYNC).is_dir() and any(folder.iterdir()):
            raise FileExistsError(
                f"{folder} has files that no version put there; give a folder that is new or empty"
            )

    @contextmanager
    def locked(self) -> Iterator[None]:
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
        if told.get("boot") == _boot() != "":
            return state
        try:
            found = self._checksums()
        except (OSError, ValueError):
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
            self._note_in(new, self._copy_weights(anchor, new))
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
                (new / name).parent.mkdir(exist_ok=True)
                (new / name).write_bytes(data)
            for shard in shards:
                with open(new / shard.name, "wb") as file:
                    file.writelines(view for _, view in shard.pieces())
            if len(shards) > 1:
                (new / INDEX).write_bytes(index_of(shards))
            checksums = {name: checksum_of(tensor) for name, tensor in tensors.items()}
            self._note_in(new, State(version, identity, structure, checksums))

    @contextmanager
    def _renewed(self, num_bytes: int) -> Iterator[Path]:
        """What is in this folder at the end of the block takes the place of all that is there, at once."""
        free = free_bytes_at(self.folder)
        if free is not None and free < num_bytes:
            raise full(self.folder, num_bytes, free)
        with Scratch(self.folder.parent, self.folder.name) as scratch, translated(self.folder):
            yield scratch.folder
            publish(scratch.folder, self.folder, replaced=lambda path: not path.startswith(_SYNC))

    def _note_in(self, new: Path, state: State) -> None:
        (new / _SYNC).mkdir()
        _write_note(new, state)
        self._state = state

    @staticmethod
    def _copy_others(source: Source, into: Path) -> int:
        """Config, tokenizer and the like; and an index, where several files have the weights."""
        num_bytes = 0
        with translated(into):
            for name in source.other_files():
                data = source.read(name)
                (into / name).parent.mkdir(exist_ok=True)
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
        """With None, of all tensors."""
        found: dict[str, torch.Tensor] = {}
        maps: list[mmap.mmap] = []
        try:
            for path in sorted(self.folder.glob("*.safetensors")):
                with open(path, "r+b") as file:
                    mapped = mmap.mmap(file.fileno(), 0)
                maps.append(mapped)
                begin = 8 + int.from_bytes(mapped[:8], "little")
                rows, _ = safetensors.parse_foreign_header(mapped[:begin])
                for name, row in rows.items():
                    if names is not None and name not in names:
                        continue
                    length = row.end - row.begin
                    if begin + row.end > len(mapped):
                        raise ValueError(f"{path} is cut off")
                    found[name] = (
                        torch.frombuffer(mapped, dtype=torch.uint8, count=length, offset=begin + row.begin)
                        if length
                        else torch.empty(0, dtype=torch.uint8)
                    )
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
                _write_note(self.folder, state)
        self._state = state


def _try_lock(fd: int) -> bool:
    if fcntl is None:
        return True
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _write_note(folder: Path, state: State) -> None:
    told = {
        "version": f"{state.version:06d}",
        "identity": state.identity,
        "structure": state.structure,
        "boot": _boot(),
        "checksums": state.checksums,
    }
    path = folder / _STATE
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


def new_crew() -> Crew:
    """The threads of one replica."""
    return Crew("pull", max(2, num_cpus()))
