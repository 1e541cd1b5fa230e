"""The copies of an archive at the places of its run, read as one file: each block from a place where it is sound.

In: the places, and the archive's entry in the manifest. Out: its bytes, and the places where they are damaged or
missing. Knows nothing of: runs, indices.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from functools import cached_property

from ....errors import CheckpointError, CorruptCheckpointError, StorageUnavailableError
from ...format import digests, index
from ...runs.manifest import Archive
from ...spec import BLOCK_BYTES, align_up
from ...storage.compressed import DamagedBlocksError, open_decompressed
from ...storage.interface import Reader, Storage


class Holders:
    """The places that hold a step, from near to far. `from_step` creates it for one reader. Thread-safe."""

    def __init__(self, storages: Sequence[Storage]) -> None:
        self.storages = storages
        self.troubles: dict[str, str] = {}  # by the name of the file

    def note(self, file: str, why: object) -> None:
        """Record why a file is not read as it is. The advice of an error, after its semicolon, is left out."""
        text, _, _ = str(why).partition("; ")
        self.troubles.setdefault(file, text if file in text else f"{file}: {text}")


class Copies(Reader):
    """One archive at several places. `StepArchives` creates it, and `stack` closes it. Thread-safe.

    Each block is compared with its digest, and taken from the first place where it is sound.
    """

    def __init__(self, holders: Holders, path: str, archive: Archive, stack: contextlib.ExitStack) -> None:
        self.num_bytes = archive.num_bytes
        self._holders, self._path, self._digest, self._stack = holders, path, archive.digest, stack
        self.note = holders.note
        self._readers: dict[Storage, Reader | None] = {}  # None for a copy that cannot be read
        self._away: StorageUnavailableError | None = None

    def read_into(self, offset: int, target: memoryview) -> None:
        """Fill `target`. Raises CorruptCheckpointError if a block is sound nowhere.

        Raises StorageUnavailableError instead if a place that does not answer may have the block.
        """
        covered, expected, tail = self._ends
        end = offset + len(target)
        if end > covered:
            target[max(0, covered - offset) :] = tail[max(0, offset - covered) : end - covered]
            end = covered
        begin = offset // BLOCK_BYTES * BLOCK_BYTES
        data = bytearray(max(0, min(align_up(end, BLOCK_BYTES), covered) - begin))
        missing = {*range(begin // BLOCK_BYTES, digests.num_blocks(begin + len(data)))} if data else set()
        for shown in self._read_each(begin, data) if missing else ():
            damaged = digests.damaged_blocks(begin, memoryview(data), expected)
            for number in missing.difference(damaged):
                first, last = max(offset, number * BLOCK_BYTES), min(end, (number + 1) * BLOCK_BYTES)
                target[first - offset : last - offset] = data[first - begin : last - begin]
            missing.intersection_update(damaged)
            if damaged:
                self._holders.note(shown, f"block {damaged[0]} does not match its digest")
            if not missing:
                return
        if missing:
            raise self._nowhere()

    @cached_property
    def _ends(self) -> tuple[int, bytes, bytes]:
        """The number of bytes that the digests cover, the digests, and the bytes after the covered part."""
        extents = [member.data for member in index.places_of_digests(self.num_bytes)]
        begin = extents[0].offset if extents else self.num_bytes
        data = bytearray(self.num_bytes - begin)
        for shown in self._read_each(begin, data):
            for extent in extents:
                text = bytes(data[extent.offset - begin :][: extent.length])
                with contextlib.suppress(ValueError):
                    expected = digests.parse(text, covered_bytes=extent.offset)
                    if digests.self_digest(text) == self._digest:
                        return extent.offset, expected, text + bytes(self.num_bytes - extent.end)
            self._holders.note(shown, "its digests are not those that its manifest names")
        raise self._nowhere()

    def _read_each(self, offset: int, data: bytearray) -> Iterator[str]:
        """Fill `data` from one place after the other. Yields the full name of each file that was read."""
        for storage in self._holders.storages:
            shown = storage.locate(self._path)
            try:
                if storage not in self._readers:  # several threads may open it
                    opened = self._stack.enter_context(storage.open(self._path))
                    self._readers[storage] = open_decompressed(opened, shown)
                reader = self._readers[storage]
                if reader is None:
                    continue
                if reader.num_bytes != self.num_bytes:
                    raise EOFError(f"{reader.num_bytes:,} bytes, its manifest says {self.num_bytes:,}")
                reader.read_into(offset, memoryview(data))
            except (FileNotFoundError, IsADirectoryError, ValueError):
                self._readers.setdefault(storage, None)
                self._holders.note(shown, "it is missing")
            except DamagedBlocksError as error:  # the digests show which blocks are damaged
                self._holders.note(shown, error)
                yield shown
            except (EOFError, CorruptCheckpointError) as error:
                self._readers.setdefault(storage, None)
                self._holders.note(shown, error)
            except StorageUnavailableError as error:
                self._away = error
                self._holders.note(shown, error)
                if storage.remote:  # each further read would wait for it again
                    self._readers[storage] = None
            else:
                yield shown

    @property
    def troubles(self) -> str:
        """The reasons, as text, why no place has the archive undamaged."""
        files = [storage.locate(self._path) for storage in self._holders.storages]
        return "; ".join(self._holders.troubles[file] for file in files if file in self._holders.troubles)

    def _nowhere(self) -> CheckpointError:
        if self._away is not None:
            why = f"no reachable place has an undamaged copy: {self.troubles}"
            return StorageUnavailableError(why, path=self._away.path)
        file = self._holders.storages[0].locate(self._path)
        why = f"{file}: no place has an undamaged copy: {self.troubles}; load an earlier checkpoint"
        return CorruptCheckpointError(why, path=file)
