"""Tensors that a save takes over from the archive of an earlier step, since they have not changed: `unchanged="auto"`.

In: captured states, and commits. Out: the tensors that need not be copied or written. Knows nothing of: files, threads
that copy.

Fused optimizers and `.data` bypass a tensor's version counter, so an equal counter proves nothing. Only parameters of
modules in the state are taken over, and only if they do not require a gradient, and have the same memory and counter as
at the last commit. On the host, the call compares a sample of their bytes: if one sample differs, this save takes
nothing over. In the background, all their bytes are compared with the digests of the lending archive: a write that
bypassed the counter and that no sample has shown fails the save. Later saves write such a tensor.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Collection, Iterator
from functools import partial
from itertools import chain
from typing import Final, NamedTuple, TypeAlias

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ...errors import StorageUnavailableError, TornSnapshotError
from ..backends import device_of, is_dense, is_host, is_on_host
from ..format.digests import block_digest, joined_digest
from ..format.layout import Layout
from ..host.loop import get_loop
from ..runs.manifest import Archive, GroupLocation
from ..runs.run import Run
from ..spec import BLOCK_BYTES, KIB, MIB, Extent, some_of
from ..staging.device import Alias, Device, MemoryGoneError
from ..state.captured import NOTHING, Capture, Mark
from ..state.names import Path
from ..state.wrapped import plain_parts
from .block_digests import GroupDigests

# Checking a smaller tensor costs about as much as writing it.
_LEAST_BYTES: Final = MIB
_SAMPLE_BYTES: Final = 8 * KIB
_COPY_BYTES: Final = 256 * KIB
_MANY: Final = 5  # names in a message

# identifies a slice: the tensor's path, and the slice's offsets in the tensor
_Key: TypeAlias = tuple[Path, tuple[int, ...] | None]


class _Appearance(NamedTuple):
    """The metadata of a tensor. While they stay the same, no write to the tensor was counted."""

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    mark: Mark


class _Candidate(NamedTuple):
    """A tensor of a save that may be taken over. `sample` is empty on a device, where a sample would cost a wait."""

    number: int
    key: _Key
    tensor: torch.Tensor
    look: _Appearance
    sample: bytes


class _Saved(NamedTuple):
    """The place of a tensor's bytes in the archive of a commit, and the tensor's metadata when they were copied."""

    look: _Appearance
    sample: bytes
    storage: StorageWeakRef  # while this exists, its address is not reused for another storage
    extent: Extent
    digest: bytes
    archive_name: str
    run: Run  # at the place of that commit, which may be another than that of the next save
    location: GroupLocation

    def is_of(self, other: _Candidate) -> bool:
        return self.look == other.look and self.storage.cdata == other.tensor.untyped_storage()._cdata


class _Taken(NamedTuple):
    """A tensor that one save takes over."""

    key: _Key
    saved: _Saved
    tensor: torch.Tensor
    alias: Alias

    def was_written(self) -> bool:
        """True if the tensor's bytes differ from the archive's, although no write to it has been counted. A counted
        write is the training's, after the call of `save`, which is allowed. Blocks.
        """
        try:
            is_same = _digest(self.alias, self.saved.extent) == self.saved.digest
        except MemoryGoneError:  # freed after the call, which the training may do
            return False
        return not is_same and self.tensor._version == self.saved.look.mark[1]


class TakenOver:
    """The tensors that one save takes over, and those that later saves may take over from it.

    `UnchangedTensors.begin` creates it on the caller's thread; the save's target calls it on other threads.
    """

    def __init__(self, known: dict[_Key, _Saved], distrusted: set[_Key]) -> None:
        self._known, self._distrusted = known, distrusted
        self.taken: list[_Taken] = []
        self.lenders: dict[tuple[str, str], int] = {}  # the number of each archive, by folder and name
        self.locations: dict[tuple[str, int], GroupLocation] = {}
        self.whole_groups: frozenset[str] = frozenset()  # groups without anything to write
        self.written: dict[int, tuple[_Key, _Appearance, bytes, StorageWeakRef]] = {}  # keyed by the number of the spec
        self.digests = GroupDigests({})  # for the written tensors, once they are laid out
        self.of_blocks = bytearray()  # the digests of the archive's blocks; filled by the drain
        self._extents: dict[int, Extent] = {}

    def take(self, key: _Key, saved: _Saved, tensor: torch.Tensor) -> int:
        """Take a tensor over. Returns the number of the archive that has it."""
        self.taken.append(_Taken(key, saved, tensor, Alias(tensor)))
        location = saved.location
        self.locations[location.group, location.step] = location
        return self.lenders.setdefault((location.folder, saved.archive_name), len(self.lenders))

    def laid_out(self, layout: Layout) -> None:
        """Note the places of the tensors that are written."""
        for i in self.written:
            begin = layout.plan.begins[i]
            assert begin is not None
            self._extents[i] = Extent(layout.base + begin, layout.plan.specs[i].num_bytes)
        self.digests = GroupDigests({str(i): [extent] for i, extent in self._extents.items()})

    def compare(self) -> None:
        """Compare the tensors that are taken over with the digests of their bytes. Raises TornSnapshotError. Blocks."""
        changed: list[_Taken] = []

        def look(taken: _Taken) -> None:
            if taken.was_written():
                changed.append(taken)

        if self.taken:
            get_loop().background.run_all([partial(look, taken) for taken in self.taken])
        self.drop()
        if changed:
            self._distrusted.update(one.key for one in changed)
            names = tuple(sorted({".".join(map(str, one.key[0])) for one in changed}))
            raise TornSnapshotError(
                f"{some_of(names, _MANY)} does not require a gradient "
                f"and was taken over from step {changed[0].saved.location.step}, but has changed since, past its "
                "version counter, by .data, NumPy or a kernel; later saves write it. unchanged=() avoids this",
                names=names,
            )

    def drop(self) -> None:
        """Drop the references to the tensors."""
        self.taken = []

    def committed(self, run: Run, step: int, own: Archive, named: Archive) -> None:
        """Note that the archive `own` of this process is committed, so that later saves may take over its tensors.
        `named` is the archive in the manifest: `own` itself, or the list of all ranks.
        """
        if not self.written:
            return
        found = self.digests.result(self.of_blocks)
        for i, (key, look, sample, storage) in self.written.items():
            location = GroupLocation(_group(key[0]), step, run.folder(step), named, in_part=True)
            digest = found[str(i)].here
            self._known[key] = _Saved(look, sample, storage, self._extents[i], digest, own.name, run, location)


class UnchangedTensors:
    """The tensors that were committed by this process and that its next save may take over. May be called from any
    thread.

    A save replaces the table by a new one unless it takes over everything in it. A save that is still under way then
    adds to a table that nobody reads any more. So the table never refers to an archive that a later save has replaced.
    """

    def __init__(self) -> None:
        self._known: dict[_Key, _Saved] = {}  # replaced as a whole; each change of an entry is one atomic call of C
        self._distrusted: set[_Key] = set()
        self._newest = -1  # the highest step that was begun

    def forget(self) -> None:
        """Take over nothing that has been committed so far."""
        self._known, self._newest = {}, -1

    def lenders(self) -> set[int]:
        """The steps from which the next save may take over tensors."""
        return {saved.location.step for saved in list(self._known.values())}

    def begin(
        self, captured: Capture, frozen: set[int], run: Run, step: int, *, may_take: bool
    ) -> tuple[Capture, TakenOver]:
        """The state without the bytes of tensors that are taken over. `frozen` are the addresses of the tensors that
        may be.

        Runs on the caller's thread, which may be interrupted, so it holds no lock.
        """
        candidates = [one for one in _candidates(captured, frozen) if one.key not in self._distrusted]
        known = self._known.copy()
        places = {(saved.run, saved.location) for saved in known.values()}
        gone = {lent for place, lent in places if place is not run or not still_lends(run, (lent,))}
        same = {
            one.key: saved
            for one in candidates
            if (saved := known.get(one.key)) is not None and saved.is_of(one) and saved.location not in gone
        }
        past = {one.key for one in candidates if one.key in same and same[one.key].sample != one.sample}
        self._distrusted |= past  # where one write bypassed the counter, others may have done so
        if step <= self._newest or not may_take or past:
            self._known, known, same = {}, {}, {}
        self._newest = max(step, self._newest)
        over = TakenOver(self._known, self._distrusted)
        specs, tensors = list(captured.specs), list(captured.tensors)
        kept: dict[_Key, _Saved] = {}
        for one in candidates:
            saved = same.get(one.key)
            if saved is not None:
                kept[one.key] = saved
                specs[one.number] = specs[one.number]._replace(lender=over.take(one.key, saved, one.tensor))
                tensors[one.number] = NOTHING
            elif one.key not in past:
                storage = StorageWeakRef(one.tensor.untyped_storage())
                over.written[one.number] = one.key, one.look, one.sample, storage
        if len(kept) < len(known):
            over._known = self._known = kept
        if not over.taken:
            return captured, over
        over.whole_groups = frozenset({_group(spec.path) for spec in specs if spec.lender is not None}).difference(
            _group(spec.path) for spec in specs if spec.lender is None and spec.alias_of is None and spec.num_bytes
        )
        return captured._replace(specs=specs, tensors=tensors), over


def frozen_memory(captured: Capture) -> set[int]:
    """The addresses of the large parameters, of modules in a state, that do not require a gradient."""
    tops = filter(None, (known() for known in captured.modules.values()))
    parts = (
        part
        for module in chain.from_iterable(top.modules() for top in tops)
        for parameter in module._parameters.values()
        if parameter is not None and not parameter.requires_grad
        for part in plain_parts(parameter)
    )
    return {part.data_ptr() for part in parts if part.layout is torch.strided and part.nbytes >= _LEAST_BYTES}


def _candidates(captured: Capture, frozen: set[int]) -> Iterator[_Candidate]:
    for i, (spec, mark) in enumerate(zip(captured.specs, captured.marks, strict=True)) if frozen else ():
        tensor = captured.tensors[i]
        if mark is None or mark[0] not in frozen or spec.alias_of is not None or not spec.num_bytes:
            continue
        is_host = is_on_host(tensor)
        if is_dense(tensor) and (is_host or device_of(tensor) is not None):
            key = spec.path, None if spec.of is None else spec.of.offsets
            look = _Appearance(spec.dtype, spec.shape, tensor.stride(), mark)
            yield _Candidate(i, key, tensor, look, _sample(tensor) if is_host else b"")


def _sample(tensor: torch.Tensor) -> bytes:
    """The digest of some bytes in the middle. A write that bypasses the counter usually changes most bytes."""
    num_bytes = min(tensor.nbytes, _SAMPLE_BYTES)
    return block_digest(memoryview(ctypes.string_at(tensor.data_ptr() + (tensor.nbytes - num_bytes) // 2, num_bytes)))


def _group(path: Path) -> str:
    """The top-level entry that contains a tensor; "model" for a tensor at the top level."""
    return str(path[0]) if len(path) > 1 else "model"


def still_lends(run: Run, lent: Collection[GroupLocation]) -> bool:
    """True if a root still has the archives that it lends. True for a store, which is asked only at the commit."""
    if run.storage.remote:
        return True
    try:
        return run.lends(lent)
    except StorageUnavailableError:  # the commit finds out
        return True


_scratch = threading.local()  # holds copies of bytes, since their own memory may be freed meanwhile


def _digest(alias: Alias, extent: Extent) -> bytes:
    """The digest of a tensor in live memory as `GroupDigests` would compute it for a file that has the tensor at
    `extent`.

    Raises MemoryGoneError.
    """
    pieces, at = [extent.length.to_bytes(8, "big")], extent.offset
    while at < extent.end:
        end = min(extent.end, (at // BLOCK_BYTES + 1) * BLOCK_BYTES)
        begin, length = at - extent.offset, end - at
        if is_host(alias.device):
            pieces.append(joined_digest(_copies(alias, begin, length)))
        else:
            pieces.append(Device(alias.device).read(alias, begin, length, block_digest))
        at = end
    return block_digest(b"".join(pieces))


def _copies(alias: Alias, begin: int, length: int) -> Iterator[memoryview]:
    """The bytes of a tensor on the host, in copies that stay in the processor's caches until they are digested."""
    if not hasattr(_scratch, "buffer"):
        _scratch.buffer = bytearray(_COPY_BYTES)
    view = memoryview(_scratch.buffer)
    address = ctypes.addressof(ctypes.c_char.from_buffer(view))
    for at in range(begin, begin + length, _COPY_BYTES):
        num_bytes = min(_COPY_BYTES, begin + length - at)
        if not alias.copy_to(address, at, num_bytes):
            raise MemoryGoneError
        yield view[:num_bytes]
