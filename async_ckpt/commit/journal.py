"""`checkpoints.jsonl`: one line per committed step, for people and their scripts. Nothing in this library trusts it.

In: manifests. Out: lines, and lines back from a file that somebody may have torn. Knows nothing of: storage.

A line is what tinker-cookbook calls a checkpoint record: `name`, `batch` and `state_path`, all that the record of the
save holds beside None, and the library's own `step, path, num_bytes, created`. The file is replaced whole, so its last
line is never torn by us.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, Final

from .manifest import Manifest

NAME: Final = "checkpoints.jsonl"


def dump(commits: Iterable[tuple[str, str, Manifest]]) -> bytes:
    """The journal of these commits, in the order given: the archive's path below the root, in full, and the manifest."""
    return b"".join(json.dumps(_line(*commit)).encode() + b"\n" for commit in commits)


def _line(path: str, state_path: str, made: Manifest) -> dict[str, Any]:
    ours = {
        "state_path": state_path,
        "step": made.step,
        "path": path,
        "num_bytes": made.num_bytes,
        "created": made.created,
    }
    theirs = {key: value for key, value in made.record.items() if value is not None}
    return {"name": f"{made.step:06d}", "batch": made.step} | theirs | ours


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
