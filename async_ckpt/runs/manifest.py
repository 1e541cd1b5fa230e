"""`manifest.json`: its presence in a step's folder IS the commit.

In: what was written. Out: the manifest's text, and back. Knows nothing of: storage.

A manifest begins, in every version, with a digest of all that follows (`{"digest": "…",` and a line break): it is
compared before anything else in the text is believed, its version included.

A rollback is one commit of many steps: the steps that leave the run are named by the manifest itself (`retires`).
Before it is put, the same text is put in the root under a name that says which attempt it announces. This is the
**intent**: whoever lists the root finds it, and leaves the named steps out while the manifest of that attempt stands.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from ..errors import CorruptCheckpointError, FormatVersionError
from ..fields import count, items, number, table, text, whole
from ..format.digests import DIGEST_BYTES, block_digest
from ..format.index import MAX_RANKS

NAME: Final = "manifest.json"
VERSION: Final = 1
_INTENT: Final = re.compile(r"rollback-(\d{1,255})\.([0-9a-f]{8})\.json")
_RETIRED: Final = re.compile(r"manifest\.retired-[0-9a-f]{8}\.json")
_HEAD: Final = b'{"digest": "'
_AFTER_DIGEST: Final = b'",\n'
_ATTEMPT: Final = re.compile(r"[0-9a-f]{8}")
_START: Final = re.compile(r"\d{8,18}\.[0-9a-f]{8}")


def retired_name() -> str:
    """A new name for a manifest that a rollback has taken out of the run: still there for whoever wants it back."""
    return f"manifest.retired-{os.urandom(4).hex()}.json"


def is_retired_name(name: str) -> bool:
    return _RETIRED.fullmatch(name) is not None


def retired_attempts(
    intents: Iterable[tuple[int, str]], manifests_of: Callable[[int], Iterable[Manifest | None]]
) -> dict[int, str]:
    """The attempts, by step, that announced rollbacks have taken out of the run.

    Each counts as far as `found`, which tells what stands under a step, has the manifest of just the announced attempt.
    """
    return {
        retired.step: retired.attempt
        for step, attempt in intents
        for manifest in manifests_of(step)
        if manifest is not None and manifest.attempt == attempt
        for retired in manifest.retires
    }


def parse_intent(name: str) -> tuple[int, str] | None:
    """The step and the attempt that a name announces; None for any other name."""
    match = _INTENT.fullmatch(name)
    return (int(match[1]), match[2]) if match else None


def intent_name(step: int, attempt: str) -> str:
    """The name, in the run's folder, of what announces a rollback to this step by this attempt."""
    return f"rollback-{step}.{attempt}.json"


@dataclass(frozen=True, slots=True)
class Archive:
    """One rank's tar, as the manifest names it: a file name in the step's folder, its size, its own digest."""

    name: str
    num_bytes: int
    digest: str


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """A top-level group of the state that is in another archive than its rank's: of an earlier step, since it has not
    changed since; or of this step, since one rank wrote it for all.
    """

    group: str
    step: int
    folder: str
    archive: Archive


@dataclass(frozen=True, slots=True)
class Retired:
    """A commit that a rollback takes out of the run. `attempt` is empty for one whose manifest could not be read."""

    step: int
    attempt: str


@dataclass(frozen=True, slots=True)
class OfRanks:
    """The objects that a commit of several ranks has beside its archives, which are named by their ranks (see `receipts`).

    `table` is known to those who shared by it, `num_bytes` are of all archives, and `per_rank` the names in the state of
    what each rank has for itself.
    """

    archives: Archive
    layout: Archive
    table: str
    num_bytes: int
    per_rank: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Manifest:
    """One committed checkpoint. `created` is wall time in seconds since the epoch.

    `replaces` are the attempts at this step that stood here before, the last first: a root that holds one of those was away.
    `record` is the user's: plain JSON data, whose marks `rolling` and `ttl_seconds` retention obeys.
    `start` names the start of the run that committed it (see `starts`); it is empty for what older versions and other tools write.
    `retires` are the newer commits that left the run with this one. A commit of several ranks has `ranks` instead of
    `archives`, so that it does not grow with them.
    """

    step: int
    attempt: str
    world_size: int
    created: float
    archives: tuple[Archive, ...]
    replaces: tuple[str, ...] = ()
    record: Mapping[str, Any] = field(default_factory=dict)
    elsewhere: tuple[Elsewhere, ...] = ()
    retires: tuple[Retired, ...] = ()
    ranks: OfRanks | None = None
    start: str = ""

    @property
    def own_names(self) -> list[str]:
        """The names of all objects in this step's folder that it stands for."""
        if self.ranks is None:
            return [archive.name for archive in (*self.archives, *self.beside)]
        of_ranks = [archive_name(rank, self.attempt) for rank in range(self.world_size)]
        return [*of_ranks, self.ranks.archives.name, self.ranks.layout.name, *(a.name for a in self.beside)]

    @property
    def beside(self) -> tuple[Archive, ...]:
        """The archives in this step's folder that are of no rank."""
        return tuple({other.archive: None for other in self.elsewhere if other.step == self.step})

    @property
    def lenders(self) -> tuple[Archive, ...]:
        """The objects that later steps name to borrow a group from this one: its archive, or the list of those of all ranks."""
        return self.archives if self.ranks is None else (self.ranks.archives,)

    def lent(self, group: str) -> tuple[Elsewhere, ...]:
        """Where a group is that is not in this step's archives."""
        return tuple(borrowed for borrowed in self.elsewhere if borrowed.group == group)

    def path_in(self, folder: str) -> str:
        """Where its state is: the archive, or with several ranks their folder."""
        return f"{folder}/{self.archives[0].name}" if len(self.archives) == 1 else folder

    @property
    def num_bytes(self) -> int:
        of_ranks = self.ranks.num_bytes if self.ranks else 0
        return of_ranks + sum(archive.num_bytes for archive in (*self.archives, *self.beside))

    def dump(self) -> bytes:
        return seal({"format": "async_ckpt", "version": VERSION, **asdict(self)})


def parse(data: bytes, *, path: str) -> Manifest:
    """Raises CorruptCheckpointError for text that is not a manifest, FormatVersionError for a sound one from the future."""
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
        )
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise CorruptCheckpointError(f"{path}: not a manifest ({error!r:.300})", path=path) from error


def seal(fields: Mapping[str, Any]) -> bytes:
    """A JSON object that begins with the digest of all that follows the digest."""
    rest = (json.dumps(fields, indent=1) + "\n").encode().removeprefix(b"{\n")
    return _HEAD + block_digest(rest).hex().encode() + _AFTER_DIGEST + rest


def unseal(data: bytes) -> Any:
    """The object back. Raises ValueError unless every byte is as it was written."""
    rest = data[len(_HEAD) + 2 * DIGEST_BYTES + len(_AFTER_DIGEST) :]
    if data != _HEAD + block_digest(rest).hex().encode() + _AFTER_DIGEST + rest:
        raise ValueError("it does not match its own digest")
    return json.loads(data)


def archive_name(rank: int, attempt: str) -> str:
    """The name of a rank's archive in its step's folder."""
    return f"rank_{rank:05d}.{attempt}.tar"


def missing(shown: str, named_by: int) -> CorruptCheckpointError:
    """The error about an object that is not there though the manifest of a step names, its own or an earlier one's."""
    return CorruptCheckpointError(
        f"{shown} is missing, though the manifest of step {named_by} names it; if the run was copied, copy all of it, or merge() step "
        f"{named_by} where the run is whole; else load an earlier checkpoint",
        path=shown,
    )


def _of_ranks(raw: object) -> OfRanks:
    fields = table(raw)
    return OfRanks(
        _archive(fields["archives"]),
        _archive(fields["layout"]),
        text(fields["table"]),
        count(fields["num_bytes"]),
        items(fields["per_rank"], text),
    )


def _archive(raw: object) -> Archive:
    fields = table(raw)
    return Archive(_file_name(fields["name"]), count(fields["num_bytes"]), text(fields["digest"]))


def _elsewhere(raw: object) -> Elsewhere:
    fields = table(raw)
    return Elsewhere(
        text(fields["group"]),
        whole(fields["step"]),
        _folder_name(fields["folder"]),
        _archive(fields["archive"]),
    )


def _retired(raw: object) -> Retired:
    fields = table(raw)
    return Retired(whole(fields["step"]), "" if fields["attempt"] == "" else _attempt(fields["attempt"]))


def _attempt(raw: object) -> str:
    if not isinstance(raw, str) or not _ATTEMPT.fullmatch(raw):
        raise ValueError(f"{raw!r:.300} is not an attempt")
    return raw


def _start(raw: object) -> str:
    if not isinstance(raw, str) or (raw and not _START.fullmatch(raw)):
        raise ValueError(f"{raw!r:.300} is no start of a run")
    return raw


def _file_name(name: object) -> str:
    """A manifest may name only what lies beside it."""
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._~-]{0,254}", name):
        raise ValueError(f"{name!r:.300} is not a file name")
    return name


def _folder_name(name: object) -> str:
    """And what it borrows lies in a folder beside its own."""
    if not re.fullmatch(r"[^/\\\0.][^/\\\0]{0,254}", text(name)):
        raise ValueError(f"{name!r:.300} is not the name of a step's folder")
    return text(name)
