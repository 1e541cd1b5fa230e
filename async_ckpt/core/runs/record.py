"""The record of a save: a user's mapping beside the checkpoint, as plain JSON data.

In: a mapping. Out: a copy that a manifest can hold, or an error that names the bad value. Knows nothing of: storage.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final

from ..spec import flag, integer, number_above_0

# The limit of a record. It is read with every manifest, and is part of the journal, which every commit rewrites.
RECORD_BYTES: Final = 64 << 10
# The field, in steps saved through torch.distributed.checkpoint, for the part of its metadata that does not follow from
# the state.
DCP_RECORD: Final = "torch.distributed.checkpoint"
_MAX_DEPTH: Final = 32
# Fields that the library itself writes.
_OURS: Final = ("step", "path", "num_bytes", "created", "state_path")


def plain_record(
    record: Mapping[str, Any] | None, *, rolling: bool = False, ttl_seconds: float | None = None
) -> dict[str, Any]:
    """A copy of a record, with the fields that retention uses. Raises TypeError or ValueError, naming the bad value.

    Floats that are not finite become None: JSON cannot express them, and a loss of nan must not fail the checkpoint.
    """
    if record is not None and not isinstance(record, Mapping):
        raise TypeError(f'record must be a mapping such as {{"loss": 0.5}}, got {record!r:.100}')
    fields = dict(record or {})
    if flag("rolling", rolling):
        fields["rolling"] = True
    if ttl_seconds is not None:
        fields["ttl_seconds"] = ttl_seconds
    _check_keys(fields)
    plain: dict[str, Any] = _plain(fields, "record", 0)
    try:
        num_bytes = len(json.dumps(plain))
    except ValueError as error:  # an integer of thousands of digits
        raise ValueError(f"record cannot be written as JSON: {error}") from error
    if num_bytes > RECORD_BYTES:
        raise ValueError(
            f"record is {num_bytes:,} bytes of JSON; the limit is {RECORD_BYTES:,}. Put large values into the state"
        )
    return plain


def number(value: object) -> float | None:
    """The value if it is a finite number, else None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if isinstance(value, int) or math.isfinite(value) else None


def _check_keys(record: Mapping[str, Any]) -> None:
    """Check the fields that retention and readers of the journal rely on."""
    for key in _OURS:
        if key in record:
            raise ValueError(f'record["{key}"] is reserved for async_ckpt; use another name')
    name, batch, rolling, ttl_seconds = (record.get(k) for k in ("name", "batch", "rolling", "ttl_seconds"))
    if name is not None and not isinstance(name, str):
        raise ValueError(f'record["name"] must be a string, got {name!r:.100}')
    if batch is not None:
        try:
            integer(batch)
        except TypeError:
            raise ValueError(f'record["batch"] must be a whole number, got {batch!r:.100}') from None
    if rolling is not None and not isinstance(rolling, bool):
        raise ValueError(f'record["rolling"] must be True or False, got {rolling!r:.100}')
    if ttl_seconds is not None:
        number_above_0("ttl_seconds", ttl_seconds)


def _plain(value: Any, name: str, depth: int) -> Any:
    """A copy of plain data. Raises TypeError, naming the first value that is not plain."""
    if depth > _MAX_DEPTH:
        raise ValueError(f"{name:.200} is nested more than {_MAX_DEPTH} deep; put it into the state")
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return number(value)
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise TypeError(f"{name:.200} has the key {key!r:.100}; keys must be strings")
        return {key: _plain(item, f'{name}["{key}"]', depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, f"{name}[{index}]", depth + 1) for index, item in enumerate(value)]
    if type(value).__module__ in ("torch", "numpy") and getattr(value, "ndim", None) == 0:
        with suppress(Exception):  # such as a tensor without data
            return _plain(value.item(), name, depth + 1)
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    raise TypeError(
        f"{name:.200} is of type {kind}, which is not plain JSON data; give a number or a string, such as value.item()"
    )
