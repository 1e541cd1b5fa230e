"""`checkpoints.jsonl`: one line per committed step, for people and their scripts. Nothing in this library trusts it.

In: manifests. Out: lines, and lines back from a file that somebody may have torn. Knows nothing of: storage.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, Final

from .manifest import Manifest

NAME: Final = "checkpoints.jsonl"


def dump(manifests: Iterable[tuple[str, Manifest]]) -> bytes:
    """The journal of (folder, manifest) pairs, in the order given."""
    return b"".join(
        json.dumps(
            {
                "step": manifest.step,
                "path": f"{folder}/{manifest.archives[0].name}",
                "num_bytes": manifest.num_bytes,
                "created": manifest.created,
            }
        ).encode()
        + b"\n"
        for folder, manifest in manifests
    )


def parse(data: bytes) -> list[dict[str, Any]]:
    """The records of a journal. A line that is no JSON object, such as a torn last one, is passed over."""
    records = []
    for line in data.splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict):
            records.append(record)
    return records
