"""Other ways to bring a state, or its bytes, to S3, each in the fastest configuration of its documentation.

In: an endpoint, a state, bytes in memory. Out: functions that upload once. Knows nothing of: clocks, async_ckpt.

None of them signs its payload: over TLS this is not needed either, and over plain HTTP some would hash all of it.
Checksums are made only where the store requires them.
"""

from __future__ import annotations

import mmap
import shutil
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import torch

from .limits import MIB

_REGION: Final = "us-east-1"
_PART_BYTES: Final = 32 * MIB
_PARTS_IN_FLIGHT: Final = 8
_BLOCK_BYTES: Final = 50 * MIB  # s3fs's default, like ten at once


@dataclass(frozen=True, slots=True)
class Given:
    """The data to upload, and the target."""

    endpoint: str
    path: str
    """The bucket and the key."""
    memory: mmap.mmap
    """Memory with as many bytes as the state, filled before the upload."""
    state: Any
    folder: Path

    @property
    def key(self) -> str:
        return self.path.partition("/")[2]

    @property
    def bucket(self) -> str:
        return self.path.partition("/")[0]


@dataclass(frozen=True, slots=True)
class Contender:
    title: str
    configuration: str
    package: str
    begin: Callable[[Given], Callable[[], None]]
    """Creates the client, and returns a function that uploads the data once."""

    @property
    def installed(self) -> bool:
        return find_spec(self.package) is not None


def _s3fs_file(given: Given) -> Callable[[], None]:
    fs = _s3fs(given.endpoint)

    def upload() -> None:
        with fs.open(given.path, "wb") as file, memoryview(given.memory) as view:
            for begin in range(0, len(view), _BLOCK_BYTES):
                file.write(view[begin : begin + _BLOCK_BYTES])

    return upload


def _boto3(given: Given) -> Callable[[], None]:
    boto3, botocore, config = import_module("boto3"), import_module("botocore"), import_module("botocore.config")
    client = boto3.client(
        "s3",
        endpoint_url=given.endpoint,
        region_name=_REGION,
        config=config.Config(
            signature_version=botocore.UNSIGNED,
            request_checksum_calculation="when_required",
            max_pool_connections=_PARTS_IN_FLIGHT,
        ),
    )
    transfer = import_module("boto3.s3.transfer").TransferConfig(
        multipart_threshold=_PART_BYTES, multipart_chunksize=_PART_BYTES, max_concurrency=_PARTS_IN_FLIGHT
    )

    def upload() -> None:
        given.memory.seek(0)
        client.upload_fileobj(given.memory, given.bucket, given.key, Config=transfer)

    return upload


def _s3torchconnector(given: Given) -> Callable[[], None]:
    package = import_module("s3torchconnector")
    config = package.S3ClientConfig(
        throughput_target_gbps=100.0, part_size=_PART_BYTES, unsigned=True, force_path_style=True
    )
    checkpoint = package.S3Checkpoint(_REGION, endpoint=given.endpoint, s3client_config=config)

    def upload() -> None:
        with checkpoint.writer(f"s3://{given.path}") as file:
            torch.save(given.state, file)

    return upload


def _torch_tar_s3fs(given: Given) -> Callable[[], None]:
    fs = _s3fs(given.endpoint)
    folder, archive = given.folder / "saved", given.folder / "saved.tar"

    def upload() -> None:
        folder.mkdir()
        torch.save(given.state, folder / "state.pt")
        with tarfile.open(archive, "w") as tar:
            tar.add(folder, arcname=".")
        fs.put(str(archive), given.path)
        archive.unlink()
        shutil.rmtree(folder)

    return upload


def _s3fs(endpoint: str) -> Any:
    return import_module("s3fs").S3FileSystem(
        anon=True,
        endpoint_url=endpoint,
        config_kwargs={"request_checksum_calculation": "when_required"},
        skip_instance_cache=True,
    )


PEERS: Final = {
    "s3fs": Contender("s3fs.open().write", "bytes ready in memory, blocks of 50 MiB, 10 at once", "s3fs", _s3fs_file),
    "boto3": Contender("boto3 upload_fileobj", "bytes ready in memory, parts of 32 MiB, 8 threads", "boto3", _boto3),
    "s3torchconnector": Contender(
        "torch.save into s3torchconnector's writer",
        "parts of 32 MiB, target of 100 Gbit/s",
        "s3torchconnector",
        _s3torchconnector,
    ),
    "torch_tar_s3fs": Contender(
        "torch.save, tarfile, s3fs.put",
        "page cache, no fsync, parts of 50 MiB, 10 at once",
        "s3fs",
        _torch_tar_s3fs,
    ),
}
