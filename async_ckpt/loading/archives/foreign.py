"""Files of tensors that are no archives: safetensors, shards of them with an index, and the members of an archive.

In: a reader, or a storage with a folder. Out: contents as those of an archive. Knows nothing of: runs, steps.

A bare safetensors file has an index as an archive has one: it is made from the header. The folder of an extracted
archive is read as the tar that it was: its members lie where the index says, and between them are made-up tar headers.
Only what these held of times is lost, so the few blocks of digests that one lies in cannot be compared. A file that is
not there is an error only when something in it is asked for.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Collection, Iterable, Iterator
from typing import Any, ClassVar, Final

from ...errors import CorruptCheckpointError, NotCommittedError
from ...format import digests, index, safetensors, tar
from ...runs.unmanaged import OF_DCP
from ...spec import BLOCK_BYTES, Json
from ...state.names import Select, Selector, selector, shown
from ...state.tree import StoredLeaf, flat
from ...storage.interface import Reader, Storage
from .archive import OpenArchive, first_bytes
from .contents import Contents, Groups, Part
from .dcp_folder import OpenDcp
from .virtual_files import JoinedFile, Zeros

_SUFFIX: Final = ".safetensors"
_INDEX_SUFFIX: Final = ".safetensors.index.json"
# What a file may name is what lies beside it.
_FILE_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._~ -]{0,254}")


def opened(reader: Reader, *, path: str, verify: bool) -> Contents:
    """The archive, or the bare safetensors file, that this reader reads. Raises CorruptCheckpointError for anything else."""
    begin = first_bytes(reader, path=path)
    if safetensors.begins(begin):
        return OpenSafetensors(reader, path=path, begin=begin)
    return OpenArchive(reader, path=path, verify=verify, begin=begin)


def parts_of_folder(storage: Storage, *, verify: bool, stack: contextlib.ExitStack) -> list[Part] | None:
    """The content of a folder that is no committed step: an extracted archive, the weights of a model, or what
    torch.distributed.checkpoint has written; None for anything else.

    What is opened is closed with `stack`. Raises CorruptCheckpointError.
    """
    names = storage.names("")
    if OF_DCP in names:  # if it has safetensors files, these hold pieces of tensors
        return [Part(OpenDcp(storage, stack))]
    if {index.MEMBER, digests.MEMBER} <= {*names}:
        return [Part(_extracted(storage, verify, stack))]
    found = [name for name in names if name.endswith(_INDEX_SUFFIX)]
    if len(found) == 1:
        return list(_shards(storage, found[0], stack))
    files = [name for name in names if name.endswith(_SUFFIX)]
    if len(files) == 1 and not found:
        return [Part(_file_of(storage, files[0], stack))]
    return None


class OpenSafetensors(Contents):
    """A bare safetensors file, its header checked. It has no digests: damage to what is no header cannot be noticed."""

    _advice: ClassVar[str] = "fetch it again"

    def __init__(self, reader: Reader, *, path: str, begin: memoryview) -> None:
        super().__init__(reader, path=path)
        num_bytes = 8 + int.from_bytes(begin[:8], "little")
        if num_bytes > reader.num_bytes:
            raise self.corrupt("truncated inside its header")
        head = bytearray(num_bytes)
        head[: len(begin)] = begin[:num_bytes]
        if num_bytes > len(begin):
            self.read_into(len(begin), memoryview(head)[len(begin) :])
        self.index = index.of_safetensors(
            bytes(head), name=path, file_bytes=reader.num_bytes, skeleton=flat, path=path
        )


class MissingShard(Contents):
    """A file that is not there, of which it is known what it would hold."""

    def __init__(self, keys: Collection[str], error: CorruptCheckpointError) -> None:
        super().__init__(JoinedFile(()), path=error.path)
        self._keys, self._error = sorted(keys), error

    def tree(
        self,
        *,
        select: Select = None,
        types: Iterable[type] = (),  # noqa: ARG002
        groups: Groups = None,  # noqa: ARG002
    ) -> tuple[Any, list[StoredLeaf]]:
        """Raises KeyError if nothing of it is selected, else CorruptCheckpointError."""
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


def _extracted(storage: Storage, verify: bool, stack: contextlib.ExitStack) -> OpenArchive:
    """The folder as the tar that it was extracted from."""
    text, _ = storage.read(index.MEMBER)
    folder = storage.locate("")
    told = index.parse(text, path=storage.locate(index.MEMBER))
    pieces: list[bytes | Reader] = [tar.header(index.MEMBER, len(text), mtime=0), text]
    made_up, end = {0}, tar.BLOCK + len(text)
    there = storage.names("")
    # All of them before anything is made: that of the digests bounds what the index may say of what is not there.
    files = [_member_file(storage, member, there, stack) for member in (*told.members, told.digests)]
    lacking = {}
    for member, file in zip((*told.members, told.digests), files, strict=True):
        header_at, num_bytes = member.data.offset - tar.BLOCK, member.data.length
        pieces += [
            bytes(header_at - end),
            tar.header(member.name, num_bytes, mtime=0),
            file or Zeros(num_bytes),
        ]
        made_up.add(header_at // BLOCK_BYTES)
        if file is None:
            lacking[member.name] = _missing(storage, member.name, index.MEMBER)
            made_up.update(range(header_at // BLOCK_BYTES, -(-member.data.end // BLOCK_BYTES)))
        end = member.data.end
    pieces.append(bytes(told.file_bytes - end))
    return OpenArchive(
        JoinedFile(pieces), path=folder, verify=verify, made_up=frozenset(made_up), lacking=lacking
    )


def _member_file(
    storage: Storage, member: index.Member, there: Collection[str], stack: contextlib.ExitStack
) -> Reader | None:
    """The file of a member, closed with `stack`; None if there is none."""
    if len(member.name) > tar.MAX_NAME_BYTES:
        raise _corrupt(storage, index.MEMBER, f"{member.name!r:.300} is too long for the name of a member")
    if _is_missing(member.name, there):
        return None
    file = _open(storage, member.name, stack, index.MEMBER)
    if file.num_bytes != member.data.length:
        why = f"it has {file.num_bytes:,} bytes, and {index.MEMBER} says {member.data.length:,}"
        raise _corrupt(storage, member.name, why)
    return file


def _shards(storage: Storage, name: str, stack: contextlib.ExitStack) -> Iterator[Part]:
    """The files that an index of Hugging Face names, each with those tensors that it is named for."""
    try:
        told = json.loads(storage.read(name)[0])
        files: dict[str, Json] = dict(told["weight_map"])
        shards = sorted(set(files.values()))
        is_delta = "delta_encoding" in dict(told.get("metadata") or {})
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise _corrupt(storage, name, f"it is not an index of safetensors files ({error!r:.200})") from error
    if is_delta:
        where = storage.locate(name)
        raise NotCommittedError(
            f"{where}: this is a delta, which has what is different from another version and no weights; pull that by a "
            "Subscriber at the folder above, and load what it has pulled",
            path=where,
            step=None,
        )
    if not shards:
        raise _corrupt(storage, name, "it names no file")
    there = storage.names("")
    for shard in shards:
        if _is_missing(shard, there):
            lost = frozenset(key for key, told in files.items() if told == shard)
            yield Part(MissingShard(lost, _missing(storage, shard, name)), lost)
            continue
        contents = _file_of(storage, shard, stack, name)
        held = {key for key in contents.entries() or () if files.get(key, shard) == shard}
        lacking = sorted(key for key, told in files.items() if told == shard and key not in held)
        if lacking:
            raise contents.corrupt(f"{name} says that it has {', '.join(lacking[:5])!a:.500}, and it has not")
        yield Part(contents, frozenset(held))


def _file_of(
    storage: Storage, name: str, stack: contextlib.ExitStack, told_by: str | None = None
) -> OpenSafetensors:
    reader = _open(storage, name, stack, told_by or name)
    begin = first_bytes(reader, path=storage.locate(name))
    if not safetensors.begins(begin):
        raise _corrupt(storage, name, "it is not a safetensors file")
    return OpenSafetensors(reader, path=storage.locate(name), begin=begin)


def _open(storage: Storage, name: str, stack: contextlib.ExitStack, told_by: str) -> Reader:
    """A file of the folder, closed with `stack`."""
    if not isinstance(name, str) or not _FILE_NAME.fullmatch(name):
        raise _corrupt(storage, told_by, f"{name!r:.300} is not the name of a file beside it")
    try:
        return stack.enter_context(storage.open(name))
    except FileNotFoundError as error:
        raise _missing(storage, name, told_by) from error
    except (IsADirectoryError, ValueError) as error:
        raise _corrupt(storage, name, f"it is not a file, though {told_by} names it") from error


def _is_missing(name: object, there: Collection[str]) -> bool:
    """Whether this is the name of a file of the folder, and there is none of that name."""
    return isinstance(name, str) and _FILE_NAME.fullmatch(name) is not None and name not in there


def _missing(storage: Storage, name: str, told_by: str) -> CorruptCheckpointError:
    return _corrupt(storage, name, f"it is missing, though {told_by} names it")


def _corrupt(storage: Storage, name: str, why: str) -> CorruptCheckpointError:
    where = storage.locate(name)
    return CorruptCheckpointError(f"{where}: {why}; fetch it again", path=where)
