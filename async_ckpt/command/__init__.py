"""The command `async-ckpt`: what is there, whether it is whole, and what is in it.

- `main.py` has the words of the command, their options, and the exit status; `screen.py` writes tables, or JSON.
- `listing.py`: the steps of a run, the runs in a folder, the versions of a publication.
- `inspection.py`: the names in a checkpoint, with shapes, places and statistics.
- `soundness.py`: every byte against its digest. `doctor.py`: what this machine has.

It calls the public API, and `loading` and `runs` where that does not suffice. Nothing imports it.
"""
