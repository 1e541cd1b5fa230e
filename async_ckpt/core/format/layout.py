"""The plan of an archive: every byte position of the finished file, before a byte moves.

In: tensor specs, the skeleton, pickled objects. Out: a layout, and its division into segments.
Knows nothing of: the devices of tensors, who copies them, the target of the file.

`TensorPlan` depends only on names, dtypes and shapes. It takes time per tensor, and is kept from save to save.
`lay_out` is called for every save, and takes time only per member: the index is padded to whole pages, and all other
offsets count from its end, so its length only shifts everything after it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, NamedTuple, Protocol

from ..spec import DTYPES, MIB, PAGE_BYTES, Extent, Json, RankFacts, TensorSpec, align_up, by_tensor
from . import digests, index, safetensors, tar

# The limit of tensors in one member, since readers refuse headers over 100 MB.
MAX_TENSORS_PER_MEMBER: Final = 500_000
_MAX_NAMES_BYTES: Final = 40 * MIB
MAX_NAME_BYTES: Final = 1024
# Names that Windows reserves for devices, with any extension.
_DEVICE: Final = r"(?i)con|prn|aux|nul|com[0-9]|lpt[0-9]"


class Piece(NamedTuple):
    """`length` bytes of tensor number `tensor`, from its byte `source` on, at byte `target` of a segment."""

    target: int
    tensor: int
    source: int
    length: int


class SegmentPlan(NamedTuple):
    """One segment of the file image. Its pieces and literals cover every byte."""

    number: int
    offset: int
    num_bytes: int
    pieces: Sequence[Piece]
    literals: Sequence[tuple[int, memoryview]]


class Image(Protocol):
    """A file whose every byte position is known before it is written."""

    @property
    def file_bytes(self) -> int: ...

    @property
    def digests(self) -> index.Member | None:
        """The member at the end for the digests of all bytes before it; None for a file without digests."""

    def segments(self, segment_bytes: int) -> list[SegmentPlan]:
        """The file image divided into segments; the last may be shorter."""


def cut(extents: Iterable[tuple[int, int, int]], segment_bytes: int) -> dict[int, list[Piece]]:
    """The pieces of each segment, by segment number. Extents are (offset in the file, bytes, tensor) in file order."""
    pieces: dict[int, list[Piece]] = {}
    for begin, num_bytes, tensor in extents:
        at, end = begin, begin + num_bytes
        while at < end:
            number, target = divmod(at, segment_bytes)
            length = min(end - at, segment_bytes - target)
            pieces.setdefault(number, []).append(Piece(target, tensor, at - begin, length))
            at += length
    return pieces


def slices(
    file_bytes: int,
    segment_bytes: int,
    pieces: Mapping[int, Sequence[Piece]],
    literals: Iterable[tuple[int, bytes]],
) -> list[SegmentPlan]:
    """The plan of each segment. `pieces` are keyed by segment number; literals are (offset in the file, bytes)."""
    parts: dict[int, list[tuple[int, memoryview]]] = {}
    for begin, data in literals:
        view, at = memoryview(data), begin
        while view:
            number, target = divmod(at, segment_bytes)
            parts.setdefault(number, []).append((target, view[: segment_bytes - target]))
            at += min(len(view), segment_bytes - target)
            view = view[segment_bytes - target :]
    return [
        SegmentPlan(
            number,
            offset,
            min(segment_bytes, file_bytes - offset),
            pieces.get(number, ()),
            parts.get(number, ()),
        )
        for number, offset in enumerate(range(0, file_bytes, segment_bytes))
    ]


class _MemberPlan(NamedTuple):
    name: str
    group: str  # the top-level entry of the state that the member stores
    offset: int  # the offset of the tar header, from the end of the index
    num_bytes: int
    head: bytes  # safetensors length prefix and header


class TensorPlan:
    """The offsets of all tensors, relative to the end of the index.

    The planner keeps it while the specs stay the same.
    """

    def __init__(self, specs: Sequence[TensorSpec]) -> None:
        self.specs = specs
        self.members: list[_MemberPlan] = []
        # The offset of each tensor from the end of the index; None for a tensor whose bytes this archive does not
        # store.
        self.begins: list[int | None] = [None] * len(self.specs)
        self._slices: list[Json] = [None] * len(self.specs)  # the slices as they are written in rows of the index
        position = 0
        parts = list(_member_groups(self.specs))
        for name, group, chosen in parts:
            position = self._add_member(name, group, chosen, position)
        self.num_bytes = position
        self.tied = self._tied({i: group for _, group, chosen in parts for i in chosen})
        self.rows = ",\n".join(self._rows())
        del self._slices
        self._last_cut: tuple[int, int, dict[int, list[Piece]]] | None = None
        self._index_bytes = 0  # the padded length of the last index

    def room_for_index(self, num_bytes: int) -> int:
        """The padded length of an index whose text has `num_bytes`: that of the last index, if that is enough.

        So a tensor has the same offset in every archive of a run. An index that has outgrown it gets spare room.
        """
        if num_bytes > self._index_bytes:
            spare = num_bytes // 8 if self._index_bytes else 0
            self._index_bytes = align_up(tar.BLOCK + num_bytes + spare, PAGE_BYTES) - tar.BLOCK
        return self._index_bytes

    def _add_member(self, name: str, group: str, chosen: list[int], position: int) -> int:
        names = _unique_names((_name_inside(self.specs[i]) for i in chosen), taken={safetensors.RESERVED_NAME})
        name_of = dict(zip(chosen, names, strict=True))
        stored = [i for i in chosen if _is_stored(self.specs[i])]
        # Descending item size keeps every tensor aligned without holes, which the format forbids. Among tensors of one
        # item size, large ones come first, so that tensors copied late and tensors copied at once share few segments.
        stored.sort(key=lambda i: (-DTYPES[self.specs[i].dtype][0], self.specs[i].num_bytes < MIB))
        entries, begin = [], 0
        for i in stored:
            spec = self.specs[i]
            entries.append(safetensors.Entry(name_of[i], spec.dtype, spec.shape, begin, begin + spec.num_bytes))
            begin += spec.num_bytes
        metadata = {"format": "pt"}
        for i in chosen:
            alias = self.specs[i].alias_of
            if alias is not None and alias in name_of and self.specs[alias].lender is None:
                metadata.setdefault(name_of[i], name_of[alias])
        data_offset = position + tar.BLOCK
        # The index ends on a page boundary, so offsets modulo the page size are the same here as in the file.
        head = safetensors.header(entries, metadata, header_bytes_modulo=PAGE_BYTES, at=data_offset)
        for i, entry in zip(stored, entries, strict=True):
            self.begins[i] = data_offset + len(head) + entry.begin
            extent = [len(head) + entry.begin, entry.end - entry.begin]
            slice_row: dict[str, Json] = {"member": len(self.members), "name": entry.name, "extent": extent}
            of = self.specs[i].of
            if of is not None:
                slice_row |= {"offsets": of.offsets, "sizes": entry.shape}
            self._slices[i] = slice_row
        if not stored:
            return position
        self.members.append(_MemberPlan(name, group, position, len(head) + begin, head))
        return align_up(data_offset + len(head) + begin, tar.BLOCK)

    def _rows(self) -> Iterator[str]:
        """The lines of the index, one for each tensor."""
        tensors = by_tensor(self.specs)
        numbers = {slices[0]: number for number, slices in enumerate(tensors)}
        for slices in tensors:
            path, dtype, shape, alias, of, _ = self.specs[slices[0]]
            if alias is not None:
                yield index.row(path, alias=numbers[alias])
                continue
            stored = [self._slices[i] for i in slices if self._slices[i] is not None]
            lent = [_lent_row(self.specs[i]) for i in slices if self.specs[i].lender is not None]
            facts = {"lent": lent} if lent else {}
            if of is None:
                yield index.row(path, dtype=dtype, shape=shape, slices=stored, **facts)
                continue
            spread = {} if of.spread is None else {"spread": of.spread}
            yield index.row(path, dtype=dtype, shape=of.shape, slices=stored, **facts, **spread)

    def _tied(self, groups: Mapping[int, str]) -> dict[str, list[Extent]]:
        """The extents, from the end of the index, of a group's tensors that are stored with another group."""
        parts: dict[str, set[tuple[int, int]]] = {}
        slices = {numbers[0]: numbers for numbers in by_tensor(self.specs)}
        for i, group in groups.items():
            alias = self.specs[i].alias_of
            for of in slices[alias] if alias is not None and groups[alias] != group else ():
                begin, num_bytes = self.begins[of], self.specs[of].num_bytes
                if begin is not None and num_bytes:
                    parts.setdefault(group, set()).add((begin, num_bytes))
        return {group: list(_join(sorted(extents))) for group, extents in parts.items()}

    @cached_property
    def in_file_order(self) -> list[tuple[int, int, int]]:
        """(offset from the end of the index, bytes, number) of every spec with bytes in this archive."""
        return sorted(
            (begin, spec.num_bytes, i)
            for i, (begin, spec) in enumerate(zip(self.begins, self.specs, strict=True))
            if begin is not None and spec.num_bytes
        )

    def cut(self, base: int, segment_bytes: int) -> dict[int, list[Piece]]:
        """The pieces of each segment, by segment number, if the index ends at file offset `base`.

        The last result is cached, since the length of the index seldom changes from save to save.
        """
        kept = self._last_cut
        if kept is None or kept[:2] != (base, segment_bytes):
            extents = ((base + offset, num_bytes, tensor) for offset, num_bytes, tensor in self.in_file_order)
            kept = self._last_cut = (base, segment_bytes, cut(extents, segment_bytes))
        return kept[2]


@dataclass(frozen=True)
class Layout:
    """Every byte of one archive: tensors as planned, and literals for all other bytes, without overlap."""

    plan: TensorPlan
    base: int
    literals: tuple[tuple[int, bytes], ...]
    digests: index.Member
    file_bytes: int

    @cached_property
    def groups(self) -> dict[str, list[Extent]]:
        """The extents in the file of each group. A group is a top-level entry of the state, or all top-level tensors.

        Tied tensors are in each group that has them, though they are stored once.
        """
        groups: dict[str, list[Extent]] = {}
        for member in self.plan.members:
            data = self.base + member.offset + tar.BLOCK + len(member.head)
            length = member.num_bytes - len(member.head)
            groups.setdefault(member.group, []).append(Extent(data, length))
        for group, extents in self.plan.tied.items():
            groups.setdefault(group, []).extend(Extent(self.base + e.offset, e.length) for e in extents)
        return groups

    def segments(self, segment_bytes: int) -> list[SegmentPlan]:
        pieces = self.plan.cut(self.base, segment_bytes)
        return slices(self.file_bytes, segment_bytes, pieces, self.literals)


def lay_out(
    plan: TensorPlan,
    *,
    skeleton: str,
    objects: bytes | None,
    step: int | None,
    mtime: int,
    ranks: RankFacts | None = None,
    lenders: Sequence[tuple[str, str]] = (),
) -> Layout:
    """Lay out the archive of one save: index, planned members, objects, digests.

    `lenders` are the archives of earlier steps that have the bytes of some tensors, as (folder, name).
    """
    sizes = [(m.name, m.num_bytes) for m in plan.members]
    if objects is not None:
        sizes.append((index.OBJECTS, len(objects)))
    text = index.dump(step=step, members=sizes, rows=plan.rows, skeleton=skeleton, ranks=ranks, lenders=lenders)
    text = text.ljust(plan.room_for_index(len(text)))
    base = tar.BLOCK + len(text)
    literals = [(0, tar.header(index.MEMBER, len(text), mtime=mtime) + text)]
    for member in plan.members:
        literals.append((base + member.offset, tar.header(member.name, member.num_bytes, mtime=mtime) + member.head))
        end = base + member.offset + tar.BLOCK + member.num_bytes
        literals.append((end, bytes(tar.padding_after(member.num_bytes))))
    end = base + plan.num_bytes
    if objects is not None:
        padded = objects + bytes(tar.padding_after(len(objects)))
        literals.append((end, tar.header(index.OBJECTS, len(objects), mtime=mtime) + padded))
        end += tar.BLOCK + len(padded)
    digest, file_bytes = index.digests_member(end)
    # The digests are zeros until all other bytes are filled in.
    tail = tar.header(digests.MEMBER, digest.data.length, mtime=mtime) + bytes(file_bytes - digest.data.offset)
    literals.append((end, tail))
    return Layout(plan, base, tuple(literals), digest, file_bytes)


def _is_stored(spec: TensorSpec) -> bool:
    """True if this archive stores the bytes of the spec: False for an alias, a borrowed slice, and an empty share."""
    is_here = spec.alias_of is None and spec.lender is None
    return is_here and (spec.of is None or spec.of.offsets is not None)


def _lent_row(spec: TensorSpec) -> Json:
    offsets = (0,) * len(spec.shape) if spec.of is None else spec.of.offsets
    return [spec.lender, offsets, spec.shape]


def _join(parts: Iterable[tuple[int, int]]) -> Iterator[Extent]:
    """The extents of ascending parts (offset, bytes), with adjacent parts joined."""
    begin = end = 0
    for offset, num_bytes in parts:
        if offset != end and end > begin:
            yield Extent(begin, end - begin)
        begin, end = (begin if offset == end else offset), offset + num_bytes
    if end > begin:
        yield Extent(begin, end - begin)


def _member_groups(specs: Sequence[TensorSpec]) -> Iterator[tuple[str, str, list[int]]]:
    """Name, group and tensors of each member: one per top-level container, and one for all top-level tensors."""
    groups: dict[Any, list[int]] = {}
    top: list[int] = []
    for i, spec in enumerate(specs):
        if len(spec.path) < 2:
            top.append(i)
        else:
            # The type is part of the key, or True, 1 and 1.0 would share a member.
            groups.setdefault((type(spec.path[0]), spec.path[0]), []).append(i)
    stems = [_safe(str(key)) for _, key in groups]
    parts = [(stem, str(key), chosen) for stem, ((_, key), chosen) in zip(stems, groups.items(), strict=True)]
    if top:
        stem = "state" if "model" in stems else "model"
        parts.insert(0, (stem, stem, top))
    taken: set[str] = set()
    for stem, group, chosen in parts:
        for number, part in enumerate(_split(chosen, specs), start=1):
            name = stem if number == 1 else f"{stem}-{number:05d}"
            suffix = 2
            while name.lower() in taken:  # some file systems ignore case
                name, suffix = f"{stem}~{suffix}", suffix + 1
            taken.add(name.lower())
            yield f"{name}.safetensors", group, part


def _split(chosen: list[int], specs: Sequence[TensorSpec]) -> Iterator[list[int]]:
    part: list[int] = []
    names_bytes = 0
    for i in chosen:
        names_bytes += len(_name_inside(specs[i]))
        if len(part) == MAX_TENSORS_PER_MEMBER or names_bytes > _MAX_NAMES_BYTES:
            yield part
            part, names_bytes = [], 0
        part.append(i)
    yield part


def _safe(key: str) -> str:
    """A file name of at most about 80 characters that all shells, archivers and file systems accept."""
    name = re.sub(r"[^A-Za-z0-9._-]", "_", key)[:80].lstrip(".-") or "_"
    return f"_{name}" if re.fullmatch(_DEVICE, name.partition(".")[0]) else name


def _name_inside(spec: TensorSpec) -> str:
    path = spec.path[1:] if len(spec.path) > 1 else spec.path or ("tensor",)
    return ".".join(map(str, path)).encode("utf-8", "backslashreplace").decode()


def _unique_names(names: Iterable[str], taken: set[str]) -> Iterator[str]:
    for name in names:
        candidate, suffix = name, 2
        while candidate in taken or len(candidate.encode()) > MAX_NAME_BYTES:
            tail = f"~{suffix}"
            candidate = name.encode()[: MAX_NAME_BYTES - len(tail)].decode(errors="ignore") + tail
            suffix += 1
        taken.add(candidate)
        yield candidate
