"""Segments on loan to a sink, in memory that is wiped when it is given back; a store behind a proxy."""

import random
import threading

from racing import Skipping
from states import MIB

from async_ckpt.stores.s3.store import ObjectStorage

SEGMENT = 5 * MIB  # the smallest that is a part by itself


def behind(proxy, s3, bucket, **options) -> ObjectStorage:
    options = {"retry_config": {"max_retries": 1}, "deadline_seconds": 30.0} | options
    return ObjectStorage(f"s3://{bucket}/run", {**s3.options, "endpoint": proxy.endpoint, **options}, Skipping())


class Loan:
    """A segment on loan that knows whether it may be read."""

    def __init__(self, data: bytes) -> None:
        self.view = memoryview(bytearray(data))
        self.count = 1
        self._lock = threading.Lock()

    def retain(self) -> None:
        with self._lock:
            assert self.count > 0, "retained after it was given back"
            self.count += 1

    def release(self) -> None:
        with self._lock:
            self.count -= 1
            assert self.count >= 0, "released twice"
            back = self.count == 0
        if back:
            self.view[:] = b"\xff" * len(self.view)  # whoever reads it now reads nothing of worth


class Archive:
    """An object in segments, each in memory that is wiped when it is given back."""

    def __init__(self, num_bytes: int, segment_bytes: int = SEGMENT) -> None:
        self.data = random.Random(num_bytes).randbytes(num_bytes)
        self.segment_bytes = segment_bytes
        starts = range(0, num_bytes, segment_bytes)
        self.loans = [Loan(self.data[at : at + segment_bytes]) for at in starts]

    def sink(self, storage, path="x.tar", **options):
        return storage.create(path, num_bytes=len(self.data), segment_bytes=self.segment_bytes, **options)

    def write(self, sink, number: int) -> None:
        """Lend a segment to the sink, and keep no part in it."""
        loan = self.loans[number]
        try:
            sink.write(number * self.segment_bytes, loan.view, loan)
        finally:
            loan.release()

    def write_all(self, sink) -> None:
        for number in range(len(self.loans)):
            self.write(sink, number)

    @property
    def lent(self) -> list[int]:
        return [number for number, loan in enumerate(self.loans) if loan.count]


def write_and_finish(archive: Archive, sink) -> None:
    """Every loan ends, however far the sink takes them."""
    try:
        archive.write_all(sink)
        sink.finish()
    finally:
        for loan in archive.loans:
            if loan.count and not sink._segments.lent:
                loan.release()
