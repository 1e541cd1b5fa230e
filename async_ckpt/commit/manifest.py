"""`manifest.json`: its presence in a step's folder IS the commit.

In: what was written. Out: the manifest's text, and back. Knows nothing of: storage.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from ..errors import CorruptCheckpointError, FormatVersionError

NAME: Final = "manifest.json"
VERSION: Final = 2  # of what this library reads; a manifest without `elsewhere` is still of version 1


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
class Manifest:
    """One committed checkpoint. `created` is wall time in seconds since the epoch.

    `replaces` are the attempts at this step that stood here before, the last first: a root that holds one of those was away.
    `record` is the user's: plain JSON data, whose marks `rolling` and `ttl_seconds` retention obeys.
    """

    step: int
    attempt: str
    world_size: int
    created: float
    archives: tuple[Archive, ...]
    replaces: tuple[str, ...] = ()
    record: Mapping[str, Any] = field(default_factory=dict)
    elsewhere: tuple[Elsewhere, ...] = ()

    @property
    def own_archives(self) -> tuple[Archive, ...]:
        """All that lie in this step's folder."""
        beside = {other.archive: None for other in self.elsewhere if other.step == self.step}
        return (*self.archives, *beside)

    @property
    def num_bytes(self) -> int:
        return sum(archive.num_bytes for archive in self.own_archives)

    def dump(self) -> bytes:
        return (
            json.dumps(
                {"format": "async_ckpt", "version": 2 if self.elsewhere else 1, **asdict(self)}, indent=1
            )
            + "\n"
        ).encode()


def parse(data: bytes, *, path: str) -> Manifest:
    """Raises CorruptCheckpointError for text that is no manifest, FormatVersionError for one from the future."""
    try:
        raw = json.loads(data)
        if raw["version"] > VERSION:
            raise FormatVersionError(
                f"{path}: manifest version {raw['version']}, this library reads up to {VERSION}; "
                "install a newer async_ckpt",
                path=path,
                version=raw["version"],
            )
        archives = tuple(map(_archive, raw["archives"]))
        if not archives:
            raise ValueError("it names no archive")
        return Manifest(
            int(raw["step"]),
            str(raw["attempt"]),
            int(raw["world_size"]),
            float(raw["created"]),
            archives,
            tuple(map(str, raw.get("replaces", ()))),
            dict(raw.get("record", {})),
            tuple(
                Elsewhere(str(b["group"]), int(b["step"]), _folder_name(b["folder"]), _archive(b["archive"]))
                for b in raw.get("elsewhere", ())
            ),
        )
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise CorruptCheckpointError(f"{path}: not a manifest ({error!r:.300})", path=path) from error


def _archive(raw: Mapping[str, Any]) -> Archive:
    return Archive(_file_name(raw["name"]), int(raw["num_bytes"]), str(raw["digest"]))


def _file_name(name: object) -> str:
    """A manifest may name only what lies beside it."""
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._~-]{0,254}", name):
        raise ValueError(f"{name!r:.300} is not a file name")
    return name


def _folder_name(name: object) -> str:
    """And what it borrows lies in a folder beside its own."""
    if not isinstance(name, str) or not re.fullmatch(r"[^/\\\0.][^/\\\0]{0,254}", name):
        raise ValueError(f"{name!r:.300} is not the name of a step's folder")
    return name
