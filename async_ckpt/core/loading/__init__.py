"""Loading: from a path to tensors.

- `archives/` opens what was saved; `live/` has the objects that a restore fills.
- `load` builds a state; `restore` fills live objects; `fill` reads from archives into memory.
- `run_restore` is one call of a checkpointer's `restore`; `resume` chooses the step that a run continues from;
  `broadcast` has ranks read a part each and broadcast it.
- `verify` compares with digests; `catch_up` copies steps from place to place.
"""
