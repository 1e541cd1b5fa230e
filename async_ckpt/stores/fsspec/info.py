"""Things that buckets and file trees have in common.

In: nothing. Out: the types that describe an object, an error, names. Knows nothing of: filesystems.
"""

from __future__ import annotations

import os
from typing import NamedTuple, Protocol

from ...plumbing import store_facts


class Moment(Protocol):
    """A `datetime`; its module is a clock, and clocks are not imported here."""

    def timestamp(self) -> float: ...


class Info(NamedTuple):
    """A store's description of an object."""

    num_bytes: int
    version: str


class ReplacedError(Exception):
    """The object is no longer the one that was opened."""


def probe_name() -> str:
    return f"{store_facts.PROBE}{os.urandom(4).hex()}"
