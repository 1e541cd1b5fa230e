"""The command `async-ckpt`: lists, verifies and changes checkpoints.

- `main.py` declares the subcommands; `options.py` has their shared options, and `exit_statuses.py` the exit status.
- `output.py` prints tables or JSON, and defines `Answer`, the error for a negative answer.
- `place_kinds.py` finds the kind of a place and of everything below it; `selection.py` opens the runs and steps that a
  place names, `run_places.py` finds the places of a run, `trainer_folders.py` the checkpoints of frameworks.
- Each subcommand has a module with a function `show`: `listing.py` (ls), `inspection.py`, `soundness.py` (verify),
  `comparing/` (diff), `copying.py` (cp), `pruning.py`, `marking.py`, `repair.py`, `conversion.py` (extract, convert),
  `bench.py`, `doctor.py`; `page/` draws whole runs (page), and `live/` has the subcommands that run until they are
  stopped (follow, move, watch).

The command uses the public API and, where that is not enough, `plumbing` and `weights`. Nothing imports it.
"""
