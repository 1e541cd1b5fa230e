"""Which storage a path or URL belongs to.

In: what the user said. Out: a storage, which is asked nothing. Knows nothing of: what is stored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from .base import Storage
from .local import LocalStorage
from .url import SCHEMES, Where, local_path, scheme_of, text_of

Engine = Literal["obstore", "fsspec", "s3fs"]


def storage_at(
    root: Where,
    *,
    engine: Engine | None = None,
    fs: Any = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Storage:
    """The storage whose root is this folder, bucket prefix or fsspec URL.

    `engine` "obstore" or "fsspec" (for S3 also called "s3fs") overrides the choice that the scheme gives reason for;
    `fs` is an fsspec filesystem to use as it is. `storage_options` are for whichever of them is used, not for a local
    disk. Raises TypeError and ValueError for what is no place, ImportError when a package is missing.
    """
    if engine not in (None, "obstore", "fsspec", "s3fs"):
        raise ValueError(f'engine must be "obstore", "fsspec" or "s3fs", got {engine!r}')
    text = text_of(root)
    scheme = scheme_of(text)
    if engine == "s3fs" and scheme not in ("s3", "s3a", None):
        raise ValueError(f'engine="s3fs" is for s3:// URLs; {scheme}:// has its own')
    if fs is None and scheme in (None, "file"):
        return LocalStorage(local_path(text))
    if fs is None and (engine == "obstore" or (engine is None and scheme in SCHEMES)):
        from .s3.store import ObjectStorage

        return ObjectStorage(text, storage_options)
    from .fsspec.store import FsspecStorage

    return FsspecStorage(text, storage_options, fs=fs)
