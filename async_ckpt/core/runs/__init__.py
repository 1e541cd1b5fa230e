"""Runs: who may commit a step, which commits count, and which steps are kept.

`roots.py` is a run at several roots, `run.py` a run at one. `root.py` lists a root, `manifest.py` commits a step,
`tenure.py` is the right of one process to commit, and `starts.py` decides which commits count. `marks.py` records which
steps are good or bad, `retention.py` chooses the steps to delete, `sweep.py` deletes. For people and other programs:
`tiers_file.py`, `trackers.py`, `journal.py`, `naming.py`, `record.py`, `foreign_entries.py`. For several ranks:
`receipts.py`, `layouts.py`, `coverage.py`. Code outside the core uses the names imported here, by `plumbing.runs`.
"""

from __future__ import annotations

# isort: off
from . import journal as journal, layouts as layouts, manifest, tiers_file as tiers_file
from .trackers import event_of as event_of
from .foreign_entries import OF_DCP as OF_DCP, possible_steps as possible_steps, step_formats as step_formats
from .manifest import Manifest as Manifest, is_retired_name as is_retired_name
from .naming import (
    NAMINGS as NAMINGS, STEP_FORMAT as STEP_FORMAT, TRACKER as TRACKER, TRACKERS as TRACKERS, Tracker as Tracker,
    parse_step_name as parse_step_name, tracker_of as tracker_of, words_for as words_for,
)  # fmt: skip
from .receipts import broken_folders as broken_folders
from .record import number as number
from .retention import (
    Commits as Commits, best_of as best_of, deletable_steps as deletable_steps,
    describe_missing_metric as describe_missing_metric,
)  # fmt: skip
from .root import formats_at as formats_at
from .roots import Roots as Roots
from .run import Run as Run
from .starts import Start as Start, about_start as about_start, split_starts as split_starts
from .sweep import is_library_name as is_library_name
from .tenure import lives as lives, refuse_if_alive as refuse_if_alive
from .tiers_file import TiersFile as TiersFile

MANIFEST_NAME = manifest.NAME
parse_manifest = manifest.parse
