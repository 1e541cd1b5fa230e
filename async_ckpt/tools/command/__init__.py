"""The command `async-ckpt`: what is there, whether it is whole, and what is in it.

- `main.py` declares the words of the command; `options.py` has the options that they share, `exit_statuses.py` the exit
  status.
- `output.py` writes tables, or JSON, and has the answer that is no.
- `place_kinds.py` says what kind of thing is at a place and below it; `selection.py` has the runs and steps that a place
  names, `run_places.py` the places of a run, `trainer_folders.py` the checkpoints of frameworks.
- Each word has a module whose `show` finds out and shows: `listing.py` (ls), `inspection.py`, `soundness.py` (verify),
  `comparing/` (diff), `copying.py` (cp), `pruning.py`, `marking.py`, `repair.py`, `conversion.py` (extract, convert),
  `bench.py`, `doctor.py`; `page/` draws whole runs (page), and `live/` has words that go on until they are ended
  (follow, move, watch).

It calls the public API, and `loading` and `runs` where that does not suffice. Nothing imports it.
"""
