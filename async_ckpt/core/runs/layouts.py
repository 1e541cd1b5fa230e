"""`layout.<attempt>.json`: the structures of the ranks' states, from which a reader learns which archives it needs.

In: a layout. Out: its text, and back. Knows nothing of: archives.

The file is only a hint: each archive has its own index. So a missing or damaged layout does no harm.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import Any

from ..fields import count, items, row, table, text, whole
from ..format.index import MAX_RANKS
from ..slicing.locator import StepItem, StepLayout, check_structure
from ..slicing.shares import KNOWN_VERSIONS
from ..slicing.shares import VERSION as SHARES_VERSION
from ..slicing.slices import Mesh, check_mesh
from ..storage.interface import Storage
from .manifest import seal, unseal
from .receipts import Table, layout_name


def dump(layout: StepLayout, table: Table) -> bytes:
    """The text of a layout, with the fields by which a later start of the ranks divides tensors in the same way."""
    fields = {
        **table.packed(),
        "shares": SHARES_VERSION,
        "structures": dict(layout.structures),
        "shared": Table(layout.shared).packed()["classes"],
        "root": layout.root,
    }
    if layout.items:
        fields["items"] = layout.items
    return seal(fields)


def parse(data: bytes) -> StepLayout:
    """Parse a layout. Raises ValueError, KeyError or TypeError if it is malformed, or has unknown shares."""
    raw = table(unseal(data))
    if raw["shares"] not in KNOWN_VERSIONS:
        raise ValueError(f"shares by version {raw['shares']}")
    of_all = Table.unpacked(raw)
    classes = of_all.classes
    shared = Table.unpacked({"classes": raw["shared"], "differing": ()}).classes
    if not all(classes.values()):
        raise ValueError("a structure belongs to no rank")
    structures = {digest: text(raw["structures"][digest]) for digest in classes}
    for lines in structures.values():
        check_structure(lines, sum(map(len, classes.values())))
    root = _mesh(raw["root"])
    if root is not None:
        check_mesh(root, MAX_RANKS)
    return StepLayout(classes, structures, shared, root, items(raw.get("items", []), _item), of_all.of_some)


def read(storage: Storage, folder: str, attempt: str) -> StepLayout | None:
    """The layout of an attempt; None if it is missing or damaged."""
    name = layout_name(attempt)
    with suppress(FileNotFoundError, ValueError, KeyError, TypeError, AttributeError):
        return parse(storage.read(f"{folder}/{name}" if folder else name)[0])
    return None


def _mesh(raw: Any) -> Mesh | None:
    return None if raw is None else Mesh(*row(raw, (whole, _counts, partial(items, of=whole), _counts)))


def _item(raw: object) -> StepItem:
    return StepItem(*row(raw, (partial(items, of=_key), text, _counts)))


def _key(raw: object) -> int | str:
    return raw if isinstance(raw, str) else whole(raw)


_counts = partial(items, of=count)
