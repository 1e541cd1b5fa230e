"""`save` and `load` for one archive at any path, or one folder of several ranks, without a managed run.

In: a state and a path, or a path. Out: a handle, or the state. Knows nothing of: training, retention.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from functools import partial
from importlib import import_module
from typing import Any, Final

import torch

from ..core.loading.archives.find import from_path
from ..core.loading.archives.step_archives import Readers, selected_by
from ..core.loading.load import LoadOptions, check_verify, state_of
from ..core.loading.verify import verify_path
from ..core.ranks.one_off import OneOffFolder
from ..core.ranks.world import warn_of_ranks, world_of_group
from ..core.report import VerifyReport
from ..core.saving import kept_memory
from ..core.saving.file_target import Compression, FileTarget
from ..core.saving.handle import SaveHandle
from ..core.saving.planner import pool_for
from ..core.saving.request import FileRequest, FolderRequest
from ..core.saving.saver import Saver
from ..core.spec import flag, whole_bytes
from ..core.staging.held_snapshot import HeldSnapshot, begin
from ..core.state.names import Select
from ..core.state.wrappers import StateDictCache
from ..core.storage.compressed import refuse_archive_name
from ..core.storage.place import Anywhere, Place, storage_at, written_at

# The wing that verifies published versions, imported when something is verified.
_VERSIONS: Final = "async_ckpt.weights.publishing.verify_versions"


def save(
    obj: Any,
    path: Anywhere,
    *,
    guard: Any = None,
    select: Select = None,
    compression: Compression = None,
) -> SaveHandle:
    """Save `obj` as one tar at `path`, with the argument order of `torch.save`. Returns a handle at once.

        handle = async_ckpt.save({"model": model, "epoch": 3}, "out/x.ackpt.tar")
        report = handle.result()  # waits until the file is durable

    The file appears as a whole, or replaces an existing one, when it is durable. Until then nothing is visible. One
    save is under way at a time: the next call waits for it, and its report counts the wait as stall. Host memory is
    kept for the next save; `release` frees it.

    If the state has DTensors, every rank makes this call, with the same path. Then `path` is a folder: each rank
    writes an archive in it, and rank 0 commits all of them with one manifest, as an AsyncCheckpointer does for a step.
    `load` reads it on any number of ranks. Any other state is saved by one rank: a rank other than 0 is warned that
    every rank may be writing to the same path.

    Args:
        obj: any nesting of dicts, lists, tuples, tensors, plain values and objects with `state_dict()`; or a snapshot.
        path: a path, a URL such as "s3://bucket/x.ackpt.tar", or a Place.
        guard: the optimizer (or optimizers) whose `step()` is the only code that changes its parameters and its state.
            Copying them then overlaps the next forward and backward pass, and `step()` waits until the copy is done.
        select: save only this part: a name, a glob over dotted paths such as "*.lora_*", or several of them.
        compression: "zstd", or `Zstd(level=…, threads=…)`. A path that ends in ".zst" is always compressed. The
            report's `num_bytes` is the size before compression, and its destination's `num_bytes` the size after it.
            Not for a state with DTensors.

    Raises UnsupportedStateError for a state that cannot be stored, KeyError if `select` matches nothing, ValueError,
    IsADirectoryError or NotADirectoryError for a path that cannot be written to, and PeerFailedError if another rank
    has failed or does not make the call. All other errors are raised by the handle.
    """
    if isinstance(obj, str | os.PathLike | Place) and not isinstance(path, str | os.PathLike | Place):
        raise TypeError(f"the order is save(obj, path), as in torch.save; the path comes first here: {obj!r:.200}")
    place, world, state_dicts = written_at(path), world_of_group(), StateDictCache()
    is_spread = world.has_group and state_dicts.is_spread(obj)
    if not is_spread or world.is_one:
        target = FileTarget.at(place, compression)
        warn_of_ranks(stacklevel=2)
        saver = kept_memory.ranks_saver(world)[1] if is_spread else kept_memory.one_off_saver()
        return saver.save(FileRequest(obj, target, guard=guard, select=select, state_dict_of=state_dicts.of))
    refuse_archive_name(place.shown)
    folder, (ranks, saver) = OneOffFolder(*place.object()), kept_memory.ranks_saver(world)
    request = FolderRequest(obj, folder, ranks, guard=guard, select=select, state_dict_of=state_dicts.of)
    try:
        if compression is not None:
            raise ValueError("compression= is for one file, but several ranks write a folder; leave it out")
        return saver.save(request)
    except BaseException as error:  # reported to the other ranks
        ranks.failed(request.joint, error)
        raise


def save_within(host_bytes: int, obj: Any, path: Anywhere) -> SaveHandle:
    """Save `obj` as `save` does, with a separate saver that takes at most `host_bytes` of memory. Meant for states
    whose tensors are views of files. Raises the errors of `save`, and ValueError if `host_bytes` is too small.
    """
    return Saver(pool_for(host_bytes=host_bytes)).save(FileRequest(obj, FileTarget.at(written_at(path))))


def snapshot(state: Any, *, guard: Any = None, host_bytes: int | None = None) -> HeldSnapshot:
    """Copy a state to host memory and keep it, so that, for example, a checkpoint and an export show the same instant.

        with async_ckpt.snapshot({"model": model, "optimizer": optimizer}, guard=optimizer) as snap:
            handle = ckpt.save(snap, step=100)
            async_ckpt.export_hf(snap["model"], "out/hf")
            wrapped(snap["model"], "out/model.pt")

    Returns as soon as training may continue, as `save` does. The state is copied from the device once. Each of the
    calls in the example reads the snapshot in the background and keeps its memory until it is done, even after the
    block. They fail if the snapshot was torn. The state may have DTensors: then every rank takes a snapshot of its own
    shards, without communication, and every rank makes the calls that read it.

    Args:
        state: as for `save`. Storages are copied whole, so a view takes as much memory as the storage behind it.
        guard: the optimizer (or optimizers) whose `step()` is the only code that changes its parameters and its state,
            as for `save`.
        host_bytes: the most memory for this snapshot together with all others that are open or still being read; by
            default half of the free memory.

    The guard belongs to the snapshot: calls that save the snapshot, or a state that contains it, refuse a `guard=` of
    their own. `snap.stall_seconds` is the time for which this call and its guard held the caller; the reports of the
    calls that read the snapshot do not include it.

    Raises UnsupportedStateError as `save` does, MemoryError if there is not enough memory, ValueError if `host_bytes`
    is not a size, TypeError for two classes of the same name, and ClosedError if the interpreter is exiting. The
    memory of a snapshot that is not closed is freed when the snapshot is no longer referenced.
    """
    held = HeldSnapshot(
        state,
        guard=guard,
        memory=kept_memory.host_memory(),
        max_bytes=None if host_bytes is None else whole_bytes("host_bytes", host_bytes),
    )
    try:
        begin(held)
    except BaseException:
        held.close()
        raise
    return held


def release() -> None:
    """Free the host memory that one-off saves, wrapped functions and snapshots keep for the next one.

    async_ckpt.release()
    """
    kept_memory.release()


def load(
    path: Anywhere,
    map_location: str | torch.device | None = None,
    select: Select = None,
    trust: bool = False,
    verify: bool = True,
    mmap: bool = False,
    types: Iterable[type] = (),
    from_ranks: Mapping[str, int] | None = None,
) -> Any:
    """Read the state saved at `path`: an archive, the folder of a committed step, or a run (its newest step).

        state = async_ckpt.load("out/x.ackpt.tar")
        weights = async_ckpt.load("runs/a", select="model", map_location="cuda")["model"]

    It also reads safetensors files, and folders of Hugging Face models, of torch.distributed.checkpoint, and of
    extracted archives.

    Args:
        path: a path, a URL or a Place.
        map_location: the device of the tensors; None means the CPU, whatever device they were on when saved.
        select: read only this part: a name ("model"), a glob over dotted paths ("model.*.bias"), or several of them.
        trust: unpickle values that are not plain data. Use it only for files whose writer you trust: a pickle can run
            any code.
        verify: compare the digest of every block that is read. Safetensors files have no digests: only their headers
            are checked. In the folder of an extracted archive, blocks that contain a tar header are not compared. In a
            folder of torch.distributed.checkpoint, each entry is compared with its CRC-32, if torch has written one.
        mmap: return tensors that are views of the mapped file, private to this process. With `verify=False`, only the
            pages that are used are read. A tensor that is not aligned to its item size is copied. An extracted archive
            cannot be mapped.
        types: classes of namedtuples, dataclasses, enums and tensor subclasses to rebuild. Without its class, such an
            object is returned as a tuple, a dict, a plain value, or a dict of inner tensors.
        from_ranks: for a step saved by several ranks: the rank whose value to take for an entry that was saved per
            rank, by name, such as {"rng": 0}. Without it, such an entry is returned as a mapping from rank to value.

    A step that several ranks have saved is returned with full tensors.

    Raises NotCommittedError, CorruptCheckpointError, FormatVersionError, UntrustedObjectError, ForeignFileError for a
    file that only another program can read, StorageUnavailableError, KeyError if a pattern of `select` or a name in
    `from_ranks` matches nothing, ValueError for the archive of a single rank that has only a part of the selection, and
    TypeError for invalid arguments.
    """
    check_verify(verify)
    build = partial(
        state_of,
        options=LoadOptions(
            map_location, select, flag("trust", trust), flag("mmap", mmap), () if types is None else types
        ),
    )
    return from_path(path, build, verify=verify, readers=Readers(None, from_ranks, wants=selected_by(select)))


def verify(path: Anywhere, *, base: str | os.PathLike[str] | None = None) -> VerifyReport:
    """Read every byte of an archive, a committed step, a whole run or published versions, and compare all digests.

        print(async_ckpt.verify("runs/a"))
        # runs/a: 3 steps, 100 to 300, are sound, 41.20 GB read in 9.81 s at 4.20 GB/s

    Nothing is unpickled and no tensors are created, so this is safe for any file. It takes about 128 MiB of memory,
    regardless of the size of the archive. Archives are read whole, including compressed ones and those from which a
    step borrows groups. In a run, every committed step is read; an archive that several steps share is read once. A
    folder of torch.distributed.checkpoint is compared with the checksums that torch.save writes. The file of another
    program is checked by the means of its format, as a note in the report says: a zip (torch.save writes one) by the
    CRC-32 of each record, gzip and zstd by their checksums, a tar by the checksums of its headers, safetensors by the
    size of the file. Published versions are applied one after the other in a temporary folder, which takes once or
    twice the bytes of the model. A run or a checkpoint at the root of a Publisher is verified along with the versions.

    Args:
        path: an archive, the folder of a committed step or of torch.distributed.checkpoint, the root of a run or of a
            Publisher; a path, a URL or a Place.
        base: for versions, a Hugging Face folder with the model that is the base of the first delta, if that base was
            not published there.

    Raises CorruptCheckpointError for damage; it names the file and the tensors in the damaged blocks (`tensors`). A
    run is read to its end first, and one error names every damaged step or version (`damaged_steps`, `sound_steps`).
    Raises NotCommittedError if there is no checkpoint, ForeignFileError for a file of another program whose format has
    no checksum, FormatVersionError for a checkpoint of a newer version, ValueError for a folder of
    torch.distributed.checkpoint without checksums or a `base` without versions, and StorageUnavailableError, also if
    the archive is replaced while it is read.
    """
    versions = import_module(_VERSIONS)
    if versions.has_versions(storage_at(path).names("")):
        report: VerifyReport = versions.verify_root(path, base=base)
        return report
    if base is not None:
        raise ValueError("base= is for published versions, and there are none at this path; leave it out")
    return verify_path(path)
