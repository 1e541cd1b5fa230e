"""`tiers.json`: the places of a run, from near to far, for processes that were not given them.

In: the places of a checkpointer. Out: a file at each place that takes its saves; the places read from it. Knows nothing
of: the content of the places.

The file has no secrets: no credentials from URLs, and of the options only numbers and the location of the store.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any, Final, NamedTuple

from ...errors import CorruptCheckpointError, FormatVersionError
from ..fields import count, items, number, table, text
from ..spec import Keep, keep_of
from ..storage.interface import Storage
from ..storage.place import Place
from ..storage.url import local_path
from .manifest import seal, unseal
from .naming import Naming

NAME: Final = "tiers.json"
VERSION: Final = 1


class TiersFile(NamedTuple):
    """The places of a run with their options, the naming of its steps, and the bandwidth limit of further places."""

    places: tuple[Place, ...]
    naming: Naming
    max_bandwidth: float | None = None

    def write(self, storage: Storage, at: int) -> None:
        """Write the file at place number `at`, whose storage is `storage`."""
        rows = [
            {
                "url": _url_of(place),
                "options": place.open_options,
                "engine": place.engine,
                "keep": asdict(keep_of(place.keep)),
                "every": place.every,
                "volatile": place.is_volatile,
                "compression": place.compression,
            }
            for place in self.places
        ]
        limit, naming = self.max_bandwidth, asdict(self.naming)
        fields = {"version": VERSION, "at": at, "naming": naming, "max_bandwidth": limit, "places": rows}
        storage.replace(NAME, seal(fields))


def _url_of(place: Place) -> str:
    """The place for a process elsewhere: an absolute path, or a URL, also of a path on a filesystem of fsspec."""
    if place.is_local:
        return str(local_path(place.text))
    return place.shown if place.fs is None else place.storage().locate("")


def read(place: Place) -> TiersFile | None:
    """The places of the run at `place`, one of which is `place` with its own options; None for a run without the file.

    Raises CorruptCheckpointError, FormatVersionError and StorageUnavailableError.
    """
    storage = place.storage()
    try:
        data = storage.read(NAME)[0]
    except FileNotFoundError:
        return None
    shown = storage.locate(NAME)
    try:
        fields = table(unseal(data))
        if count(fields["version"]) > VERSION:
            raise FormatVersionError(
                f"{shown}: version {fields['version']}, this library reads up to {VERSION}; install a newer async_ckpt",
                path=shown,
                version=fields["version"],
            )
        places, at = [*items(fields["places"], _place)], count(fields["at"])
        own = places[at]
        places[at] = replace(place, keep=own.keep, every=own.every, volatile=own.volatile, compression=own.compression)
        limit = fields["max_bandwidth"]
        return TiersFile(tuple(places), _naming(fields["naming"]), None if limit is None else number(limit))
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise CorruptCheckpointError(
            f"{shown} cannot be read ({error!s:.200}); the next start of the training writes it again, or delete it",
            path=shown,
        ) from error


def _place(raw: object) -> Place:
    fields = table(raw)
    keep = table(fields["keep"])
    if keep["best"] is not None:
        keep["best"] = tuple(keep["best"])
    return Place(
        fields["url"],
        options=fields["options"],
        engine=fields["engine"],
        keep=Keep(**keep),
        every=fields["every"],
        volatile=fields["volatile"],
        compression=fields.get("compression"),
    )


def _naming(raw: object) -> Naming:
    fields: dict[str, Any] = table(raw)
    tracker = fields["tracker"]
    return Naming(text(fields["step_format"]), tuple(tracker) if isinstance(tracker, list) else tracker)
