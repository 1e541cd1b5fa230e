"""Compression of objects on their way to a sink, and decompression of ranges, one digest block at a time.

In: segments in any order. Out: an object of independent blocks in file order, with a table of their sizes; ranges of
the uncompressed bytes. Knows nothing of: tensors.

The threads that bring segments also compress them, and do not wait for each other. A segment that comes long before its
turn stays on loan, uncompressed, so that memory use stays within the pool.
"""

from __future__ import annotations

import bisect
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from types import MappingProxyType
from typing import Any, Final, Protocol

from ...errors import CorruptCheckpointError, ForeignFileError
from ..format import blocks, index, tar, zstd
from ..host.limits import num_cpus
from ..spec import BLOCK_BYTES, KIB, Extent, whole_count
from .interface import MemoryLoan, Reader, Sink, Storage
from .sequential import Appender

# Incompressible frames grow by at most this much (`ZSTD_COMPRESSBOUND`); an entry of the seek table is 8 bytes.
_GROWTH: Final = 1 / 128
_SLACK_BYTES: Final = 1024 * 1024
_MAX_LEVEL: Final = 22
# The limit is for all objects together, since hundreds may be open at once.
_NUM_CACHED: Final = 8
# The most blocks that one request reads: 32 MiB before compression.
_NUM_AT_ONCE: Final = 8
# Parameters of zstd for planes, at level 1: almost no search for repetitions, which weights do not have. Matches found
# by chance take twice the time, and save less than the Huffman code of the bytes would.
_OF_PLANES: Final = {"hash_log": 6}
# Samples of a block show how many planes compress it best.
_SAMPLE_BYTES: Final = 16 * KIB
_NUM_SAMPLES: Final = 4
# The first block of any frame ends within this many bytes.
_FIRST_BYTES: Final = 256 * 1024
# The smallest block in a frame has 4 bytes for 128 KiB: a frame that claims a higher ratio has a wrong size.
_MAX_RATIO: Final = 128 * 1024 // 4

# Suffixes that promise another compression, or promise zstd but are not recognized by the readers of this library.
_OTHERS: Final = (
    ".gz", ".tgz", ".taz", ".bz2", ".tbz", ".tbz2", ".tb2", ".xz", ".txz", ".lzma", ".tlz", ".lz", ".lz4", ".lzo",
    ".br", ".sz", ".zip", ".7z", ".rar", ".tzst", ".zstd",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Zstd:
    """Settings of compression: `level` from 1 (fast) to 22; `threads`, by default one fewer than the processors.

        async_ckpt.save(state, "out/x.tar.zst", compression=async_ckpt.Zstd(level=9))

    Above level 3, compressing float weights only takes longer; the result is no smaller. Raises ValueError if an
    argument is out of range.
    """

    level: int = 3
    threads: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "level", whole_count("level", self.level))
        if self.level > _MAX_LEVEL:
            raise ValueError(f"level must be from 1 to {_MAX_LEVEL}, got {self.level}")
        if self.threads is not None:
            advice = "; leave it out to use all cores but one"
            object.__setattr__(self, "threads", whole_count("threads", self.threads, advice))

    @property
    def num_threads(self) -> int:
        """The number of threads that compress at once."""
        return self.threads or max(1, num_cpus() - 1)


def promises_zstd(name: str, path: str, *, may_mislead: bool = False) -> bool:
    """Whether a file of this name is compressed. Messages show `path`. In a URL, the name ends before a "?".

    Raises ValueError for a name that promises another compression, which the content would not have; with
    `may_mislead`, such a name is allowed.
    """
    name = (name.partition("?")[0] if "://" in path else name).lower()
    if name.endswith(_OTHERS) and not may_mislead:
        raise ValueError(f"{path}: only zstd can be written; use the suffix .tar.zst, or .tar for a plain archive")
    return name.endswith(".zst")


def refuse_archive_name(path: str) -> None:
    """Raise ValueError if a folder has the name of a compressed archive."""
    name = path.rstrip("/")
    try:
        is_archive = promises_zstd(name, path)
    except ValueError:
        is_archive = True
    if is_archive:
        raise ValueError(f"{path}: a folder must not have the name of a compressed archive; give another name")


def refuse_if_missing(why: str = "", *, with_planes: bool = False) -> None:
    """Raise ImportError, whose message begins with `why`, if a package for compression is missing."""
    try:
        zstandard_package()
        if with_planes:
            numpy_package()
    except ImportError as error:
        raise ImportError(f"{why}{error}") from None


def open_decompressed(reader: Reader, path: str) -> Reader:
    """A reader of the uncompressed content; `reader` itself if its object is not compressed.

    Raises CorruptCheckpointError, and ImportError if a package is missing.
    """
    beginning = bytearray(min(blocks.HEAD_BYTES, reader.num_bytes))
    reader.read_into(0, memoryview(beginning))
    if blocks.begins(beginning):
        return BlocksInTarReader(reader, path, beginning)
    return ZstdReader(reader, path) if zstd.begins(beginning) else reader


def open_sized(reader: Reader, path: str, num_bytes: int) -> Reader:
    """A reader of an archive of `num_bytes`, uncompressed. Makes no request if the object has that size.

    A compressed object may have that size by chance, which `OpenArchive` notices.
    """
    return reader if reader.num_bytes == num_bytes else open_decompressed(reader, path)


class Packing(Protocol):
    """The format of an object that is compressed in blocks. Only `pack` is called from several threads."""

    def head(self) -> bytes:
        """The bytes before the first block."""

    def pack(self, number: int, data: memoryview) -> tuple[list[bytes], Any]:
        """The compressed bytes of block `number`, and the facts about it that `end` needs."""

    def end(self, facts: list[Any]) -> bytes:
        """The bytes after the last block. `facts` has the facts about all blocks, in order."""


class ZstdFrames(Packing):
    """Zstd frames of one digest block each, with a seek table: `x.tar.zst`."""

    def __init__(self, level: int) -> None:
        self._compress = _compressor(level)

    def head(self) -> bytes:
        return b""

    def pack(self, number: int, data: memoryview) -> tuple[list[bytes], zstd.ZstdFrame]:  # noqa: ARG002
        frame = self._compress(data)
        return [frame], zstd.ZstdFrame(len(frame), len(data))

    def end(self, facts: list[zstd.ZstdFrame]) -> bytes:
        return zstd.dump(facts)


class BlocksInTar(Packing):
    """A tar with a member for each digest block of an archive: its byte planes, compressed by zstd.

    The first plane has the first bytes of all numbers, the second plane all second bytes, and so on. So the exponents
    of weights, which are much alike, are compressed together; the other bytes are not alike.
    """

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes, self._compress = num_bytes, _compressor(1, _OF_PLANES)
        self._of_thread = threading.local()

    def head(self) -> bytes:
        return blocks.head(self._num_bytes)

    def pack(self, number: int, data: memoryview) -> tuple[list[bytes], blocks.CompressedBlock]:
        planes = self._best_planes(data)
        frame = self._compress(self._divided(data, planes))
        block = blocks.CompressedBlock(len(frame), planes)
        return [blocks.block_header(number, block), frame, bytes(tar.padding_after(len(frame)))], block

    def _best_planes(self, data: memoryview) -> int:
        """The number of planes that compresses a sample best. It depends on the size of the numbers in the block.

        Each plane of the sample is compressed by itself, since the planes of a block are longer than zstd's blocks.
        """
        step = max(_SAMPLE_BYTES, len(data) // _NUM_SAMPLES // _SAMPLE_BYTES * _SAMPLE_BYTES)
        sample = memoryview(b"".join(data[begin : begin + _SAMPLE_BYTES] for begin in range(0, len(data), step)))

        def size_in(planes: int) -> int:
            length, divided = len(sample) // planes, self._divided(sample, planes)
            return sum(len(self._compress(divided[begin : begin + length])) for begin in range(0, len(sample), length))

        return min((planes for planes in blocks.PLANES if len(data) % planes == len(sample) % planes == 0), key=size_in)

    def _divided(self, data: memoryview, planes: int) -> memoryview:
        """The bytes of numbers of `planes` bytes each, plane by plane. Valid until the next call on this thread."""
        if planes == 1:
            return data
        numpy = numpy_package()
        if not hasattr(self._of_thread, "planes"):  # new memory for each block would double the time
            self._of_thread.planes = numpy.empty(BLOCK_BYTES, numpy.uint8)
        found = self._of_thread.planes[: len(data)].reshape(planes, -1)
        numbers = numpy.frombuffer(data, f"<u{planes}")
        for plane in range(planes):  # twice as fast as copying every fourth byte
            numpy.right_shift(numbers, 8 * plane, out=found[plane], casting="unsafe")
        return memoryview(found).cast("B")

    def end(self, facts: list[blocks.CompressedBlock]) -> bytes:
        return blocks.end(facts)


def _join(data: bytes, planes: int, target: memoryview) -> None:
    """Fill `target` with the numbers whose planes are in `data`: the reverse of `_divided`."""
    if planes == 1:
        target[:] = data
        return
    numpy = numpy_package()
    *lower, upper = numpy.frombuffer(data, numpy.uint8).reshape(planes, -1)
    numbers = numpy.frombuffer(target, f"<u{planes}")
    numpy.copyto(numbers, upper)
    for plane in reversed(lower):
        numbers <<= 8
        numbers |= plane


def _compressor(level: int, settings: Mapping[str, int] = MappingProxyType({})) -> Callable[[memoryview], bytes]:
    """A thread-safe function that compresses. Each thread keeps its tables between calls."""
    package, local = zstandard_package(), threading.local()

    def compress(data: memoryview) -> bytes:
        if not hasattr(local, "compressor"):
            chosen = package.ZstdCompressionParameters.from_level(level, **settings, write_checksum=True)
            local.compressor = package.ZstdCompressor(compression_params=chosen)
        compressed: bytes = local.compressor.compress(data)
        return compressed

    return compress


class CompressingSink(Sink):
    """A sink that compresses its segments on the way to another sink, which it creates. Thread-safe."""

    def __init__(
        self,
        storage: Storage,
        path: str,
        *,
        num_bytes: int,
        segment_bytes: int,
        packing: Packing,
        num_threads: int,
    ) -> None:
        limit = int(num_bytes * (1 + _GROWTH)) + _SLACK_BYTES
        self._appender = Appender(storage, path, limit_bytes=limit)
        self._packing, self._num_threads = packing, num_threads
        self._segment_bytes = segment_bytes
        self._num_segments = -(-num_bytes // segment_bytes)
        self._lock = threading.Lock()
        # Under _lock, like all below:
        self._waiting: dict[int, tuple[memoryview, MemoryLoan]] = {}  # not compressed yet
        self._compressed: dict[int, list[tuple[list[bytes], Any]]] = {}  # segments, until their turn
        self._next = 0  # the next segment to append
        self._num_compressing = 0
        self._appending = False
        self._error: BaseException | None = None
        self._facts: list[Any] = []  # about the blocks; used only by the thread that appends

    @property
    def num_bytes(self) -> int:
        return self._appender.num_bytes

    @property
    def num_retries(self) -> int:
        return self._appender.sink.num_retries

    @property
    def failed(self) -> Future[None] | None:
        return self._appender.sink.failed

    def write(self, offset: int, data: memoryview, lease: MemoryLoan) -> None:
        lease.retain()
        with self._lock:
            refused = self._error
            if refused is None:
                self._waiting[offset // self._segment_bytes] = (data, lease)
        if refused is not None:
            lease.release()
            raise refused
        try:
            while (segment := self._take()) is not None:
                self._compress(*segment)
                self._append_due()
        except BaseException as error:
            self._fail(error)
            raise

    def _take(self) -> tuple[int, memoryview, MemoryLoan] | None:
        """The earliest waiting segment; None if enough threads are compressing, or if its turn is far away."""
        with self._lock:
            number = min(self._waiting, default=None)
            limit = self._num_threads
            if number is None or self._num_compressing >= limit or number > self._next + 2 * limit:
                return None
            self._num_compressing += 1
            return number, *self._waiting.pop(number)

    def _compress(self, number: int, data: memoryview, lease: MemoryLoan) -> None:
        try:
            first = number * self._segment_bytes // BLOCK_BYTES
            begins = range(0, len(data), BLOCK_BYTES)
            packed = [self._packing.pack(first + n, data[at : at + BLOCK_BYTES]) for n, at in enumerate(begins)]
        finally:
            lease.release()
            with self._lock:
                self._num_compressing -= 1
        with self._lock:
            self._compressed[number] = packed

    def _append_due(self) -> None:
        """Append compressed segments in file order. One thread at a time does this, for all threads."""
        while True:
            with self._lock:
                if self._appending or self._error or self._next not in self._compressed:
                    return
                self._appending = True
                packed = self._compressed.pop(self._next)
            try:
                for parts, facts in packed:
                    for part in parts if self._facts else [self._packing.head(), *parts]:
                        self._appender.append(memoryview(part))
                    self._facts.append(facts)
            finally:
                with self._lock:
                    self._appending = False
                    self._next += 1

    def finish(self, num_bytes: int | None = None) -> None:  # noqa: ARG002
        if self._next != self._num_segments:
            raise RuntimeError(f"only {self._next} of {self._num_segments} segments were written")
        self._appender.append(memoryview(self._packing.end(self._facts)))
        self._appender.finish()

    def abort(self) -> None:
        self.give_up()
        self._appender.abort()

    def close(self) -> None:
        self._appender.sink.close()

    def give_up(self) -> None:
        self._fail(RuntimeError("the upload was abandoned"))

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            self._error = self._error or error
            held, self._waiting = self._waiting, {}
        for _, lease in held.values():
            lease.release()
        self._appender.fail(error)

    def __repr__(self) -> str:
        return f"<CompressingSink {self._next}/{self._num_segments} segments, {self._appender!r}>"


# The last blocks that were read in part, by the numbers of reader and block: neighbouring ranges need them, too.
# Each operation on the dict is atomic.
_cached: Final[dict[tuple[int, int], memoryview]] = {}
_keys: Final = itertools.count()


class DamagedBlocksError(CorruptCheckpointError):
    """The error about blocks that cannot be decompressed; `blocks` has their numbers. All other blocks were read."""

    blocks: tuple[int, ...]


class _InBlocks(Reader):
    """A reader of an object that is compressed in blocks. Only blocks that a range touches are read. Thread-safe."""

    def __init__(self, reader: Reader, path: str, extents: Sequence[Extent], sizes: Iterable[int]) -> None:
        """`extents` has the extents of the compressed blocks, in order, and `sizes` the sizes of their contents."""
        self._reader, self._path, self._extents = reader, path, extents
        self._starts = [0, *accumulate(sizes)]
        self.num_bytes = self._starts[-1]
        self._key = next(_keys)

    def read_into(self, offset: int, target: memoryview) -> None:
        """Fill `target`. Raises DamagedBlocksError after all other blocks are read."""
        if offset + len(target) > self.num_bytes:
            raise EOFError(f"{self._path} ends at byte {self.num_bytes:,}")
        damaged: list[tuple[int, Exception]] = []
        while target:
            first = bisect.bisect_right(self._starts, offset) - 1
            beyond = bisect.bisect_left(self._starts, offset + len(target))
            for number, fill in self._blocks(range(first, min(beyond, first + _NUM_AT_ONCE))):
                length = min(self._starts[number + 1] - offset, len(target))
                try:
                    fill(offset - self._starts[number], target[:length])
                except (zstandard_package().ZstdError, ValueError) as error:
                    damaged.append((number, error))
                offset, target = offset + length, target[length:]
        if damaged:
            number, why = damaged[0]
            numbers = tuple(self._starts[number] // BLOCK_BYTES for number, _ in damaged)
            text = f"{self._path}: block {number} is damaged ({why})"
            raise DamagedBlocksError(text, path=self._path, blocks=numbers)

    def _blocks(self, numbers: range) -> Iterator[tuple[int, Callable[[int, memoryview], None]]]:
        """Yield the number of each block, and a function that fills memory from an offset in it; by one request."""
        cached = {number: block for number in numbers if (block := _cached.get((self._key, number)))}
        begin, last = self._extents[numbers[0]].offset, self._extents[numbers[-1]]
        stored = memoryview(bytearray(last.end - begin if len(cached) < len(numbers) else 0))
        if stored:
            self._reader.read_into(begin, stored)
        for number in numbers:
            if number in cached:
                yield number, partial(_fill, cached[number])
            else:
                extent = self._extents[number]
                yield number, partial(self._fill, number, stored[extent.offset - begin :][: extent.length])

    def _fill(self, number: int, stored: memoryview, begin: int, target: memoryview) -> None:
        size = self._starts[number + 1] - self._starts[number]
        if len(target) == size:
            self._decompress(number, stored, target)
            return
        block = memoryview(bytearray(size))
        self._decompress(number, stored, block)
        _cached[self._key, number] = block
        with suppress(KeyError, RuntimeError):  # another thread deletes or adds a block at this moment
            while len(_cached) > _NUM_CACHED:
                del _cached[next(iter(_cached))]
        _fill(block, begin, target)

    def _decompress(self, number: int, stored: memoryview, target: memoryview) -> None:
        """Fill `target` with the content of a block. Raises ValueError or ZstdError."""
        target[:] = self._frame_content(number, stored)

    def _frame_content(self, number: int, data: memoryview) -> bytes:
        size, package = self._starts[number + 1] - self._starts[number], zstandard_package()
        content_bytes = package.get_frame_parameters(data).content_size
        if content_bytes != size:
            raise ValueError(f"it contains {content_bytes:,} bytes, but the table says {size:,}")
        content: bytes = package.ZstdDecompressor().decompress(data)
        return content

    def _corrupt(self, why: str) -> CorruptCheckpointError:
        return CorruptCheckpointError(f"{self._path}: {why}", path=self._path)

    def close(self) -> None:
        for key in [key for key in [*_cached] if key[0] == self._key]:
            _cached.pop(key, None)
        self._reader.close()


def _fill(block: memoryview, begin: int, target: memoryview) -> None:
    target[:] = block[begin : begin + len(target)]


class BlocksInTarReader(_InBlocks):
    """A reader of an archive that was written as `BlocksInTar`."""

    def __init__(self, reader: Reader, path: str, beginning: bytes | bytearray) -> None:
        """`beginning` has the first bytes of the tar. Raises CorruptCheckpointError; ImportError without packages."""
        refuse_if_missing(f"{path} is compressed; ", with_planes=True)
        try:
            num_bytes = blocks.content_bytes(beginning)
            end = blocks.end_extent(num_bytes, reader.num_bytes)
            data = bytearray(end.length)
            reader.read_into(end.offset, memoryview(data))
            extents, self._headed = zip(*blocks.parse_end(bytes(data), num_bytes, end.offset), strict=True)
        except (ValueError, KeyError, TypeError, EOFError, RecursionError) as error:
            why = f"the table of its blocks cannot be read ({error}); the file is damaged or cut off: fetch it again"
            raise CorruptCheckpointError(f"{path}: {why}", path=path) from error
        sizes = (min(BLOCK_BYTES, num_bytes - begin) for begin in range(0, num_bytes, BLOCK_BYTES))
        super().__init__(reader, path, extents, sizes)

    def _decompress(self, number: int, stored: memoryview, target: memoryview) -> None:
        block = self._headed[number]
        if stored[: tar.BLOCK] != blocks.block_header(number, block):
            raise ValueError("its header is not what the table says")
        _join(self._frame_content(number, stored[tar.BLOCK :]), block.planes, target)


class ZstdReader(_InBlocks):
    """A reader of a `.tar.zst`."""

    def __init__(self, reader: Reader, path: str) -> None:
        self._reader, self._path = reader, path
        frames = self._read_table()
        begins = accumulate((frame.compressed for frame in frames), initial=0)
        extents = [Extent(begin, frame.compressed) for begin, frame in zip(begins, frames, strict=False)]
        super().__init__(reader, path, extents, (frame.uncompressed for frame in frames))

    def _read_table(self) -> list[zstd.ZstdFrame]:
        total = self._reader.num_bytes
        try:
            footer = bytearray(min(zstd.FOOTER_BYTES, total))
            self._read(total - len(footer), footer)
            table = bytearray(min(total, zstd.table_bytes(bytes(footer))))
            self._read(total - len(table), table)
            frames = zstd.parse(bytes(table), data_bytes=total - len(table))
        except ValueError as error:
            if self._is_foreign():
                raise ForeignFileError(
                    f"{self._path}: not an async_ckpt archive: another program has compressed it, by zstd; use "
                    "unpack(), or decompress it first, by unzstd",
                    path=self._path,
                    kind="compressed",
                ) from error
            raise self._corrupt(
                f"{error}; the file is cut off: fetch it again; or another program has compressed it: then use unpack()"
            ) from error
        if any(not 0 < f.uncompressed <= min(BLOCK_BYTES, f.compressed * _MAX_RATIO) for f in frames):
            raise self._corrupt("its frames do not match an archive; use unpack()")
        return frames

    def _is_foreign(self) -> bool:
        """True if the first frame is not the beginning of an archive."""
        package, head = zstandard_package(), bytearray(min(self._reader.num_bytes, _FIRST_BYTES))
        self._read(0, head)
        name = index.MEMBER.encode()
        try:
            with package.ZstdDecompressor().stream_reader(bytes(head)) as stream:
                return bytes(stream.read(len(name))) not in (name, b"")
        except package.ZstdError:
            return False

    def _read(self, offset: int, into: bytearray) -> None:
        self._reader.read_into(offset, memoryview(into))


def zstandard_package() -> Any:
    try:
        import zstandard
    except ImportError:
        raise ImportError('zstd needs zstandard; pip install "async_ckpt[zstd]"') from None
    return zstandard


def numpy_package() -> Any:
    try:
        import numpy
    except ImportError:
        raise ImportError('zstd of byte planes needs numpy; pip install "async_ckpt[zstd]"') from None
    return numpy
