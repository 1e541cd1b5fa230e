"""`index.json`, the first member: the contents of the archive and their places, known before its first byte is written.

In: the plan of an archive. Out: its text; and from an untrusted text, a consistent index. Knows nothing of: files,
torch. An index that passes can cause no large allocation: every extent lies inside the file and no two overlap, so
all tensors together are never larger than the file.
"""

from __future__ import annotations

import json
import sys
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from math import prod
from typing import Any, Final, NamedTuple, TypeAlias

from ...errors import CorruptCheckpointError, ForeignFileError, FormatVersionError
from ..spec import DTYPES, KIB, MAX_DIMS, PAGE_BYTES, Extent, Json, MeshFacts, RankFacts, Spread, align_up
from . import digests, safetensors, tar

MEMBER: Final = "index.json"
OBJECTS: Final = "objects.pt"
FORMAT: Final = "async_ckpt"
VERSION: Final = 2  # of an archive that refers to others; an archive that does not is of version 1
BEGIN: Final = f'{{"format":"{FORMAT}"'.encode()  # of the text of every version
# A limit that no real run reaches. An index with more ranks is damaged or forged, and a list of so many still fits into
# little memory: other files tell of ranks as ranges, of which a few bytes make a long list.
MAX_RANKS: Final = 1 << 19
# What `dump` writes around the rows, of which about so many bytes are parsed at a time.
_BEFORE_ROWS, _BETWEEN_ROWS, _AFTER_ROWS = b'"tensors":[\n', b",\n", b"\n]"
_PIECE_BYTES: Final = 256 * KIB
_KEYS: Final = frozenset({int, str, bool})  # the types of keys in a path
_Held: TypeAlias = tuple[tuple[int, ...], tuple[int, ...], int]  # offsets, sizes, and bytes of a rectangle
_Division: TypeAlias = tuple[str, tuple[int, ...], list[_Held], Spread | None]  # the facts that tensors have in common
# The offsets of a whole tensor, by its number of dimensions.
_AT_BEGIN: Final = [(0,) * num_dims for num_dims in range(MAX_DIMS + 1)]


class Member(NamedTuple):
    """One tar entry: `data` is the extent of its payload in the file, which follows its header of 512 bytes."""

    name: str
    data: Extent


class LentSlice(NamedTuple):
    """A rectangle of a tensor whose bytes are in the archive of an earlier step, under the same path."""

    lender: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


class Slice(NamedTuple):
    """A rectangle of a tensor in a member, at `offsets` and of `sizes`, row by row.

    `extent` is its place in the file.
    """

    member: int
    name: str
    extent: Extent
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


class IndexedTensor(NamedTuple):
    """One tensor of an archive: in one slice, or, in a state of several ranks, in the slices that this rank wrote.

    `shape` is the shape of the whole tensor. `lent` are the slices whose bytes are in archives of earlier steps.
    """

    path: tuple[Any, ...]
    dtype: str
    shape: tuple[int, ...]
    slices: tuple[Slice, ...]
    alias_of: int | None
    spread: Spread | None = None
    lent: tuple[LentSlice, ...] = ()

    @property
    def dotted(self) -> str:
        return ".".join(map(str, self.path))


class Index(NamedTuple):
    """The contents of an archive as its index lists them, after all checks of `parse`."""

    step: int | None
    members: tuple[Member, ...]
    tensors: tuple[IndexedTensor, ...]
    stored: tuple[tuple[IndexedTensor, ...], ...]  # by member; without aliases
    skeleton: Json
    digests: Member  # empty, at the end, in a file without digests
    file_bytes: int
    ranks: RankFacts | None = None  # in a state of several ranks
    lenders: tuple[tuple[str, str], ...] = ()  # archives of earlier steps: folder and name

    def member(self, name: str) -> Member | None:
        return next((m for m in self.members if m.name == name), None)


def row(path: tuple[Any, ...], **facts: Json) -> str:
    """The line of one tensor in the index.

    Keys that JSON cannot hold appear as text; the skeleton has the real keys.
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

    `members` are the names and sizes of all members between the index and the digests. `rows` and `skeleton` are JSON
    already, since the rows stay the same from save to save.
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
    """The member of the digests if all other members end here (padded), and the size of the whole file."""
    covered = end_of_members + tar.BLOCK
    member = Member(digests.MEMBER, Extent(covered, digests.num_bytes(covered)))
    end = align_up(member.data.end, tar.BLOCK)
    return member, align_up(end + tar.END_BYTES, PAGE_BYTES)


def places_of_digests(file_bytes: int) -> list[Member]:
    """The up to eight places of the digests that a file of this size allows, whatever its index says.

    In every version the digests are the last member, followed only by padding.
    """

    def size_of_file(num_blocks: int) -> int:
        return digests_member(num_blocks * tar.BLOCK)[1]

    ends = range(file_bytes // tar.BLOCK)  # of all other members, in blocks of the tar
    first = bisect_left(ends, file_bytes, key=size_of_file)
    last = bisect_right(ends, file_bytes, key=size_of_file)
    return [digests_member(num_blocks * tar.BLOCK)[0] for num_blocks in ends[first:last]]


def parse(text: bytes, *, path: str) -> Index:
    """Read an index that may be damaged or forged.

    Raises CorruptCheckpointError for an inconsistent index, and FormatVersionError for one of a later version. A
    damaged byte may look like a later version, so the caller compares the digest first.
    """
    try:
        raw, rows = _rows_apart(text)
        if not isinstance(raw, dict) or raw.get("format") != FORMAT:
            raise _InconsistentError("it is not an async_ckpt index")
        version = _count(raw["version"])
        if version > VERSION:
            raise FormatVersionError(
                f"{path}: written in format version {version}, this library reads up to {VERSION}; "
                "install a newer async_ckpt",
                path=path,
                version=version,
            )
        step = raw["step"]
        if step is not None:
            _count(step)
        members = _members(raw["members"], begin=tar.BLOCK + len(text))
        ranks = _ranks(raw["ranks"]) if "ranks" in raw else None
        lenders = tuple((_text(folder), _text(name)) for folder, name in raw.get("lenders", ()))
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
    except (_InconsistentError, ValueError, KeyError, TypeError, RecursionError, OverflowError) as error:
        reason = error if isinstance(error, _InconsistentError) else f"it is malformed ({error!r:.200})"
        raise CorruptCheckpointError(f"{path}: the index cannot be trusted: {reason}", path=path) from error


def _rows_apart(text: bytes) -> tuple[Json, Iterator[Json] | None]:
    """The index without its rows, and the rows, which are parsed as they are taken: all of them at once would need
    many times the memory of their text. If they are not one on each line, as `dump` writes them, the whole index is
    parsed at once, and the rows are None.
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

    Tensors are at the top by their names, in the order of the header. After them come, as aliases, the names that the
    metadata ties to one of them. `skeleton` makes that of a dict with these names. Raises CorruptCheckpointError, and
    ForeignFileError for pieces of tensors.
    """
    base = 8 + int.from_bytes(head[:8], "little")
    try:
        table, metadata = safetensors.parse_header(head)
        if safetensors.has_pieces(path, metadata):
            raise ForeignFileError(f"{path}: {safetensors.PIECES}", path=path, kind="safetensors")
        end = base + max((entry.end for entry in table.values()), default=0)
        if end > file_bytes:
            raise _InconsistentError(f"the file has {file_bytes:,} bytes, but its header describes {end:,}: truncated")
        rows: list[dict[str, Json]] = []
        for key, entry in table.items():
            dtype, shape = safetensors.loaded_as(entry.code, entry.shape)
            piece = {"member": 0, "name": key, "extent": [base + entry.begin, entry.end - entry.begin]}
            rows.append({"path": [key], "dtype": dtype, "shape": shape, "slices": [piece]})
        numbers = {key: number for number, key in enumerate(table)}
        # Of every file of torch, the metadata says "format": "pt", and a tensor may be called "pt".
        pairs = (pair for pair in dict(metadata).items() if pair != ("format", "pt"))
        ties = {other: of for other, of in pairs if of in numbers and other not in numbers}
        rows += [{"path": [other], "alias": numbers[of]} for other, of in ties.items()]
        member = Member(name, Extent(0, file_bytes))
        tensors = tuple(_tensors(rows, [member]))
        num_listed = sum(piece.extent.length for t in tensors if t.alias_of is None for piece in t.slices)
        if base + num_listed != file_bytes:
            raise _InconsistentError("some bytes belong to no tensor")
    except (_InconsistentError, ValueError, TypeError, OverflowError) as error:
        raise CorruptCheckpointError(f"{path}: the header cannot be trusted: {error!s:.300}", path=path) from error
    stored = tuple(t for t in tensors if t.alias_of is None)
    nowhere = Member(digests.MEMBER, Extent(file_bytes, 0))
    names = [*numbers, *ties]
    return Index(None, (member,), tensors, (stored,), skeleton(names), nowhere, file_bytes)


class _InconsistentError(Exception):
    """The index contradicts itself, or the file."""


def _count(value: Json) -> int:
    if type(value) is not int or value < 0:
        raise _InconsistentError(f"{value!r:.100} is not a count")
    return value


def _text(value: Json) -> str:
    if not isinstance(value, str):
        raise _InconsistentError(f"{value!r:.100} is not text")
    return value


def _members(raw: Json, begin: int) -> list[Member]:
    members: list[Member] = []
    position = begin
    for name, num_bytes in raw:
        if not (isinstance(name, str) and name.isascii()):
            raise _InconsistentError(f"{name!r:.100} is not the name of a member")
        position = align_up(position, tar.BLOCK) + tar.BLOCK
        members.append(Member(name, Extent(position, _count(num_bytes))))
        position += num_bytes
    names = [m.name for m in members]
    if len(set(names)) != len(names) or {MEMBER, digests.MEMBER} & set(names):
        raise _InconsistentError("two members have the same name")
    return members


def _ranks(raw: Json) -> RankFacts:
    rank, world_size, meshes = raw
    if not _count(rank) < _count(world_size) <= MAX_RANKS:
        raise _InconsistentError(f"rank {rank!r:.50} is not one of {world_size!r:.50} ranks")
    return RankFacts(rank, world_size, tuple(_mesh(mesh, world_size) for mesh in meshes))


def _mesh(raw: Json, world_size: int) -> MeshFacts:
    start, shape, stride, ranks = raw
    facts = MeshFacts(_count(start), _counts(shape), _counts(stride), _counts(ranks))
    ends = sum((size - 1) * step for size, step in zip(facts.shape, facts.stride, strict=not facts.ranks))
    size = prod(facts.shape)
    if not 0 < size <= world_size or max(facts.ranks, default=start + ends) >= world_size:
        raise _InconsistentError(f"a mesh of shape {shape!r:.100} needs more than {world_size} ranks")
    if facts.ranks and (len(set(facts.ranks)) != size or facts.stride):
        raise _InconsistentError(f"a mesh of shape {shape!r:.100} lists {len(facts.ranks)} ranks")
    return facts


def _counts(raw: Json) -> tuple[int, ...]:
    if not isinstance(raw, list) or len(raw) > MAX_RANKS or not all(_count(n) < 2**63 for n in raw):
        raise _InconsistentError(f"{raw!r:.100} is not a list of counts")
    return tuple(raw)


def _tensors(
    raw: Iterable[Json], members: list[Member], ranks: RankFacts | None = None, num_lenders: int = 0
) -> list[IndexedTensor]:
    tensors: list[IndexedTensor] = []
    names: set[tuple[int, str]] = set()
    borrowed: set[tuple[Any, ...]] = set()
    known: dict[str, _Division] = {}  # each is checked once: there may be many tensors, and few of these
    for row in raw:
        path = tuple(row["path"])
        if not _KEYS.issuperset(map(type, path)):
            raise _InconsistentError(f"a tensor has the path {path!r:.200}")
        if "alias" in row:
            alias = _count(row["alias"])
            if alias >= len(tensors) or tensors[alias].alias_of is not None:
                raise _InconsistentError(f"tensor {path!r:.200} is an alias of no tensor before it")
            of = tensors[alias]
            tensors.append(IndexedTensor(path, of.dtype, of.shape, of.slices, alias, of.spread, of.lent))
            continue
        boxes = [(piece["offsets"], piece["sizes"]) if "offsets" in piece else None for piece in row["slices"]]
        facts = row["dtype"], row["shape"], boxes, row.get("spread")
        if (text := repr(facts)) not in known:  # the text tells 1 from True
            known[text] = _division(*facts, path, ranks)
        dtype, shape, held, spread = known[text]
        slices = tuple(_slice(*piece, path, members) for piece in zip(row["slices"], held, strict=True))
        lent = tuple(_lent(piece, shape, num_lenders) for piece in row.get("lent", ()))
        if ranks is None and [*(one.sizes for one in slices), *(one.sizes for one in lent)] != [shape]:
            raise _InconsistentError(f"tensor {path!r:.200} is in {len(slices) + len(lent)} slices, not in one")
        for rectangle in lent:  # each once, so that all tensors together are never larger than the files
            if (path, rectangle.offsets) in borrowed:
                raise _InconsistentError(f"tensor {path!r:.200} is borrowed twice")
            borrowed.add((path, rectangle.offsets))
        for piece, (_, _, num_bytes) in zip(slices, held, strict=True):
            if (length := piece.extent.length) != num_bytes:
                raise _InconsistentError(
                    f"tensor {path!r:.200} has {length} bytes, which does not fit its shape and dtype"
                )
            if (piece.member, piece.name) in names:
                raise _InconsistentError(f"two tensors are called {piece.name!r:.200}")
            names.add((piece.member, piece.name))
        tensors.append(IndexedTensor(path, dtype, shape, slices, None, spread, lent))
    position = 0
    extents = (piece.extent for t in tensors if t.alias_of is None for piece in t.slices)
    for extent in sorted((extent for extent in extents if extent.length), key=lambda e: e.offset):
        if extent.offset < position:
            raise _InconsistentError(f"two tensors share the bytes at {extent.offset}")
        position = extent.end
    return tensors


def _division(
    dtype: Json, raw: Json, rectangles: Json, spread: Json, path: tuple[Any, ...], ranks: RankFacts | None
) -> _Division:
    if dtype not in DTYPES:
        raise _InconsistentError(f"tensor {path!r:.200} has the unknown dtype {dtype!r:.50}")
    # Each number is checked before the product: one of thousands of long numbers takes minutes.
    if len(raw) > MAX_DIMS or not all(_count(n) < 2**63 for n in raw) or prod(n or 1 for n in raw) >= 2**63:
        raise _InconsistentError(f"tensor {path!r:.200} has an absurd shape")
    shape, whole, held = tuple(raw), (_AT_BEGIN[len(raw)], tuple(raw)), list[_Held]()
    for rectangle in rectangles:
        offsets, sizes = whole if rectangle is None else _rectangle(_counts(rectangle[0]), _counts(rectangle[1]), shape)
        held.append((offsets, sizes, prod(sizes) * DTYPES[dtype][0]))
    return sys.intern(dtype), shape, held, None if spread is None else _spread(spread, shape, ranks)


def _spread(raw: Json, shape: tuple[int, ...], ranks: RankFacts | None) -> Spread:
    if ranks is None:
        raise _InconsistentError("a tensor is sharded, but the index lists no ranks")
    cuts, mesh, held = raw
    if cuts is None:
        return Spread(None, 0, tuple(_rectangle(_counts(at), _counts(sizes), shape) for at, sizes in held))
    if _count(mesh) >= len(ranks.meshes):
        raise _InconsistentError(f"a tensor is sharded over mesh {mesh!r:.50}, which does not exist")
    counts = tuple((_count(dim), _count(mesh_dim), _count(runs)) for dim, mesh_dim, runs in cuts)
    num_dims = len(ranks.meshes[mesh].shape)
    if any(dim >= len(shape) or mesh_dim >= num_dims or not 0 < runs < 2**31 for dim, mesh_dim, runs in counts):
        raise _InconsistentError(f"a tensor of shape {shape} has the cuts {cuts!r:.200}")
    if len({mesh_dim for _, mesh_dim, _ in counts}) < len(counts):
        raise _InconsistentError(f"the cuts {cuts!r:.200} use a dimension of a mesh twice")
    return Spread(counts, mesh)


def _rectangle(
    offsets: tuple[int, ...], sizes: tuple[int, ...], shape: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    if not (len(offsets) == len(sizes) == len(shape)) or any(
        offset + size > whole for offset, size, whole in zip(offsets, sizes, shape, strict=True)
    ):
        raise _InconsistentError(
            f"there is no slice at {offsets!r:.200} of sizes {sizes!r:.200} in a tensor of shape {shape!r:.200}"
        )
    return offsets, sizes


def _lent(raw: Json, shape: tuple[int, ...], num_lenders: int) -> LentSlice:
    lender, offsets, sizes = raw
    if _count(lender) >= num_lenders:
        raise _InconsistentError(f"a tensor is borrowed from archive {lender!r:.50}, which is not listed")
    return LentSlice(lender, *_rectangle(_counts(offsets), _counts(sizes), shape))


def _slice(raw: Json, held: _Held, path: tuple[Any, ...], members: list[Member]) -> Slice:
    member, name = _count(raw["member"]), raw["name"]
    begin, length = map(_count, raw["extent"])
    if member >= len(members) or begin + length > members[member].data.length:
        raise _InconsistentError(f"tensor {path!r:.200} lies outside its member")
    if not isinstance(name, str):
        raise _InconsistentError(f"tensor {path!r:.200} has a name that is not text, {name!r:.200}")
    if path and name == path[-1]:
        name = path[-1]  # one text for both
    return Slice(member, name, Extent(members[member].data.offset + begin, length), held[0], held[1])


def check_member_header(index: Index, member: int, data: bytes, *, path: str) -> None:
    """Compare a member's own safetensors header with the index: the two must agree.

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
        name: (*safetensors.stored_as(t.dtype, sizes), extent.offset - base, extent.end - base)
        for t in index.stored[member]
        for at, name, extent, _, sizes in t.slices
        if at == member
    }
    if expected != table:
        names = expected.keys() | table.keys()
        wrong = sorted(name for name in names if expected.get(name) != table.get(name))
        raise CorruptCheckpointError(
            f"{path}: index and {index.members[member].name} disagree about {wrong[:5]!r:.500}", path=path
        )
