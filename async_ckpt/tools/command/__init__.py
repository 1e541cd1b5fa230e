"""The command `async-ckpt`: what is there, whether it is whole, and what is in it.

- `main.py` has the words of the command, and the exit status; `options.py` the options that they share.
- `screen.py` writes tables, or JSON, and has the answer that is no.
- `selection.py` has the runs and steps that a place names, `states/` the items of a checkpoint of any format.
- Each word has a module that finds out and shows: `listing.py` (ls), `inspection.py`, `soundness.py` (verify),
  `comparing/` (diff), `copying.py` (cp), `pruning.py`, `repair.py`, `conversion.py` (extract, convert), `bench.py`,
  `doctor.py`; `page/` draws whole runs (page), and `live/` has words that go on until they are ended (follow, watch).

It calls the public API, and `loading` and `runs` where that does not suffice. Nothing imports it.
"""
