"""Agreement: which steps of a run are committed.

`roots.py` is a run at several roots, `run.py` at one. `root.py` lists a root, `manifest.py` is the commit of a step,
and `starts.py` the right of one process to commit. `retention.py` chooses the steps to delete, `sweep.py` deletes. For
people and other programs: `announce.py`, `journal.py`, `naming.py`, `record.py`, `foreign_entries.py`. For several
ranks: `receipts.py`, `layouts.py`, `coverage.py`.
"""
