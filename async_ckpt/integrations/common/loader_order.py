"""The order of a trainer's data, in one small file of its checkpoint: what that of the live loaders is compared with.

In: the data loaders of a trainer. Out: a file; warnings. Knows nothing of: the trainer, and where the file is.

A trainer goes on at a number of batches, which stand for other items if its loaders are others than at the save.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping
from typing import Any, Final

from ...plumbing import loaders as loader_parts

# The hub is not given files whose names begin with "_".
ORDER: Final = "_async_ckpt.loaders.json"
_log = logging.getLogger("async_ckpt")


def order_file(loaders: Iterable[Any]) -> dict[str, bytes]:
    """The file of the loaders' facts, by its name; none if there are none."""
    facts = [loader_parts.loader_facts(loader) for loader in loaders]
    return {ORDER: json.dumps(facts).encode()} if any(facts) else {}


def warn_of_order(files: Mapping[str, bytes], loaders: Iterable[Any], checkpoint: str) -> None:
    """Warn of each loader that gives its data in another order than when these files of a checkpoint were written.

    Checkpoints of earlier versions, and of the plain trainer, do not say.
    """
    for number, (live, saved) in enumerate(zip(loaders, json.loads(files.get(ORDER, b"[]")), strict=False)):
        if facts := loader_parts.order_differences(live, saved):
            _log.warning(loader_parts.ANOTHER_ORDER, checkpoint, f"data loader {number}", ", ".join(facts))
