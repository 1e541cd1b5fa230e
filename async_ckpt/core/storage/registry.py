"""The functions that make storages of URLs: one for each scheme, and one for all others.

In: schemes, and functions of wings and users. Out: the storage of a URL. Knows nothing of: clients, paths.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, Final, TypeAlias

from .interface import Storage
from .url import SCHEMES

Maker: TypeAlias = Callable[[str, Mapping[str, Any] | None], Storage]
"""A function of a URL and the options of its `Place` that returns the storage whose root that is."""

# The wing that serves a scheme, imported when the first storage is made: `import async_ckpt` brings no client along.
OBSTORE: Final = "async_ckpt.stores.s3.store:ObjectStorage"
FSSPEC: Final = "async_ckpt.stores.fsspec.store:FsspecStorage"

_SCHEME: Final = re.compile(r"[a-z][a-z0-9+.-]+")
_lock = threading.Lock()
_makers: dict[str, Maker] = {}


def register_storage(scheme: str, make: Maker) -> None:
    """Have `Place("scheme://…")` use a storage of your own, everywhere in this process.

        register_storage("mem", lambda url, options: MyStorage(url, **(options or {})))
        async_ckpt.save(state, "mem://folder/x.ackpt.tar")

    `async_ckpt.testing.StorageContract` tests what a storage must keep to.

    Args:
        scheme: in lower case, without "://". Another function that was registered for it is replaced.
        make: called with a URL and the options of its `Place`, or None; returns the `Storage` whose root the URL is. It
            makes no request, and raises ValueError for a URL that is not valid.

    Raises TypeError if `make` is not callable, and ValueError for a scheme that is not valid or has a client already.
    """
    if not callable(make):
        raise TypeError(f"make must be a function of a URL and its options, got {make!r:.100}")
    if not isinstance(scheme, str) or not _SCHEME.fullmatch(scheme):
        raise ValueError(
            f'scheme must be lower-case letters and digits such as "mem", without "://", got {scheme!r:.100}'
        )
    if scheme == "file" or scheme in SCHEMES:
        raise ValueError(f"{scheme}:// has a client already; choose another scheme")
    with _lock:
        _makers[scheme] = make


def own_maker(scheme: str | None) -> Maker | None:
    """The function that a user has registered for a scheme, or None."""
    return _makers.get(scheme or "")


def maker_of(home: str) -> Callable[..., Storage]:
    """The function of a wing that makes storages: of OBSTORE, or of FSSPEC, which also takes a filesystem, as `fs`."""
    module, _, name = home.partition(":")
    maker: Callable[..., Storage] = getattr(import_module(module), name)
    return maker
