"""Loading: from a path to tensors.

- `archives/` opens saved archives; `live/` has the objects that a restore fills.
- `load` builds a state; `restore` fills live objects; `fill` reads from archives into memory.
- `run_restore` is one call of a checkpointer's `restore`, for which the ranks agree on a step; `broadcast` lets each
  rank read a part and broadcast it.
- `verify` compares archives with their digests; `catch_up` copies steps from place to place.
"""
