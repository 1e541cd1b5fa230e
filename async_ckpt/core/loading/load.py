"""Loading a state from an archive. This module starts no threads and logs nothing.

In: an archive that may be damaged or forged. Out: the state. Knows nothing of: steps, manifests.

Parallel ranged reads bring the data through a small ring of (page-locked) buffers into the tensors. With `verify`, a
buffer holds whole digest blocks, which are compared before they are copied to a tensor. Nothing is unpickled unless the
caller passes `trust=True` or torch's own weights-only unpickler accepts it. Sizes in the file are not trusted: all
tensors together are never larger than the file, and a pickle is examined before it is loaded.
"""

from __future__ import annotations

import math
import mmap as mmap_module
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, Literal, NamedTuple

import torch

from ..host.pool import SegmentPool
from ..state.names import Select, Selector, selector, shown
from ..state.tree import StoredLeaf, replaced
from .archives.contents import CPU, Contents, Groups, Part, load_parts
from .fill import Wanted, fill, planned

Verify = bool | Literal["first"]
# Returns this number of bytes of host memory, as a dense uint8 tensor.
Memory = Callable[[int], torch.Tensor]


class LoadOptions(NamedTuple):
    """The options of `async_ckpt.load` for building the state."""

    map_location: str | torch.device | None = None
    select: Select = None
    trust: bool = False
    mmap: bool = False
    types: Iterable[type] | None = ()


_PLAIN: Final = LoadOptions()


def load_state(
    archive: Contents,
    options: LoadOptions = _PLAIN,
    *,
    groups: Groups = None,
    memory: Memory | None = None,
    pool: SegmentPool | None = None,
) -> Any:
    """Build the saved state on the CPU, or on the device `map_location`. Tied tensors share memory again.

    With `mmap`, tensors are views of the mapped archive. Their pages are read when they are first touched, or at once
    if the archive is verified. With `memory`, tensors are placed in the memory that it returns. Buffers are taken from
    `pool` as far as it can spare them.
    """
    map_location, select, trust, mmap, types = options
    device = CPU if map_location is None else torch.device(map_location)
    value, stored = archive.tree(select=select, types=types, groups=groups)
    objects = archive.objects(stored, trust=trust)
    wanted = {leaf.number for leaf in stored if leaf.kind != "object"}
    archive.need((number, None) for number in wanted)  # before `primary`: opening more archives may reveal a tie
    numbers = sorted({*map(archive.primary, wanted)})
    on_host = {archive.primary(leaf.number) for leaf in stored if leaf.kind in ("ndarray", "bytes")}
    maps: dict[Contents, mmap_module.mmap] = {}
    if mmap:
        archive.map().close()  # raises if the archive cannot be mapped, even if there is no tensor to map
        tensors = {n: _view(archive, n, maps) for n in numbers}
    elif memory is not None:
        tensors = {n: _in_memory(archive, n, memory) for n in numbers}
    else:
        tensors = {n: archive.empty(n, CPU if n in on_host else device) for n in numbers}
    plan = planned([(archive, [Wanted(n, tensor) for n, tensor in tensors.items()])])
    if mmap:
        for read in plan.reads:
            with memoryview(maps[read.archive]) as view, view[read.extent.offset : read.extent.end] as part:
                read.archive.verify(read.extent.offset, part)
    else:
        fill(plan, pool=pool)

    def give(leaf: StoredLeaf) -> Any:
        if leaf.kind == "object":
            return objects[leaf.number]
        return archive.leaf(leaf, tensors[archive.primary(leaf.number)], device)

    try:
        return replaced(value, give, of_inner=archive.made)
    except RecursionError as error:
        raise archive.nested_too_deeply() from error


def check_lent(parts: Sequence[Part], select: Select) -> None:
    """Raises CorruptCheckpointError if one of several archives lacks a selected group that the manifest lists."""
    chosen = selector(select)
    for part in parts if len(parts) > 1 else ():
        while lacking := _lacking_groups(part, chosen):
            if not part.archive.learn_names():
                raise part.archive.corrupt(f"a manifest says that {lacking[0]!r} is in it, but it is not")


def _lacking_groups(part: Part, chosen: Selector | None) -> list[str]:
    keys = part.archive.entries()
    if keys is None:
        raise part.archive.corrupt("a manifest says that it is part of a state, but it is not a dict of groups")
    held = {key for key in keys if isinstance(key, str)}
    return sorted(
        group for group in part.groups or () if group not in held and (chosen is None or chosen.reaches(group))
    )


def check_select(parts: Sequence[Part], select: Select) -> None:
    """Raises KeyError if one of several patterns selects nothing, since it probably has a typo."""
    chosen = None if isinstance(select, str) else selector(select)
    if chosen is None:
        return
    for part in parts:
        part.archive.match(chosen, part.groups)
    for part in parts:
        if chosen.unused and part.archive.learn_names():  # another rank may have saved it
            part.archive.match(chosen, part.groups)
    if chosen.unused:
        contents = "; ".join(f"{part.archive.path} holds {part.archive.names()}" for part in parts)
        raise KeyError(f"select={select!r}, {chosen.unused[0]!r} matches nothing; {contents}")


def check_verify(verify: Verify) -> None:
    """Raises ValueError for an invalid `verify`, which must not be interpreted as True or False."""
    if verify not in (True, False, "first"):
        raise ValueError(f'verify must be True, False or, for restore, "first"; got {verify!r}')


def state_of(
    parts: Sequence[Part],
    options: LoadOptions,
    *,
    memory: Memory | None = None,
    pool: SegmentPool | None = None,
) -> Any:
    """Build the state from archives, or from maps of them."""
    location = options.map_location
    if location is not None:
        _check_device(location, is_used=not options.mmap)
    check_lent(parts, options.select)
    check_select(parts, options.select)
    if options.mmap and location is not None and torch.device(location).type != "cpu":
        raise ValueError("mmap=True makes views of the file, which lie on the CPU; leave map_location out")

    def load(part: Part) -> Any:
        return load_state(part.archive, options, groups=part.groups, memory=memory, pool=pool)

    return load_parts(parts, load)


def _check_device(map_location: str | torch.device, *, is_used: bool) -> None:
    """Raises ValueError for an invalid device, and for a used device that is not available here."""
    try:
        device = torch.device(map_location)
        if is_used:
            torch.empty(0, device=device)
    except Exception as error:  # each kind of device raises its own errors
        why = str(error).partition("\n")[0]
        raise ValueError(
            f'map_location={map_location!r:.100} is not a device that torch can use here ({why:.200}); give "cpu", or '
            "leave it out"
        ) from error


def _in_memory(archive: Contents, number: int, memory: Memory) -> torch.Tensor:
    archive.sources(number)  # raises if an item is missing
    tensor, dtype = archive.index.tensors[number], archive.dtype(number)
    flat = memory(math.prod(tensor.shape) * dtype.itemsize)
    return flat.view(dtype).view(tensor.shape)


def _view(archive: Contents, number: int, maps: dict[Contents, mmap_module.mmap]) -> torch.Tensor:
    tensor, dtype = archive.index.tensors[number], archive.dtype(number)
    sources = archive.sources(number)
    if len(sources) != 1 or sources[0].box != sources[0].piece.box:
        raise ValueError(
            f"mmap=True makes views of a file, but {shown(tensor.path)} is in several pieces, as several ranks have "
            "saved it; leave mmap out"
        )
    file, piece, _ = sources[0]
    if not piece.extent.length:
        return torch.empty(tensor.shape, dtype=dtype, device=CPU)
    mapped = maps[file] = maps.get(file) or file.map()
    flat = torch.frombuffer(mapped, dtype=torch.uint8, count=piece.extent.length, offset=piece.extent.offset)
    if piece.extent.offset % dtype.itemsize:
        flat = flat.clone()  # files of other programs may have unaligned tensors
    return (flat if dtype == torch.uint8 else flat.view(dtype)).view(tensor.shape)
