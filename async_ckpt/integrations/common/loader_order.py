"""The order of a trainer's data, in one small file of its checkpoint, which is compared with the live loaders.

In: the data loaders of a trainer. Out: a file; warnings. Knows nothing of: the trainer, the place of the file.

A trainer resumes after a number of batches. If its loaders differ from those of the save, these are other batches.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping
from typing import Any, Final

from ...plumbing import loaders as loader_parts

# Files whose names begin with "_" are not uploaded to the hub.
ORDER: Final = "_async_ckpt.loaders.json"
_log = logging.getLogger("async_ckpt")


def order_file(loaders: Iterable[Any]) -> dict[str, bytes]:
    """The file with the facts about the loaders, by its name; empty if there are no facts."""
    facts = [loader_parts.loader_facts(loader) for loader in loaders]
    return {ORDER: json.dumps(facts).encode()} if any(facts) else {}


def warn_of_order(files: Mapping[str, bytes], loaders: Iterable[Any], checkpoint: str) -> None:
    """Warn about each loader whose order differs from that in these files of a checkpoint.

    Checkpoints of earlier versions, and of the framework's own trainer, lack the file.
    """
    for number, (live, saved) in enumerate(zip(loaders, json.loads(files.get(ORDER, b"[]")), strict=False)):
        if facts := loader_parts.order_differences(live, saved):
            _log.warning(loader_parts.ANOTHER_ORDER, checkpoint, f"data loader {number}", ", ".join(facts))
