"""A load, told once from top to bottom. No threads are started here, and nothing is logged.

In: an archive that may be damaged, or may lie; and, to restore, live objects. Out: the state, or the objects filled.
Knows nothing of: steps, manifests.

Everything is compared before the first byte is written. Data then comes by parallel ranged reads through a small ring
of (page-locked) buffers straight into its tensors; with `verify`, a buffer is whole digest blocks, and is looked at
before anything leaves it. Nothing is unpickled unless the caller says `trust=True` or torch's own weights-only
unpickler takes it, and nothing is allocated on the file's word: all tensors together are never larger than the file,
and a pickle is looked through before it is loaded.
"""

from __future__ import annotations

import functools
import io
import mmap as mmap_module
import pickle
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

import torch

from .errors import CorruptCheckpointError, FormatVersionError, UntrustedObjectError
from .format import digests, index, safetensors, tar
from .format.index import Index, Member
from .snapshot.crew import Crew
from .snapshot.cuda import on_device
from .snapshot.device import as_integers, flat_bytes, host_pointer, memmove
from .snapshot.host import num_cpus
from .snapshot.pool import Segment, SegmentPool, advise_huge_pages
from .spec import BLOCK_BYTES, KIB, MIB, PAGE_BYTES, Extent, align_up
from .state import pickled
from .state.tree import (
    Path,
    Select,
    Selector,
    Stored,
    decode,
    dtype_named,
    replaced,
    selector,
    shown,
    top_keys,
)
from .storage.base import Reader
from .storage.local import LocalReader

Groups = Collection[str] | None
Verify = bool | Literal["first"]

# One read: large enough for a disk's full speed, small enough that a few of them are no memory to speak of.
_READ_BYTES: Final = 8 * MIB
# Around the headers of a member: several small members at once, and little of a large one.
_NEAR_BYTES: Final = 64 * KIB
# Some read while others verify and copy.
_MIN_READERS: Final = 12
_MAX_READERS: Final = 16


_CPU: Final = torch.device("cpu")  # said everywhere, because a caller may have set another default


class OpenArchive:
    """One archive, its index read and, with `verify`, checked; tensors by number on request. Not thread-safe.

    Raises CorruptCheckpointError for anything that is not, or no longer, an archive of this library, and
    FormatVersionError for one from a newer version.
    """

    def __init__(self, reader: Reader, *, path: str, verify: bool) -> None:
        self.path = path
        self._reader = reader
        self._digests: bytes | None = None
        self._begin = memoryview(b"")  # the first block: the index is in it, often the first headers too
        # What was read last: headers lie together, and a store is far.
        self._kept = Extent(0, 0), memoryview(b"")
        self._verified = self._kept  # likewise, of blocks: small pieces lie together too
        self._begin = self._read_plain(Extent(0, min(reader.num_bytes, BLOCK_BYTES)))
        head = self._read_head()
        try:
            self.index: Index = index.parse(head, path=path)
        except FormatVersionError:  # or is it a damaged byte that says so?
            self._compare(Extent(0, tar.BLOCK + len(head)))
            raise
        if self.index.file_bytes != reader.num_bytes:
            raise self.corrupt(
                f"it has {reader.num_bytes:,} bytes and should have {self.index.file_bytes:,}: truncated"
            )
        if verify:
            self._digests = self._read_digests()
            self.read(Extent(0, tar.BLOCK + len(head)))
        self._headers: dict[int, Extent] = {}  # of the members that were checked, from the tar header on

    def corrupt(self, why: str) -> CorruptCheckpointError:
        return CorruptCheckpointError(f"{self.path}: {why}; load an earlier checkpoint", path=self.path)

    @property
    def digest(self) -> str:
        """The archive's own digest, as its manifest records it."""
        return digests.self_digest(bytes(self._read_plain(self.index.digests.data)))

    # --- small reads ------------------------------------------------------------------------------------------

    def read(self, extent: Extent) -> bytes:
        """A small extent, verified where the archive is."""
        if self._digests is None:
            return bytes(self._read_plain(extent))
        wide, data = self._verified
        if not (wide.offset <= extent.offset and extent.end <= wide.end):
            wide = _widened(extent, BLOCK_BYTES, self.index.digests.data.offset)
            data = self._read_plain(wide)
            self.verify(wide.offset, data)
            self._verified = wide, data
        return bytes(data[extent.offset - wide.offset :][: extent.length])

    def _read_near(self, extent: Extent) -> bytes:
        """A small extent, not verified, and what is around it."""
        wide, data = self._kept
        if not (wide.offset <= extent.offset and extent.end <= wide.end):
            wide = _widened(extent, _NEAR_BYTES, self.index.file_bytes)
            data = self._read_plain(wide)
            self._kept = wide, data
        return bytes(data[extent.offset - wide.offset :][: extent.length])

    def verify(self, offset: int, data: memoryview) -> None:
        """Compare whole blocks that begin at `offset` with their digests. Bytes behind the covered part are ignored."""
        if self._digests is not None:
            self._compare_blocks(offset, data[: self.index.digests.data.offset - offset], self._digests)

    def _compare_blocks(self, offset: int, data: memoryview, told: bytes) -> None:
        for begin in range(0, len(data), BLOCK_BYTES):
            number = (offset + begin) // BLOCK_BYTES
            digest = told[number * digests.DIGEST_BYTES :][: digests.DIGEST_BYTES]
            if digests.block_digest(data[begin : begin + BLOCK_BYTES]) != digest:
                raise self.corrupt(
                    f"block {number} (from byte {number * BLOCK_BYTES:,}) does not match its digest"
                )

    def _compare(self, extent: Extent) -> None:
        """Compare the blocks of an extent with their digests, in an archive that is not verified as well.

        For what is about to be refused: only sound bytes may be refused as something else than corrupt. The digests are
        found without the index, which may be what is damaged.
        """
        covered, told = self._find_digests()
        wide = _widened(extent, BLOCK_BYTES, covered)
        self._compare_blocks(wide.offset, self._read_plain(wide), told)

    def _find_digests(self) -> tuple[int, bytes]:
        """How many bytes the digests cover, and the digests."""
        num_bytes = self._reader.num_bytes
        places = [member.data for member in index.places_of_digests(num_bytes)]
        begin = places[0].offset if places else num_bytes
        tail = bytes(self._read_plain(Extent(begin, num_bytes - begin)))
        for place in places:
            with suppress(ValueError):
                data = tail[place.offset - begin :][: place.length]
                return place.offset, digests.parse(data, covered_bytes=place.offset)
        raise self.corrupt("it has no digests where they should be: it is damaged, or cut short")

    def _read_plain(self, extent: Extent) -> memoryview:
        if extent.end <= len(self._begin):
            return self._begin[extent.offset : extent.end]
        data = memoryview(bytearray(extent.length))
        try:
            self._reader.read_into(extent.offset, data)
        except EOFError as error:
            raise self.corrupt(f"truncated: {error}") from error
        return data

    def _read_head(self) -> bytes:
        """The text of the index, not yet believed."""
        header = bytes(self._begin[: tar.BLOCK])
        try:
            name, length = tar.parse_header(header)
        except ValueError as error:
            raise self._not_ours(header) from error
        if name != index.MEMBER:
            raise self._not_ours(header)
        end = tar.BLOCK + length
        if end > self._reader.num_bytes:
            raise self.corrupt("truncated inside of its index")
        begun = self._begin[tar.BLOCK : end]
        rest = Extent(len(self._begin), max(0, end - len(self._begin)))
        return b"".join((begun, self._read_plain(rest)))

    def _not_ours(self, head: bytes) -> CorruptCheckpointError:
        for magic, what in (
            (b"PK\x03\x04", "a zip file, as torch.save writes; use torch.load"),
            (b"\x1f\x8b", "gzip"),
            (b"\x28\xb5\x2f\xfd", "zstd"),
        ):
            if head.startswith(magic):
                return CorruptCheckpointError(
                    f"{self.path}: not an async_ckpt archive: this is {what}", path=self.path
                )
        if head[257:262] == b"ustar" and not head.startswith(b"index.json"):
            return CorruptCheckpointError(
                f"{self.path}: not an async_ckpt archive, but another tar; use unpack() or extract()",
                path=self.path,
            )
        what = "not an async_ckpt archive" if head else "the file is empty"
        return CorruptCheckpointError(f"{self.path}: {what}, or its first bytes are damaged", path=self.path)

    def _read_digests(self) -> bytes:
        member = self.index.digests
        tail = self._read_plain(Extent(member.data.offset, self.index.file_bytes - member.data.offset))
        if any(tail[member.data.length :]):
            raise self.corrupt("the end of the archive is damaged")
        try:
            return digests.parse(bytes(tail[: member.data.length]), covered_bytes=member.data.offset)
        except ValueError as error:
            raise self.corrupt(str(error)) from error

    def map(self) -> mmap_module.mmap:
        """The file that was opened, whatever is at its path by now; writes to it are seen by this process alone."""
        if not isinstance(self._reader, LocalReader):
            raise ValueError(
                f"mmap=True maps a local file as it is, and {self.path} is elsewhere or compressed; leave it out"
            )
        mapped = mmap_module.mmap(self._reader._fd, 0, access=mmap_module.ACCESS_COPY)
        if len(mapped) != self._reader.num_bytes:
            raise self.corrupt("its size has changed since it was opened")
        return mapped

    # --- the tree ---------------------------------------------------------------------------------------------

    def tree(
        self, *, select: Select = None, types: Iterable[type] = (), groups: Groups = None
    ) -> tuple[Any, list[Stored]]:
        """The saved structure with a `Stored` for each leaf that is not in the index itself, and a list of these.

        With `groups`, only of these top-level entries.
        """
        try:
            value, stored = decode(self.index.skeleton, types=types, keep=_within(groups, selector(select)))
            self._check_stored(stored)
        except ValueError as error:
            raise self._unreadable(error) from error
        if (select is not None or groups is not None) and value is None:
            raise KeyError(f"select={select!r} matches nothing in {self.path}; it holds {self.names()}")
        self._check_members(stored)
        return value, stored

    def entries(self) -> list[Any] | None:
        """The keys at the top level; None where the state is not a dict."""
        try:
            return top_keys(self.index.skeleton)
        except ValueError as error:
            raise self._unreadable(error) from error

    def names(self) -> str:
        """What it holds at the top level, for people."""
        keys = self.entries()
        names = {t.path[0] for t in self.index.tensors if t.path} if keys is None else keys
        return ", ".join(sorted(shown((name,)) for name in names)) or "no named tensors"

    def nested_too_deeply(self) -> CorruptCheckpointError:
        return self.corrupt("its structure is nested too deeply")

    def _unreadable(self, error: ValueError) -> CorruptCheckpointError:
        return self.corrupt(f"its skeleton cannot be read ({error})")

    def match(self, chosen: Selector, groups: Groups) -> None:
        """Show the selector every path of these top-level entries."""
        try:
            decode(self.index.skeleton, keep=_within(groups, chosen))
        except ValueError as error:
            raise self._unreadable(error) from error

    def _check_stored(self, stored: Iterable[Stored]) -> None:
        """Every leaf has its entry, and one of raw bytes is nothing else. Raises ValueError."""
        leaves = [leaf for leaf in stored if leaf.kind != "object"]
        if any(leaf.number >= len(self.index.tensors) for leaf in leaves):
            raise ValueError("it numbers a tensor that is not there")
        num_users = Counter(self.primary(leaf.number) for leaf in leaves)
        for leaf in leaves:
            told = self.index.tensors[leaf.number]
            # Tied tensors share their memory. Raw bytes are copied for each leaf, so a small file could ask for any amount.
            if leaf.kind != "tensor" and num_users[self.primary(leaf.number)] > 1:
                raise ValueError(f"{told.dotted!r:.200} is several things at once")
            if (leaf.kind == "bytes" or leaf.descr is not None) and (told.dtype, len(told.shape)) != (
                "uint8",
                1,
            ):
                raise ValueError(f"{told.dotted!r:.200} is a tensor, not the bytes of something else")

    def _check_members(self, stored: Iterable[Stored]) -> None:
        """Each member's own headers must tell the same story as the index, before anything is read by either.

        That is all that is asked of them; their own blocks are verified with the data behind them.
        """
        for number in sorted({self.index.tensors[s.number].member for s in stored if s.kind != "object"}):
            if number in self._headers:
                continue
            data = self._check_tar_header(self.index.members[number])
            length = int.from_bytes(self._read_near(Extent(data.offset, min(8, data.length))), "little")
            fits = length <= safetensors.MAX_HEADER_BYTES and 8 + length <= data.length
            header = Extent(data.offset, 8 + length if fits else min(8, data.length))
            index.check_member_header(self.index, number, self._read_near(header), path=self.path)
            self._headers[number] = Extent(data.offset - tar.BLOCK, tar.BLOCK + header.length)

    def headers(self, numbers: Iterable[int]) -> list[Extent]:
        """Where the headers of the members with these tensors lie, to be verified with them."""
        members = {self.index.tensors[number].member for number in numbers} if self._digests else ()
        return [self._headers[member] for member in sorted(members) if member in self._headers]

    def _check_tar_header(self, member: Member) -> Extent:
        """Where the member's data lies, as its tar header says too."""
        try:
            told = tar.parse_header(self._read_near(Extent(member.data.offset - tar.BLOCK, tar.BLOCK)))
        except ValueError as error:
            raise self.corrupt(f"{member.name} is not where the index says ({error})") from error
        if told != (member.name, member.data.length):
            raise self.corrupt(f"index and tar disagree about {member.name}")
        return member.data

    def primary(self, number: int) -> int:
        """The tensor whose bytes these are: itself, or the one that it is tied to."""
        alias = self.index.tensors[number].alias_of
        return number if alias is None else alias

    def objects(self, stored: Iterable[Stored], *, trust: bool) -> list[Any]:
        """The pickled leaves; none are opened unless one of them is asked for."""
        wanted = [s for s in stored if s.kind == "object"]
        if not wanted:
            return []
        member = self.index.member(index.OBJECTS)
        if member is None:
            raise self.corrupt(f"{index.OBJECTS} is missing")
        extent = self._check_tar_header(member)
        data = self.read(Extent(extent.offset - tar.BLOCK, tar.BLOCK + extent.length))[tar.BLOCK :]
        try:
            if trust:
                loaded = torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)
            else:
                loaded = pickled.load(data)
        except pickle.UnpicklingError as error:
            names = [shown(s.path) for s in wanted]
            among = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
            kind = re.search(r"GLOBAL ([\w.]+)", str(error))
            raise UntrustedObjectError(
                f"{self.path}: {among}: {f'a {kind[1]}' if kind else 'an object'} is a Python object, not plain data; if you "
                "trust whoever wrote this file, load it with trust=True, or leave it out with select=",
                path=self.path,
            ) from error
        except Exception as error:
            raise self.corrupt(f"{index.OBJECTS} cannot be loaded: {error!r}") from error
        if not isinstance(loaded, list) or max(s.number for s in wanted) >= len(loaded):
            raise self.corrupt(f"{index.OBJECTS} lacks an object")
        return loaded

    def leaf(self, leaf: Stored, tensor: torch.Tensor, device: torch.device) -> Any:
        """What a stored leaf is, given the tensor with its bytes, which may be filled later; for "bytes", not."""
        if leaf.kind == "tensor":
            there = tensor.device.type == device.type and device.index in (None, tensor.device.index)
            return tensor if there else tensor.to(device)
        if leaf.kind == "bytes":
            return bytes(tensor.numpy())
        try:
            return leaf.as_array(tensor)
        except Exception as error:  # the dtype's description may be anybody's
            raise self.corrupt(f"a numpy array in it cannot be made ({error})") from error

    def dtype(self, number: int) -> torch.dtype:
        """Raises FormatVersionError when this torch is too old to have it."""
        try:
            return dtype_named(self.index.tensors[number].dtype)
        except ValueError as error:
            raise FormatVersionError(
                f"{self.path}: {error}", path=self.path, version=index.VERSION
            ) from error

    def empty(self, number: int, device: torch.device) -> torch.Tensor:
        """New memory for a tensor of the archive."""
        told = self.index.tensors[number]
        tensor = torch.empty(told.shape, dtype=self.dtype(number), device=device)
        if device.type == "cpu":
            _ask_for_huge_pages(tensor)
        return tensor


def load_state(
    archive: OpenArchive,
    *,
    map_location: str | torch.device | None = None,
    select: Select = None,
    trust: bool = False,
    types: Iterable[type] = (),
    mmap: bool = False,
    groups: Groups = None,
) -> Any:
    """Build the state that was saved, on the CPU or on the device `map_location`; tied tensors come back tied.

    With `mmap`, tensors are views of the mapped archive, and only their pages are read, when they are first touched
    (or, verified, now).
    """
    device = _CPU if map_location is None else torch.device(map_location)
    value, stored = archive.tree(select=select, types=types, groups=groups)
    objects = archive.objects(stored, trust=trust)
    on_host = {archive.primary(s.number) for s in stored if s.kind in ("ndarray", "bytes")}
    numbers = sorted({archive.primary(s.number) for s in stored if s.kind != "object"})
    if mmap:
        mapped = archive.map()
        tensors = {n: _mapped(archive, n, mapped) for n in numbers}
        _verify_mapped(archive, numbers, mapped)
    else:
        tensors = {n: archive.empty(n, _CPU if n in on_host else device) for n in numbers}
        fill(archive, [Wanted(n, tensor) for n, tensor in tensors.items()])

    def give(leaf: Stored) -> Any:
        if leaf.kind == "object":
            return objects[leaf.number]
        return archive.leaf(leaf, tensors[archive.primary(leaf.number)], device)

    try:
        return replaced(value, give)
    except RecursionError as error:
        raise archive.nested_too_deeply() from error


class Part(NamedTuple):
    """One archive of those that a state is in, and which of its top-level entries count; None: all that it has."""

    archive: OpenArchive
    groups: Groups = None


def check_lent(parts: Sequence[Part], select: Select) -> None:
    """Where a state is in several archives, each must hold the groups that the manifest names, as far as they are selected.

    Raises CorruptCheckpointError.
    """
    chosen = selector(select)
    for part in parts if len(parts) > 1 else ():
        keys = part.archive.entries()
        if keys is None:
            raise part.archive.corrupt(
                "a manifest says that it is a part of a state, and it is not a dict of groups"
            )
        there = {key for key in keys if isinstance(key, str)}
        for group in sorted(part.groups or ()):
            if group not in there and (chosen is None or chosen.reaches(group)):
                raise part.archive.corrupt(f"a manifest says that {group!r} is in it, and it is not")


def check_select(parts: Sequence[Part], select: Select) -> None:
    """Of several patterns each is to select something: one that does not has a typo. Raises KeyError."""
    chosen = None if isinstance(select, str) else selector(select)
    if chosen is None:
        return
    for part in parts:
        part.archive.match(chosen, part.groups)
    if chosen.unused:
        there = "; ".join(f"{part.archive.path} holds {part.archive.names()}" for part in parts)
        raise KeyError(f"of select={select!r}, {chosen.unused[0]!r} matches nothing; {there}")


def check_verify(verify: Verify) -> None:
    """A slip of the pen must not be taken for a check, or for none. Raises ValueError."""
    if verify not in (True, False, "first"):
        raise ValueError(f'verify={verify!r} is none of True, False and, for restore, "first"')


def load_parts(parts: Sequence[Part], load: Callable[[Part], Any]) -> Any:
    """The state that is in one archive, or in several: the first has the step's own, the others what it borrows.

    Raises KeyError when `load` does for each.
    """
    if len(parts) == 1:
        return load(parts[0])
    merged: dict[Any, Any] = {}
    errors: list[KeyError] = []
    for part in parts:
        try:
            merged.update(load(part))
        except KeyError as error:
            errors.append(error)
    raise_unless_any(errors, len(parts))
    return merged


def raise_unless_any(errors: Sequence[KeyError], num_parts: int) -> None:
    """Raises one KeyError when none of the archives has anything that was selected."""
    if len(errors) == num_parts:
        raise KeyError("; ".join(error.args[0] for error in errors))


class Wanted(NamedTuple):
    """One tensor of the archive and the memory that its bytes are to fill: same shape, same dtype, any device."""

    number: int
    into: torch.Tensor


class _Part(NamedTuple):
    """`length` bytes from byte `source` of a read go to byte `target` of `wanted[wanted]`."""

    source: int
    wanted: int
    target: int
    length: int


@dataclass(slots=True)
class _Read:
    extent: Extent
    parts: list[_Part]


def fill(archive: OpenArchive, wanted: Sequence[Wanted], *, copy: bool = True) -> None:
    """Read every wanted tensor into its memory, in parallel. With `copy=False` only verify the bytes.

    What is on a device is filled in order with its current stream. Raises CorruptCheckpointError; tensors that were
    filled before stay so.
    """
    targets = [_Target(item.into) for item in wanted] if copy else []
    numbers = [item.number for item in wanted]
    reads = _plan_reads(archive, numbers, keep_parts=copy)
    if not reads:
        return
    crew = Crew("read", min(max(_MIN_READERS, num_cpus()), _MAX_READERS, len(reads)))
    ring = SegmentPool(_READ_BYTES, max_bytes=crew.max_threads * _READ_BYTES)
    devices = {target.device for target in targets if target.device.type == "cuda"}
    streams = {device: torch.cuda.Stream(device) for device in devices}
    for device, stream in streams.items():
        stream.wait_stream(torch.cuda.current_stream(device))

    def run(read: _Read) -> None:
        lease = ring.lease((0, read.extent.offset), pin=next(iter(devices), None), check=lambda: None)
        try:
            _run_read(archive, read, lease.segment, targets, streams)
        finally:
            lease.release()

    try:
        crew.run_all(functools.partial(run, read) for read in reads)
    finally:
        crew.stop()
        ring.close()
    for device, stream in streams.items():
        torch.cuda.current_stream(device).wait_stream(stream)
    for target in targets:
        target.finish()


def _run_read(
    archive: OpenArchive, read: _Read, segment: Segment, targets: list[_Target], streams: dict[Any, Any]
) -> None:
    data = segment.view[: read.extent.length]
    try:
        archive._reader.read_into(read.extent.offset, data)
    except EOFError as error:
        raise archive.corrupt(f"truncated: {error}") from error
    archive.verify(read.extent.offset, data)
    for device, stream in streams.items():
        parts = [part for part in read.parts if targets[part.wanted].device == device]
        if parts:
            _enqueue(parts, segment, targets, device, stream)
    for source, wanted, begin, length in read.parts:
        target = targets[wanted]
        if target.pointer:
            memmove(target.pointer + begin, segment.address + source, length)


def _enqueue(
    parts: list[_Part], segment: Segment, targets: list[_Target], device: torch.device, stream: Any
) -> None:
    """Copy parts of a read to a device, and wait for that: the buffer is read from until then."""
    ended = torch.cuda.Event(blocking=True)  # a waiting thread sleeps, and for no other's copies
    # In inference mode, because so may the caller be: its tensors take no writes outside.
    with torch.inference_mode(), on_device(device), torch.cuda.stream(stream):
        try:
            for source, wanted, begin, length in parts:
                piece = segment.tensor[source : source + length]
                targets[wanted].flat[begin : begin + length].copy_(piece, non_blocking=True)
        finally:
            ended.record(stream)
            ended.synchronize()


class _Target:
    """Memory to fill. What is not dense, or on a device without a copy engine of ours, goes through a dense copy."""

    def __init__(self, tensor: torch.Tensor) -> None:
        tensor = tensor.detach()
        # Others see by its counter that it was written to; our copies move none.
        if not tensor.is_inference():
            torch.autograd.graph.increment_version(tensor)
        self._final: torch.Tensor | None = None
        plain = tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())
        if not plain or tensor.device.type not in ("cpu", "cuda"):
            self._final = tensor
            tensor = torch.empty(tensor.shape, dtype=tensor.dtype, device=_CPU)
        self.device = tensor.device
        self.flat = flat_bytes(tensor)
        self.pointer = host_pointer(self.flat)

    def finish(self) -> None:
        if self._final is None:
            return
        with torch.inference_mode():  # for tensors that were made in it; the others take it as well
            if self._final.is_conj() or self._final.is_neg():
                self._final.copy_(self.flat.view(self._final.dtype).reshape(self._final.shape))
            else:
                items = as_integers(self._final)
                items.copy_(self.flat.view(items.dtype).reshape(items.shape))


def _plan_reads(archive: OpenArchive, numbers: Sequence[int], *, keep_parts: bool) -> list[_Read]:
    """Cut what these tensors need into reads: whole digest blocks (or pages), neighbours together, up to a buffer's size."""
    wanted: dict[Extent, list[int]] = {}  # one tensor may fill several, that are tied no more
    for i, number in enumerate(numbers):
        wanted.setdefault(archive.index.tensors[number].extent, []).append(i)
    extents = sorted({*wanted, *archive.headers(numbers)}, key=lambda extent: extent.offset)
    granule = BLOCK_BYTES if archive._digests is not None else PAGE_BYTES
    file_bytes = archive.index.file_bytes
    reads: list[_Read] = []
    for extent in extents:
        at, end = extent.offset, extent.end
        while at < end:
            last = reads[-1].extent if reads else Extent(0, 0)
            if at < last.offset:
                raise archive.corrupt("parts of it overlap")
            if at >= last.end:
                begin = at // granule * granule
                # A block that the read before has fetched already is not read again: `at` lies behind it.
                room = min(file_bytes - begin, align_up(min(end - begin, _READ_BYTES), granule))
                if begin == last.end and last.length + room <= _READ_BYTES and reads:
                    reads[-1].extent = last = Extent(last.offset, last.length + room)
                else:
                    last = Extent(begin, room)
                    reads.append(_Read(last, []))
            stop = min(end, last.end)
            if keep_parts:
                reads[-1].parts += [
                    _Part(at - last.offset, i, at - extent.offset, stop - at) for i in wanted.get(extent, ())
                ]
            at = stop
    return reads


def _widened(extent: Extent, granule: int, limit: int) -> Extent:
    begin = extent.offset // granule * granule
    return Extent(begin, max(extent.end, min(align_up(extent.end, granule), limit)) - begin)


def _within(groups: Groups, chosen: Selector | None) -> Callable[[Path], bool] | None:
    """Whether a path is selected, and in one of these top-level entries."""
    if groups is None:
        return chosen
    return lambda path: bool(path) and path[0] in groups and (chosen is None or chosen(path))


def _mapped(archive: OpenArchive, number: int, mapped: mmap_module.mmap) -> torch.Tensor:
    told, dtype = archive.index.tensors[number], archive.dtype(number)
    if not told.extent.length:
        return torch.empty(told.shape, dtype=dtype, device=_CPU)
    flat = torch.frombuffer(mapped, dtype=torch.uint8, count=told.extent.length, offset=told.extent.offset)
    return (flat if dtype == torch.uint8 else flat.view(dtype)).view(told.shape)


def _verify_mapped(archive: OpenArchive, numbers: Sequence[int], mapped: mmap_module.mmap) -> None:
    reads = _plan_reads(archive, numbers, keep_parts=False)
    with memoryview(mapped) as view:
        for read in reads:
            with view[read.extent.offset : read.extent.end] as part:
                archive.verify(read.extent.offset, part)


def _ask_for_huge_pages(tensor: torch.Tensor) -> None:
    """Fresh memory is filled once: with small pages the kernel would spend longer giving it than we filling it."""
    num_bytes = tensor.numel() * tensor.element_size()
    if num_bytes >= BLOCK_BYTES:
        advise_huge_pages(tensor.data_ptr(), num_bytes)
