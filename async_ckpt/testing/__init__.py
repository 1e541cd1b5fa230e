"""Tests for storages: the contract, real S3 servers on loopback, and a proxy that breaks connections as scripted.

`contract.py` is the contract, in two parts: `archive_contract.py` and `objects.py`, with memory from `lending.py`.
`servers.py` runs S3 servers in processes of `_child.py`. `proxy.py` is the proxy, and `requests.py` handles a request
in it. No other room imports this room.
pytest, moto, boto3 and the binary of rclone are needed only on use: `pip install "async_ckpt[test]"`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .proxy import FaultyProxy
from .servers import moto_server, rclone_server

if TYPE_CHECKING:
    from .contract import StorageContract

__all__ = ["FaultyProxy", "StorageContract", "moto_server", "rclone_server"]


def __getattr__(name: str) -> Any:
    # Imported on use, since it needs pytest, and pytest must first be told to rewrite its assertions.
    if name == "StorageContract":
        import pytest

        pytest.register_assert_rewrite(
            *(f"{__name__}.{part}" for part in ("contract", "archive_contract", "objects", "lending"))
        )
        from .contract import StorageContract

        return StorageContract
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
