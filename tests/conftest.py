"""Fixtures that several test files ask for."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from children import Nursery
from racing import PATIENCE, Gate

from async_ckpt.saving import worker
from async_ckpt.testing import FaultyProxy, moto_server, rclone_server
from async_ckpt.testing.servers import Server


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Every test draws the same numbers, whichever tests ran before it."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _ended(request: pytest.FixtureRequest) -> Iterator[None]:
    """What a test has left under way ends before its folder is deleted."""
    if "tmp_path" in request.fixturenames:
        request.getfixturevalue("tmp_path")  # which then is torn down after this
    yield
    for pending in list(worker._worker._pending) if worker._worker is not None else []:
        pending.finished.exception(PATIENCE)


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    """Where a test may save one archive."""
    return tmp_path / "x.tar"


@pytest.fixture
def gate() -> Iterator[Gate]:
    """A point where a function waits for the test, or for its end."""
    made = Gate()
    yield made
    made.open()


@pytest.fixture(scope="session")
def s3() -> Iterator[Server]:
    """A faithful S3 server. Every test makes a bucket or a prefix of its own."""
    with moto_server() as server:
        yield server


@pytest.fixture
def bucket(s3: Server) -> str:
    """An empty bucket of the test's own."""
    name = f"bucket-{uuid.uuid4().hex[:12]}"
    s3.make_bucket(name)
    return name


@pytest.fixture
def proxy(s3: Server) -> Iterator[FaultyProxy]:
    """What stands before the faithful server, and may be told to misbehave."""
    with FaultyProxy(s3.endpoint) as proxy:
        yield proxy


@pytest.fixture(scope="session")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    """What runs scripts in processes of their own, forked from one that has imported all they need."""
    with Nursery(tmp_path_factory.mktemp("children")) as started:
        yield started


@pytest.fixture(scope="session")
def rclone_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `rclone` serves; its folders are the buckets."""
    return tmp_path_factory.mktemp("rclone")


@pytest.fixture(scope="session")
def rclone(rclone_folder: Path) -> Iterator[Server]:
    """An S3 server that checks signatures and writes to the disk."""
    with rclone_server(rclone_folder) as server:
        yield server
