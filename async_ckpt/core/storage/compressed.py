"""Compression of objects on their way to a sink, and decompression of ranges: zstd frames of one digest block each.

In: segments in any order. Out: an object of independent frames in file order, with a seek table; ranges of the
uncompressed bytes. Knows nothing of: tar, tensors.

The threads that bring segments compress them; none waits for another. A segment that comes long before its turn stays
uncompressed, on loan, so that memory stays within the pool.
"""

from __future__ import annotations

import bisect
import threading
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final

from ...errors import CorruptCheckpointError, ForeignFileError
from ..format import index, zstd
from ..host.limits import num_cpus
from ..spec import BLOCK_BYTES
from .interface import MemoryLoan, Reader, Storage
from .sequential import Appender

# Incompressible frames grow by at most this much (`ZSTD_COMPRESSBOUND`); an entry of the seek table is 8 bytes.
_GROWTH: Final = 1 / 128
_SLACK_BYTES: Final = 1024 * 1024
_MAX_LEVEL: Final = 22
_NUM_CACHED: Final = 4
# The smallest block of a frame is 4 bytes for 128 KiB: a frame that claims more lies about its size.
# As many bytes hold the first block of any frame.
_FIRST_BYTES: Final = 256 * 1024
_MAX_RATIO: Final = 128 * 1024 // 4

# The endings of names that promise another compression, or zstd where no reader of ours looks for it.
_OTHERS: Final = (
    ".gz", ".tgz", ".taz", ".bz2", ".tbz", ".tbz2", ".tb2", ".xz", ".txz", ".lzma", ".tlz", ".lz", ".lz4", ".lzo",
    ".br", ".sz", ".zip", ".7z", ".rar", ".tzst", ".zstd",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Zstd:
    """Settings of compression: `level` from 1 (fast) to 22; `threads`, by default one less than the processors.

        async_ckpt.save(state, "out/x.tar.zst", compression=async_ckpt.Zstd(level=9))

    Above level 3, compressing float weights only takes longer; the result is no smaller. Raises ValueError if an
    argument is out of range.
    """

    level: int = 3
    threads: int | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.level <= _MAX_LEVEL:
            raise ValueError(f"level must be from 1 to {_MAX_LEVEL}, got {self.level}")
        if self.threads is not None and self.threads < 1:
            raise ValueError(f"threads must be at least 1, got {self.threads}; leave it out to use all cores but one")

    @property
    def num_threads(self) -> int:
        """The number of threads that compress at once."""
        return self.threads or max(1, num_cpus() - 1)


def promises_zstd(name: str, path: str, *, may_mislead: bool = False) -> bool:
    """Whether a file of this name is compressed. `path` names it in messages. In a URL, the name ends before a "?".

    Raises ValueError for a name that promises another compression, unless it `may_mislead`: the content would not be
    what the name says.
    """
    name = (name.partition("?")[0] if "://" in path else name).lower()
    if name.endswith(_OTHERS) and not may_mislead:
        raise ValueError(f"{path}: only zstd can be written; use the suffix .tar.zst, or .tar for a plain archive")
    return name.endswith(".zst")


def refuse_archive_name(path: str) -> None:
    """Raise ValueError for the name of a compressed archive, where no archive is written."""
    name = path.rstrip("/")
    try:
        is_archive = promises_zstd(name, path)
    except ValueError:
        is_archive = True
    if is_archive:
        raise ValueError(f"{path}: a folder must not have the name of a compressed archive; give another name")


def refuse_if_missing() -> None:
    """Raise ImportError if the package for compression is missing."""
    zstandard_package()


def open_decompressed(reader: Reader, path: str) -> Reader:
    """A reader of the content: `reader` itself if that is not compressed. Raises CorruptCheckpointError."""
    magic = bytearray(min(4, reader.num_bytes))
    reader.read_into(0, memoryview(magic))
    return ZstdReader(reader, path) if zstd.begins(magic) else reader


class ZstdSink:
    """A sink that compresses on the way to another sink. A StepTarget creates it for one delivery. From any thread."""

    retryable = False  # compressed segments are not kept

    def __init__(
        self,
        storage: Storage,
        path: str,
        *,
        num_bytes: int,
        segment_bytes: int,
        settings: Zstd,
    ) -> None:
        zstandard_package()
        limit = int(num_bytes * (1 + _GROWTH)) + _SLACK_BYTES
        self._appender = Appender(storage, path, limit_bytes=limit)
        self._settings = settings
        self._segment_bytes = segment_bytes
        self._num_segments = -(-num_bytes // segment_bytes)
        self._lock = threading.Lock()
        # Under _lock, like all below:
        self._waiting: dict[int, tuple[memoryview, MemoryLoan]] = {}  # not compressed yet
        self._compressed: dict[int, list[tuple[bytes, int]]] = {}  # frames of segments, until their turn
        self._next = 0  # the next segment to append
        self._num_compressing = 0
        self._appending = False
        self._error: BaseException | None = None
        self._frames: list[zstd.ZstdFrame] = []  # of the thread that appends
        self._local = threading.local()

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
        """The earliest segment, to be compressed; None if enough threads are compressing or its turn is far away."""
        with self._lock:
            number = min(self._waiting, default=None)
            limit = self._settings.num_threads
            if number is None or self._num_compressing >= limit or number > self._next + 2 * limit:
                return None
            self._num_compressing += 1
            return number, *self._waiting.pop(number)

    def _compress(self, number: int, data: memoryview, lease: MemoryLoan) -> None:
        try:
            compressor = self._compressor()
            blocks = (data[begin : begin + BLOCK_BYTES] for begin in range(0, len(data), BLOCK_BYTES))
            frames = [(compressor.compress(block), len(block)) for block in blocks]
        finally:
            lease.release()
            with self._lock:
                self._num_compressing -= 1
        with self._lock:
            self._compressed[number] = frames

    def _compressor(self) -> Any:
        """The compressor of this thread, which keeps its tables between frames."""
        if not hasattr(self._local, "compressor"):
            self._local.compressor = zstandard_package().ZstdCompressor(level=self._settings.level, write_checksum=True)
        return self._local.compressor

    def _append_due(self) -> None:
        """Append compressed segments in file order. One thread at a time does so, for all others."""
        while True:
            with self._lock:
                if self._appending or self._error or self._next not in self._compressed:
                    return
                self._appending = True
                frames = self._compressed.pop(self._next)
            try:
                for frame, num_bytes in frames:
                    self._appender.append(memoryview(frame))
                    self._frames.append(zstd.ZstdFrame(len(frame), num_bytes))
            finally:
                with self._lock:
                    self._appending = False
                    self._next += 1

    def finish(self, num_bytes: int | None = None) -> None:  # noqa: ARG002
        if self._next != self._num_segments:
            raise RuntimeError(f"{self._next} segments arrived of {self._num_segments}")
        self._appender.append(memoryview(zstd.dump(self._frames)))
        self._appender.finish()

    def abort(self) -> None:
        self.give_up()
        self._appender.abort()

    def close(self) -> None:
        self._appender.sink.close()

    def give_up(self) -> None:
        self._fail(RuntimeError("the object was given up"))

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            self._error = self._error or error
            held, self._waiting = self._waiting, {}
        for _, lease in held.values():
            lease.release()
        self._appender.fail(error)

    def relieve(self) -> bool:
        return False  # nothing is kept for another attempt

    def __repr__(self) -> str:
        return f"<ZstdSink level {self._settings.level} {self._next}/{self._num_segments} segments, {self._appender!r}>"


class ZstdReader(Reader):
    """Ranges of a compressed object. Only the frames that a range touches are read. From any thread."""

    def __init__(self, reader: Reader, path: str) -> None:
        self._reader, self._path = reader, path
        frames = self._read_table()
        self._begins = [0, *accumulate(frame.compressed for frame in frames)]
        self._starts = [0, *accumulate(frame.uncompressed for frame in frames)]
        self.num_bytes = self._starts[-1]
        self._lock = threading.Lock()
        # The last frames, which neighbouring ranges touch too; under _lock.
        self._cached: dict[int, bytes] = {}

    def read_into(self, offset: int, target: memoryview) -> None:
        if offset + len(target) > self.num_bytes:
            raise EOFError(f"{self._path} ends at byte {self.num_bytes:,}")
        while target:
            number = bisect.bisect_right(self._starts, offset) - 1
            frame = self._frame(number)
            begin = offset - self._starts[number]
            part = memoryview(frame)[begin : begin + len(target)]
            target[: len(part)] = part
            offset, target = offset + len(part), target[len(part) :]

    def _frame(self, number: int) -> bytes:
        with self._lock:
            cached = self._cached.get(number)
        if cached is not None:
            return cached
        size = self._starts[number + 1] - self._starts[number]
        data = bytearray(self._begins[number + 1] - self._begins[number])
        self._read(self._begins[number], data)
        package = zstandard_package()
        try:
            content_bytes = package.get_frame_parameters(data).content_size
            if content_bytes != size:
                raise ValueError(f"a frame holds {content_bytes:,} bytes where the seek table says {size:,}")
            frame: bytes = package.ZstdDecompressor().decompress(data)
        except (package.ZstdError, ValueError) as error:
            raise self._corrupt(f"frame {number} is damaged ({error})") from error
        with self._lock:
            while len(self._cached) >= _NUM_CACHED:
                del self._cached[next(iter(self._cached))]
            self._cached[number] = frame
        return frame

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
            raise self._corrupt("its frames are not those of an archive; use unpack()")
        return frames

    def _is_foreign(self) -> bool:
        """True if the first frame does not begin an archive."""
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

    def _corrupt(self, why: str) -> CorruptCheckpointError:
        return CorruptCheckpointError(f"{self._path}: {why}", path=self._path)

    def close(self) -> None:
        self._reader.close()


def zstandard_package() -> Any:
    try:
        import zstandard
    except ImportError:
        raise ImportError('zstd needs zstandard; pip install "async_ckpt[zstd]"') from None
    return zstandard
