"""Tensor files of other formats: safetensors files, shards with an index, and folders of extracted archives.

In: a reader, or a storage with a folder. Out: contents like those of an archive. Knows nothing of: runs, steps.

The index of a bare safetensors file is built from its header. The folder of an extracted archive is read as the tar
from which it was extracted: its members are at the offsets in the index, with reconstructed tar headers between them.
The reconstructed headers differ from the original ones only in their times, so the few blocks with a header cannot be
compared. A missing file is an error only when something in it is requested.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, ClassVar, Final

from ...core.format import digests, index, safetensors, tar
from ...core.loading.archives.archive import OpenArchive, first_bytes
from ...core.loading.archives.contents import Contents, Groups, Part
from ...core.runs.foreign_entries import OF_DCP
from ...core.spec import BLOCK_BYTES, Extent, Json
from ...core.state.names import Select, Selector, selector, shown
from ...core.state.tree import StoredLeaf, flat
from ...core.storage.interface import Reader, Storage
from ...errors import CorruptCheckpointError, ForeignFileError, NotCommittedError
from .dcp_folder import OpenDcp
from .foreign_files import foreign_file
from .virtual_files import JoinedFile, Zeros

_SUFFIX: Final = ".safetensors"
_INDEX_SUFFIX: Final = ".safetensors.index.json"
# An index may only name files beside it.
_FILE_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._~ -]{0,254}")


def opened(reader: Reader, *, path: str, first_block: memoryview) -> Contents | None:
    """The bare safetensors file behind a reader; None for a file of an unknown kind, such as a damaged archive.

    Raises ForeignFileError for a file of any other known kind.
    """
    kind = foreign_file(first_block, path=path)
    if kind is not None and kind.kind != "safetensors":
        raise ForeignFileError(f"{path}: not an async_ckpt archive: this is {kind}", path=path, kind=kind.kind)
    return None if kind is None else OpenSafetensors(reader, path=path, first_block=first_block)


def parts_of_folder(storage: Storage, *, verify: bool, stack: contextlib.ExitStack) -> list[Part] | None:
    """The content of a folder that is not a committed step: an extracted archive, the weights of a model, or a
    checkpoint of torch.distributed.checkpoint; None for anything else.

    `stack` closes the opened files. Raises CorruptCheckpointError.
    """
    names = storage.names("")
    if OF_DCP in names:  # first: its safetensors files, if any, contain pieces of tensors
        return [Part(OpenDcp(storage, stack, verify=verify))]
    if {index.MEMBER, digests.MEMBER} <= {*names}:
        return [Part(_open_extracted(storage, verify, stack))]
    indices = [name for name in names if name.endswith(_INDEX_SUFFIX)]
    if len(indices) == 1:
        return list(_shard_parts(storage, indices[0], stack))
    files = [name for name in names if name.endswith(_SUFFIX)]
    if len(files) == 1 and not indices:
        return [Part(_open_safetensors(storage, files[0], stack))]
    return None


class OpenSafetensors(Contents):
    """A bare safetensors file with a valid header. It has no digests, so damage to its tensors goes unnoticed."""

    _advice: ClassVar[str] = "fetch it again"

    def __init__(self, reader: Reader, *, path: str, first_block: memoryview) -> None:
        super().__init__(reader, path=path)
        num_bytes = 8 + int.from_bytes(first_block[:8], "little")
        if num_bytes > reader.num_bytes:
            raise self.corrupt("truncated inside its header")
        header = bytearray(num_bytes)
        header[: len(first_block)] = first_block[:num_bytes]
        if num_bytes > len(first_block):
            self.read_into(len(first_block), memoryview(header)[len(first_block) :])
        self.index = index.of_safetensors(
            bytes(header), name=path, file_bytes=reader.num_bytes, skeleton=flat, path=path
        )


class MissingShard(Contents):
    """A missing file whose names are known. Selecting one of them raises the error."""

    def __init__(self, keys: Collection[str], error: CorruptCheckpointError) -> None:
        super().__init__(None, path=error.path)
        self._keys, self._error = sorted(keys), error

    def tree(
        self,
        *,
        select: Select = None,
        types: Iterable[type] | None = (),  # noqa: ARG002
        groups: Groups = None,  # noqa: ARG002
    ) -> tuple[Any, list[StoredLeaf]]:
        """Raises CorruptCheckpointError if one of its names is selected, or else KeyError."""
        chosen = selector(select)
        if chosen is None or any(chosen((key,)) for key in self._keys):
            raise self._error
        raise KeyError(f"select={select!r} matches nothing in {self.path}; it holds {self.names()}")

    def entries(self) -> list[Any]:
        return list(self._keys)

    def names(self) -> str:
        return ", ".join(shown((key,)) for key in self._keys)

    def match(self, chosen: Selector, groups: Groups) -> None:  # noqa: ARG002
        for key in self._keys:
            chosen((key,))


class ExtractedArchive(OpenArchive):
    """The folder of an extracted archive, read as the tar from which it was extracted.

    The blocks with the numbers in `inexact` contain reconstructed headers, and are not compared with their digests.
    Reading a member whose file is in `missing` raises the error from there.
    """

    def __init__(
        self,
        reader: Reader,
        *,
        path: str,
        verify: bool,
        inexact: Collection[int],
        missing: Mapping[str, CorruptCheckpointError],
    ) -> None:
        self._inexact, self._missing = inexact, missing
        super().__init__(reader, path=path, verify=verify)

    def damaged_blocks(self, offset: int, data: memoryview) -> list[int]:
        return [number for number in super().damaged_blocks(offset, data) if number not in self._inexact]

    def check_tar_header(self, member: index.Member) -> Extent:
        if member.name in self._missing:
            raise self._missing[member.name]
        return super().check_tar_header(member)


def _open_extracted(storage: Storage, verify: bool, stack: contextlib.ExitStack) -> OpenArchive:
    """The folder as the tar from which it was extracted."""
    text, _ = storage.read(index.MEMBER)
    contents = index.parse(text, path=storage.locate(index.MEMBER))
    pieces: list[bytes | Reader] = [tar.header(index.MEMBER, len(text), mtime=0), text]
    inexact_blocks, end = {0}, tar.BLOCK + len(text)
    names = storage.names("")
    # Open all files before allocating memory: the size of the digests bounds the sizes of missing members.
    files = [_member_file(storage, member, names, stack) for member in (*contents.members, contents.digests)]
    missing = {}
    for member, file in zip((*contents.members, contents.digests), files, strict=True):
        header_at, num_bytes = member.data.offset - tar.BLOCK, member.data.length
        pieces += [bytes(header_at - end), tar.header(member.name, num_bytes, mtime=0), file or Zeros(num_bytes)]
        inexact_blocks.add(header_at // BLOCK_BYTES)
        if file is None:
            missing[member.name] = _missing(storage, member.name, index.MEMBER)
            inexact_blocks.update(range(header_at // BLOCK_BYTES, -(-member.data.end // BLOCK_BYTES)))
        end = member.data.end
    pieces.append(bytes(contents.file_bytes - end))
    return ExtractedArchive(
        JoinedFile(pieces), path=storage.locate(""), verify=verify, inexact=inexact_blocks, missing=missing
    )


def _member_file(
    storage: Storage, member: index.Member, names: Collection[str], stack: contextlib.ExitStack
) -> Reader | None:
    """The file of a member, which `stack` closes; None if it is missing."""
    if len(member.name) > tar.MAX_NAME_BYTES:
        raise _corrupt(storage, index.MEMBER, f"{member.name!r:.300} is too long for the name of a member")
    if _is_missing(member.name, names):
        return None
    file = _open(storage, member.name, stack, index.MEMBER)
    if file.num_bytes != member.data.length:
        why = f"it has {file.num_bytes:,} bytes, but {index.MEMBER} says {member.data.length:,}"
        raise _corrupt(storage, member.name, why)
    return file


def _shard_parts(storage: Storage, name: str, stack: contextlib.ExitStack) -> Iterator[Part]:
    """The files in a Hugging Face index, each with the tensors that the index assigns to it."""
    try:
        shard_index = json.loads(storage.read(name)[0])
        files: dict[str, Json] = dict(shard_index["weight_map"])
        shards = sorted(set(files.values()))
        is_delta = "delta_encoding" in dict(shard_index.get("metadata") or {})
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise _corrupt(storage, name, f"it is not an index of safetensors files ({error!r:.200})") from error
    if is_delta:
        path = storage.locate(name)
        raise NotCommittedError(
            f"{path}: this is a delta, which has only the difference from another version; pull the version with a "
            "Subscriber from the folder above, and load the pulled folder",
            path=path,
            step=None,
        )
    if not shards:
        raise _corrupt(storage, name, "it names no file")
    names = storage.names("")
    for shard in shards:
        if _is_missing(shard, names):
            lost = frozenset(key for key, file in files.items() if file == shard)
            yield Part(MissingShard(lost, _missing(storage, shard, name)), lost)
            continue
        contents = _open_safetensors(storage, shard, stack, name)
        held = {key for key in contents.entries() or () if files.get(key, shard) == shard}
        absent = sorted(key for key, file in files.items() if file == shard and key not in held)
        if absent:
            raise contents.corrupt(f"{name} lists {', '.join(absent[:5])!a:.500}, which are missing")
        yield Part(contents, frozenset(held))


def _open_safetensors(
    storage: Storage, name: str, stack: contextlib.ExitStack, named_by: str | None = None
) -> OpenSafetensors:
    reader = _open(storage, name, stack, named_by or name)
    first_block = first_bytes(reader, path=storage.locate(name))
    if not safetensors.begins(first_block):
        raise _corrupt(storage, name, "it is not a safetensors file")
    return OpenSafetensors(reader, path=storage.locate(name), first_block=first_block)


def _open(storage: Storage, name: str, stack: contextlib.ExitStack, named_by: str) -> Reader:
    """A file of the folder, which `stack` closes."""
    if not isinstance(name, str) or not _FILE_NAME.fullmatch(name):
        raise _corrupt(storage, named_by, f"{name!r:.300} is not the name of a file beside it")
    try:
        return stack.enter_context(storage.open(name))
    except FileNotFoundError as error:
        raise _missing(storage, name, named_by) from error
    except (IsADirectoryError, ValueError) as error:
        raise _corrupt(storage, name, f"it is not a file, though {named_by} names it") from error


def _is_missing(name: object, names: Collection[str]) -> bool:
    """True if the name is valid, but the folder has no such file."""
    return isinstance(name, str) and _FILE_NAME.fullmatch(name) is not None and name not in names


def _missing(storage: Storage, name: str, named_by: str) -> CorruptCheckpointError:
    return _corrupt(storage, name, f"it is missing, though {named_by} names it")


def _corrupt(storage: Storage, name: str, why: str) -> CorruptCheckpointError:
    path = storage.locate(name)
    return CorruptCheckpointError(f"{path}: {why}; fetch it again", path=path)
