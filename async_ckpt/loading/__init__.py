"""A load, told once: from a path to tensors.

- `load` builds a state; `restore` fills live objects; `fill` reads from archives into memory, and `ranges` bytes of tensors.
- `resume` picks the step that a run goes on from; `sharing` has ranks read a part each and broadcast it.
- `run_reader` is the reading side of a checkpointer; `verify`, `catch_up` and `rebuild` need no live object.
- `archives/` is what was saved, `live/` what is filled.
"""
