"""`checkpoints.jsonl`: one line per committed step, for people and their scripts. Nothing in this library trusts it.

In: manifests. Out: lines; records from lines, some of which may be torn. Knows nothing of: storage.

A line is a checkpoint record of tinker-cookbook: `name`, `batch` and `state_path`, every entry of the save's record
that is not None, and the library's own `step, path, num_bytes, created`. The file is replaced atomically, so this
library never leaves a torn line.

`batch` is the next batch to train. Unless the record has a `batch`, it is the saved step plus 1.

`state_path` is relative to the folder of the journal, because a full path would be wrong once the run is copied or
moved. tinker-cookbook passes it to its client unchanged, and the client's service resolves it below its own base, as it
does with its own names (`tinker://model/weights/000100`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, Final

from ..fields import parsed
from .manifest import Manifest
from .naming import JOURNAL

NAME: Final = JOURNAL


def dump(commits: Iterable[tuple[str, Manifest]]) -> bytes:
    """The journal of these commits, in the order given. Each commit is its path below the root, and its manifest."""
    return b"".join(json.dumps(_line(path, manifest)).encode() + b"\n" for path, manifest in commits)


def _line(path: str, manifest: Manifest) -> dict[str, Any]:
    own_fields = {
        "state_path": path,
        "step": manifest.step,
        "path": path,
        "num_bytes": manifest.num_bytes,
        "created": manifest.created,
    }
    user_fields = {key: value for key, value in manifest.record.items() if value is not None}
    return {"name": f"{manifest.step:06d}", "batch": manifest.step + 1} | user_fields | own_fields


def parse(data: bytes) -> list[dict[str, Any]]:
    """The records of a journal. A line that is not a JSON object, such as a torn last line, is skipped."""
    records = []
    for line in data.splitlines():
        try:
            record = parsed(line)
        except ValueError:
            continue
        if isinstance(record, dict):
            records.append(record)
    return records
