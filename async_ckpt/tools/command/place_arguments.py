"""The places that texts on the command line name.

In: paths and URLs, options of a store. Out: places. Knows nothing of: what is there.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from ... import Place
from ...plumbing import urls
from .output import USAGE, Answer

# How long a store may not answer: somebody waits at the terminal.
DEADLINE_SECONDS: Final = 30.0


def place_of(where: str, *, anonymous: bool = False, deadline: float = DEADLINE_SECONDS, **given: str | None) -> Place:
    """The place at a path or URL, with the options of its store that are given."""
    options: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if anonymous:
        options["skip_signature"] = True
    if not is_local(where):
        options["deadline_seconds"] = deadline
    elif options:
        raise Answer(f"{where}: --endpoint, --region, --profile and --anonymous are for URLs; leave them out", USAGE)
    return Place(where, options=options or None)


def place_like(place: Place, where: str) -> Place:
    """Another place, at the store of this one if it is at a store."""
    return Place(where) if is_local(where) else Place(where, options=place.options)


def place_below(place: Place, name: str) -> Place:
    """A place inside another one."""
    return replace(place, url=f"{place.text.rstrip('/')}/{name}")


def parent_of(place: Place) -> tuple[Place, str]:
    """The place that contains this one, and its name there: empty for a whole bucket, or a whole disk."""
    parent, name = urls.place_and_name(place.url, fs=place.fs)
    return replace(place, url=parent), name


def is_local(where: str) -> bool:
    """Whether this is a path, or the `file://` URL of one."""
    return urls.scheme_of(where) in (None, "file")
