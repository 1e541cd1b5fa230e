"""`manifest.json`, whose presence in a step's folder IS the commit.

In: the archives and fields of a commit. Out: the manifest's text, and back. Knows nothing of: storage.

Every version of a manifest begins with a digest of all bytes that follow it (`{"digest": "…",` and a line break). It is
checked before any other field is used, including the version.

A rollback is a commit that retires other steps: its manifest names them in `retires`. Before the manifest, the same
text is put into the root under a name with the step and the attempt. This file is the **intent**: readers that list the
root find it, and leave out the named steps while the manifest of that attempt exists.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from typing import Any, Final, NamedTuple, Self

from ...errors import CorruptCheckpointError, FormatVersionError
from ..fields import count, items, number, parsed, table, text, whole
from ..format.digests import DIGEST_BYTES, block_digest
from ..format.index import MAX_RANKS

NAME: Final = "manifest.json"
VERSION: Final = 2  # version 2 added `in_part`; a manifest without it is written as version 1
_INTENT: Final = r"rollback-(\d{1,255})\.([0-9a-f]{8})\.json"
_RETIRED: Final = r"manifest\.retired-[0-9a-f]{8}\.json"
_HEAD: Final = b'{"digest": "'
_AFTER_DIGEST: Final = b'",\n'
_ATTEMPT: Final = r"[0-9a-f]{8}"
_START: Final = r"\d{8,18}\.[0-9a-f]{8}"


def retired_name() -> str:
    """A new name, under which a manifest is kept that a rollback has retired."""
    return f"manifest.retired-{os.urandom(4).hex()}.json"


def is_retired_name(name: str) -> bool:
    return re.fullmatch(_RETIRED, name) is not None


def parse_intent(name: str) -> tuple[int, str] | None:
    """The step and the attempt in the name of an intent; None for any other name."""
    match = re.fullmatch(_INTENT, name)
    return (int(match[1]), match[2]) if match else None


def intent_name(step: int, attempt: str) -> str:
    """The name, in the run's folder, of the intent of a rollback to this step by this attempt."""
    return f"rollback-{step}.{attempt}.json"


class Archive(NamedTuple):
    """An object in the step's folder, as the manifest names it: usually the tar of one rank."""

    name: str
    num_bytes: int
    digest: str


class GroupLocation(NamedTuple):
    """A group that is stored in another archive than that of its rank.

    The archive belongs to an earlier step, if the group has not changed since, or to this step, if one rank wrote the
    group for all. `in_part`: the ranks' archives have the group, and refer to this archive for some of its tensors.
    """

    group: str
    step: int
    folder: str
    archive: Archive
    in_part: bool = False


class Retired(NamedTuple):
    """A commit that a rollback retires. `attempt` is empty if its manifest could not be read.

    If roots have different attempts of one step, all are listed, that of the manifest's own root last.
    """

    step: int
    attempt: str


class RankFiles(NamedTuple):
    """The objects of a commit of several ranks, other than its archives, whose names follow from rank and attempt.

    See `receipts`. `table` is the digest of the Table by which the ranks divided the tensors, `num_bytes` the size of
    all archives together, and `per_rank` the names in the state of the objects that each rank saves for itself.
    """

    archives: Archive
    layout: Archive
    table: str
    num_bytes: int
    per_rank: tuple[str, ...] = ()


class SaveTimes(NamedTuple):
    """The times of a save on rank 0: from the call until its archives were durable, and the stall of the training."""

    seconds: float
    stall_seconds: float


class Manifest(NamedTuple):
    """One committed checkpoint. `created` is wall time in seconds since the epoch.

    `replaces` are the earlier attempts at this step, the latest first: a root that still holds one of them was away
    during the save. `record` is the user's plain JSON data; retention obeys its fields `rolling` and `ttl_seconds`.
    `start` names the start of the run that committed the step (see `starts`); it is empty in manifests of older
    versions and other tools. `retires` are the newer commits that this commit retires. `times` are for people; older
    versions and other tools write none. A commit of several ranks has `ranks` instead of `archives`, so that its size
    does not grow with the number of ranks.
    """

    step: int
    attempt: str
    world_size: int
    created: float
    archives: tuple[Archive, ...]
    replaces: tuple[str, ...] = ()
    record: Mapping[str, Any] = {}
    elsewhere: tuple[GroupLocation, ...] = ()
    retires: tuple[Retired, ...] = ()
    ranks: RankFiles | None = None
    start: str = ""
    times: SaveTimes | None = None

    @classmethod
    def of_folder(cls, step: int, created: float, num_bytes: int, record: Mapping[str, Any]) -> Self:
        """A stand-in for a framework's checkpoint folder, so that the rules of retention apply to it."""
        return cls(step, "", 1, created, (Archive("", num_bytes, ""),), record=record)

    @property
    def own_names(self) -> list[str]:
        """The names of all objects of this commit in the step's folder."""
        if self.ranks is None:
            return [archive.name for archive in (*self.archives, *self.beside)]
        of_ranks = [archive_name(rank, self.attempt) for rank in range(self.world_size)]
        return [*of_ranks, self.ranks.archives.name, self.ranks.layout.name, *(a.name for a in self.beside)]

    @property
    def beside(self) -> tuple[Archive, ...]:
        """The archives in this step's folder that do not belong to one rank."""
        return tuple({other.archive: None for other in self.elsewhere if other.step == self.step})

    @property
    def lenders(self) -> tuple[Archive, ...]:
        """The objects that a later step names to borrow a group: the archive, or the list of the ranks' archives."""
        return self.archives if self.ranks is None else (self.ranks.archives,)

    def lent(self, group: str) -> tuple[GroupLocation, ...]:
        """The locations of a group that is stored outside the archives of this step's ranks."""
        return tuple(borrowed for borrowed in self.elsewhere if borrowed.group == group)

    def path_in(self, folder: str) -> str:
        """The path of the state below the root: the archive, or with several archives their folder."""
        return f"{folder}/{self.archives[0].name}" if len(self.archives) == 1 else folder

    @property
    def num_bytes(self) -> int:
        of_ranks = self.ranks.num_bytes if self.ranks else 0
        return of_ranks + sum(archive.num_bytes for archive in (*self.archives, *self.beside))

    def dump(self) -> bytes:
        version = VERSION if any(one.in_part for one in self.elsewhere) else 1
        return seal({"format": "async_ckpt", "version": version, **_as_json(self)})


def _as_json(value: Any) -> Any:
    """Convert named tuples to dicts and other tuples to lists, recursively."""
    if isinstance(value, tuple):
        named = getattr(value, "_asdict", None)
        return [*map(_as_json, value)] if named is None else {name: _as_json(one) for name, one in named().items()}
    return value


def parse(data: bytes, *, path: str) -> Manifest:
    """Parse a manifest. Raises CorruptCheckpointError, and FormatVersionError for a later version."""
    try:
        raw = table(unseal(data))
        if count(raw["version"]) > VERSION:
            raise FormatVersionError(
                f"{path}: manifest version {raw['version']}, this library reads up to {VERSION}; "
                "install a newer async_ckpt",
                path=path,
                version=raw["version"],
            )
        archives, world_size = items(raw["archives"], _archive), count(raw["world_size"], MAX_RANKS)
        ranks = None if raw["ranks"] is None else _of_ranks(raw["ranks"])
        if not (archives or ranks) or not world_size:
            raise ValueError("it names no archive")
        return Manifest(
            whole(raw["step"]),
            _attempt(raw["attempt"]),
            world_size,
            number(raw["created"]),
            archives,
            items(raw["replaces"], _attempt),
            table(raw["record"]),
            items(raw["elsewhere"], _elsewhere),
            items(raw["retires"], _retired),
            ranks,
            _start(raw.get("start", "")),
            None if raw.get("times") is None else _times(raw["times"]),
        )
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        why = error if type(error) is ValueError else repr(error)
        raise CorruptCheckpointError(f"{path}: not a manifest ({why!s:.300})", path=path) from error


def seal(fields: Mapping[str, Any]) -> bytes:
    """The text of a JSON object whose first field is the digest of the text after that field."""
    rest = (json.dumps(fields, indent=1) + "\n").encode().removeprefix(b"{\n")
    return _HEAD + block_digest(rest).hex().encode() + _AFTER_DIGEST + rest


def unseal(data: bytes) -> Any:
    """The JSON object in a text made by `seal`. Raises ValueError unless every byte is as it was written."""
    rest = data[len(_HEAD) + 2 * DIGEST_BYTES + len(_AFTER_DIGEST) :]
    if data != _HEAD + block_digest(rest).hex().encode() + _AFTER_DIGEST + rest:
        raise ValueError("it does not match its own digest")
    return parsed(data)


def archive_name(rank: int, attempt: str) -> str:
    """The name of a rank's archive in its step's folder."""
    return f"rank_{rank:05d}.{attempt}.tar"


def attempt_of(name: str) -> str:
    """The attempt in the name of an object or temp file of this library. For other names, the result has no meaning."""
    return (*name.lstrip(".").split("."), "")[1]


def missing_error(shown: str, named_by: int) -> CorruptCheckpointError:
    """The error about a missing object that the manifest of a step names."""
    return CorruptCheckpointError(
        f"{shown} is missing, though the manifest of step {named_by} names it; if the run was copied, copy all "
        f"of it, or merge() step {named_by} where the run is whole; else load an earlier checkpoint",
        path=shown,
    )


def _of_ranks(raw: object) -> RankFiles:
    fields = table(raw)
    return RankFiles(
        _archive(fields["archives"]),
        _archive(fields["layout"]),
        text(fields["table"]),
        count(fields["num_bytes"]),
        items(fields["per_rank"], text),
    )


def _archive(raw: object) -> Archive:
    fields = table(raw)
    return Archive(_file_name(fields["name"]), count(fields["num_bytes"]), text(fields["digest"]))


def _elsewhere(raw: object) -> GroupLocation:
    fields = table(raw)
    return GroupLocation(
        text(fields["group"]),
        whole(fields["step"]),
        _folder_name(fields["folder"]),
        _archive(fields["archive"]),
        fields.get("in_part") is True,
    )


def _retired(raw: object) -> Retired:
    fields = table(raw)
    return Retired(whole(fields["step"]), "" if fields["attempt"] == "" else _attempt(fields["attempt"]))


def _times(raw: object) -> SaveTimes:
    fields = table(raw)
    return SaveTimes(number(fields["seconds"]), number(fields["stall_seconds"]))


def _attempt(raw: object) -> str:
    if not isinstance(raw, str) or not re.fullmatch(_ATTEMPT, raw):
        raise ValueError(f"{raw!r:.300} is not an attempt")
    return raw


def _start(raw: object) -> str:
    if not isinstance(raw, str) or (raw and not re.fullmatch(_START, raw)):
        raise ValueError(f"{raw!r:.300} is not the start of a run")
    return raw


def _file_name(name: object) -> str:
    """The name of a file beside the manifest. Raises ValueError for any other path."""
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._~-]{0,254}", name):
        raise ValueError(f"{name!r:.300} is not a file name")
    return name


def _folder_name(name: object) -> str:
    """The name of a folder beside the manifest's own folder. Raises ValueError for any other path."""
    if not re.fullmatch(r"[^/\\\0.][^/\\\0]{0,254}", text(name)):
        raise ValueError(f"{name!r:.300} is not the name of a step's folder")
    return text(name)
