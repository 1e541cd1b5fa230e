"""The speed of a disk or a store, and of saves and restores there.

In: a root. Out: a table of seconds, bandwidths and ratios, and advice. Knows nothing of: command-line arguments.

The raw speed of the place is measured with little code: whole segments from warm memory, past the page cache if the
file system allows it. In each round all candidates take turns, so that other load on the machine affects all of them. A
ratio is the median of the ratios of the rounds. Everything is written to a new folder below the root, which is deleted
at the end, also after Ctrl-C and SIGTERM.
"""

from __future__ import annotations

import mmap
import os
import re
import secrets
import shutil
import signal
import statistics
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch

from ... import AsyncCheckpointer, Place
from ...errors import StorageFullError
from ...plumbing import Reader, bulk, disk, limits, places, reports, spec, threads, timing
from .output import USAGE, Answer, print_json, print_table, print_text, progress, shown_rate, shown_seconds
from .place_arguments import place_below

_PIECE_BYTES: Final = 8 * spec.MIB
_NUM_THREADS: Final = 8
_NUM_SMALL: Final = 20
_NUM_ROUNDS: Final = 3
# No new round begins after this time.
_SECONDS: Final = 40.0
_PREFIX: Final = "async-ckpt-bench."
_ENDING: Final = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*(?:(k|M|G|T)(i?)B?|B|)")
# The state, its snapshot, and the data that is read back.
_STATES_IN_MEMORY: Final = 3
# One step for each round, since deleting one would slow down the next candidate; the raw file; the file of torch.save.
_STATES_ON_DISK: Final = _NUM_ROUNDS + 2
# Limits for the advice: a share of the raw bandwidth, and seconds.
_SLOW_SHARE: Final = 0.7
_LONG_STALL: Final = 0.05
_LONG_SAVE: Final = 2.0


@dataclass(slots=True)
class Measured:
    """One row of the table: the seconds of each round for `num_bytes`. `beside` is the row that its ratios refer to."""

    name: str
    num_bytes: int = 0
    beside: Measured | None = None
    seconds: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def ratio(self) -> float | None:
        """The bandwidth relative to the row `beside`; 1 is as fast."""
        if self.beside is None:
            return None
        return statistics.median(b / a for a, b in zip(self.seconds, self.beside.seconds, strict=True))

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "seconds": self.median,
            "bandwidth": self.num_bytes / self.median if self.num_bytes else None,
            "beside": self.beside.name if self.beside else None,
            "ratio": self.ratio,
        }


def show(root: Place | None, *, size: str, tensors: int, as_json: bool) -> None:
    """Measure saves of a state, and print the table or a JSON document. Raises StorageFullError."""
    root, num_bytes, num_tensors = root or Place("."), size_of(size), tensors
    _refuse(num_bytes, num_tensors)
    with _own_folder(root) as folder:
        rows = _measured(folder, num_bytes, num_tensors)
    advice = advice_for(rows, is_local=root.is_local)
    if as_json:
        document = {"place": root.shown, "num_bytes": num_bytes, "num_tensors": num_tensors}
        found = {"num_rounds": len(rows[0].seconds), "rows": rows, "advice": advice}
        print_json("bench", document | found)
        return
    print_table(
        ("what", ">time", ">bandwidth", "ratio"),
        (
            (
                row.name,
                shown_seconds(row.median),
                shown_rate(row.num_bytes / row.median) if row.num_bytes else None,
                None if row.beside is None else f"{row.ratio:.2f} of {_plain(row.beside)}",
            )
            for row in rows
        ),
    )
    print_text(
        f"{reports.sized(num_bytes)} in {num_tensors:,} tensors at {root.shown}, medians of "
        f"{len(rows[0].seconds)} rounds. {advice}"
    )


def size_of(text: str) -> int:
    """Parse a number of bytes: "1GB", "512MiB", "4096"."""
    match = _SIZE.fullmatch(text)
    if match is None:
        raise Answer(f"give the size as 1GB, 512MiB or 4096, not {text!r}", USAGE)
    power = " kMGT".index(match[2] or " ")
    return int(float(match[1]) * (1024 if match[3] else 1000) ** power)


def _refuse(num_bytes: int, num_tensors: int) -> None:
    if num_tensors < 1:
        raise Answer(f"--tensors must be at least 1, got {num_tensors}", USAGE)
    if num_bytes < 4 * num_tensors:
        raise Answer("--size must be at least 4 bytes for each of the --tensors", USAGE)
    free = limits.free_memory_bytes()
    if num_bytes * _STATES_IN_MEMORY > free:
        state, needed = (reports.sized(num_bytes * times) for times in (1, _STATES_IN_MEMORY))
        text = f"a state of {state} takes {needed} of memory here, and {reports.sized(free)} are free"
        raise Answer(f"{text}; pass a smaller --size", USAGE)


@contextmanager
def _own_folder(root: Place) -> Iterator[Place]:
    """A new folder below a root, which is deleted at the end of the block."""
    name = f"{_PREFIX}{secrets.token_hex(4)}"
    inner = place_below(root, name)
    was_there = not root.is_local or places.local_place(root).exists()
    is_main = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, _interrupt) for number in (_ENDING if is_main else ())}
    try:
        yield inner
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if inner.is_local:
            shutil.rmtree(places.local_place(inner), ignore_errors=True)
            if not was_there:
                with suppress(OSError):  # another program has put something there
                    places.local_place(root).rmdir()
        else:
            root.storage().delete_all(name)


def _interrupt(number: int, _: object) -> None:
    raise KeyboardInterrupt(signal.Signals(number).name)


def _measured(root: Place, num_bytes: int, num_tensors: int) -> list[Measured]:
    begin = timing.monotonic()
    with _Candidates(root, num_bytes, num_tensors) as candidates:
        rows = candidates.rows()
        with progress("bench", _NUM_ROUNDS * len(rows)) as advance:
            for _ in range(_NUM_ROUNDS):
                for row, measure in rows:
                    row.seconds.append(measure())
                    advance(1)
                if timing.monotonic() - begin > _SECONDS:
                    break
    return [row for row, _ in rows]


class _Candidates:
    """The candidates, which take turns in a round. `_measured` uses the object as a context."""

    def __init__(self, root: Place, num_bytes: int, num_tensors: int) -> None:
        self._storage, self._root, self._num_bytes = root.storage(), root, num_bytes
        self._folder = places.local_place(root) if root.is_local else None
        if self._folder is not None:
            self._folder.mkdir(parents=True)
            free = disk.free_bytes_at(self._folder)
            needed = _STATES_ON_DISK * num_bytes
            if free is not None and free < needed:
                raise StorageFullError(
                    f"{root.shown}: {reports.sized(needed)} are needed there, {reports.sized(free)} are free; pass a "
                    "smaller --size",
                    path=root.shown,
                )
        self._state = _state(num_bytes, num_tensors)
        # Written once: pages of new memory are scattered, and reading into them directly takes twice as long.
        self._pieces = [_random_piece() for _ in range(_NUM_THREADS)]
        self._step, self._stall_seconds = 0, 0.0

    def __enter__(self) -> _Candidates:
        self._checkpointer = AsyncCheckpointer(place_below(self._root, "run"))
        self._checkpointer.prewarm(self._state)
        return self

    def __exit__(self, *_: object) -> None:
        self._checkpointer.close()

    def rows(self) -> list[tuple[Measured, Callable[[], float]]]:
        """The rows of the table, each with the call that measures it once and returns seconds."""
        is_disk, num_bytes = self._folder is not None, self._num_bytes
        kind, small = ("O_DIRECT", "fsync of 4 kB") if is_disk else ("multipart", "conditional put of 4 kB")
        raw_write, raw_read = (Measured(f"raw {word}, {kind}", num_bytes) for word in ("write", "read"))
        rows: list[tuple[Measured, Callable[[], float]]] = [
            (raw_write, self._write_raw),
            (Measured("save until durable", num_bytes, raw_write), self._save),
            (Measured("training held up"), lambda: self._stall_seconds),
            (raw_read, self._read_raw),
            (Measured("restore, in place", num_bytes, raw_read), self._restore),
            (Measured("torch.save and fsync", num_bytes, raw_write), self._torch_save),
            (Measured(small), partial(_median_of, self._put_small)),
            (Measured("listing"), partial(_median_of, lambda: self._storage.names(""))),
        ]
        return [(row, measure) for row, measure in rows if is_disk or measure != self._torch_save]

    # --- the raw speed of the place -------------------------------------------------------------------------------

    @property
    def _raw_path(self) -> Path:
        assert self._folder is not None
        return self._folder / "raw"

    def _write_raw(self) -> float:
        if self._folder is None:
            return _seconds_of(self._write_object)
        for path in self._folder.glob("raw*"):
            path.unlink()
        return _seconds_of(self._write_file)

    def _read_raw(self) -> float:
        return _seconds_of(self._read_object if self._folder is None else self._read_file)

    def _write_file(self) -> None:
        """Write a new file, like the archive of a save."""
        fd = _open_direct(self._raw_path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
        try:
            with suppress(OSError):
                os.posix_fallocate(fd, 0, self._num_bytes)
            _in_pieces(self._num_bytes, lambda at, thread: os.pwrite(fd, self._pieces[thread], at))
            os.fsync(fd)
        finally:
            os.close(fd)

    def _read_file(self) -> None:
        fd = _open_direct(self._raw_path, os.O_RDONLY)
        try:
            _drop_cache(self._raw_path)
            _in_pieces(self._num_bytes, lambda at, thread: os.preadv(fd, [self._pieces[thread]], at))
        finally:
            os.close(fd)

    def _write_object(self) -> None:
        bulk.copy(
            [bulk.Parcel(partial(_Memory, self._pieces[0], self._num_bytes), "raw", self._num_bytes)], self._storage
        )

    def _read_object(self) -> None:
        pieces = [memoryview(piece) for piece in self._pieces]
        with self._storage.open("raw") as reader:

            def read(at: int, thread: int) -> None:
                reader.read_into(at, pieces[thread][: self._num_bytes - at])

            _in_pieces(self._num_bytes, read)

    def _put_small(self) -> None:
        name, data = f"small.{secrets.token_hex(4)}", os.urandom(4096)
        if self._folder is None:
            self._storage.put_new(name, data)
            return
        with open(self._folder / name, "wb") as file:
            file.write(data)
            os.fsync(file.fileno())

    # --- saves and restores ---------------------------------------------------------------------------------------

    def _save(self) -> float:
        self._step += 1
        for tensor in self._state.values():
            tensor.view(-1)[0] = self._step
        report = self._checkpointer.save(self._state, self._step).result()
        self._stall_seconds = report.stall_seconds
        return report.total_seconds

    def _restore(self) -> float:
        if self._folder is not None:
            for archive in self._folder.glob("run/*/*.tar"):
                _drop_cache(archive)
        return _seconds_of(lambda: self._checkpointer.restore(self._state))

    def _torch_save(self) -> float:
        def save() -> None:
            with open(self._raw_path.with_suffix(".pt"), "wb") as file:
                torch.save(self._state, file)
                file.flush()
                os.fsync(file.fileno())

        return _seconds_of(save)


def _state(num_bytes: int, num_tensors: int) -> dict[str, torch.Tensor]:
    """Float32 tensors of equal size. Their values are random, since some disks compress."""
    length = num_bytes // num_tensors // 4
    noise = torch.rand(min(length, 1 << 20))
    return {
        f"layer.{number}": noise.repeat(-(-length // len(noise)))[:length].add_(number) for number in range(num_tensors)
    }


def _random_piece() -> mmap.mmap:
    piece = mmap.mmap(-1, _PIECE_BYTES)
    piece.write(os.urandom(_PIECE_BYTES))
    return piece


def _seconds_of(action: Callable[[], object]) -> float:
    begin = timing.monotonic()
    action()
    return timing.monotonic() - begin


def _median_of(action: Callable[[], object]) -> float:
    return statistics.median(_seconds_of(action) for _ in range(_NUM_SMALL))


def _in_pieces(num_bytes: int, move: Callable[[int, int], object]) -> None:
    """Call `move` with the offset of each piece and the number of its thread."""

    def run(thread: int) -> None:
        for at in range(thread * _PIECE_BYTES, num_bytes, _NUM_THREADS * _PIECE_BYTES):
            move(at, thread)

    threads.run_together("bench", [partial(run, thread) for thread in range(_NUM_THREADS)], max_threads=_NUM_THREADS)


def _open_direct(path: Path, flags: int) -> int:
    """Open a file past the page cache if the file system allows it."""
    with suppress(OSError):
        return os.open(path, flags | getattr(os, "O_DIRECT", 0), 0o644)
    return os.open(path, flags, 0o644)


def _drop_cache(path: Path) -> None:
    if hasattr(os, "posix_fadvise"):
        fd = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


class _Memory(Reader):
    """A reader that repeats one piece of memory. Each object that is written has its own reader."""

    def __init__(self, piece: mmap.mmap, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._piece = memoryview(piece)

    def read_into(self, offset: int, target: memoryview) -> None:  # noqa: ARG002
        for at in range(0, len(target), _PIECE_BYTES):
            piece = target[at : at + _PIECE_BYTES]
            piece[:] = self._piece[: len(piece)]


def _plain(row: Measured) -> str:
    return row.name.partition(",")[0]


def advice_for(rows: Sequence[Measured], *, is_local: bool) -> str:
    """A sentence that names the option that would help most."""
    by_name = {_plain(row): row for row in rows}
    save, stall, write = by_name["save until durable"], by_name["training held up"], by_name["raw write"]
    if not is_local and save.median > _LONG_SAVE:
        return (
            "Saves wait for the network: AsyncCheckpointer([a local folder, this root]) is durable at "
            "the speed of the disk, and uploads behind it."
        )
    if stall.median > _LONG_STALL:
        return "The copy holds the training up: AsyncCheckpointer(guard=optimizer) overlaps it with the next pass."
    if save.ratio is not None and save.ratio < _SLOW_SHARE:
        return (
            "Saves are slower than the place: with many small tensors, unchanged= leaves out those that do not change; "
            "async-ckpt doctor shows whether the processors or the memory are limited."
        )
    if save.median > _LONG_SAVE:
        slow = shown_rate(write.num_bytes / write.median)
        return f"The place itself writes {slow}: with unchanged=, only what has changed is written."
    return "Nothing stands out; the defaults suit this place."
