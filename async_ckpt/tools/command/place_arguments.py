"""The places of texts on the command line.

In: paths and URLs, options of a store. Out: places. Knows nothing of: the contents of places.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from ... import Place
from ...plumbing import urls
from .output import USAGE, Answer

# How long a store may take to answer. A user waits at the terminal.
DEADLINE_SECONDS: Final = 30.0


def place_of(where: str, *, anonymous: bool = False, deadline: float = DEADLINE_SECONDS, **given: str | None) -> Place:
    """The place at a path or URL, with the given options of its store."""
    options: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if anonymous:
        options["skip_signature"] = True
    if not is_local(where):
        options["deadline_seconds"] = deadline
    elif options:
        raise Answer(f"{where}: --endpoint, --region, --profile and --anonymous are for URLs; leave them out", USAGE)
    return Place(where, options=options or None)


def place_like(place: Place, where: str) -> Place:
    """Another place. A URL gets the options of `place`."""
    return Place(where) if is_local(where) else Place(where, options=place.options)


def place_below(place: Place, name: str) -> Place:
    """A place inside another one."""
    return replace(place, url=f"{place.text.rstrip('/')}/{name}")


def parent_of(place: Place) -> tuple[Place, str]:
    """The place that contains this one, and its name there. The name is empty for a whole bucket or a whole disk."""
    parent, name = urls.place_and_name(place.url, fs=place.fs)
    return replace(place, url=parent), name


def is_local(where: str) -> bool:
    """Whether `where` is a path, or a `file://` URL."""
    return urls.scheme_of(where) in (None, "file")
