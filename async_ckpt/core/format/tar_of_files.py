"""The plan of a tar of existing files: every byte position is known before a byte is read.

In: names, sizes and modes. Out: an image with pieces of numbered files. Knows nothing of: the disk.
"""

from __future__ import annotations

import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from ..spec import align_up
from . import tar
from .layout import SegmentPlan, cut, slices

# The size of a tar is a multiple of GNU tar's record of 20 blocks.
_RECORD_BYTES: Final = 20 * tar.BLOCK


@dataclass(frozen=True, slots=True)
class TarEntry:
    """One member of a tar. `kind` is a type flag of `tarfile`.

    `runs` are the parts of a file that have data, as (offset in the file, bytes), with holes between them.
    """

    name: str
    kind: bytes
    mode: int
    mtime: int
    num_bytes: int = 0
    link: str = ""
    runs: tuple[tuple[int, int], ...] = ()

    @property
    def is_sparse(self) -> bool:
        return self.kind == tarfile.REGTYPE and sum(length for _, length in self.runs) < self.num_bytes


class Tarball:
    """A plain tar in POSIX.1-2001 (pax) format. The owner is always root, so that equal folders make equal bytes.

    A file with holes is stored without them, in GNU tar's sparse format 1.0
    (https://www.gnu.org/software/tar/manual/html_node/PAX-1.html).
    """

    digests = None

    def __init__(self, entries: Sequence[TarEntry]) -> None:
        self._literals: list[tuple[int, bytes]] = []
        self._extents: list[tuple[int, int, int]] = []  # offset, bytes, run
        self.runs: list[tuple[int, int]] = []  # (entry, offset in its file) of each run
        at = 0
        for number, entry in enumerate(entries):
            at = self._add(number, entry, at)
        self.file_bytes = align_up(at + tar.END_BYTES, _RECORD_BYTES)
        self._literals.append((at, bytes(self.file_bytes - at)))

    def _add(self, number: int, entry: TarEntry, at: int) -> int:
        head = _header(entry)
        self._literals.append((at, head))
        begin = at = at + len(head)
        for offset, length in entry.runs:
            if length:
                self._extents.append((at, length, len(self.runs)))
                self.runs.append((number, offset))
                at += length
        padding = tar.padding_after(at - begin)
        if padding:
            self._literals.append((at, bytes(padding)))
        return at + padding

    def segments(self, segment_bytes: int) -> list[SegmentPlan]:
        pieces = cut(self._extents, segment_bytes)
        return slices(self.file_bytes, segment_bytes, pieces, self._literals)


def stays_inside(name: str, target: str) -> bool:
    """True if a symbolic link `name` to `target` certainly stays in the folder, whatever other links the folder has.

    This requires that every `..` comes first: after the name of a link, `..` is the parent of that link's target.
    """
    parts = [part for part in target.split("/") if part not in ("", ".")]
    num_up = sum(part == ".." for part in parts)
    depth = len([part for part in name.split("/")[:-1] if part not in ("", ".")])
    return not target.startswith("/") and num_up <= depth and ".." not in parts[num_up:]


def _header(entry: TarEntry) -> bytes:
    """The member's header. For a file with holes, the map of its runs follows, which is part of the data."""
    plain = entry.kind == tarfile.REGTYPE and not entry.is_sparse and entry.num_bytes < 8**11
    if plain and entry.name.isascii() and len(entry.name) <= tar.MAX_NAME_BYTES and 0 <= entry.mtime < 8**11:
        # `tarfile` would make the same block, but take ten times as long: too long for 100,000 files.
        return tar.header(entry.name, entry.num_bytes, mtime=entry.mtime, mode=entry.mode)
    info = tarfile.TarInfo(entry.name)
    info.type, info.mode, info.mtime, info.linkname = entry.kind, entry.mode, entry.mtime, entry.link
    info.uname = info.gname = "root"
    if not entry.is_sparse:
        info.size = entry.num_bytes
        return info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")
    run_map = _map(entry)
    folder, _, base = entry.name.rpartition("/")
    info.size = len(run_map) + sum(length for _, length in entry.runs)
    info.pax_headers = {
        # The path comes first, since `tarfile` takes the last name that it reads.
        "path": f"{folder}/GNUSparseFile.0/{base}",
        "GNU.sparse.major": "1",
        "GNU.sparse.minor": "0",
        "GNU.sparse.name": entry.name,
        "GNU.sparse.realsize": str(entry.num_bytes),
    }
    return info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape") + run_map


def _map(entry: TarEntry) -> bytes:
    """Decimal numbers, one per line: the number of runs, then offset and length of each. An empty run marks the end."""
    runs = [*entry.runs]
    if not runs or sum(runs[-1]) < entry.num_bytes:
        runs.append((entry.num_bytes, 0))
    assert all(sum(a) <= b[0] for a, b in pairwise(runs))
    text = "".join(f"{number}\n" for number in (len(runs), *(n for run in runs for n in run))).encode()
    return text + bytes(tar.padding_after(len(text)))
