"""`save` and `load` for one archive at any path, without a managed run.

In: a state and a path, or a path. Out: a handle, or the state. Knows nothing of: training, retention.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import torch

from .loading.find import from_path
from .loading.load import check_verify, state_of
from .loading.open import Part
from .saving import default
from .saving.handle import SaveHandle, host_copy_of
from .saving.targets import Compression, FileTarget
from .state.names import Select
from .storage.place import Engine
from .storage.url import Where

_OTHER_COMPRESSIONS: Final = (".gz", ".tgz", ".bz2", ".xz", ".lz4", ".zip")


def save(
    obj: Any,
    path: Where,
    *,
    guard: Any = None,
    select: Select = None,
    also: SaveHandle | None = None,
    compression: Compression = None,
    storage_options: Mapping[str, Any] | None = None,
    engine: Engine | None = None,
    fs: Any = None,
) -> SaveHandle:
    """Save `obj` as one tar at `path`, in the order of arguments of `torch.save`; returns a handle at once.

    The file appears whole, or replaces what was there, when it is durable; until then nothing is visible. One such
    save is under way at a time: the next call waits for it, and the wait is in its report. Host memory is kept for
    the next save; `release()` gives it back.
    `select`: save only this part: a name, a glob over dotted paths ("*.lora_*"), or several.
    `compression`: "zstd", or `Zstd(level=…, threads=…)`; a path that ends in ".zst" is compressed without it, too. The
    report's `num_bytes` are those of the archive, its destination's those that were written.
    `also`: the handle of an `export_hf` of the same moment, nothing having changed in between; what it copies to the
    host is not copied again. Each has its own handle.
    `path` may be a URL ("s3://bucket/x.tar"); `storage_options`, `engine` and `fs` are as for AsyncCheckpointer.
    Raises UnsupportedStateError for a state that cannot be stored, and what `path` itself gives reason for (a folder,
    an unknown scheme, a name that is too long, or promises gzip); all else ends in the handle.
    """
    place = {"storage_options": storage_options, "engine": engine, "fs": fs}
    target = FileTarget.at(path, place, compression)
    if target.path.endswith(_OTHER_COMPRESSIONS):
        raise ValueError(
            f"{target.path}: only zstd is written here; name it .tar.zst, or .tar for a plain one"
        )
    return default.one_off_saver().save(
        lambda: obj, lambda: [target], step=None, guard=guard, select=select, also=host_copy_of(also)
    )


def release() -> None:
    """Give back the host memory that one-off saves and wrapped functions keep for the next one."""
    default.release()


def load(
    path: Where,
    map_location: str | torch.device | None = None,
    select: Select = None,
    trust: bool = False,
    verify: bool = True,
    mmap: bool = False,
    types: Iterable[type] = (),
    *,
    storage_options: Mapping[str, Any] | None = None,
    engine: Engine | None = None,
    fs: Any = None,
) -> Any:
    """The state saved at `path`: an archive, the folder of a committed step, or the root of a run (its newest step).

    Args:
        path: where it is.
        map_location: device of the tensors; None is the CPU, wherever they were saved from.
        select: read only this part: a name ("model"), a glob over dotted paths ("model.*.bias"), or several.
        trust: unpickle leaves that are not plain data. Only for files whose writer you trust: a pickle can run code.
        verify: compare the digest of every block that is touched.
        mmap: tensors are views of the mapped file, private to this process; with `verify=False` only what is used is read.
        types: classes of namedtuples, dataclasses and enums to rebuild; others come back as tuples, dicts and values.
        storage_options: what the client of a URL needs; see AsyncCheckpointer, for the next two as well.
        engine: which client that is.
        fs: an fsspec filesystem to use instead.

    Raises NotCommittedError, CorruptCheckpointError, FormatVersionError, UntrustedObjectError, StorageUnavailableError,
    and KeyError when `select`, or one of several in it, matches nothing.
    """
    check_verify(verify)
    place = {"storage_options": storage_options, "engine": engine, "fs": fs}

    def build(parts: Sequence[Part]) -> Any:
        return state_of(parts, map_location=map_location, select=select, trust=trust, mmap=mmap, types=types)

    return from_path(path, build, verify=verify, place=place)
