"""A rank restores its part of a step of many ranks from a remote store.

In: the number of ranks. Out: the requests of one rank to the store. Knows nothing of: figures.

A few ranks are real, and so are their archives. Their state is all zeros, and the bytes are generated when they are
read. The other archives exist only by size and digest: a rank that requested one would fail. So the requests of a rank
do not depend on other ranks, and all ranks together make those of the few, times as many as there are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any, Final, NamedTuple, Self

import torch

from async_ckpt.core.format import digests
from async_ckpt.core.format.layout import Layout, TensorPlan, lay_out
from async_ckpt.core.loading.archives.find import CommittedStep, from_committed
from async_ckpt.core.loading.archives.step_archives import Readers
from async_ckpt.core.loading.restore import RestoreOptions, restore_state
from async_ckpt.core.runs import layouts
from async_ckpt.core.runs.manifest import NAME as MANIFEST
from async_ckpt.core.runs.manifest import Manifest, RankFiles, archive_name
from async_ckpt.core.runs.receipts import Exchange, Receipt, Table
from async_ckpt.core.runs.run import Run
from async_ckpt.core.slicing.locator import StepLayout
from async_ckpt.core.spec import BLOCK_BYTES
from async_ckpt.core.state.capture import capture
from async_ckpt.core.state.captured import Capture
from async_ckpt.core.state.division import StateDivider
from async_ckpt.core.storage.local import LocalStorage

from .fake_ranks import sharded, standing_at
from .far_store import Bucket, FarStorage
from .simulated_ranks import LATENCY_SECONDS, Placed

_STEP: Final = 100
_ATTEMPT: Final = "0123abcd"
# The part of each tensor on each rank: 32 MiB for a thousand tensors.
_ROWS, _COLUMNS = 8, 1024
_FEW_COLUMNS: Final = 8


class Restart(NamedTuple):
    """The requests of one rank to the store."""

    num_ranks: int
    requests: float
    received: float
    """The number of bytes that the rank receives."""
    own_bytes: int
    """The number of bytes of the tensors that the rank holds."""
    reads: float
    """The requests for its own archive, which no other rank reads."""
    shared: float
    """The most requests for one of the objects that all ranks read."""


def of_one_reader(size: int, num_tensors: int, sample: int) -> Restart:
    """The mean of a few ranks, including the first and the last."""
    bucket, folder = Bucket(), ""
    ranks = sorted({(size - 1) * n // max(1, sample - 1) for n in range(min(sample, size))})
    for rank in ranks:
        folder = _put(bucket, rank, size, num_tensors)
    _commit(bucket, folder, size, num_tensors)
    counted = [_restored(bucket, rank, size, num_tensors) for rank in ranks]
    held = num_tensors * _ROWS * _COLUMNS * 4
    return Restart(
        size,
        mean(one.traffic.requests for one in counted),
        mean(one.traffic.received for one in counted),
        held,
        mean(one.of_archives for one in counted),
        mean(one.of_shared for one in counted),
    )


def step_on_disk(root: Path, size: int, num_tensors: int) -> Path:
    """A committed step of this many ranks with all archives, with a few items of each tensor."""
    storage = LocalStorage(str(root))
    run = Run(storage, clock=lambda: 0.0)
    (root / run.folder(_STEP)).mkdir(parents=True)
    archives = [_archive_of(rank, size, num_tensors, _FEW_COLUMNS) for rank in range(size)]
    for rank, archive in enumerate(archives):
        data = bytearray(archive.num_bytes)
        archive.read_into(0, memoryview(data))
        (root / run.attempt_path(_STEP, _ATTEMPT, rank)).write_bytes(data)
    made = _manifest(storage, run.folder(_STEP), archives, num_tensors, _FEW_COLUMNS)
    storage.put_new(f"{run.folder(_STEP)}/{MANIFEST}", made.dump())
    return root / run.folder(_STEP)


def _tensors(rows: int, num_tensors: int, columns: int) -> dict[str, torch.Tensor]:
    return {f"layer.{n}": torch.empty(1).expand(rows, columns) for n in range(num_tensors)}


def _captured(rank: int, size: int, num_tensors: int, columns: int) -> Capture:
    return capture({"model": _tensors(size * _ROWS, num_tensors, columns)}, slicer=Placed("FSDP", rank, size))


def _archive_of(rank: int, size: int, num_tensors: int, columns: int = _COLUMNS) -> _Zeros:
    divided = StateDivider(rank, size).divided(_captured(rank, size, num_tensors, columns), range(size))
    layout = lay_out(
        TensorPlan(divided.captured.specs),
        skeleton=divided.captured.skeleton,
        objects=None,
        step=_STEP,
        mtime=0,
        ranks=divided.ranks,
    )
    return _Zeros(layout)


def _put(bucket: Bucket, rank: int, size: int, num_tensors: int) -> str:
    """Put the archive of a rank. Returns the folder of its step."""
    run = Run(FarStorage(bucket, LATENCY_SECONDS), clock=lambda: 0.0)
    bucket.put(run.attempt_path(_STEP, _ATTEMPT, rank), _archive_of(rank, size, num_tensors))
    return run.folder(_STEP)


def _commit(bucket: Bucket, folder: str, size: int, num_tensors: int) -> None:
    archives = {name: made.data for name, made in bucket.folders[folder].items() if isinstance(made.data, _Zeros)}
    some = next(iter(archives.values()))
    told = [archives.get(archive_name(rank, _ATTEMPT), some) for rank in range(size)]
    made = _manifest(FarStorage(bucket, LATENCY_SECONDS), folder, told, num_tensors, _COLUMNS)
    bucket.put(f"{folder}/{MANIFEST}", made.dump())


def _manifest(storage: Any, folder: str, told: Sequence[_Zeros], num_tensors: int, columns: int) -> Manifest:
    """The manifest of these archives, after putting the other objects."""
    size, exchange = len(told), Exchange(storage, folder, _ATTEMPT)
    receipts = [Receipt(rank, digest=one.digest, num_bytes=one.num_bytes) for rank, one in enumerate(told)]
    structure = StateDivider(0, size).structure(_captured(0, size, num_tensors, columns))
    layout = StepLayout({structure.digest: range(size)}, {structure.digest: structure.text})
    table = Table(layout.classes)
    of_ranks = RankFiles(
        exchange.put_archives(receipts),
        exchange.put_layout(layouts.dump(layout, table)),
        table.digest,
        sum(one.num_bytes for one in told),
    )
    return Manifest(_STEP, _ATTEMPT, size, 0.0, (), ranks=of_ranks)


def _restored(bucket: Bucket, rank: int, size: int, num_tensors: int) -> _Counted:
    """The storage of a rank after it has restored its state, with its requests counted."""
    storage = _Counted(bucket, LATENCY_SECONDS)
    run = Run(storage, clock=lambda: 0.0)
    local = {f"layer.{n}": torch.ones(_ROWS, _COLUMNS) for n in range(num_tensors)}
    with standing_at(rank, size) as mesh:
        live = {name: sharded(value, (size * _ROWS, _COLUMNS), mesh) for name, value in local.items()}
        from_committed(
            CommittedStep.of(run, _STEP),
            lambda parts: restore_state(parts, {"model": live}, RestoreOptions()),
            verify=True,
            readers=Readers((rank, size)),
        )
    if any(value.any() for value in local.values()):
        raise AssertionError("what was restored is not what was saved")
    return storage


class _Counted(FarStorage):
    """A storage that counts the reads of each object."""

    def __init__(self, bucket: Bucket, latency_seconds: float) -> None:
        super().__init__(bucket, latency_seconds)
        self._reads: Counter[str] = Counter()

    @property
    def of_archives(self) -> int:
        return sum(count for path, count in self._reads.items() if path.endswith(".tar"))

    @property
    def of_shared(self) -> int:
        return max(count for path, count in self._reads.items() if not path.endswith(".tar"))

    def read(self, path: str) -> tuple[bytes, str]:
        self._reads[path] += 1
        return super().read(path)

    def open(self, path: str) -> Any:
        reader = super().open(path)
        read_into = reader.read_into

        def counted(offset: int, target: memoryview) -> None:
            with self._lock:
                self._reads[path] += 1
            read_into(offset, target)

        reader.read_into = counted  # type: ignore[method-assign]
        return reader


class _Zeros:
    """The archive of tensors that are all zeros."""

    def __init__(self, layout: Layout) -> None:
        self._literals = [literal for literal in layout.literals if literal[1]]
        self.num_bytes = layout.file_bytes
        covered = layout.digests.data.offset
        blocks = bytearray()
        for begin in range(0, covered, BLOCK_BYTES):
            block = bytearray(min(BLOCK_BYTES, covered - begin))
            self.read_into(begin, memoryview(block))
            blocks += digests.block_digest(bytes(block))
        tail = digests.dump(covered, bytes(blocks))
        self._literals.append((covered, tail))
        self.digest = digests.self_digest(tail)

    def __call__(self) -> Self:
        return self

    def read_into(self, offset: int, target: memoryview) -> None:
        target[:] = bytes(len(target))
        for at, data in self._literals:
            begin, end = max(at, offset), min(at + len(data), offset + len(target))
            if begin < end:
                target[begin - offset : end - offset] = data[begin - at : end - at]

    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...
