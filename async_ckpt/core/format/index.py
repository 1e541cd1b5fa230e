"""`index.json`, the first member: contents and extents of the archive, known before its first byte is written.

In: the plan of an archive. Out: its text; and from an untrusted text, a consistent index. Knows nothing of: files,
torch. An index that passes all checks cannot cause a large allocation: every extent lies inside the file and no two
overlap, so all tensors together are never larger than the file.
"""

from __future__ import annotations

import json
import sys
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from math import prod
from typing import Any, Final, NamedTuple, TypeAlias

from ...errors import CorruptCheckpointError, ForeignFileError, FormatVersionError
from .. import fields
from ..spec import DTYPES, KIB, MAX_DIMS, PAGE_BYTES, Box, Extent, Json, RankFacts, align_up
from . import digests, safetensors, tar

MEMBER: Final = "index.json"
OBJECTS: Final = "objects.pt"
FORMAT: Final = "async_ckpt"
VERSION: Final = 2  # version 2 added references to other archives; an archive without them is written as version 1
BEGIN: Final = f'{{"format":"{FORMAT}"'.encode()  # the first bytes of the text, in every version
# A limit that no real run reaches: an index with more ranks is damaged or forged. A list of this many ranks still fits
# into little memory. Other files store ranks as ranges, where a few bytes can stand for a long list.
MAX_RANKS: Final = 1 << 19
# The text that `dump` writes around the rows. About _PIECE_BYTES of rows are parsed at a time.
_BEFORE_ROWS, _BETWEEN_ROWS, _AFTER_ROWS = b'"tensors":[\n', b",\n", b"\n]"
_PIECE_BYTES: Final = 256 * KIB
_KEYS: Final = frozenset({int, str, bool})  # the types of keys in a path
# The facts that many tensors have in common: dtype, shape, and the boxes of slices with their sizes in bytes.
_Division: TypeAlias = tuple[str, tuple[int, ...], list[tuple[Box, int]]]
_counts = partial(fields.items, of=fields.count)


class Member(NamedTuple):
    """One member of the tar. `data` is the extent of its payload in the file, after its header of 512 bytes."""

    name: str
    data: Extent


class LentSlice(NamedTuple):
    """A box of a tensor whose bytes are in the archive of an earlier step, under the same path."""

    lender: int
    box: Box


class Slice(NamedTuple):
    """A box of a tensor in a member, in row-major order. `extent` is its extent in the file."""

    member: int
    name: str
    extent: Extent
    box: Box


class IndexedTensor(NamedTuple):
    """One tensor of an archive: in one slice, or, in a state of several ranks, in the slices that this rank wrote.

    `shape` is the shape of the whole tensor. `is_spread` is True if other ranks may hold other slices of it. `lent` are
    the slices whose bytes are in archives of earlier steps.
    """

    path: tuple[Any, ...]
    dtype: str
    shape: tuple[int, ...]
    slices: tuple[Slice, ...]
    alias_of: int | None
    is_spread: bool = False
    lent: tuple[LentSlice, ...] = ()

    @property
    def dotted(self) -> str:
        return ".".join(map(str, self.path))


class Index(NamedTuple):
    """The contents of an archive as its index lists them, after all checks of `parse`."""

    step: int | None
    members: tuple[Member, ...]
    tensors: tuple[IndexedTensor, ...]
    stored: tuple[tuple[IndexedTensor, ...], ...]  # the tensors of each member, without aliases
    skeleton: Json
    digests: Member  # in a file without digests, an empty member at the end
    file_bytes: int
    ranks: RankFacts | None = None  # set in a state of several ranks
    lenders: tuple[tuple[str, str], ...] = ()  # folder and name of each archive that lends slices

    def member(self, name: str) -> Member | None:
        return next((m for m in self.members if m.name == name), None)


def row(path: tuple[Any, ...], **facts: Json) -> str:
    """The line of one tensor in the index.

    Keys that JSON cannot represent are written as text; the skeleton has the real keys.
    """
    names = [key if isinstance(key, int | str) else str(key) for key in path]
    return json.dumps({"path": names, **facts}, separators=(",", ":"))


def dump(
    *,
    step: int | None,
    members: list[tuple[str, int]],
    rows: str,
    skeleton: str,
    ranks: RankFacts | None = None,
    lenders: Sequence[tuple[str, str]] = (),
) -> bytes:
    """The text of the index, which may be padded with spaces.

    `members` are the names and sizes of all members between the index and the digests. `rows` and `skeleton` are given
    as JSON text, since the rows stay the same from save to save.
    """
    rank_facts = "" if ranks is None else f'"ranks":{json.dumps(ranks, separators=(",", ":"))},'
    if lenders:
        rank_facts += f'"lenders":{json.dumps(lenders, separators=(",", ":"))},'
    version = VERSION if lenders else 1
    return (
        f'{{"format":"{FORMAT}","version":{version},"step":{json.dumps(step)},{rank_facts}'
        f'"members":{json.dumps(members, separators=(",", ":"))},"tensors":[\n{rows}\n],"skeleton":{skeleton}}}\n'
    ).encode()


def digests_member(end_of_members: int) -> tuple[Member, int]:
    """The member of the digests, and the size of the whole file, if all other members (padded) end at this offset."""
    covered = end_of_members + tar.BLOCK
    member = Member(digests.MEMBER, Extent(covered, digests.num_bytes(covered)))
    end = align_up(member.data.end, tar.BLOCK)
    return member, align_up(end + tar.END_BYTES, PAGE_BYTES)


def places_of_digests(file_bytes: int) -> list[Member]:
    """The positions, at most eight, at which the digests can be in a file of this size, without reading its index.

    In every version the digests are the last member, followed only by padding.
    """

    def size_of_file(num_blocks: int) -> int:
        return digests_member(num_blocks * tar.BLOCK)[1]

    ends = range(file_bytes // tar.BLOCK)  # possible ends of all other members, in blocks of the tar
    first = bisect_left(ends, file_bytes, key=size_of_file)
    last = bisect_right(ends, file_bytes, key=size_of_file)
    return [digests_member(num_blocks * tar.BLOCK)[0] for num_blocks in ends[first:last]]


def parse(text: bytes, *, path: str) -> Index:
    """Parse an index that may be damaged or forged.

    Raises CorruptCheckpointError for an inconsistent index, and FormatVersionError for a later version. A damaged byte
    may look like a later version, so the caller must compare the digest first.
    """
    try:
        raw, rows = _rows_apart(text)
        if not isinstance(raw, dict) or raw.get("format") != FORMAT:
            raise ValueError("it is not an async_ckpt index")
        version = fields.count(raw["version"])
        if version > VERSION:
            raise FormatVersionError(
                f"{path}: written in format version {version}, this library reads up to {VERSION}; "
                "install a newer async_ckpt",
                path=path,
                version=version,
            )
        step = raw["step"]
        if step is not None:
            fields.count(step)
        members = _members(raw["members"], begin=tar.BLOCK + len(text))
        ranks = _ranks(raw["ranks"]) if "ranks" in raw else None
        lenders = tuple((fields.text(folder), fields.text(name)) for folder, name in raw.get("lenders", ()))
        tensors = _tensors(rows or raw["tensors"], members, ranks, len(lenders))
        last_end = members[-1].data.end if members else tar.BLOCK + len(text)
        digest, file_bytes = digests_member(align_up(last_end, tar.BLOCK))
        stored: list[list[IndexedTensor]] = [[] for _ in members]
        for tensor in tensors:
            if tensor.alias_of is None:
                for piece in tensor.slices:
                    stored[piece.member].append(tensor)
        by_member = tuple(map(tuple, stored))
        skeleton = raw["skeleton"]
        return Index(step, tuple(members), tuple(tensors), by_member, skeleton, digest, file_bytes, ranks, lenders)
    except (ValueError, KeyError, TypeError, RecursionError, OverflowError) as error:
        reason = error if type(error) is ValueError else f"it is malformed ({error!r:.200})"
        raise CorruptCheckpointError(f"{path}: the index cannot be trusted: {reason}", path=path) from error


def _rows_apart(text: bytes) -> tuple[Json, Iterator[Json] | None]:
    """The index without its rows, and an iterator that parses the rows lazily: all of them at once would need many
    times the memory of their text. If the text is not as `dump` writes it, with one row per line, the whole index is
    parsed at once, and the iterator is None.
    """
    begin = text.find(_BEFORE_ROWS) + len(_BEFORE_ROWS)
    end = text.find(_AFTER_ROWS, begin)
    if len(_BEFORE_ROWS) <= begin < end:
        with suppress(ValueError):
            rest = json.loads(text[:begin] + text[end:])
            if isinstance(rest, dict) and rest.get("tensors") == []:
                return rest, _rows(text, begin, end)
    return json.loads(text), None


def _rows(text: bytes, begin: int, end: int) -> Iterator[Json]:
    while begin < end:
        cut = text.find(_BETWEEN_ROWS, begin + _PIECE_BYTES, end)
        cut = cut if cut >= 0 else end
        yield from json.loads(b"[%b]" % text[begin:cut])
        begin = cut + len(_BETWEEN_ROWS)


def of_safetensors(
    head: bytes, *, name: str, file_bytes: int, skeleton: Callable[[list[str]], Json], path: str
) -> Index:
    """The index of a bare safetensors file, made from its untrusted header.

    All tensors are at the top level, by name, in the order of the header. After them come, as aliases, the names that
    the metadata ties to one of them. `skeleton` makes the skeleton of a dict with these names. Raises
    CorruptCheckpointError, and ForeignFileError for pieces of tensors.
    """
    base = 8 + int.from_bytes(head[:8], "little")
    try:
        table, metadata = safetensors.parse_header(head)
        if safetensors.has_pieces(path, metadata):
            raise ForeignFileError(f"{path}: {safetensors.PIECES}", path=path, kind="safetensors")
        end = base + max((entry.end for entry in table.values()), default=0)
        if end > file_bytes:
            raise ValueError(f"the file has {file_bytes:,} bytes, but its header describes {end:,}: truncated")
        rows: list[dict[str, Json]] = []
        for key, entry in table.items():
            dtype, shape = safetensors.loaded_as(entry.code, entry.shape)
            piece = {"member": 0, "name": key, "extent": [base + entry.begin, entry.end - entry.begin]}
            rows.append({"path": [key], "dtype": dtype, "shape": shape, "slices": [piece]})
        numbers = {key: number for number, key in enumerate(table)}
        # The metadata of every file written by torch has "format": "pt", and a tensor may be called "pt".
        pairs = (pair for pair in dict(metadata).items() if pair != ("format", "pt"))
        ties = {other: of for other, of in pairs if of in numbers and other not in numbers}
        rows += [{"path": [other], "alias": numbers[of]} for other, of in ties.items()]
        member = Member(name, Extent(0, file_bytes))
        tensors = tuple(_tensors(rows, [member]))
        num_listed = sum(piece.extent.length for t in tensors if t.alias_of is None for piece in t.slices)
        if base + num_listed != file_bytes:
            raise ValueError("some bytes belong to no tensor")
    except (ValueError, TypeError, OverflowError) as error:
        raise CorruptCheckpointError(f"{path}: the header cannot be trusted: {error!s:.300}", path=path) from error
    stored = tuple(t for t in tensors if t.alias_of is None)
    nowhere = Member(digests.MEMBER, Extent(file_bytes, 0))
    names = [*numbers, *ties]
    return Index(None, (member,), tensors, (stored,), skeleton(names), nowhere, file_bytes)


def _members(raw: Json, begin: int) -> list[Member]:
    members: list[Member] = []
    position = begin
    for name, num_bytes in raw:
        if not (isinstance(name, str) and name.isascii()):
            raise ValueError(f"{name!r:.100} is not the name of a member")
        position = align_up(position, tar.BLOCK) + tar.BLOCK
        members.append(Member(name, Extent(position, fields.count(num_bytes))))
        position += num_bytes
    names = [m.name for m in members]
    if len(set(names)) != len(names) or {MEMBER, digests.MEMBER} & set(names):
        raise ValueError("two members have the same name")
    return members


def _ranks(raw: Json) -> RankFacts:
    rank, world_size, _ = raw
    if not fields.count(rank) < fields.count(world_size, at_most=MAX_RANKS):
        raise ValueError(f"rank {rank!r:.50} is not one of {world_size!r:.50} ranks")
    return RankFacts(rank, world_size)


def _tensors(
    raw: Iterable[Json], members: list[Member], ranks: RankFacts | None = None, num_lenders: int = 0
) -> list[IndexedTensor]:
    tensors: list[IndexedTensor] = []
    names: set[tuple[int, str]] = set()
    borrowed: set[tuple[Any, ...]] = set()
    known: dict[str, _Division] = {}  # checked only once each: many tensors share few of them
    for row in raw:
        path = tuple(row["path"])
        if not _KEYS.issuperset(map(type, path)):
            raise ValueError(f"a tensor has the path {path!r:.200}")
        if "alias" in row:
            alias = fields.count(row["alias"])
            if alias >= len(tensors) or tensors[alias].alias_of is not None:
                raise ValueError(f"tensor {path!r:.200} is an alias, but not of a tensor before it")
            of = tensors[alias]
            tensors.append(IndexedTensor(path, of.dtype, of.shape, of.slices, alias, of.is_spread, of.lent))
            continue
        boxes = [(piece["offsets"], piece["sizes"]) if "offsets" in piece else None for piece in row["slices"]]
        facts = row["dtype"], row["shape"], boxes
        if (text := repr(facts)) not in known:  # as a key, the text distinguishes 1 from True
            known[text] = _division(*facts, path)
        dtype, shape, held = known[text]
        slices = tuple(_slice(piece, box, path, members) for piece, (box, _) in zip(row["slices"], held, strict=True))
        lent = tuple(_lent(piece, shape, num_lenders) for piece in row.get("lent", ()))
        if ranks is None and [*(one.box.sizes for one in slices), *(one.box.sizes for one in lent)] != [shape]:
            raise ValueError(f"tensor {path!r:.200} is in {len(slices) + len(lent)} slices, not in one")
        for _, box in lent:  # each box only once, so that all tensors together are never larger than the files
            if (path, box.offsets) in borrowed:
                raise ValueError(f"tensor {path!r:.200} is borrowed twice")
            borrowed.add((path, box.offsets))
        for piece, (_, num_bytes) in zip(slices, held, strict=True):
            if (length := piece.extent.length) != num_bytes:
                raise ValueError(f"tensor {path!r:.200} has {length} bytes, which does not fit its shape and dtype")
            if (piece.member, piece.name) in names:
                raise ValueError(f"two tensors are called {piece.name!r:.200}")
            names.add((piece.member, piece.name))
        tensors.append(IndexedTensor(path, dtype, shape, slices, None, row.get("spread") is not None, lent))
    position = 0
    extents = (piece.extent for t in tensors if t.alias_of is None for piece in t.slices)
    for extent in sorted((extent for extent in extents if extent.length), key=lambda e: e.offset):
        if extent.offset < position:
            raise ValueError(f"two tensors share the bytes at {extent.offset}")
        position = extent.end
    return tensors


def _division(dtype: Json, raw: Json, rectangles: Json, path: tuple[Any, ...]) -> _Division:
    if dtype not in DTYPES:
        raise ValueError(f"tensor {path!r:.200} has the unknown dtype {dtype!r:.50}")
    # Each number is checked before they are multiplied: the product of thousands of long numbers takes minutes.
    if len(raw) > MAX_DIMS or prod(n or 1 for n in _counts(raw)) >= 2**63:
        raise ValueError(f"tensor {path!r:.200} has an absurd shape")
    shape = tuple(raw)
    boxes = [Box.whole(shape) if one is None else _box(one[0], one[1], shape) for one in rectangles]
    held = [(box, box.num_elements * DTYPES[dtype][0]) for box in boxes]
    return sys.intern(dtype), shape, held


def _box(at: Json, counts: Json, shape: tuple[int, ...]) -> Box:
    offsets, sizes = _counts(at), _counts(counts)
    if not (len(offsets) == len(sizes) == len(shape)) or any(
        offset + size > whole for offset, size, whole in zip(offsets, sizes, shape, strict=True)
    ):
        raise ValueError(
            f"there is no slice at {offsets!r:.200} of sizes {sizes!r:.200} in a tensor of shape {shape!r:.200}"
        )
    return Box(offsets, sizes)


def _lent(raw: Json, shape: tuple[int, ...], num_lenders: int) -> LentSlice:
    lender, offsets, sizes = raw
    if fields.count(lender) >= num_lenders:
        raise ValueError(f"a tensor is borrowed from archive {lender!r:.50}, which is not listed")
    return LentSlice(lender, _box(offsets, sizes, shape))


def _slice(raw: Json, box: Box, path: tuple[Any, ...], members: list[Member]) -> Slice:
    member, name = fields.count(raw["member"]), raw["name"]
    begin, length = map(fields.count, raw["extent"])
    if member >= len(members) or begin + length > members[member].data.length:
        raise ValueError(f"tensor {path!r:.200} lies outside its member")
    if not isinstance(name, str):
        raise ValueError(f"tensor {path!r:.200} has a name that is not text, {name!r:.200}")
    if path and name == path[-1]:
        name = path[-1]  # share one string object
    return Slice(member, name, Extent(members[member].data.offset + begin, length), box)


def check_member_header(index: Index, member: int, data: bytes, *, path: str) -> None:
    """Check that a member's safetensors header agrees with the index.

    `data` begins at the member's first byte. Raises CorruptCheckpointError.
    """
    try:
        table, metadata = safetensors.parse_header(data)
        if "format" not in metadata:
            raise ValueError("the safetensors header does not name its format")
    except ValueError as error:
        raise CorruptCheckpointError(f"{path}: {index.members[member].name}: {error}", path=path) from error
    extent = index.members[member].data
    base = extent.offset + 8 + int.from_bytes(data[:8], "little")
    if base + max((end for _, _, _, end in table.values()), default=0) != extent.end:
        raise CorruptCheckpointError(
            f"{path}: {index.members[member].name} is not as long as the index says", path=path
        )
    expected = {
        name: (*safetensors.stored_as(t.dtype, box.sizes), extent.offset - base, extent.end - base)
        for t in index.stored[member]
        for at, name, extent, box in t.slices
        if at == member
    }
    if expected != table:
        names = expected.keys() | table.keys()
        wrong = sorted(name for name in names if expected.get(name) != table.get(name))
        raise CorruptCheckpointError(
            f"{path}: index and {index.members[member].name} disagree about {wrong[:5]!r:.500}", path=path
        )
